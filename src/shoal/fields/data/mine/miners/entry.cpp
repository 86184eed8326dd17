// What Python calls: mining, closed and maximal sets among all, exact counts, rules.

namespace {

// Sets by the sum of their items' keys; two sums, because one could be met by chance.
struct Lookup {
    struct Slot {
        uint64_t first, second;
        int64_t set;
    };
    std::vector<Slot> slots;
    uint64_t mask = 0;

    static uint64_t second_key(int32_t item) { return mix(static_cast<uint64_t>(item) + (1ull << 40)); }

    explicit Lookup(const Itemsets& found) {
        uint64_t size = 16;
        while (size < 2 * static_cast<uint64_t>(found.sets)) size *= 2;
        slots.assign(size, Slot{0, 0, -1});
        mask = size - 1;
        for (int64_t set = 0; set < found.sets; ++set) {
            uint64_t first = 0, second = 0;
            for (int64_t at = set ? found.ends[set - 1] : 0; at < found.ends[set]; ++at) {
                first += mix(found.items[at]);
                second += second_key(found.items[at]);
            }
            uint64_t at = first & mask;
            while (slots[at].set >= 0) at = (at + 1) & mask;
            slots[at] = {first, second, set};
        }
    }

    int64_t find(uint64_t first, uint64_t second) const {
        uint64_t at = first & mask;
        while (slots[at].set >= 0 && (slots[at].first != first || slots[at].second != second))
            at = (at + 1) & mask;
        return slots[at].set;
    }
};

void hand_over(Sink& sink, Itemsets* out) {
    out->sets = sink.ends.size;
    out->length = sink.items.size;
    out->items = sink.items.data;
    out->support = sink.support.data;
    out->ends = sink.ends.data;
    std::memcpy(out->work, sink.work, sizeof(sink.work));
    sink.items.data = sink.support.data = nullptr;
    sink.ends.data = nullptr;
}

// Everything that threads have found, in one.
void join(std::vector<std::unique_ptr<Sink>>& sinks) {
    Sink& all = *sinks[0];
    for (size_t who = 1; who < sinks.size(); ++who) {
        const Sink& one = *sinks[who];
        const int64_t shift = all.items.size;
        if (one.items.size)
            std::memcpy(all.items.more(one.items.size), one.items.data, one.items.size * 4);
        all.items.size += one.items.size;
        for (int64_t set = 0; set < one.ends.size; ++set) {
            all.ends.push(one.ends.data[set] + shift);
            all.support.push(one.support.data[set]);
        }
        for (int k = 0; k < 6; ++k) all.work[k] += one.work[k];
    }
    if (all.ends.size > all.limit) throw Halt{kTooMany};
}

template <typename Miner>
void mine(const MiningJob* job, Itemsets* out) {
    std::memset(out, 0, sizeof(*out));
    std::vector<std::unique_ptr<Sink>> sinks;
    std::atomic<int32_t> next{0}, halted{kDone};
    try {
        Database db;
        reduce(*job, db);
        const typename Miner::Start start(*job, db);
        const int32_t tasks = start.tasks(), threads = std::max(1, std::min(job->threads, tasks));
        for (int32_t who = 0; who < threads; ++who) {
            sinks.push_back(std::make_unique<Sink>());
            sinks.back()->limit = job->max_itemsets;
            sinks.back()->max_len = job->max_len;
        }
        const auto work = [&](int32_t who) {
            try {
                Sink& sink = *sinks[who];
                Progress progress{who ? nullptr : job->tick};
                Miner miner(*job, db, start, sink, progress);
                for (int32_t task; !halted && (task = next++) < tasks;) {
                    miner.task(task);
                    progress(static_cast<double>(task + 1) / tasks, threads * sink.ends.size);
                }
            } catch (const Halt& halt) {
                halted = halt.status;
            } catch (const std::bad_alloc&) {
                halted = kNoMemory;
            }
        };
        std::vector<std::thread> others;
        for (int32_t who = 1; who < threads; ++who) others.emplace_back(work, who);
        work(0);
        for (auto& one : others) one.join();
        if (halted) throw Halt{static_cast<Status>(halted.load())};
        join(sinks);
        hand_over(*sinks[0], out);
    } catch (const Halt& halt) {
        if (!sinks.empty()) std::memcpy(out->work, sinks[0]->work, sizeof(out->work));
        out->status = halt.status;
    } catch (const std::bad_alloc&) {
        out->status = kNoMemory;
    }
}

}  // namespace

