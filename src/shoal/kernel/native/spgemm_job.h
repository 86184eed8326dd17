// What every sparse product is told: two matrices in rows (CSR), a mask or none, where C goes.
#include <omp.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

// Its twin is the array of int64 that kernel/spgemm/native.py fills; keep the order.
struct Job {
  int64_t rows, columns;
  const int64_t* a_ptr;
  const int32_t* a_col;
  const void* a_val;
  const int64_t* b_ptr;
  const int32_t* b_col;
  const void* b_val;
  const int64_t* mask_ptr;  // or null
  const int32_t* mask_col;
  const int64_t* multiplies;  // of each row
  const void* alpha;          // or null
  int64_t* c_ptr;
  int32_t* c_col;  // null: only counted
  void* c_val;
  int64_t version;  // 1, 2, 3
  int64_t sort;
  int64_t threads;
  int64_t budget;       // bytes of a thread's tables
  int64_t dense_ratio;  // a dense row may span so many columns for each multiply; 0: never
  int64_t exact;        // c_ptr is known
  int64_t keep;         // all of the mask is written, also what is not touched
  int64_t* counters;

  // Entries that a row can have.
  int64_t bound(int64_t i) const {
    const int64_t f = multiplies[i] < columns ? multiplies[i] : columns;
    if (!mask_ptr) return f;
    const int64_t m = mask_ptr[i + 1] - mask_ptr[i];
    return keep || m < f ? m : f;
  }
};

enum Counter { kMultiplies, kProbes, kHashed, kDenseRows, kHashRows, kPieces, kRepeated,
               kTableBytes, kSlowest, kWindows, kCounters };

}  // namespace
