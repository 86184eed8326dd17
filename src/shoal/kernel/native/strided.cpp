// Strided bytes into packed ones, and back: the same walk in two directions.
//
// Blocks shorter than 64 bytes are moved as one or two words of a size known to the compiler:
// two that overlap cover every length from one to two words. What is packed and too large to
// be read again from a cache soon goes through a page of the first-level cache into memory
// past the caches, whole lines at a time, however short the blocks are.
#include <omp.h>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Byte = uint8_t;
constexpr int kDims = 64;         // of a type
constexpr int64_t kPage = 4096;   // bytes gathered before they are streamed
constexpr int64_t kLong = 1024;   // blocks from here on are moved one by one
constexpr int64_t kLine = 64;
constexpr int64_t kAhead = 256;   // blocks, each in lines of its own, whose lines are asked for

// What is moved: dims; from how many packed bytes past the caches; whether on all threads;
// counts and strides of each dimension, the dense one first.
struct Plan {
  int64_t dims, stream, threads;
  const int64_t *counts, *strides;
  explicit Plan(const int64_t* p)
      : dims(p[0]), stream(p[1]), threads(p[2]), counts(p + 3), strides(p + 3 + p[0]) {}
};

template <int S>
struct Word {
  Byte bytes[S];
};

// n bytes, S <= n <= 2 S; both words are read before one is written.
template <int S>
inline void twice(Byte* to, const Byte* from, int64_t n) {
  Word<S> a, b;
  std::memcpy(&a, from, S);
  std::memcpy(&b, from + n - S, S);
  std::memcpy(to, &a, S);
  std::memcpy(to + n - S, &b, S);
}

// A block of n bytes: exactly S, or between S and 2 S, or (S = 0) any number from 64 on.
template <int S, bool Exact>
inline void block(Byte* to, const Byte* from, int64_t n) {
  if constexpr (S == 0) {
    int64_t i = 0;
    for (; i + 2 * kLine <= n; i += kLine) std::memcpy(to + i, from + i, kLine);
    twice<kLine>(to + i, from + i, n - i);
  } else if constexpr (Exact) {
    std::memcpy(to, from, S);
  } else {
    twice<S>(to, from, n);
  }
}

struct Plane {
  int64_t length, n1, s1, n2, s2;
};

using Move = void (*)(Byte* packed, Byte* strided, const Plane& p);

// Every second word of n is packed, a register of them at a time; returns how many.
template <int S>
inline int64_t halved(Byte* packed, const Byte* at, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  if constexpr (S == 4 || S == 8) {
    constexpr int64_t each = kLine / S;
    const __m512i even =
        S == 4 ? _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0)
               : _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0);
    // The word behind the last one is read as well: one more must follow.
    for (; i + each < n; i += each, at += 2 * kLine, packed += kLine) {
      const __m512i a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + kLine);
      _mm512_storeu_si512(packed, S == 4 ? _mm512_permutex2var_epi32(a, even, b)
                                         : _mm512_permutex2var_epi64(a, even, b));
    }
  }
#endif
  return i;
}

template <bool Pack, int S, bool Exact>
void plane(Byte* packed, Byte* strided, const Plane& p) {
  const int64_t length = Exact ? S : p.length, s1 = p.s1;
  const bool apart = Pack && (s1 >= kLine || s1 <= -kLine) && length <= kLine;
  for (int64_t j = 0; j < p.n2; j++, strided += p.s2) {
    Byte* at = strided;
    int64_t i = 0;
    if (Pack && Exact && s1 == 2 * S) {
      i = halved<S>(packed, at, p.n1);
      at += i * s1, packed += i * S;
    }
    if (apart) {
      for (; i < p.n1; i++, at += s1, packed += length) {
        __builtin_prefetch(reinterpret_cast<const void*>(uintptr_t(at) + kAhead * s1), 0, 2);
        block<S, Exact>(packed, at, length);
      }
    }
    for (; i < p.n1; i++, at += s1, packed += length)
      Pack ? block<S, Exact>(packed, at, length) : block<S, Exact>(at, packed, length);
  }
}

template <bool Pack>
Move chosen(int64_t n) {
  if (n == 1) return plane<Pack, 1, true>;
  if (n == 2) return plane<Pack, 2, true>;
  if (n == 4) return plane<Pack, 4, true>;
  if (n == 8) return plane<Pack, 8, true>;
  if (n == 16) return plane<Pack, 16, true>;
  if (n == 32) return plane<Pack, 32, true>;
  if (n == 64) return plane<Pack, 64, true>;
  if (n < 4) return plane<Pack, 2, false>;
  if (n < 8) return plane<Pack, 4, false>;
  if (n < 16) return plane<Pack, 8, false>;
  if (n < 32) return plane<Pack, 16, false>;
  if (n < 64) return plane<Pack, 32, false>;
  return plane<Pack, 0, false>;
}

