#include "planner_batch_units.h"

namespace zbkern {
namespace {

void pack(const Work& work, const std::vector<int>& lengths, std::vector<int> members, int count, BatchRows& rows) {
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return lengths[a] > lengths[b]; });
  std::vector<std::vector<int>> packs(count);
  std::vector<std::pair<double, int>> load(count, {0.0, 0});  // work, and tokens
  for (int member : members) {
    const auto least = std::min_element(load.begin(), load.end()) - load.begin();
    packs[least].push_back(member), load[least].first += work.of(lengths[member]), load[least].second += lengths[member];
  }
  for (int i = 0; i < count; i++)
    if (!packs[i].empty()) rows.members.push_back(packs[i]), rows.cuts.push_back({load[i].second});
}

}  // namespace

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
