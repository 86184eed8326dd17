// Rows of a very sparse random projection, and a product of compressed rows with a dense matrix.
//
// Source: Chen et al., Fast and Accurate Network Embeddings via Very Sparse Random Projection, 2019.
//
// Any row of the projection follows from the seed and the node's key. Every row of a product is
// summed in segments of kSegment neighbours, each from zero, which are then added in order: what a
// row is depends on neither the threads nor the rows that are computed with it.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kSegment = 4096;
// Neighbours whose rows are fetched ahead, and entries of a task.
constexpr int64_t kAhead = 6, kTask = 8192;
// Columns that are summed in registers: of 512 bits, sixteen.
constexpr int64_t kWide = 256;

// Finalizer of SplitMix64 (Steele et al., 2014), of a counter.
inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

template <class Work>
void share(int64_t tasks, int threads, const Work& work) {
    std::atomic<int64_t> next{0};
    const auto take = [&] {
        for (int64_t at; (at = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) work(at);
    };
    std::vector<std::thread> others;
    for (int64_t i = 1; i < std::min<int64_t>(threads, tasks); ++i) others.emplace_back(take);
    take();
    for (auto& one : others) one.join();
}

template <class X>
inline void fetch(const X* row, int64_t wide) {
    for (int64_t byte = 0; byte < wide * int64_t(sizeof(X)); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(row) + byte);
}

// sum[0:W] = sum over neighbours of c * X[neighbour, 0:W], W known: it stays in registers.
template <int64_t W, class I, class X>
void sum_fixed(const I* ids, const float* weight, const float* scale, int64_t count, const X* x,
               int64_t stride, float* sum) {
    float here[W] = {};
    for (int64_t j = 0; j < count; ++j) {
        if (j + kAhead < count) fetch(x + int64_t(ids[j + kAhead]) * stride, W);
        const float c = (weight ? weight[j] : 1.0f) * (scale ? scale[ids[j]] : 1.0f);
        const X* row = x + int64_t(ids[j]) * stride;
#pragma omp simd
        for (int64_t k = 0; k < W; ++k) here[k] += c * float(row[k]);
    }
    for (int64_t k = 0; k < W; ++k) sum[k] = here[k];
}

template <class I, class X>
void sum_any(const I* ids, const float* weight, const float* scale, int64_t count, const X* x,
             int64_t stride, int64_t wide, float* sum) {
    std::fill(sum, sum + wide, 0.0f);
    for (int64_t j = 0; j < count; ++j) {
        if (j + kAhead < count) fetch(x + int64_t(ids[j + kAhead]) * stride, wide);
        const float c = (weight ? weight[j] : 1.0f) * (scale ? scale[ids[j]] : 1.0f);
        const X* row = x + int64_t(ids[j]) * stride;
#pragma omp simd
        for (int64_t k = 0; k < wide; ++k) sum[k] += c * float(row[k]);
    }
}

template <class I, class X>
void sum_rows(const I* ids, const float* weight, const float* scale, int64_t count, const X* x,
              int64_t d, float* sum) {
    int64_t at = 0;
    for (; at + kWide <= d; at += kWide)
        sum_fixed<kWide>(ids, weight, scale, count, x + at, d, sum + at);
    for (; at + 128 <= d; at += 128)
        sum_fixed<128>(ids, weight, scale, count, x + at, d, sum + at);
    for (; at + 64 <= d; at += 64) sum_fixed<64>(ids, weight, scale, count, x + at, d, sum + at);
    for (; at + 16 <= d; at += 16) sum_fixed<16>(ids, weight, scale, count, x + at, d, sum + at);
    if (at < d) sum_any(ids, weight, scale, count, x + at, d, d - at, sum + at);
}

// Scale a sum, keep it, and add it to the mixture.
void finish(const float* __restrict sum, float factor, int64_t d, float alpha, bool normalise,
            float* __restrict out, float* __restrict mixed) {
    float length = 1.0f;
    if (normalise) {
        double squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t k = 0; k < d; ++k) squares += double(sum[k]) * sum[k];
        length = squares > 0 ? float(std::sqrt(squares)) * std::fabs(factor) : 1.0f;
    }
    if (out)
        for (int64_t k = 0; k < d; ++k) out[k] = sum[k] * factor;
    if (mixed && alpha != 0) {
        const float c = length > 0 ? alpha * (factor / length) : 0.0f;
        for (int64_t k = 0; k < d; ++k) mixed[k] += sum[k] * c;
    }
}

