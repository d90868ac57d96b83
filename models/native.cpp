// Decode on a CPU: what lies between two collectives of a layer, as one call each. Built by models/native_build.py.
//
// Rows are independent: a row's numbers come from the same operations in the same order whatever rows are beside it.
// Weights and what crosses a call are of type T (float or bfloat16); everything inside is float. Matrices are packed
// into panels of NR columns, [N / NR][K][NR], the last one filled up with zeros.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

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

struct bf16 { uint16_t bits; };

inline float wide(float x) { return x; }
inline float wide(bf16 x) { uint32_t u = uint32_t(x.bits) << 16; float f; memcpy(&f, &u, 4); return f; }
inline void narrow(float& to, float x) { to = x; }
inline void narrow(bf16& to, float x) {
    uint32_t u; memcpy(&u, &x, 4);
    to.bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline V load(const float* p) { V v; memcpy(&v, p, 64); return v; }
inline V load(const bf16* p) { H h; memcpy(&h, p, 32); return (V)(__builtin_convertvector(h, U) << 16); }
inline void store(float* p, V v) { memcpy(p, &v, 64); }
inline V splat(float x) { return V{} + x; }

// 2 to the power of the nearest whole number, times a polynomial (Cephes' expf); about 1 ulp.
inline V exp_(V x) {
    const V low = splat(-87.0f), high = splat(88.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const V magic = splat(12582912.0f);
    V n = (x * 1.44269504088896341f + magic) - magic;
    V r = x - n * 0.693359375f + n * 2.12194440e-4f;
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
    float t[W], s = 0; store(t, v);
    for (long step = W / 2; step; step /= 2) for (long i = 0; i < step; i++) t[i] += t[i + step];
    s = t[0];
    return s;
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

// Scratch of this thread, by use; it grows and stays.
inline float* scratch(int use, size_t count) {
    static thread_local std::vector<float> held[12];
    if (held[use].size() < count) held[use].resize(count + count / 2);
    return held[use].data();
}

// -- products ---------------------------------------------------------------------------------------------------------

template <class T, int M>
void block(const float* const* a, const T* w, long K, long n, float* const* c, bool add) {
    V acc[M][NV];
    for (int m = 0; m < M; m++) for (int v = 0; v < NV; v++) acc[m][v] = V{};
    for (long k = 0; k < K; k++, w += NR) {
        V b[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) b[v] = load(w + v * W);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const V x = splat(a[m][k]);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[m][v] += x * b[v];
        }
    }
    for (int m = 0; m < M; m++) {
        if (n == NR && !add) {
            for (int v = 0; v < NV; v++) store(c[m] + v * W, acc[m][v]);
            continue;
        }
        float t[NR];
        for (int v = 0; v < NV; v++) store(t + v * W, acc[m][v]);
        for (long i = 0; i < n; i++) c[m][i] = add ? c[m][i] + t[i] : t[i];
    }
}

// c[m] (+)= a[m] @ w, for rows wherever they are. w: packed [K, N].
template <class T>
void product(const float* const* a, long rows, const T* w, long K, long N, float* const* c, bool add = false) {
    for (long n = 0; n < N; n += NR, w += K * NR) {
        const long width = N - n < NR ? N - n : NR;
        for (long m = 0; m < rows; m += MR) {
            float* to[MR];
            const long left = rows - m < MR ? rows - m : MR;
            for (long i = 0; i < left; i++) to[i] = c[m + i] + n;
            switch (left) {
                case 1: block<T, 1>(a + m, w, K, width, to, add); break;
                case 2: block<T, 2>(a + m, w, K, width, to, add); break;
                case 3: block<T, 3>(a + m, w, K, width, to, add); break;
                case 4: block<T, 4>(a + m, w, K, width, to, add); break;
                case 5: block<T, (MR > 4 ? 5 : 1)>(a + m, w, K, width, to, add); break;
                default: block<T, MR>(a + m, w, K, width, to, add);
            }
        }
    }
}

struct Rows {  // pointers to rows side by side
    std::vector<float*> at;
    Rows(float* base, long rows, long stride) { for (long i = 0; i < rows; i++) at.push_back(base + i * stride); }
    float* const* out() const { return at.data(); }
    const float* const* in() const { return at.data(); }
};

template <class T>
void normed(const T* x, const T* weight, long n, float eps, float* out) {
    V s = V{};
    long i = 0;
    for (; i + W <= n; i += W) { const V v = load(x + i); s += v * v; }
    float square = sum(s);
    for (; i < n; i++) square += wide(x[i]) * wide(x[i]);
    const float scale = 1.0f / std::sqrt(square / n + eps);
    for (i = 0; i + W <= n; i += W) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < n; i++) out[i] = wide(x[i]) * scale * wide(weight[i]);
}

// -- attention --------------------------------------------------------------------------------------------------------

template <class T> struct Layer {
    int64_t hidden, q, k, dim, block_size, experts, first, local, columns, top_k, normalise, leader;
    double eps;
    T *pool;
    const T *norm_in, *norm_heads, *qkv, *qkv_bias, *out, *out_bias, *norm_post, *router, *up, *down;
};

struct Batch {
    int64_t rows, depth;
    const int64_t *positions, *slots;
    const int32_t *tables;  // [slots, depth]
    float *cos, *sin;       // [rows, dim / 2]
};

// One query head's scores of a block's tokens. q is scaled.
inline void scores(const float* q, const float* keys, long tokens, long dim, float* out) {
    if (dim % W == 0) {
        for (long t = 0; t < tokens; t += W) {
            V s[W];
            const long here = tokens - t < W ? tokens - t : W;
            for (long i = 0; i < W; i++) {
                s[i] = V{};
                if (i < here) for (long d = 0; d < dim; d += W) s[i] += load(q + d) * load(keys + (t + i) * dim + d);
            }
            float all[W];
            store(all, sums(s));
            memcpy(out + t, all, here * sizeof(float));
        }
        return;
    }
    for (long t = 0; t < tokens; t++) {
        float s = 0;
        for (long d = 0; d < dim; d++) s += q[d] * keys[t * dim + d];
        out[t] = s;
    }
}

// The same for blocks of 16 tokens and known head sizes.
template <int D>
inline void scores16(const float* q, const float* keys, float* out) {
    V s[W], qs[D / W];
    for (int d = 0; d < D / W; d++) qs[d] = load(q + d * W);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
        s[i] = qs[0] * load(keys + i * D);
#pragma GCC unroll 8
        for (int d = 1; d < D / W; d++) s[i] += qs[d] * load(keys + i * D + d * W);
    }
    store(out, sums(s));
}

