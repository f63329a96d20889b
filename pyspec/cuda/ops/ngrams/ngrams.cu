// ngrams: rows of a table by n-grams of ids, and what they add to the streams. Meaning: ngrams/ref.py.
//
//   tokens, positions  [row]                      i64
//   row_seq            [row]                      int    -1: padding
//   seq_start, seq_slot  [seq + 1], [seq]         int
//   multipliers        [GRAM]                     u64
//   sizes, offsets     [HEADS]                    u64
//   places             [row, HEADS]               i64    written by ngrams_rows
//   ring_ids, ring_inputs  [slot, n_ring, 1], [slot, n_ring, STREAMS * COLUMNS]  f32
//   x, out             [row, STREAMS, COLUMNS]    f32
//   made               [row, (STREAMS + 1) * COLUMNS]  f32  rows lie `step` apart
//   value, inputs      [row, STREAMS, COLUMNS]    f32    between launches: values times gates, and what is convolved
//   taps               [STREAMS * COLUMNS, TAPS]  f32
//   fault              [5]                        int    see bounds.cuh
//
// ngrams_rows has a CTA for each row, ngrams_gate for each row and stream, ngrams_conv for each row and 1024 columns of all streams. A ring is
// read as it was before the batch: ngrams_keep, behind all others, writes it. A row's bits depend on its sequence alone.
// Macros: GRAM, HEADS, END, STREAMS, COLUMNS, TAPS, OP_ID.
#include "overlap.cuh"
#include "ring_rows.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, QUADS = COLUMNS / 4, WIDE = STREAMS * COLUMNS;
static_assert(COLUMNS % 4 == 0 && GRAM <= 32 && HEADS <= 512, "whole quads; a thread for each token and head");

__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.f, 1.f + expf(-x)); }
__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}
__device__ __forceinline__ float4 times(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }
__device__ __forceinline__ float4 times(float4 a, float b) { return make_float4(a.x * b, a.y * b, a.z * b, a.w * b); }

