/* Paged key/value memory of the CPU backend, and the codecs that say how a page stores it.
 *
 * Layout: a page is [layer][kv head] blocks of `block_bytes`; a block holds the K and V of P tokens of one head in one layer, so that
 * attention streams contiguous blocks. What is inside a block is the codec's business.
 *
 *   codec   bits   block (each codec's file has the details)
 *   f16     16     K transposed [D][P] f16, then V [P][Dv] f16
 *   f32     32     the same in f32, to measure the others against
 *   int8     8.5   K [D][P], V [P][Dv], rotated, a scale per token
 *   int4     4.5   K per channel over 32 tokens, V per token over 32 channels and rotated, scales and zero points
 *   fp4      4.6   e2m1 in groups of 16 channels, rotated, the page's mean key taken out; fp4-sparse: the same, and blocks may be missing
 * Dv is D rounded up to CPU_KV_PAD.
 *
 * Rules: 1. Appends to one block come from one thread at a time, in ascending slots; K and V may be appended by different threads.
 * 2. Readers run after a barrier. 3. Values beyond the format's range saturate: a stored number is always finite (f32 stores what it
 * is given).
 * To add a codec: one file cpu_kv_NAME.c with a struct cpu_kv_codec, and a row in cpu_kv_codec_for.
 */
#ifndef SITS_BACKEND_CPU_CPU_KV_H
#define SITS_BACKEND_CPU_CPU_KV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"
#include "backend/cpu/cpu_kv_open.h"
#include "backend/cpu/cpu_ops.h"

struct backend_kv;
struct cpu_kv_open;

#define CPU_KV_PAD 32                /* channels: widest group of a codec, a multiple of CPU_V_ALIGN */
#define CPU_KV_MAX_HEAD_DIM 256

static inline int32_t cpu_kv_padded(int32_t head_dim) { return (head_dim + CPU_KV_PAD - 1) / CPU_KV_PAD * CPU_KV_PAD; }

/* Floats of scratch that attend_k and attend_v may use: a block expanded to f32. */
#define CPU_KV_SCRATCH_FLOATS(head_dim) ((size_t)KV_PAGE_TOKENS * (size_t)cpu_kv_padded(head_dim))

struct cpu_kv_codec {
  enum kv_codec codec;
  bool rotates_k;                    /* queries and keys are Hadamard-rotated per head before use */
  bool rotates_v;                    /* values are, and outputs are rotated back */
  bool is_sparse;                    /* block tables may name KV_NO_PAGE, and a batch may have blocks */
  int32_t open_tokens;               /* group of tokens whose keys are quantised together (cpu_kv_open.h); 0 = each on its own */
  size_t (*block_bytes)(int32_t head_dim);
  size_t (*values_at)(int32_t head_dim); /* where V begins in a block; NULL: what is read next is not fetched ahead */
  /* Store one token's key, or value, of one head. k, v: [D] f32, rotated by the caller. open: the group's tile, NULL without groups. */
  void (*append_k)(const struct backend_kv *kv, void *block, int32_t slot, const float *k, uint16_t *open);
  void (*append_v)(const struct backend_kv *kv, void *block, int32_t slot, const float *v);
  /* scores[r][j] = q[r] . k_j for the first n tokens of the block (lanes up to the next multiple of CPU_V_ALIGN are written too).
   * next, here and below: the keys or values that are read after these, or NULL; they may be fetched meanwhile. */
  void (*attend_k)(const struct backend_kv *kv, const void *block, const float *q, int32_t ldq, int32_t rows, int32_t n, float *scores,
                   int32_t lds, float *scratch, const void *next);
  /* acc[r][0..Dv) += sum over j < n of p[r][j] * v_j, j ascending. */
  void (*attend_v)(const struct backend_kv *kv, const void *block, const float *p, int32_t ldp, int32_t rows, int32_t n, float *acc,
                   float *scratch, const void *next);
  /* With groups only: quantise the first n tokens of a tile into the block; and the reverse. */
  void (*fold)(const struct backend_kv *kv, void *block, int32_t group, const uint16_t *open, int32_t n);
  void (*unfold)(const struct backend_kv *kv, const void *block, int32_t group, uint16_t *open);
};

extern const struct cpu_kv_codec cpu_kv_f16, cpu_kv_f32, cpu_kv_int8, cpu_kv_int4, cpu_kv_fp4, cpu_kv_fp4_sparse;

const struct cpu_kv_codec *cpu_kv_codec_for(enum kv_codec codec); /* NULL: not supported */

struct backend_kv {
  struct kv_geometry geometry;
  const struct cpu_kv_codec *codec;
  const struct cpu_ops *ops;
  int32_t dv;                        /* cpu_kv_padded(D) */
  size_t block_bytes, layer_bytes, page_bytes;
  size_t values_at;                  /* of the codec, where this processor needs fetching ahead; else 0 */
  unsigned char *pages;              /* [n_pages][page_bytes] */
  struct cpu_kv_open *open;          /* NULL without groups */
};

static inline unsigned char *cpu_kv_block(const struct backend_kv *kv, int32_t page, int32_t layer, int32_t head)
{
  return kv->pages + (size_t)page * kv->page_bytes + (size_t)layer * kv->layer_bytes + (size_t)head * kv->block_bytes;
}

/* Numbers of blocks as backend.h counts them: pages hold theirs one after the other. */
static inline int32_t cpu_kv_columns(const struct backend_kv *kv) { return kv->geometry.n_layers * kv->geometry.n_kv_heads; }

static inline unsigned char *cpu_kv_numbered(const struct backend_kv *kv, int32_t number)
{
  return kv->pages + (size_t)number * kv->block_bytes;
}

uint64_t cpu_kv_page_bytes(const struct kv_geometry *geometry);
/* max_tokens, max_seqs: the largest batch. */
enum sits_status cpu_kv_create(const struct kv_geometry *geometry, const struct cpu_ops *ops, int32_t max_tokens, int32_t max_seqs,
                               struct backend_kv **out, struct sits_error *err) SITS_MUST_CHECK;
void cpu_kv_destroy(struct backend_kv *kv);
enum sits_status cpu_kv_copy_pages(struct backend_kv *kv, const struct kv_copy *copies, int32_t n) SITS_MUST_CHECK;
enum sits_status cpu_kv_copy_blocks(struct backend_kv *kv, const int32_t (*copies)[2], int32_t n) SITS_MUST_CHECK;
enum sits_status cpu_kv_read_page(struct backend_kv *kv, int32_t page, void *host) SITS_MUST_CHECK;
enum sits_status cpu_kv_write_page(struct backend_kv *kv, int32_t page, const void *host) SITS_MUST_CHECK;
void cpu_kv_expect(struct backend_kv *kv, const int32_t *pages, int32_t n);
enum sits_status cpu_kv_send(struct backend_kv *from, struct backend_kv *to, const struct kv_copy *copies, int32_t n) SITS_MUST_CHECK;
enum sits_status cpu_kv_sent(struct backend_kv *from) SITS_MUST_CHECK;

#endif
