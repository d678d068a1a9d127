/* Fuzz target: any bytes as a GGUF file, then, where the reader takes them, as a model. Refusals must carry text; what is accepted must be
 * readable to the last byte. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mem.h"
#include "model/model.h"
#include "tensor/dequant.h"
#include "tensor/gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_keys(const struct gguf *g)
{
  static const char *const keys[] = {"general.architecture", "general.alignment", "tokenizer.ggml.tokens", "tokenizer.ggml.scores",
                                     "tokenizer.ggml.token_type", "llama.block_count", "llama.rope.freq_base", "a"};
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    uint64_t u, n;
    int64_t s;
    double d;
    bool b;
    enum gguf_type type;
    struct gguf_string text;
    volatile char last = 0;
    (void)gguf_get_u64(g, keys[i], &u);
    (void)gguf_get_i64(g, keys[i], &s);
    (void)gguf_get_f64(g, keys[i], &d);
    (void)gguf_get_bool(g, keys[i], &b);
    if (gguf_get_string(g, keys[i], &text) && text.size > 0) last = text.data[text.size - 1];
    if (!gguf_get_array(g, keys[i], &type, &n)) continue;
    for (uint64_t k = 0; k < n; k++) {
      if (gguf_array_string(g, keys[i], k, &text) && text.size > 0) last = text.data[text.size - 1];
      (void)gguf_array_i64(g, keys[i], k, &s);
      (void)gguf_array_f64(g, keys[i], k, &d);
    }
    (void)last;
    if (gguf_array_i64(g, keys[i], n, &s) || gguf_array_string(g, keys[i], n, &text)) abort();
  }
}

static void read_tensors(const struct gguf *g)
{
  for (int64_t i = 0; i < gguf_n_tensors(g); i++) {
    const struct sits_utd *t = gguf_tensor_at(g, i);
    if (gguf_tensor(g, t->name) != t) abort();
    volatile unsigned char last = ((const unsigned char *)t->data)[t->n_bytes - 1];
    (void)last;
    bool has_codec = t->dtype <= SITS_DTYPE_I8 || (t->dtype >= SITS_DTYPE_Q4_0 && t->dtype <= SITS_DTYPE_Q6_K);
    int64_t n = sits_utd_elements(t);
    if (!has_codec || n > 1 << 16) continue;
    float *values = mem_alloc((size_t)n * sizeof *values);
    dequant_row(t->dtype, t->data, n, values);
    mem_free(values);
  }
}

static void open_as_model(const uint8_t *data, size_t size)
{
  char path[64];
  struct model *model = NULL;
  struct sits_error err = {0};
  int fd = memfd_create("fuzz.gguf", MFD_CLOEXEC);
  if (fd < 0) return;
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  if (write(fd, data, size) == (ssize_t)size) {
    if (model_open(path, &model, &err)) {
      if (!err.text[0] || model) abort();
    } else {
      if (!model->tok_embd || !model->output || !model->layers[model->config.n_layers - 1].w_down) abort();
      model_close(model);
    }
  }
  close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  unsigned char *copy = mem_aligned(64, size); /* as aligned as a mapped file, and with a guarded end */
  struct gguf *g = NULL;
  struct sits_error err = {0};
  if (size > 0) memcpy(copy, data, size);
  if (gguf_parse(copy, size, "fuzz.gguf", &g, &err)) {
    if (!err.text[0] || g) abort();
  } else {
    read_keys(g);
    read_tensors(g);
    gguf_close(g);
    open_as_model(data, size);
  }
  mem_free(copy);
  if (mem_live_blocks() != 0) abort();
  return 0;
}
