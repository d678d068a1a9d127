/* Which inputs can have 4 bits within a given loss of perplexity: the recipe's 4-bit sites, of which some fall back to 8 bits.
 *
 * Sensitivity of a site: the divergence from the 16-bit model on one window of the text when it alone has 4-bit inputs, less that when none
 * has, over the multiply-adds that it makes 4x4 bits. Sites take 4 bits in the order of that quotient, so that the share of 4x4-bit
 * products is the highest for a given divergence as far as the divergences add up; how many, is found by bisection on the measured loss,
 * which takes it to grow with each site. Entry point: opt_search. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/mem.h"
#include "opt.h"
#include "quant/quant_recipe.h"
#include "tools/eval/eval.h"

struct site { int32_t layer, kind; double products, divergence; struct act_format own; };

struct search {
  struct opt_run *run;
  struct site *sites;                /* [n] those that the recipe gives 4-bit inputs; after ranking the least sensitive first */
  int32_t n;
  struct eval_session session;       /* of the model compiled by the recipe */
  struct token_list ids;
  float *reference;                  /* [rows][V] logits of the 16-bit model */
  int32_t n_vocab;
  double sum;                        /* of divergences over the rows of a window */
};

static struct eval_options eval_of(const struct opt_run *run, const char *model)
{
  const struct opt_options *o = run->options;
  return (struct eval_options){.model = model, .text = o->calibration, .device = "cpu", .isa = "auto", .kv_cache_dtype = "auto",
                               .threads = o->threads, .ctx = o->sensitivity_ctx, .batch_tokens = 512};
}

/* ---- divergence ---- */

static void keep_row(void *user, int32_t index, const float *row, int32_t wanted)
{
  struct search *s = user;
  (void)wanted;
  memcpy(s->reference + (size_t)index * (size_t)s->n_vocab, row, (size_t)s->n_vocab * sizeof *row);
}

static void compare_row(void *user, int32_t index, const float *row, int32_t wanted)
{
  struct search *s = user;
  const float *reference = s->reference + (size_t)index * (size_t)s->n_vocab;
  (void)wanted;
  s->sum += eval_divergence(reference, eval_logsumexp(reference, s->n_vocab), row, eval_logsumexp(row, s->n_vocab), s->n_vocab);
}

/* The window starts after those that calibrate. */
static int32_t *window_of(const struct search *s)
{
  const struct opt_options *o = s->run->options;
  const int64_t at = o->calibration_windows * o->ctx;
  return s->ids.ids + (at + o->sensitivity_ctx <= s->ids.n ? at : 0);
}

static enum sits_status open_session(const struct search *s, const char *model, struct eval_session *out, struct sits_error *err)
{
  const struct eval_options eval = eval_of(s->run, model);
  const int32_t rows = eval_scored(eval.ctx);
  return eval_session_open(out, &eval, 1, (int32_t)eval.ctx, rows < 512 ? rows : 512, err);
}

static enum sits_status run_reference(struct search *s, struct sits_error *err)
{
  char path[4096];
  struct eval_session session;
  int64_t ignored = 0;
  const int32_t ctx = (int32_t)s->run->options->sensitivity_ctx;
  opt_path(s->run, "reference.bin", path);
  enum sits_status status = open_session(s, path, &session, err);
  if (status) return status;
  const struct eval_options eval = eval_of(s->run, path);
  s->n_vocab = session.runner.model->config.n_vocab;
  s->reference = mem_calloc((size_t)eval_scored(ctx) * (size_t)s->n_vocab, sizeof *s->reference);
  if (!s->reference) status = sits_fail(err, SITS_NOMEM, "out of memory for a window's logits");
  if (!status) status = eval_encode_file(session.tokenizer, &eval, &s->ids, err);
  if (!status && s->ids.n < ctx) status = sits_fail_param(err, SITS_CONFIG, "sensitivity-ctx", "the text is shorter than that");
  if (!status) status = eval_window(&session, window_of(s), ctx, keep_row, s, &ignored, err);
  eval_session_close(&session);
  return status;
}

