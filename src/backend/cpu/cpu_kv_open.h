/* Open groups: keys of codecs that quantise many tokens together, kept in f16 while their group is incomplete.
 *
 * Whose groups they are, and when they are folded: backend/kv_open.h. A tile is the f16 keys of one group and kv head in one layer,
 * [D][open_tokens]; a group that a batch both begins and completes lives in a scratch tile, reused layer by layer.
 */
#ifndef SITS_BACKEND_CPU_CPU_KV_OPEN_H
#define SITS_BACKEND_CPU_CPU_KV_OPEN_H

#include <stdint.h>

#include "sits2026/status.h"

struct backend_batch;
struct backend_kv;
struct cpu_kv_open;                  /* NULL for codecs without open groups */

enum sits_status cpu_kv_open_create(struct backend_kv *kv, int32_t max_tokens, int32_t max_seqs, struct cpu_kv_open **out)
    SITS_MUST_CHECK;
void cpu_kv_open_destroy(struct cpu_kv_open *open);

/* Decide where the keys of every token of the batch go: tiles[t] is a number for cpu_kv_open_tile. */
void cpu_kv_open_begin(struct backend_kv *kv, const struct backend_batch *batch, int32_t *tiles);
uint16_t *cpu_kv_open_tile(const struct backend_kv *kv, int32_t tile, int32_t layer, int32_t head);

/* Store one key in a tile at a token of the group. */
void cpu_kv_open_append(const struct backend_kv *kv, uint16_t *tile, int32_t token, const float *k);

void cpu_kv_open_copied(struct backend_kv *kv, int32_t from_page, int32_t to_page); /* after the copy of the page's bytes */
void cpu_kv_open_written(struct backend_kv *kv, int32_t page);                      /* its slots are stale */
void cpu_kv_open_fold_into(const struct backend_kv *kv, int32_t page, void *image); /* of a page being swapped out */

#endif
