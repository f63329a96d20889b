// Worker threads that share the chunks of a loop with the thread that calls it.
#pragma once
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace pyspec {

using Chunk = void (*)(void *context, int64_t chunk);

// Threads that the running call may use, its own included; the pool starts as many workers as the largest number wants.
extern thread_local int n_thread;

// Not 0: workers that have nothing to do spin and do not sleep. Who expects loops within microseconds counts himself here.
extern std::atomic<int> n_watching;

// Run fn(context, i) once for every i below n_chunk, on this thread and on idle workers. Returns when all have ended.
// Where another thread uses the workers at the moment, this one runs all chunks itself, so two engines never wait for each other.
void share(int64_t n_chunk, Chunk fn, void *context);

// each(n, [&](int64_t i) { ... }): the same for a lambda.
template <typename F>
void each(int64_t n_chunk, F &&body) {
  using Body = std::remove_reference_t<F>;
  share(n_chunk, [](void *context, int64_t i) { (*static_cast<Body *>(context))(i); }, &body);
}

// each_range(n, grain, [&](int64_t first, int64_t last) { ... }): ranges of at least `grain` items.
template <typename F>
void each_range(int64_t n_item, int64_t grain, F &&body) {
  const int64_t most = n_item / (grain < 1 ? 1 : grain), many = int64_t(n_thread) * 4;
  const int64_t n = most < 1 ? 1 : (most < many ? most : many);
  each(n, [&](int64_t i) { body(n_item * i / n, n_item * (i + 1) / n); });
}

}  // namespace pyspec
