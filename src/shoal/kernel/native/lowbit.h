// What the products with 4-bit weights share: how weights and rows lie in memory, and how the
// work is cut.
//
// Weights lie in slices of 32 outputs; a slice is one run of memory that is read from its first
// byte to its last: for each segment of K (a group, or a part of one) the codes, then 32 scales.
// Codes: for each 8 inputs, 16 outputs in a line of 64 bytes, the next 16 in the next line; the
// 32 bits of an output are its codes of these inputs, the first in the lowest bits. Two of four:
// for each 16 inputs two lines of kept codes and one of places (32 bytes each 16 outputs).
//
// Work is cut in units, a chunk of K of a slice, numbered slice by slice; every thread has an
// equal run of units, though it begins and ends inside a slice. Chunks are summed from zero and
// added in their order, whoever computed them: results do not depend on the threads.
#include "simd.h"

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512BF16__) && \
    defined(__AVX512VNNI__)
#define LOWBIT 1
#include <cstdlib>
#include <sys/mman.h>

namespace {

struct Blocks {
  const uint8_t* at;
  const float* bias;
  int64_t n, k, seg, nseg, chunk, nchunk, slices, record, sparse;
  const uint16_t* values;             // what codes mean in bf16, twice
};

constexpr int64_t WIDE = 32;          // outputs of a slice
constexpr int64_t SEG = 256;          // inputs of the largest segment
constexpr int64_t AHEAD = 2048;       // bytes

// Rows in blocks of R lines. fp32 rows are three lines of bf16 whose sum they are.
struct Rows { int64_t m, lines, per, R, blocks; };

struct Scratch {
  char* at = nullptr;
  size_t size = 0;
  char* room(size_t wanted) {
    if (wanted > size) {
      std::free(at);
      size = (wanted + 4095) / 4096 * 4096;
      at = static_cast<char*>(std::aligned_alloc(4096, size));
    }
    return at;
  }
  ~Scratch() { std::free(at); }
};
thread_local Scratch scratch;

// Codes of a segment as they are where all weights are kept.
inline const uint8_t* dense(const Blocks& b, const uint8_t* record, uint8_t* room) {
  if (!b.sparse) return record;
  const __m512i low = _mm512_set1_epi16(0xf), four = _mm512_set1_epi16(0xc);
  const __m512i zero = _mm512_set1_epi32(int(0x88888888u));
  for (int64_t i = 0; i < b.seg / 16; i++) {
    const uint8_t* from = record + i * 192;
    for (int o = 0; o < 2; o++) {
      const __m512i v = _mm512_loadu_si512(from + o * 64);
      const __m512i p =
          _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(from + 128 + o * 32)));
      _mm_prefetch((const char*)from + o * 64 + AHEAD, _MM_HINT_T0);
      const __m512i first = _mm512_or_si512(
          _mm512_sllv_epi16(_mm512_and_si512(v, low), _mm512_and_si512(_mm512_slli_epi16(p, 2), four)),
          _mm512_sllv_epi16(_mm512_and_si512(_mm512_srli_epi16(v, 4), low), _mm512_and_si512(p, four)));
      const __m512i second = _mm512_or_si512(
          _mm512_sllv_epi16(_mm512_and_si512(_mm512_srli_epi16(v, 8), low),
                            _mm512_and_si512(_mm512_srli_epi16(p, 2), four)),
          _mm512_sllv_epi16(_mm512_srli_epi16(v, 12), _mm512_and_si512(_mm512_srli_epi16(p, 4), four)));
      // Kept codes are stored with their top bit turned, so that what is not kept is code 8.
      _mm512_store_si512(room + (2 * i) * 128 + o * 64, _mm512_xor_si512(first, zero));
      _mm512_store_si512(room + (2 * i + 1) * 128 + o * 64, _mm512_xor_si512(second, zero));
    }
    _mm_prefetch((const char*)from + 128 + AHEAD, _MM_HINT_T0);
  }
  return room;
}

