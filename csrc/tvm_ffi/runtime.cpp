// Finds libtvm_ffi in the process, and loads modules with it.

#include "runtime.h"

#include <ATen/DLConvertor.h>
#include <ATen/ops/empty.h>
#include <dlfcn.h>
#include <link.h>

#include <csignal>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

namespace tch_extension::tvm_ffi {
namespace {

std::atomic<const Runtime*> attached{nullptr};

template <typename Function>
void look_up(Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  if (function == nullptr) throw std::runtime_error(std::string("libtvm_ffi lacks ") + name);
}

Object* optional_function(const Runtime& ffi, const char* name) {
  const Bytes bytes{name, std::strlen(name)};
  void* function = nullptr;
  if (ffi.get_global(&bytes, &function) != 0) throw std::runtime_error(take_error(ffi));
  return static_cast<Object*>(function);
}

Object* global_function(const Runtime& ffi, const char* name) {
  Object* function = optional_function(ffi, name);
  if (function == nullptr)
    throw std::runtime_error(std::string("libtvm_ffi lacks the function ") + name);
  return function;
}

// Keeps what it finds until the process ends, as the library itself stays.
const Runtime* attach() {
  auto ffi = std::make_unique<Runtime>();
  look_up(ffi->dec_ref, "TVMFFIObjectDecRef");
  look_up(ffi->get_global, "TVMFFIFunctionGetGlobal");
  look_up(ffi->call, "TVMFFIFunctionCall");
  look_up(ffi->take_error, "TVMFFIErrorMoveFromRaised");
  look_up(ffi->make_string, "TVMFFIStringFromByteArray");
  look_up(ffi->set_stream, "TVMFFIEnvSetStream");
  look_up(ffi->set_allocator, "TVMFFIEnvSetDLPackManagedTensorAllocator");
  look_up(ffi->allocator, "TVMFFIEnvGetDLPackManagedTensorAllocator");
  look_up(ffi->to_dlpack, "TVMFFITensorToDLPackVersioned");
  ffi->load_module = global_function(*ffi, "ffi.ModuleLoadFromFile");
  ffi->get_function = global_function(*ffi, "ffi.ModuleGetFunction");
  ffi->get_metadata = global_function(*ffi, "ffi.ModuleGetFunctionMetadata");
  ffi->make_array = global_function(*ffi, "ffi.Array");
  ffi->array_size = global_function(*ffi, "ffi.ArraySize");
  ffi->array_item = global_function(*ffi, "ffi.ArrayGetItem");
  ffi->list_size = optional_function(*ffi, "ffi.ListSize");
  ffi->list_item = optional_function(*ffi, "ffi.ListGetItem");
  // Where another framework has set its own allocator, a call of ours sets ours for its duration.
  if (ffi->allocator() == nullptr) ffi->set_allocator(allocate, 1, nullptr);
  return ffi.release();
}

// The path of a copy of libtvm_ffi that is in the process, global or not.
int note_copy(dl_phdr_info* info, size_t, void* path) {
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* name = slash == nullptr ? info->dlpi_name : slash + 1;
  if (std::strncmp(name, "libtvm_ffi.so", 13) != 0) return 0;
  *static_cast<std::string*>(path) = info->dlpi_name;
  return 1;
}

// The number of symbols in a loaded library's table, which only its hash table tells.
size_t symbols_len(const uint32_t* hash) {
  const uint32_t buckets_len = hash[0], first = hash[1], bloom_len = hash[2];
  const uint32_t* buckets = hash + 4 + bloom_len * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
  const uint32_t* chains = buckets + buckets_len;
  uint32_t last = 0;
  for (uint32_t i = 0; i < buckets_len; ++i) last = std::max(last, buckets[i]);
  if (last < first) return first;
  while ((chains[last - first] & 1) == 0) ++last;
  return last + 1;
}

constexpr char kPrefix[] = "__tvm_ffi_";

// The functions that a loaded library exports, one per line. Names that begin with one more
// underscore are metadata and the like.
std::string exported(void* library) {
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) throw std::runtime_error(dlerror());
  const ElfW(Sym)* symbols = nullptr;
  const char* texts = nullptr;
  size_t len = 0;
  for (const auto* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
    const auto* place = reinterpret_cast<const void*>(entry->d_un.d_ptr);
    if (entry->d_tag == DT_SYMTAB) symbols = static_cast<const ElfW(Sym)*>(place);
    if (entry->d_tag == DT_STRTAB) texts = static_cast<const char*>(place);
    if (entry->d_tag == DT_HASH)
      len = std::max<size_t>(len, static_cast<const uint32_t*>(place)[1]);
    if (entry->d_tag == DT_GNU_HASH)
      len = std::max(len, symbols_len(static_cast<const uint32_t*>(place)));
  }
  std::string names;
  for (size_t i = 0; symbols != nullptr && texts != nullptr && i < len; ++i) {
    const char* name = texts + symbols[i].st_name;
    constexpr size_t kLen = sizeof kPrefix - 1;
    if (symbols[i].st_shndx == SHN_UNDEF || std::strncmp(name, kPrefix, kLen) != 0) continue;
    if (name[kLen] != '_') names += std::string(name + kLen) + '\n';
  }
  return names;
}

// A loaded library, which stays loaded.
class Loaded {
 public:
  explicit Loaded(const char* path) : handle_(dlopen(path, RTLD_NOW | RTLD_NOLOAD)) {
    if (handle_ == nullptr) throw std::runtime_error("it is not loaded");
  }
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;
  ~Loaded() { dlclose(handle_); }
  void* get() const { return handle_; }

