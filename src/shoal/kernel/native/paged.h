// Attention of query tokens over the blocks of cached tokens that their requests hold.
//
// A query goes through its tokens in steps of 64: their scores, the largest, the weights, the
// sum of values. After 256 tokens it begins anew, and these chunks are folded in their order.
// Steps and chunks lie at places that depend on a token's number alone, and threads share the
// work by whole chunks: a result has the same bits whatever else is computed, and on however
// many threads.
//
// Shapes: N rows (query tokens), H query heads, K key/value heads, d head_dim.
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#ifdef __AVX512DQ__

namespace {

constexpr int64_t kStep = 64, kChunk = 256;
constexpr int64_t kVectors = 32;  // query vectors that pass over the same tokens together
constexpr float kNone = -3e38f;   // the largest score of no tokens
constexpr int64_t kHead = 16;     // floats before the sums of a record: largest, sum of weights

struct Side {  // keys or values
  const char *codes, *scales;
  int64_t slot, head, scale_slot, scale_head;  // bytes from one to the next
};

struct Problem {
  const char* q;  // [N, H, d], q_row and q_head bytes from one to the next
  char* out;      // [N, H, d], side by side
  int64_t q_row, q_head;
  Side k, v;
  const void* table;  // [B, width], int64 where wide, else int32
  bool wide;
  const int64_t *seen, *request;  // [N]; request may be null: row i is of request i
  // [2, N] or null: from which token on a row is of a tree, and which of the 64 from there on it
  // sees, a bit each, of those that `seen` counts.
  const int64_t* tree;
  int64_t rows, requests, heads, kv_heads, d, width, size, block;
  float scale;    // of the scores, for powers of two
  int64_t pad;    // d up to whole vectors
  int64_t group;  // H / K
  bool half;      // queries and results in bf16, else in fp32
  // Results are records [N, H, d + 2] in fp32: the sum of weighted values, the largest score in
  // powers of two, the sum of weights. Such parts of a context can be put together.
  bool partial;
  bool narrow() const { return half && !partial; }
  int64_t result_bytes() const { return narrow() ? 2 * d : partial ? 4 * (d + 2) : 4 * d; }
};

inline int64_t block_of(const Problem& p, int64_t request, int64_t at) {
  const int64_t i = request * p.width + at;
  return p.wide ? ((const int64_t*)p.table)[i] : ((const int32_t*)p.table)[i];
}

// Which of the kStep tokens from `first` on a row sees, a bit each.
inline uint64_t visible(const Problem& p, int64_t row, int64_t first) {
  const int64_t left = p.seen[row] - first;
  const uint64_t all = left >= 64 ? ~0ull : left <= 0 ? 0 : (1ull << left) - 1;
  if (!p.tree) return all;
  const int64_t root = p.tree[row] - first;
  const uint64_t bits = uint64_t(p.tree[p.rows + row]);
  if (root >= 64) return all;
  if (root >= 0) return all & (bits << root | ((1ull << root) - 1));
  return root <= -64 ? 0 : all & bits >> -root;
}

struct Step {
  int64_t n;  // tokens; beyond them the arrays repeat the first
  int64_t slot[kStep];
  const char *k[kStep], *v[kStep];  // of head 0
};

void fill(Step& s, const Problem& p, int64_t request, int64_t first, int64_t seen) {
  s.n = std::min(kStep, seen - first);
  int64_t at = first / p.size, offset = first % p.size;
  int64_t base = block_of(p, request, at) * p.size;
  for (int64_t t = 0; t < s.n; t++) {
    if (offset == p.size) offset = 0, base = block_of(p, request, ++at) * p.size;
    s.slot[t] = base + offset++;
  }
  for (int64_t t = s.n; t < kStep; t++) s.slot[t] = s.slot[0];
  for (int64_t t = 0; t < kStep; t++) {
    s.k[t] = p.k.codes + s.slot[t] * p.k.slot;
    s.v[t] = p.v.codes + s.slot[t] * p.v.slot;
  }
}

// 2^x for x <= 0, to 2e-7; 0 far below, NaN for NaN.
inline __m512 power(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(1.5403530e-4f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.3333558e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, n);
}

inline float power1(float x) { return _mm512_cvtss_f32(power(_mm512_set1_ps(x))); }

// Sums over the lanes of 16 vectors, all in the same tree.
inline __m512 lanes(const __m512* a) {
  __m512 u[8], w[4], x[2];
  for (int i = 0; i < 8; i++)
    u[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                         _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    const __m512d b = _mm512_castps_pd(u[2 * i]), c = _mm512_castps_pd(u[2 * i + 1]);
    w[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(b, c)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(b, c)));
  }
  for (int i = 0; i < 2; i++)
    x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(w[2 * i], w[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(w[2 * i], w[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88),
                       _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
}

// Weights of a step's scores. `record` has the largest score and the sum of weights so far;
// returns what the sums so far are worth. With `scales` the weights are multiplied by them.
template <class P>
__attribute__((noinline)) float weigh(const float* scores, uint64_t visible, const float* scales,
                                      P* weights, float* record) {
  __m512 x[4];
  for (int i = 0; i < 4; i++)
    x[i] = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), __mmask16(visible >> 16 * i),
                                scores + 16 * i);
  const __m512 most = _mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3]));
  const float top = std::max(record[0], _mm512_reduce_max_ps(most));
  const float worth = power1(record[0] - top);
  for (int i = 0; i < 4; i++) {
    x[i] = power(_mm512_sub_ps(x[i], _mm512_set1_ps(top)));
    if constexpr (sizeof(P) == 4) {
      _mm512_storeu_ps((float*)weights + 16 * i, x[i]);
    } else {
#ifdef __AVX512BF16__
      __m512 y = x[i];
      if (scales) y = _mm512_mul_ps(y, _mm512_loadu_ps(scales + 16 * i));
      const __m256i near = (__m256i)_mm512_cvtneps_pbh(y);
      _mm256_storeu_si256((__m256i*)((uint16_t*)weights + 16 * i), near);
      // The weights that are used add up to what they are divided by.
      if (!scales)
        x[i] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(near), 16));
