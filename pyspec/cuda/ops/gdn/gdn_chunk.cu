// Gated DeltaNet over long kept sequences (prompts), 64 rows at a time on tensor cores, in three launches a layer. The
// meaning is gdn_ref.py's `chunked`; here for one value head, with S [value, key] before the chunk, rows t of it, c the
// running sum of log decays, and T the inverse of the unit lower triangle 1 + b_t k_t.k_u e^(c_t - c_u), u < t:
//
//   new_t = sum_u T_tu b_u (v_u - e^(c_u) S k_u)         what row t writes to the state
//   o_t   = e^(c_t) S q_t + sum_u P_tu new_u             P_tu = q_t.k_u e^(c_t - c_u), u <= t
//   S     <- e^(c_last) S + sum_t e^(c_last - c_t) new_t k_t^T
//
// gdn_chunk_conv   one block per (128 channels, chunk): conv, silu, l2 norm; gates; windows and fold records.
// gdn_chunk_solve  one block per (value head, chunk): T b, P and the decays, which do not depend on S.
// gdn_chunk_state  one block per (value head, 64 values, sequence), chunk after chunk. A warp keeps 16 values by all
//                  keys of S in the accumulators of its products: what one product leaves in registers is the left
//                  operand of the next, so warps share only what they read. Results lie [value, row] for that reason.
//
// Precision: the state stays f32. Left and right operands of products that reach the state are split into two f16 (22
// bits) and multiplied in three passes, values and states over a power of two of their own row, so that a state is
// within 3e-5 of the sequential one. Products that only reach an output (S q, P new) are one pass of f16: 5e-4.
//
// Chunks start at a sequence's first row of the forward: results depend on how a prompt is cut, not on neighbours.
#include "gdn.cuh"

#ifndef KEY_STAGES
#define KEY_STAGES 2  // of keys in shared memory; 1 where a block gets less than 104 KiB
#endif
#define CHUNK 64
#define TAPS 4
#define THREADS 128
#define GROUP 4        // rows of a warp between loads in gdn_chunk_conv
#define MIN_LOG -100.0f  // less is nothing: e^-100 of an f32
#include "chunk.cuh"

constexpr int kRow = DIM * 2;                  // bytes of a row of f16 keys or queries
constexpr int kSquare = CHUNK * CHUNK * 2;     // bytes of CHUNK x CHUNK f16
constexpr int kKeys = CHUNK * kRow;            // bytes of a chunk of f16 keys
// Of a chunk and value head: T b hi, T b lo, P, e^c, e^(c_last - c).
constexpr int kRecord = 3 * kSquare + 2 * CHUNK * 4;
constexpr int kPad = CHUNK + 4;                // floats of a row of a square in shared memory
constexpr int kCopyUnroll = KEY_STAGES > 1 ? 4 : 2;  // neither spills

// A 16-byte unit of a row in shared memory, moved so that 8 rows' units of one column lie in 8 different banks.
template <int kBytes>
__device__ __forceinline__ u32 swizzled(int row, int unit) {
  return row * kBytes + ((unit ^ (row & 7)) << 4);
}

// ---- gdn_chunk_conv -------------------------------------------------------------------------------------------------

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

struct Window {  // raw inputs of a lane's 4 channels: TAPS - 1 rows and the GROUP rows after them
  float4 x[GROUP + TAPS - 1];
};

__device__ __forceinline__ float4 convolved(const float4* x, const float4 (&w)[4]) {
  float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float *w0 = &w[0].x, *w1 = &w[1].x, *w2 = &w[2].x, *w3 = &w[3].x;
#pragma unroll
  for (int i = 0; i < TAPS; i++) {
    y = make_float4(fmaf(x[i].x, w0[i], y.x), fmaf(x[i].y, w1[i], y.y), fmaf(x[i].z, w2[i], y.z),
                    fmaf(x[i].w, w3[i], y.w));
  }
  return make_float4(silu(y.x), silu(y.y), silu(y.z), silu(y.w));
}

