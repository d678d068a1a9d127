/* Private to src/backend/cuda: the device, a compiled program, page memory.
 *
 * Vocabulary: the fast path is a step of at most 16 tokens on a program whose layers are all packed 4-bit (five launches a layer); the
 * general path takes any step and any weights. A bucket is a padded batch size for which a decode step is captured as one graph.
 * Rules: 1. All device memory is taken by cuda_memory_alloc during open, compile and kv_create; nothing is taken later. 2. Every CUDA call
 * goes through CUDA_CALL: the first failure marks the backend failed (sticky) and is logged once. 3. One thread.
 *
 * Files: cuda.c (vtable, checks of a batch), cuda_memory.c (allocation, errors), cuda_weights.c (packing), cuda_compile.c (program to
 * layers, workspaces), cuda_run.c (a step's launches), cuda_gemm.c (which GEMM for which weight), cuda_blas.c (cuBLASLt at run time),
 * cuda_graph.c (captured steps), cuda_kv.c (pages), cuda_sparse.c (blocks of fp4-sparse), cuda_kept.c (a long prompt's expanded keys),
 * cuda_act.c (rounded activations),
 * cuda_resident.c (expanded weights that stay), cuda_lane.c (a prompt's chunk in slices), cuda_comm.c (collectives: cuda_comm.h).
 */
#ifndef SITS_BACKEND_CUDA_INTERNAL_H
#define SITS_BACKEND_CUDA_INTERNAL_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "backend/cuda/cuda_blas.h"
#include "backend/program.h"
#include "kernels.h"

#define CUDA_MAX_BLOCKS 4096        /* device and pinned allocations of one backend */
#define CUDA_FAST_TOKENS K_MAX_DECODE_TOKENS
#define CUDA_GRAPH_TOKENS 256       /* largest captured batch */
#define CUDA_KEEP_FROM 1024         /* cached tokens of a sequence whose expanded keys are worth keeping for its next chunk */
#define CUDA_GATHER_TOKENS 128      /* a sequence's gathered keys start at multiples of this */
#define CUDA_LT_WORKSPACE (64u << 20)
#define CUDA_MAX_LT_PLANS 1024         /* a power of two */
#define CUDA_MAX_GRAPHS 64
#define CUDA_TILE_TOKENS 128         /* of the library's 8-bit and 16-bit products */
#define CUDA_E4M3_ALIGN 16           /* the library wants every dimension of e4m3 products a multiple of this */
#define CUDA_LANE_TOKENS 1024        /* a chunk that computes nearly as well as any, in pieces of about a millisecond */
#define CUDA_IN_FLIGHT 2             /* batches submitted and not waited for */

enum cuda_recipe { CUDA_RECIPE_AUTO, CUDA_RECIPE_W4A16, CUDA_RECIPE_W4A8 };
enum cuda_prefill { CUDA_PREFILL_AUTO, CUDA_PREFILL_RESIDENT, CUDA_PREFILL_EXPAND };

struct cuda_block { void *data; size_t bytes; bool is_pinned; const void *owner; };

struct backend {
  struct backend_options options;
  int32_t device, n_sm, compute_major;
  enum cuda_recipe recipe;
  enum cuda_prefill prefill_weights;
  cudaStream_t stream;
  cublasLtHandle_t lt;
  void *lt_workspace;
  bool is_failed;                   /* sticky */
  int64_t passed_us;                /* clock: a batch's end was seen */
  struct cuda_block blocks[CUDA_MAX_BLOCKS];
  int32_t n_blocks;
  char name[64];
};

enum cuda_weight_form { CUDA_W4, CUDA_F16 };

