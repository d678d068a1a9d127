/* Between source.c and source_engine.c: what an open source consists of. */
#ifndef SITS_TENSOR_SOURCE_INTERNAL_H
#define SITS_TENSOR_SOURCE_INTERNAL_H

#include "base/arena.h"
#include "tensor/engine_file.h"
#include "tensor/name_index.h"
#include "tensor/safetensors.h"
#include "tensor/source.h"

struct source {
  enum source_kind kind;
  char *path;
  const char *name;                     /* tail of path, for errors */
  struct gguf *gguf;                    /* GGUF file, or the metadata that an engine file carries */
  struct engine_file *engine;           /* NULL unless an engine file */
  /* Hugging Face directory */
  struct arena arena;                   /* paths of files */
  const char **files;                   /* [n_files] full paths */
  size_t n_files, files_capacity;
  json_t *config;
  struct safetensors **shards;          /* [n_shards] */
  size_t n_shards, shards_capacity;
  /* Hugging Face directory and engine file */
  const struct sits_utd **tensors;      /* [n_tensors] */
  int64_t n_tensors;
  struct name_index index;
};

/* s->path and s->name are set. */
enum sits_status source_open_engine(struct source *s, struct sits_error *err) SITS_MUST_CHECK;

#endif
