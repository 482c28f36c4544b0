// The planner's search core: plain C++17 over flat arrays; no torch and no Python in here.
//
// zbkern/planning/planner/{list_scheduler,pattern_search,annealing,partition}.py say what each search does; the tests
// compare its results with the simulator, the lower bounds and, on tiny problems, every possible order. Times and memory
// are integers, so that no result depends on the order of additions or on the compiler.
#pragma once

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace zbkern {

using Time = std::int64_t;  // also memory: both are scaled to integers by the caller
constexpr Time kForever = INT64_MAX / 4;

enum Kind { kForward = 0, kBackward = 1, kWeight = 2 };

// A pass is one number: (kind * chunks + chunk) * units + k, for the k-th F, B or W of the chunk.
using Row = std::vector<int>;
using Rows = std::vector<Row>;

// A unit is a microbatch, or a slice of one. Slices go back in the opposite order, so that the k-th B of a chunk runs
// after all F of its microbatch; otherwise the passes of a chunk are in order, as without slices. Units of a batch cost
// and are what their sequences are: a batch is a problem for each order of its rows.
struct Problem {
  int ranks = 0, chunks = 0, units = 0;
  int slices = 1;                                        // of a microbatch, at most
  std::vector<int> placement;                            // [chunks] rank of each
  std::vector<int> ends;  // [k] how many F of a chunk run before its k-th B: all of its microbatch, and those before
  std::vector<Time> forward, backward, weight, fused;    // [chunk * units + k] durations
  std::vector<Time> forward_lag, backward_lag;           // [the same] of the message that an F, or a B, waits for
  std::vector<Time> activation, freed, held;             // [the same] memory: taken by F, freed by B, held from B to W
  std::vector<Time> merge_saving;                        // [the same]
  std::vector<Time> network[2];                          // [the same] of F and B: what others can hide; empty for none
  std::vector<Time> collectives;                         // [the same] in which it is in flight; turns of W
  bool apart = false;                                    // no two F, or B, of one chunk run beside each other
  std::vector<Time> forward_message, backward_message;   // [as lags] memory of that message; empty for none
  std::vector<Time> limit;                               // [ranks]
  std::vector<Time> room;                                // [ranks] for messages that wait, beside the limit
  bool makespan = false;                                 // minimise makespan instead of cost
  int passes() const { return 3 * chunks * units; }
  // Whether unit k is the first of its microbatch.
  bool begins(int k) const { return !k || ends[k - 1] == k; }
};

// How long and how hot a search runs; see `Effort` in native.py.
struct Effort {
  std::uint64_t seed = 0;
  std::vector<Time> temperatures;  // one after the other
  std::int64_t work = 0;           // passes to run again over all temperatures, or moves, or tries at each
  Time spread = 0;                 // weight of the mean span beside the largest
  Time target = 0;                 // stop at this cost
};

// How the ranks decide in the list scheduler; see `Rule` in list_scheduler.py.
struct Rule {
  std::vector<int> priority, patience, late_forward, late_backward;  // [ranks]
  std::vector<int> caps, fuse;  // [chunks] how many forwards each may be ahead of its backwards; whether these are BW
  bool follow, reserve;
  int most = 1, waits = 0;  // of passes beside each other
  bool alike = false;
  auto parts() const {
    return std::tie(priority, patience, late_forward, late_backward, caps, fuse, follow, reserve, most, waits, alike);
  }
  bool operator==(const Rule& other) const { return parts() == other.parts(); }
};

// An order of every rank, and which units have a fused backward: fused[chunk * units + k].
// The W of a fused backward stays in its row as a pass of no length, and is no action.
struct Ordering {
  Rows rows;
  std::vector<char> fused;
  Time cost = 0;
  std::vector<std::vector<std::pair<int, int>>> beside = {};  // [ranks] which actions run beside each other
};

// Costs and places of the best `kept` of many rules, of equal costs the first, the best first.
std::vector<std::pair<Time, int>> best_rules(const Problem& problem, const std::vector<Rule>& rules, int kept);

// The best orders that `start` and rules near it make, and their rule; empty rows when it makes none. may_follow: the
// rule may have `follow`, too.
std::pair<Ordering, Rule> refine(const Problem& problem, const Rule& start, bool may_follow, const Effort& effort);

// A pass of several beside each other; see simulation/turns.py.
struct Turn {
  Time compute, network;
  int collectives;
  Time begin = -1, end = 0;
};

// A pass of this kind, of chunk * units + k, that takes so long in turn.
Turn turn_of(const Problem& problem, int kind, int at, Time length);

// When each begins and ends, if the first begins at `start`.
void in_turns(std::vector<Turn>& passes, Time start);

struct Measured {
  Time cost = -1;           // stays so when the orders cannot run
  std::vector<Time> peaks, messages;  // [ranks] the most that passes hold, and messages beside the room for them
  std::vector<std::vector<std::pair<Time, Time>>> times;  // [ranks] when each action begins and ends
};

Measured measure(const Problem& problem, const Ordering& orders);

// Whether the orders can run within the limit of every rank, the messages that wait there included.
bool fits(const Problem& problem, const Ordering& orders);

// The rows with W that follow each other grouped by chunk; the W of a fused backward follows it.
Rows grouped(const Ordering& orders);

// The best orders in which all microbatches repeat one building block; empty rows when there are none. It stops only
// once it has found any.
Ordering search_blocks(const Problem& problem, bool fuse, const Effort& effort);

// Counts and patience of every rank: [7][ranks]; see pattern_search.py.
using Pattern = std::vector<std::vector<int>>;

// The best orders found that follow a pattern, from `start` on, two chunks per rank in a V, and theirs; empty rows when
// that cannot run.
std::pair<Ordering, Pattern> search_patterns(const Problem& problem, const Pattern& start, const Effort& effort);

// Several problems: the same one where passes take other times. The cost is then the mean of the first and of the
// others' mean. Throws std::invalid_argument when the orders to start from cannot run.
Ordering anneal(const std::vector<Problem>& problems, const Ordering& start, const Effort& effort, bool may_fuse);

// Layers on chunks; see partition.py. What a rank does, and what it holds, are kMeanOfRanks in the mean.
constexpr Time kMeanOfRanks = 1 << 30, kOneInFlight = 1 << 8;
struct PartitionProblem {
  std::vector<int> placement;           // [chunks] rank of each
  std::vector<Time> work, held, fixed;  // [layers] held: by a microbatch; fixed: all the time
  std::vector<int> tied;                // [layers] which weights they share, -1 for none
  std::vector<Time> in_flight;          // [chunks] microbatches that it holds, in units of kOneInFlight
  std::vector<Time> limit;              // [ranks], or empty
  double even;                          // what even chunks count
  std::vector<double> slowness;         // [ranks] the time that each takes for one of work
};

// The first layer of every chunk: the best partition found from `start` on; empty where there are limits, and that
// keeps them.
std::vector<int> anneal_partition(const PartitionProblem& problem, const std::vector<int>& start,
                                  const Effort& effort);

}  // namespace zbkern
