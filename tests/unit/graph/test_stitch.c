/* The stitching pass: which ops remain under which fusions, where select_rows ends up, what the buffers cost, and refusals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/mem.h"
#include "graph/graph.h"

enum { L = 3, E = 32, H = 4, G = 2, D = 8, F = 48, V = 40 };

static const float inv_freq[D / 2] = {1, 0.1f, 0.01f, 0.001f};
static const struct program_dims dims = {.n_layers = L, .n_embd = E, .n_heads = H, .n_kv_heads = G, .head_dim = D, .n_ff = F,
                                         .n_vocab = V, .max_context = 128, .rms_eps = 1e-5f};
static const struct program_rope rope = {PROGRAM_ROPE_HALF_SPLIT, D, inv_freq, 1};

#define MATRIX(n, k) {.name = #n "x" #k, .dtype = SITS_DTYPE_F32, .n_dims = 2, .dims = {n, k}}
#define VECTOR(n) {.name = #n, .dtype = SITS_DTYPE_F32, .n_dims = 1, .dims = {n}}
static const struct sits_utd table = MATRIX(V, E), wq = MATRIX(H * D, E), wk = MATRIX(G * D, E), wv = MATRIX(G * D, E),
                             wo = MATRIX(E, H * D),
                             w_gate = MATRIX(F, E), w_up = MATRIX(F, E), w_down = MATRIX(E, F), norm = VECTOR(E), head_norm = VECTOR(D);

/* The llama graph; head norms where wanted. */
static struct graph *llama(bool has_head_norm)
{
  struct graph *g = NULL;
  assert_int_equal(graph_create(&dims, &rope, &g, NULL), SITS_OK);
  graph_value x = graph_embed(g, &table);
  for (int32_t i = 0; i < L; i++) {
    graph_set_layer(g, i);
    graph_value h = graph_rmsnorm(g, x, &norm);
    graph_value q = graph_linear(g, h, &wq, NULL, "q"), k = graph_linear(g, h, &wk, NULL, "k"), v = graph_linear(g, h, &wv, NULL, "v");
    q = graph_rope(g, graph_head_norm(g, q, has_head_norm ? &head_norm : NULL));
    k = graph_rope(g, graph_head_norm(g, k, has_head_norm ? &head_norm : NULL));
    x = graph_add(g, x, graph_linear(g, graph_attention(g, q, graph_kv_append(g, k, v)), &wo, NULL, "o"));
    h = graph_rmsnorm(g, x, &norm);
    graph_value a = graph_linear(g, h, &w_gate, NULL, "gate"), b = graph_linear(g, h, &w_up, NULL, "up");
    x = graph_add(g, x, graph_linear(g, graph_swiglu(g, a, b), &w_down, NULL, "down"));
  }
  graph_set_layer(g, PROGRAM_NONE);
  graph_output(g, graph_linear(g, graph_rmsnorm(g, graph_select_rows(g, x), &norm), &table, NULL, "logits"));
  return g;
}

static struct program *weighed(bool has_head_norm, uint32_t fusions, const struct backend_costs *costs)
{
  struct graph *g = llama(has_head_norm);
  struct program *p = NULL;
  struct sits_error err = {0};
  if (graph_stitch(g, fusions, costs, &p, &err) != SITS_OK) fail_msg("%s", err.text);
  graph_destroy(g);
  return p;
}

static struct program *stitched(bool has_head_norm, uint32_t fusions) { return weighed(has_head_norm, fusions, NULL); }

static int32_t count(const struct program *p, enum program_op_kind kind)
{
  int32_t n = 0;
  for (int32_t i = 0; i < p->n_ops; i++) n += p->ops[i].kind == kind;
  return n;
}

static void test_plain(void **state)
{
  (void)state;
  struct program *p = stitched(true, 0);
  assert_int_equal(count(p, PROGRAM_LINEAR), 7 * L + 1);
  assert_int_equal(count(p, PROGRAM_RMSNORM), 2 * L + 1);
  assert_int_equal(count(p, PROGRAM_HEAD_NORM), 2 * L);
  assert_int_equal(count(p, PROGRAM_ROPE), 2 * L);
  assert_int_equal(count(p, PROGRAM_KV_APPEND), L);
  assert_int_equal(count(p, PROGRAM_ATTENTION), L);
  assert_int_equal(count(p, PROGRAM_SWIGLU), L);
  assert_int_equal(count(p, PROGRAM_ADD), 2 * L);
  assert_int_equal(count(p, PROGRAM_SELECT_ROWS), 1);
  for (int32_t i = 0; i < p->n_ops; i++) assert_int_equal(p->ops[i].fused, 0);
  program_destroy(p);
}

