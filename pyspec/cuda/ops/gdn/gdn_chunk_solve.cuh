// The second launch of gdn_chunk.cu: of every chunk what does not depend on the state.
#pragma once

// out = sign * left right for squares of SIZE in shared memory, by kThreads threads, thread `at` of them.
template <int SIZE, int kThreads>
__device__ __forceinline__ void square_product(const float* left, const float* right, float* out, float sign, int at) {
  constexpr int kColumns = SIZE / 4, kRows = SIZE * kColumns / kThreads;  // of float4, of a thread
  const int column = at % kColumns * 4, row = at / kColumns * kRows;
  float4 sum[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) sum[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
  for (int k = 0; k < SIZE; k += 4) {
    float4 l[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) l[r] = quad(left + (row + r) * kPad + k);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float4 x = quad(right + (k + i) * kPad + column);
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const float y = (&l[r].x)[i];
        sum[r] = make_float4(fmaf(y, x.x, sum[r].x), fmaf(y, x.y, sum[r].y), fmaf(y, x.z, sum[r].z),
                             fmaf(y, x.w, sum[r].w));
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    quad(out + (row + r) * kPad + column) =
        make_float4(sign * sum[r].x, sign * sum[r].y, sign * sum[r].z, sign * sum[r].w);
  }
}

// inverse = (1 + lower)^-1, both CHUNK x CHUNK with rows of kPad, `lower` strictly lower triangular. `inverse` must
// hold zeros above its diagonal blocks of 16; what lies above those of `lower` is overwritten.
__device__ __forceinline__ void invert(float* lower, float* inverse) {
  const int tid = threadIdx.x;
  if (tid < CHUNK) {  // a column of a diagonal block, by substitution
    const int first = tid / 16 * 16, column = tid % 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (int k = 0; k < i; k++) sum = fmaf(-lower[(first + i) * kPad + first + k], x[k], sum);
      x[i] = sum;
      inverse[(first + i) * kPad + first + column] = sum;
    }
  }
  __syncthreads();
  {  // (1, 0; L, 1)^-1 of blocks: the lower left is -D2^-1 L D1^-1
    const int first = tid / 64 * 32, corner = (first + 16) * kPad + first, spare = first * kPad + first + 16;
    square_product<16, 64>(lower + corner, inverse + first * kPad + first, lower + spare, 1.0f, tid % 64);
    __syncthreads();
    square_product<16, 64>(inverse + (first + 16) * (kPad + 1), lower + spare, inverse + corner, -1.0f, tid % 64);
  }
  __syncthreads();
  square_product<32, THREADS>(lower + 32 * kPad, inverse, lower + 32, 1.0f, tid);
  __syncthreads();
  square_product<32, THREADS>(inverse + 32 * (kPad + 1), lower + 32, inverse + 32 * kPad, -1.0f, tid);
  __syncthreads();
}

// grid (N_V, chunks), 128 threads, 3 kKeys bytes of shared memory. records [chunk, v_head, kRecord] written; squares
// [row t, row u] with swizzled units, but not their 16 x 16 blocks above the diagonal.
extern "C" __global__ void __launch_bounds__(THREADS)
    gdn_chunk_solve(const u16* q, const u16* k_hi, const u16* k_lo, const float* g, const float* b, u8* records,
                    const int* seq_slot, const int* seq_start, const int* seq_fold, const int* seq_keep, int n_slot,
                    int width, int n_row, int chunked, int n_seq, int* fault) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(16) float sums[CHUNK], strength[CHUNK];
  const Meta meta = {seq_slot, seq_start, seq_fold, seq_keep, n_slot, width, n_row, chunked};
  const Place place = find_chunk(meta, blockIdx.y, n_seq, fault);
  wait_for_predecessor();
  if (place.s >= 0) {
    const Seq seq = read_seq(meta, place.s, fault);
    const int h = blockIdx.x, tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int first = place.chunk * CHUNK, count = min(CHUNK, seq.n - first);
    const i64 row = seq.start + first;
    u8* record = records + (static_cast<i64>(blockIdx.y) * N_V + h) * kRecord;
    const i64 keys = row * KD + KEY_HEAD(h) * DIM;
    const u32 hi = shared_address(memory), lo = hi + kKeys, queries = lo + kKeys;
    copy_keys(hi, k_hi + keys, count);
    copy_keys(lo, k_lo + keys, count);
    copy_keys(queries, q + keys, count);
    copies_commit();
    if (warp == 0) {  // running sums of log decays; rows past the end decay nothing
      const int t = lane * 2;
      const float g0 = t < count ? g[(row + t) * N_V + h] : 0.0f;
      const float g1 = t + 1 < count ? g[(row + t + 1) * N_V + h] : 0.0f;
      float sum = g0 + g1;
#pragma unroll
      for (int hop = 1; hop < 32; hop *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, sum, hop);
        if (lane >= hop) sum += other;
      }
      const float left = __shfl_up_sync(0xffffffffu, sum, 1), before = (lane > 0 ? left : 0.0f) + g0;
      sum = before + g1;
      const float last = __shfl_sync(0xffffffffu, sum, 31);
      sums[t] = before, sums[t + 1] = sum;
      float2* decays = reinterpret_cast<float2*>(record + 3 * kSquare);
      decays[lane] = make_float2(expf(before), expf(sum));
      decays[lane + CHUNK / 2] = make_float2(expf(last - before), expf(last - sum));
    } else if (tid < 32 + CHUNK) {
      const int t = tid - 32;
      strength[t] = t < count ? b[(row + t) * N_V + h] : 0.0f;
    }
    copies_wait<0>();
    __syncthreads();

    // k k^T and q k^T: a warp's 16 rows by the columns up to its diagonal block
    float kk[8][4] = {}, qk[8][4] = {};
    const int rows = warp * 16;
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
      const u32 a_at = swizzled<kRow>(rows + lane % 16, 2 * i + lane / 16);
      const Quad a_hi = matrices(hi + a_at), a_lo = matrices(lo + a_at), a_q = matrices(queries + a_at);
