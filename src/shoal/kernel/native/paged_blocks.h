// Attention of many tokens of a request over its pages, in bf16, the keys and values packed.
//
// Keys and values of a key/value head are laid out as panels once; then blocks of 32 query tokens
// pass over them in steps of 128 keys: their scores, the largest, the weights, the sum of values.
// Steps begin at places that depend on a token's number alone: a result has the same bits however
// a prompt is cut into chunks, whatever else is computed, and on however many threads.
//
// An engine E multiplies 32 rows with 32 columns: `E::product`, between `E::begin` and `E::end`.
//
// Source: Dao et al., FlashAttention, 2022 (the sums that are scaled anew).
#include "paged.h"

#ifdef __AVX512BF16__

namespace {

constexpr int64_t ROWS = 32, KEYS = 128, TILE = 512;  // numbers of a tile

// Query tokens of one request that lie side by side, and one head of its keys and values.
struct Part {
  int64_t row, rows, request, seen, g, first, last;  // blocks of queries [first, last)
};

struct Layout {
  const Problem& p;
  const Part& part;
  int64_t steps;  // of 32 numbers of a head
  uint16_t *keys, *values;
  const char* zero;

  const char* token(const Side& side, int64_t at) const {
    if (at >= part.seen) return zero;
    const int64_t block = block_of(p, part.request, at / p.size);
    return side.codes + (block * p.size + at % p.size) * side.slot + part.g * side.head;
  }
  // Keys 16 at a time: [step][16 pairs of numbers][16 keys]. Values 32 at a time: [16 columns]
  // [16 pairs of keys][16 numbers].
  void fill() const {
    const int64_t until = (part.seen + 31) / 32 * 32;
    for (int64_t first = 0; first < until; first += 16) {
      const char* at[16];
      for (int64_t j = 0; j < 16; j++) at[j] = token(p.k, first + j);
      for (int64_t s = 0; s < steps; s++) {
        uint32_t* tile = (uint32_t*)(keys + (first / 16 * steps + s) * TILE);
        for (int64_t j = 0; j < 16; j++) {
          alignas(64) uint32_t pairs[16];
          _mm512_store_si512(pairs, _mm512_loadu_si512(at[j] + s * 64));
          for (int64_t r = 0; r < 16; r++) tile[r * 16 + j] = pairs[r];
        }
      }
    }
    for (int64_t first = 0; first < until; first += 32)
      for (int64_t r = 0; r < 16; r++) {
        const char *a = token(p.v, first + 2 * r), *b = token(p.v, first + 2 * r + 1);
        for (int64_t c = 0; c < 2 * steps; c++) {
          const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a + c));
          const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b + c));
          _mm512_store_si512(values + ((first / 32 * 2 * steps + c) * 16 + r) * 32,
                             _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
      }
  }
};

// 32 rows by 32 columns, of which two panels of 16 hold the numbers of each step of 32.
struct Factors {
  const void* rows;
  int64_t across;               // bytes from one row to the next
  const uint16_t *left, *right;
  int64_t stride, steps;        // numbers from one step of a panel to the next
};

struct Room {
  alignas(64) float scores[ROWS * KEYS];
  alignas(64) uint16_t weights[ROWS * KEYS];
  alignas(64) float top[ROWS], sum[ROWS], worth[ROWS];
};

// What is not seen: no weight, and nothing that is not a number in its difference to any other.
constexpr float kHidden = -1e30f, kLowest = -1e20f;

// 2^x for x <= 0, to 1e-4: weights are rounded to bf16, which is thirty times as coarse.
inline __m512 rough_power(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(7.802411e-2f), f, _mm512_set1_ps(2.260679e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9583317e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.9992526e-1f));
  return _mm512_scalef_ps(y, x);  // by the whole part of x
}

