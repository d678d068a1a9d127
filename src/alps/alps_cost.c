/* See alps_cost.h. Measurement noise is a share of the step's time, because what disturbs a long step (other processes, clocks) disturbs
 * it in proportion. */
#include "alps/alps_cost.h"

#include <math.h>
#include <string.h>

enum { COST_SETTLED = 16 }; /* observations before outliers are clipped */

static const double NOISE_SHARE = 0.08;   /* standard deviation of a measurement, of its value */
static const double WALK_SHARE = 0.004;   /* of a coefficient, per observation that involves it */
static const double SURPRISE = 2.5;        /* standard deviations */
static const double SURPRISE_FADE = 4;    /* what the covariance grows by */
static const double LOST = 0.9;           /* mean relative error at which a filter begins anew: one that predicts nothing comes to 1 */
static const double PLAUSIBLE = 1.2;      /* filters whose error is so near the best's are asked too */
static const double NO_HICCUP = 0.1;      /* share of a measurement that a prediction of next to nothing is believed to have missed */
static const double ERROR_RATE = 0.02;    /* of the moving average that ranks the filters */
static const double KNEES[ALPS_COST_KNEES] = {0, 16, 48, 96, 192};
/* What a first step is assumed to hold, where it holds less: keeps unseen coefficients from starting with a huge variance. */
static const double TYPICAL[ALPS_COST_TERMS] = {1, 4, 4, 16, 16, 1};

/* Tokens that the device computes for so many. */
static int32_t in_tiles(int32_t tile, int32_t n_tokens)
{
  return tile > 0 && n_tokens > tile ? (n_tokens + tile - 1) / tile * tile : n_tokens;
}

static void features(const struct alps_cost *cost, const struct alps_cost_filter *f, const struct alps_cost_work *work,
                     double x[ALPS_COST_TERMS])
{
  const int32_t n_tokens = work->n_decode + work->n_prompt_tokens;
  x[0] = 1;
  x[1] = work->n_decode;
  x[2] = (double)work->decode_kv_tokens / 1024;
  x[3] = fmax(0, (work->n_prompt_tokens > 0 ? in_tiles(cost->tile, n_tokens) : n_tokens) - f->knee);
  x[4] = work->prompt_depth / 1024;
  x[5] = cost->tile > 0 && work->n_prompt_tokens > 0;
}

static double predict(const struct alps_cost_filter *f, const double x[ALPS_COST_TERMS])
{
  double sum = 0;
  for (int i = 0; i < ALPS_COST_TERMS; i++) sum += f->w[i] * x[i];
  return sum;
}

void alps_cost_init(struct alps_cost *cost, const struct alps_cost_coefficients *prior, int32_t tile)
{
  memset(cost, 0, sizeof *cost);
  cost->tile = tile;
  const double w[ALPS_COST_TERMS] = {prior->fixed_us, prior->per_seq_us, prior->per_kv_us, prior->per_token_us, prior->per_depth_us, 0};
  double sum = 0;
  for (int i = 0; i < ALPS_COST_TERMS; i++) sum += w[i];
  for (int k = 0; k < ALPS_COST_KNEES; k++) {
    struct alps_cost_filter *f = &cost->filters[k];
    f->knee = KNEES[k];
    memcpy(f->w, w, sizeof w);
    for (int i = 0; i < ALPS_COST_TERMS; i++) f->p[i][i] = 0.25 * w[i] * w[i] + 1e-6;
  }
  cost->n_observations = sum > 0;
}

double alps_cost_predict(const struct alps_cost *cost, const struct alps_cost_work *work)
{
  const struct alps_cost_filter *f = &cost->filters[cost->best];
  double x[ALPS_COST_TERMS];
  features(cost, f, work, x);
  return predict(f, x);
}

/* With nothing known, the first step's time is laid on its fixed part and its largest other term, and everything stays uncertain. */
static void first(struct alps_cost_filter *f, const double x[ALPS_COST_TERMS], double step_us)
{
  for (int i = 0; i < ALPS_COST_TERMS; i++) {
    double scale = step_us / fmax(x[i], TYPICAL[i]);
    f->p[i][i] = scale * scale;
    f->w[i] = 0;
  }
  for (int i = 0; i < ALPS_COST_TERMS; i++) {
    for (int j = 0; j < ALPS_COST_TERMS; j++) f->p[i][j] = i == j ? f->p[i][i] : 0;
  }
  f->error = LOST / 2;
  f->w[0] = x[3] > 0 ? 0.2 * step_us : 0.7 * step_us;
  if (x[3] > 0) f->w[3] = 0.8 * step_us / x[3];
  else if (x[1] > 0) f->w[1] = 0.3 * step_us / x[1];
}

