// Launches of kernels that Triton has compiled, made again at other addresses: zbkern._launcher. What Python works out
// for a call and Triton for a launch is kept; of a call, only addresses go in. It includes no header of CUDA or torch.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;

// What is used of the CUDA driver API (12.4 and later), in its layout.
struct alignas(64) TensorMap {
  std::uint64_t opaque[16];
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  const void* attributes;
  unsigned count;
};

constexpr int kNotInterleaved = 0, kPromoteTo128Bytes = 2, kZerosOutside = 0;

struct Driver {
  int (*encode)(TensorMap*, int, std::uint32_t, void*, const std::uint64_t*, const std::uint64_t*, const std::uint32_t*,
                const std::uint32_t*, int, int, int, int);
  int (*launch)(const LaunchConfig*, void*, void**, void**);
  int (*parameter)(void*, std::size_t, std::size_t*, std::size_t*);
  int (*error)(int, const char**);
  int (*current)(void**);  // the calling thread's context, null where it has none
  int (*enter)(void*);

  void check(int result, const char* what) const {
    const char* text = nullptr;
    if (!result) return;
    error(result, &text);
    throw std::runtime_error(std::string("zbkern: ") + what + ": " + (text ? text : "unknown CUDA error"));
  }
};

const Driver& driver() {
  static const Driver found = [] {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!library) throw std::runtime_error("zbkern: there is no libcuda.so.1");
    Driver made{};
    const auto look_up = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (!function) throw std::runtime_error(std::string("zbkern: this CUDA driver is older than 12.4: no ") + name);
    };
    look_up(made.encode, "cuTensorMapEncodeTiled"), look_up(made.launch, "cuLaunchKernelEx");
    look_up(made.parameter, "cuFuncGetParamInfo"), look_up(made.error, "cuGetErrorString");
    look_up(made.current, "cuCtxGetCurrent"), look_up(made.enter, "cuCtxSetCurrent");
    return made;
  }();
  return found;
}

// A parameter of a kernel: the address of an operand, a descriptor of one, or (operand < 0) bytes that stay.
struct Parameter {
  int operand = -1;
  std::string bytes;
  int type = -1, swizzle = 0;  // of a descriptor; its lengths, strides in bytes and box, the innermost first
  std::vector<std::uint64_t> lengths, strides;
  std::vector<std::uint32_t> box;

  std::size_t size() const { return operand < 0 ? bytes.size() : type < 0 ? sizeof(Address) : sizeof(TensorMap); }
};

struct Launch {
  void* function;
  LaunchConfig config;
  std::vector<Parameter> parameters;
};

constexpr std::size_t kMostParameters = 256, kMostMaps = 64;

Parameter parameter_from(const py::handle& source) {
  if (py::isinstance<py::bytes>(source)) return {-1, source.cast<std::string>(), -1, 0, {}, {}, {}};
  if (py::isinstance<py::int_>(source)) return {source.cast<int>(), {}, -1, 0, {}, {}, {}};
  const auto [operand, type, swizzle, lengths, strides, box] = source.cast<
      std::tuple<int, int, int, std::vector<std::uint64_t>, std::vector<std::uint64_t>, std::vector<std::uint32_t>>>();
  return {operand, {}, type, swizzle, lengths, strides, box};
}

// Raises an error where the machine code takes other parameters than these: another Triton might.
void validate(const Launch& launch) {
  const std::size_t count = launch.parameters.size();
  const auto maps =
      std::count_if(launch.parameters.begin(), launch.parameters.end(), [](const Parameter& p) { return p.type >= 0; });
  if (count > kMostParameters || maps > static_cast<std::ptrdiff_t>(kMostMaps))
    throw std::runtime_error("zbkern: too many parameters");
  std::size_t offset = 0, size = 0;
  for (std::size_t i = 0; i < count; ++i) {
    driver().check(driver().parameter(launch.function, i, &offset, &size), "asking for a parameter");
    if (size != launch.parameters[i].size())
      throw std::runtime_error("zbkern: parameter " + std::to_string(i) + " has " + std::to_string(size) +
                               " bytes, not " + std::to_string(launch.parameters[i].size()));
  }
  if (driver().parameter(launch.function, count, &offset, &size) == 0)
    throw std::runtime_error("zbkern: the kernel takes more than " + std::to_string(count) + " parameters");
}

