/* Opening a rank's collectives and making them. Entry points: cuda_comm_open, cuda_comm_reduce, cuda_comm_gather, cuda_comm_check. */
#include "backend/cuda/cuda_comm.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"
#include "base/mem.h"

#define TRY(call)                                                                                                                        \
  do {                                                                                                                                   \
    const enum sits_status try_status = (call);                                                                                          \
    if (try_status != SITS_OK) return try_status;                                                                                        \
  } while (0)

/* What each rank tells the others of its memory. */
struct addresses { void *push, *bulk, *bulk_flag, *gather_flag, *logits; int32_t device, n_sm; };

static enum sits_status meet(struct cuda_comm *c, const void *mine, const void **all, struct sits_error *err)
{
  if (group_meet(c->group, c->rank, mine, all, true)) return SITS_OK;
  return sits_fail(err, SITS_DEVICE, "cuda: another rank has failed");
}

static bool make_memory(struct backend_program *p, struct addresses *mine)
{
  struct cuda_comm *c = p->comm;
  struct backend *b = p->backend;
  const int32_t n = c->n_ranks, rows = p->max_tokens, E = p->program->dims.n_embd;
  struct k_ranks_state *state = cuda_memory_alloc(b, p, sizeof *state);
  int32_t *words = cuda_pinned_alloc(b, p, 64);
  mine->push = cuda_memory_alloc(b, p, k_reduce_push_bytes(n, COMM_PUSH_ROWS, E));
  mine->bulk = cuda_memory_alloc(b, p, k_reduce_bulk_bytes(n, rows, E));
  mine->bulk_flag = cuda_memory_alloc(b, p, (size_t)2 * (size_t)n * (size_t)rows * sizeof(uint32_t));
  mine->gather_flag = cuda_memory_alloc(b, p, (size_t)n * K_GATHER_CTAS * sizeof(uint32_t));
  mine->logits = p->logits;
  mine->device = b->device;
  mine->n_sm = b->n_sm;
  c->half = cuda_memory_alloc(b, p, (size_t)cuda_lt_rows(rows) * (size_t)E * 2);
  c->local_logits = cuda_memory_alloc(b, p, (size_t)cuda_lt_rows(p->max_rows) * (size_t)p->head->rows * sizeof(float));
  if (state == NULL || words == NULL || mine->push == NULL || mine->bulk == NULL || mine->bulk_flag == NULL || mine->gather_flag == NULL ||
      c->half == NULL || c->local_logits == NULL)
    return false;
  words[0] = words[1] = 0;
  c->abort_word = words;
  c->lost_word = words + 1;
  const struct k_ranks ranks = {.rank = c->rank, .n_ranks = n, .state = state, .abort_word = words, .lost_word = words + 1,
                                .timeout_ns = (uint64_t)group_timeout_us(c->group) * 1000u};
  c->reduce = (struct k_reduce){.ranks = ranks, .h = p->h, .eps = p->program->dims.rms_eps, .width = E, .slabs = p->slabs,
                                .push_rows = COMM_PUSH_ROWS, .bulk_rows = rows};
  c->gather = (struct k_gather){.ranks = ranks, .x = c->local_logits, .n_cols = p->head->rows};
  return true;
}

static enum sits_status reach(struct cuda_comm *c, int32_t device, struct sits_error *err)
{
  int can = 0;
  if (device == c->backend->device) return SITS_OK;
  if (cudaDeviceCanAccessPeer(&can, c->backend->device, device) != cudaSuccess || !can)
    return sits_fail_param(err, SITS_UNSUPPORTED, "tensor-parallel-devices", "cuda: devices %d and %d cannot reach each other's memory",
                           c->backend->device, device);
  const cudaError_t e = cudaDeviceEnablePeerAccess(device, 0);
  if (e == cudaErrorPeerAccessAlreadyEnabled) (void)cudaGetLastError();
  else if (e != cudaSuccess)
    return sits_fail(err, SITS_DEVICE, "cuda: no access from device %d to %d: %s", c->backend->device, device, cudaGetErrorString(e));
  return SITS_OK;
}