#endif
    }
  }
  const __m512 sum = _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3]));
  record[0] = top;
  record[1] = __builtin_fmaf(record[1], worth, _mm512_reduce_add_ps(sum));
  return worth;
}

__attribute__((noinline)) void fold(float* to, const float* from, int64_t pad) {
  const float top = std::max(to[0], from[0]);
  const float a = power1(to[0] - top), b = power1(from[0] - top);
  to[0] = top;
  to[1] = __builtin_fmaf(to[1], a, from[1] * b);
  const __m512 va = _mm512_set1_ps(a), vb = _mm512_set1_ps(b);
  for (int64_t i = kHead; i < kHead + pad; i += 16) {
    const __m512 part = _mm512_mul_ps(_mm512_loadu_ps(from + i), vb);
    _mm512_storeu_ps(to + i, _mm512_fmadd_ps(_mm512_loadu_ps(to + i), va, part));
  }
}

inline void ahead(const char* at) { _mm_prefetch(at, _MM_HINT_T0); }

// The scores of T tokens and H queries, T * H = 16, are stored where they belong.
template <int T>
inline void put(__m512 y, float* out) {
  if constexpr (T == 16) {
    _mm512_storeu_ps(out, y);
  } else if constexpr (T == 8) {
    _mm256_storeu_ps(out, _mm512_castps512_ps256(y));
    _mm256_storeu_ps(out + kStep, _mm512_extractf32x8_ps(y, 1));
  } else {
    _mm_storeu_ps(out, _mm512_castps512_ps128(y));
    _mm_storeu_ps(out + kStep, _mm512_extractf32x4_ps(y, 1));
    _mm_storeu_ps(out + 2 * kStep, _mm512_extractf32x4_ps(y, 2));
    _mm_storeu_ps(out + 3 * kStep, _mm512_extractf32x4_ps(y, 3));
  }
}

// Scores [M, kStep] of the tokens [first, last) of a step, `F::dots` at a time.
template <class F>
inline void scores(const Problem& p, const Step& now, const Step& next, int64_t first,
                   int64_t last, int64_t g, int64_t M, const char* q, int64_t q_bytes,
                   float* out) {
  const __m512 scale = _mm512_set1_ps(p.scale * F::unit);
  for (int64_t t = first; t < last; t += 16) {
    int64_t m = 0;
    for (; m + 4 <= M; m += 4)
      for (int64_t i = t; i < t + 16; i += 4) {
        const char* query = q + m * q_bytes;
        const __m512 y = F::template dots<4, 4>(p, now, next, i, g, query, q_bytes);
        put<4>(_mm512_mul_ps(y, scale), out + m * kStep + i);
      }
    for (; m + 2 <= M; m += 2)
      for (int64_t i = t; i < t + 16; i += 8)
        put<8>(_mm512_mul_ps(F::template dots<8, 2>(p, now, next, i, g, q + m * q_bytes, q_bytes),
                             scale),
               out + m * kStep + i);
    if (m < M)
      put<16>(_mm512_mul_ps(F::template dots<16, 1>(p, now, next, t, g, q + m * q_bytes, q_bytes),
                            scale),
              out + m * kStep + t);
  }
}

