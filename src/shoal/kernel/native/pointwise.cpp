// Causal attention whose weights are SiLU(q k + bias) / n, without a softmax, and its gradients.
//
// Source: Zhai et al., Actions Speak Louder than Words, 2024, equation 2.
//
// Nothing of the size of the weights is kept: a tile of 4 queries and 32 keys is computed, used
// and forgotten, and computed again for the gradients.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4)));

constexpr int64_t kRows = 4, kCols = 32, kTimes = 129;

inline v16 load(const float* from) { return *reinterpret_cast<const v16*>(from); }
inline void store(float* to, v16 x) { *reinterpret_cast<v16*>(to) = x; }
inline v16 all(float x) { return v16{} + x; }

// 1 / (1 + e^-x), within 1e-6.
inline v16 sigmoid(v16 x) {
    v16 y = -x * all(1.44269504f);
    y = y < all(-126.0f) ? all(-126.0f) : y;
    y = y > all(126.0f) ? all(126.0f) : y;
    const v16 magic = all(12582912.0f);  // rounds to a whole number
    const v16 whole = (y + magic) - magic;
    const v16 r = (y - whole) * all(0.693147181f);
    v16 e = all(1.0f / 720);
    e = e * r + all(1.0f / 120);
    e = e * r + all(1.0f / 24);
    e = e * r + all(1.0f / 6);
    e = e * r + all(0.5f);
    e = e * r + all(1.0f);
    e = e * r + all(1.0f);
    const i16 power = (__builtin_convertvector(whole, i16) + 127) << 23;
    v16 scale;
    std::memcpy(&scale, &power, sizeof scale);
    return all(1.0f) / (all(1.0f) + e * scale);
}

// Sizes of one attention, and where its events lie.
struct Shape {
    int64_t length, dim, stride;  // events, numbers of a head, floats from an event to the next
    float share;                  // 1 / n
    const float* position;        // [length]: by how far the key lies behind the query
    const uint8_t* buckets;       // [length, length] of time, or none
    const float* time;            // [kTimes]
};

inline int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Events of a head as rows [rows, wide], and as columns [dim, rows], with zeros behind them.
struct Head {
    int64_t rows, wide;
    std::vector<float> row, column;

    Head(const Shape& s, const float* from, bool rows_too, bool columns_too)
        : rows(up(s.length, kCols)), wide(up(s.dim, 16)) {
        if (rows_too) row.assign(rows * wide, 0.0f);
        if (columns_too) column.assign(s.dim * rows, 0.0f);
        for (int64_t at = 0; at < s.length; ++at)
            for (int64_t d = 0; d < s.dim; ++d) {
                const float x = from[at * s.stride + d];
                if (rows_too) row[at * wide + d] = x;
                if (columns_too) column[d * rows + at] = x;
            }
    }
};

// Products of 4 rows and 32 columns: [4][2] vectors.
inline void products(const float* rows, int64_t wide, const Head& columns, int64_t first,
                     int64_t dim, v16 (*out)[2]) {
    for (int i = 0; i < kRows; ++i) out[i][0] = out[i][1] = v16{};
    const float* column = columns.column.data() + first;
    for (int64_t d = 0; d < dim; ++d, column += columns.rows) {
        const v16 left = load(column), right = load(column + 16);
        for (int i = 0; i < kRows; ++i) {
            const float x = rows[i * wide + d];
            out[i][0] += left * x;
            out[i][1] += right * x;
        }
    }
}

// Bias of a query and 16 keys from `key` on. `reversed` is the position's, so that keys that
// follow lie behind each other.
inline v16 bias(const Shape& s, const float* reversed, int64_t query, int64_t key) {
    v16 sum = load(reversed + key - query);
    if (s.buckets)
        for (int64_t j = 0; j < 16 && key + j < s.length; ++j)
            sum[j] += s.time[s.buckets[query * s.length + key + j]];
    return sum;
}

