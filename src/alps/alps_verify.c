/* See alps_verify.h. */
#include "alps/alps_verify.h"

#include <math.h>
#include <string.h>

enum { N = ALPS_VERIFY_TOKENS - 1 };  /* unknowns: costs of 2, 3, .. tokens */

static const double EACH = 0.1;      /* of a step: what a further token is thought to cost before any quotient, */
static const double UNSURE = 0.6;    /* standard deviation of that as a whole, of its logarithm, */
static const double UNEVEN = 0.06;   /* and of each further token beside it */
static const double NOISE = 0.1;     /* standard deviation of a quotient's logarithm */
static const double MOST = 0.2;      /* as so far from what was expected it counts at most; a rare long step says nothing of its tokens */
static const double KEEP = 0.998;    /* of what a quotient weighs, with each that follows */
static const double RATE = 0.2;      /* of one_us */

static double guess(int32_t i)
{
  return log(1 + EACH * (i + 1));
}

/* The inverse of the covariance of what is thought before any quotient: each token's cost beyond the last one's is uneven by itself, and
 * all are unsure together. */
static void begin(double inverse[N][N])
{
  double along[N], all = 0; /* the guesses, times the inverse of the uneven part alone */
  const double each = 1 / (UNEVEN * UNEVEN);
  for (int32_t i = 0; i < N; i++) {
    along[i] = each * ((i > 0 ? guess(i) - guess(i - 1) : guess(0)) - (i + 1 < N ? guess(i + 1) - guess(i) : 0));
    all += along[i] * guess(i);
  }
  for (int32_t i = 0; i < N; i++) {
    for (int32_t j = 0; j < N; j++) inverse[i][j] = -along[i] * along[j] / (1 / (UNSURE * UNSURE) + all);
    inverse[i][i] += i + 1 < N ? 2 * each : each;
    if (i > 0) inverse[i][i - 1] -= each;
    if (i + 1 < N) inverse[i][i + 1] -= each;
  }
}

void alps_verify_init(struct alps_verify *v)
{
  memset(v, 0, sizeof *v);
  begin(v->prior);
  for (int32_t i = 0; i < N; i++) v->x[i + 2] = guess(i);
}

/* Costs of all numbers, by the quotients and what is thought without: Cholesky's method. */
static void solve(struct alps_verify *v)
{
  double l[N][N], x[N];
  for (int32_t i = 0; i < N; i++) {
    x[i] = v->told[i];
    for (int32_t j = 0; j <= i; j++) {
      double sum = v->prior[i][j] + v->weight[i][j];
      for (int32_t k = 0; k < j; k++) sum -= l[i][k] * l[j][k];
      l[i][j] = j < i ? sum / l[j][j] : sqrt(sum);
    }
    for (int32_t k = 0; k < i; k++) x[i] -= l[i][k] * x[k];
    x[i] /= l[i][i];
  }
  for (int32_t i = N - 1; i >= 0; i--) {
    for (int32_t k = i + 1; k < N; k++) x[i] -= l[k][i] * x[k];
    x[i] /= l[i][i];
    v->x[i + 2] = guess(i) + x[i];
  }
}

/* A step of n tokens took so many times one of m, as a logarithm. */
static void learn(struct alps_verify *v, int32_t n, int32_t m, double quotient)
{
  const double expected = v->x[n] - v->x[m], each = 1 / (NOISE * NOISE);
  const double beyond = fmax(expected - MOST, fmin(expected + MOST, quotient)) - ((n > 1 ? guess(n - 2) : 0) - (m > 1 ? guess(m - 2) : 0));
  for (int32_t i = 0; i < N; i++) {
    v->told[i] *= KEEP;
    for (int32_t j = 0; j <= i; j++) v->weight[i][j] *= KEEP;
  }
  if (n > 1) v->weight[n - 2][n - 2] += each, v->told[n - 2] += each * beyond;
  if (m > 1) v->weight[m - 2][m - 2] += each, v->told[m - 2] -= each * beyond;
  if (n > 1 && m > 1) v->weight[(n > m ? n : m) - 2][(n > m ? m : n) - 2] -= each;
  solve(v);
}

/* Of a step of n tokens, in steps of one. */
static double times_of(const struct alps_verify *v, int32_t n)
{
  const int32_t most = ALPS_VERIFY_TOKENS;
  return n <= most ? exp(v->x[n]) : exp(v->x[most]) + (exp(v->x[most]) - 1) / (most - 1) * (n - most);
}

void alps_verify_observe(struct alps_verify *v, int32_t n_tokens, double step_us)
{
  const int32_t before = v->before;
  v->before = 0;
  if (n_tokens < 1 || n_tokens > ALPS_VERIFY_TOKENS || !(step_us > 0)) return;
  if (before > 0 && before != n_tokens) learn(v, n_tokens, before, log(step_us / v->before_us));
  v->one_us += (v->one_us > 0 ? RATE : 1) * (step_us / times_of(v, n_tokens) - v->one_us);
  v->before = n_tokens;
  v->before_us = step_us;
}

void alps_verify_pause(struct alps_verify *v)
{
  v->before = 0;
}

double alps_verify_predict(const struct alps_verify *v, int32_t n_tokens)
{
  return v->one_us * times_of(v, n_tokens);
}
