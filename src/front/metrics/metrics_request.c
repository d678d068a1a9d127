/* See metrics_request.h. */
#include "front/metrics/metrics_request.h"

#include <pthread.h>
#include <string.h>

#include "base/mem.h"
#include "front/metrics/metrics_text.h"

enum { MAX_BOUNDS = 20, TENANT_BYTES = 96 };

enum outcome { OUTCOME_OK, OUTCOME_CLIENT_ERROR, OUTCOME_REFUSED, OUTCOME_SERVER_ERROR, OUTCOME_LEFT, OUTCOME_COUNT };
static const char *const outcome_names[OUTCOME_COUNT] = {"ok", "client_error", "refused", "server_error", "client_left"};
static const char other_tenants[] = "other";
static const char *const class_names[SITS_CLASS_COUNT] = {"high", "normal", "low"};

struct row { uint64_t requests[OUTCOME_COUNT], prompt_tokens, cached_tokens, output_tokens; };

struct tally { uint64_t counts[MAX_BOUNDS + 1]; double sum; };

enum stage { STAGE_RECEIVE, STAGE_PREPARE, STAGE_QUEUE, STAGE_PREFILL, STAGE_DECODE, STAGE_DELIVERY, STAGE_COUNT };
static const char *const stage_names[STAGE_COUNT] = {"receive", "prepare", "queue", "prefill", "decode", "delivery"};
static const double stage_bounds[] = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                                      0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300};
static const double token_bounds[] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000};
static const double preemption_bounds[] = {0, 1, 2, 5, 10, 20};
#define N_BOUNDS(bounds) ((int)(sizeof(bounds) / sizeof *(bounds)))
_Static_assert(N_BOUNDS(stage_bounds) <= MAX_BOUNDS && N_BOUNDS(token_bounds) <= MAX_BOUNDS, "make room in struct tally");

struct state {
  struct row classes[SITS_CLASS_COUNT];
  struct row tenants[METRICS_MAX_TENANTS + 1];      /* [n_tenants]; the last of the array is "other" */
  char names[METRICS_MAX_TENANTS][TENANT_BYTES];    /* [n_tenants] */
  int n_tenants;
  struct tally stages[STAGE_COUNT], computed_tokens, longest_tokens, preemptions;
};

struct metrics_requests {
  pthread_mutex_t mutex;
  struct state state;                               /* [mutex] */
};

struct metrics_requests *metrics_requests_create(void)
{
  struct metrics_requests *requests = mem_calloc(1, sizeof *requests);
  if (requests) pthread_mutex_init(&requests->mutex, NULL);
  return requests;
}

void metrics_requests_destroy(struct metrics_requests *requests)
{
  if (!requests) return;
  pthread_mutex_destroy(&requests->mutex);
  mem_free(requests);
}

/* ---- taking ---- */

static enum outcome outcome_of(const struct api_record *record)
{
  if (record->client_left || record->status == SITS_CANCELLED) return OUTCOME_LEFT;
  int http = sits_status_info(record->status)->http;
  if (sits_status_info(record->status)->retryable && http != 504) return OUTCOME_REFUSED;
  return http >= 500 ? OUTCOME_SERVER_ERROR : http >= 400 ? OUTCOME_CLIENT_ERROR : OUTCOME_OK;
}

static struct row *tenant_row(struct state *state, const char *tenant)
{
  const char *name = tenant[0] ? tenant : "none";
  if (!strcmp(name, other_tenants)) return &state->tenants[METRICS_MAX_TENANTS]; /* two rows of one name would spoil the page */
  for (int i = 0; i < state->n_tenants; i++)
    if (!strncmp(state->names[i], name, TENANT_BYTES - 1)) return &state->tenants[i];
  if (state->n_tenants == METRICS_MAX_TENANTS) return &state->tenants[METRICS_MAX_TENANTS];
  int i = state->n_tenants++;
  memcpy(state->names[i], name, strnlen(name, TENANT_BYTES - 1));
  return &state->tenants[i];
}

