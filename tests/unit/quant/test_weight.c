/* Rounding of weights: grids that come along are kept to the bit, rounded values lie next to their originals, errors are those that theory
 * expects, GPTQ loses less of the output than rounding to nearest, and what cannot be done is refused by name. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/hash.h"
#include "base/mem.h"
#include "quant/quant_gptq.h"
#include "quant/quant_weight.h"
#include "tensor/dequant.h"

enum { ROWS = 12, K = 256 };

static float uniform(uint64_t seed, uint64_t i) { return (float)(int32_t)(hash_mix(seed, i) >> 32) / 2147483648.0F; }

static struct sits_utd floats(float *x, int64_t rows, int64_t k)
{
  return (struct sits_utd){.name = "w", .dtype = SITS_DTYPE_F32, .n_dims = 2, .dims = {rows, k}, .data = x,
                           .n_bytes = (size_t)(rows * k) * sizeof *x};
}

/* Random blocks with finite scales: the bytes of GGUF's formats. */
static struct sits_utd blocks(enum sits_dtype dtype, unsigned char *bytes)
{
  struct sits_utd utd = {.name = "w", .dtype = dtype, .n_dims = 2, .dims = {ROWS, K}, .data = bytes};
  const size_t block = (size_t)sits_dtype_info(dtype)->block_bytes;
  utd.n_bytes = (size_t)sits_utd_row_major_bytes(&utd);
  for (size_t i = 0; i < utd.n_bytes; i++) bytes[i] = (unsigned char)hash_mix(7 + dtype, i);
  for (size_t at = 0; at < utd.n_bytes; at += block) {
    const uint16_t d = float_to_half(0.01F + 0.1F * fabsf(uniform(1, at))), m = float_to_half(uniform(2, at));
    memcpy(bytes + at, &d, 2);
    if (dtype == SITS_DTYPE_Q4_1 || dtype == SITS_DTYPE_Q5_1 || dtype == SITS_DTYPE_Q4_K) memcpy(bytes + at + 2, &m, 2);
  }
  return utd;
}

static void grids_are_kept(void **state)
{
  (void)state;
  static const struct { enum sits_dtype from, wish, want; bool has_min; } cases[] = {
      {SITS_DTYPE_Q4_0, SITS_DTYPE_I4, SITS_DTYPE_I4, false}, {SITS_DTYPE_Q4_1, SITS_DTYPE_I4, SITS_DTYPE_I4, true},
      {SITS_DTYPE_Q8_0, SITS_DTYPE_I8, SITS_DTYPE_I8, false}, {SITS_DTYPE_Q4_K, SITS_DTYPE_I4, SITS_DTYPE_Q4_K, false},
      {SITS_DTYPE_Q4_0, SITS_DTYPE_I8, SITS_DTYPE_I8, false}, {SITS_DTYPE_Q4_1, SITS_DTYPE_I8, SITS_DTYPE_I8, true},
      {SITS_DTYPE_Q5_0, SITS_DTYPE_I8, SITS_DTYPE_I8, false}, {SITS_DTYPE_Q5_1, SITS_DTYPE_I8, SITS_DTYPE_I8, true}};
  static unsigned char bytes[ROWS * K * 2];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const struct sits_utd source = blocks(cases[i].from, bytes);
    const struct quant_spec spec = {.dtype = cases[i].wish, .group = 32, .has_minimum = true, .keep_grid = true};
    struct quant_tensor made;
    struct sits_error err = {0};
    if (quant_convert(&source, &spec, NULL, &made, &err)) fail_msg("%s", err.text);
    assert_int_equal(made.utd.dtype, cases[i].want);
    assert_true(made.is_kept);
    assert_true((made.utd.minimums != NULL) == cases[i].has_min);
    for (int r = 0; r < ROWS; r++) {
      float want[K], got[K];
      dequant_row(source.dtype, bytes + (size_t)r * source.n_bytes / ROWS, K, want);
      dequant_tensor_row(&made.utd, r, got);
      assert_memory_equal(want, got, sizeof want);
    }
    quant_tensor_fini(&made);
  }
}

