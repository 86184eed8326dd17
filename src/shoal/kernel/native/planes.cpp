// y[m, n] = sum over k of x[m, k] w[n, k] of bipolar integers, given as bit planes.
//
// A code u of b bits means v = 2u - (2^b - 1), the sum of +2^i where bit i is 1 and -2^i where
// it is 0. Two forms of the weights:
//   tiles  [N/32][w][K/64][32] words of 64 bits along K: all planes of 32 outputs together;
//   masks  [N/16][K/4][w] words, byte 4n + k of a word's 64 for output n and weight k of four:
//          the order in which vpdpbusd and the matrix tiles want int8 values. The topmost plane
//          (of 8 planes the two topmost) is stored inverted: it is the sign of the value.
// and two of the input:
//   planes [M][a][K/64] words of 64 bits along K;
//   codes  [M/B][K/64][B][64] bytes, for kernels that take B rows at a time.
// What is beyond N, M or K is 0 in planes and codes. N is padded to 32 and K to 64.
//
// Sums are taken group by group of K; a group's sum is exact in 32 bits. Groups are added in
// one order whatever M is, so a row has the same bits in any company and in any of the engines.
#include "simd.h"
#include <cmath>
#include <cstdlib>

namespace {

enum Kind : int64_t { INT32, INT64, FP32, BF16 };

struct Job {  // as planes/native.py lays it out
  int64_t n, k, group, groups, w, a, kind, low, rest;
  const uint64_t* bits;       // tiles or masks
  const int32_t* correction;  // [N/16][groups][16]: (2^a - 1) x the sum of a group's weights
  const float* scale;         // [N/16][groups][16]
  const float* offset;        // the same, or null
  const float* bias;          // [N] or null
};

inline int64_t ceil_to(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Memory of a thread that lives from call to call.
struct Scratch {
  void* at = nullptr;
  size_t size = 0;
  int8_t* get(size_t wanted) {
    if (wanted > size) {
      std::free(at);
      size = (wanted + 4095) / 4096 * 4096;
      at = std::aligned_alloc(4096, size);
      if (!at) std::abort();
    }
    return (int8_t*)at;
  }
  ~Scratch() { std::free(at); }
};
thread_local Scratch scratch;

}  // namespace

// Bytes that a thread holds besides operands and result: 32 outputs, and the next 32.
extern "C" int64_t planes_scratch(int64_t k, int64_t w) {
  return 2 * 32 * ceil_to(k, 64) * (w == 8 ? 2 : 1);
}

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
namespace {

// The running result of one row and 16 outputs.
struct Cell { __m512i low, high; };

inline void clear(Cell* cell, int count) {
  for (int i = 0; i < count; i++) cell[i].low = cell[i].high = _mm512_setzero_si512();
}

inline void fold(const Job& j, __m512i sum, int64_t tile, int64_t g, int64_t row,
                 const int32_t* xsum, Cell& cell) {
  if (j.kind == INT32) {
    cell.low = _mm512_add_epi32(cell.low, sum);
  } else if (j.kind == INT64) {
    const auto half = [](__m256i v) { return _mm512_cvtepi32_epi64(v); };
    cell.low = _mm512_add_epi64(cell.low, half(_mm512_castsi512_si256(sum)));
    cell.high = _mm512_add_epi64(cell.high, half(_mm512_extracti64x4_epi64(sum, 1)));
  } else {
    const int64_t at = (tile * j.groups + g) * 16;
    __m512 total = _mm512_castsi512_ps(cell.low);
    total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_loadu_ps(j.scale + at), total);
    if (j.offset)
      total = _mm512_fmadd_ps(_mm512_set1_ps(float(xsum[row * j.groups + g])),
                              _mm512_loadu_ps(j.offset + at), total);
    cell.low = _mm512_castps_si512(total);
  }
}

inline void finish(const Job& j, const Cell& cell, int64_t tile, int64_t row,
                   const float* xscale, void* y) {
  const int64_t first = tile * 16, left = j.n - first;
  if (left <= 0) return;
  const __mmask16 some = low16(left);
  const int64_t at = row * j.n + first;
  if (j.kind == INT32) {
    _mm512_mask_storeu_epi32((int32_t*)y + at, some, cell.low);
  } else if (j.kind == INT64) {
    _mm512_mask_storeu_epi64((int64_t*)y + at, __mmask8(some), cell.low);
    _mm512_mask_storeu_epi64((int64_t*)y + at + 8, __mmask8(some >> 8), cell.high);
  } else {
    const __m512 bias = j.bias ? _mm512_maskz_loadu_ps(some, j.bias + first) : _mm512_setzero_ps();
    const __m512 out =
        _mm512_fmadd_ps(_mm512_castsi512_ps(cell.low), _mm512_set1_ps(xscale[row]), bias);
    if (j.kind == FP32) {
      _mm512_mask_storeu_ps((float*)y + at, some, out);
    } else {
#if defined(__AVX512BF16__)
      _mm256_mask_storeu_epi16((uint16_t*)y + at, some, (__m256i)_mm512_cvtneps_pbh(out));
#else
      float buffer[16];
      _mm512_storeu_ps(buffer, out);
      for (int64_t i = 0; i < 16 && i < left; i++) store((uint16_t*)y + at + i, buffer[i]);
#endif
    }
  }
}

inline int64_t group_end(const Job& j, int64_t g, int64_t k) {
  const int64_t end = (g + 1) * j.group;
  return end < k ? end : k;
}

// ---- popcount: a product of two planes is K - 2 popcount(w xor x) --------------------------

#if defined(__AVX512VPOPCNTDQ__)
// MB rows from `row` on, 32 outputs; the planes' sums meet in registers, highest power first.
template <int MB>
void popcount_block(const Job& j, int64_t pair, const uint64_t* x, int64_t row,
                    const float* xscale, const int32_t* xsum, void* y) {
  const int64_t words = (j.k + 63) / 64;
  const uint64_t* w = j.bits + pair * j.w * words * 32;
  x += row * j.a * words;
  Cell cell[MB * 2];
  clear(cell, MB * 2);
  const int64_t all = ((int64_t(1) << j.w) - 1) * ((int64_t(1) << j.a) - 1);
  for (int64_t g = 0; g < j.groups; g++) {
    const int64_t end = group_end(j, g, j.k);
    const int64_t first = g * j.group / 64, last = (end + 63) / 64;
    __m512i sum[MB][4];
    for (int m = 0; m < MB; m++)
      for (int v = 0; v < 4; v++) sum[m][v] = _mm512_setzero_si512();
    for (int64_t s = j.w + j.a - 2; s >= 0; s--) {
      for (int m = 0; m < MB; m++)
        for (int v = 0; v < 4; v++) sum[m][v] = _mm512_add_epi64(sum[m][v], sum[m][v]);
      for (int64_t i = s < j.a ? 0 : s - j.a + 1; i <= s && i < j.w; i++) {
        const uint64_t* wi = w + i * words * 32;
        const uint64_t* xi = x + (s - i) * words;
        for (int64_t t = first; t < last; t++) {
          __m512i bits[4];
          for (int v = 0; v < 4; v++) {
            bits[v] = _mm512_loadu_si512(wi + t * 32 + v * 8);
            if (MB == 1) _mm_prefetch((const char*)(wi + t * 32 + v * 8) + 2048, _MM_HINT_T0);
          }
          for (int m = 0; m < MB; m++) {
            const __m512i word = _mm512_set1_epi64((long long)xi[m * j.a * words + t]);
            for (int v = 0; v < 4; v++)
              sum[m][v] = _mm512_add_epi64(
                  sum[m][v], _mm512_popcnt_epi64(_mm512_xor_si512(bits[v], word)));
          }
        }
      }
    }
    const __m512i base = _mm512_set1_epi64(all * (end - g * j.group));
    for (int m = 0; m < MB; m++) {
      const int64_t more = j.rest ? j.rest * xsum[(row + m) * j.groups + g] : 0;
      for (int v = 0; v < 4; v += 2) {
        __m256i half[2];
        for (int h = 0; h < 2; h++) {
          const __m512i twice = _mm512_add_epi64(sum[m][v + h], sum[m][v + h]);
          __m512i value = _mm512_slli_epi64(_mm512_sub_epi64(base, twice), (unsigned)j.low);
          value = _mm512_add_epi64(value, _mm512_set1_epi64(more));
          half[h] = _mm512_cvtepi64_epi32(value);
        }
        const __m512i whole = _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
        fold(j, whole, pair * 2 + v / 2, g, row + m, xsum, cell[m * 2 + v / 2]);
      }
    }
  }
  for (int m = 0; m < MB; m++)
    for (int v = 0; v < 2; v++)
      finish(j, cell[m * 2 + v], pair * 2 + v, row + m, xscale, y);
}
#endif

// ---- int8: planes become odd integers of 8 bits --------------------------------------------

// Values of one step: 16 outputs, four weights each. `high`: the topmost of 8 planes, +-1;
// else the planes below it, or all of fewer than 8.
struct Expand {
#if defined(__GFNI__) && defined(__AVX512VBMI__)
  // v = 2u - (2^b - 1) is, in two's complement, bits b-2 .. 0 of u above a 1, and the
  // inverted topmost bit in all places above: a byte's bits are a choice of planes, which is
  // a transpose of 8 x 8 bits. Row 7 - r of the matrix makes bit r of a byte.
  __m512i index, ones, unit;
  __mmask64 some;
  Expand(int64_t w, bool high) {
    const int64_t planes = high ? 1 : (w == 8 ? 7 : w), from = high ? w - 1 : 0;
    alignas(64) uint8_t at[64];
    uint64_t mask = 0;
    for (int q = 0; q < 8; q++)
      for (int r = 0; r < 8; r++) {
        const int place = q * 8 + 7 - r;
        const int64_t plane = r > planes - 1 ? planes - 1 : r - 1;
        at[place] = r ? uint8_t((from + plane) * 8 + q) : 0;
        if (r) mask |= uint64_t(1) << place;
      }
    index = _mm512_load_si512(at);
    some = mask;
    ones = _mm512_set1_epi8(-1);
    unit = _mm512_set1_epi64(0x8040201008040201ll);
  }
  __m512i operator()(const uint64_t* step) const {
    const __m512i planes = _mm512_loadu_si512(step);  // what lies behind is not used
    return _mm512_gf2p8affine_epi64_epi8(
        unit, _mm512_mask_permutexvar_epi8(ones, some, index, planes), 0);
  }
#else
  int64_t from, planes;
  Expand(int64_t w, bool high) : from(high ? w - 1 : 0), planes(high ? 1 : (w == 8 ? 7 : w)) {}
  __m512i operator()(const uint64_t* step) const {
    __m512i value = _mm512_set1_epi8(char(1 - (1 << planes)));
    for (int64_t i = 0; i < planes; i++) {
      const uint64_t bits = i == planes - 1 ? ~step[from + i] : step[from + i];
      value = _mm512_mask_add_epi8(value, bits, value, _mm512_set1_epi8(char(2 << i)));
    }
    return value;
  }
#endif
};

// 2 S - (2^a - 1) sum(w), S the sum of codes times weights.
inline __m512i corrected(const Job& j, __m512i sum, int64_t tile, int64_t g) {
  const __m512i off = _mm512_loadu_si512(j.correction + (tile * j.groups + g) * 16);
  return _mm512_sub_epi32(_mm512_slli_epi32(sum, 1), off);
}

#if defined(__AVX512VNNI__)
inline __m512i four(const uint8_t* at) {
  int32_t bytes;
  std::memcpy(&bytes, at, 4);
  return _mm512_set1_epi32(bytes);
}

// Few rows: weights pass by once and become int8 in registers. Codes with B = 1.
template <int MB, bool WIDE>
void few(const Job& j, const uint8_t* x, int64_t row, const float* xscale, const int32_t* xsum,
         void* y, Range tiles) {
  constexpr int U = MB == 1 ? 4 : MB == 2 ? 2 : 1;
  const int64_t kp = ceil_to(j.k, 64);
  const Expand rest(j.w, false), high(j.w, true);
  x += row * kp;
  for (int64_t tile = tiles.first; tile < tiles.last; tile++) {
    const uint64_t* step = j.bits + tile * (kp / 4) * j.w;
    Cell cell[MB];
    clear(cell, MB);
    for (int64_t g = 0; g < j.groups; g++) {
      __m512i sum[MB][U], top[MB][U];
      for (int m = 0; m < MB; m++)
        for (int u = 0; u < U; u++) sum[m][u] = top[m][u] = _mm512_setzero_si512();
      const int64_t end = group_end(j, g, kp);
      for (int64_t k = g * j.group; k < end; k += 4 * U) {
        _mm_prefetch((const char*)step + 2048, _MM_HINT_T0);
        for (int u = 0; u < U; u++, step += j.w) {
          const __m512i value = rest(step);
          for (int m = 0; m < MB; m++)
            sum[m][u] = _mm512_dpbusd_epi32(sum[m][u], four(x + m * kp + k + 4 * u), value);
          if (WIDE) {
            const __m512i sign = high(step);
            for (int m = 0; m < MB; m++)
              top[m][u] = _mm512_dpbusd_epi32(top[m][u], four(x + m * kp + k + 4 * u), sign);
          }
        }
      }
      for (int m = 0; m < MB; m++) {
        __m512i whole = sum[m][0], more = top[m][0];
        for (int u = 1; u < U; u++) {
          whole = _mm512_add_epi32(whole, sum[m][u]);
          more = _mm512_add_epi32(more, top[m][u]);
        }
        if (WIDE) whole = _mm512_add_epi32(whole, _mm512_slli_epi32(more, 7));
        fold(j, corrected(j, whole, tile, g), tile, g, row + m, xsum, cell[m]);
      }
    }
    for (int m = 0; m < MB; m++) finish(j, cell[m], tile, row + m, xscale, y);
  }
}

// 32 outputs on their way from memory into scratch, a little at a time: [2][K/4][64] of the
// rest, then the same of the top.
struct Expansion {
  const Job& j;
  Expand rest, top;
  const uint64_t* from;
  int8_t* to;
  int64_t at, steps, all;
  Expansion(const Job& j, int64_t pair, int8_t* to)
      : j(j), rest(j.w, false), top(j.w, true), to(to), at(0), steps(ceil_to(j.k, 64) / 2),
        all(j.w == 8 ? 2 * steps : steps) {
    from = j.bits + pair * steps * j.w;
  }
  void some(int64_t n) {
    const int64_t end = at + n < all ? at + n : all;
    for (; at < end && at < steps; at++)
      _mm512_store_si512(to + at * 64, rest(from + at * j.w));
    for (; at < end; at++)
      _mm512_store_si512(to + at * 64, top(from + (at - steps) * j.w));
  }
};

// MB of 8 rows, 32 outputs of int8 values. Codes with B = 8.
constexpr int64_t DOT_ROWS = 8;
template <int MB>
void dots(const uint8_t* x, const int8_t* w, int64_t kp, int64_t first, int64_t last,
          __m512i sum[MB][2]) {
  __m512i in[MB][2];  // registers
  for (int m = 0; m < MB; m++) in[m][0] = in[m][1] = _mm512_setzero_si512();
  for (int64_t k = first; k < last; k += 4) {
    const uint8_t* at = x + (k / 64) * 64 * DOT_ROWS + k % 64;
    const __m512i a = _mm512_load_si512(w + k * 16), b = _mm512_load_si512(w + (kp + k) * 16);
    for (int m = 0; m < MB; m++) {
      const __m512i bytes = four(at + m * 64);
      in[m][0] = _mm512_dpbusd_epi32(in[m][0], bytes, a);
      in[m][1] = _mm512_dpbusd_epi32(in[m][1], bytes, b);
    }
  }
  for (int m = 0; m < MB; m++) sum[m][0] = in[m][0], sum[m][1] = in[m][1];
}

// The first `rows` of MB; what lies at the others is not used.
template <int MB>
void dot_block(const Job& j, const int8_t* w, int64_t pair, const uint8_t* x, int64_t row,
               int64_t rows, const float* xscale, const int32_t* xsum, void* y) {
  const int64_t kp = ceil_to(j.k, 64);
  x += row * kp;
  Cell cell[MB * 2];
  clear(cell, MB * 2);
  for (int64_t g = 0; g < j.groups; g++) {
    const int64_t first = g * j.group, last = group_end(j, g, kp);
    __m512i sum[MB][2];
    dots<MB>(x, w, kp, first, last, sum);
    if (j.w == 8) {
      __m512i top[MB][2];
      dots<MB>(x, w + 32 * kp, kp, first, last, top);
      for (int m = 0; m < MB; m++)
        for (int v = 0; v < 2; v++)
          sum[m][v] = _mm512_add_epi32(sum[m][v], _mm512_slli_epi32(top[m][v], 7));
    }
    for (int m = 0; m < rows; m++)
      for (int v = 0; v < 2; v++) {
        const int64_t tile = pair * 2 + v;
        fold(j, corrected(j, sum[m][v], tile, g), tile, g, row + m, xsum, cell[m * 2 + v]);
      }
  }
  for (int m = 0; m < rows; m++)
    for (int v = 0; v < 2; v++)
      finish(j, cell[m * 2 + v], pair * 2 + v, row + m, xscale, y);
}

// Rows that share one pass over the expanded weights, so that their codes stay in L2.
constexpr int64_t PASS_ROWS = 256;

void dot_pairs(const Job& j, const uint8_t* x, const float* xscale, const int32_t* xsum, void* y,
               int64_t m, Range pairs) {
  int8_t* const w = scratch.get((size_t)planes_scratch(j.k, j.w));
  for (int64_t from = 0; from < m; from += PASS_ROWS) {
    const int64_t to = from + PASS_ROWS < m ? from + PASS_ROWS : m;
    for (int64_t pair = pairs.first; pair < pairs.last; pair++) {
      Expansion(j, pair, w).some(INT64_MAX / 2);
      for (int64_t row = from; row < to; row += DOT_ROWS) {
        const int64_t rows = to - row < DOT_ROWS ? to - row : DOT_ROWS;
        const auto block = rows == 1 ? dot_block<1> : rows == 2 ? dot_block<2>
                         : rows <= 4 ? dot_block<4> : dot_block<8>;
        block(j, w, pair, x, row, rows, xscale, xsum, y);
      }
    }
  }
}
#endif

#if defined(__AMX_INT8__) && defined(__AMX_TILE__)
struct TileConfig {
  uint8_t palette, start, reserved[14];
  uint16_t columns[16];
  uint8_t rows[16];
};

// Two by two tiles of 16 rows and 16 outputs; with TWO = false only the upper 16 rows. Two
// steps of K at a time, so that what a tile is loaded over was used the longest ago.
template <bool TWO>
inline void step(const uint8_t* x, const uint8_t* x1, const int8_t* w, const int8_t* w1) {
  _tile_loadd(6, w, 64);
  _tile_loadd(4, x, 64);
  _tile_dpbusd(0, 4, 6);
  _tile_loadd(7, w1, 64);
  _tile_dpbusd(1, 4, 7);
  if (TWO) _tile_loadd(5, x1, 64);
  if (TWO) _tile_dpbusd(3, 5, 7);
  if (TWO) _tile_dpbusd(2, 5, 6);
}

// `meanwhile` is called every other step: the vector units are idle.
template <bool TWO, class F>
inline void tiles(const uint8_t* x, const int8_t* w, int64_t kp, int64_t first, int64_t last,
                  int32_t* out, F meanwhile) {
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) _tile_zero(2);
  if (TWO) _tile_zero(3);
  x += first * 16, w += first * 16;
  const uint8_t* x1 = x + 16 * kp;
  const int8_t* w1 = w + 16 * kp;
  int64_t at = 0;
  const int64_t end = (last - first) * 16;
  for (; at + 2048 <= end; at += 2048) {
    step<TWO>(x + at, x1 + at, w + at, w1 + at);
    _tile_loadd(4, x + at + 1024, 64);
    _tile_loadd(7, w1 + at + 1024, 64);
    _tile_dpbusd(1, 4, 7);
    _tile_loadd(6, w + at + 1024, 64);
    _tile_dpbusd(0, 4, 6);
    if (TWO) _tile_loadd(5, x1 + at + 1024, 64);
    if (TWO) _tile_dpbusd(2, 5, 6);
    if (TWO) _tile_dpbusd(3, 5, 7);
    meanwhile();
  }
  if (at < end) step<TWO>(x + at, x1 + at, w + at, w1 + at);
  _tile_stored(0, out, 128);
  _tile_stored(1, out + 16, 128);
  if (TWO) _tile_stored(2, out + 512, 128);
  if (TWO) _tile_stored(3, out + 528, 128);
}

