// Gated DeltaNet with deferred commit, in two launches a layer. The meaning is gdn_ref.py's; shapes by macro.
//
// gdn_conv  one block per (key head or v head; sequence; stretch of rows). It owns the head's channels in window and
//           records, so old ones are read before new ones are written and no other block sees either:
//           1. accepted records that a verify's take the place of go to the fold buffers, decays of all as exp(g); 2. the window moves by the fold; 3. rows go
//           through conv, silu and l2 norm: q to a buffer; k and v to the records (verify) or to buffers (keep); value
//           heads make decay and write strength of their rows from the raw gates.
// gdn_rows  one block per (v head, stretch of columns, sequence). A column is a row of S[value, key]: LANES lanes hold
//           its 128 numbers in registers, COLS columns to a lane. The state comes in once, the fold runs over it, it
//           goes out once, then the rows run and write o. Verified rows never touch the stored state. Late ones (LATE in
//           seq.cuh) leave it where it is, and come behind the records: of single rows one in four pays for a write.
// gdn_rows_into  the same, but o goes where rows.cu would put it, normed, gated and rounded for the output product
//           (HEADS, LAYOUT 0, to the bit): a launch less where rows are few. The blocks of a head are a cluster.
//
// Bound by: state bytes (read + write) at narrow verifies; at wide ones also fp32 issue (4 operations per state element
// and row, 3 per folded record), which overlaps little with the loads as a wave or two of blocks hold all states; the
// chain from token to token where one sequence has many rows. Sums have one fixed tree whatever COLS is, and a folded
// row runs the same operations on the state as a verified or kept one: a state does not depend on how its tokens came.
//
// What gdn_rows_into adds is one trip to the neighbours' shared memory for each STAGE rows, and less than rows.cu's launch.
//
// Kept sequences of `chunked` rows and more go through gdn_chunk.cu: gdn_conv skips them, gdn_rows only folds.
//
// A sequence of no rows is skipped whole, unless it is there to be folded (seq_keep 2, see gdn_cuda.folder). One with a bad
// index is reported and skipped: clamping it to a real slot would spoil that slot's state.
#include "gdn.cuh"

#ifndef COLS
#define COLS 2    // columns of a lane: 1, 2, 4; changes no bit of the result
#define ALONE 6   // blocks of gdn_rows, which needs fewer registers
#define BLOCKS 5  // blocks of gdn_rows_into on a multiprocessor: 65,536 / (128 * BLOCKS) registers a thread
#endif
#define LANES 8  // lanes of a column
#define TAPS 4
#define PARTS 2  // running sums of a dot product; with LANES it fixes the order of sums
#define THREADS 128
#define CONV_WARPS 4
#define SPAN 64  // rows of one gdn_conv block where sequences are long
#define STAGE 8  // tokens in shared memory at a time, twice

#include "conv.cuh"
#include "lanes.cuh"
#if __CUDA_ARCH__ >= 900
#include "bulk.cuh"
#endif

constexpr int DECAYS = kByKey ? VD : N_V;     // of a row
constexpr int TILE = THREADS / LANES * COLS;  // columns of a block
constexpr int QUADS = DIM / 4 / LANES;        // float4 of one column in a lane

// ---- gdn_conv -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float dot4(float4 a, float4 b) {
  return warp_sum(fmaf(a.x, b.x, a.y * b.y) + fmaf(a.z, b.z, a.w * b.w));
}

