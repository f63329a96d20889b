// linear_rows: rows as linear.cu reads them: normed if asked, f16 over a power of two of their own, in blocks of 32.
//
//   x       [row, n_in]       f32 or bf16 (IS_BF16)  rows `stride` elements apart
//   weight  [n_in]            f32   RMS norm weight; read when HAS_NORM
//   out     [block][PAD][32]  f16   blocks up to n_block; rows from n_row on and columns from n_in on are zero
//   sums    [block][PAD]      f32   sums of the block's f16 values
//   powers  [PAD]             f32   x = out * power
//
// Within a block the columns are in the order of quants.cuh: 0-3, 16-19, 4-7, 20-23, ...
// The power brings the row's largest magnitude into [1, 2): rounding is 2^-11 of each value down to 2^-14 of the
// largest, absolute below. One CTA of 512 threads a row of PAD; bound by latency.
#include "types.cuh"
#include "overlap.cuh"

constexpr int kThreads = 512;

__device__ __forceinline__ void load4(float (&v)[4], const void* row, int column) {
#if IS_BF16
  const uint2 u = *reinterpret_cast<const uint2*>(static_cast<const u16*>(row) + column);
  v[0] = bf16_to_f32(static_cast<u16>(u.x));
  v[1] = bf16_to_f32(static_cast<u16>(u.x >> 16));
  v[2] = bf16_to_f32(static_cast<u16>(u.y));
  v[3] = bf16_to_f32(static_cast<u16>(u.y >> 16));
#else
  const float4 f = *reinterpret_cast<const float4*>(static_cast<const float*>(row) + column);
  v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
#endif
}

__device__ __forceinline__ float over_warps(float mine, bool is_sum) {
  __shared__ float each[kThreads / 32];
  mine = is_sum ? warp_sum(mine) : warp_max(mine);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) each[threadIdx.x >> 5] = mine;
  __syncthreads();
  const float other = (threadIdx.x & 31) < kThreads / 32 ? each[threadIdx.x & 31] : 0.f;
  return is_sum ? warp_sum(other) : warp_max(other);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    linear_rows(const void* __restrict__ x, const float* __restrict__ weight, u16* __restrict__ out,
                float* __restrict__ sums, float* __restrict__ powers, float eps, int n_row, int n_in, int n_block,
                i64 stride) {
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.x, pad = gridDim.x;
  const bool is_real = row < n_row;
  const void* from = static_cast<const u8*>(x) + (is_real ? row * stride : 0) * (IS_BF16 ? 2 : 4);

  float scale = 1.f, largest = 0.f, squares = 0.f;
  if (is_real) {
    for (int column = threadIdx.x * 4; column < n_in; column += kThreads * 4) {
      float v[4];
      load4(v, from, column);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        squares = fmaf(v[i], v[i], squares);
        largest = fmaxf(largest, fabsf(HAS_NORM ? v[i] * weight[column + i] : v[i]));
      }
    }
    if (HAS_NORM) scale = rsqrtf(over_warps(squares, true) / n_in + eps);
    largest = over_warps(largest, false) * scale;
  }
  const u32 exponent = __float_as_uint(largest) & 0x7f800000u;  // zero and infinite rows go as they are
  const bool is_usual = exponent >= 0x00800000u && exponent < 0x7f800000u;
  const u32 bits = min(exponent, 0x7e800000u);  // 2^126, whose inverse is a normal number
  const float power = is_usual ? __uint_as_float(bits) : 1.f;
  const float inverse = is_usual ? __uint_as_float(0x7f000000u - bits) : 1.f;
  if (threadIdx.x == 0) powers[row] = power;

  for (int i = threadIdx.x; i < n_block * 4; i += kThreads) {
    const int column = (i >> 2) * 32 + (i & 3) * 4;
    float total = 0.f;
    u32 packed[4] = {0, 0, 0, 0};
    if (is_real && column < n_in) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[4];
        load4(v, from, column + half * 16);
        u16 f[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float y = HAS_NORM ? v[j] * scale * weight[column + half * 16 + j] : v[j];
          f[j] = f32_to_f16(y * inverse);
          total += f16_to_f32(f[j]);
        }
        packed[half * 2] = f[0] | static_cast<u32>(f[1]) << 16;
        packed[half * 2 + 1] = f[2] | static_cast<u32>(f[3]) << 16;
      }
    }
    total += __shfl_xor_sync(0xffffffffu, total, 1);  // n_block * 4 is a multiple of 32: whole warps run
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const i64 at = static_cast<i64>(i >> 2) * pad + row;
    reinterpret_cast<uint4*>(out)[at * 4 + (i & 3)] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    if ((i & 3) == 0) sums[at] = total;
  }
}
