// What given orders cost and hold, and W that follow each other grouped by chunk.
#include <algorithm>

#include "planner.h"
#include "planner_ranks.h"

namespace zbkern {

Measured measure(const Problem& p, const Ordering& orders) {
  const int m = p.microbatches, half = p.chunks * m;
  Measured found;
  found.peaks.assign(p.ranks, 0);
  std::vector<Time> memory(p.ranks, 0);
  std::vector<std::size_t> next(p.ranks, 0);
  Ranks ranks(p);
  int left = p.passes();
  ranks.run([&](int rank) {
    const Row& row = orders.rows[rank];
    for (std::size_t& k = next[rank]; k < row.size(); k++, left--) {
      const int pass = row[k], kind = pass / half, rest = pass % half, chunk = rest / m;
      Time at, length = 0, held = 0;
      if (!ranks.arrived(input_of(p, kind, chunk, pass), rank, at)) break;
      const Time now = std::max(at, ranks.clock[rank]);
      if (kind == kForward) {
        length = p.forward[rest], held = p.activation[rest];
      } else if (kind == kBackward) {
        length = orders.fused[rest] ? p.fused[rest] : p.backward[rest];
        held = (orders.fused[rest] ? 0 : p.held[rest]) - p.freed[rest];
      } else if (!orders.fused[rest]) {
        length = p.weight[rest], held = -p.held[rest];
        const int before = k > 0 ? row[k - 1] : -1;
        if (before >= 0 && before / m == pass / m && !orders.fused[before % half]) length -= p.merge_saving[rest];
      }
      ranks.begin(rank, now);
      ranks.finish(rank, pass, now + length);
      memory[rank] += held;
      found.peaks[rank] = std::max(found.peaks[rank], memory[rank]);
    }
    return true;
  });
  if (left == 0) found.cost = ranks.cost();
  return found;
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
