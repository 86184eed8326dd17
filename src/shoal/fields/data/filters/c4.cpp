// The rules of C4, line by line.
//
// Source: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text
// Transformer, 2020, section 2.2.

namespace {

inline char lower(char c) { return c >= 'A' && c <= 'Z' ? char(c + 32) : c; }

bool begins_any_case(const char* p, View what) {
    for (const char c : what)
        if (lower(*p++) != c) return false;
    return true;
}

// Whether a text has these letters, in lower or upper case; places are looked at where the letters
// at `one` and `other` are right.
bool has_any_case(View text, View what, size_t one, size_t other) {
    if (text.size() < what.size()) return false;
    const size_t most = text.size() - what.size() + 1;
    size_t at = 0;
#if defined(SHOAL_WIDE)
    const __m512i bit = _mm512_set1_epi8(0x20);
    auto equal = [&](const char* p, char letter, uint64_t valid) {
        const __m512i c = _mm512_or_si512(_mm512_maskz_loadu_epi8(valid, p), bit);
        return _mm512_mask_cmpeq_epi8_mask(valid, c, _mm512_set1_epi8(letter));
    };
    for (; at < most; at += 64) {
        const uint64_t valid = most - at < 64 ? ~uint64_t(0) >> (64 - (most - at)) : ~uint64_t(0);
        uint64_t some = equal(&text[at + one], what[one], valid);
        if (!some) continue;
        some &= equal(&text[at + other], what[other], valid);
        for (; some; some &= some - 1)
            if (begins_any_case(&text[at + lowest(some)], what)) return true;
    }
#else
    for (; at < most; ++at)
        if ((text[at + one] | 0x20) == what[one] && (text[at + other] | 0x20) == what[other] &&
            begins_any_case(&text[at], what))
            return true;
#endif
    return false;
}

bool has_policy(View line) {
    return has_any_case(line, "terms of use", 6, 7) || has_any_case(line, "privacy policy", 3, 6) ||
           (has_any_case(line, "cookie", 3, 2) &&
            (has_any_case(line, "cookie policy", 3, 7) ||
             has_any_case(line, "uses cookies", 8, 0) ||
             has_any_case(line, "use of cookies", 10, 0) ||
             has_any_case(line, "use cookies", 7, 0)));
}

// Writes a line without its citations, [1], [edit] and [citation needed]; returns its bytes.
size_t without_citations(View line, char* out) {
    static constexpr View kCitations[] = {"[edit]", "[citation needed]"};
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
            for (View one : kCitations)
                if (!marked && begins(line.substr(at), one)) at += one.size(), marked = true;
            if (marked) continue;
        }
        out[size++] = line[at++];
    }
    return size;
}

inline bool is_end(char c) { return c == '.' || c == '?' || c == '!'; }
inline bool is_last(char c) { return is_end(c) || c == '"' || c == '\''; }
inline bool is_close(char c) { return c == '"' || c == '\'' || c == ')' || c == ']'; }

// Sentences: they end with a run of . ? !, with what closes after it, before a space or the end.
int64_t sentences_of(const Byte* classes, View line) {
    int64_t count = 0;
    size_t from = 0;  // of the sentence
    for (size_t at = 0; at < line.size();) {
        if (!is_end(line[at])) {
            ++at;
            if (at + 64 > line.size()) continue;
            const Block b(bytes(line) + at);
            const uint64_t some = b.is('.') | b.is('?') | b.is('!');
            at += some ? lowest(some) : 64;
            continue;
        }
        const size_t mark = at;
        while (at < line.size() && is_end(line[at])) ++at;
        while (at < line.size() && is_close(line[at])) ++at;
        const Byte* p = bytes(line) + at;
        if (at < line.size() && !(next(classes, p) & kSpace)) continue;
        count += !stripped(classes, line.substr(from, mark - from)).empty();
        from = at;
    }
    return count + !stripped(classes, line.substr(from)).empty();
}

struct C4Rules {
    int64_t min_words, max_word, min_sentences;
    int64_t terminal, javascript, curly, lorem, policy, citations;
};

enum { kLong, kUnended, kFew, kScript, kPolicy, kDropped };

class Cleaner {
   public:
    Cleaner(const Byte* classes, const C4Rules& rules, int64_t* dropped)
        : classes_(classes), rules_(rules), dropped_(dropped) {}

    // -1: keep; 0 lorem ipsum, 1 curly bracket, 2 too few sentences. `out` gets what is left.
    int clean(View text, char* out, size_t* size) {
        begin_ = end_ = out;
        run_ = {};
        sentences_ = 0;
        verdict_ = -1;
        // In pieces that the caches hold, each of whole lines.
        while (!text.empty() && verdict_ < 0) {
            size_t stop = text.size();
            if (stop > kPiece) {
                const size_t feed = text.find('\n', kPiece);
                if (feed != View::npos) stop = feed + 1;
            }
            piece(text.substr(0, stop));
            text.remove_prefix(stop);
        }
        flush();
        const View left = stripped(classes_, {begin_, size_t(end_ - begin_)});
        if (left.data() != begin_) std::memmove(begin_, left.data(), left.size());
        *size = left.size();
        if (verdict_ < 0 && sentences_ < rules_.min_sentences) verdict_ = 2;
        return verdict_;
    }

