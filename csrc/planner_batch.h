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
  std::vector<int> placement;               // [chunks] rank of each
  Growth forward, backward, weight, fused;  // times
  Growth communication;                     // of a message from a chunk to the next
  Growth activation, held;                  // memory
  Growth carried, carried_gradients;        // by the tokens of a whole sequence: apart where it is cut
  Growth network[2];                        // of F and of B, what others can hide; empty for none
  std::vector<Time> collectives;            // [chunks] in which it is in flight
  std::vector<double> masked[2];            // [chunks] of F and of B of a pack: of a pair of tokens of two sequences
  bool apart = false;                       // no two F, or B, of one chunk run beside each other
  std::vector<double> merge_saving;         // [chunks]
  std::vector<Time> limit;                  // [ranks] beside what each holds all the time
  int multiple = 128;                       // slices are multiples of so many tokens
  bool packs = true;                        // whether several sequences may be one unit
};

// Which sequences are in each microbatch, and where it is cut: lengths of its slices, one for a pack.
struct BatchRows {
  std::vector<std::vector<int>> members, cuts;
};

// Slices and packs of which `count` would have all work: long sequences are cut, short ones are put together.
BatchRows units_of(const BatchCosts& costs, const std::vector<int>& lengths, int count);

// The sequences in `count` packs of equal work, longest first.
BatchRows packed(const BatchCosts& costs, const std::vector<int>& lengths, int count);

// What the passes of these microbatches take, one after the other.
Problem problem_of(const BatchCosts& costs, const BatchRows& rows, const std::vector<int>& lengths);

struct BatchOrder {
  BatchRows rows;
  Ordering orders;          // empty rows where none fits
  Problem problem;          // that they are of
  int published = -1;       // which of those given is the best that fits
  Time published_cost = 0;
  Time excess = kForever;   // over the limits, where nothing fits
};

// The best order found by construction and then by `passes` passes of random changes; the same on every machine.
// published: orders of packs, which it is no worse than.
BatchOrder plan_batch(const BatchCosts& costs, const std::vector<int>& lengths, std::int64_t passes,
                      const std::vector<Ordering>& published);

}  // namespace zbkern
