/* graph_stitch: from an op graph to a program, fused as far as the backend offers. Entry point: graph_stitch.
 *
 * Order of the passes (each a function below; graph_weigh has its own file): move_select, graph_weigh, group_linears, fuse_rope, fuse_qkv,
 * fuse_swiglu, fuse_reduce, fuse_add, fuse_norm, fuse_add_norm, emit. A fused node takes the place of the last node that it absorbs, so all
 * its inputs exist there. To add a fusion: a bit in enum program_fusion, a row in backend/program.h's table, a check in program_check, and
 * one pass here. */
#include <stddef.h>
#include <string.h>

#include "base/mem.h"
#include "graph/graph.h"
#include "graph/graph_internal.h"

static enum sits_status copy_graph(const struct graph *from, struct graph *to)
{
  *to = *from;
  to->nodes = mem_alloc((size_t)from->n_nodes * sizeof *to->nodes);
  to->values = mem_alloc((size_t)from->n_values * sizeof *to->values);
  if (to->nodes == NULL || to->values == NULL) return SITS_NOMEM;
  memcpy(to->nodes, from->nodes, (size_t)from->n_nodes * sizeof *to->nodes);
  memcpy(to->values, from->values, (size_t)from->n_values * sizeof *to->values);
  to->nodes_capacity = to->n_nodes;
  to->values_capacity = to->n_values;
  return SITS_OK;
}

int32_t graph_producer(const struct graph *g, graph_value value)
{
  for (int32_t i = 0; i < g->n_nodes && value >= 0; i++)
    for (int k = 0; k < 3 && !g->nodes[i].is_dead; k++)
      if (g->nodes[i].out[k] == value) return i;
  return -1;
}

int32_t graph_n_uses(const struct graph *g, graph_value value)
{
  int32_t n = value == g->output;
  for (int32_t i = 0; i < g->n_nodes; i++)
    for (int k = 0; k < 3 && !g->nodes[i].is_dead; k++) n += g->nodes[i].in[k] == value;
  return n;
}

int32_t graph_sole_producer(const struct graph *g, graph_value value, enum program_op_kind kind)
{
  const int32_t i = graph_producer(g, value);
  return i >= 0 && g->nodes[i].kind == kind && graph_n_uses(g, value) == 1 ? i : -1;
}

/* ---- select_rows ---- */

static bool is_row_wise(enum program_op_kind kind)
{
  return kind == PROGRAM_RMSNORM || kind == PROGRAM_LINEAR || kind == PROGRAM_HEAD_NORM || kind == PROGRAM_SWIGLU ||
         kind == PROGRAM_ADD || kind == PROGRAM_ALL_REDUCE;
}

/* Mark the row-wise nodes that only feed the select: a node joins when all its readers have. */
static void mark_region(const struct graph *g, int32_t select, bool *in_region)
{
  for (int32_t i = select - 1; i >= 0; i--) {
    const struct graph_node *node = &g->nodes[i];
    bool all_inside = is_row_wise(node->kind) && graph_n_uses(g, node->out[0]) > 0 && node->out[0] != g->output;
    for (int32_t j = i + 1; j < g->n_nodes && all_inside; j++)
      for (int k = 0; k < 3; k++)
        if (g->nodes[j].in[k] == node->out[0] && j != select && !in_region[j]) all_inside = false;
    in_region[i] = all_inside;
  }
}

/* The one select of the graph; -1: there is none, or two, and the graph stays as it is. */
static int32_t only_select(const struct graph *g)
{
  int32_t select = -1;
  for (int32_t i = 0; i < g->n_nodes; i++)
    if (g->nodes[i].kind == PROGRAM_SELECT_ROWS) {
      if (select >= 0) return -1;
      select = i;
    }
  return select;
}

