// Kinds of keys and values, by the numbers of slots/kv_types.py: 0 f32, 1 f16, 2 bf16, 3 q8_0, 4 f8_e4m3, 5 q5_1, 6 q5_0, 7 q4_1,
// 8 q4_0. Kinds from 5 on are packed: two codes a byte, and the fifth bits behind a head's halves (slots/kv_codes.py).
#pragma once
#include "types.cuh"

#define FACTORS_OF(kind) ((kind) == 5 || (kind) == 7 ? 2 : (kind) == 3 || (kind) == 6 || (kind) == 8 ? 1 : 0)
#ifdef K_KIND
#define K_FACTORS FACTORS_OF(K_KIND)
#define V_FACTORS FACTORS_OF(V_KIND)
#endif

__device__ constexpr int n_factor(int kind) { return FACTORS_OF(kind); }  // f16 factors of 32 dims
__device__ constexpr int n_bit(int kind) { return kind < 5 ? 8 : kind < 7 ? 5 : 4; }  // of a code that is no number
__device__ constexpr int n_code(int kind, int dim) { return dim * n_bit(kind) / 8; }  // elements of a head's codes

template <int KIND>
struct Codes {
  typedef u8 Plane;
};
template <>
struct Codes<0> {
  typedef float Plane;
};
template <>
struct Codes<1> {
  typedef u16 Plane;
};
template <>
struct Codes<2> {
  typedef u16 Plane;
};
