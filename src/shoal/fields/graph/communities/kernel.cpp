// Slots that signatures share, and who shares bands of slots with a few signatures.

#include <algorithm>
#include <cstdint>

extern "C" {

// equal[i, j]: slots in which row rows[i] and row others[j] of signatures [., slots] agree.
// A few rows stay in the cache, and a slot of the others is read once for four of them.
void equal_slots(const uint32_t* signatures, int64_t slots, const int64_t* rows, int64_t n,
                 const int64_t* others, int64_t m, int32_t* equal) {
    constexpr int64_t kBlock = 8;
    for (int64_t first = 0; first < n; first += kBlock)
        for (int64_t j = 0; j < m; ++j) {
            const uint32_t* b = signatures + others[j] * slots;
            const int64_t last = std::min(first + kBlock, n);
            int64_t i = first;
            for (; i + 4 <= last; i += 4) {
                const uint32_t* a0 = signatures + rows[i] * slots;
                const uint32_t* a1 = signatures + rows[i + 1] * slots;
                const uint32_t* a2 = signatures + rows[i + 2] * slots;
                const uint32_t* a3 = signatures + rows[i + 3] * slots;
                int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
                for (int64_t k = 0; k < slots; ++k) {
                    s0 += a0[k] == b[k];
                    s1 += a1[k] == b[k];
                    s2 += a2[k] == b[k];
                    s3 += a3[k] == b[k];
                }
                equal[i * m + j] = s0, equal[(i + 1) * m + j] = s1;
                equal[(i + 2) * m + j] = s2, equal[(i + 3) * m + j] = s3;
            }
            for (; i < last; ++i) {
                const uint32_t* a = signatures + rows[i] * slots;
                int32_t same = 0;
                for (int64_t k = 0; k < slots; ++k) same += a[k] == b[k];
                equal[i * m + j] = same;
            }
        }
}

// equal[j] of signatures [n, slots] with a signature of which `changed` slots went from `before`
// to `after`.
void follow_slots(const uint32_t* signatures, int64_t slots, int64_t n, const int64_t* changed,
                  int64_t count, const uint32_t* before, const uint32_t* after, int32_t* equal) {
    for (int64_t j = 0; j < n; ++j) {
        const uint32_t* a = signatures + j * slots;
        int32_t gained = 0;
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t slot = a[changed[i]];
            gained += (slot == after[i]) - (slot == before[i]);
        }
        equal[j] += gained;
    }
}

// Count, for each of n rows, the bands [bands, n] of (key << 32 | row), ascending, that it shares
// with each of s signatures, whose keys are keys [bands, s]. How many entries name no row.
int64_t band_mates(const uint64_t* sorted, int64_t n, int64_t bands, const uint64_t* keys,
                   int64_t s, int32_t* shared) {
    int64_t wrong = 0;
    for (int64_t band = 0; band < bands; ++band) {
        const uint64_t *begin = sorted + band * n, *end = begin + n;
        for (int64_t i = 0; i < s; ++i) {
            const uint64_t key = keys[band * s + i] >> 32;
            for (const uint64_t* at = std::lower_bound(begin, end, key << 32);
                 at != end && *at >> 32 == key; ++at) {
                const int64_t row = int64_t(*at & 0xffffffffu);
                if (row < n)
                    ++shared[row];
                else
                    ++wrong;
            }
        }
    }
    return wrong;
}

// similar[i, j]: Jaccard similarity of set rows[i] with set j > above[i], of N sets in compressed
// rows; the sets of each member are given too, ascending.
void jaccard_rows(const int64_t* ends, const int32_t* members, const int64_t* member_ends,
                  const int32_t* sets, int64_t N, const int64_t* rows, const int64_t* above,
                  int64_t n, float* similar) {
    for (int64_t i = 0; i < n; ++i) {
        float* common = similar + i * N;
        std::fill(common, common + N, 0.0f);
        const int64_t row = rows[i], size = ends[row + 1] - ends[row];
        for (int64_t at = ends[row]; at < ends[row + 1]; ++at) {
            const int32_t* begin = sets + member_ends[members[at]];
            const int32_t* end = sets + member_ends[members[at] + 1];
            if (above[i] >= 0) begin = std::upper_bound(begin, end, int32_t(above[i]));
            for (; begin != end; ++begin) common[*begin] += 1.0f;
        }
        for (int64_t j = above[i] + 1; j < N; ++j) {
            const float all = float(size + ends[j + 1] - ends[j]) - common[j];
            common[j] = all > 0 ? common[j] / all : 0.0f;
        }
    }
}
}
