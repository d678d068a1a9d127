/* The CUDA kernels as C sees them: plain argument structs, plans that pick a launch configuration, launchers.
 *
 * Rules
 *  1. Launchers only enqueue; they return a cudaError_t value (0 = success) and never allocate or synchronize.
 *  2. `struct k_stream` carries the stream and whether the launch has a programmatic edge to the launch before it. Every kernel waits
 *     for its predecessor before it reads anything but weights and step inputs, and lets its successor start at once.
 *  3. Sizes a kernel does not take are refused by its plan function (SITS_UNSUPPORTED in words: the plan returns false).
 *  4. Layouts. "row": [T][ld] f16, row-major. "frag": what a 4-bit GEMM for few tokens reads, see k_frag_index.
 *
 * Dimensions: T tokens, S sequences, H query heads, G KV heads, D head size, E width, F feed-forward width, V vocabulary, P tokens a page.
 */
#ifndef SITS_KERNELS_H
#define SITS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define K_PAGE_TOKENS 64           /* P */
#define K_GROUP 128                /* columns of one packed block */
#define K_ALIGN_ROWS 16            /* rows of one packed tile */
#define K_MAX_DECODE_TOKENS 16     /* largest T of the mma.sync 4-bit GEMM */
#define K_MAX_GQA 8                /* largest H/G of the tensor-core decode attention */
#define K_MAX_DECODE_SEQS 1024     /* largest S of it */
#define K_MAX_FEW_SEQS 8           /* largest S of sits_k_attn_few */
#define K_MAX_NORM_WIDTH 16384     /* largest E of sits_k_norm and of the all-reduces */
#define K_MAX_CONVERT_WIDTH 32768  /* largest width of sits_k_convert */

#ifdef __CUDACC__
#define K_FN __host__ __device__ static inline
#else
#define K_FN static inline
#endif

struct CUstream_st;
struct k_stream { struct CUstream_st *stream; bool pdl; };

/* ---- 4-bit weights, packed ----
 * A weight [rows][cols] is cut into tiles of 16 rows by 128 columns, tile (r, c) at byte ((r * n_blocks + c) * unit), cols padded with zero
 * scales to whole blocks, rows to whole tiles. A unit is 1,024 bytes of nibbles, then its scales:
 *   K_W4_G128: 16 f16, one per row: value = scale * (q - 8)                                    32 bytes, unit 1,056
 *   K_W4_G32M: 16 x 4 x {f16 scale, f16 minimum}: value = scale * q + minimum, groups of 32   256 bytes, unit 1,280
 * Nibbles: word (s, half, lane), s = 0..3 the 32-column step, at byte (s/2)*512 + lane*16 + (s%2)*8 + half*4, is a folded word
 * (common/ptx.cuh) of rows g = lane/4 and g+8 and columns 32 s + 16 half + 4 (lane%4) + {0, 2, 1, 3} as c0..c3.
 * Scales, G128: row g then row g+8 at 4 g; G32M: step s, {scale g, minimum g, scale g+8, minimum g+8} at 64 s + 8 g. */
enum k_w4_format { K_W4_G128, K_W4_G32M };
#define K_W4_NIBBLE_BYTES 1024
#define K_W4_G128_UNIT 1056
#define K_W4_G32M_UNIT 1280

K_FN int32_t k_w4_unit_bytes(enum k_w4_format format) { return format == K_W4_G128 ? K_W4_G128_UNIT : K_W4_G32M_UNIT; }
K_FN int32_t k_blocks(int32_t cols) { return (cols + K_GROUP - 1) / K_GROUP; }
K_FN int32_t k_row_tiles(int32_t rows) { return (rows + K_ALIGN_ROWS - 1) / K_ALIGN_ROWS; }

/* Bit position of the nibble of (row 0..15, column 0..127) inside its unit, as a word index and a left-rotation. */
K_FN void k_w4_place(int32_t row, int32_t col, int32_t *word, int32_t *rotate) {
  int32_t s = col >> 5, r = col & 31, half = r >> 4, t = (r & 15) >> 2, j = r & 3, lane = (row & 7) * 4 + t;
  int32_t c = ((j & 1) << 1) | (j >> 1); /* columns 0, 2, 1, 3 are c0..c3 */
  *word = (s >> 1) * 128 + lane * 4 + (s & 1) * 2 + half;
  *rotate = (6 + (c & 1) * 16 + (c >> 1) * 8 - (row < 8 ? 0 : 4)) & 31;
}

