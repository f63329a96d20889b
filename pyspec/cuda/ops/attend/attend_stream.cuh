// How a warp of attend.cu fills its queue: what a thread needs for that, and the order of steps.
#pragma once

// What one thread needs to fill its queue.
struct Stream {
  const KeyCode* k;    // as the launch gives them: what hangs on the KV head is added where it is used, for registers are short
  const ValueCode* v;
#if K_FACTORS
  const u16* k_scale;  // at this KV head,
#endif
#if V_FACTORS
  const u16* v_scale;  // and at the warp's own block, or the pair of blocks with it
#endif
  int head;
  int row_stride;      // dims from one pool row to the next
  int lo, n_key;       // of the tile's hull: its first key, counted from the item's first, and how many there are
  int first, n_step;   // first range of the item that is seen; steps in all
  u32 queue;           // this lane's corner

  __device__ __forceinline__ const KeyCode* keys() const { return k + head * n_code(K_KIND, DIM); }
  __device__ __forceinline__ const ValueCode* values() const { return v + head * n_code(V_KIND, DIM); }
};

__device__ __forceinline__ bool is_seen(const Stream& f, int key) { return static_cast<u32>(key - f.lo) < static_cast<u32>(f.n_key); }

__device__ __forceinline__ i64 row_of(const Shared& s, u32 key) { return s.row16[key / 16] + static_cast<int>(key % 16); }

#if K_FACTORS || V_FACTORS
__device__ __forceinline__ void copy4(u32 to, const void* from, bool real) {  // zeros when not real
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(real ? 4 : 0) : "memory");
}
#endif

// By the size of keys: steps of a range, and how a thread queues one in `to`; the same of values.
__device__ constexpr int steps_of(int kind) { return kind < 3 ? WARPS : WARPS / 2; }
constexpr int KEY_STEPS = steps_of(K_KIND), STEPS = KEY_STEPS + steps_of(V_KIND);
__device__ __forceinline__ void fetch_keys(const Shared& s, const Stream& f, const Lane& me, int range, int step, u32 to);
__device__ __forceinline__ void fetch_values(const Shared& s, const Stream& f, const Lane& me, int range, int step, u32 to);

// Step `i` of an item: per range all steps of K, then those of V.
__device__ __forceinline__ void fetch(const Shared& s, const Stream& f, const Lane& me, int i, int slot) {
  if (i < f.n_step) {
    const int range = f.first + static_cast<u32>(i) / STEPS, step = static_cast<u32>(i) % STEPS;
    const u32 to = f.queue + slot * STEP_BYTES;
    if (step < KEY_STEPS) fetch_keys(s, f, me, range, step, to);
    else fetch_values(s, f, me, range, step - KEY_STEPS, to);
  }
  commit();
}
