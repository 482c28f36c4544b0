// Random numbers of the planner's searches, the same on every machine, and simulated annealing by them.
#pragma once

#include <cstdint>
#include <utility>

#include "planner.h"

namespace zbkern {

class Random {  // SplitMix64
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  int below(int count) { return static_cast<int>(((next() >> 32) * static_cast<std::uint64_t>(count)) >> 32); }
  bool percent(int chance) { return below(100) < chance; }
  // About exponential with mean 1/ln 2, in 65536ths: minus the logarithm of a uniform number, linear between powers.
  Time exponential() {
    const std::uint64_t bits = next() | 1;
    int zeros = 0;
    while (!(bits >> (63 - zeros) & 1)) zeros++;
    const std::uint64_t fraction = zeros < 47 ? (bits >> (47 - zeros)) & 0xFFFF : 0;
    return (static_cast<Time>(zeros) << 16) + 65536 - static_cast<Time>(fraction);
  }

 private:
  std::uint64_t state_;
};

// Simulated annealing from a state of some energy. change(state, random): whether it made another one; run(state,
// threshold): its energy, or more than the threshold; accept(state): whether to stop, for the first and for every one
// that is taken.
template <typename State, typename Change, typename Run, typename Accept>
void improve(State now, Time energy, const Effort& effort, Change change, Run run, Accept accept) {
  Random random(effort.seed);
  bool done = accept(now);
  for (Time temperature : effort.temperatures)
    for (std::int64_t move = 0; move < effort.work && !done; move++) {
      State trial = now;
      if (!change(trial, random) || trial == now) continue;
      const Time threshold = energy + (temperature >> 16) * random.exponential(), found = run(trial, threshold);
      if (found > threshold) continue;
      std::swap(now, trial), energy = found;
      done = accept(now);
    }
}

}  // namespace zbkern
