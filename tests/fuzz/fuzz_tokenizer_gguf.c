/* Any bytes as a GGUF file with a vocabulary: parse, load the tokenizer, encode a fixed string, decode the ids. */
#include <stdint.h>
#include <stdlib.h>

#include "base/utf8.h"
#include "tensor/gguf.h"
#include "text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
  static const char sample[] = "<s>once upon a time, 3.14\n\n caf\xC3\xA9 \xE4\xB8\xAD \xFF </s> "
                               "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
  struct gguf *gguf = NULL;
  struct tokenizer *tokenizer = NULL;
  struct sits_error err = {0};
  if (gguf_parse(data, n_bytes, "fuzz", &gguf, &err)) return 0;
  enum sits_status status = tokenizer_load_gguf(gguf, &tokenizer, &err);
  gguf_close(gguf);
  if (status) return 0;
  struct token_list ids = {0};
  struct buf text;
  buf_init(&text, 1 << 24);
  if (tokenizer_encode(tokenizer, sample, sizeof sample - 1, TOKENIZER_ADD_SPECIAL | TOKENIZER_PARSE_SPECIAL, &ids) == SITS_OK) {
    for (int64_t i = 0; i < ids.n; i++)
      if (ids.ids[i] < 0 || ids.ids[i] >= tokenizer_n_vocab(tokenizer)) abort();
    if (tokenizer_decode(tokenizer, ids.ids, ids.n, true, &text) == SITS_OK && text.size && !utf8_is_valid(text.data, text.size)) abort();
  }
  buf_fini(&text);
  token_list_fini(&ids);
  tokenizer_destroy(tokenizer);
  return 0;
}
