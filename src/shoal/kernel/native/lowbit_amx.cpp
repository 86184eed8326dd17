// The products of lowbit.cpp by matrix tiles (AMX): 32 outputs, and 16 lines or twice 16, at
// once. A segment of weights is unpacked into a buffer that stays in the first cache while the
// tiles multiply the segment before it, step by step beside each other. Every line of tiles is
// its own row, so that a row has the same bits in any company.
#include "lowbit.h"

#if defined(LOWBIT) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};

// The intrinsics of tiles do not tell the compiler what memory they touch.
inline void fence() { asm volatile("" ::: "memory"); }

template <class E, int BYTES>
struct Amx {
  static constexpr int64_t most = 64;
  static int64_t padded(int64_t lines) { return lines; }
  // What is stored into one buffer and loaded from the other meanwhile lies at other places of
  // a page: the processor would wait for stores whose last twelve bits are those of a load.
  static constexpr int64_t APART = SEG * WIDE * BYTES + 2048;

  const Blocks& b;
  const Rows& rows;
  const char* room;
  alignas(64) uint8_t codes[SEG * 16];
  alignas(64) char weights[2 * APART];
  alignas(64) char tiles[2][4 * 1024];

  // Sums of one or two blocks of rows that are to be scaled and added to what was there.
  struct Sums {
    const char* tiles;
    int64_t g, block, blocks;
    __m512 scale[2];
    float* out;
  };

  // Tiles 0 to 3 sums, 4 and 5 rows, 6 and 7 weights.
  Amx(const Blocks& b, const Rows& rows, const char* room) : b(b), rows(rows), room(room) {
    const int64_t across = E::across(b);  // bytes of a line of rows
    TileConfig config;
    for (int i = 0; i < 8; i++) {
      config.rows[i] = uint8_t(i < 6 ? rows.R : across / 4);
      config.colsb[i] = uint16_t(i == 4 || i == 5 ? across : 64);
    }
    _tile_loadconfig(&config);
  }
  void done() { _tile_release(); }

  void chunk(int64_t slice, int64_t from, int64_t to, float* out) {
    const int64_t steps = b.seg * BYTES / E::across(b);
    char* now = weights;
    char* then = weights + APART;
    const uint8_t* next = dense(b, segment(b, slice, from), codes);
    for (int64_t s = 0; s < steps; s++) unpack(next, now, s);
    Sums last{};
    int turn = 0;
    for (int64_t g = from; g < to; g++) {
      next = g + 1 < to ? dense(b, segment(b, slice, g + 1), codes) : nullptr;
      const uint8_t* record = segment(b, slice, g);
      for (int64_t block = 0; block < rows.blocks; block += 2) {
        char* sums = tiles[turn];
        const int64_t blocks = rows.blocks - block < 2 ? 1 : 2;
        if (blocks == 2)
          multiply<2>(g, block, now, sums, steps, next, then, last);
        else
          multiply<1>(g, block, now, sums, steps, next, then, last);
        last = {sums, g, block, blocks, {scales(b, record, 0), scales(b, record, 1)}, out};
        next = nullptr;
        turn ^= 1;
      }
      std::swap(now, then);
    }
    finish(last, 0, 1);
  }

  void unpack(const uint8_t* from, char* to, int64_t step) const {
    static_cast<const E&>(*this).unpack_step(from, to, step, b.sparse ? 0 : AHEAD);
  }
  // Part `s` of `steps` of the lines.
  void finish(const Sums& sums, int64_t s, int64_t steps) const {
    const int64_t first = rows.R * s / steps, last = rows.R * (s + 1) / steps;
    for (int64_t i = 0; i < sums.blocks; i++)
      static_cast<const E&>(*this).scaled(sums.g, sums.block + i, sums.tiles + 2048 * i, sums.scale,
                                          sums.out, first, last);
  }

  // While the tiles multiply, the vector units unpack the segment to come into `then` and finish
  // the sums of the multiplication before.
  template <int N>
  void multiply(int64_t g, int64_t block, const char* now, char* sums, int64_t steps,
                const uint8_t* next, char* then, const Sums& last) {
    const int64_t across = E::across(b), line = rows.R * across, tile = across / 4 * 64;
    const char* x = room + (block * b.nseg + g) * steps * line;
    const char* z = x + b.nseg * steps * line;
    fence();
    _tile_zero(0); _tile_zero(1);
    if (N == 2) { _tile_zero(2); _tile_zero(3); }
    for (int64_t s = 0; s < steps; s++) {
      _tile_loadd(4, x + s * line, across);
      _tile_loadd(6, now + 2 * s * tile, 64);
      E::dot0();
      _tile_loadd(7, now + (2 * s + 1) * tile, 64);
      E::dot1();
      if (N == 2) {
        _tile_loadd(5, z + s * line, across);
        E::dot2();
        E::dot3();
      }
      if (next) unpack(next, then, s);
      finish(last, s, steps);
    }
    _tile_stored(0, sums, 64); _tile_stored(1, sums + 1024, 64);
    if (N == 2) { _tile_stored(2, sums + 2048, 64); _tile_stored(3, sums + 3072, 64); }
    fence();
  }
};

