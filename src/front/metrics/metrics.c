/* See metrics.h. To add a counter: an enum value and a row of counter_rows; an engine figure: a row in render_engine. */
#include "front/metrics/metrics.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "front/metrics/metrics_gpu.h"
#include "front/metrics/metrics_process.h"
#include "front/metrics/metrics_request.h"
#include "front/metrics/metrics_text.h"

#define MAX_ROUTES 24
#define N_STATUS_CLASSES 6
#define MAX_METHODS 24
#define N_GRPC_STATUSES 17
#define LABEL_BYTES 192

/* Upper bounds of the delivery histogram in microseconds. */
static const int64_t delivery_bounds_us[] = {50,    100,   250,   500,   1000,  2000,   3000,   5000,   7500,
                                             10000, 15000, 20000, 30000, 50000, 100000, 500000, 1000000};
#define N_DELIVERY (sizeof delivery_bounds_us / sizeof *delivery_bounds_us)

struct delivery {
  _Atomic int64_t counts[N_DELIVERY + 1];              /* not cumulative; the last is +Inf */
  _Atomic int64_t sum_us;
};

struct counter_row { const char *name, *label, *help; }; /* rows of one name stand together, help on the first */

static const struct counter_row counter_rows[METRICS_COUNTER_COUNT] = {
  [METRICS_REJECTED_QUEUE] = {"admission_rejections_total", ",reason=\"queue_full\"", "Requests refused before scheduling, by reason."},
  [METRICS_REJECTED_QUOTA] = {"admission_rejections_total", ",reason=\"rate_limit\"", ""},
  [METRICS_REJECTED_UNAVAILABLE] = {"admission_rejections_total", ",reason=\"unavailable\"", ""},
  [METRICS_DISCONNECTS] = {"client_disconnects_total", "", "Requests whose client left before the end."},
  [METRICS_SLOW_READERS] = {"slow_reader_stalls_total", "", "Times a stream was paused because its client did not read."},
  [METRICS_AUDIT_LINES] = {"audit_lines_total", "", "Lines written to the audit log."},
  [METRICS_AUDIT_LOST] = {"audit_lines_lost_total", "", "Lines that the audit log's queue had no room for."},
  [METRICS_AUDIT_ERRORS] = {"audit_write_errors_total", "", "Failed writes of the audit log; what they held is written later."},
  [METRICS_TRACE_EXPORTED] = {"trace_spans_exported_total", "", "Spans that the collector took."},
  [METRICS_TRACE_NO_ROOM] = {"trace_spans_dropped_total", ",reason=\"queue_full\"", "Spans that were lost, by reason."},
  [METRICS_TRACE_REFUSED] = {"trace_spans_dropped_total", ",reason=\"export_failed\"", ""},
  [METRICS_RELOADED] = {"reloads_total", ",outcome=\"ok\"",
                        "API keys, certificates of HTTP and of gRPC read again on SIGHUP; refused ones stay as they were."},
  [METRICS_RELOAD_REFUSED] = {"reloads_total", ",outcome=\"refused\"", ""},
};

struct metrics {
  _Atomic int64_t counters[METRICS_COUNTER_COUNT];     /* [atomic] */
  struct delivery token_delivery;                      /* [atomic] */
  _Atomic int64_t http[MAX_ROUTES][N_STATUS_CLASSES];  /* [atomic] */
  const char *const *routes;                           /* [init] [n_routes] */
  int n_routes;                                        /* [init] */
  _Atomic int64_t grpc[MAX_METHODS][N_GRPC_STATUSES];  /* [atomic] */
  _Atomic int64_t n_grpc;                              /* [atomic] calls being served */
  const char *const *methods;                          /* [init] [n_methods] */
  int n_methods;                                       /* [init] 0 without gRPC */
  _Atomic int64_t n_reading;                           /* [atomic] requests that wait for a front end's worker */
  struct metrics_requests *requests;                   /* [init] */
  struct metrics_gpu *gpu;                             /* [init] NULL: none */
  struct metrics_memory memory;                        /* [init] written before has_memory */
  atomic_bool has_memory;                              /* [atomic] */
  atomic_bool has_audit, is_audit_writing;             /* [atomic] */
  char label[LABEL_BYTES];                             /* [init] model_name="..." with escapes */
};

