// A CUDA driver without a GPU, for the real cuda-python: libcuda.so.1 as far as trt_kvcache.runtime.trt.cuda calls it.
//
// GPU memory is the host's. What needs a context fails in a thread that has none; what may not come while a stream
// records fails there. Everything happens at once: order on a stream is what fake_cuda.py looks after.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long Address;
enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_CONTEXT = 201, NOT_SUPPORTED = 801, CAPTURING = 900 };
enum { RELAXED = 2, HOST = 1, INTEGRATED = 18, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };

static void *const THE_CONTEXT = (void *)0xC0DE;
static __thread void *current;
static __thread int mode;  // of captures, for this thread
static __thread int capturing;
static int streams, blocks, graphs;  // that are there

#define IN_CONTEXT if (current != THE_CONTEXT) return NO_CONTEXT
#define NOT_RECORDING IN_CONTEXT; if (capturing && mode != RELAXED) return CAPTURING

static int init(unsigned flags) { return flags ? INVALID : OK; }
static int driver_version(int *version) { *version = 13050; return OK; }
static int device_count(int *count) { *count = 1; return OK; }
static int device_get(int *device, int index) { *device = index; return index ? 101 : OK; }
static int device_name(char *name, int size, int device) { return snprintf(name, size, "Stand-in") < 0 ? INVALID : OK; }
static int device_memory(size_t *size, int device) { *size = (size_t)8 << 30; return OK; }
static int device_attribute(int *value, int which, int device) {
    *value = which == CAPABILITY_MAJOR ? 9 : which == CAPABILITY_MINOR || which == INTEGRATED ? 0 : 1;
    return OK;
}
static int context_retain(void **context, int device) { *context = THE_CONTEXT; return OK; }
static int context_release(int device) { return OK; }
static int context_get(void **context) { *context = current; return OK; }
static int context_set(void *context) { current = context; return OK; }
static int context_device(int *device) { IN_CONTEXT; *device = 0; return OK; }
static int priorities(int *least, int *most) { IN_CONTEXT; *least = 0; *most = -5; return OK; }
static int error_text(int status, const char **text) { *text = "as the stand-in says"; return OK; }
static int error_name(int status, const char **text) {
    static __thread char name[16];
    *text = name;
    return snprintf(name, sizeof(name), "STATUS_%d", status) < 0 ? INVALID : OK;
}
static int memory_info(size_t *unused, size_t *total) {
    IN_CONTEXT;
    *total = (size_t)8 << 30;
    *unused = *total / 2;
    return OK;
}

static int take(void **address, size_t size) {
    NOT_RECORDING;
    if (size == 0) return INVALID;
    if (posix_memalign(address, 256, size) != 0) return OUT_OF_MEMORY;
    memset(*address, 0xA5, size);
    ++blocks;
    return OK;
}
static int drop(void *address) { NOT_RECORDING; free(address); --blocks; return OK; }

static int fill(Address to, unsigned char value, size_t size, void *stream) {
    IN_CONTEXT;
    memset((void *)to, value, size);
    return OK;
}
static int fill_2d(Address to, size_t pitch, unsigned char value, size_t width, size_t height, void *stream) {
    IN_CONTEXT;
    for (size_t i = 0; i < height; ++i) memset((char *)to + i * pitch, value, width);
    return OK;
}
static int copy(void *to, const void *from, size_t size, void *stream) {
    IN_CONTEXT;
    memcpy(to, from, size);
    return OK;
}
struct Side {  // CUDA_MEMCPY2D is two of these, then width and height
    size_t x, y;
    int kind;
    void *host;
    Address device;
    void *array;
    size_t pitch;
};
struct Copy2D { struct Side from, to; size_t width, height; };
static char *start_of(const struct Side *side) { return side->kind == HOST ? side->host : (char *)side->device; }
static int copy_2d(const struct Copy2D *c, void *stream) {
    IN_CONTEXT;
    if (c->from.x || c->from.y || c->to.x || c->to.y) return INVALID;
    if (c->from.pitch < c->width || c->to.pitch < c->width) return INVALID;
    for (size_t i = 0; i < c->height; ++i) {
        memcpy(start_of(&c->to) + i * c->to.pitch, start_of(&c->from) + i * c->from.pitch, c->width);
    }
    return OK;
}

