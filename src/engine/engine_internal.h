/* Inside of the engine; only files in src/engine (and its unit tests) include it.
 *   engine.c          creation, thread, drain, stop, failure     engine_request.c  submit, ring, cancel, release, timing
 *   engine_step.c     the loop, as a table of contents           engine_batch.c    plan -> batch arrays, admission, pre-emption
 *   engine_output.c   rows -> tokens, events, ends               engine_stats.c    counters and histograms
 *   engine_slice.c    prompts read in slices
 *   engine_swap.c     pages to host memory and back, piece by piece
 *   engine_draft.c    guesses by prompt lookup            engine_draft_model.c  guesses by a second model
 *   engine_pool.c     rows drawn in parallel
 *   engine_deadline.c heap of deadlines                          engine_sample.c   one row -> one token
 *   engine_placement.c prompts read on another device
 *
 * Tags: [init] never changes after creation, [loop] engine thread only, [atomic], [mutex inbox], [mutex stats].
 */
#ifndef SITS_ENGINE_ENGINE_INTERNAL_H
#define SITS_ENGINE_ENGINE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "alps/alps.h"
#include "engine/engine_core.h"
#include "engine/engine_draft_model.h"
#include "engine/engine_placement.h"
#include "engine/engine_pool.h"
#include "engine/engine_sample.h"
#include "kv/kv.h"

_Static_assert(KV_TOKENS == KV_PAGE_TOKENS, "bookkeeping and backends agree on the page size");

/* Where a draft comes from. */
enum engine_draft_kind { DRAFT_LOOKUP, DRAFT_MODEL };

#define ENGINE_MOST_DRAFT 64      /* tokens */
#define ENGINE_LONGEST_MATCH 8    /* tokens before a looked-up one that are compared */
#define ENGINE_RESUMED 2          /* kinds of tokens where a place is resumed: the first, further ones */
#define ENGINE_AGREEMENTS 3       /* of a match's places: half at most, most, all */
/* The others: by length of the match, and by its places' agreement. */
#define ENGINE_LOOKUP_KINDS (ENGINE_AGREEMENTS * (ENGINE_LONGEST_MATCH + 1) + ENGINE_RESUMED)

/* How a choice's guesses by the draft model fare. */
struct engine_guesses {
  float accept;                   /* share of right tokens, moving average; 0 = none yet */
  int32_t wait;                   /* drafts to leave out */
};

/* Where a sequence's pages are in host memory, and what is left to copy. */
enum engine_swapping { SWAP_NONE, SWAP_OUT, SWAP_IN };
struct engine_swap {
  struct kv_swapped at;
  enum engine_swapping way;       /* SWAP_NONE: nothing is on its way */
  int32_t place, n_left;          /* the next place; pages */
};

struct engine_choice {
  struct sits_request *request;   /* [init] */
  int32_t index;                  /* [init] */
  int32_t id;                     /* [loop] the planner's name for it, -1 none */
  int32_t slot;                   /* [loop] kv slot, -1 none */
  int32_t n_computed;             /* [loop] tokens in the cache */
  int32_t n_out;                  /* [loop] tokens drawn; known = n_prompt + n_out */
  int32_t *tokens;                /* [loop] [n_prompt + max_tokens] prompt and output */
  struct engine_swap swap;        /* [loop] */
  bool is_done;                   /* [loop] its finish event is out */
  bool is_born;                   /* [loop] leads the request's prefill, or was forked */
  int64_t last_token_us;          /* [loop] */
  struct engine_guesses guesses;  /* [loop] */
  enum engine_draft_kind draft_kind; /* [loop] of the draft at hand, as what follows */
  float draft_chance[ENGINE_MOST_DRAFT]; /* [loop] of each token to be right, if those before it are */
  uint8_t draft_lookup[ENGINE_MOST_DRAFT]; /* [loop] the kind of look-up that gave it */
  int32_t draft_slot;             /* [loop] slot in the draft model's pages, -1 none */
  int32_t draft_right;            /* [loop] leading tokens that the draft model has read and that are known to be right */
};

