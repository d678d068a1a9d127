/* graph_shard: from a whole op graph to one rank's share of it (tensor parallelism). Entry point: graph_shard.
 *
 * The pass walks the graph once. A value is either whole (every rank has all of it, the same bits) or split (each rank has some of its
 * columns, in rank order):
 *
 *   op                          reads whole                            reads split
 *   LINEAR                      rows of W are split; makes split       columns of W are split, then ALL_REDUCE; makes whole
 *   KV_APPEND, ATTENTION,       -                                      stays split: heads are independent
 *   HEAD_NORM, ROPE, SWIGLU     stays whole                            stays split
 *   EMBED                       rows of the table are split, then ALL_REDUCE (others' rows are zeros); makes whole
 *   RMSNORM, ADD, SELECT_ROWS   stays whole                            refused, for a norm sees all columns
 *   the graph's output          as it is                               ALL_GATHER
 *
 * So a llama layer gets two collectives, after o and after down, the embedding and the head one. Where the head is tied, its rows are the
 * embedding's: one share serves both. Both are views of the whole weight: nothing is copied, and a rank
 * touches no more of the file than its part. The bias of a LINEAR that is summed over ranks is added by rank 0.
 * KV heads: G / n_ranks each; where there are fewer heads than ranks, n_ranks / G ranks keep the same one.
 * Rounding of inputs (struct act_format) is by groups of channels, so that a rank rounds its columns as the whole would; the scale of the
 * 8-bit outliers of ACT_INT4 is over the rank's channels only.
 */
#include <string.h>

#include "base/mem.h"
#include "graph/graph.h"
#include "graph/graph_internal.h"

struct shard {
  const struct graph *whole;
  struct graph *out;
  struct arena *arena;
  struct sits_error *err;
  int32_t rank, n_ranks;
  graph_value *value;                /* [n_values] of the whole: the same value in the share */
  bool *is_split;                    /* [n_values] of the whole */
  bool *is_kv;                       /* [n_values] of the whole: on the way into a KV_APPEND */
  const struct sits_utd *table, *table_share; /* the embedding's, whole and this rank's rows; NULL before it */
};

#define PARAM "tensor-parallel-size"

static enum sits_status check_sizes(const struct program_dims *d, int32_t n, struct sits_error *err)
{
  if (d->n_heads % n != 0)
    return sits_fail_param(err, SITS_CONFIG, PARAM, "tensor-parallel-size %d: the model's %d heads do not divide by it", (int)n,
                           (int)d->n_heads);
  if (d->n_kv_heads % n != 0 && n % d->n_kv_heads != 0)
    return sits_fail_param(err, SITS_CONFIG, PARAM, "tensor-parallel-size %d: the model's %d KV heads neither divide by it nor divide it",
                           (int)n, (int)d->n_kv_heads);
  if (d->n_ff % n != 0)
    return sits_fail_param(err, SITS_CONFIG, PARAM, "tensor-parallel-size %d: the feed-forward width %d does not divide by it", (int)n,
                           (int)d->n_ff);
  if (d->n_vocab % n != 0)
    return sits_fail_param(err, SITS_CONFIG, PARAM, "tensor-parallel-size %d: the vocabulary of %d does not divide by it", (int)n,
                           (int)d->n_vocab);
  return SITS_OK;
}

static int64_t scale_bytes(const struct sits_utd *u) { return sits_dtype_info(u->scale_dtype)->block_bytes; }
static int64_t groups_of(const struct sits_utd *u) { return u->quant == SITS_QUANT_GROUP ? u->dims[1] / u->group_size : 1; }
static const void *offset(const void *base, int64_t n_bytes) { return base == NULL ? NULL : (const uint8_t *)base + n_bytes; }

static enum sits_status new_utd(struct shard *s, const struct sits_utd *from, struct sits_utd **out)
{
  *out = arena_alloc(s->arena, sizeof **out);
  if (*out == NULL) return sits_fail(s->err, SITS_NOMEM, "%s: no memory for a share of it", from->name);
  **out = *from;
  return SITS_OK;
}

