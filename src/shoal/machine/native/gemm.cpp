// A matrix product C = A B in fp32 with a square register tile, in three levels of blocks.
// Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008.
//
// Panels of A and B are packed T wide and padded with zeros, so a product whose edges the
// tile does not divide pays for whole tiles, as it does on a GPU. The same loops count the
// elements that they move, when they are told to count instead of to compute.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

namespace {

const int64_t ROWS = 128, INNER = 256, COLUMNS = 2048;  // multiples of every tile

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <int W> struct Lanes { typedef float type __attribute__((vector_size(4 * W))); };
template <> struct Lanes<1> { typedef float type; };

// T x T of C from panels [depth][T] of A and of B.
template <int T>
void tile_product(int64_t depth, const float* a, const float* b, float* out) {
  const int W = T < 16 ? T : 16, P = T / W;
  typedef typename Lanes<W>::type lanes;
  lanes sum[T][P] = {};
  for (int64_t p = 0; p < depth; p++) {
    lanes row[P];
    memcpy(row, b + p * T, sizeof row);
#pragma GCC unroll 32
    for (int i = 0; i < T; i++)
#pragma GCC unroll 2
      for (int j = 0; j < P; j++) sum[i][j] += row[j] * a[p * T + i];
  }
  memcpy(out, sum, sizeof sum);
}

struct Buffers {
  float *a, *b;
  Buffers()
      : a((float*)aligned_alloc(64, 4 * ROWS * INNER)),
        b((float*)aligned_alloc(64, 4 * INNER * COLUMNS)) {}
  ~Buffers() { free(a), free(b); }
};

// Computes C [m, n] = A [m, k] B [k, n], all by rows; or returns the elements it would move.
template <int T, bool COUNT>
uint64_t product(int64_t m, int64_t n, int64_t k, const float* A, const float* B, float* C,
                 Buffers* own) {
  uint64_t moved = 0;
  alignas(64) float out[T * T];
  for (int64_t jc = 0; jc < n; jc += COLUMNS) {
    int64_t nc = least(COLUMNS, n - jc);
    for (int64_t pc = 0; pc < k; pc += INNER) {
      int64_t kc = least(INNER, k - pc);
      for (int64_t j = 0; j < nc; j += T) {
        int64_t wide = least(T, nc - j);
        if (COUNT) {
          moved += kc * (wide + T);
          continue;
        }
        float* panel = own->b + j * kc;
        for (int64_t p = 0; p < kc; p++) {
          const float* from = B + (pc + p) * n + jc + j;
          for (int64_t x = 0; x < T; x++) panel[p * T + x] = x < wide ? from[x] : 0.0f;
        }
      }
      for (int64_t ic = 0; ic < m; ic += ROWS) {
        int64_t mc = least(ROWS, m - ic);
        for (int64_t i = 0; i < mc; i += T) {
          int64_t high = least(T, mc - i);
          if (COUNT) {
            moved += kc * (high + T);
            continue;
          }
          float* panel = own->a + i * kc;
          for (int64_t y = 0; y < T; y++) {
            const float* from = A + (ic + i + y) * k + pc;
            for (int64_t p = 0; p < kc; p++) panel[p * T + y] = y < high ? from[p] : 0.0f;
          }
        }
        for (int64_t j = 0; j < nc; j += T)
          for (int64_t i = 0; i < mc; i += T) {
            int64_t high = least(T, mc - i), wide = least(T, nc - j);
            if (COUNT) {
              moved += kc * 2 * T + (pc ? 2 : 1) * high * wide;
              continue;
            }
            tile_product<T>(kc, own->a + i * kc, own->b + j * kc, out);
            for (int64_t y = 0; y < high; y++) {
              float* to = C + (ic + i + y) * n + jc + j;
              for (int64_t x = 0; x < wide; x++)
                to[x] = pc ? to[x] + out[y * T + x] : out[y * T + x];
            }
          }
      }
    }
  }
  return moved;
}

template <bool COUNT>
uint64_t chosen(int tile, int64_t m, int64_t n, int64_t k, const float* a, const float* b,
                float* c, Buffers* own) {
  switch (tile) {
    case 1: return product<1, COUNT>(m, n, k, a, b, c, own);
    case 2: return product<2, COUNT>(m, n, k, a, b, c, own);
    case 4: return product<4, COUNT>(m, n, k, a, b, c, own);
    case 8: return product<8, COUNT>(m, n, k, a, b, c, own);
    case 16: return product<16, COUNT>(m, n, k, a, b, c, own);
    case 32: return product<32, COUNT>(m, n, k, a, b, c, own);
  }
  return 0;
}

}  // namespace

extern "C" {

// Seconds of `calls` products; below 0 when there is no memory.
double gemm_run(int tile, int64_t m, int64_t n, int64_t k, const float* a, const float* b,
                float* c, int calls) {
  Buffers own;
  if (!own.a || !own.b) return -1.0;
  double begin = now();
  for (int i = 0; i < calls; i++) chosen<false>(tile, m, n, k, a, b, c, &own);
  return now() - begin;
}

// Elements that one product moves: packing, panels, tiles of C.
uint64_t gemm_moved(int tile, int64_t m, int64_t n, int64_t k) {
  return chosen<true>(tile, m, n, k, 0, 0, 0, 0);
}
}
