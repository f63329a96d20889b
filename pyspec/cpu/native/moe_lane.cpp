// The lane: experts in this machine's memory for rows of a card. Kernels (moe_lane.cu) write a job into memory that both reach and then its
// number; a thread of this process, in which no Python runs, sees the number, computes, and writes the answer and then the number back.
//
// A job's memory belongs to the card until its number is new, then to the thread until `done` is that number, then to the card. Numbers are
// compared for equality alone, so they may wrap around. All layers of a stream take turns with one job.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "linear.h"
#include "moe.h"
#include "pool.h"

using namespace pyspec;

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto SPINS_FOR = std::chrono::milliseconds(10);  // without a job or a call: a round's pauses are shorter
constexpr auto NAPS_FOR = std::chrono::seconds(1);         // behind that it is called before a job comes
constexpr auto NAP = std::chrono::microseconds(100);
constexpr auto DOZE = std::chrono::milliseconds(20);

struct Head {
  alignas(64) uint32_t number;  // of the job, when all of it is there
  uint32_t layer, n_row, n_miss;
  alignas(64) uint32_t done;  // number of the last job that was answered
};
static_assert(sizeof(Head) == 128);

struct JobArgs {
  Head *head;
  const int32_t *ids;    // [row, n_used]: experts of this machine, or -1
  const float *weights;  // [row, n_used]
  const float *x;        // [row, n_in], of rows that have such an expert
  float *y;              // [row, n_in]: their sums
  int64_t n_row, n_used, n_in;  // n_row: there is room for so many
};

struct Job : JobArgs {
  uint32_t seen;
  std::vector<int16_t> q;
  std::vector<float> scales, sums;
  std::vector<int32_t> rows;
};

struct Layer {
  MoeArgs args;
  int64_t *counts;  // {misses, jobs}
  int n_thread;
};