/* A select of value v for a reader in `layer`, added to the list; the rows' value, -1 out of memory. */
static graph_value select_value(struct graph *g, graph_value v, int32_t layer)
{
  char name[24];
  memcpy(name, g->values[v].name, sizeof name);
  const graph_value rows = graph_new_value(g, name, g->values[v].width, true);
  struct graph_node *s = rows < 0 ? NULL : graph_new_node(g, PROGRAM_SELECT_ROWS);
  if (s == NULL) return -1;
  s->layer = layer;
  s->fused = PROGRAM_MOVE_SELECT;
  s->in[0] = v;
  s->out[0] = rows;
  return rows;
}

/* The node list without its select, and with one for every value that enters the region. selected: [values of before] -1. */
static bool rebuild(struct graph *g, const struct graph_node *old, int32_t n_old, int32_t select, const bool *in_region,
                    graph_value *selected)
{
  for (int32_t i = 0; i < n_old; i++) {
    struct graph_node node = old[i];
    if (i == select) continue;
    for (int k = 0; k < 3; k++) {
      const graph_value v = node.in[k];
      if (v == old[select].out[0] && v >= 0) node.in[k] = old[select].in[0];
      if (!in_region[i] || v < 0 || g->values[v].is_rows) continue;
      if (selected[v] < 0) selected[v] = select_value(g, v, node.layer);
      if (selected[v] < 0) return false;
      node.in[k] = selected[v];
    }
    struct graph_node *copy = graph_new_node(g, node.kind);
    if (copy == NULL) return false;
    *copy = node;
  }
  return true;
}

/* Take the select before the row-wise nodes that only feed it. */
static enum sits_status move_select(struct graph *g)
{
  const int32_t select = only_select(g), n_old = g->n_nodes, n_old_values = g->n_values;
  if (select < 0) return SITS_OK;
  enum sits_status status = SITS_NOMEM;
  struct graph_node *old = g->nodes;
  bool *in_region = mem_calloc((size_t)n_old, sizeof *in_region);
  graph_value *selected = mem_alloc((size_t)n_old_values * sizeof *selected);
  if (in_region == NULL || selected == NULL) goto done;
  for (int32_t v = 0; v < n_old_values; v++) selected[v] = -1;
  mark_region(g, select, in_region);
  const int32_t producer = graph_producer(g, old[select].in[0]);
  if (producer < 0 || !in_region[producer]) {
    status = SITS_OK;
    goto done;
  }
  for (int32_t i = 0; i < n_old; i++)
    if (in_region[i]) g->values[old[i].out[0]].is_rows = true;
  g->nodes = NULL;
  g->n_nodes = g->nodes_capacity = 0;
  if (rebuild(g, old, n_old, select, in_region, selected)) {
    if (g->output == old[select].out[0]) g->output = old[select].in[0];
    mem_free(old);
    status = SITS_OK;
  } else {
    mem_free(g->nodes);
    g->nodes = old;
    g->n_nodes = g->nodes_capacity = n_old;
  }
done:
  mem_free(in_region);
  mem_free(selected);
  return status;
}

/* ---- fusions; every pass looks at live nodes only ---- */

static bool is_plain(const struct graph_node *node, enum program_op_kind kind)
{
  return !node->is_dead && node->kind == kind && node->fused == 0;
}

/* LINEARs of one layer that read the same value become one node at the first one's place. */
static void group_linears(struct graph *g)
{
  for (int32_t i = 0; i < g->n_nodes; i++) {
    struct graph_node *first = &g->nodes[i];
    if (!is_plain(first, PROGRAM_LINEAR)) continue;
    for (int32_t j = i + 1; j < g->n_nodes && first->n_parts < PROGRAM_MAX_PARTS; j++) {
      struct graph_node *other = &g->nodes[j];
      if (!is_plain(other, PROGRAM_LINEAR) || other->in[0] != first->in[0] || other->layer != first->layer ||
          other->act != first->act || !graph_take(g, PROGRAM_FUSE_GROUP, first, graph_saved(g, first->in[0], 1))) continue;
      first->parts[first->n_parts] = other->parts[0];
      first->out[first->n_parts++] = other->out[0];
      other->is_dead = true;
    }
    if (first->n_parts > 1) first->fused |= PROGRAM_FUSE_GROUP;
  }
}

