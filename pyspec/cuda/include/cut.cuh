// Where gated activations are cut: gates at GATE_LIMIT before silu, ups at plus and minus LIMIT (cut.py). Comparisons, not fminf: what
// is no number stays none.
#pragma once

#ifdef LIMIT
__device__ __forceinline__ float cut_gate(float y) { return y > GATE_LIMIT ? GATE_LIMIT : y; }
__device__ __forceinline__ float cut_up(float y) { return y > LIMIT ? LIMIT : y < -LIMIT ? -LIMIT : y; }
#else
__device__ __forceinline__ float cut_gate(float y) { return y; }
__device__ __forceinline__ float cut_up(float y) { return y; }
#endif
