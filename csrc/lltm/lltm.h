// Whole sequences of LLTM, as Rust passes them: the tensors, and the way to compute them. params.h
// has the structs. Tensors are contiguous, and have the shapes and kinds that are stated there and
// in recurrent/step/params.h.
#pragma once

#include "params.h"
#include "tch_extension/kind.h"