template <class F>
inline void by_heads(const Problem& p, const char* const* rows, const char* const* next,
                     int64_t off, int64_t n, int64_t M, const typename F::P* weights,
                     float* sums, int64_t record, const float* worth) {
  int64_t m = 0;
  // Only the first pass over these values fetches those of the next step.
  const auto then = [&] { return m ? nullptr : next; };
  for (; m + 4 <= M; m += 4)
    F::template columns<4>(p, rows, then(), off, n, weights + m * kStep, sums + m * record,
                           record, worth + m);
  for (; m + 2 <= M; m += 2)
    F::template columns<2>(p, rows, then(), off, n, weights + m * kStep, sums + m * record,
                           record, worth + m);
  if (m < M)
    F::template columns<1>(p, rows, then(), off, n, weights + m * kStep, sums + m * record,
                           record, worth + m);
}

struct Fp32 {
  using P = float;
  static constexpr float unit = 1.0f;
  static constexpr int64_t width = 16;
  static int64_t query_bytes(const Problem& p) { return p.pad * 4; }
  static void query(const Problem& p, const char* q, char* to) {
    std::memset(to, 0, p.pad * 4);
    std::memcpy(to, q, p.d * 4);
  }
  template <int T, int H>
  static __m512 dots(const Problem& p, const Step& now, const Step& next, int64_t t, int64_t g,
                     const char* q, int64_t q_bytes) {
    __m512 sum[16];
    for (int i = 0; i < 16; i++) sum[i] = _mm512_setzero_ps();
    const int64_t off = g * p.k.head;
    for (int64_t i = 0; i < p.d; i += 16) {
      const __mmask16 mask = low16(p.d - i);
#pragma GCC unroll 16
      for (int j = 0; j < T; j++) {
        const __m512 k = _mm512_maskz_loadu_ps(mask, now.k[t + j] + off + i * 4);
        ahead(next.k[t + j] + off + i * 4);
#pragma GCC unroll 4
        for (int h = 0; h < H; h++)
          sum[h * T + j] =
              _mm512_fmadd_ps(k, _mm512_loadu_ps(q + h * q_bytes + i * 4), sum[h * T + j]);
      }
    }
    return lanes(sum);
  }
  template <int H, int C>
  static void mix(const char* const* rows, const char* const* next, int64_t off, int64_t n,
                  const float* weights, float* sums, int64_t record, const float* worth,
                  __mmask16 mask) {
    __m512 sum[H][C];
    for (int h = 0; h < H; h++)
      for (int c = 0; c < C; c++)
        sum[h][c] = _mm512_mul_ps(_mm512_loadu_ps(sums + h * record + 16 * c),
                                  _mm512_set1_ps(worth[h]));
    for (int64_t t = 0; t < n; t++) {
      __m512 v[C];
      for (int c = 0; c < C; c++) {
        const char* at = rows[t] + off + 64 * c;
        v[c] = C == 1 ? _mm512_maskz_loadu_ps(mask, at) : _mm512_loadu_ps(at);
        if (next) ahead(next[t] + off + 64 * c);
      }
      for (int h = 0; h < H; h++) {
        const __m512 w = _mm512_set1_ps(weights[h * kStep + t]);
        for (int c = 0; c < C; c++) sum[h][c] = _mm512_fmadd_ps(w, v[c], sum[h][c]);
      }
    }
    for (int h = 0; h < H; h++)
      for (int c = 0; c < C; c++) _mm512_storeu_ps(sums + h * record + 16 * c, sum[h][c]);
  }
  template <int H>
  static void columns(const Problem& p, const char* const* rows, const char* const* next,
                      int64_t off, int64_t n, const float* weights, float* sums, int64_t record,
                      const float* worth) {
    int64_t i = 0;
    for (; i + 64 <= p.d; i += 64)
      mix<H, 4>(rows, next, off + 4 * i, n, weights, sums + i, record, worth, 0xffff);
    for (; i < p.d; i += 16)
      mix<H, 1>(rows, next, off + 4 * i, n, weights, sums + i, record, worth, low16(p.d - i));
  }
  static const float* value_scales(const Problem&, const Step&, int64_t, float*) {
    return nullptr;
  }
  static void values(const Problem& p, const Step& now, const Step& next, int64_t g, int64_t M,
                     const float* weights, float* sums, int64_t record, const float* worth,
                     char*) {
    by_heads<Fp32>(p, now.v, next.v, g * p.v.head, now.n, M, weights, sums, record, worth);
  }
  static void result(const Problem& p, const float* sums, float divisor, char* out) {
    const __m512 by = _mm512_set1_ps(1.0f / divisor);
    for (int64_t i = 0; i < p.d; i += 16) {
      const __m512 y = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(sums + i), by),
                                     _mm512_setzero_ps());
      _mm512_mask_storeu_ps(out + 4 * i, low16(p.d - i), y);
    }
  }
};

