// Causal attention of whole sequences and its gradient in bf16, by vectors (AVX-512).
//
// A task is one head of keys of one sequence, with the heads of queries that read it. Products are
// of twelve rows with a panel of 32 outputs, as in linear_packed.cpp. On the way back the rows are
// keys: what a row needs of a query, its maximum and its sum of gradients, then lies in the lanes.
// Sums are taken in one order, whatever the number of threads.
#include "activations.h"

#ifdef __AVX512BF16__
#include <cstdlib>

namespace {

constexpr int ROWS = 12;
constexpr int64_t PANEL = 32;         // outputs
constexpr int64_t CHUNK = 8 * ROWS;   // keys whose shares are added to queries at once; 3 panels

struct Shape {
  int64_t batch, heads, kv_heads, length, dim;
  int64_t rows() const { return (length + ROWS - 1) / ROWS * ROWS; }
  int64_t columns() const { return (length + PANEL - 1) / PANEL * PANEL; }
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
void copy(const Shape& s, const View& from, uint16_t* to) {
  for (int64_t i = 0; i < s.rows(); i++) {
    if (i < s.length)
      std::memcpy(to + i * s.dim, from.row(i), s.dim * 2);
    else
      std::memset(to + i * s.dim, 0, s.dim * 2);
  }
}

// Panels whose outputs are the rows: [panel][pair of d][32].
void pack_rows(const Shape& s, const View& from, uint32_t* to) {
  const int64_t pairs = s.dim / 2;
  for (int64_t i = 0; i < s.columns(); i++) {
    uint32_t* at = to + i / PANEL * pairs * PANEL + i % PANEL;
    for (int64_t p = 0; p < pairs; p++) {
      uint32_t pair = 0;
      if (i < s.length) std::memcpy(&pair, from.row(i) + 2 * p, 4);
      at[p * PANEL] = pair;
    }
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

// Twelve rows, `row` bytes apart, of pairs, `pair` bytes apart, with a panel.
struct Sums {
  __m512 at[ROWS][2];

  void clear() {
    for (int r = 0; r < ROWS; r++) at[r][0] = at[r][1] = _mm512_setzero_ps();
  }
  void load(const float* from, int64_t stride) {
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < 2; c++) at[r][c] = _mm512_loadu_ps(from + r * stride + 16 * c);
  }
  void store(float* to, int64_t stride) const {
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < 2; c++) _mm512_storeu_ps(to + r * stride + 16 * c, at[r][c]);
  }
  void add(const void* rows, int64_t row, int64_t pair, const uint32_t* panel, int64_t pairs) {
    const char* x = (const char*)rows;
    for (int64_t p = 0; p < pairs; p++, x += pair, panel += PANEL) {
      const __m512bh low = (__m512bh)_mm512_load_si512(panel);
      const __m512bh high = (__m512bh)_mm512_load_si512(panel + 16);
      for (int r = 0; r < ROWS; r++) {
        int32_t both;
        std::memcpy(&both, x + r * row, 4);
        const __m512bh wide = (__m512bh)_mm512_set1_epi32(both);
        at[r][0] = _mm512_dpbf16_ps(at[r][0], wide, low);
        at[r][1] = _mm512_dpbf16_ps(at[r][1], wide, high);
      }
    }
  }
};

inline void write(float* from, uint16_t* to, int64_t count, float by) {
  const __m512 factor = _mm512_set1_ps(by);
  for (int64_t i = 0; i < count; i += 16)
    _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(
                                                _mm512_loadu_ps(from + i), factor)));
}

constexpr float LOG2E = 1.44269504f;

inline __m512 power(__m512 x) { return exp2_ps(_mm512_max_ps(x, _mm512_set1_ps(-125.0f))); }

