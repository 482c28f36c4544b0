// Simulated annealing of partitions: single layers go from a chunk to the one before it or behind it.
#include <algorithm>
#include <cmath>

#include "planner.h"
#include "planner_random.h"

namespace zbkern {
namespace {

constexpr Time kStrain = 1 << 20;  // of a rank that has the mean work
constexpr Time kMissing = 100;     // what it counts beside if a rank misses as much memory as it holds in the mean
constexpr double kSteep = 1024;    // a rank with more times the mean work is as bad as with so many

// What every rank would do and hold, updated as layers go from chunk to chunk.
class Division {
 public:
  Division(const PartitionProblem& problem, const std::vector<int>& bounds)
      : p_(problem),
        ranks_(1 + *std::max_element(p_.placement.begin(), p_.placement.end())),
        in_chunk_(p_.placement.size()) {
    const int tied = 1 + *std::max_element(p_.tied.begin(), p_.tied.end());
    for (Rank& each : ranks_) each.tied.resize(tied);
    for (int chunk = 0; chunk + 1 < static_cast<int>(bounds.size()); chunk++)
      for (int layer = bounds[chunk]; layer < bounds[chunk + 1]; layer++) change(layer, chunk, 1);
  }

  // Adds a layer to a chunk (sign 1), or takes it away (-1).
  void change(int layer, int chunk, int sign) {
    const int owner = p_.placement[chunk], tied = p_.tied[layer];
    Rank& rank = ranks_[owner];
    strain_ -= rank.strain + uneven(chunk);
    const Time held = sign * p_.held[layer];
    const Time work = sign * std::llround(static_cast<double>(p_.work[layer]) * p_.slowness[owner]);
    in_chunk_[chunk] += work, rank.work += work;
    rank.once += held, rank.in_flight += held * p_.in_flight[chunk];
    int others = 0;  // layers of the rank with the same weights
    if (tied >= 0) {
      others = rank.tied[tied] - (sign < 0);
      rank.tied[tied] += sign;
    }
    if (!others) rank.fixed += sign * p_.fixed[layer];
    const Time all = rank.fixed + std::max(rank.once, rank.in_flight / kOneInFlight);
    if (!p_.limit.empty()) rank.missing = std::max<Time>(all - p_.limit[owner], 0);
    const double share = std::min(static_cast<double>(rank.work) / kMeanOfRanks, kSteep);
    rank.strain = static_cast<Time>(share * share * share * share * kStrain);
    rank.strain += kMissing * (rank.missing / (kMeanOfRanks / kStrain));
    strain_ += rank.strain + uneven(chunk);
  }

  // What annealing makes small: it grows fast with the work of a rank, slowly with that of a chunk, and with memory
  // that is missing.
  Time strain() const { return strain_; }

  // The memory that is missing, the most work of a rank, and the strain; less is better.
  std::tuple<Time, Time, Time> cost() const {
    Time missing = 0, most = 0;
    for (const Rank& each : ranks_) missing += each.missing, most = std::max(most, each.work);
    return {missing, most, strain_};
  }

 private:
  struct Rank {
    Time work = 0, once = 0, in_flight = 0, fixed = 0, missing = 0, strain = 0;
    std::vector<int> tied;  // how many layers have these weights
  };

  Time uneven(int chunk) const {
    const double share = static_cast<double>(in_chunk_[chunk]) / kMeanOfRanks;
    return static_cast<Time>(p_.even * share * share * kStrain);
  }

  const PartitionProblem& p_;
  std::vector<Rank> ranks_;
  std::vector<Time> in_chunk_;  // the work
  Time strain_ = 0;
};

}  // namespace

std::vector<int> anneal_partition(const PartitionProblem& problem, const std::vector<int>& start,
                                  const Effort& effort) {
  std::vector<int> bounds = start, found = start;
  bounds.push_back(static_cast<int>(problem.work.size()));
  Division division(problem, bounds);
  auto best = division.cost();
  if (!problem.limit.empty() && !std::get<0>(best)) return {};
  Random random(effort.seed);
  for (const Time temperature : effort.temperatures)
    for (std::int64_t move = 0; move < effort.work; move++) {
      const int behind = 1 + random.below(static_cast<int>(start.size()) - 1);  // the chunk whose begin moves
      const bool back = random.percent(50);
      const int source = back ? behind - 1 : behind, target = back ? behind : behind - 1;
      if (bounds[source + 1] - bounds[source] < 2) continue;
      const int layer = back ? bounds[behind] - 1 : bounds[behind];
      const Time before = division.strain();
      division.change(layer, source, -1), division.change(layer, target, 1);
      const Time worse = division.strain() - before;
      if (worse > 0 && worse > temperature * random.exponential() >> 16) {
        division.change(layer, target, -1), division.change(layer, source, 1);
        continue;
      }
      bounds[behind] += back ? -1 : 1;
      if (worse < 0 && division.cost() < best) {
        best = division.cost();
        found.assign(bounds.begin(), bounds.end() - 1);
      }
    }
  return found;
}

}  // namespace zbkern
