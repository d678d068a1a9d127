/* Slots of open groups; see cpu_kv_open.h. */
#include "backend/cpu/cpu_kv_open.h"

#include <string.h>

#include "backend/cpu/cpu_kv.h"
#include "base/mem.h"

#define P KV_PAGE_TOKENS
#define NONE (-1)

struct slot {
  int32_t key;                       /* page * groups per page + group; NONE = unused */
  int32_t n_tokens;                  /* in the group; open_tokens = complete, and folded into the page */
  uint64_t used;                     /* batch number of the last use */
};

struct cpu_kv_open {
  int32_t tokens;                    /* of a group */
  int32_t n_slots, n_scratch;
  size_t tile_elements;              /* D * tokens */
  struct slot *slots;                /* [n_slots] */
  int32_t *slot_of;                  /* [n_pages * groups per page] or NONE */
  uint16_t *keys;                    /* [n_slots][L][G][D][tokens] */
  uint16_t *scratch;                 /* [n_scratch][G][D][tokens] */
  uint64_t n_batches;
};

static int32_t groups_per_page(const struct cpu_kv_open *o) { return P / o->tokens; }

enum sits_status cpu_kv_open_create(const struct backend_kv *kv, int32_t max_tokens, int32_t max_seqs, struct cpu_kv_open **out)
{
  const struct kv_geometry *g = &kv->geometry;
  struct cpu_kv_open *o = mem_calloc(1, sizeof *o);
  if (o == NULL) return SITS_NOMEM;
  o->tokens = kv->codec->open_tokens;
  o->n_slots = 2 * max_seqs + 8; /* of each sequence a group that its chunk completes and one that it begins; some to spare */
  o->n_scratch = max_tokens / o->tokens + 1;
  o->tile_elements = (size_t)g->head_dim * (size_t)o->tokens;
  const size_t per_layer = o->tile_elements * (size_t)g->n_kv_heads;
  const size_t n_keys = (size_t)g->n_pages * (size_t)groups_per_page(o);
  o->slots = mem_calloc((size_t)o->n_slots, sizeof *o->slots);
  o->slot_of = mem_alloc(n_keys * sizeof *o->slot_of);
  o->keys = mem_calloc((size_t)o->n_slots * (size_t)g->n_layers, per_layer * sizeof *o->keys); /* untouched slots cost nothing */
  o->scratch = mem_calloc((size_t)o->n_scratch, per_layer * sizeof *o->scratch);
  if (o->slots == NULL || o->slot_of == NULL || o->keys == NULL || o->scratch == NULL) {
    cpu_kv_open_destroy(o);
    return SITS_NOMEM;
  }
  for (int32_t i = 0; i < o->n_slots; i++) o->slots[i].key = NONE;
  for (size_t i = 0; i < n_keys; i++) o->slot_of[i] = NONE;
  *out = o;
  return SITS_OK;
}

void cpu_kv_open_destroy(struct cpu_kv_open *o)
{
  if (o == NULL) return;
  mem_free(o->slots);
  mem_free(o->slot_of);
  mem_free(o->keys);
  mem_free(o->scratch);
  mem_free(o);
}

/* Tile numbers: slots from 0 up, scratch tiles from -1 down. */
uint16_t *cpu_kv_open_tile(const struct backend_kv *kv, int32_t tile, int32_t layer, int32_t head)
{
  const struct cpu_kv_open *o = kv->open;
  const int32_t G = kv->geometry.n_kv_heads;
  if (tile < 0) return o->scratch + ((size_t)(-1 - tile) * (size_t)G + (size_t)head) * o->tile_elements;
  const size_t index = ((size_t)tile * (size_t)kv->geometry.n_layers + (size_t)layer) * (size_t)G + (size_t)head;
  return o->keys + index * o->tile_elements;
}

void cpu_kv_open_append(const struct backend_kv *kv, uint16_t *tile, int32_t token, const float *k)
{
  const int32_t D = kv->geometry.head_dim, stride = kv->open->tokens;
  uint16_t half[64];
  for (int32_t d = 0; d < D; d += 64) {
    const int32_t n = D - d < 64 ? D - d : 64;
    kv->ops->to_f16(k + d, n, half);
    for (int32_t i = 0; i < n; i++) tile[(size_t)(d + i) * (size_t)stride + (size_t)token] = half[i];
  }
}

/* Fold the slot's group, as far as it goes, into a page (or its image) of the same layout. */
static void fold_slot(const struct backend_kv *kv, int32_t slot, unsigned char *page)
{
  const struct cpu_kv_open *o = kv->open;
  const int32_t group = o->slots[slot].key % groups_per_page(o);
  for (int32_t layer = 0; layer < kv->geometry.n_layers; layer++)
    for (int32_t head = 0; head < kv->geometry.n_kv_heads; head++)
      kv->codec->fold(kv, page + (size_t)layer * kv->layer_bytes + (size_t)head * kv->block_bytes, group,
                      cpu_kv_open_tile(kv, slot, layer, head), o->slots[slot].n_tokens);
}

static bool is_incomplete(const struct cpu_kv_open *o, int32_t slot) { return o->slots[slot].n_tokens < o->tokens; }

static void forget(struct cpu_kv_open *o, int32_t slot)
{
  if (o->slots[slot].key != NONE) o->slot_of[o->slots[slot].key] = NONE;
  o->slots[slot].key = NONE;
}

