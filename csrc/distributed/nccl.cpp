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
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include <chrono>
#include <cstdlib>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "checked.h"

namespace tch_extension {
namespace {

static_assert(sizeof(c10d::ProcessGroupNCCL) == TCH_EXTENSION_NCCL_SIZE,
              "this libtorch lays out ProcessGroupNCCL differently than csrc/distributed knows");

// Counts the CUDA graphs that hold operations of a group. NCCL ends a communicator only when they
// are gone, and waits for that without end.
class Graphs {
 public:
  // Notes that an operation starts on this stream. Returns whether the stream is being captured.
  bool note(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    cudaGraph_t graph = nullptr;
    C10_CUDA_CHECK(
        cudaStreamGetCaptureInfo(stream, &status, &id, &graph, nullptr, nullptr, nullptr));
    if (status != cudaStreamCaptureStatusActive) return false;
    if (id == last_) return true;
    auto alive = std::make_unique<Count>(alive_);
    cudaUserObject_t object = nullptr;
    C10_CUDA_CHECK(
        cudaUserObjectCreate(&object, alive.get(), forget, 1, cudaUserObjectNoDestructorSync));
    ++*alive_;
    alive.release();
    // The graph, and all that is made of it, own the object from here on.
    C10_CUDA_CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    last_ = id;
    return true;
  }

  // CUDA destroys what a graph owned a moment after the graph, so this waits a little.
  bool are_alive() const {
    for (int i = 0; i < 200 && *alive_ > 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return *alive_ > 0;
  }

 private:
  using Count = std::shared_ptr<std::atomic<int> >;

  static void CUDART_CB forget(void* alive) {
    const std::unique_ptr<Count> own(static_cast<Count*>(alive));
    --**own;
  }

  Count alive_ = std::make_shared<std::atomic<int> >(0);  // may outlive the group
  unsigned long long last_ = 0;                           // the capture that was noted last
};

class CheckedNccl final : public Checked<c10d::ProcessGroupNCCL> {
 public:
  using Checked<c10d::ProcessGroupNCCL>::Checked;

  // With a graph alive, the communicator stays until the process ends.
  void shutdown() override {
    if (!graphs_.are_alive()) return ProcessGroupNCCL::shutdown();
    keep();
  }

  // The destructor aborts what is in flight, whose results would be wrong without an error.
  void leave() override {
    if (graphs_.are_alive()) {
      keep();
      TORCH_CHECK(false,
                  "a CUDA graph holds its collectives, so NCCL's connections stay until the "
                  "process ends");
    }
    const auto end = std::chrono::steady_clock::now() + options_->timeout;
    while (!is_idle()) {
      TORCH_CHECK(std::chrono::steady_clock::now() < end,
                  "operations on the GPU did not end within ", options_->timeout.count(),
                  " ms, and are aborted; their results are lost");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  // Whether the watchdog has seen all operations end, except for those of graphs.
  bool is_idle() {
    const std::lock_guard<std::mutex> lock(workMetaListMutex_);
    return workMetaList_.empty();
  }

  // Lets this live until the process ends: the destructor would wait for graphs without end.
  void keep() {
    if (!std::exchange(is_kept_, true)) {
      (void)c10::intrusive_ptr<CheckedNccl>::unsafe_reclaim_from_nonowning(this).release();
    }
  }

  // libtorch 2.11's FlightRecorder is not safe for several groups in several threads; see
  // lock_all_groups in gloo.cpp. This function, which notes an operation there, waits for nobody.
  c10::intrusive_ptr<WorkNCCL> initWork(at::Device& device, int rank, c10d::OpType type,
                                        bool is_message, const char* title,
                                        const std::vector<at::Tensor>& inputs,
                                        const std::vector<at::Tensor>& outputs,
                                        bool record) override {
    static auto& mutex = *new std::mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    return ProcessGroupNCCL::initWork(device, rank, type, is_message, title, inputs, outputs,
                                      record);
  }

  // The CPU cannot wait for an operation that is captured, and a replay is watched by whoever
  // launches it.
  void starting() override {
    const auto stream = c10::cuda::getCurrentCUDAStream(getBoundDeviceId()->index());
    const bool is_captured = graphs_.note(stream.stream());
    blockingWait_ = blocks_ && !is_captured;
  }

  void end_base(const std::string&) override {
    if (!graphs_.are_alive()) return abort();
    // It returns when the graphs are gone.
    auto self = c10::intrusive_ptr<CheckedNccl>::unsafe_reclaim_from_nonowning(this);
    std::thread([self] {
      try {
        self->abort();
      } catch (...) {
        // The group has failed already, and nobody waits for this.
      }
    }).detach();
  }

  Graphs graphs_;
  bool is_kept_ = false;
  const bool blocks_ = blockingWait_;  // TORCH_NCCL_BLOCKING_WAIT, as the constructor read it
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
