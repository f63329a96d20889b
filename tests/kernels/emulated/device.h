// CUDA C++ and PTX as plain C++, for one kernel file. `asm` statements come here as calls of ptx_<instruction>, the operands
// in PTX's order (see translate.py); braces come as refs(...). Lines are those of the kernel's text.
#pragma once
#include "machine.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __restrict__ __restrict
#define __align__(n) alignas(n)
#define HERE int line = __builtin_LINE()

using emulator::u32;  // the kernels' own typedefs are the same types
using emulator::u64;

extern emulator::Dim threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

extern "C" int printf(const char*, ...);

// ---- arithmetic

#define BOTH(T)                                      \
  constexpr T min(T a, T b) { return b < a ? b : a; } \
  constexpr T max(T a, T b) { return a < b ? b : a; }
BOTH(int)
BOTH(u32)
BOTH(long long)
BOTH(u64)
BOTH(long)
BOTH(unsigned long)
constexpr u32 min(int a, u32 b) { return min(static_cast<u32>(a), b); }
constexpr u32 min(u32 a, int b) { return min(a, static_cast<u32>(b)); }
constexpr u32 max(int a, u32 b) { return max(static_cast<u32>(a), b); }
constexpr u32 max(u32 a, int b) { return max(a, static_cast<u32>(b)); }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }

inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float expf(float x) { return __builtin_expf(x); }
inline float exp2f(float x) { return __builtin_exp2f(x); }
inline float logf(float x) { return __builtin_logf(x); }
inline float log2f(float x) { return __builtin_log2f(x); }
inline float log1pf(float x) { return __builtin_log1pf(x); }
inline float tanhf(float x) { return __builtin_tanhf(x); }
inline float sinf(float x) { return __builtin_sinf(x); }
inline float cosf(float x) { return __builtin_cosf(x); }
inline float floorf(float x) { return __builtin_floorf(x); }
inline float ceilf(float x) { return __builtin_ceilf(x); }
inline float rintf(float x) { return __builtin_rintf(x); }
inline double rint(double x) { return __builtin_rint(x); }
inline float truncf(float x) { return __builtin_truncf(x); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline float __expf(float x) { return __builtin_expf(x); }
inline float __logf(float x) { return __builtin_logf(x); }
inline float __log2f(float x) { return __builtin_log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

template <class To, class From>
inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "equal sizes");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}
inline u32 __float_as_uint(float x) { return bits_as<u32>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __uint_as_float(u32 x) { return bits_as<float>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(__builtin_rintf(x)); }
inline int __ffs(u32 x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(u32 x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 both = static_cast<u64>(b) << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 one = selector >> (4 * i), byte = static_cast<u32>(both >> (8 * (one & 7))) & 255;
    out |= (one & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
  }
  return out;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
  return c;
}

// ---- threads together

inline void __syncthreads(HERE) { emulator::block_barrier(line, 0, 0); }
inline void __syncwarp(u32 mask = 0xffffffffu, HERE) { emulator::meet(line, "__syncwarp", mask, nullptr, emulator::nothing); }
inline void __threadfence(HERE) { emulator::interleave(line); }
inline void __threadfence_system(HERE) { emulator::interleave(line); }
inline void __threadfence_block(HERE) { emulator::interleave(line); }
inline void __nanosleep(u32, HERE) { emulator::pause(line); }
inline long long clock64(HERE) {
  emulator::pause(line);
  return emulator::clock();
}

inline int emulated_lane() { return threadIdx.x % 32; }

template <class T>
inline T exchanged(int line, const char* what, u32 mask, T value, int from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "4 or 8 bytes");
  emulator::Exchange e{0, 0, from};
  __builtin_memcpy(&e.value, &value, sizeof value);
  emulator::meet(line, what, mask, &e, emulator::exchange);
  __builtin_memcpy(&value, &e.got, sizeof value);
  return value;
}
template <class T>
inline T __shfl_sync(u32 mask, T value, int from, int width = 32, HERE) {
  const int lane = emulated_lane();
  return exchanged(line, "__shfl_sync", mask, value, lane / width * width + (from & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(u32 mask, T value, int other, int width = 32, HERE) {
  const int lane = emulated_lane(), from = lane ^ other;
  return exchanged(line, "__shfl_xor_sync", mask, value, from / width > lane / width ? lane : from);
}
template <class T>
inline T __shfl_up_sync(u32 mask, T value, u32 by, int width = 32, HERE) {
  const int lane = emulated_lane(), inside = lane % width;
  return exchanged(line, "__shfl_up_sync", mask, value, inside < static_cast<int>(by) ? lane : lane - static_cast<int>(by));
}
template <class T>
inline T __shfl_down_sync(u32 mask, T value, u32 by, int width = 32, HERE) {
  const int lane = emulated_lane(), inside = lane % width + static_cast<int>(by);
  return exchanged(line, "__shfl_down_sync", mask, value, inside >= width ? lane : lane + static_cast<int>(by));
}

inline u32 voted(int line, const char* what, u32 mask, u32 value, emulator::Together* run) {
  emulator::Vote v{value, 0};
  emulator::meet(line, what, mask, &v, run);
  return v.got;
}
inline u32 __ballot_sync(u32 mask, int p, HERE) { return voted(line, "__ballot_sync", mask, p != 0, emulator::ballot); }
inline int __any_sync(u32 mask, int p, HERE) { return voted(line, "__any_sync", mask, p != 0, emulator::ballot) != 0; }
inline int __all_sync(u32 mask, int p, HERE) { return voted(line, "__all_sync", mask, p != 0, emulator::ballot) == mask; }
inline int __reduce_add_sync(u32 mask, int x, HERE) { return voted(line, "__reduce_add_sync", mask, x, emulator::sum_signed); }
inline int __reduce_min_sync(u32 mask, int x, HERE) { return voted(line, "__reduce_min_sync", mask, x, emulator::least_signed); }
inline int __reduce_max_sync(u32 mask, int x, HERE) { return voted(line, "__reduce_max_sync", mask, x, emulator::most_signed); }

// ---- memory

template <class T>
inline T __ldg(const T* p) { return *p; }
template <class T>
inline T __ldcg(const T* p, HERE) {
  emulator::interleave(line);
  return *p;
}
template <class T>
inline void __stcg(T* p, T value) { *p = value; }
template <class T>
inline T __ldcs(const T* p) { return *p; }
template <class T>
inline void __stcs(T* p, T value) { *p = value; }
inline u64 __cvta_generic_to_shared(const void* p, HERE) { return emulator::shared_address(p, line); }

#define ATOMIC(name, expression)      \
  template <class T, class U>         \
  inline T name(T* p, U given, HERE) { \
    emulator::interleave(line);       \
    const T old = *p, x = static_cast<T>(given); \
    *p = expression;                  \
    return old;                       \
  }
ATOMIC(atomicAdd, old + x)
ATOMIC(atomicSub, old - x)
ATOMIC(atomicMin, (x < old ? x : old))
ATOMIC(atomicMax, (old < x ? x : old))
ATOMIC(atomicExch, x)
ATOMIC(atomicOr, old | x)
ATOMIC(atomicAnd, old & x)
template <class T, class U, class V>
inline T atomicCAS(T* p, U want, V given, HERE) {
  emulator::interleave(line);
  const T old = *p;
  if (old == static_cast<T>(want)) *p = static_cast<T>(given);
  return old;
}

// ---- PTX

template <class T, int N>
struct Refs {
  T* p[N];
};
template <class T, class... More>
inline Refs<T, 1 + sizeof...(More)> refs(const T& first, const More&... more) {
  return {{const_cast<T*>(&first), const_cast<T*>(&more)...}};
}

inline void ptx_mov_u32(int, int& out, int x) { out = x; }
inline void ptx_mov_u32(int, u32& out, u32 x) { out = x; }
inline void ptx_mov_b32(int, Refs<unsigned short, 2> out, u32 x) {
  *out.p[0] = static_cast<unsigned short>(x), *out.p[1] = static_cast<unsigned short>(x >> 16);
}
inline void ptx_mov_b32(int, u32& out, Refs<unsigned short, 2> x) { out = *x.p[0] | static_cast<u32>(*x.p[1]) << 16; }
inline void ptx_lop3_b32(int, u32& out, u32 a, u32 b, u32 c, int table) {
  out = 0;
  for (int i = 0; i < 8; ++i)
    if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
}
inline void ptx_cvt_rn_bf16_f32(int, unsigned short& out, float x) { out = emulator::bf16_of_f32(x); }
inline void ptx_cvt_rn_f16_f32(int, unsigned short& out, float x) { out = emulator::f16_of_f32(x); }
inline void ptx_cvt_f32_f16(int, float& out, unsigned short x) { out = emulator::f32_of_f16(x); }
inline void ptx_cvt_rn_f16x2_f32(int, u32& out, float high, float low) {
  out = static_cast<u32>(emulator::f16_of_f32(high)) << 16 | emulator::f16_of_f32(low);
}
inline void ptx_cvt_rn_bf16x2_f32(int, u32& out, float high, float low) {
  out = static_cast<u32>(emulator::bf16_of_f32(high)) << 16 | emulator::bf16_of_f32(low);
}
inline void ptx_ex2_approx_ftz_f32(int, float& out, float x) { out = __builtin_exp2f(x); }
inline void ptx_max_NaN_f32(int, float& out, float a, float b) { out = a != a || b != b ? __builtin_nanf("") : __builtin_fmaxf(a, b); }
inline void ptx_rcp_approx_ftz_f32(int, float& out, float x) { out = 1.0f / x; }

inline float f32_of_e4m3(u32 x) {  // sign, 4 bits of exponent, 3 of mantissa; no infinity
  const int power = x >> 3 & 15, mantissa = x & 7;
  if ((x & 0x7f) == 0x7f) return __builtin_nanf("");
  const float size = __builtin_ldexpf(power == 0 ? mantissa : 8 + mantissa, (power == 0 ? 1 : power) - 10);
  return x & 0x80 ? -size : size;
}
inline void ptx_cvt_rn_f16x2_e4m3x2(int, u32& out, unsigned short x) {
  out = static_cast<u32>(emulator::f16_of_f32(f32_of_e4m3(x >> 8))) << 16 | emulator::f16_of_f32(f32_of_e4m3(x & 255));
}

template <class F>
inline u32 in_halves(F f) {  // f of both halves' values, rounded once
  const u32 low = emulator::f16_of_f32(f(0)), high = emulator::f16_of_f32(f(16));
  return high << 16 | low;
}
inline float half_of(u32 x, int shift) { return emulator::f32_of_f16(static_cast<unsigned short>(x >> shift)); }
inline void ptx_sub_rn_f16x2(int, u32& out, u32 a, u32 b) {
  out = in_halves([&](int i) { return half_of(a, i) - half_of(b, i); });
}
inline void ptx_add_rn_f16x2(int, u32& out, u32 a, u32 b) {
  out = in_halves([&](int i) { return half_of(a, i) + half_of(b, i); });
}
inline void ptx_mul_rn_f16x2(int, u32& out, u32 a, u32 b) {
  out = in_halves([&](int i) { return half_of(a, i) * half_of(b, i); });
}
inline void ptx_fma_rn_bf16x2(int, u32& out, u32 a, u32 b, u32 c) {
  const auto of = [](u32 x, int i) { return static_cast<double>(__uint_as_float(x >> i << 16)); };
  const auto one = [&](int i) { return emulator::bf16_of_f32(static_cast<float>(of(a, i) * of(b, i) + of(c, i))); };
  out = static_cast<u32>(one(16)) << 16 | one(0);
}
inline void ptx_fma_rn_f16x2(int, u32& out, u32 a, u32 b, u32 c) {
  out = in_halves([&](int i) { return static_cast<float>(static_cast<double>(half_of(a, i)) * half_of(b, i) + half_of(c, i)); });
}

inline void product(int line, Refs<float, 4> d, Refs<u32, 4> a, Refs<u32, 2> b, Refs<float, 4> c, emulator::Together* run) {
  emulator::Product p;
  for (int i = 0; i < 4; ++i) p.a[i] = *a.p[i], p.d[i] = *c.p[i];
  for (int i = 0; i < 2; ++i) p.b[i] = *b.p[i];
  emulator::meet(line, "mma.sync", 0xffffffffu, &p, run);
  for (int i = 0; i < 4; ++i) *d.p[i] = p.d[i];
}
inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(int line, Refs<float, 4> d, Refs<u32, 4> a, Refs<u32, 2> b,
                                                                  Refs<float, 4> c) {
  product(line, d, a, b, c, emulator::product_f16);
}
inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(int line, Refs<float, 4> d, Refs<u32, 4> a, Refs<u32, 2> b,
                                                                    Refs<float, 4> c) {
  product(line, d, a, b, c, emulator::product_bf16);
}

inline void ptx_mma_sync_aligned_m16n8k8_row_col_f32_bf16_bf16_f32(int line, Refs<float, 4> d, Refs<u32, 2> a, Refs<u32, 1> b,
                                                                   Refs<float, 4> c) {
  emulator::Product p{{*a.p[0], *a.p[1], 0, 0}, {*b.p[0], 0}, {}};
  for (int i = 0; i < 4; ++i) p.d[i] = *c.p[i];
  emulator::meet(line, "mma.sync", 0xffffffffu, &p, emulator::product_bf16);
  for (int i = 0; i < 4; ++i) *d.p[i] = p.d[i];
}
inline void ptx_mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(int line, Refs<float, 4> d, Refs<u32, 4> a, Refs<u32, 2> b,
                                                                   Refs<float, 4> c) {
  product(line, d, a, b, c, emulator::product_tf32);
}
inline void ptx_prmt_b32(int, u32& out, u32 a, u32 b, u32 selector) { out = __byte_perm(a, b, selector); }
inline void product(int line, Refs<int, 4> d, Refs<u32, 4> a, Refs<u32, 2> b, Refs<int, 4> c, emulator::Together* run) {
  emulator::Whole p;
  for (int i = 0; i < 4; ++i) p.a[i] = *a.p[i], p.d[i] = *c.p[i];
  for (int i = 0; i < 2; ++i) p.b[i] = *b.p[i];
  emulator::meet(line, "mma.sync", 0xffffffffu, &p, run);
  for (int i = 0; i < 4; ++i) *d.p[i] = p.d[i];
}
inline void ptx_mma_sync_aligned_m16n8k32_row_col_s32_u8_s8_s32(int line, Refs<int, 4> d, Refs<u32, 4> a, Refs<u32, 2> b,
                                                                Refs<int, 4> c) {
  product(line, d, a, b, c, emulator::product_u8_s8);
}
inline void ptx_mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(int line, Refs<int, 4> d, Refs<u32, 4> a, Refs<u32, 2> b,
                                                                Refs<int, 4> c) {
  product(line, d, a, b, c, emulator::product_s8_s8);
}

inline void load_matrices(int line, Refs<u32, 4> out, u32 address, emulator::Together* run) {
  emulator::Matrices m{address, {}, line};
  emulator::meet(line, "ldmatrix", 0xffffffffu, &m, run);
  for (int i = 0; i < 4; ++i) *out.p[i] = m.got[i];
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(int line, Refs<u32, 4> out, u32 address) {
  load_matrices(line, out, address, emulator::matrices);
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(int line, Refs<u32, 4> out, u32 address) {
  load_matrices(line, out, address, emulator::matrices_turned);
}

inline void ptx_cvta_to_shared_u64(int line, u64& out, u64 p) { out = emulator::shared_address(reinterpret_cast<void*>(p), line); }
inline void ptx_createpolicy_fractional_L2__evict_first_b64(int, u64& out, double) { out = 1; }
template <int N>
inline void load_shared(int line, Refs<u32, N> out, u32 address) {
  const u32* from = reinterpret_cast<const u32*>(emulator::shared_at(address, 4 * N, 4 * N, line));
  for (int i = 0; i < N; ++i) *out.p[i] = from[i];
}
inline void ptx_ld_shared_v4_u32(int line, Refs<u32, 4> out, u32 address) { load_shared(line, out, address); }
inline void ptx_ld_shared_v2_u32(int line, Refs<u32, 2> out, u32 address) { load_shared(line, out, address); }
inline void ptx_ld_shared_u32(int line, u32& out, u32 address) { load_shared(line, Refs<u32, 1>{{&out}}, address); }

inline void ptx_cp_async_cg_shared_global(int line, u32 to, const void* from, int n) { emulator::copy_async(to, from, n, n, line); }
inline void ptx_cp_async_cg_shared_global_L2__128B(int line, u32 to, const void* from, int n) { emulator::copy_async(to, from, n, n, line); }
inline void ptx_cp_async_cg_shared_global(int line, u32 to, const void* from, int n, int real) {
  emulator::copy_async(to, from, n, real, line);
}
inline void ptx_cp_async_ca_shared_global(int line, u32 to, const void* from, int n) { emulator::copy_async(to, from, n, n, line); }
inline void ptx_cp_async_ca_shared_global(int line, u32 to, const void* from, int n, int real) {
  emulator::copy_async(to, from, n, real, line);
}
inline void ptx_cp_async_commit_group(int) { emulator::copies_commit(); }
inline void ptx_cp_async_wait_group(int, int n_left) { emulator::copies_wait(n_left); }

inline void ptx_mbarrier_init_shared__cta_b64(int line, u32 barrier, u32 n) { emulator::message_init(barrier, n, line); }
inline void ptx_mbarrier_arrive_shared__cta_b64(int line, u32 barrier) { emulator::message_arrive(barrier, 0, line); }
inline void ptx_mbarrier_arrive_shared__cluster_b64(int line, u32 barrier) { emulator::message_arrive_in_cluster(barrier, line); }
inline void ptx_mbarrier_arrive_expect_tx_shared__cta_b64(int line, u32 barrier, u32 n_bytes) {
  emulator::message_arrive(barrier, n_bytes, line);
}
inline void ptx_mbarrier_expect_tx_relaxed_cta_shared__cta_b64(int line, u32 barrier, u32 n_bytes) {
  emulator::message_expect(barrier, n_bytes, line);
}
inline void ptx_mbarrier_wait(int line, u32 barrier, u32 parity) { emulator::message_wait(barrier, parity, line); }
inline void ptx_cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(int line, u32 to, const void* from, u32 n_bytes,
                                                                                  u32 barrier) {
  emulator::copy_bulk(to, from, n_bytes, barrier, line);
}
inline void ptx_cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(int line, u32 to, const void* from, u32 n_bytes, u32 barrier, u64) {
  emulator::copy_bulk(to, from, n_bytes, barrier, line);
}

inline void ptx_cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes_multicast__cluster(int line, u32 to, const void* from, u32 n_bytes, u32 barrier, unsigned short blocks) {
  emulator::copy_bulk_to_all(to, from, n_bytes, barrier, blocks, line);
}

inline void ptx_barrier_cluster_arrive_relaxed_aligned(int line) { emulator::cluster_arrive(line); }
inline void ptx_barrier_cluster_wait_acquire_aligned(int line) { emulator::cluster_wait(line); }
inline void ptx_mapa_shared__cluster_u32(int line, u32& out, u32 address, u32 block) {
  out = emulator::address_in_cluster(address, block, line);
}
inline void ptx_st_async_weak_shared__cluster_mbarrier__complete_tx__bytes_f32(int line, u32 to, float x, u32 barrier) {
  emulator::send(to, &x, 4, barrier, line);
}
inline void ptx_st_async_weak_shared__cluster_mbarrier__complete_tx__bytes_v4_f32(int line, u32 to, Refs<float, 4> x, u32 barrier) {
  const float all[4] = {*x.p[0], *x.p[1], *x.p[2], *x.p[3]};
  emulator::send(to, all, 16, barrier, line);
}

inline void ptx_fence_mbarrier_init_release_cluster(int) {}
inline void ptx_cp_async_bulk_prefetch_L2_global(int, const void*, u32) {}
inline void ptx_prefetch_global_L2(int, const void*) {}
inline void ptx_griddepcontrol_wait(int) {}
inline void ptx_griddepcontrol_launch_dependents(int) {}
inline void ptx_fence_acq_rel_gpu(int line) { emulator::interleave(line); }
inline void ptx_bar_sync(int line, int id, int n_thread) { emulator::block_barrier(line, id, n_thread); }
template <int N>
inline void stream(Refs<u32, N> out, const void* from) {
  for (int i = 0; i < N; ++i) __builtin_memcpy(out.p[i], static_cast<const char*>(from) + 4 * i, 4);
}
inline void ptx_ld_global_nc_L1__no_allocate_v4_u32(int, Refs<u32, 4> out, const void* from) { stream(out, from); }
inline void ptx_ld_global_L1__no_allocate_v4_u32(int, Refs<u32, 4> out, const void* from) { stream(out, from); }
inline void ptx_ld_global_nc_L1__no_allocate_v2_u32(int, Refs<u32, 2> out, const void* from) { stream(out, from); }
inline void ptx_ld_global_L1__no_allocate_v2_u32(int, Refs<u32, 2> out, const void* from) { stream(out, from); }
inline void ptx_ld_global_nc_L1__no_allocate_u32(int, u32& out, const void* from) { stream(Refs<u32, 1>{{&out}}, from); }
inline void ptx_ld_global_L1__no_allocate_u32(int, u32& out, const void* from) { stream(Refs<u32, 1>{{&out}}, from); }
inline void ptx_ld_acquire_gpu_global_s32(int line, int& out, const int* p) {
  emulator::pause(line);
  out = *p;
}
inline void ptx_ld_relaxed_sys_global_u32(int line, u32& out, const u32* p) {
  emulator::pause(line);
  out = *p;
}
inline void ptx_ld_relaxed_sys_global_v4_u32(int line, Refs<u32, 4> out, const void* p) {
  for (int i = 0; i < 4; ++i) {  // each number arrives by itself
    if (i == 0) emulator::pause(line);
    else emulator::interleave(line);
    __builtin_memcpy(out.p[i], static_cast<const char*>(p) + 4 * i, 4);
  }
}
inline void ptx_st_relaxed_sys_global_v4_u32(int line, void* p, Refs<u32, 4> x) {
  for (int i = 0; i < 4; ++i) {
    emulator::interleave(line);
    __builtin_memcpy(static_cast<char*>(p) + 4 * i, x.p[i], 4);
  }
}
inline void ptx_atom_add_acq_rel_gpu_global_s32(int line, int& out, int* p, int x) { out = atomicAdd(p, x, line); }

template <int kSums>
inline void warpgroup_product(int line, int n, const Refs<float, kSums>& d, Refs<u32, 4> a, u64 b) {
  emulator::Warpgroup w{d.p, n, line, {*a.p[0], *a.p[1], *a.p[2], *a.p[3]}, b};
  emulator::meet(line, "wgmma", 0xffffffffu, &w, emulator::warpgroup_product);
}
#define WARPGROUP(n)                                                                                               \
  inline void ptx_wgmma_mma_async_sync_aligned_m64n##n##k16_f32_f16_f16(int line, const Refs<float, n / 2>& d, Refs<u32, 4> a, \
                                                                        u64 b, int, int, int, int) {         \
    warpgroup_product(line, n, d, a, b);                                                                           \
  }
WARPGROUP(8)
WARPGROUP(16)
WARPGROUP(32)
WARPGROUP(48)
WARPGROUP(64)
WARPGROUP(80)
WARPGROUP(96)
WARPGROUP(112)
WARPGROUP(128)
WARPGROUP(256)
inline void together(int line, const char* what) { emulator::meet(line, what, 0xffffffffu, nullptr, emulator::nothing); }
inline void ptx_wgmma_fence_sync_aligned(int line) {
  emulator::meet(line, "wgmma.fence", 0xffffffffu, nullptr, emulator::warpgroup_fence);
}
inline void ptx_wgmma_commit_group_sync_aligned(int line) {
  emulator::meet(line, "wgmma.commit_group", 0xffffffffu, nullptr, emulator::warpgroup_commit);
}
inline void ptx_wgmma_wait_group_sync_aligned(int line, int n_left) { emulator::warpgroup_wait(n_left, line); }
inline void ptx_setmaxnreg_inc_sync_aligned_u32(int line, int) { together(line, "setmaxnreg"); }
inline void ptx_setmaxnreg_dec_sync_aligned_u32(int line, int) { together(line, "setmaxnreg"); }

// ---- starting a kernel: its arguments lie behind pointers

template <class T>
inline T argument(void* p) { return *static_cast<T*>(p); }
template <class... T>
struct Caller {
  template <int... I>
  struct At {
    static void go(void (*f)(T...), void** args) { f(argument<T>(args[I])...); }
  };
};
template <int N, class C, int... I>
struct Counted : Counted<N - 1, C, N - 1, I...> {};
template <class C, int... I>
struct Counted<0, C, I...> : C::template At<I...> {};
template <class... T>
inline void start(void (*f)(T...), void** args) { Counted<sizeof...(T), Caller<T...>>::go(f, args); }
template <class... T>
inline void sizes_of(void (*)(T...), int* out) {
  const int sizes[] = {static_cast<int>(sizeof(T))...};
  for (u32 i = 0; i < sizeof...(T); ++i) out[i] = sizes[i];
  out[sizeof...(T)] = 0;
}
