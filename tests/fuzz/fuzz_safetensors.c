/* Fuzz target: any bytes as a safetensors file. Refusals must carry text; accepted tensors must tile the data and be readable. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "tensor/dequant.h"
#include "tensor/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_tensors(const struct safetensors *f, size_t size)
{
  size_t total = 0;
  for (int64_t i = 0; i < safetensors_n_tensors(f); i++) {
    const struct sits_utd *t = safetensors_tensor_at(f, i);
    total += t->n_bytes;
    if (t->n_bytes == 0) continue;
    volatile unsigned char last = ((const unsigned char *)t->data)[t->n_bytes - 1];
    (void)last;
    int64_t n = sits_utd_elements(t);
    if (t->dtype > SITS_DTYPE_I8 || n > 1 << 16) continue;
    float *values = mem_alloc((size_t)n * sizeof *values);
    dequant_row(t->dtype, t->data, n, values);
    mem_free(values);
  }
  if (total > size) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  unsigned char *copy = mem_aligned(64, size);
  struct safetensors *f = NULL;
  struct sits_error err = {0};
  if (size > 0) memcpy(copy, data, size);
  if (safetensors_parse(copy, size, "fuzz.safetensors", &f, &err)) {
    if (!err.text[0] || f) abort();
  } else {
    read_tensors(f, size);
    safetensors_close(f);
  }
  mem_free(copy);
  if (mem_live_blocks() != 0) abort();
  return 0;
}
