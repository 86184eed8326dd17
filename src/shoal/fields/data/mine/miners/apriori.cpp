// Apriori: level by level, candidates from the frequent sets that are one item shorter.
//
// Source: Agrawal, Srikant, Fast Algorithms for Mining Association Rules, 1994. Candidates are
// counted through a prefix trie; a candidate with an infrequent subset is none.

namespace {

inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Keys of sets: the sum of their items' keys, so that a subset's key is one subtraction.
struct KeySet {
    std::vector<uint64_t> slots;
    uint64_t mask = 0;
    explicit KeySet(int64_t count) {
        uint64_t size = 16;
        while (size < 2 * static_cast<uint64_t>(count)) size *= 2;
        slots.assign(size, 0);
        mask = size - 1;
    }
    void insert(uint64_t key) {
        key += !key;
        uint64_t at = mix(key) & mask;
        while (slots[at] && slots[at] != key) at = (at + 1) & mask;
        slots[at] = key;
    }
    bool has(uint64_t key) const {
        key += !key;
        uint64_t at = mix(key) & mask;
        while (slots[at] && slots[at] != key) at = (at + 1) & mask;
        return slots[at] == key;
    }
};

// Sets of k ranks in lexicographic order, one after the other.
struct RankSets {
    int32_t k = 0;
    std::vector<int32_t> ranks, support;
    int64_t sets() const { return k ? static_cast<int64_t>(ranks.size()) / k : 0; }
    const int32_t* set(int64_t at) const { return ranks.data() + at * k; }
};

struct AprioriStart {
    AprioriStart(const MiningJob&, const Database&) {}
    int32_t tasks() const { return 1; }
};

struct Apriori {
    using Start = AprioriStart;
    const MiningJob& job;
    const Database& db;
    Sink& sink;
    Progress& progress;
    // Baskets that are alike are one row with a weight.
    std::vector<int32_t> items, weight;
    std::vector<int64_t> ends;
    // Trie of candidates: the nodes of each depth, in order, and where their children end.
    struct Depth {
        std::vector<int32_t> rank, child_end;
    };
    std::vector<Depth> trie;
    std::vector<int32_t> counts, present;

    Apriori(const MiningJob& job, const Database& db, const Start&, Sink& sink, Progress& progress)
        : job(job), db(db), sink(sink), progress(progress) {}

    void merge() {
        uint64_t size = 16;
        while (size < 2 * static_cast<uint64_t>(db.rows)) size *= 2;
        std::vector<int32_t> slots(size, -1);
        for (int32_t t = 0; t < db.rows; ++t) {
            const int32_t* row = db.row_items.data() + db.row_begin(t);
            const int64_t length = db.row_end[t] - db.row_begin(t);
            if (length < 2) continue;
            sink.work[3] += length;
            uint64_t key = length;
            for (int64_t k = 0; k < length; ++k) key = mix(key ^ static_cast<uint64_t>(row[k]));
            for (uint64_t at = key & (size - 1);; at = (at + 1) & (size - 1)) {
                if (slots[at] < 0) {
                    slots[at] = static_cast<int32_t>(weight.size());
                    weight.push_back(1);
                    items.insert(items.end(), row, row + length);
                    ends.push_back(static_cast<int64_t>(items.size()));
                    break;
                }
                const int64_t begin = slots[at] ? ends[slots[at] - 1] : 0;
                if (ends[slots[at]] - begin == length &&
                    std::memcmp(items.data() + begin, row, length * sizeof(int32_t)) == 0) {
                    ++weight[slots[at]];
                    break;
                }
            }
        }
    }

