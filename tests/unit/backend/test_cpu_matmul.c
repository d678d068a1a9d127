/* The CPU matrix multiply: every weight type at every instruction-set level this machine has, over edge shapes, against double-precision
 * references; bitwise independence of batch, split and level; exact rows; refusals; failure of allocations. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu_matmul.h"
#include "backend/cpu/cpu_quant.h"
#include "base/mem.h"
#include "ref/ref_linear.h"
#include "tensor/dequant.h"

static const enum sits_dtype types[] = {SITS_DTYPE_F32,  SITS_DTYPE_F16,  SITS_DTYPE_BF16, SITS_DTYPE_Q4_0, SITS_DTYPE_Q4_1,
                                        SITS_DTYPE_Q5_0, SITS_DTYPE_Q5_1, SITS_DTYPE_Q8_0, SITS_DTYPE_Q2_K, SITS_DTYPE_Q3_K,
                                        SITS_DTYPE_Q4_K, SITS_DTYPE_Q5_K, SITS_DTYPE_Q6_K};
#define N_TYPES (sizeof types / sizeof types[0])
static const int32_t token_counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 33, 48, 49, 61};
#define N_COUNTS (sizeof token_counts / sizeof token_counts[0])
#define MAX_TOKENS 61

static uint64_t random_state = 88172645463325252ULL;
static uint32_t random_u32(void)
{
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)(random_state >> 16);
}
static float random_unit(void) { return (float)random_u32() / 2147483648.0F - 1.0F; } /* -1..1 */

static bool is_float(enum sits_dtype t) { return t == SITS_DTYPE_F32 || t == SITS_DTYPE_F16 || t == SITS_DTYPE_BF16; }

static void put_half(uint8_t *at, float value)
{
  uint16_t h = float_to_half(value);
  memcpy(at, &h, 2);
}

/* Random bytes, with f16 fields made sane: positions in a block of scale and, where there is one, minimum. */
static void fill_block(enum sits_dtype t, uint8_t *b)
{
  int n = sits_dtype_info(t)->block_bytes, d = 0, m = -1;
  for (int i = 0; i < n; i++) b[i] = (uint8_t)random_u32();
  switch (t) {
  case SITS_DTYPE_Q4_1: case SITS_DTYPE_Q5_1: case SITS_DTYPE_Q4_K: case SITS_DTYPE_Q5_K: m = 2; break;
  case SITS_DTYPE_Q2_K: d = 80; m = 82; break;
  case SITS_DTYPE_Q3_K: d = 108; break;
  case SITS_DTYPE_Q6_K: d = 208; break;
  default: break;
  }
  put_half(b + d, random_unit() * 0.03F);
  if (m >= 0) put_half(b + m, random_unit() * 0.1F);
}

struct weight_data {
  struct sits_utd utd;
  uint8_t *bytes;
};

static struct weight_data make_weight(enum sits_dtype t, int64_t rows, int64_t k)
{
  struct weight_data w = {.utd = {.name = "test.weight", .dtype = t, .n_dims = 2, .dims = {rows, k}}};
  int64_t n = rows * k / sits_dtype_info(t)->block_elements, size = sits_dtype_info(t)->block_bytes;
  w.bytes = mem_alloc((size_t)(n * size));
  assert_non_null(w.bytes);
  for (int64_t i = 0; i < n; i++) {
    float f = random_unit();
    uint16_t h = t == SITS_DTYPE_F16 ? float_to_half(f) : float_to_bf16(f);
    if (t == SITS_DTYPE_F32) memcpy(w.bytes + i * 4, &f, 4);
    else if (is_float(t)) memcpy(w.bytes + i * 2, &h, 2);
    else fill_block(t, w.bytes + i * size);
  }
  w.utd.data = w.bytes;
  w.utd.n_bytes = (size_t)(n * size);
  return w;
}

/* Activations such as models have: groups of different size, some with an outlier, some all positive, some zero. */
static float *make_x(int32_t n_tokens, int64_t k)
{
  float *x = mem_alloc((size_t)n_tokens * (size_t)k * sizeof *x);
  assert_non_null(x);
  for (int64_t i = 0; i < n_tokens * k; i += 1) {
    uint32_t kind = (uint32_t)(i / 32 * 2654435761U) >> 29;
    x[i] = random_unit() * (kind == 0 ? 0.0F : kind == 1 ? 8.0F : 1.0F);
    if (kind == 2 && i % 32 == 5) x[i] = 40.0F;
    if (kind == 3) x[i] = fabsf(x[i]);
  }
  return x;
}

