/* A prompt's chunk computed in slices between the program's own batches (backend.h: lanes). Entry points: cuda_lane_open, cuda_lane_begin,
 * cuda_lane_run, cuda_lane_ahead, cuda_lane_drop.
 *
 * A lane is a copy of its program with what must last from one part of a layer to the next for itself: the residual stream, activations,
 * the index arrays, the last row's logits. Everything else is scratch of one part, shared with the program, for both use one stream and a
 * piece ends between two parts: before attention, behind it, or before a layer's last product. How long parts take is known from the times
 * of the newest pieces, so that one piece is enqueued behind the one that computes, and go_on is asked with the time at which it would end:
 * first for a long one, then for shorter ones. The device waits for nobody: neither between pieces, nor before the batch that comes next,
 * nor, by cuda_lane_ahead, behind it. Only pieces of parts that have not been timed are waited for. While a lane's batch has begun,
 * nobody else's expanded keys are kept (cuda_kept.c): those of the layers to come belong to it.
 */
#include <string.h>

#include "backend/cuda/cuda_internal.h"
#include "base/clock.h"
#include "base/mem.h"

#define IN_FLIGHT 2          /* pieces, of which one computes */
#define PLACES 4             /* one more for a piece behind a batch, and the one before the oldest, whose end is its begin */
#define LONG_PIECE_US 500.F  /* one part may take longer */
#define AHEAD_PIECE_US 200.F /* least of a piece behind a batch: about what the host needs to take the results and plan */

enum phase { IDLE, BEGUN, DONE };

struct piece {
  int32_t from, to;          /* parts, as in cuda_span */
  bool follows;              /* begins where the one before it ends; else at its own event */
  bool is_ahead;             /* behind a batch */
  cudaEvent_t begin, end;
};

struct cuda_lane {
  enum phase phase;
  const struct backend_batch *batch;
  struct backend_kv *kv;
  struct cuda_step step;
  struct cuda_span span;
  struct piece pieces[PLACES];
  int32_t oldest, n_running; /* enqueued and not seen to end */
  int64_t end_us;            /* when they will have ended, as far as known; they all are timed if is_known */
  bool is_known;
  float part_us[CUDA_LAYER_PARTS]; /* 0: not known */
  int32_t n_timed_tokens;    /* of chunks as long as this */
  int64_t compute_us;
};

static size_t logit_bytes(const struct backend_program *p)
{
  return (size_t)cuda_lt_rows(1) * (size_t)p->program->dims.n_vocab * sizeof(float);
}

uint64_t cuda_lane_bytes(const struct backend_program *p)
{
  const int32_t n = p->max_tokens < CUDA_LANE_TOKENS ? p->max_tokens : CUDA_LANE_TOKENS;
  if (p->comm != NULL) return 0;
  return cuda_activation_bytes(p, n) + logit_bytes(p) + ((uint64_t)cuda_input_words(n, 1) + (uint64_t)p->max_pages) * sizeof(int32_t);
}

static bool make_memory(struct backend_program *lane)
{
  struct backend *b = lane->backend;
  const struct program_dims *d = &lane->program->dims;
  lane->logits = cuda_memory_alloc(b, lane, logit_bytes(lane));
  lane->host_logits = cuda_pinned_alloc(b, lane, (size_t)d->n_vocab * sizeof(float));
  lane->table = cuda_memory_alloc(b, lane, (size_t)lane->max_pages * sizeof(int32_t));
  lane->sample_rows = cuda_memory_alloc(b, lane, sizeof *lane->sample_rows);
  lane->sampled = cuda_memory_alloc(b, lane, sizeof(int32_t));
  return lane->logits && lane->host_logits && lane->table && lane->sample_rows && lane->sampled && cuda_make_activations(lane) &&
         cuda_make_inputs(lane, &lane->general, lane->max_tokens, 1);
}

static enum sits_status make_events(struct backend_program *lane)
{
  for (int32_t i = 0; i < PLACES; i++) {
    struct piece *piece = &lane->lane->pieces[i];
    TRY(CUDA_CALL(lane->backend, cudaEventCreate(&piece->begin)));
    TRY(CUDA_CALL(lane->backend, cudaEventCreate(&piece->end)));
  }
  return SITS_OK;
}

