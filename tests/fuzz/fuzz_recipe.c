/* Fuzz target: any bytes as a recipe. Refusals must carry text; what is accepted must obey the rules that the compiler relies on. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "quant/quant_recipe.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  struct quant_recipe r;
  struct sits_error err = {0};
  if (quant_recipe_parse((const char *)data, size, "fuzz.yaml", &r, &err)) {
    if (!err.text[0]) abort();
    return 0;
  }
  const int64_t group = r.weight_group;
  if (group != 0 && group != 32 && group != 64 && group != 128) abort();
  if (r.outliers < 0 || r.int8_first_layers < 0 || r.int8_last_layers < 0) abort();
  if (!r.weights || !r.activations || !r.head || !r.method || !r.down_activations || !r.head_activations) abort();
  if (strcmp(r.weights, "f16") == 0 && strcmp(r.activations, "float") != 0) abort();
  quant_recipe_fini(&r);
  return 0;
}
