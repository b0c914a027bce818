// What is asked of a communicator, teams, device communicators, parameters.

const char banner[] = "NCCL version 2.32.3+cuda13.4";
int ncclGetVersion(int *version) {
    const char *code = getenv("FAKE_VERSION");
    *version = code ? atoi(code) : 23203;
    return 0;
}
const char *ncclGetErrorString(int code) { return code ? "an error" : "no error"; }
const char *ncclGetLastError(Comm *comm) { return last_error; }
void ncclResetDebugInit(void) { fake_log("ncclResetDebugInit"); }
typedef struct { size_t size; unsigned magic, version; int mode; const char *key; } Encryption;
int ncclSetEncryption(const Encryption *config) {
    fake_log("ncclSetEncryption mode %d", config->mode);
    return config->size == 32 && config->magic == 0xcafebeef ? 0 : INVALID;
}
static int number(const char *name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }

int ncclCommGetAsyncError(Comm *comm, int *state) {
    ENTER("ncclCommGetAsyncError", comm);
    const char *text = getenv("FAKE_ASYNC_ERROR"), *rank = text ? strchr(text, ':') : NULL;
    if (fake_kernels_wait(comm->device)) text = getenv("FAKE_ASYNC_ERROR_SPINNING");
    pthread_mutex_lock(&fake_lock);
    if (text && (!rank || atoi(rank + 1) == comm->rank)) *state = atoi(text);
    else if (comm->pending) *state = IN_PROGRESS;
    else if (comm->failed) *state = comm->failed;
    else *state = comm->polls > 0 ? comm->polls--, IN_PROGRESS : 0;
    pthread_mutex_unlock(&fake_lock);
    return 0;
}
int ncclCommCount(Comm *comm, int *n) { ENTER("ncclCommCount", comm); *n = comm->n_ranks; return 0; }
int ncclCommUserRank(Comm *comm, int *rank) { ENTER("ncclCommUserRank", comm); *rank = comm->rank; return 0; }
int ncclCommCuDevice(Comm *comm, int *device) { ENTER("ncclCommCuDevice", comm); *device = comm->device; return 0; }
int ncclCommMemStats(Comm *comm, int stat, uint64_t *value) {
    ENTER("ncclCommMemStats", comm);
    if (stat < 0 || stat > 3) return INVALID;
    *value = stat == 1 ? (uint64_t)comm->suspended : (uint64_t[]){1 << 20, 0, 2 << 20, 3 << 20}[stat];
    return 0;
}
typedef struct {
    size_t size; unsigned magic, version;
    int rank, n_ranks, cuda_dev, nvml_dev; char device_api, multimem; int gin, n_lsa_teams; char host_rma; int railed_gin;
    uint64_t hash; int min_stride, connection; char gin_support[64]; size_t runtime_size; char cft, cft_multicast, cft_counted;
} Properties;
int ncclCommQueryProperties(Comm *comm, Properties *p) {
    ENTER("ncclCommQueryProperties", comm);
    if (p->size != 152 || p->magic != 0xcafebeef || p->version != 23203) return USAGE;
    p->rank = comm->rank, p->n_ranks = comm->n_ranks, p->cuda_dev = p->nvml_dev = comm->device;
    p->device_api = !getenv("FAKE_NO_DEVICE_API"), p->multimem = !!getenv("FAKE_MULTIMEM");
    p->host_rma = !getenv("FAKE_NO_HOST_RMA");
    p->n_lsa_teams = (comm->n_ranks + lsa_size(comm) - 1) / lsa_size(comm);
    p->gin = number("FAKE_GIN_TYPE", 0), p->railed_gin = number("FAKE_RAILED_GIN_TYPE", p->gin);
    p->connection = number("FAKE_GIN_CONNECTION", p->gin ? 1 : p->railed_gin ? 2 : 0);
    p->min_stride = number("FAKE_GIN_STRIDE", 1);
    int support = number("FAKE_GIN_SUPPORT", (p->gin ? 1 << p->gin : 0) | (p->railed_gin ? 1 << p->railed_gin : 0));
    for (int type = 0; type < 64; type++) p->gin_support[type] = type < 31 && (support >> type & 1);
    p->hash = (uintptr_t)comm->world, p->runtime_size = 248;
    p->cft = p->cft_multicast = p->cft_counted = !!getenv("FAKE_CFT");
    return 0;
}