// Sums of 32 rows and outputs that wait to be folded, which is done beside the next product.
struct Waiting {
  const int32_t (*sums)[32 * 32];
  Cell cell[64];
  int64_t pair, row, g, next = 0, all = 0;
};

inline void fold_some(const Job& j, Waiting& t, int64_t n, const float* xscale,
                      const int32_t* xsum, void* y) {
  const int64_t rows = t.all / 2;
  while (n > 0 && t.next < t.all) {
    const int64_t v = t.next >= rows, from = t.next - v * rows;
    const int64_t to = from + n < rows ? from + n : rows;
    const int64_t tile = t.pair * 2 + v, at = (tile * j.groups + t.g) * 16;
    const bool last = t.g == j.groups - 1;
    const __m512i off = _mm512_loadu_si512(j.correction + at);
    const bool plain = j.kind >= FP32 && !j.offset;
    const __m512 scale = plain ? _mm512_loadu_ps(j.scale + at) : _mm512_setzero_ps();
    for (int64_t m = from; m < to; m++) {
      __m512i sum = _mm512_load_si512(t.sums[0] + m * 32 + v * 16);
      if (j.w == 8)
        sum = _mm512_add_epi32(
            sum, _mm512_slli_epi32(_mm512_load_si512(t.sums[1] + m * 32 + v * 16), 7));
      sum = _mm512_sub_epi32(_mm512_slli_epi32(sum, 1), off);
      Cell& cell = t.cell[v * 32 + m];
      if (t.g == 0) clear(&cell, 1);
      if (plain)
        cell.low = _mm512_castps_si512(_mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale,
                                                       _mm512_castsi512_ps(cell.low)));
      else
        fold(j, sum, tile, t.g, t.row + m, xsum, cell);
      if (last) finish(j, cell, tile, t.row + m, xscale, y);
    }
    n -= to - from;
    t.next += to - from;
  }
}

