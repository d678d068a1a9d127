/* Packing weights for the kernels: 4-bit source grids keep their integers, everything else becomes f16. Entry points: cuda_weight_plan,
 * cuda_weight_load, cuda_vector_load.
 *
 *   source type          on the device        value
 *   Q4_0                 K_W4_G32M            scale = d, minimum = -8 d (exact)
 *   Q4_1                 K_W4_G32M            scale = d, minimum = m (exact)
 *   Q4_K                 K_W4_G32M            scale = d * sc, minimum = -dmin * mn (each rounded to f16 once)
 *   I4, groups of 32 n   K_W4_G32M            the group's scale and minimum, -8 scale where there is none (exact)
 *   I4, groups of 128 n  K_W4_G128            the group's scale (exact); without minimums only; a scale a row too
 *   I4, no data          K_W4_G128            random (synthetic models)
 *   others               f16 rows             rounded to f16
 * A weight of several parts is 4-bit only when all its parts are. K_W4_G128 gets channel scales beside it where the scales of each row, all
 * parts included, are 0 to 16 times one number (tensor/row_scale.h; synthetic weights are made so): the packers look at the scales of the
 * rows they pack, until one row is found that is not so. Row tiles are packed by all cores straight from the mapped file into one
 * of two pieces of pinned memory, while the other is on its way to the device.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "backend/cuda/cuda_internal.h"
#include "base/cores.h"
#include "base/mem.h"
#include "tensor/dequant.h"
#include "tensor/row_scale.h"

#define MAX_PACKERS 16

static bool is_four_bit(const struct sits_utd *utd)
{
  switch (utd->dtype) {
  case SITS_DTYPE_Q4_0:
  case SITS_DTYPE_Q4_1: return true;
  case SITS_DTYPE_Q4_K: return utd->dims[1] % 256 == 0;
  case SITS_DTYPE_I4: return utd->data == NULL || utd->dims[1] % 32 == 0;
  default: return false;
  }
}

/* I4 in long symmetric groups: scales of 128 columns, as the faster format wants. */
static bool has_long_groups(const struct sits_utd *utd)
{
  return utd->dtype == SITS_DTYPE_I4 &&
         (utd->data == NULL || (utd->minimums == NULL && (utd->quant == SITS_QUANT_CHANNEL || utd->group_size % K_GROUP == 0)));
}

/* Elements that share a scale, for weights whose scales lie beside their integers. */
static int64_t group_of(const struct sits_utd *utd) { return utd->quant == SITS_QUANT_GROUP ? utd->group_size : utd->dims[1]; }

/* Integers with f16 scales along the rows; what engine files hold. */
static bool is_neutral(const struct sits_utd *utd)
{
  if ((utd->dtype != SITS_DTYPE_I4 && utd->dtype != SITS_DTYPE_I8) || utd->scales == NULL || utd->scale_dtype != SITS_DTYPE_F16)
    return false;
  return utd->quant == SITS_QUANT_CHANNEL || (utd->group_axis == 1 && utd->group_size > 0 && utd->group_size % 32 == 0);
}

static int32_t part_rows(const struct cuda_weight *w, int32_t i) { return (int32_t)w->parts[i].weight->dims[0]; }

enum sits_status cuda_weight_plan(struct cuda_weight *w, struct sits_error *err)
{
  const struct sits_utd *first = w->parts[0].weight;
  bool is_w4 = true, has_long = true;
  w->rows = 0;
  w->cols = (int32_t)first->dims[1];
  for (int32_t i = 0; i < w->n_parts; i++) {
    const struct sits_utd *utd = w->parts[i].weight;
    if (utd->n_dims != 2 || utd->layout != SITS_LAYOUT_ROW_MAJOR || utd->dims[0] > (1 << 26) || utd->dims[1] > (1 << 20))
      return sits_fail(err, SITS_UNSUPPORTED, "cuda: %s: layout or shape not supported", utd->name);
    if (utd->quant != SITS_QUANT_NONE && utd->data != NULL && !is_neutral(utd))
      return sits_fail(err, SITS_UNSUPPORTED, "cuda: %s: I4 and I8 are taken in groups of a multiple of 32 with f16 scales", utd->name);
    if ((utd->data == NULL && utd->dtype != SITS_DTYPE_I4) ||
        (utd->data != NULL && utd->dtype == SITS_DTYPE_I4 && utd->quant == SITS_QUANT_NONE))
      return sits_fail(err, SITS_UNSUPPORTED, "cuda: %s: type %s not supported here", utd->name, sits_dtype_info(utd->dtype)->name);
    has_long = has_long && has_long_groups(utd);
    is_w4 = is_w4 && is_four_bit(utd) && (utd->data == NULL) == (first->data == NULL);
    w->rows += (int32_t)utd->dims[0];
  }
  if (first->data == NULL && !is_w4) return sits_fail(err, SITS_UNSUPPORTED, "cuda: %s: synthetic and real parts mixed", first->name);
  if (w->is_interleaved) w->rows = (part_rows(w, 0) + 7) / 8 * 16;
  w->form = is_w4 ? CUDA_W4 : CUDA_F16;
  w->format = has_long ? K_W4_G128 : K_W4_G32M;
  return SITS_OK;
}

int64_t cuda_weight_bytes(const struct cuda_weight *w)
{
  const int64_t blocks = k_blocks(w->cols);
  return w->form == CUDA_F16 ? w->rows * blocks * K_GROUP * 2 : k_row_tiles(w->rows) * blocks * k_w4_unit_bytes(w->format);
}

/* Source row of a multiplied row: part and row in it; false for padding. */
static bool source_row(const struct cuda_weight *w, int32_t row, const struct sits_utd **utd, int32_t *at)
{
  if (w->is_interleaved) {
    const int32_t part = row % 16 / 8;
    *utd = w->parts[part].weight;
    *at = row / 16 * 8 + row % 8;
    return *at < (*utd)->dims[0];
  }
  for (int32_t i = 0; i < w->n_parts; i++) {
    if (row < part_rows(w, i)) {
      *utd = w->parts[i].weight;
      *at = row;
      return true;
    }
    row -= part_rows(w, i);
  }
  return false;
}

static float load_half(const uint8_t *p)
{
  uint16_t h;
  memcpy(&h, p, 2);
  return half_to_float(h);
}

/* Group g (32 columns) of row `at`: codes 0..15, scale and minimum. */
static void read_group(const struct sits_utd *utd, int32_t at, const uint8_t *row, int32_t g, uint8_t codes[32], float *scale,
                       float *minimum)
{
  if (utd->dtype == SITS_DTYPE_I4) { /* element 2i in the low half of byte i */
    const int64_t s = (int64_t)g * 32 / group_of(utd);
    const uint8_t *scales = sits_utd_row_scales(utd, at), *minimums = sits_utd_row_minimums(utd, at);
    *scale = load_half(scales + 2 * s);
    *minimum = minimums != NULL ? load_half(minimums + 2 * s) : -8.f * *scale;
    for (int32_t i = 0; i < 16; i++) codes[2 * i] = row[g * 16 + i] & 15, codes[2 * i + 1] = row[g * 16 + i] >> 4;
    return;
  }
  if (utd->dtype == SITS_DTYPE_Q4_K) { /* 256 elements: d, dmin, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles */
    const uint8_t *block = row + (size_t)(g / 8) * 144, *s = block + 4, *q = block + 16 + (g % 8) / 2 * 32;
    const int32_t j = g % 8;
    const int32_t sc = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    const int32_t mn = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
    *scale = load_half(block) * (float)sc;
    *minimum = -load_half(block + 2) * (float)mn;
    for (int32_t i = 0; i < 32; i++) codes[i] = g % 2 ? q[i] >> 4 : q[i] & 15;
    return;
  }
  const bool has_min = utd->dtype == SITS_DTYPE_Q4_1;
  const uint8_t *block = row + (size_t)g * (has_min ? 20 : 18), *q = block + (has_min ? 4 : 2);
  *scale = load_half(block);
  *minimum = has_min ? load_half(block + 2) : -8.f * *scale;
  for (int32_t i = 0; i < 16; i++) codes[i] = q[i] & 15, codes[i + 16] = q[i] >> 4;
}

static void put_half(uint8_t *at, float x)
{
  const uint16_t h = float_to_half(x);
  memcpy(at, &h, 2);
}

static void pack_row_w4(const struct cuda_weight *w, uint8_t *tile, int32_t r, const struct sits_utd *utd, int32_t at)
{
  const uint8_t *row = sits_utd_row(utd, at);
  const bool is_long = w->format == K_W4_G128;
  uint8_t codes[32];
  float scale, minimum;
  for (int32_t g = 0; g < w->cols / 32; g++) {
    uint8_t *unit = tile + (size_t)(g / 4) * (size_t)k_w4_unit_bytes(w->format), *scales = unit + K_W4_NIBBLE_BYTES;
    read_group(utd, at, row, g, codes, &scale, &minimum);
    if (is_long)
      put_half(scales + (r & 7) * 4 + (r >> 3) * 2, scale);
    else {
      put_half(scales + (g % 4) * 64 + (r & 7) * 8 + (r >> 3) * 4, scale);
      put_half(scales + (g % 4) * 64 + (r & 7) * 8 + (r >> 3) * 4 + 2, minimum);
    }
    for (int32_t i = 0; i < 32; i += 4) { /* four columns share a word, eight bits apart: one rotation places them all */
      int32_t word, rotate;
      uint32_t bits, q;
      k_w4_place(r, (g % 4) * 32 + i, &word, &rotate);
      memcpy(&q, codes + i, 4);
      memcpy(&bits, unit + word * 4, 4);
      bits |= q << rotate | q >> (32 - rotate); /* by 6 or by 2 */
      memcpy(unit + word * 4, &bits, 4);
    }
  }
}

static void pack_row_f16(const struct cuda_weight *w, uint16_t *out, const struct sits_utd *utd, int32_t at, float *scratch)
{
  const size_t row_bytes = utd->n_bytes / (size_t)utd->dims[0];
  const uint8_t *row = sits_utd_row(utd, at);
  if (utd->dtype == SITS_DTYPE_F16) {
    memcpy(out, row, row_bytes);
    return;
  }
  if (utd->quant != SITS_QUANT_NONE)
    dequant_tensor_row(utd, at, scratch);
  else
    dequant_row(utd->dtype, row, w->cols, scratch);
  for (int32_t c = 0; c < w->cols; c++) {
    const float x = scratch[c] > 65504.f ? 65504.f : scratch[c] < -65504.f ? -65504.f : scratch[c];
    out[c] = float_to_half(x);
  }
}

/* Channel scales on the host, noted row by row by all packers; what holds of every row so far (enum row_scale_kind). Rows of padding,
 * whose scales are zero, have 1: kernels divide by it. */
struct channel_scan { float *channel; _Atomic int kind; };

static bool scan_init(struct channel_scan *scan, const struct cuda_weight *w)
{
  const bool has_scan = w->form == CUDA_W4 && w->format == K_W4_G128;
  const int32_t n = has_scan ? k_row_tiles(w->rows) * 16 : 0;
  scan->channel = mem_alloc((size_t)n * sizeof *scan->channel + 1);
  atomic_init(&scan->kind, has_scan ? ROW_SCALE_POWERS : ROW_SCALE_FREE);
  for (int32_t i = 0; scan->channel != NULL && i < n; i++) scan->channel[i] = 1.f;
  return scan->channel != NULL;
}

static void scan_row(struct channel_scan *scan, int32_t row, const struct sits_utd *utd, int32_t at)
{
  int known = atomic_load(&scan->kind);
  if (known == ROW_SCALE_FREE) return;
  const int64_t group = group_of(utd);
  const int kind = (int)row_scale_find(sits_utd_row_scales(utd, at), (utd->dims[1] + group - 1) / group, &scan->channel[row]);
  while (kind < known && !atomic_compare_exchange_weak(&scan->kind, &known, kind)) {}
}

struct pack_job {
  const struct cuda_weight *w;
  struct channel_scan *scan;
  uint8_t *out;                     /* of the first tile */
  int32_t first, end;               /* row tiles */
  _Atomic int32_t next;
  _Atomic bool is_starved;
};

static int64_t tile_bytes_of(const struct cuda_weight *w)
{
  return (int64_t)k_blocks(w->cols) * (w->form == CUDA_W4 ? k_w4_unit_bytes(w->format) : 16 * K_GROUP * 2);
}

static void *pack_worker(void *arg)
{
  struct pack_job *job = arg;
  const struct cuda_weight *w = job->w;
  float *scratch = mem_alloc((size_t)w->cols * sizeof *scratch);
  if (scratch == NULL) {
    atomic_store(&job->is_starved, true);
    return NULL;
  }
  const int64_t tile_bytes = tile_bytes_of(w), row_bytes = (int64_t)k_blocks(w->cols) * K_GROUP * 2;
  for (int32_t t = atomic_fetch_add(&job->next, 1); t < job->end; t = atomic_fetch_add(&job->next, 1)) {
    uint8_t *tile = job->out + (t - job->first) * tile_bytes;
    const int32_t n_rows = w->form == CUDA_W4 || w->rows - t * 16 >= 16 ? 16 : w->rows - t * 16; /* f16 rows are not padded to tiles */
    memset(tile, 0, (size_t)(w->form == CUDA_W4 ? tile_bytes : n_rows * row_bytes));
    for (int32_t r = 0; r < n_rows; r++) {
      const struct sits_utd *utd;
      int32_t at;
      if (t * 16 + r >= w->rows || !source_row(w, t * 16 + r, &utd, &at)) continue;
      if (w->form == CUDA_W4) {
        pack_row_w4(w, tile, r, utd, at);
        scan_row(job->scan, t * 16 + r, utd, at);
      } else
        pack_row_f16(w, (uint16_t *)(tile + r * row_bytes), utd, at, scratch);
    }
  }
  mem_free(scratch);
  return NULL;
}

/* Row tiles first .. end - 1 into out. */
static enum sits_status pack(const struct cuda_weight *w, int32_t first, int32_t end, uint8_t *out, struct channel_scan *scan)
{
  struct pack_job job = {.w = w, .scan = scan, .out = out, .first = first, .end = end, .next = first};
  pthread_t threads[MAX_PACKERS];
  int32_t n = 0;
  const int32_t cores = cores_usable();
  while (n < MAX_PACKERS && n < cores - 1 && n < end - first - 1 && pthread_create(&threads[n], NULL, pack_worker, &job) == 0) n++;
  pack_worker(&job);
  for (int32_t i = 0; i < n; i++) pthread_join(threads[i], NULL);
  return atomic_load(&job.is_starved) ? SITS_NOMEM : SITS_OK;
}

static enum sits_status load_bias(struct backend *backend, const void *owner, struct cuda_weight *w, struct sits_error *err)
{
  bool has_bias = false;
  for (int32_t i = 0; i < w->n_parts; i++) has_bias = has_bias || w->parts[i].bias != NULL;
  if (!has_bias) return SITS_OK;
  if (w->is_interleaved) return sits_fail(err, SITS_UNSUPPORTED, "cuda: %s: bias not supported here", w->parts[0].weight->name);
  float *host = mem_calloc((size_t)w->rows, sizeof *host);
  w->bias = cuda_memory_alloc(backend, owner, (size_t)w->rows * sizeof *host);
  if (host == NULL || w->bias == NULL) {
    mem_free(host);
    return sits_fail(err, SITS_NOMEM, "cuda: out of memory for a bias");
  }
  for (int32_t i = 0, at = 0; i < w->n_parts; at += part_rows(w, i++))
    if (w->parts[i].bias != NULL) dequant_row(w->parts[i].bias->dtype, w->parts[i].bias->data, part_rows(w, i), host + at);
  const enum sits_status status = CUDA_CALL(backend, cudaMemcpy(w->bias, host, (size_t)w->rows * sizeof *host, cudaMemcpyHostToDevice));
  mem_free(host);
  return status;
}

enum sits_status cuda_stage_init(struct backend *backend, struct cuda_stage *stage)
{
  *stage = (struct cuda_stage){0};
  for (int32_t i = 0; i < 2; i++) {
    if ((stage->host[i] = cuda_pinned_alloc(backend, stage, CUDA_STAGE_BYTES)) == NULL) return SITS_NOMEM;
    const enum sits_status status = CUDA_CALL(backend, cudaEventCreateWithFlags(&stage->copied[i], cudaEventDisableTiming));
    if (status != SITS_OK) return status;
  }
  return SITS_OK;
}

void cuda_stage_fini(struct backend *backend, struct cuda_stage *stage)
{
  (void)cudaStreamSynchronize(backend->stream);
  for (int32_t i = 0; i < 2; i++)
    if (stage->copied[i]) (void)cudaEventDestroy(stage->copied[i]);
  cuda_memory_free_owner(backend, stage);
}

/* Piece by piece: wait until a piece's last copy has ended, pack into it, start its copy. */
static enum sits_status upload(struct backend *backend, const struct cuda_weight *w, struct cuda_stage *stage, struct channel_scan *scan)
{
  const int64_t tile_bytes = tile_bytes_of(w), total = cuda_weight_bytes(w);
  const int32_t n_tiles = k_row_tiles(w->rows), step = (int32_t)(CUDA_STAGE_BYTES / tile_bytes);
  if (step < 1) return SITS_UNSUPPORTED; /* rows of more than two million columns */
  for (int32_t t = 0; t < n_tiles; t += step) {
    const int32_t end = n_tiles - t < step ? n_tiles : t + step, i = stage->next;
    const int64_t from = t * tile_bytes, to = end * tile_bytes < total ? end * tile_bytes : total;
    stage->next = !i;
    enum sits_status status = CUDA_CALL(backend, cudaEventSynchronize(stage->copied[i]));
    if (status == SITS_OK) status = pack(w, t, end, stage->host[i], scan);
    if (status == SITS_OK)
      status = CUDA_CALL(backend, cudaMemcpyAsync((uint8_t *)w->data + from, stage->host[i], (size_t)(to - from), cudaMemcpyHostToDevice,
                                                  backend->stream));
    if (status == SITS_OK) status = CUDA_CALL(backend, cudaEventRecord(stage->copied[i], backend->stream));
    if (status != SITS_OK) return status;
  }
  return SITS_OK;
}

/* What the packers found, where it held of all rows. */
static enum sits_status load_channel(struct backend *backend, const void *owner, struct cuda_weight *w, const struct channel_scan *scan)
{
  const int kind = atomic_load(&scan->kind);
  const size_t bytes = (size_t)k_row_tiles(w->rows) * 16 * sizeof *w->channel;
  if (kind == ROW_SCALE_FREE) return SITS_OK;
  w->channel = cuda_memory_alloc(backend, owner, bytes);
  if (w->channel == NULL) return SITS_NOMEM;
  w->has_powers = kind == ROW_SCALE_POWERS;
  return CUDA_CALL(backend, cudaMemcpy(w->channel, scan->channel, bytes, cudaMemcpyHostToDevice));
}

enum sits_status cuda_weight_load(struct backend *backend, const void *owner, struct cuda_weight *w, struct cuda_stage *stage,
                                  uint32_t seed, struct sits_error *err)
{
  const size_t bytes = (size_t)cuda_weight_bytes(w);
  w->data = cuda_memory_alloc(backend, owner, bytes);
  if (w->data == NULL) return sits_fail(err, SITS_NOMEM, "cuda: %s: %zu bytes do not fit the device", w->parts[0].weight->name, bytes);
  if (w->parts[0].weight->data == NULL) {
    w->channel = cuda_memory_alloc(backend, owner, (size_t)k_row_tiles(w->rows) * 16 * sizeof *w->channel);
    if (w->channel == NULL) return sits_fail(err, SITS_NOMEM, "cuda: out of device memory");
    w->has_powers = true;
    /* Nibbles are uniform in -8..7 (mean square 21.5), multipliers 1 or 2 (2.5), channels 1..1.5 (1.6): rows of about unit norm. */
    const struct k_fill_w4 fill = {w->data, w->format, w->rows, w->cols, 1.f / sqrtf(21.5f * 2.5f * 1.6f * (float)w->cols),
                                   seed,    w->channel};
    return CUDA_CALL(backend, sits_k_fill_w4(&fill, (struct k_stream){(struct CUstream_st *)backend->stream, false}));
  }
  struct channel_scan scan;
  enum sits_status status = scan_init(&scan, w) ? upload(backend, w, stage, &scan) : SITS_NOMEM;
  if (status == SITS_OK) status = load_channel(backend, owner, w, &scan);
  mem_free(scan.channel);
  if (status != SITS_OK) return sits_fail(err, status, "cuda: %s: upload failed", w->parts[0].weight->name);
  return load_bias(backend, owner, w, err);
}

enum sits_status cuda_vector_load(struct backend *backend, const void *owner, const struct sits_utd *utd, float **out,
                                  struct sits_error *err)
{
  *out = NULL;
  if (utd == NULL) return SITS_OK;
  const int64_t n = sits_utd_elements(utd);
  float *host = mem_alloc((size_t)n * sizeof *host), *device = cuda_memory_alloc(backend, owner, (size_t)n * sizeof *host);
  if (host == NULL || device == NULL) {
    mem_free(host);
    return sits_fail(err, SITS_NOMEM, "cuda: %s: out of memory", utd->name);
  }
  if (utd->data != NULL)
    dequant_row(utd->dtype, utd->data, n, host);
  else
    for (int64_t i = 0; i < n; i++) host[i] = 1.f;
  const enum sits_status status = CUDA_CALL(backend, cudaMemcpy(device, host, (size_t)n * sizeof *host, cudaMemcpyHostToDevice));
  mem_free(host);
  if (status == SITS_OK) *out = device;
  return status;
}
