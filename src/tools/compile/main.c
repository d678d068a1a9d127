/* sits2026-compile MODEL -o FILE [options]: options here, the work in compile_*.c. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/json.h"
#include "base/mem.h"
#include "compile.h"
#include "config/option.h"

#define AT(field) offsetof(struct compile_options, field)
#define STR(name, field, help) {name, OPTION_STRING, AT(field), "", 0, 0, "", 0, NULL, "Options", help}
#define INT(name, field, def, min, max, unit, help) {name, OPTION_INT, AT(field), def, min, max, unit, 0, NULL, "Options", help}
#define BOOL(name, field, help) {name, OPTION_BOOL, AT(field), "false", 0, 0, "", 0, NULL, "Options", help}
#define ENUM(name, field, def, choices, help) {name, OPTION_ENUM, AT(field), def, 0, 0, "", 0, choices, "Options", help}

static const struct option_spec specs[] = {
    STR("output", output, "The engine file to write; -o FILE for short."),
    STR("recipe", recipe, "w16a16, w8a8, w4a16, w4a8 (the default), w4a8-g128 (for a GPU), w4a4, w4a4-mixed, or a YAML file."),
    ENUM("target", target, "any", "any|cpu|cuda-sm80|cuda-sm90",
         "Where it will run: what cannot is refused. All hold the neutral layout, which is packed for the device while loading."),
    ENUM("kv-cache-compress", kv_cache_compress, "none", "none|int8|int4|fp4|fp4-sparse",
         "How the cache of keys and values is stored unless the server says otherwise. none: f16."),
    STR("calibration", calibration, "UTF-8 text file for recipes that need activations (int4 activations with outliers, gptq)."),
    INT("calibration-windows", calibration_windows, "3", 1, 1 << 20, "windows", "Windows of the text to run."),
    INT("calibration-ctx", calibration_ctx, "2048", 8, 1 << 20, "tokens", "Tokens of a window; at most the model's context."),
    {"hessian-memory", OPTION_BYTES, AT(hessian_memory), "2G", 1 << 20, 1e13, "bytes", 0, NULL, "Options",
     "Memory for gptq's Hessians; where they need more, the text runs several times."},
    INT("threads", threads, "0", 0, 1024, "threads", "Worker threads. 0: one per core."),
    STR("report", report, "JSON file for the errors of every matrix beside those that theory expects."),
    STR("work", work, "Folder that keeps finished matrices, so that a run that was cut goes on where it stopped."),
    STR("inspect", inspect, "Print the header and tensors of an engine file, check its checksums, and stop."),
    BOOL("recipes", recipes, "Print the built-in recipes and stop."),
    BOOL("recipe-help", recipe_help, "Print the fields of recipe files and stop."),
    BOOL("quiet", quiet, "Only the last line."),
};
enum { N_SPECS = sizeof specs / sizeof specs[0] };

static int print_help(const struct option_set *set)
{
  struct buf help;
  buf_init(&help, 1 << 20);
  printf("usage: sits2026-compile MODEL -o FILE [options]\n       sits2026-compile --inspect FILE\n\nMODEL is a GGUF file, a Hugging "
         "Face directory, or a folder that sits2026-opt wrote.\n");
  if (option_write_help(set, &help)) printf("\n%s", help.data);
  buf_fini(&help);
  return 0;
}

static enum sits_status print_recipes(const struct compile_options *options, struct sits_error *err)
{
  struct quant_recipe recipe;
  struct buf text;
  for (int i = 0; i < quant_recipe_count() && options->recipes; i++) printf("# %s.yaml\n%s\n", quant_recipe_name(i), quant_recipe_text(i));
  if (!options->recipe_help) return SITS_OK;
  enum sits_status status = quant_recipe_parse("", 0, "help", &recipe, err);
  if (status) return status;
  buf_init(&text, 1 << 20);
  if (quant_recipe_write_help(&recipe, &text)) printf("%s", text.data);
  buf_fini(&text);
  quant_recipe_fini(&recipe);
  return SITS_OK;
}

/* MODEL may be a folder that sits2026-opt wrote: then what it prepared, or else the model that its search.json names, by the recipe that it
 * found unless another is given. */