// Codes with B = 16. While tiles are multiplied, the sums before are folded and the weights of
// the next 32 outputs expanded.
void tile_pairs(const Job& j, const uint8_t* x, const float* xscale, const int32_t* xsum, void* y,
                int64_t m, Range pairs) {
  if (pairs.first == pairs.last) return;
  alignas(64) TileConfig config;
  std::memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int t = 0; t < 8; t++) config.columns[t] = 64, config.rows[t] = 16;
  _tile_loadconfig(&config);
  const int64_t kp = ceil_to(j.k, 64), half = planes_scratch(j.k, j.w) / 2;
  int8_t* const room = scratch.get((size_t)(2 * half));
  // Sums that are being made, and those that wait; cells stay with those that wait.
  Waiting waiting;
  alignas(64) int32_t sums[2][2][32 * 32];
  auto made = sums[0];
  for (int64_t from = 0; from < m; from += PASS_ROWS) {
    const int64_t to = from + PASS_ROWS < m ? from + PASS_ROWS : m;
    Expansion(j, pairs.first, room).some(INT64_MAX / 2);
    for (int64_t pair = pairs.first; pair < pairs.last; pair++) {
      const int8_t* w = room + (pair - pairs.first) % 2 * half;
      Expansion next(j, pair + 1, room + (pair + 1 - pairs.first) % 2 * half);
      if (pair + 1 == pairs.last) next.at = next.all;
      const int64_t turns = (to - from + 31) / 32 * (kp / 128);
      const int64_t expand = turns ? (next.all + turns - 1) / turns : 0;
      const int64_t folds = j.group >= 128 ? (64 * 128 + j.group - 1) / j.group : 64;
      for (int64_t row = from; row < to; row += 32) {
        const int64_t rows = to - row < 32 ? to - row : 32;
        for (int64_t g = 0; g < j.groups; g++) {
          const int64_t first = g * j.group, last = group_end(j, g, kp);
          const auto meanwhile = [&] {
            next.some(expand);
            fold_some(j, waiting, folds, xscale, xsum, y);
          };
          const auto nothing = [] {};
          if (rows > 16) tiles<true>(x + row * kp, w, kp, first, last, made[0], meanwhile);
          else tiles<false>(x + row * kp, w, kp, first, last, made[0], meanwhile);
          if (j.w == 8) {
            const int8_t* top = w + 32 * kp;
            if (rows > 16) tiles<true>(x + row * kp, top, kp, first, last, made[1], nothing);
            else tiles<false>(x + row * kp, top, kp, first, last, made[1], nothing);
          }
          fold_some(j, waiting, 64, xscale, xsum, y);
          waiting.sums = made;
          made = made == sums[0] ? sums[1] : sums[0];
          waiting.pair = pair, waiting.row = row, waiting.g = g;
          waiting.next = 0, waiting.all = 2 * rows;
        }
      }
      next.some(INT64_MAX / 2);
    }
  }
  fold_some(j, waiting, 64, xscale, xsum, y);
  _tile_release();
}
#endif

