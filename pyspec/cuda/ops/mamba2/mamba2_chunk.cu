// Mamba-2 over long kept sequences (prompts), CHUNK rows at a time on tensor cores, in two launches a layer. Meaning:
// mamba2_ref.py's `chunked`; here for one head, with S [head_dim, state] before the chunk, rows t of it, g the step and
// c the running sum of log decays:
//
//   o_t = e^(c_t) S C_t + sum_u P_tu g_u x_u + d x_t     P_tu = C_t.B_u e^(c_t - c_u), u <= t
//   S   <- e^(c_last) S + sum_t e^(c_last - c_t) g_t x_t B_t^T
//
// mamba2_chunk_group  one block per (group, chunk): conv and silu of B and C as f16, C.B of all pairs, once for the
//                     heads that share them; steps and sums of log decays of these heads; the window of B and C.
// mamba2_chunk_state  one block per (head, SLICE rows of S, sequence), chunk after chunk. Half of its warps keep S, 16
//                     rows by all columns, in the accumulators of their products, and make P; the others make rows:
//                     conv and silu of x, outputs. While S takes in chunk i, the rows of chunk i go out and x of chunk
//                     i + 1 is made. x is read raw and once; S passes as left operands, f16 in the order of registers.
//
// Chunks follow each other though what each adds to S depends on no other: made all at once, the S of every chunk and
// head (32 KiB) goes out, through a sum, and back in, three times the bytes of x and outputs. 128 heads of 64 fill 132
// multiprocessors as they are; 64 heads alone do in blocks of 32 rows, which the launcher takes for one prompt.
//
// Floor, 128 heads of 64, state 128, 8 groups, a row and layer: 72 KiB of raw rows and outputs (17 ns at 4.3 TB/s) and
// 9.2 MFLOP (15 ns as mma.sync does them; 16 rows of S take 192 products m16n8k16 a chunk of 64, outputs 84). Every
// head reads its group's 53 KiB a chunk anew from L2: 181 KiB a row with the rest (34 ns at 5.5 TB/s), the nearest
// bound. Two heads' blocks that share these copies (a cluster) would halve that.
//
// Precision: the state stays f32. What reaches it is split into two f16 (22 bits) and multiplied in three passes: 1e-6
// off the sequential one at most. What only reaches an output (C.B, P x, S C) is f16: 3e-4. Every f16 lies over a power
// of two: of its row for B, C and S, of its column over the chunk for x; B's power goes with x, C's with the output, so
// no size of raw rows leaves f16's range. Log decays are summed in f64 and kept as two f32: only their differences
// count, and one token that forgets everything would take their digits.
//
// Chunks start at a sequence's first row of the forward: results depend on how a prompt is cut, not on neighbours.
#ifndef HEADS
#define HEADS 128    // heads
#define DIM 64       // of a head: 32, 64 or 128
#define GROUPS 8     // of heads that share B and C
#define N_STATE 128  // a multiple of 32 up to 128
#endif
#ifndef CHUNK
#define CHUNK 64  // rows: 32 or 64
#define SLICE 64  // rows of S of a block: 32 or 64
#endif
#define TAPS 4
#define OP_MAMBA2 7  // this op's number in fault records

