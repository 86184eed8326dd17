// Neighbours of nodes, drawn without replacement and numbered in the order in which they come.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

// Finalizer of SplitMix64 (Steele et al., 2014), of a counter.
inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

// A number below n, from 64 random bits (Lemire, 2019); its bias is below n / 2^64.
inline int64_t below(uint64_t bits, int64_t n) {
    return int64_t((static_cast<unsigned __int128>(bits) * uint64_t(n)) >> 64);
}

template <class Index>
int64_t layer(const int64_t* indptr, const Index* indices, int64_t* nodes, int64_t n,
              const int64_t* ptr, uint64_t key, int32_t* number, int64_t* neighbours) {
    int64_t known = n;
    std::vector<int64_t> chosen;
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t begin = indptr[nodes[i]], degree = indptr[nodes[i] + 1] - begin;
        const int64_t k = ptr[i + 1] - ptr[i];
        chosen.resize(size_t(k));
        if (k == degree) {
            for (int64_t j = 0; j < k; ++j) chosen[size_t(j)] = j;
        } else {
            // Floyd's method: k numbers below degree without replacement, k draws. A table of
            // at least twice as many slots says which have been chosen.
            int64_t size = 4;
            while (size < 2 * k) size *= 2;
            slots.assign(size_t(size), -1);
            const auto put = [&](int64_t value) {
                int64_t at = int64_t(mix(uint64_t(value))) & (size - 1);
                for (; slots[size_t(at)] != -1; at = (at + 1) & (size - 1))
                    if (slots[size_t(at)] == value) return false;
                slots[size_t(at)] = value;
                return true;
            };
            const uint64_t own = mix(key ^ mix(uint64_t(nodes[i])));
            for (int64_t j = 0; j < k; ++j) {
                const int64_t last = degree - k + j;
                const int64_t drawn = below(mix(own + uint64_t(j)), last + 1);
                if (put(drawn)) {
                    chosen[size_t(j)] = drawn;
                } else {
                    put(last);
                    chosen[size_t(j)] = last;
                }
            }
            std::sort(chosen.begin(), chosen.end());
        }
        for (int64_t j = 0; j < k; ++j) {
            const int64_t node = int64_t(indices[begin + chosen[size_t(j)]]);
            if (number[node] < 0) {
                number[node] = int32_t(known);
                nodes[known++] = node;
            }
            neighbours[ptr[i] + j] = number[node];
        }
    }
    return known;
}

}  // namespace

extern "C" {

// Draws ptr[i + 1] - ptr[i] neighbours of each of the first n nodes; new ones are put behind.
// number: of each node of the graph, -1 where it has none. Returns how many nodes there are.
int64_t sample_layer(const int64_t* indptr, const void* indices, int wide, int64_t* nodes,
                     int64_t n, const int64_t* ptr, uint64_t key, int32_t* number,
                     int64_t* neighbours) {
    if (wide)
        return layer(indptr, static_cast<const int64_t*>(indices), nodes, n, ptr, key, number,
                     neighbours);
    return layer(indptr, static_cast<const int32_t*>(indices), nodes, n, ptr, key, number,
                 neighbours);
}
}