/* One GEMM's weight: the parts of a LINEAR op side by side (gate and up in turns of eight rows). */
struct cuda_weight {
  const struct program_part *parts; /* of the first op that named it */
  int32_t n_parts;
  bool is_interleaved;
  enum cuda_weight_form form;
  enum k_w4_format format;          /* CUDA_W4 */
  int32_t rows, cols;               /* rows as multiplied, interleave padding included */
  void *data;                       /* packed tiles, or f16 [rows][k_blocks*128] */
  void *resident;                   /* expanded for steps of many tokens (cuda_resident.c), or NULL: each such step expands */
  float *channel;                   /* [padded rows] scales are channel * 0 .. 16; NULL: not of that kind */
  bool has_powers;                  /* the factors are 0 and powers of two: times a 4-bit integer they are e4m3 to the bit */
  float *bias;                      /* [rows] or NULL */
  const struct act_format *act;     /* how the LINEAR's input is rounded; NULL: as the backend likes */
  enum k_act_round round;           /* the same as kernels say it */
  uint8_t *outliers;                /* bits of the columns that stay in 8 bits, or NULL */
  bool has_plain_input;             /* neither rounded nor rotated: the fast path may make it */
};

struct cuda_layer {
  struct cuda_weight *qkv, *o, *gate_up, *down;
  float *attn_gain, *ffn_gain, *q_gain, *k_gain; /* [E], [E], [D] or NULL */
};

/* One step's index arrays, on the device and in pinned memory in the same order, so that one copy fills them. */
struct cuda_inputs {
  int32_t max_tokens, max_seqs;
  int32_t *device, *host[CUDA_IN_FLIGHT];
  int32_t *tokens, *positions, *token_seq, *seq_start, *kv_len, *row_token, *offset, *open_slot; /* into device */
  int64_t n_words;
};

struct cuda_lt_plan { int32_t rows, cols, n; int kind; cublasLtMatmulAlgo_t algo; cublasLtMatmulDesc_t op; cublasLtMatrixLayout_t a, b,
  d; };
/* By shape and kind; a program's, which its lane shares. */
struct cuda_lt_plans { struct cuda_lt_plan at[CUDA_MAX_LT_PLANS]; int32_t n; };

/* One batch between submit and wait: the pinned memory that its copies read and write. */
struct cuda_slot {
  int32_t *host_table;              /* [S][pages], packed */
  struct k_sample_row *host_sample_rows; /* [R] */
  int32_t *host_sampled;            /* [R] */
  cudaEvent_t started, done;
  int32_t n_rows;
  bool is_sampled, has_logits;      /* what it brings */
  struct backend_kv *measured;      /* whose blocks the batch measures, or NULL */
  uint64_t measure;                 /* the number of that measuring (cuda_sparse.serial) */
};

/* What of a decode step is not in the device's buffers: another way to launch it. */
struct cuda_way { bool is_sampled, is_few, is_sparse; };
struct cuda_graph { int32_t bucket; struct cuda_way way; cudaGraphExec_t exec; };

struct backend_program {
  struct backend *backend;
  const struct program *program;
  uint64_t n_bytes;
  struct cuda_weight *weights;      /* owned array */
  int32_t n_weights;
  struct cuda_layer *layers;        /* [L] */
  struct cuda_weight *embed, *head;
  float *final_gain;
  struct k_rope rope;
  bool has_e4m3;                    /* cuBLASLt multiplies e4m3 with a scale per row and per token here */
  bool is_fast;                     /* layers all packed 4-bit and sm_90: the fast path exists */
  int32_t max_tokens, max_rows, max_pages; /* T, S and R, pages of a sequence */
  struct cuda_inputs decode, general;
  int32_t *table;                   /* [S][max_pages] */
  struct k_sample_row *sample_rows; /* [R] */
  int32_t *sampled;                 /* [R] of the last sampled batch, until the next one's end */
  float *h;                         /* [T][E] */
  void *frag_e[3], *frag_a[3], *frag_f[3]; /* m = 1, 8, 16 */
  float *ssq[3];
  void *act, *qkv, *q, *attn, *gate_up, *expanded;
  float *act_scale, *gate_up_scale, *slabs;
  int32_t *act_sum;
  float *logits, *host_logits;      /* [R][V] */
  float *attn_workspace, *prefill_workspace;
  int32_t *attn_counters;
  struct k_attn_share *attn_cut;    /* k_attn_cut_bytes, of the step at hand */
  struct cuda_lt_plans *lt_plans;
  struct cuda_graph graphs[CUDA_MAX_GRAPHS];
  int32_t n_graphs;
  uint64_t graphs_kv;               /* serial of the page memory that the graphs were captured with */
  int64_t capture_from_us;          /* clock: not before, for want of memory; 0: it was never short */
  struct cuda_slot slots[CUDA_IN_FLIGHT];
  int32_t next_slot, n_pending;     /* slot of the next batch; batches in flight, the oldest first */
  struct backend_stats stats;
  struct cuda_lane *lane;           /* this is a lane (cuda_lane.c): weights and scratch are another program's; else NULL */
  struct cuda_comm *comm;           /* collectives of a rank; NULL: this device has the whole model (cuda_comm.h) */
};

