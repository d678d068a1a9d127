/* Errors of the rounded matrices beside those that theory expects, (D / sqrt(12)) sqrt(mn) for steps D (quant_weight.h), as text and JSON.
 * Entry point: compile_report. A matrix is flagged where its error is more than 2 % above the expectation: rounding errors scatter, but
 * over the 100,000 values and more of a matrix their mean square does not by more. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "tools/compile/compile.h"

#define TOLERANCE 1.02

static double relative(double part, double whole) { return whole > 0 ? part / whole : 0; }

static bool is_broken(const struct quant_tensor *t) { return !t->is_kept && t->error > t->bound * TOLERANCE; }

static json_t *row_of(const struct quant_tensor *t)
{
  return json_pack("{ss ss sb sf sf sb}", "tensor", t->utd.name, "dtype", sits_dtype_info(t->utd.dtype)->name, "kept", t->is_kept,
                   "relative_error", relative(t->error, t->norm), "expected", t->is_kept ? 0.0 : relative(t->bound, t->norm), "above_bound",
                   is_broken(t));
}

static enum sits_status write_json(const struct compile_matrix *matrices, int64_t n, const char *path, struct sits_error *err)
{
  json_t *rows = json_array(), *report = json_pack("{so}", "matrices", rows);
  int failed = report == NULL;
  for (int64_t i = 0; i < n && !failed; i++) failed = json_array_append_new(rows, row_of(&matrices[i].made));
  failed = failed || json_dump_file(report, path, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
  json_decref(report);
  return failed ? sits_fail(err, SITS_IO, "%.150s: cannot be written: %s", path, strerror(errno)) : SITS_OK;
}

enum sits_status compile_report(const struct compile_matrix *matrices, int64_t n, const char *path, bool is_quiet, struct sits_error *err)
{
  int64_t n_kept = 0, n_broken = 0;
  double worst = 0;
  const char *worst_name = "";
  if (!is_quiet) printf("%-40s %-5s %12s %12s\n", "matrix", "type", "error", "expected");
  for (int64_t i = 0; i < n; i++) {
    const struct quant_tensor *t = &matrices[i].made;
    const double error = relative(t->error, t->norm);
    n_kept += t->is_kept;
    n_broken += is_broken(t);
    if (error > worst) worst = error, worst_name = t->utd.name;
    if (is_quiet) continue;
    if (t->is_kept) printf("%-40s %-5s %12s\n", t->utd.name, sits_dtype_info(t->utd.dtype)->name, "kept");
    else
      printf("%-40s %-5s %11.4f%% %11.4f%%%s\n", t->utd.name, sits_dtype_info(t->utd.dtype)->name, 100 * error,
             100 * relative(t->bound, t->norm), is_broken(t) ? "  above the bound" : "");
  }
  if (!is_quiet)
    printf("%" PRId64 " matrices, %" PRId64 " kept as they were, %" PRId64 " above the bound; "
           "largest relative Frobenius error %.4f%% %s\n", n,
           n_kept, n_broken, 100 * worst, worst_name);
  return path ? write_json(matrices, n, path, err) : SITS_OK;
}
