// Weights w[N, K] in panels, and how the sums of a panel become outputs.
//
// A panel is 32 outputs over all of K; a step of it is 32 inputs: two halves of 16 outputs, each of
// them 16 rows of 16 outputs' pairs of inputs, that lie side by side, so that the weights pass by
// as one stream. Where half of the outputs are gates, a panel is 16 of these and the 16 that they
// gate.
#include "activations.h"

#ifdef __AVX512BF16__
namespace {

constexpr int64_t STEP = 1024;  // weights of a step

struct Shape {
  int64_t m, n, k, gated;
  int64_t outputs() const { return gated ? n / 2 : n; }
  int64_t width() const { return gated ? 16 : 32; }  // outputs of a panel
  int64_t panels() const { return (outputs() + width() - 1) / width(); }
};

// As bf16 holds it.
inline __m512 rounded(__m512 x) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

// The sums of one row of the panel whose first output is `column`.
inline void write_row(const Shape& shape, const float* bias, __m512 low, __m512 high, uint16_t* to,
                      int64_t column) {
  const int64_t left = shape.outputs() - column;
  if (bias) {
    const float* more = shape.gated ? bias + shape.n / 2 : bias + 16;
    const __mmask16 second = shape.gated ? low16(left) : left > 16 ? low16(left - 16) : 0;
    low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(low16(left), bias + column));
    high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(second, more + column));
  }
  if (shape.gated) {
    const __m512 y = _mm512_mul_ps(silu(rounded(low)), rounded(high));
    _mm256_mask_storeu_epi16(to, low16(left), (__m256i)_mm512_cvtneps_pbh(y));
  } else {
    const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    _mm512_mask_storeu_epi16(to, low32(left), pair);
  }
}

// 16 rows of 16 pairs become 16 rows of as many columns: in fours within lanes, then the lanes.
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(x[i], x[i + 1]), b = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]);
    const __m512i d = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
    y[i] = _mm512_unpacklo_epi64(a, c), y[i + 1] = _mm512_unpackhi_epi64(a, c);
    y[i + 2] = _mm512_unpacklo_epi64(b, d), y[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
  for (int i = 0; i < 4; i++) {
    const __m512i a = _mm512_shuffle_i32x4(y[i], y[i + 4], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(y[i], y[i + 4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xdd);
    x[i] = _mm512_shuffle_i32x4(a, c, 0x88), x[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
    x[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), x[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

}  // namespace

// w[N, K] to panels; `out` has room for all of them with K rounded up to 32, and what is beyond N
// and K is zero.
extern "C" void pack_panels(const uint16_t* w, uint16_t* out, int64_t n, int64_t k,
                            int64_t gated) {
  const Shape shape = {0, n, k, gated};
  const int64_t width = shape.width(), outputs = shape.outputs(), steps = (k + 31) / 32;
#pragma omp parallel for
  for (int64_t p = 0; p < shape.panels(); p++) {
    const uint16_t* rows[32];  // null beyond the last output
    for (int64_t c = 0; c < 32; c++) {
      const int64_t output = p * width + c % width;
      const int64_t row = output < outputs ? output + c / width * outputs : n;
      rows[c] = row < n ? w + row * k : nullptr;
    }
    for (int64_t s = 0; s < steps; s++) {
      const __mmask32 left = low32(k - s * 32);
      for (int64_t half = 0; half < 2; half++) {
        __m512i pairs[16];
        for (int64_t c = 0; c < 16; c++) {
          const uint16_t* row = rows[half * 16 + c];
          pairs[c] = row ? _mm512_maskz_loadu_epi16(left, row + s * 32) : __m512i{};
        }
        transpose(pairs);
        __m512i* tile = (__m512i*)(out + (p * steps + s) * STEP) + half * 16;
        for (int64_t r = 0; r < 16; r++) _mm512_stream_si512(tile + r, pairs[r]);
      }
    }
    _mm_sfence();  // what was written past the caches is there when the threads meet
  }
}
#endif