// -1 for those of 16 keys that a query sees.
inline i16 seen(int64_t query, int64_t key) {
    static const i16 places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return places <= int32_t(std::min<int64_t>(query - key, 1 << 20)) + i16{};
}

// The position's bias backwards, with room for what a tile reads beyond it: index key - query.
struct Reversed {
    std::vector<float> values;
    int64_t origin;

    explicit Reversed(int64_t length) : values(length + 3 * kCols, 0.0f), origin(length + kCols) {}
    Reversed(const Shape& s) : Reversed(s.length) {
        for (int64_t at = 0; at < s.length; ++at) values[origin - at] = s.position[at];
    }
    float* middle() { return values.data() + origin; }
};

// out [4][wide] += weights [4][32] * rows [32][wide]
inline void mix(const float (*weights)[kCols], const float* rows, int64_t wide, float* out) {
    for (int64_t c = 0; c < wide; c += 16) {
        v16 sum[kRows];
        for (int i = 0; i < kRows; ++i) sum[i] = load(out + i * wide + c);
        for (int64_t j = 0; j < kCols; ++j) {
            const v16 x = load(rows + j * wide + c);
            for (int i = 0; i < kRows; ++i) sum[i] += x * weights[i][j];
        }
        for (int i = 0; i < kRows; ++i) store(out + i * wide + c, sum[i]);
    }
}

// out [32][wide] += weights [4][32]' * rows [4][wide]
inline void spread(const float (*weights)[kCols], const float* rows, int64_t wide, float* out) {
    for (int64_t c = 0; c < wide; c += 16) {
        v16 x[kRows];
        for (int i = 0; i < kRows; ++i) x[i] = load(rows + i * wide + c);
        for (int64_t j = 0; j < kCols; ++j) {
            v16 sum = load(out + j * wide + c);
            for (int i = 0; i < kRows; ++i) sum += x[i] * weights[i][j];
            store(out + j * wide + c, sum);
        }
    }
}

void copy_out(const Shape& s, const std::vector<float>& rows, int64_t wide, float* to,
              int64_t stride) {
    for (int64_t at = 0; at < s.length; ++at)
        std::memcpy(to + at * stride, &rows[at * wide], s.dim * sizeof(float));
}

void forward(const Shape& s, const float* q, const float* k, const float* v, float* out,
             int64_t out_stride) {
    const Head Q(s, q, true, false), K(s, k, false, true), V(s, v, true, false);
    Reversed reversed(s);
    std::vector<float> sums(Q.rows * Q.wide, 0.0f);
    for (int64_t i = 0; i < s.length; i += kRows) {
        const float* rows = &Q.row[i * Q.wide];
        for (int64_t j = 0; j < i + kRows; j += kCols) {
            v16 p[kRows][2];
            float weights[kRows][kCols];
            products(rows, Q.wide, K, j, s.dim, p);
            for (int r = 0; r < kRows; ++r)
                for (int h = 0; h < 2; ++h) {
                    const int64_t key = j + 16 * h, query = std::min(i + r, s.length - 1);
                    const v16 x = p[r][h] + bias(s, reversed.middle(), query, key);
                    const v16 a = x * sigmoid(x) * s.share;
                    store(&weights[r][16 * h], seen(query, key) ? a : v16{});
                }
            mix(weights, &V.row[j * V.wide], V.wide, &sums[i * V.wide]);
        }
    }
    copy_out(s, sums, V.wide, out, out_stride);
}

