/* Rotations are orthonormal and, where a Hadamard matrix of the order is known, spread every unit vector evenly; activations are rounded by
 * their definition. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "quant/quant_act.h"
#include "quant/quant_rotate.h"
#include "ref/ref_linear.h"
#include "ref/ref_ops.h"

#define MOST 1536

static float matrix[MOST][MOST], work[MOST];

/* Columns of Q as the rows of `matrix`. */
static void expand(const struct quant_rotation *r, int32_t n)
{
  for (int32_t i = 0; i < n; i++) {
    memset(matrix[i], 0, sizeof matrix[i]);
    matrix[i][i] = 1;
    quant_rotate(r, matrix[i], n, work);
  }
}

static void rotations_are_orthonormal(void **state)
{
  (void)state;
  static const struct { int32_t n; bool is_full; } cases[] = {{1, true}, {2, true}, {8, true}, {12, true}, {20, true}, {28, true},
                                                             {36, true}, {44, true}, {60, true}, {64, true}, {76, true}, {140, true},
                                                             {576, true}, {7, false}, {92, false}, {172, false}};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
    for (uint64_t seed = 0; seed < 2; seed++) {
      const int32_t n = cases[c].n;
      struct quant_rotation *r;
      struct sits_error err = {0};
      assert_int_equal(quant_rotation_create(n, seed, &r, &err), SITS_OK);
      expand(r, n);
      for (int32_t i = 0; i < n; i++)
        for (int32_t j = 0; j <= i; j++) {
          double dot = 0;
          for (int32_t k = 0; k < n; k++) dot += (double)matrix[i][k] * (double)matrix[j][k];
          if (fabs(dot - (i == j)) > 1e-5) fail_msg("order %d seed %d: rows %d and %d give %g", n, (int)seed, i, j, dot);
        }
      for (int32_t i = 0; i < n && cases[c].is_full; i++)
        for (int32_t k = 0; k < n; k++)
          if (fabsf(fabsf(matrix[i][k]) * sqrtf((float)n) - 1) > 1e-4F)
            fail_msg("order %d: element %d %d is %g", n, i, k, (double)matrix[i][k]);
      quant_rotation_destroy(r);
    }
}

static void seed_zero_is_walsh_hadamard(void **state)
{
  (void)state;
  struct quant_rotation *r;
  struct sits_error err = {0};
  float x[256];
  double want[256];
  assert_int_equal(quant_rotation_create(128, 0, &r, &err), SITS_OK);
  for (int i = 0; i < 256; i++) want[i] = (double)(x[i] = sinf((float)i * 1.7F));
  quant_rotate(r, x, 256, work);
  ref_hadamard(want, 128);
  ref_hadamard(want + 128, 128);
  for (int i = 0; i < 256; i++) assert_true(fabs((double)x[i] - want[i]) < 1e-5);
  quant_rotation_destroy(r);
}

static void seeds_differ_and_repeat(void **state)
{
  (void)state;
  float x[3][64];
  struct sits_error err = {0};
  const uint64_t seeds[3] = {5, 6, 5};
  for (int s = 0; s < 3; s++) {
    struct quant_rotation *r;
    assert_int_equal(quant_rotation_create(64, seeds[s], &r, &err), SITS_OK);
    for (int i = 0; i < 64; i++) x[s][i] = (float)i;
    quant_rotate(r, x[s], 64, work);
    quant_rotation_destroy(r);
  }
  assert_memory_equal(x[0], x[2], sizeof x[0]);
  assert_true(memcmp(x[0], x[1], sizeof x[0]) != 0);
}

static void allocation_failures(void **state)
{
  (void)state;
#ifndef SITS_DEBUG_CHECKS
  skip(); /* this build counts no allocations */
#endif
  for (uint64_t n = 1;; n++) {
    struct quant_rotation *r = NULL;
    struct sits_error err = {0};
    const int64_t blocks = mem_live_blocks();
    mem_fault_arm(n);
    const enum sits_status status = quant_rotation_create(36, 1, &r, &err);
    const int fired = mem_fault_fired();
    mem_fault_arm(0);
    if (status == SITS_OK) quant_rotation_destroy(r);
    assert_int_equal(status, fired ? SITS_NOMEM : SITS_OK);
    assert_int_equal(mem_live_blocks(), blocks);
    if (!fired) break;
  }
}

enum { K = 128 };

static void activations_follow_their_definition(void **state)
{
  (void)state;
  static const int32_t outliers[] = {3, 31, 32, 100};
  float x[K], got[K], want[K];
  for (int i = 0; i < K; i++) x[i] = sinf((float)i * 2.3F) * (i % 37 == 3 ? 40.0F : 1.0F) + (i >= 64 && i < 96 ? 3.0F : 0.0F);
  quant_act_row(&(struct act_format){.kind = ACT_FLOAT}, x, K, got);
  assert_memory_equal(x, got, sizeof x);
  quant_act_row(&(struct act_format){.kind = ACT_INT8}, x, K, got);
  ref_act_q8_g32(x, K, want);
  for (int i = 0; i < K; i++) assert_true(fabsf(got[i] - want[i]) < 1e-4F);
  const struct act_format four = {.kind = ACT_INT4, .n_outliers = 4, .outliers = outliers};
  quant_act_row(&four, x, K, got);
  float most = 0;
  for (int i = 0; i < 4; i++) most = fmaxf(most, fabsf(x[outliers[i]]));
  for (int g = 0, o = 0; g < K; g += 32) {
    float lo = 0, hi = 0;
    for (int i = g; i < g + 32; i++) {
      if (i == 3 || i == 31 || i == 32 || i == 100) continue;
      lo = fminf(lo, x[i]);
      hi = fmaxf(hi, x[i]);
    }
    const float step = (hi - lo) / 15;
    for (int i = g; i < g + 32; i++) {
      const bool is_outlier = o < 4 && outliers[o] == i;
      o += is_outlier;
      const float limit = is_outlier ? most / 127 * 0.5001F : step * 1.0001F; /* an end may lose half a step to the zero point */
      if (fabsf(got[i] - x[i]) > limit) fail_msg("channel %d: %g became %g", i, (double)x[i], (double)got[i]);
      if (!is_outlier) assert_true(fabsf(got[i] / step - rintf(got[i] / step)) < 1e-3F);
    }
  }
  quant_act_row(&four, x, K, x); /* in place */
  assert_memory_equal(x, got, sizeof x);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(rotations_are_orthonormal),     cmocka_unit_test(seed_zero_is_walsh_hadamard),
      cmocka_unit_test(seeds_differ_and_repeat),       cmocka_unit_test(allocation_failures),
      cmocka_unit_test(activations_follow_their_definition),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
