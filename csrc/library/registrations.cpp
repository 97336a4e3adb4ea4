// Keeps track of which library registered which operators.
//
// An operator that appears in the dispatcher's table while a library is loaded may belong to
// another library: other threads register operators, and libraries that the new one depends on are
// loaded with it. So a listener notes what the loading thread registers, and finds out from the
// stack whose initialiser is running.
//
// The listener does nothing while its thread loads no library. The dispatcher calls it with the
// dispatcher's lock held, and asking the dynamic loader for a library's name takes the loader's
// lock. A thread that loads a library holds the loader's lock while it waits for the dispatcher's,
// so this would be a deadlock.

#include "registrations.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <link.h>
#include <unwind.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "loader.h"

namespace tch_extension {
namespace {

// The address at which a loaded file begins. It stays valid, because a library that registered
// operators is never unloaded.
using LoadedFile = const void*;

thread_local std::vector<Registration>* noted = nullptr;

LoadedFile file_of(const void* address) {
  Dl_info info{};
  return dladdr(address, &info) == 0 ? nullptr : info.dli_fbase;
}

LoadedFile file_of_library(void* library) {
  const link_map* map = nullptr;
  return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr ? file_of(map->l_ld)
                                                                       : nullptr;
}

struct Walk {
  LoadedFile loader, last, found;
};

_Unwind_Reason_Code look_at_frame(_Unwind_Context* frame, void* data) {
  auto& walk = *static_cast<Walk*>(data);
  // The return address may be one past the end of the function that made the call.
  const LoadedFile file = file_of(reinterpret_cast<const void*>(_Unwind_GetIP(frame) - 1));
  if (file == walk.loader) {
    walk.found = walk.last;
    return _URC_END_OF_STACK;
  }
  walk.last = file;
  return _URC_NO_REASON;
}

// The library whose initialiser is running, which is the one that the dynamic loader called. Null
// if the stack does not tell.
LoadedFile initialising_file() {
  Walk walk{reinterpret_cast<LoadedFile>(_r_debug.r_ldbase), nullptr, nullptr};
  _Unwind_Backtrace(look_at_frame, &walk);
  return walk.found;
}

class Listener : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    if (noted != nullptr) noted->push_back({initialising_file(), full_name(op.operator_name())});
  }
  // A library whose registration fails takes back what it registered.
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    if (noted == nullptr) return;
    const std::string name = full_name(op.operator_name());
    const auto is_it = [&](const Registration& registration) { return registration.name == name; };
    noted->erase(std::remove_if(noted->begin(), noted->end(), is_it), noted->end());
  }
};

void listen() {
  // The handle is never freed, because freeing it would end the listening.
  static const auto* const handle = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));
  static_cast<void>(handle);
}

struct Registrations {
  std::mutex mutex;
  std::map<LoadedFile, std::vector<std::string>> of_files;
};

Registrations& registrations() {
  static auto* const all = new Registrations;
  return *all;
}

}  // namespace

NotedRegistrations::NotedRegistrations() {
  listen();
  outer_ = std::exchange(noted, &noted_);
}

NotedRegistrations::~NotedRegistrations() { noted = outer_; }

void NotedRegistrations::keep(void* opened) {
  auto& all = registrations();
  const std::lock_guard lock(all.mutex);
  for (auto& [file, name] : noted_)
    all.of_files[file == nullptr ? file_of_library(opened) : file].push_back(std::move(name));
  noted_.clear();
}

std::string registered_by(void* library) {
  auto& all = registrations();
  const std::lock_guard lock(all.mutex);
  std::string text;
  for (const auto& name : all.of_files[file_of_library(library)]) text += name + '\n';
  return text;
}

}  // namespace tch_extension
