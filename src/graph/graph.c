/* Building op graphs: see graph.h. The stitching pass is graph_stitch.c. */
#include "graph/graph.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "graph/graph_internal.h"

enum sits_status graph_create(const struct program_dims *dims, const struct program_rope *rope, struct graph **out, struct sits_error *err)
{
  struct graph *graph = mem_calloc(1, sizeof *graph);
  if (graph == NULL) return sits_fail(err, SITS_NOMEM, "graph: out of memory");
  graph->dims = *dims;
  graph->rope = *rope;
  graph->layer = PROGRAM_NONE;
  graph->output = -1;
  *out = graph;
  return SITS_OK;
}

void graph_destroy(struct graph *graph)
{
  if (graph == NULL) return;
  mem_free(graph->nodes);
  mem_free(graph->values);
  mem_free(graph);
}

void graph_set_layer(struct graph *graph, int32_t layer) { graph->layer = layer; }
void graph_set_act(struct graph *graph, const struct act_format *act) { graph->act = act; }

static graph_value fail(struct graph *graph, enum sits_status status, const char *what, const char *name)
{
  if (graph->status == SITS_OK) graph->status = sits_fail(&graph->error, status, "graph: %s %s (layer %d)", what, name, (int)graph->layer);
  return -1;
}

/* Double an array when it is full. */
static bool grow(void **array, int32_t n, int32_t *capacity, size_t element_bytes)
{
  if (n < *capacity) return true;
  const int32_t wanted = *capacity == 0 ? 64 : *capacity * 2;
  void *bigger = mem_realloc(*array, (size_t)wanted * element_bytes);
  if (bigger == NULL) return false;
  *array = bigger;
  *capacity = wanted;
  return true;
}

graph_value graph_new_value(struct graph *graph, const char *name, int32_t width, bool is_rows)
{
  if (!grow((void **)&graph->values, graph->n_values, &graph->values_capacity, sizeof *graph->values))
    return fail(graph, SITS_NOMEM, "out of memory at", name);
  struct graph_value_info *info = &graph->values[graph->n_values];
  *info = (struct graph_value_info){.width = width, .is_rows = is_rows};
  snprintf(info->name, sizeof info->name, "%s", name);
  return graph->n_values++;
}

struct graph_node *graph_new_node(struct graph *graph, enum program_op_kind kind)
{
  if (!grow((void **)&graph->nodes, graph->n_nodes, &graph->nodes_capacity, sizeof *graph->nodes)) {
    fail(graph, SITS_NOMEM, "out of memory at", program_op_name(kind));
    return NULL;
  }
  struct graph_node *node = &graph->nodes[graph->n_nodes++];
  *node = (struct graph_node){.kind = kind, .layer = graph->layer, .in = {-1, -1, -1}, .out = {-1, -1, -1}};
  return node;
}

/* A node with one output and up to two inputs that share their kind of rows. NULL after a failure. */
static struct graph_node *append(struct graph *graph, enum program_op_kind kind, const char *name, graph_value a, graph_value b,
                                 int32_t width)
{
  if (graph->status != SITS_OK) return NULL;
  const bool is_rows = kind == PROGRAM_SELECT_ROWS || (a >= 0 && graph->values[a].is_rows);
  struct graph_node *node = graph_new_node(graph, kind);
  if (node == NULL) return NULL;
  const graph_value out = graph_new_value(graph, name, width, is_rows);
  if (out < 0) return NULL;
  node->in[0] = a;
  node->in[1] = b;
  node->out[0] = out;
  return node;
}

static int32_t width_of(const struct graph *graph, graph_value value)
{
  return graph->status == SITS_OK && value >= 0 && value < graph->n_values ? graph->values[value].width : -1;
}

static bool is_vector(const struct sits_utd *utd, int64_t n) { return utd != NULL && sits_utd_elements(utd) == n; }

static graph_value result(const struct graph_node *node) { return node == NULL ? -1 : node->out[0]; }

graph_value graph_embed(struct graph *graph, const struct sits_utd *table)
{
  const int64_t n_ranks = graph->dims.n_ranks > 1 ? graph->dims.n_ranks : 1;
  if (table == NULL || table->n_dims != 2 || table->dims[0] * n_ranks != graph->dims.n_vocab || table->dims[1] != graph->dims.n_embd)
    return fail(graph, SITS_INVALID_ARGUMENT, "bad embedding table", table != NULL ? table->name : "");
  struct graph_node *node = append(graph, PROGRAM_EMBED, "x", -1, -1, graph->dims.n_embd);
  if (node == NULL) return -1;
  node->n_parts = 1;
  node->parts[0] = (struct program_part){.weight = table};
  return result(node);
}

