// The names of kernels that a graph launches, from the driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <cstdlib>
#include <string>

namespace tch_extension {

// A function of the driver, found at run time because nothing here is linked to the driver; null if
// the driver does not have it.
template <typename F>
F driver_function(const char* name, unsigned int since) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &entry, since, cudaEnableDefault, &result);
  const bool is_there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return is_there ? reinterpret_cast<F>(entry) : nullptr;
}

// The name as C++ writes it.
inline std::string demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result(status == 0 ? text : name);
  free(text);
  return result;
}

// The name of a node's kernel, mangled; empty if the driver, which must be of CUDA 12.3,
// does not say.
inline std::string kernel_name(cudaGraphNode_t node) {
  using Parameters = CUresult (*)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS_v2*);
  using OfFunction = CUresult (*)(const char**, CUfunction);
  using OfKernel = CUresult (*)(const char**, CUkernel);
  static const auto parameters = driver_function<Parameters>("cuGraphKernelNodeGetParams", 12000);
  static const auto of_function = driver_function<OfFunction>("cuFuncGetName", 12030);
  static const auto of_kernel = driver_function<OfKernel>("cuKernelGetName", 12030);
  CUDA_KERNEL_NODE_PARAMS_v2 of_node{};
  const char* name = nullptr;
  if (parameters == nullptr || parameters(node, &of_node) != CUDA_SUCCESS) return {};
  const bool is_function = of_node.func != nullptr && of_function != nullptr &&
                           of_function(&name, of_node.func) == CUDA_SUCCESS;
  const bool is_kernel = !is_function && of_node.kern != nullptr && of_kernel != nullptr &&
                         of_kernel(&name, of_node.kern) == CUDA_SUCCESS;
  return is_function || is_kernel ? std::string(name) : std::string();
}

}  // namespace tch_extension
