// Bulk copies that complete on barriers in shared memory, for sm_90 and later.
#pragma once
#include "types.cuh"

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barriers_visible() {  // to the copy engine, after all inits
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 n_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n_bytes) : "memory");
}

// Bytes that the phase waits for besides its arrivals.
__device__ __forceinline__ void barrier_expect_more(u32 barrier, u32 n_bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(n_bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same at an address in the cluster. It tells that something was read; a release of what was written, for all of the cluster
// (`.release.cluster`), is a fence that waits for memory: half a microsecond.
__device__ __forceinline__ void barrier_arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// For what other blocks of the cluster send.
__device__ __forceinline__ void barrier_wait_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 n_bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(n_bytes), "r"(barrier)
               : "memory");
}

// To the same place of all blocks of the cluster, counted on the same barrier of each.
template <int kBlocks>
__device__ __forceinline__ void bulk_copy_to_all(u32 to, const void* from, u32 n_bytes, u32 barrier) {
  const u16 all = (1 << kBlocks) - 1;
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(n_bytes), "r"(barrier), "h"(all)
      : "memory");
}

__device__ __forceinline__ void bulk_copy_once(u32 to, const void* from, u32 n_bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          to),
      "l"(from), "r"(n_bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Into L2, if there is room on the way: a hint, of units of 16 bytes.
__device__ __forceinline__ void bulk_prefetch(const void* from, u32 n_bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(n_bytes) : "memory");
}
