/* CPU time of loading a tokenizer and of encoding and decoding a text on one thread, best of several runs; one JSON object on stdout.
 * Usage: bench_tokenizer_speed TOKENIZER (tokenizer.json or .gguf) TEXT [RUNS (5)] [lines]. With "lines", each line is one call.
 * bench/tokenizer_speed.py runs it beside Hugging Face tokenizers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mapfile.h"
#include "base/sha256.h"
#include "tensor/gguf.h"
#include "text/tokenizer.h"

/* CPU time of this thread: on a busy machine the wall clock measures the neighbours. */
static int64_t now_us(void)
{
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static enum sits_status load(const char *path, struct tokenizer **out, struct sits_error *err)
{
  size_t n = strlen(path);
  struct gguf *gguf = NULL;
  if (n < 5 || strcmp(path + n - 5, ".gguf") != 0) return tokenizer_load_json(path, out, err);
  enum sits_status status = gguf_open(path, &gguf, err);
  if (!status) status = tokenizer_load_gguf(gguf, out, err);
  gguf_close(gguf);
  return status;
}

/* One pass over the text; ids are left in `ids`. */
static enum sits_status encode(const struct tokenizer *tokenizer, const struct mapfile *text, bool by_line, struct token_list *ids)
{
  const char *at = (const char *)text->data, *end = at + text->n_bytes;
  enum sits_status status = SITS_OK;
  ids->n = 0;
  if (!by_line) return tokenizer_encode(tokenizer, at, text->n_bytes, 0, ids);
  while (at < end && !status) {
    const char *newline = memchr(at, '\n', (size_t)(end - at)), *next = newline ? newline + 1 : end;
    status = tokenizer_encode(tokenizer, at, (size_t)(next - at), 0, ids);
    at = next;
  }
  return status;
}

int main(int argc, char **argv)
{
  struct tokenizer *tokenizer = NULL;
  struct sits_error err = {0};
  struct mapfile text = {0};
  struct token_list ids = {0};
  struct buf decoded;
  char hex[SHA256_HEX_BYTES];
  int n_runs = argc > 3 ? (int)strtol(argv[3], NULL, 10) : 5;
  bool by_line = argc > 4 && strcmp(argv[4], "lines") == 0;
  int64_t best_encode = INT64_MAX, best_decode = INT64_MAX, start = now_us();
  buf_init(&decoded, SIZE_MAX / 4);
  if (argc < 3) {
    fputs("usage: bench_tokenizer_speed TOKENIZER TEXT [RUNS] [lines]\n", stderr);
    return 2;
  }
  enum sits_status status = load(argv[1], &tokenizer, &err);
  int64_t load_us = now_us() - start, first_us = 0;
  if (!status) status = mapfile_open(&text, argv[2], &err);
  for (int i = 0; i < n_runs && !status; i++) {
    start = now_us();
    status = encode(tokenizer, &text, by_line, &ids);
    int64_t took = now_us() - start;
    if (i == 0) first_us = took;
    if (took < best_encode) best_encode = took;
    buf_clear(&decoded);
    start = now_us();
    if (!status) status = tokenizer_decode(tokenizer, ids.ids, ids.n, false, &decoded);
    took = now_us() - start;
    if (took < best_decode) best_decode = took;
  }
  if (status) {
    fprintf(stderr, "%s: %s\n", sits_status_info(status)->name, err.text);
  } else {
    sha256_hex(ids.ids, (size_t)ids.n * sizeof *ids.ids, hex);
    printf("{\"load_ms\": %.1f, \"encode_first_ms\": %.2f, \"encode_ms\": %.2f, \"encode_mb_s\": %.1f, ", load_us / 1e3, first_us / 1e3,
           best_encode / 1e3, (double)text.n_bytes / best_encode);
    printf("\"decode_ms\": %.2f, \"n_tokens\": %lld, \"ids_sha256\": \"%s\"}\n", best_decode / 1e3, (long long)ids.n, hex);
  }
  buf_fini(&decoded);
  token_list_fini(&ids);
  mapfile_close(&text);
  tokenizer_destroy(tokenizer);
  return status ? 1 : 0;
}
