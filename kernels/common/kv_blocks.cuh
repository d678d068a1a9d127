/* Where a layer and KV head find what they have of a table entry's page (kernels.h: k_kv_blocks). */
#ifndef SITS_KERNELS_KV_BLOCKS_CUH
#define SITS_KERNELS_KV_BLOCKS_CUH

#include <limits.h>

#include "common/kv_tile.cuh"

namespace kv {

SITS_DEV int columns(const k_kv_view &kv) { return kv.n_layers * kv.n_kv_heads; }

SITS_DEV uint8_t *numbered_tile(const k_kv_view &kv, int number) {
  const int n = columns(kv), page = number / n;
  return kv.pool + (size_t)page * kv.page_bytes + (size_t)(number - page * n) * k_kv_tile_bytes(kv.codec, kv.head_dim);
}

/* Of the sequence's arrays of blocks, the view's layer. */
SITS_DEV size_t block_at(const k_kv_view &kv, int row0, int entry, int head) {
  return (size_t)(row0 + entry) * columns(kv) + kv.layer * kv.n_kv_heads + head;
}

/* NULL: nothing any more. */
SITS_DEV const uint8_t *entry_tile(const k_kv_view &kv, const k_kv_blocks &blocks, int row0, int seq, int entry, int head) {
  const int page = kv.block_table[(size_t)seq * kv.table_stride + entry];
  if (page >= 0) return page_tile(kv, page, kv.layer, head);
  const int number = blocks.numbers[block_at(kv, row0, entry, head)];
  return number < 0 ? NULL : numbered_tile(kv, number);
}

/* What is measured of a token at `position`: entries below this. */
SITS_DEV int measured_end(const k_kv_blocks &blocks, int row0, int seq, int position) {
  if (row0 < 0 || blocks.nearest[seq] == INT_MAX) return 0;
  return max(0, position / K_PAGE_TOKENS - blocks.nearest[seq] + 1);
}

} // namespace kv

#endif