/* Element index of (column k, token n) in a "frag" activation of m tokens (m = 1, 8 or 16 as the kernel was built for), f16. */
K_FN int32_t k_frag_index(int32_t m, int32_t k, int32_t n) {
  int32_t r = k & 31, t = (r & 15) >> 2, j = r & 3;
  return (k >> 7) * (128 * m) + ((k & 127) >> 5) * (32 * m) + n * 32 + t * 8 + (r >> 4) * 4 + (((j & 1) << 1) | (j >> 1));
}

/* ---- 4-bit GEMM for few tokens (kernels/gemm/gemm_w4a16.cu) ---- */
enum k_w4_output {
  K_OUT_F16,      /* y[n][ld] f16 = v + bias */
  K_OUT_F32,      /* y[n][ld] f32 = v + bias */
  K_OUT_RESIDUAL, /* h[n][ld] f32 += v + bias; next = frag f16(h * gain); ssq[tile][m] = sum of h^2 of the tile's rows */
  K_OUT_SWIGLU,   /* rows are 8 gate, 8 up, ...: next = frag f16(silu(gate) * up) */
};

struct k_w4a16 {
  const void *weight;         /* packed tiles */
  enum k_w4_format format;
  int32_t rows, cols;         /* logical */
  int32_t n_tokens;           /* T <= 16 */
  const void *x;              /* frag f16, m = k_w4a16_tokens(T), cols padded to blocks with zeros */
  const float *x_ssq;         /* [x_n_ssq][m] partial sums of squares of the un-normalised x, or NULL: x is used as it is */
  int32_t x_n_ssq;
  float x_width, eps;         /* RMS: factor = 1/sqrt(sum / x_width + eps) */
  enum k_w4_output output;
  void *y;                    /* F16, F32: [T][ld]; RESIDUAL: h */
  int32_t ld;
  const float *bias;          /* [rows] or NULL; not with SWIGLU */
  void *next;                 /* RESIDUAL, SWIGLU: frag f16 of the next GEMM */
  const float *gain;          /* RESIDUAL: [rows] of the norm that follows */
  float *ssq;                 /* RESIDUAL: [k_w4a16_ssq_parts(rows)][m] */
};

K_FN int32_t k_w4a16_tokens(int32_t n_tokens) { return n_tokens == 1 ? 1 : n_tokens <= 8 ? 8 : 16; }
K_FN int32_t k_w4a16_ssq_parts(int32_t rows) { return (rows + 31) / 32; }

struct k_w4a16_plan { int32_t m, row_tiles, grid, stages, smem_bytes, pace_cycles; };
/* False when the kernel does not take the shape (the reason is in the function). */
bool k_w4a16_plan(const struct k_w4a16 *args, int32_t n_sm, struct k_w4a16_plan *plan);
int sits_k_w4a16_init(void);
int sits_k_w4a16(const struct k_w4a16 *args, int32_t n_sm, struct k_stream at);

/* ---- KV pages ----
 * A page holds P tokens of all layers: page id -> pool + id * page_bytes; inside, tile (layer, g) at (layer * G + g) * tile_bytes.
 * Tiles by codec, D a multiple of 32 for the quantised ones (kernels/common/kv_tile.cuh writes and reads them):
 *   f16   K [P][D] f16, V [P][D] f16
 *   int8  K [P][D] s8, V [P][D] s8, K scales [P] f32, V scales [P] f32: value = scale * q, one scale per token and head
 *   int4  4.5 bits: keys per channel over 32 tokens, values per token over 32 channels, (q - zero) * scale
 *   fp4   4.6 bits: e2m1 (sign, two exponent bits, one mantissa bit) in groups of 16 channels, the page's mean key taken out
 * Nibbles lie in tensor-core fragment order where D is 64 or 128, else in plain order. Keys of int8 and fp4, and values of int8, int4 and
 * fp4, are Hadamard-rotated per head first; so are queries, and outputs are rotated back.
 *
 * Open groups: int4 and fp4 quantise the keys of 32 or 64 tokens together. A query sees the keys of its own group in f16, all older ones
 * as the page has them. Until a group is complete its keys lie in a slot of `open` (backend/kv_open.h says whose); those that a step of
 * many tokens appends lie in `fresh` too, until the step's next layer. */
enum k_kv_codec { K_KV_F16, K_KV_INT8, K_KV_INT4, K_KV_FP4 };

