// Runs one test kernel of the emulator, named on the command line. The kernel's function returns
// whether its results are right.
#pragma once

#include <cstdio>
#include <exception>
#include <map>
#include <string>

#include "csrc/cuda/device.cuh"

using Toys = std::map<std::string, bool (*)()>;

// Prints `right`, `wrong` or the error.
inline int run_toy(const Toys& toys, const char* name) {
  try {
    std::puts(toys.at(name)() ? "right" : "wrong");
  } catch (const std::exception& error) {
    std::puts(error.what());
  }
  return 0;
}
