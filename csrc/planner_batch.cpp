#include "planner_batch.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>

#include "planner_random.h"

namespace zbkern {
namespace {

constexpr int kFused = 3;

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

struct Priced {  // of each unit in each chunk: [chunk * units + unit]
  std::vector<Time> time[4], lag, activation, held;
  std::vector<Time> carried;  // of the row of a slice
};

class Batch {
 public:
  Batch(const BatchCosts& costs, const BatchRows& rows, const std::vector<int>& lengths)
      : costs(costs), rows(rows), ranks(1 + *std::max_element(costs.placement.begin(), costs.placement.end())),
        chunks(static_cast<int>(costs.placement.size())), mine(ranks) {
    for (int c = 0; c < chunks; c++) mine[costs.placement[c]].push_back(c);
    for (std::size_t row = 0; row < rows.members.size(); row++) {
      const auto& cut = rows.cuts[row];
      double pairs = 0;
      for (int member : rows.members[row]) pairs += static_cast<double>(lengths[member]) * lengths[member];
      const int total = std::accumulate(cut.begin(), cut.end(), 0), count = static_cast<int>(cut.size());
      groups.emplace_back();
      for (int slice = 0, begin = 0; slice < count; begin += cut[slice++]) {
        const double end = begin + cut[slice];
        groups.back().push_back(static_cast<int>(units.size()));
        units.push_back({static_cast<int>(row), slice, count, cut[slice], total,
                         count == 1 ? pairs : end * end - static_cast<double>(begin) * begin});
      }
    }
    price();
  }

  const BatchCosts& costs;
  const BatchRows& rows;
  int ranks, chunks;
  std::vector<std::vector<int>> mine;    // chunks of each rank
  std::vector<BatchUnit> units;
  std::vector<std::vector<int>> groups;  // units of each row
  Priced priced;

  int size() const { return static_cast<int>(units.size()); }
  std::size_t at(int chunk, int unit) const { return static_cast<std::size_t>(chunk) * units.size() + unit; }
  Time work(const std::vector<int>& group) const {
    Time sum = 0;
    for (int unit : group)
      for (int c = 0; c < chunks; c++)
        for (int kind = 0; kind < 3; kind++) sum += priced.time[kind][at(c, unit)];
    return sum;
  }
  Time lag(int from, int to, int unit) const {
    return costs.placement[from] == costs.placement[to] ? 0 : priced.lag[at(std::min(from, to), unit)];
  }
  // What a slice's pass takes of the keys and values of its sequence, and of their gradients; as in memory.py.
  Time carried_change(int kind, int chunk, int unit) const {
    const BatchUnit& u = units[unit];
    if (u.slices == 1 || kind == kWeight) return 0;
    const int first = u.slice == (kind == kForward ? 0 : u.slices - 1), last = kind != kForward && u.slice == 0;
    return (first - 2 * last) * priced.carried[at(chunk, unit)];
  }
  Time change(int kind, int chunk, int unit) const {
    const std::size_t i = at(chunk, unit);
    const Time carried = carried_change(kind, chunk, unit);
    if (kind == kForward) return carried + priced.activation[i];
    if (kind == kWeight) return -priced.held[i];
    return carried - priced.activation[i] + (kind == kFused ? 0 : priced.held[i]);
  }

