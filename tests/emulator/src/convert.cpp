// Handlers of cvt, and the formats of 8 bits.
#include <algorithm>

#include "handlers.h"
#include "lanes.h"

namespace ptx {

float e4m3_of(u8 bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float value = exponent == 15 && mantissa == 7 ? NAN
                      : exponent                      ? std::ldexp(8.0f + static_cast<float>(mantissa), exponent - 10)
                                                      : std::ldexp(static_cast<float>(mantissa), -9);
  return bits & 0x80 ? -value : value;
}

float e5m2_of(u8 bits) { return f16_of(static_cast<u32>(bits) << 8); }

namespace {

// To the nearest, ties to even, saturating: MANTISSA bits behind exponents from LEAST on, up to the number TOP.
template <int MANTISSA, int LEAST, u32 TOP>
u32 to_f8(float f) {
  const u32 sign = std::signbit(f) ? 0x80 : 0;
  const float a = std::fabs(f);
  if (std::isnan(f)) return 0x7f;
  if (a == 0) return sign;
  if (a >= 65536.0f) return sign | TOP;
  int exponent;
  std::frexp(a, &exponent);
  exponent = std::max(exponent - 1, LEAST);
  // With the hidden bit; one that is rounded up to the next power of two carries into the exponent.
  const u32 place = static_cast<u32>(std::nearbyint(a / std::ldexp(1.0f, exponent - MANTISSA)));
  return sign | std::min((static_cast<u32>(exponent - LEAST) << MANTISSA) + place, TOP);
}

template <class TI, class TO>
void cvt(Warp& w, const Instr& I, u32 m) {
  struct To {
    typename TO::V operator()(typename TI::V v) const { return static_cast<typename TO::V>(v); }
  };
  nary<TI, TO, 1, To>(w, I, m);
}

struct TF32 {  // to the nearest, ties away from zero
  using S = u32;
  using V = float;
  static S to(V v) {
    const u32 bits = bits_of(v);
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + (1u << 12)) & ~0x1fffu;
  }
};

template <class TO>
void cvt_pair(Warp& w, const Instr& I, u32 m) {
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base);
  each_lane(w, I.args[0].base, m, [&](u32 l) { return TO::to(f32_of(a[l])) << 16 | TO::to(f32_of(b[l])); });
}

struct E4M3 {
  static u32 to(float f) { return to_f8<3, -6, 0x7e>(f); }
};

struct E5M2 {
  static u32 to(float f) { return to_f8<2, -14, 0x7b>(f); }
};

template <class TO>
void cvt_f8x2(Warp& w, const Instr& I, u32 m) {
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base);
  each_lane(w, I.args[0].base, m, [&](u32 l) { return TO::to(f32_of(a[l])) << 8 | TO::to(f32_of(b[l])); });
}

struct Floor {
  float operator()(float v) const { return std::floor(v); }
};

}  // namespace

Handler choose_convert(Instr& I) {
  static const std::map<std::string, Handler> known = {
      {"f32.bf16", cvt<BF16, F32>},    {"f32.f16", cvt<F16, F32>},
      {"f64.f32", cvt<F32, F64>},      {"rn.bf16.f32", cvt<F32, BF16>},
      {"rn.f16.f32", cvt<F32, F16>},   {"rna.tf32.f32", cvt<F32, TF32>},
      {"rn.f32.s32", cvt<S32, F32>},   {"rn.f64.s32", cvt<S32, F64>},
      {"s64.s32", cvt<S32, S64>},      {"u64.u32", cvt<U32, U64>},
      {"u32.u64", cvt<U64, U32>},      {"u32.u16", cvt<U16, U32>},
      {"u16.u32", cvt<U32, U16>},      {"rn.bf16x2.f32", cvt_pair<BF16>},
      {"rn.f16x2.f32", cvt_pair<F16>}, {"rn.satfinite.e4m3x2.f32", cvt_f8x2<E4M3>},
      {"rn.f32.f64", cvt<F64, F32>},   {"rn.satfinite.e5m2x2.f32", cvt_f8x2<E5M2>},
      {"rmi.ftz.f32.f32", nary<F32, F32, 1, Floor>}};
  if (I.parts[0] != "cvt") return nullptr;
  std::string name = I.parts[1];
  for (std::size_t i = 2; i < I.parts.size(); ++i) name += "." + I.parts[i];
  const auto found = known.find(name);
  return found == known.end() ? nullptr : found->second;
}

}  // namespace ptx
