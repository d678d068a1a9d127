/* See alps_split.h. */
#include "alps/alps_split.h"

static const double STEP_SHARE = 0.35;            /* of a decoding step: what reading a short prompt beside it may add */
static const double READ_MEMORY = 60000;          /* tokens over which the prefill device's speed is averaged */
static const double SPLIT_PATIENCE_US = 2000000;
static const double TARGET_SHARE = 0.85;          /* of the first-token target; the rest is for the tail's own step and for errors */

/* Time until the prefill device would have read so much more than what it has before it. */
static double away_us(const struct alps_split *s, int32_t n_tokens)
{
  return s->read_tokens > 0 ? (double)(s->n_away_tokens + n_tokens) * s->read_us / s->read_tokens : 0;
}

bool alps_split_pays(const struct alps_split *split, const struct alps *decode, int32_t n_tokens, int32_t n_tail, int64_t arrival_us,
                     int64_t now_us)
{
  if (n_tokens <= 0) return false;
  if (split->always) return true;
  struct alps_cost_work work = {0};
  alps_decode_work(decode, &work);
  const struct alps_cost *cost = alps_cost_model(decode);
  double away = away_us(split, n_tokens), here = alps_reading_us(decode, &work, n_tokens + n_tail);
  if (here <= 0) return true; /* nothing is known of the decode device yet */
  if (work.n_decode == 0) return away <= here;
  double alone_us = alps_cost_predict(cost, &work);
  struct alps_cost_work with = work;
  alps_cost_add_chunk(&with, n_tokens + n_tail, 0);
  if (alps_cost_predict(cost, &with) - alone_us <= STEP_SHARE * alone_us) return false;
  double target = split->ttft_target_us > 0 ? TARGET_SHARE * (double)split->ttft_target_us : SPLIT_PATIENCE_US;
  return away <= here || (double)(now_us - arrival_us) + away <= target;
}

void alps_split_sent(struct alps_split *split, int32_t n_tokens, int64_t now_us)
{
  if (split->n_away_tokens == 0) split->mark_us = now_us;
  split->n_away_tokens += n_tokens;
  split->n_sent++;
}

void alps_split_back(struct alps_split *split, int32_t n_tokens, bool is_read, int64_t now_us)
{
  split->n_away_tokens -= n_tokens;
  if (!is_read) return;
  double keep = READ_MEMORY / (READ_MEMORY + n_tokens);
  split->read_us = keep * split->read_us + (double)(now_us - split->mark_us);
  split->read_tokens = keep * split->read_tokens + n_tokens;
  split->mark_us = now_us;
}
