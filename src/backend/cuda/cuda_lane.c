/* A prompt's chunk computed in slices between the program's own batches (backend.h: lanes). Entry points: cuda_lane_open, cuda_lane_begin,
 * cuda_lane_run.
 *
 * A lane is a copy of its program with what must last from one layer to the next for itself: the residual stream, the sums that the next
 * norm adds, the index arrays, the last row's logits. Everything else is scratch of one layer, shared with the program, for both use one
 * stream and a slice ends between two layers. A piece is one layer, of a short chunk some; the host waits for each and asks
 * whether to go on, which costs the device some 15 us a piece. While a lane's batch has begun, nobody else's expanded keys are kept
 * (cuda_kept.c): those of the layers to come belong to it.
 */
#include <string.h>

#include "backend/cuda/cuda_internal.h"
#include "base/clock.h"
#include "base/mem.h"

#define MOST_SHARE 8         /* a piece has at most one layer in so many */
#define SHORT_PIECE_US 350   /* below it a piece gets more layers */
#define LONG_PIECE_US 900    /* above it fewer */

enum phase { IDLE, BEGUN, DONE };

struct cuda_lane {
  enum phase phase;
  const struct backend_batch *batch;
  struct backend_kv *kv;
  struct cuda_step step;
  struct cuda_span span;
  int32_t n_layers;          /* of a piece */
  int64_t compute_us;
};

static bool make_memory(struct backend_program *lane)
{
  struct backend *b = lane->backend;
  const struct program_dims *d = &lane->program->dims;
  const size_t t = (size_t)lane->max_tokens + 128, rows = (size_t)cuda_lt_rows(1);
  lane->h = cuda_memory_alloc(b, lane, t * (size_t)d->n_embd * sizeof(float));
  lane->slabs = cuda_memory_alloc(b, lane, cuda_slab_bytes(lane));
  lane->logits = cuda_memory_alloc(b, lane, rows * (size_t)d->n_vocab * sizeof(float));
  lane->host_logits = cuda_pinned_alloc(b, lane, (size_t)d->n_vocab * sizeof(float));
  lane->table = cuda_memory_alloc(b, lane, (size_t)lane->max_pages * sizeof(int32_t));
  lane->sample_rows = cuda_memory_alloc(b, lane, sizeof *lane->sample_rows);
  lane->sampled = cuda_memory_alloc(b, lane, sizeof(int32_t));
  return lane->h && lane->slabs && lane->logits && lane->host_logits && lane->table && lane->sample_rows && lane->sampled &&
         cuda_make_inputs(lane, &lane->general, lane->max_tokens, 1);
}

enum sits_status cuda_lane_open(struct backend_program *program, const struct backend_kv *kv, int32_t max_tokens,
                                struct backend_program **out, struct sits_error *err)
{
  (void)kv;
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
  lane->n_graphs = lane->n_lt_plans = lane->next_slot = lane->n_pending = 0;
  lane->stats = (struct backend_stats){0};
  memset(lane->lt_plans, 0, sizeof lane->lt_plans);
  memset(lane->slots, 0, sizeof lane->slots);
  state->n_layers = 1;
  enum sits_status status = SITS_OK;
  if (!make_memory(lane)) status = sits_fail(err, SITS_NOMEM, "cuda: lane: no memory for %d tokens", max_tokens);
  if (status == SITS_OK) status = cuda_make_slots(lane, err);
  if (status == SITS_OK) status = CUDA_CALL(lane->backend, cudaStreamSynchronize(lane->backend->stream));
  if (status != SITS_OK) {
    cuda_program_destroy(lane);
    return status;
  }
  lane->n_bytes = cuda_memory_of(lane->backend, lane);
  *out = lane;
  return SITS_OK;
}