/* Multiply as the executor does: prepare tokens in two parts, rows in pieces of split tiles (0: all at once). */
static void multiply(const struct cpu_weight *w, const float *x, int64_t ldx, int32_t n_tokens, int64_t split, float *y, int64_t ldy)
{
  void *act = mem_aligned(CPU_ALIGN_BYTES, cpu_act_bytes(w, n_tokens)), *scratch = mem_aligned(CPU_ALIGN_BYTES, CPU_MATMUL_SCRATCH_BYTES);
  int64_t rows = cpu_weight_rows(w), step = split ? split * cpu_weight_row_tile(w) : rows;
  assert_non_null(act);
  assert_non_null(scratch);
  memset(act, 0xff, cpu_act_bytes(w, n_tokens));
  memset(scratch, 0xff, CPU_MATMUL_SCRATCH_BYTES);
  cpu_act_quantize(w, x, ldx, n_tokens, n_tokens / 2, n_tokens, act);
  cpu_act_quantize(w, x, ldx, n_tokens, 0, n_tokens / 2, act);
  for (int64_t r = 0; r < rows; r += step) cpu_matmul(w, act, n_tokens, r, r + step < rows ? r + step : rows, y, ldy, scratch);
  mem_free(scratch);
  mem_free(act);
}

/* Every batch size bitwise against y, the result of all tokens together. */
static void check_counts(struct cpu_weight *w, const float *x, int64_t ldx, const float *y, float *part, int64_t ldy)
{
  for (size_t c = 0; c < N_COUNTS; c++) {
    int32_t n = token_counts[c], first = MAX_TOKENS - n;
    multiply(w, x + first * ldx, ldx, n, (int64_t)(c % 3), part, ldy);
    for (int32_t t = 0; t < n; t++)
      if (memcmp(part + t * ldy, y + (first + t) * ldy, (size_t)w->rows * sizeof *y) != 0)
        fail_msg("%s tile %d rows %d k %d prefetches %d gfni %d: token %d of %d differs from the large batch",
                 sits_dtype_info(w->dtype)->name, w->tile, (int)w->rows, (int)w->k, w->prefetches, w->has_gfni, t, n);
  }
}

/* The kernels of other makers' processors of the level too: any runs here that needs no more than this one has. */
static void check_makers(struct cpu_weight *w, const float *x, int64_t ldx, const float *y, float *part, int64_t ldy)
{
  for (int maker = 0; maker < 4; maker++) {
    w->prefetches = maker % 2 == 1;
    w->has_gfni = maker / 2 == 1;
    if (!w->has_gfni || cpu_isa_has_gfni()) check_counts(w, x, ldx, y, part, ldy);
  }
}

