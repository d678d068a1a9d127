/* The one body of the vector primitives (cpu_ops.h), included by cpu_ops_scalar.c, cpu_ops_avx2.c and cpu_ops_avx512.c after they have
 * defined a vector word:
 *   VEC, VW (lanes), v_load v_load_h(f16) v_store v_set1 v_add v_sub v_mul v_div v_max v_min, v_fma(a, b, c) = a * b + c,
 *   v_round, v_exp2i(n) = 2^n for integral n in [-126, 127], v_sum, v_top (horizontal), v_swap_pairs where VW > 1,
 *   v_keep(v, lo, hi, other): lanes lo <= i < hi of v, other elsewhere; v_store_h. CPU_OPS names the table to define.
 * A level that brings its own 4-bit expansions and quantisers defines CPU_OPS_OWN_4BIT, its own rotation CPU_OPS_OWN_HADAMARD.
 * Tails shorter than a vector are done lane by lane with the same formula. */
#ifndef SITS_BACKEND_CPU_CPU_OPS_BODY_H
#define SITS_BACKEND_CPU_CPU_OPS_BODY_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "backend/backend.h"
#include "backend/cpu/cpu_kv_code.h"
#include "tensor/walsh.h"

#define P KV_PAGE_TOKENS
#define INLINE static inline __attribute__((always_inline))

/* exp of n vectors, at most 4, side by side, by range reduction to 2^n * 2^f, |f| <= 1/2, and a polynomial (Taylor with economised last
 * terms, relative error under 2e-7); arguments are clamped to [-87, 88], so results are finite and normal. */
#define EACH _Pragma("GCC unroll 4") for (int i = 0; i < n; i++)
INLINE void exp_n(VEC *x, const int n)
{
  VEC whole[4], r[4], p[4];
  EACH x[i] = v_min(v_max(x[i], v_set1(-87.0f)), v_set1(88.0f));
  EACH whole[i] = v_round(v_mul(x[i], v_set1(1.44269504088896341f)));
  EACH r[i] = v_fma(whole[i], v_set1(-0.693359375f), x[i]);
  EACH r[i] = v_fma(whole[i], v_set1(2.12194440e-4f), r[i]);
  EACH p[i] = v_fma(v_set1(1.9875691500e-4f), r[i], v_set1(1.3981999507e-3f));
  EACH p[i] = v_fma(p[i], r[i], v_set1(8.3334519073e-3f));
  EACH p[i] = v_fma(p[i], r[i], v_set1(4.1665795894e-2f));
  EACH p[i] = v_fma(p[i], r[i], v_set1(1.6666665459e-1f));
  EACH p[i] = v_fma(p[i], r[i], v_set1(5.0000001201e-1f));
  EACH p[i] = v_add(v_fma(v_mul(p[i], r[i]), r[i], r[i]), v_set1(1.0f));
  EACH x[i] = v_mul(p[i], v_exp2i(whole[i]));
}
#undef EACH

INLINE VEC exp_v(VEC x)
{
  exp_n(&x, 1);
  return x;
}

static void op_rmsnorm(const float *x, const float *gain, int32_t n, float eps, float *y)
{
  VEC s0 = v_set1(0), s1 = v_set1(0);
  int32_t i = 0;
  for (; i + 2 * VW <= n; i += 2 * VW) {
    const VEC a = v_load(x + i), b = v_load(x + i + VW);
    s0 = v_fma(a, a, s0);
    s1 = v_fma(b, b, s1);
  }
  float sum = v_sum(v_add(s0, s1));
  for (; i < n; i++) sum += x[i] * x[i];
  const float scale = 1.0f / sqrtf(sum / (float)n + eps);
  for (i = 0; i + VW <= n; i += VW) v_store(y + i, v_mul(v_mul(v_load(x + i), v_set1(scale)), v_load(gain + i)));
  for (; i < n; i++) y[i] = x[i] * scale * gain[i];
}

