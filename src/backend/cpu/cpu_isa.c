/* Detection of the instruction-set level; see cpu_isa.h. */
#include "backend/cpu/cpu_isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char *const isa_names[CPU_ISA_COUNT] = {"scalar", "avx2", "avx512"};

#if defined(__x86_64__)
/* Not every compiler's builtin knows the name "f16c". */
static bool has_f16c(void)
{
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

/* The compilers' builtins read cpuid once and also ask xgetbv whether the operating system saves the wide registers. */
enum cpu_isa cpu_isa_best(void)
{
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return CPU_SCALAR;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
    return CPU_AVX512;
  return CPU_AVX2;
#else
  return CPU_SCALAR;
#endif
}

bool cpu_isa_prefetches(void)
{
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

bool cpu_isa_has_gfni(void)
{
#if defined(__x86_64__)
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & bit_GFNI);
#else
  return false;
#endif
}

void cpu_advise_huge(void *memory, size_t n_bytes)
{
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = ((uintptr_t)memory + page - 1) / page * page;
  const uintptr_t end = ((uintptr_t)memory + n_bytes) / page * page;
  if (end > from && end - from >= CPU_HUGE_PAGE) (void)madvise((void *)from, end - from, MADV_HUGEPAGE);
}

const char *cpu_isa_name(enum cpu_isa isa) { return isa_names[isa]; }

enum sits_status cpu_isa_choose(const char *word, enum cpu_isa *out, struct sits_error *err)
{
  if (word == NULL || strcmp(word, "auto") == 0) {
    *out = cpu_isa_best();
    return SITS_OK;
  }
  for (int isa = 0; isa < CPU_ISA_COUNT; isa++) {
    if (strcmp(word, isa_names[isa]) != 0) continue;
    if ((enum cpu_isa)isa > cpu_isa_best()) return sits_fail_param(err, SITS_UNSUPPORTED, "isa", "this processor has no %s", word);
    *out = (enum cpu_isa)isa;
    return SITS_OK;
  }
  return sits_fail_param(err, SITS_INVALID_ARGUMENT, "isa", "unknown instruction set \"%.20s\" (auto, scalar, avx2, avx512)", word);
}
