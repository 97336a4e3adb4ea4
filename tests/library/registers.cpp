// Registers an operator. The library that this file is linked into decides the namespace.

#include <torch/library.h>

// Each library has its own function of this name, whichever other libraries are loaded.
extern "C" __attribute__((visibility("hidden"))) const char* name_of_library();

static const auto* const registered = [] {
  auto* library =
      new torch::Library(torch::Library::DEF, name_of_library(), std::nullopt, __FILE__, __LINE__);
  library->def("f(int x) -> int", [](int64_t x) { return x; });
  return library;
}();