/* One event as it lies in the ring; top logprobs lie in parallel arrays that exist only when asked for. */
struct engine_record {
  uint8_t kind, finish;
  int16_t n_top;
  int32_t choice, token;
  float logprob;
  int32_t status;
  int64_t emitted_us;
};

struct engine_ring {
  struct engine_record *records;  /* [capacity] */
  int32_t *top_token;             /* [capacity][n_top] or NULL */
  float *top_logprob;             /* [capacity][n_top] or NULL */
  int32_t n_top;
  uint32_t capacity;              /* a power of two */
  _Atomic uint32_t head;          /* [atomic] next to read; consumer writes */
  _Atomic uint32_t tail;          /* [atomic] next to write; engine writes */
};

/* TIME_COMPUTED: in steps that it was part of; TIME_COMPUTED_FIRST: of that, until its first token. */
enum engine_time { TIME_SUBMITTED, TIME_SCHEDULED, TIME_FIRST_TOKEN, TIME_DONE, TIME_COMPUTED, TIME_COMPUTED_FIRST, TIME_CACHED_TOKENS,
                   TIME_OUTPUT_TOKENS, TIME_PREEMPTIONS, TIME_COUNT };

/* Of a prompt whose pages another device has computed: when that began, and what of it was cached. scheduled_us 0: none. */
struct engine_read_elsewhere { int64_t scheduled_us; int32_t n_cached; };

struct sits_request {
  struct sits_engine *engine;     /* [init] */
  atomic_int n_refs;              /* [atomic] the submitter's and, until it is done, the engine's */
  struct sits_request_params params; /* [init] its pointers are the request's own memory */
  struct engine_choice *choices;  /* [n_choices] */
  int32_t n_choices;              /* [init] */
  int32_t n_unfinished;           /* [loop] */
  bool is_forked;                 /* [loop] every living choice is a sequence of its own */
  int32_t next_prompt_row;        /* [loop] the prompt token whose logprob is emitted next; n_prompt when all are out */
  int32_t deadline_at;            /* [loop] place in the deadline heap, -1 none */
  bool has_news;                  /* [loop] is in the list for on_events */
  bool was_scheduled;             /* [loop] */
  struct engine_handover *handover; /* [loop] once in the inbox; NULL: not to be read elsewhere, or back */
  struct engine_read_elsewhere read_elsewhere; /* [loop] */
  uint64_t counted_step;          /* [loop] the newest step whose compute time it was given */
  struct sits_request *next;      /* [mutex inbox] in the inbox; [loop] in the list of the done */
  struct sits_request *cancel_next; /* [mutex inbox] */
  bool in_cancel_list;            /* [mutex inbox] */
  struct sits_request *cancel_todo; /* [loop] the list as drain_inbox took it */
  uint64_t cancel_step;           /* [mutex inbox] steps begun when it was listed */
  uint64_t todo_step;             /* [loop] the same, as drain_inbox took it: a new call may list it again meanwhile */
  _Atomic uint64_t cancelled[SITS_MAX_CHOICES / 64]; /* [atomic] bit per choice */
  _Atomic uint64_t stopped[SITS_MAX_CHOICES / 64];   /* [atomic] of those, the complete ones; set first */
  atomic_bool is_done;            /* [atomic] all finish events are out */
  atomic_bool is_released;        /* [atomic] nobody wants news */
  _Atomic int64_t times[TIME_COUNT]; /* [atomic] written by the loop */
  struct engine_ring ring;
};

/* A logit row of the batch and what it is for. */
struct engine_row {
  int32_t item;                   /* of the plan */
  int32_t position;               /* of the token whose logits these are */
  bool is_prompt;                 /* gives the logprob of prompt token position + 1 */
  bool is_draw;                   /* gives the next token */
  bool is_ready;                  /* token and logprobs have been made by the pool or the device */
  bool is_device;                 /* the device draws its token */
  int32_t token;
  struct engine_logprobs logprobs;
};