static void add(struct row *row, const struct api_record *record, enum outcome outcome)
{
  row->requests[outcome]++;
  row->prompt_tokens += (uint64_t)record->usage.n_prompt_tokens;
  row->cached_tokens += (uint64_t)record->usage.n_cached_tokens;
  row->output_tokens += (uint64_t)record->usage.n_output_tokens;
}

static void observe(struct tally *tally, const double *bounds, int n_bounds, double value)
{
  int i = 0;
  while (i < n_bounds && value > bounds[i]) i++;
  tally->counts[i]++;
  tally->sum += value;
}

/* A stage that began; one that did not end lasted to the end of the request. */
static void observe_stage(struct state *state, enum stage stage, int64_t from_us, int64_t to_us, const struct api_record *record)
{
  if (!from_us) return;
  int64_t end_us = to_us ? to_us : record->ended_us;
  observe(&state->stages[stage], stage_bounds, N_BOUNDS(stage_bounds), end_us > from_us ? (double)(end_us - from_us) / 1e6 : 0);
}

static void observe_stages(struct state *state, const struct api_record *record)
{
  const struct sits_request_timing *t = &record->usage.timing;
  observe_stage(state, STAGE_RECEIVE, record->started_us, record->received_us, record);
  observe_stage(state, STAGE_PREPARE, record->received_us, t->submitted_us, record);
  observe_stage(state, STAGE_QUEUE, t->submitted_us, t->first_scheduled_us ? t->first_scheduled_us : t->done_us, record);
  observe_stage(state, STAGE_PREFILL, t->first_scheduled_us, t->first_token_us ? t->first_token_us : t->done_us, record);
  observe_stage(state, STAGE_DECODE, t->first_token_us, t->done_us, record);
  observe_stage(state, STAGE_DELIVERY, t->done_us, record->ended_us, record);
}

void metrics_requests_take(struct metrics_requests *requests, const struct api_record *record)
{
  if (record->is_public || !record->kind) return;
  enum outcome outcome = outcome_of(record);
  pthread_mutex_lock(&requests->mutex);
  struct state *state = &requests->state;
  add(tenant_row(state, record->tenant), record, outcome);
  if (record->request && (record->kind == API_CHAT || record->kind == API_COMPLETION)) {
    const struct api_usage *usage = &record->usage;
    add(&state->classes[record->request->service_class], record, outcome);
    observe_stages(state, record);
    if (usage->timing.done_us) {
      observe(&state->computed_tokens, token_bounds, N_BOUNDS(token_bounds), (double)(usage->n_prompt_tokens - usage->n_cached_tokens));
      observe(&state->longest_tokens, token_bounds, N_BOUNDS(token_bounds), usage->n_longest_tokens);
      observe(&state->preemptions, preemption_bounds, N_BOUNDS(preemption_bounds), usage->timing.n_preemptions);
    }
  }
  pthread_mutex_unlock(&requests->mutex);
}

/* ---- rendering ---- */

/* The rows of one counter over all tenants and classes: key is "tenant" or "class", names[i] its value for rows[i]. */
struct table { const char *key; const struct row *rows; const char *names[METRICS_MAX_TENANTS + 1]; int n_rows; };

static void render_requests(const struct table *table, const char *label, struct buf *out)
{
  char name[64];
  snprintf(name, sizeof name, "%s_requests_total", table->key);
  metrics_text_header(out, name, "counter", "Calls ended, by how: ok, client_error (4xx), refused (429, 503), server_error, client_left.");
  for (int r = 0; r < table->n_rows; r++)
    for (int o = 0; o < OUTCOME_COUNT; o++) {
      if (!table->rows[r].requests[o]) continue;
      buf_printf(out, "sits2026:%s{%s,%s=\"", name, label, table->key);
      metrics_text_escape(out, table->names[r]);
      buf_printf(out, "\",outcome=\"%s\"} %llu\n", outcome_names[o], (unsigned long long)table->rows[r].requests[o]);
    }
}

