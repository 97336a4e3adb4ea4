// Calls functions of TVM FFI with libtorch's tensors.

#include <ATen/DLConvertor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>
#ifdef TCH_EXTENSION_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <limits>
#include <memory>

#include "../autograd/levels.h"
#include "../autograd/stand_ins.h"
#include "../ffi.h"
#include "../library/value.h"
#include "../tensor/touched.h"
#include "runtime.h"
#include "tch_extension/c_abi.h"

namespace tch_extension {

// What is wrong with a call. Rust makes the message from it.
struct TvmFfiCallError {
  // 0: an error of the function itself; 1: a wrong argument; 2: an input has a gradient to pass on;
  // 3: whether memory overlaps takes a closer look.
  int32_t kind;
  int32_t argument;
};

namespace tvm_ffi {
namespace {

// An object of TVM FFI for a tensor, which a function may keep, as it may keep those that Python
// passes. Nothing that a function sees changes after the object is made.
struct TensorObject {
  Object head{};
  DLTensor view{};
  static constexpr size_t kDims = 8;
  int64_t sizes_and_strides[2 * kDims];
  std::unique_ptr<int64_t[]> many;  // in their place, for more dimensions
  // Holds the memory if the function keeps the object.
  c10::Storage storage;
};

thread_local bool pool_is_closed = false;

// Objects that this thread uses again: a call needs one for each tensor, and to allocate them would
// take much of its time.
class Pool {
 public:
  ~Pool() {
    pool_is_closed = true;
    while (len_ > 0) delete objects_[--len_];
  }
  TensorObject* take() { return len_ > 0 ? objects_[--len_] : new TensorObject; }
  bool put(TensorObject* object) {
    if (len_ == kMost) return false;
    objects_[len_++] = object;
    return true;
  }

 private:
  static constexpr size_t kMost = 16;
  TensorObject* objects_[kMost];
  size_t len_ = 0;
};

thread_local Pool pool;

TensorObject* new_object() { return pool_is_closed ? new TensorObject : pool.take(); }

void delete_tensor(void* self, int flags) {
  auto* object = static_cast<TensorObject*>(self);
  if ((flags & kDeleterStrong) != 0) {
    object->storage = c10::Storage();
    object->many.reset();
  }
  if ((flags & kDeleterWeak) == 0) return;
  if (pool_is_closed || !pool.put(object)) delete object;
}

struct Delete {
  void operator()(TensorObject* object) const {
    delete_tensor(object, kDeleterStrong | kDeleterWeak);
  }
};

DLDevice dl_device_of(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return {kDLCPU, 0};
  if (tensor.is_cuda()) return {kDLCUDA, static_cast<int32_t>(tensor.get_device())};
  return at::torchDeviceToDLDevice(tensor.device());
}

// Dispatch keys of tensors that are not strided, or whose memory does not hold their values.
constexpr auto kUnusual =
    kStandIns | c10::sparse_ks | c10::sparse_csr_ks |
    c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                         c10::DispatchKey::ZeroTensor, c10::DispatchKey::NestedTensor,
                         c10::DispatchKey::MkldnnCPU});

void check_memory(const at::Tensor& tensor) {
  if (!tensor.defined()) throw WrongValue("an undefined tensor");
  if (!tensor.key_set().has_any(kUnusual) && tensor.has_storage()) return;
  if (is_stand_in(tensor)) throw WrongValue("a tensor that stands for others, which has no memory");
  if (tensor.is_conj()) throw WrongValue("a lazily conjugated tensor; call resolve_conj()");
  if (tensor.is_neg()) throw WrongValue("a lazily negated tensor; call resolve_neg()");
  if (tensor._is_zerotensor()) throw WrongValue("a tensor of zeros without memory; copy it");
  throw WrongValue("a tensor that is not dense");
}

// Copies the tensor's sizes and strides. A dimension of one element or none gets the stride 1, as
// in torch's own DLPack, because kernels compare strides with 1.
void view_sizes(TensorObject& object, const at::Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t* place = object.sizes_and_strides;
  if (sizes.size() > TensorObject::kDims) {
    object.many = std::make_unique<int64_t[]>(2 * sizes.size());
    place = object.many.get();
  }
  object.view.ndim = static_cast<int32_t>(sizes.size());
  object.view.shape = place;
  object.view.strides = place + sizes.size();
  for (size_t i = 0; i < sizes.size(); ++i) {
    object.view.shape[i] = sizes[i];
    object.view.strides[i] = sizes[i] > 1 ? strides[i] : 1;
  }
}

DLDataType dtype_of(at::ScalarType kind) {
  switch (kind) {
    case at::kFloat:
      return {kDLFloat, 32, 1};
    case at::kHalf:
      return {kDLFloat, 16, 1};
    case at::kBFloat16:
      return {kDLBfloat, 16, 1};
    case at::kDouble:
      return {kDLFloat, 64, 1};
    case at::kLong:
      return {kDLInt, 64, 1};
    case at::kInt:
      return {kDLInt, 32, 1};
    case at::kByte:
      return {kDLUInt, 8, 1};
    case at::kBool:
      return {kDLBool, 8, 1};
    default:
      return at::getDLDataType(at::empty({0}, kind));
  }
}

TensorObject* object_of(const at::Tensor& tensor) {
  check_memory(tensor);
  touch(tensor);
  std::unique_ptr<TensorObject, Delete> object(new_object());
  object->head.counts.store(kOneReference, std::memory_order_relaxed);
  object->head.type_index = kTensor;
  object->head.deleter = delete_tensor;
  try {
    object->view.dtype = dtype_of(tensor.scalar_type());
    object->view.device = dl_device_of(tensor);
  } catch (const c10::Error& error) {
    throw WrongValue(std::string("a tensor that DLPack lacks: ") + error.what_without_backtrace());
  }
  // A function may write to any tensor, so it gets memory that no lazy copy shares.
  object->view.data = tensor.mutable_data_ptr();
  view_sizes(*object, tensor);
  return object.release();
}

// The memory from a tensor's first byte to its last.
struct Range {
  explicit Range(const DLTensor& view) : begin(static_cast<const char*>(view.data)), end(begin) {
    int64_t last = 0;
    for (int32_t i = 0; i < view.ndim; ++i) {
      if (view.shape[i] == 0) return;
      last += (view.shape[i] - 1) * view.strides[i];
    }
    // A kind may have less than a byte; a partial byte counts as a whole one.
    const int64_t bits = int64_t{view.dtype.bits} * view.dtype.lanes;
    end += ((last + 1) * bits + 7) / 8;
  }
  bool meets(const Range& other) const { return begin < other.end && other.begin < end; }