/* The chunk that is read in slices; see engine_slice.c. */
struct engine_slice {
  struct backend_program *lane;   /* [init] NULL: the backend cannot */
  int32_t most_tokens;            /* [init] */
  int32_t id;                     /* [loop] the planner's name of its choice, -1 none */
  struct backend_batch batch;     /* [loop] arrays below */
  int32_t *tokens, *positions, *table; /* [most_tokens], [most_tokens], [stride] */
  int32_t seq_start[2], kv_len, row_token;
  struct backend_sample sample;   /* is_device: the device draws the prompt's token */
  bool is_device;
  int64_t until_us;               /* [loop] when this step's slice ends */
  int64_t asked_us, gap_us;       /* [loop] when go_on was asked last; how long one more piece may take, 0: the backend tells of each */
  int32_t n_asked;                /* [loop] in this slice */
  int64_t end_us;                 /* [loop] when what the lane was left to run ends */
  bool is_ahead;                  /* [loop] its next slice has begun behind the batch in flight */
  int64_t reported_us;            /* [loop] of this step: slices that the planner has been told of already */
};

/* Waiting requests by tenant (several tenants may share an entry): nobody alone may fill the queue while others are about. */
#define ENGINE_QUEUE_SHARES 256
struct engine_queue_share {
  atomic_int n_queued;            /* [atomic] */
  int64_t seen_us;                /* [mutex inbox] newest submission, refused ones too */
};

struct sits_engine {
  struct engine_options options;  /* [init] */
  int32_t *end_ids;               /* [init] */
  int32_t max_entries;            /* [init] sequences alive at once */
  int32_t stride;                 /* [init] most pages of a sequence */
  uint64_t page_bytes;            /* [init] */
  unsigned char *host_memory;     /* [loop] [n_host_pages][page_bytes] */
  double page_copy_us;            /* [loop] measured */
  int32_t *swapping;              /* [loop] [max_num_seqs] ids whose pages are on their way, in order */
  int32_t n_swapping;
  int64_t swapped_us;             /* [loop] of this turn, for copying pages */

  struct kv *pages;               /* [loop] */
  struct alps *alps;              /* [loop] */
  struct engine_sampler sampler;  /* [loop] */
  struct engine_pool *pool;       /* [loop] */
  struct engine_drafter *drafter; /* [loop] NULL without a draft model */
  struct engine_placement *placement; /* [loop] NULL without a prefill device */
  float lookup_right[ENGINE_LOOKUP_KINDS]; /* [loop] share of right tokens of each kind of look-up, moving averages */
  struct engine_choice **to_draft;/* [loop] [max_num_seqs] scratch of engine_draft */
  int64_t draft_us;               /* [loop] of this turn, by the draft model */
  const float *logits;            /* [loop] [R][V] of the newest batch */
  struct engine_choice **by_id;   /* [loop] [max_entries] */
  int32_t *free_ids;              /* [loop] [max_entries] */
  int32_t n_free_ids;
  struct sits_request **deadlines;/* [loop] [max_entries] heap */
  int32_t n_deadlines;
  struct sits_request **news;     /* [loop] [max_entries] requests for on_events */
  int32_t n_news;
  struct sits_request *done;      /* [loop] finished requests whose reference is dropped in reclaim */
  struct alps_plan plan;          /* [loop] */
  struct kv_move *moves;          /* [loop] [max_num_seqs] */
  struct kv_copy *copies;         /* [loop] [max_num_seqs] */
  int32_t n_moves;
  struct backend_batch batch;     /* [loop] arrays below */
  int32_t *tokens, *positions, *seq_start, *kv_len, *tables, *row_token;
  struct engine_row *rows;        /* [loop] [max_rows] */
  struct backend_blocks *blocks;  /* [loop] [max_num_seqs] with a page budget, else NULL */
  int32_t *blocks_slot;           /* [loop] [max_num_seqs] the same: whose they are, in the order of their kv_reserve */
  struct backend_sample *samples; /* [loop] [max_rows] where the device draws */
  struct engine_slice slice;
  int64_t step_started_us, last_step_end_us, compute_us; /* [loop] */
  bool is_continuous;             /* [loop] the step before had work too */
  int32_t *parked;                /* [loop] [max_entries] ids pre-empted while they were held */
  int32_t n_parked;
  int32_t n_held;                 /* [loop] choices whose ring is full */

