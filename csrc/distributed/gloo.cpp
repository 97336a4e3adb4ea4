// The backend for CPU tensors, libtorch's own ProcessGroupGloo, and the comparison of what ranks
// do.
#include "c10d.h"
// After the macros of c10d.h.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "checked.h"
#include "group.h"

namespace tch_extension {
namespace {

using Milliseconds = std::chrono::milliseconds;

// libtorch ships no headers of Gloo, and `stub/gloo` only declares its names. What depends on the
// layout are the members of c10d's class, which hold Gloo's objects by pointers. Its size is what
// libtorch's own ProcessGroupGloo::split passes to operator new, in 2.11 and in 2.13.
static_assert(sizeof(c10d::ProcessGroupGloo) == 488,
              "this libtorch lays out ProcessGroupGloo differently than csrc/distributed knows");

// Whether an environment variable is unset, or begins with a text.
bool begins_with(const char* variable, const char* text) {
  const char* value = std::getenv(variable);
  return value == nullptr || std::strncmp(value, text, std::strlen(text)) == 0;
}

// Held while any group starts an operation: libtorch 2.11's FlightRecorder notes a group's first
// one in a map of all groups without a lock, so that two threads with groups of their own crashed.
std::unique_lock<std::recursive_mutex> lock_all_groups() {
  static auto& mutex = *new std::recursive_mutex;  // may be used while the process ends
  return std::unique_lock<std::recursive_mutex>(mutex);
}

// ProcessGroupGloo, whose connections can be closed.
class Gloo : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  // Also makes everything fail that waits for a connection. closeConnections alone would let it
  // wait until the timeout. c10d does the same when an operation takes too long.
  void close(const std::string& why) {
    // Connections that do not exist yet would be made by getPair.
    const bool by_pairs =
        !c10d::getDefaultGlooLazyInit() && begins_with("GLOO_DEVICE_TRANSPORT", "TCP");
    for (const auto& context : contexts_) {
      for (int rank = 0; by_pairs && rank < getSize(); ++rank) {
        if (rank == getRank()) continue;
        auto* pair = reinterpret_cast<gloo::transport::tcp::Pair*>(context->getPair(rank).get());
        if (pair != nullptr) pair->signalExceptionExternal(why);
      }
      context->closeConnections();
    }
  }
};

c10::intrusive_ptr<c10d::ProcessGroupGloo::Options> gloo_options(const GroupParts& parts) {
  using Base = c10d::ProcessGroupGloo;
  const Milliseconds timeout(parts.timeout);
  c10::intrusive_ptr<Base::Options> options;
  // The variable names the interfaces to use; create_default obeys it.
  if (parts.loopback && std::getenv("GLOO_SOCKET_IFNAME") == nullptr) {
    options = Base::Options::create(timeout);
    options->devices.push_back(
        Base::createDeviceForHostname("127.0.0.1", c10d::getDefaultGlooLazyInit()));
  } else {
    options = Base::Options::create_default(timeout);
  }
  options->group_name = std::string(parts.name, parts.name_length);
  return options;
}

// The bytes of a description. Every rank sends as many.
constexpr int64_t kBytes = 256;

at::Tensor bytes_of(std::string text) {
  if (text.size() > kBytes) {
    // The hash tells long descriptions apart that begin alike.
    const std::string hash = " ... " + std::to_string(std::hash<std::string>{}(text));
    text = text.substr(0, kBytes - hash.size()) + hash;
  }
  at::Tensor bytes = at::zeros({kBytes}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

std::string text_of(const uint8_t* bytes) {
  const auto* text = reinterpret_cast<const char*>(bytes);
  return std::string(text, strnlen(text, kBytes));
}

// Compares over connections of its own, so that it cannot be mistaken for an operation.
class GlooChecker final : public Checker {
 public:
  explicit GlooChecker(c10::intrusive_ptr<Gloo> gloo) : gloo_(std::move(gloo)) {}

  void compare(const std::string& what) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int size = gloo_->getSize();
    at::Tensor own = bytes_of(what);
    at::Tensor all = at::empty({size * kBytes}, at::kByte);
    gather(all, own)->wait();
    const auto* bytes = all.const_data_ptr<uint8_t>();
    // What is done, with the ranks that do it, in the order of ranks.
    std::vector<std::pair<std::string, std::string>> kinds;
    for (int rank = 0; rank < size; ++rank) {
      const std::string name = text_of(bytes + rank * kBytes);
      auto same = [&](const auto& kind) { return kind.first == name; };
      const auto found = std::find_if(kinds.begin(), kinds.end(), same);
      if (found == kinds.end()) {
        kinds.emplace_back(name, std::to_string(rank));
      } else {
        found->second += ", " + std::to_string(rank);
      }
    }
    if (kinds.size() == 1) return;
    std::string text;
    for (const auto& [name, ranks] : kinds) {
      text += (text.empty() ? "rank " : "; rank ") + ranks + ": " + name;
    }
    TORCH_CHECK(false, "the ranks call different operations: ", text);
  }

  void compare_sizes(const std::vector<int64_t>& output,
                     const std::vector<int64_t>& input) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t size = gloo_->getSize();
    at::Tensor own = at::empty({2 * size}, at::kLong);
    std::copy(output.begin(), output.end(), own.data_ptr<int64_t>());
    std::copy(input.begin(), input.end(), own.data_ptr<int64_t>() + size);
    at::Tensor all = at::empty({size * 2 * size}, at::kLong);
    gather(all, own)->wait();
    const auto* sizes = all.const_data_ptr<int64_t>();
    // Every rank checks all pairs, so that all of them fail.
    for (int64_t from = 0; from < size; ++from) {
      for (int64_t to = 0; to < size; ++to) {
        const int64_t sent = sizes[from * 2 * size + size + to];
        const int64_t expected = sizes[to * 2 * size + from];
        TORCH_CHECK(sent == expected, "rank ", from, " sends ", sent, " rows to rank ", to,
                    ", which expects ", expected);
      }
    }
  }

  void announce(const std::string& what, int rank, int tag) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<at::Tensor> bytes{bytes_of(what)};
    auto work = gloo_->send(bytes, rank, tag);
    // The work must live until the bytes are sent, which the sender does not wait for.
    sent_.push_back(std::move(work));
    if (sent_.size() > kKept) sent_.pop_front();
  }