enum sits_status metrics_create(struct metrics **out)
{
  struct metrics *metrics = mem_calloc(1, sizeof *metrics);
  if (!metrics) return SITS_NOMEM;
  metrics->requests = metrics_requests_create();
  if (!metrics->requests) {
    mem_free(metrics);
    return SITS_NOMEM;
  }
  metrics_set_model(metrics, "");
  *out = metrics;
  return SITS_OK;
}

void metrics_destroy(struct metrics *metrics)
{
  if (!metrics) return;
  metrics_gpu_stop(metrics->gpu);
  metrics_requests_destroy(metrics->requests);
  mem_free(metrics);
}

void metrics_watch_gpus(struct metrics *metrics) { metrics->gpu = metrics_gpu_start(); }

void metrics_set_memory(struct metrics *metrics, const struct metrics_memory *memory)
{
  metrics->memory = *memory;
  atomic_store(&metrics->has_memory, true);
}

void metrics_set_audit(struct metrics *metrics, bool is_writing)
{
  atomic_store(&metrics->is_audit_writing, is_writing);
  atomic_store(&metrics->has_audit, true);
}

void metrics_request(struct metrics *metrics, const struct api_record *record) { metrics_requests_take(metrics->requests, record); }

void metrics_reading(struct metrics *metrics, int64_t change)
{
  atomic_fetch_add_explicit(&metrics->n_reading, change, memory_order_relaxed);
}

void metrics_set_model(struct metrics *metrics, const char *model_name)
{
  size_t n = 0;
  static const char head[] = "model_name=\"";
  for (; head[n]; n++) metrics->label[n] = head[n];
  for (const char *c = model_name; *c && n < LABEL_BYTES - 4;) {
    size_t length = 1;
    bool is_whole = utf8_sequence(c, strlen(c), &length) == UTF8_VALID; /* scrapers refuse a page with any byte that is none */
    if (is_whole && n + length > LABEL_BYTES - 3) break;
    if (*c == '"' || *c == '\\') metrics->label[n++] = '\\';
    if (!is_whole || *c == '\n') metrics->label[n++] = is_whole ? ' ' : '?';
    else for (size_t i = 0; i < length; i++) metrics->label[n++] = c[i];
    c += length;
  }
  metrics->label[n++] = '"';
  metrics->label[n] = '\0';
}

void metrics_set_routes(struct metrics *metrics, const char *const *names, int n_routes)
{
  metrics->routes = names;
  metrics->n_routes = n_routes < MAX_ROUTES ? n_routes : MAX_ROUTES;
}

void metrics_set_methods(struct metrics *metrics, const char *const *names, int n_methods)
{
  metrics->methods = names;
  metrics->n_methods = n_methods < MAX_METHODS ? n_methods : MAX_METHODS;
}

void metrics_grpc_begin(struct metrics *metrics) { atomic_fetch_add_explicit(&metrics->n_grpc, 1, memory_order_relaxed); }

void metrics_grpc_end(struct metrics *metrics, int method, int grpc_status)
{
  atomic_fetch_sub_explicit(&metrics->n_grpc, 1, memory_order_relaxed);
  if (method < 0 || method >= metrics->n_methods || grpc_status < 0 || grpc_status >= N_GRPC_STATUSES) return;
  atomic_fetch_add_explicit(&metrics->grpc[method][grpc_status], 1, memory_order_relaxed);
}

void metrics_add(struct metrics *metrics, enum metrics_counter counter, int64_t n)
{
  atomic_fetch_add_explicit(&metrics->counters[counter], n, memory_order_relaxed);
}

int64_t metrics_counter_value(const struct metrics *metrics, enum metrics_counter counter)
{
  return atomic_load_explicit(&metrics->counters[counter], memory_order_relaxed);
}

void metrics_refused(struct metrics *metrics, enum sits_status status)
{
  if (status == SITS_QUEUE_FULL) metrics_add(metrics, METRICS_REJECTED_QUEUE, 1);
  if (status == SITS_RATE_LIMITED) metrics_add(metrics, METRICS_REJECTED_QUOTA, 1);
  if (status == SITS_UNAVAILABLE) metrics_add(metrics, METRICS_REJECTED_UNAVAILABLE, 1);
}

