/* See runner.h. */
#include "engine/runner.h"

#include <string.h>

#include "backend/nodes.h"
#include "base/clock.h"
#include "graph/graph_costs.h"
#include "model/arch.h"

/* wish: what the model's file was made for, NULL = nothing special. */
static enum sits_status choose_codec(const char *name, const char *wish, enum kv_codec *out, struct sits_error *err)
{
  if (!name || strcmp(name, "auto") == 0) name = wish && strcmp(wish, "none") != 0 ? wish : kv_codec_name(KV_F16);
  for (int codec = 0; codec < KV_CODEC_COUNT; codec++) {
    if (strcmp(name, kv_codec_name((enum kv_codec)codec)) != 0) continue;
    *out = (enum kv_codec)codec;
    return SITS_OK;
  }
  return sits_fail_param(err, SITS_UNSUPPORTED, "kv-cache-dtype", "kv-cache-dtype '%.32s' is not supported", name);
}

static enum sits_status open_backend(struct runner *runner, const struct runner_options *options, struct sits_error *err)
{
  const char *device = options->device ? options->device : "auto";
  runner->vtable = backend_find(device);
  if (!runner->vtable)
    return sits_fail_param(err, SITS_UNSUPPORTED, "device", "device '%.32s' is not in this build or not on this machine", device);
  const char *prefill_weights = options->backend.prefill_weights;
  if (prefill_weights && strcmp(prefill_weights, "resident") == 0 && strcmp(runner->vtable->name, "cuda") != 0)
    return sits_fail_param(err, SITS_UNSUPPORTED, "prefill-weights", "prefill-weights resident is for the cuda backend: %s expands nothing",
                           runner->vtable->name);
  if (options->backend.compress_reduce && options->backend.n_ranks <= 1)
    return sits_fail_param(err, SITS_CONFIG, "tensor-parallel-compress",
                           "tensor-parallel-compress is for a model cut over devices: tensor-parallel-size is 1");
  if (options->backend.n_ranks > 1) {
    runner->vtable = options->backend.nodes != NULL ? backend_nodes(runner->vtable) : backend_ranks(runner->vtable);
    if (!runner->vtable)
      return sits_fail_param(err, SITS_UNSUPPORTED, "tensor-parallel-size", "the %.32s backend runs on one device only", device);
  }
  return runner->vtable->open(&options->backend, &runner->backend, err);
}

static enum sits_status compile(struct runner *runner, const struct runner_options *options, struct sits_error *err)
{
  const uint32_t fusions = options->unfused ? 0 : runner->vtable->fusions;
  const int32_t n_ranks = options->backend.n_ranks;
  struct backend_costs measured = runner->vtable->costs;
  enum sits_status status = options->plan_costs ? graph_costs_load(options->plan_costs, runner->vtable, &measured, err) : SITS_OK;
  const struct backend_costs *costs = options->unfused || measured.tokens <= 0 ? NULL : &measured;
  if (status) return status;
  if (options->backend.nodes) status = program_for_rank(runner->model, fusions, costs, 0, n_ranks, &runner->program, err);
  else status = program_for_ranks(runner->model, fusions, costs, n_ranks, &runner->program, err);
  if (status) return status;
  const struct model_config *config = &runner->model->config;
  runner->geometry = (struct kv_geometry){
      .n_layers = config->n_layers, .n_kv_heads = config->n_kv_heads, .head_dim = config->head_dim, .codec = runner->codec,
      .n_ranks = options->backend.n_ranks};
  runner->page_bytes = runner->vtable->kv_page_bytes(&runner->geometry);
  if (runner->page_bytes == 0)
    return sits_fail_param(err, SITS_UNSUPPORTED, "kv-cache-dtype", "the %s backend does not store this model's cache as %s%s",
                           runner->vtable->name, kv_codec_name(runner->codec), n_ranks > 1 ? " over several ranks" : "");
  return runner->vtable->compile(runner->backend, runner->program, &runner->compiled, err);
}

enum sits_status runner_open(struct runner *runner, const struct runner_options *options, struct sits_error *err)
{
  *runner = (struct runner){0};
  int64_t start_us = clock_monotonic_us();
  enum sits_status status = model_open(options->model_path, &runner->model, err);
  if (!status) status = choose_codec(options->kv_codec, runner->model->kv_codec, &runner->codec, err);
  runner->open_us = clock_monotonic_us() - start_us;
  if (!status) status = open_backend(runner, options, err);
  if (!status) status = compile(runner, options, err);
  runner->compile_us = clock_monotonic_us() - start_us - runner->open_us;
  if (status) runner_close(runner);
  return status;
}

enum sits_status runner_kv_create(struct runner *runner, int32_t n_pages, struct sits_error *err)
{
  runner->geometry.n_pages = n_pages;
  return runner->vtable->kv_create(runner->backend, &runner->geometry, &runner->kv, err);
}

enum sits_status runner_open_draft(struct runner *draft, const struct runner *host, const char *path, struct sits_error *err)
{
  const struct runner_options options = {.model_path = path, .backend.n_ranks = host->geometry.n_ranks};
  *draft = (struct runner){.vtable = host->vtable, .backend = host->backend, .codec = KV_F16, .is_guest = true};
  enum sits_status status = model_open(path, &draft->model, err);
  const int32_t n_vocab = host->model->config.n_vocab;
  if (!status && draft->model->config.n_vocab != n_vocab)
    status = sits_fail_param(err, SITS_CONFIG, "draft-model",
                             "draft-model has a vocabulary of %d tokens, the model of %d: it must be the same",
                             draft->model->config.n_vocab, n_vocab);
  if (!status) status = compile(draft, &options, err);
  if (status) runner_close(draft);
  return status;
}

void runner_close(struct runner *runner)
{
  if (runner->kv) runner->vtable->kv_destroy(runner->kv);
  if (runner->compiled) runner->vtable->program_destroy(runner->compiled);
  if (runner->program) program_destroy(runner->program);
  if (runner->backend && !runner->is_guest) runner->vtable->close(runner->backend);
  if (runner->model) model_close(runner->model);
  *runner = (struct runner){0};
}

struct rank_source { const struct model *model; const struct backend_vtable *inner; };

static enum sits_status make_rank_program(void *user, int32_t rank, int32_t n_ranks, struct program **out, struct sits_error *err)
{
  const struct rank_source *source = user;
  const struct backend_costs *costs = source->inner->costs.tokens <= 0 ? NULL : &source->inner->costs;
  return program_for_rank(source->model, source->inner->fusions, costs, rank, n_ranks, out, err);
}

enum sits_status runner_follow(const struct runner_options *options, struct sits_error *err)
{
  const char *device = options->device ? options->device : "auto";
  struct rank_source source = {.inner = backend_find(device)};
  struct model *model = NULL;
  if (!source.inner || !backend_nodes(source.inner))
    return sits_fail_param(err, SITS_UNSUPPORTED, "device", "device '%.32s' is not in this build or not on this machine", device);
  enum sits_status status = model_open(options->model_path, &model, err);
  source.model = model;
  if (!status) status = nodes_follow(options->backend.nodes, source.inner, &options->backend, make_rank_program, &source, err);
  model_close(model);
  return status;
}
