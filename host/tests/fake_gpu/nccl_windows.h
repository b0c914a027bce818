// Memory, registered buffers, windows and the addresses in them.

int ncclMemAlloc(void **memory, size_t bytes) {
    fake_log("ncclMemAlloc %zu", bytes);
    ENTER_AS("ncclMemAlloc", fake_device());
    if (bytes > (size_t)1 << 40) return fail(1, "ncclMemAlloc", "out of memory");
    *memory = fake_alloc(bytes);
    return 0;
}
int ncclMemFree(void *memory) {
    fake_log("ncclMemFree");
    ENTER_AS("ncclMemFree", fake_device());
    return fake_free(memory) ? 0 : fail(INVALID, "ncclMemFree", "not allocated");
}
int ncclCommRegister(Comm *comm, void *memory, size_t bytes, void **handle) {
    fake_log("ncclCommRegister %zu", bytes);
    ENTER("ncclCommRegister", comm);
    *handle = calloc(1, 1);
    return 0;
}
int ncclCommDeregister(Comm *comm, void *handle) {
    fake_log("ncclCommDeregister");
    ENTER("ncclCommDeregister", comm);
    free(handle);
    return 0;
}

static int register_window(Task *task) {
    Comm *comm = task->comm;
    int code = meet(comm, comm->world, CALLS, task->seq, comm->rank, comm->n_ranks, task, NULL);
    *(Window **)task->pointers[0] = code || getenv("FAKE_NO_WINDOW") ? NULL : task->pointers[1];
    return code;
}
int ncclCommWindowRegister(Comm *comm, void *memory, size_t bytes, Window **window, int flags) {
    fake_log("ncclCommWindowRegister %zu flags %d", bytes, flags);
    ENTER("ncclCommWindowRegister", comm);
    if (comm->n_windows == MAX_WINDOWS || (uintptr_t)memory % 4096 || ((flags & 1) && (flags & 12)))
        return group_code(fail(INVALID, "ncclCommWindowRegister", "alignment, flags or too many"));
    Window *made = calloc(1, sizeof *made);
    *made = (Window){comm, memory, bytes, flags, 1, comm->n_windows};
    pthread_mutex_lock(&fake_lock);
    comm->windows[comm->n_windows++] = made;
    pthread_mutex_unlock(&fake_lock);
    return start((Task){.run = register_window, .comm = comm, .seq = comm->host_seq++, .pointers = {window, made}});
}
int ncclCommWindowDeregister(Comm *comm, Window *window) {
    fake_log("ncclCommWindowDeregister");
    ENTER("ncclCommWindowDeregister", comm);
    if (!window) return 0;
    if (!window->live || window->comm != comm) {
        fake_log("ncclCommWindowDeregister AFTER ITS END");
        return INVALID;
    }
    window->live = 0;
    return 0;
}
int ncclWinGetUserPtr(Comm *comm, Window *window, void **out) {
    ENTER("ncclWinGetUserPtr", comm);
    *out = window->memory;
    return 0;
}

// Teams of ranks that reach each other.
static int lsa_size(Comm *comm) {
    const char *size = getenv("FAKE_LSA_SIZE");
    int n = size ? atoi(size) : getenv("FAKE_TWO_TEAMS") ? comm->n_ranks / 2 : comm->n_ranks;
    return n < 1 ? 1 : n;
}
static int outside(const char *function, Window *window, size_t offset) {
    if (!window || !window->live) {
        fake_log("%s AFTER ITS END", function);
        return fail(INVALID, function, "no window");
    }
    return offset > window->bytes ? fail(INVALID, function, "offset") : enter_as(function, window->comm->rank);
}
static int address(Window *window, size_t offset, int peer, void **out) {
    Comm *comm = alone() ? window->comm : window->comm->world->comms[peer];
    *out = comm->windows[window->index]->memory + offset;
    return 0;
}
int ncclGetPeerDevicePointer(Window *window, size_t offset, int peer, void **out) {
    int code = outside("ncclGetPeerDevicePointer", window, offset);
    if (code) return code;
    Comm *comm = window->comm;
    *out = NULL;
    if (peer < 0 || peer >= comm->n_ranks) return INVALID;
    return peer / lsa_size(comm) == comm->rank / lsa_size(comm) ? address(window, offset, peer, out) : 0;
}
int ncclGetLsaDevicePointer(Window *window, size_t offset, int rank, void **out) {
    int code = outside("ncclGetLsaDevicePointer", window, offset);
    if (code) return code;
    int size = lsa_size(window->comm);
    if (rank < 0 || rank >= size) return INVALID;
    return address(window, offset, window->comm->rank / size * size + rank, out);
}
// Multicast addresses are far from all memory: 1 << 60, or the base of the handle.
int ncclGetLsaMultimemDevicePointer(Window *window, size_t offset, void **out) {
    int code = outside("ncclGetLsaMultimemDevicePointer", window, offset);
    if (!code) *out = getenv("FAKE_MULTIMEM") ? (void *)((1ul << 60) + offset) : NULL;
    return code;
}
int ncclGetMultimemDevicePointer(Window *window, size_t offset, char *base, void **out) {
    int code = outside("ncclGetMultimemDevicePointer", window, offset);
    if (code || !base) return code ? code : INVALID;
    *out = base + offset;
    return 0;
}
// Logical endpoints: 100 and the rank, 99 for multicast.
static int endpoint(const char *function, Window *window, size_t offset, int number, uint32_t *id, size_t *at) {
    int code = outside(function, window, offset);
    if (code) return code;
    if (!getenv("FAKE_CFT")) return fail(USAGE, function, "no CFT here");
    *id = number, *at = offset;
    return 0;
}
int ncclGetMultimemDeviceLeInfo(Window *window, size_t offset, uint32_t *id, size_t *at) {
    return endpoint("ncclGetMultimemDeviceLeInfo", window, offset, 99, id, at);
}
int ncclGetPeerDeviceLeInfo(Window *window, size_t offset, int peer, uint32_t *id, size_t *at) {
    return endpoint("ncclGetPeerDeviceLeInfo", window, offset, 100 + peer, id, at);
}
typedef struct { int n_ranks, rank, stride; } Team;
int ncclGetCftDeviceLeInfo(Window *window, size_t offset, int peer, Team team, uint32_t *id, size_t *at) {
    int rank = window->comm->rank + (peer - team.rank) * team.stride;
    return endpoint("ncclGetCftDeviceLeInfo", window, offset, 100 + rank, id, at);
}
