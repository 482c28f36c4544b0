// Numbers as they lie in registers, and a function of them in every lane.
#pragma once
#include <cmath>

#include "machine.h"

namespace ptx {

template <class S_, class V_>
struct Plain {  // S: what a register holds; V: what is computed with
  using S = S_;
  using V = V_;
  static V from(S s) { return std::bit_cast<V>(s); }
  static S to(V v) { return std::bit_cast<S>(v); }
};
using U32 = Plain<u32, u32>;
using S32 = Plain<u32, i32>;
using U64 = Plain<u64, u64>;
using S64 = Plain<u64, i64>;
using F32 = Plain<u32, float>;
using F64 = Plain<u64, double>;

struct U16 {
  using S = u32;
  using V = u32;
  static V from(S s) { return s & 0xffff; }
  static S to(V v) { return v & 0xffff; }
};
struct S16 {
  using S = u32;
  using V = i32;
  static V from(S s) { return static_cast<i16>(s); }
  static S to(V v) { return static_cast<u32>(v) & 0xffff; }
};
struct F16 {
  using S = u32;
  using V = float;
  static V from(S s) { return f16_of(s); }
  static S to(V v) { return to_f16(v); }
};
struct BF16 {
  using S = u32;
  using V = float;
  static V from(S s) { return bf16_of(s); }
  static S to(V v) { return to_bf16(v); }
};
inline float flush(float f) { return std::fabs(f) < 1.17549435e-38f ? std::copysign(0.0f, f) : f; }
struct FTZ {
  using S = u32;
  using V = float;
  static V from(S s) { return flush(f32_of(s)); }
  static S to(V v) { return bits_of(flush(v)); }
};

template <class T>
const typename T::S* in(Warp& w, const Operand& o) {
  if constexpr (sizeof(typename T::S) == 8) return in64(w, o);
  else return in32(w, o);
}

template <class T>
void out(Warp& w, const Operand& o, u32 m, const typename T::S* v) {
  if constexpr (sizeof(typename T::S) == 8) out64(w, o, m, v);
  else out32(w, o, m, v);
}

template <class TI, class TO, int N, class F>
void nary(Warp& w, const Instr& I, u32 m) {
  const typename TI::S* a = in<TI>(w, I.args[1].base);
  const typename TI::S* b = N > 1 ? in<TI>(w, I.args[2].base) : a;
  const typename TI::S* c = N > 2 ? in<TI>(w, I.args[3].base) : a;
  typename TO::S r[32];
  for (int l = 0; l < 32; ++l) {
    if constexpr (N == 1) r[l] = TO::to(F{}(TI::from(a[l])));
    else if constexpr (N == 2) r[l] = TO::to(F{}(TI::from(a[l]), TI::from(b[l])));
    else r[l] = TO::to(F{}(TI::from(a[l]), TI::from(b[l]), TI::from(c[l])));
  }
  out<TO>(w, I.args[0].base, m, r);
}

// f(lane) of 32 bits to every lane of m.
template <class F>
void each_lane(Warp& w, const Operand& o, u32 m, F f) {
  u32 r[32];
  for (u32 l = 0; l < 32; ++l) r[l] = f(l);
  out32(w, o, m, r);
}

}  // namespace ptx