/* What the lane holds is given up. A piece of it may still run: what others do from now on comes behind it. */
void cuda_lane_drop(struct backend_program *lane)
{
  struct cuda_lane *state = lane->lane;
  if (state->phase == BEGUN) {
    cuda_kept_release(state->kv, false);
    cuda_kv_release(state->kv, false);
  }
  state->phase = IDLE;
  lane->next_slot = lane->n_pending = 0;
}

void cuda_lane_fini(struct backend_program *lane)
{
  if (lane->lane != NULL) cuda_lane_drop(lane);
  for (int32_t i = 0; lane->lane != NULL && i < PLACES; i++) {
    const struct piece *piece = &lane->lane->pieces[i];
    if (piece->begin) (void)cudaEventDestroy(piece->begin);
    if (piece->end) (void)cudaEventDestroy(piece->end);
  }
}

enum sits_status cuda_lane_open(struct backend_program *program, const struct backend_kv *kv, int32_t max_tokens,
                                struct backend_program **out, struct sits_error *err)
{
  if (kv->geometry.codec == KV_FP4_SPARSE) /* a chunk that is given up has been measured */
    return sits_fail(err, SITS_UNSUPPORTED, "cuda: lane: not with fp4-sparse");
  if (program->comm != NULL || max_tokens > program->max_tokens)
    return sits_fail(err, SITS_UNSUPPORTED, "cuda: lane: one device, and no more tokens than a batch");
  struct backend_program *lane = mem_calloc(1, sizeof *lane);
  struct cuda_lane *state = mem_calloc(1, sizeof *state);
  if (lane == NULL || state == NULL) {
    mem_free(lane);
    mem_free(state);
    return sits_fail(err, SITS_NOMEM, "cuda: lane: out of memory");
  }
  *lane = *program;
  lane->lane = state;
  lane->max_tokens = max_tokens;
  lane->max_rows = 1;
  lane->n_graphs = lane->next_slot = lane->n_pending = 0;
  lane->stats = (struct backend_stats){0};
  memset(lane->slots, 0, sizeof lane->slots);
  enum sits_status status = SITS_OK;
  if (!make_memory(lane)) status = sits_fail(err, SITS_NOMEM, "cuda: lane: no memory for %d tokens", max_tokens);
  if (status == SITS_OK) status = cuda_make_slots(lane, err);
  if (status == SITS_OK) status = make_events(lane);
  if (status == SITS_OK) status = CUDA_CALL(lane->backend, cudaStreamSynchronize(lane->backend->stream));
  if (status != SITS_OK) {
    if (lane->backend->is_failed) status = sits_fail(err, SITS_DEVICE, "cuda: the device has failed");
    cuda_program_destroy(lane);
    return status;
  }
  lane->n_bytes = cuda_memory_of(lane->backend, lane);
  *out = lane;
  return SITS_OK;
}

/* The arrays from which a given-up batch's inputs are copied are free again. */
static enum sits_status wait_for_pieces(struct backend_program *lane)
{
  struct cuda_lane *state = lane->lane;
  if (state->n_running == 0) return SITS_OK;
  const int32_t newest = (state->oldest + state->n_running - 1) % PLACES;
  state->n_running = 0;
  return CUDA_CALL(lane->backend, cudaEventSynchronize(state->pieces[newest].end));
}

enum sits_status cuda_lane_begin(struct backend_program *lane, struct backend_kv *kv, const struct backend_batch *b)
{
  struct cuda_lane *state = lane->lane;
  if (lane->backend->is_failed) return SITS_DEVICE;
  cuda_enter(lane->backend);
  cuda_lane_drop(lane);
  TRY(wait_for_pieces(lane));
  if (b->n_seqs != 1 || !cuda_batch_is_valid(lane, kv, b, 0)) return SITS_INVALID_ARGUMENT;
  state->batch = b;
  state->kv = kv;
  state->span = (struct cuda_span){0};
  state->compute_us = 0;
  state->phase = BEGUN;
  if (b->n_tokens != state->n_timed_tokens) memset(state->part_us, 0, sizeof state->part_us);
  state->n_timed_tokens = b->n_tokens;
  return SITS_OK;
}

/* ---- pieces ---- */

static int32_t parts_of(const struct backend_program *lane) { return lane->program->dims.n_layers * CUDA_LAYER_PARTS; }

/* Where a piece from part `at` on may end first: never between two layers, and with few tokens not before the last product either, whose
 * input may be fragments in the program's own memory (cuda_gemm_form). */
