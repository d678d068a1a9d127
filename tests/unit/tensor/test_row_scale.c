/* Scales of a row as multiples of one number: what quant_convert writes is found again, the number is the largest there is, and rows that
 * are no multiples, or hold what no kernel takes, are told apart. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/hash.h"
#include "quant/quant_weight.h"
#include "tensor/dequant.h"
#include "tensor/row_scale.h"

static float uniform(uint64_t seed, uint64_t i) { return (float)(int32_t)(hash_mix(seed, i) >> 32) / 2147483648.0F; }

static enum row_scale_kind find(const float *scales, int n, float *channel)
{
  uint16_t halves[64];
  for (int i = 0; i < n; i++) {
    halves[i] = float_to_half(scales[i]);
    if (!isnan(scales[i])) assert_true(half_to_float(halves[i]) == scales[i]);
  }
  return row_scale_find(halves, n, channel);
}

static void rows_by_hand(void **state)
{
  (void)state;
  const float least = 0x1p-24F, most = 65504.0F;
  const struct { float scales[5]; int n; enum row_scale_kind want; float channel; } cases[] = {
      {{0.75F}, 1, ROW_SCALE_POWERS, 0.75F},                            /* one scale a row */
      {{most}, 1, ROW_SCALE_POWERS, most},
      {{0.1875F, 0.1875F, 0.1875F}, 3, ROW_SCALE_POWERS, 0.1875F},
      {{1, 2, 4, 8, 16}, 5, ROW_SCALE_POWERS, 1},
      {{16, 1}, 2, ROW_SCALE_POWERS, 1},
      {{3, 12, 48}, 3, ROW_SCALE_POWERS, 3},                            /* the number itself need not be a power */
      {{2, 4, 6}, 3, ROW_SCALE_MULTIPLES, 2},                           /* the largest: not 1 */
      {{5, 10, 80}, 3, ROW_SCALE_POWERS, 5},
      {{3, 2}, 2, ROW_SCALE_MULTIPLES, 1},
      {{15, 16}, 2, ROW_SCALE_MULTIPLES, 1},
      {{17, 16}, 2, ROW_SCALE_FREE, 0},
      {{17, 1}, 2, ROW_SCALE_FREE, 0},
      {{1, 32}, 2, ROW_SCALE_FREE, 0},
      {{1, 1.0009765625F}, 2, ROW_SCALE_FREE, 0},                       /* a last bit */
      {{16, 1, 0.5F}, 3, ROW_SCALE_FREE, 0},                            /* the last one spoils it */
      {{0, 0, 0}, 3, ROW_SCALE_POWERS, 1},
      {{-0.0F}, 1, ROW_SCALE_POWERS, 1},
      {{0, 0.5F, -0.0F, 8}, 4, ROW_SCALE_POWERS, 0.5F},
      {{0, 0.5F, 1.5F}, 3, ROW_SCALE_MULTIPLES, 0.5F},
      {{-1}, 1, ROW_SCALE_FREE, 0},
      {{1, -2}, 2, ROW_SCALE_FREE, 0},
      {{-least, least}, 2, ROW_SCALE_FREE, 0},
      {{least}, 1, ROW_SCALE_POWERS, least},
      {{least * 16, least, least * 2}, 3, ROW_SCALE_POWERS, least},
      {{least * 7, least * 11}, 2, ROW_SCALE_MULTIPLES, least},         /* subnormal */
      {{least * 1023, least * 2046}, 2, ROW_SCALE_POWERS, least * 1023}, /* on either side of the least normal number */
      {{least, least * 17}, 2, ROW_SCALE_FREE, 0},
      {{most, least}, 2, ROW_SCALE_FREE, 0},
      {{INFINITY, 1}, 2, ROW_SCALE_FREE, 0},
      {{1, NAN}, 2, ROW_SCALE_FREE, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    float channel = -1;
    const enum row_scale_kind got = find(cases[i].scales, cases[i].n, &channel);
    if (got != cases[i].want) fail_msg("case %zu: kind %d", i, got);
    const float want = got == ROW_SCALE_FREE ? -1.0F : cases[i].channel;
    if (channel != want) fail_msg("case %zu: channel %g", i, (double)channel);
  }
}

