// Launches of kernels that Triton has compiled, made again at other addresses: zbkern._launcher. What Python works out
// for a call and Triton for a launch is kept; of a call, only addresses go in. It includes no header of CUDA or torch.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
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
  std::unordered_map<Address, TensorMap> known;  // of some addresses: the driver takes about a microsecond for each

  std::size_t size() const { return operand < 0 ? bytes.size() : type < 0 ? sizeof(Address) : sizeof(TensorMap); }
};

struct Launch {
  void* function;
  LaunchConfig config;
  std::vector<Parameter> parameters;
};

constexpr std::size_t kMostParameters = 256, kMostMaps = 64, kMostKnown = 64;

Parameter parameter_from(const py::handle& source) {
  if (py::isinstance<py::bytes>(source)) return {-1, source.cast<std::string>(), -1, 0, {}, {}, {}, {}};
  if (py::isinstance<py::int_>(source)) return {source.cast<int>(), {}, -1, 0, {}, {}, {}, {}};
  const auto [operand, type, swizzle, lengths, strides, box] = source.cast<
      std::tuple<int, int, int, std::vector<std::uint64_t>, std::vector<std::uint64_t>, std::vector<std::uint32_t>>>();
  return {operand, {}, type, swizzle, lengths, strides, box, {}};
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

  // Whether operands may begin there: as they did modulo 16 bytes, and at one address where they shared one, for which of
  // them an argument was is else not known.
  bool fits(const std::vector<Address>& addresses) const {
    if (addresses.size() != recorded_.size()) return false;
    for (std::size_t i = 0; i < addresses.size(); ++i)
      if ((addresses[i] ^ recorded_[i]) % 16 || addresses[i] != addresses[first_[i]]) return false;
    return true;
  }

  // Launches all on the stream. entered: in a thread without a context, in that of the launches; without it false, and
  // nothing launched, where the current one is not theirs.
  bool run(void* stream, const std::vector<Address>& addresses, bool entered) {
    const py::gil_scoped_release release;  // a full queue makes the driver wait
    void* current = nullptr;
    driver().check(driver().current(&current), "asking for the context");
    if (!entered && current != context_) return false;
    if (!current) driver().check(driver().enter(context_), "entering the context");
    for (Launch& launch : launches_) start(launch, stream, addresses);
    return true;
  }

 private:
  void start(Launch& launch, void* stream, const std::vector<Address>& addresses) {
    TensorMap maps[kMostMaps];
    void* values[kMostParameters];
    std::size_t map = 0, place = 0;
    std::unique_lock<std::mutex> alone(encoding_);  // another thread may make the same call
    for (Parameter& p : launch.parameters) {
      void*& value = values[place++];
      if (p.operand < 0) {
        value = p.bytes.data();
      } else if (p.type < 0) {
        value = const_cast<Address*>(&addresses[p.operand]);
      } else {
        value = &maps[map];
        describe(p, addresses[p.operand], maps[map++]);
      }
    }
    alone.unlock();
    LaunchConfig config = launch.config;
    config.stream = stream;
    driver().check(driver().launch(&config, launch.function, values, nullptr), "launching a kernel");
  }

  static void describe(Parameter& p, Address address, TensorMap& map) {
    const auto known = p.known.find(address);
    if (known != p.known.end()) {
      map = known->second;
      return;
    }
    encode(p, address, &map);
    if (p.known.size() >= kMostKnown) p.known.erase(p.known.begin());
    p.known.emplace(address, map);
  }

  static void encode(const Parameter& p, Address address, TensorMap* map) {
    static const std::uint32_t steps[] = {1, 1, 1, 1, 1};
    driver().check(
        driver().encode(map, p.type, p.box.size(), reinterpret_cast<void*>(address), p.lengths.data(), p.strides.data(),
                        p.box.data(), steps, kNotInterleaved, p.swizzle, kPromoteTo128Bytes, kZerosOutside),
        "describing a tensor");
  }

  std::vector<Launch> launches_;
  std::mutex encoding_;
  void* context_ = nullptr;  // the device's primary one, in which Triton has loaded the kernels
  std::vector<Address> recorded_;
  std::vector<std::size_t> first_;  // the first operand at the address of each
};

// DLPack's C interface, in its layout, as torch has it from 2.10 on: what a tensor is, without Python.
struct View {
  void* data;
  struct {
    std::int32_t type, id;
  } device;
  std::int32_t dimensions;
  struct {
    std::uint8_t code, bits;
    std::uint16_t lanes;
  } dtype;
  const std::int64_t *shape, *strides;
  std::uint64_t offset;
};

struct Exchange {
  struct {
    std::uint32_t major, minor;
  } version;
  void *older, *allocate, *from, *to;
  int (*view)(void*, View*);
  int (*stream)(std::int32_t, std::int32_t, void**);
};

constexpr std::int32_t kCpu = 1, kMostDimensions = 8;

