// Functions that the loader and the dispatcher's bridge share.
#pragma once

#include <ATen/core/operator_name.h>

#include <mutex>
#include <string>

namespace tch_extension {

// Locked while this crate reads the dispatcher's table of operators, and while the process forks.
std::mutex& dispatcher_table();

// `ns::name`, or `ns::name.overload`.
std::string full_name(const c10::OperatorName& name);

}  // namespace tch_extension
