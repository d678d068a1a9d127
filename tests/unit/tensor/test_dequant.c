/* Element codecs against the `gguf` package (vectors made by tests/tools/make_dequant_vectors.py), halves against the compiler's. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "tensor/dequant.h"

enum { N_BLOCKS = 64 };

static const struct { enum sits_dtype dtype; uint64_t seed; int halves[2]; uint64_t hash; uint32_t firsts[4]; } vectors[] = {
#include "dequant_vectors.inc"
};

static void blocks_equal_the_gguf_package(void **state)
{
  for (size_t k = 0; k < sizeof vectors / sizeof vectors[0]; k++) {
    const struct sits_dtype_info *info = sits_dtype_info(vectors[k].dtype);
    size_t n_bytes = (size_t)N_BLOCKS * (size_t)info->block_bytes, n = (size_t)N_BLOCKS * (size_t)info->block_elements;
    unsigned char *blocks = mem_alloc(n_bytes);
    float *values = mem_alloc(n * sizeof *values);
    uint64_t x = vectors[k].seed, hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < n_bytes; i++) {
      x = x * 6364136223846793005u + 1442695040888963407u;
      blocks[i] = (unsigned char)(x >> 56);
    }
    for (size_t b = 0; b < N_BLOCKS; b++)
      for (int h = 0; h < 2 && vectors[k].halves[h] >= 0; h++) {
        unsigned char *high = &blocks[b * (size_t)info->block_bytes + (size_t)vectors[k].halves[h] + 1];
        *high = (unsigned char)((*high & 0x8F) | 0x10);
      }
    dequant_row(vectors[k].dtype, blocks, (int64_t)n, values);
    for (int i = 0; i < 4; i++) {
      uint32_t bits;
      memcpy(&bits, &values[i], 4);
      if (bits != vectors[k].firsts[i]) fail_msg("%s: value %d is %08x, not %08x", info->name, i, bits, vectors[k].firsts[i]);
    }
    for (size_t i = 0; i < n * sizeof *values; i++) hash = (hash ^ ((unsigned char *)values)[i]) * 0x100000001B3u;
    if (hash != vectors[k].hash) fail_msg("%s: some value differs from the gguf package", info->name);
    mem_free(blocks);
    mem_free(values);
  }
}

static void plain_types(void **state)
{
  float out[3];
  dequant_row(SITS_DTYPE_F32, (float[]){1.5f, -2, 3}, 3, out);
  assert_true(out[0] == 1.5f && out[1] == -2 && out[2] == 3);
  dequant_row(SITS_DTYPE_F16, (uint16_t[]){0x3C00, 0xC000, 0x0001}, 3, out);
  assert_true(out[0] == 1 && out[1] == -2 && out[2] == 0x1p-24f);
  dequant_row(SITS_DTYPE_BF16, (uint16_t[]){0x3F80, 0xC000, 0x7F80}, 3, out);
  assert_true(out[0] == 1 && out[1] == -2 && isinf(out[2]));
  dequant_row(SITS_DTYPE_F64, (double[]){0.1, 2, -3}, 3, out);
  assert_true(out[0] == 0.1f && out[1] == 2 && out[2] == -3);
  dequant_row(SITS_DTYPE_I8, (int8_t[]){-128, 0, 127}, 3, out);
  assert_true(out[0] == -128 && out[1] == 0 && out[2] == 127);
}

static void every_half_survives(void **state)
{
  for (uint32_t h = 0; h < 65536; h++) {
    float f = half_to_float((uint16_t)h);
    if (isnan(f)) assert_true(isnan(half_to_float(float_to_half(f))) && (h & 0x7C00) == 0x7C00);
    else if (float_to_half(f) != h) fail_msg("half %04x became %04x", h, float_to_half(f));
  }
}

static void halves_round_to_even(void **state)
{
  static const struct { float value; uint16_t half, bf16; } cases[] = {
      {1.0f + 0x1p-11f, 0x3C00, 0x3F80},         {1.0f + 3 * 0x1p-11f, 0x3C02, 0x3F80},   {1.0f + 0x1p-11f + 0x1p-20f, 0x3C01, 0x3F80},
      {65519.0f, 0x7BFF, 0x4780},                {65520.0f, 0x7C00, 0x4780},              {0x1p-25f, 0x0000, 0x3300},
      {0x1.8p-25f, 0x0001, 0x3340},              {0x1p-14f - 0x1p-25f, 0x0400, 0x3880},   {-0.0f, 0x8000, 0x8000},
      {1.0f + 0x1p-8f, 0x3C04, 0x3F80},          {1.0f + 3 * 0x1p-8f, 0x3C0C, 0x3F82},    {3.4028235e38f, 0x7C00, 0x7F80},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    assert_int_equal(float_to_half(cases[i].value), cases[i].half);
    assert_int_equal(float_to_bf16(cases[i].value), cases[i].bf16);
  }
  assert_true(isnan(bf16_to_float(float_to_bf16(NAN))));
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(blocks_equal_the_gguf_package), cmocka_unit_test(plain_types),
                                     cmocka_unit_test(every_half_survives), cmocka_unit_test(halves_round_to_even)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