/* px = P x over the terms that may move; returns the variance of the prediction error. */
static double project(const struct alps_cost_filter *f, const double x[ALPS_COST_TERMS], const bool moves[ALPS_COST_TERMS], double noise,
                      double px[ALPS_COST_TERMS])
{
  double s = noise * noise + 1;
  for (int i = 0; i < ALPS_COST_TERMS; i++) {
    px[i] = 0;
    for (int j = 0; j < ALPS_COST_TERMS && moves[i]; j++) px[i] += moves[j] ? f->p[i][j] * x[j] : 0;
    s += x[i] * px[i];
  }
  return s;
}

/* Move the coefficients towards the measurement. One that would fall below 0 stays there, and the others are asked for what it could not
 * give, so that a poor first guess does not hide behind the bound. */
static void correct(struct alps_cost_filter *f, const double x[ALPS_COST_TERMS], double step_us, double noise, bool is_settled)
{
  bool moves[ALPS_COST_TERMS] = {true, true, true, true, true, true}, again = true;
  for (int round = 0; again && round < ALPS_COST_TERMS; round++) {
    double px[ALPS_COST_TERMS], s = project(f, x, moves, noise, px), predicted = predict(f, x), innovation = step_us - predicted;
    const double most = fmax(predicted, NO_HICCUP * step_us);
    if (is_settled && innovation > most) innovation = most; /* a hiccup, not the machine */
    again = false;
    for (int i = 0; i < ALPS_COST_TERMS; i++) {
      f->w[i] += px[i] / s * innovation;
      if (f->w[i] >= 0) continue;
      f->w[i] = 0;
      moves[i] = false;
      again = true;
    }
  }
}

/* What a coefficient's deviation may be, by a step of that time. */
static double widest(const double x[ALPS_COST_TERMS], int i, double step_us)
{
  return step_us / fmax(x[i], TYPICAL[i]);
}

/* Row and column shrink together; a smaller diagonal alone would leave something that is no covariance. */
static void narrow(struct alps_cost_filter *f, int i, double most)
{
  if (f->p[i][i] <= most * most) return;
  const double shrink = most / sqrt(f->p[i][i]);
  for (int j = 0; j < ALPS_COST_TERMS; j++) {
    f->p[i][j] *= shrink;
    f->p[j][i] *= shrink;
  }
}

static void widen(struct alps_cost_filter *f, const double x[ALPS_COST_TERMS], double step_us)
{
  for (int i = 0; i < ALPS_COST_TERMS; i++) {
    const double scale = widest(x, i, step_us), walk = WALK_SHARE * (f->w[i] + 0.01 * scale);
    if (x[i] <= 0) continue;
    f->p[i][i] += walk * walk;
    narrow(f, i, scale);
  }
}

/* What was learned is worth less; also what this step does not have, but not so much less that the next one throws it anywhere. */
static void forget(struct alps_cost_filter *f, const double x[ALPS_COST_TERMS], double step_us)
{
  for (int i = 0; i < ALPS_COST_TERMS; i++) {
    for (int j = 0; j < ALPS_COST_TERMS; j++) f->p[i][j] *= SURPRISE_FADE;
  }
  for (int i = 0; i < ALPS_COST_TERMS; i++) narrow(f, i, widest(x, i, step_us));
}

/* One step far off is a hiccup; a second on the same side is a change. */
static bool is_surprise(struct alps_cost_filter *f, double innovation, double variance)
{
  if (innovation * innovation < SURPRISE * SURPRISE * variance) f->surprises = 0;
  else if (innovation > 0) f->surprises = f->surprises > 0 ? f->surprises + 1 : 1;
  else f->surprises = f->surprises < 0 ? f->surprises - 1 : -1;
  return f->surprises > 1 || f->surprises < -1;
}

static void update(struct alps_cost_filter *f, const double x[ALPS_COST_TERMS], double step_us, bool is_settled, bool has_prompt)
{
  static const bool all[ALPS_COST_TERMS] = {true, true, true, true, true, true};
  double px[ALPS_COST_TERMS], noise = NOISE_SHARE * step_us, s = project(f, x, all, noise, px);
  /* The knees differ in steps with prompts only, so only those rank them; the error of the others still shows a filter that is lost. */
  double error = fmin(fabs(step_us - predict(f, x)) / step_us, 2 * LOST);
  f->error += (has_prompt ? ERROR_RATE : 0.1 * ERROR_RATE) * (error - f->error);
  if (is_surprise(f, step_us - predict(f, x), s)) { /* the machine has changed */
    forget(f, x, step_us);
    s = project(f, x, all, noise, px);
  }
  correct(f, x, step_us, noise, is_settled);
  for (int i = 0; i < ALPS_COST_TERMS; i++) {
    for (int j = 0; j < ALPS_COST_TERMS; j++) f->p[i][j] -= px[i] * px[j] / s;
  }
  widen(f, x, step_us);
}

