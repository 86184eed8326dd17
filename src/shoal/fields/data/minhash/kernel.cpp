// Words, shingles, their hashes, and MinHash signatures of documents.
//
// Source: Broder, On the Resemblance and Containment of Documents, 1997; the families of hash
// functions and their arithmetic are those of datasketch, bit by bit: h is the first four bytes of
// SHA-1, and slot k is the least of
//   affine: a_k m(h) + b_k mod 2^32, where a_k is odd and m is the finalizer of MurmurHash3;
//   prime:  (a_k h + b_k mod 2^64) mod (2^61 - 1) mod 2^32.
//
// A document is reduced to its words with one space between them, so that n words in a row are one
// piece of memory and nothing is joined. Pieces of up to 55 bytes are one block of SHA-1; with
// AVX-512, sixteen of them are hashed at a time, each in a lane of its own.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && !defined(SHOAL_SCALAR)
#include <immintrin.h>
#define SHOAL_WIDE 1
#endif

namespace {

constexpr uint64_t kPrime = (1ull << 61) - 1;

// ---------------------------------------------------------------------------- words

// The code point at `at`, and its bytes; a byte that is not UTF-8 is one code point of its own.
inline uint32_t code_point(const uint8_t* text, int64_t left, int* bytes) {
    const uint8_t c = text[0];
    int want = c < 0x80 ? 1 : c >= 0xf0 && c < 0xf8 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 0;
    if (want == 0 || want > left || c >= 0xf8) {
        *bytes = 1;
        return 0xfffd;
    }
    *bytes = want;
    if (want == 1) return c;
    uint32_t point = c & (0xff >> (want + 1));
    for (int i = 1; i < want; ++i) {
        if ((text[i] & 0xc0) != 0x80) {
            *bytes = 1;
            return 0xfffd;
        }
        point = point << 6 | (text[i] & 0x3f);
    }
    return point;
}

// A document's words with one space between them.
struct Document {
    std::vector<uint8_t> text;
    std::vector<int64_t> begin, end;  // of each word, or of each code point

    void words(const uint8_t* from, int64_t size, const uint8_t* is_word) {
        text.clear(), begin.clear(), end.clear();
        if (int64_t(text.capacity()) < size + 1) text.reserve(2 * size + 64);
        bool inside = false;
        for (int64_t at = 0; at < size;) {
            int bytes;
            const uint32_t point = code_point(from + at, size - at, &bytes);
            const bool word = point < 0x110000 && (is_word[point >> 3] >> (point & 7) & 1);
            if (word) {
                if (!inside) {
                    if (!text.empty()) text.push_back(' ');
                    begin.push_back(int64_t(text.size()));
                }
                for (int i = 0; i < bytes; ++i) text.push_back(from[at + i]);
            } else if (inside) {
                end.push_back(int64_t(text.size()));
            }
            inside = word;
            at += bytes;
        }
        if (inside) end.push_back(int64_t(text.size()));
    }

    // Units become code points of the text with its single spaces.
    void characters() {
        begin.clear(), end.clear();
        for (int64_t at = 0, size = int64_t(text.size()); at < size;) {
            int bytes;
            code_point(text.data() + at, size - at, &bytes);
            begin.push_back(at);
            at += bytes;
            end.push_back(at);
        }
    }

