/* Slots under a page budget: the pages that a sequence keeps once its table has more. Entry point: kv_budget_drop. */
#include <assert.h>
#include <string.h>

#include "base/mem.h"
#include "kv/kv_internal.h"

bool kv_budget_create(struct kv *kv)
{
  const struct kv_options *o = &kv->options;
  struct kv_budget *b = &kv->budget;
  if (o->page_budget == 0) return true;
  const size_t n_slots = (size_t)o->n_slots, n_columns = (size_t)o->n_columns, n_table = n_slots * (size_t)o->max_pages * n_columns;
  b->numbers = mem_calloc(n_table, sizeof *b->numbers); /* untouched slots cost no memory */
  b->given = mem_calloc(n_table, sizeof *b->given);
  b->mixed = mem_calloc(n_slots * (size_t)o->page_budget, sizeof *b->mixed);
  b->copies = mem_calloc(n_slots * (size_t)o->page_budget * n_columns, sizeof *b->copies);
  b->worths = mem_calloc((size_t)o->page_budget * n_columns, sizeof *b->worths);
  b->is_used = mem_calloc((size_t)o->n_pages * n_columns, 1);
  b->own_of = mem_alloc((size_t)o->n_pages * sizeof *b->own_of);
  for (int32_t i = 0; b->own_of && i < o->n_pages; i++) b->own_of[i] = -1;
  return b->numbers && b->given && b->mixed && b->copies && b->worths && b->is_used && b->own_of;
}

void kv_budget_destroy(struct kv *kv)
{
  struct kv_budget *b = &kv->budget;
  mem_free(b->numbers);
  mem_free((void *)b->given);
  mem_free(b->mixed);
  mem_free(b->copies);
  mem_free(b->worths);
  mem_free(b->is_used);
  mem_free(b->own_of);
}

bool kv_budget_is_full(const struct kv *kv, int32_t slot)
{
  const struct kv_slot *s = &kv->slots[slot];
  return kv->options.page_budget > 0 && s->n_tokens % KV_TOKENS == 0 &&
         s->n_tokens / KV_TOKENS - s->n_dropped + s->n_mixed == kv->options.page_budget;
}

/* The newest whole page that need not stay so: its place becomes free. */
static int32_t entry_to_free(const struct kv *kv, int32_t slot) { return kv->slots[slot].n_tokens / KV_TOKENS - KV_NEWEST_KEPT - 1; }

int32_t kv_budget_extra(const struct kv *kv, int32_t slot)
{
  const int32_t *table = kv_table(kv, slot), last = entry_to_free(kv, slot);
  int32_t n = -(kv->pages[table[last]].n_refs == 1);
  for (int32_t k = 0; k < kv->slots[slot].n_mixed; k++) n += kv->pages[kv_mixed(kv, slot)[k]].n_refs > 1;
  for (int32_t i = 1; i < last; i++) n += table[i] != KV_NO_PAGE && kv->pages[table[i]].n_refs > 1;
  return n;
}

static void copy_block(struct kv *kv, int32_t slot, int32_t *number, int32_t to)
{
  int32_t *copy = kv->budget.copies[(int64_t)slot * kv->options.page_budget * kv->options.n_columns + kv->slots[slot].n_copies++];
  copy[0] = *number;
  copy[1] = to;
  *number = to;
}

/* Entries 1..last are whole no more; their pages are mixed ones from now on, but the last one's, which is returned. */
static int32_t break_up(struct kv *kv, int32_t slot, int32_t last)
{
  struct kv_slot *s = &kv->slots[slot];
  const int32_t n_columns = kv->options.n_columns, freed = kv_table(kv, slot)[last];
  for (int32_t i = 1; i <= last; i++) {
    int32_t *page = &kv_table(kv, slot)[i], *number = kv_numbers(kv, slot) + (int64_t)i * n_columns;
    if (*page == KV_NO_PAGE) continue;
    for (int32_t c = 0; c < n_columns; c++) number[c] = *page * n_columns + c;
    if (i < last) kv_mixed(kv, slot)[s->n_mixed++] = *page;
    *page = KV_NO_PAGE;
    s->n_dropped++;
  }
  return freed;
}

