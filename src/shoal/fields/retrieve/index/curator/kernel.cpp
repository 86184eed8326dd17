// A clustering tree that all tenants share, with a cut of its own for each.
//
// Source: Jin et al., Curator: Efficient Indexing for Multi-Tenant Vector Databases, 2024.
//
// Vectors lie once, in blocks that never move. Ids of a tenant's vectors lie in short lists at the
// nodes of its cut; all lists are in one arena, found through one hash table by (node, tenant).
// A node's Bloom filter says which tenants may have something beneath it.

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <shared_mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int32_t kNone = -1;
constexpr int kDepth = 8;
// Lists that became empty, after which stale bits of the filters are taken away.
constexpr int64_t kStale = 100;

inline uint64_t mix(uint64_t x) {
    x ^= x >> 33, x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
}

inline float squared(const float* a, const float* b, int64_t d) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < d; ++i) {
        const float apart = a[i] - b[i];
        sum += apart * apart;
    }
    return sum;
}

inline float negative_product(const float* a, const float* b, int64_t d) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < d; ++i) sum += a[i] * b[i];
    return -sum;
}

// Coordinates that are compared before anything is decided: four lines of the cache.
constexpr int64_t kHead = 64;

// Right if it is below a limit; a number that is not below it otherwise.
inline float squared_within(const float* a, const float* b, int64_t d, float limit) {
    int64_t at = std::min(kHead, d);
    float sum = squared(a, b, at);
    while (at < d && sum < limit) {
        const int64_t step = std::min(at, d - at);
        sum += squared(a + at, b + at, step);
        at += step;
    }
    return sum;
}

// Open addressing, linear probing; erasing moves later ones back, so nothing is left of it. Keys are
// kept plus one: 0 is an empty slot.
template <typename V>
class Table {
  public:
    struct Slot {
        uint64_t key;
        V value;
    };

    Table() : slots_(16) {}

    V* find(uint64_t key) {
        for (uint64_t at = mix(key) & mask();; at = (at + 1) & mask()) {
            if (slots_[at].key == key + 1) return &slots_[at].value;
            if (!slots_[at].key) return nullptr;
        }
    }

    void prefetch(uint64_t key) const { __builtin_prefetch(&slots_[mix(key) & mask()]); }

    V& put(uint64_t key, const V& value) {
        if ((size_ + 1) * 4 > int64_t(slots_.size()) * 3) grow();
        ++size_;
        return place(key, value);
    }

    void erase(uint64_t key) {
        uint64_t at = mix(key) & mask();
        while (slots_[at].key != key + 1) at = (at + 1) & mask();
        for (uint64_t next = (at + 1) & mask(); slots_[next].key; next = (next + 1) & mask()) {
            const uint64_t home = mix(slots_[next].key - 1) & mask();
            // May it move back to the hole? Not if its home lies behind the hole.
            if (((next - home) & mask()) >= ((next - at) & mask())) {
                slots_[at] = slots_[next];
                at = next;
            }
        }
        slots_[at] = Slot();
        --size_;
    }

    template <typename F>
    void each(F visit) {
        for (Slot& slot : slots_)
            if (slot.key) visit(slot.key - 1, slot.value);
    }

    int64_t size() const { return size_; }
    int64_t bytes() const { return slots_.size() * sizeof(Slot); }

  private:
    uint64_t mask() const { return slots_.size() - 1; }

    V& place(uint64_t key, const V& value) {
        uint64_t at = mix(key) & mask();
        while (slots_[at].key) at = (at + 1) & mask();
        slots_[at] = {key + 1, value};
        return slots_[at].value;
    }

    void grow() {
        std::vector<Slot> slots(slots_.size() * 2);
        slots.swap(slots_);
        for (const Slot& slot : slots)
            if (slot.key) place(slot.key - 1, slot.value);
    }

    std::vector<Slot> slots_;
    int64_t size_ = 0;
};

struct List {
    int64_t at = 0;
    int32_t size = 0;
    int32_t order = -1;  // of its block; -1 for none
};

// Lists of int32 in blocks of one array, of 2, 3, 4, 6, 8, 12 and so on places.
class Arena {
  public:
    static int32_t places(int order) { return (2 + (order & 1)) << (order / 2); }

