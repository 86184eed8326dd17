// y[M, N] = x[M, K] @ w[N, K].T + bias[N], for few rows: the weights pass by once.
//
// Every output is one running sum over K in vectors of one width, then one sum over the lanes
// in a fixed tree, whatever M is and however the outputs are cut over threads: a row has the
// same bits whatever other rows are computed beside it.
#include "simd.h"

#ifdef __AVX512BF16__

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
                 typename D::T* y, int64_t n, int64_t k) {
  __m512 sum[R][MB];
  for (int r = 0; r < R; r++)
    for (int m = 0; m < MB; m++) sum[r][m] = _mm512_setzero_ps();
  const int64_t whole = k / D::width * D::width;
  for (int64_t i = 0; i < whole; i += D::width) {
    typename D::V a[R];
    const int64_t next = i + 2 * R * k;  // of the outputs after the next ones
    for (int r = 0; r < R; r++) {
      a[r] = D::load(w + r * k + i);
      _mm_prefetch((const char*)(w + r * k + next), _MM_HINT_T1);
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
          int64_t m, int64_t n, int64_t k) {
  int64_t i = 0;
  for (; i + 6 <= m; i += 6) tile<D, R, 6>(x + i * k, w, bias, y + i * n, n, k);
  x += i * k, y += i * n;
  switch (m - i) {
    case 5: tile<D, R, 5>(x, w, bias, y, n, k); break;
    case 4: tile<D, R, 4>(x, w, bias, y, n, k); break;
    case 3: tile<D, R, 3>(x, w, bias, y, n, k); break;
    case 2: tile<D, R, 2>(x, w, bias, y, n, k); break;
    case 1: tile<D, R, 1>(x, w, bias, y, n, k); break;
    default: break;
  }
}

template <class D>
void linear(const typename D::T* x, const typename D::T* w, const float* bias,
            typename D::T* y, int64_t m, int64_t n, int64_t k) {
  constexpr int R = 4;
#pragma omp parallel
  {
    const Range part = share(n, R, omp_get_thread_num(), omp_get_num_threads());
    int64_t j = part.first;
    for (; j + R <= part.last; j += R)
      rows<D, R>(x, w + j * k, bias ? bias + j : nullptr, y + j, m, n, k);
    for (; j < part.last; j++)
      rows<D, 1>(x, w + j * k, bias ? bias + j : nullptr, y + j, m, n, k);
  }
}

}  // namespace

extern "C" void linear_bf16(const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y,
                            int64_t m, int64_t n, int64_t k) {
  linear<Bf16>(x, w, bias, y, m, n, k);
}

extern "C" void linear_fp32(const float* x, const float* w, const float* bias, float* y,
                            int64_t m, int64_t n, int64_t k) {
  linear<Fp32>(x, w, bias, y, m, n, k);
}

#endif