static enum sits_status check_layout(struct shard *s, const struct sits_utd *u)
{
  if (u->layout != SITS_LAYOUT_ROW_MAJOR || u->row_stride != 0 ||
      (u->quant == SITS_QUANT_GROUP && (u->group_axis != u->n_dims - 1 || u->group_size <= 0)))
    return sits_fail_param(s->err, SITS_UNSUPPORTED, PARAM, "%s: its layout cannot be cut over ranks", u->name);
  return SITS_OK;
}

/* Elements r0 .. r0+n-1 of dims[0]: a view. */
static enum sits_status rows_of(struct shard *s, const struct sits_utd *from, int64_t r0, int64_t n, const struct sits_utd **out)
{
  struct sits_utd *u;
  enum sits_status status = check_layout(s, from);
  if (status == SITS_OK) status = new_utd(s, from, &u);
  if (status != SITS_OK) return status;
  u->dims[0] = n;
  if (from->data != NULL) {
    const int64_t bytes = sits_utd_row_major_bytes(u), whole = sits_utd_row_major_bytes(from);
    const int64_t row = from->dims[0] ? whole / from->dims[0] : 0;
    if (bytes < 0 || whole < 0 || row * from->dims[0] != whole)
      return sits_fail_param(s->err, SITS_UNSUPPORTED, PARAM, "%s: its rows are no whole number of bytes", from->name);
    u->data = offset(from->data, r0 * row);
    u->n_bytes = (size_t)bytes;
  }
  if (from->quant != SITS_QUANT_NONE) {
    u->scales = offset(from->scales, r0 * groups_of(from) * scale_bytes(from));
    u->minimums = offset(from->minimums, r0 * groups_of(from) * scale_bytes(from));
  }
  *out = u;
  return SITS_OK;
}

/* This rank's columns of a weight: a view. */
static enum sits_status columns_of(struct shard *s, const struct sits_utd *from, const struct sits_utd **out)
{
  const int64_t n = from->dims[1] / s->n_ranks, k0 = n * s->rank, rows = from->dims[0];
  const struct sits_dtype_info *type = sits_dtype_info(from->dtype);
  const int32_t unit = from->quant == SITS_QUANT_GROUP ? from->group_size : type->block_elements;
  struct sits_utd *u;
  enum sits_status status = check_layout(s, from);
  if (status == SITS_OK && (from->dims[1] % s->n_ranks != 0 || n % unit != 0 || n % type->block_elements != 0))
    status = sits_fail_param(s->err, SITS_CONFIG, PARAM, "tensor-parallel-size %d: %s: its %lld columns cut a group of %d", (int)s->n_ranks,
                             from->name, (long long)from->dims[1], (int)unit);
  if (status == SITS_OK) status = new_utd(s, from, &u);
  if (status != SITS_OK) return status;
  u->dims[1] = n;
  if (from->data != NULL) {
    const int64_t per = type->block_elements, bytes = type->block_bytes;
    u->data = offset(from->data, k0 / per * bytes);
    u->n_bytes = (size_t)(rows * (n / per * bytes));
    u->row_stride = from->dims[1] / per * bytes;
  }
  if (from->quant == SITS_QUANT_GROUP) {
    u->scales = offset(from->scales, k0 / unit * scale_bytes(from));
    u->minimums = offset(from->minimums, k0 / unit * scale_bytes(from));
    u->scale_stride = groups_of(from) * scale_bytes(from);
  }
  *out = u;
  return SITS_OK;
}

