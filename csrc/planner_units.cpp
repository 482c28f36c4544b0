// The units of a batch: slices and packs of sequences, and what each takes and holds in every chunk.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "planner_batch.h"

namespace zbkern {
namespace {

// The work of a token, of a pair of tokens of one sequence and of two, in all chunks, without what every unit takes.
struct Work {
  explicit Work(const BatchCosts& costs) {
    for (const Growth* each : {&costs.forward, &costs.backward, &costs.weight})
      for (std::size_t c = 0; c < each->linear.size(); c++) linear += each->linear[c], quadratic += each->quadratic[c];
    for (const auto& each : costs.masked) masked += std::accumulate(each.begin(), each.end(), 0.0);
  }
  double linear = 0, quadratic = 0, masked = 0;
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
  std::vector<std::pair<double, int>> load(count, {0.0, 0});  // work, and tokens
  for (int member : members) {
    const auto least = std::min_element(load.begin(), load.end()) - load.begin();
    auto& [own, tokens] = load[least];
    packs[least].push_back(member);
    own += work.of(lengths[member]) + work.masked * 2 * tokens * lengths[member], tokens += lengths[member];
  }
  for (int i = 0; i < count; i++)
    if (!packs[i].empty()) rows.members.push_back(packs[i]), rows.cuts.push_back({load[i].second});
}

}  // namespace

BatchRows units_of(const BatchCosts& costs, const std::vector<int>& lengths, int wanted) {
  const Work work(costs);
  BatchRows rows;
  std::vector<int> short_ones;
  double total = 0, rest = 0;
  for (int length : lengths) total += work.of(length);
  const double target = total / wanted;
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
        const double place = work.tokens(own * slice / count) / costs.multiple;
        end = std::min(lengths[i], std::max(begin / costs.multiple + 1, static_cast<int>(std::llround(place))) *
                                       costs.multiple);
      }
      if (end > begin) rows.cuts.back().push_back(end - begin);
      begin = end;
    }
  }
  const double few = std::max(1.0, std::ceil(rest / target - 0.25));
  if (!short_ones.empty())
    pack(work, lengths, short_ones, costs.packs ? static_cast<int>(few) : static_cast<int>(short_ones.size()), rows);
  return rows;
}

BatchRows packed(const BatchCosts& costs, const std::vector<int>& lengths, int count) {
  BatchRows rows;
  std::vector<int> members(lengths.size());
  std::iota(members.begin(), members.end(), 0);
  pack(Work(costs), lengths, members, count, rows);
  return rows;
}

Problem problem_of(const BatchCosts& costs, const BatchRows& rows, const std::vector<int>& lengths) {
  struct Unit {
    double tokens, pairs, row;  // row: the tokens of its microbatch
    double masked;              // pairs of tokens of different sequences
    int begin, end;             // the units of its microbatch
  };
  std::vector<Unit> units;
  Problem p;
  for (std::size_t row = 0; row < rows.members.size(); row++) {
    const auto& cut = rows.cuts[row];
    double pairs = 0, at = 0;
    for (int member : rows.members[row]) pairs += static_cast<double>(lengths[member]) * lengths[member];
    const int first = static_cast<int>(units.size()), count = static_cast<int>(cut.size());
    const double all = std::accumulate(cut.begin(), cut.end(), 0);
    for (const double length : cut) {
      const double end = at + length;
      if (count == 1) units.push_back({length, pairs, all, all * all - pairs, first, first + 1});
      else units.push_back({length, end * end - at * at, all, 0, first, first + count});
      p.ends.push_back(first + count), at = end;
    }
    p.slices = std::max(p.slices, count);
  }
  p.ranks = static_cast<int>(costs.limit.size()), p.chunks = static_cast<int>(costs.placement.size());
  const bool has_network = !costs.collectives.empty();
  p.units = static_cast<int>(units.size()), p.placement = costs.placement, p.limit = costs.limit, p.makespan = true;
  p.apart = costs.apart;
  const auto whole = [](double value) { return static_cast<Time>(std::llround(value)); };
  for (int c = 0; c < p.chunks; c++) {
    const auto of = [&](const Growth& growth, const Unit& u) { return whole(growth.of(c, u.tokens, u.pairs)); };
    const auto time = [&](const Growth& growth, const Unit& u, double masked = 0) {
      return std::max<Time>(1, whole(growth.of(c, u.tokens, u.pairs) + masked * u.masked));
    };
    const double in_forward = costs.masked[kForward][c], in_backward = costs.masked[kBackward][c];
    const auto lag = [&](int edge, const Unit& u) {
      const bool apart = edge >= 0 && edge + 1 < p.chunks && p.placement[edge] != p.placement[edge + 1];
      return apart ? whole(costs.communication.of(edge, u.tokens, u.pairs)) : 0;
    };
    for (int k = 0; k < p.units; k++) {
      const Unit &u = units[k], &back = units[u.begin + u.end - 1 - k];  // whose F and whose B are the k-th
      const bool cut = u.end - u.begin > 1;
      const Time carried = whole(costs.carried.of(c, u.row, 0));
      const Time gradients = whole(costs.carried_gradients.of(c, u.row, 0));
      const auto kept = [&](const Unit& of_unit) { return of(costs.activation, of_unit) + (cut ? 0 : carried); };
      const bool first = cut && k == u.begin, last = cut && k + 1 == u.end;
      p.forward.push_back(time(costs.forward, u, in_forward)), p.forward_lag.push_back(lag(c - 1, u));
      p.backward.push_back(time(costs.backward, back, in_backward)), p.backward_lag.push_back(lag(c, back));
      p.weight.push_back(time(costs.weight, back)), p.fused.push_back(time(costs.fused, back, in_backward));
      p.merge_saving.push_back(std::min(whole(costs.merge_saving[c]), p.weight.back()));
      p.activation.push_back(kept(u) + (first ? carried : 0)), p.held.push_back(of(costs.held, back));
      p.freed.push_back(kept(back) - (first ? gradients : 0) + (last ? carried + gradients : 0));
      if (!has_network) continue;
      p.network[kForward].push_back(std::min(of(costs.network[kForward], u), p.forward.back()));
      p.network[kBackward].push_back(std::min(of(costs.network[kBackward], back), p.backward.back()));
      p.collectives.push_back(costs.collectives[c]);
    }
  }
  return p;
}

}  // namespace zbkern
