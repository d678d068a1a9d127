/* Two modelled devices of one kind, in virtual time: as replicas that share the arrivals, or one for prompts and one that decodes
 * (alps_split, engine_placement.h). An event is an arrival, the end of a step, or the arrival of a prompt's pages. Pages travel while the
 * next chunk is read; only those of the last one are waited for. Entry point: simulate_pair. */
#include <math.h>
#include <string.h>

#include "alps/alps_split.h"
#include "base/mem.h"
#include "tools/bench/simulate_server.h"

enum { FIRST, SECOND }; /* replicas; or the reader, and the one that decodes */

struct pair {
  struct simulate_server servers[2];
  double step_us[2];           /* of the step that is running; 0: none */
  const struct simulate_cost *cost;
  const struct simulate_setting *setting;
  struct simulate_result *result;
  struct alps_split split;
  int64_t n, n_arrived;
  int64_t *under_way;          /* [n] requests whose pages travel, in order */
  double *there_us;            /* [n] when they arrive */
  int64_t n_sent, n_there;
  double now_us;
};

static int32_t whole_tokens(const struct pair *p, int64_t arrival)
{
  return (p->servers[FIRST].arrivals[arrival].n_prompt - 1) / SIMULATE_PAGE * SIMULATE_PAGE;
}

/* simulate_server.ended of the reader */
static void read_out(void *user, int64_t arrival)
{
  struct pair *p = user;
  double free_us = p->n_sent > 0 ? p->there_us[p->n_sent - 1] : 0;
  double last_tokens = fmin(whole_tokens(p, arrival), p->servers[FIRST].plan.n_tokens);
  p->under_way[p->n_sent] = arrival;
  p->there_us[p->n_sent++] = fmax(p->servers[FIRST].now_us, free_us) + p->setting->link_latency_us +
                             last_tokens * p->cost->kv_bytes_per_token / p->setting->link_bytes_per_s * 1e6;
}

static void bring(struct pair *p)
{
  int64_t arrival = p->under_way[p->n_there++];
  const struct simulate_arrival *a = &p->servers[SECOND].arrivals[arrival];
  int32_t n = whole_tokens(p, arrival);
  alps_split_back(&p->split, n, true, (int64_t)p->now_us);
  simulate_server_enqueue(&p->servers[SECOND], arrival, a->n_prompt, p->setting->sends_tail ? a->n_prompt - 1 : n, a->n_output);
}

/* Tokens that a replica has before it; answers count as the mean one, for nobody knows them. */
static int64_t load_of(const struct simulate_server *s)
{
  struct alps_counts counts;
  alps_counts(s->alps, &counts);
  return counts.waiting_tokens + (int64_t)counts.n_running * 256;
}

static void dispatch(struct pair *p, int64_t arrival)
{
  const struct simulate_arrival *a = &p->servers[FIRST].arrivals[arrival];
  struct simulate_server *decode = &p->servers[SECOND];
  int32_t n = whole_tokens(p, arrival);
  int64_t arrival_us = (int64_t)simulate_arrival_us(decode, arrival);
  if (p->setting->placement == SIMULATE_REPLICAS) {
    int at = load_of(&p->servers[FIRST]) <= load_of(&p->servers[SECOND]) ? FIRST : SECOND;
    simulate_server_enqueue(&p->servers[at], arrival, a->n_prompt, 0, a->n_output);
  } else if (alps_split_pays(&p->split, decode->alps, n, a->n_prompt - n, arrival_us, (int64_t)p->now_us)) {
    alps_split_sent(&p->split, n, (int64_t)p->now_us);
    simulate_server_enqueue(&p->servers[FIRST], arrival, n, 0, 1);
  } else {
    p->split.n_declined++;
    simulate_server_enqueue(decode, arrival, a->n_prompt, 0, a->n_output);
  }
}

static double end_us(const struct pair *p, int i)
{
  return p->step_us[i] > 0 ? p->servers[i].now_us + p->step_us[i] : INFINITY;
}

static void start_idle(struct pair *p)
{
  for (int i = FIRST; i <= SECOND; i++) {
    if (p->step_us[i] > 0) continue;
    p->servers[i].now_us = p->now_us;
    p->step_us[i] = simulate_server_begin(&p->servers[i]);
  }
}

static void finish_step(struct pair *p, int i)
{
  simulate_server_end(&p->servers[i], p->step_us[i]);
  p->step_us[i] = 0;
}

static void loop(struct pair *p)
{
  for (;;) {
    start_idle(p);
    double arrival_us = p->n_arrived < p->n ? simulate_arrival_us(&p->servers[FIRST], p->n_arrived) : INFINITY;
    double there_us = p->n_there < p->n_sent ? p->there_us[p->n_there] : INFINITY;
    double next_us = fmin(fmin(arrival_us, there_us), fmin(end_us(p, FIRST), end_us(p, SECOND)));
    if (!isfinite(next_us)) return;
    p->now_us = fmax(p->now_us, next_us);
    if (next_us == end_us(p, FIRST)) finish_step(p, FIRST);
    else if (next_us == end_us(p, SECOND)) finish_step(p, SECOND);
    else if (next_us == there_us) bring(p);
    else dispatch(p, p->n_arrived++);
    if (p->setting->may_give_up && p->servers[FIRST].n_late + p->servers[SECOND].n_late > p->n / 100 + 1) {
      p->result->is_given_up = true;
      return;
    }
  }
}

int simulate_pair(const struct simulate_cost *cost, const struct simulate_arrival *arrivals, int64_t n,
                  const struct simulate_setting *setting, struct simulate_result *result)
{
  struct pair p = {.cost = cost, .setting = setting, .result = result, .n = n};
  struct simulate_setting reader = *setting;
  memset(result, 0, sizeof *result);
  bool is_split = setting->placement != SIMULATE_REPLICAS;
  struct simulate_cost reader_cost = *cost;
  if (is_split) reader.itl_target_us = 0;
  if (is_split && setting->reader_tokens > 0) reader_cost.max_batch_tokens = setting->reader_tokens;
  p.split = (struct alps_split){.ttft_target_us = setting->knows_ttft_target ? (int64_t)setting->ttft_target_us : 0,
                                .always = setting->placement == SIMULATE_SPLIT_ALWAYS};
  p.under_way = mem_calloc((size_t)n, sizeof *p.under_way);
  p.there_us = mem_calloc((size_t)n, sizeof *p.there_us);
  bool is_open = simulate_server_init(&p.servers[FIRST], &reader_cost, arrivals, n, &reader, result);
  is_open = simulate_server_init(&p.servers[SECOND], cost, arrivals, n, setting, result) && is_open && p.under_way && p.there_us;
  p.servers[FIRST].is_reader = is_split;
  if (is_split) p.servers[FIRST].ended = read_out, p.servers[FIRST].user = &p;
  if (is_open) loop(&p);
  result->duration_us = p.now_us;
  result->n_handed_over = (int64_t)p.split.n_sent;
  for (int i = FIRST; i <= SECOND; i++) {
    result->server_busy_us[i] = p.servers[i].busy_us;
    simulate_server_fini(&p.servers[i]);
  }
  mem_free(p.under_way);
  mem_free(p.there_us);
  return is_open ? 0 : -1;
}
