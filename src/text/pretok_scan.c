/* Hand-written scanners for the regular expressions most models use. Each returns what a leftmost, greedy, first-alternative match
 * starting at `from` would; the alternatives cover every character, so a match always starts right there. ASCII goes through a table.
 * See pretok.h; the patterns themselves are in pretok.c. */
#include "base/utf8.h"
#include "text/pretok.h"
#include "text/unicode.h"

/* Classes beyond enum unicode_class for the ASCII table: newlines apart from other space, and "look closer". */
enum { OTHER, SPACE, LETTER, NUMBER, NEWLINE, HIGH };

#define O OTHER
#define L LETTER
#define H HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH
static const unsigned char ascii_class[256] = {
  O, O, O, O, O, O, O, O, O, SPACE, NEWLINE, SPACE, SPACE, NEWLINE, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O,
  SPACE, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER,
  O, O, O, O, O, O,
  O, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, O, O, O, O, O,
  O, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, O, O, O, O, O,
  H, H, H, H, H, H, H, H
};
#undef O
#undef L
#undef H

static unsigned high_class(const char *text, size_t n, size_t at, size_t *length)
{
  switch (unicode_class(utf8_decode(text + at, n - at, length))) {
  case UNICODE_LETTER: return LETTER;
  case UNICODE_NUMBER: return NUMBER;
  case UNICODE_SPACE: return SPACE;
  default: return OTHER;
  }
}

static inline unsigned class_at(const char *text, size_t n, size_t at, size_t *length)
{
  unsigned class = ascii_class[(unsigned char)text[at]];
  *length = 1;
  return class == HIGH ? high_class(text, n, at, length) : class;
}

/* End of the run of one class that goes on at `at`. */
static inline size_t run_of(const char *text, size_t n, size_t at, unsigned class)
{
  size_t length;
  while (at < n && class_at(text, n, at, &length) == class) at += length;
  return at;
}

/* A run of white space starts at `from`: \s+(?!\S)|\s+ leaves the last character to what follows, unless it is the only one. With
 * takes_newlines, \s*[\r\n]+ comes first: up to and with the last newline of the run. */
static size_t scan_space(const char *text, size_t n, size_t from, bool takes_newlines)
{
  size_t at = from, last = from, after_newline = 0, length;
  while (at < n) {
    unsigned class = class_at(text, n, at, &length);
    if (class != SPACE && class != NEWLINE) break;
    last = at;
    at += length;
    if (class == NEWLINE) after_newline = at;
  }
  if (takes_newlines && after_newline) return after_newline;
  return at == n || last == from ? at : last;
}

size_t pretok_scan_gpt2(const char *text, size_t n, size_t from)
{
  size_t length, next_length;
  unsigned class = class_at(text, n, from, &length);
  if (text[from] == '\'' && from + 1 < n) {
    char a = text[from + 1], b = from + 2 < n ? text[from + 2] : '\0';
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return from + 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return from + 3;
  }
  if (text[from] == ' ' && from + 1 < n) {
    unsigned next = class_at(text, n, from + 1, &next_length);
    if (next != SPACE && next != NEWLINE) return run_of(text, n, from + 1 + next_length, next);
  }
  if (class == SPACE || class == NEWLINE) return scan_space(text, n, from, false);
  return run_of(text, n, from + length, class);
}

/* Length of 's|'t|'re|'ve|'m|'ll|'d in any case at text[from] == '\'', 0 when there is none. */
static size_t contraction(const char *text, size_t n, size_t from, bool folds_long_s)
{
  if (from + 1 >= n) return 0;
  char a = text[from + 1] | 32, b = from + 2 < n ? text[from + 2] | 32 : '\0';
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
  if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
  if (folds_long_s && from + 2 < n && text[from + 1] == '\xC5' && text[from + 2] == '\xBF') return 3;
  return 0;
}

size_t pretok_scan_llama3(const char *text, size_t n, size_t from, int max_digits, bool folds_long_s)
{
  size_t length, next_length = 0;
  unsigned class = class_at(text, n, from, &length);
  if (class == LETTER) return run_of(text, n, from + length, LETTER);
  if (class == NUMBER) {
    size_t at = from + length;
    for (int i = 1; i < max_digits && at < n && class_at(text, n, at, &length) == NUMBER; i++) at += length;
    return at;
  }
  if (text[from] == '\'') {
    size_t taken = contraction(text, n, from, folds_long_s);
    if (taken) return from + taken;
  }
  unsigned next = from + length < n ? class_at(text, n, from + length, &next_length) : NEWLINE;
  if (class != NEWLINE && next == LETTER) return run_of(text, n, from + length + next_length, LETTER);
  size_t other = class == OTHER ? from + length : text[from] == ' ' && next == OTHER ? from + 1 + next_length : 0;
  if (other) return run_of(text, n, run_of(text, n, other, OTHER), NEWLINE);
  return scan_space(text, n, from, true);
}
