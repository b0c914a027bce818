// An NCCL that talks to nobody: host memory as device memory, and the same log.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void fake_log(const char *format, ...);
typedef struct { int rank, n_ranks; } Comm;
typedef struct { char bytes[128]; } UniqueId;
typedef struct { size_t size; unsigned magic, version; int rank, n_ranks, cuda_dev, nvml_dev; char device_api, multimem; int gin, n_lsa_teams; } Properties;
typedef struct { size_t size; unsigned magic, version; void *resources, *teams; char multimem; int barriers, lsa_barriers; } Requirements;

int ncclGetVersion(int *version) { *version = 23203; return 0; }
const char *ncclGetErrorString(int code) { return "an error"; }
const char *ncclGetLastError(void *comm) { return ""; }
int ncclGetUniqueId(UniqueId *id) { memset(id, 42, sizeof *id); return 0; }
int ncclCommInitRank(Comm **comm, int n_ranks, UniqueId id, int rank) {
    if (id.bytes[0] != 42 || id.bytes[127] != 42) return 4;
    *comm = malloc(sizeof **comm);
    **comm = (Comm){rank, n_ranks};
    fake_log("ncclCommInitRank %d of %d", rank, n_ranks);
    return 0;
}
int ncclCommFinalize(Comm *comm) { fake_log("ncclCommFinalize"); return 0; }
int ncclCommDestroy(Comm *comm) { fake_log("ncclCommDestroy"); free(comm); return 0; }
int ncclCommAbort(Comm *comm) { fake_log("ncclCommAbort"); free(comm); return 0; }
int ncclCommGetAsyncError(Comm *comm, int *state) { *state = 0; return 0; }
int ncclCommCount(Comm *comm, int *n) { *n = comm->n_ranks; return 0; }
int ncclCommUserRank(Comm *comm, int *rank) { *rank = comm->rank; return 0; }
int ncclCommCuDevice(Comm *comm, int *device) { *device = comm->rank; return 0; }
int ncclCommQueryProperties(Comm *comm, Properties *p) {
    if (p->size != 152 || p->magic != 0xcafebeef || p->version != 23203) return 5;
    p->device_api = 1;
    p->n_lsa_teams = getenv("FAKE_TWO_TEAMS") ? 2 : 1;
    return 0;
}
int ncclMemAlloc(void **memory, size_t bytes) { *memory = malloc(bytes); fake_log("ncclMemAlloc %zu", bytes); return 0; }
int ncclMemFree(void *memory) { fake_log("ncclMemFree"); free(memory); return 0; }
int ncclCommWindowRegister(Comm *comm, void *memory, size_t bytes, void **window, int flags) {
    *window = getenv("FAKE_NO_WINDOW") ? NULL : memory;
    fake_log("ncclCommWindowRegister %zu flags %d", bytes, flags);
    return 0;
}
int ncclCommWindowDeregister(Comm *comm, void *window) { fake_log("ncclCommWindowDeregister"); return 0; }
int ncclDevCommCreate(Comm *comm, const Requirements *r, int *out) {
    if (r->size != 120 || r->magic != 0xcafebeef || r->version != 23203) return 5;
    out[0] = 0xcafebeef, out[1] = 23203, out[2] = comm->rank, out[3] = comm->n_ranks;
    out[84 / 4] = r->lsa_barriers;
    fake_log("ncclDevCommCreate %d barriers", r->lsa_barriers);
    return 0;
}
int ncclDevCommDestroy(Comm *comm, const int *dev) { fake_log("ncclDevCommDestroy"); return dev[0] == (int)0xcafebeef ? 0 : 4; }
int ncclAllReduce(const float *send, float *recv, size_t count, int type, int op, Comm *comm, void *stream) {
    fake_log("ncclAllReduce %zu type %d op %d", count, type, op);
    for (size_t i = 0; i < count; i++) recv[i] = send[i] * comm->n_ranks;
    return 0;
}
