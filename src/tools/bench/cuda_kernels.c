/* sits2026-bench kernels: every CUDA kernel at the shapes of a Llama-3-8B step, against the memory rate measured in the same run.
 *
 * A figure is the median over graph replays of a chain of the kernel over distinct weights or pages (nothing stays in the L2 that would
 * not in a real step), divided by the chain's length; "serial" is plain stream order, "pdl" joins launches by programmatic edges. Bytes
 * are those the kernel must move; percent is bytes over time against the rate of a plain streaming read.
 * Arguments: [FILE [SECTION [NAME]]], FILE for the JSON, SECTION one of few, attention, many, prefill, NAME a part of the names that are
 * measured; all where they are absent.
 */
#include "tools/bench/bench.h"

#include <stdio.h>
#include <string.h>

/* It has no options, but --help is asked for all the same. True: *status is the program's. */
static bool is_option(int argc, char **argv, int *status)
{
  const bool is_one = argc > 1 && argv[1][0] == '-';
  *status = is_one && strcmp(argv[1], "--help") == 0 ? 0 : 2;
  if (is_one)
    fprintf(*status ? stderr : stdout, "usage: sits2026-bench kernels [FILE [few|attention|many|prefill [NAME]]]\n"
                                       "FILE for the JSON; without a section all of them; NAME: only kernels whose name has it\n");
  return is_one;
}

#ifdef SITS_HAVE_CUDA
#include <cuda_runtime_api.h>

#include "base/mem.h"
#include "kernels.h"

enum { LAYERS = 32, E = 4096, F = 14336, H = 32, G = 8, D = 128, V = 128256, REPLAYS = 11, MOST_TOKENS = 128, KV_GIB = 8 };

struct lab {
  cudaStream_t stream;
  int32_t n_sm;
  int failed; /* first CUDA error */
  double read_tb_s;
  const char *only; /* part of the names that are measured, NULL = all */
  uint8_t *weights, *kv, *open;
  void *weight[LAYERS][4], *head;
  float *channel, *h, *gain, *ssq, *f32, *workspace, *act_scale;
  void *frag[3], *wide, *act;
  struct k_attn_share *cut;
  int32_t *ints, *counters, *table;
  int32_t table_stride;
  json_t *rows;
};

static const int32_t rows_of[4] = {(H + 2 * G) * D, E, 2 * F, E}, cols_of[4] = {E, H *D, E, F};
static const char *const name_of[4] = {"qkv", "o", "gate_up", "down"};

static void check(struct lab *lab, int e, const char *what)
{
  if (!e || lab->failed) return;
  lab->failed = e;
  fprintf(stderr, "sits2026-bench kernels: %s: %s\n", what, cudaGetErrorString((cudaError_t)e));
}

static void *take(struct lab *lab, size_t bytes)
{
  void *p = NULL;
  check(lab, cudaMalloc(&p, bytes), "cudaMalloc");
  if (p) check(lab, cudaMemset(p, 0, bytes), "cudaMemset");
  return p;
}

static size_t weight_bytes(int32_t rows, int32_t cols) { return (size_t)k_row_tiles(rows) * (size_t)k_blocks(cols) * K_W4_G128_UNIT; }

