// Eclat: depth first over items by ascending support, with sets of basket numbers.
//
// Source: Zaki, Scalable Algorithms for Association Mining, 2000. What is left of the baskets under
// a prefix is a matrix of bits, a column for each item, where it is dense; where it is sparse it is
// kept as sorted lists and searched the same way again.

namespace {

using Word = uint64_t;

struct Column {
    int32_t item, support;
    Word* bits;
};

inline int32_t and_count(const Word* a, const Word* b, Word* to, int64_t words) {
#ifdef SHOAL_VECTORS
    if (words == 1) {
        to[0] = a[0] & b[0];
        return static_cast<int32_t>(_mm_popcnt_u64(to[0]));
    }
    __m512i sum = _mm512_setzero_si512();
    int64_t at = 0;
    for (; at + 8 <= words; at += 8) {
        const __m512i both = _mm512_and_si512(_mm512_loadu_si512(a + at), _mm512_loadu_si512(b + at));
        _mm512_storeu_si512(to + at, both);
        sum = _mm512_add_epi64(sum, _mm512_popcnt_epi64(both));
    }
    if (at < words) {
        const __mmask8 rest = static_cast<__mmask8>((1u << (words - at)) - 1);
        const __m512i both = _mm512_and_si512(_mm512_maskz_loadu_epi64(rest, a + at),
                                              _mm512_maskz_loadu_epi64(rest, b + at));
        _mm512_mask_storeu_epi64(to + at, rest, both);
        sum = _mm512_add_epi64(sum, _mm512_popcnt_epi64(both));
    }
    return static_cast<int32_t>(_mm512_reduce_add_epi64(sum));
#else
    int64_t sum = 0;
    for (int64_t at = 0; at < words; ++at) {
        to[at] = a[at] & b[at];
        sum += __builtin_popcountll(to[at]);
    }
    return static_cast<int32_t>(sum);
#endif
}

inline Word gather_bits(Word bits, Word mask) {
#ifdef SHOAL_PEXT
    return _pext_u64(bits, mask);
#else
    Word result = 0;
    for (int place = 0; mask; mask &= mask - 1, ++place)
        if (bits & mask & (~mask + 1)) result |= Word(1) << place;
    return result;
#endif
}

inline int64_t words_of(int64_t bits) { return (bits + 63) / 64; }

// Memory that is given back in the order opposite to that in which it was taken.
struct Stack {
    static constexpr int64_t kBlock = 1 << 17;
    struct Block {
        std::unique_ptr<Word[]> words;
        int64_t size;
    };
    std::vector<Block> blocks;
    size_t block = 0;
    int64_t used = 0;

    struct Mark {
        size_t block;
        int64_t used;
    };
    Mark mark() const { return {block, used}; }
    void release(Mark mark) {
        block = mark.block;
        used = mark.used;
    }
    // Room for so many words, which `keep` takes.
    Word* room(int64_t count) {
        if (!blocks.empty() && used + count <= blocks[block].size) return &blocks[block].words[used];
        const size_t next = blocks.empty() ? 0 : block + 1;
        if (next < blocks.size() && blocks[next].size < count) blocks.resize(next);
        if (next == blocks.size()) {
            const int64_t size = std::max(count, kBlock);
            blocks.push_back({std::unique_ptr<Word[]>(new Word[size]), size});
        }
        block = next;
        used = 0;
        return &blocks[block].words[0];
    }
    void keep(int64_t count) { used += count; }
};

// Pairs of all items are counted either by going through rows, or in bits from the beginning.
struct EclatStart {
    std::vector<Column> columns;  // of bits; none if rows are gone through
    std::vector<int32_t> perfect;  // items that every basket has
    int64_t words = 0;
    int32_t ranks;
    Stack memory;

    EclatStart(const MiningJob& job, const Database& db) : ranks(db.ranks) {
        if (job.target != kAll || job.max_len < 2) return;
        double steps = 0;
        for (int64_t begin = 0, t = 0; t < db.rows; begin = db.row_end[t++]) {
            const double length = static_cast<double>(db.row_end[t] - begin);
            steps += length * (length - 1);
        }
        words = words_of(db.rows);
        const double pairs = 0.5 * db.ranks * (db.ranks - 1.0) * static_cast<double>(words);
        if (steps < kRowsOverBits * pairs) return;
        for (int32_t r = 0; r < db.ranks; ++r) {
            if (db.support[r] == db.rows) {
                perfect.push_back(db.id[r]);
                continue;
            }
            Word* bits = memory.room(words);
            std::memset(bits, 0, words * sizeof(Word));
            memory.keep(words);
            for (int64_t at = db.rank_begin(r); at < db.rank_end[r]; ++at)
                bits[db.tid[at] >> 6] |= Word(1) << (db.tid[at] & 63);
            columns.push_back({db.id[r], db.support[r], bits});
        }
    }

