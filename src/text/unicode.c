/* See unicode.h. Normalisation works in runs: a starter and the marks after it are decomposed, sorted by combining class (stable,
 * counting sort for long runs so that a megabyte of marks stays linear) and, for NFC, composed again; Hangul is computed. */
#include "text/unicode.h"

#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "text/unicode_tables.h"

enum { S_BASE = 0xAC00, L_BASE = 0x1100, V_BASE = 0x1161, T_BASE = 0x11A7, L_COUNT = 19, V_COUNT = 21, T_COUNT = 28 };
enum { S_COUNT = L_COUNT * V_COUNT * T_COUNT, SHORT_RUN = 32 };

static unsigned lookup(uint32_t c)
{
  size_t at = (size_t)unicode_stage1[c >> 8] * 256 + (c & 255);
  return unicode_stage2[at / 2] >> (at % 2 * 4) & 15;
}

enum unicode_class unicode_class(uint32_t code_point) { return code_point < 0x110000 ? lookup(code_point) & 7 : UNICODE_OTHER; }

static int32_t combining_class(uint32_t c)
{
  int32_t low = 0, high = unicode_n_ccc_runs;
  if (c < 0x300) return 0;
  while (low < high) {
    int32_t mid = (low + high) / 2;
    if (c > unicode_ccc_runs[mid].high) low = mid + 1;
    else if (c < unicode_ccc_runs[mid].low) high = mid;
    else return unicode_ccc_runs[mid].ccc;
  }
  return 0;
}

static const struct unicode_decomposition *find_decomposition(uint32_t c)
{
  int32_t low = 0, high = unicode_n_decompositions;
  while (low < high) {
    int32_t mid = (low + high) / 2;
    if (unicode_decompositions[mid].code == c) return &unicode_decompositions[mid];
    if (unicode_decompositions[mid].code < c) low = mid + 1;
    else high = mid;
  }
  return NULL;
}

/* The primary composite of a pair, 0 when there is none. */
static uint32_t compose_pair(uint32_t first, uint32_t second)
{
  if (first >= L_BASE && first < L_BASE + L_COUNT && second >= V_BASE && second < V_BASE + V_COUNT)
    return S_BASE + ((first - L_BASE) * V_COUNT + (second - V_BASE)) * T_COUNT;
  if (first >= S_BASE && first < S_BASE + S_COUNT && (first - S_BASE) % T_COUNT == 0 && second > T_BASE && second < T_BASE + T_COUNT)
    return first + (second - T_BASE);
  int32_t low = 0, high = unicode_n_compositions;
  while (low < high) {
    int32_t mid = (low + high) / 2;
    const struct unicode_composition *row = &unicode_compositions[mid];
    if (row->first == first && row->second == second) return row->code;
    if (row->first < first || (row->first == first && row->second < second)) low = mid + 1;
    else high = mid;
  }
  return 0;
}

struct mark { uint32_t code; int32_t ccc; };

/* One starter with its marks, waiting to be sorted and written. */
struct run {
  struct mark *marks;
  size_t n, capacity;
  struct mark local[SHORT_RUN];
  bool compose, failed;
  struct buf *out;
};

static void run_push(struct run *run, uint32_t code, int32_t ccc)
{
  if (run->n == run->capacity) {
    size_t capacity = run->capacity * 2;
    struct mark *grown = mem_realloc(run->marks == run->local ? NULL : run->marks, capacity * sizeof *grown);
    if (!grown) {
      run->failed = true;
      return;
    }
    if (run->marks == run->local) memcpy(grown, run->local, run->n * sizeof *grown);
    run->marks = grown;
    run->capacity = capacity;
  }
  run->marks[run->n++] = (struct mark){code, ccc};
}

/* Stable sort by combining class; index 0 may be the starter (class 0), which stays in front. */
static void run_sort(struct run *run)
{
  if (run->n <= SHORT_RUN) {
    for (size_t i = 1; i < run->n; i++) {
      struct mark mark = run->marks[i];
      size_t j = i;
      for (; j > 0 && run->marks[j - 1].ccc > mark.ccc; j--) run->marks[j] = run->marks[j - 1];
      run->marks[j] = mark;
    }
    return;
  }
  size_t start[257] = {0};
  struct mark *sorted = mem_alloc(run->n * sizeof *sorted);
  if (!sorted) {
    run->failed = true;
    return;
  }
  for (size_t i = 0; i < run->n; i++) start[run->marks[i].ccc + 1]++;
  for (int i = 1; i < 257; i++) start[i] += start[i - 1];
  for (size_t i = 0; i < run->n; i++) sorted[start[run->marks[i].ccc]++] = run->marks[i];
  memcpy(run->marks, sorted, run->n * sizeof *sorted);
  mem_free(sorted);
}

