/* How memory is shared between pages and what goes with them: never more in all than there is, and pages come first. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/page_room.h"

enum { PAGE = 1000, FIXED = 5000, FIXED_OF_PAGE = 10, SPARE_OF_PAGE = 300 };

static void beside(const struct backend_program *program, const struct kv_geometry *geometry, struct kv_beside *out)
{
  assert_null(program);
  assert_int_equal(geometry->codec, KV_INT4);
  *out = (struct kv_beside){FIXED + FIXED_OF_PAGE * (uint64_t)geometry->n_pages, SPARE_OF_PAGE * (uint64_t)geometry->n_pages};
}

static uint64_t fixed_of(uint64_t n) { return FIXED + FIXED_OF_PAGE * n; }

static void test_nothing_beside(void **state)
{
  (void)state;
  const struct backend_vtable plain = {0};
  struct kv_geometry geometry = {.codec = KV_INT4};
  assert_int_equal(page_room_divide(&(struct page_room){10500, PAGE, 100, 0}, &plain, NULL, &geometry), 10);
  assert_int_equal(page_room_divide(&(struct page_room){10500, PAGE, 7, 0}, &plain, NULL, &geometry), 7);
  assert_int_equal(page_room_divide(&(struct page_room){10500, PAGE, 100, 30}, &plain, NULL, &geometry), 30);
  assert_int_equal(geometry.spare_bytes, 0); /* such a backend does not ask */
}

static void test_all_within_the_room(void **state)
{
  (void)state;
  const struct backend_vtable vtable = {.kv_beside = beside};
  for (uint64_t bytes = 0; bytes < 3000000; bytes += 777) {
    struct kv_geometry geometry = {.codec = KV_INT4};
    const uint64_t n = page_room_divide(&(struct page_room){bytes, PAGE, 2000, 0}, &vtable, NULL, &geometry);
    assert_true(n <= 2000 && geometry.spare_bytes > 0);
    if (n == 0) {
      assert_true(bytes < fixed_of(7) + 2 * PAGE);
      continue;
    }
    assert_true(fixed_of(n) + n * PAGE + geometry.spare_bytes <= bytes);
    /* what saves time takes a sixteenth at most where pages could have it, and all that pages have no use for */
    if (n < 2000) assert_true((n + 2) * PAGE + bytes / 16 + fixed_of(bytes / PAGE) > bytes);
    else assert_true(geometry.spare_bytes >= bytes - fixed_of(n) - n * PAGE);
  }
}

/* A count that was asked for stands; what goes with it has what is left, or nothing. */
static void test_wanted(void **state)
{
  (void)state;
  const struct backend_vtable vtable = {.kv_beside = beside};
  struct kv_geometry geometry = {.codec = KV_INT4};
  assert_int_equal(page_room_divide(&(struct page_room){100000, PAGE, 1000, 40}, &vtable, NULL, &geometry), 40);
  assert_int_equal(geometry.spare_bytes, 100000 - fixed_of(40) - 40 * PAGE);
  assert_int_equal(page_room_divide(&(struct page_room){100000, PAGE, 1000, 500}, &vtable, NULL, &geometry), 500);
  assert_int_equal(geometry.spare_bytes, 1);
}

/* Over ranks: as much as the largest of them has, as often; each is told its part of what is spare. */
static void beside_of_rank(const struct backend_program *program, const struct kv_geometry *geometry, struct kv_beside *out)
{
  const uint64_t *bytes = (const void *)program;
  assert_int_equal(geometry->n_kv_heads, 2);
  *out = (struct kv_beside){*bytes, *bytes / 2};
}

static void test_ranks(void **state)
{
  (void)state;
  uint64_t bytes[2] = {100, 300};
  struct backend_program *programs[2] = {(void *)&bytes[0], (void *)&bytes[1]};
  const struct kv_geometry whole = {.n_kv_heads = 4, .n_ranks = 2, .codec = KV_INT4, .spare_bytes = 1001};
  struct kv_beside sum;
  kv_beside_of_ranks(&(struct backend_vtable){.kv_beside = beside_of_rank}, programs, 2, &whole, &sum);
  assert_int_equal(sum.fixed_bytes, 600);
  assert_int_equal(sum.spare_bytes, 300);
  kv_beside_of_ranks(&(struct backend_vtable){0}, programs, 2, &whole, &sum);
  assert_int_equal(sum.fixed_bytes + sum.spare_bytes, 0);
  assert_int_equal(kv_geometry_of_rank(&whole).spare_bytes, 500);
  assert_int_equal(kv_geometry_of_rank(&(struct kv_geometry){.n_kv_heads = 4, .n_ranks = 2, .spare_bytes = 1}).spare_bytes, 1);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_nothing_beside), cmocka_unit_test(test_all_within_the_room),
                                     cmocka_unit_test(test_wanted), cmocka_unit_test(test_ranks)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