static void render_tokens(const struct table *table, const char *label, const char *what, size_t offset, const char *help, struct buf *out)
{
  char name[64];
  snprintf(name, sizeof name, "%s_%s_total", table->key, what);
  metrics_text_header(out, name, "counter", help);
  for (int r = 0; r < table->n_rows; r++) {
    uint64_t value;
    memcpy(&value, (const char *)&table->rows[r] + offset, sizeof value);
    buf_printf(out, "sits2026:%s{%s,%s=\"", name, label, table->key);
    metrics_text_escape(out, table->names[r]);
    buf_printf(out, "\"} %llu\n", (unsigned long long)value);
  }
}

static void render_table(const struct table *table, const char *label, struct buf *out)
{
  render_requests(table, label, out);
  render_tokens(table, label, "prompt_tokens", offsetof(struct row, prompt_tokens), "Prompt tokens of calls that ended.", out);
  render_tokens(table, label, "prompt_tokens_cached", offsetof(struct row, cached_tokens), "Of these, tokens from the prefix cache.", out);
  render_tokens(table, label, "generation_tokens", offsetof(struct row, output_tokens), "Tokens generated for calls that ended.", out);
}

static void render_tally(const struct tally *tally, const double *bounds, int n_bounds, const char *name, const char *labels,
                         struct buf *out)
{
  metrics_text_buckets(out, name, labels,
                       &(struct metrics_buckets){.bounds = bounds, .n_bounds = n_bounds, .counts = tally->counts, .sum = tally->sum});
}

static void render_histograms(const struct state *state, const char *label, struct buf *out)
{
  metrics_text_header(out, "request_stage_seconds", "histogram",
                      "Time of a call's stages: receive the body, prepare (parse, template, tokenize), queue, prefill, decode, delivery.");
  for (int s = 0; s < STAGE_COUNT; s++) {
    char labels[512];
    snprintf(labels, sizeof labels, "%s,stage=\"%s\"", label, stage_names[s]);
    render_tally(&state->stages[s], stage_bounds, N_BOUNDS(stage_bounds), "request_stage_seconds", labels, out);
  }
  static const char computed[] = "request_prefill_kv_computed_tokens", longest[] = "request_max_num_generation_tokens",
                    preempted[] = "request_num_preemptions";
  metrics_text_header(out, computed, "histogram", "Prompt tokens of a request that were computed, not found in the prefix cache.");
  render_tally(&state->computed_tokens, token_bounds, N_BOUNDS(token_bounds), computed, label, out);
  metrics_text_header(out, longest, "histogram", "Tokens of a request's longest choice.");
  render_tally(&state->longest_tokens, token_bounds, N_BOUNDS(token_bounds), longest, label, out);
  metrics_text_header(out, preempted, "histogram", "Pre-emptions of a request.");
  render_tally(&state->preemptions, preemption_bounds, N_BOUNDS(preemption_bounds), preempted, label, out);
}

void metrics_requests_render(struct metrics_requests *requests, const char *label, struct buf *out)
{
  struct state state;
  pthread_mutex_lock(&requests->mutex);
  state = requests->state;
  pthread_mutex_unlock(&requests->mutex);
  struct table tenants = {.key = "tenant", .rows = state.tenants, .n_rows = state.n_tenants};
  for (int i = 0; i < state.n_tenants; i++) tenants.names[i] = state.names[i];
  bool has_others = state.n_tenants == METRICS_MAX_TENANTS;
  for (int o = 0; o < OUTCOME_COUNT; o++) has_others |= state.tenants[METRICS_MAX_TENANTS].requests[o] > 0;
  if (has_others) {
    state.tenants[state.n_tenants] = state.tenants[METRICS_MAX_TENANTS];
    tenants.names[tenants.n_rows++] = other_tenants;
  }
  struct table classes = {.key = "class", .rows = state.classes, .n_rows = SITS_CLASS_COUNT};
  for (int i = 0; i < SITS_CLASS_COUNT; i++) classes.names[i] = class_names[i];
  render_table(&classes, label, out);
  render_table(&tenants, label, out);
  render_histograms(&state, label, out);
}
