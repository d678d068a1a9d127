/* Lexer: template source to tokens. jinja_lex is the entry point.
 *
 * Follows jinja2's lexer with trim_blocks and lstrip_blocks on: the newline after a block or comment goes; spaces before a block or comment
 * that starts its line go; `-` strips all white space on its side, `+` strips none; CRLF and CR become LF; one final newline goes. Inside
 * brackets `}}` and `%}` do not end a tag, so that dict literals work. */
#include <string.h>

#include "base/utf8.h"
#include "text/jinja_internal.h"

struct lexer {
  struct arena *arena;
  const char *text;
  size_t n, pos;
  int line;
  bool line_starting; /* the last token ended with a newline */
  struct jinja_token *tokens;
  size_t n_tokens, capacity;
  struct sits_error *err;
  enum sits_status status;
};

static bool fail(struct lexer *lx, const char *text)
{
  lx->status = sits_fail(lx->err, SITS_FORMAT, "chat template line %d: %s", lx->line, text);
  return false;
}

static bool no_memory(struct lexer *lx)
{
  lx->status = sits_fail(lx->err, SITS_NOMEM, "out of memory for a chat template");
  return false;
}

static struct jinja_token *push(struct lexer *lx, enum jinja_token_type type)
{
  if (lx->n_tokens == lx->capacity) {
    size_t capacity = lx->capacity ? lx->capacity * 2 : 256;
    struct jinja_token *grown = arena_calloc(lx->arena, capacity, sizeof *grown);
    if (!grown) {
      no_memory(lx);
      return NULL;
    }
    if (lx->n_tokens) memcpy(grown, lx->tokens, lx->n_tokens * sizeof *grown);
    lx->tokens = grown;
    lx->capacity = capacity;
  }
  struct jinja_token *token = &lx->tokens[lx->n_tokens++];
  *token = (struct jinja_token){.type = type, .line = lx->line};
  return token;
}

/* Move past n bytes, counting lines. */
static void advance(struct lexer *lx, size_t n)
{
  for (size_t i = 0; i < n; i++) lx->line += lx->text[lx->pos + i] == '\n';
  if (n) lx->line_starting = lx->text[lx->pos + n - 1] == '\n';
  lx->pos += n;
}

static size_t space_run(const struct lexer *lx, size_t at)
{
  size_t start = at, length;
  while (at < lx->n) {
    if (!jinja_is_space(utf8_decode(lx->text + at, lx->n - at, &length))) break;
    at += length;
  }
  return at - start;
}

static bool looking_at(const struct lexer *lx, size_t at, const char *text)
{
  size_t n = strlen(text);
  return at + n <= lx->n && memcmp(lx->text + at, text, n) == 0;
}

/* Length of text[from..to) without its trailing white space. */
static size_t without_trailing_space(const struct lexer *lx, size_t from, size_t to)
{
  while (to > from) {
    size_t at = to - 1, length;
    while (at > from && ((unsigned char)lx->text[at] & 0xC0) == 0x80) at--;
    if (!jinja_is_space(utf8_decode(lx->text + at, to - at, &length))) break;
    to = at;
  }
  return to - from;
}

/* Emit the text before a tag that starts at `tag`, stripped as the tag's sign and kind ask. */
static bool push_data(struct lexer *lx, size_t tag, char sign, bool is_variable)
{
  size_t from = lx->pos, n = tag - from;
  if (sign == '-') {
    n = without_trailing_space(lx, from, tag);
  } else if (sign != '+' && !is_variable) {
    size_t line_at = tag;
    while (line_at > from && lx->text[line_at - 1] != '\n') line_at--;
    if ((line_at > from || lx->line_starting) && line_at + space_run(lx, line_at) >= tag) n = line_at - from;
  }
  if (n > 0) {
    struct jinja_token *token = push(lx, T_DATA);
    if (!token) return false;
    token->text = lx->text + from;
    token->n_bytes = n;
  }
  advance(lx, tag - from);
  return true;
}

/* Length of a closing "%}", "-%}" or "+%}" with what it swallows, or 0. close: "%}" or "#}". */
static size_t closing(const struct lexer *lx, size_t at, const char *close)
{
  if (looking_at(lx, at, close)) return 2 + (at + 2 < lx->n && lx->text[at + 2] == '\n');
  if (at >= lx->n || !looking_at(lx, at + 1, close)) return 0;
  if (lx->text[at] == '-') return 3 + space_run(lx, at + 3);
  return lx->text[at] == '+' ? 3 : 0;
}

static bool lex_comment(struct lexer *lx, size_t open_bytes)
{
  size_t at = lx->pos + open_bytes, n = 0;
  while (at < lx->n && !(n = closing(lx, at, "#}"))) at++;
  if (!n) return fail(lx, "missing end of comment tag");
  advance(lx, at + n - lx->pos);
  return true;
}

