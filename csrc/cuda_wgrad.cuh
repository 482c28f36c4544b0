// W on Hopper (compute capability 9.0): TMA, wgmma, warp-specialised and persistent, out of CUTLASS 3 collectives.
//
//   dweight [N, K] (+)= sum over segments of dy_i^T x_i        dbias [N] (+)= sum over segments and rows of dy_i
//
// A block computes tiles of 128 x TileK of dweight, two blocks of a cluster the tiles one above the other, which share
// their columns of x by multicast. In CUTLASS's letters a tile is A B with A = dy^T and B = x, both stored with the
// summed index (tokens) as the slow one.
//
// Segments: the warp that loads walks them one after the other, each with its own two TMA descriptors, and the warps
// that multiply see one long sum; rows past a segment's end arrive as zeros. The order of the sum is that of the list,
// whatever the grid, so a result never depends on the machine's load. dweight is read and written once.
//
// Adding to dweight: warp 2 loads it piece by piece, and the epilogue adds.
//
// Tiles of 256 columns are computed by both warpgroups together, those of 128 by one, in turn: while one multiplies, the
// other adds its tile to dweight, and tensor cores wait for no epilogue. The order of a sum is the same.
//
// Bias: a block of the first column of tiles multiplies its A by a column of ones as well, 8/TileK of its work.
//
// Order of tiles: bands of 8 clusters (2048 rows); within a band down, then right. 66 clusters then work on about
// 2048 x 2048 of dweight at a time, whose rows and columns of dy and x fit L2 together.
#pragma once

#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL  // of the cuTensorMapEncodeTiled in cuda_tma.cpp
#include <cute/tensor.hpp>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/pipeline/pipeline.hpp>

#include "cuda_wgrad.h"

namespace zbkern::sm90 {

using namespace cute;

constexpr int kBand = 8;

template <class Element_, class ElementOut_, int TileK>
struct Config {
  using Element = Element_;
  using ElementOut = ElementOut_;
  static constexpr bool kInTurn = TileK == 128;
  using Tile = Shape<Int<kTileN>, Int<TileK>, _64>;
  using Cluster = Shape<_2, _1, _1>;
  using EpilogueSchedule = conditional_t<kInTurn, cutlass::epilogue::TmaWarpSpecialized,
                                         cutlass::epilogue::TmaWarpSpecializedCooperative>;
  using MainloopSchedule = conditional_t<kInTurn, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                         cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, ElementOut, cutlass::layout::RowMajor,
      16 / sizeof(ElementOut), ElementOut, cutlass::layout::RowMajor, 16 / sizeof(ElementOut),
      EpilogueSchedule>::CollectiveOp;
  using OnesLayout = decltype(tile_to_shape(GMMA::Layout_K_INTER_Atom<Element>{}, Shape<_8, _64>{}));
  static constexpr int kReserved = sizeof(typename Epilogue::SharedStorage) + 8 * 64 * sizeof(Element) + 256;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::ColumnMajor, 8, Element,
      cutlass::layout::RowMajor, 8, float, Tile, Cluster, cutlass::gemm::collective::StageCountAutoCarveout<kReserved>,
      MainloopSchedule>::CollectiveOp;
  using TiledMma = typename Mainloop::TiledMma;
  using BiasMma = decltype(make_tiled_mma(
      SM90::GMMA::ss_op_selector<Element, Element, float, Shape<_128, _8, _64>, GMMA::Major::MN, GMMA::Major::K>(),
      Layout<Shape<Int<kInTurn ? 1 : 2>, _1, _1>>{}));
  using MultiplyOrder = cutlass::OrderedSequenceBarrier<2, 2>;  // in turn: first to multiply, then to write
  using LoadOrder = cutlass::OrderedSequenceBarrier<1, 2>;

  static constexpr int kMultiplying = size(TiledMma{});  // threads of a tile
  static constexpr int kThreads = 3 * cutlass::NumThreadsPerWarpGroup;
  static constexpr int kPieces = Epilogue::get_load_pipe_increment(Tile{});  // of a tile, as the epilogue takes it
  static_assert(kMultiplying == (kInTurn ? 128 : 256), "two warpgroups multiply");

  struct Piece {  // a segment on the device
    typename Mainloop::Params loads;
    int rows;
  };

