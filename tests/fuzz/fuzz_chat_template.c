/* libFuzzer target: the input is a chat template, compiled and rendered with fixed variables. Whatever it is, compiling and rendering must
 * end in bounded time without a memory error. Seeds: tests/fuzz/corpus/chat_template. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "text/chat_template.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char variables_text[] =
    "{\"messages\":[{\"role\":\"system\",\"content\":\"Be brief.\"},{\"role\":\"user\",\"content\":\"Gr\\u00fc\\u00dfe \\ud83d\\ude00\"},"
    "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"1\",\"function\":{\"name\":\"f\",\"arguments\":{\"a\":[1,2.5,true,"
    "null]}}}]},"
    "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"x\"}]}],"
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\",\"properties\":{}}}}],"
    "\"add_generation_prompt\":true,\"bos_token\":\"<s>\",\"eos_token\":\"</s>\",\"documents\":null,\"n\":5}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  static json_t *variables;
  struct chat_template *tmpl = NULL;
  struct sits_error err;
  struct buf out;
  if (!variables && !(variables = json_loads(variables_text, 0, NULL))) abort();
  if (chat_template_create((const char *)data, size, &tmpl, &err)) return 0;
  buf_init(&out, 64u << 20);
  enum sits_status status = chat_template_render(tmpl, variables, 1736944496, &out, &err);
  if (status && out.size) abort(); /* a failure leaves no output */
  (void)chat_template_wants_parts(tmpl);
  (void)chat_template_uses_tools(tmpl);
  buf_fini(&out);
  chat_template_destroy(tmpl);
  return 0;
}
