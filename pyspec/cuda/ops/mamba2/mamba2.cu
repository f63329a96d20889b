// Mamba-2 with deferred commit, in two launches a layer, built as gdn.cu is. The meaning is mamba2_ref.py's; shapes by
// macro.
//
// mamba2_conv  one block per (128 channels of x, B or C; sequence; stretch of rows). It owns the channels in window
//              and records, so old ones are read before new ones are written and no other block sees either:
//              1. accepted records go to the fold buffers; 2. the window moves by the fold; 3. rows go through conv
//              and silu: C to a buffer; x and B to the records (verify) or to buffers (keep); blocks of x make the
//              steps and decays of their heads' rows from the raw dt.
// mamba2_rows  one block per (head, stretch of head_dim, sequence). A row of S [head_dim, state] lies in LANES lanes'
//              registers, COLS rows to a lane. The state comes in once, the fold runs over it, it goes out once, then
//              the rows run and write o. Verified rows never touch the stored state.
//
// Bound by: state bytes (read + write) at narrow verifies; at wide ones also fp32 issue (3 operations per state element
// and row, 2 per folded record). No token waits for a sum over lanes, only for the state's own decay and addition.
// A folded row runs the same operations on the state as a verified or kept one, and their order does not depend on
// COLS: a state does not depend on how its tokens came.
//
// Kept sequences of `chunked` rows and more go through mamba2_chunk.cu: mamba2_conv skips them, mamba2_rows only folds.
// A sequence of no rows is skipped whole, and so is one with a bad index, which is reported.
#include "seq.cuh"
#include "overlap.cuh"

#ifndef HEADS
#define HEADS 128   // heads
#define DIM 64      // of a head: 32, 64 or 128
#define GROUPS 8    // of heads that share B and C
#define N_STATE 128 // a multiple of 32 up to 128
#endif
#ifndef COLS
#define COLS 2    // rows of the state of a lane: 2, 4; changes no bit of the result
#define BLOCKS 5  // blocks of mamba2_rows on a multiprocessor: 65,536 / (128 * BLOCKS) registers a thread
#endif
#define LANES 8
#define TAPS 4
#define PARTS 2  // running sums of a dot product; with LANES it fixes the order of sums
#define THREADS 128
#define CONV_WARPS 4
#define SPAN 64  // rows of one mamba2_conv block where sequences are long
#define STAGE 8  // tokens in shared memory at a time, twice
#define OP_MAMBA2 7  // this op's number in fault records

constexpr int INNER = HEADS * DIM, WIDE = GROUPS * N_STATE, CHANNELS = INNER + 2 * WIDE;
constexpr int TILE = THREADS / LANES * COLS;  // rows of the state of a block
constexpr int QUADS = N_STATE / 4 / LANES;    // float4 of one row in a lane
constexpr int GROUP = 4;                      // rows of a warp of mamba2_conv at a time
constexpr int BLOCK_HEADS = 128 / DIM;        // of a block of mamba2_conv
static_assert(INNER % 128 == 0 && WIDE % 128 == 0, "a block of mamba2_conv has channels of one kind");
static_assert(128 % DIM == 0 && DIM % TILE == 0 && N_STATE % (4 * LANES) == 0 && HEADS % GROUPS == 0, "shapes");

#include "conv.cuh"
#include "lanes.cuh"
#if __CUDA_ARCH__ >= 900
#include "prefetch.cuh"
#endif

// ---- mamba2_conv ----------------------------------------------------------------------------------------------------

enum Part { X, B, C };

struct ConvArgs {
  const float *m, *dt, *a, *dt_bias, *conv_w, *conv_b;
  float *conv, *rec_x, *rec_b, *rec_e, *rec_t, *fold_x, *fold_b, *fold_e, *fold_t, *x, *b, *c, *e, *t;
  i64 m_stride, dt_stride;
  int width;
};

template <Part PART>
__device__ __forceinline__ void conv_part(const ConvArgs& a, const Seq& seq, int s) {
  constexpr int FIRST = PART == X ? 0 : PART == B ? INNER : INNER + WIDE, STRIDE = PART == X ? INNER : WIDE;
  constexpr int EARLY = 2;  // records of a warp that are loaded before the wait
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int channel = blockIdx.x * 128 + lane * 4, at = channel - FIRST, head0 = blockIdx.x * BLOCK_HEADS;
  const i64 slot_row = static_cast<i64>(seq.slot) * a.width, fold_row = static_cast<i64>(s) * a.width;
  float* record = (PART == X ? a.rec_x : a.rec_b) + slot_row * STRIDE + at;  // C has none
  const int span = blockIdx.z * SPAN, step = seq.keep ? gridDim.z * SPAN : SPAN;
  const int per_warp = min(GROUP, (min(seq.n - span, SPAN) + CONV_WARPS - 1) / CONV_WARPS);
  int first = span + warp * per_warp, count = min(per_warp, seq.n - first);
  const bool moves = blockIdx.z == 0 && warp < TAPS - 1 && seq.first == 0;
  const int from = seq.keep ? seq.n + warp : warp;  // moved by this warp: of window and rows, one after the other
  const bool folds = blockIdx.z == 0 && PART != C && !seq.in_place();  // others' records mamba2_rows reads where they are
  const int own = lane / BLOCK_HEADS, head = head0 + lane % BLOCK_HEADS;  // of X, the row and head a lane makes gates of
  const float* rows = a.m + seq.start * a.m_stride + channel;
  float* conv = a.conv + (slot_row + static_cast<i64>(seq.slot) * (TAPS - 1)) * CHANNELS + channel;
  Raw<GROUP> raw;
  float4 moved, old[EARLY];
  float old_e = 0.0f, old_t = 0.0f, dt = 0.0f;

  // The model's, and what the forward before this one left: nothing since then has written window and records.
  const Taps taps(a.conv_w + channel * TAPS);
  const float4 bias = quad(a.conv_b + channel);
  const float slope = PART == X ? a.a[head] : 0.0f, dt_bias = PART == X ? a.dt_bias[head] : 0.0f;
  const float* window = conv + static_cast<i64>(seq.fold) * CHANNELS;
  if (count > 0) load_window(raw, window, first);
  if (moves && from < TAPS - 1) moved = quad(window + static_cast<i64>(from) * CHANNELS);
  if (blockIdx.z == 0 && PART != C && seq.in_place()) fetch_records(record, warp, CONV_WARPS, seq.fold, STRIDE);
  if (folds) {
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
      const i64 t = warp + i * CONV_WARPS;
      if (t < seq.fold) old[i] = quad(static_cast<const float*>(record) + t * STRIDE);
    }
    if (PART == X && threadIdx.x < seq.fold * BLOCK_HEADS) {
      const i64 at = (slot_row + threadIdx.x / BLOCK_HEADS) * HEADS + head0 + threadIdx.x % BLOCK_HEADS;
      old_e = a.rec_e[at], old_t = a.rec_t[at];
    }
  }
  wait_for_predecessor();

  auto load_steps = [&] {
    if (PART == X && own < count) dt = a.dt[(seq.start + first + own) * a.dt_stride + head];
  };
  load_steps();
  if (count > 0) load_rows(raw, rows, a.m_stride, first, count);
  if (moves && from >= TAPS - 1) moved = quad(rows + (from - (TAPS - 1)) * a.m_stride);
  if (folds) {
    float* fold = (PART == X ? a.fold_x : a.fold_b) + fold_row * STRIDE + at;
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
      const i64 t = warp + i * CONV_WARPS;
      if (t < seq.fold) quad(fold + t * STRIDE) = old[i];
    }
