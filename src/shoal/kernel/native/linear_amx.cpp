// y[M, N] = x[M, K] @ w[N, K].T + bias[N] in bf16 by matrix tiles (AMX), the weights packed.
//
// A turn is one panel and up to 32 rows: four tiles of sums, two of rows, two of weights. While a
// turn multiplies, the sums of the turn before are rounded and written, a row a step: written at
// once, they would be waited for.
// Every output is one sum over K in one order: a row has the same bits in any company.
#include "panels.h"
#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

namespace {

constexpr int64_t AHEAD = 2048;         // bytes
constexpr int64_t RESIDENT = 512 << 10;  // bytes of panels that all rows pass, in the second cache

void configure(int64_t first, int64_t second) {
  TileConfig config;
  for (int i = 0; i < 8; i++) config.colsb[i] = 64, config.rows[i] = 16;
  config.rows[0] = config.rows[1] = config.rows[4] = uint8_t(first);
  config.rows[2] = config.rows[3] = config.rows[5] = uint8_t(second);
  fence();
  _tile_loadconfig(&config);
}

class Turns {
 public:
  Turns(const Shape& shape, const float* bias) : shape(shape), bias(bias) {}

  // Rows `from` to `from + rows` of one panel. FRESH: its weights come from memory.
  template <bool TWO, bool FRESH>
  void turn(const uint16_t* x, const uint16_t* w, uint16_t* y, int64_t from, int64_t rows,
            int64_t panel) {
    const int64_t across = shape.k * 2, steps = shape.k / 32;
    const uint16_t* at = w + panel * steps * STEP;
    const uint16_t* in = x + from * shape.k;
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
      _tile_zero(2);
      _tile_zero(3);
    }
    const auto step = [&] {
      if (FRESH)
        for (int i = 0; i < 32; i++)
          _mm_prefetch((const char*)at + AHEAD + 64 * i, _MM_HINT_T0);
      _tile_loadd(4, in, across);
      _tile_loadd(6, at, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, at + STEP / 2, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (TWO) {
        _tile_loadd(5, in + 16 * shape.k, across);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      at += STEP, in += 32;
    };
    const int64_t beside = last.rows < steps ? last.rows : steps;
    for (int64_t s = 0; s < beside; s++) {
      step();
      write(s);
    }
    for (int64_t s = beside; s < steps; s++) step();
    for (int64_t r = beside; r < last.rows; r++) write(r);
    float* out = sums[which];
    _tile_stored(0, out, 64);
    _tile_stored(1, out + 256, 64);
    if (TWO) {
      _tile_stored(2, out + 512, 64);
      _tile_stored(3, out + 768, 64);
    }
    fence();
    const int64_t column = panel * shape.width();
    last = {out, y + from * shape.outputs() + column, rows, column};
    which ^= 1;
  }
  void finish() {
    for (int64_t r = 0; r < last.rows; r++) write(r);
    last.rows = 0;
  }

 private:
  struct Last { const float* sums; uint16_t* out; int64_t rows, column; };

  void write(int64_t r) const {
    const float* from = last.sums + (r >> 4) * 512 + (r & 15) * 16;
    write_row(shape, bias, _mm512_load_ps(from), _mm512_load_ps(from + 256),
            last.out + r * shape.outputs(), last.column);
  }

  const Shape shape;
  const float* const bias;
  alignas(64) float sums[2][1024];
  int which = 0;
  Last last = {};
};

}  // namespace

// K is a multiple of 32 here: who calls has filled the rows of x up with zeros.
extern "C" void linear_amx(const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y,
                           int64_t m, int64_t n, int64_t k, int64_t gated) {
  const Shape shape = {m, n, k, gated};
  const int64_t panels = shape.panels(), rest = m % 32, whole = m - rest;
  const int64_t fitting = RESIDENT / (k * 64), some = fitting < 4 ? 4 : fitting;
#pragma omp parallel
  {
    const Range part = share(panels, 1, omp_get_thread_num(), omp_get_num_threads());
    Turns turns(shape, bias);
    for (int64_t p0 = part.first; p0 < part.last; p0 += some) {
      const int64_t p1 = p0 + some < part.last ? p0 + some : part.last;
      if (whole) configure(16, 16);
      for (int64_t p = p0; whole && p < p1; p++) turns.turn<true, true>(x, w, y, 0, 32, p);
      for (int64_t i = 32; i < whole; i += 32)
        for (int64_t p = p0; p < p1; p++) turns.turn<true, false>(x, w, y, i, 32, p);
      if (rest > 16) configure(16, rest - 16);
      else if (rest) configure(rest, 1);
      for (int64_t p = p0; rest && p < p1; p++) {
        if (rest > 16 && !whole) turns.turn<true, true>(x, w, y, whole, rest, p);
        else if (rest > 16) turns.turn<true, false>(x, w, y, whole, rest, p);
        else if (!whole) turns.turn<false, true>(x, w, y, whole, rest, p);
        else turns.turn<false, false>(x, w, y, whole, rest, p);
      }
    }
    turns.finish();
    _tile_release();
  }
}
#endif
