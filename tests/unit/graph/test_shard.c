/* Cutting a graph over ranks: which ops and shapes each rank gets, that shares put together are the whole weight for every way of storing
 * it, biases and rounding of inputs, refusals, and failing allocations. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "graph/graph.h"

enum { E = 64, H = 4, G = 2, D = 16, F = 512, V = 40, N = 2 };

static const float inv_freq[D / 2] = {1};
static const struct program_dims dims = {.n_layers = 1, .n_embd = E, .n_heads = H, .n_kv_heads = G, .head_dim = D, .n_ff = F,
                                         .n_vocab = V, .max_context = 128, .rms_eps = 1e-5f};
static const struct program_rope rope = {PROGRAM_ROPE_HALF_SPLIT, D, inv_freq, 1};

#define MATRIX(n, k) {.name = #n "x" #k, .dtype = SITS_DTYPE_F32, .n_dims = 2, .dims = {n, k}}
#define VECTOR(n) {.name = #n, .dtype = SITS_DTYPE_F32, .n_dims = 1, .dims = {n}}
static const struct sits_utd table = MATRIX(V, E), wq = MATRIX(H * D, E), wk = MATRIX(G * D, E), wo = MATRIX(E, H * D),
                             w_gate = MATRIX(F, E), norm = VECTOR(E);
static float bias_data[G * D];
static const struct sits_utd bo = VECTOR(E),
                             bk = {.name = "bk", .dtype = SITS_DTYPE_F32, .n_dims = 1, .dims = {G * D}, .data = bias_data,
                                   .n_bytes = sizeof bias_data};

static struct graph *llama(const struct program_dims *d, const struct sits_utd *w_down, const struct act_format *act)
{
  struct graph *g = NULL;
  assert_int_equal(graph_create(d, &rope, &g, NULL), SITS_OK);
  graph_value x = graph_embed(g, &table);
  graph_set_layer(g, 0);
  graph_value h = graph_rmsnorm(g, x, &norm);
  graph_value q = graph_linear(g, h, &wq, NULL, "q"), k = graph_linear(g, h, &wk, &bk, "k"), v = graph_linear(g, h, &wk, NULL, "v");
  q = graph_rope(g, q);
  k = graph_rope(g, k);
  x = graph_add(g, x, graph_linear(g, graph_attention(g, q, graph_kv_append(g, k, v)), &wo, &bo, "o"));
  h = graph_rmsnorm(g, x, &norm);
  graph_value a = graph_linear(g, h, &w_gate, NULL, "gate"), b = graph_linear(g, h, &w_gate, NULL, "up");
  graph_set_act(g, act);
  x = graph_add(g, x, graph_linear(g, graph_swiglu(g, a, b), w_down, NULL, "down"));
  graph_set_act(g, NULL);
  graph_set_layer(g, PROGRAM_NONE);
  graph_output(g, graph_linear(g, graph_rmsnorm(g, graph_select_rows(g, x), &norm), &table, NULL, "logits"));
  return g;
}

static struct program *weighed_share(const struct graph *whole, int32_t rank, int32_t n, uint32_t fusions,
                                     const struct backend_costs *costs, struct arena *arena)
{
  struct graph *g = NULL;
  struct program *p = NULL;
  struct sits_error err = {0};
  if (graph_shard(whole, rank, n, arena, &g, &err) != SITS_OK || graph_stitch(g, fusions, costs, &p, &err) != SITS_OK)
    fail_msg("%s", err.text);
  graph_destroy(g);
  return p;
}

static struct program *share(const struct graph *whole, int32_t rank, int32_t n, uint32_t fusions, struct arena *arena)
{
  return weighed_share(whole, rank, n, fusions, NULL, arena);
}

static const struct program_op *find(const struct program *p, enum program_op_kind kind, int32_t nth)
{
  for (int32_t i = 0; i < p->n_ops; i++)
    if (p->ops[i].kind == kind && nth-- == 0) return &p->ops[i];
  return NULL;
}

static void test_ops(void **state)
{
  (void)state;
  static const struct sits_utd w_down = MATRIX(E, F);
  struct graph *whole = llama(&dims, &w_down, NULL);
  for (int32_t r = 0; r < N; r++) {
    struct arena arena;
    arena_init(&arena, 0);
    struct program *p = share(whole, r, N, 0, &arena);
    assert_int_equal(p->dims.n_heads, H / N);
    assert_int_equal(p->dims.n_kv_heads, G / N);
    assert_int_equal(p->dims.rank, r);
    assert_non_null(find(p, PROGRAM_ALL_REDUCE, 2)); /* embedding, o, down */
    assert_null(find(p, PROGRAM_ALL_REDUCE, 3));
    assert_int_equal(find(p, PROGRAM_EMBED, 0)->parts[0].weight->dims[0], V / N);
    assert_non_null(find(p, PROGRAM_ALL_GATHER, 0));
    const struct program_op *k = find(p, PROGRAM_LINEAR, 1), *o = find(p, PROGRAM_LINEAR, 3), *head = find(p, PROGRAM_LINEAR, 7);
    assert_int_equal(k->parts[0].weight->dims[0], G * D / N);
    assert_ptr_equal(k->parts[0].bias->data, bias_data + r * G * D / N);
    assert_int_equal(o->parts[0].weight->dims[1], H * D / N);
    assert_true((o->parts[0].bias != NULL) == (r == 0)); /* added once */
    assert_int_equal(head->parts[0].weight->dims[0], V / N);
    program_destroy(p);
    /* With the fusion a layer is five ops again, and the head's product and its gathering stay two; also where fusions are weighed. */
    static const struct backend_costs gpu = {.op_ns = 1300, .byte_ns = 0.0003F, .norm_ns = 0.001F, .norm_repeats = 1, .tokens = 8,
                                             .f32_fusions = PROGRAM_FUSE_NORM | PROGRAM_FUSE_ROPE | PROGRAM_FUSE_QKV};
    for (int turn = 0; turn < 2; turn++) {
      p = weighed_share(whole, r, N, PROGRAM_FUSE_GROUP | PROGRAM_FUSE_NORM | PROGRAM_FUSE_ROPE | PROGRAM_FUSE_QKV | PROGRAM_FUSE_SWIGLU |
                        PROGRAM_FUSE_ADD | PROGRAM_FUSE_REDUCE, turn ? &gpu : NULL, &arena);
      assert_int_equal(p->n_ops, 2 + 5 + 3);
      assert_int_equal(find(p, PROGRAM_LINEAR, 1)->fused, PROGRAM_FUSE_ADD | PROGRAM_FUSE_REDUCE);
      assert_int_equal(find(p, PROGRAM_LINEAR, 3)->fused, PROGRAM_FUSE_ADD | PROGRAM_FUSE_REDUCE);
      program_destroy(p);
    }
    arena_fini(&arena);
  }
  graph_destroy(whole);
}