/* A layer's parts, between which a lane may stop: the products before attention, attention, those behind it up to SwiGLU, the last one. */
enum cuda_part { PART_QKV, PART_ATTEND, PART_SWIGLU, PART_DOWN, CUDA_LAYER_PARTS };

/* Parts of one piece of a lane's run, counted through all layers, and what the piece before left for it: sums for the next norm or for
 * attention, the form of the last product's input. */
struct cuda_span { int32_t from, to, n_slabs; struct k_act products; };

/* See cuda_kept.c. */
struct cuda_kept {
  int64_t capacity;                 /* tokens; 0: nothing is ever kept */
  void *k, *v;                      /* [L][G][capacity][D] f16, tiled where the prefill kernel wants that */
  bool is_held;                     /* by a lane whose batch has not run through: nobody else's prompt is kept meanwhile */
  int32_t n_tokens, n_pages;        /* kept now */
  int32_t *pages;                   /* [n_pages] of the prompt, in order */
  bool *is_kept;                    /* [pages of the pool] */
};

/* See cuda_sparse.c. Rows: entries of the block tables of a batch. */
struct cuda_sparse {
  int32_t max_entries;              /* of a sequence; 0: the codec is another */
  int64_t capacity;                 /* rows */
  int32_t n_columns;                /* L*G */
  int32_t *seqs, *host_seqs;        /* [2][max_seqs] k_kv_blocks.row0 and nearest */
  int32_t *numbers, *host_numbers;  /* [rows][n_columns] */
  uint64_t *given, *host_given;     /* likewise */
  float *workspace;                 /* of sits_k_attn_sparse */
  struct cuda_measured *measured;   /* [max_seqs] what the newest batch that measures gives whom */
  int32_t n_measured;
  uint64_t serial;                  /* of that batch; its results are in host_given when `brought` has come */
  bool is_busy;                     /* the pinned memory is in use until then */
  cudaEvent_t brought;
};

struct backend_kv {
  struct backend *backend;
  uint64_t serial;                  /* no other page memory of the process has it, nor had it */
  struct kv_geometry geometry;
  enum k_kv_codec codec;
  int64_t page_bytes;
  uint8_t *pool;
  void *gather_k, *gather_v;        /* [G][gather_tokens][D] f16 */
  int64_t gather_tokens;
  struct cuda_kept kept;
  struct cuda_sparse sparse;
  cudaStream_t send_stream;         /* of cuda_kv_send, beside the batches' */
  cudaEvent_t written;              /* the pages that it sends are */
  int32_t reached;                  /* device whose memory can be written from here; -1: none asked for yet */
  /* int4 and fp4, else NULL */
  struct kv_open *open;             /* which group has which slot */
  void *open_keys, *fresh, *exact;  /* slots; keys of a step; gathered keys of the groups that a step writes (kernels.h) */
  int64_t exact_capacity;
  int32_t *tiles;                   /* [T] on the host: where kv_open_begin puts each token */
};

