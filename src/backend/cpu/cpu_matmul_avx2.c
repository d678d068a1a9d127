/* Matrix multiply for AVX2 without VNNI: 8 rows to a vector, vpmaddubsw for 8 rows x 4 k of a token into 16-bit sums.
 *
 * Integers of at most 4 bits let all 8 products of a group be added in 16 bits before one vpmaddwd widens them (8 * 2 * 15 * 127 =
 * 30480); 5 bits allow 4, 6 bits 2. Eight-bit weights would overflow in vpmaddubsw itself, so they are taken as magnitude and sign: |w|
 * times a with w's sign, two products at most 2 * 128 * 127 = 32512. Batches of up to 4 tokens unpack each group into a record on the
 * stack; larger ones unpack a panel of 8 rows into scratch and run tiles of 4 tokens over it. Same sums in the same order as the other
 * levels.
 */
#include "backend/cpu/cpu_quant.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#include <string.h>

#include "backend/cpu/cpu_matmul_avx2.h"

#define INLINE static inline __attribute__((always_inline))
#define PREFETCH_BYTES 2048
#define W 8                         /* rows of a tile */
#define PANEL_GROUPS 64
#define TILE_TOKENS 4

/* A group of a row tile as the dot products want it; also the panel's record. */
struct group {
  __m256i w[CPU_VECTORS];           /* unsigned; of 8-bit types magnitudes */
  __m256i n[2];                     /* i16 pairs [sum of u, offset] of each half; 8-bit types: [sum of w, 0] */
  __m256 d[2], m[2];
  __m256i sign[CPU_VECTORS];        /* 8-bit types: w with its sign. Last, so that other panels leave it out */
};
#define GROUP_BYTES (low == 8 ? sizeof(struct group) : offsetof(struct group, sign))

INLINE __m256i shift(__m256i x, int bits) { return bits > 0 ? _mm256_srli_epi16(x, bits) : bits < 0 ? _mm256_slli_epi16(x, -bits) : x; }

INLINE __m256i load(const uint8_t *at) { return _mm256_loadu_si256((const __m256i *)at); }

INLINE void unpack_planes(int low, int high, const uint8_t *plane, struct group *out)
{
  const uint8_t *top = plane + 32 * low;
  __m256i w[CPU_VECTORS];
  for (int v = 0; v < 8; v++) {
    if (low == 4) w[v] = _mm256_and_si256(shift(load(plane + 32 * (v % 4)), 4 * (v / 4)), _mm256_set1_epi8(15));
    if (low == 2) w[v] = _mm256_and_si256(shift(load(plane + 32 * (v / 4)), 2 * (v % 4)), _mm256_set1_epi8(3));
    if (low == 8) w[v] = _mm256_xor_si256(load(plane + 32 * v), _mm256_set1_epi8(-128));
    if (high == 1) w[v] = _mm256_or_si256(w[v], _mm256_and_si256(shift(load(top), v - low), _mm256_set1_epi8((char)(1 << low))));
    if (high == 2) {
      __m256i bits = shift(load(top + 32 * (v / 4)), 2 * (v % 4) - low);
      w[v] = _mm256_or_si256(w[v], _mm256_and_si256(bits, _mm256_set1_epi8((char)(3 << low))));
    }
    if (low == 8) out->sign[v] = w[v];
    out->w[v] = low == 8 ? _mm256_abs_epi8(w[v]) : w[v];
  }
}

/* Row sums of u next to the offset. */
INLINE void row_sums(int low, int high, int halves, int offset, struct group *q)
{
  const __m256i ones = _mm256_set1_epi8(1), ones16 = _mm256_set1_epi16(1);
  if (low == 8) {
    __m256i sum = _mm256_setzero_si256();
    for (int v = 0; v < 8; v++) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(ones, q->sign[v]));
    q->n[0] = _mm256_and_si256(_mm256_madd_epi16(sum, ones16), _mm256_set1_epi32(0xffff));
    return;
  }
  for (int h = 0; h < halves; h++) {
    const __m256i *w = q->w + 4 * h;
    __m256i bytes = _mm256_add_epi8(_mm256_add_epi8(w[0], w[1]), _mm256_add_epi8(w[2], w[3])); /* at most 8 * 31 or 4 * 63 */
    if (halves == 1) bytes = _mm256_add_epi8(bytes, _mm256_add_epi8(_mm256_add_epi8(w[4], w[5]), _mm256_add_epi8(w[6], w[7])));
    q->n[h] = _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(bytes, ones), ones16), _mm256_set1_epi32(offset << 16));
  }
}

INLINE __m256 load_half(const uint8_t *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }

