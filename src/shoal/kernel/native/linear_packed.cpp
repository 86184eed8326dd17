// y[M, N] = x[M, K] @ w[N, K].T + bias[N] in bf16 by vectors (AVX-512), the weights packed, in bf16
// or as bytes.
//
// A block is one panel and up to twelve rows: 24 vectors of sums, one pair of a row at a time
// against two vectors of weights. While rows pass a panel that lies in the second cache, the next
// one is fetched into it.
// Every output is one sum over K in one order: a row has the same bits in any company.
#include "panels.h"

#ifdef __AVX512BF16__

namespace {

constexpr int64_t AHEAD = 8192;       // bytes
constexpr int64_t CHUNK = 128;        // steps of a panel that stay in the second cache
constexpr int ROWS = 12;
constexpr int64_t GROUP = 8 * ROWS;   // rows whose sums wait for the next chunk

inline __m512bh pair_of(const uint16_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// How a panel lies in memory: what a pair of inputs is multiplied with, and what becomes of sums.
struct Halves {
  static constexpr int64_t step = 2 * STEP;  // bytes
  const char* at;
  const float* bias;

  void pair(const char* w, __m512bh& low, __m512bh& high) const {
    low = (__m512bh)_mm512_load_si512(w);
    high = (__m512bh)_mm512_load_si512(w + STEP);
  }
  void write(const Shape& shape, int64_t, int64_t column, __m512 low, __m512 high,
             uint16_t* to) const {
    write_row(shape, bias, low, high, to, column);
  }
};

#ifdef __AVX512VBMI__
// Bytes of a sign and 7 bits i that mean i + 1/2: of all numbers of 8 bits, none is left over. A
// line of 64 is a pair of inputs of 32 outputs. Both bytes of a bf16 are looked up.
struct Bytes {
  static constexpr int64_t step = STEP;
  const char* at;
  const float *bias, *scales, *halves;  // [N], [N], [M]: half of the sum of a row
  __m512i tables[4];

  Bytes(const void* at, const float* bias, const float* scales, const float* halves)
      : at((const char*)at), bias(bias), scales(scales), halves(halves) {
    alignas(64) uint8_t bytes[2][128];
    for (int i = 0; i < 128; i++) {
      const uint16_t value = to_bf16(float(i) + 0.5f);
      bytes[0][i] = uint8_t(value), bytes[1][i] = uint8_t(value >> 8);
    }
    for (int i = 0; i < 4; i++) tables[i] = _mm512_load_si512(bytes[0] + 64 * i);
  }

  void pair(const char* w, __m512bh& low, __m512bh& high) const {
    const __m512i codes = _mm512_load_si512(w);
    const __m512i lower = _mm512_permutex2var_epi8(tables[0], codes, tables[1]);
    const __m512i upper = _mm512_permutex2var_epi8(tables[2], codes, tables[3]);
    // upper | (codes & sign)
    const __m512i signs = _mm512_set1_epi8(char(0x80));
    const __m512i both = _mm512_ternarylogic_epi32(upper, codes, signs, 0xf8);
    low = (__m512bh)_mm512_unpacklo_epi8(lower, both);
    high = (__m512bh)_mm512_unpackhi_epi8(lower, both);
  }
  void write(const Shape& shape, int64_t row, int64_t column, __m512 low, __m512 high,
             uint16_t* to) const {
    const int64_t left = shape.n - column;
    const __mmask16 first = low16(left), second = left > 16 ? low16(left - 16) : 0;
    const __m512 half = _mm512_set1_ps(halves[row]);
    low = _mm512_mul_ps(_mm512_sub_ps(low, half), _mm512_maskz_loadu_ps(first, scales + column));
    high = _mm512_mul_ps(_mm512_sub_ps(high, half),
                         _mm512_maskz_loadu_ps(second, scales + column + 16));
    write_row(shape, bias, low, high, to, column);
  }
};
#endif

// What a block does with some steps of a panel.
struct Work {
  const uint16_t* x;  // the first row, at the first step
  const char* w;      // the panel, at the first step
  int64_t row, steps;
  const char* ahead;  // to be fetched meanwhile
  int64_t lines;      // of the cache, of that, a pair of inputs: 2 or 1
  float* sums;        // [R][32] between chunks
  bool fresh, last;
};

template <int R, class W>
inline void block(const Shape& shape, const W& weights, const Work& work, uint16_t* y,
                  int64_t column) {
  __m512 sum[R][2];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < 2; c++)
      sum[r][c] =
          work.fresh ? _mm512_setzero_ps() : _mm512_load_ps(work.sums + r * 32 + 16 * c);
  const uint16_t* x = work.x;
  const char *w = work.w, *ahead = work.ahead;
  for (int64_t s = 0; s < work.steps; s++, w += W::step) {
    for (int64_t p = 0; p < 16; p++, x += 2, ahead += 64 * work.lines) {
      if (work.lines) {
        _mm_prefetch(ahead, _MM_HINT_T0);
        if (work.lines > 1) _mm_prefetch(ahead + 64, _MM_HINT_T0);
      }
      __m512bh low, high;
      weights.pair(w + 64 * p, low, high);
      for (int r = 0; r < R; r++) {
        const __m512bh both = pair_of(x + r * shape.k);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, low);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, high);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    if (work.last) {
      weights.write(shape, work.row + r, column, sum[r][0], sum[r][1],
                    y + r * shape.outputs() + column);
    } else {
      for (int c = 0; c < 2; c++) _mm512_store_ps(work.sums + r * 32 + 16 * c, sum[r][c]);
    }
  }
}

// R rows of S panels at once: a core that reads four places gets more from memory than one that
// fetches ahead at one of them.
template <int R, int S, class W>
inline void streams(const Shape& shape, const W& weights, const uint16_t* x, uint16_t* y,
                    int64_t panel) {
  const int64_t steps = shape.k / 32, apart = steps * W::step;
  const char* at = weights.at + panel * apart;
  __m512 sum[S][R][2];
  for (int i = 0; i < S; i++)
    for (int r = 0; r < R; r++) sum[i][r][0] = sum[i][r][1] = _mm512_setzero_ps();
  for (int64_t s = 0; s < steps; s++, at += W::step)
    for (int64_t p = 0; p < 16; p++, x += 2) {
      __m512bh w[S][2];
      for (int i = 0; i < S; i++) weights.pair(at + i * apart + 64 * p, w[i][0], w[i][1]);
      for (int r = 0; r < R; r++) {
        const __m512bh both = pair_of(x + r * shape.k);
        for (int i = 0; i < S; i++)
          for (int c = 0; c < 2; c++) sum[i][r][c] = _mm512_dpbf16_ps(sum[i][r][c], both, w[i][c]);
      }
    }
  for (int i = 0; i < S; i++) {
    const int64_t column = (panel + i) * shape.width();
    for (int r = 0; r < R; r++)
      weights.write(shape, r, column, sum[i][r][0], sum[i][r][1],
                    y + r * shape.outputs() + column);
  }
}

// Some panels of few rows.
template <int R, int S = 4, class W>
void few_rows(const Shape& shape, const W& weights, const uint16_t* x, uint16_t* y,
              Range panels) {
  for (; panels.first + S <= panels.last; panels.first += S)
    streams<R, S>(shape, weights, x, y, panels.first);
  if constexpr (S > 1) few_rows<R, S / 2>(shape, weights, x, y, panels);
}

template <int R = ROWS, class W>
void some_rows(const Shape& shape, const W& weights, const Work& work, uint16_t* y,
               int64_t column, int64_t rows) {
  if constexpr (R > 1)
    if (rows < R) return some_rows<R - 1>(shape, weights, work, y, column, rows);
  block<R>(shape, weights, work, y, column);
}

// The rows [from, from + rows) of one panel.
template <class W>
void group(const Shape& shape, const W& weights, const uint16_t* x, uint16_t* y, int64_t panel,
           int64_t from, int64_t rows, int64_t chunk, float* sums) {
  const int64_t steps = shape.k / 32, blocks = (rows + ROWS - 1) / ROWS;
  const char* at = weights.at + panel * steps * W::step;
  for (int64_t s = 0; s < steps; s += chunk) {
    const int64_t some = s + chunk < steps ? chunk : steps - s;
    const char* next = at + (s + some) * W::step;
    for (int64_t b = 0; b < blocks; b++) {
      // Blocks of as many rows as the others, or one less.
      const int64_t first = rows * b / blocks, after = rows * (b + 1) / blocks;
      const int64_t lines = W::step / 1024;  // of a pair of inputs
      const bool one = blocks == 1;
      const Work work = {x + (from + first) * shape.k + 32 * s,
                         at + s * W::step,
                         from + first,
                         some,
                         one ? at + s * W::step + AHEAD : next + W::step * some / lines * b,
                         one ? lines : b < lines ? 1 : 0,
                         sums + first * 32,
                         s == 0,
                         s + some == steps};
      some_rows(shape, weights, work, y + (from + first) * shape.outputs(),
                panel * shape.width(), after - first);
    }
  }
}

// Some panels of any number of rows.
template <class W>
void panels(const Shape& shape, const W& weights, const uint16_t* x, uint16_t* y, Range part) {
  const int64_t m = shape.m, steps = shape.k / 32;
  if (m == 1) return few_rows<1>(shape, weights, x, y, part);
  if (m == 2) return few_rows<2>(shape, weights, x, y, part);
  if (m == 3) return few_rows<3>(shape, weights, x, y, part);
  // A panel that no cache holds is cut, and rows go in groups whose sums wait.
  const bool cut = steps > CHUNK && m > ROWS;
  const int64_t chunk = cut ? CHUNK : steps, most = cut ? GROUP : m;
  alignas(64) float sums[GROUP * 32];
  for (int64_t p = part.first; p < part.last; p++)
    for (int64_t i = 0; i < m; i += most)
      group(shape, weights, x, y, p, i, i + most < m ? most : m - i, chunk, sums);
}

template <class W>
void product(const Shape& shape, const W& weights, const uint16_t* x, uint16_t* y) {
#pragma omp parallel
  panels(shape, weights, x, y,
         share(shape.panels(), 1, omp_get_thread_num(), omp_get_num_threads()));
}

}  // namespace