/* Every spec: values stay within half a step of their originals (where nothing is clipped), and the Frobenius error is the expected one. */
static void rounding_is_to_nearest(void **state)
{
  (void)state;
  static float x[64 * K];
  for (size_t i = 0; i < 64 * K; i++) x[i] = uniform(5, i) + 0.3F;
  for (int c = 0; c < 12; c++) {
    const struct sits_utd source = floats(x, 64, K);
    const struct quant_spec spec = {.dtype = c & 1 ? SITS_DTYPE_I8 : SITS_DTYPE_I4, .group = (int[]){0, 32, 128}[c / 4],
                                    .has_minimum = c & 2};
    struct quant_tensor made;
    struct sits_error err = {0};
    if (quant_convert(&source, &spec, NULL, &made, &err)) fail_msg("%s", err.text);
    assert_int_equal(made.utd.quant, spec.group ? SITS_QUANT_GROUP : SITS_QUANT_CHANNEL);
    double sum = 0, squares = 0;
    const int group = spec.group ? spec.group : K;
    for (int r = 0; r < 64; r++) {
      float got[K];
      dequant_tensor_row(&made.utd, r, got);
      for (int i = 0; i < K; i++) {
        const float step = half_to_float(((const uint16_t *)made.utd.scales)[r * (K / group) + i / group]);
        const double e = (double)got[i] - (double)x[r * K + i];
        /* half a step, and what f16 scales and minimums may be off at the far end of the range */
        if (fabs(e) > 0.5 * (double)step * (spec.dtype == SITS_DTYPE_I8 ? 1.3 : 1.03)) fail_msg("case %d: error %g of step %g", c, e, step);
        sum += e * e;
        squares += (double)x[r * K + i] * (double)x[r * K + i];
      }
    }
    assert_true(fabs(sqrt(sum) - made.error) < 1e-6 * made.error);
    assert_true(fabs(sqrt(squares) - made.norm) < 1e-6 * made.norm);
    /* uniform values: the error is uniform in a step; 16,384 values, so its root mean square is known to about 1 % */
    if (fabs(made.error / made.bound - 1) > 0.04) fail_msg("case %d: error %g, expected %g", c, made.error, made.bound);
    if (spec.dtype == SITS_DTYPE_I8) assert_true(made.error < 0.008 * made.norm);
    quant_tensor_fini(&made);
  }
}

/* Every scale of a row is 1..16 times one number, to the bit, and values lie within half a step where nothing is clipped. Powers err more
 * than multiples, those more than free scales where nobody searches; with clipping nobody errs more than without. */