/* After "{%" and its sign at `at`: length through the end of `raw %}`, or 0 when this is no raw tag. */
static size_t raw_begin(const struct lexer *lx, size_t at)
{
  size_t start = at;
  at += space_run(lx, at);
  if (!looking_at(lx, at, "raw")) return 0;
  at += 3;
  at += space_run(lx, at);
  if (looking_at(lx, at, "-%}")) return at + 3 + space_run(lx, at + 3) - start;
  return looking_at(lx, at, "%}") ? at + 2 - start : 0;
}

static bool lex_raw(struct lexer *lx, size_t open_bytes)
{
  advance(lx, open_bytes);
  for (size_t at = lx->pos; at + 1 < lx->n; at++) {
    if (!looking_at(lx, at, "{%")) continue;
    char sign = at + 2 < lx->n ? lx->text[at + 2] : 0;
    size_t word = at + 2 + (sign == '-' || sign == '+');
    word += space_run(lx, word);
    if (!looking_at(lx, word, "endraw")) continue;
    word += 6;
    word += space_run(lx, word);
    size_t close = closing(lx, word, "%}");
    if (!close) continue;
    if (!push_data(lx, at, sign, false)) return false;
    advance(lx, word + close - lx->pos);
    return true;
  }
  return fail(lx, "missing end of raw directive");
}

static bool is_name_byte(unsigned char c)
{
  return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c >= 0x80;
}

static bool is_digit_byte(char c) { return c >= '0' && c <= '9'; }

/* Length of `digit (_? digit)*` at a position. */
static size_t digit_run(const struct lexer *lx, size_t at)
{
  size_t start = at;
  while (at < lx->n && (is_digit_byte(lx->text[at]) ||
                        (at > start && lx->text[at] == '_' && at + 1 < lx->n && is_digit_byte(lx->text[at + 1]))))
    at++;
  return at - start;
}

/* Length of a float literal, or 0. */
static size_t float_run(const struct lexer *lx)
{
  size_t at = lx->pos, whole = digit_run(lx, at);
  if (!whole || (at > 0 && lx->text[at - 1] == '.')) return 0;
  at += whole;
  size_t fraction = at < lx->n && lx->text[at] == '.' ? digit_run(lx, at + 1) : 0;
  if (fraction) at += 1 + fraction;
  size_t exponent = 0;
  if (at < lx->n && (lx->text[at] == 'e' || lx->text[at] == 'E')) {
    size_t sign = at + 1 < lx->n && (lx->text[at + 1] == '+' || lx->text[at + 1] == '-');
    exponent = digit_run(lx, at + 1 + sign);
    if (exponent) at += 1 + sign + exponent;
  }
  return fraction || exponent ? at - lx->pos : 0;
}

static bool lex_float(struct lexer *lx, size_t n)
{
  char text[400];
  size_t used = 0;
  for (size_t i = 0; i < n && used + 1 < sizeof text; i++)
    if (lx->text[lx->pos + i] != '_') text[used++] = lx->text[lx->pos + i];
  if (used + 1 >= sizeof text) return fail(lx, "number too long");
  text[used] = '\0';
  struct jinja_token *token = push(lx, T_FLOAT);
  if (!token) return false;
  token->f = strtod(text, NULL);
  advance(lx, n);
  return true;
}

