// The parser: PTX text to Function, of which decode.cpp then makes handlers.
#include "program.h"

#include <algorithm>
#include <cctype>
#include <cstring>

#include "reader.h"

namespace ptx {

namespace {

const std::map<std::string, int> kSpecials = {{"%tid.x", tid_x},
                                              {"%tid.y", tid_y},
                                              {"%tid.z", tid_z},
                                              {"%ctaid.x", ctaid_x},
                                              {"%ctaid.y", ctaid_y},
                                              {"%ctaid.z", ctaid_z},
                                              {"%nctaid.x", nctaid_x},
                                              {"%nctaid.y", nctaid_y},
                                              {"%nctaid.z", nctaid_z},
                                              {"%cluster_ctaid.x", cluster_ctaid_x},
                                              {"%cluster_ctaid.y", cluster_ctaid_y},
                                              {"%cluster_ctaid.z", cluster_ctaid_z},
                                              {"%cluster_ctarank", cluster_ctarank}};

struct Scope {
  std::map<std::string, Operand> registers;
  std::map<std::string, int> labels;
  std::vector<std::pair<int, int>> uses;  // (instruction, argument) of branches
};

class Parser : Reader {
 public:
  explicit Parser(const std::string& text) : Reader(text), module_(new Module) {}

  std::unique_ptr<Module> run() {
    while (skip(), at_ < text_.size()) top_level();
    return std::move(module_);
  }

 private:
  void top_level() {
    const std::string first = word();
    if (first.empty()) fail("unexpected " + text_.substr(at_, 20));
    if (first == ".version" || first == ".address_size" || first == ".file" || first == ".target") return skip_line();
    if (first == ".section") {
      word();
      return skip_braces();
    }
    if (first == ".visible" || first == ".extern") return top_level();
    if (first == ".entry") return entry();
    if (first == ".global" || first == ".shared") return variable(first, nullptr);
    if (first == ".pragma") return skip_statement();
    fail("unknown directive " + first);
  }

  // .global .align 16 .b8 name[10] = {1, 2};
  void variable(const std::string& space, Function* function) {
    u64 align = 1, size = 0;
    std::string name, type;
    for (;;) {
      const std::string next = word();
      if (next == ".align") align = number(word());
      else if (next[0] == '.') type = next;
      else {
        name = next;
        break;
      }
    }
    const int each = bytes_of(type_of(type.substr(1)));
    size = static_cast<u64>(each);
    align = std::max<u64>(align, size);
    bool open = false;
    while (take("[")) {
      skip();
      if (text_[at_] == ']') open = true;
      else size *= number(word());
      expect("]");
    }
    auto& symbols = function ? function->symbols : module_->symbols;
    if (space == ".shared") {
      shared_ = (shared_ + align - 1) / align * align;
      symbols[name] = {Space::shared, open ? ~u64{0} : shared_, size};
      if (!open) shared_ += size;
    } else {
      module_->memory.emplace_back(new u8[size + 256]());
      u8* start = module_->memory.back().get();
      start += (256 - reinterpret_cast<std::uintptr_t>(start) % 256) % 256;
      if (take("=")) initialise(start, each, size);
      symbols[name] = {Space::global, reinterpret_cast<u64>(start), size};
      module_->ranges.emplace_back(reinterpret_cast<u64>(start), reinterpret_cast<u64>(start) + size);
    }
    expect(";");
  }

  void initialise(u8* start, int each, u64 size) {
    expect("{");
    u64 at = 0;
    do {
      const u64 value = literal(word(), Type::b64);
      if (at + static_cast<u64>(each) <= size) std::memcpy(start + at, &value, static_cast<std::size_t>(each));
      at += static_cast<u64>(each);
    } while (take(","));
    expect("}");
  }

  void entry() {
    function_ = new Function;
    module_->functions.emplace_back(function_);
    function_->name = word();
    if (take("(")) {
      while (!take(")")) {
        parameter();
        take(",");
      }
    }
    for (;;) {
      skip();
      if (text_[at_] == '{') break;
      const std::string directive = word();
      if (directive == ".reqntid") function_->threads = threads();
      else if (directive == ".maxntid") function_->max_threads = threads();
      else if (directive == ".minnctapersm" || directive == ".maxnreg") word();
      else fail("unknown directive of an entry: " + directive);
    }
    expect("{");
    scopes_.assign(1, {});
    body();
    function_->static_shared = static_cast<u32>(shared_);
    decode(*function_, *module_);
    function_ = nullptr;
  }

  int threads() {
    int product = static_cast<int>(number(word()));
    while (take(",")) product *= static_cast<int>(number(word()));
    return product;
  }

