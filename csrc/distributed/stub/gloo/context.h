// Declarations only; libtorch_cpu.so defines them (see README.md).
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  // Closes the connections to all other ranks.
  void closeConnections();
};

}  // namespace gloo
