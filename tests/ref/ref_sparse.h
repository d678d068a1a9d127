/* Sequences under a page budget (kv/kv_sparse.h), the slow way: which blocks are dropped, one after the other, the least of all that are
 * left; attention over what is left. */
#ifndef TESTS_REF_REF_SPARSE_H
#define TESTS_REF_REF_SPARSE_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A page's worth of blocks, n_columns, of entries that lie behind the first and before the newest four of n_pages whole ones.
 * given, is_gone: [n_pages][n_columns]. */
static inline void ref_drop_blocks(const uint64_t *given, bool *is_gone, int32_t n_columns, int32_t n_pages)
{
  for (int32_t n = 0; n < n_columns; n++) {
    int32_t least = -1;
    uint64_t least_worth = 0;
    for (int32_t i = n_columns; i < (n_pages - 4) * n_columns; i++) {
      uint64_t worth = given[i] / (uint64_t)(n_pages - 4 - i / n_columns); /* a query page */
      if (worth > UINT32_MAX) worth = UINT32_MAX;
      if (is_gone[i] || (least >= 0 && worth >= least_worth)) continue;
      least = i;
      least_worth = worth;
    }
    is_gone[least] = true;
  }
}

/* What a query sees of one entry: tokens 0 .. n - 1 from first on. keys, values: [n][d]; NULL: nothing is left. */
struct ref_seen { const float *keys, *values; int32_t n; };

/* out[d] = softmax(q . K / sqrt(d)) V over n_entries; squares[i]: the squares of what the query gives to the tokens of entry i, summed. */
static inline void ref_attend_blocks(const float *q, int32_t d, const struct ref_seen *seen, int32_t n_entries, double *out,
                                     double *squares)
{
  double top = -INFINITY, sum = 0;
  for (int32_t e = 0; e < d; e++) out[e] = 0;
  for (int pass = 0; pass < 3; pass++) /* the largest score, the sum, what comes of it */
    for (int32_t i = 0; i < n_entries; i++) {
      if (pass == 0) squares[i] = 0;
      for (int32_t j = 0; seen[i].keys != NULL && j < seen[i].n; j++) {
        double x = 0;
        for (int32_t e = 0; e < d; e++) x += (double)q[e] * seen[i].keys[(size_t)j * (size_t)d + (size_t)e] / sqrt(d);
        if (pass == 0) top = fmax(top, x);
        if (pass == 1) sum += exp(x - top);
        const double share = pass == 2 ? exp(x - top) / sum : 0;
        squares[i] += share * share;
        for (int32_t e = 0; pass == 2 && e < d; e++) out[e] += share * seen[i].values[(size_t)j * (size_t)d + (size_t)e];
      }
    }
}

#endif