K_FN bool k_kv_has_nibbles(enum k_kv_codec codec) { return codec == K_KV_INT4 || codec == K_KV_FP4; }
K_FN bool k_kv_rotates_keys(enum k_kv_codec codec) { return codec == K_KV_INT8 || codec == K_KV_FP4; }
K_FN bool k_kv_rotates_values(enum k_kv_codec codec) { return codec != K_KV_F16; }
K_FN int32_t k_kv_open_tokens(enum k_kv_codec codec) { return codec == K_KV_INT4 ? 32 : codec == K_KV_FP4 ? K_PAGE_TOKENS : 0; }
K_FN bool k_kv_has_fragments(int32_t head_dim) { return head_dim == 64 || head_dim == 128; }
K_FN int32_t k_kv_tile_bytes(enum k_kv_codec codec, int32_t head_dim) {
  const int32_t n = K_PAGE_TOKENS * head_dim;
  return codec == K_KV_F16    ? n * 4
         : codec == K_KV_INT8 ? n * 2 + K_PAGE_TOKENS * 8
         : codec == K_KV_INT4 ? n + 4 * head_dim + K_PAGE_TOKENS * ((head_dim + 31) / 32) * 2
                              : n + 2 * head_dim + K_PAGE_TOKENS * ((head_dim + 15) / 16) * 2;
}
/* Bytes of one slot of open groups: f16 [L][G][tokens][D]. */
K_FN int64_t k_kv_open_bytes(enum k_kv_codec codec, int32_t n_layers, int32_t n_kv_heads, int32_t head_dim) {
  return (int64_t)n_layers * n_kv_heads * k_kv_open_tokens(codec) * head_dim * 2;
}

struct k_rope {
  const float *inv_freq;      /* [dims/2] on the device */
  float magnitude;
  int32_t dims;               /* of D */
  bool interleaved;           /* pairs (2i, 2i+1); else (i, i + dims/2) */
};

/* What every attention kernel gets: one step's sequences over one layer's pages. All pointers on the device. */
struct k_kv_view {
  uint8_t *pool;
  int64_t page_bytes;
  enum k_kv_codec codec;
  int32_t layer, n_layers, n_heads, n_kv_heads, head_dim; /* L H G D */
  int32_t window;             /* tokens a query sees; 0 = all */
  int32_t n_tokens, n_seqs;   /* T S */
  const int32_t *seq_start;   /* [S+1] */
  const int32_t *kv_len;      /* [S] */
  const int32_t *positions;   /* [T] */
  const int32_t *token_seq;   /* [T] the sequence a token belongs to; negative: none (padding of a captured batch) */
  const int32_t *block_table; /* [S][table_stride] */
  int32_t table_stride;
  /* int4 and fp4 */
  void *open;                 /* [slots] of k_kv_open_bytes */
  const int32_t *open_slot;   /* [S][2]: slot of the group of the sequence's first token in the step, of its last one; negative: that group
                                 begins and ends in the step. A decode step has no other tokens than those of a slot */
  void *fresh;                /* [T][G*D] f16: keys of this step and layer; not where attention appends */
};

/* Output rows of attention: f16, row [T][H*D] (frag_m = 0) or frag with m = frag_m. */

/* What the qkv product leaves: rows [T][(H+2G)*D] of q, k, v before norms and rotation, f16, or sums still to be added. */
struct k_projections {
  const void *rows;           /* f16; NULL: the sum of slabs (and bias) instead */
  const float *slabs, *bias;  /* [n_slabs][slab_stride] f32, each [T][(H+2G)*D]; [(H+2G)*D] or NULL */
  int32_t n_slabs;
  int64_t slab_stride;
};

/* What a CTA of sits_k_attn_decode takes. The pages of a sequence in a KV head are a segment, a unit is one of them, counted in the order
 * sequence, head, page. Units begin .. end - 1; the first lies in head `head` of sequence `seq` (its row and length), whose segment has
 * n_units from first_unit on. first_cta, first_slot: who has the beginning of that segment, and where in the workspace; last_cta: who has
 * the end of the segment of unit end - 1. 48 bytes. */
struct k_attn_share {
  int32_t begin, end, seq, row, len, head, first_unit, n_units, first_cta, first_slot, last_cta, unused;
};

/* ---- decode attention over int4 and fp4 pages, RoPE and append fused where wanted (kernels/attention/decode_int4.cu, decode_few.cu) ----
 * Serves the sequences that have exactly one token in the step; others are left alone. */
