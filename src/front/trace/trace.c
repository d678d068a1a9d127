/* See trace.h. A queued blob is one byte, the number of spans, and their JSON. */
#include "front/trace/trace.h"

#include <curl/curl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#include "base/blob_queue.h"
#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "front/trace/trace_span.h"

#define MAX_SPANS_BYTES (64u << 10)   /* of one request */
#define MAX_BATCH_BYTES (4u << 20)    /* what collectors take by default */
#define MAX_REPLY_BYTES (64u << 10)
#define POST_MS 10000L
#define CLOSE_US 2000000               /* for all that is left when the daemon stops */
#define N_TRIES 3
#define COMPLAIN_US 30000000

struct trace {
  struct trace_options options;     /* [init] */
  struct metrics *metrics;          /* [init] */
  char *url;                        /* [init] owned */
  struct curl_slist *headers;       /* [init] */
  struct blob_queue queue;
  pthread_t thread;
  _Atomic int64_t close_by_us;      /* [atomic] monotonic: when the last post must be over; 0 until the daemon stops */
  CURL *curl;                       /* [exporter] */
  struct buf body, reply;           /* [exporter] */
  int64_t complained_us;            /* [exporter] */
};

/* ---- records ---- */

static bool is_sampled(const struct trace *trace, const struct api_trace_parent *parent, const unsigned char id[16])
{
  if (parent->is_set) return parent->is_sampled;
  uint64_t number = 0;
  for (int i = 8; i < 16; i++) number = number << 8 | id[i];
  return (double)(number >> 1) < trace->options.ratio * 9223372036854775808.0;
}

void trace_record(struct trace *trace, const struct api_record *record)
{
  struct trace_ids ids;
  if (record->is_public || getrandom(&ids, sizeof ids, GRND_NONBLOCK) != (ssize_t)sizeof ids) return;
  if (record->parent->is_set) memcpy(ids.trace, record->parent->trace_id, sizeof ids.trace);
  if (!is_sampled(trace, record->parent, ids.trace)) return;
  struct buf spans;
  buf_init(&spans, MAX_SPANS_BYTES);
  buf_append_char(&spans, '?');
  int n = trace_span_append(&spans, record, &ids);
  if (n) spans.data[0] = (char)n;
  if (!n || !blob_queue_put(&trace->queue, spans.data, spans.size)) metrics_add(trace->metrics, METRICS_TRACE_NO_ROOM, n ? n : 1);
  buf_fini(&spans);
}

/* ---- the exporter ---- */

static size_t take_reply(char *bytes, size_t size, size_t n, void *context)
{
  buf_append(context, bytes, size * n); /* what goes over the limit is of no interest */
  return size * n;
}

/* What a collector that answers 200 refused all the same. */
static int64_t rejected_spans(const struct trace *trace)
{
  json_t *root = NULL;
  if (!trace->reply.size || json_parse(trace->reply.data, trace->reply.size, &json_limits_request, &root, NULL)) return 0;
  const json_t *value = json_object_get(json_object_get(root, "partialSuccess"), "rejectedSpans");
  int64_t n = json_is_integer(value) ? json_integer_value(value) : json_is_string(value) ? strtoll(json_string_value(value), NULL, 10) : 0;
  json_decref(root);
  return n > 0 ? n : 0;
}

static void complain(struct trace *trace, const char *why)
{
  int64_t now_us = clock_monotonic_us();
  if (trace->complained_us && now_us - trace->complained_us < COMPLAIN_US) return;
  trace->complained_us = now_us;
  log_warn("trace", "spans are dropped: %s: %s", trace->url, why);
}

static bool is_closed_long(const struct trace *trace)
{
  int64_t close_by_us = atomic_load(&trace->close_by_us);
  return close_by_us && clock_monotonic_us() >= close_by_us;
}

/* curl asks about once a second: a post that hangs must not hold the stop up. */
static int watch_close(void *context, curl_off_t n_down, curl_off_t down, curl_off_t n_up, curl_off_t up)
{
  return is_closed_long(context);
}

enum outcome { TAKEN, REFUSED, RETRY };