  void parameter() {
    expect(".param");
    u64 align = 1, size = 0;
    std::string name;
    for (;;) {
      const std::string next = word();
      if (next == ".align") {
        align = number(word());
        continue;
      }
      if (next == ".ptr" || next == ".global") continue;
      if (next[0] == '.') {
        size = static_cast<u64>(bytes_of(type_of(next.substr(1))));
        continue;
      }
      name = next;
      break;
    }
    align = std::max<u64>(align, std::min<u64>(size, 8));
    if (take("[")) {
      size *= number(word());
      expect("]");
    }
    u64 offset = (function_->parameter_bytes + align - 1) / align * align;
    function_->symbols[name] = {Space::param, offset, size};
    function_->parameters.push_back({static_cast<u32>(offset), static_cast<u32>(size)});
    function_->parameter_bytes = static_cast<u32>(offset + size);
  }

  void body() {
    for (int depth = 1; depth;) {
      skip();
      if (at_ >= text_.size()) fail("the end of a function is missing");
      if (take("{")) {
        scopes_.emplace_back();
        ++depth;
      } else if (take("}")) {
        close();
        --depth;
      } else if (take(";")) {
        continue;
      } else if (text_[at_] == '.') {
        directive();
      } else {
        statement();
      }
    }
  }

  void close() {
    Scope scope = std::move(scopes_.back());
    scopes_.pop_back();
    for (const auto& [instruction, argument] : scope.uses) {
      Arg& arg = function_->code[static_cast<std::size_t>(instruction)].args[static_cast<std::size_t>(argument)];
      const auto found = scope.labels.find(arg.name);
      if (found != scope.labels.end()) arg.target = found->second;
      else if (scopes_.empty()) fail("there is no label " + arg.name);
      else scopes_.back().uses.emplace_back(instruction, argument);
    }
  }

  void directive() {
    const std::string name = word();
    if (name == ".loc" || name == ".file") return skip_line();
    if (name == ".pragma") return skip_statement();
    if (name == ".shared" || name == ".global") return variable(name, function_);
    if (name != ".reg") fail("unknown directive " + name);
    const std::string type = word();
    const Type kind = type_of(type.substr(1));
    if (kind == Type::none) fail("registers of type " + type + " are not supported");
    do {
      const std::string prefix = word();
      int count = -1;
      if (take("<")) {
        count = static_cast<int>(number(word()));
        expect(">");
      }
      if (count < 0) declare(prefix, kind);
      else
        for (int i = 0; i < count; ++i) declare(prefix + std::to_string(i), kind);
    } while (take(","));
    expect(";");
  }

  void declare(const std::string& name, Type type) {
    Operand made;
    if (type == Type::pred) {
      made.kind = Kind::pred;
      made.index = function_->count_pred++;
    } else if (bytes_of(type) == 8) {
      made.kind = Kind::reg64;
      made.index = function_->count64++;
    } else {
      made.kind = Kind::reg32;
      made.index = function_->count32++;
    }
    scopes_.back().registers[name] = made;
  }

  const Operand* find_register(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->registers.find(name);
      if (found != scope->registers.end()) return &found->second;
    }
    return nullptr;
  }

  void statement() {
    Instr made;
    const std::size_t begin = at_;
    made.line = line();
    if (take("@")) {
      made.guard_negated = take("!");
      const std::string name = word();
      const Operand* found = find_register(name);
      if (!found || found->kind != Kind::pred) fail("no predicate " + name);
      made.guard = found->index;
    }
    std::string name = word();
    skip();
    if (text_[at_] == ':' && text_[at_ + 1] == ':') {  // mbarrier.init.shared::cta.b64
      while (text_.compare(at_, 2, "::") == 0) {
        at_ += 2;
        name += "::" + word();
      }
    } else if (text_[at_] == ':') {
      ++at_;
      scopes_.back().labels[name] = static_cast<int>(function_->code.size());
      return;
    }
    if (name.empty()) fail("unexpected " + text_.substr(at_, 40));
    for (std::size_t i = 0; i <= name.size();) {
      const std::size_t dot = std::min(name.find('.', i), name.size());
      made.parts.push_back(name.substr(i, dot - i));
      i = dot + 1;
    }
    const int number = static_cast<int>(function_->code.size());
    if (!take(";")) {
      do made.args.push_back(argument(made));
      while (take(","));
      expect(";");
    }
    std::string& text = made.text = text_.substr(begin, at_ - begin);
    std::replace(text.begin(), text.end(), '\n', ' ');
    std::replace(text.begin(), text.end(), '\t', ' ');
    if (text.size() > 200) text = text.substr(0, 120) + " ... " + text.substr(text.size() - 70);
    for (const auto& part : made.parts) {
      const Type type = type_of(part);
      if (type == Type::none) continue;
      if (made.type == Type::none) made.type = type;
      else if (made.type2 == Type::none) made.type2 = type;
    }
    function_->code.push_back(std::move(made));
    for (std::size_t i = 0; i < function_->code.back().args.size(); ++i)
      if (function_->code.back().args[i].form == Arg::label)
        scopes_.back().uses.emplace_back(number, static_cast<int>(i));
  }

