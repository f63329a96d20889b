// Scores by products of a warp, m16n8k16: 32 keys a warp, queries in shared memory one row ahead.
//
//   packed: for each 8 heads and 32 dims, lane 4 g + t has head g's 8 dims from 8 t on
#pragma once

constexpr int THREADS = 128, KEYS = 128;  // of a CTA
constexpr int N_TILE = (HEADS + 7) / 8, AT_ONCE = N_TILE % 2 == 0 ? 2 : 1;
constexpr int PADDED = N_TILE * 8, QUERY_BYTES = PADDED * DIM * 2, RECORD = QUERY_BYTES + PADDED * 4;

__device__ __forceinline__ Chunk chunk_of(int i) {
  const int lane = i % 32;
  return {i / 32 / STEPS * 8 + lane / 4, i / 32 % STEPS * 32 + lane % 4 * 8, 2, i};
}

struct alignas(16) Shared {
  u8 query[2][RECORD];
  Items items;
};

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
#pragma unroll
  for (int m = 0; m < 2; m++) load_sixteen(k.a[m], keys, blocks, seq, first + 16 * m, n_key, fault);
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
  const Group group = {first, n_row, n_all, first_seq, n_seq};
  find_items(s.items, blocks, positions, seq_start, group, top_k, stride, KEYS, KEYS, fault);
  wait_for_predecessor();  // the layout was there before; keys and operands were not
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, total = s.items.total;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Item it = item_of(s.items, group, index);
    fetch(s, packed, it.row, 0);
    copies_commit();
    Keys k;
    load_keys(k, keys, blocks, first_seq + it.seq, it.base + 32 * warp, it.n_key, fault);
    const int key = it.base + 32 * warp + lane;
#pragma unroll 1
    for (int r = 0; r < it.n; r++) {
      if (r + 1 < it.n) fetch(s, packed, it.row + r + 1, (r + 1) % 2);
      copies_commit();
      copies_wait<1>();
      __syncthreads();
      const float x = score(k, s.query[r % 2]);
      if (key < it.n_key) scores[static_cast<i64>(it.row + r) * stride + key] = x;
      __syncthreads();  // the buffer is filled again
    }
  }
}
