// What a generated algorithm may use. It includes next to nothing, so that it compiles at once.
#include <cstdint>

extern "C" int omp_get_thread_num() noexcept;

namespace {

// What a call is told; its twins are algorithms.cpp and kernel/algorithms/loop.py.
struct Answer {
  int64_t whole;  // 1: in `integer`
  int64_t integer;
  double real;
  int64_t any;
};
struct Call {
  int64_t plan[5];
  int64_t n;
  void* const* at;       // of each array
  const int64_t* step;   // of each array, in elements
  const double* real;    // constants
  const int64_t* whole;  // the same, where they are integers
  Answer* answers;
  char* text;  // of failures
  int64_t room;
};

template <class T> constexpr bool integral = T(0.5) == T(0);
template <> constexpr bool integral<bool> = true;
template <bool C, class A, class B> struct Either { using T = A; };
template <class A, class B> struct Either<false, A, B> { using T = B; };

// Reductions are taken in 64-bit integers or fp64.
template <class X> using Wide = typename Either<integral<X>, int64_t, double>::T;

// A reduction of some elements; of none where `any` is 0.
template <class T> struct Part {
  T value;
  int64_t any;
};
template <class T, class Op> void join(Part<T>& into, const Part<T>& next, Op op) {
  if (next.any) into.value = into.any ? op(into.value, next.value) : next.value, into.any = 1;
}
template <class T> Answer answer(const Part<T>& part) {
  const T value = part.any ? part.value : T(0);
  if constexpr (integral<T>) return {1, value, 0.0, part.any};
  else return {0, 0, value, part.any};
}

// Where an element is NaN, so are the least and the greatest, as in NumPy.
struct Sum {
  static int64_t none(int64_t) { return 0; }
  static double none(double) { return 0; }
  template <class T> T operator()(T x, T y) const { return x + y; }
};
struct Product {
  static int64_t none(int64_t) { return 1; }
  static double none(double) { return 1; }
  template <class T> T operator()(T x, T y) const { return x * y; }
};
struct Least {
  static int64_t none(int64_t) { return INT64_MAX; }
  static double none(double) { return __builtin_inf(); }
  template <class T> T operator()(T x, T y) const { return y < x || y != y ? y : x; }
};
struct Greatest {
  static int64_t none(int64_t) { return INT64_MIN; }
  static double none(double) { return -__builtin_inf(); }
  template <class T> T operator()(T x, T y) const { return y > x || y != y ? y : x; }
};

// Sums of which no order is asked run in so many lanes, folded in a fixed tree.
constexpr int kLanes = 16;
template <class T, class Op> T folded(T* lane, Op op) {
  for (int width = kLanes / 2; width; width /= 2)
    for (int l = 0; l < width; l++) lane[l] = op(lane[l], lane[l + width]);
  return lane[0];
}

// Functions of an expression; those of integers as Python means them.
template <class A, class B> auto over(A a, B b) {
  if constexpr (integral<A> && integral<B>) return double(a) / double(b);
  else return a / b;
}
template <class A, class B> auto floor_over(A a, B b) {
  if constexpr (integral<A> && integral<B>) {
    if (b == 0) throw "integer division by zero";
    const auto q = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
  } else {
    return __builtin_floor(double(a) / double(b));
  }
}
template <class A, class B> auto modulo(A a, B b) {
  if constexpr (integral<A> && integral<B>) {
    if (b == 0) throw "integer modulo by zero";
    const auto r = a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
  } else {
    const double r = __builtin_fmod(double(a), double(b));
    return r != 0 && (r < 0) != (b < 0) ? r + double(b) : r;
  }
}
template <class A> auto square(A a) { return a * a; }
template <class A> auto cube(A a) { return a * a * a; }
template <class A, class B> auto lesser(A a, B b) {
  using T = decltype(true ? a : b);
  return Least()(T(a), T(b));
}
template <class A, class B> auto greater(A a, B b) {
  using T = decltype(true ? a : b);
  return Greatest()(T(a), T(b));
}
template <class A, class B> auto chosen(bool c, A a, B b) { return c ? a : b; }
template <class A> auto magnitude(A a) {
  if constexpr (sizeof(A) == 4 && !integral<A>) return __builtin_fabsf(a);
  else if constexpr (!integral<A>) return __builtin_fabs(a);
  else return a < 0 ? -a : +a;
}
template <class A> bool is_nan(A a) { return a != a; }

#define REAL_FUNCTION(name)                                                           \
  template <class A> auto real_##name(A a) {                                          \
    if constexpr (sizeof(A) == 4 && !integral<A>) return __builtin_##name##f(a);      \
    else return __builtin_##name(double(a));                                          \
  }
REAL_FUNCTION(floor)
REAL_FUNCTION(ceil)
REAL_FUNCTION(nearbyint)
REAL_FUNCTION(sqrt)
REAL_FUNCTION(exp)
REAL_FUNCTION(log)
REAL_FUNCTION(sin)
REAL_FUNCTION(cos)
REAL_FUNCTION(tan)
REAL_FUNCTION(tanh)
template <class A, class B> auto power(A a, B b) {
  if constexpr (sizeof(A) == 4 && sizeof(B) == 4 && !integral<A>) return __builtin_powf(a, b);
  else return __builtin_pow(double(a), double(b));
}

}  // namespace
