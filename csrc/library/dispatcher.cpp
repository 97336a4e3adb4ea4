// Finds and calls operators that are registered with libtorch's dispatcher, whoever wrote them.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>

#include "../autograd/levels.h"
#include "../ffi.h"
#include "loader.h"
#include "tch_extension/c_abi.h"
#include "value.h"

namespace tch_extension {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;

struct Operator {
  c10::OperatorHandle handle;
  // Indices of the arguments that the operator writes to.
  std::vector<size_t> written;
  bool returns_tensors;
  // Whether it is in libtorch's own namespace. Such an operator is trusted not to lose the graph.
  bool is_libtorchs;
};

// What is wrong with a call. Rust makes the message from it.
struct CallError {
  int32_t kind;  // 0: an error of the operator itself; 1: a wrong argument; 2: no backward pass;
                 // 3: no backward pass, noticed only after the call
  int32_t argument;
};

namespace {

bool has_tensor(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  const auto parts = type.containedTypes();
  return std::any_of(parts.begin(), parts.end(),
                     [](const auto& part) { return has_tensor(*part); });
}

// Calls `visit` with every tensor in the value, including tensors in lists.
template <typename Visit>
void for_each_tensor(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& item : value.toListRef()) for_each_tensor(item, visit);
  }
}

// How the gradient of a call is computed for inputs of one backend. This repeats how the dispatcher
// fills its table for autograd keys.
enum class Autograd { kNone, kKernel, kComposite };

Autograd autograd_of(const c10::OperatorHandle& op, DispatchKey key) {
  const auto has = [&](DispatchKey which) { return op.hasKernelForDispatchKey(which); };
  // A fallthrough kernel means that there is nothing to differentiate, or that no derivative is
  // known.
  const auto kind = [&](DispatchKey which) {
    return op.isKernelFallthroughKernel(which) ? Autograd::kNone : Autograd::kKernel;
  };
  if (has(key)) return kind(key);
  const bool has_backend_kernel =
      op.hasKernelForAnyDispatchKey(c10::getBackendKeySetFromAutograd(key)) ||
      has(DispatchKey::CompositeExplicitAutograd);
  if (!has_backend_kernel && has(DispatchKey::CompositeImplicitAutograd))
    return Autograd::kComposite;
  return has(DispatchKey::Autograd) ? kind(DispatchKey::Autograd) : Autograd::kNone;
}

Autograd autograd_of(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  const auto keys = tensor.key_set() & c10::autograd_dispatch_keyset;
  return keys.empty() ? Autograd::kNone : autograd_of(op, keys.highestPriorityTypeId());
}

// Bumps the version counters of the tensors that the operator declares to write to, unless the
// operator did so itself. A kernel that writes through a pointer does not, and a change of a saved
// tensor would then go unnoticed.
class WrittenTensors {
 public:
  WrittenTensors(const Operator& op, const std::vector<IValue>& stack) {
    for (size_t place : op.written) {
      for_each_tensor(stack[place], [&](const at::Tensor& tensor) {
        if (!tensor.is_inference())
          tensors_.push_back({tensor, tensor._version(), tensor.grad_fn().get()});
      });
    }
  }
  WrittenTensors(const WrittenTensors&) = delete;
  WrittenTensors& operator=(const WrittenTensors&) = delete;
  ~WrittenTensors() {
    for (const auto& written : tensors_) {
      if (written.tensor._version() == written.version)
        written.tensor.unsafeGetTensorImpl()->bump_version();
    }
  }

  struct Written {
    at::Tensor tensor;
    int64_t version;
    const torch::autograd::Node* grad_fn;
  };

  const std::vector<Written>& all() const { return tensors_; }

 private:
  std::vector<Written> tensors_;
};

bool is_differentiable_kind(const at::Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type());
}

// Whether a composite operator lost the graph: it made or changed floating-point or complex
// tensors, and none of them is part of a graph. A `given` tensor that is returned as it is does not
// count.
bool lost_the_graph(const std::vector<IValue>& results, const std::vector<at::Tensor>& given,
                    const WrittenTensors& written) {
  bool any = false, in_graph = false;
  for (const auto& one : written.all()) {
    any |= is_differentiable_kind(one.tensor);
    // If the graph recorded the change, the tensor has a new grad_fn.
    in_graph |= one.tensor.requires_grad() && one.tensor.grad_fn().get() != one.grad_fn;
  }
  for (const IValue& result : results) {
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      const auto is_it = [&](const at::Tensor& one) { return one.is_same(tensor); };
      if (std::any_of(given.begin(), given.end(), is_it)) return;
      any |= is_differentiable_kind(tensor);
      in_graph |= tensor.requires_grad();
    });
  }
  return any && !in_graph;
}