// The launches of calls, by what these are told and how their operands lie. At most so many: then any makes room.
class Table {
 public:
  // stream_of_cpu(): the address of the stream where operands lie on a CPU, in tests.
  Table(std::size_t most, const py::capsule& exchange, py::type tensor, py::type parameter, py::object stream_of_cpu)
      : most_(most),
        exchange_(exchange.get_pointer<const Exchange>()),
        tensor_(std::move(tensor)),
        parameter_(std::move(parameter)),
        stream_of_cpu_(std::move(stream_of_cpu)) {
    if (exchange_->version.major != 1 || !exchange_->view || !exchange_->stream)
      throw std::runtime_error("zbkern: another version of DLPack's exchange");
  }

  // Makes the launches of such a call on the current stream of the operands' device; none where they are not known, and
  // false where the thread is not in the context of that device (`entered`: see Launches::run).
  std::optional<bool> run(const py::handle& options, const py::list& operands, bool entered) {
    if (!read(options, operands)) return {};
    const auto [first, last] = known_.equal_range(hash_);
    for (auto each = first; each != last; ++each) {
      const Entry& entry = each->second;
      if (entry.layout != layout_ || !same(entry.options, options) || !entry.launches->fits(addresses_)) continue;
      const std::shared_ptr<Launches> launches = entry.launches;  // another thread may make room
      const std::vector<Address> addresses = addresses_;          // or call, while this one launches
      void* stream = nullptr;
      if (device_.type == kCpu) stream = reinterpret_cast<void*>(stream_of_cpu_().cast<Address>());
      else if (exchange_->stream(device_.type, device_.id, &stream)) throw py::error_already_set();
      return launches->run(stream, addresses, entered);
    }
    return {};
  }

  void add(const py::object& options, const py::list& operands, const py::sequence& launches) {
    if (!read(options, operands)) return;
    auto made = std::make_shared<Launches>(launches, addresses_);
    if (known_.size() >= most_)
      known_.erase(std::next(known_.begin(), static_cast<std::ptrdiff_t>(random_() % known_.size())));
    known_.emplace(hash_, Entry{layout_, options, std::move(made)});
  }

  void clear() { known_.clear(); }
  std::size_t size() const { return known_.size(); }

 private:
  struct Entry {
    std::vector<std::int64_t> layout;
    py::object options;
    std::shared_ptr<Launches> launches;
  };

  static bool same(const py::object& one, const py::handle& other) {
    const int equal = PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ);
    if (equal < 0) throw py::error_already_set();
    return equal == 1;
  }

  // Reads a call into layout_, addresses_, device_ and hash_; false where an operand is of another class than torch's own.
  bool read(const py::handle& options, const py::list& operands) {
    layout_.clear(), addresses_.clear();
    for (const py::handle operand : operands) {
      if (operand.is_none()) {
        layout_.push_back(-1), addresses_.push_back(0);
        continue;
      }
      const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(operand.ptr()));
      if (type != tensor_.ptr() && type != parameter_.ptr()) return false;
      View view;
      if (exchange_->view(operand.ptr(), &view)) throw py::error_already_set();
      if (view.dimensions > kMostDimensions) return false;
      device_ = view.device;
      layout_.push_back(view.dimensions | view.dtype.code << 8 | view.dtype.bits << 16 | view.device.type << 24 |
                        static_cast<std::int64_t>(view.device.id) << 32);
      layout_.insert(layout_.end(), view.shape, view.shape + view.dimensions);
      layout_.insert(layout_.end(), view.strides, view.strides + view.dimensions);
      addresses_.push_back(reinterpret_cast<Address>(view.data) + view.offset);
    }
    const Py_hash_t hash = PyObject_Hash(options.ptr());
    if (hash == -1) throw py::error_already_set();
    hash_ = static_cast<std::size_t>(hash);
    for (const std::int64_t number : layout_) hash_ = (hash_ ^ static_cast<std::size_t>(number)) * 0x9e3779b97f4a7c15;
    return true;
  }

  std::size_t most_;
  const Exchange* exchange_;
  py::object tensor_, parameter_, stream_of_cpu_;
  std::unordered_multimap<std::size_t, Entry> known_;
  std::mt19937 random_;
  std::vector<std::int64_t> layout_;
  std::vector<Address> addresses_;
  std::size_t hash_ = 0;
  decltype(View::device) device_{};
};

}  // namespace

PYBIND11_MODULE(_launcher, module) {
  module.doc() = "Launches of compiled kernels at other addresses; zbkern.kernels.triton.replay makes them.";
  py::class_<Table>(module, "Table")
      .def(py::init<std::size_t, const py::capsule&, py::type, py::type, py::object>(), py::arg("most"),
           py::arg("exchange"), py::arg("tensor"), py::arg("parameter"), py::arg("stream_of_cpu"))
      .def("run", &Table::run, py::arg("options"), py::arg("operands"), py::arg("entered"))
      .def("add", &Table::add, py::arg("options"), py::arg("operands"), py::arg("launches"))
      .def("clear", &Table::clear)
      .def("__len__", &Table::size);
}