struct W4A16 : Amx<W4A16, 2> {
  using Packing = Halves;
  using Amx::Amx;
  static int64_t across(const Blocks&) { return 64; }
  static void dot0() { _tile_dpbf16ps(0, 4, 6); }
  static void dot1() { _tile_dpbf16ps(1, 4, 7); }
  static void dot2() { _tile_dpbf16ps(2, 5, 6); }
  static void dot3() { _tile_dpbf16ps(3, 5, 7); }

  void unpack_step(const uint8_t* from, char* to, int64_t step, int64_t ahead) const {
    const __m512i table = values_table();
    to += step * 2048;
    for (int j = 0; j < 4; j++)
      for (int o = 0; o < 2; o++) {
        const uint8_t* at = from + (step * 4 + j) * 128 + o * 64;
        const __m512i d = _mm512_loadu_si512(at);
        _mm_prefetch((const char*)at + ahead, _MM_HINT_T0);
        char* line = to + o * 1024 + j * 256;
        _mm512_store_si512(line, _mm512_permutexvar_epi16(d, table));
        _mm512_store_si512(line + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(d, 4), table));
        _mm512_store_si512(line + 128, _mm512_permutexvar_epi16(_mm512_srli_epi16(d, 8), table));
        _mm512_store_si512(line + 192, _mm512_permutexvar_epi16(_mm512_srli_epi16(d, 12), table));
      }
  }

  // Lines first .. last of a block.
  void scaled(int64_t, int64_t block, const char* sums, const __m512* scale, float* out,
              int64_t first, int64_t last) const {
    float* at = out + block * rows.R * WIDE;
    for (int64_t r = first; r < last; r++)
      for (int o = 0; o < 2; o++) {
        float* to = at + r * WIDE + o * 16;
        const __m512 sum = _mm512_load_ps(sums + o * 1024 + r * 64);
        _mm512_store_ps(to, _mm512_fmadd_ps(sum, scale[o], _mm512_load_ps(to)));
      }
  }
};

struct W4A8 : Amx<W4A8, 1> {
  using Packing = Bytes;
  using Amx::Amx;
  static int64_t across(const Blocks& b) { return Bytes::step(b); }
  static void dot0() { _tile_dpbsud(0, 4, 6); }
  static void dot1() { _tile_dpbsud(1, 4, 7); }
  static void dot2() { _tile_dpbsud(2, 5, 6); }
  static void dot3() { _tile_dpbsud(3, 5, 7); }

  void unpack_step(const uint8_t* from, char* to, int64_t step, int64_t ahead) const {
    const __m512i low = _mm512_set1_epi8(0xf);
    const int64_t each = Bytes::step(b) / 8, tile = each * 128;
    to += step * 2 * tile;
    for (int64_t j = 0; j < each; j++)
      for (int o = 0; o < 2; o++) {
        const uint8_t* at = from + (step * each + j) * 128 + o * 64;
        const __m512i d = _mm512_loadu_si512(at);
        _mm_prefetch((const char*)at + ahead, _MM_HINT_T0);
        char* line = to + o * tile + j * 128;
        _mm512_store_si512(line, _mm512_and_si512(d, low));
        _mm512_store_si512(line + 64, _mm512_and_si512(_mm512_srli_epi16(d, 4), low));
      }
  }

  void scaled(int64_t g, int64_t block, const char* sums, const __m512* by, float* out,
              int64_t first, int64_t last) const {
    float* at = out + block * rows.R * WIDE;
    const int64_t index = (block * b.nseg + g) * rows.R;
    const float* scale = Bytes::scale(b, rows, const_cast<char*>(room)) + index;
    const int32_t* offset = Bytes::offset(b, rows, const_cast<char*>(room)) + index;
    for (int64_t r = first; r < last; r++)
      for (int o = 0; o < 2; o++) {
        float* to = at + r * WIDE + o * 16;
        const __m512i exact = _mm512_add_epi32(_mm512_load_si512(sums + o * 1024 + r * 64),
                                               _mm512_set1_epi32(offset[r]));
        const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_set1_ps(scale[r]));
        _mm512_store_ps(to, _mm512_fmadd_ps(part, by[o], _mm512_load_ps(to)));
      }
  }
};

}  // namespace

// Asks the system for the tiles; 0 if this process may use them.
extern "C" int tiles_allowed() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  return int(syscall(SYS_arch_prctl, REQUEST, TILE_DATA));
}
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