inline void rest() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Lane {
 public:
  void start() {
    thread_ = std::thread([this] { work(); });
  }

  // Behind the job that it is at
  void stop() {
    stops_.store(true);
    wake();
    if (thread_.joinable()) thread_.join();
  }

  void wake() {
    calls_.fetch_add(1);
    { std::lock_guard<std::mutex> lock(asleep_); }  // the thread either waits by now, or looks at the calls before it does
    wakes_.notify_one();
  }

  int64_t add(const MoeArgs &args, int64_t *counts, int n_thread) {
    const auto lock = changing();
    int64_t at = 0;
    while (at < int64_t(layers_.size()) && layers_[size_t(at)].counts != nullptr) at++;
    if (at == int64_t(layers_.size())) layers_.emplace_back();
    layers_[size_t(at)] = {args, counts, n_thread};
    return at;
  }

  void drop(int64_t layer) {
    const auto lock = changing();
    layers_[size_t(layer)].counts = nullptr;
  }

  void add_job(const JobArgs &args) {
    const auto lock = changing();
    jobs_.push_back(std::make_unique<Job>());
    static_cast<JobArgs &>(*jobs_.back()) = args;
    jobs_.back()->seen = args.head->number;
  }

  // The jobs that have come; how many there were
  int64_t serve() {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t n = 0;
    for (const auto &job : jobs_) {
      const uint32_t number = std::atomic_ref<uint32_t>(job->head->number).load(std::memory_order_acquire);
      if (number == job->seen) continue;
      job->seen = number, n++;
      const auto began = Clock::now();
      if (!compute(*job)) continue;  // who waits for it gives up, and says so
      busy_ns_.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began).count(), std::memory_order_relaxed);
      std::atomic_ref<uint32_t>(job->head->done).store(number, std::memory_order_release);
    }
    return n;
  }

  // Time that jobs have taken
  int64_t busy_ns() const { return busy_ns_.load(std::memory_order_relaxed); }

 private:
  // Held by who changes what the thread reads. The thread lets them come first.
  struct Changing {
    Lane &of;
    std::unique_lock<std::mutex> lock;
    explicit Changing(Lane &of) : of(of) { of.n_changing_.fetch_add(1), lock = std::unique_lock<std::mutex>(of.mutex_); }
    ~Changing() { of.n_changing_.fetch_sub(1); }
  };
  Changing changing() { return Changing(*this); }

  bool compute(Job &job) {
    const Head &head = *job.head;
    if (head.layer >= layers_.size() || layers_[head.layer].counts == nullptr || head.n_row > job.n_row) return false;
    const Layer &layer = layers_[head.layer];
    MoeArgs p = layer.args;
    if (p.n_in != job.n_in || p.n_used != job.n_used) return false;
    pyspec::n_thread = layer.n_thread;
    p.n_row = head.n_row, p.x = job.x, p.ids = job.ids, p.weights = job.weights, p.out = job.y;
    quantise_rows(job, p);
    p.q = job.q.data(), p.scales = job.scales.data(), p.sums = job.sums.data();
    pyspec_moe(&p);
    std::atomic_ref<int64_t>(layer.counts[0]).fetch_add(head.n_miss, std::memory_order_relaxed);
    std::atomic_ref<int64_t>(layer.counts[1]).fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  // Rows that took an expert as whole numbers, too
  void quantise_rows(Job &job, const MoeArgs &p) {
    const int64_t n_chunk = (p.n_in + CHUNK - 1) / CHUNK;
    job.rows.clear();
    for (int64_t r = 0; r < p.n_row; r++) {
      const int32_t *own = p.ids + r * p.n_used;
      if (std::any_of(own, own + p.n_used, [](int32_t id) { return id != -1; })) job.rows.push_back(int32_t(r));
    }
    if (int64_t(job.q.size()) < p.n_row * n_chunk * CHUNK) {
      job.q.resize(size_t(job.n_row * n_chunk * CHUNK));
      job.scales.resize(size_t(job.n_row * n_chunk)), job.sums.resize(size_t(job.n_row * n_chunk * N_SUM));
    }
    each_range(int64_t(job.rows.size()) * n_chunk, 16, [&](int64_t a, int64_t b) {
      for (int64_t i = a; i < b; i++) {
        const int64_t c = i % n_chunk, at = job.rows[size_t(i / n_chunk)] * n_chunk + c, left = p.n_in - c * CHUNK;
        const float *x = p.x + job.rows[size_t(i / n_chunk)] * p.n_in + c * CHUNK;
        quantise(x, int(std::min<int64_t>(left, CHUNK)), job.q.data() + at * CHUNK, job.scales.data() + at, job.sums.data() + at * N_SUM);
      }
    });
  }

  void work() {
    auto last = Clock::now();
    uint64_t heard = 0;
    bool watches = false;
    auto watch = [&](bool now) {
      if (now != watches) n_watching.fetch_add(now ? 1 : -1);
      watches = now;
    };
    while (!stops_.load()) {
      while (n_changing_.load() > 0) sched_yield();
      const uint64_t calls = calls_.load();
      if (serve() > 0 || calls != heard) {
        heard = calls, last = Clock::now();
        watch(true);
        continue;
      }
      const auto idle = Clock::now() - last;
      if (idle < SPINS_FOR) {
        for (int i = 0; i < 8; i++) rest();
        continue;
      }
      watch(false);
      std::unique_lock<std::mutex> lock(asleep_);
      const auto pause = idle < NAPS_FOR ? Clock::duration(NAP) : Clock::duration(DOZE);
      wakes_.wait_for(lock, pause, [&] { return stops_.load() || calls_.load() != heard; });
    }
    watch(false);
  }

  std::thread thread_;
  std::atomic<bool> stops_{false};
  std::atomic<uint64_t> calls_{0};
  std::atomic<int> n_changing_{0};
  std::atomic<int64_t> busy_ns_{0};
  std::mutex mutex_, asleep_;  // of layers and jobs; of the thread's sleep
  std::condition_variable wakes_;
  std::deque<Layer> layers_;  // counts null: the place is free
  std::vector<std::unique_ptr<Job>> jobs_;
};

}  // namespace

extern "C" {

// has_thread 0: `pyspec_lane_serve` is called in its place
Lane *pyspec_lane_start(int64_t has_thread) {
  Lane *lane = new Lane;
  if (has_thread) lane->start();
  return lane;
}

void pyspec_lane_stop(Lane *lane) {
  lane->stop();
  delete lane;
}

int64_t pyspec_lane_add(Lane *lane, const MoeArgs *args, int64_t *counts, int64_t n_thread) { return lane->add(*args, counts, int(n_thread)); }
void pyspec_lane_drop(Lane *lane, int64_t layer) { lane->drop(layer); }
void pyspec_lane_job(Lane *lane, const JobArgs *args) { lane->add_job(*args); }
void pyspec_lane_wake(Lane *lane) { lane->wake(); }
int64_t pyspec_lane_serve(Lane *lane) { return lane->serve(); }
int64_t pyspec_lane_busy(Lane *lane) { return lane->busy_ns(); }
}
