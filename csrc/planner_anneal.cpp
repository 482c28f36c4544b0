// Simulated annealing over the order of every rank; see planner/annealing.py. With a spread, moves that are kept change
// the times of most passes: all that starts after the first change runs again. Without, they change the times of few,
// which alone are computed again. Both stop as soon as a move is certain to be rejected.
#include <algorithm>
#include <functional>
#include <stdexcept>

#include "planner.h"
#include "planner_random.h"
#include "planner_ranks.h"

namespace zbkern {
namespace {

constexpr int kWorkOfAMove = 50;  // to choose and to undo it, however few passes it changes
constexpr int kWorkOfAChange = 6;  // to compute the times of one pass again

struct Shift {
  int rank, from, to;
};

// A pass and its times. One past all stands for what waits for nothing, and for what nobody waits for.
struct Timed {
  Time end = 0, before = 0;  // before: the move that is tried
  Time after = 0;            // the longest way from its end to the end of a rank, less when that rank began
  Time lag = 0;              // of the message that it waits for
  int input, consumer;       // the passes whose output it waits for, and that wait for its output
  int consumer_rank, rank, position = -1;  // its own, one past all for none
  std::int64_t trial = 0;  // the move that changed its end last
  bool queued = false;
};

class Annealer {
 public:
  // counts: messages that wait, too.
  Annealer(const Problem& problem, const Ordering& start, Time spread, bool counts)
      : p_(problem),
        n_(problem.chunks),
        m_(problem.units),
        fused_(start.fused),
        passes_(problem, start.fused),
        rows_(start.rows),
        spread_(spread),
        saves_(std::any_of(problem.merge_saving.begin(), problem.merge_saving.end(), [](Time each) { return each; })) {
    const int passes = p_.passes();
    before_.assign(passes, -1), timed_.assign(passes + 1, {0, 0, 0, 0, passes, passes, p_.ranks, p_.ranks});
    timed_[passes].end = timed_[passes].after = -kForever;
    for (int pass = 0; pass < passes; pass++) {
      group_.push_back(pass / m_);
      Timed& each = timed_[pass];
      each.rank = p_.placement[group_[pass] % n_];
      if (const int input = passes_.input[pass]; input >= 0) {
        each.input = input, timed_[input].consumer = pass, timed_[input].consumer_rank = each.rank;
        // Passes that wait for each other are told by times that grow.
        const int at = input % (n_ * m_);
        if (!(input < n_ * m_ ? p_.forward[at] : std::min(p_.backward[at], p_.fused[at])))
          passes_.lag[pass] = std::max<Time>(1, passes_.lag[pass]);
      }
      each.lag = passes_.lag[pass];
    }
    for (int c = 0; c < n_; c++)
      for (int j = 0; j < m_; j++) {
        if (p_.begins(j)) before_[id(kForward, c, p_.ends[j] - 1)] = id(kBackward, c, j);
        before_[id(kBackward, c, j)] = id(kWeight, c, j);
      }
    const int ranks = p_.ranks;
    memory_.resize(ranks), rest_.resize(ranks), span_.assign(ranks, 0), began_ = trial_span_ = span_;
    first_.assign(ranks + 1, 0), reached_ = first_, waits_for_.assign(ranks + 1, -1), clock_.assign(ranks, 0);
    on_path_.assign(passes, 0), peers_.resize(ranks);
    Ranks times(p_);
    if (!times.follow(rows_, passes_, std::vector<Time>(ranks, 0), kForever))
      throw std::invalid_argument("anneal: the orders to start from cannot run");
    for (int rank = 0; rank < ranks; rank++) {
      const std::size_t size = rows_[rank].size();
      memory_[rank].assign(size, 0), rest_[rank].assign(size + 1, 0), lengths_.emplace_back(size, 0);
      refresh(rank, 0, static_cast<int>(size) - 1);
      for (int pass : rows_[rank]) timed_[pass].end = times.end(pass), timed_[pass].after = -kForever;
      for (int pass : rows_[rank])
        if (!spread_) queue(pass, -timed_[pass].end);
    }
    measure_spans();
    commit();
    if (!counts || p_.forward_message.empty()) return;
    for (int pass = 0; pass < 2 * n_ * m_; pass++) {
      const int at = pass % (n_ * m_), peer = timed_[timed_[pass].input].rank;
      message_.push_back((pass < n_ * m_ ? p_.forward_message : p_.backward_message)[at]);
      auto& peers = peers_[timed_[pass].rank];
      const bool is_new = std::find(peers.begin(), peers.end(), peer) == peers.end();
      if (peer < ranks && peer != timed_[pass].rank && is_new) peers.push_back(peer);
    }
    for (int rank = 0; rank < ranks; rank++) most_needed_.push_back(std::max(p_.limit[rank], need(rank)));
  }

