// Suffix drafts of a round, for all slots in one call. A draft follows the likeliest branch behind the longest suffix that stands before, while
// the product of its chances stays above a bound (SuffixDecoding: Oliaro et al., 2024). Chances are learned from the tokens that come: every
// token of an answer, drafted or not, is compared with the follower that a draft would have had. So they stay true while nothing is drafted.
// Compiled alone where no library is at hand (pyspec/cpu/build.py), so it needs no other source, and without fused products.
#include "suffix_automaton.h"

namespace pyspec::suffix {
namespace {

constexpr int LATE = 64, BEFORE = 64;
constexpr int64_t MOST_TEXT = 1 << 18;
constexpr int N_LENGTH = 10, N_SHARE = 8, N_PROMISE = 4, LONGEST = 48;
constexpr int LENGTHS[N_LENGTH] = {2, 3, 4, 6, 8, 12, 16, 24, 32, LONGEST};
constexpr double SHARES[] = {0.5, 0.75, 0.9, 0.999}, PROMISES[N_PROMISE] = {1.0, 2.0, 4.0, 8.0};
constexpr double PRIOR = 6.0, MEMORY = 400.0, MOST_CHANCE = 0.99, TRUST = 0.9, TEXT_PRIOR = 2.0;
constexpr double FIRST_RATIO = 0.8, ALL_PRIOR = 12.0, ALL_TRUST = 0.98, TEXT_WEIGHT = 6.0, TEXT_TRUST = 0.9;
constexpr double LEAST_FACTOR = 0.1, MOST_FACTOR = 1.1;

// The number of entries that are less.
template <typename T, typename X>
int below(const T *sorted, int n, X x) {
  int i = 0;
  while (i < n && sorted[i] < x) i++;
  return i;
}

// How often the likeliest follower of a match came, by the match's length and the follower's share: Python's tables of SuffixChances.
struct Chances {
  double *came, *seen;
  const double *guess;

  static int group(int length, const Branch &b) {
    const int i = below(LENGTHS, N_LENGTH, length < LONGEST + 1 ? length : LONGEST + 1);
    const int share = b.n < b.n_all ? below(SHARES, 4, double(b.n) / double(b.n_all)) : b.n == 1 ? 5 : b.n <= 3 ? 6 : 7;
    return i * N_SHARE + share;
  }
  double of(int length, const Branch &b) const {
    const int i = group(length, b);
    return (came[i] + PRIOR * guess[i]) / (seen[i] + PRIOR);
  }
  double learn(int length, const Branch &b, bool is_right) {
    const int i = group(length, b);
    const double chance = (came[i] + PRIOR * guess[i]) / (seen[i] + PRIOR), was = seen[i];
    came[i] += is_right;
    seen[i] = was + 1.0;
    if (was >= MEMORY) {
      came[i] /= 2;
      seen[i] /= 2;
    }
    return chance;
  }
};

// Python's numbers of Promise, those of one text and those of all.
struct Promise {
  double *kept, *promised, *all_kept, *all_promised;

  void add(double size, double part, int n_kept) {
    const int i = below(PROMISES, N_PROMISE, size);
    kept[i] = TEXT_TRUST * kept[i] + n_kept;
    promised[i] = TEXT_TRUST * promised[i] + part;
    all_kept[i] = ALL_TRUST * all_kept[i] + n_kept;
    all_promised[i] = ALL_TRUST * all_promised[i] + part;
  }
  double factor(double size) const {
    const int i = below(PROMISES, N_PROMISE, size);
    const double of_all = (all_kept[i] + ALL_PRIOR * FIRST_RATIO) / (all_promised[i] + ALL_PRIOR);
    const double own = (kept[i] + TEXT_WEIGHT * (of_all < 1.0 ? of_all : 1.0)) / (promised[i] + TEXT_WEIGHT);
    return own < 1.0 ? own : 1.0;
  }
};

// Tokens that came and those that were expected, in one text lately.
struct Factor {
  double came = TEXT_PRIOR, expected = TEXT_PRIOR;

