// Handlers of what computes in registers, and decode(): which handler an instruction has.
#include <algorithm>
#include <cmath>
#include <functional>

#include "handlers.h"

namespace ptx {

// ---- formats of 8 bits ----

float e4m3_of(u8 bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  float value = exponent == 15 && mantissa == 7 ? NAN
                : exponent                      ? std::ldexp(8.0f + static_cast<float>(mantissa), exponent - 10)
                                                : std::ldexp(static_cast<float>(mantissa), -9);
  return bits & 0x80 ? -value : value;
}

float e5m2_of(u8 bits) { return f16_of(static_cast<u32>(bits) << 8); }

static u8 narrow(float f, int mantissa_bits, int bias, float largest, u8 largest_bits, u8 nan) {
  const u8 sign = std::signbit(f) ? 0x80 : 0;
  if (std::isnan(f)) return nan;
  const float a = std::fabs(f);
  if (a >= largest) return sign | largest_bits;
  if (a == 0) return sign;
  int exponent;
  std::frexp(a, &exponent);
  exponent = std::max(exponent - 1, 1 - bias);
  const float step = std::ldexp(1.0f, exponent - mantissa_bits);
  const float rounded = std::nearbyint(a / step) * step;
  if (rounded >= largest) return sign | largest_bits;
  const int place = static_cast<int>(rounded / step);  // with the hidden bit
  if (place < (1 << mantissa_bits)) return sign | static_cast<u8>(place);
  if (place == (2 << mantissa_bits)) return sign | static_cast<u8>((exponent + 1 + bias) << mantissa_bits);
  return sign | static_cast<u8>(((exponent + bias) << mantissa_bits) + (place - (1 << mantissa_bits)));
}
u8 to_e4m3(float f) { return narrow(f, 3, 7, 448.0f, 0x7e, 0x7f); }
u8 to_e5m2(float f) { return narrow(f, 2, 15, 57344.0f, 0x7b, 0x7f); }

namespace {

template <class S_, class V_>
struct Plain {
  using S = S_;
  using V = V_;
  static V from(S s) {
    V v;
    if constexpr (sizeof(V) == sizeof(S)) std::memcpy(&v, &s, sizeof(V));
    else v = static_cast<V>(s);
    return v;
  }
  static S to(V v) {
    if constexpr (sizeof(V) == sizeof(S)) {
      S s;
      std::memcpy(&s, &v, sizeof(S));
      return s;
    } else return static_cast<S>(v);
  }
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
struct SAT {
  using S = u32;
  using V = float;
  static V from(S s) { return f32_of(s); }
  static S to(V v) { return bits_of(v > 0.0f ? std::min(v, 1.0f) : 0.0f); }
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

template <class T, int N, class F>
void packed(Warp& w, const Instr& I, u32 m) {  // two halves
  const u32* a = in32(w, I.args[1].base);
  const u32* b = N > 1 ? in32(w, I.args[2].base) : a;
  const u32* c = N > 2 ? in32(w, I.args[3].base) : a;
  u32 r[32];
  for (int l = 0; l < 32; ++l) {
    r[l] = 0;
    for (int h = 0; h < 32; h += 16) {
      float v;
      if constexpr (N == 1) v = F{}(T::from(a[l] >> h & 0xffff));
      else if constexpr (N == 2) v = F{}(T::from(a[l] >> h & 0xffff), T::from(b[l] >> h & 0xffff));
      else v = F{}(T::from(a[l] >> h & 0xffff), T::from(b[l] >> h & 0xffff), T::from(c[l] >> h & 0xffff));
      r[l] |= T::to(v) << h;
    }
  }
  out32(w, I.args[0].base, m, r);
}

template <int N, class F>
Handler floats(const Instr& I, F) {
  const bool ftz = I.has("ftz"), sat = I.has("sat");
  switch (I.type) {
    case Type::f32: return sat ? nary<F32, SAT, N, F> : ftz ? nary<FTZ, FTZ, N, F> : nary<F32, F32, N, F>;
    case Type::f64:
      if constexpr (!std::is_void_v<F>) return nary<F64, F64, N, F>;
      return nullptr;
    case Type::f16: return nary<F16, F16, N, F>;
    case Type::bf16: return nary<BF16, BF16, N, F>;
    case Type::f16x2: return packed<F16, N, F>;
    case Type::bf16x2: return packed<BF16, N, F>;
    default: return nullptr;
  }
}

template <int N, class F>
Handler integers(const Instr& I, F) {
  switch (I.type) {
    case Type::u16:
    case Type::b16: return nary<U16, U16, N, F>;
    case Type::s16: return nary<S16, S16, N, F>;
    case Type::u32:
    case Type::b32: return nary<U32, U32, N, F>;
    case Type::s32: return nary<S32, S32, N, F>;
    case Type::u64:
    case Type::b64: return nary<U64, U64, N, F>;
    case Type::s64: return nary<S64, S64, N, F>;
    default: return nullptr;
  }
}

template <int N, class F>
void packed_float(Warp& w, const Instr& I, u32 m) {  // f32x2
  const u64* a = in64(w, I.args[1].base);
  const u64* b = in64(w, I.args[2].base);
  const u64* c = N > 2 ? in64(w, I.args[3].base) : a;
  const bool ftz = I.has("ftz");
  u64 r[32];
  for (int l = 0; l < 32; ++l) {
    r[l] = 0;
    for (int h = 0; h < 64; h += 32) {
      const auto part = [&](u64 v) {
        const float f = f32_of(static_cast<u32>(v >> h));
        return ftz ? flush(f) : f;
      };
      float v;
      if constexpr (N == 2) v = F{}(part(a[l]), part(b[l]));
      else v = F{}(part(a[l]), part(b[l]), part(c[l]));
      r[l] |= static_cast<u64>(bits_of(ftz ? flush(v) : v)) << h;
    }
  }
  out64(w, I.args[0].base, m, r);
}

bool is_float(Type t) {
  return t == Type::f16 || t == Type::f32 || t == Type::f64 || t == Type::bf16 || t == Type::f16x2 || t == Type::bf16x2;
}

template <class V>
auto wrap(V v) {
  using U = std::make_unsigned_t<V>;
  return static_cast<U>(v);
}

struct Add {
  template <class V>
  V operator()(V a, V b) const {
    if constexpr (std::is_integral_v<V>) return static_cast<V>(wrap(a) + wrap(b));
    else return a + b;
  }
};
struct Sub {
  template <class V>
  V operator()(V a, V b) const {
    if constexpr (std::is_integral_v<V>) return static_cast<V>(wrap(a) - wrap(b));
    else return a - b;
  }
};
struct Mul {
  template <class V>
  V operator()(V a, V b) const {
    if constexpr (std::is_integral_v<V>) return static_cast<V>(wrap(a) * wrap(b));
    else return a * b;
  }
};
struct Mad {
  template <class V>
  V operator()(V a, V b, V c) const {
    if constexpr (std::is_integral_v<V>) return static_cast<V>(wrap(a) * wrap(b) + wrap(c));
    else return std::fma(a, b, c);
  }
};
struct Div {
  template <class V>
  V operator()(V a, V b) const {
    if constexpr (std::is_integral_v<V>) {
      if (b == 0) return static_cast<V>(-1);
      if constexpr (std::is_signed_v<V>)
        if (b == static_cast<V>(-1)) return static_cast<V>(0 - wrap(a));
      return a / b;
    } else return a / b;
  }
};
struct Rem {
  template <class V>
  V operator()(V a, V b) const {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<V>)
      if (b == static_cast<V>(-1)) return 0;
    return a % b;
  }
};
struct Min {
  template <class V>
  V operator()(V a, V b) const {
    if constexpr (std::is_integral_v<V>) return a < b ? a : b;
    else {
      if (a != a) return b;
      if (b != b) return a;
      if (a == b) return std::signbit(a) ? a : b;
      return a < b ? a : b;
    }
  }
};
struct Max {
  template <class V>
  V operator()(V a, V b) const {
    if constexpr (std::is_integral_v<V>) return a > b ? a : b;
    else {
      if (a != a) return b;
      if (b != b) return a;
      if (a == b) return std::signbit(a) ? b : a;
      return a > b ? a : b;
    }
  }
};
struct MinNaN {
  template <class V>
  V operator()(V a, V b) const {
    if (a != a || b != b) return static_cast<V>(NAN);
    return Min{}(a, b);
  }
};
struct MaxNaN {
  template <class V>
  V operator()(V a, V b) const {
    if (a != a || b != b) return static_cast<V>(NAN);
    return Max{}(a, b);
  }
};
struct Min3 {
  template <class V>
  V operator()(V a, V b, V c) const {
    return Min{}(Min{}(a, b), c);
  }
};
struct Max3 {
  template <class V>
  V operator()(V a, V b, V c) const {
    return Max{}(Max{}(a, b), c);
  }
};
struct MinRelu {
  template <class V>
  V operator()(V a, V b) const {
    return Max{}(Min{}(a, b), static_cast<V>(0));
  }
};
struct MaxRelu {
  template <class V>
  V operator()(V a, V b) const {
    return Max{}(Max{}(a, b), static_cast<V>(0));
  }
};
struct Abs {
  template <class V>
  V operator()(V a) const {
    if constexpr (std::is_integral_v<V>) return a < 0 ? static_cast<V>(0 - wrap(a)) : a;
    else return std::fabs(a);
  }
};
struct Neg {
  template <class V>
  V operator()(V a) const {
    if constexpr (std::is_integral_v<V>) return static_cast<V>(0 - wrap(a));
    else return -a;
  }
};
struct Fma {
  template <class V>
  V operator()(V a, V b, V c) const {
    return std::fma(a, b, c);
  }
};
struct FmaRelu {
  template <class V>
  V operator()(V a, V b, V c) const {
    V v = std::fma(a, b, c);
    return v > 0 ? v : v != v ? v : static_cast<V>(0);
  }
};
struct Sqrt {
  template <class V>
  V operator()(V a) const {
    return std::sqrt(a);
  }
};
struct Rsqrt {
  template <class V>
  V operator()(V a) const {
    return 1 / std::sqrt(a);
  }
};
struct Rcp {
  template <class V>
  V operator()(V a) const {
    return 1 / a;
  }
};
struct Ex2 {
  template <class V>
  V operator()(V a) const {
    return std::exp2(a);
  }
};
struct Lg2 {
  template <class V>
  V operator()(V a) const {
    return std::log2(a);
  }
};
struct Sin {
  template <class V>
  V operator()(V a) const {
    return std::sin(a);
  }
};
struct Cos {
  template <class V>
  V operator()(V a) const {
    return std::cos(a);
  }
};
struct Tanh {
  template <class V>
  V operator()(V a) const {
    return std::tanh(a);
  }
};
struct CopySign {
  template <class V>
  V operator()(V a, V b) const {
    return std::copysign(b, a);
  }
};
struct And {
  template <class V>
  V operator()(V a, V b) const {
    return a & b;
  }
};
struct Or {
  template <class V>
  V operator()(V a, V b) const {
    return a | b;
  }
};
struct Xor {
  template <class V>
  V operator()(V a, V b) const {
    return a ^ b;
  }
};
struct Not {
  template <class V>
  V operator()(V a) const {
    return ~a;
  }
};
struct MulHi {
  template <class V>
  V operator()(V a, V b) const {
    if constexpr (sizeof(V) == 4) {
      if constexpr (std::is_signed_v<V>) return static_cast<V>((static_cast<i64>(a) * b) >> 32);
      else return static_cast<V>((static_cast<u64>(a) * b) >> 32);
    } else {
      if constexpr (std::is_signed_v<V>) return static_cast<V>((static_cast<__int128>(a) * b) >> 64);
      else return static_cast<V>((static_cast<unsigned __int128>(a) * b) >> 64);
    }
  }
};
struct MadHi {
  template <class V>
  V operator()(V a, V b, V c) const {
    return static_cast<V>(wrap(MulHi{}(a, b)) + wrap(c));
  }
};

void shift_left(Warp& w, const Instr& I, u32 m) {
  const u32* b = in32(w, I.args[2].base);
  const int bits = 8 * bytes_of(I.type);
  if (bits == 64) {
    const u64* a = in64(w, I.args[1].base);
    u64 r[32];
    for (int l = 0; l < 32; ++l) r[l] = b[l] < 64 ? a[l] << b[l] : 0;
    return out64(w, I.args[0].base, m, r);
  }
  const u32* a = in32(w, I.args[1].base);
  u32 r[32];
  const u32 keep = bits == 16 ? 0xffff : kAll;
  for (int l = 0; l < 32; ++l) r[l] = (b[l] < 32 ? a[l] << b[l] : 0) & keep;
  out32(w, I.args[0].base, m, r);
}

void shift_right(Warp& w, const Instr& I, u32 m) {
  const u32* b = in32(w, I.args[2].base);
  const bool is_signed = I.type == Type::s16 || I.type == Type::s32 || I.type == Type::s64;
  const int bits = 8 * bytes_of(I.type);
  if (bits == 64) {
    const u64* a = in64(w, I.args[1].base);
    u64 r[32];
    for (int l = 0; l < 32; ++l) {
      if (is_signed) r[l] = static_cast<u64>(static_cast<i64>(a[l]) >> std::min(b[l], 63u));
      else r[l] = b[l] < 64 ? a[l] >> b[l] : 0;
    }
    return out64(w, I.args[0].base, m, r);
  }
  const u32* a = in32(w, I.args[1].base);
  u32 r[32];
  for (int l = 0; l < 32; ++l) {
    const u32 value =
        bits == 16 ? (is_signed ? static_cast<u32>(static_cast<i32>(static_cast<i16>(a[l]))) : a[l] & 0xffff) : a[l];
    if (is_signed) r[l] = static_cast<u32>(static_cast<i32>(value) >> std::min(b[l], 31u));
    else r[l] = b[l] < 32 ? value >> b[l] : 0;
    if (bits == 16) r[l] &= 0xffff;
  }
  out32(w, I.args[0].base, m, r);
}

template <class TI, class TO, bool ADD>
void mul_wide(Warp& w, const Instr& I, u32 m) {
  const auto* a = in<TI>(w, I.args[1].base);
  const auto* b = in<TI>(w, I.args[2].base);
  const typename TO::S* c = nullptr;
  if constexpr (ADD) c = in<TO>(w, I.args[3].base);
  typename TO::S r[32];
  for (int l = 0; l < 32; ++l) {
    using V = typename TO::V;
    V v = static_cast<V>(wrap(static_cast<V>(TI::from(a[l]))) * wrap(static_cast<V>(TI::from(b[l]))));
    if constexpr (ADD) v = static_cast<V>(wrap(v) + wrap(TO::from(c[l])));
    r[l] = TO::to(v);
  }
  out<TO>(w, I.args[0].base, m, r);
}

template <bool ADD>
Handler wide_of(const Instr& I) {
  switch (I.type) {
    case Type::u16: return mul_wide<U16, U32, ADD>;
    case Type::s16: return mul_wide<S16, S32, ADD>;
    case Type::u32: return mul_wide<U32, U64, ADD>;
    case Type::s32: return mul_wide<S32, S64, ADD>;
    default: return nullptr;
  }
}

void selp(Warp& w, const Instr& I, u32 m) {
  const u32 p = in_pred(w, I.args[3].base);
  if (bytes_of(I.type) == 8) {
    const u64* a = in64(w, I.args[1].base);
    const u64* b = in64(w, I.args[2].base);
    u64 r[32];
    for (int l = 0; l < 32; ++l) r[l] = p >> l & 1 ? a[l] : b[l];
    return out64(w, I.args[0].base, m, r);
  }
  const u32* a = in32(w, I.args[1].base);
  const u32* b = in32(w, I.args[2].base);
  u32 r[32];
  for (int l = 0; l < 32; ++l) r[l] = p >> l & 1 ? a[l] : b[l];
  out32(w, I.args[0].base, m, r);
}

// ---- comparisons ----

enum Compare { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan_ };
const std::map<std::string, Compare> kCompares = {{"eq", eq},   {"ne", ne},   {"lt", lt},   {"le", le},   {"gt", gt},
                                                  {"ge", ge},   {"lo", lt},   {"ls", le},   {"hi", gt},   {"hs", ge},
                                                  {"equ", equ}, {"neu", neu}, {"ltu", ltu}, {"leu", leu}, {"gtu", gtu},
                                                  {"geu", geu}, {"num", num}, {"nan", nan_}};

template <int C, class V>
bool compared(V a, V b) {
  if constexpr (C == eq) return a == b;
  else if constexpr (C == ne) return a == a && b == b && a != b;
  else if constexpr (C == lt) return a < b;
  else if constexpr (C == le) return a <= b;
  else if constexpr (C == gt) return a > b;
  else if constexpr (C == ge) return a >= b;
  else if constexpr (C == equ) return !(a < b || a > b);
  else if constexpr (C == neu) return a != b;
  else if constexpr (C == ltu) return !(a >= b);
  else if constexpr (C == leu) return !(a > b);
  else if constexpr (C == gtu) return !(a <= b);
  else if constexpr (C == geu) return !(a < b);
  else if constexpr (C == num) return a == a && b == b;
  else return a != a || b != b;
}

void write_setp(Warp& w, const Instr& I, u32 m, u32 result) {  // extra: 0 plain, 1 and, 2 or, 3 xor
  u32 other = ~result;
  if (I.extra) {
    const u32 c = in_pred(w, I.args[3].base);
    if (I.extra == 1) result &= c, other &= c;
    if (I.extra == 2) result |= c, other |= c;
    if (I.extra == 3) result ^= c, other ^= c;
  }
  out_pred(w, I.args[0].base, m, result);
  if (I.args[0].form == Arg::pair) out_pred(w, I.args[0].second, m, other);
}

template <class T, int C>
void setp(Warp& w, const Instr& I, u32 m) {
  const auto* a = in<T>(w, I.args[1].base);
  const auto* b = in<T>(w, I.args[2].base);
  u32 r = 0;
  for (int l = 0; l < 32; ++l) r |= static_cast<u32>(compared<C>(T::from(a[l]), T::from(b[l]))) << l;
  write_setp(w, I, m, r);
}

template <class T, int C>
void set(Warp& w, const Instr& I, u32 m) {
  const auto* a = in<T>(w, I.args[1].base);
  const auto* b = in<T>(w, I.args[2].base);
  u32 r[32];
  for (int l = 0; l < 32; ++l) {
    const bool yes = compared<C>(T::from(a[l]), T::from(b[l]));
    r[l] = yes ? (I.type == Type::f32    ? 0x3f800000u
                  : I.type == Type::f16  ? 0x3c00u
                  : I.type == Type::bf16 ? 0x3f80u
                                         : kAll)
               : 0;
  }
  out32(w, I.args[0].base, m, r);
}

bool compared_by(int c, float a, float b) {
  switch (c) {
#define CASE(x) \
  case x: return compared<x>(a, b);
    CASE(eq)
    CASE(ne)
    CASE(lt) CASE(le) CASE(gt) CASE(ge) CASE(equ) CASE(neu) CASE(ltu) CASE(leu) CASE(gtu) CASE(geu) CASE(num) CASE(nan_)
#undef CASE
  }
  return false;
}

template <class T>
void setp_packed(Warp& w, const Instr& I, u32 m) {  // p of the low halves, q of the high ones
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base);
  u32 low = 0, high = 0;
  for (int l = 0; l < 32; ++l) {
    low |= static_cast<u32>(compared_by(I.extra, T::from(a[l] & 0xffff), T::from(b[l] & 0xffff))) << l;
    high |= static_cast<u32>(compared_by(I.extra, T::from(a[l] >> 16), T::from(b[l] >> 16))) << l;
  }
  out_pred(w, I.args[0].base, m, low);
  if (I.args[0].form == Arg::pair) out_pred(w, I.args[0].second, m, high);
}

template <class T, bool SET>
Handler compare_of(Compare c) {
  switch (c) {
#define CASE(x)                          \
  case x:                                \
    if constexpr (SET) return set<T, x>; \
    else return setp<T, x>;
    CASE(eq)
    CASE(ne)
    CASE(lt) CASE(le) CASE(gt) CASE(ge) CASE(equ) CASE(neu) CASE(ltu) CASE(leu) CASE(gtu) CASE(geu) CASE(num) CASE(nan_)
#undef CASE
  }
  return nullptr;
}

template <bool SET>
Handler comparison(const Instr& I, Type type) {
  const auto found = kCompares.find(I.parts[1]);
  if (found == kCompares.end()) return nullptr;
  switch (type) {
    case Type::u16:
    case Type::b16: return compare_of<U16, SET>(found->second);
    case Type::s16: return compare_of<S16, SET>(found->second);
    case Type::u32:
    case Type::b32: return compare_of<U32, SET>(found->second);
    case Type::s32: return compare_of<S32, SET>(found->second);
    case Type::u64:
    case Type::b64: return compare_of<U64, SET>(found->second);
    case Type::s64: return compare_of<S64, SET>(found->second);
    case Type::f32: return I.has("ftz") ? compare_of<FTZ, SET>(found->second) : compare_of<F32, SET>(found->second);
    case Type::f64: return compare_of<F64, SET>(found->second);
    case Type::f16: return compare_of<F16, SET>(found->second);
    case Type::bf16: return compare_of<BF16, SET>(found->second);
    default: return nullptr;
  }
}

template <class F>
void pred_op(Warp& w, const Instr& I, u32 m) {
  out_pred(w, I.args[0].base, m, F{}(in_pred(w, I.args[1].base), in_pred(w, I.args[I.args.size() > 2 ? 2 : 1].base)));
}

// ---- moves ----

void mov32(Warp& w, const Instr& I, u32 m) { out32(w, I.args[0].base, m, in32(w, I.args[1].base)); }
void mov64(Warp& w, const Instr& I, u32 m) { out64(w, I.args[0].base, m, in64(w, I.args[1].base)); }
void mov_pred(Warp& w, const Instr& I, u32 m) { out_pred(w, I.args[0].base, m, in_pred(w, I.args[1].base)); }

void mov_parameter(Warp& w, const Instr& I, u32 m) {  // its address
  u64 r[32];
  std::fill_n(r, 32, reinterpret_cast<u64>(grid->parameter) + I.args[1].base.value);
  out64(w, I.args[0].base, m, r);
}

void mov_pack(Warp& w, const Instr& I, u32 m) {  // b32 <- {b16, b16}, b64 <- {b32, b32}, ...
  const auto& items = I.args[1].items;
  const int bits = 8 * bytes_of(I.type) / static_cast<int>(items.size());
  u64 r[32] = {};
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (bits <= 32) {
      const u32* a = in32(w, items[i]);
      const u32 keep = bits == 32 ? kAll : (1u << bits) - 1;
      for (int l = 0; l < 32; ++l) r[l] |= static_cast<u64>(a[l] & keep) << (bits * static_cast<int>(i));
    }
  }
  if (bytes_of(I.type) == 8) return out64(w, I.args[0].base, m, r);
  u32 narrow[32];
  for (int l = 0; l < 32; ++l) narrow[l] = static_cast<u32>(r[l]);
  out32(w, I.args[0].base, m, narrow);
}

void mov_unpack(Warp& w, const Instr& I, u32 m) {
  const auto& items = I.args[0].items;
  const int bits = 8 * bytes_of(I.type) / static_cast<int>(items.size());
  u64 a[32];
  if (bytes_of(I.type) == 8) {
    std::memcpy(a, in64(w, I.args[1].base), sizeof(a));
  } else {
    const u32* from = in32(w, I.args[1].base);
    for (int l = 0; l < 32; ++l) a[l] = from[l];
  }
  for (std::size_t i = 0; i < items.size(); ++i) {
    u32 r[32];
    const u32 keep = bits == 32 ? kAll : (1u << bits) - 1;
    for (int l = 0; l < 32; ++l) r[l] = static_cast<u32>(a[l] >> (bits * static_cast<int>(i))) & keep;
    out32(w, items[i], m, r);
  }
}

void mov128(Warp& w, const Instr& I, u32 m) {  // b128 <- {b64, b64} and back
  const auto place = [&](const Operand& o) { return w.r128 + o.index * 64; };
  if (I.args[1].form == Arg::vector) {
    const u64* a = in64(w, I.args[1].items[0]);
    const u64* b = in64(w, I.args[1].items[1]);
    u64* to = place(I.args[0].base);
    for (int l = 0; l < 32; ++l)
      if (m >> l & 1) to[2 * l] = a[l], to[2 * l + 1] = b[l];
  } else if (I.args[0].form == Arg::vector) {
    const u64* from = place(I.args[1].base);
    u64 a[32], b[32];
    for (int l = 0; l < 32; ++l) a[l] = from[2 * l], b[l] = from[2 * l + 1];
    out64(w, I.args[0].items[0], m, a), out64(w, I.args[0].items[1], m, b);
  } else {
    const u64* from = place(I.args[1].base);
    u64* to = place(I.args[0].base);
    for (int l = 0; l < 32; ++l)
      if (m >> l & 1) to[2 * l] = from[2 * l], to[2 * l + 1] = from[2 * l + 1];
  }
}

// ---- bits ----

void lop3(Warp& w, const Instr& I, u32 m) {
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base), *c = in32(w, I.args[3].base);
  const u32 table = static_cast<u32>(I.args[4].base.value);
  u32 r[32] = {};
  for (int i = 0; i < 8; ++i)
    if (table >> i & 1)
      for (int l = 0; l < 32; ++l) r[l] |= (i & 4 ? a[l] : ~a[l]) & (i & 2 ? b[l] : ~b[l]) & (i & 1 ? c[l] : ~c[l]);
  out32(w, I.args[0].base, m, r);
}

