// Finds the timed calls that are nearest to a call.

#include "csrc/ops/calibration.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <mutex>
#include <unordered_map>

namespace fusedops {
namespace {

constexpr float kSame = 1e-6F;  // squared distance of a call that was timed itself

float logarithm(int64_t size) { return std::log2(static_cast<float>(std::max<int64_t>(size, 1))); }

// The three smallest squared distances, and the logarithms of the ratios there.
class Nearest {
 public:
  void add(float distance, float ratio) {
    for (size_t i = 0; i < nearest_.size(); ++i) {
      if (distance >= nearest_[i].distance) continue;
      std::move_backward(nearest_.begin() + i, nearest_.end() - 1, nearest_.end());
      nearest_[i] = {distance, ratio};
      return;
    }
  }
  double mean() const {
    if (nearest_[0].distance < kSame) return nearest_[0].ratio;
    double sum = 0, weights = 0;
    for (const auto& [distance, ratio] : nearest_) {
      if (std::isinf(distance)) break;  // fewer than three calls
      sum += ratio / distance;
      weights += 1 / distance;
    }
    return sum / weights;
  }

 private:
  struct Call {
    float distance = std::numeric_limits<float>::infinity(), ratio = 0;
  };
  std::array<Call, 3> nearest_;
};

}  // namespace

TimedCalls& TimedCalls::of(const std::string& kind) {
  static std::mutex mutex;
  static std::unordered_map<std::string, TimedCalls> kinds;  // its elements never move
  const std::lock_guard<std::mutex> lock(mutex);
  return kinds[kind];
}

void TimedCalls::set(const std::vector<int64_t>& sizes, const std::vector<double>& ratios) {
  TORCH_CHECK(ratios.empty() ? sizes.empty() : sizes.size() % ratios.size() == 0,
              "calibration: ", sizes.size(), " sizes do not belong to ", ratios.size(), " ratios");
  auto* const calls = new Calls;
  for (const auto size : sizes) calls->sizes.push_back(logarithm(size));
  for (const auto ratio : ratios) calls->ratios.push_back(static_cast<float>(std::log2(ratio)));
  calls_.store(calls, std::memory_order_release);
}

double TimedCalls::ratio(at::IntArrayRef sizes) const {
  const auto* const calls = calls_.load(std::memory_order_acquire);
  if (calls == nullptr || calls->ratios.empty()) return std::nan("");
  const size_t dims = calls->sizes.size() / calls->ratios.size();
  TORCH_CHECK(sizes.size() == dims, "calibration: calls have ", dims, " sizes, got ", sizes.size());
  c10::SmallVector<float, 8> point;
  for (const auto size : sizes) point.push_back(logarithm(size));
  Nearest nearest;
  for (size_t i = 0; i < calls->ratios.size(); ++i) {
    float square = 0;
    for (size_t d = 0; d < dims; ++d) {
      const float difference = calls->sizes[i * dims + d] - point[d];
      square += difference * difference;
    }
    nearest.add(square, calls->ratios[i]);
  }
  return std::exp2(nearest.mean());
}

}  // namespace fusedops
