/* What prompt lookup is worth and what it costs where it is off: two engines of the same model, one without speculation, take turns.
 *
 *   one stream     passages that begin once more, one at a time: speed with and without, and that the answers are equal
 *   many streams   pairs of runs of the same requests, as many at once as --streams says, each replaced when it ends: the ratio of the
 *                  speeds in each pair, their median and its 95 % interval. Who goes first changes. First answers are of several lengths,
 *                  so that ends do not fall together; counted is from when all the first have spoken until the last is sent.
 *
 * Entry point: engine_bench_speculation. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "text/tokenizer.h"
#include "tools/bench/bench.h"
#include "tools/bench/engine_bench.h"

enum { PASSAGE = 300, PASSAGE_AGAIN = 24, BUSY_PROMPT = 64, MOST_STREAMS = 64, MOST_PAIRS = 1000, MOST_TEXT = 200000, BUSY_ROUNDS = 4 };
enum { WITHOUT, WITH, SIDES };

struct stream { struct sits_request *request; int64_t n; bool is_done; };

struct lab {
  const struct engine_bench_options *options;
  struct engine_run runs[SIDES];
  struct token_list text;
};

static bool read_text(const char *path, char *text, size_t n_bytes)
{
  FILE *file = path ? fopen(path, "rb") : NULL;
  size_t n = file ? fread(text, 1, n_bytes - 1, file) : 0;
  if (file) fclose(file);
  text[n] = '\0';
  if (n == 0) fprintf(stderr, "sits2026-bench engine: speculation needs --text with a readable file\n");
  return n > 0;
}

static void close_lab(struct lab *lab)
{
  for (int side = 0; side < SIDES; side++) instance_close(lab->runs[side].instance);
  token_list_fini(&lab->text);
}

static bool open_lab(struct lab *lab, int64_t longest)
{
  static char text[MOST_TEXT];
  const struct engine_bench_options *o = lab->options;
  struct tokenizer *tokenizer = NULL;
  struct sits_error err = {0};
  if (!read_text(o->text, text, sizeof text)) return false;
  for (int side = 0; side < SIDES; side++) {
    const struct instance_options more = {.max_num_seqs = o->streams > 16 ? (int32_t)o->streams : 16, .kv_cache_bytes = 256 << 20,
                                          .spec_max_tokens = side == WITH ? (int32_t)o->draft : 0};
    if (!engine_bench_open(&lab->runs[side], o, more, longest)) return false;
  }
  enum sits_status status = tokenizer_load(instance_model(lab->runs[0].instance)->source, &tokenizer, &err);
  if (status == SITS_OK) status = tokenizer_encode(tokenizer, text, strlen(text), 0, &lab->text);
  tokenizer_destroy(tokenizer);
  if (status == SITS_OK && lab->text.n < PASSAGE) status = sits_fail(&err, SITS_CONFIG, "--text has less than one passage");
  if (status != SITS_OK) fprintf(stderr, "sits2026-bench engine: %s\n", err.text);
  return status == SITS_OK;
}

static const int32_t *passage(const struct lab *lab, int64_t index)
{
  return lab->text.ids + index % (lab->text.n / PASSAGE) * PASSAGE;
}

/* A passage and its beginning once more: what an edit or a quotation looks like to the model. Returns the time from the first token of the
 * answer to its last, in microseconds; -1 after a message. */
static int64_t answer(struct lab *lab, int side, int64_t index, int32_t *tokens)
{
  int32_t prompt[PASSAGE + PASSAGE_AGAIN];
  memcpy(prompt, passage(lab, index), PASSAGE * sizeof *prompt);
  memcpy(prompt + PASSAGE, passage(lab, index), PASSAGE_AGAIN * sizeof *prompt);
  struct sits_request *request = engine_bench_submit(&lab->runs[side], prompt, PASSAGE + PASSAGE_AGAIN, (int32_t)lab->options->output);
  if (!request) return -1;
  struct sits_event e = {0};
  int64_t first_us = 0, last_us = 0;
  for (int64_t n = 0; e.kind != SITS_EVENT_FINISH;) {
    if (sits_request_poll(request, &e) != SITS_OK) {
      engine_bench_nap();
      continue;
    }
    if (e.kind != SITS_EVENT_TOKEN) continue;
    if (n == 0) first_us = e.emitted_us;
    last_us = e.emitted_us;
    tokens[n++] = e.token;
  }
  sits_request_release(request);
  return last_us - first_us;
}