static void observe_delivery(struct delivery *delivery, int64_t latency_us)
{
  size_t i = 0;
  while (i < N_DELIVERY && latency_us > delivery_bounds_us[i]) i++;
  atomic_fetch_add_explicit(&delivery->counts[i], 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&delivery->sum_us, latency_us > 0 ? latency_us : 0, memory_order_relaxed);
}

void metrics_delivery(struct metrics *metrics, int64_t latency_us) { observe_delivery(&metrics->token_delivery, latency_us); }

void metrics_http(struct metrics *metrics, int route, int http_status)
{
  int class = http_status / 100;
  if (route < 0 || route >= MAX_ROUTES || class < 1 || class >= N_STATUS_CLASSES) return;
  atomic_fetch_add_explicit(&metrics->http[route][class], 1, memory_order_relaxed);
}

/* ---- exposition ---- */

static void gauge(const struct metrics *m, struct buf *out, const char *name, const char *help, double value)
{
  metrics_text_header(out, name, "gauge", help);
  buf_printf(out, "sits2026:%s{%s} ", name, m->label);
  if (isinf(value)) buf_append_text(out, "+Inf\n");
  else buf_printf(out, "%.9g\n", value);
}

static void counter(const struct metrics *m, struct buf *out, const char *name, const char *help, uint64_t value)
{
  metrics_text_header(out, name, "counter", help);
  buf_printf(out, "sits2026:%s{%s} %llu\n", name, m->label, (unsigned long long)value);
}

static void histogram(const struct metrics *m, struct buf *out, const char *name, const char *help, const struct engine_histogram *h)
{
  metrics_text_header(out, name, "histogram", help);
  metrics_text_buckets(out, name, m->label,
                       &(struct metrics_buckets){.bounds = h->bounds, .n_bounds = h->n_bounds, .counts = h->counts, .sum = h->sum});
}

/* Pages by codec and state; and what the model takes of its device's memory. */
static void render_memory(const struct metrics *m, const struct engine_stats *e, struct buf *out)
{
  if (!atomic_load(&m->has_memory)) return;
  const struct metrics_memory *memory = &m->memory;
  const struct { const char *state; int32_t n; } states[] = {
    {"used", e->n_pages_used}, {"cached", e->n_pages_cached}, {"free", e->n_pages_free}};
  metrics_text_header(out, "kv_pool_pages", "gauge", "KV pages by codec and state.");
  for (int i = 0; i < 3; i++)
    buf_printf(out, "sits2026:kv_pool_pages{%s,codec=\"%s\",state=\"%s\"} %d\n", m->label, memory->codec, states[i].state, states[i].n);
  metrics_text_header(out, "kv_page_bytes", "gauge", "Bytes of a KV page by codec.");
  buf_printf(out, "sits2026:kv_page_bytes{%s,codec=\"%s\"} %llu\n", m->label, memory->codec, (unsigned long long)memory->page_bytes);
  metrics_text_header(out, "device_memory_bytes", "gauge", "Device memory that this process took, by what for.");
  const struct { const char *use; uint64_t n; } uses[] = {{"weights", memory->weight_bytes}, {"kv_pages", memory->kv_bytes},
                                                          {"draft_weights", memory->draft_weight_bytes},
                                                          {"draft_kv_pages", memory->draft_kv_bytes}};
  for (int i = 0; i < (memory->draft_weight_bytes ? 4 : 2); i++)
    buf_printf(out, "sits2026:device_memory_bytes{%s,use=\"%s\"} %llu\n", m->label, uses[i].use, (unsigned long long)uses[i].n);
}

