// The compiler finds this header before libtorch's of the same name, which includes the whole C++
// frontend. Modules, optimizers, data loaders and serialization take two thirds of the compile
// time, and few extensions use them, so a first attempt compiles without them.
#pragma once

#ifdef TCH_EXTENSION_FEWER_HEADERS
#include <torch/cuda.h>
#include <torch/enum.h>
#include <torch/fft.h>
#include <torch/mps.h>
#include <torch/nested.h>
#include <torch/sparse.h>
#include <torch/special.h>
#include <torch/types.h>
#include <torch/version.h>
#include <torch/xpu.h>
#if TCH_EXTENSION_FEWER_HEADERS > 1
#include <torch/autograd.h>
#include <torch/utils.h>
#endif
#else
#include_next <torch/all.h>
#endif
