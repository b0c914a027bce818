// A CUDA driver without a GPU: memory of the host for memory of devices, streams that work, kernels that do nothing, and a log
// of what is done (FAKE_LOG, a line each, headed by the GPU).
//
// FAKE_GPUS=n          that many GPUs; 2 unless set
// FAKE_NO_GPU          none
// FAKE_NO_PEERS        no GPU reaches another
// FAKE_OLD_DRIVER      a driver of CUDA 12.2
// FAKE_CUDA_12         a driver of CUDA 12.8
// FAKE_HANG            a kernel never ends
// FAKE_SPIN            a kernel waits at an LSA barrier, each block at its own, for the next rank, and sees when it is told to leave
#include "streams.h"

int fake_device(void) { return device; }

void fake_log_of(int gpu, const char *line) {
    const char *path = getenv("FAKE_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (!log) return;
    // One write, for processes may share the log.
    fprintf(log, "gpu%d %s\n", gpu, line);
    fclose(log);
}
void fake_log(const char *format, ...) {
    char line[512];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    fake_log_of(device, line);
}

static int n_gpus(void) {
    const char *gpus = getenv("FAKE_GPUS");
    return getenv("FAKE_NO_GPU") ? 0 : gpus ? atoi(gpus) : 2;
}

int cuGetErrorName(int code, const char **text) { *text = code == 218 ? "CUDA_ERROR_INVALID_PTX" : "CUDA_ERROR"; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "something is wrong"; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = getenv("FAKE_OLD_DRIVER") ? 12020 : getenv("FAKE_CUDA_12") ? 12080 : 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = n_gpus(); return 0; }
int cuDeviceGet(int *out, int ordinal) { *out = ordinal; return ordinal < n_gpus() ? 0 : 101; }
int cuDeviceGetName(char *name, int length, int dev) { snprintf(name, length, "Fake %d", dev); return 0; }
int cuDeviceCanAccessPeer(int *can, int dev, int peer) { *can = dev != peer && !getenv("FAKE_NO_PEERS"); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int dev) { *context = (void *)(intptr_t)(dev + 1); return 0; }
int cuDevicePrimaryCtxRelease_v2(int dev) { fake_log("cuDevicePrimaryCtxRelease"); return 0; }
int cuCtxSetCurrent(void *context) { device = (int)(intptr_t)context - 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)(intptr_t)(device + 1); return 0; }
int cuCtxGetDevice(int *dev) { *dev = device; return device < 0 ? 201 : 0; }
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

// Memory.
static struct { char *at; size_t bytes; int device; } blocks[4096];

void *fake_alloc(size_t bytes) {
    void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    pthread_mutex_lock(&fake_lock);
    for (int i = 0; i < 4096; i++)
        if (!blocks[i].at) {
            blocks[i].at = memory, blocks[i].bytes = bytes, blocks[i].device = device;
            break;
        }
    pthread_mutex_unlock(&fake_lock);
    return memory;
}
int fake_free(void *memory) {
    int found = 0;
    pthread_mutex_lock(&fake_lock);
    for (int i = 0; i < 4096 && memory; i++)
        if (blocks[i].at == memory) blocks[i].at = NULL, found = 1;
    pthread_mutex_unlock(&fake_lock);
    if (found) free(memory);
    return found;
}
int cuMemAlloc_v2(uint64_t *memory, size_t bytes) {
    if (!bytes || bytes > (size_t)1 << 30) return bytes ? 2 : 1;
    *memory = (uintptr_t)fake_alloc(bytes);
    fake_log("cuMemAlloc %zu", bytes);
    return 0;
}
int cuMemFree_v2(uint64_t memory) { fake_log("cuMemFree"); return fake_free((void *)memory) ? 0 : 1; }
int cuPointerGetAttribute(void *out, int attribute, uint64_t at) {
    int code = 1;
    pthread_mutex_lock(&fake_lock);
    for (int i = 0; i < 4096; i++) {
        uintptr_t start = (uintptr_t)blocks[i].at;
        if (!start || at < start || at - start >= blocks[i].bytes) continue;
        code = 0;
        switch (attribute) {
        case 1: *(void **)out = (void *)(intptr_t)(blocks[i].device + 1); break; // context
        case 2: *(unsigned *)out = 2; break;                                    // memory of a device
        case 3: *(uint64_t *)out = at; break;                                   // device pointer
        case 9: *(int *)out = blocks[i].device; break;                          // ordinal
        case 11: *(uint64_t *)out = start; break;                               // start of the range
        case 12: *(size_t *)out = blocks[i].bytes; break;                       // its size
        default: code = 1;
        }
    }
    pthread_mutex_unlock(&fake_lock);
    return code;
}
int cuPointerGetAttributes(unsigned n, const int *attributes, void **out, uint64_t at) {
    for (unsigned i = 0; i < n; i++)
        if (cuPointerGetAttribute(out[i], attributes[i], at)) *(uint64_t *)out[i] = 0;
    return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { memcpy((void *)to, from, bytes); return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { memcpy(to, (void *)from, bytes); return 0; }
int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t bytes) { memmove((void *)to, (void *)from, bytes); return 0; }
int cuMemsetD8_v2(uint64_t to, unsigned char byte, size_t bytes) { memset((void *)to, byte, bytes); return 0; }
typedef struct { void *to; const void *from; int byte; size_t bytes; } Move;
static void move(void *argument) {
    Move *m = argument;
    if (m->from) memmove(m->to, m->from, m->bytes);
    else memset(m->to, m->byte, m->bytes);
}
static int enqueue_move(Stream *stream, Move m) { fake_enqueue(stream, NULL, move, &m, sizeof m); return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, Stream *stream) {
    return enqueue_move(stream, (Move){(void *)to, from, 0, bytes});
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, Stream *stream) {
    return enqueue_move(stream, (Move){to, (void *)from, 0, bytes});
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream *stream) {
    return enqueue_move(stream, (Move){(void *)to, (void *)from, 0, bytes});
}
int cuMemsetD8Async(uint64_t to, unsigned char byte, size_t bytes, Stream *stream) {
    return enqueue_move(stream, (Move){(void *)to, NULL, byte, bytes});
}

// Modules and kernels.
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
int cuModuleLoad(void **module, const char *path) {
    if (strstr(path, "broken")) return 200;
    *module = malloc(1);
    fake_log("cuModuleLoad %s", strrchr(path, '/') + 1);
    return 0;
}
int cuModuleUnload(void *module) { fake_log("cuModuleUnload"); free(module); return 0; }
// A function is its name.
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = strdup(name); return 0; }
int cuFuncLoad(void *function) { fake_log("cuFuncLoad"); return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;
    return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { fake_log("cuFuncSetAttribute %d %d", attribute, value); return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *resident, void *function, int threads, size_t shared) { *resident = 2; return 0; }

// The host's and the kernels' memory.
typedef struct { uint32_t kind, block, index, context, peer, thread; uint64_t wanted, seen; char pad[24]; } Record;
typedef struct { uint32_t flag; char pad[60]; Record records[4096]; } AbortBlock;
// What a kernel looks at.
typedef struct { AbortBlock *abort; unsigned blocks; int rank, n_ranks; } Kernel;
static AbortBlock *looked_at[256];

int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
    if (flags != 3 || bytes != sizeof(AbortBlock)) return 1;
    fake_log("cuMemHostAlloc %zu", bytes);
    *memory = memset(aligned_alloc(4096, (bytes + 4095) / 4096 * 4096), 0x5a, bytes);
    return 0;
}
int cuMemHostGetDevicePointer_v2(uint64_t *at, void *memory, unsigned flags) { *at = (uintptr_t)memory; return 0; }
int cuMemFreeHost(void *memory) {
    fake_log("cuMemFreeHost");
    pthread_mutex_lock(&fake_lock);
    for (int i = 0; i < 256; i++)
        if (looked_at[i] == memory) fake_log("cuMemFreeHost AFTER ITS END");
    pthread_mutex_unlock(&fake_lock);
    // A kernel or a thread that still used it would crash.
    free(memory);
    return 0;
}

