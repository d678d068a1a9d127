/* The neutral weight layout and the activation formats on every instruction-set level: the same bits as the GGUF blocks or the float
 * weights that they equal, and ACT_INT4 against its definition (tensor/act_format.h) in double precision. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu_act.h"
#include "backend/cpu/cpu_isa.h"
#include "base/hash.h"
#include "base/mem.h"
#include "tensor/dequant.h"

enum { ROWS = 77, K = 192, MOST_TOKENS = 33, LEVELS = 3 };

static const enum cpu_isa levels[LEVELS] = {CPU_SCALAR, CPU_AVX2, CPU_AVX512};
static const int32_t batches[] = {1, 2, 3, 8, MOST_TOKENS};

static float uniform(uint64_t seed, uint64_t i) { return (float)(int32_t)(hash_mix(seed, i) >> 32) / 2147483648.0F; }

static bool has_level(enum cpu_isa isa)
{
  enum cpu_isa chosen;
  return cpu_isa_choose(cpu_isa_name(isa), &chosen, NULL) == SITS_OK && chosen == isa;
}

/* A GGUF tensor with random integers, and the same in the neutral layout, written here from the two descriptions. */
struct pair { struct sits_utd gguf, neutral; uint8_t blocks[ROWS * K / 32 * 36]; uint8_t data[ROWS * K]; uint16_t scales[ROWS * K / 32],
             minimums[ROWS * K / 32]; };

static void fill(struct pair *p, enum sits_dtype dtype)
{
  const size_t block = (size_t)sits_dtype_info(dtype)->block_bytes, header = dtype == SITS_DTYPE_Q4_1 ? 4 : 2;
  memset(p, 0, sizeof *p);
  p->gguf = (struct sits_utd){.name = "w", .dtype = dtype, .n_dims = 2, .dims = {ROWS, K}, .data = p->blocks,
                              .n_bytes = ROWS * K / 32 * block};
  p->neutral = (struct sits_utd){.name = "w", .dtype = dtype == SITS_DTYPE_Q8_0 ? SITS_DTYPE_I8 : SITS_DTYPE_I4, .n_dims = 2,
                                 .dims = {ROWS, K},
                                 .quant = SITS_QUANT_GROUP, .group_size = 32, .group_axis = 1, .scale_dtype = SITS_DTYPE_F16,
                                 .scales = p->scales, .minimums = header == 4 ? p->minimums : NULL, .data = p->data};
  p->neutral.n_bytes = (size_t)sits_utd_row_major_bytes(&p->neutral);
  for (size_t g = 0; g < ROWS * K / 32; g++) {
    uint8_t *b = p->blocks + g * block;
    p->scales[g] = float_to_half(0.02F + 0.05F * fabsf(uniform(1, g)));
    p->minimums[g] = float_to_half(0.3F * uniform(2, g));
    memcpy(b, &p->scales[g], 2);
    if (header == 4) memcpy(b + 2, &p->minimums[g], 2);
    for (size_t i = 0; i < 32; i++) {
      const unsigned u = (unsigned)(hash_mix(3, g * 32 + i) >> 40);
      if (dtype == SITS_DTYPE_Q8_0) {
        b[2 + i] = p->data[g * 32 + i] = (uint8_t)u;
      } else {
        b[header + i % 16] |= (uint8_t)((u & 15) << (i / 16 * 4));
        p->data[(g * 32 + i) / 2] |= (uint8_t)((u & 15) << (i % 2 * 4));
      }
    }
  }
}

static struct cpu_weight *pack(const struct sits_utd *utd, enum cpu_isa isa)
{
  struct cpu_weight *w = NULL;
  struct sits_error err = {0};
  if (cpu_weight_create(utd, isa, &w, &err)) fail_msg("%s", err.text);
  return w;
}

static void *room(size_t n_bytes)
{
  void *block = mem_aligned(CPU_ALIGN_BYTES, n_bytes ? n_bytes : 1);
  assert_non_null(block);
  return block;
}

static float inputs[MOST_TOKENS * K];

/* y [n][ROWS] for an activation of that kind; rows in two pieces. */
static void product(const struct cpu_weight *w, enum act_kind kind, const uint8_t *is_outlier, int32_t n, float *y, float *side_y)
{
  void *act = room(cpu_act_bytes_as(w, kind, n)), *side = room(cpu_act_bytes_as(w, kind, n)), *scratch = room(CPU_MATMUL_SCRATCH_BYTES),
       *expanded = room(cpu_expand_bytes(w));
  const int32_t half = n > 8 ? 8 : n;
  const int64_t cut = 2 * cpu_weight_row_tile(w), ends[3] = {0, cut, ROWS};
  cpu_act_make(w, kind, is_outlier, inputs, K, n, 0, half, act, side);
  if (half < n) cpu_act_make(w, kind, is_outlier, inputs, K, n, half, n, act, side);
  for (int i = 0; i < 2; i++) {
    if (cpu_act_format_as(w, kind) != cpu_act_format(w)) cpu_matmul_expanded(w, act, n, ends[i], ends[i + 1], y, ROWS, expanded);
    else cpu_matmul(w, act, n, ends[i], ends[i + 1], y, ROWS, scratch);
    if (side_y) cpu_matmul(w, side, n, ends[i], ends[i + 1], side_y, ROWS, scratch);
  }
  mem_free(act);
  mem_free(side);
  mem_free(scratch);
  mem_free(expanded);
}