#pragma unroll 4
    for (i64 t = warp + EARLY * CONV_WARPS; t < seq.fold; t += CONV_WARPS)
      quad(fold + t * STRIDE) = quad(static_cast<const float*>(record) + t * STRIDE);
    if (PART == X) {
      for (int i = threadIdx.x; i < seq.fold * BLOCK_HEADS; i += CONV_WARPS * 32) {
        const int t = i / BLOCK_HEADS, head = head0 + i % BLOCK_HEADS;
        const i64 from = (slot_row + t) * HEADS + head, to = (fold_row + t) * HEADS + head;
        const bool is_early = i == threadIdx.x;
        a.fold_e[to] = is_early ? old_e : a.rec_e[from];
        a.fold_t[to] = is_early ? old_t : a.rec_t[from];
      }
    }
  }
  __syncthreads();  // everything old is read; what follows overwrites it
  if (moves) quad(conv + static_cast<i64>(warp) * CHANNELS) = moved;
  int stretch = span;
  for (;;) {
    if (PART == X && own < count) {  // a lane makes step and decay of a row's head
      const int j = first + own;
      const i64 row = seq.start + j, to = row * HEADS + head, kept = (slot_row + seq.first + j) * HEADS + head;
      const float t = softplus(dt + dt_bias), e = expf(t * slope);
      a.t[to] = t;
      a.e[to] = e;
      if (!seq.keep) a.rec_t[kept] = t, a.rec_e[kept] = e;
    }
#pragma unroll
    for (int j = 0; j < GROUP; j++) {
      if (j >= count) break;
      const float4 y = taps(raw.x + j, bias);
      const i64 row = seq.start + first + j;
      if (!seq.keep) quad(conv + static_cast<i64>(TAPS - 1 + seq.first + first + j) * CHANNELS) = raw.x[j + TAPS - 1];
      if (PART == C) {
        quad(a.c + row * STRIDE + at) = y;
      } else if (seq.keep) {
        quad((PART == X ? a.x : a.b) + row * STRIDE + at) = y;
      } else {
        quad(record + static_cast<i64>(seq.first + first + j) * STRIDE) = y;
      }
    }
    first += per_warp * CONV_WARPS;
    if (first - warp * per_warp >= stretch + SPAN) first += step - SPAN, stretch += step;
    if (first - warp * per_warp >= seq.n) break;
    count = min(per_warp, seq.n - first);
    load_steps();
    if (count > 0) load_rows(raw, rows, a.m_stride, first, count);
  }
}

// grid (CHANNELS / 128, sequences, stretches), 128 threads.
//   m [row, m_stride], dt [row, dt_stride], a dt_bias [head], conv_w [channel, TAPS], conv_b [channel];
//   conv [slot, TAPS - 1 + width, channel] in place; rec_* [slot, width, ..] in place;
//   fold_x fold_b fold_e fold_t [seq, width, ..], x b c e t [row, ..] written (e is the decay, t the step).
extern "C" __global__ void __launch_bounds__(CONV_WARPS * 32, 4)
    mamba2_conv(const float* m, i64 m_stride, const float* dt, i64 dt_stride, const float* a, const float* dt_bias,
                const float* conv_w, const float* conv_b, float* conv, float* rec_x, float* rec_b, float* rec_e,
                float* rec_t, float* fold_x, float* fold_b, float* fold_e, float* fold_t, float* x, float* b, float* c,
                float* e, float* t, const int* seq_slot, const int* seq_start, const int* seq_fold, const int* seq_keep,
                int n_slot, int width, int n_row, int chunked, int* fault) {
  let_successor_start();
  const int channel = blockIdx.x * 128, s = blockIdx.y;
  const Meta meta = {seq_slot, seq_start, seq_fold, seq_keep, n_slot, width, n_row, chunked};
  Seq seq = read_seq(meta, s, OP_MAMBA2, fault);
  if (seq.chunked) seq.n = 0;
  const bool has_rows = static_cast<int>(blockIdx.z) * SPAN < seq.n && (blockIdx.z == 0 || seq.keep);
  if (!has_rows && !seq.fold_only) {
    wait_for_predecessor();  // whoever starts after this kernel counts on the one before
  } else {  // waits when it has loaded what was there before the forward
    const ConvArgs args = {m,      dt,     a,      dt_bias, conv_w, conv_b, conv, rec_x, rec_b,    rec_e,     rec_t,
                           fold_x, fold_b, fold_e, fold_t,  x,      b,      c,    e,     t,        m_stride,  dt_stride,
                           width};
    if (channel < INNER) {
      conv_part<X>(args, seq, s);
    } else if (channel < INNER + WIDE) {
      conv_part<B>(args, seq, s);
    } else {
      conv_part<C>(args, seq, s);
    }
  }
}

// ---- mamba2_rows ----------------------------------------------------------------------------------------------------