/* ---- cuda_memory.c ---- */
/* The calling thread works on this backend's device from now on: it may serve several, one after the other. */
void cuda_enter(const struct backend *backend);
enum sits_status cuda_check(struct backend *backend, int error, const char *what, const char *file, int line) SITS_MUST_CHECK;
#define CUDA_CALL(backend, call) cuda_check(backend, (int)(call), #call, __FILE__, __LINE__)
#define TRY(call)                                                                                                                        \
  do {                                                                                                                                   \
    const enum sits_status try_status = (call);                                                                                          \
    if (try_status != SITS_OK) return try_status;                                                                                        \
  } while (0)
/* NULL when the device is out of memory or has failed. Zeroed. */
void *cuda_memory_alloc(struct backend *backend, const void *owner, size_t bytes);
void *cuda_pinned_alloc(struct backend *backend, const void *owner, size_t bytes);
void cuda_memory_free_owner(struct backend *backend, const void *owner);
/* Called before each step is enqueued: what a test asked for in the environment (cuda_memory.c), SITS_DEBUG_CHECKS builds only. */
enum sits_status cuda_fault_step(struct backend *backend) SITS_MUST_CHECK;
uint64_t cuda_memory_of(const struct backend *backend, const void *owner); /* device bytes */

/* ---- cuda_weights.c ---- */
/* Form, format and shape from the parts' types; no device work. */
enum sits_status cuda_weight_plan(struct cuda_weight *weight, struct sits_error *err) SITS_MUST_CHECK;
/* Two pieces of pinned memory through which weights travel, for the time of loading. fini waits for the copies. */
#define CUDA_STAGE_BYTES (64 << 20)
struct cuda_stage { uint8_t *host[2]; cudaEvent_t copied[2]; int32_t next; };
enum sits_status cuda_stage_init(struct backend *backend, struct cuda_stage *stage) SITS_MUST_CHECK;
void cuda_stage_fini(struct backend *backend, struct cuda_stage *stage);
/* Pack and start the upload. */
enum sits_status cuda_weight_load(struct backend *backend, const void *owner, struct cuda_weight *weight, struct cuda_stage *stage,
                                  uint32_t seed, struct sits_error *err) SITS_MUST_CHECK;
/* A vector as f32 on the device; NULL utd gives NULL. A vector without data is all ones. */
enum sits_status cuda_vector_load(struct backend *backend, const void *owner, const struct sits_utd *utd, float **out,
                                  struct sits_error *err) SITS_MUST_CHECK;
int64_t cuda_weight_bytes(const struct cuda_weight *weight);

/* ---- cuda_act.c: activations that a model's file wants rounded (tensor/act_format.h) ---- */
/* Note how the input of op's weight is rounded; two ops that share a weight must agree. */
enum sits_status cuda_act_plan(struct backend_program *p, struct cuda_weight *weight, const struct program_op *op,
                               struct sits_error *err) SITS_MUST_CHECK;
/* The form in which a step of n rows multiplies this weight, its rounding included. */
struct k_act cuda_act_form(const struct backend_program *p, const struct cuda_weight *weight, int32_t n);

/* ---- cuda_compile.c ---- */
enum sits_status cuda_compile(struct backend *backend, const struct program *program, struct backend_program **out,
                              struct sits_error *err);
void cuda_program_destroy(struct backend_program *program);

/* Parts of a compiled program that a lane has for itself. */
bool cuda_make_inputs(struct backend_program *p, struct cuda_inputs *in, int32_t max_tokens, int32_t max_seqs);
bool cuda_make_activations(struct backend_program *p); /* what a part of a layer hands to the next */
uint64_t cuda_activation_bytes(const struct backend_program *p, int32_t max_tokens); /* that those take with so many tokens */
static inline int64_t cuda_input_words(int32_t max_tokens, int32_t max_seqs) { return 3LL * max_tokens + 6LL * max_seqs + 1; }
enum sits_status cuda_make_slots(struct backend_program *p, struct sits_error *err) SITS_MUST_CHECK;

