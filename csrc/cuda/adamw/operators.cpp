// AdamW on GPUs: calls the kernels of step.cu and gradients.cu with tensors.

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "csrc/cuda/adamw/launch.h"
#include "csrc/cuda/stream.h"
#include "csrc/ops/adamw/operators.h"

namespace fusedops::cuda::adamw {
namespace {

size_t bytes_of(const std::vector<AdamWTensor>& tensors) {
  return tensors.size() * sizeof(AdamWTensor);
}

// Returns the table on the device. Copies it there if it differs from `host`.
AdamWRows uploaded(const std::vector<AdamWTensor>& tensors, int64_t blocks, const Tensor& host,
                   const Tensor& table, const OnDeviceOf& device) {
  const auto bytes = bytes_of(tensors);
  if (std::memcmp(host.const_data_ptr(), tensors.data(), bytes) != 0) {
    std::memcpy(host.mutable_data_ptr(), tensors.data(), bytes);
    device.copy_from_host(table.mutable_data_ptr(), tensors.data(), bytes);
  }
  return {static_cast<const AdamWTensor*>(table.const_data_ptr()), static_cast<int>(tensors.size()),
          blocks};
}

// A table for one call. A CUDA graph copies it again from the host at each replay, so a captured
// table is never freed.
struct Table {
  Tensor host, device;

  Table(const std::vector<AdamWTensor>& tensors, const Tensor& like) {
    const auto options = at::TensorOptions().dtype(at::kByte);
    const auto bytes = static_cast<int64_t>(bytes_of(tensors));
    host = at::zeros({bytes}, options);
    device = at::zeros({bytes + kTableTail}, options.device(like.device()));
    if (!capturing()) return;
    static std::mutex mutex;
    static auto* const kept = new std::vector<Tensor>();  // never freed: CUDA may shut down first
    const std::lock_guard lock(mutex);
    kept->push_back(device);
  }
};

// Calls run(rows) with the gradients' table on the device. A stream keeps the table of its last
// call: gradients that stay at their addresses cost no fill and no copy. A captured graph has a
// table of its own, which no later call overwrites.
template <class Run>
void with_table(const GradientTable& gradients, const Tensor& like, const OnDeviceOf& device,
                const Run& run) {
  const auto& tensors = gradients.tensors;
  if (capturing()) {
    const Table graph_table(tensors, like);
    run(uploaded(tensors, gradients.blocks(), graph_table.host, graph_table.device, device));
    return;
  }
  using Stream = std::pair<int64_t, const void*>;  // its device and itself
  static std::mutex mutex;
  static auto* const stream_tables = new std::map<Stream, Table>();  // never freed, as above
  const std::lock_guard lock(mutex);  // until the launch: another thread may use the same stream
  const Stream stream(like.get_device(), device.stream());
  auto entry = stream_tables->find(stream);
  if (entry == stream_tables->end() || entry->second.host.nbytes() < bytes_of(tensors)) {
    entry = stream_tables->insert_or_assign(stream, Table(tensors, like)).first;
  }
  const auto& table = entry->second;
  run(uploaded(tensors, gradients.blocks(), table.host, table.device, device));
}

AdamWLaunch launch_of(const AdamWRows& rows, const AdamWArguments& a, const Tensor& table) {
  AdamWLaunch launch{rows};
  launch.seed = static_cast<uint64_t>(a.seed);
  launch.squares = is_defined(a.squares) ? a.squares->const_data_ptr<double>() : nullptr;
  launch.max_grad_norm = a.max_grad_norm;
  launch.grad_scale = is_defined(a.grad_scale) ? a.grad_scale->const_data_ptr<float>() : nullptr;
  launch.found_inf = is_defined(a.found_inf) ? a.found_inf->const_data_ptr<float>() : nullptr;
  auto* const end = static_cast<char*>(table.mutable_data_ptr()) + table.numel();
  launch.finished = reinterpret_cast<unsigned*>(end - kTableTail);
  return launch;
}

void adamw_step(const AdamWArguments& a) {
  adamw_check(a);
  const AdamWTable all(a);
  if (all.tensors.empty()) return;
  const OnDeviceOf device(a.params[0]);
  OptionalTensor host = a.host_table, table = a.table;
  if (!is_defined(table)) {
    const Table step_table(all.tensors, a.params[0]);
    host = step_table.host;
    table = step_table.device;
  }
  TORCH_CHECK(host->nbytes() >= bytes_of(all.tensors) &&
                  table->nbytes() >= bytes_of(all.tensors) + kTableTail &&
                  table->device() == a.params[0].device(),
              "adamw_step: table must have ", bytes_of(all.tensors) + kTableTail, " bytes on ",
              a.params[0].device(), ", got ", table->nbytes(), " on ", table->device());
  auto launch = launch_of(uploaded(all.tensors, all.blocks(), *host, *table, device), a, *table);
  const auto count = static_cast<int>(all.groups.size());
  for (int first = 0; first < count; first += kGroups) {
    launch.first_group = first;
    std::copy_n(&all.groups[first], std::min(kGroups, count - first), launch.groups);
    launch_adamw_step(launch, device.stream());
  }
  all.write_back();
}

Tensor adamw_squares(at::TensorList grads) {
  const auto squares = adamw_squares_output(grads);
  const GradientTable gradients(grads);
  const OnDeviceOf device(squares);
  with_table(gradients, squares, device, [&](const AdamWRows& rows) {
    launch_adamw_squares(rows, squares.mutable_data_ptr<double>(), device.stream());
  });
  return squares;
}

void adamw_scale(at::TensorList grads, const Tensor& squares, double max_norm) {
  adamw_scale_check(grads, squares, max_norm);
  const GradientTable gradients(grads);
  const OnDeviceOf device(squares);
  with_table(gradients, squares, device, [&](const AdamWRows& rows) {
    launch_adamw_scale(rows, squares.const_data_ptr<double>(), max_norm, device.stream());
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, FUSEDOPS_CUDA_KEY, m) {
  m.impl("adamw_step", flat<adamw_step>);
  m.impl("adamw_squares", adamw_squares);
  m.impl("adamw_scale", adamw_scale);
}

}  // namespace fusedops::cuda::adamw
