/* RoPE, append, gather, prefill and decode attention over pages of every codec against f64 on the host.
 *
 * Pages are judged in two steps: the gathered keys and values must be near the exact ones (the codec's error), and attention must equal
 * the f64 attention over the gathered ones; with int4 and fp4 a query's own group counts with its exact keys, in f16. So the order of bits
 * inside a page is free, but nothing else is. test_kv_pages.c compares the stored numbers with the CPU's.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backend/backend.h"
#include "backend/kv_open.h"
#include "gpu_test.h"

static int32_t n_sm;

struct config {
  int32_t heads, kv_heads, dim;
  enum k_kv_codec codec;
  bool interleaved, head_norm;
  int32_t rope_dims, window;
  const char *name;
};

#define N_SEQS 8
struct world {
  struct config c;
  int32_t len[N_SEQS], max_pages, n_pages, capacity, layer, n_layers;
  int32_t offset[N_SEQS];
  float *k, *v; /* exact rotated keys, values, [S][L][G][D] by history() */
  float *inv_freq, *q_gain, *k_gain;
  struct k_kv_view view; /* device pointers filled per step */
  struct k_rope rope;
  float *dev_q_gain, *dev_k_gain;
  int32_t *dev_offset, *table; /* table: on the host */
  void *dev_k, *dev_v, *dev_exact;
  int64_t exact_capacity;
  struct kv_open *open;        /* NULL where the codec has no open groups */
  size_t pool_bytes, open_bytes;
};
enum { MOST_TOKENS = 2048, DECODES = 11 }; /* of a step; steps of one token a sequence */

static int32_t pages_for(int32_t len) { return (len + DECODES + K_PAGE_TOKENS - 1) / K_PAGE_TOKENS; }

static void unexpected(void *user, int32_t slot, int32_t page, int32_t group, int32_t n) {
  (void)user;
  verdict(false, "slot %d, page %d, group %d, %d tokens: no slot should be folded or copied", slot, page, group, n);
}
static void unexpected_unfold(void *user, int32_t page, int32_t group, int32_t slot) { unexpected(user, slot, page, group, 0); }
static void unexpected_copy(void *user, int32_t from_slot, int32_t to_slot) { unexpected(user, from_slot, to_slot, 0, 0); }

static size_t history(const struct world *w, int32_t s, int32_t pos, int32_t g) {
  return (((size_t)s * w->max_pages * K_PAGE_TOKENS + pos) * w->c.kv_heads + g) * w->c.dim;
}

/* Walsh-Hadamard in blocks of the largest power of two that divides D, orthonormal: its own inverse. */
static void hadamard(double *v, int32_t d) {
  const int32_t block = d & -d;
  for (int32_t n = 1; n < block; n *= 2)
    for (int32_t i = 0; i < d; i++)
      if (!(i & n)) {
        double x = v[i], y = v[i + n];
        v[i] = x + y, v[i + n] = x - y;
      }
  for (int32_t i = 0; i < d; i++) v[i] /= sqrt(block);
}

static void rotate_head(const struct world *w, double *v, const float *gain, int32_t position) {
  const int32_t d = w->c.dim, half = w->c.rope_dims / 2;
  if (gain) {
    double sum = 0;
    for (int32_t i = 0; i < d; i++) sum += v[i] * v[i];
    for (int32_t i = 0; i < d; i++) v[i] *= gain[i] / sqrt(sum / d + 1e-6);
  }
  for (int32_t i = 0; i < half; i++) {
    int32_t a = w->c.interleaved ? 2 * i : i, b = w->c.interleaved ? 2 * i + 1 : i + half;
    double angle = (double)((float)position * w->inv_freq[i]), c = cos(angle), s = sin(angle), x = v[a], y = v[b];
    v[a] = x * c - y * s, v[b] = y * c + x * s;
  }
  if (k_kv_rotates_keys(w->c.codec)) hadamard(v, d);
}