#ifdef __AVX512BF16__

struct Bf16 {
  using P = uint16_t;
  static constexpr float unit = 1.0f;
  static constexpr int64_t width = 32;
  static int64_t query_bytes(const Problem& p) { return p.pad * 2; }
  static void query(const Problem& p, const char* q, char* to) {
    std::memset(to, 0, p.pad * 2);
    std::memcpy(to, q, p.d * 2);
  }
  template <int T, int H>
  static __m512 dots(const Problem& p, const Step& now, const Step& next, int64_t t, int64_t g,
                     const char* q, int64_t q_bytes) {
    __m512 sum[16];
    for (int i = 0; i < 16; i++) sum[i] = _mm512_setzero_ps();
    const int64_t off = g * p.k.head;
    for (int64_t i = 0; i < p.d; i += 32) {
      const __mmask32 mask = low32(p.d - i);
#pragma GCC unroll 16
      for (int j = 0; j < T; j++) {
        const __m512i k = _mm512_maskz_loadu_epi16(mask, now.k[t + j] + off + i * 2);
        ahead(next.k[t + j] + off + i * 2);
#pragma GCC unroll 4
        for (int h = 0; h < H; h++)
          sum[h * T + j] = _mm512_dpbf16_ps(
              sum[h * T + j], (__m512bh)k,
              (__m512bh)_mm512_loadu_si512(q + h * q_bytes + i * 2));
      }
    }
    return lanes(sum);
  }
  // Pairs of tokens: in every 128 bits the values of four columns, then of four others.
  template <int H, int C>
  static void mix(const char* const* rows, const char* const* next, int64_t off, int64_t n,
                  const uint16_t* weights, float* sums, int64_t record, const float* worth,
                  __mmask32 mask) {
    __m512 sum[H][2 * C];
    for (int h = 0; h < H; h++)
      for (int c = 0; c < 2 * C; c++)
        sum[h][c] = _mm512_mul_ps(_mm512_loadu_ps(sums + h * record + 16 * c),
                                  _mm512_set1_ps(worth[h]));
    for (int64_t t = 0; t < n; t += 2) {
      __m512i v[2 * C];
      for (int c = 0; c < C; c++) {
        const char *a = rows[t] + off + 64 * c, *b = rows[t + 1] + off + 64 * c;
        const __m512i x = C == 1 ? _mm512_maskz_loadu_epi16(mask, a) : _mm512_loadu_si512(a);
        const __m512i y = C == 1 ? _mm512_maskz_loadu_epi16(mask, b) : _mm512_loadu_si512(b);
        v[2 * c] = _mm512_unpacklo_epi16(x, y);
        v[2 * c + 1] = _mm512_unpackhi_epi16(x, y);
        if (next) ahead(next[t] + off + 64 * c), ahead(next[t + 1] + off + 64 * c);
      }
      for (int h = 0; h < H; h++) {
        int32_t pair;
        std::memcpy(&pair, weights + h * kStep + t, 4);
        const __m512bh w = (__m512bh)_mm512_set1_epi32(pair);
        for (int c = 0; c < 2 * C; c++)
          sum[h][c] = _mm512_dpbf16_ps(sum[h][c], (__m512bh)v[c], w);
      }
    }
    for (int h = 0; h < H; h++)
      for (int c = 0; c < 2 * C; c++) _mm512_storeu_ps(sums + h * record + 16 * c, sum[h][c]);
  }
  template <int H>
  static void columns(const Problem& p, const char* const* rows, const char* const* next,
                      int64_t off, int64_t n, const uint16_t* weights, float* sums,
                      int64_t record, const float* worth) {
    int64_t i = 0;
    for (; i + 64 <= p.d; i += 64)
      mix<H, 2>(rows, next, off + 2 * i, n, weights, sums + i, record, worth, 0xffffffffu);
    for (; i < p.d; i += 32)
      mix<H, 1>(rows, next, off + 2 * i, n, weights, sums + i, record, worth, low32(p.d - i));
  }
  static const float* value_scales(const Problem&, const Step&, int64_t, float*) {
    return nullptr;
  }
  static void values(const Problem& p, const Step& now, const Step& next, int64_t g, int64_t M,
                     const uint16_t* weights, float* sums, int64_t record, const float* worth,
                     char*) {
    by_heads<Bf16>(p, now.v, next.v, g * p.v.head, now.n, M, weights, sums, record, worth);
  }
  static void result(const Problem& p, const float* sums, float divisor, char* out) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const __m512 by = _mm512_set1_ps(1.0f / divisor);
    for (int64_t i = 0; i < p.d; i += 32) {
      const __m512 a = _mm512_loadu_ps(sums + i), b = _mm512_loadu_ps(sums + i + 16);
      const __m512 y[2] = {_mm512_permutex2var_ps(a, first, b),
                           _mm512_permutex2var_ps(a, second, b)};
      for (int64_t j = i, h = 0; h < 2 && j < p.d; j += 16, h++) {
        const __m512 z = _mm512_add_ps(_mm512_mul_ps(y[h], by), _mm512_setzero_ps());
        const __mmask16 mask = low16(p.d - j);
        if (p.narrow())
          _mm256_mask_storeu_epi16(out + 2 * j, mask, (__m256i)_mm512_cvtneps_pbh(z));
        else
          _mm512_mask_storeu_ps(out + 4 * j, mask, z);
      }
    }
  }
};

