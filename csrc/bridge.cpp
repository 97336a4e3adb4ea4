// The sources that include libtorch's autograd, as one translation unit. Its headers take the
// compiler 8 to 12 seconds and these sources 1 second each, so ten units would take a minute more
// (docs/lab/methods.md, "Build times").

#include "amp/autocast.cpp"
#include "autograd/checkpoint.cpp"
#include "autograd/engine.cpp"
#include "autograd/function.cpp"
#include "autograd/function_node.cpp"
#include "autograd/hook.cpp"
#include "autograd/saved.cpp"
#include "autograd/wrap.cpp"
#include "testing/cpp_function.cpp"
