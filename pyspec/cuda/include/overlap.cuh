// Programmatic launches (sm_90 and later; nothing below): a kernel may start while its predecessor ends. It may touch
// what that one wrote, or write what that one reads, only after it waited. Pointers to the former are better not
// `const __restrict__`: that lets the compiler load early.
#pragma once

__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