std::vector<IValue> arguments(const c10::FunctionSchema& schema, const Value* values, size_t len,
                              CallError& error) {
  const auto& declared = schema.arguments();
  if (len != declared.size())
    throw std::runtime_error(
        "internal error: the number of values differs from the number of arguments");
  std::vector<IValue> stack;
  stack.reserve(std::max(declared.size(), schema.returns().size()));
  for (size_t i = 0; i < declared.size(); ++i) {
    const auto& argument = declared[i];
    if (values[i].tag == Tag::kDefault) {
      stack.push_back(argument.default_value().value());
      continue;
    }
    error = {1, static_cast<int32_t>(i)};
    stack.push_back(
        to_ivalue(values[i], argument.type(), argument.real_type(), argument.N().value_or(0)));
  }
  error = {0, -1};
  return stack;
}

void run(const Operator& op, const Value* values, size_t len, bool checks_autograd,
         Results& results, CallError& error) {
  auto& stack = results.stack;
  stack = arguments(op.handle.schema(), values, len, error);
  auto autograd = Autograd::kKernel;
  if (checks_autograd && records_graph()) {
    for (const IValue& value : stack) {
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        if (autograd != Autograd::kNone && tensor.requires_grad())
          autograd = autograd_of(op.handle, tensor);
      });
    }
  }
  if (autograd == Autograd::kNone && (op.returns_tensors || !op.written.empty())) {
    error = {2, -1};
    throw std::runtime_error("it has no autograd kernel");
  }
  const bool may_lose_graph = autograd == Autograd::kComposite && !op.is_libtorchs;
  std::vector<at::Tensor> given;
  if (may_lose_graph) {
    for (const IValue& value : stack) {
      for_each_tensor(value, [&](const at::Tensor& tensor) { given.push_back(tensor); });
    }
  }
  const WrittenTensors written(op, stack);
  op.handle.callBoxed(stack);
  if (may_lose_graph && lost_the_graph(stack, given, written)) {
    error = {3, -1};
    throw std::runtime_error("its results are not part of the graph");
  }
}

// Reads a value for Rust, or returns kDefault if Rust has no type for it. Only a default value of
// the schema can have such a type.
Value read_if_possible(const IValue& value, const c10::Type& type,
                       std::forward_list<std::vector<Value>>& lists) {
  try {
    return from_ivalue(value, type, lists);
  } catch (const std::runtime_error&) {
    return Value{};
  }
}

std::string schema_text(const c10::FunctionSchema& schema) {
  std::ostringstream text;
  text << schema;
  return text.str();
}

// One line for each argument: `name TAB type TAB flags`. The flags are `d` (has a default), `k`
// (keyword only) and `w` (the operator writes to it).
std::string arguments_text(const c10::FunctionSchema& schema) {
  std::ostringstream text;
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    text << argument.name() << '\t' << argument.real_type()->str() << '\t'
         << (argument.default_value().has_value() ? "d" : "") << (argument.kwarg_only() ? "k" : "")
         << (alias != nullptr && alias->isWrite() ? "w" : "") << '\n';
  }
  return text.str();
}

// The backends for which the operator has its own kernel, one per line.
std::string backends_text(const c10::OperatorHandle& op) {
  std::string text;
  const auto last = static_cast<uint16_t>(DispatchKey::EndOfRuntimeBackendKeys);
  for (uint16_t number = 1; number <= last; ++number) {
    const auto key = static_cast<DispatchKey>(number);
    if (c10::isBackendDispatchKey(key) && op.hasKernelForDispatchKey(key))
      text += std::string(c10::toString(key)) + '\n';
  }
  return text;
}

}  // namespace

std::unique_ptr<Results> keep_arguments(const c10::FunctionSchema& schema,
                                        std::vector<IValue> stack) {
  auto kept = std::make_unique<Results>();
  kept->stack = std::move(stack);
  kept->values.reserve(kept->stack.size());
  for (size_t i = 0; i < kept->stack.size(); ++i) {
    const auto& type = schema.arguments()[i].real_type();
    // Do not keep tensors here: the graph would keep them alive once more, and would not notice
    // changes in place.
    const bool holds_tensors = has_tensor(*type);
    if (holds_tensors) kept->stack[i] = IValue();
    kept->values.push_back(holds_tensors ? Value{}
                                         : read_if_possible(kept->stack[i], *type, kept->lists));
  }
  return kept;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

}  // namespace tch_extension

using namespace tch_extension;

// Finds the operator. The result is null if no operator of that name has a schema.
TCH_EXTENSION_API Message tch_extension_find_operator(const char* name, const char* overload,
                                                      Operator** result) {
  return guard([&] {
    const auto handle = [&] {
      const std::lock_guard reads(dispatcher_table());
      return c10::Dispatcher::singleton().findSchema({name, overload});
    }();
    if (!handle) return;
    Operator made{*handle, {}, false, false};
    const auto& schema = handle->schema();
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite()) made.written.push_back(i);
    }
    made.returns_tensors = std::any_of(schema.returns().begin(), schema.returns().end(),
                                       [](const auto& value) { return has_tensor(*value.type()); });
    made.is_libtorchs = handle->operator_name().getNamespace() == "aten";
    *result = new Operator(std::move(made));
  });
}

