// A recurrence over time: R h + Wx + b, then a pointwise function, for T steps in one call.
//
// The packed matrix of a head stays in the caches of the core that computes it; sums over k are
// taken in one order, whatever the batch, so a row has the same bits in any company. Where a
// head is too large for one core, or there are more cores than work, a team of threads shares
// its units and meets at a barrier once a step. Vectors are those of the compiler: 64 bytes on
// every CPU, in one instruction with AVX-512 and in several without.
#include <omp.h>
#include <sched.h>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

typedef uint16_t Half __attribute__((vector_size(32)));
typedef uint32_t Word __attribute__((vector_size(64)));
struct Bf16 { uint16_t bits; };

template <class T> struct Lanes;
template <> struct Lanes<float> {
  typedef float V __attribute__((vector_size(64)));
  typedef int32_t I __attribute__((vector_size(64)));
};
template <> struct Lanes<double> {
  typedef double V __attribute__((vector_size(64)));
  typedef int64_t I __attribute__((vector_size(64)));
};
template <class T> using Vec = typename Lanes<T>::V;
template <class T> constexpr int64_t W = 64 / sizeof(T);

template <class T> inline Vec<T> load(const T* at) {
  Vec<T> v;
  std::memcpy(&v, at, 64);
  return v;
}
inline Vec<float> load(const Bf16* at) {
  Half h;
  std::memcpy(&h, at, 32);
  return (Vec<float>)(__builtin_convertvector(h, Word) << 16);
}
template <class T> inline void store(T* at, Vec<T> v) { std::memcpy(at, &v, 64); }
// The first n of a vector; the rest is zero.
template <class T> inline Vec<T> load(const T* at, int64_t n) {
  if (n >= W<T>) return load(at);
  Vec<T> v = {};
  for (int64_t i = 0; i < n; i++) v[i] = at[i];
  return v;
}
template <class T> inline void store(T* at, Vec<T> v, int64_t n) {
  if (n >= W<T>) return store(at, v);
  for (int64_t i = 0; i < n; i++) at[i] = v[i];
}
// What is read again only much later goes past the caches: the rows of a step, which lie many
// pages apart, would drive each other out, and a whole line is not read to be written.
template <class T> inline void stream(T* at, Vec<T> v, int64_t n) {
#if defined(__AVX512F__) && !defined(__clang__)
  if (n >= W<T> && reinterpret_cast<uintptr_t>(at) % 64 == 0)
    return __builtin_ia32_movntps512(reinterpret_cast<float*>(at), (Vec<float>)v);
#endif
  store(at, v, n);
}
template <class V> inline V least(V a, V b) { return a < b ? a : b; }
template <class V> inline V most(V a, V b) { return a > b ? a : b; }

// Cephes' polynomial; beyond +-88 the value there, so nothing overflows. NaN stays NaN.
inline Vec<float> expv(Vec<float> x) {
  using V = Vec<float>;
  const V low = V{} - 87.0f, high = V{} + 88.0f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  V k = x * 1.44269504f + 12582912.0f;
  k -= 12582912.0f;
  V r = x - k * 0.693359375f;
  r = r + k * 2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Lanes<float>::I n = __builtin_convertvector(k, Lanes<float>::I);
  return p * (V)((n + 127) << 23);
}
inline Vec<double> expv(Vec<double> x) {
  for (int i = 0; i < 8; i++) x[i] = std::exp(x[i]);
  return x;
}
template <class V> inline V magnitude(V x) { return x < 0 ? -x : x; }
inline Vec<float> tanhv(Vec<float> x) {
  const Vec<float> e = expv(-2.0f * magnitude(x));
  const Vec<float> t = (1.0f - e) / (1.0f + e);
  return x < 0 ? -t : t;
}
inline Vec<double> tanhv(Vec<double> x) {
  for (int i = 0; i < 8; i++) x[i] = std::tanh(x[i]);
  return x;
}
template <class V> inline V sigmoid(V x) { return 1 / (1 + expv(-x)); }
// log(1 + e) for e of 0 .. 1, as 2 atanh(e / (2 + e)).
inline Vec<float> log1pv(Vec<float> e) {
  const Vec<float> s = e / (2.0f + e), q = s * s;
  Vec<float> p = q * (1.0f / 15) + 1.0f / 13;
  p = p * q + 1.0f / 11;
  p = p * q + 1.0f / 9;
  p = p * q + 1.0f / 7;
  p = p * q + 1.0f / 5;
  p = p * q + 1.0f / 3;
  return 2.0f * (s + s * q * p);
}
inline Vec<double> log1pv(Vec<double> e) {
  for (int i = 0; i < 8; i++) e[i] = std::log1p(e[i]);
  return e;
}
template <class V> inline V log_sigmoid(V x) { return least(x, V{}) - log1pv(expv(-magnitude(x))); }

