/* What pages hold, against the CPU's codecs: groups of keys folded into pages and read back must be the CPU's numbers to the bit, whatever
 * the group's size; values quantised at append must be those of the CPU but where rotations in another order fall to the other side of a
 * rounding. And slots: copies of a fold in place, groups filled in pieces, groups closed after a decode step.
 */
#include <stdio.h>
#include <string.h>

#include "backend/backend.h"
#include "backend/cpu/cpu_kv.h"
#include "backend/cpu/cpu_program.h"
#include "base/mem.h"
#include "gpu_test.h"

enum { L = 2, G = 2, PAGES = 3, SLOTS = 4, LAYER = 1 };

static int32_t n_sm;

struct world {
  int32_t dim, tokens;               /* D; of a group */
  enum k_kv_codec codec;
  struct backend_kv *cpu;
  struct k_kv_view view;
  uint16_t *slots, *back, *staging;  /* [SLOTS][L][G][tokens][D] as the host knows them, as the device has them, plain order; its order */
  size_t slot_elements;
  const char *name;
};

/* Index of (token, channel) in an open tile on the device (kv_tile.cuh). */
static size_t open_at(int32_t d, int32_t token, int32_t ch)
{
  if (!k_kv_has_fragments(d)) return (size_t)token * (size_t)d + (size_t)ch;
  const int32_t tk = token % 16, lane = tk % 8 * 4 + ch % 16 / 4;
  return (size_t)(token / 16 * 16 * d + ch / 16 * 256 + lane * 8 + (ch / 2 % 2 * 2 + tk / 8) * 2 + ch % 2);
}

static struct world make_world(enum k_kv_codec codec, int32_t dim, const char *name)
{
  struct world w = {.dim = dim, .codec = codec, .tokens = k_kv_open_tokens(codec), .name = name};
  struct sits_error err = {0};
  const struct kv_geometry g = {.n_layers = L, .n_kv_heads = G, .head_dim = dim, .n_pages = PAGES,
                                .codec = codec == K_KV_INT4 ? KV_INT4 : codec == K_KV_FP4 ? KV_FP4 : KV_INT8};
  if (cpu_kv_create(&g, cpu_ops_for(cpu_isa_best()), 256, 4, &w.cpu, &err)) verdict(false, "cpu_kv_create: %s", err.text);
  const int64_t page = (int64_t)k_kv_tile_bytes(codec, dim) * G * L, page_bytes = (page + 15) / 16 * 16;
  w.slot_elements = (size_t)L * G * (size_t)w.tokens * (size_t)dim;
  w.slots = host_alloc(SLOTS * w.slot_elements * 2 + 2);
  w.back = host_alloc(SLOTS * w.slot_elements * 2 + 2);
  w.staging = host_alloc(SLOTS * w.slot_elements * 2 + 2);
  for (size_t i = 0; i < SLOTS * w.slot_elements; i++)
    w.slots[i] = half_bits(rand_unit() * (i % 7 == 0 ? 3.f : 0.7f) + (float)(i % 5) - 2.f);
  w.view = (struct k_kv_view){.pool = gpu_zeros((size_t)page_bytes * PAGES), .page_bytes = page_bytes, .codec = codec, .layer = LAYER,
                              .n_layers = L, .n_heads = G, .n_kv_heads = G, .head_dim = dim,
                              .open = gpu_zeros(SLOTS * w.slot_elements * 2 + 2)};
  return w;
}

static uint16_t *slot_of(const struct world *w, int32_t slot, int32_t layer, int32_t head)
{
  return w->slots + (size_t)slot * w->slot_elements + (size_t)(layer * G + head) * (size_t)w->tokens * (size_t)w->dim;
}

/* All slots to the device, or from there to w->back. */
static void move_slots(const struct world *w, bool is_back)
{
  const size_t n = SLOTS * w->slot_elements, tile = (size_t)w->tokens * (size_t)w->dim;
  if (is_back) gpu_read(w->staging, w->view.open, n * 2);
  for (size_t t = 0; t < n / tile; t++)
    for (int32_t j = 0; j < w->tokens; j++)
      for (int32_t ch = 0; ch < w->dim; ch++) {
        const size_t plain = t * tile + (size_t)j * (size_t)w->dim + (size_t)ch, at = t * tile + open_at(w->dim, j, ch);
        if (is_back) w->back[plain] = w->staging[at];
        else w->staging[at] = w->slots[plain];
      }
  if (!is_back) gpu_write(w->view.open, w->staging, n * 2);
}

