// Operations in streams: collectives, sends, puts and signals.

enum Kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV, PUT, WAIT };
typedef struct { int op_count, peer, signal, context; } WaitSignal;
typedef struct {
    enum Kind kind;
    Comm *comm;
    const char *name;
    const char *send;
    char *recv;
    size_t count;
    int type, op, root, context, signal;
    Window *window;
    size_t offset;
    WaitSignal *waits;
    long seq, epoch;
    void *under_way;
} Op;
// What one call or group puts into one stream.
struct Batch { Batch *next; Stream *stream; int n; Op ops[64]; };
struct Send { Send *next; int from, to, taken; const char *data; size_t bytes; };
struct Window { Comm *comm; char *memory; size_t bytes; int flags, live, index; };

static size_t size_of(int type) { return (size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}[type]; }

// Numbers. A small float has `e` bits of exponent and `m` of mantissa; f8e4m3 has no infinity.
static double power(int n) { double p = 1; for (; n > 0; n--) p *= 2; for (; n < 0; n++) p /= 2; return p; }
static double small_float(unsigned bits, int e, int m) {
    int exponent = bits >> m & ((1 << e) - 1), bias = (1 << (e - 1)) - 1;
    double fraction = (bits & ((1u << m) - 1)) / power(m);
    double value = exponent ? (1 + fraction) * power(exponent - bias) : fraction * power(1 - bias);
    return bits >> (e + m) & 1 ? -value : value;
}
static unsigned to_small_float(double value, int e, int m) {
    unsigned sign = value < 0, bias = (1 << (e - 1)) - 1;
    int exponent = 0, most = (1 << e) - (e == 4 ? 1 : 2);
    if (sign) value = -value;
    while (value >= power(exponent + 1) && exponent < most - (int)bias) exponent++;
    while (value < power(exponent) && exponent > 1 - (int)bias) exponent--;
    double scaled = value / power(exponent) * power(m);
    unsigned long mantissa = scaled, odd = mantissa & 1;
    if (scaled - mantissa > 0.5 || (scaled - mantissa == 0.5 && odd)) mantissa++;
    // A mantissa without its leading bit is a subnormal, and one that has grown a bit carries into the exponent.
    unsigned long bits = mantissa < 1ul << m ? mantissa : mantissa + ((unsigned long)(exponent + (int)bias - 1) << m);
    return (unsigned)bits | sign << (e + m);
}
static double get(const char *at, int type) {
    union { int8_t i8; uint8_t u8; int32_t i32; uint32_t u32; int64_t i64; uint64_t u64; uint16_t h; float f; double d; } v;
    memcpy(&v, at, size_of(type));
    switch (type) {
    case 0: return v.i8;
    case 1: return v.u8;
    case 2: return v.i32;
    case 3: return v.u32;
    case 4: return v.i64;
    case 5: return v.u64;
    case 6: return small_float(v.h, 5, 10);
    case 7: return v.f;
    case 8: return v.d;
    case 9: return small_float(v.h, 8, 7);
    case 10: return small_float(v.u8, 4, 3);
    default: return small_float(v.u8, 5, 2);
    }
}
static void put(char *at, int type, double value) {
    union { int8_t i8; uint8_t u8; int32_t i32; uint32_t u32; int64_t i64; uint64_t u64; uint16_t h; float f; double d; } v;
    int64_t whole = type < 6 ? (int64_t)value : 0;
    switch (type) {
    case 0: case 1: v.u8 = whole; break;
    case 2: case 3: v.u32 = whole; break;
    case 4: case 5: v.u64 = whole; break;
    case 6: v.h = to_small_float(value, 5, 10); break;
    case 7: v.f = value; break;
    case 8: v.d = value; break;
    case 9: v.h = to_small_float(value, 8, 7); break;
    case 10: v.u8 = to_small_float(value, 4, 3); break;
    default: v.u8 = to_small_float(value, 5, 2);
    }
    memcpy(at, &v, size_of(type));
}
static double scale_of(Op *op) {
    if (op->op < 5) return 1;
    int k = op->op - 5;
    return op->comm->ops[k].on_device ? get(op->comm->ops[k].at, op->type) : op->comm->ops[k].scalar;
}
static double combined(Op **ops, char **inputs, int n, size_t at) {
    int op = ops[0]->op, type = ops[0]->type;
    double all = 0;
    for (int r = 0; r < n; r++) {
        double x = get(inputs[r] + at * size_of(type), type) * scale_of(ops[r]);
        all = r == 0 ? x : op == 1 ? all * x : op == 2 ? (x > all ? x : all) : op == 3 ? (x < all ? x : all) : all + x;
    }
    return op == 4 ? all / n : all;
}

