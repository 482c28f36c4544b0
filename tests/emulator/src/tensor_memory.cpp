// Handlers of tcgen05: tensor memory (128 lanes of 512 columns), its allocation, and the products that write it.
//
// Its shadow is the end of shared memory's: a granule for each column of 16 lanes, which is what every access covers.
// Products and commits of a warp group are carried out in their order, some time after they were issued; the number of
// a product is the clock of its WarpGroup::thread, so that who touches its operands or its result must have waited for
// a commit. tcgen05.ld reads, and .st writes, until tcgen05.wait; registers have what is loaded at once, since Triton
// uses them before the wait, which ptxas (whose LDTM has a scoreboard, as every load) makes right.
#include <algorithm>
#include <utility>

#include "handlers.h"
#include "operand.h"

namespace ptx {

namespace {

constexpr u32 kColumns = 512, kHalves = 8;  // 16 lanes each

void wrong(Warp& w, const Instr& I, const std::string& what) { grid->report("tensor memory", &w, 0, &I, what); }

u32 shadow(u32 half, u32 column) {
  return grid->tensor_shadow + (half * kColumns + column) * static_cast<u32>(grid->granule);
}

u32* cell(Cta& cta, u32 lane, u32 column) { return cta.tensor.data() + lane * kColumns + column; }

// What a product reads. What is loaded may be thrown away: loads are not guarded, stores are.
void touch_operand(Warp& w, const Instr& I, u32 offset, u32 bytes) {
  if (std::memchr(w.cta->written.data() + offset, 0, bytes))
    grid->report("uninitialised", &w, 0, &I, "reads tensor memory that nothing has written");
  touch_read(w, I, 0, *w.cta, offset, bytes, false);
}

bool allocated(Warp& w, const Instr& I, u32 column, u32 columns) {
  for (const auto& [first, count] : w.cta->tensor_columns)
    if (column >= first && column + columns <= first + count) return true;
  wrong(w, I, "columns " + std::to_string(column) + " to " + std::to_string(column + columns) + " are not allocated");
  return false;
}

void alloc(Warp& w, const Instr& I, u32) {
  Cta& cta = *w.cta;
  const u32 columns = in32(w, I.args[1].base)[0];
  if (columns < 32 || columns > kColumns || (columns & (columns - 1)))
    return wrong(w, I, "allocates " + std::to_string(columns) + " columns");
  if (!cta.may_allocate) wrong(w, I, "allocates after it has given that up");
  std::vector<u32> places;  // another block of the multiprocessor may hold the others
  for (u32 at = 0; at < kColumns; at += columns)
    if (std::none_of(cta.tensor_columns.begin(), cta.tensor_columns.end(),
                     [&](const auto& each) { return at < each.first + each.second && each.first < at + columns; }))
      places.push_back(at);
  if (places.empty()) {
    grid->report("deadlock", &w, 0, &I, "waits for columns of tensor memory that this block itself holds");
    throw Stop("deadlock");
  }
  if (cta.tensor.empty()) cta.tensor.assign(128 * kColumns, 0x7fc0dead);
  const u32 at = places[grid->random() % places.size()];
  cta.tensor_columns[at] = columns;
  u32 offset;
  Cta& block = shared_block(w, address_of(w, I.args[0], 0), offset);
  shared_write(w, I, 0, block, offset, 4, &at);
}

void dealloc(Warp& w, const Instr& I, u32) {
  Cta& cta = *w.cta;
  const u32 at = in32(w, I.args[0].base)[0], columns = in32(w, I.args[1].base)[0];
  const auto found = cta.tensor_columns.find(at);
  if (found == cta.tensor_columns.end() || found->second != columns)
    return wrong(
        w, I,
        "frees " + std::to_string(columns) + " columns from " + std::to_string(at) + ", which were not allocated so");
  for (u32 half = 0; half < kHalves; ++half) {
    const u32 offset = shadow(half, at), bytes = columns * static_cast<u32>(grid->granule);
    touch_write(w, I, 0, cta, offset, bytes);
    std::fill_n(cta.written.begin() + offset, bytes, 0);
    for (u32 lane = 16 * half; lane < 16 * half + 16; ++lane) std::fill_n(cell(cta, lane, at), columns, 0x7fc0dead);
  }
  cta.tensor_columns.erase(found);
}

void relinquish(Warp& w, const Instr&, u32) { w.cta->may_allocate = false; }

// ---- ld and st ----

enum Pattern { s32x32, s16x64, s16x128, s16x256, s16x32x2 };

std::pair<u32, u32> place_of(int shape, u32 lane, u32 r, u32 split) {  // of register r: lane and column
  switch (shape) {
    case s32x32: return {lane, r};
    case s16x64: return {lane / 4 + 8 * (lane % 2), lane / 2 % 2 + 2 * r};
    case s16x128: return {lane / 4 + 8 * (r % 2), lane % 4 + 4 * (r / 2)};
    case s16x256: return {lane / 4 + 8 * (r / 2 % 2), r % 2 + 2 * (lane % 4) + 8 * (r / 4)};
    default: return {lane % 16, r + lane / 16 * split};
  }
}

void move(Warp& w, const Instr& I, u32) {
  Cta& cta = *w.cta;
  Moved v;
  v.instr = &I, v.load = I.parts[1] == "ld";
  const Arg& place = I.args[v.load ? 1 : 0];
  const auto& registers = I.args[v.load ? 0 : I.args.size() - 1].items;
  const u32 address = static_cast<u32>(address_of(w, place, 0)), lanes = address >> 16, column = address & 0xffff;
  const u32 mine = 32 * static_cast<u32>(w.number & 3), count = static_cast<u32>(registers.size());
  const u32 split = I.extra == s16x32x2 ? static_cast<u32>(I.args[v.load ? 2 : 1].base.value) : 0;
  for (u32 lane = 1; lane < 32; ++lane)
    if (static_cast<u32>(address_of(w, place, lane)) != address) return wrong(w, I, "lanes name different addresses");
  if (lanes != mine && (I.extra == s32x32 || lanes != mine + 16))
    return wrong(w, I, "lanes from " + std::to_string(lanes) + " are not those of this warp");
  const bool twice = I.extra == s32x32 || I.extra == s16x32x2;
  const u32 wide = twice ? count : 2 * count;
  if (!allocated(w, I, column, wide) || !allocated(w, I, column + split, wide)) return;
  v.bytes = wide * static_cast<u32>(grid->granule);
  v.parts[0] = shadow(lanes / 16, column);
  if (twice) v.parts[1] = I.extra == s32x32 ? shadow(lanes / 16 + 1, column) : shadow(lanes / 16, column + split);
  for (const u32 part : v.parts) {
    if (!part) continue;
    if (v.load) touch_read(w, I, 0, cta, part, v.bytes, false), hold_granules(cta, part, v.bytes, 1);
    else begin_async_write(w, I, 0, cta, part, v.bytes, false);
  }
  for (u32 r = 0; r < count; ++r) {
    u32 value[32];
    if (!v.load) std::memcpy(value, in32(w, registers[r]), sizeof(value));
    for (u32 lane = 0; lane < 32; ++lane) {
      const auto [row, along] = place_of(I.extra, lane, r, split);
      u32* at = cell(cta, lanes + row, column + along);
      if (v.load) value[lane] = *at;
      else *at = value[lane];
    }
    if (v.load) out32(w, registers[r], kAll, value);
  }
  w.moved.push_back(v);
}

void wait(Warp& w, const Instr& I, u32) {
  const bool loads = I.parts[1] == "wait::ld";
  for (const Moved& v : w.moved)
    for (const u32 part : v.parts) {
      if (v.load != loads || !part) continue;
      if (!loads) {
        end_async_write(*w.cta, part, v.bytes, w.thread, w.knowledge.seen.at[w.thread]);
        continue;
      }
      hold_granules(*w.cta, part, v.bytes, -1);
      touch_read(w, *v.instr, 0, *w.cta, part, v.bytes, false);  // it reads until now
    }
  std::erase_if(w.moved, [&](const Moved& v) { return v.load == loads; });
}

// ---- products ----

struct Product5 {  // what an instruction descriptor says
  u32 M, N, K;
  Type a, b;
  bool turned_a, turned_b;
};

constexpr Type kTypes[3][3] = {
    {Type::f16, Type::bf16, Type::none}, {Type::none, Type::none, Type::tf32}, {Type::e4m3, Type::e5m2, Type::none}};

bool decode(Warp& w, const Instr& I, u32 d, Product5& p) {  // I.extra: 0 for kind::f16, 1 tf32, 2 f8f6f4
  const u32 a = d >> 7 & 7, b = d >> 10 & 7;
  p = {(d >> 24 & 31) << 4,
       (d >> 17 & 63) << 3,
       I.extra == 0   ? 16u
       : I.extra == 1 ? 8u
                      : 32u,
       a < 3 ? kTypes[I.extra][a] : Type::none,
       b < 3 ? kTypes[I.extra][b] : Type::none,
       (d >> 15 & 1) != 0,
       (d >> 16 & 1) != 0};
  if ((d >> 4 & 3) != 1 || (d & 15) || (d >> 13 & 3) || p.a == Type::none || p.b == Type::none)
    throw Stop("unsupported instruction descriptor " + hex(d) + ": " + I.text);
  const bool fine = (p.M == 64 && p.N % 8 == 0) || (p.M == 128 && p.N % 16 == 0);
  if (!fine || p.N < 8 || p.N > 256) wrong(w, I, "a product of " + std::to_string(p.M) + " x " + std::to_string(p.N));
  return fine && p.N >= 8 && p.N <= 256;
}

Layout layout_of(Warp& w, const Instr& I, u64 descriptor, bool turned, Type type) {
  static const int modes[] = {0, -1, 3, -1, 2, -1, 1, -1};
  const int mode = modes[descriptor >> 61];
  if (mode < 0 || (descriptor >> 49 & 0xfff))
    throw Stop("unsupported descriptor of shared memory " + hex(descriptor) + ": " + I.text);
  if ((descriptor >> 46 & 7) != 1) wrong(w, I, "the descriptor " + hex(descriptor) + " lacks its constant");
  return {static_cast<u32>(descriptor & 0x3fff) << 4,
          static_cast<u32>(descriptor >> 16 & 0x3fff) << 4,
          static_cast<u32>(descriptor >> 32 & 0x3fff) << 4,
          mode,
          turned,
          bytes_of(type)};
}

u32 lane_of(const Product5& p, u32 address, u32 row) {
  return (address >> 16) + (p.M == 64 ? row / 16 * 32 + row % 16 : row);
}

void tensor_mma(Warp& w, const Instr& I, u32 m) {
  WarpGroup& pipe = w.cta->warp_groups[static_cast<std::size_t>(w.number / 4)];
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    TensorWork work;
    work.instr = &I, work.warp = &w;
    work.to = static_cast<u32>(address_of(w, I.args[0], lane));
    const bool kept = I.args[1].form == Arg::address;  // A is in tensor memory, too
    work.a = kept ? address_of(w, I.args[1], lane) : in64(w, I.args[1].base)[lane];
    work.b = in64(w, I.args[2].base)[lane];
    work.descriptor = in32(w, I.args[3].base)[lane];
    work.add = in_pred(w, I.args[4].base) >> lane & 1;
    Product5 p;
    if (!decode(w, I, work.descriptor, p)) return;
    const u32 first = work.to >> 16;
    if (first != 0 && (p.M == 128 || first != 16))
      return wrong(w, I, "a product to lanes from " + std::to_string(first));
    if (!allocated(w, I, work.to & 0xffff, p.N) || (kept && !allocated(w, I, work.a & 0xffff, 8))) return;
    work.clock = ++pipe.issued;
    // It comes after what its warp has seen, and after all before it in its pipe.
    const int thread = std::exchange(w.thread, pipe.thread);
    const u32 seen = std::exchange(w.knowledge.seen.at[pipe.thread], work.clock);
    Cta& cta = *w.cta;
    const auto touch = [&](u32, u32, u32 offset) {
      if (offset + 16 > grid->shared_bytes)
        return grid->report("out of bounds", &w, lane, &I,
                            "the product reads shared bytes from " + std::to_string(offset));
      touch_read(w, I, lane, cta, offset, 16, true);
      record_read(cta, offset, 16, pipe.thread, work.clock);
    };
    if (!kept) chunks(layout_of(w, I, work.a, p.turned_a, p.a), 0, p.M, p.K, touch);
    chunks(layout_of(w, I, work.b, p.turned_b, p.b), 0, p.N, p.K, touch);
    for (u32 row = 0; row < p.M; row += 16) {
      const u32 offset = shadow(lane_of(p, work.to, row) / 16, work.to & 0xffff),
                bytes = p.N * static_cast<u32>(grid->granule);
      if (kept) {
        const u32 from = shadow(lane_of(p, static_cast<u32>(work.a), row) / 16, work.a & 0xffff);
        touch_operand(w, I, from, 8 * static_cast<u32>(grid->granule));
      }
      if (work.add) touch_operand(w, I, offset, bytes);
      touch_write(w, I, lane, cta, offset, bytes);
    }
    w.thread = thread, w.knowledge.seen.at[pipe.thread] = seen;
    pipe.work.push_back(work);
    ++grid->progress;
  }
}

void commit(Warp& w, const Instr& I, u32 m) {
  WarpGroup& pipe = w.cta->warp_groups[static_cast<std::size_t>(w.number / 4)];
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    TensorWork work;
    work.instr = &I, work.warp = &w;
    mbarrier_at(w, I, lane, address_of(w, I.args[0], lane));
    work.to = static_cast<u32>(address_of(w, I.args[0], lane));
    work.clock = pipe.issued;
    work.issuer = w.knowledge;
    ++w.knowledge.seen.at[w.thread];
    pipe.work.push_back(work);
    ++grid->progress;
  }
}

