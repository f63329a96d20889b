// Gated DeltaNet with deferred commit, in two launches a layer. The meaning is gdn_ref.py's; shapes by macro.
//
// gdn_conv  one block per (head of q, k or v; sequence; stretch of rows). It owns the head's 128 channels in window and
//           records, so old ones are read before new ones are written and no other block sees either:
//           1. the accepted records go to the fold buffers, decays as exp(g); 2. the window moves by the fold;
//           3. rows through conv, silu and l2 norm. q goes to a buffer; k and v to the records (verify) or to buffers (keep).
// gdn_rows  one block per (v head, stretch of columns, sequence). A column is a row of S[value, key]: LANES lanes hold its
//           128 numbers in registers, COLS columns to a lane. The state comes in once, the fold runs over it, it goes out
//           once, then the rows run and write o. Verified rows never touch the stored state.
//
// Bound by: state bytes (read + write) at narrow verifies; fp32 issue (4 operations per state element and row, 3 per folded
// record) from about 8 rows a sequence. Sums have one fixed tree whatever COLS is, and a folded row runs the same code as
// a verified or kept one: a state does not depend on how its tokens came.
//
// A sequence of no rows is skipped whole. One with a bad index is reported and skipped: clamping it to a real slot would
// spoil that slot's state.
#include "types.cuh"
#include "bounds.cuh"

#ifndef N_K
#define N_K 16  // key heads
#define N_V 48  // value heads
#define COLS 2    // columns of a lane: 1, 2, 4; changes no bit of the result
#define BLOCKS 6  // blocks of gdn_rows on a multiprocessor: 65,536 / (128 * BLOCKS) registers a thread
#endif
#define LANES 8  // lanes of a column
#define DIM 128
#define TAPS 4
#define PARTS 2  // running sums of a dot product; with LANES it fixes the order of sums
#define THREADS 128
#define CONV_WARPS 8
#define SPAN 64   // rows of one gdn_conv block where sequences are long
#define STAGE 8   // tokens in shared memory at a time, twice
#define OP_GDN 3  // this op's number in fault records

constexpr int KD = N_K * DIM, VD = N_V * DIM, CHANNELS = 2 * KD + VD;
constexpr int TILE = THREADS / LANES * COLS;  // columns of a block
constexpr int QUADS = DIM / 4 / LANES;        // float4 of one column in a lane

struct Seq {
  int slot, start, n, fold;  // n == 0: nothing to do
  bool keep;
};

struct Meta {
  const int *slot, *start, *fold, *keep;
};

__device__ __forceinline__ Seq read_seq(Meta meta, int s, int n_slot, int width, int n_row, int* fault) {
  const Seq none = {0, 0, 0, 0, false};
  Seq seq = {meta.slot[s], meta.start[s], 0, meta.fold[s], meta.keep[s] != 0};
  int n = meta.start[s + 1] - seq.start;
  if (n <= 0) return none;
  if (clamped(seq.slot, n_slot, OP_GDN, seq.slot, fault) != seq.slot) return none;
  if (clamped(seq.fold, width + 1, OP_GDN, seq.slot, fault) != seq.fold) return none;
  if (clamped(seq.start, n_row, OP_GDN, seq.slot, fault) != seq.start) return none;
  if (clamped(seq.start + n - 1, n_row, OP_GDN, seq.slot, fault) != seq.start + n - 1) return none;
  if (!seq.keep && clamped(n, width + 1, OP_GDN, seq.slot, fault) != n) return none;
  seq.n = n;
  return seq;
}

__device__ __forceinline__ void let_next_start() {  // programmatic dependent launch: no-ops where it is not used
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float4& quad(float* p) { return *reinterpret_cast<float4*>(p); }
__device__ __forceinline__ float4 quad(const float* p) { return *reinterpret_cast<const float4*>(p); }

__device__ __forceinline__ float4 fma4(float4 a, float4 b, float4 c) {
  return make_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z), fmaf(a.w, b.w, c.w));
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// ---- gdn_conv -------------------------------------------------------------------------------------------------------

struct Taps {
  float4 w[TAPS];  // w[tap], one component per channel of the lane

  __device__ __forceinline__ explicit Taps(const float* conv_w) {
    float4 c[4];
    for (int i = 0; i < 4; i++) c[i] = quad(conv_w + i * TAPS);
    w[0] = make_float4(c[0].x, c[1].x, c[2].x, c[3].x);
    w[1] = make_float4(c[0].y, c[1].y, c[2].y, c[3].y);
    w[2] = make_float4(c[0].z, c[1].z, c[2].z, c[3].z);
    w[3] = make_float4(c[0].w, c[1].w, c[2].w, c[3].w);
  }
};

