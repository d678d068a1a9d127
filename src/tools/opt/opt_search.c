/* Which inputs can have 4 bits within a given loss of perplexity: the recipe's 4-bit sites, of which some fall back to 8 bits.
 *
 * Sensitivity of a site: the divergence from the 16-bit model on one window of the text when it alone has 4-bit inputs, less that when none
 * has, over the multiply-adds that it makes 4x4 bits. Sites take 4 bits in the order of that quotient, so that the share of 4x4-bit
 * products is the highest for a given divergence as far as the divergences add up; how many, is found by bisection on the measured loss,
 * which takes it to grow with each site. What was found is judged on windows that took no part in finding it, and gives up 4-bit sites
 * until it holds there too. The model runs layer by layer; a site's divergence starts from the hidden states before its layer.
 * Entry point: opt_search. */
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
#include "tools/compile/compile_layers.h"
#include "tools/eval/eval.h"

struct site { int32_t layer, kind; double products, divergence; struct act_format own; };

struct search {
  struct opt_run *run;
  struct site *sites;                /* [n] those that the recipe gives 4-bit inputs; after ranking the least sensitive first */
  int32_t n;
  struct model *model;               /* compiled by the recipe */
  struct layer_walk *walk;           /* of it, over the window */
  struct token_list ids;
  float *reference;                  /* [rows][V] logits of the 16-bit model */
  int32_t n_vocab;
  double sum;                        /* of divergences over the rows of a window */
};

/* ---- divergence ---- */

static float *reference_row(const struct search *s, int32_t position)
{
  return s->reference + (size_t)(position - (int32_t)s->run->options->sensitivity_ctx / 2) * (size_t)s->n_vocab;
}

static void keep_row(void *user, int64_t window, int32_t position, const float *row)
{
  const struct search *s = user;
  (void)window;
  if (position < s->run->options->sensitivity_ctx - 1) memcpy(reference_row(s, position), row, (size_t)s->n_vocab * sizeof *row);
}

static void compare_row(void *user, int64_t window, int32_t position, const float *row)
{
  struct search *s = user;
  const float *reference = reference_row(s, position);
  (void)window;
  if (position == s->run->options->sensitivity_ctx - 1) return; /* not scored */
  s->sum += eval_divergence(reference, eval_logsumexp(reference, s->n_vocab), row, eval_logsumexp(row, s->n_vocab), s->n_vocab);
}

/* The window starts after those that calibrate. */
static int32_t *window_of(const struct search *s)
{
  const struct opt_options *o = s->run->options;
  const int64_t at = o->calibration_windows * o->ctx;
  return s->ids.ids + (at + o->sensitivity_ctx <= s->ids.n ? at : 0);
}

static enum sits_status open_walk(const struct search *s, const struct model *model, struct layer_walk **out, struct sits_error *err)
{
  const struct layer_walk_options how = {.n_threads = (int32_t)s->run->options->threads, .kv_codec = "auto"};
  return layer_walk_open(model, &how, window_of(s), 1, (int32_t)s->run->options->sensitivity_ctx, out, err);
}

static enum sits_status run_to_end(struct layer_walk *walk, const struct model *model, int32_t first, layer_row_fn fn, void *user,
                                   struct sits_error *err)
{
  enum sits_status status = SITS_OK;
  while (!status && layer_walk_at(walk) < model->config.n_layers) status = layer_walk_run(walk, NULL, true, err);
  return status ? status : layer_walk_head(walk, NULL, first, fn, user, err);
}

static enum sits_status encode_text(struct search *s, const struct model *model, struct sits_error *err)
{
  const struct opt_options *o = s->run->options;
  const struct eval_options eval = {.text = o->calibration};
  struct tokenizer *tokenizer;
  enum sits_status status = tokenizer_load(model->source, &tokenizer, err);
  if (status) return status;
  status = eval_encode_file(tokenizer, &eval, &s->ids, err);
  const int32_t bos = tokenizer_adds_bos(tokenizer) ? tokenizer_bos(tokenizer) : -1;
  tokenizer_destroy(tokenizer);
  if (status) return status;
  if (s->ids.n < o->sensitivity_ctx)
    return sits_fail_param(err, SITS_CONFIG, "sensitivity-ctx", "the text is shorter than that");
  if (bos >= 0) *window_of(s) = bos;
  return SITS_OK;
}

