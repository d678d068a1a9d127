/* The leader of a model cut over processes, and its followers. See nodes.h. Entry points: backend_nodes, nodes_follow.
 *
 * A call on the leader: message to all followers, the same call on the own inner device, replies collected. A step is one message; the
 * replies are read by wait. Results are rank 0's. Pages lie side by side in rank order, as in ranks.c: what is swapped out travels.
 */
#include "backend/nodes.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "backend/nodes_step.h"
#include "backend/program.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"

/* Bounds for processes that live and hang; one that is gone ends any wait. LOAD_US: opening, a program's weights, pages. */
enum { DEFAULT_TIMEOUT_MS = 5000 };
#define STEP_US 120000000ll
#define LOAD_US 3600000000ll

/* The leader's; a program and a page memory of it are only names for it, as in ranks.c. */
struct backend {
  const struct backend_vtable *inner;
  struct nodes *nodes;
  struct backend *own;
  struct backend_program *program;
  struct backend_kv *kv;
  int32_t n_ranks, max_tokens, max_seqs, max_columns;
  uint64_t page_bytes, follower_bytes; /* of a rank's page; of the followers' programs */
  void *step;                        /* a batch as bytes */
  bool is_failed, is_stepping;
};

static struct backend *set_of_program(const struct backend_program *p) { return (struct backend *)(uintptr_t)p; }
static struct backend *set_of_kv(const struct backend_kv *kv) { return (struct backend *)(uintptr_t)kv; }

/* What all ranks' programs have in common: kinds, fusions, names and types of weights, values of gains. */
static uint64_t fingerprint_of(const struct program *p)
{
  const int32_t dims[] = {p->dims.n_layers, p->dims.n_embd, p->dims.n_ff, p->dims.n_vocab, p->dims.n_heads, p->dims.n_kv_heads,
                          p->dims.head_dim, p->dims.max_context, p->dims.n_ranks, p->n_ops};
  uint64_t h = hash_bytes(1, dims, sizeof dims);
  for (int32_t i = 0; i < p->n_ops; i++) {
    const struct program_op *op = &p->ops[i];
    const uint32_t words[] = {(uint32_t)op->kind, op->fused, (uint32_t)op->layer, (uint32_t)op->n_parts};
    h = hash_bytes(h, words, sizeof words);
    for (int32_t k = 0; k < op->n_parts; k++) {
      const struct sits_utd *w = op->parts[k].weight;
      h = hash_mix(hash_bytes(h, w->name, strlen(w->name)), (uint64_t)w->dtype);
    }
    if (op->gain != NULL && op->gain->data != NULL) h = hash_bytes(h, op->gain->data, op->gain->n_bytes);
  }
  return h;
}

/* ---- the leader: messages and replies ---- */

static bool tell(struct backend *b, enum node_message kind, const void *head, size_t head_bytes, const void *body, size_t body_bytes)
{
  for (int32_t r = 1; r < b->n_ranks; r++)
    if (!nodes_send(b->nodes, r, kind, head, head_bytes, body, body_bytes)) return false;
  return true;
}

static enum sits_status lost(struct backend *b, struct sits_error *err)
{
  b->is_failed = true;
  nodes_lose(b->nodes, "its reply does not fit");
  return sits_fail(err, SITS_DEVICE, "a process of the model is lost");
}

/* A reply of rank r with n_bytes of what was asked for. */
static enum sits_status hear(struct backend *b, int32_t r, int64_t timeout_us, void *out, size_t n_bytes, struct sits_error *err)
{
  struct node_reply reply = b->nodes->early[r];
  enum node_message kind;
  size_t size;
  if (b->nodes->has_early[r]) {
    b->nodes->has_early[r] = false;
    if (reply.status == SITS_OK) return lost(b, err); /* done, it says, where the others still exchange */
  } else if (!nodes_next(b->nodes, r, timeout_us, &kind, &size) || kind != NODE_REPLY || size < sizeof reply ||
             !nodes_read(b->nodes, r, &reply, sizeof reply) ||
             size - sizeof reply != (reply.status == SITS_OK ? n_bytes : 0) ||
             !nodes_read(b->nodes, r, out, size - sizeof reply)) {
    return lost(b, err);
  }
  if (reply.status == SITS_OK) return SITS_OK;
  if (reply.status < 0 || reply.status >= SITS_STATUS_COUNT) reply.status = SITS_INTERNAL;
  reply.text[sizeof reply.text - 1] = '\0';
  return sits_fail(err, (enum sits_status)reply.status, "rank %d: %.200s", (int)r, reply.text);
}