struct k_attn_decode {
  struct k_kv_view kv;
  struct k_rope rope;
  const void *q;              /* [T][H*D] f16 from sits_k_rope_append, the token appended; NULL: fused, from qkv */
  struct k_projections qkv;   /* fused */
  const float *q_gain, *k_gain; /* fused: [D] head norms or NULL */
  float eps;
  void *out;
  int32_t frag_m;
  struct k_attn_share *cut;   /* by sits_k_attn_cut from the same lengths; not read by sits_k_attn_few, as what follows */
  float *workspace;           /* k_attn_decode_workspace_bytes */
  int32_t *counters;          /* [S * G] zero before the first use; left zero */
};
bool k_attn_decode_takes(enum k_kv_codec codec, int32_t head_dim, int32_t n_heads, int32_t n_kv_heads);
size_t k_attn_decode_workspace_bytes(int32_t n_sm, int32_t head_dim);
/* All of them: once a step, for all layers. The kernel launched next starts when this one has ended. */
int32_t k_attn_decode_ctas(int32_t n_sm, int32_t n_seqs, int32_t n_kv_heads);
size_t k_attn_cut_bytes(int32_t n_sm);
int sits_k_attn_cut_init(void); /* by sits_k_attn_decode_init */
int sits_k_attn_cut(const struct k_kv_view *kv, struct k_attn_share *cut, int32_t n_sm, struct k_stream at);
int sits_k_attn_decode_init(void);
int sits_k_attn_decode(const struct k_attn_decode *args, int32_t n_sm, struct k_stream at);
/* The fused form for few sequences: each, and each KV head, is cut into the same number of parts, whatever its length. */
int32_t k_attn_few_parts(int32_t n_sm, int32_t n_seqs, int32_t n_kv_heads);
bool k_attn_few_suits(int32_t n_sm, int32_t n_seqs, int32_t n_kv_heads, int32_t longest); /* else sits_k_attn_decode is as fast */
int sits_k_attn_few_init(void);
int sits_k_attn_few(const struct k_attn_decode *args, int32_t n_sm, struct k_stream at);

/* ---- attention where sequences may have lost blocks (backend.h: backend_blocks), and what blocks get is measured ---- */
/* A block: what a page holds of one KV head in one layer, number page * L*G + layer * G + head. Rows are entries of a block table. All on
 * the device. An entry of the view's block_table may be negative where its sequence has rows. */
struct k_kv_blocks {
  const int32_t *row0;        /* [S] first row of the sequence's entries; negative: its pages are whole, and nothing is measured. NULL: so
                                 for all sequences */
  const int32_t *nearest;     /* [S] entries so many pages before a token's own, or more, are measured; INT32_MAX: none are */
  const int32_t *numbers;     /* [rows][L*G] of entries without a page: the block, or negative: gone */
  unsigned long long *given;  /* [rows][L*G] what tokens and query heads give is added: squares of attention in units of 1 / K_GIVEN_ONE */
};
#define K_GIVEN_ONE 65536

/* fp4; every sequence's tokens, appended and folded before (kv.fresh holds all their keys). kernels/attention/sparse_fp4.cu */
struct k_attn_sparse {
  struct k_kv_view kv;
  struct k_kv_blocks blocks;
  const void *q;              /* [T][H*D] f16 from sits_k_rope_append */
  void *out;
  int32_t frag_m;
  float *workspace;           /* k_attn_sparse_workspace_bytes of max_entries, the most of a sequence that are measured */
  int32_t max_entries;
};
bool k_attn_sparse_takes(int32_t head_dim, int32_t n_heads, int32_t n_kv_heads); /* compute capability 9; else sits_k_attn_any */
size_t k_attn_sparse_workspace_bytes(int32_t n_sm, int32_t n_kv_heads, int32_t max_entries);
int sits_k_attn_sparse_init(void);
int sits_k_attn_sparse(const struct k_attn_sparse *args, int32_t n_sm, struct k_stream at);

/* Blocks {from, to} of the view's pool; none is named twice but as the source of several. */
#define K_COPY_BLOCKS 256
struct k_kv_copy_blocks { struct k_kv_view kv; int32_t n, copies[K_COPY_BLOCKS][2]; };
int sits_k_kv_copy_blocks(const struct k_kv_copy_blocks *args, struct k_stream at);

/* ---- activations between GEMMs (kernels/norm/, kernels/quant/) ----
 * Forms an activation takes on its way into a GEMM of T > 16 tokens or of dense weights. Columns are padded with zeros to whole blocks. */
enum k_act_form {
  K_ACT_ROW_F16,   /* [T][k_blocks*128] f16 */
  K_ACT_TILE_S8,   /* tokens in tiles of `tile`, then column blocks, then [tile][128] s8 with 16-byte chunk c of row n at c ^ (n & 7) */
  K_ACT_GROUP_S8,  /* the same with a scale per token and 128 columns, at [token tile][column block][tile]; no sums */
  K_ACT_ROW_E4M3,  /* [T][k_blocks*128] e4m3 */
  K_ACT_FRAG_F16,  /* frag of m = `tile` tokens; padding is not written (the buffer is zeroed once) */
};
/* Rounding before that, in groups of 32 columns (tensor/act_format.h has the formulas); f16 forms only, width a multiple of 32. Before the
 * rounding, if any, runs of `rotation` columns are multiplied by the orthonormal Walsh-Hadamard matrix; f16 forms only too. */