void prmt(Warp& w, const Instr& I, u32 m) {
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base), *c = in32(w, I.args[3].base);
  u32 r[32];
  for (int l = 0; l < 32; ++l) {
    const u64 both = static_cast<u64>(b[l]) << 32 | a[l];
    r[l] = 0;
    for (int i = 0; i < 4; ++i) {
      const u32 pick = c[l] >> (4 * i) & 15;
      u32 byte = static_cast<u32>(both >> (8 * (pick & 7))) & 0xff;
      if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
      r[l] |= byte << (8 * i);
    }
  }
  out32(w, I.args[0].base, m, r);
}

void shf(Warp& w, const Instr& I, u32 m) {
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base), *c = in32(w, I.args[3].base);
  const bool left = I.has("l"), wrapped = I.has("wrap");
  u32 r[32];
  for (int l = 0; l < 32; ++l) {
    const u32 n = wrapped ? c[l] & 31 : std::min(c[l], 32u);
    const u64 both = static_cast<u64>(b[l]) << 32 | a[l];
    r[l] = left ? static_cast<u32>((both << n) >> 32) : static_cast<u32>(both >> n);
  }
  out32(w, I.args[0].base, m, r);
}

void bfe(Warp& w, const Instr& I, u32 m) {
  const bool is_signed = I.type == Type::s32 || I.type == Type::s64;
  const u32 *b = in32(w, I.args[2].base), *c = in32(w, I.args[3].base);
  const int bits = 8 * bytes_of(I.type);
  u64 a[32], r[32];
  if (bits == 64) std::memcpy(a, in64(w, I.args[1].base), sizeof(a));
  else {
    const u32* from = in32(w, I.args[1].base);
    for (int l = 0; l < 32; ++l) a[l] = from[l];
  }
  for (int l = 0; l < 32; ++l) {
    const int position = static_cast<int>(b[l] & 0xff), length = static_cast<int>(c[l] & 0xff);
    const int top = std::min(position + length - 1, bits - 1);
    const u64 fill = is_signed && length ? (a[l] >> top & 1) : 0;
    r[l] = 0;
    for (int i = 0; i < bits; ++i) r[l] |= (i < length && position + i < bits ? a[l] >> (position + i) & 1 : fill) << i;
  }
  if (bits == 64) return out64(w, I.args[0].base, m, r);
  u32 narrow[32];
  for (int l = 0; l < 32; ++l) narrow[l] = static_cast<u32>(r[l]);
  out32(w, I.args[0].base, m, narrow);
}

