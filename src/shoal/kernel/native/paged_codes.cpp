// Paged attention over keys and values in codes of few bits, read as they are.
#include "paged.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

namespace {

// Codes of 4 or 8 bits. Where SHARED, `block` of them share an exponent, a byte; else a whole
// head shares a scale in fp32. A block of 4-bit codes has the codes, plus 8, of its first half in
// the low and those of its second half in the high halves of its bytes.
//
// Scores are sums of products of integers: queries are rounded to 8 bits, with exponents or a
// scale alike. Values become bf16, which holds every code exactly.
template <int BITS, bool SHARED>
struct Coded {
  using P = uint16_t;
  static constexpr float unit = !SHARED ? 1.0f : BITS == 4 ? 0.25f : 0.015625f;
  static constexpr int64_t width = 32;

  static int64_t block_of_query(const Problem& p) { return SHARED ? p.block : p.d; }
  static int64_t vectors(const Problem& p) { return (p.d * BITS / 8 + 63) / 64; }
  // Codes (of both halves where there are two), what the offset adds, scales: a vector each.
  static constexpr int64_t parts = BITS == 4 ? 4 : 3;
  static int64_t query_bytes(const Problem& p) { return vectors(p) * parts * 64; }

  static void query(const Problem& p, const char* q, char* to) {
    std::memset(to, 0, query_bytes(p));
    const auto number = [&](int64_t i) {
      return p.half ? to_float(((const uint16_t*)q)[i]) : ((const float*)q)[i];
    };
    const int64_t n = block_of_query(p), block_bytes = n * BITS / 8;
    for (int64_t first = 0; first < p.d; first += n) {
      float most = 0.0f, step = 0.0f;
      bool finite = true;
      for (int64_t i = first; i < first + n; i++) {
        most = std::max(most, std::fabs(number(i)));
        finite &= std::fabs(number(i)) < INFINITY;
      }
      if (SHARED) {
        uint32_t bits;
        std::memcpy(&bits, &most, 4);
        const uint32_t exponent = bits >> 23;
        bits = exponent > 6 ? (exponent - 6) << 23 : 0;
        std::memcpy(&step, &bits, 4);
      } else {
        step = most / 127.0f;
      }
      // Numbers so small that their step has no inverse are as good as zero.
      const float inverse = finite && step > 1e-30f ? 1.0f / step : 0.0f;
      if (!finite) step = NAN;
      for (int64_t i = 0; finite && i < n; i++) {
        const int32_t code =
            std::clamp(int32_t(std::nearbyintf(number(first + i) * inverse)), -127, 127);
        int64_t byte = first + i, half = 0;
        if (BITS == 4) {
          half = i >= n / 2;
          byte = first / 2 + (i - half * (n / 2));
        }
        char* vector = to + byte / 64 * parts * 64;
        vector[half * 64 + byte % 64] = char(code);
        ((int32_t*)(vector + (parts - 2) * 64))[byte % 64 / 4] -= (BITS == 4 ? 8 : 128) * code;
      }
      const int64_t start = first * BITS / 8;
      for (int64_t byte = start; byte < start + block_bytes; byte += 4)
        ((float*)(to + byte / 64 * parts * 64 + (parts - 1) * 64))[byte % 64 / 4] = step;
    }
  }

  // 2^exponent of the blocks of a row.
  static __m512 powers(const Problem& p, const char* at) {
    const __m128i e = _mm_maskz_loadu_epi8(low16(p.d / p.block), at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(e), 23));
  }

