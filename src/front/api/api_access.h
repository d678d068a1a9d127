/* What transports ask of a client's credentials and request id, the same for all. Thread-safe. */
#ifndef SITS_FRONT_API_ACCESS_H
#define SITS_FRONT_API_ACCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether an authorization value ("Bearer KEY", the scheme in any case) holds the key; takes a time that does not depend on where the keys
 * differ. */
bool api_access_bearer_is(const char *authorization, const char *key);

/* A client's own request id when it is harmless in headers and logs (1 to 64 letters, digits, "-_.:"), else 32 random hex digits; number
 * serves where there is no randomness. capacity: at least 65. */
void api_access_choose_id(const char *given, uint64_t number, char *out, size_t capacity);

#endif
