// Search for a pattern, the order of ZB-V with its counts as parameters; see planner/pattern_search.py.
#include <algorithm>
#include <array>

#include "planner.h"
#include "planner_random.h"
#include "planner_ranks.h"

namespace zbkern {
namespace {

constexpr int kPatience = 4;  // where the patience of the three phases begins, behind the four counts

class Patterns {
 public:
  explicit Patterns(const Problem& problem)
      : p_(problem),
        n_(problem.chunks),
        m_(problem.units),
        passes_(problem, std::vector<char>(n_ * m_, 0)),
        ranks_(problem),
        rows_(problem.ranks),
        scripts_(problem.ranks),
        pending_(problem.ranks),
        written_(problem.ranks) {
    for (int rank = 0; rank < p_.ranks; rank++) {
      Time work = 0;
      for (int c : {rank, n_ - 1 - rank})
        for (int at = c * m_; at < (c + 1) * m_; at++) work += p_.forward[at] + least_backward(at) + p_.weight[at];
      work_.push_back(work), least_ += work;
    }
  }

  Ordering orders() const { return {rows_, fused_, cost()}; }
  Time cost() const { return *std::max_element(span_.begin(), span_.end()); }
  Time energy(Time spread) const {
    Time sum = 0;
    for (Time span : span_) sum += span;
    return p_.ranks * cost() + spread * sum;
  }
  // The largest span that an order of this energy can have: all other spans are as small as their work allows.
  Time largest(Time energy, Time spread) const { return (energy - spread * least_) / p_.ranks; }
  bool run(const Pattern& pattern, Time threshold);

 private:
  void write(const Pattern& pattern, int rank);
  void weight(int rank);
  // What a backward (chunk * units + k) takes beside the W: less than the B where a fused one is faster.
  Time least_backward(int at) const { return std::min(p_.backward[at], p_.fused[at] - p_.weight[at]); }

