// Scalar quantisation of vectors and attributes in shared bit segments.
//
// Source: Oakley and Ferhatosmanoglu, SQUASH: Serverless and Distributed Quantization-based
// Attributed Vector Similarity Search, 2025.
//
// All arrays belong to the caller. Rows are in the order of their parts. Codes lie end to end in
// words of S bits. Of attributes, all rows are looked at: column w holds word w of every row. Of
// vectors, few are: the words of a row lie together, and those of a block of rows are turned into
// columns before dimensions are extracted from them.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 1024;         // rows that are handled at a time
constexpr int64_t kDense = kBlock + 16;  // of a column: not a power of two, which caches dislike
constexpr int64_t kSteps = 1024;         // of a filter's program
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Errors of a float32 rotation, over the lengths that it turns.
constexpr float kRounding = 2e-5f;

// One dimension of all rows: a shift and a mask over one or two word columns.
template <typename W, typename C>
void extract(const W* words, int64_t stride, int64_t n, int64_t bit, int bits, C* codes) {
    constexpr int S = sizeof(W) * 8;
    const W* low = words + bit / S * stride;
    const int shift = bit % S;
    const W mask = bits == S ? W(~W(0)) : W((W(1) << bits) - 1);
    if (shift + bits <= S) {
        for (int64_t i = 0; i < n; ++i) codes[i] = W(low[i] >> shift) & mask;
    } else {
        const W* high = low + stride;
        const int rest = S - shift;
        for (int64_t i = 0; i < n; ++i)
            codes[i] = W(W(low[i] >> shift) | W(high[i] << rest)) & mask;
    }
}

template <typename C>
void extract(const void* words, int segment, int64_t stride, int64_t n, int64_t bit, int bits,
             C* codes) {
    if (segment == 8) extract(static_cast<const uint8_t*>(words), stride, n, bit, bits, codes);
    if (segment == 16) extract(static_cast<const uint16_t*>(words), stride, n, bit, bits, codes);
    if (segment == 32) extract(static_cast<const uint32_t*>(words), stride, n, bit, bits, codes);
    if (segment == 64) extract(static_cast<const uint64_t*>(words), stride, n, bit, bits, codes);
}

// Word w of row i lies at words[w * column + i * row].
template <typename W>
void pack(W* words, int64_t column, int64_t row, int64_t n, int64_t bit, int bits,
          const uint16_t* codes) {
    constexpr int S = sizeof(W) * 8;
    W* low = words + bit / S * column;
    const int shift = bit % S;
    for (int64_t i = 0; i < n; ++i) low[i * row] |= W(uint64_t(codes[i]) << shift);
    if (shift + bits > S)
        for (int64_t i = 0; i < n; ++i)
            low[column + i * row] |= W(uint64_t(codes[i]) >> (S - shift));
}

void pack(void* words, int segment, int64_t column, int64_t row, int64_t n, int64_t bit, int bits,
          const uint16_t* codes) {
    if (segment == 8) pack(static_cast<uint8_t*>(words), column, row, n, bit, bits, codes);
    if (segment == 16) pack(static_cast<uint16_t*>(words), column, row, n, bit, bits, codes);
    if (segment == 32) pack(static_cast<uint32_t*>(words), column, row, n, bit, bits, codes);
    if (segment == 64) pack(static_cast<uint64_t*>(words), column, row, n, bit, bits, codes);
}

// Words of some rows in dense columns, kDense apart; the next rows are on their way meanwhile.
template <typename W>
void gather(const W* words, int64_t stride, int64_t columns, const int32_t* rows, int64_t m, W* to) {
    for (int64_t i = 0; i < m; ++i) {
        const W* row = words + rows[i] * stride;
        const W* next = words + rows[std::min(i + 16, m - 1)] * stride;
        for (int64_t w = 0; w < columns; w += 64 / sizeof(W)) __builtin_prefetch(next + w);
        for (int64_t w = 0; w < columns; ++w) to[w * kDense + i] = row[w];
    }
}

// Where the code of a dimension begins in dense columns of words of 32 bits, and its cells.
struct Place {
    int64_t offset, cell;
    int32_t shift, bits;
};

struct Part {
    int64_t begin, n;        // rows of all
    int64_t columns;         // of words
    const float* rotation;   // [d, d], a column for each new axis
    const uint8_t* bits;     // [d]
    const float *low, *high; // of cells, 2^bits of each dimension
    const uint64_t* records; // [n, stride]: the signs of a row, then its words
    int64_t stride;
    std::vector<int64_t> first;  // bit of each dimension
    std::vector<int64_t> cells;  // first cell of each dimension
    std::vector<Place> places;   // of dimensions that have bits
};

