/* sits2026-opt MODEL -o DIR --calibration TEXT [options]: which layers can have 4-bit inputs within a given loss of perplexity.
 *
 * It compiles the model by the recipe, measures the loss against the same model in 16 bits on windows of the text that calibration did
 * not see, and gives 8-bit inputs to more and more layers at both ends, which lose most, until the loss is within --max-ppl-loss: the
 * least number that will do, found by bisection. DIR receives model.bin, recipe.yaml (for sits2026-compile), report.json (errors of every
 * matrix) and search.json (what was tried). The compiler and the evaluator do the work (tools/compile, tools/eval). One thread, and the
 * backend's workers. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "config/option.h"
#include "tools/compile/compile.h"
#include "tools/eval/eval.h"

struct opt_options {
  const char *model, *output, *recipe, *calibration, *kv_cache_compress;
  int64_t calibration_windows, ctx, windows, threads;
  double max_ppl_loss;
  bool rotate;
};

#define AT(field) offsetof(struct opt_options, field)
#define STR(name, field, help) {name, OPTION_STRING, AT(field), "", 0, 0, "", 0, NULL, "Options", help}
#define INT(name, field, def, min, max, unit, help) {name, OPTION_INT, AT(field), def, min, max, unit, 0, NULL, "Options", help}

static const struct option_spec specs[] = {
    STR("output", output, "The folder to write; -o DIR for short."),
    STR("recipe", recipe, "Where to start from: a built-in recipe (default w4a4) or a YAML file."),
    STR("calibration", calibration, "UTF-8 text: its first windows calibrate, the next ones measure."),
    {"max-ppl-loss", OPTION_FLOAT, AT(max_ppl_loss), "0", 0, 1000, "percent", 0, NULL, "Options",
     "Most that perplexity may rise, in percent of the 16-bit model's. 0: no search, the recipe as it is."},
    INT("calibration-windows", calibration_windows, "3", 1, 1 << 20, "windows", "Windows that calibrate."),
    INT("windows", windows, "4", 1, 1 << 20, "windows", "Windows that measure."),
    INT("ctx", ctx, "2048", 8, 1 << 20, "tokens", "Tokens of a window; at most the model's context."),
    {"kv-cache-compress", OPTION_ENUM, AT(kv_cache_compress), "none", 0, 0, "", 0, "none|int8|int4|fp4|fp4-sparse", "Options",
     "How the cache will be stored; it is measured that way."},
    INT("threads", threads, "0", 0, 1024, "threads", "Worker threads. 0: one per core."),
    {"rotate", OPTION_BOOL, AT(rotate), "false", 0, 0, "", 0, NULL, "Options", "Hadamard rotations. Not built yet: refused."},
};
enum { N_SPECS = sizeof specs / sizeof specs[0] };

struct search {
  const struct opt_options *options;
  char model[4096], recipe[4096], report[4096], log[4096]; /* files of DIR */
  int32_t n_layers;
  double reference;                  /* mean negative log-likelihood of the 16-bit model */
  json_t *tries;                     /* array */
};

static enum sits_status measure(const struct search *s, const char *model, double *nll, struct sits_error *err)
{
  const struct opt_options *o = s->options;
  const struct eval_options eval = {.model = model, .text = o->calibration, .device = "cpu", .isa = "auto", .kv_cache_dtype = "auto",
                                    .threads = o->threads, .ctx = o->ctx, .windows = o->windows, .skip_windows = o->calibration_windows,
                                    .batch_tokens = 512};
  struct eval_score score;
  const enum sits_status status = eval_score(&eval, &score, err);
  if (status) return status;
  double sum = 0;
  for (int64_t i = 0; i < score.n_windows; i++) sum += score.nll[i];
  *nll = sum / (double)(score.n_windows * (o->ctx - 1 - o->ctx / 2));
  mem_free(score.nll);
  return SITS_OK;
}