/* Divergence with 4-bit inputs at site `only` and 8-bit ones at all others; only < 0: nowhere. */
static enum sits_status divergence_of(struct search *s, int32_t only, double *out, struct sits_error *err)
{
  const int32_t ctx = (int32_t)s->run->options->sensitivity_ctx;
  int64_t ignored = 0;
  for (int32_t i = 0; i < s->n; i++) {
    struct act_format *act = &s->session.runner.model->layers[s->sites[i].layer].act[s->sites[i].kind];
    *act = s->sites[i].own;
    if (i != only) *act = (struct act_format){.kind = ACT_INT8, .rotation = act->rotation};
  }
  s->sum = 0;
  enum sits_status status = runner_recompile(&s->session.runner, err);
  if (!status) status = eval_window(&s->session, window_of(s), ctx, compare_row, s, &ignored, err);
  *out = s->sum / eval_scored(ctx);
  return status;
}

/* ---- sensitivities ---- */

static enum sits_status list_sites(struct search *s, struct sits_error *err)
{
  const struct model *m = s->session.runner.model;
  s->sites = mem_calloc((size_t)m->config.n_layers * MODEL_SITES, sizeof *s->sites);
  if (!s->sites) return sits_fail(err, SITS_NOMEM, "out of memory");
  for (int32_t i = 0; i < m->config.n_layers; i++)
    for (int k = 0; k < MODEL_SITES; k++) {
      const struct model_layer *l = &m->layers[i];
      const struct sits_utd *const parts[MODEL_SITES][3] = {{l->wq, l->wk, l->wv}, {l->wo}, {l->w_gate, l->w_up}, {l->w_down}};
      if (l->act[k].kind != ACT_INT4) continue;
      struct site *site = &s->sites[s->n++];
      *site = (struct site){.layer = i, .kind = k, .own = l->act[k]};
      for (int p = 0; p < 3 && parts[k][p]; p++)
        site->products += (double)parts[k][p]->dims[0] * (double)(parts[k][p]->dims[1] - l->act[k].n_outliers);
    }
  return SITS_OK;
}

static void site_text(const struct site *site, char out[32])
{
  snprintf(out, 32, "%d.%s", site->layer, model_site_name((enum model_site)site->kind));
}

static int by_quotient(const void *a, const void *b)
{
  const struct site *x = a, *y = b;
  const double u = x->divergence / x->products, v = y->divergence / y->products;
  return u < v ? -1 : u > v ? 1 : x->layer != y->layer ? x->layer - y->layer : x->kind - y->kind;
}

/* Those that the state holds are taken from there. */
static enum sits_status measure_sites(struct search *s, struct sits_error *err)
{
  json_t *known = json_object_get(s->run->state, "sensitivity");
  double base = 0;
  if (!known) {
    known = json_object();
    json_object_set_new(s->run->state, "sensitivity", known);
  }
  enum sits_status status = divergence_of(s, -1, &base, err);
  for (int32_t i = 0; i < s->n && !status; i++) {
    char name[32];
    site_text(&s->sites[i], name);
    const json_t *row = json_object_get(known, name);
    double with = 0;
    if (!row) status = divergence_of(s, i, &with, err);
    if (status) break;
    s->sites[i].divergence = row ? json_number_value(json_object_get(row, "divergence")) : with - base;
    if (!row) json_object_set_new(known, name, json_pack("{sf sf}", "divergence", with - base, "products", s->sites[i].products));
    if (!row) status = opt_save(s->run, err);
    opt_progress("sensitivities", i + 1, s->n);
  }
  if (!status) qsort(s->sites, (size_t)s->n, sizeof *s->sites, by_quotient);
  return status;
}

/* ---- bisection ---- */

static enum sits_status write_text(const char *path, const struct buf *text, struct sits_error *err)
{
  FILE *file = fopen(path, "wb");
  const bool is_written = file && !text->failed && fwrite(text->data, 1, text->size, file) == text->size;
  if ((file && fclose(file) != 0) || !is_written) return sits_fail(err, SITS_IO, "%.150s: cannot be written", path);
  return SITS_OK;
}