INLINE void unpack_scales(CPU_FORMAT_PARAMS, const uint8_t *header, int j, struct group *out)
{
  if (!super) {
    out->d[0] = load_half(header + j * 2 * W);
    if (mins) out->m[0] = load_half(header + 2 * W);
    return;
  }
  const int has_min_byte = mins && !nibble;
  const uint8_t *sc = header + 2 * W * (1 + mins) + j * halves * CPU_HALF_BYTES;
  __m256 d = load_half(header), dmin = mins ? load_half(header + 2 * W) : _mm256_setzero_ps();
  for (int h = 0; h < halves; h++, sc += CPU_HALF_BYTES) {
    __m128i s = _mm_loadl_epi64((const __m128i *)sc), low_nibble = _mm_set1_epi8(15);
    __m128i min = has_min_byte ? _mm_loadl_epi64((const __m128i *)(sc + W)) : _mm_and_si128(_mm_srli_epi16(s, 4), low_nibble);
    if (nibble) s = _mm_and_si128(s, low_nibble);
    out->d[h] = _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(s)));
    if (mins) out->m[h] = _mm256_xor_ps(_mm256_mul_ps(dmin, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(min))), _mm256_set1_ps(-0.0F));
  }
}

INLINE void unpack(CPU_FORMAT_PARAMS, const uint8_t *chunk, int j, struct group *out)
{
  unpack_planes(low, high, chunk + CPU_HEADER_BYTES + j * CPU_PLANE_BYTES, out);
  row_sums(low, high, halves, offset, out);
  unpack_scales(CPU_FORMAT_ARGS, chunk, j, out);
}

INLINE __m256i broadcast32(const uint8_t *at)
{
  int32_t v;
  memcpy(&v, at, 4);
  return _mm256_set1_epi32(v);
}
INLINE __m256 broadcast_ps(const uint8_t *at)
{
  float v;
  memcpy(&v, at, 4);
  return _mm256_set1_ps(v);
}

/* Vectors first..last of a group times nt tokens, added to dot; fit: how many products fit 16 bits. */
INLINE void dots(int low, int high, int first, int last, int nt, const struct group *q, const uint8_t *rec, __m256i *dot)
{
  const int bits = low + high, fit = bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1, batch = fit < last - first ? fit : last - first;
  const __m256i ones16 = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int v = first; v < last; v += batch) {
    __m256i sum[TILE_TOKENS];
#pragma GCC unroll 8
    for (int i = v; i < v + batch; i++)
      for (int t = 0; t < nt; t++) {
        __m256i a = broadcast32(rec + 32 * t + 4 * i);
        __m256i p = _mm256_maddubs_epi16(q->w[i], low == 8 ? _mm256_sign_epi8(a, q->sign[i]) : a);
        sum[t] = i == v ? p : _mm256_add_epi16(sum[t], p);
        __asm__("" : "+x"(sum[t])); /* keep the order: a tree of these sums spills half the registers */
      }
    for (int t = 0; t < nt; t++) dot[t] = _mm256_add_epi32(dot[t], _mm256_madd_epi16(sum[t], ones16));
  }
}

/* One group of a row tile times nt tokens of one act tile of n (records at rec and second). */
INLINE void add_group(CPU_FORMAT_PARAMS, int n, int nt, const struct group *q, const uint8_t *rec, const uint8_t *second, __m256 *y)
{
  for (int h = 0; h < halves; h++) {
    __m256i dot[TILE_TOKENS];
    for (int t = 0; t < nt; t++) {
      const uint8_t *pair = halves == 1 ? rec + 36 * n + 4 * t : second + 4 * n * h + 4 * t;
      dot[t] = _mm256_madd_epi16(q->n[h], broadcast32(pair));
    }
    dots(low, high, 8 / halves * h, 8 / halves * (h + 1), nt, q, rec, dot);
    for (int t = 0; t < nt; t++) {
      const uint8_t *x = halves == 1 ? rec + 40 * n + 4 * t : second + 8 * n + 4 * n * h + 4 * t;
      y[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[t]), _mm256_mul_ps(q->d[h], broadcast_ps(rec + 32 * n + 4 * t)), y[t]);
      if (mins) y[t] = _mm256_fmadd_ps(q->m[h], broadcast_ps(x), y[t]);
    }
  }
}

