#include "python_error.h"

#include <dlfcn.h>

#include <optional>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

namespace tch_extension {

namespace {

// Functions of Python's stable ABI. `PyObject*` is `void*` here.
struct Python {
  int (*is_initialized)();
  int (*lock)();
  void (*unlock)(int);
  void* (*pending)();
  void (*fetch)(void**, void**, void**);
  void (*restore)(void*, void*, void*);
  void (*clear)();
  void* (*attribute)(void*, const char*);
  void* (*to_text)(void*);
  const char* (*utf8)(void*, long*);
  void (*release)(void*);
};

template <typename Function>
bool look_up(const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  return function != nullptr;
}

// The Python that runs in this process, if there is one.
std::optional<Python> python() {
  Python found{};
  const bool complete =
      look_up("Py_IsInitialized", found.is_initialized) &&
      look_up("PyGILState_Ensure", found.lock) && look_up("PyGILState_Release", found.unlock) &&
      look_up("PyErr_Occurred", found.pending) && look_up("PyErr_Fetch", found.fetch) &&
      look_up("PyErr_Restore", found.restore) && look_up("PyErr_Clear", found.clear) &&
      look_up("PyObject_GetAttrString", found.attribute) &&
      look_up("PyObject_Str", found.to_text) && look_up("PyUnicode_AsUTF8AndSize", found.utf8) &&
      look_up("Py_DecRef", found.release);
  if (!complete || found.is_initialized() == 0) return std::nullopt;
  return found;
}

// Holds Python's lock (the GIL).
class Lock {
 public:
  explicit Lock(const Python& python) : python_(python), state_(python.lock()) {}
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() { python_.unlock(state_); }

 private:
  const Python& python_;
  int state_;
};

// The text of a Python string, whose reference it takes. Empty if there is none.
std::string text_of(const Python& python, void* string) {
  long len = 0;
  const char* bytes = string == nullptr ? nullptr : python.utf8(string, &len);
  std::string text = bytes == nullptr ? "" : std::string(bytes, static_cast<size_t>(len));
  if (string != nullptr) python.release(string);
  python.clear();  // if one of these calls failed
  return text;
}

}  // namespace

PythonError::~PythonError() {
  if (type_ == nullptr) return;
  const auto python = tch_extension::python();
  if (!python) return;  // Python has ended, and its objects with it
  const Lock lock(*python);
  for (void* object : {type_, value_, traceback_}) python->release(object);  // null is allowed
}

PythonError PythonError::take() {
  PythonError error;
  const auto python = tch_extension::python();
  if (!python) return error;
  const Lock lock(*python);
  if (python->pending() != nullptr) python->fetch(&error.type_, &error.value_, &error.traceback_);
  return error;
}

void PythonError::restore() {
  if (type_ == nullptr) return;
  const auto python = tch_extension::python();
  if (!python) return;
  const Lock lock(*python);
  // Python takes over the references.
  python->restore(std::exchange(type_, nullptr), std::exchange(value_, nullptr),
                  std::exchange(traceback_, nullptr));
}

std::string PythonError::text() const {
  if (type_ == nullptr) return "";
  const auto python = tch_extension::python();
  if (!python) return "";
  const Lock lock(*python);
  const std::string name = text_of(*python, python->attribute(type_, "__name__"));
  const std::string message = value_ == nullptr ? "" : text_of(*python, python->to_text(value_));
  return message.empty() ? name : name + ": " + message;
}

}  // namespace tch_extension

// Whether a Python runs in this process.
TCH_EXTENSION_API bool tch_extension_python_runs() { return tch_extension::python().has_value(); }
