/* The device contract: one struct of function pointers per backend (cpu, cuda). Everything above works with this file alone.
 *
 * Life: backend_find -> open -> compile (program) -> kv_create -> [submit -> wait]* -> destroy/close in reverse order.
 * Rules: 1. One thread (the engine's) calls a backend after open. 2. Past compile and kv_create nothing allocates: submit cannot fail for
 * memory. 3. A sticky device error makes submit and wait return SITS_DEVICE for ever; the process lives on. 4. Op semantics are those of
 * tests/ref. 5. At most `in_flight` batches are in flight, results come in their order; the arrays of struct backend_batch are read during
 * submit only.
 */
#ifndef SITS_BACKEND_BACKEND_H
#define SITS_BACKEND_BACKEND_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sits2026/kv_page.h"
#include "sits2026/status.h"

#define BACKEND_ABI 1
#define KV_PAGE_TOKENS 64          /* P */
#define BACKEND_MAX_RANKS 8
#define BACKEND_COMPRESS_TOKENS 256
#define BACKEND_COMPRESS_GROUP 128 /* columns with one scale */
#define KV_GIVEN_ONE 65536         /* unit of backend_blocks.given: one query head gives all its attention to one token */

struct backend;                    /* an open device */
struct nodes_options;              /* backend/nodes.h: ranks in other processes */
struct group;                      /* backend/group.h: the ranks of a model cut over several devices */
struct backend_program;            /* a model compiled for it */
struct backend_kv;                 /* its page memory */
struct program;                    /* backend/program.h: what to run, device-independent */

/* FP4_SPARSE: FP4's bytes, and sequences may lose blocks of pages (kv/kv.h). F32: exact, for verification. A backend may lack any. */
enum kv_codec { KV_F16, KV_INT8, KV_INT4, KV_FP4, KV_FP4_SPARSE, KV_F32, KV_CODEC_COUNT };

struct backend_options {
  int32_t n_threads;               /* CPU workers; 0 = one per core */
  int32_t device;                  /* ordinal */
  int32_t max_batch_tokens;        /* largest T of a batch */
  int32_t max_seqs;                /* largest S and R */
  const char *isa;                 /* "auto", "scalar", "avx2", "avx512"; CPU only, NULL = auto */
  const char *recipe;              /* activations beside 4-bit weights: "auto", "w4a16", "w4a8"; CUDA only, NULL = auto */
  const char *prefill_weights;     /* 4-bit weights as steps of many tokens multiply them: "expand"ed in each step, "resident" beside the
                                      packed ones, "auto" (NULL): as many layers' as memory allows; CUDA only */
  bool no_graphs;                  /* launch kernels one by one; CUDA only, for comparison */
  int32_t n_ranks;                 /* devices that the model is cut over; 0 or 1: one. More: through backend_ranks only */
  int32_t devices[BACKEND_MAX_RANKS]; /* has_devices: ordinal of each rank; may repeat. Else the backend chooses */
  bool has_devices;
  int32_t collective_timeout_ms;   /* ranks wait so long for each other, then all give up; 0 = 5,000 */
  bool compress_reduce;            /* ranks: all-reduces of steps of more than BACKEND_COMPRESS_TOKENS tokens sum shares of 8 bits */
  int32_t rank;                    /* set by backend_ranks for the backend of each rank, as is group */
  struct group *group;             /* borrowed; NULL: this backend works alone */
  const struct nodes_options *nodes; /* borrowed during open: the ranks are processes (backend/nodes.h); through backend_nodes only */
};

struct backend_info {
  char name[64];                   /* "cpu avx512-vnni, 2 threads" */
  uint64_t memory_total_bytes, memory_free_bytes;
};

struct kv_geometry {
  int32_t n_layers, n_kv_heads, head_dim; /* of the whole model */
  int32_t n_ranks;                 /* devices that share the KV heads; 0 or 1: one */
  int32_t n_pages;                 /* N; a page holds P tokens of every layer */
  int32_t max_tokens;              /* of the longest sequence; 0: not known, and a backend may refuse batches of very long ones */
  enum kv_codec codec;
  uint64_t spare_bytes;            /* device memory that kv_create may take beside the pages and what goes with them, where that saves
                                      time; 0: half of what is free then */
};

