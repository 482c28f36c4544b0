// The scheduler: which warp runs next and for how long, when asynchronous work is done, and when nothing can go on.
#include <algorithm>
#include <cmath>

#include "handlers.h"

namespace ptx {

thread_local Grid* grid = nullptr;

void Grid::report(const char* kind, const Warp* warp, u32 lane, const Instr* instr, const std::string& what) {
  const std::string place = instr ? std::to_string(instr->line) : "";
  if (!said.insert(std::string(kind) + place).second) return;  // once for each instruction
  if (findings.size() >= kMostFindings) return;
  std::string text;
  if (warp) {
    const Cta& cta = *warp->cta;
    text += "block (" + std::to_string(cta.index[0]) + "," + std::to_string(cta.index[1]) + "," +
            std::to_string(cta.index[2]) + ") warp " + std::to_string(warp->number) + " lane " + std::to_string(lane) +
            ": ";
  }
  text += what;
  if (instr) text += "\n      at line " + std::to_string(instr->line) + ": " + instr->text;
  findings.push_back({kind, text});
}

void special32(Warp& w, int which, u32* out) {
  const Config& c = grid->config;
  const Cta& cta = *w.cta;
  const u32 threads = c.block[0], first = static_cast<u32>(w.number) * 32;
  const auto all = [&](u32 v) { std::fill_n(out, 32, v); };
  const auto lanes = [&](auto f) {
    for (u32 l = 0; l < 32; ++l) out[l] = f(first + l);
  };
  switch (which) {
    case tid_x: return lanes([&](u32 t) { return t % threads; });
    case tid_y: return lanes([&](u32 t) { return t / threads % c.block[1]; });
    case tid_z: return lanes([&](u32 t) { return t / threads / c.block[1]; });
    case ctaid_x:
    case ctaid_y:
    case ctaid_z: return all(cta.index[which - ctaid_x]);
    case nctaid_x:
    case nctaid_y:
    case nctaid_z: return all(c.grid[which - nctaid_x]);
    case cluster_ctaid_x:
    case cluster_ctaid_y:
    case cluster_ctaid_z: return all(cta.index[which - cluster_ctaid_x] % c.cluster[which - cluster_ctaid_x]);
    default: return all(static_cast<u32>(cta.rank));
  }
}

namespace {

void check_pending(Warp& w, const Instr& I) {
  const bool product = I.parts[0] == "wgmma";
  for (const int r : I.used) {
    const u8 p = w.pending32[static_cast<std::size_t>(r)];
    if (!p) continue;
    if (product) continue;  // accumulators may be shared by products in flight
    if (p & 15) {
      grid->report("wgmma", &w, 0, &I, "reads or writes an accumulator of a product that has not been waited for");
      return;
    }
    for (const int written : I.written)
      if (written == r) {
        grid->report("wgmma", &w, 0, &I, "writes an operand register of a product that has not been waited for");
        return;
      }
  }
}

// When registers were used. LLVM puts copies of accumulators between wgmma.fence and the product, and ptxas, which
// shares their register or fences once more behind them, makes that right: a copy is as old as its source.
void touch_registers(Warp& w, const Instr& I) {
  if (I.parts[0] == "wgmma") return;
  const auto at = [&](const Operand& o) -> u32& { return w.touched32[static_cast<std::size_t>(o.index)]; };
  if (I.parts[0] != "mov" || I.args[0].base.kind != Kind::reg32 || I.args[1].form != Arg::plain)
    for (const int r : I.used) w.touched32[static_cast<std::size_t>(r)] = w.steps;
  else if (I.args[1].base.kind == Kind::reg32) at(I.args[0].base) = std::max(at(I.args[0].base), at(I.args[1].base));
}

// Makes one step of the warp; false where it must let others run.
bool step(Warp& w) {
  auto& groups = w.groups;
  const std::size_t count = groups.size();
  std::size_t pick = 0;
  if (count > 1) {
    for (std::size_t i = 1; i < count; ++i)
      if (groups[i].pc < groups[pick].pc) pick = i;
    if (w.polls > 0) {
      --w.polls;
      pick = w.random() % count;
    }  // one of them spins: others first, for a while
  }
  const Function& f = *grid->function;
  const Instr* I = nullptr;
  for (std::size_t tried = 0;; ++tried) {
    if (tried > count) {
      std::string text = "lanes of warp " + std::to_string(w.number) + " wait for each other:";
      for (const Group& g : groups)
        text += "\n      " + hex(g.mask) + " at line " + std::to_string(f.code[static_cast<std::size_t>(g.pc)].line) +
                ": " + f.code[static_cast<std::size_t>(g.pc)].text;
      grid->report("deadlock", &w, 0, nullptr, text);
      throw Stop("deadlock within a warp");
    }
    const Group& g = groups[pick];
    I = &f.code[static_cast<std::size_t>(g.pc)];
    if (count == 1 || !I->together) break;
    u32 needed = w.live;
    if (I->members >= 0) needed &= in32(w, I->args[static_cast<std::size_t>(I->members)].base)[__builtin_ctz(g.mask)];
    if (!(needed & ~g.mask)) break;
    // those that wait here let the next in order go on
    std::vector<std::size_t> order(count);
    for (std::size_t i = 0; i < count; ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return groups[a].pc < groups[b].pc; });
    const std::size_t at = static_cast<std::size_t>(std::find(order.begin(), order.end(), pick) - order.begin());
    pick = order[(at + 1) % count];
  }
  w.current = static_cast<int>(pick);
  Group& g = groups[pick];
  u32 m = g.mask;
  if (I->guard >= 0) m &= w.predicates[I->guard] ^ (I->guard_negated ? kAll : 0);
  if (w.has_products) check_pending(w, *I);
  ++w.steps;
  w.branched = w.yield = w.retry = false;
  if (I->together && m && m != g.mask && I->members < 0)
    grid->report("divergent", &w, 0, I,
                 "some lanes carry out an instruction for all lanes: " + hex(m) + " of " + hex(g.mask));
  if (m || I->parts[0] == "bra") I->run(w, *I, m);
  if (!w.touched32.empty()) touch_registers(w, *I);
  if (!w.branched && !w.retry) ++groups[pick].pc;
  if (w.state == Warp::polling && groups.size() > 1) {  // other lanes may have work to do
    w.polls = 64;
    w.state = Warp::running;
    ++w.spins;
    if (w.spins < 4096) return true;
    w.spins = 0;
    w.state = Warp::polling;
  }
  if (groups.size() > 1) {
    for (std::size_t i = 0; i + 1 < groups.size(); ++i)
      for (std::size_t j = i + 1; j < groups.size();) {
        if (groups[i].pc == groups[j].pc) {
          groups[i].mask |= groups[j].mask;
          groups.erase(groups.begin() + static_cast<long>(j));
        } else {
          ++j;
        }
      }
  }
  if (groups.empty()) {
    w.state = Warp::ended;
    --w.cta->live_warps;
    ++grid->progress;
    return false;
  }
  return !w.yield;
}

void wake_barriers(Cta& cta) {
  const int live = cta.live_warps * 32;
  for (Barrier& b : cta.barriers) {
    if (!b.arrived) continue;
    const int expected = b.expected > 0 ? b.expected : live;
    if (b.arrived < expected) continue;
    if (b.arrived > expected)
      grid->report("barrier", nullptr, 0, nullptr,
                   std::to_string(b.arrived) + " threads arrive at a barrier for " + std::to_string(expected));
    for (const int number : b.waiting) {
      Warp& w = *cta.warps[static_cast<std::size_t>(number)];
      w.knowledge.join(b.gathered, grid->threads);
      w.state = Warp::running;
      w.barrier = -1;
    }
    b.waiting.clear();
    b.gathered = {};
    b.arrived = 0;
    ++b.generation;
    ++grid->progress;
  }
}

void wake_cluster() {
  Barrier& b = grid->cluster_barrier;
  int live = 0;
  for (const auto& cta : grid->ctas) live += cta->live_warps;
  if (b.arrived && b.arrived >= live) {  // all that live have arrived
    b.arrived = 0;
    ++b.generation;
    b.released = b.gathered;
    b.gathered = {};
    ++grid->progress;
  }
  for (const auto& cta : grid->ctas)
    for (const auto& w : cta->warps)
      if (w->state == Warp::at_cluster && w->cluster_arrived && b.generation >= w->cluster_generation) {
        w->knowledge.join(b.released, grid->threads);
        w->cluster_arrived = false;
        w->state = Warp::running;
      }
}

bool is_load(const Copy& copy) { return copy.way == Copy::to_shared; }

bool run_one_copy() {
  std::vector<std::pair<Cta*, std::size_t>> found;
  for (const auto& cta : grid->ctas)
    for (std::size_t i = 0; i < cta->copies.size(); ++i)
      if (is_load(cta->copies[i])) found.emplace_back(cta.get(), i);
  std::vector<WarpGroup*> products;
  for (const auto& cta : grid->ctas)
    for (WarpGroup& each : cta->warp_groups)
      if (!each.work.empty()) products.push_back(&each);
  if (found.empty() && products.empty()) return false;
  if (!products.empty() && (found.empty() || grid->random() % 2)) {
    run_tensor_work(*products[grid->random() % products.size()]);
    return true;
  }
  const auto [cta, i] = found[grid->random() % found.size()];
  Copy copy = cta->copies[i];
  cta->copies.erase(cta->copies.begin() + static_cast<long>(i));
  run_copy(copy);
  return true;
}

std::string where(const Warp& w) {
  std::string text = "\n      block " + std::to_string(w.cta->index[0]) + " warp " + std::to_string(w.number);
  if (w.state == Warp::at_barrier) {
    const Barrier& b = w.cta->barriers[static_cast<std::size_t>(w.barrier)];
    text += " waits at barrier " + std::to_string(w.barrier) + " (" + std::to_string(b.arrived) + " of " +
            std::to_string(b.expected > 0 ? b.expected : w.cta->live_warps * 32) + " threads)";
  } else if (w.state == Warp::at_cluster) {
    text += " waits at the cluster's barrier";
  } else if (w.state == Warp::polling) {
    text += " polls an mbarrier";
  }
  for (const Group& g : w.groups) {
    const Instr& I = grid->function->code[static_cast<std::size_t>(std::max(0, g.pc - 1))];
    text += " at line " + std::to_string(I.line) + " `" + I.text + "`";
  }
  return text;
}

void prepare(Cta& cta) {
  const Function& f = *grid->function;
  const u32 size = grid->shared_bytes;
  cta.shared.assign(size + 64, 0xff);
  cta.written.assign(grid->tensor_shadow + 8 * 512 * static_cast<u32>(grid->granule), 0);
  const bool tensor = std::any_of(f.code.begin(), f.code.end(), [](const Instr& I) { return I.parts[0] == "tcgen05"; });
  const std::size_t granules = grid->tensor_shadow / static_cast<u32>(grid->granule) + (tensor ? 8 * 512 : 0);
  cta.last_write.assign(granules, 0);
  cta.last_write_instr.assign(granules, 0);
  cta.reads.assign(granules * static_cast<std::size_t>(grid->threads), 0);
  cta.pending_reads.assign(granules, 0);
  cta.pending_writes.assign(granules, 0);
  cta.barriers.assign(16, {});
  cta.mbarriers.clear();
  cta.copies.clear();
  cta.tensor.clear(), cta.tensor_columns.clear();
  cta.may_allocate = true;
  cta.engine_clock = 0;
  const u32 threads = grid->config.block[0] * grid->config.block[1] * grid->config.block[2];
  bool products = false;
  for (const Instr& I : f.code) products |= I.parts[0] == "wgmma";
  for (auto& each : cta.warps) {
    Warp& w = *each;
    w.storage32.assign(static_cast<std::size_t>(f.count32) * 32 + 32, 0x7fc0dead);  // what nothing has written
    w.storage64.assign(static_cast<std::size_t>(f.count64) * 32 + 32, 0xdead0000dead0000ull);
    w.storage_pred.assign(static_cast<std::size_t>(f.count_pred) + 1, 0xa5a5a5a5);
    w.r32 = w.storage32.data(), w.r64 = w.storage64.data(), w.predicates = w.storage_pred.data();
    const u32 left = threads - static_cast<u32>(w.number) * 32;
    w.live = left >= 32 ? kAll : (1u << left) - 1;
    w.groups.assign(1, {w.live, 0});
    w.state = Warp::running;
    w.knowledge = {};
    w.knowledge.seen.at[w.thread] = 1;
    w.small.clear(), w.products.clear(), w.moved.clear();
    std::fill_n(w.commits, 32, 0), std::fill_n(w.bulk_commits, 32, 0);
    w.product_commits = w.products_issued = 0;
    w.has_products = false;
    w.pending32.assign(static_cast<std::size_t>(f.count32) + 1, 0);
    if (products) w.touched32.assign(static_cast<std::size_t>(f.count32) + 1, 0);
    else w.touched32.clear();
    w.fence_step = w.steps = 0;
    w.cluster_arrived = false;
    w.stored = 0;
    w.doubts.clear();
    w.last_poll = nullptr;
    w.polls = w.spins = 0;
    w.random.seed(static_cast<u32>(grid->random()));
  }
  for (WarpGroup& each : cta.warp_groups) each = {each.thread, 0, 0, {}};
  cta.live_warps = static_cast<int>(cta.warps.size());
}

void end_of(Cta& cta) {
  for (const Copy& copy : cta.copies)
    grid->report("unfinished", nullptr, 0, copy.instr,
                 is_load(copy) ? "the block ends before this copy to its shared memory has"
                               : "the block ends before this copy has read its shared memory (no "
                                 "cp.async.bulk.wait_group by the lane that began it)");
  for (Copy& copy : cta.copies)
    if (!is_load(copy)) run_copy(copy);
  for (const auto& w : cta.warps) {
    if (!w->products.empty())
      grid->report("unfinished", w.get(), 0, w->products.front().instr,
                   "the warp ends before this product is waited for");
    if (!w->small.empty())
      grid->report("unfinished-copy", w.get(), 0, w->small.front().instr,
                   "the warp ends before this cp.async is waited for");
  }
  for (const WarpGroup& each : cta.warp_groups)
    if (!each.work.empty())
      grid->report("unfinished", each.work.front().warp, 0, each.work.front().instr,
                   "the block ends before this has been carried out");
  if (!cta.tensor_columns.empty())
    grid->report("tensor memory", nullptr, 0, nullptr, "the block ends with columns allocated");
  for (const auto& [offset, b] : cta.mbarriers)
    if (b.transactions)
      grid->report("mbarrier", nullptr, 0, nullptr,
                   "the mbarrier at shared byte " + std::to_string(offset) + " still awaits " +
                       std::to_string(b.transactions) + " bytes at the end");
}

void run_cluster() {
  grid->cluster_barrier = {};
  for (auto& cta : grid->ctas) prepare(*cta);
  grid->global.begin(*grid->function, grid->threads);
  std::vector<Warp*> warps;
  for (auto& cta : grid->ctas)
    for (auto& w : cta->warps) warps.push_back(w.get());
  static const int quanta[] = {1, 3, 20, 100, 700, 5000};
  int idle = 0;
  std::vector<Warp*> ready;
  for (;;) {
    ready.clear();
    bool live = false;
    for (auto& cta : grid->ctas) wake_barriers(*cta);
    if (grid->ctas.size() > 1 || grid->cluster_barrier.arrived) wake_cluster();
    for (Warp* w : warps) {
      if (w->state == Warp::ended) continue;
      live = true;
      if (w->state == Warp::polling && w->poll_version != grid->progress) w->state = Warp::running;
      if (w->state == Warp::running) ready.push_back(w);
    }
    if (!live) break;
    // asynchronous copies: at some time, at the latest when nothing else can go on
    const bool begin_copy = grid->late == 2 || (grid->late == 0 && grid->random() % 8 == 0);
    if (begin_copy || ready.empty()) {
      if (run_one_copy()) {
        idle = 0;
        continue;
      }
    }
    if (ready.empty()) {
      bool polls = false;
      for (Warp* w : warps)
        if (w->state == Warp::polling) w->state = Warp::running, polls = true;
      if (polls && ++idle < 4) continue;
      std::string text = "no warp can go on:";
      for (Warp* w : warps)
        if (w->state != Warp::ended) {
          if (w->state == Warp::running) w->state = Warp::polling;
          text += where(*w);
        }
      grid->report("deadlock", nullptr, 0, nullptr, text);
      throw Stop("deadlock");
    }
    Warp& w = *ready[grid->random() % ready.size()];
    const u64 before = grid->progress;
    const int quantum = quanta[grid->random() % 6];
    int done = 0;
    while (done < quantum) {
      ++done;
      if (!step(w)) break;
    }
    grid->steps += static_cast<u64>(done);
    if (grid->steps > kMostSteps) throw Stop("too many steps: " + std::to_string(grid->steps));
    if (grid->progress != before || w.state != Warp::polling) idle = 0;
  }
  for (auto& cta : grid->ctas) end_of(*cta);
}

}  // namespace

