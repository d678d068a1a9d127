/* Log probabilities in OpenAI's two shapes: chat's list of objects and completions' four parallel lists. Used by http_reply.c only. */
#ifndef SITS_FRONT_HTTP_HTTP_LOGPROBS_H
#define SITS_FRONT_HTTP_HTTP_LOGPROBS_H

#include "front/http/http_reply.h"

/* Append entries {"token", "logprob", "bytes", "top_logprobs"} to a comma-separated list. */
void http_logprobs_append_chat(struct http_reply *reply, const struct api_token *tokens, int32_t n, struct buf *list);
void http_logprobs_append_chat_object(const struct buf *list, struct buf *out);

/* Append a delta's tokens to the choice's four lists (tokens, token_logprobs, top_logprobs, text_offset). */
void http_logprobs_append_legacy(struct http_reply *reply, struct http_choice *choice, const struct api_delta *delta);
void http_logprobs_append_legacy_object(const struct buf lists[4], struct buf *out);

#endif
