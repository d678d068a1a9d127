/* See api_access.h. */
#include "front/api/api_access.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

/* Whether two texts are equal, in time that does not depend on where they differ. */
static bool equal_secret(const char *a, const char *b)
{
  size_t n_a = strlen(a), n_b = strlen(b), n = n_a > n_b ? n_a : n_b;
  volatile unsigned char difference = (unsigned char)(n_a != n_b);
  for (size_t i = 0; i < n; i++) difference |= (unsigned char)(a[i < n_a ? i : n_a] ^ b[i < n_b ? i : n_b]);
  return difference == 0;
}

bool api_access_bearer_is(const char *authorization, const char *key)
{
  if (!authorization || strncasecmp(authorization, "Bearer ", 7)) return false;
  authorization += 7;
  while (*authorization == ' ') authorization++;
  return equal_secret(authorization, key);
}

void api_access_choose_id(const char *given, uint64_t number, char *out, size_t capacity)
{
  size_t n = given ? strspn(given, "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.:") : 0;
  if (n > 0 && n <= 64 && n < capacity && !given[n]) {
    memcpy(out, given, n + 1);
    return;
  }
  unsigned char bytes[16] = {0};
  if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes) memcpy(bytes, &number, sizeof number);
  for (size_t i = 0; i < sizeof bytes; i++) snprintf(out + 2 * i, capacity - 2 * i, "%02x", bytes[i]);
}
