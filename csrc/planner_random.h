// Random numbers of the planner's searches, the same on every machine.
#pragma once

#include <cstdint>

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

}  // namespace zbkern
