// Keys and values of 4 and 5 bits for attend.cu: queued as they are, f16 when they leave shared memory.
//
// A step is 1 KB, 32 keys x 64 dims of K or 64 keys x 32 dims of V. With 5 bits 256 bytes of fifth bits follow, then factors:
// of K those of both blocks of a key, of V a word a key: those of its block if they are two, else one of each of a pair of
// blocks, because 4 bytes are the least that is copied. Codes become f16 exactly; code times scale, or that plus the least
// value, is rounded to f16. A key that is not seen has codes and factors 0.
#pragma once

#if K_KIND >= 5 || V_KIND >= 5
__device__ __forceinline__ void copy8(u32 to, const void* from, bool real) {  // zeros when not real
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(real ? 8 : 0) : "memory");
}

__device__ __forceinline__ u32 times_plus(u32 a, u32 b, u32 c) {
  u32 out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// Values of codes i and i + 4 of a word. fifth: their bits 4 at bits i + 4 and i + 20.
template <int KIND>
__device__ __forceinline__ u32 widen_bits(u32 word, u32 fifth, int i, u32 step, u32 least) {
  u32 code = word >> (4 * i) & 0x000f000fu | 0x64006400u;  // behind the bits of 1024
  if constexpr (n_bit(KIND) == 5) code |= fifth >> i & 0x00100010u;
  if constexpr (n_factor(KIND) == 2) return times_plus(minus(code, 0x64006400u), step, least);
  return times(minus(code, n_bit(KIND) == 5 ? 0x64106410u : 0x64086408u), step);
}
#endif

#if K_KIND >= 5
constexpr int KEY_FIFTH = 1024, KEY_FACTORS = 1024 + (n_bit(K_KIND) == 5 ? 256 : 0);  // where they lie in a step

__device__ __forceinline__ void fetch_keys(const Shared& s, const Stream& f, const Lane& me, int range, int step, u32 to) {
  const int key = range * RANGE + 32 * me.warp + 4 * me.g, lane = 4 * me.g + me.t;
  const i64 row = row_of(s, key), stride = f.row_stride / 8 * n_bit(K_KIND);
  const u8* from = f.keys() + row * stride + 32 * step + 8 * me.t;
#pragma unroll
  for (int x = 0; x < 4; x++) copy8(to + x * 256 + lane * 8, from + x * stride, is_seen(f, key + x));
  const bool own = is_seen(f, key + me.t);
  if constexpr (n_bit(K_KIND) == 5)
    copy8(to + KEY_FIFTH + 8 * lane, f.keys() + (row + me.t) * stride + DIM / 2 + 8 * step, own);
  const u16* factors = f.k_scale + (row + me.t) * (f.row_stride / 32 * K_FACTORS) + 2 * K_FACTORS * step;
  if constexpr (K_FACTORS == 2) copy8(to + KEY_FACTORS + 8 * lane, factors, own);
  else copy4(to + KEY_FACTORS + 4 * lane, factors, own);
}

// S[key, column] of the warp's 32 keys. Rows g and g + 8 of M tile i are keys 4 g + 2 i and 4 g + 2 i + 1.
__device__ __forceinline__ void scores(const Shared& s, const Stream& f, const Lane& me, int& step, int& slot,
                                       float (&acc)[2][N_TILE][4]) {
  clear(acc);
  const int lane = 4 * me.g + me.t;
#pragma unroll 1
  for (int c = 0; c < KEY_STEPS; c++) {
    wait_oldest();
    __syncwarp();  // other lanes' factors and fifth bits
    const char* from = s.queue[me.warp][slot];
    u32 k[4][2], fifth[4] = {}, factor[4], least[4] = {};
#pragma unroll
    for (int x = 0; x < 4; x++) {
      const uint2 y = *reinterpret_cast<const uint2*>(from + x * 256 + lane * 8);
      k[x][0] = y.x, k[x][1] = y.y;
      if constexpr (n_bit(K_KIND) == 5)
        fifth[x] = *reinterpret_cast<const u16*>(from + KEY_FIFTH + 8 * (4 * me.g + x) + 2 * me.t);
    }
    if constexpr (K_FACTORS == 2) {
#pragma unroll
      for (int x = 0; x < 4; x++) {
        const u32 y = *reinterpret_cast<const u32*>(from + KEY_FACTORS + 8 * (4 * me.g + x) + 4 * (me.t / 2));
        factor[x] = __byte_perm(y, 0u, 0x1010), least[x] = __byte_perm(y, 0u, 0x3232);
      }
    } else {
      const uint4 y = *reinterpret_cast<const uint4*>(from + KEY_FACTORS + 16 * me.g);
      const u32 block = me.t < 2 ? 0x1010 : 0x3232;
      factor[0] = __byte_perm(y.x, 0u, block), factor[1] = __byte_perm(y.y, 0u, block);
      factor[2] = __byte_perm(y.z, 0u, block), factor[3] = __byte_perm(y.w, 0u, block);
    }
    __syncwarp();
    advance(s, f, me, step, slot);
#pragma unroll
    for (int half = 0; half < 2; half++) {  // 8 dims of the lane: a word
      u32 high[4] = {};
      if constexpr (n_bit(K_KIND) == 5) {
#pragma unroll
        for (int x = 0; x < 4; x++) {
          const u32 own = fifth[x] >> (8 * half) & 0xffu;
          high[x] = own << 4 | own << 16;
        }
      }
#pragma unroll
      for (int m = 0; m < 2; m++) {  // 16 dims of all lanes
        u32 a[4], b[4];
#pragma unroll
        for (int x = 0; x < 4; x++) {
          a[x] = widen_bits<K_KIND>(k[x][half], high[x], 2 * m, factor[x], least[x]);
          b[x] = widen_bits<K_KIND>(k[x][half], high[x], 2 * m + 1, factor[x], least[x]);
        }
#pragma unroll
        for (int n = 0; n < N_TILE; n++) {
          const uint2 q = kept(s.q[2 * c + half][m][n], lane);
#pragma unroll
          for (int i = 0; i < 2; i++) mma<K_KIND>(acc[i][n], a[2 * i], a[2 * i + 1], b[2 * i], b[2 * i + 1], q.x, q.y);
        }
      }
    }
  }
}
#endif

#if V_KIND >= 5
constexpr int VALUE_FIFTH = 1024, VALUE_FACTORS = 1024 + (n_bit(V_KIND) == 5 ? 256 : 0);

__device__ __forceinline__ void fetch_values(const Shared& s, const Stream& f, const Lane& me, int range, int step, u32 to) {
  // A lane takes the 16 bytes of two keys; of each 32 keys, 8 t + x goes to place 4 x + t.
  const int lane = 4 * me.g + me.t, first = range * RANGE + 64 * step;
  const i64 stride = f.row_stride / 8 * n_bit(V_KIND);
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const int key = first + 32 * c + 8 * me.t + me.g, own = first + 32 * c + lane;
    const u8* from = f.values() + row_of(s, key) * stride + 16 * me.warp;
    const u32 at = to + 512 * c + 16 * lane;
    if constexpr (n_code(V_KIND, DIM) % 16 == 0) {
      copy16(at, from, is_seen(f, key));
    } else {
      copy8(at, from, is_seen(f, key));
      copy8(at + 8, from + 8, is_seen(f, key));
    }
    if constexpr (n_bit(V_KIND) == 5)
      copy4(to + VALUE_FIFTH + 4 * (32 * c + lane), f.values() + row_of(s, own) * stride + DIM / 2 + 4 * me.warp, is_seen(f, own));
    const u16* factors = f.v_scale + row_of(s, own) * (f.row_stride / 32 * V_FACTORS);
    copy4(to + VALUE_FACTORS + 4 * (32 * c + lane), factors, is_seen(f, own));
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
    for (int part = 0; part < 4; part++) {  // 16 keys at a time, four of them the lane's
      const char* from = s.queue[me.warp][slot];
      const int keys = 4 * (part / 2 * 32 + 8 * me.t + part % 2 * 4);
      const char* at = from + part / 2 * 512 + part % 2 * 256 + me.t * 16 + 2 * me.g;
      const uint4 y = *reinterpret_cast<const uint4*>(from + VALUE_FACTORS + keys);
      const u32 block = V_FACTORS == 1 && me.warp % 2 ? 0x7632 : 0x5410;
      const u32 factor[2] = {__byte_perm(y.x, y.y, block), __byte_perm(y.z, y.w, block)};  // of two keys each
      const u32 least[2] = {__byte_perm(y.x, y.y, 0x7632), __byte_perm(y.z, y.w, 0x7632)};
      u32 fifth[2] = {};
      if constexpr (n_bit(V_KIND) == 5) {
        const uint4 z = *reinterpret_cast<const uint4*>(from + VALUE_FIFTH + keys);
        const int to_four = 4 * me.g;
        fifth[0] = (z.x >> to_four & 15u) << 4 | (z.y >> to_four & 15u) << 20;
        fifth[1] = (z.z >> to_four & 15u) << 4 | (z.w >> to_four & 15u) << 20;
      }
      u32 lo[2][2], hi[2][2];  // [M tile][key pair]: two keys of one dim
#pragma unroll
      for (int x = 0; x < 2; x++) {
        const u32 a = *reinterpret_cast<const u16*>(at + 128 * x), b = *reinterpret_cast<const u16*>(at + 128 * x + 64);
        const u32 word = a | b << 16;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          lo[i][x] = widen_bits<V_KIND>(word, fifth[x], 2 * i, factor[x], least[x]);
          hi[i][x] = widen_bits<V_KIND>(word, fifth[x], 2 * i + 1, factor[x], least[x]);
        }
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