inline void weigh(const float* p, const float* values, long tokens, long dim, float* out) {
    long d = 0;
    for (; d + W <= dim; d += W) {
        V one = load(out + d), two = V{};
        long t = 0;
        for (; t + 2 <= tokens; t += 2) {
            one += splat(p[t]) * load(values + t * dim + d);
            two += splat(p[t + 1]) * load(values + (t + 1) * dim + d);
        }
        if (t < tokens) one += splat(p[t]) * load(values + t * dim + d);
        store(out + d, one + two);
    }
    if (d == dim) return;
    for (long t = 0; t < tokens; t++) for (long i = d; i < dim; i++) out[i] += p[t] * values[t * dim + i];
}

template <int D>
inline void weigh16(const float* p, const float* values, float* out) {
    V one[D / W], two[D / W];
    for (int d = 0; d < D / W; d++) one[d] = load(out + d * W), two[d] = V{};
#pragma GCC unroll 8
    for (int t = 0; t < W; t += 2) {
        const V a = splat(p[t]), b = splat(p[t + 1]);
#pragma GCC unroll 8
        for (int d = 0; d < D / W; d++) {
            one[d] += a * load(values + t * D + d * W);
            two[d] += b * load(values + (t + 1) * D + d * W);
        }
    }
    for (int d = 0; d < D / W; d++) store(out + d * W, one[d] + two[d]);
}

inline const float* widened(const float* x, long, float*) { return x; }
inline const float* widened(const bf16* x, long n, float* to) {
    long i = 0;
    for (; i + W <= n; i += W) store(to + i, load(x + i));
    for (; i < n; i++) to[i] = wide(x[i]);
    return to;
}

