/* See instance.h. What is worth reading here is how the numbers are chosen: size_batches (before the model is open) and size_pages. */
#include "engine/instance.h"

#include <string.h>

#include "base/cores.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/page_room.h"
#include "engine/runner.h"
#include "kv/kv_sparse.h"

enum { CPU_SEQS = 64, CPU_TOKENS = 512, CUDA_SEQS = 256, CUDA_TOKENS = 8192, CUDA_SAMPLERS = 12, MAX_PAGES = 1 << 24,
       READER_TOKENS = 4096 };

struct instance {
  struct instance_options options;  /* model_path is not kept */
  struct runner runner, draft;      /* draft.model NULL: none */
  struct runner reader;             /* the same model on the prefill device; model NULL: none */
  int32_t draft_length;             /* tokens of a sequence that the draft model can hold */
  struct sits_engine *engine;
  struct instance_info info;
  bool overlap;                     /* the backend computes while the host goes on */
};

static bool is_cuda(const struct instance_options *o)
{
  const struct backend_vtable *vtable = backend_find(o->device ? o->device : "auto");
  return vtable && strcmp(vtable->name, "cuda") == 0;
}

static void size_batches(struct instance *instance)
{
  struct instance_options *o = &instance->options;
  bool cuda = is_cuda(o);
  if (o->max_num_seqs <= 0) o->max_num_seqs = cuda ? CUDA_SEQS : CPU_SEQS;
  if (o->max_num_batched_tokens <= 0) o->max_num_batched_tokens = cuda ? CUDA_TOKENS : CPU_TOKENS;
  if (o->max_num_batched_tokens < o->max_num_seqs) o->max_num_batched_tokens = o->max_num_seqs;
  int32_t spare = cores_usable() - 2;
  if (spare > CUDA_SAMPLERS) spare = CUDA_SAMPLERS;
  if (o->n_sampler_threads == 0 && cuda && spare > 0) o->n_sampler_threads = spare;
  if (o->n_sampler_threads < 0) o->n_sampler_threads = 0;
  instance->overlap = cuda;
  if (!(o->gpu_memory_utilization > 0)) o->gpu_memory_utilization = 0.9;
}

