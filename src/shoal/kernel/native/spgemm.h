// Row by row (Gustavson): scaled rows of B are merged, as they are made, in a table that fits
// the thread's own cache. Rows are worked on in windows whose results fit a fragment, and a
// fragment is copied to its place in C, which is known as soon as all windows before it are
// counted: there is no symbolic pass, and no matrix of partial products.
//
//   version 1  equally many rows a thread; the slot is the high bits of a product
//   version 2  windows of about equal work, taken as threads become free; the low bits, folded
//   version 3  the same with two fragments a thread: one is copied while the next is filled;
//              the next row of B is fetched ahead
//
// A short row whose products stand as those of the row before, all moved along, is not merged
// again: each product is added where its twin was. Stencils and bands are made of such rows.
//
// Whatever the version and the number of threads, a row's sums are taken in the order of A's row.
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>
#include <algorithm>
#include <limits>
#include <new>
#include <vector>
#include "spgemm_job.h"

namespace {

template <class T> struct PlusTimes {
  using V = T;
  static constexpr T none = 0;
  static T load(const T* at, int64_t i) { return at[i]; }
  static T mul(T a, T b) { return a * b; }
  static T add(T a, T b) { return a + b; }
};

template <class T> struct MinPlus {
  using V = T;
  using L = std::numeric_limits<T>;
  static constexpr T none = L::has_infinity ? L::infinity() : L::max();
  static T load(const T* at, int64_t i) { return at[i]; }
  static T mul(T a, T b) { return a + b; }
  static T add(T a, T b) { return b < a ? b : a; }
};

// Values are 0 and 1.
struct OrAnd {
  using V = uint8_t;
  static constexpr V none = 0;
  static V load(const V* at, int64_t i) { return at[i]; }
  static V mul(V a, V b) { return a & b; }
  static V add(V a, V b) { return a | b; }
};

// Only where entries are; no values are read.
struct Pattern {
  using V = uint8_t;
  static constexpr V none = 0;
  static V load(const V*, int64_t) { return 1; }
  static V mul(V, V) { return 1; }
  static V add(V, V) { return 1; }
};

// Not a character type: a store through it changes nothing else.
enum Mark : uint8_t { kAbsent, kYes, kTouched };

constexpr int32_t kEmpty = std::numeric_limits<int32_t>::min();
constexpr int64_t kSlack = 64;

template <class T> T* allocate(int64_t n) {
  void* at = nullptr;
  if (posix_memalign(&at, 64, size_t(n) * sizeof(T))) throw std::bad_alloc();
  return static_cast<T*>(at);
}

inline int64_t power_below(int64_t n) {
  int64_t p = 1;
  while (2 * p <= n) p *= 2;
  return p;
}

inline int bits_for(int64_t n) {  // of a table of at least n slots
  int bits = 4;
  while ((int64_t(1) << bits) < n) bits++;
  return bits;
}

inline void ahead(const void* at) { __builtin_prefetch(at); }

// The results of a window, one row after the other.
template <class V> struct Fragment {
  int32_t* col = nullptr;
  V* val = nullptr;
  int64_t n = 0, capacity = 0, window = -1, largest = 0;
  Fragment() = default;
  Fragment(const Fragment&) = delete;
  ~Fragment() { std::free(col), std::free(val); }
  void need(int64_t more) {
    if (n + more + kSlack <= capacity) return;
    const int64_t wanted = std::max(n + more + kSlack, 3 * capacity / 2);
    int32_t* c = allocate<int32_t>(wanted);
    V* v = allocate<V>(wanted);
    if (n) std::memcpy(c, col, size_t(n) * 4), std::memcpy(v, val, size_t(n) * sizeof(V));
    std::free(col), std::free(val);
    col = c, val = v, capacity = wanted;
  }
  int64_t bytes() const { return capacity * int64_t(4 + sizeof(V)); }
};

struct Span { int64_t first, last; };

// The row before, if it is short: where its products stood, and which sum each was added to.
struct Like {
  static constexpr int64_t kRows = 16, kLong = 16, kMost = 64, kPatience = 8;
  int64_t products = 0, rows = 0, n = 0;  // no products: nothing is known
  int64_t patience = kPatience;  // rows still learnt, if none is repeated; one in each window
  int64_t length[kRows];         // products of each row of B
  int32_t col[kRows * kLong];    // of each, in rows of kLong, less the first
  uint8_t slot[kMost];           // its sum
  int32_t made[kMost];           // columns of the sums, less the first of `col`

