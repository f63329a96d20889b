// Keys and values of two bytes for attend.cu: how a warp queues them, and its products with q and with the weights.
//
// A step is 2 KB, 32 keys x 32 dims: of K the warp's own 32 keys, of V its own 32 dims. Nothing is converted.
#pragma once

#if K_KIND < 3
// Where the 8 dims of `piece` lie among the fragments of q: step and lane % 4.
__device__ __forceinline__ int q_step(int piece) { return piece / 4; }
__device__ __forceinline__ int q_lane(int piece) { return piece % 4; }

__device__ __forceinline__ void fetch_keys(const Shared& s, const Stream& f, const Lane& me, int range, int step, u32 to) {
  const int key = range * RANGE + 32 * me.warp + 4 * me.g;
  const i64 row = row_of(s, key);
  const u16* from = f.keys() + row * f.row_stride + 32 * step + 8 * me.t;
#pragma unroll
  for (int x = 0; x < 4; x++) copy16(to + x * 512 + (4 * me.g + me.t) * 16, from + x * f.row_stride, is_seen(f, key + x));
}

// S[key, column] of the warp's 32 keys. Rows g and g + 8 of M tile i are keys 4 g + 2 i and 4 g + 2 i + 1.
__device__ __forceinline__ void scores(const Shared& s, const Stream& f, const Lane& me, int& step, int& slot,
                                       float (&acc)[2][N_TILE][4]) {
  clear(acc);
  const int lane = 4 * me.g + me.t;
#pragma unroll 1
  for (int c = 0; c < WARPS; c++) {
    wait_oldest();
    uint4 k[4];
#pragma unroll
    for (int x = 0; x < 4; x++)
      k[x] = *reinterpret_cast<const uint4*>(s.queue[me.warp][slot] + x * 512 + lane * 16);
    advance(s, f, me, step, slot);
#pragma unroll
    for (int n = 0; n < N_TILE; n++) {
      const uint2 q = kept(s.q[c][0][n], lane);
#pragma unroll
      for (int i = 0; i < 2; i++)
        mma<K_KIND>(acc[i][n], k[2 * i].x, k[2 * i + 1].x, k[2 * i].y, k[2 * i + 1].y, q.x, q.y);
    }
#pragma unroll
    for (int n = 0; n < N_TILE; n++) {
      const uint2 q = kept(s.q[c][1][n], lane);
#pragma unroll
      for (int i = 0; i < 2; i++)
        mma<K_KIND>(acc[i][n], k[2 * i].z, k[2 * i + 1].z, k[2 * i].w, k[2 * i + 1].w, q.x, q.y);
    }
  }
}
#endif

#if V_KIND < 3
__device__ __forceinline__ void fetch_values(const Shared& s, const Stream& f, const Lane& me, int range, int step, u32 to) {
  // Four lanes take the 64 bytes of a key; key 8 t + x goes to place 4 x + t, turned so that no bank is hit twice.
  const int t = me.g % 4, x0 = me.g / 4, key = range * RANGE + 32 * step + 8 * t + x0;
  const i64 row = row_of(s, key);
  const u16* from = f.values() + row * f.row_stride + 32 * me.warp + 8 * me.t;
  const u32 at = to + (4 * x0 + t) * 64 + (me.t ^ t / 2 * 2) * 16;
#pragma unroll
  for (int j = 0; j < 4; j++) copy16(at + j * 512, from + 2 * j * f.row_stride, is_seen(f, key + 2 * j));
}

// O[dim, column] of the warp's 32 dims over the range. M tile i holds dims 4 g + 2 i (row g) and 4 g + 2 i + 1 (row g + 8).
__device__ __forceinline__ void values(const Shared& s, const Stream& f, const Lane& me, int& step, int& slot,
                                       float (&acc)[2][N_TILE][4]) {
  clear(acc);
  const int lane = 4 * me.g + me.t, turned = me.t * 64 + (me.g / 2 ^ me.t / 2 * 2) * 16 + me.g % 2 * 8;
#pragma unroll 1
  for (int c = 0; c < WARPS; c++) {
    wait_oldest();
    __syncwarp();  // other lanes' copies
#pragma unroll
    for (int half = 0; half < 2; half++) {  // 16 keys at a time
      u32 lo[2][2], hi[2][2];  // [M tile][key pair]: two keys of one dim
#pragma unroll
      for (int x = 0; x < 2; x++) {
        const char* at = s.queue[me.warp][slot] + (4 * half + 2 * x) * 256 + turned;
        const uint2 a = *reinterpret_cast<const uint2*>(at), b = *reinterpret_cast<const uint2*>(at + 256);
        lo[0][x] = __byte_perm(a.x, b.x, 0x5410);
        hi[0][x] = __byte_perm(a.x, b.x, 0x7632);
        lo[1][x] = __byte_perm(a.y, b.y, 0x5410);
        hi[1][x] = __byte_perm(a.y, b.y, 0x7632);
      }
      if (half) {
        __syncwarp();
        advance(s, f, me, step, slot);
      }
#pragma unroll
      for (int n = 0; n < N_TILE; n++) {
        const uint2 p = kept(s.p[c][half][n], lane);
#pragma unroll
        for (int i = 0; i < 2; i++) mma<V_KIND>(acc[i][n], lo[i][0], hi[i][0], lo[i][1], hi[i][1], p.x, p.y);
      }
    }
  }
}
#endif
