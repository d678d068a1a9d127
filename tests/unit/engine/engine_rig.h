/* An engine over the fake backend, stepped by the test itself or by its own thread, and what a run alone must give. */
#ifndef SITS_TESTS_ENGINE_RIG_H
#define SITS_TESTS_ENGINE_RIG_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/mem.h"
#include "engine/engine_core.h"
#include "ref/fake_backend.h"

enum { RIG_VOCAB = 101, RIG_END = 7 };

/* As assert_true, but on any thread: cmocka's own jump back to the test, which only its thread may take. */
static inline void must(bool holds, const char *what, int line)
{
  if (holds) return;
  fprintf(stderr, "line %d: %s\n", line, what);
  abort();
}
#define MUST(condition) must(condition, #condition, __LINE__)

struct rig {
  struct fake_rig fake;
  struct sits_engine *engine;
};

static inline struct engine_options rig_options(void)
{
  return (struct engine_options){.n_vocab = RIG_VOCAB, .max_model_len = 1024, .max_num_seqs = 8, .max_num_batched_tokens = 128,
                                 .max_rows = 32, .prefix_caching = true};
}

static inline void rig_open(struct rig *rig, struct engine_options options, int32_t n_pages)
{
  static const int32_t end = RIG_END;
  struct sits_error err;
  struct fake_options fake = {.n_vocab = options.n_vocab, .max_batch_tokens = options.max_num_batched_tokens, .max_rows = options.max_rows,
                              .n_pages = n_pages, .n_columns = options.geometry.n_kv_heads};
  log_set_level(LOG_WARN);
  assert_int_equal(fake_rig_init(&rig->fake, &fake), 0);
  if (!options.vtable) options.vtable = fake_vtable();
  options.program = rig->fake.program;
  options.kv = rig->fake.kv;
  rig->fake.geometry.codec = options.geometry.codec; /* F16 where the test says nothing */
  options.geometry = rig->fake.geometry;
  options.end_ids = &end;
  options.n_end_ids = 1;
  assert_int_equal(engine_create(&options, &rig->engine, &err), SITS_OK);
}

static inline void rig_close(struct rig *rig)
{
  engine_stop(rig->engine, 0);
  engine_destroy(rig->engine);
  fake_rig_fini(&rig->fake);
}

static inline struct sits_sampling rig_greedy(int32_t max_tokens)
{
  return (struct sits_sampling){.temperature = 0, .top_p = 1, .repetition_penalty = 1, .max_tokens = max_tokens, .n_top_logprobs = -1,
                                .n_prompt_logprobs = -1};
}

static inline void rig_prompt(int32_t *tokens, int32_t n, uint32_t seed)
{
  for (int32_t i = 0; i < n; i++) {
    seed = seed * 1664525u + 1013904223u;
    tokens[i] = (int32_t)(8 + (seed >> 8) % (RIG_VOCAB - 8));
  }
}

static inline struct sits_request *rig_submit(struct rig *rig, const int32_t *prompt, int32_t n, int32_t n_choices,
                                              struct sits_sampling sampling)
{
  struct sits_request_params params = {.prompt = prompt, .n_prompt = n, .n_choices = n_choices, .sampling = sampling,
                                       .service_class = SITS_CLASS_NORMAL, .id = "t"};
  struct sits_request *request = NULL;
  struct sits_error err = {0};
  enum sits_status status = sits_engine_submit(rig->engine, &params, &request, &err);
  if (status != SITS_OK) print_error("submit: %s\n", err.text);
  assert_int_equal(status, SITS_OK);
  return request;
}

/* What a choice said: tokens, then its end. */
struct rig_answer {
  int32_t tokens[2048];
  int32_t n;
  int32_t n_finish;
  enum sits_finish finish;
  enum sits_status status;
  int32_t stop_token;
};

/* Take the events that are there; answers[choice]. Returns how many choices have ended so far. */
static inline int32_t rig_drain(struct sits_request *request, struct rig_answer *answers, int32_t n_choices)
{
  struct sits_event e;
  while (sits_request_poll(request, &e) == SITS_OK) {
    MUST(e.choice >= 0 && e.choice < n_choices);
    struct rig_answer *a = &answers[e.choice];
    MUST(a->n_finish == 0); /* nothing comes after the end */
    if (e.kind == SITS_EVENT_TOKEN) a->tokens[a->n++] = e.token;
    if (e.kind != SITS_EVENT_FINISH) continue;
    a->n_finish++;
    a->finish = e.finish;
    a->status = e.status;
    a->stop_token = e.token;
  }
  int32_t n = 0;
  for (int32_t i = 0; i < n_choices; i++) n += answers[i].n_finish;
  return n;
}

static inline void rig_run(struct rig *rig, struct sits_request *request, struct rig_answer *answers, int32_t n_choices)
{
  for (int32_t i = 0; i < 100000 && rig_drain(request, answers, n_choices) < n_choices; i++) engine_step_once(rig->engine);
  assert_int_equal(rig_drain(request, answers, n_choices), n_choices);
}

/* Greedy continuation of a prompt by the fake model, straight from its definition. */
static inline void rig_expect(const int32_t *prompt, int32_t n_prompt, int32_t max_tokens, bool ignore_eos, struct rig_answer *out)
{
  static _Thread_local int32_t context[8192];
  memcpy(context, prompt, (size_t)n_prompt * sizeof *prompt);
  *out = (struct rig_answer){.n_finish = 1, .finish = SITS_FINISH_LENGTH, .stop_token = -1};
  while (out->n < max_tokens) {
    int32_t token = fake_next(RIG_VOCAB, context, n_prompt + out->n);
    if (token == RIG_END && !ignore_eos) {
      out->finish = SITS_FINISH_STOP;
      out->stop_token = token;
      return;
    }
    context[n_prompt + out->n] = token;
    out->tokens[out->n++] = token;
  }
}

static inline void rig_same(const struct rig_answer *got, const struct rig_answer *expected)
{
  assert_int_equal(got->n_finish, 1);
  assert_int_equal(got->finish, expected->finish);
  assert_int_equal(got->n, expected->n);
  assert_memory_equal(got->tokens, expected->tokens, (size_t)got->n * sizeof(int32_t));
}

/* After everything: nothing runs, waits or is held. */
static inline void rig_idle(struct rig *rig)
{
  struct engine_stats s;
  engine_step_once(rig->engine);
  engine_stats(rig->engine, &s);
  assert_int_equal(s.n_running, 0);
  assert_int_equal(s.n_waiting, 0);
  assert_int_equal(s.n_pages_used, 0);
  assert_int_equal(s.n_pages_free + s.n_pages_cached, s.n_pages_total);
  assert_int_equal(s.n_host_pages_free, s.n_host_pages_total);
}

#endif
