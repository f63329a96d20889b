// Who comes last: CTAs (or warps) that share some work count their arrivals at a ticket, zero before, and the last one finishes
// the work. It puts the ticket back to zero, for the next launch.
#pragma once

// Counts an arrival; sees what earlier ones wrote, and shows what this thread (and those it synchronised with) wrote.
__device__ __forceinline__ int arrive(int* ticket) {
  int n;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(n) : "l"(ticket) : "memory");
  return n;
}
