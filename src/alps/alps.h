/* ALPS plans a step: which sequences decode, which prompt chunks ride along, who is admitted, who is pre-empted. It sees token and page
 * counts, service classes, tenants and clocks; never a model, never a device. The same code runs under a CPU, a GPU and a simulator.
 *
 * Words
 *   entry    one sequence known to the planner, named by a small id that the caller chooses. WAITING holds nothing; RUNNING holds a
 *            slot and pages and is in prefill (n_known - n_computed > 1 or the prompt not yet complete) or in decode. LEAVING lost its
 *            pages, but they are still being copied to elsewhere: its slot and they are free when that is done. A running one is coming
 *            while its pages are being copied back: it is planned when they are there.
 *   budget   the time a step may take: the inter-token target times a safety factor that follows the measured P99.
 *   cost     predicted time of a step: fixed + per decoding sequence + per cached token read + per prompt token + per token x depth.
 *   share    prefill time is shared between classes by weight (stride scheduling), between tenants of a class by deficit round robin
 *            charged with the tokens really served, inside a tenant by priority, then arrival.
 *
 * Rules
 *   1. A plan never needs more pages than alps_plan was told are available; when decoding needs more, it names victims first.
 *   2. Every running sequence that is not held decodes in every step, unless a higher class is short of time (time-slice pre-emption).
 *   3. A step with decoding sequences takes no more prompt tokens than the budget leaves, but always at least a few, so that prefill
 *      cannot starve; nor can a class or tenant.
 *      Where the time has room for a few tokens only, a longer chunk may be read in slices instead, if the caller can stop and go on.
 *   4. A pre-empted entry goes back to the front of its tenant's queue.
 *   5. Same calls, same clock values: same plans.
 * Threads: none; one thread calls. Nothing allocates after alps_create.
 */
#ifndef SITS_ALPS_ALPS_H
#define SITS_ALPS_ALPS_H

#include <stdbool.h>
#include <stdint.h>

#include "alps/alps_cost.h"
#include "sits2026/status.h"

#define ALPS_CLASSES 3 /* 0 is served first */

struct alps;

enum alps_policy {
  ALPS_BUDGET,     /* the real one: chunks sized from the time budget */
  ALPS_WHOLE,      /* continuous batching, whole prompts, prompts before decodes */
  ALPS_CHUNKED,    /* continuous batching, a fixed token budget per step, decodes first */
  ALPS_STATIC,     /* a batch is filled, run to its last token, then the next */
};

/* "alps", "continuous", "chunked", "static"; NULL is "alps". */
enum alps_policy alps_policy_named(const char *name);
const char *alps_policy_name(enum alps_policy policy);

struct alps_options {
  enum alps_policy policy;
  int32_t max_entries;         /* ids are 0 .. max_entries-1 */
  int32_t max_seqs;            /* running at once */
  int32_t max_batch_tokens;    /* T of a step */
  int32_t max_rows;            /* R of a step */
  int32_t chunk_tokens;        /* ALPS_CHUNKED: T of a step; 0 = 2048 */
  int32_t tile_tokens;         /* the device computes tokens of prompts in tiles of so many; 0 = one by one */
  int32_t slice_tokens;        /* longest chunk that is read in slices; 0 = the caller cannot */
  bool slices_behind;          /* the caller runs a step's slice behind its items, before their tokens go out: what those take beyond their
                                  prediction shortens the slice, and no time is kept for it */
  bool slices_by_rate;         /* also where a chunk alone is read about as fast, by the cost model, as what fits beside the decodes */
  int32_t page_tokens;         /* P */
  int32_t n_pages;             /* N */
  int32_t page_budget;         /* most pages that a sequence keeps (kv/kv_sparse.h), 0 = no limit */
  int64_t itl_target_us;       /* 0 = none set: steps with decodes keep to about 100 ms */
  int64_t ttft_target_us;      /* 0 = none set: prompts in order of arrival. Else under overload few are made late instead of all */
  int32_t class_weight[ALPS_CLASSES]; /* all 0 = 64, 8, 1 */
  struct alps_cost_coefficients prior; /* all 0 = learn from nothing */
  /* How many pages would be available more if these running entries lost theirs, where some are shared; user: as given to alps_plan.
   * NULL = all that the entries hold. */
  int32_t (*freed)(void *user, const int32_t *ids, int32_t n);
};

