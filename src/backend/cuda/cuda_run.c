/* The launches of one step, in the order of the paper. Entry point: cuda_run.
 *
 * Fast path, T <= 16, five launches a layer; residual sums, norms and SwiGLU live in the GEMMs' epilogues:
 *   qkv (1/rms) -> attention (rotation, append, softmax) -> o (+ residual, gain) -> gate_up (1/rms, SwiGLU) -> down (+ residual, gain)
 * General path: norm -> qkv -> [bias] -> attention -> convert -> o -> norm -> gate_up -> convert -> down; o and down add to the residual
 * stream (the library's products) or leave sums that the next norm adds.
 */
#include "backend/cuda/cuda_comm.h"
#include "backend/cuda/cuda_internal.h"

#define LAUNCH(call) TRY(CUDA_CALL(p->backend, call))

static struct k_kv_view view_of(const struct backend_program *p, const struct backend_kv *kv, const struct cuda_step *step, int32_t layer)
{
  const struct program_dims *d = &p->program->dims;
  const struct cuda_inputs *in = step->in;
  return (struct k_kv_view){.pool = kv->pool,
                            .page_bytes = kv->page_bytes,
                            .codec = kv->codec,
                            .layer = layer,
                            .n_layers = d->n_layers,
                            .n_heads = d->n_heads,
                            .n_kv_heads = d->n_kv_heads,
                            .head_dim = d->head_dim,
                            .window = d->sliding_window,
                            .n_tokens = step->n_tokens,
                            .n_seqs = step->n_seqs,
                            .seq_start = in->seq_start,
                            .kv_len = in->kv_len,
                            .positions = in->positions,
                            .token_seq = in->token_seq,
                            .block_table = p->table,
                            .table_stride = p->max_pages,
                            .open = kv->open_keys,
                            .open_slot = in->open_slot,
                            .fresh = kv->fresh};
}

bool cuda_has_fast_decode(const struct backend_program *p, const struct backend_kv *kv)
{
  const struct program_dims *d = &p->program->dims;
  return p->backend->compute_major == 9 && k_attn_decode_takes(kv->codec, d->head_dim, d->n_heads, d->n_kv_heads);
}

/* q: rotated queries, the tokens being appended already; NULL: everything from qkv in one kernel, the one for few sequences if is_few. */
static enum sits_status decode_attention(struct backend_program *p, const struct k_kv_view *view, const struct cuda_layer *layer,
                                         const void *q, const struct k_projections *qkv, bool is_few, int32_t frag_m, void *out,
                                         struct k_stream at)
{
  const struct k_attn_decode a = {.kv = *view,
                                  .rope = p->rope,
                                  .q = q,
                                  .qkv = *qkv,
                                  .q_gain = layer->q_gain,
                                  .k_gain = layer->k_gain,
                                  .eps = p->program->dims.rms_eps,
                                  .out = out,
                                  .frag_m = frag_m,
                                  .cut = p->attn_cut,
                                  .workspace = p->attn_workspace,
                                  .counters = p->attn_counters};
  return CUDA_CALL(p->backend, is_few ? sits_k_attn_few(&a, p->backend->n_sm, at) : sits_k_attn_decode(&a, p->backend->n_sm, at));
}

/* Sequences s0 .. return value - 1 fit the gather memory together; their offsets go to `offset` (may be NULL). */
int32_t cuda_gather_chunk(const struct backend_batch *b, const struct backend_kv *kv, int32_t s0, bool has_fast_decode, int32_t *offset)
{
  int64_t used = 0;
  int32_t s = s0;
  for (; s < b->n_seqs; s++) {
    const int64_t rows = cuda_is_gathered(b, s, has_fast_decode) ? cuda_gather_rows(b->kv_len[s]) : 0;
    if (used + rows > kv->gather_tokens && s > s0) break;
    if (offset != NULL) offset[s] = (int32_t)used;
    used += rows;
  }
  return s;
}

/* Where some sequences' expanded keys and values go. */
struct expanded { void *k, *v, *exact; int64_t capacity, exact_capacity; const int32_t *offset; int32_t first_page; };