void backward(const Shape& s, const float* q, const float* k, const float* v, const float* g,
              int64_t g_stride, float* dq, float* dk, float* dv, int64_t d_stride,
              Reversed& dposition, float* dtime) {
    Shape from = s;
    from.stride = g_stride;
    const Head Q(s, q, true, false), K(s, k, true, true), V(s, v, false, true);
    const Head G(from, g, true, false);
    Reversed reversed(s);
    const int64_t wide = Q.wide, size = Q.rows * wide;
    std::vector<float> dQ(size, 0.0f), dK(size, 0.0f), dV(size, 0.0f);
    for (int64_t i = 0; i < s.length; i += kRows) {
        for (int64_t j = 0; j < i + kRows; j += kCols) {
            v16 p[kRows][2], da[kRows][2];
            float weights[kRows][kCols], dp[kRows][kCols];
            products(&Q.row[i * wide], wide, K, j, s.dim, p);
            products(&G.row[i * wide], wide, V, j, s.dim, da);
            for (int r = 0; r < kRows; ++r)
                for (int h = 0; h < 2; ++h) {
                    const int64_t key = j + 16 * h, query = std::min(i + r, s.length - 1);
                    const v16 x = p[r][h] + bias(s, reversed.middle(), query, key);
                    const v16 sig = sigmoid(x);
                    const i16 is = i + r < s.length ? seen(query, key) : i16{};
                    const v16 slope = sig * (all(1.0f) + x * (all(1.0f) - sig));
                    const v16 d = is ? da[r][h] * slope * s.share : v16{};
                    store(&weights[r][16 * h], is ? x * sig * s.share : v16{});
                    store(&dp[r][16 * h], d);
                    float* to = dposition.middle() + key - query;
                    store(to, load(to) + d);
                    if (s.buckets)
                        for (int64_t c = 0; c < 16 && key + c < s.length; ++c)
                            dtime[s.buckets[query * s.length + key + c]] += d[c];
                }
            mix(dp, &K.row[j * wide], wide, &dQ[i * wide]);
            spread(dp, &Q.row[i * wide], wide, &dK[j * wide]);
            spread(weights, &G.row[i * wide], wide, &dV[j * wide]);
        }
    }
    copy_out(s, dQ, wide, dq, d_stride);
    copy_out(s, dK, wide, dk, d_stride);
    copy_out(s, dV, wide, dv, d_stride);
}

}  // namespace

extern "C" {

// Queries, keys and values of batch x heads sequences; an event is `stride` floats behind the
// one before it, a sequence length * stride, a head dim. Outputs likewise, with their own stride.
void pointwise_forward(const float* q, const float* k, const float* v, int64_t batch,
                       int64_t heads, int64_t length, int64_t dim, int64_t stride, float share,
                       const float* position, const uint8_t* buckets, const float* time,
                       int64_t threads, float* out) {
    const int64_t inner = heads * dim;
#pragma omp parallel for num_threads(threads)
    for (int64_t at = 0; at < batch * heads; ++at) {
        const int64_t b = at / heads, h = at % heads, first = b * length * stride + h * dim;
        const Shape s{length, dim, stride, share, position,
                      buckets ? buckets + b * length * length : nullptr, time};
        forward(s, q + first, k + first, v + first, out + b * length * inner + h * dim, inner);
    }
}

// Gradients; those of biases [batch * heads, length] and [batch * heads, kTimes] are summed by the
// caller, in an order that does not depend on the threads.
void pointwise_backward(const float* q, const float* k, const float* v, const float* g,
                        int64_t batch, int64_t heads, int64_t length, int64_t dim, int64_t stride,
                        float share, const float* position, const uint8_t* buckets,
                        const float* time, int64_t threads, float* dq, float* dk, float* dv,
                        float* dposition, float* dtime) {
    const int64_t inner = heads * dim;
#pragma omp parallel for num_threads(threads)
    for (int64_t at = 0; at < batch * heads; ++at) {
        const int64_t b = at / heads, h = at % heads, first = b * length * stride + h * dim;
        const int64_t to = b * length * inner + h * dim;
        const Shape s{length, dim, stride, share, position,
                      buckets ? buckets + b * length * length : nullptr, time};
        Reversed sums(length);
        backward(s, q + first, k + first, v + first, g + to, inner, dq + to, dk + to, dv + to,
                 inner, sums, dtime + at * kTimes);
        for (int64_t i = 0; i < length; ++i) dposition[at * length + i] = sums.middle()[-i];
    }
}
}