// K is a multiple of 32 here: who calls has filled the rows of x up with zeros.
extern "C" void linear_packed(const uint16_t* x, const uint16_t* w, const float* bias,
                              uint16_t* y, int64_t m, int64_t n, int64_t k, int64_t gated) {
  product({m, n, k, gated}, Halves{(const char*)w, bias}, x, y);
}

#ifdef __AVX512VBMI__
// codes[N, K] of 0 to 255 to panels; `out` has room for all with N and K rounded up to 32.
extern "C" void pack_bytes(const uint8_t* codes, uint8_t* out, int64_t n, int64_t k) {
  const int64_t steps = (k + 31) / 32;
#pragma omp parallel for
  for (int64_t panel = 0; panel < (n + 31) / 32; panel++)
    for (int64_t i = 0; i < steps * 32; i++)
      for (int64_t c = 0; c < 32; c++) {
        const int64_t output = panel * 32 + c;
        const uint8_t code = output < n && i < k ? codes[output * k + i] : 128;
        uint8_t* line = out + (panel * steps * 16 + i / 2) * 64;
        line[c % 16 / 4 * 16 + c / 16 * 8 + c % 4 * 2 + i % 2] =
            code < 128 ? uint8_t(255 - code) : uint8_t(code - 128);
      }
}

// Weights are scales[N] times (codes - 128). `halves` has room for M numbers.
extern "C" void linear_bytes(const uint16_t* x, const uint8_t* w, const float* scales,
                             const float* bias, float* halves, uint16_t* y, int64_t m, int64_t n,
                             int64_t k) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
#pragma omp parallel for if (m > 8)
  for (int64_t r = 0; r < m; r++) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += 32)
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x + r * k + i), ones);
    halves[r] = 0.5f * _mm512_reduce_add_ps(sum);
  }
  product({m, n, k, 0}, Bytes(w, bias, scales, halves), x, y);
}
#endif
#endif
