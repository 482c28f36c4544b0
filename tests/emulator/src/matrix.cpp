// Handlers of matrix instructions: ldmatrix, stmatrix, mma.sync, wgmma.
#include <algorithm>
#include <cmath>

#include "handlers.h"
#include "operand.h"

namespace ptx {

namespace {

const float* table8(bool e4) {
  static const std::vector<float> both = [] {
    std::vector<float> made(512);
    for (int i = 0; i < 256; ++i)
      made[static_cast<std::size_t>(i)] = e4m3_of(static_cast<u8>(i)),
      made[static_cast<std::size_t>(256 + i)] = e5m2_of(static_cast<u8>(i));
    return made;
  }();
  return both.data() + (e4 ? 0 : 256);
}

// Operands of products as they come in registers of 32 bits.
void unpack(u32 bits, Type type, float* out) {  // 1, 2 or 4 numbers
  switch (type) {
    case Type::f16: out[0] = f16_of(bits & 0xffff), out[1] = f16_of(bits >> 16); break;
    case Type::bf16: out[0] = f32_of(bits << 16), out[1] = f32_of(bits & 0xffff0000u); break;
    case Type::tf32: out[0] = f32_of(bits & 0xffffe000u); break;
    default:
      for (int i = 0; i < 4; ++i) out[i] = table8(type == Type::e4m3)[bits >> 8 * i & 0xff];
  }
}

int per_register(Type type) { return type == Type::tf32 ? 1 : bytes_of(type) == 2 ? 2 : 4; }

int matrices(const Instr& I) { return I.has("x4") ? 4 : I.has("x2") ? 2 : 1; }

void ldmatrix(Warp& w, const Instr& I, u32) {
  const int count = matrices(I);
  const bool turned = I.has("trans");
  const auto& to = I.args[0].items;
  for (int j = 0; j < count; ++j) {
    u16 rows[8][8];
    for (int r = 0; r < 8; ++r) {
      const u32 lane = static_cast<u32>(8 * j + r);
      u32 offset;
      Cta& cta = shared_block(w, address_of(w, I.args[1], lane), offset);
      shared_read(w, I, lane, cta, offset, 16, rows[r]);
    }
    u32 value[32];
    for (int l = 0; l < 32; ++l) {
      const int r = l >> 2, c = 2 * (l & 3);
      value[l] = turned ? rows[c][r] | static_cast<u32>(rows[c + 1][r]) << 16
                        : rows[r][c] | static_cast<u32>(rows[r][c + 1]) << 16;
    }
    out32(w, to[static_cast<std::size_t>(j)], kAll, value);
  }
}

void stmatrix(Warp& w, const Instr& I, u32) {
  const int count = matrices(I);
  const bool turned = I.has("trans");
  const auto& from = I.args[1].items;
  for (int j = 0; j < count; ++j) {
    const u32* value = in32(w, from[static_cast<std::size_t>(j)]);
    u16 rows[8][8];
    for (int l = 0; l < 32; ++l) {
      const int r = l >> 2, c = 2 * (l & 3);
      if (turned) rows[c][r] = static_cast<u16>(value[l]), rows[c + 1][r] = static_cast<u16>(value[l] >> 16);
      else rows[r][c] = static_cast<u16>(value[l]), rows[r][c + 1] = static_cast<u16>(value[l] >> 16);
    }
    for (int r = 0; r < 8; ++r) {
      const u32 lane = static_cast<u32>(8 * j + r);
      u32 offset;
      Cta& cta = shared_block(w, address_of(w, I.args[0], lane), offset);
      shared_write(w, I, lane, cta, offset, 16, rows[r]);
    }
  }
}

// A [16, K] from the registers of a warp: rows g and g + 8, columns t.. of each half of K. (m16n8k16 and its kin)
void gather_a(const u32* const* registers, int count, Type type, float (*a)[64]) {
  const int each = per_register(type);
  float v[4];
  for (int i = 0; i < count; ++i) {
    const int row = i & 1 ? 8 : 0, column = (i >> 1) * 4 * each;
    for (int l = 0; l < 32; ++l) {
      unpack(registers[i][l], type, v);
      for (int e = 0; e < each; ++e) a[row + (l >> 2)][column + each * (l & 3) + e] = v[e];
    }
  }
}

// The place in an accumulator of 16 rows of what register i of a lane holds, for each 8 columns 4 registers.
u32 row_of(u32 i, u32 lane) { return (i & 2 ? 8 : 0) + (lane >> 2); }
u32 column_of(u32 i, u32 lane) { return (i >> 2) * 8 + 2 * (lane & 3) + (i & 1); }

template <int COLUMNS>
void load_sums(Warp& w, const std::vector<Operand>& from, float (*c)[COLUMNS]) {
  for (u32 i = 0; i < from.size(); ++i) {
    const u32* v = in32(w, from[i]);
    for (u32 l = 0; l < 32; ++l) c[row_of(i, l)][column_of(i, l)] = f32_of(v[l]);
  }
}

template <int COLUMNS>
void store_sums(Warp& w, const std::vector<Operand>& to, const float (*c)[COLUMNS]) {
  for (u32 i = 0; i < to.size(); ++i) {
    u32 v[32];
    for (u32 l = 0; l < 32; ++l) v[l] = bits_of(c[row_of(i, l)][column_of(i, l)]);
    out32(w, to[i], kAll, v);
  }
}

void mma(Warp& w, const Instr& I, u32) {  // m16n8kK
  const auto &ra = I.args[1].items, &rb = I.args[2].items;
  const Type type = I.type2;
  const int each = per_register(type);
  float a[16][64], b[64][8], c[16][8], v[4];
  const u32* registers[8];
  for (std::size_t i = 0; i < ra.size(); ++i) registers[i] = in32(w, ra[i]);
  gather_a(registers, static_cast<int>(ra.size()), type, a);
  for (std::size_t i = 0; i < rb.size(); ++i) {
    const u32* from = in32(w, rb[i]);
    for (int l = 0; l < 32; ++l) {
      unpack(from[l], type, v);
      for (int e = 0; e < each; ++e) b[static_cast<int>(i) * 4 * each + each * (l & 3) + e][l >> 2] = v[e];
    }
  }
  load_sums(w, I.args[3].items, c);
  for (int r = 0; r < 16; ++r)
    for (int k = 0; k < I.k; ++k)
      for (int n = 0; n < 8; ++n) c[r][n] += a[r][k] * b[k][n];
  store_sums<8>(w, I.args[0].items, c);
}

// ---- wgmma ----

Layout layout_of(u64 descriptor, bool turned, int element) {
  static const int modes[] = {0, 3, 2, 1};
  return {static_cast<u32>(descriptor & 0x3fff) << 4,
          static_cast<u32>(descriptor >> 16 & 0x3fff) << 4,
          static_cast<u32>(descriptor >> 32 & 0x3fff) << 4,
          modes[descriptor >> 62 & 3],
          turned,
          element};
}

struct Shape {
  Type type;
  int N, K, element;
  bool registers, turned_a, turned_b;
};

Shape shape_of(const Instr& I) {
  Shape s;
  s.type = I.type2, s.N = I.n, s.K = I.k, s.element = bytes_of(s.type);
  s.registers = I.args[1].form == Arg::vector;
  const bool turns = s.element == 2;
  const auto flag = [&](std::size_t i) { return i < I.args.size() && I.args[i].base.value & 1; };
  s.turned_a = turns && !s.registers && flag(6);
  s.turned_b = turns && flag(s.registers ? 6 : 7);
  return s;
}

void each_chunk_read(Warp& w, const Product& p, bool hold, int add) {
  const Instr& I = *p.instr;
  const Shape s = shape_of(I);
  Cta& cta = *w.cta;
  const auto touch = [&](u32, u32, u32 offset) {
    if (offset + 16 > grid->shared_bytes) {
      if (!hold)
        grid->report("out of bounds", &w, 0, &I, "the product reads shared bytes from " + std::to_string(offset));
      return;
    }
    if (!hold) touch_read(w, I, 0, cta, offset, 16, true);
    if (add) hold_granules(cta, offset, 16, add);
  };
  if (!s.registers)
    chunks(layout_of(p.descriptor_a, s.turned_a, s.element), 16 * static_cast<u32>(w.number & 3), 16,
           static_cast<u32>(s.K), touch);
  chunks(layout_of(p.descriptor_b, s.turned_b, s.element), 0, static_cast<u32>(s.N), static_cast<u32>(s.K), touch);
}

void multiply(Warp& w, const Product& p) {
  const Instr& I = *p.instr;
  const Shape s = shape_of(I);
  const u8* shared = w.cta->shared.data();
  static thread_local float a[16][64], b[64][256], c[16][256];
  if (s.registers) {
    const u32* registers[4] = {p.a[0], p.a[1], p.a[2], p.a[3]};
    gather_a(registers, 4, s.type, a);
  } else {
    gather(layout_of(p.descriptor_a, s.turned_a, s.element), shared, s.type, 16 * static_cast<u32>(w.number & 3), 16,
           static_cast<u32>(s.K), a[0], 64, 1);
  }
  gather(layout_of(p.descriptor_b, s.turned_b, s.element), shared, s.type, 0, static_cast<u32>(s.N),
         static_cast<u32>(s.K), b[0], 1, 256);
  if (p.scale) load_sums(w, I.args[0].items, c);
  else
    for (auto& row : c) std::fill_n(row, s.N, 0.0f);
  for (int r = 0; r < 16; ++r)
    for (int k = 0; k < s.K; ++k)
      for (int n = 0; n < s.N; ++n) c[r][n] += a[r][k] * b[k][n];
  store_sums<256>(w, I.args[0].items, c);
}

void mark(Warp& w, const Product& p, int add) {  // registers that a product writes: low bits; reads: high bits
  for (const Operand& o : p.instr->args[0].items)
    w.pending32[static_cast<std::size_t>(o.index)] =
        static_cast<u8>(w.pending32[static_cast<std::size_t>(o.index)] + add);
  if (p.instr->args[1].form == Arg::vector)
    for (const Operand& o : p.instr->args[1].items)
      if (o.kind == Kind::reg32)
        w.pending32[static_cast<std::size_t>(o.index)] =
            static_cast<u8>(w.pending32[static_cast<std::size_t>(o.index)] + 16 * add);
}

void wgmma(Warp& w, const Instr& I, u32) {
  Product p;
  p.instr = &I;
  const Shape s = shape_of(I);
  if (w.cta->warps.size() % 4)
    grid->report("wgmma", &w, 0, &I, "a block of " + std::to_string(w.cta->warps.size()) + " warps");
  const auto fenced = [&](const Operand& o, const char* what) {
    if (o.kind == Kind::reg32 && w.touched32[static_cast<std::size_t>(o.index)] > w.fence_step)
      grid->report("wgmma", &w, 0, &I, std::string("an ") + what + " was used after the last wgmma.fence");
  };
  if (s.registers) {
    for (int i = 0; i < 4; ++i) {
      std::memcpy(p.a[i], in32(w, I.args[1].items[static_cast<std::size_t>(i)]), 128);
      fenced(I.args[1].items[static_cast<std::size_t>(i)], "operand");
    }
  } else {
    p.descriptor_a = in64(w, I.args[1].base)[0];
  }
  p.descriptor_b = in64(w, I.args[2].base)[0];
  const Operand& scale = I.args[3].base;
  p.scale = scale.kind == Kind::pred || scale.kind == Kind::constant ? in_pred(w, scale) & 1 : in32(w, scale)[0] != 0;
  for (const Operand& o : I.args[0].items) fenced(o, "accumulator");
  p.group = w.product_commits;
  p.number = ++w.products_issued;
  p.clock = w.knowledge.seen.at[w.thread]++;  // what this warp did before comes before the product, for all four
  ++grid->progress;
  each_chunk_read(w, p, false, 1);
  mark(w, p, 1);
  w.products.push_back(p);
  w.has_products = true;
}

void wgmma_fence(Warp& w, const Instr&, u32) { w.fence_step = w.steps; }
void wgmma_commit(Warp& w, const Instr&, u32) { ++w.product_commits; }
void wgmma_wait(Warp& w, const Instr& I, u32) {
  if (complete_products(w, I.args[0].base.value)) return;
  w.retry = w.yield = true;
  w.state = Warp::polling;
  w.poll_version = grid->progress;
}

int number_after(const std::string& text, char letter) {
  const std::size_t at = text.find(letter);
  return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + 1);
}

}  // namespace