static void make(struct lab *lab)
{
  size_t total = weight_bytes(V, E);
  for (int i = 0; i < 4; i++) total += LAYERS * weight_bytes(rows_of[i], cols_of[i]);
  lab->weights = take(lab, total);
  lab->channel = take(lab, (size_t)V * 4);
  uint8_t *at = lab->weights;
  for (int l = 0; l < LAYERS && !lab->failed; l++)
    for (int i = 0; i < 4; i++) {
      const struct k_fill_w4 fill = {at, K_W4_G128, rows_of[i], cols_of[i], 0.002f, (uint32_t)(l * 4 + i), lab->channel};
      check(lab, sits_k_fill_w4(&fill, (struct k_stream){(struct CUstream_st *)lab->stream, false}), "fill");
      lab->weight[l][i] = at;
      at += weight_bytes(rows_of[i], cols_of[i]);
    }
  lab->head = at;
  const struct k_fill_w4 fill = {at, K_W4_G128, V, E, 0.002f, 99, lab->channel};
  if (!lab->failed) check(lab, sits_k_fill_w4(&fill, (struct k_stream){(struct CUstream_st *)lab->stream, false}), "fill");
  lab->h = take(lab, (size_t)MOST_TOKENS * E * 4);
  lab->gain = take(lab, (size_t)F * 4);
  lab->ssq = take(lab, 128 * 16 * 4);
  lab->f32 = take(lab, (size_t)MOST_TOKENS * V * 4);
  lab->wide = take(lab, (size_t)MOST_TOKENS * 2 * F * 4);
  lab->act = take(lab, (size_t)MOST_TOKENS * F * 2);
  lab->act_scale = take(lab, (size_t)MOST_TOKENS * (F / K_GROUP) * 4);
  for (int i = 0; i < 3; i++) lab->frag[i] = take(lab, (size_t)16 * F * 2);
  lab->cut = take(lab, k_attn_cut_bytes(lab->n_sm));
  lab->workspace = take(lab, k_attn_decode_workspace_bytes(lab->n_sm, D));
  lab->counters = take(lab, MOST_TOKENS * G * 4);
  lab->kv = take(lab, (size_t)KV_GIB << 30);
  lab->open = take(lab, (size_t)MOST_TOKENS * (size_t)k_kv_open_bytes(K_KV_FP4, LAYERS, G, D));
  lab->ints = take(lab, 512 * 1024);
  lab->table_stride = 1024;
  lab->table = take(lab, (size_t)MOST_TOKENS * 1024 * 4);
  if (!lab->failed) check(lab, sits_k_fill_f32(lab->gain, F, 1.f, (struct k_stream){(struct CUstream_st *)lab->stream, false}), "fill");
}

/* A residual stream with numbers in it, so that layers multiply something else than zeros. */
static void fill_stream(struct lab *lab)
{
  static float h[MOST_TOKENS * E];
  uint32_t seed = 1;
  for (size_t i = 0; i < sizeof h / sizeof *h; i++) {
    seed = seed * 1664525u + 1013904223u;
    h[i] = (float)(seed >> 8) / 8388608.f - 1.f;
  }
  if (!lab->failed) check(lab, cudaMemcpy(lab->h, h, sizeof h, cudaMemcpyHostToDevice), "copy");
}

typedef void (*body_fn)(struct lab *lab, const void *arg, bool pdl);

