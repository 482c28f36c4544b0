#include "planner_batch.h"

#include <algorithm>
#include <numeric>

#include "planner_lists.h"
#include "planner_random.h"

namespace zbkern {
namespace {

constexpr int kSizes[] = {6, 4, 8, 11, 3, 16, 2, 22, 32};  // units per rank
constexpr int kTried = 2;      // sizes of units, of which all rules are tried in a limited memory
constexpr int kMostUnits = 64;  // per rank
constexpr std::int64_t kRulePasses = 200'000;  // at least, to try rules on units of one size
constexpr std::int64_t kTemperatures = 256;

// The microbatches of a batch in some order, and how ranks decide between what is ready.
struct State {
  std::vector<int> order;
  Rule rule;
  bool operator==(const State& other) const { return order == other.order && rule == other.rule; }
  bool beside() const { return rule.most > 1; }
};

// A choice of units, and the problem that it is in any order.
class Candidate {
 public:
  Candidate(const BatchCosts& costs, const std::vector<int>& lengths, int count)
      : rows_(units_of(costs, lengths, count)), natural_(problem_of(costs, rows_, lengths)), ordered_(natural_) {
    for (int k = 0; k < natural_.units; k = natural_.ends[k]) begins_.push_back(k);
  }

  // The cost of a state; kForever where that exceeds the cutoff, or ranks wait for each other.
  Time run(const State& state, Time cutoff) {
    reorder(state.order);
    ListScheduler lists(ordered_);
    const bool ended = lists.run(state.rule, cutoff);
    ran += lists.ran();
    if (!ended) return kForever;
    orders_ = lists.orders();
    return orders_.cost;
  }
  Time excess() const { return ListScheduler(natural_).excess(); }
  int passes() const { return natural_.passes(); }
  std::int64_t ran = 0;  // passes
  const Problem& problem() const { return natural_; }

  // Those that fill the pipeline, few small microbatches, and then the others, the largest first.
  std::vector<int> small_first(int lead) const {
    const int count = static_cast<int>(begins_.size());
    std::vector<int> ascending(count), order;
    std::vector<char> taken(count, 0);
    std::iota(ascending.begin(), ascending.end(), 0);
    std::vector<Time> works(count, 0);
    for (int at = 0; at < natural_.chunks * natural_.units; at++) {
      const auto behind = std::upper_bound(begins_.begin(), begins_.end(), at % natural_.units);
      works[behind - begins_.begin() - 1] += natural_.forward[at] + natural_.backward[at] + natural_.weight[at];
    }
    std::stable_sort(ascending.begin(), ascending.end(), [&](int a, int b) { return works[a] < works[b]; });
    for (int i = 0; i < lead && 2 * i < count; i++) order.push_back(ascending[2 * i]), taken[2 * i] = 1;
    for (int i = count - 1; i >= 0; i--)
      if (!taken[i]) order.push_back(ascending[i]);
    return order;
  }

  BatchOrder found(const State& state) {
    BatchOrder result;
    run(state, kForever);
    for (int row : state.order)
      result.rows.members.push_back(rows_.members[row]), result.rows.cuts.push_back(rows_.cuts[row]);
    result.orders = orders_, result.problem = ordered_;
    if (!state.beside()) result.orders.rows = grouped(orders_);
    return result;
  }

 private:
  void reorder(const std::vector<int>& order) {
    const Problem& p = natural_;
    int at = 0;
    for (int row : order) {
      const int end = at + p.ends[begins_[row]] - begins_[row];
      while (at < end) ordered_.ends[at++] = end;
    }
    const auto reordered = [&](const std::vector<Time>& from, std::vector<Time>& to) {
      auto target = to.begin();
      for (auto source = from.begin(); source != from.end(); source += p.units)
        for (int row : order) target = std::copy(source + begins_[row], source + p.ends[begins_[row]], target);
    };
    for (std::vector<Time> Problem::*each :
         {&Problem::forward, &Problem::backward, &Problem::weight, &Problem::fused, &Problem::forward_lag,
          &Problem::backward_lag, &Problem::activation, &Problem::freed, &Problem::held, &Problem::merge_saving})
      reordered(p.*each, ordered_.*each);
    for (int kind : {kForward, kBackward}) reordered(p.network[kind], ordered_.network[kind]);
  }

