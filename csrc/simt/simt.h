// The emulator: runs the kernels of csrc/cuda on a CPU as C++.
//
// A block's threads are fibers of one CPU thread, which change at barriers, warp operations and
// atomics; blocks are spread over CPU threads. A launch returns when its grid is done, and throws
// the first thing that was wrong: with block, thread and line.
//
//   names.h    CUDA's own names           barrier.h  __syncthreads, who waits for whom
//   where.h    an address as a line       warp.h     shuffles, votes, __syncwarp
//   fiber.h    switching stacks           atomic.h   atomics
//   shared.h   the arena                  touch.h    what is checked of a shared access
//   race.h     what came before what      hooks.h    where the compiler reports accesses
//   block.h    the order of threads       launch.h   launches, and the rest of launch.cuh
#pragma once

#include "csrc/simt/atomic.h"
#include "csrc/simt/barrier.h"
#include "csrc/simt/hooks.h"
#include "csrc/simt/launch.h"
#include "csrc/simt/names.h"
#include "csrc/simt/warp.h"
