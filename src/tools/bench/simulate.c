/* sits2026-bench simulate: policies of the planner on a request trace and a modelled device.
 *
 * Without --speed it searches, for every policy and inter-token target, the goodput: the highest speed-up of the trace's arrivals at which
 * the P99 of the time to the first token and of the inter-token time still meet their targets. With --speed it runs that one speed.
 * With --placement the same for two devices: as replicas, and one for prompts and one that decodes; then, for each of --speeds, the
 * lowest P99 inter-token time that each reaches while the first-token target holds.
 * Either way each run is a point of the curves (throughput against P99) in the results. Static batching is tried with several batch
 * sizes and the best is taken. Entry point: bench_simulate. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "tools/bench/bench.h"
#include "tools/bench/simulate.h"

enum { MOST_TARGETS = 16, MOST_BATCHES = 8, MOST_SPEEDS = 16 };

struct simulate_options {
  const char *trace, *cost, *policy, *itl_targets_ms, *static_batches, *out;
  double ttft_target_ms, speed, lowest_speed, highest_speed;
  int64_t max_seqs, chunk_tokens, requests;
  bool arrival_order;
  bool placement, sends_tail;
  double link_gb_per_s, link_latency_us;
  int64_t reader_tokens;
  const char *speeds;
};

#define AT(field) offsetof(struct simulate_options, field)
static const struct option_spec specs[] = {
    {"trace", OPTION_STRING, AT(trace), "", 0, 0, "", 0, NULL, "Input", "CSV with TIMESTAMP,ContextTokens,GeneratedTokens."},
    {"cost", OPTION_STRING, AT(cost), "", 0, 0, "", 0, NULL, "Input", "JSON file with the device's cost model."},
    {"requests", OPTION_INT, AT(requests), "0", 0, 1e7, "", 0, NULL, "Input", "Use the first so many rows only. 0: all."},
    {"policy", OPTION_ENUM, AT(policy), "all", 0, 0, "", 0, "all|static|continuous|chunked|alps", "Policy", "What is run."},
    {"max-seqs", OPTION_INT, AT(max_seqs), "256", 1, 4096, "sequences", 0, NULL, "Policy", "Most sequences decoded together."},
    {"chunk-tokens", OPTION_INT, AT(chunk_tokens), "2048", 16, 65536, "tokens", 0, NULL, "Policy", "Step size of the chunked policy."},
    {"static-batches", OPTION_STRING, AT(static_batches), "8,16,32,64,128", 0, 0, "", 0, NULL, "Policy", "Batch sizes tried for static."},
    {"itl-targets-ms", OPTION_STRING, AT(itl_targets_ms), "15,25,50,100", 0, 0, "", 0, NULL, "Targets", "P99 inter-token targets."},
    {"ttft-target-ms", OPTION_FLOAT, AT(ttft_target_ms), "1000", 1, 1e6, "ms", 0, NULL, "Targets", "P99 target of the first token."},
    {"arrival-order", OPTION_BOOL, AT(arrival_order), "false", 0, 0, "", 0, NULL, "Policy", "alps is not told the first-token target."},
    {"speed", OPTION_FLOAT, AT(speed), "0", 0, 1e4, "", 0, NULL, "Search", "Run this one speed-up of the arrivals. 0: search."},
    {"lowest-speed", OPTION_FLOAT, AT(lowest_speed), "0.1", 1e-3, 1e4, "", 0, NULL, "Search", "Where the search begins."},
    {"highest-speed", OPTION_FLOAT, AT(highest_speed), "40", 1e-3, 1e4, "", 0, NULL, "Search", "Where it ends."},
    {"placement", OPTION_BOOL, AT(placement), "false", 0, 0, "", 0, NULL, "Two devices", "Replicas, and prefill and decode apart."},
    {"speeds", OPTION_STRING, AT(speeds), "2,4,6,8,10,12", 0, 0, "", 0, NULL, "Two devices", "Speeds at which they are compared."},
    {"link-gb-per-s", OPTION_FLOAT, AT(link_gb_per_s), "350", 0.01, 1e5, "GB/s", 0, NULL, "Two devices", "Pages from one to the other."},
    {"link-latency-us", OPTION_FLOAT, AT(link_latency_us), "100", 0, 1e6, "us", 0, NULL, "Two devices", "Of handing a prompt back."},
    {"reader-tokens", OPTION_INT, AT(reader_tokens), "4096", 0, 65536, "tokens", 0, NULL, "Two devices",
     "Largest step of the device for prompts. 0: as the cost file says."},
    {"sends-tail", OPTION_BOOL, AT(sends_tail), "false", 0, 0, "", 0, NULL, "Two devices", "The last page too is handed over (none does)."},
    {"out", OPTION_STRING, AT(out), "", 0, 0, "", 0, NULL, "Output", "Results as JSON; - or nothing: standard output."},
};

struct bench {
  struct simulate_options options;
  struct simulate_cost cost;
  struct simulate_arrival *arrivals;
  int64_t n;
  json_t *points;
};

static const char *const PLACEMENTS[] = {[SIMULATE_ONE] = "one", [SIMULATE_REPLICAS] = "replicas",
                                         [SIMULATE_SPLIT_ALWAYS] = "split always", [SIMULATE_SPLIT] = "split where it pays"};

static void put(json_t *object, const char *key, double value)
{
  json_object_set_new(object, key, json_real(value));
}

static json_t *point_of(const struct simulate_setting *s, const struct simulate_result *r)
{
  double seconds = r->duration_us * 1e-6;
  json_t *p = json_pack("{s:s, s:i, s:b}", "policy", alps_policy_name(s->policy), "max_seqs", s->max_seqs, "given_up", r->is_given_up);
  put(p, "itl_target_ms", (double)s->itl_target_us * 1e-3);
  put(p, "speed", s->speed);
  put(p, "ttft_p50_ms", simulate_quantile(&r->ttft, 0.5) * 1e-3);
  put(p, "ttft_p99_ms", simulate_quantile(&r->ttft, 0.99) * 1e-3);
  put(p, "itl_p50_ms", simulate_quantile(&r->itl, 0.5) * 1e-3);
  put(p, "itl_p99_ms", simulate_quantile(&r->itl, 0.99) * 1e-3);
  put(p, "itl_late_share", r->itl.n ? (double)r->n_itl_over / (double)r->itl.n : 0);
  put(p, "output_tokens_per_s", (double)r->n_output_tokens / seconds);
  put(p, "total_tokens_per_s", (double)(r->n_output_tokens + r->n_prompt_tokens) / seconds);
  put(p, "busy_share", r->busy_us / r->duration_us);
  put(p, "steps", (double)r->n_steps);
  put(p, "preempted", (double)r->n_preempted);
  put(p, "most_running", r->most_running);
  put(p, "most_waiting", r->most_waiting);
  put(p, "plan_us_per_step", r->n_steps ? r->plan_us / (double)r->n_steps : 0);
  if (s->placement == SIMULATE_ONE) return p;
  json_object_set_new(p, "placement", json_string(PLACEMENTS[s->placement]));
  put(p, "handed_over_share", r->n_requests ? (double)r->n_handed_over / (double)r->n_requests : 0);
  put(p, "busy_share_first", r->server_busy_us[0] / r->duration_us);
  put(p, "busy_share_second", r->server_busy_us[1] / r->duration_us);
  return p;
}

static struct simulate_result result;

/* One run; whether it meets both targets. */
static bool meets(struct bench *b, struct simulate_setting *setting, double itl_target_us)
{
  setting->itl_limit_us = itl_target_us;
  int status = setting->placement == SIMULATE_ONE ? simulate_run(&b->cost, b->arrivals, b->n, setting, &result)
                                                  : simulate_pair(&b->cost, b->arrivals, b->n, setting, &result);
  if (status != 0) return false;
  json_array_append_new(b->points, point_of(setting, &result));
  double ttft = simulate_quantile(&result.ttft, 0.99), itl = simulate_quantile(&result.itl, 0.99);
  bool is_good = !result.is_given_up && ttft <= b->options.ttft_target_ms * 1e3 && result.n_itl_over * 100 <= result.itl.n;
  fprintf(stderr, "%-10s batch %3d target %5.0f ms speed %7.3f: first token p99 %8.1f ms, inter-token p99 %6.1f ms%s%s\n",
          setting->placement == SIMULATE_ONE ? alps_policy_name(setting->policy) : PLACEMENTS[setting->placement], setting->max_seqs,
          itl_target_us * 1e-3, setting->speed, ttft * 1e-3, itl * 1e-3,
          result.is_given_up ? " (given up)" : "", is_good ? "" : " broken");
  return is_good;
}

