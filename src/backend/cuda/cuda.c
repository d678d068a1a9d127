/* The CUDA backend's vtable (backend/backend.h): the device, checks of each batch, a step's inputs and results.
 *
 * submit copies the step's index arrays from pinned memory, then launches a captured graph (decode steps) or the launches one by one,
 * then the copy of the results; wait blocks on an event. Two batches may be in flight: each has pinned memory of its own (struct
 * cuda_slot), device buffers are used in stream order, and the second may take the tokens that the first draws. Nothing here allocates
 * after compile and kv_create. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/batch.h"
#include "backend/cuda/cuda_comm.h"
#include "backend/cuda/cuda_internal.h"
#include "base/clock.h"
#include "base/mem.h"

extern const struct backend_vtable backend_cuda;
bool cuda_is_usable(void);

/* Were the kernels compiled for such a device? */
static bool is_taken(int major) { return major == 8 || major == 9; }

/* Is there a device that the kernels were compiled for, at any place? Which one is meant, open is told. */
bool cuda_is_usable(void)
{
  int n = 0, major = 0;
  if (cudaGetDeviceCount(&n) != cudaSuccess) return false;
  for (int i = 0; i < n; i++)
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i) == cudaSuccess && is_taken(major)) return true;
  return false;
}

static void cuda_close(struct backend *backend)
{
  if (backend == NULL) return;
  cuda_enter(backend);
  if (backend->lt) cuda_blas.Destroy(backend->lt);
  cuda_memory_free_owner(backend, backend);
  if (backend->stream) (void)cudaStreamDestroy(backend->stream);
  mem_free(backend);
}

static enum sits_status read_recipe(struct backend *backend, struct sits_error *err)
{
  const char *recipe = backend->options.recipe;
  if (recipe == NULL || strcmp(recipe, "auto") == 0)
    backend->recipe = CUDA_RECIPE_AUTO;
  else if (strcmp(recipe, "w4a16") == 0)
    backend->recipe = CUDA_RECIPE_W4A16;
  else if (strcmp(recipe, "w4a8") == 0)
    backend->recipe = CUDA_RECIPE_W4A8;
  else
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "recipe", "cuda: recipe '%.32s' is not one of auto, w4a16, w4a8", recipe);
  return SITS_OK;
}

static enum sits_status read_prefill_weights(struct backend *backend, struct sits_error *err)
{
  static const char *const names[] = {"auto", "resident", "expand"};
  const char *name = backend->options.prefill_weights ? backend->options.prefill_weights : "auto";
  for (int i = 0; i < 3; i++) {
    if (strcmp(name, names[i]) != 0) continue;
    backend->prefill_weights = (enum cuda_prefill)i;
    return SITS_OK;
  }
  return sits_fail_param(err, SITS_INVALID_ARGUMENT, "prefill-weights",
                         "cuda: prefill-weights '%.32s' is not one of auto, resident, expand", name);
}

static int init_kernels(void)
{
  int e = sits_k_w4a16_init();
  if (!e) e = sits_k_w4a8_init();
  if (!e) e = sits_k_attn_decode_init();
  if (!e) e = sits_k_attn_few_init();
  if (!e) e = sits_k_attn_sparse_init();
  if (!e) e = sits_k_convert_init();
  if (!e) e = sits_k_kv_fold_init();
  if (!e) e = sits_k_attn_prefill_init();
  if (!e) e = sits_k_attn_prefill_sm90_init();
  return e;
}

/* The calling thread on the device, kernels, the stream, cuBLASLt. */
static enum sits_status set_up(struct backend *backend, struct sits_error *err)
{
  int e = cudaSetDevice(backend->device);
  cuda_enter(backend);
  if (!e) e = init_kernels();
  if (!e) e = cudaStreamCreate(&backend->stream);
  if (e) {
    (void)cudaGetLastError(); /* said here, and nobody else's */
    return sits_fail(err, SITS_DEVICE, "cuda: device %d could not be set up: %s", backend->device, cudaGetErrorString((cudaError_t)e));
  }
  const cublasStatus_t status = cuda_blas.Create(&backend->lt);
  if (status == CUBLAS_STATUS_SUCCESS) return SITS_OK;
  backend->lt = NULL;
  return sits_fail(err, SITS_DEVICE, "cuda: device %d: cuBLASLt could not be set up: status %d", backend->device, (int)status);
}