/* Fully fused, a layer is five ops: qkv, attention, o + residual, gate/up, down + residual. */
static void test_fused(void **state)
{
  (void)state;
  for (int has_head_norm = 0; has_head_norm < 2; has_head_norm++) {
    struct program *p = stitched(has_head_norm, ~0u);
    assert_int_equal(p->n_ops, 1 + 5 * L + 2 + 1);
    assert_int_equal(count(p, PROGRAM_LINEAR), 4 * L + 1);
    assert_int_equal(count(p, PROGRAM_ATTENTION), L);
    assert_int_equal(count(p, PROGRAM_SELECT_ROWS), 2);
    const struct program_op *qkv = &p->ops[1];
    assert_int_equal(qkv->fused, PROGRAM_FUSE_GROUP | PROGRAM_FUSE_NORM | PROGRAM_FUSE_ROPE | PROGRAM_FUSE_QKV);
    assert_ptr_equal(qkv->parts[0].weight, &wq);
    assert_ptr_equal(qkv->parts[1].weight, &wk);
    assert_ptr_equal(qkv->parts[2].weight, &wv);
    assert_ptr_equal(qkv->gain, &norm);
    assert_ptr_equal(qkv->q_gain, has_head_norm ? &head_norm : NULL);
    assert_ptr_equal(qkv->k_gain, has_head_norm ? &head_norm : NULL);
    const struct program_op *o = &p->ops[3];
    assert_int_equal(o->fused, PROGRAM_FUSE_ADD);
    assert_int_equal(o->in[1], o->out[0]); /* the residual stream is updated in place */
    assert_int_equal(p->ops[4].fused, PROGRAM_FUSE_GROUP | PROGRAM_FUSE_NORM | PROGRAM_FUSE_SWIGLU);
    program_destroy(p);
  }
}

/* The select moves above everything row-wise: the last layer's o, gate, up, down and the final norm work on R rows. */
static void test_select_moves_up(void **state)
{
  (void)state;
  struct program *p = stitched(false, PROGRAM_MOVE_SELECT);
  assert_int_equal(count(p, PROGRAM_SELECT_ROWS), 2);
  int32_t first_select = -1;
  for (int32_t i = 0; i < p->n_ops; i++) {
    const struct program_op *op = &p->ops[i];
    if (op->kind == PROGRAM_SELECT_ROWS && first_select < 0) first_select = i;
    const bool is_rows = op->out[0] != PROGRAM_NONE && p->buffers[op->out[0]].is_rows;
    if (first_select < 0) assert_false(is_rows);
    else assert_true(is_rows);
  }
  assert_int_equal(p->ops[first_select - 1].kind, PROGRAM_ATTENTION);
  assert_int_equal(p->ops[first_select - 1].layer, L - 1);
  program_destroy(p);
}

static void test_add_norm_when_norm_is_not_offered(void **state)
{
  (void)state;
  struct program *p = stitched(false, PROGRAM_FUSE_ADD_NORM | PROGRAM_FUSE_GROUP | PROGRAM_FUSE_ROPE);
  assert_int_equal(count(p, PROGRAM_RMSNORM), 2); /* the first, after the embedding, and the last, after the select */
  assert_int_equal(count(p, PROGRAM_ADD), 2 * L);
  assert_int_equal(count(p, PROGRAM_ROPE), L);
  assert_int_equal(count(p, PROGRAM_KV_APPEND), 0);
  assert_int_equal(count(p, PROGRAM_LINEAR), 4 * L + 1);
  program_destroy(p);
}

/* Buffers are reused: a deeper model needs no more of them. */
static void test_buffers_do_not_grow_with_depth(void **state)
{
  (void)state;
  struct program *p = stitched(false, ~0u);
  assert_true(p->n_buffers <= 8);
  program_destroy(p);
  p = stitched(false, 0);
  assert_true(p->n_buffers <= 11);
  program_destroy(p);
}

