// rope_tail: heads of rows, normed if asked for, the last dims of each turned in adjacent pairs by the row's position.
//
//   x          [row, n_head, DIM]  f32   rows lie `step` apart
//   weight     [DIM]               f32   null: the norm has none
//   positions  [row]               int64
//   freq       [N_ROT / 2]         f64
//   out        [row, n_head, DIM]  f32
//
// Grid (row, n_head / WARPS), a warp for each head; the row's angles once for a CTA, while its heads are on their way.
// Macros: DIM, N_ROT, NORMED.
#include "turns.cuh"
#include "overlap.cuh"

constexpr int WARPS = 8, QUADS = DIM / 4, EACH = (QUADS + 31) / 32;
static_assert(DIM % 4 == 0 && N_ROT % 2 == 0 && N_ROT <= DIM, "pairs of dims, four to a lane");

extern "C" __global__ void __launch_bounds__(32 * WARPS)
rope_tail(const float* x, const float* weight, const i64* positions, const double* freq, float* out, i64 step, int n_head, float eps,
          float sign) {
  let_successor_start();
  __shared__ float2 angles[N_ROT / 2];
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y * WARPS + warp;
  for (int i = threadIdx.x; i < N_ROT / 2; i += 32 * WARPS) {
    const float2 c = turn_of(static_cast<double>(positions[row]), freq[i]);
    angles[i] = make_float2(c.x, sign * c.y);
  }
  __syncthreads();
  wait_for_predecessor();  // positions and frequencies were there before
  if (head >= n_head) return;
  const float* const from = x + row * step + head * DIM;
  float* const to = out + (static_cast<i64>(row) * n_head + head) * DIM;
  float4 y[EACH];
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int quad = lane + 32 * i;
    y[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (quad < QUADS) y[i] = reinterpret_cast<const float4*>(from)[quad];
    square += (y[i].x * y[i].x + y[i].y * y[i].y) + (y[i].z * y[i].z + y[i].w * y[i].w);
  }
  const float by = NORMED ? __fdiv_rn(1.f, __fsqrt_rn(warp_sum(square) / DIM + eps)) : 1.f;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int quad = lane + 32 * i, dim = 4 * quad;
    if (quad >= QUADS) break;
    float4 z = y[i];
    if (NORMED) {
      z = make_float4(z.x * by, z.y * by, z.z * by, z.w * by);
      if (weight != nullptr) {
        const float4 w = reinterpret_cast<const float4*>(weight)[quad];
        z = make_float4(z.x * w.x, z.y * w.y, z.z * w.z, z.w * w.w);
      }
    }
    if (dim >= DIM - N_ROT) {
      const float2 a = turned(z.x, z.y, angles[(dim - (DIM - N_ROT)) / 2]);
      z.x = a.x, z.y = a.y;
    }
    if (dim + 2 >= DIM - N_ROT) {
      const float2 a = turned(z.z, z.w, angles[(dim + 2 - (DIM - N_ROT)) / 2]);
      z.z = a.x, z.w = a.y;
    }
    reinterpret_cast<float4*>(to)[quad] = z;
  }
}