/* One shape: result against the references, then every batch size and kind of processor bitwise against it. */
static void check_shape(enum sits_dtype type, enum cpu_isa isa, int64_t rows, int64_t k)
{
  struct weight_data data = make_weight(type, rows, k);
  struct cpu_weight *w = NULL;
  int64_t ldx = k + 3, ldy = rows + 5;
  float *x = make_x(MAX_TOKENS, ldx), *rounded = mem_alloc(sizeof(float) * MAX_TOKENS * (size_t)ldx);
  float *y = mem_calloc(MAX_TOKENS * (size_t)ldy, sizeof(float)), *part = mem_calloc(MAX_TOKENS * (size_t)ldy, sizeof(float));
  double *exact = mem_calloc(MAX_TOKENS * (size_t)ldy, sizeof(double)), *size = mem_calloc(MAX_TOKENS * (size_t)ldy, sizeof(double));
  double off = 0, reach = 0;
  assert_true(rounded && y && part && exact && size);
  assert_int_equal(cpu_weight_create(&data.utd, isa, &w, NULL), SITS_OK);
  for (int32_t t = 0; t < MAX_TOKENS; t++) {
    if (is_float(type)) memcpy(rounded + t * ldx, x + t * ldx, (size_t)k * sizeof *x);
    else ref_act_q8_g32(x + t * ldx, k, rounded + t * ldx);
  }
  for (int64_t i = 0; i < MAX_TOKENS * ldy; i++) y[i] = -12345.0F;
  multiply(w, x, ldx, MAX_TOKENS, 0, y, ldy);

  /* Tight: only the rounding of f32 sums is left. */
  ref_linear(&data.utd, rounded, ldx, MAX_TOKENS, exact, size, ldy);
  for (int32_t t = 0; t < MAX_TOKENS; t++)
    for (int64_t r = 0; r < ldy; r++) {
      int64_t i = t * ldy + r;
      if (r >= rows) assert_true(y[i] == -12345.0F); /* nothing written past the rows */
      else if (!(fabs((double)y[i] - exact[i]) <= 4e-6 * size[i] + 1e-30))
        fail_msg("%s %s rows %d k %d token %d row %d: %.9g, expected %.9g", sits_dtype_info(type)->name, cpu_isa_name(isa), (int)rows,
                 (int)k, t, (int)r, (double)y[i], exact[i]);
    }
  /* Loose, against float activations: a step is at most 1/127 of the group's range, its error a third of a step on average. */
  ref_linear(&data.utd, x, ldx, MAX_TOKENS, exact, NULL, ldy);
  for (int32_t t = 0; t < MAX_TOKENS; t++)
    for (int64_t r = 0; r < rows; r++) {
      off += fabs((double)y[t * ldy + r] - exact[t * ldy + r]);
      reach += size[t * ldy + r];
    }
  assert_true(off <= 0.004 * reach);

  check_makers(w, x, ldx, y, part, ldy);
  if (isa != CPU_SCALAR) {
    struct cpu_weight *scalar = NULL;
    assert_int_equal(cpu_weight_create(&data.utd, CPU_SCALAR, &scalar, NULL), SITS_OK);
    multiply(scalar, x, ldx, MAX_TOKENS, 1, part, ldy);
    for (int32_t t = 0; t < MAX_TOKENS; t++) assert_memory_equal(part + t * ldy, y + t * ldy, (size_t)rows * sizeof *y);
    cpu_weight_destroy(scalar);
  }
  cpu_weight_destroy(w);
  mem_free(size);
  mem_free(exact);
  mem_free(part);
  mem_free(y);
  mem_free(rounded);
  mem_free(x);
  mem_free(data.bytes);
}

static void check_level(enum cpu_isa isa)
{
  if (isa > cpu_isa_best()) skip();
  for (size_t i = 0; i < N_TYPES; i++) {
    int64_t block = sits_dtype_info(types[i])->block_elements, tile = isa == CPU_AVX512 ? 16 : 8;
    if (is_float(types[i])) {
      check_shape(types[i], isa, 1, 1);
      check_shape(types[i], isa, 64, 172);
      check_shape(types[i], isa, 5 * tile + 3, 33);
    }
    block = block < 32 ? 32 : block;
    check_shape(types[i], isa, 1, block);
    check_shape(types[i], isa, tile - 1, block);
    check_shape(types[i], isa, tile, 2 * block);
    check_shape(types[i], isa, tile + 1, 3 * block);
    check_shape(types[i], isa, 4 * tile + 5, 5 * block);
    /* Longer than one panel of the large-batch kernels. */
    check_shape(types[i], isa, tile + 1, 4096 + 3 * block);
  }
}

static void test_scalar(void **state) { check_level(CPU_SCALAR); }
static void test_avx2(void **state) { check_level(CPU_AVX2); }
static void test_avx512(void **state) { check_level(CPU_AVX512); }

/* The largest integers on both sides, where 16-bit partial sums would overflow if a kernel let them. */
static void test_extreme_integers(void **state)
{
  static const uint8_t fills[] = {0xff, 0x80, 0x7f, 0x00};
  for (int isa = CPU_SCALAR; isa <= (int)cpu_isa_best(); isa++)
    for (size_t i = 0; i < N_TYPES; i++)
      for (size_t f = 0; f < sizeof fills && !is_float(types[i]); f++) {
        int64_t k = 256, rows = 17, n = 9;
        struct weight_data data = make_weight(types[i], rows, k);
        struct cpu_weight *w = NULL;
        float x[9 * 256], y[9 * 17];
        double exact[9 * 17], size[9 * 17];
        int block_bytes = sits_dtype_info(types[i])->block_bytes;
        int first = types[i] == SITS_DTYPE_Q4_1 || types[i] == SITS_DTYPE_Q5_1 ? 4 : 2;
        for (size_t b = 0; b < data.utd.n_bytes && block_bytes < 80; b++)
          if ((int)(b % (size_t)block_bytes) >= first) data.bytes[b] = fills[f];
        for (size_t b = 0; b < data.utd.n_bytes && block_bytes >= 80; b++) { /* K types: quants only, the rest lies at known places */
          int at = (int)(b % (size_t)block_bytes);
          bool is_quant = types[i] == SITS_DTYPE_Q6_K ? at < 192 : types[i] == SITS_DTYPE_Q3_K ? at < 96 : at >= 16 && at < 80;
          if (is_quant) data.bytes[b] = fills[f];
        }
        for (int64_t t = 0; t < n; t++)
          for (int64_t j = 0; j < k; j++) x[t * k + j] = t % 3 == 0 ? 1.0F : t % 3 == 1 ? -1.0F : j % 64 < 32 ? 1.0F : -1.0F;
        assert_int_equal(cpu_weight_create(&data.utd, (enum cpu_isa)isa, &w, NULL), SITS_OK);
        multiply(w, x, k, (int32_t)n, 0, y, rows);
        ref_linear(&data.utd, x, k, (int32_t)n, exact, size, rows);
        for (int64_t j = 0; j < n * rows; j++) assert_true(fabs((double)y[j] - exact[j]) <= 4e-6 * size[j]);
        multiply(w, x, k, 1, 0, y, rows);
        for (int64_t j = 0; j < rows; j++) assert_true(fabs((double)y[j] - exact[j]) <= 4e-6 * size[j]);
        cpu_weight_destroy(w);
        mem_free(data.bytes);
      }
}

