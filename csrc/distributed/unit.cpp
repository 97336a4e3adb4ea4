// The sources of this folder as one translation unit. libtorch's headers, which most of them
// include, take the compiler longer than the sources themselves (docs/lab/methods.md, "Build
// times").

// GCC warns of such members in every file that is included, because it takes it for a header.
#pragma GCC diagnostic ignored "-Wsubobject-linkage"

#include "collectives.cpp"
#include "ddp.cpp"
#include "gloo.cpp"
#include "group.cpp"
#include "nccl.cpp"
#include "reducer.cpp"
#include "sharded.cpp"
#include "store.cpp"