inline __m512 load16(const float* at, int64_t left) {
  return _mm512_maskz_loadu_ps(low16(left), at);
}
inline __m512 load16(const uint16_t* at, int64_t left) {
  const __m256i half = _mm256_maskz_loadu_epi16(low16(left), at);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Rows of x rounded to a bits: codes, or planes, or both, in one pass over a row in L1.
template <class T>
void quantize(const T* x, int64_t m, int64_t k, int64_t a, int64_t group, int64_t block,
              uint8_t* codes, uint64_t* planes, float* scale, int32_t* sums) {
  const int64_t kp = ceil_to(k, 64), words = kp / 64, groups = (k + group - 1) / group;
  const int top = (1 << a) - 1;
#pragma omp parallel for if (m > 4)
  for (int64_t row = 0; row < m; row++) {
    const T* in = x + row * k;
    __m512 most = _mm512_setzero_ps(), squares = most, bad = most;
    for (int64_t i = 0; i < k; i += 16) {
      const __m512 v = load16(in + i, k - i);
      most = _mm512_max_ps(most, _mm512_abs_ps(v));
      squares = _mm512_fmadd_ps(v, v, squares);
      bad = _mm512_fmadd_ps(v, _mm512_setzero_ps(), bad);  // NaN if one is infinite or NaN
    }
    // With few codes the largest is rare: the step of least error for a normal distribution.
    const float spread = std::sqrt(_mm512_reduce_add_ps(squares) / float(k));
    float s = a == 1 ? 0.7978846f * spread : a == 2 ? 0.498f * spread
                                                    : _mm512_reduce_max_ps(most) / float(top);
    const float half = s > 0 ? 0.5f / s : 0.0f;
    scale[row] = s + _mm512_reduce_add_ps(bad);
    const __m512 by = _mm512_set1_ps(half), middle = _mm512_set1_ps(0.5f * float(top));
    const __m512i zero = _mm512_setzero_si512(), limit = _mm512_set1_epi32(top);
    int32_t sum = 0;
    alignas(64) uint8_t line[64];
    for (int64_t t = 0; t < words; t++) {
      for (int q = 0; q < 4; q++) {
        const int64_t i = t * 64 + q * 16, left = k - i;
        __m128i bytes = _mm_setzero_si128();
        if (left > 0) {
          __m512i u = _mm512_cvtps_epi32(_mm512_fmadd_ps(load16(in + i, left), by, middle));
          u = _mm512_min_epi32(_mm512_max_epi32(u, zero), limit);
          bytes = _mm512_maskz_cvtepi32_epi8(low16(left), u);
        }
        _mm_store_si128((__m128i*)(line + q * 16), bytes);
        if (sums && left > 0) {
          sum += 2 * (int32_t)_mm512_reduce_add_epi32(_mm512_cvtepu8_epi32(bytes)) -
                 top * int32_t(left < 16 ? left : 16);
          if ((i + 16) % group == 0 || left <= 16)
            sums[row * groups + i / group] = sum, sum = 0;
        }
      }
      const __m512i all = _mm512_load_si512(line);
      if (codes)
        _mm512_storeu_si512(codes + ((row / block * words + t) * block + row % block) * 64, all);
      if (planes)
        for (int64_t i = 0; i < a; i++)
          planes[(row * a + i) * words + t] =
              _mm512_test_epi8_mask(all, _mm512_set1_epi8(char(1 << i)));
    }
  }
}

}  // namespace