void multiply(const TensorWork& work) {
  const Instr& I = *work.instr;
  Warp& w = *work.warp;
  Cta& cta = *w.cta;
  static thread_local float a[128 * 32], b[32 * 256], c[256];
  Product5 p;
  decode(w, I, work.descriptor, p);
  if (I.args[1].form == Arg::address) {
    for (u32 row = 0; row < p.M; ++row)
      for (u32 half = 0; half < 2; ++half)
        decode16(cell(cta, lane_of(p, static_cast<u32>(work.a), row), (work.a & 0xffff) + 4 * half), p.a,
                 a + row * 32 + half * p.K / 2);
  } else {
    gather(layout_of(w, I, work.a, p.turned_a, p.a), cta.shared.data(), p.a, 0, p.M, p.K, a, 32, 1);
  }
  gather(layout_of(w, I, work.b, p.turned_b, p.b), cta.shared.data(), p.b, 0, p.N, p.K, b, 1, 256);
  for (u32 row = 0; row < p.M; ++row) {
    u32* to = cell(cta, lane_of(p, work.to, row), work.to & 0xffff);
    std::fill_n(c, p.N, 0.0f);
    if (work.add) std::memcpy(c, to, 4 * p.N);
    for (u32 k = 0; k < p.K; ++k)
      for (u32 n = 0; n < p.N; ++n) c[n] += a[row * 32 + k] * b[k * 256 + n];
    std::memcpy(to, c, 4 * p.N);
  }
}

}  // namespace