// The functions. IN gates have an input, REC a recurrent product, ALL a bias; the gates are
// numbered by their biases and the recurrent ones come first. `first_in` is the first gate with
// an input. JV is how many vectors of units a tile of the forward product has.
// point: gates -> states, and what back wants. back: gradients of the new states, in place to
// those of the old ones but for what comes through the product; dpre: those of the gates.
// Neither is inlined, so that they have the same bits wherever they are called.
#define APART __attribute__((noinline))

struct Lstm {
  static constexpr int IN = 4, REC = 4, ALL = 4, STATES = 2, SAVED = 4, first_in = 0, JV = 1;
  template <class V> APART static void point(const V* pre, const V* old, V* now, V* saved) {
    const V i = sigmoid(pre[0]), f = sigmoid(pre[1]), z = tanhv(pre[2]), o = sigmoid(pre[3]);
    const V c = f * old[1] + i * z;
    now[0] = o * tanhv(c);
    now[1] = c;
    saved[0] = i, saved[1] = f, saved[2] = z, saved[3] = o;
  }
  template <class V>
  APART static void back(const V* saved, const V* old, const V* now, V* d, V* dpre) {
    const V i = saved[0], f = saved[1], z = saved[2], o = saved[3], t = tanhv(now[1]);
    const V dc = d[1] + d[0] * o * (1 - t * t);
    dpre[0] = dc * z * i * (1 - i);
    dpre[1] = dc * old[1] * f * (1 - f);
    dpre[2] = dc * i * (1 - z * z);
    dpre[3] = d[0] * t * o * (1 - o);
    d[0] = V{};
    d[1] = dc * f;
  }
};

// Gates g, r, z with a product, r, z, n with an input.
struct Gru {
  static constexpr int IN = 3, REC = 3, ALL = 4, STATES = 1, SAVED = 4, first_in = 1, JV = 1;
  template <class V> APART static void point(const V* pre, const V* old, V* now, V* saved) {
    const V g = pre[0], r = sigmoid(pre[1]), z = sigmoid(pre[2]), n = tanhv(pre[3] + r * g);
    now[0] = z * old[0] + (1 - z) * n;
    saved[0] = g, saved[1] = r, saved[2] = z, saved[3] = n;
  }
  template <class V>
  APART static void back(const V* saved, const V* old, const V*, V* d, V* dpre) {
    const V g = saved[0], r = saved[1], z = saved[2], n = saved[3];
    const V dn = d[0] * (1 - z) * (1 - n * n);
    dpre[0] = dn * r;
    dpre[1] = dn * g * r * (1 - r);
    dpre[2] = d[0] * (old[0] - n) * z * (1 - z);
    dpre[3] = dn;
    d[0] = d[0] * z;
  }
};

struct Elman {
  static constexpr int IN = 1, REC = 1, ALL = 1, STATES = 1, SAVED = 0, first_in = 0, JV = 4;
  template <class V> APART static void point(const V* pre, const V*, V* now, V*) {
    now[0] = tanhv(pre[0]);
  }
  template <class V> APART static void back(const V*, const V*, const V* now, V* d, V* dpre) {
    dpre[0] = d[0] * (1 - now[0] * now[0]);
    d[0] = V{};
  }
};

