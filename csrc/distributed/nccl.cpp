// The backend for CUDA tensors: libtorch's own ProcessGroupNCCL, if this build has CUDA and the
// nccl.h that libtorch was compiled with.
#include <torch/headeronly/version.h>

#include "group.h"
#include "tch_extension/c_abi.h"

// The NCCL of each libtorch, whose ncclConfig_t the backend's options hold, and the size of
// ProcessGroupNCCL that libtorch's own split and merge pass to operator new.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11
#define TCH_EXTENSION_NCCL_CODE 22809
#define TCH_EXTENSION_NCCL_VERSION "2.28.9"
#define TCH_EXTENSION_NCCL_SIZE 1112
#elif TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 13
#define TCH_EXTENSION_NCCL_CODE 22907
#define TCH_EXTENSION_NCCL_VERSION "2.29.7"
#define TCH_EXTENSION_NCCL_SIZE 1152
#else
#define TCH_EXTENSION_NCCL_CODE 0
#define TCH_EXTENSION_NCCL_VERSION "of an unknown version"
#define TCH_EXTENSION_NCCL_SIZE 0
#endif

#if !defined(TCH_EXTENSION_CUDA)
#define TCH_EXTENSION_NO_NCCL "it was built without CUDA (`cargo xtask doctor` says why)"
#elif !__has_include(<nccl.h>)
#define TCH_EXTENSION_NO_NCCL                                                                 \
  "there was no nccl.h when it was built; install the wheel nvidia-nccl-cu13 next to torch, " \
  "or set NCCL_HOME to NCCL " TCH_EXTENSION_NCCL_VERSION
#else
#include <nccl.h>
#if NCCL_VERSION_CODE != TCH_EXTENSION_NCCL_CODE
#define TCH_EXTENSION_NO_NCCL                                                                  \
  "the nccl.h that was found when it was built has another version than libtorch's NCCL; set " \
  "NCCL_HOME to NCCL " TCH_EXTENSION_NCCL_VERSION
#endif
#endif

// Why there is no NCCL, or null if there is.
TCH_EXTENSION_API const char* tch_extension_no_nccl() {
#ifdef TCH_EXTENSION_NO_NCCL
  return TCH_EXTENSION_NO_NCCL;
#else
  return nullptr;
#endif
}

#ifdef TCH_EXTENSION_NO_NCCL

namespace tch_extension {

c10::intrusive_ptr<c10d::Backend> make_nccl(const StorePtr&, const GroupParts&,
                                            const std::shared_ptr<Checker>&) {
  TORCH_CHECK(false, "this build has no NCCL: ", TCH_EXTENSION_NO_NCCL);
}

}  // namespace tch_extension

#else

#define USE_C10D_NCCL
#include <c10/cuda/CUDAFunctions.h>

#include <cstdlib>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "checked.h"

namespace tch_extension {
namespace {

static_assert(sizeof(c10d::ProcessGroupNCCL) == TCH_EXTENSION_NCCL_SIZE,
              "this libtorch lays out ProcessGroupNCCL differently than csrc/distributed knows");

class CheckedNccl final : public Checked<c10d::ProcessGroupNCCL> {
 public:
  using Checked<c10d::ProcessGroupNCCL>::Checked;

 private:
  void end_base(const std::string&) override { abort(); }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_nccl(const StorePtr& store, const GroupParts& parts,
                                            const std::shared_ptr<Checker>& checker) {
  if (parts.abort_on_error) {
    // The constructor reads them. A user's own values win.
    setenv("TORCH_NCCL_BLOCKING_WAIT", "1", /*overwrite=*/0);
    setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", /*overwrite=*/0);
  }
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(parts.device));
  // What NCCL and libtorch allocate without naming a device belongs on the GPU of this rank. This
  // stays so after the call, as torch.cuda.set_device(local_rank) does.
  c10::cuda::set_device(device.index());
  auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/false);
  options->timeout = std::chrono::milliseconds(parts.timeout);
  options->group_name = std::string(parts.name, parts.name_length);
  auto backend = c10::make_intrusive<CheckedNccl>(
      c10::make_intrusive<c10d::PrefixStore>("cuda/", store), parts.rank, parts.size, options);
  backend->set_checker(checker);
  backend->setBoundDeviceId(device);
  backend->setSequenceNumberForGroup();
  // Connects now, so that ranks that cannot reach one another, or that share a GPU, fail here.
  backend->eagerConnectSingleDevice(device);
  return backend;
}

}  // namespace tch_extension

#endif
