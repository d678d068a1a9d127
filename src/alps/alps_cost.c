/* See alps_cost.h. Five-state Kalman filter with random-walk coefficients; measurement noise is a share of the step's time, because
 * what disturbs a long step (other processes, clocks) disturbs it in proportion. */
#include "alps/alps_cost.h"

#include <math.h>
#include <string.h>

enum { COST_SETTLED = 16 }; /* observations before outliers are clipped */

static const double NOISE_SHARE = 0.08;   /* standard deviation of a measurement, of its value */
static const double WALK_SHARE = 0.004;   /* of a coefficient, per observation that involves it */
/* What a first step is assumed to hold, where it holds less: keeps unseen coefficients from starting with a huge variance. */
static const double TYPICAL[ALPS_COST_TERMS] = {1, 1, 1, 16, 16};

static void features(const struct alps_cost_work *work, double x[ALPS_COST_TERMS])
{
  x[0] = 1;
  x[1] = work->n_decode;
  x[2] = (double)work->decode_kv_tokens / 1024;
  x[3] = work->n_prompt_tokens;
  x[4] = work->prompt_depth / 1024;
}

void alps_cost_init(struct alps_cost *cost, const struct alps_cost_coefficients *prior)
{
  memset(cost, 0, sizeof *cost);
  const double w[ALPS_COST_TERMS] = {prior->fixed_us, prior->per_seq_us, prior->per_kv_us, prior->per_token_us, prior->per_depth_us};
  double sum = 0;
  for (int i = 0; i < ALPS_COST_TERMS; i++) sum += w[i];
  if (sum <= 0) return;
  memcpy(cost->w, w, sizeof w);
  for (int i = 0; i < ALPS_COST_TERMS; i++) cost->p[i][i] = 0.25 * w[i] * w[i] + 1e-6;
  cost->n_observations = 1;
}

double alps_cost_predict(const struct alps_cost *cost, const struct alps_cost_work *work)
{
  double x[ALPS_COST_TERMS], sum = 0;
  features(work, x);
  for (int i = 0; i < ALPS_COST_TERMS; i++) sum += cost->w[i] * x[i];
  return sum;
}

/* With nothing known, the first step's time is laid on its fixed part and its largest other term, and everything stays uncertain. */
static void first(struct alps_cost *cost, const double x[ALPS_COST_TERMS], double step_us)
{
  for (int i = 0; i < ALPS_COST_TERMS; i++) {
    double scale = step_us / fmax(x[i], TYPICAL[i]);
    cost->p[i][i] = scale * scale;
    cost->w[i] = 0;
  }
  cost->w[0] = x[3] > 0 ? 0.2 * step_us : 0.7 * step_us;
  if (x[3] > 0) cost->w[3] = 0.8 * step_us / x[3];
  else if (x[1] > 0) cost->w[1] = 0.3 * step_us / x[1];
}

static void update(struct alps_cost *cost, const double x[ALPS_COST_TERMS], double step_us, double predicted_us)
{
  double px[ALPS_COST_TERMS], noise = NOISE_SHARE * step_us, s = noise * noise + 1;
  for (int i = 0; i < ALPS_COST_TERMS; i++) {
    px[i] = 0;
    for (int j = 0; j < ALPS_COST_TERMS; j++) px[i] += cost->p[i][j] * x[j];
    s += x[i] * px[i];
  }
  double innovation = step_us - predicted_us;
  if (cost->n_observations > COST_SETTLED && innovation > predicted_us) innovation = predicted_us; /* a hiccup, not the machine */
  for (int i = 0; i < ALPS_COST_TERMS; i++) {
    cost->w[i] += px[i] / s * innovation;
    if (cost->w[i] < 0) cost->w[i] = 0;
    for (int j = 0; j < ALPS_COST_TERMS; j++) cost->p[i][j] -= px[i] * px[j] / s;
  }
  for (int i = 0; i < ALPS_COST_TERMS; i++) {
    double scale = step_us / fmax(x[i], TYPICAL[i]), cap = scale * scale;
    double walk = WALK_SHARE * (cost->w[i] + 0.01 * scale);
    if (x[i] > 0) cost->p[i][i] = fmin(cost->p[i][i] + walk * walk, cap);
    if (!(cost->p[i][i] > 1e-12)) cost->p[i][i] = 1e-12;
  }
}

void alps_cost_observe(struct alps_cost *cost, const struct alps_cost_work *work, double step_us)
{
  double x[ALPS_COST_TERMS];
  if (!(step_us > 0) || (work->n_decode == 0 && work->n_prompt_tokens == 0)) return;
  features(work, x);
  if (cost->n_observations == 0) {
    first(cost, x, step_us);
  } else {
    double predicted = alps_cost_predict(cost, work);
    update(cost, x, step_us, predicted);
    cost->relative_error += 0.05 * (fabs(step_us - predicted) / step_us - cost->relative_error);
  }
  cost->n_observations++;
}

int32_t alps_cost_chunk(const struct alps_cost *cost, double budget_us, int32_t depth, int32_t limit)
{
  if (budget_us <= 0 || limit <= 0) return 0;
  double half = cost->w[4] / 1024 / 2, linear = cost->w[3] + cost->w[4] / 1024 * depth;
  double n;
  if (half * budget_us > 1e-9 * linear * linear) n = (sqrt(linear * linear + 4 * half * budget_us) - linear) / (2 * half);
  else if (linear > 0) n = budget_us / linear;
  else return limit;
  return n >= limit ? limit : (int32_t)n;
}

void alps_cost_add_chunk(struct alps_cost_work *work, int32_t n_tokens, int32_t depth)
{
  work->n_prompt_tokens += n_tokens;
  work->prompt_depth += (double)n_tokens * (depth + 0.5 * n_tokens);
}

void alps_cost_add_decode(struct alps_cost_work *work, int32_t n_kv_tokens)
{
  work->n_decode++;
  work->decode_kv_tokens += n_kv_tokens;
}
