// Counts of characters, words and lines.
//
// Sources: Rae et al., Scaling Language Models: Methods, Analysis & Insights from Training Gopher,
// 2021, appendix A.1; Penedo et al., The FineWeb Datasets, 2024, section 3.6.

namespace {

// How many of eight stop words occur; no longer exact from `enough` on.
template <unsigned kWanted>
int64_t stop_words_of(const Marks<kWanted>& marks, int64_t enough) {
    auto key = [](View word) {
        uint32_t letters = 0;
        std::memcpy(&letters, word.data(), word.size());
        return letters;
    };
    const uint32_t keys[8] = {key("the"), key("be"),   key("to"),   key("of"),
                              key("and"), key("that"), key("have"), key("with")};
    unsigned found = 0;
    uint64_t before = 0;
    for (size_t at = 0; at < marks.blocks && ones(found) < enough; ++at) {
        const uint64_t words = marks.word[at], gaps = ~words, ahead = ~marks.word[at + 1];
        const uint64_t two = later(gaps, ahead, 2), three = later(gaps, ahead, 3);
        uint64_t some = words & ~(words << 1 | before) & ~later(gaps, ahead, 1) &
                        (two | three | later(gaps, ahead, 4));
        before = words >> 63;
        for (; some; some &= some - 1) {
            const size_t bit = lowest(some), from = 64 * at + bit;
            const size_t size = two >> bit & 1 ? 2 : three >> bit & 1 ? 3 : 4;
            uint32_t letters = 0;
            if (from + 4 <= marks.text.size())
                letters = load<uint32_t>(&marks.text[from]) & ~uint32_t(0) >> (32 - 8 * size);
            else
                std::memcpy(&letters, &marks.text[from], size);
            for (unsigned i = 0; i < 8; ++i) found |= unsigned(letters == keys[i]) << i;
        }
    }
    return ones(found);
}

constexpr unsigned kQuality = kWords | kLetters | kSolids | kBreaks | kBullets | kDots | kHashes;
constexpr int kQualityColumns = 10;

void quality_of(const Byte* classes, const Marks<kQuality>& marks, int64_t enough, int64_t* out) {
    int64_t words = 0, solids = 0, solid_chars = 0, letters = 0, lines = 0, bullets = 0;
    Adder with_solid, with_letter, to_first;
    uint64_t word_before = 0, start = 1;
    for (size_t at = 0; at < marks.blocks; ++at) {
        const uint64_t word = marks.word[at], ends = ~word & (word << 1 | word_before);
        word_before = word >> 63;
        words += ones(ends);
        letters += ones(with_letter(word, marks.letter[at]) & ends);
        solid_chars += ones(word);
        const uint64_t solid = with_solid(word, marks.solid[at]) & ends;
        solids += ones(solid);
        // Words of signs alone are taken off again.
        for (uint64_t none = ends & ~solid; none; none &= none - 1) {
            const uint64_t below = (none & -none) - 1, gaps = ~word & below;
            size_t from = 64 * at, to = 64 * at + lowest(none);
            if (gaps) {
                from += 64 - size_t(__builtin_clzll(gaps));
            } else {
                while (from > 0 && marks.word[(from - 1) / 64] >> (from - 1) % 64 & 1) --from;
            }
            solid_chars -= marks.chars(from, to);
        }
        const uint64_t breaks = marks.breaks[at], blank = ~word & ~breaks;
        lines += ones(breaks);
        bullets += ones(to_first(blank, breaks << 1 | start) & word & marks.bullet[at]);
        start = breaks >> 63;
    }
    if (!marks.plain)
        for (size_t at = 0; at < marks.blocks; ++at)
            solid_chars -= ones(marks.word[at] & marks.rest[at]);
    const View text = marks.text;
    for (size_t p = text.find("\r\n"); p != View::npos; p = text.find("\r\n", p + 2)) --lines;
    lines += !text.empty() && !(last(classes, bytes(text), bytes(text) + text.size()) & kBreak);
    int64_t trailing = 0;
    for (size_t at = 0; at < marks.blocks; ++at) {
        uint64_t some = marks.dots[at] & ~later(marks.word[at], marks.word[at + 1], 1);
        for (; some; some &= some - 1) {
            const size_t end = 64 * at + lowest(some) + 1;
            const size_t line = marks.first(marks.breaks, end, text.size());
            trailing += marks.first(marks.word, end, line) == line;
        }
    }
    const int64_t all[kQualityColumns] = {
        words,          solids,         solid_chars,
        letters,        marks.hashes,   marks.ellipses,
        stop_words_of(marks, enough),   lines,
        bullets,        trailing};
    std::copy_n(all, kQualityColumns, out);
}

constexpr unsigned kLines = kWords | kFeeds | kMarks;
constexpr int kLineColumns = 7;

void lines_of(Marks<kLines>& marks, int64_t brief, int64_t* out) {
    int64_t words = 0, feeds = 0, lines = 0, terminal = 0, briefs = 0;
    const size_t size = marks.text.size();
    Adder with_word;
    uint64_t word_before = 0, mark_before = 0;
    size_t from = 0;
    for (size_t at = 0; at < marks.blocks; ++at) {
        const uint64_t word = marks.word[at], mark = marks.mark[at];
        words += ones(word & ~(word << 1 | word_before));
        word_before = word >> 63;
        feeds += ones(marks.feed[at]);
        const uint64_t ends = marks.feed[at] | uint64_t(at == size / 64) << size % 64;
        uint64_t full = with_word(~ends, word) & ends;
        lines += ones(full);
        terminal += ones((mark << 1 | mark_before) & ends);
        mark_before = mark >> 63;
        for (uint64_t some = ends; some; some &= some - 1) {
            const size_t to = 64 * at + lowest(some);
            const bool short_one = int64_t(to - from) <= brief ||
                                   (!marks.plain && marks.chars(from, to) <= brief);
            briefs += short_one && (full & some & -some);
            from = to + 1;
        }
    }
    const int64_t all[kLineColumns] = {marks.chars(), words, feeds, lines, terminal, briefs,
                                       int64_t(size)};
    std::copy_n(all, kLineColumns, out);
}

}  // namespace