  // Whether the products of row p stand there again, `base` columns to the right.
  bool again(int64_t p, const int32_t* found, int64_t number, int32_t base) const {
    if (number != length[p]) return false;
    const int32_t* expected = col + p * kLong;
#ifdef __AVX512F__
    static_assert(kLong == 16);
    const __mmask16 some = __mmask16((1u << number) - 1);
    const __m512i moved = _mm512_add_epi32(_mm512_loadu_si512(expected), _mm512_set1_epi32(base));
    return !_mm512_mask_cmpneq_epi32_mask(some, _mm512_maskz_loadu_epi32(some, found), moved);
#else
    bool same = true;
    for (int64_t q = 0; q < number; q++) same &= found[q] - base == expected[q];
    return same;
#endif
  }
};

template <class S> class Worker {
 public:
  using V = typename S::V;
  int64_t counts[kCounters] = {};

  explicit Worker(const Job& j) : job(j), a_val((const V*)j.a_val), b_val((const V*)j.b_val) {
    // Half of the budget for the dense range, half for slots and what goes with them.
    width = std::min(j.columns, power_below(j.budget / 2 / int64_t(sizeof(V) + 1)));
    capacity = power_below(j.budget / 2 / int64_t(2 * sizeof(Slot) + 4));
    capacity = std::max<int64_t>(16, std::min(capacity, 2 * power_below(j.columns)));
    scaled = j.alpha != nullptr;
    if (scaled) alpha = *(const V*)j.alpha;
  }
  ~Worker() { std::free(sums), std::free(marks), std::free(slots), std::free(used); }

  int64_t bytes() const {
    return (sums ? (width + kSlack) * int64_t(sizeof(V) + 1) : 0) +
           (slots ? capacity * int64_t(2 * sizeof(Slot) + 4) : 0) +
           int64_t(keys.capacity() * 8 + cut.capacity() * sizeof(Span));
  }

  void row(int64_t i, Fragment<V>& out) {
    const int64_t f = job.multiplies[i];
    counts[kMultiplies] += f;
    if (job.mask_ptr) return masked(i, f, out);
    if (!f) return;
    if (f == like.products && repeated(i, out)) return;
    const int64_t before = out.n;
    unlike(i, f, out);
    if (f <= Like::kMost && job.sort && like.patience)
      learn(i, f, out.col + before, out.n - before);
  }

  // The next row does not follow on the last one.
  void jump() { like.products = 0, like.patience = std::max<int64_t>(1, like.patience); }

 private:
  void unlike(int64_t i, int64_t f, Fragment<V>& out) {
    int32_t lo = std::numeric_limits<int32_t>::max(), hi = -1;
    for (int64_t p = job.a_ptr[i]; p < job.a_ptr[i + 1]; p++) {
      const int64_t first = job.b_ptr[job.a_col[p]], last = job.b_ptr[job.a_col[p] + 1];
      if (first == last) continue;
      lo = std::min(lo, job.b_col[first]), hi = std::max(hi, job.b_col[last - 1]);
    }
    const int64_t span = int64_t(hi) - lo + 1;
    if (dense_pays(span, f)) return dense(i, lo, span, f, nullptr, out);
    if (std::min(f, span) <= capacity) return hashed(i, lo, span, f, nullptr, out);
    pieces(i, lo, int64_t(hi) + 1, out);
  }

  void learn(int64_t i, int64_t f, const int32_t* made, int64_t n) {
    const int64_t begin = job.a_ptr[i], rows = job.a_ptr[i + 1] - begin;
    like.products = 0, like.patience--;
    if (rows > Like::kRows) return;
    int32_t base = 0;
    uint8_t* slot = like.slot;
    for (int64_t p = 0; p < rows; p++) {
      const int64_t k = job.a_col[begin + p];
      const int32_t* found = job.b_col + job.b_ptr[k];
      const int64_t number = like.length[p] = job.b_ptr[k + 1] - job.b_ptr[k];
      if (number > Like::kLong || !number) return;
      if (p == 0) base = found[0];
      for (int64_t q = 0; q < number; q++) {
        like.col[p * Like::kLong + q] = found[q] - base;
        *slot++ = uint8_t(std::lower_bound(made, made + n, found[q]) - made);
      }
    }
    for (int64_t m = 0; m < n; m++) like.made[m] = made[m] - base;
    like.products = f, like.rows = rows, like.n = n;
  }

  bool repeated(int64_t i, Fragment<V>& out) {
    const int64_t begin = job.a_ptr[i], rows = job.a_ptr[i + 1] - begin, n = like.n;
    const int32_t* a_col = job.a_col + begin;
    if (rows != like.rows || job.b_ptr[a_col[0]] == job.b_ptr[a_col[0] + 1]) return false;
    const int32_t base = job.b_col[job.b_ptr[a_col[0]]];
    out.need(n);
    V* sum = out.val + out.n;
    std::fill(sum, sum + n, V(S::none));
    const uint8_t* slot = like.slot;
    for (int64_t p = 0; p < rows; p++) {
      const int64_t first = job.b_ptr[a_col[p]], number = job.b_ptr[a_col[p] + 1] - first;
      if (!like.again(p, job.b_col + first, number, base)) return false;
      V a = S::load(a_val, begin + p);
      if (scaled) a = S::mul(alpha, a);
      for (int64_t q = 0; q < number; q++, slot++)
        sum[*slot] = S::add(sum[*slot], S::mul(a, S::load(b_val, first + q)));
    }
    for (int64_t m = 0; m < n; m++) out.col[out.n + m] = base + like.made[m];
    out.n += n;
    counts[kRepeated]++, like.patience = Like::kPatience;
    return true;
  }

  struct Slot { int32_t tag; V value; };
  const Job& job;
  const V *a_val, *b_val;
  V alpha{};
  bool scaled = false;
  int64_t width, capacity;
  V* sums = nullptr;
  Mark* marks = nullptr;
  Slot* slots = nullptr;
  uint32_t* used = nullptr;
  std::vector<uint64_t> keys;
  std::vector<Span> cut;
  Like like;

  bool dense_pays(int64_t span, int64_t f) const {
    return span <= width && span <= job.dense_ratio * f;
  }

  void open_dense() {
    if (sums) return;
    sums = allocate<V>(width + kSlack), marks = allocate<Mark>(width + kSlack);
    std::fill(sums, sums + width + kSlack, V(S::none));
    std::memset((void*)marks, 0, size_t(width + kSlack));
  }

  void open_slots() {
    if (slots) return;
    slots = allocate<Slot>(2 * capacity), used = allocate<uint32_t>(capacity);
    for (int64_t s = 0; s < 2 * capacity; s++) slots[s].tag = kEmpty;
  }

  // All products of row i whose columns are in the cut.
  template <class F> void products(int64_t i, const Span* part, F&& body) {
    const int32_t* b_col = job.b_col;
    const V* values = b_val;
    const int64_t end = job.a_ptr[i + 1];
    for (int64_t p = job.a_ptr[i]; p < end; p++) {
      const int64_t k = job.a_col[p];
      const int64_t first = part ? part->first : job.b_ptr[k];
      const int64_t last = part ? part->last : job.b_ptr[k + 1];
      if (part) part++;
      if (job.version == 3 && p + 1 < end) {
        const int64_t next = job.b_ptr[job.a_col[p + 1]];
        ahead(b_col + next), ahead(values + next);
      }
      V a = S::load(a_val, p);
      if (scaled) a = S::mul(alpha, a);
      for (int64_t q = first; q < last; q++) body(b_col[q], S::mul(a, S::load(values, q)));
    }
  }

  void dense(int64_t i, int32_t lo, int64_t span, int64_t f, const Span* part,
             Fragment<V>& out) {
    open_dense();
    counts[kDenseRows]++;
    V* sum = sums - lo;
    Mark* mark = marks - lo;
    out.need(std::min(span, f));
    if (span > 64 * 64 || 8 * f > span) {
      products(i, part, [=](int32_t c, V x) { sum[c] = S::add(sum[c], x), mark[c] = kYes; });
      for (int64_t c = 0; c < span; c += 64) collect(c, lo, out);
      return;
    }
    // Few columns are touched: a bit for every 64 of them says where.
    uint64_t touched = 0;
    products(i, part, [=, &touched](int32_t c, V x) {
      sum[c] = S::add(sum[c], x), mark[c] = kYes;
      touched |= uint64_t(1) << (uint32_t(c - lo) >> 6);
    });
    for (; touched; touched &= touched - 1) collect(64 * __builtin_ctzll(touched), lo, out);
  }

  // 64 columns from `at` of the dense range: what was touched goes out, in order.
  void collect(int64_t at, int32_t lo, Fragment<V>& out) {
    uint64_t bits = 0;
#ifdef __AVX512BW__
    const __m512i touched = _mm512_loadu_si512(marks + at);
    bits = _mm512_test_epi8_mask(touched, touched);
    if (!bits) return;
    _mm512_storeu_si512(marks + at, _mm512_setzero_si512());
    if constexpr (sizeof(V) == 8)
      if (__builtin_popcountll(bits) > 12) return collect8(bits, at, lo, out);
#else
    for (int64_t b = 0; b < 64; b++) bits |= uint64_t(marks[at + b] != kAbsent) << b;
    if (!bits) return;
    std::memset((void*)(marks + at), 0, 64);
#endif
    int64_t n = out.n;
    for (; bits; bits &= bits - 1, n++) {
      const int64_t c = at + __builtin_ctzll(bits);
      out.col[n] = int32_t(lo + c), out.val[n] = sums[c], sums[c] = S::none;
    }
    out.n = n;
  }

#ifdef __AVX512BW__
  void collect8(uint64_t bits, int64_t at, int32_t lo, Fragment<V>& out) {
    const __m256i step = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const V none = S::none;
    int64_t none_bits;
    std::memcpy(&none_bits, &none, 8);
    const __m512i clear = _mm512_set1_epi64(none_bits);
    int64_t n = out.n;
    for (int b = 0; b < 64; b += 8) {
      const __mmask8 some = __mmask8(bits >> b);
      V* from = sums + at + b;
      const __m512i x = _mm512_maskz_compress_epi64(some, _mm512_loadu_si512(from));
      const __m256i c = _mm256_add_epi32(_mm256_set1_epi32(int32_t(lo + at + b)), step);
      _mm512_storeu_si512(out.val + n, x);
      _mm256_storeu_si256((__m256i*)(out.col + n), _mm256_maskz_compress_epi32(some, c));
      _mm512_storeu_si512(from, clear);
      n += __builtin_popcount(some);
    }
    out.n = n;
  }
#endif

  // Where the search for a column begins in a table of 2^bits slots.
  uint32_t begin(int32_t column, int bits) const {
    const uint32_t h = uint32_t(column) * 0x9e3779b1u;
    const uint32_t high = h >> (32 - bits);
    return job.version == 1 ? high : (h ^ high) & ((1u << bits) - 1);
  }

  void hashed(int64_t i, int32_t lo, int64_t span, int64_t f, const Span* part,
              Fragment<V>& out) {
    open_slots();
    counts[kHashRows]++;
    const int bits = bits_for(2 * std::min(f, span));
    const uint32_t mask = (1u << bits) - 1;
    uint32_t n = 0;
    int64_t looks = 0, made = 0;
    Slot* table = slots;
    uint32_t* list = used;
    products(i, part, [&](int32_t c, V x) {
      made++;
      for (uint32_t s = begin(c, bits);; s = (s + 1) & mask) {
        looks++;
        if (table[s].tag == c) return void(table[s].value = S::add(table[s].value, x));
        if (table[s].tag == kEmpty) {
          // Added to nothing, as in a dense range: also a zero has the same sign.
          table[s].tag = c, table[s].value = S::add(S::none, x), list[n++] = s;
          return;
        }
      }
    });
    counts[kProbes] += looks, counts[kHashed] += made;
    out.need(n);
    if (job.sort) order(n, lo, span);
    for (uint32_t u = 0; u < n; u++) {
      Slot& slot = table[list[u]];
      out.col[out.n] = slot.tag, out.val[out.n++] = slot.value, slot.tag = kEmpty;
    }
  }

  // The list of used slots by their columns: insertion, library or radix sort, by length.
  void order(int64_t n, int32_t lo, int64_t span) {
    if (int64_t(keys.size()) < 2 * n) keys.resize(size_t(2 * n));
    uint64_t *from = keys.data(), *to = keys.data() + n;
    for (int64_t u = 0; u < n; u++)
      from[u] = uint64_t(slots[used[u]].tag - lo) << 32 | used[u];
    if (n <= 24) {
      for (int64_t u = 1; u < n; u++) {
        const uint64_t key = from[u];
        int64_t v = u;
        for (; v && from[v - 1] > key; v--) from[v] = from[v - 1];
        from[v] = key;
      }
    } else if (n <= 192) {
      std::sort(from, from + n);
    } else {
      for (int shift = 32; shift < 64 && (uint64_t(span - 1) << 32) >> shift; shift += 8) {
        uint32_t place[256] = {};
        for (int64_t u = 0; u < n; u++) place[from[u] >> shift & 255]++;
        uint32_t total = 0;
        for (uint32_t& p : place) {
          const uint32_t count = p;
          p = total, total += count;
        }
        for (int64_t u = 0; u < n; u++) to[place[from[u] >> shift & 255]++] = from[u];
        std::swap(from, to);
      }
    }
    for (int64_t u = 0; u < n; u++) used[u] = uint32_t(from[u]);
  }

  // Multiplies of row i in columns [lo, hi), and where they are in the rows of B.
  int64_t narrow(int64_t i, int64_t lo, int64_t hi) {
    const int64_t n = job.a_ptr[i + 1] - job.a_ptr[i];
    cut.resize(size_t(n));
    int64_t f = 0;
    for (int64_t j = 0; j < n; j++) {
      const int64_t k = job.a_col[job.a_ptr[i] + j];
      const int32_t *first = job.b_col + job.b_ptr[k], *last = job.b_col + job.b_ptr[k + 1];
      const int32_t* from = std::lower_bound(first, last, lo);
      const int32_t* to = std::lower_bound(from, last, hi);
      cut[size_t(j)] = {from - job.b_col, to - job.b_col};
      f += to - from;
    }
    return f;
  }

  // A row of more entries than the table takes: by ranges of columns, each small enough.
  void pieces(int64_t i, int32_t lo, int64_t hi, Fragment<V>& out) {
    for (int64_t at = lo; at < hi;) {
      int64_t to = hi, f = narrow(i, at, to);
      while (std::min(f, to - at) > capacity && !dense_pays(to - at, f)) {
        to = at + (to - at + 1) / 2;
        f = narrow(i, at, to);
      }
      counts[kPieces]++;
      if (dense_pays(to - at, f))
        dense(i, int32_t(at), to - at, f, cut.data(), out);
      else if (f)
        hashed(i, int32_t(at), to - at, f, cut.data(), out);
      at = to;
    }
  }

  void masked(int64_t i, int64_t f, Fragment<V>& out) {
    const int64_t end = job.mask_ptr[i + 1];
    if (!f && !job.keep) return;
    for (int64_t p = job.mask_ptr[i]; p < end;) {
      const int32_t lo = job.mask_col[p];
      const bool is_dense = dense_pays(int64_t(job.mask_col[end - 1]) - lo + 1, f + end - p);
      const int64_t q = is_dense ? end : std::min(end, p + capacity);
      const Span* part = nullptr;
      const int64_t span = int64_t(job.mask_col[q - 1]) - lo + 1;
      if (q < end || p > job.mask_ptr[i]) narrow(i, lo, lo + span), part = cut.data();
      out.need(q - p);
      is_dense ? masked_dense(i, p, q, out) : masked_hashed(i, p, q, part, out);
      p = q;
    }
  }

  // Whether a column of the mask is the one before it again.
  bool twice(int64_t i, int64_t p) const {
    return p > job.mask_ptr[i] && job.mask_col[p] == job.mask_col[p - 1];
  }

  void masked_dense(int64_t i, int64_t p, int64_t q, Fragment<V>& out) {
    open_dense();
    counts[kDenseRows]++;
    const int32_t lo = job.mask_col[p];
    const uint32_t span = uint32_t(job.mask_col[q - 1] - lo) + 1;
    V* sum = sums;
    Mark* mark = marks;
    for (int64_t m = p; m < q; m++) mark[job.mask_col[m] - lo] = kYes;
    products(i, nullptr, [=](int32_t column, V x) {
      const uint32_t c = uint32_t(column - lo);
      if (c < span && mark[c] != kAbsent) sum[c] = S::add(sum[c], x), mark[c] = kTouched;
    });
    for (int64_t m = p; m < q; m++) {
      const int64_t c = job.mask_col[m] - lo;
      if (job.keep || (mark[c] == kTouched && !twice(i, m)))
        out.col[out.n] = job.mask_col[m], out.val[out.n++] = sum[c];
    }
    for (int64_t m = p; m < q; m++) {
      const int64_t c = job.mask_col[m] - lo;
      mark[c] = kAbsent, sum[c] = S::none;
    }
  }

  // Columns of the mask stand in the table, inverted until they are touched.
  void masked_hashed(int64_t i, int64_t p, int64_t q, const Span* part, Fragment<V>& out) {
    open_slots();
    counts[kHashRows]++;
    const int bits = bits_for(2 * (q - p));
    const uint32_t mask = (1u << bits) - 1;
    Slot* table = slots;
    int64_t looks = 0, made = 0;
    auto find = [&](int32_t c) {
      uint32_t s = begin(c, bits);
      for (looks++; table[s].tag != c && table[s].tag != ~c && table[s].tag != kEmpty; looks++)
        s = (s + 1) & mask;
      return s;
    };
    uint32_t n = 0;
    for (int64_t m = p; m < q; m++) {
      const uint32_t s = find(job.mask_col[m]);
      if (table[s].tag == kEmpty)
        table[s].tag = ~job.mask_col[m], table[s].value = S::none, used[n++] = s;
    }
    looks = 0;
    products(i, part, [&](int32_t c, V x) {
      made++;
      Slot& slot = table[find(c)];
      if (slot.tag != kEmpty) slot.tag = c, slot.value = S::add(slot.value, x);
    });
    counts[kProbes] += looks, counts[kHashed] += made;
    for (int64_t m = p; m < q; m++) {
      const Slot& slot = table[find(job.mask_col[m])];
      if (job.keep || (slot.tag == job.mask_col[m] && !twice(i, m)))
        out.col[out.n] = job.mask_col[m], out.val[out.n++] = slot.value;
    }
    for (uint32_t u = 0; u < n; u++) table[used[u]].tag = kEmpty;
  }
};

// Where each window's results begin in C, as far as the windows before it are counted.
class Places {
 public:
  explicit Places(int64_t windows)
      : count(size_t(windows), -1), place(size_t(windows) + 1, -1), total(windows) {
    place[0] = 0;
  }
  void publish(int64_t w, int64_t n) {
    __atomic_store_n(&count[size_t(w)], n, __ATOMIC_RELEASE);
    advance();
  }
  int64_t known(int64_t w) { return __atomic_load_n(&place[size_t(w)], __ATOMIC_ACQUIRE); }
  int64_t wait(int64_t w) {
    int64_t at;
    for (int64_t spins = 1; (at = known(w)) < 0; spins++) {
      advance();
      if (spins % 256 == 0) sched_yield();
    }
    return at;
  }