__device__ __forceinline__ float4 scaled(float4 a, float by) {
  return make_float4(a.x * by, a.y * by, a.z * by, a.w * by);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

struct ConvArgs {
  const float *m, *alpha, *beta, *a, *dt_bias, *conv_w;
  float *conv, *rec_k, *rec_v, *rec_g, *rec_b, *fold_k, *fold_v, *fold_e, *fold_b, *q, *k, *v, *e, *b, *kq;
  i64 m_stride, alpha_stride, beta_stride;
  int width;
  float eps;
};

// BY_KEY: decays of the keys of a lane's 4 channels.
__device__ __forceinline__ float log_decay(float z, float slope) {
  return kFloor != 0.0f ? kFloor * sigmoid(slope * z) : slope * softplus(z);
}

__device__ __forceinline__ float4 log_decays(float4 z, float4 bias, float slope) {
  return make_float4(log_decay(z.x + bias.x, slope), log_decay(z.y + bias.y, slope), log_decay(z.z + bias.z, slope),
                     log_decay(z.w + bias.w, slope));
}

__device__ __forceinline__ float4 exp4(float4 x) { return make_float4(expf(x.x), expf(x.y), expf(x.z), expf(x.w)); }

// Of records that are folded: a warp's share, whose first is `t`.
__device__ __forceinline__ void fold_decays(const ConvArgs& a, i64 slot_row, i64 fold_row, int at, int t, int step, int n) {
#pragma unroll 2
  for (; t < n; t += step)
    quad(a.fold_e + (fold_row + t) * VD + at) = exp4(quad(static_cast<const float*>(a.rec_g) + (slot_row + t) * VD + at));
}

// VALUES: one v head, 128 channels of v. Otherwise one key head: 128 channels of q and as many of k.
template <bool VALUES>
__device__ __forceinline__ void conv_head(const ConvArgs& a, const Seq& seq, int s, int head) {
  constexpr int PARTS_OF_HEAD = VALUES ? 1 : 2, STRIDE = VALUES ? VD : KD;
  constexpr int GROUP = VALUES ? 4 : 2;  // rows of a warp at a time: what registers allow
  constexpr int EARLY = 2;               // records of a warp that are loaded before the wait
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = head * DIM + lane * 4;
  const i64 slot_row = static_cast<i64>(seq.slot) * a.width, fold_row = static_cast<i64>(s) * a.width;
  float* record = (VALUES ? a.rec_v : a.rec_k) + slot_row * STRIDE + at;
  const int span = blockIdx.z * SPAN, step = seq.keep ? gridDim.z * SPAN : SPAN;
  const int per_warp = min(GROUP, (min(seq.n - span, SPAN) + CONV_WARPS - 1) / CONV_WARPS);
  int first = span + warp * per_warp, count = min(per_warp, seq.n - first);
  const bool moves = blockIdx.z == 0 && warp < TAPS - 1 && seq.first == 0;
  const int from = seq.keep ? seq.n + warp : warp;  // moved by this warp: of window and rows, one after the other
  const float* rows[PARTS_OF_HEAD];
  float* conv[PARTS_OF_HEAD];
  Raw<GROUP> raw[PARTS_OF_HEAD];
  float4 moved[PARTS_OF_HEAD], old[EARLY];
  float old_g = 0.0f, old_b = 0.0f, alpha = 0.0f, beta = 0.0f;
  float4 z[GROUP], biases;  // BY_KEY

  // The model's, and what the forward before this one left: nothing since then has written window and records.
  const Taps taps0(a.conv_w + ((VALUES ? 2 * KD : 0) + at) * TAPS);
  const Taps taps1(a.conv_w + ((VALUES ? 2 * KD : KD) + at) * TAPS);
  const float scale = VALUES ? a.a[head] : 0.0f, bias = VALUES && !kByKey ? a.dt_bias[head] : 0.0f;
  if (VALUES && kByKey) biases = quad(a.dt_bias + at);
#pragma unroll
  for (int p = 0; p < PARTS_OF_HEAD; p++) {
    const int channel = (VALUES ? 2 * KD : p * KD) + at;
    rows[p] = a.m + seq.start * a.m_stride + channel;
    conv[p] = a.conv + (slot_row + static_cast<i64>(seq.slot) * (TAPS - 1)) * CHANNELS + channel;
    const float* window = conv[p] + static_cast<i64>(seq.fold) * CHANNELS;
    if (count > 0) load_window(raw[p], window, first);
    if (moves && from < TAPS - 1) moved[p] = quad(window + static_cast<i64>(from) * CHANNELS);
  }
  const int moved_records = seq.in_place() ? 0 : seq.fold;
  if (blockIdx.z == 0 && seq.in_place()) fetch_records(record, warp, CONV_WARPS, seq.fold, STRIDE);
  if (blockIdx.z == 0) {
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
      const i64 t = warp + i * CONV_WARPS;
      if (t < moved_records) old[i] = quad(static_cast<const float*>(record) + t * STRIDE);
    }
    if (VALUES && threadIdx.x < seq.fold) {
      const i64 at = (slot_row + threadIdx.x) * N_V + head;
      if (!kByKey) old_g = a.rec_g[at];
      old_b = a.rec_b[at];
    }
  }
  wait_for_predecessor();

  auto load_gates = [&] {  // a lane makes the gates of a row; BY_KEY: the decays of its channels
    if (!VALUES) return;
#pragma unroll
    for (int j = 0; j < GROUP; j++)
      if (kByKey && j < count) z[j] = quad(a.alpha + (seq.start + first + j) * a.alpha_stride + at);
    if (lane >= count) return;
    const i64 row = seq.start + first + lane;
    if (!kByKey) alpha = a.alpha[row * a.alpha_stride + head];
    beta = a.beta[row * a.beta_stride + head];
  };
  load_gates();
#pragma unroll
  for (int p = 0; p < PARTS_OF_HEAD; p++) {
    if (count > 0) load_rows(raw[p], rows[p], a.m_stride, first, count);
    if (moves && from >= TAPS - 1) moved[p] = quad(rows[p] + (from - (TAPS - 1)) * a.m_stride);
  }
  if (blockIdx.z == 0) {
    float* fold = (VALUES ? a.fold_v : a.fold_k) + fold_row * STRIDE + at;
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
      const i64 t = warp + i * CONV_WARPS;
      if (t < moved_records) quad(fold + t * STRIDE) = old[i];
    }
#pragma unroll 4
    for (i64 t = warp + EARLY * CONV_WARPS; t < moved_records; t += CONV_WARPS)
      quad(fold + t * STRIDE) = quad(static_cast<const float*>(record) + t * STRIDE);
    if (VALUES) {
      for (int t = threadIdx.x; t < seq.fold; t += CONV_WARPS * 32) {
        const i64 from = (slot_row + t) * N_V + head, to = (fold_row + t) * N_V + head;
        const bool is_early = t == threadIdx.x;
        if (!kByKey) a.fold_e[to] = expf(is_early ? old_g : a.rec_g[from]);
        a.fold_b[to] = is_early ? old_b : a.rec_b[from];
      }
      if (kByKey) fold_decays(a, slot_row, fold_row, at, warp, CONV_WARPS, seq.fold);
    }
  }
  __syncthreads();  // everything old is read; what follows overwrites it
