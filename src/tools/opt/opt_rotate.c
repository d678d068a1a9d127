/* Which scales and rotations pay: the model is prepared and compiled in several ways, and the relative output errors of its matrices
 * (inputs and weights rounded, compile_output_error) are laid side by side.
 *
 *   plain      as it is; weights that come on a 4-bit grid keep it
 *   local      values and o per head, down's input by blocks
 *   residual s the residual stream by seed s, gains folded, and the local ones
 *   residual   the best seed without the local ones
 *
 * First, where the recipe leaves scaling open (auto) and something is rounded anew, plain is made with AWQ scales and without ("unscaled"),
 * and the lesser sum of squared errors decides for all that follows.
 * The residual stream is one for all matrices: it is rotated where the sum of squared errors is less by it. Heads are decided layer by
 * layer by v and o, down layer by layer by itself, each for the residual stream as chosen. Entry point: opt_rotate. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "base/mem.h"
#include "opt.h"
#include "quant/quant_recipe.h"
#include "quant/quant_weight.h"
#include "tools/compile/compile.h"

enum { WQ, WK, WV, WO, GATE, UP, DOWN, KINDS };

struct trial {
  struct opt_run *run;
  struct model *model;
  struct opt_plan plan;
  const char *suffix;                /* of candidates' names, once scaling is settled */
  json_t *rows;                      /* of the state: {"candidate": {"name": ..., "score": ..., "errors": {tensor: error}}} */
};

static const struct sits_utd *matrix_of(const struct model *m, int32_t layer, int kind)
{
  const struct model_layer *l = &m->layers[layer];
  const struct sits_utd *const of[KINDS] = {l->wq, l->wk, l->wv, l->wo, l->w_gate, l->w_up, l->w_down};
  return of[kind];
}

/* {tensor: output error} from a report. */
static enum sits_status read_errors(const char *path, json_t **out, struct sits_error *err)
{
  json_t *report, *errors = json_object(), *row;
  size_t index;
  enum sits_status status = json_parse_file(path, &json_limits_file, &report, err);
  if (status) return status;
  json_array_foreach(json_object_get(report, "matrices"), index, row)
    json_object_set(errors, json_string_value(json_object_get(row, "tensor")), json_object_get(row, "output_error"));
  json_decref(report);
  *out = errors;
  return SITS_OK;
}

/* Errors of one candidate, from the state or by trying it. */
static enum sits_status try_plan(struct trial *t, const char *plain_name, const json_t **out, struct sits_error *err)
{
  const struct opt_plan *plan = &t->plan;
  char prepared[4096], made[4096], report[4096], name[80];
  snprintf(name, sizeof name, "%s%s", plain_name, t->suffix);
  json_t *errors = json_object_get(t->rows, name);
  *out = errors;
  if (errors) return SITS_OK;
  opt_path(t->run, "candidate.prepared", prepared);
  opt_path(t->run, "candidate.bin", made);
  opt_path(t->run, "candidate.json", report);
  const bool is_plain = !plan->residual && !plan->heads[0] && !plan->down[0];
  enum sits_status status = is_plain ? SITS_OK : opt_prepare(t->model, plan, prepared, err);
  if (!status) status = opt_compile(t->run, is_plain ? t->run->options->model : prepared, NULL, made, report, NULL, true, err);
  if (!status) status = read_errors(report, &errors, err);
  unlink(prepared);
  unlink(made);
  unlink(report);
  if (status) return status;
  json_object_set_new(t->rows, name, errors);
  *out = errors;
  return opt_save(t->run, err);
}

static void set_plan(struct trial *t, uint64_t residual, bool is_local)
{
  t->plan.residual = residual;
  for (int32_t i = 0; i < t->run->n_layers; i++) t->plan.heads[i] = t->plan.down[i] = is_local;
  const bool has_down = t->model->config.n_ff % t->plan.block == 0;
  for (int32_t i = 0; i < t->run->n_layers && !has_down; i++) t->plan.down[i] = false;
}

static double squared(const json_t *errors, const struct model *m, int32_t layer, int kind)
{
  const double e = json_number_value(json_object_get(errors, matrix_of(m, layer, kind)->name));
  return e * e;
}