    void push(List& list, int32_t value) {
        if (list.order < 0 || list.size == places(list.order)) resize(list, list.order + 1);
        cells_[list.at + list.size++] = value;
    }

    // False if it is not there. The last one takes its place.
    bool drop(List& list, int32_t value) {
        int32_t* begin = &cells_[list.at];
        int32_t* found = std::find(begin, begin + list.size, value);
        if (found == begin + list.size) return false;
        *found = begin[--list.size];
        if (!list.size)
            release(list);
        else if (list.order > 3 && list.size <= places(list.order - 3))
            resize(list, list.order - 2);
        return true;
    }

    void release(List& list) {
        if (list.order >= 0) free_[list.order].push_back(list.at);
        list = List();
    }

    const int32_t* data(const List& list) const { return cells_.data() + list.at; }

    int64_t bytes() const {
        int64_t sum = cells_.capacity() * sizeof(int32_t);
        for (const auto& one : free_) sum += one.capacity() * sizeof(int64_t);
        return sum;
    }

  private:
    void resize(List& list, int order) {
        int64_t at;
        if (free_[order].empty()) {
            at = cells_.size();
            // An eighth more than is needed, not twice: most of the ids are added at the beginning.
            const size_t size = cells_.size() + places(order);
            if (cells_.capacity() < size) cells_.reserve(size + size / 8);
            cells_.resize(size);
        } else {
            at = free_[order].back();
            free_[order].pop_back();
        }
        if (list.size) std::memcpy(&cells_[at], &cells_[list.at], list.size * sizeof(int32_t));
        if (list.order >= 0) free_[list.order].push_back(list.at);
        list.at = at;
        list.order = order;
    }

    std::vector<int32_t> cells_;
    std::vector<int64_t> free_[60];
};

constexpr size_t kPage = size_t(2) << 20;

inline size_t in_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Memory for a block of vectors, in large pages where there are some: a search jumps in it.
struct Block {
    float* at;
    explicit Block(size_t bytes) {
        const size_t whole = in_pages(bytes);
        at = static_cast<float*>(std::aligned_alloc(kPage, whole));
        if (!at) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        madvise(at, whole, MADV_HUGEPAGE);
#endif
    }
    Block(Block&& other) noexcept : at(std::exchange(other.at, nullptr)) {}
    ~Block() { std::free(at); }
};

struct Node {
    int32_t parent, first, children, depth;
};

struct Index {
    int64_t dim, branching, shortlist, words;  // words of a filter
    uint32_t block;                            // rows of a block of vectors
    uint64_t inverse;                          // 2^64 / block, rounded up
    bool product;                              // negative inner product, else squared distance
    std::vector<Node> nodes;
    std::vector<float> centroids;
    // Of siblings word by word, so that one look at a word of each is a look at one line.
    std::vector<uint64_t> filters;
    std::vector<int32_t> place;   // of a node, in the order in which one meets them from the root
    std::vector<Block> blocks;
    std::vector<int32_t> leaf;    // of a row; kNone for a free one
    std::vector<int64_t> names;   // of a row
    std::vector<List> owners;     // tenants of a row
    std::vector<int32_t> unused;  // free rows
    Table<int32_t> rows;          // name -> row
    Table<List> lists;            // (node, tenant) -> rows
    Arena arena;
    int64_t emptied = 0, rebuilt = 0;
    mutable std::shared_mutex mutex;

    float* row(int32_t at) const {  // a division would take as long as a part of a distance
        const uint32_t whole = (unsigned __int128)(uint32_t(at)) * inverse >> 64;
        return blocks[whole].at + (uint32_t(at) - whole * block) * dim;
    }
    const float* centroid(int32_t node) const { return centroids.data() + node * dim; }
    float distance(const float* a, const float* b) const {
        return product ? negative_product(a, b, dim) : squared(a, b, dim);
    }
    static uint64_t key(int32_t node, uint32_t tenant) { return uint64_t(node) << 32 | tenant; }
    List* list(int32_t node, uint32_t tenant) { return lists.find(key(node, tenant)); }
};

// The filter of a node: a word of each sibling, then the next word of each.
struct Siblings {
    uint64_t* base;
    int64_t count;
    uint64_t& operator[](int64_t word) const { return base[word * count]; }

