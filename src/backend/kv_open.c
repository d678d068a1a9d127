/* Slots of open groups; see kv_open.h. */
#include "backend/kv_open.h"

#include "backend/backend.h"
#include "base/mem.h"

#define P KV_PAGE_TOKENS
#define NONE (-1)

struct slot {
  int32_t key;                       /* page * groups per page + group; NONE = unused */
  int32_t n_tokens;                  /* in the group; all of them = complete, and folded into the page */
  int32_t n_before;                  /* the same before the newest batch that used it */
  uint64_t used;                     /* batch number of the last use */
  bool is_held;
};

struct kv_open {
  int32_t tokens;                    /* of a group */
  int32_t n_slots;
  struct slot *slots;                /* [n_slots] */
  int32_t *slot_of;                  /* [n_pages * groups per page] or NONE */
  uint64_t n_batches;
  struct kv_open_ops ops;
  void *user;
};

static int32_t groups_per_page(const struct kv_open *o) { return P / o->tokens; }

struct kv_open *kv_open_create(int32_t tokens, int32_t n_pages, int32_t n_slots, struct kv_open_ops ops, void *user)
{
  struct kv_open *o = mem_calloc(1, sizeof *o);
  if (o == NULL) return NULL;
  *o = (struct kv_open){.tokens = tokens, .n_slots = n_slots, .ops = ops, .user = user};
  const size_t n_keys = (size_t)n_pages * (size_t)groups_per_page(o);
  o->slots = mem_calloc((size_t)n_slots, sizeof *o->slots);
  o->slot_of = mem_alloc(n_keys * sizeof *o->slot_of);
  if (o->slots == NULL || o->slot_of == NULL) {
    kv_open_destroy(o);
    return NULL;
  }
  for (int32_t i = 0; i < n_slots; i++) o->slots[i].key = NONE;
  for (size_t i = 0; i < n_keys; i++) o->slot_of[i] = NONE;
  return o;
}

void kv_open_destroy(struct kv_open *o)
{
  if (o == NULL) return;
  mem_free(o->slots);
  mem_free(o->slot_of);
  mem_free(o);
}

static bool is_incomplete(const struct kv_open *o, int32_t slot) { return o->slots[slot].n_tokens < o->tokens; }

static void forget(struct kv_open *o, int32_t slot)
{
  if (o->slots[slot].key != NONE) o->slot_of[o->slots[slot].key] = NONE;
  o->slots[slot].key = NONE;
  o->slots[slot].is_held = false;
}

/* What taking a slot costs: nothing, untouched memory, or a fold. */
static int cost_of(const struct kv_open *o, int32_t slot)
{
  return o->slots[slot].key == NONE ? 1 : is_incomplete(o, slot) ? 2 : 0;
}

/* A slot to use for key: a complete one, else an unused one, else the least recently used, folded first. Never one that this batch uses. */
static int32_t take_slot(struct kv_open *o, int32_t key)
{
  int32_t best = NONE;
  for (int32_t i = 0; i < o->n_slots; i++) {
    const struct slot *s = &o->slots[i];
    if (s->key != NONE && (s->used == o->n_batches || s->is_held)) continue;
    if (best == NONE || cost_of(o, i) < cost_of(o, best) || (cost_of(o, i) == cost_of(o, best) && s->used < o->slots[best].used)) best = i;
  }
  const struct slot *s = &o->slots[best];
  if (s->key != NONE && is_incomplete(o, best) && s->n_tokens > 0)
    o->ops.fold(o->user, best, s->key / groups_per_page(o), s->key % groups_per_page(o), s->n_tokens);
  forget(o, best);
  o->slots[best].key = key;
  o->slots[best].n_tokens = 0;
  o->slot_of[key] = best;
  return best;
}

/* The slot of a group that holds n tokens before this batch, filled from the page when it is not there. */
static int32_t slot_for(struct kv_open *o, int32_t key, int32_t n)
{
  int32_t slot = o->slot_of[key];
  if (slot == NONE || o->slots[slot].n_tokens < n) {
    if (slot == NONE) slot = take_slot(o, key);
    if (n > 0) o->ops.unfold(o->user, key / groups_per_page(o), key % groups_per_page(o), slot);
  }
  o->slots[slot].used = o->n_batches;
  return slot;
}

void kv_open_begin(struct kv_open *o, const struct backend_batch *batch, int32_t *tiles)
{
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
        tile = slot_for(o, key, before);
        o->slots[tile].n_before = before;
        o->slots[tile].n_tokens = before + n;
      }
      for (int32_t i = 0; i < n; i++) tiles[t + i] = tile;
      t += n;
    }
  }
}

void kv_open_hold(struct kv_open *o)
{
  for (int32_t i = 0; i < o->n_slots; i++) o->slots[i].is_held = o->slots[i].key != NONE && o->slots[i].used == o->n_batches;
}

void kv_open_release(struct kv_open *o, bool is_whole)
{
  for (int32_t i = 0; i < o->n_slots; i++) {
    struct slot *s = &o->slots[i];
    if (s->is_held && !is_whole) {
      s->n_tokens = s->n_before; /* some layers may have more, and have folded it; the sequence says it again */
      if (s->n_before == 0) forget(o, i);
    }
    s->is_held = false;
  }
}

void kv_open_written(struct kv_open *o, int32_t page)
{
  for (int32_t g = 0; g < groups_per_page(o); g++) {
    const int32_t slot = o->slot_of[page * groups_per_page(o) + g];
    if (slot != NONE) forget(o, slot);
  }
}

void kv_open_copied(struct kv_open *o, int32_t from_page, int32_t to_page)
{
  kv_open_written(o, to_page);
  for (int32_t g = 0; g < groups_per_page(o); g++) {
    const int32_t from = o->slot_of[from_page * groups_per_page(o) + g];
    if (from == NONE || !is_incomplete(o, from)) continue;
    o->n_batches++; /* so that the source is not taken, and older ones may be */
    o->slots[from].used = o->n_batches;
    const int32_t to = take_slot(o, to_page * groups_per_page(o) + g);
    o->ops.copy(o->user, from, to);
    o->slots[to].n_tokens = o->slots[from].n_tokens;
    o->slots[to].used = o->n_batches;
  }
}

void kv_open_visit(const struct kv_open *o, int32_t page, void (*each)(void *user, int32_t slot, int32_t group, int32_t n_tokens),
                   void *user)
{
  for (int32_t g = 0; g < groups_per_page(o); g++) {
    const int32_t slot = o->slot_of[page * groups_per_page(o) + g];
    if (slot != NONE && is_incomplete(o, slot) && o->slots[slot].n_tokens > 0) each(user, slot, g, o->slots[slot].n_tokens);
  }
}