/* What taking a slot costs: nothing, untouched memory, or a fold. */
static int cost_of(const struct cpu_kv_open *o, int32_t slot)
{
  return o->slots[slot].key == NONE ? 1 : is_incomplete(o, slot) ? 2 : 0;
}

/* A slot to use for key: a complete one, else an unused one, else the least recently used, folded first. Never one that this batch uses. */
static int32_t take_slot(struct backend_kv *kv, int32_t key)
{
  struct cpu_kv_open *o = kv->open;
  int32_t best = NONE;
  for (int32_t i = 0; i < o->n_slots; i++) {
    const struct slot *s = &o->slots[i];
    if (s->key != NONE && s->used == o->n_batches) continue;
    if (best == NONE || cost_of(o, i) < cost_of(o, best) || (cost_of(o, i) == cost_of(o, best) && s->used < o->slots[best].used)) best = i;
  }
  if (o->slots[best].key != NONE && is_incomplete(o, best) && o->slots[best].n_tokens > 0)
    fold_slot(kv, best, cpu_kv_block(kv, o->slots[best].key / groups_per_page(o), 0, 0));
  forget(o, best);
  o->slots[best].key = key;
  o->slots[best].n_tokens = 0;
  o->slot_of[key] = best;
  return best;
}

/* The slot of a group that holds n tokens before this batch, filled from the page when it is not there. */
static int32_t slot_for(struct backend_kv *kv, int32_t key, int32_t n)
{
  struct cpu_kv_open *o = kv->open;
  int32_t slot = o->slot_of[key];
  if (slot == NONE || o->slots[slot].n_tokens < n) {
    const int32_t page = key / groups_per_page(o), group = key % groups_per_page(o);
    const bool is_new = slot == NONE;
    if (is_new) slot = take_slot(kv, key);
    for (int32_t layer = 0; layer < kv->geometry.n_layers && n > 0; layer++)
      for (int32_t head = 0; head < kv->geometry.n_kv_heads; head++)
        kv->codec->unfold(kv, cpu_kv_block(kv, page, layer, head), group, cpu_kv_open_tile(kv, slot, layer, head));
  }
  o->slots[slot].used = o->n_batches;
  return slot;
}

void cpu_kv_open_begin(struct backend_kv *kv, const struct backend_batch *batch, int32_t *tiles)
{
  struct cpu_kv_open *o = kv->open;
  int32_t n_scratch = 0;
  o->n_batches++;
  for (int32_t s = 0; s < batch->n_seqs; s++) {
    const int32_t t1 = batch->seq_start[s + 1];
    for (int32_t t = batch->seq_start[s]; t < t1;) {
      const int32_t position = batch->positions[t], before = position % o->tokens;
      const int32_t n = o->tokens - before < t1 - t ? o->tokens - before : t1 - t; /* of this group in this batch */
      const int32_t page = batch->block_table[(int64_t)s * batch->table_stride + position / P];
      const int32_t key = page * groups_per_page(o) + position % P / o->tokens;
      int32_t tile;
      if (before == 0 && n == o->tokens) {
        if (o->slot_of[key] != NONE) forget(o, o->slot_of[key]); /* of the page's last owner: it must not be folded over this group */
        tile = -1 - n_scratch++;
      } else {
        tile = slot_for(kv, key, before);
        o->slots[tile].n_tokens = before + n;
      }
      for (int32_t i = 0; i < n; i++) tiles[t + i] = tile;
      t += n;
    }
  }
}

void cpu_kv_open_written(struct backend_kv *kv, int32_t page)
{
  struct cpu_kv_open *o = kv->open;
  for (int32_t g = 0; g < groups_per_page(o); g++) {
    const int32_t slot = o->slot_of[page * groups_per_page(o) + g];
    if (slot != NONE) forget(o, slot);
  }
}

void cpu_kv_open_copied(struct backend_kv *kv, int32_t from_page, int32_t to_page)
{
  struct cpu_kv_open *o = kv->open;
  cpu_kv_open_written(kv, to_page);
  for (int32_t g = 0; g < groups_per_page(o); g++) {
    const int32_t from = o->slot_of[from_page * groups_per_page(o) + g];
    if (from == NONE || !is_incomplete(o, from)) continue;
    o->n_batches++; /* so that the source is not taken, and older ones may be */
    o->slots[from].used = o->n_batches;
    const int32_t to = take_slot(kv, to_page * groups_per_page(o) + g);
    memcpy(cpu_kv_open_tile(kv, to, 0, 0), cpu_kv_open_tile(kv, from, 0, 0),
           o->tile_elements * (size_t)kv->geometry.n_kv_heads * (size_t)kv->geometry.n_layers * sizeof *o->keys);
    o->slots[to].n_tokens = o->slots[from].n_tokens;
    o->slots[to].used = o->n_batches;
  }
}

void cpu_kv_open_fold_into(const struct backend_kv *kv, int32_t page, void *image)
{
  const struct cpu_kv_open *o = kv->open;
  for (int32_t g = 0; g < groups_per_page(o); g++) {
    const int32_t slot = o->slot_of[page * groups_per_page(o) + g];
    if (slot != NONE && is_incomplete(o, slot) && o->slots[slot].n_tokens > 0) fold_slot(kv, slot, image);
  }
}
