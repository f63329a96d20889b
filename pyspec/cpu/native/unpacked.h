// A matrix of a packed type as f32 (linear.cpp).
#pragma once
#include <cstdint>

struct UnpackArgs {
  const uint8_t *weights;
  float *out;  // [n_row, n_in]
  const void *table;
  int64_t type, n_row, n_in;
};

extern "C" void pyspec_unpack(const UnpackArgs *p);