#pragma unroll
      for (int u = 0; u < 4; u++) {
        if (u > warp) break;
        const u32 b_at = swizzled<kRow>(u * 16 + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2);
        const Quad b_hi = matrices(hi + b_at), b_lo = matrices(lo + b_at);
#pragma unroll
        for (int p = 0; p < 2; p++) {
          add_product(kk[2 * u + p], a_hi, b_hi.x[2 * p], b_hi.x[2 * p + 1]);
          add_product(qk[2 * u + p], a_q, b_hi.x[2 * p], b_hi.x[2 * p + 1]);
          add_product(kk[2 * u + p], a_hi, b_lo.x[2 * p], b_lo.x[2 * p + 1]);
          add_product(kk[2 * u + p], a_lo, b_hi.x[2 * p], b_hi.x[2 * p + 1]);
        }
      }
    }
    __syncthreads();  // keys are read: squares take their place
    float *lower = reinterpret_cast<float*>(memory), *inverse = lower + CHUNK * kPad;
    for (int i = tid; i < CHUNK * kPad / 4; i += THREADS) quad(inverse + i * 4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int n = 0; n < 8; n++) {
      if (n > 2 * warp + 1) break;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int t = rows + lane / 4 + r * 8, u = n * 8 + lane % 4 * 2;
        const float c = sums[t], by = strength[t];
        const float d0 = u <= t ? __expf(c - sums[u]) : 0.0f, d1 = u + 1 <= t ? __expf(c - sums[u + 1]) : 0.0f;
        *reinterpret_cast<float2*>(lower + t * kPad + u) = make_float2(
            u < t ? by * kk[n][2 * r] * d0 : 0.0f, u + 1 < t ? by * kk[n][2 * r + 1] * d1 : 0.0f);
        *reinterpret_cast<u32*>(record + 2 * kSquare + swizzled<CHUNK * 2>(t, n) + lane % 4 * 4) =
            f16_pair(qk[n][2 * r] * d0, qk[n][2 * r + 1] * d1);
      }
    }
    __syncthreads();
    invert(lower, inverse);
    for (int i = tid; i < CHUNK * 8; i += THREADS) {
      const int t = i / 8, unit = i % 8;
      if (unit / 2 > t / 16) continue;
      const float4 x = quad(inverse + t * kPad + unit * 8), y = quad(inverse + t * kPad + unit * 8 + 4);
      const float4 bx = quad(strength + unit * 8), by = quad(strength + unit * 8 + 4);
      const Halves p0 = halves(x.x * bx.x, x.y * bx.y), p1 = halves(x.z * bx.z, x.w * bx.w);
      const Halves p2 = halves(y.x * by.x, y.y * by.y), p3 = halves(y.z * by.z, y.w * by.w);
      u8* to = record + swizzled<CHUNK * 2>(t, unit);
      *reinterpret_cast<uint4*>(to) = make_uint4(p0.hi, p1.hi, p2.hi, p3.hi);
      *reinterpret_cast<uint4*>(to + kSquare) = make_uint4(p0.lo, p1.lo, p2.lo, p3.lo);
    }
  }
  let_successor_start();
}