void run_grid(Grid& given) {
  grid = &given;
  Grid& g = given;
  const Config& c = g.config;
  const Function& f = *g.function;
  g.random.seed(static_cast<u32>(g.options.seed * 7919 + 1));
  g.late = g.options.seed % 3;  // 0 at random, 1 late, 2 at once
  g.granule = f.subword_shared ? 1 : 4;
  g.shared_bytes = (f.static_shared + 127) / 128 * 128 + c.shared;
  g.tensor_shadow = (g.shared_bytes + 128) / 4 * 4;
  const u32 threads = c.block[0] * c.block[1] * c.block[2], warps = (threads + 31) / 32;
  const u32 blocks = c.cluster[0] * c.cluster[1] * c.cluster[2];
  g.threads = static_cast<int>(blocks * (warps + 1 + (warps + 3) / 4));
  if (g.threads > kMostThreads) throw Stop("a cluster of too many warps: " + std::to_string(g.threads));
  int thread = 0;
  for (u32 b = 0; b < blocks; ++b) {
    g.ctas.emplace_back(new Cta);
    Cta& cta = *g.ctas.back();
    cta.rank = static_cast<int>(b);
    for (u32 i = 0; i < warps; ++i) {
      cta.warps.emplace_back(new Warp);
      Warp& w = *cta.warps.back();
      w.cta = &cta, w.number = static_cast<int>(i), w.thread = thread++;
    }
  }
  for (auto& cta : g.ctas) {
    cta->engine = thread++;
    cta->warp_groups.resize((warps + 3) / 4);
    for (WarpGroup& each : cta->warp_groups) each.thread = thread++;
  }
  // clusters one after the other, in an order that depends on the seed
  const u64 total =
      static_cast<u64>(c.grid[0] / c.cluster[0]) * (c.grid[1] / c.cluster[1]) * (c.grid[2] / c.cluster[2]);
  for (u64 i = 0; i < total; ++i) {
    const u64 n = g.options.seed % 2 ? total - 1 - i : i;
    const u64 across = c.grid[0] / c.cluster[0], down = c.grid[1] / c.cluster[1];
    const u64 base[3] = {n % across, n / across % down, n / across / down};
    for (u32 b = 0; b < blocks; ++b) {
      Cta& cta = *g.ctas[b];
      const u32 inside[3] = {b % c.cluster[0], b / c.cluster[0] % c.cluster[1], b / c.cluster[0] / c.cluster[1]};
      for (int d = 0; d < 3; ++d) cta.index[d] = static_cast<u32>(base[d]) * c.cluster[d] + inside[d];
    }
    run_cluster();
  }
  grid = nullptr;
}

}  // namespace ptx
