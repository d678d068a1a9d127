/* Thin names for the PTX that the kernels use: shared-memory barriers, bulk copies, tensor-core products, programmatic launch edges.
 *
 * Entry points: bar_*, bulk_load, grid_trigger / grid_wait, mma_f16, mma_u8s8, lds*, sts*, fold_nibbles.
 * Everything is a single instruction or a handful; nothing here keeps state. sm_90 instructions are compiled for sm_90 and later only
 * (SITS_SM90); kernels that need them have an sm_80 body beside them or are refused by their plan on older chips.
 */
#ifndef SITS_KERNELS_PTX_CUH
#define SITS_KERNELS_PTX_CUH

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define SITS_SM90 1
#else
#define SITS_SM90 0
#endif

#define SITS_DEV __device__ __forceinline__

SITS_DEV uint32_t smem_addr(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* ---- mbarrier (shared memory transaction barrier) ---- */
#if SITS_SM90
SITS_DEV void bar_init(uint32_t bar, int arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals)); }
SITS_DEV void bar_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
/* One arrival that also announces `bytes` of bulk copies still to land. */
SITS_DEV void bar_arrive_expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
SITS_DEV void bar_arrive(uint32_t bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
SITS_DEV bool bar_try(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done != 0;
}
/* The same without any waiting inside. */
SITS_DEV bool bar_test(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done != 0;
}
SITS_DEV void bar_wait(uint32_t bar, uint32_t parity) {
  while (!bar_try(bar, parity)) {}
}
/* 1-D bulk copy global -> shared; address and size are multiples of 16; completion counts bytes on `bar`. */
SITS_DEV void bulk_load(uint32_t dst, const void *src, int bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes),
               "r"(bar)
               : "memory");
}
SITS_DEV uint64_t policy_evict_first() {
  uint64_t p;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  return p;
}
SITS_DEV void bulk_load_hint(uint32_t dst, const void *src, int bytes, uint32_t bar, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar), "l"(policy)
               : "memory");
}
#endif

/* ---- programmatic dependent launch: let the next kernel start; wait for all earlier kernels' writes ---- */
SITS_DEV void grid_trigger() {
#if SITS_SM90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
SITS_DEV void grid_wait() {
#if SITS_SM90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* ---- cp.async (sm_80): 16 bytes, zero-filled where `valid` is false ---- */
SITS_DEV void cp_async16(uint32_t dst, const void *src, bool valid) {
  int n = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
SITS_DEV void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> SITS_DEV void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

/* ---- shared memory ---- */
SITS_DEV uint4 lds128(uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
SITS_DEV uint2 lds64(uint32_t a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
SITS_DEV uint32_t lds32(uint32_t a) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}
SITS_DEV float lds_f32(uint32_t a) { return __uint_as_float(lds32(a)); }
SITS_DEV void sts32(uint32_t a, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
SITS_DEV void sts_f32(uint32_t a, float v) { sts32(a, __float_as_uint(v)); }
SITS_DEV void sts64_f32(uint32_t a, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(a), "f"(x), "f"(y) : "memory");
}
SITS_DEV void ldmatrix_x4(uint32_t r[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
SITS_DEV void ldmatrix_x4_trans(uint32_t r[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a));
}
SITS_DEV uint32_t movmatrix_trans(uint32_t v) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

/* ---- tensor cores: d = a * b + c for one m16n8 tile ---- */
SITS_DEV void mma_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, const float c[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

/* ---- 4-bit words ----
 * A "folded word" holds 8 unsigned nibbles, two rows (g and g+8 of a 16-row tile) by four columns c0..c3:
 *   bits 9:6 (g,c0)  25:22 (g,c1)  17:14 (g,c2)  33:30 mod 32 (g,c3)   and the same four less 4 for row g+8.
 * One mask picks a pair into the mantissa of two fp16 numbers of fixed exponent: row g reads 16 + q, row g+8 reads 256 + q. */
SITS_DEV uint32_t lop_and_or(uint32_t w, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(w), "r"(mask), "r"(bits));
  return r;
}
SITS_DEV void fold_nibbles(uint32_t w, uint32_t a[4]) {
  uint32_t y = __funnelshift_r(w, w, 8);
  a[0] = lop_and_or(w, 0x03C003C0u, 0x4C004C00u);
  a[1] = lop_and_or(w, 0x003C003Cu, 0x5C005C00u);
  a[2] = lop_and_or(y, 0x03C003C0u, 0x4C004C00u);
  a[3] = lop_and_or(y, 0x003C003Cu, 0x5C005C00u);
}

SITS_DEV float2 half2_to_float2(uint32_t v) { return __half22float2(*reinterpret_cast<__half2 *>(&v)); }
SITS_DEV uint32_t pack_half2(float x, float y) {
  __half2 h = __floats2half2_rn(x, y);
  return *reinterpret_cast<uint32_t *>(&h);
}
SITS_DEV uint32_t hmul2_u32(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

/* 2^x by the special function unit: 2 ulp, denormal results are zero; -inf gives 0. */
SITS_DEV float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

/* 1 / x by the special function unit: 1 ulp, denormals count as zeros; infinity gives 0. */
SITS_DEV float inverse_fast(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

/* ---- reductions in a warp ---- */
SITS_DEV float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
  return v;
}
SITS_DEV float warp_max(float v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  return v;
}

/* ---- counters and random fill ---- */
__host__ __device__ static inline uint32_t hash32(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

#endif
