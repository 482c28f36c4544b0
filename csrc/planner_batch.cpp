#include "planner_batch.h"

#include <queue>

#include "planner_batch_units.h"
#include "planner_random.h"

namespace zbkern {
namespace {

constexpr int kTried = 2;  // sizes of units, of which all policies are tried in a limited memory

// How units are ordered, and how ranks decide between what is ready.
struct Policy {
  int fuse = 0;       // BW: never, always, on the first chunk, or on the first `ranks`
  int ranks = 0;
  int forward = 0;    // F before B: never, always, or after a B
  int newest = 0;     // of several B the one of the first unit of the order, not the one that came first
  int late = 1;       // of several F that of the rank's last chunk
  int patience = 2;   // quarters of a W that a wait must be as long as for W to fill it
  int share = 256;    // of 256 parts of the limit, what the first rank uses
  int slope = 0;      // and how many fewer the last one does
};

// Runs a batch by a policy: each rank takes what is ready. F run in the order of the units, B of a sequence from its
// last slice, W in the order of their B.
class ListSchedule {
 public:
  ListSchedule(const Batch& batch, const std::vector<int>& order, const Policy& policy)
      : batch_(batch), order_(order), policy_(policy), n_(batch.size()), place_(n_),
        forward_(batch.chunks * static_cast<std::size_t>(n_), kForever), backward_(forward_), done_(forward_.size(), 0),
        next_(batch.chunks, 0), ready_(batch.chunks), ranks_(batch.ranks) {
    for (int i = 0; i < n_; i++) place_[order[i]] = i, forward_[i] = 0;
  }

  // Ends once it takes longer than `bound`; record: keeps the events.
  void run(Time bound, bool record) {
    record_ = record;
    std::int64_t left = 2ll * batch_.chunks * n_;
    for (int r = 0; r < batch_.ranks; r++) heap_.emplace(0, r);
    while (!heap_.empty()) {
      const auto [now, r] = heap_.top();
      heap_.pop();
      if (ranks_[r].free > now) continue;
      left -= step(now, r);
      if (makespan > bound) return;
    }
    for (const Rank& rank : ranks_) complete = complete && rank.weights == rank.pending.size();
    complete = complete && left == 0;
  }

  bool complete = true;
  Time makespan = 0;
  std::vector<std::vector<BatchEvent>> events;
  std::vector<Time> peaks() const {
    std::vector<Time> found;
    for (const Rank& rank : ranks_) found.push_back(rank.peak);
    return found;
  }

 private:
  struct Rank {
    Time free = 0, held = 0, peak = 0, reserved = 0;
    int before = kForward;
    std::vector<std::pair<int, int>> pending;  // chunk and unit of W
    std::size_t weights = 0;                   // of these, those that ran
  };

  const Batch& batch_;
  const std::vector<int>& order_;
  const Policy& policy_;
  int n_;
  std::vector<int> place_;
  std::vector<Time> forward_, backward_;  // when inputs and gradients arrive
  std::vector<char> done_;                // whether a B has run
  std::vector<int> next_;                 // of the order, the next F of each chunk
  std::vector<std::vector<int>> ready_;   // units whose gradient is on its way or there, by chunk
  std::vector<Rank> ranks_;
  bool record_ = false;
  std::priority_queue<std::pair<Time, int>, std::vector<std::pair<Time, int>>, std::greater<>> heap_;

  bool fuses(int r, int chunk) const {
    return policy_.fuse == 1 || (policy_.fuse == 2 && chunk == 0) || (policy_.fuse == 3 && r < policy_.ranks);
  }
  // What a unit, or a whole sequence with its first slice, may come to hold on a rank.
  Time need(int r, int unit) const {
    const BatchUnit& u = batch_.units[unit];
    if (u.slice > 0) return 0;
    Time sum = 0;
    for (int slice = 0; slice < u.slices; slice++)
      for (int c : batch_.mine[r]) sum += most(c, unit + slice);
    for (int c : batch_.mine[r]) sum += u.slices > 1 ? batch_.carried_most(batch_.at(c, unit)) : 0;
    return sum;
  }
  Time most(int chunk, int unit) const {
    const std::size_t i = batch_.at(chunk, unit);
    return std::max(batch_.priced.activation[i], batch_.priced.held[i]);
  }

