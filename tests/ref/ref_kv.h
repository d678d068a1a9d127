/* Naive twins of the KV codecs: what a cache with this codec gives back for the keys and values of one head. In double, straight from the
 * words of the format (rotation, groups, scales of 8 bits); the only bits taken over from the format are the e4m4 scale values. */
#ifndef TESTS_REF_REF_KV_H
#define TESTS_REF_REF_KV_H

#include <stdint.h>

/* One vector [D] as int8, int4 or fp4 values (or int8 keys) come back: rotated by the Hadamard of the largest power of two dividing D. The
 * result is in the rotated basis. */
void ref_kv_rotate(double *x, int32_t head_dim);
void ref_kv_int8(double *x, int32_t n);                   /* symmetric, scale max/127 */
/* nudge: 0, or a touch to either side, by which sizes are multiplied (1 + nudge) before their scale is looked up: a size that lies exactly
 * between two scales may take either. */
void ref_kv_u4(double *x, int32_t n, double nudge);       /* n <= 32: asymmetric, the best of three scales and zero points */
void ref_kv_fp4(double *x, int32_t n, double nudge);      /* n <= 16: e2m1, the best of five scales */

#endif
