// Pointer chase: one node per cache line, linked in one random cycle.
// Source: McVoy and Staelin, lmbench, 1996; single cycle by Sattolo, 1986.
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

extern "C" {

// Maps `bytes`; huge: 1 asks for huge pages, 0 forbids them. *granted: madvise agreed.
void *chase_map(uint64_t bytes, int huge, int *granted) {
  void *base = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return 0;
  *granted = madvise(base, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) == 0;
  return base;
}

void chase_unmap(void *base, uint64_t bytes) { munmap(base, bytes); }

// Links `lines` nodes, `stride` bytes apart, into one cycle: a random one, or in the order
// of addresses, which a prefetcher sees through. Returns 0, or -1 without memory.
int chase_link(char *base, uint64_t lines, uint64_t stride, uint64_t seed, int random) {
  if (!random) {
    for (uint64_t i = 0; i < lines; i++)
      *(void **)(base + i * stride) = base + (i + 1) % lines * stride;
    return 0;
  }
  uint32_t *order = (uint32_t *)malloc(lines * sizeof(uint32_t));
  if (!order) return -1;
  for (uint64_t i = 0; i < lines; i++) order[i] = (uint32_t)i;
  uint64_t s = seed * 0x9E3779B97F4A7C15ull + 0x2545F4914F6CDD1Dull;
  for (uint64_t i = lines; i-- > 1;) {
    s ^= s << 13; s ^= s >> 7; s ^= s << 17;
    // Sattolo: the partner is strictly below i, so the permutation is one cycle.
    uint64_t j = (uint64_t)(((unsigned __int128)s * i) >> 64);
    uint32_t t = order[i]; order[i] = order[j]; order[j] = t;
  }
  for (uint64_t i = 0; i < lines; i++)
    *(void **)(base + i * stride) = base + order[i] * stride;
  free(order);
  return 0;
}

// Reads every line once, so that what fits in a cache is there.
uint64_t chase_warm(char *base, uint64_t lines, uint64_t stride) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < lines; i++) sum += *(volatile uint64_t *)(base + i * stride);
  return sum;
}

#define FOUR(x) x x x x
#define SIXTEEN(x) FOUR(x) FOUR(x) FOUR(x) FOUR(x)

// Seconds per dependent load over `blocks` * 16 loads from *place, which moves on.
double chase_run(void **place, uint64_t blocks) {
  void **p = (void **)*place;
  double begin = now();
  for (uint64_t i = 0; i < blocks; i++) {
    SIXTEEN(p = (void **)*(void *volatile *)p;)
  }
  double end = now();
  *place = p;  // the result is consumed, so the loads stay
  return (end - begin) / (blocks * 16.0);
}

// The same loop without the loads: seconds per (absent) load.
double chase_overhead(void **place, uint64_t blocks) {
  void **p = (void **)*place;
  double begin = now();
  for (uint64_t i = 0; i < blocks; i++) {
    SIXTEEN(asm volatile("" : "+r"(p));)
  }
  double end = now();
  *place = p;
  return (end - begin) / (blocks * 16.0);
}
}