static struct world make_world(struct config c, const int32_t *lens) {
  struct world w = {.c = c, .n_layers = 2, .layer = 1};
  for (int32_t s = 0; s < N_SEQS; s++) {
    const int32_t pages = pages_for(lens[s]);
    if (pages > w.max_pages) w.max_pages = pages;
    w.offset[s] = w.capacity;
    w.capacity += (pages + 1) / 2 * 2 * K_PAGE_TOKENS; /* whole tiles of 128 keys */
    w.n_pages += pages;
  }
  size_t n = (size_t)N_SEQS * w.max_pages * K_PAGE_TOKENS * c.kv_heads * c.dim;
  w.k = host_alloc(n * 4), w.v = host_alloc(n * 4);
  w.inv_freq = host_alloc(c.dim * 4), w.q_gain = host_alloc(c.dim * 4), w.k_gain = host_alloc(c.dim * 4);
  for (int32_t i = 0; i < c.dim; i++) {
    w.inv_freq[i] = (float)pow(10000.0, -2.0 * i / c.rope_dims);
    w.q_gain[i] = 1.f + 0.3f * rand_unit(), w.k_gain[i] = 1.f + 0.3f * rand_unit();
  }
  w.rope = (struct k_rope){gpu_copy(w.inv_freq, c.dim * 4), 1.f, c.rope_dims, c.interleaved};
  w.dev_q_gain = c.head_norm ? gpu_copy(w.q_gain, c.dim * 4) : NULL, w.dev_k_gain = c.head_norm ? gpu_copy(w.k_gain, c.dim * 4) : NULL;
  w.dev_offset = gpu_copy(w.offset, sizeof w.offset);
  w.dev_k = gpu_alloc((size_t)c.kv_heads * w.capacity * c.dim * 2), w.dev_v = gpu_alloc((size_t)c.kv_heads * w.capacity * c.dim * 2);
  const int64_t tile = k_kv_tile_bytes(c.codec, c.dim), page = tile * c.kv_heads * w.n_layers;
  int32_t *table = host_alloc((size_t)N_SEQS * w.max_pages * 4), *order = host_alloc((size_t)w.n_pages * 4);
  for (int32_t i = 0; i < w.n_pages; i++) order[i] = i;
  for (int32_t i = w.n_pages - 1; i > 0; i--) {
    int32_t j = (int32_t)(rand_u32() % (uint32_t)(i + 1)), x = order[i];
    order[i] = order[j], order[j] = x;
  }
  for (int32_t s = 0, used = 0; s < N_SEQS; s++)
    for (int32_t p = 0; p < pages_for(lens[s]); p++) table[s * w.max_pages + p] = order[used++];
  w.table = table;
  if (k_kv_has_nibbles(c.codec)) {
    w.open = kv_open_create(k_kv_open_tokens(c.codec), w.n_pages, kv_open_slots(N_SEQS),
                            (struct kv_open_ops){unexpected, unexpected_unfold, unexpected_copy}, NULL);
    w.exact_capacity = k_kv_exact_rows(MOST_TOKENS, N_SEQS);
    w.dev_exact = gpu_alloc((size_t)w.exact_capacity * c.kv_heads * c.dim * 2);
  }
  w.open_bytes = (size_t)kv_open_slots(N_SEQS) * (size_t)k_kv_open_bytes(c.codec, w.n_layers, c.kv_heads, c.dim);
  w.pool_bytes = (size_t)(page * w.n_pages);
  w.view = (struct k_kv_view){.pool = gpu_zeros(w.pool_bytes),
                              .page_bytes = page,
                              .codec = c.codec,
                              .layer = w.layer,
                              .n_layers = w.n_layers,
                              .n_heads = c.heads,
                              .n_kv_heads = c.kv_heads,
                              .head_dim = c.dim,
                              .window = c.window,
                              .n_seqs = N_SEQS,
                              .block_table = gpu_copy(table, (size_t)N_SEQS * w.max_pages * 4),
                              .table_stride = w.max_pages,
                              .open = w.open ? gpu_zeros(w.open_bytes) : NULL,
                              .fresh = w.open ? gpu_alloc((size_t)MOST_TOKENS * c.kv_heads * c.dim * 2) : NULL};
  return w;
}

struct step {
  int32_t n_tokens, start[N_SEQS + 1];
  float *qkv, *q;
  void *dev_qkv, *dev_q, *dev_out;
};

/* Tokens new_tokens[s] for each sequence; exact q, k, v are kept. */
static struct step make_step(struct world *w, const int32_t *new_tokens) {
  const struct config *c = &w->c;
  struct step st = {0};
  for (int32_t s = 0; s < N_SEQS; s++) st.start[s] = st.n_tokens, st.n_tokens += new_tokens[s];
  st.start[N_SEQS] = st.n_tokens;
  const int32_t d = c->dim, ld = (c->heads + 2 * c->kv_heads) * d;
  st.q = host_alloc((size_t)st.n_tokens * c->heads * d * 4);
  uint16_t *half = host_alloc((size_t)st.n_tokens * ld * 2);
  int32_t *pos = host_alloc((size_t)st.n_tokens * 4), *seq = host_alloc((size_t)st.n_tokens * 4), kv_len[N_SEQS];
  double v[256];
  for (int32_t s = 0; s < N_SEQS; s++)
    for (int32_t i = 0; i < new_tokens[s]; i++) {
      const int32_t t = st.start[s] + i, p = w->len[s] + i;
      pos[t] = p, seq[t] = s;
      for (int32_t h = 0; h < c->heads + 2 * c->kv_heads; h++) {
        for (int32_t e = 0; e < d; e++) {
          float x = round_half(rand_unit() * (h < c->heads ? 2.f : 1.f));
          v[e] = x, half[(size_t)t * ld + h * d + e] = half_bits(x);
        }
        if (h >= c->heads + c->kv_heads && k_kv_rotates_values(c->codec)) hadamard(v, d);
        if (h < c->heads + c->kv_heads) rotate_head(w, v, !c->head_norm ? NULL : h < c->heads ? w->q_gain : w->k_gain, p);
        float *to = h < c->heads                 ? st.q + ((size_t)t * c->heads + h) * d
                    : h < c->heads + c->kv_heads ? w->k + history(w, s, p, h - c->heads)
                                                 : w->v + history(w, s, p, h - c->heads - c->kv_heads);
        for (int32_t e = 0; e < d; e++) to[e] = (float)v[e];
      }
    }
  for (int32_t s = 0; s < N_SEQS; s++) w->len[s] += new_tokens[s], kv_len[s] = w->len[s];
  if (w->open) {
    const struct backend_batch batch = {.n_tokens = st.n_tokens, .n_seqs = N_SEQS, .positions = pos, .seq_start = st.start,
                                        .block_table = w->table, .table_stride = w->max_pages};
    int32_t *tiles = host_alloc((size_t)st.n_tokens * 4), slots[2 * N_SEQS];
    kv_open_begin(w->open, &batch, tiles);
    for (int32_t s = 0; s < N_SEQS; s++) slots[2 * s] = tiles[st.start[s]], slots[2 * s + 1] = tiles[st.start[s + 1] - 1];
    w->view.open_slot = gpu_copy(slots, sizeof slots);
  }
  st.dev_qkv = gpu_copy(half, (size_t)st.n_tokens * ld * 2);
  st.dev_q = gpu_alloc((size_t)st.n_tokens * c->heads * d * 2), st.dev_out = gpu_alloc((size_t)st.n_tokens * c->heads * d * 2);
  w->view.n_tokens = st.n_tokens;
  w->view.seq_start = gpu_copy(st.start, sizeof st.start), w->view.kv_len = gpu_copy(kv_len, sizeof kv_len);
  w->view.positions = gpu_copy(pos, (size_t)st.n_tokens * 4), w->view.token_seq = gpu_copy(seq, (size_t)st.n_tokens * 4);
  return st;
}

