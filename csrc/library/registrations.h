// Which library registered which operators.
#pragma once

#include <string>
#include <vector>

namespace tch_extension {

struct Registration {
  // Where the library begins in memory; null where nothing says whose it is.
  const void* file;
  std::string name;
};

// While it lives, the operators that this thread registers are noted, with the library that each
// one is of.
class NotedRegistrations {
 public:
  NotedRegistrations();
  NotedRegistrations(const NotedRegistrations&) = delete;
  NotedRegistrations& operator=(const NotedRegistrations&) = delete;
  ~NotedRegistrations();

  // Keeps what was noted, for ever. What nothing says whose it is counts for `opened`, which dlopen
  // returned.
  void keep(void* opened);

 private:
  std::vector<Registration> noted_;
  std::vector<Registration>* outer_;
};

// The names of the operators that were kept for a library, one a line. `library` is what dlopen
// returned.
std::string registered_by(void* library);

}  // namespace tch_extension
