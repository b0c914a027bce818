// A CUDA driver without a GPU: two devices, memory of the host, and a log of what is done with them. A kernel does nothing but
// keep its stream busy for a few queries, or for ever if FAKE_HANG is set.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local int device = -1;

void fake_log(const char *format, ...) {
    char line[256];
    va_list args;
    int used = snprintf(line, sizeof line, "gpu%d ", device);
    va_start(args, format);
    vsnprintf(line + used, sizeof line - used, format, args);
    va_end(args);
    FILE *log = fopen(getenv("FAKE_LOG"), "a");
    fprintf(log, "%s\n", line);
    fclose(log);
}

typedef struct { int busy; } Stream;
typedef struct {
    unsigned grid[3], block[3], shared;
    Stream *stream;
    struct { uint32_t id; char pad[4]; union { int cooperative; char pad[64]; } value; } *attrs;
    unsigned n_attrs;
} Config;

int cuGetErrorName(int code, const char **text) { *text = code == 218 ? "CUDA_ERROR_INVALID_PTX" : "CUDA_ERROR"; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "something is wrong"; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = getenv("FAKE_OLD_DRIVER") ? 12020 : 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = getenv("FAKE_NO_GPU") ? 0 : 2; return 0; }
int cuDeviceGet(int *out, int ordinal) { *out = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int dev) { snprintf(name, length, "Fake %d", dev); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int dev) { *context = (void *)(intptr_t)(dev + 1); return 0; }
int cuDevicePrimaryCtxRelease_v2(int dev) { fake_log("cuDevicePrimaryCtxRelease"); return 0; }
int cuCtxSetCurrent(void *context) { device = (int)(intptr_t)context - 1; return 0; }
int cuMemGetInfo_v2(size_t *available, size_t *total) { *available = 1 << 30; *total = 2 << 29; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int dev) {
    switch (attribute) {
    case 1: *value = 1024; break;                     // threads a block
    case 2: case 3: *value = 1024; break;             // block x, y
    case 4: *value = 64; break;                       // block z
    case 5: *value = 2147483647; break;               // grid x
    case 6: case 7: *value = 65535; break;            // grid y, z
    case 8: *value = 49152; break;                    // shared memory a block
    case 12: *value = 65536; break;                   // registers a block
    case 16: *value = 132; break;                     // multiprocessors
    case 75: *value = 9; break;                       // compute capability
    case 76: *value = 0; break;
    case 97: *value = 232448; break;                  // shared memory a block, opt in
    default: return 1;
    }
    return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { memcpy((void *)to, from, bytes); return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { memcpy(to, (void *)from, bytes); return 0; }
int cuMemsetD8_v2(uint64_t to, unsigned char byte, size_t bytes) { memset((void *)to, byte, bytes); return 0; }
int cuStreamSynchronize(Stream *stream) { return stream ? 1 : 0; }
int cuStreamCreate(Stream **stream, unsigned flags) { *stream = calloc(1, sizeof **stream); return flags == 1 ? 0 : 1; }
int cuStreamQuery(Stream *stream) {
    if (stream->busy == 0) return 0;
    if (!getenv("FAKE_HANG")) stream->busy--;
    return 600;
}
int cuStreamDestroy_v2(Stream *stream) { fake_log("cuStreamDestroy"); free(stream); return 0; }
int cuEventCreate(void **event, unsigned flags) { *event = malloc(1); return 0; }
int cuEventRecord(void *event, Stream *stream) { return 0; }
int cuEventElapsedTime_v2(float *ms, void *start, void *end) { *ms = 1.5f; return 0; }
int cuEventDestroy_v2(void *event) { free(event); return 0; }
int cuModuleLoadDataEx(void **module, const char *image, unsigned n, const uint32_t *options, void **values) {
    if (strstr(image, ".version 99")) return 222;
    if (strstr(image, "broken")) {
        for (unsigned i = 0; i + 1 < n; i++)
            if (options[i] == 5 && options[i + 1] == 6)
                snprintf(values[i], (uintptr_t)values[i + 1], "line 1: broken");
        return 218;
    }
    *module = malloc(1);
    fake_log("cuModuleLoadDataEx");
    return 0;
}
int cuModuleUnload(void *module) { fake_log("cuModuleUnload"); free(module); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return 0; }
int cuFuncLoad(void *function) { fake_log("cuFuncLoad"); return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;
    return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { fake_log("cuFuncSetAttribute %d %d", attribute, value); return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) { *blocks = 2; return 0; }
int cuLaunchKernelEx(const Config *config, void *function, void **params, void **extra) {
    int cooperative = config->n_attrs == 1 && config->attrs[0].id == 2 ? config->attrs[0].value.cooperative : 0;
    config->stream->busy = 3;
    fake_log("cuLaunchKernelEx grid %u block %u shared %u cooperative %d DevComm of rank %d, count %zu", config->grid[0],
             config->block[0], config->shared, cooperative, ((int *)params[0])[2], *(size_t *)params[2]);
    return 0;
}
