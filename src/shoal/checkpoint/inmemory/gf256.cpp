// GF(256) with the polynomial 0x11d: out ^= c * x, the one loop that coding consists of.
//
// Multiplying by a constant is linear over bits: an affine instruction does it for a whole
// register where there is one (GFNI), else two lookups of half a byte each (PSHUFB). Tables
// and matrix come from the caller, who has the arithmetic.

#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// The tail, and processors without vectors.
void add_scaled_plain(uint8_t* out, const uint8_t* x, int64_t n, const uint8_t* low,
                      const uint8_t* high) {
  for (int64_t i = 0; i < n; ++i) out[i] ^= low[x[i] & 15] ^ high[x[i] >> 4];
}

}  // namespace

// low, high: c * v and c * 16 v for v in 0..15. matrix: the bits of c * 2^i, for GF2P8AFFINEQB.
extern "C" void gf_add_scaled(uint8_t* out, const uint8_t* x, int64_t n, const uint8_t* low,
                              const uint8_t* high, uint64_t matrix) {
  int64_t i = 0;
#if defined(__GFNI__) && defined(__AVX512F__)
  const __m512i a = _mm512_set1_epi64(static_cast<long long>(matrix));
  for (; i + 64 <= n; i += 64) {
    const __m512i v = _mm512_loadu_si512(x + i);
    const __m512i o = _mm512_loadu_si512(out + i);
    _mm512_storeu_si512(out + i, _mm512_xor_si512(o, _mm512_gf2p8affine_epi64_epi8(v, a, 0)));
  }
#elif defined(__AVX2__)
  const __m256i l = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)low));
  const __m256i h = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)high));
  const __m256i mask = _mm256_set1_epi8(15);
  for (; i + 32 <= n; i += 32) {
    const __m256i v = _mm256_loadu_si256((const __m256i*)(x + i));
    const __m256i o = _mm256_loadu_si256((const __m256i*)(out + i));
    const __m256i p = _mm256_shuffle_epi8(l, _mm256_and_si256(v, mask));
    const __m256i q = _mm256_shuffle_epi8(h, _mm256_and_si256(_mm256_srli_epi64(v, 4), mask));
    _mm256_storeu_si256((__m256i*)(out + i), _mm256_xor_si256(o, _mm256_xor_si256(p, q)));
  }
#endif
  (void)matrix;
  add_scaled_plain(out + i, x + i, n - i, low, high);
}
