/* Which way of all-reducing is fastest at which size, measured when a model is compiled: each way, with the residual and norm that follow,
 * CALLS times inside a captured graph, all ranks together; push also by how many CTAs share a row. Entry points:
 * cuda_comm_measure, cuda_comm_table.
 *
 * Rank 0's times decide for all, for every rank must go the same way. The workspaces that the calls run on hold zeros, so h stays as it is.
 */
#include "backend/cuda/cuda_comm.h"
#include "base/log.h"

enum { CALLS = 20, RUNS = 5, MAX_BYTES = 64 << 20, MOST_SPLIT = 8 };

/* What is timed. */
struct trial { enum comm_way way; int32_t split; bool is_alone; /* the library's call only */ };

static enum sits_status enqueue(struct backend_program *p, const struct trial *trial, int32_t n_tokens)
{
  struct cuda_comm *c = p->comm;
  const struct k_stream at = {(struct CUstream_st *)p->backend->stream, !c->is_shared};
  const struct k_act out = {.form = K_ACT_ROW_F16, .data = p->act};
  /* As steps are: GEMMs of many tokens give f16. */
  if (!trial->is_alone)
    return cuda_comm_reduce_by(p, trial->way, trial->split, n_tokens, n_tokens > COMM_SLAB_TOKENS ? COMM_HALF : 1, p->final_gain, &out, at);
  const int status = nccl_all_reduce_f16(c->half, (size_t)n_tokens * (size_t)c->width, c->nccl, at.stream);
  return CUDA_CALL(p->backend, status == 0 ? cudaSuccess : cudaErrorLaunchFailure);
}

static enum sits_status capture(struct backend_program *p, const struct trial *trial, int32_t n_tokens, cudaGraphExec_t *out)
{
  struct backend *b = p->backend;
  cudaGraph_t graph = NULL;
  TRY(CUDA_CALL(b, cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal)));
  enum sits_status status = SITS_OK;
  for (int32_t i = 0; i < CALLS && status == SITS_OK; i++) status = enqueue(p, trial, n_tokens);
  const cudaError_t e = cudaStreamEndCapture(b->stream, &graph);
  if (status == SITS_OK) status = CUDA_CALL(b, e);
  if (status == SITS_OK) status = CUDA_CALL(b, cudaGraphInstantiate(out, graph, 0));
  if (graph != NULL) (void)cudaGraphDestroy(graph);
  return status;
}

/* Microseconds of one call: the least of several runs, for the first ones load code. */
static enum sits_status time_trial(struct backend_program *p, struct trial trial, int32_t n_tokens, double *us)
{
  struct backend *b = p->backend;
  cudaGraphExec_t exec = NULL;
  cudaEvent_t from = NULL, to = NULL;
  float ms, least = 1e30f;
  enum sits_status status = capture(p, &trial, n_tokens, &exec);
  if (status == SITS_OK) status = CUDA_CALL(b, cudaEventCreate(&from));
  if (status == SITS_OK) status = CUDA_CALL(b, cudaEventCreate(&to));
  for (int32_t i = 0; i < RUNS && status == SITS_OK; i++) {
    status = cuda_comm_exchange(p->comm, NULL, 0, NULL, NULL);
    if (status == SITS_OK) status = CUDA_CALL(b, cudaEventRecord(from, b->stream));
    if (status == SITS_OK) status = CUDA_CALL(b, cudaGraphLaunch(exec, b->stream));
    if (status == SITS_OK) status = CUDA_CALL(b, cudaEventRecord(to, b->stream));
    if (status == SITS_OK) status = CUDA_CALL(b, cudaEventSynchronize(to));
    if (status == SITS_OK) status = CUDA_CALL(b, cudaEventElapsedTime(&ms, from, to));
    if (status == SITS_OK) status = cuda_comm_check(p);
    if (status == SITS_OK && i > 0 && ms < least) least = ms;
  }
  if (exec != NULL) (void)cudaGraphExecDestroy(exec);
  if (from != NULL) (void)cudaEventDestroy(from);
  if (to != NULL) (void)cudaEventDestroy(to);
  *us = (double)least * 1000. / CALLS;
  return status;
}

