// Handlers of loads and stores, of branches, and of what waits: barriers and mbarriers.
#include <algorithm>

#include "handlers.h"

namespace ptx {
namespace {

// ---- loads and stores ----

Space space_of(const Instr& I) {
  for (const auto& part : I.parts) {
    if (part == "global") return Space::global;
    if (part == "shared" || part == "shared::cta" || part == "shared::cluster") return Space::shared;
    if (part == "param") return Space::param;
  }
  return Space::none;
}

const std::vector<Operand>& operands(const Arg& arg, std::vector<Operand>& single) {
  if (arg.form == Arg::vector) return arg.items;
  single.assign(1, arg.base);
  return single;
}

void load(Warp& w, const Instr& I, u32 m) {
  static thread_local std::vector<Operand> single;
  const auto& to = operands(I.args[0], single);
  const u32 each = static_cast<u32>(bytes_of(I.type)), bytes = each * static_cast<u32>(to.size());
  u8 data[64];
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    const u64 address = address_of(w, I.args[1], lane);
    const u8* from = data;
    if (I.space == Space::param && I.args[1].base.kind == Kind::constant) {
      if (address + bytes > grid->function->parameter_bytes) throw Stop("a load beyond the parameters: " + I.text);
      from = grid->parameter + address;
    } else if (I.space == Space::shared) {
      u32 offset;
      Cta& cta = shared_block(w, address, offset);
      shared_read(w, I, lane, cta, offset, bytes, data);
    } else {
      from = global_memory(w, I, lane, address, bytes, false);
      if (from && I.space == Space::global) grid->global.read(w, I, lane, address, bytes);
    }
    for (std::size_t i = 0; i < to.size(); ++i) {
      u64 value = 0x7fffffff7fffffffull;  // nan, where there is nothing
      if (from) value = 0, std::memcpy(&value, from + i * each, each);
      if (I.type == Type::s32) value = static_cast<u64>(i64{static_cast<i32>(value)});
      put(w, to[i], lane, value);
    }
  }
}

void store(Warp& w, const Instr& I, u32 m) {
  static thread_local std::vector<Operand> single;
  const auto& from = operands(I.args[1], single);
  const u32 each = static_cast<u32>(bytes_of(I.type)), bytes = each * static_cast<u32>(from.size());
  u8 data[64];
  if (m) grid->global.stores(w);
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    const u64 address = address_of(w, I.args[0], lane);
    for (std::size_t i = 0; i < from.size(); ++i) {
      const u64 value = get(w, from[i], lane);
      std::memcpy(data + i * each, &value, each);
    }
    if (I.space == Space::shared) {
      u32 offset;
      Cta& cta = shared_block(w, address, offset);
      shared_write(w, I, lane, cta, offset, bytes, data);
    } else if (u8* to = global_memory(w, I, lane, address, bytes, true)) {
      grid->global.write(w, I, lane, address, bytes, !std::memcmp(to, data, bytes));
      std::memcpy(to, data, bytes);
    }
  }
}

// ---- addresses ----

void cvta(Warp& w, const Instr& I, u32 m) {  // of and to global memory, and of parameters
  u64 r[32];
  std::memcpy(r, in64(w, I.args[1].base), sizeof(r));
  if (I.args[1].base.symbol == Space::param)
    for (u64& each : r) each += reinterpret_cast<u64>(grid->parameter);
  out64(w, I.args[0].base, m, r);
}

void mapa(Warp& w, const Instr& I, u32 m) {
  const u32 *a = in32(w, I.args[1].base), *rank = in32(w, I.args[2].base);
  u32 r[32];
  for (int l = 0; l < 32; ++l) r[l] = (a[l] & 0xffffff) | (rank[l] + 1) << 24;
  out32(w, I.args[0].base, m, r);
}

// ---- control ----

void branch(Warp& w, const Instr& I, u32 m) {
  Group& g = w.groups[static_cast<std::size_t>(w.current)];
  const int target = I.args[0].target;
  w.branched = true;
  if (m == g.mask) {
    g.pc = target;
  } else if (!m) {
    ++g.pc;
  } else {
    g.mask &= ~m;
    ++g.pc;
    w.groups.push_back({m, target});
  }
}