/* Gather all pages; error of keys and values against the exact ones, keys of complete groups only; k and v come back as f32
 * [G][capacity][D]. */
static double gather(struct world *w, float *k, float *v) {
  const size_t n = (size_t)w->c.kv_heads * w->capacity * w->c.dim;
  struct k_kv_gather a = {w->view, 0, N_SEQS, w->dev_offset, 0, w->max_pages, w->capacity, w->dev_k, w->dev_v, false,
                          false, w->dev_exact, w->exact_capacity};
  gpu_check_call(sits_k_kv_gather(&a, gpu_stream()), "sits_k_kv_gather");
  uint16_t *h = host_alloc(n * 2);
  double d2 = 0, r2 = 0;
  for (int which = 0; which < 2; which++) {
    float *out = which ? v : k;
    const float *exact = which ? w->v : w->k;
    gpu_read(h, which ? w->dev_v : w->dev_k, n * 2);
    for (int32_t g = 0; g < w->c.kv_heads; g++)
      for (int32_t s = 0; s < N_SEQS; s++)
        for (int32_t p = 0; p < w->len[s]; p++)
          for (int32_t e = 0; e < w->c.dim; e++) {
            size_t at = ((size_t)g * w->capacity + w->offset[s] + p) * w->c.dim + e;
            double want = exact[history(w, s, p, g) + e], got = out[at] = half_value(h[at]);
            if (which == 0 && w->open && p >= w->len[s] / k_kv_open_tokens(w->c.codec) * k_kv_open_tokens(w->c.codec)) continue;
            d2 += (got - want) * (got - want), r2 += want * want;
          }
  }
  return sqrt(d2 / r2);
}

static void ref_attention(const struct world *w, const struct step *st, const float *k, const float *v, float *out) {
  const struct config *c = &w->c;
  const int32_t d = c->dim;
  double *score = host_alloc((size_t)w->max_pages * K_PAGE_TOKENS * 8), acc[256];
  for (int32_t s = 0; s < N_SEQS; s++)
    for (int32_t t = st->start[s]; t < st->start[s + 1]; t++)
      for (int32_t h = 0; h < c->heads; h++) {
        const int32_t pos = w->len[s] - (st->start[s + 1] - t), lo = c->window && pos >= c->window ? pos - c->window + 1 : 0;
        const float *q = st->q + ((size_t)t * c->heads + h) * d;
        const int32_t group = h / (c->heads / c->kv_heads), tokens = k_kv_open_tokens(c->codec);
        const int32_t own = tokens ? pos / tokens * tokens : pos + 1;
        const size_t base = ((size_t)group * w->capacity + w->offset[s]) * d;
        double top = -1e300, sum = 0;
        for (int32_t p = lo; p <= pos; p++) {
          double x = 0;
          for (int32_t e = 0; e < d; e++)
            x += (double)q[e] * (p < own ? k[base + (size_t)p * d + e] : round_half(w->k[history(w, s, p, group) + e]));
          score[p] = x / sqrt(d);
          if (score[p] > top) top = score[p];
        }
        memset(acc, 0, sizeof acc);
        for (int32_t p = lo; p <= pos; p++) {
          double x = exp(score[p] - top);
          sum += x;
          for (int32_t e = 0; e < d; e++) acc[e] += x * v[base + (size_t)p * d + e];
        }
        if (k_kv_rotates_values(c->codec)) hadamard(acc, d);
        for (int32_t e = 0; e < d; e++) out[((size_t)t * c->heads + h) * d + e] = (float)(acc[e] / sum);
      }
}