/* Blocks in shared mixed pages move to pages of the slot's own, which take the others' places: own_of says which, by page. */
static void unshare(struct kv *kv, int32_t slot, int32_t last)
{
  const struct kv_slot *s = &kv->slots[slot];
  const int32_t n_columns = kv->options.n_columns;
  int32_t *own_of = kv->budget.own_of, *mixed = kv_mixed(kv, slot), n_shared = 0;
  for (int32_t k = 0; k < s->n_mixed; k++) {
    if (kv->pages[mixed[k]].n_refs == 1) continue;
    own_of[mixed[k]] = kv_page_take(kv);
    n_shared++;
  }
  if (n_shared == 0) return;
  int32_t *number = kv_numbers(kv, slot) + n_columns, *end = number + (int64_t)last * n_columns;
  for (; number < end; number++) {
    if (*number == KV_NO_PAGE) continue;
    const int32_t own = own_of[*number / n_columns];
    if (own >= 0) copy_block(kv, slot, number, own * n_columns + *number % n_columns);
  }
  for (int32_t k = 0; k < s->n_mixed; k++) {
    const int32_t page = mixed[k];
    if (own_of[page] < 0) continue;
    mixed[k] = own_of[page];
    own_of[page] = -1;
    kv_page_unref(kv, page);
  }
}

/* What is left in the page `freed` moves to where blocks were dropped in the mixed pages. */
static void close_ranks(struct kv *kv, int32_t slot, int32_t last, int32_t freed)
{
  const struct kv_slot *s = &kv->slots[slot];
  const int32_t n_columns = kv->options.n_columns, *mixed = kv_mixed(kv, slot);
  uint8_t *is_used = kv->budget.is_used;
  int32_t *first = kv_numbers(kv, slot) + n_columns, *end = first + (int64_t)last * n_columns, k = 0, c = 0;
  for (const int32_t *number = first; number < end; number++)
    if (*number != KV_NO_PAGE) is_used[*number] = 1;
  for (int32_t *number = first; number < end; number++) {
    if (*number == KV_NO_PAGE || *number / n_columns != freed) continue;
    is_used[*number] = 0;
    while (is_used[mixed[k] * n_columns + c]) {
      if (++c < n_columns) continue;
      c = 0;
      k++;
      assert(k < s->n_mixed);
    }
    is_used[mixed[k] * n_columns + c] = 1;
    copy_block(kv, slot, number, mixed[k] * n_columns + c);
  }
  for (k = 0; k < s->n_mixed; k++) memset(is_used + (int64_t)mixed[k] * n_columns, 0, (size_t)n_columns);
}

void kv_budget_drop(struct kv *kv, int32_t slot)
{
  const int32_t n_columns = kv->options.n_columns, n_pages = kv->slots[slot].n_tokens / KV_TOKENS, last = entry_to_free(kv, slot);
  const int32_t freed = break_up(kv, slot, last);
  kv_sparse_drop(kv_given(kv, slot), kv_numbers(kv, slot), n_columns, n_pages, n_columns, kv->budget.worths);
  unshare(kv, slot, last);
  close_ranks(kv, slot, last, freed);
  kv_page_unref(kv, freed);
  kv->n_dropped++;
}

int32_t kv_block_copies(const struct kv *kv, int32_t slot, const int32_t (**copies)[2])
{
  *copies = (const int32_t(*)[2])(kv->budget.copies + (int64_t)slot * kv->options.page_budget * kv->options.n_columns);
  return kv->slots[slot].n_copies;
}

void kv_blocks(const struct kv *kv, int32_t slot, struct kv_blocks *out)
{
  *out = (struct kv_blocks){.numbers = kv->slots[slot].n_dropped > 0 ? kv_numbers(kv, slot) : NULL, .given = kv_given(kv, slot),
                            .nearest = KV_NEWEST_KEPT};
}

void kv_budget_begin_page(struct kv *kv, int32_t slot, int32_t entry)
{
  const int32_t n = kv->options.n_columns;
  memset((void *)(kv_given(kv, slot) + (int64_t)entry * n), 0, (size_t)n * sizeof *kv->budget.given);
}

void kv_budget_fork(struct kv *kv, int32_t from, int32_t to)
{
  const struct kv_slot *s = &kv->slots[from];
  const size_t n = (size_t)s->n_pages * (size_t)kv->options.n_columns;
  memcpy(kv_numbers(kv, to), kv_numbers(kv, from), n * sizeof *kv->budget.numbers);
  memcpy((void *)kv_given(kv, to), (const void *)kv_given(kv, from), n * sizeof *kv->budget.given);
  memcpy(kv_mixed(kv, to), kv_mixed(kv, from), (size_t)s->n_mixed * sizeof *kv->budget.mixed);
  for (int32_t k = 0; k < s->n_mixed; k++) kv_page_ref(kv, kv_mixed(kv, to)[k]);
  kv->slots[to].n_copies = 0; /* they are the other's */
}

void kv_budget_close(struct kv *kv, int32_t slot)
{
  struct kv_slot *s = &kv->slots[slot];
  while (s->n_mixed > 0) kv_page_unref(kv, kv_mixed(kv, slot)[--s->n_mixed]);
}