// Exponential gates, kept finite by the running maximum m. A state whose n is 0 is new: its m
// counts for nothing.
struct Slstm {
  static constexpr int IN = 4, REC = 4, ALL = 4, STATES = 4, SAVED = 4, first_in = 0, JV = 1;
  template <class V> APART static void point(const V* pre, const V* old, V* now, V* saved) {
    const V a = log_sigmoid(pre[1]) + old[3];
    const V m = old[2] == 0 ? pre[0] : most(a, pre[0]);
    const V i = expv(pre[0] - m), f = expv(least(a - m, V{}));
    const V c = f * old[1] + i * tanhv(pre[2]);
    const V n = most(f * old[2] + i, V{} + 1);
    now[0] = sigmoid(pre[3]) * c / n;
    now[1] = c, now[2] = n, now[3] = m;
    for (int k = 0; k < 4; k++) saved[k] = pre[k];
  }
  template <class V>
  APART static void back(const V* saved, const V* old, const V* now, V* d, V* dpre) {
    const V zero = V{}, one = V{} + 1, half = V{} + 0.5f;
    const V a = log_sigmoid(saved[1]) + old[3], m = now[3], n = now[2];
    const V i = expv(saved[0] - m), f = expv(least(a - m, zero));
    const V z = tanhv(saved[2]), o = sigmoid(saved[3]);
    const V dc = d[1] + d[0] * o / n;
    const V above = f * old[2] + i;
    const V dn = above < 1 ? zero : d[2] - d[0] * o * now[1] / (n * n);
    const V di = (dc * z + dn) * i;
    const V df = (dc * old[1] + dn * old[2]) * f;
    const V dm = d[3] - di - df;
    // m is the larger of the two; a tie is shared.
    V to_a = a > saved[0] ? one : zero;
    to_a = a == saved[0] ? half : to_a;
    to_a = old[2] == 0 ? zero : to_a;
    const V da = old[2] == 0 ? zero : df + to_a * dm;
    dpre[0] = di + (1 - to_a) * dm;
    dpre[1] = da * sigmoid(-saved[1]);
    dpre[2] = dc * i * (1 - z * z);
    dpre[3] = d[0] * now[1] / n * o * (1 - o);
    d[0] = zero;
    d[1] = dc * f;
    d[2] = dn * f;
    d[3] = da;
  }
};

// Batch, steps, heads and units of a head; then how the work is cut: slices of the batch,
// threads that share a head, heads that a team takes through time together, and the most rows
// whose sums the registers hold; and whether the matrices are in bf16.
struct Shape {
  int64_t B, T, N, D, slices, team, together, rows, narrow;
  int64_t padded(int64_t width) const { return (D + width - 1) / width * width; }
};

// sum[m][v] += over k of r[k][v] x[m][k]; compiled once for all functions.
template <int V, int M, class T, class S>
APART void product(const S* r, int64_t K, const T* x, int64_t stride, Vec<T>* sum) {
  Vec<T> s[M][V];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) s[m][v] = sum[m * V + v];
  for (int64_t k = 0; k < K; k++, r += V * W<T>) {
    Vec<T> a[V];
    for (int v = 0; v < V; v++) a[v] = load(r + v * W<T>);
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) s[m][v] += a[v] * x[m * stride + k];
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) sum[m * V + v] = s[m][v];
}

constexpr int kRows = 6;

template <int V, class T, class S>
APART void product(int rows, const S* r, int64_t K, const T* x, int64_t stride, Vec<T>* sum) {
  switch (rows) {
    case 6: return product<V, 6, T, S>(r, K, x, stride, sum);
    case 4: return product<V, 4, T, S>(r, K, x, stride, sum);
    case 2: return product<V, 2, T, S>(r, K, x, stride, sum);
    default: return product<V, 1, T, S>(r, K, x, stride, sum);
  }
}

// Likewise, from number `at` of all matrices on, whichever type these have.
template <int V, class T>
inline void product(int rows, const void* r, int64_t at, int64_t K, const T* x, int64_t stride,
                    Vec<T>* sum, bool narrow) {
  if constexpr (sizeof(T) == 4)
    if (narrow) return product<V, T, Bf16>(rows, (const Bf16*)r + at, K, x, stride, sum);
  product<V, T, T>(rows, (const T*)r + at, K, x, stride, sum);
}

