/* Metrics: what the front ends count, and the text of /metrics (Prometheus exposition format 0.0.4).
 *
 * Names, types and units are vLLM's under the prefix sits2026: with the label model_name, so that dashboards, autoscalers and gateways made
 * for vLLM work after changing the prefix. What the engine measured comes as one struct engine_stats, read from memory at scrape time and
 * never through the engine's queue.
 *
 * Threads: metrics_set_* before traffic; everything else is thread-safe and lock-free. */
#ifndef SITS_FRONT_METRICS_METRICS_H
#define SITS_FRONT_METRICS_METRICS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "engine/engine_core.h"
#include "front/api/api_record.h"

struct metrics;

enum metrics_counter {
  METRICS_REJECTED_QUEUE,        /* requests that some queue had no room for */
  METRICS_REJECTED_QUOTA,        /* requests over their key's quota */
  METRICS_REJECTED_UNAVAILABLE,  /* requests that came while nothing is served */
  METRICS_DISCONNECTS,           /* requests whose client left before the end */
  METRICS_SLOW_READERS,          /* times a stream was paused because its client did not read */
  METRICS_AUDIT_LINES,           /* audit lines written */
  METRICS_AUDIT_LOST,            /* audit lines that the writer's queue had no room for */
  METRICS_AUDIT_ERRORS,          /* failed writes of the audit log; the lines are kept and written again */
  METRICS_TRACE_EXPORTED,        /* spans that the collector took */
  METRICS_TRACE_NO_ROOM,         /* spans that the exporter's queue had no room for */
  METRICS_TRACE_REFUSED,         /* spans that the collector did not take */
  METRICS_RELOADED,              /* keys and certificates read again on SIGHUP, each counted */
  METRICS_RELOAD_REFUSED,        /* those that could not be, so that the old ones stay */
  METRICS_COUNTER_COUNT
};

enum sits_status metrics_create(struct metrics **out) SITS_MUST_CHECK;
void metrics_destroy(struct metrics *metrics);

void metrics_set_model(struct metrics *metrics, const char *model_name);                  /* the label's value, copied; cut at 176 bytes */
void metrics_set_routes(struct metrics *metrics, const char *const *names, int n_routes); /* borrowed constants */

void metrics_add(struct metrics *metrics, enum metrics_counter counter, int64_t n);
int64_t metrics_counter_value(const struct metrics *metrics, enum metrics_counter counter);
/* A request that ends with this status: counted where it was refused before scheduling. */
void metrics_refused(struct metrics *metrics, enum sits_status status);
/* From the engine handing over a token to its bytes being handed to the socket's writer. */
void metrics_delivery(struct metrics *metrics, int64_t latency_us);
/* One answered HTTP request; route is an index into the route names. */
void metrics_http(struct metrics *metrics, int route, int http_status);

/* gRPC calls by method and status; method is an index into the names, borrowed constants. */
void metrics_set_methods(struct metrics *metrics, const char *const *names, int n_methods);
void metrics_grpc_begin(struct metrics *metrics);
void metrics_grpc_end(struct metrics *metrics, int method, int grpc_status);

/* A request that is over: counters by tenant and class, stages. */
void metrics_request(struct metrics *metrics, const struct api_record *record);
/* Requests handed to the front ends' workers (parsing, tokenizing) and not taken yet: +1, -1. */
void metrics_reading(struct metrics *metrics, int64_t change);

/* What the model takes of its device; set once it is loaded. codec is the KV pages' and a constant. */
struct metrics_memory { const char *codec; uint64_t page_bytes, weight_bytes, kv_bytes, draft_weight_bytes, draft_kv_bytes; };
void metrics_set_memory(struct metrics *metrics, const struct metrics_memory *memory);
/* Whether the audit log's lines are written; shown once it was told. */
void metrics_set_audit(struct metrics *metrics, bool is_writing);
/* Look for GPUs, where the machine has NVML (metrics_gpu.h). */
void metrics_watch_gpus(struct metrics *metrics);

struct metrics_now {
  const struct engine_stats *engine; /* NULL while there is none */
  int64_t page_tokens;
  int64_t heartbeat_age_us;          /* negative: the device failed */
  int64_t n_in_flight;               /* HTTP requests being served */
};
void metrics_render(struct metrics *metrics, const struct metrics_now *now, struct buf *out);

#endif
