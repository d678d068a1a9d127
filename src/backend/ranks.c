/* A model cut over several devices, behind the contract of one: backend_ranks gives the vtable. Entry points: backend_ranks,
 * kv_geometry_of_rank.
 *
 * Each rank is a backend of the inner kind with a thread of its own, which makes every call on it; a call here becomes a job that all rank
 * threads do at the same time. A step is one job of two halves: submit returns when all ranks have taken the batch, wait when all have
 * finished it; results are rank 0's (the program's collectives see to it that they are the whole model's).
 *
 * Lost ranks: a rank that does not come to a collective within the group's time, or that fails, aborts the group. Then every rank leaves
 * its collectives, this backend has failed for good (SITS_DEVICE), and whoever asked is answered. A thread that never comes back
 * (a device that hangs for ever) is left to itself: close frees everything but what it may still touch.
 *
 * Pages: a page here is the pages of all ranks side by side, kv_page_bytes their sum, and so is what swapping moves.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/backend.h"
#include "backend/group.h"
#include "backend/program.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

/* Ranks notice each other's absence in their collectives; STEP_MS is for all of them hanging at once. */
enum { DEFAULT_TIMEOUT_MS = 5000, GRACE_MS = 2000, LOOK_MS = 100, STEP_MS = 120000 };

struct rank {
  struct backend *owner;             /* [init] */
  int32_t index;                     /* [init] */
  pthread_t thread;
  bool has_thread;
  struct backend *backend;           /* [rank] the inner one's, as the next two */
  struct backend_program *program;
  struct backend_kv *kv;
  struct sits_error err;             /* [rank] of the job */
  enum sits_status status;           /* [rank] of the job */
  enum sits_status taken_status;     /* [rank] of a step's first half */
  struct backend_result result;      /* [rank] */
  uint64_t page_bytes;               /* [rank] */
  struct backend_info info;          /* [rank] */
};

typedef enum sits_status (*rank_fn)(struct rank *rank, const void *arg);

/* Here `struct backend` is the set of ranks; a program and a page memory of the set are only names for it. */
struct backend {
  const struct backend_vtable *inner; /* [init] */
  int32_t n_ranks;                   /* [init] */
  struct group *group;               /* [init] */
  struct backend_options options[BACKEND_MAX_RANKS]; /* [init] */
  struct rank ranks[BACKEND_MAX_RANKS];
  pthread_mutex_t lock;
  pthread_cond_t work, done;         /* [mutex lock] what follows */
  rank_fn fn;                        /* NULL: leave */
  const void *arg;
  uint64_t job;
  int32_t n_taken, n_done;           /* ranks past the first half, past the end */
  bool is_failed;                    /* [caller] sticky */
  bool has_lost_thread;              /* [caller] */
  int64_t n_steps;                   /* [caller] */
};

/* ---- threads and jobs ---- */

static void note_taken(struct backend *b)
{
  pthread_mutex_lock(&b->lock);
  if (++b->n_taken == b->n_ranks) pthread_cond_broadcast(&b->done);
  pthread_mutex_unlock(&b->lock);
}

static void *rank_thread(void *arg)
{
  struct rank *rank = arg;
  struct backend *b = rank->owner;
  uint64_t seen = 0;
  for (;;) {
    pthread_mutex_lock(&b->lock);
    while (b->job == seen) pthread_cond_wait(&b->work, &b->lock);
    seen = b->job;
    const rank_fn fn = b->fn;
    const void *job_arg = b->arg;
    pthread_mutex_unlock(&b->lock);
    if (fn == NULL) return NULL;
    rank->err = (struct sits_error){0};
    rank->status = fn(rank, job_arg);
    if (rank->status == SITS_DEVICE || rank->status == SITS_NOMEM) group_abort(b->group); /* the others need not wait for this one */
    pthread_mutex_lock(&b->lock);
    if (++b->n_done == b->n_ranks) pthread_cond_broadcast(&b->done);
    pthread_mutex_unlock(&b->lock);
  }
}

