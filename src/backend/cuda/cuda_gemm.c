/* Which GEMM for which weight and step size, and cuBLASLt's calls. Entry points: cuda_gemm_form, cuda_gemm, cuda_gemm_warm.
 *
 *   weight                     rows of the step   activations             kernel
 *   4-bit                      1..16              f16 fragments           sits_k_w4a16
 *   4-bit, channel * power     17..W4A8_MAX       s8 per token            sits_k_w4a8, absorbed
 *                              more               e4m3 per token          expanded to e4m3 once a step, cuBLASLt with vector scales
 *   the same, resident         17..W4A8_MAX_RESIDENT, more: the same, but what lies in memory is not expanded (cuda_resident.c)
 *   4-bit, channel * integer   17..W4A8_MAX       s8 per token            sits_k_w4a8, absorbed
 *                              more               f16                     as others: e4m3 has too few bits for 3 and 5 times an integer
 *   4-bit, other groups of 128 17..W4A8_MAX       s8 per token and group  sits_k_w4a8, grouped
 *                              more               f16                     as others
 *   4-bit, other; or w4a16     17 and more        f16                     expanded to f16 once a step or resident, cuBLASLt
 *   f16                        any                f16                     cuBLASLt
 * Channel: synthetic weights, and those of files whose group scales are such multiples (cuda_weights.c). Where a file says how a product's
 * input is rounded, f16 in place of all 8-bit forms (cuda_act_form).
 */
#include "backend/cuda/cuda_internal.h"

#define W4A8_MAX 256          /* where e4m3 would have to be expanded first */
#define W4A8_MAX_RESIDENT 128 /* where it lies in memory */
#define FEW_ROWS 64           /* f16 so few is multiplied as it is */

enum lt_kind { LT_F16_F16, LT_F16_F32, LT_E4M3_F16, LT_E4M3_F32 };

static void *frag_buffer(const struct backend_program *p, int32_t cols, int32_t m)
{
  const int32_t i = m == 1 ? 0 : m == 8 ? 1 : 2;
  const struct program_dims *d = &p->program->dims;
  return cols == d->n_embd ? p->frag_e[i] : cols == d->n_heads * d->head_dim ? p->frag_a[i] : p->frag_f[i];
}

struct k_act cuda_gemm_form(const struct backend_program *p, const struct cuda_weight *w, int32_t n)
{
  const bool has_sm90 = p->backend->compute_major == 9;
  if (w->form == CUDA_W4 && n <= CUDA_FAST_TOKENS && has_sm90) {
    const int32_t m = k_w4a16_tokens(n);
    return (struct k_act){K_ACT_FRAG_F16, frag_buffer(p, w->cols, m), NULL, m};
  }
  const bool is_narrow = w->form == CUDA_W4 && p->backend->recipe != CUDA_RECIPE_W4A16;
  if (is_narrow && w->channel == NULL && w->format == K_W4_G128 && n <= W4A8_MAX && has_sm90)
    return (struct k_act){.form = K_ACT_GROUP_S8, .data = p->act, .scale = p->act_scale, .tile = k_w4a8_group_tile(n)};
  if (is_narrow && w->channel != NULL) {
    const int32_t most = w->resident != NULL && cuda_is_wide_e4m3(p, w) ? W4A8_MAX_RESIDENT : W4A8_MAX;
    if (n <= most && has_sm90) return (struct k_act){K_ACT_TILE_S8, p->act, p->act_scale, k_w4a8_tile(n), p->act_sum};
    if (cuda_is_wide_e4m3(p, w)) return (struct k_act){K_ACT_ROW_E4M3, p->act, p->act_scale, 0};
  }
  return (struct k_act){K_ACT_ROW_F16, p->act, NULL, 0};
}

/* ---- cuBLASLt ---- */

#define LT_TRY(call)                                                                                                                     \
  if ((call) != CUBLAS_STATUS_SUCCESS) return false