constexpr int INNER = HEADS * DIM, WIDE = GROUPS * N_STATE, CHANNELS = INNER + 2 * WIDE;
constexpr int GROUP = 4;                    // rows of a warp of mamba2_chunk_group at a time
constexpr int GROUP_THREADS = 256;          // half of them for B, half for C
constexpr int KEEPERS = SLICE * 2;          // threads that keep S, a warp to 16 rows; as many make rows
constexpr int THREADS = 2 * KEEPERS;
constexpr int TILES = CHUNK / 16;           // of rows
constexpr int STEPS = N_STATE / 16;         // of columns of S, as products take them
constexpr int PAIRS = TILES * (TILES + 1) / 2;  // blocks of 16 rows t by 16 rows u <= t
constexpr int X_ROW = SLICE + 4;            // floats of a raw row of x
// Bytes of a row of B or C in mamba2_chunk_group: an odd number of 16, so that 8 rows' units of one column lie in 8
// different banks.
constexpr int B_ROW = N_STATE * 2 + 16, B_TILE = CHUNK * B_ROW;
// Operands in memory lie in blocks of 16 x 16 in the order of registers, a lane's 16 bytes beside its neighbours'. Of a
// group's chunk: B hi, B lo, C, pairs.
constexpr int BLOCK = 512, B_BLOCKS = TILES * STEPS, B_IMAGE = B_BLOCKS * BLOCK, P_IMAGE = PAIRS * BLOCK;
constexpr int RECORD = 3 * B_IMAGE + P_IMAGE;
// Of a row and head: log2 of e^c in two parts, e^c, the power of C, step times that of B, that times e^(c_last - c).
enum Scalar { HIGH, LOW, SINCE, OVER, IN, LEFT, SCALARS };
static_assert(DIM % SLICE == 0 && N_STATE % 32 == 0 && HEADS % GROUPS == 0 && CHUNK % 32 == 0, "shapes");

#include "seq.cuh"
#include "overlap.cuh"
#include "conv.cuh"

__device__ __forceinline__ Seq read_seq(const Meta& meta, int s, int* fault) {
  return read_seq(meta, s, OP_MAMBA2, fault);
}

#include "chunk.cuh"

struct PairBlock {
  int t, u;
};

__device__ __forceinline__ PairBlock pair_block(int i) {  // first rows of the i-th of PAIRS
  int row = 0, first = 0;
#pragma unroll
  for (int r = 1; r < TILES; r++) {
    if (i >= r * (r + 1) / 2) row = r, first = r * (r + 1) / 2;
  }
  return {row * 16, (i - first) * 16};
}

__device__ __forceinline__ uint4& stored(u8* blocks, int i) {  // a lane's share of a block
  return *reinterpret_cast<uint4*>(blocks + i * BLOCK + threadIdx.x % 32 * 16);
}

__device__ __forceinline__ Quad quad_of(const uint4& x) { return {{x.x, x.y, x.z, x.w}}; }
__device__ __forceinline__ uint4 stored_of(const Quad& x) { return make_uint4(x.x[0], x.x[1], x.x[2], x.x[3]); }

#include "mamba2_chunk_group.cuh"

// ---- mamba2_chunk_state ---------------------------------------------------------------------------------------------

constexpr int INPUTS_IMAGE = SLICE / 16 * TILES * 2 * BLOCK, STATE_IMAGE = SLICE / 16 * STEPS * BLOCK;

struct Shared {  // offsets; all but raw rows twice, for one chunk and the next
  static constexpr int kC = 4 * B_IMAGE, kP = kC + 2 * B_IMAGE, kX = kP + 2 * P_IMAGE,
                       kInputs = kX + (CHUNK + TAPS - 1) * X_ROW * 4,  // g x, split: what S takes in
                       kState = kInputs + 2 * INPUTS_IMAGE, kScalars = kState + 2 * STATE_IMAGE,
                       kPowers = kScalars + 2 * SCALARS * CHUNK * 4,  // of rows of inputs, then of S
                       kBytes = kPowers + 4 * SLICE * 4;
};

struct Work {  // of a block
  Seq seq;
  int h, row0, n;        // head, first row of S, chunks
  const u8* records;     // of the sequence's first chunk and the head's group
  const float* scalars;  // of that chunk and the head
  u8* memory;
  u32 base;
};

__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
__device__ __forceinline__ void meet_keepers() { asm volatile("bar.sync 3, %0;" ::"n"(KEEPERS) : "memory"); }
__device__ __forceinline__ void meet_makers() { asm volatile("bar.sync 2, %0;" ::"n"(KEEPERS) : "memory"); }