struct opt_folder { char model[4096], recipe[4096]; };

static enum sits_status take_opt_folder(struct compile_options *options, struct opt_folder *f, struct sits_error *err)
{
  char path[4096];
  json_t *state;
  if ((size_t)snprintf(path, sizeof path, "%s/search.json", options->model) >= sizeof path || access(path, R_OK) != 0) return SITS_OK;
  const enum sits_status status = json_parse_file(path, &json_limits_file, &state, err);
  if (status) return status;
  const char *model = json_string_value(json_object_get(state, "model"));
  snprintf(f->recipe, sizeof f->recipe, "%.4000s/recipe.yaml", options->model);
  snprintf(f->model, sizeof f->model, "%.4000s/prepared.bin", options->model);
  if (access(f->model, R_OK) != 0) snprintf(f->model, sizeof f->model, "%s", model ? model : "");
  json_decref(state);
  if (!*f->model) return sits_fail_param(err, SITS_FORMAT, "model", "%.150s: names no model", path);
  options->model = f->model;
  if (!options->recipe) options->recipe = f->recipe;
  return SITS_OK;
}

static enum sits_status compile(const struct compile_options *given, struct sits_error *err)
{
  struct compile_result r;
  struct compile_options own = *given, *options = &own;
  struct opt_folder folder;
  enum sits_status status = take_opt_folder(options, &folder, err);
  if (!status) status = compile_run(options, &r, err);
  if (status) return status;
  if (r.n_resumed > 0) printf("%lld matrices of an earlier run\n", (long long)r.n_resumed);
  printf("%s: recipe %s, %.1f MB of weights, %.1f %% of the layers' multiply-adds 4x4 bits, %d inputs scaled, %.1f s, "
         "peak memory %.0f MB\n", options->output, r.recipe, (double)r.weight_bytes * 1e-6, 100 * r.share_4x4, r.n_scaled, r.seconds,
         (double)mem_peak_bytes() * 1e-6);
  return SITS_OK;
}

/* A copy of argv in which -o is spelled out. */
static char **long_words(int argc, char **argv)
{
  static char output[] = "--output";
  char **words = mem_calloc((size_t)argc + 1, sizeof *words);
  for (int i = 0; words && i < argc; i++) words[i] = i > 0 && strcmp(argv[i], "-o") == 0 ? output : argv[i];
  return words;
}

static int run(int argc, char **argv, struct option_set *set, struct compile_options *options)
{
  struct sits_error err = {0};
  for (int i = 1; i < argc; i++)
    if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return print_help(set);
  char **words = long_words(argc, argv);
  enum sits_status status = words ? option_parse_args(set, argc, words, 1, &options->model, &err) : sits_fail(&err, SITS_NOMEM,
                                                                                                              "out of memory");
  if (status) ;
  else if (options->recipes || options->recipe_help) status = print_recipes(options, &err);
  else if (options->inspect) status = compile_inspect(options->inspect, &err);
  else if (!options->model) status = sits_fail_param(&err, SITS_CONFIG, "model", "no model: sits2026-compile MODEL -o FILE");
  else if (!options->output) status = sits_fail_param(&err, SITS_CONFIG, "output", "no output: give -o FILE");
  else status = compile(options, &err);
  mem_free(words);
  if (!status) return 0;
  fprintf(stderr, "sits2026-compile: %s\n", err.text);
  return status == SITS_CONFIG || status == SITS_INVALID_ARGUMENT ? 2 : 1;
}

int main(int argc, char **argv)
{
  mem_return_large();
  struct compile_options options = {0};
  struct option_set set;
  struct sits_error err = {0};
  if (option_set_init(&set, specs, N_SPECS, &options, &err)) {
    fprintf(stderr, "sits2026-compile: %s\n", err.text);
    return 1;
  }
  int code = run(argc, argv, &set, &options);
  option_set_fini(&set);
  return code;
}
