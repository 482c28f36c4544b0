// A launch takes the tensors' addresses as kernel parameters, so nothing is uploaded; lists longer than kMaxTensors take
// several launches. Block b works on one chunk of 16384 elements: a search in the running totals of chunks tells of
// which tensor. All kernels here are bound by memory: a thread moves 4 elements at a time where addresses permit.
#include "cuda_optimizer.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

namespace zbkern {

namespace {

constexpr int kMaxTensors = 256;
constexpr int kThreads = 256;
constexpr int kVector = 4;
constexpr std::int64_t kChunk = 16384;

template <class Item>
struct Batch {
  Item items[kMaxTensors];
  int first_chunk[kMaxTensors];  // running total of the chunks of the items before
  int count;
};

__device__ float to_float(float value) { return value; }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ float to_float(__half value) { return __half2float(value); }
template <class T> __device__ T from_float(float value);
template <> __device__ float from_float<float>(float value) { return value; }
template <> __device__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }
template <> __device__ __half from_float<__half>(float value) { return __float2half_rn(value); }

// Four neighbours at a time where they are all there and aligned, else one by one.
template <class T>
struct alignas(sizeof(T) * kVector) Four { T values[kVector]; };

template <class T>
__device__ bool whole(const T* data, int left) {
  return left >= kVector && reinterpret_cast<std::uintptr_t>(data) % (sizeof(T) * kVector) == 0;
}

template <class T>
__device__ void load(const T* data, int left, float (&values)[kVector]) {
  if (whole(data, left)) {
    const auto four = *reinterpret_cast<const Four<T>*>(data);
    for (int i = 0; i < kVector; ++i) values[i] = to_float(four.values[i]);
  } else {
    for (int i = 0; i < kVector; ++i) values[i] = i < left ? to_float(data[i]) : 0.0f;
  }
}

template <class T>
__device__ void store(T* data, int left, const float (&values)[kVector]) {
  if (whole(data, left)) {
    if constexpr (sizeof(T) == 4) {  // an assignment becomes four narrow stores; nor is it read again soon
      __stcs(reinterpret_cast<float4*>(data), make_float4(values[0], values[1], values[2], values[3]));
    } else {
      Four<T> four;
      for (int i = 0; i < kVector; ++i) four.values[i] = from_float<T>(values[i]);
      *reinterpret_cast<Four<T>*>(data) = four;
    }
  } else {
    for (int i = 0; i < min(left, kVector); ++i) data[i] = from_float<T>(values[i]);
  }
}

template <class Item>
__device__ int item_of_block(const Batch<Item>& batch) {
  int low = 0, high = batch.count - 1;  // the last item whose first chunk is not after this block
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (batch.first_chunk[middle] <= static_cast<int>(blockIdx.x)) low = middle; else high = middle - 1;
  }
  return low;
}

// Elements [begin, end) of the block's item, then its threads' steps through them.
template <class Item, class Body>
__device__ void for_chunk(const Batch<Item>& batch, std::int64_t count, int item, Body body) {
  const std::int64_t begin = (static_cast<std::int64_t>(blockIdx.x) - batch.first_chunk[item]) * kChunk;
  const std::int64_t end = min(count, begin + kChunk);
  for (std::int64_t i = begin + threadIdx.x * kVector; i < end; i += kThreads * kVector) {
    body(i, static_cast<int>(min(end - i, std::int64_t{kVector})));
  }
}

template <class Param, class Grad, bool Undo>
__global__ __launch_bounds__(kThreads) void adam_kernel(const __grid_constant__ Batch<AdamTensor> batch,
                                                        const __grid_constant__ AdamNumbers numbers,
                                                        const float* control) {
  if (adam_skips(control)) return;
  const int index = item_of_block(batch);
  const AdamTensor& item = batch.items[index];
  __shared__ AdamRates shared_rates;
  if (threadIdx.x == 0) shared_rates = adam_rates(numbers, *item.step, control);
  __syncthreads();
  const AdamRates rates = shared_rates;
  auto* param = static_cast<Param*>(item.param);
  const auto* grad = static_cast<const Grad*>(item.grad);
  for_chunk(batch, item.count, index, [&](std::int64_t at, int left) {
    float w[kVector], g[kVector], m[kVector], v[kVector];
    item.master != nullptr ? load(item.master + at, left, w) : load(param + at, left, w);
    load(grad + at, left, g), load(item.exp_avg + at, left, m), load(item.exp_avg_sq + at, left, v);
    for (int i = 0; i < kVector; ++i) adam_element<Undo>(rates, g[i], w[i], m[i], v[i]);
    store(item.exp_avg + at, left, m), store(item.exp_avg_sq + at, left, v), store(param + at, left, w);
    if (item.master != nullptr) store(item.master + at, left, w);
  });
}

// Counts the step of every tensor, before it is taken or after it is taken back: all blocks of a tensor read the count.
__global__ __launch_bounds__(kMaxTensors) void count_kernel(const __grid_constant__ Batch<AdamTensor> batch,
                                                            const float* control, float by) {
  if (adam_skips(control) || static_cast<int>(threadIdx.x) >= batch.count) return;
  *batch.items[threadIdx.x].step += by;
}

