// Vectors of 16 floats, conversions, and products of rows with packed matrices; for native.cpp.
//
// Activations and weights are of type T, float or bfloat16; sums are float. A row's sums come from the same operations
// in the same order whatever rows are beside it. Where the processor multiplies tiles of bfloat16 (AMX) they are used.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

typedef float V __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));
constexpr long W = 16;
#ifdef __clang__
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, (I){__VA_ARGS__})
#endif
#ifdef __AVX512F__
constexpr long NV = 4, MR = 6;  // 24 of 32 registers add up
#else
constexpr long NV = 1, MR = 4;
#endif
constexpr long NR = NV * W;
constexpr long CHUNK = 64;  // rows that go through a layer's steps together, so that they stay in the cache

struct bf16 { uint16_t bits; };

inline long up(long n, long to) { return (n + to - 1) / to * to; }
inline float wide(float x) { return x; }
inline float wide(bf16 x) { uint32_t u = uint32_t(x.bits) << 16; float f; memcpy(&f, &u, 4); return f; }
inline void narrow(float& to, float x) { to = x; }
inline void narrow(bf16& to, float x) {
    uint32_t u; memcpy(&u, &x, 4);
    to.bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline V load(const float* p) { V v; memcpy(&v, p, 64); return v; }
inline V load(const bf16* p) { H h; memcpy(&h, p, 32); return (V)(__builtin_convertvector(h, U) << 16); }
inline void store(float* p, V v) { memcpy(p, &v, 64); }
inline void store(bf16* p, V v) {
    const U u = (U)v;
    const H h = __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, H);
    memcpy(p, &h, 32);
}
inline V splat(float x) { return V{} + x; }

template <class A, class B> inline void copy(A* to, const B* from, long n) {
    long i = 0;
    for (; i < n / W * W; i += W) store(to + i, load(from + i));
    for (; i < n; i++) narrow(to[i], wide(from[i]));
}