static enum sits_status cuda_open(const struct backend_options *options, struct backend **out, struct sits_error *err)
{
  if (options->max_batch_tokens < 1 || options->max_seqs < 1)
    return sits_fail(err, SITS_INVALID_ARGUMENT, "cuda: max_batch_tokens and max_seqs must be positive");
  struct cudaDeviceProp prop;
  if (cudaGetDeviceProperties(&prop, options->device) != cudaSuccess || !is_taken(prop.major))
    return sits_fail(err, SITS_UNAVAILABLE, "cuda: no usable device %d (compute capability 8 or 9 is needed)", options->device);
  struct backend *backend = mem_calloc(1, sizeof *backend);
  if (backend == NULL) return sits_fail(err, SITS_NOMEM, "cuda: out of memory");
  backend->options = *options;
  backend->device = options->device;
  backend->n_sm = prop.multiProcessorCount;
  backend->compute_major = prop.major;
  snprintf(backend->name, sizeof backend->name, "cuda %.40s, sm_%d%d", prop.name, prop.major, prop.minor);
  enum sits_status status = read_recipe(backend, err);
  if (status == SITS_OK) status = read_prefill_weights(backend, err);
  backend->options.recipe = backend->options.prefill_weights = backend->options.isa = NULL; /* borrowed, used here only */
  if (status == SITS_OK) status = cuda_blas_load(err);
  if (status == SITS_OK) status = set_up(backend, err);
  if (status == SITS_OK && (backend->lt_workspace = cuda_memory_alloc(backend, backend, CUDA_LT_WORKSPACE)) == NULL)
    status = sits_fail(err, SITS_NOMEM, "cuda: out of device memory");
  if (status != SITS_OK) {
    cuda_close(backend);
    return status;
  }
  *out = backend;
  return SITS_OK;
}

static void cuda_info(const struct backend *backend, struct backend_info *out)
{
  size_t free_bytes = 0, total_bytes = 0;
  memset(out, 0, sizeof *out);
  memcpy(out->name, backend->name, sizeof out->name);
  cuda_enter(backend);
  if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) return;
  out->memory_total_bytes = total_bytes;
  out->memory_free_bytes = free_bytes;
}

static uint64_t cuda_program_bytes(const struct backend_program *p) { return p->n_bytes; }

static struct cuda_slot *slot_before(struct backend_program *p) { return &p->slots[(p->next_slot + CUDA_IN_FLIGHT - 1) % CUDA_IN_FLIGHT]; }

bool cuda_batch_is_valid(const struct backend_program *p, const struct backend_kv *kv, const struct backend_batch *b, int32_t n_drawn)
{
  if (!batch_is_well_formed(b, &p->program->dims, &kv->geometry, p->max_tokens, p->max_rows, n_drawn)) return false;
  if (!batch_names_pages(b, &kv->geometry, kv->geometry.codec == KV_FP4_SPARSE) || !cuda_sparse_takes(kv, b)) return false;
  const bool has_fast_decode = cuda_has_fast_decode(p, kv), is_sparse = cuda_sparse_is_needed(kv, b);
  for (int32_t s = 0; s < b->n_seqs; s++) {
    if (batch_pages(b, s) > p->max_pages) return false;
    if (!is_sparse && cuda_is_gathered(b, s, has_fast_decode) && kv->gather_tokens > 0 &&
        cuda_gather_rows(b->kv_len[s]) > kv->gather_tokens)
      return false;
  }
  return true;
}

static bool is_decode_batch(const struct backend_batch *b)
{
  if (b->n_tokens != b->n_seqs || b->n_rows != b->n_seqs) return false;
  for (int32_t s = 0; s < b->n_seqs; s++)
    if (b->seq_start[s] != s || b->row_token[s] != s) return false;
  return true;
}

/* Pinned copies of the batch's arrays, padded to n_seqs sequences of one token where that is more than the batch has. Open groups get
 * their slots here. */
