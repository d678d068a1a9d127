/* A program becomes layers with packed weights, and every buffer a step can need is laid out for the largest step. Entry points:
 * cuda_compile, cuda_program_destroy.
 *
 * The backend offers the fusions GROUP, NORM, ROPE, QKV, SWIGLU and ADD, so a transformer layer arrives as five ops:
 *   LINEAR (NORM, QKV, ROPE) -> ATTENTION -> LINEAR (ADD) -> LINEAR (NORM, SWIGLU) -> LINEAR (ADD)
 * after EMBED and before SELECT_ROWS and the head's LINEAR (NORM). A rank's program
 * has REDUCE beside ADD, ALL_REDUCE after EMBED and ALL_GATHER after the head. Any other list is refused by name.
 */
#include <stdio.h>
#include <string.h>

#include "backend/cuda/cuda_comm.h"
#include "backend/cuda/cuda_internal.h"
#include "base/log.h"
#include "base/mem.h"

struct reader {
  struct backend_program *p;
  int32_t at;
  struct sits_error *err;
};

static enum sits_status expect(struct reader *r, enum program_op_kind kind, uint32_t fused, int32_t n_parts,
                               const struct program_op **out)
{
  const struct program *program = r->p->program;
  if (r->at >= program->n_ops)
    return sits_fail(r->err, SITS_UNSUPPORTED, "cuda: the program ends where a %s was expected", program_op_name(kind));
  const struct program_op *op = &program->ops[r->at++];
  const uint32_t ignored = PROGRAM_FUSE_GROUP;
  if (op->kind != kind || (op->fused & ~ignored) != fused || (n_parts >= 0 && op->n_parts != n_parts))
    return sits_fail(r->err, SITS_UNSUPPORTED, "cuda: op %d is a %s (fused %#x, %d parts), expected a %s (fused %#x)", r->at - 1,
                     program_op_name(op->kind), op->fused, op->n_parts, program_op_name(kind), fused);
  *out = op;
  return SITS_OK;
}

/* The weight made of these parts: the one that exists, or a new one. */
static struct cuda_weight *intern(struct backend_program *p, const struct program_op *op, bool is_interleaved)
{
  for (int32_t i = 0; i < p->n_weights; i++) {
    const struct cuda_weight *w = &p->weights[i];
    bool same = w->n_parts == op->n_parts && w->is_interleaved == is_interleaved;
    for (int32_t k = 0; same && k < op->n_parts; k++)
      same = w->parts[k].weight == op->parts[k].weight && w->parts[k].bias == op->parts[k].bias;
    if (same) return &p->weights[i];
  }
  struct cuda_weight *w = &p->weights[p->n_weights++];
  *w = (struct cuda_weight){.parts = op->parts, .n_parts = op->n_parts, .is_interleaved = is_interleaved};
  return w;
}

/* What the LINEARs after attention and SwiGLU have fused. */
static uint32_t joined(const struct backend_program *p)
{
  return PROGRAM_FUSE_ADD | (program_n_ranks(p->program) > 1 ? PROGRAM_FUSE_REDUCE : 0u);
}

static enum sits_status read_layer(struct reader *r, struct cuda_layer *layer)
{
  struct backend_program *p = r->p;
  const struct program_op *op;
  TRY(expect(r, PROGRAM_LINEAR, PROGRAM_FUSE_NORM | PROGRAM_FUSE_QKV | PROGRAM_FUSE_ROPE, 3, &op));
  layer->qkv = intern(p, op, false);
  TRY(cuda_act_plan(p, layer->qkv, op, r->err));
  TRY(cuda_vector_load(p->backend, p, op->gain, &layer->attn_gain, r->err));
  TRY(cuda_vector_load(p->backend, p, op->q_gain, &layer->q_gain, r->err));
  TRY(cuda_vector_load(p->backend, p, op->k_gain, &layer->k_gain, r->err));
  TRY(expect(r, PROGRAM_ATTENTION, 0, -1, &op));
  TRY(expect(r, PROGRAM_LINEAR, joined(p), 1, &op));
  layer->o = intern(p, op, false);
  TRY(cuda_act_plan(p, layer->o, op, r->err));
  TRY(expect(r, PROGRAM_LINEAR, PROGRAM_FUSE_NORM | PROGRAM_FUSE_SWIGLU, 2, &op));
  layer->gate_up = intern(p, op, true);
  TRY(cuda_act_plan(p, layer->gate_up, op, r->err));
  TRY(cuda_vector_load(p->backend, p, op->gain, &layer->ffn_gain, r->err));
  TRY(expect(r, PROGRAM_LINEAR, joined(p), 1, &op));
  layer->down = intern(p, op, false);
  TRY(cuda_act_plan(p, layer->down, op, r->err));
  const struct cuda_weight *no_bias[] = {layer->o, layer->gate_up, layer->down};
  for (size_t i = 0; i < 3; i++)
    for (int32_t k = 0; k < no_bias[i]->n_parts; k++)
      if (no_bias[i]->parts[k].bias != NULL)
        return sits_fail(r->err, SITS_UNSUPPORTED, "cuda: %s: bias not supported", no_bias[i]->parts[k].bias->name);
  return SITS_OK;
}