/* Everybody's addresses, and whether they can be used. */
static enum sits_status connect(struct backend_program *p, const struct addresses *mine, struct sits_error *err)
{
  struct cuda_comm *c = p->comm;
  const struct addresses *all[K_MAX_RANKS];
  TRY(meet(c, mine, (const void **)all, err));
  for (int32_t r = 0; r < c->n_ranks; r++) {
    int32_t n_here = 0;
    for (int32_t k = 0; k < r; k++) n_here += all[r]->device == all[k]->device;
    c->is_shared = c->is_shared || n_here > 0;
    if (n_here > 1)
      return sits_fail_param(err, SITS_CONFIG, "tensor-parallel-devices", "cuda: device %d is named more than twice", all[r]->device);
    if (all[r]->n_sm != c->backend->n_sm)
      return sits_fail_param(err, SITS_UNSUPPORTED, "tensor-parallel-devices", "cuda: devices %d and %d are of different kinds",
                             c->backend->device, all[r]->device);
    TRY(reach(c, all[r]->device, err));
    c->reduce.push[r] = all[r]->push;
    c->reduce.bulk[r] = all[r]->bulk;
    c->reduce.bulk_flag[r] = all[r]->bulk_flag;
    c->gather.out[r] = all[r]->logits;
    c->gather.flag[r] = all[r]->gather_flag;
  }
  /* Waiting CTAs must be resident together and leave room: for the next kernel's, or on a shared device for the other rank's. */
  c->reduce.max_ctas = c->is_shared ? c->backend->n_sm / 4 : c->backend->n_sm;
  c->gather.max_ctas = c->is_shared ? c->backend->n_sm / 4 : c->backend->n_sm;
  return meet(c, NULL, NULL, err); /* until all have read: `mine` lies on the stack */
}

static enum sits_status open_nccl(struct cuda_comm *c, struct sits_error *err)
{
  struct nccl_id id = {{0}};
  const struct nccl_id *ids[K_MAX_RANKS];
  const bool is_there = !c->is_shared && nccl_load();
  if (!is_there) return SITS_OK; /* the same on all ranks: one process */
  const int made = c->rank == 0 ? nccl_unique_id(&id) : 0;
  TRY(meet(c, &id, (const void **)ids, err));
  int status = made ? made : nccl_comm_init(&c->nccl, c->n_ranks, ids[0], c->rank);
  const bool has_comm = status == 0;
  /* Twice outside of any graph: the first calls make the library's connections. */
  for (int32_t i = 0; i < 2 && status == 0; i++)
    status = nccl_all_reduce_f16(c->half, (size_t)c->width, c->nccl, (struct CUstream_st *)c->backend->stream);
  TRY(CUDA_CALL(c->backend, cudaStreamSynchronize(c->backend->stream)));
  if (status != 0) log_warn("cuda", "NCCL cannot be used: %s", nccl_error(status));
  const bool mine = status == 0;
  const bool *all[K_MAX_RANKS];
  bool has_all = true;
  TRY(meet(c, &mine, (const void **)all, err));
  for (int32_t r = 0; r < c->n_ranks; r++) has_all = has_all && *all[r];
  TRY(meet(c, NULL, NULL, err));
  if (!has_all) {
    if (has_comm) nccl_comm_abort(c->nccl);
    c->nccl = NULL;
  }
  return SITS_OK;
}

enum sits_status cuda_comm_open(struct backend_program *p, struct sits_error *err)
{
  struct backend *b = p->backend;
  const int32_t n_ranks = program_n_ranks(p->program);
  if ((b->options.group == NULL) != (n_ranks == 1))
    return sits_fail(err, SITS_INVALID_ARGUMENT, "cuda: a program for %d ranks on a device that is %s", n_ranks,
                     b->options.group == NULL ? "alone" : "one of several");
  if (n_ranks == 1) return SITS_OK;
  struct cuda_comm *c = mem_calloc(1, sizeof *c);
  if (c == NULL) return sits_fail(err, SITS_NOMEM, "cuda: out of memory");
  p->comm = c;
  *c = (struct cuda_comm){.backend = b, .group = b->options.group, .rank = p->program->dims.rank, .n_ranks = n_ranks,
                          .max_tokens = p->max_tokens, .width = p->program->dims.n_embd};
  struct addresses mine = {0};
  if (sits_k_reduce_init() != 0) return sits_fail(err, SITS_DEVICE, "cuda: the collectives' kernels cannot be set up");
  if (!make_memory(p, &mine))
    return sits_fail(err, SITS_NOMEM, "cuda: receive memory for %d tokens does not fit the device", p->max_tokens);
  TRY(CUDA_CALL(b, cudaStreamSynchronize(b->stream))); /* cleared before a peer writes */
  TRY(connect(p, &mine, err));
  group_watch(c->group, c->rank, c->abort_word);
  TRY(open_nccl(c, err));
  return cuda_comm_measure(p, err);
}