    // Pairs need no candidates: all later items of a rank's rows are counted side by side.
    RankSets pairs() {
        const int32_t ranks = db.ranks;
        std::vector<int64_t> begin(ranks + 1, 0);
        for (int32_t r : items) ++begin[r + 1];
        for (int32_t r = 0; r < ranks; ++r) begin[r + 1] += begin[r];
        struct Entry {
            int32_t weight, left;
            int64_t place;
        };
        std::vector<Entry> entries(items.size());
        std::vector<int64_t> next(begin.begin(), begin.end());
        for (size_t row = 0; row < ends.size(); ++row)
            for (int64_t at = row ? ends[row - 1] : 0; at < ends[row]; ++at)
                entries[next[items[at]]++] = {weight[row], static_cast<int32_t>(ends[row] - at - 1),
                                              at + 1};
        RankSets level;
        level.k = 2;
        counts.assign(ranks, 0);
        std::vector<int32_t> seen;
        for (int32_t r = 0; r < ranks; ++r) {
            int64_t steps = 0;
            for (int64_t at = begin[r]; at < begin[r + 1]; ++at) {
                const Entry& entry = entries[at];
                const int32_t* later = items.data() + entry.place;
                for (int32_t k = 0; k < entry.left; ++k) counts[later[k]] += entry.weight;
                steps += entry.left;
            }
            sink.work[0] += steps;
            // What was counted: all later items, or where these are many, those of the rows.
            seen.clear();
            if (2 * steps < ranks) {
                for (int64_t at = begin[r]; at < begin[r + 1]; ++at)
                    seen.insert(seen.end(), items.data() + entries[at].place,
                                items.data() + entries[at].place + entries[at].left);
                std::sort(seen.begin(), seen.end());
            } else {
                for (int32_t j = r + 1; j < ranks; ++j)
                    if (counts[j]) seen.push_back(j);
            }
            for (int32_t j : seen) {
                if (counts[j] >= job.least) {
                    level.ranks.insert(level.ranks.end(), {r, j});
                    level.support.push_back(counts[j]);
                }
                counts[j] = 0;
            }
        }
        return level;
    }

    // Join sets that differ in their last item; drop what has an infrequent subset.
    std::vector<int32_t> candidates(const RankSets& level) {
        const int32_t k = level.k;
        KeySet frequent(level.sets());
        std::vector<uint64_t> keys(level.sets());
        for (int64_t at = 0; at < level.sets(); ++at) {
            for (int32_t i = 0; i < k; ++i) keys[at] += mix(level.set(at)[i]);
            frequent.insert(keys[at]);
        }
        std::vector<int32_t> made;
        for (int64_t first = 0, stop; first < level.sets(); first = stop) {
            const size_t prefix = (k - 1) * sizeof(int32_t);
            stop = first + 1;
            while (stop < level.sets() && !std::memcmp(level.set(first), level.set(stop), prefix))
                ++stop;
            for (int64_t a = first; a < stop; ++a)
                for (int64_t b = a + 1; b < stop; ++b) {
                    const uint64_t key = keys[a] + mix(level.set(b)[k - 1]);
                    bool possible = true;
                    for (int32_t i = 0; i < k - 1 && possible; ++i)
                        possible = frequent.has(key - mix(level.set(a)[i]));
                    if (!possible) continue;
                    made.insert(made.end(), level.set(a), level.set(a) + k);
                    made.push_back(level.set(b)[k - 1]);
                }
            sink.work[1] += (stop - first) * (stop - first - 1) / 2;
            if (static_cast<int64_t>(made.size()) > (int64_t(1) << 31)) throw std::bad_alloc();
        }
        return made;
    }

    void build(const std::vector<int32_t>& sets, int32_t k) {
        trie.assign(k, {});
        const int64_t count = static_cast<int64_t>(sets.size()) / k;
        for (int64_t at = 0; at < count; ++at) {
            const int32_t* set = sets.data() + at * k;
            int32_t same = 0;
            if (at)
                while (same < k && set[same] == set[same - k]) ++same;
            for (int32_t depth = same; depth < k; ++depth) {
                trie[depth].rank.push_back(set[depth]);
                trie[depth].child_end.push_back(0);
            }
            for (int32_t depth = 0; depth + 1 < k; ++depth)
                trie[depth].child_end.back() = static_cast<int32_t>(trie[depth + 1].rank.size());
        }
    }

