/* A model ready to run on a device: file -> model -> program -> compiled program, and page memory for its cache.
 *
 * The one place where these steps are put together; the engine's instance and the tools that drive a backend directly both start here.
 * Life: runner_open, then runner_kv_create once the page count is known, runner_close. One thread.
 */
#ifndef SITS_ENGINE_RUNNER_H
#define SITS_ENGINE_RUNNER_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "backend/program.h"
#include "model/model.h"
#include "sits2026/status.h"

struct runner_options {
  const char *model_path;
  const char *device;              /* "auto", "cpu", "cuda" */
  const char *kv_codec;            /* "auto" (an engine file's own, else f16), "f16", "int8", "int4", "fp4", "fp4-sparse" */
  bool unfused;                    /* plain ops only, for comparison */
  const char *plan_costs;          /* file of graph/graph_costs.h that fusions are weighed by; NULL: the backend's own costs */
  struct backend_options backend;
};

struct runner {
  struct model *model;
  struct program *program;
  const struct backend_vtable *vtable;
  struct backend *backend;
  struct backend_program *compiled;
  struct backend_kv *kv;           /* NULL until runner_kv_create */
  enum kv_codec codec;
  struct kv_geometry geometry;     /* n_pages is set by runner_kv_create, max_tokens before it by who knows */
  uint64_t page_bytes;
  int64_t open_us, compile_us;     /* what opening took */
  bool is_guest;                   /* the backend is another runner's */
};

/* Errors name the file, tensor or option. On failure nothing is left open. */
enum sits_status runner_open(struct runner *runner, const struct runner_options *options, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status runner_kv_create(struct runner *runner, int32_t n_pages, struct sits_error *err) SITS_MUST_CHECK;
/* A second model on the backend of `host`, its cache in f16. It is closed before its host. SITS_CONFIG naming draft-model when its
 * vocabulary has another size. */
enum sits_status runner_open_draft(struct runner *draft, const struct runner *host, const char *path, struct sits_error *err)
    SITS_MUST_CHECK;
void runner_close(struct runner *runner); /* half-open is fine */

/* A rank other than 0 of a model cut over processes (backend/nodes.h): opens the model and serves the leader until it closes (SITS_OK) or
 * a process is lost (SITS_DEVICE). options->backend.nodes is set; the leader decides sizes and caches. */
enum sits_status runner_follow(const struct runner_options *options, struct sits_error *err) SITS_MUST_CHECK;

#endif