static double median_us(struct lab *lab, body_fn body, const void *arg, bool pdl)
{
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  cudaEvent_t a = NULL, b = NULL;
  double times[REPLAYS] = {0};
  if (lab->failed) return 0;
  check(lab, cudaStreamBeginCapture(lab->stream, cudaStreamCaptureModeThreadLocal), "capture");
  body(lab, arg, pdl);
  check(lab, cudaStreamEndCapture(lab->stream, &graph), "capture");
  if (!lab->failed) check(lab, cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  check(lab, cudaEventCreate(&a), "event");
  check(lab, cudaEventCreate(&b), "event");
  for (int i = -2; i < REPLAYS && !lab->failed; i++) {
    float ms = 0;
    check(lab, cudaEventRecord(a, lab->stream), "event");
    check(lab, cudaGraphLaunch(exec, lab->stream), "graph");
    check(lab, cudaEventRecord(b, lab->stream), "event");
    check(lab, cudaEventSynchronize(b), "replay");
    check(lab, cudaEventElapsedTime(&ms, a, b), "event");
    if (i >= 0) times[i] = ms * 1e3;
  }
  if (exec) cudaGraphExecDestroy(exec);
  if (graph) cudaGraphDestroy(graph);
  if (a) cudaEventDestroy(a);
  if (b) cudaEventDestroy(b);
  return bench_percentile(times, REPLAYS, 50);
}

/* One line and one JSON row. bytes and operations of one link of the chain. */
static void report(struct lab *lab, const char *name, body_fn body, const void *arg, int links, double bytes, double operations)
{
  if (lab->only != NULL && strstr(name, lab->only) == NULL) return;
  const double serial = median_us(lab, body, arg, false) / links, pdl = median_us(lab, body, arg, true) / links;
  if (lab->failed) return;
  const double floor_us = bytes / lab->read_tb_s / 1e6, percent = pdl > 0 ? 100 * floor_us / pdl : 0;
  fprintf(stderr, "%-34s serial %9.2f us  pdl %9.2f us  %8.2f MB  %5.1f %% of read rate  %7.1f TOPS\n", name, serial, pdl, bytes / 1e6,
          percent, operations / pdl / 1e6);
  json_array_append_new(lab->rows, json_pack("{s:s, s:f, s:f, s:f, s:f, s:f}", "kernel", name, "serial_us", serial, "pdl_us", pdl,
                                             "bytes", bytes, "percent_of_read", percent, "tops", operations / pdl / 1e6));
}

/* ---- few tokens ---- */

struct decode_arg {
  int32_t n_tokens, which;
  bool has_attention;
  int32_t context;
  enum k_kv_codec codec;
}; /* which: 0..3 one GEMM, 4 head, 5 the chain */

static struct k_stream at_of(const struct lab *lab, bool pdl) { return (struct k_stream){(struct CUstream_st *)lab->stream, pdl}; }

static void launch_w4a16(struct lab *lab, int layer, int which, int32_t n, bool pdl)
{
  struct k_w4a16 a = {.weight = which == 4 ? lab->head : lab->weight[layer][which],
                      .rows = which == 4 ? V : rows_of[which],
                      .cols = which == 4 ? E : cols_of[which],
                      .n_tokens = n,
                      .x = lab->frag[which == 3   ? 2
                                     : which == 1 ? 1
                                                  : 0],
                      .x_width = E,
                      .eps = 1e-5f,
                      .x_n_ssq = E / 32};
  if (which == 0 || which == 2 || which == 4) a.x_ssq = lab->ssq;
  a.output = which == 0 ? K_OUT_F16 : which == 4 ? K_OUT_F32 : which == 2 ? K_OUT_SWIGLU : K_OUT_RESIDUAL;
  a.y = which == 0 ? lab->wide : which == 4 ? (void *)lab->f32 : (void *)lab->h;
  a.ld = which == 0 ? rows_of[0] : which == 4 ? V : E;
  a.next = which == 2 ? lab->frag[2] : lab->frag[0];
  a.gain = lab->gain, a.ssq = lab->ssq;
  check(lab, sits_k_w4a16(&a, lab->n_sm, at_of(lab, pdl)), "w4a16");
}

static struct k_kv_view view_of(const struct lab *lab, int layer, enum k_kv_codec codec, int32_t n_seqs)
{
  return (struct k_kv_view){.pool = lab->kv,
                            .page_bytes = (int64_t)k_kv_tile_bytes(codec, D) * G * LAYERS,
                            .codec = codec,
                            .layer = layer,
                            .n_layers = LAYERS,
                            .n_heads = H,
                            .n_kv_heads = G,
                            .head_dim = D,
                            .n_tokens = n_seqs,
                            .n_seqs = n_seqs,
                            .seq_start = lab->ints,
                            .kv_len = lab->ints + 512,
                            .positions = lab->ints + 1024,
                            .token_seq = lab->ints + 1536,
                            .block_table = lab->table,
                            .table_stride = lab->table_stride,
                            .open = lab->open,
                            .open_slot = lab->ints + 2048};
}

/* Once a step. */
static void launch_cut(struct lab *lab, enum k_kv_codec codec, int32_t n_seqs, int32_t context, bool pdl)
{
  const struct k_kv_view view = view_of(lab, 0, codec, n_seqs);
  if (!k_attn_few_suits(lab->n_sm, n_seqs, G, context)) check(lab, sits_k_attn_cut(&view, lab->cut, lab->n_sm, at_of(lab, pdl)), "cut");
}

static void launch_attention(struct lab *lab, int layer, enum k_kv_codec codec, int32_t n_seqs, int32_t context, int32_t frag_m, bool pdl)
{
  const struct k_attn_decode a = {.kv = view_of(lab, layer, codec, n_seqs),
                                  .rope = {lab->gain, 1.f, D, false},
                                  .qkv = {.rows = lab->wide},
                                  .eps = 1e-5f,
                                  .out = frag_m ? lab->frag[1] : lab->wide,
                                  .frag_m = frag_m,
                                  .cut = lab->cut,
                                  .workspace = lab->workspace,
                                  .counters = lab->counters};
  check(lab, k_attn_few_suits(lab->n_sm, n_seqs, G, context) ? sits_k_attn_few(&a, lab->n_sm, at_of(lab, pdl))
                                                             : sits_k_attn_decode(&a, lab->n_sm, at_of(lab, pdl)),
        "attention");
}

static void decode_body(struct lab *lab, const void *arg, bool pdl)
{
  const struct decode_arg *a = arg;
  if (a->which == 4) {
    for (int l = 0; l < 4; l++) launch_w4a16(lab, 0, 4, a->n_tokens, pdl);
    return;
  }
  if (a->which == 5 && a->has_attention) launch_cut(lab, a->codec, a->n_tokens, a->context, pdl);
  for (int l = 0; l < LAYERS; l++)
    for (int i = 0; i < 4; i++) {
      if (a->which != 5 && a->which != i) continue;
      launch_w4a16(lab, l, i, a->n_tokens, pdl);
      if (a->which == 5 && i == 0 && a->has_attention)
        launch_attention(lab, l, a->codec, a->n_tokens, a->context, k_w4a16_tokens(a->n_tokens), pdl);
    }
  if (a->which == 5) launch_w4a16(lab, 0, 4, a->n_tokens, pdl);
}

/* n sequences of `context` tokens, or of 1 to twice as many, with pages in scattered order. Returns the tokens of all. */
static double set_batch(struct lab *lab, int32_t n, int32_t context, bool is_ragged)
{
  static int32_t host[2560], table[MOST_TOKENS * 1024];
  const int32_t total = (int32_t)(((int64_t)KV_GIB << 30) / ((int64_t)k_kv_tile_bytes(K_KV_FP4, D) * G * LAYERS));
  int32_t n_pages = 0;
  uint32_t random = 12345;
  double tokens = 0;
  for (int32_t s = 0; s < n; s++) {
    random = random * 1664525u + 1013904223u;
    const int32_t len = is_ragged ? 1 + (int32_t)((random >> 8) % (uint32_t)(2 * context - 1)) : context;
    host[s] = s, host[512 + s] = len, host[1024 + s] = len - 1, host[1536 + s] = s;
    host[2048 + 2 * s] = host[2049 + 2 * s] = s;
    for (int32_t i = 0; i < (len + 63) / 64; i++) table[s * 1024 + i] = (int32_t)((int64_t)n_pages++ * 7919 % total);
    tokens += len;
  }
  host[n] = n;
  check(lab, cudaMemcpy(lab->ints, host, sizeof host, cudaMemcpyHostToDevice), "copy");
  check(lab, cudaMemcpy(lab->table, table, sizeof table, cudaMemcpyHostToDevice), "copy");
  return tokens;
}

static void few_tokens(struct lab *lab)
{
  char name[64];
  static const int32_t tokens[] = {1, 8, 16};
  for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
    double all = (double)weight_bytes(V, E);
    for (int i = 0; i < 5; i++) {
      const struct decode_arg arg = {tokens[t], i, false, 0};
      const double bytes = i == 4 ? (double)weight_bytes(V, E) : (double)weight_bytes(rows_of[i], cols_of[i]);
      snprintf(name, sizeof name, "w4a16 T=%d %s", tokens[t], i == 4 ? "lm_head" : name_of[i]);
      report(lab, name, decode_body, &arg, i == 4 ? 4 : LAYERS, bytes, 0);
      if (i < 4) all += LAYERS * bytes;
    }
    const struct decode_arg chain = {tokens[t], 5, false, 0}, with = {tokens[t], 5, true, 1024, K_KV_INT4};
    snprintf(name, sizeof name, "w4a16 T=%d all GEMMs of a step", tokens[t]);
    report(lab, name, decode_body, &chain, 1, all, 0);
    (void)set_batch(lab, tokens[t], 1024, false);
    snprintf(name, sizeof name, "the same with attention at 1024");
    report(lab, name, decode_body, &with, 1, all + (double)tokens[t] * 1024 * 36864, 0);
  }
}