void bfi(Warp& w, const Instr& I, u32 m) {
  const u32 *c = in32(w, I.args[3].base), *d = in32(w, I.args[4].base);
  const int bits = 8 * bytes_of(I.type);
  if (bits == 64) {
    const u64 *a = in64(w, I.args[1].base), *b = in64(w, I.args[2].base);
    u64 r[32];
    for (int l = 0; l < 32; ++l) {
      const int position = static_cast<int>(c[l] & 0xff), length = static_cast<int>(d[l] & 0xff);
      r[l] = b[l];
      for (int i = 0; i < length && position + i < 64; ++i)
        r[l] = (r[l] & ~(u64{1} << (position + i))) | (a[l] >> i & 1) << (position + i);
    }
    return out64(w, I.args[0].base, m, r);
  }
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base);
  u32 r[32];
  for (int l = 0; l < 32; ++l) {
    const u32 position = c[l] & 0xff, length = std::min(d[l] & 0xff, 32u);
    const u64 keep = position < 32 ? ((u64{1} << length) - 1) << position : 0;
    r[l] = static_cast<u32>((b[l] & ~keep) | ((static_cast<u64>(a[l]) << (position & 31)) & keep));
  }
  out32(w, I.args[0].base, m, r);
}

template <class F>
void count_bits(Warp& w, const Instr& I, u32 m) {
  u32 r[32];
  if (bytes_of(I.type) == 8) {
    const u64* a = in64(w, I.args[1].base);
    for (int l = 0; l < 32; ++l) r[l] = F{}(a[l], 64);
  } else {
    const u32* a = in32(w, I.args[1].base);
    for (int l = 0; l < 32; ++l) r[l] = F{}(a[l], 32);
  }
  out32(w, I.args[0].base, m, r);
}
struct Popc {
  u32 operator()(u64 a, int) const { return static_cast<u32>(__builtin_popcountll(a)); }
};
struct Clz {
  u32 operator()(u64 a, int bits) const {
    return a ? static_cast<u32>(__builtin_clzll(a) - (64 - bits)) : static_cast<u32>(bits);
  }
};

