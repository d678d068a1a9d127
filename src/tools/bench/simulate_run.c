/* See simulate.h. The loop is the engine's, with the forward pass replaced by a formula: arrivals until now -> plan -> time passes ->
 * tokens are counted. The planner does not know the formula; it learns from the step times, as on a real device. */
#include "tools/bench/simulate.h"

#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

enum { PAGE = 64, OUTPUT_LIMIT = 2048, IDLE = -1 };

struct sequence {
  int64_t arrival;             /* index, IDLE: the id is free */
  int32_t n_known, n_computed, n_pages, n_left;
  double last_token_us;
};

struct simulation {
  const struct simulate_cost *cost;
  const struct simulate_arrival *arrivals;
  const struct simulate_setting *setting;
  struct simulate_result *result;
  struct alps *alps;
  struct sequence *sequences;  /* by id = arrival index modulo n_ids */
  int32_t n_ids, n_pages_free, n_alive;
  int64_t n_arrived, n_late;
  double now_us;
};

double simulate_kv_us(const struct simulate_cost *c)
{
  return c->kv_bytes_per_token / (c->read_bytes_per_s * c->kv_read_share) * 1e6;
}

double simulate_pair_us(const struct simulate_cost *c)
{
  return c->attention_flops_per_pair / c->attention_flops * 1e6;
}

static double between_points(const struct simulate_cost *c, double n_tokens)
{
  int32_t i = 1;
  while (i < c->n_points - 1 && n_tokens > c->point_tokens[i]) i++;
  double from = c->point_tokens[i - 1], slope = (c->point_us[i] - c->point_us[i - 1]) / (c->point_tokens[i] - from);
  return c->point_us[i - 1] + slope * (n_tokens - from);
}

