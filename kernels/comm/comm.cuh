/* What kernels that talk to other devices share: accesses that peers see, waiting with an end, counting of calls. See all_reduce.cu. */
#ifndef SITS_KERNELS_COMM_CUH
#define SITS_KERNELS_COMM_CUH

#include "common/ptx.cuh"
#include "kernels.h"

SITS_DEV void store_volatile(void *at, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
SITS_DEV void store_volatile(void *at, uint2 v) {
  asm volatile("st.volatile.global.v2.u32 [%0], {%1,%2};" ::"l"(at), "r"(v.x), "r"(v.y) : "memory");
}
SITS_DEV void store_volatile(void *at, float v) { asm volatile("st.volatile.global.f32 [%0], %1;" ::"l"(at), "f"(v) : "memory"); }
SITS_DEV uint4 load_volatile(const void *at) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
SITS_DEV uint32_t load_word(const uint32_t *at) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
/* A flag behind a system fence, and its reader's side. */
SITS_DEV void store_flag(uint32_t *at, uint32_t v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }
SITS_DEV uint32_t load_flag(const uint32_t *at) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
SITS_DEV uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

/* Ends a spin: the clock starts with the first look, and is looked at every LOOK turns. */
struct spin_clock {
  uint64_t start = 0;
  uint32_t turns = 0;
  SITS_DEV bool is_over(const k_ranks &ranks) {
    constexpr uint32_t LOOK = 1024;
    if (++turns % LOOK) return false;
    const uint64_t now = now_ns();
    if (!start) start = now;
    return now - start > ranks.timeout_ns || *(volatile const int32_t *)ranks.abort_word != 0;
  }
};

SITS_DEV bool wait_flag(const uint32_t *flag, uint32_t epoch, const k_ranks &ranks, bool is_lost) {
  spin_clock clock;
  while (load_flag(flag) != epoch)
    if (is_lost || clock.is_over(ranks)) return false;
  return true;
}

/* For later calls on this device, and for the host. */
SITS_DEV void mark_lost(const k_ranks &ranks) {
  ranks.state->is_lost = 1;
  *(volatile int32_t *)ranks.lost_word = 1;
  __threadfence_system();
}

/* All threads of all CTAs, last thing: the last CTA makes `epoch` the number of finished calls. */
SITS_DEV void finish_call(uint32_t *calls, uint32_t *done, uint32_t epoch) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(done, 1u) + 1 < gridDim.x) return;
  *done = 0;
  *calls = epoch;
}

#endif
