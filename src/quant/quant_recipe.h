/* Recipes: how a model's weights and activations are rounded. One YAML mapping each; the named ones are built in and lie in configs/recipes
 * as well, as examples to start from. The fields are documented in the table of quant_recipe.c (sits2026-compile --recipe-help). */
#ifndef SITS_QUANT_QUANT_RECIPE_H
#define SITS_QUANT_QUANT_RECIPE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "config/option.h"
#include "sits2026/status.h"

struct quant_recipe {
  const char *description;
  const char *weights;               /* f16|int8|int4: of the layers' matrices */
  int64_t weight_group;              /* 0: per channel */
  bool weight_minimum;
  const char *weight_scales;         /* f16|multiples|powers */
  bool keep_grid;
  bool clip;
  const char *method;                /* rtn|gptq */
  const char *scaling;               /* auto|none|awq */
  const char *head;                  /* keep|f16|int8: of embedding and head */
  const char *activations;           /* backend|float|int8|int4 */
  const char *down_activations;      /* same|backend|float|int8|int4 */
  const char *head_activations;      /* backend|float|int8 */
  int64_t outliers;                  /* channels of an int4 site kept in 8 bits */
  int64_t int8_first_layers, int8_last_layers; /* layers whose int4 sites become int8 */
  const char *int8_sites;            /* "LAYER.SITE,..." sites that do; NULL: none */
  char name[64];                     /* of the built-in recipe, or the file's without folder and ending */
  struct option_set set;             /* owns the strings */
};

/* name_or_path: a built-in name, or a path that holds a '/' or ends in .yaml. Errors name the recipe and the field. A file
 * without any field but a description is refused. */
enum sits_status quant_recipe_load(const char *name_or_path, struct quant_recipe *out, struct sits_error *err) SITS_MUST_CHECK;
/* The same from text; origin stands for the path. */
enum sits_status quant_recipe_parse(const char *text, size_t n_bytes, const char *origin, struct quant_recipe *out, struct sits_error *err)
    SITS_MUST_CHECK;
void quant_recipe_fini(struct quant_recipe *recipe);

int quant_recipe_count(void);
const char *quant_recipe_name(int index);      /* of the built-in ones */
const char *quant_recipe_text(int index);      /* YAML */
bool quant_recipe_write_help(const struct quant_recipe *recipe, struct buf *out); /* the fields */

#endif
