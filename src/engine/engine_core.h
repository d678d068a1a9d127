/* The engine as the rest of the server sees it: creation over an open backend, start and stop, health, statistics.
 * Requests go through include/sits2026/engine.h; engine/instance.h opens a whole model and ends here.
 *
 * Threads: engine_create .. engine_start and engine_stop .. engine_destroy on one owner thread. After engine_start one engine thread
 * turns the loop and is the only one to call the backend; sits_engine_submit, sits_request_*, engine_stats, engine_state and
 * engine_heartbeat_us may be called from any thread and never wait for a step.
 *
 * States of the engine: CREATED --engine_start--> RUNNING --engine_drain--> DRAINING --engine_stop--> STOPPED
 *                       RUNNING or DRAINING --device error--> FAILED (requests end with SITS_FINISH_ERROR / SITS_DEVICE)
 */
#ifndef SITS_ENGINE_ENGINE_CORE_H
#define SITS_ENGINE_ENGINE_CORE_H

#include <stdbool.h>
#include <stdint.h>

#include "alps/alps.h"
#include "backend/backend.h"
#include "sits2026/engine.h"

enum engine_state { ENGINE_CREATED, ENGINE_RUNNING, ENGINE_DRAINING, ENGINE_FAILED, ENGINE_STOPPED };

/* Told after each step, on the engine thread: these requests have events. user is engine_options.events_user. A request may appear here
 * until its last finish event has been delivered; who wants to be sure that it does not appear any more cancels it, polls the finish
 * events and then releases it. */
typedef void (*engine_events_fn)(void *user, struct sits_request *const *requests, int32_t n);

/* What a step's time consisted of, from the end of the step before (of its own beginning after an idle time). Told after each step with
 * a batch, on the engine thread, which waits meanwhile. */
struct engine_step_times {
  int32_t n_decode, n_prompt_tokens; /* of the batch; a chunk in slices is no part of it */
  int64_t step_us;               /* the whole: the gap between the tokens of a sequence that decoded in both */
  int64_t predicted_us;          /* the planner's prediction of the batch */
  int64_t batch_us;              /* what it took, submission to results */
  int64_t slice_us, sliced_us;   /* how much of the step might pass before a slice ends, and how long slices took; 0 without one */
  int64_t once_us;               /* of batch_us: capturing a step that was not captured yet */
};
typedef void (*engine_step_fn)(void *user, const struct engine_step_times *times);

/* A second model whose guesses the first one verifies (engine_draft_model.h); of the same vocabulary, on the same backend. */
struct engine_draft_model {
  struct backend_program *program;   /* NULL: none */
  struct backend_kv *kv;             /* n_pages for min(spec_max_running, max_num_seqs) sequences of max_model_len */
  struct kv_geometry geometry;
  int32_t max_model_len;
};

/* For an engine that fills pages for somebody else (engine_placement.h); on the engine thread. filled: the request has been admitted, or a
 * step has run; so many leading pages of it are whole. closing: some request's pages are about to be given back. */
struct engine_pages_watch {
  void (*filled)(void *user, struct sits_request *request, const int32_t *pages, int32_t n_whole); /* NULL: nobody watches */
  void (*closing)(void *user);
  void *user;
};

struct engine_options {
  /* What to run; borrowed, must outlive the engine. The backend was opened with max_batch_tokens and max_seqs (= max_rows) as below. */
  const struct backend_vtable *vtable;
  struct backend_program *program;
  struct backend_kv *kv;
  struct kv_geometry geometry;
  int32_t n_vocab;               /* V of the logits */
  int32_t max_model_len;         /* prompt + output tokens of one sequence */
  const int32_t *end_ids;        /* [n_end_ids] copied */
  int32_t n_end_ids;

  int32_t max_num_seqs;          /* sequences running at once, > 0 */
  int32_t max_num_batched_tokens;/* T of a step, > 0 */
  int32_t max_rows;              /* R of a step, >= max_num_seqs */
  int32_t max_waiting_requests;  /* 0 = 1024; beyond it SITS_QUEUE_FULL */
  int64_t max_waiting_tokens;    /* prompt tokens of waiting requests; 0 = no limit */
  bool prefix_caching;
  int32_t n_host_pages;          /* pages of host memory for swapped sequences, 0 = pre-emption by recompute only */
  int32_t swap_step_pages;       /* most that are copied between two steps, beside what the second cannot do without; 0 = by time */
  int32_t page_budget;           /* most pages that a sequence keeps (kv/kv_sparse.h); KV_FP4_SPARSE only, 0 = all. No swapping then */
  int64_t itl_target_us;         /* inter-token latency that running streams must keep; 0 = none set: about 100 ms a step */
  int64_t ttft_target_us;        /* time to the first token that most requests keep under overload; 0 = none set: order of arrival */
  int32_t spec_max_tokens;       /* longest draft verified at once, 0 = no speculation */
  int32_t spec_max_running;      /* speculate while fewer sequences than that run; 0 = 8 */
  struct engine_draft_model draft; /* borrowed, must outlive the engine */
  bool overlap;                  /* submit returns before the batch is computed: the last step's tokens are delivered meanwhile */
  int32_t n_sampler_threads;     /* helpers that draw tokens beside the engine thread; 0 = none */
  enum alps_policy policy;       /* ALPS_BUDGET; the others are for comparison */

