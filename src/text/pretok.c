/* See pretok.h. Steps run depth first: a span found by step i goes at once through step i + 1, and the last step emits; no list of spans
 * is ever built. */
#include "text/pretok.h"

#include <string.h>

#include "base/utf8.h"
#include "text/unicode.h"

const char pretok_gpt2_pattern[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
const char pretok_llama3_pattern[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char pretok_qwen2_pattern[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/* Patterns that have a scanner. The last alternative of GPT-2's may be missing: gaps between matches are spans all the same. */
static const struct { const char *text; struct pretok_step step; } known[] = {
  {pretok_gpt2_pattern, {.kind = PRETOK_GPT2}},
  {"'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", {.kind = PRETOK_GPT2}},
  {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)", {.kind = PRETOK_GPT2}},
  {pretok_llama3_pattern, {.kind = PRETOK_LLAMA3, .max_digits = 3, .folds_long_s = true}},
  {pretok_qwen2_pattern, {.kind = PRETOK_LLAMA3, .max_digits = 1, .folds_long_s = true}},
  {"\\p{N}", {.kind = PRETOK_NUMBERS, .max_digits = 1}},
  {"\\p{N}+", {.kind = PRETOK_NUMBERS}},
  {"\\p{N}{1,3}", {.kind = PRETOK_NUMBERS, .max_digits = 3}},
  {"\\s+$", {.kind = PRETOK_TRAILING_SPACE}},
};

enum sits_status pretok_add(struct pretok *pretok, const struct pretok_step *step, struct sits_error *err)
{
  if (pretok->n == PRETOK_MAX_STEPS) return sits_fail(err, SITS_UNSUPPORTED, "pre-tokenizer: more than %d steps", PRETOK_MAX_STEPS);
  pretok->steps[pretok->n++] = *step;
  return SITS_OK;
}

static bool is_scanner(enum pretok_kind kind) { return kind == PRETOK_GPT2 || kind == PRETOK_LLAMA3; }

enum sits_status pretok_add_split(struct pretok *pretok, const char *pattern, size_t n_bytes, bool is_literal,
                                  enum pretok_behavior behavior, bool is_inverted, bool forces_regex, struct sits_error *err)
{
  struct pretok_step step = {.kind = PRETOK_REGEX};
  for (size_t i = 0; i < sizeof known / sizeof *known && !is_literal && !forces_regex; i++) {
    if (strlen(known[i].text) != n_bytes || memcmp(known[i].text, pattern, n_bytes) != 0) continue;
    /* A scanner cuts between matches that touch; "isolated", and "removed" of the inverse, say just that. */
    bool just_cuts = behavior == PRETOK_ISOLATED || (behavior == PRETOK_REMOVED && is_inverted);
    if (just_cuts || !is_scanner(known[i].step.kind)) step = known[i].step;
  }
  step.behavior = behavior;
  step.is_inverted = is_inverted;
  if (pretok->n == PRETOK_MAX_STEPS) return pretok_add(pretok, &step, err);
  if (step.kind == PRETOK_REGEX) {
    enum sits_status status = pretok_regex_compile(pattern, n_bytes, is_literal, &step.code, err);
    if (status) return status;
  }
  return pretok_add(pretok, &step, err);
}

void pretok_fini(struct pretok *pretok)
{
  for (int i = 0; i < pretok->n; i++) pretok_regex_free(pretok->steps[i].code);
  *pretok = (struct pretok){0};
}

/* One run over one input: what is passed down from step to step. */
struct run {
  const struct pretok *pretok;
  struct pretok_scratch *scratch;
  pretok_emit *emit;
  void *context;
};

static enum sits_status run_step(struct run *run, int index, const char *text, size_t n_bytes, bool at_start);

static bool matches_one(const struct pretok_step *step, const char *text, size_t n_bytes, size_t at, size_t *length)
{
  unsigned char c = (unsigned char)text[at];
  enum unicode_class class = unicode_class(utf8_decode(text + at, n_bytes - at, length));
  switch (step->kind) {
  case PRETOK_NUMBERS: return class == UNICODE_NUMBER;
  case PRETOK_SPACES: return class == UNICODE_SPACE;
  case PRETOK_PUNCTUATION: return class == UNICODE_PUNCTUATION || (c < 0x80 && class == UNICODE_SYMBOL); /* the ASCII symbols count */
  default: return false;
  }
}

/* White space that reaches a line's end ($ stands before every "\n", and at the end), as \s+$ finds it from `from` on: greedy, so the
 * match ends at the last line end of the run of white space it starts in. */
static int next_trailing_space(const char *text, size_t n_bytes, size_t from, size_t *start, size_t *end)
{
  size_t length;
  for (size_t at = from; at < n_bytes;) {
    size_t first = at, last_end = 0;
    for (; at < n_bytes && unicode_class(utf8_decode(text + at, n_bytes - at, &length)) == UNICODE_SPACE; at += length)
      if (text[at] == '\n' && at > first) last_end = at;
    if (at == n_bytes && at > first) last_end = at;
    if (last_end) {
      *start = first;
      *end = last_end;
      return 1;
    }
    if (at < n_bytes) {
      utf8_sequence(text + at, n_bytes - at, &length);
      at += length;
    }
  }
  return 0;
}

static int next_match(struct run *run, const struct pretok_step *step, const char *text, size_t n_bytes, size_t from, size_t *start,
                      size_t *end)
{
  size_t length;
  if (step->kind == PRETOK_REGEX) return pretok_regex_next(step, run->scratch, text, n_bytes, from, start, end);
  if (step->kind == PRETOK_TRAILING_SPACE) return next_trailing_space(text, n_bytes, from, start, end);
  for (size_t at = from; at < n_bytes; at += length) {
    if (!matches_one(step, text, n_bytes, at, &length)) continue;
    *start = at;
    *end = at + length;
    int limit = step->kind == PRETOK_NUMBERS ? step->max_digits : 1;
    for (int i = 1; (limit == 0 || i < limit) && *end < n_bytes && matches_one(step, text, n_bytes, *end, &length); i++) *end += length;
    return 1;
  }
  return 0;
}

/* Segments (matches and the text between them) on their way to spans, merged as the step's behavior says. */
struct merger {
  struct run *run;
  int index;
  const char *text;
  bool at_start;
  bool has_pending, pending_is_match;
  size_t start, end; /* pending span */
};

static enum sits_status flush_span(struct merger *m)
{
  bool drops = m->run->pretok->steps[m->index].behavior == PRETOK_REMOVED && m->pending_is_match;
  if (!m->has_pending || drops || m->start == m->end) return SITS_OK;
  return run_step(m->run, m->index + 1, m->text + m->start, m->end - m->start, m->at_start && m->start == 0);
}

static enum sits_status add_segment(struct merger *m, size_t start, size_t end, bool is_match)
{
  const struct pretok_step *step = &m->run->pretok->steps[m->index];
  is_match ^= step->is_inverted;
  bool joins = false;
  if (m->has_pending) {
    if (step->behavior == PRETOK_CONTIGUOUS) joins = is_match == m->pending_is_match;
    else if (step->behavior == PRETOK_MERGED_WITH_PREVIOUS) joins = is_match && !m->pending_is_match;
    else if (step->behavior == PRETOK_MERGED_WITH_NEXT) joins = !is_match && m->pending_is_match;
  }
  if (joins) {
    m->end = end;
    m->pending_is_match = is_match;
    return SITS_OK;
  }
  enum sits_status status = flush_span(m);
  m->has_pending = true;
  m->pending_is_match = is_match;
  m->start = start;
  m->end = end;
  return status;
}

static enum sits_status run_matcher(struct run *run, int index, const char *text, size_t n_bytes, bool at_start)
{
  struct merger m = {.run = run, .index = index, .text = text, .at_start = at_start};
  size_t previous = 0, from = 0, last_end = SIZE_MAX;
  enum sits_status status = SITS_OK;
  while (!status && from <= n_bytes) {
    size_t start, end, length;
    int got = next_match(run, &run->pretok->steps[index], text, n_bytes, from, &start, &end);
    if (got < 0) return got == PRETOK_NO_MEMORY ? SITS_NOMEM : SITS_INVALID_ARGUMENT;
    if (got == 0) break;
    if (start == end && end == last_end) { /* an empty match right after a match does not count; look one character on */
      if (from >= n_bytes) break;
      utf8_sequence(text + from, n_bytes - from, &length);
      from += length;
      continue;
    }
    if (start > previous) status = add_segment(&m, previous, start, false);
    if (!status) status = add_segment(&m, start, end, true);
    previous = from = last_end = end;
  }
  if (!status && previous < n_bytes) status = add_segment(&m, previous, n_bytes, false);
  return status ? status : flush_span(&m);
}

static enum sits_status run_scanner(struct run *run, int index, const char *text, size_t n_bytes, bool at_start)
{
  const struct pretok_step *step = &run->pretok->steps[index];
  bool is_last = index + 1 == run->pretok->n;
  for (size_t at = 0, end; at < n_bytes; at = end) {
    end = step->kind == PRETOK_GPT2 ? pretok_scan_gpt2(text, n_bytes, at)
                                    : pretok_scan_llama3(text, n_bytes, at, step->max_digits, step->folds_long_s);
    enum sits_status status = is_last ? run->emit(run->context, text + at, end - at)
                                      : run_step(run, index + 1, text + at, end - at, at_start && at == 0);
    if (status) return status;
  }
  return SITS_OK;
}

/* Metaspace: spaces become the replacement, one may be put in front, and the text is cut before each. */
static enum sits_status run_metaspace(struct run *run, int index, const char *text, size_t n_bytes, bool at_start)
{
  const struct pretok_step *step = &run->pretok->steps[index];
  size_t width = strlen(step->replacement), start = 0;
  struct buf made;
  enum sits_status status = SITS_OK;
  buf_init(&made, SIZE_MAX / 4);
  bool starts_so = text[0] == ' ' || (n_bytes >= width && memcmp(text, step->replacement, width) == 0);
  bool prepends = step->prepend == PRETOK_ALWAYS || (step->prepend == PRETOK_FIRST && at_start);
  if (prepends && !starts_so) buf_append_text(&made, step->replacement);
  for (size_t i = 0; i < n_bytes; i++) {
    if (text[i] == ' ') buf_append(&made, step->replacement, width);
    else buf_append_char(&made, text[i]);
  }
  if (made.failed) {
    status = SITS_NOMEM;
    goto out;
  }
  for (size_t i = 1; step->splits && i + width <= made.size && !status; i++) {
    if (memcmp(made.data + i, step->replacement, width) != 0) continue;
    status = run_step(run, index + 1, made.data + start, i - start, at_start && start == 0);
    start = i;
  }
  if (!status) status = run_step(run, index + 1, made.data + start, made.size - start, at_start && start == 0);
out:
  buf_fini(&made);
  return status;
}

static enum sits_status run_prefix_space(struct run *run, int index, const char *text, size_t n_bytes, bool at_start)
{
  if (text[0] == ' ') return run_step(run, index + 1, text, n_bytes, at_start);
  struct buf made;
  buf_init(&made, SIZE_MAX / 4);
  enum sits_status status = SITS_NOMEM;
  if (buf_append_char(&made, ' ') && buf_append(&made, text, n_bytes)) status = run_step(run, index + 1, made.data, made.size, at_start);
  buf_fini(&made);
  return status;
}

static enum sits_status run_step(struct run *run, int index, const char *text, size_t n_bytes, bool at_start)
{
  if (index == run->pretok->n) return run->emit(run->context, text, n_bytes);
  switch (run->pretok->steps[index].kind) {
  case PRETOK_GPT2: case PRETOK_LLAMA3: return run_scanner(run, index, text, n_bytes, at_start);
  case PRETOK_METASPACE: return run_metaspace(run, index, text, n_bytes, at_start);
  case PRETOK_PREFIX_SPACE: return run_prefix_space(run, index, text, n_bytes, at_start);
  default: return run_matcher(run, index, text, n_bytes, at_start);
  }
}

enum sits_status pretok_run(const struct pretok *pretok, struct pretok_scratch *scratch, const char *text, size_t n_bytes, bool at_start,
                            pretok_emit *emit, void *context)
{
  struct run run = {pretok, scratch, emit, context};
  return n_bytes ? run_step(&run, 0, text, n_bytes, at_start) : SITS_OK;
}