  const char *begin, *end;
};

// The arguments of a call.
class Arguments {
 public:
  explicit Arguments(const Runtime& ffi) : ffi_(ffi) {}
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;
  ~Arguments() {
    // They refer to the tensors.
    owned_.clear();
    for (const Given& given : tensors_) release(given);
  }

  void add(const Value& value) { anys_.push_back(convert(value)); }

  const Any* data() const { return anys_.data(); }
  size_t len() const { return anys_.size(); }

  struct Given {
    const at::Tensor& tensor;
    TensorObject* object;
    bool is_written;
  };

  const c10::SmallVectorImpl<Given>& tensors() const { return tensors_; }

  // The device whose stream counts: of the first tensor on a GPU, or else of the first argument
  // that is a GPU.
  int32_t gpu() const {
    for (const Given& given : tensors_) {
      if (given.object->view.device.device_type == kDLCUDA)
        return given.object->view.device.device_id;
    }
    for (const Any& any : anys_) {
      if (any.type_index == kDevice && any.device.device_type == kDLCUDA)
        return any.device.device_id;
    }
    return -1;
  }

  // The tensor whose object this is.
  const at::Tensor* find(const Object* object) const {
    for (const Given& given : tensors_) {
      if (&given.object->head == object) return &given.tensor;
    }
    return nullptr;
  }

 private:
  // Most objects have no other reference, and then need no call. One that the function keeps also
  // keeps its memory, which a tensor must not move when it is resized.
  void release(const Given& given) {
    TensorObject* object = given.object;
    if (object->head.counts.load(std::memory_order_acquire) == kOneReference) {
      Delete()(object);
      return;
    }
    object->storage = given.tensor.storage();
    object->storage.unsafeGetStorageImpl()->set_resizable(false);
    ffi_.dec_ref(object);
  }

  Any convert(const Value& value) {
    Any any;
    switch (value.tag) {
      case Tag::kDefault:
      case Tag::kNone:
        return any;
      case Tag::kTensor:
      case Tag::kWritten:
        return tensor(*static_cast<const at::Tensor*>(value.data), value.tag == Tag::kWritten);
      case Tag::kInt:
        return any_of(value.integer);
      case Tag::kBool:
        any.type_index = kBool;
        any.integer = value.integer;
        return any;
      case Tag::kFloat:
        any.type_index = kFloat;
        any.real = value.real;
        return any;
      case Tag::kString:
        return keep(any_of_text(ffi_, static_cast<const char*>(value.data), value.len));
      case Tag::kDevice:
        if (value.integer > std::numeric_limits<c10::DeviceIndex>::max())
          throw WrongValue("a Device of too high an index");
        any.type_index = kDevice;
        any.device = at::torchDeviceToDLDevice(
            c10::Device(static_cast<c10::DeviceType>(value.len),
                        static_cast<c10::DeviceIndex>(std::max<int64_t>(value.integer, 0))));
        return any;
      case Tag::kScalarType:
        any.type_index = kDataType;
        any.dtype = dtype_of(static_cast<at::ScalarType>(value.integer));
        return any;
      case Tag::kList:
      case Tag::kInts:
      case Tag::kFloats:
        return list(value);
      default:
        throw WrongValue(describe(value) + ", which TVM FFI lacks");
    }
  }

