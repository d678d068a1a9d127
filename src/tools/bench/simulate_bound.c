/* How fast any scheduler at all could go: an upper bound on the goodput of a trace on a modelled device.
 *
 * Every request is one job: its prompt's reading at the device's best rate (weights and launches for nothing), with or without the
 * decoding of its answer. Without it the bound holds for every scheduler. With it only for those that decode an answer before its
 * prompt's deadline, at the rate of prompts; others may decode it later and pass. Its deadline is its arrival plus the first-token
 * target. With equal targets the order of arrival is the order of deadlines; then the fewest jobs are late when they run in that order
 * and, whenever one would be late, the longest of those taken is given up (Kise, Ibaraki, Mine, "A solvable case of the one-machine
 * scheduling problem with ready and due times", 1978). What is given up here costs nothing and leaves no gap, which can only be too
 * kind.
 */
#include <math.h>

#include "alps/alps_heap.h"
#include "base/mem.h"
#include "tools/bench/simulate.h"

struct bound {
  const struct simulate_cost *cost;
  const struct simulate_arrival *arrivals;
  int64_t n;
  double ttft_target_us;
  bool has_decode, drops_longest;
  double *work_us;             /* [n] */
  struct alps_link *links;     /* [n] */
};

static double best_token_us(const struct simulate_cost *c)
{
  const struct simulate_points *points = c->prompt_points.n > 0 ? &c->prompt_points : &c->points;
  double best = c->linear_flops_per_token / c->large_batch_flops * 1e6;
  for (int32_t i = 0; i < points->n; i++) {
    double each = points->us[i] / points->tokens[i];
    best = i == 0 ? each : fmin(best, each);
  }
  return best;
}

static double work_of(const struct bound *b, const struct simulate_arrival *a)
{
  double p = a->n_prompt, o = a->n_output, token_us = best_token_us(b->cost);
  double us = p * token_us + 0.5 * p * p * simulate_pair_us(b->cost);
  return b->has_decode ? us + o * token_us + o * (p + 0.5 * o) * simulate_kv_us(b->cost) : us;
}

static bool is_longer(const void *user, int32_t x, int32_t y)
{
  const double *work_us = user;
  return work_us[x] != work_us[y] ? work_us[x] > work_us[y] : x < y;
}

static bool can_carry(const struct bound *b, double speed)
{
  struct alps_order order = {is_longer, b->work_us, b->links};
  int32_t root = -1;
  int64_t n_late = 0;
  double at_us = 0;
  for (int32_t i = 0; i < b->n; i++) {
    double arrival_us = b->arrivals[i].at_us / speed;
    if (at_us <= arrival_us) {
      at_us = arrival_us;
      root = -1; /* idle: what ran before cannot delay what comes */
    }
    at_us += b->work_us[i];
    root = alps_heap_insert(&order, root, i);
    if (at_us <= arrival_us + b->ttft_target_us) continue;
    n_late++;
    if (!b->drops_longest) continue;
    at_us -= b->work_us[root];
    root = alps_heap_remove(&order, root, root);
  }
  return n_late * 100 <= b->n;
}

double simulate_bound(const struct simulate_cost *cost, const struct simulate_arrival *arrivals, int64_t n, double ttft_target_us,
                      bool has_decode, bool drops_longest)
{
  struct bound b = {.cost = cost, .arrivals = arrivals, .n = n, .ttft_target_us = ttft_target_us, .has_decode = has_decode,
                    .drops_longest = drops_longest};
  double low = 0.01, high = 1000;
  b.work_us = mem_calloc((size_t)n, sizeof *b.work_us);
  b.links = mem_calloc((size_t)n, sizeof *b.links);
  for (int64_t i = 0; b.work_us && i < n; i++) b.work_us[i] = work_of(&b, &arrivals[i]);
  while (b.work_us && b.links && high / low > 1.002) {
    double middle = sqrt(low * high);
    if (can_carry(&b, middle)) low = middle;
    else high = middle;
  }
  mem_free(b.work_us);
  mem_free(b.links);
  return low;
}
