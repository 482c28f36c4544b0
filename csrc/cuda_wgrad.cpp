// What W decides on the host: the kernel, the tile, the number of blocks, and whether it can run at all.
#include "cuda_wgrad.h"

#include <algorithm>

namespace zbkern {

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument("zbkern: wgrad: " + message);
}

void check_matrix(const char* name, const void* data, std::int64_t stride, int element_size) {
  require(reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride * element_size % 16 == 0,
          std::string(name) + " must begin, and each of its rows, at a multiple of 16 bytes");
}

void check_product(const Wgrad& task, const Product& product) {
  require(product.n > 0 && product.k > 0, "a weight must have elements");
  require(product.n % 8 == 0 && product.k % 8 == 0, "N and K must be multiples of 8");
  require(!product.segments.empty(), "a product needs a segment with rows");
  check_matrix("dweight", product.dweight, product.dweight_stride, size_of(task.dweight));
  for (const Segment& segment : product.segments) {
    require(segment.rows > 0, "a segment must have rows");
    check_matrix("x", segment.x, segment.x_stride, size_of(task.input));
    check_matrix("dy", segment.dy, segment.dy_stride, size_of(task.input));
  }
}

}  // namespace

// A tile of 256 columns needs a quarter less traffic between shared memory and the tensor cores per product than one
// of 128, but leaves more of the GPU idle in the last wave. Costs in units of the time of a 128 x 128 tile; the 10% is
// an estimate, to be replaced by a measurement.
int choose_tile(std::int64_t n, std::int64_t k, int sms) {
  const std::int64_t rows = ceil_div(n, 2 * kTileN) * 2;
  const double wide = 2.0 * ceil_div(rows * ceil_div(k, 256), sms);
  const double narrow = 1.1 * ceil_div(rows * ceil_div(k, 128), sms);
  return wide <= narrow ? 256 : 128;
}

std::int64_t count_tiles(std::int64_t n, std::int64_t k, int tile_k) {
  return ceil_div(n, 2 * kTileN) * 2 * ceil_div(k, tile_k);
}

int choose_blocks(std::int64_t tiles, int sms, int max_tiles) {
  std::int64_t blocks = std::min<std::int64_t>(tiles, sms);
  if (max_tiles > 0) blocks = std::max(blocks, ceil_div(tiles, max_tiles));
  return static_cast<int>(std::max<std::int64_t>(2, blocks / 2 * 2));
}

void validate(const Wgrad& task, bool hopper) {
  require(task.input != Kind::float32, "x and dy must be bfloat16 or float16");
  require(task.dweight == task.input || task.dweight == Kind::float32, "dweight must be float32 or of x's type");
  require(task.dbias == task.input || task.dbias == Kind::float32, "dbias must be float32 or of x's type");
  require(!task.products.empty() && task.products.size() <= kMaxProducts,
          "a launch takes 1 to " + std::to_string(kMaxProducts) + " weights");
  require(task.tile_k == 128 || task.tile_k == 256, "tile_k must be 128 or 256");
  require(task.blocks > 0, "blocks must be positive");
  std::size_t segments = 0;
  for (const Product& product : task.products) {
    check_product(task, product);
    segments += product.segments.size();
  }
  require(segments <= kMaxSegments, "a launch takes at most " + std::to_string(kMaxSegments) + " segments");
  require(!hopper || has_sm90(), "this build has no code for 9.0a");
  require(hopper || task.products.size() == 1, "only GPUs of compute capability 9.0 take several weights in a launch");
}

void wgrad(const Wgrad& task, bool hopper) {
  const bool brain = task.input == Kind::bfloat16;
  if (hopper) {
    brain ? wgrad_bfloat16_sm90(task) : wgrad_float16_sm90(task);
  } else {
    brain ? wgrad_bfloat16_sm80(task) : wgrad_float16_sm80(task);
  }
}

}  // namespace zbkern