// Of x [n]; behind them it may be written up to a multiple of W, where zeros are left.
inline void softmax(float* x, long n) {
    const long full = (n + W - 1) / W * W;
    for (long i = n; i < full; i++) x[i] = -INFINITY;
    V top = load(x);
    for (long i = W; i < full; i += W) { const V v = load(x + i); top = v > top ? v : top; }
    float t[W], most;
    store(t, top);
    most = t[0];
    for (long i = 1; i < W; i++) most = t[i] > most ? t[i] : most;
    V s = V{};
    for (long i = 0; i < full; i += W) { const V e = exp_(load(x + i) - most); store(x + i, e); s += e; }
    const float scale = 1.0f / sum(s);
    for (long i = 0; i < full; i += W) store(x + i, load(x + i) * scale);
    for (long i = n; i < full; i++) x[i] = 0.0f;
}

// q: [Q, dim] of one row, scaled. Of blocks of W tokens all are read: what a block holds behind the context weighs 0. Its context's keys and values in the pool. out: [Q, dim].
template <class T>
void attend(const Layer<T>& l, const float* q, const int32_t* table, long tokens, float* out) {
    const long groups = l.q / l.k, size = l.block_size, cell = size * l.dim, room = (tokens + W - 1) / W * W;
    const bool whole = size == W && l.dim % 32 == 0 && l.dim <= 128 && l.dim != 96;
    float *p = scratch(0, groups * room), *buffer = scratch(1, cell);
    memset(out, 0, l.q * l.dim * sizeof(float));
    for (long h = 0; h < l.k; h++) {
        const float* mine = q + h * groups * l.dim;
        for (long t = 0, b = 0; t < tokens; t += size, b++) {
            const long here = whole || tokens - t > size ? size : tokens - t;
            const float* keys = widened(l.pool + (int64_t(table[b]) * 2 * l.k + h) * cell, here * l.dim, buffer);
            for (long g = 0; g < groups; g++) {
                float* to = p + g * room + t;
                if (!whole) scores(mine + g * l.dim, keys, here, l.dim, to);
                else if (l.dim == 32) scores16<32>(mine + g * l.dim, keys, to);
                else if (l.dim == 64) scores16<64>(mine + g * l.dim, keys, to);
                else scores16<128>(mine + g * l.dim, keys, to);
            }
        }
        for (long g = 0; g < groups; g++) softmax(p + g * room, tokens);
        for (long t = 0, b = 0; t < tokens; t += size, b++) {
            const long here = whole || tokens - t > size ? size : tokens - t;
            const T* found = l.pool + (int64_t(table[b]) * 2 * l.k + l.k + h) * cell;
            const float* values = widened(found, here * l.dim, buffer);
            for (long g = 0; g < groups; g++) {
                float* to = out + (h * groups + g) * l.dim;
                if (!whole) weigh(p + g * room + t, values, here, l.dim, to);
                else if (l.dim == 32) weigh16<32>(p + g * room + t, values, to);
                else if (l.dim == 64) weigh16<64>(p + g * room + t, values, to);
                else weigh16<128>(p + g * room + t, values, to);
            }
        }
    }
}

// Norm and turn a head in place.
template <class T>
void turn(float* x, const T* weight, const float* cos, const float* sin, long dim, float eps) {
    V squares = V{};
    long i = 0;
    for (; i + W <= dim; i += W) squares += load(x + i) * load(x + i);
    float square = sum(squares);
    for (; i < dim; i++) square += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(square / dim + eps);
    const long half = dim / 2;
    for (long d = 0; d < half; d++) {
        const float a = x[d] * scale * wide(weight[d]), b = x[d + half] * scale * wide(weight[d + half]);
        x[d] = a * cos[d] - b * sin[d];
        x[d + half] = b * cos[d] + a * sin[d];
    }
}

