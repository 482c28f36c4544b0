// Which handler each instruction has.
#include "handlers.h"

namespace ptx {
namespace {

void unsupported(Warp&, const Instr& I, u32) {
  throw Stop("unsupported instruction, line " + std::to_string(I.line) + ": " + I.text);
}

Handler choose(Instr& I) {
  for (const auto chooser : {choose_alu, choose_convert, choose_memory, choose_copy, choose_matrix, choose_tensor})
    if (const Handler found = chooser(I)) return found;
  return nullptr;
}

void collect(const Arg& arg, std::vector<int>& found) {
  const auto one = [&](const Operand& o) {
    if (o.kind == Kind::reg32) found.push_back(o.index);
  };
  one(arg.base), one(arg.second);
  for (const Operand& o : arg.items) one(o);
}

}  // namespace

void decode(Function& function, Module& module) {
  const u32 dynamic = (function.static_shared + 127) / 128 * 128;
  const auto resolve = [&](Operand& o) {  // of memory whose size the launch says
    if (o.symbol == Space::shared && o.value == ~u64{0})
      o.value = dynamic, o.c32 = module.lanes32(dynamic), o.c64 = module.lanes64(dynamic);
  };
  for (Instr& I : function.code) {
    for (Arg& arg : I.args) {
      resolve(arg.base), resolve(arg.second);
      for (Operand& o : arg.items) resolve(o);
      collect(arg, I.used);
    }
    const std::string& op = I.parts[0];
    if (!I.args.empty() && I.args[0].form != Arg::address && op != "wgmma" && op != "bra")
      collect(I.args[0], I.written);
    I.run = choose(I);
    if (!I.run) I.run = unsupported;
    function.subword_shared |= (op == "ld" || op == "st") && I.space == Space::shared && bytes_of(I.type) < 4;
  }
  Instr last;  // running off the end
  last.parts = {"ret"};
  last.text = "(end)";
  last.run = choose(last);
  function.code.push_back(last);
}

}  // namespace ptx