/* All replies; the first failure, the own one before the others'. */
static enum sits_status hear_all(struct backend *b, enum sits_status own, int64_t timeout_us, struct sits_error *err)
{
  enum sits_status status = own;
  for (int32_t r = 1; r < b->n_ranks && !b->is_failed; r++) {
    struct sits_error their = {0};
    const enum sits_status s = hear(b, r, timeout_us, NULL, 0, &their);
    if (s == SITS_OK || (status != SITS_OK && status != SITS_DEVICE)) continue;
    if (status == SITS_DEVICE && s == SITS_DEVICE) continue;
    status = s;
    if (err != NULL) *err = their;
  }
  if (status == SITS_DEVICE) b->is_failed = true;
  return status;
}

/* ---- open and close ---- */

static void nodes_close(struct backend *b)
{
  if (b == NULL) return;
  if (b->nodes != NULL) {
    atomic_store(&b->nodes->is_closing, true);
    if (!b->is_failed && !atomic_load(&b->nodes->is_lost) && tell(b, NODE_CLOSE, NULL, 0, NULL, 0))
      (void)hear_all(b, SITS_OK, STEP_US, NULL);
  }
  if (b->own != NULL) b->inner->close(b->own);
  nodes_disconnect(b->nodes);
  mem_free(b->step);
  mem_free(b);
}

static enum sits_status open_all(struct backend *b, const struct backend_options *options, struct sits_error *err)
{
  struct backend_options own = *options;
  own.rank = 0;
  if (own.collective_timeout_ms <= 0) own.collective_timeout_ms = DEFAULT_TIMEOUT_MS;
  enum sits_status status = nodes_connect(options->nodes, &b->nodes, err);
  if (status == SITS_OK) status = nodes_start(b->nodes, own.collective_timeout_ms, err);
  if (status != SITS_OK) return status;
  own.group = b->nodes->group;
  const struct node_config config = {own.max_batch_tokens, own.max_seqs, own.collective_timeout_ms, own.compress_reduce};
  if (!tell(b, NODE_OPEN, &config, sizeof config, NULL, 0)) return lost(b, err);
  status = b->inner->open(&own, &b->own, err);
  return hear_all(b, status, LOAD_US, err);
}

static enum sits_status nodes_open(const struct backend_vtable *inner, const struct backend_options *options, struct backend **out,
                                   struct sits_error *err)
{
  if (options->nodes == NULL || options->nodes->rank != 0 || options->n_ranks != options->nodes->n_ranks)
    return sits_fail(err, SITS_INVALID_ARGUMENT, "nodes: only rank 0 leads, and each process has one rank");
  struct backend *b = mem_calloc(1, sizeof *b);
  if (b == NULL) return sits_fail(err, SITS_NOMEM, "nodes: out of memory");
  b->inner = inner;
  b->n_ranks = options->n_ranks;
  b->max_tokens = options->max_batch_tokens;
  b->max_seqs = options->max_seqs;
  const enum sits_status status = open_all(b, options, err);
  if (status != SITS_OK) {
    nodes_close(b);
    return status;
  }
  *out = b;
  return SITS_OK;
}

/* As much memory as the tightest rank has, times their number. */
static void nodes_info(const struct backend *set, struct backend_info *out)
{
  struct backend *b = (struct backend *)(uintptr_t)set; /* asking is a message, too */
  struct backend_info own, info;
  b->inner->info(b->own, &own);
  if (!b->is_failed && !tell(b, NODE_INFO, NULL, 0, NULL, 0)) (void)lost(b, NULL);
  *out = own;
  for (int32_t r = 1; r < b->n_ranks && !b->is_failed; r++)
    if (hear(b, r, STEP_US, &info, sizeof info, NULL) == SITS_OK && info.memory_free_bytes < out->memory_free_bytes) *out = info;
  snprintf(out->name, sizeof out->name, "%d processes x %.40s", (int)b->n_ranks, own.name);
  out->memory_free_bytes *= (uint64_t)b->n_ranks;
  out->memory_total_bytes *= (uint64_t)b->n_ranks;
}

/* ---- programs and pages ---- */