static void scales_are_multiples(void **state)
{
  (void)state;
  static float x[64 * K];
  double errors[2][2][3];
  for (size_t i = 0; i < 64 * K; i++) x[i] = (uniform(5, i) + 0.3F) * powf(4.0F, uniform(6, i / 32)) * ldexpf(1, (int)(i / K % 13) - 8);
  for (int c = 0; c < 12; c++) {
    const struct quant_spec spec = {.dtype = SITS_DTYPE_I4, .group = 32, .has_minimum = c & 1, .clip = c & 2,
                                    .scales = (enum quant_scales)(c / 4)};
    const struct sits_utd source = floats(x, 64, K);
    struct quant_tensor made;
    struct sits_error err = {0};
    if (quant_convert(&source, &spec, NULL, &made, &err)) fail_msg("%s", err.text);
    errors[c & 1][c >> 1 & 1][c / 4] = made.error;
    for (int r = 0; r < 64 && spec.scales != QUANT_SCALES_F16; r++) {
      const uint16_t *scales = (const uint16_t *)made.utd.scales + r * (K / 32);
      float got[K], channel = 0;
      dequant_tensor_row(&made.utd, r, got);
      for (int n = 1; n <= 16 && channel == 0; n++) { /* the row's scale is the least one over some whole number */
        float least = INFINITY;
        bool all = true;
        for (int g = 0; g < K / 32; g++) least = fminf(least, half_to_float(scales[g]));
        for (int g = 0; g < K / 32; g++) {
          const double m = (double)half_to_float(scales[g]) / ((double)least / n);
          all &= m == rint(m) && m >= 1 && m <= 16 && (spec.scales == QUANT_SCALES_MULTIPLES || ((int)m & ((int)m - 1)) == 0);
        }
        if (all) channel = least / (float)n;
      }
      if (channel == 0) fail_msg("case %d, row %d: scales are no multiples", c, r);
      for (int i = 0; i < K && !spec.clip; i++) {
        const double step = (double)half_to_float(scales[i / 32]), e = fabs((double)got[i] - (double)x[r * K + i]);
        if (e > 0.52 * step) fail_msg("case %d: error %g of step %g", c, e, step);
      }
    }
    quant_tensor_fini(&made);
  }
  for (int c = 0; c < 4; c++) {
    const double *e = errors[c & 1][c >> 1];
    const bool clips = c >> 1; /* then both search, in different steps */
    if (!((clips || e[0] < e[1]) && e[1] < e[2])) fail_msg("case %d: errors %g free, %g multiples, %g powers", c, e[0], e[1], e[2]);
    if (!(e[1] < 1.25 * e[0])) fail_msg("case %d: multiples err %g, free scales %g", c, e[1], e[0]);
  }
  for (int k = 0; k < 3; k++) assert_true(errors[0][1][k] <= errors[0][0][k] && errors[1][1][k] <= errors[1][0][k]);
}

static void clipping_pays_with_outliers(void **state)
{
  (void)state;
  static float x[8 * K];
  for (size_t i = 0; i < 8 * K; i++) {
    x[i] = 0; /* a sum of uniform values: nearly normal, with tails worth clipping */
    for (uint64_t k = 0; k < 6; k++) x[i] += uniform(40 + k, i);
  }
  for (int has_min = 0; has_min < 2; has_min++) {
    const struct sits_utd source = floats(x, 8, K);
    struct quant_spec spec = {.dtype = SITS_DTYPE_I4, .group = 128, .has_minimum = has_min};
    struct quant_tensor plain, clipped;
    struct sits_error err = {0};
    assert_int_equal(quant_convert(&source, &spec, NULL, &plain, &err), SITS_OK);
    spec.clip = true;
    assert_int_equal(quant_convert(&source, &spec, NULL, &clipped, &err), SITS_OK);
    assert_true(clipped.error < 0.97 * plain.error);
    quant_tensor_fini(&plain);
    quant_tensor_fini(&clipped);
  }
}

static void shapes_that_do_not_divide(void **state)
{
  (void)state;
  static float x[ROWS * 576];
  struct sits_error err = {0};
  struct quant_tensor made;
  for (size_t i = 0; i < sizeof x / sizeof *x; i++) x[i] = uniform(9, i);
  struct quant_spec spec = {.dtype = SITS_DTYPE_I4, .group = 128, .has_minimum = true};
  struct sits_utd source = floats(x, ROWS, 576);
  assert_int_equal(quant_convert(&source, &spec, NULL, &made, &err), SITS_OK);
  assert_int_equal(made.utd.group_size, 64); /* 576 = 9 x 64 */
  quant_tensor_fini(&made);
  source = floats(x, ROWS, 172); /* no multiple of 32: floats */
  assert_int_equal(quant_convert(&source, &spec, NULL, &made, &err), SITS_OK);
  assert_int_equal(made.utd.dtype, SITS_DTYPE_F16);
  assert_true(made.error < 0x1p-11 * made.norm && made.error > 0);
  quant_tensor_fini(&made);
}