 private:
  std::vector<int64_t> count, place;
  int64_t total, next = 0;
  bool busy = false;
  void advance() {
    if (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) return;
    for (int64_t n; next < total &&
                    (n = __atomic_load_n(&count[size_t(next)], __ATOMIC_ACQUIRE)) >= 0; next++)
      __atomic_store_n(&place[size_t(next) + 1], place[size_t(next)] + n, __ATOMIC_RELEASE);
    __atomic_clear(&busy, __ATOMIC_RELEASE);
  }
};

// Memory of C, which the system clears page by page when it is first touched. Threads that write
// one after the other reach a new page together, and would all clear it: each page is touched
// by one of them, ahead of all.
class Fresh {
 public:
  Fresh(void* at, int64_t n) : base(static_cast<uint8_t*>(at)), bytes(n) {}
  void reach(int64_t end) {
    const int64_t wanted = std::min(end + kLarge, bytes);
    while (__atomic_load_n(&next, __ATOMIC_RELAXED) < wanted) {
      const int64_t page = __atomic_fetch_add(&next, kLarge, __ATOMIC_RELAXED);
      if (page < bytes) __atomic_fetch_or(base + page, 0, __ATOMIC_RELAXED);
    }
  }

 private:
  static constexpr int64_t kLarge = 2 << 20;
  uint8_t* base;
  int64_t bytes, next = 0;
};

template <class S> class Run {
  using V = typename S::V;
  const Job& job;
  std::vector<int64_t> first;  // row of each window, and the end
  std::vector<int64_t> start;  // version 1: window of each thread
  int64_t threads, most = 0;   // entries of C at most

  void cut() {
    int64_t work = 0;
    for (int64_t i = 0; i < job.rows; i++) work += job.multiplies[i];
    // Enough windows to be shared out evenly, each worth being taken.
    const int64_t share = std::max<int64_t>(1 << 13, work / (threads * 24));
    const int64_t room = std::max<int64_t>(64, job.budget / 4 / int64_t(4 + sizeof(V)));
    for (int64_t t = 0; t < (job.version == 1 ? threads : 1); t++) {
      const int64_t parts = job.version == 1 ? threads : 1;
      start.push_back(int64_t(first.size()));
      const int64_t end = job.rows * (t + 1) / parts;
      int64_t f = share, entries = 0, rows = 0;
      for (int64_t i = job.rows * t / parts; i < end; i++) {
        const int64_t more = job.bound(i);
        most += more;
        if (f + job.multiplies[i] > share || entries + more > room || rows >= 4096 || !rows)
          first.push_back(i), f = entries = rows = 0;
        f += job.multiplies[i], entries += more, rows++;
      }
    }
    start.push_back(int64_t(first.size()));
    first.push_back(job.rows);
  }

  void hash(int64_t w, Worker<S>& worker, Fragment<V>& out) {
    out.n = 0, out.window = w;
    worker.jump();
    for (int64_t i = first[size_t(w)]; i < first[size_t(w) + 1]; i++) {
      worker.row(i, out);
      if (!job.exact) job.c_ptr[i + 1] = out.n;
    }
    out.largest = std::max(out.largest, out.n);
  }

  void write(Fragment<V>& out, int64_t at) {
    if (!job.exact && at)
      for (int64_t i = first[size_t(out.window)]; i < first[size_t(out.window) + 1]; i++)
        job.c_ptr[i + 1] += at;
    if (job.c_col && out.n) {
      std::memcpy(job.c_col + at, out.col, size_t(out.n) * 4);
      std::memcpy((V*)job.c_val + at, out.val, size_t(out.n) * sizeof(V));
    }
    out.window = -1;
  }

  int64_t place(int64_t w, Places& places) {
    return job.exact ? job.c_ptr[first[size_t(w)]] : places.wait(w);
  }

  void count(const Worker<S>& worker, int64_t bytes) {
#pragma omp critical(spgemm_counters)
    {
      for (int c = 0; c <= kRepeated; c++) job.counters[c] += worker.counts[c];
      job.counters[kTableBytes] += bytes + worker.bytes();
      job.counters[kSlowest] = std::max(job.counters[kSlowest], worker.counts[kMultiplies]);
    }
  }

  void queued() {
    const int64_t windows = int64_t(first.size()) - 1;
    Places places(windows);
    const int64_t room = job.exact ? job.c_ptr[job.rows] : most;
    Fresh col(job.c_col, room * 4), val(job.c_val, room * int64_t(sizeof(V)));
    auto emit = [&](Fragment<V>& out) {
      const int64_t at = place(out.window, places), end = at + out.n;
      if (job.c_col) col.reach(end * 4), val.reach(end * int64_t(sizeof(V)));
      write(out, at);
    };
    int64_t next = 0;
#pragma omp parallel num_threads(int(threads))
    {
      Worker<S> worker(job);
      Fragment<V> ring[2];
      const int depth = job.version == 3 ? 2 : 1;
      for (int turn = 0;; turn = (turn + 1) % depth) {
        const int64_t w = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        if (w >= windows) break;
        Fragment<V>& out = ring[turn];
        if (out.window >= 0) emit(out);
        hash(w, worker, out);
        if (!job.exact) places.publish(w, out.n);
        Fragment<V>& old = ring[(turn + 1) % depth];
        if (depth == 1)
          emit(out);
        else if (old.window >= 0 && (job.exact || places.known(old.window) >= 0))
          emit(old);
      }
      if (ring[0].window > ring[1].window) {
        if (ring[1].window >= 0) emit(ring[1]);
        emit(ring[0]);
      } else {
        for (Fragment<V>& out : ring)
          if (out.window >= 0) emit(out);
      }
      count(worker, ring[0].bytes() + ring[1].bytes());
    }
  }

  // Each thread has rows of its own and writes behind the most that those before can give; the
  // gaps are closed at the end.
  void contiguous() {
    std::vector<int64_t> begin(size_t(threads) + 1, 0), size(size_t(threads), 0);
    for (int64_t t = 0; t < threads; t++) {
      int64_t most = 0;
      for (int64_t i = job.rows * t / threads; i < job.rows * (t + 1) / threads; i++)
        most += job.bound(i);
      begin[size_t(t) + 1] = begin[size_t(t)] + most;
    }
#pragma omp parallel num_threads(int(threads))
    {
      Worker<S> worker(job);
      Fragment<V> out;
      for (int64_t t = omp_get_thread_num(); t < threads; t += omp_get_num_threads()) {
        int64_t n = 0;
        for (int64_t w = start[size_t(t)]; w < start[size_t(t) + 1]; w++) {
          hash(w, worker, out);
          const int64_t more = out.n;
          write(out, job.exact ? job.c_ptr[first[size_t(w)]] : begin[size_t(t)] + n);
          n += more;
        }
        size[size_t(t)] = n;
      }
      count(worker, out.bytes());
    }
    if (job.exact) return;
    int64_t at = 0;
    for (int64_t t = 0; t < threads; t++) {
      const int64_t gap = begin[size_t(t)] - at, n = size[size_t(t)];
      if (gap && job.c_col) {
        std::memmove(job.c_col + at, job.c_col + begin[size_t(t)], size_t(n) * 4);
        V* val = (V*)job.c_val;
        std::memmove(val + at, val + begin[size_t(t)], size_t(n) * sizeof(V));
      }
      for (int64_t i = job.rows * t / threads; i < job.rows * (t + 1) / threads; i++)
        job.c_ptr[i + 1] -= gap;
      at += n;
    }
  }

 public:
  explicit Run(const Job& j) : job(j), threads(std::max<int64_t>(1, j.threads)) {
    if (!job.exact) job.c_ptr[0] = 0;
    cut();
    job.counters[kWindows] += int64_t(first.size()) - 1;
    job.version == 1 ? contiguous() : queued();
  }
};

// 0, or 1 where memory ran out before the threads began.
template <class S> int64_t spgemm(const Job* job) {
  try {
    Run<S> run(*job);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace
