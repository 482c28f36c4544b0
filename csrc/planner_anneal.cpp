// Simulated annealing over the order of every rank; see planner/annealing.py. A move runs again only what starts after
// the first pass that it shifted, and stops as soon as it is certain to be rejected.
#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "planner.h"
#include "planner_random.h"
#include "planner_ranks.h"

namespace zbkern {
namespace {

constexpr int kWorkOfAMove = 50;  // in passes: to choose and to undo it, however few passes it runs again

struct Shift {
  int rank, from, to;
};

// A pass and when it ends. A run has few branches, which a processor cannot foretell: what waits for nothing waits for
// a pass before all others, and what nobody waits for is waited for by a rank beside the others.
struct Timed {
  Time end = 0, trial_end = 0, lag = 0;  // lag: of the message that it waits for
  int input, consumer;                   // the pass whose output it waits for; the rank that waits for its output
  int rank = 0, position = -1;           // its own, and where it is in that rank's row
};

class Annealer {
 public:
  Annealer(const Problem& problem, const Ordering& start, Time spread)
      : p_(problem),
        n_(problem.chunks),
        m_(problem.units),
        fused_(start.fused),
        passes_(problem, start.fused),
        rows_(start.rows),
        spread_(spread) {
    const int passes = p_.passes();
    before_.assign(passes, -1), timed_.assign(passes + 1, {0, 0, 0, passes, p_.ranks});
    timed_[passes].trial_end = -kForever;
    for (int pass = 0; pass < passes; pass++) {
      group_.push_back(pass / m_);
      Timed& each = timed_[pass];
      each.lag = passes_.lag[pass], each.rank = p_.placement[group_[pass] % n_];
      if (passes_.input[pass] >= 0) each.input = passes_.input[pass], timed_[each.input].consumer = each.rank;
    }
    for (int c = 0; c < n_; c++)
      for (int j = 0; j < m_; j++) {
        if (p_.begins(j)) before_[id(kForward, c, p_.ends[j] - 1)] = id(kBackward, c, j);
        before_[id(kBackward, c, j)] = id(kWeight, c, j);
      }
    const int ranks = p_.ranks;
    starts_.resize(ranks), memory_.resize(ranks), rest_.resize(ranks), span_.assign(ranks, 0);
    trial_span_ = span_;
    first_.assign(ranks, 0), reached_.assign(ranks, 0), waits_for_.assign(ranks + 1, -1), clock_.assign(ranks, 0);
    for (int rank = 0; rank < ranks; rank++) {
      const std::size_t size = rows_[rank].size();
      starts_[rank].assign(size, 0), memory_[rank].assign(size, 0);
      rest_[rank].assign(size + 1, 0), lengths_.emplace_back(size, 0);
      refresh(rank, 0, static_cast<int>(size) - 1);
    }
    if (!run(kForever)) throw std::invalid_argument("anneal: the orders to start from cannot run");
    commit();
  }

  bool propose(Random& random, bool may_fuse);
  void follow(const Annealer& other);
  bool run(Time more);
  void commit();
  void undo();
  Ordering orders(Time cost) const { return {rows_, fused_, cost}; }
  Time largest() const { return *std::max_element(span_.begin(), span_.end()); }
  std::int64_t work() const { return work_; }

 private:
  int id(int kind, int c, int j) const { return (kind * n_ + c) * m_ + j; }
  int kind_of(int pass) const { return group_[pass] < n_ ? kForward : group_[pass] < 2 * n_ ? kBackward : kWeight; }
  int chunk_of(int pass) const { return group_[pass] - kind_of(pass) * n_; }

  void refresh(int rank, int low, int high);
  int reach(int rank, int from, int to) const;
  bool must_precede(int before, int after) const;
  void shift(int rank, int from, int to);
  void toggle(int c, int j);
  int longest() const { return static_cast<int>(std::max_element(span_.begin(), span_.end()) - span_.begin()); }
  bool fill(Random& random);
  void critical_path();

