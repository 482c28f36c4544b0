// What given orders cost and hold, and W that follow each other grouped by chunk.
#include <algorithm>

#include "planner.h"
#include "planner_ranks.h"

namespace zbkern {

Measured measure(const Problem& p, const Ordering& orders) {
  const Passes passes(p, orders.fused);
  Measured found;
  for (const Row& row : orders.rows) {
    Time memory = 0, peak = 0;
    for (int pass : row) peak = std::max(peak, memory += passes.memory[pass]);
    found.peaks.push_back(peak);
  }
  Ranks ranks(p);
  if (ranks.follow(orders.rows, passes, std::vector<Time>(p.ranks, 0), kForever)) found.cost = ranks.cost();
  return found;
}

std::vector<std::pair<std::vector<double>, std::vector<double>>> timed(const Problem& p, const Ordering& orders,
                                                                         double scale) {
  const Passes passes(p, orders.fused);
  const int half = p.chunks * p.units;
  Ranks ranks(p);
  if (!ranks.follow(orders.rows, passes, std::vector<Time>(p.ranks, 0), kForever)) return {};
  std::vector<std::pair<std::vector<double>, std::vector<double>>> found;
  for (const Row& row : orders.rows) {
    std::vector<double> starts, ends;
    Time clock = 0;
    for (int pass : row) {
      const int input = passes.input[pass];
      const Time arrived = input < 0 ? 0 : ranks.end(input) + passes.lag[pass], start = std::max(clock, arrived);
      clock = ranks.end(pass);
      if (pass < kWeight * half || !orders.fused[pass - kWeight * half])
        starts.push_back(start / scale), ends.push_back(clock / scale);
    }
    found.push_back({std::move(starts), std::move(ends)});
  }
  return found;
}

void in_turns(std::vector<Turn>& passes, Time start) {
  Time now = start, lane = start;  // when the rank can compute, and when its network is free
  std::vector<Time> arrived(passes.size(), start);
  std::vector<int> left, waiting;
  for (const Turn& each : passes) waiting.push_back(static_cast<int>(left.size())), left.push_back(each.collectives);
  for (std::size_t at = 0; !waiting.empty(); at = at < waiting.size() ? at : 0) {
    const int index = waiting[at];
    Turn& pass = passes[index];
    now = std::max(now, arrived[index]) + pass.compute / (pass.collectives + 1);
    if (left[index]) {
      left[index]--, at++;
      if (pass.network) lane = arrived[index] = std::max(now, lane) + pass.network / pass.collectives;
    } else {
      pass.end = now;
      waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(at));
    }
  }
}

Rows grouped(const Ordering& orders) {
  const int half = static_cast<int>(orders.fused.size()), first_weight = kWeight * half;
  Rows rows;
  for (const Row& row : orders.rows) {
    Row found;
    found.reserve(row.size());
    std::size_t first = 0;  // of the W that have followed each other up to here
    for (int pass : row) {
      if (pass >= first_weight) {
        if (!orders.fused[pass - first_weight]) found.push_back(pass);
        continue;
      }
      std::sort(found.begin() + first, found.end());
      found.push_back(pass);
      if (pass >= half && orders.fused[pass - half]) found.push_back(pass + half);
      first = found.size();
    }
    std::sort(found.begin() + first, found.end());
    rows.push_back(std::move(found));
  }
  return rows;
}

}  // namespace zbkern