// Threads of a team wait for each other; the count only grows.
struct alignas(64) Barrier {
  std::atomic<int64_t> arrived{0};
  void wait(int64_t team) {
    if (team < 2) return;
    const int64_t mine = arrived.fetch_add(1, std::memory_order_acq_rel);
    const int64_t target = (mine / team + 1) * team;
    for (int64_t spins = 0; arrived.load(std::memory_order_acquire) < target; spins++) {
      // On a busy machine the others may wait for this very core.
      if (spins > 2000) sched_yield();
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }
};

inline void fetch(const void* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)at + i);
}

struct Task { int64_t n, first, last; };

// Runs body(team member, team, barrier, tasks begin, tasks end) on every thread.
template <class Body> void teams(const Shape& z, Body body) {
  constexpr int kTeams = 256;
  static_assert(sizeof(Barrier) == 64, "a line each");
  Barrier barriers[kTeams];
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads(), id = omp_get_thread_num();
    const int64_t team = z.team < threads ? z.team : threads;
    int64_t count = threads / team;
    count = count < kTeams ? count : kTeams;
    const int64_t mine = id / team;
    if (mine < count) {
      const int64_t tasks = z.N * z.slices;
      body(id % team, team, barriers[mine], tasks * mine / count, tasks * (mine + 1) / count);
#if defined(__x86_64__)
      __builtin_ia32_sfence();  // what went past the caches is there for every thread
#endif
    }
  }
}

inline Task task(const Shape& z, int64_t index) {
  const int64_t n = index / z.slices, s = index % z.slices;
  return {n, z.B * s / z.slices, z.B * (s + 1) / z.slices};
}

// One tile of units of `rows` rows of one head at one step.
template <class F, class T, int JV>
inline void step(int rows, const T* wx, const void* r, const T* bias, T* h, T* rest, T* gates,
                 const T* before, T* after, T* carried, const Shape& z, int64_t Dp, int64_t t,
                 int64_t n, int64_t b, int64_t tile) {
  constexpr int V = F::REC * JV;
  using Vt = Vec<T>;
  const int64_t ND = z.N * z.D, plane = z.B * z.T * ND, padded = z.N * z.B * Dp;
  const int64_t unit = tile * JV * W<T>;
  Vt sum[kRows * V];
  for (int m = 0; m < rows; m++) {
    const T* in = wx + ((b + m) * z.T + t) * F::IN * ND + n * z.D;
    for (int jv = 0; jv < JV; jv++) {
      const int64_t j = unit + jv * W<T>, left = z.D - j;
      for (int g = 0; g < F::REC; g++) {
        Vt v = {};
        if (left > 0) {
          v = load(bias + g * ND + n * z.D + j, left);
          if (g >= F::first_in) v += load(in + (g - F::first_in) * ND + j, left);
        }
        sum[m * V + jv * F::REC + g] = v;
      }
    }
  }
  const int64_t first = (n * ((Dp + JV * W<T> - 1) / (JV * W<T>)) + tile) * z.D * V * W<T>;
  product<V, T>(rows, r, first, z.D, before + (n * z.B + b) * Dp, Dp, sum, z.narrow);
  for (int m = 0; m < rows; m++) {
    const int64_t row = ((b + m) * z.T + t) * ND + n * z.D;
    const int64_t in = ((b + m) * z.T + t) * F::IN * ND + n * z.D;
    const int64_t kept = ((b + m) * z.T + t) * F::SAVED * ND + n * z.D;
    const int64_t at = (n * z.B + b + m) * Dp;
    for (int jv = 0; jv < JV; jv++) {
      const int64_t j = unit + jv * W<T>, left = z.D - j;
      if (left <= 0) break;
      Vt pre[F::ALL], old[F::STATES], now[F::STATES], saved[F::SAVED + 1];
      for (int g = 0; g < F::REC; g++) pre[g] = sum[m * V + jv * F::REC + g];
      for (int g = F::REC; g < F::ALL; g++)
        pre[g] = load(bias + g * ND + n * z.D + j, left) +
                 load(wx + in + (g - F::first_in) * ND + j, left);
      old[0] = load(before + at + j);
      for (int s = 1; s < F::STATES; s++) old[s] = load(carried + (s - 1) * padded + at + j);
      F::point(pre, old, now, saved);
      store(after + at + j, now[0]);
      stream(h + row + j, now[0], left);
      for (int s = 1; s < F::STATES; s++) {
        store(carried + (s - 1) * padded + at + j, now[s]);
        stream(rest + (s - 1) * plane + row + j, now[s], left);
      }
      if (gates)
        for (int g = 0; g < F::SAVED; g++) stream(gates + kept + g * ND + j, saved[g], left);
    }
  }
}