    static Siblings of(Index& x, int32_t node) {
        const int32_t parent = x.nodes[node].parent;
        if (parent == kNone) return {x.filters.data(), 1};
        return among(x, x.nodes[parent], node);
    }
    static Siblings among(Index& x, const Node& parent, int32_t node) {
        return {&x.filters[parent.first * x.words + node - parent.first], parent.children};
    }
};

// Three bits of a tenant in every filter.
struct Bits {
    int64_t word[3];
    uint64_t bit[3];
    Bits(uint32_t tenant, int64_t words) {
        uint64_t x = mix(tenant + 0x9e3779b97f4a7c15ULL);
        for (int i = 0; i < 3; ++i, x = mix(x)) {
            word[i] = (x >> 6) % words;
            bit[i] = 1ULL << (x & 63);
        }
    }
    bool in(const Siblings& filter) const {
        return (filter[word[0]] & bit[0]) && (filter[word[1]] & bit[1]) &&
               (filter[word[2]] & bit[2]);
    }
    void set(const Siblings& filter) const {
        for (int i = 0; i < 3; ++i) filter[word[i]] |= bit[i];
    }
};

// The tree

int32_t nearest_child(const Index& x, int32_t node, const float* vector) {
    const Node& n = x.nodes[node];
    int32_t best = n.first;
    float least = std::numeric_limits<float>::infinity();
    for (int32_t child = n.first; child < n.first + n.children; ++child) {
        const float apart = squared_within(vector, x.centroid(child), x.dim, least);
        if (apart < least) least = apart, best = child;
    }
    return best;
}

int32_t descend(const Index& x, const float* vector) {
    int32_t node = 0;
    while (x.nodes[node].children) node = nearest_child(x, node, vector);
    return node;
}

// k-means of some rows of a sample into the children of a node; the rows of each child.
std::vector<std::vector<int32_t>> split(Index& x, int32_t node, const float* sample,
                                        const std::vector<int32_t>& rows, int64_t k,
                                        std::mt19937_64& draw) {
    std::vector<int32_t> some(rows);
    std::shuffle(some.begin(), some.end(), draw);
    if (int64_t(some.size()) > 256 * k) some.resize(256 * k);
    const int32_t first = x.nodes.size();
    x.nodes[node].first = first;
    x.nodes[node].children = k;
    for (int64_t i = 0; i < k; ++i) {
        x.nodes.push_back({node, 0, 0, x.nodes[node].depth + 1});
        const float* from = sample + int64_t(some[i]) * x.dim;
        x.centroids.insert(x.centroids.end(), from, from + x.dim);
    }
    std::vector<double> sums(k * x.dim);
    std::vector<int64_t> counts(k);
    for (int round = 0; round < 10; ++round) {
        std::fill(sums.begin(), sums.end(), 0.0);
        std::fill(counts.begin(), counts.end(), 0);
        for (int32_t one : some) {
            const float* from = sample + int64_t(one) * x.dim;
            const int64_t to = nearest_child(x, node, from) - first;
            ++counts[to];
            for (int64_t i = 0; i < x.dim; ++i) sums[to * x.dim + i] += from[i];
        }
        for (int64_t to = 0; to < k; ++to) {
            float* centroid = x.centroids.data() + (first + to) * x.dim;
            if (!counts[to]) {  // begins again at another row
                const int32_t one = some[draw() % some.size()];
                std::memcpy(centroid, sample + int64_t(one) * x.dim, x.dim * sizeof(float));
                continue;
            }
            for (int64_t i = 0; i < x.dim; ++i) centroid[i] = sums[to * x.dim + i] / counts[to];
        }
    }
    std::vector<std::vector<int32_t>> parts(k);
    for (int32_t one : rows)
        parts[nearest_child(x, node, sample + int64_t(one) * x.dim) - first].push_back(one);
    return parts;
}

// Grants

// A row into the list of a tenant at a node; a list that is too long goes one level down.
void append(Index& x, int32_t node, uint32_t tenant, int32_t row);

int32_t child_towards(const Index& x, int32_t node, int32_t row) {
    int32_t at = x.leaf[row];
    while (x.nodes[at].parent != node) at = x.nodes[at].parent;
    return at;
}