// The last rank to come does the work of all; inputs are copied first, since outputs may be in the same place.
static void collect(World *world, Round *round) {
    int n = world->n_ranks;
    Op **ops = (Op **)round->args, *op = ops[0];
    char *inputs[MAX_RANKS];
    for (int r = 0; r < n; r++)
        if (ops[r]->kind != op->kind || ops[r]->count != op->count || ops[r]->type != op->type || ops[r]->root != op->root ||
            (ops[r]->op != op->op && op->op < 5)) {
            fake_log("MISMATCH %s", op->name);
            for (int s = 0; s < n; s++) ops[s]->comm->failed = USAGE;
            return;
        }
    size_t bytes = op->count * size_of(op->type);
    int times = op->kind == REDUCE_SCATTER || op->kind == ALL_TO_ALL || op->kind == SCATTER ? n : 1;
    int one_way = op->kind == BROADCAST || op->kind == SCATTER;
    for (int r = 0; r < n; r++) {
        inputs[r] = malloc(bytes * times + 1);
        if (!one_way || r == op->root) memcpy(inputs[r], ops[r]->send, bytes * times);
    }
    for (int r = 0; r < n; r++) {
        // Absent ranks have no memory of their own.
        if (alone() && r != ops[0]->comm->rank) continue;
        char *out = ops[r]->recv;
        switch (op->kind) {
        case REDUCE:
            if (r != op->root) break; // fall through
        case ALL_REDUCE:
            for (size_t i = 0; i < op->count; i++) put(out + i * size_of(op->type), op->type, combined(ops, inputs, n, i));
            break;
        case REDUCE_SCATTER:
            for (size_t i = 0; i < op->count; i++)
                put(out + i * size_of(op->type), op->type, combined(ops, inputs, n, r * op->count + i));
            break;
        case BROADCAST: memcpy(out, inputs[op->root], bytes); break;
        case SCATTER: memcpy(out, inputs[op->root] + r * bytes, bytes); break;
        case ALL_TO_ALL:
            for (int s = 0; s < n; s++) memcpy(out + s * bytes, inputs[s] + r * bytes, bytes);
            break;
        case GATHER:
            if (r != op->root) break; // fall through
        default:
            for (int s = 0; s < n; s++) memcpy(out + s * bytes, inputs[s], bytes);
        }
    }
    for (int r = 0; r < n; r++) free(inputs[r]);
}

// Whether the communicator was aborted or revoked since.
static int is_cut(Op *op) { return op->comm->epoch != op->epoch; }
static Send *post(Op *op) {
    Send *send = calloc(1, sizeof *send);
    *send = (Send){NULL, op->comm->rank, op->root, alone(), op->send, op->count * size_of(op->type)};
    Send **last = &op->comm->world->sends;
    while (*last) last = &(*last)->next;
    pthread_cond_broadcast(&fake_changed);
    return *last = send;
}
static void receive(Op *op) {
    if (alone()) return;
    for (;;) {
        Send *send = op->comm->world->sends;
        while (send && (send->taken || send->from != op->root || send->to != op->comm->rank)) send = send->next;
        if (send) {
            if (send->bytes != op->count * size_of(op->type)) fake_log("MISMATCH %s", op->name);
            else memcpy(op->recv, send->data, send->bytes);
            send->taken = 1;
            pthread_cond_broadcast(&fake_changed);
            return;
        }
        if (is_cut(op)) return;
        pthread_cond_wait(&fake_changed, &fake_lock);
    }
}
static void put_data(Op *op) {
    Comm *peer = op->comm->world->comms[op->root];
    if (!peer) return;
    if (op->window) memcpy(peer->windows[op->window->index]->memory + op->offset, op->send, op->count * size_of(op->type));
    peer->signals[op->comm->rank][op->context][op->signal]++;
    pthread_cond_broadcast(&fake_changed);
}
static void await_signals(Op *op) {
    for (size_t i = 0; i < op->count; i++) {
        int *count = &op->comm->signals[op->waits[i].peer][op->waits[i].context][op->waits[i].signal];
        while (!alone() && *count < op->waits[i].op_count && !is_cut(op)) pthread_cond_wait(&fake_changed, &fake_lock);
        *count -= op->waits[i].op_count;
    }
}