static void bad_values_are_named(void **state)
{
  (void)state;
  static float x[ROWS * K];
  for (int c = 0; c < 4; c++) {
    memset(x, 0, sizeof x);
    x[700] = c < 2 ? NAN : 1e30F;
    const struct sits_utd source = floats(x, ROWS, K);
    const struct quant_spec spec = {.dtype = c % 2 ? SITS_DTYPE_F16 : SITS_DTYPE_I4, .group = 32};
    struct quant_tensor made;
    struct sits_error err = {0};
    assert_int_equal(quant_convert(&source, &spec, NULL, &made, &err), SITS_FORMAT);
    assert_string_equal(err.param, "w");
  }
  for (int c = 0; c < 6; c++) { /* steps of 65,536 and more, as a row's scale times 16 */
    memset(x, 0, sizeof x);
    x[700] = 6e5F;
    const struct sits_utd source = floats(x, ROWS, K);
    const struct quant_spec spec = {.dtype = SITS_DTYPE_I4, .group = 32, .has_minimum = false, .clip = c & 1,
                                    .scales = (enum quant_scales)(c / 2)};
    struct quant_tensor made;
    struct sits_error err = {0};
    if (quant_convert(&source, &spec, NULL, &made, &err) != SITS_FORMAT) fail_msg("case %d is taken", c);
    assert_non_null(strstr(err.text, "a scale does not fit"));
  }
}

/* What passes unchanged is looked at too: halves as they come, blocks with a scale that is none. */
static void bad_values_that_pass_are_named(void **state)
{
  (void)state;
  static unsigned char bytes[ROWS * K * 2];
  static const struct { enum sits_dtype from, wish; size_t at; } cases[] = {
      {SITS_DTYPE_F16, SITS_DTYPE_F16, 2 * 700}, {SITS_DTYPE_BF16, SITS_DTYPE_F16, 2 * 700}, {SITS_DTYPE_Q4_0, SITS_DTYPE_I4, 18 * 20},
      {SITS_DTYPE_Q4_K, SITS_DTYPE_I4, 144 * 2}, {SITS_DTYPE_Q8_0, SITS_DTYPE_I8, 34 * 20}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int is_bad = 0; is_bad < 2; is_bad++) {
      const uint16_t infinite = cases[i].from == SITS_DTYPE_BF16 ? 0x7F80 : 0x7C00;
      const struct sits_utd source = blocks(cases[i].from, bytes);
      if (cases[i].from <= SITS_DTYPE_BF16) memset(bytes, 0, sizeof bytes);
      if (is_bad) memcpy(bytes + cases[i].at, &infinite, 2);
      const struct quant_spec spec = {.dtype = cases[i].wish, .group = 32, .keep_grid = true};
      struct quant_tensor made;
      struct sits_error err = {0};
      const enum sits_status status = quant_convert(&source, &spec, NULL, &made, &err);
      if (status != (is_bad ? SITS_FORMAT : SITS_OK)) fail_msg("case %zu: %d '%s'", i, status, err.text);
      if (is_bad) assert_string_equal(err.param, "w");
      else quant_tensor_fini(&made);
    }
}

