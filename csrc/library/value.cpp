#include "value.h"

#include <ATen/core/List.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <string_view>

namespace tch_extension {
namespace {

using c10::IValue;
using c10::TypeKind;
using c10::TypePtr;

// Quotes a text on one line for a message. A long text is cut.
std::string describe_text(std::string_view whole) {
  constexpr size_t kLongest = 60;
  size_t len = std::min(whole.size(), kLongest);
  // Do not cut in the middle of a UTF-8 character.
  while (len < whole.size() && len > 0 && (whole[len] & 0xC0) == 0x80) --len;
  std::string text(whole.substr(0, len));
  std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, ' ');
  return "the str '" + text + (len < whole.size() ? "…'" : "'");
}

[[noreturn]] void refuse(const Value& value) { throw WrongValue(describe(value)); }

bool is_list(const Value& value) {
  return value.tag == Tag::kList || value.tag == Tag::kInts || value.tag == Tag::kFloats;
}

IValue to_list(const Value& value, const TypePtr& type, const TypePtr& real, int32_t broadcast) {
  const auto& element_type = type->castRaw<c10::ListType>()->getElementType();
  const auto& real_element_type = real->castRaw<c10::ListType>()->getElementType();
  if (value.tag == Tag::kInts && element_type->kind() == TypeKind::IntType) {
    const auto* data = static_cast<const int64_t*>(value.data);
    return IValue(at::IntArrayRef(data, value.len));
  }
  if (real_element_type->kind() == TypeKind::SymIntType && value.tag == Tag::kList) {
    std::vector<c10::SymInt> items;
    items.reserve(value.len);
    for (size_t i = 0; i < value.len; ++i) {
      const Value item = element(value, i);
      if (item.tag != Tag::kInt && item.tag != Tag::kSymInt)
        throw WrongValue("a list whose item " + std::to_string(i) + " is " + describe(item));
      items.push_back(to_sym_int(item));
    }
    return IValue(at::ArrayRef<c10::SymInt>(items));
  }
  c10::impl::GenericList list(element_type);
  if (!is_list(value)) {
    if (broadcast <= 0) refuse(value);
    const IValue single = to_ivalue(value, element_type, real_element_type, 0);
    for (int32_t i = 0; i < broadcast; ++i) list.push_back(single);
    return list;
  }
  list.reserve(value.len);
  for (size_t i = 0; i < value.len; ++i) {
    const Value item = element(value, i);
    try {
      list.push_back(to_ivalue(item, element_type, real_element_type, 0));
    } catch (const WrongValue& wrong) {
      throw WrongValue("a list whose item " + std::to_string(i) + " is " + wrong.what());
    }
  }
  return list;
}

// libtorch's enums are ints to the dispatcher.
IValue enumerator(const Value& value, Tag tag) {
  if (value.tag != tag) refuse(value);
  return value.integer;
}

IValue to_number(const Value& value) {
  switch (value.tag) {
    case Tag::kInt:
      return value.integer;
    case Tag::kFloat:
      return value.real;
    case Tag::kBool:
      return value.integer != 0;
    default:
      refuse(value);
  }
}

}  // namespace

std::string describe(const Value& value) {
  std::ostringstream text;
  switch (value.tag) {
    case Tag::kDefault:
    case Tag::kNone:
      return "None";
    case Tag::kTensor:
      return "a Tensor";
    case Tag::kWritten:
      return "a Tensor to write to";
    case Tag::kInt:
      text << "the int " << value.integer;
      break;
    case Tag::kFloat:
      text << "the float " << value.real;
      break;
    case Tag::kBool:
      return value.integer != 0 ? "the bool true" : "the bool false";
    case Tag::kString:
      return describe_text({static_cast<const char*>(value.data), value.len});
    case Tag::kDevice:
      return "a Device";
    case Tag::kScalarType:
      return "a Kind";
    case Tag::kLayout:
      return "a Layout";
    case Tag::kMemoryFormat:
      return "a MemoryFormat";
    case Tag::kList:
      text << "a list of " << value.len;
      if (value.len != 0)
        text << ", the first of which is " << describe(*static_cast<const Value*>(value.data));
      break;
    case Tag::kInts:
      text << "a list of " << value.len << " ints";
      break;
    case Tag::kFloats:
      text << "a list of " << value.len << " floats";
      break;
    case Tag::kSymInt:
      return "a SymInt";
    case Tag::kIValues:
      return "a list";
  }
  return text.str();
}

Value element(const Value& value, size_t index) {
  Value result{};
  switch (value.tag) {
    case Tag::kList:
      return static_cast<const Value*>(value.data)[index];
    case Tag::kInts:
      result.tag = Tag::kInt;
      result.integer = static_cast<const int64_t*>(value.data)[index];
      return result;
    case Tag::kFloats:
      result.tag = Tag::kFloat;
      result.real = static_cast<const double*>(value.data)[index];
      return result;
    default:
      refuse(value);
  }
}