    // Add a row to the candidates below some nodes; `present` has the row's weight at its items.
    void add(int32_t depth, int32_t begin, int32_t end) {
        const int32_t* rank = trie[depth].rank.data();
        steps += end - begin;
        if (depth + 1 == static_cast<int32_t>(trie.size())) {
            int32_t at = begin;
#ifdef SHOAL_VECTORS
            for (; at + 16 <= end; at += 16) {
                const __m512i which = _mm512_loadu_si512(rank + at);
                const __m512i add = _mm512_i32gather_epi32(which, present.data(), 4);
                _mm512_storeu_si512(counts.data() + at,
                                    _mm512_add_epi32(_mm512_loadu_si512(counts.data() + at), add));
            }
#endif
            for (; at < end; ++at) counts[at] += present[rank[at]];
            return;
        }
        const int32_t* child_end = trie[depth].child_end.data();
        for (int32_t at = begin; at < end; ++at)
            if (present[rank[at]]) add(depth + 1, at ? child_end[at - 1] : 0, child_end[at]);
    }
    int64_t steps = 0;

    RankSets count(const std::vector<int32_t>& sets, int32_t k) {
        build(sets, k);
        const int32_t ranks = db.ranks;
        const int64_t size = static_cast<int64_t>(sets.size()) / k;
        counts.assign(size, 0);
        present.assign(ranks, 0);
        std::vector<int32_t> root(ranks, -1);
        std::vector<char> used(ranks, 0);
        for (size_t at = 0; at < trie[0].rank.size(); ++at) root[trie[0].rank[at]] = at;
        for (int32_t r : sets) used[r] = 1;
        // Rows keep the items of candidates, and go when they are shorter than a candidate.
        int64_t to = 0, kept = 0, begin = 0;
        for (size_t row = 0; row < ends.size(); ++row) {
            const int64_t stop = ends[row], first = to;
            for (int64_t at = begin; at < stop; ++at)
                if (used[items[at]]) items[to++] = items[at];
            begin = stop;
            if (to - first < k) {
                to = first;
                continue;
            }
            weight[kept] = weight[row];
            ends[kept++] = to;
        }
        items.resize(to);
        weight.resize(kept);
        ends.resize(kept);
        for (int64_t row = 0; row < kept; ++row) {
            const int64_t first = row ? ends[row - 1] : 0;
            for (int64_t at = first; at < ends[row]; ++at) present[items[at]] = weight[row];
            for (int64_t at = first; at + k <= ends[row]; ++at) {
                const int32_t node = root[items[at]];
                if (node >= 0)
                    add(1, node ? trie[0].child_end[node - 1] : 0, trie[0].child_end[node]);
            }
            for (int64_t at = first; at < ends[row]; ++at) present[items[at]] = 0;
            if ((row & 255) == 0) {
                progress(static_cast<double>(row) / kept, sink.ends.size);
                if (steps > job.budget) throw Halt{kOverBudget};
            }
        }
        sink.work[2] += steps;
        steps = 0;
        RankSets level;
        level.k = k;
        for (int64_t at = 0; at < size; ++at)
            if (counts[at] >= job.least) {
                level.ranks.insert(level.ranks.end(), sets.begin() + at * k,
                                   sets.begin() + (at + 1) * k);
                level.support.push_back(counts[at]);
            }
        return level;
    }

    void emit(const RankSets& level) {
        for (int64_t at = 0; at < level.sets(); ++at) {
            sink.prefix.clear();
            for (int32_t i = 0; i < level.k; ++i) sink.prefix.push_back(db.id[level.set(at)[i]]);
            sink.one(level.support[at]);
        }
    }

    void task(int32_t) {
        RankSets level;
        level.k = 1;
        for (int32_t r = 0; r < db.ranks; ++r) level.ranks.push_back(r);
        level.support = db.support;
        emit(level);
        if (job.max_len < 2) return;
        merge();
        level = pairs();
        emit(level);
        while (level.sets() > 1 && level.k < job.max_len) {
            const std::vector<int32_t> sets = candidates(level);
            if (sets.empty()) return;
            level = count(sets, level.k + 1);
            emit(level);
        }
    }
};

}  // namespace
