/* Random small models of many shapes through the CPU backend, against the reference backend of tests/ref: several sequences in one
 * batch, of lengths around a page, read in one step, in pieces, and token by token; every instruction-set level; fused and plain. */
#include "rig.h"
#include "synth.h"

#include "backend/cpu/cpu_isa.h"
#include "base/arena.h"
#include "ref/ref_program.h"
#include "tensor/dequant.h"

#define P KV_PAGE_TOKENS

static const struct synth_shape shapes[] = {
    /* name                      L   E   H  G   D    F   V  window rope interl bias qknorm tied */
    {"gqa 1, d 8",               2, 64,  4, 4,   8, 96, 50,   0,   0, true,  false, false, true},
    {"gqa 3, d 64",              2, 64,  3, 1,  64, 80, 50,   0,   0, false, false, false, true},
    {"gqa 4, d 80, bias",        2, 96,  8, 2,  80, 64, 50,   0,   0, false, true,  false, false},
    {"gqa 8, d 96, qk norm",     1, 64,  8, 1,  96, 64, 50,   0,   0, false, false, true,  true},
    {"gqa 2, d 128",             1, 64,  2, 1, 128, 64, 50,   0,   0, true,  true,  true,  false},
    {"window 1",                 2, 64,  4, 2,  16, 64, 50,   1,   0, false, false, false, true},
    {"window 17",                2, 64,  4, 2,  16, 64, 50,  17,   0, false, false, false, true},
    {"window P",                 2, 64,  4, 2,  16, 64, 50,   P,   0, true,  false, false, true},
    {"window P + 1",             2, 64,  4, 2,  16, 64, 50, P + 1, 0, false, false, false, true},
    {"half of the head rotated", 2, 64,  4, 2,  32, 64, 50,   0,  16, false, false, false, true},
    {"odd rows",                 2, 36,  5, 5,  12, 52, 37,   0,   0, true,  true,  false, true},
    {"one head",                 1, 32,  1, 1,   2, 32, 17,   0,   0, false, false, false, true},
};

enum { N_SEQS = 4, MAX_LEN = 2 * P + 3 };
static const int32_t lengths[N_SEQS] = {1, P - 1, P + 1, MAX_LEN};

static int32_t token_at(int32_t seq, int32_t t, int32_t V) { return (seq * 31 + t * 17 + t * t % 7) % V; }

/* What the reference says: [seq][t][V]. */
static double *reference_logits(const struct program *plain, ref_store_fn store)
{
  const int32_t V = plain->dims.n_vocab;
  double *all = mem_alloc(sizeof(double) * N_SEQS * MAX_LEN * (size_t)V);
  assert_non_null(all);
  for (int32_t s = 0; s < N_SEQS; s++) {
    struct ref_sequence *sequence = ref_sequence_create(plain, lengths[s], store);
    for (int32_t t = 0; t < lengths[s]; t++)
      ref_program_step(sequence, token_at(s, t, V), all + ((int64_t)s * MAX_LEN + t) * V);
    ref_sequence_destroy(sequence);
  }
  return all;
}

/* Read all sequences to their ends, at most `piece` tokens of each a step; the largest difference relative to the largest logit. */
static double run_and_compare(struct rig *rig, const double *want, int32_t piece)
{
  const int32_t V = rig->model->config.n_vocab;
  int32_t ids[N_SEQS][MAX_LEN], tables[N_SEQS][4], done[N_SEQS] = {0};
  double worst = 0, scale = 1e-9;
  for (int32_t s = 0; s < N_SEQS; s++) {
    for (int32_t t = 0; t < lengths[s]; t++) ids[s][t] = token_at(s, t, V);
    for (int32_t i = 0; i < 4; i++) tables[s][i] = i * N_SEQS + (s + i) % N_SEQS; /* pages interleaved between sequences */
  }
  for (;;) {
    struct rig_part parts[N_SEQS];
    int32_t seqs[N_SEQS], n_parts = 0, row = 0;
    for (int32_t s = 0; s < N_SEQS; s++) {
      const int32_t left = lengths[s] - done[s], n = left < piece ? left : piece;
      if (n == 0) continue;
      parts[n_parts] = (struct rig_part){ids[s] + done[s], n, done[s], tables[s]};
      seqs[n_parts++] = s;
    }
    if (n_parts == 0) return worst / scale;
    const float *logits = rig_step(rig, parts, n_parts, true);
    for (int32_t i = 0; i < n_parts; i++)
      for (int32_t t = 0; t < parts[i].n; t++, row++)
        for (int32_t v = 0; v < V; v++) {
          const double reference = want[((int64_t)seqs[i] * MAX_LEN + parts[i].p0 + t) * V + v];
          worst = fmax(worst, fabs(logits[(int64_t)row * V + v] - reference));
          scale = fmax(scale, fabs(reference));
        }
    for (int32_t i = 0; i < n_parts; i++) done[seqs[i]] += parts[i].n;
  }
}

static void check_shape(const struct synth_shape *shape, enum kv_codec codec, ref_store_fn store, double tolerance)
{
  static const char *const levels[] = {"scalar", "avx2", "avx512"};
  static const uint32_t fusions[] = {~0u, 0, PROGRAM_FUSE_ADD_NORM | PROGRAM_FUSE_ROPE, PROGRAM_FUSE_GROUP | PROGRAM_FUSE_SWIGLU};
  static const int32_t pieces[] = {MAX_LEN, 1, 37};
  struct synth synth;
  struct sits_error err;
  struct program *plain = NULL;
  synth_init(&synth, shape, 12345);
  RIG_OK(program_from_model_with(&synth.model, 0, &plain, &err), err);
  double *want = reference_logits(plain, store);
  for (int isa = 0; isa <= (int)cpu_isa_best(); isa++)
    for (size_t f = 0; f < (isa == (int)cpu_isa_best() ? sizeof fusions / sizeof *fusions : 2); f++) {
      struct rig rig = rig_attach(&synth.model, &(struct rig_options){.isa = levels[isa], .n_threads = isa == (int)cpu_isa_best() ? 2 : 1,
                                  .max_batch_tokens = 1024, .max_seqs = 1024, .n_pages = 16, .fusions = fusions[f], .codec = codec});
      for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        if (pieces[i] == 1 && (f > 1 || isa != (int)cpu_isa_best())) continue;
        const double worst = run_and_compare(&rig, want, pieces[i]);
        if (!(worst <= tolerance))
          fail_msg("%s, %s, fusions %x, %d at a time: relative error %.2e", shape->name, levels[isa], (unsigned)fusions[f],
                   (int)pieces[i], worst);
      }
      rig_close(&rig);
    }
  mem_free(want);
  program_destroy(plain);
  synth_fini(&synth);
}

static void test_shapes_exact_cache(void **state)
{
  (void)state;
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) check_shape(&shapes[i], KV_F32, NULL, 2e-6);
}

static void store_f16(double *x, int32_t head_dim, bool is_value)
{
  (void)is_value;
  for (int32_t d = 0; d < head_dim; d++) x[d] = half_to_float(float_to_half((float)x[d]));
}

/* The reference rounds as the cache does; a value next to a rounding border may still fall to the other side. */
static void test_shapes_f16_cache(void **state)
{
  (void)state;
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i += 3) check_shape(&shapes[i], KV_F16, store_f16, 3e-4);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_shapes_exact_cache), cmocka_unit_test(test_shapes_f16_cache)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