struct alps_request {
  int32_t service_class;       /* 0 .. ALPS_CLASSES-1 */
  int32_t priority;            /* lower first */
  uint64_t tenant;
  int64_t arrival_us;
  int32_t n_known;             /* tokens to be in the cache before the first draw: the prompt, and the output when pre-empted */
  int32_t n_ready;             /* of those, how many the cache is thought to hold already; a guess, for deadlines and queue lengths */
  int32_t n_limit;             /* most tokens it can ever hold */
  int32_t width;               /* sequences that it becomes once its prompt is read (n choices) */
  bool wants_rows;             /* every prompt token needs a logit row (prompt logprobs) */
};

/* What the caller says of an entry when it is admitted: it has taken a slot and attached cached pages. */
struct alps_admitted {
  int32_t n_computed;          /* tokens that need not be computed */
  int32_t n_pages;             /* length of its block table */
  int32_t n_available;         /* pages available now (free and cached) */
  bool is_coming;              /* they are still to be filled: it is left out until alps_arrived */
};

/* Called from inside alps_plan to admit one entry; must not fail, a slot is free. */
typedef void (*alps_admit_fn)(void *user, int32_t id, struct alps_admitted *out);

struct alps_item {
  int32_t id;
  int32_t n_tokens;            /* to compute in this step */
  bool is_last;                /* after it all known tokens are computed: a token is drawn */
};

struct alps_plan {
  int32_t n_items, n_decode;   /* decodes come first */
  struct alps_item *items;     /* [max_seqs] owned by alps, valid until the next call */
  int32_t n_victims;
  int32_t *victims;            /* [max_seqs] to be pre-empted, when alps_plan returned SITS_AGAIN */
  int32_t n_tokens;
  int32_t n_reserved_pages;    /* that the items need */
  int64_t budget_us, predicted_us;
  bool is_stretched;           /* it takes longer than the inter-token target, for first tokens that would be late else */
  struct alps_cost_work work;  /* what the prediction was made from */
  /* A chunk that is read in slices, beside the items: this step's slice ends slice_us after the end of the step before, so that the items
   * still come in time; or, slice_is_behind, is run when the items are computed, until then, but for slice_least_us at least. The same
   * chunk is planned, or left out, until alps_update says that it is computed, or it is given up for a higher class's (slice_begins). */
  struct alps_item slice;      /* id -1: none */
  bool slice_begins;           /* it is a new one; what another had begun would be given up */
  int32_t slice_class;
  bool slice_is_behind;
  int64_t slice_us, slice_least_us;
  int32_t slice_pages;         /* of n_reserved_pages, for the slice */
  /* Set by the caller before alps_report and alps_plan_more. */
  int64_t sliced_us;           /* that the slice took; behind alps_plan_more all slices of the step */
  bool slice_ended;            /* the chunk is computed */
  int64_t once_us;             /* of the step's time, for what the device does once and not again: no cost that a prediction needs */
  /* alps_plan_more's own: slices of the step that have ended already. */
  int64_t ended_us;
  int32_t ended_tokens;
  int32_t n_joined;            /* of n_decode, those whose prompts ended in them: their first tokens came joined_us or more after the */
  int64_t joined_us;           /* step before, so their next ones are not late by what was before that */
};

struct alps_counts {
  int32_t n_running, n_waiting, n_waiting_by_class[ALPS_CLASSES];
  int64_t waiting_tokens;
  double itl_p99_us, margin;
};

enum sits_status alps_create(const struct alps_options *options, struct alps **out) SITS_MUST_CHECK;
void alps_destroy(struct alps *alps);