static inline __m256i row_mask(int64_t n)
{
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n > W ? W : (int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* One row tile times n = 1, 2 or 4 tokens. */
INLINE void direct(CPU_FORMAT_PARAMS, int n, const struct cpu_weight *w, const uint8_t *tile, const uint8_t *act, int32_t n_tokens,
                   float *y, int64_t ldy, __m256i mask)
{
  const int64_t groups = w->k / CPU_GROUP;
  const uint8_t *chunk = tile, *rec = act, *second = act + groups * CPU_RECORD_BYTES * n;
  __m256 sum[TILE_TOKENS];
  for (int t = 0; t < n; t++) sum[t] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; g += CPU_CHUNK_GROUPS, chunk += CPU_CHUNK_BYTES) {
    for (int i = 0; w->prefetches && i < CPU_CHUNK_BYTES; i += 64) _mm_prefetch((const char *)chunk + PREFETCH_BYTES + i, _MM_HINT_T0);
    for (int j = 0; j < CPU_CHUNK_GROUPS && g + j < groups; j++, rec += CPU_RECORD_BYTES * n, second += CPU_SECOND_BYTES * n) {
      struct group q;
      unpack(CPU_FORMAT_ARGS, chunk, j, &q);
      add_group(CPU_FORMAT_ARGS, n, n, &q, rec, second, sum);
    }
  }
  for (int t = 0; t < n; t++)
    if (t < n_tokens) _mm256_maskstore_ps(y + t * ldy, mask, sum[t]);
}

/* All tokens over a panel of groups g0..g1; sums are taken up from y where g0 > 0. */
INLINE void panel_run(CPU_FORMAT_PARAMS, const struct cpu_weight *w, const uint8_t *panel, int64_t g0, int64_t g1, const uint8_t *act,
                      int32_t n_tokens, float *y, int64_t ldy, __m256i mask)
{
  const size_t act_tile = cpu_act_tile_bytes_q8(w->k, 4);
  for (int32_t t0 = 0; t0 < n_tokens; t0 += TILE_TOKENS, act += act_tile) {
    const uint8_t *rec = act + g0 * 4 * CPU_RECORD_BYTES, *at = panel;
    const uint8_t *second = act + w->k / CPU_GROUP * 4 * CPU_RECORD_BYTES + g0 * 4 * CPU_SECOND_BYTES;
    __m256 sum[TILE_TOKENS];
    for (int t = 0; t < TILE_TOKENS; t++)
      sum[t] = g0 > 0 && t0 + t < n_tokens ? _mm256_maskload_ps(y + (t0 + t) * ldy, mask) : _mm256_setzero_ps();
    for (int64_t g = g0; g < g1; g++, rec += 4 * CPU_RECORD_BYTES, second += 4 * CPU_SECOND_BYTES, at += GROUP_BYTES)
      add_group(CPU_FORMAT_ARGS, 4, TILE_TOKENS, (const struct group *)at, rec, second, sum);
    for (int t = 0; t < TILE_TOKENS; t++)
      if (t0 + t < n_tokens) _mm256_maskstore_ps(y + (t0 + t) * ldy, mask, sum[t]);
  }
}

INLINE void rows_of(CPU_FORMAT_PARAMS, const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y,
                    int64_t ldy, uint8_t *scratch)
{
  _Static_assert(PANEL_GROUPS * sizeof(struct group) <= CPU_MATMUL_SCRATCH_BYTES, "a panel fits the scratch");
  const uint8_t *tile = w->data + (size_t)(r0 / W) * w->tile_bytes;
  const int64_t groups = w->k / CPU_GROUP;
  for (int64_t r = r0; r < r1; r += W, tile += w->tile_bytes) {
    __m256i mask = row_mask(r1 - r);
    if (n_tokens == 1) direct(CPU_FORMAT_ARGS, 1, w, tile, act, n_tokens, y + r, ldy, mask);
    else if (n_tokens == 2) direct(CPU_FORMAT_ARGS, 2, w, tile, act, n_tokens, y + r, ldy, mask);
    else if (n_tokens <= 4) direct(CPU_FORMAT_ARGS, 4, w, tile, act, n_tokens, y + r, ldy, mask);
    else
      for (int64_t g = 0, end; g < groups; g = end) {
        uint8_t *at = scratch;
        end = groups - g < PANEL_GROUPS ? groups : g + PANEL_GROUPS;
        for (int64_t i = g; i < end; i++, at += GROUP_BYTES)
          unpack(CPU_FORMAT_ARGS, tile + i / CPU_CHUNK_GROUPS * CPU_CHUNK_BYTES, (int)(i % CPU_CHUNK_GROUPS), (struct group *)at);
        panel_run(CPU_FORMAT_ARGS, w, scratch, g, end, act, n_tokens, y + r, ldy, mask);
      }
  }
}

#define FORMAT_KERNEL(name, ...) \
  static void matmul_##name(const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y, \
                            int64_t ldy, uint8_t *scratch) \
  { \
    rows_of(__VA_ARGS__, w, act, n_tokens, r0, r1, y, ldy, scratch); \
  }
CPU_FORMAT_MAP(FORMAT_KERNEL)

static void matmul_avx2(const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y, int64_t ldy,
                        uint8_t *scratch)
{
  switch (w->dtype) {
#define CASE(name, ...) \
  case SITS_DTYPE_##name: matmul_##name(w, act, n_tokens, r0, r1, y, ldy, scratch); break;
    CPU_FORMAT_MAP(CASE)
#undef CASE
  default: cpu_matmul_float_avx2(w, act, n_tokens, r0, r1, y, ldy); break;
  }
}

const struct cpu_matmul_ops *cpu_matmul_ops_avx2(void)
{
  static const struct cpu_matmul_ops ops = {.tile = W, .quantize = cpu_quantize_avx2, .matmul = matmul_avx2};
  return &ops;
}

#else
const struct cpu_matmul_ops *cpu_matmul_ops_avx2(void) { return NULL; }
#endif