struct Attribute {
    int bits;
    int64_t bit, cells;
    const double *low, *high;  // of a cell; NaN for the cell of rows without a value
    const double* exact;       // [n], NaN where there is none
};

struct Index {
    int64_t dim, n, sign_words;
    int segment, type;  // of vectors: 0 float32, 1 float16, 2 uint8
    const void* vectors;
    const int32_t* rows;     // of vectors, of each row here
    const float* centroids;  // [parts, dim]
    const float* radii;      // [parts]: largest distance from the centroid
    std::vector<Part> parts;
    std::vector<Attribute> attributes;
    const void* tags = nullptr;  // codes of attributes
    int tag_segment = 8;
};

struct Filter {
    const int32_t* program;  // a leaf, or -1 and, -2 or, -3 not
    int64_t length, leaves;
    const int32_t* attribute;    // of a leaf
    const int64_t* first;        // interval of a leaf, [leaves + 1]
    const double* intervals;     // closed, sorted, apart
    std::vector<std::vector<uint8_t>> tables;  // cell -> 0 no, 1 boundary, 2 yes

    bool inside(int64_t leaf, double value) const {
        for (int64_t i = first[leaf]; i < first[leaf + 1]; ++i)
            if (intervals[2 * i] <= value && value <= intervals[2 * i + 1]) return true;
        return false;
    }

    void compile(const Index& x) {
        tables.resize(leaves);
        for (int64_t leaf = 0; leaf < leaves; ++leaf) {
            const Attribute& a = x.attributes[attribute[leaf]];
            tables[leaf].assign(std::max<int64_t>(256, int64_t(1) << a.bits), 0);
            for (int64_t c = 0; c < a.cells; ++c) {
                uint8_t is = 0;
                for (int64_t i = first[leaf]; i < first[leaf + 1]; ++i) {
                    const double begin = intervals[2 * i], end = intervals[2 * i + 1];
                    if (begin <= a.low[c] && a.high[c] <= end) is = 2;
                    else if (begin <= a.high[c] && a.low[c] <= end) is = std::max<uint8_t>(is, 1);
                }
                tables[leaf][c] = is;
            }
        }
    }
};

// Whether a row passes, by its codes and, where they do not decide, by its values.
bool passes(const Index& x, const Filter& f, int64_t at) {
    uint8_t truths[kSteps];
    int top = 0;
    for (int64_t step = 0; step < f.length; ++step) {
        const int32_t what = f.program[step];
        if (what >= 0) {
            const Attribute& a = x.attributes[f.attribute[what]];
            uint16_t code = 0;
            if (x.tag_segment == 8)
                extract(static_cast<const uint8_t*>(x.tags) + at, x.n, 1, a.bit, a.bits, &code);
            else
                extract(static_cast<const uint16_t*>(x.tags) + at, x.n, 1, a.bit, a.bits, &code);
            const uint8_t is = f.tables[what][code];
            truths[top++] = is == 1 ? f.inside(what, a.exact[at]) : is == 2;
        } else if (what == -3) {
            truths[top - 1] = !truths[top - 1];
        } else {
            --top;
            truths[top - 1] = what == -1 ? truths[top] & truths[top - 1] : truths[top] | truths[top - 1];
        }
    }
    return truths[0];
}

// Bits of rows [begin, begin + n): those that pass, and those whose values have to be looked at.
struct Filtering {
    std::vector<uint8_t> leaves, stack, narrow;
    std::vector<uint16_t> wide;
    std::vector<const uint8_t*> top;

    void run(const Index& x, const Filter& f, int64_t begin, int64_t n, uint64_t* pass,
             uint64_t* perhaps) {
        leaves.resize(f.leaves * kBlock);
        stack.resize((f.length + 1) * kBlock);
        for (int64_t from = 0; from < n; from += kBlock) {
            const int64_t m = std::min(kBlock, n - from), at = begin + from;
            for (int64_t leaf = 0; leaf < f.leaves; ++leaf) look_up(x, f, leaf, at, m);
            const uint8_t* result = combined(f);
            for (int64_t w = 0; w < (m + 63) / 64; ++w) {
                const int64_t size = std::min<int64_t>(64, m - w * 64);
                uint64_t yes = 0, maybe = 0;
#ifdef __AVX512BW__
                const __m512i values = _mm512_loadu_si512(result + w * 64);
                yes = _mm512_cmpeq_epi8_mask(values, _mm512_set1_epi8(2));
                maybe = _mm512_cmpeq_epi8_mask(values, _mm512_set1_epi8(1));
#else
                for (int64_t i = 0; i < size; ++i) {
                    yes |= uint64_t(result[w * 64 + i] == 2) << i;
                    maybe |= uint64_t(result[w * 64 + i] == 1) << i;
                }
#endif
                const uint64_t all = size == 64 ? ~uint64_t(0) : (uint64_t(1) << size) - 1;
                pass[from / 64 + w] = yes & all, perhaps[from / 64 + w] = maybe & all;
            }
        }
    }