 private:
  void* handle_;
};

}  // namespace

const Runtime& runtime() {
  const Runtime* ffi = attached.load(std::memory_order_acquire);
  if (ffi == nullptr) throw std::runtime_error("libtvm_ffi is not loaded");
  return *ffi;
}

std::string take_error(const Runtime& ffi) {
  void* error = nullptr;
  ffi.take_error(&error);
  if (error == nullptr) return "it failed without a message";
  const Owned owned(any_of(static_cast<Object*>(error)));
  const auto& parts = cell<ErrorCell>(*static_cast<Object*>(error));
  const auto text = [](const Bytes& bytes) { return std::string(bytes.data, bytes.size); };
  return text(parts.kind) + ": " + text(parts.message);
}

Owned call(const Runtime& ffi, Object* function, const Any* arguments, size_t len) {
  Owned result;
  if (ffi.call(function, arguments, static_cast<int32_t>(len), result.room()) != 0)
    throw std::runtime_error(take_error(ffi));
  return result;
}

Owned any_of_text(const Runtime& ffi, const char* text, size_t len) {
  const Bytes bytes{text, len};
  Owned result;
  if (ffi.make_string(&bytes, result.room()) != 0) throw std::runtime_error(take_error(ffi));
  return result;
}

std::string text_of(const Any& any) {
  if (any.type_index == kSmallStr) return std::string(any.text, any.small_len);
  const auto& bytes = cell<Bytes>(*any.object);
  return std::string(bytes.data, bytes.size);
}

namespace {

// A tensor for a function, as DLPack passes it.
struct Allocation {
  DLManagedTensorVersioned managed{};
  at::Tensor tensor;
};

thread_local Allocations* allocations = nullptr;

at::Tensor empty_like(const DLTensor& prototype) {
  const at::IntArrayRef sizes(prototype.shape, static_cast<size_t>(prototype.ndim));
  const auto device = at::dlDeviceToTorchDevice(
      prototype.device.device_type, static_cast<c10::DeviceIndex>(prototype.device.device_id));
  return at::empty(sizes, at::device(device).dtype(at::toScalarType(prototype.dtype)));
}

}  // namespace

Allocations::Allocations() : outer_(std::exchange(allocations, this)) {}

Allocations::~Allocations() { allocations = outer_; }

int allocate(DLTensor* prototype, DLManagedTensorVersioned** result, void* context,
             void (*fail)(void*, const char*, const char*)) noexcept {
  const Message message = guard([&] {
    auto made = std::make_unique<Allocation>();
    const at::Tensor& tensor = made->tensor = empty_like(*prototype);
    made->managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    made->managed.manager_ctx = made.get();
    made->managed.deleter = [](DLManagedTensorVersioned* managed) {
      delete static_cast<Allocation*>(managed->manager_ctx);
    };
    made->managed.dl_tensor = *prototype;
    made->managed.dl_tensor.data = tensor.mutable_data_ptr();
    made->managed.dl_tensor.byte_offset = 0;
    made->managed.dl_tensor.shape = const_cast<int64_t*>(tensor.sizes().data());
    made->managed.dl_tensor.strides = const_cast<int64_t*>(tensor.strides().data());
    if (allocations != nullptr) allocations->note(tensor);
    *result = &made.release()->managed;
  });
  if (message == nullptr) return 0;
  fail(context, "RuntimeError", message);
  tch_extension_free_message(message);
  return -1;
}

}  // namespace tch_extension::tvm_ffi

