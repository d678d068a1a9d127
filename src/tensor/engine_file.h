/* The engine file (*.bin): one compiled model in one file, mapped at load.
 *
 * Layout, little-endian:
 *   offset  size  what
 *        0     8  magic "SITSENG\0"
 *        8     4  version (ENGINE_FILE_VERSION)
 *       12     4  0x01020304, so that a file of other byte order is told apart
 *       16     8  bytes of the JSON header
 *       24     8  bytes of the whole file
 *       32     8  checksum of the JSON header (hash_bulk)
 *       40        JSON header, then zeros
 *    4096k        sections, each at a multiple of 4,096: tensor data, its scales, its minimums; blobs
 *
 * JSON header: {"meta": {...}, "tensors": [{"name", "dtype", "dims", "quant", "group_size", "group_axis", "scale_dtype", "layout",
 * "tile_name", "data": [offset, bytes], "scales": [offset, bytes], "minimums": [offset, bytes], "checksum": "hex"}], "blobs": [{"name",
 * "data": [offset, bytes], "checksum": "hex"}]}. meta says what the compiler did (recipe, target, kv codec); blobs are files that
 * travel along whole (tokenizer, chat template, the source's own metadata).
 *
 * Rules: 1. Equal input gives equal bytes: nothing of time, host or path is written. 2. A reader refuses other versions and byte orders by
 * name, and every section that is out of bounds, misaligned or overlapping, naming the tensor. 3. Checksums are verified by
 * engine_file_verify, tensor by tensor; a caller may spread that over threads. 4. Everything handed out is borrowed until close.
 */
#ifndef SITS_TENSOR_ENGINE_FILE_H
#define SITS_TENSOR_ENGINE_FILE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sits2026/status.h"
#include "sits2026/utd.h"

#define ENGINE_FILE_VERSION 1
#define ENGINE_FILE_ALIGN 4096

struct engine_file;

/* True when the path's first bytes are the magic. */
bool engine_file_is(const char *path);
enum sits_status engine_file_open(const char *path, struct engine_file **out, struct sits_error *err) SITS_MUST_CHECK;
/* Bytes in memory (tests, fuzzing), borrowed; `name` stands for the path. */
enum sits_status engine_file_parse(const unsigned char *data, size_t n_bytes, const char *name, struct engine_file **out,
                                   struct sits_error *err) SITS_MUST_CHECK;
void engine_file_close(struct engine_file *file);

const json_t *engine_file_meta(const struct engine_file *file); /* an object */
int64_t engine_file_n_tensors(const struct engine_file *file);
const struct sits_utd *engine_file_tensor_at(const struct engine_file *file, int64_t index);
int64_t engine_file_n_blobs(const struct engine_file *file);
const char *engine_file_blob_name(const struct engine_file *file, int64_t index);
const unsigned char *engine_file_blob(const struct engine_file *file, const char *name, size_t *n_bytes); /* NULL when absent */
uint64_t engine_file_bytes(const struct engine_file *file);
/* Let the kernel drop the pages of a tensor whose bytes have been copied. */
void engine_file_drop(const struct engine_file *file, const struct sits_utd *tensor);

/* Check the checksums of tensors [first, last) (all when last < 0) and, with first == 0, of the blobs. SITS_FORMAT names the first bad. */
enum sits_status engine_file_verify(const struct engine_file *file, int64_t first, int64_t last, struct sits_error *err) SITS_MUST_CHECK;

/* Writing: add everything, then finish. Data is borrowed until finish, which streams it to `path`.part and renames. */
struct engine_writer;
enum sits_status engine_writer_create(struct engine_writer **out) SITS_MUST_CHECK;
/* utd: name, dtype, dims, quant, layout; data, scales and minimums on the host. n_bytes is of data; the others follow from the groups. */
enum sits_status engine_writer_add_tensor(struct engine_writer *writer, const struct sits_utd *utd) SITS_MUST_CHECK;
enum sits_status engine_writer_add_blob(struct engine_writer *writer, const char *name, const void *bytes, size_t n_bytes) SITS_MUST_CHECK;
/* meta: an object, borrowed. */
enum sits_status engine_writer_finish(struct engine_writer *writer, const json_t *meta, const char *path, struct sits_error *err)
    SITS_MUST_CHECK;
void engine_writer_destroy(struct engine_writer *writer);

/* Scales (and minimums) a quantised tensor has: one per group along group_axis, or per channel; 0 when not quantised, -1 when malformed. */
int64_t engine_file_n_groups(const struct sits_utd *utd);

#endif