static double compare_out(const struct world *w, const struct step *st, const float *want, int32_t frag_m, const void *device,
                          size_t bytes) {
  const int32_t width = w->c.heads * w->c.dim;
  uint16_t *h = host_alloc(bytes);
  float *got = host_alloc((size_t)st->n_tokens * width * 4);
  gpu_read(h, device, bytes);
  for (int32_t t = 0; t < st->n_tokens; t++)
    for (int32_t i = 0; i < width; i++) got[(size_t)t * width + i] = half_value(h[frag_m ? k_frag_index(frag_m, i, t) : t * width + i]);
  return relative_error(got, want, (size_t)st->n_tokens * width);
}

/* A step's append to the pages of `view`. */
static void append_to(const struct world *w, const struct step *st, const struct k_kv_view *view, struct k_projections from,
                      struct k_stream at) {
  const bool is_single = st->n_tokens == N_SEQS && w->open == NULL; /* every case gives each sequence a token */
  struct k_rope_append a = {.kv = *view, .rope = w->rope, .qkv = from, .q_gain = w->dev_q_gain, .k_gain = w->dev_k_gain, .eps = 1e-6f,
                            .q = st->dev_q, .is_single = is_single};
  gpu_check_call(sits_k_rope_append(&a, at), "sits_k_rope_append");
  if (w->open) gpu_check_call(sits_k_kv_fold(view, at), "sits_k_kv_fold");
}

static void run_rope_append(const struct world *w, const struct step *st) {
  append_to(w, st, &w->view, (struct k_projections){.rows = st->dev_qkv}, gpu_stream());
}

/* What a codec may lose of random keys and values. */
static double codec_error(enum k_kv_codec codec) {
  return codec == K_KV_FP4 ? 0.15 : codec == K_KV_INT4 ? 0.13 : codec == K_KV_INT8 ? 0.01 : 1e-3;
}

static void run_prefill(struct world *w, struct step *st, const char *what, const int32_t *new_tokens) {
  const struct config *c = &w->c;
  const size_t n_kv = (size_t)c->kv_heads * w->capacity * c->dim, n_out = (size_t)st->n_tokens * c->heads * c->dim;
  float *k = host_alloc(n_kv * 4), *v = host_alloc(n_kv * 4), *want = host_alloc(n_out * 4);
  const double codec_limit = codec_error(c->codec);
  run_rope_append(w, st);
  double error = gather(w, k, v);
  verdict(error < codec_limit, "%s %s: pages hold keys and values within %.4f", c->name, what, error);
  ref_attention(w, st, k, v, want);
  int32_t most = 0, longest = 0;
  for (int32_t s = 0; s < N_SEQS; s++) {
    most = new_tokens[s] > most ? new_tokens[s] : most;
    longest = w->len[s] > longest ? w->len[s] : longest;
  }
  if (k_attn_prefill_takes(c->dim)) {
    struct k_attn_prefill a = {w->view, st->dev_q, w->dev_k, w->dev_v, w->capacity, w->dev_offset, 0, N_SEQS, most, st->dev_out,
                               false, 0, NULL, w->dev_exact, w->exact_capacity};
    gpu_check_call(sits_k_attn_prefill(&a, gpu_stream()), "sits_k_attn_prefill");
    error = compare_out(w, st, want, 0, st->dev_out, n_out * 2);
    verdict(error < 3e-3, "%s %s: prefill attention %.2e", c->name, what, error);
  }
  if (k_attn_prefill_takes(c->dim)) {
    struct k_kv_gather tiled = {w->view,     0,           N_SEQS,              w->dev_offset,       0, w->max_pages,
                                w->capacity, gpu_alloc(n_kv * 2), gpu_alloc(n_kv * 2), false, true, w->dev_exact, w->exact_capacity};
    struct k_attn_prefill a = {w->view, st->dev_q, tiled.k, tiled.v, w->capacity, w->dev_offset, 0, N_SEQS, most, gpu_alloc(n_out * 2),
                               false, 0, NULL, w->dev_exact, w->exact_capacity};
    gpu_check_call(sits_k_kv_gather(&tiled, gpu_stream()), "sits_k_kv_gather");
    gpu_check_call(sits_k_attn_prefill_sm90(&a, n_sm, gpu_stream()), "sits_k_attn_prefill_sm90");
    error = compare_out(w, st, want, 0, a.out, n_out * 2);
    verdict(error < 3e-3, "%s %s: wgmma prefill attention %.2e", c->name, what, error);
    /* as if the device had room for all of it, so that keys are split; each sequence alone, its last pages expanded again */
    const int32_t many = 16 * (most + 127) / 128 * c->heads;
    a.out = gpu_alloc(n_out * 2), a.workspace = gpu_alloc(k_attn_prefill_workspace_bytes(many, c->dim));
    for (int32_t s = 0; s < N_SEQS; s++) {
      a.seq0 = tiled.seq0 = s, a.n_seqs = tiled.n_seqs = 1, a.max_keys = w->len[s];
      const int32_t first_new = w->len[s] - new_tokens[s], half = w->len[s] / K_PAGE_TOKENS / 2;
      tiled.first_page = half < first_new / K_PAGE_TOKENS ? half : first_new / K_PAGE_TOKENS; /* later pages have new tokens */
      gpu_check_call(sits_k_kv_gather(&tiled, gpu_stream()), "sits_k_kv_gather");
      gpu_check_call(sits_k_attn_prefill_sm90(&a, many, gpu_stream()), "sits_k_attn_prefill_sm90");
    }
    error = compare_out(w, st, want, 0, a.out, n_out * 2);
    verdict(error < 3e-3, "%s %s: wgmma prefill attention, split in up to %d %.2e", c->name, what,
            k_attn_prefill_splits(many, (most + 127) / 128 * c->heads, longest), error);
  }
  struct k_attn_any any = {w->view, st->dev_q, gpu_alloc(n_out * 2)};
  gpu_check_call(sits_k_attn_any(&any, gpu_stream()), "sits_k_attn_any");
  error = compare_out(w, st, want, 0, any.out, n_out * 2);
  verdict(error < 3e-3, "%s %s: any attention %.2e", c->name, what, error);
}

