/* What both loaders share: the byte alphabet, the tables built once everything is read, end tokens. See tokenizer_internal.h. */
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "text/tokenizer_internal.h"

/* GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 on, in order. */
static int alphabet_byte(uint32_t c)
{
  static const unsigned char shifted[68] = {
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 127,
    128, 129, 130, 131, 132, 133, 134, 135, 136, 137, 138, 139, 140, 141, 142, 143, 144, 145, 146, 147, 148, 149, 150, 151, 152, 153,
    154, 155, 156, 157, 158, 159, 160, 173};
  if ((c >= 33 && c <= 126) || (c >= 161 && c <= 172) || (c >= 174 && c <= 255)) return (int)c;
  return c >= 256 && c < 256 + 68 ? shifted[c - 256] : -1;
}

bool tokenizer_alphabet_decode(const char *piece, size_t n_bytes, char *out, size_t *n_out)
{
  size_t n = 0, length;
  for (size_t i = 0; i < n_bytes; i += length) {
    int byte = alphabet_byte(utf8_decode(piece + i, n_bytes - i, &length));
    if (byte < 0) return false;
    out[n++] = (char)byte;
  }
  *n_out = n;
  return true;
}

static int hex_digit(char c)
{
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

int tokenizer_byte_piece(const char *piece, size_t n_bytes)
{
  if (n_bytes != 6 || memcmp(piece, "<0x", 3) != 0 || piece[5] != '>') return -1;
  int high = hex_digit(piece[3]), low = hex_digit(piece[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

/* byte_id: byte-level, the ordinary one-byte words; else the byte-fallback tokens. */
static void find_byte_ids(struct tokenizer *tokenizer)
{
  struct bpe *bpe = &tokenizer->bpe;
  bpe->has_all_bytes = true;
  for (int byte = 0; byte < 256; byte++) {
    char text[7] = {(char)byte};
    if (!bpe->is_byte_level) {
      memcpy(text, "<0x", 3);
      text[3] = "0123456789ABCDEF"[byte >> 4];
      text[4] = "0123456789ABCDEF"[byte & 15];
      text[5] = '>';
    }
    int32_t id = bpe->is_byte_level ? bpe_map_get(&bpe->words, text, 1) : bpe_map_get(&tokenizer->piece_map, text, 6);
    if (id >= 0) bpe->byte_id[byte] = id;
    else bpe->has_all_bytes = false;
  }
}

static bool ends_with_space(const struct tokenizer *tokenizer, int32_t id)
{
  size_t n;
  const char *text = bpe_string(&tokenizer->pieces, id, &n);
  return n >= 3 && memcmp(text + n - 3, "\xE2\x96\x81", 3) == 0;
}

static bool starts_with_space(const struct tokenizer *tokenizer, int32_t id)
{
  size_t n;
  const char *text = bpe_string(&tokenizer->pieces, id, &n);
  return n >= 3 && memcmp(text, "\xE2\x96\x81", 3) == 0;
}

/* Merging never crosses a place where no merge has such a left and right neighbour, so text may be cut there without changing an id. */
static bool may_cut_before_space(const struct tokenizer *tokenizer, const struct bpe_merge *merges, size_t n_merges)
{
  const struct bpe *bpe = &tokenizer->bpe;
  if (bpe->is_byte_level || bpe->ignore_merges || bpe_map_get(&bpe->words, "\xE2\x96\x81", 3) < 0) return false;
  for (size_t i = 0; i < n_merges; i++) {
    if (merges[i].left >= tokenizer->n_vocab || merges[i].right >= tokenizer->n_vocab) continue; /* single characters, not U+2581 */
    if (starts_with_space(tokenizer, merges[i].right) && !ends_with_space(tokenizer, merges[i].left)) return false;
  }
  for (size_t i = 0; i < n_merges; i++) /* a stand-in on the left is never a space either */
    if (merges[i].left >= tokenizer->n_vocab && merges[i].right < tokenizer->n_vocab && starts_with_space(tokenizer, merges[i].right))
      return false;
  return true;
}

bool tokenizer_index_pieces(struct tokenizer *tokenizer) { return bpe_map_init(&tokenizer->piece_map, &tokenizer->pieces, NULL); }

/* Whether a token is an ordinary word of a byte-level vocabulary: its piece is all in the byte alphabet and decodes to its bytes. */
static bool is_byte_word(const struct tokenizer *tokenizer, int32_t id, struct buf *raw)
{
  size_t n_piece, n_word, n_raw;
  const char *piece = bpe_string(&tokenizer->pieces, id, &n_piece), *word = bpe_string(&tokenizer->decoded, id, &n_word);
  buf_clear(raw);
  return buf_reserve(raw, n_piece) && tokenizer_alphabet_decode(piece, n_piece, raw->data, &n_raw) && n_raw == n_word &&
         memcmp(raw->data, word, n_raw) == 0;
}

enum sits_status tokenizer_seal(struct tokenizer *tokenizer, const struct bpe_merge *merges, size_t n_merges, struct sits_error *err)
{
  struct bpe *bpe = &tokenizer->bpe;
  int32_t n = tokenizer->n_vocab;
  enum sits_status status = SITS_NOMEM;
  bool *wants = mem_calloc((size_t)n + 1, sizeof *wants);
  struct buf raw;
  buf_init(&raw, SIZE_MAX / 4);
  if (!wants) goto out;
  bpe->n_vocab = n;
  bpe->memo = mem_calloc((size_t)n + 1, 1);
  if (!bpe->memo) goto out;
  for (int32_t id = 0; id < n; id++) {
    bool is_ordinary = (tokenizer->flags[id] & (TOKEN_IN_MODEL | TOKEN_SPECIAL)) == TOKEN_IN_MODEL;
    wants[id] = is_ordinary && tokenizer->pieces.start[id + 1] > tokenizer->pieces.start[id];
    if (wants[id] && bpe->is_byte_level) wants[id] = is_byte_word(tokenizer, id, &raw);
    if (raw.failed) goto out;
  }
  if (!bpe_map_init(&bpe->words, bpe->is_byte_level ? &tokenizer->decoded : &tokenizer->pieces, wants)) goto out;
  find_byte_ids(tokenizer);
  tokenizer->cuts_before_space = may_cut_before_space(tokenizer, merges, n_merges);
  if (!bpe_set_merges(bpe, merges, n_merges)) goto out;
  status = SITS_OK;
out:
  buf_fini(&raw);
  mem_free(wants);
  return status ? sits_fail(err, status, "tokenizer: out of memory") : SITS_OK;
}

bool tokenizer_add_end(struct tokenizer *tokenizer, int32_t id)
{
  if (id < 0 || id >= tokenizer->n_vocab) return true;
  for (int64_t i = 0; i < tokenizer->ends.n; i++)
    if (tokenizer->ends.ids[i] == id) return true;
  return token_list_push(&tokenizer->ends, id);
}

bool tokenizer_add_known_ends(struct tokenizer *tokenizer)
{
  static const char *const names[] = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
                                      "<end_of_turn>", "<|end_of_turn|>", "<｜end▁of▁sentence｜>", "<EOT>"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    int32_t id = tokenizer_find(tokenizer, names[i], strlen(names[i]));
    if (id >= 0 && tokenizer_is_special(tokenizer, id) && !tokenizer_add_end(tokenizer, id)) return false;
  }
  return true;
}
