/* Opening a rank's collectives and making them. Entry points: cuda_comm_open, cuda_comm_reduce, cuda_comm_gather, cuda_comm_check. */
#include "backend/cuda/cuda_comm.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"
#include "base/mem.h"

/* What each rank tells the others of its memory. */
struct addresses { void *push, *bulk, *bulk_flag, *gather_flag, *logits; int32_t device, n_sm; };

enum sits_status cuda_comm_exchange(struct cuda_comm *c, const void *mine, size_t n_bytes, void *all, struct sits_error *err)
{
  if (group_exchange(c->group, c->rank, mine, n_bytes, all, true)) return SITS_OK;
  return sits_fail(err, SITS_DEVICE, "cuda: another rank has failed");
}

static bool make_memory(struct backend_program *p, struct addresses *mine)
{
  struct cuda_comm *c = p->comm;
  struct backend *b = p->backend;
  const int32_t n = c->n_ranks, rows = p->max_tokens, E = p->program->dims.n_embd;
  const size_t logits = (size_t)cuda_lt_rows(p->max_rows) * (size_t)p->head->rows * sizeof(float);
  struct k_ranks_state *state = cuda_memory_alloc(b, p, sizeof *state);
  int32_t *words = cuda_pinned_alloc(b, p, 64);
  c->half = cuda_memory_alloc(b, p, (size_t)cuda_lt_rows(rows) * (size_t)E * 2);
  c->local_logits = cuda_memory_alloc(b, p, logits);
  if (state == NULL || words == NULL || c->half == NULL || c->local_logits == NULL) return false;
  if (c->is_linked) {
    if ((c->gathered = cuda_memory_alloc(b, p, logits * (size_t)n)) == NULL) return false;
  } else {
    mine->push = cuda_memory_alloc(b, p, k_reduce_push_bytes(n, COMM_PUSH_ROWS, E));
    mine->bulk = cuda_memory_alloc(b, p, k_reduce_bulk_bytes(n, rows, E));
    mine->bulk_flag = cuda_memory_alloc(b, p, k_reduce_flag_bytes(n, rows));
    mine->gather_flag = cuda_memory_alloc(b, p, (size_t)n * K_GATHER_CTAS * sizeof(uint32_t));
    if (mine->push == NULL || mine->bulk == NULL || mine->bulk_flag == NULL || mine->gather_flag == NULL) return false;
  }
  mine->logits = p->logits;
  mine->device = b->device;
  mine->n_sm = b->n_sm;
  words[0] = words[1] = 0;
  c->abort_word = words;
  c->lost_word = words + 1;
  const struct k_ranks ranks = {.rank = c->rank, .n_ranks = n, .state = state, .abort_word = words, .lost_word = words + 1,
                                .timeout_ns = (uint64_t)group_timeout_us(c->group) * 1000u};
  c->reduce = (struct k_reduce){.ranks = ranks, .h = p->h, .eps = p->program->dims.rms_eps, .width = E, .slabs = p->slabs,
                                .push_rows = COMM_PUSH_ROWS, .bulk_rows = rows, .max_ctas = b->n_sm};
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
  struct addresses all[K_MAX_RANKS];
  TRY(cuda_comm_exchange(c, mine, sizeof *mine, all, err));
  for (int32_t r = 0; r < c->n_ranks; r++) {
    int32_t n_here = 0;
    if (all[r].n_sm != c->backend->n_sm)
      return sits_fail_param(err, SITS_UNSUPPORTED, "tensor-parallel-devices",
                             "cuda: the devices of ranks %d and %d are of different kinds", c->rank, r);
    if (c->is_linked) continue;
    for (int32_t k = 0; k < r; k++) n_here += all[r].device == all[k].device;
    c->is_shared = c->is_shared || n_here > 0;
    if (n_here > 1)
      return sits_fail_param(err, SITS_CONFIG, "tensor-parallel-devices", "cuda: device %d is named more than twice", all[r].device);
    TRY(reach(c, all[r].device, err));
    c->reduce.push[r] = all[r].push;
    c->reduce.bulk[r] = all[r].bulk;
    c->reduce.bulk_flag[r] = all[r].bulk_flag;
    c->gather.out[r] = all[r].logits;
    c->gather.flag[r] = all[r].gather_flag;
  }
  /* Waiting CTAs must be resident together and leave room: for the next kernel's, or on a shared device for the other rank's. */
  c->reduce.max_ctas = c->is_shared ? c->backend->n_sm / 4 : c->backend->n_sm;
  c->gather.max_ctas = c->reduce.max_ctas;
  return SITS_OK;
}

static void *abort_thread(void *arg)
{
  nccl_comm_abort(arg);
  return NULL;
}

/* Whoever finds a rank lost ends what NCCL waits for. Kernels end at once, but the library's call returns only when the graphs that hold
 * its kernels are gone, so that it has a thread of its own. */
