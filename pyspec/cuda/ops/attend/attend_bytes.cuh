// Keys and values of one byte for attend.cu, q8_0 and f8_e4m3: queued as they are, f16 when they leave shared memory.
//
// A step is 2 KB, 32 keys x 64 dims of K or 64 keys x 32 dims of V; with q8_0 the f16 scales of these keys follow, of two
// blocks of 32 dims each, because 4 bytes are the least that is copied. Codes become f16 exactly, code times scale is
// rounded to f16. A key that is not seen has code and scale 0.
#pragma once

#if K_KIND >= 3
// Where the 8 dims of `piece` lie among the fragments of q: a lane has 16 dims of a key in one step.
__device__ __forceinline__ int q_step(int piece) { return piece / 8 * 2 + piece % 2; }
__device__ __forceinline__ int q_lane(int piece) { return piece % 8 / 2; }
#endif

#if K_KIND >= 3 || V_KIND >= 3
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ __forceinline__ u32 minus(u32 a, u32 b) {
  u32 out;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// Four bytes as f16: the first two, the last two. `scale` multiplies both of q8_0.
template <int KIND>
__device__ __forceinline__ void widen(u32 x, u32 scale, u32& low, u32& high) {
  if constexpr (KIND == 3) {
    const u32 raised = x ^ 0x80808080u;  // code + 128; behind the byte of 1024 that is 1152 + code
    low = times(minus(__byte_perm(raised, 0x64646464u, 0x4140), 0x64806480u), scale);
    high = times(minus(__byte_perm(raised, 0x64646464u, 0x4342), 0x64806480u), scale);
  } else {
#if F8_CVT
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(low) : "h"(static_cast<u16>(x)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(high) : "h"(static_cast<u16>(x >> 16)));
#else
    // Exponent and mantissa in the places of f16's are 2^-8 of the value. NaN reads as 480 here.
    const u32 a = __byte_perm(x, 0u, 0x1404), b = __byte_perm(x, 0u, 0x3424);
    low = times(a & 0x80008000u | a >> 1 & 0x3f803f80u, 0x5c005c00u);
    high = times(b & 0x80008000u | b >> 1 & 0x3f803f80u, 0x5c005c00u);
#endif
  }
}
#endif

#if K_KIND == 3 || K_KIND == 4
__device__ __forceinline__ void fetch_keys(const Shared& s, const Stream& f, const Lane& me, int range, int step, u32 to) {
  const int key = range * RANGE + 32 * me.warp + 4 * me.g, lane = 4 * me.g + me.t;
  const i64 row = row_of(s, key);
  const u8* from = f.keys() + row * f.row_stride + 64 * step + 16 * me.t;
#pragma unroll
  for (int x = 0; x < 4; x++) copy16(to + x * 512 + lane * 16, from + x * f.row_stride, is_seen(f, key + x));
#if K_KIND == 3
  copy4(to + 2048 + 4 * lane, f.k_scale + (row + me.t) * (f.row_stride / 32) + 2 * step, is_seen(f, key + me.t));
#endif
}

// S[key, column] of the warp's 32 keys. Rows g and g + 8 of M tile i are keys 4 g + 2 i and 4 g + 2 i + 1.
__device__ __forceinline__ void scores(const Shared& s, const Stream& f, const Lane& me, int& step, int& slot,
                                       float (&acc)[2][N_TILE][4]) {
  clear(acc);
  const int lane = 4 * me.g + me.t;
#pragma unroll 1
  for (int c = 0; c < KEY_STEPS; c++) {
    wait_oldest();
    u32 k[4][4], scale[4] = {};
#pragma unroll
    for (int x = 0; x < 4; x++) {
      const uint4 y = *reinterpret_cast<const uint4*>(s.queue[me.warp][slot] + x * 512 + lane * 16);
      k[x][0] = y.x, k[x][1] = y.y, k[x][2] = y.z, k[x][3] = y.w;
    }
#if K_KIND == 3
    __syncwarp();  // other lanes' scales
    const uint4 y = *reinterpret_cast<const uint4*>(s.queue[me.warp][slot] + 2048 + 16 * me.g);
    const u32 block = me.t < 2 ? 0x1010 : 0x3232;
    scale[0] = __byte_perm(y.x, 0u, block), scale[1] = __byte_perm(y.y, 0u, block);
    scale[2] = __byte_perm(y.z, 0u, block), scale[3] = __byte_perm(y.w, 0u, block);
    __syncwarp();
#endif
    advance(s, f, me, step, slot);
#pragma unroll
    for (int m = 0; m < 4; m++) {  // 16 dims at a time
      u32 a[4], b[4];
#pragma unroll
      for (int x = 0; x < 4; x++) widen<K_KIND>(k[x][m], scale[x], a[x], b[x]);
#pragma unroll
      for (int n = 0; n < N_TILE; n++) {
        const uint2 q = kept(s.q[2 * c + m / 2][m % 2][n], lane);
#pragma unroll
        for (int i = 0; i < 2; i++) mma<K_KIND>(acc[i][n], a[2 * i], a[2 * i + 1], b[2 * i], b[2 * i + 1], q.x, q.y);
      }
    }
  }
}
#endif

#if V_KIND == 3 || V_KIND == 4
__device__ __forceinline__ void fetch_values(const Shared& s, const Stream& f, const Lane& me, int range, int step, u32 to) {
  // Two lanes take the 32 bytes of a key; of each 32 keys, 8 t + x goes to place 4 x + t: no bank is hit twice.
  const int lane = 4 * me.g + me.t, piece = lane % 2, t = lane / 2 % 4, x0 = lane / 8, first = range * RANGE + 64 * step;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const int key = first + 32 * c + 8 * t + x0;
    const u8* from = f.values() + row_of(s, key) * f.row_stride + 32 * me.warp + 16 * piece;
#pragma unroll
    for (int j = 0; j < 2; j++)
      copy16(to + 1024 * c + (4 * (x0 + 4 * j) + t) * 32 + 16 * piece, from + 4 * j * f.row_stride, is_seen(f, key + 4 * j));
#if V_KIND == 3
    const int own = first + 32 * c + lane;
    copy4(to + 2048 + 4 * (32 * c + lane), f.v_scale + row_of(s, own) * (f.row_stride / 32), is_seen(f, own));
#endif
  }
}