static void render_gauges(const struct metrics *m, const struct engine_stats *e, struct buf *out)
{
  static const char *const class_names[SITS_CLASS_COUNT] = {"high", "normal", "low"};
  gauge(m, out, "num_requests_running", "Sequences in prefill or decode.", e->n_running);
  gauge(m, out, "num_requests_waiting", "Requests that hold no pages: queued or preempted.", e->n_waiting);
  metrics_text_header(out, "num_requests_waiting_by_class", "gauge", "Waiting requests by service class.");
  for (int i = 0; i < SITS_CLASS_COUNT; i++)
    buf_printf(out, "sits2026:num_requests_waiting_by_class{%s,class=\"%s\"} %d\n", m->label, class_names[i], e->n_waiting_by_class[i]);
  metrics_text_header(out, "num_requests_waiting_by_reason", "gauge", "Waiting requests by reason: capacity, for pages or a place.");
  buf_printf(out, "sits2026:num_requests_waiting_by_reason{%s,reason=\"capacity\"} %d\n", m->label, e->n_waiting);
  metrics_text_header(out, "batch_queue_depth", "gauge", "Requests on their way to the batch: waiting for a worker, for the scheduler.");
  buf_printf(out, "sits2026:batch_queue_depth{%s,stage=\"read\"} %lld\n", m->label,
             (long long)atomic_load_explicit(&m->n_reading, memory_order_relaxed));
  buf_printf(out, "sits2026:batch_queue_depth{%s,stage=\"schedule\"} %d\n", m->label, e->n_waiting);
  gauge(m, out, "waiting_prompt_tokens", "Prompt tokens of waiting requests.", (double)e->waiting_prompt_tokens);
  gauge(m, out, "kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", e->kv_usage);
  gauge(m, out, "kv_pages_used", "KV pages that sequences hold.", e->n_pages_used);
  gauge(m, out, "kv_pages_cached", "KV pages kept for prefixes, free to take.", e->n_pages_cached);
  gauge(m, out, "kv_pages_free", "KV pages that hold nothing.", e->n_pages_free);
  gauge(m, out, "swap_pages_used", "Pages of preempted sequences in host memory.", e->n_host_pages_total - e->n_host_pages_free);
  gauge(m, out, "swap_pages_total", "Pages that host memory has room for (swap-space).", e->n_host_pages_total);
  gauge(m, out, "step_seconds", "Recent time of an engine step (moving average).", e->step_us_ewma / 1e6);
  gauge(m, out, "step_serial_seconds", "Of that, time in which the device waits for the host (moving average).", e->serial_us_ewma / 1e6);
  gauge(m, out, "inter_token_latency_p99_seconds", "99th percentile over a sliding window of running streams.", e->itl_p99_us / 1e6);
}