static void abort_nccl(void *user)
{
  struct cuda_comm *c = user;
  struct nccl_comm *nccl = atomic_exchange(&c->nccl, NULL);
  if (nccl == NULL) return;
  *c->lost_word = 1;
  c->has_aborter = pthread_create(&c->aborter, NULL, abort_thread, nccl) == 0;
  if (!c->has_aborter) log_error("cuda", "no thread to abort NCCL: its kernels wait for ever");
}

/* Twice outside of any graph: the first calls make the library's connections. The communicator is taken from where an abort takes it. */
static int warm_nccl(struct cuda_comm *c)
{
  struct CUstream_st *stream = (struct CUstream_st *)c->backend->stream;
  int status = 0;
  for (int32_t i = 0; i < 4 && status == 0; i++) {
    struct nccl_comm *nccl = atomic_load(&c->nccl);
    if (nccl == NULL) return 0; /* the group was aborted; the next meeting says so */
    if (i < 2) status = nccl_all_reduce_f16(c->half, (size_t)c->width, nccl, stream);
    else if (c->is_linked) status = nccl_all_gather_f32(c->local_logits, c->gathered, (size_t)c->gather.n_cols, nccl, stream);
  }
  return status;
}

/* From init on whoever aborts the group ends NCCL, too: a rank that is lost later keeps nobody. */
static enum sits_status open_nccl(struct cuda_comm *c, struct sits_error *err)
{
  struct { struct nccl_id id; int status; } own = {0}, ids[K_MAX_RANKS];
  struct nccl_comm *comm = NULL;
  bool all[K_MAX_RANKS];
  const bool is_here = nccl_load();
  if (c->is_shared || (!is_here && !c->is_linked)) return SITS_OK; /* the same on all ranks: one process */
  TRY(cuda_comm_exchange(c, &is_here, sizeof is_here, all, err));
  for (int32_t r = 0; r < c->n_ranks; r++)
    if (!all[r]) return sits_fail(err, SITS_UNSUPPORTED, "cuda: rank %d has no libnccl.so.2, by which processes reach each other", r);
  if (c->rank == 0) own.status = nccl_unique_id(&own.id);
  TRY(cuda_comm_exchange(c, &own, sizeof own, ids, err));
  int status = ids[0].status; /* without an id nobody may wait for the others in init */
  if (status == 0) status = nccl_comm_init(&comm, c->n_ranks, &ids[0].id, c->rank);
  atomic_store(&c->nccl, comm);
  group_on_abort(c->group, c->rank, abort_nccl, c);
  if (status == 0) status = warm_nccl(c);
  TRY(CUDA_CALL(c->backend, cudaStreamSynchronize(c->backend->stream)));
  if (status != 0) log_warn("cuda", "NCCL cannot be used: %s", nccl_error(status));
  const bool mine = status == 0;
  bool has_all = true;
  TRY(cuda_comm_exchange(c, &mine, sizeof mine, all, err));
  for (int32_t r = 0; r < c->n_ranks; r++) has_all = has_all && all[r];
  if (has_all) return SITS_OK;
  group_on_abort(c->group, c->rank, NULL, NULL);
  comm = atomic_exchange(&c->nccl, NULL);
  if (comm != NULL) nccl_comm_abort(comm);
  return c->is_linked ? sits_fail(err, SITS_UNAVAILABLE, "cuda: NCCL does not connect the ranks") : SITS_OK;
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
                          .max_tokens = p->max_tokens, .width = p->program->dims.n_embd, .compresses = b->options.compress_reduce,
                          .is_linked = group_is_linked(b->options.group)};
  if (c->is_linked && c->compresses)
    return sits_fail_param(err, SITS_UNSUPPORTED, "tensor-parallel-compress", "tensor-parallel-compress needs all ranks in one process");
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
  group_on_abort(c->group, c->rank, NULL, NULL);
  if (c->has_aborter) pthread_join(c->aborter, NULL); /* the graphs are gone */
  struct nccl_comm *nccl = atomic_exchange(&c->nccl, NULL);
  if (nccl != NULL) {
    if (c->backend->is_failed || group_is_aborted(c->group)) nccl_comm_abort(nccl);
    else nccl_comm_destroy(nccl);
  }
  mem_free(c);
  p->comm = NULL;
}

bool cuda_comm_takes(const struct cuda_comm *c, enum comm_way way, int32_t n_tokens)
{
  switch (way) {
  case COMM_PUSH: return !c->is_linked && n_tokens <= COMM_PUSH_ROWS;
  case COMM_BULK: return !c->is_linked && n_tokens <= c->max_tokens;
  case COMM_NCCL: return c->nccl != NULL;
  case COMM_S8: return c->compresses && n_tokens > BACKEND_COMPRESS_TOKENS;
  case COMM_WAYS: break;
  }
  return false;
}

bool cuda_comm_splits(const struct cuda_comm *c, int32_t split, int32_t n_tokens)
{
  return split == 1 || (c->backend->compute_major == 9 && n_tokens * split <= c->reduce.max_ctas);
}

