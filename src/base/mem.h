/* Heap allocation. The only place that calls malloc; scripts/check_style bans it elsewhere.
 *
 * In builds with SITS_DEBUG_CHECKS the n-th allocation can be made to fail (mem_fault_arm), and the live block count is kept, so that
 * fault tests can prove clean failure and no leak. Thread-safe.
 */
#ifndef SITS_BASE_MEM_H
#define SITS_BASE_MEM_H

#include <stddef.h>
#include <stdint.h>

void *mem_alloc(size_t n_bytes);                     /* NULL on failure; n_bytes 0 gives a unique pointer */
void *mem_calloc(size_t count, size_t n_bytes);      /* zeroed; NULL on failure or overflow */
void *mem_realloc(void *block, size_t n_bytes);      /* NULL on failure, block unchanged */
void *mem_aligned(size_t alignment, size_t n_bytes); /* alignment: power of two >= 8; free with mem_free */
char *mem_strdup(const char *text);
char *mem_strndup(const char *text, size_t n_bytes); /* copies n_bytes and adds a terminator */
void mem_free(void *block);                          /* NULL is fine */

/* From now on freed blocks of a megabyte and more go back to the system at once, and leave no holes between blocks that stay: for programs
 * that work through large matrices one by one. */
void mem_return_large(void);
/* Most memory that this program has had resident, mapped files included; 0 where /proc does not say. */
uint64_t mem_peak_bytes(void);

/* Fault injection (no-ops without SITS_DEBUG_CHECKS): allocation number n from now on this thread fails once; 0 disarms. */
void mem_fault_arm(uint64_t n);
/* Whether the armed fault has fired since mem_fault_arm. */
int mem_fault_fired(void);
/* Blocks now allocated through this file by all threads; 0 without SITS_DEBUG_CHECKS. */
int64_t mem_live_blocks(void);

#endif
