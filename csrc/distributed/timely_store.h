// A TCPStore whose calls end in time.
//
// c10d's own waits for an answer without any limit once a server has accepted its connection. A
// process that is stopped and another program on the port accept connections, too. Nothing can
// interrupt such a call, so each is made by a thread that is left alone if it takes too long.
#pragma once

#include <chrono>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#include "group.h"

namespace tch_extension {

// A call that took too long. c10d's own threads expect this kind of error from a store.
class Late : public c10::DistNetworkError {
 public:
  explicit Late(const std::string& why) : DistNetworkError({__func__, __FILE__, __LINE__}, why) {}
};

// Calls `task` on a thread of its own. After `limit`, it throws, and the thread goes on: `task` may
// own what it uses, and must borrow nothing.
template <typename Task>
std::invoke_result_t<Task> in_time(std::chrono::milliseconds limit, Task task) {
  std::packaged_task<std::invoke_result_t<Task>()> packaged(std::move(task));
  auto result = packaged.get_future();
  std::thread thread(std::move(packaged));
  if (result.wait_for(limit) != std::future_status::ready) {
    thread.detach();
    throw Late("the store gave no answer within " + std::to_string(limit.count()) +
               " ms; its process is stopped or out of reach");
  }
  // Its reference to the store is gone, too, when this returns.
  thread.join();
  return result.get();
}

// What waits takes as long as it was told to, and then the answer this long at most.
inline constexpr std::chrono::milliseconds kAnswer = std::chrono::seconds(5);

class TimelyStore final : public c10d::Store {
  using Milliseconds = std::chrono::milliseconds;
  using Keys = std::vector<std::string>;
  using Bytes = std::vector<uint8_t>;

 public:
  explicit TimelyStore(StorePtr inner) : Store(inner->getTimeout()), inner_(std::move(inner)) {}

  // It makes a connection of its own, and so does not wait for calls of this one.
  StorePtr clone() override {
    auto connect = [inner = inner_] { return inner->clone(); };
    return c10::make_intrusive<TimelyStore>(in_time(timeout_ + kAnswer, connect));
  }

  void setTimeout(const Milliseconds& timeout) override {
    Store::setTimeout(timeout);
    inner_->setTimeout(timeout);
  }

  void set(const std::string& key, const Bytes& value) override {
    ask(timeout_, [=](Store& store) { store.set(key, value); });
  }

  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return ask(timeout_, [=](Store& store) { return store.compareSet(key, expected, desired); });
  }

  Bytes get(const std::string& key) override {
    return ask(timeout_ + kAnswer, [=](Store& store) { return store.get(key); });
  }

  int64_t add(const std::string& key, int64_t amount) override {
    return ask(timeout_, [=](Store& store) { return store.add(key, amount); });
  }

  bool deleteKey(const std::string& key) override {
    return ask(timeout_, [=](Store& store) { return store.deleteKey(key); });
  }

  bool check(const Keys& keys) override {
    return ask(timeout_, [=](Store& store) { return store.check(keys); });
  }

  int64_t getNumKeys() override {
    return ask(timeout_, [](Store& store) { return store.getNumKeys(); });
  }

  void wait(const Keys& keys) override { wait(keys, timeout_); }

  void wait(const Keys& keys, const Milliseconds& timeout) override {
    ask(timeout + kAnswer, [=](Store& store) { store.wait(keys, timeout); });
  }

  void append(const std::string& key, const Bytes& value) override {
    ask(timeout_, [=](Store& store) { store.append(key, value); });
  }

  std::vector<Bytes> multiGet(const Keys& keys) override {
    return ask(timeout_ + kAnswer, [=](Store& store) { return store.multiGet(keys); });
  }

  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override {
    ask(timeout_, [=](Store& store) { store.multiSet(keys, values); });
  }

  bool hasExtendedApi() const override { return inner_->hasExtendedApi(); }

 private:
  // `call` copies what it uses. The server does one thing at a time for a connection.
  template <typename Call>
  std::invoke_result_t<Call, Store&> ask(Milliseconds limit, Call call) {
    const auto end = std::chrono::steady_clock::now() + limit;
    const std::unique_lock<std::timed_mutex> lock(mutex_, end);
    TORCH_CHECK_WITH(DistStoreError, lock.owns_lock(),
                     "another thread waited in this store for longer than ", limit.count(), " ms");
    if (lost_) throw Late("the store gave no answer to an earlier call");
    try {
      return in_time(limit, [call = std::move(call), inner = inner_] { return call(*inner); });
    } catch (const Late&) {
      // The answer may still come, and would be taken for that of the next call.
      lost_ = true;
      throw;
    }
  }

  StorePtr inner_;
  std::timed_mutex mutex_;  // protects the connection and `lost_`
  bool lost_ = false;
};

}  // namespace tch_extension
