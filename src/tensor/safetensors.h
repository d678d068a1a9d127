/* One safetensors file, mapped and checked. Format: https://github.com/huggingface/safetensors#format
 * An 8-byte little-endian header size, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes, which the tensors must fill
 * without overlap or hole. source.h joins the shards of a directory. Read-only after open: any thread may read. */
#ifndef SITS_TENSOR_SAFETENSORS_H
#define SITS_TENSOR_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "sits2026/status.h"
#include "sits2026/utd.h"

struct safetensors;

enum sits_status safetensors_open(const char *path, struct safetensors **out, struct sits_error *err) SITS_MUST_CHECK;
/* Parse bytes in memory (tests, fuzzing); borrowed. `name` stands for the path in errors. */
enum sits_status safetensors_parse(const unsigned char *data, size_t n_bytes, const char *name, struct safetensors **out,
                                   struct sits_error *err) SITS_MUST_CHECK;
void safetensors_close(struct safetensors *file);

int64_t safetensors_n_tensors(const struct safetensors *file);
const struct sits_utd *safetensors_tensor_at(const struct safetensors *file, int64_t index); /* NULL when out of range */
/* Let the kernel drop the tensor's pages; nothing happens when the tensor is not of this file. */
void safetensors_drop_pages(const struct safetensors *file, const struct sits_utd *tensor);
uint64_t safetensors_file_bytes(const struct safetensors *file);

#endif