static int32_t next_stop(const struct backend_program *lane, int32_t at)
{
  const bool is_small = lane->lane->batch->n_tokens <= CUDA_FAST_TOKENS;
  if (is_small && lane->is_fast) return parts_of(lane); /* its layers hand over in other ways */
  do at++;
  while (at < parts_of(lane) && (at % CUDA_LAYER_PARTS == PART_QKV || (is_small && at % CUDA_LAYER_PARTS == PART_DOWN)));
  return at;
}

/* 0: not known. */
static float piece_us(const struct cuda_lane *state, int32_t from, int32_t to)
{
  float us = 0;
  for (int32_t i = from; i < to; i++) {
    if (state->part_us[i % CUDA_LAYER_PARTS] == 0) return 0;
    us += state->part_us[i % CUDA_LAYER_PARTS];
  }
  return us;
}

/* The longest piece that takes no more than most_us, or the shortest there is. */
static int32_t longest(const struct backend_program *lane, float most_us)
{
  const int32_t from = lane->lane->span.from;
  int32_t to = next_stop(lane, from);
  while (to < parts_of(lane)) {
    const int32_t next = next_stop(lane, to);
    const float us = piece_us(lane->lane, from, next);
    if (us == 0 || us > most_us) break;
    to = next;
  }
  return to;
}

/* What a piece took says how long its parts take: parts not known yet took the rest, others move half way. */
static void learn(struct cuda_lane *state, const struct piece *piece, float us)
{
  float known = 0, *part_us = state->part_us;
  int32_t n_unknown = 0;
  for (int32_t i = piece->from; i < piece->to; i++) {
    known += part_us[i % CUDA_LAYER_PARTS];
    n_unknown += part_us[i % CUDA_LAYER_PARTS] == 0;
  }
  const float rest = us > known ? us - known : 0, factor = n_unknown > 0 ? 1 : 0.5F + 0.5F * us / known;
  const int32_t n = piece->to - piece->from < CUDA_LAYER_PARTS ? piece->to - piece->from : CUDA_LAYER_PARTS;
  for (int32_t i = piece->from; i < piece->from + n; i++) {
    float *one = &part_us[i % CUDA_LAYER_PARTS];
    *one = *one == 0 ? 1 + rest / (float)n_unknown : *one * factor;
  }
}

/* Enqueue parts up to `to`, with the batch's arrays before the first and its results after the last. */
static enum sits_status enqueue(struct backend_program *lane, int32_t to, bool is_ahead)
{
  struct cuda_lane *state = lane->lane;
  struct backend *backend = lane->backend;
  const struct backend_batch *b = state->batch;
  struct cuda_slot *slot = &lane->slots[0];
  struct cuda_span *span = &state->span;
  struct piece *piece = &state->pieces[(state->oldest + state->n_running) % PLACES];
  piece->from = span->from, piece->to = span->to = to;
  piece->is_ahead = is_ahead, piece->follows = state->n_running > 0 && !is_ahead;
  if (!piece->follows) TRY(CUDA_CALL(backend, cudaEventRecord(piece->begin, backend->stream)));
  if (span->from == 0) {
    TRY(cuda_fault_step(backend));
    TRY(cuda_batch_start(lane, state->kv, b, slot, &lane->general, lane->general.host[0], 1));
    state->step = (struct cuda_step){.in = &lane->general, .n_tokens = b->n_tokens, .n_seqs = 1, .n_rows = b->n_rows,
                                     .is_sampled = b->sample != NULL, .batch = b, .span = span};
    state->step.kept_seq = cuda_kept_choose(state->kv, b, &state->step.kept_page);
    cuda_kept_hold(state->kv);
    cuda_kv_hold(state->kv);
  }
  TRY(cuda_run(lane, state->kv, &state->step, (struct k_stream){(struct CUstream_st *)backend->stream, true}));
  if (to == parts_of(lane)) TRY(cuda_batch_finish(lane, slot, b));
  TRY(CUDA_CALL(backend, cudaEventRecord(piece->end, backend->stream)));
  const int64_t now_us = clock_monotonic_us();
  const float us = piece_us(state, piece->from, to);
  if (state->n_running == 0 || state->end_us < now_us) state->end_us = now_us;
  state->end_us += (int64_t)us;
  state->is_known = us > 0;
  state->n_running++;
  span->from = to;
  if (b->progress != NULL) b->progress(b->progress_user);
  return SITS_OK;
}

