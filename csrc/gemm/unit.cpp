// The sources of this folder as one translation unit. libtorch's headers, which most of them
// include, take the compiler longer than the sources themselves (docs/lab/methods.md, "Build
// times").

#include "choice.cpp"
#include "descriptors.cpp"
#include "key.cpp"
#include "padded_product.cpp"
#include "plan.cpp"
#include "product.cpp"