void cuda_comm_close(struct backend_program *p)
{
  struct cuda_comm *c = p->comm;
  if (c == NULL) return;
  group_watch(c->group, c->rank, NULL);
  if (c->nccl != NULL) {
    if (c->backend->is_failed || group_is_aborted(c->group)) nccl_comm_abort(c->nccl);
    else nccl_comm_destroy(c->nccl);
  }
  mem_free(c);
  p->comm = NULL;
}

bool cuda_comm_takes(const struct cuda_comm *c, enum comm_way way, int32_t n_tokens)
{
  return way == COMM_PUSH ? n_tokens <= COMM_PUSH_ROWS : way == COMM_BULK ? n_tokens <= c->max_tokens : c->nccl != NULL;
}

enum sits_status cuda_comm_reduce_by(struct backend_program *p, enum comm_way way, int32_t n_tokens, int32_t n_slabs, const float *gain,
                                     const struct k_act *out, struct k_stream at)
{
  struct cuda_comm *c = p->comm;
  struct k_reduce a = c->reduce;
  a.protocol = way == COMM_PUSH ? K_REDUCE_PUSH : way == COMM_BULK ? K_REDUCE_BULK : K_REDUCE_NONE;
  a.n_tokens = n_tokens;
  a.n_slabs = n_slabs;
  a.slab_stride = (int64_t)n_tokens * c->width;
  if (n_slabs == COMM_HALF) a.own_half = c->half;
  if (way == COMM_BULK && !c->is_shared) a.max_ctas *= 2; /* two fit an SM: one sends while the other waits */
  a.gain = gain;
  if (out != NULL) a.out = *out;
  if (way == COMM_NCCL) {
    if (n_slabs != COMM_HALF) TRY(CUDA_CALL(p->backend, sits_k_reduce_share(&a, c->half, at)));
    a.own_half = c->half;
    const int status = nccl_all_reduce_f16(c->half, (size_t)n_tokens * (size_t)c->width, c->nccl, at.stream);
    if (status != 0) {
      log_error("cuda", "NCCL: %s", nccl_error(status));
      return CUDA_CALL(p->backend, cudaErrorLaunchFailure);
    }
  }
  return CUDA_CALL(p->backend, sits_k_reduce(&a, at));
}

enum sits_status cuda_comm_reduce(struct backend_program *p, int32_t n_tokens, int32_t n_slabs, const float *gain, const struct k_act *out,
                                  struct k_stream at)
{
  const struct cuda_comm *c = p->comm;
  enum comm_way way = n_tokens <= COMM_PUSH_ROWS ? COMM_PUSH : COMM_BULK;
  for (int32_t i = 0; i < c->n_measures && c->table[i].n_tokens <= n_tokens; i++)
    if (cuda_comm_takes(c, c->table[i].best, n_tokens)) way = c->table[i].best;
  return cuda_comm_reduce_by(p, way, n_tokens, n_slabs, gain, out, at);
}

enum sits_status cuda_comm_gather(struct backend_program *p, int32_t n_rows, struct k_stream at)
{
  struct k_gather a = p->comm->gather;
  a.n_rows = n_rows;
  return CUDA_CALL(p->backend, sits_k_gather_columns(&a, at));
}

enum sits_status cuda_comm_check(struct backend_program *p)
{
  if (p->comm == NULL || *p->comm->lost_word == 0) return SITS_OK;
  if (!p->backend->is_failed) log_error("cuda", "rank %d: another rank did not come to a collective in time", p->comm->rank);
  p->backend->is_failed = true;
  return SITS_DEVICE;
}

enum sits_status cuda_comm_stall_if_due(struct backend_program *p)
{
  struct cuda_comm *c = p->comm;
  const char *text = getenv("SITS_CUDA_STALL");
  int rank;
  long long step;
  if (c == NULL || ++c->n_steps < 1 || text == NULL || sscanf(text, "%d:%lld", &rank, &step) != 2 || rank != c->rank || step != c->n_steps)
    return SITS_OK;
  return CUDA_CALL(p->backend, sits_k_stall((const int32_t *)c->abort_word, 60000000000ll,
                                            (struct k_stream){(struct CUstream_st *)p->backend->stream, false}));
}