static void make_inputs(void)
{
  for (size_t i = 0; i < MOST_TOKENS * K; i++) inputs[i] = uniform(11, i) * (i % K % 37 == 5 ? 20.0F : 1.0F);
}

static const enum sits_dtype block_types[] = {SITS_DTYPE_Q4_0, SITS_DTYPE_Q4_1, SITS_DTYPE_Q8_0};
static float a[MOST_TOKENS * ROWS], b[MOST_TOKENS * ROWS];
static struct pair pair;

static void neutral_layout_gives_the_bits_of_the_blocks(void **state)
{
  (void)state;
  make_inputs();
  for (int l = 0; l < LEVELS; l++)
    for (int t = 0; t < 3 && has_level(levels[l]); t++) {
      fill(&pair, block_types[t]);
      struct cpu_weight *from_blocks = pack(&pair.gguf, levels[l]), *from_neutral = pack(&pair.neutral, levels[l]);
      for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        product(from_blocks, ACT_BACKEND, NULL, batches[i], a, NULL);
        product(from_neutral, ACT_INT8, NULL, batches[i], b, NULL);
        assert_memory_equal(a, b, (size_t)batches[i] * ROWS * sizeof *a);
      }
      for (int64_t r = 0; r < ROWS; r++) {
        float want[K], got[K];
        dequant_tensor_row(&pair.neutral, r, want);
        cpu_weight_row(from_neutral, r, got);
        assert_memory_equal(want, got, sizeof want);
      }
      cpu_weight_destroy(from_blocks);
      cpu_weight_destroy(from_neutral);
    }
}

/* Groups of 64 and channels: scales repeat; I8 with minimums has no GGUF twin. Read back row by row. */
static void wider_groups_and_minimums(void **state)
{
  (void)state;
  for (int l = 0; l < LEVELS; l++)
    for (int c = 0; c < 8 && has_level(levels[l]); c++) {
      fill(&pair, c & 1 ? SITS_DTYPE_Q8_0 : SITS_DTYPE_Q4_1);
      struct sits_utd *u = &pair.neutral;
      u->minimums = c & 2 ? pair.minimums : NULL;
      u->group_size = 64;
      if (c & 4) u->quant = SITS_QUANT_CHANNEL;
      struct cpu_weight *w = pack(u, levels[l]);
      for (int64_t r = 0; r < ROWS; r++) {
        float want[K], got[K];
        dequant_tensor_row(u, r, want);
        cpu_weight_row(w, r, got);
        assert_memory_equal(want, got, sizeof want);
      }
      cpu_weight_destroy(w);
    }
}

static void float_activations_give_the_bits_of_float_weights(void **state)
{
  (void)state;
  static float wide[ROWS * K];
  make_inputs();
  for (int l = 0; l < LEVELS; l++)
    for (int t = 0; t < 4 && has_level(levels[l]); t++) {
      fill(&pair, block_types[t % 3]);
      if (t == 3) { /* I8 with minimums */
        fill(&pair, SITS_DTYPE_Q8_0);
        pair.neutral.minimums = pair.minimums;
      }
      for (int64_t r = 0; r < ROWS; r++) dequant_tensor_row(&pair.neutral, r, wide + r * K);
      const struct sits_utd as_float = {.name = "w", .dtype = SITS_DTYPE_F32, .n_dims = 2, .dims = {ROWS, K}, .data = wide,
                                        .n_bytes = sizeof wide};
      struct cpu_weight *w = pack(&pair.neutral, levels[l]), *f = pack(&as_float, levels[l]);
      for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        product(w, ACT_FLOAT, NULL, batches[i], a, NULL);
        product(f, ACT_FLOAT, NULL, batches[i], b, NULL);
        assert_memory_equal(a, b, (size_t)batches[i] * ROWS * sizeof *a);
      }
      cpu_weight_destroy(w);
      cpu_weight_destroy(f);
    }
}

/* One token by the definition of ACT_INT4. */
static void round_by_definition(const float *x, const uint8_t *is_outlier, double *out)
{
  float most = 0;
  for (int c = 0; c < K; c++)
    if (is_outlier[c] && fabsf(x[c]) > most) most = fabsf(x[c]);
  for (int g = 0; g < K; g += 32) {
    float lo = 0, hi = 0;
    for (int i = g; i < g + 32; i++) {
      if (is_outlier[i]) continue;
      if (x[i] < lo) lo = x[i];
      if (x[i] > hi) hi = x[i];
    }
    const float s = (hi - lo) / 15;
    const double zero = nearbyint((double)(-lo / s));
    for (int i = g; i < g + 32; i++) {
      double q = nearbyint((double)(x[i] / s)) + zero;
      q = q < 0 ? 0 : q > 15 ? 15 : q;
      out[i] = is_outlier[i] ? (double)(most / 127) * nearbyint((double)(x[i] / (most / 127))) : (double)s * (q - zero);
    }
  }
}

