/* See cpu_act.h. Entry points: cpu_act_check, cpu_act_make, cpu_matmul_expanded. */
#include "backend/cpu/cpu_act.h"

#include <math.h>
#include <string.h>

#include "backend/cpu/cpu_quant.h"

#define TILES_AT_ONCE 4              /* expanded together for one or two tokens, whose FMA chains are too few otherwise */

enum sits_status cpu_act_check(const struct cpu_weight *w, const char *name, const struct act_format *act, struct sits_error *err)
{
  if (act == NULL || act->kind == ACT_BACKEND || act->kind == ACT_FLOAT || w->format != NULL) return SITS_OK;
  return sits_fail_param(err, SITS_UNSUPPORTED, name, "%s: the CPU does not multiply float weights with %s activations", name,
                         act_kind_name(act->kind));
}

enum cpu_act_format cpu_act_format_as(const struct cpu_weight *w, enum act_kind kind)
{
  return kind == ACT_FLOAT ? CPU_ACT_F32 : cpu_act_format(w);
}

/* A float weight of the same shape: what cpu_matmul.h does for float weights is asked through it. */
static struct cpu_weight float_view(const struct cpu_weight *w)
{
  struct cpu_weight view = {.dtype = SITS_DTYPE_F32, .ops = w->ops, .rows = w->tile, .k = w->k, .tile = w->tile};
  view.tile_bytes = cpu_round_up((size_t)w->k * (size_t)w->tile * sizeof(float), CPU_ALIGN_BYTES);
  return view;
}

size_t cpu_act_bytes_as(const struct cpu_weight *w, enum act_kind kind, int32_t n_tokens)
{
  const struct cpu_weight view = float_view(w);
  return cpu_act_bytes(kind == ACT_FLOAT ? &view : w, n_tokens);
}

/* ---- 4 bits and outliers ---- */