/* Rounded to nearest, to multiples of a row's scale, copied as floats: the same bytes, norms and faults from one thread as from many. */
static void threads_change_nothing(void **state)
{
  (void)state;
  enum { MANY_ROWS = 150, WIDTH = 96 };
  static float x[MANY_ROWS * WIDTH];
  for (uint64_t i = 0; i < MANY_ROWS * WIDTH; i++) x[i] = uniform(71, i);
  const struct sits_utd source = floats(x, MANY_ROWS, WIDTH);
  for (int c = 0; c < 4; c++) {
    struct quant_tensor made[2];
    struct sits_error err[2] = {0};
    enum sits_status status[2];
    if (c == 3) x[40 * WIDTH] = 1e30F, x[140 * WIDTH] = NAN;
    for (int k = 0; k < 2; k++) {
      const struct quant_spec spec = {.dtype = c == 1 ? SITS_DTYPE_F16 : SITS_DTYPE_I4, .group = 32, .has_minimum = true, .clip = c == 0,
                                      .scales = c == 2 ? QUANT_SCALES_POWERS : QUANT_SCALES_F16, .n_threads = k ? 7 : 0};
      status[k] = quant_convert(&source, &spec, NULL, &made[k], &err[k]);
    }
    assert_int_equal(status[0], c == 3 ? SITS_FORMAT : SITS_OK);
    assert_int_equal(status[1], status[0]);
    assert_string_equal(err[1].text, err[0].text);
    if (status[0]) continue;
    assert_memory_equal(made[0].data, made[1].data, made[0].utd.n_bytes);
    if (made[0].scales) assert_memory_equal(made[0].scales, made[1].scales, MANY_ROWS * WIDTH / 32 * 2);
    assert_memory_equal(&made[0].norm, &made[1].norm, 3 * sizeof made[0].norm);
    for (int k = 0; k < 2; k++) quant_tensor_fini(&made[k]);
  }
}

static void allocation_failures(void **state)
{
  (void)state;
#ifndef SITS_DEBUG_CHECKS
  skip(); /* this build counts no allocations */
#endif
  static unsigned char bytes[ROWS * K * 2];
  static float x[ROWS * K];
  const struct sits_utd sources[2] = {blocks(SITS_DTYPE_Q4_1, bytes), floats(x, ROWS, K)};
  for (int c = 0; c < 2; c++)
    for (uint64_t n = 1;; n++) {
      const struct quant_spec spec = {.dtype = SITS_DTYPE_I4, .group = 32, .has_minimum = true, .keep_grid = true};
      const int64_t before = mem_live_blocks();
      struct quant_tensor made;
      struct sits_error err = {0};
      mem_fault_arm(n);
      const enum sits_status status = quant_convert(&sources[c], &spec, NULL, &made, &err);
      const int fired = mem_fault_fired();
      mem_fault_arm(0);
      if (status == SITS_OK) quant_tensor_fini(&made);
      assert_int_equal(mem_live_blocks(), before);
      if (!fired) break;
      assert_int_equal(status, SITS_NOMEM);
    }
}

/* ---- GPTQ ---- */

enum { N = 64, TOKENS = 256 };

/* Inputs with strongly correlated channels. */
static void make_inputs(float *x)
{
  for (int t = 0; t < TOKENS; t++)
    for (int c = 0; c < N; c++) x[t * N + c] = uniform(60, (uint64_t)(t * 8 + c % 8)) + 0.2F * uniform(61, (uint64_t)(t * N + c));
}

static double output_error(const float *x, const float *w, const struct quant_tensor *made, int64_t rows)
{
  double sum = 0;
  for (int64_t r = 0; r < rows; r++) {
    float got[N];
    dequant_tensor_row(&made->utd, r, got);
    for (int t = 0; t < TOKENS; t++) {
      double e = 0;
      for (int c = 0; c < N; c++) e += ((double)got[c] - (double)w[r * N + c]) * (double)x[t * N + c];
      sum += e * e;
    }
  }
  return sqrt(sum);
}