static bool measure_one(struct lab *lab, json_t *rows)
{
  const struct engine_bench_options *o = lab->options;
  const size_t n_bytes = (size_t)o->output * sizeof(int32_t);
  int32_t *tokens[SIDES] = {mem_calloc(1, n_bytes), mem_calloc(1, n_bytes)};
  int64_t busy_us[SIDES] = {0};
  bool is_same = true, is_good = tokens[WITHOUT] && tokens[WITH];
  for (int64_t i = 0; is_good && i < o->texts; i++) {
    for (int side = 0; is_good && side < SIDES; side++) {
      int64_t us = answer(lab, side, i, tokens[side]);
      busy_us[side] += us;
      is_good = us >= 0;
    }
    is_same = is_same && is_good && memcmp(tokens[WITHOUT], tokens[WITH], n_bytes) == 0;
  }
  if (is_good) {
    struct engine_stats stats;
    engine_stats(lab->runs[WITH].engine, &stats);
    const double n_tokens = (double)(o->texts * (o->output - 1)) * 1e6;
    const double with = n_tokens / fmax(1, (double)busy_us[WITH]), without = n_tokens / fmax(1, (double)busy_us[WITHOUT]);
    fprintf(stderr, "speculation: %.1f tokens/s, %.1f without (%.2fx), %llu of %llu drafted tokens right, answers %s\n", with, without,
            with / without, (unsigned long long)stats.spec_accepted_tokens, (unsigned long long)stats.spec_draft_tokens,
            is_same ? "equal" : "DIFFER");
    json_array_append_new(rows, json_pack("{s:f, s:f, s:I, s:I, s:b}", "tokens_per_s", with, "tokens_per_s_without", without, "drafted",
                                          (json_int_t)stats.spec_draft_tokens, "accepted", (json_int_t)stats.spec_accepted_tokens,
                                          "answers_equal", is_same));
  }
  for (int side = 0; side < SIDES; side++) mem_free(tokens[side]);
  return is_good;
}

/* The stream's tokens that have come; returns when the last of them did, or last_us. */
static int64_t take(struct stream *s, int64_t *n_tokens, int64_t last_us)
{
  struct sits_event e;
  while (sits_request_poll(s->request, &e) == SITS_OK) {
    s->is_done = s->is_done || e.kind == SITS_EVENT_FINISH;
    if (e.kind != SITS_EVENT_TOKEN) continue;
    s->n++;
    ++*n_tokens;
    if (e.emitted_us > last_us) last_us = e.emitted_us;
  }
  return last_us;
}

static void stop(struct stream *s)
{
  sits_request_cancel(s->request, -1);
  if (!s->is_done) engine_bench_await(s->request);
  sits_request_release(s->request);
}

