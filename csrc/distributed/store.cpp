// The stores by which ranks find one another: small values by key, shared by all ranks.
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tch_extension/c_abi.h"
#include "timely_store.h"

using namespace tch_extension;
using Milliseconds = std::chrono::milliseconds;

namespace {

std::string text(const char* bytes, size_t length) { return std::string(bytes, length); }

template <typename T>
void set(StorePtr** result, c10::intrusive_ptr<T> store, int64_t timeout) {
  if (timeout > 0) store->setTimeout(Milliseconds(timeout));
  *result = new StorePtr(std::move(store));
}

}  // namespace

// `workers` is the number of ranks for which the server waits; 0 stands for none. `port` becomes
// the server's port, which differs from the one asked for if that was 0.
TCH_EXTENSION_API Message tch_extension_store_tcp(const char* host, size_t length, uint16_t* port,
                                                  bool server, bool multi_tenant, uint64_t workers,
                                                  int64_t timeout, StorePtr** result) {
  return guard([&] {
    c10d::TCPStoreOptions options;
    options.port = *port;
    options.isServer = server;
    options.multiTenant = multi_tenant;
    options.waitWorkers = workers > 0;
    if (workers > 0) options.numWorkers = workers;
    options.timeout = Milliseconds(timeout);
    auto connect = [host = text(host, length), options] {
      return c10::make_intrusive<c10d::TCPStore>(host, options);
    };
    auto store = in_time(options.timeout + kAnswer, std::move(connect));
    *port = store->getPort();
    set(result, c10::make_intrusive<TimelyStore>(std::move(store)), timeout);
  });
}

TCH_EXTENSION_API Message tch_extension_store_file(const char* path, size_t length, int workers,
                                                   int64_t timeout, StorePtr** result) {
  return guard([&] {
    set(result, c10::make_intrusive<c10d::FileStore>(text(path, length), workers), timeout);
  });
}

TCH_EXTENSION_API Message tch_extension_store_hash(int64_t timeout, StorePtr** result) {
  return guard([&] { set(result, c10::make_intrusive<c10d::HashStore>(), timeout); });
}

TCH_EXTENSION_API Message tch_extension_store_prefix(const StorePtr* store, const char* prefix,
                                                     size_t length, StorePtr** result) {
  return guard([&] {
    set(result, c10::make_intrusive<c10d::PrefixStore>(text(prefix, length), *store), 0);
  });
}

// A handle of the same store. If the store has a server, the handle has a connection of its own,
// and waits for that long; the other stores are shared with their timeouts.
TCH_EXTENSION_API Message tch_extension_store_clone(const StorePtr* store, int64_t timeout,
                                                    StorePtr** result) {
  return guard([&] {
    StorePtr clone = (*store)->clone();
    auto* prefix = dynamic_cast<c10d::PrefixStore*>(clone.get());
    const StorePtr inner = prefix != nullptr ? prefix->getUnderlyingNonPrefixStore() : clone;
    if (auto* server = dynamic_cast<TimelyStore*>(inner.get())) {
      server->setTimeout(Milliseconds(timeout));
    }
    *result = new StorePtr(std::move(clone));
  });
}

TCH_EXTENSION_API void tch_extension_store_free(StorePtr* store) { delete store; }

TCH_EXTENSION_API Message tch_extension_store_set(const StorePtr* store, const char* key,
                                                  size_t length, const uint8_t* value,
                                                  size_t bytes) {
  return guard(
      [&] { (*store)->set(text(key, length), std::vector<uint8_t>(value, value + bytes)); });
}

// Calls `take` with the value. With a `timeout` of -1, the store's own holds.
TCH_EXTENSION_API Message tch_extension_store_get(const StorePtr* store, const char* key,
                                                  size_t length, void* context,
                                                  void (*take)(void*, const uint8_t*, size_t)) {
  return guard([&] {
    const std::vector<uint8_t> value = (*store)->get(text(key, length));
    take(context, value.data(), value.size());
  });
}

// Sets the key if its value is `expected`, or if `expected` is empty and the key is unset. Calls
// `take` with the value that the key has afterwards.
TCH_EXTENSION_API Message tch_extension_store_compare_set(
    const StorePtr* store, const char* key, size_t length, const uint8_t* expected,
    size_t expected_bytes, const uint8_t* desired, size_t desired_bytes, void* context,
    void (*take)(void*, const uint8_t*, size_t)) {
  return guard([&] {
    const std::vector<uint8_t> value = (*store)->compareSet(
        text(key, length), std::vector<uint8_t>(expected, expected + expected_bytes),
        std::vector<uint8_t>(desired, desired + desired_bytes));
    take(context, value.data(), value.size());
  });
}

TCH_EXTENSION_API Message tch_extension_store_add(const StorePtr* store, const char* key,
                                                  size_t length, int64_t amount, int64_t* result) {
  return guard([&] { *result = (*store)->add(text(key, length), amount); });
}

TCH_EXTENSION_API Message tch_extension_store_wait(const StorePtr* store, const char* key,
                                                   size_t length, int64_t timeout) {
  return guard([&] { (*store)->wait({text(key, length)}, Milliseconds(timeout)); });
}

TCH_EXTENSION_API Message tch_extension_store_check(const StorePtr* store, const char* key,
                                                    size_t length, bool* result) {
  return guard([&] { *result = (*store)->check({text(key, length)}); });
}

TCH_EXTENSION_API Message tch_extension_store_delete(const StorePtr* store, const char* key,
                                                     size_t length, bool* result) {
  return guard([&] { *result = (*store)->deleteKey(text(key, length)); });
}