template <class T>
void attention(const Layer<T>& l, const Batch& batch, const T* hidden, T* result) {
    const long n = batch.rows, heads = l.q + 2 * l.k, width = heads * l.dim, size = l.block_size;
    Rows x(scratch(2, n * l.hidden), n, l.hidden), all(scratch(3, n * width), n, width);
    Rows mixed(scratch(4, n * l.q * l.dim), n, l.q * l.dim);
    for (long r = 0; r < n; r++) normed(hidden + r * l.hidden, l.norm_in, l.hidden, l.eps, x.at[r]);
    product(x.in(), n, l.qkv, l.hidden, width, all.out());
    const float scale = 1.0f / std::sqrt(float(l.dim));
    for (long r = 0; r < n; r++) {
        float* row = all.at[r];
        if (l.qkv_bias) for (long i = 0; i < width; i++) row[i] += wide(l.qkv_bias[i]);
        for (long h = 0; h < l.q + l.k; h++)
            turn(row + h * l.dim, l.norm_heads + h * l.dim, batch.cos + r * (l.dim / 2), batch.sin + r * (l.dim / 2), l.dim, l.eps);
        for (long i = 0; i < l.q * l.dim; i++) row[i] *= scale;
        const int32_t* table = batch.tables + batch.slots[r] * batch.depth;
        const long at = batch.positions[r];
        T* block = l.pool + int64_t(table[at / size]) * 2 * l.k * size * l.dim + at % size * l.dim;
        for (long h = 0; h < 2 * l.k; h++)
            for (long d = 0; d < l.dim; d++) narrow(block[h * size * l.dim + d], row[(l.q + h) * l.dim + d]);
        attend(l, row, table, at + 1, mixed.at[r]);
    }
    product(mixed.in(), n, l.out, l.q * l.dim, l.hidden, x.out());
    for (long r = 0; r < n; r++) {
        const float* sum = x.at[r];
        const T* own = hidden + r * l.hidden;
        T* to = result + r * l.hidden;
        for (long i = 0; i < l.hidden; i++) narrow(to[i], (l.leader ? sum[i] + wide(own[i]) : sum[i]) + (l.out_bias ? wide(l.out_bias[i]) : 0.0f));
    }
}

// -- experts ----------------------------------------------------------------------------------------------------------

// silu(gate) * value * share, over gate.
inline void gated(float* gate, const float* value, float share, long n) {
    long i = 0;
    for (; i + W <= n; i += W) {
        const V g = load(gate + i);
        store(gate + i, g / (1.0f + exp_(-g)) * load(value + i) * share);
    }
    for (; i < n; i++) gate[i] = gate[i] / (1.0f + std::exp(-gate[i])) * value[i] * share;
}

// The k largest, lowest first among equals, and their weights. Both arrays have room for W more.
inline void choose(float* x, long n, long k, bool normalise, int32_t* chosen, float* weights) {
    if (!normalise) softmax(x, n);
    for (long j = 0; j < k; j++) {
        long best = -1;
        for (long e = 0; e < n; e++) if (x[e] == x[e] && (best < 0 || x[e] > x[best])) best = e;
        best = best < 0 ? 0 : best;
        chosen[j] = int32_t(best), weights[j] = x[best], x[best] = NAN;
    }
    if (normalise) softmax(weights, k);
}

template <class T>
void mixture(const Layer<T>& l, long n, const T* full, T* result) {
    const long h = l.hidden, c = l.columns, k = l.router ? l.top_k : 1;
    Rows x(scratch(5, n * h), n, h), sum_(scratch(6, n * h), n, h), logits(scratch(7, n * (l.experts + W)), n, l.experts + W);
    Rows inner(scratch(8, n * 2 * c), n, 2 * c);
    if (!n) return;
    memset(sum_.at[0], 0, n * h * sizeof(float));
    std::vector<char> live(n, 0);  // rows of padding are zeros, and so is what becomes of them
    for (long r = 0; r < n; r++) {
        for (long i = 0; i < h && !live[r]; i++) live[r] = wide(full[r * h + i]) != 0.0f;
        if (live[r]) normed(full + r * h, l.norm_post, h, l.eps, x.at[r]);
        else memset(x.at[r], 0, h * sizeof(float));
    }
    std::vector<int32_t> chosen(n * k, 0);
    std::vector<float> weights(n * k + W, 1.0f);
    if (l.router) {
        product(x.in(), n, l.router, h, l.experts, logits.out());
        for (long r = 0; r < n; r++) if (live[r]) choose(logits.at[r], l.experts, k, l.normalise, &chosen[r * k], &weights[r * k]);
    }
    std::vector<const float*> from(n);
    std::vector<float*> to(n);
    std::vector<float> share(n);
    const long up = (2 * c + NR - 1) / NR * NR * h, down = (h + NR - 1) / NR * NR * c;
    for (long e = 0; e < l.local; e++) {
        long m = 0;
        for (long r = 0; r < n; r++)
            for (long j = 0; j < k; j++)
                if (live[r] && chosen[r * k + j] == l.first + e) from[m] = x.at[r], to[m] = sum_.at[r], share[m++] = weights[r * k + j];
        if (!m) continue;
        product(from.data(), m, l.up + e * up, h, 2 * c, inner.out());
        for (long i = 0; i < m; i++) gated(inner.at[i], inner.at[i] + c, share[i], c);
        product(inner.in(), m, l.down + e * down, c, h, to.data(), true);
    }
    for (long r = 0; r < n; r++) for (long i = 0; i < h; i++) narrow(result[r * h + i], sum_.at[r][i]);
}

