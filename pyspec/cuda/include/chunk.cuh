// What kernels over chunks of rows share: where a chunk lies, and products whose left operands stay in registers.
// Macros: CHUNK. Whoever includes this has a read_seq(meta, s, fault).
#pragma once
#include "seq.cuh"
#include "mma.cuh"
#include "matrices.cuh"

struct Place {
  int s, chunk;  // sequence and which of its chunks; s < 0: none
};

// Chunks are numbered over all chunked sequences, one after another. All threads of a warp call these together.
__device__ __forceinline__ int chunks_of(const Meta& meta, int s, int n_seq, int* fault) {
  if (s >= n_seq) return 0;
  const Seq seq = read_seq(meta, s, fault);
  return seq.chunked ? (seq.n + CHUNK - 1) / CHUNK : 0;
}

__device__ __forceinline__ Place find_chunk(const Meta& meta, int index, int n_seq, int* fault) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int base = 0; base < n_seq; base += 32) {
    const int count = chunks_of(meta, base + lane, n_seq, fault);
    int sum = count;
#pragma unroll
    for (int hop = 1; hop < 32; hop *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, hop);
      if (lane >= hop) sum += other;
    }
    const u32 past = __ballot_sync(0xffffffffu, before + sum > index);
    if (past != 0) {
      const int at = __ffs(past) - 1;
      const int first = before + __shfl_sync(0xffffffffu, sum - count, at);
      return {base + at, index - first};
    }
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  return {-1, 0};
}

__device__ __forceinline__ int chunks_before(const Meta& meta, int s, int n_seq, int* fault) {
  int sum = 0;
  for (int i = threadIdx.x % 32; i < s; i += 32) sum += chunks_of(meta, i, n_seq, fault);
#pragma unroll
  for (int hop = 16; hop > 0; hop /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, hop);
  return sum;
}

__device__ __forceinline__ u32 f16_pair(float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

struct Halves {  // two numbers as sums of two f16: 22 bits of each that is not tiny
  u32 hi, lo;
};

__device__ __forceinline__ Halves halves(float a, float b) {
  const u32 hi = f16_pair(a, b);
  const float rest_a = a - f16_to_f32(static_cast<u16>(hi)), rest_b = b - f16_to_f32(static_cast<u16>(hi >> 16));
  return {hi, f16_pair(rest_a, rest_b)};
}

__device__ __forceinline__ void add_product(float (&d)[4], const Quad& a, u32 b0, u32 b1) {
  mma_f16(d, a.x[0], a.x[1], a.x[2], a.x[3], b0, b1, d[0], d[1], d[2], d[3]);
}

__device__ __forceinline__ void copy16_or_zero(u32 to, const void* from, bool any) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(any ? 16 : 0) : "memory");
}

template <int N>
struct Tiles {  // 16 values by 8 N keys or rows, as a product leaves them: lane 4 g + i has values g and g + 8 of
  float x[N][4];  // columns 2 i and 2 i + 1 of each 8
};

struct Power {  // of two, and its inverse
  float by, over;
};

__device__ __forceinline__ Power power_of(float most) {  // near `most`
  const float bounded = fminf(fmaxf(most, 7.888609052210118e-31f), 1.2676506002282294e30f);  // 2^-100, 2^100
  const u32 bits = __float_as_uint(bounded) & 0x7f800000u;
  return {__uint_as_float(bits), __uint_as_float((254u << 23) - bits)};
}

struct Scale {  // a power of two near the largest of a lane's two rows, and its inverse
  float by[2], over[2];
};

template <int N>
__device__ __forceinline__ Scale scale_of(const Tiles<N>& a) {
  Scale s;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float most = 0.0f;
#pragma unroll
    for (int n = 0; n < N; n++) most = fmaxf(most, fmaxf(fabsf(a.x[n][2 * r]), fabsf(a.x[n][2 * r + 1])));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const Power power = power_of(most);
    s.by[r] = power.by, s.over[r] = power.over;
  }
  return s;
}

struct Operand {  // 16 x 16, left of a product
  Quad hi, lo;
};

template <int N>
__device__ __forceinline__ Operand operand(const Tiles<N>& a, int k, const Scale& s) {
  Operand out;
#pragma unroll
  for (int i = 0; i < 4; i++) {  // values g, g + 8 of the first 8 columns, then of the second
    const float* x = a.x[2 * k + i / 2] + i % 2 * 2;
    const Halves h = halves(x[0] * s.over[i % 2], x[1] * s.over[i % 2]);
    out.hi.x[i] = h.hi, out.lo.x[i] = h.lo;
  }
  return out;
}

__device__ __forceinline__ void add_product3(float (&d)[2][4], const Operand& a, const Quad& hi, const Quad& lo) {
#pragma unroll
  for (int p = 0; p < 2; p++) add_product(d[p], a.hi, hi.x[2 * p], hi.x[2 * p + 1]);
#pragma unroll
  for (int p = 0; p < 2; p++) add_product(d[p], a.lo, hi.x[2 * p], hi.x[2 * p + 1]);
#pragma unroll
  for (int p = 0; p < 2; p++) add_product(d[p], a.hi, lo.x[2 * p], lo.x[2 * p + 1]);
}
