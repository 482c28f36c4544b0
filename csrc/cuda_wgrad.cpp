// What W decides on the host: the kernel, the tile, the number of blocks, and whether it can run at all.
#include "cuda_wgrad.h"

#include <algorithm>

namespace zbkern {

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument("zbkern: wgrad: " + message); }

void check_matrix(const char* name, const void* data, std::int64_t stride, int element_size) {
  if ((reinterpret_cast<std::uintptr_t>(data) | stride * element_size) % 16 != 0) {
    refuse(std::string(name) + " must begin, and each of its rows, at a multiple of 16 bytes; use impl='triton'");
  }
}

void check_product(const Wgrad& task, const Product& product) {
  if (product.n <= 0 || product.k <= 0 || (product.n | product.k) % 8 != 0) {
    refuse("dweight must be [N, K] with N and K multiples of 8; got [" + std::to_string(product.n) + ", " +
           std::to_string(product.k) + "]; use impl='triton'");
  }
  if (product.segments.empty()) refuse("a product needs a segment with rows");
  check_matrix("dweight", product.dweight, product.dweight_stride, size_of(task.dweight));
  for (const Segment& segment : product.segments) {
    if (segment.rows <= 0) refuse("a segment must have rows");
    check_matrix("x", segment.x, segment.x_stride, size_of(task.input));
    check_matrix("dy", segment.dy, segment.dy_stride, size_of(task.input));
  }
}

}  // namespace

// A tile of 256 columns needs a quarter less traffic between shared memory and the tensor cores per product than one
// of 128, but waits for its epilogue, as long as 610 tokens multiply (of Triton's W on an H200); of tiles of 128 columns
// only the last one does. Costs in tokens of a 128 x 128 tile; the 10% is an estimate, to be replaced by a measurement.
int choose_tile(std::int64_t n, std::int64_t k, std::int64_t tokens, int sms) {
  constexpr double kEpilogue = 610, kNarrow = 1.1;
  const std::int64_t rows = ceil_div(n, 2 * kTileN) * 2;
  const double wide = 2.0 * ceil_div(rows * ceil_div(k, 256), sms) * (tokens + kEpilogue);
  const double narrow = kNarrow * ceil_div(rows * ceil_div(k, 128), sms) * tokens + kEpilogue;
  return wide <= narrow ? 256 : 128;
}

std::int64_t count_tiles(std::int64_t n, std::int64_t k, int tile_k) {
  return ceil_div(n, 2 * kTileN) * 2 * ceil_div(k, tile_k);
}

int choose_blocks(std::int64_t tiles, int places, int max_tiles) {
  std::int64_t pairs = std::max<std::int64_t>(1, std::min<std::int64_t>(tiles, places) / 2);
  if (max_tiles > 0) pairs = std::max(pairs, ceil_div(tiles, 2 * max_tiles));
  return static_cast<int>(2 * pairs);
}

void choose_grid(Wgrad& task, int places, int max_tiles) {
  places = std::max(2, places);
  int wide = 0;
  for (const Product& product : task.products) {
    std::int64_t tokens = 0;
    for (const Segment& segment : product.segments) tokens += segment.rows;
    wide = std::max(wide, choose_tile(product.n, product.k, tokens, places));
  }
  if (task.tile_k == 0) task.tile_k = wide;
  std::int64_t tiles = 0;
  for (const Product& product : task.products) tiles += count_tiles(product.n, product.k, task.tile_k);
  task.blocks = choose_blocks(tiles, places, max_tiles);
}

void validate(const Wgrad& task) {
  if (task.input == Kind::float32) refuse("x and dy must be bfloat16 or float16");
  if (task.dweight != task.input && task.dweight != Kind::float32) refuse("dweight must be float32 or of x's type");
  if (task.dbias != task.input && task.dbias != Kind::float32) refuse("dbias must be float32 or of x's type");
  if (task.tile_k != 0 && task.tile_k != 128 && task.tile_k != 256) refuse("a tile has 128 or 256 columns");
  if (task.products.empty() || task.products.size() > kMaxProducts) {
    refuse("a launch takes 1 to " + std::to_string(kMaxProducts) + " weights");
  }
  std::size_t segments = 0;
  for (const Product& product : task.products) {
    check_product(task, product);
    segments += product.segments.size();
  }
  if (segments > kMaxSegments) refuse("a launch takes at most " + std::to_string(kMaxSegments) + " segments");
}

void wgrad(const Wgrad& task) {
  task.tile_k == 256 ? wgrad_256(task) : wgrad_128(task);
}

}  // namespace zbkern
