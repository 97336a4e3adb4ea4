// libtorch's switches for the back ends of scaled_dot_product_attention. They hold for the whole
// process.

#include <ATen/Context.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty.h>

#include <vector>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

// src/ffi/sdp_backends.rs has the same number. A libtorch with more back ends needs another one.
constexpr int kBackends = 5;
static_assert(at::num_sdp_backends == kBackends);

struct tch_extension::SdpBackends {
  int64_t order[kBackends];  // at::SDPBackend, first the one that is tried first
  bool enabled[kBackends];   // indexed by at::SDPBackend
};

TCH_EXTENSION_API Message tch_extension_sdp_backends_get(SdpBackends* result) {
  return guard([&] {
    auto& context = at::globalContext();
    const auto order = context.sDPPriorityOrder();
    for (int place = 0; place < kBackends; ++place) {
      result->order[place] = static_cast<int64_t>(order[place]);
    }
    const auto set = [&](at::SDPBackend backend, bool enabled) {
      result->enabled[static_cast<int>(backend)] = enabled;
    };
    set(at::SDPBackend::math, context.userEnabledMathSDP());
    set(at::SDPBackend::flash_attention, context.userEnabledFlashSDP());
    set(at::SDPBackend::efficient_attention, context.userEnabledMemEfficientSDP());
    set(at::SDPBackend::cudnn_attention, context.userEnabledCuDNNSDP());
    set(at::SDPBackend::overrideable, context.userEnabledOverrideableSDP());
  });
}

// enabled: one for each at::SDPBackend
TCH_EXTENSION_API Message tch_extension_sdp_backends_enable(const bool* enabled) {
  return guard([&] {
    auto& context = at::globalContext();
    const auto is_enabled = [&](at::SDPBackend backend) {
      return enabled[static_cast<int>(backend)];
    };
    context.setSDPUseMath(is_enabled(at::SDPBackend::math));
    context.setSDPUseFlash(is_enabled(at::SDPBackend::flash_attention));
    context.setSDPUseMemEfficient(is_enabled(at::SDPBackend::efficient_attention));
    context.setSDPUseCuDNN(is_enabled(at::SDPBackend::cudnn_attention));
    context.setSDPUseOverrideable(is_enabled(at::SDPBackend::overrideable));
  });
}

// order: each at::SDPBackend once
TCH_EXTENSION_API Message tch_extension_sdp_backends_order(const int64_t* order) {
  return guard([&] {
    at::globalContext().setSDPPriorityOrder(std::vector<int64_t>(order, order + kBackends));
  });
}

// libtorch overwrites the order when it chooses a back end on CUDA for the first time. This lets it
// choose one, on the current device, whose kind decides the order.
TCH_EXTENSION_API Message tch_extension_sdp_backends_settle() {
  return guard([&] {
    if (!at::hasCUDA()) return;
    const auto x = at::empty({1, 1, 8, 8}, at::TensorOptions(at::kCUDA).dtype(at::kHalf));
    at::_fused_sdp_choice(x, x, x);
  });
}
