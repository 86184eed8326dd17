// Causal attention and its gradient in bf16 by matrix tiles (AMX).
//
// Products are of two tiles of rows with a panel of two tiles of outputs.
#include "causal.h"
#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

namespace {

struct Tiles {
  static constexpr int ROWS = 32;
  static constexpr int64_t CHUNK = 4 * ROWS;

  static void begin() {
    TileConfig config;
    for (int i = 0; i < 8; i++) config.colsb[i] = 64, config.rows[i] = 16;
    fence();
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }
  static int64_t pairs_of(int64_t seen) { return (seen + 31) / 32 * 16; }

  // Sixteen pairs a step; `across` bytes lie between pairs of the panel.
  static void add_up(const void* rows, int64_t row, const uint32_t* panel, int64_t across,
                     int64_t pairs, float* to, int64_t stride, bool add) {
    const int64_t line = stride * 4;
    fence();
    if (add) {
      _tile_loadd(0, to, line);
      _tile_loadd(1, to + 16, line);
      _tile_loadd(2, to + 16 * stride, line);
      _tile_loadd(3, to + 16 * stride + 16, line);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const char* left = (const char*)panel;
    const char* in = (const char*)rows;
    for (int64_t p = 0; p < pairs; p += 16, in += 64, left += 16 * across) {
      _tile_loadd(4, in, row);
      _tile_loadd(6, left, across);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, left + 64, across);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, in + 16 * row, row);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, to, line);
    _tile_stored(1, to + 16, line);
    _tile_stored(2, to + 16 * stride, line);
    _tile_stored(3, to + 16 * stride + 16, line);
    fence();
  }
  static void product(const void* rows, int64_t row, const uint32_t* panel, int64_t pairs,
                      float* to, int64_t stride, bool add) {
    add_up(rows, row, panel, 4 * PANEL, pairs, to, stride, add);
  }

  // Rows are numbers of a query, and its gradient is a column: shares by pairs of keys are panels.
  struct Keys {
    uint32_t* turned;  // pairs of keys, [d][across / 2]
    Keys(const Shape& s, const View&, const uint32_t* pairs)
        : turned(arena.take<uint32_t>(s.dim * s.across() / 2)) {
      const int64_t all = s.columns() / 2;
      for (int64_t d = 0; d < s.dim; d += 16)
        for (int64_t p = 0; p < all; p += 16) {
          __m512i row[16];
          for (int64_t i = 0; i < 16; i++)
            row[i] = _mm512_load_si512(pairs + (d / PANEL * all + p + i) * PANEL + d % PANEL);
          turn(row);
          for (int64_t i = 0; i < 16; i++)
            _mm512_store_si512(turned + (d + i) * s.across() / 2 + p, row[i]);
        }
    }
  };
  static void add_queries(const Shape& s, const Back& b, const Keys& keys, int64_t chunk,
                          int64_t used) {
    const int64_t across = s.across();
    for (int64_t first = chunk; first < s.columns(); first += PANEL)
      for (int64_t d = 0; d < s.dim; d += ROWS)
        add_up(keys.turned + (d * across + chunk) / 2, 2 * across, b.pairs + first, 4 * across,
               used, b.grad_q + d * across + first, across, true);
  }
  static void write_queries(const Shape& s, const float* grad_q, uint16_t* to) {
    for (int64_t i = 0; i < s.columns(); i += 16)
      for (int64_t d = 0; d < s.dim; d += 16) {
        alignas(64) __m512i row[16];
        for (int64_t j = 0; j < 16; j++)
          row[j] = _mm512_load_si512(grad_q + (d + j) * s.across() + i);
        turn(row);
        for (int64_t j = 0; j < 16 && i + j < s.length; j++)
          write((const float*)(row + j), to + (i + j) * s.heads * s.dim + d, 16, s.scale());
      }
  }
};

}  // namespace

CAUSAL_ATTENTION(Tiles, causal_amx)
#endif