  bool propose(Random& random, bool may_fuse);
  void follow(const Annealer& other);
  bool run(Time more);
  void commit();
  void undo();
  Ordering orders(Time cost) const { return {rows_, fused_, cost}; }
  Time largest() const { return *std::max_element(span_.begin(), span_.end()); }
  std::int64_t work() const { return work_; }
  // Whether messages are counted, and none exceeds what there is for it.
  bool within() const { return most_needed_ == p_.limit; }

 private:
  struct Window {
    int rank, low, high;
  };

  int id(int kind, int c, int j) const { return (kind * n_ + c) * m_ + j; }
  int kind_of(int pass) const { return group_[pass] < n_ ? kForward : group_[pass] < 2 * n_ ? kBackward : kWeight; }
  int chunk_of(int pass) const { return group_[pass] - kind_of(pass) * n_; }
  Time start_of(int pass) const { return timed_[pass].end - lengths_[timed_[pass].rank][timed_[pass].position]; }

  void begin();
  void refresh(int rank, int low, int high);
  int reach(int rank, int from, int to) const;
  bool must_precede(int before, int after) const;
  void rotate(int rank, int from, int to);
  void shift(int rank, int from, int to);
  void fuse(int at);
  void toggle(int at);
  void change(int rank, int low, int high);
  void queue(int pass, Time when);
  int unqueue();
  bool update(int pass);
  bool update_all(Time more);
  bool run_all(Time more);
  void update_after(int pass, bool always);
  void update_ways(bool& touched);
  void measure_spans();
  Time need(int rank);
  bool has_room();
  int longest() const { return static_cast<int>(std::max_element(span_.begin(), span_.end()) - span_.begin()); }
  bool fill(Random& random);
  void critical_path();

