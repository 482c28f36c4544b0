// What given orders cost and hold; planner/annealing.py does the same in Python.
#include <algorithm>

#include "planner.h"

namespace zbkern {

Measured measure(const Problem& p, const Ordering& orders) {
  const int n = p.chunks, m = p.microbatches, half = n * m;
  Measured found;
  found.peaks.assign(p.ranks, 0);
  std::vector<Time> ends(p.passes(), -1), clock(p.ranks, 0), start(p.ranks, -1), memory(p.ranks, 0);
  std::vector<int> waiter(p.passes(), -1), runnable;  // waiter: the rank that waits for the pass, or -1
  std::vector<std::size_t> next(p.ranks, 0);
  for (int rank = p.ranks - 1; rank >= 0; rank--) runnable.push_back(rank);
  int left = p.passes();
  while (!runnable.empty()) {
    const int rank = runnable.back();
    runnable.pop_back();
    const Row& row = orders.rows[rank];
    for (; next[rank] < row.size(); next[rank]++) {
      const int pass = row[next[rank]], kind = pass / half, rest = pass % half, chunk = rest / m;
      int needs = -1;
      Time lag = 0, length = 0, held = 0;
      if (kind == kForward) {
        length = p.forward[chunk], held = p.activation[chunk];
        if (chunk > 0) needs = pass - m, lag = p.communication[chunk - 1];
      } else if (kind == kBackward) {
        length = orders.fused[rest] ? p.fused[chunk] : p.backward[chunk];
        held = (orders.fused[rest] ? 0 : p.held[chunk]) - p.activation[chunk];
        if (chunk < n - 1) needs = pass + m, lag = p.communication[chunk];
      } else if (!orders.fused[rest]) {
        length = p.weight[chunk], held = -p.held[chunk];
        const int before = next[rank] > 0 ? row[next[rank] - 1] : -1;
        if (before >= 0 && before / m == pass / m && !orders.fused[before % half]) length -= p.merge_saving[chunk];
      }
      Time now = clock[rank];
      if (needs >= 0) {
        if (ends[needs] < 0) {
          waiter[needs] = rank;
          break;
        }
        now = std::max(now, ends[needs] + lag);
      }
      if (start[rank] < 0) start[rank] = now;
      clock[rank] = ends[pass] = now + length;
      memory[rank] += held;
      found.peaks[rank] = std::max(found.peaks[rank], memory[rank]);
      left--;
      if (waiter[pass] >= 0) runnable.push_back(waiter[pass]);
    }
  }
  if (left > 0) return {};
  found.cost = 0;
  for (int rank = 0; rank < p.ranks; rank++) found.cost = std::max(found.cost, clock[rank] - (p.makespan ? 0 : start[rank]));
  return found;
}

}  // namespace zbkern
