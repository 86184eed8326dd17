// Pairs of random walks, and training on pairs of one block.
//
// Source: Zhu et al., GraphVite: A High-Performance CPU-GPU Hybrid System for Node Embedding, 2019.
//
// What is drawn follows from the seed and the number of the walk or pair, so results depend on
// neither the threads nor the order of the blocks of a round.

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

// Finalizer of SplitMix64 (Steele et al., 2014), of a counter.
inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

inline double unit(uint64_t bits) { return double(bits >> 11) * 0x1.0p-53; }

// One of size outcomes, by Walker's tables.
inline int64_t alias_of(const double* keep, const int32_t* other, int64_t size, uint64_t bits) {
    const double at = unit(bits) * double(size);
    const int64_t cell = std::min(int64_t(at), size - 1);
    return at - double(cell) < keep[cell] ? cell : other[cell];
}

inline float dot(const float* a, const float* b, int64_t d) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < d; ++k) sum += a[k] * b[k];
    return sum;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

template <class I>
int64_t walk_pairs(const int64_t* indptr, const I* indices, const double* ends, const double* keep,
                   const int32_t* other, int64_t nodes, int64_t first, int64_t count,
                   int64_t length, int64_t reach, uint64_t seed, int32_t* pairs) {
    int32_t walk[4096];
    int64_t made = 0;
    for (int64_t w = first; w < first + count; ++w) {
        uint64_t state = mix(seed ^ mix(uint64_t(w)));
        int64_t here = alias_of(keep, other, nodes, state = mix(state));
        for (int64_t step = 0; step < length; ++step) {
            walk[step] = int32_t(here);
            const int64_t begin = indptr[here], end = indptr[here + 1];
            const double chance = unit(state = mix(state));
            if (begin == end) continue;  // no edge leads from here: it stays
            int64_t entry = begin + int64_t(chance * double(end - begin));
            if (ends) {
                const double goal = ends[begin] + chance * (ends[end] - ends[begin]);
                entry = std::upper_bound(ends + begin + 1, ends + end + 1, goal) - ends - 1;
            }
            here = indices[std::min(entry, end - 1)];
        }
        for (int64_t i = 0; i < length; ++i)
            for (int64_t j = i + 1; j <= std::min(i + reach, length - 1); ++j)
                pairs[2 * made] = walk[i], pairs[2 * made + 1] = walk[j], ++made;
    }
    return made;
}

}  // namespace

extern "C" {

// Pairs (walk[i], walk[i + 1 ... i + reach]) of some walks; how many there are.
int64_t graphvite_pairs(const int64_t* indptr, const void* indices, int wide, const double* ends,
                        const double* keep, const int32_t* other, int64_t nodes, int64_t first,
                        int64_t count, int64_t length, int64_t reach, uint64_t seed,
                        int32_t* pairs) {
    if (wide)
        return walk_pairs(indptr, static_cast<const int64_t*>(indices), ends, keep, other, nodes,
                          first, count, length, reach, seed, pairs);
    return walk_pairs(indptr, static_cast<const int32_t*>(indices), ends, keep, other, nodes, first,
                      count, length, reach, seed, pairs);
}

// Draws of a partition's nodes, each a negative sample.
void graphvite_negatives(const int32_t* members, const double* keep, const int32_t* other,
                         int64_t size, uint64_t seed, int64_t count, int32_t* out) {
    for (int64_t k = 0; k < count; ++k)
        out[k] = members[alias_of(keep, other, size, mix(seed + uint64_t(k)))];
}

// Stochastic gradient descent on pairs, in their order; the step falls from pair to pair.
void graphvite_train(const int32_t* pairs, const int32_t* negatives, int64_t count, float* vertex,
                     float* context, int64_t d, float rate, float last, float weight, float decay) {
    for (int64_t k = 0; k < count; ++k) {
        if (k + 4 < count) {
            const char* next[] = {
                reinterpret_cast<const char*>(vertex + int64_t(pairs[2 * (k + 4)]) * d),
                reinterpret_cast<const char*>(context + int64_t(pairs[2 * (k + 4) + 1]) * d),
                reinterpret_cast<const char*>(context + int64_t(negatives[k + 4]) * d)};
            for (const char* row : next)
                for (int64_t byte = 0; byte < 4 * d; byte += 64) __builtin_prefetch(row + byte, 1);
        }
        const float step = rate + (last - rate) * float(double(k) / double(count));
        float* __restrict u = vertex + int64_t(pairs[2 * k]) * d;
        float* c = context + int64_t(pairs[2 * k + 1]) * d;
        float* n = context + int64_t(negatives[k]) * d;
        const float near = step * sigmoid(-dot(u, c, d));
        const float far = -step * weight * sigmoid(dot(u, n, d));
        const float kept = 1.0f - step * decay;
        if (c == n) {
#pragma omp simd
            for (int64_t i = 0; i < d; ++i) {
                const float a = u[i], b = c[i];
                u[i] = kept * a + (near + far) * b;
                c[i] = kept * b + (near + far) * a;
            }
            continue;
        }
#pragma omp simd
        for (int64_t i = 0; i < d; ++i) {
            const float a = u[i], b = c[i], e = n[i];
            u[i] = kept * a + near * b + far * e;
            c[i] = kept * b + near * a;
            n[i] = kept * e + far * a;
        }
    }
}

}  // extern "C"