static void four_bit_activations_follow_their_definition(void **state)
{
  (void)state;
  static uint8_t is_outlier[K];
  static float side[MOST_TOKENS * ROWS], first[MOST_TOKENS * ROWS];
  make_inputs();
  for (int c = 0; c < K; c++) is_outlier[c] = c % 37 == 5;
  fill(&pair, SITS_DTYPE_Q4_1);
  for (int l = 0; l < LEVELS; l++) {
    if (!has_level(levels[l])) continue;
    struct cpu_weight *w = pack(&pair.neutral, levels[l]);
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
      product(w, ACT_INT4, is_outlier, batches[i], a, side);
      for (int32_t t = 0; t < batches[i]; t++) {
        double x[K];
        round_by_definition(inputs + t * K, is_outlier, x);
        for (int r = 0; r < ROWS; r++) {
          float row[K];
          double want = 0, size = 0;
          dequant_tensor_row(&pair.neutral, r, row);
          for (int c = 0; c < K; c++) want += (double)row[c] * x[c], size += fabs((double)row[c] * x[c]);
          const double got = (double)a[t * ROWS + r] + (double)side[t * ROWS + r];
          if (fabs(got - want) > 3e-6 * size) fail_msg("level %d, token %d, row %d: %.9g, not %.9g", l, t, r, got, want);
        }
      }
      /* a token's result does not depend on its batch */
      if (i == 0) memcpy(first, a, ROWS * sizeof *a);
      else assert_memory_equal(first, a, ROWS * sizeof *a);
    }
    cpu_weight_destroy(w);
  }
}

static void values_that_are_not_finite_stay_with_their_token(void **state)
{
  (void)state;
  static uint8_t is_outlier[K];
  static float side[MOST_TOKENS * ROWS];
  is_outlier[7] = 1;
  fill(&pair, SITS_DTYPE_Q4_1);
  struct cpu_weight *w = pack(&pair.neutral, CPU_SCALAR);
  for (int c = 0; c < 2; c++) {
    make_inputs();
    inputs[K + (c ? 7 : 100)] = c ? INFINITY : NAN;
    product(w, ACT_INT4, is_outlier, 3, a, side);
    for (int t = 0; t < 3; t++)
      for (int r = 0; r < ROWS; r++) assert_true(isnan(a[t * ROWS + r] + side[t * ROWS + r]) == (t == 1));
  }
  cpu_weight_destroy(w);
}

static void what_cannot_be_done_is_refused(void **state)
{
  (void)state;
  struct sits_error err = {0};
  struct cpu_weight *w = NULL;
  for (int c = 0; c < 6; c++) {
    fill(&pair, c < 5 ? SITS_DTYPE_Q4_1 : SITS_DTYPE_Q8_0);
    struct sits_utd *u = &pair.neutral;
    if (c == 0) u->group_size = 48;
    if (c == 1) u->scale_dtype = SITS_DTYPE_F32;
    if (c == 2) u->group_axis = 0;
    if (c == 3) u->n_bytes--;
    if (c == 4) u->dims[1] = K - 16;
    if (c == 5) u->quant = SITS_QUANT_NONE; /* plain bytes are no weight */
    assert_int_equal(cpu_weight_packed_bytes(u, CPU_SCALAR), 0);
    const enum sits_status status = cpu_weight_create(u, CPU_SCALAR, &w, &err);
    assert_true(status == SITS_UNSUPPORTED || (c == 3 && status == SITS_FORMAT));
    assert_non_null(strstr(err.text, "w: "));
  }
  float x[K] = {0};
  const struct sits_utd as_float = {.name = "f", .dtype = SITS_DTYPE_F32, .n_dims = 2, .dims = {1, K}, .data = x, .n_bytes = sizeof x};
  w = pack(&as_float, CPU_SCALAR);
  assert_int_equal(cpu_act_check(w, "f", &(struct act_format){.kind = ACT_INT8}, &err), SITS_UNSUPPORTED);
  assert_int_equal(cpu_act_check(w, "f", &(struct act_format){.kind = ACT_INT4}, &err), SITS_UNSUPPORTED);
  assert_string_equal(err.param, "f");
  assert_int_equal(cpu_act_check(w, "f", &(struct act_format){.kind = ACT_FLOAT}, &err), SITS_OK);
  cpu_weight_destroy(w);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(neutral_layout_gives_the_bits_of_the_blocks),
                                     cmocka_unit_test(wider_groups_and_minimums),
                                     cmocka_unit_test(float_activations_give_the_bits_of_float_weights),
                                     cmocka_unit_test(four_bit_activations_follow_their_definition),
                                     cmocka_unit_test(values_that_are_not_finite_stay_with_their_token),
                                     cmocka_unit_test(what_cannot_be_done_is_refused)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
