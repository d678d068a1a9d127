/* Packing of weights: cpu_weight_create and its parts, cpu_weight_row, and the readers of GGUF's block formats.
 *
 * A row tile is packed group by group. 32-blocks of 4 and 8 bits need no more than an interleave of 4-byte words, since GGUF pairs
 * element j with j + 16 in a byte exactly as a packed vector v pairs with v + 4. The other types are first read into plain bytes.
 */
#include <string.h>

#include "backend/cpu/cpu_quant.h"
#include "base/mem.h"
#include "tensor/dequant.h"

/* One group of one row: integers in k order, and the scale bytes of its halves. */
struct block_group {
  uint8_t u[CPU_GROUP];
  uint8_t scale[2], min[2];          /* K types */
};

static int32_t float_bytes(enum sits_dtype dtype)
{
  return dtype == SITS_DTYPE_F32 ? 4 : dtype == SITS_DTYPE_F16 || dtype == SITS_DTYPE_BF16 ? 2 : 0;
}

static const struct cpu_matmul_ops *ops_of(enum cpu_isa isa)
{
  switch (isa) {
  case CPU_AVX512: return cpu_matmul_ops_avx512();
  case CPU_AVX2: return cpu_matmul_ops_avx2();
  default: return cpu_matmul_ops_scalar();
  }
}

/* Sizes of a tile; the caller has checked dtype and dims. */
static void plan_layout(struct cpu_weight *w)
{
  size_t n = (size_t)w->tile, k = (size_t)w->k, tiles = ((size_t)w->rows + n - 1) / n;
  const struct cpu_quant_format *f = w->format;
  if (!f) {
    w->tile_bytes = cpu_round_up(k * n * (size_t)float_bytes(w->dtype), CPU_ALIGN_BYTES);
  } else {
    size_t mins = f->has_min ? 1 : 0, header = 4 * n, chunk_groups = f->has_min ? 1 : 2;
    if (f->is_super) {
      chunk_groups = CPU_BLOCK / CPU_GROUP;
      header = 2 * n * (1 + mins) + chunk_groups * f->halves * n * (mins && !f->is_nibble_scale ? 2 : 1);
    }
    w->chunk_groups = (int32_t)chunk_groups;
    w->header_bytes = cpu_round_up(header, 4 * n);
    w->plane_bytes = n * 4 * (size_t)(f->low_bits + f->high_bits);
    w->chunk_bytes = w->header_bytes + chunk_groups * w->plane_bytes;
    w->tile_bytes = (k / CPU_GROUP + chunk_groups - 1) / chunk_groups * w->chunk_bytes;
  }
  w->n_bytes = tiles * w->tile_bytes;
}

/* The block format that a tensor of the neutral layout equals once its scales stand at every 32 elements; false: the CPU takes no such
 * one. */
static bool neutral_dtype(const struct sits_utd *u, enum sits_dtype *out)
{
  bool is_four = u->dtype == SITS_DTYPE_I4, has_min = u->minimums != NULL;
  if ((!is_four && u->dtype != SITS_DTYPE_I8) || u->scale_dtype != SITS_DTYPE_F16 || u->scales == NULL || u->n_dims != 2) return false;
  if (u->quant == SITS_QUANT_GROUP && (u->group_axis != 1 || u->group_size <= 0 || u->group_size % CPU_GROUP != 0)) return false;
  if (u->dims[1] % CPU_GROUP != 0) return false;
  *out = is_four ? (has_min ? SITS_DTYPE_Q4_1 : SITS_DTYPE_Q4_0) : has_min ? SITS_DTYPE_I8 : SITS_DTYPE_Q8_0;
  return true;
}