static void rope_interleaved(float *x, const float *cosines, const float *sines, int32_t dims)
{
  int32_t i = 0;
#if VW > 1
  for (; i + VW <= dims; i += VW) {
    const VEC v = v_load(x + i);
    v_store(x + i, v_fma(v, v_load(cosines + i), v_mul(v_swap_pairs(v), v_load(sines + i))));
  }
#endif
  for (; i < dims; i += 2) {
    const float a = x[i], b = x[i + 1];
    x[i] = a * cosines[i] + b * sines[i];
    x[i + 1] = b * cosines[i + 1] + a * sines[i + 1];
  }
}

static void op_rope(float *x, const float *cosines, const float *sines, int32_t dims, bool is_interleaved)
{
  if (is_interleaved) {
    rope_interleaved(x, cosines, sines, dims);
    return;
  }
  const int32_t half = dims / 2;
  int32_t i = 0;
  for (; i + VW <= half; i += VW) {
    const VEC a = v_load(x + i), b = v_load(x + half + i);
    v_store(x + i, v_fma(a, v_load(cosines + i), v_mul(b, v_load(sines + i))));
    v_store(x + half + i, v_fma(b, v_load(cosines + half + i), v_mul(a, v_load(sines + half + i))));
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosines[i] + b * sines[i];
    x[half + i] = b * cosines[half + i] + a * sines[half + i];
  }
}

INLINE VEC swiglu_v(VEC g, VEC u) { return v_mul(v_div(g, v_add(v_set1(1.0f), exp_v(v_sub(v_set1(0), g)))), u); }

static void op_swiglu(const float *gate, const float *up, int32_t n, float *y)
{
  int32_t i = 0;
  for (; i + VW <= n; i += VW) v_store(y + i, swiglu_v(v_load(gate + i), v_load(up + i)));
  if (i < n) {
    float g[VW] = {0}, u[VW] = {0};
    for (int32_t k = 0; k < n - i; k++) g[k] = gate[i + k], u[k] = up[i + k];
    v_store(g, swiglu_v(v_load(g), v_load(u)));
    for (int32_t k = 0; k < n - i; k++) y[i + k] = g[k];
  }
}

static void op_add(const float *a, const float *b, int32_t n, float *y)
{
  int32_t i = 0;
  for (; i + VW <= n; i += VW) v_store(y + i, v_add(v_load(a + i), v_load(b + i)));
  for (; i < n; i++) y[i] = a[i] + b[i];
}

static void op_scale_add(float *y, float b, const float *x, float a, int32_t n)
{
  int32_t i = 0;
  for (; i + VW <= n; i += VW) v_store(y + i, v_fma(v_load(x + i), v_set1(a), v_mul(v_load(y + i), v_set1(b))));
  for (; i < n; i++) y[i] = x[i] * a + y[i] * b;
}

/* ---- attention ---- */

/* Beside each row of a block its place in the next one, into L2: hardware prefetchers stop at the end of a 4 KB page, and a burst between
 * two blocks would stand in the way of their reads. */
#define FETCH(next, at) __builtin_prefetch((next) + (at), 0, 2)
#define LINE_VECTORS(TYPE) (64 / (VW * (int)sizeof(TYPE)) > 0 ? 64 / (VW * (int)sizeof(TYPE)) : 1)

/* Rows that share what is loaded of a block, as many as sums fit the registers beside it: more are cut into equal parts. */
#if VW == 16
#define MOST_ROWS 12
#define EACH_ROWS(X, NAME) \
  X(NAME, 1) X(NAME, 2) X(NAME, 3) X(NAME, 4) X(NAME, 5) X(NAME, 6) X(NAME, 7) X(NAME, 8) X(NAME, 9) X(NAME, 10) X(NAME, 11) X(NAME, 12)