static bool lt_describe(struct cuda_lt_plan *plan)
{
  const bool is_e4m3 = plan->kind >= LT_E4M3_F16, is_f32 = plan->kind == LT_F16_F32 || plan->kind == LT_E4M3_F32;
  const cudaDataType_t in = is_e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_16F, out = is_f32 ? CUDA_R_32F : CUDA_R_16F;
  const cublasOperation_t trans = CUBLAS_OP_T;
  LT_TRY(cuda_blas.MatmulDescCreate(&plan->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  LT_TRY(cuda_blas.MatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_TRANSA, &trans, sizeof trans));
  if (is_e4m3) {
    const int8_t fast = 1;
    const int32_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    LT_TRY(cuda_blas.MatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast));
    LT_TRY(cuda_blas.MatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode, sizeof mode));
    LT_TRY(cuda_blas.MatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode, sizeof mode));
  }
  LT_TRY(cuda_blas.MatrixLayoutCreate(&plan->a, in, (uint64_t)plan->cols, (uint64_t)plan->rows, plan->cols));
  LT_TRY(cuda_blas.MatrixLayoutCreate(&plan->b, in, (uint64_t)plan->cols, (uint64_t)plan->n, plan->cols));
  LT_TRY(cuda_blas.MatrixLayoutCreate(&plan->d, out, (uint64_t)plan->rows, (uint64_t)plan->n, plan->rows));
  return true;
}

static bool lt_choose(struct backend *backend, struct cuda_lt_plan *plan, const void *any_scale)
{
  cublasLtMatmulPreference_t preference = NULL;
  cublasLtMatmulHeuristicResult_t result = {0};
  const size_t workspace = CUDA_LT_WORKSPACE;
  int n_found = 0;
  if (plan->kind >= LT_E4M3_F16) {
    LT_TRY(cuda_blas.MatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &any_scale, sizeof any_scale));
    LT_TRY(cuda_blas.MatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &any_scale, sizeof any_scale));
  }
  LT_TRY(cuda_blas.MatmulPreferenceCreate(&preference));
  bool ok = cuda_blas.MatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace) ==
            CUBLAS_STATUS_SUCCESS;
  ok = ok && cuda_blas.MatmulAlgoGetHeuristic(backend->lt, plan->op, plan->a, plan->b, plan->d, plan->d, preference, 1, &result,
                                            &n_found) == CUBLAS_STATUS_SUCCESS;
  cuda_blas.MatmulPreferenceDestroy(preference);
  plan->algo = result.algo;
  return ok && n_found == 1;
}

/* Plans lie in a table with open addressing; a place without an op is free. */
static void lt_plan_fini(struct cuda_lt_plan *plan)
{
  if (plan->op) cuda_blas.MatmulDescDestroy(plan->op);
  if (plan->a) cuda_blas.MatrixLayoutDestroy(plan->a);
  if (plan->b) cuda_blas.MatrixLayoutDestroy(plan->b);
  if (plan->d) cuda_blas.MatrixLayoutDestroy(plan->d);
  *plan = (struct cuda_lt_plan){0};
}

void cuda_gemm_fini(struct backend_program *p)
{
  for (int32_t i = 0; p->lt_plans != NULL && i < CUDA_MAX_LT_PLANS; i++) lt_plan_fini(&p->lt_plans->at[i]);
  if (p->lt_plans != NULL) p->lt_plans->n = 0;
}

static struct cuda_lt_plan *lt_plan(struct backend_program *p, int32_t rows, int32_t cols, int32_t n, enum lt_kind kind)
{
  struct cuda_lt_plan *plans = p->lt_plans->at;
  if (p->lt_plans->n == CUDA_MAX_LT_PLANS / 2) cuda_gemm_fini(p); /* steps of many sizes: start over */
  uint32_t at = ((uint32_t)rows * 31u + (uint32_t)cols * 17u + (uint32_t)kind) * 2654435761u >> 16;
  at += (uint32_t)n / CUDA_E4M3_ALIGN;
  struct cuda_lt_plan *plan = &plans[at % CUDA_MAX_LT_PLANS];
  for (; plan->op != NULL; plan = &plans[++at % CUDA_MAX_LT_PLANS])
    if (plan->rows == rows && plan->cols == cols && plan->n == n && plan->kind == (int)kind) return plan;
  *plan = (struct cuda_lt_plan){.rows = rows, .cols = cols, .n = n, .kind = (int)kind};
  if (!lt_describe(plan) || !lt_choose(p->backend, plan, p->act_scale)) {
    lt_plan_fini(plan);
    return NULL;
  }
  p->lt_plans->n++;
  return plan;
}

void cuda_gemm_probe(struct backend_program *p)
{
  p->has_e4m3 = true;
  for (int32_t i = 0; i < p->n_weights; i++) {
    const struct cuda_weight *w = &p->weights[i];
    const int32_t cols = k_blocks(w->cols) * K_GROUP;
    if (!cuda_is_wide_e4m3(p, w)) continue;
    p->has_e4m3 = lt_plan(p, w->rows, cols, 512, LT_E4M3_F16) != NULL && lt_plan(p, w->rows, cols, 512, LT_E4M3_F32) != NULL;
  }
}

