// What lies between the products of a decoder, each in one pass over memory: RMS norm, rotary
// embedding, SwiGLU and the choice of the next token. A row depends on itself alone.
#include "activations.h"

#include <algorithm>
#include <cmath>
#include <vector>

#ifdef __AVX512BF16__

namespace {

inline __m512 load(const float* at, __mmask16 m) { return _mm512_maskz_loadu_ps(m, at); }
inline __m512 load(const uint16_t* at, __mmask16 m) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, at)), 16));
}
inline void save(float* at, __mmask16 m, __m512 x) { _mm512_mask_storeu_ps(at, m, x); }
inline void save(uint16_t* at, __mmask16 m, __m512 x) {
  _mm256_mask_storeu_epi16(at, m, (__m256i)_mm512_cvtneps_pbh(x));
}
// As much as the type holds: what was written, read again.
inline __m512 rounded(const float*, __m512 x) { return x; }
inline __m512 rounded(const uint16_t*, __m512 x) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

// Few numbers are not worth another thread.
constexpr int64_t kSmall = 16384;

// x[M, N] += delta[M, N] (if given); y = x / sqrt(mean x^2 + eps) * weight.
template <class T, class W>
void rms_norm(T* x, const T* delta, const W* weight, T* y, int64_t m, int64_t n, int64_t stride,
              float eps) {
#pragma omp parallel for if (m * n > kSmall)
  for (int64_t i = 0; i < m; i++) {
    T* row = x + i * stride;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < n; j += 16) {
      const __mmask16 k = low16(n - j);
      __m512 v = load(row + j, k);
      if (delta) {
        v = rounded(row, _mm512_add_ps(v, load(delta + i * n + j, k)));
        save(row + j, k, v);
      }
      sum = _mm512_fmadd_ps(v, v, sum);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / n + eps));
    for (int64_t j = 0; j < n; j += 16) {
      const __mmask16 k = low16(n - j);
      const __m512 v = _mm512_mul_ps(load(row + j, k), scale);
      save(y + i * n + j, k, _mm512_mul_ps(v, load(weight + j, k)));
    }
  }
}

// y[M, F] = silu(x[M, :F]) * x[M, F:].
template <class T>
void swiglu(const T* x, T* y, int64_t m, int64_t f) {
#pragma omp parallel for if (m * f > kSmall)
  for (int64_t i = 0; i < m; i++) {
    const T *gate = x + 2 * i * f, *up = gate + f;
    for (int64_t j = 0; j < f; j += 16) {
      const __mmask16 k = low16(f - j);
      const __m512 g = load(gate + j, k);
      save(y + i * f + j, k, _mm512_mul_ps(silu(g), load(up + j, k)));
    }
  }
}

// One head of d numbers: norm, if it is given, and rotation by c, s [d / 2]; out may be head.
template <class T, class N>
inline void turn_head(const T* head, T* out, const N* norm, const float* c, const float* s,
                      int64_t d, float eps) {
  const int64_t half = d / 2;
  __m512 scale = _mm512_set1_ps(1.0f);
  if (norm) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < d; j += 16) {
      const __m512 v = load(head + j, low16(d - j));
      sum = _mm512_fmadd_ps(v, v, sum);
    }
    scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / d + eps));
  }
  for (int64_t j = 0; j < half; j += 16) {
    const __mmask16 k = low16(half - j);
    __m512 a = load(head + j, k), b = load(head + half + j, k);
    if (norm) {
      a = _mm512_mul_ps(_mm512_mul_ps(a, scale), load(norm + j, k));
      b = _mm512_mul_ps(_mm512_mul_ps(b, scale), load(norm + half + j, k));
    }
    const __m512 cj = load(c + j, k), sj = load(s + j, k);
    save(out + j, k, _mm512_fnmadd_ps(b, sj, _mm512_mul_ps(a, cj)));
    save(out + half + j, k, _mm512_fmadd_ps(a, sj, _mm512_mul_ps(b, cj)));
  }
}

// In place: the first `turned` heads of x[M, heads, d] by cos, sin [P, d / 2] at position[M],
// the first `q` of them normalised by q_norm before and the others by k_norm, if given.
template <class T>
void rope(T* x, const float* cos, const float* sin, const int64_t* position, const T* q_norm,
          const T* k_norm, int64_t m, int64_t heads, int64_t q, int64_t turned, int64_t d,
          float eps) {
  const int64_t half = d / 2;
#pragma omp parallel for if (m * heads * d > kSmall)
  for (int64_t i = 0; i < m; i++) {
    const float *c = cos + position[i] * half, *s = sin + position[i] * half;
    for (int64_t h = 0; h < turned; h++) {
      T* head = x + (i * heads + h) * d;
      const T* norm = h < q ? q_norm : k_norm;
      turn_head(head, head, norm, c, s, d, eps);
    }
  }
}

