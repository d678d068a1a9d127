/* Programs: checking, printing, freeing. Entry points: program_check, program_write_plan, program_destroy. */
#include "backend/program.h"

#include <stddef.h>

#include "base/mem.h"

static const char *const op_names[PROGRAM_OP_KINDS] = {
    [PROGRAM_EMBED] = "embed",   [PROGRAM_RMSNORM] = "rmsnorm",     [PROGRAM_LINEAR] = "linear",       [PROGRAM_HEAD_NORM] = "head_norm",
    [PROGRAM_ROPE] = "rope",     [PROGRAM_KV_APPEND] = "kv_append", [PROGRAM_ATTENTION] = "attention", [PROGRAM_SWIGLU] = "swiglu",
    [PROGRAM_ADD] = "add",       [PROGRAM_SELECT_ROWS] = "select_rows",
    [PROGRAM_ALL_REDUCE] = "all_reduce", [PROGRAM_ALL_GATHER] = "all_gather"};

static const struct { uint32_t bit; const char *name; } fusion_names[] = {
    {PROGRAM_FUSE_NORM, "norm"}, {PROGRAM_FUSE_ADD_NORM, "add_norm"}, {PROGRAM_FUSE_ROPE, "rope"}, {PROGRAM_FUSE_QKV, "qkv"},
    {PROGRAM_FUSE_SWIGLU, "swiglu"}, {PROGRAM_FUSE_ADD, "add"}, {PROGRAM_FUSE_GROUP, "group"}, {PROGRAM_MOVE_SELECT, "moved"},
    {PROGRAM_FUSE_REDUCE, "reduce"}};

const char *program_op_name(enum program_op_kind kind) { return op_names[kind]; }

void program_destroy(struct program *program)
{
  while (program != NULL) {
    struct program *next = program->next_rank;
    if (program->arena != NULL) arena_fini(program->arena);
    mem_free(program->arena);
    mem_free(program->buffers);
    mem_free(program->ops);
    mem_free(program);
    program = next;
  }
}

/* What an op of this kind and fusion reads and writes; widths of 0 mean that there is no such operand. */
struct op_shape { int32_t in[3], out[3]; };

static bool is_vector(const struct sits_utd *utd, int64_t n) { return utd != NULL && sits_utd_elements(utd) == n; }

static bool is_part(const struct program_part *part, int64_t n_out, int64_t n_in)
{
  return part->weight != NULL && part->weight->n_dims == 2 && part->weight->dims[0] == n_out && part->weight->dims[1] == n_in &&
         (part->bias == NULL || is_vector(part->bias, n_out));
}

static int64_t part_rows(const struct program_op *op, int i)
{
  return i < op->n_parts && op->parts[i].weight != NULL && op->parts[i].weight->n_dims == 2 ? op->parts[i].weight->dims[0] : 0;
}

static bool is_act(const struct act_format *act, int64_t n_channels)
{
  if (act == NULL) return true;
  if ((unsigned)act->kind >= ACT_KINDS || act->n_outliers < 0 || (act->n_outliers > 0 && act->kind != ACT_INT4)) return false;
  const int32_t block = act->rotation;
  if (block < 0 || (block & (block - 1)) != 0 || (block > 0 && n_channels % block != 0)) return false;
  for (int32_t i = 0; i < act->n_outliers; i++)
    if (act->outliers[i] < (i == 0 ? 0 : act->outliers[i - 1] + 1) || act->outliers[i] >= n_channels) return false;
  return true;
}

