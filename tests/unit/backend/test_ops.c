/* The vector primitives at every instruction-set level this machine has, against the naive twins, at sizes around the vector length. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "backend/backend.h"
#include "backend/cpu/cpu_ops.h"
#include "ref/ref_ops.h"
#include "tensor/dequant.h"

#define P KV_PAGE_TOKENS
enum { MAX = 600 };

static uint64_t random_state = 1;
static float uniform(float size)
{
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return size * (float)((double)(int32_t)(random_state >> 32) / 2147483648.0);
}

static void fill(float *x, int32_t n, float size)
{
  for (int32_t i = 0; i < n; i++) x[i] = uniform(size);
}

static void widen(const float *x, int32_t n, double *y)
{
  for (int32_t i = 0; i < n; i++) y[i] = x[i];
}

/* Compare with an absolute and relative tolerance; value n is a guard that must not have been touched. */
static void check(const char *what, enum cpu_isa isa, const float *got, const double *want, int32_t n, double tolerance)
{
  for (int32_t i = 0; i < n; i++)
    if (!(fabs(got[i] - want[i]) <= tolerance * (1 + fabs(want[i]))))
      fail_msg("%s at %s, n %d: element %d is %.9g, wanted %.9g", what, cpu_isa_name(isa), (int)n, (int)i, got[i], want[i]);
  if (got[n] != 1234.5f) fail_msg("%s at %s, n %d: wrote past the end", what, cpu_isa_name(isa), (int)n);
}

static const int32_t sizes[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80, 96, 128, 576};

#define FOR_EACH_LEVEL(isa, ops) \
  for (int isa = 0; isa <= (int)cpu_isa_best(); isa++) \
    for (const struct cpu_ops *ops = cpu_ops_for((enum cpu_isa)isa); ops != NULL; ops = NULL)

static void test_rowwise(void **state)
{
  (void)state;
  float a[MAX], b[MAX], y[MAX];
  double da[MAX], db[MAX], want[MAX];
  FOR_EACH_LEVEL(isa, ops)
  {
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
      const int32_t n = sizes[s];
      fill(a, n, 12);
      fill(b, n, 3);
      widen(a, n, da);
      widen(b, n, db);
      y[n] = 1234.5f;
      ops->rmsnorm(a, b, n, 1e-5f, y);
      ref_rmsnorm(da, db, n, 1e-5, want);
      check("rmsnorm", isa, y, want, n, 2e-6);
      ops->swiglu(a, b, n, y);
      ref_swiglu(da, db, n, want);
      check("swiglu", isa, y, want, n, 2e-6);
      ops->add(a, b, n, y);
      for (int32_t i = 0; i < n; i++) want[i] = da[i] + db[i];
      check("add", isa, y, want, n, 1e-6);
      memcpy(y, a, (size_t)n * sizeof *y);
      ops->scale_add(y, 0.25f, b, -3, n);
      for (int32_t i = 0; i < n; i++) want[i] = da[i] * 0.25 - 3 * db[i];
      check("scale_add", isa, y, want, n, 2e-6);
    }
  }
}

static void test_swiglu_extremes(void **state)
{
  (void)state;
  const float g[8] = {0, -0.0f, 200, -200, 88.5f, -88.5f, 1e-30f, -1e30f}, u[8] = {3, 3, 2, 2, 1, 1, 1, 1};
  FOR_EACH_LEVEL(isa, ops)
  {
    float y[9] = {[8] = 1234.5f};
    double dg[8], du[8], want[8];
    widen(g, 8, dg);
    widen(u, 8, du);
    ops->swiglu(g, u, 8, y);
    ref_swiglu(dg, du, 7, want);
    want[7] = 0;
    for (int i = 0; i < 7; i++) assert_true(fabs(y[i] - want[i]) <= 1e-5 * (1 + fabs(want[i])));
    assert_true(y[7] <= 0 && isfinite(y[7]));
    assert_true(y[8] == 1234.5f);
  }
}

static void test_rope(void **state)
{
  (void)state;
  static const int32_t dims[] = {2, 4, 8, 16, 32, 64, 80, 96, 128};
  FOR_EACH_LEVEL(isa, ops)
  {
    for (size_t k = 0; k < sizeof dims / sizeof *dims; k++)
      for (int interleaved = 0; interleaved < 2; interleaved++) {
        const int32_t n = dims[k], position = 777;
        float x[MAX], c[MAX], s[MAX], inv_freq[MAX];
        double want[MAX];
        fill(x, n, 4);
        widen(x, n, want);
        x[n] = 1234.5f;
        for (int32_t i = 0; i < n / 2; i++) {
          inv_freq[i] = (float)pow(10000, -2.0 * i / n);
          const int32_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + n / 2;
          const float angle = (float)position * inv_freq[i];
          c[first] = c[second] = (float)cos(angle);
          s[second] = (float)sin(angle);
          s[first] = -s[second];
        }
        ops->rope(x, c, s, n, interleaved);
        ref_rope(want, n, inv_freq, 1, position, interleaved);
        check("rope", isa, x, want, n, 1e-6);
      }
  }
}

