/* The load generator's client: streaming completions against an OpenAI-compatible server through libcurl's multi interface, all on the
 * calling thread. What is measured is what a client sees: arrival times of SSE chunks. */
#ifndef SITS_TOOLS_BENCH_SERVE_CLIENT_H
#define SITS_TOOLS_BENCH_SERVE_CLIENT_H

#include <stdbool.h>
#include <stdint.h>

struct serve_request {             /* planned by the caller */
  int64_t at_us;                   /* when to send, after the start; open loop only */
  int32_t n_prompt, n_output;
};

struct serve_plan {
  const char *url;                 /* http://host:port */
  const char *model;               /* NULL: leave the field out */
  const char *api_key;             /* NULL: none */
  const char *qos;                 /* X-QoS-Level header, NULL: none */
  const struct serve_request *requests; /* [n] */
  int64_t n_requests;
  int64_t concurrency;             /* closed loop: this many at a time; 0: open loop by at_us */
  int64_t duration_us;             /* closed loop: stop sending after that; 0: when all requests are sent */
  int32_t n_vocab;                 /* prompt token ids are drawn below it */
  uint64_t seed;
};

struct serve_result {
  int64_t n_sent, n_done, n_failed, n_refused; /* refused: 429 and 503 */
  int64_t n_without_retry;         /* of the refused, those whose answer names no Retry-After */
  int64_t n_prompt_tokens, n_output_tokens; /* of those done */
  int64_t elapsed_us;
  double *ttft_ms, *itl_ms, *e2e_ms; /* owned */
  int64_t n_ttft, n_itl, n_e2e;
  int64_t itl_capacity;
  char first_error[256];
};

/* Run the plan to its end. False when out of memory or when libcurl cannot start. */
bool serve_run(const struct serve_plan *plan, struct serve_result *result);
void serve_result_fini(struct serve_result *result);

#endif
