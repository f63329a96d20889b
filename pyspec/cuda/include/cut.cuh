// Where gated activations are cut (LIMIT): gates at it before silu, ups at plus and minus it. Comparisons, not fminf: what is no
// number stays none.
#pragma once

#ifdef LIMIT
__device__ __forceinline__ float cut_gate(float y) { return y > LIMIT ? LIMIT : y; }
__device__ __forceinline__ float cut_up(float y) { return y > LIMIT ? LIMIT : y < -LIMIT ? -LIMIT : y; }
#else
__device__ __forceinline__ float cut_gate(float y) { return y; }
__device__ __forceinline__ float cut_up(float y) { return y; }
#endif
