// Bounds of data-dependent indices: clamp and report, never trap. A trap poisons the context and ends every slot.
//
// fault [5] int32: {tripped, op, slot, index, limit}. The first offender writes it; the host reads it with the tokens
// and ends that slot's request.
#pragma once

__device__ __forceinline__ int clamped(int index, int limit, int op, int slot, int* fault) {
  if (static_cast<unsigned>(index) < static_cast<unsigned>(limit)) return index;
  if (atomicCAS(fault, 0, 1) == 0) {
    fault[1] = op;
    fault[2] = slot;
    fault[3] = index;
    fault[4] = limit;
  }
  return 0;
}