    // Steps past an item of a row that take as long as one word of a pair.
    static constexpr double kRowsOverBits = 0.5;

    // What is searched by itself: an item with those after it, and what every basket has.
    int32_t tasks() const {
        return columns.empty() && perfect.empty() ? ranks
                                                  : static_cast<int32_t>(columns.size()) + 1;
    }
};

struct Eclat {
    using Start = EclatStart;
    struct Scratch {
        std::vector<int32_t> counts, column_of, items;
        explicit Scratch(int32_t ranks) : counts(ranks, 0), column_of(ranks, -1) {}
    };

    const MiningJob& job;
    const Database& db;
    const Start& start;
    Sink& sink;
    Stack stack;
    Scratch top;
    std::vector<Column> next;
    int32_t least;

    Eclat(const MiningJob& job, const Database& db, const Start& start, Sink& sink, Progress&)
        : job(job), db(db), start(start), sink(sink), top(db.ranks), least(job.least) {
        sink.perfect = start.perfect;
    }

    static void by_support(std::vector<Column>& columns) {
        std::sort(columns.begin(), columns.end(), [](const Column& a, const Column& b) {
            return a.support != b.support ? a.support < b.support : a.item < b.item;
        });
    }

    // Keep of all columns only the rows that are in `rows`, of which there are `count`.
    int64_t compact(std::vector<Column>& columns, const Word* rows, int64_t words, int32_t count) {
        const int64_t fewer = words_of(count);
        sink.work[1] += words * static_cast<int64_t>(columns.size());
        for (Column& column : columns) {
            Word* to = stack.room(fewer);
            int64_t at = 0;
            int filled = 0;
            Word part = 0;
            for (int64_t w = 0; w < words; ++w) {
                const Word mask = rows[w];
                if (!mask) continue;
                const Word bits = gather_bits(column.bits[w], mask);
                const int size = __builtin_popcountll(mask);
                part |= bits << filled;
                filled += size;
                if (filled >= 64) {
                    to[at++] = part;
                    filled -= 64;
                    part = filled ? bits >> (size - filled) : 0;
                }
            }
            if (filled) to[at] = part;
            stack.keep(fewer);
            column.bits = to;
        }
        return fewer;
    }

    static bool worth_compacting(int32_t support, int64_t words, size_t columns) {
        return words > 8 && columns > 3 && 4 * words_of(support) <= words;
    }

    // All frequent sets that extend the prefix by column a and some after it.
    void branch(const std::vector<Column>& columns, size_t a, int64_t words,
                std::vector<Column>& next) {
        const Column& chosen = columns[a];
        const Stack::Mark mark = stack.mark();
        const size_t perfect = sink.perfect.size();
        sink.prefix.push_back(chosen.item);
        next.clear();
        if (!sink.full()) {
            sink.work[0] += words * static_cast<int64_t>(columns.size() - a - 1);
            sink.work[2] += static_cast<int64_t>(columns.size() - a - 1);
            for (size_t b = a + 1; b < columns.size(); ++b) {
                Word* to = stack.room(words);
                const int32_t both = and_count(chosen.bits, columns[b].bits, to, words);
                if (both < least) continue;
                if (both == chosen.support) {
                    sink.perfect.push_back(columns[b].item);
                } else {
                    stack.keep(words);
                    next.push_back({columns[b].item, both, to});
                }
            }
        }
        sink.emit(chosen.support);
        if (next.size() == 1) {
            sink.prefix.push_back(next[0].item);
            sink.emit(next[0].support);
            sink.prefix.pop_back();
        } else if (!next.empty()) {
            by_support(next);
            int64_t left = words;
            if (worth_compacting(chosen.support, words, next.size()))
                left = compact(next, chosen.bits, words, chosen.support);
            grow(next, left);
        }
        sink.prefix.pop_back();
        sink.perfect.resize(perfect);
        stack.release(mark);
    }

    void grow(const std::vector<Column>& columns, int64_t words) {
        std::vector<Column> next;
        next.reserve(columns.size());
        for (size_t a = 0; a < columns.size(); ++a) branch(columns, a, words, next);
    }

