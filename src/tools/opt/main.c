/* sits2026-opt MODEL -o DIR --calibration TEXT [options]: options and the order of steps; the steps are opt_*.c (see opt.h). */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/json.h"
#include "base/mem.h"
#include "config/option.h"
#include "opt.h"
#include "tools/compile/compile.h"
#include "tools/eval/eval.h"

#define AT(field) offsetof(struct opt_options, field)
#define STR(name, field, help) {name, OPTION_STRING, AT(field), "", 0, 0, "", 0, NULL, "Options", help}
#define INT(name, field, def, min, max, unit, help) {name, OPTION_INT, AT(field), def, min, max, unit, 0, NULL, "Options", help}

static const struct option_spec specs[] = {
    STR("output", output, "The folder to write; -o DIR for short. A run that was cut goes on there."),
    STR("recipe", recipe, "Where to start from: a built-in recipe (default w4a4) or a YAML file."),
    STR("calibration", calibration, "UTF-8 text: its first windows calibrate, the next ones measure."),
    {"max-ppl-loss", OPTION_FLOAT, AT(max_ppl_loss), "0", 0, 1000, "percent", 0, NULL, "Options",
     "Most that perplexity may rise, in percent of the 16-bit model's. 0: no search, the recipe as it is."},
    INT("calibration-windows", calibration_windows, "3", 1, 1 << 20, "windows", "Windows that calibrate."),
    INT("windows", windows, "4", 1, 1 << 20, "windows", "Windows that measure; max-ppl-loss takes as many again to judge by."),
    INT("ctx", ctx, "2048", 8, 1 << 20, "tokens", "Tokens of a window; at most the model's context."),
    INT("sensitivity-ctx", sensitivity_ctx, "512", 8, 1 << 20, "tokens", "Tokens of the window that sensitivities are measured on."),
    {"rotate", OPTION_ENUM, AT(rotate), "auto", 0, 0, "", 0, "auto|none|all", "Options",
     "Hadamard rotations: auto measures the output error of every matrix with and without and keeps the lesser; all rotates everything."},
    INT("rotation-seeds", rotation_seeds, "4", 1, 1024, "seeds",
        "Sign patterns of the residual stream's rotation to try; the best is kept."),
    INT("down-rotation", down_rotation, "128", 2, 4096, "channels", "Block of the run-time rotation of down_proj's input; a power of two."),
    {"hessian-memory", OPTION_BYTES, AT(hessian_memory), "2G", 1 << 20, 1e13, "bytes", 0, NULL, "Options",
     "Memory for gptq's Hessians; where they need more, the text runs several times."},
    {"kv-cache-compress", OPTION_ENUM, AT(kv_cache_compress), "none", 0, 0, "", 0, "none|int8|int4|fp4|fp4-sparse", "Options",
     "How the cache will be stored; it is measured that way."},
    INT("threads", threads, "0", 0, 1024, "threads", "Worker threads. 0: one per core."),
};
enum { N_SPECS = sizeof specs / sizeof specs[0] };

void opt_path(const struct opt_run *run, const char *name, char out[4096]) { snprintf(out, 4096, "%s/%s", run->options->output, name); }

enum sits_status opt_save(const struct opt_run *run, struct sits_error *err)
{
  char path[4096];
  opt_path(run, "search.json", path);
  return eval_write_json(run->state, path, err);
}

void opt_progress(const char *what, int64_t done, int64_t total)
{
  static const char bar[] = "########################################";
  const int full = (int)(done * 40 / total);
  if (!isatty(STDERR_FILENO)) return;
  fprintf(stderr, "\r%-16s [%-40.*s] %3d %%%s", what, full, bar, (int)(done * 100 / total), done == total ? "\n" : "");
}

enum sits_status opt_compile(const struct opt_run *run, const char *source, const char *recipe, const char *output, const char *report,
                             const char *work, bool is_quiet, struct sits_error *err)
{
  const struct opt_options *o = run->options;
  const struct compile_options compile = {
      .model = source, .output = output, .recipe = recipe ? recipe : run->recipe, .target = "any",
      .kv_cache_compress = o->kv_cache_compress, .calibration = o->calibration, .report = report, .work = work,
      .calibration_windows = o->calibration_windows, .calibration_ctx = o->ctx, .threads = o->threads,
      .hessian_memory = o->hessian_memory, .quiet = is_quiet};
  struct compile_result result;
  const enum sits_status status = compile_run(&compile, &result, err);
  if (!status && !is_quiet)
    printf("%s: %.1f MB of weights, %.1f %% of the layers' multiply-adds 4x4 bits, %.1f s\n", output, (double)result.weight_bytes * 1e-6,
           100 * result.share_4x4, result.seconds);
  return status;
}

