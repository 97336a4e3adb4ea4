// Operators that Rust defines: the inverse of dispatcher.cpp.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

#include "../autograd/exceptions.h"
#include "../ffi.h"
#include "call.h"
#include "graph.h"
#include "loader.h"
#include "tch_extension/c_abi.h"

namespace tch_extension {
namespace {

void run(KernelEntry entry, const void* kernel, const c10::OperatorHandle& op,
         c10::DispatchKeySet keys, torch::jit::Stack& stack) {
  RustCall call;
  KernelFrame frame{op, keys, stack};
  if (entry(kernel, &frame) == 0) return;
  const auto text = [&] { return named(op.operator_name().name, frame.error); };
  switch (frame.exception) {
    case Exception::kValueError:
      throw c10::ValueError(text(), /*backtrace=*/nullptr);
    case Exception::kIndexError:
      throw c10::IndexError(text(), /*backtrace=*/nullptr);
    case Exception::kRuntimeError:
      call.fail(op.operator_name().name, frame.error);
  }
}

class RustKernel final : public c10::OperatorKernel {
 public:
  RustKernel(KernelEntry entry, const void* kernel) : entry_(entry), kernel_(kernel) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    run(entry_, kernel_, op, keys, *stack);
  }

 private:
  KernelEntry entry_;
  const void* kernel_;
};

// A kernel for the key Meta, which computes sizes and no values. The dispatcher calls it as soon as
// one argument is on the meta device. The values of the others would be lost, and a result on
// another device would be uninitialised memory: both are errors, as for libtorch's operators. A
// single number may be on the CPU, unless it is written to.
class FakeKernel final : public c10::OperatorKernel {
 public:
  FakeKernel(KernelEntry entry, const void* kernel) : entry_(entry), kernel_(kernel) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    const auto has_memory = [](const at::Tensor& tensor) { return !tensor.is_meta(); };
    const auto is_number = [](const at::Tensor& tensor) {
      return tensor.dim() == 0 && tensor.is_cpu();
    };
    const auto& declared = op.schema().arguments();
    const auto given = torch::jit::last(*stack, declared.size());
    bool is_mixed = false;
    for (size_t i = 0; i < declared.size(); ++i) {
      const auto* alias = declared[i].alias_info();
      const bool is_written = alias != nullptr && alias->isWrite();
      is_mixed = is_mixed || any_tensor(given.slice(i, 1), [&](const at::Tensor& tensor) {
                   return has_memory(tensor) && (is_written || !is_number(tensor));
                 });
    }
    if (!is_mixed) {
      run(entry_, kernel_, op, keys, *stack);
      const auto results = torch::jit::last(*stack, op.schema().returns().size());
      is_mixed = any_tensor(results, has_memory);
    }
    if (is_mixed) {
      throw std::runtime_error(named(op.operator_name().name,
                                     "expected all tensors on the same device, but some are on the "
                                     "meta device, and others are not"));
    }
  }

 private:
  KernelEntry entry_;
  const void* kernel_;
};

// A kernel for the key Autograd, which is called only if there is something to differentiate.
class GraphKernel final : public c10::OperatorKernel {
 public:
  GraphKernel(KernelEntry entry, const void* kernel) : entry_(entry), kernel_(kernel) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    if (needs_graph(op, *stack))
      run(entry_, kernel_, op, keys, *stack);
    else
      call_below_autograd(op, keys, *stack);
  }

 private:
  static bool needs_graph(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    const bool grad_mode = at::GradMode::is_enabled();
    const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
    return any_tensor(arguments, [&](const at::Tensor& tensor) {
      return (grad_mode && tensor.requires_grad()) || tensor._fw_grad(0).defined();
    });
  }

  KernelEntry entry_;
  const void* kernel_;
};

template <typename Kernel>
torch::CppFunction boxed(KernelEntry entry, const void* kernel) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(entry, kernel));
}

// Tells autograd that the values of the tensors changed that an operator writes to.
class ChangesKernel final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    std::vector<at::Tensor> written;
    const auto& declared = op.schema().arguments();
    const auto given = torch::jit::last(*stack, declared.size());
    for (size_t i = 0; i < declared.size(); ++i) {
      const auto* alias = declared[i].alias_info();
      if (alias != nullptr && alias->isWrite() && given[i].isTensor() &&
          given[i].toTensor().defined())
        written.push_back(given[i].toTensor());
    }
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
    }
    for (const at::Tensor& tensor : written) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
};

std::optional<c10::OperatorHandle> find(const char* name, const char* overload) {
  const std::lock_guard reads(dispatcher_table());
  return c10::Dispatcher::singleton().findSchema({name, overload});
}

}  // namespace

// Registrations that belong together: all of them are kept, or all end.
struct RegistrationsOfBlock {
  std::vector<std::unique_ptr<torch::Library>> libraries{};

  torch::Library& add(torch::Library::Kind kind, const char* ns,
                      std::optional<c10::DispatchKey> key, const char* file, uint32_t line) {
    return *libraries.emplace_back(std::make_unique<torch::Library>(kind, ns, key, file, line));
  }
};

}  // namespace tch_extension

