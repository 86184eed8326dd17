// The products of attention by vectors (AVX-512).
#include "paged_blocks.h"

#ifdef __AVX512BF16__

namespace {

struct Vectors {
  static void begin() {}
  static void end() {}

  // Eight rows at a time, a pair of numbers against two vectors of columns.
  static void product(const Factors& by, float* to, int64_t across, bool add) {
    constexpr int R = 8;
    for (int64_t first = 0; first < ROWS; first += R) {
      const char* rows = (const char*)by.rows + first * by.across;
      float* at = to + first * across;
      __m512 sum[R][2];
      for (int r = 0; r < R; r++)
        for (int c = 0; c < 2; c++)
          sum[r][c] = add ? _mm512_loadu_ps(at + r * across + 16 * c) : _mm512_setzero_ps();
      for (int64_t s = 0; s < by.steps; s++)
        for (int64_t p = 0; p < 16; p++, rows += 4) {
          const int64_t place = s * by.stride + 32 * p;
          const __m512bh left = (__m512bh)_mm512_loadu_si512(by.left + place);
          const __m512bh right = (__m512bh)_mm512_loadu_si512(by.right + place);
          for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, rows + r * by.across, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, left);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, right);
          }
        }
      for (int r = 0; r < R; r++)
        for (int c = 0; c < 2; c++) _mm512_storeu_ps(at + r * across + 16 * c, sum[r][c]);
    }
  }
};

}  // namespace

extern "C" int64_t paged_attention_packed(const int64_t* arguments) {
  return attention_of_blocks<Vectors>(arguments);
}
#endif
