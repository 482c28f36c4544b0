// PTX text, word by word.
#pragma once
#include <algorithm>
#include <cctype>
#include <cstring>

#include "program.h"

namespace ptx {

inline std::string without_comments(const std::string& text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    if (text.compare(i, 2, "//") == 0) {
      while (i < text.size() && text[i] != '\n') ++i;
    } else if (text.compare(i, 2, "/*") == 0) {
      for (i += 2; i < text.size() && text.compare(i, 2, "*/") != 0; ++i)
        if (text[i] == '\n') out += '\n';
      i += 2;
      out += ' ';
    } else {
      out += text[i++];
    }
  }
  return out;
}

inline bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(without_comments(text)) {}

 protected:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("PTX, line " + std::to_string(line_at(at_)) + ": " + what);
  }

  int line_at(std::size_t place) const {
    return 1 + static_cast<int>(
                   std::count(text_.begin(), text_.begin() + static_cast<long>(std::min(place, text_.size())), '\n'));
  }

  int line() {  // of at_, which only grows
    line_ += static_cast<int>(
        std::count(text_.begin() + static_cast<long>(counted_), text_.begin() + static_cast<long>(at_), '\n'));
    counted_ = at_;
    return line_;
  }

  void skip() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }

  bool take(const char* what) {
    skip();
    const std::size_t length = std::strlen(what);
    if (text_.compare(at_, length, what) != 0) return false;
    at_ += length;
    return true;
  }

  void expect(const char* what) {
    if (!take(what)) fail(std::string("expected ") + what + " before " + text_.substr(at_, 40));
  }

  std::string word() {
    skip();
    const std::size_t begin = at_;
    while (at_ < text_.size() && is_word(text_[at_])) ++at_;
    return text_.substr(begin, at_ - begin);
  }

  void skip_line() {
    while (at_ < text_.size() && text_[at_] != '\n') ++at_;
  }

  void skip_statement() {
    while (at_ < text_.size() && text_[at_] != ';') ++at_;
    ++at_;
  }

  void skip_braces() {
    expect("{");
    for (int depth = 1; depth; ++at_) {
      if (at_ >= text_.size()) fail("a { without its }");
      if (text_[at_] == '{') ++depth;
      if (text_[at_] == '}') --depth;
    }
  }

  u64 number(const std::string& word) {
    if (word.empty()) fail("expected a number before " + text_.substr(at_, 20));
    return std::stoull(word, nullptr, 0);
  }

  std::string text_;
  std::size_t at_ = 0;

 private:
  std::size_t counted_ = 0;
  int line_ = 1;
};

}  // namespace ptx
