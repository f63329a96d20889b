// The first index that left its bounds, for the host (cuda/faults.py).
#pragma once
#include <atomic>
#include <cstdint>

namespace pyspec {

// fault {tripped, op, place, index, limit}. False: out of bounds, and reported.
inline bool inside(int64_t index, int64_t limit, int64_t place, int64_t op, int32_t *fault) {
  if (index >= 0 && index < limit) return true;
  int32_t none = 0;
  if (std::atomic_ref<int32_t>(*fault).compare_exchange_strong(none, 1)) {
    const int64_t found[] = {op, place, index, limit};
    for (int i = 0; i < 4; i++) fault[1 + i] = int32_t(found[i]);
  }
  return false;
}

}  // namespace pyspec
