// Streams, events and graphs: each stream is a queue with a thread that works through it.
#include "fake.h"

typedef struct Node {
    struct Node *next;
    void (*submit)(void *), (*run)(void *);
    void *arg;
    size_t bytes;
} Node;
typedef struct Graph { Node *first, **last; size_t count; int open, broken; } Graph;
struct Stream { Node *first, **last; long submitted, done; int device, closing; Graph *graph; };
typedef struct { long recorded, reached; Graph *graph; } Event;

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t fake_changed = PTHREAD_COND_INITIALIZER;
static _Thread_local int device = -1;
static Stream *default_streams[16];

static Node *new_node(void (*submit)(void *), void (*run)(void *), const void *arg, size_t bytes) {
    Node *node = calloc(1, sizeof *node);
    // Never freed: what is under way may refer to it, and tests are short.
    *node = (Node){NULL, submit, run, memcpy(malloc(bytes ? bytes : 1), arg, bytes), bytes};
    return node;
}

static void *work(void *argument) {
    Stream *stream = argument;
    device = stream->device;
    for (;;) {
        pthread_mutex_lock(&fake_lock);
        while (!stream->first && !stream->closing) pthread_cond_wait(&fake_changed, &fake_lock);
        Node *node = stream->first;
        if (!node) break;
        pthread_mutex_unlock(&fake_lock);
        node->run(node->arg);
        pthread_mutex_lock(&fake_lock);
        if (!(stream->first = node->next)) stream->last = &stream->first;
        stream->done++;
        pthread_cond_broadcast(&fake_changed);
        pthread_mutex_unlock(&fake_lock);
    }
    pthread_mutex_unlock(&fake_lock);
    return NULL;
}

static Stream *new_stream(int of_device) {
    Stream *stream = calloc(1, sizeof *stream);
    stream->last = &stream->first;
    stream->device = of_device;
    pthread_t thread;
    pthread_create(&thread, NULL, work, stream);
    pthread_detach(thread);
    return stream;
}

// NULL, 1 and 2 name the default stream of the GPU.
static Stream *the(Stream *stream) {
    if ((uintptr_t)stream > 2) return stream;
    pthread_mutex_lock(&fake_lock);
    Stream **slot = &default_streams[device < 0 ? 0 : device];
    if (!*slot) *slot = new_stream(device);
    pthread_mutex_unlock(&fake_lock);
    return *slot;
}

static Graph *captured_to(Stream *stream) { return stream->graph && stream->graph->open ? stream->graph : NULL; }

static void push(Stream *stream, Node *node) {
    if (node->submit) node->submit(node->arg);
    pthread_mutex_lock(&fake_lock);
    *stream->last = node, stream->last = &node->next, stream->submitted++;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
}

void fake_enqueue(Stream *stream, void (*submit)(void *), void (*run)(void *), const void *arg, size_t bytes) {
    stream = the(stream);
    Node *node = new_node(submit, run, arg, bytes);
    Graph *graph = captured_to(stream);
    if (!graph) push(stream, node);
    else *graph->last = node, graph->last = &node->next, graph->count++;
}

// What may not be done while a stream is captured: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.
static int refuse_capture(Stream *stream) {
    Graph *graph = captured_to(stream);
    if (graph) graph->broken = 1;
    return graph ? 900 : 0;
}

int cuStreamCreate(Stream **stream, unsigned flags) { *stream = new_stream(device); return flags == 1 ? 0 : 1; }
int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) { return cuStreamCreate(stream, flags); }
int cuStreamDestroy_v2(Stream *stream) {
    fake_log("cuStreamDestroy");
    pthread_mutex_lock(&fake_lock);
    stream->closing = 1;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
    return 0;
}
int cuStreamQuery(Stream *stream) {
    stream = the(stream);
    int code = refuse_capture(stream);
    if (code) return code;
    pthread_mutex_lock(&fake_lock);
    code = stream->done == stream->submitted ? 0 : 600;
    pthread_mutex_unlock(&fake_lock);
    return code;
}
int cuStreamSynchronize(Stream *stream) {
    // This crate never blocks in the driver: only the default stream, which is idle unless a test uses it.
    if ((uintptr_t)stream > 2) return 1;
    stream = the(stream);
    pthread_mutex_lock(&fake_lock);
    while (stream->done != stream->submitted) pthread_cond_wait(&fake_changed, &fake_lock);
    pthread_mutex_unlock(&fake_lock);
    return 0;
}
int cuStreamGetCtx(Stream *stream, void **context) { *context = (void *)(intptr_t)(the(stream)->device + 1); return 0; }

