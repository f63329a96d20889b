// Experts on this machine: what a call is given, and the call (moe.cpp).
#pragma once
#include <cstdint>

namespace pyspec {

// One matrix of every expert
struct Stack {
  const uint8_t *weights;  // null: there is none
  const float *scale;      // [n_expert], or null
  const float *bias;       // [n_expert, n_out], or null
  const void *table;
  int64_t type, stride;  // bytes from one expert to the next
};

struct MoeArgs {
  const float *x;  // [row, n_in], and as whole numbers where inner matrices are packed
  const int16_t *q;
  const float *scales, *sums;
  const int32_t *ids;    // [row, n_used]; a choice of -1 is none: it adds nothing
  const float *weights;  // [row, n_used]
  Stack gate, up, down;
  const float *shared, *of_shared, *residual;  // [row, n_in] or null, its factor [row], [row, n_in] or null
  float *out;                                  // [row, n_in]
  int64_t n_row, n_in, n_ff, n_expert, n_used, shared_stride, residual_stride, act;
  double gate_limit, limit;  // cut gates at the first, ups at plus and minus the second; 0: do not. Of SITU its betas
};

}  // namespace pyspec

extern "C" void pyspec_moe(const pyspec::MoeArgs *args);
