// Causal attention and its gradient in bf16 by vectors (AVX-512).
//
// Products are of twelve rows with a panel of 32 outputs, as in linear_packed.cpp.
#include "causal.h"

#ifdef __AVX512BF16__

namespace {

struct Vectors {
  static constexpr int ROWS = 12;
  static constexpr int64_t CHUNK = 8 * ROWS;  // 3 panels

  static void begin() {}
  static void end() {}
  static int64_t pairs_of(int64_t seen) { return (seen + 1) / 2; }

  // Rows, `row` bytes apart, of pairs, `pair` bytes apart, with a panel.
  static void add_up(const void* rows, int64_t row, int64_t pair, const uint32_t* panel,
                     int64_t pairs, float* to, int64_t stride, bool add) {
    __m512 sum[ROWS][2];
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < 2; c++)
        sum[r][c] = add ? _mm512_loadu_ps(to + r * stride + 16 * c) : _mm512_setzero_ps();
    const char* x = (const char*)rows;
    for (int64_t p = 0; p < pairs; p++, x += pair, panel += PANEL) {
      const __m512bh low = (__m512bh)_mm512_load_si512(panel);
      const __m512bh high = (__m512bh)_mm512_load_si512(panel + 16);
      for (int r = 0; r < ROWS; r++) {
        int32_t both;
        std::memcpy(&both, x + r * row, 4);
        const __m512bh wide = (__m512bh)_mm512_set1_epi32(both);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], wide, low);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], wide, high);
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < 2; c++) _mm512_storeu_ps(to + r * stride + 16 * c, sum[r][c]);
  }
  static void product(const void* rows, int64_t row, const uint32_t* panel, int64_t pairs,
                      float* to, int64_t stride, bool add) {
    add_up(rows, row, 4, panel, pairs, to, stride, add);
  }

  // Rows are queries, and shares lie by pairs of keys.
  struct Keys {
    const uint32_t* pairs;
    Keys(const Shape&, const View&, const uint32_t* pairs) : pairs(pairs) {}
  };
  static void add_queries(const Shape& s, const Back& b, const Keys& keys, int64_t chunk,
                          int64_t used) {
    for (int64_t first = chunk; first < s.length; first += ROWS)
      for (int64_t d = 0; d < s.dim; d += PANEL)
        add_up(b.pairs + first, 4, 4 * s.across(),
               keys.pairs + (d * s.columns() + chunk * PANEL) / 2, used,
               b.grad_q + first * s.dim + d, s.dim, true);
  }
  static void write_queries(const Shape& s, const float* grad_q, uint16_t* to) {
    for (int64_t i = 0; i < s.length; i++)
      write(grad_q + i * s.dim, to + i * s.heads * s.dim, s.dim, s.scale());
  }
};

}  // namespace

CAUSAL_ATTENTION(Vectors, causal)
#endif
