// rows_finish: out = residual + y * power of its row, after a library's product of prepared rows (rows.cu).
//
//   y, residual, out  [row, n]  f32  contiguous; residual may be null, out may be y or residual
//   powers            [row]     f32
//
// grid (stretches of 4,096 columns, rows), 512 threads; memory-bound.
#include "types.cuh"
#include "overlap.cuh"

constexpr int kThreads = 512, kStretch = 4096;

extern "C" __global__ void __launch_bounds__(kThreads)
    rows_finish(const float* y, const float* __restrict__ powers, const float* residual, float* out, int n) {
  let_successor_start();
  wait_for_predecessor();
  const float power = powers[blockIdx.y];
  const i64 row = static_cast<i64>(blockIdx.y) * n;
  const int end = min(n, static_cast<int>(blockIdx.x + 1) * kStretch);
  for (int column = blockIdx.x * kStretch + threadIdx.x * 4; column < end; column += kThreads * 4) {
    const float4 v = *reinterpret_cast<const float4*>(y + row + column);
    float4 r = make_float4(0.f, 0.f, 0.f, 0.f);
    if (residual != nullptr) r = *reinterpret_cast<const float4*>(residual + row + column);
    *reinterpret_cast<float4*>(out + row + column) =
        make_float4(fmaf(v.x, power, r.x), fmaf(v.y, power, r.y), fmaf(v.z, power, r.z), fmaf(v.w, power, r.w));
  }
}