// Of 16 rows, what `join` makes of the 16 numbers of each, in the order of the rows.
template <class Join>
inline __m512 rows16(__m512* x, Join join) {
  alignas(64) static const int32_t low[4][16] = {
      {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
      {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27},
      {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29},
      {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}};
  alignas(64) static const int32_t order[16] = {0, 8, 4, 12, 2, 10, 6, 14,
                                                1, 9, 5, 13, 3, 11, 7, 15};
#pragma GCC unroll 4
  for (int level = 0; level < 4; level++) {
    const int half = 8 >> level;
    const __m512i a = _mm512_load_si512(low[level]), b = _mm512_add_epi32(a, _mm512_set1_epi32(half));
#pragma GCC unroll 8
    for (int i = 0; i < half; i++)
      x[i] = join(_mm512_permutex2var_ps(x[i], a, x[i + half]),
                  _mm512_permutex2var_ps(x[i], b, x[i + half]));
  }
  return _mm512_permutexvar_ps(_mm512_load_si512(order), x[0]);
}

// Weights of 16 rows' scores for n keys, and what the sums of the rows so far are worth. Rows are
// taken together so that none waits for its own largest score.
inline void weigh(Room& room, int64_t first, int64_t n, __m512 scale) {
  const float* scores = room.scores + first * KEYS;
  __m512 x[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) x[r] = _mm512_load_ps(scores + r * KEYS);
  for (int64_t k = 16; k < n; k += 16)
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) x[r] = _mm512_max_ps(x[r], _mm512_load_ps(scores + r * KEYS + k));
  const __m512 most = rows16(x, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
  const __m512 before = _mm512_load_ps(room.top + first);
  const __m512 top = _mm512_max_ps(before, _mm512_mul_ps(most, scale));
  const __m512 worth = power(_mm512_sub_ps(before, top));
  _mm512_store_ps(room.top + first, top);
  _mm512_store_ps(room.worth + first, worth);
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  for (int r = 0; r < 16; r++) {
    const __m512 less = _mm512_set1_ps(-room.top[first + r]);
    const float* at = scores + r * KEYS;
    uint16_t* to = room.weights + (first + r) * KEYS;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < n; k += 32) {
      const __m512 a = rough_power(_mm512_fmadd_ps(_mm512_load_ps(at + k), scale, less));
      const __m512 b = rough_power(_mm512_fmadd_ps(_mm512_load_ps(at + k + 16), scale, less));
      const __m512bh near = _mm512_cvtne2ps_pbh(b, a);
      _mm512_store_si512(to + k, (__m512i)near);
      // The weights that are used add up to what they are divided by.
      sum = _mm512_dpbf16_ps(sum, near, (__m512bh)ones);
    }
    x[r] = sum;
  }
  const __m512 added = rows16(x, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
  _mm512_store_ps(room.sum + first, _mm512_fmadd_ps(_mm512_load_ps(room.sum + first), worth, added));
}

// 32 query tokens of one head; `q` and `out` have room for them.
template <class E>
void block(const Layout& l, int64_t row, int64_t rows, int64_t head, Room& room, char* q,
           float* out) {
  const Problem& p = l.p;
  const int64_t d = p.d;
  const __m512 scale = _mm512_set1_ps(p.scale);
  std::memset(q, 0, ROWS * d * 2);
  std::memset(out, 0, ROWS * d * 4);
  int64_t limit = 0;
  for (int64_t r = 0; r < rows; r++) {
    std::memcpy(q + r * d * 2, p.q + (row + r) * p.q_row + head * p.q_head, d * 2);
    limit = std::max(limit, p.seen[row + r]);
  }
  for (int64_t r = 0; r < ROWS; r++) room.top[r] = kLowest, room.sum[r] = 0;
  for (int64_t first = 0; first < limit; first += KEYS) {
    const int64_t n = std::min(KEYS, (limit - first + 31) / 32 * 32);
    for (int64_t k = 0; k < n; k += 32) {
      const uint16_t* left = l.keys + (first + k) / 16 * l.steps * TILE;
      E::product({q, d * 2, left, left + l.steps * TILE, TILE, l.steps}, room.scores + k, KEYS,
                 false);
    }
    for (int64_t r = 0; r < rows; r++) {
      const int64_t valid = std::max<int64_t>(0, p.seen[row + r] - first);
      for (int64_t k = valid / 16 * 16; k < n; k += 16)
        _mm512_mask_store_ps(room.scores + r * KEYS + k, ~low16(std::max<int64_t>(0, valid - k)),
                              _mm512_set1_ps(kHidden));
    }
    for (int64_t r = 0; r < ROWS; r += 16) {
      weigh(room, r, n, scale);
      const __m512 worth = _mm512_load_ps(room.worth + r);
      uint32_t less = _mm512_cmp_ps_mask(worth, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ);
      for (; first && less; less &= less - 1) {
        float* at = out + (r + __builtin_ctz(less)) * d;
        const __m512 by = _mm512_set1_ps(room.worth[r + __builtin_ctz(less)]);
        for (int64_t i = 0; i < d; i += 16)
          _mm512_storeu_ps(at + i, _mm512_mul_ps(_mm512_loadu_ps(at + i), by));
      }
    }
    for (int64_t c = 0; c < l.steps; c++) {
      const uint16_t* left = l.values + (first / 32 * 2 * l.steps + 2 * c) * TILE;
      E::product({room.weights, KEYS * 2, left, left + TILE, 2 * l.steps * TILE, n / 32},
                 out + 32 * c, d, true);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    const __m512 by = _mm512_set1_ps(1.0f / room.sum[r]);
    uint16_t* to = (uint16_t*)p.out + ((row + r) * p.heads + head) * d;
    for (int64_t i = 0; i < d; i += 16) {
      const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(out + r * d + i), by);
      _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(y));
    }
  }
}

