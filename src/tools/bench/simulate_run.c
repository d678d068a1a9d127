/* See simulate.h: arrivals until now -> plan -> time passes -> tokens are counted. */
#include <math.h>
#include <string.h>

#include "tools/bench/simulate_server.h"

static int64_t arrive(struct simulate_server *s, int64_t from, int64_t n)
{
  for (; from < n && simulate_arrival_us(s, from) <= s->now_us; from++)
    simulate_server_enqueue(s, from, s->arrivals[from].n_prompt, 0, s->arrivals[from].n_output);
  return from;
}

static void loop(struct simulate_server *s, int64_t n)
{
  int64_t n_arrived = 0;
  while (n_arrived < n || s->n_alive > 0) {
    n_arrived = arrive(s, n_arrived, n);
    double step_us = simulate_server_begin(s);
    if (step_us > 0) simulate_server_end(s, step_us);
    else if (n_arrived < n) s->now_us = fmax(s->now_us, simulate_arrival_us(s, n_arrived));
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
  struct simulate_server s;
  memset(result, 0, sizeof *result);
  bool is_open = simulate_server_init(&s, cost, arrivals, n, setting, result);
  if (is_open) loop(&s, n);
  result->duration_us = s.now_us;
  simulate_server_fini(&s);
  return is_open ? 0 : -1;
}
