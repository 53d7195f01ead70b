// Registers operators with torch's dispatcher (schema, functions, autocast rule), and calls them.
//
// Users call public operators, which are the same on every device. A public operator calls kernel
// operators, which have an implementation per device and no gradients.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "csrc/common.h"

namespace fusedops {

// A string as a template argument.
template <size_t n>
struct Name {
  char text[n];
  consteval Name(const char (&from)[n]) { std::copy_n(from, n, text); }
};

// Calls an operator through the dispatcher. Its handle is looked up once.
template <Name name, class Signature, class... Args>
auto dispatch(Args&&... args) {
  static const auto op = handle<Signature>(name.text);
  return op.call(std::forward<Args>(args)...);
}

template <class Function>
auto below_autograd(const Function& f) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return f();
}

// Schemas and users name an enum's values by strings. `names_of(Enum)`, defined next to the enum,
// returns the argument's name, the values' names in order, and whether None means the first value.
template <size_t n>
struct Names {
  const char* argument;
  std::array<std::string_view, n> values;
  bool first_is_none = false;
};

template <class Enum>
concept Named = std::is_enum_v<Enum> && requires { names_of(Enum{}); };

template <Named Enum>
std::string_view to_name(Enum value) {
  static constexpr auto names = names_of(Enum{});
  return names.values[static_cast<size_t>(value)];
}

template <Named Enum>
[[noreturn, gnu::cold, gnu::noinline]] void refuse_name(const char* op, std::string_view got) {
  const auto names = names_of(Enum{});
  const size_t count = names.values.size();
  std::ostringstream text;
  for (size_t i = 0; i < count; ++i) {
    text << (i == 0 ? "" : i + 1 < count ? ", " : " or ");
    i == 0 && names.first_is_none ? text << "None" : text << "'" << names.values[i] << "'";
  }
  C10_THROW_ERROR(ValueError,
                  c10::str(op, ": ", names.argument, " must be ", text.str(), ", got '", got, "'"));
}

template <Named Enum>
Enum from_name(const char* op, std::string_view name) {
  static constexpr auto names = names_of(Enum{});
  const auto& values = names.values;
  const auto match = std::find(values.begin(), values.end(), name);
  if (match == values.end()) refuse_name<Enum>(op, name);
  return static_cast<Enum>(match - values.begin());
}

// The dispatcher passes a kernel operator's arguments one by one, but a kernel takes one struct.
// The struct's `fields` are the schema's arguments in order: tensors by reference, an enum by its
// name. A field may itself be a struct with fields.
template <class T>
auto flattened(T& t) {
  using Struct = std::remove_const_t<T>;
  if constexpr (requires { Struct::fields(t); }) {
    return std::apply([](auto&... field) { return std::tuple_cat(flattened(field)...); },
                      Struct::fields(t));
  } else {
    return std::tie(t);
  }
}

template <class T>
using InSchema = std::conditional_t<std::is_same_v<T, Tensor> || std::is_same_v<T, OptionalTensor>,
                                    const T&, std::conditional_t<Named<T>, std::string_view, T>>;

template <class T>
decltype(auto) to_schema(const T& field) {
  if constexpr (Named<T>)
    return to_name(field);
  else
    return (field);
}

// Moves arguments that are passed by value.
template <class T>
std::conditional_t<Named<T>, T, InSchema<T>&&> from_schema(InSchema<T>& argument) {
  if constexpr (Named<T>)
    return from_name<T>("fusedops", argument);
  else
    return static_cast<InSchema<T>&&>(argument);
}

// Adapts a kernel to the dispatcher's calling convention.
template <auto kernel>
struct Flat;

template <class Result, class Arguments, Result (*kernel)(const Arguments&)>
struct Flat<kernel> {
  template <class Fields>
  struct Of;
  template <class... Field>
  struct Of<std::tuple<const Field&...>> {
    static Result call(InSchema<Field>... args) {
      return kernel(Arguments{from_schema<Field>(args)...});
    }
  };
  static constexpr auto call = Of<decltype(flattened(std::declval<const Arguments&>()))>::call;
};

template <auto kernel>
constexpr auto flat = Flat<kernel>::call;

// Calls a kernel operator by its name.
template <Name name, class Result, class Arguments>
Result call(const Arguments& a) {
  return std::apply(
      [](const auto&... field) {
        return dispatch<name, Result(InSchema<std::decay_t<decltype(field)>>...)>(
            to_schema(field)...);
      },
      flattened(a));
}

// An autocast rule: casts the tensors at these argument positions, and no others.
template <size_t... places>
struct Casts {
  template <class Arguments>
  static void apply(Arguments& args, c10::ScalarType to, c10::DeviceType device) {
    const auto cast = [&](auto& t) { t = at::autocast::cached_cast(to, t, device); };
    (cast(std::get<places>(args)), ...);
  }
};