/* The recipe with 4-bit inputs at the first n sites of the ranking. */
static enum sits_status write_recipe(const struct search *s, int32_t n, const char *path, struct sits_error *err)
{
  struct quant_recipe recipe;
  struct buf text, list;
  enum sits_status status = quant_recipe_load(s->run->recipe, &recipe, err);
  if (status) return status;
  buf_init(&text, 1 << 20);
  buf_init(&list, 1 << 16);
  if (recipe.int8_sites) buf_append_text(&list, recipe.int8_sites);
  for (int32_t i = n; i < s->n; i++) {
    char name[32];
    site_text(&s->sites[i], name);
    buf_printf(&list, "%s%s", list.size ? "," : "", name);
  }
  if (list.size) status = option_assign(&recipe.set, "int8-sites", list.data, "search", err);
  if (!status) option_write_yaml(&recipe.set, false, &text);
  if (!status) status = write_text(path, &text, err);
  buf_fini(&text);
  buf_fini(&list);
  quant_recipe_fini(&recipe);
  return status;
}

static double share_of(const struct search *s, int32_t n)
{
  double part = 0, all = 0;
  for (int32_t i = 0; i < s->n; i++) {
    all += s->sites[i].products;
    if (i < n) part += s->sites[i].products;
  }
  return all > 0 ? part / all : 0;
}

/* Loss in percent with n 4-bit sites; from the state where it was measured before. */
static enum sits_status try_sites(struct search *s, int32_t n, double *loss, struct sits_error *err)
{
  char recipe[4096], made[4096];
  double nll = 0;
  json_t *tries = json_object_get(s->run->state, "tries"), *row;
  size_t index;
  json_array_foreach(tries, index, row)
    if (json_integer_value(json_object_get(row, "int4_sites")) == n) {
      *loss = json_number_value(json_object_get(row, "loss_percent"));
      return SITS_OK;
    }
  opt_path(s->run, "try.yaml", recipe);
  opt_path(s->run, "try.bin", made);
  enum sits_status status = write_recipe(s, n, recipe, err);
  if (!status) status = opt_compile(s->run, s->run->source, recipe, made, NULL, NULL, true, err);
  if (!status) status = opt_measure(s->run, made, &nll, err);
  unlink(recipe);
  unlink(made);
  if (status) return status;
  *loss = 100 * (exp(nll - s->run->reference) - 1);
  printf("%d of %d sites with 4-bit inputs, %.1f %% of their products: perplexity %.4f, %+.2f %%\n", n, s->n, 100 * share_of(s, n),
         exp(nll), *loss);
  fflush(stdout);
  json_array_append_new(tries, json_pack("{si sf sf}", "int4_sites", n, "perplexity", exp(nll), "loss_percent", *loss));
  return opt_save(s->run, err);
}

static enum sits_status bisect(struct search *s, int32_t *out, struct sits_error *err)
{
  const double most = s->run->options->max_ppl_loss;
  double loss;
  int32_t low = 0, high = s->n;      /* low holds, high does not, once tried */
  enum sits_status status = try_sites(s, high, &loss, err);
  *out = high;
  if (status || loss <= most) return status;
  status = try_sites(s, 0, &loss, err);
  if (!status && loss > most)
    return sits_fail_param(err, SITS_CONFIG, "max-ppl-loss", "even with 8-bit inputs everywhere the loss is %.2f %%, above %.2f %%", loss,
                           most);
  while (high - low > 1 && !status) {
    const int32_t middle = low + (high - low) / 2;
    status = try_sites(s, middle, &loss, err);
    if (loss <= most) low = middle;
    else high = middle;
  }
  *out = low;
  return status;
}

enum sits_status opt_search(struct opt_run *run, struct sits_error *err)
{
  struct search s = {.run = run};
  char model[4096], recipe[4096];
  int32_t chosen = 0;
  opt_path(run, "model.bin", model);
  opt_path(run, "recipe.yaml", recipe);
  if (run->options->max_ppl_loss <= 0) return write_recipe(&s, 0, recipe, err); /* as it is */
  if (!json_object_get(run->state, "tries")) json_object_set_new(run->state, "tries", json_array());
  enum sits_status status = run_reference(&s, err);
  if (!status) status = open_session(&s, model, &s.session, err);
  if (!status) status = list_sites(&s, err);
  if (!status) status = measure_sites(&s, err);
  eval_session_close(&s.session);
  if (!status) status = bisect(&s, &chosen, err);
  if (!status) status = write_recipe(&s, chosen, recipe, err);
  if (!status) {
    json_object_set_new(run->state, "chosen", json_integer(chosen));
    status = opt_save(run, err);
  }
  token_list_fini(&s.ids);
  mem_free(s.reference);
  mem_free(s.sites);
  return status;
}
