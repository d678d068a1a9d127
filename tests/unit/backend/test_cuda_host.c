/* What the CUDA backend decides on the host alone; no device is needed for that. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#ifdef SITS_HAVE_CUDA
#include "backend/cuda/cuda_internal.h"

/* Every batch has a bucket that holds it and that the buffers hold, and there are few of them: each is captured on its own. */
static void test_graph_buckets(void **state)
{
  (void)state;
  for (int32_t max_seqs = 1; max_seqs <= CUDA_GRAPH_TOKENS; max_seqs++) {
    int32_t n_buckets = 0;
    for (int32_t n = 1, last = 0; n <= max_seqs; n++) {
      const int32_t bucket = cuda_graph_bucket(n, max_seqs);
      if (bucket < n || bucket > max_seqs) fail_msg("%d of %d sequences: bucket %d", n, max_seqs, bucket);
      n_buckets += bucket != last;
      last = bucket;
    }
    assert_true(n_buckets <= 18);
  }
  assert_int_equal(cuda_graph_bucket(225, 255), 255);
  assert_int_equal(cuda_graph_bucket(3, 256), 4);
  assert_int_equal(cuda_graph_bucket(3, 3), 3);
  assert_int_equal(cuda_graph_bucket(CUDA_GRAPH_TOKENS + 1, CUDA_GRAPH_TOKENS), 0);
}
#else
static void test_graph_buckets(void **state) { (void)state, skip(); }
#endif

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_graph_buckets)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
