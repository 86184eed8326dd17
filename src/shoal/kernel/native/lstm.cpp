// What is left of a step of an LSTM when its products are made: gates, cell and output.
//
// The rows are those of a few sequences, each at a place of its own in a longer tensor. Gates lie
// side by side: in, forget, out, cell.
#include "activations.h"

#ifdef __AVX512F__
namespace {

inline __m512 sixteen(const float* at, __mmask16 some) { return _mm512_maskz_loadu_ps(some, at); }
inline __m512 sixteen(const uint16_t* at, __mmask16 some) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void put(float* at, __m512 x, __mmask16 some) { _mm512_mask_storeu_ps(at, some, x); }
inline void put(uint16_t* at, __m512 x, __mmask16 some) {
#ifdef __AVX512BF16__
  _mm256_mask_storeu_epi16(at, some, (__m256i)_mm512_cvtneps_pbh(x));
#else
  alignas(64) float held[16];
  _mm512_store_ps(held, x);
  for (int i = 0; i < 16; i++)
    if (some >> i & 1) at[i] = to_bf16(held[i]);
#endif
}
inline __m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}
inline __m512 tanh_ps(__m512 x) {
  const __m512 two = _mm512_set1_ps(2.0f);
  return _mm512_fmsub_ps(two, sigmoid(_mm512_mul_ps(two, x)), _mm512_set1_ps(1.0f));
}

// One step of `rows` sequences. `into` and `out` have their rows so many numbers apart, and so has
// `gates`, which may be missing, as `into` has; all else lies side by side.
template <class T>
void cell(const T* into, int64_t into_apart, const T* onto, const float* before, float* after, T* h,
          T* out, int64_t out_apart, T* gates, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > 4096)
  for (int64_t r = 0; r < rows; r++) {
    const T *a = into + r * into_apart, *b = onto + r * 4 * width;
    for (int64_t i = 0; i < width; i += 16) {
      const __mmask16 some = low16(width - i);
      const auto gate = [&](int64_t number) {
        const int64_t at = number * width + i;
        return _mm512_add_ps(sixteen(a + at, some), sixteen(b + at, some));
      };
      const __m512 start = sigmoid(gate(0)), keep = sigmoid(gate(1)), give = sigmoid(gate(2));
      const __m512 fresh = tanh_ps(gate(3));
      const __m512 held = _mm512_mul_ps(keep, sixteen(before + r * width + i, some));
      const __m512 now = _mm512_fmadd_ps(start, fresh, held);
      const __m512 said = _mm512_mul_ps(give, tanh_ps(now));
      if (gates) {
        T* to = gates + r * into_apart + i;
        put(to, start, some), put(to + width, keep, some);
        put(to + 2 * width, give, some), put(to + 3 * width, fresh, some);
      }
      put(after + r * width + i, now, some);
      put(h + r * width + i, said, some);
      put(out + r * out_apart + i, said, some);
    }
  }
}

// Its gradients. `gates` are what the step kept; `dgates` has its rows as far apart and `side` has
// them side by side. `dh` is what comes of the next step, or missing; `dcell` goes on to the step
// before.
template <class T>
void back(const T* gates, int64_t apart, const float* before, const float* after, const T* grad_out,
          int64_t dout_apart, const T* dh, float* dcell, T* dgates, T* side, int64_t rows,
          int64_t width) {
  const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for if (rows * width > 4096)
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t i = 0; i < width; i += 16) {
      const __mmask16 some = low16(width - i);
      const T* from = gates + r * apart + i;
      const __m512 start = sixteen(from, some), keep = sixteen(from + width, some);
      const __m512 give = sixteen(from + 2 * width, some), fresh = sixteen(from + 3 * width, some);
      const __m512 said = tanh_ps(sixteen(after + r * width + i, some));
      __m512 d = sixteen(grad_out + r * dout_apart + i, some);
      if (dh) d = _mm512_add_ps(d, sixteen(dh + r * width + i, some));
      // x (1 - x) and 1 - x x
      const auto slope = [&](__m512 x) { return _mm512_fnmadd_ps(x, x, x); };
      const auto steep = [&](__m512 x) { return _mm512_fnmadd_ps(x, x, one); };
      const auto times = [](__m512 a, __m512 b) { return _mm512_mul_ps(a, b); };
      const __m512 dc = _mm512_fmadd_ps(times(d, give), steep(said),
                                        sixteen(dcell + r * width + i, some));
      const __m512 old = sixteen(before + r * width + i, some);
      const __m512 found[4] = {times(times(dc, fresh), slope(start)),
                               times(times(dc, old), slope(keep)),
                               times(times(d, said), slope(give)),
                               times(times(dc, start), steep(fresh))};
      for (int64_t number = 0; number < 4; number++) {
        put(dgates + r * apart + number * width + i, found[number], some);
        put(side + (r * 4 + number) * width + i, found[number], some);
      }
      put(dcell + r * width + i, times(dc, keep), some);
    }
  }
}

}  // namespace

#define SHOAL_LSTM(NAME, T)                                                                       \
  extern "C" void lstm_cell_##NAME(const T* into, int64_t into_apart, const T* onto,              \
                                   const float* before, float* after, T* h, T* out,               \
                                   int64_t out_apart, T* gates, int64_t rows, int64_t width) {    \
    cell<T>(into, into_apart, onto, before, after, h, out, out_apart, gates, rows, width);        \
  }                                                                                               \
  extern "C" void lstm_back_##NAME(const T* gates, int64_t apart, const float* before,            \
                                   const float* after, const T* grad_out, int64_t dout_apart,         \
                                   const T* dh, float* dcell, T* dgates, T* side, int64_t rows,   \
                                   int64_t width) {                                               \
    back<T>(gates, apart, before, after, grad_out, dout_apart, dh, dcell, dgates, side, rows, width); \
  }
SHOAL_LSTM(fp32, float)
SHOAL_LSTM(bf16, uint16_t)

// What can be written down on a tape in the place of a copy by PyTorch.
extern "C" void lstm_copy(const uint8_t* from, uint8_t* to, int64_t nbytes) {
  std::memcpy(to, from, size_t(nbytes));
}
#endif
