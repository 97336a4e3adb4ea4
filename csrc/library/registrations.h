// Keeps track of which library registered which operators.
#pragma once

#include <string>
#include <vector>

namespace tch_extension {

struct Registration {
  // The address at which the library begins; null if the library is unknown.
  const void* file;
  std::string name;
};

// While an object of this class lives, it notes the operators that this thread registers, with the
// library that each one belongs to.
class NotedRegistrations {
 public:
  NotedRegistrations();
  NotedRegistrations(const NotedRegistrations&) = delete;
  NotedRegistrations& operator=(const NotedRegistrations&) = delete;
  ~NotedRegistrations();

  // Stores the notes for good. An operator whose library is unknown is attributed to `opened`, a
  // handle that dlopen returned.
  void keep(void* opened);

 private:
  std::vector<Registration> noted_;
  std::vector<Registration>* outer_;
};

// The names of the operators that were stored for a library, one per line. `library` is a handle
// that dlopen returned.
std::string registered_by(void* library);

}  // namespace tch_extension
