#include "exceptions.h"

#include <c10/util/Exception.h>
#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <typeinfo>
#include <utility>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

namespace tch_extension {

namespace detail {
__thread RustCall* innermost_call = nullptr;
}  // namespace detail

namespace {

// A function that tries again and again may stop any number of exceptions, but it fails with one of
// the last.
constexpr size_t kMostKept = 8;

// Not strdup, which is the function below.
char* copy(std::string_view text) {
  char* made = static_cast<char*>(std::malloc(text.size() + 1));
  if (made == nullptr) return nullptr;
  std::memcpy(made, text.data(), text.size());
  made[text.size()] = '\0';
  return made;
}

// A text as it is compared. A message of libtorch's may end in a new line, and where a TchError
// becomes another type of error, tch puts its own words before the text.
std::string_view essence(std::string_view text) {
  constexpr std::string_view kTch = "Internal torch error: ";
  if (text.substr(0, kTch.size()) == kTch) text.remove_prefix(kTch.size());
  const size_t last = text.find_last_not_of(" \r\n\t");
  return text.substr(0, last == std::string_view::npos ? 0 : last + 1);
}

std::string_view without_namespace(std::string_view name) {
  const size_t place = name.rfind("::");
  return place == std::string_view::npos ? name : name.substr(place + 2);
}

// Whether the exception that is being handled has nothing to tell but its text. Python sees both
// types as a RuntimeError.
bool is_its_text(const std::type_info* type) {
  return type != nullptr && (*type == typeid(c10::Error) || *type == typeid(std::runtime_error));
}

bool is_python_error(const std::type_info* type) {
  return type != nullptr && std::strcmp(type->name(), "12python_error") == 0;
}

std::string readable(const std::type_info* type) {
  if (type == nullptr) return "unknown";
  int status = 0;
  char* name = abi::__cxa_demangle(type->name(), nullptr, nullptr, &status);
  std::string result = name == nullptr ? type->name() : name;
  std::free(name);
  return result;
}

// The text of the exception that is being handled, without a backtrace.
std::string short_text(const char* text) {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (...) {
    return text;
  }
}

bool is_text_of_current(const char* text) {
  try {
    throw;
  } catch (const std::exception& error) {
    return std::strcmp(error.what(), text) == 0;
  } catch (...) {
    return false;
  }
}

// Keeps the exception that is being handled, and returns the text for Rust.
std::string keep_current(const char* text) {
  const auto* type = abi::__cxa_current_exception_type();
  RustCall::Kept kept;
  std::string message = text;
  if (is_python_error(type)) {
    kept.python = PythonError::take();
    if (message.empty()) message = kept.python.text();
  }
  if (message.empty()) message = "an exception of type " + readable(type) + " without a message";
  RustCall* call = RustCall::innermost();
  if (call == nullptr || is_its_text(type)) return message;
  kept.exception = std::current_exception();
  kept.texts.push_back(message);
  if (*text != '\0') kept.texts.push_back(short_text(text));
  call->keep(std::move(kept));
  return message;
}

char* keep_or_copy(const char* text) noexcept {
  try {
    return copy(keep_current(text));
  } catch (...) {
    return copy(text);
  }
}

}  // namespace

void RustCall::keep(Kept kept) {
  if (kept_.size() == kMostKept) kept_.erase(kept_.begin());
  kept_.push_back(std::move(kept));
}

RustCall::Kept* RustCall::find(std::string_view text) {
  for (auto kept = kept_.rbegin(); kept != kept_.rend(); ++kept) {
    for (const std::string& known : kept->texts) {
      if (essence(known) == essence(text)) return &*kept;
    }
  }
  return nullptr;
}

void RustCall::fail(std::string_view name, std::string_view text) {
  Kept* kept = find(text);
  if (kept == nullptr) throw std::runtime_error(named(name, text));
  kept->python.restore();
  std::rethrow_exception(kept->exception);
}

std::string named(std::string_view name, std::string_view text) {
  if (name.empty()) return std::string(text);
  constexpr std::string_view kColon = ": ";
  for (;;) {
    const size_t place = text.find(kColon);
    const auto first = text.substr(0, place);
    if (place == std::string_view::npos || without_namespace(first) != without_namespace(name)) {
      return std::string(name).append(kColon).append(text);
    }
    if (first.size() > name.size()) name = first;
    text.remove_prefix(place + kColon.size());
  }
}

}  // namespace tch_extension

using namespace tch_extension;

// Called by `guard` while it handles an exception with this text.
char* tch_extension_keep_exception(const char* text) { return keep_or_copy(text); }

// torch-sys catches the exceptions of tch's own calls and keeps only `strdup(error.what())`. In the
// program or library that contains this file, that is this function. While an exception is being
// handled in a call from libtorch, it keeps that exception, too. Otherwise it does what strdup
// does. A program may define a strdup of its own, which then takes the place of this one; tch's
// exceptions become texts again.
extern "C" __attribute__((weak, visibility("hidden"))) char* tch_extension_strdup(
    const char* text) noexcept __asm__("strdup");

char* tch_extension_strdup(const char* text) noexcept {
  const bool may_be_caught =
      RustCall::innermost() != nullptr && abi::__cxa_current_exception_type() != nullptr;
  return may_be_caught && is_text_of_current(text) ? keep_or_copy(text) : copy(text);
}

// From now on, the exception with the text `before` is known by the text `now`, too.
TCH_EXTENSION_API void tch_extension_exception_known_as(const char* before, size_t before_len,
                                                        const char* now, size_t now_len) {
  RustCall* call = RustCall::innermost();
  auto* kept = call == nullptr ? nullptr : call->find({before, before_len});
  if (kept != nullptr) kept->texts.emplace_back(now, now_len);
}

// A text of the exception that was kept last, or null if it has no more texts. The caller frees it
// like a message.
TCH_EXTENSION_API char* tch_extension_newest_exception(size_t index) {
  RustCall* call = RustCall::innermost();
  const auto* kept = call == nullptr ? nullptr : call->newest();
  return kept == nullptr || index >= kept->texts.size() ? nullptr : copy(kept->texts[index]);
}

// The caller frees the text like a message.
TCH_EXTENSION_API char* tch_extension_named(const char* name, size_t name_len, const char* text,
                                            size_t text_len) {
  return copy(named({name, name_len}, {text, text_len}));
}