  struct Output {  // a product on the device
    typename Epilogue::Params epilogue;
    void* dbias;
    int n, k;
    int first_piece, last_piece;
    int steps;                     // of 64 tokens, over all pieces
    int cluster_rows, tile_columns;
  };

  struct Params {
    Piece pieces[kMaxSegments];
    Output outputs[kMaxProducts];
    int products;
    bool accumulate;
    bool wide_bias;                // dbias is float32, else of the type of the inputs
  };
  static_assert(sizeof(Params) <= 32764, "kernel parameters");

  struct SharedStorage {
    struct Tensors : aligned_struct<128, _1> {
      typename Epilogue::TensorStorage epilogue;
      alignas(1024) typename Mainloop::TensorStorage mainloop;  // a swizzle's pattern repeats every 1024 bytes
      alignas(128) array_aligned<Element, cosize_v<OnesLayout>> ones;
    } tensors;
    struct Pipelines : aligned_struct<16, _1> {
      alignas(16) typename Mainloop::PipelineStorage mainloop;
      alignas(16) typename Epilogue::PipelineStorage epilogue;
      alignas(16) typename LoadOrder::SharedStorage order;
      alignas(16) typename MultiplyOrder::SharedStorage turns;
    } pipelines;
  };
};

// The tile of a block as CUTLASS names it; the blocks of a cluster have the tiles one above the other.
template <class Output>
CUTLASS_DEVICE auto tile_coordinates(const Output& output, int cluster_tile, int rank) {
  const TilePlace place = tile_place(cluster_tile, output.cluster_rows, output.tile_columns, kBand);
  return make_coord(place.row * 2 + rank, place.column, _, 0);
}

// Sums `steps` tiles of 64 tokens as the loading warp delivers them; with them the bias, where this tile has one.
template <class C, bool WithBias, class Accumulator, class BiasAccumulator>
CUTLASS_DEVICE void multiply(typename C::Mainloop::MainloopPipeline& pipeline,
                             typename C::Mainloop::PipelineState& read, Accumulator& sum, BiasAccumulator& bias_sum,
                             int steps, int thread, typename C::SharedStorage::Tensors& tensors,
                             typename C::MultiplyOrder& turns) {
  using Mainloop = typename C::Mainloop;
  typename C::TiledMma mma;
  typename C::BiasMma bias_mma;
  const int warpgroup = __shfl_sync(0xffffffff, thread / cutlass::NumThreadsPerWarpGroup, 0);
  const auto slice = mma.get_slice(warpgroup * cutlass::NumThreadsPerWarpGroup);
  const auto bias_slice = bias_mma.get_slice(warpgroup * cutlass::NumThreadsPerWarpGroup);
  Tensor shared_a = make_tensor(make_smem_ptr(tensors.mainloop.smem_A.data()), typename Mainloop::SmemLayoutA{});
  Tensor shared_b = make_tensor(make_smem_ptr(tensors.mainloop.smem_B.data()), typename Mainloop::SmemLayoutB{});
  Tensor shared_ones = make_tensor(make_smem_ptr(tensors.ones.data()), typename C::OnesLayout{});
  Tensor a = slice.make_fragment_A(slice.partition_A(shared_a));  // (mma, rows, k blocks, stage)
  Tensor b = slice.make_fragment_B(slice.partition_B(shared_b));
  Tensor bias_a = bias_slice.make_fragment_A(bias_slice.partition_A(shared_a));
  Tensor ones = bias_slice.make_fragment_B(bias_slice.partition_B(shared_ones));

  auto release = read;
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  bias_mma.accumulate_ = GMMA::ScaleOut::Zero;
  warpgroup_fence_operand(sum);
  if constexpr (C::kInTurn) turns.wait();
  CUTLASS_PRAGMA_NO_UNROLL
  for (int step = 0; step < steps; ++step) {
    pipeline.consumer_wait(read);
    const int stage = read.index();
    warpgroup_fence_operand(sum);
    if constexpr (WithBias) warpgroup_fence_operand(bias_sum);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < size<2>(a); ++block) {
      gemm(mma, a(_, _, block, stage), b(_, _, block, stage), sum);
      mma.accumulate_ = GMMA::ScaleOut::One;
      if constexpr (WithBias) {
        gemm(bias_mma, bias_a(_, _, block, stage), ones(_, _, block), bias_sum);
        bias_mma.accumulate_ = GMMA::ScaleOut::One;
      }
    }
    warpgroup_commit_batch();
    warpgroup_wait<1>();  // the step before this one is done: give its stage back
    warpgroup_fence_operand(sum);
    if constexpr (WithBias) warpgroup_fence_operand(bias_sum);
    if (step > 0) {
      pipeline.consumer_release(release);
      ++release;
    }
    ++read;
  }
  if constexpr (C::kInTurn) turns.arrive();
  warpgroup_wait<0>();
  warpgroup_fence_operand(sum);
  if constexpr (WithBias) warpgroup_fence_operand(bias_sum);
  pipeline.consumer_release(release);
}

