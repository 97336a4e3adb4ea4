// Runs models that AOTInductor compiled. Rust has unpacked the package and checks the inputs; see
// src/library/package.
//
// libtorch's loader of packages (AOTIModelPackageLoader) is not used: if it fails, it leaves its
// temporary folder behind, and it takes the files of every model whose name begins like the one
// that was asked for. What it calls to run the model is what is called here.

#include <ATen/DynamicLibrary.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>
#include <torch/csrc/inductor/aoti_torch/proxy_executor.h>
#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../ffi.h"
#include "../tensor/touched.h"
#include "tch_extension/c_abi.h"

namespace tch_extension {
namespace {

using torch::inductor::AOTIModelContainerRunner;
using Tensors = std::unordered_map<std::string, at::Tensor>;

// Members of the runner, which are protected.
struct Members : AOTIModelContainerRunner {
  static AOTIProxyExecutorHandle& executor(AOTIModelContainerRunner& runner) {
    return runner.*&Members::proxy_executor_handle_;
  }
  static AOTInductorModelContainerHandle container(const AOTIModelContainerRunner& runner) {
    return runner.*&Members::container_handle_;
  }
  template <typename Function>
  static Function* function(const AOTIModelContainerRunner& runner, const char* name) {
    return reinterpret_cast<Function*>((runner.*&Members::model_so_)->sym(name));
  }
};

// Calls the operators that are not compiled into the model, and keeps their errors. Code that torch
// 2.11 generated takes no notice of an error: it goes on with an output that is no tensor, or with
// a tensor that the operator should have changed, and later versions lose its text.
class NotingExecutor : public torch::aot_inductor::ProxyExecutor {
 public:
  explicit NotingExecutor(ProxyExecutor& own) : own_(own) {}

  void call_function(int node, int num_ints, int64_t* ints, int num_tensors,
                     AtenTensorHandle* tensors) override {
    if (error_ != nullptr) throw std::runtime_error("an operator before this one has failed");
    try {
      own_.call_function(node, num_ints, ints, num_tensors, tensors);
    } catch (...) {
      error_ = std::current_exception();
      throw;
    }
  }

  // Runs `body`, which runs a model in this thread. Throws the error of an operator, if there is
  // one, even if `body` takes no notice.
  template <typename Body>
  static auto checked(Body body) {
    error_ = nullptr;
    std::exception_ptr other;
    std::optional<decltype(body())> result;
    try {
      result.emplace(body());
    } catch (...) {
      other = std::current_exception();
    }
    if (const auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
    if (other != nullptr) std::rethrow_exception(other);
    return std::move(*result);
  }

 private:
  ProxyExecutor& own_;
  static thread_local std::exception_ptr error_;
};

thread_local std::exception_ptr NotingExecutor::error_;

// Lets so many threads in at a time, or a single one that wants to be alone.
//
// The model has a pool of its own, but a thread that waits for it waits forever if the run before
// it fails. So no thread may come to wait there.
class Turnstile {
 public:
  explicit Turnstile(size_t places) : places_(places), free_(places) {}

