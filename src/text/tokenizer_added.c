/* Added tokens: a trie of their contents, searched leftmost-longest before the text is normalised and cut.
 * Semantics are those of Hugging Face tokenizers' AddedVocabulary (flags lstrip, rstrip, single_word, special). */
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "text/tokenizer_internal.h"
#include "text/unicode.h"

static bool grow(void **items, int32_t *capacity, int32_t n, size_t item_bytes)
{
  if (n < *capacity) return true;
  int32_t wanted = *capacity ? *capacity * 2 : 64;
  void *grown = mem_realloc(*items, (size_t)wanted * item_bytes);
  if (!grown) return false;
  *items = grown;
  *capacity = wanted;
  return true;
}

/* Child of node (or root, node -1) by byte; made when absent. -1: out of memory. */
static int32_t child_of(struct added_set *set, int32_t node, unsigned char byte)
{
  int32_t first = node < 0 ? set->root[byte] : set->nodes[node].child;
  for (int32_t at = first; at >= 0; at = set->nodes[at].sibling)
    if (set->nodes[at].byte == byte) return at;
  if (!grow((void **)&set->nodes, &set->node_capacity, set->n_nodes, sizeof *set->nodes)) return -1;
  int32_t made = set->n_nodes++;
  set->nodes[made] = (struct added_node){.child = -1, .sibling = node < 0 ? -1 : first, .token = -1, .byte = byte};
  if (node < 0) set->root[byte] = made;
  else set->nodes[node].child = made;
  return made;
}

bool added_set_add(struct added_set *set, const char *content, size_t n_bytes, int32_t id, unsigned flags)
{
  if (n_bytes == 0) return true;
  if (set->n == 0) memset(set->root, -1, sizeof set->root);
  if (!grow((void **)&set->tokens, &set->capacity, set->n, sizeof *set->tokens)) return false;
  int32_t node = -1;
  for (size_t i = 0; i < n_bytes; i++)
    if ((node = child_of(set, node, (unsigned char)content[i])) < 0) return false;
  set->nodes[node].token = set->n;
  set->tokens[set->n++] = (struct added_token){id, flags};
  return true;
}

void added_set_fini(struct added_set *set)
{
  mem_free(set->tokens);
  mem_free(set->nodes);
  *set = (struct added_set){0};
}

/* \w of the Rust regex crate: letters, marks, decimal and other numbers, connectors (the last by their one common member). */
static bool is_word(uint32_t c)
{
  enum unicode_class class = unicode_class(c);
  return class == UNICODE_LETTER || class == UNICODE_NUMBER || class == UNICODE_MARK || c == '_';
}

static bool stands_alone(const char *text, size_t n_bytes, size_t start, size_t end)
{
  size_t length, back = start;
  if (end < n_bytes && is_word(utf8_decode(text + end, n_bytes - end, &length))) return false;
  if (start == 0) return true;
  do back--;
  while (back > 0 && ((unsigned char)text[back] & 0xC0) == 0x80);
  return !is_word(utf8_decode(text + back, start - back, &length));
}

static void widen(const char *text, size_t n_bytes, size_t floor, struct added_match *match)
{
  size_t length;
  while (match->token->flags & ADDED_LSTRIP && match->start > floor) {
    size_t back = match->start - 1;
    while (back > floor && ((unsigned char)text[back] & 0xC0) == 0x80) back--;
    if (unicode_class(utf8_decode(text + back, match->start - back, &length)) != UNICODE_SPACE) break;
    match->start = back;
  }
  while (match->token->flags & ADDED_RSTRIP && match->end < n_bytes) {
    if (unicode_class(utf8_decode(text + match->end, n_bytes - match->end, &length)) != UNICODE_SPACE) break;
    match->end += length;
  }
}

bool added_set_next(const struct added_set *set, const char *text, size_t n_bytes, bool skips_special, const bool *guards,
                    struct added_match *match)
{
  if (set->n == 0) return false;
  for (size_t at = match->next; at < n_bytes; at++) {
    int32_t node = set->root[(unsigned char)text[at]], best = -1;
    size_t end = at, i = at;
    while (node >= 0) {
      i++;
      if (set->nodes[node].token >= 0) {
        best = set->nodes[node].token;
        end = i;
      }
      int32_t next = i < n_bytes ? set->nodes[node].child : -1;
      while (next >= 0 && set->nodes[next].byte != (unsigned char)text[i]) next = set->nodes[next].sibling;
      node = next;
    }
    if (best < 0) continue;
    const struct added_token *token = &set->tokens[best];
    if (guards && guards[at] && token->flags & ADDED_SPECIAL) continue; /* one that begins behind the guard counts */
    bool is_plain = (skips_special && token->flags & ADDED_SPECIAL) ||
                    (token->flags & ADDED_SINGLE_WORD && !stands_alone(text, n_bytes, at, end));
    if (!is_plain) {
      size_t floor = match->end;
      *match = (struct added_match){at, end, end, token};
      widen(text, n_bytes, floor, match);
      return true;
    }
    at = end - 1; /* the text of a passed-over token is not searched again */
  }
  return false;
}