extern "C" {

// Planes [rows][bits][K/64] -> codes [rows/block][K/64][block][64].
void planes_codes(const uint64_t* planes, uint8_t* codes, int64_t rows, int64_t bits, int64_t k,
                  int64_t block) {
  const int64_t words = (k + 63) / 64;
#pragma omp parallel for if (rows > 4)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t t = 0; t < words; t++) {
      __m512i value = _mm512_setzero_si512();
      for (int64_t i = 0; i < bits; i++)
        value = _mm512_mask_add_epi8(value, planes[(row * bits + i) * words + t], value,
                                     _mm512_set1_epi8(char(1 << i)));
      _mm512_storeu_si512(codes + ((row / block * words + t) * block + row % block) * 64, value);
    }
}

// Codes [rows][K/64 x 64] -> planes [rows][bits][K/64].
void planes_split(const uint8_t* codes, uint64_t* planes, int64_t rows, int64_t bits, int64_t k) {
  const int64_t words = (k + 63) / 64;
#pragma omp parallel for
  for (int64_t row = 0; row < rows; row++)
    for (int64_t t = 0; t < words; t++) {
      const __m512i all = _mm512_loadu_si512(codes + (row * words + t) * 64);
      for (int64_t i = 0; i < bits; i++)
        planes[(row * bits + i) * words + t] =
            _mm512_test_epi8_mask(all, _mm512_set1_epi8(char(1 << i)));
    }
}

