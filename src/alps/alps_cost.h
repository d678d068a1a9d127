/* Online model of a step's time.
 *
 *   step_us = fixed + per_seq * decodes + per_kv * cached tokens read by decodes / 1024
 *                   + per_token * max(0, tokens - knee) + per_depth * sum(prompt tokens x mean depth) / 1024
 *                   + prompt, on a device with tiles, where there are prompt tokens at all
 *
 * A device that computes tokens in tiles takes as long for a few of a tile as for all: beyond one tile, tokens of steps with prompts
 * count up to the end of theirs. Its steps without prompts take another path, so "prompt" is what the first prompt token adds.
 *
 * Up to the knee a step's linear layers are bound by reading the weights and another token costs nothing. The knee is not linear in the
 * data, so a bank of filters with different knees learns side by side, and the one that has predicted best of late is used. Each is a
 * Kalman filter over five non-negative coefficients that walk slowly (the model follows a machine that slows down), with measurement noise
 * relative to the step's time; the variance of a coefficient is capped, so what is not observed for a while does not run away. */
#ifndef SITS_ALPS_ALPS_COST_H
#define SITS_ALPS_ALPS_COST_H

#include <stdbool.h>
#include <stdint.h>

#define ALPS_COST_TERMS 6
#define ALPS_COST_KNEES 5

struct alps_cost_coefficients { double fixed_us, per_seq_us, per_kv_us, per_token_us, per_depth_us; };

/* What a step does, in the model's terms. */
struct alps_cost_work {
  int32_t n_decode;
  int64_t decode_kv_tokens;     /* cached tokens that the decodes read */
  int32_t n_prompt_tokens;
  double prompt_depth;          /* sum over chunks of tokens x mean depth */
};

struct alps_cost_filter {
  double knee;                                  /* tokens */
  double w[ALPS_COST_TERMS];                    /* coefficients, clipped at 0 */
  double p[ALPS_COST_TERMS][ALPS_COST_TERMS];   /* covariance */
  double error;                                 /* recent mean of |measured - predicted| / measured */
  int32_t surprises;                            /* steps in a row that were far off on the same side, + slower, - faster */
};

struct alps_cost {
  int32_t tile;                                 /* tokens; 0 = none */
  struct alps_cost_filter filters[ALPS_COST_KNEES];
  int32_t best;                                 /* the filter in use */
  uint64_t n_observations;
};

void alps_cost_init(struct alps_cost *cost, const struct alps_cost_coefficients *prior, int32_t tile);
double alps_cost_predict(const struct alps_cost *cost, const struct alps_cost_work *work);
void alps_cost_observe(struct alps_cost *cost, const struct alps_cost_work *work, double step_us);
/* The longest chunk at this depth with which a step that holds `work` already takes no longer than budget_us, or that adds no more than
 * floor_us to it; 0 .. limit. Every filter that predicts about as well as the best is asked, and the most careful is believed. */
int32_t alps_cost_chunk(const struct alps_cost *cost, const struct alps_cost_work *work, double budget_us, double floor_us, int32_t depth,
                        int32_t limit);
void alps_cost_coefficients(const struct alps_cost *cost, struct alps_cost_coefficients *out);
void alps_cost_add_chunk(struct alps_cost_work *work, int32_t n_tokens, int32_t depth);
void alps_cost_add_decode(struct alps_cost_work *work, int32_t n_kv_tokens);

#endif
