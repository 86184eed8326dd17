// Weighted sums of vectors that are larger than the caches, and whether numbers are finite.
//
// The accumulator is taken block by block, so that it stays in the cache of a core while all
// updates are added to it: K updates cost K + 1 passes through memory, not 3 K. Every element is
// summed in the order of the updates by fused operations, so neither blocks nor threads nor the
// grouping of updates change a bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kBlock = 1 << 14;
// Below so many numbers in all a second thread costs more than it saves.
constexpr int64_t kAlone = 1 << 20;

void add(float* __restrict out, const float* const* x, const float* w, int64_t k, int64_t at,
         int64_t n, bool fresh) {
    int64_t j = 0;
    if (fresh) {
        const float* __restrict a = x[0] + at;
        const float v = w[0];
        for (int64_t i = 0; i < n; ++i) out[i] = v * a[i];
        j = 1;
    }
    for (; j + 4 <= k; j += 4) {
        const float* __restrict a = x[j] + at;
        const float* __restrict b = x[j + 1] + at;
        const float* __restrict c = x[j + 2] + at;
        const float* __restrict d = x[j + 3] + at;
        const float p = w[j], q = w[j + 1], r = w[j + 2], s = w[j + 3];
        for (int64_t i = 0; i < n; ++i)
            out[i] = std::fma(s, d[i], std::fma(r, c[i], std::fma(q, b[i], std::fma(p, a[i], out[i]))));
    }
    for (; j < k; ++j) {
        const float* __restrict a = x[j] + at;
        const float v = w[j];
        for (int64_t i = 0; i < n; ++i) out[i] = std::fma(v, a[i], out[i]);
    }
}

template <typename Work>
void split(int64_t n, int64_t total, int64_t threads, Work work) {
    if (threads < 2 || total < kAlone) return work(0, n);
    // Of whole cache lines.
    const int64_t share = (n / threads + 15) / 16 * 16;
    std::vector<std::thread> others;
    for (int64_t t = 1; t < threads && t * share < n; ++t)
        others.emplace_back(work, t * share, t == threads - 1 ? n : std::min(n, (t + 1) * share));
    work(0, std::min(n, share));
    for (auto& one : others) one.join();
}

}  // namespace

extern "C" {

// out [n] = (fresh ? 0 : out) + sum over j of w[j] * x[j] [n]
void weighted_sum(float* out, const float* const* x, const float* w, int64_t k, int64_t n,
                  int64_t fresh, int64_t threads) {
    split(n, n * k, threads, [=](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at += kBlock)
            add(out + at, x, w, k, at, std::min(kBlock, end - at), fresh != 0);
    });
}

// Whether all numbers are finite: none has an exponent of ones.
int64_t all_finite(const float* x, int64_t n) {
    for (int64_t at = 0; at < n; at += kBlock) {
        const int64_t count = std::min(kBlock, n - at);
        uint32_t wrong = 0;
        for (int64_t i = 0; i < count; ++i) {
            uint32_t bits;
            std::memcpy(&bits, x + at + i, 4);
            wrong |= (bits & 0x7f800000u) == 0x7f800000u;
        }
        if (wrong) return 0;
    }
    return 1;
}
}
