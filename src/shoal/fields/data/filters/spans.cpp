// Where a document may have personal data: short parts of it, which patterns are then tried on.

namespace {

enum : int64_t { kEmail = 1, kCard = 2, kIpv4 = 4, kIpv6 = 8, kPhone = 16 };

struct Span {
    int64_t row, begin, end, kinds;
};

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }
inline bool is_letter(char c) { return Byte((c | 0x20) - 'a') < 26; }
inline bool is_hex(char c) { return is_digit(c) || Byte((c | 0x20) - 'a') < 6; }
inline bool in_domain(char c) { return is_digit(c) || is_letter(c) || c == '-'; }
inline bool joins(char c) { return c == '.' || c == '+' || c == '-'; }
inline bool in_email(char c) {
    return in_domain(c) || c == '.' || c == '@' || c == '_' || c == '%' || c == '+';
}

class Spans {
   public:
    Spans(Span* out, int64_t most) : out_(out), most_(most) {}

    int64_t count() const { return count_; }

    void look_at(int64_t row, View text) {
        row_ = row, text_ = text;
        const size_t blocks = text.size() / 64 + 1;
        for (auto bits : {&digit_, &sign_, &near_})
            if (bits->size() < blocks + 2) bits->resize(2 * blocks + 2);
        // A block of zeros before the first and behind the last.
        digit_[0] = sign_[0] = digit_[blocks + 1] = sign_[blocks + 1] = 0;
        size_t email_end = 0, colon_end = 0;
        bool digits = false;
        each_block(text, [&](size_t at, const Block& b) {
            digit_[at + 1] = b.within('0', 10);
            digits |= digit_[at + 1] != 0;
            sign_[at + 1] = b.is(' ') | b.within('(', 2) | b.is('+') | b.within('-', 2);
            for (uint64_t some = b.is('@'); some; some &= some - 1)
                email(64 * at + lowest(some), email_end);
            for (uint64_t some = b.is(':'); some; some &= some - 1)
                colon(64 * at + lowest(some), colon_end);
        });
        if (!digits) return;
        sign_[blocks] &= ~(~uint64_t(0) << text.size() % 64);  // none behind the end
        // Digits, with signs that are at most two bytes from one.
        for (size_t at = 1; at <= blocks; ++at) {
            const uint64_t before = digit_[at - 1], now = digit_[at], then = digit_[at + 1];
            near_[at - 1] = now | (sign_[at] & (now << 1 | before >> 63 | now << 2 | before >> 62 |
                                                later(now, then, 1) | later(now, then, 2)));
        }
        near_[blocks] = 0;
        keep_long(blocks);
        each_run(near_, blocks, [&](size_t from, size_t to) { number(from, to); });
    }

   private:
    Span* out_;
    int64_t most_, count_ = 0, row_ = 0;
    View text_;
    Bits digit_, sign_, near_;

    // Of the runs of digits and signs those of seven and more, as no number is shorter: where seven
    // ones begin, and then the six behind each.
    void keep_long(size_t blocks) {
        using Two = unsigned __int128;
        uint64_t before = 0;
        for (size_t at = 0; at < blocks; ++at) {
            Two some = Two(near_[at + 1]) << 64 | near_[at];
            some &= some >> 1, some &= some >> 2, some &= some >> 3;
            Two all = Two(uint64_t(some)) << 64 | before;
            before = uint64_t(some);
            all |= all << 1, all |= all << 2, all |= all << 3;
            near_[at] = uint64_t(all >> 64);
        }
    }

    // With what may stand before and behind it: a byte, and two.
    void put(size_t from, size_t to, int64_t kinds) {
        if (count_ < most_)
            out_[count_] = {row_, int64_t(from ? from - 1 : 0),
                            int64_t(std::min(to + 2, text_.size())), kinds};
        ++count_;
    }

    void email(size_t at, size_t& end) {
        if (at < end || at == 0 || !in_email(text_[at - 1])) return;
        size_t dot = at + 1;
        while (dot < text_.size() && in_domain(text_[dot])) ++dot;
        if (dot == at + 1 || dot + 1 >= text_.size() || text_[dot] != '.') return;
        size_t from = at;
        while (from > end && in_email(text_[from - 1])) --from;
        for (end = dot; end < text_.size() && in_email(text_[end]);) ++end;
        put(from, end, kEmail);
    }

    void colon(size_t at, size_t& end) {
        if (at < end) return;
        size_t from = at, colons = 0;
        while (from > end && (is_hex(text_[from - 1]) || text_[from - 1] == ':')) --from;
        for (end = at; end < text_.size() && (is_hex(text_[end]) || text_[end] == ':'); ++end)
            colons += text_[end] == ':';
        if (colons >= 3) put(from, end, kIpv6);
    }

    // Of digits and signs: 13 digits with at most one sign between them for a card; three dots for
    // an address; rows of three, three and four digits, or seven behind a +, for a telephone.
    void number(size_t from, size_t to) {
        size_t dots = 0, row = 0, row_before = 0, row_first = 0, chain = 0, longest = 0, behind = 0;
        bool rows = false, plus = false;
        for (size_t at = from; at < to; ++at) {
            const char c = text_[at], before = at ? text_[at - 1] : ' ';
            if (is_digit(c)) {
                // A card's number begins with 2 to 6, and behind no digit or sign but a space.
                if (chain || (c >= '2' && c <= '6' && !is_digit(before) && !joins(before))) ++chain;
                longest = std::max(longest, chain);
                rows |= ++row == 4 && row_before == 3 && row_first == 3;
                behind += plus;
                continue;
            }
            if (row) row_first = row_before, row_before = row;
            if (!row || (c != ' ' && c != '-')) chain = 0;
            row = 0;
            dots += c == '.';
            plus |= c == '+' && !in_domain(before) && before != '_' && !joins(before);
        }
        const int64_t kinds = (longest >= 13 ? kCard : 0) | (dots >= 3 ? kIpv4 : 0) |
                              (rows || behind >= 7 ? kPhone : 0);
        if (kinds) put(from, to, kinds);
    }
};

}  // namespace

extern "C" {

// Parts of documents that may have personal data, up to `most`; returns how many there are. Each is
// [4] document, first byte, byte behind the last, and what it may be: 1 an e-mail address, 2 a card
// number, 4 and 8 an IP address, 16 a telephone number.
int64_t spans(const Byte* data, const int64_t* offsets, int64_t n, const Byte* alive, int64_t most,
              Span* out) {
    Spans spans(out, most);
    for (int64_t i = 0; i < n; ++i)
        if (alive[i]) spans.look_at(i, view(data + offsets[i], data + offsets[i + 1]));
    return spans.count();
}
}
