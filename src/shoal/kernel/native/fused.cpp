// What lies between the products of a decoder, each in one pass over memory: RMS norm, rotary
// embedding, SwiGLU and the choice of the next token. A row depends on itself alone.
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <vector>

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

// 2^x for |x| < 126 by a polynomial of degree 6; relative error below 2e-7.
inline __m512 exp2_ps(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(1.5353362e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3398874e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6184373e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5503324e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022648e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314720e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}
inline __m512 exp_ps(__m512 x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
  return exp2_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)));
}

// Few numbers are not worth another thread.
constexpr int64_t kSmall = 16384;

// x[M, N] += delta[M, N] (if given); y = x / sqrt(mean x^2 + eps) * weight.
template <class T>
void rms_norm(T* x, const T* delta, const T* weight, T* y, int64_t m, int64_t n, int64_t stride,
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
      const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), g));
      const __m512 s = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
      save(y + i * f + j, k, _mm512_mul_ps(s, load(up + j, k)));
    }
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
        const __m512 cj = _mm512_maskz_loadu_ps(k, c + j), sj = _mm512_maskz_loadu_ps(k, s + j);
        save(head + j, k, _mm512_fnmadd_ps(b, sj, _mm512_mul_ps(a, cj)));
        save(head + half + j, k, _mm512_fmadd_ps(a, sj, _mm512_mul_ps(b, cj)));
      }
    }
  }
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