  const Problem& p_;
  const int n_, m_;
  std::vector<char> fused_;
  Passes passes_;
  std::vector<int> before_;  // [pass] the first one of its chunk of the next kind that needs it, or -1
  std::vector<int> group_;   // [pass] kind * chunks + chunk: divisions would take half the time
  std::vector<Timed> timed_;                                  // [pass]
  Rows rows_;
  std::vector<std::vector<Time>> starts_, memory_, rest_, lengths_;  // [rank][position]
  std::vector<Time> span_, trial_span_, clock_;
  std::vector<int> first_, reached_, waits_for_, runnable_;
  std::int64_t work_ = 0;
  std::vector<std::pair<int, int>> critical_;
  std::vector<Shift> done_;
  int toggled_ = -1;
  Time from_ = 0, energy_ = 0, trial_energy_ = 0;
  const Time spread_;
};

// Updates lengths, memory, remaining work and positions of a row after a change at low..high.
void Annealer::refresh(int rank, int low, int high) {
  const Row& row = rows_[rank];
  Time memory = low ? memory_[rank][low - 1] : 0;
  for (int k = low; k <= high; k++) {
    memory += passes_.memory[row[k]];
    memory_[rank][k] = memory;
    timed_[row[k]].position = k;
  }
  const int last = std::min(high + 1, static_cast<int>(row.size()) - 1);
  for (int k = last; k >= low; k--) {
    Time length = passes_.length[row[k]];
    if (k > 0 && length > 0 && kind_of(row[k]) == kWeight && group_[row[k]] == group_[row[k - 1]] &&
        passes_.length[row[k - 1]] > 0)
      length -= p_.merge_saving[row[k] - kWeight * n_ * m_];
    lengths_[rank][k] = length;
  }
  for (int k = last; k >= 0; k--) {
    const Time rest = rest_[rank][k + 1] + lengths_[rank][k];
    if (k < low && rest_[rank][k] == rest) break;
    rest_[rank][k] = rest;
  }
}

// Runs every pass that a move can change, until it is certain that the energy grows by more than this: each span is at
// least what its rank has waited and worked so far and its work that is left. False then, or in a deadlock.
bool Annealer::run(Time more) {
  runnable_.clear();
  int remaining = 0;
  Time largest = 0, sum = 0;
  for (int rank = 0; rank < p_.ranks; rank++) {
    const auto& starts = starts_[rank];
    const int k = static_cast<int>(std::lower_bound(starts.begin(), starts.end(), from_) - starts.begin());
    first_[rank] = reached_[rank] = k;
    clock_[rank] = k ? timed_[rows_[rank][k - 1]].end : 0;
    waits_for_[rank] = -1;
    trial_span_[rank] = clock_[rank] + rest_[rank][k] - (k && !p_.makespan ? starts[0] : 0);
    largest = std::max(largest, trial_span_[rank]), sum += trial_span_[rank];
    remaining += static_cast<int>(starts.size()) - k;
    if (k < static_cast<int>(starts.size())) runnable_.push_back(rank);
  }
  // What the loop reads and writes has names of its own, for the compiler cannot tell that no two of them are the same.
  Timed* const passes = timed_.data();
  int *const reached = reached_.data(), *const waits_for = waits_for_.data();
  const Time ranks = p_.ranks, spread = spread_, most = energy_ + more;
  const bool makespan = p_.makespan;
  while (!runnable_.empty()) {
    const int rank = runnable_.back(), begin = reached[rank], size = static_cast<int>(rows_[rank].size());
    runnable_.pop_back();
    const int* const row = rows_[rank].data();
    const Time* const lengths = lengths_[rank].data();
    Time now = clock_[rank], span = trial_span_[rank];
    int k = begin;
    for (; k < size; k++) {
      Timed& pass = passes[row[k]];
      const Timed& input = passes[pass.input];
      if (input.position >= reached[input.rank]) {
        waits_for[rank] = pass.input;
        break;
      }
      const Time wait = std::max<Time>(input.trial_end + pass.lag - now, 0), counted = k || makespan ? wait : 0;
      span += counted, sum += counted, largest = std::max(largest, span);
      if (ranks * largest + spread * sum > most) break;
      now += wait + lengths[k];
      pass.trial_end = now;
      reached[rank] = k + 1;
      int& waited_for = waits_for[pass.consumer];
      if (waited_for == row[k]) waited_for = -1, runnable_.push_back(pass.consumer);
    }
    remaining -= k - begin, work_ += k - begin;
    if (ranks * largest + spread * sum > most) return false;
    clock_[rank] = now, trial_span_[rank] = span;
  }
  trial_energy_ = p_.ranks * largest + spread_ * sum;
  return remaining == 0 && trial_energy_ - energy_ <= more;
}

void Annealer::commit() {
  for (int rank = 0; rank < p_.ranks; rank++)
    for (std::size_t k = first_[rank]; k < rows_[rank].size(); k++, work_++) {
      Timed& each = timed_[rows_[rank][k]];
      each.end = each.trial_end;
      starts_[rank][k] = each.end - lengths_[rank][k];
    }
  span_ = trial_span_, energy_ = trial_energy_;
  critical_.clear();
}

bool Annealer::must_precede(int before, int after) const {
  return group_[before] == group_[after] || timed_[after].input == before ||
         before_[before] == after;  // units pass in order
}

// The farthest position towards `to` that the pass at `from` can move to: order and memory of its own rank allow it.
int Annealer::reach(int rank, int from, int to) const {
  const Row& row = rows_[rank];
  const auto& memory = memory_[rank];
  const int pass = row[from];
  const Time change = passes_.memory[pass], limit = p_.limit[rank];
  int k = from;
  while (k > to) {
    if (must_precede(row[k - 1], pass)) break;
    if (change > 0 && std::max(memory[k - 1], k > 1 ? memory[k - 2] : 0) + change > limit) break;
    k--;
  }
  while (k < to) {
    if (must_precede(pass, row[k + 1])) break;
    if (change < 0 && memory[k + 1] - change > limit) break;
    k++;
  }
  return k;
}

void Annealer::shift(int rank, int from, int to) {
  Row& row = rows_[rank];
  if (to < from) std::rotate(row.begin() + to, row.begin() + from, row.begin() + from + 1);
  else std::rotate(row.begin() + from, row.begin() + from + 1, row.begin() + to + 1);
  refresh(rank, std::min(from, to), std::max(from, to));
}

void Annealer::toggle(int c, int j) {
  const int at = c * m_ + j;
  fused_[at] = !fused_[at];
  passes_.fuse(p_, at, fused_[at]);
  refresh(p_.placement[c], timed_[id(kBackward, c, j)].position, timed_[id(kWeight, c, j)].position);
}

// The passes, as (rank, position), that decide when the rank with the largest span ends.
void Annealer::critical_path() {
  int rank = longest();
  for (int k = static_cast<int>(rows_[rank].size()) - 1; k >= 0;) {
    critical_.emplace_back(rank, k);
    const int pass = rows_[rank][k];
    if (k > 0 && timed_[rows_[rank][k - 1]].end == starts_[rank][k]) {
      k--;
      continue;
    }
    const int input = timed_[pass].input;
    if (input == p_.passes()) break;
    rank = timed_[input].rank;
    k = timed_[input].position;
  }
}

// Moves a later pass into a gap of a rank, which is the likelier the longer it is: the next of some kind and chunk,
// from however far behind. False when that cannot start there.
bool Annealer::fill(Random& random) {
  const int rank = random.percent(50) ? longest() : random.below(p_.ranks);
  const Row& row = rows_[rank];
  const int size = static_cast<int>(row.size());
  Time idle = ((span_[rank] - rest_[rank][0]) >> 16) * random.below(1 << 16);
  int gap = 1;
  while (gap < size && (idle -= starts_[rank][gap] - timed_[row[gap - 1]].end) >= 0) gap++;
  if (gap + 1 >= size) return false;
  const int group = group_[row[gap + 1 + random.below(size - gap - 1)]];
  int k = gap;
  while (group_[row[k]] != group) k++;
  const Timed& pass = timed_[row[k]];
  if (k == gap || timed_[pass.input].end + pass.lag >= starts_[rank][gap] || reach(rank, k, gap) != gap) return false;
  from_ = starts_[rank][gap];
  shift(rank, k, gap);
  done_.push_back({rank, k, gap});
  return true;
}

// Applies a random move; false when there was nothing to move.
bool Annealer::propose(Random& random, bool may_fuse) {
  done_.clear();
  toggled_ = -1;
  from_ = kForever;
  if (may_fuse && random.percent(10)) {
    const int c = random.below(n_), j = random.below(m_), rank = p_.placement[c];
    const int low = timed_[id(kBackward, c, j)].position, high = timed_[id(kWeight, c, j)].position;
    toggle(c, j);
    toggled_ = c * m_ + j;
    from_ = starts_[rank][low];
    for (int k = low; k <= high; k++)
      if (memory_[rank][k] > p_.limit[rank]) {
        undo();
        return false;
      }
    return true;
  }
  if (random.percent(5)) return fill(random);
  const bool critical = random.percent(50);
  int rank, k;
  if (critical) {
    if (critical_.empty()) critical_path();
    std::tie(rank, k) = critical_[random.below(static_cast<int>(critical_.size()))];
  } else {
    rank = random.below(p_.ranks);
    k = random.below(static_cast<int>(rows_[rank].size()));
  }
  int distance = 1;
  while (distance < 8 && random.percent(60)) distance++;
  const int pass = rows_[rank][k], kind = kind_of(pass);
  bool later;  // on the critical path, W makes room by moving later, and the others are better earlier
  if (critical) later = random.percent(kind == kWeight ? 70 : 15);
  else later = random.percent(50);
  // Alone, or as a group: the same pass of this unit in the neighbouring chunks, or of the next units
  // here.
  int count = 1, chunk_step = 0, unit_step = 0;
  if (random.percent(20)) {
    count = 2;
    while (count < m_ && random.percent(80)) count++;
    const int direction = random.below(3);
    if (direction == 0) chunk_step = 1;
    else if (direction == 1) chunk_step = -1;
    else unit_step = later ? -1 : 1;
  }
  int c = chunk_of(pass), j = pass % m_;
  for (int i = 0; i < count && c >= 0 && c < n_ && j >= 0 && j < m_; i++, c += chunk_step, j += unit_step) {
    const int owner = p_.placement[c], at = timed_[id(kind, c, j)].position,
              last = static_cast<int>(rows_[owner].size()) - 1;
    const int to = reach(owner, at, later ? std::min(at + distance, last) : std::max(at - distance, 0));
    if (to == at) continue;
    from_ = std::min(from_, starts_[owner][std::min(at, to)]);
    shift(owner, at, to);
    done_.push_back({owner, at, to});
  }
  return !done_.empty();
}

void Annealer::undo() {
  for (int rank = 0; rank < p_.ranks; rank++)
    for (int k = first_[rank]; k < reached_[rank]; k++) timed_[rows_[rank][k]].trial_end = timed_[rows_[rank][k]].end;
  if (toggled_ >= 0) toggle(toggled_ / m_, toggled_ % m_);
  for (auto each = done_.rbegin(); each != done_.rend(); ++each) shift(each->rank, each->to, each->from);
}

// The move that another one has proposed for the same orders.
void Annealer::follow(const Annealer& other) {
  done_ = other.done_, toggled_ = other.toggled_, from_ = kForever;
  if (toggled_ >= 0) {
    const int c = toggled_ / m_, j = toggled_ % m_;
    from_ = starts_[p_.placement[c]][timed_[id(kBackward, c, j)].position];
    toggle(c, j);
  }
  for (const Shift& each : done_) {
    from_ = std::min(from_, starts_[each.rank][std::min(each.from, each.to)]);
    shift(each.rank, each.from, each.to);
  }
}

}  // namespace

// A move is kept where each of the problems keeps it by itself, so that most are dropped by the first; the distribution
// is that of the sum of all energies, in which the first problem has as much weight as all others.
Ordering anneal(const std::vector<Problem>& problems, const Ordering& start, const Effort& effort, bool may_fuse) {
  Random random(effort.seed);
  std::vector<Annealer> all;
  for (const Problem& each : problems) all.emplace_back(each, start, effort.spread);
  const int count = static_cast<int>(all.size()), others = count - 1;
  const auto cost = [&] {
    Time sum = 0;
    for (int which = 1; which < count; which++) sum += all[which].largest();
    return others ? (all[0].largest() + sum / others) / 2 : all[0].largest();
  };
  Ordering best = all[0].orders(cost());
  const auto steps = static_cast<std::int64_t>(effort.temperatures.size());
  std::int64_t moves = 0;
  const auto work = [&] {
    std::int64_t sum = moves * kWorkOfAMove;
    for (const Annealer& each : all) sum += each.work();
    return sum;
  };
  for (std::int64_t step = 0; step < steps; step++)
    while (work() < effort.work / steps * (step + 1)) {
      const Time temperature = problems[0].ranks * effort.temperatures[step];
      if (best.cost <= effort.target) return best;
      moves++;
      const int first = random.below(count);
      if (!all[first].propose(random, may_fuse)) continue;
      bool kept = true;
      int ran = 0;
      for (; ran < count && kept; ran++) {
        const int which = (first + ran) % count;
        if (ran) all[which].follow(all[first]);
        kept = all[which].run((temperature >> 16) * random.exponential() * (which ? others : 1));
      }
      if (!kept) {
        while (ran--) all[(first + ran) % count].undo();
        continue;
      }
      for (Annealer& each : all) each.commit();
      if (cost() >= best.cost) continue;
      Ordering found = all[0].orders(cost());
      if (problems[0].forward_message.empty() || fits(problems[0], found)) best = std::move(found);
    }
  return best;
}

}  // namespace zbkern
