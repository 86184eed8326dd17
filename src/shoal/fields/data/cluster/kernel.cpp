// k-medoids swap search over rows of dissimilarities.
//
// Source: Schubert, Rousseeuw, Fast and Eager k-Medoids Clustering: O(k) Runtime Improvement of the
// PAM, CLARA, and CLARANS Algorithms, 2021.
//
// A row holds the dissimilarities of one candidate to all n objects. What is needed of the medoids
// lies in `to`, object by object, so that finding a new second-nearest medoid reads k neighbours.
// Differences of floats are taken and summed in double, where they are exact.

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#if (defined(__AVX512F__) || defined(__AVX2__)) && !defined(SHOAL_SCALAR)
#include <immintrin.h>
#endif

extern "C" {

struct Search {
    int64_t n, k;
    int64_t* medoids;      // [k]
    float* to;             // [n, k] dissimilarity of each object to each medoid
    int32_t *near, *next;  // [n] place among the medoids of the nearest and the second
    float *d1, *d2;        // [n] dissimilarity to them
    double* removal;       // [k] loss that removing a medoid adds
    uint8_t* is_medoid;    // [n]
    double loss;
    int64_t swaps;
    int64_t since;  // candidates since the last swap
};
}

namespace {

// A swap must improve the loss by more than rounding can.
constexpr double kLeast = 1e-13;

void sum_removal(Search& s) {
    std::memset(s.removal, 0, sizeof(double) * s.k);
    for (int64_t o = 0; o < s.n; ++o) s.removal[s.near[o]] += double(s.d2[o]) - s.d1[o];
}

// The nearest medoid of object o other than `but`.
inline void second(Search& s, int64_t o, int32_t but) {
    const float* to = s.to + o * s.k;
    float best = std::numeric_limits<float>::infinity();
    int32_t place = but;
    for (int32_t i = 0; i < s.k; ++i)
        if (to[i] < best && i != but) best = to[i], place = i;
    s.next[o] = place;
    s.d2[o] = best;
}

// Change of the loss if the candidate of `row` takes the place of its best partner.
// Almost no object has the candidate nearer than its second medoid, so that is tested first.
double evaluate(const Search& s, const float* row, double* added, int32_t* partner) {
    std::memcpy(added, s.removal, sizeof(double) * s.k);
    double shared = 0.0;
    auto visit = [&](int64_t o) {
        const double d = row[o], d1 = s.d1[o], d2 = s.d2[o];
        if (d < d1) {
            shared += d - d1;
            added[s.near[o]] += d1 - d2;
        } else {
            added[s.near[o]] += d - d2;
        }
    };
    int64_t o = 0;
#if defined(__AVX512F__) && !defined(SHOAL_SCALAR)
    for (; o + 32 <= s.n; o += 32) {
        uint32_t low = _mm512_cmp_ps_mask(_mm512_loadu_ps(row + o), _mm512_loadu_ps(s.d2 + o),
                                          _CMP_LT_OQ);
        uint32_t high = _mm512_cmp_ps_mask(_mm512_loadu_ps(row + o + 16),
                                           _mm512_loadu_ps(s.d2 + o + 16), _CMP_LT_OQ);
        for (uint32_t mask = low | high << 16; mask; mask &= mask - 1)
            visit(o + __builtin_ctz(mask));
    }
#elif defined(__AVX2__) && !defined(SHOAL_SCALAR)
    for (; o + 32 <= s.n; o += 32) {
        uint32_t mask = 0;
        for (int part = 0; part < 4; ++part) {
            __m256 below = _mm256_cmp_ps(_mm256_loadu_ps(row + o + 8 * part),
                                         _mm256_loadu_ps(s.d2 + o + 8 * part), _CMP_LT_OQ);
            mask |= uint32_t(_mm256_movemask_ps(below)) << 8 * part;
        }
        for (; mask; mask &= mask - 1) visit(o + __builtin_ctz(mask));
    }
#endif
    for (; o < s.n; ++o)
        if (row[o] < s.d2[o]) visit(o);
    int32_t best = 0;
    for (int32_t i = 1; i < s.k; ++i)
        if (added[i] < added[best]) best = i;
    *partner = best;
    return added[best] + shared;
}

// The textbook's change of the loss for one pair: all objects, one medoid, one candidate.
double change_of_pair(const Search& s, const float* __restrict row, int32_t i) {
    const float *__restrict near1 = s.d1, *__restrict near2 = s.d2;
    const int32_t* __restrict near = s.near;
    double total = 0.0;
    for (int64_t begin = 0; begin < s.n; begin += 256) {
        const int64_t end = begin + 256 < s.n ? begin + 256 : s.n;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t o = begin; o < end; ++o) {
            const float d = row[o], d1 = near1[o], d2 = near2[o];
            const float limit = near[o] == i ? d2 : d1;
            sum += (d < limit ? d : limit) - d1;
        }
        total += sum;
    }
    return total;
}

void swap(Search& s, int32_t i, int64_t c, const float* row) {
    s.is_medoid[s.medoids[i]] = 0;
    s.is_medoid[c] = 1;
    s.medoids[i] = c;
    for (int64_t o = 0; o < s.n; ++o) {
        const float d = row[o];
        s.to[o * s.k + i] = d;
        if (s.near[o] == i) {
            if (d < s.d2[o]) {
                s.d1[o] = d;
            } else {
                s.near[o] = s.next[o];
                s.d1[o] = s.d2[o];
                second(s, o, s.near[o]);
            }
        } else if (d < s.d1[o]) {
            s.next[o] = s.near[o];
            s.d2[o] = s.d1[o];
            s.near[o] = i;
            s.d1[o] = d;
        } else if (d < s.d2[o]) {
            s.next[o] = i;
            s.d2[o] = d;
        } else if (s.next[o] == i) {
            second(s, o, s.near[o]);
        }
    }
    sum_removal(s);
    ++s.swaps;
    s.since = 0;
}

}  // namespace