  void add(double chance, bool is_right) {
    came = TRUST * came + is_right;
    expected = TRUST * expected + chance;
  }
  double value() const {
    const double ratio = (came + TEXT_PRIOR) / (expected + TEXT_PRIOR);
    return ratio < LEAST_FACTOR ? LEAST_FACTOR : ratio < MOST_FACTOR ? ratio : MOST_FACTOR;
  }
};

struct Place {
  const Automaton *automaton = nullptr;
  int64_t serial = 0;
  int32_t state = 0, length = 0;

  // The automaton's own text.
  static Place of_text(const Automaton &a) { return {&a, a.serial, a.match(), a.state(a.match()).length}; }
  // The likeliest next token behind a suffix of `n_match` tokens or more; a shorter one if nothing follows the longest.
  bool likeliest(Branch *found, int n_match) {
    while (length >= n_match) {
      if (automaton->likeliest(state, found)) return true;
      state = automaton->state(state).link;
      length = automaton->state(state).length;
    }
    return false;
  }
};

struct Draft {
  Array<int32_t> tokens;
  Array<double> chances, found;  // found: products of the chances
  double size = 0.0, expected = 0.0;

  void clear() {
    tokens.cut(0);
    chances.cut(0);
    found.cut(0);
    size = expected = 0.0;
  }
};

// Addresses that a round gives for each of its texts, and its numbers.
struct Ask {
  struct Text *text;
  int64_t n_known, n_new, most;  // tokens of the text that it has and that still hold, and new ones
  const Automaton *answers[2];   // young, old; 0: none
};

struct Text {
  Automaton own;
  Array<int32_t> tokens;
  int64_t n_begin = 0, n_entered = 0, n_followed = 0;
  Place places[2];
  int n_place = 0, n_match = 2;
  Chances of_text{}, of_answers{};
  Promise promise{};
  Factor own_factor, others_factor;
  Draft offer, other;
  int64_t n_offered = -1;  // tokens before the last offer; -1: none
  bool is_other = false;   // tokens that are entered were replaced

  void enter(int64_t n) {
    const int64_t most = n_begin < MOST_TEXT ? n_begin : MOST_TEXT;
    for (int64_t end = n_entered + n < most ? n_entered + n : most; n_entered < end; n_entered++)
      own.extend(tokens[n_entered]);
  }

  // Learn what drafts keep of their promises.
  void judge(int64_t n_draft, int n_accepted) {
    if (!n_draft || !offer.tokens.size()) return;
    double part = 0.0;
    for (int64_t i = 0; i < n_draft && i < offer.found.size(); i++) part += offer.found[i];
    promise.add(offer.size, part, n_accepted);
  }

  // Learn from an offer that was not taken: its first tokens stand beside those that came.
  void compare() {
    if (n_offered < 0) return;
    int64_t n = tokens.size() - n_offered, n_right = 0;
    n = n < 0 ? 0 : n < offer.tokens.size() ? n : offer.tokens.size();
    while (n_right < n && offer.tokens[n_right] == tokens[n_offered + n_right]) n_right++;
    judge(n, int(n_right));
    n_offered = -1;
  }

  void learn(Place &place, int32_t token, Chances &chances, Factor &factor) const {
    Branch branch;
    if (!place.likeliest(&branch, n_match)) return;
    const bool is_right = branch.token == token;
    factor.add(chances.learn(place.length, branch, is_right), is_right);
  }

  // False if the text is not entered up to its end, or too long.
  bool catch_up() {
    const int64_t n_past = tokens.size() - 1, rest = (n_begin < MOST_TEXT ? n_begin : MOST_TEXT) - n_entered;
    if (rest > 0 && rest <= LATE) enter(rest);
    if (n_entered < n_begin || n_past >= MOST_TEXT) return false;
    if (tokens.size() - n_entered > LATE) {
      for (int i = 0; i < LATE; i++) own.extend(tokens[n_entered++]);
      return false;
    }
    for (; n_entered < tokens.size(); n_entered++) {
      if (n_entered > n_begin) {
        Place place = Place::of_text(own);
        learn(place, tokens[n_entered], of_text, own_factor);
      }
      own.extend(tokens[n_entered]);
    }
    return true;
  }