  private:
    // 0, 1 or 2 of each row, for one condition.
    void look_up(const Index& x, const Filter& f, int64_t leaf, int64_t at, int64_t m) {
        const Attribute& a = x.attributes[f.attribute[leaf]];
        const uint8_t* table = f.tables[leaf].data();
        uint8_t* to = &leaves[leaf * kBlock];
        if (x.tag_segment == 16) {
            wide.resize(kBlock);
            extract(static_cast<const uint16_t*>(x.tags) + at, x.n, m, a.bit, a.bits, wide.data());
            for (int64_t i = 0; i < m; ++i) to[i] = table[wide[i]];
            return;
        }
        const uint8_t* codes = static_cast<const uint8_t*>(x.tags) + a.bit / 8 * x.n + at;
        if (a.bits != 8 || a.bit % 8 || m < kBlock) {  // else they lie there as bytes
            narrow.resize(kBlock);
            extract(static_cast<const uint8_t*>(x.tags) + at, x.n, m, a.bit, a.bits, narrow.data());
            codes = narrow.data();
        }
#ifdef __AVX512VBMI__
        const __m512i t0 = _mm512_loadu_si512(table), t1 = _mm512_loadu_si512(table + 64);
        const __m512i t2 = _mm512_loadu_si512(table + 128), t3 = _mm512_loadu_si512(table + 192);
        for (int64_t i = 0; i < m; i += 64) {
            const __m512i code = _mm512_loadu_si512(codes + i);
            const __m512i low = _mm512_permutex2var_epi8(t0, code, t1);
            const __m512i high = _mm512_permutex2var_epi8(t2, code, t3);
            const __mmask64 upper = _mm512_movepi8_mask(code);
            _mm512_storeu_si512(to + i, _mm512_mask_blend_epi8(upper, low, high));
        }
#else
        for (int64_t i = 0; i < m; ++i) to[i] = table[codes[i]];
#endif
    }

    const uint8_t* combined(const Filter& f) {
        top.clear();
        int64_t used = 0;
        for (int64_t i = 0; i < f.length; ++i) {
            if (f.program[i] >= 0) {
                top.push_back(&leaves[f.program[i] * kBlock]);
                continue;
            }
            uint8_t* to = &stack[used++ * kBlock];
            const uint8_t* a = top.back();
            top.pop_back();
            if (f.program[i] == -3) {
                for (int64_t j = 0; j < kBlock; ++j) to[j] = 2 - a[j];
            } else {
                const uint8_t* b = top.back();
                top.pop_back();
                if (f.program[i] == -1)
                    for (int64_t j = 0; j < kBlock; ++j) to[j] = std::min(a[j], b[j]);
                else
                    for (int64_t j = 0; j < kBlock; ++j) to[j] = std::max(a[j], b[j]);
            }
            top.push_back(to);
        }
        return top.back();
    }
};

template <typename T>
float squared(const float* a, const T* b, int64_t d) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < d; ++i) {
        const float apart = a[i] - float(b[i]);
        sum += apart * apart;
    }
    return sum;
}

float distance(const Index& x, const float* query, int64_t at) {
    const int64_t from = int64_t(x.rows[at]) * x.dim;
    if (x.type == 0) return squared(query, static_cast<const float*>(x.vectors) + from, x.dim);
    if (x.type == 2) return squared(query, static_cast<const uint8_t*>(x.vectors) + from, x.dim);
    return squared(query, static_cast<const _Float16*>(x.vectors) + from, x.dim);
}

void prefetch(const Index& x, int64_t at) {
    const int64_t size = x.dim * (x.type == 0 ? 4 : x.type == 1 ? 2 : 1);
    const char* from = static_cast<const char*>(x.vectors) + int64_t(x.rows[at]) * size;
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(from + i);
}

// The nearest so far; of equally near ones, the lower row.
struct Best {
    int64_t k;
    std::vector<std::pair<float, int64_t>> heap;

