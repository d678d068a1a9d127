/* See quant_recipe.h. Entry points: quant_recipe_load, quant_recipe_parse. To add a field: a row in `specs`, a field in the struct, and
 * its use in the compiler. What bought how much on a small model is in the README beside this file. */
#include "quant/quant_recipe.h"

#include <stdio.h>
#include <string.h>

#include "base/mapfile.h"

#define AT(field) offsetof(struct quant_recipe, field)
#define STR(name, field, help) {name, OPTION_STRING, AT(field), "", 0, 0, "", 0, NULL, "Recipe", help}
#define INT(name, field, def, max, unit, help) {name, OPTION_INT, AT(field), def, 0, max, unit, 0, NULL, "Recipe", help}
#define BOOL(name, field, def, help) {name, OPTION_BOOL, AT(field), def, 0, 0, "", 0, NULL, "Recipe", help}
#define ENUM(name, field, def, choices, help) {name, OPTION_ENUM, AT(field), def, 0, 0, "", 0, choices, "Recipe", help}

static const struct option_spec specs[] = {
    STR("description", description, "One line about the recipe."),
    ENUM("weights", weights, "int4", "f16|int8|int4", "Element type of the layers' matrices."),
    INT("weight-group", weight_group, "32", 128, "inputs",
        "Inputs that share a scale: 32, 64 or 128; 0: one scale per output channel. Where it does not divide a row, the "
        "largest that does."),
    BOOL("weight-minimum", weight_minimum, "true", "A minimum beside each scale, so that a group's range need not be symmetric."),
    ENUM("weight-scales", weight_scales, "f16", "f16|multiples|powers",
         "What the scales of int4 groups may be where a matrix is rounded anew: any; 1 to 16 times one scale of the output channel; or 1, "
         "2, 4, 8 or 16 times it."),
    BOOL("keep-grid", keep_grid, "true",
         "Matrices that come as integers of the wanted width or less in groups of 32 (Q4_0, Q4_1; for int8 also Q5_0, Q5_1, Q8_0) pass "
         "unchanged; those that come in 4 bits of another form (Q4_K) keep their form."),
    BOOL("clip", clip, "true", "Search each group's range for the least squared error instead of taking its extremes (4 bits only)."),
    ENUM("method", method, "rtn", "rtn|gptq", "How matrices that are rounded anew are rounded. gptq needs calibration text."),
    ENUM("scaling", scaling, "auto", "auto|none|awq",
         "Move scale from the inputs of matrices that are rounded anew into their columns, and back out of the norm or matrix before, so "
         "that the columns that matter most are rounded finest. auto: where there is calibration text."),
    ENUM("head", head, "keep", "keep|f16|int8", "Embedding and head. keep: as they come, float ones as f16."),
    ENUM("activations", activations, "int8", "backend|float|int8|int4",
         "Inputs of the layers' matrix products. backend: as the device that runs the file likes (a CPU: int8; a GPU: 16 bits, and 8 bits "
         "a token where a step has many and the weights are in groups of 128); the others are the same everywhere, on a GPU at the speed "
         "of 16 bits."),
    ENUM("down-activations", down_activations, "same", "same|backend|float|int8|int4", "Input of down_proj, the hardest to round."),
    ENUM("head-activations", head_activations, "int8", "backend|float|int8", "Input of the head."),
    INT("outliers", outliers, "128", 4096, "channels",
        "Channels of an int4 site that stay in 8 bits: those of the highest mean square on the calibration text, at most a quarter."),
    INT("int8-first-layers", int8_first_layers, "0", 1024, "layers", "Layers from the first on whose int4 sites become int8."),
    STR("int8-sites", int8_sites, "More int4 sites that become int8, as LAYER.SITE,...: 0.qkv,0.o,3.gate_up,3.down."),
    INT("int8-last-layers", int8_last_layers, "0", 1024, "layers", "Layers up to the last whose int4 sites become int8."),
};
enum { N_SPECS = sizeof specs / sizeof specs[0] };

static const struct { const char *name, *text; } builtin[] = {
    {"w16a16",
     "description: Everything in 16-bit floats, activations in 32; the reference.\n"
     "weights: f16\n"
     "head: f16\n"
     "activations: float\n"
     "head-activations: float\n"},
    {"w8a8",
     "description: 8-bit weights and activations, groups of 32 on both sides.\n"
     "weights: int8\n"
     "weight-group: 32\n"
     "weight-minimum: true\n"
     "activations: int8\n"},
    {"w4a16",
     "description: 4-bit weights, activations not rounded.\n"
     "weights: int4\n"
     "weight-group: 32\n"
     "activations: float\n"
     "head-activations: float\n"},
    {"w4a8",
     "description: 4-bit weights, 8-bit activations in groups of 32.\n"
     "weights: int4\n"
     "weight-group: 32\n"
     "activations: int8\n"},
    {"w4a8-g128",
     "description: 4-bit weights in groups of 128 for a GPU, scales powers of two times the channel's, activations as the device likes.\n"
     "weights: int4\n"
     "weight-group: 128\n"
     "weight-minimum: false\n"
     "weight-scales: powers\n"
     "activations: backend\n"
     "head-activations: backend\n"},
    {"w4a4",
     "description: 4-bit weights and activations; 128 outlier channels a site and down_proj's input in 8 bits.\n"
     "weights: int4\n"
     "weight-group: 32\n"
     "activations: int4\n"
     "outliers: 128\n"
     "down-activations: int8\n"},
    {"w4a4-mixed",
     "description: As w4a4, with 8-bit activations in the first two and the last five layers.\n"
     "weights: int4\n"
     "weight-group: 32\n"
     "activations: int4\n"
     "outliers: 128\n"
     "down-activations: int8\n"
     "int8-first-layers: 2\n"
     "int8-last-layers: 5\n"},
};