struct Stage {
  float b[STAGE][N_STATE], c[STAGE][N_STATE], x[STAGE][TILE];
  float2 scalars[STAGE];  // decay, step
};

struct Tokens {  // a run of records or of rows, pointers at this block's head, group and rows of the state
  const float *x, *b, *c, *e, *t;  // c null: only fold
};

__device__ __forceinline__ void fetch(Stage& stage, const Tokens& from, int count) {
  const int tid = threadIdx.x, at = tid % 32 * 4;
#pragma unroll 1
  for (int t = tid / 32; t < count; t += THREADS / 32) {
    if (at < N_STATE) {
      copy16(&stage.b[t][at], from.b + static_cast<i64>(t) * WIDE + at);
      if (from.c != nullptr) copy16(&stage.c[t][at], from.c + static_cast<i64>(t) * WIDE + at);
    }
    if (at < TILE) copy16(&stage.x[t][at], from.x + static_cast<i64>(t) * INNER + at);
  }
  if (tid < count) {
    copy4(&stage.scalars[tid].x, from.e + static_cast<i64>(tid) * HEADS);
    copy4(&stage.scalars[tid].y, from.t + static_cast<i64>(tid) * HEADS);
  }
}

struct Slice {  // the lane's share of its COLS rows of the state: columns (i * LANES + lane % LANES) * 4 .. + 3
  float4 s[COLS][QUADS];
};

__device__ __forceinline__ void load_columns(float4 (&out)[QUADS], const float (&from)[N_STATE]) {
#pragma unroll
  for (int i = 0; i < QUADS; i++) out[i] = quad(from + (i * LANES + threadIdx.x % LANES) * 4);
}

// Tokens over the slice: S <- e S + (t x) B^T. With EMIT also o = S C + d x.
template <bool EMIT>
__device__ __forceinline__ void advance(Slice& slice, const Stage& stage, int count, float d, float* out) {
  constexpr int SHARE = LANES / COLS;  // lanes that get the same sum
  const int sub = threadIdx.x % LANES, own = sub / SHARE, row0 = threadIdx.x / LANES * COLS;
  out += row0 + own;
#pragma unroll 1
  for (int t = 0; t < count; t++) {
    const float2 scalars = stage.scalars[t];
    float4 b[QUADS];
    load_columns(b, stage.b[t]);
#pragma unroll
    for (int r = 0; r < COLS; r++) {
      const float x = scalars.y * stage.x[t][row0 + r];
#pragma unroll
      for (int i = 0; i < QUADS; i++) {
        float4& s = slice.s[r][i];
        s = make_float4(fmaf(x, b[i].x, scalars.x * s.x), fmaf(x, b[i].y, scalars.x * s.y),
                        fmaf(x, b[i].z, scalars.x * s.z), fmaf(x, b[i].w, scalars.x * s.w));
      }
    }
    if (EMIT) {
      float4 c[QUADS];
      float y[COLS];
      load_columns(c, stage.c[t]);
#pragma unroll
      for (int r = 0; r < COLS; r++) y[r] = dot(slice.s[r], c);
      const float sum = sum_lanes(y);
      if (sub % SHARE == 0) *out = fmaf(d, stage.x[t][row0 + own], sum);
      out += INNER;
    }
  }
}

__device__ __forceinline__ void move_state(Slice& slice, float* state, bool store) {
  float* at = state + threadIdx.x / LANES * COLS * N_STATE + threadIdx.x % LANES * 4;
#pragma unroll
  for (int r = 0; r < COLS; r++) {
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      float* p = at + r * N_STATE + i * LANES * 4;
      if (store) {
        quad(p) = slice.s[r][i];
      } else {
        slice.s[r][i] = quad(p);
      }
    }
  }
}

