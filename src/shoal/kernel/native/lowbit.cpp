// Products with 4-bit weights by AVX-512: `w4a16` looks codes up as bf16 and adds products of
// pairs, `w4a8` adds products of fours of unsigned codes and signed bytes in integers.
#include "lowbit.h"

#ifdef LOWBIT
namespace {

inline __m512i broadcast(const void* at) {
  int32_t word;
  std::memcpy(&word, at, 4);
  return _mm512_set1_epi32(word);
}

template <class E>
struct Avx {
  static constexpr int64_t most = 60, block = 12;
  static constexpr bool even = true;

  const Blocks& b;
  const Rows& rows;
  const char* room;
  alignas(64) uint8_t codes[SEG * 16];

  Avx(const Blocks& b, const Rows& rows, const char* room) : b(b), rows(rows), room(room) {}
  void done() {}

  void settle() {}

  void chunk(int64_t slice, int64_t from, int64_t to, float* out, float* total) {
    const int64_t size = rows.blocks * rows.R * WIDE;
    std::memset(out, 0, size_t(size) * sizeof(float));
    for (int64_t g = from; g < to; g++) {
      const uint8_t* record = segment(b, slice, g);
      const uint8_t* w = dense(b, record, codes);
      const int64_t ahead = b.sparse ? 0 : AHEAD;
      for (int64_t block = 0; block < rows.blocks; block++)
        some_lines(w, record, block, g, out + block * rows.R * WIDE, ahead);
    }
    if (total) add(total, out, size);
  }

  template <int MB = int(block)>
  void some_lines(const uint8_t* w, const uint8_t* record, int64_t block, int64_t g, float* out,
                  int64_t ahead) {
    if constexpr (MB > 1)
      if (rows.R < MB) return some_lines<MB - 1>(w, record, block, g, out, ahead);
    static_cast<E&>(*this).template tile<MB>(w, record, block, g, out, ahead);
  }
};

struct W4A16 : Avx<W4A16> {
  using Packing = Halves;
  using Avx::Avx;

  // Four running sums of each output and line, whatever MB is: inputs 0 and 4 of each 8, then
  // 1 and 5, 2 and 6, 3 and 7; a segment's is ((a + b) + c) + d.
  template <int MB>
  void tile(const uint8_t* w, const uint8_t* record, int64_t block, int64_t g, float* out,
            int64_t ahead) {
    const __m512i table = values_table(b);
    const char* x = room + (block * b.nseg + g) * b.seg * MB * 2;
    const int64_t eights = b.seg / 8;
    if constexpr (MB <= 4) {
      for (int o = 0; o < 2; o++) {
        __m512 sum[4][MB];
        for (int s = 0; s < 4; s++)
          for (int m = 0; m < MB; m++) sum[s][m] = _mm512_setzero_ps();
        for (int64_t i = 0; i < eights; i++) {
          const __m512i d = _mm512_loadu_si512(w + i * 128 + o * 64);
          _mm_prefetch((const char*)w + i * 128 + o * 64 + ahead, _MM_HINT_T0);
          const char* line = x + (i / 4 * MB * 4 + i % 4) * 16;
          const __m512bh v[4] = {
              (__m512bh)_mm512_permutexvar_epi16(d, table),
              (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(d, 4), table),
              (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(d, 8), table),
              (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(d, 12), table)};
          for (int m = 0; m < MB; m++)
            for (int s = 0; s < 4; s++)
              sum[s][m] = _mm512_dpbf16_ps(sum[s][m], v[s],
                                           (__m512bh)broadcast(line + m * 64 + s * 4));
        }
        const __m512 scale = scales(b, record, o);
        for (int m = 0; m < MB; m++)
          scaled(_mm512_add_ps(_mm512_add_ps(_mm512_add_ps(sum[0][m], sum[1][m]), sum[2][m]),
                               sum[3][m]),
                 scale, out + m * WIDE + o * 16);
      }
    } else {
      alignas(64) float totals[MB * WIDE];
      quarter<MB, 0>(w, record, x, eights, totals, out, ahead);
      quarter<MB, 1>(w, record, x, eights, totals, out, ahead);
      quarter<MB, 2>(w, record, x, eights, totals, out, ahead);
      quarter<MB, 3>(w, record, x, eights, totals, out, ahead);
    }
  }