template <class T>
void head(const T* norm, const T* weight, long n, long hidden, long vocab, double eps, const T* x, T* out) {
    Rows in(scratch(9, n * hidden), n, hidden), to(scratch(10, n * vocab), n, vocab);
    for (long r = 0; r < n; r++) normed(x + r * hidden, norm, hidden, eps, in.at[r]);
    product(in.in(), n, weight, hidden, vocab, to.out());
    for (long r = 0; r < n; r++) for (long i = 0; i < vocab; i++) narrow(out[r * vocab + i], to.at[r][i]);
}

// The lowest id of the largest logit, and its log-probability.
template <class T>
void greedy(const T* logits, long n, long stride, long vocab, int64_t* tokens, float* logprobs) {
    float* x = scratch(11, vocab);
    for (long r = 0; r < n; r++) {
        const float* row = widened(logits + r * stride, vocab, x);
        long best = 0;
        for (long i = 1; i < vocab; i++) if (row[i] > row[best]) best = i;
        const float most = row[best];
        V s = V{};
        long i = 0;
        for (; i + W <= vocab; i += W) s += exp_(load(row + i) - most);
        float total = sum(s);
        for (; i < vocab; i++) total += std::exp(row[i] - most);
        tokens[r] = best, logprobs[r] = -std::log(total);
    }
}

template <class T>
void pack(const T* from, long K, long N, long by_k, long by_n, T* to) {
    for (long n = 0; n < N; n += NR)
        for (long k = 0; k < K; k++)
            for (long i = 0; i < NR; i++) *to++ = n + i < N ? from[k * by_k + (n + i) * by_n] : T{};
}

}  // namespace

#define KERNELS(name, T)                                                                                              \
    void attention_##name(const Layer<T>* l, const Batch* b, const T* x, T* out) { attention(*l, *b, x, out); }        \
    void mixture_##name(const Layer<T>* l, int64_t n, const T* x, T* out) { mixture(*l, n, x, out); }                  \
    void head_##name(const T* norm, const T* w, int64_t n, int64_t hidden, int64_t vocab, double eps, const T* x, T* o) { \
        head(norm, w, n, hidden, vocab, eps, x, o);                                                                    \
    }                                                                                                                  \
    void greedy_##name(const T* x, int64_t n, int64_t stride, int64_t vocab, int64_t* tokens, float* logprobs) {       \
        greedy(x, n, stride, vocab, tokens, logprobs);                                                                 \
    }                                                                                                                  \
    void pack_##name(const T* x, int64_t k, int64_t n, int64_t by_k, int64_t by_n, T* to) { pack(x, k, n, by_k, by_n, to); }

extern "C" {
KERNELS(float32, float)
KERNELS(bfloat16, bf16)
int64_t panel() { return NR; }
void begin(const Batch* b, const float* inverse, int64_t half) {
    for (long r = 0; r < b->rows; r++)
        for (long d = 0; d < half; d++) {
            const float angle = b->positions[r] * inverse[d];
            b->cos[r * half + d] = std::cos(angle), b->sin[r * half + d] = std::sin(angle);
        }
}
}