/* Highest speed that meets the targets, to 2 %. Doubling from the lowest, then halving the gap. 0 when even the lowest is too fast. */
static double goodput(struct bench *b, struct simulate_setting setting, double itl_target_us)
{
  double low = 0, high = b->options.lowest_speed;
  setting.may_give_up = true;
  for (;;) {
    setting.speed = high;
    if (!meets(b, &setting, itl_target_us)) break;
    low = high;
    if (high >= b->options.highest_speed) return low;
    high = fmin(high * 2, b->options.highest_speed);
  }
  while (low > 0 && high / low > 1.02) {
    setting.speed = sqrt(low * high);
    if (meets(b, &setting, itl_target_us)) low = setting.speed;
    else high = setting.speed;
  }
  return low;
}

static bool is_wanted(const struct bench *b, enum alps_policy policy)
{
  return strcmp(b->options.policy, "all") == 0 || strcmp(b->options.policy, alps_policy_name(policy)) == 0;
}

/* The policy's goodput at one target; for static batching the best of the batch sizes. */
static double best_of(struct bench *b, enum alps_policy policy, double target_us, const int64_t *batches, int n_batches,
                      int32_t *best_batch)
{
  struct simulate_setting setting = {.policy = policy, .max_seqs = (int32_t)b->options.max_seqs,
                                     .chunk_tokens = (int32_t)b->options.chunk_tokens, .itl_target_us = (int64_t)target_us,
                                     .ttft_target_us = b->options.ttft_target_ms * 1e3, .knows_ttft_target = !b->options.arrival_order};
  double best = 0;
  *best_batch = setting.max_seqs;
  if (policy != ALPS_STATIC) return goodput(b, setting, target_us);
  for (int i = 0; i < n_batches; i++) {
    setting.max_seqs = (int32_t)batches[i];
    double found = goodput(b, setting, target_us);
    if (found <= best) continue;
    best = found;
    *best_batch = setting.max_seqs;
  }
  return best;
}

