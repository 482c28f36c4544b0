// A product of an FP8 linear: out [P, Q] (+)= A B^T + bias, A [P, R] and B [Q, R] in float8_e4m3fn, a float32 scale for
// each block of them. Device memory is passed by address: no torch here, and no CUTLASS.
#pragma once

#include "cuda_launch.h"

namespace zbkern {

struct Operand {
  const void* values;    // rows of R, `stride` bytes apart
  const void* scales;    // [R / 128, rows], of 1 x 128 each; or [R / 128, rows / 128], of 128 x 128
  std::int64_t stride;
};

struct Fp8Product {
  Operand a, b;
  const void* bias;      // [Q] of out's type, or null
  void* out;             // rows out_stride elements apart
  std::int64_t p, q, r;
  std::int64_t out_stride;
  Kind kind;             // of out
  bool rows;             // B, too, has a scale for each 1 x 128: W, which has no bias. Else F or B, which do not add
  bool add;
  int places;            // blocks that run at a time
  int device;
  cudaStream_t stream;
};

// Throws std::invalid_argument where there is no kernel; what TMA cannot address the driver refuses. Needs no GPU.
void validate(const Fp8Product& task);

// Runs a valid one.
void fp8_product(const Fp8Product& task);

}  // namespace zbkern
