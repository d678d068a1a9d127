/* What tests of the front ends share: a tokenizer made on the spot (ids 0-255 are the bytes, 256 <end>, 257 <turn>, both special), a chat
 * template, and an api over the scripted engine. */
#ifndef SITS_TESTS_FRONT_RIG_H
#define SITS_TESTS_FRONT_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "fake_engine.h"
#include "front/api/api_call.h"
#include "front/api/api_prompt.h"

enum { RIG_END = 256, RIG_TURN = 257 };

static const char rig_template_text[] =
  "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
  "<turn>{{ m.role }}:{{ m.content | trim }}<end>{% endfor %}{% if add_generation_prompt %}<turn>assistant:{% endif %}";

struct rig {
  struct tokenizer *tokenizer;
  struct chat_template *chat_template;
  struct api *api;
  struct sits_engine engine;
  struct api_model model;
};

/* Further special tokens after <turn>: ids from 258, "<|r" and underscores in varying number, a number, "|>". */
static inline void rig_write_specials(FILE *file, int n_more, const char *before, const char *between, const char *after)
{
  static const char rule[] = "______";
  for (int i = 0; i < n_more; i++) fprintf(file, "%s<|r%.*s%d|>%s%d%s", before, i % 7, rule, i, between, 258 + i, after);
}

static inline struct tokenizer *rig_tokenizer(int n_more)
{
  char path[] = "/tmp/sits_front_XXXXXX";
  struct tokenizer *tokenizer = NULL;
  struct sits_error err = {0};
  int fd = mkstemp(path);
  FILE *file = fdopen(fd, "w");
  assert_non_null(file);
  fputs("{\"added_tokens\":[{\"id\":256,\"content\":\"<end>\",\"special\":true,\"normalized\":false},"
        "{\"id\":257,\"content\":\"<turn>\",\"special\":true,\"normalized\":false}", file);
  rig_write_specials(file, n_more, ",{\"special\":true,\"normalized\":false,\"content\":\"", "\",\"id\":", "}");
  fputs("],\"normalizer\":null,"
        "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},\"decoder\":{\"type\":\"ByteLevel\"},"
        "\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{", file);
  for (int b = 0, extra = 0; b < 256; b++) { /* GPT-2's byte alphabet */
    bool is_plain = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    fprintf(file, "\"\\u%04x\":%d,", is_plain ? b : 256 + extra++, b);
  }
  fputs("\"<end>\":256,\"<turn>\":257", file);
  rig_write_specials(file, n_more, ",\"", "\":", "");
  fputs("}}}", file);
  fclose(file);
  enum sits_status status = tokenizer_load_json(path, &tokenizer, &err);
  unlink(path);
  if (status) fail_msg("%s", err.text);
  return tokenizer;
}

/* The tokenizer is taken over. */
static inline void rig_open_on(struct rig *rig, struct tokenizer *tokenizer, const char *template_text)
{
  struct sits_error err = {0};
  *rig = (struct rig){.tokenizer = tokenizer};
  if (chat_template_create(template_text, strlen(template_text), &rig->chat_template, &err)) fail_msg("%s", err.text);
  if (api_create(&api_limits_default, &rig->api, &err)) fail_msg("%s", err.text);
  rig->model = (struct api_model){.engine = &rig->engine, .tokenizer = rig->tokenizer, .chat_template = rig->chat_template,
                                  .names = {"m", "other"}, .n_names = 2, .max_model_len = 1000};
  if (api_model_set(rig->api, &rig->model, &err)) fail_msg("%s", err.text);
}

static inline void rig_open_with(struct rig *rig, int n_more_specials)
{
  rig_open_on(rig, rig_tokenizer(n_more_specials), rig_template_text);
}

static inline void rig_open(struct rig *rig) { rig_open_with(rig, 0); }

static inline void rig_close(struct rig *rig)
{
  api_destroy(rig->api);
  chat_template_destroy(rig->chat_template);
  tokenizer_destroy(rig->tokenizer);
  fake_reset();
}

static inline struct api_request *rig_parse(enum api_kind kind, const char *body)
{
  struct api_request *request = NULL;
  struct sits_error err = {0};
  if (api_request_parse(kind, body, strlen(body), &api_limits_default, &request, &err)) fail_msg("%s: %s", body, err.text);
  return request;
}

#endif
