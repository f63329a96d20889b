// index_rows: which compressed rows each token attends to. Three launches: rows of queries become operands; every key is scored; the best
// are chosen.
//
//   q, w         [row, HEADS, DIM], [row, HEADS]  f32  as products give them, rows `q_step` and `w_step` apart
//   freq         [N_ROT / 2]                f64    of the turn of queries' last dims
//   keys         [pool row, DIM]            T      KV_KIND 1: f16, 2: bf16
//   page_table   [seq, n_col]               int64
//   positions    [row]                      int64
//   row_seq      [row]                      int32  -1: padding; it chooses nothing
//   seq_start    [seq + 1]                  int32
//   packed       [row - first, RECORD]      bytes  a row's queries as T in fragment order, then its weights as f32
//   scores       [row - first, stride]      f32    of keys that the row sees; what stands behind is anybody's
//   out          [row, top_k]               int32  ascending; -1 behind the last
//   fault        [5]                        int32  see bounds.cuh
//
// Keys are on the M side of m16n8k16, heads on N: a warp keeps 32 keys in registers and goes through the rows with them, so keys are read
// once for as many rows as one item has, and no width of a verify is special. Dims are summed in an order of their own (a lane's 8
// of every 32 lie side by side), the same for both operands. Queries come through shared memory, one row ahead.
//
// Items are a tile of KEYS keys for some rows of a sequence, as many rows as leave every CTA about one item. Lengths are read on the
// device, the grid hangs on none of them. A score's bits depend on its row and key alone.
//
// Macros: HEADS, DIM, N_ROT, KV_KIND, OP_ID.
#include "blocks.cuh"
#include "mma.cuh"
#include "overlap.cuh"
#include "turns.cuh"

constexpr int MAX_SEQ = 128, THREADS = 128, KEYS = 128;  // of a CTA of index_rows_scores
constexpr int N_TILE = (HEADS + 7) / 8, STEPS = DIM / 32, AT_ONCE = N_TILE % 2 == 0 ? 2 : 1;
constexpr int QUERY_BYTES = N_TILE * 8 * DIM * 2, RECORD = QUERY_BYTES + N_TILE * 32;
constexpr u32 ALL = 0xffffffffu;
static_assert(DIM % 32 == 0 && DIM <= 128, "a warp's keys fill its registers");

#if KV_KIND == 2
#define INDEX_MMA mma_bf16
#define INDEX_T "bf16"
#define LARGEST 3.3895314e38f
#else
#define INDEX_MMA mma_f16
#define INDEX_T "f16"
#define LARGEST 65504.f
#endif

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

// Grid (row, any), block THREADS. Rows that see no more keys than they may choose are not packed.
extern "C" __global__ void __launch_bounds__(THREADS)
index_rows_pack(const float* q, const float* w, const double* freq, const i64* table, const i64* positions, const int* row_seq,
                u8* packed, int* fault, i64 q_step, i64 w_step, int n_col, int page_size, int ratio, int per_page, int n_page, int top_k,
                int first) {
  let_successor_start();
  __shared__ float2 angles[N_ROT / 2];
  const int row = first + blockIdx.x, seq = row_seq[row];
  const Blocks blocks = {table, n_col, page_size, ratio, per_page, n_page};
  const bool wanted = seq >= 0 && blocks.seen(positions[row], OP_ID, seq, fault) > top_k;
  if (wanted)
    for (int i = threadIdx.x; i < N_ROT / 2; i += THREADS) angles[i] = turn_of(static_cast<double>(positions[row]), freq[i]);
  __syncthreads();
  wait_for_predecessor();
  if (!wanted) return;
  u8* const to = packed + static_cast<i64>(blockIdx.x) * RECORD;
  for (int i = blockIdx.y * THREADS + threadIdx.x; i < QUERY_BYTES / 16; i += gridDim.y * THREADS) {
    const int lane = i % 32, head = i / 32 / STEPS * 8 + lane / 4, dim = i / 32 % STEPS * 32 + lane % 4 * 8;
    float x[8] = {};
    if (head < HEADS) {
      const float4* from = reinterpret_cast<const float4*>(q + row * q_step + head * DIM + dim);
      const float4 low = from[0], high = from[1];
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }
#pragma unroll
    for (int e = 0; e < 8; e += 2)
      if (dim + e >= DIM - N_ROT) {
        const float2 y = turned(x[e], x[e + 1], angles[(dim + e - (DIM - N_ROT)) / 2]);
        x[e] = y.x, x[e + 1] = y.y;
      }
    reinterpret_cast<uint4*>(to)[i] = make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
  }
  if (blockIdx.y == 0)
    for (int i = threadIdx.x; i < N_TILE * 8; i += THREADS)
      reinterpret_cast<float*>(to + QUERY_BYTES)[i] = i < HEADS ? w[row * w_step + i] : 0.f;
}

