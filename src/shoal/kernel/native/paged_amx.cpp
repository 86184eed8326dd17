// The products of attention by matrix tiles (AMX).
#include "paged_blocks.h"
#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

namespace {

struct Tiles {
  static void begin() {
    TileConfig config;
    for (int i = 0; i < 8; i++) config.colsb[i] = 64, config.rows[i] = 16;
    fence();
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }

  // Tiles 0 to 3 sums, 4 and 5 rows, 6 and 7 columns.
  static void product(const Factors& by, float* to, int64_t across, bool add) {
    fence();
    if (add) {
      _tile_loadd(0, to, across * 4);
      _tile_loadd(1, to + 16, across * 4);
      _tile_loadd(2, to + 16 * across, across * 4);
      _tile_loadd(3, to + 16 * across + 16, across * 4);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t s = 0; s < by.steps; s++) {
      const char* rows = (const char*)by.rows + 64 * s;
      _tile_loadd(4, rows, by.across);
      _tile_loadd(6, by.left + s * by.stride, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, by.right + s * by.stride, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, rows + 16 * by.across, by.across);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, to, across * 4);
    _tile_stored(1, to + 16, across * 4);
    _tile_stored(2, to + 16 * across, across * 4);
    _tile_stored(3, to + 16 * across + 16, across * 4);
    fence();
  }
};

}  // namespace

extern "C" int64_t paged_attention_amx(const int64_t* arguments) {
  return attention_of_blocks<Tiles>(arguments);
}
#endif