    // Closed or maximal sets. `before` has the columns that were tried in the place of an earlier
    // item: a set that one of them contains was found there (Lucchese et al., DCI_Closed, 2004).
    void close(std::vector<Column>& before, std::vector<Column>& columns, int64_t words,
               int32_t support) {
        if (job.target == kClosed) {
            sink.one(support);
        } else if (columns.empty()) {
            if (before.empty()) sink.one(support);
            return;
        } else if (whole_is_frequent(before, columns, words)) {
            return;
        }
        std::vector<Column> earlier, next;
        for (size_t a = 0; a < columns.size(); ++a) {
            const Column chosen = columns[a];
            const Stack::Mark mark = stack.mark();
            const size_t length = sink.prefix.size();
            sink.work[0] += words * static_cast<int64_t>(before.size() + columns.size());
            sink.work[2] += static_cast<int64_t>(before.size() + columns.size());
            earlier.clear();
            next.clear();
            bool known = false;
            for (const auto* some : {&before, &columns}) {
                const size_t stop = some == &before ? before.size() : a;
                for (size_t b = 0; b < stop && !known; ++b) {
                    Word* to = stack.room(words);
                    const int32_t both = and_count(chosen.bits, (*some)[b].bits, to, words);
                    known = both == chosen.support;
                    if (both < least || known) continue;
                    stack.keep(words);
                    earlier.push_back({(*some)[b].item, both, to});
                }
            }
            if (!known) {
                sink.prefix.push_back(chosen.item);
                for (size_t b = a + 1; b < columns.size(); ++b) {
                    Word* to = stack.room(words);
                    const int32_t both = and_count(chosen.bits, columns[b].bits, to, words);
                    if (both < least) continue;
                    if (both == chosen.support) {
                        sink.prefix.push_back(columns[b].item);
                    } else {
                        stack.keep(words);
                        next.push_back({columns[b].item, both, to});
                    }
                }
                by_support(next);
                int64_t left = words;
                if (worth_compacting(chosen.support, words, next.size())) {
                    compact(earlier, chosen.bits, words, chosen.support);
                    left = compact(next, chosen.bits, words, chosen.support);
                }
                close(earlier, next, left, chosen.support);
            }
            sink.prefix.resize(length);
            stack.release(mark);
        }
    }

    // If the prefix with all columns is frequent it is the only set here that can be maximal.
    bool whole_is_frequent(const std::vector<Column>& before, const std::vector<Column>& columns,
                           int64_t words) {
        const Stack::Mark mark = stack.mark();
        Word* all = stack.room(words);
        stack.keep(words);
        Word* part = stack.room(words);
        std::memcpy(all, columns[0].bits, words * sizeof(Word));
        int32_t support = columns[0].support;
        for (size_t b = 1; b < columns.size() && support >= least; ++b)
            support = and_count(all, columns[b].bits, all, words);
        bool alone = support >= least;
        if (alone) {
            for (size_t b = 0; b < before.size() && alone; ++b)
                alone = and_count(all, before[b].bits, part, words) < least;
            if (alone) {
                const size_t length = sink.prefix.size();
                for (const Column& column : columns) sink.prefix.push_back(column.item);
                sink.one(support);
                sink.prefix.resize(length);
            }
        }
        stack.release(mark);
        return support >= least;
    }

    // The columns of some items over the rows of one rank.
    std::vector<Column> columns_of(const Database& db, int32_t r, const std::vector<int32_t>& items,
                                   const std::vector<int32_t>& counts, int32_t* column_of,
                                   bool whole_rows) {
        const int64_t words = words_of(db.support[r]);
        std::vector<Column> columns;
        for (int32_t j : items) {
            Word* bits = stack.room(words);
            std::memset(bits, 0, words * sizeof(Word));
            stack.keep(words);
            column_of[j] = static_cast<int32_t>(columns.size());
            columns.push_back({db.id[j], counts[j], bits});
        }
        int64_t row = 0;
        for (int64_t at = db.rank_begin(r); at < db.rank_end[r]; ++at, ++row) {
            const int32_t t = db.tid[at];
            const int64_t from = whole_rows ? db.row_begin(t) : db.place[at] + 1;
            for (int64_t k = from; k < db.row_end[t]; ++k) {
                const int32_t column = column_of[db.row_items[k]];
                if (column >= 0) columns[column].bits[row >> 6] |= Word(1) << (row & 63);
            }
        }
        for (int32_t j : items) column_of[j] = -1;
        return columns;
    }

    // Call with every item of the rows of rank r, after r or all.
    template <typename Each>
    static void each(const Database& db, int32_t r, bool whole_rows, Each each) {
        for (int64_t at = db.rank_begin(r); at < db.rank_end[r]; ++at) {
            const int32_t t = db.tid[at];
            const int64_t from = whole_rows ? db.row_begin(t) : db.place[at] + 1;
            for (int64_t k = from; k < db.row_end[t]; ++k) each(db.row_items[k]);
        }
    }