/* ---- decode attention ---- */

static void attention_body(struct lab *lab, const void *arg, bool pdl)
{
  const struct decode_arg *a = arg;
  launch_cut(lab, a->codec, a->n_tokens, a->context, pdl);
  for (int l = 0; l < LAYERS; l++) launch_attention(lab, l, a->codec, a->n_tokens, a->context, 0, pdl);
}

/* The groups of all layers that a step of so many sequences ends: here, all of them. */
static void close_body(struct lab *lab, const void *arg, bool pdl)
{
  const struct decode_arg *a = arg;
  const struct k_kv_view view = view_of(lab, 0, a->codec, a->n_tokens);
  for (int i = 0; i < 4; i++) check(lab, sits_k_kv_close(&view, lab->n_sm, at_of(lab, pdl)), "close");
}

static void attention(struct lab *lab)
{
  static const int32_t cases[][3] = {{1, 1024},  {8, 1024}, {32, 1024}, {64, 1024}, {128, 1024}, {1, 2048},     {32, 2048},   {64, 2048},
                                     {4, 4096},  {4, 8192}, {4, 16384}, {4, 32768}, {32, 1024, 1}, {64, 1024, 1}, {128, 512, 1}};
  static const enum k_kv_codec codecs[] = {K_KV_INT4, K_KV_FP4};
  char name[64];
  for (size_t c = 0; c < sizeof codecs / sizeof *codecs; c++)
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
      const struct decode_arg arg = {cases[i][0], 0, true, cases[i][1], codecs[c]};
      const bool is_ragged = cases[i][2] != 0;
      const double tokens = set_batch(lab, cases[i][0], cases[i][1], is_ragged),
                   token = (double)k_kv_tile_bytes(codecs[c], D) * G / K_PAGE_TOKENS;
      snprintf(name, sizeof name, "attention %s %d x %d%s", codecs[c] == K_KV_FP4 ? "fp4" : "int4", cases[i][0], cases[i][1],
               is_ragged ? " ragged" : "");
      report(lab, name, attention_body, &arg, LAYERS, tokens * token, tokens * H * D * 4);
    }
  for (size_t c = 0; c < sizeof codecs / sizeof *codecs; c++)
    for (int i = 0; i < 2; i++) { /* no sequence ends a group; two do */
      const struct decode_arg arg = {2, 0, true, 1024 - 1 + i, codecs[c]};
      (void)set_batch(lab, arg.n_tokens, arg.context, false);
      snprintf(name, sizeof name, "close of %d groups, %s", 2 * i, codecs[c] == K_KV_FP4 ? "fp4" : "int4");
      report(lab, name, close_body, &arg, 4, i * 2.0 * (double)k_kv_open_bytes(codecs[c], LAYERS, G, D), 0);
    }
}

