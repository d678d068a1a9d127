/* Errors of the rounded matrices beside those that theory expects, (D / sqrt(12)) sqrt(mn) for steps D (quant_weight.h), as text and JSON.
 * Entry point: compile_report. A matrix is flagged where its error is more than 2 % above the expectation: rounding errors scatter, but
 * over the 100,000 values and more of a matrix their mean square does not by more. With calibration text, the relative error of each
 * product stands beside it, weights and inputs rounded, on a sample of inputs. Entry point for that: compile_output_error. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "quant/quant_act.h"
#include "tensor/dequant.h"
#include "tools/compile/compile.h"

#define TOLERANCE 1.02

#define MOST_ROWS 128                /* outputs looked at */

static double dot(const float *a, const float *b, int64_t n)
{
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
  return sum;
}

static double products_error(const struct compile_matrix *m, const float *exact, const float *rounded, int32_t n_tokens, const float *scale,
                             const float *row_scale, float *work)
{
  const int64_t rows = m->source->dims[0], width = m->source->dims[1], step = rows > MOST_ROWS ? rows / MOST_ROWS : 1;
  double error = 0, whole = 0;
  float *made = work, *source = work + width;
  for (int64_t r = 0; r < rows; r += step) {
    dequant_tensor_row(&m->made.utd, r, made);
    dequant_tensor_row(m->source, r, source);
    for (int64_t i = 0; i < width; i++) source[i] *= (scale ? scale[i] : 1.0F) * (row_scale ? row_scale[r] : 1.0F);
    for (int32_t t = 0; t < n_tokens; t++) {
      const double y = dot(source, exact + t * width, width), e = dot(made, rounded + t * width, width) - y;
      whole += y * y;
      error += e * e;
    }
  }
  return whole > 0 ? sqrt(error / whole) : 0;
}

double compile_output_error(const struct compile_matrix *m, const struct act_format *act, const struct compile_stats *stats,
                            const float *scale, const float *row_scale)
{
  const int64_t width = m->source->dims[1];
  const int32_t n = stats->n_sampled[m->site];
  if (n == 0 || !stats->sample[m->site]) return -1;
  float *exact = mem_calloc((size_t)n * (size_t)width, sizeof *exact), *rounded = mem_calloc((size_t)n * (size_t)width, sizeof *rounded);
  float *work = mem_calloc(2 * (size_t)width, sizeof *work);
  double error = -1;
  for (int64_t t = 0; t < n && exact && rounded && work; t++) {
    for (int64_t i = 0; i < width; i++) exact[t * width + i] = stats->sample[m->site][t * width + i] / (scale ? scale[i] : 1.0F);
    quant_act_row(act, exact + t * width, (int32_t)width, rounded + t * width);
  }
  if (exact && rounded && work) error = products_error(m, exact, rounded, n, scale, row_scale, work);
  mem_free(exact);
  mem_free(rounded);
  mem_free(work);
  return error;
}

static double relative(double part, double whole) { return whole > 0 ? part / whole : 0; }

static bool is_broken(const struct quant_tensor *t) { return !t->is_kept && t->error > t->bound * TOLERANCE; }

static json_t *row_of(const struct compile_matrix *m)
{
  const struct quant_tensor *t = &m->made;
  json_t *row = json_pack("{ss ss sb sf sf sb}", "tensor", t->utd.name, "dtype", sits_dtype_info(t->utd.dtype)->name, "kept", t->is_kept,
                   "relative_error", relative(t->error, t->norm), "expected", t->is_kept ? 0.0 : relative(t->bound, t->norm), "above_bound",
                   is_broken(t));
  if (row && m->output_error >= 0) json_object_set_new(row, "output_error", json_real(m->output_error));
  return row;
}

static enum sits_status write_json(const struct compile_matrix *matrices, int64_t n, const char *path, struct sits_error *err)
{
  json_t *rows = json_array(), *report = json_pack("{so}", "matrices", rows);
  int failed = report == NULL;
  for (int64_t i = 0; i < n && !failed; i++) failed = json_array_append_new(rows, row_of(&matrices[i]));
  failed = failed || json_dump_file(report, path, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
  json_decref(report);
  return failed ? sits_fail(err, SITS_IO, "%.150s: cannot be written: %s", path, strerror(errno)) : SITS_OK;
}

/* Integers of a layer in smaller groups than the recipe's: it does not divide their rows, or they came on a grid that is kept. Their
 * group, 0 for others. Blocks of 256 (Q4_K) have groups of 32 inside. */
static int32_t narrow_group(const struct compile_matrix *m, int32_t group)
{
  const struct sits_utd *u = &m->made.utd;
  if (m->is_outer || group <= 32 || u->dtype == SITS_DTYPE_F16 || u->dtype == SITS_DTYPE_BF16) return 0;
  const int32_t own = u->quant == SITS_QUANT_GROUP ? u->group_size : 32;
  return own < group ? own : 0;
}

static void print_narrow(const struct compile_matrix *matrices, int64_t n, int32_t group)
{
  int64_t n_narrow = 0;
  for (int64_t i = 0; i < n; i++) {
    const struct compile_matrix *m = &matrices[i];
    const int32_t own = narrow_group(m, group);
    if (own == 0) continue;
    if (n_narrow++ == 0) printf("not in groups of %d, which a GPU reads fast:\n", group);
    printf("  %-40s groups of %d, %s\n", m->made.utd.name, own, m->made.is_kept ? "the source's" : "for its rows are no multiple of more");
  }
}

enum sits_status compile_report(const struct compile_matrix *matrices, int64_t n, int32_t group, const char *path, bool is_quiet,
                                struct sits_error *err)
{
  int64_t n_kept = 0, n_broken = 0;
  double worst = 0;
  const char *worst_name = "";
  if (!is_quiet) printf("%-40s %-5s %12s %12s %12s\n", "matrix", "type", "error", "expected", "of output");
  for (int64_t i = 0; i < n; i++) {
    const struct quant_tensor *t = &matrices[i].made;
    const double error = relative(t->error, t->norm);
    n_kept += t->is_kept;
    n_broken += is_broken(t);
    if (error > worst) worst = error, worst_name = t->utd.name;
    if (is_quiet) continue;
    char output[24] = "";
    if (matrices[i].output_error >= 0) snprintf(output, sizeof output, "%11.4f%%", 100 * matrices[i].output_error);
    if (t->is_kept) printf("%-40s %-5s %12s %12s %12s\n", t->utd.name, sits_dtype_info(t->utd.dtype)->name, "kept", "", output);
    else
      printf("%-40s %-5s %11.4f%% %11.4f%% %12s%s\n", t->utd.name, sits_dtype_info(t->utd.dtype)->name, 100 * error,
             100 * relative(t->bound, t->norm), output, is_broken(t) ? "  above the bound" : "");
  }
  if (!is_quiet)
    printf("%" PRId64 " matrices, %" PRId64 " kept as they were, %" PRId64 " above the bound; "
           "largest relative Frobenius error %.4f%% %s\n", n,
           n_kept, n_broken, 100 * worst, worst_name);
  if (!is_quiet) print_narrow(matrices, n, group);
  return path ? write_json(matrices, n, path, err) : SITS_OK;
}