static enum sits_status read_program(struct backend_program *p, struct sits_error *err)
{
  struct reader r = {p, 0, err};
  const struct program_op *op;
  size_t n_linear = 1;
  for (int32_t i = 0; i < p->program->n_ops; i++) n_linear += p->program->ops[i].n_parts > 0;
  p->weights = mem_calloc(n_linear, sizeof *p->weights);
  p->layers = mem_calloc((size_t)p->program->dims.n_layers, sizeof *p->layers);
  if (p->weights == NULL || p->layers == NULL) return sits_fail(err, SITS_NOMEM, "cuda: out of memory");
  TRY(expect(&r, PROGRAM_EMBED, 0, 1, &op));
  p->embed = intern(p, op, false);
  if (program_n_ranks(p->program) > 1) TRY(expect(&r, PROGRAM_ALL_REDUCE, 0, -1, &op));
  for (int32_t l = 0; l < p->program->dims.n_layers; l++) TRY(read_layer(&r, &p->layers[l]));
  TRY(expect(&r, PROGRAM_SELECT_ROWS, 0, -1, &op));
  TRY(expect(&r, PROGRAM_LINEAR, PROGRAM_FUSE_NORM, 1, &op));
  p->head = intern(p, op, false);
  TRY(cuda_act_plan(p, p->head, op, err));
  if (op->parts[0].bias != NULL) return sits_fail(err, SITS_UNSUPPORTED, "cuda: %s: bias not supported", op->parts[0].bias->name);
  TRY(cuda_vector_load(p->backend, p, op->gain, &p->final_gain, err));
  if (program_n_ranks(p->program) > 1) TRY(expect(&r, PROGRAM_ALL_GATHER, 0, -1, &op));
  if (r.at != p->program->n_ops) return sits_fail(err, SITS_UNSUPPORTED, "cuda: op %d after the head", r.at);
  return SITS_OK;
}

static enum sits_status load_weights(struct backend_program *p, struct sits_error *err)
{
  for (int32_t i = 0; i < p->n_weights; i++) TRY(cuda_weight_plan(&p->weights[i], err));
  struct cuda_stage stage;
  enum sits_status status = cuda_stage_init(p->backend, &stage);
  if (status != SITS_OK) (void)sits_fail(err, status, "cuda: no pinned memory for the upload of weights");
  for (int32_t i = 0; i < p->n_weights && status == SITS_OK; i++)
    status = cuda_weight_load(p->backend, p, &p->weights[i], &stage, 77u * (uint32_t)i + 1u, err);
  cuda_stage_fini(p->backend, &stage);
  TRY(status);
  p->is_fast = p->backend->compute_major == 9;
  for (int32_t l = 0; l < p->program->dims.n_layers; l++) {
    const struct cuda_layer *layer = &p->layers[l];
    const struct cuda_weight *weights[] = {layer->qkv, layer->o, layer->gate_up, layer->down};
    for (size_t i = 0; i < 4; i++) p->is_fast = p->is_fast && weights[i]->form == CUDA_W4 && weights[i]->has_plain_input;
  }
  return SITS_OK;
}

static enum sits_status load_rope(struct backend_program *p, struct sits_error *err)
{
  const struct program_rope *rope = &p->program->rope;
  const size_t bytes = (size_t)(rope->dims / 2) * sizeof(float);
  float *inv_freq = cuda_memory_alloc(p->backend, p, bytes);
  if (inv_freq == NULL) return sits_fail(err, SITS_NOMEM, "cuda: out of device memory");
  p->rope = (struct k_rope){inv_freq, rope->magnitude, rope->dims, rope->style == PROGRAM_ROPE_INTERLEAVED};
  return CUDA_CALL(p->backend, cudaMemcpy(inv_freq, rope->inv_freq, bytes, cudaMemcpyHostToDevice));
}

