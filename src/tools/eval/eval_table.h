/* The table of `compare`, from sums over windows: by a run (eval_compare.c) or from the files of several (eval_join.c). One thread. */
#ifndef SITS_TOOLS_EVAL_TABLE_H
#define SITS_TOOLS_EVAL_TABLE_H

#include <jansson.h>
#include <stdint.h>

struct eval_sums {                   /* of one model */
  double *nll, *kl;                  /* [windows] sums over a window's scored rows; kl against the reference */
  int64_t n_right, n_agree;          /* rows whose token, or whose reference's best, had the largest logit */
  int64_t compute_us;
};

struct eval_label {                  /* of one row */
  const char *name, *kv;
  int64_t weight_bytes;
  double share_4x4, compile_s;       /* negative, 0: unknown */
};

/* A row of the result: figures, and nll and kl of each window as means over its rows. reference: the first model's sums. New object, or
 * NULL without memory. */
json_t *eval_table_row(const struct eval_label *label, const struct eval_sums *sums, const struct eval_sums *reference, int64_t n_windows,
                       int64_t ctx);
/* The result (text, ctx, skip_windows, windows, ids, reference, rows) as a table on stdout; device: named in its first line, or NULL. */
void eval_table_print(const json_t *result, const char *device);

#endif