  void expect(const std::string& what, int rank, int tag, Milliseconds timeout) override {
    std::vector<at::Tensor> bytes{at::empty({kBytes}, at::kByte)};
    gloo_->recv(bytes, rank, tag)->wait(timeout);
    const std::string sent = text_of(bytes[0].const_data_ptr<uint8_t>());
    TORCH_CHECK(sent == what, "rank ", rank, " sends ", sent, ", but rank ", gloo_->getRank(),
                " expects ", what);
  }

  void end(const std::string& why) override { gloo_->close(why); }

 private:
  c10::intrusive_ptr<c10d::Work> gather(at::Tensor& all, at::Tensor& own) {
    const auto alone = lock_all_groups();
    return gloo_->_allgather_base(all, own);
  }

  // How many announcements may be on their way.
  static constexpr size_t kKept = 256;

  // The backends of a group share the checker.
  std::mutex mutex_;
  c10::intrusive_ptr<Gloo> gloo_;
  std::deque<c10::intrusive_ptr<c10d::Work>> sent_;
};

class CheckedGloo final : public Checked<Gloo> {
 public:
  using Checked<Gloo>::Checked;

 private:
  void end_base(const std::string& why) override { close(why); }
  std::unique_lock<std::recursive_mutex> lock_start() override { return lock_all_groups(); }
};

c10::intrusive_ptr<c10d::PrefixStore> prefixed(const char* prefix, const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

}  // namespace

std::shared_ptr<Checker> make_checker(const StorePtr& store, const GroupParts& parts) {
  return std::make_shared<GlooChecker>(c10::make_intrusive<Gloo>(
      prefixed("tch_extension/check/", store), parts.rank, parts.size, gloo_options(parts)));
}

c10::intrusive_ptr<c10d::Backend> make_gloo(const StorePtr& store, const GroupParts& parts,
                                            const std::shared_ptr<Checker>& checker) {
  auto backend = c10::make_intrusive<CheckedGloo>(prefixed("cpu/", store), parts.rank, parts.size,
                                                  gloo_options(parts));
  backend->setSequenceNumberForGroup();
  backend->set_checker(checker);
  return backend;
}

}  // namespace tch_extension
