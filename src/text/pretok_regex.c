/* Split patterns through PCRE2. Hugging Face compiles them with Oniguruma (Ruby syntax); the few things that the two read differently are
 * translated (\s, \d: White_Space and Nd exactly) or refused by name. The Unicode version of the classes is PCRE2's own.
 *
 * A callout at the head of the pattern fires at every place where a match is tried: that is where the time budget is checked, so that a
 * pattern that is quadratic on some text gives an error. Within one attempt PCRE2's match limit holds. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "text/pretok.h"

enum { MATCH_LIMIT = 5000000, BUDGET_US = 2000000, ATTEMPTS_PER_CLOCK = 64 };

static void *pcre_alloc(size_t n_bytes, void *unused) { return mem_alloc(n_bytes); }
static void pcre_free(void *block, void *unused) { mem_free(block); }

/* Oniguruma's \w; outside a class it counts in six superscripts and fractions of Latin-1. */
#define WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"
#define WORD_ALONE WORD "\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}]"

/* \s is White_Space and \d is Nd in Oniguruma; PCRE2's \s has U+180E besides. What cannot be said exactly is refused. */
static enum sits_status translate_escape(char c, bool in_class, struct buf *out, struct sits_error *err)
{
  switch (c) {
  case 's': buf_append_text(out, "\\p{White_Space}"); return SITS_OK;
  case 'S': buf_append_text(out, "\\P{White_Space}"); return SITS_OK;
  case 'd': buf_append_text(out, "\\p{Nd}"); return SITS_OK;
  case 'D': buf_append_text(out, "\\P{Nd}"); return SITS_OK;
  case 'w':
    buf_append_text(out, in_class ? WORD : "[" WORD_ALONE);
    return SITS_OK;
  case 'W':
    if (in_class) break;
    buf_append_text(out, "[^" WORD_ALONE);
    return SITS_OK;
  case 'h': case 'H': case 'b': case 'B': case 'y': case 'Y': case 'R': case 'X': case 'K': case 'O': case 'N': case 'g': case 'k':
  case 'A': case 'Z': case 'z': case 'G': case 'C': case 'M': case 'c': case 'Q': case 'E': break;
  default:
    buf_append_char(out, '\\');
    buf_append_char(out, c);
    return SITS_OK;
  }
  return sits_fail(err, SITS_UNSUPPORTED, "pre-tokenizer: \\%c in a Split pattern is not supported", c);
}

static enum sits_status translate(const char *pattern, size_t n, struct buf *out, struct sits_error *err)
{
  bool in_class = false;
  size_t class_start = 0;
  buf_append_text(out, "(?C1)(?:");
  for (size_t i = 0; i < n; i++) {
    char c = pattern[i];
    if (c == '\0') return sits_fail(err, SITS_UNSUPPORTED, "pre-tokenizer: a NUL byte in a Split pattern is not supported");
    if (c == '\\' && i + 1 < n) {
      enum sits_status status = translate_escape(pattern[++i], in_class, out, err);
      if (status) return status;
      continue;
    }
    if (in_class && c == '[') return sits_fail(err, SITS_UNSUPPORTED, "pre-tokenizer: nested classes in a Split pattern are not supported");
    if (in_class && c == '&' && i + 1 < n && pattern[i + 1] == '&')
      return sits_fail(err, SITS_UNSUPPORTED, "pre-tokenizer: class intersection (&&) in a Split pattern is not supported");
    if (!in_class && c == '[') {
      in_class = true;
      class_start = i + (i + 1 < n && pattern[i + 1] == '^' ? 2 : 1);
    } else if (in_class && c == ']' && i != class_start) {
      in_class = false;
    }
    buf_append_char(out, c);
  }
  buf_append_char(out, ')');
  return out->failed ? SITS_NOMEM : SITS_OK;
}

