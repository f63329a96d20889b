// heads: each head's part of the rows times a matrix of its own, from the bytes of the file. Meaning: heads/ref.py.
//
//   x        [row, head, N_IN]   f32  rows row_step and heads head_step values apart, both multiples of 4
//   weights  [head, N_OUT, ROW_BYTES]  u8  rows of whole blocks of TYPE
//   out      [row, head, N_OUT]  f32  written
//
// A CTA copies the rows of 16 * WARPS outputs of a head to shared memory, before its predecessor is over, and multiplies 8, 16 or 32 rows
// with them. Weights and rows are cut into two numbers of 11 bits each, whose three larger products tensor cores add in f32 (TF32):
// nothing is rounded to f16, so nothing overflows, and 21 bits count. Columns are added in one order for any number of rows. Rows that are
// not finite come out as no numbers.
//
// Bound by weights for few rows (8.4 million in each of DeepSeek-V3's two), by products for many.
// Macros: TYPE (ggml's number), N_IN, N_OUT, ROW_BYTES, PITCH (from one output to the next in shared memory: eight of them are read at once,
// from other banks), WARPS.
#include "mma.cuh"
#include "overlap.cuh"
#include "unpacked.cuh"

constexpr int kOut = 16 * WARPS;  // of a CTA
static_assert(N_IN % 4 == 0 && N_OUT * ROW_BYTES % 16 == 0, "whole quads of columns, whole copies");
static_assert(PITCH == ROW_BYTES || (ROW_BYTES % 16 == 0 && PITCH % 16 == 0), "no copy has bytes of two outputs");

struct Cut {  // x to 22 bits: both are numbers of TF32
  u32 high, low;
};

__device__ __forceinline__ Cut cut(float x) {
  const u32 high = __float_as_uint(x) & 0xffffe000u;
  return {high, __float_as_uint(x - __uint_as_float(high)) & 0xffffe000u};
}

struct Eight {  // 16 outputs by 8 columns of weights, a lane's share
  u32 high[4], low[4];
};

__device__ __forceinline__ void put(Eight& to, int at, float x) {
  const Cut c = cut(x);
  to.high[at] = c.high, to.low[at] = c.low;
}

// Lane 4 g + t has columns 4 t to 4 t + 3 of each 16, of outputs g and g + 8 and of row g: two to each product.
template <int kTiles>
__device__ __forceinline__ void heads_of(const float* x, i64 row_step, i64 head_step, const u8* weights, float* out, int n_row, int n_head) {
  __shared__ __align__(16) u8 tile[kOut * PITCH];
  let_successor_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.y, first = blockIdx.x * kOut, n = min(kOut, N_OUT - first), first_row = blockIdx.z * 8 * kTiles;
  const u8* const from = weights + (static_cast<i64>(head) * N_OUT + first) * ROW_BYTES;
  for (int i = 16 * threadIdx.x; i < n * ROW_BYTES; i += 16 * 32 * WARPS)
    copy16(shared_address(tile + (PITCH == ROW_BYTES ? i : i / ROW_BYTES * PITCH + i % ROW_BYTES)), from + i);
  copies_commit();
  wait_for_predecessor();
  copies_wait<0>();
  __syncthreads();
  if (16 * warp >= n) return;

  const u8* const upper = tile + min(16 * warp + g, n - 1) * PITCH;  // an output too many is the last one, and is not kept
  const u8* const lower = tile + min(16 * warp + g + 8, n - 1) * PITCH;
  const float* rows[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) rows[i] = x + min(first_row + 8 * i + g, n_row - 1) * row_step + head * head_step;
  float acc[kTiles][4] = {};
#pragma unroll 1
  for (int c = 0; c < N_IN; c += 16) {
    const int column = c + 4 * t;
    const bool is_in = N_IN % 16 == 0 || column < N_IN;
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
    const float4 a = is_in ? unpacked(upper, column) : none, b = is_in ? unpacked(lower, column) : none;
    Eight w[2];
    put(w[0], 0, a.x), put(w[0], 1, b.x), put(w[0], 2, a.y), put(w[0], 3, b.y);
    put(w[1], 0, a.z), put(w[1], 1, b.z), put(w[1], 2, a.w), put(w[1], 3, b.w);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float4 v = is_in ? *reinterpret_cast<const float4*>(rows[i] + column) : none;
      const Cut cuts[4] = {cut(v.x), cut(v.y), cut(v.z), cut(v.w)};
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const Cut p = cuts[2 * k], q = cuts[2 * k + 1];
        mma_tf32(acc[i], w[k].low, p.high, q.high);
        mma_tf32(acc[i], w[k].high, p.low, q.low);
        mma_tf32(acc[i], w[k].high, p.high, q.high);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = first_row + 8 * i + 2 * t + k % 2, o = 16 * warp + g + k / 2 * 8;
      if (row < n_row && o < n) out[(static_cast<i64>(row) * n_head + head) * N_OUT + first + o] = acc[i][k];
    }
}

// grid (outputs / kOut, head, rows / (8 * tiles))
#define ENTRY(name, tiles)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)                                                                  \
      name(const float* x, i64 row_step, i64 head_step, const u8* weights, float* out, int n_row, int n_head) {                \
    heads_of<tiles>(x, row_step, head_step, weights, out, n_row, n_head);                                                      \
  }
ENTRY(heads_1, 1)
ENTRY(heads_2, 2)
ENTRY(heads_4, 4)