/* The CPU's numbers of a group: n tokens of plain [tokens][D] keys folded and unfolded. */
static void fold_on_cpu(const struct world *w, const uint16_t *keys, int32_t group, int32_t n, uint16_t *out)
{
  const int32_t d = w->dim, tokens = w->tokens;
  static uint16_t tile[K_PAGE_TOKENS * 256];
  for (int32_t j = 0; j < tokens; j++)
    for (int32_t ch = 0; ch < d; ch++) tile[ch * tokens + j] = keys[j * d + ch];
  unsigned char *block = cpu_kv_block(w->cpu, 0, 0, 0);
  w->cpu->codec->fold(w->cpu, block, group, tile, n);
  w->cpu->codec->unfold(w->cpu, block, group, tile);
  for (int32_t j = 0; j < tokens; j++)
    for (int32_t ch = 0; ch < d; ch++) out[j * d + ch] = tile[ch * tokens + j];
}

/* Values that differ among the first n tokens of a group, in all layers and heads; zeros may differ in sign. */
static int32_t differing(const struct world *w, int32_t slot, int32_t from_slot, int32_t group, int32_t n)
{
  const size_t tile = (size_t)w->tokens * (size_t)w->dim;
  static uint16_t want[K_PAGE_TOKENS * 256];
  int32_t count = 0;
  for (int32_t layer = 0; layer < L; layer++)
    for (int32_t head = 0; head < G; head++) {
      fold_on_cpu(w, slot_of(w, from_slot, layer, head), group, n, want);
      const uint16_t *got = w->back + (size_t)slot * w->slot_elements + (size_t)(layer * G + head) * tile;
      for (size_t i = 0; i < (size_t)n * (size_t)w->dim; i++) count += got[i] != want[i] && ((got[i] | want[i]) & 0x7FFF) != 0;
    }
  return count;
}

static void test_slots(struct world *w)
{
  const int32_t groups = K_PAGE_TOKENS / w->tokens;
  for (int32_t n = w->tokens; n > 0; n = n > 5 ? n / 3 : n - 4) {
    for (int32_t group = 0; group < groups; group++) {
      move_slots(w, false);
      gpu_check_call(sits_k_kv_fold_slot(&w->view, 1, 2, group, n, gpu_stream()), "sits_k_kv_fold_slot");
      gpu_check_call(sits_k_kv_unfold_slot(&w->view, 2, group, 3, gpu_stream()), "sits_k_kv_unfold_slot");
      move_slots(w, true);
      verdict(memcmp(w->back + w->slot_elements, w->slots + w->slot_elements, w->slot_elements * 2) == 0, "%s: folding leaves the slot",
              w->name);
      const int32_t count = differing(w, 3, 1, group, n);
      verdict(count == 0, "%s: group %d of %d tokens, %d numbers differ from the CPU's", w->name, group, n, count);
    }
  }
}

/* A sequence's keys given to sits_k_kv_fold in pieces of `piece` tokens: pages must hold what the CPU makes of the whole groups. */
static void test_pieces(struct world *w, int32_t piece)
{
  enum { LENGTH = 150 };
  const int32_t d = w->dim, table[PAGES] = {2, 0, 1};
  const size_t row = (size_t)G * (size_t)d;
  static uint16_t group[K_PAGE_TOKENS * 256], want[K_PAGE_TOKENS * 256];
  uint16_t *keys = host_alloc(LENGTH * row * 2);
  for (size_t i = 0; i < LENGTH * row; i++) keys[i] = half_bits(rand_unit() + (float)(i % 3));
  struct k_kv_view view = w->view;
  int32_t *ints = gpu_zeros((5 + 2 * LENGTH) * sizeof *ints); /* sequence starts, length, slots, positions; the sequence of each token */
  view.n_seqs = 1, view.table_stride = PAGES, view.block_table = gpu_copy(table, sizeof table);
  view.seq_start = ints, view.kv_len = ints + 2, view.open_slot = ints + 3, view.positions = ints + 5, view.token_seq = ints + 5 + LENGTH;
  view.fresh = gpu_alloc(LENGTH * row * 2);
  for (int32_t at = 0; at < LENGTH; at += piece) {
    const int32_t n = LENGTH - at < piece ? LENGTH - at : piece;
    /* one slot for even groups, one for odd ones */
    int32_t host[5 + LENGTH] = {0, n, at + n, at / w->tokens % 2, (at + n - 1) / w->tokens % 2};
    for (int32_t i = 0; i < n; i++) host[5 + i] = at + i;
    gpu_write(ints, host, sizeof host);
    gpu_write(view.fresh, keys + (size_t)at * row, (size_t)n * row * 2);
    view.n_tokens = n;
    gpu_check_call(sits_k_kv_fold(&view, gpu_stream()), "sits_k_kv_fold");
  }
  int32_t count = 0;
  for (int32_t i = 0; i < LENGTH / w->tokens; i++) {
    const int32_t page = table[i * w->tokens / K_PAGE_TOKENS], in_page = i * w->tokens % K_PAGE_TOKENS / w->tokens;
    gpu_check_call(sits_k_kv_unfold_slot(&view, page, in_page, 3, gpu_stream()), "sits_k_kv_unfold_slot");
    move_slots(w, true);
    for (int32_t head = 0; head < G; head++) {
      for (int32_t j = 0; j < w->tokens; j++)
        memcpy(group + j * d, keys + (size_t)(i * w->tokens + j) * row + (size_t)(head * d), (size_t)d * 2);
      fold_on_cpu(w, group, in_page, w->tokens, want);
      const uint16_t *got = w->back + 3 * w->slot_elements + (size_t)(LAYER * G + head) * (size_t)w->tokens * (size_t)d;
      for (int32_t k = 0; k < w->tokens * d; k++) count += got[k] != want[k] && ((got[k] | want[k]) & 0x7FFF) != 0;
    }
  }
  verdict(count == 0, "%s: pieces of %d tokens, %d numbers differ from the CPU's", w->name, piece, count);
}

