// norms: RMSNorm or LayerNorm of rows that stay f32. Meaning: norms_ref.py.
//
//   x, x2            [row, COLUMNS]   f32   two inputs, or one twice; rows `x_step` and `x2_step` elements apart
//   weight, weight2  [COLUMNS]        f32
//   out, out2        [row, COLUMNS]   f32   rows `step` elements apart
//   rows             [row of out2]    i64   which of x2's go to out2; null: all in their order. Of the batch's layout
//   stream           [row, COLUMNS]   f32   added to the rows of out, which `factor` then multiplies; null: neither
//   fault            [5]              i32   see bounds.cuh
//
// RMS: x * rsqrt(mean x^2 + eps) * weight. LAYER: the same of x - mean x. Both inputs have n_row rows. One CTA for every row
// of out, then of out2; a row has the same bits in both. Its values stay in registers. Bound by latency: there is one trip
// through shared memory for each sum, and every warp adds up what it finds there.
//
// INTO  the sums of out and stream also go, normed, where the next product reads them, as rows.cu's NORM puts them, to the bit: it has as
//       many threads where they have several quads each, so its order of squares is this one. No out2.
//   next_weight  [COLUMNS]  f32, and next_eps: of that norm; blocks, block_sums, powers, pad, power: rows.cu's out, sums, powers, pad, given
// Macros: COLUMNS, LAYER, THREADS, OP_ID; INTO, LAYOUT (rows.cu's 0 or 2).
#include "bounds.cuh"
#include "overlap.cuh"
#include "prepared.cuh"

constexpr int kWarps = THREADS / 32;
#if INTO
constexpr int kPadded = (COLUMNS + 255) / 256 * 256;
#else
constexpr int kPadded = COLUMNS;
#endif
constexpr int kQuads = (kPadded / 4 + THREADS - 1) / THREADS;  // of 4 columns, of a thread
constexpr bool kEarly = kQuads <= 4;  // the stream's quads are on their way with the row's
static_assert(COLUMNS % 4 == 0 && THREADS % 32 == 0 && kWarps <= 32, "a lane a warp");

__device__ __forceinline__ float over_block(float mine, float (&each)[kWarps]) {
  mine = warp_sum(mine);
  if (threadIdx.x % 32 == 0) each[threadIdx.x / 32] = mine;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < kWarps ? each[threadIdx.x % 32] : 0.f);
}

// Spelt out: what is written with INTO and without is the same.
__device__ __forceinline__ float summed(float stream, float y, float factor) { return __fmul_rn(__fadd_rn(stream, y), factor); }

extern "C" __global__ void __launch_bounds__(THREADS)
    norms(const float* x, const float* weight, float* out, const float* x2, const float* weight2, float* out2,
          const i64* rows, i64 x_step, i64 x2_step, i64 step, int n_row, float eps, const float* stream, float factor, int* fault
#if INTO
          , const float* next_weight, float next_eps, u16* blocks, float* block_sums, float* powers, int pad, float power
#endif
    ) {
  __shared__ float sums[kWarps], squares[kWarps];
  let_successor_start();
  const bool is_first = static_cast<int>(blockIdx.x) < n_row;
  const i64 to = is_first ? blockIdx.x : blockIdx.x - n_row;
  i64 from = to;
  if (!is_first && rows != nullptr) {
    const i64 given = rows[to];
    const int place = given < 0 || given > 0x7fffffff ? -1 : static_cast<int>(given);
    from = clamped(place, n_row, OP_ID, -1, fault);  // whose it is only the batch's layout knew
  }
  const float4* const weights = reinterpret_cast<const float4*>(is_first ? weight : weight2);
  float4 w[kQuads], v[kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int quad = i * THREADS + threadIdx.x;
    w[i] = quad < COLUMNS / 4 ? weights[quad] : make_float4(0.f, 0.f, 0.f, 0.f);
  }
#if INTO
  float4 next[kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int quad = i * THREADS + threadIdx.x;
    next[i] = quad < COLUMNS / 4 ? reinterpret_cast<const float4*>(next_weight)[quad] : make_float4(0.f, 0.f, 0.f, 0.f);
  }
#endif
  wait_for_predecessor();

  const float4* const own = reinterpret_cast<const float4*>(is_first ? x + from * x_step : x2 + from * x2_step);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int quad = i * THREADS + threadIdx.x;
    v[i] = quad < COLUMNS / 4 ? own[quad] : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  const bool adds = is_first && stream != nullptr;
  const float4* const beside = reinterpret_cast<const float4*>(stream + (adds ? to * COLUMNS : 0));
  float4 b[kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int quad = i * THREADS + threadIdx.x;
    b[i] = kEarly && adds && quad < COLUMNS / 4 ? beside[quad] : make_float4(0.f, 0.f, 0.f, 0.f);
  }
#if LAYER
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) sum += (v[i].x + v[i].y) + (v[i].z + v[i].w);
  const float mean = over_block(sum, sums) * (1.f / COLUMNS);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (i * THREADS + threadIdx.x < COLUMNS / 4)
      v[i] = make_float4(v[i].x - mean, v[i].y - mean, v[i].z - mean, v[i].w - mean);
  }
#endif
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) square = __fadd_rn(square, squares_of(v[i]));
  const float scale = rsqrtf(__fadd_rn(__fmul_rn(over_block(square, squares), 1.f / COLUMNS), eps));
  float4* const into = reinterpret_cast<float4*>((is_first ? out : out2) + to * step);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int quad = i * THREADS + threadIdx.x;
    float4 y = make_float4(v[i].x * scale * w[i].x, v[i].y * scale * w[i].y, v[i].z * scale * w[i].z,
                           v[i].w * scale * w[i].w);
    if (adds && quad < COLUMNS / 4) {
      if (!kEarly) b[i] = beside[quad];
      y = make_float4(summed(b[i].x, y.x, factor), summed(b[i].y, y.y, factor), summed(b[i].z, y.z, factor),
                      summed(b[i].w, y.w, factor));
    }
    if (quad < COLUMNS / 4) into[quad] = y;
    v[i] = y;
  }
#if INTO
  __shared__ float next_squares[kWarps];
  float all = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) all = __fadd_rn(all, squares_of(v[i]));
  float by = 1.f / power;
  by *= rsqrtf(over_block(all, next_squares) / COLUMNS + next_eps);
  if (threadIdx.x == 0) powers[to] = power;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = (i * THREADS + threadIdx.x) * 4;
    v[i] = make_float4(v[i].x * next[i].x, v[i].y * next[i].y, v[i].z * next[i].z, v[i].w * next[i].w);
    const uint2 packed = halves_of(v[i], by);
#if LAYOUT == 2
    if (column < kPadded) put_in_tall(blocks, pad, static_cast<int>(to), column, packed);
#else
    put_in_block(blocks, block_sums, pad, static_cast<int>(to), column, packed, column < kPadded);
#endif
  }
#endif
}