#define PV_COLUMNS(R) ((R) <= 6 ? 4 : 2)
#else
#define MOST_ROWS 6
#define EACH_ROWS(X, NAME) X(NAME, 1) X(NAME, 2) X(NAME, 3) X(NAME, 4) X(NAME, 5) X(NAME, 6)
#define PV_COLUMNS(R) 2
#endif
#define QK_CASE(NAME, R) case R: NAME##_rows(q, ldq, k, ldk, head_dim, nv, s, lds, next, R, (R) <= 3 ? 4 : 2); break;
#define PV_CASE(NAME, R) case R: NAME##_rows(p, ldp, v, dv, n, acc, next, R, PV_COLUMNS(R)); break;

/* One tile of scores: R rows by NT vectors of tokens, all D channels. R and NT are constants at every call, so acc lives in registers. */
#define QK_TILE(NAME, TYPE, LOAD)                                                                                              \
  INLINE void NAME##_tile(const float *q, int32_t ldq, const TYPE *k, int32_t ldk, int32_t head_dim, float *s, int32_t lds,    \
                          const TYPE *next, const int R, const int NT)                                                         \
  {                                                                                                                            \
    VEC acc[MOST_ROWS][4];                                                                                                     \
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                                       \
      _Pragma("GCC unroll 8") for (int t = 0; t < NT; t++) acc[r][t] = v_set1(0);                                              \
    for (int32_t d = 0; d < head_dim; d++) {                                                                                   \
      VEC kv[4];                                                                                                               \
      _Pragma("GCC unroll 8") for (int t = 0; t < NT; t++) kv[t] = LOAD(k + (size_t)d * (size_t)ldk + t * VW);                 \
      if (next) {                                                                                                              \
        _Pragma("GCC unroll 8") for (int t = 0; t < NT; t += LINE_VECTORS(TYPE)) FETCH(next, (size_t)d * (size_t)ldk + (size_t)(t * VW)); \
      }                                                                                                                        \
      _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                                                                   \
        const VEC qv = v_set1(q[(size_t)r * ldq + d]);                                                                         \
        _Pragma("GCC unroll 8") for (int t = 0; t < NT; t++) acc[r][t] = v_fma(qv, kv[t], acc[r][t]);                          \
      }                                                                                                                        \
    }                                                                                                                          \
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                                       \
      _Pragma("GCC unroll 8") for (int t = 0; t < NT; t++) v_store(s + (size_t)r * lds + t * VW, acc[r][t]);                   \
  }                                                                                                                            \
  INLINE void NAME##_rows(const float *q, int32_t ldq, const TYPE *k, int32_t ldk, int32_t head_dim, int32_t nv, float *s,     \
                          int32_t lds, const TYPE *next, const int R, const int NT)                                            \
  {                                                                                                                            \
    int32_t t = 0;                                                                                                             \
    for (; t + NT <= nv; t += NT)                                                                                              \
      NAME##_tile(q, ldq, k + t * VW, ldk, head_dim, s + t * VW, lds, next ? next + t * VW : next, R, NT);                     \
    for (; t < nv; t++) NAME##_tile(q, ldq, k + t * VW, ldk, head_dim, s + t * VW, lds, next ? next + t * VW : next, R, 1);    \
  }                                                                                                                            \
  static void op_##NAME(const float *q, int32_t ldq, int32_t rows, const TYPE *k, int32_t ldk, int32_t head_dim, int32_t n,    \
                        float *s, int32_t lds, const TYPE *next)                                                               \
  {                                                                                                                            \
    const int32_t nv = (n + CPU_V_ALIGN - 1) / CPU_V_ALIGN * (CPU_V_ALIGN / VW);                                               \
    const int32_t n_parts = (rows + MOST_ROWS - 1) / MOST_ROWS;                                                                \
    for (int32_t i = 0; i < n_parts; i++, next = NULL) {                                                                       \
      const int32_t part = (rows * (i + 1)) / n_parts - rows * i / n_parts;                                                    \
      switch (part) {                                                                                                          \
        EACH_ROWS(QK_CASE, NAME)                                                                                               \
      default: break;                                                                                                          \
      }                                                                                                                        \
      q += (size_t)part * ldq;                                                                                                 \
      s += (size_t)part * lds;                                                                                                 \
    }                                                                                                                          \
  }