inline const uint8_t* segment(const Blocks& b, int64_t slice, int64_t g) {
  return b.at + (slice * b.nseg + g) * b.record;
}
inline __m512 scales(const Blocks& b, const uint8_t* record, int o) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(record + b.record - 64 + o * 32)));
}

// The values of codes twice: the index has a fifth bit that means nothing.
inline __m512i values_table(const Blocks& b) { return _mm512_load_si512(b.values); }

// ---- rows as bf16 lines: [block][32 inputs][R][32], inputs k and k + 4 of each 8 side by side.

struct Halves {
  using Line = uint16_t;
  static constexpr int64_t step(const Blocks&) { return 32; }

  static __m512i order() {
    alignas(64) static const uint16_t from[32] = {0,  4,  1,  5,  2,  6,  3,  7,  8,  12, 9,
                                                  13, 10, 14, 11, 15, 16, 20, 17, 21, 18, 22,
                                                  19, 23, 24, 28, 25, 29, 26, 30, 27, 31};
    return _mm512_load_si512(from);
  }
  static constexpr int64_t lines(const uint16_t*) { return 1; }
  static constexpr int64_t lines(const float*) { return 3; }

  static void put(const uint16_t* x, int64_t n, uint16_t* at) {
    const __m512i v = n > 0 ? _mm512_maskz_loadu_epi16(low32(n), x) : _mm512_setzero_si512();
    _mm512_store_si512(at, _mm512_permutexvar_epi16(order(), v));
  }
  // x = a + b + c, each of 8 significant bits; what is not finite stands in a.
  static void put(const float* x, int64_t n, uint16_t* at) {
    __m512 v[2];
    v[0] = n > 0 ? _mm512_maskz_loadu_ps(low16(n), x) : _mm512_setzero_ps();
    v[1] = n > 16 ? _mm512_maskz_loadu_ps(low16(n - 16), x + 16) : _mm512_setzero_ps();
    for (int line = 0; line < 3; line++) {
      const __m512i part = (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]);
      _mm512_store_si512(at + 32 * line, _mm512_permutexvar_epi16(order(), part));
      for (int i = 0; i < 2; i++) {
        const __m256i half = i ? _mm512_extracti64x4_epi64(part, 1) : _mm512_castsi512_si256(part);
        const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        const __mmask16 finite = ~_mm512_fpclass_ps_mask(wide, 0x99);
        v[i] = _mm512_maskz_sub_ps(finite, v[i], wide);
      }
    }
  }

  // The share of one thread.
  template <class X>
  static void pack(const Blocks& b, const Rows& rows, const X* x, char* room, int t, int T) {
    const int64_t steps = b.nseg * b.seg / 32;
    uint16_t* out = (uint16_t*)room;
    const Range part = share(steps, 1, t, T);
    for (int64_t block = 0; block < rows.blocks; block++)
      for (int64_t s = part.first; s < part.last; s++) {
        uint16_t* at = out + (block * steps + s) * rows.R * 32;
        int64_t r = 0;
        for (; r + rows.lines <= rows.R; r += rows.lines) {
          const int64_t row = block * rows.per + r / rows.lines;
          put(x + row * b.k + s * 32, row < rows.m ? b.k - s * 32 : 0, at + r * 32);
        }
        for (; r < rows.R; r++) _mm512_store_si512(at + r * 32, _mm512_setzero_si512());
      }
  }
  static size_t bytes(const Blocks& b, const Rows& rows) {
    return size_t(rows.blocks * rows.R * b.nseg * b.seg * 2);
  }
};

// ---- rows as int8 and a scale for each segment: [block][step][R][step], inputs 0 2 4 6 1 3 5 7.

