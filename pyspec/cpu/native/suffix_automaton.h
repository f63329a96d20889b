// A suffix automaton over token ids, as pyspec/draft/suffix_automaton.py, which explains it.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace pyspec::suffix {

// Numbers or records in a row. Grows by an eighth: large blocks are moved by the page table, not copied.
template <typename T>
class Array {
 public:
  Array() = default;
  Array(const Array &) = delete;
  Array &operator=(const Array &) = delete;
  ~Array() { std::free(data_); }
  T &operator[](int64_t i) { return data_[i]; }
  const T &operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return n_; }
  const T *begin() const { return data_; }
  void cut(int64_t n) { n_ = n < n_ ? n : n_; }
  void add(T x) {
    if (n_ == room_) grow(n_ + 1);
    data_[n_++] = x;
  }
  void add(const T *from, int64_t n) {
    if (n_ + n > room_) grow(n_ + n);
    for (int64_t i = 0; i < n; i++) data_[n_ + i] = from[i];
    n_ += n;
  }

 private:
  void grow(int64_t least) {
    const int64_t more = room_ + (room_ >> 3) + 16, room = least > more ? least : more;
    T *const data = static_cast<T *>(std::realloc(data_, size_t(room) * sizeof(T)));
    if (data == nullptr) throw std::bad_alloc();
    data_ = data;
    room_ = room;
  }
  T *data_ = nullptr;
  int64_t n_ = 0, room_ = 0;
};

constexpr int MOST_FOLLOWERS = 64, COUNTED = 16;
constexpr int LISTED = 8;  // followers of a state that are searched in a row; those of one with more are hashed, too

struct Branch {
  int32_t token, state, n, n_all;
};

class Automaton {
 public:
  Automaton() : serial(++made()) { states_.add(State{0, -1, 0, 0, -1, -1, -1, 0}); }

  // The first follower of a state lies in it, the others in a list.
  struct State {
    int32_t length, link, places, at, token, to, more, n_follower;
  };
  struct Edge {
    int32_t state, token, to, next;
  };

  const int64_t serial;  // no two automata have the same
  int64_t n_token = 0;

  int64_t n_byte() const {
    return int64_t(sizeof(State)) * states_.size() + int64_t(sizeof(Edge)) * edges_.size() + 4 * n_place_;
  }
  int64_t n_state() const { return states_.size(); }
  const State &state(int32_t i) const { return states_[i]; }
  int32_t match() const { return states_[last_].link > 0 ? states_[last_].link : 0; }
  void begin() { last_ = 0; }

  int32_t next(int32_t state, int32_t token) const {
    const State &s = states_[state];
    if (s.n_follower == 0) return -1;
    if (s.token == token) return s.to;
    const int32_t edge = find(s, state, token);
    return edge < 0 ? -1 : edges_[edge].to;
  }

  void extend(int32_t token) {
    n_token++;
    int32_t state = last_ = behind(token);
    for (int i = 0; i < COUNTED && state > 0; i++) {
      State &s = states_[state];
      s.places++;
      s.at = int32_t(n_token);
      state = s.link;
    }
  }

  // The follower with most places, of equals the latest. False if there is none, or there are too many.
  bool likeliest(int32_t state, Branch *found) const {
    const State &s = states_[state];
    if (s.n_follower == 0 || s.n_follower > MOST_FOLLOWERS) return false;
    const State *best = &states_[s.to];
    *found = {s.token, s.to, best->places, best->places};
    for (int32_t e = s.more; e >= 0; e = edges_[e].next) {
      const State &other = states_[edges_[e].to];
      found->n_all += other.places;
      if (other.places > best->places || (other.places == best->places && other.at > best->at)) {
        best = &other;
        found->token = edges_[e].token;
        found->state = edges_[e].to;
        found->n = other.places;
      }
    }
    return true;
  }

  // Follow a text from outside: state and n of its longest suffix that stands here, before and behind `token`.
  void step(int32_t token, int32_t *at, int32_t *n) const {
    int32_t state = *at;
    while (state && *n <= states_[states_[state].link].length) state = states_[state].link;
    int32_t found = next(state, token);
    while (found < 0 && state) {
      state = states_[state].link;
      *n = states_[state].length;
      found = next(state, token);
    }
    *at = found < 0 ? 0 : found;
    *n = found < 0 ? 0 : *n + 1;
  }

  ~Automaton() { std::free(place_); }
  Automaton(const Automaton &) = delete;
  Automaton &operator=(const Automaton &) = delete;