    // Count in the rows of rank r; the items that are frequent there, ascending. Whether few steps
    // were taken, so that going through the rows again is quicker than through all items.
    bool count(const Database& db, int32_t r, bool whole_rows, Scratch& scratch) {
        auto& [counts, column_of, items] = scratch;
        int64_t steps = 0;
        each(db, r, whole_rows, [&](int32_t j) {
            ++counts[j];
            ++steps;
        });
        sink.work[3] += steps;
        const bool few = 2 * steps < db.ranks;
        items.clear();
        if (!few) {
            for (int32_t j = whole_rows ? 0 : r + 1; j < db.ranks; ++j)
                if (j != r && counts[j] >= least) items.push_back(j);
            return few;
        }
        each(db, r, whole_rows, [&](int32_t j) {
            if (j == r || counts[j] < least || column_of[j] == kListed) return;
            column_of[j] = kListed;
            items.push_back(j);
        });
        for (int32_t j : items) column_of[j] = -1;
        std::sort(items.begin(), items.end());
        return few;
    }
    static constexpr int32_t kListed = -2;

    // Rows of rank r with these items only, numbered by their support there.
    void project(const Database& db, int32_t r, const std::vector<int32_t>& items,
                 const std::vector<int32_t>& counts, int32_t* column_of, Database& to) {
        std::vector<int32_t> order(items);
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return counts[a] < counts[b]; });
        to.rows = db.support[r];
        to.ranks = static_cast<int32_t>(order.size());
        to.least = least;
        int64_t sum = 0;
        std::vector<int64_t> next;
        for (int32_t j : order) {
            column_of[j] = static_cast<int32_t>(next.size());
            next.push_back(sum);
            to.id.push_back(db.id[j]);
            to.support.push_back(counts[j]);
            to.rank_end.push_back(sum += counts[j]);
        }
        to.tid.resize(sum);
        int32_t row = 0;
        for (int64_t at = db.rank_begin(r); at < db.rank_end[r]; ++at, ++row)
            for (int64_t k = db.place[at] + 1; k < db.row_end[db.tid[at]]; ++k) {
                const int32_t column = column_of[db.row_items[k]];
                if (column >= 0) to.tid[next[column]++] = row;
            }
        for (int32_t j : items) column_of[j] = -1;
        to.transpose();
    }

    // Frequent sets whose item of the lowest rank is r.
    void extend(const Database& db, int32_t r, Scratch& scratch) {
        auto& [counts, column_of, items] = scratch;
        const Stack::Mark mark = stack.mark();
        const size_t perfect = sink.perfect.size(), length = sink.prefix.size();
        const bool all = job.target == kAll;
        sink.prefix.push_back(db.id[r]);
        items.clear();
        const bool more = !sink.full(), few = more && count(db, r, !all, scratch);
        bool known = false;  // a set that contains this one has its baskets
        std::vector<int32_t> kept, earlier;
        int64_t ones = 0;
        for (int32_t j : items) {
            if (counts[j] < db.support[r]) {
                (j < r ? earlier : kept).push_back(j);
                ones += counts[j];
            } else if (all) {
                sink.perfect.push_back(db.id[j]);
            } else if (j < r) {
                known = true;
            } else {
                sink.prefix.push_back(db.id[j]);
            }
        }
        const double cells = static_cast<double>(db.support[r]) * kept.size();
        const int64_t words = words_of(db.support[r]);
        if (!all) {
            if (!known) {
                auto before = columns_of(db, r, earlier, counts, column_of.data(), true);
                auto columns = columns_of(db, r, kept, counts, column_of.data(), false);
                by_support(columns);
                close(before, columns, words, db.support[r]);
            }
        } else {
            sink.emit(db.support[r]);
            if (kept.size() == 1) {
                sink.prefix.push_back(db.id[kept[0]]);
                sink.emit(counts[kept[0]]);
            } else if (!kept.empty()) {
                sink.work[4] += ones;
                if (ones >= job.bit_density * cells) {
                    auto columns = columns_of(db, r, kept, counts, column_of.data(), false);
                    by_support(columns);
                    grow(columns, words);
                } else {
                    Database fewer;
                    project(db, r, kept, counts, column_of.data(), fewer);
                    search(fewer);
                }
            }
        }
        sink.prefix.resize(length);
        sink.perfect.resize(perfect);
        stack.release(mark);
        if (few)
            each(db, r, !all, [&](int32_t j) { counts[j] = 0; });
        else if (more)
            std::fill(counts.begin(), counts.end(), 0);
    }

    void search(const Database& fewer) {
        Scratch scratch(fewer.ranks);
        for (int32_t r = 0; r < fewer.ranks; ++r) extend(fewer, r, scratch);
    }

    void task(int32_t number) {
        if (start.columns.empty() && start.perfect.empty()) {
            extend(db, number, top);
        } else if (number < static_cast<int32_t>(start.columns.size())) {
            branch(start.columns, number, start.words, next);
        } else {
            // All sets but the empty one of items that every basket has.
            for (size_t k = 0; k < start.perfect.size(); ++k) {
                sink.prefix.push_back(start.perfect[k]);
                sink.perfect.resize(k);
                sink.emit(db.rows);
                sink.prefix.pop_back();
                sink.perfect = start.perfect;
            }
        }
    }
};

}  // namespace