void bfind(Warp& w, const Instr& I, u32 m) {
  const bool shift = I.has("shiftamt"), is_signed = I.type == Type::s32 || I.type == Type::s64;
  const int bits = 8 * bytes_of(I.type);
  u32 r[32];
  for (int l = 0; l < 32; ++l) {
    u64 a = bits == 64 ? in64(w, I.args[1].base)[l] : in32(w, I.args[1].base)[l];
    if (is_signed && (a >> (bits - 1) & 1)) a = ~a & (bits == 64 ? ~u64{0} : 0xffffffffu);
    const int top = a ? 63 - __builtin_clzll(a) : -1;
    r[l] = top < 0 ? kAll : static_cast<u32>(shift ? bits - 1 - top : top);
  }
  out32(w, I.args[0].base, m, r);
}

void brev(Warp& w, const Instr& I, u32 m) {
  const int bits = 8 * bytes_of(I.type);
  u64 r[32];
  u32 narrow[32];
  for (int l = 0; l < 32; ++l) {
    const u64 a = bits == 64 ? in64(w, I.args[1].base)[l] : in32(w, I.args[1].base)[l];
    r[l] = 0;
    for (int i = 0; i < bits; ++i) r[l] |= (a >> i & 1) << (bits - 1 - i);
    narrow[l] = static_cast<u32>(r[l]);
  }
  bits == 64 ? out64(w, I.args[0].base, m, r) : out32(w, I.args[0].base, m, narrow);
}