   private:
    static constexpr size_t kPiece = 1 << 14;

    const Byte* classes_;
    const C4Rules& rules_;
    int64_t* dropped_;
    Marks<kWords | kBreaks> marks_;
    std::vector<char> line_;
    char *begin_ = nullptr, *end_ = nullptr;
    View run_;  // kept lines that lie behind each other and are not yet copied
    int64_t sentences_ = 0;
    int verdict_ = -1;

    void piece(View text) {
        marks_.look_at(classes_, text);
        size_t from = 0;
        for (size_t at = 0; at < marks_.blocks && verdict_ < 0; ++at)
            for (uint64_t some = marks_.breaks[at]; some && verdict_ < 0; some &= some - 1) {
                const size_t stop = 64 * at + lowest(some);
                if (stop < from) continue;  // the second half of \r\n
                line(text, from, stop);
                const Byte* p = bytes(text) + stop;
                const bool twice = text.substr(stop, 2) == "\r\n";
                next(classes_, p);
                from = size_t(p - bytes(text)) + twice;
            }
        if (from < text.size() && verdict_ < 0) line(text, from, text.size());
    }

    // The longest word, in characters.
    int64_t longest(size_t from, size_t to) const {
        int64_t most = 0;
        while ((from = marks_.first(marks_.word, from, to)) < to) {
            const size_t end = marks_.first_not(marks_.word, from, to);
            most = std::max(most, marks_.chars(from, end));
            from = end;
        }
        return most;
    }

    int64_t words(size_t from, size_t to) const {
        int64_t count = 0;
        for (size_t at = from / 64; 64 * at < to; ++at) {
            const uint64_t bits = marks_.word[at] & marks_.part(at, from, to);
            const uint64_t before = at > from / 64 ? marks_.word[at - 1] >> 63 : 0;
            count += ones(bits & ~(bits << 1 | before));
        }
        return count;
    }

    void line(View text, size_t from, size_t to) {
        to = marks_.last(marks_.word, from, to);
        from = marks_.first(marks_.word, from, to);
        if (int64_t(to - from) > rules_.max_word && longest(from, to) > rules_.max_word)
            return void(++dropped_[kLong]);
        View line = text.substr(from, to - from);
        // A citation ends with a bracket, so what ends otherwise ends so without it too.
        if (rules_.terminal && (line.empty() || !(is_last(line.back()) || line.back() == ']')))
            return void(++dropped_[kUnended]);
        const bool cited = rules_.citations && line.find('[') != View::npos;
        if (cited) {
            line_.resize(std::max(line_.size(), line.size()));
            line = {line_.data(), without_citations(line, line_.data())};
        }
        if (rules_.terminal && (line.empty() || !is_last(line.back()) || ends(line, "...")))
            return void(++dropped_[kUnended]);
        if (words(from, to) < rules_.min_words) return void(++dropped_[kFew]);
        if (rules_.lorem && has_any_case(line, "lorem ipsum", 4, 7)) return void(verdict_ = 0);
        if (rules_.javascript && has_any_case(line, "javascript", 0, 2))
            return void(++dropped_[kScript]);
        if (rules_.curly && line.find('{') != View::npos) return void(verdict_ = 1);
        if (rules_.policy && has_policy(line)) return void(++dropped_[kPolicy]);
        sentences_ += sentences_of(classes_, line);
        keep(line, cited);
    }

    void keep(View line, bool copied) {
        if (!copied && run_.data() && line.data() == run_.data() + run_.size() + 1 &&
            run_.data()[run_.size()] == '\n') {
            run_ = {run_.data(), run_.size() + 1 + line.size()};
            return;
        }
        flush();
        run_ = line;
        if (copied) flush();
    }

    void flush() {
        if (!run_.data()) return;
        if (end_ != begin_) *end_++ = '\n';
        std::memcpy(end_, run_.data(), run_.size());
        end_ += run_.size();
        run_ = {};
    }
};

}  // namespace

extern "C" {

// The texts as the rules of C4 leave them, with their offsets; lines dropped by each rule.
void c4(const Byte* data, const int64_t* offsets, int64_t n, const Byte* alive, const Byte* classes,
        const C4Rules* rules, char* out, int64_t* out_offsets, int8_t* verdicts, int64_t* dropped) {
    Cleaner cleaner(classes, *rules, dropped);
    int64_t at = 0;
    out_offsets[0] = 0;
    for (int64_t i = 0; i < n; ++i) {
        size_t size = 0;
        verdicts[i] = -1;
        if (alive[i]) {
            const View text = view(data + offsets[i], data + offsets[i + 1]);
            verdicts[i] = int8_t(cleaner.clean(text, out + at, &size));
            at += verdicts[i] < 0 ? int64_t(size) : 0;
        }
        out_offsets[i + 1] = at;
    }
}
}
