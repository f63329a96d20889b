// The first launch of mamba2_chunk.cu: what the heads of a group share.
#pragma once

// c, the steps and what they scale, of one head's chunk, by a warp. powers: of B and of C, by row.
__device__ __forceinline__ void scalars_of(float* to, const float* dt, i64 dt_stride, float bias, float a, int count,
                                           const float (*powers)[CHUNK]) {
  constexpr int EACH = CHUNK / 32;
  const int lane = threadIdx.x % 32, first = lane * EACH;
  float step[EACH];
  double sums[EACH], sum = 0.0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {  // rows past the end forget nothing and add nothing
    step[i] = first + i < count ? softplus(dt[(first + i) * dt_stride] + bias) : 0.0f;
    sum += step[i] * a;
    sums[i] = sum;
  }
#pragma unroll
  for (int hop = 1; hop < 32; hop *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, sum, hop);
    if (lane >= hop) sum += other;
  }
  const double left = __shfl_up_sync(0xffffffffu, sum, 1), before = lane > 0 ? left : 0.0;
  const double last = before + sums[EACH - 1], all = __shfl_sync(0xffffffffu, last, 31);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int t = first + i;
    const double c = before + sums[i];
    const double log2 = c * 1.4426950408889634;
    const float high = static_cast<float>(log2), in = step[i] * powers[0][t];
    to[HIGH * CHUNK + t] = high;
    to[LOW * CHUNK + t] = static_cast<float>(log2 - high);
    to[SINCE * CHUNK + t] = expf(static_cast<float>(c));
    to[OVER * CHUNK + t] = powers[1][t];
    to[IN * CHUNK + t] = in;
    to[LEFT * CHUNK + t] = in * expf(static_cast<float>(all - c));
  }
}