void testp(Warp& w, const Instr& I, u32 m) {
  u32 r = 0;
  for (int l = 0; l < 32; ++l) {
    const double v = I.type == Type::f64 ? f64_of(in64(w, I.args[1].base)[l])
                                         : static_cast<double>(f32_of(in32(w, I.args[1].base)[l]));
    const std::string& what = I.parts[1];
    const bool yes = what == "finite"     ? std::isfinite(v)
                     : what == "infinite" ? std::isinf(v)
                     : what == "number"   ? !std::isnan(v)
                                          : std::isnan(v);
    r |= static_cast<u32>(yes) << l;
  }
  out_pred(w, I.args[0].base, m, r);
}

// ---- conversions ----

double rounded(double v, const Instr& I) {
  if (I.has("rzi") || I.has("rz")) return std::trunc(v);
  if (I.has("rmi") || I.has("rm")) return std::floor(v);
  if (I.has("rpi") || I.has("rp")) return std::ceil(v);
  return std::nearbyint(v);
}

double source_float(Warp& w, const Operand& o, Type type, int l) {
  switch (type) {
    case Type::f32:
    case Type::tf32: return static_cast<double>(f32_of(in32(w, o)[l]));
    case Type::f64: return f64_of(in64(w, o)[l]);
    case Type::f16: return static_cast<double>(f16_of(in32(w, o)[l]));
    default: return static_cast<double>(bf16_of(in32(w, o)[l]));
  }
}

float cut(float f, int bits, const Instr& I) {  // to so many bits of mantissa less, not to the nearest even
  u32 b = bits_of(f);
  if ((b & 0x7f800000u) == 0x7f800000u) return f;
  const u32 keep = ~((1u << bits) - 1);
  if (I.has("rna")) b += 1u << (bits - 1);
  return f32_of(b & keep);
}

u32 narrow16(float f, const Instr& I, bool half) {
  if (I.has("relu") && !(f > 0)) f = f != f ? f : 0.0f;
  if (I.has("rz")) return half ? to_f16(cut(f, 13, I)) : bits_of(cut(f, 16, I)) >> 16;
  if (I.has("satfinite") && half) f = std::fabs(f) > 65504.0f ? std::copysign(65504.0f, f) : f;
  return half ? to_f16(f) : to_bf16(f);
}

void cvt_pack16(Warp& w, const Instr& I, u32 m) {  // f16x2 and bf16x2 of two float
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base);
  const bool half = I.type == Type::f16x2;
  u32 r[32];
  for (int l = 0; l < 32; ++l) r[l] = narrow16(f32_of(a[l]), I, half) << 16 | narrow16(f32_of(b[l]), I, half);
  out32(w, I.args[0].base, m, r);
}

void cvt_pack_bf16(Warp& w, const Instr& I, u32 m) {
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base);
  u32 r[32];
  for (int l = 0; l < 32; ++l) r[l] = to_bf16(f32_of(a[l])) << 16 | to_bf16(f32_of(b[l]));
  out32(w, I.args[0].base, m, r);
}