static void gptq_loses_less_output(void **state)
{
  (void)state;
  static float x[TOKENS * N], w[32 * N], h[N * N];
  struct quant_hessian *hessian = NULL;
  struct quant_tensor nearest, gptq;
  struct sits_error err = {0};
  make_inputs(x);
  for (int i = 0; i < 32 * N; i++) w[i] = uniform(70, (uint64_t)i);
  for (int i = 0; i < N; i++)
    for (int j = i; j < N; j++)
      for (int t = 0; t < TOKENS; t++) h[i * N + j] += x[t * N + i] * x[t * N + j];
  if (quant_hessian_create(h, N, &hessian, &err)) fail_msg("%s", err.text);
  const struct sits_utd source = floats(w, 32, N);
  const struct quant_spec spec = {.dtype = SITS_DTYPE_I4, .group = 32, .has_minimum = true};
  assert_int_equal(quant_convert(&source, &spec, NULL, &nearest, &err), SITS_OK);
  assert_int_equal(quant_convert(&source, &spec, hessian, &gptq, &err), SITS_OK);
  const double a = output_error(x, w, &nearest, 32), b = output_error(x, w, &gptq, 32);
  if (!(b < 0.6 * a)) fail_msg("output error %g by GPTQ, %g to nearest", b, a);
  assert_true(gptq.error > nearest.error); /* it pays with the weights' own error */
  quant_tensor_fini(&nearest);
  quant_tensor_fini(&gptq);
  quant_hessian_destroy(hessian);
}

/* U^T U H = I for the damped H, and with H = I GPTQ is rounding to nearest. */
static void factor_is_the_inverse(void **state)
{
  (void)state;
  static float x[TOKENS * N], h[N * N];
  static double damped[N][N];
  struct quant_hessian *hessian = NULL;
  struct sits_error err = {0};
  double mean = 0;
  make_inputs(x);
  for (int i = 0; i < N; i++)
    for (int j = i; j < N; j++) {
      for (int t = 0; t < TOKENS; t++) h[i * N + j] += x[t * N + i] * x[t * N + j];
      damped[i][j] = damped[j][i] = (double)h[i * N + j];
    }
  for (int i = 0; i < N; i++) mean += damped[i][i] / N;
  for (int i = 0; i < N; i++) damped[i][i] += 0.01 * mean;
  assert_int_equal(quant_hessian_create(h, N, &hessian, &err), SITS_OK);
  for (int i = 0; i < N; i++)
    for (int j = 0; j < N; j++) {
      double sum = 0; /* (U^T U damped)[i][j] */
      for (int k = 0; k < N; k++) {
        double inverse = 0;
        for (int m = 0; m < N; m++) inverse += (double)hessian->upper[m * N + i] * (double)hessian->upper[m * N + k];
        sum += inverse * damped[k][j];
      }
      if (fabs(sum - (i == j)) > 1e-3) fail_msg("[%d][%d] is %g", i, j, sum);
      if (j < i) assert_true(hessian->upper[i * N + j] == 0);
    }
  quant_hessian_destroy(hessian);

  memset(h, 0, sizeof h);
  for (int i = 0; i < N; i++) h[i * N + i] = 1;
  assert_int_equal(quant_hessian_create(h, N, &hessian, &err), SITS_OK);
  for (int r = 0; r < 20; r++) {
    float row[N], copy[N];
    struct quant_grid grids[2];
    int32_t q[N];
    for (int i = 0; i < N; i++) copy[i] = row[i] = uniform(80 + (uint64_t)r, (uint64_t)i);
    quant_gptq_row(hessian, row, 32, &(struct quant_rule){.bits = 4, .has_minimum = true}, grids, q);
    for (int i = 0; i < N; i++) assert_int_equal(q[i], quant_round(&grids[i / 32], copy[i]));
  }
  quant_hessian_destroy(hessian);

  memset(h, 0, sizeof h);
  assert_int_equal(quant_hessian_create(h, N, &hessian, &err), SITS_FORMAT);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(grids_are_kept),          cmocka_unit_test(rounding_is_to_nearest), cmocka_unit_test(clipping_pays_with_outliers),
      cmocka_unit_test(scales_are_multiples),    cmocka_unit_test(shapes_that_do_not_divide),
      cmocka_unit_test(bad_values_are_named),  cmocka_unit_test(bad_values_that_pass_are_named),
         cmocka_unit_test(threads_change_nothing), cmocka_unit_test(allocation_failures),
      cmocka_unit_test(gptq_loses_less_output),  cmocka_unit_test(factor_is_the_inverse)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