// By KEEPERS threads, `at` among them.
template <int BYTES>
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, int at) {
#pragma unroll
  for (int i = 0; i < BYTES; i += KEEPERS * 16) {
    if (i + at * 16 < BYTES) copy16(to + i + at * 16, static_cast<const u8*>(from) + i + at * 16);
  }
}

__device__ __forceinline__ float two_to(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// Within 3e-7 of silu where it matters: conv.cuh's costs three times the instructions, and makers of rows have no time.
__device__ __forceinline__ float quick_silu(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(1.0f + two_to(x * -1.4426950408889634f)));
  return x * out;
}

__device__ __forceinline__ float* scalars_in(const Work& w, int c) {
  return reinterpret_cast<float*>(w.memory + Shared::kScalars) + c % 2 * (SCALARS * CHUNK);
}

// C.B of pairs times what is left of u at t, in place.
__device__ __forceinline__ void decay_pairs(const Work& w, int c) {
  const float* s = scalars_in(w, c);
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < PAIRS; i += KEEPERS / 32) {
    uint4& lanes = stored(w.memory + Shared::kP + c % 2 * P_IMAGE, i);
    Quad p = quad_of(lanes);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int t = pair_block(i).t + lane / 4 + k / 2 * 8, u = pair_block(i).u + lane % 4 * 2 + k % 2 * 8;
      const float high = s[HIGH * CHUNK + t], low = s[LOW * CHUNK + t];
      const float2 highs = *reinterpret_cast<const float2*>(s + HIGH * CHUNK + u);
      const float2 lows = *reinterpret_cast<const float2*>(s + LOW * CHUNK + u);
      const float p0 = f16_to_f32(static_cast<u16>(p.x[k])) * two_to((high - highs.x) + (low - lows.x));
      const float p1 = f16_to_f32(static_cast<u16>(p.x[k] >> 16)) * two_to((high - highs.y) + (low - lows.y));
      p.x[k] = f16_pair(u <= t ? p0 : 0.0f, u < t ? p1 : 0.0f);
    }
    lanes = stored_of(p);
  }
}

// A warp of these keeps 16 rows of S. Together they also make P.
__device__ __forceinline__ void keep_state(const Work& w, float* state) {
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, row = warp * 16 + lane / 4;
  float* own = state + ((static_cast<i64>(w.seq.slot) * HEADS + w.h) * DIM + w.row0 + row) * N_STATE + lane % 4 * 2;
  float* powers = reinterpret_cast<float*>(w.memory + Shared::kPowers);
  auto copy_chunk = [&](int c) {
    if (c < w.n) {
      const u8* record = w.records + static_cast<i64>(c) * (GROUPS * RECORD);
      const float* s = w.scalars + static_cast<i64>(c) * (HEADS * SCALARS * CHUNK);
      copy_bytes<2 * B_IMAGE>(w.base + c % 2 * (2 * B_IMAGE), record, tid);
      copy_bytes<P_IMAGE>(w.base + Shared::kP + c % 2 * P_IMAGE, record + 3 * B_IMAGE, tid);
      copy_bytes<SINCE * CHUNK * 4>(w.base + Shared::kScalars + c % 2 * (SCALARS * CHUNK * 4), s, tid);
    }
    copies_commit();
  };
  copy_chunk(0);
  Tiles<N_STATE / 8> S;
#pragma unroll
  for (int i = 0; i < N_STATE / 8; i++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float2 x = *reinterpret_cast<const float2*>(own + r * 8 * N_STATE + i * 8);
      S.x[i][2 * r] = x.x, S.x[i][2 * r + 1] = x.y;
    }
  }
  auto publish = [&](int c) {  // S before chunk c
    const Scale scale = scale_of(S);
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      stored(w.memory + Shared::kState + c % 2 * STATE_IMAGE, warp * STEPS + k) = stored_of(operand(S, k, scale).hi);
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; r++) powers[(2 + c % 2) * SLICE + row + r * 8] = scale.by[r];
    }
  };
  publish(0);
  copies_wait<0>();
  meet_keepers();
  decay_pairs(w, 0);
  meet();