// Codes [N][K/64 x 64] -> masks.
void planes_masks(const uint8_t* codes, uint64_t* masks, int64_t n, int64_t k, int64_t w) {
  const int64_t kp = ceil_to(k, 64), tiles_n = ceil_to(n, 32) / 16;
  const int64_t inverted = w == 8 ? 0xc0 : int64_t(1) << (w - 1);
#pragma omp parallel for
  for (int64_t tile = 0; tile < tiles_n; tile++) {
    alignas(64) uint8_t values[64];
    for (int64_t step = 0; step < kp / 4; step++) {
      for (int64_t i = 0; i < 16; i++) {
        const int64_t row = tile * 16 + i;
        if (row < n) std::memcpy(values + 4 * i, codes + row * kp + 4 * step, 4);
        else std::memset(values + 4 * i, 0, 4);
      }
      const __m512i all =
          _mm512_xor_si512(_mm512_load_si512(values), _mm512_set1_epi8(char(inverted)));
      for (int64_t i = 0; i < w; i++)
        masks[(tile * (kp / 4) + step) * w + i] =
            _mm512_test_epi8_mask(all, _mm512_set1_epi8(char(1 << i)));
    }
  }
}

// Planes [N][w][K/64] -> tiles.
void planes_tiles(const uint64_t* planes, uint64_t* out, int64_t n, int64_t k, int64_t w) {
  const int64_t words = (k + 63) / 64, pairs = ceil_to(n, 32) / 32;
#pragma omp parallel for
  for (int64_t pair = 0; pair < pairs; pair++)
    for (int64_t i = 0; i < w; i++)
      for (int64_t t = 0; t < words; t++)
        for (int64_t v = 0; v < 32; v++) {
          const int64_t row = pair * 32 + v;
          out[((pair * w + i) * words + t) * 32 + v] =
              row < n ? planes[(row * w + i) * words + t] : 0;
        }
}

