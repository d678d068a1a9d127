/* Engine files with weights in groups of 128 on the CUDA backend: scales that are powers of two times one of the row, multiples of it,
 * free ones, and one a row; expanded in each step and resident. A random model (rows of 256 and 640 columns, two layers) goes through
 * quant_convert into a file that leaves inputs to the device; the CPU reads the same weights from a file that says float, so what differs
 * is how CUDA rounds inputs, and f16.
 *
 * ||cuda - cpu|| / ||cpu|| over eight rows of logits must lie in the band of the product that the table in cuda_gemm.c names, from both
 * sides. What inputs rounded in that way cost such a model, reckoned in double for two of them, steps of 20 to 600 tokens: 8 bits a token
 * 2.5 to 3.3 %, 8 bits a token and group 2.0 to 2.2 %, e4m3 a token 4.7 to 5.7 %, f16 0.04 %. A factor or a row's scale that is wrong
 * costs more than any.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "engine/runner.h"
#include "gpu_test.h"
#include "quant/quant_weight.h"
#include "random_model.h"
#include "tensor/engine_file.h"
#include "tensor/gguf.h"
#include "tensor/row_scale.h"
#include "tensor/source.h"

enum { PAGES = 12, ROWS = 8 };

/* ---- engine files ---- */

struct kind { const char *name; int32_t group; enum quant_scales scales; enum row_scale_kind want; };

/* What holds of all rows. */
static enum row_scale_kind kind_of(const struct sits_utd *u)
{
  enum row_scale_kind least = ROW_SCALE_POWERS;
  const int64_t n = u->quant == SITS_QUANT_GROUP ? u->dims[1] / u->group_size : 1;
  float channel;
  for (int64_t r = 0; r < u->dims[0]; r++) {
    const enum row_scale_kind kind = row_scale_find(sits_utd_row_scales(u, r), n, &channel);
    if (kind < least) least = kind;
  }
  return least;
}

static json_t *meta_of(bool is_float)
{
  static const char *const sites[] = {"qkv", "o", "gate_up", "down"};
  json_t *list = json_array();
  for (int l = 0; l < LAYERS && is_float; l++)
    for (int i = 0; i < 4; i++)
      json_array_append_new(list, json_pack("{si ss ss}", "layer", l, "site", sites[i], "act", "float"));
  return json_pack("{ss so}", "origin", "gguf", "sites", list);
}

/* The layers' matrices rounded; twice: inputs left to the device, and not rounded. */
static bool write_engines(const char *gguf, const struct kind *k, const char *device_path, const char *float_path)
{
  struct sits_error err = {0};
  struct source *source = NULL;
  struct engine_writer *writer = NULL;
  struct quant_tensor made[MAX_TENSORS] = {0};
  struct buf image;
  size_t n_bytes;
  uint64_t n_values;
  uint32_t version;
  int32_t n_made = 0;
  const struct quant_spec spec = {.dtype = SITS_DTYPE_I4, .group = k->group, .clip = true, .scales = k->scales};
  buf_init(&image, 1 << 20);
  bool ok = source_open(gguf, &source, &err) == SITS_OK && engine_writer_create(&writer) == SITS_OK;
  for (int64_t i = 0; ok && i < source_n_tensors(source); i++) {
    const struct sits_utd *u = source_tensor_at(source, i);
    const bool is_layer = strncmp(u->name, "blk.", 4) == 0 && u->n_dims == 2;
    ok = !is_layer || quant_convert(u, &spec, NULL, &made[n_made], &err) == SITS_OK;
    ok = ok && (!is_layer || kind_of(&made[n_made].utd) == k->want);
    ok = ok && engine_writer_add_tensor(writer, is_layer ? &made[n_made].utd : u) == SITS_OK;
    n_made += is_layer;
  }
  if (ok) {
    const unsigned char *bytes = gguf_metadata(source_gguf(source), &n_bytes, &n_values, &version);
    put_header(&image, version, 0, n_values);
    buf_append(&image, bytes, n_bytes);
    ok = engine_writer_add_blob(writer, "metadata.gguf", image.data, image.size) == SITS_OK;
  }
  for (int i = 0; ok && i < 2; i++) {
    json_t *meta = meta_of(i);
    ok = meta != NULL && engine_writer_finish(writer, meta, i ? float_path : device_path, &err) == SITS_OK;
    json_decref(meta);
  }
  if (!ok) printf("      %s: %s\n", k->name, err.text);
  engine_writer_destroy(writer);
  for (int32_t i = 0; i < MAX_TENSORS; i++) quant_tensor_fini(&made[i]);
  buf_fini(&image);
  if (source != NULL) source_close(source);
  return ok;
}

/* ---- logits ---- */

static const int32_t steps[] = {1, 20, 200, 300, 600};
enum { N_STEPS = sizeof steps / sizeof *steps };