/* value <- ROPE <- (HEAD_NORM <-) base: mark both dead when `absorb`, and return base; -1 when the chain is another one. */
static graph_value rope_chain(struct graph *g, graph_value value, bool absorb, const struct sits_utd **gain)
{
  const int32_t rope = graph_sole_producer(g, value, PROGRAM_ROPE);
  if (rope < 0 || g->nodes[rope].fused != 0) return -1;
  graph_value base = g->nodes[rope].in[0];
  const int32_t norm = graph_sole_producer(g, base, PROGRAM_HEAD_NORM);
  *gain = norm >= 0 ? g->nodes[norm].gain : NULL;
  if (norm >= 0) base = g->nodes[norm].in[0];
  if (absorb) {
    if (norm >= 0) g->nodes[norm].is_dead = true;
    g->nodes[rope].is_dead = true;
  }
  return base;
}

/* The head norms and rotations of q and k and the append of k and v, right before the attention that reads them. */
static void fuse_rope(struct graph *g)
{
  for (int32_t i = 0; i < g->n_nodes; i++) {
    struct graph_node *attention = &g->nodes[i];
    if (!is_plain(attention, PROGRAM_ATTENTION)) continue;
    const int32_t append = graph_sole_producer(g, attention->in[1], PROGRAM_KV_APPEND);
    if (append < 0) continue;
    const graph_value q = attention->in[0], k = g->nodes[append].in[0], v = g->nodes[append].in[1];
    const struct sits_utd *q_gain, *k_gain;
    if (rope_chain(g, q, false, &q_gain) < 0 || rope_chain(g, k, false, &k_gain) < 0) continue;
    if (((q_gain || k_gain) && !graph_is_f32(g, PROGRAM_FUSE_ROPE)) ||
        !graph_take(g, PROGRAM_FUSE_ROPE, attention, 2 * graph_saved(g, q, 2) + graph_saved(g, k, 2))) continue;
    const int32_t q_rope = graph_producer(g, q), place = q_rope > append ? q_rope : append;
    struct graph_node fused = {.kind = PROGRAM_ROPE, .fused = PROGRAM_FUSE_ROPE, .layer = attention->layer,
                               .out = {q, attention->in[1], -1}};
    fused.in[0] = rope_chain(g, q, true, &fused.q_gain);
    fused.in[1] = rope_chain(g, k, true, &fused.k_gain);
    fused.in[2] = v;
    g->nodes[append].is_dead = true;
    g->nodes[place] = fused;
  }
}

static void fuse_qkv(struct graph *g)
{
  for (int32_t i = 0; i < g->n_nodes; i++) {
    struct graph_node *rope = &g->nodes[i];
    if (rope->is_dead || rope->kind != PROGRAM_ROPE || !(rope->fused & PROGRAM_FUSE_ROPE)) continue;
    const int32_t from = graph_sole_producer(g, rope->in[0], PROGRAM_LINEAR);
    if (from < 0 || g->nodes[from].n_parts != 3) continue;
    struct graph_node *linear = &g->nodes[from];
    bool fits = true;
    for (int k = 0; k < 3; k++) fits = fits && linear->out[k] == rope->in[k] && graph_n_uses(g, rope->in[k]) == 1;
    if (!fits || ((rope->q_gain || rope->k_gain) && !graph_is_f32(g, PROGRAM_FUSE_QKV)) ||
        !graph_take(g, PROGRAM_FUSE_QKV, rope, graph_saved(g, rope->in[0], 2))) continue;
    struct graph_node fused = *linear;
    fused.fused |= PROGRAM_FUSE_QKV | PROGRAM_FUSE_ROPE;
    fused.q_gain = rope->q_gain;
    fused.k_gain = rope->k_gain;
    memcpy(fused.out, rope->out, sizeof fused.out);
    linear->is_dead = true;
    *rope = fused;
  }
}