static json_t *search(struct bench *b, const int64_t *targets, int n_targets, const int64_t *batches, int n_batches)
{
  static const enum alps_policy policies[] = {ALPS_STATIC, ALPS_WHOLE, ALPS_CHUNKED, ALPS_BUDGET};
  json_t *rows = json_array();
  for (int t = 0; t < n_targets; t++) {
    for (int i = 0; i < 4; i++) {
      int32_t batch;
      if (!is_wanted(b, policies[i])) continue;
      double found = best_of(b, policies[i], (double)targets[t] * 1e3, batches, n_batches, &batch);
      json_array_append_new(rows, json_pack("{s:I, s:f, s:s, s:f, s:i}", "itl_target_ms", (json_int_t)targets[t], "ttft_target_ms",
                                            b->options.ttft_target_ms, "policy", alps_policy_name(policies[i]), "goodput", found,
                                            "max_seqs", batch));
      fprintf(stderr, "== target %lld ms: %s carries %.3fx\n", (long long)targets[t], alps_policy_name(policies[i]), found);
    }
  }
  return rows;
}

static void run_one_speed(struct bench *b, const int64_t *targets, int n_targets, const int64_t *batches, int n_batches)
{
  for (int policy = ALPS_BUDGET; policy <= ALPS_STATIC; policy++) {
    if (!is_wanted(b, (enum alps_policy)policy)) continue;
    int n = policy == ALPS_BUDGET ? n_targets : policy == ALPS_STATIC ? n_batches : 1;
    for (int i = 0; i < n; i++) {
      struct simulate_setting setting = {.policy = (enum alps_policy)policy, .max_seqs = (int32_t)b->options.max_seqs,
                                         .chunk_tokens = (int32_t)b->options.chunk_tokens, .speed = b->options.speed,
                                         .ttft_target_us = b->options.ttft_target_ms * 1e3,
                                         .knows_ttft_target = !b->options.arrival_order};
      if (policy == ALPS_BUDGET) setting.itl_target_us = targets[i] * 1000;
      if (policy == ALPS_STATIC) setting.max_seqs = (int32_t)batches[i];
      meets(b, &setting, (double)targets[policy == ALPS_BUDGET ? i : 0] * 1e3);
    }
  }
}

static struct simulate_setting pair_setting(const struct bench *b, enum simulate_placement placement, double target_us)
{
  const struct simulate_options *o = &b->options;
  return (struct simulate_setting){.policy = ALPS_BUDGET, .max_seqs = (int32_t)o->max_seqs, .itl_target_us = (int64_t)target_us,
                                   .ttft_target_us = o->ttft_target_ms * 1e3, .knows_ttft_target = !o->arrival_order,
                                   .placement = placement, .link_bytes_per_s = o->link_gb_per_s * 1e9,
                                   .link_latency_us = o->link_latency_us, .reader_tokens = (int32_t)o->reader_tokens,
                                   .sends_tail = o->sends_tail};
}

/* The inter-token target with which the placement keeps the lowest P99 at this speed, the first-token target kept. NULL: none keeps it. */
static json_t *lowest(struct bench *b, enum simulate_placement placement, double speed, const int64_t *targets, int n_targets)
{
  double best_us = INFINITY;
  json_t *row = NULL;
  for (int t = 0; t < n_targets; t++) {
    struct simulate_setting setting = pair_setting(b, placement, (double)targets[t] * 1e3);
    setting.speed = speed;
    (void)meets(b, &setting, (double)targets[t] * 1e3);
    double itl = simulate_quantile(&result.itl, 0.99);
    if (simulate_quantile(&result.ttft, 0.99) > b->options.ttft_target_ms * 1e3 || itl >= best_us) continue;
    best_us = itl;
    json_decref(row);
    row = point_of(&setting, &result);
  }
  return row;
}