IValue to_ivalue(const Value& value, const TypePtr& type, const TypePtr& real, int32_t broadcast) {
  switch (real->kind()) {
    case TypeKind::TensorType:
      if (value.tag != Tag::kTensor) refuse(value);
      return *static_cast<const at::Tensor*>(value.data);
    case TypeKind::OptionalType:
      if (value.tag == Tag::kNone) return IValue();
      return to_ivalue(value, type->castRaw<c10::OptionalType>()->getElementType(),
                       real->castRaw<c10::OptionalType>()->getElementType(), broadcast);
    case TypeKind::ListType:
      return to_list(value, type, real, broadcast);
    case TypeKind::IntType:
      if (value.tag == Tag::kSymInt) return to_sym_int(value).guard_int(__FILE__, __LINE__);
      if (value.tag != Tag::kInt) refuse(value);
      return value.integer;
    case TypeKind::SymIntType:
      if (value.tag == Tag::kSymInt) return to_sym_int(value);
      if (value.tag != Tag::kInt) refuse(value);
      return value.integer;
    case TypeKind::FloatType:
    case TypeKind::SymFloatType:
      if (value.tag == Tag::kInt) return static_cast<double>(value.integer);
      if (value.tag != Tag::kFloat) refuse(value);
      return value.real;
    case TypeKind::BoolType:
    case TypeKind::SymBoolType:
      if (value.tag != Tag::kBool) refuse(value);
      return value.integer != 0;
    case TypeKind::NumberType:
      return to_number(value);
    case TypeKind::StringType:
      if (value.tag != Tag::kString) refuse(value);
      return std::string(static_cast<const char*>(value.data), value.len);
    case TypeKind::DeviceObjType:
      if (value.tag != Tag::kDevice) refuse(value);
      if (value.integer > std::numeric_limits<c10::DeviceIndex>::max())
        throw WrongValue("a Device of too high an index");
      return c10::Device(static_cast<c10::DeviceType>(value.len),
                         static_cast<c10::DeviceIndex>(value.integer));
    case TypeKind::ScalarTypeType:
      return enumerator(value, Tag::kScalarType);
    case TypeKind::LayoutType:
      return enumerator(value, Tag::kLayout);
    case TypeKind::MemoryFormatType:
      return enumerator(value, Tag::kMemoryFormat);
    default:
      throw WrongValue(describe(value) + ", but values of this type cannot be made in Rust");
  }
}

c10::SymInt to_sym_int(const Value& value) {
  if (value.tag == Tag::kInt) return value.integer;
  auto* node = static_cast<c10::SymNodeImpl*>(const_cast<void*>(value.data));
  return c10::SymInt(c10::SymNode::reclaim_copy(node));
}

Value view(const IValue& ivalue) noexcept {
  Value value{};
  if (ivalue.isTensor()) {
    const at::Tensor& tensor = ivalue.toTensor();
    value.tag = tensor.defined() ? Tag::kTensor : Tag::kNone;
    value.data = &tensor;
  } else if (ivalue.isNone()) {
    value.tag = Tag::kNone;
  } else if (ivalue.isInt()) {
    value.tag = Tag::kInt;
    value.integer = ivalue.toInt();
  } else if (ivalue.isDouble()) {
    value.tag = Tag::kFloat;
    value.real = ivalue.toDouble();
  } else if (ivalue.isBool()) {
    value.tag = Tag::kBool;
    value.integer = ivalue.toBool() ? 1 : 0;
  } else if (ivalue.isSymInt()) {
    value.tag = Tag::kSymInt;
    // The IValue keeps the node alive.
    value.data = ivalue.toSymInt().toSymNodeImplUnowned();
  } else if (ivalue.isString()) {
    value.tag = Tag::kString;
    value.data = ivalue.toStringRef().data();
    value.len = ivalue.toStringRef().size();
  } else if (ivalue.isDevice()) {
    value.tag = Tag::kDevice;
    value.integer = ivalue.toDevice().index();
    value.len = static_cast<size_t>(ivalue.toDevice().type());
  } else if (ivalue.isList()) {
    const auto items = ivalue.toListRef();
    value.tag = Tag::kIValues;
    value.data = items.data();
    value.len = items.size();
  }
  return value;
}

Value from_ivalue(const IValue& ivalue, const c10::Type& real,
                  std::forward_list<std::vector<Value>>& lists) {
  Value value{};
  if (ivalue.isNone()) {
    value.tag = Tag::kNone;
  } else if (ivalue.isTensor()) {
    const at::Tensor& tensor = ivalue.toTensor();
    value.tag = tensor.defined() ? Tag::kTensor : Tag::kNone;
    value.data = &tensor;
  } else if (real.kind() == TypeKind::OptionalType) {
    return from_ivalue(ivalue, *real.castRaw<c10::OptionalType>()->getElementType(), lists);
  } else if (ivalue.isInt()) {
    const auto kind = real.kind();
    value.tag = kind == TypeKind::ScalarTypeType     ? Tag::kScalarType
                : kind == TypeKind::LayoutType       ? Tag::kLayout
                : kind == TypeKind::MemoryFormatType ? Tag::kMemoryFormat
                                                     : Tag::kInt;
    value.integer = ivalue.toInt();
  } else if (ivalue.isSymInt() || ivalue.isDouble() || ivalue.isBool() || ivalue.isString() ||
             ivalue.isDevice()) {
    return view(ivalue);
  } else if (ivalue.isList() &&
             (real.kind() == TypeKind::ListType || real.kind() == TypeKind::AnyType)) {
    const auto* list = real.castRaw<c10::ListType>();
    const c10::Type& element_type = list == nullptr ? real : *list->getElementType();
    std::vector<Value> items;
    for (const IValue& item : ivalue.toListRef())
      items.push_back(from_ivalue(item, element_type, lists));
    value.tag = Tag::kList;
    value.len = items.size();
    lists.push_front(std::move(items));
    value.data = lists.front().data();
  } else {
    throw std::runtime_error("it returned a value of type " + ivalue.type()->str() +
                             ", which cannot be read in Rust");
  }
  return value;
}

}  // namespace tch_extension