  Any tensor(const at::Tensor& tensor, bool is_written) {
    tensors_.push_back({tensor, object_of(tensor), is_written});
    return any_of(&tensors_.back().object->head);
  }

  Any list(const Value& value) {
    c10::SmallVector<Any, 8> items;
    for (size_t i = 0; i < value.len; ++i) items.push_back(convert(element(value, i)));
    return keep(call(ffi_, ffi_.make_array, items.data(), items.size()));
  }

  // The value lives as long as the arguments do.
  Any keep(Owned&& owned) {
    owned_.push_back(std::move(owned));
    return owned_.back().get();
  }

  const Runtime& ffi_;
  c10::SmallVector<Any, 8> anys_;
  c10::SmallVector<Given, 4> tensors_;
  std::vector<Owned> owned_;
};

// Whether memory that is written may be memory of another argument, or has elements that share it.
bool may_overlap(const c10::SmallVectorImpl<Arguments::Given>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].is_written) continue;
    const at::Tensor& written = tensors[i].tensor;
    if (!written.is_contiguous() && at::has_internal_overlap(written) != at::MemOverlap::No)
      return true;
    const Range range(tensors[i].object->view);
    for (size_t j = 0; j < tensors.size(); ++j) {
      if (j != i && range.meets(Range(tensors[j].object->view))) return true;
    }
  }
  return false;
}

// Whether a tensor has a gradient that the call would lose, of either mode.
bool needs_gradient(const Arguments& arguments) {
  for (const auto& given : arguments.tensors()) {
    const at::Tensor& tensor = given.tensor;
    if (tensor.unsafeGetTensorImpl()->autograd_meta() == nullptr) continue;
    if (tensor.requires_grad() && records_graph()) return true;
    if (tensor._fw_grad(/*level=*/0).defined()) return true;  // libtorch has one level only
  }
  return false;
}

