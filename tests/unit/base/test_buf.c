/* Byte buffers: growth, the limit, what a failed append leaves, cutting at both ends, and JSON escapes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/mem.h"

static void expect(const struct buf *buf, const char *text)
{
  assert_int_equal(buf->size, strlen(text));
  assert_string_equal(buf->data, text);
}

static void test_appends(void **state)
{
  (void)state;
  struct buf buf;
  buf_init(&buf, 1000);
  assert_null(buf.data);
  assert_true(buf_append_text(&buf, "one"));
  assert_true(buf_append_char(&buf, ' '));
  assert_true(buf_printf(&buf, "%d/%s", 2, "three"));
  expect(&buf, "one 2/three");
  for (int i = 0; i < 80; i++) assert_true(buf_append(&buf, "0123456789", 10));
  assert_int_equal(buf.size, 811);
  assert_memory_equal(buf.data + 801, "0123456789", 11); /* with the terminator */
  buf_clear(&buf);
  expect(&buf, "");
  buf_fini(&buf);
}

/* Every length around the ends of what is there already. */
static void test_printf_lengths(void **state)
{
  (void)state;
  for (int before = 0; before < 70; before++)
    for (int n = 0; n < 140; n++) {
      struct buf buf;
      buf_init(&buf, 128);
      for (int i = 0; i < before; i++) assert_true(buf_append_char(&buf, 'x'));
      bool fits = before + n <= 128;
      assert_int_equal(buf_printf(&buf, "%.*s", n, "0123456789012345678901234567890123456789012345678901234567890123456789"
                                  "0123456789012345678901234567890123456789012345678901234567890123456789"), fits);
      assert_int_equal(buf.size, fits ? before + n : before);
      assert_int_equal(buf.failed, !fits);
      if (buf.data) assert_int_equal(strlen(buf.data), buf.size);
      buf_fini(&buf);
    }
}

/* What does not fit is left out whole, later appends that fit go in, and `failed` says so until buf_clear. */
static void test_limit(void **state)
{
  (void)state;
  struct buf buf;
  buf_init(&buf, 8);
  assert_true(buf_append_text(&buf, "12345678"));
  assert_false(buf.failed);
  assert_false(buf_append_char(&buf, '9'));
  assert_true(buf.failed);
  expect(&buf, "12345678");
  assert_false(buf_reserve(&buf, SIZE_MAX));
  buf_truncate(&buf, 6);
  assert_true(buf.failed);
  assert_false(buf_printf(&buf, "%s", "abc"));
  assert_true(buf_printf(&buf, "%s", "ab"));
  expect(&buf, "123456ab");
  buf_clear(&buf);
  assert_false(buf.failed);
  buf_fini(&buf);
}

static void test_cutting(void **state)
{
  (void)state;
  struct buf buf;
  buf_init(&buf, 100);
  buf_truncate(&buf, 0);
  buf_drop_front(&buf, 3);
  assert_null(buf.data);
  buf_append_text(&buf, "abcdef");
  buf_truncate(&buf, 6);
  buf_truncate(&buf, 7);
  expect(&buf, "abcdef");
  buf_truncate(&buf, 4);
  expect(&buf, "abcd");
  buf_drop_front(&buf, 1);
  expect(&buf, "bcd");
  buf_drop_front(&buf, 9);
  expect(&buf, "");
  size_t n_bytes = 0;
  buf_append_text(&buf, "mine");
  char *taken = buf_take(&buf, &n_bytes);
  assert_int_equal(n_bytes, 4);
  assert_string_equal(taken, "mine");
  assert_true(buf.data == NULL && buf.size == 0 && buf.limit == 100);
  mem_free(taken);
}

static void test_json_escapes(void **state)
{
  (void)state;
  static const struct { const char *text, *escaped; } cases[] = {
    {"plain", "plain"},
    {"\"\\/", "\\\"\\\\/"},
    {"\n\r\t\b\x01\x7f", "\\n\\r\\t\\u0008\\u0001\\u007f"},
    {"gr\xC3\xBC\xC3\x9F \xF0\x9F\x98\x80", "gr\xC3\xBC\xC3\x9F \xF0\x9F\x98\x80"},
    {"\xFF", "\xEF\xBF\xBD"},
    {"a\xE2\x82", "a\xEF\xBF\xBD"},                         /* cut off: one for the whole start of a sequence */
    {"\xC0\xAF", "\xEF\xBF\xBD\xEF\xBF\xBD"},               /* overlong: neither byte may begin or go on */
    {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"}, /* a surrogate */
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct buf buf;
    buf_init(&buf, 100);
    assert_true(buf_append_json_escaped(&buf, cases[i].text, strlen(cases[i].text)));
    expect(&buf, cases[i].escaped);
    buf_fini(&buf);
  }
}

static void test_no_memory(void **state)
{
  (void)state;
#ifndef SITS_DEBUG_CHECKS
  skip();
#endif
  int64_t live = mem_live_blocks();
  struct buf buf;
  buf_init(&buf, 1 << 20);
  assert_true(buf_append_text(&buf, "kept"));
  static const char more[200];
  mem_fault_arm(1);
  assert_false(buf_append(&buf, more, sizeof more));
  assert_true(mem_fault_fired());
  mem_fault_arm(0);
  assert_true(buf.failed);
  expect(&buf, "kept");
  buf_fini(&buf);
  assert_int_equal(mem_live_blocks(), live);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_appends), cmocka_unit_test(test_printf_lengths),
    cmocka_unit_test(test_limit), cmocka_unit_test(test_cutting),
                                     cmocka_unit_test(test_json_escapes), cmocka_unit_test(test_no_memory)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
