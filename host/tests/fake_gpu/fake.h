// What the fake driver (cuda.c) and the fake NCCL (nccl.c) share.
#pragma once
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Appends a line to the file FAKE_LOG, headed by the calling thread's GPU.
void fake_log(const char *format, ...);
// The same for another GPU.
void fake_log_of(int gpu, const char *line);
// The ordinal of the calling thread's GPU, -1 for none.
int fake_device(void);
// One lock and one condition for everything.
extern pthread_mutex_t fake_lock;
extern pthread_cond_t fake_changed;
// Memory of the calling thread's GPU, known to cuPointerGetAttribute. `fake_free` says 0 to what is not such memory.
void *fake_alloc(size_t bytes);
int fake_free(void *memory);
// Returns when no kernel waits on that GPU (FAKE_SPIN).
void fake_await_kernels(int gpu);
// Whether one does.
int fake_kernels_wait(int gpu);
// Puts work into a stream, or into the graph that it is captured to. `arg` is copied. `submit` (or NULL) sees the copy when the
// work is handed to the GPU, and `run` when its turn comes, on a thread of the stream.
typedef struct Stream Stream;
void fake_enqueue(Stream *stream, void (*submit)(void *), void (*run)(void *), const void *arg, size_t bytes);