/* Device memory that goes with pages, beside them. */
struct kv_beside {
  uint64_t fixed_bytes;            /* what kv_create takes, and a lane of lane_tokens */
  uint64_t spare_bytes;            /* what kv_create would take of kv_geometry.spare_bytes */
};

/* How to draw one row's token on the device: softmax(logits / temperature) cut by top-k, then min-p, then top-p. */
struct backend_sample {
  float temperature;               /* 0 = greedy (lowest id among equals) */
  float top_p, min_p;              /* 1, 0 = off */
  int32_t top_k;                   /* 0 = off */
  float u;                         /* uniform in [0, 1) that decides */
};

/* FP4_SPARSE. A block is what a page holds of one kv head in one layer; its number is page * L*G + layer * G + head, and the block of any
 * layer and head may lie at any number. Rows of the arrays are entries of the block table, columns layer * G + head. */
struct backend_blocks {
  const int32_t *numbers;          /* [entries][L*G] of entries that are KV_NO_PAGE: where layer and head find their block of that page, or
                                      KV_NO_PAGE: nobody attends to it any more. NULL: the table has no such entry */
  _Atomic uint64_t *given;         /* [entries][L*G] NULL: not wanted. For each token and query head of a kv head: the squares of its
                                      attention to the block's tokens, summed and rounded to units of 1/KV_GIVEN_ONE, are added by the time
                                      wait returns; only for entries that lie `nearest` pages or more before the token's own */
  int32_t nearest;
};

/* One step's work; token t belongs to the sequence s with seq_start[s] <= t < seq_start[s+1]. */
struct backend_batch {
  int32_t n_tokens;                /* T */
  int32_t n_seqs;                  /* S */
  int32_t n_rows;                  /* R */
  const int32_t *tokens;           /* [T]; where in_flight > 1, -1 - r: the token that the batch before this one draws for its row r */
  const int32_t *positions;        /* [T] position in the sequence, for RoPE and the causal mask */
  const int32_t *seq_start;        /* [S+1] */
  const int32_t *kv_len;           /* [S] tokens of the sequence in the cache once this step's are appended */
  const int32_t *block_table;      /* [S][table_stride] page ids; entry i holds positions i*P .. i*P+P-1. With FP4_SPARSE entries before
                                      the first one that this step writes may be KV_NO_PAGE, where `blocks` says what is left */
  int32_t table_stride;
  const int32_t *row_token;        /* [R] ascending token indexes whose logits are wanted */
  const struct backend_sample *sample; /* [R]: draw on the device and give tokens; NULL: logits only. Where can_sample */
  bool wants_logits;               /* with sample: the logits too, for rows that the host draws */
  const struct backend_blocks *blocks; /* [S] FP4_SPARSE; NULL: all pages are whole, and nothing is measured */
  void (*progress)(void *user);    /* called now and then while the batch computes, on any thread, before wait returns; NULL: not wanted.
                                      A backend whose batches take no longer than a second need not call it. */
  void *progress_user;
};

struct backend_result {
  const float *logits;             /* [R][V] f32 on the host, valid until the next submit; NULL when only tokens were wanted */
  const int32_t *tokens;           /* [R] drawn on the device, valid until the next submit; else NULL */
  int64_t compute_us;
};

/* What running steps cost beside computing; zeros where nothing of the kind exists. */
struct backend_stats {
  int32_t n_graphs;                /* captured steps */
  int64_t capture_us;              /* spent on capturing them, in all */
  uint64_t graph_bytes;            /* device memory they hold */
};

struct kv_copy { int32_t from_page, to_page; };

/* Times of one all-reduce of n_bytes (f16), with residual and norm after it, in microseconds inside a captured graph; 0 = not offered. */
struct backend_collective { int64_t n_bytes; double push_us, bulk_us, library_us, library_alone_us, compressed_us; int32_t chosen; };

/* For calibration: sees the inputs of LINEAR ops as they are before rounding. fn may be called by several threads at once, each with its
 * own tokens; batches of one or two tokens may pass unseen. x: [n_tokens][width], rows first.. of the batch. */