/* ---- 17 and more tokens ---- */

static void launch_w4a8(struct lab *lab, int layer, int which, bool is_grouped, int32_t n, bool pdl)
{
  const struct k_w4a8 g = {.weight = lab->weight[layer][which],
                           .is_grouped = is_grouped,
                           .channel = lab->channel,
                           .rows = rows_of[which],
                           .cols = cols_of[which],
                           .n_tokens = n,
                           .x = lab->act,
                           .x_scale = lab->act_scale,
                           .x_sum = lab->ints + 3500,
                           .output = which != 2 ? K_W4A8_SLAB_F32 : is_grouped ? K_W4A8_SWIGLU_S8 : K_W4A8_SWIGLU,
                           .y = which == 2 ? lab->wide : (void *)lab->f32,
                           .y_scale = lab->h,
                           .ld = which == 2 ? F : rows_of[which],
                           .slab_stride = (int64_t)n * rows_of[which]};
  check(lab, sits_k_w4a8(&g, lab->n_sm, at_of(lab, pdl)), "w4a8");
}

/* which: 0..3, and 4 more for scales per group. */
static void w4a8_body(struct lab *lab, const void *arg, bool pdl)
{
  const struct decode_arg *a = arg;
  for (int l = 0; l < LAYERS; l++) launch_w4a8(lab, l, a->which & 3, a->which >= 4, a->n_tokens, pdl);
}

static struct k_act s8_form(const struct lab *lab, int32_t n)
{
  return (struct k_act){K_ACT_TILE_S8, lab->act, lab->act_scale, k_w4a8_tile(n), lab->ints + 3500};
}

static void launch_norm(struct lab *lab, int32_t n, bool pdl)
{
  const struct k_norm norm = {lab->h, lab->f32, 4, (int64_t)n * E, lab->gain, 1e-5f, n, E, NULL, s8_form(lab, n)};
  check(lab, sits_k_norm(&norm, at_of(lab, pdl)), "norm");
}

static void launch_convert(struct lab *lab, int32_t n, int32_t width, bool pdl)
{
  const struct k_convert convert = {K_SRC_F16, lab->wide, width, n, width, s8_form(lab, n)};
  check(lab, sits_k_convert(&convert, at_of(lab, pdl)), "convert");
}

/* which: 0 norm, 1 conversion of the feed-forward width */
static void norm_body(struct lab *lab, const void *arg, bool pdl)
{
  const struct decode_arg *a = arg;
  for (int l = 0; l < LAYERS; l++)
    if (a->which == 0)
      launch_norm(lab, a->n_tokens, pdl);
    else
      launch_convert(lab, a->n_tokens, F, pdl);
}