static void start(struct backend *b, rank_fn fn, const void *arg)
{
  pthread_mutex_lock(&b->lock);
  b->fn = fn;
  b->arg = arg;
  b->n_taken = b->n_done = 0;
  b->job++;
  pthread_cond_broadcast(&b->work);
  pthread_mutex_unlock(&b->lock);
}

static struct timespec after_ms(int64_t ms)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  t.tv_sec += ms / 1000;
  t.tv_nsec += ms % 1000 * 1000000;
  if (t.tv_nsec >= 1000000000) t.tv_sec++, t.tv_nsec -= 1000000000;
  return t;
}

/* Until *count reaches n_ranks. False when they are not there limit_ms later, or GRACE_MS after the group was aborted. limit_ms 0: until
 * they are there, abort or not, so never false. */
static bool await(struct backend *b, const int32_t *count, int64_t limit_ms)
{
  const int64_t start_us = clock_monotonic_us();
  int64_t aborted_us = 0;
  pthread_mutex_lock(&b->lock);
  while (*count < b->n_ranks) {
    const struct timespec until = after_ms(LOOK_MS);
    (void)pthread_cond_timedwait(&b->done, &b->lock, &until);
    const int64_t now_us = clock_monotonic_us();
    if (limit_ms > 0 && now_us - start_us > limit_ms * 1000) break;
    if (limit_ms == 0 || !group_is_aborted(b->group)) continue;
    if (aborted_us == 0) aborted_us = now_us;
    if (now_us - aborted_us > GRACE_MS * 1000) break;
  }
  const bool is_there = *count >= b->n_ranks;
  pthread_mutex_unlock(&b->lock);
  return is_there;
}

/* The first rank's failure, the most telling one first: a rank that gave up for another's sake says only DEVICE. */
static enum sits_status outcome(const struct backend *b, struct sits_error *err)
{
  const struct rank *worst = NULL;
  for (int32_t r = 0; r < b->n_ranks; r++) {
    const struct rank *rank = &b->ranks[r];
    if (rank->status != SITS_OK && (worst == NULL || (worst->status == SITS_DEVICE && rank->status != SITS_DEVICE))) worst = rank;
  }
  if (worst == NULL) return SITS_OK;
  if (err != NULL) {
    *err = worst->err;
    if (err->text[0] == '\0') (void)sits_fail(err, worst->status, "rank %d failed", (int)worst->index);
  }
  return worst->status;
}

/* A job on all ranks, however long it takes (loading). When it returns every rank has left fn, also in an aborted group: what fn read may
 * be freed, and the next job begins with nobody in this one. */
static enum sits_status run(struct backend *b, rank_fn fn, const void *arg, struct sits_error *err)
{
  start(b, fn, arg);
  (void)await(b, &b->n_done, 0);
  return outcome(b, err);
}

/* A rank did not come back: end the collectives, then give its thread a last chance. */
static void lose(struct backend *b, const char *what)
{
  b->is_failed = true;
  group_abort(b->group);
  if (!await(b, &b->n_done, GRACE_MS)) b->has_lost_thread = true;
  log_error("ranks", "%s: a rank has not answered%s; the model is out of service", what, b->has_lost_thread ? " and hangs" : "");
}

/* ---- open and close ---- */

static enum sits_status open_rank(struct rank *rank, const void *arg)
{
  (void)arg;
  return rank->owner->inner->open(&rank->owner->options[rank->index], &rank->backend, &rank->err);
}

static enum sits_status close_rank(struct rank *rank, const void *arg)
{
  (void)arg;
  if (rank->backend != NULL) rank->owner->inner->close(rank->backend);
  rank->backend = NULL;
  return SITS_OK;
}

static void ranks_close(struct backend *b)
{
  if (b == NULL || b->has_lost_thread) return; /* its thread may still read all of this */
  bool has_all = true;
  for (int32_t r = 0; r < b->n_ranks; r++) has_all = has_all && b->ranks[r].has_thread;
  if (has_all) (void)run(b, close_rank, NULL, NULL);
  start(b, NULL, NULL);
  for (int32_t r = 0; r < b->n_ranks; r++)
    if (b->ranks[r].has_thread) pthread_join(b->ranks[r].thread, NULL);
  group_destroy(b->group);
  pthread_cond_destroy(&b->work);
  pthread_cond_destroy(&b->done);
  pthread_mutex_destroy(&b->lock);
  mem_free(b);
}