/* Projections of a step in f32 as two slabs and a bias that add up to the f16 ones. */
static struct k_projections split_projections(const struct world *w, const struct step *st) {
  const int32_t width = (w->c.heads + 2 * w->c.kv_heads) * w->c.dim;
  const size_t n = (size_t)st->n_tokens * width;
  uint16_t *rows = host_alloc(n * 2);
  float *slabs = host_alloc(n * 8), *bias = host_alloc((size_t)width * 4);
  gpu_read(rows, st->dev_qkv, n * 2);
  for (int32_t i = 0; i < width; i++) bias[i] = (float)(i % 3);
  for (size_t i = 0; i < n; i++) slabs[i] = (float)(i % 5), slabs[n + i] = half_value(rows[i]) - (float)(i % 5) - bias[i % width];
  return (struct k_projections){.slabs = gpu_copy(slabs, n * 8), .bias = gpu_copy(bias, (size_t)width * 4), .n_slabs = 2,
                                .slab_stride = (int64_t)n};
}

/* The same step by append and fold, on a copy of pages and slots. */
struct beside {
  struct k_kv_view view;
  uint8_t *pages, *other; /* on the host */
};

static struct beside append_beside(const struct world *w, const struct step *st, struct k_projections from) {
  struct beside b = {w->view, host_alloc(w->pool_bytes), host_alloc(w->pool_bytes)};
  void *slots = host_alloc(w->open_bytes);
  gpu_read(b.pages, w->view.pool, w->pool_bytes);
  gpu_read(slots, w->view.open, w->open_bytes);
  b.view.pool = gpu_copy(b.pages, w->pool_bytes), b.view.open = gpu_copy(slots, w->open_bytes);
  append_to(w, st, &b.view, from, gpu_stream());
  return b;
}

/* Tiles whose values are not the same bytes in both; in D 64 and 128 the rotations are made in the same order. Values: their words, then
 * their scales and zero points (kv_tile.cuh). */
static int32_t differing_values(const struct world *w, const struct beside *b) {
  const size_t d = (size_t)w->c.dim, tile = (size_t)k_kv_tile_bytes(w->c.codec, w->c.dim);
  int32_t count = 0;
  gpu_read(b->pages, w->view.pool, w->pool_bytes);
  gpu_read(b->other, b->view.pool, w->pool_bytes);
  for (size_t at = 0; at < w->pool_bytes; at += tile)
    count += memcmp(b->pages + at + 32 * d, b->other + at + 32 * d, 32 * d) != 0 ||
             memcmp(b->pages + at + 68 * d, b->other + at + 68 * d, 4 * d) != 0;
  return count;
}

/* Who appends, and for how many SMs: CTAs of 16, 8, 4 or 2 warps; with fewer SMs a CTA walks over several segments. */
static const struct decode_form { const char *name; bool is_few, is_fused; int32_t share; /* of a CTA of 16 warps a segment; 0: one SM */
} forms[] = {
  {"decode, few", true, true, 1},
  {"fused decode", false, true, 1},
  {"fused decode, 8 warps", false, true, 2},
  {"fused decode, 4 warps", false, true, 4},
  {"fused decode, one SM", false, true, 0},
  {"decode", false, false, 1},
  {"decode, 8 warps", false, false, 2},
  {"decode, 4 warps", false, false, 4},
  {"decode, one SM", false, false, 0},
};
enum { N_FORMS = sizeof forms / sizeof *forms };

