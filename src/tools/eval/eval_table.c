/* See eval_table.h. Columns: delta of perplexity in percent, 100 (exp(mean difference of log-likelihoods) - 1), with the standard error
 * over windows; accuracy: share of predictions whose token had the largest logit; KL: mean over rows of the divergence from the
 * reference, in nats; agreement: share of rows with the reference's largest logit; tokens/s: of the backend, prompts in steps of
 * --batch-tokens. */
#include "tools/eval/eval_table.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "tools/eval/eval.h"

/* Mean of x[i] - y[i] over n (y may be NULL), and its standard error. */
static double mean_of(const double *x, const double *y, int64_t n, double *error)
{
  double mean = 0, squares = 0;
  for (int64_t i = 0; i < n; i++) mean += (x[i] - (y ? y[i] : 0)) / (double)n;
  for (int64_t i = 0; i < n; i++) {
    const double d = x[i] - (y ? y[i] : 0) - mean;
    squares += d * d;
  }
  *error = n > 1 ? sqrt(squares / (double)(n - 1) / (double)n) : 0;
  return mean;
}

json_t *eval_table_row(const struct eval_label *label, const struct eval_sums *sums, const struct eval_sums *reference, int64_t n_windows,
                       int64_t ctx)
{
  const double rows = eval_scored(ctx), all = rows * (double)n_windows, accuracy = (double)sums->n_right / all;
  double ignored, error, kl_error;
  const double perplexity = exp(mean_of(sums->nll, NULL, n_windows, &ignored) / rows);
  const double delta = 100 * (exp(mean_of(sums->nll, reference->nll, n_windows, &error) / rows) - 1);
  const double kl = mean_of(sums->kl, NULL, n_windows, &kl_error) / rows;
  json_t *nll = json_array(), *divergence = json_array();
  for (int64_t w = 0; w < n_windows; w++) {
    json_array_append_new(nll, json_real(sums->nll[w] / rows));
    json_array_append_new(divergence, json_real(sums->kl[w] / rows));
  }
  json_t *row = json_pack("{ss ss sI sf sf sf sf sf sf sf sf sf so so}", "name", label->name, "kv", label->kv, "weight_bytes",
                          (json_int_t)label->weight_bytes, "perplexity", perplexity, "delta_percent", delta, "delta_error_percent",
                          100 * error / rows, "accuracy", accuracy, "delta_accuracy_points",
                          100 * (accuracy - (double)reference->n_right / all), "kl", kl, "kl_error", kl_error / rows, "top1_agreement",
                          (double)sums->n_agree / all, "tokens_per_s",
                          (double)(n_windows * (ctx - 1)) / fmax((double)sums->compute_us * 1e-6, 1e-6), "window_nll", nll, "window_kl",
                          divergence);
  if (label->share_4x4 >= 0) json_object_set_new(row, "share_4x4", json_real(label->share_4x4));
  if (label->compile_s > 0) json_object_set_new(row, "compile_s", json_real(label->compile_s));
  return row;
}

static double number(const json_t *row, const char *key) { return json_number_value(json_object_get(row, key)); }

void eval_table_print(const json_t *result, const char *device)
{
  const int64_t n_windows = json_integer_value(json_object_get(result, "windows"));
  const int64_t ctx = json_integer_value(json_object_get(result, "ctx"));
  const json_t *row;
  size_t index;
  printf("%" PRId64 " windows of %" PRId64 " tokens, %" PRId64 " predictions%s%s\n", n_windows, ctx, n_windows * eval_scored(ctx),
         device ? ", " : "", device ? device : "");
  printf("| %-20s | %8s | %10s | %16s | %10s | %8s | %8s | %7s | %5s | %8s |\n|", "model", "MB", "perplexity", "delta %", "accuracy %",
         "points", "KL", "agree %", "4x4 %", "tokens/s");
  for (int k = 0; k < 10; k++) printf("---|");
  printf("\n");
  json_array_foreach(json_object_get(result, "rows"), index, row) {
    char share[16] = "";
    if (json_object_get(row, "share_4x4")) snprintf(share, sizeof share, "%.1f", 100 * number(row, "share_4x4"));
    printf("| %-20s | %8.1f | %10.4f | %+8.3f ± %5.3f | %10.2f | %+8.2f | %8.5f | %7.2f | %5s | %8.0f |\n",
           json_string_value(json_object_get(row, "name")), number(row, "weight_bytes") * 1e-6, number(row, "perplexity"),
           number(row, "delta_percent"), number(row, "delta_error_percent"), 100 * number(row, "accuracy"),
           number(row, "delta_accuracy_points"), number(row, "kl"), 100 * number(row, "top1_agreement"), share,
           number(row, "tokens_per_s"));
  }
}