/* A layer's launches in order; which: 0..3 a GEMM with the small kernel before it, 4 all of them. */
static void layer_body(struct lab *lab, const void *arg, bool pdl)
{
  const struct decode_arg *a = arg;
  if (a->has_attention) launch_cut(lab, a->codec, a->n_tokens, a->context, pdl);
  for (int l = 0; l < LAYERS; l++)
    for (int i = 0; i < 4; i++) {
      if (a->which != 4 && a->which != i) continue;
      if (i == 1 || i == 3)
        launch_convert(lab, a->n_tokens, cols_of[i], pdl);
      else
        launch_norm(lab, a->n_tokens, pdl);
      launch_w4a8(lab, l, i, false, a->n_tokens, pdl);
      if (i == 0 && a->has_attention) launch_attention(lab, l, a->codec, a->n_tokens, a->context, 0, pdl);
    }
}

static void report_layers(struct lab *lab, int32_t n)
{
  static const char *const before[4] = {"norm", "convert", "norm", "convert"};
  double all = 0;
  char name[64];
  fill_stream(lab);
  for (int i = 0; i < 4; i++) {
    const struct decode_arg arg = {.n_tokens = n, .which = i};
    const double bytes = (double)weight_bytes(rows_of[i], cols_of[i]);
    snprintf(name, sizeof name, "layer T=%d %s + %s", n, before[i], name_of[i]);
    report(lab, name, layer_body, &arg, LAYERS, bytes, 0);
    all += bytes;
  }
  const struct decode_arg chain = {.n_tokens = n, .which = 4}, with = {n, 4, true, 1024, K_KV_INT4};
  snprintf(name, sizeof name, "layer T=%d without attention", n);
  report(lab, name, layer_body, &chain, LAYERS, all, 0);
  set_batch(lab, n, 1024, false);
  snprintf(name, sizeof name, "layer T=%d with attention", n);
  report(lab, name, layer_body, &with, LAYERS, all + (double)n * 1024 * 36864 / LAYERS, 0);
}

static void sample_body(struct lab *lab, const void *arg, bool pdl)
{
  const struct decode_arg *a = arg;
  const struct k_sample sample = {lab->f32, a->n_tokens, V, V, NULL, lab->ints + 3000, NULL};
  for (int l = 0; l < 4; l++) check(lab, sits_k_sample(&sample, at_of(lab, pdl)), "sample");
}

static void many_tokens(struct lab *lab)
{
  static const int32_t tokens[] = {16, 32, 64, 128};
  char name[64];
  for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
    for (int i = 0; i < 8; i++) {
      const struct decode_arg arg = {.n_tokens = tokens[t], .which = i};
      const double bytes = (double)weight_bytes(rows_of[i & 3], cols_of[i & 3]);
      snprintf(name, sizeof name, "w4a8%s T=%d %s", i >= 4 ? " grouped" : "", tokens[t], name_of[i & 3]);
      report(lab, name, w4a8_body, &arg, LAYERS, bytes, 2.0 * tokens[t] * rows_of[i & 3] * cols_of[i & 3]);
    }
    struct decode_arg arg = {tokens[t], 0, false, 0};
    snprintf(name, sizeof name, "norm + 4 slabs -> s8, T=%d", tokens[t]);
    report(lab, name, norm_body, &arg, LAYERS, (double)tokens[t] * E * 25, 0);
    arg.which = 1;
    snprintf(name, sizeof name, "convert F -> s8, T=%d", tokens[t]);
    report(lab, name, norm_body, &arg, LAYERS, (double)tokens[t] * F * 3, 0);
    snprintf(name, sizeof name, "greedy sampling, T=%d", tokens[t]);
    report(lab, name, sample_body, &arg, 4, (double)tokens[t] * V * 4, 0);
    if (tokens[t] > K_MAX_DECODE_TOKENS) report_layers(lab, tokens[t]);
  }
}

/* ---- a prompt: attention and the kernels around it, one sequence whose tokens are all new ---- */

/* GROUPS: wgmma with int4's own groups */
enum { PREFILL_MMA, PREFILL_WGMMA, PREFILL_GROUPS, PREFILL_APPEND, PREFILL_FOLD, PREFILL_GATHER };