// Rows whose shares of a weight's gradient are one sum: whatever the threads, the same sums.
constexpr int64_t kRows = 32;

// sums[N] = partial[blocks, N] over the blocks, in their order.
void sum_blocks(const float* partial, float* sums, int64_t blocks, int64_t n) {
#pragma omp parallel for if (blocks * n > kSmall)
  for (int64_t j = 0; j < n; j += 16) {
    const __mmask16 k = low16(n - j);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) sum = _mm512_add_ps(sum, load(partial + b * n + j, k));
    save(sums + j, k, sum);
  }
}

// Of y = rms_norm(x) * weight: dx[M, N] and dweight[N] from g[M, N]; partial[ceil(M / 32), N].
template <class T>
void rms_norm_grad(const T* g, const T* x, const float* weight, T* dx, float* dweight,
                   float* partial, int64_t m, int64_t n, float eps) {
  const int64_t blocks = (m + kRows - 1) / kRows;
#pragma omp parallel for if (m * n > kSmall)
  for (int64_t b = 0; b < blocks; b++) {
    float* sums = partial + b * n;
    std::memset(sums, 0, n * sizeof(float));
    for (int64_t i = b * kRows; i < std::min(m, (b + 1) * kRows); i++) {
      const T *grow = g + i * n, *row = x + i * n;
      __m512 squares = _mm512_setzero_ps(), dots = _mm512_setzero_ps();
      for (int64_t j = 0; j < n; j += 16) {
        const __mmask16 k = low16(n - j);
        const __m512 v = load(row + j, k);
        squares = _mm512_fmadd_ps(v, v, squares);
        dots = _mm512_fmadd_ps(_mm512_mul_ps(load(grow + j, k), load(weight + j, k)), v, dots);
      }
      const float s = 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / n + eps);
      const __m512 scale = _mm512_set1_ps(s);
      // What the change of the scale takes away, for each number of the row.
      const __m512 back = _mm512_set1_ps(s * s * s * _mm512_reduce_add_ps(dots) / n);
      for (int64_t j = 0; j < n; j += 16) {
        const __mmask16 k = low16(n - j);
        const __m512 v = load(row + j, k), up = _mm512_mul_ps(load(grow + j, k), scale);
        save(sums + j, k, _mm512_fmadd_ps(up, v, load(sums + j, k)));
        save(dx + i * n + j, k,
             _mm512_fnmadd_ps(v, back, _mm512_mul_ps(up, load(weight + j, k))));
      }
    }
  }
  sum_blocks(partial, dweight, blocks, n);
}

// Of y = silu(x[:, :F]) * x[:, F:]: dx[M, 2F] from g[M, F].
template <class T>
void swiglu_grad(const T* g, const T* x, T* dx, int64_t m, int64_t f) {
  const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for if (m * f > kSmall)
  for (int64_t i = 0; i < m; i++) {
    const T *gate = x + 2 * i * f, *up = gate + f;
    T *dgate = dx + 2 * i * f, *dup = dgate + f;
    for (int64_t j = 0; j < f; j += 16) {
      const __mmask16 k = low16(f - j);
      const __m512 a = load(gate + j, k), u = load(up + j, k), d = load(g + i * f + j, k);
      const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), a));
      const __m512 sigma = _mm512_div_ps(one, _mm512_add_ps(one, e));
      const __m512 s = _mm512_mul_ps(a, sigma);
      // silu' = sigma + silu (1 - sigma)
      const __m512 slope = _mm512_fmadd_ps(s, _mm512_sub_ps(one, sigma), sigma);
      save(dgate + j, k, _mm512_mul_ps(_mm512_mul_ps(d, u), slope));
      save(dup + j, k, _mm512_mul_ps(d, s));
    }
  }
}