typedef struct { Event *event; long ticket; } Mark;
static void reach(void *argument) {
    Mark *mark = argument;
    pthread_mutex_lock(&fake_lock);
    if (mark->event->reached < mark->ticket) mark->event->reached = mark->ticket;
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
}
static void await(void *argument) {
    Mark *mark = argument;
    pthread_mutex_lock(&fake_lock);
    while (mark->event->reached < mark->ticket) pthread_cond_wait(&fake_changed, &fake_lock);
    pthread_mutex_unlock(&fake_lock);
}
int cuEventCreate(Event **event, unsigned flags) { *event = calloc(1, sizeof **event); return 0; }
int cuEventRecord(Event *event, Stream *stream) {
    stream = the(stream);
    // In a capture an event only joins other streams to the graph, whose nodes keep the order of the calls.
    if ((event->graph = captured_to(stream))) return 0;
    Mark mark = {event, ++event->recorded};
    fake_enqueue(stream, NULL, reach, &mark, sizeof mark);
    return 0;
}
int cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    stream = the(stream);
    if (event->graph && event->graph->open) {
        stream->graph = event->graph;
        return 0;
    }
    Mark mark = {event, event->recorded};
    fake_enqueue(stream, NULL, await, &mark, sizeof mark);
    return 0;
}
int cuEventQuery(Event *event) {
    pthread_mutex_lock(&fake_lock);
    int code = event->reached >= event->recorded ? 0 : 600;
    pthread_mutex_unlock(&fake_lock);
    return code;
}
int cuEventSynchronize(Event *event) { await(&(Mark){event, event->recorded}); return 0; }
int cuEventElapsedTime_v2(float *ms, Event *start, Event *end) {
    *ms = 1.5f;
    return !start->recorded || !end->recorded ? 400 : cuEventQuery(start) || cuEventQuery(end) ? 600 : 0;
}
int cuEventDestroy_v2(Event *event) { return 0; }

int cuStreamBeginCapture_v2(Stream *stream, int mode) {
    if ((uintptr_t)stream <= 2 || captured_to(stream)) return 900;
    Graph *graph = calloc(1, sizeof *graph);
    *graph = (Graph){NULL, &graph->first, 0, 1, 0};
    stream->graph = graph;
    fake_log("cuStreamBeginCapture");
    return 0;
}
int cuStreamEndCapture(Stream *stream, Graph **graph) {
    *graph = stream->graph;
    if (!captured_to(stream)) return 901; // CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    (*graph)->open = 0;
    stream->graph = NULL;
    fake_log("cuStreamEndCapture %zu nodes", (*graph)->count);
    if (!(*graph)->broken) return 0;
    *graph = NULL;
    return 901;
}
int cuStreamIsCapturing(Stream *stream, int *status) { *status = captured_to(the(stream)) ? 1 : 0; return 0; }
int cuStreamGetCaptureInfo_v2(Stream *stream, int *status, uint64_t *id, Graph **graph, void ***dependencies, size_t *count) {
    Graph *open = captured_to(the(stream));
    *status = open ? 1 : 0;
    if (id) *id = (uintptr_t)open;
    if (graph) *graph = open;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    return 0;
}
int cuStreamGetCaptureInfo_v3(Stream *stream, int *status, uint64_t *id, Graph **graph, void ***dependencies, void **edges,
                              size_t *count) {
    if (edges) *edges = NULL;
    return cuStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, count);
}
int cuGraphGetNodes(Graph *graph, Node **nodes, size_t *count) {
    if (nodes) {
        size_t n = 0;
        for (Node *node = graph->first; node && n < *count; node = node->next) nodes[n++] = node;
    }
    *count = graph->count;
    return 0;
}
int cuGraphInstantiateWithFlags(Graph **exec, Graph *graph, unsigned long long flags) {
    *exec = memcpy(malloc(sizeof *graph), graph, sizeof *graph);
    fake_log("cuGraphInstantiate");
    return 0;
}
int cuGraphInstantiate_v2(Graph **exec, Graph *graph, void *node, char *log, size_t bytes) {
    return cuGraphInstantiateWithFlags(exec, graph, 0);
}
int cuGraphLaunch(Graph *exec, Stream *stream) {
    fake_log("cuGraphLaunch %zu nodes", exec->count);
    stream = the(stream);
    for (Node *node = exec->first; node; node = node->next)
        push(stream, new_node(node->submit, node->run, node->arg, node->bytes));
    return 0;
}
int cuGraphExecDestroy(Graph *exec) { fake_log("cuGraphExecDestroy"); free(exec); return 0; }
// Not freed: streams and events that were captured to it still ask whether it is open.
int cuGraphDestroy(Graph *graph) { fake_log("cuGraphDestroy"); return 0; }