/* Integers of one group are in at.a already; what a record holds beside them. A token with a value that is not finite gets NaN. */
static void finish_record(struct cpu_act_ref at, float s, int32_t z)
{
  int32_t b[2] = {0, 0};
  for (int i = 0; i < CPU_GROUP; i++) b[i / 16] += at.a[i] + z;
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

static int32_t clamp(int32_t v, int32_t lo, int32_t hi) { return v < lo ? lo : v > hi ? hi : v; }

/* 16 levels between the least and the largest value of those that are no outliers, zero among them: x ~ s (u - z), u in 0..15. */
static void round_group4(const float *x, const uint8_t *is_outlier, struct cpu_act_ref at)
{
  float lo = 0.0F, hi = 0.0F, s = 0.0F;
  int32_t z = 0;
  bool is_finite = true;
  for (int i = 0; i < CPU_GROUP; i++) {
    const float v = is_outlier[i] ? 0.0F : x[i];
    is_finite = is_finite && isfinite(v);
    lo = v < lo ? v : lo;
    hi = v > hi ? v : hi;
  }
  if (!is_finite || !isfinite(hi - lo)) s = NAN;
  else if (hi - lo >= CPU_MIN_RANGE) s = (hi - lo) / 15.0F;
  const bool is_used = s > 0.0F;
  if (is_used) z = clamp((int32_t)lrintf(-lo / s), 0, 15);
  for (int i = 0; i < CPU_GROUP; i++)
    at.a[i] = (int8_t)(is_used && !is_outlier[i] ? clamp((int32_t)lrintf(x[i] / s) + z, 0, 15) : z);
  finish_record(at, s, -z);
}

/* The outliers of a token: signed bytes with one scale, zeros elsewhere. */
static void round_outliers(const float *x, const uint8_t *is_outlier, int64_t k, int32_t token, int32_t n_tokens, uint8_t *side)
{
  float most = 0.0F;
  bool is_finite = true;
  for (int64_t i = 0; x != NULL && i < k; i++) {
    if (!is_outlier[i]) continue;
    is_finite = is_finite && isfinite(x[i]);
    most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
  }
  const float s = !is_finite ? NAN : most >= CPU_MIN_RANGE ? most / 127.0F : 0.0F;
  for (int64_t g = 0; g < k / CPU_GROUP; g++) {
    const struct cpu_act_ref at = cpu_act_at(side, k, n_tokens, token, g);
    for (int i = 0; i < CPU_GROUP; i++) {
      const int64_t c = g * CPU_GROUP + i;
      at.a[i] = (int8_t)(s > 0.0F && is_outlier[c] ? clamp((int32_t)lrintf(x[c] / s), -127, 127) : 0);
    }
    finish_record(at, s, 0);
  }
}

static void round_token4(const float *x, const uint8_t *is_outlier, int64_t k, int32_t token, int32_t n_tokens, uint8_t *act, uint8_t *side)
{
  for (int64_t g = 0; g < k / CPU_GROUP; g++) {
    const struct cpu_act_ref at = cpu_act_at(act, k, n_tokens, token, g);
    if (x != NULL) {
      round_group4(x + g * CPU_GROUP, is_outlier + g * CPU_GROUP, at);
    } else { /* past the last token of a tile */
      memset(at.a, 0, CPU_GROUP);
      finish_record(at, 0.0F, 0);
    }
  }
  round_outliers(x, is_outlier, k, token, n_tokens, side);
}

void cpu_act_make(const struct cpu_weight *w, enum act_kind kind, const uint8_t *is_outlier, const float *x, int64_t ldx, int32_t n_tokens,
                  int32_t t0, int32_t t1, void *act, void *side)
{
  const struct cpu_weight view = float_view(w);
  if (kind != ACT_INT4) {
    cpu_act_quantize(kind == ACT_FLOAT ? &view : w, x, ldx, n_tokens, t0, t1, act);
    return;
  }
  const int32_t tile = cpu_act_tile(n_tokens);
  const int32_t end = t1 == n_tokens && n_tokens > 0 ? (n_tokens + tile - 1) / tile * tile : t1; /* as in cpu_act_quantize */
  for (int32_t t = t0; t < end; t++) round_token4(t < n_tokens ? x + t * ldx : NULL, is_outlier, w->k, t, n_tokens, act, side);
}

/* ---- float activations ---- */

static void expand_scalar(const struct cpu_weight *w, int64_t tile, float *out)
{
  for (int64_t g = 0; g < w->k / CPU_GROUP; g++)
    for (int32_t r = 0; r < w->tile; r++) {
      struct cpu_quant_row q;
      cpu_quant_unpack(w, tile, g, r, &q);
      for (int i = 0; i < CPU_GROUP; i++) {
        const int h = w->format->halves == 2 ? i / 16 : 0;
        const float v = q.d[h] * (float)((int)q.u[i] - w->format->offset);
        out[(g * CPU_GROUP + i) * w->tile + r] = w->format->has_min ? v + q.m[h] : v;
      }
    }
}

static void expand(const struct cpu_weight *w, int64_t tile, float *out)
{
  if (w->ops == cpu_matmul_ops_avx512() && cpu_expand_avx512(w, tile, out)) return;
  if (w->ops == cpu_matmul_ops_avx2() && cpu_expand_avx2(w, tile, out)) return;
  expand_scalar(w, tile, out);
}

size_t cpu_expand_bytes(const struct cpu_weight *w) { return w->format ? TILES_AT_ONCE * float_view(w).tile_bytes : 0; }

void cpu_matmul_expanded(const struct cpu_weight *w, const void *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y, int64_t ldy,
                         void *expanded)
{
  struct cpu_weight view = float_view(w);
  const int64_t step = n_tokens <= 2 ? TILES_AT_ONCE : 1;
  view.data = expanded;
  for (int64_t tile = r0 / w->tile; tile * w->tile < r1; tile += step) {
    const int64_t first = tile * w->tile, n = r1 - first < step * w->tile ? r1 - first : step * w->tile;
    for (int64_t i = 0; i * w->tile < n; i++) expand(w, tile + i, (float *)(view.data + (size_t)i * view.tile_bytes));
    view.rows = n;
    cpu_matmul(&view, act, n_tokens, 0, n, y + first, ldy, NULL);
  }
}
