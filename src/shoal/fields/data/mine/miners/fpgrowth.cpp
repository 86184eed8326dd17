// FP-growth: prefix trees of baskets, and of the baskets that have an item, and so on.
//
// Source: Han, Pei, Yin, Mining Frequent Patterns without Candidate Generation, 2000. Trees are flat
// arrays. The nodes of an item lie side by side, so that no chain of pointers leads through them
// (Racz, nonordfp: An FP-growth Variation without Rebuilding the FP-tree, 2004), and a parent has a
// smaller number than its children.

namespace {

// Items are numbered from the most frequent, whose nodes are nearest to the root.
struct Tree {
    std::vector<int32_t> id, support;  // [items]
    std::vector<int32_t> start;        // [items + 1], first node of each item
    std::vector<int32_t> item, parent, count;  // [nodes]; the parent of the first is -1

    int32_t items() const { return static_cast<int32_t>(id.size()); }
    int32_t nodes() const { return static_cast<int32_t>(item.size()); }

    void clear() {
        id.clear();
        support.clear();
        start.clear();
        item.clear();
        parent.clear();
        count.clear();
    }

    void open(int32_t id_of, int32_t support_of) {
        id.push_back(id_of);
        support.push_back(support_of);
        start.push_back(nodes());
    }

    int32_t add(int32_t parent_of, int32_t count_of) {
        item.push_back(items() - 1);
        parent.push_back(parent_of);
        count.push_back(count_of);
        return nodes() - 1;
    }

    bool is_path() const {
        if (nodes() != items()) return false;
        for (int32_t node = 0; node < nodes(); ++node)
            if (parent[node] != node - 1) return false;
        return true;
    }
};

// One node for all children of a parent that have the item which was opened last.
struct Children {
    std::vector<int32_t> stamp, last;  // [nodes + 1]

    int32_t child(Tree& tree, int32_t parent, int32_t count) {
        const size_t needed = static_cast<size_t>(tree.nodes()) + 2;
        if (stamp.size() < needed) {
            stamp.resize(2 * needed, -1);
            last.resize(2 * needed);
        }
        const int32_t item = tree.items() - 1;
        if (stamp[parent + 1] == item) {
            tree.count[last[parent + 1]] += count;
            return last[parent + 1];
        }
        stamp[parent + 1] = item;
        return last[parent + 1] = tree.add(parent, count);
    }

    void close(Tree& tree) {
        tree.start.push_back(tree.nodes());
        std::fill_n(stamp.begin(), std::min<size_t>(stamp.size(), tree.nodes() + 2), -1);
    }
};

struct FPStart {
    Tree tree;

    FPStart(const MiningJob&, const Database& db) {
        Children children;
        std::vector<int32_t> node(db.rows, -1);
        for (int32_t r = db.ranks - 1; r >= 0; --r) {
            tree.open(db.id[r], db.support[r]);
            for (int64_t at = db.rank_begin(r); at < db.rank_end[r]; ++at) {
                int32_t& end = node[db.tid[at]];
                end = children.child(tree, end, 1);
            }
        }
        children.close(tree);
    }

    int32_t tasks() const { return tree.items(); }
};

struct FPGrowth {
    using Start = FPStart;
    const MiningJob& job;
    Sink& sink;
    int32_t least;

    // What one depth of the search needs; kept, because it is needed again and again.
    struct Level {
        const Tree* searched;            // at this depth
        Tree made;                       // which it is, but for the first
        std::vector<int32_t> sum, link;  // [nodes of the tree] counts on paths; next of its list
        std::vector<int32_t> head;       // [items] first node that lies on a path
        std::vector<uint64_t> on_path;   // bit for each item that has such a node
        std::vector<int32_t> support;    // [items]
        std::vector<int32_t> copy;       // [nodes] number in the tree below
        Children children;               // of the tree that is being made
    };
    std::vector<std::unique_ptr<Level>> levels;

    FPGrowth(const MiningJob& job, const Database&, const Start& start, Sink& sink, Progress&)
        : job(job), sink(sink), least(job.least) {
        Level& first = level(0);
        first.searched = &start.tree;
        prepare(first);
        sink.work[3] += start.tree.nodes();
    }

    Level& level(size_t depth) {
        while (levels.size() <= depth) levels.push_back(std::make_unique<Level>());
        return *levels[depth];
    }

    static constexpr int32_t kUntouched = -2;

    static void prepare(Level& at) {
        const Tree& tree = *at.searched;
        at.sum.assign(tree.nodes(), 0);
        at.link.assign(tree.nodes(), kUntouched);
        at.copy.resize(tree.nodes());
        at.head.assign(tree.items(), -1);
        at.on_path.assign(tree.items() / 64 + 1, 0);
        at.support.assign(tree.items(), 0);
    }