void append(Index& x, int32_t node, uint32_t tenant, int32_t row) {
    List* list = x.list(node, tenant);
    if (!list) {
        list = &x.lists.put(Index::key(node, tenant), List());
        Bits(tenant, x.words).set(Siblings::of(x, node));
    }
    x.arena.push(*list, row);
    if (list->size <= x.shortlist || !x.nodes[node].children) return;
    const std::vector<int32_t> rows(x.arena.data(*list), x.arena.data(*list) + list->size);
    x.arena.release(*list);
    x.lists.erase(Index::key(node, tenant));
    for (int32_t one : rows) append(x, child_towards(x, node, one), tenant, one);
}

int path_of(const Index& x, int32_t row, int32_t* path) {
    int length = 0;
    for (int32_t at = x.leaf[row]; at != kNone; at = x.nodes[at].parent) path[length++] = at;
    std::reverse(path, path + length);
    return length;
}

bool owns(const Index& x, int32_t row, uint32_t tenant) {
    const List& owners = x.owners[row];
    const int32_t* begin = x.arena.data(owners);
    return std::find(begin, begin + owners.size, int32_t(tenant)) != begin + owners.size;
}

void grant(Index& x, int32_t row, uint32_t tenant) {
    if (owns(x, row, tenant)) return;
    x.arena.push(x.owners[row], tenant);
    const Bits bits(tenant, x.words);
    int32_t path[kDepth + 2];
    const int length = path_of(x, row, path);
    for (int at = 0; at < length; ++at) {
        const Siblings filter = Siblings::of(x, path[at]);
        const bool fresh = !bits.in(filter);
        bits.set(filter);
        if (fresh || at == length - 1 || x.list(path[at], tenant)) {
            append(x, path[at], tenant, row);
            return;
        }
    }
}

void rebuild_filters(Index& x) {
    std::fill(x.filters.begin(), x.filters.end(), 0);
    x.lists.each([&](uint64_t key, List&) {
        const Bits bits(uint32_t(key), x.words);
        for (int32_t at = key >> 32; at != kNone; at = x.nodes[at].parent)
            bits.set(Siblings::of(x, at));
    });
    x.emptied = 0;
    ++x.rebuilt;
}

// The lists of all children of a node into one at the node, if they fit in half of a list.
bool merge(Index& x, int32_t node, uint32_t tenant) {
    const Bits bits(tenant, x.words);
    const Node& n = x.nodes[node];
    int64_t sum = 0;
    for (int32_t child = n.first; child < n.first + n.children; ++child) {
        if (const List* list = x.list(child, tenant))
            sum += list->size;
        else if (bits.in(Siblings::among(x, n, child)))
            return false;  // something may lie deeper
    }
    if (!sum || sum * 2 > x.shortlist) return false;
    List whole;
    for (int32_t child = n.first; child < n.first + n.children; ++child) {
        List* list = x.list(child, tenant);
        if (!list) continue;
        const std::vector<int32_t> rows(x.arena.data(*list), x.arena.data(*list) + list->size);
        for (int32_t one : rows) x.arena.push(whole, one);
        x.arena.release(*list);
        x.lists.erase(Index::key(child, tenant));
        ++x.emptied;
    }
    x.lists.put(Index::key(node, tenant), whole);
    return true;
}

bool revoke(Index& x, int32_t row, uint32_t tenant) {
    if (!x.arena.drop(x.owners[row], tenant)) return false;
    int32_t path[kDepth + 2];
    const int length = path_of(x, row, path);
    for (int at = 0; at < length; ++at) {
        List* list = x.list(path[at], tenant);
        if (!list || !x.arena.drop(*list, row)) continue;
        if (!list->size) {
            x.lists.erase(Index::key(path[at], tenant));
            ++x.emptied;
        }
        while (at > 0 && merge(x, path[at - 1], tenant)) --at;
        break;
    }
    if (x.emptied >= kStale) rebuild_filters(x);
    return true;
}

int32_t take_row(Index& x, int64_t name, const float* vector, int32_t leaf) {
    int32_t at;
    if (x.unused.empty()) {
        at = x.leaf.size();
        if (at % x.block == 0) x.blocks.emplace_back(x.block * x.dim * sizeof(float));
        x.leaf.push_back(kNone);
        x.names.push_back(0);
        x.owners.push_back(List());
    } else {
        at = x.unused.back();
        x.unused.pop_back();
    }
    std::memcpy(x.row(at), vector, x.dim * sizeof(float));
    x.names[at] = name;
    x.leaf[at] = leaf;
    x.rows.put(name, at);
    return at;
}

