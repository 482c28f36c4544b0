// Runs the rows of all ranks, each until it waits for a pass of another: what every evaluation of an order shares.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "planner.h"

namespace zbkern {

constexpr Time kForever = INT64_MAX / 4;

// What a pass waits for: a pass of another chunk, -1 for none, and how long its message takes.
struct Input {
  int pass;
  Time lag;
};

inline Input input_of(const Problem& p, int kind, int chunk, int pass) {
  if (kind == kForward && chunk > 0) return {pass - p.microbatches, p.forward_lag[pass]};
  if (kind == kBackward && chunk + 1 < p.chunks) return {pass + p.microbatches, p.backward_lag[pass - p.chunks * p.microbatches]};
  return {-1, 0};
}

class Ranks {
 public:
  explicit Ranks(const Problem& problem)
      : clock(problem.ranks), start(problem.ranks), p_(problem), ends_(problem.passes()), waiter_(problem.passes()) {}

  // Calls row(rank) for every rank, and again when what it waited for has run; false as soon as that returns false.
  template <typename Row>
  bool run(Row row) {
    std::fill(ends_.begin(), ends_.end(), -1), std::fill(waiter_.begin(), waiter_.end(), -1);
    std::fill(clock.begin(), clock.end(), 0), std::fill(start.begin(), start.end(), -1);
    runnable_.resize(p_.ranks);
    std::iota(runnable_.rbegin(), runnable_.rend(), 0);
    while (!runnable_.empty()) {
      const int rank = runnable_.back();
      runnable_.pop_back();
      if (!row(rank)) return false;
    }
    return true;
  }
  // Whether the input has been computed; `at`: when it arrives. Otherwise the rank waits for it.
  bool arrived(Input input, int rank, Time& at) {
    at = 0;
    if (input.pass < 0) return true;
    if (ends_[input.pass] < 0) {
      waiter_[input.pass] = rank;
      return false;
    }
    at = ends_[input.pass] + input.lag;
    return true;
  }
  // When the rank began, if this is its first pass; the makespan begins at 0.
  Time begin(int rank, Time at) {
    if (start[rank] < 0) start[rank] = p_.makespan ? 0 : at;
    return start[rank];
  }
  void finish(int rank, int pass, Time end) {
    clock[rank] = ends_[pass] = end;
    if (waiter_[pass] >= 0) runnable_.push_back(waiter_[pass]);
  }
  Time cost() const {
    Time most = 0;
    for (int rank = 0; rank < p_.ranks; rank++) most = std::max(most, clock[rank] - start[rank]);
    return most;
  }

  std::vector<Time> clock, start;  // [rank]

 private:
  const Problem& p_;
  std::vector<Time> ends_;             // [pass] -1 for one that has not run
  std::vector<int> waiter_, runnable_;  // [pass] the rank that waits for it, or -1
};

}  // namespace zbkern