// Logits x[M, V] become their gradient, softmax less one at the target, times the weight (if given);
// of a negative target, 0. loss[M] is log sum exp x - x[target], times the weight.
void loss_gradient(uint16_t* x, const int64_t* target, const float* weight, float* loss, int64_t m,
                   int64_t v) {
#pragma omp parallel
  {
    std::vector<float> kept(v + 16);
#pragma omp for
    for (int64_t i = 0; i < m; i++) {
      uint16_t* row = x + i * v;
      const int64_t hit = target[i];
      const float by = hit < 0 ? 0.0f : weight ? weight[i] : 1.0f;
      __m512 most = _mm512_set1_ps(-INFINITY);
      for (int64_t j = 0; j < v; j += 16) {
        const __mmask16 k = low16(v - j);
        most = _mm512_mask_max_ps(most, k, most, load(row + j, k));
      }
      const float top = _mm512_reduce_max_ps(most);
      const __m512 largest = _mm512_set1_ps(top);
      __m512 sum = _mm512_setzero_ps();
      for (int64_t j = 0; j < v; j += 16) {
        const __mmask16 k = low16(v - j);
        const __m512 p = _mm512_maskz_mov_ps(k, exp_ps(_mm512_sub_ps(load(row + j, k), largest)));
        sum = _mm512_add_ps(sum, p);
        _mm512_storeu_ps(kept.data() + j, p);
      }
      const float total = _mm512_reduce_add_ps(sum);
      const float own = hit < 0 ? 0.0f : to_float(row[hit]);
      loss[i] = hit < 0 ? 0.0f : by * (std::log(total) + (top - own));
      if (hit >= 0) kept[hit] -= total;
      const __m512 scale = _mm512_set1_ps(by / total);
      for (int64_t j = 0; j < v; j += 16)
        save(row + j, low16(v - j), _mm512_mul_ps(_mm512_loadu_ps(kept.data() + j), scale));
    }
  }
}

// Norm (if given) and rotation of x[M, every, d] into y, row i at place i % length of the
// tables cos, sin [length, d / 2]; heads beyond `turned` are copied.
template <class T>
void rope_split(const T* x, T* y, const float* cos, const float* sin, const float* q_norm,
                const float* k_norm, int64_t m, int64_t length, int64_t every, int64_t q,
                int64_t turned, int64_t d, float eps) {
  const int64_t half = d / 2;
#pragma omp parallel for if (m * every * d > kSmall)
  for (int64_t i = 0; i < m; i++) {
    const float *c = cos + i % length * half, *s = sin + i % length * half;
    for (int64_t h = 0; h < turned; h++) {
      const T* head = x + (i * every + h) * d;
      T* out = y + (i * every + h) * d;
      const float* norm = h < q ? q_norm : k_norm;
      turn_head(head, out, norm, c, s, d, eps);
    }
    const int64_t first = (i * every + turned) * d;
    std::memcpy(y + first, x + first, (every - turned) * d * sizeof(T));
  }
}

