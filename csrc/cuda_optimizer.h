// Many tensors in one launch: AdamW and its inverse, the squared norm of gradients, copies. Nothing here waits for the
// GPU or allocates, and all of it can be captured in a graph: what changes from step to step is read on the device.
#pragma once

#include <cmath>

#include "cuda_common.h"

namespace zbkern {

struct AdamTensor {
  void* param;           // of the kind `param`
  const void* grad;      // of the kind `grad`
  float* exp_avg;        // m
  float* exp_avg_sq;     // v
  float* master;         // the weight in fp32, of which param is a rounded copy; or null: param is the weight
  std::int64_t count;
};

struct AdamNumbers {
  double beta1, beta2, eps, weight_decay;
};

struct Adam {
  std::vector<AdamTensor> tensors;
  Kind param;
  Kind grad;
  const float* control;  // on the device: learning rate, number of this step (1, 2, ..), factor of the gradient, skip
  AdamNumbers numbers;
  bool undo;             // take the step back instead
  cudaStream_t stream;
};

// One AdamW step (Loshchilov and Hutter, arXiv 1711.05101), as torch.optim.AdamW takes it:
//   g' = factor g    m = beta1 m + (1-beta1) g'    v = beta2 v + (1-beta2) g'^2
//   w = (1 - lr wd) w - lr (m / (1-beta1^t)) / (sqrt(v / (1-beta2^t)) + eps)
// A nonzero skip leaves everything as it is. The inverse needs the gradient of the step and is exact up to rounding;
// for an exact return copy the tensors before the step (copy_all).
void adam(const Adam& task);

// What a step computes for every element, from double once a block.
struct AdamRates {
  float rate, scale_v, decay, factor, beta1, beta2, rest1, rest2, eps;
};

ZBKERN_HOST_DEVICE inline AdamRates adam_rates(const AdamNumbers& numbers, const float* control) {
  const double lr = control[0], step = control[1];
  return {static_cast<float>(lr / (1.0 - pow(numbers.beta1, step))),
          static_cast<float>(1.0 / sqrt(1.0 - pow(numbers.beta2, step))),
          static_cast<float>(1.0 - lr * numbers.weight_decay),
          control[2],
          static_cast<float>(numbers.beta1),
          static_cast<float>(numbers.beta2),
          static_cast<float>(1.0 - numbers.beta1),
          static_cast<float>(1.0 - numbers.beta2),
          static_cast<float>(numbers.eps)};
}

template <bool Undo>
ZBKERN_HOST_DEVICE inline void adam_element(const AdamRates& r, float gradient, float& w, float& m, float& v) {
  const float g = gradient * r.factor;
  if (!Undo) {
    m = r.beta1 * m + r.rest1 * g;
    v = r.beta2 * v + r.rest2 * g * g;
  }
  const float change = r.rate * m / (sqrtf(v) * r.scale_v + r.eps);
  if (!Undo) {
    w = r.decay * w - change;
  } else {
    w = (w + change) / r.decay;
    m = (m - r.rest1 * g) / r.beta1;
    v = fmaxf(0.0f, (v - r.rest2 * g * g) / r.beta2);
  }
}

struct Span {
  const void* data;
  std::int64_t count;
};

// result[0] (+)= sum of squares over all spans; result[1] = 1 where an element is not finite, kept or 0 elsewhere
// (accumulate: kept). The sum has a fixed order. workspace: two floats a block, squared_norm_blocks of them.
int squared_norm_blocks(const std::vector<Span>& spans);
void squared_norm(const std::vector<Span>& spans, Kind kind, bool accumulate, float* result, float* workspace,
                  cudaStream_t stream);

struct Copy {
  void* target;
  const void* source;
  std::int64_t bytes;
};

void copy_all(const std::vector<Copy>& copies, cudaStream_t stream);

}  // namespace zbkern
