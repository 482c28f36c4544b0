// Python's view of the CUDA kernels: zbkern._cuda. Addresses, sizes and a stream as ints, dtypes as 0 (float32),
// 1 (bfloat16), 2 (float16); zbkern/kernels/cuda/wgrad.py takes them from tensors. Works without a GPU up to the launch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "cuda_optimizer.h"
#include "cuda_wgrad.h"

namespace py = pybind11;
using namespace zbkern;

namespace {

template <class T = void>
T* address(const py::handle& value) {
  return reinterpret_cast<T*>(value.cast<std::uintptr_t>());
}

cudaStream_t stream_of(std::uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

Segment segment_from(const py::handle& source) {
  const auto fields = py::cast<py::tuple>(source);
  return {address(fields[0]), address(fields[1]), fields[2].cast<std::int64_t>(), fields[3].cast<std::int64_t>(),
          fields[4].cast<std::int64_t>()};
}

Product product_from(const py::handle& source) {
  const auto fields = py::cast<py::tuple>(source);
  Product product{address(fields[0]), address(fields[1]), fields[2].cast<std::int64_t>(),
                  fields[3].cast<std::int64_t>(), fields[4].cast<std::int64_t>(), {}};
  for (const py::handle& segment : fields[5]) product.segments.push_back(segment_from(segment));
  return product;
}

// Lists that Python keeps from step to step: to make one costs the host more than to launch it.
struct AdamTensors {
  std::vector<AdamTensor> items;
};

struct Spans {
  std::vector<Span> items;
};

template <class T = void>
T* pointer(std::uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

using Addresses = std::vector<std::uintptr_t>;
using Counts = std::vector<std::int64_t>;

// The device of the launch is current while this lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "asking for the device");
    if (device != before_) check(cudaSetDevice(device), "choosing the device");
    device_ = device;
  }
  ~OnDevice() {
    if (device_ != before_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  int device_ = 0;
};

Kind kind_of(int number) {
  if (number < 0 || number > 2) throw std::invalid_argument("zbkern: a dtype is 0 (float32), 1 (bfloat16) or 2 (float16)");
  return static_cast<Kind>(number);
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "zbkern's CUDA kernels, compiled. zbkern.kernels.cuda calls them with tensors.";
  module.attr("CUDA_VERSION") = py::int_(CUDART_VERSION);  // 13000 is 13.0
  module.attr("ARCHITECTURES") = ZBKERN_ARCHITECTURES;
  module.attr("CUTLASS_VERSION") = ZBKERN_CUTLASS_VERSION;
  module.attr("SOURCES_HASH") = ZBKERN_SOURCES_HASH;
  module.attr("MAX_SEGMENTS") = kMaxSegments;
  module.attr("MAX_PRODUCTS") = kMaxProducts;
  module.def("has_sm90", &has_sm90);

  module.def("choose_tile", &choose_tile, py::arg("n"), py::arg("k"), py::arg("sms"));
  module.def("count_tiles", &count_tiles, py::arg("n"), py::arg("k"), py::arg("tile_k"));
  module.def("choose_blocks", &choose_blocks, py::arg("tiles"), py::arg("places"), py::arg("max_tiles"));
  module.def(
      "tile_place",
      [](int index, int rows, int columns, int band) {
        const TilePlace place = tile_place(index, rows, columns, band);
        return py::make_tuple(place.row, place.column);
      },
      py::arg("index"), py::arg("rows"), py::arg("columns"), py::arg("band"));
  // products: (dweight, dbias or 0, N, K, row stride, [(x, dy, rows, row stride of x, of dy), ...])
  module.def(
      "wgrad",
      [](const py::sequence& products, int input, int dweight, int dbias, bool accumulate, int places, int max_tiles,
         bool hopper, int device, std::uintptr_t stream, bool reduce) {
        Wgrad task{{}, kind_of(input), kind_of(dweight), kind_of(dbias), accumulate, reduce,
                   hopper, device, stream_of(stream)};
        for (const py::handle& product : products) task.products.push_back(product_from(product));
        validate(task);
        choose_grid(task, places, max_tiles);
        const OnDevice there(device);
        wgrad(task);
      },
      py::arg("products"), py::arg("input"), py::arg("dweight"), py::arg("dbias"), py::arg("accumulate"),
      py::arg("places"), py::arg("max_tiles"), py::arg("hopper"), py::arg("device"), py::arg("stream"),
      py::arg("reduce"));

  // addresses of each tensor's parts, its master or 0, and how many elements it has; then set_grads
  py::class_<AdamTensors>(module, "AdamTensors")
      .def(py::init([](const Addresses& params, const Addresses& exp_avgs, const Addresses& exp_avg_sqs,
                       const Addresses& steps, const Addresses& masters, const Counts& counts) {
             AdamTensors list;
             for (std::size_t i = 0; i < counts.size(); ++i) {
               list.items.push_back({pointer(params.at(i)), nullptr, pointer<float>(exp_avgs.at(i)),
                                     pointer<float>(exp_avg_sqs.at(i)), pointer<float>(steps.at(i)),
                                     pointer<float>(masters.at(i)), counts[i]});
             }
             return list;
           }),
           py::arg("params"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"), py::arg("steps"), py::arg("masters"),
           py::arg("counts"))
      .def(
          "set_grads",
          [](AdamTensors& list, const Addresses& grads) {
            for (std::size_t i = 0; i < list.items.size(); ++i) list.items[i].grad = pointer(grads.at(i));
          },
          py::arg("grads"));
  module.def(
      "adam",
      [](const AdamTensors& tensors, int param, int grad, std::uintptr_t control, double lr, std::uintptr_t lr_at,
         double beta1, double beta2, double eps, double weight_decay, double max_norm, bool maximize, bool undo,
         int device, std::uintptr_t stream) {
        const OnDevice there(device);
        adam({tensors.items, kind_of(param), kind_of(grad), pointer<const float>(control),
              {beta1, beta2, eps, weight_decay, lr, pointer<const float>(lr_at), max_norm, maximize}, undo,
              stream_of(stream)});
      },
      py::arg("tensors"), py::arg("param"), py::arg("grad"), py::arg("control"), py::arg("lr"), py::arg("lr_at"),
      py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("max_norm"),
      py::arg("maximize"), py::arg("undo"), py::arg("device"), py::arg("stream"));
  module.def(
      "adam_element",  // the arithmetic of one element, on the host: (w, m, v)
      [](float gradient, float w, float m, float v, double step, const std::array<float, 3>& control, double lr,
         double beta1, double beta2, double eps, double weight_decay, double max_norm, bool maximize, bool undo) {
        if (!adam_skips(control.data())) {
          const AdamNumbers numbers{beta1, beta2, eps, weight_decay, lr, nullptr, max_norm, maximize};
          const AdamRates rates = adam_rates(numbers, step, control.data());
          undo ? adam_element<true>(rates, gradient, w, m, v) : adam_element<false>(rates, gradient, w, m, v);
        }
        return py::make_tuple(w, m, v);
      },
      py::arg("gradient"), py::arg("w"), py::arg("m"), py::arg("v"), py::arg("step"), py::arg("control"),
      py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("max_norm"),
      py::arg("maximize"), py::arg("undo"));
  // workspace: floats that squared_norm needs
  py::class_<Spans>(module, "Spans")
      .def(py::init([](const Addresses& data, const Counts& counts) {
             Spans list;
             for (std::size_t i = 0; i < counts.size(); ++i) list.items.push_back({pointer(data.at(i)), counts[i]});
             return list;
           }),
           py::arg("data"), py::arg("counts"))
      .def_property_readonly("workspace", [](const Spans& list) { return 2 * squared_norm_blocks(list.items); });
  module.def(
      "squared_norm",
      [](const Spans& spans, int kind, bool accumulate, std::uintptr_t result, std::uintptr_t workspace, int device,
         std::uintptr_t stream) {
        const OnDevice there(device);
        squared_norm(spans.items, kind_of(kind), accumulate, pointer<float>(result), pointer<float>(workspace),
                     stream_of(stream));
      },
      py::arg("spans"), py::arg("kind"), py::arg("accumulate"), py::arg("result"), py::arg("workspace"),
      py::arg("device"), py::arg("stream"));
}
