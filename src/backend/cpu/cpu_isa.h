/* Instruction-set levels of the CPU backend. Everything vectorised exists at each level behind one table of function pointers, and the
 * level is chosen once, when the backend is opened; code of a higher level never runs below it. */
#ifndef SITS_BACKEND_CPU_CPU_ISA_H
#define SITS_BACKEND_CPU_CPU_ISA_H

#include <stdbool.h>
#include <stddef.h>

#include "sits2026/status.h"

enum cpu_isa {
  CPU_SCALAR,   /* plain C */
  CPU_AVX2,     /* AVX2, FMA, F16C */
  CPU_AVX512,   /* the above and AVX-512 F BW DQ VL VNNI */
  CPU_ISA_COUNT
};

/* The highest level that this processor and its operating system run. Thread-safe. */
enum cpu_isa cpu_isa_best(void);

/* Whether a kernel that reads one long stream should prefetch along it by hand: true on Intel, whose streams of a few loads in flight
 * per core fall short of the memory (bench/NOTES.md: a third of the decode rate), false elsewhere, where the instructions only take the
 * place of loads. Thread-safe. */
bool cpu_isa_prefetches(void);

/* Whether bytes can be multiplied by bit matrices (GFNI), which CPU_AVX512 does not imply. Thread-safe. */
bool cpu_isa_has_gfni(void);

#define CPU_HUGE_PAGE ((size_t)2 << 20)
/* Ask for huge pages in what of the memory is whole pages, if that is a huge one at least. Advice only: without them kernels are slower,
 * not wrong. To be called before the memory is first written. Thread-safe. */
void cpu_advise_huge(void *memory, size_t n_bytes);

const char *cpu_isa_name(enum cpu_isa isa); /* "scalar", "avx2", "avx512" */

/* NULL or "auto": the best. SITS_INVALID_ARGUMENT for an unknown word, SITS_UNSUPPORTED for a level this machine lacks. */
enum sits_status cpu_isa_choose(const char *word, enum cpu_isa *out, struct sits_error *err) SITS_MUST_CHECK;

#endif