void decode16(const void* from, Type type, float* out) {
  switch (type) {
    case Type::bf16: {
      u16 v[8];
      std::memcpy(v, from, 16);
      for (int i = 0; i < 8; ++i) out[i] = f32_of(static_cast<u32>(v[i]) << 16);
      break;
    }
    case Type::f16: {
      _Float16 v[8];
      std::memcpy(v, from, 16);
      for (int i = 0; i < 8; ++i) out[i] = static_cast<float>(v[i]);
      break;
    }
    case Type::tf32: {
      u32 v[4];
      std::memcpy(v, from, 16);
      for (int i = 0; i < 4; ++i) out[i] = f32_of(v[i] & 0xffffe000u);
      break;
    }
    default: {
      const float* table = table8(type == Type::e4m3);
      for (int i = 0; i < 16; ++i) out[i] = table[static_cast<const u8*>(from)[i]];
    }
  }
}

void gather(const Layout& o, const u8* shared, Type type, u32 first, u32 rows, u32 K, float* out, u32 row, u32 column) {
  float v[16];
  chunks(o, first, rows, K, [&](u32 r, u32 k, u32 offset) {
    if (offset + 16 > grid->shared_bytes) return;
    float* to = out + (r - first) * row + k * column;
    const u32 step = o.turned ? row : column;
    if (step == 1) return decode16(shared + offset, type, to);
    decode16(shared + offset, type, v);
    for (u32 i = 0; i < 16u / static_cast<u32>(o.element); ++i) to[i * step] = v[i];
  });
}

