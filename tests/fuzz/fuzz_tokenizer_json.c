/* Text of a tokenizer.json: load it; when it loads, encode a fixed string with and without special tokens, decode and stream the ids. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/utf8.h"
#include "text/detok.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static const char sample[] = "<s>Hello, world! it's  3.14\n\n caf\xC3\xA9 \xE4\xB8\xAD\xE6\x96\x87 \xF0\x9F\x98\x80 e\xCC\x81 \xFF "
                             "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa</s>";

static void use(const struct tokenizer *tokenizer, unsigned flags)
{
  struct token_list ids = {0};
  struct buf text;
  struct detok *detok = NULL;
  struct detok_piece piece;
  static const char *const stops[] = {"world", "aab"};
  struct detok_options options = {.stops = stops, .n_stops = 2};
  buf_init(&text, 1 << 24);
  if (tokenizer_encode(tokenizer, sample, sizeof sample - 1, flags, &ids) == SITS_OK) {
    for (int64_t i = 0; i < ids.n; i++)
      if (ids.ids[i] < 0 || ids.ids[i] >= tokenizer_n_vocab(tokenizer)) abort();
    if (tokenizer_decode(tokenizer, ids.ids, ids.n, false, &text) == SITS_OK && !utf8_is_valid(text.data, text.size)) abort();
    if (detok_create(tokenizer, &options, &detok) == SITS_OK) {
      for (int64_t i = 0; i < ids.n; i++)
        if (detok_push(detok, ids.ids[i], &piece) || !utf8_is_valid(piece.text, piece.n_bytes)) abort();
      if (detok_finish(detok, &piece)) abort();
    }
  }
  detok_destroy(detok);
  buf_fini(&text);
  token_list_fini(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
  static char path[] = "/dev/shm/sits_fuzz_tokenizer_XXXXXX";
  static int fd = -1;
  struct tokenizer *tokenizer = NULL;
  struct sits_error err = {0};
  if (fd < 0) fd = mkstemp(path);
  if (fd < 0 || ftruncate(fd, 0) || pwrite(fd, data, n_bytes, 0) != (ssize_t)n_bytes) return 0;
  if (tokenizer_load_json(path, &tokenizer, &err) == SITS_OK) {
    use(tokenizer, 0);
    use(tokenizer, TOKENIZER_ADD_SPECIAL | TOKENIZER_PARSE_SPECIAL);
  }
  tokenizer_destroy(tokenizer);
  return 0;
}
