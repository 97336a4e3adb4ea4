// A profiler's callbacks, with which a capture is watched.
#ifdef TCH_EXTENSION_CUDA

#include "capture_watch.h"

#include <memory>
#include <mutex>
#include <vector>

namespace tch_extension {

namespace {

struct Watched {
  std::mutex mutex;
  cudaStream_t stream = nullptr;
  CaptureReport report;
};

// Never destroyed, because the engine's threads may outlive static objects.
Watched& watched() {
  static auto* watched = new Watched;
  return *watched;
}

// The names of this thread's operations that have not ended, outermost first. libtorch keeps a name
// as long as its operation runs.
thread_local std::vector<const char*> running;

std::string description() {
  if (running.empty()) return {};
  std::string text = running.front();
  if (running.size() > 1 && text != running.back()) {
    text += std::string(" (in ") + running.back() + ")";
  }
  return text;
}

bool is_invalid(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
         status == cudaStreamCaptureStatusInvalidated;
}

// libtorch catches exceptions of these two functions.
std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  running.push_back(function.name());
  std::lock_guard<std::mutex> lock(watched().mutex);
  CaptureReport& report = watched().report;
  if (report.culprit.empty() && is_invalid(watched().stream)) {
    report.culprit = report.last.empty()
                         ? "what ran first"
                         : "what ran after " + report.last + ", which is no operation of libtorch,";
  }
  report.last = description();
  return nullptr;
}

void on_end(const at::RecordFunction&, at::ObserverContext*) {
  if (running.empty()) return;
  {
    std::lock_guard<std::mutex> lock(watched().mutex);
    CaptureReport& report = watched().report;
    if (report.culprit.empty() && is_invalid(watched().stream)) report.culprit = description();
  }
  running.pop_back();
}

}  // namespace

void CaptureWatch::start(cudaStream_t stream) {
  running.clear();
  {
    std::lock_guard<std::mutex> lock(watched().mutex);
    watched().stream = stream;
    watched().report = {};
  }
  using at::RecordScope;
  // libtorch's engine hands a thread's callbacks to the threads that run its backward pass.
  handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(on_start, on_end)
          .scopes({RecordScope::FUNCTION, RecordScope::BACKWARD_FUNCTION}));
}

void CaptureWatch::stop() noexcept {
  if (!handle_) return;
  at::removeCallback(*handle_);
  handle_.reset();
}

CaptureReport capture_report() {
  std::lock_guard<std::mutex> lock(watched().mutex);
  return watched().report;
}

}  // namespace tch_extension

#endif  // TCH_EXTENSION_CUDA
