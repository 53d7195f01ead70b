// Turns a code address into a source line, for the emulator's errors.
#pragma once

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace fusedops::simt {

struct Frame {
  std::string function, place;  // `block_sum`, `device.cuh:60`
};

inline std::string output_of(const std::string& command) {
  std::string text;
  if (FILE* pipe = popen(command.c_str(), "r")) {
    char part[512];
    while (fgets(part, sizeof part, pipe)) text += part;
    pclose(pipe);
  }
  return text;
}

// `.../csrc/cuda/norm/forward.cu:120 (discriminator 3)` is `norm/forward.cu:120`.
inline std::string short_place(std::string place) {
  place = place.substr(0, place.find(" ("));
  const size_t floor = place.rfind("csrc/cuda/"), slash = place.rfind('/');
  if (floor != std::string::npos) return place.substr(floor + 10);
  return slash == std::string::npos ? place : place.substr(slash + 1);
}

// `void fusedops::cuda::Vec<float, 4>::store<8>(float*) const` is `store`.
inline std::string short_function(const std::string& name) {
  std::string bare;  // without template arguments
  int depth = 0;
  for (const char c : name.substr(0, name.find('('))) {
    depth += c == '<';
    if (depth == 0) bare += c;
    depth -= c == '>';
  }
  return bare.substr(bare.find_last_of(": ") + 1);
}

// Pairs of lines, function and place, for the calls inlined at the address, innermost first.
inline std::string addr2line(const void* pc) {
  Dl_info info;
  link_map* map = nullptr;
  if (!dladdr1(pc, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP)) return "";
  std::string file = map->l_name;  // empty for the program itself
  if (file.empty()) file = "/proc/" + std::to_string(getpid()) + "/exe";
  std::ostringstream command;
  command << "addr2line -i -C -f -e '" << file << "' 0x" << std::hex
          << reinterpret_cast<size_t>(pc) - map->l_addr << " 2>/dev/null";
  return output_of(command.str());
}

inline bool is_ours(const std::string& place) {
  return place.find("csrc/simt/") != std::string::npos ||
         place.find("/include/c++/") != std::string::npos;
}

// The calls inlined at the address, innermost first, without the emulator's own. A function that
// the compiler split in two appears to be inlined into itself.
inline std::vector<Frame> read_frames(const void* pc) {
  std::vector<Frame> frames;
  std::istringstream lines(addr2line(pc));
  for (std::string function, place; std::getline(lines, function) && std::getline(lines, place);) {
    if (place.find('?') != std::string::npos || is_ours(place)) continue;
    const bool split = !frames.empty() && frames.back().function == short_function(function);
    if (!split) frames.push_back({short_function(function), short_place(place)});
  }
  return frames;
}

// `function+offset`, if addr2line or debug information is missing.
inline std::string symbol(const void* pc) {
  Dl_info info;
  if (!dladdr(pc, &info)) return "an unknown address";
  const void* base = info.dli_sname ? info.dli_saddr : info.dli_fbase;
  std::ostringstream text;
  text << (info.dli_sname ? info.dli_sname : info.dli_fname) << "+0x" << std::hex
       << static_cast<const char*>(pc) - static_cast<const char*>(base);
  return text.str();
}

// `norm/forward.cu:120 in block_sum at device.cuh:60`: the call, then what was inlined into it.
inline std::string describe_address(const void* pc) {
  std::vector<Frame> frames = read_frames(pc);
  if (frames.empty()) return symbol(pc);
  std::string text = frames.back().place;
  for (frames.pop_back(); !frames.empty(); frames.pop_back()) {
    text += " in " + frames.back().function + " at " + frames.back().place;
  }
  return text;
}

// The line of a return address. A lookup starts a process, so results are cached.
inline std::string where(const void* returns_to) {
  static std::mutex mutex;
  static std::map<const void*, std::string> cache;
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = cache.try_emplace(returns_to);
  if (is_new) at->second = describe_address(static_cast<const char*>(returns_to) - 1);
  return at->second;
}

// A kernel's name with its template arguments, from its first instruction.
inline std::string kernel_name(const void* kernel) {
  std::istringstream lines(addr2line(kernel));
  std::string name, line;
  for (int i = 0; std::getline(lines, line); ++i) {
    if (i % 2 == 0) name = line;
  }
  if (name.empty() || name[0] == '?') return symbol(kernel);
  if (name.starts_with("void ")) name = name.substr(5);
  return name.substr(0, name.rfind('('));
}

}  // namespace fusedops::simt
