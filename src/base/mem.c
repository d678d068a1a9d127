/* See mem.h. */
#include "base/mem.h"

#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef SITS_DEBUG_CHECKS
static _Thread_local uint64_t fault_countdown;
static _Thread_local int fault_has_fired;
static atomic_int_fast64_t live_blocks;

static int fails_now(void)
{
  if (fault_countdown == 0 || --fault_countdown != 0) return 0;
  fault_has_fired = 1;
  return 1;
}
static void *counted(void *block)
{
  if (block) atomic_fetch_add_explicit(&live_blocks, 1, memory_order_relaxed);
  return block;
}
void mem_fault_arm(uint64_t n) { fault_countdown = n; fault_has_fired = 0; }
int mem_fault_fired(void) { return fault_has_fired; }
int64_t mem_live_blocks(void) { return atomic_load_explicit(&live_blocks, memory_order_relaxed); }
static void uncount(void) { atomic_fetch_sub_explicit(&live_blocks, 1, memory_order_relaxed); }
#else
static int fails_now(void) { return 0; }
static void *counted(void *block) { return block; }
static void uncount(void) {}
void mem_fault_arm(uint64_t n) { (void)n; }
int mem_fault_fired(void) { return 0; }
int64_t mem_live_blocks(void) { return 0; }
#endif

void *mem_alloc(size_t n_bytes) { return fails_now() ? NULL : counted(malloc(n_bytes ? n_bytes : 1)); }

void *mem_calloc(size_t count, size_t n_bytes)
{
  return fails_now() ? NULL : counted(calloc(count ? count : 1, n_bytes ? n_bytes : 1));
}

void *mem_realloc(void *block, size_t n_bytes)
{
  if (!block) return mem_alloc(n_bytes);
  return fails_now() ? NULL : realloc(block, n_bytes ? n_bytes : 1);
}

void *mem_aligned(size_t alignment, size_t n_bytes)
{
  void *block = NULL;
  if (fails_now() || posix_memalign(&block, alignment, n_bytes ? n_bytes : 1) != 0) return NULL;
  return counted(block);
}

char *mem_strndup(const char *text, size_t n_bytes)
{
  char *copy = mem_alloc(n_bytes + 1);
  if (!copy) return NULL;
  if (n_bytes) memcpy(copy, text, n_bytes);
  copy[n_bytes] = '\0';
  return copy;
}

char *mem_strdup(const char *text) { return mem_strndup(text, strlen(text)); }

void mem_free(void *block)
{
  if (block) uncount();
  free(block);
}

void mem_return_large(void)
{
#ifdef M_MMAP_THRESHOLD
  (void)mallopt(M_MMAP_THRESHOLD, 1 << 20); /* advice: where it is not taken, more memory is used */
#endif
}

uint64_t mem_peak_bytes(void)
{
  char line[256];
  unsigned long long kilobytes = 0;
  FILE *status = fopen("/proc/self/status", "r"); /* not getrusage: that counts what forked this program too */
  while (status && fgets(line, sizeof line, status))
    if (sscanf(line, "VmHWM: %llu kB", &kilobytes) == 1) break;
  if (status) fclose(status);
  return (uint64_t)kilobytes * 1024;
}