static enum sits_status place_ranks(struct backend *b, const struct backend_options *options, struct sits_error *err)
{
  int32_t devices[BACKEND_MAX_RANKS] = {0};
  enum sits_status status = SITS_OK;
  if (options->has_devices) memcpy(devices, options->devices, sizeof devices);
  else if (b->inner->choose_devices != NULL) status = b->inner->choose_devices(options->device, b->n_ranks, devices, err);
  for (int32_t r = 0; r < b->n_ranks; r++) {
    b->options[r] = *options;
    b->options[r].rank = r;
    b->options[r].group = b->group;
    b->options[r].device = devices[r];
    memcpy(b->options[r].devices, devices, sizeof devices);
    b->options[r].has_devices = true;
  }
  return status;
}

static enum sits_status ranks_open(const struct backend_vtable *inner, const struct backend_options *options, struct backend **out,
                                   struct sits_error *err)
{
  if (options->n_ranks < 2 || options->n_ranks > BACKEND_MAX_RANKS)
    return sits_fail_param(err, SITS_CONFIG, "tensor-parallel-size", "tensor-parallel-size %d is outside 2..%d", (int)options->n_ranks,
                           BACKEND_MAX_RANKS);
  struct backend *b = mem_calloc(1, sizeof *b);
  if (b == NULL) return sits_fail(err, SITS_NOMEM, "ranks: out of memory");
  b->inner = inner;
  b->n_ranks = options->n_ranks;
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_mutex_init(&b->lock, NULL);
  pthread_cond_init(&b->work, NULL);
  pthread_cond_init(&b->done, &monotonic);
  pthread_condattr_destroy(&monotonic);
  const int64_t timeout_ms = options->collective_timeout_ms > 0 ? options->collective_timeout_ms : DEFAULT_TIMEOUT_MS;
  enum sits_status status = group_create(b->n_ranks, timeout_ms * 1000, &b->group, err);
  if (status == SITS_OK) status = place_ranks(b, options, err);
  for (int32_t r = 0; r < b->n_ranks && status == SITS_OK; r++) {
    struct rank *rank = &b->ranks[r];
    rank->owner = b;
    rank->index = r;
    rank->has_thread = pthread_create(&rank->thread, NULL, rank_thread, rank) == 0;
    if (!rank->has_thread) status = sits_fail(err, SITS_NOMEM, "ranks: no thread for rank %d", (int)r);
  }
  if (status == SITS_OK) status = run(b, open_rank, NULL, err);
  if (status != SITS_OK) {
    ranks_close(b);
    return status;
  }
  *out = b;
  return SITS_OK;
}

/* Memory in the sense of pages that count all ranks: as much as the tightest rank has, times their number. */
static enum sits_status info_of_rank(struct rank *rank, const void *arg)
{
  (void)arg;
  rank->owner->inner->info(rank->backend, &rank->info);
  return SITS_OK;
}

static void ranks_info(const struct backend *set, struct backend_info *out)
{
  struct backend *b = (struct backend *)(uintptr_t)set; /* asking is a job, too */
  struct backend_info least = {0};
  if (!b->has_lost_thread) (void)run(b, info_of_rank, NULL, NULL);
  for (int32_t r = 0; r < b->n_ranks; r++) {
    struct backend_info info = b->ranks[r].info;
    uint64_t sharing = 0;
    for (int32_t k = 0; k < b->n_ranks; k++) sharing += b->options[k].device == b->options[r].device;
    info.memory_free_bytes /= sharing;
    info.memory_total_bytes /= sharing;
    if (r == 0 || info.memory_free_bytes < least.memory_free_bytes) least = info;
  }
  *out = least;
  snprintf(out->name, sizeof out->name, "%d x %.50s", (int)b->n_ranks, least.name);
  out->memory_free_bytes *= (uint64_t)b->n_ranks;
  out->memory_total_bytes *= (uint64_t)b->n_ranks;
}

/* ---- programs and pages; handles are the set itself ---- */

