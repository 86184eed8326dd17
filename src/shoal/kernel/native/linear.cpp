// y[M, N] = x[M, K] @ w[N, K].T + bias[N], for few rows: the weights pass by once.
//
// Every output is one running sum over K in vectors of one width, then one sum over the lanes
// in a fixed tree, whatever M is and however the outputs are cut over threads: a row has the
// same bits whatever other rows are computed beside it.
#include "simd.h"

namespace {

struct Bf16 {
  using T = uint16_t;
  static constexpr int64_t width = 32;
  using V = __m512i;
  static V load(const T* at) { return _mm512_loadu_si512(at); }
  static V tail(const T* at, int64_t n) { return _mm512_maskz_loadu_epi16(low32(n), at); }
  static __m512 add(__m512 sum, V a, V b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
};

struct Fp32 {
  using T = float;
  static constexpr int64_t width = 16;
  using V = __m512;
  static V load(const T* at) { return _mm512_loadu_ps(at); }
  static V tail(const T* at, int64_t n) { return _mm512_maskz_loadu_ps(low16(n), at); }
  static __m512 add(__m512 sum, V a, V b) { return _mm512_fmadd_ps(a, b, sum); }
};

// R outputs of MB rows.
template <class D, int R, int MB>
inline void tile(const typename D::T* x, const typename D::T* w, const float* bias,
                 typename D::T* y, int64_t n, int64_t k, int64_t ahead) {
  __m512 sum[R][MB];
  for (int r = 0; r < R; r++)
    for (int m = 0; m < MB; m++) sum[r][m] = _mm512_setzero_ps();
  const int64_t whole = k / D::width * D::width;
  for (int64_t i = 0; i < whole; i += D::width) {
    typename D::V a[R];
    for (int r = 0; r < R; r++) {
      a[r] = D::load(w + r * k + i);
      _mm_prefetch((const char*)(w + r * k + i) + ahead, _MM_HINT_T0);
    }
    for (int m = 0; m < MB; m++) {
      const typename D::V b = D::load(x + m * k + i);
      for (int r = 0; r < R; r++) sum[r][m] = D::add(sum[r][m], a[r], b);
    }
  }
  if (whole < k) {
    for (int m = 0; m < MB; m++) {
      const typename D::V b = D::tail(x + m * k + whole, k - whole);
      for (int r = 0; r < R; r++)
        sum[r][m] = D::add(sum[r][m], D::tail(w + r * k + whole, k - whole), b);
    }
  }
  for (int m = 0; m < MB; m++)
    for (int r = 0; r < R; r++)
      store(y + m * n + r, _mm512_reduce_add_ps(sum[r][m]) + (bias ? bias[r] : 0.0f));
}

template <class D, int R>
void rows(const typename D::T* x, const typename D::T* w, const float* bias, typename D::T* y,
          int64_t m, int64_t n, int64_t k, int64_t ahead) {
  int64_t i = 0;
  // Only the first pass over these weights fetches them from memory.
  for (; i + 6 <= m; i += 6) tile<D, R, 6>(x + i * k, w, bias, y + i * n, n, k, i ? 0 : ahead);
  x += i * k, y += i * n;
  ahead = i ? 0 : ahead;
  switch (m - i) {
    case 5: tile<D, R, 5>(x, w, bias, y, n, k, ahead); break;
    case 4: tile<D, R, 4>(x, w, bias, y, n, k, ahead); break;
    case 3: tile<D, R, 3>(x, w, bias, y, n, k, ahead); break;
    case 2: tile<D, R, 2>(x, w, bias, y, n, k, ahead); break;
    case 1: tile<D, R, 1>(x, w, bias, y, n, k, ahead); break;
    default: break;
  }
}

template <class D>
void linear(const typename D::T* x, const typename D::T* w, const float* bias,
            typename D::T* y, int64_t m, int64_t n, int64_t k) {
  constexpr int R = 4;
  const int64_t ahead = 1024;
#pragma omp parallel
  {
    const Range part = share(n, R, omp_get_thread_num(), omp_get_num_threads());
    int64_t j = part.first;
    for (; j + R <= part.last; j += R)
      rows<D, R>(x, w + j * k, bias ? bias + j : nullptr, y + j, m, n, k, ahead);
    for (; j < part.last; j++)
      rows<D, 1>(x, w + j * k, bias ? bias + j : nullptr, y + j, m, n, k, ahead);
  }
}

}  // namespace

// The sum of n numbers: reading them as fast as they can be read.
extern "C" double read_fp32(const float* x, int64_t n) {
  double total = 0;
#pragma omp parallel reduction(+ : total)
  {
    const Range part = share(n, 64, omp_get_thread_num(), omp_get_num_threads());
    __m512 sum[4] = {};
    int64_t i = part.first;
    for (; i + 64 <= part.last; i += 64)
      for (int r = 0; r < 4; r++) sum[r] = _mm512_add_ps(sum[r], _mm512_loadu_ps(x + i + 16 * r));
    for (int r = 0; r < 4; r++) total += _mm512_reduce_add_ps(sum[r]);
    for (; i < part.last; i++) total += x[i];
  }
  return total;
}

extern "C" void linear_bf16(const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y,
                            int64_t m, int64_t n, int64_t k) {
  linear<Bf16>(x, w, bias, y, m, n, k);
}

extern "C" void linear_fp32(const float* x, const float* w, const float* bias, float* y,
                            int64_t m, int64_t n, int64_t k) {
  linear<Fp32>(x, w, bias, y, m, n, k);
}
