/* Kinds of clients on one open engine, played by one thread: engine_load.c has them and the scenario of tenants, engine_classes.c the
 * one of classes. Prompts are random, so that nothing comes from the prefix cache. */
#ifndef SITS_TOOLS_BENCH_ENGINE_LOAD_H
#define SITS_TOOLS_BENCH_ENGINE_LOAD_H

#include "tools/bench/engine_bench.h"

/* A request's way to its first token, monotonic. */
struct load_first { int64_t submitted_us, scheduled_us, token_us; };

/* One kind of client: open loop with Poisson arrivals at a rate, or closed loop with so many at a time. */
struct load_kind {
  const char *name;
  enum sits_class service_class;
  uint64_t tenant;
  int32_t n_prompt, n_output, concurrency;
  double rate;                     /* requests a second; 0 = closed loop */
  int32_t n_burst;                 /* sent at once when a phase begins, where there is a rate */
  bool is_awaited;                 /* a phase goes on, with the other kinds, until the first tokens of its requests have come */
  int32_t n_live, n_unread;        /* unread: to be counted, their first tokens have not come */
  int64_t next_us;
  uint64_t next_number;            /* of requests: the same number and tenant, the same prompt and time to the next */
  int64_t n_sent, n_refused, n_done, n_tokens; /* done and tokens (read and drawn): after the warm-up */
  struct load_first *firsts;       /* [most_firsts] of requests sent after the warm-up; the caller's */
  int64_t n_firsts, most_firsts;
};

struct load_client;
struct load { struct engine_run run; struct load_client *clients; int32_t n_vocab; double seconds; };

/* Sixteen sequences at once, 128 waiting. longest: of a request's tokens. False after a message; else closed with load_close. */
bool load_open(struct load *load, const struct engine_bench_options *o, int64_t longest, engine_step_fn on_step, void *step_user);
/* All kinds together for the options' seconds behind warm_us; whatever still runs then is cancelled. Counts add up over phases;
 * first_number: of each kind's first request. */
void load_phase(struct load *load, struct load_kind *kinds, int32_t n_kinds, uint64_t first_number, int64_t warm_us);
void load_close(struct load *load);

/* Results of a kind over so many seconds; says them on stderr too. */
json_t *load_row(const char *name, const struct load_kind *kind, double seconds);
/* Times to the first token, ms; ms has room for n_firsts. */
void load_ttft(const struct load_kind *kind, double *ms);

#endif
