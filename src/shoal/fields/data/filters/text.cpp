// UTF-8 text as bits, 64 bytes at a time; the other files of this directory's kernel follow.
//
// `reference.py` says in Python, slowly, what the functions count. A character's properties come
// from a table that Python makes, so both know the same letters and spaces.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>
#if (defined(__AVX512BW__) || defined(__AVX2__)) && !defined(SHOAL_SCALAR)
#include <immintrin.h>
#endif
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && !defined(SHOAL_SCALAR)
#define SHOAL_WIDE 1
#endif

namespace {

using Byte = uint8_t;
using View = std::string_view;

enum : Byte { kAlpha = 1, kSpace = 2, kBreak = 4, kSolid = 8, kTerminal = 16, kAlnum = 32 };
constexpr uint32_t kLast = 0xE1000;

// Properties of the character at p, which moves behind it.
inline Byte next(const Byte* classes, const Byte*& p) {
    uint32_t c = *p++;
    if (c < 0x80) return classes[c];
    if (c < 0xE0) {
        c = (c & 0x1F) << 6 | (*p++ & 0x3F);
    } else if (c < 0xF0) {
        c = (c & 0x0F) << 12 | (p[0] & 0x3F) << 6 | (p[1] & 0x3F);
        p += 2;
    } else {
        c = (c & 0x07) << 18 | (p[0] & 0x3F) << 12 | (p[1] & 0x3F) << 6 | (p[2] & 0x3F);
        p += 3;
    }
    return c < kLast ? classes[c] : 0;
}

// Properties of the last character before p.
inline Byte last(const Byte* classes, const Byte* begin, const Byte* p) {
    do --p;
    while (p > begin && (*p & 0xC0) == 0x80);
    return next(classes, p);
}

inline int64_t length(View text) {
    int64_t chars = 0;
    for (const char c : text) chars += (Byte(c) & 0xC0) != 0x80;
    return chars;
}

inline View view(const Byte* p, const Byte* end) {
    return {reinterpret_cast<const char*>(p), size_t(end - p)};
}

inline const Byte* bytes(View text) { return reinterpret_cast<const Byte*>(text.data()); }

inline View stripped(const Byte* classes, View text) {
    const Byte *p = bytes(text), *end = p + text.size();
    for (const Byte* q = p; p < end && next(classes, q) & kSpace;) p = q;
    while (end > p && last(classes, p, end) & kSpace) {
        do --end;
        while (end > p && (*end & 0xC0) == 0x80);
    }
    return view(p, end);
}

inline bool ends(View text, View tail) {
    return text.size() >= tail.size() && text.substr(text.size() - tail.size()) == tail;
}

inline bool begins(View text, View head) { return text.substr(0, head.size()) == head; }

inline uint64_t mix(uint64_t h) {
    h *= 0x9E3779B97F4A7C15ull;
    return h ^ h >> 32;
}

template <class T>
inline T load(const void* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

// All bytes with `fold` set in each, eight at a time; the last eight overlap those before.
inline uint64_t hashed(const char* p, size_t size, uint64_t fold = 0) {
    uint64_t h = size;
    if (size >= 8) {
        const char* last = p + size - 8;
        for (; p < last; p += 8) h = mix(h ^ (load<uint64_t>(p) | fold));
        return mix(h ^ (load<uint64_t>(last) | fold));
    }
    uint64_t word = 0;
    if (size >= 4)
        word = load<uint32_t>(p) | uint64_t(load<uint32_t>(p + size - 4)) << 32;
    else if (size)
        word = Byte(p[0]) | Byte(p[size / 2]) << 8 | Byte(p[size - 1]) << 16;
    return mix(mix(h ^ (word | fold)));
}

inline size_t room_for(size_t count) {
    size_t size = 16;
    while (size < 2 * count) size *= 2;
    return size;
}

inline int ones(uint64_t bits) { return __builtin_popcountll(bits); }
inline size_t lowest(uint64_t bits) { return size_t(__builtin_ctzll(bits)); }

// 64 bytes; each function says of which of them something holds, a bit for each.
#if defined(SHOAL_WIDE)
class Block {
   public:
    explicit Block(const Byte* p) : c_(_mm512_loadu_si512(p)) {}
    uint64_t is(char one) const { return _mm512_cmpeq_epi8_mask(c_, _mm512_set1_epi8(one)); }
    uint64_t within(int first, int count) const { return within(c_, first, count); }
    uint64_t letter() const {
        return within(_mm512_or_si512(c_, _mm512_set1_epi8(0x20)), 'a', 26);
    }
    uint64_t high() const { return _mm512_movepi8_mask(c_); }

   private:
    static uint64_t within(__m512i x, int first, int count) {
        return _mm512_cmplt_epu8_mask(_mm512_sub_epi8(x, _mm512_set1_epi8(char(first))),
                                      _mm512_set1_epi8(char(count)));
    }
    __m512i c_;
};
#elif defined(__AVX2__) && !defined(SHOAL_SCALAR)
class Block {
   public:
    explicit Block(const Byte* p)
        : low_(_mm256_loadu_si256((const __m256i*)p)),
          high_(_mm256_loadu_si256((const __m256i*)(p + 32))) {}
    uint64_t is(char one) const {
        const __m256i all = _mm256_set1_epi8(one);
        return mask(_mm256_cmpeq_epi8(low_, all), _mm256_cmpeq_epi8(high_, all));
    }
    uint64_t within(int first, int count) const { return within(low_, high_, first, count); }
    uint64_t letter() const {
        const __m256i bit = _mm256_set1_epi8(0x20);
        return within(_mm256_or_si256(low_, bit), _mm256_or_si256(high_, bit), 'a', 26);
    }
    uint64_t high() const { return mask(low_, high_); }

   private:
    static uint64_t mask(__m256i low, __m256i high) {
        return uint64_t(uint32_t(_mm256_movemask_epi8(low))) |
               uint64_t(uint32_t(_mm256_movemask_epi8(high))) << 32;
    }
    static uint64_t within(__m256i low, __m256i high, int first, int count) {
        const __m256i from = _mm256_set1_epi8(char(first));
        const __m256i most = _mm256_set1_epi8(char(count - 1));
        auto half = [&](__m256i y) {
            y = _mm256_sub_epi8(y, from);
            return _mm256_cmpeq_epi8(_mm256_min_epu8(y, most), y);
        };
        return mask(half(low), half(high));
    }
    __m256i low_, high_;
};
#else
class Block {
   public:
    explicit Block(const Byte* p) { std::memcpy(of_, p, 64); }
    uint64_t is(char one) const { return within(Byte(one), 1); }
    uint64_t within(int first, int count) const {
        return which([=](Byte c) { return Byte(c - first) < count; });
    }
    uint64_t letter() const {
        return which([](Byte c) { return Byte((c | 0x20) - 'a') < 26; });
    }
    uint64_t high() const { return within(0x80, 0x80); }

   private:
    template <class Test>
    uint64_t which(Test&& test) const {
        uint64_t bits = 0;
        for (int i = 0; i < 64; ++i) bits |= uint64_t(test(of_[i])) << i;
        return bits;
    }
    Byte of_[64];
};
#endif

inline uint64_t other_breaks(const Block& b) { return b.within(0x0B, 3) | b.within(0x1C, 3); }
inline uint64_t spaces(const Block& b) { return b.is(' ') | b.within(9, 5) | b.within(0x1C, 4); }
inline uint64_t rests(const Block& b) { return b.within(0x80, 0x40); }

// Calls `visit(at, block)` for each 64 bytes, the last with spaces behind the end.
template <class Visit>
inline void each_block(View text, Visit&& visit) {
    const Byte* p = bytes(text);
    const size_t whole = text.size() / 64;
    for (size_t at = 0; at < whole; ++at) {
        __builtin_prefetch(p + 64 * at + 2048);
        visit(at, Block(p + 64 * at));
    }
    Byte tail[64];
    std::memset(tail, ' ', 64);
    std::memcpy(tail, p + 64 * whole, text.size() % 64);
    visit(whole, Block(tail));
}

// Bits of what comes `k` bytes later, of this block and the next.
inline uint64_t later(uint64_t now, uint64_t then, int k) { return now >> k | then << (64 - k); }

using Bits = std::vector<uint64_t>;

enum : unsigned {
    kWords = 1,     // not a space; all bytes of a character
    kLetters = 2,   // its first byte
    kSolids = 4,    // more than a sign; its first byte
    kAlnums = 8,    // all bytes
    kFeeds = 16,
    kBreaks = 32,   // the end of a line as Python has them; its first byte
    kMarks = 64,    // a terminal mark; its last byte
    kBullets = 128, // its first byte
    kDots = 256,    // an ellipsis; its last byte
    kHashes = 512,  // counted only
};

constexpr View kEllipsis = "\xE2\x80\xA6", kBullet = "\xE2\x80\xA2";

// A document as bits, one for each byte, of the kinds that are wanted, with zeros behind the last.
template <unsigned kWanted>
struct Marks {
    Bits word, letter, solid, alnum, feed, breaks, mark, bullet, dots;
    Bits rest;          // bytes of a character but the first; only where it is not `plain`
    View text;
    size_t blocks = 0;  // with at least one zero behind the last byte
    bool plain = true;  // ASCII
    int64_t ellipses = 0, hashes = 0, rests = 0;

    void look_at(const Byte* classes, View of) {
        text = of;
        blocks = of.size() / 64 + 1;
        for (auto bits : {&word, &letter, &solid, &alnum, &feed, &breaks, &mark, &bullet, &dots})
            if (bits->size() < blocks + 1 && wanted(bits)) bits->resize(2 * blocks + 1);
        if (rest.size() < blocks + 1) rest.resize(2 * blocks + 1);
        ellipses = hashes = rests = 0;
        others_.clear();
        uint64_t dots_before = 0;
        size_t free = 0;
        each_block(of, [&](size_t at, const Block& b) {
            if constexpr (has(kWords)) word[at] = ~spaces(b);
            if constexpr (has(kFeeds)) feed[at] = b.is('\n');
            if constexpr (has(kBreaks)) breaks[at] = b.is('\n') | other_breaks(b);
            if constexpr (has(kBullets)) bullet[at] = b.is('-');
            if constexpr (has(kLetters)) letter[at] = b.letter();
            if constexpr (has(kSolids)) solid[at] = b.letter() | b.within('0', 10);
            if constexpr (has(kAlnums)) alnum[at] = b.letter() | b.within('0', 10);
            if constexpr (has(kMarks))
                mark[at] = b.is('.') | b.within('!', 2) | b.is('?') | b.is('\'');
            if constexpr (has(kHashes)) hashes += ones(b.is('#'));
            if constexpr (has(kDots)) {
                const uint64_t dot = b.is('.');
                uint64_t three = dot & (dot << 1 | dots_before >> 63);
                three &= dot << 2 | dots_before >> 62;
                dots_before = dot;
                dots[at] = three;
                for (; three; three &= three - 1) {  // none is counted in two of them
                    const size_t place = 64 * at + lowest(three);
                    if (place >= free) ++ellipses, free = place + 3;
                }
            }
            if (b.high()) {
                // Zeros of blocks before it, which had none, are written when the first one comes.
                if (others_.empty()) std::fill_n(rest.begin(), blocks + 1, 0);
                rest[at] = ::rests(b);
                rests += ones(rest[at]);
                others_.emplace_back(at, b.high() & ~rest[at]);
            }
        });
        for (auto bits : {&word, &letter, &solid, &alnum, &feed, &breaks, &mark, &bullet, &dots})
            if (wanted(bits)) (*bits)[blocks] = 0;
        plain = others_.empty();
        for (auto [at, heads] : others_) look_at_others(classes, at, heads);
    }

    int64_t chars() const { return int64_t(text.size()) - rests; }

    // Characters of a part.
    int64_t chars(size_t from, size_t to) const {
        int64_t count = int64_t(to - from);
        if (plain) return count;
        for (size_t at = from / 64; 64 * at < to; ++at)
            count -= ones(rest[at] & part(at, from, to));
        return count;
    }

    // The bits of a block that lie in a part.
    static uint64_t part(size_t at, size_t from, size_t to) {
        uint64_t bits = ~uint64_t(0);
        if (from > 64 * at) bits <<= from - 64 * at;
        if (to < 64 * at + 64) bits &= ~(~uint64_t(0) << (to - 64 * at));
        return bits;
    }

    // The first bit from `at` on, before `to`; `to` if there is none.
    static size_t first(const Bits& bits, size_t at, size_t to, uint64_t flip = 0) {
        for (size_t block = at / 64; block * 64 < to; ++block)
            if (const uint64_t some = (bits[block] ^ flip) & part(block, at, to))
                return block * 64 + lowest(some);
        return to;
    }

    // The first zero, likewise.
    static size_t first_not(const Bits& bits, size_t at, size_t to) {
        return first(bits, at, to, ~uint64_t(0));
    }

    // Behind the last bit before `to` and not before `from`; `from` if there is none.
    static size_t last(const Bits& bits, size_t from, size_t to) {
        for (size_t block = (to + 63) / 64; block-- > from / 64;)
            if (const uint64_t some = bits[block] & part(block, from, to))
                return block * 64 + 64 - size_t(__builtin_clzll(some));
        return from;
    }

   private:
    std::vector<std::pair<size_t, uint64_t>> others_;  // blocks that are not plain, with heads

    static constexpr bool has(unsigned kind) { return (kWanted & kind) != 0; }

    bool wanted(const Bits* bits) const {
        const Bits* all[] = {&word, &letter, &solid, &alnum, &feed, &breaks, &mark, &bullet, &dots};
        for (unsigned i = 0; i < 9; ++i)
            if (bits == all[i]) return has(1u << i);
        return false;
    }

    void look_at_others(const Byte* classes, size_t at, uint64_t heads) {
        for (; heads; heads &= heads - 1) {
            const uint64_t one = heads & -heads;
            const size_t place = 64 * at + lowest(heads);
            const Byte* p = bytes(text) + place;
            const Byte k = next(classes, p);
            const size_t stop = size_t(p - bytes(text));
            const View character = text.substr(place, stop - place);
            if (has(kLetters) && k & kAlpha) letter[at] |= one;
            if (has(kSolids) && k & kSolid && !(k & kSpace)) solid[at] |= one;
            if (has(kBreaks) && k & kBreak) breaks[at] |= one;
            if (has(kBullets) && character == kBullet) bullet[at] |= one;
            if (has(kMarks) && k & kTerminal) set(mark, stop - 1);
            if (has(kDots) && character == kEllipsis) set(dots, stop - 1), ++ellipses;
            for (size_t i = place; i < stop; ++i) {
                if (has(kWords) && k & kSpace) word[i / 64] &= ~(uint64_t(1) << i % 64);
                if (has(kAlnums) && k & kAlnum) set(alnum, i);
            }
        }
    }

    static void set(Bits& bits, size_t i) { bits[i / 64] |= uint64_t(1) << i % 64; }
};

// Calls `run(from, to)` for each run of ones.
template <class Run>
inline void each_run(const Bits& bits, size_t blocks, Run&& run) {
    size_t from = 0;
    uint64_t before = 0;
    bool open = false;
    for (size_t at = 0; at < blocks; ++at) {
        uint64_t edges = bits[at] ^ (bits[at] << 1 | before);
        before = bits[at] >> 63;
        for (; edges; edges &= edges - 1) {
            const size_t place = 64 * at + lowest(edges);
            if (open) run(from, place);
            from = place;
            open = !open;
        }
    }
}

// The places of the ones of `bits(at)`, which is asked for each block in turn; how many there are.
template <class Of>
inline size_t places_of(size_t blocks, Of&& bits, std::vector<uint32_t>& out) {
    size_t count = 0;
    for (size_t at = 0; at < blocks; ++at) {
        uint64_t some = bits(at);
        const size_t more = size_t(ones(some));
        if (out.size() < count + 64) out.resize(2 * count + 4096);
        uint32_t* to = out.data() + count;
#if defined(SHOAL_WIDE) && defined(__AVX512VBMI2__)
        static const Byte kPlaces[64] = {
            0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
            22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
            44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
        const __m512i places = _mm512_maskz_compress_epi8(some, _mm512_loadu_si512(kPlaces));
        const __m512i base = _mm512_set1_epi32(int(64 * at));
        auto put = [&](__m128i part, size_t first) {
            _mm512_storeu_si512(to + first, _mm512_add_epi32(base, _mm512_cvtepu8_epi32(part)));
        };
        put(_mm512_castsi512_si128(places), 0);
        if (more > 16) {
            put(_mm512_extracti32x4_epi32(places, 1), 16);
            put(_mm512_extracti32x4_epi32(places, 2), 32);
            put(_mm512_extracti32x4_epi32(places, 3), 48);
        }
#else
        for (; some; some &= some - 1) *to++ = uint32_t(64 * at + lowest(some));
#endif
        count += more;
    }
    return count;
}

// Adds the ones of `more` to `bits`, block after block: a carry runs through ones to the next zero.
class Adder {
   public:
    uint64_t operator()(uint64_t bits, uint64_t more) {
        uint64_t sum, all;
        const bool over = __builtin_add_overflow(bits, more, &sum);
        const bool again = __builtin_add_overflow(sum, carry_, &all);
        carry_ = over | again;
        return all;
    }

   private:
    uint64_t carry_ = 0;
};

// A hash of a text that may be long.
inline uint64_t long_hash(View text) {
#if defined(SHOAL_WIDE)
    const char* p = text.data();
    size_t left = text.size();
    const __m512i secret = _mm512_set_epi64(
        0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
        0x27D4EB2F165667C5, 0x85EBCA77C2B2AE63, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB);
    __m512i sum = _mm512_set1_epi64(int64_t(left));
    auto add = [&](__m512i v) {
        const __m512i key = _mm512_xor_si512(v, secret);
        const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
        sum = _mm512_add_epi64(_mm512_rol_epi64(sum, 19), _mm512_add_epi64(product, v));
    };
    for (; left >= 64; p += 64, left -= 64) add(_mm512_loadu_si512(p));
    if (left) add(_mm512_maskz_loadu_epi8(~uint64_t(0) >> (64 - left), p));
    const __m256i four =
        _mm256_add_epi64(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
    const __m128i two =
        _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    return mix(uint64_t(_mm_cvtsi128_si64(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two)))));
#else
    return hashed(text.data(), text.size());
#endif
}

inline bool same(const char* a, const char* b, size_t size) {
#if defined(SHOAL_WIDE)
    if (size - 1 < 64) {
        const uint64_t all = ~uint64_t(0) >> (64 - size);
        const __m512i one = _mm512_maskz_loadu_epi8(all, a), two = _mm512_maskz_loadu_epi8(all, b);
        return !_mm512_cmpneq_epi8_mask(one, two);
    }
#endif
    return std::memcmp(a, b, size) == 0;
}

// Hashes that were seen, three bits for each: some that were not are said to be, but none that was
// is said not to be.
class Sketch {
   public:
    static constexpr bool kExact = false;

    void open(size_t most) {
        const size_t size = room_for(most) / 4;
        mask_ = size - 1;
        if (rows_.size() < size) rows_.resize(size);
        std::fill_n(rows_.begin(), size, 0);
    }

    bool put(View, uint64_t hash) { return put(rows_.data(), mask_, hash); }

    static bool put(uint64_t* rows, uint64_t mask, uint64_t hash) {
        const uint64_t bits = uint64_t(1) << (hash >> 58) | uint64_t(1) << (hash >> 52 & 63) |
                              uint64_t(1) << (hash >> 46 & 63);
        uint64_t& row = rows[hash & mask];
        const bool seen = (row & bits) == bits;
        row |= bits;
        return seen;
    }

   private:
    std::vector<uint64_t> rows_;
    size_t mask_ = 0;
};

// Texts that were seen, in a table by hashes.
class Seen {
   public:
    static constexpr bool kExact = true;

    void open(size_t most) {
        const size_t size = room_for(most);
        mask_ = size - 1;
        if (rows_.size() < size) rows_.resize(size);
        std::fill_n(rows_.begin(), size, Row{0, 0});
        texts_.clear();
    }

    // Whether a text with this hash came before.
    bool put(View text, uint64_t hash) {
        const auto tag = uint32_t(hash >> 32);
        for (size_t at = hash & mask_;; at = (at + 1) & mask_) {
            Row& row = rows_[at];
            if (!row.number) {
                texts_.push_back(text);
                row = {uint32_t(texts_.size()), tag};
                return false;
            }
            if (row.tag == tag) {
                const View other = texts_[row.number - 1];
                if (other.size() == text.size() && same(other.data(), text.data(), text.size()))
                    return true;
            }
        }
    }

   private:
    struct Row {
        uint32_t number, tag;
    };
    std::vector<Row> rows_;
    std::vector<View> texts_;
    size_t mask_ = 0;
};

// Runs between line feeds.
class Pieces {
   public:
    void look_at(View text) {
        text_ = text;
        const Byte* p = bytes(text);
        const size_t whole = text.size() / 64;
        Byte tail[64] = {};
        std::memcpy(tail, p + 64 * whole, text.size() % 64);
        doubles_ = 0;
        uint64_t before = 0, high = 0;
        feeds_ = places_of(
            whole + 1,
            [&](size_t at) {
                __builtin_prefetch(p + 64 * at + 2048);
                const Block b(at < whole ? p + 64 * at : tail);
                const uint64_t feed = b.is('\n');
                doubles_ += size_t(ones(feed & (feed << 1 | before)));
                before = feed >> 63;
                high |= b.high();
                return feed;
            },
            places_);
        plain_ = !high;
    }

    size_t feeds() const { return feeds_; }

    // Line feeds that follow another.
    size_t doubles() const { return doubles_; }

    int64_t chars(View part) const { return plain_ ? int64_t(part.size()) : length(part); }

    // Calls `piece(text)` for each that is not empty; `piece` returns whether to go on.
    template <class Piece>
    void each(Piece&& piece) const {
        size_t from = 0;
        for (size_t i = 0; i <= feeds_; ++i) {
            const size_t to = i < feeds_ ? places_[i] : text_.size();
            if (from < to && !piece(text_.substr(from, to - from))) return;
            from = to + 1;
        }
    }

   private:
    View text_;
    std::vector<uint32_t> places_;
    size_t feeds_ = 0, doubles_ = 0;
    bool plain_ = true;
};

}  // namespace