// 2 to the power of the nearest whole number, times a polynomial (Cephes' expf); about 1 ulp.
inline V exp_(V x) {
    const V low = splat(-87.0f), high = splat(88.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const V magic = splat(12582912.0f);
    const V n = (x * 1.44269504088896341f + magic) - magic;
    const V r = x - n * 0.693359375f + n * 2.12194440e-4f;
    V p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (V)((I)p + (__builtin_convertvector(n, I) << 23));
}

inline float sum(V v) {
    float t[W];
    store(t, v);
    for (long step = W / 2; step; step /= 2) for (long i = 0; i < step; i++) t[i] += t[i + step];
    return t[0];
}

// Lane i: the sum of s[i].
inline V sums(V* s) {
    for (int i = 0; i < 8; i++)
        s[i] = MIX(s[2 * i], s[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
               MIX(s[2 * i], s[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    for (int i = 0; i < 4; i++)
        s[i] = MIX(s[2 * i], s[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               MIX(s[2 * i], s[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    for (int i = 0; i < 2; i++)
        s[i] = MIX(s[2 * i], s[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               MIX(s[2 * i], s[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    return MIX(s[0], s[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           MIX(s[0], s[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// Scratch of this thread, by use; it grows and stays. Zeros at first: what pads a row has to be a number.
template <class A> inline A* scratch(int use, size_t count) {
    static thread_local std::vector<char> held[16];
    const size_t bytes = count * sizeof(A) + 64;
    if (held[use].size() < bytes) held[use].assign(bytes + bytes / 2, 0);
    return (A*)((uintptr_t(held[use].data()) + 63) / 64 * 64);
}

// -- tiles ------------------------------------------------------------------------------------------------------------

#ifdef __AMX_BF16__
inline bool tiles() {  // Linux grants them to a process that asks
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
}
// All eight tiles 16 rows of 64 bytes. Others on this thread configure them for themselves.
struct Tiles {
    Tiles() {
        alignas(64) uint8_t config[64] = {1};
        for (int t = 0; t < 8; t++) config[16 + 2 * t] = 64, config[48 + t] = 16;
        _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
};
#else
inline bool tiles() { return false; }
#endif

// Numbers that a row of K takes as the left side of a product.
template <class T> inline long stride(long K) { return K; }
template <> inline long stride<bf16>(long K) { return tiles() ? up(K, 32) : K; }
// Columns that a result has room for: whole panels.
inline long columns(long N) { return up(N, NR > 32 ? NR : 32); }

template <class T, int M>
void block(const float* a, long lda, const T* w, long K, float* c, long ldc) {
    V acc[M][NV];
    for (int m = 0; m < M; m++) for (int v = 0; v < NV; v++) acc[m][v] = V{};
    for (long k = 0; k < K; k++, w += NR) {
        V b[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) b[v] = load(w + v * W);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const V x = splat(a[m * lda + k]);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[m][v] += x * b[v];
        }
    }
    for (int m = 0; m < M; m++) for (int v = 0; v < NV; v++) store(c + m * ldc + v * W, acc[m][v]);
}

inline const float* floats(const float* a, long, long) { return a; }
inline const float* floats(const bf16* a, long rows, long lda) {
    float* to = scratch<float>(15, rows * lda);
    copy(to, a, rows * lda);
    return to;
}

// c [rows up to 16, columns(N)] = a [rows up to 16, stride(K)] @ w, packed.
template <class T>
void product(const T* a, long rows, const T* w, long K, long N, float* c) {
    const long lda = stride<T>(K), ldc = columns(N);
#ifdef __AMX_BF16__
    if (sizeof(T) == 2 && tiles()) {
        const Tiles configured;
        const long steps = lda / 32;
        for (long n = 0; n < N; n += 32, w += steps * 1024) {
            for (long m = 0; m < rows; m += 32) {
                const bool two = rows - m > 16;
                const T *one = a + m * lda, *other = one + 16 * lda;
                _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
                for (long k = 0; k < steps; k++) {
                    _tile_loadd(6, w + k * 1024, 64);
                    _tile_loadd(7, w + k * 1024 + 512, 64);
                    _tile_loadd(4, one + k * 32, lda * 2);
                    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
                    if (!two) continue;
                    _tile_loadd(5, other + k * 32, lda * 2);
                    _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
                }
                float* to = c + m * ldc + n;
                _tile_stored(0, to, ldc * 4); _tile_stored(1, to + 16, ldc * 4);
                if (!two) continue;
                _tile_stored(2, to + 16 * ldc, ldc * 4); _tile_stored(3, to + 16 * ldc + 16, ldc * 4);
            }
        }
        return;
    }
#endif
    const float* x = floats(a, rows, lda);
    for (long n = 0; n < N; n += NR, w += K * NR) {
        for (long m = 0; m < rows; m += MR) {
            const float* from = x + m * lda;
            float* to = c + m * ldc + n;
            switch (rows - m < MR ? rows - m : MR) {
                case 1: block<T, 1>(from, lda, w, K, to, ldc); break;
                case 2: block<T, 2>(from, lda, w, K, to, ldc); break;
                case 3: block<T, 3>(from, lda, w, K, to, ldc); break;
                case 4: block<T, 4>(from, lda, w, K, to, ldc); break;
                case 5: block<T, (MR > 4 ? 5 : 1)>(from, lda, w, K, to, ldc); break;
                default: block<T, MR>(from, lda, w, K, to, ldc);
            }
        }
    }
}

// Numbers of a packed [K, N].
template <class T> inline long packed(long K, long N) {
    return sizeof(T) == 2 && tiles() ? up(K, 32) * up(N, 32) : K * up(N, NR);
}

template <class T>
void pack(const T* from, long K, long N, long by_k, long by_n, T* to) {
    const auto at = [&](long k, long n) { return k < K && n < N ? from[k * by_k + n * by_n] : T{}; };
    if (sizeof(T) == 2 && tiles()) {  // tiles of 16 pairs of k by 16 columns, two beside each other
        for (long n = 0; n < N; n += 32)
            for (long k = 0; k < K; k += 32)
                for (long half = 0; half < 32; half += 16)
                    for (long pair = 0; pair < 32; pair += 2)
                        for (long i = 0; i < 16; i++)
                            *to++ = at(k + pair, n + half + i), *to++ = at(k + pair + 1, n + half + i);
        return;
    }
    for (long n = 0; n < N; n += NR) for (long k = 0; k < K; k++) for (long i = 0; i < NR; i++) *to++ = at(k, n + i);
}

}  // namespace