  // Starts one pass on a rank, if any can; how many F and B that are.
  int step(Time now, int r) {
    Rank& rank = ranks_[r];
    const auto& mine = batch_.mine[r];
    Time next = kForever;  // when more arrives
    std::pair<Time, int> best{kForever, 0};
    int kind = -1, chunk = 0, unit = 0;
    for (int c : mine)
      for (int i : ready_[c]) {
        const BatchUnit& u = batch_.units[i];
        if (u.slice + 1 < u.slices && !done_[batch_.at(c, i + 1)]) continue;
        const Time arrival = backward_[batch_.at(c, i)];
        if (arrival > now) {
          next = std::min(next, arrival);
          continue;
        }
        const std::pair<Time, int> key = policy_.newest ? std::pair<Time, int>{place_[i], -c} : std::pair{arrival, -c};
        if (key < best) best = key, kind = kBackward, chunk = c, unit = i;
      }
    bool blocked = false;  // an F that memory has no room for
    const auto& limits = batch_.costs.limit;
    const Time limit =
        limits.empty() ? kForever : limits[r] / 256 * (policy_.share - policy_.slope * r / batch_.ranks);
    for (std::size_t i = 0; i < mine.size(); i++) {
      const int c = mine[policy_.late ? mine.size() - 1 - i : i];
      if (next_[c] >= n_) continue;
      const int u = order_[next_[c]];
      const Time arrival = forward_[batch_.at(c, u)];
      if (arrival > now) {
        next = std::min(next, arrival);
        continue;
      }
      if (c == mine[0] && rank.reserved > 0 && batch_.units[u].slice == 0 && rank.reserved + need(r, u) > limit) {
        blocked = true;
        continue;
      }
      if (kind < 0 || policy_.forward == 1 || (policy_.forward == 2 && rank.before == kBackward))
        kind = kForward, chunk = c, unit = u;
      break;
    }
    if (kind < 0 && rank.weights < rank.pending.size()) {
      const auto [c, u] = rank.pending[rank.weights];
      const Time length = batch_.priced.time[kWeight][batch_.at(c, u)];
      if (blocked || next == kForever || 4 * (next - now) >= policy_.patience * length)
        kind = kWeight, chunk = c, unit = u;
    }
    if (kind < 0) {
      if (next < kForever) heap_.emplace(next, r);
      return 0;
    }
    start(now, r, kind, chunk, unit);
    return kind != kWeight;
  }

  void start(Time now, int r, int kind, int chunk, int unit) {
    Rank& rank = ranks_[r];
    const std::size_t i = batch_.at(chunk, unit);
    const int what = kind == kBackward && fuses(r, chunk) ? kFused : kind;
    const Time end = now + batch_.priced.time[what][i];
    if (kind == kForward) {
      next_[chunk]++;
      if (chunk == batch_.mine[r][0]) rank.reserved += need(r, unit);
      if (chunk + 1 < batch_.chunks) {
        arrive(forward_, chunk + 1, unit, end + batch_.lag(chunk, chunk + 1, unit));
      } else {
        backward_[i] = end;
        ready_[chunk].push_back(unit);
      }
    } else if (kind == kBackward) {
      done_[i] = 1;
      auto& waiting = ready_[chunk];
      waiting.erase(std::find(waiting.begin(), waiting.end(), unit));
      if (what == kFused) rank.reserved -= most(chunk, unit);
      else rank.pending.emplace_back(chunk, unit);
      const BatchUnit& u = batch_.units[unit];
      if (u.slices > 1 && u.slice == 0) rank.reserved -= batch_.carried_most(i);
      if (chunk > 0) {
        arrive(backward_, chunk - 1, unit, end + batch_.lag(chunk, chunk - 1, unit));
        ready_[chunk - 1].push_back(unit);
      }
    } else {
      rank.weights++;
      rank.reserved -= most(chunk, unit);
    }
    const Time change = batch_.change(what, chunk, unit);
    rank.held += change;  // what a pass frees is free at its end, and the rank runs one at a time
    rank.peak = std::max(rank.peak, rank.held);
    rank.before = kind;
    rank.free = end;
    makespan = std::max(makespan, end);
    if (record_) {
      events.resize(batch_.ranks);
      events[r].push_back({what, chunk, unit, now, end});
    }
    heap_.emplace(end, r);
  }

  void arrive(std::vector<Time>& arrivals, int chunk, int unit, Time time) {
    arrivals[batch_.at(chunk, unit)] = time;
    heap_.emplace(time, batch_.costs.placement[chunk]);
  }
};

std::vector<int> expanded(const Batch& batch, const std::vector<int>& order) {
  std::vector<int> units;
  for (int group : order) units.insert(units.end(), batch.groups[group].begin(), batch.groups[group].end());
  return units;
}

// Whether some rank has no room for as many rows of the mean size as there are ranks.
bool is_tight(const Batch& batch) {
  for (std::size_t r = 0; r < batch.costs.limit.size(); r++) {
    double all = 0;
    for (int c : batch.mine[r])
      for (int unit = 0; unit < batch.size(); unit++) all += static_cast<double>(batch.priced.activation[batch.at(c, unit)]);
    if (static_cast<double>(batch.costs.limit[r]) * static_cast<double>(batch.groups.size()) < batch.ranks * all) return true;
  }
  return false;
}

struct Candidate {
  BatchRows rows;
  std::vector<int> order;  // of rows
  Policy policy;
  Time makespan = kForever;
};

// The rows by their work.
std::vector<int> ascending(const Batch& batch) {
  std::vector<int> order(batch.groups.size());
  std::iota(order.begin(), order.end(), 0);
  std::vector<Time> works;
  for (const auto& group : batch.groups) works.push_back(batch.work(group));
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return works[a] < works[b]; });
  return order;
}