    // All frequent sets whose least frequent item is this one, and which the tree has.
    void extend(size_t depth, int32_t p) {
        Level& at = level(depth);
        const Tree& tree = *at.searched;
        const size_t perfect = sink.perfect.size();
        sink.prefix.push_back(tree.id[p]);
        if (sink.full()) {
            sink.emit(tree.support[p]);
            sink.prefix.pop_back();
            return;
        }
        int64_t touched = 0;
        for (int32_t node = tree.start[p]; node < tree.start[p + 1]; ++node) {
            int32_t up = tree.parent[node];
            if (up < 0) continue;
            at.sum[up] += tree.count[node];
            for (; up >= 0 && at.link[up] == kUntouched; up = tree.parent[up]) {
                at.link[up] = at.head[tree.item[up]];
                at.head[tree.item[up]] = up;
                at.on_path[tree.item[up] >> 6] |= uint64_t(1) << (tree.item[up] & 63);
                ++touched;
            }
        }
        sink.work[0] += touched;
        sink.work[1] += tree.start[p + 1] - tree.start[p];
        int32_t kept = 0, only = -1, only_support = 0;
        downwards(at, p, [&](int32_t k) {
            int32_t support = 0;
            for (int32_t node = at.head[k]; node >= 0; node = at.link[node]) {
                support += at.sum[node];
                if (tree.parent[node] >= 0) at.sum[tree.parent[node]] += at.sum[node];
            }
            at.support[k] = support;
            if (support == tree.support[p]) {
                sink.perfect.push_back(tree.id[k]);
                at.support[k] = 0;  // not in the tree below
            } else if (support >= least) {
                ++kept;
                only = tree.id[k];
                only_support = support;
            }
        });
        sink.work[2] += p / 64 + 1;
        sink.emit(tree.support[p]);
        if (kept > 1) {
            descend(depth, p);
        } else {
            downwards(at, p, [&](int32_t k) { forget(at, k); });
            forget_items(at, p);
            if (kept) {
                sink.prefix.push_back(only);
                sink.emit(only_support);
                sink.prefix.pop_back();
            }
        }
        sink.prefix.pop_back();
        sink.perfect.resize(perfect);
    }

    // The items on paths above item p, the least frequent first.
    template <typename Each>
    static void downwards(const Level& at, int32_t p, Each each) {
        for (int32_t word = p >> 6; word >= 0; --word)
            for (uint64_t bits = at.on_path[word]; bits;) {
                const int bit = 63 - __builtin_clzll(bits);
                bits ^= uint64_t(1) << bit;
                each(64 * word + bit);
            }
    }

    static void forget_items(Level& at, int32_t p) {
        std::fill_n(at.on_path.begin(), (p >> 6) + 1, 0);
    }

    static void forget(Level& at, int32_t k) {
        for (int32_t node = at.head[k], next; node >= 0; node = next) {
            next = at.link[node];
            at.link[node] = kUntouched;
            at.sum[node] = 0;
        }
        at.head[k] = -1;
    }

    // Make the tree of the paths above an item, and search it.
    void descend(size_t depth, int32_t p) {
        Level &below = level(depth + 1), &at = level(depth);
        const Tree& tree = *at.searched;
        below.made.clear();
        below.searched = &below.made;
        for (int32_t word = 0; word <= p >> 6; ++word)
            for (uint64_t bits = at.on_path[word]; bits; bits &= bits - 1) {
                const int32_t k = 64 * word + __builtin_ctzll(bits);
                const bool in = at.support[k] >= least;
                if (in) below.made.open(tree.id[k], at.support[k]);
                for (int32_t node = at.head[k], next; node >= 0; node = next) {
                    next = at.link[node];
                    const int32_t up = tree.parent[node] < 0 ? -1 : at.copy[tree.parent[node]];
                    at.copy[node] =
                        in ? below.children.child(below.made, up, at.sum[node]) : up;
                    at.link[node] = kUntouched;
                    at.sum[node] = 0;
                }
                at.head[k] = -1;
            }
        forget_items(at, p);
        below.children.close(below.made);
        sink.work[3] += below.made.nodes();
        if (below.made.is_path()) {
            path(below.made);
            return;
        }
        prepare(below);
        const int32_t items = below.made.items();
        for (int32_t k = items - 1; k >= 0; --k) extend(depth + 1, k);
    }

    // A tree that is one path: every subset is as frequent as its deepest item.
    void path(const Tree& tree) {
        const size_t perfect = sink.perfect.size();
        for (int32_t k = 0; k < tree.items(); ++k) {
            sink.prefix.push_back(tree.id[k]);
            sink.emit(tree.support[k]);
            sink.prefix.pop_back();
            sink.perfect.push_back(tree.id[k]);
        }
        sink.perfect.resize(perfect);
    }

    void task(int32_t number) { extend(0, levels[0]->searched->items() - 1 - number); }
};

}  // namespace
