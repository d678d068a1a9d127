/* See alps_verify.h. */
#include "alps/alps_verify.h"

#include <string.h>

enum { FEWEST = 8 };        /* steps' weight before the line is believed */
enum { DOUBT = 4 };         /* a factor begins as if so many steps had taken what the line says */
enum { LENGTH = 20 };       /* of the factors' averages, steps */

static const double MOST = 1.25; /* times what was expected: as so much a step counts at most; a rare long one says nothing of its tokens */
static const double KEEP = 0.99; /* of a step's weight in the line, with each that follows */

void alps_verify_init(struct alps_verify *v)
{
  memset(v, 0, sizeof *v);
  for (int i = 0; i <= ALPS_VERIFY_TOKENS; i++) v->factor[i] = 1;
}

/* 0 where the line is not known, or is none: all steps had about as many tokens, or it does not rise. */
static double by_line(const struct alps_verify *v, double n_tokens)
{
  const double spread = v->n * v->xx - v->x * v->x;
  if (v->n < FEWEST || spread < 0.1 * v->n * v->n) return 0;
  const double slope = (v->n * v->xy - v->x * v->y) / spread;
  if (!(slope >= 0) || v->y <= slope * v->x) return 0;
  return (v->y - slope * v->x) / v->n + slope * n_tokens;
}

void alps_verify_observe(struct alps_verify *v, int32_t n_tokens, double step_us)
{
  if (n_tokens < 1 || n_tokens > ALPS_VERIFY_TOKENS || !(step_us > 0)) return;
  const double line_us = by_line(v, n_tokens), x = n_tokens;
  if (line_us > 0) {
    if (v->n_seen[n_tokens] < LENGTH - DOUBT) v->n_seen[n_tokens]++;
    const double took = step_us / line_us, most = MOST * v->factor[n_tokens];
    v->factor[n_tokens] += ((took < most ? took : most) - v->factor[n_tokens]) / (DOUBT + v->n_seen[n_tokens]);
  }
  v->n = KEEP * v->n + 1;
  v->x = KEEP * v->x + x;
  v->xx = KEEP * v->xx + x * x;
  v->y = KEEP * v->y + step_us;
  v->xy = KEEP * v->xy + x * step_us;
}

double alps_verify_predict(const struct alps_verify *v, int32_t n_tokens)
{
  const double line_us = by_line(v, n_tokens);
  return n_tokens <= ALPS_VERIFY_TOKENS ? line_us * v->factor[n_tokens] : line_us;
}
