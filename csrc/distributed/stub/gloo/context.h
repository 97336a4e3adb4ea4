// Declarations only; libtorch_cpu.so defines them (see README.md).
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <string>

namespace gloo {
namespace transport {

// A connection to another rank.
class Pair;

namespace tcp {

class Pair {
 public:
  // Makes everything that waits for the connection fail with this message, and closes it.
  std::exception_ptr signalExceptionExternal(const std::string& message);
};

}  // namespace tcp
}  // namespace transport

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  std::unique_ptr<transport::Pair>& getPair(int rank);
  void closeConnections();
};

}  // namespace gloo