static enum sits_status describe(const struct sits_utd *u, enum cpu_isa isa, struct cpu_weight *w, struct sits_error *err)
{
  int64_t bytes;
  memset(w, 0, sizeof *w);
  if ((unsigned)u->dtype >= SITS_DTYPE_COUNT) return sits_fail(err, SITS_UNSUPPORTED, "%s: unknown element type", u->name);
  w->dtype = u->dtype;
  if (u->quant != SITS_QUANT_NONE && !neutral_dtype(u, &w->dtype))
    return sits_fail(err, SITS_UNSUPPORTED, "%s: the CPU takes I4 and I8 in groups of a multiple of 32 with f16 scales", u->name);
  w->format = u->quant == SITS_QUANT_NONE && u->dtype == SITS_DTYPE_I8 ? NULL : cpu_quant_format(w->dtype);
  if (!w->format && !float_bytes(u->dtype))
    return sits_fail(err, SITS_UNSUPPORTED, "%s: the CPU multiplies no weights of type %s", u->name, sits_dtype_info(u->dtype)->name);
  if (u->layout != SITS_LAYOUT_ROW_MAJOR || u->place == SITS_PLACE_DEVICE)
    return sits_fail(err, SITS_UNSUPPORTED, "%s: the CPU packs row-major host tensors", u->name);
  if (u->n_dims != 2 || u->dims[0] <= 0 || u->dims[1] <= 0 || u->dims[0] > INT32_MAX || u->dims[1] > INT32_MAX)
    return sits_fail(err, SITS_FORMAT, "%s: a weight needs two positive dimensions", u->name);
  bytes = sits_utd_row_major_bytes(u);
  if (bytes < 0) return sits_fail(err, SITS_FORMAT, "%s: rows are no whole number of %s blocks", u->name, sits_dtype_info(u->dtype)->name);
  if (!u->data || (uint64_t)bytes > u->n_bytes) return sits_fail(err, SITS_FORMAT, "%s: fewer bytes than its shape needs", u->name);
  w->ops = ops_of(isa);
  if (!w->ops) return sits_fail(err, SITS_UNSUPPORTED, "this build has no %s kernels", cpu_isa_name(isa));
  w->rows = u->dims[0];
  w->k = u->dims[1];
  w->tile = w->ops->tile;
  w->prefetches = cpu_isa_prefetches();
  w->has_gfni = cpu_isa_has_gfni();
  plan_layout(w);
  return SITS_OK;
}

size_t cpu_weight_packed_bytes(const struct sits_utd *w, enum cpu_isa isa)
{
  struct cpu_weight plan;
  return describe(w, isa, &plan, NULL) == SITS_OK ? cpu_round_up(plan.n_bytes, CPU_ALIGN_BYTES) : 0;
}

void *cpu_weight_region(size_t n_bytes)
{
  void *region = mem_aligned(CPU_HUGE_PAGE, n_bytes);
  if (region) cpu_advise_huge(region, n_bytes);
  return region;
}

enum sits_status cpu_weight_create_in(const struct sits_utd *source, enum cpu_isa isa, void *memory, struct cpu_weight **out,
                                      struct sits_error *err)
{
  struct cpu_weight plan, *w;
  enum sits_status status = describe(source, isa, &plan, err);
  if (status != SITS_OK) return status;
  w = mem_alloc(sizeof *w);
  if (!w) return sits_fail(err, SITS_NOMEM, "%s: no memory for a packed weight", source->name);
  *w = plan;
  w->owns_data = memory == NULL;
  if (memory) w->data = memory;
  else w->data = plan.n_bytes >= CPU_HUGE_PAGE ? cpu_weight_region(plan.n_bytes) : mem_aligned(CPU_ALIGN_BYTES, plan.n_bytes);
  if (!w->data) {
    mem_free(w);
    return sits_fail(err, SITS_NOMEM, "%s: no memory for %zu packed bytes", source->name, plan.n_bytes);
  }
  *out = w;
  return SITS_OK;
}

enum sits_status cpu_weight_create(const struct sits_utd *source, enum cpu_isa isa, struct cpu_weight **out, struct sits_error *err)
{
  enum sits_status status = cpu_weight_create_in(source, isa, NULL, out, err);
  if (status == SITS_OK) cpu_weight_pack(*out, source, 0, (*out)->rows);
  return status;
}

void cpu_weight_destroy(struct cpu_weight *w)
{
  if (!w) return;
  if (w->owns_data) mem_free(w->data);
  mem_free(w);
}

/* ---- reading blocks ---------------------------------------------------------------------------------------------------------------- */

static uint32_t load32(const uint8_t *at)
{
  uint32_t v;
  memcpy(&v, at, sizeof v);
  return v;
}

/* Q5_0, Q5_1: 16 bytes of nibbles and 32 high bits. */
static void read_five_bits(const uint8_t *qh, const uint8_t *qs, uint8_t *u)
{
  uint32_t high = load32(qh);
  for (int j = 0; j < 16; j++) {
    u[j] = (uint8_t)((qs[j] & 15) | (high >> j & 1) << 4);
    u[j + 16] = (uint8_t)(qs[j] >> 4 | (high >> (j + 16) & 1) << 4);
  }
}