static void render_counters(const struct metrics *m, const struct engine_stats *e, struct buf *out)
{
  counter(m, out, "prompt_tokens_total", "Prompt tokens processed.", e->prompt_tokens);
  counter(m, out, "prompt_tokens_cached_total", "Prompt tokens taken from the prefix cache.", e->prompt_tokens_cached);
  metrics_text_header(out, "prompt_tokens_by_source_total", "counter", "Prompt tokens by where they came from.");
  buf_printf(out, "sits2026:prompt_tokens_by_source_total{%s,source=\"local_compute\"} %llu\n", m->label,
             (unsigned long long)(e->prompt_tokens > e->prompt_tokens_cached ? e->prompt_tokens - e->prompt_tokens_cached : 0));
  buf_printf(out, "sits2026:prompt_tokens_by_source_total{%s,source=\"local_cache_hit\"} %llu\n", m->label,
             (unsigned long long)e->prompt_tokens_cached);
  counter(m, out, "generation_tokens_total", "Tokens generated.", e->generation_tokens);
  counter(m, out, "prompt_tokens_computed_total", "Prompt tokens computed, again after a preemption too.", e->prompt_tokens_computed);
  counter(m, out, "num_preemptions_total", "Preemptions.", e->n_preemptions);
  counter(m, out, "num_preemptions_swapped_total", "Preemptions that kept their pages in host memory.", e->n_preemptions_swapped);
  counter(m, out, "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", e->prefix_query_tokens);
  counter(m, out, "kv_pages_dropped_total", "KV pages that sequences gave up to keep to kv-page-budget.", e->n_pages_dropped);
  counter(m, out, "prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", e->prefix_hit_tokens);
  counter(m, out, "spec_decode_num_drafts_total", "Drafts verified.", e->spec_drafts);
  counter(m, out, "spec_decode_num_draft_tokens_total", "Draft tokens verified.", e->spec_draft_tokens);
  counter(m, out, "spec_decode_num_model_tokens_total", "Tokens that the draft model guessed.", e->spec_model_tokens);
  counter(m, out, "spec_decode_num_accepted_tokens_total", "Draft tokens accepted.", e->spec_accepted_tokens);
  metrics_text_header(out, "spec_decode_num_accepted_tokens_per_pos_total", "counter", "Draft tokens accepted, by position in the draft.");
  for (int i = 0; i < ENGINE_SPEC_POSITIONS; i++)
    buf_printf(out, "sits2026:spec_decode_num_accepted_tokens_per_pos_total{%s,position=\"%d\"} %llu\n", m->label, i,
               (unsigned long long)e->spec_accepted_at[i]);
  counter(m, out, "placement_handed_over_total", "Prompts that the prefill device of --placement was given.", e->placement_sent);
  counter(m, out, "placement_declined_total", "Prompts for which that did not pay.", e->placement_declined);
  counter(m, out, "placement_pages_total", "KV pages that it sent.", e->placement_pages);
  counter(m, out, "engine_steps_total", "Engine steps.", e->n_steps);
  metrics_text_header(out, "submissions_refused_total", "counter",
                      "Submissions that the engine's queue refused, by the limit that they met.");
  buf_printf(out, "sits2026:submissions_refused_total{%s,limit=\"requests\"} %llu\n", m->label, (unsigned long long)e->rejected_requests);
  buf_printf(out, "sits2026:submissions_refused_total{%s,limit=\"tokens\"} %llu\n", m->label, (unsigned long long)e->rejected_tokens);
  static const struct { const char *reason; enum sits_finish finish; } reasons[] = {
    {"stop", SITS_FINISH_STOP}, {"length", SITS_FINISH_LENGTH}, {"abort", SITS_FINISH_CANCELLED}, {"deadline", SITS_FINISH_DEADLINE},
    {"error", SITS_FINISH_ERROR}};
  metrics_text_header(out, "request_success_total", "counter",
                      "Sequences ended, by reason (a stop string ends one as abort: the front end cut it).");
  for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
    buf_printf(out, "sits2026:request_success_total{%s,finished_reason=\"%s\"} %llu\n", m->label, reasons[i].reason,
               (unsigned long long)e->finished[reasons[i].finish]);
}

static void render_engine(const struct metrics *m, const struct metrics_now *now, struct buf *out)
{
  const struct engine_stats *e = now->engine;
  render_gauges(m, e, out);
  render_counters(m, e, out);
  render_memory(m, e, out);
  gauge(m, out, "engine_heartbeat_age_seconds", "Time since the engine's loop last turned; +Inf once the device has failed.",
        now->heartbeat_age_us < 0 ? (double)INFINITY : (double)now->heartbeat_age_us / 1e6);
  metrics_text_header(out, "cache_config_info", "gauge", "KV page size in tokens and number of pages.");
  buf_printf(out, "sits2026:cache_config_info{%s,block_size=\"%lld\",num_gpu_blocks=\"%d\"} 1\n", m->label, (long long)now->page_tokens,
             e->n_pages_total);
  histogram(m, out, "time_to_first_token_seconds", "From submission to the first token.", &e->ttft_seconds);
  histogram(m, out, "inter_token_latency_seconds", "Between two tokens of a sequence.", &e->itl_seconds);
  histogram(m, out, "request_time_per_output_token_seconds", "Mean time per output token after the first.", &e->tpot_seconds);
  histogram(m, out, "e2e_request_latency_seconds", "From submission to the end.", &e->e2e_seconds);
  histogram(m, out, "request_queue_time_seconds", "Waiting to be scheduled.", &e->queue_seconds);
  histogram(m, out, "request_prefill_time_seconds", "From first scheduled to the first token.", &e->prefill_seconds);
  histogram(m, out, "request_decode_time_seconds", "From the first token to the end.", &e->decode_seconds);
  histogram(m, out, "request_scheduling_time_seconds", "From first scheduled to the end, but for steps that worked on the request.",
            &e->scheduling_seconds);
  histogram(m, out, "request_inference_time_seconds", "From first scheduled to the end.", &e->inference_seconds);
  histogram(m, out, "request_prompt_tokens", "Prompt length.", &e->prompt_tokens_hist);
  histogram(m, out, "request_generation_tokens", "Tokens generated.", &e->generation_tokens_hist);
  histogram(m, out, "request_params_max_tokens", "The max_tokens parameter.", &e->max_tokens_hist);
  histogram(m, out, "request_params_n", "The n parameter.", &e->n_choices_hist);
  histogram(m, out, "iteration_tokens_total", "Tokens in a step.", &e->iteration_tokens_hist);
  histogram(m, out, "cancellation_steps", "Steps begun after a cancellation reached the engine and before it took effect.",
            &e->cancel_steps_hist);
}

