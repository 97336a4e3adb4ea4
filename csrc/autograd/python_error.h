// The error that Python keeps beside a C++ exception.
//
// Where Python fails below libtorch, libtorch throws a `python_error`. It has no text, and the
// error itself stays pending in Python. While an error is pending, nothing may call Python. So an
// exception that C++ stops takes the error with it.
#pragma once

#include <string>
#include <utility>

namespace tch_extension {

// An error that was pending in this thread's Python, or nothing. Python's functions are looked up
// when they are needed, because this library is not linked with Python.
class PythonError {
 public:
  PythonError() = default;
  PythonError(PythonError&& other) noexcept
      : type_(std::exchange(other.type_, nullptr)),
        value_(std::exchange(other.value_, nullptr)),
        traceback_(std::exchange(other.traceback_, nullptr)) {}
  PythonError& operator=(PythonError&& other) noexcept {
    std::swap(type_, other.type_);
    std::swap(value_, other.value_);
    std::swap(traceback_, other.traceback_);
    return *this;
  }
  ~PythonError();

  // Takes the pending error, so that none is pending.
  static PythonError take();

  // Makes it pending again.
  void restore();

  // The error's type and message, as Python prints them. Empty if there is no error.
  std::string text() const;

 private:
  void* type_ = nullptr;
  void* value_ = nullptr;
  void* traceback_ = nullptr;
};

}  // namespace tch_extension
