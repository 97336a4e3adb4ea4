// Replaces Python's header of this name, with the minimum that the stub in newer extensions needs.
// Such an extension registers its operators with TORCH_LIBRARY, and defines PyInit_... only so that
// `import` loads the library. Nobody calls PyInit_... here.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// The same declaration as in libtorch.
typedef struct _object PyObject;
typedef std::ptrdiff_t Py_ssize_t;
typedef PyObject* (*PyCFunction)(PyObject*, PyObject*);

struct PyMethodDef {
  const char* ml_name;
  PyCFunction ml_meth;
  int ml_flags;
  const char* ml_doc;
};
struct PyModuleDef_Slot {
  int slot;
  void* value;
};
struct PyModuleDef_Base {
  void* nothing;
};
struct PyModuleDef {
  PyModuleDef_Base m_base;
  const char* m_name;
  const char* m_doc;
  Py_ssize_t m_size;
  PyMethodDef* m_methods;
  PyModuleDef_Slot* m_slots;
  int (*m_traverse)(PyObject*, int (*)(PyObject*, void*), void*);
  int (*m_clear)(PyObject*);
  void (*m_free)(void*);
};

#define PyModuleDef_HEAD_INIT {nullptr}
#define PyMODINIT_FUNC extern "C" __attribute__((visibility("default"))) PyObject*

inline PyObject* PyModule_Create(PyModuleDef*) { return nullptr; }
inline PyObject* PyModuleDef_Init(PyModuleDef*) { return nullptr; }