/* The heads of fewer KV heads than ranks. */
static void test_shared_kv_head(void **state)
{
  (void)state;
  static const struct sits_utd w_down = MATRIX(E, F);
  struct graph *whole = llama(&dims, &w_down, NULL);
  for (int32_t r = 0; r < 4; r++) {
    struct arena arena;
    arena_init(&arena, 0);
    struct program *p = share(whole, r, 4, 0, &arena);
    const struct program_op *k = find(p, PROGRAM_LINEAR, 1);
    assert_int_equal(p->dims.n_kv_heads, 1);
    assert_int_equal(k->parts[0].weight->dims[0], D);
    assert_ptr_equal(k->parts[0].bias->data, bias_data + r / 2 * D);
    program_destroy(p);
    arena_fini(&arena);
  }
  graph_destroy(whole);
}

/* Columns k0..k1 of a row, and of its scales, lie where the whole has them: nothing is copied. */
static void test_stored_columns(void **state)
{
  (void)state;
  static const struct { enum sits_dtype dtype; enum sits_quant quant; int32_t group; bool has_minimum; } kinds[] = {
      {SITS_DTYPE_F32, SITS_QUANT_NONE, 0, false},   {SITS_DTYPE_F16, SITS_QUANT_NONE, 0, false},
      {SITS_DTYPE_BF16, SITS_QUANT_NONE, 0, false},  {SITS_DTYPE_Q4_0, SITS_QUANT_NONE, 0, false},
      {SITS_DTYPE_Q8_0, SITS_QUANT_NONE, 0, false},  {SITS_DTYPE_Q4_K, SITS_QUANT_NONE, 0, false},
      {SITS_DTYPE_I4, SITS_QUANT_GROUP, 32, true},   {SITS_DTYPE_I4, SITS_QUANT_GROUP, 128, false},
      {SITS_DTYPE_I8, SITS_QUANT_CHANNEL, 0, false},
  };
  static uint8_t data[E * F * 4], scales[E * F], minimums[E * F];
  for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)(i * 131 + i / 251);
  for (size_t i = 0; i < sizeof scales; i++) scales[i] = (uint8_t)(i * 89 + i / 97), minimums[i] = (uint8_t)(i * 37 + i / 61);
  for (size_t c = 0; c < sizeof kinds / sizeof *kinds; c++) {
    const struct sits_dtype_info *type = sits_dtype_info(kinds[c].dtype);
    const struct sits_utd w_down = {.name = "w_down", .dtype = kinds[c].dtype, .n_dims = 2, .dims = {E, F}, .quant = kinds[c].quant,
                                    .group_size = kinds[c].group, .group_axis = 1, .scale_dtype = SITS_DTYPE_F16,
                                    .scales = kinds[c].quant ? scales : NULL, .minimums = kinds[c].has_minimum ? minimums : NULL,
                                    .data = data, .n_bytes = (size_t)(E * (F / type->block_elements) * type->block_bytes)};
    struct graph *whole = llama(&dims, &w_down, NULL);
    const size_t row = w_down.n_bytes / E, groups = kinds[c].group ? (size_t)(F / kinds[c].group) * 2 : 2;
    for (int32_t r = 0; r < N; r++) {
      struct arena arena;
      arena_init(&arena, 0);
      struct program *p = share(whole, r, N, 0, &arena);
      const struct sits_utd *part = find(p, PROGRAM_LINEAR, 6)->parts[0].weight;
      assert_int_equal(part->dims[0], E);
      assert_int_equal(part->dims[1], F / N);
      assert_int_equal(part->n_bytes, w_down.n_bytes / N);
      for (size_t i = 0; i < E; i++) {
        assert_ptr_equal(sits_utd_row(part, (int64_t)i), data + i * row + (size_t)r * row / N);
        if (kinds[c].quant == SITS_QUANT_NONE) continue;
        const bool is_cut = kinds[c].quant == SITS_QUANT_GROUP;
        const size_t at = is_cut ? (size_t)r * groups / N : 0;
        assert_ptr_equal(sits_utd_row_scales(part, (int64_t)i), scales + i * groups + at);
        assert_ptr_equal(sits_utd_row_minimums(part, (int64_t)i), kinds[c].has_minimum ? minimums + i * groups + at : NULL);
      }
      program_destroy(p);
      arena_fini(&arena);
    }
    graph_destroy(whole);
  }
}