extern "C" __global__ void __launch_bounds__(THREADS)
ngrams_rows(const i64* tokens, const i64* positions, const int* row_seq, const int* seq_start, const int* seq_slot, const u64* multipliers,
            const u64* sizes, const u64* offsets, const float* ring_ids, i64* places, int* fault, int n_slot, int n_ring, int n_all) {
  __shared__ u64 ids[GRAM];
  let_successor_start();
  const int row = blockIdx.x, own = threadIdx.x;
  const Own o = own_of(row, n_all, n_slot, positions, row_seq, seq_start, seq_slot, fault);
  wait_for_predecessor();
  if (own < GRAM) {
    const i64 at = o.at - own;
    i64 id = END;
    if (o.seq >= 0 && at >= o.n_past) id = tokens[row - own];
    else if (o.seq >= 0 && at >= 0) id = static_cast<i64>(ring_ids[static_cast<i64>(o.slot) * n_ring + at % n_ring]);
    ids[own] = static_cast<u64>(id);
  }
  __syncthreads();
  for (int head = own; head < HEADS; head += THREADS) {
    const int n = head / (HEADS / (GRAM - 1)) + 2;
    u64 m = ids[0] * multipliers[0];
    bool ended = false;
    for (int j = 1; j < n; j++) {
      ended = ended || ids[j] == END;
      m ^= (ended ? static_cast<u64>(END) : ids[j]) * multipliers[j];
    }
    places[static_cast<i64>(row) * HEADS + head] = o.seq < 0 ? 0 : static_cast<i64>(m % sizes[head] + offsets[head]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
ngrams_gate(const float4* x, const float* made, const float4* of_key, const float4* of_query, const float4* of_input, float4* value,
            float4* inputs, i64 step, float eps) {
  __shared__ float of_warp[WARPS][4];
  let_successor_start();
  const int stream = blockIdx.y;
  const i64 at = (static_cast<i64>(blockIdx.x) * STREAMS + stream) * QUADS;
  const float4* key = reinterpret_cast<const float4*>(made + blockIdx.x * step) + stream * QUADS;
  const float4* own = reinterpret_cast<const float4*>(made + blockIdx.x * step) + STREAMS * QUADS;
  wait_for_predecessor();
  float sums[4] = {};  // squares of the key, of the query and of the value; the key times the query
  for (int quad = threadIdx.x; quad < QUADS; quad += THREADS) {
    const float4 k = key[quad], q = x[at + quad], v = own[quad];
    sums[0] = dot(k, k, sums[0]);
    sums[1] = dot(q, q, sums[1]);
    sums[2] = dot(v, v, sums[2]);
    sums[3] = dot(times(k, of_key[stream * QUADS + quad]), times(q, of_query[stream * QUADS + quad]), sums[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float sum = warp_sum(sums[i]);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32][i] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sums[i] = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sums[i] += of_warp[w][i];
  }
  const float by_key = __fdiv_rn(1.f, __fsqrt_rn(sums[0] / COLUMNS + eps)), by_query = __fdiv_rn(1.f, __fsqrt_rn(sums[1] / COLUMNS + eps));
  const float score = __fdiv_rn(sums[3] * by_key * by_query, __fsqrt_rn(static_cast<float>(COLUMNS)));
  const float size = __fsqrt_rn(fmaxf(fabsf(score), 1e-6f));
  const float gate = sigmoid(score > 0.f ? size : score < 0.f ? -size : score);  // NaN stays NaN
  const float by = __fdiv_rn(gate, __fsqrt_rn(gate * gate * (sums[2] / COLUMNS) + eps));
  for (int quad = threadIdx.x; quad < QUADS; quad += THREADS) {
    const float4 v = own[quad];
    value[at + quad] = times(v, gate);
    inputs[at + quad] = times(times(v, by), of_input[stream * QUADS + quad]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
ngrams_conv(const float4* x, const float4* value, const float4* inputs, const float* taps, const float4* ring_inputs, const i64* positions,
            const int* row_seq, const int* seq_start, const int* seq_slot, float4* out, int* fault, int n_slot, int n_ring, int n_all) {
  let_successor_start();
  const int row = blockIdx.x, quad = blockIdx.y * THREADS + threadIdx.x;
  const Own o = own_of(row, n_all, n_slot, positions, row_seq, seq_start, seq_slot, fault);
  wait_for_predecessor();
  if (quad >= WIDE / 4) return;
  const i64 at = static_cast<i64>(row) * (WIDE / 4) + quad;
  const float4 v = value[at], s = x[at];
  float sum[4] = {};
#pragma unroll
  for (int t = 0; t < TAPS; t++) {
    const int back = (TAPS - 1 - t) * GRAM;
    const i64 from = o.at - back;
    float4 u = make_float4(0.f, 0.f, 0.f, 0.f);
    if (o.seq >= 0 && from >= o.n_past) u = inputs[at - static_cast<i64>(back) * (WIDE / 4)];
    else if (o.seq >= 0 && from >= 0) u = ring_inputs[(static_cast<i64>(o.slot) * n_ring + from % n_ring) * (WIDE / 4) + quad];
    const float own[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int e = 0; e < 4; e++) sum[e] = fmaf(own[e], taps[(4 * quad + e) * TAPS + t], sum[e]);
  }
#pragma unroll
  for (int e = 0; e < 4; e++) sum[e] *= sigmoid(sum[e]);
  out[at] = make_float4(s.x + v.x + sum[0], s.y + v.y + sum[1], s.z + v.z + sum[2], s.w + v.w + sum[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
ngrams_keep(const i64* tokens, const float4* inputs, float* ring_ids, float4* ring_inputs, const i64* positions, const int* row_seq,
            const int* seq_start, const int* seq_slot, int* fault, int n_slot, int n_ring, int n_all) {
  let_successor_start();
  const int row = blockIdx.x;
  const Own o = own_of(row, n_all, n_slot, positions, row_seq, seq_start, seq_slot, fault);
  wait_for_predecessor();
  if (!stays(o, row, n_ring, 0)) return;
  const i64 to = static_cast<i64>(o.slot) * n_ring + o.at % n_ring;
  if (threadIdx.x == 0) ring_ids[to] = static_cast<float>(tokens[row]);
  for (int quad = threadIdx.x; quad < WIDE / 4; quad += THREADS)
    ring_inputs[to * (WIDE / 4) + quad] = inputs[static_cast<i64>(row) * (WIDE / 4) + quad];
}
