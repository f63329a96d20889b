// What gdn.cu and gdn_chunk.cu share.
#pragma once
#include "seq.cuh"
#include "overlap.cuh"

#ifndef N_K
#define N_K 16  // key heads
#define N_V 48  // value heads
#endif
#define DIM 128
#ifdef GROUPED  // value heads of a key head stand side by side
#define KEY_HEAD(h) ((h) / (N_V / N_K))
#else
#define KEY_HEAD(h) ((h) % N_K)
#endif
#ifdef BY_KEY  // a head has a decay for each dimension of its keys, not below FLOOR if that is not 0
constexpr bool kByKey = true;
constexpr float kFloor = FLOOR;
#else
constexpr bool kByKey = false;
constexpr float kFloor = 0.0f;
#endif
#define OP_GDN 3  // this op's number in fault records

constexpr int KD = N_K * DIM, VD = N_V * DIM, CHANNELS = 2 * KD + VD;

__device__ __forceinline__ Seq read_seq(const Meta& meta, int s, int* fault) {
  return read_seq(meta, s, OP_GDN, fault);
}
