// Sample sort: blocks are sorted by themselves, samples of them tell where to cut, and all pieces
// between two cuts are merged. Equal elements keep their order.
//
// Source: Shi, Schaeffer, Parallel Sorting by Regular Sampling, 1992.
#include <omp.h>
#include <algorithm>
#include <cstring>
#include <vector>
#include "algorithm.h"

namespace {

// What is not equal to itself (NaN) stands behind all.
struct Up {
  template <class K> bool operator()(K a, K b) const { return a < b || (b != b && a == a); }
};

template <class K> struct Keyed {
  K key;
  int64_t place;
};
struct ByKey {
  bool down;
  template <class K> bool operator()(const Keyed<K>& x, const Keyed<K>& y) const {
    if (x.key < y.key) return !down;
    if (x.key > y.key) return down;
    const bool a = x.key != x.key, b = y.key != y.key;
    return a != b ? b : x.place < y.place;
  }
};

template <class T, class Less> void sort(T* from, T* to, int64_t n, int64_t threads, Less less) {
  const int64_t blocks = std::min(threads, n / 4096);
  if (blocks < 2) return std::sort(from, from + n, less);
  const int team = int(blocks);
  auto begin = [=](int64_t b) { return n * b / blocks; };
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
  for (int64_t b = 0; b < blocks; b++) std::sort(from + begin(b), from + begin(b + 1), less);
  std::vector<T> samples;
  const int64_t each = 16 * blocks;
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t s = 0; s < each; s++)
      samples.push_back(from[begin(b) + (begin(b + 1) - begin(b)) * s / each]);
  std::sort(samples.begin(), samples.end(), less);
  // Piece p of block b is [cut[b][p], cut[b][p + 1]).
  std::vector<std::vector<int64_t>> cut(static_cast<size_t>(blocks));
  std::vector<int64_t> place(size_t(blocks) + 1, 0);
  for (int64_t b = 0; b < blocks; b++) {
    cut[size_t(b)].push_back(begin(b));
    for (int64_t p = 1; p < blocks; p++)
      cut[size_t(b)].push_back(std::upper_bound(from + begin(b), from + begin(b + 1),
                                                samples[size_t(p * each)], less) - from);
    cut[size_t(b)].push_back(begin(b + 1));
  }
  for (size_t p = 0; p < size_t(blocks); p++) {
    place[p + 1] = place[p];
    for (const auto& of : cut) place[p + 1] += of[p + 1] - of[p];
  }
  // Runs of a piece lie one behind the other, then become half as many, from there to here and back.
  std::vector<std::vector<int64_t>> run(static_cast<size_t>(blocks));
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
  for (size_t p = 0; p < size_t(blocks); p++) {
    run[p].push_back(place[p]);
    for (const auto& of : cut)
      run[p].push_back(std::copy(from + of[p], from + of[p + 1], to + run[p].back()) - to);
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
  for (size_t p = 0; p < size_t(blocks); p++) {
    T *here = to, *there = from;
    for (size_t width = 1, last = run[p].size() - 1; width < last; width *= 2) {
      for (size_t r = 0; r < last; r += 2 * width) {
        const int64_t low = run[p][r], middle = run[p][std::min(r + width, last)],
                      high = run[p][std::min(r + 2 * width, last)];
        std::merge(here + low, here + middle, here + middle, here + high, there + low, less);
      }
      std::swap(here, there);
    }
    if (here == to)
      std::memcpy(from + place[p], to + place[p], size_t(place[p + 1] - place[p]) * sizeof(T));
  }
}

}  // namespace

#define SORT(name, T)                                                                    \
  extern "C" void sort_##name(T* from, T* to, int64_t n, int64_t threads) {              \
    sort(from, to, n, threads, Up());                                                    \
  }
SORT(float64, double)
SORT(float32, float)
SORT(int64, int64_t)
SORT(int32, int32_t)

// The places of the elements in the order of their keys.
#define ORDER(name, K)                                                                   \
  extern "C" void order_##name(const K* key, int64_t* place, int64_t n, int64_t down,    \
                               int64_t threads) {                                        \
    std::vector<Keyed<K>> from(static_cast<size_t>(n)), to(static_cast<size_t>(n));      \
    for (int64_t i = 0; i < n; i++) from[size_t(i)] = {key[i], i};                       \
    sort(from.data(), to.data(), n, threads, ByKey{down != 0});                          \
    for (int64_t i = 0; i < n; i++) place[i] = from[size_t(i)].place;                    \
  }
ORDER(float64, double)
ORDER(int64, int64_t)
