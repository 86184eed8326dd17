// What rules for text count, document by document, over UTF-8 in the layout of Arrow.
//
// Sources: Rae et al., Scaling Language Models: Methods, Analysis & Insights from Training Gopher,
// 2021, appendix A.1; Raffel et al., Exploring the Limits of Transfer Learning with a Unified
// Text-to-Text Transformer, 2020, section 2.2; Penedo et al., The FineWeb Datasets, 2024.
//
// `reference.py` says the same in Python, slowly. A character's properties come from a table that
// Python makes, so both know the same letters and spaces.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>
#if (defined(__AVX512BW__) || defined(__AVX2__)) && !defined(SHOAL_SCALAR)
#include <immintrin.h>
#endif

namespace {

using Byte = uint8_t;
using View = std::string_view;

enum : Byte { kAlpha = 1, kSpace = 2, kBreak = 4, kSolid = 8, kTerminal = 16, kAlnum = 32 };
constexpr Byte kMulti = 128;
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

inline int64_t length(const Byte* p, const Byte* end) {
    int64_t chars = 0;
    for (; p < end; ++p) chars += (*p & 0xC0) != 0x80;
    return chars;
}

inline View view(const Byte* p, const Byte* end) {
    return {reinterpret_cast<const char*>(p), size_t(end - p)};
}

inline View left_stripped(const Byte* classes, View text) {
    auto p = reinterpret_cast<const Byte*>(text.data()), end = p + text.size();
    while (p < end) {
        const Byte* before = p;
        if (!(next(classes, p) & kSpace)) return view(before, end);
    }
    return {};
}

inline View right_stripped(const Byte* classes, View text) {
    auto begin = reinterpret_cast<const Byte*>(text.data()), p = begin + text.size();
    while (p > begin && last(classes, begin, p) & kSpace) {
        do --p;
        while (p > begin && (*p & 0xC0) == 0x80);
    }
    return view(begin, p);
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
inline T load(const char* p) {
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

inline bool same(const char* a, const char* b, size_t size) {
    if (size >= 8) {
        const size_t last = size - 8;
        for (size_t at = 0; at < last; at += 8)
            if (load<uint64_t>(a + at) != load<uint64_t>(b + at)) return false;
        return load<uint64_t>(a + last) == load<uint64_t>(b + last);
    }
    if (size >= 4)
        return load<uint32_t>(a) == load<uint32_t>(b) &&
               load<uint32_t>(a + size - 4) == load<uint32_t>(b + size - 4);
    for (size_t at = 0; at < size; ++at)
        if (a[at] != b[at]) return false;
    return true;
}

size_t room_for(size_t count) {
    size_t size = 16;
    while (size < 2 * count) size *= 2;
    return size;
}

// Texts, each with a number in the order in which they were first seen.
class Names {
   public:
    void open(size_t most) {
        const size_t size = room_for(most);
        mask_ = size - 1;
        if (rows_.size() < size) rows_.resize(size);
        std::fill_n(rows_.begin(), size, Row{nullptr, 0, 0});
        count_ = 0;
    }

    // The number of a text; `fresh` says whether it is new.
    uint32_t put(View text, bool* fresh) {
        for (size_t at = hashed(text.data(), text.size()) & mask_;; at = (at + 1) & mask_) {
            Row& row = rows_[at];
            if (!row.text) {
                row = {text.data(), uint32_t(text.size()), count_};
                *fresh = true;
                return count_++;
            }
            if (row.size == text.size() && same(row.text, text.data(), row.size)) {
                *fresh = false;
                return row.number;
            }
        }
    }

   private:
    struct Row {
        const char* text;
        uint32_t size, number;
    };
    std::vector<Row> rows_;
    size_t mask_ = 0;
    uint32_t count_ = 0;
};

// Pairs of numbers, each with a number in the order in which they were first seen.
class Pairs {
   public:
    void open(size_t most) {
        const size_t size = room_for(most);
        mask_ = size - 1;
        if (keys_.size() < size) keys_.resize(size), numbers_.resize(size);
        std::fill_n(keys_.begin(), size, kNone);
        count_ = 0;
    }

    uint32_t put(uint32_t first, uint32_t second) {
        const uint64_t key = uint64_t(first) << 32 | second;
        for (size_t at = mix(key) & mask_;; at = (at + 1) & mask_) {
            if (keys_[at] == key) return numbers_[at];
            if (keys_[at] == kNone) {
                keys_[at] = key;
                return numbers_[at] = count_++;
            }
        }
    }

   private:
    static constexpr uint64_t kNone = ~uint64_t(0);
    std::vector<uint64_t> keys_;
    std::vector<uint32_t> numbers_;
    size_t mask_ = 0;
    uint32_t count_ = 0;
};

// One byte's properties; those of more than one byte a character have only kMulti.
struct Fast {
    Byte of[256];
    explicit Fast(const Byte* classes) {
        for (int c = 0; c < 256; ++c) of[c] = c < 0x80 ? classes[c] : kMulti;
    }
};

int64_t count_of(View text, View what) {
    int64_t count = 0;
    for (const char *p = text.data(), *end = p + text.size();;) {
        p = static_cast<const char*>(memmem(p, end - p, what.data(), what.size()));
        if (!p) return count;
        ++count;
        p += what.size();
    }
}

constexpr View kDots = "...", kEllipsis = "\xE2\x80\xA6";

// What each of 64 bytes is, a bit for each.
struct Block {
    uint64_t space, alpha, digit, feed, rest, high, hash, dot, other_break;
};

inline Block look(const Byte* p) {
    Block b;
#if defined(__AVX512BW__) && !defined(SHOAL_SCALAR)
    const __m512i c = _mm512_loadu_si512(p);
    auto is = [&](char one) { return _mm512_cmpeq_epi8_mask(c, _mm512_set1_epi8(one)); };
    auto within = [&](__m512i x, int first, int count) {
        return _mm512_cmplt_epu8_mask(_mm512_sub_epi8(x, _mm512_set1_epi8(char(first))),
                                      _mm512_set1_epi8(char(count)));
    };
    const __m512i lower = _mm512_or_si512(c, _mm512_set1_epi8(0x20));
    b.high = _mm512_movepi8_mask(c);
#elif defined(__AVX2__) && !defined(SHOAL_SCALAR)
    struct Two {
        __m256i low, high;
    };
    auto mask = [](__m256i low, __m256i high) {
        return uint64_t(uint32_t(_mm256_movemask_epi8(low))) |
               uint64_t(uint32_t(_mm256_movemask_epi8(high))) << 32;
    };
    const Two c{_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
    auto is = [&](char one) {
        const __m256i all = _mm256_set1_epi8(one);
        return mask(_mm256_cmpeq_epi8(c.low, all), _mm256_cmpeq_epi8(c.high, all));
    };
    auto within = [&](Two x, int first, int count) {
        const __m256i from = _mm256_set1_epi8(char(first)), most = _mm256_set1_epi8(char(count - 1));
        auto half = [&](__m256i y) {
            y = _mm256_sub_epi8(y, from);
            return _mm256_cmpeq_epi8(_mm256_min_epu8(y, most), y);
        };
        return mask(half(x.low), half(x.high));
    };
    const __m256i bit = _mm256_set1_epi8(0x20);
    const Two lower{_mm256_or_si256(c.low, bit), _mm256_or_si256(c.high, bit)};
    b.high = mask(c.low, c.high);
#else
    struct Bytes {
        Byte of[64];
    };
    Bytes c, lower;
    std::memcpy(c.of, p, 64);
    for (int i = 0; i < 64; ++i) lower.of[i] = c.of[i] | 0x20;
    auto within = [](const Bytes& x, int first, int count) {
        uint64_t bits = 0;
        for (int i = 0; i < 64; ++i) bits |= uint64_t(Byte(x.of[i] - first) < count) << i;
        return bits;
    };
    auto is = [&](char one) { return within(c, one, 1); };
    b.high = within(c, 0x80, 0x80);
#endif
    b.other_break = within(c, 0x0B, 3) | within(c, 0x1C, 3);
    b.feed = is('\n');
    b.space = is(' ') | is('\t') | b.feed | b.other_break | is(0x1F);
    b.alpha = within(lower, 'a', 26);
    b.digit = within(c, '0', 10);
    b.rest = within(c, 0x80, 0x40);
    b.hash = is('#');
    b.dot = is('.');
    return b;
}

// A document as bits, one for each byte, with zeros behind the last; where a character has several
// bytes, `word` and `alnum` are set for all of them, `alpha` and `solid` for the first.
struct Marks {
    std::vector<uint64_t> word, alpha, solid, alnum, feed, rest;
    const Byte *begin = nullptr, *end = nullptr;
    size_t blocks = 0;  // with at least one zero behind the last byte
    int64_t hashes = 0, ellipses = 0, feeds = 0;
    bool plain = true;       // ASCII
    bool only_feeds = true;  // no other ends of lines

    void look_at(const Byte* classes, const Byte* from, const Byte* to) {
        begin = from, end = to;
        const size_t size = size_t(to - from);
        blocks = size / 64 + 1;
        for (auto bits : {&word, &alpha, &solid, &alnum, &feed, &rest})
            if (bits->size() < blocks + 1) bits->resize(blocks + 1);
        hashes = ellipses = feeds = 0;
        plain = only_feeds = true;
        uint64_t dots = 0, before = 0;
        Byte tail[64];
        for (size_t at = 0; at < blocks; ++at) {
            const Byte* p = from + 64 * at;
            if (at + 1 == blocks) {
                std::memset(tail, ' ', 64);
                if (size % 64) std::memcpy(tail, p, size % 64);
                p = tail;
            }
            const Block b = look(p);
            word[at] = ~b.space, alpha[at] = b.alpha, feed[at] = b.feed, rest[at] = b.rest;
            alnum[at] = solid[at] = b.alpha | b.digit;
            hashes += __builtin_popcountll(b.hash);
            feeds += __builtin_popcountll(b.feed);
            dots |= b.dot & (b.dot << 1 | before >> 63) & (b.dot << 2 | before >> 62);
            before = b.dot;
            if (b.other_break) only_feeds = false;
            if (b.high) plain = false;
        }
        for (auto bits : {&word, &alpha, &solid, &alnum, &feed, &rest}) (*bits)[blocks] = 0;
        if (dots) ellipses = count_of(view(from, to), kDots);
        if (!plain) look_at_others(classes);
    }

    size_t size() const { return size_t(end - begin); }

    View text(size_t from, size_t to) const { return view(begin + from, begin + to); }

    int64_t chars(size_t from, size_t to) const {
        return plain ? int64_t(to - from) : length(begin + from, begin + to);
    }

    // The first byte of a word from `at` on, before `to`; `to` if there is none.
    size_t first_word(size_t at, size_t to) const {
        for (size_t block = at / 64; block * 64 < to; ++block) {
            uint64_t bits = word[block];
            if (block == at / 64) bits &= ~uint64_t(0) << at % 64;
            if (bits) return std::min(to, block * 64 + size_t(__builtin_ctzll(bits)));
        }
        return to;
    }

    // Behind the last byte of a word before `to`; there is one from `at` on.
    size_t last_word(size_t to) const {
        size_t block = (to - 1) / 64;
        uint64_t bits = word[block] & (~uint64_t(0) >> (63 - (to - 1) % 64));
        while (!bits) bits = word[--block];
        return block * 64 + 64 - size_t(__builtin_clzll(bits));
    }

   private:
    void look_at_others(const Byte* classes) {
        for (size_t at = 0; at < blocks; ++at) {
            const size_t left = size() - std::min(size(), 64 * at);
            if (!left) break;
            Byte room[64] = {};
            std::memcpy(room, begin + 64 * at, std::min<size_t>(left, 64));
            uint64_t heads = look(room).high & ~rest[at];
            for (; heads; heads &= heads - 1) {
                const size_t place = 64 * at + size_t(__builtin_ctzll(heads));
                const Byte* p = begin + place;
                const Byte k = next(classes, p);
                const size_t stop = size_t(p - begin);
                if (k & kAlpha) alpha[at] |= heads & -heads;
                if (k & kSolid && !(k & kSpace)) solid[at] |= heads & -heads;
                if (k & kBreak) only_feeds = false;
                if (text(place, stop) == kEllipsis) ++ellipses;
                for (size_t i = place; i < stop; ++i) {
                    const uint64_t one = uint64_t(1) << i % 64;
                    if (k & kSpace) word[i / 64] &= ~one;
                    if (k & kAlnum) alnum[i / 64] |= one;
                }
            }
        }
    }
};

// Calls `run(from, to)` for each run of ones.
template <class Run>
void each_run(const std::vector<uint64_t>& bits, size_t blocks, Run&& run) {
    size_t from = 0;
    uint64_t before = 0;
    bool open = false;
    for (size_t at = 0; at < blocks; ++at) {
        uint64_t edges = bits[at] ^ (bits[at] << 1 | before);
        before = bits[at] >> 63;
        for (; edges; edges &= edges - 1) {
            const size_t place = 64 * at + size_t(__builtin_ctzll(edges));
            if (open) run(from, place);
            from = place;
            open = !open;
        }
    }
}

// Calls `word(characters)` for each run without spaces.
template <class Word>
void each_word(const Byte* classes, const Fast& fast, const Byte* p, const Byte* end, Word&& word) {
    while (p < end) {
        const Byte* begin = p;
        int64_t own = 0;
        while (p < end) {
            Byte k = fast.of[*p];
            if (k & (kSpace | kMulti)) {
                if (k & kSpace) break;
                const Byte* q = p;
                k = next(classes, q);
                if (k & kSpace) break;
                own -= q - p - 1;
                p = q;
            } else {
                ++p;
            }
        }
        if (p > begin) word(own + (p - begin));
        if (p < end) next(classes, p);
    }
}

// Calls `line(text)` for each line as Python's splitlines has them.
template <class Line>
void each_line(const Byte* classes, const Byte* p, const Byte* end, Line&& line) {
    while (p < end) {
        const Byte *begin = p, *stop = end;
        while (p < end) {
            const Byte* before = p;
            if (next(classes, p) & kBreak) {
                stop = before;
                if (*before == '\r' && p < end && *p == '\n') ++p;
                break;
            }
        }
        line(view(begin, stop));
    }
}

bool trails_off(View line) { return ends(line, kDots) || ends(line, kEllipsis); }

unsigned stop_word(View word) {
    static constexpr View kWords[] = {"the", "be", "to", "of", "and", "that", "have", "with"};
    if (word.size() < 2 || word.size() > 4) return 0;
    for (unsigned i = 0; i < 8; ++i)
        if (word == kWords[i]) return 1u << i;
    return 0;
}

// Runs between line feeds; those at the edges of the text may be empty.
struct LineCounts {
    int64_t pieces = 0, repeated = 0, repeated_chars = 0;   // runs, as split at one or more feeds
    int64_t lines = 0, terminal = 0, brief = 0, again = 0;  // that are not blank; chars of repeats
    int64_t bullets = 0, trailing = 0;
};

bool is_bullet(View line) { return begins(line, "-") || begins(line, "\xE2\x80\xA2"); }

// Repeated ones are counted only where `names` is given.
LineCounts lines_of(const Byte* classes, const Marks& marks, int64_t brief, Names* names) {
    LineCounts counts;
    if (names) names->open(size_t(marks.feeds) + 1);
    const Byte *begin = marks.begin, *end = marks.end;
    if (begin == end) {
        counts.pieces = 1;
        return counts;
    }
    const bool lead = *begin == '\n', trail = end[-1] == '\n';
    counts.pieces = lead + trail;
    counts.repeated = lead && trail;
    auto visit = [&](size_t from, size_t to) {
        if (from == to) return;
        bool fresh = true;
        if (names) names->put(marks.text(from, to), &fresh);
        const int64_t chars = marks.chars(from, to);
        ++counts.pieces;
        if (!fresh) ++counts.repeated, counts.repeated_chars += chars;
        const size_t first = marks.first_word(from, to);
        if (first == to) return;
        ++counts.lines;
        const Byte mark = begin[to - 1] < 0x80 ? classes[begin[to - 1]]
                                               : last(classes, begin + from, begin + to);
        counts.terminal += (mark & kTerminal) != 0;
        counts.brief += chars <= brief;
        if (!fresh) counts.again += chars;
        const View words = marks.text(first, marks.last_word(to));
        counts.bullets += is_bullet(words);
        counts.trailing += trails_off(words);
    };
    size_t from = 0;
    for (size_t at = 0; at < marks.blocks; ++at)
        for (uint64_t feeds = marks.feed[at]; feeds; feeds &= feeds - 1) {
            const size_t to = 64 * at + size_t(__builtin_ctzll(feeds));
            visit(from, to);
            from = to + 1;
        }
    visit(from, marks.size());
    return counts;
}

// Which of eight stop words occur, a bit for each.
unsigned stop_words_of(const Marks& marks) {
    unsigned found = 0;
    uint64_t before = 0;
    for (size_t at = 0; at < marks.blocks && found != 0xFF; ++at) {
        const uint64_t words = marks.word[at], gaps = ~words, ahead = ~marks.word[at + 1];
        auto gap = [&](int k) { return gaps >> k | ahead << (64 - k); };
        uint64_t some = words & ~(words << 1 | before) & ~gap(1) & (gap(2) | gap(3) | gap(4));
        before = words >> 63;
        for (; some; some &= some - 1) {
            const int bit = __builtin_ctzll(some);
            const size_t size = gap(2) >> bit & 1 ? 2 : gap(3) >> bit & 1 ? 3 : 4;
            const size_t from = 64 * at + size_t(bit);
            found |= stop_word(marks.text(from, from + size));
        }
    }
    return found;
}

// How many runs of words have a bit of `inside`, which lies in them: a carry runs from the bit to
// the end of its run. `without(end)` is called for those that have none.
template <class Without>
int64_t runs_with(const Marks& marks, const std::vector<uint64_t>& inside, Without&& without) {
    int64_t count = 0;
    uint64_t carry = 0, before = 0;
    for (size_t at = 0; at < marks.blocks; ++at) {
        const uint64_t words = marks.word[at];
        uint64_t sum, more;
        const bool over = __builtin_add_overflow(words, inside[at], &sum);
        const bool again = __builtin_add_overflow(sum, carry, &more);
        carry = over | again;
        const uint64_t ends = ~words & (words << 1 | before), with = more & ends;
        before = words >> 63;
        count += __builtin_popcountll(with);
        for (uint64_t none = ends & ~with; none; none &= none - 1)
            without(64 * at + size_t(__builtin_ctzll(none)));
    }
    return count;
}

constexpr int kColumns = 17;
constexpr int kFirst = 2, kTop = 4, kMost = 10;
constexpr int kRepeats = 7 + kMost - kFirst + 1;

struct Room {
    Marks marks;
    Names names;
    Pairs pairs;
    std::vector<View> texts;
    std::vector<uint32_t> words, grams, count, places;
    std::vector<int64_t> ahead;  // characters of the words before
    std::vector<Byte> seen;
};

void repeats_of(const Byte* classes, const Byte* begin, const Byte* end, Room& room, int64_t* out) {
    const Marks& marks = room.marks;
    room.marks.look_at(classes, begin, end);
    const LineCounts lines = lines_of(classes, marks, 0, &room.names);
    out[4] = lines.pieces, out[5] = lines.repeated, out[6] = lines.repeated_chars;
    const View text = right_stripped(classes, left_stripped(classes, view(begin, end)));
    room.names.open(size_t(marks.feeds) / 2 + 2);
    for (size_t at = 0; at <= text.size();) {
        size_t stop = text.find("\n\n", at);
        if (stop == View::npos) stop = text.size();
        bool fresh;
        const View piece = text.substr(at, stop - at);
        room.names.put(piece, &fresh);
        ++out[1];
        if (!fresh) {
            auto p = reinterpret_cast<const Byte*>(piece.data());
            ++out[2], out[3] += length(p, p + piece.size());
        }
        at = stop + 1;
        while (stop < text.size() && at < text.size() && text[at] == '\n') ++at;
    }

    room.texts.clear();
    room.ahead.assign(1, 0);
    out[0] = marks.chars(0, marks.size());
    each_run(marks.word, marks.blocks, [&](size_t from, size_t to) {
        room.texts.push_back(marks.text(from, to));
        room.ahead.push_back(room.ahead.back() + marks.chars(from, to));
    });
    room.names.open(room.texts.size());
    room.words.clear();
    room.count.clear();
    for (const View word : room.texts) {
        bool fresh;
        const uint32_t number = room.names.put(word, &fresh);
        if (fresh) room.count.push_back(0);
        ++room.count[number];
        room.words.push_back(number);
    }
    const auto words = uint32_t(room.words.size());
    constexpr uint32_t kNone = ~0u;
    room.grams = room.words;
    room.places.clear();
    for (uint32_t at = 0; at < words; ++at) {
        if (room.count[room.words[at]] > 1) room.places.push_back(at);
        else room.grams[at] = kNone;
    }
    // An n-gram occurs again only where the (n-1)-grams that it begins and ends with do, so from n
    // to n the places become few; a number stands for exactly one sequence of words.
    for (uint32_t n = kFirst; n <= kMost && n <= words; ++n) {
        room.pairs.open(room.places.size());
        room.count.clear();
        size_t left = 0;
        for (const uint32_t at : room.places) {
            if (at + n <= words && room.grams[at + 1] != kNone) {
                const uint32_t number = room.pairs.put(room.grams[at], room.words[at + n - 1]);
                if (number == room.count.size()) room.count.push_back(0);
                ++room.count[number];
                room.grams[at] = number;
                room.places[left++] = at;
            } else {
                room.grams[at] = kNone;
            }
        }
        room.places.resize(left);
        left = 0;
        uint32_t best = 1, best_at = 0;
        int64_t repeated = 0;
        uint32_t from = 0;
        room.seen.assign(room.count.size(), 0);
        for (const uint32_t at : room.places) {
            const uint32_t number = room.grams[at], count = room.count[number];
            if (count < 2) {
                room.grams[at] = kNone;
                continue;
            }
            room.places[left++] = at;
            if (count > best) best = count, best_at = at;
            if (at < from) continue;
            if (room.seen[number]) {
                repeated += room.ahead[at + n] - room.ahead[at];
                from = at + n;
            }
            room.seen[number] = 1;
        }
        room.places.resize(left);
        out[7 + n - kFirst] =
            n <= kTop ? best * (room.ahead[best_at + n] - room.ahead[best_at] + n - 1) : repeated;
    }
}

// ------------------------------------------------------------------- the rules of C4

bool has_any_case(View text, View lower) {
    const char first = lower[0], other = char(first - 32);
    for (size_t at = 0; at + lower.size() <= text.size(); ++at) {
        if (text[at] != first && text[at] != other) continue;
        size_t i = 1;
        for (; i < lower.size(); ++i) {
            char c = text[at + i];
            if (c >= 'A' && c <= 'Z') c += 32;
            if (c != lower[i]) break;
        }
        if (i == lower.size()) return true;
    }
    return false;
}

constexpr View kPolicies[] = {"terms of use", "privacy policy", "cookie policy",
                              "uses cookies", "use of cookies", "use cookies"};

// Writes a line without its citations, [1], [edit] and [citation needed]; returns its bytes.
size_t without_citations(View line, char* out) {
    static constexpr View kMarks[] = {"[edit]", "[citation needed]"};
    size_t size = 0;
    for (size_t at = 0; at < line.size();) {
        if (line[at] == '[') {
            size_t stop = at + 1;
            while (stop < line.size() && line[stop] >= '0' && line[stop] <= '9') ++stop;
            if (stop < line.size() && line[stop] == ']') {
                at = stop + 1;
                continue;
            }
            bool marked = false;
            for (View mark : kMarks)
                if (!marked && begins(line.substr(at), mark)) at += mark.size(), marked = true;
            if (marked) continue;
        }
        out[size++] = line[at++];
    }
    return size;
}

// Sentences: they end with a run of . ? !, with what closes after it, before a space or the end.
int64_t sentences_of(const Byte* classes, View line) {
    int64_t count = 0;
    bool open = false;
    for (size_t at = 0; at < line.size();) {
        const char c = line[at];
        if (c == '.' || c == '?' || c == '!') {
            while (at < line.size() && std::strchr(".?!", line[at]) && line[at]) ++at;
            while (at < line.size() && std::strchr("\"')]", line[at]) && line[at]) ++at;
            auto p = reinterpret_cast<const Byte*>(line.data()) + at;
            const bool closed = at == line.size() || next(classes, p) & kSpace;
            count += closed && open;
            open = !closed;
        } else {
            auto p = reinterpret_cast<const Byte*>(line.data()) + at;
            const Byte* before = p;
            if (!(next(classes, p) & kSpace)) open = true;
            at += p - before;
        }
    }
    return count + open;
}

struct C4Rules {
    int64_t min_words, max_word, min_sentences;
    int64_t terminal, javascript, curly, lorem, policy, citations;
};

enum { kLong, kUnended, kFew, kScript, kPolicy, kLines };

// -1: keep; 0 lorem ipsum, 1 curly bracket, 2 too few sentences. `out` gets what is left.
int clean(const Byte* classes, const Fast& fast, const C4Rules& rules, View text, char* out,
          size_t* size, int64_t* dropped, std::vector<char>& line_room) {
    auto begin = reinterpret_cast<const Byte*>(text.data()), end = begin + text.size();
    int verdict = -1;
    int64_t sentences = 0;
    *size = 0;
    each_line(classes, begin, end, [&](View raw) {
        if (verdict >= 0) return;
        View line = right_stripped(classes, left_stripped(classes, raw));
        int64_t words = 0, longest = 0;
        auto p = reinterpret_cast<const Byte*>(line.data());
        each_word(classes, fast, p, p + line.size(), [&](int64_t chars) {
            ++words;
            longest = std::max(longest, chars);
        });
        if (longest > rules.max_word) return void(++dropped[kLong]);
        if (rules.citations && line.find('[') != View::npos) {
            line_room.resize(std::max(line_room.size(), line.size()));
            line = {line_room.data(), without_citations(line, line_room.data())};
        }
        if (rules.terminal && (line.empty() || !std::strchr(".?!\"'", line.back()) ||
                               !line.back() || ends(line, kDots)))
            return void(++dropped[kUnended]);
        if (words < rules.min_words) return void(++dropped[kFew]);
        if (rules.lorem && has_any_case(line, "lorem ipsum")) return void(verdict = 0);
        if (rules.javascript && has_any_case(line, "javascript")) return void(++dropped[kScript]);
        if (rules.curly && line.find('{') != View::npos) return void(verdict = 1);
        if (rules.policy)
            for (View phrase : kPolicies)
                if (has_any_case(line, phrase)) return void(++dropped[kPolicy]);
        sentences += sentences_of(classes, line);
        if (*size) out[(*size)++] = '\n';
        std::memcpy(out + *size, line.data(), line.size());
        *size += line.size();
    });
    const View left = right_stripped(classes, left_stripped(classes, {out, *size}));
    std::memmove(out, left.data(), *size = left.size());
    if (verdict < 0 && sentences < rules.min_sentences) verdict = 2;
    return verdict;
}

// ------------------------------------------------------------------- n-grams of benchmarks

// Calls `gram(hash)` for each n words in a row, words being runs of letters and digits. Letters of
// both cases have one hash, and some other characters share one too. It returns whether to go on.
template <class Gram>
void each_gram(const Marks& marks, int64_t n, std::vector<uint64_t>& ring, Gram&& gram) {
    constexpr uint64_t kBase = 0xD1342543DE82EF95ull, kFold = 0x2020202020202020ull;
    uint64_t highest = 1, hash = 0;
    for (int64_t i = 0; i < n; ++i) highest *= kBase;
    ring.assign(size_t(n), 0);
    int64_t words = 0, slot = 0;
    bool on = true;
    each_run(marks.alnum, marks.blocks, [&](size_t from, size_t to) {
        if (!on) return;
        const View text = marks.text(from, to);
        const uint64_t word = hashed(text.data(), text.size(), kFold);
        hash = hash * kBase + word - ring[slot] * highest;
        ring[slot] = word;
        if (++slot == n) slot = 0;
        if (++words >= n) on = gram(mix(hash) | 1);
    });
}

}  // namespace

extern "C" {

// [n, kColumns] characters, words, those with more than signs and their characters, those with a
// letter, hashes, ellipses, stop words, lines, those with a bullet and with an ellipsis; then of
// runs between line feeds: not blank, ended by a terminal mark, brief, characters of repeated ones;
// line feeds; bytes. Repeated runs are counted unless `brief` is negative.
void describe(const Byte* data, const int64_t* offsets, int64_t n, const Byte* alive,
              const Byte* classes, int64_t brief, int64_t* out) {
    Marks marks;
    Names names;
    for (int64_t i = 0; i < n; ++i) {
        if (!alive[i]) continue;
        marks.look_at(classes, data + offsets[i], data + offsets[i + 1]);
        int64_t* o = out + i * kColumns;
        o[0] = o[16] = int64_t(marks.size());
        for (size_t at = 0; at < marks.blocks; ++at) {
            o[0] -= __builtin_popcountll(marks.rest[at]);
            o[3] += __builtin_popcountll(marks.word[at] & ~marks.rest[at]);
        }
        // Of words of signs alone, which are few, the characters are taken off again.
        int64_t signs = 0;
        o[2] = runs_with(marks, marks.solid, [&](size_t to) {
            ++signs;
            for (size_t p = to; p-- > 0 && marks.word[p / 64] >> p % 64 & 1;)
                o[3] -= !(marks.rest[p / 64] >> p % 64 & 1);
        });
        o[1] = o[2] + signs;
        o[4] = runs_with(marks, marks.alpha, [](size_t) {});
        o[5] = marks.hashes;
        o[6] = marks.ellipses;
        o[7] = __builtin_popcount(stop_words_of(marks));
        const LineCounts lines = lines_of(classes, marks, brief, brief < 0 ? nullptr : &names);
        if (marks.only_feeds) {
            o[8] = marks.feeds + (marks.size() && marks.end[-1] != '\n');
            o[9] = lines.bullets, o[10] = lines.trailing;
        } else {
            each_line(classes, marks.begin, marks.end, [&](View line) {
                ++o[8];
                const View from = left_stripped(classes, line);
                o[9] += is_bullet(from);
                o[10] += trails_off(right_stripped(classes, from));
            });
        }
        o[11] = lines.lines, o[12] = lines.terminal, o[13] = lines.brief, o[14] = lines.again;
        o[15] = marks.feeds;
    }
}

// [n, kRepeats] characters; paragraphs, repeated ones and their characters; the same of lines;
// characters of the most frequent 2-, 3- and 4-gram; of repeated 5- to 10-grams.
void repeats(const Byte* data, const int64_t* offsets, int64_t n, const Byte* alive,
             const Byte* classes, int64_t* out) {
    Room room;
    for (int64_t i = 0; i < n; ++i)
        if (alive[i])
            repeats_of(classes, data + offsets[i], data + offsets[i + 1], room,
                       out + i * kRepeats);
}

// The texts as the rules of C4 leave them, with their offsets; lines dropped by each rule.
void c4(const Byte* data, const int64_t* offsets, int64_t n, const Byte* alive, const Byte* classes,
        const C4Rules* rules, char* out, int64_t* out_offsets, int8_t* verdicts, int64_t* dropped) {
    const Fast fast(classes);
    std::vector<char> room;
    int64_t at = 0;
    out_offsets[0] = 0;
    for (int64_t i = 0; i < n; ++i) {
        size_t size = 0;
        verdicts[i] = -1;
        if (alive[i]) {
            const View text = view(data + offsets[i], data + offsets[i + 1]);
            verdicts[i] =
                int8_t(clean(classes, fast, *rules, text, out + at, &size, dropped, room));
            at += verdicts[i] < 0 ? int64_t(size) : 0;
        }
        out_offsets[i + 1] = at;
    }
}

// Hashes of all n-grams of the documents, up to `most`; returns how many there are.
int64_t gram_hashes(const Byte* data, const int64_t* offsets, int64_t n, const Byte* classes,
                    int64_t size, int64_t most, uint64_t* out) {
    Marks marks;
    std::vector<uint64_t> ring;
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
        marks.look_at(classes, data + offsets[i], data + offsets[i + 1]);
        each_gram(marks, size, ring, [&](uint64_t hash) {
            if (count < most) out[count] = hash;
            ++count;
            return true;
        });
    }
    return count;
}

// Which documents have an n-gram whose hash is in a table of 2^k places, 0 being none.
void contains(const Byte* data, const int64_t* offsets, int64_t n, const Byte* alive,
              const Byte* classes, int64_t size, const uint64_t* table, int64_t places,
              Byte* found) {
    Marks marks;
    std::vector<uint64_t> ring;
    const uint64_t mask = uint64_t(places) - 1;
    for (int64_t i = 0; i < n; ++i) {
        if (!alive[i]) continue;
        marks.look_at(classes, data + offsets[i], data + offsets[i + 1]);
        each_gram(marks, size, ring, [&](uint64_t hash) {
            for (uint64_t at = hash >> 20 & mask; table[at]; at = (at + 1) & mask)
                if (table[at] == hash) found[i] = 1;
            return !found[i];
        });
    }
}

// What personal data documents may have: 1 an @; 2 seven digits with at most two signs between
// them; 4 four numbers with dots between them; 8 three colons with at most four signs between them.
void hints(const Byte* data, const int64_t* offsets, int64_t n, const Byte* alive, Byte* out) {
    for (int64_t i = 0; i < n; ++i) {
        if (!alive[i] || offsets[i] == offsets[i + 1]) continue;
        const Byte *begin = data + offsets[i], *end = data + offsets[i + 1];
        Byte hint = std::memchr(begin, '@', size_t(end - begin)) ? 1 : 0;
        const Byte *digit = begin - 9, *colon = begin - 9;
        int64_t digits = 0, numbers = 0, colons = 0;
        for (const Byte* p = begin; p < end; ++p) {
            if (Byte(*p - '0') < 10) {
                const int64_t gap = p - digit;
                digits = gap <= 3 ? digits + 1 : 1;
                if (gap > 1) numbers = gap == 2 && p[-1] == '.' ? numbers + 1 : 1;
                if (digits >= 7) hint |= 2;
                if (numbers >= 4) hint |= 4;
                digit = p;
            } else if (*p == ':') {
                colons = p - colon <= 5 ? colons + 1 : 1;
                if (colons >= 3) hint |= 8;
                colon = p;
            }
        }
        out[i] = hint;
    }
}
}