  pthread_mutex_t inbox_mutex;
  pthread_cond_t inbox_cond;      /* work came, or stop */
  pthread_cond_t idle_cond;       /* the last request ended */
  struct sits_request *inbox_first, *inbox_last; /* [mutex inbox] */
  struct sits_request *cancel_first;             /* [mutex inbox] */
  atomic_int inbox_class;         /* [atomic] highest class in the inbox, SITS_CLASS_COUNT when it is empty */
  bool is_sleeping;               /* [mutex inbox] */
  bool wants_stop, wants_cancel_all; /* [mutex inbox] */
  atomic_int n_alive;             /* [atomic] sequences submitted and not finished */
  atomic_int n_requests;          /* [atomic] requests submitted and not finished */
  atomic_int n_queued;            /* [atomic] requests never scheduled yet */
  _Atomic int64_t queued_tokens;  /* [atomic] their prompt tokens */
  struct engine_queue_share shares[ENGINE_QUEUE_SHARES];
  _Atomic uint64_t n_rejected_requests, n_rejected_tokens; /* [atomic] */
  atomic_int state;               /* [atomic] enum engine_state */
  _Atomic int64_t heartbeat_us;   /* [atomic] */
  _Atomic uint64_t n_steps_begun; /* [atomic] batches submitted */
  pthread_t thread;
  bool has_thread;                /* owner thread */

  struct engine_stats stats;      /* [loop] */
  pthread_mutex_t stats_mutex;
  struct engine_stats published;  /* [mutex stats] */
};

static inline int32_t engine_known(const struct engine_choice *choice)
{
  return choice->request->params.n_prompt + choice->n_out;
}

/* engine_step.c: one turn; false when there was nothing to compute. */
bool engine_step(struct sits_engine *engine);
/* A request joins the queue; the cache is thought to hold n_ready tokens of its prompt. */
void engine_enqueue(struct sits_engine *engine, const struct sits_request *request, int32_t n_ready);

/* engine_request.c */
/* NULL without memory. It holds the submitter's and the engine's reference; freed before it was entered, or released after it. */
struct sits_request *engine_request_create(struct sits_engine *engine, const struct sits_request_params *params);
void engine_request_free(struct sits_request *request);
/* Into the inbox, if one more may wait. */
enum sits_status engine_request_enter(struct sits_engine *engine, struct sits_request *request, struct sits_error *err) SITS_MUST_CHECK;
void engine_unqueue(struct sits_engine *engine, const struct sits_request *request); /* it waits for the first time no longer */
void engine_request_unref(struct sits_request *request);
bool engine_is_cancelled(const struct sits_request *request, int32_t choice);
bool engine_is_stopped(const struct sits_request *request, int32_t choice);
int32_t engine_ring_room(const struct engine_ring *ring);
void engine_ring_push(struct engine_ring *ring, const struct sits_event *event);

/* engine_batch.c */
void engine_hold_full(struct sits_engine *engine);
void engine_plan(struct sits_engine *engine);
bool engine_plan_more(struct sits_engine *engine, bool has_time); /* alps_plan_more */
void engine_build(struct sits_engine *engine);
enum sits_status engine_submit_batch(struct sits_engine *engine) SITS_MUST_CHECK;
enum sits_status engine_wait_batch(struct sits_engine *engine, struct backend_result *result) SITS_MUST_CHECK;
void engine_vacate(struct sits_engine *engine, struct engine_choice *choice); /* give slot, host pages, id and entry back */
void engine_tell_filled(struct sits_engine *engine, const struct engine_choice *choice); /* options.pages.filled */
void engine_give_back(struct sits_engine *engine, struct engine_choice *choice, int32_t n_left); /* all pages but the first n_left */
void engine_close_slot(struct sits_engine *engine, struct engine_choice *choice);
/* It has lost its slot; outside the queues when its ring is full. */
int32_t engine_freed(void *user, const int32_t *ids, int32_t n); /* alps_options.freed; user: the engine */
void engine_wait_again(struct sits_engine *engine, struct engine_choice *choice);