using namespace tch_extension;
using namespace tch_extension::tvm_ffi;

// If libtvm_ffi's symbols are global in this process, attaches to it and writes its version, three
// numbers. Otherwise writes the path of the copy that is loaded without being global, or nothing.
// The caller frees the path like a message.
TCH_EXTENSION_API Message tch_extension_tvm_ffi_attach(uint32_t* version, char** path) {
  return guard([&] {
    static std::mutex mutex;
    const std::lock_guard alone(mutex);
    void* get_version = dlsym(RTLD_DEFAULT, "TVMFFIGetVersion");
    if (get_version == nullptr) {
      std::string found;
      if (dl_iterate_phdr(note_copy, &found) != 0) *path = strdup(found.c_str());
      return;
    }
    reinterpret_cast<void (*)(uint32_t*)>(get_version)(version);
    // Another minor version may have another ABI. Rust reports it.
    if (version[0] != 0 || version[1] != 1) return;
    if (attached.load(std::memory_order_relaxed) == nullptr)
      attached.store(attach(), std::memory_order_release);
  });
}

// libtvm_ffi replaces the handler of SIGSEGV, and Rust's says when a stack has overflown. The
// caller gives what this returns to tch_extension_tvm_ffi_restore_handler.
TCH_EXTENSION_API void* tch_extension_tvm_ffi_keep_handler() {
  auto* handler = new (std::nothrow) struct sigaction;
  if (handler != nullptr) sigaction(SIGSEGV, nullptr, handler);
  return handler;
}

TCH_EXTENSION_API void tch_extension_tvm_ffi_restore_handler(void* handler) {
  if (handler == nullptr) return;
  sigaction(SIGSEGV, static_cast<struct sigaction*>(handler), nullptr);
  delete static_cast<struct sigaction*>(handler);
}

// Makes a module of a library that is loaded. `names`: the functions that it exports, one per line;
// the caller frees it like a message. The module is never freed, because tensors and functions of
// it may outlive every handle.
TCH_EXTENSION_API Message tch_extension_tvm_ffi_load(const char* path, void** module,
                                                     char** names) {
  return guard([&] {
    const Loaded library(path);
    const std::string functions = exported(library.get());
    if (functions.empty() && dlsym(library.get(), "__tvm_ffi__library_bin") == nullptr)
      throw std::runtime_error("it is no module of TVM FFI: it exports no symbol `__tvm_ffi_…`");
    const Runtime& ffi = runtime();
    const Owned text = any_of_text(ffi, path, std::strlen(path));
    Owned loaded = call(ffi, ffi.load_module, &text.get(), 1);
    if (loaded.get().type_index != kModule) throw std::runtime_error("it is no module");
    *names = strdup(functions.c_str());
    *module = loaded.release();
  });
}

namespace {

// Asks for something that a module has under this name.
Owned ask(Object* question, void* module, const char* name, size_t len) {
  const Runtime& ffi = runtime();
  const Owned text = any_of_text(ffi, name, len);
  Any everywhere = any_of(int64_t{1});
  everywhere.type_index = kBool;
  const Any arguments[] = {any_of(static_cast<Object*>(module)), text.get(), everywhere};
  return call(ffi, question, arguments, 3);
}

}  // namespace

// `function` stays null if there is none. The caller frees it.
TCH_EXTENSION_API Message tch_extension_tvm_ffi_function(void* module, const char* name, size_t len,
                                                         void** function) {
  return guard([&] {
    Owned found = ask(runtime().get_function, module, name, len);
    if (found.get().type_index == kFunction) *function = found.release();
  });
}

TCH_EXTENSION_API void tch_extension_tvm_ffi_free(void* object) { runtime().dec_ref(object); }

// `text` stays null if there is none. The caller frees it like a message.
TCH_EXTENSION_API Message tch_extension_tvm_ffi_metadata(void* module, const char* name, size_t len,
                                                         char** text) {
  return guard([&] {
    const Owned found = ask(runtime().get_metadata, module, name, len);
    const int32_t type = found.get().type_index;
    if (type == kStr || type == kSmallStr) *text = strdup(text_of(found.get()).c_str());
  });
}
