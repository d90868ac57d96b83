// A decoder layer on a CPU: what lies between two collectives, as one call each. Built by models/native/build.py.
//
// Rows are fed tokens. A row's numbers come from the same operations in the same order whatever rows are beside it.
// Weights and what crosses a call are of type T (float or bfloat16), and so are the left sides of products.
#include "products.h"

namespace {

// To a row of a product's left side.
template <class T>
void normed(const T* x, const T* weight, long n, float eps, T* out) {
    V s = V{};
    long i = 0;
    for (; i + W <= n; i += W) { const V v = load(x + i); s += v * v; }
    float square = sum(s);
    for (; i < n; i++) square += wide(x[i]) * wide(x[i]);
    const float scale = 1.0f / std::sqrt(square / n + eps);
    for (i = 0; i + W <= n; i += W) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < n; i++) narrow(out[i], wide(x[i]) * scale * wide(weight[i]));
    for (; i < stride<T>(n); i++) out[i] = T{};
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
    const int64_t *positions, *slots;  // of each row; slots: its line of tables
    const int32_t *tables;             // [lines, depth]
    float *cos, *sin;                  // [rows, dim / 2]
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
    copy(to, x, n);
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

// Attention of one row. q: [Q, dim], scaled. out: [Q, dim]. Of blocks of W tokens all are read: what a block holds behind
// the context weighs 0.
template <class T>
void attend(const Layer<T>& l, const float* q, const int32_t* table, long tokens, float* out) {
    const long groups = l.q / l.k, size = l.block_size, cell = size * l.dim, room = (tokens + W - 1) / W * W;
    const bool whole = size == W && l.dim % 32 == 0 && l.dim <= 128 && l.dim != 96;
    float *p = scratch<float>(0, groups * room), *buffer = scratch<float>(1, cell);
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

#ifdef __AMX_BF16__
template <class T> bool tiled(const Layer<T>& l) {
    return sizeof(T) == 2 && tiles() && l.block_size == W && l.dim % 32 == 0;
}
#include "tiles.h"
#else
template <class T> bool tiled(const Layer<T>&) { return false; }
template <class T> void attend_tiles(const Layer<T>&, const T*, const int32_t*, long, long, T*) {}
#endif

// Attention of `count` rows of one context, the first of them at position `start`. q, out: [count, stride(Q * dim)].
template <class T>
void attend_all(const Layer<T>& l, const T* q, const int32_t* table, long start, long count, T* out) {
    const long width = l.q * l.dim, step = stride<T>(width);
    if (tiled(l)) return attend_tiles(l, q, table, start, count, out);
    float *from = scratch<float>(2, width), *to = scratch<float>(3, width);
    for (long r = 0; r < count; r++) {
        copy(from, q + r * step, width);
        attend(l, from, table, start + r + 1, to);
        copy(out + r * step, to, width);
    }
}

template <class T>
void attention(const Layer<T>& l, const Batch& batch, const T* hidden, T* result) {
    const long n = batch.rows, width = (l.q + 2 * l.k) * l.dim, own = l.q * l.dim, size = l.block_size, half = l.dim / 2;
    const long step = stride<T>(own), wide_ = columns(width > l.hidden ? width : l.hidden);
    T *x = scratch<T>(4, CHUNK * stride<T>(l.hidden)), *q = scratch<T>(5, up(n, 16) * step);
    T* mixed = scratch<T>(6, up(n, 16) * step);
    float* all = scratch<float>(7, CHUNK * wide_);
    const float scale = 1.0f / std::sqrt(float(l.dim));
    for (long first = 0; first < n; first += CHUNK) {
        const long rows = n - first < CHUNK ? n - first : CHUNK;
        for (long r = 0; r < rows; r++)
            normed(hidden + (first + r) * l.hidden, l.norm_in, l.hidden, l.eps, x + r * stride<T>(l.hidden));
        product(x, rows, l.qkv, l.hidden, width, all);
        for (long r = 0; r < rows; r++) {
            float* row = all + r * columns(width);
            const long at = batch.positions[first + r];
            const float *cos = batch.cos + (first + r) * half, *sin = batch.sin + (first + r) * half;
            if (l.qkv_bias) for (long i = 0; i < width; i++) row[i] += wide(l.qkv_bias[i]);
            for (long h = 0; h < l.q + l.k; h++) turn(row + h * l.dim, l.norm_heads + h * l.dim, cos, sin, l.dim, l.eps);
            for (long i = 0; i < own; i++) row[i] *= scale;
            copy(q + (first + r) * step, row, own);
            const int32_t* table = batch.tables + batch.slots[first + r] * batch.depth;
            T* block = l.pool + int64_t(table[at / size]) * 2 * l.k * size * l.dim + at % size * l.dim;
            for (long h = 0; h < 2 * l.k; h++) copy(block + h * size * l.dim, row + (l.q + h) * l.dim, l.dim);
        }
    }
    for (long first = 0, end; first < n; first = end) {
        const long slot = batch.slots[first], at = batch.positions[first];
        for (end = first + 1; end < n && batch.slots[end] == slot && batch.positions[end] == at + end - first;) end++;
        attend_all(l, q + first * step, batch.tables + slot * batch.depth, at, end - first, mixed + first * step);
    }
    for (long first = 0; first < n; first += CHUNK) {
        const long rows = n - first < CHUNK ? n - first : CHUNK;
        product(mixed + first * step, rows, l.out, own, l.hidden, all);
        for (long r = 0; r < rows; r++) {
            float* sum = all + r * columns(l.hidden);
            const T* own_row = hidden + (first + r) * l.hidden;
            if (l.leader) for (long i = 0; i < l.hidden; i++) sum[i] += wide(own_row[i]);
            if (l.out_bias) for (long i = 0; i < l.hidden; i++) sum[i] += wide(l.out_bias[i]);
            copy(result + (first + r) * l.hidden, sum, l.hidden);
        }
    }
}

// -- experts ----------------------------------------------------------------------------------------------------------

// silu(gate) * value * share, to a row of a product's left side.
template <class T>
void gated(const float* gate, const float* value, float share, long n, T* out) {
    long i = 0;
    for (; i + W <= n; i += W) {
        const V g = load(gate + i);
        store(out + i, g / (1.0f + exp_(-g)) * load(value + i) * share);
    }
    for (; i < n; i++) narrow(out[i], gate[i] / (1.0f + std::exp(-gate[i])) * value[i] * share);
    for (; i < stride<T>(n); i++) out[i] = T{};
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

constexpr long TOGETHER = 8 * CHUNK;  // rows whose experts' groups are formed together

template <class T>
void mixture(const Layer<T>& l, long n, const T* full, T* result) {
    const long h = l.hidden, c = l.columns, k = l.router ? l.top_k : 1, step = stride<T>(h), out = columns(h);
    const long pairs = columns(2 * c), routes = columns(l.experts) + W, most = n < TOGETHER ? up(n, 16) : TOGETHER;
    T *x = scratch<T>(4, most * step), *from = scratch<T>(8, CHUNK * step), *inner = scratch<T>(9, CHUNK * stride<T>(c));
    float *total = scratch<float>(10, most * h), *both = scratch<float>(11, CHUNK * (pairs > out ? pairs : out));
    float *logits = scratch<float>(12, most * routes), *down = scratch<float>(7, CHUNK * out);
    std::vector<char> live(most);
    std::vector<int32_t> chosen(most * k);
    std::vector<float> weights(most * k + W);
    std::vector<long> rows_of(most), where(most);
    for (long first = 0; first < n; first += TOGETHER) {
        const long rows = n - first < TOGETHER ? n - first : TOGETHER;
        const T* mine = full + first * h;
        memset(total, 0, rows * h * sizeof(float));
        for (long r = 0; r < rows; r++) {  // rows of padding are zeros, and so is what becomes of them
            live[r] = 0;
            for (long i = 0; i < h && !live[r]; i++) live[r] = wide(mine[r * h + i]) != 0.0f;
            normed(mine + r * h, l.norm_post, h, l.eps, x + r * step);
        }
        if (l.router) {
            product(x, rows, l.router, h, l.experts, logits);
            for (long r = 0; r < rows; r++)
                choose(logits + r * columns(l.experts), l.experts, k, l.normalise, &chosen[r * k], &weights[r * k]);
        }
        for (long e = 0; e < l.local; e++) {
            long m = 0;
            for (long r = 0; r < rows; r++) {
                if (!live[r]) continue;
                if (!l.router) where[m] = -1, rows_of[m++] = r;
                else for (long j = 0; j < k; j++) if (chosen[r * k + j] == l.first + e) where[m] = r * k + j, rows_of[m++] = r;
            }
            for (long g = 0; g < m; g += CHUNK) {
                const long some = m - g < CHUNK ? m - g : CHUNK;
                for (long i = 0; i < some; i++) memcpy(from + i * step, x + rows_of[g + i] * step, step * sizeof(T));
                product(from, some, l.up + e * packed<T>(h, 2 * c), h, 2 * c, both);
                for (long i = 0; i < some; i++) {
                    const float *row = both + i * pairs, share = where[g + i] < 0 ? 1.0f : weights[where[g + i]];
                    gated(row, row + c, share, c, inner + i * stride<T>(c));
                }
                product(inner, some, l.down + e * packed<T>(c, h), c, h, down);
                for (long i = 0; i < some; i++) {
                    float* to = total + rows_of[g + i] * h;
                    for (long j = 0; j < h; j++) to[j] += down[i * out + j];
                }
            }
        }
        copy(result + first * h, total, rows * h);
    }
}

template <class T>
void head(const T* norm, const T* weight, long n, long hidden, long vocab, double eps, const T* x, T* out) {
    T* in = scratch<T>(4, CHUNK * stride<T>(hidden));
    float* to = scratch<float>(7, CHUNK * columns(vocab));
    for (long first = 0; first < n; first += CHUNK) {
        const long rows = n - first < CHUNK ? n - first : CHUNK;
        for (long r = 0; r < rows; r++) normed(x + (first + r) * hidden, norm, hidden, eps, in + r * stride<T>(hidden));
        product(in, rows, weight, hidden, vocab, to);
        for (long r = 0; r < rows; r++) copy(out + (first + r) * vocab, to + r * columns(vocab), vocab);
    }
}

// The lowest id of the largest logit, and its log-probability.
template <class T>
void greedy(const T* logits, long n, long stride, long vocab, int64_t* tokens, float* logprobs) {
    float* x = scratch<float>(0, vocab);
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

void angles(const Batch& b, const float* inverse, long half) {
    for (long r = 0; r < b.rows; r++)
        for (long d = 0; d < half; d++) {
            const float angle = b.positions[r] * inverse[d];
            b.cos[r * half + d] = std::cos(angle), b.sin[r * half + d] = std::sin(angle);
        }
}

// -- a whole iteration, where nothing lies between layers -------------------------------------------------------------

template <class T> struct Model {
    int64_t layers, hidden, vocab;
    double eps;
    const Layer<T>* const* layer;
    const T *embed, *norm, *head;
    const float* inverse;
    int64_t* last;  // the token that each slot keeps
};

// Logits of rows that each feed the token of their slot; greedy draws too where tokens is given, kept in the slots.
template <class T>
void decode(const Model<T>& m, const Batch& b, T* logits, int64_t* tokens, float* logprobs) {
    const long n = b.rows, h = m.hidden;
    std::vector<T> x(n * h), y(n * h), z(n * h);
    angles(b, m.inverse, m.layer[0]->dim / 2);
    for (long r = 0; r < n; r++) memcpy(&x[r * h], m.embed + m.last[b.slots[r]] * h, h * sizeof(T));
    for (long i = 0; i < m.layers; i++) {
        attention(*m.layer[i], b, x.data(), y.data());
        mixture(*m.layer[i], n, y.data(), z.data());
        for (long j = 0; j < n * h; j++) narrow(x[j], wide(y[j]) + wide(z[j]));
    }
    head(m.norm, m.head, n, h, m.vocab, m.eps, x.data(), logits);
    if (!tokens) return;
    greedy(logits, n, m.vocab, m.vocab, tokens, logprobs);
    for (long r = 0; r < n; r++) m.last[b.slots[r]] = tokens[r];
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
    void decode_##name(const Model<T>* m, const Batch* b, T* logits, int64_t* tokens, float* logprobs) {               \
        decode(*m, *b, logits, tokens, logprobs);                                                                      \
    }                                                                                                                  \
    void pack_##name(const T* x, int64_t k, int64_t n, int64_t by_k, int64_t by_n, T* to) { pack(x, k, n, by_k, by_n, to); }

extern "C" {
KERNELS(float32, float)
KERNELS(bfloat16, bf16)
int64_t packed_float32(int64_t k, int64_t n) { return packed<float>(k, n); }
int64_t packed_bfloat16(int64_t k, int64_t n) { return packed<bf16>(k, n); }
void begin(const Batch* b, const float* inverse, int64_t half) { angles(*b, inverse, half); }
}