// partial[b]: sum of squares of chunk b; partial[blocks + b]: 1 if one of its elements is not finite.
template <class T>
__global__ __launch_bounds__(kThreads) void square_kernel(const __grid_constant__ Batch<Span> batch, float* partial,
                                                          int first_block, int blocks) {
  const int index = item_of_block(batch);
  const Span& item = batch.items[index];
  const auto* data = static_cast<const T*>(item.data);
  float sum = 0.0f;
  int bad = 0;
  for_chunk(batch, item.count, index, [&](std::int64_t at, int left) {
    float values[kVector];
    load(data + at, left, values);
    for (int i = 0; i < kVector; ++i) {
      sum += values[i] * values[i];
      bad |= !isfinite(values[i]);
    }
  });
  __shared__ float sums[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
  bad = __syncthreads_or(bad);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kThreads / 32; ++warp) sum += sums[warp];
    partial[first_block + blockIdx.x] = sum;
    partial[blocks + first_block + blockIdx.x] = bad ? 1.0f : 0.0f;
  }
}

// One block adds the partial sums, each thread its own in order, then the threads' in order: the same on every run.
__global__ __launch_bounds__(kThreads) void finish_norm_kernel(const float* partial, int blocks, bool accumulate,
                                                               float* result) {
  double sum = 0.0;
  int bad = 0;
  for (int i = threadIdx.x; i < blocks; i += kThreads) {
    sum += partial[i];
    bad |= partial[blocks + i] != 0.0f;
  }
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = sum;
  bad = __syncthreads_or(bad);
  if (threadIdx.x == 0) {
    for (int thread = 1; thread < kThreads; ++thread) sum += sums[thread];
    result[0] = static_cast<float>(sum + (accumulate ? result[0] : 0.0f));
    result[1] = bad || (accumulate && result[1] != 0.0f) ? 1.0f : 0.0f;
  }
}

template <class Item>
int chunks_of(const Item& item) {
  return static_cast<int>((item.count + kChunk - 1) / kChunk);
}

// Hands the items to `launch(batch, blocks)`, kMaxTensors at a time; blocks is 0 where none of them has an element.
template <class Item, class Launch>
void in_batches(const std::vector<Item>& items, Launch launch) {
  Batch<Item> batch;
  batch.count = 0;
  int blocks = 0;
  const auto flush = [&] {
    if (batch.count > 0) launch(batch, blocks);
    batch.count = blocks = 0;
  };
  for (const Item& item : items) {
    if (batch.count == kMaxTensors) flush();
    batch.items[batch.count] = item;
    batch.first_chunk[batch.count++] = blocks;
    blocks += chunks_of(item);
  }
  flush();
  check(cudaGetLastError(), "optimizer: launch");
}

template <class Param, class Grad>
void adam_of(const Adam& task) {
  in_batches(task.tensors, [&](const Batch<AdamTensor>& batch, int blocks) {
    const auto count = [&](float by) { count_kernel<<<1, kMaxTensors, 0, task.stream>>>(batch, task.control, by); };
    const auto kernel = task.undo ? adam_kernel<Param, Grad, true> : adam_kernel<Param, Grad, false>;
    if (!task.undo) count(1.0f);
    if (blocks > 0) kernel<<<blocks, kThreads, 0, task.stream>>>(batch, task.numbers, task.control);
    if (task.undo) count(-1.0f);
  });
}

template <class Param>
void adam_of_param(const Adam& task) {
  switch (task.grad) {
    case Kind::float32: return adam_of<Param, float>(task);
    case Kind::bfloat16: return adam_of<Param, __nv_bfloat16>(task);
    case Kind::float16: return adam_of<Param, __half>(task);
  }
}

}  // namespace

void adam(const Adam& task) {
  switch (task.param) {
    case Kind::float32: return adam_of_param<float>(task);
    case Kind::bfloat16: return adam_of_param<__nv_bfloat16>(task);
    case Kind::float16: return adam_of_param<__half>(task);
  }
}

int squared_norm_blocks(const std::vector<Span>& spans) {
  int blocks = 0;
  for (const Span& span : spans) blocks += chunks_of(span);
  return blocks;
}

void squared_norm(const std::vector<Span>& spans, Kind kind, bool accumulate, float* result, float* workspace,
                  cudaStream_t stream) {
  const int total = squared_norm_blocks(spans);
  int first = 0;
  in_batches(spans, [&](const Batch<Span>& batch, int blocks) {
    if (blocks == 0) return;
    switch (kind) {
      case Kind::float32:
        square_kernel<float><<<blocks, kThreads, 0, stream>>>(batch, workspace, first, total);
        break;
      case Kind::bfloat16:
        square_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(batch, workspace, first, total);
        break;
      case Kind::float16:
        square_kernel<__half><<<blocks, kThreads, 0, stream>>>(batch, workspace, first, total);
        break;
    }
    first += blocks;
  });
  finish_norm_kernel<<<1, kThreads, 0, stream>>>(workspace, total, accumulate, result);
  check(cudaGetLastError(), "squared norm: launch");
}

}  // namespace zbkern