// Rows in blocks of 6, 4, 2 and 1.
template <class Block>
inline void blocks(int64_t first, int64_t last, int64_t rows, Block block) {
  for (int64_t b = first; b < last;) {
    const int64_t left = last - b < rows ? last - b : rows;
    const int size = left >= 6 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    block(b, size);
    b += size;
  }
}

// scratch: [1 + STATES, N, B, Dp].
template <class F, int JV, class T>
void forward(const T* wx, const void* r, const T* bias, const T* s0, T* h, T* rest, T* gates,
             T* scratch, const Shape& z) {
  const int64_t Dp = z.padded(W<T>), ND = z.N * z.D, padded = z.N * z.B * Dp;
  const int64_t tiles = (Dp + JV * W<T> - 1) / (JV * W<T>);
  T* const carried = scratch + 2 * padded;
  teams(z, [&](int64_t member, int64_t team, Barrier& barrier, int64_t begin, int64_t end) {
    const int64_t low = tiles * member / team, high = tiles * (member + 1) / team;
    for (int64_t group = begin; group < end; group += z.together) {
      const int64_t stop = group + z.together < end ? group + z.together : end;
      for (int64_t i = group; i < stop; i++) {
        const Task w = task(z, i);
        if (member == 0)
          for (int64_t b = w.first; b < w.last; b++)
            for (int s = 0; s < F::STATES; s++) {
              T* to = s ? carried + (s - 1) * padded : scratch;
              to += (w.n * z.B + b) * Dp;
              std::memset(to, 0, Dp * sizeof(T));
              std::memcpy(to, s0 + (s * z.B + b) * ND + w.n * z.D, z.D * sizeof(T));
            }
      }
      barrier.wait(team);
      for (int64_t t = 0; t < z.T; t++) {
        const T* before = scratch + (t & 1) * padded;
        T* after = scratch + (~t & 1) * padded;
        for (int64_t i = group; i < stop; i++) {
          const Task w = task(z, i);
          if (member == 0 && t + 1 < z.T)
            for (int64_t b = w.first; b < w.last; b++)
              for (int g = 0; g < F::IN; g++)
                fetch(wx + ((b * z.T + t + 1) * F::IN + g) * ND + w.n * z.D, z.D * sizeof(T));
          for (int64_t tile = low; tile < high; tile++)
            blocks(w.first, w.last, z.rows, [&](int64_t b, int rows) {
              step<F, T, JV>(rows, wx, r, bias, h, rest, gates, before, after, carried, z, Dp, t,
                             w.n, b, tile);
            });
        }
        barrier.wait(team);
      }
    }
  });
}

// What comes through the product: carry[0] += clip(R.T dpre).
template <int JV, class T>
APART void through(int rows, int64_t REC, const void* r, const T* dpre, T* carry, const Shape& z,
                   int64_t Dp, int64_t n, int64_t b, int64_t tile, T clip) {
  const int64_t tiles = (Dp + JV * W<T> - 1) / (JV * W<T>);
  Vec<T> sum[kRows * JV];
  for (int m = 0; m < rows; m++)
    for (int v = 0; v < JV; v++) sum[m * JV + v] = Vec<T>{};
  const int64_t at = (n * tiles + tile) * REC * z.D * JV * W<T>;
  for (int64_t g = 0; g < REC; g++)
    product<JV, T>(rows, r, at + g * z.D * JV * W<T>, z.D, dpre + ((n * z.B + b) * REC + g) * Dp,
                   REC * Dp, sum, z.narrow);
  const Vec<T> top = Vec<T>{} + clip;
  for (int m = 0; m < rows; m++)
    for (int v = 0; v < JV; v++) {
      const int64_t j = (tile * JV + v) * W<T>;
      if (j >= z.D) break;
      Vec<T> s = sum[m * JV + v];
      if (clip > 0) s = least(most(s, -top), top);
      T* to = carry + (n * z.B + b + m) * Dp + j;
      store(to, load(to) + s);
    }
}

