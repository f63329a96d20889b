#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace pyspec {

thread_local int n_thread = 1;
std::atomic<int> n_watching{0};

namespace {

constexpr int SPINS = 4000;  // about 40 us: a pause between two loops of one forward, not one between two forwards
constexpr int N_MOST = 256;
// A worker that a neighbour's thread displaced keeps the caller waiting for a time slice. Where that takes more of the loops' time than the
// worker saves, they run with one thread less for a while: a time that doubles while it happens again.
constexpr int64_t LATE_NS = 500'000, SHORTEST_NS = 10'000'000, LONGEST_NS = 320'000'000;
constexpr uint64_t OPEN = 1, INSIDE = 2;  // low half of `door`: open or not, and the workers inside; high half: the loop's number

inline int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// Of this thread
inline int64_t processor_ns() {
  timespec t;
  return clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) == 0 ? t.tv_sec * int64_t(1'000'000'000) + t.tv_nsec : 0;
}

thread_local int64_t ran_ns = 0;  // `processor_ns` at this thread's last late worker, or when workers came back

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Pool {
  std::atomic<uint64_t> door{0};
  std::atomic<uint32_t> number{0};  // workers sleep on it
  std::atomic<int64_t> next{0};
  std::atomic<int> seats{0};
  Chunk fn = nullptr;
  void *context = nullptr;
  int64_t n_chunk = 0;
  std::atomic_flag taken = ATOMIC_FLAG_INIT;  // a loop inside a loop finds it taken, too
  int n_worker = 0;
  std::atomic<int> awake{0};  // workers that loops of this many threads want; the others sleep on it
  // Written by the thread that has `taken`: threads that loops do without, until when, and for how long the last time
  int spared = 0;
  int64_t spared_until = 0, spare_for = 0;

  // The caller's part of a loop took from `began` to `ended`, and it waited for others until now; `ran`: its processor time early in the
  // wait, 0 if that was short. A wait much longer than its own part means that a worker lost its core. In the time t + w that n threads
  // take with a wait w for t of work each, n - 1 do n t of it if w = t / (n - 1). What the caller loses itself it loses either way, so t
  // is its processor time.
  void judge(int64_t began, int64_t ended, int64_t ran, int n) {
    const int64_t now = now_ns(), waited = now - ended;
    if (ran == 0 || waited <= LATE_NS + 2 * (ended - began)) return;
    const int64_t worked = ran - ran_ns;
    ran_ns = processor_ns();
    if ((n - 1) * waited < worked) return void(spare_for /= 4);
    spare_for = std::clamp(2 * spare_for, SHORTEST_NS, LONGEST_NS), spared_until = now + spare_for, spared++;
  }

  void give_back(int64_t now) {
    if (spared == 0 || now <= spared_until) return;
    spared = 0, ran_ns = processor_ns();
  }

  void run() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n_chunk;) fn(context, i);
  }

  void work(int index) {
    uint32_t seen = 0;
    while (true) {
      for (int n; index >= (n = awake.load(std::memory_order_acquire));) awake.wait(n, std::memory_order_acquire);
      uint32_t now;
      int spins = 0;
      while ((now = number.load(std::memory_order_acquire)) == seen) {
        if (n_watching.load(std::memory_order_relaxed) != 0 || ++spins < SPINS) pause();
        else number.wait(seen, std::memory_order_acquire);
      }
      seen = now;
      uint64_t state = door.load(std::memory_order_acquire);
      bool inside = false;
      while ((state & OPEN) && !(inside = door.compare_exchange_weak(state, state + INSIDE, std::memory_order_acq_rel))) {}
      if (!inside) continue;
      seen = uint32_t(state >> 32);
      if (seats.fetch_sub(1, std::memory_order_relaxed) > 0) run();
      door.fetch_sub(INSIDE, std::memory_order_release);
    }
  }

  void grow(int n) {
    for (n = n < N_MOST ? n : N_MOST; n_worker < n; n_worker++) std::thread([this, i = n_worker] { work(i); }).detach();
  }
};

// Never destroyed: workers outlive the interpreter's end. A forked child has no workers, so it gets a pool of its own.
std::atomic<Pool *> the_pool{nullptr};
std::once_flag once;

Pool *pool() {
  std::call_once(once, [] {
    the_pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { the_pool = new Pool; });
  });
  return the_pool.load(std::memory_order_acquire);
}

}  // namespace

void share(int64_t n_chunk, Chunk fn, void *context) {
  Pool *p = n_thread > 1 && n_chunk > 1 ? pool() : nullptr;
  if (p == nullptr || p->taken.test_and_set(std::memory_order_acquire)) {
    for (int64_t i = 0; i < n_chunk; i++) fn(context, i);
    return;
  }
  const int64_t began = now_ns();
  p->give_back(began);
  const int most = n_thread - 1 - p->spared;
  const int helpers = int(n_chunk - 1 < most ? n_chunk - 1 : most);
  if (helpers < 1) {
    for (int64_t i = 0; i < n_chunk; i++) fn(context, i);
    p->taken.clear(std::memory_order_release);
    return;
  }
  if (p->awake.load(std::memory_order_relaxed) != n_thread - 1) {
    p->awake.store(n_thread - 1, std::memory_order_release);
    p->awake.notify_all();
  }
  p->grow(n_thread - 1);
  p->fn = fn, p->context = context, p->n_chunk = n_chunk;
  p->next.store(0, std::memory_order_relaxed);
  p->seats.store(helpers, std::memory_order_relaxed);
  const uint32_t number = p->number.load(std::memory_order_relaxed) + 1;
  p->door.store(uint64_t(number) << 32 | OPEN, std::memory_order_release);
  p->number.store(number, std::memory_order_release);
  p->number.notify_all();
  p->run();
  const int64_t ended = now_ns();
  p->door.fetch_and(~OPEN, std::memory_order_acq_rel);
  int64_t ran = 0;
  for (int spins = 0; (p->door.load(std::memory_order_acquire) & 0xffffffffu) != 0;) {
    if (++spins < SPINS) {
      pause();
      continue;
    }
    if (ran == 0) ran = processor_ns();
    sched_yield();
  }
  p->judge(began, ended, ran, helpers + 1);
  p->taken.clear(std::memory_order_release);
}

}  // namespace pyspec