// O[dim, column] of the warp's 32 dims over the range. M tile i holds dims 4 g + 2 i (row g) and 4 g + 2 i + 1 (row g + 8).
__device__ __forceinline__ void values(const Shared& s, const Stream& f, const Lane& me, int& step, int& slot,
                                       float (&acc)[2][N_TILE][4]) {
  clear(acc);
  const int lane = 4 * me.g + me.t;
#pragma unroll 1
  for (int c = 0; c < WARPS / 2; c++) {
    wait_oldest();
    __syncwarp();  // other lanes' copies
#pragma unroll
    for (int part = 0; part < 4; part++) {  // 16 keys at a time
      const char* from = s.queue[me.warp][slot];
      const char* at = from + part / 2 * 1024 + part % 2 * 512 + me.t * 32 + 4 * me.g;
      u32 scale[2] = {};  // of two keys each
#if V_KIND == 3
      const uint4 y = *reinterpret_cast<const uint4*>(from + 2048 + 4 * (part / 2 * 32 + 8 * me.t + part % 2 * 4));
      const u32 block = me.warp % 2 ? 0x7632 : 0x5410;
      scale[0] = __byte_perm(y.x, y.y, block), scale[1] = __byte_perm(y.z, y.w, block);
#endif
      u32 lo[2][2], hi[2][2];  // [M tile][key pair]: two keys of one dim
#pragma unroll
      for (int x = 0; x < 2; x++) {
        const u32 a = *reinterpret_cast<const u32*>(at + 256 * x), b = *reinterpret_cast<const u32*>(at + 256 * x + 128);
        widen<V_KIND>(__byte_perm(a, b, 0x5140), scale[x], lo[0][x], hi[0][x]);
        widen<V_KIND>(__byte_perm(a, b, 0x7362), scale[x], lo[1][x], hi[1][x]);
      }
      if (part == 3) {
        __syncwarp();
        advance(s, f, me, step, slot);
      }
#pragma unroll
      for (int n = 0; n < N_TILE; n++) {
        const uint2 p = kept(s.p[2 * c + part / 2][part % 2][n], lane);
#pragma unroll
        for (int i = 0; i < 2; i++) mma<V_KIND>(acc[i][n], lo[i][0], hi[i][0], lo[i][1], hi[i][1], p.x, p.y);
      }
    }
  }
}
#endif
