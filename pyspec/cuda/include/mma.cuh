// Tensor-core products and asynchronous copies as inline PTX, for sm_80 and later.
#pragma once
#include "types.cuh"

// d = a b + c, m16n8k16, f16 operands, f32 sums. Lane 4 g + t holds
//   a: rows g, g + 8, g, g + 8; columns 2t, 2t + 1 (a0, a1) and 2t + 8, 2t + 9 (a2, a3)
//   b: rows 2t, 2t + 1 (b0) and 2t + 8, 2t + 9 (b1) of column g
//   d: row g columns 2t, 2t + 1 (d0, d1), row g + 8 the same columns (d2, d3)
__device__ __forceinline__ void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0,
                                        float c1, float c2, float c3) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0,
                                         float c1, float c2, float c3) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}

// d += a b, m16n8k8, operands f32 of which the upper 19 bits count. Lane 4 g + t holds
//   a: rows g, g + 8, g, g + 8; columns t (a0, a1) and t + 4 (a2, a3)
//   b: rows t (b0) and t + 4 (b1) of column g; d as above
__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
}

// bf16 with k = 8: row 2t and 2t + 1 of b alone, columns 2t and 2t + 1 of a; and in whole numbers, m16n8k32, u8 or s8 by s8: lane 4 g + t holds
//   a: rows g, g + 8, g, g + 8; columns 4t to 4t + 3 (a0, a1) and 16 more (a2, a3)
//   b: rows 4t to 4t + 3 (b0) and 16 more (b1) of column g
__device__ __forceinline__ void mma_bf16_k8(float (&d)[4], u32 a0, u32 a1, u32 b0) {
  asm(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%8,%9,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0), "f"(0.f), "f"(0.f), "f"(0.f), "f"(0.f));
}

__device__ __forceinline__ void mma_u8_s8(int (&d)[4], const u32 (&a)[4], uint2 b) {
  asm(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(0), "r"(0), "r"(0), "r"(0));
}

__device__ __forceinline__ void mma_s8_s8(int (&d)[4], const u32 (&a)[4], uint2 b) {
  asm(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(0), "r"(0), "r"(0), "r"(0));
}

__device__ __forceinline__ u32 shared_address(const void* p) {
  u64 out;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(out) : "l"(reinterpret_cast<u64>(p)));
  return static_cast<u32>(out);
}

// For bytes read once: leaves the second-level cache to the rest. For bulk copies alone: with cp.async an H200 stops at an
// "illegal instruction".
__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Of a stream that is read to its end: the second-level cache fetches 128 bytes where one 32 of them are asked for. 256 gain less.
__device__ __forceinline__ void copy16_ahead(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same to registers. kEarly: loads stay before a wait for the predecessor that stands behind them (ptxas 13.0 puts others, of what
// nobody writes, behind it).
template <bool kEarly>
__device__ __forceinline__ uint4 stream_16(const void* from) {
  uint4 v;
  if (kEarly)
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  else
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

template <bool kEarly>
__device__ __forceinline__ uint2 stream_8(const void* from) {
  uint2 v;
  if (kEarly)
    asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
  else
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}

template <bool kEarly>
__device__ __forceinline__ u32 stream_4(const void* from) {
  u32 v;
  if (kEarly)
    asm volatile("ld.global.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  else
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kLeft>
__device__ __forceinline__ void copies_wait() {  // until at most kLeft groups are under way
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

__device__ __forceinline__ u32 sub_f16x2(u32 a, u32 b) {
  u32 out;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// (a & b) | c in one instruction: the compiler joins a row of them otherwise, to more than it had.
__device__ __forceinline__ u32 and_or(u32 a, u32 b, u32 c) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

__device__ __forceinline__ u32 fma_f16x2(u32 a, u32 b, u32 c) {
  u32 out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

__device__ __forceinline__ u32 two_bf16(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

__device__ __forceinline__ float low_bf16(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high_bf16(u32 v) { return __uint_as_float(v & 0xffff0000u); }

__device__ __forceinline__ u32 mul_f16x2(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// The lower (kHalf 0) or the upper half of v, twice. Said in halves, it is part of the instruction that reads it.
template <int kHalf>
__device__ __forceinline__ u32 twice(u32 v) {
  u16 half[2];
  u32 both;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(half[0]), "=h"(half[1]) : "r"(v));
  asm("mov.b32 %0, {%1, %1};" : "=r"(both) : "h"(half[kHalf]));
  return both;
}

template <int kHalf>
__device__ __forceinline__ u32 mul_by_half(u32 a, u32 b) {
  return mul_f16x2(a, twice<kHalf>(b));
}

template <int kHalf>
__device__ __forceinline__ u32 fma_by_half(u32 a, u32 b, u32 c) {
  return fma_f16x2(a, twice<kHalf>(b), twice<kHalf>(c));
}

__device__ __forceinline__ uint4 shared_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ uint2 shared_8(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

__device__ __forceinline__ u32 shared_4(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
