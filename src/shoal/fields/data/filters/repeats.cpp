// What is repeated in a document: paragraphs, lines and n-grams of words.
//
// Source: Rae et al., Scaling Language Models: Methods, Analysis & Insights from Training Gopher,
// 2021, appendix A.1.1.
//
// Most documents repeat little. Where there are limits, sketches that may say too much, but never
// too little, show that; only what they leave open is counted, and then compared byte by byte.

namespace {

// Characters; paragraphs, those that came before and their characters; the same of lines.
struct PieceRepeats {
    int64_t chars = 0;
    int64_t paragraphs = 0, repeated_paragraphs = 0, repeated_paragraph_chars = 0;
    int64_t lines = 0, repeated_lines = 0, repeated_line_chars = 0;
};

constexpr size_t kFirst = 2, kTop = 4, kMost = 10;
constexpr size_t kGrams = kMost - kFirst + 1, kRows = kMost - kTop;

// Most shares: of the paragraphs, and of the characters that are in them; of the lines, and of the
// characters; of the characters, for each n.
struct RepeatLimits {
    double pieces[4], grams[kGrams];

    // Beyond this a limit is surely exceeded; up to two fewer are surely within it.
    static int64_t enough(double share, int64_t of) { return int64_t(share * double(of)) + 1; }

    // Whether all of them are, or one of them is not, by more or less than they could be rounded.
    bool within(const PieceRepeats& counts) const { return most(counts) <= -2; }
    bool exceeded(const PieceRepeats& counts) const { return most(counts) > 0; }

   private:
    int64_t most(const PieceRepeats& c) const {
        return std::max({c.repeated_paragraphs - enough(pieces[0], c.paragraphs),
                         c.repeated_paragraph_chars - enough(pieces[1], c.chars),
                         c.repeated_lines - enough(pieces[2], c.lines),
                         c.repeated_line_chars - enough(pieces[3], c.chars)});
    }
};

struct HashedLine {
    View text;
    uint64_t hash;
};

// Room that is kept from document to document.
class HashedLines {
   public:
    const HashedLine* begin() const { return rows_.data(); }
    const HashedLine* end() const { return rows_.data() + count_; }
    size_t size() const { return count_; }

    void look_at(const Pieces& pieces) {
        if (rows_.size() <= pieces.feeds()) rows_.resize(2 * pieces.feeds() + 1);
        HashedLine* line = rows_.data();
        pieces.each([&](View piece) {
            *line++ = {piece, long_hash(piece)};
            return true;
        });
        count_ = size_t(line - rows_.data());
    }

