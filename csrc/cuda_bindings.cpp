// Python's view of the CUDA kernels: zbkern._cuda. Addresses, sizes and a stream as ints, dtypes as 0 (float32),
// 1 (bfloat16), 2 (float16); zbkern/kernels/cuda/ takes them from tensors. Works without a GPU up to the launch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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
  if (number < 0 || number > 2)
    throw std::invalid_argument("zbkern: a dtype is 0 (float32), 1 (bfloat16) or 2 (float16)");
  return static_cast<Kind>(number);
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "zbkern's CUDA kernels, compiled. zbkern.kernels.cuda calls them with tensors.";
  module.attr("CUDA_VERSION") = py::int_(CUDART_VERSION);  // 13000 is 13.0
  module.attr("CUTLASS_VERSION") = ZBKERN_CUTLASS_VERSION;
  module.attr("SOURCES_HASH") = ZBKERN_SOURCES_HASH;
  module.attr("MAX_SEGMENTS") = kMaxSegments;
  module.attr("MAX_PRODUCTS") = kMaxProducts;

  module.def("choose_tile", &choose_tile, py::arg("n"), py::arg("k"), py::arg("tokens"), py::arg("sms"));
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
         int device, std::uintptr_t stream, int tile_k) {
        Wgrad task{{}, kind_of(input), kind_of(dweight), kind_of(dbias), accumulate, device, stream_of(stream), tile_k};
        for (const py::handle& product : products) task.products.push_back(product_from(product));
        validate(task);
        choose_grid(task, places, max_tiles);
        const OnDevice there(device);
        wgrad(task);
      },
      py::arg("products"), py::arg("input"), py::arg("dweight"), py::arg("dbias"), py::arg("accumulate"),
      py::arg("places"), py::arg("max_tiles"), py::arg("device"), py::arg("stream"), py::arg("tile_k") = 0);
}