// Gradient dx[M, every, d] of that from those of queries, keys and values, each of whose heads
// lies whole: strides of sequence, token and head, of all three. dnorm[2, d] of the weights of
// the norms, if given; partial[ceil(M / 32), 2, d].
template <class T>
void rope_split_grad(const T* gq, const T* gk, const T* gv, const int64_t* strides, const T* x,
                     T* dx, const float* cos, const float* sin, const float* q_norm,
                     const float* k_norm, float* dnorm, float* partial, int64_t m, int64_t length,
                     int64_t every, int64_t q, int64_t turned, int64_t d, float eps) {
  const int64_t half = d / 2, blocks = (m + kRows - 1) / kRows;
#pragma omp parallel for if (m * every * d > kSmall)
  for (int64_t block = 0; block < blocks; block++) {
    float* sums = partial + block * 2 * d;
    if (partial) std::memset(sums, 0, 2 * d * sizeof(float));
    for (int64_t i = block * kRows; i < std::min(m, (block + 1) * kRows); i++) {
      const int64_t t = i % length, sequence = i / length;
      const float *c = cos + t * half, *s = sin + t * half;
      for (int64_t h = 0; h < turned; h++) {
        const int64_t* by = strides + (h < q ? 0 : 3);
        const T* g = (h < q ? gq : gk) + sequence * by[0] + t * by[1] + (h < q ? h : h - q) * by[2];
        T* out = dx + (i * every + h) * d;
        const float* norm = h < q ? q_norm : k_norm;
        if (!norm) {
          for (int64_t j = 0; j < half; j += 16) {
            const __mmask16 k = low16(half - j);
            const __m512 a = load(g + j, k), b = load(g + half + j, k);
            const __m512 cj = load(c + j, k), sj = load(s + j, k);
            save(out + j, k, _mm512_fmadd_ps(b, sj, _mm512_mul_ps(a, cj)));
            save(out + half + j, k, _mm512_fnmadd_ps(a, sj, _mm512_mul_ps(b, cj)));
          }
          continue;
        }
        const T* head = x + (i * every + h) * d;
        float* own = sums + (h < q ? 0 : d);
        __m512 squares = _mm512_setzero_ps(), dots = _mm512_setzero_ps();
        float s3 = 0, s1 = 0;
        // First what the row as a whole is, then its gradient.
        for (int pass = 0; pass < 2; pass++) {
          const __m512 scale = _mm512_set1_ps(s1), back = _mm512_set1_ps(s3);
          for (int64_t j = 0; j < half; j += 16) {
            const __mmask16 k = low16(half - j);
            const __m512 ga = load(g + j, k), gb = load(g + half + j, k);
            const __m512 cj = load(c + j, k), sj = load(s + j, k);
            const __m512 a = _mm512_fmadd_ps(gb, sj, _mm512_mul_ps(ga, cj));
            const __m512 b = _mm512_fnmadd_ps(ga, sj, _mm512_mul_ps(gb, cj));
            const __m512 v = load(head + j, k), w = load(head + half + j, k);
            const __m512 na = load(norm + j, k), nb = load(norm + half + j, k);
            if (pass == 0) {
              squares = _mm512_fmadd_ps(v, v, _mm512_fmadd_ps(w, w, squares));
              dots = _mm512_fmadd_ps(_mm512_mul_ps(a, na), v, dots);
              dots = _mm512_fmadd_ps(_mm512_mul_ps(b, nb), w, dots);
            } else {
              const __m512 sa = _mm512_mul_ps(a, scale), sb = _mm512_mul_ps(b, scale);
              save(own + j, k, _mm512_fmadd_ps(sa, v, load(own + j, k)));
              save(own + half + j, k, _mm512_fmadd_ps(sb, w, load(own + half + j, k)));
              save(out + j, k, _mm512_fnmadd_ps(v, back, _mm512_mul_ps(sa, na)));
              save(out + half + j, k, _mm512_fnmadd_ps(w, back, _mm512_mul_ps(sb, nb)));
            }
          }
          s1 = 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / d + eps);
          s3 = s1 * s1 * s1 * _mm512_reduce_add_ps(dots) / d;
        }
      }
      const int64_t* by = strides + 6;
      for (int64_t h = turned; h < every; h++)
        std::memcpy(dx + (i * every + h) * d,
                    gv + sequence * by[0] + t * by[1] + (h - turned) * by[2], d * sizeof(T));
    }
  }
  if (partial) sum_blocks(partial, dnorm, blocks, 2 * d);
}

// The next token of a row, as shoal.model.generate.sample chooses it, in double precision.
template <class T>
int64_t choose(const T* x, int64_t v, double temperature, int64_t top_k, double top_p,
               double uniform) {
  int64_t best = 0;
  float top = to_float(x[0]);
  for (int64_t j = 1; j < v; j++) {
    const float now = to_float(x[j]);
    if (now > top) top = now, best = j;
  }
  if (temperature == 0) return best;
  // Whole of it, in the order of the vocabulary, then the kept ones by falling score.
  std::vector<double> weight(v);
  const double peak = double(top) / temperature;
  for (int64_t j = 0; j < v; j++) weight[j] = std::exp(double(to_float(x[j])) / temperature - peak);
  std::vector<int64_t> order(v);
  for (int64_t j = 0; j < v; j++) order[j] = j;
  const auto before = [&](int64_t a, int64_t b) {
    return to_float(x[a]) != to_float(x[b]) ? to_float(x[a]) > to_float(x[b]) : a < b;
  };
  int64_t kept = top_k && top_k < v ? top_k : v, sorted = 0;
  double total = 0;
  if (kept < v) {
    std::partial_sort(order.begin(), order.begin() + kept, order.end(), before);
    sorted = kept;
    for (int64_t j = 0; j < kept; j++) total += weight[order[j]];
  } else {
    for (int64_t j = 0; j < v; j++) total += weight[j];
  }
  const auto sort_more = [&] {
    const int64_t next = std::min(kept, std::max<int64_t>(256, 4 * sorted));
    std::partial_sort(order.begin() + sorted, order.begin() + next, order.begin() + kept, before);
    sorted = next;
  };
  // Those before which less than top_p lies; their weight is what the number is a share of.
  double end = total;
  if (top_p < 1) {
    double sum = 0;
    int64_t j = 0;
    for (; j < kept; j++) {
      if (j == sorted) sort_more();
      if (!(sum / total < top_p)) break;
      sum += weight[order[j]];
    }
    kept = j, end = sum;
  }
  double sum = 0;
  for (int64_t j = 0; j < kept; j++) {
    if (j == sorted) sort_more();
    sum += weight[order[j]];
    if (sum > uniform * end) return order[j];
  }
  return order[kept - 1];
}