   private:
    std::vector<HashedLine> rows_;
    size_t count_ = 0;
};

// A paragraph's hash is made of those of its lines, so its bytes are read once. `Set` is Seen, or
// Sketch for counts that may be too high.
template <class Set>
PieceRepeats pieces_of(const Byte* classes, View text, const Pieces& pieces,
                       const HashedLines& hashed, Set& lines, Set& paragraphs) {
    PieceRepeats counts;
    counts.chars = pieces.chars(text);
    lines.open(hashed.size());
    for (const HashedLine& line : hashed) {
        const bool seen = lines.put(line.text, line.hash);
        counts.repeated_lines += seen;
        if constexpr (Set::kExact)
            counts.repeated_line_chars += seen ? pieces.chars(line.text) : 0;
        else  // in bytes, which are as many or more; without a branch
            counts.repeated_line_chars += -int64_t(seen) & int64_t(line.text.size());
    }
    // An empty piece at each edge.
    const bool lead = !text.empty() && text.front() == '\n';
    const bool trail = !text.empty() && text.back() == '\n';
    counts.lines = int64_t(hashed.size()) + (text.empty() ? 1 : lead + trail);
    counts.repeated_lines += lead && trail;

    paragraphs.open(pieces.doubles() + 1);
    const View inner = stripped(classes, text);
    const char *begin = inner.data(), *end = begin + inner.size();
    const char *from = begin, *to = begin;
    uint64_t hash = 0;
    auto close = [&] {
        const View paragraph(from, size_t(to - from));
        ++counts.paragraphs;
        if (paragraphs.put(paragraph, hash)) {
            ++counts.repeated_paragraphs;
            counts.repeated_paragraph_chars += pieces.chars(paragraph);
        }
    };
    for (const HashedLine& line : hashed) {
        const char *first = line.text.data(), *stop = first + line.text.size();
        uint64_t own = line.hash;
        if (first < begin || stop > end) {
            first = std::max(first, begin), stop = std::min(stop, end);
            if (first >= stop) continue;
            own = long_hash({first, size_t(stop - first)});
        }
        if (first > to + 1) {
            close();
            from = first, hash = 0;
        }
        hash = mix(hash * 3 + own);
        to = stop;
    }
    close();
    return counts;
}

// A word's first and last eight bytes; those of shorter words are all of it, at both ends.
struct Ends {
    uint64_t head, tail;
    bool operator==(const Ends& other) const { return head == other.head && tail == other.tail; }
};

inline Ends ends_of(View text, size_t from, size_t to) {
    const size_t size = to - from;
    if (__builtin_expect(from + 8 <= text.size() && to >= 8, 1)) {
        const size_t cut = 8 * (8 - std::min<size_t>(size, 8));
        return {load<uint64_t>(&text[from]) << cut, load<uint64_t>(text.data() + to - 8) >> cut};
    }
    Ends ends{0, 0};
    const size_t some = std::min<size_t>(size, 8);
    std::memcpy(reinterpret_cast<char*>(&ends.head) + 8 - some, &text[from], some);
    std::memcpy(&ends.tail, text.data() + to - some, some);
    return ends;
}

inline uint32_t join(uint32_t a, uint64_t b) {
#if defined(__SSE4_2__) && !defined(SHOAL_SCALAR)
    return uint32_t(_mm_crc32_u64(a, b));
#else
    return uint32_t(mix(b ^ mix(a + 1)) >> 16);
#endif
}

inline uint32_t ends_hash(size_t size, const Ends& ends) {
    return join(join(uint32_t(size), ends.head), ends.tail);
}

class Grams {
   public:
    // Characters of the most frequent 2-, 3- and 4-gram, and of repeated 5- to 10-grams. With
    // limits, those that are surely within their limit, and those behind one that is not, stay 0,
    // and what is not within its limit may be too low, but not so that it is.
    void count(const Byte* classes, View text, const RepeatLimits* limits, int64_t* out) {
        marks_.look_at(classes, text);
        uint64_t before = 0;
        const size_t edges = places_of(
            marks_.blocks,
            [&](size_t at) {
                const uint64_t word = marks_.word[at], edges = word ^ (word << 1 | before);
                before = word >> 63;
                return edges;
            },
            edges_);
        words_ = edges / 2;
        bool needed[kGrams];
        std::fill_n(needed, kGrams, true);
        if (limits) bound(*limits, needed);
        hashes_.clear();
        for (size_t n = kFirst; n <= kMost && n <= words_; ++n) {
            if (!needed[n - kFirst]) continue;
            const int64_t enough =
                limits ? limits->enough(limits->grams[n - kFirst], marks_.chars()) : INT64_MAX;
            out[n - kFirst] = n <= kTop ? top(n) : repeated(n, enough);
            if (out[n - kFirst] > enough) return;
        }
    }

   private:
    static constexpr uint64_t kBase = 0xD1342543DE82EF95ull;
    static constexpr size_t kFew = 4096, kChunk = 512;  // sums, and words, that the caches hold

    struct Row {
        uint32_t number, tag;
    };

    Marks<kWords> marks_;
    std::vector<uint32_t> edges_;  // where words begin and end, in turn
    size_t words_ = 0;
    std::vector<uint32_t> own_, pairs_, sums_, firsts_, counts_;
    unsigned shift_ = 0;
    std::vector<uint64_t> bloom_, hashes_;
    std::vector<Row> table_;