static struct k_attn_decode make_decode(const struct world *w, const struct step *st, bool is_fused, size_t out_bytes, int32_t frag_m) {
  return (struct k_attn_decode){.kv = w->view,
                                .rope = w->rope,
                                .q = is_fused ? NULL : st->dev_q,
                                .qkv = {.rows = st->dev_qkv},
                                .q_gain = w->dev_q_gain,
                                .k_gain = w->dev_k_gain,
                                .eps = 1e-6f,
                                .out = gpu_alloc(out_bytes),
                                .frag_m = frag_m,
                                .cut = gpu_alloc(k_attn_cut_bytes(n_sm)),
                                .workspace = gpu_alloc(k_attn_decode_workspace_bytes(n_sm, w->c.dim)),
                                .counters = gpu_zeros((size_t)N_SEQS * w->c.kv_heads * 4)};
}

static void run_decode(struct world *w, struct step *st, const struct decode_form *form, bool has_slabs, int32_t frag_m) {
  const struct config *c = &w->c;
  const int32_t segments = N_SEQS * c->kv_heads;
  const int32_t sms = form->share == 0 ? 1 : form->share == 1 ? n_sm : (segments + form->share - 1) / form->share;
  const size_t n_kv = (size_t)c->kv_heads * w->capacity * c->dim, n_out = (size_t)st->n_tokens * c->heads * c->dim;
  const size_t bytes = frag_m ? (size_t)k_blocks(c->heads * c->dim) * 128 * frag_m * 2 : n_out * 2;
  float *k = host_alloc(n_kv * 4), *v = host_alloc(n_kv * 4), *want = host_alloc(n_out * 4);
  struct k_attn_decode a = make_decode(w, st, form->is_fused, bytes, frag_m);
  struct beside beside = {0};
  if (has_slabs) a.qkv = split_projections(w, st);
  if (form->is_fused)
    beside = append_beside(w, st, a.qkv);
  else
    append_to(w, st, &w->view, a.qkv, gpu_stream());
  if (form->is_few)
    gpu_check_call(sits_k_attn_few(&a, n_sm, gpu_stream()), "sits_k_attn_few");
  else {
    gpu_check_call(sits_k_attn_cut(&w->view, a.cut, sms, gpu_stream()), "sits_k_attn_cut");
    gpu_check_call(sits_k_attn_decode(&a, sms, gpu_stream()), "sits_k_attn_decode");
  }
  if (form->is_fused) {
    gpu_check_call(sits_k_kv_close(&w->view, n_sm, gpu_stream()), "sits_k_kv_close");
    const int32_t n_differ = differing_values(w, &beside);
    verdict(n_differ == 0, "%s %s: %d tiles with other values than append's", c->name, form->name, n_differ);
  }
  double error = gather(w, k, v);
  verdict(error < codec_error(c->codec), "%s %s: pages after decode within %.4f", c->name, form->name, error);
  ref_attention(w, st, k, v, want);
  error = compare_out(w, st, want, frag_m, a.out, bytes);
  verdict(error < 2e-3, "%s %s%s: decode attention %.2e", c->name, form->name, has_slabs ? ", slabs" : "", error);
}

/* Sequences in three chunks: the first two are attended to as well. In the decode steps behind them each form but one ends a group of 32
 * tokens, of 64 where i < 2 or i is 3 or 5; the longest gives CTAs of several pairs more than a segment, a CTA of one SM more addresses
 * than its table holds, and decode_few's parts 16 pages (8 KV heads, 128 SMs or more). */
static const int32_t first_lens[N_SEQS] = {1, 63, 64, 65, 130, 700, 28, 20}, more_lens[N_SEQS] = {3, 1, 1, 70, 129, 2, 1, 7},
                     one_each[N_SEQS] = {1, 1, 1, 1, 1, 1, 1, 1};

static struct world make_history(struct config c, int32_t *rest) {
  const int32_t end[N_SEQS] = {23, 89, 127, 190, 285, gpu_is_small() ? 731 : 2011, 60, 58};
  for (int32_t s = 0; s < N_SEQS; s++) rest[s] = end[s] - first_lens[s] - more_lens[s];
  return make_world(c, end);
}

static void run_config(struct config c) {
  int32_t rest[N_SEQS];
  struct world w = make_history(c, rest);
  struct step st = make_step(&w, first_lens);
  run_prefill(&w, &st, "first chunk", first_lens);
  st = make_step(&w, more_lens);
  run_prefill(&w, &st, "second chunk", more_lens);
  st = make_step(&w, rest);
  run_rope_append(&w, &st);
  if (k_attn_decode_takes(c.codec, c.dim, c.heads, c.kv_heads)) {
    for (int32_t i = 0; i < DECODES; i++) {
      st = make_step(&w, one_each);
      run_decode(&w, &st, &forms[i % N_FORMS], i % 2 == 1, (i / 2 % 3) * 8);
    }
  } else {
    st = make_step(&w, one_each);
    run_prefill(&w, &st, "one token each", one_each);
  }
  kv_open_destroy(w.open);
  gpu_release_all();
}

/* A decode step of two layers, enqueued at once with programmatic edges, as the backend does: one layer appends, folds and attends, the
 * other does all of it in attention. Both have the same tokens. */
