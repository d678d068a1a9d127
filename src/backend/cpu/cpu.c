/* The CPU backend's vtable (backend/backend.h): options, checks of each batch, and the calls into the files that do the work.
 * A batch is computed inside submit by the calling thread and the pool together; wait only hands out the result. */
#include <stdio.h>
#include <string.h>
#include <sys/sysinfo.h>

#include "backend/backend.h"
#include "backend/batch.h"
#include "backend/group.h"
#include "backend/cpu/cpu_program.h"
#include "base/clock.h"
#include "base/cores.h"
#include "base/mem.h"

extern const struct backend_vtable backend_cpu;

static void cpu_close(struct backend *backend)
{
  if (backend == NULL) return;
  cpu_pool_destroy(backend->pool);
  mem_free(backend);
}

static enum sits_status cpu_open(const struct backend_options *options, struct backend **out, struct sits_error *err)
{
  if (options->max_batch_tokens < 1 || options->max_seqs < 1)
    return sits_fail(err, SITS_INVALID_ARGUMENT, "cpu: max_batch_tokens and max_seqs must be positive");
  if (options->n_threads < 0) return sits_fail_param(err, SITS_INVALID_ARGUMENT, "threads", "cpu: threads must not be negative");
  struct backend *backend = mem_calloc(1, sizeof *backend);
  if (backend == NULL) return sits_fail(err, SITS_NOMEM, "cpu: out of memory");
  backend->options = *options;
  backend->options.isa = NULL; /* borrowed, and used here only */
  /* On Intel the lines that one core has written reach another late; elsewhere sharing the work out is worth a phase from 3 tokens on. */
  backend->private_tokens = cpu_isa_prefetches() ? CPU_PRIVATE_TOKENS : 2;
  backend->n_threads = options->n_threads > 0 ? options->n_threads : cores_usable();
  if (options->group != NULL && !group_is_linked(options->group)) /* ranks of this process share its threads */
    backend->n_threads = backend->n_threads / options->n_ranks > 0 ? backend->n_threads / options->n_ranks : 1;
  enum sits_status status = cpu_isa_choose(options->isa, &backend->isa, err);
  if (status == SITS_OK) status = cpu_pool_create(backend->n_threads, &backend->pool, err);
  if (status != SITS_OK) {
    cpu_close(backend);
    return status;
  }
  backend->ops = cpu_ops_for(backend->isa);
  *out = backend;
  return SITS_OK;
}

static void cpu_info(const struct backend *backend, struct backend_info *out)
{
  struct sysinfo info = {0};
  memset(out, 0, sizeof *out);
  snprintf(out->name, sizeof out->name, "cpu %s, %d thread%s", cpu_isa_name(backend->isa), (int)backend->n_threads,
           backend->n_threads == 1 ? "" : "s");
  if (sysinfo(&info) != 0) return;
  out->memory_total_bytes = (uint64_t)info.totalram * info.mem_unit;
  out->memory_free_bytes = (uint64_t)(info.freeram + info.bufferram) * info.mem_unit;
  FILE *file = fopen("/proc/meminfo", "r"); /* counts what the page cache would give back, as sysinfo does not */
  char line[128];
  unsigned long long kib;
  while (file != NULL && fgets(line, sizeof line, file) != NULL)
    if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1) out->memory_free_bytes = kib * 1024;
  if (file != NULL) fclose(file);
}

static uint64_t cpu_program_bytes(const struct backend_program *program) { return program->n_bytes; }

static enum sits_status cpu_kv_open(struct backend *backend, const struct kv_geometry *geometry, struct backend_kv **out,
                                    struct sits_error *err)
{
  return cpu_kv_create(geometry, backend->ops, backend->options.max_batch_tokens, backend->options.max_seqs, out, err);
}

/* Everything that an index of the batch will touch: a caller's mistake is refused, never followed. */
static bool is_valid(const struct backend_program *p, const struct backend_kv *kv, const struct backend_batch *b)
{
  if (!batch_is_well_formed(b, &p->program->dims, &kv->geometry, p->max_tokens, p->max_rows, 0)) return false;
  if (!batch_names_pages(b, &kv->geometry, kv->codec->is_sparse)) return false;
  for (int32_t s = 0; s < b->n_seqs && b->blocks != NULL; s++)
    if (batch_pages(b, s) > 0 && b->kv_len[s] > p->max_chunks * CPU_CHUNK_TOKENS) return false;
  return true;
}

/* Check a batch and get it ready to run. */
static enum sits_status begin(struct backend_program *p, struct backend_kv *kv, const struct backend_batch *batch)
{
  p->has_result = false;
  if (!is_valid(p, kv, batch)) return SITS_INVALID_ARGUMENT;
  p->batch.in = batch;
  p->batch.kv = kv;
  for (int32_t s = 0; s < batch->n_seqs; s++)
    for (int32_t t = batch->seq_start[s]; t < batch->seq_start[s + 1]; t++) {
      const int32_t position = batch->positions[t];
      p->batch.page[t] = batch->block_table[(int64_t)s * batch->table_stride + position / KV_PAGE_TOKENS];
      p->batch.slot[t] = position % KV_PAGE_TOKENS;
    }
  if (kv->open != NULL) cpu_kv_open_begin(kv, batch, p->batch.tile);
  cpu_attention_plan(p);
  return SITS_OK;
}