  u64 literal(const std::string& text, Type type) {
    if (text.size() > 2 && text[0] == '0' && (text[1] == 'f' || text[1] == 'F'))
      return std::stoull(text.substr(2), nullptr, 16);
    if (text.size() > 2 && text[0] == '0' && (text[1] == 'd' || text[1] == 'D')) {
      const u64 bits = std::stoull(text.substr(2), nullptr, 16);
      if (type != Type::f32) return bits;
      double value;
      std::memcpy(&value, &bits, 8);
      const float narrow = static_cast<float>(value);
      u32 out;
      std::memcpy(&out, &narrow, 4);
      return out;
    }
    std::string digits = text;
    while (!digits.empty() && (digits.back() == 'U' || digits.back() == 'u')) digits.pop_back();
    return std::stoull(digits, nullptr, 0);
  }

  void constant(Operand& operand, u64 value) {
    operand.kind = Kind::constant;
    operand.value = value;
    operand.c32 = module_->lanes32(value & 0xffffffffu);
    operand.c64 = module_->lanes64(value);
  }

  Operand operand(const Instr& instr) {
    Operand made;
    skip();
    if (take("!")) made.negated = true;
    if (take("-")) {
      const std::string name = word();
      u64 value = literal(name, instr.type);
      const bool single = name.size() > 2 && (name[1] == 'f' || name[1] == 'F') && name[0] == '0';
      constant(made, single ? value ^ 0x80000000u : ~value + 1);
      return made;
    }
    const std::string name = word();
    if (name.empty()) fail("expected an operand before " + text_.substr(at_, 30));
    if (name == "_") {
      made.kind = Kind::sink;
      return made;
    }
    if (std::isdigit(static_cast<unsigned char>(name[0]))) {
      Type type = Type::none;
      for (const auto& part : instr.parts)
        if (type == Type::none) type = type_of(part);
      constant(made, literal(name, type));
      return made;
    }
    if (const Operand* found = find_register(name)) {
      const bool negated = made.negated;
      made = *found;
      made.negated = negated;
      return made;
    }
    if (name[0] == '%') {
      const auto special = kSpecials.find(name);
      if (special == kSpecials.end()) fail("unknown register " + name);
      made.kind = Kind::special;
      made.index = special->second;
      return made;
    }
    if (const Symbol* symbol = find_symbol(name)) {
      constant(made, symbol->offset);
      made.symbol = symbol->space;
      return made;
    }
    fail("unknown name " + name);
  }

  const Symbol* find_symbol(const std::string& name) const {
    const auto mine = function_->symbols.find(name);
    if (mine != function_->symbols.end()) return &mine->second;
    const auto shared = module_->symbols.find(name);
    return shared == module_->symbols.end() ? nullptr : &shared->second;
  }

  Arg argument(const Instr& instr) {
    Arg made;
    skip();
    if (take("[")) {
      made.form = Arg::address;
      made.base = operand(instr);
      for (;;) {
        skip();
        if (take("+")) {
          skip();
          const bool minus = take("-");
          const i64 value = static_cast<i64>(literal(word(), Type::b64));
          made.offset += minus ? -value : value;
        } else if (take("-")) {
          made.offset -= static_cast<i64>(literal(word(), Type::b64));
        } else if (take(",")) {
          expect("{");
          do made.items.push_back(operand(instr));
          while (take(","));
          expect("}");
        } else {
          break;
        }
      }
      expect("]");
      return made;
    }
    if (take("{")) {
      made.form = Arg::vector;
      if (!take("}")) {
        do made.items.push_back(operand(instr));
        while (take(","));
        expect("}");
      }
      return made;
    }
    if (instr.parts[0] == "bra") {
      made.name = word();
      made.form = Arg::label;
      return made;
    }
    made.base = operand(instr);
    if (take("|")) {
      made.form = Arg::pair;
      made.second = operand(instr);
    }
    return made;
  }

  std::unique_ptr<Module> module_;
  Function* function_ = nullptr;
  std::vector<Scope> scopes_;
  u64 shared_ = 0;
};

}  // namespace

std::unique_ptr<Module> parse(const std::string& text) { return Parser(text).run(); }

}  // namespace ptx
