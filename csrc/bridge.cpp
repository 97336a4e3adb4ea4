// The sources whose headers of libtorch's, mostly autograd's, take the compiler longest: 8 to 12
// seconds, and the sources themselves 1 second each. As one translation unit they take a minute
// less (docs/lab/methods.md, "Build times"). What is included here is not compiled by itself.

#include "amp/autocast.cpp"
#include "autograd/batch.cpp"
#include "autograd/checkpoint.cpp"
#include "autograd/engine.cpp"
#include "autograd/function.cpp"
#include "autograd/function_node.cpp"
#include "autograd/hook.cpp"
#include "autograd/saved.cpp"
#include "autograd/wrap.cpp"
#include "testing/cpp_function.cpp"
