// Arguments of a Triton kernel's call, and the key under which the compiled kernel is kept. See
// csrc/python/launcher.cpp.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstring>
#include <string_view>

#include "csrc/ops/autograd.h"

namespace fusedops::launcher {

// One argument, read once for both the key and the launch.
struct Value {
  char type;  // a Python type: N(one) b(ool) i(nt) U (an int above int64) f(loat) s(tr) t(ensor)
  union {
    uint64_t bits;  // of a bool, an int or a float; a tensor's address; a string's length
    double real;
  };
  union {
    const Tensor* tensor;
    const char* text;
  };
};

// Reads None, and exactly these types. False for everything else, which only Triton handles.
inline bool read(PyObject* object, Value& to) {
  to.bits = 0;
  if (THPVariable_CheckExact(object)) {
    to.type = 't';
    to.tensor = &THPVariable_Unpack(object);
  } else if (PyLong_CheckExact(object)) {
    int overflow = 0;
    to.type = 'i';
    to.bits = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) {
      to.type = 'U';
      to.bits = PyLong_AsUnsignedLongLong(object);
      if (PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        return false;
      }
    }
  } else if (object == Py_None) {
    to.type = 'N';
  } else if (PyBool_Check(object)) {
    to.type = 'b';
    to.bits = object == Py_True;
  } else if (PyFloat_CheckExact(object)) {
    to.type = 'f';
    to.real = PyFloat_AS_DOUBLE(object);
  } else if (PyUnicode_CheckExact(object)) {
    Py_ssize_t size = 0;
    to.type = 's';
    to.text = PyUnicode_AsUTF8AndSize(object, &size);
    to.bits = size;
    if (to.text == nullptr) {
      PyErr_Clear();
      return false;
    }
  } else {
    return false;
  }
  return true;
}

// A sequence of fields. The start of a field says how long the field is.
class Key {
 public:
  // The whole value, for constexprs, options and knobs. Tensors have none.
  bool add_constant(const Value& value) {
    const size_t text = value.type == 's' ? value.bits : 0;
    if (value.type == 't' || value.type == 'U' || bytes_.size() - size_ < 9 + text) return false;
    bytes_[size_] = value.type;
    std::memcpy(&bytes_[size_ + 1], &value.bits, 8);
    if (text != 0) std::memcpy(&bytes_[size_ + 9], value.text, text);
    size_ += 9 + text;
    return true;
  }

  // What Triton's compiler learns of an argument. specialized: also of an integer's value or a
  // tensor's address; aligned: also whether 16 divides it.
  bool add_argument(const Value& value, bool specialized, bool aligned) {
    if (value.type == 's' || bytes_.size() - size_ < 5) return false;
    char* const to = &bytes_[size_];
    to[0] = value.type;
    to[1] = specialized && aligned && value.bits % 16 == 0 ? 'D' : '-';
    size_ += 2;
    if (value.type == 'i') {
      const auto number = static_cast<int64_t>(value.bits);
      const bool narrow = number == static_cast<int32_t>(number);
      to[2] = specialized && number == 1 ? '1' : narrow ? 'n' : 'w';
      size_ += 1;
    } else if (value.type == 't') {
      to[2] = static_cast<char>(value.tensor->scalar_type());
      to[3] = static_cast<char>(value.tensor->device().type());
      to[4] = static_cast<char>(value.tensor->device().index());
      size_ += 3;
    } else if (value.type != 'U') {
      to[1] = '-';  // Triton specializes no other values
    }
    return true;
  }

  std::string_view bytes() const { return {bytes_.data(), size_}; }

 private:
  std::array<char, 2048> bytes_;
  size_t size_ = 0;
};

}  // namespace fusedops::launcher
