/* Which product for which weight and step size (the table at the top of cuda_gemm.c), on the host alone: the form that activations are made
 * in says it. Needs no device. */
#include <string.h>

#include "backend/cuda/cuda_internal.h"
#include "gpu_test.h"

/* A letter a step size: fragments, token tiles of s8, the same in groups, e4m3, f16 rows (H). */
static const int32_t sizes[] = {1, 16, 17, 128, 129, 256, 257, 600, 2048};
enum { N_SIZES = sizeof sizes / sizeof *sizes };

static char letter_of(enum k_act_form form)
{
  switch (form) {
  case K_ACT_FRAG_F16: return 'F';
  case K_ACT_TILE_S8: return 'T';
  case K_ACT_GROUP_S8: return 'G';
  case K_ACT_ROW_E4M3: return 'E';
  default: return 'H';
  }
}

enum scales { POWERS, MULTIPLES, FREE, G32, FLOATS };

struct form_case {
  const char *name;
  enum scales scales;
  bool is_resident, no_e4m3, is_ampere;
  enum cuda_recipe recipe;
  enum act_kind act;                 /* ACT_BACKEND: the file says nothing */
  int32_t rows;                      /* 0: 512 */
  const char *want;
};

static void run(const struct form_case *c)
{
  static const struct program program = {.dims = {.n_embd = 256, .n_heads = 4, .head_dim = 64}};
  const struct act_format act = {.kind = c->act};
  float any = 0;
  struct backend backend = {.compute_major = c->is_ampere ? 8 : 9, .recipe = c->recipe};
  const struct backend_program p = {.backend = &backend, .program = &program, .has_e4m3 = !c->no_e4m3};
  const struct cuda_weight w = {.form = c->scales == FLOATS ? CUDA_F16 : CUDA_W4, .format = c->scales == G32 ? K_W4_G32M : K_W4_G128,
                                .rows = c->rows ? c->rows : 512, .cols = 256, .resident = c->is_resident ? &any : NULL,
                                .channel = c->scales <= MULTIPLES ? &any : NULL, .has_powers = c->scales == POWERS,
                                .act = c->act == ACT_BACKEND ? NULL : &act};
  char got[N_SIZES + 1] = {0};
  for (int i = 0; i < N_SIZES; i++) got[i] = letter_of(cuda_act_form(&p, &w, sizes[i]).form);
  const bool is_wide = cuda_is_wide_e4m3(&p, &w), wants_wide = strchr(c->want, 'E') != NULL;
  verdict(strcmp(got, c->want) == 0 && is_wide == wants_wide, "%s: %s%s", c->name, got, is_wide ? ", e4m3 when resident" : "");
}

int main(void)
{
  static const struct form_case cases[] = {
      {.name = "powers", .scales = POWERS, .want = "FFTTTTEEE"},
      {.name = "powers, resident", .scales = POWERS, .is_resident = true, .want = "FFTTEEEEE"},
      {.name = "powers, w4a8", .scales = POWERS, .recipe = CUDA_RECIPE_W4A8, .want = "FFTTTTEEE"},
      {.name = "powers, w4a16", .scales = POWERS, .recipe = CUDA_RECIPE_W4A16, .want = "FFHHHHHHH"},
      {.name = "powers, no e4m3", .scales = POWERS, .no_e4m3 = true, .want = "FFTTTTHHH"},
      {.name = "powers, 520 rows", .scales = POWERS, .rows = 520, .want = "FFTTTTHHH"},
      {.name = "powers, 520 rows, resident", .scales = POWERS, .rows = 520, .is_resident = true, .want = "FFTTTTHHH"},
      {.name = "powers, Ampere", .scales = POWERS, .is_ampere = true, .no_e4m3 = true, .want = "HHHHHHHHH"},
      {.name = "powers, the file says float", .scales = POWERS, .act = ACT_FLOAT, .want = "FFHHHHHHH"},
      {.name = "powers, the file says int8", .scales = POWERS, .act = ACT_INT8, .want = "FFHHHHHHH"},
      {.name = "multiples", .scales = MULTIPLES, .want = "FFTTTTHHH"},
      {.name = "multiples, resident", .scales = MULTIPLES, .is_resident = true, .want = "FFTTTTHHH"},
      {.name = "multiples, w4a16", .scales = MULTIPLES, .recipe = CUDA_RECIPE_W4A16, .want = "FFHHHHHHH"},
      {.name = "other groups of 128", .scales = FREE, .want = "FFGGGGHHH"},
      {.name = "other groups of 128, resident", .scales = FREE, .is_resident = true, .want = "FFGGGGHHH"},
      {.name = "other groups of 128, the file says int8", .scales = FREE, .act = ACT_INT8, .want = "FFHHHHHHH"},
      {.name = "groups of 32", .scales = G32, .want = "FFHHHHHHH"},
      {.name = "floats", .scales = FLOATS, .want = "HHHHHHHHH"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) run(&cases[i]);
  return gpu_finish();
}
