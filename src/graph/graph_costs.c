/* See graph_costs.h. Entry points: graph_costs_measure, graph_costs_save, graph_costs_load. */
#include "graph/graph_costs.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/program.h"
#include "base/clock.h"
#include "base/json.h"
#include "base/mem.h"
#include "graph/graph.h"

enum { SHORT_CHAIN = 16, LONG_CHAIN = 144, NARROW = 1024, WIDE = 4096, RUNS = 200 };

/* The shortest time of a step, in ns, that runs a chain of n ops on values of that width. */
static enum sits_status time_chain(const struct backend_vtable *vtable, struct backend *backend, enum program_op_kind kind, int32_t n,
                                   int32_t width, double *out, struct sits_error *err)
{
  const struct program_dims dims = {.n_layers = 1, .n_embd = width, .n_heads = 1, .n_kv_heads = 1, .head_dim = 64, .n_ff = width,
                                    .n_vocab = width, .max_context = 64, .rms_eps = 1e-5F};
  const float frequencies[32] = {0};
  const struct program_rope rope = {.style = PROGRAM_ROPE_HALF_SPLIT, .dims = 64, .inv_freq = frequencies, .magnitude = 1};
  const int32_t T = vtable->costs.tokens;
  float *zeros = mem_calloc((size_t)width * (size_t)width, sizeof *zeros);
  int32_t *numbers = mem_calloc(2 * (size_t)T + 1, sizeof *numbers);
  const struct sits_utd table = {.name = "zeros", .dtype = SITS_DTYPE_F32, .n_dims = 2, .dims = {width, width}, .data = zeros,
                                 .n_bytes = (size_t)width * (size_t)width * sizeof *zeros};
  const struct sits_utd gain = {.name = "gain", .dtype = SITS_DTYPE_F32, .n_dims = 1, .dims = {width}, .data = zeros,
                                .n_bytes = (size_t)width * sizeof *zeros};
  struct graph *graph = NULL;
  struct program *program = NULL;
  struct backend_program *compiled = NULL;
  struct backend_kv *kv = NULL;
  const struct kv_geometry geometry = {.n_layers = 1, .n_kv_heads = 1, .head_dim = 64, .codec = KV_F16, .n_pages = 1};
  enum sits_status status = zeros && numbers ? SITS_OK : sits_fail(err, SITS_NOMEM, "out of memory");
  if (!status) status = graph_create(&dims, &rope, &graph, err);
  if (!status) {
    graph_value x = graph_embed(graph, &table);
    for (int32_t i = 0; i < n; i++) x = kind == PROGRAM_ADD ? graph_add(graph, x, x) : graph_rmsnorm(graph, x, &gain);
    graph_output(graph, graph_select_rows(graph, graph_rmsnorm(graph, x, &gain)));
    status = graph_stitch(graph, 0, NULL, &program, err);
  }
  if (!status) status = vtable->compile(backend, program, &compiled, err);
  if (!status) status = vtable->kv_create(backend, &geometry, &kv, err);
  for (int32_t i = 0; i < T && !status; i++) numbers[i] = i; /* positions */
  const int32_t starts[2] = {0, T}, length = T, page = 0, row = T - 1;
  const struct backend_batch batch = {.n_tokens = T, .n_seqs = 1, .n_rows = 1, .tokens = numbers ? numbers + T : NULL, .positions = numbers,
                                      .seq_start = starts, .kv_len = &length, .block_table = &page, .table_stride = 1, .row_token = &row};
  *out = INFINITY;
  for (int i = 0; i < RUNS && !status; i++) {
    struct backend_result result;
    const int64_t start = clock_monotonic_ns();
    status = vtable->submit(compiled, kv, &batch);
    if (!status) status = vtable->wait(compiled, &result);
    const double ns = (double)(clock_monotonic_ns() - start);
    if (status) sits_fail(err, status, "the %s backend failed: %s", vtable->name, sits_status_info(status)->text);
    if (ns < *out) *out = ns;
  }
  if (kv) vtable->kv_destroy(kv);
  if (compiled) vtable->program_destroy(compiled);
  if (program) program_destroy(program);
  graph_destroy(graph);
  mem_free(numbers);
  mem_free(zeros);
  return status;
}