// While it lives, functions see libtorch's current stream and device, and its allocator.
class Environment {
 public:
  Environment(const Runtime& ffi, int32_t gpu) : ffi_(ffi), gpu_(gpu) {
    // What may fail comes first.
    if (gpu_ >= 0) enter();
    if (ffi_.allocator() != allocate)
      is_allocator_set_ = ffi_.set_allocator(allocate, 0, &allocator_) == 0;
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  ~Environment() {
    if (is_allocator_set_) ffi_.set_allocator(allocator_, 0, nullptr);
    if (gpu_ >= 0) leave();
  }

 private:
#ifdef TCH_EXTENSION_CUDA
  void enter() {
    const auto index = static_cast<c10::DeviceIndex>(gpu_);
    if (index >= c10::cuda::device_count())
      throw std::runtime_error("there is no CUDA device " + std::to_string(gpu_));
    auto* stream = c10::cuda::getCurrentCUDAStream(index).stream();
    if (ffi_.set_stream(kDLCUDA, gpu_, stream, &stream_) != 0)
      throw std::runtime_error(take_error(ffi_));
    device_ = c10::cuda::ExchangeDevice(index);
  }
  void leave() {
    ffi_.set_stream(kDLCUDA, gpu_, stream_, nullptr);
    try {
      c10::cuda::MaybeExchangeDevice(device_);
    } catch (const std::exception&) {
      // The next call to CUDA reports the error again.
    }
  }
  c10::DeviceIndex device_ = -1;
  void* stream_ = nullptr;
#else
  void enter() { throw std::runtime_error("an argument is for a GPU, and this build has no CUDA"); }
  void leave() {}
#endif

  const Runtime& ffi_;
  int32_t gpu_;
  bool is_allocator_set_ = false;
  Allocator allocator_ = nullptr;
};

// Tells autograd that the values have changed, whether the function succeeds or not.
class Written {
 public:
  explicit Written(const Arguments& arguments) : arguments_(arguments) {}
  Written(const Written&) = delete;
  Written& operator=(const Written&) = delete;
  ~Written() {
    for (const auto& given : arguments_.tensors()) {
      const at::Tensor& tensor = given.tensor;
      if (given.is_written && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }

 private:
  const Arguments& arguments_;
};

constexpr int kDeepest = 64;

class Returned {
 public:
  Returned(const Runtime& ffi, const Arguments& arguments, const Allocations& allocations)
      : ffi_(ffi), arguments_(arguments), allocations_(allocations) {}

  at::Tensor tensor(const Any& any) const {
    const at::Tensor* given = arguments_.find(any.object);
    if (given != nullptr) return *given;
    // Another reference would keep the memory, and a tensor of libtorch's may be resized.
    const bool is_last = any.object->counts.load(std::memory_order_acquire) == kOneReference;
    at::Tensor made = allocations_.find(cell<DLTensor>(*any.object));
    if (is_last && made.defined()) return made;
    DLManagedTensorVersioned* managed = nullptr;
    if (ffi_.to_dlpack(any.object, &managed) != 0) throw std::runtime_error(take_error(ffi_));
    try {
      return at::fromDLPackVersioned(managed);
    } catch (...) {
      managed->deleter(managed);
      throw;
    }
  }

  c10::IValue convert(const Any& any, int depth = 0) const {
    switch (any.type_index) {
      case kNone:
        return c10::IValue();
      case kInt:
        return any.integer;
      case kBool:
        return any.integer != 0;
      case kFloat:
        return any.real;
      case kDataType:
        // Read as a Kind; see `type_of`.
        return static_cast<int64_t>(at::toScalarType(any.dtype));
      case kDevice:
        return at::dlDeviceToTorchDevice(any.device.device_type,
                                         static_cast<c10::DeviceIndex>(any.device.device_id));
      case kSmallStr:
      case kStr:
        return text_of(any);
      case kTensor:
        return tensor(any);
      case kShape: {
        const auto& shape = cell<ShapeCell>(*any.object);
        c10::impl::GenericList list(c10::AnyType::get());
        for (size_t i = 0; i < shape.size; ++i) list.push_back(shape.data[i]);
        return list;
      }
      case kArray:
        return list(any, ffi_.array_size, ffi_.array_item, depth);
      case kList:
        // Old versions have no lists.
        if (ffi_.list_size != nullptr) return list(any, ffi_.list_size, ffi_.list_item, depth);
        [[fallthrough]];
      default:
        throw std::runtime_error("it returned a value of TVM FFI's type number " +
                                 std::to_string(any.type_index) + ", which cannot be read in Rust");
    }
  }

 private:
  c10::IValue list(const Any& any, Object* size, Object* item, int depth) const {
    if (depth == kDeepest) throw std::runtime_error("it returned lists that are nested too deeply");
    const int64_t len = call(ffi_, size, &any, 1).get().integer;
    c10::impl::GenericList list(c10::AnyType::get());
    for (int64_t i = 0; i < len; ++i) {
      const Any arguments[] = {any, any_of(i)};
      list.push_back(convert(call(ffi_, item, arguments, 2).get(), depth + 1));
    }
    return list;
  }

  const Runtime& ffi_;
  const Arguments& arguments_;
  const Allocations& allocations_;
};

c10::TypePtr type_of(const Any& any) {
  if (any.type_index == kDataType) return c10::ScalarTypeType::get();
  return c10::AnyType::get();
}

}  // namespace
}  // namespace tvm_ffi
}  // namespace tch_extension

using namespace tch_extension;
using namespace tch_extension::tvm_ffi;

// Calls a function. With `without_grad`, tensors that require grad are constants. With
// `is_disjoint`, the caller has checked that the outputs overlap neither each other nor an input.
// The caller owns what the function returned: nothing, a tensor, or other results.
TCH_EXTENSION_API Message tch_extension_tvm_ffi_call(void* function, const Value* values,
                                                     size_t len, bool without_grad,
                                                     bool is_disjoint, at::Tensor** tensor,
                                                     Results** results, TvmFfiCallError* error) {
  *error = {0, -1};
  return guard([&] {
    const Runtime& ffi = runtime();
    Arguments arguments(ffi);
    for (size_t i = 0; i < len; ++i) {
      *error = {1, static_cast<int32_t>(i)};
      arguments.add(values[i]);
    }
    *error = {0, -1};
    if (!without_grad && needs_gradient(arguments)) {
      error->kind = 2;
      throw std::runtime_error("an input requires grad");
    }
    if (!is_disjoint && tvm_ffi::may_overlap(arguments.tensors())) {
      error->kind = 3;
      throw std::runtime_error("memory may overlap");
    }
    const Allocations allocations;
    Owned owned;
    {
      const Environment environment(ffi, arguments.gpu());
      const Written written(arguments);
      owned = call(ffi, static_cast<Object*>(function), arguments.data(), arguments.len());
    }
    const Any& any = owned.get();
    const Returned returned(ffi, arguments, allocations);
    if (any.type_index == kNone) return;
    if (any.type_index == kTensor) {
      *tensor = new at::Tensor(returned.tensor(any));
      return;
    }
    auto made = std::make_unique<Results>();
    made->stack.push_back(returned.convert(any));
    made->values.push_back(from_ivalue(made->stack[0], *type_of(any), made->lists));
    *results = made.release();
  });
}
