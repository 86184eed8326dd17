// Plain columns and rows, filtered and compared one after another: what quantised ones must beat.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

extern "C" {

// Bits of the rows whose values lie in a range of each column, float32 [columns, n].
void plain_filter(const float* values, int64_t n, int64_t columns, const float* low,
                  const float* high, uint8_t* bitmap) {
    int64_t begin = 0;
#ifdef __AVX512F__
    for (; begin + 16 <= n; begin += 16) {
        __mmask16 is = 0xffff;
        for (int64_t c = 0; c < columns; ++c) {
            const __m512 value = _mm512_loadu_ps(values + c * n + begin);
            is = _mm512_mask_cmp_ps_mask(is, value, _mm512_set1_ps(low[c]), _CMP_GE_OQ);
            is = _mm512_mask_cmp_ps_mask(is, value, _mm512_set1_ps(high[c]), _CMP_LE_OQ);
        }
        bitmap[begin / 8] = uint8_t(is), bitmap[begin / 8 + 1] = uint8_t(is >> 8);
    }
#endif
    for (int64_t i = begin; i < n; i += 8) {
        uint8_t bits = 0;
        for (int64_t j = i; j < std::min(i + 8, n); ++j) {
            bool is = true;
            for (int64_t c = 0; c < columns; ++c)
                is &= low[c] <= values[c * n + j] && values[c * n + j] <= high[c];
            bits |= uint8_t(is) << (j - i);
        }
        bitmap[i / 8] = bits;
    }
}

// The nearest k rows of a bitmap.
void plain_scan(const uint8_t* bitmap, int64_t n, const float* vectors, int64_t d,
                const float* query, int64_t k, int64_t* ids) {
    std::vector<int32_t> rows;
    rows.reserve(n / 8);
    for (int64_t byte = 0; byte < (n + 7) / 8; ++byte)
        for (uint32_t bits = bitmap[byte]; bits; bits &= bits - 1)
            rows.push_back(byte * 8 + __builtin_ctz(bits));
    std::vector<std::pair<float, int64_t>> heap;
    const int64_t count = rows.size();
    for (int64_t i = 0; i < count; ++i) {
        if (i + 8 < count)
            for (int64_t at = 0; at < d; at += 16)
                __builtin_prefetch(vectors + rows[i + 8] * d + at);
        const float* row = vectors + rows[i] * d;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < d; ++j) sum += (query[j] - row[j]) * (query[j] - row[j]);
        const std::pair<float, int64_t> one(sum, rows[i]);
        if (int64_t(heap.size()) < k) {
            heap.push_back(one);
            std::push_heap(heap.begin(), heap.end());
        } else if (one < heap[0]) {
            std::pop_heap(heap.begin(), heap.end());
            heap.back() = one;
            std::push_heap(heap.begin(), heap.end());
        }
    }
    std::sort_heap(heap.begin(), heap.end());
    for (int64_t i = 0; i < k; ++i) ids[i] = i < int64_t(heap.size()) ? heap[i].second : -1;
}
}