  const struct engine_options *reader; /* an engine on another device that reads prompts (engine_placement.h); copied. NULL: none */
  bool always_hand_over;         /* with a reader: whether it pays or not, for comparison */
  struct engine_pages_watch pages;

  engine_events_fn on_events;    /* NULL: the consumer polls */
  void *events_user;
  engine_step_fn on_step;        /* NULL: nobody asks */
  void *step_user;
};

/* A histogram with fixed bounds: counts[i] observations <= bounds[i] and > bounds[i-1]; the last count is those above all bounds. */
#define ENGINE_HISTOGRAM_MAX 24
struct engine_histogram {
  const double *bounds;          /* [n_bounds] ascending, static storage */
  int32_t n_bounds;
  uint64_t counts[ENGINE_HISTOGRAM_MAX + 1];
  double sum;
  uint64_t count;
};

enum { ENGINE_SPEC_POSITIONS = 16 };

/* One consistent picture, taken after the newest step. Durations in seconds, as Prometheus wants them. */
struct engine_stats {
  enum engine_state state;
  int32_t n_running;             /* sequences in prefill or decode */
  int32_t n_waiting;             /* requests that hold no pages: queued or pre-empted */
  int32_t n_waiting_by_class[SITS_CLASS_COUNT];
  int64_t waiting_prompt_tokens;
  int32_t n_pages_total, n_pages_free, n_pages_cached, n_pages_used;
  int32_t n_host_pages_total, n_host_pages_free;
  double kv_usage;               /* used / total, 0..1 */
  uint64_t n_steps, n_preemptions, n_preemptions_swapped;
  uint64_t prompt_tokens, prompt_tokens_cached, prompt_tokens_computed, generation_tokens;
  uint64_t prefix_query_tokens, prefix_hit_tokens;
  uint64_t n_pages_dropped;      /* by sequences, for their page budget */
  uint64_t finished[SITS_FINISH_ERROR + 1];      /* choices, by enum sits_finish */
  uint64_t rejected_requests, rejected_tokens;   /* submissions refused: queue full by requests, by prompt tokens */
  uint64_t spec_drafts, spec_draft_tokens, spec_accepted_tokens;
  uint64_t spec_model_tokens;    /* guessed by the draft model, whether or not they were then verified */
  uint64_t spec_accepted_at[ENGINE_SPEC_POSITIONS]; /* drafts whose token at that position was accepted; later ones in the last */
  uint64_t placement_sent, placement_declined, placement_pages; /* prompts given to the reader or not; pages that it sent */
  double step_us_ewma;           /* recent time of a step */
  double serial_us_ewma;         /* of it, from the end of one batch to the start of the next: what nothing overlaps */
  double itl_p99_us;             /* sliding window over running streams */
  struct engine_histogram ttft_seconds, itl_seconds, tpot_seconds, e2e_seconds, queue_seconds, prefill_seconds, decode_seconds,
      scheduling_seconds, inference_seconds,
      prompt_tokens_hist, generation_tokens_hist, max_tokens_hist, n_choices_hist, iteration_tokens_hist,
      cancel_steps_hist;             /* steps begun after a cancellation was asked for and before it took effect */
};

struct engine_limits { int32_t max_model_len, max_prompt_tokens, max_num_seqs, n_vocab; };

enum sits_status engine_create(const struct engine_options *options, struct sits_engine **out, struct sits_error *err) SITS_MUST_CHECK;
/* Replace the end tokens given at creation; copied. Before engine_start only: SITS_INVALID_ARGUMENT after it. */
enum sits_status engine_set_end_ids(struct sits_engine *engine, const int32_t *ids, int32_t n_ids) SITS_MUST_CHECK;
/* Start the engine thread. SITS_NOMEM, SITS_INTERNAL when no thread can be made. */
enum sits_status engine_start(struct sits_engine *engine, struct sits_error *err) SITS_MUST_CHECK;
/* Refuse new requests from now on; running ones go on. Any thread, idempotent. */
void engine_drain(struct sits_engine *engine);
/* Drain; wait until nothing runs or deadline_us (monotonic clock) passes; then cancel what is left and end the thread. */
void engine_stop(struct sits_engine *engine, int64_t deadline_us);
/* After engine_stop every request has ended; one that its owner still holds outlives the engine. */
void engine_destroy(struct sits_engine *engine);

/* One turn of the loop on the caller's thread, for an engine that was not started (tests, tools). Returns false when nothing was to do. */
bool engine_step_once(struct sits_engine *engine);

void engine_stats(struct sits_engine *engine, struct engine_stats *out);
enum engine_state engine_state(const struct sits_engine *engine);
/* Monotonic time of the newest turn of the loop, or of the newest part of a step on a backend whose steps can be long. The loop turns at
 * least every 100 ms when idle, so an age of many seconds means a wedged device. */
int64_t engine_heartbeat_us(const struct sits_engine *engine);
void engine_limits(const struct sits_engine *engine, struct engine_limits *out);
/* A guess at how long a refused client should wait, in whole seconds, at least 1: waiting work over the recent rate. */
int32_t engine_retry_after_s(struct sits_engine *engine);

#endif
