// The emulator: runs the kernels of csrc/cuda on a CPU as C++.
//
// A block's threads are fibers of one CPU thread, which switch at barriers, warp operations and
// atomics; blocks are spread over CPU threads. A launch returns when its grid is done, and throws
// the first error, with block, thread and line.
//
//   names.h    CUDA's own names           barrier.h  __syncthreads, and who waits for whom
//   where.h    address to source line     warp.h     shuffles, votes and the like
//   fiber.h    switching stacks           atomic.h   atomics
//   shared.h   the arena                  touch.h    checks of shared accesses
//   race.h     the order of accesses      hooks.h    the compiler's access callbacks
//   block.h    the order of threads       launch.h   launches, and the rest of launch.cuh
//   mma.h      products of tensor cores
#pragma once

#include "csrc/simt/atomic.h"
#include "csrc/simt/barrier.h"
#include "csrc/simt/hooks.h"
#include "csrc/simt/launch.h"
#include "csrc/simt/mma.h"
#include "csrc/simt/names.h"
#include "csrc/simt/warp.h"
