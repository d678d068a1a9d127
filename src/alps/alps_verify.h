/* What steps without prompts take by their tokens, drafts included: what a drafted token costs to verify.
 *
 * What one more row costs beside few others is another thing than what a prompt's token costs: up to a dozen rows a step is bound by the
 * weights' bytes. So drafts are judged by steps without prompts alone. A straight line through recent steps says how they grow. A device
 * that computes rows in pairs or tiles takes less than the line says where they are full, and more for one row beyond; so each number of
 * tokens has a factor, learned by its own steps, that begins at 1.
 *
 * Belongs to one thread; the caller's storage. */
#ifndef SITS_ALPS_ALPS_VERIFY_H
#define SITS_ALPS_ALPS_VERIFY_H

#include <stdint.h>

#define ALPS_VERIFY_TOKENS 64   /* longer steps are left out */

struct alps_verify {
  double n, x, xx, y, xy;                        /* of the line: sums over (tokens, us) with fading weights */
  double factor[ALPS_VERIFY_TOKENS + 1];         /* by tokens: what such steps took of what the line says, moving average */
  int32_t n_seen[ALPS_VERIFY_TOKENS + 1];        /* by tokens: steps so far, up to the length of the average */
};

void alps_verify_init(struct alps_verify *verify);
void alps_verify_observe(struct alps_verify *verify, int32_t n_tokens, double step_us);
/* Microseconds of a step; 0: not enough is known. */
double alps_verify_predict(const struct alps_verify *verify, int32_t n_tokens);

#endif
