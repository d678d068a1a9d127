/* Chat rendering to tokens: what the template writes may become special tokens, what a client writes never does; and message shapes. The
 * tokenizer has one token a byte, so that the expected ids can be written as text with <end> (256) and <turn> (257) marked. */
#include "front_rig.h"

static struct rig rig;
static int set_up(void **state) { return rig_open(&rig), 0; }
static int tear_down(void **state) { return rig_close(&rig), 0; }

/* Ids as text: bytes as they are, specials as \1 (<end>) and \2 (<turn>). */
static void render(const char *messages, char out[1024])
{
  char body[2048];
  snprintf(body, sizeof body, "{\"messages\":%s}", messages);
  struct api_request *request = rig_parse(API_CHAT, body);
  struct token_list tokens = {0};
  struct sits_error err = {0};
  if (api_prompt_messages(rig.api, request, &tokens, &err)) fail_msg("%s: %s", messages, err.text);
  size_t n = 0;
  for (int64_t i = 0; i < tokens.n; i++)
    out[n++] = tokens.ids[i] == RIG_END ? '\1' : tokens.ids[i] == RIG_TURN ? '\2' : (char)tokens.ids[i];
  out[n] = '\0';
  token_list_fini(&tokens);
  api_request_destroy(request);
}

static void test_rendered_ids(void **state)
{
  static const struct { const char *messages, *ids; } cases[] = {
    {"[{\"role\":\"user\",\"content\":\"hi\"}]", "\2user:hi\1\2assistant:"},
    {"[{\"role\":\"user\",\"content\":\"  hi \"}]", "\2user:hi\1\2assistant:"}, /* the template's own trim works */
    {"[{\"role\":\"user\",\"content\":\"a<end>b\"}]", "\2user:a<end>b\1\2assistant:"},
    {"[{\"role\":\"user\",\"content\":\"<turn>\"}]", "\2user:<turn>\1\2assistant:"},
    {"[{\"role\":\"user\",\"content\":\" <end> \"}]", "\2user:<end>\1\2assistant:"},
    {"[{\"role\":\"user\",\"content\":\"<<end>>\"}]", "\2user:<<end>>\1\2assistant:"},
    {"[{\"role\":\"user\",\"content\":\"<tu\"},{\"role\":\"assistant\",\"content\":\"rn>\"}]",
     "\2user:<tu\1\2assistant:rn>\1\2assistant:"},
    {"[{\"role\":\"user\",\"content\":\"x<\"}]", "\2user:x<\1\2assistant:"},
    {"[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"<en\"},{\"type\":\"text\",\"text\":\"d>\"}]}]",
     "\2user:<en\nd>\1\2assistant:"},
    {"[{\"role\":\"user\",\"content\":\"\\ufdd0<end>\\ufdd1\"}]", "\2user:\xEF\xB7\x90<end>\xEF\xB7\x91\1\2assistant:"},
    {"[{\"role\":\"developer\",\"content\":\"d\"},{\"role\":\"assistant\",\"content\":null}]", "\2system:d\1\2assistant:\1\2assistant:"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char ids[1024];
    render(cases[i].messages, ids);
    assert_string_equal(ids, cases[i].ids);
  }
}

/* Every text over a small alphabet up to a length: no special token beyond the template's three, and the text itself comes back. */
static void test_no_text_becomes_special(void **state)
{
  static const char *const atoms[] = {"<", "end>", "<end>", "<turn>", "tu", "rn>", "x"};
  for (int a = 0; a < 7; a++)
    for (int b = 0; b < 7; b++)
      for (int c = 0; c < 7; c++) {
        char text[64], messages[256], ids[1024], want[256];
        snprintf(text, sizeof text, "%s%s%s", atoms[a], atoms[b], atoms[c]);
        snprintf(messages, sizeof messages, "[{\"role\":\"user\",\"content\":\"%s\"}]", text);
        snprintf(want, sizeof want, "\2user:%s\1\2assistant:", text);
        render(messages, ids);
        assert_string_equal(ids, want);
      }
}

/* A tokenizer that puts a space before the text's beginning only, with <end> (1) that takes the white space behind it, <turn> (2), and
 * <old> (3), which lives in normalised text; the characters are their own ids. */
static struct tokenizer *spaced_tokenizer(void)
{
  static const char head[] =
    "{\"added_tokens\":[{\"id\":1,\"content\":\"<end>\",\"special\":true,\"normalized\":false,\"rstrip\":true},"
    "{\"id\":2,\"content\":\"<turn>\",\"special\":true,\"normalized\":false},"
    "{\"id\":3,\"content\":\"<old>\",\"special\":true,\"normalized\":true}],"
    "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\\u2581\",\"prepend_scheme\":\"first\",\"split\":false},"
    "\"decoder\":{\"type\":\"Metaspace\",\"replacement\":\"\\u2581\",\"prepend_scheme\":\"first\"},"
    "\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{"
    "\"<end>\":1,\"<turn>\":2,\"<old>\":3,\"\\n\":10,\"\\u2581\":32";
  struct tokenizer *tokenizer = NULL;
  struct sits_error err = {0};
  struct buf text;
  buf_init(&text, 1 << 20);
  buf_append_text(&text, head);
  for (int c = 33; c < 127; c++) buf_printf(&text, ",\"\\u%04x\":%d", c, c);
  buf_append_text(&text, "}}}");
  if (tokenizer_parse_json(text.data, text.size, "spaced", &tokenizer, &err)) fail_msg("%s", err.text);
  buf_fini(&text);
  return tokenizer;
}

/* A text with a place that must not become a special token changes nothing else: no space at each turn's beginning, and what <end> takes
 * with it stays away. */
static void test_guards_change_nothing_else(void **state)
{
  static const char template_text[] = "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<old><end>\n{% endfor %}<turn>assistant";
  static const char *const contents[] = {"a b", "a b<", "<end> b", "<turn>", "<old>", " <ol", "<end>\\n b"};
  static const char *const ids[] = {"a b", "a b<", "<end> b", "<turn>", "<old>", " <ol", "<end>\n b"};
  struct rig kept = rig;
  rig_open_on(&rig, spaced_tokenizer(), template_text);
  for (size_t i = 0; i < sizeof contents / sizeof *contents; i++) {
    char messages[256], got[1024], want[256];
    snprintf(messages, sizeof messages, "[{\"role\":\"user\",\"content\":\"%s\"},{\"role\":\"user\",\"content\":\"c\"}]", contents[i]);
    snprintf(want, sizeof want, "\2user\n%s\3\1\2user\nc\3\1\2assistant", ids[i]);
    render(messages, got);
    assert_string_equal(got, want);
  }
  rig_close(&rig);
  rig = kept;
}

/* Hundreds of special tokens with long common beginnings: the longest at each place is found, the template's own are, and none of a
 * client's text is, however near it comes. */
static void test_many_special_tokens(void **state)
{
  static const char *const atoms[] = {"<", "<|r", "<|r__499|>", "<|r__499|", "<|r_", "<|r_1|>"};
  struct rig many;
  rig_open_with(&many, 500);
  size_t n = 0, size = 1 << 20;
  char *body = mem_alloc(size);
  n += (size_t)snprintf(body, size, "{\"messages\":[{\"role\":\"user\",\"content\":\"");
  size_t start = n;
  for (int i = 0; i < 20000; i++) n += (size_t)snprintf(body + n, size - n, "%s", atoms[(i * 7 + i / 11) % 6]);
  char *plain = mem_strndup(body + start, n - start);
  snprintf(body + n, size - n, "\"}]}");
  struct api_request *request = rig_parse(API_CHAT, body);
  struct token_list tokens = {0};
  struct sits_error err = {0};
  if (api_prompt_messages(many.api, request, &tokens, &err)) fail_msg("%s", err.text);
  size_t n_plain = strlen(plain), n_lead = sizeof "user:" - 1;
  assert_int_equal(tokens.n, 1 + n_lead + n_plain + 2 + sizeof "assistant:" - 1);
  assert_int_equal(tokens.ids[0], RIG_TURN);
  for (size_t i = 0; i < n_plain; i++) assert_int_equal(tokens.ids[1 + n_lead + i], plain[i]);
  assert_int_equal(tokens.ids[1 + n_lead + n_plain], RIG_END);
  token_list_fini(&tokens);
  api_request_destroy(request);
  mem_free(plain);
  mem_free(body);
  rig_close(&many);
}

static void test_all_markers_taken(void **state)
{
  char messages[512] = "[{\"role\":\"user\",\"content\":\"<end>", escaped[16];
  size_t n = strlen(messages);
  for (int i = 0; i < 32; i++) {
    int k = snprintf(escaped, sizeof escaped, "\\ufd%02x", 0xd0 + i);
    memcpy(messages + n, escaped, (size_t)k + 1);
    n += (size_t)k;
  }
  memcpy(messages + n, "\"}]", 4);
  char body[1024];
  snprintf(body, sizeof body, "{\"messages\":%s}", messages);
  struct api_request *request = rig_parse(API_CHAT, body);
  struct token_list tokens = {0};
  struct sits_error err = {0};
  assert_int_equal(api_prompt_messages(rig.api, request, &tokens, &err), SITS_INVALID_ARGUMENT);
  assert_string_equal(err.param, "messages");
  token_list_fini(&tokens);
  api_request_destroy(request);
}

static void test_refused_messages(void **state)
{
  static const struct { const char *messages; enum sits_status status; const char *param; } cases[] = {
    {"[{\"content\":\"x\"}]", SITS_MISSING_PARAMETER, "messages[0].role"},
    {"[{\"role\":\"root\",\"content\":\"x\"}]", SITS_INVALID_ARGUMENT, "messages[0].role"},
    {"[{\"role\":\"tool\",\"content\":\"x\"}]", SITS_UNSUPPORTED_PARAMETER, "messages[0].role"},
    {"[{\"role\":\"user\"}]", SITS_MISSING_PARAMETER, "messages[0].content"},
    {"[{\"role\":\"user\",\"content\":7}]", SITS_INVALID_ARGUMENT, "messages[0].content"},
    {"[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]", SITS_UNSUPPORTED_PARAMETER, "messages[0].content"},
    {"[{\"role\":\"assistant\",\"tool_calls\":[{}]}]", SITS_UNSUPPORTED_PARAMETER, "messages[0].tool_calls"},
    {"[{\"role\":\"user\",\"content\":\"x\"},7]", SITS_INVALID_ARGUMENT, "messages"},
    {"[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"system\",\"content\":\"x\"}]", SITS_TEMPLATE, "messages"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char body[1024];
    snprintf(body, sizeof body, "{\"messages\":%s}", cases[i].messages);
    struct api_request *request = rig_parse(API_CHAT, body);
    struct token_list tokens = {0};
    struct sits_error err = {0};
    enum sits_status status = api_prompt_messages(rig.api, request, &tokens, &err);
    if (status != cases[i].status || strcmp(err.param, cases[i].param))
      fail_msg("%s: %s '%s' %s", cases[i].messages, sits_status_info(status)->name, err.param, err.text);
    token_list_fini(&tokens);
    api_request_destroy(request);
  }
}

static void test_raw_prompts(void **state)
{
  static const struct { const char *body; int64_t n; int32_t first;
  } cases[] = {{"{\"prompt\":\"<end>\"}", 1, RIG_END},
               {"{\"prompt\":\"<end>\",\"parse_special\":false}", 5, '<'},
               {"{\"prompt\":[256,7]}", 2, RIG_END}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct api_request *request = rig_parse(API_COMPLETION, cases[i].body);
    struct token_list tokens = {0};
    struct sits_error err = {0};
    assert_int_equal(api_prompt_text(&rig.model, request, 0, &tokens, &err), SITS_OK);
    assert_int_equal(tokens.n, cases[i].n);
    assert_int_equal(tokens.ids[0], cases[i].first);
    token_list_fini(&tokens);
    api_request_destroy(request);
  }
  struct api_request *request = rig_parse(API_COMPLETION, "{\"prompt\":[258]}");
  struct token_list tokens = {0};
  struct sits_error err = {0};
  assert_int_equal(api_prompt_text(&rig.model, request, 0, &tokens, &err), SITS_INVALID_ARGUMENT);
  token_list_fini(&tokens);
  api_request_destroy(request);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_rendered_ids), cmocka_unit_test(test_no_text_becomes_special),
                                     cmocka_unit_test(test_guards_change_nothing_else),
                                     cmocka_unit_test(test_many_special_tokens),
                                     cmocka_unit_test(test_all_markers_taken), cmocka_unit_test(test_refused_messages),
                                     cmocka_unit_test(test_raw_prompts)};
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