/* adds: y is added to. */
static enum sits_status lt_multiply(struct backend_program *p, const struct cuda_weight *w, int32_t n, const void *weight,
                                    const struct k_act *x, bool is_f32, bool adds, void *y, struct k_stream at)
{
  const bool is_e4m3 = x->form == K_ACT_ROW_E4M3;
  const int32_t cols = k_blocks(w->cols) * K_GROUP, n_padded = is_e4m3 || n > FEW_ROWS ? cuda_lt_rows(n) : n;
  const enum lt_kind kind = is_e4m3 ? is_f32 ? LT_E4M3_F32 : LT_E4M3_F16 : is_f32 ? LT_F16_F32 : LT_F16_F16;
  struct cuda_lt_plan *plan = lt_plan(p, w->rows, cols, n_padded, kind);
  const float one = 1.f, old = adds ? 1.f : 0.f;
  if (plan == NULL) return CUDA_CALL(p->backend, cudaErrorNotSupported);
  if (is_e4m3) {
    const void *a = w->channel, *b = x->scale;
    if (cuda_blas.MatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &a, sizeof a) != CUBLAS_STATUS_SUCCESS ||
        cuda_blas.MatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &b, sizeof b) != CUBLAS_STATUS_SUCCESS)
      return CUDA_CALL(p->backend, cudaErrorInvalidValue);
  }
  const cublasStatus_t e = cuda_blas.Matmul(p->backend->lt, plan->op, &one, weight, plan->a, x->data, plan->b, &old, y, plan->d, y,
                                          plan->d, &plan->algo, p->backend->lt_workspace, CUDA_LT_WORKSPACE, (cudaStream_t)at.stream);
  return e == CUBLAS_STATUS_SUCCESS ? SITS_OK : CUDA_CALL(p->backend, cudaErrorLaunchFailure);
}

/* ---- the choice ---- */

static enum sits_status multiply_fragments(struct backend_program *p, const struct cuda_weight *w, int32_t n, const struct k_act *x,
                                           bool is_f32, void *y, struct k_stream at)
{
  const struct k_w4a16 a = {.weight = w->data,
                            .format = w->format,
                            .rows = w->rows,
                            .cols = w->cols,
                            .n_tokens = n,
                            .x = x->data,
                            .output = is_f32 ? K_OUT_F32 : K_OUT_F16,
                            .y = y,
                            .ld = w->rows,
                            .bias = w->bias};
  return CUDA_CALL(p->backend, sits_k_w4a16(&a, p->backend->n_sm, at));
}

static bool is_s8(const struct k_act *x) { return x->form == K_ACT_TILE_S8 || x->form == K_ACT_GROUP_S8; }

static struct k_w4a8 s8_args(const struct cuda_weight *w, int32_t n, const struct k_act *x, enum k_w4a8_output output, void *y)
{
  const bool is_pairs = output == K_W4A8_SWIGLU || output == K_W4A8_SWIGLU_S8;
  return (struct k_w4a8){.weight = w->data,
                         .is_grouped = x->form == K_ACT_GROUP_S8,
                         .channel = w->channel,
                         .rows = w->rows,
                         .cols = w->cols,
                         .n_tokens = n,
                         .x = x->data,
                         .x_scale = x->scale,
                         .x_sum = x->sum,
                         .output = output,
                         .y = y,
                         .ld = is_pairs ? w->rows / 2 : w->rows,
                         .slab_stride = (int64_t)n * w->rows};
}

static enum sits_status multiply_s8(struct backend_program *p, const struct cuda_weight *w, int32_t n, const struct k_act *x,
                                    enum cuda_gemm_output output, void *y, int32_t *n_slabs, struct k_stream at)
{
  static const enum k_w4a8_output outputs[] = {K_W4A8_F16, K_W4A8_F32, K_W4A8_SLAB_F32, K_W4A8_SWIGLU};
  const struct k_w4a8 a = s8_args(w, n, x, outputs[output], y);
  struct k_w4a8_plan plan;
  if (!k_w4a8_plan(&a, p->backend->n_sm, &plan)) return CUDA_CALL(p->backend, cudaErrorInvalidValue);
  if (n_slabs != NULL) *n_slabs = plan.n_split;
  return CUDA_CALL(p->backend, sits_k_w4a8(&a, p->backend->n_sm, at));
}