// Sum of the values of each group of each row of planes: [rows][groups].
void planes_sums(const uint64_t* planes, int32_t* sums, int64_t rows, int64_t bits, int64_t k,
                 int64_t group) {
  const int64_t words = (k + 63) / 64, groups = (k + group - 1) / group;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t g = 0; g < groups; g++) {
      const int64_t end = (g + 1) * group < k ? (g + 1) * group : k;
      int64_t sum = -((int64_t(1) << bits) - 1) * (end - g * group);
      for (int64_t i = 0; i < bits; i++)
        for (int64_t t = g * group / 64; t < (end + 63) / 64; t++)
          sum += int64_t(__builtin_popcountll(planes[(row * bits + i) * words + t])) << (i + 1);
      sums[row * groups + g] = int32_t(sum);
    }
}

void planes_quantize_fp32(const float* x, int64_t m, int64_t k, int64_t a, int64_t group,
                          int64_t block, uint8_t* codes, uint64_t* planes, float* scale,
                          int32_t* sums) {
  quantize(x, m, k, a, group, block, codes, planes, scale, sums);
}
void planes_quantize_bf16(const uint16_t* x, int64_t m, int64_t k, int64_t a, int64_t group,
                          int64_t block, uint8_t* codes, uint64_t* planes, float* scale,
                          int32_t* sums) {
  quantize(x, m, k, a, group, block, codes, planes, scale, sums);
}