void leave(Warp& w, const Instr&, u32 m) {
  Group& g = w.groups[static_cast<std::size_t>(w.current)];
  w.branched = true;
  w.live &= ~m;
  g.mask &= ~m;
  ++g.pc;
  if (!g.mask) w.groups.erase(w.groups.begin() + w.current);
}

// ---- barriers ----

void barrier(Warp& w, const Instr& I, u32 m) {
  if (!m) return;
  const int lane = __builtin_ctz(m);
  const u32 id = in32(w, I.args[0].base)[lane];
  if (id > 15) throw Stop("barrier " + std::to_string(id));
  Barrier& b = w.cta->barriers[id];
  const int expected = I.args.size() > 1 ? static_cast<int>(in32(w, I.args[1].base)[lane]) : -1;
  if (expected > 0 && expected % 32)
    grid->report("barrier", &w, 0, &I, "a count of " + std::to_string(expected) + " threads, not a multiple of 32");
  if (b.arrived && b.expected != expected)
    grid->report("barrier", &w, 0, &I,
                 "barrier " + std::to_string(id) + " for " + std::to_string(expected) +
                     " threads, of which others say " + std::to_string(b.expected));
  b.expected = expected;
  b.arrived += 32;
  b.gathered.join(w.knowledge, grid->threads);
  ++w.knowledge.seen.at[w.thread];
  b.waiting.push_back(w.number);
  w.state = Warp::at_barrier;
  w.barrier = static_cast<int>(id);
  w.yield = true;
}

void warp_sync(Warp&, const Instr&, u32) {}

void cluster_arrive(Warp& w, const Instr& I, u32 m) {
  if (!m) return;
  if (w.cluster_arrived) grid->report("barrier", &w, 0, &I, "arrives twice at the cluster's barrier");
  w.cluster_arrived = true;
  grid->cluster_barrier.gathered.join(w.knowledge, grid->threads);
  ++w.knowledge.seen.at[w.thread];
  ++grid->cluster_barrier.arrived;
  w.cluster_generation = grid->cluster_barrier.generation + 1;
  ++grid->progress;
}

void cluster_wait(Warp& w, const Instr& I, u32 m) {
  if (!m) return;
  if (!w.cluster_arrived) grid->report("barrier", &w, 0, &I, "waits at the cluster's barrier without having arrived");
  w.state = Warp::at_cluster;
  w.yield = true;
}

void fence(Warp& w, const Instr&, u32 m) {
  if (!m) return;
  w.knowledge.fenced.join(w.knowledge.seen, grid->threads);
  ++w.knowledge.seen.at[w.thread];
}

// ---- mbarrier ----

void mbarrier_init(Warp& w, const Instr& I, u32 m) {
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    u32 offset;
    Cta& cta = shared_block(w, address_of(w, I.args[0], lane), offset);
    if (!inside_shared(w, I, lane, offset, 8, "writes")) continue;
    touch_write(w, I, lane, cta, offset, 8);
    if (cta.mbarriers.count(offset))
      grid->report("mbarrier", &w, lane, &I,
                   "initialises the mbarrier at shared byte " + std::to_string(offset) + ", which is one already");
    MBarrier made;
    made.expected = made.pending = static_cast<u32>(get(w, I.args[1].base, lane));
    cta.mbarriers[offset] = made;
  }
}

void mbarrier_inval(Warp& w, const Instr& I, u32 m) {
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    u32 offset;
    Cta& cta = shared_block(w, address_of(w, I.args[0], lane), offset);
    if (!cta.mbarriers.count(offset)) {
      grid->report("mbarrier", &w, lane, &I, "invalidates what is no mbarrier");
      continue;
    }
    touch_write(w, I, lane, cta, offset, 8);
    for (const Copy& copy : cta.copies)
      if (copy.way == Copy::to_shared && copy.mbarrier == offset)
        grid->report("mbarrier", &w, lane, &I, "invalidates an mbarrier that a copy is still to complete on");
    cta.mbarriers.erase(offset);
  }
}