void remove_row(Index& x, int64_t name) {
    const int32_t row = *x.rows.find(name);
    const std::vector<int32_t> owners(x.arena.data(x.owners[row]),
                                      x.arena.data(x.owners[row]) + x.owners[row].size);
    for (int32_t tenant : owners) revoke(x, row, tenant);
    x.rows.erase(name);
    x.leaf[row] = kNone;
    x.unused.push_back(row);
}

// Places of nodes, so that leaves below one node have places behind each other.
void place_nodes(Index& x) {
    x.place.assign(x.nodes.size(), 0);
    std::vector<int32_t> todo(1, 0);
    for (int32_t at = 0; !todo.empty(); ++at) {
        const int32_t node = todo.back();
        todo.pop_back();
        x.place[node] = at;
        for (int32_t i = 0; i < x.nodes[node].children; ++i)
            todo.push_back(x.nodes[node].first + i);
    }
    x.filters.assign(x.nodes.size() * x.words, 0);
}

// Searches

struct Best {  // the k nearest, a heap with the farthest on top
    int64_t k;
    std::vector<std::pair<float, int32_t>> heap;
    float limit = std::numeric_limits<float>::infinity();

    void offer(float apart, int32_t row) {
        if (apart >= limit) return;
        if (int64_t(heap.size()) == k) {
            std::pop_heap(heap.begin(), heap.end());
            heap.back() = {apart, row};
        } else {
            heap.emplace_back(apart, row);
        }
        std::push_heap(heap.begin(), heap.end());
        if (int64_t(heap.size()) == k) limit = heap.front().first;
    }
};

inline void fetch(const float* from, int64_t numbers) {
    for (int64_t at = 0; at < numbers; at += 16) __builtin_prefetch(from + at);
}

// The nearest rows. Of a row whose first coordinates are not too far the others are fetched too, and
// looked at some rows later, when they have come.
void scan(const Index& x, const float* query, const int32_t* rows, int64_t count, Best& best) {
    constexpr int64_t kAhead = 12, kWaiting = 8;
    const int64_t head = x.product ? x.dim : std::min(kHead, x.dim);
    struct {
        float apart;
        int32_t row;
    } waiting[kWaiting];
    int64_t first = 0, last = 0;
    const auto finish = [&] {
        const auto [apart, row] = waiting[first++ % kWaiting];
        if (apart < best.limit)
            best.offer(apart + squared(query + kHead, x.row(row) + kHead, x.dim - kHead), row);
    };
    for (int64_t i = 0; i < std::min(kAhead, count); ++i) fetch(x.row(rows[i]), head);
    for (int64_t i = 0; i < count; ++i) {
        if (i + kAhead < count) fetch(x.row(rows[i + kAhead]), head);
        const float* row = x.row(rows[i]);
        if (head == x.dim) {
            best.offer(x.distance(query, row), rows[i]);
            continue;
        }
        const float apart = squared(query, row, kHead);
        if (apart >= best.limit) continue;
        fetch(row + kHead, x.dim - kHead);
        if (last - first == kWaiting) finish();
        waiting[last++ % kWaiting] = {apart, rows[i]};
    }
    while (first < last) finish();
}

struct Bucket {
    float apart;
    const List* list;
};

