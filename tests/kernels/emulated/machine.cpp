// Runs a kernel: blocks of threads as fibers, in an order drawn from a seed, and says what no GPU would say.
//
// A thread runs until it meets others (shuffles, barriers, products) or waits for memory. Who runs next is drawn, warp by
// warp: sometimes one warp runs as far as it can while the others stand, sometimes all take turns. Blocks are taken in a
// drawn order, as many at once as the caller says are resident. In some launches some lanes, or one warp of a block, run
// only when nobody else can: what the others may not do before them, they then do before them.
#include "state.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

emulator::Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

Fiber* self;

namespace {

constexpr size_t kStack = 128 * 1024;
constexpr size_t kForbidden = 1 << 20;  // on both sides of an argument's pages
constexpr int kMaxStalls = 1 << 20;  // turns in which threads only waited for memory

struct Launch {
  void (*body)(void**);
  void** args;
  int n_thread, n_resident;
  u32 n_shared;
  std::vector<int> order;  // of blocks, those of a cluster one after the other
  int n_cluster;           // blocks of one
  size_t next = 0;
  int switches;  // a warp stops after a turn with chance 1 in this; 0: only when it waits
  int breaks;    // a warp stops within a turn, some lanes ahead of others, with chance 1 in this; 0: never
  int arrivals;  // a bulk copy arrives with chance 1 in this between turns; 0: only when all wait
  int late;      // who runs last in some blocks. 0: nobody, 1: a warp, 2: a lane of each warp
  int stalls = 0;
  i64 clock = 0;
  char* message;
  int message_size;
};

struct Region {  // an argument's memory, between pages nobody may touch
  u8 *pages, *data;
  size_t n_page, n_bytes;
};

struct Turn {
  Warp* warp = nullptr;
  bool is_late = false;  // those that run last
  u32 step = 1, first = 0, i = 32;
};

Launch* launch;
Turn turn;
u64 random_state;
sigjmp_buf home;
std::vector<std::unique_ptr<Block>> blocks;
std::vector<Fiber*> idle;  // fibers that no block has
std::vector<std::unique_ptr<Fiber>> all_fibers;
std::vector<u8*> windows;
std::vector<Region> regions;

size_t page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

void say(const char* format, ...) {
  va_list list;
  va_start(list, format);
  const size_t used = strlen(launch->message);
  vsnprintf(launch->message + used, launch->message_size - used, format, list);
  va_end(list);
}

[[noreturn]] void go_home() { siglongjmp(home, 1); }

// ---- fibers

void take(Fiber* next) {
  self = next;
  const Block& block = *next->block;
  const u32 tid = static_cast<u32>(next->lane + 32 * (next->warp - block.warps.data()));
  threadIdx = {tid, 0, 0};
  blockIdx = block.at;
}

void finish_thread();

void entry() {
  for (;;) {
    launch->body(launch->args);
    finish_thread();  // comes back when another block has this fiber
  }
}

[[noreturn]] void resume(Fiber* next) {
  take(next);
  if (next->started) _longjmp(next->at, 1);
  next->started = true;
  getcontext(&next->first);
  next->first.uc_stack.ss_sp = next->stack;
  next->first.uc_stack.ss_size = kStack;
  next->first.uc_link = nullptr;
  makecontext(&next->first, entry, 0);
  setcontext(&next->first);
  __builtin_unreachable();
}

Fiber* pick();

void leave() {
  Fiber* const me = self;
  Fiber* const next = pick();
  if (next == nullptr) {
    me->started = false;  // nobody comes back to here
    go_home();
  }
  if (next == me) return take(me);
  if (!_setjmp(me->at)) resume(next);
}

Fiber* new_fiber() {
  if (idle.empty()) {
    all_fibers.push_back(std::make_unique<Fiber>());
    u8* memory = static_cast<u8*>(
        mmap(nullptr, kStack + page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    mprotect(memory, page(), PROT_NONE);  // a stack that is too small is a fault, not a surprise
    all_fibers.back()->stack = memory + page();
    idle.push_back(all_fibers.back().get());
  }
  Fiber* fiber = idle.back();
  idle.pop_back();
  fiber->open.clear();
  fiber->groups.clear();
  fiber->waits_for = nullptr;
  fiber->line = 0;
  return fiber;
}

// ---- blocks

constexpr size_t kWindow = 512 * 1024;

void start_block(const std::shared_ptr<Cluster>& cluster) {
  const int index = launch->order[launch->next++];
  auto block = std::make_unique<Block>();
  const int x = static_cast<int>(gridDim.x), y = static_cast<int>(gridDim.y);
  block->at = {static_cast<u32>(index % x), static_cast<u32>(index / x % y), static_cast<u32>(index / x / y)};
  block->n_thread = block->n_alive = launch->n_thread;
  block->cluster = cluster;
  cluster->blocks.push_back(block.get());
  cluster->n_alive += launch->n_thread;
  block->n_dynamic = launch->n_shared;
  block->declared_end = kFirst + launch->n_shared + kGap;
  if (windows.empty()) {
    windows.push_back(static_cast<u8*>(
        mmap(nullptr, kWindow, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)));
  }
  block->memory = windows.back();
  windows.pop_back();
  memset(block->memory, kPoison, kFirst + launch->n_shared + kGap + kDeclared);
  block->warps.resize((launch->n_thread + 31) / 32);
  for (int t = 0; t < launch->n_thread; ++t) {
    Fiber* fiber = new_fiber();
    Warp& warp = block->warps[t / 32];
    fiber->block = block.get();
    fiber->warp = &warp;
    fiber->lane = t % 32;
    fiber->arrived = false;
    warp.ready |= 1u << (t % 32);
    warp.fibers.push_back(fiber);
    block->fibers.push_back(fiber);
  }
  const u32 late_warp = random_bits() % block->warps.size(), late_lane = random_bits() % 32;
  const int late = chance(2) ? launch->late : 0;  // not in all: a block that is done may read what another has not written
  for (Warp& warp : block->warps) {
    if (warp.fibers.size() < 32) warp.done = ~0u << warp.fibers.size();
    if (late == 1 && &warp == &block->warps[late_warp]) warp.late = ~0u;
    if (late == 2) warp.late = 1u << late_lane;
  }
  blocks.push_back(std::move(block));
}

void start_cluster() {
  const auto cluster = std::make_shared<Cluster>();
  for (int i = 0; i < launch->n_cluster; ++i) start_block(cluster);
}

void check_gaps(const Block& block) {
  auto untouched = [&](u32 from, u32 to) {
    for (u32 i = from; i < to; ++i)
      if (block.memory[i] != kPoison) {
        if (i < kFirst + block.n_dynamic + kGap)
          fail(0, "wrote shared memory outside the %u bytes that were asked for, at byte %lld", block.n_dynamic,
               static_cast<i64>(i) - kFirst);
        fail(0, "wrote shared memory beside its declared variables");
      }
  };
  untouched(0, kFirst);
  u32 from = kFirst + block.n_dynamic;
  std::vector<std::pair<u32, u32>> places;
  for (const auto& item : block.declared) places.push_back(item.second);
  std::sort(places.begin(), places.end());
  for (const auto& place : places) {
    untouched(from, place.first);
    from = place.first + place.second;
  }
  untouched(from, kFirst + block.n_dynamic + kGap + kDeclared);
}

void end_block(Block* block) {
  check_gaps(*block);
  if (!block->bulk.empty()) fail(block->bulk[0].line, "a block ends while a bulk copy into it is under way");
  for (const auto& item : block->messages)
    if (item.second.bytes != 0) fail(0, "a block ends with %lld bytes missing on a barrier", item.second.bytes);
  for (Block*& other : block->cluster->blocks)
    if (other == block) other = nullptr;
  for (Fiber* fiber : block->fibers) idle.push_back(fiber);
  windows.push_back(block->memory);
  turn.warp = nullptr;
  auto same = [&](const std::unique_ptr<Block>& b) { return b.get() == block; };
  blocks.erase(std::find_if(blocks.begin(), blocks.end(), same));
}

void pass_barrier(Barrier& barrier) {
  barrier.came = 0;
  for (Fiber* fiber : barrier.waiting) wake(fiber);
  barrier.waiting.clear();
}

void pass_cluster_barrier(Cluster& cluster) {
  cluster.came = 0;
  ++cluster.phase;
  for (Fiber* fiber : cluster.waiting) wake(fiber);
  cluster.waiting.clear();
}

void finish_thread() {
  Fiber& me = *self;
  if (me.arrived) fail(me.line, "returns and has not waited for its cluster, at whose barrier it arrived");
  Cluster& cluster = *me.block->cluster;
  if (--cluster.n_alive == cluster.came && cluster.came > 0) pass_cluster_barrier(cluster);
  Block& block = *me.block;
  const u32 bit = 1u << me.lane;
  me.warp->done |= bit;
  launch->stalls = 0;
  for (const Meeting& m : me.warp->meetings)
    if (m.came != 0 && m.mask & bit)
      fail(m.line, "lane %d returns while others of its warp wait for it in %s", me.lane, m.what);
  if (--block.n_alive == 0) {
    end_block(&block);
  } else {  // who returned is not waited for
    for (Barrier& b : block.barriers)
      if (b.came > 0 && b.want == 0 && b.came == block.n_alive) pass_barrier(b);
  }
  leave();
}

// ---- who runs next

void start_turn(Warp* warp, bool is_late) { turn = {warp, is_late, random_bits() | 1, random_bits(), 0}; }

u32 ready(const Warp& warp, bool is_late) { return warp.ready & (is_late ? ~0u : ~warp.late); }

bool next_arrives(int index) {  // one of all bulk copies
  for (auto& block : blocks) {
    if (index < static_cast<int>(block->bulk.size())) {
      const Bulk bulk = block->bulk[index];
      block->bulk.erase(block->bulk.begin() + index);
      complete(*block, bulk);
      launch->stalls = 0;
      return true;
    }
    index -= static_cast<int>(block->bulk.size());
  }
  return false;
}

bool any_arrives() {
  size_t n = 0;
  for (auto& block : blocks) n += block->bulk.size();
  return n > 0 && next_arrives(static_cast<int>(random_bits() % n));
}

[[noreturn]] void all_wait() {
  say("deadlock:");
  for (auto& block : blocks) {
    std::map<std::pair<int, const char*>, std::vector<u32>> places;
    for (size_t t = 0; t < block->fibers.size(); ++t) {
      const Fiber& fiber = *block->fibers[t];
      if (fiber.waits_for) places[{fiber.line, fiber.waits_for}].push_back(static_cast<u32>(t));
    }
    for (const auto& item : places)
      say(" block (%u, %u, %u) has %zu threads from %u in %s, line %d;", block->at.x, block->at.y, block->at.z,
          item.second.size(), item.second[0], item.first.second, item.first.first);
  }
  go_home();
}

bool choose_warp(bool is_late) {
  Warp* found = nullptr;
  u32 n = 0;
  for (auto& block : blocks)
    for (Warp& warp : block->warps)
      if (ready(warp, is_late) != 0 && random_bits() % ++n == 0) found = &warp;
  start_turn(found, is_late);
  return found;
}

Fiber* pick() {
  for (;;) {
    while (turn.warp && ready(*turn.warp, turn.is_late) != 0 && turn.i < 32) {
      if (launch->breaks > 0 && chance(launch->breaks)) turn.warp = nullptr;
      if (!turn.warp) break;
      const u32 lane = (turn.step * turn.i++ + turn.first) % 32;
      if (ready(*turn.warp, turn.is_late) >> lane & 1) {
        turn.warp->ready &= ~(1u << lane);
        return turn.warp->fibers[lane];
      }
    }
    if (turn.warp && !turn.is_late && ready(*turn.warp, false) != 0 && (launch->switches == 0 || !chance(launch->switches))) {
      start_turn(turn.warp, false);
      continue;
    }
    while (static_cast<int>(blocks.size()) < launch->n_resident && launch->next < launch->order.size()) start_cluster();
    if (launch->arrivals > 0 && chance(launch->arrivals)) any_arrives();
    const bool fair = chance(256);  // who waits for memory must not keep others from writing it
    if (!fair && choose_warp(false)) continue;
    if (chance(2) && any_arrives()) continue;
    if (choose_warp(true) || any_arrives()) continue;
    if (blocks.empty()) return nullptr;
    all_wait();
  }
}

}  // namespace

u32 random_bits() {
  random_state += 0x9e3779b97f4a7c15ull;
  u64 z = random_state;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return static_cast<u32>((z ^ z >> 31) >> 32);
}

void wait(const char* what, int line) {
  self->waits_for = what;
  self->line = line;
  launch->stalls = 0;
  leave();
}

void wake(Fiber* fiber) {
  fiber->waits_for = nullptr;
  fiber->warp->ready |= 1u << fiber->lane;
}

void pause(int line) {
  self->line = line;
  if (++launch->stalls > kMaxStalls) fail(line, "waits for memory that nobody writes");
  launch->clock += 256;
  self->warp->ready |= 1u << self->lane;
  turn.warp = nullptr;
  leave();
}

void interleave(int line) {
  self->line = line;
  if (!chance(2)) return;
  self->warp->ready |= 1u << self->lane;
  if (chance(2)) turn.warp = nullptr;
  leave();
}

i64 clock() { return launch->clock; }

void fail(int line, const char* format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  say("block (%u, %u, %u) thread %u: %s, line %d", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, text, line);
  go_home();
}

void nothing(void* const*, u32) {}

void meet(int line, const char* what, u32 mask, void* mine, Together* run) {
  Warp& warp = *self->warp;
  const u32 bit = 1u << self->lane;
  if (!(mask & bit)) fail(line, "lane %d calls %s for lanes %08x without itself", self->lane, what, mask);
  if (warp.done & mask) fail(line, "%s waits for lanes %08x, which have returned", what, warp.done & mask);
  Meeting* found = nullptr;
  for (Meeting& m : warp.meetings) {
    if (m.came == 0 || m.mask != mask) continue;  // lanes of other masks meet elsewhere
    if (m.line != line || strcmp(m.what, what) != 0)
      fail(line, "the warp diverges: lane %d comes to %s while lanes %08x wait in %s, line %d", self->lane, what, m.came,
           m.what, m.line);
    found = &m;
  }
  for (Meeting& m : warp.meetings)
    if (!found && m.came == 0) found = &m;
  if (!found) found = &warp.meetings.emplace_back();
  if (found->came == 0) found->mask = mask, found->line = line, found->what = what;
  found->brought[self->lane] = mine;
  found->came |= bit;
  if (found->came != mask) return wait(what, line);
  self->line = line;
  found->came = 0;
  run(found->brought, mask);
  launch->stalls = 0;
  for (u32 lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1 && static_cast<int>(lane) != self->lane) wake(warp.fibers[lane]);
}

void block_barrier(int line, int id, int n_thread) {
  Block& block = *self->block;
  if (id < 0 || id > 15 || n_thread < 0 || n_thread % 32 != 0) fail(line, "bar.sync %d, %d", id, n_thread);
  Barrier& barrier = block.barriers[id];
  if (barrier.came > 0 && (barrier.want != n_thread || barrier.line != line))
    fail(line, "threads come to barrier %d from different lines; others wait in line %d", id, barrier.line);
  barrier.want = n_thread;
  barrier.line = line;
  self->line = line;
  if (++barrier.came == (n_thread ? n_thread : block.n_alive)) return pass_barrier(barrier);
  barrier.waiting.push_back(self);
  wait("a barrier of the block", line);
}

void cluster_arrive(int line) {
  Cluster& cluster = *self->block->cluster;
  if (self->arrived) fail(line, "arrives at its cluster's barrier twice");
  self->line = line;
  self->arrived = true;
  self->phase = cluster.phase;
  if (++cluster.came == cluster.n_alive) pass_cluster_barrier(cluster);
}

void cluster_wait(int line) {
  Cluster& cluster = *self->block->cluster;
  if (!self->arrived) fail(line, "waits for its cluster, at whose barrier it did not arrive");
  while (cluster.phase == self->phase) {
    cluster.waiting.push_back(self);
    wait("the cluster's barrier", line);
  }
  self->arrived = false;
}

u32 address_in_cluster(u32 address, u32 block, int line) {
  if (block >= self->block->cluster->blocks.size()) fail(line, "the cluster has no block %u", block);
  shared_at(address, 1, 1, line);
  return (block + 1) << kClusterBit | address;
}

u32 shared_address(const void* p, int line) {
  const ptrdiff_t at = static_cast<const u8*>(p) - self->block->memory;
  if (at < static_cast<ptrdiff_t>(kFirst) || at > static_cast<ptrdiff_t>(self->block->declared_end))
    fail(line, "takes the shared address of something else");
  return static_cast<u32>(at);
}

u8* shared_at(u32 address, u32 n_bytes, u32 align, int line) {
  return place_in(*self->block, address, n_bytes, align, line);
}

u8* place_in(const Block& block, u32 address, u32 n_bytes, u32 align, int line) {
  if (address % align != 0) fail(line, "shared address %u is no multiple of %u", address, align);
  if (address < kFirst || address + n_bytes > block.declared_end ||
      (address + n_bytes > kFirst + block.n_dynamic && address < kFirst + block.n_dynamic + kGap))
    fail(line, "%u bytes at shared address %u, %lld behind the start of dynamic memory, of which there are %u", n_bytes,
         address, static_cast<i64>(address) - kFirst, block.n_dynamic);
  return block.memory + address;
}

void* dynamic_shared(u32 align) {
  if (align > kFirst) fail(0, "dynamic shared memory is declared with alignment %u", align);
  return self->block->memory + kFirst;
}

void* static_shared(int id, u32 n_bytes, u32 align) {
  Block& block = *self->block;
  auto [place, is_new] = block.declared.try_emplace(id, 0, n_bytes);
  if (is_new) {
    place->second.first = (block.declared_end + 16 + align - 1) / align * align;
    block.declared_end = place->second.first + n_bytes;
    if (block.declared_end > kFirst + block.n_dynamic + kGap + kDeclared) fail(0, "too many bytes of shared variables");
  }
  return block.memory + place->second.first;
}

}  // namespace emulator
