// y = a x + y over rows: the smallest kernel, which tests of calls, tapes and threads use.
#include "pool.h"
#include "simd.h"

using namespace pyspec;

struct AxpyArgs {
  const float *x;
  float *y;
  int64_t n;
  double a;
};

extern "C" void pyspec_axpy(const AxpyArgs *p) {
  each_range(p->n, 64, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) p->y[i] += float(p->a) * p->x[i];
  });
}