// grid (GROUPS, chunks), GROUP_THREADS threads, 3 B_TILE bytes of shared memory. m [row, m_stride],
// dt [row, dt_stride]; conv [slot, TAPS - 1 + width, channel]: B and C of its first TAPS - 1 rows are replaced by the
// sequence's last of m. records [chunk, group, RECORD] (rows past the end are zeros) and scalars [chunk, head, SCALARS,
// CHUNK] are written.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 2)
    mamba2_chunk_group(const float* __restrict__ m, i64 m_stride, const float* __restrict__ dt, i64 dt_stride,
                       const float* __restrict__ a, const float* __restrict__ dt_bias,
                       const float* __restrict__ conv_w, const float* __restrict__ conv_b, float* conv, u8* records,
                       float* scalars, const int* seq_slot, const int* seq_start, const int* seq_fold,
                       const int* seq_keep, int n_slot, int width, int n_row, int chunked, int n_seq, int* fault) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ float powers[2][CHUNK];
  const Meta meta = {seq_slot, seq_start, seq_fold, seq_keep, n_slot, width, n_row, chunked};
  wait_for_predecessor();
  const Place place = find_chunk(meta, blockIdx.y, n_seq, fault);
  if (place.s >= 0) {
    const Seq seq = read_seq(meta, place.s, fault);
    constexpr int PART_WARPS = GROUP_THREADS / 64, SHARE = CHUNK / PART_WARPS;
    const int group = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp / PART_WARPS;
    const bool active = lane * 4 < N_STATE;
    const int column = active ? lane * 4 : 0, channel = INNER + part * WIDE + group * N_STATE + column;
    const int chunk = place.chunk * CHUNK, count = min(CHUNK, seq.n - chunk);
    const float* rows = m + seq.start * m_stride + channel;
    float* own = conv + static_cast<i64>(seq.slot) * (TAPS - 1 + width) * CHANNELS + channel;
    const float* window = own + static_cast<i64>(seq.fold) * CHANNELS;
    const Taps taps(conv_w + channel * TAPS);
    const float4 bias = quad(conv_b + channel);
    const i64 index = blockIdx.y;
    u8* record = records + (index * GROUPS + group) * RECORD;
    const int first = warp % PART_WARPS * SHARE;
    Raw<GROUP> raw, next;
    auto load = [&](Raw<GROUP>& to, int t) {
      const int here = max(0, min(GROUP, count - t));
      if (here > 0) {
        load_window(to, window, chunk + t);
        load_rows(to, rows, m_stride, chunk + t, here);
      }
      return here;
    };
    int here = load(raw, first), there = 0;
#pragma unroll 1
    for (int t = first; t < first + SHARE; t += GROUP, raw = next, here = there) {
      if (t + GROUP < first + SHARE) there = load(next, t + GROUP);  // under way while these are worked on
#pragma unroll
      for (int j = 0; j < GROUP; j++) {
        float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (j < here) y = taps(raw.x + j, bias);
        const float most = warp_max(fmaxf(fmaxf(fabsf(y.x), fabsf(y.y)), fmaxf(fabsf(y.z), fabsf(y.w))));
        const Power power = power_of(most);
        const Halves h01 = halves(y.x * power.over, y.y * power.over);
        const Halves h23 = halves(y.z * power.over, y.w * power.over);
        const uint2 high = make_uint2(h01.hi, h23.hi), low = make_uint2(h01.lo, h23.lo);
        const int at = part * 2 * B_TILE + (t + j) * B_ROW + column * 2;
        if (lane == 0) powers[part][t + j] = power.by;
        if (!active) continue;
        *reinterpret_cast<uint2*>(memory + at) = high;
        if (part == 0) *reinterpret_cast<uint2*>(memory + at + B_TILE) = low;
      }
    }
    __syncthreads();  // the old window is read, B and C are there
    if (place.chunk == 0 && warp % PART_WARPS < TAPS - 1 && active) {
      const int i = warp % PART_WARPS;
      quad(own + static_cast<i64>(i) * CHANNELS) = quad(rows + (seq.n - (TAPS - 1) + i) * m_stride);
    }
    for (int i = warp; i < HEADS / GROUPS; i += GROUP_THREADS / 32) {
      const int h = group * (HEADS / GROUPS) + i;
      scalars_of(scalars + (index * HEADS + h) * (SCALARS * CHUNK), dt + (seq.start + chunk) * dt_stride + h, dt_stride,
                 dt_bias[h], a[h], count, powers);
    }
    const u32 tiles = shared_address(memory);
    for (int i = warp; i < 3 * B_BLOCKS; i += GROUP_THREADS / 32) {  // B [row, state], C [state, row] as right operands
      const int which = i / B_BLOCKS, block = i % B_BLOCKS;
      if (which < 2) {
        const int row = block / STEPS * 16 + lane % 16, unit = block % STEPS * 2 + lane / 16;
        stored(record, i) = stored_of(matrices_turned(tiles + which * B_TILE + row * B_ROW + unit * 16));
      } else {
        const int row = block % TILES * 16 + lane / 16 * 8 + lane % 8, unit = block / TILES * 2 + lane / 8 % 2;
        stored(record, i) = stored_of(matrices(tiles + which * B_TILE + row * B_ROW + unit * 16));
      }
    }
    for (int i = warp; i < PAIRS; i += GROUP_THREADS / 32) {
      const int t = pair_block(i).t, u = pair_block(i).u;
      float sum[2][4] = {};
#pragma unroll
      for (int k = 0; k < STEPS; k++) {
        const Quad left = matrices(tiles + 2 * B_TILE + (t + lane % 16) * B_ROW + (2 * k + lane / 16) * 16);
        const u32 b_at = tiles + (u + lane / 16 * 8 + lane % 8) * B_ROW + (2 * k + lane / 8 % 2) * 16;
        const Quad hi = matrices(b_at), lo = matrices(b_at + B_TILE);
#pragma unroll
        for (int p = 0; p < 2; p++) {
          add_product(sum[p], left, hi.x[2 * p], hi.x[2 * p + 1]);
          add_product(sum[p], left, lo.x[2 * p], lo.x[2 * p + 1]);
        }
      }
      // rows t of sums are columns of the right operand that they become, in the same lanes
      stored(record + 3 * B_IMAGE, i) = make_uint4(f16_pair(sum[0][0], sum[0][1]), f16_pair(sum[1][0], sum[1][1]),
                                                   f16_pair(sum[0][2], sum[0][3]), f16_pair(sum[1][2], sum[1][3]));
    }
  }
  let_successor_start();
}
