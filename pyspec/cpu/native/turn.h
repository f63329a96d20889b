// Rope of one head.
#pragma once
#include "prep.h"

namespace pyspec {

// Turn pairs (d, d + half) or (2 d, 2 d + 1) of a head.
inline void turn(float *x, const float *cos, const float *sin, int64_t half, bool neox) {
  if (!neox) {
    for (int64_t d = 0; d < half; d++) {
      const float a = x[2 * d], b = x[2 * d + 1];
      x[2 * d] = a * cos[d] - b * sin[d];
      x[2 * d + 1] = a * sin[d] + b * cos[d];
    }
    return;
  }
  by_eights(half, [&](int64_t d, auto get, auto put) {
    const f8 a = get(x + d), b = get(x + half + d), c = get(cos + d), s = get(sin + d);
    put(x + d, fma(a, c, -(b * s)));
    put(x + half + d, fma(b, c, a * s));
  });
}

}  // namespace pyspec