// Every column of bias_sum is the bias: the threads that hold column 0 write it.
template <class C, class BiasAccumulator>
CUTLASS_DEVICE void write_bias(const typename C::Params& params, const typename C::Output& output,
                               const BiasAccumulator& bias_sum, int tile_row, int thread) {
  typename C::BiasMma bias_mma;
  Tensor where = bias_mma.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<kTileN>, _8>{}));
  const auto add = [&](auto* dbias, int row, float value) {
    using Out = remove_reference_t<decltype(*dbias)>;
    if (params.accumulate) value += static_cast<float>(dbias[row]);
    dbias[row] = static_cast<Out>(value);
  };
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < size(bias_sum); ++i) {
    const int row = tile_row * kTileN + get<0>(where(i));
    if (get<1>(where(i)) != 0 || row >= output.n) continue;
    if (params.wide_bias) {
      add(static_cast<float*>(output.dbias), row, bias_sum(i));
    } else {
      add(static_cast<typename C::Element*>(output.dbias), row, bias_sum(i));
    }
  }
}

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void wgrad_kernel(const __grid_constant__ typename C::Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Mainloop = typename C::Mainloop;
  using Epilogue = typename C::Epilogue;
  using MainloopPipeline = typename Mainloop::MainloopPipeline;
  using EpilogueLoads = typename Epilogue::LoadPipeline;
  using EpilogueStores = typename Epilogue::StorePipeline;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<typename C::SharedStorage*>(memory);

  const int thread = threadIdx.x;
  const int warp = cutlass::canonical_warp_idx_sync();
  const bool loads = cutlass::canonical_warp_group_idx() == 0;  // warp 0: x and dy; warp 2: dweight where we add to it
  const int mma_thread = thread % C::kMultiplying;              // the loading warpgroup comes first
  const int rank = block_rank_in_cluster();
  const int clusters = gridDim.x / 2;

  if (warp == 0 && elect_one_sync()) {
    Mainloop::prefetch_tma_descriptors(params.pieces[params.outputs[0].first_piece].loads);
    Epilogue::prefetch_tma_descriptors(params.outputs[0].epilogue);
  }

  typename MainloopPipeline::Params mainloop_params;
  mainloop_params.role = loads ? MainloopPipeline::ThreadCategory::NonParticipant
                               : MainloopPipeline::ThreadCategory::Consumer;
  if (warp == 0) mainloop_params.role = MainloopPipeline::ThreadCategory::Producer;
  mainloop_params.is_leader = thread % cutlass::NumThreadsPerWarpGroup == 0;
  mainloop_params.num_consumers = C::kMultiplying;
  mainloop_params.num_producers = Mainloop::NumProducerThreadEvents;
  mainloop_params.transaction_bytes = Mainloop::TmaTransactionBytes;
  MainloopPipeline pipeline(shared.pipelines.mainloop, mainloop_params, typename C::Cluster{});

  typename EpilogueLoads::Params loads_params;
  loads_params.role = loads ? EpilogueLoads::ThreadCategory::NonParticipant : EpilogueLoads::ThreadCategory::Consumer;
  if (warp == 2) loads_params.role = EpilogueLoads::ThreadCategory::Producer;
  loads_params.dst_blockid = rank;
  loads_params.producer_arv_count = cutlass::NumThreadsPerWarp;
  loads_params.consumer_arv_count = C::kMultiplying;
  loads_params.transaction_bytes = Epilogue::TmaTransactionBytes;
  EpilogueLoads epilogue_loads(shared.pipelines.epilogue, loads_params);

  typename EpilogueStores::Params stores_params;
  stores_params.always_wait = true;
  EpilogueStores epilogue_stores(stores_params);

  typename C::LoadOrder::Params order_params;  // the first tile's x and dy go before its dweight
  order_params.group_id = warp == 0 ? 0 : 1;
  order_params.group_size = cutlass::NumThreadsPerWarp;
  typename C::LoadOrder order(shared.pipelines.order, order_params);

  const int warpgroup = cutlass::canonical_warp_group_idx() - 1;  // of those that multiply
  typename C::MultiplyOrder::Params turns_params;
  turns_params.group_id = warpgroup;
  turns_params.group_size = cutlass::NumThreadsPerWarpGroup;
  typename C::MultiplyOrder turns(shared.pipelines.turns, turns_params);

  for (int i = thread; i < cosize_v<typename C::OnesLayout>; i += C::kThreads) {
    shared.tensors.ones[i] = typename C::Element(1.0f);
  }
  cutlass::arch::fence_view_async_shared();  // wgmma reads the ones
  __syncthreads();
  cluster_arrive_relaxed();  // barriers are ready in both blocks before either uses the other's
  cluster_wait();

  const auto problem_of = [](const auto& output, int tokens) { return make_shape(output.n, output.k, tokens, 1); };
  const typename C::Tile tile_shape{};
  const typename C::TiledMma tiled_mma{};
  int tile = blockIdx.x / 2;  // of the clusters' tiles of this product

  if (loads) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == 0) {
      Mainloop mainloop;
      auto write = cutlass::make_producer_start_state<MainloopPipeline>();
      bool first = true;
      for (int p = 0; p < params.products; ++p) {
        const auto& output = params.outputs[p];
        const int tiles = output.cluster_rows * output.tile_columns;
        for (; tile < tiles; tile += clusters) {
          const auto where = tile_coordinates(output, tile, rank);
          for (int s = output.first_piece; s < output.last_piece; ++s) {
            const auto& piece = params.pieces[s];
            const auto inputs = mainloop.load_init(problem_of(output, piece.rows), piece.loads);
            const auto extent = shape<3>(get<0>(inputs));
            const int steps = size(extent);
            mainloop.load(piece.loads, pipeline, write, inputs, where, make_coord_iterator(extent), steps,
                          thread % cutlass::NumThreadsPerWarp, rank, shared.tensors.mainloop);
            write.advance(steps);
          }
          if (first) order.arrive();
          first = false;
        }
        tile -= tiles;
      }
      mainloop.load_tail(pipeline, write);
    } else if (warp == 2 && params.accumulate) {
      auto write = cutlass::make_producer_start_state<EpilogueLoads>();
      bool first = true;
      for (int p = 0; p < params.products; ++p) {
        const auto& output = params.outputs[p];
        const int tiles = output.cluster_rows * output.tile_columns;
        Epilogue epilogue(output.epilogue, shared.tensors.epilogue);
        for (; tile < tiles; tile += clusters) {
          if (first) order.wait();
          first = false;
          write = epilogue.load(epilogue_loads, write, problem_of(output, 1), tile_shape,
                                tile_coordinates(output, tile, rank), tiled_mma, thread % cutlass::NumThreadsPerWarp,
                                shared.tensors.epilogue);
        }
        tile -= tiles;
      }
      Epilogue(params.outputs[0].epilogue, shared.tensors.epilogue).load_tail(epilogue_loads, write);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    typename Mainloop::PipelineState read;
    typename Epilogue::LoadPipelineState epilogue_read;
    auto epilogue_write = cutlass::make_producer_start_state<EpilogueStores>();
    int turn = 0;
    for (int p = 0; p < params.products; ++p) {
      const auto& output = params.outputs[p];
      const int tiles = output.cluster_rows * output.tile_columns;
      Epilogue epilogue(output.epilogue, shared.tensors.epilogue);
      bool stored = false;
      for (; tile < tiles; tile += clusters) {
        if (C::kInTurn && turn++ % 2 != warpgroup) {  // the other one's
          read.advance(output.steps);
          epilogue_read.advance(C::kPieces);
          epilogue_write.advance(C::kPieces);
          continue;
        }
        const auto where = tile_coordinates(output, tile, rank);
        auto sum = partition_fragment_C(tiled_mma, take<0, 2>(tile_shape));
        auto bias_sum = partition_fragment_C(typename C::BiasMma{}, Shape<Int<kTileN>, _8>{});
        if (output.dbias != nullptr && get<1>(where) == 0) {
          multiply<C, true>(pipeline, read, sum, bias_sum, output.steps, mma_thread, shared.tensors, turns);
          write_bias<C>(params, output, bias_sum, get<0>(where), mma_thread);
        } else {
          multiply<C, false>(pipeline, read, sum, bias_sum, output.steps, mma_thread, shared.tensors, turns);
        }
        if constexpr (C::kInTurn) turns.wait();
        const auto states =
            epilogue.store(epilogue_loads, epilogue_read, epilogue_stores, epilogue_write, problem_of(output, 1),
                           tile_shape, where, sum, tiled_mma, mma_thread, shared.tensors.epilogue);
        epilogue_read = get<0>(states);
        epilogue_write = get<1>(states);
        stored = true;
        if constexpr (C::kInTurn) {  // both write out of the same shared memory
          const auto after = epilogue.store_tail(epilogue_loads, epilogue_read, epilogue_stores, epilogue_write);
          epilogue_read = get<0>(after);
          epilogue_write = get<1>(after);
          turns.arrive();
        }
      }
      if (stored && !C::kInTurn) {  // the epilogue of the next product counts its stores anew
        const auto states = epilogue.store_tail(epilogue_loads, epilogue_read, epilogue_stores, epilogue_write);
        epilogue_read = get<0>(states);
        epilogue_write = get<1>(states);
      }
      tile -= tiles;
    }
  }