extern "C" {

void mine_apriori(const MiningJob* job, Itemsets* out) { mine<Apriori>(job, out); }
void mine_eclat(const MiningJob* job, Itemsets* out) { mine<Eclat>(job, out); }
void mine_fpgrowth(const MiningJob* job, Itemsets* out) { mine<FPGrowth>(job, out); }

void free_itemsets(Itemsets* found) {
    std::free(found->items);
    std::free(found->support);
    std::free(found->ends);
}

// Of all frequent sets: keep[i] is 0 if a set with one item more has the same support (closed), or
// is there at all (maximal).
int32_t keep_sets(const Itemsets* found, int32_t target, uint8_t* keep) {
    try {
        const Lookup lookup(*found);
        std::memset(keep, 1, found->sets);
        for (int64_t set = 0; set < found->sets; ++set) {
            const int64_t begin = set ? found->ends[set - 1] : 0, end = found->ends[set];
            if (end - begin < 2) continue;
            uint64_t first = 0, second = 0;
            for (int64_t at = begin; at < end; ++at) {
                first += mix(found->items[at]);
                second += Lookup::second_key(found->items[at]);
            }
            for (int64_t at = begin; at < end; ++at) {
                const int64_t smaller = lookup.find(first - mix(found->items[at]),
                                                    second - Lookup::second_key(found->items[at]));
                if (smaller >= 0 &&
                    (target == kMaximal || found->support[smaller] == found->support[set]))
                    keep[smaller] = 0;
            }
        }
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
    return kDone;
}

// Support of each set, counted again. Sets are in lexicographic order, their items ascending, and
// items[] are numbers below `items`, as those of the baskets are.
int32_t recount(const MiningJob* job, const Itemsets* sets, int32_t* support) {
    try {
        Database db;
        reduce(*job, db);
        std::vector<int32_t> rank(job->items, -1);
        for (int32_t r = 0; r < db.ranks; ++r) rank[db.id[r]] = r;
        const int64_t words = words_of(db.rows);
        std::vector<std::vector<Word>> columns(db.ranks), levels;
        const auto column = [&](int32_t item) -> const Word* {
            if (rank[item] < 0) return nullptr;
            auto& bits = columns[rank[item]];
            if (bits.empty()) {
                bits.assign(words + 1, 0);
                const int32_t r = rank[item];
                for (int64_t at = db.rank_begin(r); at < db.rank_end[r]; ++at)
                    bits[db.tid[at] >> 6] |= Word(1) << (db.tid[at] & 63);
            }
            return bits.data();
        };
        std::vector<int32_t> path, counts;
        for (int64_t set = 0; set < sets->sets; ++set) {
            const int32_t* items = sets->items + (set ? sets->ends[set - 1] : 0);
            const int32_t length =
                static_cast<int32_t>(sets->ends[set] - (set ? sets->ends[set - 1] : 0));
            size_t same = 0;
            while (same < path.size() && static_cast<int32_t>(same) < length &&
                   path[same] == items[same])
                ++same;
            path.resize(same);
            counts.resize(same);
            for (int32_t depth = static_cast<int32_t>(same); depth < length; ++depth) {
                if (static_cast<int32_t>(levels.size()) <= depth)
                    levels.emplace_back(std::vector<Word>(words + 1));
                const Word* bits = column(items[depth]);
                int32_t count = 0;
                if (bits && (depth == 0 || counts[depth - 1]))
                    count = and_count(depth ? levels[depth - 1].data() : bits, bits,
                                      levels[depth].data(), words);
                path.push_back(items[depth]);
                counts.push_back(count);
            }
            support[set] = length ? counts[length - 1] : db.rows;
        }
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
    return kDone;
}

struct Rules {
    int64_t rules;
    int64_t* set;        // of which antecedent and consequent are the parts
    uint64_t* mask;      // bit i: item i of the set is in the consequent
    int32_t *antecedent, *consequent;  // support
    int32_t status;
};

void free_rules(Rules* rules) {
    std::free(rules->set);
    std::free(rules->mask);
    std::free(rules->antecedent);
    std::free(rules->consequent);
}

// All rules of the confidence or more. A consequent that fails, fails with any item more, because
// the antecedent only becomes more frequent.
void find_rules(const Itemsets* found, double confidence, int64_t limit, Rules* out) {
    std::memset(out, 0, sizeof(*out));
    struct Search {
        const Itemsets& found;
        const Lookup lookup;
        double confidence;
        int64_t limit;
        Buffer<int64_t> set;
        Buffer<uint64_t> mask;
        Buffer<int32_t> antecedent, consequent;
        std::vector<uint64_t> first, second;
        uint64_t all_first = 0, all_second = 0;

        Search(const Itemsets& found, double confidence, int64_t limit)
            : found(found), lookup(found), confidence(confidence), limit(limit) {}

        void grow(int64_t at, size_t next, uint64_t chosen, uint64_t a, uint64_t b, size_t taken) {
            for (size_t k = next; k < first.size() && taken + 1 < first.size(); ++k) {
                const uint64_t a_with = a + first[k], b_with = b + second[k];
                const int64_t rest = lookup.find(all_first - a_with, all_second - b_with);
                if (rest < 0 ||
                    found.support[at] < confidence * found.support[rest] * (1 - 1e-12))
                    continue;
                const int64_t then = lookup.find(a_with, b_with);
                if (set.size == limit) throw Halt{kTooMany};
                set.push(at);
                mask.push(chosen | 1ull << k);
                antecedent.push(found.support[rest]);
                consequent.push(then < 0 ? 0 : found.support[then]);
                grow(at, k + 1, chosen | 1ull << k, a_with, b_with, taken + 1);
            }
        }
    };
    try {
        Search search(*found, confidence, limit);
        for (int64_t at = 0; at < found->sets; ++at) {
            const int64_t begin = at ? found->ends[at - 1] : 0, end = found->ends[at];
            if (end - begin < 2) continue;
            search.first.clear();
            search.second.clear();
            search.all_first = search.all_second = 0;
            for (int64_t k = begin; k < end; ++k) {
                search.first.push_back(mix(found->items[k]));
                search.second.push_back(Lookup::second_key(found->items[k]));
                search.all_first += search.first.back();
                search.all_second += search.second.back();
            }
            search.grow(at, 0, 0, 0, 0, 0);
        }
        out->rules = search.set.size;
        out->set = search.set.data;
        out->mask = search.mask.data;
        out->antecedent = search.antecedent.data;
        out->consequent = search.consequent.data;
        search.set.data = nullptr;
        search.mask.data = nullptr;
        search.antecedent.data = search.consequent.data = nullptr;
    } catch (const Halt& halt) {
        out->status = halt.status;
    } catch (const std::bad_alloc&) {
        out->status = kNoMemory;
    }
}
}
