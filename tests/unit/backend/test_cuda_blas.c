/* cuBLASLt is found at run time with every call that the CUDA backend makes; no device is needed for that. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#ifdef SITS_HAVE_CUDA
#include "backend/cuda/cuda_blas.h"

static void test_every_call_is_found(void **state)
{
  struct sits_error err;
  if (cuda_blas_load(&err) != SITS_OK) {
    print_message("%s\n", err.text);
    assert_null(strstr(err.text, " with ")); /* the library as a whole may be away, a call of it may not */
    skip();
  }
#define CHECK(name) assert_non_null(cuda_blas.name);
  CUDA_BLAS_MAP(CHECK)
  assert_int_equal(cuda_blas_load(&err), SITS_OK);
}
#else
static void test_every_call_is_found(void **state) { skip(); }
#endif

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_call_is_found)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
