/* SHA-256 against the examples of FIPS 180-4 and NIST's vectors, and in pieces of every size. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sha256.h"

static void known_digests(void **state)
{
  static const struct { const char *text, *hex; } cases[] = {
    {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
    {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
    {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
  };
  char hex[SHA256_HEX_BYTES];
  for (size_t i = 0; i < 3; i++) {
    sha256_hex(cases[i].text, strlen(cases[i].text), hex);
    assert_string_equal(hex, cases[i].hex);
  }
  char *million = malloc(1000000);
  memset(million, 'a', 1000000);
  sha256_hex(million, 1000000, hex);
  assert_string_equal(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  free(million);
}

static void pieces_make_the_whole(void **state)
{
  unsigned char bytes[300], digest[SHA256_BYTES], piecewise[SHA256_BYTES];
  for (int i = 0; i < 300; i++) bytes[i] = (unsigned char)(i * 7 + 3);
  for (size_t n = 0; n <= 300; n += 11) {
    struct sha256 sha;
    sha256_init(&sha);
    sha256_update(&sha, bytes, n);
    sha256_final(&sha, digest);
    for (size_t step = 1; step < 130; step += 9) {
      sha256_init(&sha);
      for (size_t at = 0; at < n; at += step) sha256_update(&sha, bytes + at, n - at < step ? n - at : step);
      sha256_final(&sha, piecewise);
      assert_memory_equal(digest, piecewise, SHA256_BYTES);
    }
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(known_digests), cmocka_unit_test(pieces_make_the_whole)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