double simulate_step_us(const struct simulate_cost *c, const struct alps_cost_work *work, int32_t n_rows)
{
  double n_tokens = work->n_decode + work->n_prompt_tokens;
  double attention = (double)work->decode_kv_tokens * simulate_kv_us(c) + work->prompt_depth * simulate_pair_us(c);
  if (c->n_points > 1) return between_points(c, n_tokens) + attention;
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

static void admit(void *user, int32_t id, struct alps_admitted *out)
{
  struct simulation *s = user;
  s->sequences[id].n_computed = s->sequences[id].n_pages = 0;
  *out = (struct alps_admitted){.n_available = s->n_pages_free};
}

static void arrive(struct simulation *s, int64_t n)
{
  for (; s->n_arrived < n && s->arrivals[s->n_arrived].at_us / s->setting->speed <= s->now_us; s->n_arrived++) {
    const struct simulate_arrival *a = &s->arrivals[s->n_arrived];
    int32_t id = (int32_t)(s->n_arrived % s->n_ids);
    struct alps_request request = {.service_class = 1, .arrival_us = (int64_t)(a->at_us / s->setting->speed), .n_known = a->n_prompt,
                                   .n_limit = a->n_prompt + OUTPUT_LIMIT, .width = 1};
    s->sequences[id] = (struct sequence){.arrival = s->n_arrived, .n_known = a->n_prompt, .n_left = a->n_output};
    alps_enqueue(s->alps, id, &request);
    s->n_alive++;
  }
}

static void preempt(struct simulation *s, int32_t id)
{
  struct sequence *q = &s->sequences[id];
  s->n_pages_free += q->n_pages;
  q->n_pages = q->n_computed = 0;
  s->result->n_preempted++;
  alps_requeue(s->alps, id, q->n_known);
}

static void draw(struct simulation *s, int32_t id)
{
  struct sequence *q = &s->sequences[id];
  if (q->last_token_us == 0) {
    double ttft = s->now_us - s->arrivals[q->arrival].at_us / s->setting->speed;
    record(&s->result->ttft, ttft);
    s->n_late += ttft > s->setting->ttft_target_us;
  } else {
    record(&s->result->itl, s->now_us - q->last_token_us);
    s->result->n_itl_over += s->now_us - q->last_token_us > s->setting->itl_limit_us;
  }
  q->last_token_us = s->now_us;
  q->n_known++;
  s->result->n_output_tokens++;
  if (--q->n_left > 0) {
    alps_update(s->alps, id, q->n_known, q->n_computed, q->n_pages, 0);
    return;
  }
  s->n_pages_free += q->n_pages;
  q->arrival = IDLE;
  s->n_alive--;
  s->result->n_requests++;
  alps_remove(s->alps, id);
}

static void execute(struct simulation *s, const struct alps_plan *plan)
{
  int32_t n_rows = 0;
  for (int32_t i = 0; i < plan->n_items; i++) n_rows += plan->items[i].is_last;
  double step_us = simulate_step_us(s->cost, &plan->work, n_rows);
  s->now_us += step_us;
  s->result->busy_us += step_us;
  s->result->n_steps++;
  for (int32_t i = 0; i < plan->n_items; i++) {
    const struct alps_item *item = &plan->items[i];
    struct sequence *q = &s->sequences[item->id];
    int32_t n_pages = (q->n_computed + item->n_tokens + PAGE - 1) / PAGE;
    s->n_pages_free -= n_pages - q->n_pages;
    q->n_pages = n_pages;
    q->n_computed += item->n_tokens;
    if (i >= plan->n_decode) s->result->n_prompt_tokens += item->n_tokens;
    if (item->is_last) draw(s, item->id);
    else alps_update(s->alps, item->id, q->n_known, q->n_computed, q->n_pages, 0);
  }
  alps_report(s->alps, plan, (int64_t)step_us);
}

static enum sits_status plan_step(struct simulation *s, struct alps_plan *plan)
{
  int64_t started_ns = clock_monotonic_ns();
  enum sits_status status;
  while ((status = alps_plan(s->alps, (int64_t)s->now_us, s->n_pages_free, admit, s, plan)) == SITS_AGAIN) {
    for (int32_t i = 0; i < plan->n_victims; i++) preempt(s, plan->victims[i]);
  }
  s->result->plan_us += (double)(clock_monotonic_ns() - started_ns) * 1e-3;
  return status;
}

static void note_most(struct simulation *s)
{
  struct alps_counts counts;
  alps_counts(s->alps, &counts);
  if (counts.n_running > s->result->most_running) s->result->most_running = counts.n_running;
  if (counts.n_waiting > s->result->most_waiting) s->result->most_waiting = counts.n_waiting;
}

static void loop(struct simulation *s, int64_t n)
{
  struct alps_plan plan;
  while (s->n_arrived < n || s->n_alive > 0) {
    arrive(s, n);
    if (plan_step(s, &plan) != SITS_OK) return;
    if (s->result->n_steps % 64 == 0) note_most(s);
    if (plan.n_items > 0) execute(s, &plan);
    else if (s->n_arrived < n) s->now_us = fmax(s->now_us, s->arrivals[s->n_arrived].at_us / s->setting->speed);
    else return; /* nothing runs, nothing will come: a sequence larger than the memory */
    if (s->setting->may_give_up && s->n_late > n / 100 + 1) {
      s->result->is_given_up = true;
      return;
    }
  }
}

int simulate_run(const struct simulate_cost *cost, const struct simulate_arrival *arrivals, int64_t n,
                 const struct simulate_setting *setting, struct simulate_result *result)
{
  struct simulation s = {.cost = cost, .arrivals = arrivals, .setting = setting, .result = result, .n_ids = (int32_t)n};
  memset(result, 0, sizeof *result);
  int64_t n_pages = (int64_t)(cost->kv_memory_bytes / (cost->kv_bytes_per_token * PAGE));
  s.n_pages_free = n_pages > INT32_MAX / PAGE ? INT32_MAX / PAGE : (int32_t)n_pages;
  struct alps_options options = {.policy = setting->policy, .max_entries = s.n_ids, .max_seqs = setting->max_seqs,
                                 .max_batch_tokens = (int32_t)cost->max_batch_tokens, .chunk_tokens = setting->chunk_tokens,
                                 .page_tokens = PAGE, .n_pages = s.n_pages_free, .itl_target_us = setting->itl_target_us,
                                 .ttft_target_us = setting->knows_ttft_target ? (int64_t)setting->ttft_target_us : 0};
  s.sequences = mem_calloc((size_t)n, sizeof *s.sequences);
  int status = s.sequences && alps_create(&options, &s.alps) == SITS_OK ? 0 : -1;
  if (status == 0) loop(&s, n);
  result->duration_us = s.now_us;
  alps_destroy(s.alps);
  mem_free(s.sequences);
  return status;
}