// grid (CHANNELS / DIM, chunks), 128 threads: heads of q, of k, of v. m [row, m_stride], alpha beta [row, their stride];
// conv [slot, TAPS - 1 + width, channel]: its first TAPS - 1 rows are replaced by the sequence's last rows of m.
// Gates of accepted records go to fold_* (see gdn_conv); their keys and values are read where they are.
extern "C" __global__ void __launch_bounds__(THREADS)
    gdn_chunk_conv(const float* __restrict__ m, i64 m_stride, const float* __restrict__ alpha, i64 alpha_stride,
                   const float* __restrict__ beta, i64 beta_stride, const float* __restrict__ a,
                   const float* __restrict__ dt_bias, const float* __restrict__ conv_w, float* conv,
                   const float* rec_g, const float* rec_b, float* fold_e, float* fold_b, u16* q, u16* k_hi, u16* k_lo, float* v, float* g,
                   float* b, const int* seq_slot, const int* seq_start, const int* seq_fold, const int* seq_keep,
                   int n_slot, int width, int n_row, int chunked, int n_seq, float eps, int* fault) {
  const Meta meta = {seq_slot, seq_start, seq_fold, seq_keep, n_slot, width, n_row, chunked};
  const Place place = find_chunk(meta, blockIdx.y, n_seq, fault);
  if (place.s >= 0) {
    const Seq seq = read_seq(meta, place.s, fault);
    const int part = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int channel = part * DIM + lane * 4, head = part - 2 * N_K;
    const float* rows = m + seq.start * m_stride + channel;
    float* old = conv + static_cast<i64>(seq.slot) * (TAPS - 1 + width) * CHANNELS + channel;
    const int chunk_end = min(seq.n, (place.chunk + 1) * CHUNK), share = CHUNK / (THREADS / 32);
    int t = place.chunk * CHUNK + warp * share;
    const int end = min(chunk_end, t + share);
    auto load = [&](Window& to, int from, int row) {  // to.x[from] is row `row`
#pragma unroll
      for (int i = 0; i < GROUP + TAPS - 1; i++) {
        if (i < from) continue;
        const int r = row + i - from;
        if (r < 0) {
          to.x[i] = quad(static_cast<const float*>(old) + static_cast<i64>(seq.fold + TAPS - 1 + r) * CHANNELS);
        } else if (r < end) {
          to.x[i] = quad(rows + r * m_stride);
        }
      }
    };
    Window x;
    if (t < end) load(x, 0, t - (TAPS - 1));
    float4 w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = quad(conv_w + (channel + i) * TAPS);
    if (place.chunk == 0) {
      const i64 record = static_cast<i64>(seq.slot) * width, fold = static_cast<i64>(place.s) * width;
      __syncthreads();  // the old window is read
      if (warp < TAPS - 1) {
        quad(old + static_cast<i64>(warp) * CHANNELS) = quad(rows + (seq.n - (TAPS - 1) + warp) * m_stride);
      }
      for (int i = threadIdx.x; head >= 0 && i < seq.fold; i += THREADS) {
        fold_e[(fold + i) * N_V + head] = expf(rec_g[(record + i) * N_V + head]);
        fold_b[(fold + i) * N_V + head] = rec_b[(record + i) * N_V + head];
      }
    }
    if (head >= 0 && t + lane < end) {
      const i64 row = seq.start + t + lane;
      g[row * N_V + head] = fmaxf(a[head] * softplus(alpha[row * alpha_stride + head] + dt_bias[head]), MIN_LOG);
      b[row * N_V + head] = sigmoid(beta[row * beta_stride + head]);
    }
    for (; t < end; t += GROUP) {
      Window next;
#pragma unroll
      for (int i = 0; i < TAPS - 1; i++) next.x[i] = x.x[GROUP + i];
      load(next, TAPS - 1, t + GROUP);
      float4 y[GROUP];
      float scale[GROUP];
#pragma unroll
      for (int j = 0; j < GROUP; j++) y[j] = convolved(x.x + j, w);
      if (head < 0) {
#pragma unroll
        for (int j = 0; j < GROUP; j++) {
          scale[j] = fmaf(y[j].x, y[j].x, y[j].y * y[j].y) + fmaf(y[j].z, y[j].z, y[j].w * y[j].w);
        }
#pragma unroll
        for (int j = 0; j < GROUP; j++) scale[j] = rsqrtf(warp_sum(scale[j]) + eps);
      }
#pragma unroll
      for (int j = 0; j < GROUP; j++) {
        if (t + j >= end) break;
        const i64 row = seq.start + t + j;
        if (head >= 0) {
          quad(v + row * VD + channel - 2 * KD) = y[j];
          continue;
        }
        const Halves h01 = halves(y[j].x * scale[j], y[j].y * scale[j]);
        const Halves h23 = halves(y[j].z * scale[j], y[j].w * scale[j]);
        if (part < N_K) {
          *reinterpret_cast<uint2*>(q + row * KD + channel) = make_uint2(h01.hi, h23.hi);
        } else {
          *reinterpret_cast<uint2*>(k_hi + row * KD + channel - KD) = make_uint2(h01.hi, h23.hi);
          *reinterpret_cast<uint2*>(k_lo + row * KD + channel - KD) = make_uint2(h01.lo, h23.lo);
        }
      }
      x = next;
    }
  }
  let_successor_start();
}