// The stats are vectors compared, ids in the lists that were seen, and nodes compared.
void search(Index& x, const float* query, int64_t k, uint32_t tenant, double gamma1, double gamma2,
            int64_t* names, float* distances, int64_t* stats) {
    using Place = std::pair<float, int32_t>;
    const auto farther = [](const Place& a, const Place& b) { return a.first > b.first; };
    const Bits bits(tenant, x.words);
    const double enough = gamma2 * k, seen = gamma1 * enough;
    thread_local std::vector<Place> queue;
    thread_local std::vector<Bucket> buckets;
    queue.clear(), buckets.clear();
    int64_t found = 0, nodes = 0;
    if (bits.in(Siblings::of(x, 0))) queue.emplace_back(0.0f, 0);
    while (!queue.empty() && found < seen) {
        std::pop_heap(queue.begin(), queue.end(), farther);
        const auto [apart, node] = queue.back();
        queue.pop_back();
        if (const List* list = x.list(node, tenant)) {
            buckets.push_back({apart, list});
            found += list->size;
            continue;
        }
        const Node& n = x.nodes[node];
        for (int32_t child = n.first; child < n.first + n.children; ++child) {
            if (!bits.in(Siblings::among(x, n, child))) continue;
            x.lists.prefetch(Index::key(child, tenant));
            queue.emplace_back(x.distance(query, x.centroid(child)), child);
            std::push_heap(queue.begin(), queue.end(), farther);
            ++nodes;
        }
    }
    std::sort(buckets.begin(), buckets.end(),
              [](const Bucket& a, const Bucket& b) { return a.apart < b.apart; });
    // Behind each other, so that the next bucket's vectors are on their way at the end of one.
    thread_local std::vector<int32_t> rows;
    rows.clear();
    for (const Bucket& one : buckets) {
        if (double(rows.size()) >= enough) break;
        const int32_t* begin = x.arena.data(*one.list);
        rows.insert(rows.end(), begin, begin + one.list->size);
    }
    Best best{k, {}};
    const int64_t compared = rows.size();
    scan(x, query, rows.data(), compared, best);
    std::sort(best.heap.begin(), best.heap.end());
    for (int64_t i = 0; i < k; ++i) {
        const bool is = i < int64_t(best.heap.size());
        names[i] = is ? x.names[best.heap[i].second] : -1;
        distances[i] = is ? best.heap[i].first : std::numeric_limits<float>::infinity();
    }
    stats[0] = compared, stats[1] = found, stats[2] = nodes;
}

template <typename F>
void in_threads(int64_t count, int64_t threads, F work) {
    std::vector<std::thread> others;
    for (int64_t t = 1; t < threads; ++t)
        others.emplace_back([=] {
            for (int64_t i = t; i < count; i += threads) work(i);
        });
    for (int64_t i = 0; i < count; i += threads) work(i);
    for (auto& one : others) one.join();
}

}  // namespace

extern "C" {

void* curator_new(int64_t dim, int64_t branching, int64_t shortlist, int64_t words, int product) {
    Index* x = new Index();
    x->dim = dim, x->branching = branching, x->shortlist = shortlist, x->words = words;
    x->product = product != 0;
    x->block = std::max<int64_t>(64, kPage / (dim * sizeof(float)));
    x->inverse = UINT64_MAX / x->block + 1;
    return x;
}

void curator_free(void* index) { delete static_cast<Index*>(index); }

// The tree from a sample [n, dim].
void curator_train(void* index, const float* sample, int64_t n, uint64_t seed) {
    Index& x = *static_cast<Index*>(index);
    std::unique_lock lock(x.mutex);
    std::mt19937_64 draw(seed);
    x.nodes.assign(1, {kNone, 0, 0, 0});
    x.centroids.assign(x.dim, 0.0f);
    std::vector<int32_t> all(n);
    for (int64_t i = 0; i < n; ++i) all[i] = i;
    std::vector<std::pair<int32_t, std::vector<int32_t>>> todo;
    todo.emplace_back(0, std::move(all));
    while (!todo.empty()) {
        auto [node, rows] = std::move(todo.back());
        todo.pop_back();
        const int depth = x.nodes[node].depth;
        const int64_t k = std::max<int64_t>(4, x.branching >> depth);
        if (depth == kDepth || int64_t(rows.size()) < 8 * k) continue;
        auto parts = split(x, node, sample, rows, k, draw);
        for (int64_t i = 0; i < k; ++i)
            todo.emplace_back(x.nodes[node].first + i, std::move(parts[i]));
    }
    x.nodes.shrink_to_fit();
    x.centroids.shrink_to_fit();
    place_nodes(x);
}

// Where a name is, or -1: [n].
void curator_find(void* index, const int64_t* names, int64_t n, int32_t* rows) {
    Index& x = *static_cast<Index*>(index);
    std::shared_lock lock(x.mutex);
    for (int64_t i = 0; i < n; ++i) {
        const int32_t* row = x.rows.find(names[i]);
        rows[i] = row ? *row : kNone;
    }
}

// New names with their vectors [n, dim], owned by a tenant unless it is -1.
void curator_add(void* index, const int64_t* names, const float* vectors, int64_t n,
                 int64_t tenant) {
    Index& x = *static_cast<Index*>(index);
    // The tree does not change, so no lock is needed; neighbours come to lie beside each other.
    std::vector<int32_t> leaves(n), order(n);
    for (int64_t i = 0; i < n; ++i) leaves[i] = descend(x, vectors + i * x.dim);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return x.place[leaves[a]] < x.place[leaves[b]];
    });
    for (int64_t begin = 0; begin < n; begin += 64) {  // searches come between
        std::unique_lock lock(x.mutex);
        for (int64_t i = begin; i < std::min(n, begin + 64); ++i) {
            const int64_t at = order[i];
            const int32_t row = take_row(x, names[at], vectors + at * x.dim, leaves[at]);
            if (tenant >= 0) grant(x, row, tenant);
        }
    }
}