enum sits_status pretok_regex_compile(const char *pattern, size_t n_bytes, bool is_literal, void **code, struct sits_error *err)
{
  struct buf translated;
  uint32_t options = PCRE2_UTF | PCRE2_NO_UTF_CHECK;
  int number = 0;
  PCRE2_SIZE offset = 0;
  pcre2_compile_context *compile = NULL;
  pcre2_code *made = NULL;
  buf_init(&translated, 1 << 16);
  enum sits_status status = SITS_OK;
  if (is_literal) {
    options |= PCRE2_LITERAL;
    if (!buf_append(&translated, pattern, n_bytes)) status = SITS_NOMEM;
  } else {
    options |= PCRE2_UCP | PCRE2_MULTILINE; /* ^ and $ are line anchors in Ruby syntax */
    status = translate(pattern, n_bytes, &translated, err);
  }
  if (status) goto out;
  status = SITS_NOMEM;
  pcre2_general_context *general = pcre2_general_context_create(pcre_alloc, pcre_free, NULL);
  if (!general) goto out;
  compile = pcre2_compile_context_create(general);
  pcre2_general_context_free(general);
  if (!compile) goto out;
  made = pcre2_compile((PCRE2_SPTR)translated.data, translated.size, options, &number, &offset, compile);
  if (!made && number == PCRE2_ERROR_HEAP_FAILED) goto out;
  if (!made) {
    char text[128];
    pcre2_get_error_message(number, (PCRE2_UCHAR *)text, sizeof text);
    status = sits_fail(err, SITS_FORMAT, "pre-tokenizer: Split pattern: %s", text);
    goto out;
  }
  pcre2_jit_compile(made, PCRE2_JIT_COMPLETE); /* without JIT the interpreter gives the same answer */
  *code = made;
  status = SITS_OK;
out:
  pcre2_compile_context_free(compile);
  buf_fini(&translated);
  return status;
}

void pretok_regex_free(void *code) { pcre2_code_free(code); }

void pretok_scratch_fini(struct pretok_scratch *scratch)
{
  pcre2_match_data_free(scratch->match_data);
  pcre2_match_context_free(scratch->match_context);
  *scratch = (struct pretok_scratch){0};
}

/* Called at every attempted start; a positive answer would mean "no match here", a negative one ends the search. */
static int check_budget(pcre2_callout_block *block, void *data)
{
  struct pretok_scratch *scratch = data;
  if (++scratch->n_attempts % ATTEMPTS_PER_CLOCK) return 0;
  return clock_monotonic_us() > scratch->deadline_us ? PCRE2_ERROR_MATCHLIMIT : 0;
}

static bool prepare(struct pretok_scratch *scratch)
{
  if (scratch->match_data && scratch->match_context) return true;
  pcre2_general_context *general = pcre2_general_context_create(pcre_alloc, pcre_free, NULL);
  if (!general) return false;
  if (!scratch->match_data) scratch->match_data = pcre2_match_data_create(1, general);
  if (!scratch->match_context) scratch->match_context = pcre2_match_context_create(general);
  pcre2_general_context_free(general);
  if (!scratch->match_data || !scratch->match_context) return false;
  pcre2_set_match_limit(scratch->match_context, MATCH_LIMIT);
  pcre2_set_callout(scratch->match_context, check_budget, scratch);
  scratch->deadline_us = clock_monotonic_us() + BUDGET_US;
  return true;
}

int pretok_regex_next(const struct pretok_step *step, struct pretok_scratch *scratch, const char *text, size_t n_bytes, size_t from,
                      size_t *start, size_t *end)
{
  if (!prepare(scratch)) return PRETOK_NO_MEMORY;
  uint32_t options = PCRE2_NO_UTF_CHECK;
  int got = pcre2_match(step->code, (PCRE2_SPTR)text, n_bytes, from, options, scratch->match_data, scratch->match_context);
  if (got == PCRE2_ERROR_JIT_STACKLIMIT) /* deep recursion: the interpreter's stack is on the heap */
    got = pcre2_match(step->code, (PCRE2_SPTR)text, n_bytes, from, options | PCRE2_NO_JIT, scratch->match_data, scratch->match_context);
  if (got == PCRE2_ERROR_NOMATCH) return 0;
  if (got < 0) return got == PCRE2_ERROR_NOMEMORY ? PRETOK_NO_MEMORY : PRETOK_OVER_LIMIT;
  const PCRE2_SIZE *spans = pcre2_get_ovector_pointer(scratch->match_data);
  *start = spans[0];
  *end = spans[1];
  return 1;
}