#endif
}

template <class C>
void launch(const Wgrad& task) {
  using Mainloop = typename C::Mainloop;
  using Epilogue = typename C::Epilogue;
  using Element = typename C::Element;
  using ElementOut = typename C::ElementOut;
  constexpr int tile_k = size<1>(typename C::Tile{});

  typename C::Params params{};
  params.products = static_cast<int>(task.products.size());
  params.accumulate = task.accumulate;
  params.wide_bias = task.dbias == Kind::float32;
  int piece = 0;
  for (int p = 0; p < params.products; ++p) {
    const Product& product = task.products[p];
    auto& output = params.outputs[p];
    output.dbias = product.dbias;
    output.n = static_cast<int>(product.n), output.k = static_cast<int>(product.k);
    output.cluster_rows = ceil_div(output.n, 2 * kTileN), output.tile_columns = ceil_div(output.k, tile_k);
    output.first_piece = piece;
    for (const Segment& segment : product.segments) {
      auto& target = params.pieces[piece++];
      target.rows = static_cast<int>(segment.rows);
      typename Mainloop::Arguments arguments{static_cast<const Element*>(segment.dy), {_1{}, segment.dy_stride, 0},
                                             static_cast<const Element*>(segment.x), {_1{}, segment.x_stride, 0}};
      target.loads =
          Mainloop::to_underlying_arguments(make_shape(output.n, output.k, target.rows, 1), arguments, nullptr);
      output.steps += ceil_div(target.rows, 64);
    }
    output.last_piece = piece;
    auto* dweight = static_cast<ElementOut*>(product.dweight);
    typename Epilogue::Arguments arguments{{}, dweight, {product.dweight_stride, _1{}, 0},
                                           dweight, {product.dweight_stride, _1{}, 0}};
    arguments.thread.alpha = 1.0f;
    arguments.thread.beta = task.accumulate ? 1.0f : 0.0f;
    output.epilogue = Epilogue::to_underlying_arguments(make_shape(output.n, output.k, 1, 1), arguments, nullptr);
  }

  constexpr int bytes = sizeof(typename C::SharedStorage);
  static_assert(bytes <= 232448, "shared memory of a block");
  auto* kernel = reinterpret_cast<const void*>(&wgrad_kernel<C>);
  static std::atomic<std::uint64_t> allowed{0};
  allow_shared_memory(kernel, bytes, task.device, allowed);
  launch_pairs(kernel, dim3((task.blocks + 1) / 2 * 2), C::kThreads, bytes, task.stream, &params, "wgrad: launch");
}

template <class Element, int TileK>
void launch_output(const Wgrad& task) {
  task.dweight == Kind::float32 ? launch<Config<Element, float, TileK>>(task)
                                : launch<Config<Element, Element, TileK>>(task);
}

template <int TileK>
void choose(const Wgrad& task) {
  task.input == Kind::bfloat16 ? launch_output<cutlass::bfloat16_t, TileK>(task)
                               : launch_output<cutlass::half_t, TileK>(task);
}

}  // namespace zbkern::sm90
