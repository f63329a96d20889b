// The convolution of recurrent layers: TAPS taps, a window of raw inputs before the first row, silu or not. A lane has 4
// channels. TAPS and CHANNELS are defined by the file that includes this.
#pragma once
#include "seq.cuh"

__device__ __forceinline__ float4 fma4(float4 a, float4 b, float4 c) {
  return make_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z), fmaf(a.w, b.w, c.w));
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }

// Records that are folded where they lie, on their way to L2 for the kernel behind: they were written a few forwards ago. A warp's 128 columns
// at `record`, a lane's 4 of them; rows are `stride` apart.
__device__ __forceinline__ void fetch_records(const float* record, int first, int step, int n, int stride) {
  if (threadIdx.x % 8 != 0) return;  // 128 bytes at a time
#pragma unroll 1
  for (int t = first; t < n; t += step) asm volatile("prefetch.global.L2 [%0];" ::"l"(record + static_cast<i64>(t) * stride) : "memory");
}

template <int GROUP>
struct Raw {  // raw inputs of a lane's 4 channels: TAPS - 1 rows and the GROUP rows after them
  float4 x[GROUP + TAPS - 1];
};

// Rows first - (TAPS - 1) .. first + count - 1 of a sequence: those before row 0, which the window has, and the others.
template <int GROUP>
__device__ __forceinline__ void load_window(Raw<GROUP>& raw, const float* window, int first) {
#pragma unroll
  for (int i = 0; i < TAPS - 1; i++) {
    const int r = first + i - (TAPS - 1);
    if (r < 0) raw.x[i] = quad(window + static_cast<i64>(r + TAPS - 1) * CHANNELS);
  }
}

template <int GROUP>
__device__ __forceinline__ void load_rows(Raw<GROUP>& raw, const float* rows, i64 m_stride, int first, int count) {
#pragma unroll
  for (int i = 0; i < GROUP + TAPS - 1; i++) {
    const int r = first + i - (TAPS - 1);
    if (r >= 0 && i < count + TAPS - 1) raw.x[i] = quad(rows + r * m_stride);
  }
}

struct Taps {
  float4 w[TAPS];  // w[tap], one component per channel of the lane

  __device__ __forceinline__ explicit Taps(const float* conv_w) {
    float c[4 * TAPS];
#pragma unroll
    for (int i = 0; i < TAPS; i++) {
      const float4 x = quad(conv_w + 4 * i);
      c[4 * i] = x.x, c[4 * i + 1] = x.y, c[4 * i + 2] = x.z, c[4 * i + 3] = x.w;
    }
#pragma unroll
    for (int t = 0; t < TAPS; t++) w[t] = make_float4(c[t], c[TAPS + t], c[2 * TAPS + t], c[3 * TAPS + t]);
  }

  __device__ __forceinline__ float4 operator()(const float4* x) const {
    return operator()(x, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
  }

  __device__ __forceinline__ float4 operator()(const float4* x, float4 y) const {  // y: the bias
    y = sum(x, y);
    return make_float4(silu(y.x), silu(y.y), silu(y.z), silu(y.w));
  }

  __device__ __forceinline__ float4 sum(const float4* x, float4 y) const {  // without the activation
#pragma unroll
    for (int i = 0; i < TAPS; i++) y = fma4(x[i], w[i], y);
    return y;
  }
};

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