// An operator under autocast: calls itself with the arguments that the rule changed. A kCudaOnly
// rule does nothing on CPUs, and a rule with `finish` also changes the result.
template <auto f, class Rule>
struct Autocast;

template <class Result, class... Args, Result (*f)(Args...), class Rule>
struct Autocast<f, Rule> {
  // A function's static: operators may be registered before a template's static is constructed.
  static std::string& name() {
    static std::string of;
    return of;
  }

  template <c10::DispatchKey key, c10::DeviceType device>
  static Result call(Args... args) {
    const c10::impl::ExcludeDispatchKeyGuard off(key);
    std::tuple<std::decay_t<Args>...> changed(std::forward<Args>(args)...);
    Rule::apply(changed, at::autocast::get_autocast_dtype(device), device);
    static const auto op = handle<Result(Args...)>(name().c_str());
    auto result = std::apply([](const auto&... a) { return op.call(a...); }, changed);
    if constexpr (requires { Rule::finish(result, changed); }) Rule::finish(result, changed);
    return result;
  }
};

// Raises a TypeError that names the operator's nested argument (nested.cpp).
void refuse_nested(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// random: the operator draws a seed. takes_nested: it calls torch's own function for nested
// tensors; other operators refuse them.
struct PublicOptions {
  bool random = false, takes_nested = false;
};

// A file's operators, registered while this object lives: a static in that file.
class Operators {
 public:
  explicit Operators(void (*declare)(Operators&)) { declare(*this); }

  // vmap gets the same function, so that it sees ATen calls and not an operator to loop over.
  template <class Function>
  void add_public(const std::string& schema, Function* f, PublicOptions options = {}) {
    const auto name = define(schema, options.random);
    implicit_.impl(name.c_str(), f);
    batched_.impl(name.c_str(), f);
    if (options.takes_nested) return;
    nested_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse_nested>());
  }

  template <auto f, class Rule>
  void add_public(const std::string& schema, PublicOptions options = {}) {
    using Cast = Autocast<f, Rule>;
    add_public(schema, f, options);
    const auto name = name_of(schema);
    Cast::name() = "fusedops::" + name;
    using c10::DeviceType, c10::DispatchKey;
    if constexpr (!requires { Rule::kCudaOnly; }) {
      autocast_cpu_.impl(name.c_str(),
                         Cast::template call<DispatchKey::AutocastCPU, DeviceType::CPU>);
    }
    autocast_cuda_.impl(name.c_str(),
                        Cast::template call<DispatchKey::AutocastCUDA, DeviceType::CUDA>);
  }

  // outputs: checks the arguments and allocates the outputs. composite: the formula in ATen calls,
  // for arguments that no kernel takes.
  template <class Outputs, class Composite>
  void add_kernel(const std::string& schema, Outputs* outputs, Composite* composite) {
    add_kernel(schema, outputs);
    composite_.impl(name_of(schema).c_str(), composite);
  }

  // Differentiating through a kernel is an error.
  template <class Outputs>
  void add_kernel(const std::string& schema, Outputs* outputs) {
    const auto name = define(schema, false);
    meta_.impl(name.c_str(), outputs);
    autograd_.impl(name.c_str(), torch::autograd::autogradNotImplementedFallback());
  }

 private:
  static std::string name_of(const std::string& schema) {
    return schema.substr(0, schema.find('('));
  }

  std::string define(const std::string& schema, bool random) {
    const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag},
        seeded{at::Tag::nondeterministic_seeded, at::Tag::pt2_compliant_tag};
    definitions_.def(schema.c_str(), random ? seeded : pure);
    return name_of(schema);
  }

  static torch::Library library(c10::DispatchKey key) {
    return {torch::Library::IMPL, "fusedops", key, __FILE__, __LINE__};
  }

  torch::Library definitions_{torch::Library::FRAGMENT, "fusedops", std::nullopt, __FILE__,
                              __LINE__};
  torch::Library implicit_ = library(c10::DispatchKey::CompositeImplicitAutograd);
  torch::Library nested_ = library(c10::DispatchKey::CompositeImplicitAutogradNestedTensor);
  torch::Library batched_ = library(c10::DispatchKey::FuncTorchBatched);
  torch::Library composite_ = library(c10::DispatchKey::CompositeExplicitAutograd);
  torch::Library meta_ = library(c10::DispatchKey::Meta);
  torch::Library autograd_ = library(c10::DispatchKey::Autograd);
  torch::Library autocast_cpu_ = library(c10::DispatchKey::AutocastCPU);
  torch::Library autocast_cuda_ = library(c10::DispatchKey::AutocastCUDA);
};

}  // namespace fusedops