// n bytes past the caches; only whole lines of `to` go that way.
inline void stream_copy(Byte* to, const Byte* from, int64_t n) {
#if defined(__AVX512F__) || defined(__AVX__)
  const int64_t head = (kLine - (reinterpret_cast<uintptr_t>(to) & (kLine - 1))) & (kLine - 1);
  if (head >= n) {
    std::memcpy(to, from, n);
    return;
  }
  std::memcpy(to, from, head);
  to += head, from += head, n -= head;
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#else
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), b);
#endif
  }
  std::memcpy(to + i, from + i, n - i);
#else
  std::memcpy(to, from, n);
#endif
}

inline void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Where a walk over the blocks is.
struct Place {
  int64_t index[kDims];
  Byte* at;
  Place(Byte* strided, const Plan& p, int64_t run) : at(strided) {
    for (int64_t d = 1; d < p.dims; d++) {
      index[d] = run % p.counts[d];
      run /= p.counts[d];
      at += index[d] * p.strides[d];
    }
  }
  // n steps of dimension d, and on to the dimensions outside of it where it ends.
  void on(const Plan& p, int64_t d, int64_t n) {
    at += n * p.strides[d];
    index[d] += n;
    while (index[d] >= p.counts[d] && d + 1 < p.dims) {
      at += p.strides[d + 1] - p.counts[d] * p.strides[d];
      index[d] = 0;
      index[++d]++;
    }
  }
};

// Blocks first .. last, shorter than kLong.
template <bool Pack>
void short_blocks(Byte* strided, Byte* packed, const Plan& p, int64_t first, int64_t last,
                  bool stream) {
  const int64_t length = p.counts[0], n1 = p.dims > 1 ? p.counts[1] : 1;
  const int64_t s1 = p.dims > 1 ? p.strides[1] : 0;
  const Move move = chosen<Pack>(length);
  Place place(strided, p, first);
  alignas(64) Byte page[kPage + kLine];
  int64_t held = 0;  // bytes in the page
  packed += first * length;
  while (first < last) {
    int64_t room = last - first;
    if (stream) {
      const int64_t fits = (kPage - held) / length;
      room = room < fits ? room : fits;
    }
    const int64_t i1 = p.dims > 1 ? place.index[1] : 0;
    Plane part{length, n1 - i1 < room ? n1 - i1 : room, s1, 1, 0};
    int64_t dim = 1, steps = part.n1;
    if (i1 == 0 && p.dims > 2 && part.n1 == n1) {
      const int64_t rows = room / n1, left = p.counts[2] - place.index[2];
      part.n2 = steps = rows < left ? rows : left;
      part.s2 = p.strides[2];
      dim = 2;
    }
    const int64_t blocks = part.n1 * part.n2;
    move(stream ? page + held : packed, place.at, part);
    first += blocks;
    if (stream) {
      held += blocks * length;
      if (kPage - held < length || first == last) {
        // Whole lines go; what is left of the last one waits for the rest.
        const int64_t after = int64_t((reinterpret_cast<uintptr_t>(packed) + held) & (kLine - 1));
        const int64_t gone = first == last || after >= held ? held : held - after;
        stream_copy(packed, page, gone);
        std::memmove(page, page + gone, held - gone);
        packed += gone, held -= gone;
      }
    } else {
      packed += blocks * length;
    }
    if (p.dims > 1) place.on(p, dim, steps);
  }
}

// Packed bytes first .. last of blocks that are long.
template <bool Pack>
void long_blocks(Byte* strided, Byte* packed, const Plan& p, int64_t first, int64_t last,
                 bool stream) {
  const int64_t length = p.counts[0];
  Place place(strided, p, first / length);
  int64_t skip = first % length;
  while (first < last) {
    const int64_t left = length - skip, n = left < last - first ? left : last - first;
    Byte* to = Pack ? packed + first : place.at + skip;
    const Byte* from = Pack ? place.at + skip : packed + first;
    stream ? stream_copy(to, from, n) : (void)std::memcpy(to, from, n);
    first += n;
    skip = 0;
    if (p.dims > 1) place.on(p, 1, 1);
  }
}

// Blocks of one word whose packed neighbours lie lines apart, while neighbours in memory are
// packed apart: dimension `near` has the small stride. Tiles keep the lines of both at hand.
template <bool Pack, int S>
void tile(Byte* strided, Byte* packed, int64_t n1, int64_t s1, int64_t near, int64_t stride,
          int64_t step) {
  for (int64_t k = 0; k < near; k++, strided += stride, packed += step) {
    Byte *at = strided, *out = packed;
    for (int64_t i = 0; i < n1; i++, at += s1, out += S)
      Pack ? std::memcpy(out, at, S) : std::memcpy(at, out, S);
  }
}