/* ---- cuda_gemm.c: y = W x for activations in the form the weight wants ---- */
enum cuda_gemm_output { CUDA_GEMM_F16, CUDA_GEMM_F32, CUDA_GEMM_SLABS, CUDA_GEMM_SWIGLU, CUDA_GEMM_ADD };
/* How a step of n rows multiplies this weight: the form its activations must be in. */
struct k_act cuda_gemm_form(const struct backend_program *p, const struct cuda_weight *w, int32_t n);
/* Products of activations in this form are the library's, which adds to what is there for nothing. */
static inline bool cuda_gemm_adds(const struct k_act *x) { return x->form == K_ACT_ROW_F16 || x->form == K_ACT_ROW_E4M3; }
/* y: f16 or f32 [n][rows]; SLABS: into p->slabs, *n_slabs of them; SWIGLU: p->gate_up as *source says (products or pairs); ADD: added to
 * y, f32, where cuda_gemm_adds. */
enum sits_status cuda_gemm(struct backend_program *p, const struct cuda_weight *w, int32_t n, const struct k_act *x,
                           enum cuda_gemm_output output,
                           void *y, int32_t *n_slabs, enum k_act_source *source, struct k_stream at) SITS_MUST_CHECK;
/* out = silu(gate) * up in the form that `next` wants, of rows of 8 gate, 8 up: one kernel where both sides are grouped s8. */
enum sits_status cuda_gemm_swiglu(struct backend_program *p, const struct cuda_weight *w, const struct cuda_weight *next, int32_t n,
                                  const struct k_act *x, struct k_act *out, struct k_stream at) SITS_MUST_CHECK;
/* Rows of activations that cuBLASLt is asked for where a step has n: few sizes, so that their plans are soon all there. Buffers that it
 * writes hold that many; what it computes beyond n is not looked at. */
static inline int32_t cuda_lt_rows(int32_t n)
{
  const int32_t unit = n <= 128 ? CUDA_E4M3_ALIGN : 128; /* a tile takes as long whole, and each size wants a plan */
  return (n + unit - 1) / unit * unit;
}
/* Whether cuBLASLt takes e4m3 with vector scales in the shapes of all weights that want it; sets p->has_e4m3. */
void cuda_gemm_probe(struct backend_program *p);
/* Multiply once in every size that a lane's chunk has, so that no step waits for the library's choice and the loading of its kernels. */
enum sits_status cuda_gemm_warm(struct backend_program *p) SITS_MUST_CHECK;
void cuda_gemm_fini(struct backend_program *p);

/* ---- cuda_resident.c ---- */
/* Whether steps of many tokens multiply this 4-bit weight as e4m3; else as f16. The one place that decides. */
bool cuda_is_wide_e4m3(const struct backend_program *p, const struct cuda_weight *w);
/* Expand what `prefill-weights` wants in memory; workspaces are there already. NOMEM names the option. */
enum sits_status cuda_resident_load(struct backend_program *p, struct sits_error *err) SITS_MUST_CHECK;