static int spinning[64];
void fake_await_kernels(int gpu) {
    pthread_mutex_lock(&fake_lock);
    while (gpu >= 0 && spinning[gpu]) pthread_cond_wait(&fake_changed, &fake_lock);
    pthread_mutex_unlock(&fake_lock);
}
int fake_kernels_wait(int gpu) {
    pthread_mutex_lock(&fake_lock);
    int wait = gpu >= 0 && spinning[gpu];
    pthread_mutex_unlock(&fake_lock);
    return wait;
}
static void spin(Kernel *kernel) {
    AbortBlock *abort = kernel->abort;
    pthread_mutex_lock(&fake_lock);
    int slot = 0;
    while (looked_at[slot]) slot++;
    looked_at[slot] = abort, spinning[device]++;
    pthread_mutex_unlock(&fake_lock);
    while (!__atomic_load_n(&abort->flag, __ATOMIC_RELAXED)) usleep(50);
    for (unsigned block = 0; block < kernel->blocks; block++) {
        Record *record = &abort->records[block % 4096];
        record->block = record->index = block, record->peer = (kernel->rank + 1) % kernel->n_ranks;
        record->thread = 0, record->wanted = 1;
        __atomic_store_n(&record->kind, 1, __ATOMIC_RELEASE);
    }
    fake_log("a kernel leaves");
    pthread_mutex_lock(&fake_lock);
    looked_at[slot] = NULL, spinning[device]--;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
}

typedef struct {
    unsigned grid[3], block[3], shared;
    Stream *stream;
    struct { uint32_t id; char pad[4]; union { int cooperative; char pad[64]; } value; } *attrs;
    unsigned n_attrs;
} Config;
static void kernel(void *argument) {
    if (getenv("FAKE_HANG")) for (;;) pause();
    if (getenv("FAKE_SPIN")) spin(argument);
    else usleep(100);
}
int cuLaunchKernelEx(const Config *config, void *function, void **params, void **extra) {
    int cooperative = config->n_attrs == 1 && config->attrs[0].id == 2 ? config->attrs[0].value.cooperative : 0;
    fake_log("cuLaunchKernelEx %s grid %u block %u shared %u cooperative %d DevComm of rank %d, count %zu", (char *)function, config->grid[0],
             config->block[0], config->shared, cooperative, ((int *)params[0])[2], *(size_t *)params[2]);
    Kernel k = {*(AbortBlock **)((char *)params[0] + 168), config->grid[0], ((int *)params[0])[2], ((int *)params[0])[3]};
    if (!k.abort) return 1;
    fake_enqueue(config->stream, NULL, kernel, &k, sizeof k);
    return 0;
}
