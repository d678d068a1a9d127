/* What a backend compiles: a language model as a flat list of ops over numbered buffers, independent of any device.
 *
 * Vocabulary: an op reads and writes buffers; a buffer is a matrix of f32 (as far as anyone can see) with one row per token of the step
 * (T) or per wanted logit row (R) and a fixed width; a part is one weight of a LINEAR op. graph_stitch makes programs; it fuses ops
 * only as far as the backend's `fusions` mask says, so a backend implements the ten plain ops and whichever fusions pay on its device.
 *
 * Rules: 1. Ops run in list order; an op sees all effects of those before it. 2. Where the table below says so, an output may be the same
 * buffer as an input of equal width (in place); otherwise outputs differ from inputs. 3. A program and everything it points at (weights,
 * inv_freq) is read-only and outlives what is compiled from it. 4. Weights are told apart by pointer: two ops naming the same utd share one
 * packed copy (tied heads).
 *
 *   kind          in            out       formula, row by row                              [fused bit: change]
 *   EMBED         -             x         x = weight row of the batch's token; a rank's weight has the rows of its part of the vocabulary,
 *                                         in rank order, and other tokens' x are zeros (an ALL_REDUCE follows)
 *   RMSNORM       x             y         y = x / sqrt(mean(x^2) + rms_eps) * gain
 *   LINEAR        x             y_i       y_i = W_i x + b_i for each part i                [NORM: x is first normalised with gain]
 *                                         [ADD: in r; out y = r + W_0 x + b_0, in place on r allowed]
 *                                         [SWIGLU: two parts; out y = silu(W_0 x) * (W_1 x)]
 *                                         [QKV: three parts q k v; then as ROPE with bit ROPE; out q alone, k and v go to the cache]
 *                 x is rounded as op.act says before it is multiplied (after the norm, where that is fused); NULL: as the backend likes
 *   HEAD_NORM     x             y         RMSNORM of each head's D values with gain [D]; in place allowed
 *   ROPE          x             y         rotate each head's pairs by position * inv_freq; in place allowed
 *                                         [ROPE: in q k v, out q: head norms where q_gain/k_gain are set, rotation of q and k, append]
 *   KV_APPEND     k v           -         store at the token's position in the sequence's pages of this layer; k and v (here and in
 *                                         ROPE's) hold anything afterwards
 *   ATTENTION     q             y         softmax(q k / sqrt(D)) v, causal, over the sequence's pages of this layer, sliding window if any;
 *                                         query head h reads kv head h / (H/G)
 *   SWIGLU        g u           y         y = silu(g) * u, silu(g) = g / (1 + exp(-g)); in place on either allowed
 *   ADD           a b           y         y = a + b; in place on a or b allowed            [ADD_NORM: out y and z = RMSNORM(y, gain)]
 *   SELECT_ROWS   x             y         y[r] = x[row_token[r]]: from T rows to R rows
 *   ALL_REDUCE    x             y         y = sum of x over all ranks, in rank order; the same bits on every rank
 *                                         [REDUCE on LINEAR: y_0 = sum over ranks of W_0 x; with ADD y = r + that sum]
 *   ALL_GATHER    x             y         y = the x of rank 0, of rank 1, ... side by side: n_ranks times as wide
 *
 * Ranks: a program cut over n_ranks devices (graph/graph.h, graph_shard) is a list, one program a rank in rank order, linked by next_rank;
 * all have the same ops, and each rank's H, G and weights are its share. The list is owned by its first program.
 */
#ifndef SITS_BACKEND_PROGRAM_H
#define SITS_BACKEND_PROGRAM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/buf.h"
#include "sits2026/status.h"
#include "sits2026/utd.h"
#include "tensor/act_format.h"

#define PROGRAM_MAX_PARTS 3
#define PROGRAM_NONE (-1)            /* no such buffer */

enum program_op_kind {
  PROGRAM_EMBED, PROGRAM_RMSNORM, PROGRAM_LINEAR, PROGRAM_HEAD_NORM, PROGRAM_ROPE, PROGRAM_KV_APPEND, PROGRAM_ATTENTION, PROGRAM_SWIGLU,
  PROGRAM_ADD, PROGRAM_SELECT_ROWS, PROGRAM_ALL_REDUCE, PROGRAM_ALL_GATHER, PROGRAM_OP_KINDS
};