enum sits_status opt_measure(const struct opt_run *run, const char *model, bool held_out, double *nll, struct sits_error *err)
{
  const struct opt_options *o = run->options;
  const struct eval_options eval = {.model = model, .text = o->calibration, .device = "cpu", .isa = "auto", .kv_cache_dtype = "auto",
                                    .threads = o->threads, .ctx = o->ctx, .windows = o->windows, .by_layer = true,
                                    .skip_windows = o->calibration_windows + (held_out ? o->windows : 0)};
  struct eval_score score;
  const enum sits_status status = eval_score(&eval, &score, err);
  if (status) return status;
  double sum = 0;
  for (int64_t i = 0; i < score.n_windows; i++) sum += score.nll[i];
  *nll = sum / (double)(score.n_windows * eval_scored(o->ctx));
  mem_free(score.nll);
  return SITS_OK;
}

static enum sits_status measure_reference(struct opt_run *run, struct sits_error *err)
{
  char path[4096];
  const bool judges = run->options->max_ppl_loss > 0;
  const json_t *known = json_object_get(run->state, "reference_nll"), *held_out = json_object_get(run->state, "held_out_reference_nll");
  opt_path(run, "reference.bin", path);
  run->reference = json_number_value(known);
  run->held_out_reference = json_number_value(held_out);
  if (known && (held_out || !judges) && access(path, R_OK) == 0) return SITS_OK;
  enum sits_status status = opt_compile(run, run->options->model, "w16a16", path, NULL, NULL, true, err);
  if (!status) status = opt_measure(run, path, false, &run->reference, err);
  if (!status && judges) status = opt_measure(run, path, true, &run->held_out_reference, err);
  if (status) return status;
  printf("16 bits: perplexity %.4f\n", exp(run->reference));
  json_object_set_new(run->state, "reference_nll", json_real(run->reference));
  json_object_set_new(run->state, "reference_perplexity", json_real(exp(run->reference)));
  if (judges) json_object_set_new(run->state, "held_out_reference_nll", json_real(run->held_out_reference));
  return opt_save(run, err);
}

/* Perplexity of the finished file, on the windows that were searched on or on those held out. */
static enum sits_status report_loss(struct opt_run *run, const char *model, bool held_out, struct sits_error *err)
{
  double nll = 0;
  const enum sits_status status = opt_measure(run, model, held_out, &nll, err);
  if (status) return status;
  const double loss = 100 * (exp(nll - (held_out ? run->held_out_reference : run->reference)) - 1);
  printf("perplexity %.4f, %+.2f %% of the 16-bit model's%s\n", exp(nll), loss,
         held_out ? ", on windows held out; on other texts it can be more" : "");
  json_object_set_new(run->state, held_out ? "held_out_perplexity" : "perplexity", json_real(exp(nll)));
  json_object_set_new(run->state, held_out ? "held_out_loss_percent" : "loss_percent", json_real(loss));
  return opt_save(run, err);
}

/* The recipe, by the search where one is wanted, and the file by it. */
static enum sits_status make_model(struct opt_run *run, struct sits_error *err)
{
  char model[4096], recipe[4096], report[4096], work[4096];
  opt_path(run, "model.bin", model);
  opt_path(run, "recipe.yaml", recipe);
  opt_path(run, "report.json", report);
  opt_path(run, "work", work);
  const bool searches = run->options->max_ppl_loss > 0;
  enum sits_status status = searches ? opt_compile(run, run->source, NULL, model, NULL, NULL, true, err) : SITS_OK;
  if (!status) status = opt_search(run, err);
  if (!status) status = opt_compile(run, run->source, recipe, model, report, work, false, err);
  if (!status) status = opt_plot(run, err);
  if (!status) status = report_loss(run, model, false, err);
  if (!status && searches) status = report_loss(run, model, true, err);
  if (!status) rmdir(work);
  return status;
}

/* A search needs windows to calibrate, to search on, and to judge by. */
static enum sits_status check_windows(const struct opt_options *o, const struct model *model, struct sits_error *err)
{
  const int64_t wanted = o->calibration_windows + 2 * o->windows;
  const struct eval_options text = {.text = o->calibration};
  struct token_list ids = {0};
  struct tokenizer *tokenizer;
  enum sits_status status = tokenizer_load(model->source, &tokenizer, err);
  if (status) return status;
  status = eval_encode_file(tokenizer, &text, &ids, err);
  tokenizer_destroy(tokenizer);
  if (!status && ids.n / o->ctx < wanted)
    status = sits_fail_param(err, SITS_INVALID_ARGUMENT, "calibration",
                             "max-ppl-loss needs %" PRId64 " windows of text (%" PRId64 " that calibrate, %" PRId64
                             " to search on, as many to judge by), the text has %" PRId64, wanted, o->calibration_windows, o->windows,
                             ids.n / o->ctx);
  token_list_fini(&ids);
  return status;
}