void alps_cost_observe(struct alps_cost *cost, const struct alps_cost_work *work, double step_us)
{
  if (!(step_us > 0) || (work->n_decode == 0 && work->n_prompt_tokens == 0)) return;
  for (int k = 0; k < ALPS_COST_KNEES; k++) {
    struct alps_cost_filter *f = &cost->filters[k];
    double x[ALPS_COST_TERMS];
    features(cost, f, work, x);
    if (cost->n_observations == 0 || !(f->error < LOST)) first(f, x, step_us);
    else update(f, x, step_us, cost->n_observations > COST_SETTLED, work->n_prompt_tokens > 0);
  }
  cost->n_observations++;
  for (int k = 0; k < ALPS_COST_KNEES; k++) { /* changing costs a little, so that noise does not change it */
    if (cost->filters[k].error < 0.95 * cost->filters[cost->best].error) cost->best = k;
  }
}

/* Solve half c^2 + linear c = budget, where tokens up to the knee cost only their depth. */
static double chunk_of(const struct alps_cost_filter *f, double budget_us, int32_t n_before, int32_t depth, int32_t limit)
{
  double half = f->w[4] / 1024 / 2, per_depth = 2 * half * depth, n_free = fmax(0, f->knee - n_before);
  double linear = per_depth + f->w[3];
  if (half * n_free * n_free + per_depth * n_free >= budget_us) linear = per_depth;
  else budget_us += f->w[3] * n_free;
  if (half * budget_us > 1e-9 * linear * linear) return (sqrt(linear * linear + 4 * half * budget_us) - linear) / (2 * half);
  return linear > 0 ? budget_us / linear : limit;
}

/* The longest chunk that fills whole tiles, together with the n_before tokens of the step, and adds no more than left_us. */
static double tiles_of(const struct alps_cost *cost, const struct alps_cost_filter *f, const struct alps_cost_work *work, double left_us,
                       int32_t depth, int32_t limit)
{
  const int32_t n_before = work->n_decode + work->n_prompt_tokens;
  double x[ALPS_COST_TERMS], before_us, best = 0;
  features(cost, f, work, x);
  before_us = predict(f, x);
  for (int32_t end = (n_before / cost->tile + 1) * cost->tile; best < limit; end += cost->tile) {
    const int32_t n = end - n_before < limit ? end - n_before : limit;
    struct alps_cost_work with = *work;
    alps_cost_add_chunk(&with, n, depth);
    features(cost, f, &with, x);
    if (predict(f, x) - before_us > left_us) break;
    best = n;
  }
  return best;
}

int32_t alps_cost_chunk(const struct alps_cost *cost, const struct alps_cost_work *work, double budget_us, double floor_us, int32_t depth,
                        int32_t limit)
{
  double least = limit, plausible = PLAUSIBLE * cost->filters[cost->best].error + 0.002;
  for (int k = 0; k < ALPS_COST_KNEES && limit > 0; k++) {
    const struct alps_cost_filter *f = &cost->filters[k];
    double x[ALPS_COST_TERMS];
    if (k != cost->best && f->error > plausible) continue;
    features(cost, f, work, x);
    double left_us = fmax(budget_us - predict(f, x), floor_us);
    if (left_us <= 0) return 0;
    const int32_t n_before = work->n_decode + work->n_prompt_tokens;
    double n = cost->tile > 0 ? tiles_of(cost, f, work, left_us, depth, limit) : 0;
    if (n == 0) { /* without tiles, or within the first */
      double part_us = work->n_prompt_tokens == 0 && cost->tile > 0 ? left_us - f->w[5] : left_us;
      n = part_us > 0 ? chunk_of(f, part_us, n_before, depth, limit) : 0;
      if (cost->tile > 0 && n > cost->tile - n_before % cost->tile) n = cost->tile - n_before % cost->tile;
    }
    least = fmin(least, n);
  }
  return least > 0 ? (int32_t)least : 0;
}

void alps_cost_coefficients(const struct alps_cost *cost, struct alps_cost_coefficients *out)
{
  const double *w = cost->filters[cost->best].w;
  *out = (struct alps_cost_coefficients){w[0], w[1], w[2], w[3], w[4]};
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