TCH_EXTENSION_API void tch_extension_free_operator(Operator* op) { delete op; }

// The caller frees `text` like a message. The same holds for the functions below.
TCH_EXTENSION_API Message tch_extension_operator_schema(const Operator* op, char** text) {
  return guard([&] { *text = strdup(schema_text(op->handle.schema()).c_str()); });
}

TCH_EXTENSION_API Message tch_extension_operator_arguments(const Operator* op, char** text) {
  return guard([&] { *text = strdup(arguments_text(op->handle.schema()).c_str()); });
}

// The default value of each argument; kDefault if there is none. The caller frees them like
// results.
TCH_EXTENSION_API Message tch_extension_operator_defaults(const Operator* op, Results** result) {
  return guard([&] {
    auto defaults = std::make_unique<Results>();
    const auto& arguments = op->handle.schema().arguments();
    for (const auto& argument : arguments)
      defaults->stack.push_back(argument.default_value().value_or(IValue()));
    for (size_t i = 0; i < arguments.size(); ++i) {
      defaults->values.push_back(
          arguments[i].default_value().has_value()
              ? from_ivalue(defaults->stack[i], *arguments[i].real_type(), defaults->lists)
              : Value{});
    }
    *result = defaults.release();
  });
}

// The backends that have a kernel for the operator, one per line.
TCH_EXTENSION_API Message tch_extension_operator_backends(const Operator* op, char** text) {
  return guard([&] { *text = strdup(backends_text(op->handle).c_str()); });
}

// The names of all operators that have a schema, one per line.
TCH_EXTENSION_API Message tch_extension_operator_names(char** names) {
  return guard([&] {
    const std::lock_guard reads(dispatcher_table());
    auto& dispatcher = c10::Dispatcher::singleton();
    std::string text;
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (dispatcher.findSchema(name)) text += full_name(name) + '\n';
    }
    *names = strdup(text.c_str());
  });
}

// How a gradient is computed for tensors on this device, as a number of `Autograd`.
TCH_EXTENSION_API Message tch_extension_operator_autograd(const Operator* op, int32_t device_type,
                                                          int32_t* result) {
  return guard([&] {
    const auto device = static_cast<c10::DeviceType>(device_type);
    const auto key = device == c10::DeviceType::CPU    ? DispatchKey::AutogradCPU
                     : device == c10::DeviceType::CUDA ? DispatchKey::AutogradCUDA
                     : device == c10::DeviceType::MPS  ? DispatchKey::AutogradMPS
                                                       : DispatchKey::AutogradOther;
    *result = static_cast<int32_t>(autograd_of(op->handle, key));
  });
}

// Calls the operator with one value for each of its arguments. On success, the caller owns the
// results and must free them.
TCH_EXTENSION_API Message tch_extension_call(const Operator* op, const Value* values, size_t len,
                                             bool without_grad, bool checks_autograd,
                                             Results** result, CallError* error) {
  *error = {0, -1};
  return guard([&] {
    auto results = std::make_unique<Results>();
    if (without_grad) {
      const at::NoGradGuard no_grad;
      run(*op, values, len, false, *results, *error);
    } else {
      run(*op, values, len, checks_autograd, *results, *error);
    }
    const auto& returns = op->handle.schema().returns();
    results->values.reserve(results->stack.size());
    for (size_t i = 0; i < results->stack.size(); ++i) {
      const auto type =
          i < returns.size() ? returns[i].real_type() : c10::TypePtr(c10::AnyType::get());
      results->values.push_back(from_ivalue(results->stack[i], *type, results->lists));
    }
    *result = results.release();
  });
}

// Keeps the arguments of a call for its backward pass, as the operator got them: with defaults
// filled in, and of the schema's types. The caller frees them like results.
TCH_EXTENSION_API Message tch_extension_keep_arguments(const Operator* op, const Value* values,
                                                       size_t len, Results** result) {
  return guard([&] {
    CallError error{0, -1};
    const auto& schema = op->handle.schema();
    *result = keep_arguments(schema, arguments(schema, values, len, error)).release();
  });
}

// The values are borrowed from the results.
TCH_EXTENSION_API const Value* tch_extension_results(const Results* results, size_t* len) {
  *len = results->values.size();
  return results->values.data();
}

TCH_EXTENSION_API void tch_extension_free_results(Results* results) { delete results; }

TCH_EXTENSION_API bool tch_extension_is_same_tensor(const at::Tensor* one,
                                                    const at::Tensor* other) {
  return one->is_same(*other);
}

namespace {
// The layout of `Value` in C++, for Rust's tests.
constexpr size_t kValueLayout[] = {sizeof(Value), offsetof(Value, integer), offsetof(Value, len)};
}  // namespace

TCH_EXTENSION_API const size_t* tch_extension_value_layout() { return kValueLayout; }