/* Sequences s0 .. s1 - 1: expand their pages, attend. */
static enum sits_status attend_range(struct backend_program *p, const struct cuda_step *step, const struct k_kv_view *view, int32_t s0,
                                     int32_t s1, const struct expanded *to, bool has_fast_decode, struct k_stream at)
{
  const struct backend_batch *b = step->batch;
  const bool is_hopper = p->backend->compute_major == 9;
  int32_t max_pages = 0, max_new = 0, max_keys = 0;
  while (s0 < s1 && !cuda_is_gathered(b, s0, has_fast_decode)) s0++; /* what lies between may be single tokens: the kernels skip those */
  while (s0 < s1 && !cuda_is_gathered(b, s1 - 1, has_fast_decode)) s1--;
  for (int32_t s = s0; s < s1; s++) {
    if (!cuda_is_gathered(b, s, has_fast_decode)) continue;
    const int32_t pages = (b->kv_len[s] + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS - to->first_page, n = b->seq_start[s + 1] - b->seq_start[s];
    if (pages > max_pages) max_pages = pages;
    if (n > max_new) max_new = n;
    if (b->kv_len[s] > max_keys) max_keys = b->kv_len[s];
  }
  if (max_new == 0) return SITS_OK;
  const struct k_kv_gather gather = {.kv = *view,
                                     .seq0 = s0,
                                     .n_seqs = s1 - s0,
                                     .offset = to->offset,
                                     .first_page = to->first_page,
                                     .max_pages = max_pages,
                                     .capacity = to->capacity,
                                     .k = to->k,
                                     .v = to->v,
                                     .skip_single = has_fast_decode,
                                     .is_tiled = is_hopper,
                                     .exact = to->exact,
                                     .exact_capacity = to->exact_capacity};
  const struct k_attn_prefill attend = {.kv = *view,
                                        .q = p->q,
                                        .k = to->k,
                                        .v = to->v,
                                        .capacity = to->capacity,
                                        .offset = to->offset,
                                        .seq0 = s0,
                                        .n_seqs = s1 - s0,
                                        .max_new = max_new,
                                        .out = p->attn,
                                        .skip_single = has_fast_decode,
                                        .max_keys = max_keys,
                                        .workspace = p->prefill_workspace,
                                        .exact = to->exact,
                                        .exact_capacity = to->exact_capacity};
  LAUNCH(sits_k_kv_gather(&gather, at));
  LAUNCH(is_hopper ? sits_k_attn_prefill_sm90(&attend, p->backend->n_sm, at) : sits_k_attn_prefill(&attend, at));
  return SITS_OK;
}

static enum sits_status gathered_attention(struct backend_program *p, struct backend_kv *kv, const struct cuda_step *step,
                                           const struct k_kv_view *view, bool has_fast_decode, struct k_stream at)
{
  const struct backend_batch *b = step->batch;
  const struct expanded scratch = {kv->gather_k, kv->gather_v, kv->exact, kv->gather_tokens, kv->exact_capacity, step->in->offset, 0};
  for (int32_t s0 = 0, s1; s0 < b->n_seqs; s0 = s1) {
    s1 = cuda_gather_chunk(b, kv, s0, has_fast_decode, NULL);
    const int32_t kept = step->kept_seq >= s0 && step->kept_seq < s1 ? step->kept_seq : s1; /* the kept one parts the range */
    TRY(attend_range(p, step, view, s0, kept, &scratch, has_fast_decode, at));
    if (kept == s1) continue;
    const size_t layer = (size_t)view->layer * (size_t)view->n_kv_heads * (size_t)kv->kept.capacity * (size_t)view->head_dim * 2;
    const struct expanded memory = {(uint8_t *)kv->kept.k + layer, (uint8_t *)kv->kept.v + layer, kv->exact, kv->kept.capacity,
                                    kv->exact_capacity, NULL, step->kept_page};
    TRY(attend_range(p, step, view, kept, kept + 1, &memory, has_fast_decode, at));
    TRY(attend_range(p, step, view, kept + 1, s1, &scratch, has_fast_decode, at));
  }
  return SITS_OK;
}

static bool has_single(const struct cuda_step *step)
{
  if (step->is_decode) return true;
  for (int32_t s = 0; s < step->batch->n_seqs; s++)
    if (step->batch->seq_start[s + 1] - step->batch->seq_start[s] == 1) return true;
  return false;
}

static bool has_fast_sparse(const struct backend_program *p)
{
  const struct program_dims *d = &p->program->dims;
  return p->backend->compute_major == 9 && k_attn_sparse_takes(d->head_dim, d->n_heads, d->n_kv_heads);
}

static enum sits_status sparse_attention(struct backend_program *p, const struct backend_kv *kv, const struct k_kv_view *view,
                                         int32_t frag_m, void *out, struct k_stream at)
{
  const struct k_attn_sparse a = {.kv = *view,
                                  .blocks = cuda_sparse_blocks(kv),
                                  .q = p->q,
                                  .out = out,
                                  .frag_m = frag_m,
                                  .workspace = kv->sparse.workspace,
                                  .max_entries = kv->sparse.max_entries};
  return CUDA_CALL(p->backend, sits_k_attn_sparse(&a, p->backend->n_sm, at));
}

/* p->qkv (or n_slabs sums in p->slabs) -> rows in p->attn, or fragments in frag_a when frag_m > 0. */
static enum sits_status attention(struct backend_program *p, struct backend_kv *kv, const struct cuda_step *step, int32_t l,
                                  int32_t n_slabs, int32_t frag_m, void *frag, struct k_stream at)
{
  const struct cuda_layer *layer = &p->layers[l];
  const struct k_kv_view view = view_of(p, kv, step, l);
  const bool has_fast_decode = cuda_has_fast_decode(p, kv);
  const struct k_projections qkv = {.rows = n_slabs > 0 ? NULL : p->qkv,
                                    .slabs = p->slabs,
                                    .bias = layer->qkv->bias,
                                    .n_slabs = n_slabs,
                                    .slab_stride = (int64_t)step->n_tokens * layer->qkv->rows};
  if (step->is_decode && has_fast_decode && !step->is_sparse)
    return decode_attention(p, &view, layer, NULL, &qkv, step->is_few, frag_m, frag_m ? frag : p->attn, at);
  const struct k_rope_append append = {.kv = view,
                                       .rope = p->rope,
                                       .qkv = qkv,
                                       .q_gain = layer->q_gain,
                                       .k_gain = layer->k_gain,
                                       .eps = p->program->dims.rms_eps,
                                       .q = p->q,
                                       .is_single = step->is_decode && kv->open == NULL};
  LAUNCH(sits_k_rope_append(&append, at));
  if (kv->open != NULL) LAUNCH(sits_k_kv_fold(&view, at));
  if (step->is_sparse && has_fast_sparse(p)) return sparse_attention(p, kv, &view, frag_m, frag_m ? frag : p->attn, at);
  if (k_attn_prefill_takes(view.head_dim) && !step->is_sparse) {
    TRY(gathered_attention(p, kv, step, &view, has_fast_decode, at));
    if (has_fast_decode && has_single(step)) TRY(decode_attention(p, &view, layer, p->q, &qkv, false, 0, p->attn, at));
  } else {
    const struct k_attn_any any = {view, p->q, p->attn, step->is_sparse ? cuda_sparse_blocks(kv) : (struct k_kv_blocks){0}};
    LAUNCH(sits_k_attn_any(&any, at));
  }
  if (frag_m == 0) return SITS_OK;
  const int32_t width = view.n_heads * view.head_dim;
  const struct k_convert convert = {K_SRC_F16, p->attn, width, step->n_tokens, width, {K_ACT_FRAG_F16, frag, NULL, frag_m}};
  LAUNCH(sits_k_convert(&convert, at));
  return SITS_OK;
}

static enum sits_status embed(struct backend_program *p, const struct cuda_step *step, int32_t frag_i, int32_t frag_m, struct k_stream at)
{
  const struct program_dims *d = &p->program->dims;
  struct k_embed a = {.tokens = step->in->tokens,
                      .drawn = p->sampled,
                      .table = p->embed->data,
                      .is_packed = p->embed->form == CUDA_W4,
                      .format = p->embed->format,
                      .n_tokens = step->n_tokens,
                      .width = d->n_embd,
                      .ld = k_blocks(d->n_embd) * K_GROUP,
                      .n_vocab = d->n_vocab,
                      .h = p->h};
  if (p->comm != NULL) { /* a rank's rows; the sum over ranks becomes h */
    a.n_rows = p->embed->rows, a.first = d->rank * a.n_rows, a.h = p->slabs;
  } else if (frag_m > 0) {
    a.frag_m = frag_m, a.next = p->frag_e[frag_i], a.gain = p->layers[0].attn_gain;
    a.ssq = p->ssq[frag_i], a.n_ssq = k_w4a16_ssq_parts(d->n_embd);
  }
  LAUNCH(sits_k_embed(&a, at));
  return SITS_OK;
}

/* Where the head writes; gathered into p->logits where it has only a rank's rows. */
static float *head_logits(const struct backend_program *p) { return p->comm != NULL ? p->comm->local_logits : p->logits; }

static enum sits_status head(struct backend_program *p, const struct cuda_step *step, int32_t n_slabs, struct k_stream at)
{
  const struct program_dims *d = &p->program->dims;
  if (p->comm != NULL && n_slabs != 0) {
    TRY(cuda_comm_reduce(p, step->n_tokens, n_slabs, p->final_gain, NULL, at));
    n_slabs = 0;
  }
  const struct k_act x = cuda_act_form(p, p->head, step->n_rows);
  const struct k_norm norm = {p->h,
                              p->slabs,
                              n_slabs,
                              (int64_t)step->n_tokens * d->n_embd,
                              p->final_gain,
                              d->rms_eps,
                              step->n_rows,
                              d->n_embd,
                              step->in->row_token,
                              x};
  LAUNCH(sits_k_norm(&norm, at));
  return cuda_gemm(p, p->head, step->n_rows, &x, CUDA_GEMM_F32, head_logits(p), NULL, NULL, at);
}

/* One GEMM of the fast path; the caller sets output, y, ld, next, gain. */
static struct k_w4a16 fast_gemm(const struct cuda_weight *w, int32_t n_tokens, const void *x)
{
  return (struct k_w4a16){
      .weight = w->data, .format = w->format, .rows = w->rows, .cols = w->cols, .n_tokens = n_tokens, .x = x, .bias = w->bias};
}

static void with_norm(struct k_w4a16 *a, const struct backend_program *p, int32_t i)
{
  a->x_ssq = p->ssq[i];
  a->x_n_ssq = k_w4a16_ssq_parts(p->program->dims.n_embd);
  a->x_width = (float)p->program->dims.n_embd;
  a->eps = p->program->dims.rms_eps;
}

static void with_residual(struct k_w4a16 *a, const struct backend_program *p, int32_t i, const float *gain)
{
  a->output = K_OUT_RESIDUAL, a->y = p->h, a->ld = p->program->dims.n_embd;
  a->next = p->frag_e[i], a->gain = gain, a->ssq = p->ssq[i];
}

/* o and down of the fast path: their sums join the residual stream, and the next norm's fragments follow. */
static enum sits_status join(struct backend_program *p, struct k_w4a16 *a, int32_t i, const float *gain, struct k_stream at)
{
  const int32_t n = a->n_tokens, m = k_w4a16_tokens(n);
  if (p->comm == NULL)
    with_residual(a, p, i, gain);
  else
    a->output = K_OUT_F32, a->y = p->slabs, a->ld = a->rows;
  LAUNCH(sits_k_w4a16(a, p->backend->n_sm, at));
  if (p->comm == NULL) return SITS_OK;
  const struct k_act next = {.form = K_ACT_FRAG_F16, .data = p->frag_e[i], .tile = m};
  return cuda_comm_reduce(p, n, 1, gain, &next, at);
}

static enum sits_status run_fast(struct backend_program *p, struct backend_kv *kv, const struct cuda_step *step, struct k_stream at)
{
  const int32_t n = step->n_tokens, m = k_w4a16_tokens(n),
                i = m == 1   ? 0
                    : m == 8 ? 1
                             : 2,
                n_layers = p->program->dims.n_layers, n_sm = p->backend->n_sm;
  const bool is_normed = p->comm != NULL; /* by the all-reduces, the embedding's too */
  const struct k_act normed = {.form = K_ACT_FRAG_F16, .data = p->frag_e[i], .tile = m};
  TRY(embed(p, step, i, m, at));
  if (is_normed) TRY(cuda_comm_reduce(p, n, COMM_EMBED, p->layers[0].attn_gain, &normed, at));
  for (int32_t l = 0; l < n_layers; l++) {
    const struct cuda_layer *layer = &p->layers[l];
    struct k_w4a16 qkv = fast_gemm(layer->qkv, n, p->frag_e[i]), o = fast_gemm(layer->o, n, p->frag_a[i]),
                   gate_up = fast_gemm(layer->gate_up, n, p->frag_e[i]), down = fast_gemm(layer->down, n, p->frag_f[i]);
    if (!is_normed) with_norm(&qkv, p, i);
    qkv.output = K_OUT_F16, qkv.y = p->qkv, qkv.ld = layer->qkv->rows;
    if (!is_normed) with_norm(&gate_up, p, i);
    gate_up.output = K_OUT_SWIGLU, gate_up.next = p->frag_f[i];
    LAUNCH(sits_k_w4a16(&qkv, n_sm, at));
    TRY(attention(p, kv, step, l, 0, m, p->frag_a[i], at));
    TRY(join(p, &o, i, layer->ffn_gain, at));
    LAUNCH(sits_k_w4a16(&gate_up, n_sm, at));
    TRY(join(p, &down, i, l + 1 < n_layers ? p->layers[l + 1].attn_gain : p->final_gain, at));
  }
  if (step->n_rows == 0) return SITS_OK;
  if (!step->is_decode || p->head->form != CUDA_W4 || !p->head->has_plain_input) return head(p, step, 0, at);
  struct k_w4a16 logits = fast_gemm(p->head, n, p->frag_e[i]);
  if (p->comm == NULL) with_norm(&logits, p, i);
  logits.output = K_OUT_F32, logits.y = head_logits(p), logits.ld = p->head->rows;
  LAUNCH(sits_k_w4a16(&logits, n_sm, at));
  return SITS_OK;
}

static enum sits_status norm(struct backend_program *p, const struct cuda_step *step, int32_t n_slabs, const float *gain,
                             const struct k_act *x, struct k_stream at)
{
  const struct program_dims *d = &p->program->dims;
  if (p->comm != NULL && n_slabs != 0) return cuda_comm_reduce(p, step->n_tokens, n_slabs, gain, x, at);
  const struct k_norm a = {p->h,      p->slabs, n_slabs, (int64_t)step->n_tokens * d->n_embd, gain, d->rms_eps, step->n_tokens,
                           d->n_embd, NULL,     *x};
  LAUNCH(sits_k_norm(&a, at));
  return SITS_OK;
}

/* o and down of the general path: added to the residual stream, or sums for the next norm, or a rank's share of them. */
static enum sits_status multiply_joined(struct backend_program *p, const struct cuda_weight *w, int32_t n, const struct k_act *x,
                                        int32_t *n_slabs, struct k_stream at)
{
  if (!cuda_gemm_adds(x)) return cuda_gemm(p, w, n, x, CUDA_GEMM_SLABS, NULL, n_slabs, NULL, at);
  if (p->comm == NULL) {
    *n_slabs = 0;
    return cuda_gemm(p, w, n, x, CUDA_GEMM_ADD, p->h, NULL, NULL, at);
  }
  *n_slabs = COMM_HALF;
  return cuda_gemm(p, w, n, x, CUDA_GEMM_F16, p->comm->half, NULL, NULL, at);
}

/* qkv for attention: f16 rows, or sums (span->n_slabs of them). */
static enum sits_status run_qkv(struct backend_program *p, const struct cuda_step *step, const struct cuda_layer *layer,
                                struct cuda_span *span, struct k_stream at)
{
  const int32_t n = step->n_tokens;
  const struct k_act x = cuda_act_form(p, layer->qkv, n);
  const bool is_split = x.form == K_ACT_TILE_S8 || x.form == K_ACT_GROUP_S8;
  int32_t n_slabs = 0;
  TRY(norm(p, step, span->n_slabs, layer->attn_gain, &x, at));
  TRY(cuda_gemm(p, layer->qkv, n, &x, is_split ? CUDA_GEMM_SLABS : CUDA_GEMM_F16, p->qkv, &n_slabs, NULL, at));
  span->n_slabs = is_split ? n_slabs : 0;
  return SITS_OK;
}

static enum sits_status run_swiglu(struct backend_program *p, const struct cuda_step *step, const struct cuda_layer *layer,
                                   struct cuda_span *span, struct k_stream at)
{
  const struct program_dims *d = &p->program->dims;
  const int32_t n = step->n_tokens, heads = d->n_heads * d->head_dim;
  struct k_act x = cuda_act_form(p, layer->o, n);
  if (x.form == K_ACT_ROW_F16 && layer->o->has_plain_input && heads % K_GROUP == 0)
    x.data = p->attn;
  else {
    const struct k_convert convert = {K_SRC_F16, p->attn, heads, n, heads, x};
    LAUNCH(sits_k_convert(&convert, at));
  }
  TRY(multiply_joined(p, layer->o, n, &x, &span->n_slabs, at));
  x = cuda_act_form(p, layer->gate_up, n);
  TRY(norm(p, step, span->n_slabs, layer->ffn_gain, &x, at));
  return cuda_gemm_swiglu(p, layer->gate_up, layer->down, n, &x, &span->products, at);
}

static enum sits_status run_general(struct backend_program *p, struct backend_kv *kv, const struct cuda_step *step, struct k_stream at)
{
  const int32_t n_parts = p->program->dims.n_layers * CUDA_LAYER_PARTS;
  struct cuda_span all = {.to = n_parts, .n_slabs = p->comm != NULL ? COMM_EMBED : 0};
  struct cuda_span *span = step->span != NULL ? step->span : &all;
  if (span->from == 0) TRY(embed(p, step, 0, 0, at));
  for (int32_t i = span->from; i < span->to; i++) {
    const struct cuda_layer *layer = &p->layers[i / CUDA_LAYER_PARTS];
    switch ((enum cuda_part)(i % CUDA_LAYER_PARTS)) {
      case PART_QKV: TRY(run_qkv(p, step, layer, span, at)); break;
      case PART_ATTEND: TRY(attention(p, kv, step, i / CUDA_LAYER_PARTS, span->n_slabs, 0, NULL, at)); break;
      case PART_SWIGLU: TRY(run_swiglu(p, step, layer, span, at)); break;
      default: TRY(multiply_joined(p, layer->down, step->n_tokens, &span->products, &span->n_slabs, at)); break;
    }
  }
  return span->to == n_parts && step->n_rows > 0 ? head(p, step, span->n_slabs, at) : SITS_OK;
}

enum sits_status cuda_run(struct backend_program *p, struct backend_kv *kv, const struct cuda_step *step, struct k_stream at)
{
  if (p->comm != NULL && p->comm->is_shared) at.pdl = false;
  if (!step->is_few && !step->is_sparse && cuda_has_fast_decode(p, kv) && has_single(step)) {
    const struct k_kv_view view = view_of(p, kv, step, 0);
    LAUNCH(sits_k_attn_cut(&view, p->attn_cut, p->backend->n_sm, at));
  }
  if (p->is_fast && step->n_tokens <= CUDA_FAST_TOKENS)
    TRY(run_fast(p, kv, step, at));
  else
    TRY(run_general(p, kv, step, at));
  if (step->span != NULL && step->span->to < p->program->dims.n_layers * CUDA_LAYER_PARTS) return SITS_OK;
  /* Older keys than a query's own group are those of pages. */
  if (kv->open != NULL && step->is_decode && !step->is_sparse && cuda_has_fast_decode(p, kv)) {
    const struct k_kv_view view = view_of(p, kv, step, 0);
    LAUNCH(sits_k_kv_close(&view, p->backend->n_sm, at));
  }
  if (p->comm != NULL && step->n_rows > 0) TRY(cuda_comm_gather(p, step->n_rows, at));
  if (!step->is_sampled || step->n_rows == 0) return SITS_OK;
  const int32_t vocab = p->program->dims.n_vocab;
  const struct k_sample sample = {p->logits, step->n_rows, vocab, vocab, p->sample_rows, p->sampled, NULL};
  LAUNCH(sits_k_sample(&sample, at));
  return SITS_OK;
}
