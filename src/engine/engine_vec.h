/* Passes over one row of logits, for the sampler: the same code compiled for three instruction sets, chosen at run time.
 * Sums are kept in sixteen lanes whatever the set, and products are never fused, so that every machine computes the same numbers. */
#ifndef SITS_ENGINE_ENGINE_VEC_H
#define SITS_ENGINE_ENGINE_VEC_H

#include <stdint.h>

#define ENGINE_VEC_BLOCK 1024 /* values per partial sum */

struct engine_vec {
  const char *name;
  /* Largest of x[0..n); NaN counts as -infinity. */
  float (*max)(const float *x, int32_t n);
  /* out[i] = exp((x[i] - max) * rate) (NaN gives 0), sums[b] = sum of block b; returns the sum of sums. out and sums may be NULL. */
  double (*exp_sum)(const float *x, int32_t n, float max, float rate, float *out, double *sums);
  /* Indexes i with x[i] >= cut in ascending order into ids[n]; returns how many. */
  int32_t (*collect)(const float *x, int32_t n, float cut, int32_t *ids);
};

const struct engine_vec *engine_vec_best(void);              /* for this processor */
const struct engine_vec *engine_vec_find(const char *name);  /* "base", "avx2", "avx512"; NULL when this processor lacks it */

extern const struct engine_vec engine_vec_base, engine_vec_avx2, engine_vec_avx512;

#endif