// A chunk of f16 keys or queries; rows past `count` become zeros.
__device__ __forceinline__ void copy_keys(u32 to, const u16* from, int count) {
  const int unit = threadIdx.x % 16;
#pragma unroll kCopyUnroll
  for (int t = threadIdx.x / 16; t < CHUNK; t += THREADS / 16) {
    copy16_or_zero(to + swizzled<kRow>(t, unit), from + static_cast<i64>(t < count ? t : 0) * KD + unit * 8, t < count);
  }
}

#include "gdn_chunk_solve.cuh"

// ---- gdn_chunk_state ------------------------------------------------------------------------------------------------

struct Shared {  // offsets
  static constexpr int kQueries = KEY_STAGES * 2 * kKeys, kRecords = kQueries + kKeys, kBytes = kRecords + kRecord;
};

// Of a chunk's record, what is written: a square's blocks up to the diagonal.
__device__ __forceinline__ void copy_record(u32 to, const u8* from) {
  for (int i = threadIdx.x; i < 3 * CHUNK * 8; i += THREADS) {
    const int t = i / 8 % CHUNK, unit = (i % 8) ^ (t & 7);
    if (unit / 2 <= t / 16) copy16(to + i * 16, from + i * 16);
  }
  if (threadIdx.x < CHUNK / 2) copy16(to + 3 * kSquare + threadIdx.x * 16, from + 3 * kSquare + threadIdx.x * 16);
}