static void submit_batch(void *argument) {
    Batch *batch = argument;
    pthread_mutex_lock(&fake_lock);
    for (int i = 0; i < batch->n; i++) {
        Comm *comm = batch->ops[i].comm;
        batch->ops[i].epoch = comm->epoch;
        if (batch->ops[i].kind < SEND) batch->ops[i].seq = comm->stream_seq++;
    }
    pthread_mutex_unlock(&fake_lock);
}
// Everything begins before anything is waited for.
static void run_batch(void *argument) {
    Batch *batch = argument;
    pthread_mutex_lock(&fake_lock);
    for (int i = 0; i < batch->n; i++) {
        Op *op = &batch->ops[i];
        if (is_cut(op)) continue;
        if (op->kind < SEND)
            op->under_way = arrive(op->comm->world, OPERATIONS, op->seq, op->comm->rank, op->comm->n_ranks, op, collect);
        else if (op->kind == SEND) op->under_way = post(op);
        else if (op->kind == PUT) put_data(op);
    }
    for (int i = 0; i < batch->n; i++) {
        Op *op = &batch->ops[i];
        if (op->kind == RECV) receive(op);
        else if (op->kind == WAIT) await_signals(op);
    }
    for (int i = 0; i < batch->n; i++) {
        Op *op = &batch->ops[i];
        if (!op->under_way) continue;
        if (op->kind < SEND) await_round(op->comm, op->epoch, op->under_way, op->comm->rank);
        else {
            Send *send = op->under_way;
            while (!send->taken && !is_cut(op)) pthread_cond_wait(&fake_changed, &fake_lock);
            send->taken = 1;
        }
    }
    pthread_mutex_unlock(&fake_lock);
}

static _Thread_local Batch *batches;
static _Thread_local int n_operations;
static int enqueue(Stream *stream, Op op) {
    if (op.comm->revoked || op.comm->suspended || op.comm->finalized)
        return group_code(fail(USAGE, op.name, "the communicator is revoked, suspended or finalized"));
    Batch **batch = &batches;
    while (*batch && ((*batch)->stream != stream || (*batch)->n == 64)) batch = &(*batch)->next;
    if (!*batch) {
        *batch = calloc(1, sizeof **batch);
        (*batch)->stream = stream;
    }
    (*batch)->ops[(*batch)->n++] = op;
    n_operations++;
    int code = answer(op.comm);
    if (!depth) submit_operations(0);
    return code;
}
static void submit_operations(int discard) {
    while (batches) {
        Batch *batch = batches;
        batches = batch->next;
        if (!discard) fake_enqueue(batch->stream, submit_batch, run_batch, batch, sizeof *batch);
        free(batch);
    }
    n_operations = 0;
}

