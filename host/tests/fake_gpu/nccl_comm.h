// Communicators: how ranks meet, groups, and the life of a communicator.
#include "fake.h"

enum { MAX_RANKS = 16, MAX_WINDOWS = 64, MAX_OPS = 16, CONTEXTS = 4, SIGNALS = 16 };
enum { FAILED = 2, INTERNAL = 3, INVALID = 4, USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
typedef struct { char bytes[128]; } UniqueId;
typedef struct Window Window;
typedef struct Round Round;
typedef struct Send Send;

// The ranks of a communicator.
typedef struct Comm Comm;
typedef struct World {
    struct World *next;
    UniqueId id;
    int n_ranks;
    Comm *comms[MAX_RANKS];
    Round *rounds;
    Send *sends;
} World;
struct Comm {
    int alive, rank, n_ranks, device, blocking, revoked, suspended, finalized, pending, polls, failed;
    World *world;
    // `epoch` counts what ends operations that are under way.
    long host_seq, stream_seq, grow_seq, epoch;
    int n_windows, n_ops;
    Window *windows[MAX_WINDOWS];
    struct { int live, type, on_device; const void *at; double scalar; } ops[MAX_OPS];
    int signals[MAX_RANKS][CONTEXTS][SIGNALS];
};
typedef struct {
    size_t size; unsigned magic, version;
    int blocking, cga, min_ctas, max_ctas; const char *net_name; int split_share, traffic_class; const char *comm_name;
    int rest[16];
} Config;

static World *worlds;
static long aborts[MAX_RANKS];
static _Thread_local char last_error[256];
static int alone(void) { return getenv("WORLD_SIZE") != NULL; }

// Switches and checks.
static int named(const char *switch_name, const char *function, int rank) {
    const char *list = getenv(switch_name);
    size_t length = strlen(function);
    for (; list && *list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL) {
        if (strncmp(list, function, length)) continue;
        char end = list[length];
        if (end == 0 || end == ',' || (end == ':' && atoi(list + length + 1) == rank)) return 1;
    }
    return 0;
}
static int fail(int code, const char *function, const char *why) {
    snprintf(last_error, sizeof last_error, "%s: %s", function, why);
    return code;
}
static int enter_as(const char *function, int rank) {
    if (named("FAKE_FAIL", function, rank)) return fail(FAILED, function, "FAKE_FAIL");
    if (!named("FAKE_HANG_IN", function, rank) || rank < 0 || rank >= MAX_RANKS) return 0;
    pthread_mutex_lock(&fake_lock);
    for (long before = aborts[rank]; aborts[rank] == before;) pthread_cond_wait(&fake_changed, &fake_lock);
    pthread_mutex_unlock(&fake_lock);
    return fail(INTERNAL, function, "aborted");
}
static int enter(const char *function, Comm *comm) {
    if (!comm) return fail(INVALID, function, "comm is NULL");
    if (!comm->alive) {
        fake_log("%s AFTER ITS END", function);
        return fail(INVALID, function, "the communicator has ended");
    }
    return enter_as(function, comm->rank);
}
#define ENTER(function, comm) do { int refused = enter(function, comm); if (refused) return group_code(refused); } while (0)
#define ENTER_AS(function, rank) do { int refused = enter_as(function, rank); if (refused) return group_code(refused); } while (0)

// Ranks meet: each brings its argument, the last one runs `run` over all of them.
struct Round { Round *next; int lane; long seq; int expected, arrived, done; void *args[MAX_RANKS]; };
enum { OPERATIONS, CALLS, JOIN, GROW };

// Under the lock. `run` may need what the other ranks brought; absent ranks brought the same.
static Round *arrive(World *world, int lane, long seq, int rank, int expected, void *arg, void (*run)(World *, Round *)) {
    Round *round = world->rounds;
    while (round && (round->lane != lane || round->seq != seq)) round = round->next;
    if (!round) {
        round = calloc(1, sizeof *round);
        *round = (Round){world->rounds, lane, seq, alone() ? 1 : expected};
        world->rounds = round;
    }
    round->args[rank] = arg;
    if (++round->arrived == round->expected) {
        if (alone())
            for (int r = 0; r < world->n_ranks; r++) round->args[r] = arg;
        if (run) run(world, round);
        round->done = 1;
        pthread_cond_broadcast(&fake_changed);
    }
    return round;
}
static int await_round(Comm *comm, long epoch, Round *round, int rank) {
    while (!round->done && comm->epoch == epoch) pthread_cond_wait(&fake_changed, &fake_lock);
    if (!round->done) round->args[rank] = NULL, round->arrived--;
    return round->done ? 0 : INTERNAL;
}
static int meet(Comm *comm, World *world, int lane, long seq, int rank, int expected, void *arg, void (*run)(World *, Round *)) {
    pthread_mutex_lock(&fake_lock);
    Round *round = arrive(world, lane, seq, rank, expected, arg, run);
    int code = await_round(comm, comm->epoch, round, rank);
    pthread_mutex_unlock(&fake_lock);
    return code;
}

// Calls that wait for other ranks are tasks: made at once, at the end of the group, or in the background.
typedef struct Task {
    struct Task *next;
    int (*run)(struct Task *);
    Comm *comm, *made, **out;
    long seq;
    int code, device, numbers[4], excluded[MAX_RANKS];
    void *pointers[2];
} Task;
typedef struct Batch Batch;
static _Thread_local int depth, group_failed, group_busy;
static _Thread_local Task *tasks;
static void submit_operations(int discard);

// A call that fails in a group makes the group fail.
static int group_code(int code) {
    if (depth && code && code != IN_PROGRESS && !group_failed) group_failed = code;
    return code;
}
static void *in_background(void *argument) {
    Task *task = argument;
    Comm *comm = task->comm;
    int code = task->run(task);
    pthread_mutex_lock(&fake_lock);
    task->code = code;
    Comm *both[] = {comm, task->made};
    for (int i = 0; i < 2; i++)
        if (both[i] && (i == 0 || both[0] != both[1])) {
            both[i]->pending--, both[i]->polls = 3;
            if (code && !both[i]->failed) both[i]->failed = code;
        }
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
    return NULL;
}
static pthread_t spawn(Task *task) {
    pthread_t thread;
    pthread_mutex_lock(&fake_lock);
    task->comm->pending++;
    if (task->made && task->made != task->comm) task->made->pending++;
    pthread_mutex_unlock(&fake_lock);
    pthread_create(&thread, NULL, in_background, task);
    return thread;
}
static int is_blocking(Task *task) { return task->comm->blocking && (!task->made || task->made->blocking); }
static int start(Task task) {
    Task *own = memcpy(malloc(sizeof task), &task, sizeof task);
    if (depth) {
        Task **last = &tasks;
        while (*last) last = &(*last)->next;
        *last = own;
        return 0;
    }
    if (is_blocking(own)) return own->run(own);
    pthread_detach(spawn(own));
    return IN_PROGRESS;
}
// What a call on a live communicator returns.
static int answer(Comm *comm) {
    if (comm->blocking) return 0;
    comm->polls = 3;
    if (depth) group_busy = 1;
    return depth ? 0 : IN_PROGRESS;
}

int ncclGroupStart(void) { ENTER_AS("ncclGroupStart", fake_device()); depth++; fake_log("ncclGroupStart"); return 0; }
static int end_group(int discard) {
    if (depth == 0) return USAGE;
    if (--depth) return 0;
    int code = group_failed, busy = group_busy;
    Task *first = tasks;
    tasks = NULL, group_failed = group_busy = 0;
    if (code || discard) first = NULL;
    pthread_t threads[64];
    int n = 0;
    for (Task *task = first; task; task = task->next) threads[n++] = spawn(task);
    n = 0;
    for (Task *task = first; task; task = task->next, n++)
        if (is_blocking(task)) {
            pthread_join(threads[n], NULL);
            if (task->comm->alive) task->comm->polls = 0;
            if (task->made) task->made->polls = 0;
            if (task->code && !code) code = task->code;
        } else {
            pthread_detach(threads[n]);
            busy = 1;
        }
    submit_operations(code || discard);
    return code ? code : busy && !discard ? IN_PROGRESS : 0;
}
int ncclGroupEnd(void) {
    fake_log("ncclGroupEnd");
    int refused = enter_as("ncclGroupEnd", fake_device());
    int code = end_group(refused);
    return refused ? refused : code;
}

// Making communicators.
static Comm *new_comm(World *world, int rank, int n_ranks, const Config *config) {
    Comm *comm = calloc(1, sizeof *comm);
    *comm = (Comm){.alive = 1, .rank = rank, .n_ranks = n_ranks, .device = fake_device(), .blocking = 1, .world = world};
    if (config && config->blocking == 0) comm->blocking = 0;
    return comm;
}
static World *new_world(const UniqueId *id, int n_ranks) {
    World *world = calloc(1, sizeof *world);
    *world = (World){.next = worlds, .n_ranks = n_ranks};
    if (id) world->id = *id;
    return worlds = world;
}
// The settings that tests look at.
static const char *described(const Config *c) {
    static _Thread_local char text[160];
    int used = 0;
    text[0] = 0;
    if (!c) return text;
#define SHOW(format, value) used += snprintf(text + used, sizeof text - used, "%s " format, used ? "" : " config", value)
    if (c->blocking != INT_MIN) SHOW("blocking %d", c->blocking);
    if (c->min_ctas != INT_MIN) SHOW("min_ctas %d", c->min_ctas);
    if (c->max_ctas != INT_MIN) SHOW("max_ctas %d", c->max_ctas);
    if (c->net_name) SHOW("net %.20s", c->net_name);
    if (c->comm_name) SHOW("name %.40s", c->comm_name);
#undef SHOW
    return text;
}
static int bad_config(const Config *c) { return c && (c->size != 120 || c->magic != 0xcafebeef); }
static int bad_id(const UniqueId *id) { return id->bytes[0] != 42 || id->bytes[127] != 42; }

static long ids;
static void fill_id(UniqueId *id) {
    memset(id, 42, sizeof *id);
    long numbers[2] = {getpid(), __atomic_add_fetch(&ids, 1, __ATOMIC_RELAXED)};
    memcpy(id->bytes + 8, numbers, sizeof numbers);
}
int ncclGetUniqueId(UniqueId *id) { ENTER_AS("ncclGetUniqueId", fake_device()); fill_id(id); return 0; }

static int join(Task *task) { return meet(task->comm, task->comm->world, JOIN, 0, task->comm->rank, task->comm->n_ranks, task, NULL); }
static int init(const char *function, Comm **out, int n_ranks, const UniqueId *id, int rank, const Config *config, int n_ids) {
    char many[24] = "";
    if (n_ids > 1) snprintf(many, sizeof many, " ids %d", n_ids);
    fake_log("%s %d of %d%s%s", function, rank, n_ranks, many, described(config));
    ENTER_AS(function, rank);
    if (rank < 0 || rank >= n_ranks || n_ranks > MAX_RANKS || bad_id(id) || bad_config(config))
        return group_code(fail(INVALID, function, "invalid argument"));
    pthread_mutex_lock(&fake_lock);
    World *world = worlds;
    while (world && memcmp(&world->id, id, sizeof *id)) world = world->next;
    if (!world) world = new_world(id, n_ranks);
    Comm *comm = new_comm(world, rank, n_ranks, config);
    int taken = world->comms[rank] != NULL || world->n_ranks != n_ranks;
    if (!taken) world->comms[rank] = comm;
    pthread_mutex_unlock(&fake_lock);
    if (taken) return group_code(fail(INVALID, function, "the rank is taken, or the numbers of ranks differ"));
    *out = comm;
    return start((Task){.run = join, .comm = comm, .made = comm});
}
int ncclCommInitRank(Comm **comm, int n_ranks, UniqueId id, int rank) {
    return init("ncclCommInitRank", comm, n_ranks, &id, rank, NULL, 1);
}
int ncclCommInitRankConfig(Comm **comm, int n_ranks, UniqueId id, int rank, Config *config) {
    return init("ncclCommInitRankConfig", comm, n_ranks, &id, rank, config, 1);
}
int ncclCommInitRankScalable(Comm **comm, int n_ranks, int rank, int n_ids, UniqueId *id, Config *config) {
    if (n_ids < 1) return INVALID;
    return init("ncclCommInitRankScalable", comm, n_ranks, id, rank, config, n_ids);
}
int ncclCommInitAll(Comm **comms, int n, const int *devices) {
    fake_log("ncclCommInitAll %d", n);
    ENTER_AS("ncclCommInitAll", fake_device());
    if (n < 1 || n > MAX_RANKS) return INVALID;
    pthread_mutex_lock(&fake_lock);
    World *world = new_world(NULL, n);
    for (int r = 0; r < n; r++) {
        comms[r] = world->comms[r] = new_comm(world, r, n, NULL);
        comms[r]->device = devices ? devices[r] : r;
    }
    pthread_mutex_unlock(&fake_lock);
    return 0;
}

// Children. The last rank to come makes the worlds; a task's `numbers` are color and key, and `made` is its communicator.
static void move_in(World *world, Comm *comm, int rank) {
    world->comms[rank] = comm;
    comm->world = world, comm->rank = rank, comm->n_ranks = world->n_ranks;
}
static void divide(World *parent, Round *round) {
    if (alone()) {
        Task *task = round->args[0];
        World *world = new_world(NULL, parent->n_ranks);
        move_in(world, task->made, task->comm->rank);
        return;
    }
    for (int r = 0; r < parent->n_ranks; r++) {
        Task *first = round->args[r];
        if (!first || first->made->world || first->numbers[0] == -1) continue;
        Task *members[MAX_RANKS];
        int n = 0;
        // By key, and by rank where keys are equal.
        for (int s = 0; s < parent->n_ranks; s++) {
            Task *task = round->args[s];
            if (!task || task->numbers[0] != first->numbers[0]) continue;
            int at = n++;
            for (; at > 0 && members[at - 1]->numbers[1] > task->numbers[1]; at--) members[at] = members[at - 1];
            members[at] = task;
        }
        World *world = new_world(NULL, n);
        for (int i = 0; i < n; i++) move_in(world, members[i]->made, i);
    }
}
static int split(Task *task) {
    Comm *comm = task->comm;
    int code = meet(comm, comm->world, CALLS, task->seq, comm->rank, task->numbers[2], task, divide);
    if (task->numbers[0] == -1 || code) *task->out = NULL;
    return code;
}
static int child(Comm *comm, int color, int key, int expected, Comm **out, const Config *config) {
    Comm *made = new_comm(NULL, 0, 0, config);
    made->device = comm->device;
    if (!config || config->blocking == INT_MIN) made->blocking = comm->blocking;
    *out = color == -1 ? NULL : made;
    return start((Task){.run = split, .comm = comm, .made = made, .out = out, .seq = comm->host_seq++, .numbers = {color, key, expected}});
}
int ncclCommSplit(Comm *comm, int color, int key, Comm **out, Config *config) {
    fake_log("ncclCommSplit color %d key %d%s", color, key, described(config));
    ENTER("ncclCommSplit", comm);
    if (color < -1 || bad_config(config)) return group_code(fail(INVALID, "ncclCommSplit", "invalid argument"));
    return child(comm, color, key, comm->n_ranks, out, config);
}
static void stop(Comm *comm) {
    pthread_mutex_lock(&fake_lock);
    comm->epoch++;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
}
int ncclCommShrink(Comm *comm, int *excluded, int n, Comm **out, Config *config, int flags) {
    fake_log("ncclCommShrink without %d from %d flags %d%s", n, n ? excluded[0] : -1, flags, described(config));
    ENTER("ncclCommShrink", comm);
    if (n < 1 || n >= comm->n_ranks || bad_config(config)) return INVALID;
    for (int i = 0; i < n; i++)
        if (excluded[i] == comm->rank || excluded[i] < 0 || excluded[i] >= comm->n_ranks) return INVALID;
    if (flags == 1) stop(comm);
    return child(comm, 0, 0, comm->n_ranks - n, out, config);
}

// An id for growing names the world and how often it has grown.
int ncclCommGetUniqueId(Comm *comm, UniqueId *id) {
    fake_log("ncclCommGetUniqueId");
    ENTER("ncclCommGetUniqueId", comm);
    fill_id(id);
    memcpy(id->bytes + 32, &comm->world, sizeof comm->world);
    memcpy(id->bytes + 40, &comm->grow_seq, sizeof comm->grow_seq);
    return 0;
}
static void enlarge(World *parent, Round *round) {
    World *world = new_world(NULL, round->expected);
    for (int r = 0; r < round->expected; r++) {
        Task *task = round->args[r];
        if (task) move_in(world, task->made, r);
    }
}
static int grow(Task *task) {
    if (alone()) return INVALID;
    return meet(task->comm, task->pointers[0], GROW, task->seq, task->numbers[0], task->numbers[1], task, enlarge);
}
int ncclCommGrow(Comm *comm, int n_ranks, const UniqueId *id, int rank, Comm **out, Config *config) {
    fake_log("ncclCommGrow to %d rank %d%s%s%s", n_ranks, rank, id ? " with id" : "", comm ? "" : " new", described(config));
    if (comm) ENTER("ncclCommGrow", comm);
    else ENTER_AS("ncclCommGrow", rank);
    if ((!comm && (!id || rank < 0)) || (comm && rank != -1) || n_ranks > MAX_RANKS || bad_config(config)) return INVALID;
    Comm *made = *out = new_comm(NULL, rank, n_ranks, config);
    Task task = {.run = grow, .comm = comm ? comm : made, .made = made, .numbers = {comm ? comm->rank : rank, n_ranks}};
    if (comm) {
        task.pointers[0] = comm->world, task.seq = comm->grow_seq++;
        made->device = comm->device;
    } else {
        memcpy(&task.pointers[0], id->bytes + 32, sizeof(void *));
        memcpy(&task.seq, id->bytes + 40, sizeof task.seq);
    }
    return start(task);
}

// Ends.
int ncclCommFinalize(Comm *comm) {
    fake_log("ncclCommFinalize");
    ENTER("ncclCommFinalize", comm);
    if (comm->revoked || comm->finalized) return fail(USAGE, "ncclCommFinalize", "revoked or finalized before");
    comm->finalized = 1;
    return answer(comm);
}
int ncclCommDestroy(Comm *comm) {
    fake_log("ncclCommDestroy");
    ENTER("ncclCommDestroy", comm);
    comm->alive = 0;
    return 0;
}
// Comes from any thread: NCCL goes to the communicator's GPU by itself.
int ncclCommAbort(Comm *comm) {
    fake_log_of(comm ? comm->device : -1, "ncclCommAbort");
    ENTER("ncclCommAbort", comm);
    pthread_mutex_lock(&fake_lock);
    comm->alive = 0, comm->epoch++, aborts[comm->rank]++;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
    // NCCL waits for its GPU.
    fake_await_kernels(comm->device);
    return 0;
}
int ncclCommRevoke(Comm *comm, int flags) {
    fake_log("ncclCommRevoke flags %d", flags);
    ENTER("ncclCommRevoke", comm);
    if (flags) return INVALID;
    comm->revoked = 1;
    stop(comm);
    return answer(comm);
}
int ncclCommSuspend(Comm *comm, int flags) {
    fake_log("ncclCommSuspend flags %d", flags);
    ENTER("ncclCommSuspend", comm);
    if (flags != 1 || comm->suspended) return INVALID;
    comm->suspended = 1;
    return answer(comm);
}
int ncclCommResume(Comm *comm) {
    fake_log("ncclCommResume");
    ENTER("ncclCommResume", comm);
    if (!comm->suspended) return USAGE;
    comm->suspended = 0;
    return answer(comm);
}