static void test_every_mask_is_valid(void **state)
{
  (void)state;
  for (uint32_t fusions = 0; fusions < 256; fusions++) program_destroy(stitched(fusions % 2, fusions)); /* stitch runs program_check */
}

static int32_t n_fused(const struct program *p, uint32_t bit)
{
  int32_t n = 0;
  for (int32_t i = 0; i < p->n_ops; i++) n += (p->ops[i].fused & bit) != 0;
  return n;
}

/* Where ops cost and norms do not, everything is fused as without costs. */
static void test_costs_that_favour_fusion(void **state)
{
  (void)state;
  const struct backend_costs costs = {.op_ns = 1000, .byte_ns = 0.1F, .norm_ns = 0.1F, .norm_repeats = 2, .tokens = 8, .f32_fusions = ~0u};
  struct program *a = stitched(true, ~0u), *b = weighed(true, ~0u, &costs);
  assert_int_equal(a->n_ops, b->n_ops);
  for (int32_t i = 0; i < a->n_ops; i++) assert_int_equal(a->ops[i].fused, b->ops[i].fused);
  assert_int_equal(b->choices[1].n_taken, 2 * L + 1); /* PROGRAM_FUSE_NORM */
  assert_true(b->choices[1].saved_ns > 0);
  program_destroy(a);
  program_destroy(b);
}

/* Norms that every worker would compute again: they stay alone, or join the ADD where that is cheaper than joining it to its LINEAR. */
static void test_costs_decide_around_norms(void **state)
{
  (void)state;
  struct backend_costs costs = {.op_ns = 10, .byte_ns = 0.1F, .norm_ns = 1, .norm_repeats = 100, .tokens = 64, .f32_fusions = ~0u};
  struct program *p = weighed(false, ~0u, &costs); /* passes cost more than ops: ADD goes into its LINEAR (2B), the norm stays (op + 3B) */
  assert_int_equal(n_fused(p, PROGRAM_FUSE_NORM), 0);
  assert_int_equal(n_fused(p, PROGRAM_FUSE_ADD_NORM), 0);
  assert_int_equal(n_fused(p, PROGRAM_FUSE_ADD), 2 * L);
  assert_int_equal(count(p, PROGRAM_RMSNORM), 2 * L + 1);
  program_destroy(p);
  p = weighed(false, ~0u & ~(uint32_t)PROGRAM_FUSE_ADD, &costs); /* without that one ADD_NORM saves an op and a pass */
  assert_int_equal(n_fused(p, PROGRAM_FUSE_ADD_NORM), 2 * L);
  assert_int_equal(count(p, PROGRAM_RMSNORM), 1); /* the first has no ADD before it */
  program_destroy(p);
  costs.norm_repeats = 1;
  p = weighed(false, ~0u, &costs);
  assert_int_equal(n_fused(p, PROGRAM_FUSE_NORM), 2 * L + 1);
  program_destroy(p);
}

/* A fusion that keeps less than f32 inside holds no norm; head norms count. */
static void test_norms_are_in_f32(void **state)
{
  (void)state;
  const struct backend_costs costs = {.op_ns = 1000, .byte_ns = 0.1F, .norm_ns = 0.1F, .norm_repeats = 1, .tokens = 8,
                                      .f32_fusions = PROGRAM_FUSE_ADD_NORM};
  struct program *p = weighed(true, ~0u, &costs);
  assert_int_equal(n_fused(p, PROGRAM_FUSE_NORM | PROGRAM_FUSE_ROPE | PROGRAM_FUSE_QKV), 0);
  assert_true(n_fused(p, PROGRAM_FUSE_GROUP) > 0);
  program_destroy(p);
  p = weighed(false, ~0u, &costs);
  assert_int_equal(n_fused(p, PROGRAM_FUSE_QKV), L); /* nothing but rotation in it */
  assert_int_equal(n_fused(p, PROGRAM_FUSE_NORM), 0);
  program_destroy(p);
}

/* Every mask under costs that pull both ways: program_check accepts what comes out. */
static void test_every_mask_is_valid_when_weighed(void **state)
{
  (void)state;
  for (uint32_t fusions = 0; fusions < 256; fusions++)
    for (int k = 0; k < 3; k++) {
      const struct backend_costs costs = {.op_ns = k == 1 ? 0 : 500, .byte_ns = k == 2 ? 0 : 0.2F, .norm_ns = 1,
                                          .norm_repeats = k == 0 ? 1 : 9, .tokens = 16, .f32_fusions = k == 2 ? 0x55 : ~0u};
      program_destroy(weighed(fusions % 2, fusions, &costs));
    }
}

