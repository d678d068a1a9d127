/* tokenizer_numbered: the vocabulary of a model without one (synthetic:...). Ids below 256 are the bytes, the others are called t256, t257,
 * ...; nothing merges, so a text becomes its bytes, and any id has a text. For measurements that send token ids. */
#include <string.h>

#include "text/tokenizer_internal.h"

enum { N_BYTES = 256 };

/* The character that stands for a byte in GPT-2's alphabet, as UTF-8. */
static bool append_byte_piece(struct buf *out, int byte)
{
  const bool is_itself = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
  int c = byte;
  if (!is_itself) c = N_BYTES + (byte <= 32 ? byte : byte < 173 ? byte - 127 + 33 : 67); /* the others in order: 0..32, 127..160, 173 */
  if (c == '"' || c == '\\') return buf_append_char(out, '\\') && buf_append_char(out, (char)c);
  if (c < 128) return buf_append_char(out, (char)c);
  return buf_append_char(out, (char)(0xC0 | c >> 6)) && buf_append_char(out, (char)(0x80 | (c & 0x3F)));
}

enum sits_status tokenizer_numbered(int32_t n_vocab, struct tokenizer **out, struct sits_error *err)
{
  static const char head[] = "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false},"
                             "\"decoder\":{\"type\":\"ByteLevel\"},\"added_tokens\":[],"
                             "\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{";
  struct buf text;
  if (n_vocab < N_BYTES) return sits_fail(err, SITS_UNSUPPORTED, "a vocabulary of %d numbers has no room for all bytes", n_vocab);
  buf_init(&text, 256 << 20);
  bool ok = buf_append(&text, head, sizeof head - 1);
  for (int32_t i = 0; i < n_vocab && ok; i++) {
    ok = buf_append(&text, i ? ",\"" : "\"", i ? 2 : 1);
    if (ok) ok = i < N_BYTES ? append_byte_piece(&text, i) : buf_printf(&text, "t%d", i);
    if (ok) ok = buf_printf(&text, "\":%d", i);
  }
  ok = ok && buf_append(&text, "}}}", 3);
  const enum sits_status status = ok ? tokenizer_parse_json(text.data, text.size, "numbered vocabulary", out, err)
                                     : sits_fail(err, SITS_NOMEM, "no memory for a vocabulary of %d numbers", n_vocab);
  buf_fini(&text);
  return status;
}
