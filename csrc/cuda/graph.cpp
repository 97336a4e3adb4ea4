// at::cuda::CUDAGraph, extended by the cleanup after a capture that failed.
#ifdef TCH_EXTENSION_CUDA

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "../ffi.h"
#include "../libtorch_versions.h"
#include "../tensor/touched.h"
#include "capture_watch.h"
#include "kernel_names.h"
#include "tch_extension/c_abi.h"

namespace tch_extension {

namespace {

// Runs `body` and returns whether it threw nothing.
template <typename Body>
bool quietly(Body&& body) noexcept {
  try {
    body();
    return true;
  } catch (...) {
    return false;
  }
}

void forget_workspaces(at::cuda::WorkspaceMapWithMutex& workspaces, cudaStream_t stream) {
  std::unique_lock<std::shared_mutex> lock(workspaces.mutex);
  for (auto entry = workspaces.map.begin(); entry != workspaces.map.end();) {
    entry = std::get<1>(entry->first) == stream ? workspaces.map.erase(entry) : std::next(entry);
  }
}

// libtorch keeps one cuBLAS workspace per stream, and its pool hands out the same stream again
// later. Work on that stream would then share the captured workspace with replays on other streams.
void forget_workspaces(cudaStream_t stream) {
  forget_workspaces(at::cuda::cublas_handle_stream_to_workspace(), stream);
  forget_workspaces(at::cuda::cublaslt_handle_stream_to_workspace(), stream);
}

// The memory of a graph that is not in its own pool.
class OthersMemory final : public Touched {
 public:
  explicit OthersMemory(at::cuda::MempoolId_t pool) : pool_(pool) {}

  // Keeps it until all work is done that was launched on these streams so far. Its allocator knows
  // only the stream on which it was made.
  void use_on(const std::vector<c10::cuda::CUDAStream>& streams) {
    for_each_storage([&](const c10::Storage& storage) {
      if (!storage.device().is_cuda()) return;
      for (const auto& stream : streams) {
        c10::cuda::CUDACachingAllocator::recordStream(storage.data_ptr(), stream);
      }
    });
  }

 protected:
  bool is_captured(c10::Device device) override {
    if (!device.is_cuda()) return false;
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index());
    // The default stream cannot be captured, and asking about it may be an error.
    if (stream == nullptr) return false;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
           status != cudaStreamCaptureStatusNone;
  }

  bool is_own(c10::Device device, const void* address) override {
    if (!device.is_cuda()) return false;
    const auto place = reinterpret_cast<uintptr_t>(address);
    if (is_in_pool(place)) return true;
    for (const auto& segment : c10::cuda::CUDACachingAllocator::snapshot(pool_).segments) {
      if (segment.owner_private_pool_id == pool_) segments_[segment.address] = segment.total_size;
    }
    return is_in_pool(place);
  }

 private:
  bool is_in_pool(uintptr_t place) const {
    auto next = segments_.upper_bound(place);
    if (next == segments_.begin()) return false;
    --next;
    return place - next->first < next->second;
  }

  const at::cuda::MempoolId_t pool_;
  // Begin and size of the pool's memory, as far as it is known. A pool only grows during a capture.
  std::map<uintptr_t, size_t> segments_;
};

}  // namespace

class Graph final : public at::cuda::CUDAGraph {
 public:
  // The nodes that a replay launches, read at the end of the capture.
  size_t kernels = 0;
  size_t others = 0;
  // How often each kernel is launched, by its mangled name.
  std::map<std::string, size_t> names;

  // keep_graph: capture_end then keeps the graph, so that its nodes can be read before it is
  // instantiated.
  explicit Graph(at::cuda::MempoolId_t pool)
      : CUDAGraph(/*keep_graph=*/true), pool_(pool), memory_(pool) {}