#define K_MOST_ROTATION 4096
enum k_act_round { K_ROUND_NONE, K_ROUND_INT8, K_ROUND_INT4 };
struct k_act {
  enum k_act_form form;
  void *data;
  float *scale;               /* 8-bit forms: value = scale * q; [T], or as K_ACT_GROUP_S8 says */
  int32_t tile;
  int32_t *sum;               /* [T], K_ACT_TILE_S8: sum of the row's q */
  enum k_act_round round;
  const uint8_t *outliers;    /* K_ROUND_INT4: bit c % 8 of byte c / 8: column c is rounded to 8 bits, one scale a row; NULL = none */
  int32_t rotation;           /* 0 = none; a power of two up to K_MOST_ROTATION that divides the width */
};

/* h += sum of slabs in order; out = form(rms_norm(h) * gain). One CTA per output row. With row_token h is not written back. */
struct k_norm {
  float *h;                   /* [T][E] f32 */
  const float *slabs;         /* [n_slabs][slab_stride] f32, each [T][E], or NULL */
  int32_t n_slabs;
  int64_t slab_stride;        /* elements */
  const float *gain;          /* [E] */
  float eps;
  int32_t n_rows, width;      /* rows of out, E */
  const int32_t *row_token;   /* [n_rows] row of h for each row of out, or NULL: the same */
  struct k_act out;
};
int sits_k_norm(const struct k_norm *args, struct k_stream at);

enum k_act_source { K_SRC_F16, K_SRC_F32_GATE_UP, K_SRC_F16_GATE_UP };
/* out = form(x), or form(silu(gate) * up) of rows of 8 gate, 8 up, 8 gate, ... values (width counts the products). */
struct k_convert {
  enum k_act_source source;
  const void *x;              /* [T][ld] */
  int32_t ld, n_rows, width;
  struct k_act out;
  int32_t n_walking;          /* most CTAs that may walk over rows, two an SM (sm_90); 0: a CTA a row */
};
int sits_k_convert_init(void);
int sits_k_convert(const struct k_convert *args, struct k_stream at);

/* y[t][c] += bias[c], f16; y [T][width] contiguous. */
int sits_k_add_bias(void *y, const float *bias, int32_t n_tokens, int32_t width, struct k_stream at);

/* h[t] = weight row tokens[t], f32; with frag: also next = frag f16(h * gain) and ssq (part 0 the sum, the other parts 0). */
struct k_embed {
  const int32_t *tokens;      /* [T]; -1 - i: drawn[i] */
  const int32_t *drawn;       /* tokens that an earlier launch wrote, or NULL */
  const void *table;          /* row-major f16 [V][ld], or packed 4-bit */
  bool is_packed;
  enum k_w4_format format;
  int32_t n_tokens, width, ld, n_vocab;
  float *h;                   /* [T][E] */
  int32_t frag_m;             /* 0 = none */
  void *next;
  const float *gain;
  float *ssq;
  int32_t n_ssq;
  int32_t first, n_rows;      /* the table's rows are these of the vocabulary, and other tokens' rows of h are zeros; n_rows 0: all */
};
int sits_k_embed(const struct k_embed *args, struct k_stream at);

/* ---- RoPE, append and the general attention (kernels/rope/, kernels/attention/) ---- */
struct k_rope_append {
  struct k_kv_view kv;
  struct k_rope rope;
  struct k_projections qkv;
  const float *q_gain, *k_gain;
  float eps;
  void *q;                    /* [T][H*D] f16, rotated, Hadamard-transformed for int4 and fp4 */
  bool skip_single;           /* sequences with one token are served by sits_k_attn_decode */
  bool is_single;             /* no sequence has more than one token; f16 and int8 only */
};
int sits_k_rope_append(const struct k_rope_append *args, struct k_stream at);

/* Groups of keys, int4 and fp4. In a step of many tokens, after each layer's append: groups that the step completes are quantised into
 * their pages, keys of groups that have a slot go there. */
