// Which of libtorch's operations ended a capture early. CUDA's own error names none.
#pragma once

#include <ATen/record_function.h>
#include <cuda_runtime_api.h>

#include <optional>
#include <string>

namespace tch_extension {

// What is known about the last capture of the process. A process captures one graph at a time.
struct CaptureReport {
  // The operation during which the capture became invalid, or empty.
  std::string culprit;
  // The operation that started last, or empty.
  std::string last;
};

// Watches the operations of this thread, and of the backward passes that it runs, while a stream is
// being captured. It can be stopped only in the thread that started it.
class CaptureWatch {
 public:
  void start(cudaStream_t stream);
  // Does nothing if it was not started.
  void stop() noexcept;

 private:
  std::optional<at::CallbackHandle> handle_;
};

// The report of the capture that was watched last, which may have ended.
CaptureReport capture_report();

}  // namespace tch_extension
