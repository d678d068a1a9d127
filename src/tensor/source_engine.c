/* An engine file as a source: its tensors under their origin's names, its metadata from the blobs that travel along. Entry point:
 * source_open_engine. Blobs of a GGUF origin: "metadata.gguf", a GGUF file of keys and values without tensors. Of a Hugging Face origin:
 * "config.json", "tokenizer.json" and others under their file names. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/cores.h"
#include "base/json.h"
#include "base/mem.h"
#include "tensor/gguf.h"
#include "tensor/source_internal.h"

#define MOST_THREADS 8
#define CLAIM 4                          /* tensors that a thread verifies at a time */

struct verifier {
  const struct engine_file *file;
  _Atomic int64_t next;
  _Atomic int has_failed;
  struct sits_error error;               /* of the first failure */
};

static void *verify_some(void *arg)
{
  struct verifier *v = arg;
  int64_t n = engine_file_n_tensors(v->file);
  for (int64_t first; (first = atomic_fetch_add(&v->next, CLAIM)) < n || first == 0;) {
    struct sits_error err = {0};
    int64_t last = first + CLAIM < n ? first + CLAIM : n;
    if (engine_file_verify(v->file, first, last, &err) == SITS_OK) continue;
    if (atomic_exchange(&v->has_failed, 1) == 0) v->error = err;
  }
  return NULL;
}

/* The calling thread works too, so a machine that grants no threads only takes longer. */
static enum sits_status verify(const struct engine_file *file, struct sits_error *err)
{
  struct verifier v = {.file = file};
  pthread_t threads[MOST_THREADS];
  int n_cores = cores_usable();
  int n_threads = 0;
  while (n_threads + 1 < n_cores && n_threads < MOST_THREADS &&
         pthread_create(&threads[n_threads], NULL, verify_some, &v) == 0) n_threads++;
  verify_some(&v);
  for (int i = 0; i < n_threads; i++) pthread_join(threads[i], NULL);
  return atomic_load(&v.has_failed) ? sits_fail_param(err, v.error.status, v.error.param, "%s", v.error.text) : SITS_OK;
}

static enum sits_status index_engine_tensors(struct source *s, struct sits_error *err)
{
  int64_t n = engine_file_n_tensors(s->engine);
  s->tensors = mem_calloc((size_t)n, sizeof *s->tensors);
  if (!s->tensors || !name_index_init(&s->index, (uint64_t)n)) return sits_fail(err, SITS_NOMEM, "%s: out of memory", s->name);
  for (; s->n_tensors < n; s->n_tensors++) {
    const struct sits_utd *utd = engine_file_tensor_at(s->engine, s->n_tensors);
    if (!name_index_add(&s->index, utd->name, strlen(utd->name), (uint32_t)s->n_tensors))
      return sits_fail_param(err, SITS_FORMAT, utd->name, "%s: tensor '%s' is there twice", s->name, utd->name);
    s->tensors[s->n_tensors] = utd;
  }
  return SITS_OK;
}

enum sits_status source_open_engine(struct source *s, struct sits_error *err)
{
  enum sits_status status = engine_file_open(s->path, &s->engine, err);
  if (!status) status = verify(s->engine, err);
  if (!status) status = index_engine_tensors(s, err);
  if (status) return status;
  const char *origin = json_string_value(json_object_get(engine_file_meta(s->engine), "origin"));
  bool is_gguf = origin && strcmp(origin, "gguf") == 0;
  if (!is_gguf && !(origin && strcmp(origin, "hf") == 0))
    return sits_fail_param(err, SITS_FORMAT, "origin", "%s: the file does not say what it was made from", s->name);
  const char *blob = is_gguf ? "metadata.gguf" : "config.json";
  size_t n_bytes = 0;
  const unsigned char *bytes = engine_file_blob(s->engine, blob, &n_bytes);
  if (!bytes) return sits_fail_param(err, SITS_FORMAT, blob, "%s: '%s' is missing", s->name, blob);
  s->kind = is_gguf ? SOURCE_GGUF : SOURCE_HF;
  if (is_gguf) {
    status = gguf_parse(bytes, n_bytes, s->path, &s->gguf, err);
    if (!status && gguf_n_tensors(s->gguf) > 0)
      status = sits_fail_param(err, SITS_FORMAT, blob, "%s: '%s' holds tensors", s->name, blob);
    return status;
  }
  struct sits_error inner = {0};
  status = json_parse((const char *)bytes, n_bytes, &json_limits_request, &s->config, &inner);
  if (status) return sits_fail_param(err, SITS_FORMAT, blob, "%s: '%s': %s", s->name, blob, inner.text);
  return json_is_object(s->config) ? SITS_OK : sits_fail_param(err, SITS_FORMAT, blob, "%s: '%s' is no object", s->name, blob);
}
