/* Steps of any mixture on the CUDA backend: decodes and prompt chunks of all lengths side by side, in any order of sequences, over pages
 * that sequences before left behind. Every sequence's logits against those of the same tokens read at once.
 *
 * Model: synthetic:tiny; argv[1]: another. Tolerance: other shapes of products, and int4 and fp4 pages that see other roundings.
 */
#include <string.h>

#include "engine/runner.h"
#include "gpu_test.h"

enum { SEQS = 12, LONGEST = 1600, PAGES = LONGEST / KV_PAGE_TOKENS, POOL_PAGES = (SEQS + 1) * PAGES, TOKENS = 2048, MOST_VOCAB = 200000 };

static struct runner runner;
static float got[MOST_VOCAB], whole[MOST_VOCAB];

struct sequence { int32_t text, at, prompt, end; };            /* tokens in the cache, of the prompt, when it is over */
struct part { int32_t seq, n; };                               /* a step's share of a sequence */
static struct sequence sequences[SEQS + 1];                    /* the last one: for reading at once */

static int32_t token_of(int32_t text, int32_t at)
{
  return (int32_t)(((uint32_t)(text * 7919 + at) * 2654435761U >> 7) % (uint32_t)runner.model->config.n_vocab);
}

static struct backend_result result;

static enum sits_status step(const struct part *parts, int32_t n_parts)
{
  static int32_t tokens[TOKENS], positions[TOKENS], table[SEQS][PAGES], start[SEQS + 1], kv_len[SEQS], rows[SEQS];
  int32_t n = 0;
  for (int32_t i = 0; i < n_parts; i++) {
    struct sequence *s = &sequences[parts[i].seq];
    start[i] = n;
    for (int32_t k = 0; k < parts[i].n; k++, n++) tokens[n] = token_of(s->text, s->at + k), positions[n] = s->at + k;
    s->at += parts[i].n;
    kv_len[i] = s->at, rows[i] = n - 1;
    for (int32_t p = 0; p < PAGES; p++) table[i][p] = parts[i].seq * PAGES + p;
  }
  start[n_parts] = n;
  const struct backend_batch batch = {.n_tokens = n, .n_seqs = n_parts, .n_rows = n_parts, .tokens = tokens, .positions = positions,
                                      .seq_start = start, .kv_len = kv_len, .block_table = table[0], .table_stride = PAGES,
                                      .row_token = rows};
  const enum sits_status status = runner.vtable->submit(runner.compiled, runner.kv, &batch);
  return status ? status : runner.vtable->wait(runner.compiled, &result);
}

/* How far row `row` of the newest step is from the same tokens read at once; infinite where a step fails. */
static double distance(int32_t seq, int32_t row)
{
  const size_t vocab = (size_t)runner.model->config.n_vocab;
  memcpy(got, result.logits + (size_t)row * vocab, vocab * sizeof *got);
  sequences[SEQS] = (struct sequence){.text = sequences[seq].text};
  if (step(&(struct part){SEQS, sequences[seq].at}, 1) != SITS_OK) return 1e30;
  memcpy(whole, result.logits, vocab * sizeof *whole);
  return relative_error(got, whole, vocab);
}

static int32_t below(int32_t n) { return (int32_t)(rand_u32() % (uint32_t)n); }

static int32_t chunk_of(int32_t left)
{
  static const int32_t usual[] = {16, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 256};
  const int32_t n = below(2) ? usual[below(sizeof usual / sizeof *usual)] : 1 + below(below(3) ? 40 : 300);
  return n < left ? n : left;
}

/* Which sequences take part in the next step, in random order. Some begin anew. */
static int32_t choose(struct part *parts)
{
  int32_t order[SEQS], n = 0, n_tokens = 0;
  const int32_t share = 1 + below(4);
  for (int32_t i = 0; i < SEQS; i++) {
    const int32_t j = below(i + 1);
    order[i] = order[j], order[j] = i;
  }
  for (int32_t i = 0; i < SEQS; i++) {
    struct sequence *s = &sequences[order[i]];
    if (s->at == s->end) *s = (struct sequence){.text = s->text + SEQS, .prompt = 1 + below(below(2) ? 300 : LONGEST - 200)};
    if (s->end == 0) s->end = s->prompt + below(200);
    if (below(4) >= share && n > 0) continue;
    const int32_t left = s->prompt - s->at, take = left <= 0 ? 1 : chunk_of(left);
    if (n_tokens + take > TOKENS - 1) break;
    parts[n++] = (struct part){order[i], take};
    n_tokens += take;
  }
  return n;
}

/* Three that decode and a prompt of about a page, wherever it stands among them. */
static bool is_right_beside_a_page(double limit)
{
  static const int32_t lengths[] = {1367, 275, 305};
  for (int32_t place = 0; place < 4; place++)
    for (int32_t n = 63; n <= 65; n++) {
      struct part parts[4];
      for (int32_t i = 0; i < 3; i++) {
        sequences[i] = (struct sequence){.text = i + place};
        if (step(&(struct part){i, lengths[i]}, 1) != SITS_OK) return false;
        parts[i < place ? i : i + 1] = (struct part){i, 1};
      }
      sequences[3] = (struct sequence){.text = 50};
      parts[place] = (struct part){3, n};
      if (step(parts, 4) != SITS_OK || distance(0, place == 0) > limit) return false;
    }
  return true;
}

static void run(const char *model, const char *codec, int32_t n_steps, double limit)
{
  struct sits_error err = {0};
  const struct runner_options options = {.model_path = model, .device = "cuda", .kv_codec = codec,
                                         .backend = {.max_batch_tokens = TOKENS, .max_seqs = SEQS, .prefill_weights = "resident"}};
  enum sits_status status = runner_open(&runner, &options, &err);
  if (!status) status = runner_kv_create(&runner, POOL_PAGES, &err);
  if (status || runner.model->config.n_vocab > MOST_VOCAB) {
    verdict(false, "open: %s", err.text);
    runner_close(&runner);
    return;
  }
  verdict(is_right_beside_a_page(limit), "%s pages: three decodes beside a prompt of about a page", codec);
  for (int32_t i = 0; i < SEQS; i++) sequences[i] = (struct sequence){.text = i};
  double worst = 0.;
  int32_t n_checked = 0;
  for (int32_t i = 0; i < n_steps && !status; i++) {
    struct part parts[SEQS];
    const int32_t n = choose(parts);
    status = step(parts, n);
    if (status || i % 16 != 15) continue;
    const int32_t row = below(n);
    const double d = distance(parts[row].seq, row);
    if (d > worst) worst = d;
    n_checked++;
  }
  verdict(status == SITS_OK, "%d steps: status %d", n_steps, status);
  verdict(worst <= limit && n_checked > 0, "%d sequences read at once: largest distance %.4f, limit %.4f", n_checked, worst, limit);
  runner_close(&runner);
}

int main(int argc, char **argv)
{
  gpu_open();
  const char *model = argc > 1 ? argv[1] : "synthetic:tiny";
  const int32_t n = gpu_is_small() ? 60 : 1500;
  run(model, "int4", n, 0.02);
  run(model, "fp4", n, 0.02);
  run(model, "f16", n, 0.02);
  return gpu_finish();
}