static void fill_inputs(struct backend_kv *kv, const struct backend_batch *b, const struct cuda_inputs *in, int32_t *host,
                        int32_t n_seqs, bool has_fast_decode)
{
  int32_t *seq_start = host, *kv_len = seq_start + in->max_seqs + 1, *row_token = kv_len + in->max_seqs,
          *offset = row_token + in->max_seqs, *open_slot = offset + in->max_seqs, *tokens = open_slot + 2 * in->max_seqs,
          *positions = tokens + in->max_tokens, *token_seq = positions + in->max_tokens;
  memcpy(seq_start, b->seq_start, (size_t)(b->n_seqs + 1) * sizeof(int32_t));
  memcpy(kv_len, b->kv_len, (size_t)b->n_seqs * sizeof(int32_t));
  memcpy(row_token, b->row_token, (size_t)b->n_rows * sizeof(int32_t));
  memcpy(tokens, b->tokens, (size_t)b->n_tokens * sizeof(int32_t));
  memcpy(positions, b->positions, (size_t)b->n_tokens * sizeof(int32_t));
  for (int32_t s = 0; s < b->n_seqs; s++)
    for (int32_t t = b->seq_start[s]; t < b->seq_start[s + 1]; t++) token_seq[t] = s;
  for (int32_t s0 = 0; s0 < b->n_seqs;) s0 = cuda_gather_chunk(b, kv, s0, has_fast_decode, offset);
  cuda_kv_begin(kv, b, open_slot);
  for (int32_t s = b->n_seqs; s < n_seqs; s++) {
    seq_start[s + 1] = b->n_tokens, kv_len[s] = 0, row_token[s] = s, offset[s] = 0, open_slot[2 * s] = open_slot[2 * s + 1] = -1;
    tokens[s] = positions[s] = 0, token_seq[s] = -1;
  }
}

static enum sits_status copy_inputs(struct backend_program *p, const struct cuda_slot *slot, const struct backend_batch *b,
                                    const struct cuda_inputs *in, const int32_t *host)
{
  struct backend *backend = p->backend;
  int32_t cols = 1;
  for (int32_t s = 0; s < b->n_seqs; s++) {
    const int32_t n = batch_pages(b, s);
    if (n > cols) cols = n;
  }
  if (cols > b->table_stride) cols = b->table_stride;
  for (int32_t s = 0; s < b->n_seqs; s++)
    memcpy(slot->host_table + (size_t)s * (size_t)cols, b->block_table + (int64_t)s * b->table_stride, (size_t)cols * sizeof(int32_t));
  enum sits_status status = CUDA_CALL(
      backend, cudaMemcpyAsync(in->device, host, (size_t)in->n_words * sizeof(int32_t), cudaMemcpyHostToDevice, backend->stream));
  if (status != SITS_OK) return status;
  const size_t row = (size_t)cols * sizeof(int32_t);
  return CUDA_CALL(backend, cudaMemcpy2DAsync(p->table, (size_t)p->max_pages * sizeof(int32_t), slot->host_table, row, row,
                                              (size_t)b->n_seqs, cudaMemcpyHostToDevice, backend->stream));
}

static enum sits_status copy_samples(struct backend_program *p, const struct cuda_slot *slot, const struct backend_batch *b,
                                     int32_t n_rows)
{
  for (int32_t r = 0; r < n_rows; r++) {
    const struct backend_sample greedy = {.temperature = 0.f, .top_p = 1.f}, *s = r < b->n_rows ? &b->sample[r] : &greedy;
    slot->host_sample_rows[r] = (struct k_sample_row){s->temperature, s->top_p, s->min_p, s->top_k, s->u};
  }
  return CUDA_CALL(p->backend, cudaMemcpyAsync(p->sample_rows, slot->host_sample_rows, (size_t)n_rows * sizeof *p->sample_rows,
                                               cudaMemcpyHostToDevice, p->backend->stream));
}

/* Logits have one place on the host, so of two batches in flight only one may bring them. */
static bool brings_logits(const struct backend_batch *b) { return b->sample == NULL || b->wants_logits; }

static enum sits_status copy_results(struct backend_program *p, const struct cuda_slot *slot, const struct backend_batch *b)
{
  struct backend *backend = p->backend;
  if (b->n_rows == 0) return SITS_OK;
  enum sits_status status = SITS_OK;
  if (b->sample != NULL)
    status = CUDA_CALL(backend, cudaMemcpyAsync(slot->host_sampled, p->sampled, (size_t)b->n_rows * sizeof(int32_t), cudaMemcpyDeviceToHost,
                                                backend->stream));
  if (status != SITS_OK || !brings_logits(b)) return status;
  const size_t bytes = (size_t)b->n_rows * (size_t)p->program->dims.n_vocab * sizeof(float);
  return CUDA_CALL(backend, cudaMemcpyAsync(p->host_logits, p->logits, bytes, cudaMemcpyDeviceToHost, backend->stream));
}

