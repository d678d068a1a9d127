/* Matrix multiply for AVX-512 with VNNI: 16 rows to a vector, one vpdpbusd for 16 rows x 4 k of a token.
 *
 * Up to MOST_DIRECT tokens (decode, small batches), 8 at a time: each of the group's 8 vectors of unsigned integers is unpacked from the
 * packed weight where it is used, for all of them; with few tokens the weight is read once and memory is the limit. More tokens
 * (prefill): a panel of 16 rows x up to PANEL_GROUPS groups is unpacked once into scratch, bytes and f32 scales, and every tile of 12
 * tokens runs over it: 12 integer and 12 f32 accumulators, one vector of weights, broadcasts from memory. A group costs 8 vpdpbusd, one
 * vpmaddwd for zero point and offset, a conversion, a product and one or two FMAs per token. Where K is longer than a panel, the f32 sums
 * pass through y, which changes no bit.
 */
#include "backend/cpu/cpu_quant.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <float.h>
#include <immintrin.h>
#include <string.h>

#include "backend/cpu/cpu_matmul_avx512.h"

#define INLINE static inline __attribute__((always_inline))
#define W 16                        /* rows of a tile */
#define PANEL_GROUPS 64
#define PANEL_TOKENS 12
#define DIRECT_TOKENS 8             /* most tokens at a time without a panel */
#define MOST_DIRECT (low == 8 ? 24 : 48) /* largest batch without a panel; row sums cost bytes more than nibbles */

#define PREFETCH_BYTES 2048
#define PREFETCH_FROM 6             /* tokens; with fewer, loads run far enough ahead by themselves, but on Intel (w->prefetches): */
#define PREFETCH_FAR 8192           /* there into L2, for what may be in flight to L1 alone does not fill the memory's latency, */
#define PREFETCH_NEAR 4096          /* and from there into L1 */

enum { FAR = 1, GFNI = 2 };         /* what a processor is given, a constant in each kernel: w->prefetches, w->has_gfni */

struct scales { __m512 d[2], m[2]; };  /* of each half */

/* (x >> bits) for 0..7 and (x << -bits) for negative: bits cross bytes, the caller masks. */
INLINE __m512i shift(__m512i x, int bits)
{
  return bits > 0 ? _mm512_srli_epi16(x, (unsigned)bits) : bits < 0 ? _mm512_slli_epi16(x, (unsigned)-bits) : x;
}

/* The upper four bits of each byte, shifted and masked by one instruction, which multiplies a byte's bits by a matrix. In assembly, for the
 * compiler is not to assume it everywhere. */
INLINE __m512i high_nibbles(__m512i x)
{
  const __m512i matrix = _mm512_set1_epi64(0x1020408000000000);
  __m512i u;
  __asm__("vgf2p8affineqb $0, %1, %2, %0" : "=v"(u) : "v"(matrix), "v"(x));
  return u;
}

/* Vector v of a group's integers. */
INLINE __m512i vector_of(int low, int high, int given, const uint8_t *plane, int v)
{
  const uint8_t *top = plane + 64 * low;
  const __m512i planes = _mm512_loadu_si512(plane + 64 * (low == 8 ? v : low == 4 ? v % 4 : v / 4));
  __m512i u = planes;
  if (low == 4 && v >= 4 && (given & GFNI)) u = high_nibbles(planes);
  else if (low == 4) u = _mm512_and_si512(shift(planes, v / 4 * 4), _mm512_set1_epi8(15));
  if (low == 2) u = _mm512_and_si512(shift(planes, 2 * (v % 4)), _mm512_set1_epi8(3));
  if (high == 0) return u;
  const __m512i bits = shift(_mm512_loadu_si512(high == 1 ? top : top + 64 * (v / 4)), high == 1 ? v - low : 2 * (v % 4) - low);
  const __m512i mask = _mm512_set1_epi8((char)((high == 1 ? 1 : 3) << low));
  return _mm512_ternarylogic_epi32(u, bits, mask, 0xf8); /* u | (bits & mask) */
}