/* engine_swap.c */
/* Begin to copy the choice's pages to host memory; it loses the partial one at once. False: it keeps all, for there is no room or no whole
 * page. */
bool engine_swap_out(struct sits_engine *engine, struct engine_choice *choice);
/* Begin to bring them back, into the choice's empty slot. False: there are no pages; host memory stays as it is. */
bool engine_swap_in(struct sits_engine *engine, struct engine_choice *choice);
/* All of them at once, for a sequence that is being admitted. False: that takes too long, or a page fails; it is coming. */
bool engine_swap_fill(struct sits_engine *engine, struct engine_choice *choice);
void engine_swap_stop(struct sits_engine *engine, struct engine_choice *choice); /* host places are kept where they hold all pages */
bool engine_swap_run(struct sits_engine *engine); /* this turn's piece; false: nothing is on its way */
void engine_swap_hurry(struct sits_engine *engine); /* one page more; something must be leaving */

/* Whether the device can draw the row's token: a plain draw of one sequence. It depends on the request alone, so that what else is in the
 * step never decides who draws. */
bool engine_may_device_draw(const struct engine_choice *choice, const struct engine_row *row, struct backend_sample *out);
/* engine_step.c: one on_events call with all requests that have news. */
void engine_deliver(struct sits_engine *engine);
/* For backend_batch.progress: user is the engine, and lives. */
void engine_beat(void *user);

/* engine_slice.c; err: the device's own text, else empty */
enum sits_status engine_slice_open(struct sits_engine *engine, struct sits_error *err) SITS_MUST_CHECK;
void engine_slice_close(struct sits_engine *engine);
/* Behind a batch just submitted: the slice of the next step begins, where the backend can and this one had a slice that goes on. */
enum sits_status engine_slice_ahead(struct sits_engine *engine) SITS_MUST_CHECK;
void engine_slice_run(struct sits_engine *engine, int64_t from_us); /* the plan's slice; from_us: when the step before ended */
void engine_slice_run_behind(struct sits_engine *engine, int64_t from_us); /* and the prompt's next chunks, behind the plan's items */
bool engine_slice_has_time(const struct sits_engine *engine); /* a piece of another one would be in time */
void engine_slice_drop(struct sits_engine *engine, int32_t id);     /* that entry's chunk, if it has one, is not wanted any more */

/* engine_draft.c */
void engine_draft_init(struct sits_engine *engine);
/* Whether the choice takes a draft of the draft model now; *accept: the chance of its tokens. */
bool engine_may_guess(struct engine_choice *choice, float *accept);
void engine_draft(struct sits_engine *engine);
void engine_draft_result(struct sits_engine *engine, struct engine_choice *choice, int32_t n_draft, int32_t n_accepted);

/* engine_output.c */
/* What the sequence's next token would be if these were its logits, behind its first n_tokens tokens. */
int32_t engine_draw_token(const struct sits_engine *engine, struct engine_sampler *sampler, const struct engine_choice *choice,
                          int32_t n_tokens, const float *logits);
void engine_outputs(struct sits_engine *engine, const struct backend_result *result);
/* The planner is told what the choice holds now. */
void engine_tell_entry(struct sits_engine *engine, const struct engine_choice *choice);
void engine_finish(struct sits_engine *engine, struct engine_choice *choice, enum sits_finish finish, enum sits_status status,
                   int32_t token);
void engine_finish_all(struct sits_engine *engine, struct sits_request *request, enum sits_finish finish, enum sits_status status);

/* engine_deadline.c */
void engine_deadline_add(struct sits_engine *engine, struct sits_request *request);
void engine_deadline_remove(struct sits_engine *engine, struct sits_request *request);

/* engine_stats.c */
void engine_stats_init(struct engine_stats *stats);
void engine_observe(struct engine_histogram *histogram, double value);
void engine_stats_request(struct sits_engine *engine, const struct sits_request *request); /* its last choice has finished */
void engine_stats_publish(struct sits_engine *engine);

/* engine.c: every living request ends with an error; nothing is accepted any more. */
void engine_fail(struct sits_engine *engine, enum sits_status status);

#endif