enum sits_status cuda_batch_start(struct backend_program *p, struct backend_kv *kv, const struct backend_batch *b,
                                  const struct cuda_slot *slot, const struct cuda_inputs *in, int32_t *host, int32_t n_seqs)
{
  fill_inputs(kv, b, in, host, n_seqs, cuda_has_fast_decode(p, kv));
  enum sits_status status = CUDA_CALL(p->backend, cudaEventRecord(slot->started, p->backend->stream));
  if (status == SITS_OK) status = cuda_comm_stall_if_due(p);
  if (status == SITS_OK) status = copy_inputs(p, slot, b, in, host);
  if (status != SITS_OK || b->sample == NULL || b->n_rows == 0) return status;
  return copy_samples(p, slot, b, n_seqs > b->n_seqs ? n_seqs : b->n_rows);
}

enum sits_status cuda_batch_finish(struct backend_program *p, struct cuda_slot *slot, const struct backend_batch *b)
{
  slot->is_sampled = b->sample != NULL;
  slot->has_logits = brings_logits(b);
  slot->n_rows = b->n_rows;
  const enum sits_status status = copy_results(p, slot, b);
  return status == SITS_OK ? CUDA_CALL(p->backend, cudaEventRecord(slot->done, p->backend->stream)) : status;
}

/* Is this decode batch, padded to n_seqs, one of few and short sequences? */
static bool is_few(const struct backend_program *p, const struct backend_batch *b, int32_t n_seqs)
{
  int32_t longest = 0;
  for (int32_t s = 0; s < b->n_seqs; s++)
    if (b->kv_len[s] > longest) longest = b->kv_len[s];
  return k_attn_few_suits(p->backend->n_sm, n_seqs, p->program->dims.n_kv_heads, longest);
}

/* Copies in, launches, copies out, between the slot's two events. */
static enum sits_status enqueue(struct backend_program *p, struct backend_kv *kv, const struct backend_batch *b)
{
  struct backend *backend = p->backend;
  struct cuda_slot *slot = &p->slots[p->next_slot];
  const bool has_fast_decode = cuda_has_fast_decode(p, kv), is_decode = is_decode_batch(b), is_sparse = cuda_sparse_is_needed(kv, b);
  const bool is_capturable =
      is_decode && !backend->options.no_graphs && (has_fast_decode || !k_attn_prefill_takes(p->program->dims.head_dim));
  const int32_t bucket = is_capturable ? cuda_graph_bucket(b->n_seqs, p->decode.max_seqs) : 0;
  struct cuda_inputs *in = bucket > 0 ? &p->decode : &p->general;
  for (int32_t s = 0; s < b->n_seqs && is_decode; s++)
    cuda_kept_written(kv, b->block_table[(int64_t)s * b->table_stride + b->positions[s] / KV_PAGE_TOKENS]);
  const int32_t n_seqs = bucket > 0 ? bucket : b->n_seqs;
  enum sits_status status = cuda_batch_start(p, kv, b, slot, in, in->host[p->next_slot], n_seqs);
  if (status == SITS_OK && is_sparse) status = cuda_sparse_begin(kv, b, n_seqs);
  /* decodes beside a prompt take the other kernel */
  const struct cuda_way way = {b->sample != NULL, is_decode && !is_sparse && is_few(p, b, n_seqs), is_sparse};
  if (status == SITS_OK && bucket > 0)
    status = cuda_graph_run(p, kv, bucket, way);
  else if (status == SITS_OK) {
    struct cuda_step step = {.in = in, .n_tokens = b->n_tokens, .n_seqs = b->n_seqs, .n_rows = b->n_rows, .is_decode = is_decode,
                             .is_sampled = way.is_sampled, .is_few = way.is_few, .is_sparse = is_sparse, .batch = b, .kept_seq = -1};
    if (!is_decode) step.kept_seq = cuda_kept_choose(kv, b, &step.kept_page);
    status = cuda_run(p, kv, &step, (struct k_stream){(struct CUstream_st *)backend->stream, true});
  }
  slot->measured = NULL;
  if (status == SITS_OK && is_sparse) status = cuda_sparse_finish(kv, slot);
  return status == SITS_OK ? cuda_batch_finish(p, slot, b) : status;
}