    size_t begin(size_t word) const { return edges_[2 * word]; }
    size_t end(size_t word) const { return edges_[2 * word + 1]; }

    // Bounds, from hashes alone, that are never too low. Of each 2-gram the bytes are summed up by
    // its hash, and the most frequent n-grams have few more than the largest sum. A longer one is
    // repeated only where the hashes of all its 5-grams, n - 4 in a row, came before: the bytes of
    // the words in such rows are counted, once each.
    //
    // Loops are short and without branches, so that most of them work on several words at once.
    void bound(const RepeatLimits& limits, bool* needed) {
        const size_t words = words_, places = room_for(words), rows = places / 8;
        const size_t few = std::min(places, kFew);
        shift_ = unsigned(32 - lowest(few));
        if (bloom_.size() < rows) bloom_.resize(rows);
        if (own_.size() < words) own_.resize(2 * words), pairs_.resize(2 * words);
        sums_.assign(few, 0);
        std::fill_n(bloom_.begin(), rows, 0);
        uint32_t *own = own_.data(), *pairs = pairs_.data(), *sums = sums_.data();
        const uint32_t* edges = edges_.data();
        uint64_t* bloom = bloom_.data();
        const View text = marks_.text;
        uint32_t slots[kChunk], sizes[kChunk], indices[kChunk];
        uint64_t bits[kChunk];
        Byte seen[kChunk];
        size_t row_length = 0, covered[kRows] = {};
        int64_t repeats[kRows] = {};
        for (size_t first = 0; first < words; first += kChunk) {
            const size_t end = std::min(words, first + kChunk);
            for (size_t word = first; word < end; ++word) {
                const size_t from = edges[2 * word], to = edges[2 * word + 1];
                own[word] = ends_hash(to - from, ends_of(text, from, to));
            }
            const size_t second = std::max<size_t>(first, 1), fifth = std::max<size_t>(first, 4);
            pair_up(own + second - 1, edges + 2 * second - 2, end - second, shift_, pairs + second,
                    slots, sizes);
            for (size_t i = 0; i < end - second; ++i) sums[slots[i]] += sizes[i];
            if (end <= fifth) break;
            sketch(own + fifth - 4, pairs + fifth, end - fifth, uint32_t(rows - 1), indices, bits);
            for (size_t i = 0; i < end - fifth; ++i) {
                uint64_t& row = bloom[indices[i]];
                seen[i] = (bits[i] & ~row) == 0;
                row |= bits[i];
            }
            for (size_t word = fifth; word < end; ++word) {
                if (word + 8 <= end && !load<uint64_t>(seen + word - fifth)) word += 7;
                if (!seen[word - fifth]) {
                    row_length = 0;
                    continue;
                }
                row_length = std::min(row_length + 1, kRows);
                for (size_t i = 0; i < row_length; ++i)
                    for (covered[i] = std::max(covered[i], word - 4 - i); covered[i] <= word;
                         ++covered[i])
                        repeats[i] += edges[2 * covered[i] + 1] - edges[2 * covered[i]];
            }
        }
        const uint32_t most = *std::max_element(sums_.begin(), sums_.end());
        const int64_t chars = marks_.chars();
        for (size_t n = kFirst; n <= kMost; ++n) {
            const int64_t within = limits.enough(limits.grams[n - kFirst], chars) - 2;
            if (n > kTop) {
                needed[n - kFirst] = repeats[n - kTop - 1] > within;
            } else {
                // Most times two characters and a space: less than three times the largest sum.
                needed[n - kFirst] = (n == kFirst ? 1 : 3) * int64_t(most) > within;
                if (n > kFirst && needed[n - kFirst]) needed[n - kFirst] = most_of(n) > within;
            }
        }
    }

    // Hashes and bytes of 2-grams.
    static void pair_up(const uint32_t* __restrict own, const uint32_t* __restrict edges,
                        size_t count, unsigned shift, uint32_t* __restrict pairs,
                        uint32_t* __restrict slots, uint32_t* __restrict sizes) {
        for (size_t i = 0; i < count; ++i) {
            pairs[i] = (own[i] * 0x9E3779B1u ^ own[i + 1]) * 0x85EBCA77u;
            slots[i] = pairs[i] >> shift;
            sizes[i] = edges[2 * i + 3] - edges[2 * i + 2] + edges[2 * i + 1] - edges[2 * i] + 1;
        }
    }

