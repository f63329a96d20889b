// Blocks of one cluster, from sm_90 on: they start together and write into each other's shared memory.
#pragma once
#include "types.cuh"

// After it waited for all, a block may write to any other: that one has made its barriers, if it did so before it arrived.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where `address` of this block is in block `peer`.
__device__ __forceinline__ u32 in_cluster(u32 address, u32 peer) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(peer));
  return there;
}

// x to where `to` is in the shared memory of block `peer`, counted in bytes on `barrier` there once it is: one trip, no
// answer. Both are addresses in this block. A block may not end before all that is sent to it has come.
__device__ __forceinline__ void send(u32 to, float x, u32 barrier, u32 peer) {
  const u32 there = in_cluster(to, peer), counts = in_cluster(barrier, peer);
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(there), "f"(x),
               "r"(counts)
               : "memory");
}

__device__ __forceinline__ void send(u32 to, float4 x, u32 barrier, u32 peer) {
  const u32 there = in_cluster(to, peer), counts = in_cluster(barrier, peer);
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(counts)
      : "memory");
}
