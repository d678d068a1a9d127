/* What steps without prompts take by their tokens, drafts included: what a drafted token costs to verify.
 *
 * What one more row costs beside few others is another thing than what a prompt's token costs: up to a dozen rows a step is bound by the
 * weights' bytes. So drafts are judged by steps without prompts alone. Each number of tokens has its cost in times of a step of one token,
 * for a device that computes rows in pairs or tiles takes little for the row that fills one and much for the next.
 *
 * It is learned from steps that follow each other: what disturbs the machine meets both, so their quotient tells of their tokens. The
 * costs are those that agree best with the quotients, the newest most, and with costs that grow evenly: least squares over logarithms. So
 * one number tells of its neighbours; and one that is not chosen any more is judged by them in the end, is chosen again if it pays by
 * these, and learned anew. What a few disturbed steps taught does not stay.
 *
 * Belongs to one thread; the caller's storage. */
#ifndef SITS_ALPS_ALPS_VERIFY_H
#define SITS_ALPS_ALPS_VERIFY_H

#include <stdint.h>

#define ALPS_VERIFY_TOKENS 24   /* longer steps are left out, and predicted by a straight line */

struct alps_verify {
  double x[ALPS_VERIFY_TOKENS + 1];              /* by tokens: logarithm of what such steps take, in steps of one token */
  /* By tokens - 2; of symmetric ones what is below the diagonal. */
  double prior[ALPS_VERIFY_TOKENS - 1][ALPS_VERIFY_TOKENS - 1];  /* inverse covariance without quotients */
  double weight[ALPS_VERIFY_TOKENS - 1][ALPS_VERIFY_TOKENS - 1]; /* the same of the quotients, fading */
  double told[ALPS_VERIFY_TOKENS - 1];           /* weight times what they tell beyond the guess */
  double one_us;                                 /* a step of one token now; 0: no step yet */
  double before_us;                              /* the newest step, */
  int32_t before;                                /* and its tokens; 0: none to compare with */
};

void alps_verify_init(struct alps_verify *verify);
void alps_verify_observe(struct alps_verify *verify, int32_t n_tokens, double step_us);
/* The next step does not follow the newest one: another kind of step was between them. */
void alps_verify_pause(struct alps_verify *verify);
/* Microseconds of a step; 0: not enough is known. */
double alps_verify_predict(const struct alps_verify *verify, int32_t n_tokens);

#endif