QK_TILE(qk_f16, uint16_t, v_load_h)
QK_TILE(qk_f32, float, v_load)

/* One tile of outputs: R rows by NC vectors of channels, all tokens in ascending order. */
#define PV_TILE(NAME, TYPE, LOAD)                                                                                              \
  INLINE void NAME##_tile(const float *p, int32_t ldp, const TYPE *v, int32_t dv, int32_t n, float *o, const TYPE *next, const int R, \
                          const int NC)                                                                                        \
  {                                                                                                                            \
    VEC acc[MOST_ROWS][4];                                                                                                     \
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                                       \
      _Pragma("GCC unroll 8") for (int c = 0; c < NC; c++) acc[r][c] = v_load(o + (size_t)r * dv + c * VW);                    \
    for (int32_t j = 0; j < n; j++) {                                                                                          \
      VEC vv[4];                                                                                                               \
      _Pragma("GCC unroll 8") for (int c = 0; c < NC; c++) vv[c] = LOAD(v + (size_t)j * dv + c * VW);                          \
      if (next) {                                                                                                              \
        _Pragma("GCC unroll 8") for (int c = 0; c < NC; c += LINE_VECTORS(TYPE)) FETCH(next, (size_t)j * (size_t)dv + (size_t)(c * VW)); \
      }                                                                                                                        \
      _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                                                                   \
        const VEC pv = v_set1(p[(size_t)r * ldp + j]);                                                                         \
        _Pragma("GCC unroll 8") for (int c = 0; c < NC; c++) acc[r][c] = v_fma(pv, vv[c], acc[r][c]);                          \
      }                                                                                                                        \
    }                                                                                                                          \
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                                       \
      _Pragma("GCC unroll 8") for (int c = 0; c < NC; c++) v_store(o + (size_t)r * dv + c * VW, acc[r][c]);                    \
  }                                                                                                                            \
  INLINE void NAME##_rows(const float *p, int32_t ldp, const TYPE *v, int32_t dv, int32_t n, float *o, const TYPE *next,       \
                          const int R, const int NC)                                                                           \
  {                                                                                                                            \
    int32_t c = 0;                                                                                                             \
    for (; c + NC * VW <= dv; c += NC * VW)                                                                                    \
      NAME##_tile(p, ldp, v + c, dv, n, o + c, next ? next + c : next, R, NC);                                                 \
    for (; c < dv; c += VW) NAME##_tile(p, ldp, v + c, dv, n, o + c, next ? next + c : next, R, 1);                            \
  }                                                                                                                            \
  static void op_##NAME(const float *p, int32_t ldp, int32_t rows, const TYPE *v, int32_t dv, int32_t n, float *acc,           \
                        const TYPE *next)                                                                                      \
  {                                                                                                                            \
    const int32_t n_parts = (rows + MOST_ROWS - 1) / MOST_ROWS;                                                                \
    for (int32_t i = 0; i < n_parts; i++, next = NULL) {                                                                       \
      const int32_t part = (rows * (i + 1)) / n_parts - rows * i / n_parts;                                                    \
      switch (part) {                                                                                                          \
        EACH_ROWS(PV_CASE, NAME)                                                                                               \
      default: break;                                                                                                          \
      }                                                                                                                        \
      p += (size_t)part * ldp;                                                                                                 \
      acc += (size_t)part * dv;                                                                                                \
    }                                                                                                                          \
  }

PV_TILE(pv_f16, uint16_t, v_load_h)
PV_TILE(pv_f32, float, v_load)