static void test_outliers(void **state)
{
  (void)state;
  static const struct sits_utd w_down = MATRIX(E, F);
  static const int32_t outliers[] = {0, 7, 255, 256, 300, 511};
  static const int32_t want[N][3] = {{0, 7, 255}, {0, 44, 255}};
  const struct act_format act = {.kind = ACT_INT4, .n_outliers = 6, .outliers = outliers};
  struct graph *whole = llama(&dims, &w_down, &act);
  for (int32_t r = 0; r < N; r++) {
    struct arena arena;
    arena_init(&arena, 0);
    struct program *p = share(whole, r, N, 0, &arena);
    const struct act_format *got = find(p, PROGRAM_LINEAR, 6)->act;
    assert_int_equal(got->kind, ACT_INT4);
    assert_int_equal(got->n_outliers, 3);
    assert_memory_equal(got->outliers, want[r], sizeof want[r]);
    program_destroy(p);
    arena_fini(&arena);
  }
  graph_destroy(whole);
}

/* Runs of rotated channels stay whole, or are refused. */
static void test_rotation(void **state)
{
  (void)state;
  static const struct sits_utd w_down = MATRIX(E, F);
  for (int32_t i = 0; i < 2; i++) {
    const struct act_format act = {.kind = i == 0 ? ACT_INT8 : ACT_FLOAT, .rotation = F / N};
    const struct act_format wide = {.kind = act.kind, .rotation = F};
    struct graph *whole = llama(&dims, &w_down, &act);
    struct arena arena;
    arena_init(&arena, 0);
    struct program *p = share(whole, 1, N, 0, &arena);
    assert_int_equal(find(p, PROGRAM_LINEAR, 6)->act->rotation, F / N);
    program_destroy(p);
    graph_destroy(whole);
    struct graph *g = NULL;
    struct sits_error err = {0};
    whole = llama(&dims, &w_down, &wide);
    assert_int_equal(graph_shard(whole, 0, N, &arena, &g, &err), SITS_CONFIG);
    assert_non_null(strstr(err.text, "cut a rotated run"));
    graph_destroy(whole);
    arena_fini(&arena);
  }
}