Team ncclTeamWorld(Comm *comm) { return (Team){comm->n_ranks, comm->rank, 1}; }
Team ncclTeamLsa(Comm *comm) { return (Team){lsa_size(comm), comm->rank % lsa_size(comm), 1}; }
Team ncclTeamRail(Comm *comm) {
    int size = lsa_size(comm);
    return (Team){comm->n_ranks / size, comm->rank / size, size};
}
Team ncclTeamCft(Comm *comm, int mode) { return mode == 2 ? ncclTeamRail(comm) : ncclTeamWorld(comm); }
Team ncclTeamCftMultimem(Comm *comm) { return ncclTeamLsa(comm); }
int ncclTeamRankToWorld(Comm *comm, Team team, int rank) { return comm->rank + (rank - team.rank) * team.stride; }
int ncclTeamRankToLsa(Comm *comm, Team team, int rank) {
    return comm->rank % lsa_size(comm) + (rank - team.rank) * team.stride;
}

// Device communicators.
typedef struct Resource {
    struct Resource *next; size_t bytes, align; uint32_t *buffer; int signals, counters; uint32_t *first_signal, *first_counter;
} Resource;
typedef struct TeamNode { struct TeamNode *next; Team team; char multimem; uint64_t *handle; } TeamNode;
typedef struct {
    size_t size; unsigned magic, version; Resource *resources; TeamNode *teams; char multimem;
    int barriers, lsa_barriers, rail_barriers, ll_blocks, ll_slots; char gin_force; int contexts, signals, counters, connection;
    char exclusive; int queue_depth, traffic_class, world_barriers; char strong, va; int stride, gin_type; char runtime; int cft, cft_barriers;
} Requirements;
static int create_dev_comm(Task *task) {
    Comm *comm = task->comm;
    int code = meet(comm, comm->world, CALLS, task->seq, comm->rank, comm->n_ranks, task, NULL), *out = task->pointers[0];
    if (code) return code;
    Requirements *r = task->pointers[1];
    size_t buffer = 1024;
    uint32_t signals = r->signals, counters = r->counters;
    for (Resource *node = r->resources; node; node = node->next) {
        if (node->buffer) *node->buffer = buffer / 128;
        if (node->first_signal) *node->first_signal = signals;
        if (node->first_counter) *node->first_counter = counters;
        buffer += (node->bytes + 127) / 128 * 128, signals += node->signals, counters += node->counters;
    }
    int team = 0;
    for (TeamNode *node = r->teams; node; node = node->next, team++)
        if (node->handle) *node->handle = node->multimem ? (uint64_t)(2 + team) << 60 : 0;
    memset(out, 0, 248);
    out[0] = 0xcafebeef, out[1] = 23203, out[2] = comm->rank, out[3] = comm->n_ranks;
    out[20 / 4] = comm->rank % lsa_size(comm), out[24 / 4] = lsa_size(comm), out[84 / 4] = r->lsa_barriers;
    out[136 / 4] = signals, out[140 / 4] = counters, out[152 / 4] = r->connection ? r->contexts : 0;
    if (r->connection) {
        char *count = (char *)out + 96, *types = (char *)out + 98;
        const char *list = getenv("FAKE_GIN_CONNECTIONS");
        if (!list) types[(*count)++] = number("FAKE_GIN_TYPE", number("FAKE_RAILED_GIN_TYPE", 0));
        for (; list && *count < 4; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL) types[(*count)++] = atoi(list);
    }
    if (r->multimem && getenv("FAKE_MULTIMEM")) ((uint64_t *)out)[72 / 8] = 1ul << 60;
    return 0;
}
int ncclDevCommCreate(Comm *comm, const Requirements *r, int *out) {
    int resources = 0, teams = 0;
    for (Resource *node = r->resources; node; node = node->next) resources++;
    for (TeamNode *node = r->teams; node; node = node->next) teams++;
    char lists[48] = "";
    if (resources || teams) snprintf(lists, sizeof lists, " %d resources %d teams", resources, teams);
    fake_log("ncclDevCommCreate %d barriers%s", r->lsa_barriers, lists);
    ENTER("ncclDevCommCreate", comm);
    if (r->size != 120 || r->magic != 0xcafebeef || r->version != 23203) return group_code(USAGE);
    // The lists are copied with the call; where results go is not.
    Requirements *own = memcpy(malloc(sizeof *r), r, sizeof *r);
    for (Resource **link = &own->resources; *link; link = &(*link)->next) *link = memcpy(malloc(sizeof **link), *link, sizeof **link);
    for (TeamNode **link = &own->teams; *link; link = &(*link)->next) *link = memcpy(malloc(sizeof **link), *link, sizeof **link);
    return start((Task){.run = create_dev_comm, .comm = comm, .seq = comm->host_seq++, .pointers = {out, own}});
}
int ncclDevCommDestroy(Comm *comm, const int *dev) {
    fake_log("ncclDevCommDestroy");
    ENTER("ncclDevCommDestroy", comm);
    // As it was made, without a flag.
    return dev[0] == (int)0xcafebeef && !dev[168 / 4] && !dev[172 / 4] ? 0 : INVALID;
}
int ncclLsaBarrierCreateRequirement(Team team, int n, uint32_t *handle, Resource *out) {
    *out = (Resource){.bytes = (3ul * n + (size_t)n * team.n_ranks) * 4, .align = 4, .buffer = handle};
    handle[1] = n;
    return 0;
}
int ncclGinBarrierCreateRequirement(Comm *comm, Team team, int n, uint32_t *handle, Resource *out) {
    *out = (Resource){.signals = n * team.n_ranks, .first_signal = handle};
    return 0;
}
int ncclLLA2ACalcSlots(int elements, int bytes) { return elements * ((bytes + 7) / 8); }
int ncclLLA2ACreateRequirement(int blocks, int slots, uint32_t *handle, Resource *out) {
    *out = (Resource){.bytes = blocks * (1 + 2ul * slots) * 16, .align = 16, .buffer = handle};
    handle[1] = slots;
    return 0;
}

