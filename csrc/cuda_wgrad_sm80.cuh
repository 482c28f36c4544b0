// W on any GPU from Ampere on: cp.async and mma.sync, out of CUTLASS 2 threadblock parts.
//
//   dweight [N, K] (+)= sum over segments of dy_i^T x_i        dbias [N] (+)= sum over segments and rows of dy_i
//
// A block computes tiles of 128 x 128 of dweight, four warps of 64 x 64 each. It runs the multistage product over one
// segment after the other into the same accumulators, in the order of the list. The pipeline drains between segments,
// which costs the latency of three loads each. Bands of 16 tiles keep what the blocks of a wave read together in L2.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/epilogue/threadblock/default_epilogue_tensor_op.h>
#include <cutlass/gemm/kernel/default_gemm_with_k_reduction.h>
#include <cutlass/gemm/threadblock/default_mma.h>

#include "cuda_wgrad.h"

namespace zbkern::sm80 {

constexpr int kBand = 16;
constexpr int kStages = 4;

template <class Element_, class ElementOut_, bool WithBias>
struct Config {
  using Element = Element_;
  using ElementOut = ElementOut_;
  using Block = cutlass::gemm::GemmShape<128, 128, 32>;
  using Warp = cutlass::gemm::GemmShape<64, 64, 32>;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
  using LayoutA = cutlass::layout::ColumnMajor;  // dy^T
  using LayoutB = cutlass::layout::RowMajor;     // x
  static constexpr bool kBias = WithBias;

  template <bool Reduces, class Enable = void>
  struct Choose {
    using Mma = typename cutlass::gemm::threadblock::DefaultMma<
        Element, LayoutA, 8, Element, LayoutB, 8, float, cutlass::layout::RowMajor, cutlass::arch::OpClassTensorOp,
        cutlass::arch::Sm80, Block, Warp, Instruction, kStages, cutlass::arch::OpMultiplyAdd>::ThreadblockMma;
  };
  template <class Enable>
  struct Choose<true, Enable> {
    using Mma = typename cutlass::gemm::threadblock::DefaultMmaWithReduction<
        Element, LayoutA, 8, Element, LayoutB, 8, float, cutlass::layout::RowMajor, cutlass::arch::OpClassTensorOp, true,
        cutlass::arch::Sm80, Block, Warp, Instruction, kStages, cutlass::arch::OpMultiplyAdd>::ThreadblockMma;
  };
  using Mma = typename Choose<WithBias>::Mma;

  static constexpr int kVector = 16 / sizeof(ElementOut);
  using OutputOp = cutlass::epilogue::thread::LinearCombination<ElementOut, kVector, float, float>;
  using Epilogue = typename cutlass::epilogue::threadblock::DefaultEpilogueTensorOp<Block, typename Mma::Operator, 1,
                                                                                   OutputOp, kVector>::Epilogue;
  static constexpr int kThreads = 32 * Mma::WarpCount::kCount;

  struct Piece {
    Element* x;
    Element* dy;
    int rows;
    typename Mma::IteratorA::Params params_a;
    typename Mma::IteratorB::Params params_b;
  };

  struct Params {
    Piece pieces[kMaxSegments];
    int count;
    int n, k;
    int tile_rows, tile_columns;
    ElementOut* dweight;
    typename Epilogue::OutputTileIterator::Params params_out;
    void* dbias;
    bool accumulate;
    bool wide_bias;  // dbias is float32, else of the type of the inputs
  };

  union SharedStorage {
    typename Mma::SharedStorage product;
    typename Epilogue::SharedStorage epilogue;
  };
};

// A thread holds part of the sums of rows i * 8 + lane / 4 of its warp; its three neighbours hold the rest.
template <class C, class Sums>
CUTLASS_DEVICE void write_bias(const typename C::Params& params, const Sums& sums, int first_row, int lane) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Sums::kElements; ++i) {
    float value = sums[i];
    value += __shfl_xor_sync(0xffffffff, value, 1);
    value += __shfl_xor_sync(0xffffffff, value, 2);
    const int row = first_row + i * 8 + lane / 4;
    if (lane % 4 != 0 || row >= params.n) continue;
    if (params.wide_bias) {
      auto* dbias = static_cast<float*>(params.dbias);
      dbias[row] = value + (params.accumulate ? dbias[row] : 0.0f);
    } else {
      auto* dbias = static_cast<typename C::Element*>(params.dbias);
      dbias[row] = typename C::Element(value + (params.accumulate ? static_cast<float>(dbias[row]) : 0.0f));
    }
  }
}