// grid (N_V, DIM / 64, sequences), 128 threads, Shared::kBytes of shared memory. state [slot, v_head, value, key] in
// place, out [row, v_head, value] written.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    gdn_chunk_state(float* state, const u16* q, const u16* k_hi, const u16* k_lo, const float* v, const u8* records,
                    float* out, const int* seq_slot, const int* seq_start, const int* seq_fold, const int* seq_keep,
                    int n_slot, int width, int n_row, int chunked, int n_seq, int n_chunk, int* fault) {
  extern __shared__ __align__(128) u8 memory[];
  const int h = blockIdx.x, s = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Meta meta = {seq_slot, seq_start, seq_fold, seq_keep, n_slot, width, n_row, chunked};
  const Seq seq = read_seq(meta, s, fault);
  const int n = seq.chunked ? (seq.n + CHUNK - 1) / CHUNK : 0, first = chunks_before(meta, s, n_seq, fault);
  if (n == 0 || first + n > n_chunk) {  // more chunks than there is room for: no batch of ours
    wait_for_predecessor();
    return;
  }
  const int value = blockIdx.y * 64 + warp * 16 + lane / 4, pair = lane % 4 * 2;
  float* own = state + ((static_cast<i64>(seq.slot) * N_V + h) * DIM + value) * DIM + pair;
  const i64 keys = static_cast<i64>(seq.start) * KD + KEY_HEAD(h) * DIM;
  const i64 at = static_cast<i64>(seq.start) * VD + h * DIM + value;
  const u8* record = records + (static_cast<i64>(first) * N_V + h) * kRecord;
  const u32 base = shared_address(memory), squares = base + Shared::kRecords, queries = base + Shared::kQueries;
  const float* decays = reinterpret_cast<const float*>(memory + Shared::kRecords + 3 * kSquare);
  auto copy_chunk_keys = [&](int c) {
    if (c < n) {
      const u32 to = base + c % KEY_STAGES * (2 * kKeys);
      copy_keys(to, k_hi + keys + static_cast<i64>(c) * CHUNK * KD, seq.n - c * CHUNK);
      copy_keys(to + kKeys, k_lo + keys + static_cast<i64>(c) * CHUNK * KD, seq.n - c * CHUNK);
    }
    copies_commit();
  };
  auto copy_queries = [&](int c) {
    if (c < n) copy_keys(queries, q + keys + static_cast<i64>(c) * CHUNK * KD, seq.n - c * CHUNK);
    copies_commit();
  };
  auto copy_squares = [&](int c) {
    if (c < n) copy_record(squares, record + static_cast<i64>(c) * N_V * kRecord);
    copies_commit();
  };

  Tiles<DIM / 8> S;
#pragma unroll
  for (int i = 0; i < DIM / 8; i++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float2 x = *reinterpret_cast<const float2*>(own + r * 8 * DIM + i * 8);
      S.x[i][2 * r] = x.x, S.x[i][2 * r + 1] = x.y;
    }
  }
  wait_for_predecessor();
  copy_chunk_keys(0);
  copy_queries(0);
  copy_squares(0);
  // lane's place in four 8 x 8 matrices that make two right operands
  const int b_row = lane / 16 * 8 + lane % 8, b_unit = lane / 8 % 2;

#pragma unroll 1
  for (int c = 0; c < n; c++) {
    const int count = seq.n - c * CHUNK;
    const u32 hi = base + c % KEY_STAGES * (2 * kKeys), lo = hi + kKeys;
    Tiles<8> rhs, o;
    {  // S k and S q
      Tiles<8> values;
      const float* from = v + at + static_cast<i64>(c) * CHUNK * VD;
#pragma unroll
      for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int t = j * 8 + pair + i % 2;
          values.x[j][i] = t < count ? from[static_cast<i64>(t) * VD + i / 2 * 8] : 0.0f;
        }
      }
      const Scale scale = scale_of(S);
#pragma unroll
      for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) rhs.x[j][i] = o.x[j][i] = 0.0f;
      }
      if (KEY_STAGES > 1 || c == 0) {
        copies_wait<1>();  // all but the squares
      } else {
        copies_wait<0>();
      }
      __syncthreads();
      if (KEY_STAGES > 1) copy_chunk_keys(c + 1);