enum sits_status cuda_lane_begin(struct backend_program *lane, struct backend_kv *kv, const struct backend_batch *b)
{
  struct cuda_lane *state = lane->lane;
  if (state->phase == BEGUN) { /* what it held is given up */
    cuda_kept_release(state->kv, false);
    cuda_kv_release(state->kv);
  }
  state->phase = IDLE;
  lane->next_slot = lane->n_pending = 0;
  if (lane->backend->is_failed) return SITS_DEVICE;
  cuda_enter(lane->backend);
  if (b->n_seqs != 1 || !cuda_batch_is_valid(lane, kv, b, 0)) return SITS_INVALID_ARGUMENT;
  state->batch = b;
  state->kv = kv;
  state->span = (struct cuda_span){0};
  state->compute_us = 0;
  state->phase = BEGUN;
  return SITS_OK;
}

/* Enqueue the next layers, with the batch's arrays before the first and its results after the last, and wait for them. */
static enum sits_status run_piece(struct backend_program *lane)
{
  struct cuda_lane *state = lane->lane;
  struct backend *backend = lane->backend;
  const struct backend_batch *b = state->batch;
  struct cuda_slot *slot = &lane->slots[0];
  struct cuda_span *span = &state->span;
  const int32_t n_layers = lane->program->dims.n_layers;
  enum sits_status status = SITS_OK;
  if (span->from == 0) {
    status = cuda_fault_step(backend);
    if (status == SITS_OK) status = cuda_batch_start(lane, state->kv, b, slot, &lane->general, lane->general.host[0], 1);
    state->step = (struct cuda_step){&lane->general, b->n_tokens, 1, b->n_rows, false, b->sample != NULL, false, b, -1, 0, span};
    state->step.kept_seq = cuda_kept_choose(state->kv, b, &state->step.kept_page);
    cuda_kept_hold(state->kv);
    cuda_kv_hold(state->kv);
  }
  const bool is_whole = lane->is_fast && b->n_tokens <= CUDA_FAST_TOKENS; /* its layers hand over in other ways */
  span->to = is_whole || n_layers - span->from <= state->n_layers ? n_layers : span->from + state->n_layers;
  if (status == SITS_OK)
    status = cuda_run(lane, state->kv, &state->step, (struct k_stream){(struct CUstream_st *)backend->stream, true});
  cudaEvent_t end = lane->slots[1].done;
  if (status == SITS_OK && span->to == n_layers) {
    status = cuda_batch_finish(lane, slot, b);
    end = slot->done;
  } else if (status == SITS_OK)
    status = CUDA_CALL(backend, cudaEventRecord(end, backend->stream));
  if (status == SITS_OK && b->progress != NULL) b->progress(b->progress_user);
  if (status == SITS_OK) status = CUDA_CALL(backend, cudaEventSynchronize(end));
  span->from = span->to;
  return status;
}

enum sits_status cuda_lane_run(struct backend_program *lane, bool (*go_on)(void *user), void *user, bool *is_done)
{
  struct cuda_lane *state = lane->lane;
  if (lane->backend->is_failed) return SITS_DEVICE;
  cuda_enter(lane->backend);
  if (state->phase != BEGUN) return SITS_INVALID_ARGUMENT;
  *is_done = false;
  while (go_on(user)) {
    const int64_t start_us = clock_monotonic_us();
    const enum sits_status status = run_piece(lane);
    const int64_t us = clock_monotonic_us() - start_us;
    if (status != SITS_OK) return status;
    state->compute_us += us;
    if (us < SHORT_PIECE_US && state->n_layers < lane->program->dims.n_layers / MOST_SHARE) state->n_layers++;
    if (us > LONG_PIECE_US && state->n_layers > 1) state->n_layers--;
    if (state->span.from < lane->program->dims.n_layers) continue;
    cuda_kept_release(state->kv, true);
    cuda_kv_release(state->kv);
    state->phase = DONE;
    lane->next_slot = lane->n_pending = 1; /* for wait: slot 0 */
    *is_done = true;
    break;
  }
  return SITS_OK;
}

int64_t cuda_lane_us(const struct backend_program *lane) { return lane->lane->compute_us; }
