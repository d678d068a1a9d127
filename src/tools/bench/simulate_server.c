/* See simulate_server.h. */
#include "tools/bench/simulate_server.h"

#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

enum { OUTPUT_LIMIT = 2048, IDLE = -1 };

double simulate_kv_us(const struct simulate_cost *c)
{
  return c->kv_bytes_per_token / (c->read_bytes_per_s * c->kv_read_share) * 1e6;
}

double simulate_pair_us(const struct simulate_cost *c)
{
  return c->attention_flops_per_pair / c->attention_flops * 1e6;
}

static double between_points(const struct simulate_points *p, double n_tokens)
{
  int32_t i = 1;
  while (i < p->n - 1 && n_tokens > p->tokens[i]) i++;
  double from = p->tokens[i - 1], slope = (p->us[i] - p->us[i - 1]) / (p->tokens[i] - from);
  return p->us[i - 1] + slope * (n_tokens - from);
}

double simulate_step_us(const struct simulate_cost *c, const struct alps_cost_work *work, int32_t n_rows)
{
  double n_tokens = work->n_decode + work->n_prompt_tokens;
  double attention = (double)work->decode_kv_tokens * simulate_kv_us(c) + work->prompt_depth * simulate_pair_us(c);
  if (c->prompt_points.n > 1 && work->n_prompt_tokens > 0) return between_points(&c->prompt_points, n_tokens) + attention;
  if (c->points.n > 1) return between_points(&c->points, n_tokens) + attention;
  double rate = n_tokens <= c->small_batch_tokens ? c->small_batch_flops : c->large_batch_flops;
  double linear = fmax(c->weight_bytes / (c->read_bytes_per_s * c->weight_read_share), n_tokens * c->linear_flops_per_token / rate);
  double head = fmax(c->head_bytes / (c->read_bytes_per_s * c->head_read_share), n_rows * c->head_flops_per_row / rate);
  return (linear + (n_rows > 0 ? head : 0)) * 1e6 + attention + c->fixed_us;
}

static void record(struct simulate_histogram *h, double us)
{
  int32_t bucket = us <= 1 ? 0 : (int32_t)(log2(us) * 64);
  h->counts[bucket < SIMULATE_BUCKETS ? bucket : SIMULATE_BUCKETS - 1]++;
  h->n++;
}

double simulate_quantile(const struct simulate_histogram *h, double q)
{
  int64_t above = (int64_t)((1 - q) * (double)h->n), seen = 0;
  for (int32_t b = SIMULATE_BUCKETS - 1; b >= 0; b--) {
    seen += h->counts[b];
    if (seen > above) return exp2((b + 1) / 64.0);
  }
  return 0;
}

double simulate_arrival_us(const struct simulate_server *s, int64_t arrival)
{
  return s->arrivals[arrival].at_us / s->setting->speed;
}

static void admit(void *user, int32_t id, struct alps_admitted *out)
{
  struct simulate_server *s = user;
  struct simulate_sequence *q = &s->sequences[id];
  q->n_computed = q->n_ready;
  q->n_pages = (q->n_ready + SIMULATE_PAGE - 1) / SIMULATE_PAGE;
  s->n_pages_free -= q->n_pages;
  *out = (struct alps_admitted){.n_computed = q->n_computed, .n_pages = q->n_pages, .n_available = s->n_pages_free};
}

void simulate_server_enqueue(struct simulate_server *s, int64_t arrival, int32_t n_known, int32_t n_ready, int32_t n_left)
{
  int32_t id = (int32_t)(arrival % s->n_ids);
  struct alps_request request = {.service_class = 1, .arrival_us = (int64_t)simulate_arrival_us(s, arrival), .n_known = n_known,
                                 .n_ready = n_ready, .n_limit = n_known + OUTPUT_LIMIT, .width = 1};
  s->sequences[id] = (struct simulate_sequence){.arrival = arrival, .n_known = n_known, .n_ready = n_ready, .n_left = n_left};
  alps_enqueue(s->alps, id, &request);
  s->n_alive++;
}

