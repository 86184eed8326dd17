// What is looked at before a sparse product: that the rows are rows, and how much work each is.
#include <omp.h>
#include <cstdint>

// Row of the first entry that is out of range or stands before its left neighbour, or -1; in
// `what` 1 for row pointers that fall or lead outside, 2 for a column out of range, 3 for
// columns out of order.
extern "C" int64_t csr_check(int64_t rows, int64_t columns, int64_t entries, const int64_t* ptr,
                             const int32_t* col, int64_t* what) {
  *what = 1;
  if (ptr[0] != 0 || ptr[rows] != entries) return rows;
  for (int64_t i = 0; i < rows; i++)
    if (ptr[i + 1] < ptr[i]) return i;
  int64_t bad = rows;
#pragma omp parallel for reduction(min : bad)
  for (int64_t i = 0; i < rows; i++) {
    bool wrong = false;
    uint32_t before = 0;
    for (int64_t p = ptr[i]; p < ptr[i + 1]; p++) {
      const uint32_t c = uint32_t(col[p]);
      wrong |= c < before || int64_t(c) >= columns;
      before = c;
    }
    if (wrong && i < bad) bad = i;
  }
  if (bad == rows) return -1;
  *what = 3;
  for (int64_t p = ptr[bad]; p < ptr[bad + 1]; p++)
    if (col[p] < 0 || col[p] >= columns) *what = 2;
  return bad;
}

// Columns in 32 bits; 1 if one of them does not fit.
extern "C" int64_t csr_narrow(int64_t entries, const int64_t* from, int32_t* to) {
  int64_t outside = 0;
#pragma omp parallel for reduction(| : outside)
  for (int64_t p = 0; p < entries; p++) {
    to[p] = int32_t(from[p]);
    outside |= int64_t(uint64_t(from[p]) > 0x7fffffff);
  }
  return outside;
}

// Multiplies of each row of A B, and their sum.
extern "C" int64_t csr_multiplies(int64_t rows, const int64_t* a_ptr, const int32_t* a_col,
                                  const int64_t* b_ptr, int64_t* out) {
  int64_t total = 0;
#pragma omp parallel for reduction(+ : total)
  for (int64_t i = 0; i < rows; i++) {
    int64_t f = 0;
    for (int64_t p = a_ptr[i]; p < a_ptr[i + 1]; p++) f += b_ptr[a_col[p] + 1] - b_ptr[a_col[p]];
    out[i] = f;
    total += f;
  }
  return total;
}

// Where the products of each entry of A begin, if all were kept; the products of its row first.
extern "C" void csr_places(int64_t rows, const int64_t* a_ptr, const int32_t* a_col,
                           const int64_t* b_ptr, int64_t* out) {
  int64_t at = 0;
  for (int64_t p = 0; p < a_ptr[rows]; p++) {
    out[p] = at;
    at += b_ptr[a_col[p] + 1] - b_ptr[a_col[p]];
  }
}