static void test_rows_are_exact(void **state)
{
  for (int isa = CPU_SCALAR; isa <= (int)cpu_isa_best(); isa++)
    for (size_t i = 0; i < N_TYPES; i++) {
      int64_t k = is_float(types[i]) ? 45 : 512, rows = 21;
      struct weight_data data = make_weight(types[i], rows, k);
      struct cpu_weight *w = NULL;
      float got[512], want[512];
      assert_int_equal(cpu_weight_create(&data.utd, (enum cpu_isa)isa, &w, NULL), SITS_OK);
      for (int64_t r = 0; r < rows; r++) {
        dequant_row(types[i], data.bytes + (size_t)r * data.utd.n_bytes / (size_t)rows, k, want);
        cpu_weight_row(w, r, got);
        assert_memory_equal(got, want, (size_t)k * sizeof(float));
      }
      cpu_weight_destroy(w);
      mem_free(data.bytes);
    }
}

/* Packing in pieces into a borrowed region gives the same weight as packing at once. */
static void test_pack_in_pieces(void **state)
{
  for (int isa = CPU_SCALAR; isa <= (int)cpu_isa_best(); isa++) {
    struct weight_data data = make_weight(SITS_DTYPE_Q4_1, 75, 96);
    struct cpu_weight *whole = NULL, *pieces = NULL;
    size_t n_bytes = cpu_weight_packed_bytes(&data.utd, (enum cpu_isa)isa);
    void *region = cpu_weight_region(n_bytes);
    float a[75 * 2], b[75 * 2], *x = make_x(2, 96);
    assert_non_null(region);
    assert_int_equal(cpu_weight_create(&data.utd, (enum cpu_isa)isa, &whole, NULL), SITS_OK);
    assert_int_equal(cpu_weight_create_in(&data.utd, (enum cpu_isa)isa, region, &pieces, NULL), SITS_OK);
    assert_true(cpu_weight_bytes(pieces) <= n_bytes);
    int64_t tile = cpu_weight_row_tile(pieces);
    cpu_weight_pack(pieces, &data.utd, 2 * tile, 75);
    cpu_weight_pack(pieces, &data.utd, 0, 2 * tile);
    multiply(whole, x, 96, 2, 0, a, 75);
    multiply(pieces, x, 96, 2, 0, b, 75);
    assert_memory_equal(a, b, sizeof a);
    cpu_weight_destroy(whole);
    cpu_weight_destroy(pieces);
    mem_free(region);
    mem_free(x);
    mem_free(data.bytes);
  }
}

/* A token that is not finite spoils its own results only. */
static void test_not_finite(void **state)
{
  static const float bad[] = {INFINITY, -INFINITY, NAN, 3.0e38F};
  for (int isa = CPU_SCALAR; isa <= (int)cpu_isa_best(); isa++)
    for (size_t i = 0; i < 4; i++) {
      struct weight_data data = make_weight(SITS_DTYPE_Q4_0, 16, 64);
      struct cpu_weight *w = NULL;
      float y[4 * 16], good[4 * 16], *x = make_x(4, 64);
      assert_int_equal(cpu_weight_create(&data.utd, (enum cpu_isa)isa, &w, NULL), SITS_OK);
      multiply(w, x, 64, 4, 0, good, 16);
      x[64 + 40] = bad[i];
      x[64 + 41] = bad[i] < 0 ? 1.0F : -3.0e38F;
      multiply(w, x, 64, 4, 0, y, 16);
      for (int t = 0; t < 4; t++)
        for (int r = 0; r < 16; r++)
          if (t == 1) assert_true(isnan(y[t * 16 + r]));
          else assert_true(y[t * 16 + r] == good[t * 16 + r]);
      cpu_weight_destroy(w);
      mem_free(x);
      mem_free(data.bytes);
    }
}

