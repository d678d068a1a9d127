/* Where a prompt is read when one device is there for prompts and another decodes: handed over to the prefill device, or read between the
 * decodes. A pure function of what has been seen; the same code runs under the engine and under the simulation.
 *
 * Handing over keeps long chunks out of the decoding steps. It is declined
 *   1. where the tokens to read hardly lengthen a step beside the decodes: less than what their tail costs there anyway;
 *   2. where nothing decodes, so that reading holds nobody up, and the decode device would be done sooner;
 *   3. where the prefill device is so far behind that the first token would miss its target (without one: would take longer than
 *      SPLIT_PATIENCE_US), and the decode device would be done sooner beside its decodes, which keep their own target.
 * The prefill device's speed is measured from handing over to arrival, so that its queue, its steps and the transfer are in it.
 * Threads: none; the decode side's thread calls. */
#ifndef SITS_ALPS_ALPS_SPLIT_H
#define SITS_ALPS_ALPS_SPLIT_H

#include "alps/alps.h"

struct alps_split {
  int64_t ttft_target_us;      /* 0 = none */
  bool always;                 /* never declined by 1-3; for comparison */
  int64_t n_away_tokens;       /* handed over and not back */
  int64_t mark_us;             /* since when the prefill device has worked on what comes back next */
  double read_us, read_tokens; /* recently: its time, and the tokens that came back in it */
  uint64_t n_sent, n_declined; /* prompts */
};

/* Whether a prompt with n_tokens to read, in whole pages, and a further n_tail that the decode device reads in any case, is handed over. */
bool alps_split_pays(const struct alps_split *split, const struct alps *decode, int32_t n_tokens, int32_t n_tail, int64_t arrival_us,
                     int64_t now_us);
void alps_split_sent(struct alps_split *split, int32_t n_tokens, int64_t now_us);
/* It came back; is_read: with all its pages. */
void alps_split_back(struct alps_split *split, int32_t n_tokens, bool is_read, int64_t now_us);

#endif