static enum sits_status run_reference(struct search *s, struct sits_error *err)
{
  char path[4096];
  struct model *model;
  struct layer_walk *walk = NULL;
  const int32_t ctx = (int32_t)s->run->options->sensitivity_ctx;
  opt_path(s->run, "reference.bin", path);
  enum sits_status status = model_open(path, &model, err);
  if (status) return status;
  s->n_vocab = model->config.n_vocab;
  s->reference = mem_calloc((size_t)eval_scored(ctx) * (size_t)s->n_vocab, sizeof *s->reference);
  if (!s->reference) status = sits_fail(err, SITS_NOMEM, "out of memory for a window's logits");
  if (!status) status = encode_text(s, model, err);
  if (!status) status = open_walk(s, model, &walk, err);
  if (!status) status = run_to_end(walk, model, ctx / 2, keep_row, s, err);
  layer_walk_close(walk);
  model_close(model);
  return status;
}

/* Divergence from where the walk is to the end, and back to the mark. */
static enum sits_status divergence_from_here(struct search *s, double *out, struct sits_error *err)
{
  const int32_t ctx = (int32_t)s->run->options->sensitivity_ctx;
  s->sum = 0;
  enum sits_status status = run_to_end(s->walk, s->model, ctx / 2, compare_row, s, err);
  *out = s->sum / eval_scored(ctx);
  return status ? status : layer_walk_back(s->walk, err);
}

/* ---- sensitivities ---- */

static struct act_format *act_of(const struct search *s, const struct site *site) { return &s->model->layers[site->layer].act[site->kind]; }

