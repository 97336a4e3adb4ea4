// The sources of this folder as one translation unit. libtorch's headers, which most of them
// include, take the compiler longer than the sources themselves (docs/lab/methods.md, "Build
// times").

// GCC warns of such members in every file that is included, because it takes it for a header.
#pragma GCC diagnostic ignored "-Wsubobject-linkage"

#include "capture_watch.cpp"
#include "device.cpp"
#include "graph.cpp"
#include "kernel.cpp"
#include "memory.cpp"
#include "precision.cpp"
#include "stream.cpp"