static void run_edge_step(struct world *w, struct step *st, bool is_few) {
  const struct config *c = &w->c;
  const size_t n_kv = (size_t)c->kv_heads * w->capacity * c->dim, n_out = (size_t)st->n_tokens * c->heads * c->dim;
  float *k = host_alloc(n_kv * 4), *v = host_alloc(n_kv * 4), *want = host_alloc(n_out * 4);
  const struct k_stream at = gpu_edge_stream();
  struct k_attn_decode layers[2] = {make_decode(w, st, false, n_out * 2, 0), make_decode(w, st, true, n_out * 2, 0)};
  layers[1].cut = layers[0].cut, layers[1].workspace = layers[0].workspace, layers[1].counters = layers[0].counters;
  for (int32_t l = 0; l < 2; l++) layers[l].kv.layer = l;
  gpu_read(want, layers[0].out, n_out * 2); /* all copies have arrived */
  gpu_check_call(sits_k_attn_cut(&layers[0].kv, layers[0].cut, n_sm, at), "sits_k_attn_cut");
  append_to(w, st, &layers[0].kv, layers[0].qkv, at);
  gpu_check_call(sits_k_attn_decode(&layers[0], n_sm, at), "sits_k_attn_decode");
  if (is_few)
    gpu_check_call(sits_k_attn_few(&layers[1], n_sm, at), "sits_k_attn_few");
  else
    gpu_check_call(sits_k_attn_decode(&layers[1], n_sm, at), "sits_k_attn_decode");
  gpu_check_call(sits_k_kv_close(&w->view, n_sm, at), "sits_k_kv_close");
  for (int32_t l = 0; l < 2; l++) {
    w->view.layer = l;
    double error = gather(w, k, v);
    verdict(error < codec_error(c->codec), "%s, edges, layer %d: pages within %.4f", c->name, l, error);
    ref_attention(w, st, k, v, want);
    error = compare_out(w, st, want, 0, layers[l].out, n_out * 2);
    verdict(error < 2e-3, "%s, edges, layer %d%s: decode attention %.2e", c->name, l, l == 0 ? "" : is_few ? ", few" : ", fused", error);
  }
}

static void run_edges(struct config c) {
  int32_t rest[N_SEQS];
  struct world w = make_history(c, rest);
  const int32_t *chunks[] = {first_lens, more_lens, rest};
  for (int32_t i = 0; i < 3; i++) {
    struct step st = make_step(&w, chunks[i]);
    for (w.view.layer = 0; w.view.layer < 2; w.view.layer++) run_rope_append(&w, &st);
  }
  for (int32_t i = 0; i < DECODES; i++) {
    struct step st = make_step(&w, one_each);
    run_edge_step(&w, &st, i % 2 == 1);
  }
  kv_open_destroy(w.open);
  gpu_release_all();
}

struct cut_part { int32_t n, first_cta, first_slot, last_cta; };

/* CTA c takes a part of the segment from unit `first` on, in its run's first place or another. Parts lie in CTAs that follow one another
 * and agree on which these are. */
static bool add_part(struct cut_part *part, const struct k_attn_share *run, int32_t c, int32_t first, int32_t n_units, bool is_first) {
  const bool begins = first >= run->begin, ends = first + n_units <= run->end;
  const int32_t slot = 2 * c + !is_first;
  const struct cut_part now = {part->n + 1, begins ? c : run->first_cta, begins ? slot : run->first_slot, ends ? c : run->last_cta};
  const bool agrees = now.first_cta == part->first_cta && now.first_slot == part->first_slot && now.last_cta == part->last_cta;
  const bool is_good = part->n == 0 ? begins : agrees && is_first && c == part->first_cta + part->n;
  *part = now;
  return is_good;
}

/* The records of sits_k_attn_cut for sequences of so many pages (0: one that has no single token): together all units, in order, in whole
 * segments' parts. NULL, or what is wrong. */
static const char *wrong_cut(const struct k_attn_share *cut, int32_t n_ctas, const int32_t *pages, int32_t n_seqs, int32_t kv_heads,
                             struct cut_part *parts) {
  int32_t at = 0, n_units = 0;
  for (int32_t s = 0; s < n_seqs; s++) n_units += pages[s] * kv_heads;
  memset(parts, 0, (size_t)(n_seqs * kv_heads) * sizeof *parts);
  for (int32_t c = 0; c < n_ctas; c++) {
    const struct k_attn_share *run = &cut[c];
    if (run->begin == run->end) continue;
    int32_t s = run->seq, head = run->head, first = run->first_unit;
    if (run->begin != at || run->end < at) return "units are left out or taken twice";
    if (first > at || at >= first + run->n_units || run->n_units != pages[s]) return "the first unit is not of the segment named";
    while (first < run->end) {
      if (!add_part(&parts[s * kv_heads + head], run, c, first, pages[s], first == run->first_unit)) return "parts do not agree";
      first += pages[s];
      if (++head == kv_heads)
        for (head = 0, s++; s < n_seqs && pages[s] == 0;) s++;
    }
    at = run->end;
  }
  for (int32_t i = 0; i < n_seqs * kv_heads; i++)
    if (pages[i / kv_heads] > 0 && parts[i].n != parts[i].last_cta - parts[i].first_cta + 1) return "a part is missing";
  return at == n_units ? NULL : "units are left out at the end";
}