// grid (HEADS, DIM / TILE, sequences), 128 threads. state [slot, head, head_dim, state] in place, d [head] read,
// out [row, head, head_dim] written, rows of no sequence as zeros; next..: prefetch.cuh's; the rest is mamba2_conv's. Launched so
// that its state may load while that runs.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    mamba2_rows(float* state, const float* __restrict__ d, const float* rec_x, const float* rec_b, const float* rec_e,
                const float* rec_t, const float* fold_x, const float* fold_b, const float* fold_e, const float* fold_t,
                const float* x, const float* b, const float* c, const float* e, const float* t, float* out,
                const int* seq_slot, const int* seq_start, const int* seq_fold, const int* seq_keep, int n_slot,
                int width, int n_row, int chunked, int* fault, const u8* next, i64 next_share, int n_share,
                int n_piece) {
  let_successor_start();
  __shared__ __align__(16) Stage stages[2];
  const int h = blockIdx.x, row0 = blockIdx.y * TILE, s = blockIdx.z, group = h / (HEADS / GROUPS);
  const Meta meta = {seq_slot, seq_start, seq_fold, seq_keep, n_slot, width, n_row, chunked};
  Seq seq = read_seq(meta, s, OP_MAMBA2, fault);
  if (seq.chunked) seq.n = 0;
  if (seq.n + seq.fold == 0) {
    wait_for_predecessor();  // whoever starts after this kernel counts on mamba2_conv
    clear_rest<TILE, INNER, THREADS>(meta, out + h * DIM + row0);
    return;
  }
  const i64 fold_row = static_cast<i64>(s) * width, slot_row = static_cast<i64>(seq.slot) * width;
  float* own = state + ((static_cast<i64>(seq.slot) * HEADS + h) * DIM + row0) * N_STATE;
  const int n_fold = (seq.fold + STAGE - 1) / STAGE, n_stage = n_fold + (seq.n + STAGE - 1) / STAGE;
  // pointers are made anew for every stage: a few instructions, where keeping them costs registers all along
  auto start_fetch = [&](int j) {
    if (j < n_stage) {
      const bool folds = j < n_fold, kept = seq.keep;
      const bool in_place = folds && seq.in_place();
      const int first = (folds ? j : j - n_fold) * STAGE, count = min(STAGE, (folds ? seq.fold : seq.n) - first);
      const i64 row = seq.start + first, old = fold_row + first, record = slot_row + (folds ? 0 : seq.first) + first;
      const i64 at = in_place ? record : folds ? old : kept ? row : record, scalar = in_place || folds ? at : row;
      const Tokens from = {(in_place ? rec_x : folds ? fold_x : kept ? x : rec_x) + at * INNER + h * DIM + row0,
                           (in_place ? rec_b : folds ? fold_b : kept ? b : rec_b) + at * WIDE + group * N_STATE,
                           folds ? nullptr : c + row * WIDE + group * N_STATE,
                           (in_place ? rec_e : folds ? fold_e : e) + scalar * HEADS + h,
                           (in_place ? rec_t : folds ? fold_t : t) + scalar * HEADS + h};
      fetch(stages[j % 2], from, count);
    }
    copies_commit();
  };

  Slice slice;
  move_state(slice, own, false);
#if __CUDA_ARCH__ >= 900
  if (s == 0 && meta.start[1] == meta.start[gridDim.z]) {  // states of several keep memory busy
    const Prefetch product = {next, next_share, n_share, n_piece};
    product.fetch((blockIdx.x * gridDim.y + blockIdx.y) * THREADS + threadIdx.x, gridDim.x * gridDim.y * THREADS);
  }
#endif
  const float weight = d[h];
  wait_for_predecessor();
  start_fetch(0);
  clear_rest<TILE, INNER, THREADS>(meta, out + h * DIM + row0);
#pragma unroll 1
  for (int j = 0; j < n_stage; j++) {
    start_fetch(j + 1);
    copies_wait_but_last();
    __syncthreads();
    if (j < n_fold) {
      advance<false>(slice, stages[j % 2], min(STAGE, seq.fold - j * STAGE), weight, nullptr);
    } else {
      if (j == n_fold && j > 0 && !seq.keep && seq.first == 0) move_state(slice, own, true);
      const int first = (j - n_fold) * STAGE;
      advance<true>(slice, stages[j % 2], min(STAGE, seq.n - first), weight,
                    out + static_cast<i64>(seq.start + first) * INNER + h * DIM + row0);
    }
    __syncthreads();  // the next round's fetch overwrites this stage
  }
  if (seq.keep) move_state(slice, own, true);
}