int sits_k_kv_fold_init(void);
int sits_k_kv_fold(const struct k_kv_view *kv, struct k_stream at);
/* After the last layer of a decode step: the groups that it completed, in all layers. */
int sits_k_kv_close(const struct k_kv_view *kv, int32_t n_sm, struct k_stream at);
/* One slot, all layers: its first n tokens into group `group` of a page, or that group of the page back into the slot. */
int sits_k_kv_fold_slot(const struct k_kv_view *kv, int32_t slot, int32_t page, int32_t group, int32_t n, struct k_stream at);
int sits_k_kv_unfold_slot(const struct k_kv_view *kv, int32_t page, int32_t group, int32_t slot, struct k_stream at);

/* Pages -> f16 keys and values of some sequences, side by side: k, v [G][capacity][D], sequence s0+i from row offset[i], whole pages. */
struct k_kv_gather {
  struct k_kv_view kv;
  int32_t seq0, n_seqs;       /* which sequences */
  const int32_t *offset;      /* [S] on the device; NULL: 0 */
  int32_t first_page;         /* pages before this one of each sequence are there already */
  int32_t max_pages;          /* of any of them, from first_page on */
  int64_t capacity;           /* rows */
  void *k, *v;
  bool skip_single;
  bool is_tiled;              /* 128-key tiles in the order prefill_sm90.cu reads, instead of rows; offsets are multiples of 128 then */
  void *exact;                /* int4, fp4: keys of the groups that this step writes, f16, [G][exact_capacity][D] */
  int64_t exact_capacity;     /* rows, k_kv_exact_rows or more */
};
/* Rows of `exact`: whole tiles of 128 positions; sequence s has its first row, of the tile in which the group of its first new token
 * begins, at k_kv_exact_row0. */
K_FN int64_t k_kv_exact_row0(const int32_t *seq_start, int32_t seq0, int32_t s) {
  return ((int64_t)(seq_start[s] - seq_start[seq0]) / 128 + 2 * (int64_t)(s - seq0)) * 128;
}
K_FN int64_t k_kv_exact_rows(int32_t n_tokens, int32_t n_seqs) { return ((int64_t)n_tokens / 128 + 2 * (int64_t)n_seqs + 1) * 128; }
int sits_k_kv_gather(const struct k_kv_gather *args, struct k_stream at);

/* Causal attention of the step's tokens over gathered keys and values; q and out f16 rows. */
struct k_attn_prefill {
  struct k_kv_view kv;
  const void *q;              /* [T][H*D] f16 */
  const void *k, *v;          /* as k_kv_gather wrote them */
  int64_t capacity;
  const int32_t *offset;      /* [S]; NULL: 0 */
  int32_t seq0, n_seqs;
  int32_t max_new;            /* most tokens of one of these sequences in the step */
  void *out;                  /* [T][H*D] f16 */
  bool skip_single;
  /* wgmma form only: where the tiles of queries do not fill the device, keys are split over several CTAs */
  int32_t max_keys;           /* most cached tokens of one of these sequences; 0 = no splitting */
  float *workspace;           /* k_attn_prefill_workspace_bytes, or NULL = no splitting */
  const void *exact;          /* int4, fp4: as k_kv_gather wrote it */
  int64_t exact_capacity;
};
size_t k_attn_prefill_workspace_bytes(int32_t n_sm, int32_t head_dim);
/* CTAs that share the keys of one tile of queries. */
int32_t k_attn_prefill_splits(int32_t n_sm, int32_t n_ctas, int32_t max_keys);
bool k_attn_prefill_takes(int32_t head_dim);
int sits_k_attn_prefill_init(void);
int sits_k_attn_prefill(const struct k_attn_prefill *args, struct k_stream at);
/* The same by wgmma over tiled keys and values; compute capability 9. */
int sits_k_attn_prefill_sm90_init(void);
int sits_k_attn_prefill_sm90(const struct k_attn_prefill *args, int32_t n_sm, struct k_stream at);

/* Any codec, any D <= 256, one warp per token and head, straight from the pages: correct, not fast. */
struct k_attn_any {
  struct k_kv_view kv;
  const void *q;
  void *out;                  /* [T][H*D] f16 */
  struct k_kv_blocks blocks;  /* codecs with open groups */
};
int sits_k_attn_any(const struct k_attn_any *args, struct k_stream at);

/* ---- 4-bit weights to wider forms, for GEMMs of many tokens (kernels/quant/expand.cu) ---- */
struct k_expand {
  const void *weight;
  enum k_w4_format format;
  int32_t rows, cols;
  const float *channel;       /* [padded rows] e4m3: value = channel * e4m3, scale / channel is a power of two or 1..16 */
  bool to_e4m3;               /* else f16 */
  void *out;                  /* [rows][k_blocks*128] */
};
int sits_k_expand(const struct k_expand *args, struct k_stream at);