#pragma unroll
  for (int p = 0; p < PARTS_OF_HEAD; p++) {
    if (moves) quad(conv[p] + static_cast<i64>(warp) * CHANNELS) = moved[p];
  }
  int stretch = span;
  for (;;) {
    float4 y[GROUP];
    if (VALUES && lane < count) {
      const i64 row = seq.start + first + lane, at = row * N_V + head, to = (slot_row + seq.first + first + lane) * N_V + head;
      const float b = sigmoid(beta);
      a.b[at] = b;
      if (!seq.keep) a.rec_b[to] = b;
      if (!kByKey) {
        const float g = scale * softplus(alpha + bias);
        a.e[at] = expf(g);
        if (!seq.keep) a.rec_g[to] = g;
      }
    }
#pragma unroll
    for (int j = 0; j < GROUP; j++) {
      if (!VALUES || !kByKey || j >= count) break;
      const float4 g = log_decays(z[j], biases, scale);
      quad(a.e + (seq.start + first + j) * static_cast<i64>(VD) + at) = exp4(g);
      if (!seq.keep) quad(a.rec_g + (slot_row + seq.first + first + j) * VD + at) = g;
    }
#pragma unroll
    for (int j = 0; j < GROUP; j++) {
      if (j >= count) break;
      y[j] = taps0(raw[0].x + j);
#pragma unroll
      for (int p = 0; p < PARTS_OF_HEAD; p++) {
        if (!seq.keep) quad(conv[p] + static_cast<i64>(TAPS - 1 + seq.first + first + j) * CHANNELS) = raw[p].x[j + TAPS - 1];
      }
    }
#pragma unroll
    for (int j = 0; j < GROUP; j++) {
      if (j >= count) break;
      const int t = first + j;
      const i64 row = seq.start + t, kept = (seq.keep ? row : seq.first + t) * STRIDE;
      if (VALUES) {
        quad((seq.keep ? a.v + at : record) + kept) = y[j];
      } else {
        const float4 z = taps1(raw[PARTS_OF_HEAD - 1].x + j);
        const float yy = dot4(y[j], y[j]), zz = dot4(z, z), yz = dot4(y[j], z);
        const float norm_q = rsqrtf(yy + a.eps), norm_k = rsqrtf(zz + a.eps);
        quad(a.q + row * KD + at) = scaled(y[j], norm_q);
        quad((seq.keep ? a.k + at : record) + kept) = scaled(z, norm_k);
        if (lane == 0) a.kq[row * N_K + head] = yz * norm_q * norm_k;
      }
    }
    first += per_warp * CONV_WARPS;
    if (first - warp * per_warp >= stretch + SPAN) first += step - SPAN, stretch += step;
    if (first - warp * per_warp >= seq.n) break;
    count = min(per_warp, seq.n - first);
    load_gates();
#pragma unroll
    for (int p = 0; p < PARTS_OF_HEAD; p++) {
      if (count > 0) load_rows(raw[p], rows[p], a.m_stride, first, count);
    }
  }
}

