/* sits2026-bench simulate: one run of the planner (the real src/alps) over a trace on a modelled device, in virtual time.
 * simulate_run.c is the discrete-event loop; simulate.c reads the files, searches for the goodput and writes the results. */
#ifndef SITS_TOOLS_BENCH_SIMULATE_H
#define SITS_TOOLS_BENCH_SIMULATE_H

#include <stdbool.h>
#include <stdint.h>

#include "alps/alps.h"

/* What a step costs on the device: linear layers are bound by weight bytes or by flops, decode attention by cache bytes, prompt attention
 * by flops; the sum plus a fixed part (launches, sampling, host). Keys of the cost file have the same names. */
struct simulate_cost {
  double weight_bytes, head_bytes, kv_bytes_per_token;
  double linear_flops_per_token, head_flops_per_row, attention_flops_per_pair;
  double read_bytes_per_s, weight_read_share, head_read_share, kv_read_share;
  double small_batch_tokens, small_batch_flops, large_batch_flops, attention_flops;
  double fixed_us, kv_memory_bytes, max_batch_tokens;
};

struct simulate_arrival { double at_us; int32_t n_prompt, n_output; };

/* Distribution of durations: 64 buckets an octave, so a quantile is at most 1.1 % high. */
#define SIMULATE_BUCKETS (64 * 36)
struct simulate_histogram { int64_t counts[SIMULATE_BUCKETS]; int64_t n; };

struct simulate_setting {
  enum alps_policy policy;
  int32_t max_seqs;            /* running at once; the batch of ALPS_STATIC */
  int32_t chunk_tokens;        /* ALPS_CHUNKED */
  int64_t itl_target_us;       /* ALPS_BUDGET */
  double speed;                /* arrivals are this much faster than in the trace */
  double itl_limit_us;         /* gaps beyond it are counted */
  double ttft_target_us;       /* a run whose P99 cannot meet it any more is given up; 0 = never */
};

struct simulate_result {
  bool is_given_up;            /* the first-token target is broken for sure; the rest of the numbers are of the part that ran */
  double duration_us, busy_us;
  int64_t n_requests, n_steps, n_output_tokens, n_prompt_tokens, n_preempted;
  double plan_us;              /* real time spent in the planner */
  int32_t most_running, most_waiting;
  int64_t n_itl_over;          /* gaps beyond itl_limit_us */
  struct simulate_histogram ttft, itl;
};

/* 0, or -1 without memory. */
int simulate_run(const struct simulate_cost *cost, const struct simulate_arrival *arrivals, int64_t n,
                 const struct simulate_setting *setting, struct simulate_result *result);
double simulate_quantile(const struct simulate_histogram *histogram, double q); /* us */
double simulate_step_us(const struct simulate_cost *cost, const struct alps_cost_work *work, int32_t n_rows);

#endif
