// The sources of this folder as one translation unit.

// GCC warns of such members in every file that is included, because it takes it for a header.
#pragma GCC diagnostic ignored "-Wsubobject-linkage"

#include "call.cpp"
#include "runtime.cpp"