static struct backend *set_of_program(const struct backend_program *program) { return (struct backend *)(uintptr_t)program; }
static struct backend *set_of_kv(const struct backend_kv *kv) { return (struct backend *)(uintptr_t)kv; }

static enum sits_status compile_rank(struct rank *rank, const void *arg)
{
  const struct program *program = arg;
  for (int32_t r = 0; r < rank->index; r++) program = program->next_rank;
  const enum sits_status status = rank->owner->inner->compile(rank->backend, program, &rank->program, &rank->err);
  if (status != SITS_OK) group_abort(rank->owner->group); /* whatever it is: the others meet here, and wait as long as it takes */
  return status;
}

static enum sits_status destroy_program(struct rank *rank, const void *arg)
{
  (void)arg;
  if (rank->program != NULL) rank->owner->inner->program_destroy(rank->program);
  rank->program = NULL;
  return SITS_OK;
}

static enum sits_status ranks_compile(struct backend *b, const struct program *program, struct backend_program **out,
                                      struct sits_error *err)
{
  int32_t n = 0;
  for (const struct program *p = program; p != NULL; p = p->next_rank) n++;
  if (n != b->n_ranks || program_n_ranks(program) != b->n_ranks)
    return sits_fail(err, SITS_INVALID_ARGUMENT, "ranks: a program for %d ranks on %d", (int)n, (int)b->n_ranks);
  if (b->ranks[0].program != NULL) return sits_fail(err, SITS_UNSUPPORTED, "ranks: one program at a time");
  if (b->is_failed) return sits_fail(err, SITS_DEVICE, "ranks: a rank has failed");
  const enum sits_status status = run(b, compile_rank, program, err);
  if (status != SITS_OK) {
    b->is_failed = group_is_aborted(b->group);
    (void)run(b, destroy_program, NULL, NULL);
    return status;
  }
  *out = (struct backend_program *)b;
  return SITS_OK;
}

static void ranks_program_destroy(struct backend_program *program)
{
  if (program == NULL || set_of_program(program)->has_lost_thread) return;
  (void)run(set_of_program(program), destroy_program, NULL, NULL);
}

static uint64_t ranks_program_bytes(const struct backend_program *program)
{
  const struct backend *b = set_of_program(program);
  uint64_t sum = 0;
  for (int32_t r = 0; r < b->n_ranks; r++) sum += b->inner->program_bytes(b->ranks[r].program);
  return sum;
}

struct kv_geometry kv_geometry_of_rank(const struct kv_geometry *whole)
{
  struct kv_geometry share = *whole;
  const int32_t n = whole->n_ranks > 1 ? whole->n_ranks : 1;
  share.n_kv_heads = whole->n_kv_heads >= n ? whole->n_kv_heads / n : 1;
  share.n_ranks = 1;
  share.spare_bytes = whole->spare_bytes > 0 && whole->spare_bytes < (uint64_t)n ? 1 : whole->spare_bytes / (uint64_t)n;
  return share;
}

static uint64_t ranks_page_bytes(const struct backend_vtable *inner, const struct kv_geometry *geometry)
{
  const struct kv_geometry share = kv_geometry_of_rank(geometry);
  if (geometry->codec == KV_FP4_SPARSE) return 0; /* a block would have to move from one rank's heads to another's */
  return inner->kv_page_bytes(&share) * (uint64_t)(geometry->n_ranks > 1 ? geometry->n_ranks : 1);
}

static void ranks_kv_beside(const struct backend_program *program, const struct kv_geometry *geometry, struct kv_beside *out)
{
  const struct backend *b = set_of_program(program);
  struct backend_program *programs[BACKEND_MAX_RANKS];
  for (int32_t r = 0; r < b->n_ranks; r++) programs[r] = b->ranks[r].program;
  kv_beside_of_ranks(b->inner, programs, b->n_ranks, geometry, out);
}

static enum sits_status create_kv(struct rank *rank, const void *arg)
{
  const struct kv_geometry share = kv_geometry_of_rank(arg);
  rank->page_bytes = rank->owner->inner->kv_page_bytes(&share);
  return rank->owner->inner->kv_create(rank->backend, &share, &rank->kv, &rank->err);
}