#pragma unroll 1
  for (int c = 0; c < w.n; c++) {
    u8* b = w.memory + c % 2 * (2 * B_IMAGE);
    copy_chunk(c + 1);
    Operand inputs[TILES];
#pragma unroll
    for (int k = 0; k < TILES; k++) {
      u8* from = w.memory + Shared::kInputs + c % 2 * INPUTS_IMAGE;
      inputs[k].hi = quad_of(stored(from, (warp * TILES + k) * 2));
      inputs[k].lo = quad_of(stored(from, (warp * TILES + k) * 2 + 1));
    }
    const float by[2] = {powers[c % 2 * SLICE + row], powers[c % 2 * SLICE + row + 8]};
    const float last = scalars_in(w, c)[SINCE * CHUNK + CHUNK - 1];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum[STEPS][4] = {};
#pragma unroll
      for (int k = 0; k < TILES; k++) {
#pragma unroll
        for (int u = 0; u < STEPS / 2; u++) {
          const int block = k * STEPS + half * (STEPS / 2) + u;
          const Quad hi = quad_of(stored(b, block)), lo = quad_of(stored(b, B_BLOCKS + block));
          add_product3(*reinterpret_cast<float(*)[2][4]>(&sum[2 * u]), inputs[k], hi, lo);
        }
      }
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& x = S.x[half * STEPS + j][i];
          x = fmaf(by[i / 2], sum[j][i], last * x);
        }
      }
    }
    if (c + 1 < w.n) {
      publish(c + 1);
      copies_wait<0>();
      meet_keepers();
      decay_pairs(w, c + 1);
    }
    meet();
  }
#pragma unroll
  for (int i = 0; i < N_STATE / 8; i++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      *reinterpret_cast<float2*>(own + r * 8 * N_STATE + i * 8) = make_float2(S.x[i][2 * r], S.x[i][2 * r + 1]);
    }
  }
}

struct Raws {  // where x comes from, and what becomes of it
  const float *m, *conv_w, *conv_b;
  float* window;  // of the slot
  i64 m_stride;
  float d;
};