/* Tokens a second of one run; the requests are those of run number `run`. Negative after a message. */
static double busy_rate(struct lab *lab, int side, int64_t run)
{
  const struct engine_bench_options *o = lab->options;
  const int32_t n_streams = (int32_t)o->streams;
  struct stream streams[MOST_STREAMS] = {{0}};
  int64_t n_sent = 0, n_tokens = 0, last_us = 0, from_us = 0, n_from = 0;
  bool is_good = true;
  while (is_good && n_sent < o->texts) {
    int32_t n_spoken = 0;
    for (int32_t i = 0; i < n_streams && n_sent < o->texts; i++) {
      struct stream *s = &streams[i];
      if (s->request) last_us = take(s, &n_tokens, last_us);
      n_spoken += s->n > 0 || n_sent > n_streams;
      if (s->request && !s->is_done) continue;
      sits_request_release(s->request);
      const int32_t n_output = (int32_t)(n_sent < n_streams ? 1 + o->output * (n_sent + 1) / n_streams : o->output);
      const int32_t *prompt = passage(lab, run * o->texts + n_sent++);
      *s = (struct stream){.request = engine_bench_submit(&lab->runs[side], prompt, BUSY_PROMPT, n_output)};
      is_good = is_good && s->request;
    }
    if (from_us == 0 && n_spoken == n_streams) {
      from_us = last_us;
      n_from = n_tokens;
    }
    engine_bench_nap();
  }
  for (int32_t i = 0; i < n_streams; i++) {
    if (streams[i].request) stop(&streams[i]);
  }
  if (!is_good) return -1;
  if (from_us == 0 || n_tokens == n_from) {
    fprintf(stderr, "sits2026-bench engine: --texts %lld were all sent before a speed could be measured\n", (long long)o->texts);
    return -1;
  }
  return (double)(n_tokens - n_from) * 1e6 / fmax(1, (double)(last_us - from_us));
}

static bool measure_pairs(struct lab *lab, json_t *rows)
{
  const struct engine_bench_options *o = lab->options;
  double rates[SIDES][MOST_PAIRS], ratios[MOST_PAIRS];
  struct engine_stats stats;
  json_t *all = json_array();
  for (int64_t i = 0; i < o->pairs; i++) {
    for (int turn = 0; turn < SIDES; turn++) {
      const int side = (turn + i) % SIDES;
      rates[side][i] = busy_rate(lab, side, i);
      if (rates[side][i] < 0) {
        json_decref(all);
        return false;
      }
    }
    ratios[i] = rates[WITH][i] / rates[WITHOUT][i];
    json_array_append_new(all, json_real(round(1e4 * ratios[i]) * 1e-4));
  }
  engine_stats(lab->runs[WITH].engine, &stats);
  const double median = bench_percentile(ratios, o->pairs, 50); /* sorted from here on */
  const int64_t reach = (int64_t)(0.98 * sqrt((double)o->pairs) + 1), low = o->pairs / 2 - reach, high = (o->pairs - 1) / 2 + reach;
  const double least = ratios[low > 0 ? low : 0], most = ratios[high < o->pairs ? high : o->pairs - 1];
  const double with = bench_percentile(rates[WITH], o->pairs, 50), without = bench_percentile(rates[WITHOUT], o->pairs, 50);
  fprintf(stderr, "speculation: %lld streams, %.1f tokens/s, %.1f without; of %lld pairs the median is %.4f (95 %%: %.4f to %.4f), "
                  "%llu tokens drafted\n",
          (long long)o->streams, with, without, (long long)o->pairs, median, least, most, (unsigned long long)stats.spec_draft_tokens);
  json_t *row = json_pack("{s:I, s:I, s:f, s:f, s:f, s:[f, f], s:I}", "streams", (json_int_t)o->streams, "pairs", (json_int_t)o->pairs,
                          "tokens_per_s", with, "tokens_per_s_without", without, "ratio_median", median, "ratio_median_95", least, most,
                          "drafted", (json_int_t)stats.spec_draft_tokens);
  json_object_set_new(row, "ratios", all);
  json_array_append_new(rows, row);
  return true;
}

bool engine_bench_speculation(const struct engine_bench_options *o, json_t *rows)
{
  struct lab lab = {.options = o};
  const bool is_busy = o->streams > 1;
  if (is_busy && o->texts < BUSY_ROUNDS * o->streams) {
    fprintf(stderr, "sits2026-bench engine: --texts %lld is too few for --streams %lld, each of which is to be replaced: %lld at least\n",
            (long long)o->texts, (long long)o->streams, (long long)(BUSY_ROUNDS * o->streams));
    return false;
  }
  bool is_good = open_lab(&lab, o->output + 1 + (is_busy ? BUSY_PROMPT : PASSAGE + PASSAGE_AGAIN)) &&
                 (is_busy ? measure_pairs : measure_one)(&lab, rows);
  close_lab(&lab);
  return is_good;
}
