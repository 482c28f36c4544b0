// What given orders cost and hold, and W that follow each other grouped by chunk.
#include <algorithm>
#include <cstdlib>
#include <optional>

#include "planner.h"
#include "planner_ranks.h"

namespace zbkern {
namespace {

// The memory of the messages that others may have sent before a rank takes them; see schedules/ahead.py.
class Messages {
 public:
  Messages(const Problem& p, const Passes& passes, const Rows& rows)
      : p_(p), passes_(passes), place_(p.passes()), heard_(p.ranks, std::vector<int>(p.ranks, 0)) {
    for (const Row& row : rows) {
      for (std::size_t k = 0; k < row.size(); k++) place_[row[k]] = static_cast<int>(k);
      changes_.emplace_back(row.size() + 1, 0);
    }
    for (int c = 1; c < p.chunks; c++) in_line_ = in_line_ && std::abs(p.placement[c] - p.placement[c - 1]) <= 1;
    if (!in_line_) told_.resize(p.passes());
  }
  // Every pass once, those of a rank in order, and none before its input.
  void ran(int rank, int pass) {
    const int half = p_.chunks * p_.units, at = pass % half, m = p_.units;
    if (pass >= kWeight * half) return;
    std::vector<int>& heard = heard_[rank];
    if (const int input = passes_.input[pass]; input >= 0 && owner(input) != rank) {
      for (std::size_t peer = 0; !in_line_ && peer < heard.size(); peer++)
        heard[peer] = std::max(heard[peer], told_[input][peer]);
      heard[owner(input)] = std::max(heard[owner(input)], place_[input] + 1);
    }
    const int taker = pass < half ? (at + m < half ? pass + m : -1) : (at >= m ? pass - m : -1);
    if (taker < 0 || owner(taker) == rank) return;
    const Time size = (taker < half ? p_.forward_message : p_.backward_message)[taker % half];
    std::vector<Time>& changes = changes_[owner(taker)];
    changes[heard[owner(taker)]] += size, changes[place_[taker] + 1] -= size;
    if (!in_line_) told_[pass] = heard;
  }
  Time most(int rank) const {
    Time now = 0, most = 0;
    for (Time change : changes_[rank]) most = std::max(most, now += change);
    return most;
  }

 private:
  int owner(int pass) const { return p_.placement[pass / p_.units % p_.chunks]; }

  const Problem& p_;
  const Passes& passes_;
  std::vector<int> place_;                 // [pass] in its row
  std::vector<std::vector<int>> heard_;    // [rank][other] how many of its passes have been done
  std::vector<std::vector<int>> told_;     // [pass] what its message says of that
  std::vector<std::vector<Time>> changes_;  // [rank] of what waits, before each pass
  bool in_line_ = true;  // a sender has then heard of a receiver's passes from the receiver alone
};

}  // namespace

// Passes beside each other begin once the inputs of all have arrived. Their F take memory before any other frees some.
Measured measure(const Problem& p, const Ordering& orders) {
  const Passes passes(p, orders.fused);
  const int half = p.chunks * p.units, first_weight = kWeight * half;
  const auto is_action = [&](int pass) { return pass < first_weight || !orders.fused[pass - first_weight]; };
  Measured found;
  found.peaks.assign(p.ranks, 0), found.messages = found.peaks, found.times.resize(p.ranks);
  std::vector<Time> memory(p.ranks, 0);
  std::vector<std::size_t> next(p.ranks, 0), range(p.ranks, 0);  // of its row; of those beside each other
  std::vector<int> before(p.ranks, -1);                          // the pass before this one, in turn
  int waiting = p.ranks;
  std::vector<int> group, by_end;
  std::vector<Turn> turns;
  Ranks ranks(p);
  std::optional<Messages> messages;
  if (!p.forward_message.empty()) messages.emplace(p, passes, orders.rows);
  const auto row_of = [&](int rank) {
    const Row& row = orders.rows[rank];
    auto& times = found.times[rank];
    const auto take = [&](int pass) {
      found.peaks[rank] = std::max(found.peaks[rank], memory[rank] += passes.memory[pass]);
    };
    while (next[rank] < row.size()) {
      group.assign(1, row[next[rank]]);
      std::size_t end = next[rank] + 1;
      const int done = static_cast<int>(times.size());
      const bool beside = !orders.beside.empty() && range[rank] < orders.beside[rank].size() &&
                          orders.beside[rank][range[rank]].first == done && is_action(group[0]);
      const int all = beside ? orders.beside[rank][range[rank]].second - done : 1;
      for (; static_cast<int>(group.size()) < all; end++)
        if (is_action(row[end])) group.push_back(row[end]);
      Time start = ranks.clock[rank], at;
      for (int pass : group) {
        if (!ranks.arrived(passes, pass, rank, at)) return true;
        start = std::max(start, at);
      }
      next[rank] = end, range[rank] += beside, turns.clear();
      for (int pass : group) turns.push_back(turn_of(p, pass / half, pass % half, passes.length[pass]));
      if (beside) {
        in_turns(turns, start), before[rank] = -1;
      } else {
        const int pass = group[0];
        turns[0].begin = start, turns[0].end = start + passes.after(p, before[rank], pass), before[rank] = pass;
      }
      ranks.begin(rank, start);
      by_end.resize(group.size());
      std::iota(by_end.begin(), by_end.end(), 0);
      if (beside)
        std::stable_sort(by_end.begin(), by_end.end(), [&](int a, int b) { return turns[a].end < turns[b].end; });
      for (const bool forward : {true, false})
        for (int i : by_end)
          if ((group[i] < half) == forward) take(group[i]);
      for (std::size_t i = 0; i < group.size(); i++) {
        ranks.finish(rank, group[i], turns[i].end);
        if (messages) messages->ran(rank, group[i]);
        if (is_action(group[i])) times.emplace_back(turns[i].begin, turns[i].end);
      }
      ranks.clock[rank] = turns[by_end.back()].end;
    }
    waiting--;
    return true;
  };
  if (!ranks.run(row_of) || waiting) return found;
  found.cost = ranks.cost();
  for (int rank = 0; messages && rank < p.ranks; rank++)
    found.messages[rank] = std::max<Time>(0, messages->most(rank) - p.room[rank]);
  return found;
}

bool fits(const Problem& p, const Ordering& orders) {
  const Measured found = measure(p, orders);
  bool all = found.cost >= 0;
  for (int rank = 0; rank < p.ranks; rank++) all = all && found.peaks[rank] + found.messages[rank] <= p.limit[rank];
  return all;
}

Turn turn_of(const Problem& p, int kind, int at, Time length) {
  if (kind == kWeight) return {length, 0, p.collectives.empty() ? 1 : static_cast<int>(p.collectives[at])};
  const Time network = p.network[kind].empty() ? 0 : std::min(length, p.network[kind][at]);
  return {length - network, network, network ? static_cast<int>(p.collectives[at]) : 0};
}

void in_turns(std::vector<Turn>& passes, Time start) {
  Time now = start, lane = start;  // when the rank can compute, and when its network is free
  std::vector<Time> arrived(passes.size(), start);
  std::vector<int> left, waiting;
  for (const Turn& each : passes) waiting.push_back(static_cast<int>(left.size())), left.push_back(each.collectives);
  for (std::size_t at = 0; !waiting.empty(); at = at < waiting.size() ? at : 0) {
    const int index = waiting[at];
    Turn& pass = passes[index];
    now = std::max(now, arrived[index]);
    if (pass.begin < 0) pass.begin = now;
    now += pass.compute / (pass.collectives + 1);
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
