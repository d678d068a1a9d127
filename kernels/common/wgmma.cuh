/* wgmma: 8-bit m64nNk32 with u8 or s8 weights in registers by s8 activations, f16 m64nNk16 with A in registers or shared memory; B in
 * shared
 * memory, 128-byte
 * swizzle.
 * sm_90a only.
 *
 * 8-bit (wgmma_s32<N>::mul):
 * A: four registers a thread, rows g and g+8 of the warp's 16, bytes are columns 4t..4t+3 and 16+4t..16+4t+3.
 * B: descriptor of an [N][128]-byte tile; d += A * B. D: d[4j], d[4j+1] row g, columns 8j+2t, +1; d[4j+2], d[4j+3] row g+8. */
#ifndef SITS_KERNELS_WGMMA_CUH
#define SITS_KERNELS_WGMMA_CUH

#include "common/ptx.cuh"

#if SITS_SM90
/* Tile at `addr` (1,024-byte aligned), rows of 128 bytes, 8-row groups 1,024 bytes apart, 128-byte swizzle. */
SITS_DEV uint64_t wgmma_tile(uint32_t addr) {
  return (uint64_t)((addr & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
SITS_DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
SITS_DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> SITS_DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
/* A warpgroup's share of the CTA's registers: all its warps call one of these; the kernel is compiled for (sum of shares) / warpgroups. */
template <int N> SITS_DEV void registers_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> SITS_DEV void registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

/* Integer products: wgmma_s32<N>::mul<TYPE, FRESH>(d, a, b), TYPE of the weights; FRESH: d = A B, else d += A B. */
enum wgmma_weights { WGMMA_U8, WGMMA_S8 };
#define SITS_L8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define SITS_L16 SITS_L8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define SITS_L32 SITS_L16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SITS_L48 SITS_L32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define SITS_L64 SITS_L48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SITS_D8(i) \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
#define SITS_D16 SITS_D8(0), SITS_D8(8)
#define SITS_D32 SITS_D16, SITS_D8(16), SITS_D8(24)
#define SITS_D48 SITS_D32, SITS_D8(32), SITS_D8(40)
#define SITS_D64 SITS_D48, SITS_D8(48), SITS_D8(56)
#define SITS_WGMMA_TEXT(N, TYPE, LIST, A0, A1, A2, A3, B, KEEP) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " KEEP ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.s32." TYPE ".s8 {" LIST "}, {" A0 \
  "," A1 "," A2 "," A3 "}, " B ", p;\n}"
#define SITS_WGMMA_S32(N, LIST, REGISTERS, A0, A1, A2, A3, B, KEEP)                                                     \
  template <> struct wgmma_s32<N> {                                                                                     \
    template <wgmma_weights TYPE, bool FRESH> SITS_DEV static void mul(int (&d)[N / 2], const uint32_t *a, uint64_t b) { \
      if (TYPE == WGMMA_U8)                                                                                             \
        asm volatile(SITS_WGMMA_TEXT(N, "u8", LIST, A0, A1, A2, A3, B, KEEP)                                            \
                     : REGISTERS                                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(FRESH ? 0 : 1));                         \
      else                                                                                                              \
        asm volatile(SITS_WGMMA_TEXT(N, "s8", LIST, A0, A1, A2, A3, B, KEEP)                                            \
                     : REGISTERS                                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(FRESH ? 0 : 1));                         \
    }                                                                                                                   \
  }
template <int N> struct wgmma_s32;
SITS_WGMMA_S32(16, SITS_L8, SITS_D8(0), "%8", "%9", "%10", "%11", "%12", "%13");
SITS_WGMMA_S32(32, SITS_L16, SITS_D16, "%16", "%17", "%18", "%19", "%20", "%21");
SITS_WGMMA_S32(64, SITS_L32, SITS_D32, "%32", "%33", "%34", "%35", "%36", "%37");
SITS_WGMMA_S32(96, SITS_L48, SITS_D48, "%48", "%49", "%50", "%51", "%52", "%53");
SITS_WGMMA_S32(128, SITS_L64, SITS_D64, "%64", "%65", "%66", "%67", "%68", "%69");

/* ---- f16, f32 sums. D as for s8: d[4j], d[4j+1] row g, columns 8j+2t, +1; d[4j+2], d[4j+3] row g+8. ---- */
/* A tile whose columns (N) are contiguous: 64-column slabs of 128-byte rows, 8-row groups 1,024 bytes apart, slabs `slab_bytes` apart. */
SITS_DEV uint64_t wgmma_tile_mn(uint32_t addr, uint32_t slab_bytes) {
  return (uint64_t)((addr & 0x3FFFF) >> 4) | (uint64_t)(slab_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
template <int N> struct wgmma_f16;
template <> struct wgmma_f16<64> {
  /* d = A B (+ d): A and B K-major tiles. */
  SITS_DEV static void mul_ss(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
                 "}, %32, %33, p, 1, 1, 0, 0;\n}"
                 :
                 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
                 "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
                 "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                 "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "r"(accumulate));
  }
  /* d += A B: A in registers, B with its columns contiguous (MN-major). */
  SITS_DEV static void mul_rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
                 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 :
                 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
                 "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
                 "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                 "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};
template <> struct wgmma_f16<128> {
  /* d = A B (+ d): A and B K-major tiles. */
  SITS_DEV static void mul_ss(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
                 "}, %64, %65, p, 1, 1, 0, 0;\n}"
                 :
                 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
                 "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
                 "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                 "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
                 "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
                 "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
                 "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
                 "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "l"(a), "l"(b), "r"(accumulate));
  }
  /* d += A B: A in registers, B with its columns contiguous (MN-major). */
  SITS_DEV static void mul_rs(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
                 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                 :
                 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
                 "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
                 "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                 "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
                 "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
                 "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
                 "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
                 "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};
#endif

#endif