#endif

struct Buffer {
  char* at = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(at); }
  char* get(size_t bytes) {
    if (bytes > size) {
      std::free(at);
      size = (bytes + 4095) / 4096 * 4096;
      at = (char*)std::aligned_alloc(64, size);
    }
    return at;
  }
};

// Rows of one request, one after the other.
struct Tile {
  int64_t row, rows, request, seen;  // seen: by the row that sees most
  int64_t chunks() const { return (seen + kChunk - 1) / kChunk; }
};

// Heads [first, last) of a tile.
struct Item {
  int64_t tile, first, last;
  int64_t cost;   // of all items before
  int64_t place;  // of its partial results, where more than one thread computes it; else -1
};

// What the threads share out, whatever the format.
struct Work {
  const Problem& p;
  std::vector<Tile> tiles;
  std::vector<Item> items;
  int64_t record, total = 0, threads = 1, kept = 0;

  explicit Work(const Problem& problem) : p(problem), record(kHead + problem.pad) {
    const int64_t most = std::max<int64_t>(1, kVectors / p.group);
    int64_t chunks = 0;
    for (int64_t row = 0; row < p.rows; row++) {
      const int64_t request = p.request ? p.request[row] : row;
      if (tiles.empty() || tiles.back().request != request || tiles.back().rows == most) {
        if (!tiles.empty()) chunks += tiles.back().chunks();
        tiles.push_back({row, 0, request, 0});
      }
      tiles.back().rows++;
      tiles.back().seen = std::max(tiles.back().seen, p.seen[row]);
    }
    chunks += tiles.back().chunks();
    threads = omp_get_max_threads();
    // Heads together read memory in longer runs; apart, there is more to share.
    int64_t together = p.kv_heads;
    while (together > 1 && chunks * ((p.kv_heads + together - 1) / together) < 4 * threads)
      together = (together + 1) / 2;
    for (int64_t i = 0; i < int64_t(tiles.size()); i++)
      for (int64_t g = 0; g < p.kv_heads; g += together) {
        items.push_back({i, g, std::min(g + together, p.kv_heads), total, -1});
        total += (tiles[i].seen + kStep - 1) / kStep * step_cost(items.back());
      }
    // A thread that has less than some tens of microseconds to do is not worth its waking.
    threads = std::clamp<int64_t>(total / 32, 1, threads);
    for (Item& item : items)
      if (owner(item, 0) != owner(item, tiles[item.tile].chunks() - 1)) {
        item.place = kept;
        kept += tiles[item.tile].chunks() * vectors(item) * record;
      }
  }

