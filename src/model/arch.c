/* The llama family, layer by layer. Entry points: arch_build, program_from_model, program_for_ranks, program_for_rank. Llama, Mistral
 * (sliding window), Qwen2 (q, k, v biases) and Qwen3 (q and k norms) differ only in what the loader found: absent biases and gains are NULL
 * and their ops vanish. */
#include "model/arch.h"

#include "base/mem.h"

/* x: [T][E] residual stream. */
static graph_value arch_layer(struct graph *g, const struct model_layer *w, graph_value x)
{
  graph_value h = graph_rmsnorm(g, x, w->attn_norm);                             /* [T][E] */
  graph_set_act(g, &w->act[MODEL_SITE_QKV]);
  graph_value q = graph_linear(g, h, w->wq, w->bq, "q");                         /* [T][H*D] */
  graph_value k = graph_linear(g, h, w->wk, w->bk, "k");                         /* [T][G*D] */
  graph_value v = graph_linear(g, h, w->wv, w->bv, "v");                         /* [T][G*D] */
  q = graph_rope(g, graph_head_norm(g, q, w->q_norm));
  k = graph_rope(g, graph_head_norm(g, k, w->k_norm));
  graph_value attended = graph_attention(g, q, graph_kv_append(g, k, v));        /* [T][H*D] */
  graph_set_act(g, &w->act[MODEL_SITE_O]);
  x = graph_add(g, x, graph_linear(g, attended, w->wo, w->bo, "attn_out"));      /* [T][E] */

  h = graph_rmsnorm(g, x, w->ffn_norm);                                          /* [T][E] */
  graph_set_act(g, &w->act[MODEL_SITE_GATE_UP]);
  graph_value gate = graph_linear(g, h, w->w_gate, NULL, "gate");                /* [T][F] */
  graph_value up = graph_linear(g, h, w->w_up, NULL, "up");                      /* [T][F] */
  graph_set_act(g, &w->act[MODEL_SITE_DOWN]);
  return graph_add(g, x, graph_linear(g, graph_swiglu(g, gate, up), w->w_down, NULL, "down")); /* [T][E] */
}

/* x: [T][E] -> what the model answers. */
static void arch_head(struct graph *g, const struct model *model, graph_value x)
{
  graph_set_layer(g, PROGRAM_NONE);
  graph_value h = graph_rmsnorm(g, graph_select_rows(g, x), model->output_norm); /* [R][E] */
  graph_set_act(g, &model->head_act);
  graph_output(g, graph_linear(g, h, model->output, NULL, "logits"));            /* [R][V] */
}

void arch_build(const struct model *model, struct graph *g)
{
  graph_value x = graph_embed(g, model->tok_embd);                               /* [T][E] */
  for (int32_t i = 0; i < model->config.n_layers; i++) {
    graph_set_layer(g, i);
    x = arch_layer(g, &model->layers[i], x);
  }
  arch_head(g, model, x);
}

static enum sits_status empty_graph(const struct model *model, int32_t n_layers, int32_t n_vocab, struct graph **out,
                                    struct sits_error *err)
{
  const struct model_config *c = &model->config;
  const struct program_dims dims = {
      .n_layers = n_layers, .n_embd = c->n_embd, .n_heads = c->n_heads, .n_kv_heads = c->n_kv_heads, .head_dim = c->head_dim,
      .n_ff = c->n_ff, .n_vocab = n_vocab, .max_context = c->max_context, .sliding_window = c->sliding_window, .rms_eps = c->rms_eps};
  const struct program_rope rope = {
      .style = c->rope_style == ROPE_INTERLEAVED ? PROGRAM_ROPE_INTERLEAVED : PROGRAM_ROPE_HALF_SPLIT,
      .dims = c->rope_dims, .inv_freq = model->rope_inv_freq, .magnitude = model->rope_magnitude};
  return graph_create(&dims, &rope, out, err);
}

static enum sits_status graph_of(const struct model *model, struct graph **out, struct sits_error *err)
{
  const enum sits_status status = empty_graph(model, model->config.n_layers, model->config.n_vocab, out, err);
  if (status == SITS_OK) arch_build(model, *out);
  return status;
}