/* Sums of u over a row's half or whole group: begun, one vector more, and ended next to the offset. Up to 252 the bytes are added first. */
INLINE __m512i sums_begin(int bits, int offset) { return bits == 8 ? _mm512_set1_epi32(offset << 16) : _mm512_setzero_si512(); }
INLINE __m512i sums_add(int bits, __m512i sums, __m512i u)
{
  return bits == 8 ? _mm512_dpbusd_epi32(sums, u, _mm512_set1_epi8(1)) : _mm512_add_epi8(sums, u);
}
INLINE __m512i sums_end(int bits, int offset, __m512i sums)
{
  return bits == 8 ? sums : _mm512_dpbusd_epi32(_mm512_set1_epi32(offset << 16), sums, _mm512_set1_epi8(1));
}

INLINE __m512 load_half(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

INLINE __m512 bytes_to_ps(__m128i bytes, int is_signed)
{
  return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}

/* Scales of group j of a chunk. */
INLINE void unpack_scales(CPU_FORMAT_PARAMS, const uint8_t *header, int j, struct scales *out)
{
  if (!super) {
    out->d[0] = load_half(header + j * 2 * W);
    if (mins) out->m[0] = load_half(header + 2 * W);
    return;
  }
  const int has_min_byte = mins && !nibble;
  const uint8_t *sc = header + 2 * W * (1 + mins) + j * halves * CPU_HALF_BYTES;
  __m512 d = load_half(header), dmin = mins ? load_half(header + 2 * W) : _mm512_setzero_ps();
  for (int h = 0; h < halves; h++, sc += CPU_HALF_BYTES) {
    __m128i s = _mm_loadu_si128((const __m128i *)sc), low_nibble = _mm_set1_epi8(15);
    __m128i min = has_min_byte ? _mm_loadu_si128((const __m128i *)(sc + W)) : _mm_and_si128(_mm_srli_epi16(s, 4), low_nibble);
    if (nibble) s = _mm_and_si128(s, low_nibble);
    out->d[h] = _mm512_mul_ps(d, bytes_to_ps(s, 1));
    if (mins) out->m[h] = _mm512_xor_ps(_mm512_mul_ps(dmin, bytes_to_ps(min, 0)), _mm512_set1_ps(-0.0F));
  }
}

INLINE __m512i broadcast32(const uint8_t *at)
{
  int32_t v;
  memcpy(&v, at, 4);
  return _mm512_set1_epi32(v);
}
INLINE __m512 broadcast_ps(const uint8_t *at)
{
  float v;
  memcpy(&v, at, 4);
  return _mm512_set1_ps(v);
}

/* acc + u . the four bytes at `at`, for 16 rows. In assembly for the broadcast inside the instruction, which the compiler does not form:
 * it saves a register and an instruction for each product. */
INLINE __m512i dot4(__m512i acc, __m512i u, const uint8_t *at)
{
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(u), "m"(*(const int32_t *)at));
  return acc;
}

/* acc + n . the pair of 16-bit integers at `at`. */
INLINE __m512i dot2(__m512i acc, __m512i n, const uint8_t *at)
{
  __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(n), "m"(*(const int32_t *)at));
  return acc;
}

INLINE __mmask16 row_mask(int64_t n) { return n >= W ? 0xffff : (__mmask16)((1U << n) - 1); }

/* Where the records of a group begin, of the act tile that holds token t of `direct`. */
struct records { const uint8_t *rec[2], *second[2]; };

/* Group j of a chunk times nt tokens of act tiles of n. Each vector is unpacked where it is used and the row sums come last, so that
 * nothing waits for all of the unpacking; the tokens' dot products go side by side, and those of a lone token in two chains, for a chain of
 * eight waits for itself. */
INLINE void add_group(CPU_FORMAT_PARAMS, int given, const uint8_t *chunk, int j, const struct records *at, int n, int nt, __m512 *y)
{
  const uint8_t *plane = chunk + CPU_HEADER_BYTES + j * CPU_PLANE_BYTES;
  const int bits = low + high;
  struct scales q;
  unpack_scales(CPU_FORMAT_ARGS, chunk, j, &q);
  for (int h = 0; h < halves; h++) {
    __m512i dot[DIRECT_TOKENS], other = _mm512_setzero_si512(), sums = sums_begin(bits, offset);
    for (int t = 0; t < nt; t++) dot[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 8 / halves; i++) {
      const int v = halves == 1 ? i / 2 + i % 2 * 4 : 4 * h + i; /* both nibbles of a vector together */
      const __m512i u = vector_of(low, high, given, plane, v);
      sums = sums_add(bits, sums, u);
#pragma GCC unroll 8
      for (int t = 0; t < nt; t++) {
        __m512i *acc = nt == 1 && i % 2 == 1 ? &other : &dot[t];
        *acc = dot4(*acc, u, at->rec[t / 4] + 32 * (t % 4) + 4 * v);
      }
    }
    if (nt == 1) dot[0] = _mm512_add_epi32(dot[0], other);
    sums = sums_end(bits, offset, sums);
    for (int t = 0; t < nt; t++) {
      const uint8_t *pairs = halves == 1 ? at->rec[t / 4] + 36 * n : at->second[t / 4] + 4 * n * h;
      const __m512 bracket = _mm512_cvtepi32_ps(dot2(dot[t], sums, pairs + 4 * (t % 4)));
      y[t] = _mm512_fmadd_ps(bracket, _mm512_mul_ps(q.d[h], broadcast_ps(at->rec[t / 4] + 32 * n + 4 * (t % 4))), y[t]);
      if (!mins) continue;
      const uint8_t *x = halves == 1 ? at->rec[t / 4] + 40 * n : at->second[t / 4] + 8 * n + 4 * n * h;
      y[t] = _mm512_fmadd_ps(q.m[h], broadcast_ps(x + 4 * (t % 4)), y[t]);
    }
  }
}

/* The line that is to come into L1 next, and where far prefetches pay one further on into L2, at distances the instructions hold. */
INLINE void prefetch(int given, const char *at)
{
  if (given & FAR) _mm_prefetch(at + PREFETCH_FAR, _MM_HINT_T1);
  _mm_prefetch(at + (given & FAR ? PREFETCH_NEAR : PREFETCH_BYTES), _MM_HINT_T0);
}

/* One row tile times nt = 1 .. 8 tokens, those of the act tiles (n tokens each) from `act` on; n_tokens of them are real. */
INLINE void direct(CPU_FORMAT_PARAMS, int given, int n, int nt, const struct cpu_weight *w, const uint8_t *tile, const uint8_t *act,
                   int32_t n_tokens, float *y, int64_t ldy, __mmask16 mask)
{
  const int64_t groups = w->k / CPU_GROUP;
  const size_t act_tile = nt > 4 ? cpu_act_tile_bytes_q8(w->k, n) : 0;
  const uint8_t *chunk = tile, *second = act + groups * CPU_RECORD_BYTES * n;
  const bool prefetches = nt >= PREFETCH_FROM || (given & FAR);
  struct records at = {{act, act + act_tile}, {second, second + act_tile}};
  __m512 sum[DIRECT_TOKENS];
  for (int t = 0; t < nt; t++) sum[t] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; g += CPU_CHUNK_GROUPS, chunk += CPU_CHUNK_BYTES) {
    const char *line = (const char *)chunk;
    for (int i = 0; prefetches && i < CPU_HEADER_BYTES; i += 64, line += 64) prefetch(given, line);
    for (int j = 0; j < CPU_CHUNK_GROUPS && g + j < groups; j++) {
      for (int i = 0; prefetches && i < low + high; i++, line += 64) prefetch(given, line);
      __asm__("" : "+r"(at.rec[0]), "+r"(at.rec[1])); /* opaque: see panel_tile */
      add_group(CPU_FORMAT_ARGS, given, chunk, j, &at, n, nt, sum);
      for (int i = 0; i < 2; i++) {
        at.rec[i] += CPU_RECORD_BYTES * n;
        at.second[i] += CPU_SECOND_BYTES * n;
      }
    }
  }
  for (int t = 0; t < nt; t++)
    if (t < n_tokens) _mm512_mask_storeu_ps(y + t * ldy, mask, sum[t]);
}

/* Rows r0..r1 for a batch of at most MOST_DIRECT tokens, up to 8 at a time over each row tile, which the caches hold meanwhile. */
INLINE void directs(CPU_FORMAT_PARAMS, int given, const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0,
                    int64_t r1, float *y, int64_t ldy)
{
  const uint8_t *tile = w->data + (size_t)(r0 / W) * w->tile_bytes;
  const size_t act_tile = cpu_act_tile_bytes_q8(w->k, CPU_ACT_MAX_TILE);
  for (int64_t r = r0; r < r1; r += W, tile += w->tile_bytes) {
    __mmask16 mask = row_mask(r1 - r);
    if (n_tokens == 1) direct(CPU_FORMAT_ARGS, given, 1, 1, w, tile, act, 1, y + r, ldy, mask);
    else if (n_tokens == 2) direct(CPU_FORMAT_ARGS, given, 2, 2, w, tile, act, 2, y + r, ldy, mask);
    else
      for (int32_t t = 0; t < n_tokens; t += 8) {
        const uint8_t *first = act + act_tile * (size_t)(t / 4);
        int32_t left = n_tokens - t;
#define DIRECT(nt) direct(CPU_FORMAT_ARGS, given, 4, nt, w, tile, first, left, y + t * ldy + r, ldy, mask)
        if (left > 7) DIRECT(8);
        else if (left > 6) DIRECT(7);
        else if (left > 5) DIRECT(6);
        else if (left > 4) DIRECT(5);
        else if (left > 3) DIRECT(4);
        else DIRECT(3);
#undef DIRECT
      }
  }
}

/* ---- panels ------------------------------------------------------------------------------------------------------------------------ */

/* A group in a panel: 8 vectors of bytes, then n, d and, where there are minimums, m of each half. */
#define PANEL_BYTES(halves, mins) (512 + 64 * (halves) * (2 + (mins)))

INLINE void fill_panel(CPU_FORMAT_PARAMS, const struct cpu_weight *w, const uint8_t *tile, int64_t g0, int64_t g1, uint8_t *panel)
{
  for (int64_t g = g0; g < g1; g++, panel += PANEL_BYTES(halves, mins)) {
    const uint8_t *chunk = tile + g / CPU_CHUNK_GROUPS * CPU_CHUNK_BYTES;
    const int j = (int)(g % CPU_CHUNK_GROUPS), bits = low + high;
    struct scales q;
    const char *ahead = (const char *)tile + g * (CPU_CHUNK_BYTES / CPU_CHUNK_GROUPS) + PREFETCH_BYTES;
    for (int i = 0; i < CPU_PLANE_BYTES + CPU_HEADER_BYTES / CPU_CHUNK_GROUPS; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T0);
    unpack_scales(CPU_FORMAT_ARGS, chunk, j, &q);
    for (int h = 0; h < halves; h++) {
      __m512i sums = sums_begin(bits, offset);
      for (int v = 8 / halves * h; v < 8 / halves * (h + 1); v++) {
        const __m512i u = vector_of(low, high, 0, chunk + CPU_HEADER_BYTES + j * CPU_PLANE_BYTES, v);
        sums = sums_add(bits, sums, u);
        _mm512_store_si512(panel + 64 * v, u);
      }
      _mm512_store_si512(panel + 512 + 64 * h, sums_end(bits, offset, sums));
      _mm512_store_ps(panel + 512 + 64 * (halves + h), q.d[h]);
      if (mins) _mm512_store_ps(panel + 512 + 64 * (2 * halves + h), q.m[h]);
    }
  }
}

/* A panel of n_groups groups times nt tokens (4, 8 or 12: whole act tiles). rec, second: of the first act tile at its first group. */
INLINE void panel_tile(int halves, int mins, int nt, const uint8_t *panel, int64_t n_groups, const uint8_t *rec, const uint8_t *second,
                       size_t act_tile, __m512 *sum)
{
  const uint8_t *at[3] = {rec, rec + act_tile, rec + 2 * act_tile}, *half_at[3] = {second, second + act_tile, second + 2 * act_tile};
  for (int64_t g = 0; g < n_groups; g++, panel += PANEL_BYTES(halves, mins)) {
    /* Three opaque pointers: else the compiler keeps dozens of sums of pointer and offset, on the stack. */
    __asm__("" : "+r"(at[0]), "+r"(at[1]), "+r"(at[2]));
    for (int h = 0; h < halves; h++) {
      const uint8_t *extra = panel + 512 + 64 * h;
      __m512i n = _mm512_load_si512(extra), dot[PANEL_TOKENS];
      for (int t = 0; t < nt; t++)
        dot[t] = _mm512_madd_epi16(n, broadcast32(halves == 1 ? at[t / 4] + 144 + 4 * (t % 4) : half_at[t / 4] + 16 * h + 4 * (t % 4)));
      const int first = 8 / halves * h, end = 8 / halves * (h + 1);
#pragma GCC unroll 8
      for (int v = first; v < end; v++) {
        __m512i u = _mm512_load_si512(panel + 64 * v);
        for (int t = 0; t < nt; t++) dot[t] = dot4(dot[t], u, at[t / 4] + 32 * (t % 4) + 4 * v);
      }
      __m512 d = _mm512_load_ps(extra + 64 * halves);
      for (int t = 0; t < nt; t++) {
        __m512 scale = _mm512_mul_ps(d, broadcast_ps(at[t / 4] + 128 + 4 * (t % 4)));
        sum[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[t]), scale, sum[t]);
      }
      if (mins) {
        __m512 m = _mm512_load_ps(extra + 128 * halves);
        for (int t = 0; t < nt; t++) {
          const uint8_t *x = halves == 1 ? at[t / 4] + 160 : half_at[t / 4] + 32 + 16 * h;
          sum[t] = _mm512_fmadd_ps(m, broadcast_ps(x + 4 * (t % 4)), sum[t]);
        }
      }
    }
    for (int i = 0; i < 3; i++) {
      at[i] += 4 * CPU_RECORD_BYTES;
      half_at[i] += 4 * CPU_SECOND_BYTES;
    }
  }
}

/* nt tokens from t0 over groups g0..g1: sums are taken up from y where g0 > 0. */
INLINE void panel_step(int halves, int mins, int nt, const struct cpu_weight *w, const uint8_t *panel, int64_t g0, int64_t g1,
                       const uint8_t *act, int32_t t0, int32_t n_tokens, float *y, int64_t ldy, __mmask16 mask)
{
  const size_t act_tile = cpu_act_tile_bytes_q8(w->k, 4);
  const uint8_t *first = act + act_tile * (size_t)(t0 / 4);
  __m512 sum[PANEL_TOKENS];
  for (int t = 0; t < nt; t++)
    sum[t] = g0 > 0 && t0 + t < n_tokens ? _mm512_maskz_loadu_ps(mask, y + (t0 + t) * ldy) : _mm512_setzero_ps();
  panel_tile(halves, mins, nt, panel, g1 - g0, first + g0 * 4 * CPU_RECORD_BYTES,
             first + w->k / CPU_GROUP * 4 * CPU_RECORD_BYTES + g0 * 4 * CPU_SECOND_BYTES, act_tile, sum);
  for (int t = 0; t < nt; t++)
    if (t0 + t < n_tokens) _mm512_mask_storeu_ps(y + (t0 + t) * ldy, mask, sum[t]);
}