 private:
  void price() {
    const Growth* growths[] = {&costs.forward, &costs.backward, &costs.weight, &costs.fused};
    const auto whole = [](double value) { return static_cast<Time>(std::llround(value)); };
    for (int c = 0; c < chunks; c++)
      for (const auto& u : units) {
        for (int kind = 0; kind < 4; kind++)
          priced.time[kind].push_back(std::max<Time>(1, whole(growths[kind]->of(c, u.tokens, u.pairs))));
        priced.lag.push_back(c + 1 < chunks ? whole(costs.lag.of(c, u.tokens, u.pairs)) : 0);
        priced.activation.push_back(whole(costs.activation.of(c, u.tokens, u.pairs)));
        priced.held.push_back(whole(costs.held.of(c, u.tokens, u.pairs)));
        priced.carried.push_back(whole(costs.carried.of(c, u.row_tokens, 0)));
      }
  }
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
  Time makespan = 0, peak = 0;
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
    for (int c : batch_.mine[r]) sum += u.slices > 1 ? 2 * batch_.priced.carried[batch_.at(c, unit)] : 0;
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
    const Time limit = batch_.costs.limit == kForever
                           ? kForever
                           : batch_.costs.limit / 256 * (policy_.share - policy_.slope * r / batch_.ranks);
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
      if (u.slices > 1 && u.slice == 0) rank.reserved -= 2 * batch_.priced.carried[i];
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
    peak = std::max(peak, rank.peak);
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

double sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

// The work of a token and of a pair of tokens in all chunks, without what every unit takes.
struct Work {
  explicit Work(const BatchCosts& costs) {
    for (const Growth* each : {&costs.forward, &costs.backward, &costs.weight})
      linear += sum(each->linear), quadratic += sum(each->quadratic);
  }
  double linear = 0, quadratic = 0;
  double of(double tokens) const { return linear * tokens + quadratic * tokens * tokens; }
  // How many tokens from the first on have so much work.
  double tokens(double work) const {
    if (quadratic <= 0) return work / linear;
    return (std::sqrt(linear * linear + 4 * quadratic * work) - linear) / (2 * quadratic);
  }
};

void pack(const Work& work, const std::vector<int>& lengths, std::vector<int> members, int count, BatchRows& rows) {
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return lengths[a] > lengths[b]; });
  std::vector<std::vector<int>> packs(count);
  std::vector<double> load(count, 0);
  std::vector<int> tokens(count, 0);
  for (int member : members) {
    const auto least = std::min_element(load.begin(), load.end()) - load.begin();
    packs[least].push_back(member), load[least] += work.of(lengths[member]), tokens[least] += lengths[member];
  }
  for (int i = 0; i < count; i++)
    if (!packs[i].empty()) rows.members.push_back(packs[i]), rows.cuts.push_back({tokens[i]});
}

// Slices and packs of about so much work each: long sequences are cut, short ones are put together.
BatchRows units_of(const BatchCosts& costs, const std::vector<int>& lengths, double target) {
  const Work work(costs);
  BatchRows rows;
  std::vector<int> short_ones;
  double rest = 0;
  for (int i = 0; i < static_cast<int>(lengths.size()); i++) {
    const double own = work.of(lengths[i]);
    const int count = std::min<int>(static_cast<int>(std::llround(own / target)), lengths[i] / costs.multiple);
    if (count < 2) {
      short_ones.push_back(i), rest += own;
      continue;
    }
    rows.members.push_back({i});
    rows.cuts.emplace_back();
    int begin = 0;
    for (int slice = 1; slice <= count; slice++) {
      int end = lengths[i];
      if (slice < count) {
        const double wanted = work.tokens(own * slice / count) / costs.multiple;
        end = std::min(lengths[i], std::max(begin / costs.multiple + 1, static_cast<int>(std::llround(wanted))) *
                                       costs.multiple);
      }
      if (end > begin) rows.cuts.back().push_back(end - begin);
      begin = end;
    }
  }
  if (!short_ones.empty())
    pack(work, lengths, short_ones, std::max(1, static_cast<int>(std::ceil(rest / target - 0.25))), rows);
  return rows;
}

std::vector<int> expanded(const Batch& batch, const std::vector<int>& order) {
  std::vector<int> units;
  for (int group : order) units.insert(units.end(), batch.groups[group].begin(), batch.groups[group].end());
  return units;
}

struct Candidate {
  BatchRows rows;
  std::vector<int> order;  // of rows
  Policy policy;
  Time makespan = kForever;
};

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

BatchRows packed(const BatchCosts& costs, const std::vector<int>& lengths, int count) {
  BatchRows rows;
  std::vector<int> members(lengths.size());
  std::iota(members.begin(), members.end(), 0);
  pack(Work(costs), lengths, members, count, rows);
  return rows;
}

BatchOrder plan_batch(const BatchCosts& costs, const std::vector<int>& lengths, std::int64_t passes) {
  const Work work(costs);
  double total = 0;
  for (int length : lengths) total += work.of(length);
  const int ranks = 1 + *std::max_element(costs.placement.begin(), costs.placement.end());
  std::vector<Candidate> found;
  Time least_peak = kForever;
  const auto evaluate = [&](const Batch& batch, const std::vector<int>& order, const Policy& policy, Time bound) {
    const auto units = expanded(batch, order);
    ListSchedule schedule(batch, units, policy);
    schedule.run(bound, false);
    passes -= 3ll * batch.chunks * batch.size();
    if (!schedule.complete || schedule.makespan > bound) return kForever;
    if (schedule.peak > costs.limit) {
      least_peak = std::min(least_peak, schedule.peak);
      return kForever;
    }
    return schedule.makespan;
  };
  for (int per_rank : {6, 4, 8, 11, 3, 16, 2, 22, 32}) {  // units
    Candidate best{units_of(costs, lengths, total / (per_rank * ranks)), {}, {}, kForever};
    const Batch batch(costs, best.rows, lengths);
    if (batch.size() > 64 * ranks && !found.empty()) continue;
    std::vector<int> ascending(batch.groups.size());
    std::iota(ascending.begin(), ascending.end(), 0);
    std::vector<Time> works;
    for (const auto& group : batch.groups) works.push_back(batch.work(group));
    std::stable_sort(ascending.begin(), ascending.end(), [&](int a, int b) { return works[a] < works[b]; });
    for (int fuse : {2, 0, 1})
      for (int lead : {0, std::min<int>(static_cast<int>(ascending.size()) / 3, ranks / 2)})
        for (int forward : {0, 2}) {
          Policy policy;
          policy.fuse = fuse, policy.forward = forward;
          const auto order = small_first(ascending, lead);
          const Time makespan = evaluate(batch, order, policy, best.makespan);
          if (makespan < best.makespan) best.makespan = makespan, best.order = order, best.policy = policy;
        }
    if (best.makespan < kForever) found.push_back(best);
    if (passes <= 0 && !found.empty()) break;
  }
  BatchOrder result;
  result.least_peak = least_peak;
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

BatchOrder run_batch(const BatchCosts& costs, const BatchRows& rows, const std::vector<int>& lengths,
                     const std::vector<std::vector<int>>& orders) {
  const Batch batch(costs, rows, lengths);
  BatchOrder result;
  result.rows = rows, result.units = batch.units;
  result.events.resize(batch.ranks), result.peaks.assign(batch.ranks, 0);
  const std::size_t all = static_cast<std::size_t>(batch.chunks) * batch.size();
  std::vector<Time> ends[2] = {std::vector<Time>(all, kForever), std::vector<Time>(all, kForever)};
  std::vector<std::size_t> place(batch.ranks, 0);
  std::vector<Time> free(batch.ranks, 0), held(batch.ranks, 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (int r = 0; r < batch.ranks; r++)
      for (; place[r] < orders[r].size(); place[r] += 3, moved = true) {
        const int kind = orders[r][place[r]], chunk = orders[r][place[r] + 1], unit = orders[r][place[r] + 2];
        const bool back = kind == kBackward || kind == kFused;
        const int source = kind == kForward ? chunk - 1 : back ? chunk + 1 : -1;
        Time start = free[r];
        if (source >= 0 && source < batch.chunks) {
          const Time end = ends[back][batch.at(source, unit)];
          if (end == kForever) break;
          start = std::max(start, end + batch.lag(source, chunk, unit));
        }
        free[r] = start + batch.priced.time[kind][batch.at(chunk, unit)];
        if (kind != kWeight) ends[back][batch.at(chunk, unit)] = free[r];
        held[r] += batch.change(kind, chunk, unit);
        result.peaks[r] = std::max(result.peaks[r], held[r]);
        result.events[r].push_back({kind, chunk, unit, start, free[r]});
      }
  }
  Time last = 0;
  for (int r = 0; r < batch.ranks; r++) last = place[r] < orders[r].size() ? kForever : std::max(last, free[r]);
  result.makespan = last;
  return result;
}

}  // namespace zbkern
