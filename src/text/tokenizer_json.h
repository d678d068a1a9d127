/* The component readers of tokenizer.json (tokenizer_json_steps.c); only tokenizer_json*.c include this. */
#ifndef SITS_TEXT_TOKENIZER_JSON_H
#define SITS_TEXT_TOKENIZER_JSON_H

#include <jansson.h>

#include "text/tokenizer_internal.h"

/* A decoder as a list of operations on one token's text; what concerns the whole text is kept in the tokenizer (strip_start, ...). */
enum decode_kind { DECODE_REPLACE, DECODE_BYTE_FALLBACK, DECODE_BYTE_LEVEL, DECODE_STRIP };
struct decode_op { enum decode_kind kind; const char *pattern, *content; size_t pattern_bytes, content_bytes; int start, stop; };
struct decoder { struct decode_op ops[8]; int n; bool is_fused; }; /* texts borrowed from the JSON */

enum sits_status tokenizer_json_normalizer(struct tokenizer *tokenizer, const json_t *value, struct sits_error *err) SITS_MUST_CHECK;
/* Sets bpe.is_byte_level when a ByteLevel is met. */
enum sits_status tokenizer_json_pre_tokenizer(struct tokenizer *tokenizer, const json_t *value, struct sits_error *err) SITS_MUST_CHECK;
enum sits_status tokenizer_json_decoder(struct tokenizer *tokenizer, const json_t *value, struct decoder *decoder, struct sits_error *err)
    SITS_MUST_CHECK;
/* Append what one token decodes to. */
bool tokenizer_json_decode_token(const struct decoder *decoder, const char *piece, size_t n_bytes, struct buf scratch[2], struct buf *out);
enum sits_status tokenizer_json_post_processor(struct tokenizer *tokenizer, const json_t *value, struct sits_error *err) SITS_MUST_CHECK;

/* Member helpers: the type's name ("" when absent), a bool with a default. */
const char *tokenizer_json_type(const json_t *value);
bool tokenizer_json_bool(const json_t *value, const char *key, bool fallback);

#endif