// grid (N_K + N_V, sequences, stretches), 128 threads.
//   m [row, m_stride], alpha beta [row, their stride], a dt_bias [v_head], conv_w [channel, TAPS];
//   conv [slot, TAPS - 1 + width, channel] in place;
//   rec_* [slot, width, ..] in place; fold_k fold_v fold_e fold_b [seq, width, ..], q k v e b [row, ..] written (e is
//   the decay, b the write strength), and kq [row, k_head], the dot product of each row's key and query. BY_KEY: alpha,
//   dt_bias, decays and their records have DIM numbers a head.
extern "C" __global__ void __launch_bounds__(CONV_WARPS * 32, 4)
    gdn_conv(const float* m, i64 m_stride, const float* alpha, i64 alpha_stride, const float* beta, i64 beta_stride,
             const float* a, const float* dt_bias, const float* conv_w, float* conv, float* rec_k, float* rec_v, float* rec_g,
             float* rec_b, float* fold_k, float* fold_v, float* fold_e, float* fold_b, float* q, float* k, float* v,
             float* e, float* b, float* kq, const int* seq_slot, const int* seq_start, const int* seq_fold,
             const int* seq_keep, int n_slot, int width, int n_row, int chunked, float eps, int* fault) {
  let_successor_start();
  const int head = blockIdx.x, s = blockIdx.y;
  Seq seq = read_seq({seq_slot, seq_start, seq_fold, seq_keep, n_slot, width, n_row, chunked}, s, fault);
  if (seq.chunked) seq.n = 0;
  const bool has_rows = static_cast<int>(blockIdx.z) * SPAN < seq.n && (blockIdx.z == 0 || seq.keep);
  if (!has_rows && !seq.fold_only) {
    wait_for_predecessor();  // whoever starts after this kernel counts on the one before
  } else {  // waits when it has loaded what was there before the forward
    const ConvArgs args = {m,      alpha, beta, a, dt_bias, conv_w, conv, rec_k, rec_v,    rec_g,       rec_b, fold_k,
                           fold_v, fold_e, fold_b, q, k, v, e, b, kq, m_stride, alpha_stride, beta_stride, width, eps};
    if (head < N_K) {
      conv_head<false>(args, seq, s, head);
    } else {
      conv_head<true>(args, seq, s, head - N_K);
    }
  }
}

