/* Decode steps as CUDA graphs: one per batch bucket (with or without sampling, for short or long contexts, over blocks that may be lost or
 * not), captured when first needed, launches joined by programmatic edges. Where the device has no room for one more, the step's launches
 * go one by one, which costs time only, and a while later capturing is tried again. Entry points: cuda_graph_bucket, cuda_graph_run,
 * cuda_graph_clear.
 *
 * Everything that changes from step to step lies in fixed device buffers (struct cuda_inputs, the page table), so a captured graph serves
 * every batch of its bucket. Rows beyond the batch hold token 0 and no sequence: they are computed and ignored. */
#include "backend/cuda/cuda_internal.h"
#include "base/clock.h"
#include "base/log.h"

#define NO_ROOM_US 10000000          /* capturing is not tried again so long where memory was short */

int32_t cuda_graph_bucket(int32_t n, int32_t max_seqs)
{
  static const int32_t buckets[] = {1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256};
  for (size_t i = 0; i < sizeof buckets / sizeof *buckets; i++)
    if (n <= buckets[i]) return buckets[i] <= max_seqs ? buckets[i] : max_seqs;
  return 0;
}

void cuda_graph_clear(struct backend_program *p)
{
  for (int32_t i = 0; i < p->n_graphs; i++) (void)cudaGraphExecDestroy(p->graphs[i].exec);
  p->n_graphs = 0;
  p->stats = (struct backend_stats){0};
}

/* Memory that is short is no failure of the device: *has_room says so instead. */
static enum sits_status settle(struct backend *b, cudaError_t e, const char *what, bool *has_room)
{
  *has_room = e != cudaErrorMemoryAllocation;
  if (*has_room) return cuda_check(b, (int)e, what, __FILE__, __LINE__);
  (void)cudaGetLastError();
  return SITS_OK;
}

/* *out NULL: there is no room. */
static enum sits_status capture(struct backend_program *p, struct backend_kv *kv, const struct cuda_step *step, cudaGraphExec_t *out)
{
  struct backend *b = p->backend;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  bool has_room = true;
  enum sits_status status = CUDA_CALL(b, cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal));
  if (status != SITS_OK) return status;
  status = cuda_run(p, kv, step, (struct k_stream){(struct CUstream_st *)b->stream, true});
  const cudaError_t e = cudaStreamEndCapture(b->stream, &graph);
  if (status == SITS_OK) status = CUDA_CALL(b, e);
  if (status == SITS_OK) status = settle(b, cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate", &has_room);
  if (status == SITS_OK && has_room) status = settle(b, cudaGraphUpload(exec, b->stream), "cudaGraphUpload", &has_room);
  if (graph != NULL) (void)cudaGraphDestroy(graph);
  if (status == SITS_OK && has_room) *out = exec;
  else if (exec != NULL) (void)cudaGraphExecDestroy(exec);
  return status;
}

/* The newest graph is this step's, or there is none for want of room. */
static enum sits_status add(struct backend_program *p, struct backend_kv *kv, const struct cuda_step *step, cudaGraphExec_t *out)
{
  size_t free_before = 0, free_after = 0, total = 0;
  const int64_t started_us = clock_monotonic_us();
  if (started_us < p->capture_from_us) return SITS_OK;
  if (p->n_graphs == CUDA_MAX_GRAPHS) cuda_graph_clear(p);
  (void)cudaMemGetInfo(&free_before, &total);
  TRY(capture(p, kv, step, out));
  const int64_t ended_us = clock_monotonic_us();
  p->stats.capture_us += ended_us - started_us;
  if (*out == NULL) {
    if (p->capture_from_us == 0) log_warn("cuda", "no memory for the graph of a step of %d sequences: launched one by one", step->n_seqs);
    p->capture_from_us = ended_us + NO_ROOM_US;
    return SITS_OK;
  }
  (void)cudaMemGetInfo(&free_after, &total);
  p->stats.n_graphs++;
  p->stats.graph_bytes += free_before > free_after ? free_before - free_after : 0;
  p->graphs[p->n_graphs++] = (struct cuda_graph){step->n_seqs, {step->is_sampled, step->is_few, step->is_sparse}, *out};
  return SITS_OK;
}

static bool is_same(struct cuda_way a, struct cuda_way b)
{
  return a.is_sampled == b.is_sampled && a.is_few == b.is_few && a.is_sparse == b.is_sparse;
}

enum sits_status cuda_graph_run(struct backend_program *p, struct backend_kv *kv, int32_t bucket, struct cuda_way way)
{
  struct backend *b = p->backend;
  const struct cuda_step step = {.in = &p->decode,
                                 .n_tokens = bucket,
                                 .n_seqs = bucket,
                                 .n_rows = bucket,
                                 .is_decode = true,
                                 .is_sampled = way.is_sampled,
                                 .is_few = way.is_few,
                                 .is_sparse = way.is_sparse,
                                 .kept_seq = -1};
  cudaGraphExec_t exec = NULL;
  if (p->graphs_kv != kv->serial) {
    cuda_graph_clear(p);
    p->graphs_kv = kv->serial;
  }
  for (int32_t i = 0; i < p->n_graphs; i++)
    if (p->graphs[i].bucket == bucket && is_same(p->graphs[i].way, way))
      return CUDA_CALL(b, cudaGraphLaunch(p->graphs[i].exec, b->stream));
  TRY(add(p, kv, &step, &exec));
  if (exec == NULL) return cuda_run(p, kv, &step, (struct k_stream){(struct CUstream_st *)b->stream, true});
  return CUDA_CALL(b, cudaGraphLaunch(exec, b->stream));
}