    // Shingles: runs of n units; a document of fewer has one, all of them; an empty one has none.
    int64_t shingles(int64_t n) const {
        const int64_t units = int64_t(begin.size());
        return units == 0 ? 0 : units < n ? 1 : units - n + 1;
    }
    const uint8_t* shingle(int64_t at, int64_t n, int64_t* size) const {
        const int64_t last = std::min<int64_t>(at + n, int64_t(begin.size())) - 1;
        *size = end[last] - begin[at];
        return text.data() + begin[at];
    }
};

// ---------------------------------------------------------------------------- SHA-1

inline uint32_t rotl(uint32_t x, int n) { return x << n | x >> (32 - n); }

void sha1_block(uint32_t state[5], const uint8_t* block) {
    uint32_t w[80];
    for (int t = 0; t < 16; ++t) {
        uint32_t word;
        std::memcpy(&word, block + 4 * t, 4);
        w[t] = __builtin_bswap32(word);
    }
    for (int t = 16; t < 80; ++t) w[t] = rotl(w[t - 3] ^ w[t - 8] ^ w[t - 14] ^ w[t - 16], 1);
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
    for (int t = 0; t < 80; ++t) {
        const uint32_t f = t < 20   ? (b & c) | (~b & d)
                           : t < 40 ? b ^ c ^ d
                           : t < 60 ? (b & c) | (b & d) | (c & d)
                                    : b ^ c ^ d;
        constexpr uint32_t k[4] = {0x5a827999u, 0x6ed9eba1u, 0x8f1bbcdcu, 0xca62c1d6u};
        const uint32_t next = rotl(a, 5) + f + e + k[t / 20] + w[t];
        e = d, d = c, c = rotl(b, 30), b = a, a = next;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d, state[4] += e;
}

constexpr uint32_t kInitial[5] = {0x67452301u, 0xefcdab89u, 0x98badcfeu, 0x10325476u, 0xc3d2e1f0u};

void sha1(const uint8_t* text, int64_t size, uint32_t state[5]) {
    std::memcpy(state, kInitial, sizeof kInitial);
    int64_t at = 0;
    for (; at + 64 <= size; at += 64) sha1_block(state, text + at);
    uint8_t tail[128] = {0};
    const int64_t left = size - at;
    if (left) std::memcpy(tail, text + at, left);
    tail[left] = 0x80;
    const int64_t blocks = left < 56 ? 1 : 2;
    const uint64_t bits = __builtin_bswap64(uint64_t(size) * 8);
    std::memcpy(tail + 64 * blocks - 8, &bits, 8);
    for (int64_t i = 0; i < blocks; ++i) sha1_block(state, tail + 64 * i);
}

// The first eight bytes of the digest, as a little-endian number; its low half is datasketch's.
inline uint64_t sha1_64(const uint8_t* text, int64_t size) {
    uint32_t state[5];
    sha1(text, size, state);
    return __builtin_bswap32(state[0]) | uint64_t(__builtin_bswap32(state[1])) << 32;
}

#ifdef SHOAL_WIDE
// Sixteen messages of one block each; `blocks` has them padded, one after the other.
void sha1_sixteen(const uint8_t* blocks, uint32_t first[16], uint32_t second[16]) {
    const __m512i lane = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        _mm512_set1_epi32(16));
    const __m512i swap = _mm512_broadcast_i32x4(
        _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
    __m512i w[16];
    for (int t = 0; t < 16; ++t)
        w[t] = _mm512_shuffle_epi8(_mm512_i32gather_epi32(lane, (const int*)blocks + t, 4), swap);
    __m512i a = _mm512_set1_epi32(int(kInitial[0])), b = _mm512_set1_epi32(int(kInitial[1]));
    __m512i c = _mm512_set1_epi32(int(kInitial[2])), d = _mm512_set1_epi32(int(kInitial[3]));
    __m512i e = _mm512_set1_epi32(int(kInitial[4]));
    auto round = [&](int t, const __m512i f, const __m512i k) {
        __m512i word = w[t & 15];
        if (t >= 16) {
            const __m512i mixed = _mm512_ternarylogic_epi32(w[(t - 3) & 15], w[(t - 8) & 15],
                                                            w[(t - 14) & 15], 0x96);
            word = _mm512_rol_epi32(_mm512_xor_si512(mixed, word), 1);
            w[t & 15] = word;
        }
        const __m512i next = _mm512_add_epi32(
            _mm512_add_epi32(_mm512_rol_epi32(a, 5), f),
            _mm512_add_epi32(_mm512_add_epi32(e, k), word));
        e = d, d = c, c = _mm512_rol_epi32(b, 30), b = a, a = next;
    };
    const __m512i k0 = _mm512_set1_epi32(0x5a827999), k1 = _mm512_set1_epi32(0x6ed9eba1);
    const __m512i k2 = _mm512_set1_epi32(int(0x8f1bbcdcu)), k3 = _mm512_set1_epi32(int(0xca62c1d6u));
#pragma GCC unroll 20
    for (int t = 0; t < 20; ++t) round(t, _mm512_ternarylogic_epi32(b, c, d, 0xca), k0);
#pragma GCC unroll 20
    for (int t = 20; t < 40; ++t) round(t, _mm512_ternarylogic_epi32(b, c, d, 0x96), k1);
#pragma GCC unroll 20
    for (int t = 40; t < 60; ++t) round(t, _mm512_ternarylogic_epi32(b, c, d, 0xe8), k2);
#pragma GCC unroll 20
    for (int t = 60; t < 80; ++t) round(t, _mm512_ternarylogic_epi32(b, c, d, 0x96), k3);
    a = _mm512_add_epi32(a, _mm512_set1_epi32(int(kInitial[0])));
    b = _mm512_add_epi32(b, _mm512_set1_epi32(int(kInitial[1])));
    _mm512_storeu_si512(first, _mm512_shuffle_epi8(a, swap));
    _mm512_storeu_si512(second, _mm512_shuffle_epi8(b, swap));
}
#endif

// Hashes of all shingles of a document, in their order, repeated ones too.
void hashes_of(const Document& document, int64_t n, std::vector<uint64_t>& out) {
    const int64_t count = document.shingles(n);
    out.resize(count);
    int64_t at = 0, size;
#ifdef SHOAL_WIDE
    alignas(64) uint8_t blocks[16 * 64];
    int64_t place[16];
    uint32_t first[16], second[16];
    int filled = 0;
    auto flush = [&] {
        sha1_sixteen(blocks, first, second);
        for (int i = 0; i < filled; ++i) out[place[i]] = first[i] | uint64_t(second[i]) << 32;
        filled = 0;
    };
    for (; at < count; ++at) {
        const uint8_t* text = document.shingle(at, n, &size);
        if (size > 55) {
            out[at] = sha1_64(text, size);
            continue;
        }
        uint8_t* block = blocks + 64 * filled;
        std::memset(block, 0, 64);
        std::memcpy(block, text, size);
        block[size] = 0x80;
        block[62] = uint8_t(size >> 5), block[63] = uint8_t(size << 3);
        place[filled++] = at;
        if (filled == 16) flush();
    }
    if (filled > 4) {
        std::memset(blocks + 64 * filled, 0, 64 * (16 - filled));
        flush();
    } else {
        for (int i = 0; i < filled; ++i) {
            const uint8_t* text = document.shingle(place[i], n, &size);
            out[place[i]] = sha1_64(text, size);
        }
    }
#else
    for (; at < count; ++at) {
        const uint8_t* text = document.shingle(at, n, &size);
        out[at] = sha1_64(text, size);
    }
#endif
}

// ---------------------------------------------------------------------------- signatures

// Hash functions; of the prime family in groups of 16: those at even places, then those at odd ones.
struct Family {
    bool affine;
    int64_t slots, padded;
    std::vector<uint64_t> a, b;
    std::vector<uint32_t> a32, b32;

    Family(const uint64_t* a_, const uint64_t* b_, int64_t slots_, int64_t affine_)
        : affine(affine_), slots(slots_), padded((slots_ + 15) / 16 * 16) {
        a.resize(padded, 1), b.resize(padded, 0), a32.resize(padded, 1), b32.resize(padded, 0);
        for (int64_t k = 0; k < slots; ++k) {
            const int64_t place = k / 16 * 16 + (k & 1) * 8 + k % 16 / 2;
            a[place] = a_[k], b[place] = b_[k];
            a32[k] = uint32_t(a_[k]), b32[k] = uint32_t(b_[k]);
        }
    }
};

inline uint32_t finalized(uint32_t h) {
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}

void lower_affine(const Family& family, const uint64_t* hashes, int64_t count, uint32_t* out) {
    int64_t g = 0;
#ifdef SHOAL_WIDE
    for (; g + 64 <= family.padded; g += 64) {
        __m512i a[4], b[4], least[4];
        for (int i = 0; i < 4; ++i) {
            a[i] = _mm512_loadu_si512(family.a32.data() + g + 16 * i);
            b[i] = _mm512_loadu_si512(family.b32.data() + g + 16 * i);
            least[i] = _mm512_loadu_si512(out + g + 16 * i);
        }
        for (int64_t at = 0; at < count; ++at) {
            const __m512i h = _mm512_set1_epi32(int(finalized(uint32_t(hashes[at]))));
            for (int i = 0; i < 4; ++i)
                least[i] = _mm512_min_epu32(
                    least[i], _mm512_add_epi32(_mm512_mullo_epi32(a[i], h), b[i]));
        }
        for (int i = 0; i < 4; ++i) _mm512_storeu_si512(out + g + 16 * i, least[i]);
    }
#endif
    for (; g < family.padded; g += 16) {
        uint32_t least[16];
        std::memcpy(least, out + g, sizeof least);
        const uint32_t *a = family.a32.data() + g, *b = family.b32.data() + g;
        for (int64_t at = 0; at < count; ++at) {
            const uint32_t h = finalized(uint32_t(hashes[at]));
            for (int k = 0; k < 16; ++k) least[k] = std::min(least[k], a[k] * h + b[k]);
        }
        std::memcpy(out + g, least, sizeof least);
    }
}

inline uint32_t permuted(uint64_t a, uint64_t b, uint32_t h) {
    const uint64_t x = a * h + b;
    uint64_t y = (x & kPrime) + (x >> 61);
    if (y >= kPrime) y -= kPrime;
    return uint32_t(y);
}

void lower_prime(const Family& family, const uint64_t* hashes, int64_t count, uint32_t* out) {
#ifdef SHOAL_WIDE
    const __m512i prime = _mm512_set1_epi64(int64_t(kPrime));
    const __m512i low = _mm512_set1_epi64(0xffffffff);
    auto image = [&](const __m512i a, const __m512i b, const __m512i h) {
        const __m512i x = _mm512_add_epi64(_mm512_mullo_epi64(a, h), b);
        const __m512i y = _mm512_add_epi64(_mm512_and_si512(x, prime), _mm512_srli_epi64(x, 61));
        return _mm512_min_epu64(y, _mm512_sub_epi64(y, prime));
    };
    int64_t g = 0;
    for (; g + 32 <= family.padded; g += 32) {
        const uint64_t *a = family.a.data() + g, *b = family.b.data() + g;
        const __m512i a0 = _mm512_loadu_si512(a), a1 = _mm512_loadu_si512(a + 8);
        const __m512i a2 = _mm512_loadu_si512(a + 16), a3 = _mm512_loadu_si512(a + 24);
        const __m512i b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + 8);
        const __m512i b2 = _mm512_loadu_si512(b + 16), b3 = _mm512_loadu_si512(b + 24);
        __m512i least0 = _mm512_loadu_si512(out + g), least1 = _mm512_loadu_si512(out + g + 16);
        for (int64_t i = 0; i < count; ++i) {
            const __m512i h = _mm512_and_si512(_mm512_set1_epi64(int64_t(hashes[i])), low);
            const __m512i even0 = image(a0, b0, h), odd0 = image(a1, b1, h);
            const __m512i even1 = image(a2, b2, h), odd1 = image(a3, b3, h);
            least0 = _mm512_min_epu32(
                least0, _mm512_mask_blend_epi32(0xaaaa, even0, _mm512_slli_epi64(odd0, 32)));
            least1 = _mm512_min_epu32(
                least1, _mm512_mask_blend_epi32(0xaaaa, even1, _mm512_slli_epi64(odd1, 32)));
        }
        _mm512_storeu_si512(out + g, least0);
        _mm512_storeu_si512(out + g + 16, least1);
    }
    for (; g < family.padded; g += 16) {
        const __m512i a0 = _mm512_loadu_si512(family.a.data() + g);
        const __m512i a1 = _mm512_loadu_si512(family.a.data() + g + 8);
        const __m512i b0 = _mm512_loadu_si512(family.b.data() + g);
        const __m512i b1 = _mm512_loadu_si512(family.b.data() + g + 8);
        __m512i least = _mm512_loadu_si512(out + g);
        for (int64_t i = 0; i < count; ++i) {
            const __m512i h = _mm512_and_si512(_mm512_set1_epi64(int64_t(hashes[i])), low);
            const __m512i even = image(a0, b0, h), odd = image(a1, b1, h);
            least = _mm512_min_epu32(
                least, _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32)));
        }
        _mm512_storeu_si512(out + g, least);
    }
