// A stub of NCCL: calls succeed without any other rank, and move no data.
//
// STUB_NCCL=code    version of ncclGetVersion (default 23203)
// STUB_STUCK        if set, ncclCommFinalize returns only after an abort
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// The host finds the CUDA version of the library in this text.
const char banner[] = "NCCL version 2.32.3+cuda13.4";
typedef struct { int rank, n_ranks, in_use; } Comm;
int cuCtxGetDevice(int *ordinal);

// A call on a communicator, which takes a while. Ends the process if another one is being made, or
// if the calling thread has no context.
static void call(Comm *comm) {
    int device;
    cuCtxGetDevice(&device);
    if (device < 0 || __atomic_exchange_n(&comm->in_use, 1, __ATOMIC_SEQ_CST)) abort();
    usleep(20);
    __atomic_store_n(&comm->in_use, 0, __ATOMIC_SEQ_CST);
}

int ncclGetVersion(int *version) {
    const char *code = getenv("STUB_NCCL");
    *version = code ? atoi(code) : 23203;
    return 0;
}
const char *ncclGetErrorString(int code) { return code ? "an error" : "no error"; }
const char *ncclGetLastError(Comm *comm) { return ""; }
int ncclGetUniqueId(void *id) { memset(id, 42, 128); return 0; }

int ncclCommInitRankScalable(Comm **comm, int n_ranks, int rank, int n_ids, void *ids,
                             void *config) {
    *comm = malloc(sizeof **comm);
    **comm = (Comm){rank, n_ranks, 0};
    return 0;
}
int ncclCommGetAsyncError(Comm *comm, int *state) { *state = 0; return 0; }
int ncclCommCount(Comm *comm, int *n) { *n = comm->n_ranks; return 0; }
int ncclCommUserRank(Comm *comm, int *rank) { *rank = comm->rank; return 0; }
int ncclCommCuDevice(Comm *comm, int *ordinal) { return cuCtxGetDevice(ordinal); }
static volatile int aborted;
int ncclCommFinalize(Comm *comm) {
    while (getenv("STUB_STUCK") && !aborted) usleep(1000);
    return 0;
}
int ncclCommDestroy(Comm *comm) { free(comm); return 0; }
int ncclCommAbort(Comm *comm) { aborted = 1; return 0; }

int ncclMemAlloc(void **memory, size_t bytes) {
    *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return 0;
}
int ncclMemFree(void *memory) { free(memory); return 0; }
int ncclCommWindowRegister(Comm *comm, void *memory, size_t bytes, void **window, int flags) {
    call(comm);
    *window = memory;
    return 0;
}
int ncclCommWindowDeregister(Comm *comm, void *window) { call(comm); return 0; }

typedef struct { size_t size; unsigned magic, version; float estimatedTime; } SimInfo;
static int n_all_reduces;
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { return 0; }
int ncclAllReduce(void *send, void *recv, size_t count, int type, int op, Comm *comm,
                  void *stream) {
    call(comm);
    n_all_reduces++;
    return 0;
}
// The estimate is the number of operations, in halves.
int ncclGroupSimulateEnd(SimInfo *info) { info->estimatedTime = n_all_reduces * 0.5f; return 0; }

// Logical endpoints: the number encodes the arguments.
typedef struct { int n_ranks, rank, stride; } Team;
int ncclGetPeerDeviceLeInfo(void *window, size_t offset, int peer, unsigned *id, size_t *at) {
    *id = 100 + peer;
    *at = offset;
    return 0;
}
int ncclGetCftDeviceLeInfo(void *window, size_t offset, int rank, Team team, unsigned *id,
                           size_t *at) {
    *id = 1000 * team.n_ranks + 100 * team.rank + 10 * team.stride + rank;
    *at = offset;
    return 0;
}
// The world's rank is this rank's, which is 0, plus the distance from it in the team.
int ncclTeamRankToWorld(Comm *comm, Team team, int rank) {
    return (rank - team.rank) * team.stride;
}
int ncclTeamRankToLsa(Comm *comm, Team team, int rank) {
    return (rank - team.rank) * team.stride;
}
int ncclGetMultimemDeviceLeInfo(void *window, size_t offset, unsigned *id, size_t *at) {
    *id = 7;
    *at = offset;
    return 0;
}
