/* Online model of a step's time, five non-negative coefficients learned by a Kalman filter whose noise is relative to the step's time:
 *
 *   step_us = fixed + per_seq * decodes + per_kv * cached tokens read by decodes / 1024
 *                   + per_token * prompt tokens + per_depth * sum(prompt tokens x mean depth) / 1024
 *
 * Coefficients walk slowly, so the model follows a machine that slows down or another batch size regime; their variance is capped, so
 * what is not observed for a while does not run away. */
#ifndef SITS_ALPS_ALPS_COST_H
#define SITS_ALPS_ALPS_COST_H

#include <stdbool.h>
#include <stdint.h>

#define ALPS_COST_TERMS 5

struct alps_cost_coefficients { double fixed_us, per_seq_us, per_kv_us, per_token_us, per_depth_us; };

/* What a step does, in the model's terms. */
struct alps_cost_work {
  int32_t n_decode;
  int64_t decode_kv_tokens;     /* cached tokens that the decodes read */
  int32_t n_prompt_tokens;
  double prompt_depth;          /* sum over chunks of tokens x mean depth */
};

struct alps_cost {
  double w[ALPS_COST_TERMS];                    /* coefficients, clipped at 0 */
  double p[ALPS_COST_TERMS][ALPS_COST_TERMS];   /* covariance */
  double relative_error;                        /* recent mean of |measured - predicted| / measured */
  uint64_t n_observations;
};

void alps_cost_init(struct alps_cost *cost, const struct alps_cost_coefficients *prior);
double alps_cost_predict(const struct alps_cost *cost, const struct alps_cost_work *work);
void alps_cost_observe(struct alps_cost *cost, const struct alps_cost_work *work, double step_us);
/* The longest chunk at this depth whose added time is <= budget_us; at least 0, at most limit. */
int32_t alps_cost_chunk(const struct alps_cost *cost, double budget_us, int32_t depth, int32_t limit);
void alps_cost_add_chunk(struct alps_cost_work *work, int32_t n_tokens, int32_t depth);
void alps_cost_add_decode(struct alps_cost_work *work, int32_t n_kv_tokens);

#endif
