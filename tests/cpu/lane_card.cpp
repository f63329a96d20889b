// A card that is none: threads that write jobs as moe_lane.cu does, against the lane's thread. Says what is wrong, and ends with 1.
//
// argv: jobs of each stream. With -fsanitize=thread a race ends it, too.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../../pyspec/cpu/native/moe.h"

using pyspec::MoeArgs;

struct Head {
  alignas(64) uint32_t number;
  uint32_t layer, n_row, n_miss;
  alignas(64) uint32_t done;
};
struct JobArgs {
  Head *head;
  const int32_t *ids;
  const float *weights, *x;
  float *y;
  int64_t n_row, n_used, n_in;
};

extern "C" {
void *pyspec_lane_start(int64_t has_thread);
void pyspec_lane_stop(void *lane);
int64_t pyspec_lane_add(void *lane, const MoeArgs *args, int64_t *counts, int64_t n_thread);
void pyspec_lane_drop(void *lane, int64_t layer);
void pyspec_lane_job(void *lane, const JobArgs *args);
void pyspec_lane_wake(void *lane);
}

namespace {

constexpr int kExperts = 5, kInner = 16, kRows = 6, kF32 = 0;
using namespace std::chrono_literals;

void expect(bool is_so, const char *what) {
  if (is_so) return;
  std::printf("wrong: %s\n", what);
  std::fflush(stdout);
  std::_Exit(1);
}

struct Experts {
  int n_in, n_used;
  std::vector<float> gate, up, down;
  alignas(8) int64_t counts[2] = {0, 0};

  Experts(int n_in, int n_used, int seed) : n_in(n_in), n_used(n_used) {
    std::mt19937 random(static_cast<unsigned>(seed));
    std::normal_distribution<float> normal;
    for (auto *one : {&gate, &up, &down}) {
      one->resize(static_cast<size_t>(kExperts * kInner * n_in));
      for (float &v : *one) v = 0.2f * normal(random);
    }
  }

  MoeArgs args() const {
    MoeArgs p{};
    auto stack = [&](const std::vector<float> &of) {
      pyspec::Stack s{};
      s.weights = reinterpret_cast<const uint8_t *>(of.data()), s.type = kF32, s.stride = int64_t(kInner) * n_in * 4;
      return s;
    };
    p.gate = stack(gate), p.up = stack(up), p.down = stack(down);
    p.n_in = n_in, p.n_ff = kInner, p.n_expert = kExperts, p.n_used = n_used;
    return p;
  }

  double output(const float *x, int e, int o) const {
    double y = 0;
    for (int j = 0; j < kInner; j++) {
      double g = 0, u = 0;
      for (int i = 0; i < n_in; i++) g += gate[(e * kInner + j) * n_in + i] * double(x[i]), u += up[(e * kInner + j) * n_in + i] * double(x[i]);
      y += down[(e * n_in + o) * kInner + j] * (g / (1 + std::exp(-g)) * u);
    }
    return y;
  }
};

struct Card {
  void *lane;
  std::vector<Experts *> layers;
  std::vector<int64_t> places;
  int n_in, n_used;
  Head head{};
  std::vector<int32_t> ids;
  std::vector<float> weights, x, y;
  std::mt19937 random;

  Card(void *lane, int n_in, int n_used, unsigned first) : lane(lane), n_in(n_in), n_used(n_used), random(first) {
    ids.resize(size_t(kRows * n_used)), weights.resize(ids.size()), x.resize(size_t(kRows * n_in)), y.resize(x.size());
    head.number = head.done = first;
    const JobArgs args{&head, ids.data(), weights.data(), x.data(), y.data(), kRows, n_used, n_in};
    pyspec_lane_job(lane, &args);
  }

  void write(uint32_t layer) {
    const int n_row = 1 + int(random() % kRows);
    std::normal_distribution<float> normal;
    head.n_miss = 0;
    for (int i = 0; i < n_row * n_used; i++) {
      ids[size_t(i)] = random() % 3 ? int(random() % kExperts) : -1, weights[size_t(i)] = normal(random);
      head.n_miss += ids[size_t(i)] >= 0;
    }
    for (int i = 0; i < n_row * n_in; i++) x[size_t(i)] = normal(random);
    head.layer = layer, head.n_row = uint32_t(n_row);
    std::atomic_ref<uint32_t>(head.number).store(head.number + 1, std::memory_order_release);
  }