/* A new entry waits. The id must be unused. */
void alps_enqueue(struct alps *alps, int32_t id, const struct alps_request *request);
/* A running entry lost its pages, or a leaving one's are free: it waits again, in front, with n_known tokens to compute. */
void alps_requeue(struct alps *alps, int32_t id, int32_t n_known);
/* A running entry lost its pages, but they and its slot will be free only at its alps_requeue, the pages perhaps one by one before. */
void alps_leave(struct alps *alps, int32_t id);
/* The pages of a coming entry are filled. */
void alps_arrived(struct alps *alps, int32_t id);
/* Entry `id` becomes a second running sequence beside `from`, which has finished its prompt. */
void alps_fork(struct alps *alps, int32_t from, int32_t id);
/* One of the sequences that the entry would fork into is not wanted any more. */
void alps_narrow(struct alps *alps, int32_t id);
/* The entry is gone, whatever its state. */
void alps_remove(struct alps *alps, int32_t id);

/* Plan one step. SITS_OK: *plan (perhaps empty). SITS_AGAIN: pre-empt plan->victims (alps_requeue or alps_leave each), then call again;
 * no victims: the decodes need pages of leaving entries now, so free some. */
enum sits_status alps_plan(struct alps *alps, int64_t now_us, int32_t n_available, alps_admit_fn admit, void *user,
                           struct alps_plan *plan) SITS_MUST_CHECK;
/* The plan's items will not run: something more urgent has come while its slice ran (report that first, as a plan without items, n_joined
 * included). */
void alps_drop_plan(struct alps *alps);
/* The plan's slice has ended (alps_update has been told of its entry, which now decodes if it has drawn): its next token joins the plan.
 * has_time: what is left of the step's time goes to other prompts, as a new slice or as items behind the decodes. True: plan->slice is to
 * be run; else there is none any more. Only where slices_by_rate, or behind the items, where the same prompt alone may go on. */
bool alps_plan_more(struct alps *alps, int32_t n_available, bool has_time, alps_admit_fn admit, void *user, struct alps_plan *plan);
/* After the step: the entry's counts. copy_pages: pages its next write needs beyond new ones, as kv_extra; entries that alps_fork made of
 * one are taken to share them. */
void alps_update(struct alps *alps, int32_t id, int32_t n_known, int32_t n_computed, int32_t n_pages, int32_t copy_pages);
/* The same for copy_pages alone: another sequence has left the pages that it shared with the entry's. */
void alps_update_copies(struct alps *alps, int32_t id, int32_t copy_pages);
/* What was last said of it. */
int32_t alps_copies(const struct alps *alps, int32_t id);
/* The chunk in slices is given up: it could not begin. Pre-empting or removing its entry says so by itself. */
void alps_drop_slice(struct alps *alps);
/* A held entry is left out (its consumer is slow). Running, it keeps its pages until others need them; waiting, it is in no queue. */
void alps_hold(struct alps *alps, int32_t id, bool is_held);
/* The entry has n_draft guessed tokens that its next step could verify; chance[k]: that token k is right if those before it are,
 * borrowed until the next alps_update of the entry. The plan takes as many as pay: the number that gives the most tokens per time, none if
 * that is best. They count as tokens and rows. */
void alps_offer(struct alps *alps, int32_t id, int32_t n_draft, const float *chance);
/* So much of the next step's time will have passed before its plan runs: prompts in it get less. */
void alps_spend(struct alps *alps, int64_t us);
/* The step took step_us from the end of the one before (or from its start after an idle time). */
void alps_report(struct alps *alps, const struct alps_plan *plan, int64_t step_us);

void alps_counts(const struct alps *alps, struct alps_counts *out);
/* Ids of running entries; borrowed until the next call that changes something. */
int32_t alps_running(const struct alps *alps, const int32_t **ids);
const struct alps_cost *alps_cost_model(const struct alps *alps);
/* What all running sequences that decode add to a step. */
void alps_decode_work(const struct alps *alps, struct alps_cost_work *work);
/* Predicted time until n_tokens more than all that is being read or waits have been read, beside decodes that make up `decodes` and keep
 * to their target. 0 while nothing is known of the device. */
double alps_reading_us(const struct alps *alps, const struct alps_cost_work *decodes, int64_t n_tokens);
/* Abort when a rule of the planner's own state is broken. */
void alps_check(const struct alps *alps);

#endif