// Few small rows first, which fill the pipeline quickly, then the others, the largest first.
std::vector<int> small_first(std::vector<int> ascending, int lead) {
  std::vector<int> order;
  std::vector<char> taken(ascending.size(), 0);
  for (int i = 0; i < lead && 2 * i < static_cast<int>(ascending.size()); i++)
    order.push_back(ascending[2 * i]), taken[2 * i] = 1;
  for (int i = static_cast<int>(ascending.size()) - 1; i >= 0; i--)
    if (!taken[i]) order.push_back(ascending[i]);
  return order;
}

}  // namespace

BatchOrder plan_batch(const BatchCosts& costs, const std::vector<int>& lengths, std::int64_t passes) {
  const Work work(costs);
  double total = 0;
  for (int length : lengths) total += work.of(length);
  const int ranks = 1 + *std::max_element(costs.placement.begin(), costs.placement.end());
  std::vector<Candidate> found;
  Time least_excess = kForever;
  const auto evaluate = [&](const Batch& batch, const std::vector<int>& order, const Policy& policy, Time bound) {
    const auto units = expanded(batch, order);
    ListSchedule schedule(batch, units, policy);
    schedule.run(bound, false);
    passes -= 3ll * batch.chunks * batch.size();
    if (!schedule.complete || schedule.makespan > bound) return kForever;
    const Time excess = batch.excess(schedule.peaks());
    if (excess > 0) least_excess = std::min(least_excess, excess);
    return excess > 0 ? kForever : schedule.makespan;
  };
  std::vector<int> sizes{6, 4, 8, 11, 3, 16, 2, 22, 32};  // units per rank
  if (is_tight(Batch(costs, units_of(costs, lengths, total / (sizes[0] * ranks)), lengths))) {
    // small units hold little, and so many of them take a large part of the passes to try
    std::vector<std::pair<Time, int>> quick;
    for (int per_rank : sizes) {
      const BatchRows rows = units_of(costs, lengths, total / (per_rank * ranks));
      const Batch batch(costs, rows, lengths);
      Policy policy;
      policy.fuse = 1;  // which holds least
      quick.push_back({evaluate(batch, small_first(ascending(batch), 0), policy, kForever), per_rank});
    }
    std::stable_sort(quick.begin(), quick.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (std::size_t i = 0; i < sizes.size(); i++) sizes[i] = quick[i].second;
    if (quick[kTried - 1].first < kForever) sizes.resize(kTried);
  }
  for (int per_rank : sizes) {
    Candidate best{units_of(costs, lengths, total / (per_rank * ranks)), {}, {}, kForever};
    const Batch batch(costs, best.rows, lengths);
    if (batch.size() > 64 * ranks && !found.empty()) continue;
    const std::vector<int> sorted = ascending(batch);
    for (int fuse : {2, 0, 1})
      for (int lead : {0, std::min<int>(static_cast<int>(sorted.size()) / 3, ranks / 2)})
        for (int forward : {0, 2}) {
          Policy policy;
          policy.fuse = fuse, policy.forward = forward;
          const auto order = small_first(sorted, lead);
          const Time makespan = evaluate(batch, order, policy, best.makespan);
          if (makespan < best.makespan) best.makespan = makespan, best.order = order, best.policy = policy;
        }
    if (best.makespan < kForever) found.push_back(best);
    if (passes <= 0 && !found.empty()) break;
  }
  BatchOrder result;
  result.least_excess = least_excess;
  if (found.empty()) return result;
  std::stable_sort(found.begin(), found.end(),
                   [](const Candidate& a, const Candidate& b) { return a.makespan < b.makespan; });
  Candidate best = found[0], now = best;
  const Batch batch(costs, best.rows, lengths);
  Random random(1);
  const int count = static_cast<int>(best.order.size());
  for (const std::int64_t budget = passes; passes > 0;) {
    Candidate next = now;
    Policy& policy = next.policy;
    const int kind = random.below(100), a = random.below(count), b = random.below(count);
    if (kind < 40) std::swap(next.order[a], next.order[b]);
    else if (kind < 65) {
      next.order.erase(next.order.begin() + a);
      next.order.insert(next.order.begin() + b, now.order[a]);
    } else if (kind < 72) policy.newest ^= 1;
    else if (kind < 78) policy.patience = random.below(7);
    else if (kind < 85) policy.share = 80 + random.below(177);
    else if (kind < 89) policy.forward = random.below(3);
    else if (kind < 92) policy.late ^= 1;
    else if (kind < 95) policy.slope = random.below(200);
    else policy.fuse = random.below(4), policy.ranks = random.below(ranks);
    // accepts what is worse by a share that falls to 0 as the budget is used
    const Time slack = now.makespan / 170 * passes / budget * random.exponential() / 65536;
    const Time bound = now.makespan + slack;
    next.makespan = evaluate(batch, next.order, policy, bound);
    if (next.makespan > bound) continue;
    now = next;
    if (now.makespan < best.makespan) best = now;
  }
  const auto order = expanded(batch, best.order);
  ListSchedule schedule(batch, order, best.policy);
  schedule.run(kForever, true);
  result.rows = best.rows, result.units = batch.units, result.events = schedule.events;
  result.makespan = schedule.makespan, result.peaks = schedule.peaks();
  return result;
}

}  // namespace zbkern