static bool linear_shape(const struct program *p, const struct program_op *op, int64_t x, struct op_shape *shape)
{
  const int64_t D = p->dims.head_dim, q = p->dims.n_heads * D, kv = p->dims.n_kv_heads * D;
  if (op->n_parts < 1 || op->n_parts > PROGRAM_MAX_PARTS || !is_act(op->act, x)) return false;
  for (int i = 0; i < op->n_parts; i++)
    if (!is_part(&op->parts[i], part_rows(op, i), x)) return false;
  if ((op->fused & PROGRAM_FUSE_NORM) && !is_vector(op->gain, x)) return false;
  shape->in[0] = (int32_t)x;
  const int n_epilogues = !!(op->fused & PROGRAM_FUSE_QKV) + !!(op->fused & PROGRAM_FUSE_SWIGLU) + !!(op->fused & PROGRAM_FUSE_ADD);
  if (n_epilogues > 1) return false;
  if ((op->fused & PROGRAM_FUSE_REDUCE) && (op->n_parts != 1 || (n_epilogues == 1 && !(op->fused & PROGRAM_FUSE_ADD)))) return false;
  if (op->fused & PROGRAM_FUSE_QKV) {
    shape->out[0] = (int32_t)q;
    return op->n_parts == 3 && part_rows(op, 0) == q && part_rows(op, 1) == kv && part_rows(op, 2) == kv && op->layer >= 0 &&
           (op->q_gain == NULL || is_vector(op->q_gain, D)) && (op->k_gain == NULL || is_vector(op->k_gain, D));
  }
  if (op->fused & PROGRAM_FUSE_SWIGLU) {
    shape->out[0] = (int32_t)part_rows(op, 0);
    return op->n_parts == 2 && part_rows(op, 0) == part_rows(op, 1);
  }
  if (op->fused & PROGRAM_FUSE_ADD) {
    shape->in[1] = shape->out[0] = (int32_t)part_rows(op, 0);
    return op->n_parts == 1;
  }
  for (int i = 0; i < op->n_parts; i++) shape->out[i] = (int32_t)part_rows(op, i);
  return true;
}

/* False when weights or flags do not fit the kind. x: width of in[0], or of out[0] where nothing is read. */
static bool op_shape(const struct program *p, const struct program_op *op, int64_t x, struct op_shape *shape)
{
  const int64_t D = p->dims.head_dim, q = p->dims.n_heads * D, kv = p->dims.n_kv_heads * D;
  *shape = (struct op_shape){{0}, {0}};
  switch (op->kind) {
  case PROGRAM_EMBED:
    shape->out[0] = p->dims.n_embd;
    return op->n_parts == 1 && is_part(&op->parts[0], p->dims.n_vocab / program_n_ranks(p), p->dims.n_embd);
  case PROGRAM_RMSNORM:
    shape->in[0] = shape->out[0] = (int32_t)x;
    return is_vector(op->gain, x);
  case PROGRAM_LINEAR: return linear_shape(p, op, x, shape);
  case PROGRAM_HEAD_NORM:
    shape->in[0] = shape->out[0] = (int32_t)x;
    return is_vector(op->gain, D) && x % D == 0;
  case PROGRAM_ROPE:
    shape->in[0] = shape->out[0] = (int32_t)x;
    if (op->fused & PROGRAM_FUSE_ROPE) {
      *shape = (struct op_shape){{(int32_t)q, (int32_t)kv, (int32_t)kv}, {(int32_t)q}};
      return op->layer >= 0 && (op->q_gain == NULL || is_vector(op->q_gain, D)) && (op->k_gain == NULL || is_vector(op->k_gain, D));
    }
    return x % D == 0;
  case PROGRAM_KV_APPEND:
    shape->in[0] = shape->in[1] = (int32_t)kv;
    return op->layer >= 0;
  case PROGRAM_ATTENTION:
    shape->in[0] = shape->out[0] = (int32_t)q;
    return op->layer >= 0;
  case PROGRAM_SWIGLU:
    shape->in[0] = shape->in[1] = shape->out[0] = (int32_t)x;
    return true;
  case PROGRAM_ADD:
    shape->in[0] = shape->in[1] = shape->out[0] = (int32_t)x;
    if (op->fused & PROGRAM_FUSE_ADD_NORM) shape->out[1] = (int32_t)x;
    return !(op->fused & PROGRAM_FUSE_ADD_NORM) || is_vector(op->gain, x);
  case PROGRAM_SELECT_ROWS: case PROGRAM_ALL_REDUCE:
    shape->in[0] = shape->out[0] = (int32_t)x;
    return true;
  case PROGRAM_ALL_GATHER:
    shape->in[0] = (int32_t)x;
    shape->out[0] = (int32_t)x * program_n_ranks(p);
    return true;
  case PROGRAM_OP_KINDS: break;
  }
  return false;
}

