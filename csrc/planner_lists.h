// The list scheduler: every rank decides what to run next by its rule; see planner/list_scheduler.py.
#pragma once

#include <array>
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
    int actions = 0;
  };
  struct Pick {
    int kind, chunk;
    bool fuse;
  };
  struct Step {
    std::array<Pick, 3> picks;
    int count = 0;         // of them: beside each other, or there is nothing to run
    Time next = kForever;  // when an input arrives
    void take(int kind, int chunk, bool fuse = false) { picks[count++] = {kind, chunk, fuse}; }
  };

  void reset(const Rule& rule);
  Step choose(const Rule& rule, int rank, Time now) const;
  Step choose_beside(const Rule& rule, int rank, Time now) const;
  int run(const Rule& rule, int rank, Time now, const Step& step);
  int finish(const Rule& rule, int rank, Time now, Pick pick, Time end);
  // chunk * units + k of the next pass of a kind, for W the i-th that is pending.
  int next(int rank, const Pick& pick, int i) const {
    if (pick.kind == kWeight) return pending_[rank][ranks_[rank].next_weight + i];
    return pick.chunk * m_ + (pick.kind == kForward ? forwards_ : backwards_)[pick.chunk];
  }
  Time length(const Pick& pick, int at) const {
    if (pick.kind == kForward) return p_.forward[at];
    return pick.kind == kWeight ? p_.weight[at] : pick.fuse ? p_.fused[at] : p_.backward[at];
  }
  Time network_of(int kind, int at) const {
    return kind == kWeight || p_.network[kind].empty() ? 0 : p_.network[kind][at];
  }
  int id(int kind, int chunk, int k) const { return (kind * n_ + chunk) * m_ + k; }
  bool begins(int rank, int chunk, int k) const { return chunk == chunks_[rank].front() && p_.begins(k); }

  const Problem& p_;
  const int n_, m_;
  std::vector<Time> turns_;  // [rank] its next one; kForever while it waits for what has not been sent
  std::vector<std::vector<int>> chunks_,
      pending_;  // [rank] its chunks; chunk * units + k of every B whose W is apart, in order
  std::vector<RankState> ranks_;
  std::vector<Time> arrives_;                        // [pass] of F and B: when the input arrives
  std::vector<Time> least_after_backward_;           // [chunk * units + k] the least time of B and W together
  std::vector<int> forwards_, backwards_;            // [chunk] how many have run
  std::vector<int> ends_;        // [k] as in the problem; and for a chunk that has none left
  std::vector<Time> to_finish_;  // [chunk * units + k] what F k and later ones of its microbatch take
  std::vector<Time> whole_;      // [rank * units + k] what the microbatch that begins there takes in all of its chunks
  int left_ = 0;  // passes that have not run
  Ordering orders_;
};

// Changes one choice, or the caps, of some neighbouring ranks.
void change(Rule& rule, const Problem& problem, bool may_follow, Random& random);

}  // namespace zbkern