static void compare_pairs(struct bench *b, json_t *out, const int64_t *targets, int n_targets, const int64_t *speeds, int n_speeds)
{
  json_t *goodputs = json_array(), *rows = json_array();
  for (int t = 0; t < n_targets; t++) {
    for (int k = SIMULATE_REPLICAS; k <= SIMULATE_SPLIT; k++) {
      double found = goodput(b, pair_setting(b, (enum simulate_placement)k, (double)targets[t] * 1e3), (double)targets[t] * 1e3);
      json_array_append_new(goodputs, json_pack("{s:I, s:s, s:f}", "itl_target_ms", (json_int_t)targets[t], "placement", PLACEMENTS[k],
                                                "goodput", found));
      fprintf(stderr, "== target %lld ms: %s carries %.3fx\n", (long long)targets[t], PLACEMENTS[k], found);
    }
  }
  for (int s = 0; s < n_speeds; s++) {
    for (int k = SIMULATE_REPLICAS; k <= SIMULATE_SPLIT; k++) {
      json_t *row = lowest(b, (enum simulate_placement)k, (double)speeds[s], targets, n_targets);
      if (!row) row = json_pack("{s:s, s:f, s:b}", "placement", PLACEMENTS[k], "speed", (double)speeds[s], "keeps_first_token_target", 0);
      json_array_append_new(rows, row);
    }
  }
  json_object_set_new(out, "goodput", goodputs);
  json_object_set_new(out, "lowest_itl_p99", rows);
}

/* What no scheduler can pass, whatever the inter-token target; with decoding in it see simulate_bound.c. */
static json_t *bounds(const struct bench *b)
{
  double target_us = b->options.ttft_target_ms * 1e3, found[4];
  for (int i = 0; i < 4; i++) found[i] = simulate_bound(&b->cost, b->arrivals, b->n, target_us, i & 1, i < 2);
  fprintf(stderr, "bounds: %.2fx in the best order, %.2fx with decoding in it; %.2fx and %.2fx in order of arrival\n", found[0], found[1],
          found[2], found[3]);
  return json_pack("{s:f, s:f, s:f, s:f}", "prompts_only", found[0], "prompts_and_decodes", found[1], "prompts_only_in_arrival_order",
                   found[2], "prompts_and_decodes_in_arrival_order", found[3]);
}

static int simulate(struct bench *b, int argc, char **argv)
{
  int64_t targets[MOST_TARGETS], batches[MOST_BATCHES], speeds[MOST_SPEEDS];
  int n_targets = bench_parse_list(b->options.itl_targets_ms, targets, MOST_TARGETS);
  int n_batches = bench_parse_list(b->options.static_batches, batches, MOST_BATCHES);
  int n_speeds = bench_parse_list(b->options.speeds, speeds, MOST_SPEEDS);
  if (!b->options.trace || !b->options.cost || !n_targets || !n_batches || !n_speeds) {
    fprintf(stderr, "sits2026-bench simulate: needs --trace and --cost, and lists such as --itl-targets-ms 15,50\n");
    return 2;
  }
  if (!simulate_read_cost(b->options.cost, &b->cost)) return 1;
  b->n = simulate_read_trace(b->options.trace, b->options.requests, &b->arrivals);
  if (b->n == 0) return 1;
  json_t *out = bench_header("simulate", argc, argv);
  b->points = json_array();
  if (!out || !b->points) return 1;
  json_object_set_new(out, "trace_requests", json_integer(b->n));
  json_object_set_new(out, "bounds", bounds(b));
  if (b->options.placement) compare_pairs(b, out, targets, n_targets, speeds, n_speeds);
  else if (b->options.speed > 0) run_one_speed(b, targets, n_targets, batches, n_batches);
  else json_object_set_new(out, "goodput", search(b, targets, n_targets, batches, n_batches));
  json_object_set(out, "points", b->points);
  return bench_write_json(out, b->options.out) ? 0 : 1;
}

int bench_simulate(int argc, char **argv)
{
  struct bench b = {0};
  struct option_set set;
  int status;
  if (!bench_parse("simulate", "the planner's policies on a trace and a modelled device", &set, specs, sizeof specs / sizeof specs[0],
                   &b.options, argc, argv, &status)) {
    return status;
  }
  status = simulate(&b, argc, argv);
  mem_free(b.arrivals);
  json_decref(b.points);
  option_set_fini(&set);
  return status;
}