bool cuda_make_inputs(struct backend_program *p, struct cuda_inputs *in, int32_t max_tokens, int32_t max_seqs)
{
  in->max_tokens = max_tokens;
  in->max_seqs = max_seqs;
  in->n_words = cuda_input_words(max_tokens, max_seqs);
  in->device = cuda_memory_alloc(p->backend, p, (size_t)in->n_words * sizeof(int32_t));
  if (in->device == NULL) return false;
  for (int32_t i = 0; i < CUDA_IN_FLIGHT; i++)
    if ((in->host[i] = cuda_pinned_alloc(p->backend, p, (size_t)in->n_words * sizeof(int32_t))) == NULL) return false;
  in->seq_start = in->device;
  in->kv_len = in->seq_start + max_seqs + 1;
  in->row_token = in->kv_len + max_seqs;
  in->offset = in->row_token + max_seqs;
  in->open_slot = in->offset + max_seqs;
  in->tokens = in->open_slot + 2 * max_seqs;
  in->positions = in->tokens + max_tokens;
  in->token_seq = in->positions + max_tokens;
  return true;
}

static size_t padded(int32_t cols) { return (size_t)k_blocks(cols) * K_GROUP; }
static size_t most(size_t a, size_t b) { return a > b ? a : b; }

struct activations { size_t h, act, scale, sum, qkv, attn, gate_up, slabs; };

static struct activations activations_of(const struct backend_program *p, int32_t max_tokens)
{
  const struct program_dims *d = &p->program->dims;
  const struct cuda_layer *layer = &p->layers[0];
  const size_t t = (size_t)max_tokens + 128, heads = (size_t)(d->n_heads * d->head_dim), ff = (size_t)layer->down->cols;
  const size_t widest = most(padded(d->n_embd), most(padded((int32_t)heads), padded((int32_t)ff)));
  const size_t scales = most(t, (size_t)(CUDA_GRAPH_TOKENS + 64) * (widest / K_GROUP)); /* per token, or per token and group */
  const size_t few = t < 384 ? t : 384; /* most tokens that are multiplied with split sums */
  return (struct activations){
      .h = t * (size_t)d->n_embd * sizeof(float), .act = t * widest * 2, .scale = scales * sizeof(float), .sum = t * sizeof(int32_t),
      .qkv = t * (size_t)layer->qkv->rows * 2, .attn = t * heads * 2, .gate_up = t * (size_t)layer->gate_up->rows * 2,
      /* f32 sums for the next norm, or split products */
      .slabs = most(t * (size_t)d->n_embd, few * 8 * most((size_t)d->n_embd, (size_t)layer->qkv->rows)) * sizeof(float)};
}

uint64_t cuda_activation_bytes(const struct backend_program *p, int32_t max_tokens)
{
  const struct activations a = activations_of(p, max_tokens);
  return a.h + a.act + 2 * a.scale + a.sum + a.qkv + a.attn + a.gate_up + a.slabs;
}

bool cuda_make_activations(struct backend_program *p)
{
  struct backend *b = p->backend;
  const struct activations a = activations_of(p, p->max_tokens);
  bool ok = (p->h = cuda_memory_alloc(b, p, a.h)) != NULL;
  ok = ok && (p->act = cuda_memory_alloc(b, p, a.act)) != NULL;
  ok = ok && (p->act_scale = cuda_memory_alloc(b, p, a.scale)) != NULL;
  ok = ok && (p->gate_up_scale = cuda_memory_alloc(b, p, a.scale)) != NULL;
  ok = ok && (p->act_sum = cuda_memory_alloc(b, p, a.sum)) != NULL;
  ok = ok && (p->qkv = cuda_memory_alloc(b, p, a.qkv)) != NULL;
  ok = ok && (p->attn = cuda_memory_alloc(b, p, a.attn)) != NULL;
  ok = ok && (p->gate_up = cuda_memory_alloc(b, p, a.gate_up)) != NULL;
  return ok && (p->slabs = cuda_memory_alloc(b, p, a.slabs)) != NULL;
}