static enum sits_status check_nccl(struct backend_program *p, int status)
{
  if (status == 0) return SITS_OK;
  log_error("cuda", "NCCL: %s", nccl_error(status));
  return CUDA_CALL(p->backend, cudaErrorLaunchFailure);
}

enum sits_status cuda_comm_reduce_by(struct backend_program *p, enum comm_way way, int32_t split, int32_t n_tokens, int32_t n_slabs,
                                     const float *gain, const struct k_act *out, struct k_stream at)
{
  struct cuda_comm *c = p->comm;
  static const enum k_reduce_protocol protocols[COMM_WAYS] = {K_REDUCE_PUSH, K_REDUCE_BULK, K_REDUCE_NONE, K_REDUCE_BULK_S8};
  const bool is_grid = out != NULL && (out->round != K_ROUND_NONE || out->rotation > 0); /* the norm kernel knows these forms */
  struct k_reduce a = c->reduce;
  a.protocol = protocols[way];
  a.n_tokens = n_tokens;
  a.n_slabs = n_slabs == COMM_EMBED ? 1 : n_slabs;
  a.is_first = n_slabs == COMM_EMBED;
  a.slab_stride = (int64_t)n_tokens * c->width;
  if (n_slabs == COMM_HALF) a.own_half = c->half;
  a.split = split;
  if (way == COMM_BULK || way == COMM_S8) {
    a.split = p->backend->compute_major == 9 ? k_reduce_bulk_split(c->width) : 1;
    if (!c->is_shared) a.max_ctas *= k_reduce_bulk_per_sm(c->width, a.split, a.protocol);
  }
  a.gain = gain;
  if (out != NULL && !is_grid) a.out = *out;
  if (way == COMM_NCCL) {
    if (n_slabs != COMM_HALF) TRY(CUDA_CALL(p->backend, sits_k_reduce_share(&a, c->half, at)));
    a.own_half = c->half;
    struct nccl_comm *nccl = c->nccl;
    if (nccl == NULL) return SITS_DEVICE; /* the group was aborted */
    TRY(check_nccl(p, nccl_all_reduce_f16(c->half, (size_t)n_tokens * (size_t)c->width, nccl, at.stream)));
  }
  TRY(CUDA_CALL(p->backend, sits_k_reduce(&a, at)));
  if (!is_grid) return SITS_OK;
  const struct k_norm norm = {.h = p->h, .gain = gain, .eps = a.eps, .n_rows = n_tokens, .width = c->width, .out = *out};
  return CUDA_CALL(p->backend, sits_k_norm(&norm, at));
}

enum sits_status cuda_comm_reduce(struct backend_program *p, int32_t n_tokens, int32_t n_slabs, const float *gain, const struct k_act *out,
                                  struct k_stream at)
{
  const struct cuda_comm *c = p->comm;
  enum comm_way way = c->is_linked ? COMM_NCCL : n_tokens <= COMM_PUSH_ROWS ? COMM_PUSH : COMM_BULK;
  int32_t split = p->backend->compute_major == 9 ? k_reduce_split(c->width, n_tokens, c->reduce.max_ctas) : 1;
  for (int32_t i = 0; i < c->n_measures && c->table[i].n_tokens <= n_tokens; i++) {
    if (cuda_comm_takes(c, c->table[i].best, n_tokens)) way = c->table[i].best;
    if (c->table[i].split > 0 && cuda_comm_splits(c, c->table[i].split, n_tokens)) split = c->table[i].split;
  }
  if (n_slabs != COMM_EMBED && cuda_comm_takes(c, COMM_S8, n_tokens)) way = COMM_S8;
  return cuda_comm_reduce_by(p, way, split, n_tokens, n_slabs, gain, out, at);
}

/* Ranks in other processes: their parts one after the other, then side by side. */
static enum sits_status gather_linked(struct backend_program *p, int32_t n_rows, struct k_stream at)
{
  struct cuda_comm *c = p->comm;
  struct nccl_comm *nccl = c->nccl;
  const size_t cols = (size_t)c->gather.n_cols, part = cols * (size_t)n_rows, row = cols * sizeof(float);
  if (nccl == NULL) return SITS_DEVICE;
  TRY(check_nccl(p, nccl_all_gather_f32(c->local_logits, c->gathered, part, nccl, at.stream)));
  for (int32_t r = 0; r < c->n_ranks; r++)
    TRY(CUDA_CALL(p->backend, cudaMemcpy2DAsync(p->logits + (size_t)r * cols, row * (size_t)c->n_ranks, c->gathered + (size_t)r * part, row,
                                                row, (size_t)n_rows, cudaMemcpyDeviceToDevice, (cudaStream_t)at.stream)));
  return SITS_OK;
}

enum sits_status cuda_comm_gather(struct backend_program *p, int32_t n_rows, struct k_stream at)
{
  if (p->comm->is_linked) return gather_linked(p, n_rows, at);
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
