// The products of lowbit.cpp by matrix tiles (AMX): 32 outputs, and 16 lines or twice 16, at
// once. A segment of weights is unpacked into a buffer that stays in the first cache while the
// tiles multiply the segment before it; every line of tiles is its own row, so that a row has
// the same bits in any company.
#include "lowbit.h"

#if defined(LOWBIT) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>

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

  const Blocks& b;
  const Rows& rows;
  const char* room;
  alignas(64) uint8_t codes[SEG * 16];
  alignas(64) char weights[2][SEG * WIDE * BYTES];
  alignas(64) char tiles[4][1024];

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
    E& engine = static_cast<E&>(*this);
    for (int64_t g = from; g <= to; g++) {
      if (g < to)
        engine.unpack(dense(b, segment(b, slice, g), codes), weights[g & 1], b.sparse ? 0 : AHEAD);
      fence();
      if (g > from) multiply(slice, g - 1, out);
    }
  }

  void multiply(int64_t slice, int64_t g, float* out) {
    E& engine = static_cast<E&>(*this);
    const uint8_t* record = segment(b, slice, g);
    const __m512 scale[2] = {scales(b, record, 0), scales(b, record, 1)};
    const int64_t across = E::across(b), steps = b.seg * BYTES / across;
    const int64_t line = rows.R * across, tile = across / 4 * 64;
    const char* w = weights[g & 1];
    auto at = [&](int64_t block) { return room + (block * b.nseg + g) * steps * line; };
    int64_t block = 0;
    for (; block + 2 <= rows.blocks; block += 2) {
      const char *x = at(block), *z = at(block + 1);
      _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
      for (int64_t s = 0; s < steps; s++) {
        _tile_loadd(4, x + s * line, across);
        _tile_loadd(6, w + 2 * s * tile, 64);
        E::dot0();
        _tile_loadd(7, w + (2 * s + 1) * tile, 64);
        E::dot1();
        _tile_loadd(5, z + s * line, across);
        E::dot2();
        E::dot3();
      }
      _tile_stored(0, tiles[0], 64); _tile_stored(1, tiles[1], 64);
      _tile_stored(2, tiles[2], 64); _tile_stored(3, tiles[3], 64);
      fence();
      engine.scaled(g, block, tiles[0], scale, out);
      engine.scaled(g, block + 1, tiles[2], scale, out);
    }
    if (block < rows.blocks) {
      const char* x = at(block);
      _tile_zero(0); _tile_zero(1);
      for (int64_t s = 0; s < steps; s++) {
        _tile_loadd(4, x + s * line, across);
        _tile_loadd(6, w + 2 * s * tile, 64);
        E::dot0();
        _tile_loadd(7, w + (2 * s + 1) * tile, 64);
        E::dot1();
      }
      _tile_stored(0, tiles[0], 64); _tile_stored(1, tiles[1], 64);
      fence();
      engine.scaled(g, block, tiles[0], scale, out);
    }
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

  void unpack(const uint8_t* from, char* to, int64_t ahead) const {
    const __m512i table = values_table();
    for (int64_t i = 0; i < b.seg / 8; i += 4, to += 2048)
      for (int j = 0; j < 4; j++)
        for (int o = 0; o < 2; o++) {
          const uint8_t* at = from + (i + j) * 128 + o * 64;
          const __m512i d = _mm512_loadu_si512(at);
          _mm_prefetch((const char*)at + ahead, _MM_HINT_T0);
          char* line = to + o * 1024 + j * 256;
          _mm512_store_si512(line, _mm512_permutexvar_epi16(d, table));
          _mm512_store_si512(line + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(d, 4), table));
          _mm512_store_si512(line + 128, _mm512_permutexvar_epi16(_mm512_srli_epi16(d, 8), table));
          _mm512_store_si512(line + 192, _mm512_permutexvar_epi16(_mm512_srli_epi16(d, 12), table));
        }
  }

  void scaled(int64_t, int64_t block, const char* sums, const __m512* scale, float* out) const {
    float* at = out + block * rows.R * WIDE;
    for (int64_t r = 0; r < rows.R; r++)
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

  void unpack(const uint8_t* from, char* to, int64_t ahead) const {
    const __m512i low = _mm512_set1_epi8(0xf);
    const int64_t each = Bytes::step(b) / 8, tile = each * 128;
    for (int64_t i = 0; i < b.seg / 8; i += each, to += 2 * tile)
      for (int64_t j = 0; j < each; j++)
        for (int o = 0; o < 2; o++) {
          const uint8_t* at = from + (i + j) * 128 + o * 64;
          const __m512i d = _mm512_loadu_si512(at);
          _mm_prefetch((const char*)at + ahead, _MM_HINT_T0);
          char* line = to + o * tile + j * 128;
          _mm512_store_si512(line, _mm512_and_si512(d, low));
          _mm512_store_si512(line + 64, _mm512_and_si512(_mm512_srli_epi16(d, 4), low));
        }
  }

  void scaled(int64_t g, int64_t block, const char* sums, const __m512* by, float* out) const {
    float* at = out + block * rows.R * WIDE;
    const int64_t index = (block * b.nseg + g) * rows.R;
    const float* scale = Bytes::scale(b, rows, const_cast<char*>(room)) + index;
    const int32_t* offset = Bytes::offset(b, rows, const_cast<char*>(room)) + index;
    for (int64_t r = 0; r < rows.R; r++)
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