using namespace tch_extension;

// An error if this library was compiled for another version of libtorch than the one that is
// loaded. A version that differs in the last number only has the same interface.
TCH_EXTENSION_API Message tch_extension_check_version() {
  return guard([] {
    const uint64_t loaded = aoti_torch_abi_version();
    const auto text = [](uint64_t version) {
      const auto part = [&](int shift) { return std::to_string((version >> shift) & 0xFF); };
      return part(56) + "." + part(48) + "." + part(40);
    };
    if (loaded >> 48 == TORCH_ABI_VERSION >> 48) return;
    throw std::runtime_error("this library was compiled for libtorch " + text(TORCH_ABI_VERSION) +
                             ", and libtorch " + text(loaded) + " is loaded; install torch " +
                             text(TORCH_ABI_VERSION) + ", or this library for torch " +
                             text(loaded));
  });
}

TCH_EXTENSION_API RegistrationsOfBlock* tch_extension_begin_registrations() {
  return new RegistrationsOfBlock;
}

// Python keeps handles of operators, and they do not survive the end of their registration. So what
// is kept never ends. Nobody has a handle yet of what is not kept.
TCH_EXTENSION_API void tch_extension_end_registrations(RegistrationsOfBlock* registrations,
                                                       bool keep) {
  auto& libraries = registrations->libraries;
  for (; !libraries.empty(); libraries.pop_back()) {
    if (keep) static_cast<void>(libraries.back().release());
  }
  delete registrations;
}

// The strings live forever: libtorch keeps `file`.
TCH_EXTENSION_API Message tch_extension_define(RegistrationsOfBlock* registrations, const char* ns,
                                               const char* schema, bool is_seeded, const char* file,
                                               uint32_t line) {
  return guard([&] {
    std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
    if (is_seeded) tags.push_back(at::Tag::nondeterministic_seeded);
    registrations->add(torch::Library::FRAGMENT, ns, std::nullopt, file, line)
        .def(schema, std::as_const(tags));
  });
}

namespace {

// An error if the operator is not defined, or has a kernel for this key.
void check_free(const char* qualified, const char* overload, c10::DispatchKey key) {
  const auto op = find(qualified, overload);
  // libtorch would wait for a schema to come.
  if (!op) throw std::runtime_error("it is not defined");
  // libtorch would only warn, and take the new one.
  if (op->hasKernelForDispatchKey(key))
    throw std::runtime_error("it has a kernel for " + std::string(c10::toString(key)) + " already");
}

}  // namespace

// `qualified` is `ns::name`, without the overload, and `name` is the name with its overload.
TCH_EXTENSION_API Message tch_extension_implement(RegistrationsOfBlock* registrations,
                                                  const char* ns, const char* qualified,
                                                  const char* name, const char* overload,
                                                  const char* key, bool only_for_graphs,
                                                  const char* file, uint32_t line,
                                                  KernelEntry entry, const void* kernel) {
  return guard([&] {
    const c10::DispatchKey dispatch_key = c10::parseDispatchKey(key);
    check_free(qualified, overload, dispatch_key);
    auto& library = registrations->add(torch::Library::IMPL, ns, dispatch_key, file, line);
    if (only_for_graphs)
      library.impl(name, boxed<GraphKernel>(entry, kernel));
    else if (dispatch_key == c10::DispatchKey::Meta)
      library.impl(name, boxed<FakeKernel>(entry, kernel));
    else
      library.impl(name, boxed<RustKernel>(entry, kernel));
  });
}

// For an operator that writes to its arguments.
TCH_EXTENSION_API Message tch_extension_count_changes(RegistrationsOfBlock* registrations,
                                                      const char* ns, const char* qualified,
                                                      const char* name, const char* overload,
                                                      const char* file, uint32_t line) {
  return guard([&] {
    const auto key = c10::DispatchKey::ADInplaceOrView;
    check_free(qualified, overload, key);
    registrations->add(torch::Library::IMPL, ns, key, file, line)
        .impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<ChangesKernel>()));
  });
}

TCH_EXTENSION_API void tch_extension_kernel_error(KernelFrame* frame, const char* text, size_t len,
                                                  int32_t exception) {
  frame->error.assign(text, len);
  frame->exception = static_cast<Exception>(exception);
}

TCH_EXTENSION_API void* tch_extension_enter_below_autograd() {
  return new at::AutoDispatchBelowADInplaceOrView;
}

TCH_EXTENSION_API void tch_extension_leave_below_autograd(void* guard) {
  delete static_cast<at::AutoDispatchBelowADInplaceOrView*>(guard);
}

// From now on, this thread calls no kernel for this key, until the guard is freed.
TCH_EXTENSION_API Message tch_extension_enter_without_key(const char* key, void** guard) {
  return tch_extension::guard(
      [&] { *guard = new c10::impl::ExcludeDispatchKeyGuard(c10::parseDispatchKey(key)); });
}

TCH_EXTENSION_API void tch_extension_leave_without_key(void* guard) {
  delete static_cast<c10::impl::ExcludeDispatchKeyGuard*>(guard);
}