// Waits for all but the last `keep` groups of products.
bool complete_products(Warp& w, u64 keep) {
  u64 needed = 0;
  for (const Product& p : w.products)
    if (p.group + keep < w.product_commits) needed = p.number;
  if (!needed) return true;
  WarpGroup& group = w.cta->warp_groups[static_cast<std::size_t>(w.number / 4)];
  Warp* members[4];
  for (int i = 0; i < 4; ++i) members[i] = w.cta->warps[static_cast<std::size_t>(w.number / 4 * 4 + i)].get();
  for (; group.done < needed; ++group.done) {
    for (const Warp* each : members)
      if (each->products_issued <= group.done) return false;
    Clock issued;
    for (Warp* each : members)
      for (const Product& p : each->products)
        if (p.number == group.done + 1) issued.at[each->thread] = p.clock;
    for (Warp* each : members) {
      const auto found = std::find_if(each->products.begin(), each->products.end(),
                                      [&](const Product& p) { return p.number == group.done + 1; });
      Product& p = *found;
      each_chunk_read(*each, p, true, -1);
      const Shape s = shape_of(*p.instr);
      const u32 clock = static_cast<u32>(group.done + 1);
      const auto read = [&](u32, u32, u32 offset) {
        if (offset + 16 <= grid->shared_bytes) record_read(*w.cta, offset, 16, group.thread, clock);
      };
      if (!s.registers)
        chunks(layout_of(p.descriptor_a, s.turned_a, s.element), 16 * static_cast<u32>(each->number & 3), 16,
               static_cast<u32>(s.K), read);
      if (each == members[0])
        chunks(layout_of(p.descriptor_b, s.turned_b, s.element), 0, static_cast<u32>(s.N), static_cast<u32>(s.K), read);
      multiply(*each, p);
      p.done = true;
      p.issued = issued;
    }
  }
  w.knowledge.seen.at[group.thread] = std::max(w.knowledge.seen.at[group.thread], static_cast<u32>(needed));
  while (!w.products.empty() && w.products.front().number <= needed) {
    w.knowledge.seen.join(w.products.front().issued, grid->threads);
    mark(w, w.products.front(), -1);
    w.products.pop_front();
  }
  w.has_products = !w.products.empty();
  return true;
}

