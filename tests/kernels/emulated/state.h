// The machine's own state: blocks, warps and threads, each thread a fiber of this process's one thread.
#pragma once
#include <setjmp.h>
#include <stddef.h>
#include <ucontext.h>

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "machine.h"

namespace emulator {

constexpr u32 kFirst = 1024;          // shared address of dynamic memory: 0 is nobody's, and all alignments hold
constexpr u32 kGap = 1024;            // between dynamic memory and the declared variables
constexpr u32 kDeclared = 64 * 1024;  // room for declared variables
constexpr u8 kPoison = 0xff;          // four of them are a NaN, two of them a NaN of f16 or bf16

constexpr int kClusterBit = 24;       // from here on an address has 1 + the number of a block of the cluster

struct Block;
struct Warp;

struct Copy {
  u8* to;
  const u8* from;
  u32 n_bytes, n_real;
};

struct Fiber {
  Block* block = nullptr;
  Warp* warp = nullptr;
  int lane = 0, line = 0;
  const char* waits_for = nullptr;  // null: runs or may run
  bool started = false;
  bool arrived = false;  // at the cluster's barrier, in its phase:
  u32 phase = 0;
  u8* stack = nullptr;
  jmp_buf at;
  ucontext_t first;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

struct Meeting {
  u32 mask, came;
  int line;
  const char* what;
  void* brought[32];
};

struct PendingProduct {
  int n, line;
  std::vector<float*> sums;  // of lane after lane
  u32 a[32][4];
  u64 b[32];
  std::vector<float> right;  // [n][16], when it was read at once
};

struct Warp {
  u32 ready = 0, done = 0, late = 0;
  bool fenced = false;  // wgmma.fence since the last commit
  std::vector<Meeting> meetings;
  std::vector<Fiber*> fibers;
  std::vector<PendingProduct> open;
  std::deque<std::vector<PendingProduct>> groups;
};

struct Barrier {
  int came = 0, want = 0, line = 0;
  std::vector<Fiber*> waiting;
};

struct Message {  // an mbarrier
  int arrivals = 0, missing = 0;
  i64 bytes = 0;
  u32 phase = 0;
  std::vector<std::pair<Fiber*, u32>> waiting;
};

struct Bulk {
  Copy copy;
  u32 barrier;
  int line;
  u32 sent[4] = {};  // what comes, if it comes from no memory
};

struct Cluster {
  std::vector<Block*> blocks;  // null: has ended
  int n_alive = 0, came = 0;
  u32 phase = 0;
  std::vector<Fiber*> waiting;
};

struct Block {
  Dim at;
  int n_thread, n_alive;
  u8* memory;  // of address 0
  u32 n_dynamic, declared_end;
  std::map<int, std::pair<u32, u32>> declared;  // first byte, bytes
  std::vector<Warp> warps;
  std::vector<Fiber*> fibers;
  Barrier barriers[16];
  std::map<u32, Message> messages;
  std::vector<Bulk> bulk;
  std::shared_ptr<Cluster> cluster;
};

extern Fiber* self;
u8* place_in(const Block& block, u32 address, u32 n_bytes, u32 align, int line);
u32 random_bits();
inline bool chance(int one_in) { return random_bits() % one_in == 0; }
void wait(const char* what, int line);  // until somebody calls `wake`
void wake(Fiber* fiber);
void complete(Block& block, const Bulk& bulk);  // units.cpp

}  // namespace emulator