  const Problem& p_;
  const int n_, m_;
  std::vector<char> fused_;
  Passes passes_;
  std::vector<int> before_;  // [pass] the first one of its chunk of the next kind that needs it, or -1
  std::vector<int> group_;   // [pass] kind * chunks + chunk: divisions would take half the time
  std::vector<Timed> timed_;                                // [pass]
  Rows rows_;
  std::vector<std::vector<Time>> memory_, rest_, lengths_;  // [rank][position]
  std::vector<Time> span_, trial_span_, began_, clock_;
  std::vector<int> first_, reached_, waits_for_, runnable_;  // [rank] of the passes that run again
  std::vector<std::pair<Time, int>> queue_;  // passes to compute again, a heap by when they ran
  std::vector<int> changed_;                 // passes whose end the move that is tried has changed
  std::int64_t work_ = 0, trial_ = 0;
  std::vector<int> critical_;
  std::vector<char> on_path_;  // [pass] whether it is in that
  std::vector<Shift> done_;
  std::vector<Window> windows_;  // what the move changes
  int toggled_ = -1;
  bool reordered_ = false;             // whether F or B change their order
  Time from_ = 0, settled_ = 0;        // when the first of what the move changes began, and the last one ended
  Time most_ = 0, energy_ = 0, trial_energy_ = 0;  // most_: of a span
  const Time spread_;
  const bool saves_;
  std::vector<std::vector<int>> peers_;  // [rank] that send to it
  std::vector<Time> message_, most_needed_, waiting_;
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

// Notes that a pass is to be computed again.
void Annealer::queue(int pass, Time when) {
  if (timed_[pass].rank == p_.ranks || timed_[pass].queued) return;
  timed_[pass].queued = true;
  queue_.emplace_back(when, pass);
  std::push_heap(queue_.begin(), queue_.end(), std::greater<>());
}

int Annealer::unqueue() {
  std::pop_heap(queue_.begin(), queue_.end(), std::greater<>());
  const int pass = queue_.back().second;
  queue_.pop_back();
  timed_[pass].queued = false;
  return pass;
}

// Computes when a pass ends. False where a span is certain to be too long.
bool Annealer::update(int pass) {
  Timed& each = timed_[pass];
  const Row& row = rows_[each.rank];
  const int k = each.position;
  const Time start = std::max(k ? timed_[row[k - 1]].end : 0, timed_[each.input].end + each.lag);
  const Time end = start + lengths_[each.rank][k];
  work_ += kWorkOfAChange;
  if (end == each.end) return true;
  if (each.trial != trial_) each.trial = trial_, each.before = each.end, changed_.push_back(pass);
  each.end = end;
  queue(each.consumer, timed_[each.consumer].end);
  if (k + 1 < static_cast<int>(row.size())) queue(row[k + 1], timed_[row[k + 1]].end);
  // Ways from passes that ended later than all that the move changes are as they were.
  const Time way = each.before > settled_ ? each.after : rest_[each.rank][k + 1] - began_[each.rank];
  return end + way <= most_;
}

// Computes the passes that the move changes, until it is certain that the energy grows too much. False then, or in a
// deadlock.
bool Annealer::update_all(Time more) {
  most_ = (energy_ + more) / p_.ranks;
  if (from_ < *std::max_element(began_.begin(), began_.end())) most_ = kForever;  // ranks may begin at other times
  trial_++;
  bool good = true;
  for (const Window& each : windows_) {
    const Row& row = rows_[each.rank];
    for (int k = each.low; k <= std::min(each.high + 1, static_cast<int>(row.size()) - 1) && good; k++)
      good = update(row[k]);
  }
  const std::int64_t most = work_ + 8 * kWorkOfAChange * static_cast<std::int64_t>(timed_.size());
  while (!queue_.empty() && good)
    good = update(unqueue()) && work_ < most;  // passes that wait for each other are computed without end
  for (const auto& each : queue_) timed_[each.second].queued = false;
  queue_.clear();
  if (!good) return false;
  measure_spans();
  return trial_energy_ - energy_ <= more;
}

// Runs every pass that a move can change, until it is certain that the energy grows too much: each span is at least
// what its rank has waited and worked so far and its work that is left. False then, or in a deadlock.
bool Annealer::run_all(Time more) {
  runnable_.clear();
  int remaining = 0;
  Time largest = 0, sum = 0;
  for (int rank = 0; rank < p_.ranks; rank++) {
    const Row& row = rows_[rank];
    const auto is_before = [&](int pass) { return timed_[pass].end <= from_; };
    first_[rank] = static_cast<int>(std::partition_point(row.begin(), row.end(), is_before) - row.begin());
  }
  for (const Window& each : windows_) first_[each.rank] = std::min(first_[each.rank], each.low);
  for (int rank = 0; rank < p_.ranks; rank++) {
    const Row& row = rows_[rank];
    const int k = reached_[rank] = first_[rank], size = static_cast<int>(row.size());
    clock_[rank] = k ? timed_[row[k - 1]].end : 0;
    waits_for_[rank] = -1;
    trial_span_[rank] = clock_[rank] + rest_[rank][k] - (k && !p_.makespan ? start_of(row[0]) : 0);
    largest = std::max(largest, trial_span_[rank]), sum += trial_span_[rank];
    remaining += size - k;
    if (k < size) runnable_.push_back(rank);
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
      const Time wait = std::max<Time>(input.end + pass.lag - now, 0), counted = k || makespan ? wait : 0;
      span += counted, sum += counted, largest = std::max(largest, span);
      if (ranks * largest + spread * sum > most) break;
      now += wait + lengths[k];
      pass.before = pass.end, pass.end = now;
      reached[rank] = k + 1;
      int& waited_for = waits_for[pass.consumer_rank];
      if (waited_for == row[k]) waited_for = -1, runnable_.push_back(pass.consumer_rank);
    }
    remaining -= k - begin, work_ += k - begin;
    if (ranks * largest + spread * sum > most) return false;
    clock_[rank] = now, trial_span_[rank] = span;
  }
  trial_energy_ = p_.ranks * largest + spread_ * sum;
  return remaining == 0 && trial_energy_ - energy_ <= more;
}

// False where the energy grows by more than this, in a deadlock, and where messages have no room.
bool Annealer::run(Time more) {
  if (!(spread_ ? run_all(more) : update_all(more))) return false;
  return !reordered_ || has_room();
}

void Annealer::measure_spans() {
  Time largest = 0, sum = 0;
  for (int rank = 0; rank < p_.ranks; rank++) {
    const Row& row = rows_[rank];
    trial_span_[rank] = row.empty() ? 0 : timed_[row.back()].end - (p_.makespan ? 0 : start_of(row[0]));
    largest = std::max(largest, trial_span_[rank]), sum += trial_span_[rank];
  }
  trial_energy_ = p_.ranks * largest + spread_ * sum;
}

// Computes the longest way from the end of a pass on. always: what comes before has other ways even where that is the
// same, since the length of the pass may have changed.
void Annealer::update_after(int pass, bool always) {
  Timed& each = timed_[pass];
  const Row& row = rows_[each.rank];
  const Timed& consumer = timed_[each.consumer];
  Time after = -began_[each.rank];
  if (const int k = each.position + 1; k < static_cast<int>(row.size()))
    after = lengths_[each.rank][k] + timed_[row[k]].after;
  if (consumer.rank < p_.ranks) {
    const Time length = lengths_[consumer.rank][consumer.position];
    after = std::max(after, consumer.lag + length + consumer.after);
  }
  work_ += kWorkOfAChange;
  if (after == each.after && !always) return;
  each.after = after;
  if (each.position) queue(row[each.position - 1], -timed_[row[each.position - 1]].end);
  queue(each.input, -timed_[each.input].end);
}

void Annealer::commit() {
  bool touched = spread_ || trial_energy_ != energy_;  // whether the critical path may be another one
  span_ = trial_span_, energy_ = trial_energy_;
  if (!spread_) update_ways(touched);
  if (!touched) return;
  for (int pass : critical_) on_path_[pass] = false;
  critical_.clear();
}

// Computes the longest ways again that the move has changed.
void Annealer::update_ways(bool& touched) {
  for (int pass : changed_) touched = touched || on_path_[pass];
  for (int rank = 0; rank < p_.ranks; rank++) {
    const Row& row = rows_[rank];
    if (row.empty() || p_.makespan || began_[rank] == start_of(row[0])) continue;
    began_[rank] = start_of(row[0]), queue(row.back(), -timed_[row.back()].end);
  }
  const bool lengths = toggled_ >= 0 || saves_;
  for (const Window& each : windows_) {
    const Row& row = rows_[each.rank];
    for (int k = std::min(each.high + 1, static_cast<int>(row.size()) - 1); k >= std::max(each.low - 1, 0); k--) {
      touched = touched || on_path_[row[k]];
      update_after(row[k], lengths);
    }
  }
  while (!queue_.empty()) update_after(unqueue(), false);
}

// What the passes of a rank hold at most, with the messages that others may have sent before it takes them, beside the
// room for those; see schedules/ahead.py. A sender has heard of its passes from the rank itself.
Time Annealer::need(int rank) {
  waiting_.assign(rows_[rank].size() + 1, 0);
  for (int peer : peers_[rank]) {
    int heard = 0;
    for (int pass : rows_[peer]) {
      if (pass >= static_cast<int>(message_.size())) continue;
      const Timed &each = timed_[pass], &input = timed_[each.input], &taker = timed_[each.consumer];
      if (input.rank == rank) heard = std::max(heard, input.position + 1);
      if (taker.rank != rank) continue;
      waiting_[heard] += message_[each.consumer], waiting_[taker.position + 1] -= message_[each.consumer];
    }
  }
  work_ += static_cast<std::int64_t>(waiting_.size() * (1 + peers_[rank].size()));
  Time now = 0, most = 0, peak = 0;
  for (Time change : waiting_) most = std::max(most, now += change);
  for (Time memory : memory_[rank]) peak = std::max(peak, memory);
  return peak + std::max<Time>(0, most - p_.room[rank]);
}

// Whether the ranks whose messages may wait longer have room for them.
bool Annealer::has_room() {
  if (most_needed_.empty()) return true;
  for (const Window& each : windows_) {
    if (need(each.rank) > most_needed_[each.rank]) return false;
    for (int peer : peers_[each.rank])
      if (need(peer) > most_needed_[peer]) return false;
  }
  return true;
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

void Annealer::rotate(int rank, int from, int to) {
  Row& row = rows_[rank];
  if (to < from) std::rotate(row.begin() + to, row.begin() + from, row.begin() + from + 1);
  else std::rotate(row.begin() + from, row.begin() + from + 1, row.begin() + to + 1);
  refresh(rank, std::min(from, to), std::max(from, to));
}

void Annealer::begin() {
  done_.clear(), windows_.clear(), changed_.clear();
  if (spread_) reached_ = first_;
  toggled_ = -1, reordered_ = false;
  from_ = kForever, settled_ = 0;
}

// Notes what a move is about to change.
void Annealer::change(int rank, int low, int high) {
  const Row& row = rows_[rank];
  windows_.push_back({rank, low, high});
  from_ = std::min(from_, start_of(row[low]));
  settled_ = std::max(settled_, timed_[row[std::min(high + saves_, static_cast<int>(row.size()) - 1)]].end);
}

void Annealer::shift(int rank, int from, int to) {
  const Row& row = rows_[rank];
  change(rank, std::min(from, to), std::max(from, to));
  if (kind_of(row[from]) != kWeight)
    for (int k = std::min(from, to); k <= std::max(from, to); k++)
      reordered_ = reordered_ || (k != from && kind_of(row[k]) != kWeight);
  rotate(rank, from, to);
  done_.push_back({rank, from, to});
}

// Makes one pass of a B and its W, or two.
void Annealer::fuse(int at) {
  const Timed &backward = timed_[n_ * m_ + at], &weight = timed_[2 * n_ * m_ + at];
  for (int k : {backward.position, weight.position}) change(backward.rank, k, k);
  toggle(at);
  toggled_ = at;
}

void Annealer::toggle(int at) {
  const Timed &backward = timed_[n_ * m_ + at], &weight = timed_[2 * n_ * m_ + at];
  fused_[at] = !fused_[at];
  passes_.fuse(p_, at, fused_[at]);
  refresh(backward.rank, backward.position, weight.position);
}

// The passes that decide when the rank with the largest span ends.
void Annealer::critical_path() {
  const Row* row = &rows_[longest()];
  for (int k = static_cast<int>(row->size()) - 1; k >= 0;) {
    const int pass = (*row)[k];
    critical_.push_back(pass), on_path_[pass] = true;
    if (k > 0 && timed_[(*row)[k - 1]].end == start_of(pass)) {
      k--;
      continue;
    }
    const Timed& input = timed_[timed_[pass].input];
    if (input.rank == p_.ranks) break;
    row = &rows_[input.rank], k = input.position;
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
  while (gap < size && (idle -= start_of(row[gap]) - timed_[row[gap - 1]].end) >= 0) gap++;
  if (gap + 1 >= size) return false;
  const int group = group_[row[gap + 1 + random.below(size - gap - 1)]];
  int k = gap;
  while (group_[row[k]] != group) k++;
  const Timed& pass = timed_[row[k]];
  if (k == gap || timed_[pass.input].end + pass.lag >= start_of(row[gap]) || reach(rank, k, gap) != gap) return false;
  shift(rank, k, gap);
  return true;
}

// Applies a random move; false when there was nothing to move.
bool Annealer::propose(Random& random, bool may_fuse) {
  begin();
  if (may_fuse && random.percent(10)) {
    const int c = random.below(n_), j = random.below(m_), rank = p_.placement[c];
    const int low = timed_[id(kBackward, c, j)].position, high = timed_[id(kWeight, c, j)].position;
    fuse(c * m_ + j);
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
    const Timed& chosen = timed_[critical_[random.below(static_cast<int>(critical_.size()))]];
    rank = chosen.rank, k = chosen.position;
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
    shift(owner, at, to);
  }
  return !done_.empty();
}

void Annealer::undo() {
  for (int pass : changed_) timed_[pass].end = timed_[pass].before;
  for (int rank = 0; rank < p_.ranks; rank++)
    for (int k = first_[rank]; k < reached_[rank]; k++) timed_[rows_[rank][k]].end = timed_[rows_[rank][k]].before;
  if (toggled_ >= 0) toggle(toggled_);
  for (auto each = done_.rbegin(); each != done_.rend(); ++each) rotate(each->rank, each->to, each->from);
}

// The move that another one has proposed for the same orders.
void Annealer::follow(const Annealer& other) {
  begin();
  if (other.toggled_ >= 0) fuse(other.toggled_);
  for (const Shift& each : other.done_) shift(each.rank, each.from, each.to);
}

}  // namespace

// A move is kept where each of the problems keeps it by itself, so that most are dropped by the first; the distribution
// is that of the sum of all energies, in which the first problem has as much weight as all others.
Ordering anneal(const std::vector<Problem>& problems, const Ordering& start, const Effort& effort, bool may_fuse) {
  Random random(effort.seed);
  std::vector<Annealer> all;
  for (const Problem& each : problems) all.emplace_back(each, start, effort.spread, all.empty());
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
      if (problems[0].forward_message.empty() || all[0].within() || fits(problems[0], found)) best = std::move(found);
    }
  return best;
}

}  // namespace zbkern
