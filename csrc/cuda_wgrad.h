// W: dweight [N, K] (+)= sum over segments of dy_i^T x_i, dbias [N] (+)= sum over segments and rows of dy_i.
// Device memory is passed by address: no torch here, and no CUTLASS.
#pragma once

#include <vector>

#include "cuda_launch.h"

#ifdef __CUDACC__
#define ZBKERN_HOST_DEVICE __host__ __device__
#else
#define ZBKERN_HOST_DEVICE
#endif

namespace zbkern {

struct Segment {            // one microbatch
  const void* x;            // [rows, K], rows x_stride elements apart
  const void* dy;           // [rows, N], rows dy_stride elements apart
  std::int64_t rows;
  std::int64_t x_stride;
  std::int64_t dy_stride;
};

struct Product {            // one weight
  void* dweight;            // [N, K], rows dweight_stride elements apart
  void* dbias;              // [N] or null
  std::int64_t n;
  std::int64_t k;
  std::int64_t dweight_stride;
  std::vector<Segment> segments;
};

struct Wgrad {
  std::vector<Product> products;
  Kind input;               // of x and dy
  Kind dweight;             // input or float32
  Kind dbias;               // input or float32
  bool accumulate;          // add to the outputs, or overwrite them
  int device;
  cudaStream_t stream;
  int tile_k = 0;           // columns of a tile of dweight: 128 or 256; 0 for what choose_grid takes
  int blocks = 0;           // to launch; each takes every blocks-th tile
};

// The descriptors of all products of a launch travel as kernel parameters: 16 KB of at most 32, copied at each launch.
constexpr int kMaxSegments = 16;
constexpr int kMaxProducts = 4;
constexpr int kTileN = 128;       // rows of a tile of dweight

// Where tile `index` is among rows x columns of them: bands of `band` rows; within a band down, then right.
struct TilePlace {
  int row, column;
};

ZBKERN_HOST_DEVICE inline TilePlace tile_place(int index, int rows, int columns, int band) {
  const int above = index / (band * columns) * band;
  const int within = index - above * columns;
  const int height = rows - above < band ? rows - above : band;
  return {above + within % height, within / height};
}

// Throws std::invalid_argument where wgrad cannot run the task; needs no GPU.
void validate(const Wgrad& task);

// Sets blocks, and tile_k where it is 0; places and max_tiles as for choose_blocks.
void choose_grid(Wgrad& task, int places, int max_tiles);

// Runs a valid task whose grid is chosen.
void wgrad(const Wgrad& task);

// Columns of a tile, 128 or 256, for one weight and the tokens of all its segments on that many SMs.
int choose_tile(std::int64_t n, std::int64_t k, std::int64_t tokens, int sms);

// Tiles of one weight; blocks come in pairs, so their rows are even.
std::int64_t count_tiles(std::int64_t n, std::int64_t k, int tile_k);

// Blocks of a launch: at most `places`, the number that can run at a time, and more where a block may not take above
// max_tiles tiles (0: any number), so that a kernel beside it gets its SMs back soon. Even, for blocks come in pairs.
int choose_blocks(std::int64_t tiles, int places, int max_tiles);

void wgrad_128(const Wgrad& task);
void wgrad_256(const Wgrad& task);

}  // namespace zbkern