#include "gdn_conv_many.cuh"

// The same, for many sequences of few rows: grid (N_K + N_V, n_seq / CONV_WARPS), a sequence for each warp.
extern "C" __global__ void __launch_bounds__(CONV_WARPS * 32, 5)
    gdn_conv_many(const float* m, i64 m_stride, const float* alpha, i64 alpha_stride, const float* beta, i64 beta_stride,
                  const float* a, const float* dt_bias, const float* conv_w, float* conv, float* rec_k, float* rec_v, float* rec_g,
                  float* rec_b, float* fold_k, float* fold_v, float* fold_e, float* fold_b, float* q, float* k, float* v,
                  float* e, float* b, float* kq, const int* seq_slot, const int* seq_start, const int* seq_fold,
                  const int* seq_keep, int n_slot, int width, int n_row, int chunked, float eps, int* fault, int n_seq) {
  let_successor_start();
  const int head = blockIdx.x, s = blockIdx.y * CONV_WARPS + threadIdx.x / 32;
  const Meta meta = {seq_slot, seq_start, seq_fold, seq_keep, n_slot, width, n_row, chunked};
  const Seq seq = s < n_seq ? read_seq(meta, s, fault) : Seq{0, 0, 0, 0, 0, false, false, false};
  if (seq.n == 0 && !seq.fold_only) {
    wait_for_predecessor();
    return;
  }
  const ConvArgs args = {m,      alpha, beta, a, dt_bias, conv_w, conv, rec_k, rec_v,    rec_g,       rec_b, fold_k,
                         fold_v, fold_e, fold_b, q, k, v, e, b, kq, m_stride, alpha_stride, beta_stride, width, eps};
  if (head < N_K) {
    conv_warp<false>(args, seq, s, head);
  } else {
    conv_warp<true>(args, seq, s, head - N_K);
  }
}

// ---- gdn_rows -------------------------------------------------------------------------------------------------------

struct Stage {
  float k[STAGE][DIM], q[STAGE][DIM], v[STAGE][TILE];
  float4 scalars[STAGE];  // decay, write strength, key times query
#ifdef BY_KEY
  float e[STAGE][DIM];  // decays; none among the scalars
#endif
};

struct Tokens {  // a run of records or of rows, pointers at this block's head and columns
  const float *k, *v, *e, *b, *q, *kq;  // q null: only fold
};

__device__ __forceinline__ void fetch(Stage& stage, const Tokens& from, int count) {
  const int tid = threadIdx.x, x = tid % 32 * 4;
#pragma unroll 1
  for (int t = tid / 32; t < count; t += THREADS / 32) {
    copy16(&stage.k[t][x], from.k + t * KD + x);
    if (from.q != nullptr) copy16(&stage.q[t][x], from.q + t * KD + x);
    if (x < TILE) copy16(&stage.v[t][x], from.v + t * VD + x);
#ifdef BY_KEY
    copy16(&stage.e[t][x], from.e + t * VD + x);
#endif
  }
  if (tid < count) {
    if (!kByKey) copy4(&stage.scalars[tid].x, from.e + tid * N_V);
    copy4(&stage.scalars[tid].y, from.b + tid * N_V);
    if (from.q != nullptr) copy4(&stage.scalars[tid].z, from.kq + tid * N_K);
  }
}

