// attend_plain: the same attention without tensor cores, for what attend.cu is not built for (f32 keys, odd head sizes).
//
//   q            [row, n_head, dim]      f32
//   k, v         [pool row, n_kv, ...]   codes  see kv_kinds.cuh
//   k_scale, v_scale  [pool row, n_kv, ...]  f16  factors of kinds that have any
//   sinks        [n_head]                f32    with HAS_SINKS, as in attend.cu
//   page_table, positions, lo, hi, row_seq, fault: as in attend.cu; out [row, n_head, dim] f32
//
// Grid (row, head), block 128: each warp takes every fourth key, a lane every 32nd dim; the warps fold in order at the end.
// Bound by latency and by reading K and V once per row and head: right, not fast. Macros: DIM, K_KIND, V_KIND, HAS_SINKS, CAP, OP_ID.
#include "kv_types.cuh"
#include "bounds.cuh"
#include "attend_fold.cuh"

constexpr int PER_LANE = DIM / 32, WARPS = 4;

#if K_FACTORS
#define K_SCALES k_scale + from * (K_FACTORS * PER_LANE)
#else
#define K_SCALES nullptr
#endif
#if V_FACTORS
#define V_SCALES v_scale + from * (V_FACTORS * PER_LANE)
#else
#define V_SCALES nullptr
#endif
// A lane's value of block i of the head `from` of a pool.
#define WIDE(T, t, i) (load_block<T##_KIND, DIM>(t + from * n_code(T##_KIND, DIM), T##_SCALES, i, lane))

extern "C" __global__ void __launch_bounds__(128)
attend_plain(const float* q, const Codes<K_KIND>::Plane* k, const Codes<V_KIND>::Plane* v,
#if K_FACTORS
             const u16* k_scale,
#endif
#if V_FACTORS
             const u16* v_scale,
#endif
             const i64* page_table, const i64* positions, const i64* lo, const i64* hi, const int* row_seq,
#if HAS_SINKS
             const float* sinks,
#endif
             float* out, int* fault, int n_seq, int n_head, int n_kv, int n_page_col, int page_size, int n_page, int window,
             float scale) {
  __shared__ float part[WARPS][DIM], part_m[WARPS], part_l[WARPS];
  const int row = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 at = (static_cast<i64>(row) * n_head + head) * DIM;
  float m = none_seen(), l = 0.f, o[PER_LANE] = {}, query[PER_LANE];
  if (row_seq[row] >= 0) {
    const int seq = clamped(row_seq[row], n_seq, OP_ID, -1, fault);
    const Seen seen = seen_by(positions[row], lo[row], hi[row], window, n_page_col * page_size);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) query[i] = q[at + lane + 32 * i] * scale;
    for (int p = seen.lo + warp; p < seen.hi; p += WARPS) {
      const i64 page = page_table[static_cast<i64>(seq) * n_page_col + p / page_size];
      const int safe = clamped(page < 0 || page > 0x7fffffff ? -1 : static_cast<int>(page), n_page, OP_ID, seq, fault);
      const i64 from = (static_cast<i64>(safe) * page_size + p % page_size) * n_kv + head / (n_head / n_kv);
      float dot = 0.f;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) dot = fmaf(query[i], WIDE(K, k, i), dot);
      dot = warp_sum(dot);
      if constexpr (CAP > 0.f) dot = CAP * 1.44269504f * tanhf(dot * (1.f / (CAP * 1.44269504f)));  // log2(e)
      const Fold f = fold_of(m, dot);
      m = f.m;
      l = folded(l, 1.f, f);
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) o[i] = folded(o[i], WIDE(V, v, i), f);
    }
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) part[warp][lane + 32 * i] = o[i];
  if (lane == 0) part_m[warp] = m, part_l[warp] = l;
  __syncthreads();
  for (int d = threadIdx.x; d < DIM; d += 128) {
    float all_m = none_seen(), all_l = 0.f, sum = 0.f;
    for (int w = 0; w < WARPS; w++) {
      const Fold f = fold_of(all_m, part_m[w]);
      all_m = f.m;
      all_l = folded(all_l, part_l[w], f);
      sum = folded(sum, part[w][d], f);
    }
#if HAS_SINKS
    const Fold f = fold_of(all_m, sinks[head] * 1.44269504f);  // log2(e): sums count in log2
    all_l = folded(all_l, 1.f, f);
    sum = folded(sum, 0.f, f);
#endif
    out[at + d] = all_l > 0.f ? __fdiv_rn(sum, all_l) : 0.f;
  }
}
