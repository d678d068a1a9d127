/* A model on disk, whatever its form: a GGUF file, a Hugging Face directory (config.json, tokenizer.json, *.safetensors, single or
 * sharded), or an engine file made from either. An engine file keeps its origin's tensor names and carries its metadata along, so that its
 * kind is the origin's and what reads metadata needs not know. Its checksums are verified when it is opened, by a few threads. It maps
 * the files, checks them, and hands out tensors and metadata; it knows no architecture.
 *
 * Rules: 1. Every offset, count and size read from a file is checked before use; hostile files give an error naming the tensor or key.
 *        2. Everything handed out is borrowed and lives until source_close. 3. Read-only after open: any thread may read.
 */
#ifndef SITS_TENSOR_SOURCE_H
#define SITS_TENSOR_SOURCE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "sits2026/status.h"
#include "sits2026/utd.h"

struct source;
struct gguf;
struct engine_file;

enum source_kind { SOURCE_GGUF, SOURCE_HF };

/* SITS_NOT_FOUND, SITS_FORMAT, SITS_UNSUPPORTED, SITS_IO, SITS_NOMEM. */
enum sits_status source_open(const char *path, struct source **out, struct sits_error *err) SITS_MUST_CHECK;
void source_close(struct source *source);

enum source_kind source_kind(const struct source *source);
const char *source_path(const struct source *source);
const struct gguf *source_gguf(const struct source *source);     /* NULL unless GGUF */
const json_t *source_hf_config(const struct source *source);     /* config.json, NULL unless HF */
/* A text file of an HF model ("tokenizer.json"), from the directory or the engine file: is it there, and its bytes, appended to out.
 * SITS_NOT_FOUND, SITS_IO, SITS_TOO_LARGE beyond the buffer's limit. */
bool source_hf_has(const struct source *source, const char *name);
enum sits_status source_hf_read(const struct source *source, const char *name, struct buf *out, struct sits_error *err) SITS_MUST_CHECK;
const struct engine_file *source_engine(const struct source *source); /* NULL unless an engine file */
const json_t *source_engine_meta(const struct source *source);   /* what the compiler wrote down; NULL unless an engine file */
/* Path of a file inside the HF directory ("tokenizer.json"), NULL when absent or not HF. Borrowed. */
const char *source_hf_file(const struct source *source, const char *name);

int64_t source_n_tensors(const struct source *source);
const struct sits_utd *source_tensor_at(const struct source *source, int64_t index);
const struct sits_utd *source_tensor(const struct source *source, const char *name); /* NULL when absent; O(1) */
/* The tensor's bytes have been copied: let the kernel drop its pages. */
void source_drop_pages(const struct source *source, const struct sits_utd *tensor);
/* Bytes of all tensor files. */
uint64_t source_file_bytes(const struct source *source);
/* Of the files' sizes, and of each tensor's name, type and data, which are read for it: another number for other weights. */
uint64_t source_fingerprint(const struct source *source);

#endif
