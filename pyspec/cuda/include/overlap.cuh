// Programmatic launches (sm_90 and later; nothing below): a kernel may start while its predecessor ends. It may touch
// what that one wrote, or write what that one reads, only after it waited. What was there before (weights, a batch's layout)
// is best loaded before the wait. Pointers to either are better not `const __restrict__`: the compiler may load the former
// too early, and ptxas (13.0) puts loads of the latter behind the wait.
//
// When a kernel starts its predecessor may not have waited yet, nor that one's. So what else is loaded before the wait has to be
// from before the forward (a state, its window and records, a batch's layout) or from its first kernel (angles): that one,
// embed.cu or angles.cu, starts when all before it is over and lets nobody start until it is over itself.
//
// Unless the predecessor is `late` (linear_pair.cu, linear_sm90.cu): it lets its successor start behind its own wait, so all before it is
// over then. Who reads nothing of it may run beside it: reads past L1 what kernels wrote that it did not wait for, writes only memory that
// was taken before that predecessor was launched (what was let go of since may be what it reads), and waits at its end, or its successors
// would take that one for over, too.
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
