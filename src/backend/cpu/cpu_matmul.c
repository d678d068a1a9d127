/* Dispatch of the CPU matrix multiply, and its scalar level, which is also the plainest statement of the arithmetic.
 * Entry points: cpu_act_quantize, cpu_matmul; kernels of the other levels are in cpu_matmul_avx2.c and cpu_matmul_avx512.c. */
#include "backend/cpu/cpu_matmul.h"

#include <math.h>
#include <string.h>

#include "backend/cpu/cpu_quant.h"
#include "tensor/dequant.h"

enum cpu_act_format cpu_act_format(const struct cpu_weight *w) { return w->format ? CPU_ACT_Q8 : CPU_ACT_F32; }

size_t cpu_act_bytes(const struct cpu_weight *w, int32_t n_tokens)
{
  int32_t tile = cpu_act_tile(n_tokens);
  size_t tiles = n_tokens > 0 ? ((size_t)n_tokens + (size_t)tile - 1) / (size_t)tile : 0;
  return tiles * (w->format ? cpu_act_tile_bytes_q8(w->k, tile) : cpu_act_tile_bytes_f32(w->k, tile));
}

static void act_float(const float *x, int64_t k, int32_t token, int32_t n_tokens, uint8_t *act)
{
  int32_t n = cpu_act_tile(n_tokens);
  float *tile = (float *)(act + cpu_act_tile_bytes_f32(k, n) * (size_t)(token / n)) + token % n;
  for (int64_t i = 0; i < k; i++) tile[i * n] = x ? x[i] : 0.0F;
}

void cpu_act_quantize(const struct cpu_weight *w, const float *x, int64_t ldx, int32_t n_tokens, int32_t t0, int32_t t1, void *act)
{
  int32_t tile = cpu_act_tile(n_tokens), end = t1;
  /* Whoever has the last token fills the rest of its tile. */
  if (t1 == n_tokens && t0 < t1) end = (n_tokens + tile - 1) / tile * tile;
  for (int32_t t = t0; t < end; t++) {
    const float *row = t < n_tokens ? x + t * ldx : NULL;
    if (w->format) w->ops->quantize(row, w->k, t, n_tokens, act);
    else act_float(row, w->k, t, n_tokens, act);
  }
}

void cpu_matmul(const struct cpu_weight *w, const void *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y, int64_t ldy,
                void *scratch)
{
  if (n_tokens > 0 && r1 > r0) w->ops->matmul(w, act, n_tokens, r0, r1, y, ldy, scratch);
}

/* ---- scalar level ------------------------------------------------------------------------------------------------------------------ */

static int32_t clamp127(int32_t v) { return v < -127 ? -127 : v > 127 ? 127 : v; }

/* One group of 32. x NULL: a token past the last. */
static void quantize_group(const float *x, struct cpu_act_ref at)
{
  float lo = 0.0F, hi = 0.0F, s = 0.0F, inv = 0.0F;
  int32_t z = 0, b[2] = {0, 0};
  bool is_finite = true;
  for (int i = 0; x && i < CPU_GROUP; i++) {
    lo = x[i] < lo ? x[i] : lo;
    hi = x[i] > hi ? x[i] : hi;
    is_finite = is_finite && isfinite(x[i]);
  }
  if (!is_finite || !isfinite(hi - lo)) {
    s = NAN;
  } else if (hi - lo >= CPU_MIN_RANGE) {
    s = (hi - lo) / 254.0F;
    inv = 254.0F / (hi - lo);
    z = clamp127((int32_t)lrintf((hi + lo) * 0.5F * inv));
  }
  for (int i = 0; i < CPU_GROUP; i++) {
    int32_t a = inv > 0.0F ? clamp127((int32_t)lrintf(x[i] * inv) - z) : 0;
    at.a[i] = (int8_t)a;
    b[i / 16] += a + z;
  }
  *at.s = s;
  at.pair[0] = (int16_t)z;
  at.pair[1] = (int16_t)-(b[0] + b[1]);
  *at.x = s * (float)(b[0] + b[1]);
  for (int h = 0; h < 2; h++) {
    at.pair_half[h][0] = (int16_t)z;
    at.pair_half[h][1] = (int16_t)-b[h];
    *at.x_half[h] = s * (float)b[h];
  }
}

