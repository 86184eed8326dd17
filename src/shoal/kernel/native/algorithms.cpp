// The runtime of the algorithms: ranges are cut into chunks, executors give the chunks to threads,
// partial results are combined in the order of the elements, and failures of all tasks collected.
// What is done to a chunk is compiled apart (algorithm.h) and called by address, once a chunk.
#include <omp.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>
#include "algorithm.h"

namespace {

enum Executor : int64_t { kInline, kForkJoin, kStealing, kBlock };
enum Chunking : int64_t { kStatic, kDynamic, kGuided, kAuto };

struct Plan {
  int64_t executor, chunking, size, cores, fixed;
  explicit Plan(const Call* call)
      : executor(call->plan[0]), chunking(call->plan[1]), size(call->plan[2]),
        cores(call->plan[3]), fixed(call->plan[4]) {}
  int64_t team() const {
    const int64_t most = omp_get_max_threads();
    return executor == kInline ? 1 : cores > 0 && cores < most ? cores : most;
  }
};

// Does something to elements [first, last); null, or why it failed.
using Task = const char* (*)(const Call*, int64_t first, int64_t last, void* partial);

constexpr int64_t kFixed = 8192;       // elements of a chunk of a deterministic reduction
constexpr int64_t kProbe = 64;         // elements that auto times at least
constexpr double kTask = 120e-6;       // seconds of a task that auto aims at
constexpr double kWorthwhile = 20e-6;  // seconds of work below which no thread is woken

struct Failures {
  const Call* call;
  int64_t count = 0, used = 0;
  void add(int64_t first, int64_t last, const char* what) {
#pragma omp critical(algorithm_failures)
    {
      count++;
      const int64_t left = call->room - used;
      const int n = snprintf(call->text + used, size_t(left), "elements %lld to %lld: %s\n",
                             (long long)first, (long long)last - 1, what);
      used += n < left ? n : left - 1;
    }
  }
};

struct Cuts {
  int64_t n = 0, size = 1;
  std::vector<int64_t> at;  // of chunks of unequal size
  int64_t count() const {
    return at.empty() ? (n + size - 1) / size : int64_t(at.size()) - 1;
  }
  int64_t first(int64_t c) const { return at.empty() ? c * size : at[size_t(c)]; }
  int64_t last(int64_t c) const {
    return at.empty() ? std::min(n, (c + 1) * size) : at[size_t(c) + 1];
  }
};

// Where nothing is timed.
Cuts cut(const Plan& plan, int64_t n) {
  Cuts cuts;
  cuts.n = n;
  const int64_t cores = plan.team();
  if (plan.fixed) {
    cuts.size = kFixed;
  } else if (plan.chunking == kGuided) {
    const int64_t least = plan.size ? plan.size : 1024;
    for (int64_t i = 0; i < n; i += std::max(least, (n - i + 2 * cores - 1) / (2 * cores)))
      cuts.at.push_back(i);
    cuts.at.push_back(n);
  } else if (plan.size) {
    cuts.size = plan.size;
  } else if (plan.chunking == kDynamic) {
    cuts.size = std::max<int64_t>(1024, (n + 16 * cores - 1) / (16 * cores));
  } else if (plan.chunking == kAuto) {
    cuts.size = n < 32768 ? std::max<int64_t>(1, n) : std::max<int64_t>(16384, n / (8 * cores));
  } else {
    cuts.size = std::max<int64_t>(1, (n + cores - 1) / cores);
  }
  return cuts;
}

// Chunks from `done` on; body(chunk, first, last) says why it failed, or null.
template <class Body>
void execute(const Plan& plan, const Cuts& cuts, int64_t done, Failures& failures, Body&& body) {
  const int64_t chunks = cuts.count();
  auto guarded = [&](int64_t c) {
    const char* what = body(c, cuts.first(c), cuts.last(c));
    if (what) failures.add(cuts.first(c), cuts.last(c), what);
  };
  const int64_t cores = std::min(plan.team(), chunks - done);
  if (cores <= 1) {
    for (int64_t c = done; c < chunks; c++) guarded(c);
  } else if (plan.executor == kBlock || (plan.executor == kForkJoin && plan.chunking == kStatic)) {
    // The same elements on the same thread in every call of this length.
#pragma omp parallel num_threads(int(cores))
    {
      const int64_t t = omp_get_thread_num(), T = omp_get_num_threads(), m = chunks - done;
      if (plan.executor == kBlock || !plan.size)
        for (int64_t c = done + m * t / T; c < done + m * (t + 1) / T; c++) guarded(c);
      else
        for (int64_t c = done + t; c < chunks; c += T) guarded(c);
    }
  } else if (plan.executor == kForkJoin) {
    int64_t next = done;
#pragma omp parallel num_threads(int(cores))
    for (int64_t c; (c = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < chunks;) guarded(c);
  } else {
    // Each thread takes from the front of its own chunks, then half of what another has left.
    struct alignas(64) Hand { uint64_t range; };
    std::vector<Hand> hands(static_cast<size_t>(cores));
    auto pack = [](uint64_t a, uint64_t b) { return a << 32 | b; };
    for (int64_t t = 0; t < cores; t++)
      hands[size_t(t)].range = pack(uint64_t(done + (chunks - done) * t / cores),
                                    uint64_t(done + (chunks - done) * (t + 1) / cores));
#pragma omp parallel num_threads(int(cores))
    {
      const int64_t t = omp_get_thread_num();
      for (int64_t missed = 0; missed < cores;) {
        const int64_t victim = (t + missed) % cores;
        uint64_t* range = &hands[size_t(victim)].range;
        uint64_t old = __atomic_load_n(range, __ATOMIC_ACQUIRE);
        const uint64_t a = old >> 32, b = old & 0xffffffffu;
        if (a >= b) {
          missed++;
          continue;
        }
        const bool mine = victim == t;
        const uint64_t middle = a + (b - a) / 2, left = mine ? pack(a + 1, b) : pack(a, middle);
        if (!__atomic_compare_exchange_n(range, &old, left, false, __ATOMIC_ACQ_REL,
                                         __ATOMIC_RELAXED))
          continue;
        if (mine) {
          guarded(int64_t(a));
        } else {
          __atomic_store_n(&hands[size_t(t)].range, pack(middle, b), __ATOMIC_RELEASE);
          missed = 0;
        }
      }
    }
  }
}

}  // namespace

// task over [0, n), its partials of `size` bytes folded in order, or over a tree if that is fixed;
// then finish(partial). Auto times the first hundredth, which counts as done, and cuts the rest
// by what that took.
extern "C" int64_t algorithm_run(const Call* call, Task task,
                                 void (*fold)(const Call*, void*, const void*),
                                 void (*finish)(const Call*, void*), int64_t size) {
  const Plan plan(call);
  Failures failures{call};
  const int64_t n = call->n;
  std::vector<char> partial(static_cast<size_t>(std::max<int64_t>(1, size)));
  Cuts cuts;
  int64_t done = 0;
  cuts.n = n, cuts.size = std::max<int64_t>(1, n);
  if (n && plan.chunking == kAuto && !plan.fixed && plan.executor != kInline) {
    using Clock = std::chrono::steady_clock;
    const int64_t probe = std::min(n, std::max(kProbe, n / 100));
    // What is slow may only have been cold or interrupted: it is timed again, and again.
    double each = 1e9;
    int64_t at = 0;
    partial.resize(size_t(std::max<int64_t>(1, 3 * size)));
    cuts.at = {0};
    for (; done < 3 && at < n && double(n - at) * each >= kWorthwhile; done++) {
      const int64_t first = at;
      at = std::min(n, at + probe);
      const auto before = Clock::now();
      const char* what = task(call, first, at, partial.data() + done * size);
      const std::chrono::duration<double> taken = Clock::now() - before;
      if (what) failures.add(first, at, what);
      each = std::max(1e-12, std::min(each, taken.count() / double(at - first)));
      if (at < n) cuts.at.push_back(at);
    }
    const int64_t rest = n - at, cores = plan.team(), even = (rest + cores - 1) / cores;
    int64_t chunk = double(even) * each > kTask ? int64_t(kTask / each) : even;
    if (double(rest) * each < kWorthwhile) chunk = rest;
    for (int64_t i = at + chunk; i < n; i += std::max<int64_t>(1, chunk)) cuts.at.push_back(i);
    cuts.at.push_back(n);
  } else if (n && (plan.executor != kInline || plan.fixed)) {
    cuts = cut(plan, n);
  }
  const int64_t count = cuts.count();
  partial.resize(size_t(std::max<int64_t>(1, count) * size));
  if (n)
    execute(plan, cuts, done, failures, [&](int64_t c, int64_t first, int64_t last) {
      return task(call, first, last, partial.data() + c * size);
    });
  if (size && !failures.count) {
    char* all = partial.data();
    for (int64_t width = 1; plan.fixed && width < count; width *= 2)
      for (int64_t c = 0; c + width < count; c += 2 * width)
        fold(call, all + c * size, all + (c + width) * size);
    for (int64_t c = 1; !plan.fixed && c < count; c++) fold(call, all, all + c * size);
    finish(call, all);
  }
  return failures.count;
}

// Chunks are reduced, then each is scanned from what stands before it.
extern "C" int64_t algorithm_scan(const Call* call, Task reduce,
                                  void (*fold)(const Call*, void*, const void*),
                                  void (*start)(const Call*, void*), Task scan, int64_t size) {
  const Plan plan(call);
  Failures failures{call};
  const Cuts cuts = cut(plan, call->n);
  const int64_t count = cuts.count();
  std::vector<char> before(size_t(count * size)), own(size_t((count + 1) * size));
  if (count > 1)
    execute(plan, cuts, 0, failures, [&](int64_t c, int64_t first, int64_t last) {
      return reduce(call, first, last, own.data() + c * size);
    });
  if (failures.count || !count) return failures.count;
  start(call, before.data());
  for (int64_t c = 1; c < count; c++) {
    std::memcpy(before.data() + c * size, before.data() + (c - 1) * size, size_t(size));
    fold(call, before.data() + c * size, own.data() + (c - 1) * size);
  }
  execute(plan, cuts, 0, failures, [&](int64_t c, int64_t first, int64_t last) {
    return scan(call, first, last, before.data() + c * size);
  });
  return failures.count;
}

// count: elements of a chunk that are picked; place: them to partial[0] on, others to partial[1].
extern "C" int64_t algorithm_pick(const Call* call, Task count, Task place) {
  const Plan plan(call);
  Failures failures{call};
  const Cuts cuts = cut(plan, call->n);
  std::vector<int64_t> begin(size_t(cuts.count()) + 1, 0);
  execute(plan, cuts, 0, failures, [&](int64_t c, int64_t first, int64_t last) {
    return count(call, first, last, &begin[size_t(c) + 1]);
  });
  if (failures.count) return failures.count;
  for (size_t c = 1; c < begin.size(); c++) begin[c] += begin[c - 1];
  const int64_t total = begin.back();
  execute(plan, cuts, 0, failures, [&](int64_t c, int64_t first, int64_t last) {
    int64_t to[2] = {begin[size_t(c)], total + first - begin[size_t(c)]};
    return place(call, first, last, to);
  });
  call->answers[0] = answer(Part<int64_t>{total, 1});
  return failures.count;
}

namespace {

template <class T> int64_t histogram(const Call* call) {
  const T* from = (const T*)call->at[0];
  const double* edge = (const double*)call->at[1];
  int64_t* out = (int64_t*)call->at[2];
  const int64_t step = call->step[0], bins = call->whole[0];
  const double low = edge[0], high = edge[bins], scale = double(bins) / (high - low);
  Plan plan(call);
  plan.fixed = 0;
  Failures failures{call};
  // One set of counts a thread: they are whole numbers, whose order does not matter.
  std::vector<std::vector<int64_t>> counts(size_t(omp_get_max_threads()) + 1);
  execute(plan, cut(plan, call->n), 0, failures, [&](int64_t, int64_t first, int64_t last) {
    std::vector<int64_t>& mine = counts[size_t(omp_get_thread_num())];
    mine.resize(size_t(bins));
    for (int64_t i = first; i < last; i++) {
      const double x = double(from[i * step]);
      if (!(x >= low && x <= high)) continue;
      int64_t bin = std::min(bins - 1, int64_t((x - low) * scale));
      if (x < edge[bin]) bin--;
      else if (bin + 1 < bins && x >= edge[bin + 1]) bin++;
      mine[size_t(bin)]++;
    }
    return (const char*)nullptr;
  });
  for (const std::vector<int64_t>& mine : counts)
    for (size_t bin = 0; bin < mine.size(); bin++) out[bin] += mine[bin];
  return failures.count;
}

}  // namespace

#define HISTOGRAM(name, T) \
  extern "C" int64_t histogram_##name(const Call* call) { return histogram<T>(call); }
HISTOGRAM(float64, double)
HISTOGRAM(float32, float)
HISTOGRAM(int64, int64_t)
HISTOGRAM(int32, int32_t)
HISTOGRAM(uint8, uint8_t)
HISTOGRAM(bool, bool)