static void prefill_body(struct lab *lab, const void *arg, bool pdl)
{
  const struct decode_arg *a = arg;
  const int64_t capacity = a->n_tokens, rows = (int64_t)a->n_tokens * H * D * 2, keys = capacity * G * D * 2;
  uint8_t *at = lab->kv; /* q, out, k, v, exact and fresh keys, pages: their contents do not matter here */
  struct k_kv_view view = view_of(lab, 0, a->codec, 1);
  view.n_tokens = a->n_tokens;
  view.positions = lab->ints + 4096, view.token_seq = lab->table + 65536, view.kv_len = lab->ints + 512;
  view.fresh = at + 2 * rows + 2 * keys;
  view.pool = at + 2 * rows + 5 * keys;
  const struct k_attn_prefill p = {.kv = view,
                                   .q = at,
                                   .out = at + rows,
                                   .k = at + 2 * rows,
                                   .v = at + 2 * rows + keys,
                                   .capacity = capacity,
                                   .offset = lab->ints + 1024,
                                   .n_seqs = 1,
                                   .max_new = a->n_tokens,
                                   .exact = at + 2 * rows + 3 * keys,
                                   .exact_capacity = k_kv_exact_rows(a->n_tokens, 1)};
  const struct k_kv_gather gather = {.kv = view, .n_seqs = 1, .offset = p.offset, .max_pages = (a->n_tokens + 63) / 64,
                                     .capacity = capacity, .k = at + 2 * rows, .v = at + 2 * rows + keys, .is_tiled = true,
                                     .exact = at + 2 * rows + 3 * keys, .exact_capacity = p.exact_capacity};
  const struct k_rope_append append = {.kv = view,
                                       .rope = {lab->gain, 1.f, D, false},
                                       .qkv = {.rows = view.pool + (512 << 20)},
                                       .eps = 1e-5f,
                                       .q = at};
  for (int l = 0; l < 4; l++)
    check(lab, a->which == PREFILL_MMA      ? sits_k_attn_prefill(&p, at_of(lab, pdl))
               : a->which == PREFILL_APPEND ? sits_k_rope_append(&append, at_of(lab, pdl))
               : a->which == PREFILL_FOLD   ? sits_k_kv_fold(&view, at_of(lab, pdl))
               : a->which == PREFILL_GATHER ? sits_k_kv_gather(&gather, at_of(lab, pdl))
                                            : sits_k_attn_prefill_sm90(&p, lab->n_sm, at_of(lab, pdl)),
          "prefill");
}

/* SwiGLU in e4m3 of rows that are not in the L2. */
static void swiglu_body(struct lab *lab, const void *arg, bool pdl)
{
  const struct decode_arg *a = arg;
  uint8_t *out = lab->kv + (((int64_t)KV_GIB - 1) << 30);
  const struct k_act act = {.form = K_ACT_ROW_E4M3, .data = out, .scale = (float *)(out + (512 << 20))};
  for (int l = 0; l < 4; l++) {
    const struct k_convert convert = {K_SRC_F16_GATE_UP, lab->kv + (int64_t)l * a->n_tokens * F * 4, 2 * F, a->n_tokens, F, act,
                                      a->which * lab->n_sm};
    check(lab, sits_k_convert(&convert, at_of(lab, pdl)), "swiglu");
  }
}

static void set_prompt(struct lab *lab, int32_t length)
{
  static int32_t positions[65536], table[1024];
  const int32_t start[2] = {0, length}, zero = 0, none[2] = {-1, -1};
  for (int32_t i = 0; i < length; i++) positions[i] = i;
  for (int32_t i = 0; i < 1024; i++) table[i] = i;
  check(lab, cudaMemcpy(lab->ints, start, sizeof start, cudaMemcpyHostToDevice), "copy");
  check(lab, cudaMemcpy(lab->ints + 512, &length, sizeof length, cudaMemcpyHostToDevice), "copy");
  check(lab, cudaMemcpy(lab->ints + 1024, &zero, sizeof zero, cudaMemcpyHostToDevice), "copy");
  check(lab, cudaMemcpy(lab->ints + 2048, none, sizeof none, cudaMemcpyHostToDevice), "copy");
  check(lab, cudaMemcpy(lab->ints + 4096, positions, (size_t)length * 4, cudaMemcpyHostToDevice), "copy");
  check(lab, cudaMemcpy(lab->table, table, sizeof table, cudaMemcpyHostToDevice), "copy");
  check(lab, cudaMemset(lab->table + 65536, 0, 65536 * 4), "clear"); /* the sequence of each token */
}