/* The same rounding for this rank's channels. */
static enum sits_status act_of(struct shard *s, const struct act_format *from, int64_t width, const char *name,
                               const struct act_format **out)
{
  const int64_t n = width / s->n_ranks, k0 = n * s->rank;
  *out = from;
  if (from == NULL) return SITS_OK;
  if (from->rotation > 0 && n % from->rotation != 0)
    return sits_fail_param(s->err, SITS_CONFIG, PARAM, "tensor-parallel-size %d: %s: its %lld inputs cut a rotated run of %d",
                           (int)s->n_ranks, name, (long long)width, (int)from->rotation);
  if (from->kind == ACT_BACKEND || from->kind == ACT_FLOAT) return SITS_OK;
  if (n % ACT_GROUP != 0)
    return sits_fail_param(s->err, SITS_CONFIG, PARAM, "tensor-parallel-size %d: %s: its %lld inputs cut a group of %d",
                           (int)s->n_ranks, name, (long long)width, ACT_GROUP);
  struct act_format *act = arena_alloc(s->arena, sizeof *act);
  int32_t *outliers = arena_alloc(s->arena, (size_t)from->n_outliers * sizeof *outliers);
  if (act == NULL || outliers == NULL) return sits_fail(s->err, SITS_NOMEM, "%s: out of memory", name);
  *act = (struct act_format){.kind = from->kind, .outliers = outliers, .rotation = from->rotation};
  for (int32_t i = 0; i < from->n_outliers; i++)
    if (from->outliers[i] >= k0 && from->outliers[i] < k0 + n) outliers[act->n_outliers++] = (int32_t)(from->outliers[i] - k0);
  *out = act;
  return SITS_OK;
}

static enum sits_status shard_linear(struct shard *s, const struct graph_node *node)
{
  const struct program_dims *d = &s->whole->dims;
  const struct program_part *part = &node->parts[0];
  const struct sits_utd *weight = NULL, *bias = part->bias;
  const struct act_format *act = node->act;
  const char *name = s->whole->values[node->out[0]].name;
  const graph_value x = s->value[node->in[0]];
  const bool is_row_wise = s->is_split[node->in[0]];
  enum sits_status status = SITS_OK;
  if (is_row_wise) {
    status = columns_of(s, part->weight, &weight);
    if (status == SITS_OK) status = act_of(s, node->act, part->weight->dims[1], part->weight->name, &act);
    if (s->rank > 0) bias = NULL;
  } else {
    int64_t n = part->weight->dims[0] / s->n_ranks, r0 = n * s->rank;
    if (s->is_kv[node->out[0]] && d->n_kv_heads < s->n_ranks) {
      n = d->head_dim;
      r0 = (int64_t)s->rank * d->n_kv_heads / s->n_ranks * n;
    } else if (part->weight->dims[0] % s->n_ranks != 0) {
      status = sits_fail_param(s->err, SITS_CONFIG, PARAM, "tensor-parallel-size %d: %s: its %lld rows do not divide by it",
                               (int)s->n_ranks, part->weight->name, (long long)part->weight->dims[0]);
    }
    if (part->weight == s->table) weight = s->table_share; /* a tied head */
    else if (status == SITS_OK) status = rows_of(s, part->weight, r0, n, &weight);
    if (status == SITS_OK && bias != NULL) status = rows_of(s, bias, r0, n, &bias);
  }
  if (status != SITS_OK) return status;
  graph_set_act(s->out, act);
  graph_value y = graph_linear(s->out, x, weight, bias, name);
  if (is_row_wise) y = graph_all_reduce(s->out, y);
  s->value[node->out[0]] = y;
  s->is_split[node->out[0]] = !is_row_wise;
  return SITS_OK;
}

static enum sits_status shard_embed(struct shard *s, const struct graph_node *node)
{
  const struct sits_utd *table;
  const int64_t n = node->parts[0].weight->dims[0] / s->n_ranks;
  const enum sits_status status = rows_of(s, node->parts[0].weight, n * s->rank, n, &table);
  if (status != SITS_OK) return status;
  s->table = node->parts[0].weight;
  s->table_share = table;
  s->value[node->out[0]] = graph_all_reduce(s->out, graph_embed(s->out, table));
  return SITS_OK;
}