  void enter() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return free_ > 0 && !closed_; });
    --free_;
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    ++free_;
    changed_.notify_all();
  }
  // Returns when no other thread is inside. Nobody enters until `open`.
  void close() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !closed_; });
    closed_ = true;
    changed_.wait(lock, [&] { return free_ == places_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    closed_ = false;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  const size_t places_;
  size_t free_;
  bool closed_ = false;
};

class Inside {
 public:
  explicit Inside(Turnstile& turnstile) : turnstile_(turnstile) { turnstile_.enter(); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  ~Inside() { turnstile_.leave(); }

 private:
  Turnstile& turnstile_;
};

class Alone {
 public:
  explicit Alone(Turnstile& turnstile) : turnstile_(turnstile) { turnstile_.close(); }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;
  ~Alone() { turnstile_.open(); }

 private:
  Turnstile& turnstile_;
};

// What the compiled code relies on: no graph is recorded, no kind is changed by autocast, and the
// model's device is the current one, whose current stream the kernels are launched on.
struct ModelSurroundings {
  explicit ModelSurroundings(c10::Device device) {
    if (!device.is_cpu()) device_guard.emplace(device);
  }
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  std::optional<c10::DeviceGuard> device_guard;
};

// The runner of libtorch's for a type of device, such as "cpu".
torch::inductor::CreateAOTIModelRunnerFunc runner_of(const std::string& type) {
  const auto& all = torch::inductor::getAOTIModelRunnerRegistry();
  const auto found = all.find(type);
  if (found == all.end()) {
    throw std::runtime_error("it was compiled for the device type " + type +
                             ", for which this libtorch has no runner");
  }
  return found->second;
}

}  // namespace

class Package : public std::enable_shared_from_this<Package> {
 public:
  // `library`: the compiled model. `folder`: where the kernels of a GPU lie. `weights`: a file of
  // constants that are not in the library; may be null.
  Package(const char* library, const char* folder, const char* weights, const char* type,
          int32_t index, size_t runners, bool single_threaded)
      : device_(place(type, index)), turnstile_(runners) {
    const ModelSurroundings surroundings(device_);
    runner_ = runner_of(type)(library, runners, device_.str(), folder, single_threaded);
    note_errors_of_operators(library);
    if (weights != nullptr) runner_->update_constant_buffer_from_blob(weights);
    count(&inputs_, "AOTInductorModelContainerGetNumInputs");
    count(&outputs_, "AOTInductorModelContainerGetNumOutputs");
    check_constants();
    fold();
    note_memory();
  }
  Package(const Package&) = delete;
  Package& operator=(const Package&) = delete;
  ~Package() {
    try {
      // Kernels that still run read the constants and the modules that are freed now.
      const ModelSurroundings surroundings(device_);
      wait_for_device();
      runner_.reset();
    } catch (...) {
      // The device has failed, and so will every other call for it.
    }
  }

  // Rust has one handle, and a CUDA graph that captured a run has another.
  static Package* own(std::shared_ptr<Package> package) {
    Package* const raw = package.get();
    raw->handle_ = std::move(package);
    return raw;
  }
  void disown() { const auto last = std::move(handle_); }

  c10::Device device() const { return device_; }
  size_t inputs() const { return inputs_; }
  size_t outputs() const { return outputs_; }
  std::vector<std::string> call_spec() { return runner_->get_call_spec(); }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) {
    const Inside inside(turnstile_);
    const ModelSurroundings surroundings(device_);
    // Compiled code launches kernels without operations.
    touch(device_, shared_from_this());
    for (const auto& input : inputs) touch(input);
    auto outputs = NotingExecutor::checked([&] { return runner_->run(inputs); });
    for (auto& output : outputs) {
      // A model may return a view of a constant. Its memory is freed or overwritten sooner.
      if (output.defined() && output.has_storage() &&
          constants_memory_.count(output.storage().data()) != 0)
        output = output.clone();
    }
    return outputs;
  }

  // Calls `see` with the name and the tensor of each constant, sorted by name.
  template <typename See>
  void for_each_constant(See see) {
    const Alone alone(turnstile_);
    for (const auto& [name, tensor] : constants()) see(name, tensor);
  }

  // A copy, because the constant's memory belongs to the model.
  at::Tensor constant(const std::string& name) {
    const Alone alone(turnstile_);
    const ModelSurroundings surroundings(device_);
    const auto all = constants();
    const auto found = all.find(name);
    if (found == all.end()) throw std::runtime_error("there is no such constant");
    auto copy = found->second.clone();
    wait_for_device();
    return copy;
  }

  // The values have the sizes and kinds of the constants, whose names are known.
  void update(const Tensors& values) {
    const Alone alone(turnstile_);
    const ModelSurroundings surroundings(device_);
    if (has_folded_ && handle_.use_count() > 1) {
      throw std::runtime_error(
          "a CUDA graph reads constants that are computed from others, which would get other "
          "memory; drop the graph before the update");
    }
    const auto all = constants();
    // The model copies as many bytes as the tensor's memory has, and takes over its strides,
    // although its kernels were compiled for those of the constant. So it gets tensors whose memory
    // is like the constant's.
    Tensors alike;
    const auto names = runner_->getConstantNamesToOriginalFQNs();
    for (const auto& [inner, name] : names) {
      const auto value = values.find(name);
      if (value == values.end()) continue;
      const auto& constant = all.at(name);
      auto copy = at::empty_strided(constant.sizes(), constant.strides(), constant.options());
      copy.copy_(value->second);
      alike.emplace(inner, std::move(copy));
    }
    // Kernels on any stream may still read the old values, and the copies be under way.
    wait_for_device();
    runner_->update_constant_buffer(alike, /*use_inactive=*/false,
                                    /*validate_full_updates=*/false);
    fold();
    note_memory();
  }

 private:
  static c10::Device place(const char* type, int32_t index) {
    c10::Device device(type);
    if (device.is_cpu()) return device;
    if (index < 0) return c10::impl::VirtualGuardImpl(device.type()).getDevice();
    device.set_index(static_cast<c10::DeviceIndex>(index));
    return device;
  }

  // The constants that the exported model has: its parameters and buffers.
  std::map<std::string, at::Tensor> constants() const {
    std::map<std::string, at::Tensor> sorted;
    for (const auto& [name, tensor] : runner_->extract_constants_map(/*use_inactive=*/false))
      sorted.emplace(name, tensor);
    return sorted;
  }

  // The runner calls operators if there is a file that lists them; see the constructor of
  // AOTIModelContainerRunner. Otherwise its pointer may be uninitialised.
  void note_errors_of_operators(const std::string& library) {
    const std::string list = library.substr(0, library.rfind('.')) + ".json";
    if (access(list.c_str(), F_OK) != 0) return;
    auto& handle = Members::executor(*runner_);
    auto* own = reinterpret_cast<torch::aot_inductor::ProxyExecutor*>(handle);
    if (own == nullptr) return;
    executor_ = std::make_unique<NotingExecutor>(*own);
    torch::aot_inductor::ProxyExecutor* noting = executor_.get();
    handle = reinterpret_cast<AOTIProxyExecutorHandle>(noting);
  }

  // A model may have been compiled without the values of its constants. Its code would read through
  // null pointers.
  void check_constants() {
    size_t number = 0;
    count(&number, "AOTInductorModelContainerGetNumConstants");
    auto* const from_folded =
        Members::function<decltype(AOTInductorModelContainerGetConstantFromFolded)>(
            *runner_, "AOTInductorModelContainerGetConstantFromFolded");
    auto* const name_of =
        Members::function<decltype(AOTInductorModelContainerGetConstantOriginalFQN)>(
            *runner_, "AOTInductorModelContainerGetConstantOriginalFQN");
    const auto container = Members::container(*runner_);
    const auto all = constants();
    for (size_t index = 0; index < number; ++index) {
      bool is_folded = false;
      const char* name = "";
      if (from_folded(container, index, &is_folded) != 0 || name_of(container, index, &name) != 0)
        throw std::runtime_error("its constants cannot be read");
      has_folded_ |= is_folded;
      if (is_folded) continue;
      const auto found = all.find(name);
      if (found == all.end() || !found->second.defined())
        throw std::runtime_error(std::string("it has no value of the constant ") + name +
                                 ": compile it with aot_inductor.package_constants_in_so");
    }
  }

  void count(size_t* number, const char* name) {
    auto* const ask =
        Members::function<decltype(AOTInductorModelContainerGetNumInputs)>(*runner_, name);
    if (ask(Members::container(*runner_), number) != 0)
      throw std::runtime_error("its inputs and outputs cannot be counted");
  }

  // Computes the constants that are made of others. The first run would do it, but a failure there
  // would leave the next run waiting for a model that never comes back.
  void fold() {
    if (!has_folded_) return;
    NotingExecutor::checked([&] {
      runner_->run_const_fold(/*use_inactive=*/false);
      return true;
    });
    wait_for_device();
  }

  void note_memory() {
    constants_memory_.clear();
    for (const auto& [name, tensor] : constants()) {
      if (tensor.has_storage() && tensor.storage().data() != nullptr)
        constants_memory_.insert(tensor.storage().data());
    }
  }

  void wait_for_device() const {
    if (!device_.is_cpu())
      c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
  }

  const c10::Device device_;
  std::shared_ptr<Package> handle_;
  Turnstile turnstile_;
  std::unique_ptr<NotingExecutor> executor_;
  std::unique_ptr<AOTIModelContainerRunner> runner_;
  size_t inputs_ = 0, outputs_ = 0;
  bool has_folded_ = false;
  std::unordered_set<const void*> constants_memory_;
};

}  // namespace tch_extension