// Gradients of one vector of units of one row: from the states' to the gates'.
// dpre rows are `stride` apart, one a recurrent gate.
template <class F, class T>
inline void unpoint(const T* gates, const T* s0, const T* h, const T* rest, const T* dh,
                    const T* drest, const T* dlast, T* carry, int64_t state, T* dwx, T* dextra,
                    T* dbias, int64_t apart, T* dpre, int64_t stride, const Shape& z, int64_t t,
                    int64_t n, int64_t b, int64_t j) {
  using Vt = Vec<T>;
  const int64_t ND = z.N * z.D, plane = z.B * z.T * ND, left = z.D - j;
  const int64_t row = (b * z.T + t) * ND + n * z.D + j, at = b * ND + n * z.D + j;
  Vt saved[F::SAVED + 1], old[F::STATES], now[F::STATES], d[F::STATES], out[F::ALL];
  for (int g = 0; g < F::SAVED; g++)
    saved[g] = load(gates + ((b * z.T + t) * F::SAVED + g) * ND + n * z.D + j, left);
  for (int s = 0; s < F::STATES; s++) {
    const T* all = s ? rest + (s - 1) * plane : h;
    const T* dall = s ? (drest ? drest + (s - 1) * plane : nullptr) : dh;
    now[s] = load(all + row, left);
    old[s] = t ? load(all + row - ND, left) : load(s0 + s * z.B * ND + at, left);
    d[s] = load(carry + s * state);
    if (dall) d[s] += load(dall + row, left);
    if (dlast && t == z.T - 1) d[s] += load(dlast + s * z.B * ND + at, left);
  }
  F::back(saved, old, now, d, out);
  for (int s = 0; s < F::STATES; s++) store(carry + s * state, d[s]);
  for (int g = 0; g < F::REC; g++) store(dpre + g * stride, out[g], stride == z.D ? left : W<T>);
  for (int g = 0; g < F::IN; g++)
    stream(dwx + ((b * z.T + t) * F::IN + g) * ND + n * z.D + j, out[g + F::first_in], left);
  for (int g = 0; g < F::first_in; g++)
    store(dextra + ((b * z.T + t) * F::first_in + g) * ND + n * z.D + j, out[g], left);
  for (int g = 0; g < F::ALL; g++)
    store(dbias + g * apart, load(dbias + g * apart) + out[g]);
}

