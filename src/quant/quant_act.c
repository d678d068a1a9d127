/* See quant_act.h. Entry point: quant_act_row. */
#include "quant/quant_act.h"

#include <math.h>
#include <string.h>

static float clamp(float v, float lo, float hi) { return v < lo ? lo : v > hi ? hi : v; }

/* levels steps between lo and hi, zero among them. */
static void round_group(const float *x, float levels, float *out)
{
  float lo = 0, hi = 0;
  for (int i = 0; i < ACT_GROUP; i++) {
    lo = x[i] < lo ? x[i] : lo;
    hi = x[i] > hi ? x[i] : hi;
  }
  const float s = (hi - lo) / levels;
  if (!(s > 0)) {
    memset(out, 0, ACT_GROUP * sizeof *out);
    return;
  }
  const float z = rintf(-lo / s);
  for (int i = 0; i < ACT_GROUP; i++) out[i] = s * (clamp(rintf(x[i] / s) + z, 0, levels) - z);
}

void quant_act_row(const struct act_format *act, const float *x, int32_t n, float *out)
{
  if (act->kind == ACT_FLOAT || act->kind == ACT_BACKEND) {
    if (out != x) memcpy(out, x, (size_t)n * sizeof *x);
    return;
  }
  float most = 0, group[ACT_GROUP];
  for (int32_t i = 0; i < act->n_outliers; i++) most = fmaxf(most, fabsf(x[act->outliers[i]]));
  const float side = most / 127;
  int32_t next = 0;                  /* outlier at or after the group's first channel */
  for (int32_t g = 0; g < n; g += ACT_GROUP) {
    memcpy(group, x + g, sizeof group);
    for (int32_t i = next; i < act->n_outliers && act->outliers[i] < g + ACT_GROUP; i++) group[act->outliers[i] - g] = 0;
    float kept[ACT_GROUP];
    memcpy(kept, x + g, sizeof kept);
    round_group(group, act->kind == ACT_INT4 ? 15 : 254, out + g);
    for (; next < act->n_outliers && act->outliers[next] < g + ACT_GROUP; next++) {
      const int32_t c = act->outliers[next];
      out[c] = side > 0 ? side * clamp(rintf(kept[c - g] / side), -127, 127) : 0;
    }
  }
}
