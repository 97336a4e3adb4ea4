// Ints that are not known while an operator is traced, for fake kernels written in Rust.

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstring>
#include <sstream>
#include <vector>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

namespace tch_extension {

// An int, or a symbolic one if `node` is not null. src/ffi/sym_int.rs mirrors it. In Rust it owns
// its reference of the node.
struct RawSymInt {
  int64_t number;
  c10::SymNodeImpl* node;
};

namespace {

c10::SymInt read(const RawSymInt& raw) {
  if (raw.node == nullptr) return raw.number;
  return c10::SymInt(c10::SymNode::reclaim_copy(raw.node));
}

RawSymInt give(c10::SymInt value) {
  if (const auto known = value.maybe_as_int()) return {*known, nullptr};
  return {0, std::move(value).release()};
}

std::vector<c10::SymInt> read_all(const RawSymInt* values, size_t len) {
  std::vector<c10::SymInt> result;
  result.reserve(len);
  for (size_t i = 0; i < len; ++i) result.push_back(read(values[i]));
  return result;
}

c10::SymInt combine(char operation, const c10::SymInt& a, const c10::SymInt& b) {
  switch (operation) {
    case '+':
      return a + b;
    case '-':
      return a - b;
    case '*':
      return a * b;
    case '/':
      return a / b;
    case '%':
      return a % b;
    case '<':
      return a.min(b);
    default:
      return a.max(b);
  }
}

}  // namespace
}  // namespace tch_extension

using namespace tch_extension;

TCH_EXTENSION_API void tch_extension_retain_sym_int(c10::SymNodeImpl* node) {
  c10::raw::intrusive_ptr::incref(node);
}

TCH_EXTENSION_API void tch_extension_release_sym_int(c10::SymNodeImpl* node) {
  c10::raw::intrusive_ptr::decref(node);
}

TCH_EXTENSION_API Message tch_extension_combine_sym_ints(char operation, const RawSymInt* a,
                                                         const RawSymInt* b, RawSymInt* result) {
  return guard([&] { *result = give(combine(operation, read(*a), read(*b))); });
}

// The answer becomes a guard of what is traced.
TCH_EXTENSION_API Message tch_extension_compare_sym_ints(bool equal, const RawSymInt* a,
                                                         const RawSymInt* b, bool* result) {
  return guard([&] {
    const auto x = read(*a), y = read(*b);
    *result = equal ? x == y : x < y;
  });
}

// The number, which becomes a guard of what is traced.
TCH_EXTENSION_API Message tch_extension_guard_sym_int(c10::SymNodeImpl* node, int64_t* result) {
  return guard([&] { *result = read({0, node}).guard_int(__FILE__, __LINE__); });
}

// The caller frees the text like a message.
TCH_EXTENSION_API Message tch_extension_sym_int_text(c10::SymNodeImpl* node, char** text) {
  return guard([&] {
    std::ostringstream out;
    out << read({0, node});
    *text = strdup(out.str().c_str());
  });
}

// The tensor's number of dimensions.
TCH_EXTENSION_API Message tch_extension_sym_dim(const at::Tensor* tensor, size_t* dim) {
  return guard([&] { *dim = static_cast<size_t>(tensor->dim()); });
}

// `sizes` has room for `dim` entries, which the caller owns on success.
TCH_EXTENSION_API Message tch_extension_sym_sizes(const at::Tensor* tensor, RawSymInt* sizes,
                                                  size_t dim) {
  return guard([&] {
    const auto found = tensor->sym_sizes();
    if (found.size() != dim) throw std::runtime_error("the tensor has changed its dimensions");
    for (size_t i = 0; i < dim; ++i) sizes[i] = give(found[i]);
  });
}

// Without a kind (-1), it is that of `like`. The caller owns the result.
TCH_EXTENSION_API Message tch_extension_new_empty(const at::Tensor* like, const RawSymInt* sizes,
                                                  size_t len, int32_t kind, at::Tensor** result) {
  return guard([&] {
    auto options = at::TensorOptions();
    if (kind >= 0) options = options.dtype(static_cast<at::ScalarType>(kind));
    *result = new at::Tensor(like->new_empty_symint(read_all(sizes, len), options));
  });
}
