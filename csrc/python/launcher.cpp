// Launches compiled Triton kernels without Triton's Python code. fusedops/triton/launcher.py has
// the Python side: what may be launched this way, and Triton's own path for everything else.
//
// One launcher serves one kernel. A call's key has everything that Triton's key has: the device,
// the knobs, each argument's type and, where Triton specializes, whether 16 divides it and whether
// it is 1, the values of constexprs, and the options. A call whose key is new goes through Triton,
// whose compiled kernel is kept under the key. A call that is in any way unusual has no key.

#include "csrc/python/launcher.h"

#include <array>
#include <bit>
#include <limits>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/python/exports.h"

namespace fusedops::launcher {
namespace {

// The part of CUDA's driver that a launch needs. CPU builds have no cuda.h.
struct Driver {
  using LaunchKernel = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z,
                               unsigned shared_bytes, void* stream, void** parameters,
                               void** extra);
  LaunchKernel launch_kernel;
  int (*get_context)(void** context);
  int (*get_error_string)(int error, const char** text);
};

struct Hash {
  using is_transparent = void;
  size_t operator()(std::string_view key) const { return std::hash<std::string_view>()(key); }
};

struct Parameter {
  py::object fallback;  // the default; null if there is none
  bool constant, specialized, aligned;
};

// An argument that the compiled kernel takes, in its signature's type: '*' is a pointer, 'i' a
// signed integer, 'u' an unsigned one, 'f' a float.
struct Packed {
  size_t parameter;
  char kind;
  unsigned bits;

  // Writes the argument as Triton does; false if Triton would convert it or raise an error.
  bool pack(const Value& value, uint64_t& to) const {
    const auto number = static_cast<int64_t>(value.bits);
    const unsigned spare = 64 - bits;
    to = value.bits;
    switch (kind) {
      case '*': return value.type == 't';
      case 'i':
        return (value.type == 'i' || value.type == 'b') &&
               static_cast<int64_t>(value.bits << spare) >> spare == number;
      case 'u':
        return (value.type == 'U' || value.type == 'b' || (value.type == 'i' && number >= 0)) &&
               value.bits << spare >> spare == value.bits;
      default:
        if (bits == 32) to = std::bit_cast<uint32_t>(static_cast<float>(value.real));
        return value.type == 'f';
    }
  }
};

// A kernel that Triton compiled and loaded.
struct Variant {
  py::object kernel;  // keeps the module loaded
  Driver driver;
  void* function;
  unsigned threads, shared_bytes;
  std::vector<Packed> packed;
  // Globals that the kernel's source uses: a dict, a name, the value it was compiled with.
  std::vector<std::tuple<py::dict, py::str, py::object>> globals;

  bool current() const {
    for (const auto& [names, name, value] : globals) {
      if (PyDict_GetItemWithError(names.ptr(), name.ptr()) != value.ptr()) return false;
    }
    return true;
  }
};

constexpr size_t kMost = 96;  // arguments of a kernel, and options

struct Call {
  py::object driver, device;  // Triton's driver, and the current device as it numbers them
  std::array<unsigned, 3> grid = {1, 1, 1};
  std::array<Value, kMost> values;  // of the parameters
  Key key;
};

// (object, attribute) pairs whose values decide how Triton launches.
struct Attribute {
  py::object of, name;
  py::object read() const {
    auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(of.ptr(), name.ptr()));
    if (!value) throw py::error_already_set();
    return value;
  }
};

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

class Launcher {
 public:
  using Attributes = std::vector<std::pair<py::object, py::str>>;

  Launcher(const py::list& parameters, const Attributes& knobs, const Attributes& hooks,
           py::object hook_chain, py::object drivers, py::object first, py::object triton)
      : hook_chain_(std::move(hook_chain)),
        drivers_(std::move(drivers)),
        first_(std::move(first)),
        triton_(std::move(triton)) {
    for (const auto item : parameters) {
      const auto [name, constant, specialized, aligned, fallback] =
          item.cast<std::tuple<py::str, bool, bool, bool, py::tuple>>();
      at_[name] = parameters_.size();
      parameters_.push_back({fallback.empty() ? py::object() : py::object(fallback[0]), constant,
                             specialized, aligned});
    }
    for (const auto& [of, name] : knobs) knobs_.push_back({of, intern(name)});
    for (const auto& [of, name] : hooks) hooks_.push_back({of, intern(name)});
    TORCH_CHECK(parameters_.size() <= kMost, "a Triton kernel has more than ", kMost, " arguments");
  }

