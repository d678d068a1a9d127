/* Which tiles of keys a tile of queries walks over, and what of each a query sees.
 *
 * With int4 and fp4 a query sees its own group of tokens in f16 and all older ones as pages have them. The range therefore has two pieces:
 * first the tiles of gathered keys, in which a query sees what lies before its group; then those of exact keys (k_kv_gather), in which it
 * sees its group up to itself. The values are the same in both. Other codecs have the first piece only, up to the query itself.
 */
#ifndef SITS_KERNELS_PREFILL_TILES_CUH
#define SITS_KERNELS_PREFILL_TILES_CUH

#include "common/ptx.cuh"
#include "kernels.h"

struct tile_range {
  int first_pos, n_rows, window, tokens; /* of the queries; of a group, 0: none */
  int lo, n_gathered, exact_lo;          /* first tile of each piece, tiles of the first */
  int begin, end;                        /* this CTA's share of both, in order */
  SITS_DEV bool is_exact(int i) const { return i >= n_gathered; }
  SITS_DEV int tile(int i) const { return i < n_gathered ? lo + i : exact_lo + i - n_gathered; }
  SITS_DEV int own(int position) const { return tokens ? position & -tokens : position + 1; } /* first key that is not seen as gathered */
};

/* Tiles of `keys` positions for the n_rows queries from first_pos on, part `split` of `n_splits`. */
SITS_DEV tile_range key_tiles(const k_kv_view &kv, int first_pos, int n_rows, int keys, int split, int n_splits) {
  tile_range r;
  r.first_pos = first_pos, r.n_rows = n_rows, r.window = kv.window, r.tokens = k_kv_open_tokens(kv.codec);
  const int last = first_pos + n_rows - 1, oldest = kv.window > 0 ? max(0, first_pos - kv.window + 1) : 0;
  r.lo = oldest / keys, r.exact_lo = r.own(first_pos) / keys;
  r.n_gathered = max(0, (r.own(last) + keys - 1) / keys - r.lo);
  const int n = r.n_gathered + (r.tokens ? last / keys - r.exact_lo + 1 : 0);
  r.begin = n * split / n_splits, r.end = n * (split + 1) / n_splits;
  return r;
}

/* May some query not see the whole of tile i? rows: of a full tile of queries. */
SITS_DEV bool tile_mask(const tile_range &r, int i, int rows, int keys) {
  const int first = r.tile(i) * keys;
  return r.is_exact(i) || first + keys > r.own(r.first_pos) || (r.window > 0 && first <= r.first_pos + rows - 1 - r.window);
}

/* First and last key of tile i that the query in `row` sees, counted from the tile's first; none where last < first. */
SITS_DEV void visible_keys(const tile_range &r, int i, int keys, int row, int *last, int *first) {
  const int position = r.first_pos + row, base = r.tile(i) * keys, own = r.own(position);
  const int oldest = r.window > 0 ? position - r.window + 1 : 0;
  *last = (r.is_exact(i) ? position : own - 1) - base;
  *first = (r.is_exact(i) ? max(own, oldest) : oldest) - base;
}

/* Where the keys of tile i begin. */
SITS_DEV const __half *keys_of_tile(const k_attn_prefill &a, const tile_range &r, int i, int keys, int seq, int kv_head) {
  const int d = a.kv.head_dim;
  if (!r.is_exact(i))
    return (const __half *)a.k + ((size_t)kv_head * a.capacity + (a.offset ? a.offset[seq] : 0) + (size_t)r.tile(i) * keys) * d;
  const int first_new = a.kv.kv_len[seq] - (a.kv.seq_start[seq + 1] - a.kv.seq_start[seq]);
  const int tile0 = r.own(first_new) / 128 * 128; /* position of the exact keys' first row */
  const size_t row0 = k_kv_exact_row0(a.kv.seq_start, a.seq0, seq);
  return (const __half *)a.exact + ((size_t)kv_head * a.exact_capacity + row0 + (size_t)(r.tile(i) * keys - tile0)) * d;
}

#endif
