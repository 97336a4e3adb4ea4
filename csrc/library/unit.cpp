// The sources of this folder as one translation unit. libtorch's headers, which most of them
// include, take the compiler longer than the sources themselves (docs/lab/methods.md, "Build
// times").

// GCC warns of such members in every file that is included, because it takes it for a header.
#pragma GCC diagnostic ignored "-Wsubobject-linkage"

#include "arguments.cpp"
#include "define.cpp"
#include "dispatcher.cpp"
#include "graph.cpp"
#include "loader.cpp"
#include "package.cpp"
#include "registrations.cpp"
#include "sym_int.cpp"
#include "traced.cpp"
#include "value.cpp"
