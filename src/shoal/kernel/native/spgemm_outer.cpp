// Outer products: column k of A times row k of B, for all k, each product kept; then the
// products of each row of C are sorted by column and summed.
//
// Source: Pal et al., OuterSPACE, 2018.
#include <algorithm>
#include <vector>
#include "spgemm_job.h"

namespace {

// Stable, by the lowest bits of the column first.
template <class V>
void sort_row(int32_t* col, V* val, int64_t n, int64_t columns, std::vector<int32_t>& cols,
              std::vector<V>& vals) {
  if (n <= 48) {
    for (int64_t u = 1; u < n; u++) {
      const int32_t c = col[u];
      const V x = val[u];
      int64_t v = u;
      for (; v && col[v - 1] > c; v--) col[v] = col[v - 1], val[v] = val[v - 1];
      col[v] = c, val[v] = x;
    }
    return;
  }
  if (int64_t(cols.size()) < n) cols.resize(size_t(n)), vals.resize(size_t(n));
  const int width = n < 1024 ? 8 : 11;
  const int32_t last = (1 << width) - 1;
  int32_t *from = col, *to = cols.data();
  V *x = val, *y = vals.data();
  std::vector<uint32_t> place(size_t(last) + 1);
  for (int shift = 0; (columns - 1) >> shift; shift += width) {
    std::fill(place.begin(), place.end(), 0);
    for (int64_t u = 0; u < n; u++) place[size_t(from[u] >> shift & last)]++;
    uint32_t total = 0;
    for (uint32_t& p : place) {
      const uint32_t count = p;
      p = total, total += count;
    }
    for (int64_t u = 0; u < n; u++) {
      const uint32_t at = place[size_t(from[u] >> shift & last)]++;
      to[at] = from[u], y[at] = x[u];
    }
    std::swap(from, to), std::swap(x, y);
  }
  if (from != col)
    std::memcpy(col, from, size_t(n) * 4), std::memcpy(val, x, size_t(n) * sizeof(V));
}

// by_col: ptr [K + 1], entry of A and its row of each entry in order of columns; place: where the
// products of an entry of A begin in (col, val), which take all multiplies.
template <class V>
void expand(const Job& job, int64_t inner, const int64_t* ptr, const int64_t* entry,
            const int64_t* place, int32_t* col, V* val) {
  const V *a = (const V*)job.a_val, *b = (const V*)job.b_val;
  const V alpha = job.alpha ? *(const V*)job.alpha : V(1);
#pragma omp parallel for schedule(dynamic, 64) num_threads(int(job.threads))
  for (int64_t k = 0; k < inner; k++) {
    const int64_t first = job.b_ptr[k], n = job.b_ptr[k + 1] - first;
    if (!n) continue;
    for (int64_t p = ptr[k]; p < ptr[k + 1]; p++) {
      const V x = alpha * a[entry[p]];
      int32_t* c = col + place[entry[p]];
      V* v = val + place[entry[p]];
      for (int64_t q = 0; q < n; q++) c[q] = job.b_col[first + q], v[q] = x * b[first + q];
    }
  }
#pragma omp parallel num_threads(int(job.threads))
  {
    std::vector<int32_t> cols;
    std::vector<V> vals;
#pragma omp for schedule(dynamic, 16)
    for (int64_t i = 0; i < job.rows; i++) {
      job.c_ptr[i + 1] = 0;
      if (!job.multiplies[i]) continue;
      int32_t* c = col + place[job.a_ptr[i]];
      V* v = val + place[job.a_ptr[i]];
      sort_row(c, v, job.multiplies[i], job.columns, cols, vals);
      int64_t n = 0;
      for (int64_t u = 1; u < job.multiplies[i]; u++) {
        if (c[u] == c[n])
          v[n] += v[u];
        else
          n++, c[n] = c[u], v[n] = v[u];
      }
      job.c_ptr[i + 1] = n + 1;
    }
  }
  job.c_ptr[0] = 0;
  for (int64_t i = 0; i < job.rows; i++) job.c_ptr[i + 1] += job.c_ptr[i];
}

template <class V>
void gather(const Job& job, const int64_t* place, const int32_t* col, const V* val) {
#pragma omp parallel for schedule(dynamic, 256) num_threads(int(job.threads))
  for (int64_t i = 0; i < job.rows; i++) {
    const int64_t at = job.c_ptr[i], n = job.c_ptr[i + 1] - at;
    if (!n) continue;
    std::memcpy(job.c_col + at, col + place[job.a_ptr[i]], size_t(n) * 4);
    std::memcpy((V*)job.c_val + at, val + place[job.a_ptr[i]], size_t(n) * sizeof(V));
  }
}

}  // namespace

#define OUTER(name, V)                                                                         \
  extern "C" void outer_expand_##name(const Job* job, int64_t inner, const int64_t* ptr,       \
                                      const int64_t* entry, const int64_t* place,              \
                                      int32_t* col, V* val) {                                  \
    expand<V>(*job, inner, ptr, entry, place, col, val);                                       \
  }                                                                                            \
  extern "C" void outer_gather_##name(const Job* job, const int64_t* place,                    \
                                      const int32_t* col, const V* val) {                      \
    gather<V>(*job, place, col, val);                                                          \
  }

OUTER(fp64, double)
OUTER(fp32, float)
OUTER(int64, int64_t)