#else
    for (int64_t g = 0; g < family.padded; g += 16)
        for (int64_t i = 0; i < count; ++i)
            for (int64_t k = 0; k < 16; ++k) {
                const int64_t place = g + (k & 1) * 8 + k / 2;
                const uint32_t image = permuted(family.a[place], family.b[place],
                                                uint32_t(hashes[i]));
                out[g + k] = std::min(out[g + k], image);
            }
#endif
}

// Lower each slot to the least of the hashes' images; `out` has Family::padded numbers.
void lower(const Family& family, const uint64_t* hashes, int64_t count, uint32_t* out) {
    (family.affine ? lower_affine : lower_prime)(family, hashes, count, out);
}

inline uint64_t mixed(uint64_t x) {  // the finalizer of splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

int64_t find(int64_t* parent, int64_t x) {
    while (parent[x] != x) x = parent[x] = parent[parent[x]];
    return x;
}

// The smaller root stays, so that a cluster is named by its first row.
void unite(int64_t* parent, int64_t x, int64_t y) {
    x = find(parent, x), y = find(parent, y);
    if (x != y) parent[std::max(x, y)] = std::min(x, y);
}

// Whether two sorted sets have at least this Jaccard similarity.
bool similar(const uint64_t* a, int64_t m, const uint64_t* b, int64_t n, double threshold) {
    if (std::min(m, n) < threshold * std::max(m, n)) return false;
    int64_t i = 0, j = 0, both = 0;
    while (i < m && j < n) {
        const uint64_t x = a[i], y = b[j];
        both += x == y;
        i += x <= y, j += y <= x;
    }
    return both >= threshold * (m + n - both);
}

}  // namespace