static void run_cut(int32_t n_seqs, int32_t kv_heads, int32_t most_pages, int32_t sms, uint32_t seed) {
  int32_t *start = host_alloc(((size_t)n_seqs + 1) * 4), *len = host_alloc((size_t)n_seqs * 4), *pages = host_alloc((size_t)n_seqs * 4);
  const int32_t n_ctas = k_attn_decode_ctas(sms, n_seqs, kv_heads);
  struct k_attn_share *cut = host_alloc(k_attn_cut_bytes(sms));
  start[0] = 0;
  for (int32_t s = 0; s < n_seqs; s++) {
    seed = seed * 1664525u + 1013904223u;
    const bool is_single = seed >> 28 != 0;
    len[s] = 1 + (int32_t)((seed >> 8) % (uint32_t)(64 * most_pages));
    start[s + 1] = start[s] + (is_single ? 1 : 2);
    pages[s] = is_single ? (len[s] + 63) / 64 : 0;
  }
  const struct k_kv_view view = {.codec = K_KV_INT4, .n_kv_heads = kv_heads, .n_heads = kv_heads, .head_dim = 128, .n_seqs = n_seqs,
                                 .seq_start = gpu_copy(start, ((size_t)n_seqs + 1) * 4), .kv_len = gpu_copy(len, (size_t)n_seqs * 4)};
  struct k_attn_share *dev = gpu_alloc(k_attn_cut_bytes(sms));
  gpu_check_call(sits_k_attn_cut(&view, dev, sms, gpu_stream()), "sits_k_attn_cut");
  gpu_read(cut, dev, k_attn_cut_bytes(sms));
  const char *wrong = wrong_cut(cut, n_ctas, pages, n_seqs, kv_heads, host_alloc((size_t)(n_seqs * kv_heads) * sizeof(struct cut_part)));
  verdict(wrong == NULL, "cut of %d sequences up to %d pages, %d heads, %d SMs: %s", n_seqs, most_pages, kv_heads, sms,
          wrong ? wrong : "whole");
}

static void run_cuts(void) {
  static const int32_t seqs[] = {1, 7, 33, 64, 300, 1024}, pages[] = {1, 3, 20, 300};
  for (int i = 0; i < (gpu_is_small() ? 3 : 6); i++)
    for (int k = 0; k < 4; k++) run_cut(seqs[i], i % 2 ? 8 : 3, pages[k], k % 2 ? n_sm : 1 + 2 * i, (uint32_t)(i * 4 + k + 1));
  gpu_release_all();
}

int main(void) {
  n_sm = gpu_open();
  gpu_check_call(sits_k_attn_decode_init(), "init");
  gpu_check_call(sits_k_attn_few_init(), "init");
  gpu_check_call(sits_k_kv_fold_init(), "init");
  gpu_check_call(sits_k_attn_prefill_init(), "init");
  gpu_check_call(sits_k_attn_prefill_sm90_init(), "init");
  run_cuts();
  run_config((struct config){32, 8, 128, K_KV_INT4, false, false, 128, 0, "int4 32/8 x128"});
  run_config((struct config){9, 3, 64, K_KV_INT4, false, false, 64, 0, "int4 9/3 x64"});
  run_config((struct config){16, 2, 128, K_KV_INT4, false, true, 128, 0, "int4 16/2 x128 head norms"});
  run_config((struct config){4, 4, 64, K_KV_INT4, true, false, 32, 100, "int4 4/4 x64 interleaved, half rotated, window 100"});
  run_config((struct config){32, 8, 128, K_KV_FP4, false, false, 128, 0, "fp4 32/8 x128"});
  run_config((struct config){9, 3, 64, K_KV_FP4, false, true, 64, 100, "fp4 9/3 x64 head norms, window 100"});
  run_config((struct config){8, 4, 8, K_KV_INT4, true, false, 8, 0, "int4 8/4 x8 interleaved"});
  run_config((struct config){4, 2, 48, K_KV_FP4, false, true, 48, 0, "fp4 4/2 x48 head norms"});
  run_config((struct config){4, 2, 96, K_KV_INT4, false, false, 96, 0, "int4 4/2 x96"});
  run_config((struct config){8, 4, 8, K_KV_F16, true, false, 8, 0, "f16 8/4 x8 interleaved"});
  run_config((struct config){8, 1, 128, K_KV_F16, false, true, 128, 77, "f16 8/1 x128 window 77"});
  run_config((struct config){6, 2, 64, K_KV_FP4, true, false, 64, 0, "fp4 6/2 x64 interleaved"});
  run_config((struct config){9, 3, 64, K_KV_INT8, false, false, 64, 0, "int8 9/3 x64"});
  run_config((struct config){4, 2, 48, K_KV_INT8, false, true, 48, 0, "int8 4/2 x48"});
  run_edges((struct config){32, 8, 128, K_KV_INT4, false, false, 128, 0, "int4 32/8 x128"});
  run_edges((struct config){9, 3, 64, K_KV_FP4, false, true, 64, 0, "fp4 9/3 x64 head norms"});
  return gpu_finish();
}
