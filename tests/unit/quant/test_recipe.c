/* Recipes: the built-in ones are those of configs/recipes, each field has the meaning its name says, and mistakes are named. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mapfile.h"
#include "base/mem.h"
#include "quant/quant_recipe.h"

static void files_equal_builtin(void **state)
{
  (void)state;
  struct sits_error err = {0};
  for (int i = 0; i < quant_recipe_count(); i++) {
    char path[128];
    struct mapfile file;
    snprintf(path, sizeof path, "configs/recipes/%s.yaml", quant_recipe_name(i));
    if (mapfile_open(&file, path, &err)) fail_msg("%s", err.text);
    assert_int_equal(file.n_bytes, strlen(quant_recipe_text(i)));
    assert_memory_equal(file.data, quant_recipe_text(i), file.n_bytes);
    mapfile_close(&file);
  }
}

static void named_ones_say_what_their_names_say(void **state)
{
  (void)state;
  static const struct { const char *name, *weights, *activations, *down; int64_t outliers, last, group; } want[] = {
      {"w16a16", "f16", "float", "same", 128, 0, 32}, {"w8a8", "int8", "int8", "same", 128, 0, 32},
      {"w4a16", "int4", "float", "same", 128, 0, 32}, {"w4a8", "int4", "int8", "same", 128, 0, 32},
      {"w4a8-g128", "int4", "backend", "same", 128, 0, 128}, {"w4a4", "int4", "int4", "int8", 128, 0, 32},
      {"w4a4-mixed", "int4", "int4", "int8", 128, 5, 32}};
  enum { N_WANT = sizeof want / sizeof *want };
  assert_int_equal(quant_recipe_count(), N_WANT);
  for (size_t i = 0; i < N_WANT; i++) {
    struct quant_recipe r;
    struct sits_error err = {0};
    if (quant_recipe_load(want[i].name, &r, &err)) fail_msg("%s", err.text);
    assert_string_equal(r.name, want[i].name);
    assert_string_equal(r.weights, want[i].weights);
    assert_string_equal(r.activations, want[i].activations);
    assert_string_equal(r.down_activations, want[i].down);
    assert_int_equal(r.outliers, want[i].outliers);
    assert_int_equal(r.int8_last_layers, want[i].last);
    assert_int_equal(r.weight_group, want[i].group);
    assert_string_equal(r.weight_scales, want[i].group == 128 ? "powers" : "f16");
    assert_true(r.weight_minimum == (want[i].group != 128)); /* the kernels of long groups know none */
    assert_true(r.keep_grid);
    quant_recipe_fini(&r);
  }
}

static void mistakes_are_named(void **state)
{
  (void)state;
  static const struct { const char *yaml, *text, *param; } cases[] = {
      {"weights: int3\n", "x.yaml:1", "weights"},
      {"wieghts: int4\n", "wieghts", "wieghts"},
      {"weight-group: 48\n", "48", "weight-group"},
      {"weight-scales: thirds\n", "thirds", "weight-scales"},
      {"weights: int8\nweight-scales: multiples\n", "multiples", "weight-scales"},
      {"weight-group: 0\nweight-scales: powers\n", "powers", "weight-scales"},
      {"weights: f16\n", "f16 weights", "activations"},
      {"weights: f16\nactivations: backend\n", "f16 weights", "activations"},
      {"weights: f16\nactivations: float\ndown-activations: int8\nhead-activations: float\n", "f16 weights", "down-activations"},
      {"head: f16\n", "f16 head", "head-activations"},
      {"outliers: -1\n", "outliers", "outliers"},
      {"outliers: 1\noutliers: 2\n", "twice", "outliers"},
      {"weights: [int4]\n", "single value", ""},
      {"- a\n", "x.yaml:1", ""},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct quant_recipe r;
    struct sits_error err = {0};
    const int64_t blocks = mem_live_blocks();
    assert_int_equal(quant_recipe_parse(cases[i].yaml, strlen(cases[i].yaml), "x.yaml", &r, &err), SITS_CONFIG);
    if (!strstr(err.text, cases[i].text)) fail_msg("case %zu: '%s' lacks '%s'", i, err.text, cases[i].text);
    assert_string_equal(err.param, cases[i].param);
    assert_int_equal(mem_live_blocks(), blocks);
  }
  struct quant_recipe r;
  struct sits_error err = {0};
  assert_int_equal(quant_recipe_load("w5a5", &r, &err), SITS_CONFIG);
  assert_non_null(strstr(err.text, "w5a5"));
  assert_int_equal(quant_recipe_load("missing/w4a8.yaml", &r, &err), SITS_NOT_FOUND);
}

/* Files that set nothing are refused by their name. */
static void empty_files(void **state)
{
  (void)state;
  static const char *const texts[] = {"", "\n", "# weights: int4\n", "{}\n", "description: cut here\n"};
  const int64_t blocks = mem_live_blocks();
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
    char path[] = "/tmp/sits_recipe_XXXXXX.yaml";
    struct quant_recipe r;
    struct sits_error err = {0};
    const int fd = mkstemps(path, 5);
    assert_true(fd >= 0 && write(fd, texts[i], strlen(texts[i])) == (ssize_t)strlen(texts[i]));
    close(fd);
    const enum sits_status status = quant_recipe_load(path, &r, &err);
    unlink(path);
    assert_int_equal(status, SITS_CONFIG);
    assert_non_null(strstr(err.text, path));
    assert_int_equal(mem_live_blocks(), blocks);
  }
}

static void allocation_failures(void **state)
{
  (void)state;
#ifndef SITS_DEBUG_CHECKS
  skip(); /* this build counts no allocations */
#endif
  int64_t blocks = mem_live_blocks();
  for (uint64_t n = 1;; n++) {
    struct quant_recipe r;
    struct sits_error err = {0};
    mem_fault_arm(n);
    enum sits_status status = quant_recipe_load("w4a4", &r, &err);
    int fired = mem_fault_fired();
    mem_fault_arm(0);
    if (status == SITS_OK) quant_recipe_fini(&r);
    assert_int_equal(mem_live_blocks(), blocks);
    if (!fired) break;
    assert_true(status == SITS_NOMEM);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(files_equal_builtin), cmocka_unit_test(named_ones_say_what_their_names_say),
                                     cmocka_unit_test(mistakes_are_named), cmocka_unit_test(empty_files),
                                     cmocka_unit_test(allocation_failures)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
