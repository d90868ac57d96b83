// Attention by tiles of bfloat16 (AMX), included by native.cpp: blocks of 16 tokens, heads of whole 32 numbers.
//
// A tile of queries is 16 (row, head) pairs of one KV head. Scores of a block are queries times its transposed keys, and
// the result is weights, 32 tokens at a time, times values; both are brought into the layout of a right side once.

// 16 rows of 16 pairs: pair p of row r becomes pair r of row p.
inline void transposed(const bf16* from, long by, bf16* to) {
    U rows[16];
    for (int r = 0; r < 16; r++) memcpy(&rows[r], from + r * by, 64);
    U next[16];
    for (int r = 0; r < 16; r += 2) {
        next[r] = (U)MIX((I)rows[r], (I)rows[r + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        next[r + 1] = (U)MIX((I)rows[r], (I)rows[r + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    for (int r = 0; r < 16; r += 4)
        for (int i = r; i < r + 2; i++) {
            rows[i] = (U)MIX((I)next[i], (I)next[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            rows[i + 2] = (U)MIX((I)next[i], (I)next[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    for (int r = 0; r < 16; r += 8)
        for (int i = r; i < r + 4; i++) {
            next[i] = (U)MIX((I)rows[i], (I)rows[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
            next[i + 4] = (U)MIX((I)rows[i], (I)rows[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
    for (int i = 0; i < 8; i++) {
        rows[i] = (U)MIX((I)next[i], (I)next[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        rows[i + 8] = (U)MIX((I)next[i], (I)next[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (int r = 0; r < 16; r++) memcpy(to + r * 32, &rows[r], 64);
}

// Two rows of 16 numbers, number by number.
inline void paired(const bf16* one, const bf16* two, bf16* to) {
    H a, b;
    memcpy(&a, one, 32), memcpy(&b, two, 32);
    const U both = __builtin_convertvector(a, U) | (__builtin_convertvector(b, U) << 16);
    memcpy(to, &both, 64);
}

template <class T> void attend_tiles(const Layer<T>&, const T*, const int32_t*, long, long, T*) {}

inline void attend_tiles(const Layer<bf16>& l, const bf16* q, const int32_t* table, long start, long count, bf16* out) {
    const Tiles configured;
    const long groups = l.q / l.k, dim = l.dim, cell = W * dim, step = stride<bf16>(l.q * dim), parts = dim / 32;
    const long blocks = (start + count + W - 1) / W, room = up(blocks * W, 32), pairs = count * groups;
    bf16 *keys = scratch<bf16>(0, blocks * cell), *values = scratch<bf16>(1, room * dim);
    bf16 *queries = scratch<bf16>(2, W * dim), *weights = scratch<bf16>(13, W * room);
    float *scores = scratch<float>(3, W * room), *found = scratch<float>(14, W * dim);
    for (long h = 0; h < l.k; h++) {
        for (long b = 0; b < blocks; b++) {
            const bf16* from = l.pool + (int64_t(table[b]) * 2 * l.k + h) * cell;
            for (long d = 0; d < parts; d++) transposed(from + d * 32, dim, keys + b * cell + d * 512);
            from += l.k * cell;
            for (long d = 0; d < dim; d += W)  // [32 tokens][16 numbers] tiles; a block is half of one
                for (long t = 0; t < W; t += 2)
                    paired(from + t * dim + d, from + (t + 1) * dim + d,
                           values + (b / 2) * 32 * dim + d / W * 512 + (b % 2 * 8 + t / 2) * 32);
        }
        if (blocks % 2)
            for (long d = 0; d < dim / W; d++) memset(values + (blocks / 2) * 32 * dim + d * 512 + 256, 0, 512);
        for (long first = 0; first < pairs; first += W) {
            const long here = pairs - first < W ? pairs - first : W, last = start + (first + here - 1) / groups;
            const long reach = last / W + 1, deep = up(reach * W, 32);
            for (long i = 0; i < here; i++)
                memcpy(queries + i * dim, q + (first + i) / groups * step + (h * groups + (first + i) % groups) * dim, dim * 2);
            for (long b = 0; b < reach; b++) {
                _tile_zero(0);
                for (long d = 0; d < parts; d++) {
                    _tile_loadd(4, queries + d * 32, dim * 2);
                    _tile_loadd(6, keys + b * cell + d * 512, 64);
                    _tile_dpbf16ps(0, 4, 6);
                }
                _tile_stored(0, scores + b * W, room * 4);
            }
            for (long i = 0; i < here; i++) {
                const long tokens = start + (first + i) / groups + 1;
                float* row = scores + i * room;
                softmax(row, tokens);
                bf16* to = weights + i * room;
                copy(to, row, up(tokens, W));
                memset(to + up(tokens, W), 0, (deep - up(tokens, W)) * 2);
            }
            for (long d = 0; d < dim; d += W) {
                _tile_zero(1);
                for (long t = 0; t < deep; t += 32) {
                    _tile_loadd(5, weights + t, room * 2);
                    _tile_loadd(7, values + t * dim + d / W * 512, 64);
                    _tile_dpbf16ps(1, 5, 7);
                }
                _tile_stored(1, found + d, dim * 4);
            }
            for (long i = 0; i < here; i++)
                copy(out + (first + i) / groups * step + (h * groups + (first + i) % groups) * dim, found + i * dim, dim);
        }
    }
}
