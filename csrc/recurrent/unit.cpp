// The sources of this folder as one translation unit. libtorch's headers, which most of them
// include, take the compiler longer than the sources themselves (docs/lab/methods.md, "Build
// times").

#include "cudnn.cpp"
#include "onednn.cpp"
#include "product.cpp"
#include "steps.cpp"