int quant_recipe_count(void) { return (int)(sizeof builtin / sizeof builtin[0]); }
const char *quant_recipe_name(int index) { return builtin[index].name; }
const char *quant_recipe_text(int index) { return builtin[index].text; }

static enum sits_status check(const struct quant_recipe *r, const char *origin, struct sits_error *err)
{
  const int64_t group = r->weight_group;
  if (group != 0 && group != 32 && group != 64 && group != 128)
    return sits_fail_param(err, SITS_CONFIG, "weight-group", "%.150s: weight-group is 0, 32, 64 or 128, not %lld", origin,
                           (long long)group);
  if (strcmp(r->weight_scales, "f16") != 0 && (strcmp(r->weights, "int4") != 0 || group == 0))
    return sits_fail_param(err, SITS_CONFIG, "weight-scales", "%.150s: weight-scales %s goes with int4 weights in groups", origin,
                           r->weight_scales);
  if (strcmp(r->weights, "f16") == 0 && (strcmp(r->activations, "float") != 0 || strcmp(r->method, "rtn") != 0))
    return sits_fail_param(err, SITS_CONFIG, "activations", "%.150s: f16 weights go with float activations and rtn", origin);
  if (strcmp(r->weights, "f16") == 0 && strcmp(r->down_activations, "same") != 0 && strcmp(r->down_activations, "float") != 0)
    return sits_fail_param(err, SITS_CONFIG, "down-activations", "%.150s: f16 weights go with float activations", origin);
  if (strcmp(r->head, "f16") == 0 && strcmp(r->head_activations, "float") != 0)
    return sits_fail_param(err, SITS_CONFIG, "head-activations", "%.150s: an f16 head goes with float activations", origin);
  return SITS_OK;
}

static enum sits_status begin(struct quant_recipe *out, const char *name, struct sits_error *err)
{
  const char *slash = strrchr(name, '/'), *tail = slash ? slash + 1 : name;
  const size_t n = strlen(tail), ending = n > 5 && strcmp(tail + n - 5, ".yaml") == 0 ? 5 : 0;
  memset(out, 0, sizeof *out);
  snprintf(out->name, sizeof out->name, "%.*s", (int)(n - ending < 63 ? n - ending : 63), tail);
  return option_set_init(&out->set, specs, N_SPECS, out, err);
}

enum sits_status quant_recipe_parse(const char *text, size_t n_bytes, const char *origin, struct quant_recipe *out, struct sits_error *err)
{
  enum sits_status status = begin(out, origin, err);
  if (status) return status;
  status = option_parse_yaml(&out->set, text, n_bytes, origin, err);
  if (!status) status = check(out, origin, err);
  if (status) quant_recipe_fini(out);
  return status;
}

/* A file that sets nothing was meant to be another one: cut short, or not written yet. */
static bool says_something(const struct quant_recipe *recipe)
{
  for (int i = 0; i < N_SPECS; i++)
    if (recipe->set.is_set[i] && strcmp(specs[i].name, "description") != 0) return true;
  return false;
}

enum sits_status quant_recipe_load(const char *name, struct quant_recipe *out, struct sits_error *err)
{
  const size_t n = strlen(name);
  for (int i = 0; i < quant_recipe_count(); i++)
    if (strcmp(name, builtin[i].name) == 0) return quant_recipe_parse(builtin[i].text, strlen(builtin[i].text), name, out, err);
  if (!strchr(name, '/') && !(n > 5 && strcmp(name + n - 5, ".yaml") == 0))
    return sits_fail_param(err, SITS_CONFIG, "recipe",
                           "no recipe '%.60s': w16a16, w8a8, w4a16, w4a8, w4a8-g128, w4a4, w4a4-mixed, or a .yaml file", name);
  struct mapfile file;
  enum sits_status status = mapfile_open(&file, name, err);
  if (status) return status;
  if (file.n_bytes > 1u << 16) status = sits_fail(err, SITS_CONFIG, "%.150s: larger than 64 KiB", name);
  else status = quant_recipe_parse((const char *)file.data, file.n_bytes, name, out, err);
  if (!status && !says_something(out)) {
    quant_recipe_fini(out);
    status = sits_fail_param(err, SITS_CONFIG, "recipe", "%.150s: no field of a recipe is in it", name);
  }
  mapfile_close(&file);
  return status;
}

void quant_recipe_fini(struct quant_recipe *recipe) { option_set_fini(&recipe->set); }

bool quant_recipe_write_help(const struct quant_recipe *recipe, struct buf *out) { return option_write_help(&recipe->set, out); }
