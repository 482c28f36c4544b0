#include "planner_lists.h"

#include <algorithm>
#include <utility>

namespace zbkern {

ListScheduler::ListScheduler(const Problem& problem)
    : p_(problem), n_(problem.chunks), m_(problem.units), chunks_(problem.ranks), pending_(problem.ranks), ends_(p_.ends) {
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
  forwards_.assign(n_, 0), backwards_ = weights_ = forwards_;
  for (auto& row : orders_.rows) row.clear();
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
    const Step step = choose(rule, rank, now);
    RankState& state = ranks_[rank];
    if (step.kind >= 0) {
      left_ -= execute(rule, rank, now, step);
    } else {
      state.clock = step.next < kForever ? step.next : now;
      turns_[rank] = step.next;
    }
    if (state.start >= 0 && state.clock - state.start + state.rest > cutoff) return false;
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
  const auto take = [&](int kind, int chunk) { step.kind = kind, step.chunk = chunk; };
  bool forward_first = backward < 0;
  if (forward >= 0 && backward >= 0) {
    const int priority = rule.priority[rank];
    forward_first = priority == 1 || (priority == 2 && !state.last_was_forward);
    if (state.following == (state.last_was_forward ? forward : backward)) forward_first = state.last_was_forward;
  }
  if (forward >= 0 && forward_first) {
    if (state.memory + p_.activation[forward * m_ + forwards_[forward]] > p_.limit[rank]) take(kWeight, weight);
    else take(kForward, forward);
  } else if (backward >= 0) {
    const int at = backward * m_ + backwards_[backward];
    const bool full = state.memory + p_.held[at] - p_.freed[at] > p_.limit[rank];
    const bool no_room = state.memory - p_.freed[at] > p_.limit[rank];
    const bool fuse = rule.fuse[backward];
    if (full && (!fuse || no_room) && weight >= 0) take(kWeight, weight);
    else if (!no_room) take(kBackward, backward), step.fuse = fuse || full;
  } else if (weight >= 0 &&
             (step.next >= kForever ||
              4 * (step.next - now) >= rule.patience[rank] * p_.weight[weight * m_ + weights_[weight]])) {
    take(kWeight, weight);
  }
  return step;
}

// Runs the pass, with its W where it is fused; how many passes that were.
int ListScheduler::execute(const Rule& rule, int rank, Time now, Step step) {
  RankState& state = ranks_[rank];
  Row& row = orders_.rows[rank];
  const auto [kind, chunk, fuse, next] = step;
  int ran = 1;
  const int unit = (kind == kForward ? forwards_ : kind == kBackward ? backwards_ : weights_)[chunk]++;
  const int at = chunk * m_ + unit;
  Time length;
  if (kind == kForward) {
    length = p_.forward[at];
    state.memory += p_.activation[at];
    if (begins(rank, chunk, unit)) state.reserved += whole_[rank * m_ + unit];
    state.rest -= length;
  } else if (kind == kBackward) {
    length = fuse ? p_.fused[at] : p_.backward[at];
    state.memory -= p_.freed[at];
    state.reserved -= std::max<Time>(0, p_.freed[at]);
    state.rest -= least_after_backward_[at];
    orders_.fused[at] = fuse;
    if (!fuse) {
      state.memory += p_.held[at];
      state.held += p_.held[at];
      state.rest += p_.weight[at];
      pending_[rank].push_back(chunk);
    }
  } else {
    length = p_.weight[at];
    state.memory -= p_.held[at];
    state.held -= p_.held[at];
    state.rest -= length;
    state.next_weight++;
  }
  if (state.start < 0) state.start = p_.makespan ? 0 : now;
  state.clock = now + length;
  turns_[rank] = state.clock;
  row.push_back(id(kind, chunk, unit));
  if (kind == kBackward && fuse) {
    row.push_back(id(kWeight, chunk, unit));
    weights_[chunk]++;
    ran = 2;
  }
  if (kind != kWeight) {
    state.last_was_forward = kind == kForward;
    const int consumer = kind == kForward ? chunk + 1 : chunk - 1;
    const bool any = consumer >= 0 && consumer < n_;
    if (rule.follow) state.following = any && p_.placement[consumer] == rank ? consumer : -1;
    const std::vector<Time>& lags = kind == kForward ? p_.forward_lag : p_.backward_lag;
    if (!any) return ran;
    arrives_[id(kind, consumer, unit)] = state.clock + lags[consumer * m_ + unit];
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
