// Read, copy, triad and non-temporal copy over private slices, one per thread.
// Source: McCalpin, STREAM, 1995.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#if defined(__AVX512F__)
#define WIDTH 64
#define STREAM_STORE "vmovntps %1, %0"
#elif defined(__AVX__)
#define WIDTH 32
#define STREAM_STORE "vmovntps %1, %0"
#elif defined(__x86_64__)
#define WIDTH 16
#define STREAM_STORE "movntps %1, %0"
#else
#define WIDTH 16
#endif
typedef float vec __attribute__((vector_size(WIDTH), may_alias));

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

#define HIDE(x) asm volatile("" : "+m"(x))

// STREAMS parts of the array side by side, fetched AHEAD bytes before they are read; which is the
// fastest differs between processors. Sums hide one another's latency.
template <int STREAMS, int AHEAD>
static void k_read(vec *a, vec *, vec *, uint64_t n) {
  constexpr int EACH = 8 / STREAMS;
  const uint64_t part = n / STREAMS / EACH * EACH;
  vec s[8] = {};
  for (uint64_t i = 0; i < part; i += EACH)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      const vec *at = a + j / EACH * part + i + j % EACH;
      if (AHEAD) __builtin_prefetch((const char *)at + AHEAD, 0, 3);
      s[j] += *at;
    }
  for (int j = 0; j < 8; j++) HIDE(s[j]);
}

// The memory barrier keeps the compiler from calling memcpy, which picks its own stores.
static void k_copy(vec *a, vec *b, vec *, uint64_t n) {
  for (uint64_t i = 0; i + 4 <= n; i += 4) {
    vec v0 = b[i], v1 = b[i + 1], v2 = b[i + 2], v3 = b[i + 3];
    a[i] = v0; a[i + 1] = v1; a[i + 2] = v2; a[i + 3] = v3;
    asm volatile("" ::: "memory");
  }
}

static void k_triad(vec *a, vec *b, vec *c, uint64_t n) {
  float f = 3.0f;
  asm volatile("" : "+m"(f));
  vec s = {};
  s += f;
  for (uint64_t i = 0; i + 4 <= n; i += 4) {
    a[i] = b[i] + s * c[i]; a[i + 1] = b[i + 1] + s * c[i + 1];
    a[i + 2] = b[i + 2] + s * c[i + 2]; a[i + 3] = b[i + 3] + s * c[i + 3];
    asm volatile("" ::: "memory");
  }
}

#ifdef STREAM_STORE
static void k_stream(vec *a, vec *b, vec *, uint64_t n) {
  for (uint64_t i = 0; i < n; i++)
    asm volatile(STREAM_STORE : "=m"(a[i]) : "x"(b[i]));
  asm volatile("sfence" ::: "memory");
}
#endif

typedef void (*kernel)(vec *, vec *, vec *, uint64_t);
static const kernel kernels[] = {k_read<1, 0>, k_copy, k_triad,
#ifdef STREAM_STORE
                                 k_stream,
#else
                                 0,
#endif
                                 k_read<2, 0>, k_read<4, 0>, k_read<8, 0>,
                                 k_read<1, 2048>, k_read<1, 8192>, k_read<2, 4096>, k_read<4, 2048>};
static const int arrays_of[] = {1, 2, 3, 2, 1, 1, 1, 1, 1, 1, 1};

struct Job {
  pthread_barrier_t *barrier;
  int which, cpu, repeats, passes, failed;
  uint64_t bytes;
  double *begins, *ends;
};

static void *work(void *argument) {
  Job *j = (Job *)argument;
  if (j->cpu >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(j->cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
  }
  int arrays = arrays_of[j->which];
  // Each array starts at a page plus a few lines: equal offsets would share cache sets.
  uint64_t each = (j->bytes / arrays) / (8 * WIDTH) * (8 * WIDTH);
  uint64_t pad = 4096 + 320, total = arrays * (each + pad + 4096);
  char *base = (char *)mmap(0, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  vec *p[3] = {0, 0, 0};
  j->failed = base == MAP_FAILED;
  if (!j->failed) {
    madvise(base, total, MADV_HUGEPAGE);
    for (int i = 0; i < arrays; i++) {
      p[i] = (vec *)(base + i * ((each + 4095) / 4096 * 4096 + pad / 64 * 64));
      for (uint64_t k = 0; k < each / WIDTH; k++) p[i][k] = vec{} + 1.0f;
    }
    kernels[j->which](p[0], p[1], p[2], each / WIDTH);
  }
  for (int r = 0; r < j->repeats; r++) {
    pthread_barrier_wait(j->barrier);
    j->begins[r] = now();
    if (!j->failed)
      for (int k = 0; k < j->passes; k++) {
        kernels[j->which](p[0], p[1], p[2], each / WIDTH);
        asm volatile("" ::: "memory");
      }
    j->ends[r] = now();
  }
  if (!j->failed) munmap(base, total);
  return 0;
}

extern "C" int bandwidth_has(int which) { return kernels[which] != 0; }

// Fills rates[repeats] with byte/s over all threads; `bytes` is each thread's footprint.
// Returns 0, -1 without memory, -2 when a thread cannot start.
extern "C" int bandwidth_run(int which, uint64_t bytes, int threads, const int *cpus, int repeats,
                             int passes, double *rates) {
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, 0, threads);
  Job *jobs = (Job *)calloc(threads, sizeof(Job));
  pthread_t *ids = (pthread_t *)calloc(threads, sizeof(pthread_t));
  double *times = (double *)calloc(2 * threads * repeats, sizeof(double));
  int failed = 0;
  for (int t = 0; t < threads; t++) {
    jobs[t] = {&barrier, which, cpus[t], repeats, passes, 0, bytes,
               times + 2 * t * repeats, times + (2 * t + 1) * repeats};
    if (pthread_create(&ids[t], 0, work, &jobs[t])) return -2;
  }
  for (int t = 0; t < threads; t++) {
    pthread_join(ids[t], 0);
    failed |= jobs[t].failed;
  }
  double each = (bytes / arrays_of[which]) / (8 * WIDTH) * (8 * WIDTH);
  for (int r = 0; r < repeats; r++) {
    double first = jobs[0].begins[r], last = jobs[0].ends[r];
    for (int t = 1; t < threads; t++) {
      if (jobs[t].begins[r] < first) first = jobs[t].begins[r];
      if (jobs[t].ends[r] > last) last = jobs[t].ends[r];
    }
    rates[r] = each * arrays_of[which] * threads * passes / (last - first);
  }
  pthread_barrier_destroy(&barrier);
  free(jobs); free(ids); free(times);
  return failed ? -1 : 0;
}