extern "C" {

// [n, 2] characters and words.
void sizes(const Byte* data, const int64_t* offsets, int64_t n, const Byte* alive,
           const Byte* classes, int64_t* out) {
    Marks<kWords> marks;
    for (int64_t i = 0; i < n; ++i) {
        if (!alive[i]) continue;
        const View text = view(data + offsets[i], data + offsets[i + 1]);
        int64_t words = 0;
        uint64_t before = 0, high = 0;
        each_block(text, [&](size_t, const Block& b) {
            const uint64_t word = ~spaces(b);
            words += ones(word & ~(word << 1 | before));
            before = word >> 63;
            high |= b.high();
        });
        out[2 * i] = int64_t(text.size());
        if (high) {
            marks.look_at(classes, text);
            out[2 * i] = marks.chars();
            words = 0, before = 0;
            for (size_t at = 0; at < marks.blocks; ++at) {
                words += ones(marks.word[at] & ~(marks.word[at] << 1 | before));
                before = marks.word[at] >> 63;
            }
        }
        out[2 * i + 1] = words;
    }
}

// [n, 10] words, those with more than signs and their characters, those with a letter, hashes,
// ellipses, stop words, exact up to `enough`; lines, those with a bullet and with an ellipsis.
void quality(const Byte* data, const int64_t* offsets, int64_t n, const Byte* alive,
             const Byte* classes, int64_t enough, int64_t* out) {
    Marks<kQuality> marks;
    for (int64_t i = 0; i < n; ++i) {
        if (!alive[i]) continue;
        marks.look_at(classes, view(data + offsets[i], data + offsets[i + 1]));
        quality_of(classes, marks, enough, out + i * kQualityColumns);
    }
}

// [n, 7] characters, words, line feeds; of runs between line feeds: not blank, ended by a terminal
// mark, brief ones that are not blank; bytes.
void lines(const Byte* data, const int64_t* offsets, int64_t n, const Byte* alive,
           const Byte* classes, int64_t brief, int64_t* out) {
    Marks<kLines> marks;
    for (int64_t i = 0; i < n; ++i) {
        if (!alive[i]) continue;
        marks.look_at(classes, view(data + offsets[i], data + offsets[i + 1]));
        lines_of(marks, brief, out + i * kLineColumns);
    }
}

// [n] characters of lines that came before and are not blank; no longer exact beyond `enough`.
void repeated_lines(const Byte* data, const int64_t* offsets, int64_t n, const Byte* alive,
                    const Byte* classes, const int64_t* enough, int64_t* out) {
    Pieces pieces;
    Seen seen;
    for (int64_t i = 0; i < n; ++i) {
        if (!alive[i]) continue;
        pieces.look_at(view(data + offsets[i], data + offsets[i + 1]));
        seen.open(pieces.feeds() + 1);
        pieces.each([&](View line) {
            if (seen.put(line, long_hash(line)) && !stripped(classes, line).empty())
                out[i] += pieces.chars(line);
            return out[i] <= enough[i];
        });
    }
}
}
