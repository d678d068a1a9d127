/* Hash index from names to numbers, for the keys and tensors of a model file. Open addressing, filled once, read by any thread.
 * Names are borrowed. The hash is seeded per index, so that a file cannot be made to collide in advance. */
#ifndef SITS_TENSOR_NAME_INDEX_H
#define SITS_TENSOR_NAME_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct name_slot { const char *text; uint32_t size; uint32_t number_plus_1; }; /* number_plus_1 == 0: free */
struct name_index { struct name_slot *slots; uint64_t mask; uint64_t seed; };

enum { NAME_INDEX_MAX_PRINTED = 72 };

/* Room for `capacity` names (at most 2^30). False: out of memory. */
bool name_index_init(struct name_index *index, uint64_t capacity);
void name_index_fini(struct name_index *index); /* a zeroed index is fine */
/* False when the name is there already. At most `capacity` names may be added. */
bool name_index_add(struct name_index *index, const char *text, size_t size, uint32_t number);
int64_t name_index_find(const struct name_index *index, const char *text, size_t size); /* -1 when absent */

/* A name from an untrusted file made fit for an error text: at most 71 characters, whatever is no printable ASCII becomes '?'. */
const char *name_printable(char out[NAME_INDEX_MAX_PRINTED], const char *text, size_t size);
/* The last characters of a path, so that errors have room for the rest. Borrowed from path. */
const char *name_path_tail(const char *path);

#endif
