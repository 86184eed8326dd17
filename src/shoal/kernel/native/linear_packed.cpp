// y[M, N] = x[M, K] @ w[N, K].T + bias[N] in bf16 by vectors (AVX-512), the weights packed.
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

// What a block does with some steps of a panel.
struct Work {
  const uint16_t* x;  // the first row, at the first step
  const uint16_t* w;  // the panel, at the first step
  int64_t steps;
  const char* ahead;  // to be fetched meanwhile
  int64_t lines;      // of the cache, of that, a pair of inputs: 2 or 1
  float* sums;        // [R][32] between chunks
  bool fresh, last;
};

inline __m512bh pair_of(const uint16_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}
inline __m512bh weights(const uint16_t* w) { return (__m512bh)_mm512_load_si512(w); }

template <int R>
inline void block(const Shape& shape, const float* bias, const Work& work, uint16_t* y,
                  int64_t column) {
  __m512 sum[R][2];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < 2; c++)
      sum[r][c] =
          work.fresh ? _mm512_setzero_ps() : _mm512_load_ps(work.sums + r * 32 + 16 * c);
  const uint16_t *x = work.x, *w = work.w;
  const char* ahead = work.ahead;
  for (int64_t s = 0; s < work.steps; s++, w += STEP / 2) {
    for (int64_t p = 0; p < 16; p++, x += 2, w += 32, ahead += 64 * work.lines) {
      if (work.lines) {
        _mm_prefetch(ahead, _MM_HINT_T0);
        if (work.lines > 1) _mm_prefetch(ahead + 64, _MM_HINT_T0);
      }
      const __m512bh low = weights(w), high = weights(w + STEP / 2);
      for (int r = 0; r < R; r++) {
        const __m512bh both = pair_of(x + r * shape.k);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, low);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, high);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    if (work.last) {
      write_row(shape, bias, sum[r][0], sum[r][1], y + r * shape.outputs() + column, column);
    } else {
      for (int c = 0; c < 2; c++) _mm512_store_ps(work.sums + r * 32 + 16 * c, sum[r][c]);
    }
  }
}

// R rows of S panels at once: a core that reads four places gets more from memory than one that
// fetches ahead at one of them.
template <int R, int S>
inline void streams(const Shape& shape, const uint16_t* x, const uint16_t* w, const float* bias,
                    uint16_t* y, int64_t panel) {
  const int64_t steps = shape.k / 32, apart = steps * STEP;
  const uint16_t* at = w + panel * apart;
  __m512 sum[S][R][2];
  for (int i = 0; i < S; i++)
    for (int r = 0; r < R; r++) sum[i][r][0] = sum[i][r][1] = _mm512_setzero_ps();
  for (int64_t s = 0; s < steps; s++, at += STEP / 2)
    for (int64_t p = 0; p < 16; p++, x += 2, at += 32)
      for (int r = 0; r < R; r++) {
        const __m512bh both = pair_of(x + r * shape.k);
        for (int i = 0; i < S; i++) {
          const uint16_t* from = at + i * apart;
          sum[i][r][0] = _mm512_dpbf16_ps(sum[i][r][0], both, weights(from));
          sum[i][r][1] = _mm512_dpbf16_ps(sum[i][r][1], both, weights(from + STEP / 2));
        }
      }
  for (int i = 0; i < S; i++) {
    const int64_t column = (panel + i) * shape.width();
    for (int r = 0; r < R; r++)
      write_row(shape, bias, sum[i][r][0], sum[i][r][1], y + r * shape.outputs() + column, column);
  }
}

// Some panels of few rows.
template <int R, int S = 4>
void few_rows(const Shape& shape, const uint16_t* x, const uint16_t* w, const float* bias,
              uint16_t* y, Range panels) {
  for (; panels.first + S <= panels.last; panels.first += S)
    streams<R, S>(shape, x, w, bias, y, panels.first);
  if constexpr (S > 1) few_rows<R, S / 2>(shape, x, w, bias, y, panels);
}

template <int R = ROWS>
void some_rows(const Shape& shape, const float* bias, const Work& work, uint16_t* y,
               int64_t column, int64_t rows) {
  if constexpr (R > 1)
    if (rows < R) return some_rows<R - 1>(shape, bias, work, y, column, rows);
  block<R>(shape, bias, work, y, column);
}

// The rows [from, from + rows) of one panel.
void group(const Shape& shape, const uint16_t* x, const uint16_t* w, const float* bias,
           uint16_t* y, int64_t panel, int64_t from, int64_t rows, int64_t chunk, float* sums) {
  const int64_t steps = shape.k / 32, blocks = (rows + ROWS - 1) / ROWS;
  const uint16_t* at = w + panel * steps * STEP;
  for (int64_t s = 0; s < steps; s += chunk) {
    const int64_t some = s + chunk < steps ? chunk : steps - s;
    const char* next = (const char*)(at + (s + some) * STEP);
    for (int64_t b = 0; b < blocks; b++) {
      // Blocks of as many rows as the others, or one less.
      const int64_t first = rows * b / blocks, after = rows * (b + 1) / blocks;
      const bool one = blocks == 1;
      const int64_t bytes = 2 * STEP * some;  // of the next chunk
      const Work work = {x + (from + first) * shape.k + 32 * s,
                         at + s * STEP,
                         some,
                         one ? (const char*)(at + s * STEP) + AHEAD : next + bytes / 2 * b,
                         one ? 2 : b < 2 ? 1 : 0,
                         sums + first * 32,
                         s == 0,
                         s + some == steps};
      some_rows(shape, bias, work, y + (from + first) * shape.outputs(), panel * shape.width(),
                after - first);
    }
  }
}

// Some panels of any number of rows.
void panels(const Shape& shape, const uint16_t* x, const uint16_t* w, const float* bias,
            uint16_t* y, Range part) {
  const int64_t m = shape.m, steps = shape.k / 32;
  if (m == 1) return few_rows<1>(shape, x, w, bias, y, part);
  if (m == 2) return few_rows<2>(shape, x, w, bias, y, part);
  if (m == 3) return few_rows<3>(shape, x, w, bias, y, part);
  // A panel that no cache holds is cut, and rows go in groups whose sums wait.
  const bool cut = steps > CHUNK && m > ROWS;
  const int64_t chunk = cut ? CHUNK : steps, most = cut ? GROUP : m;
  alignas(64) float sums[GROUP * 32];
  for (int64_t p = part.first; p < part.last; p++)
    for (int64_t i = 0; i < m; i += most)
      group(shape, x, w, bias, y, p, i, i + most < m ? most : m - i, chunk, sums);
}

}  // namespace

// K is a multiple of 32 here: who calls has filled the rows of x up with zeros.
extern "C" void linear_packed(const uint16_t* x, const uint16_t* w, const float* bias,
                              uint16_t* y, int64_t m, int64_t n, int64_t k, int64_t gated) {
  const Shape shape = {m, n, k, gated};
#pragma omp parallel
  panels(shape, x, w, bias, y,
         share(shape.panels(), 1, omp_get_thread_num(), omp_get_num_threads()));
}
#endif
