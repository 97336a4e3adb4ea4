// c10d's own headers, with the macros that libtorch itself was compiled with. Without them the
// headers are empty.
#pragma once

// csrc/ffi.h does not declare the functions of this folder, whose handles are smart pointers.
#pragma GCC diagnostic ignored "-Wmissing-declarations"

#ifndef USE_DISTRIBUTED
#define USE_DISTRIBUTED
#endif
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