static int32_t pages_for(int64_t n_tokens)
{
  return (int32_t)((n_tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS);
}

/* What is left for pages, and what goes with them, once the weights and workspaces are in place. */
static uint64_t bytes_for_pages(const struct instance_options *o, const struct backend_info *device)
{
  if (!is_cuda(o)) return device->memory_free_bytes / 2;
  double kept_free = (1 - o->gpu_memory_utilization) * (double)device->memory_total_bytes;
  return (double)device->memory_free_bytes > kept_free ? device->memory_free_bytes - (uint64_t)kept_free : 0;
}

/* Pages of a runner beside another's taken_bytes, needed at most, for sequences of up to that length. */
static uint64_t count_pages(const struct instance_options *o, struct runner *r, uint64_t taken_bytes, uint64_t needed, int32_t length)
{
  struct backend_info device;
  r->vtable->info(r->backend, &device);
  const uint64_t whole = bytes_for_pages(o, &device), given = o->kv_cache_bytes;
  struct page_room room = {.bytes = whole > taken_bytes ? whole - taken_bytes : 0, .page_bytes = r->page_bytes,
                           .most_pages = needed < MAX_PAGES ? needed : MAX_PAGES};
  r->geometry.max_tokens = length;
  if (given > 0) {
    room.wanted_pages = given > taken_bytes ? (given - taken_bytes) / r->page_bytes : 0;
    if (room.wanted_pages > room.most_pages) room.wanted_pages = room.most_pages;
    if (room.wanted_pages == 0) return 0;
  }
  return page_room_divide(&room, r->vtable, r->compiled, &r->geometry);
}

/* fp4-sparse: most pages of one sequence of that length. 0: all that it needs. */
static enum sits_status choose_budget(struct instance *instance, int32_t length, struct sits_error *err)
{
  const int32_t given = instance->options.kv_page_budget;
  instance->info.page_budget = 0;
  if (instance->runner.codec != KV_FP4_SPARSE) {
    if (given == 0) return SITS_OK;
    return sits_fail_param(err, SITS_CONFIG, "kv-page-budget", "kv-page-budget is for kv-cache-dtype fp4-sparse, not %s",
                           kv_codec_name(instance->runner.codec));
  }
  if (given != 0 && given < KV_LEAST_BUDGET)
    return sits_fail_param(err, SITS_CONFIG, "kv-page-budget", "kv-page-budget %d is below %d pages, the least that makes sense", given,
                           KV_LEAST_BUDGET);
  instance->info.page_budget = given != 0 ? given : pages_for(length) / 2;
  if (instance->info.page_budget < KV_LEAST_BUDGET) instance->info.page_budget = KV_LEAST_BUDGET;
  return SITS_OK;
}

/* Pages that a sequence of that length holds at once. */
static int32_t pages_of_one(const struct instance *instance, int32_t length)
{
  const int32_t n = pages_for(length), budget = instance->info.page_budget;
  return budget > 0 && budget < n ? budget : n;
}

static int32_t draft_length(const struct instance *instance, int32_t length)
{
  const int32_t most = instance->draft.model->config.max_context;
  return length < most ? length : most;
}

/* Pages of the draft model: for as many sequences as are ever drafted for at once. 0 without one. */
static int32_t draft_pages(const struct instance *instance, int32_t length)
{
  const struct instance_options *o = &instance->options;
  if (!instance->draft.model) return 0;
  return (o->spec_max_running < o->max_num_seqs ? o->spec_max_running : o->max_num_seqs) * pages_for(draft_length(instance, length));
}

/* Pages: as many as the memory allows (a draft model's come out of it too), not more than max_num_seqs sequences of full length can use, at
 * least one sequence's worth when the length was asked for. The model's length is cut to what the pages hold when it was not. */
static enum sits_status size_pages(struct instance *instance, struct sits_error *err)
{
  struct instance_options *o = &instance->options;
  struct runner *r = &instance->runner;
  int32_t model_len = r->model->config.max_context;
  if (o->max_model_len > model_len) {
    return sits_fail_param(err, SITS_CONFIG, "max-model-len", "max-model-len %d is beyond the model's own %d", o->max_model_len, model_len);
  }
  int32_t length = o->max_model_len > 0 ? o->max_model_len : model_len;
  enum sits_status status = choose_budget(instance, length, err);
  if (status != SITS_OK) return status;
  const uint64_t draft_bytes = (uint64_t)draft_pages(instance, length) * instance->draft.page_bytes;
  const uint64_t n_pages = count_pages(o, r, draft_bytes, (uint64_t)pages_of_one(instance, length) * (uint64_t)o->max_num_seqs, length);
  bool is_short = n_pages < (uint64_t)pages_of_one(instance, length);
  if (n_pages == 0 || (is_short && o->max_model_len > 0)) {
    return sits_fail_param(err, SITS_CONFIG, "kv-cache-memory",
                           "one sequence of %d tokens needs %llu bytes of cache, pages of %llu are there beside %llu for a draft model; "
                           "lower max-model-len, or raise kv-cache-memory or on a GPU gpu-memory-utilization",
                           length, (unsigned long long)r->page_bytes * (unsigned long long)pages_of_one(instance, length),
                           (unsigned long long)(n_pages * r->page_bytes), (unsigned long long)draft_bytes);
  }
  if (is_short) {
    int32_t holds = (int32_t)n_pages * KV_PAGE_TOKENS;
    log_warn("engine", "max-model-len cut from %d to %d: the cache holds no more", length, holds);
    length = holds;
  }
  instance->info.n_pages = (int32_t)n_pages;
  instance->info.max_model_len = length;
  return SITS_OK;
}

/* The draft model without its pages. Sets spec_max_running, which the engine would. */
static enum sits_status open_draft(struct instance *instance, const char *path, struct sits_error *err)
{
  struct instance_options *o = &instance->options;
  const struct runner *r = &instance->runner;
  if (o->spec_max_tokens == 0) return sits_fail_param(err, SITS_CONFIG, "draft-model", "draft-model needs speculative-tokens above 0");
  if (o->n_ranks > 1)
    return sits_fail_param(err, SITS_UNSUPPORTED, "draft-model",
                           "draft-model does not go with tensor-parallel-size %d: it runs on one device", (int)o->n_ranks);
  if (r->codec != KV_F16 && r->codec != KV_INT8 && r->codec != KV_F32)
    return sits_fail_param(err, SITS_CONFIG, "draft-model",
                           "draft-model needs kv-cache-dtype f16 or int8: %s pages cannot take a token back", kv_codec_name(r->codec));
  if (strcmp(r->vtable->name, "cpu") != 0)
    return sits_fail_param(err, SITS_UNSUPPORTED, "draft-model", "draft-model runs on the cpu backend only, not on %s", r->vtable->name);
  if (o->spec_max_running <= 0) o->spec_max_running = 8;
  return runner_open_draft(&instance->draft, r, path, err);
}

static enum sits_status create_draft_pages(struct instance *instance, struct sits_error *err)
{
  const int32_t n_pages = draft_pages(instance, instance->info.max_model_len);
  instance->draft_length = draft_length(instance, instance->info.max_model_len);
  instance->info.draft_kv_bytes = (uint64_t)n_pages * instance->draft.page_bytes;
  instance->info.draft_weight_bytes = instance->draft.vtable->program_bytes(instance->draft.compiled);
  return runner_kv_create(&instance->draft, n_pages, err);
}

static enum sits_status check_placement(const struct instance_options *o, struct sits_error *err)
{
  if (!o->has_placement) return SITS_OK;
  if (o->prefill_device == o->decode_device)
    return sits_fail_param(err, SITS_CONFIG, "placement", "placement: prefill and decode are both on device %d, which needs no placement",
                           o->decode_device);
  if (o->n_ranks > 1)
    return sits_fail_param(err, SITS_UNSUPPORTED, "placement", "placement does not go with tensor-parallel-size %d", o->n_ranks);
  if (o->draft_model_path)
    return sits_fail_param(err, SITS_UNSUPPORTED, "placement", "placement does not go with draft-model, which reads prompts itself");
  return SITS_OK;
}

/* On a CPU both devices are this machine, and each gets half of the threads. */
static enum sits_status open_runner(const struct instance *instance, const char *model_path, int32_t device, struct runner *out,
                                    struct sits_error *err)
{
  const struct instance_options *o = &instance->options;
  int32_t n_threads = o->n_threads;
  if (o->has_placement) n_threads = (n_threads > 0 ? n_threads : cores_usable()) / 2;
  if (o->has_placement && n_threads < 1) n_threads = 1;
  struct runner_options runner = {
      .model_path = model_path, .device = o->device, .kv_codec = o->kv_codec,
      .backend = {.n_threads = n_threads, .device = device, .isa = o->isa, .prefill_weights = o->prefill_weights,
                  .n_ranks = o->n_ranks, .nodes = o->nodes, .has_devices = o->has_devices,
                  .collective_timeout_ms = o->collective_timeout_ms, .compress_reduce = o->compress_reduce,
                  .max_batch_tokens = o->max_num_batched_tokens, .max_seqs = o->max_num_seqs}};
  memcpy(runner.backend.devices, o->devices, sizeof runner.backend.devices);
  return runner_open(out, &runner, err);
}

/* The prefill device: the same model, and as many pages as its own memory holds. */
static enum sits_status open_reader(struct instance *instance, const char *model_path, struct sits_error *err)
{
  const struct instance_options *o = &instance->options;
  struct runner *r = &instance->reader;
  enum sits_status status = open_runner(instance, model_path, o->prefill_device, r, err);
  if (status != SITS_OK) return status;
  const uint64_t n_pages = count_pages(o, r, 0, (uint64_t)pages_for(instance->info.max_model_len) * (uint64_t)o->max_num_seqs,
                                       instance->info.max_model_len);
  if (n_pages == 0)
    return sits_fail_param(err, SITS_CONFIG, "placement", "placement: no memory for pages on the prefill device %d", o->prefill_device);
  instance->info.n_reader_pages = (int32_t)n_pages;
  return runner_kv_create(r, (int32_t)n_pages, err);
}

/* It takes what the engine takes, and never refuses what the engine has let in. */
static struct engine_options reader_options(const struct instance *instance, const struct engine_options *engine)
{
  const struct runner *r = &instance->reader;
  struct engine_options o = {
      .vtable = r->vtable, .program = r->compiled, .kv = r->kv, .geometry = r->geometry, .n_vocab = engine->n_vocab,
      .max_model_len = engine->max_model_len, .max_num_seqs = engine->max_num_seqs, .max_rows = engine->max_rows,
      .max_num_batched_tokens = engine->max_num_batched_tokens, .prefix_caching = engine->prefix_caching,
      .max_waiting_requests = 4 * (engine->max_waiting_requests > 0 ? engine->max_waiting_requests : 1024),
      .ttft_target_us = engine->ttft_target_us, .policy = engine->policy, .overlap = engine->overlap,
  };
  /* Longer steps read hardly faster, and prompts that share one wait for each other. */
  if (o.max_num_batched_tokens > READER_TOKENS) o.max_num_batched_tokens = READER_TOKENS;
  if (o.max_num_batched_tokens < o.max_num_seqs) o.max_num_batched_tokens = o.max_num_seqs;
  int64_t holds = (int64_t)instance->info.n_reader_pages * KV_PAGE_TOKENS; /* longer prompts are read by the engine itself */
  if (o.max_model_len > holds) o.max_model_len = (int32_t)holds;
  return o;
}

static enum sits_status create_engine(struct instance *instance, struct sits_error *err)
{
  const struct instance_options *o = &instance->options;
  const struct runner *r = &instance->runner;
  struct engine_options engine = {
      .vtable = r->vtable, .program = r->compiled, .kv = r->kv, .geometry = r->geometry, .n_vocab = r->model->config.n_vocab,
      .max_model_len = instance->info.max_model_len, .max_num_seqs = o->max_num_seqs, .max_rows = o->max_num_seqs,
      .max_num_batched_tokens = o->max_num_batched_tokens, .max_waiting_requests = o->max_waiting_requests,
      .max_waiting_tokens = o->max_waiting_tokens, .prefix_caching = o->prefix_caching,
      .page_budget = instance->info.page_budget,
      .n_host_pages = (int32_t)(o->swap_bytes / r->page_bytes > MAX_PAGES ? MAX_PAGES : o->swap_bytes / r->page_bytes),
      .itl_target_us = o->itl_target_us, .spec_max_tokens = o->spec_max_tokens, .spec_max_running = o->spec_max_running,
      .draft = {.program = instance->draft.compiled, .kv = instance->draft.kv, .geometry = instance->draft.geometry,
                .max_model_len = instance->draft_length},
      .ttft_target_us = o->ttft_target_us, .policy = alps_policy_named(o->policy), .n_sampler_threads = o->n_sampler_threads,
      .overlap = instance->overlap, .always_hand_over = o->always_hand_over,
      .on_events = o->on_events, .events_user = o->events_user, .on_step = o->on_step, .step_user = o->step_user,
  };
  struct engine_options reader = {0};
  if (o->has_placement) {
    reader = reader_options(instance, &engine);
    engine.reader = &reader;
  }
  return engine_create(&engine, &instance->engine, err);
}

static void fill_info(struct instance *instance)
{
  struct instance_info *info = &instance->info;
  const struct runner *r = &instance->runner;
  struct backend_info device;
  r->vtable->info(r->backend, &device);
  memcpy(info->device_name, device.name, sizeof info->device_name);
  info->weight_bytes = r->vtable->program_bytes(r->compiled);
  info->page_bytes = r->page_bytes;
  info->kv_bytes = r->page_bytes * (uint64_t)info->n_pages;
  info->max_num_seqs = instance->options.max_num_seqs;
  info->max_num_batched_tokens = instance->options.max_num_batched_tokens;
  info->kv_codec = r->codec;
  info->open_us = r->open_us;
  info->compile_us = r->compile_us;
}

enum sits_status instance_open(const struct instance_options *options, struct instance **out, struct sits_error *err)
{
  struct instance *instance = mem_calloc(1, sizeof *instance);
  if (!instance) return sits_fail(err, SITS_NOMEM, "out of memory");
  instance->options = *options;
  enum sits_status status = check_placement(&instance->options, err);
  instance->options.model_path = instance->options.draft_model_path = NULL;
  size_batches(instance);
  const int32_t device = options->has_placement ? options->decode_device : options->device_ordinal;
  if (status == SITS_OK) status = open_runner(instance, options->model_path, device, &instance->runner, err);
  instance->options.nodes = NULL; /* borrowed until here */
  if (status == SITS_OK && options->draft_model_path) status = open_draft(instance, options->draft_model_path, err);
  if (status == SITS_OK) status = size_pages(instance, err);
  instance->runner.geometry.max_tokens = instance->info.max_model_len;
  if (status == SITS_OK) status = runner_kv_create(&instance->runner, instance->info.n_pages, err);
  if (status == SITS_OK && options->has_placement) status = open_reader(instance, options->model_path, err);
  if (status == SITS_OK && options->draft_model_path) status = create_draft_pages(instance, err);
  if (status == SITS_OK) status = create_engine(instance, err);
  if (status != SITS_OK) {
    instance_close(instance);
    return status;
  }
  fill_info(instance);
  *out = instance;
  return SITS_OK;
}

enum sits_status instance_set_end_ids(struct instance *instance, const int32_t *ids, int32_t n_ids)
{
  return engine_set_end_ids(instance->engine, ids, n_ids);
}

enum sits_status instance_start(struct instance *instance, struct sits_error *err)
{
  return engine_start(instance->engine, err);
}

void instance_close(struct instance *instance)
{
  if (!instance) return;
  if (instance->engine) {
    engine_stop(instance->engine, 0);
    engine_destroy(instance->engine);
  }
  runner_close(&instance->draft);
  runner_close(&instance->reader);
  runner_close(&instance->runner);
  mem_free(instance);
}

struct sits_engine *instance_engine(struct instance *instance)
{
  return instance->engine;
}

bool instance_is_lost(const struct instance *instance)
{
  const struct runner *r = &instance->runner;
  return r->vtable->is_lost != NULL && r->vtable->is_lost(r->backend);
}

const struct model *instance_model(const struct instance *instance)
{
  return instance->runner.model;
}

const struct model *instance_draft_model(const struct instance *instance)
{
  return instance->draft.model;
}

void instance_info(const struct instance *instance, struct instance_info *out)
{
  *out = instance->info;
}
