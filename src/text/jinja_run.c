/* What every part of a rendering uses: failure, bounds, memory, gathered output. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "text/jinja_internal.h"

bool jinja_fail(struct jinja_run *run, const char *kind, const char *format, ...)
{
  if (run->status) return false;
  char text[SITS_ERROR_TEXT_BYTES];
  va_list args;
  va_start(args, format);
  int n = vsnprintf(text, sizeof text, format, args);
  va_end(args);
  size_t used = n < 0 ? 0 : (size_t)n < sizeof text ? (size_t)n : sizeof text - 1;
  text[used - utf8_incomplete_tail(text, used)] = '\0';
  run->status = sits_fail(run->err, SITS_TEMPLATE, "chat template line %d: %s: %s", run->line, kind, text);
  return false;
}

bool jinja_raise(struct jinja_run *run, const char *text, size_t n_bytes)
{
  if (run->status) return false;
  size_t most = n_bytes < SITS_ERROR_TEXT_BYTES - 1 ? n_bytes : SITS_ERROR_TEXT_BYTES - 1;
  most -= utf8_incomplete_tail(text, most);
  run->status = sits_fail(run->err, SITS_TEMPLATE, "%.*s", (int)most, text);
  return false;
}

bool jinja_limit(struct jinja_run *run, const char *what)
{
  if (!run->status) run->status = sits_fail(run->err, SITS_TEMPLATE, "chat template line %d: over the %s limit", run->line, what);
  return false;
}

bool jinja_charge(struct jinja_run *run, size_t steps)
{
  if (run->steps_left >= 0 && steps <= (size_t)run->steps_left) {
    run->steps_left -= (int64_t)steps;
    return true;
  }
  run->steps_left = -1;
  return jinja_limit(run, "work");
}

bool jinja_enter(struct jinja_run *run)
{
  if (run->depth >= JINJA_MAX_DEPTH) return jinja_limit(run, "recursion");
  run->depth++;
  return true;
}

void jinja_leave(struct jinja_run *run) { run->depth--; }

bool jinja_no_memory(struct jinja_run *run, size_t n_bytes)
{
  if (run->arena.n_bytes + n_bytes + 16 > JINJA_MAX_RUN_BYTES) return jinja_limit(run, "memory");
  if (!run->status) run->status = sits_fail(run->err, SITS_NOMEM, "out of memory while rendering a chat template");
  return false;
}

void *jinja_alloc(struct jinja_run *run, size_t count, size_t n_bytes)
{
  size_t total;
  bool too_much = __builtin_mul_overflow(count, n_bytes, &total) || total > JINJA_MAX_RUN_BYTES;
  void *block = too_much ? NULL : arena_alloc(&run->arena, total);
  if (!block) {
    jinja_no_memory(run, too_much ? JINJA_MAX_RUN_BYTES : total);
    return NULL;
  }
  if (!jinja_charge(run, 1 + total / 256)) return NULL;
  memset(block, 0, total);
  return block;
}

bool jinja_emit(struct jinja_run *run, struct jinja_out *out, const char *text, size_t n_bytes)
{
  if (!jinja_charge(run, 1 + n_bytes / 32)) return false;
  if (out->limit && n_bytes > out->limit - out->size) return jinja_limit(run, "output");
  if (n_bytes > out->capacity - out->size) {
    size_t capacity = out->capacity ? out->capacity * 2 : 128;
    while (capacity - out->size < n_bytes) capacity *= 2;
    char *data = jinja_alloc(run, capacity, 1);
    if (!data) return false;
    if (out->size) memcpy(data, out->data, out->size);
    out->data = data;
    out->capacity = capacity;
  }
  if (n_bytes) memcpy(out->data + out->size, text, n_bytes);
  out->size += n_bytes;
  return true;
}

bool jinja_emit_text(struct jinja_run *run, struct jinja_out *out, const char *text) { return jinja_emit(run, out, text, strlen(text)); }

bool jinja_out_str(struct jinja_run *run, struct jinja_out *out, struct jv *str)
{
  return jinja_str_view(run, out->data ? out->data : "", out->size, str);
}