static bool make_workspaces(struct backend_program *p)
{
  struct backend *b = p->backend;
  const struct program_dims *d = &p->program->dims;
  const size_t t = (size_t)p->max_tokens + 128, r = (size_t)p->max_rows, heads = (size_t)(d->n_heads * d->head_dim),
               ff = (size_t)p->layers[0].down->cols;
  static const int32_t m[3] = {1, 8, 16};
  bool ok = true;
  for (int i = 0; i < 3; i++) {
    ok = ok && (p->frag_e[i] = cuda_memory_alloc(b, p, padded(d->n_embd) * (size_t)m[i] * 2)) != NULL;
    ok = ok && (p->frag_a[i] = cuda_memory_alloc(b, p, padded((int32_t)heads) * (size_t)m[i] * 2)) != NULL;
    ok = ok && (p->frag_f[i] = cuda_memory_alloc(b, p, padded((int32_t)ff) * (size_t)m[i] * 2)) != NULL;
    ok = ok && (p->ssq[i] = cuda_memory_alloc(b, p, (size_t)k_w4a16_ssq_parts(d->n_embd) * (size_t)m[i] * sizeof(float))) != NULL;
  }
  size_t expanded = 0;
  for (int32_t i = 0; i < p->n_weights; i++) {
    const struct cuda_weight *w = &p->weights[i];
    if (w->form == CUDA_W4 && (w != p->embed || w == p->head))
      expanded = most(expanded, (size_t)w->rows * padded(w->cols) * (cuda_is_wide_e4m3(p, w) ? 1 : 2));
  }
  ok = ok && cuda_make_activations(p) && (p->q = cuda_memory_alloc(b, p, t * heads * 2)) != NULL;
  ok = ok && (p->expanded = cuda_memory_alloc(b, p, expanded)) != NULL;
  ok = ok && (p->logits = cuda_memory_alloc(b, p, (size_t)cuda_lt_rows(p->max_rows) * (size_t)d->n_vocab * sizeof(float))) != NULL;
  ok = ok && (p->host_logits = cuda_pinned_alloc(b, p, r * (size_t)d->n_vocab * sizeof(float))) != NULL;
  ok = ok && (p->table = cuda_memory_alloc(b, p, r * (size_t)p->max_pages * sizeof(int32_t))) != NULL;
  ok = ok && (p->sample_rows = cuda_memory_alloc(b, p, r * sizeof *p->sample_rows)) != NULL;
  ok = ok && (p->sampled = cuda_memory_alloc(b, p, r * sizeof(int32_t))) != NULL;
  ok = ok && (p->attn_workspace = cuda_memory_alloc(b, p, k_attn_decode_workspace_bytes(b->n_sm, d->head_dim))) != NULL;
  ok = ok && (p->prefill_workspace = cuda_memory_alloc(b, p, k_attn_prefill_workspace_bytes(b->n_sm, d->head_dim))) != NULL;
  ok = ok && (p->attn_counters = cuda_memory_alloc(b, p, r * (size_t)d->n_kv_heads * sizeof(int32_t))) != NULL;
  ok = ok && (p->attn_cut = cuda_memory_alloc(b, p, k_attn_cut_bytes(b->n_sm))) != NULL;
  const int32_t seqs = p->max_rows, graph = seqs < CUDA_GRAPH_TOKENS ? seqs : CUDA_GRAPH_TOKENS;
  return ok && cuda_make_inputs(p, &p->general, p->max_tokens, seqs) && cuda_make_inputs(p, &p->decode, graph, graph);
}

enum sits_status cuda_make_slots(struct backend_program *p, struct sits_error *err)
{
  struct backend *b = p->backend;
  const size_t r = (size_t)p->max_rows;
  for (int32_t i = 0; i < CUDA_IN_FLIGHT; i++) {
    struct cuda_slot *slot = &p->slots[i];
    slot->host_table = cuda_pinned_alloc(b, p, r * (size_t)p->max_pages * sizeof(int32_t));
    slot->host_sample_rows = cuda_pinned_alloc(b, p, r * sizeof *slot->host_sample_rows);
    slot->host_sampled = cuda_pinned_alloc(b, p, r * sizeof(int32_t));
    if (slot->host_table == NULL || slot->host_sample_rows == NULL || slot->host_sampled == NULL)
      return sits_fail(err, SITS_NOMEM, "cuda: out of pinned memory");
    TRY(CUDA_CALL(b, cudaEventCreate(&slot->started)));
    TRY(CUDA_CALL(b, cudaEventCreate(&slot->done)));
  }
  return SITS_OK;
}

/* What no kernel takes is refused here, for a launch that is refused later ends the backend. */
static enum sits_status check_dims(const struct program *program, struct sits_error *err)
{
  const struct program_dims *d = &program->dims;
  const int32_t n_ff = d->n_ff / program_n_ranks(program);
  if (d->n_embd % 8 || d->head_dim % 4 || (d->n_heads * d->head_dim) % 8 || d->head_dim > 256 || d->n_heads % d->n_kv_heads)
    return sits_fail(err, SITS_UNSUPPORTED, "cuda: width %d, heads %d of %d, head size %d are not supported", d->n_embd, d->n_heads,
                     d->n_kv_heads, d->head_dim);
  if (d->n_embd > K_MAX_NORM_WIDTH || n_ff > K_MAX_CONVERT_WIDTH || d->n_heads * d->head_dim > K_MAX_CONVERT_WIDTH)
    return sits_fail(err, SITS_UNSUPPORTED, "cuda: width %d (at most %d), feed-forward %d or heads %d x %d (at most %d) not supported",
                     d->n_embd, K_MAX_NORM_WIDTH, n_ff, d->n_heads, d->head_dim, K_MAX_CONVERT_WIDTH);
  return program_check(program, err);
}

