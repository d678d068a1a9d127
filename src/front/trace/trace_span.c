/* See trace_span.h. OTLP's JSON: ids are hex, 64-bit integers are strings
 * (https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding). */
#include "front/trace/trace_span.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { KIND_INTERNAL = 1, KIND_SERVER = 2, STATUS_ERROR = 2 };

const char trace_span_tail[] = "]}]}]}";

/* ---- attributes ---- */

static void begin_attribute(struct buf *out, const char *key)
{
  if (out->size && out->data[out->size - 1] == '}') buf_append_char(out, ',');
  buf_printf(out, "{\"key\":\"%s\",\"value\":{", key);
}

static void add_text(struct buf *out, const char *key, const char *value)
{
  begin_attribute(out, key);
  buf_append_text(out, "\"stringValue\":\"");
  buf_append_json_escaped(out, value, strlen(value));
  buf_append_text(out, "\"}}");
}

static void add_int(struct buf *out, const char *key, int64_t value)
{
  begin_attribute(out, key);
  buf_printf(out, "\"intValue\":\"%lld\"}}", (long long)value);
}

static void add_double(struct buf *out, const char *key, double value)
{
  begin_attribute(out, key);
  buf_printf(out, "\"doubleValue\":%.9g}}", value);
}

static void add_bool(struct buf *out, const char *key, bool value)
{
  begin_attribute(out, key);
  buf_printf(out, "\"boolValue\":%s}}", value ? "true" : "false");
}

/* Both kinds of ends, when a call's choices ended in both ways. */
static void add_finish_reasons(struct buf *out, const struct api_usage *usage)
{
  if (!usage->n_stopped && !usage->n_cut) return;
  begin_attribute(out, "gen_ai.response.finish_reasons");
  buf_printf(out, "\"arrayValue\":{\"values\":[%s%s%s]}}}", usage->n_stopped ? "{\"stringValue\":\"stop\"}" : "",
             usage->n_stopped && usage->n_cut ? "," : "", usage->n_cut ? "{\"stringValue\":\"length\"}" : "");
}

void trace_span_head(struct buf *out)
{
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  buf_append_text(out, "{\"resourceSpans\":[{\"resource\":{\"attributes\":[");
  add_text(out, "service.name", "sits2026d");
  add_text(out, "service.version", SITS_VERSION);
  add_text(out, "host.name", host);
  add_int(out, "process.pid", getpid());
  buf_append_text(out, "]},\"scopeSpans\":[{\"scope\":{\"name\":\"sits2026\",\"version\":\"" SITS_VERSION "\"},\"spans\":[");
}

/* ---- spans ---- */

static void append_hex(struct buf *out, const unsigned char *bytes, int n)
{
  for (int i = 0; i < n; i++) buf_printf(out, "%02x", bytes[i]);
}

/* A point on the monotonic clock as OTLP's nanoseconds since 1970. */
static long long unix_ns(const struct api_record *record, int64_t monotonic_us)
{
  return (record->started_unix_us + monotonic_us - record->started_us) * 1000LL;
}

static void begin_span(struct buf *out, const struct api_record *record, const struct trace_ids *ids, int index, int kind, const char *name,
                       int64_t from_us, int64_t to_us)
{
  const unsigned char *parent = index ? ids->spans[0] : record->parent->is_set ? record->parent->span_id : NULL;
  buf_printf(out, "%s{\"traceId\":\"", index ? "," : "");
  append_hex(out, ids->trace, 16);
  buf_append_text(out, "\",\"spanId\":\"");
  append_hex(out, ids->spans[index], 8);
  if (parent) {
    buf_append_text(out, "\",\"parentSpanId\":\"");
    append_hex(out, parent, 8);
  }
  if (record->parent->state[0]) {
    buf_append_text(out, "\",\"traceState\":\"");
    buf_append_json_escaped(out, record->parent->state, strlen(record->parent->state));
  }
  buf_append_text(out, "\",\"name\":\"");
  buf_append_json_escaped(out, name, strlen(name));
  buf_printf(out, "\",\"kind\":%d,\"startTimeUnixNano\":\"%lld\",\"endTimeUnixNano\":\"%lld\",\"attributes\":[", kind,
             unix_ns(record, from_us), unix_ns(record, to_us > from_us ? to_us : from_us));
}

