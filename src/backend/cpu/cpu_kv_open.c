/* Tiles of open groups; see cpu_kv_open.h. */
#include "backend/cpu/cpu_kv_open.h"

#include <string.h>

#include "backend/cpu/cpu_kv.h"
#include "backend/kv_open.h"
#include "base/mem.h"

struct cpu_kv_open {
  struct kv_open *slots;             /* whose they are */
  struct backend_kv *kv;
  int32_t tokens;                    /* of a group */
  size_t tile_elements;              /* D * tokens */
  uint16_t *keys;                    /* [slots][L][G][D][tokens] */
  uint16_t *scratch;                 /* [groups of a batch][G][D][tokens] */
};

/* Fold a slot's group, as far as it goes, into a page (or its image) of the same layout. */
static void fold_slot(const struct backend_kv *kv, int32_t slot, int32_t group, int32_t n_tokens, unsigned char *page)
{
  for (int32_t layer = 0; layer < kv->geometry.n_layers; layer++)
    for (int32_t head = 0; head < kv->geometry.n_kv_heads; head++)
      kv->codec->fold(kv, page + (size_t)layer * kv->layer_bytes + (size_t)head * kv->block_bytes, group,
                      cpu_kv_open_tile(kv, slot, layer, head), n_tokens);
}

static void fold(void *user, int32_t slot, int32_t page, int32_t group, int32_t n_tokens)
{
  const struct backend_kv *kv = ((struct cpu_kv_open *)user)->kv;
  fold_slot(kv, slot, group, n_tokens, cpu_kv_block(kv, page, 0, 0));
}

static void unfold(void *user, int32_t page, int32_t group, int32_t slot)
{
  const struct backend_kv *kv = ((struct cpu_kv_open *)user)->kv;
  for (int32_t layer = 0; layer < kv->geometry.n_layers; layer++)
    for (int32_t head = 0; head < kv->geometry.n_kv_heads; head++)
      kv->codec->unfold(kv, cpu_kv_block(kv, page, layer, head), group, cpu_kv_open_tile(kv, slot, layer, head));
}

static void copy(void *user, int32_t from_slot, int32_t to_slot)
{
  const struct cpu_kv_open *o = user;
  const struct kv_geometry *g = &o->kv->geometry;
  memcpy(cpu_kv_open_tile(o->kv, to_slot, 0, 0), cpu_kv_open_tile(o->kv, from_slot, 0, 0),
         o->tile_elements * (size_t)g->n_kv_heads * (size_t)g->n_layers * sizeof *o->keys);
}

enum sits_status cpu_kv_open_create(struct backend_kv *kv, int32_t max_tokens, int32_t max_seqs, struct cpu_kv_open **out)
{
  const struct kv_geometry *g = &kv->geometry;
  struct cpu_kv_open *o = mem_calloc(1, sizeof *o);
  if (o == NULL) return SITS_NOMEM;
  const int32_t n_slots = kv_open_slots(max_seqs);
  o->kv = kv;
  o->tokens = kv->codec->open_tokens;
  o->tile_elements = (size_t)g->head_dim * (size_t)o->tokens;
  const size_t per_layer = o->tile_elements * (size_t)g->n_kv_heads;
  o->slots = kv_open_create(o->tokens, g->n_pages, n_slots, (struct kv_open_ops){fold, unfold, copy}, o);
  o->keys = mem_calloc((size_t)n_slots * (size_t)g->n_layers, per_layer * sizeof *o->keys); /* untouched slots cost nothing */
  o->scratch = mem_calloc((size_t)(max_tokens / o->tokens + 1), per_layer * sizeof *o->scratch);
  if (o->slots == NULL || o->keys == NULL || o->scratch == NULL) {
    cpu_kv_open_destroy(o);
    return SITS_NOMEM;
  }
  *out = o;
  return SITS_OK;
}

void cpu_kv_open_destroy(struct cpu_kv_open *o)
{
  if (o == NULL) return;
  kv_open_destroy(o->slots);
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

void cpu_kv_open_begin(struct backend_kv *kv, const struct backend_batch *batch, int32_t *tiles)
{
  kv_open_begin(kv->open->slots, batch, tiles);
}

void cpu_kv_open_written(struct backend_kv *kv, int32_t page) { kv_open_written(kv->open->slots, page); }

void cpu_kv_open_copied(struct backend_kv *kv, int32_t from_page, int32_t to_page)
{
  kv_open_copied(kv->open->slots, from_page, to_page);
}

struct image { const struct backend_kv *kv; unsigned char *bytes; };

static void fold_into(void *user, int32_t slot, int32_t group, int32_t n_tokens)
{
  const struct image *image = user;
  fold_slot(image->kv, slot, group, n_tokens, image->bytes);
}

void cpu_kv_open_fold_into(const struct backend_kv *kv, int32_t page, void *image)
{
  struct image to = {kv, image};
  kv_open_visit(kv->open->slots, page, fold_into, &to);
}