static void render_delivery(const struct metrics *m, const struct delivery *d, const char *name, const char *help, struct buf *out)
{
  metrics_text_header(out, name, "histogram", help);
  int64_t total = 0;
  for (size_t i = 0; i <= N_DELIVERY; i++) {
    total += atomic_load_explicit(&d->counts[i], memory_order_relaxed);
    if (i < N_DELIVERY)
      buf_printf(out, "sits2026:%s_bucket{%s,le=\"%g\"} %lld\n", name, m->label, (double)delivery_bounds_us[i] / 1e6, (long long)total);
  }
  buf_printf(out, "sits2026:%s_bucket{%s,le=\"+Inf\"} %lld\n", name, m->label, (long long)total);
  buf_printf(out, "sits2026:%s_sum{%s} %.6f\nsits2026:%s_count{%s} %lld\n", name, m->label,
             (double)atomic_load_explicit(&d->sum_us, memory_order_relaxed) / 1e6, name, m->label, (long long)total);
}

static void render_grpc(const struct metrics *m, struct buf *out)
{
  if (!m->n_methods) return;
  gauge(m, out, "grpc_requests_in_flight", "gRPC calls being served, health watches among them.",
        (double)atomic_load_explicit(&m->n_grpc, memory_order_relaxed));
  metrics_text_header(out, "grpc_requests_total", "counter", "gRPC calls ended, by method and status code.");
  for (int r = 0; r < m->n_methods; r++)
    for (int c = 0; c < N_GRPC_STATUSES; c++) {
      int64_t n = atomic_load_explicit(&m->grpc[r][c], memory_order_relaxed);
      if (n)
        buf_printf(out, "sits2026:grpc_requests_total{%s,method=\"%s\",status=\"%d\"} %lld\n", m->label, m->methods[r], c, (long long)n);
    }
}

void metrics_render(struct metrics *m, const struct metrics_now *now, struct buf *out)
{
  static const struct engine_stats none;
  if (now->engine) {
    render_engine(m, now, out);
  } else {
    render_gauges(m, &none, out); /* routers read these while the model loads */
  }
  if (atomic_load(&m->has_audit))
    gauge(m, out, "audit_writing", "1 while lines of the audit log are written and synced, 0 since a write or a sync failed.",
          atomic_load(&m->is_audit_writing));
  gauge(m, out, "http_requests_in_flight", "HTTP requests being served.", (double)now->n_in_flight);
  for (int i = 0; i < METRICS_COUNTER_COUNT; i++) {
    const struct counter_row *row = &counter_rows[i];
    if (row->help[0]) metrics_text_header(out, row->name, "counter", row->help);
    buf_printf(out, "sits2026:%s{%s%s} %lld\n", row->name, m->label, row->label, (long long)metrics_counter_value(m, i));
  }
  render_delivery(m, &m->token_delivery, "delivery_latency_seconds",
                  "From the engine handing over a token to its bytes reaching the socket's writer.", out);
  metrics_requests_render(m->requests, m->label, out);
  metrics_gpu_render(m->gpu, m->label, out);
  render_grpc(m, out);
  metrics_text_header(out, "http_requests_total", "counter", "HTTP requests answered, by route and class of status.");
  for (int r = 0; r < m->n_routes; r++)
    for (int c = 1; c < N_STATUS_CLASSES; c++) {
      int64_t n = atomic_load_explicit(&m->http[r][c], memory_order_relaxed);
      if (n)
        buf_printf(out, "sits2026:http_requests_total{%s,handler=\"%s\",status=\"%dxx\"} %lld\n", m->label, m->routes[r], c, (long long)n);
    }
  metrics_process_render(out);
}