struct program_op;
struct backend_observer {
  void (*fn)(void *user, const struct program_op *op, const float *x, int32_t first, int32_t n_tokens, int32_t width);
  void *user;
};

/* What the stitcher weighs fusions by (graph/graph.h), in round numbers of the device, for a step of `tokens` tokens. */
struct backend_costs {
  float op_ns;                     /* each op: its launch, or the barriers of its phases */
  float byte_ns;                   /* reading or writing a byte of activations */
  float norm_ns;                   /* normalising a value */
  float norm_repeats;              /* how often a norm is computed that is fused into the LINEAR that reads it */
  int32_t tokens;
  uint32_t f32_fusions;            /* program_fusion bits that keep what lies between their parts in f32: only these may hold a norm */
};

/* One more piece of a lane's work? end_us: when it will have ended, as far as known (clock_monotonic_us); 0: it is not known. It may be
 * asked again for a smaller piece. */
typedef bool backend_go_on(void *user, int64_t end_us);

struct backend_vtable {
  int32_t abi;                     /* BACKEND_ABI */
  const char *name;                /* "cpu" */
  uint32_t fusions;                /* program_fusion bits (backend/program.h) that compile takes */
  struct backend_costs costs;      /* tokens 0: none given, all fusions are taken */
  bool can_sample;                 /* takes backend_batch.sample */
  int32_t in_flight;               /* most batches submitted and not waited for; 0 means 1. Of two, at most one may bring logits */
  enum sits_status (*open)(const struct backend_options *options, struct backend **out, struct sits_error *err);
  void (*close)(struct backend *backend);
  void (*info)(const struct backend *backend, struct backend_info *out);

  /* Take a program: pack its weights for this device (the source's pages may be dropped) and reserve workspaces. The program and the
   * model behind it must outlive the result. */
  enum sits_status (*compile)(struct backend *backend, const struct program *program, struct backend_program **out,
                              struct sits_error *err);
  void (*program_destroy)(struct backend_program *program);
  uint64_t (*program_bytes)(const struct backend_program *program); /* device memory held: weights and workspaces */

  uint64_t (*kv_page_bytes)(const struct kv_geometry *geometry);    /* bytes of one page in all layers; 0 = codec not supported */
  void (*kv_beside)(const struct backend_program *program, const struct kv_geometry *geometry, struct kv_beside *out); /* NULL: nothing */
  enum sits_status (*kv_create)(struct backend *backend, const struct kv_geometry *geometry, struct backend_kv **out,
                                struct sits_error *err);
  void (*kv_destroy)(struct backend_kv *kv);
  enum sits_status (*kv_copy_pages)(struct backend_kv *kv, const struct kv_copy *copies, int32_t n); /* for copy-on-write */
  /* Copy blocks (backend_blocks) of whole pages, one after the other: {from, to}. NULL in a backend without FP4_SPARSE. A number out of
   * range: SITS_INVALID_ARGUMENT, and nothing is copied. */
  enum sits_status (*kv_copy_blocks)(struct backend_kv *kv, const int32_t (*copies)[2], int32_t n);
  enum sits_status (*kv_read_page)(struct backend_kv *kv, int32_t page, void *host);        /* swap out: kv_page_bytes bytes */
  enum sits_status (*kv_write_page)(struct backend_kv *kv, int32_t page, const void *host); /* swap in */

  /* Pages into the memory of another device of this kind, both memories alike but for n_pages; NULL where not offered. kv_expect, on the
   * thread of `kv`: pages that stand in no block table of a batch will be written from outside; what is kept beside them is forgotten.
   * kv_send, on the thread of `from`, between its batches: begin to copy whole pages there, as the newest batch left them. kv_sent, same
   * thread: wait until all that was begun is there; until then nobody may write the sources or use the targets. */
  void (*kv_expect)(struct backend_kv *kv, const int32_t *pages, int32_t n);
  enum sits_status (*kv_send)(struct backend_kv *from, struct backend_kv *to, const struct kv_copy *copies, int32_t n);
  enum sits_status (*kv_sent)(struct backend_kv *from);