 private:
  static std::atomic<int64_t> &made() {
    static std::atomic<int64_t> n{0};
    return n;
  }

  int32_t behind(int32_t token) {
    const int32_t before = last_, known = next(before, token);
    if (known >= 0)
      return states_[known].length == states_[before].length + 1 ? known : split(before, token, known);
    const int32_t added = add(states_[before].length + 1);
    int32_t state = before, other = -1;
    for (; state >= 0; state = states_[state].link) {
      other = next(state, token);
      if (other >= 0) break;
      follow(state, token, added);
    }
    const int32_t link = state < 0                                              ? 0
                         : states_[other].length == states_[state].length + 1 ? other
                                                                              : split(state, token, other);
    states_[added].link = link;
    return added;
  }

  int32_t add(int32_t length) {
    states_.add(State{length, 0, 0, 0, -1, -1, -1, 0});
    return int32_t(states_.size() - 1);
  }

  int32_t split(int32_t state, int32_t token, int32_t known) {
    const int32_t made = add(states_[state].length + 1);
    const State from = states_[known];
    State &to = states_[made];
    to.places = from.places;
    to.at = from.at;
    to.link = from.link;
    if (from.n_follower) follow(made, from.token, from.to);
    for (int32_t e = from.more; e >= 0; e = edges_[e].next) follow(made, edges_[e].token, edges_[e].to);
    states_[known].link = made;
    for (; state >= 0; state = states_[state].link) {
      State &s = states_[state];
      if (s.n_follower && s.token == token) {
        if (s.to != known) break;
        s.to = made;
        continue;
      }
      const int32_t edge = find(s, state, token);
      if (edge < 0 || edges_[edge].to != known) break;
      edges_[edge].to = made;
    }
    return made;
  }

  // Add a follower that the state does not have.
  void follow(int32_t state, int32_t token, int32_t to) {
    State &s = states_[state];
    if (s.n_follower++ == 0) {
      s.token = token;
      s.to = to;
      return;
    }
    edges_.add(Edge{state, token, to, s.more});
    s.more = int32_t(edges_.size() - 1);
    if (s.n_follower > LISTED + 2)
      enter(s.more);
    else if (s.n_follower == LISTED + 2)
      for (int32_t e = s.more; e >= 0; e = edges_[e].next) enter(e);
  }

  // The edge of a state's follower beyond its first one; -1: none.
  int32_t find(const State &s, int32_t state, int32_t token) const {
    if (s.n_follower < LISTED + 2) {
      for (int32_t e = s.more; e >= 0; e = edges_[e].next)
        if (edges_[e].token == token) return e;
      return -1;
    }
    for (int64_t i = hash(state, token) & (n_place_ - 1);; i = (i + 1) & (n_place_ - 1)) {
      const int32_t e = place_[i];
      if (e < 0 || (edges_[e].state == state && edges_[e].token == token)) return e;
    }
  }

  static int64_t hash(int32_t state, int32_t token) {
    const uint64_t x = (uint64_t(uint32_t(state)) << 32 | uint32_t(token)) * 0x9E3779B97F4A7C15ull;
    return int64_t((x ^ x >> 32) & 0x7fffffff);
  }

  void enter(int32_t edge) {
    if (2 * (n_hashed_ + 1) > n_place_) {
      const int64_t n = n_place_ ? 2 * n_place_ : 64;
      int32_t *const wider = static_cast<int32_t *>(std::malloc(size_t(n) * 4));
      if (wider == nullptr) throw std::bad_alloc();
      for (int64_t i = 0; i < n; i++) wider[i] = -1;
      int32_t *const old = std::exchange(place_, wider);
      const int64_t n_old = std::exchange(n_place_, n);
      for (int64_t i = 0; i < n_old; i++)
        if (old[i] >= 0) put(old[i]);
      std::free(old);
    }
    n_hashed_++;
    put(edge);
  }

  void put(int32_t edge) {
    int64_t i = hash(edges_[edge].state, edges_[edge].token) & (n_place_ - 1);
    while (place_[i] >= 0) i = (i + 1) & (n_place_ - 1);
    place_[i] = edge;
  }

  Array<State> states_;
  Array<Edge> edges_;
  int32_t *place_ = nullptr;  // edges by hash of state and token
  int64_t n_place_ = 0, n_hashed_ = 0;
  int32_t last_ = 0;
};

}  // namespace pyspec::suffix