  Place &longest() { return n_place > 1 && places[1].length > places[0].length ? places[1] : places[0]; }

  // Follow the client's answers. False if there are none.
  bool follow_answers(const Automaton *const *answers) {
    const int n = answers[0] == nullptr ? 0 : answers[1] == nullptr ? 1 : 2;
    if (!n) return false;
    const int64_t n_past = tokens.size() - 1;
    bool is_known = n == n_place && n_past - n_followed <= BEFORE;
    for (int i = 0; i < n; i++) is_known = is_known && places[i].serial == answers[i]->serial;
    if (!is_known) {
      n_place = n;
      for (int i = 0; i < n; i++) places[i] = {answers[i], answers[i]->serial, 0, 0};
      n_followed = n_past > BEFORE ? n_past - BEFORE : 0;
    }
    for (; n_followed < tokens.size(); n_followed++) {
      const int32_t token = tokens[n_followed];
      if (n_followed > n_begin) learn(longest(), token, of_answers, others_factor);
      for (int i = 0; i < n; i++) places[i].automaton->step(token, &places[i].state, &places[i].length);
    }
    return true;
  }

  // The likeliest branch behind a match.
  void follow(Place place, int64_t most, double least, const Chances &chances, double factor, Draft *to) const {
    double survives = 1.0;
    to->clear();
    Branch branch;
    while (to->tokens.size() < most && place.likeliest(&branch, n_match)) {
      const double likely = chances.of(place.length, branch) * factor;
      const double chance = likely < MOST_CHANCE ? likely : MOST_CHANCE;
      survives *= chance;
      if (survives < least) break;
      to->tokens.add(branch.token);
      to->chances.add(chance);
      to->found.add(survives);
      to->size += survives;
      place.state = branch.state;
      place.length++;
    }
    if (to->tokens.size()) to->expected = promise.factor(to->size) * to->size;
  }

  // The draft is `offer` then.
  void draft(const Ask &ask, const int32_t *added, double least, int match) {
    n_match = match;
    for (int64_t i = 0; i < ask.n_new && ask.n_known + i < n_entered; i++)
      is_other = is_other || tokens[ask.n_known + i] != added[i];
    tokens.cut(ask.n_known);
    tokens.add(added, ask.n_new);
    compare();
    if (follow_answers(ask.answers))
      follow(longest(), ask.most, least, of_answers, others_factor.value(), &offer);
    else
      offer.clear();
    if (catch_up()) {
      follow(Place::of_text(own), ask.most, least, of_text, own_factor.value(), &other);
      if (other.expected >= offer.expected) {
        offer.clear();
        offer.tokens.add(other.tokens.begin(), other.tokens.size());
        offer.chances.add(other.chances.begin(), other.chances.size());
        offer.found.add(other.found.begin(), other.found.size());
        offer.size = other.size;
        offer.expected = other.expected;
      }
    }
    n_offered = tokens.size();
  }
};

constexpr int64_t NO_MEMORY = -1;

template <typename F>
int64_t guarded(F f) {
  try {
    return f();
  } catch (const std::bad_alloc &) {
    return NO_MEMORY;
  }
}

}  // namespace
}  // namespace pyspec::suffix

using namespace pyspec::suffix;

