// Search for a building block, the passes of one microbatch that all microbatches repeat; see planner/annealing.py.
#include <algorithm>

#include "planner.h"
#include "planner_random.h"
#include "planner_ranks.h"

namespace zbkern {
namespace {

constexpr Time kPeriod = 1 << 16;  // from one microbatch to the next

using Block = std::vector<Time>;  // [kind * chunks + chunk] when microbatch 0 runs it

class Blocks {
 public:
  Blocks(const Problem& problem, bool fuse)
      : p_(problem),
        n_(problem.chunks),
        m_(problem.units),
        fuse_(fuse),
        passes_(problem, std::vector<char>(n_ * m_, fuse)),
        ranks_(problem),
        rows_(problem.ranks),
        items_(problem.ranks),
        work_(problem.ranks) {
    for (int item = 0; item < (fuse ? 2 : 3) * n_; item++)
      items_[p_.placement[item % n_]].push_back(item);  // a fused W follows its B
    for (int pass = 0; pass < p_.passes(); pass++) work_[p_.placement[pass / m_ % n_]] += passes_.length[pass];
    if (!fuse)
      for (int at = 0; at < n_ * m_; at++) work_[p_.placement[at / m_]] -= p_.merge_saving[at];
  }

  const Rows& rows() const { return rows_; }
  // The cost of the block; kForever when that exceeds the threshold, when it cannot run, or when it does not fit.
  Time run(const Block& at, Time threshold) {
    return unroll(at) && ranks_.follow(rows_, passes_, work_, threshold) ? ranks_.cost() : kForever;
  }
  bool change(Block& at, Random& random) const;

 private:
  bool unroll(const Block& at);

  const Problem& p_;
  const int n_, m_;
  const bool fuse_;
  const Passes passes_;
  Ranks ranks_;
  Rows rows_;                            // what `unroll` made
  std::vector<std::vector<int>> items_;  // [rank] kind and chunk of what it repeats
  std::vector<Time> work_;               // [rank] at least
};

// The rows of all microbatches; false when they exceed a rank's memory.
bool Blocks::unroll(const Block& at) {
  for (int rank = 0; rank < p_.ranks; rank++) {
    auto& items = items_[rank];
    std::sort(items.begin(), items.end(), [&](int a, int b) {
      const Time left = at[a] & (kPeriod - 1), right = at[b] & (kPeriod - 1);
      return left != right ? left < right : a < b;
    });
    Time first = kForever, last = -kForever, memory = 0;
    for (int item : items) first = std::min(first, at[item] >> 16), last = std::max(last, at[item] >> 16);
    Row& row = rows_[rank];
    row.clear();
    for (Time turn = first; turn < last + m_; turn++)
      for (int item : items) {
        const Time j = turn - (at[item] >> 16);
        if (j < 0 || j >= m_) continue;
        memory += passes_.memory[item * m_ + j];
        if (memory > p_.limit[rank]) return false;
        row.push_back(item * m_ + static_cast<int>(j));
        if (fuse_ && item >= n_) row.push_back((item + n_) * m_ + static_cast<int>(j));
      }
  }
  return true;
}

// The block whose passes are evenly spaced, with `count` microbatches in flight.
Block even(const Problem& p, int count) {
  const int n = p.chunks;
  const Time step = kPeriod * count / (2 * n);
  Block at(3 * n);
  for (int c = 0; c < n; c++) {
    at[c] = c * step;
    at[n + c] = (2 * n - 1 - c) * step + (p.slices - 1) * kPeriod;  // all slices of a microbatch go forward first
    at[2 * n + c] = at[n + c] + step / 2 + 1;
  }
  return at;
}

// Shifts one pass, or consecutive passes of the microbatch, or some W. False when a chunk's passes would be out of
// order.
bool Blocks::change(Block& at, Random& random) const {
  constexpr Time scales[] = {kPeriod / 20, kPeriod / 10, kPeriod / 5, kPeriod / 2, kPeriod};
  Time step = 1 + random.below(static_cast<int>(scales[random.below(5)]));
  if (random.percent(50)) step = -step;
  const int what = random.below(5);
  if (what == 0) {
    at[random.below(3 * n_)] += step;
  } else if (what == 1) {
    const int first = random.below(n_), last = std::min(n_, first + 1 + random.below(5));
    for (int c = first; c < last; c++) at[2 * n_ + c] += step;
  } else {
    const int first = random.below(2 * n_), last = what == 2 ? 2 * n_ : std::min(2 * n_, first + 1 + random.below(5));
    for (int k = first; k < last; k++) {
      const int c = k < n_ ? k : 2 * n_ - 1 - k;
      at[k < n_ ? c : n_ + c] += step;
      if (k >= n_ && what < 4) at[2 * n_ + c] += step;
    }
  }
  for (int c = 0; c < n_; c++)
    if (at[n_ + c] <= at[c] + (p_.slices - 1) * kPeriod || (!fuse_ && at[2 * n_ + c] <= at[n_ + c])) return false;
  return true;
}

}  // namespace

Ordering search_blocks(const Problem& problem, bool fuse, const Effort& effort) {
  Blocks blocks(problem, fuse);
  Ordering best;
  best.cost = kForever;
  Block start;
  const auto keep = [&](const Block& at, Time cost) {
    if (cost < best.cost) best.cost = cost, best.rows = blocks.rows(), start = at;
  };
  // The more are in flight the better, mostly, so that most of those with fewer soon exceed the best; of equals the
  // fewest.
  for (int count = std::min(4 * problem.ranks, problem.units); count >= 1; count--) {
    const Block at = even(problem, count);
    keep(at, blocks.run(at, best.cost));
  }
  if (best.cost == kForever) return Ordering{};
  Time cost = best.cost;
  improve(
      start, cost, effort, [&](Block& trial, Random& random) { return blocks.change(trial, random); },
      [&](const Block& trial, Time threshold) { return cost = blocks.run(trial, threshold); },
      [&](const Block& now) { return keep(now, cost), best.cost <= effort.target; });
  best.fused.assign(static_cast<std::size_t>(problem.chunks) * problem.units, fuse);
  return best;
}

}  // namespace zbkern