extern "C" {

// Nearest and second-nearest medoids of all objects, removal losses and the loss, from `to`.
void assign(Search* s) {
    s->loss = 0.0;
    for (int64_t o = 0; o < s->n; ++o) {
        const float* to = s->to + o * s->k;
        int32_t best = 0;
        for (int32_t i = 1; i < s->k; ++i)
            if (to[i] < to[best]) best = i;
        s->near[o] = best;
        s->d1[o] = to[best];
        second(*s, o, best);
        s->loss += to[best];
    }
    sum_removal(*s);
}

void apply_swap(Search* s, int64_t i, int64_t c, const float* row) { swap(*s, int32_t(i), c, row); }

// Take the candidates in order, and make every swap that improves. Returns how many were taken:
// fewer than `count` once `limit` candidates in a row have brought nothing. With threads, a block of
// candidates is evaluated ahead; the first that improves counts, so the result does not change. Where
// swaps are frequent, most of a block would be evaluated in vain: there it is one thread.
int64_t eager(Search* s, const float* rows, const int64_t* candidates, const int64_t* row_of,
              int64_t count, int64_t limit, int64_t threads) {
    const int64_t most = threads > 1 ? 64 * threads : 1;
    std::vector<double> added(most > 1 ? threads * (s->k + 8) : s->k), change(most);
    std::vector<int32_t> partner(most);
    int64_t at = 0;
    while (at < count && s->since < limit) {
        const int64_t block = s->since < most ? 1 : most;
        int64_t size = block < count - at ? block : count - at;
        if (size > limit - s->since) size = limit - s->since;
        auto look = [&](int64_t j, double* room) {
            const int64_t c = candidates[at + j];
            change[j] = s->is_medoid[c]
                            ? 0.0
                            : evaluate(*s, rows + row_of[at + j] * s->n, room, &partner[j]);
        };
        if (size == 1) {
            look(0, added.data());
        } else {
#pragma omp parallel num_threads(int(threads))
            {
                int me = 0;
#ifdef _OPENMP
                me = omp_get_thread_num();
#endif
#pragma omp for schedule(dynamic, 1)
                for (int64_t j = 0; j < size; ++j) look(j, added.data() + me * (s->k + 8));
            }
        }
        int64_t j = 0;
        const double least = -kLeast * s->loss;
        while (j < size && !(change[j] < least)) ++j;
        s->since += j;
        if (j < size) {
            const int64_t c = candidates[at + j];
            s->loss += change[j];
            swap(*s, partner[j], c, rows + row_of[at + j] * s->n);
            at += j + 1;
        } else {
            at += size;
        }
    }
    return at;
}

// The best swap of these candidates, if it is better than the one in `best`: change of the loss, with
// `place` = (partner, candidate, row). `textbook` tries every medoid with every candidate one by one.
void best_swap(Search* s, const float* rows, const int64_t* candidates, int64_t count,
               int64_t textbook, int64_t threads, double* best, int64_t* place) {
    std::vector<double> change(count), added(threads * (s->k + 8));
    std::vector<int32_t> partner(count);
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(threads)) if (threads > 1)
    for (int64_t j = 0; j < count; ++j) {
        int me = 0;
#ifdef _OPENMP
        me = omp_get_thread_num();
#endif
        change[j] = 0.0;
        if (s->is_medoid[candidates[j]]) continue;
        const float* row = rows + j * s->n;
        if (!textbook) {
            change[j] = evaluate(*s, row, added.data() + me * (s->k + 8), &partner[j]);
            continue;
        }
        for (int32_t i = 0; i < s->k; ++i) {
            const double d = change_of_pair(*s, row, i);
            if (d < change[j]) change[j] = d, partner[j] = i;
        }
    }
    for (int64_t j = 0; j < count; ++j)
        if (change[j] < *best) {
            *best = change[j];
            place[0] = partner[j];
            place[1] = candidates[j];
            place[2] = j;
        }
}

// How much each candidate would take off the loss if it were one more medoid.
void gains(const float* rows, int64_t n, int64_t count, const float* nearest, double* gain) {
    for (int64_t j = 0; j < count; ++j) {
        double total = 0.0;
        for (int64_t o = 0; o < n; ++o) {
            const double less = double(nearest[o]) - rows[j * n + o];
            total += less > 0.0 ? less : 0.0;
        }
        gain[j] = total;
    }
}

// Rows `first` .. `first + count` of a symmetric matrix of which the part below the diagonal is kept,
// row by row. The part right of a row is read as a piece of each later row.
void expand(const float* lower, int64_t n, int64_t first, int64_t count, float* rows) {
    for (int64_t j = 0; j < count; ++j) {
        const int64_t c = first + j;
        std::memcpy(rows + j * n, lower + c * (c - 1) / 2, sizeof(float) * c);
        rows[j * n + c] = 0.0f;
    }
    for (int64_t o = first + 1; o < n; ++o) {
        const float* piece = lower + o * (o - 1) / 2 + first;
        const int64_t wide = o - first < count ? o - first : count;
        for (int64_t j = 0; j < wide; ++j) rows[j * n + o] = piece[j];
    }
}
}
