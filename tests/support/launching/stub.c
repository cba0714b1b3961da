/* A libcuda that launches nothing: it records what Triton's launchers would have launched. */
#include "cuda.h"
#include <stdint.h>
#include <string.h>

uint64_t recorded_parameters[256][16];
unsigned parameter_words[256]; /* of 8 bytes: 1, or 16 for a tensor map */
unsigned recorded_grid[3], recorded_block, recorded_shared;
unsigned parameter_count; /* set before a launch: a driver cannot see how many there are */
char recorded_name[256];
static char names[64][256];
static unsigned functions;

CUresult cuGetErrorString(CUresult error, const char **text) { *text = "stub"; return 0; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return 0; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return 0;
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return 0; }
CUresult cuCtxSetCurrent(CUcontext context) { return 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = 0; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)1;
  return 0;
}
/* More shared memory, registers and threads than any kernel asks for. */
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = 1 << 20;
  return 0;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)1; return 0; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  unsigned slot = functions++ % 64;
  strncpy(names[slot], name, sizeof names[slot] - 1);
  *function = (CUfunction)names[slot];
  return 0;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return 0;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return 0; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
  recorded_grid[0] = config->gridDimX;
  recorded_grid[1] = config->gridDimY;
  recorded_grid[2] = config->gridDimZ;
  recorded_block = config->blockDimX;
  recorded_shared = config->sharedMemBytes;
  strncpy(recorded_name, (const char *)function, sizeof recorded_name - 1);
  for (unsigned i = 0; i < parameter_count; i++)
    memcpy(recorded_parameters[i], parameters[i], 8 * parameter_words[i]);
  return 0;
}
/* A tensor map that can be read: address, rank, sizes and the strides in bytes, innermost first. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  uint64_t *words = (uint64_t *)map;
  memset(map, 0, sizeof *map);
  *words++ = (uint64_t)address;
  *words++ = rank;
  for (cuuint32_t i = 0; i < rank; i++) *words++ = sizes[i];
  for (cuuint32_t i = 0; i + 1 < rank; i++) *words++ = strides[i];
  return 0;
}