  // One of the four sums, of so many lines and outputs that they fill the registers.
  template <int MB, int S>
  void quarter(const uint8_t* w, const uint8_t* record, const char* x, int64_t eights,
               float* totals, float* out, int64_t ahead) {
    const __m512i table = values_table(b);
    __m512 sum[MB][2];
    for (int m = 0; m < MB; m++) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < eights; i++, w += 128) {
      __m512bh v[2];
      for (int o = 0; o < 2; o++) {
        if (S == 0) _mm_prefetch((const char*)w + o * 64 + ahead, _MM_HINT_T0);
        const __m512i d = _mm512_loadu_si512(w + o * 64);
        v[o] = (__m512bh)_mm512_permutexvar_epi16(S ? _mm512_srli_epi16(d, 4 * S) : d, table);
      }
      const char* line = x + (i / 4 * MB * 4 + i % 4) * 16 + S * 4;
      for (int m = 0; m < MB; m++) {
        const __m512bh pair = (__m512bh)broadcast(line + m * 64);
        for (int o = 0; o < 2; o++) sum[m][o] = _mm512_dpbf16_ps(sum[m][o], v[o], pair);
      }
    }
    const __m512 scale[2] = {scales(b, record, 0), scales(b, record, 1)};
    for (int m = 0; m < MB; m++)
      for (int o = 0; o < 2; o++) {
        float* at = totals + m * WIDE + o * 16;
        const __m512 total = S ? _mm512_add_ps(_mm512_load_ps(at), sum[m][o]) : sum[m][o];
        if (S < 3)
          _mm512_store_ps(at, total);
        else
          scaled(total, scale[o], out + m * WIDE + o * 16);
      }
  }

  static void scaled(__m512 total, __m512 scale, float* at) {
    _mm512_store_ps(at, _mm512_fmadd_ps(total, scale, _mm512_load_ps(at)));
  }
};

struct W4A8 : Avx<W4A8> {
  using Packing = Bytes;
  using Avx::Avx;

  template <int MB>
  void tile(const uint8_t* w, const uint8_t* record, int64_t block, int64_t g, float* out,
            int64_t ahead) {
    constexpr int O = 2;                     // outputs / 16 at once
    constexpr int chains = MB > 2 ? 1 : 2;   // sums of integers are exact in any order
    const int64_t step = Bytes::step(b), eights = b.seg / 8, each = step / 8;
    const char* x = room + (block * b.nseg + g) * b.seg * MB;
    const int64_t index = (block * b.nseg + g) * MB;
    const float* scale = Bytes::scale(b, rows, const_cast<char*>(room)) + index;
    const int32_t* offset = Bytes::offset(b, rows, const_cast<char*>(room)) + index;
    const __m512i low = _mm512_set1_epi8(0xf);
    for (int first = 0; first < 2; first += O) {
      __m512i sum[chains][O][MB];
      for (int c = 0; c < chains; c++)
        for (int o = 0; o < O; o++)
          for (int m = 0; m < MB; m++) sum[c][o][m] = _mm512_setzero_si512();
      const char* line = x;
      for (int64_t i = 0; i < eights; i += each, line += MB * step)
        for (int64_t j = 0; j < each; j++) {
          __m512i v[2][O];
          for (int o = 0; o < O; o++) {
            const uint8_t* at = w + (i + j) * 128 + (first + o) * 64;
            const __m512i d = _mm512_loadu_si512(at);
            _mm_prefetch((const char*)at + ahead, _MM_HINT_T0);
            v[0][o] = _mm512_and_si512(d, low);
            v[1][o] = _mm512_and_si512(_mm512_srli_epi16(d, 4), low);
          }
          for (int m = 0; m < MB; m++)
            for (int c = 0; c < 2; c++) {
              const __m512i a = broadcast(line + m * step + j * 8 + c * 4);
              for (int o = 0; o < O; o++)
                sum[c % chains][o][m] = _mm512_dpbusd_epi32(sum[c % chains][o][m], v[c][o], a);
            }
        }
      for (int o = 0; o < O; o++) {
        const __m512 by = scales(b, record, first + o);
        for (int m = 0; m < MB; m++) {
          __m512i exact = sum[0][o][m];
          if constexpr (chains == 2) exact = _mm512_add_epi32(exact, sum[1][o][m]);
          exact = _mm512_add_epi32(exact, _mm512_set1_epi32(offset[m]));
          const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_set1_ps(scale[m]));
          float* at = out + m * WIDE + (first + o) * 16;
          _mm512_store_ps(at, _mm512_fmadd_ps(part, by, _mm512_load_ps(at)));
        }
      }
    }
  }
};

}  // namespace

extern "C" void w4a16_bf16(const Blocks* b, const uint16_t* x, uint16_t* y, int64_t m) {
  product<W4A16>(*b, x, y, m);
}
extern "C" void w4a16_fp32(const Blocks* b, const float* x, float* y, int64_t m) {
  product<W4A16>(*b, x, y, m);
}
extern "C" void w4a8_bf16(const Blocks* b, const uint16_t* x, uint16_t* y, int64_t m) {
  product<W4A8>(*b, x, y, m);
}
extern "C" void w4a8_fp32(const Blocks* b, const float* x, float* y, int64_t m) {
  product<W4A8>(*b, x, y, m);
}
#endif
