// What gdn.cu and gdn_chunk.cu share.
#pragma once
#include "seq.cuh"
#include "overlap.cuh"

#ifndef N_K
#define N_K 16  // key heads
#define N_V 48  // value heads
#endif
#define DIM 128
#define OP_GDN 3  // this op's number in fault records

constexpr int KD = N_K * DIM, VD = N_V * DIM, CHANNELS = 2 * KD + VD;

__device__ __forceinline__ Seq read_seq(const Meta& meta, int s, int* fault) {
  return read_seq(meta, s, OP_GDN, fault);
}

__device__ __forceinline__ u32 f16_pair(float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

struct Halves {  // two numbers as sums of two f16: 22 bits of each that is not tiny
  u32 hi, lo;
};

__device__ __forceinline__ Halves halves(float a, float b) {
  const u32 hi = f16_pair(a, b);
  const float rest_a = a - f16_to_f32(static_cast<u16>(hi)), rest_b = b - f16_to_f32(static_cast<u16>(hi >> 16));
  return {hi, f16_pair(rest_a, rest_b)};
}