struct alignas(16) Shared {
  u8 query[2][RECORD];
  int start[MAX_SEQ], rows[MAX_SEQ], keys[MAX_SEQ];  // of each sequence, cut to the rows of this launch
  int first[MAX_SEQ];                                // its first item
  int warp_sum[THREADS / 32];
  int total, per;  // items; rows of an item
};

// Sum over the threads before this one; `all` of everybody's.
__device__ __forceinline__ int sum_before(Shared& s, int mine, int& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(ALL, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) s.warp_sum[warp] = sum;
  __syncthreads();
  int before = 0;
  all = 0;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) {
    before += i < warp ? s.warp_sum[i] : 0;
    all += s.warp_sum[i];
  }
  __syncthreads();
  return before + sum - mine;
}

struct Group {  // rows of this launch, and of the batch; its sequences
  int first, n, n_all, first_seq, n_seq;
};

__device__ __forceinline__ void find_items(Shared& s, const Blocks& blocks, const i64* positions, const int* seq_start,
                                           const Group& group, int top_k, int stride, int* fault) {
  const int mine = threadIdx.x, seq = group.first_seq + mine;
  int start = 0, rows = 0, keys = 0;
  if (mine < group.n_seq) {
    start = max(seq_start[seq], group.first);
    rows = min(min(seq_start[seq + 1], group.first + group.n), group.n_all) - start;
    if (rows > 0) keys = blocks.seen(positions[start + rows - 1], OP_ID, seq, fault);
    if (rows <= 0 || keys <= top_k || clamped(keys, stride + 1, OP_ID, seq, fault) != keys) rows = keys = 0;
    s.start[mine] = start, s.rows[mine] = rows, s.keys[mine] = keys;
  }
  const int tiles = (keys + KEYS - 1) / KEYS;
  int work, total;
  sum_before(s, rows * tiles, work);
  const int per = max(1, (work + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x));
  const int before = sum_before(s, tiles * ((rows + per - 1) / per), total);
  if (mine < group.n_seq) s.first[mine] = before;
  if (threadIdx.x == 0) s.total = total, s.per = per;
  __syncthreads();
}

// A row's record to shared memory.
__device__ __forceinline__ void fetch(Shared& s, const u8* packed, int row, int buffer) {
  const u8* from = packed + static_cast<i64>(row) * RECORD;
  for (int i = threadIdx.x; i < RECORD / 16; i += THREADS) copy16(shared_address(&s.query[buffer][16 * i]), from + 16 * i);
}

// A lane's keys: 8 of every 32 dims of keys g, g + 8, g + 16 and g + 24 of the warp's 32.
struct Keys {
  u32 a[2][2 * STEPS][4];
};

__device__ __forceinline__ void load_keys(Keys& k, const u16* keys, const Blocks& blocks, int seq, int first, int n_key, int* fault) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int key = first + 16 * m + 8 * half + g;
      const bool real = key < n_key;
      const u16* from = keys + (real ? blocks.row(seq, key, OP_ID, fault) : 0) * DIM + 8 * t;
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (real) x = __ldcg(reinterpret_cast<const uint4*>(from + 32 * j));
        k.a[m][2 * j][half] = x.x, k.a[m][2 * j][2 + half] = x.y;
        k.a[m][2 * j + 1][half] = x.z, k.a[m][2 * j + 1][2 + half] = x.w;
      }
    }
}

