// Rows of a state spread over LANES lanes of a warp: copies into shared memory, dot products with one fixed order of
// sums. Macros: LANES, PARTS (running sums of a dot product).
#pragma once
#include "types.cuh"

__device__ __forceinline__ void copy16(void* shared, const float* global) {
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

__device__ __forceinline__ void copy4(void* shared, const float* global) {
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void copies_wait_but_last() {  // for all groups but the one committed last
  asm volatile("cp.async.wait_group 1;" ::: "memory");
}

template <int QUADS>
__device__ __forceinline__ float dot(const float4 (&a)[QUADS], const float4 (&b)[QUADS]) {
  float sum[PARTS] = {};
#pragma unroll
  for (int i = 0; i < QUADS; i++) {
    sum[0] = fmaf(a[i].x, b[i].x, sum[0]);
    sum[1 % PARTS] = fmaf(a[i].y, b[i].y, sum[1 % PARTS]);
    sum[2 % PARTS] = fmaf(a[i].z, b[i].z, sum[2 % PARTS]);
    sum[3 % PARTS] = fmaf(a[i].w, b[i].w, sum[3 % PARTS]);
  }
  if (PARTS == 4) return (sum[0] + sum[1 % PARTS]) + (sum[2 % PARTS] + sum[3 % PARTS]);
  return PARTS == 2 ? sum[0] + sum[1 % PARTS] : sum[0];
}

// Sum each of N values over the LANES lanes of a column; lane l of a group gets the sum of value l / (LANES / N). At
// every hop the first half of the values goes to one half of the lanes and the rest to the other, so a value's sum is
// the same tree for any N.
template <int N>
__device__ __forceinline__ float sum_lanes(float (&x)[N]) {
#pragma unroll
  for (int hop = LANES / 2, n = N; hop > 0; hop /= 2) {
    const bool up = threadIdx.x & hop;
    n = n > 1 ? n / 2 : 0;
    if (n == 0) x[0] += __shfl_xor_sync(0xffffffffu, x[0], hop);
#pragma unroll
    for (int c = 0; c < n; c++) {
      const float mine = up ? x[c + n] : x[c], other = up ? x[c] : x[c + n];
      x[c] = mine + __shfl_xor_sync(0xffffffffu, other, hop);
    }
  }
  return x[0];
}
