// Products of a warpgroup (sm_90a): 64 rows of A from registers times PAD rows of B in shared memory, f16, f32 sums.
//
// The four warps of a group own 16 rows of A each, laid out as in mma_f16. Sums of a thread: acc[4 j + i] is what mma_f16
// calls d[i] of B's rows 8 j to 8 j + 7.
//
// B lies as [row][64 halves] at an address that is a multiple of 1024; the eight 16-byte parts of row n change places by
// xor with n % 8, which the hardware calls the 128-byte swizzle.
//
// Set by the launcher: PAD (rows of B).
#pragma once
#include "mma.cuh"

constexpr int kSums = PAD / 2;

__device__ __forceinline__ u64 wgmma_operand(u32 address) {
  constexpr u64 kEightRows = 1024 >> 4, kSwizzle128 = 1;
  return kSwizzle128 << 62 | kEightRows << 32 | 1ull << 16 | (address & 0x3ffff) >> 4;
}

__device__ __forceinline__ void wgmma_fence() {  // registers written since the last product may be read by the next
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {  // until at most kLeft groups are under way
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void registers_up() {  // by a whole warpgroup, once another gave some back
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#define NAMES_4 "{%0,%1,%2,%3"
#define NAMES_8 NAMES_4 ",%4,%5,%6,%7"
#define NAMES_16 NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_24 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define NAMES_32 NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_40 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define NAMES_48 NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_56 NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define NAMES_64 NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_128 NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71" ",%72,%73,%74,%75,%76,%77,%78,%79" ",%80,%81,%82,%83,%84,%85,%86,%87" ",%88,%89,%90,%91,%92,%93,%94,%95" ",%96,%97,%98,%99,%100,%101,%102,%103" ",%104,%105,%106,%107,%108,%109,%110,%111" ",%112,%113,%114,%115,%116,%117,%118,%119" ",%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS_8(i)                                                                                            \
  "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3]), "+f"(acc[i + 4]), "+f"(acc[i + 5]),    \
      "+f"(acc[i + 6]), "+f"(acc[i + 7])
#define SUMS_4 "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
#define SUMS_16 SUMS_8(0), SUMS_8(8)
#define SUMS_24 SUMS_16, SUMS_8(16)
#define SUMS_32 SUMS_24, SUMS_8(24)
#define SUMS_40 SUMS_32, SUMS_8(32)
#define SUMS_48 SUMS_40, SUMS_8(40)
#define SUMS_56 SUMS_48, SUMS_8(48)
#define SUMS_64 SUMS_56, SUMS_8(56)
#define SUMS_128 SUMS_64, SUMS_8(64), SUMS_8(72), SUMS_8(80), SUMS_8(88), SUMS_8(96), SUMS_8(104), SUMS_8(112), SUMS_8(120)

#if PAD == 8
#define WGMMA "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 " NAMES_4 "}, {%4,%5,%6,%7}, %8, 1, 1, 1, 0;"
#define WGMMA_SUMS SUMS_4
#elif PAD == 16
#define WGMMA "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 " NAMES_8 "}, {%8,%9,%10,%11}, %12, 1, 1, 1, 0;"
#define WGMMA_SUMS SUMS_8(0)
#elif PAD == 32
#define WGMMA "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 " NAMES_16 "}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
#define WGMMA_SUMS SUMS_16
#elif PAD == 48
#define WGMMA "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 " NAMES_24 "}, {%24,%25,%26,%27}, %28, 1, 1, 1, 0;"
#define WGMMA_SUMS SUMS_24
#elif PAD == 64
#define WGMMA "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " NAMES_32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
#define WGMMA_SUMS SUMS_32
#elif PAD == 80
#define WGMMA "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 " NAMES_40 "}, {%40,%41,%42,%43}, %44, 1, 1, 1, 0;"
#define WGMMA_SUMS SUMS_40
#elif PAD == 96
#define WGMMA "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 " NAMES_48 "}, {%48,%49,%50,%51}, %52, 1, 1, 1, 0;"
#define WGMMA_SUMS SUMS_48
#elif PAD == 112
#define WGMMA "wgmma.mma_async.sync.aligned.m64n112k16.f32.f16.f16 " NAMES_56 "}, {%56,%57,%58,%59}, %60, 1, 1, 1, 0;"
#define WGMMA_SUMS SUMS_56
#elif PAD == 128
#define WGMMA "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " NAMES_64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
#define WGMMA_SUMS SUMS_64
#elif PAD == 256
#define WGMMA "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " NAMES_128 "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 0;"
#define WGMMA_SUMS SUMS_128
#endif

// acc += a b over 16 columns; under way until a wait says otherwise.
__device__ __forceinline__ void wgmma(float (&acc)[kSums], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm volatile(WGMMA : WGMMA_SUMS : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
