/* Several models side by side: the items of --models, compiled where they are recipes, and opened. Entry points: eval_contenders_list,
 * eval_contender_open, eval_contenders_close; eval_weight_bytes, eval_write_json, which their commands share. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/outfile.h"
#include "tensor/engine_file.h"
#include "tools/compile/compile.h"
#include "tools/eval/eval.h"

static bool is_recipe(const char *item)
{
  const size_t n = strlen(item);
  for (int i = 0; i < quant_recipe_count(); i++)
    if (strcmp(quant_recipe_name(i), item) == 0) return true;
  return n > 5 && strcmp(item + n - 5, ".yaml") == 0;
}

static enum sits_status compile_item(const struct eval_options *o, const char *recipe, struct eval_contender *c, struct sits_error *err)
{
  const char *folder = getenv("TMPDIR");
  if (!o->model)
    return sits_fail_param(err, SITS_CONFIG, "models", "'%.64s' is a recipe: give --model, the model to compile by it", recipe);
  if ((size_t)snprintf(c->path, sizeof c->path, "%s/sits2026-eval-XXXXXX", folder ? folder : "/tmp") >= sizeof c->path)
    return sits_fail_param(err, SITS_CONFIG, "models", "the temporary folder's name is too long");
  const int file = mkstemp(c->path);
  if (file < 0) return sits_fail(err, SITS_IO, "%.150s: %s", c->path, strerror(errno));
  close(file);
  c->is_temporary = true;
  const struct compile_options compile = {
      .model = o->model, .output = c->path, .recipe = recipe, .target = "any", .kv_cache_compress = "none", .calibration = o->calibration,
      .calibration_windows = o->calibration_windows, .calibration_ctx = o->ctx < 8 ? 8 : o->ctx, .threads = o->threads,
      .hessian_memory = (int64_t)2 << 30, .quiet = true};
  struct compile_result result;
  const enum sits_status status = compile_run(&compile, &result, err);
  if (!status) c->compile_s = result.seconds;
  return status;
}

static const char *tail_of(const char *path)
{
  const char *slash = strrchr(path, '/');
  return slash && slash[1] ? slash + 1 : path;
}

/* text: one item, changed. list: those before it, among which an equal recipe is not compiled again. */
static enum sits_status take_item(const struct eval_options *o, char *text, const struct eval_contender *list, int32_t n_before,
                                  struct eval_contender *c, struct sits_error *err)
{
  char *at = strrchr(text, '@');
  snprintf(c->name, sizeof c->name, "%s", tail_of(text));
  snprintf(c->kv, sizeof c->kv, "%s", at ? at + 1 : o->kv_cache_dtype);
  if (at) *at = '\0';
  if (!*text) return sits_fail_param(err, SITS_CONFIG, "models", "an item of --models is empty");
  if (!is_recipe(text)) {
    if ((size_t)snprintf(c->path, sizeof c->path, "%s", text) < sizeof c->path) return SITS_OK;
    return sits_fail_param(err, SITS_CONFIG, "models", "a path of --models is too long");
  }
  if ((size_t)snprintf(c->recipe, sizeof c->recipe, "%s", text) >= sizeof c->recipe)
    return sits_fail_param(err, SITS_CONFIG, "models", "a path of --models is too long");
  for (int32_t i = 0; i < n_before; i++) {
    if (strcmp(list[i].recipe, text) != 0) continue;
    memcpy(c->path, list[i].path, sizeof c->path);
    c->compile_s = list[i].compile_s;
    return SITS_OK;
  }
  return compile_item(o, text, c, err);
}

enum sits_status eval_contenders_list(const struct eval_options *options, struct eval_contender **out, int32_t *n, struct sits_error *err)
{
  if (!options->models) return sits_fail_param(err, SITS_CONFIG, "models", "no models: give --models ITEM,ITEM,...");
  char *text = mem_strdup(options->models), *rest = text;
  struct eval_contender *list = mem_calloc(EVAL_MOST_CONTENDERS, sizeof *list);
  enum sits_status status = text && list ? SITS_OK : sits_fail(err, SITS_NOMEM, "out of memory");
  int32_t n_made = 0;
  for (char *item; !status && rest; n_made++) {
    item = rest;
    char *comma = strchr(item, ',');
    rest = comma ? comma + 1 : NULL;
    if (comma) *comma = '\0';
    if (n_made == EVAL_MOST_CONTENDERS) {
      status = sits_fail_param(err, SITS_CONFIG, "models", "more than %d items in --models", EVAL_MOST_CONTENDERS);
      break;
    }
    status = take_item(options, item, list, n_made, &list[n_made], err);
  }
  mem_free(text);
  if (status) {
    eval_contenders_close(list, n_made);
    return status;
  }
  *out = list;
  *n = n_made;
  return SITS_OK;
}

enum sits_status eval_contender_open(struct eval_contender *c, const struct eval_options *options, int32_t max_length, int32_t max_rows,
                                     struct sits_error *err)
{
  struct eval_options own = *options;
  own.model = c->path;
  own.kv_cache_dtype = c->kv;
  return eval_session_open(&c->session, &own, 1, max_length, max_rows, err);
}

void eval_contenders_close(struct eval_contender *list, int32_t n)
{
  for (int32_t i = 0; list && i < n; i++) {
    eval_session_close(&list[i].session);
    if (list[i].is_temporary) unlink(list[i].path);
  }
  mem_free(list);
}

uint64_t eval_weight_bytes(const struct eval_session *session)
{
  const struct source *source = session->runner.model->source;
  uint64_t n_bytes = 0;
  for (int64_t i = 0; source && i < source_n_tensors(source); i++) {
    const struct sits_utd *u = source_tensor_at(source, i);
    const int64_t n_groups = engine_file_n_groups(u);
    n_bytes += u->n_bytes + (n_groups > 0 ? (uint64_t)n_groups * (u->minimums ? 4 : 2) : 0);
  }
  return n_bytes;
}

enum sits_status eval_write_json(const json_t *value, const char *path, struct sits_error *err)
{
  char part[4112];
  snprintf(part, sizeof part, "%.4000s.part", path);
  if (!value) return sits_fail(err, SITS_NOMEM, "out of memory");
  const enum sits_status status = outfile_check(path, err);
  if (status) return status;
  if (json_dump_file(value, part, JSON_INDENT(1) | JSON_REAL_PRECISION(17)) == 0 && rename(part, path) == 0) return SITS_OK;
  unlink(part);
  return sits_fail_param(err, SITS_IO, "out", "%.150s: cannot be written: %s", path, strerror(errno));
}
