/* Private to the CPU backend: a compiled program, its workers' scratch, and the batch in flight.
 *
 * Vocabulary: a program is a list of steps (one an op); a step is one or two phases; a phase is a number of independent items (some rows
 * of a weight, some tokens, some heads of the attention), and ends when all its items are done.
 *
 * Main path: submit (cpu.c) checks the batch, plans the attention, opens the first phase and lets the pool help with cpu_run_worker
 * (cpu_run.c): every worker claims items of the current phase, its own share first, then what others have not begun; whoever finishes the
 * last item opens the next phase. So a worker whose core was taken away holds the others up for one item, not for a whole share at
 * every phase. Items are done by cpu_linear.c, cpu_attention.c and cpu_steps.c.
 *
 * Rules: 1. Everything is allocated by cpu_compile; running allocates nothing. 2. Who computes a value may depend on the batch and on
 * chance, its bits may not: items never change an order of summation. 3. A worker reads the batch only while it holds an item: without
 * one it may be late, and the batch another. 4. Fields are written by one worker at a time: [init] by compile, [submit] by the calling
 * thread before the run, [worker] by that worker during it, [shared] in one phase and read in later ones.
 */
#ifndef SITS_BACKEND_CPU_CPU_PROGRAM_H
#define SITS_BACKEND_CPU_CPU_PROGRAM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "backend/cpu/cpu_act.h"
#include "backend/cpu/cpu_kv.h"
#include "backend/cpu/cpu_matmul.h"
#include "backend/cpu/cpu_ops.h"
#include "backend/cpu/cpu_pool.h"
#include "backend/program.h"

#define CPU_ACT_FORMATS 3            /* rows of enum cpu_act_format, and the outliers of ACT_INT4 */
#define CPU_ACT_SIDE 2
#define CPU_PRIVATE_TOKENS 6         /* most tokens that each worker normalises and quantises for itself: cheaper than a phase */
#define CPU_TOKENS_PER_ITEM 8        /* of the steps that work token by token */
#define CPU_BYTES_PER_ITEM (64 << 10) /* of packed weight in one item of a LINEAR, about: a few microseconds of reading */
#define CPU_CHUNK_PAGES 4            /* pages of one attention chunk; a row's partial results are merged chunk by chunk, always */
#define CPU_CHUNK_TOKENS (CPU_CHUNK_PAGES * KV_PAGE_TOKENS)
#define CPU_CHUNK_RECORD (CPU_CHUNK_PAGES + 1)
#define CPU_ATTENTION_ROWS 48        /* target rows (tokens of a block times H/G) that read a page together */
#define CPU_SPLIT_TOKENS 8           /* of a verified draft: with so many tokens a sequence's context is split between workers */
#define CPU_LANE_ROWS 24             /* the same in a lane, which stops between items: at a depth of 8,000 about 0.4 ms */

struct backend {
  struct backend_options options;
  struct cpu_pool *pool;
  const struct cpu_ops *ops;
  enum cpu_isa isa;
  int32_t n_threads;
  int32_t private_tokens;            /* up to this many tokens inputs are prepared by each worker; at most CPU_PRIVATE_TOKENS */
};

struct cpu_part {
  const struct cpu_weight *weight;   /* [init] */
  const float *bias;                 /* [rows] or NULL */
  int64_t rows;
};

struct cpu_range { int32_t part; int64_t r0, r1; };

struct cpu_step {                    /* all [init] */
  const struct program_op *op;
  bool is_rows;                      /* works on R rows */
  float *in[3], *out[3];             /* buffers; NULL = none */
  int32_t in_width, out_width;       /* of in[0] and out[0]; 0 = none */
  int32_t n_parts;
  struct cpu_part parts[PROGRAM_MAX_PARTS];
  struct cpu_range *ranges;          /* [n_ranges] the items of a LINEAR; with SWIGLU a range counts for both parts */
  int32_t n_ranges;
  int32_t unit;                      /* rows: panels are cut at multiples of it */
  const float *gain, *q_gain, *k_gain;
  enum act_kind act;                 /* how the input of a LINEAR is rounded */
  const uint8_t *is_outlier;         /* ACT_INT4: [in_width] */
};