// The launches of one call. It keeps no operand alive.
class Launches {
 public:
  // launches: (function, grid, threads, bytes of shared memory, parameters). addresses: of the operands when they were
  // recorded, 0 for one that is None.
  Launches(const py::sequence& launches, std::vector<Address> addresses) : recorded_(std::move(addresses)) {
    for (const py::handle& each : launches) {
      const auto [function, grid, threads, shared, parameters] =
          each.cast<std::tuple<Address, std::array<unsigned, 3>, unsigned, unsigned, py::sequence>>();
      Launch made{reinterpret_cast<void*>(function),
                  {{grid[0], grid[1], grid[2]}, {threads, 1, 1}, shared, nullptr, nullptr, 0},
                  {}};
      for (const py::handle& parameter : parameters) made.parameters.push_back(parameter_from(parameter));
      validate(made);
      launches_.push_back(std::move(made));
    }
    driver().check(driver().current(&context_), "asking for the context");
    for (const Address address : recorded_)
      first_.push_back(std::find(recorded_.begin(), recorded_.end(), address) - recorded_.begin());
  }

  // Launches all on the stream; false, and nothing launched, where the operands begin otherwise modulo 16 bytes, or no
  // longer share an address that they shared: which of them an argument was is then not known.
  bool run(Address stream, const std::vector<Address>& addresses) const {
    if (addresses.size() != recorded_.size()) return false;
    for (std::size_t i = 0; i < addresses.size(); ++i)
      if ((addresses[i] ^ recorded_[i]) % 16 || addresses[i] != addresses[first_[i]]) return false;
    const py::gil_scoped_release release;  // a full queue makes the driver wait
    void* current = nullptr;
    driver().check(driver().current(&current), "asking for the context");
    if (!current) driver().check(driver().enter(context_), "entering the context");  // a thread that has used no GPU yet
    for (const Launch& launch : launches_) start(launch, stream, addresses);
    return true;
  }

 private:
  static void start(const Launch& launch, Address stream, const std::vector<Address>& addresses) {
    TensorMap maps[kMostMaps];
    void* values[kMostParameters];
    std::size_t map = 0, place = 0;
    for (const Parameter& p : launch.parameters) {
      void*& value = values[place++];
      if (p.operand < 0) {
        value = const_cast<char*>(p.bytes.data());
      } else if (p.type < 0) {
        value = const_cast<Address*>(&addresses[p.operand]);
      } else {
        value = &maps[map++];
        encode(p, addresses[p.operand], static_cast<TensorMap*>(value));
      }
    }
    LaunchConfig config = launch.config;
    config.stream = reinterpret_cast<void*>(stream);
    driver().check(driver().launch(&config, launch.function, values, nullptr), "launching a kernel");
  }

  static void encode(const Parameter& p, Address address, TensorMap* map) {
    static const std::uint32_t steps[] = {1, 1, 1, 1, 1};
    driver().check(
        driver().encode(map, p.type, p.box.size(), reinterpret_cast<void*>(address), p.lengths.data(), p.strides.data(),
                        p.box.data(), steps, kNotInterleaved, p.swizzle, kPromoteTo128Bytes, kZerosOutside),
        "describing a tensor");
  }

  std::vector<Launch> launches_;
  void* context_ = nullptr;  // the device's primary one, in which Triton has loaded the kernels
  std::vector<Address> recorded_;
  std::vector<std::size_t> first_;  // the first operand at the address of each
};

}  // namespace

PYBIND11_MODULE(_launcher, module) {
  module.doc() = "Launches of compiled kernels at other addresses; zbkern.kernels.triton.replay makes them.";
  py::class_<Launches>(module, "Launches")
      .def(py::init<const py::sequence&, std::vector<Address>>(), py::arg("launches"), py::arg("addresses"))
      .def("run", &Launches::run, py::arg("stream"), py::arg("addresses"));
}