static void fuse_swiglu(struct graph *g)
{
  for (int32_t i = 0; i < g->n_nodes; i++) {
    struct graph_node *swiglu = &g->nodes[i];
    if (!is_plain(swiglu, PROGRAM_SWIGLU)) continue;
    const int32_t from = graph_sole_producer(g, swiglu->in[0], PROGRAM_LINEAR);
    if (from < 0 || g->nodes[from].n_parts != 2) continue;
    struct graph_node *linear = &g->nodes[from];
    if (linear->out[0] != swiglu->in[0] || linear->out[1] != swiglu->in[1] || graph_n_uses(g, swiglu->in[1]) != 1 ||
        !graph_take(g, PROGRAM_FUSE_SWIGLU, swiglu, graph_saved(g, swiglu->in[0], 4))) continue;
    struct graph_node fused = *linear;
    fused.fused |= PROGRAM_FUSE_SWIGLU;
    fused.out[0] = swiglu->out[0];
    fused.out[1] = -1;
    linear->is_dead = true;
    *swiglu = fused;
  }
}

static void fuse_reduce(struct graph *g)
{
  for (int32_t i = 0; i < g->n_nodes; i++) {
    struct graph_node *reduce = &g->nodes[i];
    if (!is_plain(reduce, PROGRAM_ALL_REDUCE)) continue;
    const int32_t from = graph_sole_producer(g, reduce->in[0], PROGRAM_LINEAR);
    if (from < 0 || g->nodes[from].n_parts != 1 || g->nodes[from].fused != 0 ||
        !graph_take(g, PROGRAM_FUSE_REDUCE, reduce, graph_saved(g, reduce->in[0], 2))) continue;
    struct graph_node fused = g->nodes[from];
    fused.fused = PROGRAM_FUSE_REDUCE;
    fused.out[0] = reduce->out[0];
    g->nodes[from].is_dead = true;
    *reduce = fused;
  }
}

static void fuse_add(struct graph *g)
{
  for (int32_t i = 0; i < g->n_nodes; i++) {
    struct graph_node *add = &g->nodes[i];
    if (!is_plain(add, PROGRAM_ADD)) continue;
    for (int side = 1; side >= 0; side--) {
      const int32_t from = graph_sole_producer(g, add->in[side], PROGRAM_LINEAR);
      if (from < 0 || g->nodes[from].n_parts != 1 || (g->nodes[from].fused & ~(uint32_t)PROGRAM_FUSE_REDUCE) ||
          !graph_take(g, PROGRAM_FUSE_ADD, add, graph_saved(g, add->out[0], 2))) continue;
      struct graph_node fused = g->nodes[from];
      fused.fused |= PROGRAM_FUSE_ADD;
      fused.in[1] = add->in[1 - side];
      fused.out[0] = add->out[0];
      g->nodes[from].is_dead = true;
      *add = fused;
      break;
    }
  }
}

static void fuse_norm(struct graph *g)
{
  for (int32_t i = 0; i < g->n_nodes; i++) {
    struct graph_node *linear = &g->nodes[i];
    if (linear->is_dead || linear->kind != PROGRAM_LINEAR || (linear->fused & PROGRAM_FUSE_NORM)) continue;
    const int32_t from = graph_sole_producer(g, linear->in[0], PROGRAM_RMSNORM);
    if (from < 0 || !graph_is_f32(g, PROGRAM_FUSE_NORM) ||
        !graph_take(g, PROGRAM_FUSE_NORM, &g->nodes[from], graph_saved(g, linear->in[0], 2) - graph_repeated(g, linear->in[0]))) continue;
    linear->fused |= PROGRAM_FUSE_NORM;
    linear->gain = g->nodes[from].gain;
    linear->in[0] = g->nodes[from].in[0];
    g->nodes[from].is_dead = true;
  }
}

