/* The pre-tokenizers that GGUF files name in tokenizer.ggml.pre (the names are llama.cpp's). To add one: a row in tokenizer_gguf_pre.c. */
#ifndef SITS_TEXT_TOKENIZER_GGUF_PRE_H
#define SITS_TEXT_TOKENIZER_GGUF_PRE_H

#include "text/tokenizer_internal.h"

/* Set the pre-tokenizer (and ignore_merges) that goes with the name; *adds_bos: whether it has a BOS unless the file says otherwise.
 * SITS_UNSUPPORTED naming an unknown one. */
enum sits_status tokenizer_gguf_pre(struct tokenizer *tokenizer, const char *name, size_t n_bytes, bool *adds_bos, struct sits_error *err)
    SITS_MUST_CHECK;

#endif