extern "C" {

void *pyspec_suffix_automaton() { return new (std::nothrow) Automaton(); }
void pyspec_suffix_free_automaton(Automaton *a) { delete a; }
void pyspec_suffix_begin(Automaton *a) { a->begin(); }
int64_t pyspec_suffix_extend(Automaton *a, const int32_t *tokens, int64_t n) {
  return guarded([&] {
    for (int64_t i = 0; i < n; i++) a->extend(tokens[i]);
    return n;
  });
}
int64_t pyspec_suffix_n_token(const Automaton *a) { return a->n_token; }
int64_t pyspec_suffix_n_state(const Automaton *a) { return a->n_state(); }
int64_t pyspec_suffix_n_byte(const Automaton *a) { return a->n_byte(); }
// A state's numbers: longest substring, link, places, token at which it was counted last.
void pyspec_suffix_state(const Automaton *a, int32_t state, int32_t *to) {
  const Automaton::State &s = a->state(state);
  const int32_t numbers[] = {s.length, s.link, s.places, s.at};
  for (int i = 0; i < 4; i++) to[i] = numbers[i];
}
int32_t pyspec_suffix_match(const Automaton *a) { return a->match(); }
int32_t pyspec_suffix_next(const Automaton *a, int32_t state, int32_t token) { return a->next(state, token); }
int32_t pyspec_suffix_likeliest(const Automaton *a, int32_t state, Branch *to) { return a->likeliest(state, to); }
void pyspec_suffix_step(const Automaton *a, int32_t token, int32_t *place) { a->step(token, place, place + 1); }

void *pyspec_suffix_text() { return new (std::nothrow) Text(); }
void pyspec_suffix_free_text(Text *t) { delete t; }
Automaton *pyspec_suffix_own(Text *t) { return &t->own; }
int64_t pyspec_suffix_text_byte(const Text *t) { return t->own.n_byte() + 4 * t->tokens.size(); }
int64_t pyspec_suffix_entered(const Text *t, int32_t *to) {
  for (int64_t i = 0; to != nullptr && i < t->n_entered; i++) to[i] = t->tokens[i];
  return t->n_entered;
}
// The text goes on with this prompt: what is entered is its beginning.
int32_t pyspec_suffix_continues(const Text *t, const int32_t *prompt, int64_t n) {
  if (t->n_entered > n || t->is_other) return 0;
  for (int64_t i = 0; i < t->n_entered; i++)
    if (t->tokens[i] != prompt[i]) return 0;
  return 1;
}
// A request starts. learned: addresses of came, seen and guess of texts and of answers, and of kept and promised of this text and of all.
int64_t pyspec_suffix_start(Text *t, const int32_t *prompt, int64_t n, double *const *learned) {
  return guarded([&] {
    t->tokens.cut(0);
    t->tokens.add(prompt, n);
    t->n_begin = n;
    t->n_place = 0;
    t->own_factor = t->others_factor = Factor();
    t->n_offered = -1;
    t->of_text = {learned[0], learned[1], learned[2]};
    t->of_answers = {learned[3], learned[4], learned[5]};
    t->promise = {learned[6], learned[7], learned[8], learned[9]};
    return n;
  });
}
int64_t pyspec_suffix_enter(Text *t, int64_t n) {
  return guarded([&] {
    t->enter(n);
    return t->n_entered;
  });
}
void pyspec_suffix_judge(Text *t, int64_t n_draft, int64_t n_accepted) {
  if (t->n_offered < 0 || !n_draft) return;
  t->judge(n_draft, int(n_accepted));
  t->n_offered = -1;
}
// Draft for n texts, where `n_match` tokens or more stood before. added: new tokens of all, one text behind the other. For each text: its number of tokens and what it expects; and one
// text behind the other the tokens, their chances, and the chances that all up to each are right.
int64_t pyspec_suffix_round(const Ask *asks, int64_t n, const int32_t *added, double least, int32_t n_match, int32_t *n_token,
                            double *expected, int32_t *tokens, double *chances, double *survival) {
  return guarded([&] {
    for (int64_t i = 0; i < n; i++) {
      const Ask &ask = asks[i];
      ask.text->draft(ask, added, least, n_match);
      added += ask.n_new;
      const Draft &draft = ask.text->offer;
      const double factor = ask.text->promise.factor(draft.size);
      n_token[i] = int32_t(draft.tokens.size());
      expected[i] = draft.expected;
      for (int64_t j = 0; j < draft.tokens.size(); j++) {
        *tokens++ = draft.tokens[j];
        *chances++ = draft.chances[j];
        *survival++ = factor * draft.found[j];
      }
    }
    return n;
  });
}
}
