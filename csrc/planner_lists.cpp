// The list scheduler: every rank decides what to run next by its rule. planner/list_scheduler.py does the same in Python.
#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "planner.h"

namespace zbkern {
namespace {

constexpr Time kNever = INT64_MAX / 4;
constexpr int kForeseen = 3;  // chunks

struct RankState {
  Time clock = 0, memory = 0, held = 0, start = -1;
  bool idle = false, last_was_forward = false;
  int following = -1;  // the chunk whose F or B comes next by `follow`
  std::vector<int> chunks, pending;  // pending: the chunk of every B, in order; W take them from `next_weight` on
  std::size_t next_weight = 0;
};

}  // namespace

Ordering list_schedule(const Problem& p, const Rule& rule, Time cutoff) {
  const int n = p.chunks, m = p.microbatches;
  std::vector<RankState> ranks(p.ranks);
  for (int c = 0; c < n; c++) ranks[p.placement[c]].chunks.push_back(c);
  std::vector<Time> forward_at(static_cast<std::size_t>(n) * m, kNever), backward_at(forward_at);
  std::fill(forward_at.begin(), forward_at.begin() + m, 0);
  std::fill(backward_at.end() - m, backward_at.end(), 0);
  std::vector<int> forwards(n, 0), backwards(n, 0), weights(n, 0);
  Ordering result;
  result.rows.resize(p.ranks);
  result.fused.assign(static_cast<std::size_t>(n) * m, 0);

  // The earliest that the gradient of a microbatch can arrive, if the backward before it is near.
  const auto foreseen = [&](int chunk, int microbatch) {
    const auto at_of = [&](int c) { return backward_at[static_cast<std::size_t>(c) * m + microbatch]; };
    int source = chunk + 1;
    while (at_of(source) >= kNever)
      if (++source > chunk + kForeseen) return kNever;
    if (forwards[source] <= microbatch) return kNever;
    Time at = at_of(source);
    for (int c = source; c > chunk; c--)
      at = std::max(at, ranks[p.placement[c]].clock) + p.communication[c - 1] + (rule.fuse ? p.fused[c] : p.backward[c]);
    return at;
  };
  // Whether the later of two chunks whose F (or B) may run is taken.
  const auto prefers = [](const RankState& state, int later, int earlier, bool late, bool forward) {
    const bool follows = state.last_was_forward == forward && (state.following == later || state.following == earlier);
    return follows ? state.following == later : late;
  };
  // The ranks that are not idle, the earliest first, of equals the first.
  using Turn = std::pair<Time, int>;
  std::priority_queue<Turn, std::vector<Turn>, std::greater<Turn>> turns;
  for (int r = 0; r < p.ranks; r++) turns.push({0, r});
  for (int left = p.passes(); left > 0;) {
    if (turns.empty()) return Ordering{};
    const auto [now, rank] = turns.top();
    turns.pop();
    RankState& state = ranks[rank];

    int forward = -1, backward = -1;
    Time next = kNever;  // when an input arrives
    int oldest = m;  // the first microbatch that has a forward left here: there must always be room to finish it
    for (int c : state.chunks) oldest = std::min(oldest, forwards[c]);
    for (int c : state.chunks) {
      if (backwards[c] < forwards[c]) {
        Time at = backward_at[static_cast<std::size_t>(c) * m + backwards[c]];
        if (at >= kNever && rule.foresight) {
          at = foreseen(c, backwards[c]);
          if (at > now) next = std::min(next, at);
        } else if (at > now) next = std::min(next, at);
        else if (backward < 0 || prefers(state, c, backward, rule.late_backward[rank], false)) backward = c;
      }
      if (forwards[c] < m && forwards[c] - backwards[c] < rule.caps[c]) {
        const Time at = forward_at[static_cast<std::size_t>(c) * m + forwards[c]];
        if (at >= kNever) continue;
        Time need = p.activation[c];
        for (int other : state.chunks)
          if (other != c && forwards[other] <= oldest) need += p.activation[other];
        if (state.memory - state.held + need > p.limit[rank]) continue;
        if (at > now) next = std::min(next, at);
        else if (forward < 0 || prefers(state, c, forward, rule.late_forward[rank], true)) forward = c;
      }
    }
    int kind = -1, chunk = -1;
    const bool pending = state.next_weight < state.pending.size();
    if (forward >= 0 && backward >= 0) {
      const int priority = rule.priority[rank];
      bool first = priority == 1 || (priority == 2 && !state.last_was_forward);
      if (state.following == (state.last_was_forward ? forward : backward)) first = state.last_was_forward;
      kind = first ? kForward : kBackward;
    } else if (forward >= 0) {
      kind = kForward;
    } else if (backward >= 0) {
      kind = kBackward;
    }
    if (kind == kForward && state.memory + p.activation[forward] > p.limit[rank]) kind = kWeight;
    bool fuse = rule.fuse;
    if (kind == kBackward && !fuse && state.memory + p.held[backward] - p.activation[backward] > p.limit[rank]) {
      if (pending) kind = kWeight;
      else fuse = true;
    }
    if (kind < 0) {
      if (pending && (next >= kNever || 4 * (next - now) >= rule.patience[rank] * p.weight[state.pending[state.next_weight]])) {
        kind = kWeight;
      } else {
        state.clock = next < kNever ? next : now;
        state.idle = next >= kNever;
        if (!state.idle) turns.push({next, rank});
        continue;
      }
    }

    int microbatch;
    Time length;
    if (kind == kForward) {
      chunk = forward;
      microbatch = forwards[chunk]++;
      length = p.forward[chunk];
      state.memory += p.activation[chunk];
    } else if (kind == kBackward) {
      chunk = backward;
      microbatch = backwards[chunk]++;
      length = fuse ? p.fused[chunk] : p.backward[chunk];
      state.memory -= p.activation[chunk];
      result.fused[static_cast<std::size_t>(chunk) * m + microbatch] = fuse;
      if (!fuse) {
        state.memory += p.held[chunk];
        state.held += p.held[chunk];
        state.pending.push_back(chunk);
      }
    } else {
      chunk = state.pending[state.next_weight++];
      microbatch = weights[chunk]++;
      length = p.weight[chunk];
      state.memory -= p.held[chunk];
      state.held -= p.held[chunk];
    }
    if (state.start < 0) state.start = now;
    state.clock = now + length;
    turns.push({state.clock, rank});
    left--;
    result.rows[rank].push_back((kind * n + chunk) * m + microbatch);
    if (kind != kWeight) state.last_was_forward = kind == kForward;
    if (kind == kBackward && fuse) {
      result.rows[rank].push_back((kWeight * n + chunk) * m + microbatch);
      weights[chunk]++;
      left--;
    }
    result.cost = std::max(result.cost, state.clock - (p.makespan ? 0 : state.start));
    if (result.cost > cutoff) return Ordering{};
    const int consumer = kind == kForward ? chunk + 1 : kind == kBackward ? chunk - 1 : -1;
    if (kind != kWeight && rule.follow)
      state.following = consumer >= 0 && consumer < n && p.placement[consumer] == rank ? consumer : -1;
    if (consumer < 0 || consumer >= n) continue;
    auto& arrivals = kind == kForward ? forward_at : backward_at;
    arrivals[static_cast<std::size_t>(consumer) * m + microbatch] = state.clock + p.communication[std::min(chunk, consumer)];
    RankState& peer = ranks[p.placement[consumer]];
    if (peer.idle) {
      peer.idle = false;
      peer.clock = std::max(peer.clock, now);
      turns.push({peer.clock, p.placement[consumer]});
    }
  }
  return result;
}

std::vector<std::pair<Time, int>> best_rules(const Problem& p, const std::vector<Rule>& rules, int kept, double seconds) {
  const Deadline deadline(seconds);
  std::vector<std::pair<Time, int>> found;
  for (int index = 0; index < static_cast<int>(rules.size()); index++) {
    if (!found.empty() && deadline.passed()) break;
    const bool full = static_cast<int>(found.size()) == kept;
    const Ordering orders = list_schedule(p, rules[index], full ? found.back().first - 1 : kNever);
    const auto same = [&](const auto& each) { return each.first == orders.cost; };
    if (orders.rows.empty() || std::any_of(found.begin(), found.end(), same)) continue;
    found.push_back({orders.cost, index});
    std::sort(found.begin(), found.end());
    if (static_cast<int>(found.size()) > kept) found.pop_back();
  }
  return found;
}

}  // namespace zbkern
