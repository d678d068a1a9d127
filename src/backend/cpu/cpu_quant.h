/* Inside of the CPU matrix multiply: packed layouts, the activation record, and the table of kernels per instruction-set level.
 * Only cpu_matmul*.c, cpu_pack*.c, cpu_quant*.c and their tests include it.
 *
 * Packed quantised weight, row tile of W rows (16 or 8), G = K / 32 groups. Every stored integer u is unsigned; the weight's value is
 * d * (u - offset) + m. Tiles follow one another, and so do a tile's chunks: one linear stream, which prefetchers like. A chunk is a header
 * of scales, padded to 4W bytes, and the planes of its groups:
 *
 *   header, Q4_1 Q5_1, chunks of 1 group:            d f16[W]  m f16[W]
 *   header, Q4_0 Q5_0 Q8_0, chunks of 2 groups:      d f16[2][W]               (where G is odd the last chunk is half empty)
 *   header, K types, chunks of 8 groups (a block):   d f16[W]  (dmin f16[W])  then 8 groups of `halves` times:
 *                                                    sc i8[W]  (mn u8[W])      Q2_K: one byte, sc | mn << 4
 *   planes, per group:  low bits, then high bits
 *     vector v = 0..7 of a group is W lanes of 4 bytes: lane r holds u of row r at k = 4v .. 4v+3
 *     8 bits: vectors 0..7 as they are                      8 * 4W bytes
 *     4 bits: 4 vectors, vector v in the low nibbles of v and vector v + 4 in the high ones
 *     2 bits: 2 vectors, vector v in bits 2(v % 4) of vector v / 4
 *     1 bit:  1 vector, vector v in bit v
 *
 * Tensors of the neutral layout (I4, I8 with f16 scales, groups a multiple of 32) are packed as what they equal: I4 as Q4_1, without
 * minimums as Q4_0; I8 without minimums as Q8_0, with them as the row I8 of the map, for which no block format exists.
 *
 * Packed float weight: [tile][K][W] in the stored type.
 *
 * Activation, CPU_ACT_Q8. x is approximated by s * (a + z) per token and group of 32: a is s8, z an integer, both in -127..127, s f32;
 * lo = min(x, 0), hi = max(x, 0), s = (hi - lo) / 254, z = round((hi + lo) / 2s), a = round(x / s) - z. With b = sum(a + z) over the
 * group, and n = sum(u) of a row's group,
 *     sum w x = d * s * ( sum u a + [n, offset] . [z, -b] ) + m * s * b
 * whose bracket is exact in 32-bit integers: zero point and offset together cost one 16-bit dot product a group. Tokens lie in tiles of
 * N = cpu_act_tile(n_tokens) (1, 2 or 4): per tile the records of all groups, then, for 16-element halves, the second records.
 *   record, 44N bytes:  a s8[N][32], s f32[N], pair i16[N][2] = (z, -b), x f32[N] = s * b
 *   second, 16N bytes:  pair0 i16[N][2], pair1 i16[N][2], x0 f32[N], x1 f32[N] of the two halves
 * Activation, CPU_ACT_F32: [tile][K][N] f32. Tokens past the last in a tile are zero.
 *
 * Order of summation, the same in every kernel, which makes results independent of batch and split: y = 0; for each group ascending, for
 * each half: y = fma(f32(bracket), d * s, y), then, where the type has minimums, y = fma(m, s * b, y).
 * Float weights: y = 0; for each k ascending y = fma(w, x, y).
 */
#ifndef SITS_BACKEND_CPU_CPU_QUANT_H
#define SITS_BACKEND_CPU_CPU_QUANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/cpu/cpu_matmul.h"

#define CPU_GROUP 32                  /* k of an activation group */
#define CPU_VECTORS 8                 /* of 4 k in a group */
#define CPU_BLOCK 256                 /* k of a K type's block */
#define CPU_RECORD_BYTES 44           /* of a token and group */
#define CPU_SECOND_BYTES 16
#define CPU_ACT_MAX_TILE 4
#define CPU_MIN_RANGE 1e-30F          /* a group with a smaller range counts as zero: 254 / range must stay finite */

/* The quantised types: what their integers mean and how they are laid out. X(NAME, bits of u: low plane, high plane; halves: scales per
 * 32 k, 1 or 2; mins: has minimums; super: 256-block with integer scales under f16 ones; nibble: scale and minimum in one byte; offset) */
#define CPU_FORMAT_MAP(X) \
  X(Q4_0, 4, 0, 1, 0, 0, 0, 8)   X(Q4_1, 4, 0, 1, 1, 0, 0, 0)  X(Q5_0, 4, 1, 1, 0, 0, 0, 16) X(Q5_1, 4, 1, 1, 1, 0, 0, 0) \
  X(Q8_0, 8, 0, 1, 0, 0, 0, 128) X(Q2_K, 2, 0, 2, 1, 1, 1, 0)  X(Q3_K, 2, 1, 2, 0, 1, 0, 4)  X(Q4_K, 4, 0, 1, 1, 1, 0, 0) \
  X(Q5_K, 4, 1, 1, 1, 1, 0, 0)   X(Q6_K, 4, 2, 2, 0, 1, 0, 32) X(I8, 8, 0, 1, 1, 0, 0, 128)