static enum sits_status time_op(const struct backend_vtable *vtable, struct backend *backend, enum program_op_kind kind, int32_t width,
                                double *out, struct sits_error *err)
{
  double few, many = 0;
  enum sits_status status = time_chain(vtable, backend, kind, SHORT_CHAIN, width, &few, err);
  if (!status) status = time_chain(vtable, backend, kind, LONG_CHAIN, width, &many, err);
  *out = (many - few) / (LONG_CHAIN - SHORT_CHAIN);
  return status;
}

enum sits_status graph_costs_measure(const struct backend_vtable *vtable, struct backend *backend, struct backend_costs *out,
                                     struct sits_error *err)
{
  static const enum program_op_kind kinds[2] = {PROGRAM_ADD, PROGRAM_RMSNORM};
  double t[2][2];                    /* [kind][width] */
  enum sits_status status = SITS_OK;
  *out = vtable->costs;
  if (out->tokens <= 0) return sits_fail_param(err, SITS_UNSUPPORTED, "device", "the %s backend weighs no fusions", vtable->name);
  for (int i = 0; i < 4 && !status; i++) status = time_op(vtable, backend, kinds[i / 2], i % 2 ? WIDE : NARROW, &t[i / 2][i % 2], err);
  if (status) return status;
  const double values = out->tokens, grown = values * (WIDE - NARROW); /* an ADD reads two values and writes one, a norm reads and writes */
  const double byte = fmax((t[0][1] - t[0][0]) / (12 * grown), 0), norm = fmax((t[1][1] - t[1][0]) / grown - 8 * byte, 0);
  out->byte_ns = (float)byte;
  out->norm_ns = (float)norm;
  out->op_ns = (float)fmax(t[0][0] - 12 * values * NARROW * byte, 1);
  return SITS_OK;
}

/* ---- the file ---- */

enum sits_status graph_costs_save(const char *path, const struct backend_vtable *vtable, const struct backend_costs *costs,
                                  struct sits_error *err)
{
  char part[4112];
  json_t *file = json_pack("{ss si sf sf sf}", "device", vtable->name, "tokens", costs->tokens, "op_ns", (double)costs->op_ns, "byte_ns",
                           (double)costs->byte_ns, "norm_ns", (double)costs->norm_ns);
  if (!file) return sits_fail(err, SITS_NOMEM, "out of memory");
  snprintf(part, sizeof part, "%.4000s.part", path);
  const bool is_written = json_dump_file(file, part, JSON_INDENT(1) | JSON_REAL_PRECISION(9)) == 0 && rename(part, path) == 0;
  json_decref(file);
  if (is_written) return SITS_OK;
  unlink(part);
  return sits_fail(err, SITS_IO, "%.150s: cannot be written: %s", path, strerror(errno));
}

enum sits_status graph_costs_load(const char *path, const struct backend_vtable *vtable, struct backend_costs *out, struct sits_error *err)
{
  struct backend_costs costs = vtable->costs;
  const struct { const char *key; float *to; double least; } fields[] = {
      {"op_ns", &costs.op_ns, 1}, {"byte_ns", &costs.byte_ns, 0}, {"norm_ns", &costs.norm_ns, 0}};
  json_t *file;
  enum sits_status status = json_parse_file(path, &json_limits_request, &file, err);
  if (status) return status;
  const char *device = json_string_value(json_object_get(file, "device"));
  const json_t *tokens = json_object_get(file, "tokens");
  if (!device || strcmp(device, vtable->name) != 0)
    status = sits_fail_param(err, SITS_CONFIG, "device", "%.150s: costs of device '%.32s', not of '%s'", path, device ? device : "",
                             vtable->name);
  else if (!json_is_integer(tokens) || json_integer_value(tokens) < 1 || json_integer_value(tokens) > 65536)
    status = sits_fail_param(err, SITS_CONFIG, "tokens", "%.150s: tokens is no number from 1 to 65536", path);
  for (size_t i = 0; i < sizeof fields / sizeof fields[0] && !status; i++) {
    const json_t *value = json_object_get(file, fields[i].key);
    if (!json_is_number(value) || !(json_number_value(value) >= fields[i].least) || json_number_value(value) > 1e9)
      status = sits_fail_param(err, SITS_CONFIG, fields[i].key, "%.150s: %s is no number from %g to 1e9", path, fields[i].key,
                               fields[i].least);
    else *fields[i].to = (float)json_number_value(value);
  }
  if (!status) costs.tokens = (int32_t)json_integer_value(tokens);
  json_decref(file);
  if (!status) *out = costs;
  return status;
}