static enum sits_status cpu_submit(struct backend_program *p, struct backend_kv *kv, const struct backend_batch *batch)
{
  const int64_t start_us = clock_monotonic_us();
  const enum sits_status status = begin(p, kv, batch);
  if (status != SITS_OK) return status;
  cpu_run(p);
  p->batch.in = NULL;
  p->n_rows_done = batch->n_rows;
  p->compute_us = clock_monotonic_us() - start_us;
  if (atomic_load(&p->has_lost_rank)) return SITS_DEVICE;
  p->has_result = true;
  return SITS_OK;
}

/* Codecs with open groups are left out: their groups move when other batches run between the slices. */
static enum sits_status cpu_lane_open(struct backend_program *program, const struct backend_kv *kv, int32_t max_tokens,
                                      struct backend_program **out, struct sits_error *err)
{
  if (program->backend->options.group != NULL || kv->open != NULL || max_tokens < 1 || max_tokens > program->max_tokens)
    return sits_fail(err, SITS_UNSUPPORTED, "lane: one device, a cache of whole tokens (f16, int8), and no more tokens than a batch");
  return cpu_compile_lane(program, max_tokens, out, err);
}

static enum sits_status cpu_lane_begin(struct backend_program *lane, struct backend_kv *kv, const struct backend_batch *batch)
{
  lane->pause.index = -1;
  lane->compute_us = 0;
  for (int32_t i = 0; i < lane->split_rows; i++) atomic_store(&lane->finished[i], 0); /* of a batch that was given up */
  lane->batch.in = NULL;
  return begin(lane, kv, batch);
}

static enum sits_status cpu_lane_run(struct backend_program *lane, backend_go_on *go_on, void *user, bool *is_done, int64_t *end_us)
{
  *end_us = 0;
  if (lane->batch.in == NULL || lane->has_result) return SITS_INVALID_ARGUMENT;
  const int64_t start_us = clock_monotonic_us();
  lane->go_on = go_on;
  lane->go_on_user = user;
  *is_done = lane->pause.index < 0 ? cpu_run(lane) : cpu_run_on(lane);
  lane->compute_us += clock_monotonic_us() - start_us;
  if (!*is_done) return SITS_OK;
  lane->n_rows_done = lane->batch.in->n_rows;
  lane->batch.in = NULL;
  lane->has_result = true;
  return SITS_OK;
}

static void cpu_lane_drop(struct backend_program *lane)
{
  lane->batch.in = NULL;
  lane->has_result = false;
}

static enum sits_status cpu_wait(struct backend_program *p, struct backend_result *result)
{
  if (!p->has_result) return SITS_INVALID_ARGUMENT;
  *result = (struct backend_result){.logits = p->buffers[p->program->logits], .compute_us = p->compute_us};
  return SITS_OK;
}

static void cpu_observe(struct backend_program *p, const struct backend_observer *observer) { p->observer = *observer; }

const struct backend_vtable backend_cpu = {
    .abi = BACKEND_ABI,
    .name = "cpu",
    .fusions = PROGRAM_FUSE_GROUP | PROGRAM_FUSE_NORM | PROGRAM_FUSE_ADD_NORM | PROGRAM_FUSE_ROPE | PROGRAM_FUSE_QKV |
               PROGRAM_FUSE_SWIGLU | PROGRAM_FUSE_ADD | PROGRAM_MOVE_SELECT,
    /* a phase's barriers; streams from L2; workers that normalise for themselves do so at the same time; everything between ops is f32 */
    .costs = {.op_ns = 1500, .byte_ns = 0.03F, .norm_ns = 0.15F, .norm_repeats = 1, .tokens = 1, .f32_fusions = ~0U},
    .open = cpu_open,
    .close = cpu_close,
    .info = cpu_info,
    .compile = cpu_compile,
    .program_destroy = cpu_program_destroy,
    .program_bytes = cpu_program_bytes,
    .kv_page_bytes = cpu_kv_page_bytes,
    .kv_create = cpu_kv_open,
    .kv_destroy = cpu_kv_destroy,
    .kv_copy_pages = cpu_kv_copy_pages,
    .kv_copy_blocks = cpu_kv_copy_blocks,
    .kv_read_page = cpu_kv_read_page,
    .kv_write_page = cpu_kv_write_page,
    .kv_expect = cpu_kv_expect,
    .kv_send = cpu_kv_send,
    .kv_sent = cpu_kv_sent,
    .submit = cpu_submit,
    .wait = cpu_wait,
    .observe = cpu_observe,
    .lane_open = cpu_lane_open,
    .lane_begin = cpu_lane_begin,
    .lane_run = cpu_lane_run,
    .lane_drop = cpu_lane_drop,
};
