// The products of lowbit.cpp by matrix tiles (AMX), in turns of four tiles of sums: 32 outputs
// and up to twice 16 lines, or 16 outputs and up to four times 16 lines. While the tiles multiply
// a turn's weights, those of the next are unpacked into the places just read, step by step, and
// the sums of the turn before are scaled: what a turn needs has to fit the first cache. Every
// line of tiles is its own row, so that a row has the same bits in any company.
#include "lowbit.h"
#include "tiles.h"

#if defined(LOWBIT) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
namespace {

template <class E, int BYTES>
struct Amx {
  static constexpr int64_t most = 64, block = 16;
  static constexpr bool even = false;

  const Blocks& b;
  const Rows& rows;
  const char* room;
  const int64_t across, steps;    // bytes of a line of rows, steps of a segment
  const int64_t columns, halves;  // of 16 outputs at once, turns of a segment
  alignas(64) uint8_t codes[SEG * 16];
  alignas(64) char weights[SEG * WIDE * BYTES];
  alignas(64) char tiles[4 * 1024];

  // Sums of a turn that are to be scaled and added to what was there, or to nothing; the end of
  // a chunk is added to the sum of those before.
  struct Sums {
    int64_t g = 0, half = 0, count = 0;
    const uint8_t* record = nullptr;
    float* out = nullptr;
    float* total = nullptr;
    bool first = false;
  };
  Sums last;
  const uint8_t* at = nullptr;     // codes that are unpacked next
  const uint8_t* ready = nullptr;  // the segment whose first weights stand in `weights`

  // Tiles 0 to 3 sums, 4 and 5 rows, 6 and 7 weights.
  Amx(const Blocks& b, const Rows& rows, const char* room)
      : b(b), rows(rows), room(room), across(E::line_of(b)), steps(b.seg * BYTES / across),
        columns(rows.blocks > 2 ? 1 : 2), halves(2 / columns) {
    TileConfig config;
    for (int i = 0; i < 8; i++) {
      config.rows[i] = uint8_t(i < 6 ? rows.R : across / 4);
      config.colsb[i] = uint16_t(i == 4 || i == 5 ? across : 64);
    }
    _tile_loadconfig(&config);
  }
  void done() {
    settle();
    _tile_release();
  }
  // Makes the sums what they are to be.
  __attribute__((noinline)) void settle() {
    for (int64_t i = 0; i < last.count; i++) finish(i);
    last.count = 0;
  }

  // Sums of a chunk in `out`, or added to `total`, once the turn behind it or settle() is done.
  __attribute__((noinline)) void chunk(int64_t slice, int64_t from, int64_t to, float* out,
                                       float* total) {
    const uint8_t* record = segment(b, slice, from);
    const uint8_t* const end = b.at + b.slices * b.nseg * b.record;
    if (ready != record) {
      at = dense(b, record, codes);
      for (int64_t s = 0; s < steps; s++) unpack(s, 0);
    }
    for (int64_t g = from; g < to; g++, record += b.record) {
      for (int64_t half = 0; half < halves; half++) {
        int64_t following = half + 1;
        if (following == halves) {
          following = 0;
          ready = record + b.record < end ? record + b.record : nullptr;
          at = ready ? dense(b, ready, codes) : nullptr;
        }
        multiply(g, following);
        float* over = g + 1 < to ? nullptr : total;
        last = {g, half, rows.blocks * columns, record, out, over, g == from};
      }
    }
  }

  void unpack(int64_t step, int64_t half) {
    static_cast<const E&>(*this).unpack_step(at, weights, step, b.sparse ? 0 : AHEAD, half);
  }
  // Tile `i` of the turn before.
  __attribute__((noinline)) void finish(int64_t i) const {
    alignas(64) static const float none[16] = {};
    const E& engine = static_cast<const E&>(*this);
    const int64_t o = columns == 1 ? last.half : i & 1, block = columns == 1 ? i : i >> 1;
    const int64_t place = block * rows.R * WIDE + o * 16, end = rows.R;
    const __m512 scale = scales(b, last.record, int(o));
    const char* sums = tiles + 1024 * i;
    const auto lines = engine.lines(last.g, block);
    float* out = last.out + place;
    const float* base = last.first ? none : out;
    const int64_t step = last.first ? 0 : WIDE;
    if (last.total) {
      float* total = last.total + place;
#pragma GCC unroll 4
      for (int64_t r = 0; r < end; r++) {
        const __m512 sum = E::scaled(lines, sums, r, scale, _mm512_load_ps(base + r * step));
        _mm512_store_ps(total + r * WIDE, _mm512_add_ps(_mm512_load_ps(total + r * WIDE), sum));
      }
    } else {
#pragma GCC unroll 4
      for (int64_t r = 0; r < end; r++)
        _mm512_store_ps(out + r * WIDE,
                        E::scaled(lines, sums, r, scale, _mm512_load_ps(base + r * step)));
    }
  }