  // Begins to capture the current stream.
  void begin() {
    try {
      forget_workspaces(c10::cuda::getCurrentCUDAStream());
      capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
      memory_.start();
      watch_.start(capture_stream_);
    } catch (...) {
      abandon();
      throw;
    }
  }

  void end() {
    watch_.stop();
    memory_.stop();
    try {
      capture_end();
      memory_.check();
      require_memory();
      memory_.is_left();  // notes what others hold now
      // Before the capture, libtorch has set where the random numbers of a replay begin, on the
      // capture's stream. A replay sets it, too, on its own stream, and must not be overtaken.
      C10_CUDA_CHECK(cudaStreamSynchronize(capture_stream_));
      read_nodes();
      instantiate();
      C10_CUDA_CHECK(cudaGraphDestroy(graph_));
      has_graph_ = false;
      forget_workspaces(capture_stream_);
    } catch (...) {
      abandon();
      throw;
    }
  }

  // Launches the graph on the current stream of its device.
  void run() {
    require_memory();
    replay();
    const auto stream = c10::cuda::getCurrentCUDAStream(capture_dev_);
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
      streams_.push_back(stream);
    }
  }

  // Whether a tensor that the graph uses is used by nobody else any more, or has other memory.
  bool is_left() { return !memory_.is_intact() || memory_.is_left(); }

  // Cleans up after a capture that did not end. libtorch's own class would leave the stream
  // capturing, the allocator asking a destroyed object whether a stream is being captured, and the
  // random number generator refusing to draw.
  void abandon() noexcept {
    watch_.stop();
    memory_.stop();
    quietly([&] { memory_.use_on(streams_); });
    if (capture_ended_) return;  // reset() then releases everything
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(capture_stream_, &status) == cudaSuccess &&
        status != cudaStreamCaptureStatusNone) {
      cudaGraph_t unfinished = nullptr;
      cudaStreamEndCapture(capture_stream_, &unfinished);
      if (unfinished != nullptr) cudaGraphDestroy(unfinished);
    }
    // As in end(): what libtorch has set for the capture must not overtake a replay's.
    (void)cudaStreamSynchronize(capture_stream_);
    // Clear CUDA's error, which the next caller who asks would get otherwise.
    (void)cudaGetLastError();
    for (auto& [generator, increment] : captured_generator_states_) end_failed_capture(*generator);
    if (capture_dev_ == UNDEFINED_DEVICE) return;
    // Release a pool only if this graph certainly took it, because it may be another graph's.
    namespace device_memory = c10::cuda::CUDACachingAllocator;
    if (quietly([&] { device_memory::endAllocateToPool(capture_dev_, mempool_id_); })) {
      quietly([&] { device_memory::releasePool(capture_dev_, mempool_id_); });
    }
    auto host = [] { return at::getHostAllocator(at::kCUDA); };
    if (quietly([&] { host()->end_allocate_to_pool(mempool_id_); })) {
      quietly([&] { host()->release_pool(mempool_id_); });
    }
    quietly([&] { forget_workspaces(capture_stream_); });
  }

 private:
  void require_memory() const {
    TORCH_CHECK(memory_.is_intact(),
                "a tensor that the graph uses has other memory than when the graph read or wrote "
                "it, after a resize_ for example; capture the graph again");
  }

  CaptureWatch watch_;
  const at::cuda::MempoolId_t pool_;
  OthersMemory memory_;
  // Where the graph was launched.
  std::vector<c10::cuda::CUDAStream> streams_;

  void read_nodes() {
    size_t len = 0;
    C10_CUDA_CHECK(cudaGraphGetNodes(graph_, nullptr, &len));
    std::vector<cudaGraphNode_t> nodes(len);
    if (len > 0) C10_CUDA_CHECK(cudaGraphGetNodes(graph_, nodes.data(), &len));
    for (cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
      C10_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
      if (type == cudaGraphNodeTypeKernel) {
        ++kernels;
        ++names[kernel_name(node)];
      } else {
        ++others;
      }
    }
  }
};

}  // namespace tch_extension