/* Canonical composition inside the run (UAX #15, D117): a mark joins the starter unless one of equal or higher class stands between. */
static void run_compose(struct run *run)
{
  if (run->n < 2 || run->marks[0].ccc != 0) return;
  size_t kept = 1;
  int32_t last_ccc = 0;
  for (size_t i = 1; i < run->n; i++) {
    struct mark mark = run->marks[i];
    bool is_blocked = kept > 1 && last_ccc >= mark.ccc;
    uint32_t joined = is_blocked ? 0 : compose_pair(run->marks[0].code, mark.code);
    if (joined) {
      run->marks[0].code = joined;
      continue;
    }
    run->marks[kept++] = mark;
    last_ccc = mark.ccc;
  }
  run->n = kept;
}

/* Write the run out, except that a lone starter may still join the next starter, so `next` is looked at first. */
static void run_flush(struct run *run)
{
  char bytes[4];
  run_sort(run);
  if (run->compose && !run->failed) run_compose(run);
  for (size_t i = 0; i < run->n && !run->failed; i++)
    if (!buf_append(run->out, bytes, utf8_encode(run->marks[i].code, bytes))) run->failed = true;
  run->n = 0;
}

static void take(struct run *run, uint32_t c)
{
  int32_t ccc = combining_class(c);
  if (ccc == 0 && run->n) {
    if (run->compose) { /* starters may compose with a starter directly before them (Hangul, some Indic vowels) */
      run_sort(run);
      if (!run->failed) run_compose(run);
      uint32_t joined = run->n == 1 && run->marks[0].ccc == 0 ? compose_pair(run->marks[0].code, c) : 0;
      if (joined) {
        run->marks[0].code = joined;
        return;
      }
    }
    run_flush(run);
  }
  run_push(run, c, ccc);
}

static void decompose(struct run *run, uint32_t c)
{
  if (c < 0xC0) {
    take(run, c);
    return;
  }
  if (c >= S_BASE && c < S_BASE + S_COUNT) {
    uint32_t index = c - S_BASE;
    take(run, L_BASE + index / (V_COUNT * T_COUNT));
    take(run, V_BASE + index % (V_COUNT * T_COUNT) / T_COUNT);
    if (index % T_COUNT) take(run, T_BASE + index % T_COUNT);
    return;
  }
  const struct unicode_decomposition *row = find_decomposition(c);
  if (!row) {
    take(run, c);
    return;
  }
  decompose(run, row->first); /* at most four levels in Unicode's data */
  if (row->second) decompose(run, row->second);
}

/* Whether NFC leaves a character alone whatever stands before it. */
static bool is_stable(const char *text, size_t n_bytes, size_t at, size_t *length)
{
  unsigned char c = (unsigned char)text[at];
  if (c < 0xCC) { /* below U+0300 everything is stable */
    *length = c < 0x80 ? 1 : 2;
    return true;
  }
  return !(lookup(utf8_decode(text + at, n_bytes - at, length)) & 8);
}

/* Next stretch that NFC may change, from `from` on: it begins with the stable character before the first one that is not, and ends before
 * the next stable one. False: none. */
static bool next_unstable(const char *text, size_t n_bytes, size_t from, size_t *start, size_t *end)
{
  size_t at = from, previous = from, length;
  for (; at < n_bytes && is_stable(text, n_bytes, at, &length); at += length) previous = at;
  if (at >= n_bytes) return false;
  *start = previous;
  while (at < n_bytes && !is_stable(text, n_bytes, at, &length)) at += length;
  *end = at;
  return true;
}

bool unicode_normalize(const char *text, size_t n_bytes, bool compose, struct buf *out)
{
  struct run run = {.capacity = SHORT_RUN, .compose = compose, .out = out};
  size_t done = 0, start = 0, end = n_bytes, length;
  run.marks = run.local;
  while (!run.failed && done < n_bytes) {
    if (compose && !next_unstable(text, n_bytes, done, &start, &end)) break;
    if (!buf_append(out, text + done, start - done)) run.failed = true;
    for (size_t i = start; i < end && !run.failed; i += length) decompose(&run, utf8_decode(text + i, n_bytes - i, &length));
    run_flush(&run);
    done = end;
  }
  if (!run.failed && !buf_append(out, text + done, n_bytes - done)) run.failed = true;
  if (run.marks != run.local) mem_free(run.marks);
  return !run.failed;
}

bool unicode_is_surely_nfc(const char *text, size_t n_bytes)
{
  size_t start, end;
  return !next_unstable(text, n_bytes, 0, &start, &end);
}