Handler choose_matrix(Instr& I) {
  const std::string& op = I.parts[0];
  if (op == "ldmatrix" || op == "stmatrix") {
    I.together = true;
    if (!I.has("m8n8") || I.has("b8")) return nullptr;
    return op == "ldmatrix" ? ldmatrix : stmatrix;
  }
  static const std::map<std::string, Type> types = {
      {"bf16", Type::bf16}, {"f16", Type::f16}, {"tf32", Type::tf32}, {"e4m3", Type::e4m3}};
  const bool wide = op == "wgmma";
  if (op != "mma" && !wide) return nullptr;
  I.together = true;
  if (wide && I.parts[1] == "fence") return wgmma_fence;
  if (wide && I.parts[1] == "commit_group") return wgmma_commit;
  if (wide && I.parts[1] == "wait_group") return wgmma_wait;
  // mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32, wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16
  const std::size_t at = wide ? 5 : 6;
  if (I.parts.size() != (wide ? 8 : 10) || I.parts[at] != "f32" || I.parts[at + 1] != I.parts[at + 2]) return nullptr;
  const std::string& shape = I.parts[at - (wide ? 1 : 3)];
  const auto type = types.find(I.parts[at + 1]);
  if (type == types.end() || (!wide && shape.rfind("m16n8k", 0) != 0)) return nullptr;
  I.n = number_after(shape, 'n'), I.k = number_after(shape, 'k'), I.type = Type::f32, I.type2 = type->second;
  if (!wide) return mma;
  return I.args[4].base.value == 1 && I.args[5].base.value == 1 ? wgmma : nullptr;  // neither operand is negated
}

}  // namespace ptx
