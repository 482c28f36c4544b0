// The list scheduler: every rank decides what to run next by its rule; see planner/list_scheduler.py.
#pragma once

#include <vector>

#include "planner.h"
#include "planner_random.h"

namespace zbkern {

class ListScheduler {
 public:
  explicit ListScheduler(const Problem& problem);

  // Whether the rule makes orders, `orders()`, that cost no more than `cutoff`.
  bool run(const Rule& rule, Time cutoff);
  const Ordering& orders() const { return orders_; }
  int ran() const { return p_.passes() - left_; }  // passes of the last run
  // The most by which a microbatch alone exceeds a rank's limit; at most 0 where all can run.
  Time excess() const;

 private:
  struct RankState {
    Time clock = 0, memory = 0, held = 0;
    Time start = -1;
    Time rest = 0;      // the least time that its passes which are left take
    Time reserved = 0;  // for microbatches that have begun, beside what their W hold
    bool last_was_forward = false;
    int following = -1;           // the chunk whose F or B comes next by `follow`
    std::size_t next_weight = 0;  // of `pending_`
  };
  struct Step {
    int kind = -1, chunk = -1;  // kind -1: there is nothing to run
    bool fuse = false;
    Time next = kForever;  // when an input arrives
  };

  void reset(const Rule& rule);
  Step choose(const Rule& rule, int rank, Time now) const;
  int execute(const Rule& rule, int rank, Time now, Step step);
  int id(int kind, int chunk, int k) const { return (kind * n_ + chunk) * m_ + k; }
  bool begins(int rank, int chunk, int k) const { return chunk == chunks_[rank].front() && p_.begins(k); }

  const Problem& p_;
  const int n_, m_;
  std::vector<Time> turns_;  // [rank] its next one; kForever while it waits for what has not been sent
  std::vector<std::vector<int>> chunks_,
      pending_;  // [rank] its chunks; the chunk of every B whose W is apart, in order
  std::vector<RankState> ranks_;
  std::vector<Time> arrives_;                        // [pass] of F and B: when the input arrives
  std::vector<Time> least_after_backward_;           // [chunk * units + k] the least time of B and W together
  std::vector<int> forwards_, backwards_, weights_;  // [chunk] how many have run
  std::vector<int> ends_;        // [k] as in the problem; and for a chunk that has none left
  std::vector<Time> to_finish_;  // [chunk * units + k] what F k and later ones of its microbatch take
  std::vector<Time> whole_;      // [rank * units + k] what the microbatch that begins there takes in all of its chunks
  int left_ = 0;  // passes that have not run
  Ordering orders_;
};

// Changes one choice, or the caps, of some neighbouring ranks.
void change(Rule& rule, const Problem& problem, bool may_follow, Random& random);

}  // namespace zbkern
