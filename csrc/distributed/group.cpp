// Groups of ranks: how one is made, ended and abandoned.
#include "group.h"

#include <torch/csrc/distributed/c10d/debug.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tch_extension/c_abi.h"

using namespace tch_extension;
using Milliseconds = std::chrono::milliseconds;

// src/ffi/distributed.rs mirrors it.
struct GroupParts {
  int32_t rank;
  int32_t size;
  int64_t timeout;  // milliseconds
  const char* name;
  size_t name_length;
  bool loopback;  // whether all ranks are on this machine
};

// Makes a group as torch.distributed does, so that ranks in Python can be part of it: the store's
// keys begin with the group's name, and then with the kind of device.
TCH_EXTENSION_API Message tch_extension_group_new(const StorePtr* store, const GroupParts* parts,
                                                  ProcessGroup** result) {
  return guard([&] {
    using c10d::PrefixStore;
    static const bool levels = (c10d::setDebugLevelFromEnvironment(), true);
    (void)levels;
    const std::string name(parts->name, parts->name_length);
    const Milliseconds timeout(parts->timeout);
    auto prefixed = c10::make_intrusive<PrefixStore>(name + "/", *store);
    auto group = c10::make_intrusive<c10d::ProcessGroup>(prefixed, parts->rank, parts->size);
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    auto gloo = make_gloo(c10::make_intrusive<PrefixStore>("cpu/", prefixed), parts->rank,
                          parts->size, timeout, parts->loopback, name);
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
    group->setGroupName(name);
    *result = new ProcessGroup{std::move(group)};
  });
}

// Waits for what is in flight.
TCH_EXTENSION_API Message tch_extension_group_free(ProcessGroup* group) {
  return guard([&] { delete group; });
}

// Makes operations in flight fail, here and on the other ranks.
TCH_EXTENSION_API Message tch_extension_group_abort(ProcessGroup* group) {
  return guard([&] {
    auto& inner = *group->group;
    for (const c10::Device device : inner.getDeviceTypes()) {
      close_connections(*inner.getBackend(device.type()));
    }
  });
}