// The calls.
typedef struct {
    size_t size; unsigned magic, version; struct Ext { struct Ext *next; int vendor, option; } *ext;
    int min_ctas, max_ctas, nvls_ctas, cga; const char *selection; int force, policy; uint64_t tag; void *event;
} CollConfig;
static int collective(const char *name, enum Kind kind, const void *send, void *recv, size_t count, int type, int op, int root,
                      Comm *comm, Stream *stream, const CollConfig *config) {
    char text[160] = "";
    if (config) {
        int used = snprintf(text, sizeof text, " config"), options = 0;
        for (struct Ext *ext = config->ext; ext; ext = ext->next) options++;
        if (config->min_ctas != INT_MIN) used += snprintf(text + used, sizeof text - used, " min_ctas %d", config->min_ctas);
        if (config->max_ctas != INT_MIN) used += snprintf(text + used, sizeof text - used, " max_ctas %d", config->max_ctas);
        if (config->selection) used += snprintf(text + used, sizeof text - used, " selection %.20s", config->selection);
        if (config->tag) used += snprintf(text + used, sizeof text - used, " tag %llu", (unsigned long long)config->tag);
        if (config->event) used += snprintf(text + used, sizeof text - used, " event");
        if (options) snprintf(text + used, sizeof text - used, " options %d", options);
    }
    int reduces = kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER;
    int rooted = kind == REDUCE || kind == BROADCAST || kind == GATHER || kind == SCATTER;
    char with_op[24] = "", with_root[24] = "";
    if (reduces) snprintf(with_op, sizeof with_op, " op %d", op);
    if (rooted) snprintf(with_root, sizeof with_root, " root %d", root);
    fake_log("%s %zu type %d%s%s%s", name, count, type, with_op, with_root, text);
    ENTER(name, comm);
    if (config && (config->size != 72 || config->magic != 0xcafebeef)) return group_code(fail(INVALID, name, "config"));
    if (type < 0 || type > 11 || root < 0 || root >= comm->n_ranks) return group_code(fail(INVALID, name, "type or root"));
    if (op < 0 || (op >= 5 && (op - 5 >= comm->n_ops || !comm->ops[op - 5].live || comm->ops[op - 5].type != type)))
        return group_code(fail(INVALID, name, "operator"));
    return enqueue(stream, (Op){kind, comm, name, send, recv, count, type, op, root});
}
#define REDUCTION(NAME, KIND) \
    int nccl##NAME(const void *send, void *recv, size_t count, int type, int op, Comm *comm, Stream *stream) { \
        return collective("nccl" #NAME, KIND, send, recv, count, type, op, 0, comm, stream, NULL); \
    } \
    int nccl##NAME##Config(const void *send, void *recv, size_t count, int type, int op, Comm *comm, Stream *stream, const CollConfig *c) { \
        return collective("nccl" #NAME "Config", KIND, send, recv, count, type, op, 0, comm, stream, c); \
    }
#define ROOTED(NAME, KIND) \
    int nccl##NAME(const void *send, void *recv, size_t count, int type, int root, Comm *comm, Stream *stream) { \
        return collective("nccl" #NAME, KIND, send, recv, count, type, 0, root, comm, stream, NULL); \
    } \
    int nccl##NAME##Config(const void *send, void *recv, size_t count, int type, int root, Comm *comm, Stream *stream, const CollConfig *c) { \
        return collective("nccl" #NAME "Config", KIND, send, recv, count, type, 0, root, comm, stream, c); \
    }
#define PLAIN(NAME, KIND) \
    int nccl##NAME(const void *send, void *recv, size_t count, int type, Comm *comm, Stream *stream) { \
        return collective("nccl" #NAME, KIND, send, recv, count, type, 0, 0, comm, stream, NULL); \
    } \
    int nccl##NAME##Config(const void *send, void *recv, size_t count, int type, Comm *comm, Stream *stream, const CollConfig *c) { \
        return collective("nccl" #NAME "Config", KIND, send, recv, count, type, 0, 0, comm, stream, c); \
    }