void curator_remove(void* index, const int64_t* names, int64_t n) {
    Index& x = *static_cast<Index*>(index);
    for (int64_t begin = 0; begin < n; begin += 64) {
        std::unique_lock lock(x.mutex);
        for (int64_t i = begin; i < std::min(n, begin + 64); ++i) remove_row(x, names[i]);
    }
}

void curator_grant(void* index, const int32_t* rows, int64_t n, uint32_t tenant) {
    Index& x = *static_cast<Index*>(index);
    for (int64_t begin = 0; begin < n; begin += 64) {
        std::unique_lock lock(x.mutex);
        for (int64_t i = begin; i < std::min(n, begin + 64); ++i) grant(x, rows[i], tenant);
    }
}

// How many of them it had.
int64_t curator_revoke(void* index, const int32_t* rows, int64_t n, uint32_t tenant) {
    Index& x = *static_cast<Index*>(index);
    int64_t had = 0;
    for (int64_t begin = 0; begin < n; begin += 64) {
        std::unique_lock lock(x.mutex);
        for (int64_t i = begin; i < std::min(n, begin + 64); ++i) had += revoke(x, rows[i], tenant);
    }
    return had;
}

void curator_search(void* index, const float* queries, int64_t n, int64_t k, uint32_t tenant,
                    double gamma1, double gamma2, int64_t threads, int64_t* names,
                    float* distances, int64_t* stats) {
    Index& x = *static_cast<Index*>(index);
    in_threads(n, threads, [&](int64_t i) {
        std::shared_lock lock(x.mutex);
        search(x, queries + i * x.dim, k, tenant, gamma1, gamma2, names + i * k, distances + i * k,
               stats + 3 * i);
    });
}

// The nearest among given names, exactly.
void curator_among(void* index, const float* queries, int64_t n, int64_t k, const int32_t* rows,
                   int64_t count, int64_t* names, float* distances) {
    Index& x = *static_cast<Index*>(index);
    std::shared_lock lock(x.mutex);
    for (int64_t q = 0; q < n; ++q) {
        Best best{k, {}};
        scan(x, queries + q * x.dim, rows, count, best);
        std::sort(best.heap.begin(), best.heap.end());
        for (int64_t i = 0; i < k; ++i) {
            const bool is = i < int64_t(best.heap.size());
            names[q * k + i] = is ? x.names[best.heap[i].second] : -1;
            distances[q * k + i] =
                is ? best.heap[i].first : std::numeric_limits<float>::infinity();
        }
    }
}

// Vectors of rows [n, dim].
void curator_vectors(void* index, const int32_t* rows, int64_t n, float* vectors) {
    Index& x = *static_cast<Index*>(index);
    std::shared_lock lock(x.mutex);
    for (int64_t i = 0; i < n; ++i)
        std::memcpy(vectors + i * x.dim, x.row(rows[i]), x.dim * sizeof(float));
}

// How many rows a tenant has, and where there is room for them, which.
int64_t curator_rows_of(void* index, uint32_t tenant, int32_t* rows) {
    Index& x = *static_cast<Index*>(index);
    std::shared_lock lock(x.mutex);
    const Bits bits(tenant, x.words);
    std::vector<int32_t> todo(1, 0);
    int64_t count = 0;
    while (!todo.empty() && !x.nodes.empty()) {
        const int32_t node = todo.back();
        todo.pop_back();
        if (const List* list = x.list(node, tenant)) {
            if (rows) std::copy_n(x.arena.data(*list), list->size, rows + count);
            count += list->size;
            continue;
        }
        const Node& n = x.nodes[node];
        for (int32_t child = n.first; child < n.first + n.children; ++child)
            if (bits.in(Siblings::among(x, n, child))) todo.push_back(child);
    }
    return count;
}

