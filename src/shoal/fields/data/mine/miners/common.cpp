// Frequent itemsets: what the miners share. The files of this folder are compiled as one.
//
// Baskets come as rows of item ids. They are reduced to frequent items, which are numbered by
// ascending support (ties by id): these numbers are called ranks. Rows are kept both ways, by
// basket with ranks ascending and by rank with baskets ascending.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>
#if defined(__AVX512F__) && defined(__AVX512VPOPCNTDQ__) && !defined(SHOAL_SCALAR)
#include <immintrin.h>
#define SHOAL_VECTORS 1
#endif
#if defined(__BMI2__) && !defined(SHOAL_SCALAR)
#include <immintrin.h>
#define SHOAL_PEXT 1
#endif

namespace {

enum Status : int32_t { kDone = 0, kTooMany = 1, kStopped = 2, kNoMemory = 3, kOverBudget = 4 };
enum Target : int32_t { kAll = 0, kClosed = 1, kMaximal = 2 };

struct Halt {
    Status status;
};

// A growing array; realloc moves large ones without copying them.
template <typename T>
struct Buffer {
    T* data = nullptr;
    int64_t size = 0, room = 0;
    ~Buffer() { std::free(data); }
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    T* more(int64_t count) {
        if (size + count > room) {
            room = std::max<int64_t>(size + count, room + room / 2 + 4096);
            void* moved = std::realloc(data, room * sizeof(T));
            if (!moved) throw std::bad_alloc();
            data = static_cast<T*>(moved);
        }
        return data + size;
    }
    void push(T value) {
        *more(1) = value;
        ++size;
    }
};

}  // namespace

extern "C" {

// The itemsets that were found: set i has the items [ends[i - 1], ends[i]).
struct Itemsets {
    int64_t sets, length;
    int32_t *items, *support;
    int64_t* ends;
    // Operations, by which costs are predicted: see `costs.py`.
    int64_t work[6];
    int32_t status;
};

// Called now and then with (share that is done, sets so far); anything but 0 stops.
typedef int32_t (*Tick)(double, int64_t);

struct MiningJob {
    int64_t baskets, items;  // rows, and ids below which all are
    const int64_t* begins;   // [baskets + 1]
    const int32_t* ids;
    int32_t least;           // support
    int32_t target, max_len, threads;
    int64_t max_itemsets, budget;  // sets; operations, of which too many stop
    double bit_density;
    Tick tick;
};
}

namespace {

// Rows of ranks, both ways.
struct Database {
    int32_t rows = 0, ranks = 0, least = 1;
    std::vector<int32_t> id, support;    // [ranks]
    std::vector<int64_t> row_end;        // [rows], row t is [row_end[t - 1], row_end[t])
    std::vector<int32_t> row_items;
    std::vector<int64_t> rank_end;       // [ranks]
    std::vector<int32_t> tid;            // of each entry of a rank, its row
    std::vector<int64_t> place;          // and where in `row_items` it is

    int64_t row_begin(int32_t t) const { return t ? row_end[t - 1] : 0; }
    int64_t rank_begin(int32_t r) const { return r ? rank_end[r - 1] : 0; }

    // From `rank_end` and `tid`: rows, with ranks ascending.
    void transpose() {
        row_end.assign(rows, 0);
        for (int32_t t : tid) ++row_end[t];
        int64_t sum = 0;
        for (auto& end : row_end) {
            const int64_t count = end;
            end = sum;
            sum += count;
        }
        row_items.resize(tid.size());
        place.resize(tid.size());
        int64_t at = 0;
        for (int32_t r = 0; r < ranks; ++r)
            for (; at < rank_end[r]; ++at) {
                const int64_t where = row_end[tid[at]]++;
                row_items[where] = r;
                place[at] = where;
            }
    }
};

// An item that a basket has twice counts once.
void reduce(const MiningJob& job, Database& db) {
    struct Seen {
        int32_t count, last;
    };
    std::vector<Seen> seen(job.items, Seen{0, -1});
    for (int64_t t = 0; t < job.baskets; ++t)
        for (int64_t at = job.begins[t]; at < job.begins[t + 1]; ++at) {
            Seen& one = seen[job.ids[at]];
            if (one.last != t) {
                one.last = static_cast<int32_t>(t);
                ++one.count;
            }
        }
    for (int64_t item = 0; item < job.items; ++item)
        if (seen[item].count >= job.least) db.id.push_back(static_cast<int32_t>(item));
    std::stable_sort(db.id.begin(), db.id.end(),
                     [&](int32_t a, int32_t b) { return seen[a].count < seen[b].count; });
    db.rows = static_cast<int32_t>(job.baskets);
    db.ranks = static_cast<int32_t>(db.id.size());
    db.least = job.least;
    std::vector<int32_t> rank(job.items, -1);
    std::vector<int64_t> next(db.ranks);
    int64_t sum = 0;
    for (int32_t r = 0; r < db.ranks; ++r) {
        rank[db.id[r]] = r;
        next[r] = sum;
        db.support.push_back(seen[db.id[r]].count);
        sum += db.support[r];
        db.rank_end.push_back(sum);
    }
    db.tid.resize(sum);
    std::vector<int32_t> last(db.ranks, -1);
    for (int64_t t = 0; t < job.baskets; ++t)
        for (int64_t at = job.begins[t]; at < job.begins[t + 1]; ++at) {
            const int32_t r = rank[job.ids[at]];
            if (r < 0 || last[r] == t) continue;
            last[r] = static_cast<int32_t>(t);
            db.tid[next[r]++] = static_cast<int32_t>(t);
        }
    db.transpose();
}

// Where sets go: the prefix, with every subset of what extends it without losing support.
struct Sink {
    Buffer<int32_t> items, support;
    Buffer<int64_t> ends;
    std::vector<int32_t> prefix, perfect;
    int64_t limit = 0;
    int32_t max_len = 0;
    int64_t work[6] = {};

    bool full() const { return static_cast<int32_t>(prefix.size()) >= max_len; }

    void one(int32_t count) {
        const int32_t length = static_cast<int32_t>(prefix.size());
        int32_t* to = items.more(length);
        for (int32_t k = 0; k < length; ++k) to[k] = prefix[k];
        items.size += length;
        ends.push(items.size);
        support.push(count);
        if (ends.size > limit) throw Halt{kTooMany};
    }

    // All sets between the prefix and the prefix with its perfect extensions.
    void emit(int32_t count) {
        if (static_cast<int32_t>(prefix.size()) > max_len) return;
        const int64_t first = ends.size;
        one(count);
        for (int32_t extension : perfect) {
            const int64_t stop = ends.size;
            if (2 * stop - first > limit && max_len == INT32_MAX) throw Halt{kTooMany};
            for (int64_t k = first; k < stop; ++k) {
                const int64_t begin = k ? ends.data[k - 1] : 0, length = ends.data[k] - begin;
                if (length >= max_len) continue;
                int32_t* to = items.more(length + 1);
                std::memcpy(to, items.data + begin, length * sizeof(int32_t));
                to[length] = extension;
                items.size += length + 1;
                ends.push(items.size);
                support.push(count);
            }
            if (ends.size > limit) throw Halt{kTooMany};
        }
    }
};

// Tells how far the work is, some times a second.
struct Progress {
    Tick tick;
    std::chrono::steady_clock::time_point next{};
    void operator()(double done, int64_t sets) {
        if (!tick) return;
        const auto now = std::chrono::steady_clock::now();
        if (now < next) return;
        next = now + std::chrono::milliseconds(200);
        if (tick(done, sets)) throw Halt{kStopped};
    }
};

}  // namespace