/* The 6-bit scale and minimum number j of the 12 bytes of Q4_K and Q5_K. */
static void read_six_bit_pair(const uint8_t *q, int j, struct block_group *out)
{
  if (j < 4) {
    out->scale[0] = q[j] & 63;
    out->min[0] = q[j + 4] & 63;
  } else {
    out->scale[0] = (uint8_t)((q[j + 4] & 15) | q[j - 4] >> 6 << 4);
    out->min[0] = (uint8_t)(q[j + 4] >> 4 | q[j] >> 6 << 4);
  }
}

static void read_q2_k(const uint8_t *b, int g, struct block_group *out)
{
  const uint8_t *qs = b + 16 + 32 * (g / 4);
  for (int l = 0; l < 32; l++) out->u[l] = qs[l] >> (2 * (g % 4)) & 3;
  out->scale[0] = b[2 * g];
  out->scale[1] = b[2 * g + 1];
}

static void read_q3_k(const uint8_t *b, int g, struct block_group *out)
{
  const uint8_t *hmask = b, *qs = b + 32 + 32 * (g / 4), *scales = b + 96;
  for (int l = 0; l < 32; l++) out->u[l] = (uint8_t)((qs[l] >> (2 * (g % 4)) & 3) | (hmask[l] >> g & 1) << 2);
  for (int h = 0; h < 2; h++) {
    int i = 2 * g + h, low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4, high = scales[8 + i % 4] >> (2 * (i / 4)) & 3;
    out->scale[h] = (uint8_t)(int8_t)((low | high << 4) - 32);
  }
}

static void read_q4_k(const uint8_t *b, int g, struct block_group *out)
{
  const uint8_t *qs = b + 16 + 32 * (g / 2);
  int shift = 4 * (g % 2);
  for (int l = 0; l < 32; l++) out->u[l] = qs[l] >> shift & 15;
  read_six_bit_pair(b + 4, g, out);
}

static void read_q5_k(const uint8_t *b, int g, struct block_group *out)
{
  const uint8_t *qh = b + 16, *qs = b + 48 + 32 * (g / 2);
  int shift = 4 * (g % 2);
  for (int l = 0; l < 32; l++) out->u[l] = (uint8_t)((qs[l] >> shift & 15) | (qh[l] >> g & 1) << 4);
  read_six_bit_pair(b + 4, g, out);
}

static void read_q6_k(const uint8_t *b, int g, struct block_group *out)
{
  int quarter = g % 4;
  const uint8_t *ql = b + 64 * (g / 4) + 32 * (quarter % 2), *qh = b + 128 + 32 * (g / 4);
  int low = 4 * (quarter / 2), high = 2 * quarter;
  for (int l = 0; l < 32; l++) out->u[l] = (uint8_t)((ql[l] >> low & 15) | (qh[l] >> high & 3) << 4);
  out->scale[0] = b[192 + 2 * g];
  out->scale[1] = b[192 + 2 * g + 1];
}

/* Where d and dmin lie in a K block; dmin -1: none. */
static int d_offset(enum sits_dtype t) { return t == SITS_DTYPE_Q2_K ? 80 : t == SITS_DTYPE_Q3_K ? 108 : t == SITS_DTYPE_Q6_K ? 208 : 0; }

static void read_super(enum sits_dtype dtype, const uint8_t *block, int g, struct block_group *out)
{
  switch (dtype) {
  case SITS_DTYPE_Q2_K: read_q2_k(block, g, out); break;
  case SITS_DTYPE_Q3_K: read_q3_k(block, g, out); break;
  case SITS_DTYPE_Q4_K: read_q4_k(block, g, out); break;
  case SITS_DTYPE_Q5_K: read_q5_k(block, g, out); break;
  default: read_q6_k(block, g, out); break;
  }
}

/* ---- writing tiles ----------------------------------------------------------------------------------------------------------------- */