/* Sum over all matrices where heads and down are taken from the better of the two. Fills the plan when asked. */
static double score(const struct trial *t, const json_t *without, const json_t *with, struct opt_plan *plan)
{
  double sum = 0;
  for (int32_t i = 0; i < t->run->n_layers; i++) {
    for (int k = 0; k < KINDS; k++)
      if (k != WV && k != WO && k != DOWN) sum += squared(without, t->model, i, k);
    const double heads[2] = {squared(without, t->model, i, WV) + squared(without, t->model, i, WO),
                             squared(with, t->model, i, WV) + squared(with, t->model, i, WO)};
    const double down[2] = {squared(without, t->model, i, DOWN), squared(with, t->model, i, DOWN)};
    if (plan) plan->heads[i] = heads[1] < heads[0];
    if (plan) plan->down[i] = down[1] < down[0] && t->model->config.n_ff % t->plan.block == 0;
    sum += fmin(heads[0], heads[1]) + fmin(down[0], down[1]);
  }
  return sum;
}

static enum sits_status try_seeds(struct trial *t, double plain, double *best, uint64_t *best_seed, struct sits_error *err)
{
  enum sits_status status = SITS_OK;
  *best = plain;
  *best_seed = 0;
  double least = INFINITY;
  for (int64_t s = 1; s <= t->run->options->rotation_seeds && !status; s++) {
    char name[64];
    const json_t *with;
    snprintf(name, sizeof name, "residual %lld", (long long)s);
    set_plan(t, (uint64_t)s, true);
    status = try_plan(t, name, &with, err);
    if (status) break;
    const double sum = score(t, with, with, NULL);
    printf("%-24s sum of squared output errors %.5f\n", name, sum);
    if (sum < least) least = sum, *best_seed = (uint64_t)s;
  }
  *best = least;
  return status;
}

/* For every matrix what it would cost either way, and what was chosen. */
static void print_choice(const struct trial *t, const json_t *plain, const json_t *rotated)
{
  printf("%-40s %10s %10s\n", "output error", "as it is", "rotated");
  for (int32_t i = 0; i < t->run->n_layers; i++)
    for (int k = 0; k < KINDS; k++)
      printf("%-40s %9.3f%% %9.3f%%%s\n", matrix_of(t->model, i, k)->name, 100 * sqrt(squared(plain, t->model, i, k)),
             100 * sqrt(squared(rotated, t->model, i, k)),
             (k == WV || k == WO) && t->plan.heads[i] ? "  rotated per head" : k == DOWN && t->plan.down[i] ? "  rotated by blocks" : "");
}

static enum sits_status decide(struct trial *t, struct sits_error *err)
{
  const json_t *plain, *local, *with = NULL, *without = NULL;
  double rotated;
  uint64_t seed;
  set_plan(t, 0, false);
  enum sits_status status = try_plan(t, "plain", &plain, err);
  if (!status) set_plan(t, 0, true);
  if (!status) status = try_plan(t, "local", &local, err);
  if (status) return status;
  const double kept = score(t, plain, local, NULL);
  printf("%-24s sum of squared output errors %.5f\n", "plain", score(t, plain, plain, NULL));
  printf("%-24s sum of squared output errors %.5f\n", "the better of local", kept);
  status = try_seeds(t, kept, &rotated, &seed, err);
  if (status) return status;
  char name[64];
  snprintf(name, sizeof name, "residual %lld%s", (long long)seed, t->suffix);
  with = json_object_get(t->rows, name);
  if (rotated < kept) {
    set_plan(t, seed, false);
    status = try_plan(t, "residual alone", &without, err);
    if (!status) score(t, without, with, &t->plan);
  } else {
    set_plan(t, 0, false);
    score(t, plain, local, &t->plan);
  }
  if (status) return status;
  print_choice(t, plain, with);
  printf("residual stream: %s (best of %lld seeds %.5f, without %.5f)\n", t->plan.residual ? "rotated" : "as it is",
         (long long)t->run->options->rotation_seeds, rotated, kept);
  return SITS_OK;
}

static enum sits_status apply(struct trial *t, struct sits_error *err)
{
  bool is_any = t->plan.residual != 0;
  json_t *heads = json_array(), *down = json_array();
  for (int32_t i = 0; i < t->run->n_layers; i++) {
    is_any |= t->plan.heads[i] || t->plan.down[i];
    if (t->plan.heads[i]) json_array_append_new(heads, json_integer(i));
    if (t->plan.down[i]) json_array_append_new(down, json_integer(i));
  }
  json_object_set_new(t->run->state, "rotation", json_pack("{sI so so si}", "residual_seed", (json_int_t)t->plan.residual, "heads", heads,
                                                           "down", down, "block", t->plan.block));
  if (!is_any) return SITS_OK;
  opt_path(t->run, "prepared.bin", t->run->source);
  return opt_prepare(t->model, &t->plan, t->run->source, err);
}