/* Any number and any factors, against the definition: of all numbers scale / 1 .. 16 the largest that divides every scale. */
static void rows_at_random(void **state)
{
  (void)state;
  int n_of[3] = {0};
  for (uint64_t row = 0; row < 20000; row++) {
    const int n = 1 + (int)(hash_mix(1, row) % 40), spoilt = (int)(hash_mix(2, row) % 4);
    const float base = ldexpf((float)(64 + hash_mix(3, row) % 64), (int)(hash_mix(4, row) % 26) - 24);
    float scales[40], least = INFINITY, want = 0, got = -1;
    bool is_powers = true;
    for (int i = 0; i < n; i++) {
      const uint64_t draw = hash_mix(5 + row, (uint64_t)i);
      const int m = row & 1 ? (int)(draw % 17) : 1 << draw % 5;
      scales[i] = spoilt == 3 && i == n - 1 ? half_to_float(float_to_half(base * 1.37F)) : base * (float)m;
      if (scales[i] > 0 && scales[i] < least) least = scales[i];
    }
    for (int k = 1; k <= 16 && want == 0 && least < INFINITY; k++) {
      bool fits = true;
      for (int i = 0; i < n; i++) {
        const double m = (double)scales[i] * k / (double)least;
        fits &= m == rint(m) && m <= 16;
      }
      if (fits) want = least / (float)k;
    }
    for (int i = 0; i < n && want > 0; i++) {
      const int m = (int)rint((double)scales[i] / (double)want);
      is_powers &= (m & (m - 1)) == 0;
    }
    const enum row_scale_kind kind = find(scales, n, &got),
                              wanted = least == INFINITY ? ROW_SCALE_POWERS : want == 0 ? ROW_SCALE_FREE
                                       : is_powers ? ROW_SCALE_POWERS : ROW_SCALE_MULTIPLES;
    if (kind != wanted) fail_msg("row %d: kind %d, not %d", (int)row, kind, wanted);
    if (kind != ROW_SCALE_FREE && least < INFINITY && got != want) fail_msg("row %d: %g, not %g", (int)row, (double)got, (double)want);
    n_of[kind]++;
  }
  for (int k = 0; k < 3; k++) assert_true(n_of[k] > 1000);
}

/* An address that is no multiple of two. */
static void scales_lie_anywhere(void **state)
{
  (void)state;
  uint8_t bytes[5] = {0xFF};
  const uint16_t halves[2] = {float_to_half(3.0F), float_to_half(4.5F)};
  float channel = 0;
  memcpy(bytes + 1, halves, sizeof halves);
  assert_int_equal(row_scale_find(bytes + 1, 2, &channel), ROW_SCALE_MULTIPLES);
  assert_true(channel == 1.5F);
}

/* Rows of every size of number, with and without groups of zeros. */
static void what_quant_convert_writes(void **state)
{
  (void)state;
  enum { ROWS = 96, K = 1024, GROUP = 128, N = K / GROUP };
  static float x[ROWS * K];
  for (size_t i = 0; i < ROWS * K; i++) {
    const int row = (int)(i / K), group = (int)(i % K / GROUP);
    x[i] = uniform(5, i) * powf(4.0F, uniform(6, i / GROUP)) * ldexpf(1, row % 24 - 20);
    if (row % 5 == 0 && group % 3 == 0) x[i] = 0;
    if (row == 7) x[i] = 0;
  }
  const struct sits_utd source = {.name = "w", .dtype = SITS_DTYPE_F32, .n_dims = 2, .dims = {ROWS, K}, .data = x, .n_bytes = sizeof x};
  int n_of[3][3] = {{0}};
  for (int c = 0; c < 6; c++) {
    const struct quant_spec spec = {.dtype = SITS_DTYPE_I4, .group = GROUP, .clip = c & 1, .scales = (enum quant_scales)(c / 2)};
    struct quant_tensor made;
    struct sits_error err = {0};
    if (quant_convert(&source, &spec, NULL, &made, &err)) fail_msg("%s", err.text);
    for (int r = 0; r < ROWS; r++) {
      const uint16_t *scales = (const uint16_t *)made.utd.scales + r * N;
      float channel = -1;
      const enum row_scale_kind kind = row_scale_find(scales, N, &channel);
      n_of[c / 2][kind]++;
      for (int g = 0; g < N && kind != ROW_SCALE_FREE; g++) {
        const double m = (double)half_to_float(scales[g]) / (double)channel;
        assert_true(m == rint(m) && m >= 0 && m <= ROW_SCALE_MOST);
      }
    }
    quant_tensor_fini(&made);
  }
  assert_int_equal(n_of[QUANT_SCALES_POWERS][ROW_SCALE_POWERS], 2 * ROWS);
  assert_int_equal(n_of[QUANT_SCALES_MULTIPLES][ROW_SCALE_FREE], 0);
  assert_true(n_of[QUANT_SCALES_MULTIPLES][ROW_SCALE_MULTIPLES] > ROWS);
  assert_true(n_of[QUANT_SCALES_F16][ROW_SCALE_FREE] > ROWS); /* but for subnormal ones, which have few bits */
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(rows_by_hand), cmocka_unit_test(rows_at_random),
                                     cmocka_unit_test(scales_lie_anywhere), cmocka_unit_test(what_quant_convert_writes)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