/* Put the integers of one row's group into planes; lane: byte 4 * row of the first vector, stride: bytes of a vector. 4 k at a time. */
static void put_planes(const uint8_t *u, int bits, int shift, uint8_t *lane, size_t stride)
{
  uint32_t word[CPU_VECTORS] = {0};
  uint32_t mask = 0x01010101U * ((1U << bits) - 1);
  int per_byte = 8 / bits;           /* vectors that share a byte */
  int n_out = CPU_VECTORS / per_byte;
  for (int v = 0; v < CPU_VECTORS; v++) {
    uint32_t q = load32(u + 4 * v) >> shift & mask;
    int at = bits == 4 ? v % 4 : v / per_byte, place = bits == 4 ? v / 4 : v % per_byte;
    word[at] |= q << (bits * place);
  }
  for (int v = 0; v < n_out; v++) memcpy(lane + (size_t)v * stride, &word[v], 4);
}

/* Interleave n_words words of a row's block (4-bit and 8-bit planes that need no regrouping). flip is xored in. */
static void put_words(const uint8_t *from, int n_words, uint32_t flip, uint8_t *lane, size_t stride)
{
  for (int v = 0; v < n_words; v++) {
    uint32_t q = load32(from + 4 * v) ^ flip;
    memcpy(lane + (size_t)v * stride, &q, 4);
  }
}

static void pack_row_simple(const struct cpu_weight *w, const uint8_t *row, size_t r, int64_t tile)
{
  const struct cpu_quant_format *f = w->format;
  size_t n = (size_t)w->tile, stride = n * 4, block_bytes = (size_t)sits_dtype_info(w->dtype)->block_bytes;
  int header = f->has_min ? 4 : 2;
  for (int64_t g = 0; g < w->k / CPU_GROUP; g++, row += block_bytes) {
    uint8_t *scales = cpu_weight_header(w, tile, g) + (size_t)(g % w->chunk_groups) * 2 * n;
    uint8_t *lane = cpu_weight_planes(w, tile, g) + 4 * r;
    memcpy(scales + 2 * r, row, 2);
    if (f->has_min) memcpy(scales + 2 * n + 2 * r, row + 2, 2);
    if (f->high_bits) {
      uint8_t u[CPU_GROUP];
      read_five_bits(row + header, row + header + 4, u);
      put_words(row + header + 4, 4, 0, lane, stride);
      put_planes(u, 1, 4, lane + 4 * stride, stride);
    } else if (f->low_bits == 4) {
      put_words(row + header, 4, 0, lane, stride);
    } else {
      put_words(row + header, 8, 0x80808080U, lane, stride); /* two's complement to offset 128 */
    }
  }
}

static void pack_row_super(const struct cpu_weight *w, const uint8_t *row, size_t r, int64_t tile)
{
  const struct cpu_quant_format *f = w->format;
  size_t n = (size_t)w->tile, stride = n * 4, head = 2 * n * (f->has_min ? 2 : 1);
  size_t block_bytes = (size_t)sits_dtype_info(w->dtype)->block_bytes;
  bool has_min_byte = f->has_min && !f->is_nibble_scale;
  size_t half_bytes = n * (has_min_byte ? 2 : 1);
  for (int64_t b = 0; b < w->k / CPU_BLOCK; b++, row += block_bytes) {
    uint8_t *scales = cpu_weight_header(w, tile, b * 8);
    memcpy(scales + 2 * r, row + d_offset(w->dtype), 2);
    if (f->has_min) memcpy(scales + 2 * n + 2 * r, row + d_offset(w->dtype) + 2, 2);
    for (int g = 0; g < 8; g++) {
      struct block_group q;
      uint8_t *lane = cpu_weight_planes(w, tile, b * 8 + g) + 4 * r;
      read_super(w->dtype, row, g, &q);
      for (size_t h = 0; h < f->halves; h++) {
        uint8_t *at = scales + head + ((size_t)g * f->halves + h) * half_bytes + r;
        at[0] = q.scale[h];
        if (has_min_byte) at[n] = q.min[h];
      }
      put_planes(q.u, f->low_bits, 0, lane, stride);
      if (f->high_bits) put_planes(q.u, f->high_bits, f->low_bits, lane + (size_t)f->low_bits * stride, stride);
    }
  }
}

/* 32 elements as in utd.h, element 2i before 2i + 1 in a byte, to GGUF's order, i beside i + 16. */
static void pair_halves(const uint8_t *in, uint8_t *out)
{
  for (int i = 0; i < 8; i++) {
    uint8_t first = in[i], second = in[8 + i];
    out[2 * i] = (uint8_t)((first & 15) | second << 4);
    out[2 * i + 1] = (uint8_t)(first >> 4 | (second & 0xf0));
  }
}