__device__ __forceinline__ float4 times4(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

struct Slice {  // the lane's share of its COLS columns: keys (i * LANES + lane % LANES) * 4 .. + 3
  float4 s[COLS][QUADS];
};

__device__ __forceinline__ void load_keys(float4 (&out)[QUADS], const float (&from)[DIM]) {
#pragma unroll
  for (int i = 0; i < QUADS; i++) out[i] = quad(from + (i * LANES + threadIdx.x % LANES) * 4);
}

// Tokens over the slice: S <- e S; d = b (v - S k); S <- S + d k^T. With EMIT also o = S q, as e (S q) + d (k q) with
// the S before the token, so that both products of the state are summed at once and o is off the chain of tokens.
// With a decay for each key, S is multiplied with e k and e q instead.
// STRIDE is what rows of `out` lie apart; without EMIT there are none.
template <bool EMIT, int STRIDE = 0>
__device__ __forceinline__ void advance(Slice& slice, const Stage& stage, int count, float* out) {
  constexpr int N = EMIT ? 2 * COLS : COLS, SHARE = LANES / N;  // SHARE lanes get the same sum
  const int lane = threadIdx.x % 32, sub = lane % LANES;
  const int own = sub / SHARE % COLS;  // column whose sum this lane gets: S k in the first lanes, S q in the last
  const float* values = stage.v[0] + threadIdx.x / LANES * COLS + own;
  out += threadIdx.x / LANES * COLS + own;
  float4 k[QUADS], q[QUADS];
#ifdef BY_KEY
  float4 decays[QUADS];
  load_keys(decays, stage.e[0]);
#endif
  load_keys(k, stage.k[0]);
  if (EMIT) load_keys(q, stage.q[0]);
#pragma unroll 1
  for (int t = 0; t < count; t++) {
    const int next = min(t + 1, count - 1);
    const float4 scalars = stage.scalars[t];
    const float e = kByKey ? 1.0f : scalars.x, b = scalars.y, v = values[t * TILE];
    float y[N], d[COLS];
#ifdef BY_KEY
    float4 decayed[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      decayed[i] = times4(k[i], decays[i]);
      if (EMIT) q[i] = times4(q[i], decays[i]);
    }
#else
    const float4(&decayed)[QUADS] = k;
#endif
#pragma unroll
    for (int c = 0; c < COLS; c++) {
      y[c] = dot(slice.s[c], decayed);
      if (EMIT) y[COLS * (N / COLS - 1) + c] = dot(slice.s[c], q);
    }
    if (EMIT) load_keys(q, stage.q[next]);
    const float sum = sum_lanes(y), mine = b * fmaf(-e, sum, v);
    float d_own = 0.0f;
#pragma unroll
    for (int c = 0; c < COLS; c++) {
      d[c] = __shfl_sync(0xffffffffu, mine, (lane - sub) + c * SHARE);
      if (own == c) d_own = d[c];
#pragma unroll
      for (int i = 0; i < QUADS; i++) {
        float4& s = slice.s[c][i];
#ifdef BY_KEY
        s = times4(s, decays[i]);
#endif
        s = make_float4(fmaf(k[i].x, d[c], e * s.x), fmaf(k[i].y, d[c], e * s.y), fmaf(k[i].z, d[c], e * s.z),
                        fmaf(k[i].w, d[c], e * s.w));
      }
    }
    load_keys(k, stage.k[next]);
#ifdef BY_KEY
    load_keys(decays, stage.e[next]);
#endif
    if (EMIT) {
      const float o = fmaf(e, sum, d_own * scalars.z) * 0.08838834764831845f;  // DIM ** -0.5
      if (sub >= LANES / 2 && sub % SHARE == 0) *out = o;
      out += STRIDE;
    }
  }
}

// Read once and written once a round: the second-level cache is left to the rest.
__device__ __forceinline__ void move_state(Slice& slice, float* state, bool store) {
  float* at = state + threadIdx.x / LANES * COLS * DIM + threadIdx.x % LANES * 4;
#pragma unroll
  for (int c = 0; c < COLS; c++) {
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      float4* p = reinterpret_cast<float4*>(at + c * DIM + i * LANES * 4);
      if (store) {
        __stcs(p, slice.s[c][i]);
      } else {
        slice.s[c][i] = __ldcs(p);
      }
    }
  }
}