static void quantize_scalar(const float *x, int64_t k, int32_t token, int32_t n_tokens, uint8_t *act)
{
  for (int64_t g = 0; g < k / CPU_GROUP; g++) quantize_group(x ? x + g * CPU_GROUP : NULL, cpu_act_at(act, k, n_tokens, token, g));
}

/* One unpacked group of a row times one token, added to sum. */
static float add_group(const struct cpu_quant_format *f, const struct cpu_quant_row *q, struct cpu_act_ref at, float sum)
{
  int width = CPU_GROUP / f->halves;
  for (int h = 0; h < f->halves; h++) {
    const int16_t *pair = f->halves == 1 ? at.pair : at.pair_half[h];
    int32_t dot = 0, n = 0;
    for (int i = h * width; i < (h + 1) * width; i++) {
      dot += (int32_t)q->u[i] * at.a[i];
      n += q->u[i];
    }
    dot += n * pair[0] + f->offset * pair[1];
    sum = fmaf((float)dot, q->d[h] * *at.s, sum);
    if (f->has_min) sum = fmaf(q->m[h], f->halves == 1 ? *at.x : *at.x_half[h], sum);
  }
  return sum;
}

static void matmul_quant_scalar(const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y,
                                int64_t ldy)
{
  for (int64_t r = r0; r < r1; r++)
    for (int32_t t0 = 0; t0 < n_tokens; t0 += 8) { /* an unpacked group serves eight tokens */
      float sum[8] = {0};
      int32_t n = n_tokens - t0 < 8 ? n_tokens - t0 : 8;
      for (int64_t g = 0; g < w->k / CPU_GROUP; g++) {
        struct cpu_quant_row q;
        cpu_quant_unpack(w, r / w->tile, g, (int32_t)(r % w->tile), &q);
        for (int32_t t = 0; t < n; t++) sum[t] = add_group(w->format, &q, cpu_act_at(act, w->k, n_tokens, t0 + t, g), sum[t]);
      }
      for (int32_t t = 0; t < n; t++) y[(t0 + t) * ldy + r] = sum[t];
    }
}

static float weight_at(enum sits_dtype dtype, const uint8_t *tile, size_t index)
{
  float f;
  uint16_t h;
  if (dtype == SITS_DTYPE_F32) {
    memcpy(&f, tile + index * 4, sizeof f);
    return f;
  }
  memcpy(&h, tile + index * 2, sizeof h);
  return dtype == SITS_DTYPE_F16 ? half_to_float(h) : bf16_to_float(h);
}

static void matmul_float_scalar(const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y,
                                int64_t ldy)
{
  int32_t n_tile = cpu_act_tile(n_tokens);
  for (int64_t r = r0; r < r1; r++) {
    const uint8_t *tile = w->data + (size_t)(r / w->tile) * w->tile_bytes;
    size_t lane = (size_t)(r % w->tile);
    for (int32_t t = 0; t < n_tokens; t++) {
      const float *x = (const float *)(act + cpu_act_tile_bytes_f32(w->k, n_tile) * (size_t)(t / n_tile)) + t % n_tile;
      float sum = 0.0F;
      for (int64_t k = 0; k < w->k; k++) sum = fmaf(weight_at(w->dtype, tile, (size_t)k * (size_t)w->tile + lane), x[k * n_tile], sum);
      y[t * ldy + r] = sum;
    }
  }
}

static void matmul_scalar(const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y, int64_t ldy,
                          uint8_t *scratch)
{
  (void)scratch;
  if (w->format) matmul_quant_scalar(w, act, n_tokens, r0, r1, y, ldy);
  else matmul_float_scalar(w, act, n_tokens, r0, r1, y, ldy);
}

const struct cpu_matmul_ops *cpu_matmul_ops_scalar(void)
{
  static const struct cpu_matmul_ops ops = {.tile = 8, .quantize = quantize_scalar, .matmul = matmul_scalar};
  return &ops;
}