// A warp of these makes 16 columns of x and of the output, for the warp that keeps the same rows of S.
__device__ __forceinline__ void make_rows(const Work& w, const Raws& from, float* out) {
  const int tid = threadIdx.x - KEEPERS, warp = tid / 32, lane = tid % 32, row = warp * 16 + lane / 4;
  const int channel = w.h * DIM + w.row0, pair = lane % 4 * 2;
  const float* rows = from.m + w.seq.start * from.m_stride + channel;
  float* own = from.window + channel;
  float* powers = reinterpret_cast<float*>(w.memory + Shared::kPowers);
  auto copy_chunk = [&](int c) {
    constexpr int UNITS = SLICE / 4, EACH = KEEPERS / UNITS;
    const int unit = tid % UNITS * 4, first = c * CHUNK - (TAPS - 1);
#pragma unroll 3
    for (int t = tid / UNITS; t < CHUNK + TAPS - 1; t += EACH) {
      const int at = first + t;
      const float* x = at < 0 ? own + static_cast<i64>(w.seq.fold + at + TAPS - 1) * CHANNELS
                              : rows + (at < w.seq.n ? at : 0) * from.m_stride;
      copy16_or_zero(w.base + Shared::kX + (t * X_ROW + unit) * 4, x + unit, at < w.seq.n);
    }
    const float* s = w.scalars + static_cast<i64>(c) * (HEADS * SCALARS * CHUNK) + SINCE * CHUNK;
    const u32 to = w.base + Shared::kScalars + c % 2 * (SCALARS * CHUNK * 4) + SINCE * CHUNK * 4;
    copy_bytes<(SCALARS - SINCE) * CHUNK * 4>(to, s, tid);
    const u8* record = w.records + static_cast<i64>(c) * (GROUPS * RECORD);
    copy_bytes<B_IMAGE>(w.base + Shared::kC + c % 2 * B_IMAGE, record + 2 * B_IMAGE, tid);
    copies_commit();
  };
  const float4 taps[2] = {quad(from.conv_w + (channel + row) * TAPS), quad(from.conv_w + (channel + row + 8) * TAPS)};
  const float bias[2] = {from.conv_b[channel + row], from.conv_b[channel + row + 8]};
  Tiles<CHUNK / 8> x;
  auto prepare = [&](int c) {  // x, and what S takes in of it
    const float *s = scalars_in(w, c), *raw = reinterpret_cast<const float*>(w.memory + Shared::kX);
    Tiles<CHUNK / 8> inputs;
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j++) {
      const float2 left = *reinterpret_cast<const float2*>(s + LEFT * CHUNK + j * 8 + pair);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float* at = raw + (j * 8 + pair) * X_ROW + row + r * 8;
        float y[TAPS + 1];
#pragma unroll
        for (int i = 0; i <= TAPS; i++) y[i] = at[i * X_ROW];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float sum = fmaf(y[i], taps[r].x, bias[r]);
          sum = fmaf(y[i + 1], taps[r].y, sum);
          sum = fmaf(y[i + 2], taps[r].z, sum);
          x.x[j][2 * r + i] = quick_silu(fmaf(y[i + 3], taps[r].w, sum));
          inputs.x[j][2 * r + i] = x.x[j][2 * r + i] * (i ? left.y : left.x);
        }
      }
    }
    const Scale scale = scale_of(inputs);
#pragma unroll
    for (int k = 0; k < TILES; k++) {
      u8* to = w.memory + Shared::kInputs + c % 2 * INPUTS_IMAGE;
      const Operand both = operand(inputs, k, scale);
      stored(to, (warp * TILES + k) * 2) = stored_of(both.hi);
      stored(to, (warp * TILES + k) * 2 + 1) = stored_of(both.lo);
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; r++) powers[c % 2 * SLICE + row + r * 8] = scale.by[r];
    }
  };
  copy_chunk(0);
  copies_wait<0>();
  meet_makers();
  prepare(0);
  meet();