static enum sits_status compile_by(const struct search *s, const char *recipe, const char *output, const char *report,
                                   struct sits_error *err)
{
  const struct opt_options *o = s->options;
  const struct compile_options compile = {.model = o->model, .output = output, .recipe = recipe, .target = "any",
                                          .kv_cache_compress = o->kv_cache_compress, .calibration = o->calibration, .report = report,
                                          .calibration_windows = o->calibration_windows, .calibration_ctx = o->ctx, .threads = o->threads,
                                          .hessian_memory = (int64_t)2 << 30, .quiet = true};
  struct compile_result result;
  return compile_run(&compile, &result, err);
}

static enum sits_status write_text(const char *path, const char *text, size_t n_bytes, struct sits_error *err)
{
  FILE *file = fopen(path, "wb");
  const bool is_written = file && fwrite(text, 1, n_bytes, file) == n_bytes;
  if ((file && fclose(file) != 0) || !is_written) return sits_fail(err, SITS_IO, "%.150s: %s", path, strerror(errno));
  return SITS_OK;
}

/* The recipe with n layers of 8-bit inputs, two at the front for every five at the back: the ends lose most, the back more than the
 * front. */
static enum sits_status write_recipe(const struct search *s, int32_t n, struct sits_error *err)
{
  struct quant_recipe recipe;
  struct buf text;
  char first[16], last[16];
  enum sits_status status = quant_recipe_load(s->options->recipe ? s->options->recipe : "w4a4", &recipe, err);
  if (status) return status;
  snprintf(first, sizeof first, "%d", n * 2 / 7);
  snprintf(last, sizeof last, "%d", n - n * 2 / 7);
  buf_init(&text, 1 << 16);
  if (n > 0) status = option_assign(&recipe.set, "int8-first-layers", first, "search", err);
  if (n > 0 && !status) status = option_assign(&recipe.set, "int8-last-layers", last, "search", err);
  if (!status && !option_write_yaml(&recipe.set, false, &text)) status = sits_fail(err, SITS_NOMEM, "out of memory");
  if (!status) status = write_text(s->recipe, text.data, text.size, err);
  buf_fini(&text);
  quant_recipe_fini(&recipe);
  return status;
}

/* Loss in percent with n layers of 8-bit inputs. Leaves that model and recipe in DIR. */
static enum sits_status try_layers(struct search *s, int32_t n, double *loss, struct sits_error *err)
{
  double nll = 0;
  enum sits_status status = write_recipe(s, n, err);
  if (!status) status = compile_by(s, s->recipe, s->model, s->report, err);
  if (!status) status = measure(s, s->model, &nll, err);
  if (status) return status;
  *loss = 100 * (exp(nll - s->reference) - 1);
  printf("%d of %d layers with 8-bit inputs: perplexity %.4f, %+.2f %%\n", n, s->n_layers, exp(nll), *loss);
  fflush(stdout);
  json_array_append_new(s->tries, json_pack("{si sf sf}", "int8_layers", n, "perplexity", exp(nll), "loss_percent", *loss));
  return SITS_OK;
}

static enum sits_status bisect(struct search *s, struct sits_error *err)
{
  const double most = s->options->max_ppl_loss;
  double loss;
  enum sits_status status = try_layers(s, 0, &loss, err);
  if (status || most <= 0 || loss <= most) return status;
  int32_t low = 0, high = s->n_layers, last = 0;   /* low fails; high is the least known to hold, once tried */
  status = try_layers(s, high, &loss, err);
  if (!status && loss > most)
    return sits_fail_param(err, SITS_CONFIG, "max-ppl-loss", "even with 8-bit inputs everywhere the loss is %.2f %%, above %.2f %%", loss,
                           most);
  for (last = high; high - low > 1 && !status;) {
    const int32_t middle = low + (high - low) / 2;
    status = try_layers(s, middle, &loss, err);
    last = middle;
    if (loss <= most) high = middle;
    else low = middle;
  }
  if (!status && last != high) status = try_layers(s, high, &loss, err);
  return status;
}

