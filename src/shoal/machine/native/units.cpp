// Dependent chains give an instruction's latency, independent chains its throughput.
// Source: Fog, Instruction tables; Abel and Reineke, uops.info, 2019.
//
// The instruction under test stands in inline assembly, so the compiler can neither
// drop nor change it. Which functions may be called is decided by the CPU's flags.
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

extern "C" {

// Seconds per dependent register addition, which is one clock cycle.
double unit_clock(uint64_t blocks) {
  uint64_t x = 1, y = 3;
  double begin = now();
  for (uint64_t i = 0; i < blocks; i++) {
#if defined(__x86_64__)
#define STEP asm volatile("add %1, %0" : "+r"(x) : "r"(y));
#else
#define STEP asm volatile("add %0, %0, %1" : "+r"(x) : "r"(y));
#endif
    STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP
    STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP STEP
  }
  return (now() - begin) / (blocks * 32.0);
}
}

#if defined(__x86_64__)
typedef float v16 __attribute__((vector_size(64)));
typedef float v8 __attribute__((vector_size(32)));

// NAME_CHAINS: seconds per instruction with CHAINS independent chains.
#define CHAINED(NAME, TYPE, CONSTRAINT, CHAINS, TEXT)                                   \
  extern "C" double unit_##NAME##_##CHAINS(uint64_t blocks) {                           \
    TYPE x[CHAINS] = {}, a = {}, b = {};                                                \
    asm volatile("" : "+" CONSTRAINT(a), "+" CONSTRAINT(b));                            \
    double begin = now();                                                               \
    for (uint64_t i = 0; i < blocks; i++) {                                             \
      _Pragma("GCC unroll 8") for (int u = 0; u < 8; u++)                               \
        _Pragma("GCC unroll 16") for (int c = 0; c < CHAINS; c++)                       \
          asm volatile(TEXT : "+" CONSTRAINT(x[c]) : CONSTRAINT(a), CONSTRAINT(b));     \
    }                                                                                   \
    double end = now();                                                                 \
    for (int c = 0; c < CHAINS; c++) asm volatile("" ::CONSTRAINT(x[c]));               \
    return (end - begin) / (blocks * 8.0 * CHAINS);                                     \
  }
#define UNIT(NAME, TYPE, CONSTRAINT, TEXT)      \
  CHAINED(NAME, TYPE, CONSTRAINT, 1, TEXT)      \
  CHAINED(NAME, TYPE, CONSTRAINT, 8, TEXT)      \
  CHAINED(NAME, TYPE, CONSTRAINT, 12, TEXT)
#define UNIT_WIDE(NAME, TYPE, CONSTRAINT, TEXT) \
  UNIT(NAME, TYPE, CONSTRAINT, TEXT)            \
  CHAINED(NAME, TYPE, CONSTRAINT, 16, TEXT)

#if defined(__AVX512F__)
UNIT_WIDE(fma_fp32_512, v16, "v", "vfmadd231ps %2, %1, %0")
UNIT_WIDE(fma_fp64_512, v16, "v", "vfmadd231pd %2, %1, %0")
UNIT_WIDE(dot_bf16_512, v16, "v", "vdpbf16ps %2, %1, %0")
UNIT_WIDE(dot_int8_512, v16, "v", "vpdpbusd %2, %1, %0")
UNIT_WIDE(permute_bytes_512, v16, "v", "vpermb %0, %1, %0")
UNIT_WIDE(popcount_512, v16, "v", "vpopcntq %0, %0")
#endif
#if defined(__AVX__)
UNIT(fma_fp32_256, v8, "x", "vfmadd231ps %2, %1, %0")
UNIT(fma_fp64_256, v8, "x", "vfmadd231pd %2, %1, %0")
UNIT(dot_int8_256, v8, "x", "%{vex%} vpdpbusd %2, %1, %0")
UNIT(permute_bytes_256, v8, "x", "vpshufb %1, %0, %0")
#endif
UNIT(popcount_64, uint64_t, "r", "popcnt %0, %0")

#if defined(__AMX_TILE__)
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
struct TileConfig {
  uint8_t palette, start, reserved[14];
  uint16_t columns[16];
  uint8_t rows[16];
};

static int tiles_on() {
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return -1;
  alignas(64) TileConfig config;
  memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int t = 0; t < 8; t++) { config.columns[t] = 64; config.rows[t] = 16; }
  asm volatile("ldtilecfg %0" ::"m"(config));
  return 0;
}

// Seconds per tile product of 16 x 16 x 64 bytes; -1: the kernel grants no tiles.
#define TILES(NAME, TEXT)                                                               \
  extern "C" double unit_##NAME##_1(uint64_t blocks) {                                  \
    if (tiles_on()) return -1;                                                          \
    asm volatile("tilezero %tmm0\n tilezero %tmm6\n tilezero %tmm7");                   \
    double begin = now();                                                               \
    for (uint64_t i = 0; i < blocks * 2; i++)                                           \
      asm volatile(TEXT " %tmm7, %tmm6, %tmm0\n" TEXT " %tmm7, %tmm6, %tmm0\n"          \
                   TEXT " %tmm7, %tmm6, %tmm0\n" TEXT " %tmm7, %tmm6, %tmm0");          \
    double end = now();                                                                 \
    asm volatile("tilerelease");                                                        \
    return (end - begin) / (blocks * 8.0);                                              \
  }                                                                                     \
  extern "C" double unit_##NAME##_6(uint64_t blocks) {                                  \
    if (tiles_on()) return -1;                                                          \
    asm volatile("tilezero %tmm0\n tilezero %tmm1\n tilezero %tmm2\n tilezero %tmm3\n"  \
                 "tilezero %tmm4\n tilezero %tmm5\n tilezero %tmm6\n tilezero %tmm7");  \
    double begin = now();                                                               \
    for (uint64_t i = 0; i < blocks; i++)                                               \
      asm volatile(TEXT " %tmm7, %tmm6, %tmm0\n" TEXT " %tmm7, %tmm6, %tmm1\n"          \
                   TEXT " %tmm7, %tmm6, %tmm2\n" TEXT " %tmm7, %tmm6, %tmm3\n"          \
                   TEXT " %tmm7, %tmm6, %tmm4\n" TEXT " %tmm7, %tmm6, %tmm5");          \
    double end = now();                                                                 \
    asm volatile("tilerelease");                                                        \
    return (end - begin) / (blocks * 6.0);                                              \
  }
TILES(tile_bf16, "tdpbf16ps")
TILES(tile_int8, "tdpbssd")
#endif
#endif