  int64_t step_cost(const Item& item) const {
    return (item.last - item.first) * (4 + tiles[item.tile].rows * p.group);
  }
  int64_t vectors(const Item& item) const {
    return (item.last - item.first) * tiles[item.tile].rows * p.group;
  }
  int64_t owner(const Item& item, int64_t chunk) const {
    return (item.cost + chunk * (kChunk / kStep) * step_cost(item)) * threads / total;
  }
  void clear(float* to, int64_t vectors) const {
    std::memset(to, 0, vectors * record * sizeof(float));
    for (int64_t i = 0; i < vectors; i++) to[i * record] = kNone;
  }
  void fold_all(float* to, const float* from, int64_t vectors) const {
    for (int64_t i = 0; i < vectors; i++) fold(to + i * record, from + i * record, p.pad);
  }
};

template <class F>
struct Run : Work {
  using P = typename F::P;
  using Work::Work;

  // One chunk of an item, into `to` [heads, rows, group] records. Where its request ends, the
  // tokens of `after` are fetched: in short contexts every step is the last.
  void chunk(const Item& item, int64_t c, const Step* after, const char* q, char* space,
             float* to) const {
    const Tile& tile = tiles[item.tile];
    const int64_t M = tile.rows * p.group, q_bytes = F::query_bytes(p);
    float* s = (float*)space;
    P* weights = (P*)(s + M * kStep);
    float* worth = (float*)(weights + M * kStep);
    float* scales = worth + (M + 15) / 16 * 16;
    char* rows = (char*)(scales + kStep);
    clear(to, vectors(item));
    Step steps[2];
    int64_t now = 0;
    const int64_t stop = std::min((c + 1) * kChunk, tile.seen);
    fill(steps[0], p, tile.request, c * kChunk, tile.seen);
    for (int64_t first = c * kChunk; first < stop; first += kStep, now = 1 - now) {
      const bool more = first + kStep < tile.seen;
      if (more) fill(steps[1 - now], p, tile.request, first + kStep, tile.seen);
      const Step &here = steps[now], &next = more ? steps[1 - now] : after ? *after : here;
      for (int64_t g = item.first; g < item.last; g++) {
        float* records = to + (g - item.first) * M * record;
        scores<F>(p, here, next, 0, here.n, g, M, q + (g - item.first) * M * q_bytes, q_bytes,
                  s);
        const float* value_scales = F::value_scales(p, here, g, scales);
        for (int64_t m = 0; m < M; m++)
          worth[m] = weigh<P>(s + m * kStep, visible(p, tile.row + m / p.group, first),
                              value_scales, weights + m * kStep, records + m * record);
        F::values(p, here, next, g, M, weights, records + kHead, record, worth, rows);
      }
    }
  }

  void finish(const Item& item, const float* records) const {
    const Tile& tile = tiles[item.tile];
    for (int64_t g = item.first; g < item.last; g++)
      for (int64_t row = tile.row; row < tile.row + tile.rows; row++)
        for (int64_t j = 0; j < p.group; j++, records += record) {
          char* to = p.out + (row * p.heads + g * p.group + j) * p.result_bytes();
          F::result(p, records + kHead, p.partial ? 1.0f : records[1], to);
          if (p.partial) std::memcpy(to + 4 * p.d, records, 2 * sizeof(float));
        }
  }