// scratch: [STATES + 2 REC, N, B, Dp] and [slices, N, ALL, Dp].
template <class F, int JV, class T>
void backward(const void* r, const T* s0, const T* h, const T* rest, const T* gates, const T* dh,
              const T* drest, const T* dlast, T* dwx, T* dextra, T* dbias, T* ds0, T* scratch,
              const Shape& z, T clip) {
  const int64_t Dp = z.padded(W<T>), ND = z.N * z.D, padded = z.N * z.B * Dp;
  const int64_t tiles = (Dp + JV * W<T> - 1) / (JV * W<T>);
  T* const sums = scratch + (F::STATES + 2 * F::REC) * padded;
  teams(z, [&](int64_t member, int64_t team, Barrier& barrier, int64_t begin, int64_t end) {
    const int64_t low = tiles * member / team, high = tiles * (member + 1) / team;
    const int64_t top = high * JV * W<T> < z.D ? high * JV * W<T> : z.D;
    for (int64_t group = begin; group < end; group += z.together) {
      const int64_t stop = group + z.together < end ? group + z.together : end;
      for (int64_t i = group; i < stop; i++) {
        const Task w = task(z, i);
        if (member == 0) {
          for (int s = 0; s < F::STATES; s++)
            std::memset(scratch + s * padded + (w.n * z.B + w.first) * Dp, 0,
                        (w.last - w.first) * Dp * sizeof(T));
          std::memset(sums + i * F::ALL * Dp, 0, F::ALL * Dp * sizeof(T));
        }
      }
      barrier.wait(team);
      for (int64_t t = z.T - 1; t >= 0; t--) {
        // Two, in turn: others may still read the last one.
        T* const dpre = scratch + (F::STATES + (t & 1) * F::REC) * padded;
        for (int64_t i = group; i < stop; i++) {
          const Task w = task(z, i);
          for (int64_t b = w.first; b < w.last; b++) {
            if (member == 0 && t > 0) {
              const int64_t row = (b * z.T + t - 1);
              for (int g = 0; g < F::SAVED; g++)
                fetch(gates + (row * F::SAVED + g) * ND + w.n * z.D, z.D * sizeof(T));
              if (dh) fetch(dh + row * ND + w.n * z.D, z.D * sizeof(T));
            }
            const int64_t at = (w.n * z.B + b) * Dp;
            for (int64_t j = low * JV * W<T>; j < top; j += W<T>)
              unpoint<F>(gates, s0, h, rest, dh, drest, dlast, scratch + at + j, padded, dwx,
                         dextra, sums + i * F::ALL * Dp + j, Dp, dpre + at * F::REC + j, Dp, z, t,
                         w.n, b, j);
          }
        }
        barrier.wait(team);
        for (int64_t i = group; i < stop; i++) {
          const Task w = task(z, i);
          for (int64_t tile = low; tile < high; tile++)
            blocks(w.first, w.last, z.rows, [&](int64_t b, int rows) {
              through<JV, T>(rows, F::REC, r, dpre, scratch, z, Dp, w.n, b, tile, clip);
            });
        }
      }
      barrier.wait(team);
      for (int64_t i = group; i < stop && member == 0; i++) {
        const Task w = task(z, i);
        for (int64_t b = w.first; b < w.last; b++)
          for (int s = 0; s < F::STATES; s++)
            std::memcpy(ds0 + (s * z.B + b) * ND + w.n * z.D,
                        scratch + s * padded + (w.n * z.B + b) * Dp, z.D * sizeof(T));
        for (int g = 0; g < F::ALL; g++)
          std::memcpy(dbias + (((i % z.slices) * F::ALL + g) * z.N + w.n) * z.D,
                      sums + (i * F::ALL + g) * Dp, z.D * sizeof(T));
      }
    }
  });
}

// The pointwise half of one step, whose product rh [N, B, REC, D] somebody else has computed.
template <class F, class T>
void pointwise(const T* wx, const T* rh, const T* bias, const T* s0, T* h, T* rest, T* gates,
               const Shape& z, int64_t t) {
  using Vt = Vec<T>;
  const int64_t ND = z.N * z.D, plane = z.B * z.T * ND;
#pragma omp parallel for collapse(2) if (z.B * ND > 4096)
  for (int64_t n = 0; n < z.N; n++)
    for (int64_t b = 0; b < z.B; b++)
      for (int64_t j = 0; j < z.D; j += W<T>) {
        const int64_t left = z.D - j, row = (b * z.T + t) * ND + n * z.D + j;
        Vt pre[F::ALL], old[F::STATES], now[F::STATES], saved[F::SAVED + 1];
        for (int g = 0; g < F::ALL; g++) {
          pre[g] = load(bias + (g * z.N + n) * z.D + j, left);
          if (g >= F::first_in)
            pre[g] += load(wx + ((b * z.T + t) * F::IN + g - F::first_in) * ND + n * z.D + j, left);
          if (g < F::REC) pre[g] += load(rh + ((n * z.B + b) * F::REC + g) * z.D + j, left);
        }
        for (int s = 0; s < F::STATES; s++) {
          const T* all = s ? rest + (s - 1) * plane : h;
          old[s] = t ? load(all + row - ND, left)
                     : load(s0 + (s * z.B + b) * ND + n * z.D + j, left);
        }
        F::point(pre, old, now, saved);
        store(h + row, now[0], left);
        for (int s = 1; s < F::STATES; s++) store(rest + (s - 1) * plane + row, now[s], left);
        if (gates)
          for (int g = 0; g < F::SAVED; g++)
            store(gates + ((b * z.T + t) * F::SAVED + g) * ND + n * z.D + j, saved[g], left);
      }
}