/* In the order of layers; all of them get 8-bit inputs. */
static enum sits_status list_sites(struct search *s, struct sits_error *err)
{
  const struct model *m = s->model;
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
      *act_of(s, site) = (struct act_format){.kind = ACT_INT8, .rotation = site->own.rotation};
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

/* The site alone with its own format. The walk stands before its layer, marked. */
static enum sits_status measure_site(struct search *s, struct site *site, double base, json_t *known, struct sits_error *err)
{
  char name[32];
  double with = 0;
  site_text(site, name);
  const json_t *row = json_object_get(known, name);
  if (row) {
    site->divergence = json_number_value(json_object_get(row, "divergence"));
    return SITS_OK;
  }
  const struct act_format plain = *act_of(s, site);
  *act_of(s, site) = site->own;
  const enum sits_status status = divergence_from_here(s, &with, err);
  *act_of(s, site) = plain;
  if (status) return status;
  site->divergence = with - base;
  json_object_set_new(known, name, json_pack("{sf sf}", "divergence", with - base, "products", site->products));
  return opt_save(s->run, err);
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
  enum sits_status status = open_walk(s, s->model, &s->walk, err);
  if (!status) status = layer_walk_mark(s->walk, err);
  if (!status) status = divergence_from_here(s, &base, err);
  for (int32_t i = 0; i < s->n && !status; i++) {
    const bool moves = layer_walk_at(s->walk) < s->sites[i].layer;
    while (!status && layer_walk_at(s->walk) < s->sites[i].layer) status = layer_walk_run(s->walk, NULL, true, err);
    if (!status && moves) status = layer_walk_mark(s->walk, err);
    if (!status) status = measure_site(s, &s->sites[i], base, known, err);
    if (!status) opt_progress("sensitivities", i + 1, s->n);
  }
  layer_walk_close(s->walk);
  s->walk = NULL;
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

struct loss { double found, judged; }; /* percent, on the windows searched on and on those held out; judged NAN: not measured */

/* The recipe with n 4-bit sites; from the state where it was measured before. */
static enum sits_status try_sites(struct search *s, int32_t n, bool judges, struct loss *out, struct sits_error *err)
{
  char recipe[4096], made[4096];
  const char *key = judges ? "held_out_loss_percent" : "loss_percent";
  double *to = judges ? &out->judged : &out->found, nll = 0;
  json_t *tries = json_object_get(s->run->state, "tries"), *row, *mine = NULL;
  size_t index;
  json_array_foreach(tries, index, row)
    if (json_integer_value(json_object_get(row, "int4_sites")) == n) mine = row;
  if (json_object_get(mine, key)) {
    *to = json_number_value(json_object_get(mine, key));
    return SITS_OK;
  }
  opt_path(s->run, "try.yaml", recipe);
  opt_path(s->run, "try.bin", made);
  enum sits_status status = write_recipe(s, n, recipe, err);
  if (!status) status = opt_compile(s->run, s->run->source, recipe, made, NULL, NULL, true, err);
  if (!status) status = opt_measure(s->run, made, judges, &nll, err);
  unlink(recipe);
  unlink(made);
  if (status) return status;
  *to = 100 * (exp(nll - (judges ? s->run->held_out_reference : s->run->reference)) - 1);
  printf("%d of %d sites with 4-bit inputs, %.1f %% of their products: perplexity %.4f, %+.2f %%%s\n", n, s->n, 100 * share_of(s, n),
         exp(nll), *to, judges ? " on the windows held out" : "");
  fflush(stdout);
  if (!mine) {
    mine = json_pack("{si}", "int4_sites", n);
    json_array_append_new(tries, mine);
  }
  json_object_set_new(mine, judges ? "held_out_perplexity" : "perplexity", json_real(exp(nll)));
  json_object_set_new(mine, key, json_real(*to));
  return opt_save(s->run, err);
}

static enum sits_status refuse(double loss, double most, const char *where, struct sits_error *err)
{
  return sits_fail_param(err, SITS_CONFIG, "max-ppl-loss", "even with 8-bit inputs everywhere the loss is %.2f %%%s, above %.2f %%", loss,
                         where, most);
}

static enum sits_status bisect(struct search *s, int32_t *out, struct sits_error *err)
{
  const double most = s->run->options->max_ppl_loss;
  struct loss loss = {0};
  int32_t low = 0, high = s->n;      /* low holds, high does not, once tried */
  enum sits_status status = try_sites(s, high, false, &loss, err);
  *out = high;
  if (status || loss.found <= most) return status;
  status = try_sites(s, 0, false, &loss, err);
  if (!status && loss.found > most) return refuse(loss.found, most, "", err);
  while (high - low > 1 && !status) {
    const int32_t middle = low + (high - low) / 2;
    status = try_sites(s, middle, false, &loss, err);
    if (loss.found <= most) low = middle;
    else high = middle;
  }
  *out = low;
  return status;
}

/* What the search found must hold where it did not look: it gives up a sixteenth of its 4-bit sites at a time until it does. */
static enum sits_status judge(struct search *s, int32_t *n, struct sits_error *err)
{
  const double most = s->run->options->max_ppl_loss;
  struct loss loss = {0};
  enum sits_status status = try_sites(s, *n, true, &loss, err);
  while (!status && loss.judged > most) {
    if (*n == 0) return refuse(loss.judged, most, " on the windows held out", err);
    *n -= *n / 16 + 1 < *n ? *n / 16 + 1 : *n;
    status = try_sites(s, *n, true, &loss, err);
  }
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
  if (!status) status = model_open(model, &s.model, err);
  if (!status) status = list_sites(&s, err);
  if (!status) status = measure_sites(&s, err);
  if (s.model) model_close(s.model); /* the file is written again */
  if (!status) status = bisect(&s, &chosen, err);
  if (!status) status = judge(&s, &chosen, err);
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