void cvt_pack8(Warp& w, const Instr& I, u32 m) {  // e4m3x2, e5m2x2 of two float, or of f16x2
  const bool e4 = I.type == Type::e4m3x2;
  const auto to = [&](float f) -> u32 {
    if (I.has("relu") && f < 0) f = 0;
    return e4 ? to_e4m3(f) : to_e5m2(f);
  };
  const u32* a = in32(w, I.args[1].base);
  u32 r[32];
  if (I.type2 == Type::f32) {
    const u32* b = in32(w, I.args[2].base);
    for (int l = 0; l < 32; ++l) r[l] = to(f32_of(a[l])) << 8 | to(f32_of(b[l]));
  } else {
    const bool half = I.type2 == Type::f16x2;
    for (int l = 0; l < 32; ++l)
      r[l] = to(half ? f16_of(a[l] >> 16) : bf16_of(a[l] >> 16)) << 8 |
             to(half ? f16_of(a[l] & 0xffff) : bf16_of(a[l] & 0xffff));
  }
  out32(w, I.args[0].base, m, r);
}

void cvt_unpack8(Warp& w, const Instr& I, u32 m) {  // f16x2 of e4m3x2
  const bool e4 = I.type2 == Type::e4m3x2;
  const u32* a = in32(w, I.args[1].base);
  u32 r[32];
  for (int l = 0; l < 32; ++l) {
    const auto of = [&](u32 b) { return to_f16(e4 ? e4m3_of(static_cast<u8>(b)) : e5m2_of(static_cast<u8>(b))); };
    r[l] = of(a[l] >> 8 & 0xff) << 16 | of(a[l] & 0xff);
  }
  out32(w, I.args[0].base, m, r);
}

void cvt_bf16_f32(Warp& w, const Instr& I, u32 m) {  // float of bf16
  const u32* a = in32(w, I.args[1].base);
  u32 r[32];
  for (int l = 0; l < 32; ++l) r[l] = a[l] << 16;
  out32(w, I.args[0].base, m, r);
}

bool is_signed(Type t) { return t == Type::s8 || t == Type::s16 || t == Type::s32 || t == Type::s64; }

i64 source_integer(Warp& w, const Operand& o, Type type, int l) {
  const u64 v = bytes_of(type) == 8 ? in64(w, o)[l] : in32(w, o)[l];
  switch (type) {
    case Type::u8:
    case Type::b8: return static_cast<u8>(v);
    case Type::s8: return static_cast<std::int8_t>(v);
    case Type::u16:
    case Type::b16: return static_cast<u16>(v);
    case Type::s16: return static_cast<i16>(v);
    case Type::u32:
    case Type::b32: return static_cast<u32>(v);
    case Type::s32: return static_cast<i32>(v);
    default: return static_cast<i64>(v);
  }
}

void cvt(Warp& w, const Instr& I, u32 m) {  // any other; type is of the result, type2 of the source
  u64 r[32];
  const bool from_float = is_float(I.type2) || I.type2 == Type::tf32,
             to_float = is_float(I.type) || I.type == Type::tf32;
  for (int l = 0; l < 32; ++l) {
    if (!(m >> l & 1)) continue;
    if (from_float) {
      double v = source_float(w, I.args[1].base, I.type2, l);
      if (I.has("ftz") && I.type2 == Type::f32) v = static_cast<double>(flush(static_cast<float>(v)));
      if (to_float) {
        if (I.has("rzi") || I.has("rmi") || I.has("rpi") || I.has("rni")) v = rounded(v, I);
        if (I.has("sat")) v = v > 0 ? std::min(v, 1.0) : 0.0;
        switch (I.type) {
          case Type::f64: r[l] = bits_of(v); break;
          case Type::f32: r[l] = bits_of(static_cast<float>(v)); break;
          case Type::tf32: r[l] = bits_of(cut(static_cast<float>(v), 13, I)); break;
          default: r[l] = narrow16(static_cast<float>(v), I, I.type == Type::f16);
        }
        continue;
      }
      v = rounded(v, I);
      const int bits = 8 * bytes_of(I.type);
      if (std::isnan(v)) {
        r[l] = bits == 64 ? u64{1} << 63 : 0;
        continue;
      }
      if (is_signed(I.type)) {
        const double low = -std::ldexp(1.0, bits - 1), high = std::ldexp(1.0, bits - 1);
        r[l] = v <= low    ? static_cast<u64>(i64{1} << 63 >> (64 - bits))
               : v >= high ? (u64{1} << (bits - 1)) - 1
                           : static_cast<u64>(static_cast<i64>(v));
      } else {
        r[l] = v <= 0                       ? 0
               : v >= std::ldexp(1.0, bits) ? (bits == 64 ? ~u64{0} : (u64{1} << bits) - 1)
                                            : static_cast<u64>(v);
      }
      continue;
    }
    const i64 v = source_integer(w, I.args[1].base, I.type2, l);
    if (to_float) {
      const double d = is_signed(I.type2) ? static_cast<double>(v) : static_cast<double>(static_cast<u64>(v));
      const float f = is_signed(I.type2) ? static_cast<float>(v) : static_cast<float>(static_cast<u64>(v));
      r[l] = I.type == Type::f64 ? bits_of(d) : I.type == Type::f32 ? bits_of(f) : narrow16(f, I, I.type == Type::f16);
      continue;
    }
    i64 x = v;
    if (I.has("sat")) {
      const int bits = 8 * bytes_of(I.type);
      const __int128 value = is_signed(I.type2) ? static_cast<__int128>(v) : static_cast<__int128>(static_cast<u64>(v));
      const __int128 low = is_signed(I.type) ? -(static_cast<__int128>(1) << (bits - 1)) : 0;
      const __int128 high =
          is_signed(I.type) ? (static_cast<__int128>(1) << (bits - 1)) - 1 : (static_cast<__int128>(1) << bits) - 1;
      x = static_cast<i64>(value < low ? low : value > high ? high : value);
    }
    switch (I.type) {
      case Type::u8:
      case Type::b8: r[l] = static_cast<u8>(x); break;
      case Type::s8: r[l] = static_cast<u64>(static_cast<i64>(static_cast<std::int8_t>(x))); break;
      case Type::u16:
      case Type::b16: r[l] = static_cast<u16>(x); break;
      case Type::s16: r[l] = static_cast<u64>(static_cast<i64>(static_cast<i16>(x))); break;
      case Type::u32:
      case Type::b32: r[l] = static_cast<u32>(x); break;
      case Type::s32: r[l] = static_cast<u64>(static_cast<i64>(static_cast<i32>(x))); break;
      default: r[l] = static_cast<u64>(x);
    }
  }
  if (I.args[0].base.kind == Kind::reg64) return out64(w, I.args[0].base, m, r);
  u32 narrow[32];
  for (int l = 0; l < 32; ++l) narrow[l] = static_cast<u32>(r[l]);
  out32(w, I.args[0].base, m, narrow);
}

template <class TI, class TO>
void cvt_integer(Warp& w, const Instr& I, u32 m) {  // common ones, quickly
  const auto* a = in<TI>(w, I.args[1].base);
  typename TO::S r[32];
  for (int l = 0; l < 32; ++l) r[l] = TO::to(static_cast<typename TO::V>(TI::from(a[l])));
  out<TO>(w, I.args[0].base, m, r);
}

// ---- between lanes ----