enum cpu_phase_kind { CPU_PHASE_PREPARE, CPU_PHASE_MAIN, CPU_PHASE_APPEND };

struct cpu_phase { const struct cpu_step *step; enum cpu_phase_kind kind; };

/* A worker's share of the current phase: tag of the phase (32 bits), next claim and end (16 each), alone on its cache lines. */
struct cpu_share { _Alignas(128) _Atomic uint64_t word; };

struct cpu_worker {                  /* own cache lines */
  uint32_t prepared;                 /* tag of the phase whose private activation is ready */
  void *act[CPU_ACT_FORMATS];        /* CPU_PRIVATE_TOKENS tokens */
  float *normed;                     /* [CPU_PRIVATE_TOKENS][widest input] */
  float *strip;                      /* outputs of a panel before the epilogue: [strip_floats] */
  float *side;                       /* products of the outliers: as strip; NULL without ACT_INT4 */
  void *rows_f32;                    /* rows as f32 for ACT_FLOAT with quantised weights: [expand_bytes] */
  void *scratch;                     /* CPU_MATMUL_SCRATCH_BYTES */
  float *q;                          /* [rows][D] packed, scaled queries */
  float *scores;                     /* [rows][CPU_CHUNK_TOKENS] */
  float *acc, *total;                /* [rows][Dv] of this chunk; over the chunks so far */
  float *max, *sum, *total_max, *total_sum; /* [rows] */
  float *page_sums;                  /* [rows][max_chunks][CPU_CHUNK_RECORD] of sparse codecs: squares of what a row gave to the tokens of
                                        each page of a chunk, in units of exp(score - max)^2, and the chunk's max */
  float *expanded;                   /* CPU_KV_SCRATCH_FLOATS */
};

/* Consecutive tokens of one sequence that attend together. */
struct cpu_block { int32_t seq, t0, t1; };

struct cpu_batch {                   /* [submit] */
  const struct backend_batch *in;
  struct backend_kv *kv;
  int32_t n_blocks;
  struct cpu_block *blocks;          /* [max_blocks] */
  int32_t *page, *slot, *tile;       /* [max_tokens] where each token's key and value go; tile: its group (cpu_kv_open.h) */
  float *cosines, *sines;            /* [max_tokens][rope.dims] [shared] */
  int32_t n_chunks;                  /* of the longest sequence */
  bool splits_context;               /* chunks of one block are handled by several workers */
};

struct cpu_weight_entry { const struct sits_utd *utd; struct cpu_weight *weight; };

/* Where a lane's batch stopped: the phase, and what is left of each share. */
struct cpu_pause {
  int32_t index;                     /* of the phase; -1: nothing to go on with */
  int32_t n_left;                    /* claims */
  struct { int32_t next, end; } *rest; /* [n_threads] */
};

struct backend_program {
  /* the run: a phase's tag is run_base + its index, and the gate's value is the tag of the phase that is open */
  struct cpu_gate gate;
  _Alignas(128) _Atomic int32_t n_done; /* claims of the open phase that are finished */
  _Alignas(128) _Atomic uint32_t run_base; /* [submit] */
  struct cpu_share *shares;          /* [n_threads] */
  int32_t n_claims, n_items, grain;  /* of the open phase: grain items a claim */
  struct backend *backend;
  bool is_lane;                      /* weights are another program's */
  struct cpu_pause pause;            /* of a lane */
  backend_go_on *go_on;              /* [submit] asked by worker 0 between items; NULL: run to the end */
  void *go_on_user;
  const struct program *program;
  int32_t max_tokens, max_rows;      /* rows of T and R buffers */
  int32_t n_steps, n_weights;
  struct cpu_step *steps;            /* [n_steps] */
  struct cpu_range *ranges;          /* of all steps */
  int32_t n_phases;
  struct cpu_phase *phases;          /* [n_phases] */
  struct cpu_job job;                /* cpu_run_worker on this program */
  struct cpu_weight_entry *weights;  /* [n_weights] */
  void *region;                      /* packed weights */
  float *vectors;                    /* biases and gains */
  uint8_t *outlier_flags;            /* of all steps with ACT_INT4 */
  size_t expand_bytes;
  bool has_int4;
  struct backend_observer observer;  /* see backend.h */
  unsigned char *arena;              /* buffers and workers' scratch */
  float **buffers;                   /* [program->n_buffers] into the arena */
  void *act[CPU_ACT_FORMATS];        /* [shared] max(max_tokens, max_rows) tokens */
  float *normed;                     /* [shared] [max tokens][widest input] */
  float *exchanged;                  /* [n_ranks][...] what the ranks of a group with a link give each other; else nothing */
  size_t strip_floats;
  struct cpu_worker *workers;        /* [n_threads] */
  uint64_t n_bytes;
  /* attention */
  int32_t block_tokens;              /* tokens of a full block */
  int32_t split_rows, max_chunks;    /* room for partial results */
  float *partial;                    /* [split_rows][max_chunks][Dv + 2 + CPU_CHUNK_RECORD]: acc, max, sum, page sums [shared] */
  _Atomic int32_t *finished;         /* [split_rows] chunks done of a block and head; 0 between runs */
  struct cpu_batch batch;
  int64_t compute_us;                /* of the last run */
  int32_t n_rows_done;
  bool has_result;
  _Atomic bool has_lost_rank;        /* a collective was given up: the results since then mean nothing */
};