static void fuse_add_norm(struct graph *g)
{
  for (int32_t i = 0; i < g->n_nodes; i++) {
    struct graph_node *norm = &g->nodes[i];
    if (!is_plain(norm, PROGRAM_RMSNORM)) continue;
    const int32_t from = graph_producer(g, norm->in[0]);
    if (from < 0 || !is_plain(&g->nodes[from], PROGRAM_ADD) || !graph_is_f32(g, PROGRAM_FUSE_ADD_NORM) ||
        !graph_take(g, PROGRAM_FUSE_ADD_NORM, norm, graph_saved(g, norm->in[0], 1))) continue;
    struct graph_node *add = &g->nodes[from];
    add->fused |= PROGRAM_FUSE_ADD_NORM;
    add->gain = norm->gain;
    add->out[1] = norm->out[0];
    norm->is_dead = true;
  }
}

/* ---- buffers ---- */

struct allocation {
  struct program *program;
  const struct graph *graph;
  int32_t *last_use;                 /* [n_values] index of the last live node that reads it; n_nodes for the result; -1 = never */
  int32_t *buffer_of;                /* [n_values] */
  bool *is_free;                     /* [n_buffers] */
};

static int32_t take_buffer(struct allocation *a, const struct graph_value_info *info)
{
  struct program *p = a->program;
  for (int32_t b = 0; b < p->n_buffers; b++)
    if (a->is_free[b] && p->buffers[b].width == info->width && p->buffers[b].is_rows == info->is_rows) {
      a->is_free[b] = false;
      return b;
    }
  struct program_buffer *buffer = &p->buffers[p->n_buffers];
  *buffer = (struct program_buffer){.width = info->width, .is_rows = info->is_rows};
  memcpy(buffer->name, info->name, sizeof buffer->name);
  a->is_free[p->n_buffers] = false;
  return p->n_buffers++;
}

/* The input whose buffer out[0] may take over: allowed by the kind, dying here, of the same shape. -1: none. */
static int in_place_input(const struct allocation *a, const struct graph_node *node, int32_t index)
{
  int from = 0, to = -1;
  switch (node->kind) {
  case PROGRAM_HEAD_NORM: case PROGRAM_ROPE: to = 0; break;
  case PROGRAM_SWIGLU: case PROGRAM_ADD: to = 1; break;
  case PROGRAM_LINEAR: from = to = (node->fused & PROGRAM_FUSE_ADD) ? 1 : -1; break;
  default: break;
  }
  for (int k = from; k >= 0 && k <= to; k++) {
    const graph_value v = node->in[k];
    if (v < 0 || a->last_use[v] != index || node->in[0] == node->in[1]) continue;
    const struct graph_value_info *in = &a->graph->values[v], *out = &a->graph->values[node->out[0]];
    if (in->width == out->width && in->is_rows == out->is_rows) return k;
  }
  return -1;
}

static void emit_node(struct allocation *a, int32_t index)
{
  const struct graph *g = a->graph;
  const struct graph_node *node = &g->nodes[index];
  struct program_op *op = &a->program->ops[a->program->n_ops++];
  *op = (struct program_op){.kind = node->kind, .fused = node->fused, .layer = node->layer, .n_parts = node->n_parts, .act = node->act,
                            .gain = node->gain,
                            .q_gain = node->q_gain, .k_gain = node->k_gain};
  memcpy(op->parts, node->parts, sizeof op->parts);
  const int taken = in_place_input(a, node, index);
  int n_in = 0, n_out = 0;
  for (int k = 0; k < 3; k++) op->in[k] = op->out[k] = PROGRAM_NONE;
  for (int k = 0; k < 3; k++)
    if (node->in[k] >= 0 && g->values[node->in[k]].width > 0) op->in[n_in++] = a->buffer_of[node->in[k]];
  for (int k = 0; k < 3; k++) {
    const graph_value v = node->out[k];
    if (v < 0 || g->values[v].width == 0) continue;
    a->buffer_of[v] = k == 0 && taken >= 0 ? a->buffer_of[node->in[taken]] : take_buffer(a, &g->values[v]);
    op->out[n_out++] = a->buffer_of[v];
  }
  for (int k = 0; k < 3; k++) { /* inputs that die here, and outputs that nobody reads */
    const graph_value in = node->in[k], out = node->out[k];
    if (in >= 0 && g->values[in].width > 0 && a->last_use[in] == index && k != taken) a->is_free[a->buffer_of[in]] = true;
    if (out >= 0 && g->values[out].width > 0 && a->last_use[out] < 0) a->is_free[a->buffer_of[out]] = true;
  }
}