static void add_transport(struct buf *out, const struct api_record *record)
{
  add_text(out, "sits2026.request.id", record->id);
  if (record->peer[0]) add_text(out, "client.address", record->peer);
  if (record->tenant[0]) add_text(out, "sits2026.tenant", record->tenant);
  if (record->verb) {
    add_text(out, "http.request.method", record->verb);
    add_text(out, "http.route", record->route);
    if (record->code) add_int(out, "http.response.status_code", record->code);
  } else {
    add_text(out, "rpc.system", "grpc");
    add_text(out, "rpc.method", record->route);
    add_int(out, "rpc.grpc.status_code", record->code);
  }
  if (record->status) add_text(out, "error.type", sits_status_info(record->status)->name);
  if (record->client_left) add_bool(out, "sits2026.client_left", true);
}

static void add_gen_ai(struct buf *out, const struct api_record *record)
{
  const struct api_request *request = record->request;
  const struct api_usage *usage = &record->usage;
  const struct sits_request_timing *t = &usage->timing;
  if (!request) return;
  add_text(out, "gen_ai.operation.name", request->kind == API_CHAT ? "chat" : "text_completion");
  add_text(out, "gen_ai.provider.name", "sits2026");
  if (record->model) {
    add_text(out, "gen_ai.request.model", record->model);
    add_text(out, "gen_ai.response.model", record->model);
  }
  if (api_request_max_tokens(request) >= 0) add_int(out, "gen_ai.request.max_tokens", api_request_max_tokens(request));
  add_double(out, "gen_ai.request.temperature", request->temperature);
  add_double(out, "gen_ai.request.top_p", request->top_p);
  add_int(out, "gen_ai.request.choice.count", request->n);
  add_bool(out, "gen_ai.request.stream", request->stream);
  add_int(out, "gen_ai.usage.input_tokens", usage->n_prompt_tokens);
  add_int(out, "gen_ai.usage.output_tokens", usage->n_output_tokens);
  add_int(out, "gen_ai.usage.cached_input_tokens", usage->n_cached_tokens);
  add_finish_reasons(out, usage);
  if (t->n_preemptions) add_int(out, "sits2026.preemptions", t->n_preemptions);
  if (t->submitted_us && t->first_token_us)
    add_double(out, "gen_ai.latency.time_to_first_token", (double)(t->first_token_us - t->submitted_us) / 1e6);
}

static void end_span(struct buf *out, enum sits_status status)
{
  buf_append_char(out, ']');
  if (status && sits_status_info(status)->http >= 500) {
    buf_printf(out, ",\"status\":{\"code\":%d,\"message\":\"%s\"}", STATUS_ERROR, sits_status_info(status)->text);
  }
  buf_append_char(out, '}');
}

/* A stage that began; to_us 0: it lasted to the end of the request. */
static void append_stage(struct buf *out, const struct api_record *record, const struct trace_ids *ids, int *n, const char *name,
                         int64_t from_us, int64_t to_us)
{
  if (!from_us) return;
  begin_span(out, record, ids, *n, KIND_INTERNAL, name, from_us, to_us ? to_us : record->ended_us);
  end_span(out, SITS_OK);
  (*n)++;
}

int trace_span_append(struct buf *out, const struct api_record *record, const struct trace_ids *ids)
{
  const struct sits_request_timing *t = &record->usage.timing;
  char name[256];
  int n = 1;
  if (record->verb) snprintf(name, sizeof name, "%s %s", record->verb, record->route);
  else snprintf(name, sizeof name, "%s", record->route[0] == '/' ? record->route + 1 : record->route);
  begin_span(out, record, ids, 0, KIND_SERVER, name, record->started_us, record->ended_us);
  add_transport(out, record);
  add_gen_ai(out, record);
  end_span(out, record->status);
  if (record->kind && record->received_us > record->started_us)
    append_stage(out, record, ids, &n, "receive", record->started_us, record->received_us);
  if (record->request) append_stage(out, record, ids, &n, "prepare", record->received_us, t->submitted_us);
  int64_t queued_to_us = t->first_scheduled_us ? t->first_scheduled_us : t->done_us;
  int64_t prefilled_to_us = t->first_token_us ? t->first_token_us : t->done_us;
  append_stage(out, record, ids, &n, "queue", t->submitted_us, queued_to_us);
  append_stage(out, record, ids, &n, "prefill", t->first_scheduled_us, prefilled_to_us);
  append_stage(out, record, ids, &n, "decode", t->first_token_us, t->done_us);
  return out->failed ? 0 : n;
}