static void preempt(struct simulate_server *s, int32_t id)
{
  struct simulate_sequence *q = &s->sequences[id];
  s->n_pages_free += q->n_pages;
  q->n_pages = q->n_computed = q->n_ready = 0;
  s->result->n_preempted++;
  alps_requeue(s->alps, id, q->n_known);
}

static void note_token(struct simulate_server *s, const struct simulate_sequence *q, double at_us)
{
  struct simulate_result *r = s->result;
  if (q->last_token_us == 0) {
    double ttft = at_us - simulate_arrival_us(s, q->arrival);
    record(&r->ttft, ttft);
    s->n_late += ttft > s->setting->ttft_target_us;
  } else {
    record(&r->itl, at_us - q->last_token_us);
    r->n_itl_over += at_us - q->last_token_us > s->setting->itl_limit_us;
  }
  r->n_output_tokens++;
}

static void draw(struct simulate_server *s, int32_t id, double at_us)
{
  struct simulate_sequence *q = &s->sequences[id];
  if (!s->is_reader) note_token(s, q, at_us);
  q->last_token_us = at_us;
  q->n_known++;
  if (--q->n_left > 0) {
    alps_update(s->alps, id, q->n_known, q->n_computed, q->n_pages, 0);
    return;
  }
  int64_t arrival = q->arrival;
  s->n_pages_free += q->n_pages;
  q->arrival = IDLE;
  s->n_alive--;
  s->result->n_requests += !s->is_reader;
  alps_remove(s->alps, id);
  if (s->ended) s->ended(s->user, arrival);
}

static void take_pages(struct simulate_server *s, const struct alps_item *item)
{
  struct simulate_sequence *q = &s->sequences[item->id];
  int32_t n_pages = (q->n_computed + item->n_tokens + SIMULATE_PAGE - 1) / SIMULATE_PAGE;
  s->n_pages_free -= n_pages - q->n_pages;
  q->n_pages = n_pages;
}

static void end_item(struct simulate_server *s, const struct alps_item *item, double at_us)
{
  struct simulate_sequence *q = &s->sequences[item->id];
  q->n_computed += item->n_tokens;
  if (item->is_last) draw(s, item->id, at_us);
  else alps_update(s->alps, item->id, q->n_known, q->n_computed, q->n_pages, 0);
}

void simulate_server_end(struct simulate_server *s, double step_us)
{
  const struct alps_plan *plan = &s->plan;
  s->now_us += step_us;
  s->busy_us += step_us;
  s->result->busy_us += step_us;
  s->result->n_steps++;
  for (int32_t i = 0; i < plan->n_items; i++) {
    take_pages(s, &plan->items[i]);
    if (i >= plan->n_decode) s->result->n_prompt_tokens += plan->items[i].n_tokens;
    end_item(s, &plan->items[i], s->now_us);
  }
  alps_report(s->alps, plan, (int64_t)step_us);
}

/* The plan's chunk on the lane, as long as the next piece would end in time; the others' clocks stand still meanwhile, so `at_us` into the
 * step is told apart from now_us. Returns when it stopped. */
static double run_slice(struct simulate_server *s, double at_us)
{
  struct alps_plan *plan = &s->plan;
  const double until_us = s->now_us + (double)plan->slice_us, from_us = at_us;
  if (plan->slice_begins) {
    struct alps_cost_work alone = {0};
    alps_cost_add_chunk(&alone, plan->slice.n_tokens, s->sequences[plan->slice.id].n_computed);
    s->n_pieces = (int32_t)s->cost->lane_pieces;
    s->piece_us = simulate_step_us(s->cost, &alone, plan->slice.is_last) / s->n_pieces + s->cost->piece_us;
    take_pages(s, &plan->slice);
    const struct simulate_sequence *q = &s->sequences[plan->slice.id];
    alps_update(s->alps, plan->slice.id, q->n_known, q->n_computed, q->n_pages, 0);
  }
  do at_us += s->piece_us;
  while (--s->n_pieces > 0 && at_us + s->piece_us <= until_us);
  plan->sliced_us += (int64_t)(at_us - from_us);
  if (s->n_pieces > 0) return at_us;
  plan->slice_ended = true;
  s->result->n_prompt_tokens += plan->slice.n_tokens;
  end_item(s, &plan->slice, at_us);
  return at_us;
}

