// CRC32C of bytes, with or without a copy of them on the way; of a sample of them; and whether
// they hold a number that is not finite.
//
// The processor's instruction takes 8 bytes and answers three cycles later, so three runs of bytes
// are taken at once and their checksums joined: appending zeros to a run is linear in its checksum,
// so a table of what 4096 zeros make of each byte joins them.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE4_2__)
#include <emmintrin.h>
#include <nmmintrin.h>
#define ONE(c, x) _mm_crc32_u8((uint32_t)(c), x)
#define EIGHT(c, x) ((uint32_t)_mm_crc32_u64(c, x))
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define ONE(c, x) __crc32cb((uint32_t)(c), x)
#define EIGHT(c, x) __crc32cd((uint32_t)(c), x)
#else
#error no instruction
#endif

namespace {

constexpr size_t kRun = 4096;
constexpr size_t kLine = 64;

uint64_t word(const uint8_t* at) {
  uint64_t found;
  memcpy(&found, at, 8);
  return found;
}

// The state after some bytes; neither begun nor ended by an inversion.
uint32_t after(uint32_t state, const uint8_t* data, size_t size) {
  for (; size >= 8; size -= 8, data += 8) state = EIGHT(state, word(data));
  for (; size; --size, ++data) state = ONE(state, *data);
  return state;
}

struct Zeros {
  uint32_t table[4][256];
  Zeros() {
    for (int byte = 0; byte < 4; ++byte) {
      uint32_t bits[8];
      for (int bit = 0; bit < 8; ++bit) {
        uint32_t state = 1u << (8 * byte + bit);
        for (size_t i = 0; i < kRun; i += 8) state = EIGHT(state, 0);
        bits[bit] = state;
      }
      for (int value = 0; value < 256; ++value) {
        uint32_t sum = 0;
        for (int bit = 0; bit < 8; ++bit)
          if (value >> bit & 1) sum ^= bits[bit];
        table[byte][value] = sum;
      }
    }
  }
  uint32_t append(uint32_t c) const {
    return table[0][c & 255] ^ table[1][c >> 8 & 255] ^ table[2][c >> 16 & 255] ^ table[3][c >> 24];
  }
};

// What is copied is read again by a disk and not by this processor: it goes past the cache.
void line(uint8_t* to, const uint8_t* from) {
#if defined(__SSE4_2__)
  for (int i = 0; i < 4; ++i)
    _mm_stream_si128((__m128i*)to + i, _mm_loadu_si128((const __m128i*)from + i));
#else
  memcpy(to, from, kLine);
#endif
}

template <bool kCopy>
uint32_t run(uint32_t before, uint8_t* to, const uint8_t* from, size_t size) {
  static const Zeros zeros;
  uint32_t state = ~before;
  if (kCopy) {
    size_t head = -(uintptr_t)to % kLine;
    if (head > size) head = size;
    memcpy(to, from, head);
    state = after(state, from, head);
    to += head, from += head, size -= head;
  }
  for (; size >= 3 * kRun; size -= 3 * kRun, from += 3 * kRun) {
    uint32_t a = state, b = 0, c = 0;
    for (size_t at = 0; at < kRun; at += kLine) {
      const uint8_t *x = from + at, *y = x + kRun, *z = y + kRun;
      for (size_t i = 0; i < kLine; i += 8) {
        a = EIGHT(a, word(x + i));
        b = EIGHT(b, word(y + i));
        c = EIGHT(c, word(z + i));
      }
      if (kCopy) {
        line(to + at, x);
        line(to + kRun + at, y);
        line(to + 2 * kRun + at, z);
      }
    }
    if (kCopy) to += 3 * kRun;
    state = zeros.append(zeros.append(a) ^ b) ^ c;
  }
  if (kCopy) {
    memcpy(to, from, size);
#if defined(__SSE4_2__)
    _mm_sfence();
#endif
  }
  return ~after(state, from, size);
}

template <typename Bits>
int not_finite(const Bits* data, size_t count, Bits exponent) {
  constexpr size_t kBlock = 4096;  // short enough to end soon, long enough for vectors
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t end = count < at + kBlock ? count : at + kBlock;
    Bits found = 0;
    for (size_t i = at; i < end; ++i) found |= (Bits)((data[i] & exponent) == exponent);
    if (found) return 1;
  }
  return 0;
}

}  // namespace

extern "C" uint32_t shoal_crc32c(uint32_t before, const uint8_t* data, size_t size) {
  return run<false>(before, nullptr, data, size);
}

extern "C" uint32_t shoal_copy_crc32c(uint32_t before, uint8_t* to, const uint8_t* from, size_t size) {
  return run<true>(before, to, from, size);
}

// Checksum of one cache line of every page of 4096 bytes, at a place that follows from the seed and
// the page's number, and of all bytes behind the last whole page.
extern "C" uint32_t shoal_sample_crc32c(uint64_t seed, const uint8_t* data, size_t size) {
  constexpr size_t kAhead = 16;
  const size_t pages = size / kRun;
  auto place = [&](size_t page) {
    uint64_t x = seed + (page + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return data + page * kRun + (x >> 58) * kLine;
  };
  uint32_t state = ~0u;
  for (size_t page = 0; page < pages; ++page) {
    __builtin_prefetch(place(page + kAhead));
    state = after(state, place(page), kLine);
  }
  return ~after(state, data + pages * kRun, size - pages * kRun);
}

// Whether any number has all bits of its exponent set, which infinities and NaN have.
extern "C" int shoal_not_finite16(const uint16_t* data, size_t count, uint16_t exponent) {
  return not_finite(data, count, exponent);
}

extern "C" int shoal_not_finite32(const uint32_t* data, size_t count, uint32_t exponent) {
  return not_finite(data, count, exponent);
}

extern "C" int shoal_not_finite64(const uint64_t* data, size_t count, uint64_t exponent) {
  return not_finite(data, count, exponent);
}
