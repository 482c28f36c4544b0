#include "planner_lists.h"

#include <algorithm>
#include <utility>

namespace zbkern {

ListScheduler::ListScheduler(const Problem& problem)
    : p_(problem),
      n_(problem.chunks),
      m_(problem.units),
      chunks_(problem.ranks),
      pending_(problem.ranks),
      ends_(p_.ends) {
  for (int c = 0; c < n_; c++) chunks_[p_.placement[c]].push_back(c);
  orders_.rows.resize(p_.ranks);
  ends_.push_back(m_ + 1);
  to_finish_ = p_.activation;
  whole_.assign(static_cast<std::size_t>(p_.ranks) * m_, 0);
  for (int at = n_ * m_ - 1; at >= 0; at--) {
    const int k = at % m_;
    if (k + 1 < m_ && !p_.begins(k + 1)) to_finish_[at] += to_finish_[at + 1];
    if (p_.begins(k)) whole_[p_.placement[at / m_] * m_ + k] += to_finish_[at] + std::max<Time>(0, -p_.freed[at]);
  }
}

Time ListScheduler::excess() const {
  Time most = -kForever;
  for (int at = 0; at < p_.ranks * m_; at++) most = std::max(most, whole_[at] - p_.limit[at / m_]);
  return most;
}

void ListScheduler::reset(const Rule& rule) {
  turns_.assign(p_.ranks, 0);
  ranks_.assign(p_.ranks, RankState{});
  arrives_.assign(2 * n_ * m_, kForever);
  std::fill(arrives_.begin(), arrives_.begin() + m_, 0), std::fill(arrives_.end() - m_, arrives_.end(), 0);
  forwards_.assign(n_, 0), backwards_ = forwards_;
  for (auto& row : orders_.rows) row.clear();
  orders_.beside.assign(rule.most > 1 ? p_.ranks : 0, {});
  for (auto& pending : pending_) pending.clear();
  orders_.fused.assign(static_cast<std::size_t>(n_) * m_, 0);
  orders_.cost = 0;
  least_after_backward_.resize(static_cast<std::size_t>(n_) * m_);
  for (int at = 0; at < n_ * m_; at++) {
    least_after_backward_[at] = rule.fuse[at / m_] ? p_.fused[at] : std::min(p_.fused[at], p_.backward[at] + p_.weight[at]);
    ranks_[p_.placement[at / m_]].rest += p_.forward[at] + least_after_backward_[at];
  }
}

bool ListScheduler::run(const Rule& rule, Time cutoff) {
  reset(rule);
  for (left_ = p_.passes(); left_ > 0;) {
    int rank = 0;  // whose turn is the first, of equals the first, without the branches of std::min_element
    Time now = turns_[0];
    for (int each = 1; each < p_.ranks; each++) {
      const Time turn = turns_[each];
      rank = turn < now ? each : rank, now = std::min(now, turn);
    }
    if (now >= kForever) return false;
    const Step step = rule.most > 1 ? choose_beside(rule, rank, now) : choose(rule, rank, now);
    RankState& state = ranks_[rank];
    if (step.count) {
      left_ -= run(rule, rank, now, step);
    } else {
      state.clock = step.next < kForever ? step.next : now;
      turns_[rank] = step.next;
    }
    const Time rest = rule.most > 1 ? 0 : state.rest;  // passes beside each other take less time than they do in turn
    if (state.start >= 0 && state.clock - state.start + rest > cutoff) return false;
  }
  for (const RankState& state : ranks_) orders_.cost = std::max(orders_.cost, state.clock - state.start);
  return true;
}

ListScheduler::Step ListScheduler::choose(const Rule& rule, int rank, Time now) const {
  const RankState& state = ranks_[rank];
  const auto& chunks = chunks_[rank];
  Step step;
  int forward = -1, backward = -1;
  // Whether the later of two chunks whose F (or B) may run is taken.
  const auto prefers = [&](int later, int earlier, bool late, bool is_forward) {
    const bool follows =
        state.last_was_forward == is_forward && (state.following == later || state.following == earlier);
    return follows ? state.following == later : late;
  };
  int oldest = m_ + 1;  // the end of the first microbatch that has a forward left here: there must be room to finish it
  for (int c : chunks) oldest = std::min(oldest, ends_[forwards_[c]]);
  Time to_finish = 0;  // the memory for it, and for what its first backward takes even if it is fused
  for (int c : chunks) {
    if (forwards_[c] < m_ && ends_[forwards_[c]] == oldest) to_finish += to_finish_[c * m_ + forwards_[c]];
    if (backwards_[c] < m_) to_finish += std::max<Time>(0, -p_.freed[c * m_ + backwards_[c]]);
  }
  for (int c : chunks) {
    if (forwards_[c] >= ends_[backwards_[c]]) {
      const Time arrives = arrives_[id(kBackward, c, backwards_[c])];
      if (arrives > now) step.next = std::min(step.next, arrives);
      else if (backward < 0 || prefers(c, backward, rule.late_backward[rank], false)) backward = c;
    }
    if (forwards_[c] < m_ && forwards_[c] - backwards_[c] < rule.caps[c]) {
      const Time arrives = arrives_[id(kForward, c, forwards_[c])];
      const int k = forwards_[c];
      const Time need =
          rule.reserve ? state.reserved + (begins(rank, c, k) ? whole_[rank * m_ + k] : 0)
                       : state.memory - state.held + to_finish + (ends_[k] == oldest ? 0 : p_.activation[c * m_ + k]);
      if (arrives >= kForever || need > p_.limit[rank]) continue;
      if (arrives > now) step.next = std::min(step.next, arrives);
      else if (forward < 0 || prefers(c, forward, rule.late_forward[rank], true)) forward = c;
    }
  }
  const auto& pending = pending_[rank];
  const int weight = state.next_weight < pending.size() ? pending[state.next_weight] : -1;
  bool forward_first = backward < 0;
  if (forward >= 0 && backward >= 0) {
    const int priority = rule.priority[rank];
    forward_first = priority == 1 || (priority == 2 && !state.last_was_forward);
    if (state.following == (state.last_was_forward ? forward : backward)) forward_first = state.last_was_forward;
  }
  if (forward >= 0 && forward_first) {
    if (state.memory + p_.activation[forward * m_ + forwards_[forward]] > p_.limit[rank]) {
      if (weight >= 0) step.take(kWeight, weight / m_);
    } else {
      step.take(kForward, forward);
    }
  } else if (backward >= 0) {
    const int at = backward * m_ + backwards_[backward];
    const bool full = state.memory + p_.held[at] - p_.freed[at] > p_.limit[rank];
    const bool no_room = state.memory - p_.freed[at] > p_.limit[rank];
    const bool fuse = rule.fuse[backward];
    if (full && (!fuse || no_room) && weight >= 0) step.take(kWeight, weight / m_);
    else if (!no_room) step.take(kBackward, backward, fuse || full);
  } else if (weight >= 0 &&
             (step.next >= kForever ||
              4 * (step.next - now) >= rule.patience[rank] * p_.weight[weight])) {
    step.take(kWeight, weight / m_);
  }
  return step;
}

// All that is ready and has room, beside each other, and W in what is left of their network time. A rank that is ready
// for an F or a B alone may wait for the other one.
ListScheduler::Step ListScheduler::choose_beside(const Rule& rule, int rank, Time now) const {
  const RankState& state = ranks_[rank];
  const auto& chunks = chunks_[rank];
  const auto& pending = pending_[rank];
  Step step;
  std::vector<Pick> forwards, backwards;
  Time next_forward = kForever, next_backward = kForever, memory = state.memory, later = 0;
  bool is_short = false;
  for (auto each = chunks.rbegin(); each != chunks.rend(); each++) {
    const int c = *each, k = forwards_[c], back = backwards_[c];
    if (k >= ends_[back]) {
      const Time arrives = arrives_[id(kBackward, c, back)];
      if (arrives > now) next_backward = std::min(next_backward, arrives);
      else backwards.push_back({kBackward, c, false});
    }
    if (k >= m_) continue;
    const Time arrives = arrives_[id(kForward, c, k)], taken = p_.activation[c * m_ + k];
    if (arrives > now) next_forward = std::min(next_forward, arrives);
    else if (k - back < rule.caps[c]) {
      const Time need = rule.reserve && begins(rank, c, k) ? state.reserved + whole_[rank * m_ + k] : 0;
      if (memory + taken + (rule.reserve ? 0 : later) > p_.limit[rank] || need > p_.limit[rank]) is_short = true;
      else forwards.push_back({kForward, c, false}), memory += taken;
    }
    later += taken;
  }
  step.next = std::min(next_forward, next_backward);
  std::stable_sort(backwards.begin(), backwards.end(),
                   [&](const Pick& a, const Pick& b) { return backwards_[a.chunk] < backwards_[b.chunk]; });
  for (std::size_t i = 0; i < backwards.size();) {  // of which some leave more memory than they free
    Pick& each = backwards[i];
    const int at = next(rank, each, 0);
    each.fuse = memory + p_.held[at] - p_.freed[at] > p_.limit[rank];
    if (!each.fuse) i++;
    else if (state.next_weight == pending.size() && memory - p_.freed[at] <= p_.limit[rank]) i++;
    else is_short = true, backwards.erase(backwards.begin() + static_cast<std::ptrdiff_t>(i));
  }
  const auto weight_alone = [&](bool at_once) {
    if (state.next_weight == pending.size()) return step;
    const int weight = pending[state.next_weight];
    const bool ends = now + rule.patience[rank] * p_.weight[weight] / 4 <= step.next;
    if (at_once || ends) step.take(kWeight, weight / m_);
    return step;
  };
  if (forwards.empty() && backwards.empty()) return weight_alone(is_short);
  if (rule.waits && (forwards.empty() || backwards.empty())) {
    const Time soon = backwards.empty() ? next_backward : next_forward;
    if (soon <= now + rule.waits * p_.forward[0] / 100) return weight_alone(false);
  }
  if (!forwards.empty())
    for (Pick& each : backwards) each.fuse = each.fuse || rule.fuse[each.chunk];
  const auto may_join = [&](const Pick& pick) {
    for (int i = 0; i < step.count; i++) {
      const Pick& other = step.picks[i];
      if (other.chunk == pick.chunk && (p_.apart || other.kind == pick.kind)) return false;
    }
    return step.count < rule.most;
  };
  for (const bool alike : {false, true})  // an F and a B, of other chunks if there are any
    for (const Pick& f : forwards)
      for (const Pick& b : backwards)
        if (!step.count && alike == (f.chunk == b.chunk) && !(p_.apart && alike)) {
          step.take(f.kind, f.chunk, f.fuse), step.take(b.kind, b.chunk, b.fuse);
        }
  if (!step.count) {
    const Pick& first = backwards.empty() ? forwards.front() : backwards.front();
    step.take(first.kind, first.chunk, first.fuse);
  }
  if (rule.alike)
    for (const auto* some : {&backwards, &forwards})
      for (const Pick& each : *some)
        if (may_join(each)) step.take(each.kind, each.chunk, each.fuse);
  Time network = 0;
  for (int i = 0; i < step.count; i++)
    network += network_of(step.picks[i].kind, next(rank, step.picks[i], 0));
  for (std::size_t i = state.next_weight; network && i < pending.size() && step.count < rule.most; i++)
    step.take(kWeight, pending[i] / m_);
  return step;
}

// Runs these passes from now on; how many they are, with the W of fused backwards.
int ListScheduler::run(const Rule& rule, int rank, Time now, const Step& step) {
  RankState& state = ranks_[rank];
  if (state.start < 0) state.start = p_.makespan ? 0 : now;
  if (step.count == 1) {
    state.clock = turns_[rank] = now + length(step.picks[0], next(rank, step.picks[0], 0));
    return finish(rule, rank, now, step.picks[0], state.clock);
  }
  orders_.beside[rank].emplace_back(state.actions, state.actions + step.count);
  std::vector<Turn> passes;
  int weights = 0;
  for (int i = 0; i < step.count; i++) {
    const Pick& pick = step.picks[i];
    const int at = next(rank, pick, pick.kind == kWeight ? weights++ : 0);
    passes.push_back(turn_of(p_, pick.kind, at, length(pick, at)));
  }
  in_turns(passes, now);
  for (const Turn& each : passes) state.clock = std::max(state.clock, each.end);
  turns_[rank] = state.clock;
  int ran = 0;
  for (int i = 0; i < step.count; i++) ran += finish(rule, rank, now, step.picks[i], passes[i].end);
  return ran;
}

// Writes down the pass, with its W where it is fused; how many passes that were.
int ListScheduler::finish(const Rule& rule, int rank, Time now, Pick pick, Time end) {
  RankState& state = ranks_[rank];
  Row& row = orders_.rows[rank];
  const auto [kind, chunk, fuse] = pick;
  int ran = 1;
  const int at = next(rank, pick, 0), unit = at % m_;
  state.actions++;
  if (kind == kForward) {
    forwards_[chunk]++;
    state.memory += p_.activation[at];
    if (begins(rank, chunk, unit)) state.reserved += whole_[rank * m_ + unit];
    state.rest -= p_.forward[at];
  } else if (kind == kBackward) {
    backwards_[chunk]++;
    state.memory -= p_.freed[at];
    state.reserved -= std::max<Time>(0, p_.freed[at]);
    state.rest -= least_after_backward_[at];
    orders_.fused[at] = fuse;
    if (!fuse) {
      state.memory += p_.held[at];
      state.held += p_.held[at];
      state.rest += p_.weight[at];
      pending_[rank].push_back(at);
    }
  } else {
    state.memory -= p_.held[at];
    state.held -= p_.held[at];
    state.rest -= p_.weight[at];
    state.next_weight++;
  }
  row.push_back(id(kind, chunk, unit));
  if (kind == kBackward && fuse) {
    row.push_back(id(kWeight, chunk, unit));
    ran = 2;
  }
  if (kind != kWeight) {
    state.last_was_forward = kind == kForward;
    const int consumer = kind == kForward ? chunk + 1 : chunk - 1;
    const bool any = consumer >= 0 && consumer < n_;
    if (rule.follow) state.following = any && p_.placement[consumer] == rank ? consumer : -1;
    const std::vector<Time>& lags = kind == kForward ? p_.forward_lag : p_.backward_lag;
    if (!any) return ran;
    arrives_[id(kind, consumer, unit)] = end + lags[consumer * m_ + unit];
    const int peer = p_.placement[consumer];  // which looks again, if it waited without knowing for how long
    if (turns_[peer] >= kForever) turns_[peer] = ranks_[peer].clock = std::max(ranks_[peer].clock, now);
  }
  return ran;
}

namespace {

// Takes up to three neighbouring entries of `changed`.
void take_some(std::vector<int>& entries, const std::vector<int>& changed, Random& random) {
  const int size = static_cast<int>(entries.size()), first = random.below(size),
            end = std::min(size, first + 1 + random.below(3));
  std::copy(changed.begin() + first, changed.begin() + end, entries.begin() + first);
}

}  // namespace

void change(Rule& rule, const Problem& p, bool may_follow, Random& random) {
  const int what = random.below(20);
  if (what == 1 && may_follow) {
    rule.follow = !rule.follow;
  } else if (what < 10) {
    const int change = random.percent(50) ? 1 : -1;
    std::vector<int> caps = rule.caps;
    for (int& cap : caps) cap = std::min(std::max(cap + change, p.slices), p.units);
    take_some(rule.caps, caps, random);
  } else {
    const std::pair<std::vector<int>*, int> choices[] = {  // of a rank, and how many each has
        {&rule.priority, 3}, {&rule.patience, 5}, {&rule.late_forward, 2}, {&rule.late_backward, 2}};
    const auto& [entries, count] = choices[random.below(p.chunks > p.ranks ? 4 : 2)];
    const int choice = random.below(count);
    take_some(*entries, std::vector<int>(p.ranks, choice), random);
  }
}

std::vector<std::pair<Time, int>> best_rules(const Problem& problem, const std::vector<Rule>& rules, int kept) {
  ListScheduler lists(problem);
  std::vector<std::pair<Time, int>> found;
  for (int index = 0; index < static_cast<int>(rules.size()); index++) {
    const bool full = static_cast<int>(found.size()) == kept;
    if (!lists.run(rules[index], full ? found.back().first - 1 : kForever)) continue;
    const Time cost = lists.orders().cost;
    if (std::any_of(found.begin(), found.end(), [&](const auto& each) { return each.first == cost; })) continue;
    found.push_back({cost, index});
    std::sort(found.begin(), found.end());
    if (full) found.pop_back();
  }
  return found;
}

std::pair<Ordering, Rule> refine(const Problem& problem, const Rule& start, bool may_follow, const Effort& effort) {
  ListScheduler lists(problem);
  std::pair<Ordering, Rule> best{{}, start};
  for (int& cap : best.second.caps) cap = std::min(cap, problem.units);
  if (!lists.run(best.second, kForever)) return best;
  improve(
      best.second, lists.orders().cost, effort,
      [&](Rule& trial, Random& random) { return change(trial, problem, may_follow, random), true; },
      [&](const Rule& trial, Time threshold) { return lists.run(trial, threshold) ? lists.orders().cost : kForever; },
      [&](const Rule& now) { return best = {lists.orders(), now}, best.first.cost <= effort.target; });
  return best;
}

}  // namespace zbkern
