// gated_streams: residual streams that are read and written by gates of low rank. Meaning: gated_streams/ref.py. All f32.
//
//   x, normed, gates  [row, STREAMS, COLUMNS]
//   low, inject       [row, n], [row, STREAMS]   rows lie `step` apart
//   y                 [row, COLUMNS]
//
// streams_norm has a CTA for each row and stream, whose squares are summed in one order; streams_read and streams_merge have one for each row
// and 1024 columns, streams_bend a thread for each number. A row's bits depend on no other row.
// Macros: STREAMS, COLUMNS.
#include "overlap.cuh"
#include "types.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, QUADS = COLUMNS / 4, EACH = (QUADS + THREADS - 1) / THREADS;
static_assert(COLUMNS % 4 == 0, "whole quads");

__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.f, 1.f + expf(-x)); }

extern "C" __global__ void __launch_bounds__(THREADS) streams_norm(const float4* x, const float4* weight, float4* out, float eps) {
  __shared__ float of_warp[WARPS];
  let_successor_start();
  const int stream = blockIdx.y, warp = threadIdx.x / 32;
  const i64 at = (static_cast<i64>(blockIdx.x) * STREAMS + stream) * QUADS;
  wait_for_predecessor();
  float4 v[EACH];
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int quad = threadIdx.x + i * THREADS;
    v[i] = quad < QUADS ? x[at + quad] : make_float4(0.f, 0.f, 0.f, 0.f);
    square = fmaf(v[i].x, v[i].x, fmaf(v[i].y, v[i].y, fmaf(v[i].z, v[i].z, fmaf(v[i].w, v[i].w, square))));
  }
  square = warp_sum(square);
  if (threadIdx.x % 32 == 0) of_warp[warp] = square;
  __syncthreads();
  float all = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) all += of_warp[w];
  const float by = __fdiv_rn(1.f, __fsqrt_rn(all / COLUMNS + eps));
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int quad = threadIdx.x + i * THREADS;
    if (quad >= QUADS) break;
    const float4 w = weight[stream * QUADS + quad];
    out[at + quad] = make_float4(v[i].x * by * w.x, v[i].y * by * w.y, v[i].z * by * w.z, v[i].w * by * w.w);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) streams_bend(const float* low, float* out, i64 step, int n, int n_row) {
  let_successor_start();
  const i64 at = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  wait_for_predecessor();
  if (at >= static_cast<i64>(n) * n_row) return;
  const float v = low[at / n * step + at % n] / STREAMS;
  out[at] = v * sigmoid(v);
}

extern "C" __global__ void __launch_bounds__(THREADS) streams_read(const float4* normed, const float4* gates, float4* out) {
  let_successor_start();
  const int quad = blockIdx.y * THREADS + threadIdx.x;
  wait_for_predecessor();
  if (quad >= QUADS) return;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int s = 0; s < STREAMS; s++) {
    const i64 at = (static_cast<i64>(blockIdx.x) * STREAMS + s) * QUADS + quad;
    const float4 v = normed[at], g = gates[at];
    sum = make_float4(fmaf(v.x, sigmoid(g.x), sum.x), fmaf(v.y, sigmoid(g.y), sum.y), fmaf(v.z, sigmoid(g.z), sum.z),
                      fmaf(v.w, sigmoid(g.w), sum.w));
  }
  out[static_cast<i64>(blockIdx.x) * QUADS + quad] = make_float4(sum.x / STREAMS, sum.y / STREAMS, sum.z / STREAMS, sum.w / STREAMS);
}

extern "C" __global__ void __launch_bounds__(THREADS)
streams_merge(const float4* x, const float4* y, const float* inject, float4* out, i64 step) {
  let_successor_start();
  const int quad = blockIdx.y * THREADS + threadIdx.x;
  wait_for_predecessor();
  if (quad >= QUADS) return;
  const float4 add = y[static_cast<i64>(blockIdx.x) * QUADS + quad];
#pragma unroll
  for (int s = 0; s < STREAMS; s++) {
    const i64 at = (static_cast<i64>(blockIdx.x) * STREAMS + s) * QUADS + quad;
    const float by = 2.f * sigmoid(inject[blockIdx.x * step + s] / STREAMS);
    const float4 v = x[at];
    out[at] = make_float4(fmaf(by, add.x, v.x), fmaf(by, add.y, v.y), fmaf(by, add.z, v.z), fmaf(by, add.w, v.w));
  }
}
