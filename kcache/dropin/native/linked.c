/* A library with NVRTC's name, for programs that are linked with NVRTC. It opens the drop-in.

   It is preloaded for both major versions at once. So its functions have a versioned name only
   (`nvrtcVersion@libnvrtc.so.13`): a program that searches all libraries for a bare name, as
   cuda.bindings does first, must not find those of the wrong major version. Programs that open
   NVRTC by name get the drop-in through the hook of preload.c. */
#define _GNU_SOURCE
#include "dropin.h"
#include "stubs.h"
#include "table.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#define STUB(name)                                                                                 \
    KD_STUB("kd_linked_" #name) ".symver kd_linked_" #name ", " #name "@" KD_SONAME "\n"
__asm__(KD_STUBS_BEGIN KD_ANSWERED(STUB) KD_FORWARDED(STUB));

#define NAME(name) #name,
static const char *const names[] = {KD_ANSWERED(NAME) KD_FORWARDED(NAME)};

static int missing(void) { return KD_INTERNAL_ERROR; }

void *kd_resolve(unsigned index) {
    static void *library;
    void *opened = __atomic_load_n(&library, __ATOMIC_ACQUIRE);
    Dl_info info;
    char path[PATH_MAX];
    if (opened == NULL && dladdr((void *)names, &info) != 0) {
        const char *slash = strrchr(info.dli_fname, '/');
        int folder = slash == NULL ? 0 : (int)(slash - info.dli_fname) + 1;
        int size = snprintf(path, sizeof path, "%.*slibkcache_nvrtc" KD_MAJOR_TEXT ".so", folder,
                            info.dli_fname);
        if (size > 0 && (size_t)size < sizeof path)
            opened = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        __atomic_store_n(&library, opened, __ATOMIC_RELEASE);
    }
    void *function = opened == NULL ? NULL : dlsym(opened, names[index]);
    return function == NULL ? (void *)missing : function;
}