template <bool Pack, int S>
void tiles(Byte* strided, Byte* packed, const Plan& p, int64_t near) {
  const int64_t n1 = p.counts[1], s1 = p.strides[1], nk = p.counts[near], sk = p.strides[near];
  int64_t step = S, outer = 1;
  for (int64_t d = 1; d < p.dims; d++) {
    if (d < near) step *= p.counts[d];
    if (d != 1 && d != near) outer *= p.counts[d];
  }
  const int64_t wide = sk * 32 <= kLine ? 2 * kLine / sk : 32, high = 64;
  const int64_t parts_k = (nk + wide - 1) / wide, parts_1 = (n1 + high - 1) / high;
#pragma omp parallel for schedule(static) if (p.threads)
  for (int64_t job = 0; job < outer * parts_k; job++) {
    int64_t rest = job / parts_k, size = S;
    const int64_t k = job % parts_k * wide;
    Byte *at = strided + k * sk, *out = packed + k * step;
    for (int64_t d = 1; d < p.dims; d++) {
      if (d != 1 && d != near) {
        at += rest % p.counts[d] * p.strides[d];
        out += rest % p.counts[d] * size;
        rest /= p.counts[d];
      }
      size *= p.counts[d];
    }
    const int64_t columns = nk - k < wide ? nk - k : wide;
    for (int64_t i = 0; i < parts_1; i++) {
      const int64_t rows = n1 - i * high < high ? n1 - i * high : high;
      tile<Pack, S>(at + i * high * s1, out + i * high * S, rows, s1, columns, sk, step);
    }
  }
}

// The dimension with neighbours in memory, if the first one jumps over lines; else 0.
int64_t near_dimension(const Plan& p) {
  const int64_t length = p.counts[0];
  if (p.dims < 3 || length > 16 || (length & (length - 1))) return 0;
  const int64_t s1 = p.strides[1] < 0 ? -p.strides[1] : p.strides[1];
  if (s1 < kLine || p.counts[1] < 8) return 0;
  for (int64_t d = 2; d < p.dims; d++)
    if (p.strides[d] > 0 && p.strides[d] <= kLine / 2 && p.counts[d] >= 8) return d;
  return 0;
}

template <bool Pack>
void transposed(Byte* strided, Byte* packed, const Plan& p, int64_t near) {
  switch (p.counts[0]) {
    case 1: return tiles<Pack, 1>(strided, packed, p, near);
    case 2: return tiles<Pack, 2>(strided, packed, p, near);
    case 4: return tiles<Pack, 4>(strided, packed, p, near);
    case 8: return tiles<Pack, 8>(strided, packed, p, near);
    default: return tiles<Pack, 16>(strided, packed, p, near);
  }
}

template <bool Pack>
void walk(Byte* strided, Byte* packed, const int64_t* numbers) {
  const Plan p(numbers);
  if (const int64_t near = near_dimension(p)) return transposed<Pack>(strided, packed, p, near);
  const int64_t length = p.counts[0];
  int64_t runs = 1;
  for (int64_t d = 1; d < p.dims; d++) runs *= p.counts[d];
  const bool one_by_one = length >= kLong;
  const int64_t total = one_by_one ? runs * length : runs;
  // Unpacked, only long blocks fill lines.
  const bool stream = runs * length >= p.stream && (Pack || one_by_one);
#pragma omp parallel if (p.threads)
  {
    const int64_t t = omp_get_thread_num(), T = omp_get_num_threads();
    int64_t first = total / T * t + total % T * t / T;
    int64_t last = total / T * (t + 1) + total % T * (t + 1) / T;
    if (first < last) {
      if (one_by_one)
        long_blocks<Pack>(strided, packed, p, first, last, stream);
      else
        short_blocks<Pack>(strided, packed, p, first, last, stream);
      if (stream) fence();
    }
  }
}

template <bool Pack>
void listed(Byte* base, Byte* packed, const int64_t* offsets, const int64_t* lengths,
            const int64_t* places, int64_t n, int64_t threads) {
#pragma omp parallel for schedule(static) if (threads)
  for (int64_t i = 0; i < n; i++) {
    Byte* to = Pack ? packed + places[i] : base + offsets[i];
    const Byte* from = Pack ? base + offsets[i] : packed + places[i];
    std::memcpy(to, from, lengths[i]);
  }
}

}  // namespace

extern "C" void strided_pack(Byte* strided, Byte* packed, const int64_t* plan) {
  walk<true>(strided, packed, plan);
}

extern "C" void strided_unpack(Byte* strided, Byte* packed, const int64_t* plan) {
  walk<false>(strided, packed, plan);
}

extern "C" void blocks_pack(Byte* base, Byte* packed, const int64_t* offsets,
                            const int64_t* lengths, const int64_t* places, int64_t n,
                            int64_t threads) {
  listed<true>(base, packed, offsets, lengths, places, n, threads);
}

extern "C" void blocks_unpack(Byte* base, Byte* packed, const int64_t* offsets,
                              const int64_t* lengths, const int64_t* places, int64_t n,
                              int64_t threads) {
  listed<false>(base, packed, offsets, lengths, places, n, threads);
}
