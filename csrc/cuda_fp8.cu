// FP8 products on Hopper (compute capability 9.0): CUTLASS's kernel for operands scaled by blocks (its example 67).
//
// A block computes tiles of 128 x 128, two blocks of a cluster the tiles one above the other, which share their rows
// of B by multicast. After 128 elements the tensor cores' sum, which has some 14 bits, is scaled and added to one in
// float32. 256 x 128 would spill: both sums are in registers.
//
// The rows of an operand are the fast index of its scales. A's come by TMA in F and B, so there must be a multiple of 4
// of them; all others are copied one by one, and only those that are there.
#include "cuda_fp8.h"

#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL  // of the cuTensorMapEncodeTiled in cuda_tma.cpp
#include <cutlass/cutlass.h>
#include <cutlass/detail/blockwise_scale_layout.hpp>
#include <cutlass/device_kernel.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

namespace zbkern {

namespace {

using namespace cute;

template <class ElementOut_, bool Rows>
struct Config {
  using ElementOut = ElementOut_;
  using Element = cutlass::float_e4m3_t;
  using Tile = Shape<_128, _128, _128>;
  using Cluster = Shape<_2, _1, _1>;
  using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<1, Rows ? 1 : 128, 128>;
  using RowMajor = cutlass::layout::RowMajor;
  using Source = conditional_t<Rows, ElementOut, void>;  // what W adds to
  using Operation = conditional_t<
      Rows, cutlass::epilogue::fusion::LinearCombination<ElementOut, float, Source, float>,
      cutlass::epilogue::fusion::LinCombPerColBias<ElementOut, float, ElementOut, Source, float>>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Source, RowMajor, 16 / sizeof(ElementOut),
      ElementOut, RowMajor, 16 / sizeof(ElementOut), cutlass::epilogue::TmaWarpSpecializedCooperative,
      Operation>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element,
      cute::tuple<RowMajor, decltype(Scales::deduce_layoutSFA())>, 16, Element,
      cute::tuple<cutlass::layout::ColumnMajor, decltype(Scales::deduce_layoutSFB())>, 16, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<sizeof(typename Epilogue::SharedStorage)>,
      cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue,
                                                      cutlass::gemm::PersistentScheduler>;
};

template <class C>
void launch(const Fp8Product& task) {
  using Kernel = typename C::Kernel;
  const auto shape = make_shape(static_cast<int>(task.p), static_cast<int>(task.q), static_cast<int>(task.r), 1);
  typename Kernel::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = shape;
  arguments.mainloop = {static_cast<const typename C::Element*>(task.a.values), {task.a.stride, _1{}, 0},
                        static_cast<const typename C::Element*>(task.b.values), {task.b.stride, _1{}, 0},
                        static_cast<const float*>(task.a.scales), C::Scales::tile_atom_to_shape_SFA(shape),
                        static_cast<const float*>(task.b.scales), C::Scales::tile_atom_to_shape_SFB(shape)};
  arguments.epilogue.ptr_D = static_cast<typename C::ElementOut*>(task.out);
  arguments.epilogue.dD = {task.out_stride, _1{}, 0};
  if constexpr (std::is_void_v<typename C::Source>) {
    arguments.epilogue.thread.bias_ptr = static_cast<const typename C::ElementOut*>(task.bias);
  } else {
    arguments.epilogue.ptr_C = arguments.epilogue.ptr_D;
    arguments.epilogue.dC = arguments.epilogue.dD;
    arguments.epilogue.thread.beta = task.add ? 1.0f : 0.0f;
  }
  arguments.hw_info.device_id = task.device;
  arguments.hw_info.sm_count = task.places;
  auto params = Kernel::to_underlying_arguments(arguments, nullptr);

  constexpr int bytes = Kernel::SharedStorageSize;
  static_assert(bytes <= 232448, "shared memory of a block");
  auto* kernel = reinterpret_cast<const void*>(&cutlass::device_kernel<Kernel>);
  static std::atomic<std::uint64_t> allowed{0};
  allow_shared_memory(kernel, bytes, task.device, allowed);
  launch_pairs(kernel, Kernel::get_grid_shape(params), Kernel::MaxThreadsPerBlock, bytes, task.stream, &params,
               "fp8_product: launch");
}

}  // namespace

void validate(const Fp8Product& task) {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument("zbkern: fp8_product: " + why); };
  for (const std::int64_t size : {task.p, task.q, task.r}) {
    if (size <= 0 || size > INT32_MAX) refuse("sizes must be positive and fit 32 bits; got " + std::to_string(size));
  }
  if (task.rows ? task.bias != nullptr : task.add) refuse("W has no bias, and F and B do not add");
  if (!task.rows && task.kind == Kind::float32) refuse("out of F and B must be bfloat16 or float16");
}

void fp8_product(const Fp8Product& task) {
  if (!task.rows) {
    return task.kind == Kind::bfloat16 ? launch<Config<cutlass::bfloat16_t, false>>(task)
                                       : launch<Config<cutlass::half_t, false>>(task);
  }
  if (task.kind == Kind::float32) return launch<Config<float, true>>(task);
  task.kind == Kind::bfloat16 ? launch<Config<cutlass::bfloat16_t, true>>(task)
                              : launch<Config<cutlass::half_t, true>>(task);
}

}  // namespace zbkern
