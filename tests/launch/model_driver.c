/* A model of the CUDA driver: the functions that kcache and cuda.core call to load and launch a
   kernel. tests/launch/test_model_driver.py uses it; tests/gpu runs with the real driver.

   The model has two devices, sm_90 and sm_80. All bytes are a module, except "CUBIN for sm_80" on
   device 0. The kernel of a module takes (float, pointer, pointer, int), or nothing if its name
   ends in "none". A launch prints its arguments. cuda.bindings raises an error where it calls a
   function that the model lacks. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       NO_BINARY = 209, NOT_FOUND = 500 };

static pid_t initialised_by;
#define CHECK() do { if (initialised_by != getpid()) return NOT_INITIALIZED; } while (0)

CUresult cuInit(unsigned flags)
{
    if (initialised_by && initialised_by != getpid()) return NOT_INITIALIZED;
    initialised_by = getpid();
    return 0;
}
CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }

/* -- devices and contexts ---------------------------------------------------------------------- */

struct context { int device; uint64_t number; int alive; };
static struct context primary[2];
static uint64_t numbers;
static __thread struct context *stack[16];
static __thread int depth;

CUresult cuDeviceGetCount(int *count)
{
    CHECK();
    *count = 2;
    return 0;
}
CUresult cuDeviceGet(int *device, int ordinal)
{
    CHECK();
    *device = ordinal;
    return ordinal > 1 ? INVALID_DEVICE : 0;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, int device)
{
    CHECK();
    *value = attribute == 75 ? 9 - device : attribute == 97 ? 99000 : 0;
    return 0;
}
CUresult cuCtxGetCurrent(struct context **context)
{
    CHECK();
    *context = depth ? stack[depth - 1] : NULL;
    return 0;
}
CUresult cuCtxGetDevice(int *device)
{
    CHECK();
    if (!depth || !stack[depth - 1]->alive) return INVALID_CONTEXT;
    *device = stack[depth - 1]->device;
    return 0;
}
CUresult cuCtxGetId(struct context *context, uint64_t *number)
{
    CHECK();
    if (!context && depth) context = stack[depth - 1];
    if (!context || !context->alive) return INVALID_CONTEXT;
    *number = context->number;
    return 0;
}
CUresult cuCtxPushCurrent_v2(struct context *context)
{
    CHECK();
    stack[depth++] = context;
    return 0;
}
CUresult cuCtxPopCurrent_v2(struct context **context)
{
    CHECK();
    if (!depth) return INVALID_CONTEXT;
    *context = stack[--depth];
    return 0;
}
CUresult cuCtxCreate_v2(struct context **context, unsigned flags, int device)
{
    CHECK();
    *context = malloc(sizeof **context);
    **context = (struct context){device, ++numbers, 1};
    stack[depth++] = *context;
    return 0;
}
CUresult cuCtxDestroy_v2(struct context *context)
{
    CHECK();
    if (depth && stack[depth - 1] == context) depth--;
    context->alive = 0;
    return 0;
}
CUresult cuDevicePrimaryCtxRetain(struct context **context, int device)
{
    CHECK();
    if (device < 0 || device > 1) return INVALID_DEVICE;
    if (!primary[device].alive) primary[device] = (struct context){device, ++numbers, 1};
    *context = &primary[device];
    return 0;
}
CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    CHECK();
    *flags = 0;
    *active = primary[device].alive;
    return 0;
}
CUresult cuDevicePrimaryCtxReset_v2(int device)
{
    CHECK();
    primary[device].alive = 0;
    return 0;
}

/* -- modules and kernels ----------------------------------------------------------------------- */

struct kernel { char name[200]; int cubin_for_80; int shared; };

CUresult cuLibraryLoadData(char **library, const void *code, void *a, void *b, unsigned c, void *d,
                           void *e, unsigned f)
{
    CHECK();
    printf("loads %.4s\n", (const char *)code + (*(const char *)code == 127));
    *library = strdup(code);
    return 0;
}
CUresult cuLibraryGetKernel(struct kernel **kernel, char *library, const char *name)
{
    CHECK();
    *kernel = calloc(1, sizeof **kernel);
    strncpy((*kernel)->name, name, sizeof (*kernel)->name - 1);
    (*kernel)->cubin_for_80 = strstr(library, "for sm_80") != NULL;
    return 0;
}
CUresult cuKernelGetParamInfo(struct kernel *kernel, size_t where, size_t *offset, size_t *size)
{
    static const size_t sizes[] = {4, 8, 8, 4}, offsets[] = {0, 8, 16, 24};
    CHECK();
    if (where > 3 || strstr(kernel->name, "none")) return INVALID_VALUE;
    *size = sizes[where];
    if (offset) *offset = offsets[where];
    return 0;
}
CUresult cuKernelGetAttribute(int *value, int attribute, struct kernel *kernel, int device)
{
    CHECK();
    if (kernel->cubin_for_80 && device == 0) return NO_BINARY;
    *value = 1000; /* bytes of static shared memory */
    return 0;
}
CUresult cuKernelSetAttribute(int attribute, int value, struct kernel *kernel, int device)
{
    CHECK();
    kernel->shared = value;
    return 0;
}

struct launch { unsigned grid[3], block[3], shared; void *stream; };
CUresult cuLaunchKernelEx(const struct launch *how, struct kernel *kernel, void **args,
                          void **extra)
{
    CHECK();
    if (!depth || !stack[depth - 1]->alive) return INVALID_CONTEXT;
    if (how->block[0] > 1024 || how->shared > (unsigned)kernel->shared) return INVALID_VALUE;
    printf("launches %s on %d: %u,%u,%u %u,%u,%u %u stream %p:", kernel->name,
           stack[depth - 1]->device, how->grid[0], how->grid[1], how->grid[2], how->block[0],
           how->block[1], how->block[2], how->shared, how->stream);
    if (!strstr(kernel->name, "none"))
        printf(" %g %p %p %d", *(float *)args[0], *(void **)args[1], *(void **)args[2],
               *(int *)args[3]);
    printf("\n");
    fflush(stdout);
    return 0;
}

/* -- how cuda.bindings finds them -------------------------------------------------------------- */

CUresult cuGetErrorName(CUresult error, const char **name)
{
    *name = error == NO_BINARY ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_OTHER";
    return 0;
}
CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = "an error of the model";
    return 0;
}
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                             int *status)
{
    char name[200];
    snprintf(name, sizeof name, "%s_v2", symbol);
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = dlsym(RTLD_DEFAULT, symbol);
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : NOT_FOUND;
}