  const Problem& p_;
  const int n_, m_;
  const Passes passes_;
  Ranks ranks_;
  Rows rows_;
  std::vector<char> fused_;
  std::vector<std::vector<int>> scripts_,
      pending_;  // [rank] 4 phase + 2 kind + (0 or 1 for the chunk); chunks of W to run
  std::vector<std::array<int, kPatience>> written_;  // [rank] the counts that its script was written for
  std::vector<int> count_;
  std::vector<std::size_t> place_, next_weight_;
  std::vector<Time> work_, span_, memory_, rest_;
  Time least_ = 0;
};

// The forwards and backwards of a rank in order. With slices: those for slices - 1 more units without the
// forwards of these and as many first backwards, so that a B comes after all F of its microbatch.
void Patterns::write(const Pattern& pattern, int rank) {
  enum { kDown = 0, kUp = 1, kBackUp = 2, kBackDown = 3 };  // F and B of the first chunk are even, of the second odd
  auto& script = scripts_[rank];
  const std::array<int, kPatience> counts = {pattern[0][rank], pattern[1][rank], pattern[2][rank], pattern[3][rank]};
  if (!script.empty() && counts == written_[rank]) return;  // as for most ranks: a change is of few
  written_[rank] = counts;
  script.clear();
  const int more = p_.slices - 1, all = m_ + more;
  int done[4] = {0, 0, 0, 0}, phase = 0;
  const auto add = [&](int what) {
    if (done[what] == all) return;
    const int number = done[what]++;
    if (what < kBackUp ? number < m_ : number >= more) script.push_back(4 * phase + what);
  };
  for (int i = 0; i < pattern[0][rank]; i++) add(kDown);
  for (int i = 0; i < pattern[1][rank]; i++) add(kUp), add(kDown);
  for (int i = 0; i < pattern[2][rank]; i++) add(kUp), add(kBackDown);
  for (int i = 0; i < pattern[3][rank]; i++) add(kDown), add(kUp), add(kBackDown);
  while (static_cast<int>(script.size()) < 4 * m_) {
    phase = done[kDown] < all ? 1 : 2;
    add(kDown), add(kBackUp), add(kUp), add(kBackDown);
  }
}

void Patterns::weight(int rank) {
  const int c = pending_[rank][next_weight_[rank]++], item = 2 * n_ + c, at = c * m_ + count_[item];
  rows_[rank].push_back(item * m_ + count_[item]++);
  ranks_.clock[rank] += p_.weight[at], rest_[rank] -= p_.weight[at], memory_[rank] -= p_.held[at];
}

// A B that has no room for what its W needs is fused. False when it cannot run, does not fit the memory, or some span
// would exceed the threshold.
bool Patterns::run(const Pattern& pattern, Time threshold) {
  memory_.assign(p_.ranks, 0), rest_ = work_;
  place_.assign(p_.ranks, 0), next_weight_.assign(p_.ranks, 0), count_.assign(3 * n_, 0), span_.assign(p_.ranks, 0);
  fused_.assign(static_cast<std::size_t>(n_) * m_, false);
  for (int rank = 0; rank < p_.ranks; rank++) {
    rows_[rank].clear(), pending_[rank].clear();
    write(pattern, rank);
  }
  int left = p_.ranks;
  return ranks_.run([&](int rank) {
    const auto& script = scripts_[rank];
    const auto& pending = pending_[rank];
    auto& next_weight = next_weight_[rank];
    for (auto& k = place_[rank]; k < script.size(); k++) {
      const int phase = script[k] / 4, kind = script[k] / 2 % 2, c = script[k] % 2 ? n_ - 1 - rank : rank;
      const int item = kind * n_ + c, j = count_[item], pass = item * m_ + j, here = c * m_ + j;
      if (kind == kBackward && count_[c] < p_.ends[j]) return false;
      Time at;
      if (!ranks_.arrived(passes_, pass, rank, at)) return true;
      const Time patience = pattern[kPatience + phase][rank];
      const auto waits_long = [&](int w) {
        return 4 * (at - ranks_.clock[rank]) >= patience * p_.weight[w * m_ + count_[2 * n_ + w]];
      };
      while (next_weight < pending.size() && waits_long(pending[next_weight])) weight(rank);
      Time change = kind == kForward ? p_.activation[here] : p_.held[here] - p_.freed[here];
      while (next_weight < pending.size() && memory_[rank] + change > p_.limit[rank]) weight(rank);
      const bool fuse = memory_[rank] + change > p_.limit[rank];
      if (fuse && kind == kForward) return false;
      if (fuse) change = -p_.freed[here];
      if (fuse && memory_[rank] + change > p_.limit[rank]) return false;
      const Time begin = std::max(at, ranks_.clock[rank]);
      const Time length = kind == kForward ? p_.forward[here] : fuse ? p_.fused[here] : p_.backward[here];
      if (begin - ranks_.begin(rank, begin) + rest_[rank] > threshold) return false;
      ranks_.finish(rank, pass, begin + length);
      rest_[rank] -= kind == kForward ? length : least_backward(here) + (fuse ? p_.weight[here] : 0);
      memory_[rank] += change, count_[item]++;
      rows_[rank].push_back(pass);
      if (fuse) fused_[here] = true, rows_[rank].push_back(pass + n_ * m_), count_[item + n_]++;
      else if (kind == kBackward) pending_[rank].push_back(c);
    }
    while (next_weight < pending.size()) weight(rank);
    span_[rank] = ranks_.clock[rank] - ranks_.start[rank];
    left--;
    return true;
  }) && left == 0;
}

// Changes counts, or the patience of a phase, on consecutive ranks.
void change(Pattern& pattern, int ranks, Random& random) {
  constexpr int steps[][4] = {{1, 0, 0, 0},  {0, 1, 0, 0},  {0, 0, 1, 0},  {0, 0, 0, 1},  {0, 1, -1, 0},
                              {2, -1, 0, 0}, {1, -1, 0, 0}, {2, -1, 1, 0}, {1, -1, 1, 0}, {1, 0, 1, 0},
                              {0, 0, 1, -1}, {1, 0, 0, -1}, {1, 0, 0, 1}};
  const int what = random.below(5), where = random.below(4);
  int first = random.below(ranks), last = std::min(ranks, first + 1 + random.below(what ? 6 : ranks));
  if (where == 0) first = 0;
  if (where == 1) last = ranks;
  if (what == 0) {
    const int phase = random.below(3), patience = 1 + random.below(8);
    for (int rank = first; rank < last; rank++) pattern[kPatience + phase][rank] = patience;
    return;
  }
  const auto& step = steps[random.below(13)];
  const int sign = random.percent(50) ? 1 : -1;
  for (int which = 0; which < kPatience; which++)
    for (int rank = first; rank < last; rank++) {
      int& count = pattern[which][rank];
      count = std::max(which == 0 ? 1 : 0, count + sign * step[which]);
    }
}

}  // namespace

std::pair<Ordering, Pattern> search_patterns(const Problem& problem, const Pattern& start, const Effort& effort) {
  Patterns patterns(problem);
  std::pair<Ordering, Pattern> best;
  if (!patterns.run(start, kForever)) return best;
  Effort scaled = effort;
  for (Time& temperature : scaled.temperatures) temperature *= problem.ranks;
  improve(
      start, patterns.energy(effort.spread), scaled,
      [&](Pattern& trial, Random& random) { return change(trial, problem.ranks, random), true; },
      [&](const Pattern& trial, Time threshold) {
        return patterns.run(trial, patterns.largest(threshold, effort.spread)) ? patterns.energy(effort.spread)
                                                                               : kForever;
      },
      [&](const Pattern& now) {
        if (best.second.empty() || patterns.cost() < best.first.cost) best = {patterns.orders(), now};
        return best.first.cost <= effort.target;
      });
  return best;
}

}  // namespace zbkern
