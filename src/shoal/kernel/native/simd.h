// What the kernels share: loads with a tail, sums in a fixed order, and the cut over threads.
#include <immintrin.h>
#include <omp.h>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// Part `t` of `T` of n things, in whole multiples of `unit` but for the last.
struct Range { int64_t first, last; };
inline Range share(int64_t n, int64_t unit, int t, int T) {
  const int64_t units = (n + unit - 1) / unit;
  const int64_t a = units * t / T * unit, b = units * (t + 1) / T * unit;
  return {a < n ? a : n, b < n ? b : n};
}

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
// Nearest even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
inline void store(float* at, float x) { *at = x; }
inline void store(uint16_t* at, float x) { *at = to_bf16(x); }

#ifdef __AVX512F__
inline __mmask16 low16(int64_t n) { return n >= 16 ? __mmask16(0xffff) : __mmask16((1u << n) - 1); }
inline __mmask32 low32(int64_t n) {
  return n >= 32 ? __mmask32(0xffffffffu) : __mmask32((uint32_t(1) << n) - 1);
}
#endif

}  // namespace