template <class T>
void sample(const T* x, int64_t* out, const double* temperature, const int64_t* top_k,
            const double* top_p, const double* uniform, int64_t m, int64_t v) {
#pragma omp parallel for if (m > 1) schedule(dynamic)
  for (int64_t i = 0; i < m; i++)
    out[i] = choose(x + i * v, v, temperature[i], top_k[i], top_p[i], uniform[i]);
}

}  // namespace

#define BOTH(name, signature_fp32, signature_bf16, call) \
  extern "C" void name##_fp32 signature_fp32 { call; }   \
  extern "C" void name##_bf16 signature_bf16 { call; }

BOTH(rms_norm,
     (float* x, const float* delta, const float* weight, float* y, int64_t m, int64_t n,
      int64_t stride, float eps),
     (uint16_t* x, const uint16_t* delta, const uint16_t* weight, uint16_t* y, int64_t m,
      int64_t n, int64_t stride, float eps),
     rms_norm(x, delta, weight, y, m, n, stride, eps))

BOTH(swiglu, (const float* x, float* y, int64_t m, int64_t f),
     (const uint16_t* x, uint16_t* y, int64_t m, int64_t f), swiglu(x, y, m, f))

BOTH(rope,
     (float* x, const float* cos, const float* sin, const int64_t* position, const float* q_norm,
      const float* k_norm, int64_t m, int64_t heads, int64_t q, int64_t turned, int64_t d,
      float eps),
     (uint16_t* x, const float* cos, const float* sin, const int64_t* position,
      const uint16_t* q_norm, const uint16_t* k_norm, int64_t m, int64_t heads, int64_t q,
      int64_t turned, int64_t d, float eps),
     rope(x, cos, sin, position, q_norm, k_norm, m, heads, q, turned, d, eps))

BOTH(sample,
     (const float* x, int64_t* out, const double* temperature, const int64_t* top_k,
      const double* top_p, const double* uniform, int64_t m, int64_t v),
     (const uint16_t* x, int64_t* out, const double* temperature, const int64_t* top_k,
      const double* top_p, const double* uniform, int64_t m, int64_t v),
     sample(x, out, temperature, top_k, top_p, uniform, m, v))

extern "C" void loss_gradient_bf16(uint16_t* x, const int64_t* target, const float* weight,
                                   float* loss, int64_t m, int64_t v) {
  loss_gradient(x, target, weight, loss, m, v);
}

#define TYPED(name, arguments, call)                        \
  extern "C" void name##_fp32 arguments(float) { call; }    \
  extern "C" void name##_bf16 arguments(uint16_t) { call; }

#define NORM(T) (const T* x, const float* weight, T* y, int64_t m, int64_t n, float eps)
TYPED(rms_norm_forward, NORM,
      rms_norm(const_cast<decltype(y)>(x), decltype(y)(nullptr), weight, y, m, n, n, eps))

#define NORM_GRAD(T)                                                                        \
  (const T* g, const T* x, const float* weight, T* dx, float* dweight, float* partial,      \
   int64_t m, int64_t n, float eps)
TYPED(rms_norm_grad, NORM_GRAD, rms_norm_grad(g, x, weight, dx, dweight, partial, m, n, eps))

#define SWIGLU_GRAD(T) (const T* g, const T* x, T* dx, int64_t m, int64_t f)
TYPED(swiglu_grad, SWIGLU_GRAD, swiglu_grad(g, x, dx, m, f))

#define SPLIT(T)                                                                            \
  (const T* x, T* y, const float* cos, const float* sin, const float* q_norm,               \
   const float* k_norm, int64_t m, int64_t length, int64_t every, int64_t q, int64_t turned, \
   int64_t d, float eps)
TYPED(rope_split, SPLIT,
      rope_split(x, y, cos, sin, q_norm, k_norm, m, length, every, q, turned, d, eps))

#define SPLIT_GRAD(T)                                                                       \
  (const T* gq, const T* gk, const T* gv, const int64_t* strides, const T* x, T* dx,        \
   const float* cos, const float* sin, const float* q_norm, const float* k_norm,            \
   float* dnorm, float* partial, int64_t m, int64_t length, int64_t every, int64_t q,       \
   int64_t turned, int64_t d, float eps)
TYPED(rope_split_grad, SPLIT_GRAD,
      rope_split_grad(gq, gk, gv, strides, x, dx, cos, sin, q_norm, k_norm, dnorm, partial, m,
                      length, every, q, turned, d, eps))

#endif