template <class I, class X>
void product(const int64_t* indptr, const I* indices, const float* weight, const X* x,
             const float* scale, const float* factor, const int64_t* rows, int64_t count,
             int64_t first, int64_t d, float alpha, bool normalise, float* out, float* mixed,
             int threads) {
    const auto row_of = [&](int64_t i) { return rows ? rows[i] : first + i; };
    const auto sized = [&](int64_t r) { return indptr[r + 1] - indptr[r]; };
    const auto put = [&](int64_t i, int64_t r, const float* sum) {
        finish(sum, factor[r], d, alpha, normalise, out ? out + i * d : nullptr,
               mixed ? mixed + i * d : nullptr);
    };
    // Tasks of about as many entries; a long row is one for each of its segments.
    std::vector<int64_t> begins{0}, hubs;
    int64_t filled = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t size = sized(row_of(i));
        if (size > kSegment) hubs.push_back(i);
        filled += size > kSegment ? 1 : size + 1;
        if (filled >= kTask) begins.push_back(i + 1), filled = 0;
    }
    if (begins.back() != count) begins.push_back(count);
    struct Piece {
        int64_t hub, begin, size;
    };
    std::vector<Piece> pieces;
    for (const int64_t i : hubs)
        for (int64_t r = row_of(i), at = 0; at < sized(r); at += kSegment)
            pieces.push_back({i, indptr[r] + at, std::min(kSegment, sized(r) - at)});
    std::vector<float> partial(pieces.size() * d);
    const int64_t some = int64_t(pieces.size());
    share(some + int64_t(begins.size()) - 1, threads, [&](int64_t task) {
        if (task < some) {
            const Piece& p = pieces[task];
            sum_rows(indices + p.begin, weight ? weight + p.begin : nullptr, scale, p.size, x, d,
                     partial.data() + task * d);
            return;
        }
        std::vector<float> sum(d);
        for (int64_t i = begins[task - some]; i < begins[task - some + 1]; ++i) {
            const int64_t r = row_of(i), size = sized(r), begin = indptr[r];
            if (size > kSegment) continue;
            sum_rows(indices + begin, weight ? weight + begin : nullptr, scale, size, x, d,
                     sum.data());
            put(i, r, sum.data());
        }
    });
    for (int64_t p = 0; p < some;) {
        const int64_t i = pieces[p].hub;
        float* sum = partial.data() + p * d;
        for (++p; p < some && pieces[p].hub == i; ++p)
            for (int64_t k = 0; k < d; ++k) sum[k] += partial[p * d + k];
        put(i, row_of(i), sum);
    }
}

}  // namespace

extern "C" {

// int8 [count, d] of -1, 0 and 1: each of -1 and 1 with probability cut / 2^33.
void fastrp_projection(const int64_t* keys, int64_t count, int64_t d, uint64_t seed, uint64_t cut,
                       int8_t* out, int threads) {
    constexpr int64_t block = 4096;
    share((count + block - 1) / block, threads, [&](int64_t task) {
        for (int64_t i = task * block; i < std::min(count, (task + 1) * block); ++i) {
            const uint64_t base = mix(seed ^ mix(uint64_t(keys[i])));
            int8_t* row = out + i * d;
            for (int64_t k = 0; k < d; ++k) {
                const uint64_t bits = mix(base + uint64_t(k) * 0xd1342543de82ef95ULL);
                const int8_t there = (bits >> 32) < cut;
                row[k] = int8_t(there * (1 - 2 * int8_t(bits & 1)));
            }
        }
    });
}

// out[i] = factor[r] * sum over neighbours of row r, and mixed[i] += alpha * out[i] / |out[i]|.
void fastrp_product(const int64_t* indptr, const void* indices, int wide, const float* weight,
                    const void* x, int small, const float* scale, const float* factor,
                    const int64_t* rows, int64_t count, int64_t first, int64_t d, float alpha,
                    int normalise, float* out, float* mixed, int threads) {
    const auto go = [&](const auto* ids) {
        if (small)
            product(indptr, ids, weight, static_cast<const int8_t*>(x), scale, factor, rows, count,
                    first, d, alpha, normalise != 0, out, mixed, threads);
        else
            product(indptr, ids, weight, static_cast<const float*>(x), scale, factor, rows, count,
                    first, d, alpha, normalise != 0, out, mixed, threads);
    };
    if (wide)
        go(static_cast<const int64_t*>(indices));
    else
        go(static_cast<const int32_t*>(indices));
}

}  // extern "C"
