// Keys and values of the cache in few bits: block floating point, and 8-bit integers.
//
// Plain loops: a compiler makes vectors of them on any CPU.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline float number(const float* x, int64_t i) { return x[i]; }
inline float number(const uint16_t* x, int64_t i) {
  const uint32_t bits = uint32_t(x[i]) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// 2^e for any e of a double.
inline double power(int64_t e) {
  const uint64_t bits = uint64_t(e + 1023) << 52;
  double out;
  std::memcpy(&out, &bits, 8);
  return out;
}

// The largest magnitude, as bits: they rise with it, and NaN and infinity lie above all.
template <class T>
inline uint32_t largest(const T* x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    const float v = number(x, i);
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    most = std::max(most, bits & 0x7fffffffu);
  }
  return most;
}

constexpr uint32_t kInfinite = 0x7f800000u;

// Row after row, `bits` (4 or 8) a code; false where a number is not finite.
template <class T>
bool bfp(const T* x, int64_t d, int64_t block, int64_t bits, uint8_t* codes, uint8_t* exponents) {
  const double limit = double((1 << (bits - 1)) - 1);
  int8_t code[1024];
  for (int64_t first = 0; first < d; first += block, x += block) {
    const uint32_t most = largest(x, block);
    if (most >= kInfinite) return false;
    const int64_t e = most >> 23;
    *exponents++ = uint8_t(e);
    const double by = e ? power(bits - 2 - (e - 127)) : 0.0;
    for (int64_t i = 0; i < block; i++) {
      const double q = std::nearbyint(double(number(x, i)) * by);
      code[i] = int8_t(std::clamp(q, -limit, limit));
    }
    if (bits == 8) {
      std::memcpy(codes, code, block);
      codes += block;
    } else {
      const int64_t half = block / 2;
      for (int64_t i = 0; i < half; i++)
        codes[i] = uint8_t((code[i] + 8) | (code[half + i] + 8) << 4);
      codes += half;
    }
  }
  return true;
}

template <class T>
bool int8(const T* x, int64_t d, int8_t* codes, float* scale) {
  const uint32_t bits = largest(x, d);
  if (bits >= kInfinite) return false;
  float most;
  std::memcpy(&most, &bits, 4);
  // Where the step has no inverse, numbers are as good as zero.
  *scale = most < 1e-30f ? 0.0f : most / 127.0f;
  const float by = *scale ? 127.0f / most : 0.0f;
  for (int64_t i = 0; i < d; i++)
    codes[i] = int8_t(std::clamp(std::nearbyintf(number(x, i) * by), -127.0f, 127.0f));
  return true;
}

template <class Encode>
int64_t rows_of(int64_t rows, int64_t d, Encode encode) {
  int64_t bad = rows;
#pragma omp parallel for reduction(min : bad) if (rows * d > 100000)
  for (int64_t row = 0; row < rows; row++)
    if (!encode(row)) bad = std::min(bad, row);
  return bad < rows ? bad : -1;
}

}  // namespace

// The heads of a token lie side by side, and the next token `stride` numbers further on: -1, or
// the first row with a number that is not finite.
extern "C" int64_t bfp_encode(const void* x, int64_t half, int64_t rows, int64_t heads,
                              int64_t stride, int64_t d, int64_t block, int64_t bits,
                              uint8_t* codes, uint8_t* exponents) {
  return rows_of(rows, d, [=](int64_t row) {
    const int64_t at = row / heads * stride + row % heads * d;
    uint8_t *to = codes + row * d * bits / 8, *of = exponents + row * (d / block);
    return half ? bfp((const uint16_t*)x + at, d, block, bits, to, of)
                : bfp((const float*)x + at, d, block, bits, to, of);
  });
}

extern "C" int64_t int8_encode(const void* x, int64_t half, int64_t rows, int64_t heads,
                               int64_t stride, int64_t d, int8_t* codes, float* scales) {
  return rows_of(rows, d, [=](int64_t row) {
    const int64_t at = row / heads * stride + row % heads * d;
    return half ? int8((const uint16_t*)x + at, d, codes + row * d, scales + row)
                : int8((const float*)x + at, d, codes + row * d, scales + row);
  });
}

extern "C" void bfp_decode(const uint8_t* codes, const uint8_t* exponents, int64_t rows,
                           int64_t d, int64_t block, int64_t bits, float* out) {
  const int64_t blocks = rows * (d / block), half = block / 2;
#pragma omp parallel for if (rows * d > 100000)
  for (int64_t b = 0; b < blocks; b++) {
    const uint8_t* from = codes + b * block * bits / 8;
    float* to = out + b * block;
    const double by = power(int64_t(exponents[b]) - 127 - (bits - 2));
    for (int64_t i = 0; i < block; i++) {
      const int code = bits == 8   ? int8_t(from[i])
                       : i < half ? int(from[i] & 15) - 8
                                  : int(from[i - half] >> 4) - 8;
      to[i] = float(code * by);
    }
  }
}

// Rows of bytes to their slots; -1, or the first row whose slot is not there.
extern "C" int64_t kv_put(char* store, const int64_t* slots, const char* rows, int64_t n,
                          int64_t bytes, int64_t stride, int64_t num_slots) {
  for (int64_t row = 0; row < n; row++)
    if (slots[row] < 0 || slots[row] >= num_slots) return row;
#pragma omp parallel for if (n * bytes > 100000)
  for (int64_t row = 0; row < n; row++)
    std::memcpy(store + slots[row] * bytes, rows + row * stride, bytes);
  return -1;
}