/* A prompt of n tokens at once: logits of at most ROWS of them, evenly, the last one among them. Returns how many; 0: failed. */
static int32_t prompt(struct runner *runner, int32_t n, float *out)
{
  static int32_t tokens[1024], positions[1024];
  int32_t rows[ROWS], table[PAGES], n_rows = 0;
  const int32_t start[2] = {0, n};
  struct backend_result r = {0};
  for (int32_t i = 0; i < n; i++) tokens[i] = (int32_t)((uint32_t)i * 2654435761U >> 16) % VOCAB, positions[i] = i;
  for (int32_t i = n < ROWS ? ROWS - n : 0; i < ROWS; i++) rows[n_rows++] = n < ROWS ? i - (ROWS - n) : (i + 1) * n / ROWS - 1;
  for (int32_t i = 0; i < PAGES; i++) table[i] = PAGES - 1 - i;
  const struct backend_batch batch = {.n_tokens = n, .n_seqs = 1, .n_rows = n_rows, .tokens = tokens, .positions = positions,
                                      .seq_start = start, .kv_len = &n, .block_table = table, .table_stride = PAGES, .row_token = rows};
  enum sits_status status = runner->vtable->submit(runner->compiled, runner->kv, &batch);
  if (!status) status = runner->vtable->wait(runner->compiled, &r);
  if (status) return 0;
  memcpy(out, r.logits, (size_t)n_rows * VOCAB * sizeof *out);
  return n_rows;
}

static bool open_runner(struct runner *runner, const char *path, const char *device, const char *prefill_weights)
{
  struct sits_error err = {0};
  const struct runner_options options = {
      .model_path = path, .device = device, .kv_codec = "f16",
      .backend = {.max_batch_tokens = 640, .max_seqs = ROWS, .prefill_weights = prefill_weights}};
  enum sits_status status = runner_open(runner, &options, &err);
  if (!status) status = runner_kv_create(runner, PAGES, &err);
  if (status) printf("      %s %s: %s\n", device, path, err.text);
  return status == SITS_OK;
}

/* ---- bands ---- */

struct band { const char *name; double least, most; };
enum product { F16, TOKEN, GROUP, E4M3 };
static const struct band bands[] = {
    {"16 bits", 0, 0.008}, {"8 bits a token", 0.012, 0.05}, {"8 bits a token and group", 0.01, 0.035}, {"e4m3 a token", 0.03, 0.09}};

/* As the table in cuda_gemm.c says. */
static enum product product_of(enum row_scale_kind kind, bool is_resident, int32_t n)
{
  const bool is_powers = kind == ROW_SCALE_POWERS;
  if (n <= 16) return F16;
  if (n > (is_powers && is_resident ? 128 : 256)) return is_powers ? E4M3 : F16;
  return kind == ROW_SCALE_FREE ? GROUP : TOKEN;
}

static void run(const char *gguf, const struct kind *k)
{
  char device_path[64], float_path[64];
  static float want[N_STEPS][ROWS * VOCAB], got[ROWS * VOCAB];
  struct runner runner = {0};
  snprintf(device_path, sizeof device_path, "/tmp/g128_%d_device.bin", (int)getpid());
  snprintf(float_path, sizeof float_path, "/tmp/g128_%d_float.bin", (int)getpid());
  bool ok = write_engines(gguf, k, device_path, float_path) && open_runner(&runner, float_path, "cpu", NULL);
  for (int i = 0; i < N_STEPS && ok; i++) ok = prompt(&runner, steps[i], want[i]) > 0;
  runner_close(&runner);
  verdict(ok, "%s: files and the CPU's logits", k->name);
  for (int is_resident = 0; is_resident < 2 && ok; is_resident++) {
    runner = (struct runner){0};
    ok = open_runner(&runner, device_path, "cuda", is_resident ? "resident" : "expand");
    verdict(ok, "%s, %s: open", k->name, is_resident ? "resident" : "expanded");
    for (int i = 0; i < N_STEPS && ok; i++) {
      const int32_t n_rows = prompt(&runner, steps[i], got);
      const struct band *band = &bands[product_of(k->want, is_resident, steps[i])];
      const double error = n_rows > 0 ? relative_error(got, want[i], (size_t)n_rows * VOCAB) : INFINITY;
      verdict(error >= band->least && error < band->most, "%s, %s, %d tokens: %.4f, %s (%.3f to %.3f)", k->name,
              is_resident ? "resident" : "expanded", steps[i], error, band->name, band->least, band->most);
    }
    runner_close(&runner);
  }
  unlink(device_path);
  unlink(float_path);
}

int main(void)
{
  static const struct kind kinds[] = {{"powers", 128, QUANT_SCALES_POWERS, ROW_SCALE_POWERS},
                                      {"multiples", 128, QUANT_SCALES_MULTIPLES, ROW_SCALE_MULTIPLES},
                                      {"free scales", 128, QUANT_SCALES_F16, ROW_SCALE_FREE},
                                      {"a scale a row", 0, QUANT_SCALES_F16, ROW_SCALE_POWERS}};
  char gguf[64];
  gpu_open();
  snprintf(gguf, sizeof gguf, "/tmp/g128_%d.gguf", (int)getpid());
  const bool ok = write_gguf(gguf);
  verdict(ok, "a model file");
  const size_t n_kinds = gpu_is_small() ? 2 : sizeof kinds / sizeof *kinds;
  for (size_t i = 0; i < n_kinds && ok; i++) run(gguf, &kinds[i]);
  unlink(gguf);
  return gpu_finish();
}
