// What given orders cost and hold; planner/annealing.py does the same in Python.
#include <algorithm>
#include <cstdlib>

#include "planner.h"

namespace zbkern {

namespace {

// Starts: [rank][position], where they are wanted.
Measured run(const Problem& p, const Ordering& orders, std::vector<std::vector<Time>>* starts) {
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
      if (starts) (*starts)[rank].push_back(now);
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

// Where the stretch begins that runs every kind of pass of each chunk of the row once and starts nearest to `time`; -1
// when there is none. groups: kind and chunk of every pass.
int repeated(const Row& groups, const std::vector<Time>& starts, int size, Time time) {
  int best = -1;
  std::vector<int> seen(1 + *std::max_element(groups.begin(), groups.end()), 0);
  int distinct = 0;
  for (int end = 0; end < static_cast<int>(groups.size()); end++) {
    if (seen[groups[end]]++ == 0) distinct++;
    const int begin = end - size + 1;
    if (begin > 0 && --seen[groups[begin - 1]] == 0) distinct--;
    if (begin < 0 || distinct < size) continue;
    if (best < 0 || std::abs(starts[begin] - time) < std::abs(starts[best] - time)) best = begin;
  }
  return best;
}

}  // namespace

Measured measure(const Problem& p, const Ordering& orders) { return run(p, orders, nullptr); }

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

Ordering extended(const Problem& p, const Ordering& few) {
  const int n = p.chunks, small = static_cast<int>(few.fused.size()) / n;
  Problem less = p;
  less.microbatches = small;
  std::vector<std::vector<Time>> starts(p.ranks);
  if (run(less, few, &starts).cost < 0) return {};
  Rows groups(p.ranks);
  Time end = 0;
  std::vector<int> own(p.ranks, 0);
  for (int chunk = 0; chunk < n; chunk++) own[p.placement[chunk]]++;
  for (int rank = 0; rank < p.ranks; rank++) {
    for (int pass : few.rows[rank]) groups[rank].push_back(pass / small);
    end = std::max(end, starts[rank].back());
  }
  Ordering best;
  for (int eighth = 2; eighth < 7; eighth++) {
    Ordering found{Rows(p.ranks), std::vector<char>(static_cast<std::size_t>(n) * p.microbatches, 0), 0};
    for (int rank = 0; rank < p.ranks; rank++) {
      const int size = 3 * own[rank], at = repeated(groups[rank], starts[rank], size, end * eighth / 8);
      if (at < 0) return best;
      std::vector<int> count(3 * n, 0);
      const auto add = [&](int from, int to) {
        for (int i = from; i < to; i++) {
          const int group = groups[rank][i];
          found.rows[rank].push_back(group * p.microbatches + count[group]++);
        }
      };
      add(0, at);
      for (int more = small; more < p.microbatches; more++) add(at, at + size);
      add(at, static_cast<int>(groups[rank].size()));
    }
    found.cost = measure(p, found).cost;
    if (found.cost >= 0 && (best.rows.empty() || found.cost < best.cost)) best = found;
  }
  return best;
}

}  // namespace zbkern