/* Scores and weighted values of one page, in both storage types, for every number of rows up to 13 and tokens around vectors. */
static void test_page_products(void **state)
{
  (void)state;
  static const int32_t head_dims[] = {8, 64, 80, 96, 128}, counts[] = {1, 15, 16, 17, P - 1, P};
  static float q[13 * 128], k32[128 * P], v32[P * 128], p[13 * P], scores[13 * P + 1], acc[13 * 128 + 1];
  static uint16_t k16[128 * P], v16[P * 128];
  FOR_EACH_LEVEL(isa, ops)
  {
    for (size_t di = 0; di < 5; di++)
      for (size_t ni = 0; ni < 6; ni++)
        for (int32_t rows = 1; rows <= 13; rows++) {
          const int32_t D = head_dims[di], n = counts[ni], dv = (D + CPU_V_ALIGN - 1) / CPU_V_ALIGN * CPU_V_ALIGN;
          fill(q, rows * D, 1);
          fill(p, rows * P, 1);
          for (int32_t i = 0; i < D * P; i++) k32[i] = half_to_float(k16[i] = float_to_half(uniform(2)));
          for (int32_t i = 0; i < P * dv; i++) v32[i] = half_to_float(v16[i] = float_to_half(uniform(2)));
          for (int is_f16 = 0; is_f16 < 2; is_f16++) {
            scores[rows * P] = acc[rows * dv] = 1234.5f;
            for (int32_t i = 0; i < rows * dv; i++) acc[i] = (float)(i % 5);
            if (is_f16) ops->qk_f16(q, D, rows, k16, P, D, n, scores, P, rows % 2 ? k16 : NULL);
            else ops->qk_f32(q, D, rows, k32, P, D, n, scores, P, rows % 2 ? k32 : NULL);
            if (is_f16) ops->pv_f16(p, P, rows, v16, dv, n, acc, rows % 2 ? v16 : NULL);
            else ops->pv_f32(p, P, rows, v32, dv, n, acc, rows % 2 ? v32 : NULL);
            for (int32_t r = 0; r < rows; r++) {
              for (int32_t j = 0; j < n; j++) {
                double want = 0;
                for (int32_t d = 0; d < D; d++) want += (double)q[r * D + d] * k32[d * P + j];
                assert_true(fabs(scores[r * P + j] - want) <= 2e-5);
              }
              for (int32_t c = 0; c < dv; c++) {
                double want = (r * dv + c) % 5;
                for (int32_t j = 0; j < n; j++) want += (double)p[r * P + j] * v32[j * dv + c];
                assert_true(fabs(acc[r * dv + c] - want) <= 5e-5);
              }
            }
            assert_true(scores[rows * P] == 1234.5f && acc[rows * dv] == 1234.5f);
          }
        }
  }
}

static void test_softmax(void **state)
{
  (void)state;
  static const int32_t ranges[][2] = {{0, 1}, {0, 256}, {3, 4}, {15, 17}, {16, 32}, {1, 255}, {200, 241}, {255, 256}};
  FOR_EACH_LEVEL(isa, ops)
  {
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
      float s[257], top;
      const int32_t lo = ranges[i][0], hi = ranges[i][1];
      double want_top = -INFINITY, want_sum = 0, want[256] = {0};
      fill(s, 256, 40);
      s[lo] = -300; /* far below the rest: its weight is nothing or next to it */
      s[256] = 1234.5f;
      for (int32_t j = lo; j < hi; j++) want_top = fmax(want_top, s[j]);
      for (int32_t j = lo; j < hi; j++) want_sum += want[j] = exp(s[j] - want_top);
      if (lo > 0) s[0] = NAN; /* what lies outside must not matter */
      if (hi < 256) s[255] = INFINITY;
      const float sum = ops->softmax(s, 256, lo, hi, &top);
      assert_true(top == (float)want_top);
      assert_true(fabs(sum - want_sum) <= 1e-5 * want_sum);
      check("softmax", isa, s, want, 256, 1e-6);
    }
  }
}

static void test_to_f16_and_hadamard(void **state)
{
  (void)state;
  FOR_EACH_LEVEL(isa, ops)
  {
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
      const int32_t n = sizes[k];
      float x[MAX];
      uint16_t half[MAX];
      fill(x, n, 100);
      x[0] = 1e9f;
      if (n > 1) x[n - 1] = -INFINITY;
      half[n] = 0x1234;
      ops->to_f16(x, n, half);
      for (int32_t i = 0; i < n; i++)
        assert_int_equal(half[i], float_to_half(fminf(fmaxf(x[i], -65504), 65504)));
      assert_int_equal(half[n], 0x1234);
    }
    for (int32_t n = 1; n <= 256; n *= 2) {
      float x[257];
      double want[256];
      fill(x, n, 5);
      x[n] = 1234.5f;
      widen(x, n, want);
      ops->hadamard(x, n);
      ref_hadamard(want, n);
      check("hadamard", isa, x, want, n, 2e-6);
    }
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_rowwise), cmocka_unit_test(test_swiglu_extremes), cmocka_unit_test(test_rope),
                                     cmocka_unit_test(test_page_products), cmocka_unit_test(test_softmax),
                                     cmocka_unit_test(test_to_f16_and_hadamard)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