using tch_extension::guard;
using tch_extension::Message;
using tch_extension::Package;

// The caller frees the package with tch_extension_free_package. `index`: of the device; -1 for the
// current one.
TCH_EXTENSION_API Message tch_extension_load_package(const char* library, const char* folder,
                                                     const char* weights, const char* type,
                                                     int32_t index, size_t runners,
                                                     bool single_threaded, Package** result) {
  return guard([&] {
    *result = Package::own(
        std::make_shared<Package>(library, folder, weights, type, index, runners, single_threaded));
  });
}

TCH_EXTENSION_API void tch_extension_free_package(Package* package) { package->disown(); }

TCH_EXTENSION_API void tch_extension_package_facts(const Package* package, int32_t* index,
                                                   size_t* inputs, size_t* outputs) {
  *index = package->device().index();
  *inputs = package->inputs();
  *outputs = package->outputs();
}

// `outputs` has room for as many tensors as the model returns. The caller owns them. One that the
// model leaves out is null.
TCH_EXTENSION_API Message tch_extension_run_package(Package* package,
                                                    const at::Tensor* const* inputs, size_t len,
                                                    at::Tensor** outputs) {
  return guard([&] {
    std::vector<at::Tensor> tensors;
    tensors.reserve(len);
    for (size_t index = 0; index < len; ++index) tensors.push_back(*inputs[index]);
    auto results = package->run(tensors);
    TORCH_CHECK(results.size() == package->outputs(), "it returned ", results.size(),
                " tensors instead of ", package->outputs());
    std::vector<std::unique_ptr<at::Tensor>> owned;
    for (auto& result : results)
      owned.push_back(result.defined() ? std::make_unique<at::Tensor>(std::move(result)) : nullptr);
    for (size_t index = 0; index < owned.size(); ++index) outputs[index] = owned[index].release();
  });
}