static enum sits_status stitch_model(const struct model *model, uint32_t fusions, const struct backend_costs *costs, struct program **out,
                                     struct sits_error *err)
{
  struct graph *graph = NULL;
  enum sits_status status = graph_of(model, &graph, err);
  if (status != SITS_OK) return status;
  status = graph_stitch(graph, fusions, costs, out, err);
  graph_destroy(graph);
  return status;
}

/* One rank's program, with the arena that holds its shares of weights. */
static enum sits_status program_of_rank(const struct graph *whole, uint32_t fusions, const struct backend_costs *costs, int32_t rank,
                                        int32_t n_ranks, struct program **out, struct sits_error *err)
{
  struct graph *share = NULL;
  struct arena *arena = mem_alloc(sizeof *arena);
  if (arena == NULL) return sits_fail(err, SITS_NOMEM, "graph: out of memory");
  arena_init(arena, 0);
  enum sits_status status = graph_shard(whole, rank, n_ranks, arena, &share, err);
  if (status == SITS_OK) status = graph_stitch(share, fusions, costs, out, err);
  graph_destroy(share);
  if (status == SITS_OK) {
    (*out)->arena = arena;
    return SITS_OK;
  }
  arena_fini(arena);
  mem_free(arena);
  return status;
}

enum sits_status program_for_rank(const struct model *model, uint32_t fusions, const struct backend_costs *costs, int32_t rank,
                                  int32_t n_ranks, struct program **out, struct sits_error *err)
{
  struct graph *whole = NULL;
  enum sits_status status = graph_of(model, &whole, err);
  if (status == SITS_OK) status = program_of_rank(whole, fusions, costs, rank, n_ranks, out, err);
  graph_destroy(whole);
  return status;
}

enum sits_status program_for_ranks(const struct model *model, uint32_t fusions, const struct backend_costs *costs, int32_t n_ranks,
                                   struct program **out, struct sits_error *err)
{
  if (n_ranks <= 1) return stitch_model(model, fusions, costs, out, err);
  struct graph *whole = NULL;
  struct program *first = NULL, **last = &first;
  enum sits_status status = graph_of(model, &whole, err);
  for (int32_t r = 0; r < n_ranks && status == SITS_OK; r++) {
    status = program_of_rank(whole, fusions, costs, r, n_ranks, last, err);
    if (status == SITS_OK) last = &(*last)->next_rank;
  }
  graph_destroy(whole);
  if (status != SITS_OK) {
    program_destroy(first);
    return status;
  }
  *out = first;
  return SITS_OK;
}

enum sits_status program_from_model(const struct model *model, const struct backend_vtable *backend, struct program **out,
                                    struct sits_error *err)
{
  return stitch_model(model, backend->fusions, backend->costs.tokens > 0 ? &backend->costs : NULL, out, err);
}

enum sits_status program_from_layer(const struct model *model, int32_t layer, const struct sits_utd *input,
                                    const struct backend_vtable *backend, struct program **out, struct sits_error *err)
{
  const bool is_head = layer == model->config.n_layers;
  struct graph *graph = NULL;
  enum sits_status status = empty_graph(model, 1, is_head ? model->config.n_vocab : model->config.n_embd, &graph, err);
  if (status != SITS_OK) return status;
  graph_value x = graph_embed(graph, input);
  if (is_head) {
    arch_head(graph, model, x);
  } else {
    graph_set_layer(graph, 0);
    x = arch_layer(graph, &model->layers[layer], x);
    graph_set_layer(graph, PROGRAM_NONE);
    graph_output(graph, graph_select_rows(graph, x));
  }
  status = graph_stitch(graph, backend->fusions, backend->costs.tokens > 0 ? &backend->costs : NULL, out, err);
  graph_destroy(graph);
  return status;
}

enum sits_status program_from_model_with(const struct model *model, uint32_t fusions, struct program **out, struct sits_error *err)
{
  return stitch_model(model, fusions, NULL, out, err);
}
