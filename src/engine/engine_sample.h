/* From one row of logits to a token: penalties, bias, temperature, min_p, top_k, top_p, a draw, log probabilities.
 *
 * Order (vLLM's): min_tokens mask, logit_bias, repetition / frequency / presence penalties; greedy stops here with the largest logit (the
 * lowest id among equals). Else temperature, min_p, top_k, top_p, then a draw by inverse distribution in id order. Log probabilities are of
 * the model's own distribution, before any of that.
 *
 * Nothing is sorted whole: the filters work on the ids near the best one (all ids only where those do not decide it), through a histogram
 * over the distance from the best and an exact sort of the one bucket that holds the boundary. Cost: a few vector passes over V.
 * Randomness: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by the seed, counter = (position,
 * choice, purpose): a draw depends on nothing else. Threads: one sampler per thread. Nothing allocates after engine_sampler_init.
 */
#ifndef SITS_ENGINE_ENGINE_SAMPLE_H
#define SITS_ENGINE_ENGINE_SAMPLE_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "engine/engine_vec.h"
#include "sits2026/engine.h"

#define ENGINE_SAMPLE_BUCKETS 2048

struct engine_sampler {
  int32_t n_vocab;
  const struct engine_vec *vec;
  float *scores;               /* [V] logits after penalties and bias */
  float *weights;              /* [V] exp((score - max) / temperature) */
  double *sums;                /* [V / ENGINE_VEC_BLOCK + 1] of weights, by block */
  int32_t *kept;               /* [V + 1] ids that the filters leave, ascending */
  int32_t *counts;             /* [V] zero between calls */
  struct engine_ranked *ranked;/* [V] scratch of the boundary bucket */
  int32_t bucket_counts[ENGINE_SAMPLE_BUCKETS];
  double bucket_sums[ENGINE_SAMPLE_BUCKETS];
};

struct engine_ranked { float value; int32_t id; };

/* One sequence's side of a draw. */
struct engine_draw {
  const struct sits_sampling *sampling;
  const int32_t *tokens;       /* [n_tokens] prompt and output */
  int32_t n_tokens, n_prompt;
  int32_t choice;
  const int32_t *end_ids;      /* the model's end tokens */
  int32_t n_end_ids;
};

struct engine_logprobs {
  float logprob;               /* of the token */
  int32_t n_top;
  int32_t top_token[SITS_MAX_TOP_LOGPROBS];
  float top_logprob[SITS_MAX_TOP_LOGPROBS];
};

enum sits_status engine_sampler_init(struct engine_sampler *sampler, int32_t n_vocab) SITS_MUST_CHECK;
void engine_sampler_fini(struct engine_sampler *sampler);

/* Draw the next token of a sequence from logits[V]. */
int32_t engine_sample(struct engine_sampler *sampler, const float *logits, const struct engine_draw *draw);
/* Whether a device that samples gives the same answer without the logits coming here: nothing changes the row (penalties, bias, minimum
 * length) and no log probabilities are wanted. *out then says how to draw; the uniform number is the one engine_sample would use. */
bool engine_device_draw(const struct engine_draw *draw, struct backend_sample *out);
/* Log probability of token and of the n_top best (-1: nothing is done) in the model's own distribution, floored at SITS_LOGPROB_FLOOR. */
void engine_logprobs(struct engine_sampler *sampler, const float *logits, int32_t token, int32_t n_top, struct engine_logprobs *out);

/* Uniform in [0, 1) from (seed, choice, position, purpose). */
double engine_uniform(uint64_t seed, int32_t choice, int32_t position, uint32_t purpose);

#endif