// What is passed and returned, as JSON. The caller frees both texts like messages.
TCH_EXTENSION_API Message tch_extension_package_call_spec(Package* package, char** inputs,
                                                          char** outputs) {
  return guard([&] {
    const auto specs = package->call_spec();
    *inputs = strdup(specs.at(0).c_str());
    *outputs = strdup(specs.at(1).c_str());
  });
}

// Calls `see` for each constant, with its name and a tensor that lives during the call.
TCH_EXTENSION_API Message tch_extension_package_constants(Package* package, void* state,
                                                          void (*see)(void* state, const char* name,
                                                                      const at::Tensor* tensor)) {
  return guard([&] {
    package->for_each_constant([&](const std::string& name, const at::Tensor& tensor) {
      see(state, name.c_str(), &tensor);
    });
  });
}

TCH_EXTENSION_API Message tch_extension_package_constant(Package* package, const char* name,
                                                         at::Tensor** copy) {
  return guard([&] { *copy = new at::Tensor(package->constant(name)); });
}

TCH_EXTENSION_API Message tch_extension_update_package(Package* package, const char* const* names,
                                                       const at::Tensor* const* values,
                                                       size_t len) {
  return guard([&] {
    std::unordered_map<std::string, at::Tensor> map;
    for (size_t index = 0; index < len; ++index) map.emplace(names[index], *values[index]);
    package->update(map);
  });
}