// Scores of twelve queries become weights in bf16; returns the sums, and notes log2 of them.
void softmax(const Shape& s, int64_t first, float* scores, uint16_t* weights, float* sums,
             float* logs) {
  const int64_t columns = s.columns();
  for (int64_t r = 0; r < ROWS; r++) {
    const int64_t seen = first + r + 1;
    float* row = scores + r * columns;
    __m512 most = _mm512_set1_ps(-__builtin_inff());
    for (int64_t i = 0; i < seen; i += 16)
      most = _mm512_mask_max_ps(most, low16(seen - i), most, _mm512_load_ps(row + i));
    const float top = _mm512_reduce_max_ps(most);
    const __m512 largest = _mm512_set1_ps(top);
    __m512 sum = _mm512_setzero_ps();
    const int64_t end = (first + ROWS + PANEL - 1) / PANEL * PANEL;
    for (int64_t i = 0; i < end && i < columns; i += 16) {
      const __mmask16 some = i < seen ? low16(seen - i) : 0;
      const __m512 p = _mm512_maskz_mov_ps(some, power(_mm512_sub_ps(_mm512_load_ps(row + i), largest)));
      sum = _mm512_add_ps(sum, p);
      _mm256_store_si256((__m256i*)(weights + r * columns + i), (__m256i)_mm512_cvtneps_pbh(p));
    }
    sums[r] = _mm512_reduce_add_ps(sum);
    if (first + r < s.length) logs[first + r] = top + __builtin_log2f(sums[r]);
  }
}

void forward(const Shape& s, const View& q, const uint32_t* keys, const uint32_t* values,
             const View& out, float* logs, uint16_t* rows, float* scores, uint16_t* weights) {
  const int64_t columns = s.columns(), pairs = s.dim / 2, wide = 2 * s.dim;
  const __m512 factor = _mm512_set1_ps(s.scale() * LOG2E);
  copy(s, q, rows);
  for (int64_t first = 0; first < s.length; first += ROWS) {
    const int64_t seen = first + ROWS < s.length ? first + ROWS : s.length;
    Sums sum;
    for (int64_t c = 0; c < seen; c += PANEL) {
      sum.clear();
      sum.add(rows + first * s.dim, wide, 4, keys + c * pairs, pairs);
      for (int r = 0; r < ROWS; r++)
        for (int h = 0; h < 2; h++) sum.at[r][h] = _mm512_mul_ps(sum.at[r][h], factor);
      sum.store(scores + c, columns);
    }
    float sums[ROWS];
    softmax(s, first, scores, weights, sums, logs);
    for (int64_t d = 0; d < s.dim; d += PANEL) {
      sum.clear();
      sum.add(weights, 2 * columns, 4, values + d * columns / 2, (seen + 1) / 2);
      for (int64_t r = 0; r < ROWS && first + r < s.length; r++) {
        alignas(64) float row[PANEL];
        for (int h = 0; h < 2; h++) _mm512_store_ps(row + 16 * h, sum.at[r][h]);
        write(row, out.row(first + r) + d, PANEL, 1.0f / sums[r]);
      }
    }
  }
}

// What the pass back of one head of queries reads and fills.
struct Back {
  const uint32_t *query_rows, *grad_rows, *query_pairs, *grad_pairs;
  const float *logs, *dots;            // of the queries
  uint16_t *weights, *shares;          // [12][columns]: of a block of keys
  uint32_t* pairs;                     // [CHUNK / 2][columns]: shares by pairs of keys
  float *grad_q, *grad_k, *grad_v;     // [rows or columns][d]
};

// Weights, and the gradients of scores, of twelve keys and all queries that see them.
void block_of_keys(const Shape& s, const Back& b, int64_t first, int64_t start,
                   const uint16_t* keys, const uint16_t* values, uint32_t* pairs) {
  const int64_t columns = s.columns(), half = s.dim / 2, wide = 2 * s.dim;
  const __m512 factor = _mm512_set1_ps(s.scale() * LOG2E);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  alignas(64) float kept[ROWS * PANEL];
  for (int64_t c = start; c < columns; c += PANEL) {
    Sums sum;
    sum.clear();
    sum.add(keys + first * s.dim, wide, 4, b.query_rows + c * half, half);
    for (int h = 0; h < 2; h++) {
      const __m512 logs = _mm512_loadu_ps(b.logs + c + 16 * h);
      const __m512i query = _mm512_add_epi32(lane, _mm512_set1_epi32(int(c + 16 * h)));
      const __mmask16 here = _mm512_cmplt_epi32_mask(query, _mm512_set1_epi32(int(s.length)));
      for (int r = 0; r < ROWS; r++) {
        const __mmask16 some =
            _mm512_mask_cmpge_epi32_mask(here, query, _mm512_set1_epi32(int(first + r)));
        const __m512 p =
            _mm512_maskz_mov_ps(some, power(_mm512_fmsub_ps(sum.at[r][h], factor, logs)));
        _mm512_store_ps(kept + r * PANEL + 16 * h, p);
        _mm256_store_si256((__m256i*)(b.weights + r * columns + c + 16 * h),
                           (__m256i)_mm512_cvtneps_pbh(p));
      }
    }
    sum.clear();
    sum.add(values + first * s.dim, wide, 4, b.grad_rows + c * half, half);
    for (int h = 0; h < 2; h++) {
      const __m512 dots = _mm512_loadu_ps(b.dots + c + 16 * h);
      for (int r = 0; r < ROWS; r += 2) {
        __m512 share[2];
        for (int i = 0; i < 2; i++) {
          share[i] = _mm512_mul_ps(_mm512_load_ps(kept + (r + i) * PANEL + 16 * h),
                                   _mm512_sub_ps(sum.at[r + i][h], dots));
          _mm256_store_si256((__m256i*)(b.shares + (r + i) * columns + c + 16 * h),
                             (__m256i)_mm512_cvtneps_pbh(share[i]));
        }
        _mm512_store_si512(pairs + r / 2 * columns + c + 16 * h, paired(share[0], share[1]));
      }
    }
  }
}