static enum sits_status measure_reference(struct search *s, struct sits_error *err)
{
  char path[4112];
  struct model *model;
  enum sits_status status = model_open(s->options->model, &model, err);
  if (status) return status;
  s->n_layers = model->config.n_layers;
  const bool is_short = s->options->ctx > model->config.max_context;
  model_close(model);
  if (is_short) return sits_fail_param(err, SITS_CONFIG, "ctx", "ctx %" PRId64 " is more than the model's context", s->options->ctx);
  snprintf(path, sizeof path, "%s.reference", s->model);
  status = compile_by(s, "w16a16", path, NULL, err);
  if (!status) status = measure(s, path, &s->reference, err);
  unlink(path);
  if (!status) printf("16 bits: perplexity %.4f\n", exp(s->reference));
  return status;
}

static enum sits_status optimise(const struct opt_options *o, struct sits_error *err)
{
  struct search s = {.options = o};
  if (o->rotate) return sits_fail_param(err, SITS_UNSUPPORTED, "rotate", "rotations are not supported yet: leave out --rotate");
  if (!o->calibration) return sits_fail_param(err, SITS_CONFIG, "calibration", "no text: give --calibration FILE");
  if (strlen(o->output) > 4000) return sits_fail_param(err, SITS_CONFIG, "output", "the folder's name is too long");
  if (mkdir(o->output, 0777) != 0 && errno != EEXIST) return sits_fail(err, SITS_IO, "%.150s: %s", o->output, strerror(errno));
  snprintf(s.model, sizeof s.model, "%s/model.bin", o->output);
  snprintf(s.recipe, sizeof s.recipe, "%s/recipe.yaml", o->output);
  snprintf(s.report, sizeof s.report, "%s/report.json", o->output);
  snprintf(s.log, sizeof s.log, "%s/search.json", o->output);
  s.tries = json_array();
  enum sits_status status = measure_reference(&s, err);
  if (!status) status = bisect(&s, err);
  json_t *log = status ? NULL : json_pack("{sf sf sO}", "reference_perplexity", exp(s.reference), "max_ppl_loss", o->max_ppl_loss,
                                          "tries", s.tries);
  if (!status && (!log || json_dump_file(log, s.log, JSON_INDENT(1) | JSON_REAL_PRECISION(8))))
    status = sits_fail(err, SITS_IO, "%.150s: cannot be written", s.log);
  json_decref(log);
  json_decref(s.tries);
  return status;
}

static int print_help(const struct option_set *set)
{
  struct buf help;
  buf_init(&help, 1 << 20);
  printf("usage: sits2026-opt MODEL -o DIR --calibration FILE [options]\n");
  if (option_write_help(set, &help)) printf("\n%s", help.data);
  buf_fini(&help);
  return 0;
}

static int run(int argc, char **argv, struct option_set *set, struct opt_options *options)
{
  static char output[] = "--output";
  struct sits_error err = {0};
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return print_help(set);
    if (strcmp(argv[i], "-o") == 0) argv[i] = output;
  }
  enum sits_status status = option_parse_args(set, argc, argv, 1, &options->model, &err);
  if (!status && !options->model) status = sits_fail_param(&err, SITS_CONFIG, "model",
                                                           "no model: sits2026-opt MODEL -o DIR --calibration FILE");
  if (!status && !options->output) status = sits_fail_param(&err, SITS_CONFIG, "output", "no folder: give -o DIR");
  if (!status) status = optimise(options, &err);
  if (!status) return 0;
  fprintf(stderr, "sits2026-opt: %s\n", err.text);
  return status == SITS_CONFIG || status == SITS_INVALID_ARGUMENT ? 2 : 1;
}

int main(int argc, char **argv)
{
  struct opt_options options = {0};
  struct option_set set;
  struct sits_error err = {0};
  if (option_set_init(&set, specs, N_SPECS, &options, &err)) {
    fprintf(stderr, "sits2026-opt: %s\n", err.text);
    return 1;
  }
  const int code = run(argc, argv, &set, &options);
  option_set_fini(&set);
  return code;
}