struct RowsArgs {
  float* state;
  const float *rec_k, *rec_v, *fold_k, *fold_v, *fold_e, *fold_b, *q, *k, *v, *e, *kq, *b;
  Meta meta;
};

// What becomes of o. All methods are called by all threads.
struct Stored {  // out [row, v_head, value]; rows of no sequence become zeros
  static constexpr int STRIDE = VD;
  float* out;
  __device__ __forceinline__ void start(const Meta&) const {}
  __device__ __forceinline__ void fetch(int, int, int) const {}  // rows of a stage, beside their keys and values
  __device__ __forceinline__ void meet() const {}
  __device__ __forceinline__ void clear(const Meta& meta) const { clear_rest<TILE, VD, THREADS>(meta, place(0)); }
  __device__ __forceinline__ float* place(int row) const {  // of the stage's first row, this block's first column
    return out + static_cast<i64>(row) * VD + blockIdx.x * DIM + blockIdx.y * TILE;
  }
  __device__ __forceinline__ void finish(int, int, int) const {}  // the stage's o is there
};

template <class Out>
__device__ __forceinline__ void run_rows(const RowsArgs& a, const Out& out, int* fault) {
  __shared__ __align__(16) Stage stages[2];
  const int h = blockIdx.x, column = blockIdx.y * TILE, s = blockIdx.z;
  Seq seq = read_seq(a.meta, s, fault);
  if (seq.chunked) seq.n = 0;
  if (seq.n + seq.fold == 0) {
    wait_for_predecessor();  // whoever starts after this kernel counts on gdn_conv
    out.clear(a.meta);
    return;
  }
  const i64 fold_row = static_cast<i64>(s) * a.meta.width, slot_row = static_cast<i64>(seq.slot) * a.meta.width;
  float* own = a.state + ((static_cast<i64>(seq.slot) * N_V + h) * DIM + column) * DIM;
  const int n_fold = (seq.fold + STAGE - 1) / STAGE, n_stage = n_fold + (seq.n + STAGE - 1) / STAGE;
  // pointers are made anew for every stage: a few instructions, where keeping them costs registers all along
  auto start_fetch = [&](int j) {
    if (j < n_stage) {
      const bool folds = j < n_fold, kept = seq.keep, in_place = folds && seq.in_place();
      const int first = (folds ? j : j - n_fold) * STAGE, count = min(STAGE, (folds ? seq.fold : seq.n) - first);
      const i64 row = seq.start + first, old = fold_row + first, record = slot_row + (folds ? 0 : seq.first) + first;
      const i64 at = in_place ? record : folds ? old : kept ? row : record;
      const i64 k_at = at * KD + KEY_HEAD(h) * DIM, v_at = at * VD + h * DIM + column;
      const Tokens from = {(in_place ? a.rec_k : folds ? a.fold_k : kept ? a.k : a.rec_k) + k_at,
                           (in_place ? a.rec_v : folds ? a.fold_v : kept ? a.v : a.rec_v) + v_at,
                           (folds ? a.fold_e + old * DECAYS : a.e + row * DECAYS) + h * (DECAYS / N_V),
                           (folds ? a.fold_b + old * N_V : a.b + row * N_V) + h,
                           folds ? nullptr : a.q + row * KD + KEY_HEAD(h) * DIM,
                           a.kq + row * N_K + KEY_HEAD(h)};
      fetch(stages[j % 2], from, count);
      if (!folds) out.fetch(j - n_fold, seq.start + first, count);
    }
    copies_commit();
  };

  Slice slice;
  move_state(slice, own, false);
  out.start(a.meta);
  wait_for_predecessor();
  start_fetch(0);
  out.clear(a.meta);
  out.meet();
#pragma unroll 1
  for (int j = 0; j < n_stage; j++) {
    start_fetch(j + 1);
    copies_wait_but_last();
    __syncthreads();
    if (j < n_fold) {
      advance<false>(slice, stages[j % 2], min(STAGE, seq.fold - j * STAGE), nullptr);
    } else {
      if (j == n_fold && j > 0 && !seq.keep && seq.first == 0) move_state(slice, own, true);
      const int t = (j - n_fold) * STAGE;
      advance<true, Out::STRIDE>(slice, stages[j % 2], min(STAGE, seq.n - t), out.place(seq.start + t));
    }
    __syncthreads();  // the next round's fetch overwrites this stage
    if (j >= n_fold) {
      const int t = (j - n_fold) * STAGE;
      out.finish(j - n_fold, seq.start + t, min(STAGE, seq.n - t));
    }
  }
  if (seq.keep) move_state(slice, own, true);
}