static void pack_row_neutral(const struct cpu_weight *w, const struct sits_utd *u, int64_t row, size_t r, int64_t tile)
{
  const size_t n = (size_t)w->tile, stride = n * 4;
  const bool is_four = u->dtype == SITS_DTYPE_I4;
  const int64_t group = u->quant == SITS_QUANT_GROUP ? u->group_size : w->k;
  const uint8_t *data = sits_utd_row(u, row), *from = sits_utd_row_scales(u, row), *minimums = sits_utd_row_minimums(u, row);
  for (int64_t g = 0; g < w->k / CPU_GROUP; g++) {
    uint8_t *scales = cpu_weight_header(w, tile, g) + (size_t)(g % w->chunk_groups) * 2 * n;
    uint8_t *lane = cpu_weight_planes(w, tile, g) + 4 * r;
    const size_t at = 2 * (size_t)(g * CPU_GROUP / group);
    memcpy(scales + 2 * r, from + at, 2);
    if (minimums) memcpy(scales + 2 * n + 2 * r, minimums + at, 2);
    if (is_four) {
      uint8_t paired[CPU_GROUP / 2];
      pair_halves(data + g * (CPU_GROUP / 2), paired);
      put_words(paired, 4, 0, lane, stride);
    } else {
      put_words(data + g * CPU_GROUP, 8, 0x80808080U, lane, stride);
    }
  }
}

static void pack_row_float(const struct cpu_weight *w, const uint8_t *row, size_t r, uint8_t *tile)
{
  size_t n = (size_t)w->tile;
  if (w->dtype == SITS_DTYPE_F32)
    for (int64_t k = 0; k < w->k; k++) memcpy(tile + ((size_t)k * n + r) * 4, row + (size_t)k * 4, 4);
  else
    for (int64_t k = 0; k < w->k; k++) memcpy(tile + ((size_t)k * n + r) * 2, row + (size_t)k * 2, 2);
}

void cpu_weight_pack(struct cpu_weight *w, const struct sits_utd *source, int64_t r0, int64_t r1)
{
  for (int64_t t = r0 / w->tile; t * w->tile < r1; t++) {
    uint8_t *tile = w->data + (size_t)t * w->tile_bytes;
    int64_t n = w->rows - t * w->tile < w->tile ? w->rows - t * w->tile : w->tile;
    if (n < w->tile) memset(tile, 0, w->tile_bytes); /* rows past the last are zero: scale 0, minimum 0 */
    for (int64_t r = 0; r < n; r++) {
      const uint8_t *row = sits_utd_row(source, t * w->tile + r);
      if (source->quant != SITS_QUANT_NONE) pack_row_neutral(w, source, t * w->tile + r, (size_t)r, t);
      else if (!w->format) pack_row_float(w, row, (size_t)r, tile);
      else if (w->format->is_super) pack_row_super(w, row, (size_t)r, t);
      else pack_row_simple(w, row, (size_t)r, t);
    }
  }
}

/* ---- reading back ------------------------------------------------------------------------------------------------------------------ */

int64_t cpu_weight_rows(const struct cpu_weight *w) { return w->rows; }
int64_t cpu_weight_k(const struct cpu_weight *w) { return w->k; }
size_t cpu_weight_bytes(const struct cpu_weight *w) { return w->n_bytes; }
int32_t cpu_weight_row_tile(const struct cpu_weight *w) { return w->tile; }

void cpu_weight_row(const struct cpu_weight *w, int64_t row, float *out)
{
  int64_t tile = row / w->tile;
  size_t r = (size_t)(row % w->tile);
  if (!w->format) {
    const uint8_t *at = w->data + (size_t)tile * w->tile_bytes;
    size_t n = (size_t)w->tile, bytes = (size_t)float_bytes(w->dtype);
    for (int64_t k = 0; k < w->k; k++) dequant_row(w->dtype, at + ((size_t)k * n + r) * bytes, 1, out + k);
    return;
  }
  for (int64_t g = 0; g < w->k / CPU_GROUP; g++) {
    struct cpu_quant_row q;
    cpu_quant_unpack(w, tile, g, (int32_t)r, &q);
    for (int i = 0; i < CPU_GROUP; i++) {
      int h = w->format->halves == 2 ? i / 16 : 0;
      float v = q.d[h] * (float)((int)q.u[i] - w->format->offset);
      out[g * CPU_GROUP + i] = w->format->has_min ? v + q.m[h] : v;
    }
  }
}
