// What a drafter does beside its products: a gate that mixes a feature with a token, and the best
// tokens behind each place with the logs of their probabilities.
#include "activations.h"

#ifdef __AVX512BF16__
#include <cmath>
#include <limits>

namespace {

inline __m512 load(const float* at, __mmask16 m) { return _mm512_maskz_loadu_ps(m, at); }
inline __m512 load(const uint16_t* at, __mmask16 m) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, at)), 16));
}
inline void save(float* at, __mmask16 m, __m512 x) { _mm512_mask_storeu_ps(at, m, x); }
inline void save(uint16_t* at, __mmask16 m, __m512 x) {
  _mm256_mask_storeu_epi16(at, m, (__m256i)_mm512_cvtneps_pbh(x));
}

// out[R, D] = z u + (1 - z) v with z = sigmoid(a + b); u, a lie side by side in x[R, 2 D], and
// v, b in the row of a token in table[V, 2 D].
template <class T>
void gate(const T* x, const T* table, const int64_t* tokens, T* out, int64_t rows, int64_t d) {
  const __m512 one = _mm512_set1_ps(1.0f);
  for (int64_t r = 0; r < rows; r++) {
    const T *u = x + 2 * r * d, *v = table + 2 * tokens[r] * d;
    for (int64_t i = 0; i < d; i += 16) {
      const __mmask16 k = low16(d - i);
      const __m512 sum = _mm512_add_ps(load(u + d + i, k), load(v + d + i, k));
      const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), sum));
      const __m512 z = _mm512_div_ps(one, _mm512_add_ps(one, e)), w = load(v + i, k);
      save(out + r * d + i, k, _mm512_fmadd_ps(z, _mm512_sub_ps(load(u + i, k), w), w));
    }
  }
}

// The `count` greatest of each row of x[R, V], the greatest first and of equals the first one, and
// the logs of their shares in the softmax.
template <class T>
void best(const T* x, int64_t* tokens, float* values, int64_t rows, int64_t v, int64_t count) {
  const float least = -std::numeric_limits<float>::infinity();
  for (int64_t r = 0; r < rows; r++, x += v, tokens += count, values += count) {
    for (int64_t j = 0; j < count; j++) tokens[j] = 0, values[j] = least;
    for (int64_t i = 0; i < v; i += 16) {
      const __mmask16 k = low16(v - i);
      const __m512 found = load(x + i, k);
      const __m512 bar = _mm512_set1_ps(values[count - 1]);
      __mmask16 over = _mm512_mask_cmp_ps_mask(k, found, bar, _CMP_GT_OQ);
      if (!over) continue;
      alignas(64) float held[16];
      _mm512_store_ps(held, found);
      for (; over; over &= over - 1) {
        const int lane = __builtin_ctz(over);
        int64_t at = count - 1;
        if (!(held[lane] > values[at])) continue;
        for (; at > 0 && held[lane] > values[at - 1]; at--)
          values[at] = values[at - 1], tokens[at] = tokens[at - 1];
        values[at] = held[lane], tokens[at] = i + lane;
      }
    }
    const __m512 top = _mm512_set1_ps(values[0]);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < v; i += 16) {
      const __mmask16 k = low16(v - i);
      sum = _mm512_add_ps(sum, _mm512_maskz_mov_ps(k, exp_ps(_mm512_sub_ps(load(x + i, k), top))));
    }
    const float whole = values[0] + std::log(_mm512_reduce_add_ps(sum));
    for (int64_t j = 0; j < count; j++) values[j] -= whole;
  }
}

}  // namespace

#define SHOAL_GUESS(NAME, T)                                                                     \
  extern "C" void guess_gate_##NAME(const T* x, const T* table, const int64_t* tokens, T* out,   \
                                    int64_t rows, int64_t d) {                                   \
    gate<T>(x, table, tokens, out, rows, d);                                                     \
  }                                                                                              \
  extern "C" void guess_best_##NAME(const T* x, int64_t* tokens, float* values, int64_t rows,    \
                                    int64_t v, int64_t count) {                                  \
    best<T>(x, tokens, values, rows, v, count);                                                  \
  }
SHOAL_GUESS(fp32, float)
SHOAL_GUESS(bf16, uint16_t)
#endif