static enum outcome post_once(struct trace *trace, char why[CURL_ERROR_SIZE])
{
  long code = 0;
  int64_t close_by_us = atomic_load(&trace->close_by_us);
  long left_ms = close_by_us ? (long)((close_by_us - clock_monotonic_us()) / 1000) : POST_MS;
  buf_clear(&trace->reply);
  snprintf(why, CURL_ERROR_SIZE, "the daemon stops");
  if (left_ms <= 0) return REFUSED;
  why[0] = '\0';
  curl_easy_setopt(trace->curl, CURLOPT_TIMEOUT_MS, left_ms);
  curl_easy_setopt(trace->curl, CURLOPT_ERRORBUFFER, why);
  curl_easy_setopt(trace->curl, CURLOPT_POSTFIELDS, trace->body.data);
  curl_easy_setopt(trace->curl, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)trace->body.size);
  CURLcode failed = curl_easy_perform(trace->curl);
  curl_easy_setopt(trace->curl, CURLOPT_ERRORBUFFER, NULL);
  if (failed) {
    if (failed == CURLE_ABORTED_BY_CALLBACK) snprintf(why, CURL_ERROR_SIZE, "the daemon stops");
    if (!why[0]) snprintf(why, CURL_ERROR_SIZE, "%s", curl_easy_strerror(failed));
    return RETRY;
  }
  curl_easy_getinfo(trace->curl, CURLINFO_RESPONSE_CODE, &code);
  if (code >= 200 && code < 300) return TAKEN;
  snprintf(why, CURL_ERROR_SIZE, "status %ld", code);
  return code == 429 || code == 502 || code == 503 || code == 504 ? RETRY : REFUSED;
}

/* Send the body: three tries, a second and two apart; one, and none that is late, once the daemon stops. */
static void post(struct trace *trace, int64_t n_spans)
{
  char why[CURL_ERROR_SIZE];
  enum outcome outcome = RETRY;
  for (int i = 0; i < N_TRIES && outcome == RETRY; i++) {
    if (i) blob_queue_wait_close(&trace->queue, i * 1000000);
    bool is_last = blob_queue_is_closed(&trace->queue);
    if (is_last && i) break;
    outcome = post_once(trace, why);
  }
  int64_t n_refused = outcome == TAKEN ? rejected_spans(trace) : n_spans;
  if (n_refused > n_spans) n_refused = n_spans;
  metrics_add(trace->metrics, METRICS_TRACE_EXPORTED, n_spans - n_refused);
  metrics_add(trace->metrics, METRICS_TRACE_REFUSED, n_refused);
  if (n_refused) complain(trace, outcome == TAKEN ? "the collector rejected some" : why);
}

/* Put a list together into bodies and send them. */
static void export(struct trace *trace, struct blob *list)
{
  while (list) {
    int64_t n_spans = 0;
    buf_clear(&trace->body);
    trace_span_head(&trace->body);
    for (; list && (!n_spans || trace->body.size + list->n_bytes < MAX_BATCH_BYTES); list = blob_free_first(list)) {
      if (n_spans) buf_append_char(&trace->body, ',');
      n_spans += list->bytes[0];
      buf_append(&trace->body, list->bytes + 1, list->n_bytes - 1);
    }
    buf_append_text(&trace->body, trace_span_tail);
    if (trace->body.failed) metrics_add(trace->metrics, METRICS_TRACE_NO_ROOM, n_spans);
    else post(trace, n_spans);
  }
}

static void *exporter_main(void *argument)
{
  struct trace *trace = argument;
  bool is_closing = false;
  while (!is_closing) {
    blob_queue_wait_close(&trace->queue, trace->options.interval_us);
    is_closing = blob_queue_is_closed(&trace->queue);
    export(trace, blob_queue_take(&trace->queue, 0));
  }
  return NULL;
}

/* ---- start and stop ---- */

static enum sits_status make_url(struct trace *trace, const char *endpoint, struct sits_error *err)
{
  struct buf url;
  buf_init(&url, 4096);
  bool is_http = !strncasecmp(endpoint, "http://", 7) || !strncasecmp(endpoint, "https://", 8);
  if (!is_http) return sits_fail_param(err, SITS_CONFIG, "otlp-endpoint", "otlp-endpoint must begin with http:// or https://");
  const char *authority = strstr(endpoint, "://") + 3, *slash = strchr(authority, '/');
  if (memchr(authority, '@', strcspn(authority, "/?#")))
    return sits_fail_param(err, SITS_CONFIG, "otlp-endpoint",
                           "otlp-endpoint holds a user or a password, which would be logged; otlp-headers takes an authorization header");
  if (!slash) buf_printf(&url, "%s/v1/traces", endpoint);
  else buf_printf(&url, "%s%s", endpoint, slash[1] ? "" : "v1/traces");
  trace->url = buf_take(&url, NULL);
  return trace->url ? SITS_OK : sits_fail_param(err, SITS_CONFIG, "otlp-endpoint", "otlp-endpoint is too long");
}