/* ---- cuda_run.c ---- */
struct cuda_step {
  const struct cuda_inputs *in;
  int32_t n_tokens, n_seqs, n_rows;
  bool is_decode;                   /* every sequence has one token, rows are the tokens in order */
  bool is_sampled;
  bool is_few;                      /* decode attention by sits_k_attn_few */
  bool is_sparse;                   /* some sequence has lost blocks, or is measured: what cuda_sparse_begin brought is read */
  const struct backend_batch *batch; /* NULL in a step of a bucket, which may be a captured one */
  int32_t kept_seq, kept_page;      /* sequence whose expanded keys are kept, or -1; its first page that is not there yet */
  struct cuda_span *span;           /* a lane's piece; NULL: all layers */
};
/* One-token sequences go through the fused int4 decode kernel. */
bool cuda_has_fast_decode(const struct backend_program *p, const struct backend_kv *kv);
/* Does sequence s go through gathered pages? (Those with one token do not where the decode kernel serves them.) */
static inline bool cuda_is_gathered(const struct backend_batch *b, int32_t s, bool has_fast_decode)
{
  const int32_t n = b->seq_start[s + 1] - b->seq_start[s];
  return n > 1 || (n == 1 && !has_fast_decode);
}
/* Rows of gather memory that it takes. */
static inline int64_t cuda_gather_rows(int32_t kv_len)
{
  return ((int64_t)kv_len + CUDA_GATHER_TOKENS - 1) / CUDA_GATHER_TOKENS * CUDA_GATHER_TOKENS;
}
/* Sequences s0 .. return value - 1 share the gather memory; their row offsets go to `offset` (may be NULL). */
int32_t cuda_gather_chunk(const struct backend_batch *batch, const struct backend_kv *kv, int32_t s0, bool has_fast_decode,
                          int32_t *offset);
/* Enqueue everything from embedding to logits (and sampling). */
enum sits_status cuda_run(struct backend_program *p, struct backend_kv *kv, const struct cuda_step *step,
                          struct k_stream at) SITS_MUST_CHECK;

/* ---- cuda_graph.c ---- */
/* Bucket for a decode batch of at most max_seqs sequences, no larger than that; 0 when it is too large to be captured. */
int32_t cuda_graph_bucket(int32_t n_seqs, int32_t max_seqs);
enum sits_status cuda_graph_run(struct backend_program *p, struct backend_kv *kv, int32_t bucket,
                                struct cuda_way way) SITS_MUST_CHECK;
void cuda_graph_clear(struct backend_program *p);

/* ---- cuda_sparse.c ---- */
/* Beside the pages, on the device; 0 for other codecs. */
uint64_t cuda_sparse_bytes(const struct backend *backend, const struct kv_geometry *geometry);
bool cuda_sparse_create(struct backend_kv *kv);
void cuda_sparse_fini(struct backend_kv *kv);
/* Is there room for what the batch says of blocks? */
bool cuda_sparse_takes(const struct backend_kv *kv, const struct backend_batch *batch);
/* Has any sequence lost blocks, or is one far enough for the batch's tokens to be measured? */
bool cuda_sparse_is_needed(const struct backend_kv *kv, const struct backend_batch *batch);
/* Before such a step, of n_seqs sequences with padding, and behind it; then, when the slot's batch has ended, counts are added. */
enum sits_status cuda_sparse_begin(struct backend_kv *kv, const struct backend_batch *batch, int32_t n_seqs) SITS_MUST_CHECK;
enum sits_status cuda_sparse_finish(struct backend_kv *kv, struct cuda_slot *slot) SITS_MUST_CHECK;
enum sits_status cuda_sparse_take(struct cuda_slot *slot) SITS_MUST_CHECK;
struct k_kv_blocks cuda_sparse_blocks(const struct backend_kv *kv);
enum sits_status cuda_kv_copy_blocks(struct backend_kv *kv, const int32_t (*copies)[2], int32_t n);

/* ---- cuda_kept.c ---- */
uint64_t cuda_kept_bytes(const struct kv_geometry *geometry); /* what would be kept if there were no limit */
bool cuda_kept_create(struct backend_kv *kv); /* false: out of host memory */
void cuda_kept_fini(struct backend_kv *kv);
/* Which sequence of a batch (or -1) goes through kept memory, and its first page that is to be expanded. Call once for every batch that is
 * not a decode step, and cuda_kept_written for every page that a decode step or anyone else writes. */