    float worst() const { return int64_t(heap.size()) < k ? kInfinity : heap[0].first; }
    void offer(float apart, int64_t row) {
        const std::pair<float, int64_t> one(apart, row);
        if (int64_t(heap.size()) < k) {
            heap.push_back(one);
            std::push_heap(heap.begin(), heap.end());
        } else if (one < heap[0]) {
            std::pop_heap(heap.begin(), heap.end());
            heap.back() = one;
            std::push_heap(heap.begin(), heap.end());
        }
    }
};

struct Options {
    double beta;    // of the nearest part's distance
    double keep;    // share that is kept by its Hamming distance
    double rerank;  // times k, compared exactly
    int exact;
};

enum { kParts, kPassed, kBounded, kCompared, kVerified, kStats };

// What a search of a part needs beside the part, kept from one to the next.
struct Scratch {
    std::vector<float> moved, turned, table, lanes, bounds;
    std::vector<uint64_t> signs, pass, perhaps;
    std::vector<int32_t> rows, order, apart;
    std::vector<uint32_t> codes;
    std::vector<uint64_t> gathered;
    std::vector<int64_t> counts;
};

// The query on a part's axes; its distance from the centroid.
float turn(const Index& x, int64_t p, const float* query, Scratch& s) {
    const Part& part = x.parts[p];
    const int64_t d = x.dim;
    s.moved.resize(d), s.turned.resize(d);
    for (int64_t i = 0; i < d; ++i) s.moved[i] = query[i] - x.centroids[p * d + i];
    std::fill(s.turned.begin(), s.turned.end(), 0.0f);
    for (int64_t i = 0; i < d; ++i) {
        const float* axes = part.rotation + i * d;
        const float value = s.moved[i];
        for (int64_t j = 0; j < d; ++j) s.turned[j] += value * axes[j];
    }
    float length = 0;
#pragma omp simd reduction(+ : length)
    for (int64_t j = 0; j < d; ++j) length += s.turned[j] * s.turned[j];
    return std::sqrt(length);
}

// Squared gaps between the query and each cell: to its nearer end, or its farther one.
void gaps(const Index& x, const Part& part, Scratch& s, bool farther) {
    const int64_t d = x.dim, last = part.cells[d];
    s.table.resize(last + 16);
    for (int64_t j = 0; j < d; ++j) {
        const float y = s.turned[j];
        for (int64_t c = part.cells[j]; c < part.cells[j + 1]; ++c) {
            const float below = part.low[c] - y, above = y - part.high[c];
            const float gap = farther ? std::max(-below, -above)
                                      : std::max(std::max(below, above), 0.0f);
            s.table[c] = gap * gap;  // infinite where the cell is empty
        }
    }
}

#ifdef __AVX512F__
// The code of 16 rows, and above it bits that mean nothing.
inline __m512i codes_at(const uint32_t* words, const Place& place) {
    const __m512i low = _mm512_loadu_si512(words + place.offset);
    const __m512i code = _mm512_srl_epi32(low, _mm_cvtsi32_si128(place.shift));
    if (place.shift + place.bits <= 32) return code;
    const __m512i high = _mm512_loadu_si512(words + place.offset + kDense);
    return _mm512_or_si512(code, _mm512_sll_epi32(high, _mm_cvtsi32_si128(32 - place.shift)));
}