void run_tensor_work(WarpGroup& pipe) {
  const TensorWork work = pipe.work.front();
  pipe.work.pop_front();
  ++grid->progress;
  if (work.instr->parts[1] == "mma") return multiply(work);
  u32 offset;
  Cta& cta = shared_block(*work.warp, work.to, offset);
  const auto found = cta.mbarriers.find(offset);
  if (found == cta.mbarriers.end() || !found->second.pending)
    return grid->report("mbarrier", work.warp, 0, work.instr,
                        "a commit arrives where no mbarrier expects it: shared byte " + std::to_string(offset));
  MBarrier& b = found->second;
  --b.pending;
  b.gathered.join(work.issuer, grid->threads);
  b.gathered.seen.at[pipe.thread] = std::max(b.gathered.seen.at[pipe.thread], work.clock);
  mbarrier_check(b);
}

Handler choose_tensor(Instr& I) {  // tcgen05.mma.cta_group::1.kind::f16, tcgen05.ld.sync.aligned.32x32b.x64.b32, ...
  const std::string& what = I.parts[1];
  if (I.parts[0] != "tcgen05") return nullptr;
  if (what == "fence::before_thread_sync" || what == "fence::after_thread_sync")
    return nothing;  // what they order is in order here
  if (I.has("cta_group::2")) return nullptr;
  if (what == "mma") {
    const bool plain = I.args.size() == 5 && I.parts.size() == 4 && I.args[2].form == Arg::plain &&
                       (I.args[4].base.kind == Kind::pred || I.args[4].base.kind == Kind::constant);
    I.extra = I.has("kind::f16") ? 0 : I.has("kind::tf32") ? 1 : I.has("kind::f8f6f4") ? 2 : -1;
    return plain && I.extra >= 0 ? tensor_mma : nullptr;
  }
  if (what == "commit") return I.args.size() == 1 ? commit : nullptr;
  I.together = true;
  if (what == "alloc") return alloc;
  if (what == "dealloc") return dealloc;
  if (what == "relinquish_alloc_permit") return relinquish;
  if (what == "wait::ld" || what == "wait::st") return wait;
  static const char* shapes[] = {"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"};
  I.extra = -1;
  for (int i = 0; i < 5; ++i)
    if (I.has(shapes[i])) I.extra = i;
  return (what == "ld" || what == "st") && I.extra >= 0 && I.parts.size() == 7 ? move : nullptr;
}

}  // namespace ptx