#pragma unroll
      for (int k = 0; k < DIM / 16; k++) {
        const Operand a = operand(S, k, scale);
#pragma unroll
        for (int u = 0; u < 4; u++) {
          const u32 b_at = swizzled<kRow>(u * 16 + b_row, 2 * k + b_unit);
          const Quad k_hi4 = matrices(hi + b_at), k_lo4 = matrices(lo + b_at), q4 = matrices(queries + b_at);
          add_product3(*reinterpret_cast<float(*)[2][4]>(&rhs.x[2 * u]), a, k_hi4, k_lo4);
          add_product(o.x[2 * u], a.hi, q4.x[0], q4.x[1]);
          add_product(o.x[2 * u + 1], a.hi, q4.x[2], q4.x[3]);
        }
      }
      if (KEY_STAGES > 1) {
        copies_wait<1>();  // the squares; the next keys may be under way
      } else {
        copies_wait<0>();
      }
      __syncthreads();
      copy_queries(c + 1);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float2 grow = *reinterpret_cast<const float2*>(decays + j * 8 + pair);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float by = (i % 2 ? grow.y : grow.x) * scale.by[i / 2];
          rhs.x[j][i] = fmaf(-by, rhs.x[j][i], values.x[j][i]);
          o.x[j][i] *= by;
        }
      }
    }
    Tiles<8> fresh;  // new
    {
      const Scale scale = scale_of(rhs);
#pragma unroll
      for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) fresh.x[j][i] = 0.0f;
      }
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const Operand a = operand(rhs, k, scale);
#pragma unroll
        for (int u = k; u < 4; u++) {
          const u32 b_at = squares + swizzled<CHUNK * 2>(u * 16 + b_row, 2 * k + b_unit);
          const Quad t_hi = matrices(b_at), t_lo = matrices(b_at + kSquare);
          add_product3(*reinterpret_cast<float(*)[2][4]>(&fresh.x[2 * u]), a, t_hi, t_lo);
        }
      }
#pragma unroll
      for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) fresh.x[j][i] *= scale.by[i / 2];
      }
    }
    const Scale scale = scale_of(fresh);
    {
      Tiles<8> more;
#pragma unroll
      for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) more.x[j][i] = 0.0f;
      }
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const Quad a = operand(fresh, k, scale).hi;
#pragma unroll
        for (int u = k; u < 4; u++) {
          const Quad p4 = matrices(squares + 2 * kSquare + swizzled<CHUNK * 2>(u * 16 + b_row, 2 * k + b_unit));
          add_product(more.x[2 * u], a, p4.x[0], p4.x[1]);
          add_product(more.x[2 * u + 1], a, p4.x[2], p4.x[3]);
        }
      }
      float* to = out + at + static_cast<i64>(c) * CHUNK * VD;
#pragma unroll
      for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int t = j * 8 + pair + i % 2;
          const float x = fmaf(scale.by[i / 2], more.x[j][i], o.x[j][i]) * 0.08838834764831845f;  // DIM ** -0.5
          if (t < count) to[static_cast<i64>(t) * VD + i / 2 * 8] = x;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float2 left = *reinterpret_cast<const float2*>(decays + CHUNK + j * 8 + pair);
#pragma unroll
      for (int i = 0; i < 4; i++) fresh.x[j][i] *= i % 2 ? left.y : left.x;
    }
    const float last = decays[CHUNK - 1];
    __syncthreads();  // the squares are read
    copy_squares(c + 1);
    Operand a[4];
#pragma unroll
    for (int k = 0; k < 4; k++) a[k] = operand(fresh, k, scale);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum[8][4] = {};
#pragma unroll
      for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int u = 0; u < 4; u++) {
          const u32 b_at = swizzled<kRow>(k * 16 + b_unit * 8 + lane % 8, half * 8 + u * 2 + lane / 16);
          const Quad k_hi4 = matrices_turned(hi + b_at), k_lo4 = matrices_turned(lo + b_at);
          add_product3(*reinterpret_cast<float(*)[2][4]>(&sum[2 * u]), a[k], k_hi4, k_lo4);
        }
      }
#pragma unroll
      for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& x = S.x[half * 8 + j][i];
          x = fmaf(scale.by[i / 2], sum[j][i], last * x);
        }
      }
    }
    if (KEY_STAGES == 1) {
      __syncthreads();  // the keys are read
      copy_chunk_keys(c + 1);
    }
  }
#pragma unroll
  for (int i = 0; i < DIM / 8; i++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      *reinterpret_cast<float2*>(own + r * 8 * DIM + i * 8) = make_float2(S.x[i][2 * r], S.x[i][2 * r + 1]);
    }
  }
}