static enum sits_status destroy_kv(struct rank *rank, const void *arg)
{
  (void)arg;
  if (rank->kv != NULL) rank->owner->inner->kv_destroy(rank->kv);
  rank->kv = NULL;
  return SITS_OK;
}

static enum sits_status ranks_kv_create(struct backend *b, const struct kv_geometry *geometry, struct backend_kv **out,
                                        struct sits_error *err)
{
  if (geometry->n_ranks != b->n_ranks)
    return sits_fail(err, SITS_INVALID_ARGUMENT, "ranks: pages for %d ranks on %d", (int)geometry->n_ranks, (int)b->n_ranks);
  if (b->ranks[0].kv != NULL) return sits_fail(err, SITS_UNSUPPORTED, "ranks: one page memory at a time");
  const enum sits_status status = run(b, create_kv, geometry, err);
  if (status != SITS_OK) {
    (void)run(b, destroy_kv, NULL, NULL);
    return status;
  }
  *out = (struct backend_kv *)b;
  return SITS_OK;
}

static void ranks_kv_destroy(struct backend_kv *kv)
{
  if (kv == NULL || set_of_kv(kv)->has_lost_thread) return;
  (void)run(set_of_kv(kv), destroy_kv, NULL, NULL);
}

struct page_job { const struct kv_copy *copies; int32_t n, page; void *host; const void *from; };

static enum sits_status page_rank(struct rank *rank, const void *arg)
{
  const struct page_job *job = arg;
  const struct backend_vtable *v = rank->owner->inner;
  const size_t at = (size_t)rank->page_bytes * (size_t)rank->index;
  if (job->copies != NULL) return v->kv_copy_pages(rank->kv, job->copies, job->n);
  if (job->host != NULL) return v->kv_read_page(rank->kv, job->page, (uint8_t *)job->host + at);
  return v->kv_write_page(rank->kv, job->page, (const uint8_t *)job->from + at);
}

static enum sits_status move_pages(struct backend_kv *kv, const struct page_job *job)
{
  struct backend *b = set_of_kv(kv);
  if (b->is_failed) return SITS_DEVICE;
  start(b, page_rank, job);
  if (await(b, &b->n_done, STEP_MS)) return outcome(b, NULL);
  lose(b, "pages");
  return SITS_DEVICE;
}

static enum sits_status ranks_copy_pages(struct backend_kv *kv, const struct kv_copy *copies, int32_t n)
{
  return n == 0 ? SITS_OK : move_pages(kv, &(struct page_job){.copies = copies, .n = n});
}

static enum sits_status ranks_read_page(struct backend_kv *kv, int32_t page, void *host)
{
  return move_pages(kv, &(struct page_job){.page = page, .host = host});
}

static enum sits_status ranks_write_page(struct backend_kv *kv, int32_t page, const void *host)
{
  return move_pages(kv, &(struct page_job){.page = page, .from = host});
}

/* ---- steps ---- */