/* What a backend can do in one op (struct backend_vtable, field fusions), and what was done to an op (struct program_op, field fused). */
enum program_fusion {
  PROGRAM_FUSE_GROUP = 1 << 0,       /* LINEARs of one input become parts of one op: q,k,v and gate,up share one quantised activation */
  PROGRAM_FUSE_NORM = 1 << 1,        /* RMSNORM into the LINEARs that read it */
  PROGRAM_FUSE_ADD_NORM = 1 << 2,    /* RMSNORM into the ADD before it (where NORM was not applied) */
  PROGRAM_FUSE_ROPE = 1 << 3,        /* HEAD_NORM, ROPE and KV_APPEND of a layer into one ROPE */
  PROGRAM_FUSE_QKV = 1 << 4,         /* that one into the grouped LINEAR; needs GROUP and ROPE */
  PROGRAM_FUSE_SWIGLU = 1 << 5,      /* SWIGLU into the grouped LINEAR; needs GROUP */
  PROGRAM_FUSE_ADD = 1 << 6,         /* residual ADD into the LINEAR before it */
  PROGRAM_MOVE_SELECT = 1 << 7,      /* SELECT_ROWS moved up to the last attention, so that the last layer's tail works on R rows only */
  PROGRAM_FUSE_REDUCE = 1 << 8,      /* ALL_REDUCE into the LINEAR before it */
};

enum program_rope_style {
  PROGRAM_ROPE_HALF_SPLIT,           /* pairs (i, i + dims/2) */
  PROGRAM_ROPE_INTERLEAVED,          /* pairs (2i, 2i + 1) */
};

struct program_rope {
  enum program_rope_style style;
  int32_t dims;                      /* even, <= D; the other values of a head pass unchanged */
  const float *inv_freq;             /* [dims/2] radians per position, scaling applied; borrowed */
  float magnitude;                   /* multiplies cos and sin */
};

struct program_dims {
  int32_t n_layers, n_embd, n_heads, n_kv_heads, head_dim, n_ff, n_vocab; /* L E H G D F V */
  int32_t max_context;               /* positions the model was made for */
  int32_t sliding_window;            /* tokens a query sees, itself included; 0 = all */
  float rms_eps;
  int32_t rank, n_ranks;             /* whose share; n_ranks 0 or 1: the whole. H and G are the rank's, E, F and V the model's */
};

struct program_buffer {
  char name[24];                     /* of the first value kept there, for plans and dumps */
  int32_t width;                     /* elements of a row */
  bool is_rows;                      /* R rows instead of T */
};

struct program_part {
  const struct sits_utd *weight;     /* [out][in] */
  const struct sits_utd *bias;       /* [out], NULL = none */
};

struct program_op {
  enum program_op_kind kind;
  uint32_t fused;                    /* program_fusion bits applied */
  int32_t layer;                     /* 0..L-1; PROGRAM_NONE outside the layers */
  int32_t in[3], out[3];             /* buffers in the table's order, PROGRAM_NONE beyond. LINEAR with ADD: in[0] x, in[1] r */
  int32_t n_parts;                   /* LINEAR, EMBED (one) */
  struct program_part parts[PROGRAM_MAX_PARTS];
  const struct act_format *act;      /* LINEAR: how x is rounded; borrowed; NULL = ACT_BACKEND */
  const struct sits_utd *gain;       /* RMSNORM, HEAD_NORM; LINEAR with NORM; ADD with ADD_NORM */
  const struct sits_utd *q_gain, *k_gain; /* [D] LINEAR with QKV, ROPE with ROPE; NULL where the model has none */
};

enum { PROGRAM_FUSIONS = 9 };        /* bits of enum program_fusion */

/* What the stitcher did with one kind of fusion. */
struct program_choice { int32_t n_possible, n_taken; double saved_ns; /* by those taken, estimated; 0 where nothing was weighed */ };

struct program {
  struct program_dims dims;
  struct program_rope rope;
  int32_t n_buffers, n_ops;
  struct program_buffer *buffers;    /* [n_buffers] owned */
  struct program_op *ops;            /* [n_ops] owned */
  int32_t logits;                    /* buffer [R][V] that holds the result */
  struct program_choice choices[PROGRAM_FUSIONS]; /* by bit number; for plans */
  int32_t weighed_tokens;            /* of the step that saved_ns is of; 0: nothing was weighed */
  struct arena *arena;               /* owned: the rank's descriptors; NULL for a whole program */
  struct program *next_rank;         /* owned */
};

static inline int32_t program_n_ranks(const struct program *program)
{
  return program->dims.n_ranks > 1 ? program->dims.n_ranks : 1;
}

void program_destroy(struct program *program);

/* Does it obey the rules above: widths fit, buffers exist, every buffer is written before it is read, fused ops are complete.
 * Backends call it first thing in compile. SITS_INVALID_ARGUMENT names the op. */
enum sits_status program_check(const struct program *program, struct sits_error *err) SITS_MUST_CHECK;

/* One line an op, for --print-plan. False when the buffer overflowed. */
bool program_write_plan(const struct program *program, struct buf *out);

const char *program_op_name(enum program_op_kind kind);

#endif