// Sums for 32 rows at a time, which stay in registers, of words of 32 bits in dense columns.
void sum_block(const Part& part, Scratch& s, const uint32_t* words, int64_t m, float fixed,
               float* sums) {
    // Tables of up to 16 cells, repeated so that bits above a code do not matter.
    const int64_t count = part.places.size();
    s.lanes.resize(count * 16);
    for (int64_t j = 0; j < count; ++j) {
        const Place& place = part.places[j];
        if (place.bits > 4) continue;
        for (int c = 0; c < 16; ++c)
            s.lanes[j * 16 + c] = s.table[place.cell + (c & ((1 << place.bits) - 1))];
    }
    for (int64_t i = 0; i < m; i += 32) {
        __m512 sum0 = _mm512_set1_ps(fixed), sum1 = sum0;
        for (int64_t j = 0; j < count; ++j) {
            const Place& place = part.places[j];
            const __m512i code0 = codes_at(words + i, place);
            const __m512i code1 = codes_at(words + i + 16, place);
            const float* table = &s.table[place.cell];
            if (place.bits <= 4) {
                const __m512 values = _mm512_loadu_ps(&s.lanes[j * 16]);
                sum0 = _mm512_add_ps(sum0, _mm512_maskz_permutexvar_ps(0xffff, code0, values));
                sum1 = _mm512_add_ps(sum1, _mm512_maskz_permutexvar_ps(0xffff, code1, values));
            } else if (place.bits == 5) {
                const __m512 a = _mm512_loadu_ps(table), b = _mm512_loadu_ps(table + 16);
                sum0 = _mm512_add_ps(sum0, _mm512_permutex2var_ps(a, code0, b));
                sum1 = _mm512_add_ps(sum1, _mm512_permutex2var_ps(a, code1, b));
            } else {
                const __m512i mask = _mm512_set1_epi32((1 << place.bits) - 1);
                const __m512i at0 = _mm512_and_si512(code0, mask);
                const __m512i at1 = _mm512_and_si512(code1, mask);
                sum0 = _mm512_add_ps(sum0, _mm512_i32gather_ps(at0, table, 4));
                sum1 = _mm512_add_ps(sum1, _mm512_i32gather_ps(at1, table, 4));
            }
        }
        _mm512_storeu_ps(sums + i, sum0);
        _mm512_storeu_ps(sums + i + 16, sum1);
    }
}
#endif

// Sums of gaps of some rows of a part.
template <typename W>
void sum_gaps(const Index& x, const Part& part, Scratch& s, const int32_t* rows, int64_t m,
              float* sums) {
    float fixed = 0;
    for (int64_t j = 0; j < x.dim; ++j)
        if (!part.bits[j]) fixed += s.table[part.cells[j]];
    s.codes.resize(kBlock);
    s.gathered.resize(part.columns * kDense);
    W* words = reinterpret_cast<W*>(s.gathered.data());
    const uint64_t* codes = part.records + x.sign_words;
    float block[kBlock];
    for (int64_t from = 0; from < m; from += kBlock) {
        const int64_t size = std::min(kBlock, m - from);
#ifdef __AVX512F__
        if (sizeof(W) >= 4) {
            // A word of 64 bits is two of 32: bits have the same places in both.
            const int64_t columns = part.columns * (sizeof(W) / 4);
            uint32_t* dense = reinterpret_cast<uint32_t*>(words);
            gather(reinterpret_cast<const uint32_t*>(codes), part.stride * 2, columns, rows + from, size,
                   dense);
            sum_block(part, s, dense, size, fixed, block);
            std::copy_n(block, size, sums + from);
            continue;
        }
#endif
        gather(reinterpret_cast<const W*>(codes), part.stride * int64_t(8 / sizeof(W)), part.columns,
               rows + from, size, words);
        std::fill_n(block, kBlock, fixed);
        for (int64_t j = 0; j < x.dim; ++j) {
            if (!part.bits[j]) continue;
            extract(words, kDense, size, part.first[j], part.bits[j], s.codes.data());
            const float* table = &s.table[part.cells[j]];
            for (int64_t i = 0; i < size; ++i) block[i] += table[s.codes[i]];
        }
        std::copy_n(block, size, sums + from);
    }
}

void sum_gaps(const Index& x, const Part& part, Scratch& s, const int32_t* rows, int64_t m,
              float* sums) {
    if (x.segment == 8) sum_gaps<uint8_t>(x, part, s, rows, m, sums);
    if (x.segment == 16) sum_gaps<uint16_t>(x, part, s, rows, m, sums);
    if (x.segment == 32) sum_gaps<uint32_t>(x, part, s, rows, m, sums);
    if (x.segment == 64) sum_gaps<uint64_t>(x, part, s, rows, m, sums);
}

// Of the rows, those whose signs differ least from the query's, at least so many.
void nearest_signs(const Index& x, const Part& part, Scratch& s, int64_t wanted) {
    const int64_t words = x.sign_words;
    s.signs.assign(words, 0);
    for (int64_t j = 0; j < x.dim; ++j) s.signs[j / 64] |= uint64_t(s.turned[j] > 0) << (j % 64);
    const int64_t m = s.rows.size();
    s.apart.resize(m);
    s.counts.assign(x.dim + 1, 0);
    for (int64_t i = 0; i < m; ++i) {
        const uint64_t* row = part.records + s.rows[i] * part.stride;
        // The rest of the row is needed next, if it is kept.
        __builtin_prefetch(part.records + s.rows[std::min(i + 16, m - 1)] * part.stride);
        int32_t apart = 0;
        for (int64_t w = 0; w < words; ++w) apart += __builtin_popcountll(row[w] ^ s.signs[w]);
        s.apart[i] = apart;
        ++s.counts[apart];
    }
    int32_t limit = 0;
    for (int64_t sum = s.counts[0]; sum < wanted; sum += s.counts[++limit]) {}
    // Of those at the limit, as many as are still wanted.
    int64_t more = wanted;
    for (int32_t i = 0; i < limit; ++i) more -= s.counts[i];
    int64_t left = 0;
    for (int64_t i = 0; i < m; ++i) {
        const bool tie = s.apart[i] == limit && more > 0;
        more -= tie;
        s.rows[left] = s.rows[i];  // without a branch, which nothing could predict
        left += tie | (s.apart[i] < limit);
    }
    s.rows.resize(left);
}

