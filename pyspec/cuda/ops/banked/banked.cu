// banked: rows of a stream mixed with rows that were kept of it. Meaning: banked/ref.py.
//
//   s0 .. s16  [row, COLUMNS]  f32  kept ones, then the stream's own; null behind it
//   weight     [COLUMNS]       f32
//   out        [row, COLUMNS]  f32
//
// Grid (row), block THREADS: all scores at once, then the sum; rows come from L2 the second time. Sums are in a fixed order.
// Macros: N_STREAM (up to MOST + 1), COLUMNS.
#include "types.cuh"
#include "overlap.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, QUADS = COLUMNS / 4;
static_assert(COLUMNS % 4 == 0 && N_STREAM <= 17, "rows in quads");

struct Streams {
  const float* of[17];
};

__device__ __forceinline__ float4 quad(const float* x, i64 at) { return reinterpret_cast<const float4*>(x)[at]; }

extern "C" __global__ void __launch_bounds__(THREADS)
banked(const float* s0, const float* s1, const float* s2, const float* s3, const float* s4, const float* s5, const float* s6, const float* s7,
       const float* s8, const float* s9, const float* s10, const float* s11, const float* s12, const float* s13, const float* s14,
       const float* s15, const float* s16, const float* weight, float* out, float eps) {
  let_successor_start();
  __shared__ float squares[N_STREAM][WARPS], dots[N_STREAM][WARPS], shares[N_STREAM];
  __shared__ Streams all;  // not in registers, of which 17 pairs would be too many
  const i64 row = static_cast<i64>(blockIdx.x) * QUADS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    all.of[0] = s0, all.of[1] = s1, all.of[2] = s2, all.of[3] = s3, all.of[4] = s4, all.of[5] = s5, all.of[6] = s6, all.of[7] = s7, all.of[8] = s8;
    all.of[9] = s9, all.of[10] = s10, all.of[11] = s11, all.of[12] = s12, all.of[13] = s13, all.of[14] = s14, all.of[15] = s15, all.of[16] = s16;
  }
  __syncthreads();
  wait_for_predecessor();
#pragma unroll 1
  for (int i = 0; i < N_STREAM; i++) {
    float square = 0.f, dot = 0.f;
    for (int j = threadIdx.x; j < QUADS; j += THREADS) {
      const float4 x = quad(all.of[i], row + j), w = quad(weight, j);
      square += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
      dot += (x.x * w.x + x.y * w.y) + (x.z * w.z + x.w * w.w);
    }
    square = warp_sum(square), dot = warp_sum(dot);
    if (lane == 0) squares[i][warp] = square, dots[i][warp] = dot;
  }
  __syncthreads();
  if (warp == 0) {  // a lane for each stream
    float score = -__int_as_float(0x7f800000);
    if (lane < N_STREAM) {
      float square = 0.f, dot = 0.f;
      for (int i = 0; i < WARPS; i++) square += squares[lane][i], dot += dots[lane][i];
      score = dot * __fdiv_rn(1.f, __fsqrt_rn(square / COLUMNS + eps));
    }
    float most = score;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    const float share = lane < N_STREAM ? expf(score - most) : 0.f, total = warp_sum(share);
    if (lane < N_STREAM) shares[lane] = __fdiv_rn(share, total);
  }
  __syncthreads();
  for (int j = threadIdx.x; j < QUADS; j += THREADS) {
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int i = 0; i < N_STREAM; i++) {
      const float4 x = quad(all.of[i], row + j);
      const float by = shares[i];
      y.x = fmaf(by, x.x, y.x), y.y = fmaf(by, x.y, y.y), y.z = fmaf(by, x.z, y.z), y.w = fmaf(by, x.w, y.w);
    }
    reinterpret_cast<float4*>(out)[row + j] = y;
  }
}