// Parameters: one text, one number.
static const char *keys[] = {"NCCL_DEBUG", "NCCL_FAKE"};
static const char *value_of(const char *key) {
    const char *set = getenv("NCCL_DEBUG");
    return !strcmp(key, keys[0]) ? (set ? set : "NONE") : !strcmp(key, keys[1]) ? "7" : NULL;
}
int ncclParamGetAllParameterKeys(const char ***table, int *n) { *table = keys, *n = 2; return 0; }
int ncclParamGetParameter(const char *key, const char **value, int *length) {
    if (!(*value = value_of(key))) return INVALID;
    *length = strlen(*value);
    return 0;
}
void ncclParamDumpAll(void) { fake_log("ncclParamDumpAll"); }
int ncclParamBind(const char **handle, const char *key) { return (*handle = value_of(key)) ? 0 : INVALID; }
int ncclParamGetStr(const char *handle, const char **out) { *out = handle; return 0; }
int ncclParamGet(const char *handle, void *out, int most, int *length) {
    *length = strlen(handle);
    if (*length > most) return INVALID;
    memcpy(out, handle, *length);
    return 0;
}
#define TYPED(NAME, TYPE) \
    int ncclParamGet##NAME(const char *handle, TYPE *out) { \
        char *end; \
        *out = (TYPE)strtoll(handle, &end, 10); \
        return end == handle || *end ? INVALID : 0; \
    }
TYPED(I8, int8_t)
TYPED(I16, int16_t)
TYPED(I32, int32_t)
TYPED(I64, int64_t)
TYPED(U8, uint8_t)
TYPED(U16, uint16_t)
TYPED(U32, uint32_t)
TYPED(U64, uint64_t)
