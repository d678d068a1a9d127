/* Small frame for the device tests: random data, device buffers, comparison in the norm, one line per case, a count at the end.
 *
 * A test program calls gpu_open first (exit code 77 = skipped when there is no device), then cases, and returns gpu_finish().
 * Buffers are filled with a NaN pattern before they are handed out, so that an element nobody wrote fails its case.
 */
#ifndef SITS_TESTS_GPU_TEST_H
#define SITS_TESTS_GPU_TEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels.h"

int32_t gpu_open(void);                          /* number of SMs; exits 77 without a device of compute capability 9 */
bool gpu_is_small(void);                         /* SITS_GPU_SMALL is set: fewer and smaller cases, one rank, no waiting for a time to pass;
                                                    for checkers that slow a device down a hundred times and run one kernel at a time */
struct k_stream gpu_stream(void);
struct k_stream gpu_edge_stream(void);           /* one of its own, whose launches have programmatic edges; between two of them nothing may
                                                    be allocated or copied */
int gpu_finish(void);                            /* prints the counts, frees all buffers; 0 when every case passed */

void *gpu_alloc(size_t bytes);                   /* 0xFF-filled, freed by gpu_release_all */
void *gpu_zeros(size_t bytes);
void *gpu_copy(const void *host, size_t bytes);  /* new buffer with these bytes */
void gpu_read(void *host, const void *device, size_t bytes); /* synchronizes */
void gpu_write(void *device, const void *host, size_t bytes); /* likewise */
void gpu_release_all(void);
void *host_alloc(size_t bytes);                  /* freed by gpu_release_all too */
void gpu_check_call(int cuda_error, const char *what);

float rand_unit(void);                           /* uniform [-1, 1) */
uint32_t rand_u32(void);
float round_half(float x);                       /* through f16 and back */
uint16_t half_bits(float x);
float half_value(uint16_t h);

/* ||got - want|| / ||want||, NaN counts as infinite. */
double relative_error(const float *got, const float *want, size_t n);
void verdict(bool ok, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A random 4-bit weight: packed bytes (as kernels.h says) and the real values, rows x cols. */
struct test_weight { int32_t rows, cols; enum k_w4_format format; uint8_t *packed; size_t packed_bytes; float *values; float *channel; };
struct test_weight random_weight(int32_t rows, int32_t cols, enum k_w4_format format, bool two_level);

#endif
