// Queries turned once for each block of a context that they see, and what they see in all blocks
// put together; the loops are plain, for the compiler to make vectors of.
#include "simd.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr int64_t kSmall = 1 << 15;  // numbers that one thread has done before another wakes

// out[P, heads, d] = x[row[P]], its heads turned by cos, sin [places, d / 2] at place[P].
template <class T>
void turn(const T* x, T* out, const int64_t* row, const int64_t* place, const float* cos,
          const float* sin, int64_t pairs, int64_t stride, int64_t heads, int64_t d) {
  const int64_t half = d / 2;
#pragma omp parallel for if (pairs * heads * d > kSmall)
  for (int64_t i = 0; i < pairs; i++) {
    const T* from = x + row[i] * stride;
    T* to = out + i * heads * d;
    if (!place[i]) {
      std::memcpy(to, from, heads * d * sizeof(T));
      continue;
    }
    const float *c = cos + place[i] * half, *s = sin + place[i] * half;
    for (int64_t h = 0; h < heads; h++, from += d, to += d)
      for (int64_t j = 0; j < half; j++) {
        const float a = to_float(from[j]), b = to_float(from[half + j]);
        store(to + j, a * c[j] - b * s[j]);
        store(to + half + j, b * c[j] + a * s[j]);
      }
  }
}

// out[N, heads, d]: records [P, heads, d + 2] (sums, largest score, sum of weights) of the parts
// [N, M] of each row, -1 for none.
template <class T>
void merge(const float* records, const int64_t* parts, T* out, int64_t rows, int64_t most,
           int64_t heads, int64_t d) {
  const int64_t width = d + 2;
#pragma omp parallel for if (rows * most * heads * d > kSmall)
  for (int64_t n = 0; n < rows; n++)
    for (int64_t h = 0; h < heads; h++) {
      const int64_t* mine = parts + n * most;
      float top = -INFINITY, total = 0;
      for (int64_t m = 0; m < most; m++)
        if (mine[m] >= 0) top = std::max(top, records[(mine[m] * heads + h) * width + d]);
      T* to = out + (n * heads + h) * d;
      constexpr int64_t kPiece = 64;
      float sum[kPiece];
      for (int64_t first = 0; first < d; first += kPiece) {
        const int64_t size = std::min(kPiece, d - first);
        std::fill(sum, sum + kPiece, 0.0f);
        total = 0;
        for (int64_t m = 0; m < most; m++) {
          if (mine[m] < 0) continue;
          const float* record = records + (mine[m] * heads + h) * width;
          const float worth = std::exp2(record[d] - top);
          total += worth * record[d + 1];
          for (int64_t j = 0; j < size; j++) sum[j] += worth * record[first + j];
        }
        const float by = 1.0f / total;
        for (int64_t j = 0; j < size; j++) store(to + first + j, sum[j] * by);
      }
    }
}

}  // namespace

#define VIEWS(NAME, T)                                                                        \
  extern "C" void view_turn_##NAME(const T* x, T* out, const int64_t* row,                    \
                                   const int64_t* place, const float* cos, const float* sin,  \
                                   int64_t pairs, int64_t stride, int64_t heads, int64_t d) { \
    turn(x, out, row, place, cos, sin, pairs, stride, heads, d);                              \
  }                                                                                           \
  extern "C" void view_merge_##NAME(const float* records, const int64_t* parts, T* out,       \
                                    int64_t rows, int64_t most, int64_t heads, int64_t d) {   \
    merge(records, parts, out, rows, most, heads, d);                                         \
  }

VIEWS(fp32, float)
VIEWS(bf16, uint16_t)
