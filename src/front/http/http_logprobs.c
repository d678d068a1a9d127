/* See http_logprobs.h. */
#include "front/http/http_logprobs.h"

#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

static void append_logprob(struct buf *out, float logprob)
{
  if (!(logprob > SITS_LOGPROB_FLOOR)) logprob = SITS_LOGPROB_FLOOR; /* also NaN */
  if (logprob > 0) logprob = 0;
  char text[32];
  int n = snprintf(text, sizeof text, "%.7g", (double)logprob);
  buf_append(out, text, (size_t)n);
  if (!strpbrk(text, ".e")) buf_append(out, ".0", 2); /* a float stays a float for typed clients */
}

/* The token's bytes as the inside of a JSON string, left in reply->scratch too. A token that is no whole text is written as \xNN escapes,
 * as OpenAI does. */
static void append_token_text(struct http_reply *reply, int32_t id, bool is_legacy, struct buf *out)
{
  struct buf *bytes = &reply->scratch;
  buf_clear(bytes);
  tokenizer_token_bytes(reply->tokenizer, id, false, bytes);
  const char *data = bytes->data ? bytes->data : "";
  if (utf8_is_valid(data, bytes->size)) {
    buf_append_json_escaped(out, data, bytes->size);
    return;
  }
  if (is_legacy) buf_append_text(out, "bytes:");
  for (size_t i = 0; i < bytes->size; i++) buf_printf(out, "\\\\x%02x", (unsigned char)data[i]);
}

static void append_chat_entry(struct http_reply *reply, int32_t id, float logprob, struct buf *out)
{
  buf_append_text(out, "{\"token\":\"");
  append_token_text(reply, id, false, out);
  buf_append_text(out, "\",\"logprob\":");
  append_logprob(out, logprob);
  buf_append_text(out, ",\"bytes\":[");
  for (size_t i = 0; i < reply->scratch.size; i++) buf_printf(out, i ? ",%u" : "%u", (unsigned char)reply->scratch.data[i]);
  buf_append_char(out, ']');
}

void http_logprobs_append_chat(struct http_reply *reply, const struct api_token *tokens, int32_t n, struct buf *list)
{
  for (int32_t i = 0; i < n; i++) {
    if (list->size) buf_append_char(list, ',');
    append_chat_entry(reply, tokens[i].id, tokens[i].logprob, list);
    buf_append_text(list, ",\"top_logprobs\":[");
    for (int32_t k = 0; k < tokens[i].n_top; k++) {
      if (k) buf_append_char(list, ',');
      append_chat_entry(reply, tokens[i].top_ids[k], tokens[i].top_logprobs[k], list);
      buf_append_char(list, '}');
    }
    buf_append_text(list, "]}");
  }
}

void http_logprobs_append_chat_object(const struct buf *list, struct buf *out)
{
  buf_append_text(out, "{\"content\":[");
  if (list->size) buf_append(out, list->data, list->size);
  buf_append_text(out, "],\"refusal\":null}");
}

static bool is_same_text(struct http_reply *reply, int32_t a, int32_t b)
{
  if (a == b) return true;
  struct buf *both = &reply->scratch;
  buf_clear(both);
  tokenizer_token_bytes(reply->tokenizer, a, false, both);
  size_t n = both->size;
  tokenizer_token_bytes(reply->tokenizer, b, false, both);
  return both->size == 2 * n && (n == 0 || !memcmp(both->data, both->data + n, n));
}

/* {"text": logprob, ...} of the best and of the token itself; of two tokens with one text the better stands. */
static void append_legacy_top(struct http_reply *reply, const struct api_token *token, struct buf *out)
{
  bool has_any = false;
  buf_append_char(out, '{');
  for (int32_t k = 0; k <= token->n_top; k++) {
    int32_t id = k < token->n_top ? token->top_ids[k] : token->id;
    bool is_new = true;
    for (int32_t j = 0; j < k && is_new; j++) is_new = !is_same_text(reply, token->top_ids[j], id);
    if (!is_new) continue;
    buf_append_text(out, has_any ? ",\"" : "\"");
    append_token_text(reply, id, true, out);
    buf_append_text(out, "\":");
    append_logprob(out, k < token->n_top ? token->top_logprobs[k] : token->logprob);
    has_any = true;
  }
  buf_append_char(out, '}');
}

static int64_t count_chars(const char *text, size_t n_bytes)
{
  int64_t n = 0;
  for (size_t i = 0; i < n_bytes; i++) n += ((unsigned char)text[i] & 0xC0) != 0x80;
  return n;
}

/* Bytes of an echoed text, whose rest is given, that a token of the prompt stands for. The text is what the client wrote: a special token
 * counts where it is written out, and a space that the tokenizer puts before words does not. */
static size_t echoed_bytes(struct http_reply *reply, int32_t id, const char *rest, size_t n_rest)
{
  struct buf *bytes = &reply->scratch;
  buf_clear(bytes);
  tokenizer_token_bytes(reply->tokenizer, id, false, bytes);
  const char *data = bytes->data ? bytes->data : "";
  size_t n = bytes->size;
  if (n <= n_rest && !memcmp(rest, data, n)) return n;
  if (data[0] == ' ' && n - 1 <= n_rest && !memcmp(rest, data + 1, n - 1)) return n - 1;
  if (tokenizer_is_special(reply->tokenizer, id)) return 0;
  return n < n_rest ? n : n_rest; /* normalised: about so many */
}

void http_logprobs_append_legacy(struct http_reply *reply, struct http_choice *choice, const struct api_delta *delta)
{
  struct buf *lists = choice->logprobs;
  size_t n_echoed = 0;
  for (int32_t i = 0; i < delta->n_tokens; i++) {
    const struct api_token *token = &delta->tokens[i];
    for (int l = 0; l < 4; l++)
      if (lists[l].size) buf_append_char(&lists[l], ',');
    buf_append_char(&lists[0], '"');
    append_token_text(reply, token->id, true, &lists[0]);
    buf_append_char(&lists[0], '"');
    if (delta->is_echo && i == 0) { /* nothing comes before the first token of a prompt */
      buf_append_text(&lists[1], "null");
      buf_append_text(&lists[2], "null");
    } else {
      append_logprob(&lists[1], token->logprob);
      append_legacy_top(reply, token, &lists[2]);
    }
    buf_printf(&lists[3], "%lld", (long long)choice->n_chars);
    if (delta->is_echo) {
      const char *rest = delta->text + n_echoed;
      size_t n_bytes = echoed_bytes(reply, token->id, rest, delta->n_bytes - n_echoed);
      choice->n_chars += count_chars(rest, n_bytes);
      n_echoed += n_bytes;
    } else {
      buf_clear(&reply->scratch);
      tokenizer_token_bytes(reply->tokenizer, token->id, reply->skip_special, &reply->scratch);
      choice->n_chars += count_chars(reply->scratch.data, reply->scratch.size);
    }
  }
  if (delta->is_echo) choice->n_chars = count_chars(delta->text, delta->n_bytes);
}

void http_logprobs_append_legacy_object(const struct buf lists[4], struct buf *out)
{
  static const char *const heads[4] = {"{\"tokens\":[", "],\"token_logprobs\":[", "],\"top_logprobs\":[", "],\"text_offset\":["};
  for (int l = 0; l < 4; l++) {
    buf_append_text(out, heads[l]);
    if (lists[l].size) buf_append(out, lists[l].data, lists[l].size);
  }
  buf_append_text(out, "]}");
}
