/* Private to the CPU backend: a compiled program, its workers' scratch, and the batch in flight.
 *
 * Main path: submit (cpu.c) checks the batch and fills struct cpu_batch -> cpu_pool_run(cpu_run_worker) -> every worker walks the same
 * list of steps, one function a step (cpu_run.c, cpu_linear.c, cpu_attention.c), with a barrier after each.
 *
 * Rules: 1. Everything is allocated by cpu_compile; running allocates nothing. 2. Who computes a value may depend on the batch, its bits
 * may not: token splits, row splits and context splits never change an order of summation. 3. Fields are written by one worker at a time:
 * [init] by compile, [submit] by the calling thread before the run, [worker] by that worker during it, [shared] between barriers.
 */
#ifndef SITS_BACKEND_CPU_CPU_PROGRAM_H
#define SITS_BACKEND_CPU_CPU_PROGRAM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "backend/cpu/cpu_kv.h"
#include "backend/cpu/cpu_matmul.h"
#include "backend/cpu/cpu_ops.h"
#include "backend/cpu/cpu_pool.h"
#include "backend/program.h"

#define CPU_ACT_FORMATS 2            /* rows of enum cpu_act_format */
#define CPU_PRIVATE_TOKENS 2         /* up to this many tokens each worker normalises and quantises for itself: cheaper than a barrier */
#define CPU_CHUNK_PAGES 4            /* pages of one attention chunk; a row's partial results are merged chunk by chunk, always */
#define CPU_CHUNK_TOKENS (CPU_CHUNK_PAGES * KV_PAGE_TOKENS)
#define CPU_ATTENTION_ROWS 48        /* target rows (tokens of a block times H/G) that read a page together */

struct backend {
  struct backend_options options;
  struct cpu_pool *pool;
  const struct cpu_ops *ops;
  enum cpu_isa isa;
  int32_t n_threads;
};

struct cpu_part {
  const struct cpu_weight *weight;   /* [init] */
  const float *bias;                 /* [rows] or NULL */
  int64_t rows;
};

struct cpu_range { int64_t r0, r1; };

struct cpu_step {                    /* all [init] */
  const struct program_op *op;
  bool is_rows;                      /* works on R rows */
  float *in[3], *out[3];             /* buffers; NULL = none */
  int32_t in_width, out_width;       /* of in[0] and out[0]; 0 = none */
  int32_t n_parts;
  struct cpu_part parts[PROGRAM_MAX_PARTS];
  struct cpu_range *ranges;          /* [n_threads][PROGRAM_MAX_PARTS] rows that each worker owns */
  int32_t unit;                      /* rows: panels are cut at multiples of it */
  const float *gain, *q_gain, *k_gain;
};

struct cpu_worker {                  /* own cache lines */
  void *act[CPU_ACT_FORMATS];        /* CPU_PRIVATE_TOKENS tokens */
  float *normed;                     /* [CPU_PRIVATE_TOKENS][widest input] */
  float *strip;                      /* outputs of a panel before the epilogue: [strip_floats] */
  void *scratch;                     /* CPU_MATMUL_SCRATCH_BYTES */
  float *q;                          /* [rows][D] packed, scaled queries */
  float *scores;                     /* [rows][CPU_CHUNK_TOKENS] */
  float *acc, *total;                /* [rows][Dv] of this chunk; over the chunks so far */
  float *max, *sum, *total_max, *total_sum; /* [rows] */
  float *expanded;                   /* CPU_KV_SCRATCH_FLOATS */
};

/* Consecutive tokens of one sequence that attend together. */
struct cpu_block { int32_t seq, t0, t1; };

struct cpu_batch {                   /* [submit] */
  const struct backend_batch *in;
  struct backend_kv *kv;
  int32_t n_blocks;
  struct cpu_block *blocks;          /* [max_blocks] */
  int32_t *page, *slot, *seq;        /* [max_tokens] where each token's key and value go; its sequence */
  float *cosines, *sines;            /* [max_tokens][rope.dims] [shared] */
  int32_t n_chunks;                  /* of the longest sequence */
  bool splits_context;               /* chunks of one block are handled by several workers */
};

struct cpu_weight_entry { const struct sits_utd *utd; struct cpu_weight *weight; };

struct backend_program {
  struct backend *backend;
  const struct program *program;
  int32_t max_tokens, max_rows;      /* rows of T and R buffers */
  int32_t n_steps, n_weights;
  struct cpu_step *steps;            /* [n_steps] */
  struct cpu_range *ranges;          /* of all steps */
  struct cpu_weight_entry *weights;  /* [n_weights] */
  void *region;                      /* packed weights */
  float *vectors;                    /* biases and gains */
  unsigned char *arena;              /* buffers and workers' scratch */
  float **buffers;                   /* [program->n_buffers] into the arena */
  void *act[CPU_ACT_FORMATS];        /* [shared] max(max_tokens, max_rows) tokens */
  float *normed;                     /* [shared] [max tokens][widest input] */
  size_t strip_floats;
  struct cpu_worker *workers;        /* [n_threads] */
  uint64_t n_bytes;
  /* attention */
  int32_t block_tokens;              /* tokens of a full block */
  int32_t split_rows, max_chunks;    /* room for partial results */
  float *partial;                    /* [split_rows][max_chunks][Dv + 2]: acc, max, sum [shared] */
  _Atomic int32_t *claimed;          /* [n_layers] next attention item */
  _Atomic int32_t *finished;         /* [split_rows] chunks done of a block and head; 0 between runs */
  struct cpu_batch batch;
  int64_t compute_us;                /* of the last run */
  int32_t n_rows_done;
  bool has_result;
};

enum sits_status cpu_compile(struct backend *backend, const struct program *program, struct backend_program **out, struct sits_error *err)
    SITS_MUST_CHECK;
void cpu_program_destroy(struct backend_program *program);

/* What each worker does for a batch. arg: struct backend_program. */
void cpu_run_worker(void *arg, int32_t worker);

/* Steps that have files of their own. No barrier at their end. */
void cpu_linear(struct backend_program *p, const struct cpu_step *step, int32_t worker);
void cpu_attention(struct backend_program *p, const struct cpu_step *step, int32_t worker);
void cpu_attention_plan(struct backend_program *p); /* [submit] blocks and split of the batch */

/* Head h of token t, D values after bias: norm, rotate, store. Shared by the fused and the plain ops. */
void cpu_store_k(struct backend_program *p, int32_t layer, int32_t t, int32_t head, float *k);
void cpu_store_v(struct backend_program *p, int32_t layer, int32_t t, int32_t head, float *v);
/* Hadamard over the largest power of two that divides D, block by block; its own inverse. */
void cpu_rotate_head(const struct cpu_ops *ops, float *x, int32_t head_dim);

/* Part `worker` of n items, in multiples of `multiple`. */
static inline void cpu_split(int64_t n, int64_t multiple, int32_t n_workers, int32_t worker, int64_t *i0, int64_t *i1)
{
  const int64_t units = (n + multiple - 1) / multiple;
  const int64_t a = units * worker / n_workers * multiple, b = units * (worker + 1) / n_workers * multiple;
  *i0 = a < n ? a : n;
  *i1 = b < n ? b : n;
}

#endif