/* Kernels take a row of the map as constant arguments, so that each type has its own straight code. W: rows of the level's tile. */
#define CPU_FORMAT_PARAMS int low, int high, int halves, int mins, int super, int nibble, int offset
#define CPU_FORMAT_ARGS low, high, halves, mins, super, nibble, offset
#define CPU_CHUNK_GROUPS (super ? 8 : mins ? 1 : 2)
#define CPU_HALF_BYTES (W * (mins && !nibble ? 2 : 1))             /* integer scales of a half group */
#define CPU_HEADER_BYTES (super ? (2 * W * (1 + mins) + 8 * halves * CPU_HALF_BYTES + 4 * W - 1) / (4 * W) * 4 * W : 4 * W)
#define CPU_PLANE_BYTES (4 * W * (low + high))
#define CPU_CHUNK_BYTES (CPU_HEADER_BYTES + CPU_CHUNK_GROUPS * CPU_PLANE_BYTES)

struct cpu_quant_format {             /* a row of the map */
  bool is_quantised;                  /* false: no such weight */
  uint8_t low_bits, high_bits, halves;
  bool has_min, is_super, is_nibble_scale;
  int32_t offset;
};

struct cpu_matmul_ops;

struct cpu_weight {
  enum sits_dtype dtype;              /* [init] all */
  const struct cpu_quant_format *format; /* NULL for float types */
  const struct cpu_matmul_ops *ops;
  int64_t rows, k;
  int32_t tile;                       /* rows of a tile */
  int32_t chunk_groups;               /* quantised: groups of a chunk */
  size_t header_bytes, plane_bytes;   /* of a chunk, of a group */
  size_t chunk_bytes, tile_bytes;
  size_t n_bytes;
  uint8_t *data;
  bool owns_data;
  bool prefetches;                    /* cpu_isa_prefetches */
  bool has_gfni;                      /* cpu_isa_has_gfni */
};

/* Kernels of one level. act and y as in cpu_matmul; rows by tile: t0..t1. */
struct cpu_matmul_ops {
  int32_t tile;
  void (*quantize)(const float *x, int64_t k, int32_t token, int32_t n_tokens, uint8_t *act);
  void (*matmul)(const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y, int64_t ldy,
                 uint8_t *scratch);
};

const struct cpu_matmul_ops *cpu_matmul_ops_scalar(void);
const struct cpu_matmul_ops *cpu_matmul_ops_avx2(void);     /* NULL where the compiler does not target x86-64 */
const struct cpu_matmul_ops *cpu_matmul_ops_avx512(void);

/* Header of the chunk that holds group g of a row tile, and the group's planes. */
static inline uint8_t *cpu_weight_header(const struct cpu_weight *w, int64_t tile, int64_t g)
{
  return w->data + (size_t)tile * w->tile_bytes + (size_t)(g / w->chunk_groups) * w->chunk_bytes;
}
static inline uint8_t *cpu_weight_planes(const struct cpu_weight *w, int64_t tile, int64_t g)
{
  return cpu_weight_header(w, tile, g) + w->header_bytes + (size_t)(g % w->chunk_groups) * w->plane_bytes;
}

const struct cpu_quant_format *cpu_quant_format(enum sits_dtype dtype); /* NULL unless quantised */

/* Integers and effective scales of group g of one row of a tile; scalar, also the source of cpu_weight_row. */
struct cpu_quant_row {
  uint8_t u[CPU_GROUP];
  float d[2], m[2];                   /* [half]; m is what is added: minus the minimum for K types */
};
void cpu_quant_unpack(const struct cpu_weight *w, int64_t tile, int64_t g, int32_t row, struct cpu_quant_row *out);

/* Tokens of a tile of the activation. */
static inline int32_t cpu_act_tile(int32_t n_tokens) { return n_tokens >= 3 ? CPU_ACT_MAX_TILE : n_tokens; }

static inline size_t cpu_round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

static inline size_t cpu_act_tile_bytes_q8(int64_t k, int32_t tile)
{
  return cpu_round_up((size_t)(k / CPU_GROUP) * (CPU_RECORD_BYTES + CPU_SECOND_BYTES) * (size_t)tile, CPU_ALIGN_BYTES);
}
static inline size_t cpu_act_tile_bytes_f32(int64_t k, int32_t tile)
{
  return cpu_round_up((size_t)k * sizeof(float) * (size_t)tile, CPU_ALIGN_BYTES);
}

/* Where token `token` of a batch has its parts of group g. */
struct cpu_act_ref {
  int8_t *a;          /* [32] */
  float *s, *x;       /* [1] */
  int16_t *pair;      /* [2] */
  int16_t *pair_half[2];
  float *x_half[2];
};
static inline struct cpu_act_ref cpu_act_at(const uint8_t *act, int64_t k, int32_t n_tokens, int32_t token, int64_t g)
{
  size_t n = (size_t)cpu_act_tile(n_tokens), i = (size_t)token % n, groups = (size_t)(k / CPU_GROUP);
  uint8_t *tile = (uint8_t *)(uintptr_t)act + cpu_act_tile_bytes_q8(k, (int32_t)n) * ((size_t)token / n);
  uint8_t *rec = tile + (size_t)g * CPU_RECORD_BYTES * n, *second = tile + groups * CPU_RECORD_BYTES * n + (size_t)g * CPU_SECOND_BYTES * n;
  return (struct cpu_act_ref){
      .a = (int8_t *)(rec + i * CPU_GROUP),
      .s = (float *)(rec + n * 32) + i,
      .pair = (int16_t *)(rec + n * 36) + 2 * i,
      .x = (float *)(rec + n * 40) + i,
      .pair_half = {(int16_t *)second + 2 * i, (int16_t *)(second + n * 4) + 2 * i},
      .x_half = {(float *)(second + n * 8) + i, (float *)(second + n * 12) + i},
  };
}

#endif