static void test_plan_text(void **state)
{
  (void)state;
  const struct backend_costs costs = {.op_ns = 1000, .byte_ns = 0.1F, .norm_repeats = 1, .tokens = 8, .f32_fusions = ~0u};
  struct program *p = weighed(false, ~0u, &costs);
  struct buf text;
  buf_init(&text, 1 << 20);
  assert_true(program_write_plan(p, &text));
  assert_non_null(strstr(text.data, "+norm"));
  assert_non_null(strstr(text.data, "+swiglu"));
  char line[64];
  snprintf(line, sizeof line, "fusion norm     %d of %d taken, saves about", 2 * L + 1, 2 * L + 1);
  assert_non_null(strstr(text.data, line));
  assert_non_null(strstr(text.data, "attention"));
  buf_fini(&text);
  buf_init(&text, 64);
  assert_false(program_write_plan(p, &text));
  buf_fini(&text);
  program_destroy(p);
}

static void test_refusals(void **state)
{
  (void)state;
  struct graph *g = NULL;
  struct program *p = NULL;
  struct sits_error err = {0};
  assert_int_equal(graph_create(&dims, &rope, &g, NULL), SITS_OK);
  assert_int_equal(graph_stitch(g, 0, NULL, &p, &err), SITS_INVALID_ARGUMENT); /* no output */
  graph_value x = graph_embed(g, &table);
  assert_true(graph_linear(g, x, &w_down, NULL, "bad") < 0);              /* [E][F] does not take E */
  assert_true(graph_rmsnorm(g, x, &norm) < 0);                            /* failed for good */
  assert_int_equal(graph_stitch(g, 0, NULL, &p, &err), SITS_INVALID_ARGUMENT);
  assert_non_null(strstr(err.text, w_down.name));
  graph_destroy(g);
  assert_null(p);

  p = stitched(false, ~0u); /* a program spoilt by hand is refused */
  p->ops[1].in[0] = p->n_buffers;
  assert_int_equal(program_check(p, &err), SITS_INVALID_ARGUMENT);
  p->ops[1].in[0] = p->logits;
  assert_int_equal(program_check(p, &err), SITS_INVALID_ARGUMENT);
  program_destroy(p);
  p = stitched(false, ~0u);
  p->ops[1].n_parts = 2;
  assert_int_equal(program_check(p, &err), SITS_INVALID_ARGUMENT);
  program_destroy(p);
}

/* Every allocation fails once: no crash, no leak, the right status. */
static void test_out_of_memory(void **state)
{
  (void)state;
  const int64_t live = mem_live_blocks();
  for (uint64_t n = 1;; n++) {
    struct graph *g = NULL;
    struct program *p = NULL;
    mem_fault_arm(n);
    enum sits_status status = graph_create(&dims, &rope, &g, NULL);
    if (status == SITS_OK) {
      graph_value x = graph_embed(g, &table);
      graph_output(g, graph_linear(g, graph_select_rows(g, graph_rmsnorm(g, x, &norm)), &table, NULL, "logits"));
      status = graph_stitch(g, ~0u, NULL, &p, NULL);
    }
    const int fired = mem_fault_fired();
    mem_fault_arm(0);
    assert_int_equal(status, fired ? SITS_NOMEM : SITS_OK);
    program_destroy(p);
    graph_destroy(g);
    assert_int_equal(mem_live_blocks(), live);
    if (!fired) break;
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_plain), cmocka_unit_test(test_fused), cmocka_unit_test(test_select_moves_up),
      cmocka_unit_test(test_add_norm_when_norm_is_not_offered), cmocka_unit_test(test_buffers_do_not_grow_with_depth),
      cmocka_unit_test(test_every_mask_is_valid), cmocka_unit_test(test_costs_that_favour_fusion),
      cmocka_unit_test(test_costs_decide_around_norms), cmocka_unit_test(test_norms_are_in_f32),
      cmocka_unit_test(test_every_mask_is_valid_when_weighed), cmocka_unit_test(test_plan_text), cmocka_unit_test(test_refusals),
      cmocka_unit_test(test_out_of_memory)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