/* Groups that a decode step ends, in all layers: of three sequences the first and the last. */
static void test_close(struct world *w)
{
  const int32_t table[3] = {2, 0, 1}, start[4] = {0, 1, 2, 3}, slot[6] = {1, 1, 0, 0, 2, 2};
  const int32_t len[3] = {w->tokens, w->tokens - 1, w->tokens};
  struct k_kv_view view = w->view;
  move_slots(w, false);
  view.n_seqs = view.n_tokens = 3, view.table_stride = 1, view.block_table = gpu_copy(table, sizeof table);
  view.seq_start = gpu_copy(start, sizeof start), view.kv_len = gpu_copy(len, sizeof len), view.open_slot = gpu_copy(slot, sizeof slot);
  gpu_check_call(sits_k_kv_close(&view, n_sm, gpu_stream()), "sits_k_kv_close");
  for (int32_t s = 0; s < 3; s += 2) {
    gpu_check_call(sits_k_kv_unfold_slot(&view, table[s], 0, 3, gpu_stream()), "sits_k_kv_unfold_slot");
    move_slots(w, true);
    const int32_t count = differing(w, 3, slot[2 * s], 0, w->tokens);
    verdict(count == 0, "%s: closed in sequence %d, %d numbers differ from the CPU's", w->name, s, count);
  }
}

