// Rows turned on by some places; the loops are plain, for the compiler to make vectors of.
#include "simd.h"

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

}  // namespace

#define VIEWS(NAME, T)                                                                        \
  extern "C" void view_turn_##NAME(const T* x, T* out, const int64_t* row,                    \
                                   const int64_t* place, const float* cos, const float* sin,  \
                                   int64_t pairs, int64_t stride, int64_t heads, int64_t d) { \
    turn(x, out, row, place, cos, sin, pairs, stride, heads, d);                              \
  }

VIEWS(fp32, float)
VIEWS(bf16, uint16_t)