static bool may_be_in_place(const struct program_op *op)
{
  switch (op->kind) {
  case PROGRAM_HEAD_NORM: case PROGRAM_ROPE: case PROGRAM_SWIGLU: case PROGRAM_ADD: return true;
  default: return false;
  }
}

static bool check_operands(const struct program *p, const struct program_op *op, const struct op_shape *shape, bool *is_written)
{
  for (int i = 0; i < 3; i++) {
    const int32_t b = op->in[i];
    if ((shape->in[i] == 0) != (b == PROGRAM_NONE)) return false;
    if (b == PROGRAM_NONE) continue;
    if (b < 0 || b >= p->n_buffers || !is_written[b] || p->buffers[b].width != shape->in[i]) return false;
    if (i > 0 && p->buffers[b].is_rows != p->buffers[op->in[0]].is_rows) return false;
  }
  const bool is_rows = op->kind == PROGRAM_SELECT_ROWS || (op->in[0] != PROGRAM_NONE && p->buffers[op->in[0]].is_rows);
  for (int i = 0; i < 3; i++) {
    const int32_t b = op->out[i];
    if ((shape->out[i] == 0) != (b == PROGRAM_NONE)) return false;
    if (b == PROGRAM_NONE) continue;
    if (b < 0 || b >= p->n_buffers || p->buffers[b].width != shape->out[i] || p->buffers[b].is_rows != is_rows) return false;
    for (int j = 0; j < i; j++)
      if (op->out[j] == b) return false;
    for (int j = 0; j < 3; j++) {
      const bool is_residual = op->kind == PROGRAM_LINEAR && (op->fused & PROGRAM_FUSE_ADD) && i == 0 && j == 1;
      if (op->in[j] == b && !is_residual && !(may_be_in_place(op) && i == 0)) return false;
    }
    is_written[b] = true;
  }
  return true;
}

enum sits_status program_check(const struct program *p, struct sits_error *err)
{
  const struct program_dims *d = &p->dims;
  if (d->n_layers < 1 || d->n_embd < 1 || d->n_heads < 1 || d->n_kv_heads < 1 || d->head_dim < 1 || d->n_vocab < 1 ||
      d->n_heads % d->n_kv_heads != 0 || d->sliding_window < 0 || d->rank < 0 || (d->rank > 0 && d->rank >= d->n_ranks))
    return sits_fail(err, SITS_INVALID_ARGUMENT, "program: bad dimensions");
  if (p->rope.dims < 0 || p->rope.dims % 2 != 0 || p->rope.dims > d->head_dim || (p->rope.dims > 0 && p->rope.inv_freq == NULL))
    return sits_fail(err, SITS_INVALID_ARGUMENT, "program: bad rotary dimensions");
  bool *is_written = mem_calloc((size_t)p->n_buffers + 1, sizeof *is_written);
  if (is_written == NULL) return sits_fail(err, SITS_NOMEM, "program: out of memory");
  enum sits_status status = SITS_OK;
  for (int32_t i = 0; i < p->n_ops && status == SITS_OK; i++) {
    const struct program_op *op = &p->ops[i];
    const int32_t b = op->in[0] != PROGRAM_NONE ? op->in[0] : op->out[0];
    const int64_t x = b >= 0 && b < p->n_buffers ? p->buffers[b].width : 0;
    struct op_shape shape;
    if (op->kind < 0 || op->kind >= PROGRAM_OP_KINDS || op->layer < PROGRAM_NONE || op->layer >= d->n_layers ||
        !op_shape(p, op, x, &shape) || !check_operands(p, op, &shape, is_written))
      status = sits_fail(err, SITS_INVALID_ARGUMENT, "program: op %d (%s) is malformed", (int)i,
                         op->kind < PROGRAM_OP_KINDS ? op_names[op->kind] : "?");
  }
  if (status == SITS_OK && (p->logits < 0 || p->logits >= p->n_buffers || !is_written[p->logits] || !p->buffers[p->logits].is_rows ||
                            p->buffers[p->logits].width != d->n_vocab))
    status = sits_fail(err, SITS_INVALID_ARGUMENT, "program: no logits");
  mem_free(is_written);
  return status;
}

