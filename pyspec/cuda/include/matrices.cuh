// Operands of tensor cores from shared memory, four 8 x 8 matrices of 16-bit values at once.
#pragma once
#include "types.cuh"

struct Quad {
  u32 x[4];
};

__device__ __forceinline__ Quad matrices(u32 address) {  // four 8 x 8 of f16, a row of one at each lane's address
  Quad r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x[0]), "=r"(r.x[1]), "=r"(r.x[2]), "=r"(r.x[3])
               : "r"(address)
               : "memory");
  return r;
}

__device__ __forceinline__ Quad matrices_turned(u32 address) {
  Quad r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x[0]), "=r"(r.x[1]), "=r"(r.x[2]), "=r"(r.x[3])
               : "r"(address)
               : "memory");
  return r;
}