/* Ranges whose step would underflow count as zero; large finite ones work. */
static void test_extreme_ranges(void **state)
{
  struct weight_data data = make_weight(SITS_DTYPE_Q8_0, 8, 32);
  for (int isa = CPU_SCALAR; isa <= (int)cpu_isa_best(); isa++) {
    struct cpu_weight *w = NULL;
    float x[3][32] = {{0}}, y[3][8];
    assert_int_equal(cpu_weight_create(&data.utd, (enum cpu_isa)isa, &w, NULL), SITS_OK);
    for (int i = 0; i < 32; i++) {
      x[0][i] = 1e-42F * (float)i;
      x[1][i] = 1e30F * (float)(i - 7);
    }
    multiply(w, x[0], 32, 3, 0, y[0], 8);
    for (int r = 0; r < 8; r++) {
      assert_true(y[0][r] == 0.0F && y[2][r] == 0.0F);
      assert_true(isfinite(y[1][r]) && y[1][r] != 0.0F);
    }
    cpu_weight_destroy(w);
  }
  mem_free(data.bytes);
}

static void test_refusals(void **state)
{
  struct weight_data data = make_weight(SITS_DTYPE_Q4_0, 4, 64);
  struct cpu_weight *w = NULL;
  struct sits_error err = {0};
  struct sits_utd u = data.utd;
  u.dtype = SITS_DTYPE_I32;
  assert_int_equal(cpu_weight_create(&u, CPU_SCALAR, &w, &err), SITS_UNSUPPORTED);
  assert_non_null(strstr(err.text, "test.weight"));
  assert_int_equal(cpu_weight_packed_bytes(&u, CPU_SCALAR), 0);
  u = data.utd;
  u.dims[1] = 33;
  assert_int_equal(cpu_weight_create(&u, CPU_SCALAR, &w, &err), SITS_FORMAT);
  u = data.utd;
  u.n_bytes--;
  assert_int_equal(cpu_weight_create(&u, CPU_SCALAR, &w, &err), SITS_FORMAT);
  u = data.utd;
  u.n_dims = 1;
  assert_int_equal(cpu_weight_create(&u, CPU_SCALAR, &w, &err), SITS_FORMAT);
  u = data.utd;
  u.dims[0] = INT64_MAX / 2;
  assert_int_equal(cpu_weight_create(&u, CPU_SCALAR, &w, &err), SITS_FORMAT);
  u = data.utd;
  u.quant = SITS_QUANT_GROUP;
  assert_int_equal(cpu_weight_create(&u, CPU_SCALAR, &w, &err), SITS_UNSUPPORTED);
  assert_null(w);
  mem_free(data.bytes);
}

static void test_allocation_failures(void **state)
{
  struct weight_data data = make_weight(SITS_DTYPE_Q4_0, 4, 64);
  int64_t live = mem_live_blocks();
  for (uint64_t n = 1; n < 10; n++) {
    struct cpu_weight *w = NULL;
    mem_fault_arm(n);
    enum sits_status status = cpu_weight_create(&data.utd, CPU_SCALAR, &w, NULL);
    int fired = mem_fault_fired();
    mem_fault_arm(0);
    assert_int_equal(status, fired ? SITS_NOMEM : SITS_OK);
    assert_true(fired ? w == NULL : w != NULL);
    cpu_weight_destroy(w);
    assert_int_equal(mem_live_blocks(), live);
    if (!fired) break;
  }
  mem_free(data.bytes);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_scalar),           cmocka_unit_test(test_avx2),           cmocka_unit_test(test_avx512),
      cmocka_unit_test(test_extreme_integers), cmocka_unit_test(test_rows_are_exact), cmocka_unit_test(test_pack_in_pieces),
      cmocka_unit_test(test_not_finite),       cmocka_unit_test(test_extreme_ranges), cmocka_unit_test(test_refusals),
      cmocka_unit_test(test_allocation_failures),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
