// A plan for one batch of sequences of any lengths: how they become units, and in which order each rank runs them.
#pragma once

#include <vector>

#include "planner.h"

namespace zbkern {

// What a pass takes, or holds: `fixed` of every unit, `linear` by its tokens, `quadratic` by its pairs of tokens, b^2 -
// a^2 of a slice from token a to b. One entry for every chunk.
struct Growth {
  std::vector<double> fixed, linear, quadratic;
  double of(int chunk, double tokens, double pairs) const {
    return fixed[chunk] + linear[chunk] * tokens + quadratic[chunk] * pairs;
  }
};

// Times are in units in which they may be rounded to whole numbers, and so is memory.
struct BatchCosts {
  std::vector<int> placement;                   // [chunks] rank of each
  Growth forward, backward, weight, fused;      // times
  Growth lag;                                   // of a message from a chunk to the next
  Growth activation, held;                      // memory
  Growth carried, carried_gradients;            // by the tokens of a whole sequence: apart where it is cut
  std::vector<Time> limit;                      // [ranks] beside what each holds all the time; empty for none
  int multiple = 128;                           // slices are multiples of so many tokens
  bool packs = true;                            // whether several sequences may be one unit
};

// A slice of a sequence, or whole sequences in one row.
struct BatchUnit {
  int row = 0, slice = 0, slices = 1;
  int tokens = 0, row_tokens = 0;
  double pairs = 0;
};

// Which sequences are in each row, and where it is cut: lengths of its slices, one for a pack.
struct BatchRows {
  std::vector<std::vector<int>> members, cuts;
};

struct BatchEvent {
  int kind, chunk, unit;  // kind: F, B, W, and 3 for BW
  Time start, end;
};

struct BatchOrder {
  BatchRows rows;
  std::vector<BatchUnit> units;
  std::vector<std::vector<BatchEvent>> events;  // [ranks]
  Time makespan = kForever;
  std::vector<Time> peaks;  // [ranks]
  Time least_excess = kForever;  // over the limits, where no order keeps them
};

// The best order found by construction and then by `passes` passes of random changes; the same on every machine.
BatchOrder plan_batch(const BatchCosts& costs, const std::vector<int>& lengths, std::int64_t passes);

// The sequences in `count` packs of equal work, longest first.
BatchRows packed(const BatchCosts& costs, const std::vector<int>& lengths, int count);

// When given rows of passes run, {kind, chunk, unit} in a row for every rank; a makespan of kForever where they cannot.
BatchOrder run_batch(const BatchCosts& costs, const BatchRows& rows, const std::vector<int>& lengths,
                     const std::vector<std::vector<int>>& orders);

}  // namespace zbkern
