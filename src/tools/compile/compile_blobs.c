/* What travels along with the tensors: the source's own metadata, tokenizer and chat template. Entry points: compile_blobs_add,
 * compile_blobs_fini. */
#include "base/mem.h"
#include "tensor/gguf.h"
#include "tools/compile/compile.h"

static bool append_u32(struct buf *b, uint32_t v) { return buf_append(b, &v, sizeof v); }
static bool append_u64(struct buf *b, uint64_t v) { return buf_append(b, &v, sizeof v); }

/* All keys and values, no tensors. */
static enum sits_status add_gguf_blob(struct compile_blobs *blobs, const struct source *source, struct engine_writer *writer,
                                      struct sits_error *err)
{
  size_t n_bytes;
  uint64_t n_values;
  uint32_t version;
  const unsigned char *bytes = gguf_metadata(source_gguf(source), &n_bytes, &n_values, &version);
  struct buf *b = &blobs->list[blobs->n++];
  buf_init(b, n_bytes + 64);
  if (!buf_append(b, "GGUF", 4) || !append_u32(b, version) || !append_u64(b, 0) || !append_u64(b, n_values) ||
      !buf_append(b, bytes, n_bytes))
    return sits_fail(err, SITS_NOMEM, "out of memory for the metadata");
  return engine_writer_add_blob(writer, "metadata.gguf", b->data, b->size);
}

static const char *const hf_files[] = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
                                       "chat_template.jinja"};
enum { N_HF_FILES = sizeof hf_files / sizeof hf_files[0] };

/* A prepared model's blobs are its origin's. */
static enum sits_status add_engine_blobs(const struct engine_file *file, struct engine_writer *writer)
{
  enum sits_status status = SITS_OK;
  for (int64_t i = 0; i < engine_file_n_blobs(file) && !status; i++) {
    size_t n_bytes;
    const char *name = engine_file_blob_name(file, i);
    const unsigned char *bytes = engine_file_blob(file, name, &n_bytes);
    status = engine_writer_add_blob(writer, name, bytes, n_bytes);
  }
  return status;
}

enum sits_status compile_blobs_add(struct compile_blobs *blobs, const struct source *source, struct engine_writer *writer,
                                   struct sits_error *err)
{
  enum sits_status status = SITS_OK;
  if (source_engine(source)) {
    status = add_engine_blobs(source_engine(source), writer);
    return status ? sits_fail(err, status, "out of memory for the metadata") : SITS_OK;
  }
  blobs->list = mem_calloc(N_HF_FILES, sizeof *blobs->list);
  if (!blobs->list) return sits_fail(err, SITS_NOMEM, "out of memory");
  if (source_kind(source) == SOURCE_GGUF) return add_gguf_blob(blobs, source, writer, err);
  for (int i = 0; i < N_HF_FILES && !status; i++) {
    if (!source_hf_has(source, hf_files[i])) continue;
    struct buf *b = &blobs->list[blobs->n++];
    buf_init(b, (size_t)256 << 20);
    status = source_hf_read(source, hf_files[i], b, err);
    if (!status) status = engine_writer_add_blob(writer, hf_files[i], b->data ? b->data : "", b->size);
  }
  return status;
}

void compile_blobs_fini(struct compile_blobs *blobs)
{
  for (int i = 0; i < blobs->n; i++) buf_fini(&blobs->list[i]);
  mem_free(blobs->list);
  *blobs = (struct compile_blobs){0};
}
