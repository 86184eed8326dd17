// Inner products: every row of A with every column of B, whether they meet or not. A row is
// spread out once, so that a column only looks its own entries up.
#include <algorithm>
#include <vector>
#include "spgemm_job.h"

namespace {

// Rows of one block of C.
template <class V> struct Block {
  std::vector<int32_t> col;
  std::vector<V> val;
};

constexpr int64_t kBlock = 32;

template <class V> struct Inner {
  const Job& job;
  const int64_t* t_ptr;  // B by columns
  const int32_t* t_row;
  const V* t_val;
  std::vector<Block<V>> blocks;

  Inner(const Job& j, int64_t inner, const int64_t* ptr, const int32_t* row, const V* val)
      : job(j), t_ptr(ptr), t_row(row), t_val(val), blocks(size_t((j.rows + kBlock - 1) / kBlock)) {
    const V* a = (const V*)job.a_val;
    const V alpha = job.alpha ? *(const V*)job.alpha : V(1);
#pragma omp parallel num_threads(int(job.threads))
    {
      std::vector<V> x(size_t(inner), V(0));
      std::vector<char> there(size_t(inner), 0);
#pragma omp for schedule(dynamic, 1)
      for (int64_t block = 0; block < int64_t(blocks.size()); block++) {
        Block<V>& out = blocks[size_t(block)];
        for (int64_t i = block * kBlock; i < std::min(job.rows, (block + 1) * kBlock); i++) {
          const int64_t first = job.a_ptr[i], last = job.a_ptr[i + 1];
          const size_t before = out.col.size();
          for (int64_t p = first; p < last; p++)
            x[size_t(job.a_col[p])] += alpha * a[p], there[size_t(job.a_col[p])] = 1;
          if (first < last && job.mask_ptr)
            for (int64_t m = job.mask_ptr[i]; m < job.mask_ptr[i + 1]; m++) {
              const bool twice = m > job.mask_ptr[i] && job.mask_col[m] == job.mask_col[m - 1];
              if (!twice) one(job.mask_col[m], x.data(), there.data(), out);
            }
          else if (first < last)
            for (int64_t j = 0; j < job.columns; j++) one(j, x.data(), there.data(), out);
          for (int64_t p = first; p < last; p++)
            x[size_t(job.a_col[p])] = V(0), there[size_t(job.a_col[p])] = 0;
          job.c_ptr[i + 1] = int64_t(out.col.size() - before);
        }
      }
    }
    job.c_ptr[0] = 0;
    for (int64_t i = 0; i < job.rows; i++) job.c_ptr[i + 1] += job.c_ptr[i];
  }

  void one(int64_t j, const V* x, const char* there, Block<V>& out) {
    V sum = 0;
    bool any = false;
    for (int64_t p = t_ptr[j]; p < t_ptr[j + 1]; p++)
      if (there[t_row[p]]) sum += x[t_row[p]] * t_val[p], any = true;
    if (any) out.col.push_back(int32_t(j)), out.val.push_back(sum);
  }

  void gather(int32_t* col, V* val) {
    for (size_t b = 0; b < blocks.size(); b++) {
      const int64_t at = job.c_ptr[int64_t(b) * kBlock];
      const Block<V>& from = blocks[b];
      if (from.col.empty()) continue;
      std::memcpy(col + at, from.col.data(), from.col.size() * 4);
      std::memcpy(val + at, from.val.data(), from.val.size() * sizeof(V));
    }
  }
};

}  // namespace

#define INNER(name, V)                                                                         \
  extern "C" void* inner_begin_##name(const Job* job, int64_t inner, const int64_t* ptr,       \
                                      const int32_t* row, const V* val) {                      \
    return new Inner<V>(*job, inner, ptr, row, val);                                           \
  }                                                                                            \
  extern "C" void inner_end_##name(void* made, int32_t* col, V* val) {                         \
    static_cast<Inner<V>*>(made)->gather(col, val);                                            \
    delete static_cast<Inner<V>*>(made);                                                       \
  }

INNER(fp64, double)
INNER(fp32, float)
INNER(int64, int64_t)