/* Four vectors at a time, of which those outside lo..hi are looked at lane by lane. The sum is taken in the order of the lanes. */
static float op_softmax(float *s, int32_t n, int32_t lo, int32_t hi, float *max)
{
  const int32_t v0 = lo / VW * VW, v1 = (hi + VW - 1) / VW * VW; /* the vectors that hold kept lanes */
  VEC top[4] = {v_set1(-INFINITY), v_set1(-INFINITY), v_set1(-INFINITY), v_set1(-INFINITY)}, sum = v_set1(0);
  for (int32_t i = v0; i < v1; i += 4 * VW) {
    const bool is_whole = i >= lo && i + 4 * VW <= hi;
    for (int32_t j = 0, at = i; j < 4 && at < v1; j++, at += VW)
      top[j] = v_max(top[j], is_whole ? v_load(s + at) : v_keep(v_load(s + at), lo - at, hi - at, v_set1(-INFINITY)));
  }
  const VEC m = v_set1(*max = v_top(v_max(v_max(top[0], top[1]), v_max(top[2], top[3]))));
  for (int32_t i = 0; i < v0; i += VW) v_store(s + i, v_set1(0));
  for (int32_t i = v0; i < v1; i += 4 * VW) {
    const bool is_whole = i >= lo && i + 4 * VW <= hi;
    VEC e[4];
    for (int32_t j = 0, at = i; j < 4; j++, at += VW) e[j] = at < v1 ? v_sub(v_load(s + at), m) : v_set1(0);
    exp_n(e, 4);
    for (int32_t j = 0, at = i; j < 4 && at < v1; j++, at += VW) {
      if (!is_whole) e[j] = v_keep(e[j], lo - at, hi - at, v_set1(0));
      sum = v_add(sum, e[j]);
      v_store(s + at, e[j]);
    }
  }
  for (int32_t i = v1; i < n; i += VW) v_store(s + i, v_set1(0));
  return v_sum(sum);
}

/* ---- expansion of quantised blocks: plain loops, which the compiler turns into vectors of each level ---- */

static void op_expand_i8_columns(const int8_t *restrict x, const float *restrict scales, int32_t rows, float *restrict y)
{
  for (int32_t r = 0; r < rows; r++)
    for (int32_t j = 0; j < P; j++) y[r * P + j] = (float)x[r * P + j] * scales[j];
}

static void op_expand_i8_row(const int8_t *restrict x, float scale, int32_t n, float *restrict y)
{
  for (int32_t i = 0; i < n; i++) y[i] = (float)x[i] * scale;
}

#ifndef CPU_OPS_OWN_4BIT
static void op_expand_u4(const uint8_t *restrict x, const uint8_t *restrict scales, const int8_t *restrict zeros, int32_t n_groups,
                         float *restrict y)
{
  for (int32_t g = 0; g < n_groups; g++, x += 16, y += 32) {
    const float scale = cpu_kv_scale(scales[g]);
    const int32_t zero = zeros[g];
    for (int32_t i = 0; i < 16; i++) y[i] = (float)((x[i] & 15) - zero) * scale;
    for (int32_t i = 0; i < 16; i++) y[16 + i] = (float)((x[i] >> 4) - zero) * scale;
  }
}

/* Twice the value of an e2m1 number: 0 1 2 3 4 6 8 12, sign in bit 3. */
INLINE int32_t e2m1_doubled(int32_t code)
{
  const int32_t exponent = code >> 1 & 3, mantissa = code & 1, sign = -(code >> 3 & 1);
  const int32_t size = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
  return (size ^ sign) - sign;
}

static void op_expand_fp4_columns(const uint8_t *restrict x, const uint8_t *restrict scales, const float *restrict means, int32_t rows,
                                  float *restrict y)
{
  float s[P];
  for (int32_t r = 0; r < rows; r++, x += P / 2, y += P) {
    if (r % 16 == 0)
      for (int32_t j = 0; j < P; j++) s[j] = 0.5f * cpu_kv_scale(scales[r / 16 * P + j]);
    const float mean = means[r];
    for (int32_t i = 0; i < P / 2; i++) y[i] = (float)e2m1_doubled(x[i] & 15) * s[i] + mean;
    for (int32_t i = 0; i < P / 2; i++) y[P / 2 + i] = (float)e2m1_doubled(x[i] >> 4) * s[P / 2 + i] + mean;
  }
}

