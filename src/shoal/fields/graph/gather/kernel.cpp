// Rows of a table, gathered as one warp of a GPU gathers each, with its memory requests counted.
//
// Source: Min et al., Large Graph Convolutional Network Training with GPU-Oriented Data
// Communication Architecture, 2021, section 4.5 (circular shift).

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kLanes = 32, kLine = 128, kAhead = 4;

// What was moved: bytes read, bytes written, requests of lines, iterations of warps.
struct Moved {
    int64_t read = 0, written = 0, requests = 0, iterations = 0;
};

// Elements [low, high) of a row: neighbouring lanes, one request for each line that they touch.
inline void lanes(const float* row, float* out, int64_t low, int64_t high, Moved& moved) {
    if (low >= high) return;
    const auto a = reinterpret_cast<uintptr_t>(row + low), b = reinterpret_cast<uintptr_t>(row + high);
    moved.requests += int64_t((b - 1) / kLine - a / kLine) + 1;
    const int64_t bytes = int64_t(b - a);
    if (bytes == kLine)
        std::memcpy(out + low, row + low, kLine);
    else
        std::memcpy(out + low, row + low, size_t(bytes));
    moved.read += bytes, moved.written += bytes;
}

template <bool Aligned>
inline void gather_row(const float* row, float* out, int64_t width, Moved& moved) {
    const int64_t skew =
        Aligned ? int64_t(reinterpret_cast<uintptr_t>(row) % kLine / sizeof(float)) : 0;
    const int64_t warps = (width + kLanes - 1) / kLanes;
    for (int64_t k = 0; k < warps; ++k) {
        const int64_t first = k * kLanes - skew;
        lanes(row, out, std::max<int64_t>(first, 0), std::min(first + kLanes, width), moved);
    }
    // Lanes before the row's head take the elements behind the last iteration.
    if (skew) lanes(row, out, warps * kLanes - skew, width, moved);
    moved.iterations += warps;
}

}  // namespace

extern "C" {

// out[places[i] or i] = table[rows[i]]; adds to four counters.
void gather_rows(const float* table, int64_t width, const int64_t* rows, const int64_t* places,
                 int64_t n, float* out, int aligned, int64_t* counters) {
    Moved moved;
    for (int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) {
            const float* next = table + rows[i + kAhead] * width;
            for (int64_t at = 0; at < std::min<int64_t>(width, 256); at += 16)
                __builtin_prefetch(next + at);
        }
        float* to = out + (places ? places[i] : i) * width;
        if (aligned)
            gather_row<true>(table + rows[i] * width, to, width, moved);
        else
            gather_row<false>(table + rows[i] * width, to, width, moved);
    }
    counters[0] += moved.read, counters[1] += moved.written;
    counters[2] += moved.requests, counters[3] += moved.iterations;
}
}