  // While the tiles multiply, the vector units unpack the weights of the next turn, of outputs
  // `half`, and finish the sums of the turn before.
  void multiply(int64_t g, int64_t half) {
    const int64_t across = E::line_of(b), steps = this->steps, blocks = rows.blocks;
    const int64_t line = rows.R * across, tile = across * 16, block = b.nseg * steps * line;
    const int64_t count = last.count;
    const bool wide = columns == 2, unpacks = at != nullptr;
    int64_t done = 0;
    const char* x = room + g * steps * line;
    fence();
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t s = 0; s < steps; s++, x += line) {
      if (wide) {
        _tile_loadd(4, x, across);
        _tile_loadd(6, weights + 2 * s * tile, 64);
        E::dot046();
        _tile_loadd(7, weights + (2 * s + 1) * tile, 64);
        E::dot147();
        if (blocks == 2) {
          _tile_loadd(5, x + block, across);
          E::dot256();
          E::dot357();
        }
      } else {
        _tile_loadd(6, weights + s * tile, 64);
        _tile_loadd(4, x, across);
        E::dot046();
        _tile_loadd(5, x + block, across);
        E::dot156();
        _tile_loadd(4, x + 2 * block, across);
        E::dot246();
        if (blocks == 4) {
          _tile_loadd(5, x + 3 * block, across);
          E::dot356();
        }
      }
      fence();
      if (unpacks) unpack(s, half);
      for (; done * steps < (s + 1) * count; done++) finish(done);
    }
    _tile_stored(0, tiles, 64); _tile_stored(1, tiles + 1024, 64);
    if (blocks > 1) { _tile_stored(2, tiles + 2048, 64); _tile_stored(3, tiles + 3072, 64); }
    fence();
  }
};

struct W4A16 : Amx<W4A16, 2> {
  using Packing = Halves;
  using Amx::Amx;
  static int64_t line_of(const Blocks&) { return 64; }
  static void dot046() { _tile_dpbf16ps(0, 4, 6); }
  static void dot147() { _tile_dpbf16ps(1, 4, 7); }
  static void dot256() { _tile_dpbf16ps(2, 5, 6); }
  static void dot357() { _tile_dpbf16ps(3, 5, 7); }
  static void dot156() { _tile_dpbf16ps(1, 5, 6); }
  static void dot246() { _tile_dpbf16ps(2, 4, 6); }
  static void dot356() { _tile_dpbf16ps(3, 5, 6); }

  void unpack_step(const uint8_t* from, char* to, int64_t step, int64_t ahead,
                   int64_t half) const {
    const __m512i table = values_table(b);
    // Shifts to the right by 4, 8 and 12 that another port computes than the look-ups.
    const __m512i by[3] = {_mm512_set1_epi16(1 << 12), _mm512_set1_epi16(1 << 8),
                           _mm512_set1_epi16(1 << 4)};
    to += step * columns * 1024;
    from += step * 512 + half * 64;
    for (int64_t o = 0; o < columns; o++)
      for (int j = 0; j < 4; j++) {
        const uint8_t* at = from + j * 128 + o * 64;
        const __m512i d = _mm512_loadu_si512(at);
        _mm_prefetch((const char*)at + ahead, _MM_HINT_T0);
        char* line = to + o * 1024 + j * 256;
        _mm512_store_si512(line, _mm512_permutexvar_epi16(d, table));
        for (int i = 1; i < 4; i++)
          _mm512_store_si512(line + 64 * i,
                             _mm512_permutexvar_epi16(_mm512_mulhi_epu16(d, by[i - 1]), table));
      }
  }

  struct Lines {};
  Lines lines(int64_t, int64_t) const { return {}; }
  static __m512 scaled(Lines, const char* sums, int64_t r, __m512 scale, __m512 more) {
    return _mm512_fmadd_ps(_mm512_load_ps(sums + r * 64), scale, more);
  }
};

struct W4A8 : Amx<W4A8, 1> {
  using Packing = Bytes;
  using Amx::Amx;
  static int64_t line_of(const Blocks& b) { return Bytes::step(b); }
  static void dot046() { _tile_dpbsud(0, 4, 6); }
  static void dot147() { _tile_dpbsud(1, 4, 7); }
  static void dot256() { _tile_dpbsud(2, 5, 6); }
  static void dot357() { _tile_dpbsud(3, 5, 7); }
  static void dot156() { _tile_dpbsud(1, 5, 6); }
  static void dot246() { _tile_dpbsud(2, 4, 6); }
  static void dot356() { _tile_dpbsud(3, 5, 6); }

  void unpack_step(const uint8_t* from, char* to, int64_t step, int64_t ahead,
                   int64_t half) const {
    const __m512i low = _mm512_set1_epi8(0xf);
    const int64_t each = across / 8, tile = each * 128;
    to += step * columns * tile;
    from += step * each * 128 + half * 64;
    for (int64_t o = 0; o < columns; o++)
#pragma GCC unroll 4
      for (int64_t j = 0; j < each; j++) {
        const uint8_t* at = from + j * 128 + o * 64;
        const __m512i d = _mm512_loadu_si512(at);
        _mm_prefetch((const char*)at + ahead, _MM_HINT_T0);
        char* line = to + o * tile + j * 128;
        _mm512_store_si512(line, _mm512_and_si512(d, low));
        _mm512_store_si512(line + 64, _mm512_and_si512(_mm512_srli_epi16(d, 4), low));
      }
  }

  struct Lines {
    const float* scale;
    const int32_t* offset;
  };
  Lines lines(int64_t g, int64_t block) const {
    const int64_t index = (block * b.nseg + g) * rows.R;
    char* from = const_cast<char*>(room);
    return {Bytes::scale(b, rows, from) + index, Bytes::offset(b, rows, from) + index};
  }
  static __m512 scaled(Lines of, const char* sums, int64_t r, __m512 by, __m512 more) {
    const __m512i exact =
        _mm512_add_epi32(_mm512_load_si512(sums + r * 64), _mm512_set1_epi32(of.offset[r]));
    const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_set1_ps(of.scale[r]));
    return _mm512_fmadd_ps(part, by, more);
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
