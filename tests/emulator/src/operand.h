// An operand of a product in shared memory: where its numbers lie.
#pragma once
#include "machine.h"

namespace ptx {

struct Layout {  // from its descriptor
  u32 start, leading, stride;
  int swizzle;  // 0 none, 3: 128 bytes, 2: 64, 1: 32
  bool turned;  // the summed dimension is the slow one
  int element;  // bytes
};

inline u32 swizzled(u32 address, int mode) {
  static const u32 masks[] = {0, 1, 3, 7};
  return address ^ ((address >> 7 & masks[mode]) << 4);
}

// Where 16 bytes of row r (of M or N) and of k begin; along k where not turned, else along r.
inline u32 chunk_at(const Layout& o, u32 r, u32 k) {
  const u32 T = 16 / static_cast<u32>(o.element);
  u32 at;
  if (!o.turned) {
    const u32 chunk = k / T;  // of 16 bytes along k
    if (!o.swizzle) at = r % 8 * 16 + r / 8 * o.stride + chunk * o.leading;
    else at = r % 8 * (16u << o.swizzle) + r / 8 * o.stride + chunk * 16;
  } else {
    const u32 chunk = r / T;
    const u32 wide = 1u << o.swizzle;  // chunks in a row of the pattern
    if (!o.swizzle) at = k % 8 * 16 + k / 8 * o.leading + chunk * o.stride;
    else at = chunk % wide * 16 + chunk / wide * o.leading + k % 8 * (16 * wide) + k / 8 * o.stride;
  }
  return swizzled(o.start + at, o.swizzle);
}

// Calls f(r, k, offset) for each 16 bytes of rows first..first + rows, K columns.
template <class F>
void chunks(const Layout& o, u32 first, u32 rows, u32 K, F f) {
  const u32 T = 16 / static_cast<u32>(o.element);
  if (!o.turned) {
    for (u32 r = first; r < first + rows; ++r)
      for (u32 k = 0; k < K; k += T) f(r, k, chunk_at(o, r, k));
  } else {
    for (u32 k = 0; k < K; ++k)
      for (u32 r = first; r < first + rows; r += T) f(r, k, chunk_at(o, r, k));
  }
}

void decode16(const void* from, Type type, float* out);  // 16 bytes of an operand

// Number (r, k) to out[(r - first) * row + k * column].
void gather(const Layout& o, const u8* shared, Type type, u32 first, u32 rows, u32 K, float* out, u32 row, u32 column);

}  // namespace ptx