// Its gradients. carry: [STATES, N, B, Dp]; dpre: [N, B, REC, D]; sums: [N, B, ALL, Dp].
template <class F, class T>
void unpointwise(const T* s0, const T* h, const T* rest, const T* gates, const T* dh,
                 const T* drest, const T* dlast, T* dwx, T* dextra, T* carry, T* dpre, T* sums,
                 const Shape& z, int64_t t) {
  const int64_t Dp = z.padded(W<T>), padded = z.N * z.B * Dp;
#pragma omp parallel for collapse(2) if (z.B * z.N * z.D > 4096)
  for (int64_t n = 0; n < z.N; n++)
    for (int64_t b = 0; b < z.B; b++)
      for (int64_t j = 0; j < z.D; j += W<T>)
        unpoint<F>(gates, s0, h, rest, dh, drest, dlast, carry + (n * z.B + b) * Dp + j, padded,
                   dwx, dextra, sums + (n * z.B + b) * F::ALL * Dp + j, Dp,
                   dpre + (n * z.B + b) * F::REC * z.D + j, z.D, z, t, n, b, j);
}

// Tiles of four vectors where a head has as many; fp64 checks gradients, in tiles of one.
template <class T> constexpr bool kWide = sizeof(T) == 4;
template <class T> inline bool wide(const Shape& z) { return kWide<T> && z.D > 2 * W<T>; }

}  // namespace

#define EACH(F, name, T, type)                                                                    \
  extern "C" void name##_forward_##type(const T* wx, const void* r, const T* bias, const T* s0,   \
                                        T* h, T* rest, T* gates, T* scratch, const int64_t* z) {  \
    Shape shape;                                                                                  \
    std::memcpy(&shape, z, sizeof(shape));                                                        \
    if (F::JV == 1 || !wide<T>(shape))                                                            \
      forward<F, 1, T>(wx, r, bias, s0, h, rest, gates, scratch, shape);                          \
    else                                                                                          \
      forward<F, kWide<T> ? F::JV : 1, T>(wx, r, bias, s0, h, rest, gates, scratch, shape);       \
  }                                                                                               \
  extern "C" void name##_backward_##type(                                                         \
      const void* r, const T* s0, const T* h, const T* rest, const T* gates, const T* dh,         \
      const T* drest, const T* dlast, T* dwx, T* dextra, T* dbias, T* ds0, T* scratch,            \
      const int64_t* z, double clip) {                                                            \
    Shape shape;                                                                                  \
    std::memcpy(&shape, z, sizeof(shape));                                                        \
    if (wide<T>(shape))                                                                           \
      backward<F, kWide<T> ? 4 : 1, T>(r, s0, h, rest, gates, dh, drest, dlast, dwx, dextra,      \
                                       dbias, ds0, scratch, shape, T(clip));                      \
    else                                                                                          \
      backward<F, 1, T>(r, s0, h, rest, gates, dh, drest, dlast, dwx, dextra, dbias, ds0,         \
                        scratch, shape, T(clip));                                                 \
  }

#define POINTS(F, name, T, type)                                                                  \
  extern "C" void name##_point_##type(const T* wx, const T* rh, const T* bias, const T* s0, T* h, \
                                      T* rest, T* gates, const int64_t* z, int64_t t) {           \
    Shape shape;                                                                                  \
    std::memcpy(&shape, z, sizeof(shape));                                                        \
    pointwise<F, T>(wx, rh, bias, s0, h, rest, gates, shape, t);                                  \
  }                                                                                               \
  extern "C" void name##_unpoint_##type(const T* s0, const T* h, const T* rest, const T* gates,   \
                                        const T* dh, const T* drest, const T* dlast, T* dwx,      \
                                        T* dextra, T* carry, T* dpre, T* sums, const int64_t* z,  \
                                        int64_t t) {                                              \
    Shape shape;                                                                                  \
    std::memcpy(&shape, z, sizeof(shape));                                                        \
    unpointwise<F, T>(s0, h, rest, gates, dh, drest, dlast, dwx, dextra, carry, dpre, sums,       \
                      shape, t);                                                                  \
  }

#define FUNCTIONS(T, type)         \
  EACH(Lstm, lstm, T, type)        \
  EACH(Gru, gru, T, type)          \
  EACH(Elman, elman, T, type)      \
  EACH(Slstm, slstm, T, type)      \
  POINTS(Lstm, lstm, T, type)      \
  POINTS(Gru, gru, T, type)        \
  POINTS(Elman, elman, T, type)    \
  POINTS(Slstm, slstm, T, type)