void add_to(const Shape& s, float* total, const uint16_t* rows, const uint32_t* panels,
            int64_t start) {
  const int64_t columns = s.columns();
  Sums sum;
  for (int64_t d = 0; d < s.dim; d += PANEL) {
    sum.load(total + d, s.dim);
    sum.add(rows + start, 2 * columns, 4, panels + (d * columns + start * PANEL) / 2,
            (columns - start) / 2);
    sum.store(total + d, s.dim);
  }
}

void backward(const Shape& s, const Back& b, const uint16_t* keys, const uint16_t* values,
              const uint32_t* key_pairs) {
  const int64_t columns = s.columns();
  for (int64_t chunk = 0; chunk < s.length; chunk += CHUNK) {
    const int64_t end = chunk + CHUNK < s.rows() ? chunk + CHUNK : s.rows();
    for (int64_t first = chunk; first < end; first += ROWS) {
      const int64_t start = first / PANEL * PANEL;
      uint32_t* pairs = b.pairs + (first - chunk) / 2 * columns;
      // Queries before those that see these keys, in what the chunk has of them.
      for (int64_t p = 0; p < ROWS / 2; p++)
        std::memset(pairs + p * columns + chunk, 0, 4 * (start - chunk));
      block_of_keys(s, b, first, start, keys, values, pairs);
      add_to(s, b.grad_v + first * s.dim, b.weights, b.grad_pairs, start);
      add_to(s, b.grad_k + first * s.dim, b.shares, b.query_pairs, start);
    }
    const int64_t used = (end - chunk < columns - chunk ? end - chunk : columns - chunk) / 2;
    for (int64_t first = chunk; first < s.length; first += ROWS)
      for (int64_t d = 0; d < s.dim; d += PANEL) {
        Sums sum;
        float* total = b.grad_q + first * s.dim + d;
        sum.load(total, s.dim);
        sum.add(b.pairs + first, 4, 4 * columns, key_pairs + (d * columns + chunk * PANEL) / 2,
                used);
        sum.store(total, s.dim);
      }
  }
}

// Room of a task, in bytes, with what alignment adds.
size_t room(const Shape& s, bool back) {
  const size_t rows = s.rows() + ROWS, columns = s.columns() + PANEL, dim = s.dim;
  const size_t block = ROWS * columns * 8, matrix = columns * dim * 4;
  return (back ? 8 : 3) * matrix + 2 * block + CHUNK * columns * 2 + rows * 64 + (64 << 10);
}

}  // namespace

// q, out[B, T, H, d] and k, v[B, T, K, d], of which `strides` are given in that order: three each,
// of sequences, tokens and heads. logs[B, H, T] is log2 of the sums of weights.
extern "C" void causal_forward(uint16_t* q, uint16_t* k, uint16_t* v, uint16_t* out, float* logs,
                               const int64_t* strides, int64_t batch, int64_t heads,
                               int64_t kv_heads, int64_t length, int64_t dim) {
  const Shape s = {batch, heads, kv_heads, length, dim};
  Tensor x[4] = {{q, 0, 0, 0}, {k, 0, 0, 0}, {v, 0, 0, 0}, {out, 0, 0, 0}};
  for (int i = 0; i < 4; i++)
    x[i] = {x[i].at, strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]};