static void refuse(const struct sits_utd *w_down, const struct act_format *act, int32_t n, const char *text)
{
  struct graph *whole = llama(&dims, w_down, act), *g = NULL;
  struct arena arena;
  struct sits_error err = {0};
  arena_init(&arena, 0);
  assert_int_equal(graph_shard(whole, 0, n, &arena, &g, &err), SITS_CONFIG);
  if (strstr(err.text, text) == NULL) fail_msg("'%s' does not say '%s'", err.text, text);
  arena_fini(&arena);
  graph_destroy(whole);
}

static void test_refusals(void **state)
{
  (void)state;
  static const struct sits_utd plain = MATRIX(E, F),
                               blocks = {.name = "w_down", .dtype = SITS_DTYPE_Q4_K, .n_dims = 2, .dims = {E, F}};
  refuse(&plain, NULL, 8, "4 heads");
  refuse(&blocks, NULL, 4, "w_down: its 512 columns cut a group of 256");
  struct graph *whole = llama(&dims, &plain, NULL), *g = NULL;
  struct arena arena;
  arena_init(&arena, 0);
  assert_int_equal(graph_shard(whole, 2, 2, &arena, &g, NULL), SITS_INVALID_ARGUMENT);
  graph_destroy(whole);
}

static void test_failing_allocations(void **state)
{
  (void)state;
  static float data[E * F];
  const struct sits_utd w_down = {.name = "w_down", .dtype = SITS_DTYPE_F32, .n_dims = 2, .dims = {E, F}, .data = data,
                                  .n_bytes = sizeof data};
  struct graph *whole = llama(&dims, &w_down, NULL);
  mem_fault_arm(1);
  void *probe = mem_alloc(1);
  mem_free(probe);
  mem_fault_arm(0);
  if (probe != NULL) { /* this build counts no allocations */
    graph_destroy(whole);
    skip();
  }
  const int64_t before = mem_live_blocks();
  for (uint64_t n = 1;; n++) {
    struct arena arena;
    struct graph *g = NULL;
    arena_init(&arena, 0);
    mem_fault_arm(n);
    const enum sits_status status = graph_shard(whole, 1, N, &arena, &g, NULL);
    const bool has_fired = mem_fault_fired();
    mem_fault_arm(0);
    assert_int_equal(status, has_fired ? SITS_NOMEM : SITS_OK);
    graph_destroy(g);
    arena_fini(&arena);
    assert_int_equal(mem_live_blocks(), before);
    if (!has_fired) break;
  }
  graph_destroy(whole);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_ops), cmocka_unit_test(test_shared_kv_head),
                                     cmocka_unit_test(test_stored_columns), cmocka_unit_test(test_outliers),
                                     cmocka_unit_test(test_rotation), cmocka_unit_test(test_refusals),
                                     cmocka_unit_test(test_failing_allocations)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