struct Bytes {
  using Line = int8_t;
  static int64_t step(const Blocks& b) { return b.seg == 32 ? 32 : 64; }
  template <class X>
  static constexpr int64_t lines(const X*) {
    return 1;
  }
  static __m512 load(const float* x, int64_t n) {
    return n > 0 ? _mm512_maskz_loadu_ps(low16(n), x) : _mm512_setzero_ps();
  }
  static __m512 load(const uint16_t* x, int64_t n) {
    if (n <= 0) return _mm512_setzero_ps();
    const __m512i v = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(low16(n), x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
  }

  // Codes [block][K], then scales and -8 times the sums of the codes [block][segment][R].
  static float* scale(const Blocks& b, const Rows& rows, char* room) {
    return (float*)(room + (rows.blocks * rows.R * b.nseg * b.seg + 63) / 64 * 64);
  }
  static int32_t* offset(const Blocks& b, const Rows& rows, char* room) {
    return (int32_t*)(scale(b, rows, room) + rows.blocks * rows.R * b.nseg);
  }
  static size_t bytes(const Blocks& b, const Rows& rows) {
    return size_t(rows.blocks * rows.R * b.nseg * (b.seg + 8) + 64);
  }

  template <class X>
  static void pack(const Blocks& b, const Rows& rows, const X* x, char* room, int t, int T) {
    const Range part = share(b.nseg, 1, t, T);
    const int64_t wide = step(b), lane = rows.R * wide;
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    for (int64_t block = 0; block < rows.blocks; block++)
      for (int64_t g = part.first; g < part.last; g++)
        for (int64_t r = 0; r < rows.R; r++) {
          const int64_t row = block * rows.per + r;
          const X* from = x + row * b.k + g * b.seg;
          const int64_t n = row < rows.m ? b.k - g * b.seg : 0;
          __m512 v[SEG / 16], most = _mm512_setzero_ps();
          __mmask16 odd = 0;
          const int64_t vectors = b.seg / 16;
          for (int64_t i = 0; i < vectors; i++) {
            v[i] = load(from + i * 16, n - i * 16);
            most = _mm512_max_ps(most, _mm512_abs_ps(v[i]));
            odd |= _mm512_fpclass_ps_mask(v[i], 0x99);
          }
          const float largest = _mm512_reduce_max_ps(most);
          const bool some = largest > 1e-30f;
          const __m512 inverse = _mm512_set1_ps(some ? 127.0f / largest : 0.0f);
          __m512i sum = _mm512_setzero_si512();
          int8_t* at = (int8_t*)room + block * rows.R * b.nseg * b.seg +
                       g * b.seg / wide * lane + r * wide;
          for (int64_t i = 0; i < vectors; i++) {
            const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
            sum = _mm512_add_epi32(sum, q);
            const int64_t place = i * 16 / wide * lane + i * 16 % wide;
            _mm_storeu_si128((__m128i*)(at + place),
                             _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(q), order));
          }
          const int64_t index = (block * b.nseg + g) * rows.R + r;
          scale(b, rows, room)[index] =
              odd ? __builtin_nanf("") : (some ? largest / 127.0f : 0.0f);
          offset(b, rows, room)[index] = odd ? 0 : -8 * _mm512_reduce_add_epi32(sum);
        }
  }
};

// ---- the cut over threads

template <class X>
void write(const Blocks& b, const Rows& rows, int64_t slice, const float* total, X* y) {
  for (int64_t block = 0, row = 0; block < rows.blocks; block++, total += rows.R * WIDE) {
    const int64_t end = rows.m - row < rows.per ? rows.m : row + rows.per;
    for (const float* from = total; row < end; row++, from += rows.lines * WIDE)
      for (int o = 0; o < 2; o++) {
        const int64_t first = slice * WIDE + o * 16, left = b.n - first;
        if (left <= 0) break;
        const __mmask16 mask = low16(left);
        __m512 sum = _mm512_load_ps(from + o * 16);
        for (int64_t line = 1; line < rows.lines; line++)
          sum = _mm512_add_ps(sum, _mm512_load_ps(from + line * WIDE + o * 16));
        if (b.bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, b.bias + first));
        if constexpr (sizeof(X) == 4)
          _mm512_mask_storeu_ps(y + row * b.n + first, mask, sum);
        else
          _mm256_mask_storeu_epi16(y + row * b.n + first, mask,
                                   (__m256i)_mm512_cvtneps_pbh(sum));
      }
  }
}

inline void add(float* total, const float* part, int64_t n) {
  for (int64_t i = 0; i < n; i += 16)
    _mm512_store_ps(total + i, _mm512_add_ps(_mm512_load_ps(total + i), _mm512_load_ps(part + i)));
}