  bool answered(std::chrono::milliseconds within) {
    const auto end = std::chrono::steady_clock::now() + within;
    while (std::atomic_ref<uint32_t>(head.done).load(std::memory_order_acquire) != head.number) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::yield();
    }
    return true;
  }

  void check(const Experts &of) {
    for (uint32_t r = 0; r < head.n_row; r++)
      for (int o = 0; o < n_in; o += 7) {
        double want = 0;
        for (int k = 0; k < n_used; k++)
          if (const int e = ids[r * n_used + k]; e >= 0) want += weights[r * n_used + k] * of.output(&x[r * n_in], e, o);
        expect(std::fabs(want - y[r * n_in + o]) < 1e-3 * (1 + std::fabs(want)), "a sum");
      }
  }

  void run(int n) {
    for (int i = 0; i < n; i++) {
      if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 25));  // it naps by then
      if (random() % 2) pyspec_lane_wake(lane);
      const size_t at = random() % layers.size();
      write(uint32_t(places[at]));
      expect(answered(20s), "a job is not answered");
      check(*layers[at]);
    }
  }
};

}  // namespace

int main(int, char **argv) {
  const int n = std::atoi(argv[1]);
  Experts a(24, 3, 1), b(24, 3, 2), c(40, 2, 3);
  {
    void *lane = pyspec_lane_start(1);
    Card one(lane, 24, 3, 0xfffffff0u), other(lane, 40, 2, 7);  // the first one's numbers wrap around
    one.layers = {&a, &b}, other.layers = {&c};
    for (Experts *e : one.layers) { const MoeArgs p = e->args(); one.places.push_back(pyspec_lane_add(lane, &p, e->counts, 3)); }
    { const MoeArgs p = c.args(); other.places.push_back(pyspec_lane_add(lane, &p, c.counts, 3)); }
    std::atomic<bool> over{false};
    std::thread changes([&] {  // other layers come and go
      Experts d(24, 3, 9);
      const MoeArgs p = d.args();
      while (!over.load()) {
        const int64_t at = pyspec_lane_add(lane, &p, d.counts, 3);
        expect(at == 3, "a place that is free is not taken again");
        pyspec_lane_drop(lane, at);
        std::this_thread::sleep_for(1ms);
      }
    });
    std::thread first([&] { one.run(n); }), second([&] { other.run(n); });
    first.join(), second.join();
    over.store(true), changes.join();
    expect(a.counts[1] + b.counts[1] == n && c.counts[1] == n, "the number of jobs");
    one.write(3);  // a layer that is gone
    expect(!one.answered(60ms), "a job without experts is answered");
    { const MoeArgs p = c.args(); pyspec_lane_drop(lane, pyspec_lane_add(lane, &p, c.counts, 3)); }  // the lane has looked at it
    one.write(uint32_t(one.places[0]));
    expect(one.answered(20s), "nor is the next one");
    one.check(a);
    std::this_thread::sleep_for(1100ms);  // it dozes
    other.write(uint32_t(other.places[0]));
    expect(other.answered(5s), "a job while it dozes is not answered");
    other.check(c);
    pyspec_lane_stop(lane);
    one.write(uint32_t(one.places[0]));
    expect(!one.answered(30ms), "a job is answered behind the end");
  }
  for (int i = 0; i < 40; i++) {  // an end in the middle of a job
    void *lane = pyspec_lane_start(1);
    Card card(lane, 24, 3, unsigned(i));
    const MoeArgs p = a.args();
    card.layers = {&a}, card.places = {pyspec_lane_add(lane, &p, a.counts, 2)};
    card.write(0);
    if (i % 2) std::this_thread::sleep_for(std::chrono::microseconds(i * 5));
    pyspec_lane_stop(lane);
    if (card.answered(0ms)) card.check(a);
  }
  std::puts("right");
  return 0;
}
