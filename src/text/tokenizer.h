/* Tokenizer: text to ids and back. Byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece-style BPE with byte fallback (Llama 2,
 * Mistral), from a Hugging Face tokenizer.json or a GGUF vocabulary. Same ids as Hugging Face tokenizers / llama.cpp, case by case.
 *
 * Rules: 1. Immutable after load: any thread may encode and decode at once. 2. Without TOKENIZER_PARSE_SPECIAL, text that looks like a
 * special token is plain text: content from users never becomes a special token. 3. Encoding is linear (or n log n) in the text's length.
 * 4. Added tokens that the model does not mark as special (Qwen's <tool_call>) are ordinary words and are recognised either way. */
#ifndef SITS_TEXT_TOKENIZER_H
#define SITS_TEXT_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "sits2026/status.h"
#include "tensor/source.h"

struct tokenizer;

enum tokenizer_flags {
  TOKENIZER_ADD_SPECIAL = 1,   /* what the model's post-processor adds (BOS, EOS) */
  TOKENIZER_PARSE_SPECIAL = 2, /* special tokens written out in the text are recognised */
};

struct token_list { int32_t *ids; int64_t n, capacity; };  /* init to {0}; free with token_list_fini */
void token_list_fini(struct token_list *list);
bool token_list_push(struct token_list *list, int32_t id); /* false: out of memory */

enum sits_status tokenizer_load_json(const char *tokenizer_json_path, struct tokenizer **out, struct sits_error *err) SITS_MUST_CHECK;
/* The same from its text; `name` stands for the path in errors. */
enum sits_status tokenizer_parse_json(const char *text, size_t n_bytes, const char *name, struct tokenizer **out, struct sits_error *err)
    SITS_MUST_CHECK;
enum sits_status tokenizer_load_gguf(const struct gguf *gguf, struct tokenizer **out, struct sits_error *err) SITS_MUST_CHECK;
/* From whatever the model is (GGUF metadata, or tokenizer.json + tokenizer_config.json of the directory). */
enum sits_status tokenizer_load(const struct source *source, struct tokenizer **out, struct sits_error *err) SITS_MUST_CHECK;
/* For a model without a vocabulary: ids below 256 are bytes, the others numbers. n_vocab: 256 or more. */
enum sits_status tokenizer_numbered(int32_t n_vocab, struct tokenizer **out, struct sits_error *err) SITS_MUST_CHECK;
void tokenizer_destroy(struct tokenizer *tokenizer);

/* Append the ids of text (UTF-8; invalid bytes are replaced by U+FFFD first) to out. */
enum sits_status tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t n_bytes, unsigned flags,
                                  struct token_list *out) SITS_MUST_CHECK;
/* The same of a text that others wrote in part: no special token begins at a byte where guards ([n_bytes]; NULL: none) is true. All else is
 * as without guards. SITS_INVALID_ARGUMENT when the text is no UTF-8. */
enum sits_status tokenizer_encode_guarded(const struct tokenizer *tokenizer, const char *text, size_t n_bytes, unsigned flags,
                                          const bool *guards, struct token_list *out) SITS_MUST_CHECK;

/* Append the raw bytes of one token as decoding in the middle of a text would give them (may be part of a character).
 * skip_special: special tokens give nothing. Unknown ids give nothing. */
bool tokenizer_token_bytes(const struct tokenizer *tokenizer, int32_t id, bool skip_special, struct buf *out);

/* Whole-sequence decode, with the model's decoder rules (leading space stripped and so on); bytes may be invalid UTF-8: they are
 * replaced per maximal subpart. */
enum sits_status tokenizer_decode(const struct tokenizer *tokenizer, const int32_t *ids, int64_t n, bool skip_special,
                                  struct buf *out) SITS_MUST_CHECK;

/* Whether both give every id the same text and kind. No: *id is the first that differs. */
bool tokenizer_same(const struct tokenizer *a, const struct tokenizer *b, int32_t *id);
int32_t tokenizer_n_vocab(const struct tokenizer *tokenizer);   /* 1 + largest id */
int32_t tokenizer_bos(const struct tokenizer *tokenizer);       /* -1 when none */
int32_t tokenizer_eos(const struct tokenizer *tokenizer);
bool tokenizer_adds_bos(const struct tokenizer *tokenizer);
bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id);
/* Tokens that end a turn (eos, eot, <|im_end|>, generation_config's list); borrowed, *n set. */
const int32_t *tokenizer_end_tokens(const struct tokenizer *tokenizer, int32_t *n);
/* The token's own text in the vocabulary (borrowed, may be a byte-level alias), NULL when unknown. For logs and logprobs. */
const char *tokenizer_piece(const struct tokenizer *tokenizer, int32_t id, size_t *n_bytes);
/* Id of a token by its exact content, -1 when none. */
int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *piece, size_t n_bytes);

#endif
