// Loads libraries that register operators, after a rehearsal in a child process.
//
// If the dispatcher refuses a registration, because its namespace or operator is taken, it throws
// in a static initialiser inside dlopen. At best the process aborts; at worst the exception passes
// through the dynamic loader, which then keeps its lock forever. No symbol tells in advance what a
// library registers. Therefore a child process, which has the same operators registered, loads the
// library first.

#include "loader.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/version.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>

#include "../ffi.h"
#include "registrations.h"
#include "tch_extension/c_abi.h"

namespace tch_extension {

std::mutex& dispatcher_table() {
  static std::mutex mutex;
  return mutex;
}

namespace {

void* open_library(const char* path, bool global) {
  // RTLD_NOW resolves all symbols, so that a missing one is an error here and not an abort in the
  // first call. RTLD_LOCAL is the default, because two libraries may define different functions of
  // the same name.
  void* library = dlopen(path, RTLD_NOW | (global ? RTLD_GLOBAL : RTLD_LOCAL));
  if (library == nullptr) {
    const char* error = dlerror();
    throw std::runtime_error(error == nullptr ? "dlopen failed without a reason" : error);
  }
  // A PYBIND11_MODULE (tch_extension/pybind/module.h) stores its error until it is asked for it.
  void* ask = dlsym(library, "tch_extension_load_error");
  const char* error = ask == nullptr ? nullptr : reinterpret_cast<const char* (*)()>(ask)();
  if (error != nullptr) throw std::runtime_error(error);
  return library;
}

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(); }
  void close() {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
  }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

// The file descriptor to which the child writes its result: an empty message for success, or the
// reason of a failure. The result stands between two marks, because initialisers may print to the
// same file. A child that writes no result has failed, because an initialiser may end the process
// with status 0.
int words = -1;
constexpr char kMark = '\0';

[[noreturn]] void end_child(Message message) {
  const std::string text = kMark + std::string(message == nullptr ? "" : message) + kMark;
  _exit(write(words, text.data(), text.size()) < 0 || message != nullptr ? 1 : 0);
}

// The dynamic loader's own frames let no exception through, so an exception ends here.
[[noreturn]] void terminate_in_child() {
  const auto exception = std::current_exception();
  if (exception == nullptr) std::abort();
  end_child(guard([&] { std::rethrow_exception(exception); }));
}

// Runs in the child and never returns. All output of the child goes to `out`.
[[noreturn]] void rehearse_in_child(int out, const char* const* paths, size_t len, bool global) {
  // If the parent is killed while the child hangs, the child must end, too.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  for (int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) std::signal(signal, SIG_DFL);
  words = out;
  std::set_terminate(terminate_in_child);
  // This exit handler runs before the parent's handlers, which would clean up what the parent still
  // needs.
  std::atexit([] { _exit(3); });
  dup2(out, STDOUT_FILENO);
  dup2(out, STDERR_FILENO);
  end_child(guard([&] {
    // The other threads of libtorch's pool do not exist in the child, and a parallel loop in an
    // initialiser would wait for them.
    at::set_num_threads(1);
    for (size_t i = 0; i < len; ++i) open_library(paths[i], global || i + 1 < len);
  }));
}

// Where the child's message begins, if the text contains the whole message.
size_t find_message(const std::string& text) {
  if (text.size() < 2 || text.back() != kMark) return std::string::npos;
  const size_t mark = text.rfind(kMark, text.size() - 2);
  return mark == std::string::npos ? mark : mark + 1;
}

// Reads until the child's message has come, or until no process can write any more. (A process that
// an initialiser started may hold the pipe open forever.) Returns false if neither happened in
// time.
bool read_all(int in, std::chrono::milliseconds limit, std::string& text) {
  constexpr size_t kKept = 1 << 20;
  const auto end = std::chrono::steady_clock::now() + limit;
  while (find_message(text) == std::string::npos) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
                          end - std::chrono::steady_clock::now())
                          .count();
    pollfd ready{in, POLLIN, 0};
    const int count = left <= 0 ? 0 : poll(&ready, 1, static_cast<int>(left));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    char buffer[4096];
    const ssize_t bytes = read(in, buffer, sizeof buffer);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes <= 0) return true;
    // Only the end of the text matters.
    if (text.size() > 2 * kKept) text.erase(0, kKept);
    text.append(buffer, static_cast<size_t>(bytes));
  }
  return true;
}

