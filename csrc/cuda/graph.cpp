// at::cuda::CUDAGraph, with a way out of a capture that failed.
#ifdef TCH_EXTENSION_CUDA

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "../libtorch_versions.h"
#include "tch_extension/c_abi.h"

namespace tch_extension {

namespace {

// Whether `body` went through.
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

// libtorch keeps one workspace for cuBLAS per stream. A stream of the pool comes round again: later
// work on it would share the captured one with replays on other streams.
void forget_workspaces(cudaStream_t stream) {
  forget_workspaces(at::cuda::cublas_handle_stream_to_workspace(), stream);
  forget_workspaces(at::cuda::cublaslt_handle_stream_to_workspace(), stream);
}

}  // namespace

class Graph final : public at::cuda::CUDAGraph {
 public:
  // What a replay launches, as counted at the end of the capture.
  size_t kernels = 0;
  size_t others = 0;

  // keep_graph: so that there is something to count before it is instantiated.
  Graph() : CUDAGraph(/*keep_graph=*/true) {}

  // On the current stream.
  void begin(at::cuda::MempoolId_t pool) {
    try {
      forget_workspaces(c10::cuda::getCurrentCUDAStream());
      capture_begin(pool, cudaStreamCaptureModeThreadLocal);
    } catch (...) {
      abandon();
      throw;
    }
  }

  void end() {
    try {
      capture_end();
      count_nodes();
      instantiate();
      C10_CUDA_CHECK(cudaGraphDestroy(graph_));
      has_graph_ = false;
      forget_workspaces(capture_stream_);
    } catch (...) {
      abandon();
      throw;
    }
  }

  // After a capture that did not come to its end. libtorch's own class would leave the stream
  // capturing, the allocator asking a destroyed object whether a stream is captured, and the
  // generator refusing to draw.
  void abandon() noexcept {
    if (capture_ended_) return;  // then reset() gives everything back
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(capture_stream_, &status) == cudaSuccess &&
        status != cudaStreamCaptureStatusNone) {
      cudaGraph_t unfinished = nullptr;
      cudaStreamEndCapture(capture_stream_, &unfinished);
      if (unfinished != nullptr) cudaGraphDestroy(unfinished);
    }
    // CUDA keeps the error for whoever asks next.
    (void)cudaGetLastError();
    for (auto& [generator, increment] : captured_generator_states_) end_failed_capture(*generator);
    if (capture_dev_ == UNDEFINED_DEVICE) return;
    // A pool is given back only where it was surely taken: it may be another graph's.
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
  void count_nodes() {
    size_t len = 0;
    C10_CUDA_CHECK(cudaGraphGetNodes(graph_, nullptr, &len));
    std::vector<cudaGraphNode_t> nodes(len);
    if (len > 0) C10_CUDA_CHECK(cudaGraphGetNodes(graph_, nodes.data(), &len));
    for (cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
      C10_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
      ++(type == cudaGraphNodeTypeKernel ? kernels : others);
    }
  }
};

}  // namespace tch_extension

using namespace tch_extension;

namespace {

// All graphs of a device share the state of its random numbers. libtorch relies on Python's lock
// for it.
std::mutex& bookkeeping() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

}  // namespace

// Begins to capture the current stream of the current device. `sharing`: a captured graph whose
// memory pool is to be used, or null. The result is given back with ..._end and ..._delete.
TCH_EXTENSION_API Message tch_extension_cuda_graph_begin(Graph* sharing, Graph** result) {
  return guard([&] {
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    std::lock_guard<std::mutex> lock(bookkeeping());
    const auto pool = sharing != nullptr ? sharing->pool() : at::cuda::graph_pool_handle();
    // During a capture libtorch cannot free its cached blocks, and the capture allocates from a
    // pool of its own: without this it can run out of memory while the cache holds plenty. The
    // device has to be idle, so that blocks that other streams used are free. Python's
    // torch.cuda.graph does both, too.
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    auto graph = std::make_unique<Graph>();
    graph->begin(pool);
    *result = graph.release();
  });
}

// Whether the current stream of the current device is being captured, by whomever.
TCH_EXTENSION_API Message tch_extension_cuda_is_capturing(bool* result) {
  return guard([&] {
    *result = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  });
}

// In the thread and under the stream of ..._begin. After a failure the graph can only be deleted.
TCH_EXTENSION_API Message tch_extension_cuda_graph_end(Graph* graph) {
  return guard([&] {
    std::lock_guard<std::mutex> lock(bookkeeping());
    graph->end();
  });
}

// Of a graph whose capture ended.
TCH_EXTENSION_API void tch_extension_cuda_graph_count(const Graph* graph, size_t* kernels,
                                                      size_t* others) {
  *kernels = graph->kernels;
  *others = graph->others;
}

// On the current stream of the graph's device.
TCH_EXTENSION_API Message tch_extension_cuda_graph_replay(Graph* graph) {
  return guard([&] {
    std::lock_guard<std::mutex> lock(bookkeeping());
    graph->replay();
  });
}

// A capture that is under way is given up; then it has to be the thread of ..._begin.
TCH_EXTENSION_API Message tch_extension_cuda_graph_delete(Graph* graph) {
  return guard([&] {
    std::lock_guard<std::mutex> lock(bookkeeping());
    graph->abandon();
    delete graph;
  });
}

#endif  // TCH_EXTENSION_CUDA