static void prefill_attention(struct lab *lab)
{
  static const int32_t lengths[] = {1024, 2048, 8192, 30720};
  static const char *const what[] = {"mma.sync", "wgmma", "wgmma, int4", "append", "fold", "gather"};
  char name[64];
  for (int32_t n = 1024; n <= 2048; n *= 2)
    for (int which = 0; which <= 2; which += 2) {
      const struct decode_arg arg = {.n_tokens = n, .which = which};
      snprintf(name, sizeof name, "prefill SwiGLU %d, %s", n, which ? "walking" : "a CTA a row");
      report(lab, name, swiglu_body, &arg, 4, (double)n * F * 5, 0);
    }
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
    set_prompt(lab, lengths[i]);
    for (int which = PREFILL_MMA; which <= PREFILL_GATHER; which++) {
      const struct decode_arg arg = {lengths[i], which, false, 0, which >= PREFILL_GROUPS ? K_KV_INT4 : K_KV_F16};
      if (which == PREFILL_MMA && lengths[i] != 2048) continue;
      const bool multiplies = which < PREFILL_APPEND;
      const double n = lengths[i], moved = which == PREFILL_GATHER   ? 5.0 * G * D * 2
                                           : which == PREFILL_FOLD   ? 1.3 * G * D * 2
                                           : which == PREFILL_APPEND ? (4.0 * H + 6.3 * G) * D
                                                                     : 0;
      snprintf(name, sizeof name, "prefill %s %d, %s", multiplies ? "attention" : "around it", lengths[i], what[which]);
      report(lab, name, prefill_body, &arg, 4, multiplies ? n * (2 * H + 2 * G) * D * 2 : n * moved, multiplies ? 2.0 * n * n * H * D : 0);
    }
  }
}

static void read_body(struct lab *lab, const void *arg, bool pdl)
{
  (void)arg, (void)pdl;
  check(lab, sits_k_read(lab->kv, (int64_t)KV_GIB << 30, (uint32_t *)lab->ints, lab->n_sm, at_of(lab, false)), "read");
}

int bench_kernels(int argc, char **argv)
{
  int status;
  if (is_option(argc, argv, &status)) return status;
  struct lab lab = {.rows = json_array(), .only = argc > 3 ? argv[3] : NULL};
  int device = 0;
  check(&lab, cudaGetDevice(&device), "device");
  if (!lab.failed) check(&lab, cudaDeviceGetAttribute(&lab.n_sm, cudaDevAttrMultiProcessorCount, device), "device");
  if (!lab.failed) check(&lab, cudaStreamCreate(&lab.stream), "stream");
  if (!lab.failed) check(&lab, sits_k_w4a16_init(), "init");
  if (!lab.failed) check(&lab, sits_k_w4a8_init(), "init");
  if (!lab.failed) check(&lab, sits_k_attn_decode_init(), "init");
  if (!lab.failed) check(&lab, sits_k_attn_few_init(), "init");
  if (!lab.failed) check(&lab, sits_k_convert_init(), "init");
  if (!lab.failed) check(&lab, sits_k_kv_fold_init(), "init");
  if (!lab.failed) check(&lab, sits_k_attn_prefill_init(), "init");
  if (!lab.failed) check(&lab, sits_k_attn_prefill_sm90_init(), "init");
  if (!lab.failed) make(&lab);
  if (!lab.failed) {
    const double us = median_us(&lab, read_body, NULL, false);
    lab.read_tb_s = us > 0 ? (double)((int64_t)KV_GIB << 30) / us / 1e6 : 1;
    fprintf(stderr, "streaming read: %.3f TB/s\n", lab.read_tb_s);
    static const struct { const char *name; void (*run)(struct lab *lab); } sections[] = {
        {"few", few_tokens}, {"attention", attention}, {"many", many_tokens}, {"prefill", prefill_attention}};
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
      if (argc < 3 || strcmp(argv[2], sections[i].name) == 0) sections[i].run(&lab);
  }
  if (lab.failed) { /* no figures, no file */
    json_decref(lab.rows);
    return 1;
  }
  json_t *out = bench_header("kernels", argc, argv);
  json_object_update_new(out, json_pack("{s:s, s:f, s:O}", "device", "cuda", "read_tb_per_s", lab.read_tb_s, "kernels", lab.rows));
  json_decref(lab.rows);
  return bench_write_json(out, argc > 1 ? argv[1] : NULL) ? 0 : 1;
}
#else
int bench_kernels(int argc, char **argv)
{
  int status;
  if (is_option(argc, argv, &status)) return status;
  fprintf(stderr, "sits2026-bench kernels: this build has no CUDA kernels\n");
  return 1;
}
#endif