  void share(int64_t thread, float* partial, Buffer& buffer) const {
    const int64_t q_bytes = F::query_bytes(p);
    for (const Item& item : items) {
      const Tile& tile = tiles[item.tile];
      const int64_t chunks = tile.chunks(), n = vectors(item), M = tile.rows * p.group;
      if (owner(item, chunks - 1) < thread) continue;
      if (owner(item, 0) > thread) break;
      const size_t state = n * record * sizeof(float);
      const size_t space = M * kStep * 8 + (M + 16 + kStep) * 4 + kStep * p.pad * 2;
      float* sums = (float*)buffer.get(2 * state + n * q_bytes + space + 256);
      float* part = sums + n * record;
      char* q = (char*)(part + n * record);
      char* to = q;
      for (int64_t g = item.first; g < item.last; g++)
        for (int64_t row = 0; row < tile.rows; row++)
          for (int64_t j = 0; j < p.group; j++, to += q_bytes)
            F::query(p, p.q + (tile.row + row) * p.q_row + (g * p.group + j) * p.q_head, to);
      clear(sums, n);
      const Item* following = &item + 1;
      Step first;
      const bool mine = following < items.data() + items.size() && owner(*following, 0) == thread;
      if (mine) {
        const Tile& other = tiles[following->tile];
        fill(first, p, other.request, 0, other.seen);
      }
      for (int64_t c = 0; c < chunks; c++) {
        if (owner(item, c) != thread) continue;
        float* at = item.place < 0 ? part : partial + item.place + c * n * record;
        chunk(item, c, mine ? &first : nullptr, q, to, at);
        if (item.place < 0) fold_all(sums, part, n);
      }
      if (item.place < 0) finish(item, sums);
    }
  }

  void join(const Item& item, const float* partial, Buffer& buffer) const {
    const int64_t n = vectors(item);
    float* sums = (float*)buffer.get(n * record * sizeof(float));
    clear(sums, n);
    for (int64_t c = 0; c < tiles[item.tile].chunks(); c++)
      fold_all(sums, partial + item.place + c * n * record, n);
    finish(item, sums);
  }
};

thread_local Buffer own, shared_partials;

template <class F>
void attention(Problem& p) {
  p.pad = (p.d + F::width - 1) / F::width * F::width;
  const Run<F> run(p);
  float* partial = (float*)shared_partials.get(run.kept * sizeof(float) + 64);
  const int threads = int(run.threads);
#pragma omp parallel num_threads(threads)
  {
    for (int64_t t = omp_get_thread_num(); t < threads; t += omp_get_num_threads())
      run.share(t, partial, own);
    if (run.kept) {
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < int64_t(run.items.size()); i++)
        if (run.items[i].place >= 0) run.join(run.items[i], partial, own);
    }
  }
}

// What is wrong with the places: -1 nothing; else which row or place, and the kind above it.
int64_t wrong(const Problem& p, int64_t blocks) {
  constexpr int64_t kKind = int64_t(1) << 40;
  std::vector<int64_t> most(p.requests, 0);
  for (int64_t row = 0; row < p.rows; row++) {
    const int64_t request = p.request ? p.request[row] : row;
    if (request < 0 || request >= p.requests) return 1 * kKind + row;
    if (p.seen[row] < 1 || p.seen[row] > p.width * p.size) return 2 * kKind + row;
    if (p.tree && (p.tree[row] < 0 || p.tree[row] + 64 < p.seen[row])) return 4 * kKind + row;
    most[request] = std::max(most[request], p.seen[row]);
  }
  for (int64_t request = 0; request < p.requests; request++)
    for (int64_t at = 0; at * p.size < most[request]; at++) {
      const int64_t block = block_of(p, request, at);
      if (block < 0 || block >= blocks) return 3 * kKind + request * p.width + at;
    }
  return -1;
}

// What a call is about, in the order of `arguments` of the kernel's Python side.
Problem problem_of(const int64_t* a) {
  Problem p{};
  p.half = a[1] != 0;
  p.q = (const char*)a[2], p.out = (char*)a[3], p.q_row = a[4], p.q_head = a[5];
  p.k = {(const char*)a[6], (const char*)a[7], a[8], a[9], a[10], a[11]};
  p.v = {(const char*)a[12], (const char*)a[13], a[14], a[15], a[16], a[17]};
  p.table = (const void*)a[18], p.wide = a[19] == 8;
  p.seen = (const int64_t*)a[20], p.request = (const int64_t*)a[21];
  p.rows = a[22], p.requests = a[23], p.heads = a[24], p.kv_heads = a[25], p.d = a[26];
  p.width = a[27], p.size = a[28], p.block = a[30], p.partial = a[31] != 0;
  p.tree = (const int64_t*)a[32];
  p.scale = float(1.4426950408889634 / std::sqrt(double(p.d)));
  p.group = p.heads / p.kv_heads;
  return p;
}
inline int64_t wrong(const Problem& p, const int64_t* a) { return wrong(p, a[29] / p.size); }

}  // namespace

#endif