static void op_expand_fp4_groups(const uint8_t *restrict x, const uint8_t *restrict scales, int32_t n_groups, float *restrict y)
{
  for (int32_t g = 0; g < n_groups; g++, x += 8, y += 16) {
    const float scale = 0.5f * cpu_kv_scale(scales[g]);
    for (int32_t i = 0; i < 8; i++) y[i] = (float)e2m1_doubled(x[i] & 15) * scale;
    for (int32_t i = 0; i < 8; i++) y[8 + i] = (float)e2m1_doubled(x[i] >> 4) * scale;
  }
}

#endif

/* ---- quantisers ---- */

/* Nearest integer, ties to even; what is beyond 10^4 is not needed by any caller. */
INLINE float nearest(float x)
{
  x = x < -1e4f ? -1e4f : x > 1e4f ? 1e4f : x;
  return (x + 12582912.0f) - 12582912.0f;
}

#ifndef CPU_OPS_OWN_4BIT
/* Sum of n values, n a power of two, as a tree: its order is that of the reference at every level, and loops become vectors. */
INLINE float tree_sum(float *x, int32_t n)
{
  for (int32_t half = n / 2; half > 0; half /= 2)
    for (int32_t i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}

/* Squared error of x under (q - zero) * scale; lanes from n on count nothing. codes: [32]. */
INLINE float u4_error(const float *x, int32_t n, float scale, float zero, uint8_t *codes)
{
  const float inverse = scale > 0 ? 1 / scale : 0;
  float error[32];
  for (int32_t i = 0; i < 32; i++) {
    float q = nearest(x[i] * inverse) + zero;
    q = q < 0 ? 0 : q > 15 ? 15 : q;
    codes[i] = (uint8_t)(int32_t)q;
    const float e = (q - zero) * scale - x[i];
    error[i] = i < n ? e * e : 0;
  }
  return tree_sum(error, 32);
}

static void op_quantize_u4(const float *x, int32_t n, uint8_t *codes, uint8_t *scale, int8_t *zero)
{
  float padded[32], lows[32], highs[32], best = INFINITY;
  for (int32_t i = 0; i < 32; i++) padded[i] = lows[i] = highs[i] = x[i < n ? i : 0];
  for (int32_t half = 16; half > 0; half /= 2)
    for (int32_t i = 0; i < half; i++) {
      lows[i] = lows[i] < lows[i + half] ? lows[i] : lows[i + half];
      highs[i] = highs[i] > highs[i + half] ? highs[i] : highs[i + half];
    }
  const float lo = lows[0], hi = highs[0], size = -lo > hi ? -lo : hi;
  const float span = (hi - lo) / 15, least = size / 120; /* the floor keeps the zero point in int8 */
  const int32_t first = cpu_kv_scale_code(span > least ? span : least);
  for (int32_t code = first; code < first + 3 && code < 256; code++) {
    const float s = cpu_kv_scale((uint8_t)code), middle = s > 0 ? nearest(-lo / s) : 0;
    for (int shift = -1; shift <= 1; shift++) {
      uint8_t tried[32];
      float z = middle + (float)shift;
      z = z < -128 ? -128 : z > 127 ? 127 : z;
      const float error = u4_error(padded, n, s, z, tried);
      if (!(error < best)) continue;
      best = error;
      *scale = (uint8_t)code;
      *zero = (int8_t)z;
      for (int32_t i = 0; i < 32; i++) codes[i] = i < n ? tried[i] : 0;
    }
  }
}

/* e2m1 of x * inverse: steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6. */
INLINE float fp4_error(const float *x, float scale, uint8_t *codes)
{
  const float inverse = scale > 0 ? 1 / scale : 0;
  float error[16];
  for (int32_t i = 0; i < 16; i++) {
    const float size = x[i] < 0 ? -x[i] : x[i], a = size * inverse;
    const float fine = nearest(a * 2), whole = nearest(a) * 2, coarse = nearest(a * 0.5f) * 4;
    float doubled = a < 2 ? fine : a < 4 ? whole : coarse;
    doubled = doubled > 12 ? 12 : doubled;
    const int32_t d = (int32_t)doubled;
    codes[i] = (uint8_t)((d < 4 ? d : d < 8 ? d / 2 + 2 : d / 4 + 4) | (x[i] < 0 ? 8 : 0));
    const float e = doubled * 0.5f * scale - size;
    error[i] = e * e;
  }
  return tree_sum(error, 16);
}

static void op_quantize_fp4(const float *x, int32_t n, uint8_t *codes, uint8_t *scale)
{
  static const float tops[5] = {6, 5.5f, 5, 4.5f, 4};
  float padded[16], sizes[16], best = INFINITY;
  for (int32_t i = 0; i < 16; i++) padded[i] = i < n ? x[i] : 0;
  for (int32_t i = 0; i < 16; i++) sizes[i] = padded[i] < 0 ? -padded[i] : padded[i];
  for (int32_t half = 8; half > 0; half /= 2)
    for (int32_t i = 0; i < half; i++) sizes[i] = sizes[i] > sizes[i + half] ? sizes[i] : sizes[i + half];
  for (int k = 0; k < 5; k++) {
    uint8_t tried[16];
    const uint8_t code = cpu_kv_scale_code(sizes[0] / tops[k]);
    const float error = fp4_error(padded, cpu_kv_scale(code), tried);
    if (!(error < best)) continue;
    best = error;
    *scale = code;
    for (int32_t i = 0; i < 16; i++) codes[i] = tried[i];
  }
}

#endif

static float op_quantize_i8(const float *x, int32_t n, int8_t *codes)
{
  int32_t top = 0; /* sizes compare as their bits */
  for (int32_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  float size;
  memcpy(&size, &top, sizeof size);
  size = size < 1e30f ? size : 1e30f;
  const float inverse = size > 0 ? 127 / size : 0;
  for (int32_t i = 0; i < n; i++) codes[i] = (int8_t)(int32_t)nearest(x[i] * inverse);
  return size / 127;
}

static void op_to_f16(const float *x, int32_t n, uint16_t *y)
{
  const VEC top = v_set1(65504.0f), bottom = v_set1(-65504.0f);
  int32_t i = 0;
  for (; i + VW <= n; i += VW) v_store_h(y + i, v_max(v_min(v_load(x + i), top), bottom));
  if (i < n) {
    float tail[VW] = {0};
    uint16_t half[VW];
    for (int32_t k = 0; k < n - i; k++) tail[k] = x[i + k];
    v_store_h(half, v_max(v_min(v_load(tail), top), bottom));
    for (int32_t k = 0; k < n - i; k++) y[i + k] = half[k];
  }
}

#ifndef CPU_OPS_OWN_HADAMARD
static void op_hadamard(float *x, int32_t n)
{
  walsh_transform(x, n);
  const float scale = 1.0f / sqrtf((float)n);
  for (int32_t i = 0; i < n; i++) x[i] *= scale;
}
#endif

const struct cpu_ops CPU_OPS = {
    .rmsnorm = op_rmsnorm, .rope = op_rope, .swiglu = op_swiglu, .add = op_add, .scale_add = op_scale_add, .qk_f16 = op_qk_f16,
    .qk_f32 = op_qk_f32, .pv_f16 = op_pv_f16, .pv_f32 = op_pv_f32, .softmax = op_softmax,
    .expand_i8_columns = op_expand_i8_columns, .expand_i8_row = op_expand_i8_row, .expand_u4 = op_expand_u4,
    .expand_fp4_columns = op_expand_fp4_columns, .expand_fp4_groups = op_expand_fp4_groups,
    .quantize_u4 = op_quantize_u4, .quantize_fp4 = op_quantize_fp4, .quantize_i8 = op_quantize_i8,
    .to_f16 = op_to_f16, .hadamard = op_hadamard};

#endif