// Scores of a warp's 32 keys for the row in `query`; lane l gets that of key l.
__device__ __forceinline__ float score(const Keys& k, const u8* query) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 at = shared_address(query) + 16 * lane, weights = shared_address(query) + QUERY_BYTES + 8 * t;
  float sum[2][2] = {};
#pragma unroll 1
  for (int n = 0; n < N_TILE; n += AT_ONCE) {
    float acc[AT_ONCE][2][4] = {};
#pragma unroll
    for (int j = 0; j < STEPS; j++)
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const uint4 b = shared_16(at + ((n + i) * STEPS + j) * 512);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          float(&d)[4] = acc[i][m];
          const auto &x = k.a[m][2 * j], &y = k.a[m][2 * j + 1];
          INDEX_MMA(d, x[0], x[1], x[2], x[3], b.x, b.y, d[0], d[1], d[2], d[3]);
          INDEX_MMA(d, y[0], y[1], y[2], y[3], b.z, b.w, d[0], d[1], d[2], d[3]);
        }
      }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const uint2 both = shared_8(weights + 32 * (n + i));
      const float w[2] = {__uint_as_float(both.x), __uint_as_float(both.y)};
#pragma unroll
      for (int e = 0; e < 2; e++)
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            sum[m][half] = fmaf(positive(acc[i][m][2 * half + e]), w[e], sum[m][half]);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sum[m][half] += __shfl_xor_sync(ALL, sum[m][half], 1);
      sum[m][half] += __shfl_xor_sync(ALL, sum[m][half], 2);
    }
  const int from = lane % 8 * 4;  // key l is row l % 8 of half l / 8 % 2 of tile l / 16
  float mine = 0.f;
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float other = __shfl_sync(ALL, sum[m][half], from);
      if (lane / 8 == 2 * m + half) mine = other;
    }
  return mine;
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
index_rows_scores(const u8* packed, const u16* keys, const i64* table, const i64* positions, const int* seq_start, float* scores,
                  int* fault, int n_col, int page_size, int ratio, int per_page, int n_page, int top_k, int first, int n_row,
                  int n_all, int first_seq, int n_seq, int stride) {
  let_successor_start();
  extern __shared__ __align__(16) char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const Blocks blocks = {table, n_col, page_size, ratio, per_page, n_page};
  find_items(s, blocks, positions, seq_start, {first, n_row, n_all, first_seq, n_seq}, top_k, stride, fault);
  wait_for_predecessor();  // the layout was there before; keys and operands were not
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, total = s.total, per = s.per;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    int seq = 0;
    for (int step = MAX_SEQ / 2; step > 0; step /= 2)  // the last sequence that begins at or before the item
      if (seq + step < n_seq && s.first[seq + step] <= index) seq += step;
    const int n_key = s.keys[seq], tiles = (n_key + KEYS - 1) / KEYS, i = index - s.first[seq];
    const int begin = i / tiles * per, n = min(per, s.rows[seq] - begin), base = i % tiles * KEYS;
    const int row = s.start[seq] + begin - first;
    fetch(s, packed, row, 0);
    copies_commit();
    Keys k;
    load_keys(k, keys, blocks, first_seq + seq, base + 32 * warp, n_key, fault);
    const int key = base + 32 * warp + lane;
#pragma unroll 1
    for (int r = 0; r < n; r++) {
      if (r + 1 < n) fetch(s, packed, row + r + 1, (r + 1) % 2);
      copies_commit();
      copies_wait<1>();
      __syncthreads();
      const float x = score(k, s.query[r % 2]);
      if (key < n_key) scores[static_cast<i64>(row + r) * stride + key] = x;
      __syncthreads();  // the buffer is filled again
    }
  }
}

#include "index_rows_choose.cuh"