std::vector<Part> parts_of(const Problem& p) {
  std::vector<Part> runs, parts;
  for (int64_t row = 0; row < p.rows; row++) {
    const int64_t request = p.request ? p.request[row] : row;
    if (runs.empty() || runs.back().request != request) runs.push_back({row, 0, request, 0, 0, 0, 0});
    runs.back().rows++;
    runs.back().seen = std::max(runs.back().seen, p.seen[row]);
  }
  const int64_t threads = omp_get_max_threads(), whole = int64_t(runs.size()) * p.kv_heads;
  for (const Part& run : runs) {
    // Few heads and many threads: each lays out the keys anew, and takes some of the queries.
    const int64_t blocks = (run.rows + ROWS - 1) / ROWS;
    const int64_t cut = std::min(blocks, std::max<int64_t>(1, threads / std::max<int64_t>(1, whole)));
    for (int64_t g = 0; g < p.kv_heads; g++)
      for (int64_t i = 0; i < cut; i++) {
        Part part = run;
        part.g = g, part.first = blocks * i / cut, part.last = blocks * (i + 1) / cut;
        parts.push_back(part);
      }
  }
  return parts;
}

template <class E>
int64_t attention_of_blocks(const int64_t* arguments) {
  const Problem p = problem_of(arguments);
  const int64_t problem = wrong(p, arguments);
  if (problem >= 0 || p.rows == 0) return problem;
  const std::vector<Part> parts = parts_of(p);
  const int64_t steps = p.d / 32;
#pragma omp parallel
  {
    E::begin();
    static thread_local Buffer space;
    static thread_local Room room;
    alignas(64) char zero[2 * 256] = {};
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < int64_t(parts.size()); i++) {
      const Part& part = parts[i];
      const int64_t padded = (part.seen + 31) / 32 * 32;
      char* at = space.get(padded * p.d * 4 + ROWS * p.d * 6 + 256);
      Layout l = {p, part, steps, (uint16_t*)at, (uint16_t*)(at + padded * p.d * 2), zero};
      float* out = (float*)(at + padded * p.d * 4);
      char* q = (char*)(out + ROWS * p.d);
      l.fill();
      for (int64_t b = part.first; b < part.last; b++)
        for (int64_t j = 0; j < p.group; j++)
          block<E>(l, part.row + b * ROWS, std::min(ROWS, part.rows - b * ROWS), part.g * p.group + j,
                room, q, out);
    }
    E::end();
  }
  return -1;
}

}  // namespace
#endif
