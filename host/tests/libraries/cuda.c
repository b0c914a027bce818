// A stub of the CUDA driver: it loads any module, and its kernels do nothing.
//
// STUB_GPUS=n       number of GPUs (default 4)
// STUB_CUDA=code    version of cuDriverGetVersion (default 13000)
// STUB_HANG         if set, kernels never end
// STUB_LOG=file     file to which some calls append a line, which begins with the GPU
//
// It returns these errors: 200 invalid image, 218 invalid PTX, 222 unsupported version of PTX, 600
// not ready.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local int device = -1;
static int hangs;

static int number(const char *name, int fallback) {
    return getenv(name) ? atoi(getenv(name)) : fallback;
}
static void log_call(const char *format, ...) {
    const char *path = getenv("STUB_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (!log) return;
    // One write per line: processes share the file.
    char line[256];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    fprintf(log, "gpu%d %s\n", device, line);
    fclose(log);
}

int cuGetErrorName(int code, const char **text) {
    *text = code == 218 ? "CUDA_ERROR_INVALID_PTX" : "CUDA_ERROR";
    return 0;
}
int cuGetErrorString(int code, const char **text) { *text = "something is wrong"; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = number("STUB_CUDA", 13000); return 0; }

int cuDeviceGetCount(int *count) { *count = number("STUB_GPUS", 4); return 0; }
int cuDeviceGet(int *out, int ordinal) { *out = ordinal; return 0; }
// The attributes of an H200 that the host queries.
int cuDeviceGetAttribute(int *value, int attribute, int ordinal) {
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break;   // threads per block, maximum x and y
    case 4: *value = 64; break;                     // maximum z
    case 5: *value = 2147483647; break;             // x of the grid
    case 6: case 7: *value = 65535; break;          // y and z of the grid
    case 8: *value = 49152; break;                  // shared memory per block
    case 12: *value = 65536; break;                 // registers per block
    case 16: *value = 132; break;                   // multiprocessors
    case 75: *value = 9; break;                     // compute capability
    case 97: *value = 232448; break;                // opt-in shared memory per block
    default: *value = 0;
    }
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int ordinal) {
    *context = (void *)(intptr_t)(ordinal + 1);
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int ordinal) { log_call("cuDevicePrimaryCtxRelease"); return 0; }
int cuCtxSetCurrent(void *context) { device = (int)(intptr_t)context - 1; return 0; }
int cuCtxGetDevice(int *ordinal) { *ordinal = device; return 0; }

int cuMemsetD8Async(uint64_t to, unsigned char byte, size_t bytes, void *stream) {
    memset((void *)to, byte, bytes);
    return 0;
}
int cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); return 0; }
int cuStreamDestroy_v2(void *stream) { free(stream); return 0; }
int cuStreamQuery(void *stream) { return hangs ? 600 : 0; }
int cuStreamSynchronize(void *stream) { return 0; }
int cuEventCreate(void **event, unsigned flags) { *event = malloc(1); return 0; }
int cuEventRecord(void *event, void *stream) { return 0; }
int cuEventQuery(void *event) { return 0; }
int cuEventDestroy_v2(void *event) { free(event); return 0; }

int cuModuleLoad(void **module, const char *path) {
    log_call("cuModuleLoad %s", strrchr(path, '/') + 1);
    *module = malloc(1);
    return strstr(path, "broken") ? 200 : 0;
}
// Logs a cubin, and refuses one with the text "refused". PTX of version 99 is too new. For broken
// PTX it writes the JIT error log (options 5, 6: buffer and size). It logs whether PTX with line
// directives is loaded with them (option 13).
int cuModuleLoadDataEx(void **module, const char *image, unsigned n, const uint32_t *options,
                       void **values) {
    *module = malloc(1);
    if (memcmp(image, "\177ELF", 4) == 0) {
        log_call("cuModuleLoadDataEx %s", image + 1);
        return strstr(image, "refused") ? 200 : 0;
    }
    for (unsigned i = 0; i < n; i++)
        if (options[i] == 13 && values[i] && strstr(image, ".loc"))
            log_call("cuModuleLoadDataEx with lines");
    if (strstr(image, ".version 99")) return 222;
    if (!strstr(image, "broken")) return 0;
    for (unsigned i = 0; i + 1 < n; i++)
        if (options[i] == 5 && options[i + 1] == 6)
            snprintf(values[i], (uintptr_t)values[i + 1], "line 1: broken");
    return 218;
}
// Logged with STUB_UNLOADS only.
int cuModuleUnload(void *module) {
    if (number("STUB_UNLOADS", 0)) log_call("cuModuleUnload");
    free(module);
    return 0;
}
// A function handle is the function's name.
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = strdup(name);
    return 0;
}
int cuFuncLoad(void *function) { return 0; }
// Attributes 0 and 4: maximum threads per block, registers.
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads,
                                                size_t shared) {
    *blocks = 2;
    return 0;
}
int cuLaunchKernelEx(const unsigned *config, const char *function, void **params, void **extra) {
    log_call("cuLaunchKernelEx %s grid %u block %u", function, config[0], config[3]);
    hangs = getenv("STUB_HANG") != NULL;
    return 0;
}