/* Wait for the oldest piece. */
static enum sits_status take(struct backend_program *lane)
{
  struct cuda_lane *state = lane->lane;
  const struct piece *piece = &state->pieces[state->oldest], *before = &state->pieces[(state->oldest + PLACES - 1) % PLACES];
  float ms = 0, us = 0;
  TRY(CUDA_CALL(lane->backend, cudaEventSynchronize(piece->end)));
  TRY(CUDA_CALL(lane->backend, cudaEventElapsedTime(&ms, piece->follows ? before->end : piece->begin, piece->end)));
  state->compute_us += (int64_t)(ms * 1000);
  if (piece->to < parts_of(lane)) learn(state, piece, ms * 1000); /* the last one has the head too */
  state->oldest = (state->oldest + 1) % PLACES;
  state->n_running--;
  for (int32_t i = 0; i < state->n_running; i++) {
    const struct piece *next = &state->pieces[(state->oldest + i) % PLACES];
    us += piece_us(state, next->from, next->to);
  }
  state->end_us = clock_monotonic_us() + (int64_t)us;
  return SITS_OK;
}

/* Before a slice: what ran before the batch in front of it, and since when a piece behind that one runs. */
static enum sits_status take_former(struct backend_program *lane)
{
  struct cuda_lane *state = lane->lane;
  while (state->n_running > 0 && !state->pieces[state->oldest].is_ahead) TRY(take(lane));
  const struct piece *piece = &state->pieces[state->oldest];
  if (state->n_running > 0) state->end_us = lane->backend->passed_us + (int64_t)piece_us(state, piece->from, piece->to);
  return SITS_OK;
}

enum sits_status cuda_lane_ahead(struct backend_program *lane, bool *has_begun)
{
  const struct cuda_lane *state = lane->lane;
  *has_begun = false;
  if (lane->backend->is_failed) return SITS_DEVICE;
  if (state->phase != BEGUN || state->span.from == 0 || state->n_running >= IN_FLIGHT) return SITS_OK;
  cuda_enter(lane->backend);
  const int32_t from = state->span.from;
  int32_t to = next_stop(lane, from);
  while (piece_us(state, from, to) < AHEAD_PIECE_US && next_stop(lane, to) < parts_of(lane)) to = next_stop(lane, to);
  if (to >= parts_of(lane) || piece_us(state, from, to) == 0) return SITS_OK;
  *has_begun = true;
  return enqueue(lane, to, true);
}

/* Where the next piece ends; 0: there is no time for any. */
static int32_t ask(struct backend_program *lane, backend_go_on *go_on, void *user)
{
  const struct cuda_lane *state = lane->lane;
  int32_t to = longest(lane, LONG_PIECE_US);
  for (;;) {
    const float us = piece_us(state, state->span.from, to);
    const int64_t now_us = clock_monotonic_us(), from_us = state->n_running > 0 && state->end_us > now_us ? state->end_us : now_us;
    if (go_on(user, us > 0 ? from_us + (int64_t)us : 0)) return to;
    const int32_t shorter = longest(lane, us / 2);
    if (shorter == to) return 0;
    to = shorter;
  }
}

enum sits_status cuda_lane_run(struct backend_program *lane, backend_go_on *go_on, void *user, bool *is_done, int64_t *end_us)
{
  struct cuda_lane *state = lane->lane;
  if (lane->backend->is_failed) return SITS_DEVICE;
  cuda_enter(lane->backend);
  *is_done = false;
  *end_us = 0;
  if (state->phase != BEGUN) return SITS_INVALID_ARGUMENT;
  TRY(take_former(lane));
  while (state->span.from < parts_of(lane)) {
    if (state->n_running == IN_FLIGHT || (state->n_running > 0 && !state->is_known)) {
      TRY(take(lane));
      continue;
    }
    const int32_t to = ask(lane, go_on, user);
    if (to == 0) {
      if (state->n_running > 0) *end_us = state->end_us;
      return SITS_OK;
    }
    TRY(enqueue(lane, to, false));
  }
  while (state->n_running > 0) TRY(take(lane));
  cuda_kept_release(state->kv, true);
  cuda_kv_release(state->kv, true);
  state->phase = DONE;
  lane->next_slot = lane->n_pending = 1; /* for wait: slot 0 */
  *is_done = true;
  return SITS_OK;
}

int64_t cuda_lane_us(const struct backend_program *lane) { return lane->lane->compute_us; }