// grid (2 * N_K + N_V, sequences, stretches), 256 threads.
//   m [row, m_stride], g beta [row, v_head], conv_w [channel, TAPS]; conv [slot, TAPS - 1 + width, channel] in place;
//   rec_* [slot, width, ..] in place; fold_k fold_v fold_e fold_b [seq, width, ..], q k v e [row, ..] written.
extern "C" __global__ void __launch_bounds__(CONV_WARPS * 32)
    gdn_conv(const float* __restrict__ m, i64 m_stride, const float* __restrict__ g, const float* __restrict__ beta,
             const float* __restrict__ conv_w, float* conv, float* rec_k, float* rec_v, float* rec_g, float* rec_b,
             float* fold_k, float* fold_v, float* fold_e, float* fold_b, float* q, float* k, float* v, float* e,
             const int* seq_slot, const int* seq_start, const int* seq_fold, const int* seq_keep, int n_slot, int width,
             int n_row, float eps, int* fault) {
  __shared__ float4 window[TAPS - 1][32];
  let_next_start();
  const int head = blockIdx.x, s = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Seq seq = read_seq({seq_slot, seq_start, seq_fold, seq_keep}, s, n_slot, width, n_row, fault);
  const int first = blockIdx.z * SPAN;
  if (first >= seq.n || (blockIdx.z > 0 && !seq.keep)) return;
  const int step = seq.keep ? gridDim.z * SPAN : SPAN;
  const bool is_q = head < N_K, is_v = head >= 2 * N_K;
  const int kind_head = is_q ? head : is_v ? head - 2 * N_K : head - N_K;
  const int stride = is_v ? VD : KD, at = kind_head * DIM + lane * 4;  // of q, k or v
  const i64 channel = head * DIM + lane * 4;
  float* slot_conv = conv + static_cast<i64>(seq.slot) * (TAPS - 1 + width) * CHANNELS + channel;
  const i64 slot_row = static_cast<i64>(seq.slot) * width, fold_row = static_cast<i64>(s) * width;
  float* record = (is_v ? rec_v : rec_k) + slot_row * stride + at;
  const float* rows = m + seq.start * m_stride + channel;

  if (blockIdx.z == 0) {
    if (warp < TAPS - 1) window[warp][lane] = quad(slot_conv + static_cast<i64>(seq.fold + warp) * CHANNELS);
    if (!is_q) {
      float* fold = (is_v ? fold_v : fold_k) + fold_row * stride + at;
      for (i64 t = warp; t < seq.fold; t += CONV_WARPS) quad(fold + t * stride) = quad(record + t * stride);
    }
    if (is_v) {
      for (int t = threadIdx.x; t < seq.fold; t += CONV_WARPS * 32) {
        const i64 from = (slot_row + t) * N_V + kind_head, to = (fold_row + t) * N_V + kind_head;
        fold_e[to] = expf(rec_g[from]);
        fold_b[to] = rec_b[from];
      }
    }
    __syncthreads();  // everything old is read; what follows overwrites it
    if (warp < TAPS - 1) {
      const int i = seq.keep ? seq.n + warp : warp;  // of window and rows, one after the other
      quad(slot_conv + static_cast<i64>(warp) * CHANNELS) =
          i < TAPS - 1 ? window[i][lane] : quad(rows + (i - (TAPS - 1)) * m_stride);
    }
  }
  const Taps taps(conv_w + channel * TAPS);
  for (int base = first; base < seq.n; base += step) {
    const int end = min(base + SPAN, seq.n);
    for (int t = base + warp; t < end; t += CONV_WARPS) {
      float4 x[TAPS], y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < TAPS; i++) {
        const int r = t + i - (TAPS - 1);
        x[i] = r < 0 ? window[r + TAPS - 1][lane] : quad(rows + r * m_stride);
        y = fma4(x[i], taps.w[i], y);
      }
      y = make_float4(silu(y.x), silu(y.y), silu(y.z), silu(y.w));
      if (!is_v) {
        const float norm = rsqrtf(warp_sum(y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w) + eps);
        y = make_float4(y.x * norm, y.y * norm, y.z * norm, y.w * norm);
      }
      const i64 row = seq.start + t;
      if (is_q || seq.keep) {
        quad((is_q ? q : is_v ? v : k) + row * stride + at) = y;
      } else {
        quad(record + static_cast<i64>(t) * stride) = y;
      }
      if (!seq.keep) quad(slot_conv + static_cast<i64>(TAPS - 1 + t) * CHANNELS) = x[TAPS - 1];
      if (is_v && lane == 0) {
        const i64 from = row * N_V + kind_head, to = (slot_row + t) * N_V + kind_head;
        e[from] = expf(g[from]);
        if (!seq.keep) rec_g[to] = g[from], rec_b[to] = beta[from];
      }
    }
  }
}