// grid (N_V, DIM / TILE, sequences), 128 threads. state [slot, v_head, value, key] in place, out [row, v_head, value]
// written; the rest is gdn_conv's. Launched so that its state may load while gdn_conv still runs.
extern "C" __global__ void __launch_bounds__(THREADS, ALONE)
    gdn_rows(float* state, const float* rec_k, const float* rec_v, const float* fold_k, const float* fold_v,
             const float* fold_e, const float* fold_b, const float* q, const float* k, const float* v, const float* e,
             const float* kq, const float* b, const int* seq_slot, const int* seq_start, const int* seq_fold,
             const int* seq_keep, int n_slot, int width, int n_row, int chunked, int* fault, float* out) {
  let_successor_start();
  const Meta meta = {seq_slot, seq_start, seq_fold, seq_keep, n_slot, width, n_row, chunked};
  run_rows({state, rec_k, rec_v, fold_k, fold_v, fold_e, fold_b, q, k, v, e, kq, b, meta}, Stored{out}, fault);
}

#if __CUDA_ARCH__ >= 900 && !defined(BY_KEY)
#include "gdn_into.cuh"

// As gdn_rows, in clusters of a head's blocks. gate [row, gate_stride] from v_head 0 on, norm [value];
// blocks sums powers pad as in rows.cu; next.. what is fetched to L2 for the product (Prefetch). Rows of no sequence stay as they are.
extern "C" __global__ void __cluster_dims__(1, PEERS, 1) __launch_bounds__(THREADS, BLOCKS)
    gdn_rows_into(float* state, const float* rec_k, const float* rec_v, const float* fold_k, const float* fold_v,
                  const float* fold_e, const float* fold_b, const float* q, const float* k, const float* v,
                  const float* e, const float* kq, const float* b, const int* seq_slot, const int* seq_start,
                  const int* seq_fold, const int* seq_keep, int n_slot, int width, int n_row, int chunked, int* fault,
                  const float* gate, i64 gate_stride, const float* norm, float eps, float power, u16* blocks,
                  float* sums, float* powers, int pad, const u8* next, i64 next_share, int n_share, int n_piece) {
  let_successor_start();
  __shared__ __align__(16) OnTheWay shared;
  const Meta meta = {seq_slot, seq_start, seq_fold, seq_keep, n_slot, width, n_row, chunked};
  const Into into = {shared, {next, next_share, n_share, n_piece}, gate, norm, gate_stride, eps, power, blocks, sums, powers, pad};
  run_rows({state, rec_k, rec_v, fold_k, fold_v, fold_e, fold_b, q, k, v, e, kq, b, meta}, into, fault);
}
#endif
