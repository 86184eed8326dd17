// y[M, N] = x[M, K] @ w[N, K].T + bias[N] in bf16 by matrix tiles (AMX), the weights packed.
//
// A panel is 32 outputs over all of K; a step of it is 32 inputs, two tiles of weights that lie
// side by side, so that the weights pass by as one stream. A turn is one panel and up to 32 rows:
// four tiles of sums, two of rows, two of weights. While a turn multiplies, the sums of the turn
// before are rounded and written, a row a step: written at once, they would be waited for.
// Every output is one sum over K in one order: a row has the same bits in any company.
// Where half of the outputs are gates, a panel is 16 of these and the 16 that they gate.
#include "activations.h"
#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

namespace {

constexpr int64_t STEP = 1024;          // weights of a step
constexpr int64_t AHEAD = 2048;         // bytes
constexpr int64_t RESIDENT = 512 << 10;  // bytes of panels that all rows pass, in the second cache

struct Shape {
  int64_t m, n, k, gated;
  int64_t outputs() const { return gated ? n / 2 : n; }
  int64_t width() const { return gated ? 16 : 32; }  // outputs of a panel
};

// As bf16 holds it.
inline __m512 rounded(__m512 x) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

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
    const int64_t left = shape.outputs() - last.column;
    const float* more = shape.gated ? bias + shape.n / 2 : bias + 16;
    __m512 low = _mm512_load_ps(from), high = _mm512_load_ps(from + 256);
    if (bias) {
      const __mmask16 second = shape.gated ? low16(left) : left > 16 ? low16(left - 16) : 0;
      low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(low16(left), bias + last.column));
      high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(second, more + last.column));
    }
    uint16_t* to = last.out + r * shape.outputs();
    if (shape.gated) {
      const __m512 y = _mm512_mul_ps(silu(rounded(low)), rounded(high));
      _mm256_mask_storeu_epi16(to, low16(left), (__m256i)_mm512_cvtneps_pbh(y));
    } else {
      const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(high, low);
      _mm512_mask_storeu_epi16(to, low32(left), pair);
    }
  }

  const Shape shape;
  const float* const bias;
  alignas(64) float sums[2][1024];
  int which = 0;
  Last last = {};
};

}  // namespace

// w[N, K] to panels; `out` has room for all of them with K rounded up to 32, and what is beyond N
// and K is zero.
extern "C" void linear_amx_pack(const uint16_t* w, uint16_t* out, int64_t n, int64_t k,
                                int64_t gated) {
  const Shape shape = {0, n, k, gated};
  const int64_t width = shape.width(), outputs = shape.outputs();
  const int64_t panels = (outputs + width - 1) / width, steps = (k + 31) / 32;
#pragma omp parallel for
  for (int64_t p = 0; p < panels; p++) {
    for (int64_t s = 0; s < steps; s++) {
      uint32_t* tile = (uint32_t*)(out + (p * steps + s) * STEP);
      for (int64_t c = 0; c < 32; c++) {
        const int64_t output = p * width + c % width, left = k - s * 32;
        const int64_t row = output < outputs ? output + c / width * outputs : n;
        alignas(64) uint32_t pairs[16];
        const __m512i some =
            row < n ? _mm512_maskz_loadu_epi16(low32(left), w + row * k + s * 32) : __m512i{};
        _mm512_store_si512(pairs, some);
        for (int64_t r = 0; r < 16; r++) tile[(c >> 4) * 256 + r * 16 + (c & 15)] = pairs[r];
      }
    }
  }
}

// K is a multiple of 32 here: who calls has filled the rows of x up with zeros.
extern "C" void linear_amx(const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y,
                           int64_t m, int64_t n, int64_t k, int64_t gated) {
  const Shape shape = {m, n, k, gated};
  const int64_t panels = (shape.outputs() + shape.width() - 1) / shape.width(), rest = m % 32, whole = m - rest;
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