void arrive(Warp& w, const Instr& I, u32 m) {  // mbarrier.arrive, .expect_tx, both
  const bool arrives = I.parts[1] == "arrive", expects = I.has("expect_tx");
  const std::size_t place = arrives ? 1 : 0;  // mbarrier.expect_tx has no state; that of the others is thrown away
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    MBarrier& b = mbarrier_at(w, I, lane, address_of(w, I.args[place], lane));
    if (expects) b.transactions += static_cast<i64>(get(w, I.args[place + 1].base, lane) & 0xffffffff);
    if (arrives) {
      if (!b.pending) {
        grid->report("mbarrier", &w, lane, &I, "arrives more often than the mbarrier expects in this phase");
        continue;
      }
      --b.pending;
      b.gathered.join(w.knowledge, grid->threads);
      ++w.knowledge.seen.at[w.thread];
    }
    mbarrier_check(b);
  }
  ++grid->progress;
}

void mbarrier_wait(Warp& w, const Instr& I, u32 m) {  // try_wait.parity
  u32 r = 0;
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(m >> lane & 1)) continue;
    MBarrier& b = mbarrier_at(w, I, lane, address_of(w, I.args[1], lane));
    if ((b.phase & 1) == (get(w, I.args[2].base, lane) & 1)) continue;
    w.knowledge.join(b.done, grid->threads);
    r |= 1u << lane;
  }
  out_pred(w, I.args[0].base, m, r);
  if (!(m & ~r)) return;
  // One that fails a second time, with nothing new, is a loop: the warp sleeps. The first time it goes on, so that a
  // program that does not look at the answer is found out.
  if (w.last_poll == &I && w.poll_version == grid->progress) w.state = Warp::polling;
  w.last_poll = &I;
  w.poll_version = grid->progress;
  w.yield = w.state == Warp::polling || grid->late != 1;
}

Handler choose_mbarrier(const Instr& I) {
  const std::string& what = I.parts[1];
  if (what == "init") return mbarrier_init;
  if (what == "inval") return mbarrier_inval;
  if (what == "expect_tx") return arrive;
  if (what == "arrive")  // once, and without its state
    return I.args.size() == (I.has("expect_tx") ? 3 : 2) && I.args[0].base.kind == Kind::sink ? arrive : nullptr;
  return what == "try_wait" && I.has("parity") ? mbarrier_wait : nullptr;
}

}  // namespace

MBarrier& mbarrier_at(Warp& w, const Instr& I, u32 lane, u64 address) {
  u32 offset;
  Cta& cta = shared_block(w, address, offset);
  const auto found = cta.mbarriers.find(offset);
  if (found == cta.mbarriers.end()) {
    grid->report("mbarrier", &w, lane, &I, "there is no mbarrier at shared byte " + std::to_string(offset));
    throw Stop("there is no mbarrier at shared byte " + std::to_string(offset) + ": " + I.text);
  }
  touch_read(w, I, lane, cta, offset, 8, false);
  return found->second;
}

void mbarrier_check(MBarrier& b) {
  if (b.pending || b.transactions) return;
  ++b.phase;
  b.pending = b.expected;
  b.done.join(b.gathered, grid->threads);
  b.gathered = {};
  ++grid->progress;
}

Handler choose_memory(Instr& I) {
  const std::string& op = I.parts[0];
  I.space = space_of(I);
  if (op == "ld" || op == "st") return I.space == Space::none ? nullptr : op == "ld" ? load : store;
  if (op == "cvta") return I.has("param") || (I.has("to") && I.has("global")) ? cvta : nullptr;
  if (op == "mapa") return I.type == Type::u32 ? mapa : nullptr;
  if (op == "bra") return branch;
  if (op == "ret") return leave;
  if (op == "fence") return I.has("proxy") || I.has("mbarrier_init") ? fence : nullptr;
  if (op == "mbarrier") return choose_mbarrier(I);
  if (op != "bar" && op != "barrier") return nullptr;
  I.together = true;
  if (I.has("cluster")) return I.has("arrive") ? cluster_arrive : cluster_wait;
  if (I.has("warp")) return I.members = 0, warp_sync;
  return op == "bar" && I.has("sync") ? barrier : nullptr;
}

}  // namespace ptx