// ---- gdn_rows -------------------------------------------------------------------------------------------------------

struct Stage {
  float k[STAGE][DIM], q[STAGE][DIM], v[STAGE][TILE], e[STAGE], b[STAGE];
};

struct Tokens {  // a run of records or of rows, pointers at this block's head and columns
  const float *k, *v, *e, *b, *q;  // q null: only fold
};

__device__ __forceinline__ void copy16(void* shared, const float* global) {
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

__device__ __forceinline__ void copy4(void* shared, const float* global) {
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}

__device__ __forceinline__ void fetch(Stage& stage, const Tokens& from, int count) {
  const int tid = threadIdx.x, x = tid % 32 * 4;
#pragma unroll 1
  for (int t = tid / 32; t < count; t += THREADS / 32) {
    copy16(&stage.k[t][x], from.k + t * KD + x);
    if (from.q != nullptr) copy16(&stage.q[t][x], from.q + t * KD + x);
    if (x < TILE) copy16(&stage.v[t][x], from.v + t * VD + x);
  }
  if (tid < count) {
    copy4(&stage.e[tid], from.e + tid * N_V);
    copy4(&stage.b[tid], from.b + tid * N_V);
  }
}

struct Slice {  // the lane's share of its COLS columns: keys (i * LANES + lane % LANES) * 4 .. + 3
  float4 s[COLS][QUADS];
};

__device__ __forceinline__ float dot(const float4 (&a)[QUADS], const float4 (&b)[QUADS]) {
  float sum[PARTS] = {};
#pragma unroll
  for (int i = 0; i < QUADS; i++) {
    sum[0] = fmaf(a[i].x, b[i].x, sum[0]);
    sum[1 % PARTS] = fmaf(a[i].y, b[i].y, sum[1 % PARTS]);
    sum[2 % PARTS] = fmaf(a[i].z, b[i].z, sum[2 % PARTS]);
    sum[3 % PARTS] = fmaf(a[i].w, b[i].w, sum[3 % PARTS]);
  }
  if (PARTS == 4) return (sum[0] + sum[1 % PARTS]) + (sum[2 % PARTS] + sum[3 % PARTS]);
  return PARTS == 2 ? sum[0] + sum[1 % PARTS] : sum[0];
}

// Sum each of COLS values over the LANES lanes of a column; lane l of a group gets the sum of column l / (LANES / COLS).
// At every hop the first half of the columns goes to one half of the lanes and the rest to the other.
__device__ __forceinline__ float sum_columns(float (&x)[COLS]) {
#pragma unroll
  for (int hop = LANES / 2, n = COLS; hop > 0; hop /= 2) {
    const bool up = threadIdx.x & hop;
    n = n > 1 ? n / 2 : 0;
    if (n == 0) x[0] += __shfl_xor_sync(0xffffffffu, x[0], hop);
#pragma unroll
    for (int c = 0; c < n; c++) {
      const float mine = up ? x[c + n] : x[c], other = up ? x[c] : x[c + n];
      x[c] = mine + __shfl_xor_sync(0xffffffffu, other, hop);
    }
  }
  return x[0];
}

__device__ __forceinline__ void load_keys(float4 (&out)[QUADS], const float (&from)[DIM]) {
#pragma unroll
  for (int i = 0; i < QUADS; i++) out[i] = quad(from + (i * LANES + threadIdx.x % LANES) * 4);
}

// One token over the slice: S <- e S; d = b (v - S k); S <- S + d k^T. With EMIT the rows' o = S q goes to out.
template <bool EMIT>
__device__ __forceinline__ void advance(Slice& slice, const Stage& stage, int count, float* out) {
  const int lane = threadIdx.x % 32, sub = lane % LANES;
  const int own = threadIdx.x / LANES * COLS + sub / (LANES / COLS);  // the column whose sums this lane gets
  float4 k[QUADS];
  load_keys(k, stage.k[0]);
#pragma unroll 1
  for (int t = 0; t < count; t++) {
    float4 q[QUADS];
    if (EMIT) load_keys(q, stage.q[t]);
    const float e = stage.e[t], b = stage.b[t], v = stage.v[t][own];
    float y[COLS];
#pragma unroll
    for (int c = 0; c < COLS; c++) y[c] = dot(slice.s[c], k);
    const float d = b * fmaf(-e, sum_columns(y), v);
#pragma unroll
    for (int c = 0; c < COLS; c++) {
      const float dc = COLS == 1 ? d : __shfl_sync(0xffffffffu, d, (lane - sub) + c * (LANES / COLS));
#pragma unroll
      for (int i = 0; i < QUADS; i++) {
        float4& s = slice.s[c][i];
        s = make_float4(fmaf(k[i].x, dc, e * s.x), fmaf(k[i].y, dc, e * s.y), fmaf(k[i].z, dc, e * s.z),
                        fmaf(k[i].w, dc, e * s.w));
      }
      if (EMIT) y[c] = dot(slice.s[c], q);
    }
    load_keys(k, stage.k[t + 1 < count ? t + 1 : t]);
    if (EMIT) {
      const float o = sum_columns(y) * 0.08838834764831845f;  // DIM ** -0.5
      if (sub % (LANES / COLS) == 0) out[static_cast<i64>(t) * VD + own] = o;
    }
  }
}

__device__ __forceinline__ void move_state(Slice& slice, float* state, bool store) {
  float* at = state + threadIdx.x / LANES * COLS * DIM + threadIdx.x % LANES * 4;
#pragma unroll
  for (int c = 0; c < COLS; c++) {
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      float* p = at + c * DIM + i * LANES * 4;
      if (store) {
        quad(p) = slice.s[c][i];
      } else {
        slice.s[c][i] = quad(p);
      }
    }
  }
}

