/* Which of the compiled passes this processor can run. */
#include "engine/engine_vec.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

static bool has_avx2(void)
{
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_avx512(void)
{
  /* What *_avx512.c files are compiled for. */
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

const struct engine_vec *engine_vec_find(const char *name)
{
  if (strcmp(name, "base") == 0) return &engine_vec_base;
  if (strcmp(name, "avx2") == 0) return has_avx2() ? &engine_vec_avx2 : NULL;
  if (strcmp(name, "avx512") == 0) return has_avx512() ? &engine_vec_avx512 : NULL;
  return NULL;
}

const struct engine_vec *engine_vec_best(void)
{
  return has_avx512() ? &engine_vec_avx512 : has_avx2() ? &engine_vec_avx2 : &engine_vec_base;
}
