/* Traces: one span a request and one a stage of it, sent to an OpenTelemetry collector as OTLP/HTTP in JSON
 * (https://opentelemetry.io/docs/specs/otlp/), with the gen_ai, http and rpc attributes of its semantic conventions.
 *
 * A request's span is the child of the span that its client named in traceparent (HTTP header, gRPC metadata) and carries the client's
 * trace id; without one it begins a trace. Sampling follows the client's flag, else the ratio by trace id, so that all who use the same
 * ratio keep the same traces.
 *
 * trace_record writes the spans on the caller's thread and queues them; one exporter thread gathers batches and posts them. What finds the
 * queue full, or what the collector does not take after three tries, is dropped and counted. Nothing but that thread waits for a network.
 *
 * Threads: trace_open, trace_close: one owner; trace_record: any. */
#ifndef SITS_FRONT_TRACE_TRACE_H
#define SITS_FRONT_TRACE_TRACE_H

#include "front/api/api_record.h"
#include "front/metrics/metrics.h"

struct trace;

struct trace_options {
  const char *endpoint;      /* "http://host:4318", to which /v1/traces is added, or a URL with a path, taken as it is */
  const char *headers;       /* "name=value,name=value", NULL: none */
  double ratio;              /* of traces without a sampling parent, 0..1 */
  int64_t queue_bytes;       /* of spans that wait; beyond it they are dropped */
  int64_t interval_us;       /* between two batches */
};

/* The strings are copied. SITS_CONFIG names an endpoint or header that cannot be used. metrics is borrowed. */
enum sits_status trace_open(const struct trace_options *options, struct metrics *metrics, struct trace **out, struct sits_error *err)
    SITS_MUST_CHECK;
/* Public records (answered probes and scrapes) are left out. Never waits. */
void trace_record(struct trace *trace, const struct api_record *record);
/* One try to send what is queued; all of it takes two to three seconds at most, also when a post hangs. NULL is fine. */
void trace_close(struct trace *trace);

#endif
