// A gated short convolution with deferred commit, in one launch. Meaning: short_conv/ref.py.
//
//   m      [row, 3 * CHANNELS]                 f32  gates b and c and inputs u side by side, rows `m_stride` apart
//   w      [CHANNELS, TAPS]                    f32
//   conv   [slot, TAPS - 1 + width, CHANNELS]  f32  in place: the window, then the products b * u of the last verify
//   out    [row, CHANNELS]                     f32
//   fault  [5]                                 i32  see bounds.cuh
//
// A block has 128 channels of a sequence, a lane 4 of them; its warps share STEP rows at a time. No other block writes these channels
// of the slot, so old rows are read before new ones are written: the window moves by the fold, a verify's products come behind it. Kept rows
// are shared between blocks, of which the first alone sees the window. Bound by latency: a row of a sequence is 16 bytes a channel.
// Macros: CHANNELS, TAPS (2 to 5).
#include "seq.cuh"
#include "overlap.cuh"
#include "conv.cuh"

#define OP_SHORT_CONV 14  // this op's number in fault records

constexpr int WARPS = 4, GROUP = 4, STEP = WARPS * GROUP;  // GROUP: rows of a warp at a time
static_assert(CHANNELS % 4 == 0 && TAPS >= 2 && TAPS - 1 <= WARPS, "a warp moves a row of the window");
static_assert(STEP >= TAPS - 1, "later steps do not see the window");

__device__ __forceinline__ float4 times4(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }

// b * u of one row.
__device__ __forceinline__ float4 product_of(const float* row) { return times4(quad(row), quad(row + 2 * CHANNELS)); }

// Rows first - (TAPS - 1) to first + count - 1 of a sequence, but those that the window has.
__device__ __forceinline__ void load_products(Raw<GROUP>& raw, const float* rows, i64 m_stride, int first, int count) {
  float4 b[GROUP + TAPS - 1], u[GROUP + TAPS - 1];
#pragma unroll
  for (int i = 0; i < GROUP + TAPS - 1; i++) {  // all of them under way at once
    const int r = first + i - (TAPS - 1);
    if (r >= 0 && i < count + TAPS - 1) b[i] = quad(rows + r * m_stride), u[i] = quad(rows + r * m_stride + 2 * CHANNELS);
  }
#pragma unroll
  for (int i = 0; i < GROUP + TAPS - 1; i++) {
    const int r = first + i - (TAPS - 1);
    if (r >= 0 && i < count + TAPS - 1) raw.x[i] = times4(b[i], u[i]);
  }
}

// Grid (128 channels, stretches of kept rows, sequences), block 128.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
short_conv(const float* m, i64 m_stride, const float* w, float* conv, float* out, const int* seq_slot, const int* seq_start,
           const int* seq_fold, const int* seq_keep, int n_slot, int width, int n_row, int chunked, int* fault) {
  let_successor_start();
  const Meta meta = {seq_slot, seq_start, seq_fold, seq_keep, n_slot, width, n_row, chunked};
  const Seq seq = read_seq(meta, blockIdx.z, OP_SHORT_CONV, fault);
  const int warp = threadIdx.x / 32, channel = blockIdx.x * 128 + threadIdx.x % 32 * 4;
  const bool is_first = blockIdx.y == 0;
  const bool has_work = seq.n > 0 ? is_first || seq.keep : seq.fold_only && is_first;
  const bool is_in = has_work && channel < CHANNELS;
  int t = blockIdx.y * STEP;  // the first row of this step
  const int step = seq.keep ? gridDim.y * STEP : STEP;
  const int own = min(GROUP, (min(seq.n - t, STEP) + WARPS - 1) / WARPS);  // rows of a warp; of the last step they may be fewer
  int first = t + warp * own, count = min(own, seq.n - first);
  float* const window = conv + static_cast<i64>(seq.slot) * (TAPS - 1 + width) * CHANNELS + channel;
  const float* const folded = window + static_cast<i64>(seq.fold) * CHANNELS;
  const float* const rows = m + seq.start * m_stride + channel;
  const bool moves = is_in && is_first && warp < TAPS - 1 && seq.first == 0;
  const int from = seq.keep ? seq.n + warp : warp;  // moved by this warp: of window and rows, one after the other
  Raw<GROUP> raw;
  float4 moved;

  if (is_in) {  // the model's, and what the forward before this one left
    if (count > 0) load_window(raw, folded, first);
    if (moves && from < TAPS - 1) moved = quad(folded + static_cast<i64>(from) * CHANNELS);
  }
  const Taps taps(w + (is_in ? channel : 0) * TAPS);
  wait_for_predecessor();
  if (is_first && blockIdx.z == gridDim.z - 1 && channel < CHANNELS) {  // rows behind the last sequence's, which the next kernel reads all the same
    for (int row = max(seq_start[gridDim.z], 0) + warp; row < n_row; row += WARPS)
      quad(out + static_cast<i64>(row) * CHANNELS + channel) = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (is_in && count > 0) load_products(raw, rows, m_stride, first, count);
  if (moves && from >= TAPS - 1) moved = product_of(rows + (from - (TAPS - 1)) * m_stride);
  __syncthreads();  // everything old is read; what follows overwrites it
  if (moves) quad(window + static_cast<i64>(warp) * CHANNELS) = moved;
  if (!is_in) return;
#pragma unroll 1
  for (;;) {
#pragma unroll
    for (int j = 0; j < GROUP; j++) {
      if (j >= count) break;
      const float4 y = taps.sum(raw.x + j, make_float4(0.f, 0.f, 0.f, 0.f));
      const float4 c = quad(rows + (first + j) * m_stride + CHANNELS);
      if (!seq.keep) quad(window + static_cast<i64>(TAPS - 1 + seq.first + first + j) * CHANNELS) = raw.x[j + TAPS - 1];
      quad(out + static_cast<i64>(seq.start + first + j) * CHANNELS + channel) = times4(c, y);
    }
    t += step;
    if (t >= seq.n) break;
    const int more = min(GROUP, (min(seq.n - t, STEP) + WARPS - 1) / WARPS);
    first = t + warp * more, count = min(more, seq.n - first);
    if (count > 0) load_products(raw, rows, m_stride, first, count);
  }
}