/* The state of an earlier run with the same options, or a new one. */
static enum sits_status open_state(struct opt_run *run, struct sits_error *err)
{
  const struct opt_options *o = run->options;
  char path[4096], key[24];
  struct buf text;
  struct model *model;
  struct quant_recipe recipe;
  enum sits_status status = model_open(o->model, &model, err);
  if (status) return status;
  run->n_layers = model->config.n_layers;
  uint64_t inputs = 0;
  status = compile_fingerprint(model->source, o->calibration, &inputs, err);
  const bool is_ctx = !status && o->ctx > model->config.max_context;
  if (!status && (is_ctx || o->sensitivity_ctx > model->config.max_context))
    status = sits_fail_param(err, SITS_CONFIG, is_ctx ? "ctx" : "sensitivity-ctx", "%s %" PRId64 " is more than the model's context",
                             is_ctx ? "ctx" : "sensitivity-ctx", is_ctx ? o->ctx : o->sensitivity_ctx);
  if (!status && o->max_ppl_loss > 0) status = check_windows(o, model, err);
  buf_init(&text, 1 << 20);
  buf_printf(&text, "%s %" PRIx64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %s %" PRId64 " %" PRId64 " %s ", o->model, inputs,
             o->calibration_windows, o->windows, o->ctx, o->sensitivity_ctx, o->rotate, o->rotation_seeds, o->down_rotation,
             o->kv_cache_compress);
  model_close(model);
  if (!status) status = quant_recipe_load(o->recipe ? o->recipe : "w4a4", &recipe, err);
  if (status) {
    buf_fini(&text);
    return status;
  }
  option_write_yaml(&recipe.set, false, &text);
  quant_recipe_fini(&recipe);
  snprintf(key, sizeof key, "%016" PRIx64, hash_bytes(1, text.data, text.size));
  if (text.failed) status = sits_fail(err, SITS_NOMEM, "out of memory");
  buf_fini(&text);
  opt_path(run, "search.json", path);
  struct sits_error ignored;
  if (!status && access(path, R_OK) == 0 && json_parse_file(path, &json_limits_file, &run->state, &ignored) == SITS_OK) {
    const char *old = json_string_value(json_object_get(run->state, "key"));
    if (old && strcmp(old, key) == 0) return SITS_OK;
    json_decref(run->state);
    run->state = NULL;
  }
  if (!status) run->state = json_pack("{ss}", "key", key);
  if (!status && !run->state) status = sits_fail(err, SITS_NOMEM, "out of memory");
  return status;
}

static enum sits_status optimise(const struct opt_options *o, struct sits_error *err)
{
  struct opt_run run = {.options = o};
  char reference[4096], base[4096];
  if (!o->calibration) return sits_fail_param(err, SITS_CONFIG, "calibration", "no text: give --calibration FILE");
  if (strlen(o->output) > 4000 || strlen(o->model) > 4000 || (o->recipe && strlen(o->recipe) > 4000))
    return sits_fail_param(err, SITS_CONFIG, "output", "the name of the folder, the model or the recipe is too long");
  if ((o->down_rotation & (o->down_rotation - 1)) != 0)
    return sits_fail_param(err, SITS_CONFIG, "down-rotation", "down-rotation %" PRId64 " is no power of two", o->down_rotation);
  if (mkdir(o->output, 0777) != 0 && errno != EEXIST) return sits_fail(err, SITS_IO, "%.150s: %s", o->output, strerror(errno));
  snprintf(run.source, sizeof run.source, "%s", o->model);
  snprintf(run.recipe, sizeof run.recipe, "%s", o->recipe ? o->recipe : "w4a4");
  enum sits_status status = open_state(&run, err);
  if (!status) json_object_set_new(run.state, "max_ppl_loss", json_real(o->max_ppl_loss));
  if (!status) json_object_set_new(run.state, "model", json_string(o->model));
  if (!status) status = measure_reference(&run, err);
  if (!status) status = opt_rotate(&run, err);
  if (!status) status = make_model(&run, err);
  json_decref(run.state);
  opt_path(&run, "base.yaml", base);
  opt_path(&run, "reference.bin", reference);
  if (!status) unlink(reference);
  if (!status) unlink(base);
  if (!status) printf("peak memory %.0f MB\n", (double)mem_peak_bytes() * 1e-6);
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
  mem_return_large();
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
