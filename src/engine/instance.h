/* An instance: one model, opened, compiled for a device, with its page memory and a running engine. What a daemon or a tool opens.
 *
 * instance_open is runner_open (engine/runner.h), then pages sized, then engine_create. The engine takes requests at once and works on them
 * after instance_start. Between the two the caller reads the tokenizer from instance_model and says which ids end an answer.
 * Everything is owned by the instance and closed in reverse order. One owner thread.
 */
#ifndef SITS_ENGINE_INSTANCE_H
#define SITS_ENGINE_INSTANCE_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "engine/engine_core.h"
#include "model/model.h"

struct instance;

/* Zero in a numeric field means "choose": the comment says what is chosen. */
struct instance_options {
  const char *model_path;
  const char *device;               /* "auto", "cpu", "cuda"; NULL = auto */
  int32_t device_ordinal;
  bool has_placement;               /* prompts are read on a device of their own (engine_placement.h); both hold the whole model */
  int32_t prefill_device, decode_device; /* ordinals, where has_placement; device_ordinal is not looked at then */
  bool always_hand_over;            /* has_placement: whether it pays or not, for comparison */
  int32_t n_ranks;                  /* devices the model is cut over; 0, 1 = one */
  int32_t devices[BACKEND_MAX_RANKS]; /* of the ranks, where has_devices */
  bool has_devices;
  const struct nodes_options *nodes; /* the ranks are processes and this one leads (backend/nodes.h); NULL: they are devices */
  bool compress_reduce;             /* ranks exchange large activations in 8 bits */
  int32_t collective_timeout_ms;    /* 0 = the backend's choice */
  int32_t n_threads;                /* 0 = one per core */
  const char *isa;                  /* NULL = auto */
  const char *prefill_weights;      /* backend_options.prefill_weights; NULL = auto */
  int32_t max_model_len;            /* 0 = the model's own, capped by what the page memory holds */
  int32_t max_num_seqs;             /* 0 = 64 on cpu, 256 on cuda */
  int32_t max_num_batched_tokens;   /* 0 = 512 on cpu, 8192 on cuda */
  uint64_t kv_cache_bytes;          /* 0 = from free memory (see below), never more than max_num_seqs full sequences need; a draft model's
                                       pages come out of it */
  double gpu_memory_utilization;    /* share of a GPU's memory for weights, workspaces and pages together when kv_cache_bytes is 0;
                                       0 = 0.9. On a CPU pages take half of the free memory. */
  const char *kv_codec;             /* "auto" (f16), "f16", "int8", "int4", "fp4", "fp4-sparse"; NULL = auto */
  int32_t kv_page_budget;           /* fp4-sparse: most pages that a sequence keeps; 0 = half of what max_model_len takes, which is 15 %
                                       of f16's bytes */
  bool prefix_caching;
  uint64_t swap_bytes;              /* host memory for swapped sequences, 0 = none */
  int64_t itl_target_us;            /* 0 = none */
  int64_t ttft_target_us;           /* 0 = none */
  int32_t max_waiting_requests;     /* 0 = 1024 */
  int64_t max_waiting_tokens;       /* 0 = no limit */
  int32_t spec_max_tokens;          /* 0 = no speculation */
  int32_t spec_max_running;         /* 0 = 8 */
  const char *draft_model_path;     /* a smaller model that guesses tokens; NULL = none. CPU, caches in f16 or int8 */
  const char *policy;               /* alps_policy_named; NULL = "alps" */
  int32_t n_sampler_threads;        /* helpers that draw tokens; 0 = none on cpu, up to 12 of the spare cores on cuda; -1 = none */
  engine_events_fn on_events;
  void *events_user;
  engine_step_fn on_step;           /* NULL = nobody asks */
  void *step_user;
};

struct instance_info {
  char device_name[64];
  uint64_t weight_bytes;            /* program: weights and workspaces on the device */
  uint64_t kv_bytes;                /* page memory */
  uint64_t draft_weight_bytes, draft_kv_bytes; /* of the draft model; 0 without one */
  uint64_t page_bytes;
  int32_t n_pages;
  int32_t n_reader_pages;           /* of the prefill device; 0 = none */
  int32_t page_budget;              /* 0 = none */
  int32_t max_model_len, max_num_seqs, max_num_batched_tokens;
  enum kv_codec kv_codec;
  int64_t open_us, compile_us;      /* time for reading the model, for packing it */
};

enum sits_status instance_open(const struct instance_options *options, struct instance **out, struct sits_error *err) SITS_MUST_CHECK;
/* The ids that end an answer; copied. Before instance_start only. */
enum sits_status instance_set_end_ids(struct instance *instance, const int32_t *ids, int32_t n_ids) SITS_MUST_CHECK;
/* Start the engine thread. */
enum sits_status instance_start(struct instance *instance, struct sits_error *err) SITS_MUST_CHECK;
/* Stop the engine (cancelling what still runs; engine_stop first for a grace period) and free everything. NULL is fine. */
void instance_close(struct instance *instance);

struct sits_engine *instance_engine(struct instance *instance);
bool instance_is_lost(const struct instance *instance); /* any thread: a rank is gone, requests will fail */
const struct model *instance_model(const struct instance *instance);
const struct model *instance_draft_model(const struct instance *instance); /* NULL: none */
void instance_info(const struct instance *instance, struct instance_info *out);

#endif