    // Where 5-grams are in a sketch: the first word, and the pairs that end with the third and the
    // last, make their hash.
    static void sketch(const uint32_t* __restrict own, const uint32_t* __restrict pairs,
                       size_t count, uint32_t mask, uint32_t* __restrict indices,
                       uint64_t* __restrict bits) {
        for (size_t i = 0; i < count; ++i) {
            uint32_t five = (own[i] * 0xC2B2AE3Du ^ *(pairs + i - 2)) * 0x27D4EB2Fu;
            five = (five ^ five >> 15 ^ pairs[i]) * 0x165667B1u;
            indices[i] = five ^ five >> 13;
        }
        size_t i = 0;
#if defined(SHOAL_WIDE)
        const __m512i one = _mm512_set1_epi64(1), six = _mm512_set1_epi64(63);
        auto bit = [&](__m256i five, int shift) {
            const __m512i all = _mm512_cvtepu32_epi64(_mm256_srli_epi32(five, shift));
            return _mm512_sllv_epi64(one, _mm512_and_si512(all, six));
        };
        for (; i + 8 <= count; i += 8) {
            const __m256i five = _mm256_mullo_epi32(
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(indices + i)),
                _mm256_set1_epi32(int(0x85EBCA77u)));
            const __m512i all = _mm512_or_si512(bit(five, 26), bit(five, 20));
            _mm512_storeu_si512(bits + i, _mm512_or_si512(all, bit(five, 14)));
        }
#endif
        for (; i < count; ++i) {
            const uint32_t five = indices[i] * 0x85EBCA77u;
            bits[i] = uint64_t(1) << (five >> 26) | uint64_t(1) << (five >> 20 & 63) |
                      uint64_t(1) << (five >> 14 & 63);
        }
        for (i = 0; i < count; ++i) indices[i] = (indices[i] ^ indices[i] >> 16) & mask;
    }

    // An n-gram has at most as many occurrences as each of its 2-grams, whose sums are known.
    int64_t most_of(size_t n) const {
        double most = 0;
        for (size_t word = 0; word + n <= words_; ++word) {
            double count = double(words_), bytes = -1;
            for (size_t i = word; i < word + n; ++i) {
                bytes += double(end(i) - begin(i) + 1);
                if (i == word) continue;
                const size_t pair = end(i) - begin(i) + end(i - 1) - begin(i - 1) + 1;
                count = std::min(count, double(sums_[pairs_[i] >> shift_]) / double(pair));
            }
            most = std::max(most, count * bytes);
        }
        return int64_t(most) + 1;
    }

    // Goes on with the hashes of all words before each word, from which those of n-grams follow.
    void hash_to(size_t last) {
        const View text = marks_.text;
        if (hashes_.empty()) hashes_.push_back(0);
        for (size_t word = hashes_.size() - 1; word < last; ++word) {
            const size_t from = begin(word), to = end(word);
            uint64_t own = ends_hash(to - from, ends_of(text, from, to));
            if (to - from > 16) own ^= hashed(&text[from], to - from);
            hashes_.push_back(hashes_.back() * kBase + mix(own + 1));
        }
    }

    bool same_words(size_t one, size_t other, size_t n) const {
        const View text = marks_.text;
        const size_t size = end(one + n - 1) - begin(one);
        if (size == end(other + n - 1) - begin(other) &&
            same(&text[begin(one)], &text[begin(other)], size))
            return true;
        for (; n-- > 0; ++one, ++other) {  // there may be other spaces between them
            const size_t own = end(one) - begin(one);
            if (own != end(other) - begin(other) ||
                !same(&text[begin(one)], &text[begin(other)], own))
                return false;
        }
        return true;
    }

