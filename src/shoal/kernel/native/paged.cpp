// Paged attention over keys and values in fp32 or bf16, as the model computes them.
#include "paged.h"

#ifdef __AVX512DQ__

extern "C" int64_t paged_attention(const int64_t* arguments) {
  Problem p = problem_of(arguments);
  const int64_t problem = wrong(p, arguments);
  if (problem >= 0 || p.rows == 0) return problem;
  if (!p.half) attention<Fp32>(p);
#ifdef __AVX512BF16__
  if (p.half) attention<Bf16>(p);
#endif
  return -1;
}

#endif
