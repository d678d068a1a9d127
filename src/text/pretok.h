/* Pre-tokenizer: cuts a normalised text into the pre-tokens that BPE merges inside.
 *
 * A pre-tokenizer is a list of steps; each step cuts every span that the one before it gave (and may rewrite it: Metaspace, prefix space).
 * The well-known regular expressions (GPT-2, Llama 3, Qwen 2) are recognised by their text and scanned by hand; any other goes through
 * PCRE2 with JIT. Both give the same spans; tests/unit/text/test_tokenizer_pretok.c holds them against each other.
 *
 * Rules: 1. Immutable after building; threads share it, each with its own pretok_scratch. 2. Spans come in order and are never empty.
 * 3. A regular expression works under PCRE2's match limit and a time budget per scratch, so a hostile text gives an error, never a hang. */
#ifndef SITS_TEXT_PRETOK_H
#define SITS_TEXT_PRETOK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "sits2026/status.h"

enum pretok_behavior { /* what becomes of the matches of a Split (Hugging Face's names) */
  PRETOK_REMOVED, PRETOK_ISOLATED, PRETOK_MERGED_WITH_PREVIOUS, PRETOK_MERGED_WITH_NEXT, PRETOK_CONTIGUOUS
};

enum pretok_kind {
  PRETOK_GPT2,          /* scanners that cover the whole span */
  PRETOK_LLAMA3,        /* also Qwen 2: max_digits 1 */
  PRETOK_REGEX,         /* matchers, with behavior and is_inverted */
  PRETOK_NUMBERS,       /* \p{N} (max_digits 1) or \p{N}+ (max_digits 0) */
  PRETOK_PUNCTUATION,   /* one ASCII or Unicode punctuation character */
  PRETOK_SPACES,        /* one White_Space character */
  PRETOK_TRAILING_SPACE,/* \s+$ without PCRE2's quadratic search */
  PRETOK_METASPACE,     /* rewriters */
  PRETOK_PREFIX_SPACE,  /* a space before a span that does not start with one (ByteLevel add_prefix_space) */
};

enum pretok_prepend { PRETOK_NEVER, PRETOK_FIRST, PRETOK_ALWAYS };

struct pretok_step {
  enum pretok_kind kind;
  enum pretok_behavior behavior;
  bool is_inverted;
  int max_digits;
  bool folds_long_s;         /* LLAMA3: (?i:'s) also takes U+017F, as a Unicode case-folding regular expression does */
  void *code;                /* REGEX: pcre2_code, owned */
  char replacement[5];       /* METASPACE: one character, terminated */
  enum pretok_prepend prepend;
  bool splits;               /* METASPACE: cut before every replacement character */
};

enum { PRETOK_MAX_STEPS = 12 };
struct pretok { struct pretok_step steps[PRETOK_MAX_STEPS]; int n; };

/* Add a Split by a regular expression in the syntax of Oniguruma (as Hugging Face has it) or a literal string. The text is recognised where
 * it is a well-known one, unless forces_regex. SITS_UNSUPPORTED naming what PCRE2 would read differently, SITS_FORMAT for a bad pattern. */
enum sits_status pretok_add_split(struct pretok *pretok, const char *pattern, size_t n_bytes, bool is_literal,
                                  enum pretok_behavior behavior, bool is_inverted, bool forces_regex,
                                  struct sits_error *err) SITS_MUST_CHECK;
/* Add a ready step; SITS_UNSUPPORTED when there are too many. */
enum sits_status pretok_add(struct pretok *pretok, const struct pretok_step *step, struct sits_error *err) SITS_MUST_CHECK;
void pretok_fini(struct pretok *pretok);

extern const char pretok_gpt2_pattern[], pretok_llama3_pattern[], pretok_qwen2_pattern[];

/* Per-thread scratch; init to {0}. */
struct pretok_scratch {
  void *match_data, *match_context; /* pcre2_match_data, pcre2_match_context */
  int64_t deadline_us;              /* monotonic; 0 until the first regular expression runs */
  uint32_t n_attempts;
};
void pretok_scratch_fini(struct pretok_scratch *scratch);

typedef enum sits_status pretok_emit(void *context, const char *text, size_t n_bytes);

/* Cut valid UTF-8 and hand every pre-token to emit. at_start: text is the very start of the input. Stops at the first failure.
 * SITS_INVALID_ARGUMENT when a regular expression went over its limits, SITS_NOMEM. */
enum sits_status pretok_run(const struct pretok *pretok, struct pretok_scratch *scratch, const char *text, size_t n_bytes, bool at_start,
                            pretok_emit *emit, void *context) SITS_MUST_CHECK;

/* Ends of matches of the hand-written scanners, from < n_bytes (pretok_scan.c). */
size_t pretok_scan_gpt2(const char *text, size_t n_bytes, size_t from);
size_t pretok_scan_llama3(const char *text, size_t n_bytes, size_t from, int max_digits, bool folds_long_s);

/* The PCRE2 side (pretok_regex.c). Next match at or after `from`: 1 and the span, 0 none, or one of the negative values. */
enum { PRETOK_OVER_LIMIT = -1, PRETOK_NO_MEMORY = -2 };
int pretok_regex_next(const struct pretok_step *step, struct pretok_scratch *scratch, const char *text, size_t n_bytes, size_t from,
                      size_t *start, size_t *end);
enum sits_status pretok_regex_compile(const char *pattern, size_t n_bytes, bool is_literal, void **code, struct sits_error *err)
    SITS_MUST_CHECK;
void pretok_regex_free(void *code);

#endif