/* ---- 4-bit GEMM for 17 and more tokens, 8-bit activations (kernels/gemm/gemm_w4a8.cu) ----
 * Absorbed: weight scales of channel[row] * 1..16, an activation scale per token. Grouped: any G128 scales, an activation scale per token
 * and 128 columns. */
enum k_w4a8_output {
  K_W4A8_SLAB_F32,  /* y[split][n][ld] f32 partial sums */
  K_W4A8_F16,       /* y[n][ld] f16; split must be 1 */
  K_W4A8_SWIGLU,    /* y[n][ld] f16 of rows/2 columns, rows being 8 gate, 8 up, ...; split must be 1 */
  K_W4A8_F32,       /* y[n][ld] f32; split must be 1 */
  K_W4A8_SWIGLU_S8, /* y, y_scale: the products as K_ACT_GROUP_S8 of the same token tile; grouped only */
};
struct k_w4a8 {
  const void *weight;         /* K_W4_G128 */
  bool is_grouped;            /* x is K_ACT_GROUP_S8, any weight scales; else K_ACT_TILE_S8 and scales of channel[row] * 1..16 */
  const float *channel;       /* [padded rows]; not grouped */
  int32_t rows, cols, n_tokens;
  const void *x;              /* with the plan's tile */
  const float *x_scale;       /* [T]; grouped: [token tile][block][tile] */
  const int32_t *x_sum;       /* [T]; not grouped */
  enum k_w4a8_output output;
  void *y;
  float *y_scale;             /* SWIGLU_S8: [token tile][block][tile] */
  int32_t ld;
  int64_t slab_stride;
};
struct k_w4a8_plan { int32_t tile, token_tiles, k_groups, chunk_tiles, n_chunks, n_split, n_items, grid, x_slots, w_slots, scales_at,
  staging_at, w_at, smem_bytes; };
bool k_w4a8_plan(const struct k_w4a8 *args, int32_t n_sm, struct k_w4a8_plan *plan);
int32_t k_w4a8_tile(int32_t n_tokens);       /* token tile of K_ACT_TILE_S8: 32, 64, 96 or 128 */
int32_t k_w4a8_group_tile(int32_t n_tokens); /* token tile of K_ACT_GROUP_S8: 16, 32 or 64 */
int sits_k_w4a8_init(void);
int sits_k_w4a8(const struct k_w4a8 *args, int32_t n_sm, struct k_stream at);

/* ---- sampling (kernels/sample/sample.cu) ---- */
struct k_sample_row {         /* one row's parameters; device array */
  float temperature;          /* 0 = greedy */
  float top_p, min_p;         /* 1, 0 = off */
  int32_t top_k;              /* 0 = off */
  float u;                    /* uniform in [0, 1) for the draw */
};
struct k_sample {
  const float *logits;        /* [R][ld] */
  int32_t n_rows, n_vocab, ld;
  const struct k_sample_row *rows; /* [R], NULL = greedy */
  int32_t *token;             /* [R] */
  float *logprob;             /* [R] of the token under softmax(logits), NULL = not wanted */
};
int sits_k_sample(const struct k_sample *args, struct k_stream at);

/* ---- collectives between ranks over peer memory (kernels/comm/) ----
 * Every rank is a device (or a part of one) with a receive memory that its peers may write; all calls are made by all ranks in the same
 * order. A spin ends after timeout_ns or when *abort_word is set: then *lost_word becomes 1 and all later calls run through. */
#define K_MAX_RANKS 8
#define K_GATHER_CTAS 64
struct k_ranks_state { uint32_t reduce_calls, reduce_done, gather_calls, gather_done, is_lost; }; /* device memory, zero at first */
struct k_ranks {
  int32_t rank, n_ranks;
  struct k_ranks_state *state; /* on this device */
  const int32_t *abort_word;   /* host memory that the device reads */
  int32_t *lost_word;          /* host memory that the device writes */
  uint64_t timeout_ns;
};

enum k_reduce_protocol { K_REDUCE_PUSH, K_REDUCE_BULK, K_REDUCE_BULK_S8, K_REDUCE_NONE };
/* h += sum over ranks of f16(sum of slabs), or of own_half; out = form(rms_norm(h) * gain) as sits_k_norm, neither rotated nor rounded;
 * out.data NULL: no norm. With BULK_S8 the shares are rounded further: of each run of K_GROUP columns x, s = max |x| / 127 and the sum is
 * of s * round(x / s). */