  BatchRows rows_;
  Problem natural_, ordered_;
  std::vector<int> begins_;  // the first unit of each microbatch
  Ordering orders_;          // of the last run
};

// Whether some rank has no room for as many microbatches of the mean size as there are ranks.
bool is_tight(const Candidate& candidate) {
  const Problem& p = candidate.problem();
  std::vector<double> all(p.ranks, 0);
  for (int at = 0; at < p.chunks * p.units; at++) all[p.placement[at / p.units]] += p.activation[at];
  const double rows = static_cast<double>(candidate.small_first(0).size());
  for (int rank = 0; rank < p.ranks; rank++)
    if (static_cast<double>(p.limit[rank]) * rows < p.ranks * all[rank]) return true;
  return false;
}

enum Fused { kNone, kFirst, kAll };  // which chunks have BW: nobody waits for the first one's B
constexpr Fused kFirstFirst[] = {kFirst, kNone, kAll}, kLeastFirst[] = {kAll, kFirst, kNone};

Rule rule_of(const Problem& p, int forward, Fused fused) {
  const auto each = [&](int choice) { return std::vector<int>(p.ranks, choice); };
  Rule rule{each(forward), each(2), each(1), each(1), std::vector<int>(p.chunks, p.units),
            std::vector<int>(p.chunks, fused == kAll), false, true};
  if (fused == kFirst) rule.fuse[0] = 1;
  return rule;
}

// The rules to begin with, for passes in turn or beside each other.
std::vector<Rule> rules_of(const Problem& p, Fused fused, bool beside) {
  if (!beside) return {rule_of(p, 0, fused), rule_of(p, 2, fused)};
  std::vector<Rule> rules;
  for (int most : {3, 2})
    for (int waits : {60, 20}) {
      rules.push_back(rule_of(p, 0, fused));
      rules.back().most = most, rules.back().waits = waits;
    }
  return rules;
}

void change(State& state, const Problem& problem, Random& random) {
  const int count = static_cast<int>(state.order.size());
  const int kind = random.below(100), a = random.below(count), b = random.below(count);
  if (kind < 40) {
    std::swap(state.order[a], state.order[b]);
  } else if (kind < 65) {
    const int row = state.order[a];
    state.order.erase(state.order.begin() + a), state.order.insert(state.order.begin() + b, row);
  } else if (kind < 75) {
    state.rule.fuse[random.below(problem.chunks)] ^= 1;
  } else if (kind < 80 && state.beside()) {
    if (random.percent(50)) state.rule.waits = 20 * random.below(6);
    else if (random.percent(50)) state.rule.alike = !state.rule.alike;
    else state.rule.most = 5 - state.rule.most;
  } else {
    change(state.rule, problem, false, random);
  }
}

// The sizes of units, per rank, that fit; the most promising first, and only these, in a limited memory. Counts passes.
std::vector<int> sizes_of(const BatchCosts& costs, const std::vector<int>& lengths, std::int64_t& ran, Time& excess) {
  const int ranks = static_cast<int>(costs.limit.size());
  std::vector<std::pair<Time, int>> sizes;
  const bool tight = is_tight(Candidate(costs, lengths, kSizes[0] * ranks));
  for (int per_rank : kSizes) {
    Candidate each(costs, lengths, per_rank * ranks);
    excess = std::min(excess, each.excess());
    if (each.excess() > 0) continue;
    // small units hold little, and so many of them take a large part of the passes to try
    Time quick = 0;
    const Time cutoff = sizes.size() < kTried ? kForever : sizes.back().first;
    if (tight) quick = each.run({each.small_first(0), rule_of(each.problem(), 0, kAll)}, cutoff);
    ran += each.ran;
    sizes.push_back({quick, per_rank});
    std::stable_sort(sizes.begin(), sizes.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    if (tight && sizes.size() > kTried) sizes.resize(kTried);
  }
  std::vector<int> found;
  for (const auto& [quick, per_rank] : sizes) found.push_back(per_rank);
  return found;
}

// The best order of units of these sizes, with passes in turn or beside each other; no rows where none fits.
BatchOrder search(const BatchCosts& costs, const std::vector<int>& lengths, const std::vector<int>& sizes, bool beside,
                  std::int64_t passes) {
  const int ranks = static_cast<int>(costs.limit.size());
  State best;
  Time cost = kForever;
  int size = 0;
  for (const int per_rank : sizes) {
    Candidate each(costs, lengths, per_rank * ranks);
    if (each.problem().units > kMostUnits * ranks && size) continue;
    const std::int64_t most = std::max(passes, kRulePasses);
    const bool all = 12 * static_cast<std::int64_t>(each.passes()) <= most;  // or those that hold least first
    for (Fused fused : all ? kFirstFirst : kLeastFirst)
      for (int lead : {0, std::min(static_cast<int>(each.small_first(0).size()) / 3, ranks / 2)})
        for (const Rule& rule : rules_of(each.problem(), fused, beside)) {
          if (size && each.ran >= most) break;
          const State state{each.small_first(lead), rule};
          const Time found = each.run(state, cost);
          if (found < cost) cost = found, best = state, size = per_rank;
        }
    passes -= each.ran;
    if (passes <= 0 && size) break;
  }
  if (!size) return {};
  Candidate each(costs, lengths, size * ranks);
  Effort effort;
  // most are rejected before half of them has run
  const std::int64_t moves = 2 * std::max<std::int64_t>(0, passes) / each.passes();
  const std::int64_t steps = std::min(moves, kTemperatures);
  effort.seed = 1, effort.work = steps ? moves / steps : 0;
  for (std::int64_t left = steps; left > 0; left--) effort.temperatures.push_back(cost / 340 * left / steps);
  Time now = cost;
  improve(
      best, cost, effort, [&](State& trial, Random& random) { return change(trial, each.problem(), random), true; },
      [&](const State& trial, Time threshold) { return now = each.run(trial, threshold); },
      [&](const State& taken) {
        if (now < cost) cost = now, best = taken;
        return false;
      });
  return each.found(best);
}

}  // namespace

BatchOrder plan_batch(const BatchCosts& costs, const std::vector<int>& lengths, std::int64_t passes,
                      const std::vector<Ordering>& published) {
  BatchOrder result;
  Time cost = kForever, excess = kForever;
  // Takes what fits and costs less: a list scheduler counts waits, and no merged W, which orders do not have.
  const auto offer = [&](BatchOrder found) {
    const Measured measured = measure(found.problem, found.orders);
    bool fits = true;
    for (int rank = 0; rank < found.problem.ranks; rank++) fits = fits && measured.peaks[rank] <= costs.limit[rank];
    if (fits && measured.cost < cost) cost = measured.cost, result = std::move(found);
    return fits ? measured.cost : kForever;
  };
  std::int64_t ran = 0;
  const std::vector<int> sizes = sizes_of(costs, lengths, ran, excess);
  for (bool beside : {false, true})
    if (!beside || !costs.collectives.empty()) {
      BatchOrder found = search(costs, lengths, sizes, beside, passes - ran);
      if (!found.orders.rows.empty()) offer(std::move(found));
    }
  int best = -1;
  Time least = kForever;
  for (std::size_t index = 0; index < published.size(); index++) {
    const int count = static_cast<int>(published[index].fused.size() / costs.placement.size());
    const BatchRows rows = packed(costs, lengths, count);
    const Time found = offer({rows, published[index], problem_of(costs, rows, lengths)});
    if (found < least) least = found, best = static_cast<int>(index);
  }
  result.published = best, result.published_cost = best < 0 ? 0 : least, result.excess = excess;
  return result;
}

}  // namespace zbkern
