/* CUDA's driver as Triton uses it, without a GPU: it keeps the last launch for stub.py. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST 128 /* arguments of a kernel */

typedef struct {
  uint64_t launches, through_triton; /* the second: by cuLaunchKernelEx, as Triton launches */
  uint64_t function, stream;
  uint32_t grid[3], block[3], shared_bytes, attributes;
  uint64_t values[MOST];
} Launch;

Launch last;
uint32_t argument_bytes[MOST], arguments; /* set before a launch: how much of each is read */
int fails;                                /* what the next launches return */
int no_context;

static void keep(void* function, void* stream, void** parameters) {
  last.function = (uint64_t)function;
  last.stream = (uint64_t)stream;
  memset(last.values, 0, sizeof last.values);
  for (uint32_t i = 0; i < arguments; ++i) {
    memcpy(&last.values[i], parameters[i], argument_bytes[i]);
  }
  ++last.launches;
}

int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream, void** parameters, void** extra) {
  const uint32_t sizes[] = {x, y, z, bx, by, bz};
  memcpy(last.grid, sizes, sizeof sizes);
  last.shared_bytes = shared;
  last.attributes = extra != 0;
  keep(function, stream, parameters);
  return fails;
}

typedef struct { /* CUlaunchConfig */
  uint32_t sizes[6], shared_bytes;
  void *stream, *attributes;
  uint32_t count;
} Config;

int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
  memcpy(last.grid, config->sizes, sizeof config->sizes);
  last.shared_bytes = config->shared_bytes;
  last.attributes = config->count + (extra != 0);
  ++last.through_triton;
  keep(function, config->stream, parameters);
  return fails;
}

/* Every module, and so every kernel, has a handle of its own. */
int cuModuleLoadData(void** module, const void* image) {
  static uintptr_t next = 0x1000;
  *module = (void*)(next += 0x10);
  return image == 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = module;
  return name == 0;
}

int cuCtxGetCurrent(void** context) {
  *context = no_context ? 0 : &last;
  return 0;
}

int cuPointerGetAttribute(uint64_t* value, int attribute, uint64_t pointer) {
  *value = pointer;
  return attribute == 0;
}

int cuGetErrorString(int error, const char** text) {
  *text = error ? "a planted error" : "no error";
  return 0;
}

int cuFuncGetAttribute(int* value, int attribute, void* function) {
  *value = 1024;
  return attribute < 0 || function == 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = 232448; /* the bytes of shared memory that a block may have */
  return attribute < 0 || device < 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &last;
  return device < 0;
}

int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuCtxGetDevice(int* device) { return *device = 0, 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuInit(void) { return 0; }
int cuModuleUnload(void) { return 0; }
int cuFuncSetAttribute(void) { return 0; }
int cuFuncSetCacheConfig(void) { return 0; }
int cuCtxSetCurrent(void) { return 0; }
int cuCtxGetLimit(void) { return 0; }
int cuCtxSetLimit(void) { return 0; }
int cuStreamIsCapturing(void) { return 0; }
int cuOccupancyMaxActiveClusters(void) { return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