int wait_for(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    // If SIGCHLD is ignored, the child was reaped already; then only its message tells how it went.
    if (errno != EINTR) return -1;
  }
  return status;
}

// Forks while no thread reads the dispatcher's table. Otherwise the child would inherit a reader's
// lock without its thread, and every registration would wait for that lock forever.
pid_t fork_between_lookups() {
  const std::lock_guard nobody_reads(dispatcher_table());
  return fork();
}

void rehearse(const char* const* paths, size_t len, bool global, int64_t limit_ms) {
  int ends[2];
  // O_CLOEXEC closes the pipe in programs that other threads start meanwhile; they would hold it
  // open.
  if (pipe2(ends, O_CLOEXEC) != 0)
    throw std::system_error(errno, std::generic_category(),
                            "cannot try to load it in a child process first: pipe");
  File in(ends[0]), out(ends[1]);
  const pid_t child = fork_between_lookups();
  if (child < 0)
    throw std::system_error(errno, std::generic_category(),
                            "cannot try to load it in a child process first: fork");
  if (child == 0) rehearse_in_child(out.get(), paths, len, global);
  out.close();
  std::string text;
  const bool in_time = read_all(in.get(), std::chrono::milliseconds(limit_ms), text);
  if (!in_time) kill(child, SIGKILL);
  const int status = wait_for(child);
  if (!in_time) throw std::runtime_error("its initialisers did not end in time");
  const size_t begin = find_message(text);
  const bool has_ended = begin == std::string::npos;
  const std::string message = has_ended ? text : text.substr(begin, text.size() - begin - 1);
  if (!has_ended && !message.empty()) throw std::runtime_error(message);
  if (has_ended || status > 0)
    throw std::runtime_error("its initialisers ended the process that tried them" +
                             (message.empty() ? message : ": " + message));
}

}  // namespace
}  // namespace tch_extension

using namespace tch_extension;

// Loads the libraries in a child process: the last one as tch_extension_open_library(…, global)
// does, and the earlier ones as with `global` true.
TCH_EXTENSION_API Message tch_extension_rehearse(const char* const* paths, size_t len, bool global,
                                                 int64_t limit_ms) {
  return guard([&] { rehearse(paths, len, global, limit_ms); });
}

// `operators`: the names of the operators that the library registered, one per line. The caller
// frees it like a message.
TCH_EXTENSION_API Message tch_extension_open_library(const char* path, bool global,
                                                     char** operators) {
  return guard([&] {
    NotedRegistrations noted;
    void* const library = open_library(path, global);
    noted.keep(library);
    *operators = strdup(registered_by(library).c_str());
  });
}

// Whether a loaded library, or one that it depends on, defines the symbol.
TCH_EXTENSION_API bool tch_extension_defines(const char* path, const char* symbol) {
  void* library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return false;
  const bool defines = dlsym(library, symbol) != nullptr;
  dlclose(library);
  return defines;
}

// The path of a file of the libtorch that this process uses, or an empty text. The caller frees it
// like a message.
TCH_EXTENSION_API char* tch_extension_libtorch_file() {
  Dl_info info{};
  const auto address = reinterpret_cast<void*>(static_cast<bool (*)()>(&at::GradMode::is_enabled));
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return strdup("");
  return strdup(info.dli_fname);
}

TCH_EXTENSION_API char* tch_extension_libtorch_version() { return strdup(TORCH_VERSION); }

// A symbol's name as the C++ source has it. A symbol that is not C++'s is returned unchanged. The
// caller frees it like a message.
TCH_EXTENSION_API char* tch_extension_demangled(const char* symbol) {
  int status = 0;
  char* name = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
  return name == nullptr ? strdup(symbol) : name;
}
