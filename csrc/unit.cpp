// The sources that include libtorch's headers of autograd, and the small ones, as one translation
// unit. The headers take the compiler 8 to 12 seconds, and each source takes it one
// (docs/lab/methods.md, "Build times"). What a unit includes is not compiled by itself.

#include "amp/autocast.cpp"
#include "amp/grad_scaler.cpp"
#include "autograd/batch.cpp"
#include "autograd/checkpoint.cpp"
#include "autograd/engine.cpp"
#include "autograd/exceptions.cpp"
#include "autograd/function.cpp"
#include "autograd/function_node.cpp"
#include "autograd/hook.cpp"
#include "autograd/python_error.cpp"
#include "autograd/saved.cpp"
#include "autograd/wrap.cpp"
#include "nn/sdp_backends.cpp"
#include "testing/canary.cpp"
#include "testing/cpp_function.cpp"
#include "testing/record.cpp"
#include "testing/touched.cpp"
