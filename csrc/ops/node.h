// The autograd node of differentiable operators: saved tensors, options, backward function. The
// backward is a function of both, so that compiled autograd can put it into its graph.
//
// It is a torch::autograd::Node because torch::autograd::Function costs 3 us more per step, a tenth
// of a small batch's time.
#pragma once

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "csrc/common.h"
#include "csrc/ops/operator.h"

namespace fusedops {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// torch 2.11 holds nodes in a shared_ptr, 2.13 in an intrusive_ptr.
using NodePointer = decltype(torch::autograd::Edge::function);

template <class T>
auto make_node() {
  if constexpr (std::is_same_v<NodePointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>();
  }
}

// Makes a node that sends its gradients to these inputs.
template <class Node, class... Inputs>
auto node_of(const Inputs&... inputs) {
  const auto node = make_node<Node>();
  node->set_next_edges(torch::autograd::collect_next_edges(value_or_undefined(inputs)...));
  return node;
}

// Packs a tensor to save: one of the node's inputs, or undefined.
inline SavedVariable saved(const Tensor& t) { return SavedVariable(t, false); }
inline SavedVariable saved(const OptionalTensor& t) { return saved(value_or_undefined(t)); }

// A node's saved tensors, each unpacked on access. Unpacking raises if the tensor was changed in
// place, which matters only to a backward that reads it.
class Saved {
 public:
  Saved(const SavedVariable* packed, NodePointer node) : packed_(packed), node_(std::move(node)) {}
  explicit Saved(variable_list unpacked) : unpacked_(std::move(unpacked)) {}

  Tensor operator[](size_t i) const { return packed_ ? packed_[i].unpack(node_) : unpacked_[i]; }

 private:
  const SavedVariable* packed_ = nullptr;
  NodePointer node_;
  variable_list unpacked_;
};

// Backward, an operator's struct, has
//   kName                          the node's name
//   kInputs, kSaved                the number of inputs with gradients, and of saved tensors
//   fields(a)                      a tuple of references to its data members, its options
//   run(saved, grads, needs_grad)  returns the gradients of the inputs that need one
// Compiled autograd copies the options and compiles one graph for each value of them.
template <class Backward>
struct FusedNode : torch::autograd::Node {
  using NeedsGrad = std::array<bool, Backward::kInputs>;

  Backward backward;
  std::array<SavedVariable, Backward::kSaved> saved;

  std::string name() const override { return Backward::kName; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return backward.run(Saved(saved.data(), getptr()), std::move(grads), needs_grad());
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    std::apply([&](const auto&... field) { (args.collect(stored(field)), ...); },
               flattened(backward));
    for (const auto& variable : saved) args.collect(variable, true);
  }

  // Puts a call of `compiled` into compiled autograd's graph. While the arguments are packed,
  // `swap` replaces saved tensors and symbolic sizes by proxies.
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::autograd::SwapSavedVariables& swap) override {
    namespace compiled_autograd = torch::dynamo::autograd;
    const auto fields = flattened(backward);
    std::apply([&](auto&... field) { (swap.before(stored(field)), ...); }, fields);
    for (auto& variable : saved) swap.before(variable);
    const auto arguments = packed();
    for (auto& variable : saved) swap.after(variable);
    std::apply([&](auto&... field) { (swap.after(stored(field)), ...); }, fields);

    std::vector<at::TypePtr> types;
    for (const auto& argument : arguments) types.push_back(argument.type());
    const auto& python = compiled_autograd::getPyCompilerInterface();
    const auto function = python->bind_function(swap.get_py_compiler(), Backward::kName, compiled,
                                                types, /*is_custom_function=*/true,
                                                /*is_traceable=*/true);
    const auto edges = compiled_autograd::get_input_metadata(next_edges());
    using Metadata = std::decay_t<decltype(edges)>;
    return python->call_function(swap.get_py_compiler(), "apply_functional", function, grads,
                                 arguments, compiled_autograd::IValuePacker<Metadata>::pack(edges));
  }

 private:
  // Compiled autograd takes our enums as integers.
  template <class T>
  static decltype(auto) stored(T& field) {
    if constexpr (std::is_enum_v<std::remove_const_t<T>>)
      return static_cast<int64_t>(field);
    else
      return (field);
  }

  NeedsGrad needs_grad() const {
    NeedsGrad result;
    for (size_t i = 0; i < result.size(); ++i) result[i] = task_should_compute_output(i);
    return result;
  }

  // Packs the options, the saved tensors and `needs_grad`.
  std::vector<at::IValue> packed() {
    torch::dynamo::autograd::PackedArgs arguments;
    std::apply([&](const auto&... field) { (arguments.pack(stored(field)), ...); },
               flattened(std::as_const(backward)));
    const Saved of(saved.data(), getptr());
    variable_list tensors;
    for (size_t i = 0; i < saved.size(); ++i) tensors.push_back(of[i]);
    arguments.pack(tensors);
    arguments.pack(needs_grad());
    return arguments.vec();
  }

  // Runs the backward with packed arguments. With create_graph=True gradients are enabled, and
  // `run` returns differentiable results.
  static variable_list compiled(const variable_list& grads, const std::vector<at::IValue>& packed) {
    torch::dynamo::autograd::PackedArgs arguments(packed);
    Backward backward;
    const auto unpack = [&](auto& field) {
      using Stored = std::decay_t<decltype(stored(field))>;
      field = static_cast<std::decay_t<decltype(field)>>(arguments.unpack<Stored>());
    };
    std::apply([&](auto&... field) { (unpack(field), ...); }, flattened(backward));
    const Saved of(arguments.unpack<variable_list>());
    return backward.run(of, variable_list(grads), arguments.unpack<NeedsGrad>());
  }
};

}  // namespace fusedops