REDUCTION(AllReduce, ALL_REDUCE)
REDUCTION(ReduceScatter, REDUCE_SCATTER)
ROOTED(Broadcast, BROADCAST)
ROOTED(Gather, GATHER)
ROOTED(Scatter, SCATTER)
PLAIN(AllGather, ALL_GATHER)
PLAIN(AlltoAll, ALL_TO_ALL)
int ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root, Comm *comm, Stream *stream) {
    return collective("ncclReduce", REDUCE, send, recv, count, type, op, root, comm, stream, NULL);
}
int ncclReduceConfig(const void *send, void *recv, size_t count, int type, int op, int root, Comm *comm, Stream *stream, const CollConfig *c) {
    return collective("ncclReduceConfig", REDUCE, send, recv, count, type, op, root, comm, stream, c);
}
int ncclBcast(void *memory, size_t count, int type, int root, Comm *comm, Stream *stream) {
    return collective("ncclBcast", BROADCAST, memory, memory, count, type, 0, root, comm, stream, NULL);
}
static int two_sided(const char *name, enum Kind kind, const void *send, void *recv, size_t count, int type, int peer, Comm *comm, Stream *stream) {
    fake_log("%s %zu type %d peer %d", name, count, type, peer);
    ENTER(name, comm);
    if (type < 0 || type > 11 || peer < 0 || peer >= comm->n_ranks) return group_code(fail(INVALID, name, "type or peer"));
    return enqueue(stream, (Op){kind, comm, name, send, recv, count, type, 0, peer});
}
int ncclSend(const void *send, size_t count, int type, int peer, Comm *comm, Stream *stream) {
    return two_sided("ncclSend", SEND, send, NULL, count, type, peer, comm, stream);
}
int ncclRecv(void *recv, size_t count, int type, int peer, Comm *comm, Stream *stream) {
    return two_sided("ncclRecv", RECV, NULL, recv, count, type, peer, comm, stream);
}
static int one_sided(const char *name, const void *local, size_t count, int type, int peer, Window *window, size_t offset,
                     int signal, int context, unsigned flags, Comm *comm, Stream *stream) {
    ENTER(name, comm);
    if (peer < 0 || peer >= comm->n_ranks || signal < 0 || signal >= SIGNALS || context < 0 || context >= CONTEXTS || flags)
        return group_code(fail(INVALID, name, "peer, signal, context or flags"));
    if (window && (!window->live || offset > window->bytes || count * size_of(type) > window->bytes - offset))
        return group_code(fail(INVALID, name, "outside of the window"));
    return enqueue(stream, (Op){PUT, comm, name, local, NULL, count, type, 0, peer, context, signal, window, offset});
}
int ncclPutSignal(const void *local, size_t count, int type, int peer, Window *window, size_t offset, int signal, int context,
                  unsigned flags, Comm *comm, Stream *stream) {
    fake_log("ncclPutSignal %zu type %d peer %d offset %zu signal %d context %d", count, type, peer, offset, signal, context);
    if (!window || type < 0 || type > 11) return group_code(fail(INVALID, "ncclPutSignal", "window or type"));
    return one_sided("ncclPutSignal", local, count, type, peer, window, offset, signal, context, flags, comm, stream);
}
int ncclSignal(int peer, int signal, int context, unsigned flags, Comm *comm, Stream *stream) {
    fake_log("ncclSignal peer %d signal %d context %d", peer, signal, context);
    return one_sided("ncclSignal", NULL, 0, 0, peer, NULL, 0, signal, context, flags, comm, stream);
}
int ncclWaitSignal(int n, WaitSignal *waits, Comm *comm, Stream *stream) {
    for (int i = 0; i < n; i++)
        fake_log("ncclWaitSignal %d from peer %d signal %d context %d", waits[i].op_count, waits[i].peer, waits[i].signal, waits[i].context);
    ENTER("ncclWaitSignal", comm);
    for (int i = 0; i < n; i++)
        if (waits[i].peer < 0 || waits[i].peer >= comm->n_ranks || waits[i].signal < 0 || waits[i].signal >= SIGNALS ||
            waits[i].context < 0 || waits[i].context >= CONTEXTS || waits[i].op_count < 0)
            return group_code(fail(INVALID, "ncclWaitSignal", "descriptor"));
    WaitSignal *own = memcpy(malloc(n * sizeof *own + 1), waits, n * sizeof *own);
    return enqueue(stream, (Op){.kind = WAIT, .comm = comm, .name = "ncclWaitSignal", .count = n, .waits = own});
}
typedef struct { size_t size; unsigned magic, version; float time; } SimInfo;
int ncclGroupSimulateEnd(SimInfo *info) {
    fake_log("ncclGroupSimulateEnd");
    int refused = enter_as("ncclGroupSimulateEnd", fake_device()), n = n_operations;
    if (info && (info->size != 24 || info->magic != 0x74685283)) refused = INVALID;
    int code = end_group(1);
    // As many as there were operations.
    if (info && !refused && !code) info->time = n;
    return refused ? refused : code;
}

// Operators: the number from 5 on.
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, Comm *comm) {
    fake_log("ncclRedOpCreatePreMulSum type %d residence %d", type, residence);
    ENTER("ncclRedOpCreatePreMulSum", comm);
    int k = 0;
    while (k < comm->n_ops && comm->ops[k].live) k++;
    if (k == MAX_OPS || type < 0 || type > 11) return INVALID;
    if (k == comm->n_ops) comm->n_ops++;
    comm->ops[k].live = 1, comm->ops[k].type = type, comm->ops[k].on_device = residence == 0, comm->ops[k].at = scalar;
    if (residence == 1) comm->ops[k].scalar = get(scalar, type);
    *op = 5 + k;
    return 0;
}
int ncclRedOpDestroy(int op, Comm *comm) {
    fake_log("ncclRedOpDestroy %d", op);
    ENTER("ncclRedOpDestroy", comm);
    if (op < 5 || op - 5 >= comm->n_ops || !comm->ops[op - 5].live) return INVALID;
    comm->ops[op - 5].live = 0;
    return 0;
}