// Bytes: vectors, ids, tree, filters, lists.
void curator_memory(void* index, int64_t* bytes) {
    Index& x = *static_cast<Index*>(index);
    std::shared_lock lock(x.mutex);
    bytes[0] = x.blocks.size() * in_pages(x.block * x.dim * sizeof(float));
    bytes[1] = x.names.capacity() * sizeof(int64_t) + x.leaf.capacity() * sizeof(int32_t) +
               x.unused.capacity() * sizeof(int32_t) + x.rows.bytes();
    bytes[2] = x.nodes.capacity() * sizeof(Node) + x.centroids.capacity() * sizeof(float) +
               x.place.capacity() * sizeof(int32_t);
    bytes[3] = x.filters.capacity() * sizeof(uint64_t);
    bytes[4] = x.lists.bytes() + x.arena.bytes() + x.owners.capacity() * sizeof(List);
}

// Nodes, leaves, rows, lists, rebuilt filters.
void curator_counts(void* index, int64_t* counts) {
    Index& x = *static_cast<Index*>(index);
    std::shared_lock lock(x.mutex);
    counts[0] = x.nodes.size();
    counts[1] = std::count_if(x.nodes.begin(), x.nodes.end(), [](auto& n) { return !n.children; });
    counts[2] = x.rows.size();
    counts[3] = x.lists.size();
    counts[4] = x.rebuilt;
}

// How often the invariants do not hold: every row of a tenant is in one list of its path, lists
// hold what their tenant owns, are as short as they may be, and the filters know of them.
int64_t curator_broken(void* index) {
    Index& x = *static_cast<Index*>(index);
    std::unique_lock lock(x.mutex);
    int64_t broken = 0, listed = 0, owned = 0;
    x.lists.each([&](uint64_t key, List& list) {
        const int32_t node = key >> 32;
        const uint32_t tenant = key;
        const Bits bits(tenant, x.words);
        broken += !list.size || (list.size > x.shortlist && x.nodes[node].children);
        for (int32_t at = node; at != kNone; at = x.nodes[at].parent)
            broken += !bits.in(Siblings::of(x, at)) || (at != node && x.list(at, tenant));
        for (int32_t i = 0; i < list.size; ++i) {
            const int32_t row = x.arena.data(list)[i];
            int32_t at = x.leaf[row];
            while (at != kNone && at != node) at = x.nodes[at].parent;
            broken += at == kNone || !owns(x, row, tenant);
        }
        listed += list.size;
    });
    for (const List& one : x.owners) owned += one.size;
    return broken + (listed != owned);
}

// The tree and what lies in it, as arrays: parents, first children and children [nodes] ...

void curator_tree(void* index, int32_t* nodes, float* centroids) {
    Index& x = *static_cast<Index*>(index);
    std::shared_lock lock(x.mutex);
    std::memcpy(nodes, x.nodes.data(), x.nodes.size() * sizeof(Node));
    std::memcpy(centroids, x.centroids.data(), x.centroids.size() * sizeof(float));
}

void curator_set_tree(void* index, const int32_t* nodes, const float* centroids, int64_t n) {
    Index& x = *static_cast<Index*>(index);
    std::unique_lock lock(x.mutex);
    x.nodes.resize(n);
    std::memcpy(x.nodes.data(), nodes, n * sizeof(Node));
    x.centroids.assign(centroids, centroids + n * x.dim);
    place_nodes(x);
}

// Rows in their order: names, vectors unless they are not wanted, and how many tenants each has;
// then the tenants.
int64_t curator_rows(void* index, int64_t* names, float* vectors, int32_t* owners,
                     int32_t* tenants) {
    Index& x = *static_cast<Index*>(index);
    std::shared_lock lock(x.mutex);
    int64_t at = 0, sum = 0;
    for (size_t row = 0; row < x.leaf.size(); ++row) {
        if (x.leaf[row] == kNone) continue;
        const List& list = x.owners[row];
        if (names) {
            names[at] = x.names[row];
            if (vectors) std::memcpy(vectors + at * x.dim, x.row(row), x.dim * sizeof(float));
            owners[at] = list.size;
            std::copy_n(x.arena.data(list), list.size, tenants + sum);
        }
        ++at;
        sum += list.size;
    }
    return sum;
}
}