static int stream_create(void **stream, unsigned flags, int priority) {
    IN_CONTEXT;
    if (flags != 1) return INVALID;  // one that does not wait for the default stream
    *stream = malloc(1);
    ++streams;
    return OK;
}
static int stream_destroy(void *stream) { free(stream); --streams; return OK; }
static int stream_wait(void *stream) { NOT_RECORDING; return OK; }
static int capture_begin(void *stream, int how) { IN_CONTEXT; capturing = 1; return how == 1 ? OK : INVALID; }
static int capture_end(void *stream, void **graph) { capturing = 0; *graph = malloc(1); ++graphs; return OK; }
static int exchange_mode(int *how) { int before = mode; mode = *how; *how = before; return OK; }
static int instantiate(void **made, void *graph, Address flags) { IN_CONTEXT; *made = malloc(1); ++graphs; return OK; }
static int graph_drop(void *graph) { free(graph); --graphs; return OK; }
static int graph_launch(void *graph, void *stream) { IN_CONTEXT; return OK; }

static int load(void **library, const void *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
    *library = malloc(1);
    return memcmp(code, "\177ELF", 4) == 0 ? OK : 200;
}
static int unload(void *library) { free(library); return OK; }
static int kernel(void **found, void *library, const char *name) { *found = strdup(name); return OK; }
struct Launch { unsigned grid[3], block[3], shared; void *stream; void *attributes; unsigned count; };
static int launch(const struct Launch *l, const char *name, void **given, void **more) {  // of `best_token`
    IN_CONTEXT;
    printf("%s %u %u %llx %llx %llx %d %d %d %lld\n", name, l->grid[0], l->block[0], *(Address *)given[0],
           *(Address *)given[1], *(Address *)given[2], *(int *)given[3], *(int *)given[4], *(int *)given[5],
           *(long long *)given[6]);
    fflush(stdout);
    return OK;
}
static int pointer_attributes(unsigned count, const int *which, void **values, Address address) {
    for (unsigned i = 0; i < count; ++i) {
        if (which[i] == 2) *(unsigned *)values[i] = 2;  // of a device
        else if (which[i] == 9 || which[i] == 8) *(int *)values[i] = 0;
    }
    return OK;
}
static int missing(void) { return NOT_SUPPORTED; }

__attribute__((visibility("default"))) int left_over(void) { return streams * 10000 + blocks * 100 + graphs; }

static const struct { const char *name; void *call; } CALLS[] = {
    {"cuInit", init}, {"cuDriverGetVersion", driver_version}, {"cuDeviceGetCount", device_count},
    {"cuDeviceGet", device_get}, {"cuDeviceGetName", device_name}, {"cuDeviceTotalMem", device_memory},
    {"cuDeviceGetAttribute", device_attribute}, {"cuDevicePrimaryCtxRetain", context_retain},
    {"cuDevicePrimaryCtxRelease", context_release}, {"cuCtxGetCurrent", context_get}, {"cuCtxSetCurrent", context_set},
    {"cuCtxGetDevice", context_device}, {"cuCtxGetStreamPriorityRange", priorities}, {"cuGetErrorString", error_text},
    {"cuGetErrorName", error_name}, {"cuMemGetInfo", memory_info}, {"cuMemAlloc", take}, {"cuMemFree", drop},
    {"cuMemAllocHost", take}, {"cuMemFreeHost", drop}, {"cuMemsetD8Async", fill}, {"cuMemsetD2D8Async", fill_2d},
    {"cuMemcpyHtoDAsync", copy}, {"cuMemcpyDtoHAsync", copy}, {"cuMemcpyDtoDAsync", copy}, {"cuMemcpy2DAsync", copy_2d},
    {"cuStreamCreateWithPriority", stream_create}, {"cuStreamDestroy", stream_destroy},
    {"cuStreamSynchronize", stream_wait}, {"cuStreamBeginCapture", capture_begin}, {"cuStreamEndCapture", capture_end},
    {"cuThreadExchangeStreamCaptureMode", exchange_mode}, {"cuGraphInstantiate", instantiate},
    {"cuGraphInstantiateWithFlags", instantiate}, {"cuGraphDestroy", graph_drop}, {"cuGraphExecDestroy", graph_drop},
    {"cuGraphLaunch", graph_launch}, {"cuLibraryLoadData", load}, {"cuLibraryUnload", unload},
    {"cuLibraryGetKernel", kernel}, {"cuLaunchKernelEx", launch}, {"cuPointerGetAttributes", pointer_attributes},
};

__attribute__((visibility("default"))) int cuGetProcAddress_v2(
    const char *name, void **found, int version, Address flags, int *status) {
    if (status != NULL) *status = 0;
    *found = strcmp(name, "cuGetProcAddress") == 0 ? (void *)cuGetProcAddress_v2 : (void *)missing;
    for (size_t i = 0; i < sizeof(CALLS) / sizeof(CALLS[0]); ++i) {
        if (strcmp(name, CALLS[i].name) == 0) *found = CALLS[i].call;
    }
    return OK;
}
