// A launch from outside: copies of its arguments between pages that nobody may touch, the order of its blocks, what a fault says.
// Goes behind machine.cpp, in one translation unit with it.

namespace emulator {
namespace {

void on_fault(int, siginfo_t* info, void*) {
  const u8* at = static_cast<const u8*>(info->si_addr);
  say("block (%u, %u, %u) thread %u: ", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x);
  bool known = false;
  for (size_t i = 0; i < regions.size(); ++i) {
    const Region& r = regions[i];
    if (at < r.pages || at >= r.pages + r.n_page) continue;
    say("touches byte %lld of memory %zu, which has %zu", static_cast<i64>(at - r.data), i, r.n_bytes);
    known = true;
  }
  if (!known) say("touches memory that is no argument's");
  say(", after line %d", self ? self->line : 0);
  siglongjmp(home, 1);
}

}  // namespace
}  // namespace emulator

using namespace emulator;

// A copy of an argument's memory that ends where a forbidden page begins, as far as its alignment allows.
extern "C" void* emulator_guard(const void* from, long long n_bytes) {
  const size_t unit = page(), inner = (static_cast<size_t>(n_bytes) + 64 + unit - 1) / unit * unit;
  Region r;
  r.n_page = inner + 2 * kForbidden;
  r.n_bytes = static_cast<size_t>(n_bytes);
  r.pages = static_cast<u8*>(mmap(nullptr, r.n_page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  mprotect(r.pages + kForbidden, inner, PROT_READ | PROT_WRITE);
  u8* const end = r.pages + kForbidden + inner;
  r.data = end - r.n_bytes;
  const size_t over = (reinterpret_cast<size_t>(r.data) - reinterpret_cast<size_t>(from)) % 64;
  r.data -= over;  // as aligned as the original
  memset(r.pages + kForbidden, kPoison, inner);
  memcpy(r.data, from, r.n_bytes);
  regions.push_back(r);
  return r.data;
}

// Copies memory `index` back. The byte that was written outside of it, or none: -1.
extern "C" long long emulator_take_back(int index, void* to) {
  const Region& r = regions[index];
  const u8 *first = r.pages + kForbidden, *end = r.pages + r.n_page - kForbidden;
  for (const u8* p = first; p < end; ++p) {
    if (p == r.data) p += r.n_bytes;
    if (p < end && *p != kPoison) return p < r.data ? 1LL << 62 | (r.data - p) : p - r.data;
  }
  memcpy(to, r.data, r.n_bytes);
  return -1;
}

extern "C" void emulator_forget() {
  for (const Region& r : regions) munmap(r.pages, r.n_page);
  regions.clear();
}

// 0 if the kernel ran to its end; else `message` says what happened.
extern "C" int emulator_run(void (*body)(void**), void** args, const int* grid, const int* cluster, int n_thread, int n_shared, int n_resident,
                            unsigned long long seed, char* message, int message_size) {
  Launch now;
  launch = &now;
  now.body = body, now.args = args, now.n_thread = n_thread, now.n_resident = n_resident;
  now.n_shared = static_cast<u32>(n_shared), now.message = message, now.message_size = message_size;
  message[0] = 0;
  random_state = seed;
  gridDim = {static_cast<u32>(grid[0]), static_cast<u32>(grid[1]), static_cast<u32>(grid[2])};
  blockDim = {static_cast<u32>(n_thread), 1, 1};
  now.n_cluster = cluster[0] * cluster[1] * cluster[2];
  std::vector<int> firsts;  // blocks of clusters
  for (int i = 0; i < grid[0] * grid[1] * grid[2]; ++i)
    if (i % grid[0] % cluster[0] == 0 && i / grid[0] % grid[1] % cluster[1] == 0 && i / grid[0] / grid[1] % cluster[2] == 0)
      firsts.push_back(i);
  for (size_t i = firsts.size(); i > 1; --i) std::swap(firsts[i - 1], firsts[random_bits() % i]);
  for (int first : firsts)
    for (int i = 0; i < now.n_cluster; ++i)
      now.order.push_back(first + i % cluster[0] +
                          grid[0] * (i / cluster[0] % cluster[1] + grid[1] * (i / cluster[0] / cluster[1])));
  const int policies[] = {0, 2, 8};
  const int breaks[] = {0, 128, 2};
  now.switches = policies[random_bits() % 3];
  now.arrivals = policies[random_bits() % 3];
  now.breaks = breaks[random_bits() % 3];
  now.late = static_cast<int>(random_bits() % 3);
  turn = Turn();

  static u8 other_stack[64 * 1024];
  stack_t mine = {}, old_stack;
  mine.ss_sp = other_stack, mine.ss_size = sizeof other_stack;
  sigaltstack(&mine, &old_stack);
  struct sigaction action = {}, old_segv, old_bus;
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  if (!sigsetjmp(home, 1)) {
    Fiber* first = pick();
    if (first) resume(first);
  }
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  if (old_stack.ss_flags & SS_DISABLE) old_stack.ss_size = sizeof other_stack;
  sigaltstack(&old_stack, nullptr);
  if (message[0] != 0) {  // threads stand anywhere: their stacks start anew
    for (auto& block : blocks) windows.push_back(block->memory);
    blocks.clear();
    idle.clear();
    for (auto& fiber : all_fibers) fiber->started = false, idle.push_back(fiber.get());
  }
  self = nullptr;
  return message[0] != 0;
}
