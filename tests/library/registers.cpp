// Registers an operator in the namespace that the library says which this is linked into.

#include <torch/library.h>

// Each library's own, whichever others are loaded.
extern "C" __attribute__((visibility("hidden"))) const char* name_of_library();

static const auto* const registered = [] {
  auto* library =
      new torch::Library(torch::Library::DEF, name_of_library(), std::nullopt, __FILE__, __LINE__);
  library->def("f(int x) -> int", [](int64_t x) { return x; });
  return library;
}();
