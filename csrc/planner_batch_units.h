// The units of a batch: slices and packs of sequences, and what each takes and holds in every chunk.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "planner_batch.h"

namespace zbkern {

constexpr int kFused = 3;

struct Priced {  // of each unit in each chunk: [chunk * units + unit]
  std::vector<Time> time[4], lag, activation, held;
  std::vector<Time> carried, carried_gradients;  // of the row of a slice
};

// The units of a batch, and what each takes and holds in every chunk.
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
    const std::size_t i = at(chunk, unit);
    if (kind == kForward) return u.slice == 0 ? priced.carried[i] : 0;
    return (u.slice + 1 == u.slices ? priced.carried_gradients[i] : 0) - (u.slice == 0 ? carried_most(i) : 0);
  }
  // By how much the rank that exceeds its limit most does; at most 0 where none does.
  Time excess(const std::vector<Time>& peaks) const {
    Time most = -kForever;
    for (std::size_t r = 0; r < costs.limit.size(); r++) most = std::max(most, peaks[r] - costs.limit[r]);
    return most;
  }
  Time carried_most(std::size_t i) const { return priced.carried[i] + priced.carried_gradients[i]; }
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
        const double kept = u.slices == 1 ? costs.carried.of(c, u.row_tokens, 0) : 0;
        priced.activation.push_back(whole(costs.activation.of(c, u.tokens, u.pairs) + kept));
        priced.held.push_back(whole(costs.held.of(c, u.tokens, u.pairs)));
        priced.carried.push_back(whole(costs.carried.of(c, u.row_tokens, 0)));
        priced.carried_gradients.push_back(whole(costs.carried_gradients.of(c, u.row_tokens, 0)));
      }
  }
};

// The work of a token and of a pair of tokens in all chunks, without what every unit takes.
struct Work {
  explicit Work(const BatchCosts& costs) {
    for (const Growth* each : {&costs.forward, &costs.backward, &costs.weight})
      for (std::size_t c = 0; c < each->linear.size(); c++) linear += each->linear[c], quadratic += each->quadratic[c];
  }
  double linear = 0, quadratic = 0;
  double of(double tokens) const { return linear * tokens + quadratic * tokens * tokens; }
  // How many tokens from the first on have so much work.
  double tokens(double work) const {
    if (quadratic <= 0) return work / linear;
    return (std::sqrt(linear * linear + 4 * quadratic * work) - linear) / (2 * quadratic);
  }
};

// Slices and packs of about so much work each: long sequences are cut, short ones are put together.
BatchRows units_of(const BatchCosts& costs, const std::vector<int>& lengths, double target);

}  // namespace zbkern
