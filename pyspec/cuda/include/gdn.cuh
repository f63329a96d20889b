// What gdn.cu and gdn_chunk.cu share: sizes, and the one reader of a sequence's metadata.
#pragma once
#include "types.cuh"
#include "bounds.cuh"
#include "overlap.cuh"

#ifndef N_K
#define N_K 16  // key heads
#define N_V 48  // value heads
#endif
#define DIM 128
#define OP_GDN 3  // this op's number in fault records

constexpr int KD = N_K * DIM, VD = N_V * DIM, CHANNELS = 2 * KD + VD;

struct Seq {
  int slot, start, n, fold;  // n == 0: nothing to do
  bool keep;
  bool chunked;  // rows go through gdn_chunk.cu; gdn_rows only folds
};

struct Meta {
  const int *slot, *start, *fold, *keep;
  int n_slot, width, n_row;
  int chunked;  // kept sequences of at least as many rows are chunked
};

__device__ __forceinline__ Seq read_seq(const Meta& meta, int s, int* fault) {
  const Seq none = {0, 0, 0, 0, false, false};
  Seq seq = {meta.slot[s], meta.start[s], 0, meta.fold[s], meta.keep[s] != 0, false};
  const int n = meta.start[s + 1] - seq.start, last = seq.start + n - 1;
  if (n <= 0) return none;
  if (clamped(seq.slot, meta.n_slot, OP_GDN, seq.slot, fault) != seq.slot) return none;
  if (clamped(seq.fold, meta.width + 1, OP_GDN, seq.slot, fault) != seq.fold) return none;
  if (clamped(seq.start, meta.n_row, OP_GDN, seq.slot, fault) != seq.start) return none;
  if (clamped(last, meta.n_row, OP_GDN, seq.slot, fault) != last) return none;
  if (!seq.keep && clamped(n, meta.width + 1, OP_GDN, seq.slot, fault) != n) return none;
  seq.n = n;
  seq.chunked = seq.keep && n >= meta.chunked;
  return seq;
}

__device__ __forceinline__ float4& quad(float* p) { return *reinterpret_cast<float4*>(p); }
__device__ __forceinline__ float4 quad(const float* p) { return *reinterpret_cast<const float4*>(p); }

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