graph_value graph_rmsnorm(struct graph *graph, graph_value x, const struct sits_utd *gain)
{
  if (graph->status == SITS_OK && !is_vector(gain, width_of(graph, x)))
    return fail(graph, SITS_INVALID_ARGUMENT, "bad norm gain", gain != NULL ? gain->name : "");
  struct graph_node *node = append(graph, PROGRAM_RMSNORM, "normed", x, -1, width_of(graph, x));
  if (node == NULL) return -1;
  node->gain = gain;
  return result(node);
}

graph_value graph_linear(struct graph *graph, graph_value x, const struct sits_utd *weight, const struct sits_utd *bias, const char *name)
{
  if (graph->status != SITS_OK) return -1;
  if (weight == NULL || weight->n_dims != 2 || weight->dims[1] != width_of(graph, x) || (bias != NULL && !is_vector(bias, weight->dims[0])))
    return fail(graph, SITS_INVALID_ARGUMENT, "shapes do not fit at", weight != NULL ? weight->name : name);
  struct graph_node *node = append(graph, PROGRAM_LINEAR, name, x, -1, (int32_t)weight->dims[0]);
  if (node == NULL) return -1;
  node->n_parts = 1;
  node->parts[0] = (struct program_part){.weight = weight, .bias = bias};
  node->act = graph->act;
  return result(node);
}

graph_value graph_head_norm(struct graph *graph, graph_value x, const struct sits_utd *gain)
{
  if (gain == NULL) return x;
  if (graph->status == SITS_OK && (!is_vector(gain, graph->dims.head_dim) || width_of(graph, x) % graph->dims.head_dim != 0))
    return fail(graph, SITS_INVALID_ARGUMENT, "bad head norm gain", gain->name);
  struct graph_node *node = append(graph, PROGRAM_HEAD_NORM, "head_normed", x, -1, width_of(graph, x));
  if (node == NULL) return -1;
  node->gain = gain;
  return result(node);
}

graph_value graph_rope(struct graph *graph, graph_value x)
{
  return result(append(graph, PROGRAM_ROPE, "rotated", x, -1, width_of(graph, x)));
}

graph_value graph_kv_append(struct graph *graph, graph_value k, graph_value v)
{
  const int32_t width = graph->dims.n_kv_heads * graph->dims.head_dim;
  if (graph->status == SITS_OK && (width_of(graph, k) != width || width_of(graph, v) != width))
    return fail(graph, SITS_INVALID_ARGUMENT, "widths do not fit at", "kv_append");
  return result(append(graph, PROGRAM_KV_APPEND, "cache", k, v, 0));
}

graph_value graph_attention(struct graph *graph, graph_value q, graph_value cache)
{
  const int32_t width = graph->dims.n_heads * graph->dims.head_dim;
  if (graph->status == SITS_OK && (width_of(graph, q) != width || width_of(graph, cache) != 0))
    return fail(graph, SITS_INVALID_ARGUMENT, "widths do not fit at", "attention");
  return result(append(graph, PROGRAM_ATTENTION, "attended", q, cache, width));
}

static graph_value binary(struct graph *graph, enum program_op_kind kind, const char *name, graph_value a, graph_value b)
{
  if (graph->status == SITS_OK && (width_of(graph, a) != width_of(graph, b) || graph->values[a].is_rows != graph->values[b].is_rows))
    return fail(graph, SITS_INVALID_ARGUMENT, "widths do not fit at", program_op_name(kind));
  return result(append(graph, kind, name, a, b, width_of(graph, a)));
}

graph_value graph_swiglu(struct graph *graph, graph_value gate, graph_value up)
{
  return binary(graph, PROGRAM_SWIGLU, "gated", gate, up);
}

graph_value graph_add(struct graph *graph, graph_value a, graph_value b) { return binary(graph, PROGRAM_ADD, "x", a, b); }

graph_value graph_select_rows(struct graph *graph, graph_value x)
{
  return result(append(graph, PROGRAM_SELECT_ROWS, "x_rows", x, -1, width_of(graph, x)));
}

graph_value graph_all_reduce(struct graph *graph, graph_value x)
{
  return result(append(graph, PROGRAM_ALL_REDUCE, "summed", x, -1, width_of(graph, x)));
}

graph_value graph_all_gather(struct graph *graph, graph_value x)
{
  const int32_t n = graph->dims.n_ranks > 1 ? graph->dims.n_ranks : 1;
  return result(append(graph, PROGRAM_ALL_GATHER, "gathered", x, -1, width_of(graph, x) * n));
}

void graph_output(struct graph *graph, graph_value logits)
{
  if (graph->status == SITS_OK && (width_of(graph, logits) != graph->dims.n_vocab || !graph->values[logits].is_rows))
    fail(graph, SITS_INVALID_ARGUMENT, "bad result", "logits");
  graph->output = logits;
}
