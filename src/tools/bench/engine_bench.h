/* What the scenarios of sits2026-bench engine share: the options, an open engine, prompts. engine.c has the definitions. */
#ifndef SITS_TOOLS_BENCH_ENGINE_BENCH_H
#define SITS_TOOLS_BENCH_ENGINE_BENCH_H

#include <jansson.h>

#include "engine/instance.h"

struct engine_bench_options {
  const char *model, *device, *scenario, *text, *kv_cache_dtype, *targets, *json, *trace, *speeds;
  int64_t threads, prompt, chats, draft, streams, pairs, texts, output, seconds, quiet_tokens, stream_prompt, max_num_seqs,
      step_tokens;
  double itl_target_ms, ttft_target_ms, quiet_ms, kv_cache_gb;
};

struct engine_run {
  struct instance *instance;
  struct sits_engine *engine;
  const struct engine_bench_options *options;
};

/* Open and start what the options name, with more set as given; longest: tokens of the longest request to come, prompt and answer. False
 * after a message on stderr, also when the model does not take that many. Close with instance_close. */
bool engine_bench_open(struct engine_run *run, const struct engine_bench_options *options, struct instance_options more, int64_t longest);
/* n random ids, the same for the same seed. */
void engine_bench_prompt(int32_t *tokens, int64_t n, int32_t n_vocab, uint32_t seed);
void engine_bench_nap(void);
/* One greedy choice of max_tokens, whatever its tokens. NULL after a message; released by the caller. */
struct sits_request *engine_bench_submit(struct engine_run *run, const int32_t *prompt, int64_t n, int32_t max_tokens);
struct sits_request *engine_bench_submit_as(struct engine_run *run, enum sits_class service_class, const int32_t *prompt, int64_t n,
                                            int32_t max_tokens);
/* Take its events until it has ended. NULL is fine. */
void engine_bench_await(struct sits_request *request);

/* A request's tokens as they come. */
struct engine_bench_stream { struct sits_request *request; int64_t last_us, n; bool is_done; };
/* Take its events that are there; the gaps between its tokens (ms) go to gaps[*n_gaps..most). */
void engine_bench_take(struct engine_bench_stream *stream, double *gaps, int64_t most, int64_t *n_gaps);

/* engine_stall.c: append its rows; false after a message. */
bool engine_bench_stall(const struct engine_bench_options *options, json_t *rows);
/* engine_classes.c, engine_load.c: the same. */
bool engine_bench_classes(const struct engine_bench_options *options, json_t *rows);
bool engine_bench_tenants(const struct engine_bench_options *options, json_t *rows);
/* engine_speculation.c, engine_pair.c, engine_swap.c: the same */
bool engine_bench_swap(const struct engine_bench_options *options, json_t *rows);
bool engine_bench_speculation(const struct engine_bench_options *options, json_t *rows);
bool engine_bench_placement(const struct engine_bench_options *options, json_t *rows);

#endif
