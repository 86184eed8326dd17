// Matrix tiles (AMX). native/tiles.py asks the system for them.
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};

// The intrinsics of tiles do not tell the compiler what memory they touch.
inline void fence() { asm volatile("" ::: "memory"); }

}  // namespace
#endif