// Up to E::most lines at once.
template <class E, class X>
void pass(const Blocks& b, const X* x, X* y, const Rows& rows) {
  const int64_t units = b.slices * b.nchunk, size = rows.blocks * rows.R * WIDE;
  const int most = omp_get_max_threads();
  const size_t lines = (E::Packing::bytes(b, rows) + 4095) / 4096 * 4096;
  // Few rows are packed by every thread for itself, which is faster than to wait for others.
  const bool alone = rows.m * b.k <= 16384;
  const size_t copies = alone ? most : 1;
  char* shared = scratch.room(lines * copies + size_t(most) * b.nchunk * size * sizeof(float));
  float* parts = (float*)(shared + lines * copies);
#pragma omp parallel
  {
    const int t = omp_get_thread_num(), T = omp_get_num_threads();
    char* room = shared + (alone ? t * lines : 0);
    E::Packing::template pack<X>(b, rows, x, room, alone ? 0 : t, alone ? 1 : T);
    E engine(b, rows, room);
    auto first = [&](int at) { return units * at / T; };
    bool splits = false;
    for (int at = 1; at < T; at++) splits |= first(at) % b.nchunk != 0;
    // Whose place the sums of a slice go to that several threads share: of the first that begins
    // inside it; 0 if none does.
    auto owner = [&](int64_t slice) {
      for (int at = 1; at < T; at++)
        if (first(at) > slice * b.nchunk && first(at) < (slice + 1) * b.nchunk) return at;
      return 0;
    };
    alignas(64) float total[E::most * WIDE], sum[E::most * WIDE];
    if (!alone) {
#pragma omp barrier
    }
    for (int64_t unit = first(t); unit < first(t + 1);) {
      const int64_t slice = unit / b.nchunk, from = unit % b.nchunk;
      const int64_t to = from + first(t + 1) - unit < b.nchunk ? from + first(t + 1) - unit : b.nchunk;
      const bool whole = from == 0 && to == b.nchunk;
      float* place = whole ? nullptr : parts + owner(slice) * b.nchunk * size;
      for (int64_t c = from; c < to; c++) {
        const int64_t last = (c + 1) * b.chunk < b.nseg ? (c + 1) * b.chunk : b.nseg;
        float* out = !whole ? place + c * size : c ? sum : total;
        engine.chunk(slice, c * b.chunk, last, out, whole && c ? total : nullptr);
      }
      if (whole) {
        engine.settle();
        write(b, rows, slice, total, y);
      }
      unit += to - from;
    }
    engine.done();
    if (splits) {
#pragma omp barrier
    }
    if (t > 0 && first(t) % b.nchunk && owner(first(t) / b.nchunk) == t) {
      const int64_t slice = first(t) / b.nchunk;
      float* place = parts + t * b.nchunk * size;
      for (int64_t c = 1; c < b.nchunk; c++) add(place, place + c * size, size);
      write(b, rows, slice, place, y);
    }
  }
}

template <class E, class X>
void product(const Blocks& b, const X* x, X* y, int64_t m) {
  constexpr int64_t lines = E::Packing::lines((const X*)nullptr);
  constexpr int64_t full = E::block / lines, largest = E::most / E::block * full;
  for (int64_t i = 0; i < m; i += largest) {
    const int64_t now = m - i < largest ? m - i : largest, blocks = (now + full - 1) / full;
    const int64_t per = E::even ? (now + blocks - 1) / blocks : now < full ? now : full;
    const Rows rows = {now, lines, per, per * lines, blocks};
    pass<E, X>(b, x + i * b.k, y + i * b.n, rows);
  }
}

}  // namespace

// Memory that is about to be filled comes in large pages, where the system gives them.
extern "C" void large_pages(char* at, int64_t bytes) {
  const uintptr_t page = 2 << 20, first = ((uintptr_t)at + page - 1) / page * page;
  const uintptr_t last = ((uintptr_t)at + bytes) / page * page;
  if (last > first) madvise((void*)first, last - first, MADV_HUGEPAGE);
}
#endif