template <class C>
__global__ __launch_bounds__(C::kThreads, 2) void wgrad_kernel(const __grid_constant__ typename C::Params params) {
  using Mma = typename C::Mma;
  using Epilogue = typename C::Epilogue;
  extern __shared__ __align__(128) char memory[];
  auto& shared = *reinterpret_cast<typename C::SharedStorage*>(memory);
  const int thread = threadIdx.x;
  const int warp = cutlass::canonical_warp_idx_sync();
  const int lane = thread % 32;

  for (int tile = blockIdx.x; tile < params.tile_rows * params.tile_columns; tile += gridDim.x) {
    const TilePlace place = tile_place(tile, params.tile_rows, params.tile_columns, kBand);
    const int row = place.row * C::Block::kM;
    const int column = place.column * C::Block::kN;

    typename Mma::FragmentC sum;
    sum.clear();
    cutlass::Array<float, C::Warp::kM / 8> bias_sum;
    bias_sum.clear();
    for (int s = 0; s < params.count; ++s) {
      const auto& piece = params.pieces[s];
      typename Mma::IteratorA a(piece.params_a, piece.dy, {params.n, piece.rows}, thread, {row, 0});
      typename Mma::IteratorB b(piece.params_b, piece.x, {piece.rows, params.k}, thread, {0, column});
      Mma product(shared.product, thread, warp, lane);
      const int steps = (piece.rows + C::Block::kK - 1) / C::Block::kK;
      if constexpr (C::kBias) {
        product(steps, sum, a, b, sum, bias_sum);
      } else {
        product(steps, sum, a, b, sum);
      }
      cutlass::arch::cp_async_wait<0>();
      __syncthreads();  // the next segment, or the epilogue, writes where this one read
    }

    if constexpr (C::kBias) {
      if (column == 0 && warp / Mma::WarpCount::kM == 0) {
        write_bias<C>(params, bias_sum, row + warp % Mma::WarpCount::kM * C::Warp::kM, lane);
      }
    }
    using Iterator = typename Epilogue::OutputTileIterator;
    Iterator source(params.params_out, params.dweight, {params.n, params.k}, thread, {row, column});
    Iterator target(params.params_out, params.dweight, {params.n, params.k}, thread, {row, column});
    Epilogue epilogue(shared.epilogue, thread, warp, lane);
    epilogue(typename C::OutputOp({1.0f, params.accumulate ? 1.0f : 0.0f}), target, sum, source);
    __syncthreads();
  }
}

template <class C>
void launch(const Wgrad& task) {
  using Element = typename C::Element;
  const Product& product = task.products.front();
  typename C::Params params{};
  params.n = static_cast<int>(product.n), params.k = static_cast<int>(product.k);
  params.tile_rows = (params.n + C::Block::kM - 1) / C::Block::kM;
  params.tile_columns = (params.k + C::Block::kN - 1) / C::Block::kN;
  params.dweight = static_cast<typename C::ElementOut*>(product.dweight);
  params.params_out = typename C::Epilogue::OutputTileIterator::Params(cutlass::layout::RowMajor(product.dweight_stride));
  params.dbias = product.dbias;
  params.accumulate = task.accumulate;
  params.wide_bias = task.dbias == Kind::float32;
  for (const Segment& segment : product.segments) {
    auto& piece = params.pieces[params.count++];
    piece.x = static_cast<Element*>(const_cast<void*>(segment.x));
    piece.dy = static_cast<Element*>(const_cast<void*>(segment.dy));
    piece.rows = static_cast<int>(segment.rows);
    piece.params_a = typename C::Mma::IteratorA::Params(typename C::LayoutA(segment.dy_stride));
    piece.params_b = typename C::Mma::IteratorB::Params(typename C::LayoutB(segment.x_stride));
  }
  static_assert(sizeof(params) <= 32764, "kernel parameters");

  constexpr int bytes = sizeof(typename C::SharedStorage);
  auto* kernel = reinterpret_cast<const void*>(&wgrad_kernel<C>);
  static std::atomic<std::uint64_t> allowed{0};
  allow_shared_memory(kernel, bytes, task.device, allowed);
  void* arguments[] = {&params};
  check(cudaLaunchKernel(kernel, dim3(task.blocks), dim3(C::kThreads), arguments, bytes, task.stream), "wgrad: launch");
}

template <class Element>
void choose(const Wgrad& task) {
  const bool bias = task.products.front().dbias != nullptr;
  if (task.dweight == Kind::float32) {
    bias ? launch<Config<Element, float, true>>(task) : launch<Config<Element, float, false>>(task);
  } else {
    bias ? launch<Config<Element, Element, true>>(task) : launch<Config<Element, Element, false>>(task);
  }
}

}  // namespace zbkern::sm80