/* Which activations a file's 4-bit products of many tokens get depends on its scales and sites: said once. */
static void log_forms(const struct backend_program *p)
{
  int32_t n_token = 0, n_wide = 0, n_group = 0, n_four = 0;
  for (int32_t i = 0; i < 4 * p->program->dims.n_layers; i++) {
    const struct cuda_layer *layer = &p->layers[i / 4];
    const struct cuda_weight *const weights[] = {layer->qkv, layer->o, layer->gate_up, layer->down}, *w = weights[i % 4];
    const enum k_act_form form = cuda_act_form(p, w, CUDA_FAST_TOKENS + 1).form;
    n_four += w->form == CUDA_W4;
    n_token += form == K_ACT_TILE_S8;
    n_group += form == K_ACT_GROUP_S8;
    n_wide += cuda_is_wide_e4m3(p, w);
  }
  log_info("cuda", "4-bit products of many tokens: %d with 8 bits a token (%d of them beyond 256 tokens too), %d with 8 bits a token and "
           "group up to 256 tokens, %d with 16 bits", n_token, n_wide, n_group, n_four - n_token - n_group);
}

enum sits_status cuda_compile(struct backend *backend, const struct program *program, struct backend_program **out,
                              struct sits_error *err)
{
  if (backend->is_failed) return sits_fail(err, SITS_DEVICE, "cuda: the device has failed");
  cuda_enter(backend);
  struct backend_program *p = mem_calloc(1, sizeof *p);
  if (p == NULL) return sits_fail(err, SITS_NOMEM, "cuda: out of memory");
  p->backend = backend;
  p->program = program;
  p->max_tokens = backend->options.max_batch_tokens;
  p->max_rows = backend->options.max_seqs;
  p->max_pages = (program->dims.max_context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS + 1;
  p->lt_plans = mem_calloc(1, sizeof *p->lt_plans);
  enum sits_status status = p->lt_plans != NULL ? check_dims(program, err) : sits_fail(err, SITS_NOMEM, "cuda: out of memory");
  if (status == SITS_OK) status = read_program(p, err);
  if (status == SITS_OK) status = load_weights(p, err);
  if (status == SITS_OK) status = load_rope(p, err);
  if (status == SITS_OK) {
    p->act_scale = backend->lt_workspace; /* any device address, for the probe only */
    cuda_gemm_probe(p);
  }
  if (status == SITS_OK && !make_workspaces(p))
    status =
        sits_fail(err, SITS_NOMEM, "cuda: workspaces for %d tokens and %d sequences do not fit the device", p->max_tokens, p->max_rows);
  if (status == SITS_OK) status = cuda_make_slots(p, err);
  if (status == SITS_OK) log_forms(p);
  if (status == SITS_OK) status = cuda_resident_load(p, err);
  if (status == SITS_OK) status = cuda_gemm_warm(p);
  if (status == SITS_OK) status = CUDA_CALL(backend, cudaStreamSynchronize(backend->stream));
  if (status == SITS_OK) status = cuda_comm_open(p, err);
  if (status != SITS_OK) {
    if (status == SITS_DEVICE && err != NULL && err->text[0] == '\0') (void)sits_fail(err, SITS_DEVICE, "cuda: the device has failed");
    cuda_program_destroy(p);
    return status;
  }
  p->n_bytes = cuda_memory_of(backend, p);
  *out = p;
  return SITS_OK;
}

void cuda_program_destroy(struct backend_program *p)
{
  if (p == NULL) return;
  cuda_enter(p->backend);
  (void)cudaStreamSynchronize(p->backend->stream);
  cuda_graph_clear(p);
  cuda_comm_close(p);
  if (p->lane == NULL) cuda_gemm_fini(p);
  cuda_lane_fini(p);
  for (int32_t i = 0; i < CUDA_IN_FLIGHT; i++) {
    if (p->slots[i].started) (void)cudaEventDestroy(p->slots[i].started);
    if (p->slots[i].done) (void)cudaEventDestroy(p->slots[i].done);
  }
  cuda_memory_free_owner(p->backend, p);
  if (p->lane == NULL) {
    mem_free(p->lt_plans);
    mem_free(p->weights);
    mem_free(p->layers);
  }
  mem_free(p->lane);
  mem_free(p);
}