static int digit_value(char c)
{
  if (is_digit_byte(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return 99;
}

static bool lex_int(struct lexer *lx)
{
  int base = 10;
  size_t at = lx->pos;
  if (lx->text[at] == '0' && at + 2 < lx->n) {
    char c = lx->text[at + 1] | 0x20;
    int wanted = c == 'x' ? 16 : c == 'o' ? 8 : c == 'b' ? 2 : 10;
    size_t first = at + 2 + (lx->text[at + 2] == '_');
    if (wanted != 10 && first < lx->n && digit_value(lx->text[first]) < wanted) {
      base = wanted;
      at += 2;
    }
  }
  int64_t value = 0;
  bool is_zero_led = base == 10 && lx->text[at] == '0'; /* 0 may be followed by zeros only: 012 is two tokens, as in jinja2 */
  for (; at < lx->n; at++) {
    if (lx->text[at] == '_' && at + 1 < lx->n && digit_value(lx->text[at + 1]) < base) continue;
    int digit = digit_value(lx->text[at]);
    if (digit >= base || (is_zero_led && digit != 0)) break;
    if (__builtin_mul_overflow(value, (int64_t)base, &value) || __builtin_add_overflow(value, (int64_t)digit, &value))
      return fail(lx, "integer literal beyond 64 bits is not supported");
  }
  struct jinja_token *token = push(lx, T_INT);
  if (!token) return false;
  token->i = value;
  advance(lx, at - lx->pos);
  return true;
}

/* Up to `most` digits of a base at `at`; returns how many. */
static size_t escape_digits(const struct lexer *lx, size_t at, size_t end, int base, size_t most, uint32_t *value)
{
  size_t n = 0;
  *value = 0;
  while (n < most && at + n < end && digit_value(lx->text[at + n]) < base)
    *value = *value * (uint32_t)base + (uint32_t)digit_value(lx->text[at + n++]);
  return n;
}

/* Decode the escape after a backslash at `at`; writes to out, returns source bytes used, 0 on failure. */
static size_t unescape(struct lexer *lx, size_t at, size_t end, char *out, size_t *n_out)
{
  static const char plain[] = "\\\\''\"\"a\ab\bf\fn\nr\rt\tv\v";
  char c = lx->text[at];
  *n_out = 1;
  for (size_t i = 0; plain[i]; i += 2)
    if (plain[i] == c) return *out = plain[i + 1], 1;
  if (c == '\n') return *n_out = 0, 1;
  uint32_t value;
  if (c >= '0' && c <= '7') {
    size_t n = escape_digits(lx, at, end, 8, 3, &value);
    *n_out = utf8_encode(value, out);
    return n;
  }
  size_t wanted = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
  if (!wanted) { /* an unknown escape keeps its backslash */
    out[0] = '\\';
    return *n_out = 1, 0;
  }
  if (escape_digits(lx, at + 1, end, 16, wanted, &value) != wanted || value > 0x10FFFF) return fail(lx, "bad escape in string"), 0;
  size_t used = 1 + wanted;
  uint32_t low;
  if (value >= 0xD800 && value < 0xDC00 && looking_at(lx, at + used, "\\u") && escape_digits(lx, at + used + 2, end, 16, 4, &low) == 4 &&
      low >= 0xDC00 && low < 0xE000) {
    value = 0x10000 + ((value - 0xD800) << 10) + (low - 0xDC00);
    used += 6;
  }
  *n_out = utf8_encode(value, out);
  return used;
}

static bool lex_string(struct lexer *lx)
{
  char quote = lx->text[lx->pos];
  size_t from = lx->pos + 1, end = from;
  while (end < lx->n && lx->text[end] != quote) end += lx->text[end] == '\\' ? 2 : 1;
  if (end >= lx->n) return fail(lx, "unterminated string");
  char *text = arena_alloc(lx->arena, end - from + 4);
  if (!text) return no_memory(lx);
  size_t n = 0;
  for (size_t at = from; at < end;) {
    if (lx->text[at] != '\\') {
      text[n++] = lx->text[at++];
      continue;
    }
    size_t n_out;
    size_t used = unescape(lx, at + 1, end, text + n, &n_out);
    if (lx->status) return false;
    n += n_out;
    at += 1 + used;
  }
  struct jinja_token *token = push(lx, T_STR);
  if (!token) return false;
  token->text = text;
  token->n_bytes = n;
  advance(lx, end + 1 - lx->pos);
  return true;
}

static const struct { const char *text; enum jinja_token_type type; } operators[] = { /* longest first */
    {"//", T_FLOORDIV}, {"**", T_POW}, {"==", T_EQ}, {"!=", T_NE}, {">=", T_GE}, {"<=", T_LE}, {"+", T_ADD}, {"-", T_SUB}, {"*", T_MUL},
    {"/", T_DIV}, {"%", T_MOD}, {"~", T_TILDE}, {"(", T_LPAREN}, {")", T_RPAREN}, {"[", T_LBRACKET}, {"]", T_RBRACKET}, {"{", T_LBRACE},
    {"}", T_RBRACE}, {">", T_GT}, {"<", T_LT}, {"=", T_ASSIGN}, {".", T_DOT}, {":", T_COLON}, {"|", T_PIPE}, {",", T_COMMA},
    {";", T_SEMICOLON},
};

static bool lex_operator(struct lexer *lx, char *stack, size_t *n_stack)
{
  for (size_t i = 0; i < sizeof operators / sizeof operators[0]; i++) {
    if (!looking_at(lx, lx->pos, operators[i].text)) continue;
    char c = operators[i].text[0];
    if (c == '(' || c == '[' || c == '{') {
      if (*n_stack >= JINJA_MAX_PARSE_DEPTH) return fail(lx, "over the nesting limit");
      stack[(*n_stack)++] = c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (c == ')' || c == ']' || c == '}') {
      if (*n_stack == 0 || stack[*n_stack - 1] != c) return fail(lx, "unexpected closing bracket");
      (*n_stack)--;
    }
    if (!push(lx, operators[i].type)) return false;
    advance(lx, strlen(operators[i].text));
    return true;
  }
  return fail(lx, "unexpected character in a tag");
}

/* The end of a tag at the current position: its length, or 0. */
static size_t tag_end(const struct lexer *lx, bool is_block)
{
  if (is_block) return closing(lx, lx->pos, "%}");
  if (looking_at(lx, lx->pos, "-}}")) return 3 + space_run(lx, lx->pos + 3);
  return looking_at(lx, lx->pos, "}}") ? 2 : 0;
}

/* Tokens of one {{ }} or {% %}, its opening already passed. */
static bool lex_tag(struct lexer *lx, bool is_block)
{
  char stack[JINJA_MAX_PARSE_DEPTH];
  size_t n_stack = 0;
  while (lx->pos < lx->n) {
    size_t end = n_stack == 0 ? tag_end(lx, is_block) : 0;
    if (end) {
      if (!push(lx, is_block ? T_BLOCK_END : T_VAR_END)) return false;
      advance(lx, end);
      return true;
    }
    size_t spaces = space_run(lx, lx->pos);
    if (spaces) {
      advance(lx, spaces);
      continue;
    }
    char c = lx->text[lx->pos];
    size_t n = float_run(lx);
    bool ok;
    if (n) {
      ok = lex_float(lx, n);
    } else if (is_digit_byte(c)) {
      ok = lex_int(lx);
    } else if (is_name_byte((unsigned char)c)) {
      for (n = 1; lx->pos + n < lx->n && is_name_byte((unsigned char)lx->text[lx->pos + n]);) n++;
      struct jinja_token *token = push(lx, T_NAME);
      ok = token != NULL;
      if (ok) {
        token->text = lx->text + lx->pos;
        token->n_bytes = n;
        advance(lx, n);
      }
    } else if (c == '"' || c == '\'') {
      ok = lex_string(lx);
    } else {
      ok = lex_operator(lx, stack, &n_stack);
    }
    if (!ok) return false;
  }
  return true; /* the parser reports the missing end */
}

static bool lex_next(struct lexer *lx)
{
  size_t at = lx->pos;
  while (at + 1 < lx->n && !(lx->text[at] == '{' && strchr("{%#", lx->text[at + 1]) && lx->text[at + 1])) at++;
  if (at + 1 >= lx->n) return push_data(lx, lx->n, '+', true);
  char kind = lx->text[at + 1], sign = at + 2 < lx->n ? lx->text[at + 2] : 0;
  size_t open = 2 + (sign == '-' || sign == '+');
  if (!push_data(lx, at, sign, kind == '{')) return false;
  if (kind == '#') return lex_comment(lx, open);
  size_t raw = kind == '%' ? raw_begin(lx, at + open) : 0;
  if (raw) return lex_raw(lx, open + raw);
  if (!push(lx, kind == '%' ? T_BLOCK_BEGIN : T_VAR_BEGIN)) return false;
  advance(lx, open);
  return lex_tag(lx, kind == '%');
}

/* Copy with LF line ends and without one final newline. */
static char *normalise(struct arena *arena, const char *source, size_t n_bytes, size_t *n_out)
{
  char *text = arena_alloc(arena, n_bytes + 1);
  if (!text) return NULL;
  size_t n = 0;
  for (size_t i = 0; i < n_bytes; i++) {
    if (source[i] == '\r') {
      text[n++] = '\n';
      if (i + 1 < n_bytes && source[i + 1] == '\n') i++;
    } else {
      text[n++] = source[i];
    }
  }
  if (n > 0 && text[n - 1] == '\n') n--;
  text[n] = '\0';
  *n_out = n;
  return text;
}

enum sits_status jinja_lex(struct arena *arena, const char *source, size_t n_bytes, struct jinja_token **out, size_t *n_out,
                           struct sits_error *err)
{
  struct lexer lx = {.arena = arena, .line = 1, .line_starting = true, .err = err};
  if (n_bytes > JINJA_MAX_SOURCE_BYTES)
    return sits_fail(err, SITS_FORMAT, "chat template of %zu bytes is over the limit of %d", n_bytes, JINJA_MAX_SOURCE_BYTES);
  if (!utf8_is_valid(source, n_bytes)) return sits_fail(err, SITS_FORMAT, "chat template is not valid UTF-8");
  lx.text = normalise(arena, source, n_bytes, &lx.n);
  if (!lx.text) {
    no_memory(&lx);
    return lx.status;
  }
  while (lx.pos < lx.n)
    if (!lex_next(&lx)) return lx.status;
  if (!push(&lx, T_EOF)) return lx.status;
  *out = lx.tokens;
  *n_out = lx.n_tokens;
  return SITS_OK;
}