/* Values (and keys of int8) as appended, against the CPU's rotation and quantiser. */
static void test_values(struct world *w, bool is_key)
{
  enum { N = 70 };
  const int32_t d = w->dim, table[2] = {2, 0}, start[2] = {0, N}, len = N, slot[2] = {0, 1};
  const size_t ld = 3 * (size_t)G * (size_t)d;
  uint16_t *half = host_alloc(N * ld * 2);
  const size_t all = (size_t)N * G * (size_t)d;
  float *freq = host_alloc((size_t)d * 4), *got = host_alloc(all * 4), *want = host_alloc(all * 4);
  for (size_t i = 0; i < N * ld; i++) half[i] = half_bits(rand_unit());
  for (int32_t i = 0; i < d; i++) freq[i] = 0.f;
  int32_t positions[N], seq[N] = {0};
  for (int32_t i = 0; i < N; i++) positions[i] = i;
  struct k_kv_view view = w->view;
  view.n_tokens = N, view.n_seqs = 1, view.table_stride = 2, view.block_table = gpu_copy(table, sizeof table);
  view.seq_start = gpu_copy(start, sizeof start), view.kv_len = gpu_copy(&len, 4), view.open_slot = gpu_copy(slot, sizeof slot);
  view.positions = gpu_copy(positions, sizeof positions), view.token_seq = gpu_copy(seq, sizeof seq);
  view.fresh = gpu_alloc(N * (size_t)G * (size_t)d * 2);
  const struct k_rope_append append = {.kv = view, .rope = {gpu_copy(freq, (size_t)d * 4), 1.f, 2, false},
                                       .qkv = {.rows = gpu_copy(half, N * ld * 2)}, .eps = 1e-5f,
                                       .q = gpu_alloc(N * (size_t)G * (size_t)d * 2)};
  gpu_check_call(sits_k_rope_append(&append, gpu_stream()), "sits_k_rope_append");
  const int64_t capacity = 128, exact = k_kv_exact_rows(N, 1);
  uint16_t *rows = host_alloc((size_t)capacity * G * (size_t)d * 2);
  const size_t gathered = (size_t)capacity * G * (size_t)d * 2;
  const struct k_kv_gather gather = {.kv = view, .n_seqs = 1, .max_pages = 2, .capacity = capacity,
                                     .k = gpu_zeros(gathered), .v = gpu_zeros(gathered),
                                     .exact = gpu_alloc((size_t)exact * G * (size_t)d * 2), .exact_capacity = exact};
  gpu_check_call(sits_k_kv_gather(&gather, gpu_stream()), "sits_k_kv_gather");
  gpu_read(rows, is_key ? gather.k : gather.v, (size_t)capacity * G * (size_t)d * 2);
  const int32_t dv = cpu_kv_padded(d);
  float *block_values = host_alloc(CPU_KV_SCRATCH_FLOATS(d) * 4), *acc = host_alloc((size_t)dv * 4), one[K_PAGE_TOKENS] = {0};
  int32_t differ = 0;
  for (int32_t head = 0; head < G; head++)
    for (int32_t t = 0; t < N; t++) {
      float v[256];
      for (int32_t e = 0; e < d; e++) v[e] = half_value(half[(size_t)t * ld + (size_t)(((is_key ? G : 2 * G) + head) * d + e)]);
      cpu_rotate_head(w->cpu->ops, v, d);
      unsigned char *block = cpu_kv_block(w->cpu, 0, 0, 0);
      if (is_key) w->cpu->codec->append_k(w->cpu, block, t % K_PAGE_TOKENS, v, NULL);
      else w->cpu->codec->append_v(w->cpu, block, t % K_PAGE_TOKENS, v);
      if (is_key) { /* one query a channel */
        for (int32_t e = 0; e < d; e++) {
          float q[256] = {0}, scores[K_PAGE_TOKENS];
          q[e] = 1.f;
          w->cpu->codec->attend_k(w->cpu, block, q, d, 1, K_PAGE_TOKENS, scores, K_PAGE_TOKENS, block_values, NULL);
          v[e] = scores[t % K_PAGE_TOKENS];
        }
      } else {
        memset(acc, 0, (size_t)dv * 4);
        one[t % K_PAGE_TOKENS] = 1.f;
        w->cpu->codec->attend_v(w->cpu, block, one, K_PAGE_TOKENS, 1, K_PAGE_TOKENS, acc, block_values, NULL);
        one[t % K_PAGE_TOKENS] = 0.f;
        memcpy(v, acc, (size_t)d * 4);
      }
      for (int32_t e = 0; e < d; e++) {
        const size_t i = ((size_t)head * N + (size_t)t) * (size_t)d + (size_t)e;
        want[i] = round_half(v[e]), got[i] = half_value(rows[((size_t)head * (size_t)capacity + (size_t)t) * (size_t)d + (size_t)e]);
        differ += want[i] != got[i];
      }
    }
  const double error = relative_error(got, want, all);
  verdict(error < 0.02 && (size_t)differ * 100 < all * 2, "%s: %s, %d of %zu numbers differ from the CPU's, %.1e", w->name,
          is_key ? "keys" : "values", differ, all, error);
}

static void run(enum k_kv_codec codec, int32_t dim, const char *name)
{
  struct world w = make_world(codec, dim, name);
  if (k_kv_has_nibbles(codec)) {
    static const int32_t pieces[] = {1, 7, 32, 33, 64, 150};
    test_slots(&w);
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) test_pieces(&w, pieces[i]);
    test_close(&w);
  } else
    test_values(&w, true);
  test_values(&w, false);
  cpu_kv_destroy(w.cpu);
  gpu_release_all();
}

int main(void)
{
  n_sm = gpu_open();
  gpu_check_call(sits_k_kv_fold_init(), "init");
  run(K_KV_INT4, 128, "int4 x128");
  run(K_KV_INT4, 64, "int4 x64");
  run(K_KV_INT4, 8, "int4 x8");
  run(K_KV_INT4, 96, "int4 x96");
  run(K_KV_FP4, 128, "fp4 x128");
  run(K_KV_FP4, 64, "fp4 x64");
  run(K_KV_FP4, 48, "fp4 x48");
  run(K_KV_FP4, 256, "fp4 x256");
  run(K_KV_INT8, 128, "int8 x128");
  run(K_KV_INT8, 48, "int8 x48");
  return gpu_finish();
}