#pragma unroll 1
  for (int c = 0; c < w.n; c++) {
    const float* s = scalars_in(w, c);
    if (c + 1 < w.n) copy_chunk(c + 1);
    Tiles<CHUNK / 8> old, fresh;  // S C and P x
    Scale scale;
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) old.x[j][i] = fresh.x[j][i] = 0.0f;
    }
    {
      u8* S = w.memory + Shared::kState + c % 2 * STATE_IMAGE;
#pragma unroll
      for (int k = 0; k < STEPS; k++) {
        const Quad a = quad_of(stored(S, warp * STEPS + k));
#pragma unroll
        for (int u = 0; u < TILES; u++) {
          const Quad c4 = quad_of(stored(w.memory + Shared::kC + c % 2 * B_IMAGE, k * TILES + u));
          add_product(old.x[2 * u], a, c4.x[0], c4.x[1]);
          add_product(old.x[2 * u + 1], a, c4.x[2], c4.x[3]);
        }
      }
    }
    {
      Tiles<CHUNK / 8> inputs;
#pragma unroll
      for (int j = 0; j < CHUNK / 8; j++) {
        const float2 in = *reinterpret_cast<const float2*>(s + IN * CHUNK + j * 8 + pair);
#pragma unroll
        for (int i = 0; i < 4; i++) inputs.x[j][i] = x.x[j][i] * (i % 2 ? in.y : in.x);
      }
      scale = scale_of(inputs);
#pragma unroll
      for (int k = 0; k < TILES; k++) {
        const Quad a = operand(inputs, k, scale).hi;
#pragma unroll
        for (int u = k; u < TILES; u++) {
          const Quad p4 = quad_of(stored(w.memory + Shared::kP + c % 2 * P_IMAGE, u * (u + 1) / 2 + k));
          add_product(fresh.x[2 * u], a, p4.x[0], p4.x[1]);
          add_product(fresh.x[2 * u + 1], a, p4.x[2], p4.x[3]);
        }
      }
    }
    const float by[2] = {powers[(2 + c % 2) * SLICE + row], powers[(2 + c % 2) * SLICE + row + 8]};
    float* to = out + (w.seq.start + static_cast<i64>(c) * CHUNK) * INNER + channel + row;
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j++) {
      const float2 since = *reinterpret_cast<const float2*>(s + SINCE * CHUNK + j * 8 + pair);
      const float2 over = *reinterpret_cast<const float2*>(s + OVER * CHUNK + j * 8 + pair);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int t = j * 8 + pair + i % 2;
        const float sum = fmaf(scale.by[i / 2], fresh.x[j][i], (i % 2 ? since.y : since.x) * by[i / 2] * old.x[j][i]);
        const float y = fmaf(i % 2 ? over.y : over.x, sum, from.d * x.x[j][i]);
        if (c * CHUNK + t < w.seq.n) to[static_cast<i64>(t) * INNER + i / 2 * 8] = y;
      }
    }
    if (c + 1 < w.n) {
      copies_wait<0>();
      meet_makers();
      prepare(c + 1);
    }
    meet();
  }
  for (int i = tid; i < (TAPS - 1) * (SLICE / 4); i += KEEPERS) {  // nobody else reads these columns of the window
    const int t = i / (SLICE / 4), unit = i % (SLICE / 4) * 4;
    quad(own + static_cast<i64>(t) * CHANNELS + unit) = quad(rows + (w.seq.n - (TAPS - 1) + t) * from.m_stride + unit);
  }
}

// grid (HEADS, DIM / SLICE, sequences), THREADS threads, Shared::kBytes of shared memory. state [slot, head, head_dim,
// state] in place, d [head] read, out [row, head, head_dim] written; x of the window is replaced; the rest is
// mamba2_chunk_group's.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mamba2_chunk_state(float* state, const float* __restrict__ d, const float* m, i64 m_stride,
                       const float* __restrict__ conv_w, const float* __restrict__ conv_b, float* conv,
                       const u8* records, const float* scalars, float* out, const int* seq_slot, const int* seq_start,
                       const int* seq_fold, const int* seq_keep, int n_slot, int width, int n_row, int chunked,
                       int n_seq, int n_chunk, int* fault) {
  extern __shared__ __align__(128) u8 memory[];
  const int s = blockIdx.z;
  const Meta meta = {seq_slot, seq_start, seq_fold, seq_keep, n_slot, width, n_row, chunked};
  Work w = {read_seq(meta, s, fault), static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y) * SLICE};
  w.n = w.seq.chunked ? (w.seq.n + CHUNK - 1) / CHUNK : 0;
  const i64 first = chunks_before(meta, s, n_seq, fault);
  w.records = records + (first * GROUPS + w.h / (HEADS / GROUPS)) * RECORD;
  w.scalars = scalars + (first * HEADS + w.h) * (SCALARS * CHUNK);
  w.memory = memory, w.base = shared_address(memory);
  wait_for_predecessor();
  if (w.n == 0 || first + w.n > n_chunk) return;  // more chunks than there is room for: no batch of ours
  if (threadIdx.x < KEEPERS) {
    keep_state(w, state);
  } else {
    float* window = conv + static_cast<i64>(w.seq.slot) * (TAPS - 1 + width) * CHANNELS;
    make_rows(w, {m, conv_w, conv_b, window, m_stride, d[w.h]}, out);
  }
}
