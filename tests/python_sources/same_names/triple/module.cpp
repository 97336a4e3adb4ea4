// An extension in the newer style: operators in a TORCH_LIBRARY, and a module _C that Python can
// import.
#include <Python.h>
#include <torch/library.h>

#include "scale.h"

extern int total;

extern "C" PyObject* PyInit__C(void) {
  static struct PyModuleDef module_def = {
      PyModuleDef_HEAD_INIT, "_C", NULL, -1, NULL, NULL, NULL, NULL, NULL,
  };
  return PyModule_Create(&module_def);
}

static at::Tensor scale_or_not(const at::Tensor& x) {
  try {
    return scale(x);
  } catch (const Refused& refused) {
    TORCH_CHECK(false, "refused by ", refused.what());
  }
}

static int64_t count() { return calls() * 100 + total; }

TORCH_LIBRARY(tch_test_triple, m) {
  m.def("scale(Tensor x) -> Tensor", &scale_or_not);
  m.def("count() -> int", &count);
}