/* Where the recipe rounds nothing there is nothing to gain; where every matrix keeps its grid, nothing to scale. */
static enum sits_status check_recipe(const struct opt_run *run, const struct model *model, bool *rounds, bool *is_open,
                                     struct sits_error *err)
{
  struct quant_recipe recipe;
  const enum sits_status status = quant_recipe_load(run->recipe, &recipe, err);
  if (status) return status;
  *rounds = strcmp(recipe.weights, "f16") != 0;
  *is_open = false;
  for (int32_t i = 0; i < run->n_layers && *rounds && strcmp(recipe.scaling, "auto") == 0; i++) {
    const struct quant_spec spec = compile_spec(&recipe, model->layers[i].wq, false);
    *is_open |= !quant_keeps(model->layers[i].wq, &spec);
  }
  quant_recipe_fini(&recipe);
  return SITS_OK;
}

/* The recipe with one field set, as DIR/base.yaml. */
static enum sits_status write_base(struct opt_run *run, const char *field, const char *value, struct sits_error *err)
{
  struct quant_recipe recipe;
  struct buf text;
  char path[4096];
  enum sits_status status = quant_recipe_load(run->recipe, &recipe, err);
  if (status) return status;
  opt_path(run, "base.yaml", path);
  buf_init(&text, 1 << 20);
  status = option_assign(&recipe.set, field, value, "opt", err);
  if (!status && !option_write_yaml(&recipe.set, false, &text)) status = sits_fail(err, SITS_NOMEM, "out of memory");
  FILE *file = status ? NULL : fopen(path, "wb");
  const bool is_written = file && fwrite(text.data, 1, text.size, file) == text.size;
  if (!status && ((file && fclose(file) != 0) || !is_written)) status = sits_fail(err, SITS_IO, "%.150s: cannot be written", path);
  buf_fini(&text);
  quant_recipe_fini(&recipe);
  if (!status) memcpy(run->recipe, path, sizeof run->recipe);
  return status;
}

static enum sits_status settle_scaling(struct trial *t, struct sits_error *err)
{
  const json_t *scaled, *unscaled;
  char given[4096];
  memcpy(given, t->run->recipe, sizeof given);
  set_plan(t, 0, false);
  enum sits_status status = try_plan(t, "plain", &scaled, err);
  if (!status) status = write_base(t->run, "scaling", "none", err);
  if (status) return status;
  t->suffix = " unscaled";
  status = try_plan(t, "plain", &unscaled, err);
  if (status) return status;
  const double with = score(t, scaled, scaled, NULL), without = score(t, unscaled, unscaled, NULL);
  printf("scaling: %s (sum of squared output errors %.5f with scales, %.5f without)\n", with <= without ? "awq" : "none", with, without);
  if (without < with) return SITS_OK;
  memcpy(t->run->recipe, given, sizeof given);
  t->suffix = "";
  return SITS_OK;
}

static enum sits_status settle(struct trial *t, struct sits_error *err)
{
  const char *rotate = t->run->options->rotate;
  bool rounds, is_open;
  enum sits_status status = check_recipe(t->run, t->model, &rounds, &is_open, err);
  if (!status && is_open) status = settle_scaling(t, err);
  if (status || strcmp(rotate, "none") == 0 || (!rounds && strcmp(rotate, "all") != 0)) return status;
  if (strcmp(rotate, "all") == 0) set_plan(t, 1, true);
  else status = decide(t, err);
  return status ? status : apply(t, err);
}

enum sits_status opt_rotate(struct opt_run *run, struct sits_error *err)
{
  struct trial t = {.run = run, .suffix = "", .rows = json_object_get(run->state, "output_errors")};
  if (!t.rows) {
    t.rows = json_object();
    json_object_set_new(run->state, "output_errors", t.rows);
  }
  enum sits_status status = model_open(run->options->model, &t.model, err);
  if (status) return status;
  t.plan.block = (int32_t)run->options->down_rotation;
  t.plan.heads = mem_calloc((size_t)run->n_layers, sizeof(bool));
  t.plan.down = mem_calloc((size_t)run->n_layers, sizeof(bool));
  if (!t.plan.heads || !t.plan.down) status = sits_fail(err, SITS_NOMEM, "out of memory");
  if (!status) status = settle(&t, err);
  mem_free(t.plan.heads);
  mem_free(t.plan.down);
  model_close(t.model);
  return status;
}
