// index_rows: which compressed rows each token attends to. Three launches: rows of queries become operands; every key is scored; the best
// are chosen.
//
//   q, w         [row, HEADS, DIM], [row, HEADS]  f32  as products give them, rows `q_step` and `w_step` apart; no w: all weights are one
//   freq         [N_ROT / 2]                f64    of the turn of queries' last dims
//   keys         [pool row, DIM]            T      KV_KIND 1: f16, 2: bf16
//   page_table   [seq, n_col]               int64
//   positions    [row]                      int64
//   row_seq      [row]                      int32  -1: padding; it chooses nothing
//   seq_start    [seq + 1]                  int32
//   packed       [row - first, RECORD]      bytes  a row's queries as T in the order that products read, then its weights as f32
//   scores       [row - first, stride]      f32    of keys that the row sees; what stands behind is anybody's
//   out          [row, top_k]               int32  ascending; -1 behind the last
//   fault        [5]                        int32  see bounds.cuh
//
// Keys are on the M side of products, heads on N: a warp keeps its keys in registers and goes through the rows with them, so keys are
// read once for as many rows as one item has, and no width of a verify is special. Dims are summed in an order of their own (a lane's 8
// of every 32 lie side by side), the same for both operands. A score's bits depend on its row and key alone.
//
// Macros: HEADS, DIM, N_ROT, KV_KIND, OP_ID; PAD where warpgroups multiply (index_rows_wgmma.cuh): heads, rounded up to what they take.
#include "blocks.cuh"
#include "mma.cuh"
#include "overlap.cuh"
#include "turns.cuh"

constexpr int STEPS = DIM / 32;
constexpr u32 ALL = 0xffffffffu;
#if KV_KIND == 2
#define INDEX_MMA mma_bf16
#define INDEX_T "bf16"
#define LARGEST 3.3895314e38f
#else
#define INDEX_MMA mma_f16
#define INDEX_T "f16"
#define LARGEST 65504.f
#endif

constexpr int PACKERS = 128;  // threads of index_rows_pack
static_assert(DIM % 32 == 0 && DIM <= 128, "a warp's keys fill its registers");

// Cut to what T holds; NaN stays NaN.
__device__ __forceinline__ float cut(float x) { return x > LARGEST ? LARGEST : x < -LARGEST ? -LARGEST : x; }

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn." INDEX_T "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(cut(high)), "f"(cut(low)));
  return both;
}

__device__ __forceinline__ float positive(float x) {  // NaN stays NaN
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(0.f));
  return y;
}

// 16 bytes of a row's operand: four pairs of one head's dims from `dim` on, `step` apart, and which 16 they are.
struct Chunk {
  int head, dim, step, to;
};

// A warp's 16 keys from `first` on as the left operand of products: a[step of 16 dims]. Zeros stand behind the last key.
__device__ __forceinline__ void load_sixteen(u32 (&a)[2 * STEPS][4], const u16* keys, const Blocks& blocks, int seq, int first, int n_key,
                                             int* fault) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = first + 8 * half + g;
    const bool real = key < n_key;
    const u16* from = keys + (real ? blocks.row(seq, key, OP_ID, fault) : 0) * DIM + 8 * t;
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (real) x = __ldcg(reinterpret_cast<const uint4*>(from + 32 * j));
      a[2 * j][half] = x.x, a[2 * j][2 + half] = x.y;
      a[2 * j + 1][half] = x.z, a[2 * j + 1][2 + half] = x.w;
    }
  }
}

#include "index_rows_items.cuh"
#ifdef PAD
#include "index_rows_wgmma.cuh"
#else
#include "index_rows_mma.cuh"
#endif

// Grid (row, any), block PACKERS. Rows that see no more keys than they may choose are not packed.
extern "C" __global__ void __launch_bounds__(PACKERS)
index_rows_pack(const float* q, const float* w, const double* freq, const i64* table, const i64* positions, const int* row_seq,
                u8* packed, int* fault, i64 q_step, i64 w_step, int n_col, int page_size, int ratio, int per_page, int n_page, int top_k,
                int first) {
  let_successor_start();
  __shared__ float2 angles[N_ROT / 2];
  const int row = first + blockIdx.x, seq = row_seq[row];
  const Blocks blocks = {table, n_col, page_size, ratio, per_page, n_page};
  const bool wanted = seq >= 0 && blocks.seen(positions[row], OP_ID, seq, fault) > top_k;
  if (wanted)
    for (int i = threadIdx.x; i < N_ROT / 2; i += PACKERS) angles[i] = turn_of(static_cast<double>(positions[row]), freq[i]);
  __syncthreads();
  wait_for_predecessor();
  if (!wanted) return;
  u8* const to = packed + static_cast<i64>(blockIdx.x) * RECORD;
  for (int i = blockIdx.y * PACKERS + threadIdx.x; i < QUERY_BYTES / 16; i += gridDim.y * PACKERS) {
    const Chunk at = chunk_of(i);
    u32 both[4];
#pragma unroll
    for (int p = 0; p < 4; p++) {
      const int dim = at.dim + p * at.step;
      float2 x = make_float2(0.f, 0.f);
      if (at.head < HEADS) x = *reinterpret_cast<const float2*>(q + row * q_step + at.head * DIM + dim);
      if (dim >= DIM - N_ROT) x = turned(x.x, x.y, angles[(dim - (DIM - N_ROT)) / 2]);
      both[p] = pack(x.x, x.y);
    }
    reinterpret_cast<uint4*>(to)[at.to] = make_uint4(both[0], both[1], both[2], both[3]);
  }
  if (blockIdx.y == 0)
    for (int i = threadIdx.x; i < PADDED; i += PACKERS)
      reinterpret_cast<float*>(to + QUERY_BYTES)[i] = i >= HEADS ? 0.f : w == nullptr ? 1.f : w[row * w_step + i];
}

#include "index_rows_choose.cuh"
