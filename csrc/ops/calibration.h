// Says from timed calls whether our kernel or torch's code is faster for a call.
//
// fusedops/calibration has the tables of timed calls, one for each kind of CPU.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <atomic>
#include <string>
#include <vector>

namespace fusedops {

// The calls of one kind, such as a family's in one dtype without gradients, that were timed with
// our kernel and with torch's code. They differ in their sizes.
class TimedCalls {
 public:
  // Returns the kind's only object, which lives as long as the process.
  static TimedCalls& of(const std::string& kind);

  // Replaces the calls. sizes: those of the first call, then of the second, and so on.
  // ratios: our kernel's seconds over torch's.
  void set(const std::vector<int64_t>& sizes, const std::vector<double>& ratios);

  // Returns the ratio for a call of these sizes, from the three nearest calls: the mean of their
  // ratios' logarithms, weighted by 1 / distance^2 between the sizes' logarithms. NaN if nothing
  // was timed.
  double ratio(at::IntArrayRef sizes) const;

  // Whether our kernel is faster for a call of these sizes; false if nothing was timed.
  bool pays(at::IntArrayRef sizes) const { return ratio(sizes) <= kFaster; }

 private:
  // A call between timed ones may be slower than they say, so our kernel has to be a little faster.
  static constexpr double kFaster = 0.97;

  struct Calls {
    std::vector<float> sizes;   // logarithms, as long as ratios for each size of a call
    std::vector<float> ratios;  // logarithms
  };
  // Earlier calls are never freed: another thread may read them. They are set once or twice.
  std::atomic<const Calls*> calls_{nullptr};
};

// The calls of one kind with one thread, and those with several.
class TimedKind {
 public:
  // name: without the number of threads.
  explicit TimedKind(const std::string& name)
      : alone_(TimedCalls::of(name + " 1 thread")), together_(TimedCalls::of(name + " threads")) {}

  // Whether our kernel is faster with torch's number of threads.
  bool pays(at::IntArrayRef sizes) const {
    return (at::get_num_threads() == 1 ? alone_ : together_).pays(sizes);
  }

 private:
  const TimedCalls &alone_, &together_;
};

}  // namespace fusedops