static enum sits_status emit(const struct graph *g, struct program **out)
{
  enum sits_status status = SITS_NOMEM;
  const size_t n_values = (size_t)g->n_values;
  struct program *p = mem_calloc(1, sizeof *p);
  struct allocation a = {.program = p, .graph = g, .last_use = mem_alloc(n_values * sizeof(int32_t)),
                         .buffer_of = mem_alloc(n_values * sizeof(int32_t)), .is_free = mem_calloc(n_values, sizeof(bool))};
  if (p == NULL || a.last_use == NULL || a.buffer_of == NULL || a.is_free == NULL) goto done;
  p->dims = g->dims;
  p->rope = g->rope;
  p->ops = mem_calloc((size_t)g->n_nodes, sizeof *p->ops);
  p->buffers = mem_calloc(n_values, sizeof *p->buffers);
  if (p->ops == NULL || p->buffers == NULL) goto done;
  for (size_t v = 0; v < n_values; v++) a.last_use[v] = a.buffer_of[v] = -1;
  for (int32_t i = 0; i < g->n_nodes; i++)
    for (int k = 0; k < 3 && !g->nodes[i].is_dead; k++)
      if (g->nodes[i].in[k] >= 0) a.last_use[g->nodes[i].in[k]] = i;
  a.last_use[g->output] = g->n_nodes;
  for (int32_t i = 0; i < g->n_nodes; i++)
    if (!g->nodes[i].is_dead) emit_node(&a, i);
  p->logits = a.buffer_of[g->output];
  *out = p;
  p = NULL;
  status = SITS_OK;
done:
  program_destroy(p);
  mem_free(a.last_use);
  mem_free(a.buffer_of);
  mem_free(a.is_free);
  return status;
}

enum sits_status graph_stitch(const struct graph *graph, uint32_t fusions, const struct backend_costs *costs, struct program **out,
                              struct sits_error *err)
{
  if (graph->status != SITS_OK) return sits_fail(err, graph->status, "%s", graph->error.text);
  if (graph->output < 0) return sits_fail(err, SITS_INVALID_ARGUMENT, "graph: no output");
  struct program *program = NULL;
  struct graph g;
  enum sits_status status = copy_graph(graph, &g);
  if (status == SITS_OK && (fusions & PROGRAM_MOVE_SELECT)) status = move_select(&g);
  if (status == SITS_OK) {
    g.costs = costs;
    if (costs != NULL) graph_weigh(&g, fusions);
    if (fusions & PROGRAM_FUSE_GROUP) group_linears(&g);
    if (fusions & PROGRAM_FUSE_ROPE) fuse_rope(&g);
    if (fusions & PROGRAM_FUSE_QKV) fuse_qkv(&g);
    if (fusions & PROGRAM_FUSE_SWIGLU) fuse_swiglu(&g);
    if (fusions & PROGRAM_FUSE_REDUCE) fuse_reduce(&g);
    if (fusions & PROGRAM_FUSE_ADD) fuse_add(&g);
    if (fusions & PROGRAM_FUSE_NORM) fuse_norm(&g);
    if (fusions & PROGRAM_FUSE_ADD_NORM) fuse_add_norm(&g);
    status = emit(&g, &program);
    if (status == SITS_OK) memcpy(program->choices, g.choices, sizeof program->choices);
    if (status == SITS_OK) program->weighed_tokens = costs != NULL ? costs->tokens : 0;
  }
  mem_free(g.nodes);
  mem_free(g.values);
  if (status != SITS_OK) return sits_fail(err, status, "graph: out of memory");
  status = program_check(program, err);
  if (status != SITS_OK) {
    program_destroy(program);
    return status;
  }
  *out = program;
  return SITS_OK;
}