    int64_t chars_of(size_t word, size_t n) const {
        int64_t chars = 0;
        for (; n-- > 0; ++word) chars += marks_.chars(begin(word), end(word));
        return chars;
    }

    // Calls `visit(word, number)` for the n words from each word on, with the place in `firsts_` of
    // those that are the same; `fresh` says that there were none before. `visit` returns by how
    // many words to go on, 0 to stop.
    template <class Visit>
    void each_gram_of(size_t n, Visit&& visit) {
        const size_t places = room_for(words_), mask = places - 1;
        table_.assign(places, Row{0, 0});
        firsts_.clear();
        uint64_t highest = 1;
        for (size_t i = 0; i < n; ++i) highest *= kBase;
        size_t step = 1;
        for (size_t word = 0; step && word + n <= words_; word += step) {
            if (hashes_.size() <= word + n) hash_to(std::min(words_, word + n + 64));
            const uint64_t hash = mix(hashes_[word + n] - hashes_[word] * highest);
            const auto tag = uint32_t(hash >> 32);
            for (size_t at = hash & mask;; at = (at + 1) & mask) {
                Row& row = table_[at];
                if (!row.number) {
                    firsts_.push_back(uint32_t(word));
                    row = {uint32_t(firsts_.size()), tag};
                    step = visit(word, row.number - 1, true);
                    break;
                }
                if (row.tag == tag && same_words(firsts_[row.number - 1], word, n)) {
                    step = visit(word, row.number - 1, false);
                    break;
                }
            }
        }
    }

    // Characters of all occurrences of the most frequent n-gram, the first of several.
    int64_t top(size_t n) {
        counts_.clear();
        each_gram_of(n, [&](size_t, size_t number, bool fresh) {
            if (fresh) counts_.push_back(0);
            ++counts_[number];
            return 1;
        });
        const auto best = std::max_element(counts_.begin(), counts_.end());
        const size_t first = firsts_[size_t(best - counts_.begin())];
        return *best * (chars_of(first, n) + int64_t(n) - 1);
    }

    // Characters of n-grams that came before; none is counted twice. Not exact beyond `enough`.
    int64_t repeated(size_t n, int64_t enough) {
        int64_t chars = 0;
        each_gram_of(n, [&](size_t word, size_t, bool fresh) {
            if (fresh) return size_t(1);
            chars += chars_of(word, n);
            return chars > enough ? 0 : n;
        });
        return chars;
    }
};

}  // namespace

extern "C" {

// [n, 16] characters; paragraphs, repeated ones and their characters; the same of lines;
// characters of the most frequent 2-, 3- and 4-gram; of repeated 5- to 10-grams. With limits,
// repeated ones may be 0 where they are surely within their limits, and where something before
// them is not.
void repeats(const Byte* data, const int64_t* offsets, int64_t n, const Byte* alive,
             const Byte* classes, const RepeatLimits* limits, int64_t* out) {
    constexpr size_t kPieces = sizeof(PieceRepeats) / sizeof(int64_t);
    Pieces pieces;
    HashedLines hashed;
    Sketch line_sketch, paragraph_sketch;
    Seen lines, paragraphs;
    Grams grams;
    for (int64_t i = 0; i < n; ++i) {
        if (!alive[i]) continue;
        const View text = view(data + offsets[i], data + offsets[i + 1]);
        int64_t* own = out + int64_t(kPieces + kGrams) * i;
        pieces.look_at(text);
        hashed.look_at(pieces);
        PieceRepeats counts;
        if (limits)
            counts = pieces_of(classes, text, pieces, hashed, line_sketch, paragraph_sketch);
        if (limits && limits->within(counts))
            counts = {counts.chars, counts.paragraphs, 0, 0, counts.lines, 0, 0};
        else
            counts = pieces_of(classes, text, pieces, hashed, lines, paragraphs);
        std::memcpy(own, &counts, sizeof counts);
        if (!limits || !limits->exceeded(counts)) grams.count(classes, text, limits, own + kPieces);
    }
}
}