struct k_reduce {
  struct k_ranks ranks;
  enum k_reduce_protocol protocol;
  const float *slabs;          /* [n_slabs][slab_stride] f32, each [T][E] */
  int32_t n_slabs;
  int64_t slab_stride;
  const void *own_half;        /* [T][E] f16 instead of slabs, or NULL; with NONE: the sum over ranks */
  float *h;                    /* [T][E] */
  bool is_first;               /* h = the sum, whatever it held */
  const float *gain;           /* [E] */
  float eps;
  int32_t n_tokens, width;     /* T E */
  struct k_act out;
  int32_t max_ctas;            /* that are resident together for certain; BULK: k_reduce_bulk_per_sm on an SM, the same on all ranks */
  int32_t split;               /* CTAs that share a row (a cluster; compute capability 9), a power of two up to 8; 0 = 1. BULK: the same on
                                  all ranks */
  void *push[K_MAX_RANKS];     /* of each rank: [2][n_ranks][push_rows][E] as {2 f16, u32, 2 f16, u32} */
  void *bulk[K_MAX_RANKS];     /* of each rank: [2][n_ranks][bulk_rows][E] f16; S8: a row is [E] s8, [blocks] f32 in the same place */
  uint32_t *bulk_flag[K_MAX_RANKS]; /* of each rank: k_reduce_flag_bytes, zero at first */
  int32_t push_rows, bulk_rows;
};
K_FN size_t k_reduce_push_bytes(int32_t n_ranks, int32_t rows, int32_t width) { return (size_t)2 * n_ranks * rows * width * 4; }
K_FN size_t k_reduce_bulk_bytes(int32_t n_ranks, int32_t rows, int32_t width) { return (size_t)2 * n_ranks * rows * width * 2; }
/* Flags of one rank and set: a batch, of one row at least, has one for each CTA that shares it, eight at most. */
K_FN int32_t k_reduce_flags(int32_t rows) { return rows * 8; }
K_FN size_t k_reduce_flag_bytes(int32_t n_ranks, int32_t rows) { return (size_t)2 * n_ranks * k_reduce_flags(rows) * sizeof(uint32_t); }
/* CTAs of the BULK protocols that should share a row, and how many fit an SM (BULK_S8 takes fewer registers). */
K_FN int32_t k_reduce_bulk_split(int32_t width) { return width <= 4096 ? 1 : width <= 8192 ? 2 : 4; }
K_FN int32_t k_reduce_bulk_per_sm(int32_t width, int32_t split, enum k_reduce_protocol protocol) {
  return width > 4096 * (split > 1 ? split : 1) ? 1 : protocol == K_REDUCE_BULK_S8 ? 4 : 3;
}
/* How many CTAs should share a row: as many as give each thread eight values, more while the device has room. */
int32_t k_reduce_split(int32_t width, int32_t n_tokens, int32_t n_sm);
int sits_k_reduce_init(void);
int sits_k_reduce(const struct k_reduce *args, struct k_stream at);
/* out [T][E] f16 = f16(sum of slabs), before a library's all-reduce. */
int sits_k_reduce_share(const struct k_reduce *args, void *out, struct k_stream at);

/* out of every rank [T][n_ranks * n_cols] f32 = x [T][n_cols] of all ranks side by side. */
struct k_gather {
  struct k_ranks ranks;
  const float *x;
  int32_t n_rows, n_cols, max_ctas;
  float *out[K_MAX_RANKS];     /* of each rank */
  uint32_t *flag[K_MAX_RANKS]; /* of each rank: [n_ranks][K_GATHER_CTAS], zero at first */
};
int sits_k_gather_columns(const struct k_gather *args, struct k_stream at);
/* One thread that waits until *abort_word is set, at most max_ns: a hung device, for tests. */
int sits_k_stall(const int32_t *abort_word, int64_t max_ns, struct k_stream at);

/* ---- synthetic weights ---- */
/* Random packed 4-bit weights of about unit gain: nibbles from a counter hash, scales spread * 1..1.5 times a power-of-two multiplier. */
struct k_fill_w4 { void *weight; enum k_w4_format format; int32_t rows, cols; float scale; uint32_t seed; float *channel; };
int sits_k_fill_w4(const struct k_fill_w4 *args, struct k_stream at);
int sits_k_fill_f32(float *out, int64_t n, float value, struct k_stream at);

/* A failing launch or a trapping kernel, for tests. */
int sits_k_fault(bool is_trap, struct k_stream at);

/* Read n_bytes of device memory: the measured bandwidth that benches compare with. */
int sits_k_read(const void *src, int64_t n_bytes, uint32_t *sink, int32_t n_sm, struct k_stream at);

#ifdef __cplusplus
}
#endif

#endif