int32_t cuda_kept_choose(struct backend_kv *kv, const struct backend_batch *batch, int32_t *first_page);
void cuda_kept_written(struct backend_kv *kv, int32_t page);
/* A lane's batch begins (after its own cuda_kept_choose), and ends; where it did not run through, not all layers have what is kept. */
void cuda_kept_hold(struct backend_kv *kv);
void cuda_kept_release(struct backend_kv *kv, bool is_whole);

/* ---- cuda_lane.c ---- */
uint64_t cuda_lane_bytes(const struct backend_program *program); /* of one of CUDA_LANE_TOKENS tokens; 0: there can be none */
enum sits_status cuda_lane_open(struct backend_program *program, const struct backend_kv *kv, int32_t max_tokens,
                                struct backend_program **out, struct sits_error *err);
enum sits_status cuda_lane_begin(struct backend_program *lane, struct backend_kv *kv, const struct backend_batch *batch);
enum sits_status cuda_lane_ahead(struct backend_program *lane, bool *has_begun);
enum sits_status cuda_lane_run(struct backend_program *lane, backend_go_on *go_on, void *user, bool *is_done, int64_t *end_us);
void cuda_lane_drop(struct backend_program *lane);
int64_t cuda_lane_us(const struct backend_program *lane); /* that its newest batch has computed */
void cuda_lane_fini(struct backend_program *lane);        /* what it holds, its events; no lane: nothing */

/* ---- cuda.c: parts of a submit, for lanes too ---- */
/* Everything that an index of the batch will touch: a caller's mistake is refused, never followed. n_drawn: rows that the batch in flight
 * draws. */
bool cuda_batch_is_valid(const struct backend_program *p, const struct backend_kv *kv, const struct backend_batch *b, int32_t n_drawn);
/* Index arrays, block tables and draws to the device: `host` is pinned memory of `in`, n_seqs sequences with padding. */
enum sits_status cuda_batch_start(struct backend_program *p, struct backend_kv *kv, const struct backend_batch *b,
                                  const struct cuda_slot *slot, const struct cuda_inputs *in, int32_t *host,
                                  int32_t n_seqs) SITS_MUST_CHECK;
/* Drawn tokens and logits back; notes in the slot what it will bring. */
enum sits_status cuda_batch_finish(struct backend_program *p, struct cuda_slot *slot, const struct backend_batch *b) SITS_MUST_CHECK;

/* ---- cuda_kv.c ---- */
/* Give every group that the batch writes a slot; open_slot: [S][2] (kernels.h). Nothing to do for codecs without open groups. */
void cuda_kv_begin(struct backend_kv *kv, const struct backend_batch *batch, int32_t *open_slot);
/* The newest batch goes on while others run (a lane's); it has ended, or was given up. */
void cuda_kv_hold(struct backend_kv *kv);
void cuda_kv_release(struct backend_kv *kv, bool is_whole);
uint64_t cuda_kv_page_bytes(const struct kv_geometry *geometry);
void cuda_kv_beside(const struct backend_program *program, const struct kv_geometry *geometry, struct kv_beside *out);
enum sits_status cuda_kv_create(struct backend *backend, const struct kv_geometry *geometry, struct backend_kv **out,
                                struct sits_error *err);
void cuda_kv_destroy(struct backend_kv *kv);
enum sits_status cuda_kv_copy_pages(struct backend_kv *kv, const struct kv_copy *copies, int32_t n);
enum sits_status cuda_kv_read_page(struct backend_kv *kv, int32_t page, void *host);
enum sits_status cuda_kv_write_page(struct backend_kv *kv, int32_t page, const void *host);
void cuda_kv_expect(struct backend_kv *kv, const int32_t *pages, int32_t n);
enum sits_status cuda_kv_send(struct backend_kv *from, struct backend_kv *to, const struct kv_copy *copies, int32_t n);
enum sits_status cuda_kv_sent(struct backend_kv *from);

#endif