// Rows of a part in three stages of rising cost.
void search_part(const Index& x, int64_t p, const float* query, const Options& o, const Filter* f,
                 Scratch& s, Best& best, int64_t* stats) {
    const Part& part = x.parts[p];
    const int64_t passed = s.rows.size();
    stats[kPassed] += passed;
    if (!passed) return;
    const float slack = kRounding * (turn(x, p, query, s) + x.radii[p]);
    if (!o.exact) {
        const double many = std::ceil(o.rerank * best.k);
        const double wanted = std::max(std::ceil(o.keep * passed), many * std::max(1.0, 100 * o.keep));
        if (wanted < passed) nearest_signs(x, part, s, int64_t(wanted));
    }
    const int64_t m = s.rows.size();
    gaps(x, part, s, false);
    s.bounds.resize(m);
    sum_gaps(x, part, s, s.rows.data(), m, s.bounds.data());
    stats[kBounded] += m;
    // Rows that may still be among the nearest.
    const float reach = (std::sqrt(best.worst()) + slack) * (1 + kRounding);
    s.order.resize(m);
    int64_t near = 0;
    for (int64_t i = 0; i < m; ++i) {
        s.order[near] = i;
        near += s.bounds[i] <= reach * reach;
    }
    s.order.resize(near);
    const auto lower = [&](int32_t a, int32_t b) { return s.bounds[a] < s.bounds[b]; };
    int64_t compared = s.order.size();
    const int64_t wanted = std::ceil(o.rerank * best.k);
    if (!o.exact && wanted < compared) {
        compared = wanted;
        std::nth_element(s.order.begin(), s.order.begin() + compared, s.order.end(), lower);
    }
    std::sort(s.order.begin(), s.order.begin() + compared, lower);
    for (int64_t i = 0; i < std::min<int64_t>(4, compared); ++i)
        prefetch(x, part.begin + s.rows[s.order[i]]);
    for (int64_t i = 0; i < compared; ++i) {
        const float gap = std::max(std::sqrt(s.bounds[s.order[i]]) - slack, 0.0f);
        if (gap * gap > best.worst()) break;
        if (i + 4 < compared) prefetch(x, part.begin + s.rows[s.order[i + 4]]);
        const int32_t row = s.rows[s.order[i]];
        const int64_t at = part.begin + row;
        if (f && s.perhaps[row / 64] >> (row % 64) & 1) {
            ++stats[kVerified];
            if (!passes(x, *f, at)) continue;
        }
        best.offer(distance(x, query, at), x.rows[at]);
        ++stats[kCompared];
    }
}

// Rows whose bits are set in one of two bitmaps; how many are in the first.
int64_t rows_of(const uint64_t* pass, const uint64_t* perhaps, int64_t n, std::vector<int32_t>& rows) {
    int64_t certain = 0, count = 0;
    rows.resize(n);
    for (int64_t w = 0; w < (n + 63) / 64; ++w) {
        certain += __builtin_popcountll(pass[w]);
        for (uint64_t bits = pass[w] | perhaps[w]; bits; bits &= bits - 1)
            rows[count++] = w * 64 + __builtin_ctzll(bits);
    }
    rows.resize(count);
    return certain;
}

// Parts in the order of their centroids' distances.
void order_parts(const Index& x, const float* query, std::vector<std::pair<float, int64_t>>& order) {
    order.clear();
    for (int64_t p = 0; p < int64_t(x.parts.size()); ++p)
        order.emplace_back(std::sqrt(squared(query, x.centroids + p * x.dim, x.dim)), p);
    std::sort(order.begin(), order.end());
}