extern "C" {

// texts [offsets[n]] bytes, n documents; is_word: a bit for each code point.
// out: [n, slots]; shingles: [n], how many each has, 0 for a document without words.
void signatures(const uint8_t* texts, const int64_t* offsets, int64_t n, const uint8_t* is_word,
                int64_t characters, int64_t ngram, const uint64_t* a, const uint64_t* b,
                int64_t slots, int64_t affine, uint32_t* out, int64_t* shingles) {
    const Family family(a, b, slots, affine);
    Document document;
    std::vector<uint64_t> hashes;
    std::vector<uint32_t> slot(family.padded);
    for (int64_t at = 0; at < n; ++at) {
        document.words(texts + offsets[at], offsets[at + 1] - offsets[at], is_word);
        if (characters) document.characters();
        hashes_of(document, ngram, hashes);
        shingles[at] = int64_t(hashes.size());
        std::fill(slot.begin(), slot.end(), 0xffffffffu);
        lower(family, hashes.data(), int64_t(hashes.size()), slot.data());
        std::memcpy(out + at * slots, slot.data(), sizeof(uint32_t) * slots);
    }
}

// Lower signatures [n, slots] by hashes that are given; those of row i are from offsets[i] on.
void update(const uint64_t* hashes, const int64_t* offsets, int64_t n, const uint64_t* a,
            const uint64_t* b, int64_t slots, int64_t affine, uint32_t* out) {
    const Family family(a, b, slots, affine);
    std::vector<uint32_t> slot(family.padded, 0xffffffffu);
    for (int64_t at = 0; at < n; ++at) {
        std::memcpy(slot.data(), out + at * slots, sizeof(uint32_t) * slots);
        lower(family, hashes + offsets[at], offsets[at + 1] - offsets[at], slot.data());
        std::memcpy(out + at * slots, slot.data(), sizeof(uint32_t) * slots);
    }
}

// Sets of 64-bit hashes of shingles, sorted, one after the other; `ends` has [n] their ends.
// out has room for a number per byte of text and one per document.
void shingle_sets(const uint8_t* texts, const int64_t* offsets, int64_t n, const uint8_t* is_word,
                  int64_t characters, int64_t ngram, uint64_t* out, int64_t* ends) {
    Document document;
    std::vector<uint64_t> hashes;
    int64_t filled = 0;
    for (int64_t at = 0; at < n; ++at) {
        document.words(texts + offsets[at], offsets[at + 1] - offsets[at], is_word);
        if (characters) document.characters();
        hashes_of(document, ngram, hashes);
        std::sort(hashes.begin(), hashes.end());
        const auto last = std::unique(hashes.begin(), hashes.end());
        filled = std::copy(hashes.begin(), last, out + filled) - out;
        ends[at] = filled;
    }
}

// SHA-1 of each document's words with single spaces, its first 16 bytes: [n, 2].
void digests(const uint8_t* texts, const int64_t* offsets, int64_t n, const uint8_t* is_word,
             uint64_t* out) {
    Document document;
    for (int64_t at = 0; at < n; ++at) {
        document.words(texts + offsets[at], offsets[at + 1] - offsets[at], is_word);
        uint32_t state[5];
        sha1(document.text.data(), int64_t(document.text.size()), state);
        for (uint32_t& word : state) word = __builtin_bswap32(word);
        std::memcpy(out + 2 * at, state, 16);
    }
}

// Keys [bands, n] of signatures [n, slots]: a hash of `rows` slots in a row.
void band_keys(const uint32_t* slot, int64_t n, int64_t slots, int64_t bands, int64_t rows,
               uint64_t* out) {
    for (int64_t at = 0; at < n; ++at)
        for (int64_t band = 0; band < bands; ++band) {
            uint64_t key = mixed(uint64_t(rows) + 1);
            const uint32_t* from = slot + at * slots + band * rows;
            for (int64_t i = 0; i < rows; ++i) key = mixed(key + 0x9e3779b97f4a7c15ull + from[i]);
            out[band * n + at] = key;
        }
}

// Unite the rows of equal keys; keys are sorted.
void unite_equal(const uint64_t* keys, const int64_t* rows, int64_t n, int64_t* parent) {
    for (int64_t at = 1; at < n; ++at)
        if (keys[at] == keys[at - 1]) unite(parent, rows[at - 1], rows[at]);
}

// Unite those rows of equal keys that are similar. In each run a row is compared with the first of
// each group that the run has so far. sets, sizes: [slots] of the rows, by slot_of[row].
// Returns the comparisons.
int64_t unite_similar(const uint64_t* keys, const int64_t* rows, int64_t n, int64_t* parent,
                      const int64_t* slot_of, const uint64_t* const* sets, const int64_t* sizes,
                      double threshold) {
    int64_t compared = 0;
    std::vector<int64_t> first;
    for (int64_t begin = 0, end; begin < n; begin = end) {
        for (end = begin + 1; end < n && keys[end] == keys[begin];) ++end;
        if (end - begin < 2) continue;
        first.clear();
        for (int64_t at = begin; at < end; ++at) {
            const int64_t row = rows[at], slot = slot_of[row];
            bool joined = false;
            for (const int64_t other : first) {
                const int64_t to = slot_of[other];
                if (find(parent, other) == find(parent, row)) {
                    joined = true;
                } else if (++compared; similar(sets[slot], sizes[slot], sets[to], sizes[to],
                                               threshold)) {
                    unite(parent, other, row);
                    joined = true;
                }
            }
            if (!joined) first.push_back(row);
        }
    }
    return compared;
}

// Each row's root.
void flatten(int64_t* parent, int64_t n) {
    for (int64_t at = 0; at < n; ++at) parent[at] = find(parent, at);
}
}
