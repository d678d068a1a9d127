/* The vector primitives in plain C, a "vector" being one float: see cpu_ops_body.h. Runs everywhere. */
#include "backend/cpu/cpu_ops.h"

#include <math.h>
#include <string.h>

#include "tensor/dequant.h"

#define CPU_OPS cpu_ops_scalar
#define VEC float
#define VW 1
#define v_load(p) (*(p))
#define v_load_h(p) half_to_float(*(p))
#define v_store(p, v) (*(p) = (v))
#define v_store_h(p, v) (*(p) = float_to_half(v))
#define v_set1(x) ((float)(x))
#define v_add(a, b) ((a) + (b))
#define v_sub(a, b) ((a) - (b))
#define v_mul(a, b) ((a) * (b))
#define v_div(a, b) ((a) / (b))
#define v_fma(a, b, c) ((a) * (b) + (c))
#define v_round(v) rintf(v)
#define v_sum(v) (v)
#define v_top(v) (v)
#define v_keep(v, lo, hi, other) ((lo) <= 0 && 0 < (hi) ? (v) : (other))

static inline float v_max(float a, float b) { return a > b ? a : b; }
static inline float v_min(float a, float b) { return a < b ? a : b; }

static inline float v_exp2i(float n)
{
  const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

#include "backend/cpu/cpu_ops_body.h"
