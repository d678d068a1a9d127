/* Who holds which open group: the book-keeping of codecs that quantise the keys of many tokens together (int4 32, fp4 64), the same for all
 * backends.
 *
 * Vocabulary: a group is `tokens` consecutive positions of a sequence (a page holds a whole number of them); a slot is room for the f16
 * keys of one group in all layers and heads, which a backend owns and this file numbers. A query reads its own group in f16 from its slot,
 * all older ones from the page, whether or not the group has been folded meanwhile: so a token's result does not depend on how many tokens
 * were appended with it.
 *
 * A group that a batch leaves incomplete, or that was incomplete before it, has a slot; one that a batch both begins and completes needs
 * none (scratch). Slots are found by (page, group in page) and recycled, complete groups first, then the least recently used; an incomplete
 * one is first folded as it is, and unfolded again should its sequence go on (that costs precision, never correctness; with more slots than
 * sequences it takes an abandoned sequence to happen).
 *
 * Rules: 1. kv_open_begin before a batch runs, on the calling thread; it cannot fail (there are two slots for each sequence of a batch).
 * 2. Pages that leave the device carry their open group folded; copied pages take their slot along.
 */
#ifndef SITS_BACKEND_KV_OPEN_H
#define SITS_BACKEND_KV_OPEN_H

#include <stdbool.h>
#include <stdint.h>

struct backend_batch;
struct kv_open;

/* What the backend does with the keys, in the order of the calls and before the batch that follows. */
struct kv_open_ops {
  void (*fold)(void *user, int32_t slot, int32_t page, int32_t group, int32_t n_tokens); /* quantise the slot's first n into the page */
  void (*unfold)(void *user, int32_t page, int32_t group, int32_t slot);                 /* and the reverse */
  void (*copy)(void *user, int32_t from_slot, int32_t to_slot);
};

/* Slots for batches of max_seqs sequences. */
static inline int32_t kv_open_slots(int32_t max_seqs) { return 2 * max_seqs + 8; } /* a group that a chunk completes, one that it begins */

/* NULL: out of memory. tokens divides KV_PAGE_TOKENS. */
struct kv_open *kv_open_create(int32_t tokens, int32_t n_pages, int32_t n_slots, struct kv_open_ops ops, void *user);
void kv_open_destroy(struct kv_open *open);

/* Decide where the keys of every token of the batch go: tiles[t] is a slot, or -1 - i, the i-th group that needs none. */
void kv_open_begin(struct kv_open *open, const struct backend_batch *batch, int32_t *tiles);

/* The slots of the newest batch are recycled by no other until kv_open_release: it goes on while others run. One such batch at a time.
 * is_whole: it has run to its end; else its groups hold what they held before it, and what it appended is appended again, if at all. */
void kv_open_hold(struct kv_open *open);
void kv_open_release(struct kv_open *open, bool is_whole);

void kv_open_copied(struct kv_open *open, int32_t from_page, int32_t to_page); /* after the copy of the page's bytes */
void kv_open_written(struct kv_open *open, int32_t page);                      /* its slots are stale */
/* For each incomplete group of a page that has a slot: `each` with slot, group and tokens. */
void kv_open_visit(const struct kv_open *open, int32_t page, void (*each)(void *user, int32_t slot, int32_t group, int32_t n_tokens),
                   void *user);

#endif