static bool add_header(struct trace *trace, const char *line)
{
  struct curl_slist *list = curl_slist_append(trace->headers, line);
  if (list) trace->headers = list;
  return list != NULL;
}

/* "name=value,name=value" as headers beside the content type. */
static enum sits_status make_headers(struct trace *trace, const char *text, struct sits_error *err)
{
  bool ok = add_header(trace, "Content-Type: application/json") && add_header(trace, "Expect:");
  while (ok && text && *text) {
    text += strspn(text, " "); /* a line that begins with a blank would continue the header before it */
    size_t n = strcspn(text, ","), n_name = strcspn(text, "=");
    struct buf line;
    if (!n_name || n_name >= n || memchr(text, '\n', n) || memchr(text, '\r', n))
      return sits_fail_param(err, SITS_CONFIG, "otlp-headers", "otlp-headers takes name=value,name=value");
    buf_init(&line, 16384);
    ok = buf_printf(&line, "%.*s: %.*s", (int)n_name, text, (int)(n - n_name - 1), text + n_name + 1) && add_header(trace, line.data);
    buf_fini(&line);
    text += n + (text[n] == ',');
  }
  return ok ? SITS_OK : sits_fail(err, SITS_NOMEM, "no memory for the traces");
}

static enum sits_status make_curl(struct trace *trace, struct sits_error *err)
{
  trace->curl = curl_global_init(CURL_GLOBAL_DEFAULT) ? NULL : curl_easy_init();
  if (!trace->curl) return sits_fail(err, SITS_NOMEM, "no memory for the traces");
  curl_easy_setopt(trace->curl, CURLOPT_URL, trace->url);
  curl_easy_setopt(trace->curl, CURLOPT_HTTPHEADER, trace->headers);
  curl_easy_setopt(trace->curl, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(trace->curl, CURLOPT_CONNECTTIMEOUT_MS, 3000L);
  curl_easy_setopt(trace->curl, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(trace->curl, CURLOPT_USERAGENT, "sits2026d/" SITS_VERSION);
  curl_easy_setopt(trace->curl, CURLOPT_NOPROGRESS, 0L);
  curl_easy_setopt(trace->curl, CURLOPT_XFERINFOFUNCTION, watch_close);
  curl_easy_setopt(trace->curl, CURLOPT_XFERINFODATA, trace);
  curl_easy_setopt(trace->curl, CURLOPT_WRITEFUNCTION, take_reply);
  curl_easy_setopt(trace->curl, CURLOPT_WRITEDATA, &trace->reply);
  return SITS_OK;
}

static void release(struct trace *trace)
{
  if (trace->curl) curl_easy_cleanup(trace->curl);
  curl_slist_free_all(trace->headers);
  buf_fini(&trace->body);
  buf_fini(&trace->reply);
  blob_queue_fini(&trace->queue);
  mem_free(trace->url);
  mem_free(trace);
}

enum sits_status trace_open(const struct trace_options *options, struct metrics *metrics, struct trace **out, struct sits_error *err)
{
  struct trace *trace = mem_calloc(1, sizeof *trace);
  if (!trace) return sits_fail(err, SITS_NOMEM, "no memory for the traces");
  trace->options = *options;
  trace->options.endpoint = trace->options.headers = NULL; /* borrowed only here */
  trace->metrics = metrics;
  blob_queue_init(&trace->queue, (size_t)options->queue_bytes);
  buf_init(&trace->body, MAX_BATCH_BYTES + MAX_SPANS_BYTES + 4096);
  buf_init(&trace->reply, MAX_REPLY_BYTES);
  enum sits_status status = make_url(trace, options->endpoint, err);
  if (!status) status = make_headers(trace, options->headers, err);
  if (!status) status = make_curl(trace, err);
  int failed = status ? 0 : pthread_create(&trace->thread, NULL, exporter_main, trace);
  if (failed) status = sits_fail(err, SITS_INTERNAL, "the traces' thread could not be started: %s", strerror(failed));
  if (status) {
    release(trace);
    return status;
  }
  log_info("trace", "spans go to %s", trace->url);
  *out = trace;
  return SITS_OK;
}

void trace_close(struct trace *trace)
{
  if (!trace) return;
  atomic_store(&trace->close_by_us, clock_monotonic_us() + CLOSE_US);
  blob_queue_close(&trace->queue);
  pthread_join(trace->thread, NULL);
  release(trace);
}