void shfl(Warp& w, const Instr& I, u32 m) {
  const u32 *a = in32(w, I.args[1].base), *b = in32(w, I.args[2].base), *c = in32(w, I.args[3].base);
  const std::string& mode = I.parts[2];
  u32 r[32], p = 0;
  for (int l = 0; l < 32; ++l) {
    if (!(m >> l & 1)) continue;
    const int by = static_cast<int>(b[l] & 31), segment = static_cast<int>(c[l] >> 8 & 31),
              bound = static_cast<int>(c[l] & 31);
    const int most = (l & segment) | (bound & ~segment), least = l & segment;
    int j = 0;
    bool inside = false;
    if (mode == "up") j = l - by, inside = j >= most;
    else if (mode == "down") j = l + by, inside = j <= most;
    else if (mode == "bfly") j = l ^ by, inside = j <= most;
    else j = least | (by & ~segment), inside = j <= most;
    if (!inside) j = l;
    p |= static_cast<u32>(inside) << l;
    if (!(m >> j & 1))
      grid->report("shuffle", &w, static_cast<u32>(l), &I,
                   "reads lane " + std::to_string(j) + ", which does not take part");
    r[l] = a[j];
  }
  out32(w, I.args[0].base, m, r);
  if (I.args[0].form == Arg::pair) out_pred(w, I.args[0].second, m, p);
}

void vote(Warp& w, const Instr& I, u32 m) {
  const u32 p = in_pred(w, I.args[1].base) & m;
  if (I.has("ballot")) {
    u32 r[32];
    std::fill_n(r, 32, p);
    return out32(w, I.args[0].base, m, r);
  }
  const bool yes = I.has("all") ? p == m : I.has("any") ? p != 0 : (p == m || p == 0);
  out_pred(w, I.args[0].base, m, yes ? kAll : 0);
}

void redux(Warp& w, const Instr& I, u32 m) {
  const u32* a = in32(w, I.args[1].base);
  u32 r[32], value = 0;
  bool first = true;
  for (int l = 0; l < 32; ++l) {
    if (!(m >> l & 1)) continue;
    if (first) {
      value = a[l];
      first = false;
      continue;
    }
    const bool s = I.type == Type::s32;
    if (I.has("add")) value += a[l];
    else if (I.has("and")) value &= a[l];
    else if (I.has("or")) value |= a[l];
    else if (I.has("xor")) value ^= a[l];
    else if (I.type == Type::f32) {
      float x = f32_of(value), y = f32_of(a[l]);
      if (I.has("abs")) x = std::fabs(x), y = std::fabs(y);
      value = bits_of(I.has("min") ? (I.has("NaN") ? MinNaN{}(x, y) : Min{}(x, y))
                                   : (I.has("NaN") ? MaxNaN{}(x, y) : Max{}(x, y)));
    } else if (I.has("min"))
      value = s ? static_cast<u32>(std::min(static_cast<i32>(value), static_cast<i32>(a[l]))) : std::min(value, a[l]);
    else
      value = s ? static_cast<u32>(std::max(static_cast<i32>(value), static_cast<i32>(a[l]))) : std::max(value, a[l]);
  }
  std::fill_n(r, 32, value);
  out32(w, I.args[0].base, m, r);
}

void activemask(Warp& w, const Instr& I, u32 m) {
  u32 r[32];
  std::fill_n(r, 32, m);
  out32(w, I.args[0].base, m, r);
}

void elect(Warp& w, const Instr& I, u32 m) {  // the first lane, on which CUTLASS relies; from seed 100 on the last
  int lane = __builtin_ctz(m);
  if (grid->options.seed >= 100) lane = 31 - __builtin_clz(m);
  u32 r[32];
  std::fill_n(r, 32, static_cast<u32>(lane));
  out32(w, I.args[0].base, m, r);
  if (I.args[0].form == Arg::pair) out_pred(w, I.args[0].second, m, 1u << lane);
}

void nothing(Warp&, const Instr&, u32) {}

// ---- which ----