  template <int T, int H>
  static __m512 dots(const Problem& p, const Step& now, const Step& next, int64_t t, int64_t g,
                     const char* q, int64_t q_bytes) {
    __m512 sum[16];
    for (int i = 0; i < 16; i++) sum[i] = _mm512_setzero_ps();
    const int64_t off = g * p.k.head, bytes = p.d * BITS / 8;
    const int64_t scale_off = g * p.k.scale_head;
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int shift = SHARED ? __builtin_ctzll(uint64_t(p.block * BITS / 32)) : 0;
    for (int64_t i = 0; i < bytes; i += 64) {
      const __mmask64 mask = bytes - i >= 64 ? ~0ull : (1ull << (bytes - i)) - 1;
      const char* query = q + i * parts;
      const __m512i of_lane = _mm512_srlv_epi32(
          _mm512_add_epi32(lane, _mm512_set1_epi32(int(i / 4))), _mm512_set1_epi32(shift));
#pragma GCC unroll 16
      for (int j = 0; j < T; j++) {
        const char* scales = p.k.scales + now.slot[t + j] * p.k.scale_slot + scale_off;
        __m512i k = _mm512_maskz_loadu_epi8(mask, now.k[t + j] + off + i);
        ahead(next.k[t + j] + off + i);
        if (i == 0) ahead(p.k.scales + next.slot[t + j] * p.k.scale_slot + scale_off);
        const __m512 scale = SHARED ? _mm512_permutexvar_ps(of_lane, powers(p, scales))
                                    : _mm512_set1_ps(*(const float*)scales);
        __m512i high = k;
        if (BITS == 4) {
          const __m512i low = _mm512_set1_epi8(15);
          high = _mm512_and_si512(_mm512_srli_epi16(k, 4), low);
          k = _mm512_and_si512(k, low);
        } else {
          k = _mm512_xor_si512(k, _mm512_set1_epi8(char(-128)));
        }
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
          const char* at = query + h * q_bytes;
          __m512i x = _mm512_dpbusd_epi32(_mm512_loadu_si512(at + (parts - 2) * 64), k,
                                          _mm512_loadu_si512(at));
          if (BITS == 4) x = _mm512_dpbusd_epi32(x, high, _mm512_loadu_si512(at + 64));
          const __m512 y =
              _mm512_mul_ps(_mm512_cvtepi32_ps(x), _mm512_loadu_ps(at + (parts - 1) * 64));
          sum[h * T + j] = _mm512_fmadd_ps(y, scale, sum[h * T + j]);
        }
      }
    }
    return lanes(sum);
  }

  static const float* value_scales(const Problem& p, const Step& now, int64_t g, float* to) {
    if (SHARED) return nullptr;
    for (int64_t t = 0; t < kStep; t++)
      to[t] = *(const float*)(p.v.scales + now.slot[t] * p.v.scale_slot + g * p.v.scale_head);
    return to;
  }

  // A row of values in bf16, exactly (but for what lies below 2^-120).
  static void expand(const Problem& p, const char* codes, const char* scales, uint16_t* to) {
    if constexpr (BITS == 4) {
      const __m256i codes_as_bf16 = _mm256_setr_epi16(
          (short)0xc100, (short)0xc0e0, (short)0xc0c0, (short)0xc0a0, (short)0xc080,
          (short)0xc040, (short)0xc000, (short)0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080,
          0x40a0, 0x40c0, 0x40e0);
      const int64_t half = p.block / 2;
      for (int64_t b = 0; b < p.d / p.block; b++) {
        const int e = (unsigned char)scales[b];
        const __m256i table =
            e < 8 ? _mm256_setzero_si256()
                  : _mm256_mask_add_epi16(codes_as_bf16, 0xfeff, codes_as_bf16,
                                          _mm256_set1_epi16(short((e - 127 - 2) * 128)));
        for (int64_t i = 0; i < half; i += 16) {
          const __m128i x = _mm_loadu_si128((const __m128i*)(codes + b * half + i));
          const __m256i wide = _mm256_cvtepu8_epi16(x);
          // Of an index the lowest four bits count.
          _mm256_storeu_si256((__m256i*)(to + b * p.block + i),
                              _mm256_permutexvar_epi16(wide, table));
          _mm256_storeu_si256((__m256i*)(to + b * p.block + half + i),
                              _mm256_permutexvar_epi16(_mm256_srli_epi16(wide, 4), table));
        }
      }
    } else {
      float by = 1.0f;
      for (int64_t i = 0; i < p.d; i += 16) {
        if (SHARED && i % p.block == 0) {
          const uint32_t bits = uint32_t((unsigned char)scales[i / p.block]) << 23;
          std::memcpy(&by, &bits, 4);
          by *= unit;
        }
        const __mmask16 mask = low16(p.d - i);
        __m512 x = _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, codes + i)));
        if (SHARED) x = _mm512_mul_ps(x, _mm512_set1_ps(by));
        _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(x));
      }
    }
  }

  static void values(const Problem& p, const Step& now, const Step& next, int64_t g, int64_t M,
                     const uint16_t* weights, float* sums, int64_t record, const float* worth,
                     char* space) {
    const char* rows[kStep];
    const int64_t bytes = p.d * BITS / 8, off = g * p.v.head, scale_off = g * p.v.scale_head;
    for (int64_t t = 0; t < now.n + now.n % 2; t++) {
      uint16_t* to = (uint16_t*)space + t * p.pad;
      rows[t] = (const char*)to;
      expand(p, now.v[t] + off, p.v.scales + now.slot[t] * p.v.scale_slot + scale_off, to);
      for (int64_t i = 0; i < bytes; i += 64) ahead(next.v[t] + off + i);
      if (SHARED) ahead(p.v.scales + next.slot[t] * p.v.scale_slot + scale_off);
    }
    by_heads<Bf16>(p, rows, nullptr, 0, now.n, M, weights, sums, record, worth);
  }
  static void result(const Problem& p, const float* sums, float divisor, char* out) {
    Bf16::result(p, sums, divisor, out);
  }
};

}  // namespace

// The first argument: 1 int8, 2 bfp12, 3 bfp16.
extern "C" int64_t paged_attention(const int64_t* arguments) {
  Problem p = problem_of(arguments);
  const int64_t problem = wrong(p, arguments);
  if (problem >= 0 || p.rows == 0) return problem;
  if (arguments[0] == 1) attention<Coded<8, false>>(p);
  if (arguments[0] == 2) attention<Coded<4, true>>(p);
  if (arguments[0] == 3) attention<Coded<8, true>>(p);
  return -1;
}

#endif