  // launch(grid, *args, **kwargs); returns Triton's compiled kernel.
  PyObject* launch(PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    Call call;
    if (count < 1 || !read_grid(arguments[0], call.grid) ||
        !read_call(arguments + 1, count - 1, names, call)) {
      return PyObject_Vectorcall(triton_.ptr(), arguments, count, names);
    }
    const auto found = variants_.find(call.key.bytes());
    if (found == variants_.end() || !found->second->current()) {
      return launch_first(call.key.bytes(), arguments, count, names);
    }
    const auto variant = found->second;  // other threads may add variants while this one launches
    std::array<uint64_t, kMost + 2> packed;
    std::array<void*, kMost + 2> pointers;
    size_t n = 0;
    for (const auto& one : variant->packed) {
      if (!one.pack(call.values[one.parameter], packed[n])) {
        return PyObject_Vectorcall(triton_.ptr(), arguments, count, names);
      }
      pointers[n] = &packed[n];
      ++n;
    }
    for (const size_t end = n + 2; n < end; ++n) {  // scratch memory, which no variant has
      packed[n] = 0;
      pointers[n] = &packed[n];
    }
    void* context = nullptr;
    if (variant->driver.get_context(&context) != 0 || context == nullptr) {  // Triton makes one
      return PyObject_Vectorcall(triton_.ptr(), arguments, count, names);
    }
    int status = 0;
    if (call.grid[0] != 0 && call.grid[1] != 0 && call.grid[2] != 0) {
      void* const stream = current_stream(call);
      const py::gil_scoped_release others_go_on;
      status =
          variant->driver.launch_kernel(variant->function, call.grid[0], call.grid[1], call.grid[2],
                                        variant->threads, 1, 1, variant->shared_bytes, stream,
                                        pointers.data(), nullptr);
    }
    if (status != 0) {
      const char* text = nullptr;
      variant->driver.get_error_string(status, &text);
      return PyErr_Format(PyExc_RuntimeError, "fusedops: cuLaunchKernel of %S: %s",
                          py::object(variant->kernel.attr("name")).ptr(),
                          text == nullptr ? "unknown error" : text);
    }
    return Py_NewRef(variant->kernel.ptr());
  }

  // key(*args, **kwargs): the call's key, or None if it has none; for tests.
  PyObject* key(PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    Call call;
    if (!read_call(arguments, count, names, call)) Py_RETURN_NONE;
    const auto bytes = call.key.bytes();
    return PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
  }

 private:
  static py::object intern(const py::str& name) {
    PyObject* text = Py_NewRef(name.ptr());
    PyUnicode_InternInPlace(&text);
    return py::reinterpret_steal<py::object>(text);
  }

  // Whether no launch hook is set. A knob's HookChain is idle while its list is empty.
  bool idle() const {
    static PyObject* const calls = interned("calls");
    for (const auto& attribute : hooks_) {
      auto hook = attribute.read();
      if (hook.is_none()) continue;
      if (reinterpret_cast<PyObject*>(Py_TYPE(hook.ptr())) == hook_chain_.ptr()) {
        hook = py::reinterpret_steal<py::object>(PyObject_GetAttr(hook.ptr(), calls));
      }
      if (!hook || !PyList_CheckExact(hook.ptr()) || PyList_GET_SIZE(hook.ptr()) != 0) {
        PyErr_Clear();
        return false;
      }
    }
    return true;
  }