static enum sits_status cuda_submit(struct backend_program *p, struct backend_kv *kv, const struct backend_batch *b)
{
  const struct cuda_slot *before = p->n_pending > 0 ? slot_before(p) : NULL;
  if (p->backend->is_failed) return SITS_DEVICE;
  cuda_enter(p->backend);
  if (p->n_pending == CUDA_IN_FLIGHT || (before != NULL && before->has_logits && brings_logits(b))) return SITS_INVALID_ARGUMENT;
  if (!cuda_batch_is_valid(p, kv, b, before != NULL && before->is_sampled ? before->n_rows : 0)) return SITS_INVALID_ARGUMENT;
  enum sits_status status = cuda_fault_step(p->backend);
  if (status == SITS_OK) status = enqueue(p, kv, b);
  if (status != SITS_OK) return status;
  p->next_slot = (p->next_slot + 1) % CUDA_IN_FLIGHT;
  p->n_pending++;
  return SITS_OK;
}

static enum sits_status cuda_wait(struct backend_program *p, struct backend_result *result)
{
  struct cuda_slot *slot = &p->slots[(p->next_slot + CUDA_IN_FLIGHT - p->n_pending) % CUDA_IN_FLIGHT];
  float ms = 0.f;
  if (p->backend->is_failed) return SITS_DEVICE;
  if (p->n_pending == 0) return SITS_INVALID_ARGUMENT;
  enum sits_status status = CUDA_CALL(p->backend, cudaEventSynchronize(slot->done));
  if (status == SITS_OK) status = CUDA_CALL(p->backend, cudaEventElapsedTime(&ms, slot->started, slot->done));
  if (status == SITS_OK) status = cuda_comm_check(p);
  if (status == SITS_OK) status = cuda_sparse_take(slot);
  if (status != SITS_OK) return status;
  p->backend->passed_us = clock_monotonic_us();
  p->n_pending--;
  *result = (struct backend_result){.logits = slot->has_logits ? p->host_logits : NULL,
                                    .tokens = slot->is_sampled ? slot->host_sampled : NULL,
                                    .compute_us = p->lane != NULL ? cuda_lane_us(p) : (int64_t)(ms * 1000.f)};
  return SITS_OK;
}

static void cuda_stats(const struct backend_program *p, struct backend_stats *out) { *out = p->stats; }

const struct backend_vtable backend_cuda = {
    .abi = BACKEND_ABI,
    .name = "cuda",
    .fusions = PROGRAM_FUSE_GROUP | PROGRAM_FUSE_NORM | PROGRAM_FUSE_ROPE | PROGRAM_FUSE_QKV | PROGRAM_FUSE_SWIGLU | PROGRAM_FUSE_ADD |
               PROGRAM_FUSE_REDUCE,
    /* a node of a graph; device memory; a fused norm is a factor of the product, its sum of squares in f32, as head norms are */
    .costs = {.op_ns = 1300, .byte_ns = 0.0003F, .norm_ns = 0.001F, .norm_repeats = 1, .tokens = 8,
              .f32_fusions = PROGRAM_FUSE_NORM | PROGRAM_FUSE_ROPE | PROGRAM_FUSE_QKV},
    .can_sample = true,
    .in_flight = CUDA_IN_FLIGHT,
    .open = cuda_open,
    .close = cuda_close,
    .info = cuda_info,
    .compile = cuda_compile,
    .program_destroy = cuda_program_destroy,
    .program_bytes = cuda_program_bytes,
    .kv_page_bytes = cuda_kv_page_bytes,
    .kv_beside = cuda_kv_beside,
    .kv_create = cuda_kv_create,
    .kv_destroy = cuda_kv_destroy,
    .kv_copy_pages = cuda_kv_copy_pages,
    .kv_copy_blocks = cuda_kv_copy_blocks,
    .kv_read_page = cuda_kv_read_page,
    .kv_write_page = cuda_kv_write_page,
    .kv_expect = cuda_kv_expect,
    .kv_send = cuda_kv_send,
    .kv_sent = cuda_kv_sent,
    .submit = cuda_submit,
    .wait = cuda_wait,
    .lane_tokens = CUDA_LANE_TOKENS,
    .tile_tokens = CUDA_TILE_TOKENS,
    .lane_open = cuda_lane_open,
    .lane_begin = cuda_lane_begin,
    .lane_run = cuda_lane_run,
    .lane_ahead = cuda_lane_ahead,
    .lane_drop = cuda_lane_drop,
    .stats = cuda_stats,
    .choose_devices = cuda_choose_devices,
    .collectives = cuda_comm_table,
};