// grid (N_V, DIM / TILE, sequences), 128 threads. state [slot, v_head, value, key] in place, out [row, v_head, value]
// written; the rest is gdn_conv's. Launched so that its state may load while gdn_conv still runs.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gdn_rows(float* state, const float* rec_k, const float* rec_v, const float* fold_k, const float* fold_v,
             const float* fold_e, const float* fold_b, const float* q, const float* k, const float* v, const float* e,
             const float* beta, float* out, const int* seq_slot, const int* seq_start, const int* seq_fold,
             const int* seq_keep, int n_slot, int width, int n_row, int* fault) {
  __shared__ __align__(16) Stage stages[2];
  const int h = blockIdx.x, column = blockIdx.y * TILE, s = blockIdx.z;
  const Seq seq = read_seq({seq_slot, seq_start, seq_fold, seq_keep}, s, n_slot, width, n_row, fault);
  if (seq.n == 0) return;
  const i64 fold_row = static_cast<i64>(s) * width, slot_row = static_cast<i64>(seq.slot) * width;
  float* own = state + ((static_cast<i64>(seq.slot) * N_V + h) * DIM + column) * DIM;
  const int n_fold = (seq.fold + STAGE - 1) / STAGE, n_stage = n_fold + (seq.n + STAGE - 1) / STAGE;
  // pointers are made anew for every stage: a few instructions, where keeping them costs registers all along
  auto start_fetch = [&](int j) {
    if (j < n_stage) {
      const bool folds = j < n_fold, kept = seq.keep;
      const int first = (folds ? j : j - n_fold) * STAGE, count = min(STAGE, (folds ? seq.fold : seq.n) - first);
      const i64 row = seq.start + first, old = fold_row + first, record = slot_row + first;
      const i64 at = folds ? old : kept ? row : record;
      const i64 k_at = at * KD + h % N_K * DIM, v_at = at * VD + h * DIM + column;
      const Tokens from = {(folds ? fold_k : kept ? k : rec_k) + k_at, (folds ? fold_v : kept ? v : rec_v) + v_at,
                           (folds ? fold_e + old * N_V : e + row * N_V) + h,
                           (folds ? fold_b + old * N_V : beta + row * N_V) + h,
                           folds ? nullptr : q + row * KD + h % N_K * DIM};
      fetch(stages[j % 2], from, count);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  Slice slice;
  move_state(slice, own, false);
  wait_previous();
  start_fetch(0);
#pragma unroll 1
  for (int j = 0; j < n_stage; j++) {
    start_fetch(j + 1);
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    if (j < n_fold) {
      advance<false>(slice, stages[j % 2], min(STAGE, seq.fold - j * STAGE), nullptr);
    } else {
      if (j == n_fold && j > 0 && !seq.keep) move_state(slice, own, true);
      const int t = (j - n_fold) * STAGE;
      advance<true>(slice, stages[j % 2], min(STAGE, seq.n - t),
                    out + static_cast<i64>(seq.start + t) * VD + h * DIM + column);
    }
    __syncthreads();  // the next round's fetch overwrites this stage
  }
  if (seq.keep) move_state(slice, own, true);
}
