// Causal attention of whole sequences and its gradient in bf16, whatever multiplies.
//
// A task is one head of keys of one sequence, with the heads of queries that read it. A Unit
// multiplies its number of rows with a panel of 32 outputs. On the way back the rows are keys: what a
// row needs of a query, its maximum and its sum of gradients, then lies in the lanes.
// Sums are taken in one order, whatever the number of threads.
#include "activations.h"

#ifdef __AVX512BF16__
#include <cstdlib>

namespace {

constexpr int64_t PANEL = 32;  // outputs

struct Shape {
  int64_t batch, heads, kv_heads, length, dim;
  int64_t columns() const { return (length + PANEL - 1) / PANEL * PANEL; }
  // From row to row; never a multiple of a page, whose lines share one place in the cache.
  int64_t across() const { return columns() + PANEL; }
  int64_t group() const { return heads / kv_heads; }
  float scale() const { return 1.0f / __builtin_sqrtf(float(dim)); }
};

// Rows [T, d] of one head.
struct View {
  uint16_t* at;
  int64_t stride;
  uint16_t* row(int64_t i) const { return at + i * stride; }
};
// x[B, T, heads, d].
struct Tensor {
  uint16_t* at;
  int64_t batch, row, head;
  View of(int64_t b, int64_t h) const { return {at + b * batch + h * head, row}; }
};

// Memory of a thread that lives from call to call, handed out piece by piece.
struct Arena {
  char* at = nullptr;
  size_t size = 0, used = 0;
  void reserve(size_t wanted) {
    used = 0;
    if (wanted <= size) return;
    std::free(at);
    size = (wanted + 4095) / 4096 * 4096;
    at = static_cast<char*>(std::aligned_alloc(4096, size));
    if (!at) std::abort();
  }
  template <class T>
  T* take(int64_t count) {
    T* result = (T*)(at + used);
    used += (count * sizeof(T) + 63) / 64 * 64;
    return result;
  }
  ~Arena() { std::free(at); }
};
thread_local Arena arena;

inline __m512i order() {
  alignas(64) static const uint16_t from[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_load_si512(from);
}
// Sixteen pairs of bf16: of the first, and of the second.
inline __m512i paired(__m512 first, __m512 second) {
  return _mm512_permutexvar_epi16(order(), (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// A copy with rows of zeros behind it.
void copy(const Shape& s, const View& from, uint16_t* to, int64_t rows) {
  for (int64_t i = 0; i < rows; i++) {
    if (i < s.length)
      std::memcpy(to + i * s.dim, from.row(i), s.dim * 2);
    else
      std::memset(to + i * s.dim, 0, s.dim * 2);
  }
}

// Sixteen rows of sixteen become columns.
inline void turn(__m512i* row) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(row[2 * i], row[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(row[2 * i], row[2 * i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      row[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      row[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  // A quarter of row 4 i + j has the numbers j, 4 + j, 8 + j or 12 + j of four rows.
  for (int j = 0; j < 4; j++) {
    const __m512i even[2] = {_mm512_shuffle_i32x4(row[j], row[4 + j], 0x88),
                             _mm512_shuffle_i32x4(row[8 + j], row[12 + j], 0x88)};
    const __m512i odd[2] = {_mm512_shuffle_i32x4(row[j], row[4 + j], 0xdd),
                            _mm512_shuffle_i32x4(row[8 + j], row[12 + j], 0xdd)};
    t[j] = _mm512_shuffle_i32x4(even[0], even[1], 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(even[0], even[1], 0xdd);
    t[4 + j] = _mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
  }
  for (int i = 0; i < 16; i++) row[i] = t[i];
}

// Panels whose outputs are the rows: [panel][pair of d][32].
void pack_rows(const Shape& s, const View& from, uint32_t* to) {
  const int64_t pairs = s.dim / 2;
  for (int64_t i = 0; i < s.columns(); i += 16)
    for (int64_t p = 0; p < pairs; p += 16) {
      __m512i row[16];
      for (int64_t r = 0; r < 16; r++)
        row[r] = i + r < s.length ? _mm512_loadu_si512(from.row(i + r) + 2 * p)
                                  : _mm512_setzero_si512();
      turn(row);
      uint32_t* at = to + (i / PANEL * pairs + p) * PANEL + i % PANEL;
      for (int64_t r = 0; r < 16; r++) _mm512_store_si512(at + r * PANEL, row[r]);
    }
}

// Panels whose inputs are the rows: [panel of d][pair of rows][32].
void pack_pairs(const Shape& s, const View& from, uint32_t* to) {
  const int64_t pairs = s.columns() / 2;
  for (int64_t p = 0; p < pairs; p++)
    for (int64_t i = 0; i < s.dim; i += 16) {
      __m256i row[2];
      for (int r = 0; r < 2; r++)
        row[r] = 2 * p + r < s.length
                     ? _mm256_loadu_si256((const __m256i*)(from.row(2 * p + r) + i))
                     : _mm256_setzero_si256();
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(row[0]), row[1], 1);
      uint32_t* at = to + (i / PANEL * pairs + p) * PANEL + i % PANEL;
      _mm512_store_si512(at, _mm512_permutexvar_epi16(order(), both));
    }
}

inline void write(const float* from, uint16_t* to, int64_t count, float by) {
  const __m512 factor = _mm512_set1_ps(by);
  for (int64_t i = 0; i < count; i += 16)
    _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(
                                                _mm512_loadu_ps(from + i), factor)));
}

constexpr float LOG2E = 1.44269504f;

inline __m512 power(__m512 x) { return exp2_ps(_mm512_max_ps(x, _mm512_set1_ps(-125.0f))); }

// What the pass back of one head of queries reads and fills.
struct Back {
  const uint32_t *query_rows, *grad_rows, *query_pairs, *grad_pairs;
  const float *logs, *dots;            // of the queries
  uint16_t *weights, *shares;          // [ROWS][across]: of a block of keys
  uint32_t* pairs;                     // [CHUNK / 2][across]: shares by pairs of keys
  float *grad_q, *grad_k, *grad_v;     // [rows][d]; a Unit may have the first by [d][across]
};

// The attention of a Unit, which has
//   ROWS: rows of a product; CHUNK: keys whose shares are added to queries at once;
//   begin(), end(): of a thread;
//   product(rows, bytes from row to row, panel, pairs, to, stride, add): ROWS x PANEL sums;
//   pairs_of(seen): of weights that are multiplied with values;
//   Keys(shape, keys, pairs of keys): what the gradients of queries are made of;
//   add_queries(shape, back, keys, chunk, pairs): adds shares of a chunk of keys to them;
//   write_queries(shape, sums, to): rounds the gradients of queries.
template <class Unit>
struct Causal {
  static constexpr int ROWS = Unit::ROWS;
  static constexpr int64_t CHUNK = Unit::CHUNK;
  const Shape s;

  int64_t rows() const { return (s.length + ROWS - 1) / ROWS * ROWS; }

  // Scores of some queries become weights in bf16; returns the sums, and notes log2 of them.
  void softmax(int64_t first, float* scores, uint16_t* weights, float* sums, float* logs) const {
    const int64_t columns = s.columns(), across = s.across();
    const __m512 factor = _mm512_set1_ps(s.scale() * LOG2E);
    for (int64_t r = 0; r < ROWS; r++) {
      const int64_t seen = first + r < s.length ? first + r + 1 : s.length;
      float* row = scores + r * across;
      __m512 most = _mm512_set1_ps(-__builtin_inff());
      for (int64_t i = 0; i < seen; i += 16)
        most = _mm512_mask_max_ps(most, low16(seen - i), most, _mm512_load_ps(row + i));
      const float top = _mm512_reduce_max_ps(most) * s.scale() * LOG2E;
      const __m512 largest = _mm512_set1_ps(top);
      __m512 sum = _mm512_setzero_ps();
      const int64_t end = (first + ROWS + PANEL - 1) / PANEL * PANEL;
      for (int64_t i = 0; i < end && i < columns; i += 16) {
        const __mmask16 some = i < seen ? low16(seen - i) : 0;
        const __m512 p = _mm512_maskz_mov_ps(
            some, power(_mm512_fmsub_ps(_mm512_load_ps(row + i), factor, largest)));
        sum = _mm512_add_ps(sum, p);
        _mm256_store_si256((__m256i*)(weights + r * across + i), (__m256i)_mm512_cvtneps_pbh(p));
      }
      sums[r] = _mm512_reduce_add_ps(sum);
      if (first + r < s.length) logs[first + r] = top + __builtin_log2f(sums[r]);
    }
  }

  void forward(const View& q, const uint32_t* keys, const uint32_t* values, const View& out,
               float* logs, uint16_t* queries, float* scores, uint16_t* weights) const {
    const int64_t across = s.across(), half = s.dim / 2;
    copy(s, q, queries, rows());
    for (int64_t first = 0; first < s.length; first += ROWS) {
      const int64_t seen = first + ROWS < s.length ? first + ROWS : s.length;
      for (int64_t c = 0; c < seen; c += PANEL)
        Unit::product(queries + first * s.dim, 2 * s.dim, keys + c * half, half, scores + c, across,
                      false);
      float sums[ROWS];
      softmax(first, scores, weights, sums, logs);
      for (int64_t d = 0; d < s.dim; d += PANEL) {
        alignas(64) float block[ROWS * PANEL];
        Unit::product(weights, 2 * across, values + d * s.columns() / 2, Unit::pairs_of(seen),
                      block, PANEL, false);
        for (int64_t r = 0; r < ROWS && first + r < s.length; r++)
          write(block + r * PANEL, out.row(first + r) + d, PANEL, 1.0f / sums[r]);
      }
    }
  }

  // Weights, and the gradients of scores, of some keys and all queries that see them.
  void block_of_keys(const Back& b, int64_t first, int64_t start, const uint16_t* keys,
                     const uint16_t* values, uint32_t* pairs) const {
    const int64_t columns = s.columns(), across = s.across(), half = s.dim / 2, wide = 2 * s.dim;
    const __m512 factor = _mm512_set1_ps(s.scale() * LOG2E);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    alignas(64) float score[ROWS * PANEL], upper[ROWS * PANEL];
    for (int64_t c = start; c < columns; c += PANEL) {
      Unit::product(keys + first * s.dim, wide, b.query_rows + c * half, half, score, PANEL, false);
      Unit::product(values + first * s.dim, wide, b.grad_rows + c * half, half, upper, PANEL,
                    false);
      for (int h = 0; h < 2; h++) {
        const int64_t at = c + 16 * h;
        const __m512 logs = _mm512_loadu_ps(b.logs + at), dots = _mm512_loadu_ps(b.dots + at);
        const __m512i query = _mm512_add_epi32(lane, _mm512_set1_epi32(int(at)));
        const __mmask16 here = _mm512_cmplt_epi32_mask(query, _mm512_set1_epi32(int(s.length)));
        for (int r = 0; r < ROWS; r += 2) {
          __m512 share[2];
          for (int i = 0; i < 2; i++) {
            const int64_t from = (r + i) * PANEL + 16 * h, to = (r + i) * across + at;
            const __mmask16 some =
                _mm512_mask_cmpge_epi32_mask(here, query, _mm512_set1_epi32(int(first + r + i)));
            const __m512 p = _mm512_maskz_mov_ps(
                some, power(_mm512_fmsub_ps(_mm512_load_ps(score + from), factor, logs)));
            share[i] = _mm512_mul_ps(p, _mm512_sub_ps(_mm512_load_ps(upper + from), dots));
            _mm256_store_si256((__m256i*)(b.weights + to), (__m256i)_mm512_cvtneps_pbh(p));
            _mm256_store_si256((__m256i*)(b.shares + to), (__m256i)_mm512_cvtneps_pbh(share[i]));
          }
          _mm512_store_si512(pairs + r / 2 * across + at, paired(share[0], share[1]));
        }
      }
    }
  }

  void add_to(float* total, const uint16_t* rows, const uint32_t* panels, int64_t start) const {
    const int64_t columns = s.columns();
    for (int64_t d = 0; d < s.dim; d += PANEL)
      Unit::product(rows + start, 2 * s.across(), panels + (d * columns + start * PANEL) / 2,
                    (columns - start) / 2, total + d, s.dim, true);
  }

  void backward(const Back& b, const uint16_t* keys, const uint16_t* values,
                const typename Unit::Keys& of_queries) const {
    const int64_t columns = s.columns(), across = s.across();
    for (int64_t chunk = 0; chunk < s.length; chunk += CHUNK) {
      const int64_t end = chunk + CHUNK < rows() ? chunk + CHUNK : rows();
      for (int64_t first = chunk; first < end; first += ROWS) {
        const int64_t start = first / PANEL * PANEL;
        uint32_t* pairs = b.pairs + (first - chunk) / 2 * across;
        // Queries before those that see these keys, in what the chunk has of them.
        for (int64_t p = 0; p < ROWS / 2; p++)
          std::memset(pairs + p * across + chunk, 0, 4 * (start - chunk));
        block_of_keys(b, first, start, keys, values, pairs);
        add_to(b.grad_v + first * s.dim, b.weights, b.grad_pairs, start);
        add_to(b.grad_k + first * s.dim, b.shares, b.query_pairs, start);
      }
      const int64_t used = (end - chunk < columns - chunk ? end - chunk : columns - chunk) / 2;
      Unit::add_queries(s, b, of_queries, chunk, used);
    }
  }

  // Room of a task, in bytes, with what alignment adds.
  size_t room(bool back) const {
    const size_t high = rows() + ROWS, across = s.across() + PANEL, dim = s.dim;
    const size_t block = ROWS * across * 8, matrix = (high > across ? high : across) * dim * 4;
    return (back ? 9 : 3) * matrix + 2 * block + CHUNK * across * 2 + high * 64 + (64 << 10);
  }

  void forward_all(const Tensor* x, float* logs) const {
#pragma omp parallel
    {
      Unit::begin();
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < s.batch * s.kv_heads; task++) {
        const int64_t b = task / s.kv_heads, h = task % s.kv_heads;
        arena.reserve(room(false));
        uint32_t* keys = arena.take<uint32_t>(s.columns() * s.dim / 2);
        uint32_t* values = arena.take<uint32_t>(s.columns() * s.dim / 2);
        uint16_t* queries = arena.take<uint16_t>(rows() * s.dim);
        float* scores = arena.take<float>(ROWS * s.across());
        uint16_t* weights = arena.take<uint16_t>(ROWS * s.across());
        pack_rows(s, x[1].of(b, h), keys);
        pack_pairs(s, x[2].of(b, h), values);
        for (int64_t g = h * s.group(); g < (h + 1) * s.group(); g++)
          forward(x[0].of(b, g), keys, values, x[3].of(b, g), logs + (b * s.heads + g) * s.length,
                  queries, scores, weights);
      }
      Unit::end();
    }
  }

  void backward_all(const Tensor* x, const float* logs, uint16_t* grad_q, uint16_t* grad_k,
                    uint16_t* grad_v) const {
#pragma omp parallel
    {
      Unit::begin();
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < s.batch * s.kv_heads; task++)
        one_head_of_keys(x, logs, grad_q, grad_k, grad_v, task / s.kv_heads, task % s.kv_heads);
      Unit::end();
    }
  }

  void one_head_of_keys(const Tensor* x, const float* logs, uint16_t* grad_q, uint16_t* grad_k,
                        uint16_t* grad_v, int64_t b, int64_t h) const {
    const int64_t dim = s.dim, length = s.length, panels = s.columns() * dim / 2;
    arena.reserve(room(true));
    Back back;
    uint32_t* packed[5];
    for (auto& one : packed) one = arena.take<uint32_t>(panels);
    uint16_t* keys = arena.take<uint16_t>(rows() * dim);
    uint16_t* values = arena.take<uint16_t>(rows() * dim);
    float* of_queries[2];
    for (auto& one : of_queries) one = arena.take<float>(s.columns());
    back.weights = arena.take<uint16_t>(ROWS * s.across());
    back.shares = arena.take<uint16_t>(ROWS * s.across());
    back.pairs = arena.take<uint32_t>(CHUNK / 2 * s.across());
    // Queries of a block of rows that reach beyond the columns are read, and not used.
    arena.take<float>(64);
    const int64_t high = rows() > s.across() ? rows() : s.across();
    back.grad_q = arena.take<float>(high * dim);
    back.grad_k = arena.take<float>(high * dim);
    back.grad_v = arena.take<float>(high * dim);
    copy(s, x[1].of(b, h), keys, rows());
    copy(s, x[2].of(b, h), values, rows());
    pack_pairs(s, x[1].of(b, h), packed[4]);
    const typename Unit::Keys of_keys(s, x[1].of(b, h), packed[4]);
    std::memset(back.grad_k, 0, rows() * dim * 4);
    std::memset(back.grad_v, 0, rows() * dim * 4);
    for (int64_t g = h * s.group(); g < (h + 1) * s.group(); g++) {
      const View query = x[0].of(b, g), result = x[3].of(b, g), upper = x[4].of(b, g);
      pack_rows(s, query, packed[0]);
      pack_rows(s, upper, packed[1]);
      pack_pairs(s, query, packed[2]);
      pack_pairs(s, upper, packed[3]);
      for (int64_t i = 0; i < s.columns(); i++) {
        __m512 dot = _mm512_setzero_ps();
        for (int64_t d = 0; i < length && d < dim; d += 32)
          dot = _mm512_dpbf16_ps(dot, (__m512bh)_mm512_loadu_si512(result.row(i) + d),
                                 (__m512bh)_mm512_loadu_si512(upper.row(i) + d));
        of_queries[1][i] = _mm512_reduce_add_ps(dot);
        of_queries[0][i] = i < length ? logs[(b * s.heads + g) * length + i] : 0.0f;
      }
      std::memset(back.grad_q, 0, high * dim * 4);
      back.query_rows = packed[0], back.grad_rows = packed[1];
      back.query_pairs = packed[2], back.grad_pairs = packed[3];
      back.logs = of_queries[0], back.dots = of_queries[1];
      backward(back, keys, values, of_keys);
      Unit::write_queries(s, back.grad_q, grad_q + (b * length * s.heads + g) * dim);
    }
    for (int64_t i = 0; i < length; i++) {
      const int64_t at = ((b * length + i) * s.kv_heads + h) * dim;
      write(back.grad_k + i * dim, grad_k + at, dim, s.scale());
      write(back.grad_v + i * dim, grad_v + at, dim, 1.0f);
    }
  }
};

// x[B, T, heads, d], of which `strides` are given: three each, of sequences, tokens and heads.
inline Tensor tensor(uint16_t* at, const int64_t* strides) {
  return {at, strides[0], strides[1], strides[2]};
}

}  // namespace

// q, out[B, T, H, d] and k, v[B, T, K, d]. logs[B, H, T] is log2 of the sums of weights. On the way
// back `strides` are of q, k, v, out and the gradient of out; the gradients are contiguous.
#define CAUSAL_ATTENTION(Unit, name)                                                              \
  extern "C" void name##_forward(uint16_t* q, uint16_t* k, uint16_t* v, uint16_t* out,            \
                                 float* logs, const int64_t* strides, int64_t batch,              \
                                 int64_t heads, int64_t kv_heads, int64_t length, int64_t dim) {  \
    const Tensor x[4] = {tensor(q, strides), tensor(k, strides + 3), tensor(v, strides + 6),      \
                         tensor(out, strides + 9)};                                               \
    Causal<Unit>{{batch, heads, kv_heads, length, dim}}.forward_all(x, logs);                     \
  }                                                                                               \
  extern "C" void name##_backward(uint16_t* q, uint16_t* k, uint16_t* v, uint16_t* out,           \
                                  uint16_t* grad, float* logs, uint16_t* grad_q,                  \
                                  uint16_t* grad_k, uint16_t* grad_v, const int64_t* strides,     \
                                  int64_t batch, int64_t heads, int64_t kv_heads,                 \
                                  int64_t length, int64_t dim) {                                  \
    const Tensor x[5] = {tensor(q, strides), tensor(k, strides + 3), tensor(v, strides + 6),      \
                         tensor(out, strides + 9), tensor(grad, strides + 12)};                   \
    Causal<Unit>{{batch, heads, kv_heads, length, dim}}.backward_all(x, logs, grad_q, grad_k,     \
                                                                     grad_v);                     \
  }
#endif
