// The backend for CPU tensors: libtorch's own ProcessGroupGloo, whose connections can be closed.
#include "c10d.h"
// After the macros of c10d.h.
#include <cstdlib>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "group.h"

namespace tch_extension {
namespace {

// libtorch ships no headers of Gloo, and `stub/gloo` only declares its names. What depends on the
// layout are the members of c10d's class, which hold Gloo's objects by pointers. Its size is what
// libtorch's own ProcessGroupGloo::split passes to operator new.
static_assert(sizeof(c10d::ProcessGroupGloo) == 488,
              "this libtorch lays out ProcessGroupGloo differently than csrc/distributed knows");

class Gloo final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  void close() {
    for (const auto& context : contexts_) context->closeConnections();
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo(const StorePtr& store, int rank, int size,
                                            std::chrono::milliseconds timeout, bool loopback,
                                            const std::string& name) {
  using Base = c10d::ProcessGroupGloo;
  c10::intrusive_ptr<Base::Options> options;
  // The variable names the interfaces to use; create_default obeys it.
  if (loopback && std::getenv("GLOO_SOCKET_IFNAME") == nullptr) {
    options = Base::Options::create(timeout);
    options->devices.push_back(
        Base::createDeviceForHostname("127.0.0.1", c10d::getDefaultGlooLazyInit()));
  } else {
    options = Base::Options::create_default(timeout);
  }
  options->group_name = name;
  auto backend = c10::make_intrusive<Gloo>(store, rank, size, options);
  backend->setSequenceNumberForGroup();
  return backend;
}

void close_connections(c10d::Backend& backend) {
  if (auto* gloo = dynamic_cast<Gloo*>(&backend)) gloo->close();
}

}  // namespace tch_extension
