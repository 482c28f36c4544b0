// Search for a building block, the passes of one microbatch that all microbatches repeat; see planner/block_search.py.
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
      : p_(problem), n_(problem.chunks), m_(problem.microbatches), fuse_(fuse), ranks_(problem), rows_(problem.ranks), items_(problem.ranks), next_(problem.ranks) {
    const int kinds = fuse ? 2 : 3;  // a fused W follows its B
    for (int kind = 0; kind < kinds; kind++)
      for (int c = 0; c < n_; c++) items_[p_.placement[c]].push_back(kind * n_ + c);
    const int half = n_ * m_;
    length_.resize(3 * half), change_.resize(3 * half), work_.assign(p_.ranks, 0);
    for (int at = 0; at < half; at++) {
      length_[at] = p_.forward[at], change_[at] = p_.activation[at];
      length_[half + at] = fuse ? p_.fused[at] : p_.backward[at], change_[half + at] = (fuse ? 0 : p_.held[at]) - p_.freed[at];
      length_[2 * half + at] = fuse ? 0 : p_.weight[at], change_[2 * half + at] = fuse ? 0 : -p_.held[at];
      work_[p_.placement[at / m_]] += length_[at] + length_[half + at] + length_[2 * half + at];
    }
  }

  const Rows& rows() const { return rows_; }
  Time run(const Block& at, Time threshold);
  bool change(Block& at, Random& random) const;

 private:
  bool unroll(const Block& at);

  const Problem& p_;
  const int n_, m_;
  const bool fuse_;
  Ranks ranks_;
  Rows rows_;                              // what `unroll` made
  std::vector<std::vector<int>> items_;    // [rank] kind and chunk of what it repeats
  std::vector<std::size_t> next_;          // [rank] the position in its row
  std::vector<Time> length_, change_;      // [pass]
  std::vector<Time> work_;                 // [rank]
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
        memory += change_[item * m_ + j];
        if (memory > p_.limit[rank]) return false;
        row.push_back(item * m_ + static_cast<int>(j));
        if (fuse_ && item >= n_) row.push_back((item + n_) * m_ + static_cast<int>(j));
      }
  }
  return true;
}

// The cost of the block; kForever when that exceeds the threshold, when it cannot run, or when it does not fit.
Time Blocks::run(const Block& at, Time threshold) {
  if (!unroll(at)) return kForever;
  std::fill(next_.begin(), next_.end(), 0);
  std::vector<Time> rest = work_;
  std::size_t waiting = p_.ranks;
  const bool kept = ranks_.run([&](int rank) {
    const Row& row = rows_[rank];
    for (std::size_t& k = next_[rank]; k < row.size(); k++) {
      const int pass = row[k], item = pass / m_, kind = item / n_;
      Time at;
      if (!ranks_.arrived(input_of(p_, kind, item % n_, pass), rank, at)) return true;
      const Time now = std::max(at, ranks_.clock[rank]);
      if (now - ranks_.begin(rank, now) + rest[rank] > threshold) return false;
      rest[rank] -= length_[pass];
      ranks_.finish(rank, pass, now + length_[pass]);
    }
    waiting--;
    return true;
  });
  return kept && !waiting ? ranks_.cost() : kForever;
}

// The block whose passes are evenly spaced, with `count` microbatches in flight.
Block even(const Problem& p, int count) {
  const int n = p.chunks;
  const Time step = kPeriod * count / (2 * n);
  Block at(3 * n);
  for (int c = 0; c < n; c++) {
    at[c] = c * step;
    at[n + c] = (2 * n - 1 - c) * step + (p.slices - 1) * kPeriod;  // all slices of a sequence go forward first
    at[2 * n + c] = at[n + c] + step / 2 + 1;
  }
  return at;
}

// Shifts one pass, or consecutive passes of the microbatch, or some W. False when a chunk's passes would be out of order.
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

Ordering search_blocks(const Problem& problem, std::uint64_t seed, const std::vector<Time>& temperatures, std::int64_t moves, Time target, bool fuse,
                     double seconds) {
  const Deadline deadline(seconds);
  Blocks blocks(problem, fuse);
  Random random(seed);
  Ordering best;
  best.cost = kForever;
  Block now;
  // The more are in flight the better, mostly, so that most of those with fewer soon exceed the best; of equals the fewest.
  for (int count = std::min(4 * problem.ranks, problem.microbatches); count >= 1; count--) {
    const Block at = even(problem, count);
    const Time cost = blocks.run(at, best.cost);
    if (cost < kForever) best.cost = cost, best.rows = blocks.rows(), now = at;
    if (best.cost < kForever && deadline.passed()) break;
  }
  Time cost = best.cost;
  if (cost == kForever) return Ordering{};
  for (Time temperature : temperatures)
    for (std::int64_t move = 0; move < moves && best.cost > target && !deadline.passed(); move++) {
      Block trial = now;
      if (!blocks.change(trial, random)) continue;
      const Time found = blocks.run(trial, cost + (temperature >> 16) * random.exponential());
      if (found == kForever) continue;
      now.swap(trial), cost = found;
      if (cost < best.cost) best.cost = cost, best.rows = blocks.rows();
    }
  best.fused.assign(static_cast<std::size_t>(problem.chunks) * problem.microbatches, fuse);
  return best;
}

}  // namespace zbkern