#if defined(__AVX512VPOPCNTDQ__)
void planes_popcount(const Job* job, const uint64_t* x, const float* xscale, const int32_t* xsum,
                     void* y, int64_t m) {
  const Job& j = *job;
#pragma omp parallel
  {
    const Range part =
        share(ceil_to(j.n, 32) / 32, 1, omp_get_thread_num(), omp_get_num_threads());
    for (int64_t pair = part.first; pair < part.last; pair++)
      for (int64_t row = 0; row < m; row += 4) switch (m - row) {
          case 1: popcount_block<1>(j, pair, x, row, xscale, xsum, y); break;
          case 2: popcount_block<2>(j, pair, x, row, xscale, xsum, y); break;
          case 3: popcount_block<3>(j, pair, x, row, xscale, xsum, y); break;
          default: popcount_block<4>(j, pair, x, row, xscale, xsum, y);
        }
  }
}
#endif

#if defined(__AVX512VNNI__)
void planes_few(const Job* job, const uint8_t* x, const float* xscale, const int32_t* xsum,
                void* y, int64_t m) {
  const Job& j = *job;
#pragma omp parallel
  {
    const Range part =
        share((j.n + 15) / 16, 1, omp_get_thread_num(), omp_get_num_threads());
    for (int64_t row = 0; row < m; row += 4) {
      const bool wide = j.w == 8;
      switch (m - row) {
        case 1: (wide ? few<1, true> : few<1, false>)(j, x, row, xscale, xsum, y, part); break;
        case 2: (wide ? few<2, true> : few<2, false>)(j, x, row, xscale, xsum, y, part); break;
        case 3: (wide ? few<3, true> : few<3, false>)(j, x, row, xscale, xsum, y, part); break;
        default: (wide ? few<4, true> : few<4, false>)(j, x, row, xscale, xsum, y, part);
      }
    }
  }
}

void planes_dots(const Job* job, const uint8_t* x, const float* xscale, const int32_t* xsum,
                 void* y, int64_t m) {
#pragma omp parallel
  dot_pairs(*job, x, xscale, xsum, y, m,
            share(ceil_to(job->n, 32) / 32, 1, omp_get_thread_num(), omp_get_num_threads()));
}
#endif

#if defined(__AMX_INT8__) && defined(__AMX_TILE__)
void planes_matrix(const Job* job, const uint8_t* x, const float* xscale, const int32_t* xsum,
                   void* y, int64_t m) {
#pragma omp parallel
  tile_pairs(*job, x, xscale, xsum, y, m,
             share(ceil_to(job->n, 32) / 32, 1, omp_get_thread_num(), omp_get_num_threads()));
}
#endif

}  // extern "C"
#endif
