/* Unified tensor descriptor: one device-independent description of a tensor's element type, quantisation, layout and place.
 *
 * The same descriptor stands for weights in a GGUF or safetensors file, for tensors of an engine file, for activations and KV pages.
 * A backend says which descriptors it takes; packers convert. A descriptor never owns its bytes: `data` is borrowed from the file
 * map, arena or device buffer that made it, and lives as long as that owner.
 */
#ifndef SITS2026_UTD_H
#define SITS2026_UTD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SITS_MAX_DIMS 4
#define SITS_MAX_NAME 96

/* X(NAME, text, elements per block, bytes per block). Plain types have one element a block.
 * The Q* rows are GGUF's block formats, byte for byte as in the file.
 * I4 holds element 2i in the low half of byte i and 2i + 1 in the high half, as unsigned u: a quantised weight is scale * u + minimum, or
 * scale * (u - 8) where there are no minimums. Quantised I8 is signed: scale * q (+ minimum). */
#define SITS_DTYPE_MAP(X) \
  X(F32,  "f32",    1,   4) \
  X(F16,  "f16",    1,   2) \
  X(BF16, "bf16",   1,   2) \
  X(F64,  "f64",    1,   8) \
  X(I8,   "i8",     1,   1) \
  X(U8,   "u8",     1,   1) \
  X(I16,  "i16",    1,   2) \
  X(I32,  "i32",    1,   4) \
  X(U32,  "u32",    1,   4) \
  X(I64,  "i64",    1,   8) \
  X(Q4_0, "q4_0",  32,  18) \
  X(Q4_1, "q4_1",  32,  20) \
  X(Q5_0, "q5_0",  32,  22) \
  X(Q5_1, "q5_1",  32,  24) \
  X(Q8_0, "q8_0",  32,  34) \
  X(Q2_K, "q2_k", 256,  84) \
  X(Q3_K, "q3_k", 256, 110) \
  X(Q4_K, "q4_k", 256, 144) \
  X(Q5_K, "q5_k", 256, 176) \
  X(Q6_K, "q6_k", 256, 210) \
  X(I4,   "i4",     2,   1) \
  X(E2M1, "e2m1",   2,   1)

enum sits_dtype {
#define SITS_DTYPE_ENUM(name, text, elements, bytes) SITS_DTYPE_##name,
  SITS_DTYPE_MAP(SITS_DTYPE_ENUM)
#undef SITS_DTYPE_ENUM
  SITS_DTYPE_COUNT
};

enum sits_quant {           /* how stored integers become real numbers, beyond what dtype's own blocks say */
  SITS_QUANT_NONE,          /* value as stored; for Q* types the block's own scales apply */
  SITS_QUANT_CHANNEL,       /* one scale per index of dims[0] */
  SITS_QUANT_GROUP,         /* one scale per group_size consecutive elements along group_axis */
};

enum sits_layout {
  SITS_LAYOUT_ROW_MAJOR,    /* dims[0] is the slowest, dims[n_dims-1] contiguous */
  SITS_LAYOUT_PACKED_TILE,  /* backend-defined tiles, named by tile_name */
};

enum sits_place { SITS_PLACE_HOST, SITS_PLACE_PINNED, SITS_PLACE_MAPPED_FILE, SITS_PLACE_DEVICE };

struct sits_utd {
  char name[SITS_MAX_NAME];
  enum sits_dtype dtype;
  int32_t n_dims;
  int64_t dims[SITS_MAX_DIMS];   /* logical shape, slowest first: a weight [out][in] has dims {out, in} */
  enum sits_quant quant;
  int32_t group_size;            /* elements that share a scale; 0 when quant is none */
  int32_t group_axis;            /* axis along which groups run */
  enum sits_dtype scale_dtype;   /* of `scales` */
  const void *scales;            /* [groups] row-major like the tensor; NULL when quant is none */
  const void *minimums;          /* [groups] in scale_dtype, added after scaling; NULL when symmetric */
  enum sits_layout layout;
  const char *tile_name;         /* layout PACKED_TILE: which packing; NULL otherwise */
  enum sits_place place;
  int32_t device;                /* index for SITS_PLACE_DEVICE */
  const void *data;              /* borrowed */
  size_t n_bytes;                /* of data; with row_stride the sum of its rows */
  int64_t row_stride;            /* some columns of a wider row-major matrix: bytes from row to row; 0: rows follow each other */
  int64_t scale_stride;          /* likewise, of `scales` and `minimums` */
};

struct sits_dtype_info { const char *name; int32_t block_elements; int32_t block_bytes; };

/* Never NULL; dtype must be in range. */
const struct sits_dtype_info *sits_dtype_info(enum sits_dtype dtype);

/* Product of dims; -1 on overflow or a negative dimension. */
int64_t sits_utd_elements(const struct sits_utd *utd);

/* Bytes that a row-major tensor of this type and shape takes; -1 on overflow or when a row is no whole number of blocks. */
int64_t sits_utd_row_major_bytes(const struct sits_utd *utd);

/* Row `row` of a row-major matrix with whole blocks in its rows; and of its scales or minimums, groups along the row. */
const void *sits_utd_row(const struct sits_utd *utd, int64_t row);
const void *sits_utd_row_scales(const struct sits_utd *utd, int64_t row);
const void *sits_utd_row_minimums(const struct sits_utd *utd, int64_t row); /* NULL: it has none */

#ifdef __cplusplus
}
#endif
#endif