/* Slices of the step, which end before its batch begins; their time. */
static double run_slices(struct simulate_server *s)
{
  struct alps_plan *plan = &s->plan;
  double at_us = s->now_us;
  bool has_more = plan->slice.id >= 0;
  while (has_more) {
    at_us = run_slice(s, at_us);
    if (!plan->slice_ended) break;
    has_more = alps_plan_more(s->alps, s->n_pages_free, at_us + s->piece_us <= s->now_us + (double)plan->slice_us, admit, s, plan);
  }
  return at_us - s->now_us;
}

static void note_most(struct simulate_server *s)
{
  struct alps_counts counts;
  alps_counts(s->alps, &counts);
  if (counts.n_running > s->result->most_running) s->result->most_running = counts.n_running;
  if (counts.n_waiting > s->result->most_waiting) s->result->most_waiting = counts.n_waiting;
}

double simulate_server_begin(struct simulate_server *s)
{
  int64_t started_ns = clock_monotonic_ns();
  while (alps_plan(s->alps, (int64_t)s->now_us, s->n_pages_free, admit, s, &s->plan) == SITS_AGAIN) {
    for (int32_t i = 0; i < s->plan.n_victims; i++) preempt(s, s->plan.victims[i]);
  }
  s->result->plan_us += (double)(clock_monotonic_ns() - started_ns) * 1e-3;
  if (s->result->n_steps % 64 == 0) note_most(s);
  const double slices_us = run_slices(s);
  int32_t n_rows = 0;
  for (int32_t i = 0; i < s->plan.n_items; i++) n_rows += s->plan.items[i].is_last;
  return slices_us + (s->plan.n_items > 0 ? simulate_step_us(s->cost, &s->plan.work, n_rows) : 0);
}

bool simulate_server_init(struct simulate_server *s, const struct simulate_cost *cost, const struct simulate_arrival *arrivals, int64_t n,
                          const struct simulate_setting *setting, struct simulate_result *result)
{
  *s = (struct simulate_server){.cost = cost, .arrivals = arrivals, .setting = setting, .result = result, .n_ids = (int32_t)n};
  int64_t n_pages = (int64_t)(cost->kv_memory_bytes / (cost->kv_bytes_per_token * SIMULATE_PAGE));
  s->n_pages_free = n_pages > INT32_MAX / SIMULATE_PAGE ? INT32_MAX / SIMULATE_PAGE : (int32_t)n_pages;
  struct alps_options options = {.policy = setting->policy, .max_entries = s->n_ids, .max_seqs = setting->max_seqs,
                                 .max_batch_tokens = (int32_t)cost->max_batch_tokens, .chunk_tokens = setting->chunk_tokens,
                                 .page_tokens = SIMULATE_PAGE, .n_pages = s->n_pages_free, .itl_target_us = setting->itl_target_us,
                                 .ttft_target_us = setting->knows_ttft_target ? (int64_t)setting->ttft_target_us : 0};
  if (setting->placement == SIMULATE_ONE && setting->policy == ALPS_BUDGET && cost->lane_tokens > 0) {
    options.slice_tokens = (int32_t)cost->lane_tokens;
    options.slices_by_rate = true;
  }
  options.tile_tokens = (int32_t)cost->tile_tokens;
  s->sequences = mem_calloc((size_t)n, sizeof *s->sequences);
  return s->sequences && alps_create(&options, &s->alps) == SITS_OK;
}

void simulate_server_fini(struct simulate_server *s)
{
  alps_destroy(s->alps);
  mem_free(s->sequences);
}