#pragma omp parallel for schedule(dynamic)
  for (int64_t task = 0; task < batch * kv_heads; task++) {
    const int64_t b = task / kv_heads, h = task % kv_heads;
    arena.reserve(room(s, false));
    uint32_t* keys = arena.take<uint32_t>(s.columns() * dim / 2);
    uint32_t* values = arena.take<uint32_t>(s.columns() * dim / 2);
    uint16_t* rows = arena.take<uint16_t>(s.rows() * dim);
    float* scores = arena.take<float>(ROWS * s.columns());
    uint16_t* weights = arena.take<uint16_t>(ROWS * s.columns());
    pack_rows(s, x[1].of(b, h), keys);
    pack_pairs(s, x[2].of(b, h), values);
    for (int64_t g = h * s.group(); g < (h + 1) * s.group(); g++)
      forward(s, x[0].of(b, g), keys, values, x[3].of(b, g),
              logs + (b * heads + g) * length, rows, scores, weights);
  }
}

// The gradients of q, k and v, all contiguous as these are described; `strides` of q, k, v, out and
// the gradient of out.
extern "C" void causal_backward(uint16_t* q, uint16_t* k, uint16_t* v, uint16_t* out,
                                uint16_t* grad, float* logs, uint16_t* grad_q, uint16_t* grad_k,
                                uint16_t* grad_v, const int64_t* strides, int64_t batch,
                                int64_t heads, int64_t kv_heads, int64_t length, int64_t dim) {
  const Shape s = {batch, heads, kv_heads, length, dim};
  Tensor x[5] = {{q, 0, 0, 0}, {k, 0, 0, 0}, {v, 0, 0, 0}, {out, 0, 0, 0}, {grad, 0, 0, 0}};
  for (int i = 0; i < 5; i++)
    x[i] = {x[i].at, strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]};
#pragma omp parallel for schedule(dynamic)
  for (int64_t task = 0; task < batch * kv_heads; task++) {
    const int64_t b = task / kv_heads, h = task % kv_heads, panels = s.columns() * dim / 2;
    arena.reserve(room(s, true));
    Back back;
    uint32_t* packed[5];
    for (auto& one : packed) one = arena.take<uint32_t>(panels);
    uint16_t* keys = arena.take<uint16_t>(s.rows() * dim);
    uint16_t* values = arena.take<uint16_t>(s.rows() * dim);
    float* of_queries[2];
    for (auto& one : of_queries) one = arena.take<float>(s.columns());
    back.weights = arena.take<uint16_t>(ROWS * s.columns());
    back.shares = arena.take<uint16_t>(ROWS * s.columns());
    back.pairs = arena.take<uint32_t>(CHUNK / 2 * s.columns());
    // Queries of a block of twelve that reach beyond the columns are read, and not used.
    arena.take<float>(64);
    back.grad_q = arena.take<float>(s.rows() * dim);
    back.grad_k = arena.take<float>(s.rows() * dim);
    back.grad_v = arena.take<float>(s.rows() * dim);
    copy(s, x[1].of(b, h), keys);
    copy(s, x[2].of(b, h), values);
    pack_pairs(s, x[1].of(b, h), packed[4]);
    std::memset(back.grad_k, 0, s.rows() * dim * 4);
    std::memset(back.grad_v, 0, s.rows() * dim * 4);
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
        of_queries[0][i] = i < length ? logs[(b * heads + g) * length + i] : 0.0f;
      }
      std::memset(back.grad_q, 0, s.rows() * dim * 4);
      back.query_rows = packed[0], back.grad_rows = packed[1];
      back.query_pairs = packed[2], back.grad_pairs = packed[3];
      back.logs = of_queries[0], back.dots = of_queries[1];
      backward(s, back, keys, values, packed[4]);
      for (int64_t i = 0; i < length; i++)
        write(back.grad_q + i * dim, grad_q + ((b * length + i) * heads + g) * dim, dim,
              s.scale());
    }
    for (int64_t i = 0; i < length; i++) {
      const int64_t at = ((b * length + i) * kv_heads + h) * dim;
      write(back.grad_k + i * dim, grad_k + at, dim, s.scale());
      write(back.grad_v + i * dim, grad_v + at, dim, 1.0f);
    }
  }
}
#endif