  void read_device(Call& call) const {
    static PyObject* const active = interned("active");
    static PyObject* const get_device = interned("get_current_device");
    call.driver = py::reinterpret_steal<py::object>(PyObject_GetAttr(drivers_.ptr(), active));
    if (!call.driver) throw py::error_already_set();
    call.device =
        py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(call.driver.ptr(), get_device));
    if (!call.device) throw py::error_already_set();
  }

  static void* current_stream(const Call& call) {
    static PyObject* const get_stream = interned("get_current_stream");
    const auto stream = py::reinterpret_steal<py::object>(
        PyObject_CallMethodOneArg(call.driver.ptr(), get_stream, call.device.ptr()));
    void* const handle = stream ? PyLong_AsVoidPtr(stream.ptr()) : nullptr;
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return handle;
  }

  static bool read_grid(PyObject* grid, std::array<unsigned, 3>& to) {
    if (!PyTuple_CheckExact(grid) || PyTuple_GET_SIZE(grid) < 1 || PyTuple_GET_SIZE(grid) > 3) {
      return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(grid); ++i) {
      Value size;
      if (!read(PyTuple_GET_ITEM(grid, i), size) || size.type != 'i' ||
          size.bits > std::numeric_limits<int32_t>::max()) {
        return false;
      }
      to[i] = static_cast<unsigned>(size.bits);
    }
    return true;
  }

  // Fills the call. False if Triton must handle it.
  bool read_call(PyObject* const* arguments, Py_ssize_t count, PyObject* names, Call& call) {
    const size_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    if (static_cast<size_t>(count) > parameters_.size() || named > kMost || !idle()) return false;
    Value value;
    read_device(call);
    if (!read(call.device.ptr(), value) || !call.key.add_constant(value)) return false;
    for (const auto& knob : knobs_) {
      const auto object = knob.read();
      if (!read(object.ptr(), value) || !call.key.add_constant(value)) return false;
    }
    // No Python code runs from here on: other threads leave places_ as it is.
    if (!find_places(names, named)) return false;
    std::array<PyObject*, kMost> objects;
    std::fill_n(objects.begin(), parameters_.size(), nullptr);
    std::copy_n(arguments, count, objects.begin());
    for (size_t i = 0; i < named; ++i) {
      if (places_[i].parameter == kMost) continue;
      auto& object = objects[places_[i].parameter];
      if (object != nullptr) return false;
      object = arguments[count + i];
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto& parameter = parameters_[i];
      PyObject* const object = objects[i] != nullptr ? objects[i] : parameter.fallback.ptr();
      auto& into = call.values[i];
      if (object == nullptr || !read(object, into)) return false;
      if (parameter.constant) {
        if (!call.key.add_constant(into)) return false;
      } else if ((into.type == 't' && !read_address(into)) ||
                 !call.key.add_argument(into, parameter.specialized, parameter.aligned)) {
        return false;
      }
    }
    for (size_t i = 0; i < named; ++i) {
      if (places_[i].parameter != kMost) continue;
      for (PyObject* const object : {PyTuple_GET_ITEM(names, i), arguments[count + i]}) {
        if (!read(object, value) || !call.key.add_constant(value)) return false;
      }
    }
    return true;
  }

  // Finds the parameters of keywords. A launcher calls its kernel with the same ones each time.
  bool find_places(PyObject* names, size_t named) {
    const auto same = [&](size_t i) { return places_[i].name.ptr() == PyTuple_GET_ITEM(names, i); };
    size_t known = 0;
    if (places_.size() == named) {
      while (known < named && same(known)) ++known;
    }
    if (known == named && places_.size() == named) return true;
    places_.clear();
    for (size_t i = 0; i < named; ++i) {
      PyObject* const name = PyTuple_GET_ITEM(names, i);
      if (!PyUnicode_CheckExact(name)) return false;
      PyObject* const at = PyDict_GetItemWithError(at_.ptr(), name);
      places_.push_back(
          {py::reinterpret_borrow<py::object>(name), at == nullptr ? kMost : PyLong_AsSize_t(at)});
    }
    return true;
  }

  // False for tensors without memory of their own, such as those of functorch.
  static bool read_address(Value& value) {
    const auto& t = *value.tensor;
    if (!t.defined() || !t.has_storage() || t.layout() != at::kStrided ||
        t.key_set().has_any(kWrapped)) {
      return false;
    }
    value.bits = reinterpret_cast<uint64_t>(t.data_ptr());
    return true;
  }

  static constexpr c10::DispatchKeySet kWrapped{c10::DispatchKey::Python,
                                                c10::DispatchKey::Functionalize,
                                                c10::DispatchKey::FuncTorchBatched,
                                                c10::DispatchKey::FuncTorchGradWrapper};

  // Through Triton; its compiled kernel is kept if it can be launched from here.
  PyObject* launch_first(std::string_view key, PyObject* const* arguments, Py_ssize_t count,
                         PyObject* names) {
    const auto made = py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(first_.ptr(), arguments, count, names));
    if (!made) return nullptr;
    auto [kernel, variant] = made.cast<std::tuple<py::object, py::object>>();
    if (!variant.is_none()) {
      const auto [function, threads, shared_bytes, packed, globals, driver] = variant.cast<
          std::tuple<uint64_t, unsigned, unsigned, py::list, py::list, std::array<uint64_t, 3>>>();
      auto kept = std::make_shared<Variant>();
      kept->kernel = kernel;
      kept->driver = {reinterpret_cast<Driver::LaunchKernel>(driver[0]),
                      reinterpret_cast<decltype(Driver::get_context)>(driver[1]),
                      reinterpret_cast<decltype(Driver::get_error_string)>(driver[2])};
      kept->function = reinterpret_cast<void*>(function);
      kept->threads = threads;
      kept->shared_bytes = shared_bytes;
      for (const auto item : packed) {
        const auto [parameter, kind, bits] = item.cast<std::tuple<size_t, char, unsigned>>();
        kept->packed.push_back({parameter, kind, bits});
      }
      kept->globals = globals.cast<decltype(kept->globals)>();
      variants_.insert_or_assign(std::string(key), std::move(kept));
    }
    return kernel.release().ptr();
  }

  std::vector<Parameter> parameters_;
  py::dict at_;  // name -> index in parameters_
  std::vector<Attribute> knobs_, hooks_;
  py::object hook_chain_, drivers_, first_, triton_;
  struct Place {
    py::object name;
    size_t parameter;  // kMost: an option
  };
  std::vector<Place> places_;  // of the last call's keywords
  std::unordered_map<std::string, std::shared_ptr<const Variant>, Hash, std::equal_to<>> variants_;
};

