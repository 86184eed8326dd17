// What lies behind products, sixteen numbers at a time.
#include "simd.h"

#ifdef __AVX512F__
namespace {

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

inline __m512 silu(__m512 x) {
  const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

}  // namespace
#endif
