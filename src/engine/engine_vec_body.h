/* The passes of engine_vec.h, on vectors of sixteen floats that the compiler splits for narrower sets. Included by engine_vec_base.c,
 * engine_vec_avx2.c and engine_vec_avx512.c, each compiled with its own flags. */
#ifndef SITS_ENGINE_ENGINE_VEC_BODY_H
#define SITS_ENGINE_ENGINE_VEC_BODY_H

#include <math.h>
#include <string.h>

#include "engine/engine_vec.h"

#pragma GCC diagnostic ignored "-Wpsabi" /* the vectors never cross a call that is not inlined */

#define LANES 16
typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

INLINE vec splat(float x)
{
  return (vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

static float max_of(const float *x, int32_t n)
{
  vec a = splat(-INFINITY);
  int32_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    vec p = *(const vec *)(x + i);
    ivec keep = p > a; /* false for NaN */
    a = (vec)(((ivec)p & keep) | ((ivec)a & ~keep));
  }
  float best = -INFINITY;
  for (int lane = 0; lane < LANES; lane++) best = a[lane] > best ? a[lane] : best;
  for (; i < n; i++) best = x[i] > best ? x[i] : best;
  return best;
}

/* exp for x <= 0: 2^k * p(r), Cephes' degree-5 polynomial, relative error under 2e-7; below -87 it is 0. */
INLINE vec exp_vec(vec x)
{
  ivec live = x >= splat(-87); /* false for NaN */
  x = (vec)((ivec)x & live);
  ivec k = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, ivec); /* truncates; x <= 0, so this rounds x / ln 2 to nearest */
  vec kf = __builtin_convertvector(k, vec);
  vec r = x - kf * 0.693359375f + kf * 2.12194440e-4f;
  vec y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  return (vec)((ivec)(y * (vec)((k + 127) << 23)) & live);
}

static double exp_sum(const float *x, int32_t n, float max, float rate, float *out, double *sums)
{
  double total = 0;
  for (int32_t from = 0; from < n; from += ENGINE_VEC_BLOCK) {
    int32_t end = n - from < ENGINE_VEC_BLOCK ? n : from + ENGINE_VEC_BLOCK, i = from;
    vec part = splat(0);
    for (; i + LANES <= end; i += LANES) {
      vec e = exp_vec((*(const vec *)(x + i) - max) * rate);
      if (out) *(vec *)(out + i) = e;
      part += e;
    }
    if (i < end) {
      vec last = splat(-INFINITY);
      memcpy(&last, x + i, (size_t)(end - i) * sizeof *x);
      vec e = exp_vec((last - max) * rate);
      if (out) memcpy(out + i, &e, (size_t)(end - i) * sizeof *x);
      part += e;
    }
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += part[lane];
    if (sums) sums[from / ENGINE_VEC_BLOCK] = sum;
    total += sum;
  }
  return total;
}

static int32_t collect(const float *x, int32_t n, float cut, int32_t *ids)
{
  int32_t count = 0, i = 0;
  for (; i + LANES <= n; i += LANES) {
    ivec hit = *(const vec *)(x + i) >= splat(cut);
    ivec folded = hit;
    int64_t words[8];
    memcpy(words, &folded, sizeof words);
    if ((words[0] | words[1] | words[2] | words[3] | words[4] | words[5] | words[6] | words[7]) == 0) continue;
    for (int lane = 0; lane < LANES; lane++) {
      ids[count] = i + lane;
      count += x[i + lane] >= cut;
    }
  }
  for (; i < n; i++) {
    if (x[i] >= cut) ids[count++] = i;
  }
  return count;
}

#endif