// A Python function whose `self` is a capsule with the launcher: called without making a tuple or a
// dict of its arguments.
template <auto method>
PyObject* call(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  auto* const launcher =
      static_cast<std::shared_ptr<Launcher>*>(PyCapsule_GetPointer(capsule, nullptr));
  return ((**launcher).*method)(arguments, count, names);
  END_HANDLE_TH_ERRORS
}

template <auto method>
py::object function(const std::shared_ptr<Launcher>& launcher, PyMethodDef& definition) {
  const py::capsule self(new std::shared_ptr<Launcher>(launcher), [](void* pointer) {
    delete static_cast<std::shared_ptr<Launcher>*>(pointer);
  });
  definition.ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call<method>));
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self.ptr()));
}

const Exports launcher_exports([](py::module_& m) {
  // (launch, key) of a kernel; see Launcher.
  m.def("triton_launcher", [](const py::list& parameters, const Launcher::Attributes& knobs,
                              const Launcher::Attributes& hooks, py::object hook_chain,
                              py::object drivers, py::object first, py::object triton) {
    static PyMethodDef launch{"launch", nullptr, METH_FASTCALL | METH_KEYWORDS, nullptr};
    static PyMethodDef key{"key", nullptr, METH_FASTCALL | METH_KEYWORDS, nullptr};
    const auto launcher =
        std::make_shared<Launcher>(parameters, knobs, hooks, std::move(hook_chain),
                                   std::move(drivers), std::move(first), std::move(triton));
    return std::make_pair(function<&Launcher::launch>(launcher, launch),
                          function<&Launcher::key>(launcher, key));
  });
});

}  // namespace
}  // namespace fusedops::launcher