using namespace tch_extension;

namespace {

// All graphs of a device share the state of its random number generator. libtorch relies on
// Python's global lock to protect it.
std::mutex& bookkeeping() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

}  // namespace

// Begins to capture the current stream of the current device. `sharing` is a captured graph whose
// memory pool is used, or null. The caller ends the result with ..._end and frees it with
// ..._delete.
TCH_EXTENSION_API Message tch_extension_cuda_graph_begin(Graph* sharing, Graph** result) {
  return guard([&] {
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    // Only this one knows which memory is the graph's own. What is not must be kept.
    const std::string allocator = c10::cuda::CUDACachingAllocator::name();
    TORCH_CHECK(allocator == "native", "expected libtorch's native allocator of CUDA memory, got ",
                allocator,
                "; leave `backend` out of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF");
    std::lock_guard<std::mutex> lock(bookkeeping());
    const auto pool = sharing != nullptr ? sharing->pool() : at::cuda::graph_pool_handle();
    // During a capture, libtorch cannot free its cached blocks, and the capture allocates from a
    // pool of its own. Without emptyCache it can run out of memory while the cache holds plenty.
    // The device must be idle first, so that the blocks that other streams used are free. Python's
    // torch.cuda.graph does both, too.
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    auto graph = std::make_unique<Graph>(pool);
    graph->begin();
    *result = graph.release();
  });
}

// Whether the current stream of the current device is being captured, by anyone.
TCH_EXTENSION_API Message tch_extension_cuda_is_capturing(bool* result) {
  return guard([&] {
    *result = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  });
}

// Must be called in the thread of ..._begin and with the same current stream. After a failure, the
// graph can only be deleted.
TCH_EXTENSION_API Message tch_extension_cuda_graph_end(Graph* graph) {
  return guard([&] {
    std::lock_guard<std::mutex> lock(bookkeeping());
    graph->end();
  });
}

// After a capture that failed: the operation that made it invalid, and the one that started last.
// Either may be null. The caller frees both as messages.
TCH_EXTENSION_API void tch_extension_cuda_capture_report(Message* culprit, Message* last) {
  *culprit = *last = nullptr;
  free(guard([&] {
    const CaptureReport report = capture_report();
    if (!report.culprit.empty()) *culprit = strdup(report.culprit.c_str());
    if (!report.last.empty()) *last = strdup(report.last.c_str());
  }));
}

// Valid after the capture has ended.
TCH_EXTENSION_API void tch_extension_cuda_graph_count(const Graph* graph, size_t* kernels,
                                                      size_t* others) {
  *kernels = graph->kernels;
  *others = graph->others;
}

// A line for each kernel: how often it is launched, and its name. The caller frees the text as a
// message.
TCH_EXTENSION_API Message tch_extension_cuda_graph_kernel_names(const Graph* graph,
                                                                Message* result) {
  return guard([&] {
    std::string lines;
    for (const auto& [name, count] : graph->names) {
      lines += std::to_string(count) + " " + demangled(name) + "\n";
    }
    *result = strdup(lines.c_str());
  });
}

// Replays the graph on the current stream of its device.
TCH_EXTENSION_API Message tch_extension_cuda_graph_replay(Graph* graph) {
  return guard([&] {
    std::lock_guard<std::mutex> lock(bookkeeping());
    graph->run();
  });
}

// Whether something that the graph uses has been left to it alone since the capture, or has other
// memory now.
TCH_EXTENSION_API bool tch_extension_cuda_graph_is_left(Graph* graph) { return graph->is_left(); }

// A capture that is under way is given up; then this must be called in the thread of ..._begin.
TCH_EXTENSION_API Message tch_extension_cuda_graph_delete(Graph* graph) {
  return guard([&] {
    std::lock_guard<std::mutex> lock(bookkeeping());
    graph->abandon();
    delete graph;
  });
}

#endif  // TCH_EXTENSION_CUDA