/* Fault injection for tests: SITS_RANK_FAULT=RANK:STEP makes that rank hang before that step (from 1) until the group is aborted. */
static void hang_if_due(const struct rank *rank)
{
  const char *text = getenv("SITS_RANK_FAULT");
  int index;
  long long step;
  if (text == NULL || sscanf(text, "%d:%lld", &index, &step) != 2 || index != rank->index || step != rank->owner->n_steps) return;
  while (!group_is_aborted(rank->owner->group)) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static enum sits_status step_rank(struct rank *rank, const void *arg)
{
  struct backend *b = rank->owner;
  hang_if_due(rank);
  const enum sits_status status = b->inner->submit(rank->program, rank->kv, arg);
  rank->taken_status = status;
  if (status == SITS_DEVICE) group_abort(b->group);
  note_taken(b);
  return status != SITS_OK ? status : b->inner->wait(rank->program, &rank->result);
}

static enum sits_status ranks_submit(struct backend_program *program, struct backend_kv *kv, const struct backend_batch *batch)
{
  struct backend *b = set_of_program(program);
  (void)kv;
  if (b->is_failed) return SITS_DEVICE;
  b->n_steps++;
  start(b, step_rank, batch);
  if (!await(b, &b->n_taken, STEP_MS)) {
    lose(b, "submit");
    return SITS_DEVICE;
  }
  enum sits_status status = SITS_OK;
  for (int32_t r = 0; r < b->n_ranks && status == SITS_OK; r++)
    if (b->ranks[r].taken_status == SITS_INVALID_ARGUMENT) status = SITS_INVALID_ARGUMENT; /* the same check on all of them */
  if (status != SITS_OK) (void)await(b, &b->n_done, STEP_MS);
  return status;
}

static enum sits_status ranks_wait(struct backend_program *program, struct backend_result *result)
{
  struct backend *b = set_of_program(program);
  if (b->is_failed) return SITS_DEVICE;
  if (!await(b, &b->n_done, STEP_MS)) {
    lose(b, "step");
    return SITS_DEVICE;
  }
  const enum sits_status status = outcome(b, NULL);
  if (status == SITS_DEVICE || group_is_aborted(b->group)) {
    if (!b->is_failed) log_error("ranks", "a rank has failed; the model is out of service");
    b->is_failed = true;
    return SITS_DEVICE;
  }
  if (status == SITS_OK) *result = b->ranks[0].result;
  return status;
}

static int32_t ranks_collectives(const struct backend_program *program, struct backend_collective *rows, int32_t max)
{
  const struct backend *b = set_of_program(program);
  return b->inner->collectives == NULL ? 0 : b->inner->collectives(b->ranks[0].program, rows, max);
}

static bool ranks_is_lost(const struct backend *b) { return group_is_aborted(b->group); }

/* ---- one vtable for each inner kind: two entries of the contract know no object, so they are told apart by name ---- */

extern const struct backend_vtable backend_cpu;
static enum sits_status cpu_ranks_open(const struct backend_options *o, struct backend **out, struct sits_error *err)
{
  return ranks_open(&backend_cpu, o, out, err);
}
static uint64_t cpu_ranks_page_bytes(const struct kv_geometry *g) { return ranks_page_bytes(&backend_cpu, g); }

#ifdef SITS_HAVE_CUDA
extern const struct backend_vtable backend_cuda;
static enum sits_status cuda_ranks_open(const struct backend_options *o, struct backend **out, struct sits_error *err)
{
  return ranks_open(&backend_cuda, o, out, err);
}
static uint64_t cuda_ranks_page_bytes(const struct kv_geometry *g) { return ranks_page_bytes(&backend_cuda, g); }
#endif

static const struct backend_vtable common = {.abi = BACKEND_ABI,
                                             .close = ranks_close,
                                             .info = ranks_info,
                                             .compile = ranks_compile,
                                             .program_destroy = ranks_program_destroy,
                                             .program_bytes = ranks_program_bytes,
                                             .kv_beside = ranks_kv_beside,
                                             .kv_create = ranks_kv_create,
                                             .kv_destroy = ranks_kv_destroy,
                                             .kv_copy_pages = ranks_copy_pages,
                                             .kv_read_page = ranks_read_page,
                                             .kv_write_page = ranks_write_page,
                                             .submit = ranks_submit,
                                             .wait = ranks_wait,
                                             .collectives = ranks_collectives,
                                             .is_lost = ranks_is_lost};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct backend_vtable tables[2]; /* cpu, cuda */

static void fill_tables(void)
{
  backend_wrap(&tables[0], &common, &backend_cpu);
  tables[0].open = cpu_ranks_open;
  tables[0].kv_page_bytes = cpu_ranks_page_bytes;
#ifdef SITS_HAVE_CUDA
  backend_wrap(&tables[1], &common, &backend_cuda);
  tables[1].open = cuda_ranks_open;
  tables[1].kv_page_bytes = cuda_ranks_page_bytes;
#endif
}

const struct backend_vtable *backend_ranks(const struct backend_vtable *one)
{
  pthread_once(&once, fill_tables);
  if (one == &backend_cpu) return &tables[0];
#ifdef SITS_HAVE_CUDA
  if (one == &backend_cuda) return &tables[1];
#endif
  return NULL;
}