Handler choose(Instr& I) {
  const std::string& op = I.parts[0];
  const auto part = [&](std::size_t i) { return i < I.parts.size() ? I.parts[i] : std::string(); };
  const bool floating = is_float(I.type);
  if (op == "mov") {
    if (I.type == Type::b128) return mov128;
    if (I.type == Type::pred) return mov_pred;
    if (I.args[1].form == Arg::vector) return mov_pack;
    if (I.args[0].form == Arg::vector) return mov_unpack;
    if (I.args[1].base.index == 2000 && I.args[1].base.kind == Kind::constant) return mov_parameter;
    return bytes_of(I.type) == 8 ? mov64 : mov32;
  }
  if (I.type == Type::pred) {
    if (op == "and") return pred_op<And>;
    if (op == "or") return pred_op<Or>;
    if (op == "xor") return pred_op<Xor>;
    if (op == "not") {
      struct N {
        u32 operator()(u32 a, u32) const { return ~a; }
      };
      return pred_op<N>;
    }
  }
  if (I.has("f32x2"))
    return op == "add"   ? packed_float<2, Add>
           : op == "sub" ? packed_float<2, Sub>
           : op == "mul" ? packed_float<2, Mul>
           : op == "fma" ? packed_float<3, Fma>
                         : static_cast<Handler>(nullptr);
  if (op == "add") return I.has("cc") ? nullptr : floating ? floats<2>(I, Add{}) : integers<2>(I, Add{});
  if (op == "sub") return I.has("cc") ? nullptr : floating ? floats<2>(I, Sub{}) : integers<2>(I, Sub{});
  if (op == "mul") {
    if (floating) return floats<2>(I, Mul{});
    if (I.has("wide")) return wide_of<false>(I);
    if (I.has("hi")) return bytes_of(I.type) == 2 ? nullptr : integers<2>(I, MulHi{});
    return integers<2>(I, Mul{});
  }
  if (op == "mad") {
    if (floating) return floats<3>(I, Fma{});
    if (I.has("cc")) return nullptr;
    if (I.has("wide")) return wide_of<true>(I);
    if (I.has("hi")) return bytes_of(I.type) == 2 ? nullptr : integers<3>(I, MadHi{});
    return integers<3>(I, Mad{});
  }
  if (op == "fma") return I.has("relu") ? floats<3>(I, FmaRelu{}) : floats<3>(I, Fma{});
  if (op == "div") return floating ? floats<2>(I, Div{}) : integers<2>(I, Div{});
  if (op == "rem") return integers<2>(I, Rem{});
  if (op == "min" || op == "max") {
    const bool least = op == "min";
    if (I.has("xorsign")) return nullptr;
    if (I.args.size() == 4)
      return floating && !I.has("NaN") ? (least ? floats<3>(I, Min3{}) : floats<3>(I, Max3{})) : nullptr;
    if (I.has("relu")) return floating ? nullptr : least ? integers<2>(I, MinRelu{}) : integers<2>(I, MaxRelu{});
    if (floating)
      return I.has("NaN") ? (least ? floats<2>(I, MinNaN{}) : floats<2>(I, MaxNaN{}))
             : least      ? floats<2>(I, Min{})
                          : floats<2>(I, Max{});
    return least ? integers<2>(I, Min{}) : integers<2>(I, Max{});
  }
  if (op == "abs") return floating ? floats<1>(I, Abs{}) : integers<1>(I, Abs{});
  if (op == "neg") return floating ? floats<1>(I, Neg{}) : integers<1>(I, Neg{});
  if (op == "sqrt") return floats<1>(I, Sqrt{});
  if (op == "rsqrt") return floats<1>(I, Rsqrt{});
  if (op == "rcp") return floats<1>(I, Rcp{});
  if (op == "ex2") return floats<1>(I, Ex2{});
  if (op == "lg2") return floats<1>(I, Lg2{});
  if (op == "sin") return floats<1>(I, Sin{});
  if (op == "cos") return floats<1>(I, Cos{});
  if (op == "tanh") return floats<1>(I, Tanh{});
  if (op == "copysign") return floats<2>(I, CopySign{});
  if (op == "testp") return testp;
  if (op == "and") return integers<2>(I, And{});
  if (op == "or") return integers<2>(I, Or{});
  if (op == "xor") return integers<2>(I, Xor{});
  if (op == "not") return integers<1>(I, Not{});
  if (op == "shl") return shift_left;
  if (op == "shr") return shift_right;
  if (op == "shf") return shf;
  if (op == "lop3") return I.args.size() == 5 && I.parts[1] == "b32" ? lop3 : nullptr;
  if (op == "prmt") return I.type == Type::b32 && I.parts.size() == 2 ? prmt : nullptr;
  if (op == "bfe") return bfe;
  if (op == "bfi") return bfi;
  if (op == "popc") return count_bits<Popc>;
  if (op == "clz") return count_bits<Clz>;
  if (op == "bfind") return bfind;
  if (op == "brev") return brev;
  if (op == "selp") return selp;
  if (op == "setp" || op == "set") {
    I.extra = I.has("and") ? 1 : I.has("or") ? 2 : I.has("xor") ? 3 : 0;
    if (op == "set" && I.extra) return nullptr;
    if (op == "setp" && (I.type == Type::bf16x2 || I.type == Type::f16x2) && !I.extra && kCompares.count(I.parts[1])) {
      I.extra = kCompares.at(I.parts[1]);
      return I.type == Type::bf16x2 ? setp_packed<BF16> : setp_packed<F16>;
    }
    return op == "setp" ? comparison<false>(I, I.type) : comparison<true>(I, I.type2);
  }
  if (op == "cvt") {
    if (I.type == Type::e4m3x2 || I.type == Type::e5m2x2) return cvt_pack8;
    if (I.type2 == Type::e4m3x2 || I.type2 == Type::e5m2x2) return I.type == Type::f16x2 ? cvt_unpack8 : nullptr;
    if (I.type == Type::bf16x2 && I.type2 == Type::f32)
      return I.parts.size() == 4 && I.has("rn") ? cvt_pack_bf16 : cvt_pack16;
    if (I.type == Type::f16x2 && I.type2 == Type::f32) return cvt_pack16;
    if (I.type == Type::f32 && I.type2 == Type::bf16 && I.parts.size() == 3) return cvt_bf16_f32;
    if (I.parts.size() == 3) {
      if (I.type == Type::u64 && I.type2 == Type::u32) return cvt_integer<U32, U64>;
      if (I.type == Type::s64 && I.type2 == Type::s32) return cvt_integer<S32, S64>;
      if (I.type == Type::u32 && I.type2 == Type::u64 && I.args[0].base.kind == Kind::reg32)
        return cvt_integer<U64, U32>;
      if (I.type == Type::f32 && I.type2 == Type::f16) return cvt_integer<F16, F32>;
    }
    if (I.parts.size() == 4 && I.has("rn")) {
      if (I.type == Type::f16 && I.type2 == Type::f32) return cvt_integer<F32, F16>;
      if (I.type == Type::bf16 && I.type2 == Type::f32) return cvt_integer<F32, BF16>;
      if (I.type == Type::f32 && I.type2 == Type::s32) return cvt_integer<S32, F32>;
      if (I.type == Type::f32 && I.type2 == Type::u32) return cvt_integer<U32, F32>;
    }
    return I.type2 == Type::none ? nullptr : cvt;
  }
  if (op == "shfl") return I.together = true, I.n = 4, shfl;
  if (op == "vote") return I.together = true, I.n = 2, vote;
  if (op == "redux") return I.together = true, I.n = 2, redux;
  if (op == "elect") return I.together = true, I.n = 1, elect;
  if (op == "activemask") return activemask;
  if (op == "griddepcontrol" || op == "nanosleep" || op == "pmevent" || op == "applypriority" || op == "discard")
    return nothing;
  if (op == "setmaxnreg") return I.together = true, nothing;
  if (op == "createpolicy") return mov_zero64;
  (void)part;
  return choose_memory(I);
}

void collect(const Operand& o, std::vector<int>& found) {
  if (o.kind == Kind::reg32) found.push_back(o.index);
}

}  // namespace

void mov_zero64(Warp& w, const Instr& I, u32 m) {
  u64 r[32] = {};
  out64(w, I.args[0].base, m, r);
}

void unsupported(Warp& w, const Instr& I, u32) {
  (void)w;
  throw Stop("unsupported instruction, line " + std::to_string(I.line) + ": " + I.text);
}

void decode(Function& function, Module& module) {
  const u32 dynamic = (function.static_shared + 127) / 128 * 128;
  for (Instr& I : function.code) {
    const auto resolve = [&](Operand& o) {
      if (o.kind != Kind::constant || o.index < 1000) return;
      if (o.index == 3000)
        o.value = dynamic, o.c32 = module.lanes32(dynamic), o.c64 = module.lanes64(dynamic), o.index = 0;
      if (o.index == 1000 + static_cast<int>(Space::local)) o.index = 0;
    };
    for (Arg& arg : I.args) {
      resolve(arg.base), resolve(arg.second);
      for (Operand& o : arg.items) resolve(o);
      collect(arg.base, I.written32), collect(arg.second, I.written32);
      for (Operand& o : arg.items) collect(o, I.written32);
    }
    I.n = -1;
    const std::string& op = I.parts[0];
    if (!I.args.empty() && I.args[0].form != Arg::address && op != "wgmma" && op != "st" && op != "red" &&
        op != "bra") {
      collect(I.args[0].base, I.written);
      for (Operand& o : I.args[0].items) collect(o, I.written);
    }
    I.run = op == "call" ? unsupported : choose(I);
    if (!I.run) {
      I.run = unsupported;
      function.unsupported.push_back(I.text);
    }
    if (I.space == Space::shared && (I.type == Type::b8 || I.type == Type::u8 || I.type == Type::s8 ||
                                     I.type == Type::b16 || I.type == Type::u16 || I.type == Type::s16))
      function.subword_shared = true;
  }
  Instr last;  // running off the end
  last.parts = {"ret"};
  last.text = "(end)";
  last.run = choose(last);
  function.code.push_back(last);
}

}  // namespace ptx
