// Records what a profiler sees of this thread, names and sequence numbers, for tests.

#include <ATen/record_function.h>

#include <string>
#include <utility>
#include <vector>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

namespace {

struct Event {
  std::string name;
  int64_t sequence_nr;
};

thread_local std::vector<Event> events;
thread_local int64_t open = 0;

std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
  events.push_back({function.name(), function.seqNr()});
  ++open;
  return nullptr;
}

void note_end(const at::RecordFunction&, at::ObserverContext*) { --open; }

}  // namespace

TCH_EXTENSION_API Message tch_extension_record_begin(uint64_t* handle) {
  return guard([&] {
    events.clear();
    open = 0;
    using at::RecordScope;
    auto callback = at::RecordFunctionCallback(note, note_end)
                        .scopes({RecordScope::FUNCTION, RecordScope::BACKWARD_FUNCTION});
    *handle = at::addThreadLocalCallback(callback);
  });
}

// Calls `take` with each event; `take` must not unwind. Returns the number of events that have not
// ended.
TCH_EXTENSION_API int64_t tch_extension_record_end(uint64_t handle, void* context,
                                                   void (*take)(void*, const char*, size_t,
                                                                int64_t)) {
  at::removeCallback(handle);
  for (const auto& [name, sequence_nr] : std::exchange(events, {})) {
    take(context, name.data(), name.size(), sequence_nr);
  }
  return open;
}
