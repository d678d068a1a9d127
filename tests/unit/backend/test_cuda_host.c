/* What the CUDA backend decides on the host alone; no device is needed for that. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#ifdef SITS_HAVE_CUDA
#include "backend/cuda/cuda_comm.h"
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

/* Ranks in the order of the links, and only where every pair of them reaches each other, in both directions. */
static void test_linked_devices(void **state)
{
  (void)state;
  enum { X = CUDA_UNREACHABLE };
  static const int chain[16] = {0, 1, X, X, 1, 0, 1, X, X, 1, 0, 1, X, X, 1, 0}; /* neighbours only */
  static const int islands[16] = {0, X, 2, X, X, 0, X, 1, 2, X, 0, X, X, 1, X, 0}; /* 0 and 2, 1 and 3 */
  static const int near[16] = {0, 2, 3, 1, 2, 0, 1, 3, 3, 1, 0, 2, 1, 3, 2, 0};
  static const int one_way[4] = {0, 1, X, 0};
  int32_t devices[4] = {0};
  assert_int_equal(cuda_choose_linked(near, 4, 4, devices), 4);
  assert_memory_equal(devices, ((int32_t[]){0, 3, 2, 1}), sizeof devices);
  assert_int_equal(cuda_choose_linked(chain, 4, 2, devices), 2);
  assert_int_equal(devices[1], 1);
  assert_int_equal(cuda_choose_linked(chain, 4, 3, devices), 2); /* 2 is near 1, but 0 does not reach it */
  devices[0] = 1;
  assert_int_equal(cuda_choose_linked(islands, 4, 2, devices), 2);
  assert_int_equal(devices[1], 3);
  assert_int_equal(cuda_choose_linked(islands, 4, 3, devices), 2);
  devices[0] = 0;
  assert_int_equal(cuda_choose_linked(one_way, 2, 2, devices), 1);
}
#else
static void test_graph_buckets(void **state) { (void)state, skip(); }
static void test_linked_devices(void **state) { (void)state, skip(); }
#endif

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_graph_buckets), cmocka_unit_test(test_linked_devices)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