/* All tokens over a filled panel; one copy for each kind of scales. */
#define PANEL_RUN(halves, mins) \
  static void panel_run_##halves##mins(const struct cpu_weight *w, const uint8_t *panel, int64_t g0, int64_t g1, const uint8_t *act, \
                                       int32_t n_tokens, float *y, int64_t ldy, __mmask16 mask) \
  { \
    int32_t t = 0; \
    for (; n_tokens - t > 8; t += 12) panel_step(halves, mins, 12, w, panel, g0, g1, act, t, n_tokens, y, ldy, mask); \
    if (n_tokens - t > 4) panel_step(halves, mins, 8, w, panel, g0, g1, act, t, n_tokens, y, ldy, mask); \
    else if (n_tokens > t) panel_step(halves, mins, 4, w, panel, g0, g1, act, t, n_tokens, y, ldy, mask); \
  }
PANEL_RUN(1, 0)
PANEL_RUN(1, 1)
PANEL_RUN(2, 0)
PANEL_RUN(2, 1)

INLINE void panels(CPU_FORMAT_PARAMS, const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y,
                   int64_t ldy, uint8_t *scratch)
{
  _Static_assert(PANEL_GROUPS * PANEL_BYTES(2, 1) <= CPU_MATMUL_SCRATCH_BYTES, "a panel fits the scratch");
  const uint8_t *tile = w->data + (size_t)(r0 / W) * w->tile_bytes;
  const int64_t groups = w->k / CPU_GROUP;
  const int64_t n_panels = (groups + PANEL_GROUPS - 1) / PANEL_GROUPS, step = (groups + n_panels - 1) / n_panels;
  for (int64_t r = r0; r < r1; r += W, tile += w->tile_bytes)
    for (int64_t g = 0; g < groups; g += step) {
      int64_t end = groups - g < step ? groups : g + step;
      fill_panel(CPU_FORMAT_ARGS, w, tile, g, end, scratch);
      (halves == 1 ? mins ? panel_run_11 : panel_run_10 : mins ? panel_run_21 : panel_run_20)(w, scratch, g, end, act, n_tokens, y + r, ldy,
                                                                                            row_mask(r1 - r));
    }
}

INLINE void rows_of(CPU_FORMAT_PARAMS, const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y,
                    int64_t ldy, uint8_t *scratch)
{
  const bool is_direct = n_tokens <= MOST_DIRECT;
  if (is_direct && w->prefetches && w->has_gfni && low == 4) directs(CPU_FORMAT_ARGS, FAR | GFNI, w, act, n_tokens, r0, r1, y, ldy);
  else if (is_direct && w->prefetches) directs(CPU_FORMAT_ARGS, FAR, w, act, n_tokens, r0, r1, y, ldy);
  else if (is_direct) directs(CPU_FORMAT_ARGS, 0, w, act, n_tokens, r0, r1, y, ldy);
  else panels(CPU_FORMAT_ARGS, w, act, n_tokens, r0, r1, y, ldy, scratch);
}

#define FORMAT_KERNEL(name, ...) \
  static void matmul_##name(const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y, \
                            int64_t ldy, uint8_t *scratch) \
  { \
    rows_of(__VA_ARGS__, w, act, n_tokens, r0, r1, y, ldy, scratch); \
  }
CPU_FORMAT_MAP(FORMAT_KERNEL)

static void matmul_avx512(const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y, int64_t ldy,
                          uint8_t *scratch)
{
  switch (w->dtype) {
#define CASE(name, ...) \
  case SITS_DTYPE_##name: matmul_##name(w, act, n_tokens, r0, r1, y, ldy, scratch); break;
    CPU_FORMAT_MAP(CASE)
#undef CASE
  default: cpu_matmul_float_avx512(w, act, n_tokens, r0, r1, y, ldy); break;
  }
}

const struct cpu_matmul_ops *cpu_matmul_ops_avx512(void)
{
  static const struct cpu_matmul_ops ops = {.tile = W, .quantize = cpu_quantize_avx512, .matmul = matmul_avx512};
  return &ops;
}

#else
const struct cpu_matmul_ops *cpu_matmul_ops_avx512(void) { return NULL; }
#endif
