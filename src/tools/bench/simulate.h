/* sits2026-bench simulate: one run of the planner (the real src/alps) over a trace on a modelled device, in virtual time.
 * simulate_run.c is the discrete-event loop, simulate_pair.c that of two devices, simulate_server.c a device;
 * simulate_bound.c what no scheduler can pass; simulate.c searches for the goodput and writes
 * the results; simulate_input.c reads the files. */
#ifndef SITS_TOOLS_BENCH_SIMULATE_H
#define SITS_TOOLS_BENCH_SIMULATE_H

#include <stdbool.h>
#include <stdint.h>

#include "alps/alps.h"

/* What a step costs on the device: linear layers are bound by weight bytes or by flops, decode attention by cache bytes, prompt attention
 * by flops; the sum plus a fixed part (launches, sampling, host). Keys of the cost file have the same names. Where the file has "points",
 * pairs of tokens and microseconds as measured, straight lines between them stand for linear layers, head and fixed part; "prompt_points"
 * are those of steps that hold tokens of prompts, where these take another way. */
#define SIMULATE_POINTS 32
struct simulate_points { int32_t n; double tokens[SIMULATE_POINTS], us[SIMULATE_POINTS]; }; /* ascending */
struct simulate_cost {
  double weight_bytes, head_bytes, kv_bytes_per_token;
  double linear_flops_per_token, head_flops_per_row, attention_flops_per_pair;
  double read_bytes_per_s, weight_read_share, head_read_share, kv_read_share;
  double small_batch_tokens, small_batch_flops, large_batch_flops, attention_flops;
  double fixed_us, kv_memory_bytes, max_batch_tokens;
  double tile_tokens;           /* tokens of prompts are computed in tiles of so many; 0: one by one */
  double lane_tokens, lane_pieces, piece_us; /* longest chunk that is read in slices (0: none is), pieces of one, what each of them adds */
  struct simulate_points points, prompt_points;
};

struct simulate_arrival { double at_us; int32_t n_prompt, n_output; };

/* Distribution of durations: 64 buckets an octave, so a quantile is at most 1.1 % high. */
#define SIMULATE_BUCKETS (64 * 36)
struct simulate_histogram { int64_t counts[SIMULATE_BUCKETS]; int64_t n; };

/* One device; two that share the arrivals; one for prompts and one that decodes, handing over every prompt or where it pays. */
enum simulate_placement { SIMULATE_ONE, SIMULATE_REPLICAS, SIMULATE_SPLIT_ALWAYS, SIMULATE_SPLIT };

struct simulate_setting {
  enum alps_policy policy;
  int32_t max_seqs;            /* running at once; the batch of ALPS_STATIC */
  int32_t chunk_tokens;        /* ALPS_CHUNKED */
  int64_t itl_target_us;       /* ALPS_BUDGET */
  double speed;                /* arrivals are this much faster than in the trace */
  double itl_limit_us;         /* gaps beyond it are counted */
  double ttft_target_us;       /* ALPS_BUDGET keeps it where it can; 0 = none */
  bool knows_ttft_target;      /* the planner is told of it; else it serves prompts in order of arrival */
  enum simulate_placement placement;
  double link_bytes_per_s, link_latency_us; /* between two devices */
  int32_t reader_tokens;       /* largest step of the one for prompts */
  bool sends_tail;             /* the tokens behind the last whole page are handed over, too (no engine does that) */
  bool may_give_up;            /* end a run whose P99 of the first token cannot meet the target any more */
};

struct simulate_result {
  bool is_given_up;            /* the first-token target is broken for sure; the rest of the numbers are of the part that ran */
  double duration_us, busy_us;
  int64_t n_requests, n_steps, n_output_tokens, n_prompt_tokens, n_preempted;
  double plan_us;              /* real time spent in the planner */
  int32_t most_running, most_waiting;
  int64_t n_handed_over;       /* prompts */
  double server_busy_us[2];    /* of two devices */
  int64_t n_itl_over;          /* gaps beyond itl_limit_us */
  struct simulate_histogram ttft, itl;
};

/* 0, or -1 without memory. */
int simulate_run(const struct simulate_cost *cost, const struct simulate_arrival *arrivals, int64_t n,
                 const struct simulate_setting *setting, struct simulate_result *result);
/* The same on two devices: setting->placement is not SIMULATE_ONE. */
int simulate_pair(const struct simulate_cost *cost, const struct simulate_arrival *arrivals, int64_t n,
                  const struct simulate_setting *setting, struct simulate_result *result);
double simulate_quantile(const struct simulate_histogram *histogram, double q); /* us */
double simulate_step_us(const struct simulate_cost *cost, const struct alps_cost_work *work, int32_t n_rows);
double simulate_kv_us(const struct simulate_cost *cost);   /* reading one cached token */
double simulate_pair_us(const struct simulate_cost *cost); /* attention of one prompt token to one other */

/* The highest speed at which a schedule could exist that keeps the first-token target for 99 %: prompts at the device's best rate, with or
 * without the decoding of the answers; drops_longest: the best order there is, else order of arrival. */
double simulate_bound(const struct simulate_cost *cost, const struct simulate_arrival *arrivals, int64_t n, double ttft_target_us,
                      bool has_decode, bool drops_longest);

/* Read a cost file; say on stderr what is wrong with it. */
bool simulate_read_cost(const char *path, struct simulate_cost *cost);
/* Read a trace (CSV in order of arrival, times from its first row on), the first n_most rows or, at 0, all; *out is the caller's, to
 * be freed with mem_free. The number of rows, 0 after a message on stderr. */
int64_t simulate_read_trace(const char *path, int64_t n_most, struct simulate_arrival **out);

#endif