  /* Start a batch; then wait for it. */
  enum sits_status (*submit)(struct backend_program *program, struct backend_kv *kv, const struct backend_batch *batch);
  enum sits_status (*wait)(struct backend_program *program, struct backend_result *result);

  /* Slices: a prompt's chunk that runs piece by piece between the program's own batches. A lane is a second workspace on the program's
   * weights, for batches of one sequence, at most max_tokens tokens and one row; program_destroy ends it, before the program and the page
   * memory. All NULL in a backend that cannot. lane_open: SITS_UNSUPPORTED where the kv's codec does not allow it. lane_begin: checks as
   * submit does; what the lane held is given up. lane_drop: that alone, also when the device has failed; nothing held: nothing happens.
   * The batch and its arrays stay as they are, and the pages it writes nobody else's, until it is done or given up. lane_run computes
   * until the batch is done or go_on(user) says no; it is asked every few hundred microseconds, on the calling thread. *end_us: when what
   * is still running ends, as far as known (clock_monotonic_us), 0: nothing runs; a batch submitted meanwhile comes behind it. Once
   * *is_done, wait(lane) gives the result, valid until the next lane_begin or lane_drop. lane_ahead, after submit: one piece more begins
   * behind the batch just submitted, so that the device has work while the caller takes that batch's results; the next lane_run goes on
   * from it. Nothing happens where no batch has begun or its last piece is next. NULL: not offered. lane_tokens: a chunk of so many
   * computes about as well as any (0: 128). */
  int32_t lane_tokens;
  int32_t tile_tokens; /* tokens of a step with prompts are computed in tiles of so many, beyond the first; 0: one by one */
  enum sits_status (*lane_open)(struct backend_program *program, const struct backend_kv *kv, int32_t max_tokens,
                                struct backend_program **out, struct sits_error *err);
  enum sits_status (*lane_begin)(struct backend_program *lane, struct backend_kv *kv, const struct backend_batch *batch);
  enum sits_status (*lane_run)(struct backend_program *lane, backend_go_on *go_on, void *user, bool *is_done, int64_t *end_us);
  enum sits_status (*lane_ahead)(struct backend_program *lane, bool *has_begun);
  void (*lane_drop)(struct backend_program *lane);

  void (*stats)(const struct backend_program *program, struct backend_stats *out); /* NULL in a backend without any */

  /* Between batches; NULL in a backend that cannot. */
  void (*observe)(struct backend_program *program, const struct backend_observer *observer);

  /* For a model over several devices; each may be NULL. choose_devices: ordinals for n ranks, in an order that follows the links.
   * collectives: what start-up measured, at most `max` rows; returns how many. */
  enum sits_status (*choose_devices)(int32_t first, int32_t n, int32_t *devices, struct sits_error *err);
  bool (*is_lost)(const struct backend *backend); /* any thread: a rank is gone, the next step will fail; NULL: only a step tells */
  int32_t (*collectives)(const struct backend_program *program, struct backend_collective *rows, int32_t max);
};

/* "cpu", "cuda", or "auto" (the best that works here). NULL when this build has no such backend. */
const struct backend_vtable *backend_find(const char *name);

/* kv_beside over n_ranks devices: the largest rank's, as often; `inner` may have none. programs: [n] of the ranks that are known here. */
void kv_beside_of_ranks(const struct backend_vtable *inner, struct backend_program *const *programs, int32_t n,
                        const struct kv_geometry *geometry, struct kv_beside *out);

/* The same contract over n_ranks devices of one kind, a thread each (ranks.c): open takes options.n_ranks, compile the list that
 * program_for_ranks makes, kv_create the whole model's geometry with n_ranks. NULL: this backend has no such form. */
const struct backend_vtable *backend_ranks(const struct backend_vtable *one);

/* The table of a backend that passes its calls on to others of one kind: `calls`, with what the inner kind says of itself. */
void backend_wrap(struct backend_vtable *out, const struct backend_vtable *calls, const struct backend_vtable *inner);

/* The KV heads of one rank, and its part of the memory. */
struct kv_geometry kv_geometry_of_rank(const struct kv_geometry *whole);

const char *kv_codec_name(enum kv_codec codec);

#endif