enum sits_status cuda_gemm_swiglu(struct backend_program *p, const struct cuda_weight *w, const struct cuda_weight *next, int32_t n,
                                  const struct k_act *x, struct k_act *out, struct k_stream at)
{
  const int32_t width = w->rows / 2;
  *out = cuda_act_form(p, next, n);
  if (x->form == K_ACT_GROUP_S8 && out->form == K_ACT_GROUP_S8 && next->cols == width) {
    out->data = p->gate_up, out->scale = p->gate_up_scale; /* x is still being read from p->act */
    struct k_w4a8 a = s8_args(w, n, x, K_W4A8_SWIGLU_S8, out->data);
    a.y_scale = out->scale;
    return CUDA_CALL(p->backend, sits_k_w4a8(&a, p->backend->n_sm, at));
  }
  enum k_act_source source;
  const enum sits_status status = cuda_gemm(p, w, n, x, CUDA_GEMM_SWIGLU, NULL, NULL, &source, at);
  if (status != SITS_OK) return status;
  const int32_t n_walking = p->backend->compute_major == 9 ? 2 * p->backend->n_sm : 0;
  const struct k_convert convert = {source, p->gate_up, source == K_SRC_F16 ? width : 2 * width, n, width, *out, n_walking};
  return CUDA_CALL(p->backend, sits_k_convert(&convert, at));
}

enum sits_status cuda_gemm(struct backend_program *p, const struct cuda_weight *w, int32_t n, const struct k_act *x,
                           enum cuda_gemm_output output, void *y, int32_t *n_slabs, enum k_act_source *source, struct k_stream at)
{
  const bool adds = output == CUDA_GEMM_ADD, is_f32 = output == CUDA_GEMM_F32 || output == CUDA_GEMM_SLABS || adds;
  enum sits_status status = SITS_OK;
  if (output == CUDA_GEMM_SLABS) y = p->slabs;
  if (output == CUDA_GEMM_SWIGLU) y = p->gate_up;
  if (n_slabs != NULL) *n_slabs = 1;
  if (source != NULL) *source = is_s8(x) ? K_SRC_F16 : K_SRC_F16_GATE_UP;
  if (adds && !cuda_gemm_adds(x)) return CUDA_CALL(p->backend, cudaErrorNotSupported);
  if (x->form == K_ACT_FRAG_F16) return multiply_fragments(p, w, n, x, is_f32, y, at);
  if (is_s8(x))
    status = multiply_s8(p, w, n, x, output, y, n_slabs, at);
  else {
    const void *weight = w->data;
    if (w->form == CUDA_W4) {
      const bool to_e4m3 = x->form == K_ACT_ROW_E4M3, is_kept = w->resident != NULL && to_e4m3 == cuda_is_wide_e4m3(p, w);
      const struct k_expand expand = {w->data, w->format, w->rows, w->cols, w->channel, to_e4m3, p->expanded};
      if (!is_kept) status = CUDA_CALL(p->backend, sits_k_expand(&expand, at));
      weight = is_kept ? w->resident : p->expanded;
    }
    if (status == SITS_OK) status = lt_multiply(p, w, n, weight, x, is_f32, adds, y, at);
  }
  if (status == SITS_OK && w->bias != NULL && output != CUDA_GEMM_SLABS && !adds) {   /* whoever adds the sums adds the bias */
    if (output != CUDA_GEMM_F16) return CUDA_CALL(p->backend, cudaErrorNotSupported); /* compile refuses such programs */
    status = CUDA_CALL(p->backend, sits_k_add_bias(y, w->bias, n, w->rows, at));
  }
  return status;
}

enum sits_status cuda_gemm_warm(struct backend_program *p)
{
  const struct cuda_layer *layer = &p->layers[0];
  const struct k_stream at = {(struct CUstream_st *)p->backend->stream, false};
  const struct { const struct cuda_weight *w; enum cuda_gemm_output output; void *y; } products[] = {
      {layer->qkv, CUDA_GEMM_F16, p->qkv}, {layer->o, CUDA_GEMM_ADD, p->h}, {layer->gate_up, CUDA_GEMM_SWIGLU, NULL},
      {layer->down, CUDA_GEMM_ADD, p->h}};
  if (program_n_ranks(p->program) > 1) return SITS_OK; /* they send what they multiplied */
  for (int32_t n = CUDA_TILE_TOKENS; n <= CUDA_LANE_TOKENS && n <= p->max_tokens; n += CUDA_TILE_TOKENS)
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) {
      const struct k_act x = cuda_act_form(p, products[i].w, n);
      if (!cuda_gemm_adds(&x)) continue;
      TRY(cuda_gemm(p, products[i].w, n, &x, products[i].output, products[i].y, NULL, NULL, at));
    }
  return SITS_OK;
}