static void write_operands(const struct program *p, const int32_t operands[3], struct buf *out)
{
  for (int i = 0; i < 3 && operands[i] != PROGRAM_NONE; i++)
    buf_printf(out, "%s%s#%d", i == 0 ? "" : ",", p->buffers[operands[i]].name, (int)operands[i]);
}

bool program_write_plan(const struct program *p, struct buf *out)
{
  buf_printf(out, "program: %d ops, %d buffers; L=%d E=%d H=%d G=%d D=%d F=%d V=%d\n", (int)p->n_ops, (int)p->n_buffers,
             (int)p->dims.n_layers, (int)p->dims.n_embd, (int)p->dims.n_heads, (int)p->dims.n_kv_heads, (int)p->dims.head_dim,
             (int)p->dims.n_ff, (int)p->dims.n_vocab);
  for (size_t f = 0; f < sizeof fusion_names / sizeof *fusion_names; f++) {
    const struct program_choice *c = &p->choices[__builtin_ctz(fusion_names[f].bit)];
    if (c->n_possible == 0) continue;
    buf_printf(out, "fusion %-8s %d of %d taken", fusion_names[f].name, (int)c->n_taken, (int)c->n_possible);
    if (p->weighed_tokens > 0) buf_printf(out, ", saves about %.1f us of a step of %d tokens", c->saved_ns * 1e-3, (int)p->weighed_tokens);
    buf_append_char(out, '\n');
  }
  for (int32_t b = 0; b < p->n_buffers; b++)
    buf_printf(out, "buffer %s#%d [%c][%d]\n", p->buffers[b].name, (int)b, p->buffers[b].is_rows ? 'R' : 'T', (int)p->buffers[b].width);
  for (int32_t i = 0; i < p->n_ops; i++) {
    const struct program_op *op = &p->ops[i];
    if (op->layer == PROGRAM_NONE) buf_printf(out, "%4d        ", (int)i);
    else buf_printf(out, "%4d  L%-4d ", (int)i, (int)op->layer);
    buf_printf(out, "%-12s", op_names[op->kind]);
    write_operands(p, op->in, out);
    buf_append_text(out, " -> ");
    if (op->out[0] == PROGRAM_NONE) buf_append_text(out, "cache");
    write_operands(p, op->out, out);
    for (int k = 0; k < op->n_parts; k++) {
      const struct sits_utd *w = op->parts[k].weight;
      buf_printf(out, "  %s %s [%lld][%lld]%s", w->name, sits_dtype_info(w->dtype)->name, (long long)w->dims[0], (long long)w->dims[1],
                 op->parts[k].bias != NULL ? " +bias" : "");
    }
    if (op->act != NULL && op->act->kind != ACT_BACKEND) buf_printf(out, "  x in %s", act_kind_name(op->act->kind));
    if (op->act != NULL && op->act->rotation > 0) buf_printf(out, "  x rotated by %d", (int)op->act->rotation);
    if (op->act != NULL && op->act->n_outliers > 0) buf_printf(out, " but for %d channels", (int)op->act->n_outliers);
    for (size_t f = 0; f < sizeof fusion_names / sizeof *fusion_names; f++)
      if (op->fused & fusion_names[f].bit) buf_printf(out, " +%s", fusion_names[f].name);
    buf_append_char(out, '\n');
  }
  return !out->failed;
}
