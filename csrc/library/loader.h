// What the loader and the dispatcher's bridge share.
#pragma once

#include <mutex>

namespace tch_extension {

// Held shared while this crate reads the dispatcher's table of operators, and alone while the process is
// forked.
std::mutex& dispatcher_table();

}  // namespace tch_extension