static enum sits_status shard_node(struct shard *s, const struct graph_node *node)
{
  struct graph *g = s->out;
  const graph_value a = node->in[0] >= 0 ? s->value[node->in[0]] : -1, b = node->in[1] >= 0 ? s->value[node->in[1]] : -1;
  const bool is_split = node->in[0] >= 0 && s->is_split[node->in[0]];
  const bool mixes = node->in[1] >= 0 && s->is_split[node->in[1]] != is_split;
  bool fits = !mixes;
  graph_value y = -1;
  graph_set_layer(g, node->layer);
  switch (node->kind) {
  case PROGRAM_LINEAR: return shard_linear(s, node);
  case PROGRAM_EMBED: return shard_embed(s, node);
  case PROGRAM_RMSNORM: y = graph_rmsnorm(g, a, node->gain), fits = fits && !is_split; break;
  case PROGRAM_HEAD_NORM: y = graph_head_norm(g, a, node->gain); break;
  case PROGRAM_ROPE: y = graph_rope(g, a); break;
  case PROGRAM_KV_APPEND: y = graph_kv_append(g, a, b), fits = fits && is_split; break;
  case PROGRAM_ATTENTION: y = graph_attention(g, a, b), fits = fits && is_split; break;
  case PROGRAM_SWIGLU: y = graph_swiglu(g, a, b); break;
  case PROGRAM_ADD: y = graph_add(g, a, b), fits = fits && !is_split; break;
  case PROGRAM_SELECT_ROWS: y = graph_select_rows(g, a), fits = fits && !is_split; break;
  case PROGRAM_ALL_REDUCE: case PROGRAM_ALL_GATHER: case PROGRAM_OP_KINDS: fits = false; break;
  }
  if (!fits)
    return sits_fail_param(s->err, SITS_UNSUPPORTED, PARAM, "the model's %s (layer %d) cannot be cut over ranks",
                           program_op_name(node->kind), (int)node->layer);
  s->value[node->out[0]] = y;
  s->is_split[node->out[0]] = is_split;
  return SITS_OK;
}

/* Values that reach a KV_APPEND through norms and rotations. */
static void mark_kv(struct shard *s)
{
  for (int32_t i = s->whole->n_nodes - 1; i >= 0; i--) {
    const struct graph_node *node = &s->whole->nodes[i];
    const bool passes_on = node->kind == PROGRAM_HEAD_NORM || node->kind == PROGRAM_ROPE;
    for (int k = 0; k < 2; k++)
      if (node->in[k] >= 0 && (node->kind == PROGRAM_KV_APPEND || (passes_on && s->is_kv[node->out[0]]))) s->is_kv[node->in[k]] = true;
  }
}

enum sits_status graph_shard(const struct graph *whole, int32_t rank, int32_t n_ranks, struct arena *arena, struct graph **out,
                             struct sits_error *err)
{
  if (whole->status != SITS_OK) return sits_fail(err, whole->status, "%s", whole->error.text);
  if (whole->output < 0 || n_ranks < 1 || rank < 0 || rank >= n_ranks || whole->dims.n_ranks > 1)
    return sits_fail(err, SITS_INVALID_ARGUMENT, "graph: no such share");
  enum sits_status status = check_sizes(&whole->dims, n_ranks, err);
  if (status != SITS_OK) return status;
  struct program_dims dims = whole->dims;
  dims.rank = rank;
  dims.n_ranks = n_ranks;
  dims.n_heads /= n_ranks;
  dims.n_kv_heads = dims.n_kv_heads >= n_ranks ? dims.n_kv_heads / n_ranks : 1;
  const size_t n_values = (size_t)whole->n_values;
  struct shard s = {.whole = whole, .arena = arena, .err = err, .rank = rank, .n_ranks = n_ranks,
                    .value = mem_calloc(n_values, sizeof *s.value), .is_split = mem_calloc(n_values, 1), .is_kv = mem_calloc(n_values, 1)};
  if (s.value == NULL || s.is_split == NULL || s.is_kv == NULL) status = sits_fail(err, SITS_NOMEM, "graph: out of memory");
  if (status == SITS_OK) status = graph_create(&dims, &whole->rope, &s.out, err);
  if (status == SITS_OK) mark_kv(&s);
  for (int32_t i = 0; i < whole->n_nodes && status == SITS_OK; i++) status = shard_node(&s, &whole->nodes[i]);
  if (status == SITS_OK) {
    const graph_value y = s.value[whole->output];
    graph_output(s.out, s.is_split[whole->output] ? graph_all_gather(s.out, y) : y);
    if (s.out->status != SITS_OK) status = sits_fail(err, s.out->status, "%s", s.out->error.text);
  }
  mem_free(s.value);
  mem_free(s.is_split);
  mem_free(s.is_kv);
  if (status != SITS_OK) {
    graph_destroy(s.out);
    return status;
  }
  *out = s.out;
  return SITS_OK;
}
