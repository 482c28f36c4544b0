// Many tensors in one launch: AdamW and its inverse, the squared norm of gradients. Nothing here waits for the GPU or
// allocates, and all of it can be captured in a graph: what changes from step to step is read on the device.
#pragma once

#include <cmath>

#include "cuda_common.h"

namespace zbkern {

struct AdamTensor {
  void* param;           // of the kind `param`
  const void* grad;      // of the kind `grad`
  float* exp_avg;        // m
  float* exp_avg_sq;     // v
  float* step;           // how many steps were taken; counted here
  float* master;         // the weight in fp32, of which param is a rounded copy; or null: param is the weight
  std::int64_t count;
};

struct AdamNumbers {
  double beta1, beta2, eps, weight_decay;
  double lr;
  const float* lr_at;  // on the device, or null: lr
  double max_norm;     // infinite for none
  bool maximize;
};

struct Adam {
  const std::vector<AdamTensor>& tensors;
  Kind param;
  Kind grad;
  const float* control;  // on the device, or null: sum of squares of all gradients, nonzero to skip, their loss scale
  AdamNumbers numbers;
  bool undo;             // take the step back instead
  cudaStream_t stream;
};

// One AdamW step (Loshchilov and Hutter, arXiv 1711.05101), as torch.optim.AdamW takes it:
//   g' = factor g    m = beta1 m + (1-beta1) g'    v = beta2 v + (1-beta2) g'^2
//   w = (1 - lr wd) w - lr (m / (1-beta1^t)) / (sqrt(v / (1-beta2^t)) + eps)
// factor clips to max_norm as torch.nn.utils.clip_grad_norm_ does, and takes the loss scale out. Gradients that are not
// finite leave everything as it is. The inverse needs the gradients of the step and is exact up to rounding.
void adam(const Adam& task);

ZBKERN_HOST_DEVICE inline bool adam_skips(const float* control) {
  return control != nullptr && (control[1] != 0.0f || !(control[0] < INFINITY));  // nor is NaN below it
}

ZBKERN_HOST_DEVICE inline double adam_factor(const AdamNumbers& numbers, const float* control) {
  const double sign = numbers.maximize ? -1.0 : 1.0;
  if (control == nullptr) return sign;
  const double clip = numbers.max_norm / (sqrt(static_cast<double>(control[0])) / control[2] + 1e-6);
  return sign * (clip < 1.0 ? clip : 1.0) / control[2];
}

// What a step computes for every element, from double once a block.
struct AdamRates {
  float rate, scale_v, decay, factor, beta1, beta2, rest1, rest2, eps;
};

ZBKERN_HOST_DEVICE inline AdamRates adam_rates(const AdamNumbers& numbers, double step, const float* control) {
  const double lr = numbers.lr_at != nullptr ? *numbers.lr_at : numbers.lr;
  return {static_cast<float>(lr / (1.0 - pow(numbers.beta1, step))),
          static_cast<float>(1.0 / sqrt(1.0 - pow(numbers.beta2, step))),
          static_cast<float>(1.0 - lr * numbers.weight_decay),
          static_cast<float>(adam_factor(numbers, control)),
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

}  // namespace zbkern