enum sits_status cpu_compile(struct backend *backend, const struct program *program, struct backend_program **out, struct sits_error *err)
    SITS_MUST_CHECK;
/* A program of its own on the weights of `program`, for max_tokens tokens and one row. */
enum sits_status cpu_compile_lane(struct backend_program *program, int32_t max_tokens, struct backend_program **out, struct sits_error *err)
    SITS_MUST_CHECK;
void cpu_program_destroy(struct backend_program *program);

/* Run the batch in p->batch to its end, with whatever workers come; with p->go_on set perhaps less. cpu_run_on goes on where it stopped.
 * Both return whether the end was reached. */
bool cpu_run(struct backend_program *p);
bool cpu_run_on(struct backend_program *p);
/* What a worker does: arg is the struct backend_program. */
void cpu_run_worker(void *arg, int32_t worker);

/* Items of a phase for the current batch, and one of them. tag: the phase's. */
int32_t cpu_phase_items(const struct backend_program *p, const struct cpu_phase *phase);
void cpu_phase_item(struct backend_program *p, const struct cpu_phase *phase, int32_t item, int32_t worker, uint32_t tag);

/* LINEAR. prepare: normalise and quantise some of n tokens for all, in so many items; item: one range of rows. */
int32_t cpu_linear_prepare_items(const struct backend_program *p, int32_t n);
void cpu_linear_prepare(struct backend_program *p, const struct cpu_step *step, int32_t item, int32_t worker);
void cpu_linear_item(struct backend_program *p, const struct cpu_step *step, int32_t item, int32_t worker, uint32_t tag);
/* ALL_REDUCE, ALL_GATHER: one item each; meets the other ranks twice. */
void cpu_collective(struct backend_program *p, const struct cpu_step *step);
/* Each run of BACKEND_COMPRESS_GROUP columns x of a row becomes s * round(x / s), s = max |x| / 127: what a compressed share is. */
void cpu_round_shares(float *x, int64_t n_rows, int32_t width);
int32_t cpu_attention_items(const struct backend_program *p);
void cpu_attention_item(struct backend_program *p, const struct cpu_step *step, int32_t item, int32_t worker);
void cpu_attention_plan(struct backend_program *p); /* [submit] blocks and split of the batch */

/* Head h of token t, D values after bias: norm, rotate, store. Shared by the fused and the plain ops. */
void cpu_store_k(struct backend_program *p, int32_t layer, int32_t t, int32_t head, float *k);
void cpu_store_v(struct backend_program *p, int32_t layer, int32_t t, int32_t head, float *v);
/* Hadamard over the largest power of two that divides D, block by block; its own inverse. */
void cpu_rotate_head(const struct cpu_ops *ops, float *x, int32_t head_dim);

/* Rows of a step's buffers in this batch: T or R. */
static inline int32_t cpu_step_tokens(const struct backend_program *p, const struct cpu_step *step)
{
  return step->is_rows ? p->batch.in->n_rows : p->batch.in->n_tokens;
}

#endif
