/* SHA-256 against the examples of FIPS 180-4 and NIST's vectors, and in pieces of every size; HMAC-SHA-256 against RFC 4231. */
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

/* RFC 4231, cases 1, 2, 6 and 7: keys shorter and longer than a block. */
static void keyed_digests(void **state)
{
  static const struct { int key, n_key; const char *text, *hex; } cases[] = {
    {0x0b, 20, "Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
    {0, 4, "what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
    {0xaa, 131, "Test Using Larger Than Block-Size Key - Hash Key First",
     "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
    {0xaa, 131, "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be hashed "
                "before being used by the HMAC algorithm.", "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    unsigned char key[131], digest[SHA256_BYTES];
    char hex[SHA256_HEX_BYTES];
    struct hmac_sha256 hmac;
    memset(key, cases[i].key, sizeof key);
    if (cases[i].key == 0) memcpy(key, "Jefe", 4);
    hmac_sha256_init(&hmac, key, (size_t)cases[i].n_key);
    for (int again = 0; again < 2; again++) {
      hmac_sha256(&hmac, cases[i].text, strlen(cases[i].text), digest);
      sha256_digest_hex(digest, hex);
      assert_string_equal(hex, cases[i].hex);
    }
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(known_digests), cmocka_unit_test(pieces_make_the_whole),
                                     cmocka_unit_test(keyed_digests)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
