// Runs the rows of all ranks, each until it waits for a pass of another: what every evaluation of an order shares.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "planner.h"

namespace zbkern {

// What passes wait for and take: [pass].
struct Passes {
  std::vector<int> input;                 // the pass of another chunk whose output it waits for, or -1
  std::vector<Time> lag, length, memory;  // of its message; its time; what it adds to the memory of its rank

  Passes(const Problem& p, const std::vector<char>& fused)
      : input(p.passes(), -1), lag(p.passes()), length(lag), memory(lag) {
    const int m = p.units, half = p.chunks * m;
    for (int at = 0; at < half; at++) {
      length[at] = p.forward[at], memory[at] = p.activation[at];
      fuse(p, at, fused[at]);
      if (at >= m) input[at] = at - m, lag[at] = p.forward_lag[at];
      if (at + m < half) input[half + at] = half + at + m, lag[half + at] = p.backward_lag[at];
    }
  }
  // Of the backward chunk * units + k.
  void fuse(const Problem& p, int at, bool both) {
    const int half = p.chunks * p.units;
    length[half + at] = both ? p.fused[at] : p.backward[at], memory[half + at] = (both ? 0 : p.held[at]) - p.freed[at];
    length[2 * half + at] = both ? 0 : p.weight[at], memory[2 * half + at] = both ? 0 : -p.held[at];
  }
  // The time of a pass that directly follows another one, or none: of W of one chunk the later gains.
  Time after(const Problem& p, int before, int pass) const {
    const int m = p.units, first_weight = kWeight * p.chunks * m;
    const bool merged = pass >= first_weight && before >= 0 && before / m == pass / m && length[pass] && length[before];
    return length[pass] - (merged ? p.merge_saving[pass - first_weight] : 0);
  }
};

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
  // Runs the rows. False when they cannot end, or a span would exceed the threshold; work: of each rank, at least.
  bool follow(const Rows& rows, const Passes& passes, std::vector<Time> work, Time threshold) {
    next_.assign(p_.ranks, 0);
    int waiting = p_.ranks;
    return run([&](int rank) {
      const Row& row = rows[rank];
      for (std::size_t& k = next_[rank]; k < row.size(); k++) {
        const int pass = row[k];
        Time at;
        if (!arrived(passes, pass, rank, at)) return true;
        const Time now = std::max(at, clock[rank]), length = passes.after(p_, k ? row[k - 1] : -1, pass);
        if (now - begin(rank, now) + work[rank] > threshold) return false;
        work[rank] -= length;
        finish(rank, pass, now + length);
      }
      waiting--;
      return true;
    }) && !waiting;
  }
  // Whether the input has been computed; `at`: when it arrives. Otherwise the rank waits for it.
  bool arrived(const Passes& passes, int pass, int rank, Time& at) {
    const int input = passes.input[pass];
    at = 0;
    if (input < 0) return true;
    if (ends_[input] < 0) {
      waiter_[input] = rank;
      return false;
    }
    at = ends_[input] + passes.lag[pass];
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
  Time end(int pass) const { return ends_[pass]; }
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
  std::vector<std::size_t> next_;       // [rank] the position in its row
};

}  // namespace zbkern