static enum sits_status nodes_compile(struct backend *b, const struct program *program, struct backend_program **out,
                                      struct sits_error *err)
{
  const uint64_t fingerprint = fingerprint_of(program);
  if (program->dims.rank != 0 || program_n_ranks(program) != b->n_ranks)
    return sits_fail(err, SITS_INVALID_ARGUMENT, "nodes: a program for rank %d of %d", (int)program->dims.rank,
                     (int)program_n_ranks(program));
  if (b->program != NULL) return sits_fail(err, SITS_UNSUPPORTED, "nodes: one program at a time");
  if (b->is_failed) return sits_fail(err, SITS_DEVICE, "nodes: a process is lost");
  b->max_columns = (program->dims.max_context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS + 1;
  const size_t n_bytes = node_step_bytes(b->max_tokens, b->max_seqs, b->max_columns);
  mem_free(b->step);
  b->step = n_bytes > 0 ? mem_alloc(n_bytes) : NULL;
  if (b->step == NULL) return sits_fail(err, SITS_NOMEM, "nodes: no memory for a batch of %zu bytes", n_bytes);
  if (!tell(b, NODE_COMPILE, &fingerprint, sizeof fingerprint, NULL, 0)) return lost(b, err);
  b->follower_bytes = 0;
  enum sits_status status = b->inner->compile(b->own, program, &b->program, err);
  for (int32_t r = 1; r < b->n_ranks && !b->is_failed; r++) {
    uint64_t bytes = 0;
    struct sits_error their = {0};
    const enum sits_status s = hear(b, r, LOAD_US, &bytes, sizeof bytes, &their);
    b->follower_bytes += bytes;
    if (s == SITS_OK || (status != SITS_OK && status != SITS_DEVICE)) continue;
    if (status == SITS_OK || s != SITS_DEVICE) {
      status = s;
      if (err != NULL) *err = their;
    }
  }
  if (status == SITS_OK && !b->is_failed) {
    *out = (struct backend_program *)b;
    return SITS_OK;
  }
  if (b->program != NULL) b->inner->program_destroy(b->program);
  b->program = NULL;
  b->is_failed = true; /* the followers have ended, or are about to */
  return status != SITS_OK ? status : SITS_DEVICE;
}

static void nodes_program_destroy(struct backend_program *program)
{
  struct backend *b = set_of_program(program);
  if (b == NULL) return;
  const bool is_told = !b->is_failed && tell(b, NODE_DESTROY_PROGRAM, NULL, 0, NULL, 0);
  if (b->program != NULL) b->inner->program_destroy(b->program);
  b->program = NULL;
  if (is_told) (void)hear_all(b, SITS_OK, STEP_US, NULL);
}

static uint64_t nodes_program_bytes(const struct backend_program *program)
{
  const struct backend *b = set_of_program(program);
  return b->inner->program_bytes(b->program) + b->follower_bytes;
}

static uint64_t page_bytes_of(const struct backend_vtable *inner, const struct kv_geometry *geometry)
{
  const struct kv_geometry share = kv_geometry_of_rank(geometry);
  if (geometry->codec == KV_FP4_SPARSE) return 0; /* a block would have to move from one process's heads to another's */
  return inner->kv_page_bytes(&share) * (uint64_t)(geometry->n_ranks > 1 ? geometry->n_ranks : 1);
}

static void nodes_kv_beside(const struct backend_program *program, const struct kv_geometry *geometry, struct kv_beside *out)
{
  const struct backend *b = set_of_program(program);
  kv_beside_of_ranks(b->inner, &b->program, 1, geometry, out);
}

static enum sits_status nodes_kv_create(struct backend *b, const struct kv_geometry *geometry, struct backend_kv **out,
                                        struct sits_error *err)
{
  const struct kv_geometry share = kv_geometry_of_rank(geometry);
  if (geometry->n_ranks != b->n_ranks || b->kv != NULL)
    return sits_fail(err, SITS_INVALID_ARGUMENT, "nodes: one page memory, for %d ranks", (int)b->n_ranks);
  if (b->is_failed || !tell(b, NODE_CREATE_KV, geometry, sizeof *geometry, NULL, 0)) return lost(b, err);
  const enum sits_status own = b->inner->kv_create(b->own, &share, &b->kv, err), status = hear_all(b, own, LOAD_US, err);
  b->page_bytes = b->inner->kv_page_bytes(&share);
  if (status == SITS_OK) {
    *out = (struct backend_kv *)b;
    return SITS_OK;
  }
  if (own == SITS_OK) b->inner->kv_destroy(b->kv);
  b->kv = NULL;
  if (!b->is_failed && tell(b, NODE_DESTROY_KV, NULL, 0, NULL, 0)) (void)hear_all(b, SITS_OK, STEP_US, NULL);
  return status;
}

static void nodes_kv_destroy(struct backend_kv *kv)
{
  struct backend *b = set_of_kv(kv);
  if (b == NULL) return;
  const bool is_told = !b->is_failed && tell(b, NODE_DESTROY_KV, NULL, 0, NULL, 0);
  if (b->kv != NULL) b->inner->kv_destroy(b->kv);
  b->kv = NULL;
  if (is_told) (void)hear_all(b, SITS_OK, STEP_US, NULL);
}

static enum sits_status nodes_copy_pages(struct backend_kv *kv, const struct kv_copy *copies, int32_t n)
{
  struct backend *b = set_of_kv(kv);
  if (n == 0) return SITS_OK;
  if (b->is_failed || !tell(b, NODE_COPY_PAGES, copies, (size_t)n * sizeof *copies, NULL, 0)) return lost(b, NULL);
  return hear_all(b, b->inner->kv_copy_pages(b->kv, copies, n), STEP_US, NULL);
}

static enum sits_status nodes_read_page(struct backend_kv *kv, int32_t page, void *host)
{
  struct backend *b = set_of_kv(kv);
  if (b->is_failed || !tell(b, NODE_READ_PAGE, &page, sizeof page, NULL, 0)) return lost(b, NULL);
  enum sits_status status = b->inner->kv_read_page(b->kv, page, host);
  for (int32_t r = 1; r < b->n_ranks && !b->is_failed; r++) {
    const enum sits_status s = hear(b, r, STEP_US, (uint8_t *)host + (size_t)r * b->page_bytes, (size_t)b->page_bytes, NULL);
    if (status == SITS_OK) status = s;
  }
  return status;
}

static enum sits_status nodes_write_page(struct backend_kv *kv, int32_t page, const void *host)
{
  struct backend *b = set_of_kv(kv);
  for (int32_t r = 1; r < b->n_ranks; r++)
    if (b->is_failed || !nodes_send(b->nodes, r, NODE_WRITE_PAGE, &page, sizeof page,
                                    (const uint8_t *)host + (size_t)r * b->page_bytes, (size_t)b->page_bytes))
      return lost(b, NULL);
  return hear_all(b, b->inner->kv_write_page(b->kv, page, host), STEP_US, NULL);
}

/* ---- steps ---- */

static enum sits_status nodes_submit(struct backend_program *program, struct backend_kv *kv, const struct backend_batch *batch)
{
  struct backend *b = set_of_program(program);
  struct node_step head;
  size_t n_bytes;
  (void)kv;
  if (b->is_failed) return SITS_DEVICE;
  if (b->is_stepping || !node_step_write(batch, b->max_tokens, b->max_seqs, b->max_columns, &head, b->step, &n_bytes))
    return SITS_INVALID_ARGUMENT;
  if (!tell(b, NODE_STEP, &head, sizeof head, b->step, n_bytes)) return lost(b, NULL);
  const enum sits_status status = b->inner->submit(b->program, b->kv, batch);
  if (status == SITS_OK) b->is_stepping = true;
  return status == SITS_OK ? SITS_OK : hear_all(b, status, STEP_US, NULL);
}

static enum sits_status nodes_wait(struct backend_program *program, struct backend_result *result)
{
  struct backend *b = set_of_program(program);
  if (b->is_failed) return SITS_DEVICE;
  if (!b->is_stepping) return SITS_INVALID_ARGUMENT;
  b->is_stepping = false;
  return hear_all(b, b->inner->wait(b->program, result), STEP_US, NULL);
}

static int32_t nodes_collectives(const struct backend_program *program, struct backend_collective *rows, int32_t max)
{
  const struct backend *b = set_of_program(program);
  return b->inner->collectives == NULL ? 0 : b->inner->collectives(b->program, rows, max);
}

static bool nodes_is_lost(const struct backend *b) { return atomic_load(&b->nodes->is_lost); }

/* ---- one vtable for each inner kind, as in ranks.c ---- */

extern const struct backend_vtable backend_cpu;
static enum sits_status cpu_nodes_open(const struct backend_options *o, struct backend **out, struct sits_error *err)
{
  return nodes_open(&backend_cpu, o, out, err);
}
static uint64_t cpu_nodes_page_bytes(const struct kv_geometry *g) { return page_bytes_of(&backend_cpu, g); }

#ifdef SITS_HAVE_CUDA
extern const struct backend_vtable backend_cuda;
static enum sits_status cuda_nodes_open(const struct backend_options *o, struct backend **out, struct sits_error *err)
{
  return nodes_open(&backend_cuda, o, out, err);
}
static uint64_t cuda_nodes_page_bytes(const struct kv_geometry *g) { return page_bytes_of(&backend_cuda, g); }
#endif

static const struct backend_vtable common = {.abi = BACKEND_ABI,
                                             .close = nodes_close,
                                             .info = nodes_info,
                                             .compile = nodes_compile,
                                             .program_destroy = nodes_program_destroy,
                                             .program_bytes = nodes_program_bytes,
                                             .kv_beside = nodes_kv_beside,
                                             .kv_create = nodes_kv_create,
                                             .kv_destroy = nodes_kv_destroy,
                                             .kv_copy_pages = nodes_copy_pages,
                                             .kv_read_page = nodes_read_page,
                                             .kv_write_page = nodes_write_page,
                                             .submit = nodes_submit,
                                             .wait = nodes_wait,
                                             .collectives = nodes_collectives,
                                             .is_lost = nodes_is_lost};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct backend_vtable tables[2]; /* cpu, cuda */

static void fill_tables(void)
{
  backend_wrap(&tables[0], &common, &backend_cpu);
  tables[0].open = cpu_nodes_open;
  tables[0].kv_page_bytes = cpu_nodes_page_bytes;
#ifdef SITS_HAVE_CUDA
  backend_wrap(&tables[1], &common, &backend_cuda);
  tables[1].open = cuda_nodes_open;
  tables[1].kv_page_bytes = cuda_nodes_page_bytes;
#endif
}

const struct backend_vtable *backend_nodes(const struct backend_vtable *one)
{
  pthread_once(&once, fill_tables);
  if (one == &backend_cpu) return &tables[0];
#ifdef SITS_HAVE_CUDA
  if (one == &backend_cuda) return &tables[1];
#endif
  return NULL;
}

/* ---- the follower ---- */

struct follower {
  struct nodes *nodes;
  const struct backend_vtable *inner;
  struct backend_options own;
  nodes_program_fn make_program;
  void *user;
  struct program *source;
  struct backend *backend;
  struct backend_program *program;
  struct backend_kv *kv;
  int32_t max_columns;
  size_t page_bytes, most_bytes;     /* of a message */
  uint8_t *message;
};

static bool answer(struct follower *f, enum sits_status status, const struct sits_error *err, const void *body, size_t n_bytes)
{
  struct node_reply reply = {.status = (int32_t)status};
  if (status != SITS_OK && err != NULL) snprintf(reply.text, sizeof reply.text, "%s", err->text);
  return nodes_send(f->nodes, 0, NODE_REPLY, &reply, sizeof reply, body, status == SITS_OK ? n_bytes : 0);
}

static enum sits_status reserve(struct follower *f, size_t n_bytes, struct sits_error *err)
{
  if (n_bytes <= f->most_bytes) return SITS_OK;
  mem_free(f->message);
  f->message = mem_alloc(n_bytes);
  f->most_bytes = f->message != NULL ? n_bytes : 0;
  return f->message != NULL ? SITS_OK : sits_fail(err, SITS_NOMEM, "no memory for messages of %zu bytes", n_bytes);
}

static enum sits_status follow_open(struct follower *f, const struct node_config *config, struct sits_error *err)
{
  if (f->backend != NULL || config->max_batch_tokens < 1 || config->max_seqs < 1 || config->collective_timeout_ms < 1)
    return sits_fail(err, SITS_INVALID_ARGUMENT, "the leader's options do not fit");
  f->own.max_batch_tokens = config->max_batch_tokens;
  f->own.max_seqs = config->max_seqs;
  f->own.collective_timeout_ms = config->collective_timeout_ms;
  f->own.compress_reduce = config->compress_reduce != 0;
  f->own.rank = f->nodes->rank;
  f->own.n_ranks = f->nodes->n_ranks;
  f->own.nodes = NULL;
  enum sits_status status = nodes_start(f->nodes, config->collective_timeout_ms, err);
  f->own.group = f->nodes->group;
  if (status == SITS_OK) status = f->inner->open(&f->own, &f->backend, err);
  return status;
}

static enum sits_status follow_compile(struct follower *f, uint64_t fingerprint, struct sits_error *err)
{
  if (f->backend == NULL || f->program != NULL) return sits_fail(err, SITS_INVALID_ARGUMENT, "a program where none is expected");
  enum sits_status status = SITS_OK;
  if (f->source == NULL) status = f->make_program(f->user, f->nodes->rank, f->nodes->n_ranks, &f->source, err);
  if (status == SITS_OK && fingerprint_of(f->source) != fingerprint)
    status = sits_fail_param(err, SITS_CONFIG, "model", "its model is not the leader's");
  if (status != SITS_OK) return status;
  f->max_columns = (f->source->dims.max_context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS + 1;
  const size_t step = node_step_bytes(f->own.max_batch_tokens, f->own.max_seqs, f->max_columns);
  status = reserve(f, step + sizeof(struct node_step), err);
  return status == SITS_OK ? f->inner->compile(f->backend, f->source, &f->program, err) : status;
}

static enum sits_status follow_create_kv(struct follower *f, const struct kv_geometry *geometry, struct sits_error *err)
{
  const struct kv_geometry share = kv_geometry_of_rank(geometry);
  if (f->program == NULL || f->kv != NULL || geometry->n_ranks != f->nodes->n_ranks)
    return sits_fail(err, SITS_INVALID_ARGUMENT, "pages where none are expected");
  f->page_bytes = (size_t)f->inner->kv_page_bytes(&share);
  const enum sits_status status = reserve(f, f->page_bytes + sizeof(int32_t), err);
  return status == SITS_OK ? f->inner->kv_create(f->backend, &share, &f->kv, err) : status;
}

static enum sits_status follow_step(struct follower *f, size_t n_bytes)
{
  struct node_step head;
  struct backend_batch batch;
  struct backend_result result;
  if (f->program == NULL || f->kv == NULL || n_bytes < sizeof head) return SITS_INVALID_ARGUMENT;
  memcpy(&head, f->message, sizeof head);
  if (!node_step_read(&head, f->message + sizeof head, n_bytes - sizeof head, f->own.max_batch_tokens, f->own.max_seqs, f->max_columns,
                      &batch))
    return SITS_INVALID_ARGUMENT;
  const enum sits_status status = f->inner->submit(f->program, f->kv, &batch);
  return status == SITS_OK ? f->inner->wait(f->program, &result) : status;
}

static enum sits_status follow_pages(struct follower *f, enum node_message kind, size_t n_bytes)
{
  int32_t page;
  if (f->kv == NULL) return SITS_INVALID_ARGUMENT;
  if (kind == NODE_COPY_PAGES) {
    const struct kv_copy *copies = (const struct kv_copy *)(const void *)f->message;
    if (n_bytes % sizeof *copies != 0) return SITS_INVALID_ARGUMENT;
    return f->inner->kv_copy_pages(f->kv, copies, (int32_t)(n_bytes / sizeof *copies));
  }
  if (n_bytes != sizeof page + (kind == NODE_WRITE_PAGE ? f->page_bytes : 0)) return SITS_INVALID_ARGUMENT;
  memcpy(&page, f->message, sizeof page);
  return kind == NODE_WRITE_PAGE ? f->inner->kv_write_page(f->kv, page, f->message + sizeof page)
                                 : f->inner->kv_read_page(f->kv, page, f->message);
}

static void drop_program(struct follower *f)
{
  if (f->program != NULL) f->inner->program_destroy(f->program);
  f->program = NULL;
}

static void drop_kv(struct follower *f)
{
  if (f->kv != NULL) f->inner->kv_destroy(f->kv);
  f->kv = NULL;
}

/* One message done and answered. Statuses that end the process are returned; a refusal of the leader's numbers is only answered. */
static enum sits_status obey(struct follower *f, enum node_message kind, size_t n_bytes, struct sits_error *err)
{
  enum sits_status status = SITS_OK;
  struct backend_info info;
  uint64_t bytes = 0;
  const void *body = NULL;
  size_t body_bytes = 0;
  bool ends = false; /* a failure of this leaves nothing to go on with */
  if (err != NULL) *err = (struct sits_error){0}; /* not the text of an earlier refusal */
  switch (kind) {
  case NODE_OPEN:
    ends = true;
    status = n_bytes == sizeof(struct node_config) ? follow_open(f, (const struct node_config *)(const void *)f->message, err)
                                                   : SITS_INVALID_ARGUMENT;
    break;
  case NODE_COMPILE:
    ends = true;
    if (n_bytes == sizeof bytes) memcpy(&bytes, f->message, sizeof bytes);
    status = n_bytes == sizeof bytes ? follow_compile(f, bytes, err) : SITS_INVALID_ARGUMENT;
    bytes = status == SITS_OK ? f->inner->program_bytes(f->program) : 0;
    body = &bytes, body_bytes = sizeof bytes;
    break;
  case NODE_CREATE_KV:
    status = n_bytes == sizeof(struct kv_geometry) ? follow_create_kv(f, (const struct kv_geometry *)(const void *)f->message, err)
                                                   : SITS_INVALID_ARGUMENT;
    break;
  case NODE_INFO:
    if (f->backend == NULL) status = SITS_INVALID_ARGUMENT;
    else f->inner->info(f->backend, &info), body = &info, body_bytes = sizeof info;
    break;
  case NODE_STEP: status = follow_step(f, n_bytes); break;
  case NODE_READ_PAGE: body = f->message, body_bytes = f->page_bytes; /* fall through */
  case NODE_WRITE_PAGE: case NODE_COPY_PAGES: status = follow_pages(f, kind, n_bytes); break;
  case NODE_DESTROY_PROGRAM: drop_program(f); break;
  case NODE_DESTROY_KV: drop_kv(f); break;
  case NODE_CLOSE: atomic_store(&f->nodes->is_closing, true); break;
  case NODE_EXCHANGE: case NODE_REPLY: default: return sits_fail(err, SITS_DEVICE, "the leader says what it must not");
  }
  if (status != SITS_OK && err != NULL && err->text[0] == '\0')
    (void)sits_fail(err, status, "message %d of %zu bytes: %s", (int)kind, n_bytes, sits_status_info(status)->name);
  if (!answer(f, status, err, body, body_bytes)) return sits_fail(err, SITS_DEVICE, "the leader is lost");
  return ends || status == SITS_DEVICE ? status : SITS_OK;
}

static enum sits_status follow(struct follower *f, struct sits_error *err)
{
  enum sits_status status = reserve(f, 65536, err);
  while (status == SITS_OK && !atomic_load(&f->nodes->is_closing)) {
    enum node_message kind;
    size_t n_bytes;
    if (!nodes_next(f->nodes, 0, 0, &kind, &n_bytes)) return sits_fail(err, SITS_DEVICE, "the leader is lost");
    if (n_bytes > f->most_bytes) return sits_fail(err, SITS_DEVICE, "a message of %zu bytes from the leader", n_bytes);
    if (!nodes_read(f->nodes, 0, f->message, n_bytes)) return sits_fail(err, SITS_DEVICE, "the leader is lost");
    status = obey(f, kind, n_bytes, err);
  }
  return status;
}

enum sits_status nodes_follow(const struct nodes_options *options, const struct backend_vtable *inner, const struct backend_options *own,
                              nodes_program_fn make_program, void *user, struct sits_error *err)
{
  struct follower f = {.inner = inner, .own = *own, .make_program = make_program, .user = user};
  if (options->rank < 1) return sits_fail(err, SITS_INVALID_ARGUMENT, "nodes: rank 0 leads");
  enum sits_status status = nodes_connect(options, &f.nodes, err);
  if (status != SITS_OK) return status;
  log_info("nodes", "rank %d of %d: connected to the leader", (int)options->rank, (int)options->n_ranks);
  if (options->joined != NULL) options->joined();
  status = follow(&f, err);
  if (status != SITS_OK && f.nodes->group != NULL) group_abort(f.nodes->group);
  drop_kv(&f);
  drop_program(&f);
  if (f.backend != NULL) inner->close(f.backend);
  program_destroy(f.source);
  nodes_disconnect(f.nodes);
  mem_free(f.message);
  return status;
}