static enum sits_status measure_size(struct backend_program *p, struct comm_measure *m)
{
  struct cuda_comm *c = p->comm;
  for (int32_t split = 1; split <= MOST_SPLIT && cuda_comm_takes(c, COMM_PUSH, m->n_tokens); split *= 2) {
    double us;
    if (!cuda_comm_splits(c, split, m->n_tokens)) break;
    TRY(time_trial(p, (struct trial){COMM_PUSH, split, false}, m->n_tokens, &us));
    if (m->split == 0 || us < m->us[COMM_PUSH]) m->us[COMM_PUSH] = us, m->split = split;
  }
  const int32_t split = cuda_comm_splits(c, 2, m->n_tokens) ? k_reduce_split(c->width, m->n_tokens, c->reduce.max_ctas) : 1;
  for (enum comm_way way = COMM_PUSH + 1; way < COMM_WAYS; way++)
    if (cuda_comm_takes(c, way, m->n_tokens)) TRY(time_trial(p, (struct trial){way, split, false}, m->n_tokens, &m->us[way]));
  if (c->nccl != NULL) TRY(time_trial(p, (struct trial){COMM_NCCL, split, true}, m->n_tokens, &m->nccl_alone_us));
  struct comm_measure all[K_MAX_RANKS];
  TRY(cuda_comm_exchange(c, m, sizeof *m, all, NULL));
  const double *us = all[0].us;
  m->split = all[0].split;
  m->best = c->is_linked ? COMM_NCCL : cuda_comm_takes(c, COMM_PUSH, m->n_tokens) ? COMM_PUSH : COMM_BULK;
  for (enum comm_way way = 0; way < COMM_WAYS; way++)
    if (way != COMM_S8 && us[way] > 0 && us[way] < us[m->best]) m->best = way; /* rounding is not a matter of speed */
  return SITS_OK;
}

enum sits_status cuda_comm_measure(struct backend_program *p, struct sits_error *err)
{
  static const char *const names[COMM_WAYS] = {"push", "bulk", "nccl", "s8"};
  struct cuda_comm *c = p->comm;
  for (int32_t n = 1; n <= c->max_tokens && (int64_t)n * c->width * 2 <= MAX_BYTES && c->n_measures < COMM_MAX_MEASURES; n *= 2) {
    struct comm_measure *m = &c->table[c->n_measures];
    m->n_tokens = n;
    const enum sits_status status = measure_size(p, m);
    if (status != SITS_OK) return sits_fail(err, SITS_DEVICE, "cuda: rank %d: the collectives fail", c->rank);
    c->n_measures++;
    if (c->rank == 0)
      log_info("cuda", "all-reduce bytes=%lld push_us=%.1f push_ctas=%d bulk_us=%.1f nccl_us=%.1f nccl_alone_us=%.1f s8_us=%.1f chosen=%s",
               (long long)n * c->width * 2, m->us[COMM_PUSH], m->split, m->us[COMM_BULK], m->us[COMM_NCCL],
               m->nccl_alone_us, m->us[COMM_S8], names[m->best]);
  }
  return SITS_OK;
}

int32_t cuda_comm_table(const struct backend_program *p, struct backend_collective *rows, int32_t max)
{
  const struct cuda_comm *c = p->comm;
  int32_t n = 0;
  for (; c != NULL && n < c->n_measures && n < max; n++) {
    const struct comm_measure *m = &c->table[n];
    rows[n] = (struct backend_collective){.n_bytes = (int64_t)m->n_tokens * c->width * 2, .push_us = m->us[COMM_PUSH],
                                          .bulk_us = m->us[COMM_BULK], .library_us = m->us[COMM_NCCL],
                                          .library_alone_us = m->nccl_alone_us, .compressed_us = m->us[COMM_S8],
                                          .chosen = (int32_t)m->best};
  }
  return n;
}
