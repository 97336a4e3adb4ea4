// Groups of ranks: how one is made, ended and abandoned.
#include "group.h"

#include <torch/csrc/distributed/c10d/debug.h>

#include <exception>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "checked.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

// Makes a group as torch.distributed does, so that ranks in Python can be part of it: the store's
// keys begin with the group's name, and then with the type of device.
TCH_EXTENSION_API Message tch_extension_group_new(const StorePtr* store, const GroupParts* parts,
                                                  ProcessGroup** result) {
  return guard([&] {
    using Type = c10d::ProcessGroup::BackendType;
    // libtorch reads TORCH_DISTRIBUTED_DEBUG only when it is told to.
    static const bool levels = (c10d::setDebugLevelFromEnvironment(), true);
    (void)levels;
    const std::string name(parts->name, parts->name_length);
    StorePtr prefixed = c10::make_intrusive<c10d::PrefixStore>(name + "/", *store);
    auto group = c10::make_intrusive<c10d::ProcessGroup>(prefixed, parts->rank, parts->size);
    const bool cuda = parts->device >= 0;
    group->setDefaultBackend(cuda ? Type::NCCL : Type::GLOO);
    const auto checker = parts->check ? make_checker(prefixed, *parts) : nullptr;
    if (cuda) {
      group->setBoundDeviceId(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(parts->device)));
    }
    group->setBackend(c10::DeviceType::CPU, Type::GLOO, make_gloo(prefixed, *parts, checker));
    if (cuda) {
      group->setBackend(c10::DeviceType::CUDA, Type::NCCL, make_nccl(prefixed, *parts, checker));
    }
    group->setGroupName(name);
    *result = new ProcessGroup{std::move(group)};
  });
}

// Waits for what is in flight on the CPU; on a GPU, it is aborted.
TCH_EXTENSION_API Message tch_extension_group_free(ProcessGroup* group) {
  return guard([&] { delete group; });
}

namespace {

// Calls `f` with each backend. One that fails must not spare the others.
template <typename F>
void for_each_backend(ProcessGroup& group, F&& f) {
  auto& inner = *group.group;
  std::exception_ptr failure;
  for (const c10::Device device : inner.getDeviceTypes()) {
    try {
      auto* backend = dynamic_cast<Endable*>(inner.getBackend(device.type()).get());
      if (backend != nullptr) f(*backend);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

// Makes all operations fail, those in flight and later ones, here and on the other ranks.
TCH_EXTENSION_API Message tch_extension_group_end(ProcessGroup* group, const char* why,
                                                  size_t length) {
  return guard([&] {
    for_each_backend(*group, [&](Endable& backend) { backend.end(std::string(why, length)); });
  });
}

// Waits for what is in flight on a GPU. The message says what is lost when the group is freed.
TCH_EXTENSION_API Message tch_extension_group_leave(ProcessGroup* group) {
  return guard([&] { for_each_backend(*group, [](Endable& backend) { backend.leave(); }); });
}

// Compares `what` with what the other ranks are about to do, if the group compares.
TCH_EXTENSION_API Message tch_extension_group_compare(ProcessGroup* group, const char* what,
                                                      size_t length) {
  return guard([&] {
    auto* backend = dynamic_cast<Endable*>(group->group->getBackend(c10::kCPU).get());
    if (backend != nullptr) backend->compare(std::string(what, length));
  });
}

// Ends the backends in an orderly way. All ranks must have ended their operations.
TCH_EXTENSION_API Message tch_extension_group_shutdown(ProcessGroup* group) {
  return guard([&] { group->group->shutdown(); });
}