void put(const Best& best, int64_t k, int64_t* ids, float* distances) {
    std::vector<std::pair<float, int64_t>> sorted(best.heap);
    std::sort(sorted.begin(), sorted.end());
    for (int64_t i = 0; i < k; ++i) {
        const bool is = i < int64_t(sorted.size());
        ids[i] = is ? sorted[i].second : -1;
        distances[i] = is ? sorted[i].first : kInfinity;
    }
}

template <typename F>
void each(int64_t n, int64_t threads, F run) {
    std::atomic<int64_t> next(0);
    const auto work = [&] {
        for (int64_t i = next++; i < n; i = next++) run(i);
    };
    std::vector<std::thread> others;
    for (int64_t t = 1; t < std::min(threads, n); ++t) others.emplace_back(work);
    work();
    for (auto& one : others) one.join();
}

}  // namespace

extern "C" {

void osq_pack(void* words, int64_t segment, int64_t stride, int64_t n, int64_t bit, int64_t bits,
              const uint16_t* codes) {
    pack(words, segment, stride, 1, n, bit, bits, codes);
}

void osq_unpack(const void* words, int64_t segment, int64_t stride, int64_t n, int64_t bit,
                int64_t bits, uint16_t* codes) {
    extract(words, segment, stride, n, bit, bits, codes);
}

// Signs, codes and ends of cells of rotated rows, values [d, n], from row `at` of the part.
// Bounds of dimension j are 2^bits - 1 ascending numbers; a code is how many of them are not above.
void osq_encode(const float* values, int64_t n, int64_t d, const uint8_t* bits, const float* bounds,
                int64_t segment, uint64_t* records, int64_t stride, int64_t at, float* low,
                float* high) {
    const int64_t sign_words = (d + 63) / 64;
    records += at * stride;
    std::vector<uint16_t> codes(n);
    int64_t bit = 0, cell = 0;
    for (int64_t j = 0; j < d; ++j) {
        const int64_t cells = int64_t(1) << bits[j];
        for (int64_t i = 0; i < n; ++i) {
            const float value = values[j * n + i];
            int64_t code = 0;
            for (int64_t step = cells / 2; step; step /= 2)
                code += value >= bounds[code + step - 1] ? step : 0;
            codes[i] = code;
            low[cell + code] = std::min(low[cell + code], value);
            high[cell + code] = std::max(high[cell + code], value);
            records[i * stride + j / 64] |= uint64_t(value > 0) << (j % 64);
        }
        if (bits[j])
            pack(records + sign_words, segment, 1, stride * 64 / segment, n, bit, bits[j],
                 codes.data());
        bit += bits[j];
        cell += cells;
        bounds += cells - 1;
    }
}

void* osq_new(int64_t dim, int64_t n, int64_t segment, int64_t type,
              const void* vectors, const int32_t* rows, const float* centroids, const float* radii) {
    Index* x = new Index();
    x->dim = dim, x->n = n, x->sign_words = (dim + 63) / 64;
    x->segment = segment, x->type = type, x->vectors = vectors, x->rows = rows;
    x->centroids = centroids, x->radii = radii;
    return x;
}

void osq_free(void* index) { delete static_cast<Index*>(index); }

void osq_part(void* index, int64_t begin, int64_t n, int64_t columns, int64_t stride,
              const float* rotation, const uint8_t* bits, const float* low, const float* high,
              const uint64_t* records) {
    Index& x = *static_cast<Index*>(index);
    Part part{begin, n, columns, rotation, bits, low, high, records, stride, {0}, {0}, {}};
    for (int64_t j = 0; j < x.dim; ++j) {
        const int64_t bit = part.first.back(), cell = part.cells.back();
        if (bits[j]) part.places.push_back({bit / 32 * kDense, cell, int32_t(bit % 32), bits[j]});
        part.first.push_back(bit + bits[j]);
        part.cells.push_back(cell + (int64_t(1) << bits[j]));
    }
    x.parts.push_back(std::move(part));
}

void osq_tags(void* index, const void* words, int64_t segment) {
    Index& x = *static_cast<Index*>(index);
    x.tags = words, x.tag_segment = segment;
}

void osq_attribute(void* index, int64_t bits, int64_t bit, int64_t cells, const double* low,
                   const double* high, const double* exact) {
    static_cast<Index*>(index)->attributes.push_back({int(bits), bit, cells, low, high, exact});
}

// Bits of the rows [begin, begin + n) that pass; returns how many were verified by their values.
int64_t osq_filter(void* index, const int32_t* program, int64_t length, int64_t leaves,
                   const int32_t* attribute, const int64_t* first, const double* intervals,
                   int64_t begin, int64_t n, uint64_t* bitmap) {
    const Index& x = *static_cast<Index*>(index);
    Filter f{program, length, leaves, attribute, first, intervals, {}};
    f.compile(x);
    Filtering filtering;
    std::vector<uint64_t> perhaps((n + 63) / 64);
    filtering.run(x, f, begin, n, bitmap, perhaps.data());
    // The values of those whose codes do not decide lie far from each other.
    std::vector<int32_t> rows;
    const std::vector<uint64_t> none(perhaps.size());
    rows_of(none.data(), perhaps.data(), n, rows);
    const int64_t count = rows.size();
    for (int64_t i = 0; i < count; ++i) {
        const int64_t next = begin + rows[std::min(i + 8, count - 1)];
        for (int64_t leaf = 0; leaf < leaves; ++leaf)
            __builtin_prefetch(x.attributes[attribute[leaf]].exact + next);
        bitmap[rows[i] / 64] |= uint64_t(passes(x, f, begin + rows[i])) << (rows[i] % 64);
    }
    return count;
}

// The nearest k of each query; length 0 for no filter. stats: [queries, kStats].
void osq_search(void* index, const float* queries, int64_t count, int64_t k, double beta, double keep,
                double rerank, int64_t exact, const int32_t* program, int64_t length, int64_t leaves,
                const int32_t* attribute, const int64_t* first, const double* intervals,
                int64_t threads, int64_t* ids, float* distances, int64_t* stats) {
    const Index& x = *static_cast<Index*>(index);
    Filter f{program, length, leaves, attribute, first, intervals, {}};
    f.compile(x);
    const Options o{beta, keep, rerank, int(exact)};
    each(count, threads, [&](int64_t q) {
        thread_local Scratch s;
        thread_local Filtering filtering;
        thread_local std::vector<std::pair<float, int64_t>> order;
        const float* query = queries + q * x.dim;
        int64_t* counted = stats + q * kStats;
        Best best{k, {}};
        order_parts(x, query, order);
        int64_t issued = 0;
        for (const auto& [apart, p] : order) {
            if (!o.exact && issued >= k && apart > o.beta * order[0].first) break;
            // No row of the part is nearer than this.
            const float least = apart * (1 - kRounding) - x.radii[p] * (1 + kRounding);
            if (o.exact && least > 0 && least * least > best.worst()) continue;
            const Part& part = x.parts[p];
            if (length) {
                s.pass.resize((part.n + 63) / 64), s.perhaps.resize(s.pass.size());
                filtering.run(x, f, part.begin, part.n, s.pass.data(), s.perhaps.data());
                issued += rows_of(s.pass.data(), s.perhaps.data(), part.n, s.rows);
            } else {
                s.rows.resize(part.n);
                std::iota(s.rows.begin(), s.rows.end(), 0);
                issued += part.n;
            }
            counted[kParts] += 1;
            search_part(x, p, query, o, length ? &f : nullptr, s, best, counted);
        }
        put(best, k, ids + q * k, distances + q * k);
    });
}

// One query in one part, among the rows of a bitmap.
void osq_search_part(void* index, int64_t p, const float* query, int64_t k, double keep,
                     double rerank, int64_t exact, const uint64_t* bitmap, int64_t* ids,
                     float* distances, int64_t* stats) {
    const Index& x = *static_cast<Index*>(index);
    Scratch s;
    Best best{k, {}};
    rows_of(bitmap, bitmap, x.parts[p].n, s.rows);
    stats[kParts] += 1;
    search_part(x, p, query, {1.0, keep, rerank, int(exact)}, nullptr, s, best, stats);
    put(best, k, ids, distances);
}

// Bounds of the squared distances between a query and every row of a part.
void osq_bounds(void* index, int64_t p, const float* query, float* lower, float* upper) {
    const Index& x = *static_cast<Index*>(index);
    const Part& part = x.parts[p];
    Scratch s;
    s.rows.resize(part.n);
    std::iota(s.rows.begin(), s.rows.end(), 0);
    const float slack = kRounding * (turn(x, p, query, s) + x.radii[p]);
    gaps(x, part, s, false);
    sum_gaps(x, part, s, s.rows.data(), part.n, lower);
    gaps(x, part, s, true);
    sum_gaps(x, part, s, s.rows.data(), part.n, upper);
    for (int64_t i = 0; i < part.n; ++i) {
        const float low = std::max(std::sqrt(lower[i]) - slack, 0.0f);
        const float high = std::sqrt(upper[i]) + slack;
        lower[i] = low * low, upper[i] = high * high;
    }
}
}
