/* The preloaded library. A program that opens NVRTC of one major version gets the interface library
 * instead. The interface library gets the path that the program would have opened. The preloaded
 * library also has NVRTC's SONAME, for programs that are linked with NVRTC (linked.c).
 *
 * All other calls of dlopen reach the C library unchanged, with the same arguments, stack and
 * caller, because the caller's RPATH decides where the C library searches. */
#define _GNU_SOURCE
#include "dropin.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* `kd_hook` may return these instead of a handle. PASS lets the C library's dlopen answer the call.
 * REFUSE makes the call fail. */
#define PASS ((void *)0)
#define REFUSE ((void *)1)

#define EXPORT __attribute__((visibility("default")))

typedef void *opener(const char *, int);

__attribute__((visibility("hidden"), used)) opener *kd_dlopen;

static opener *next_dlopen(void) {
    opener *next = __atomic_load_n(&kd_dlopen, __ATOMIC_RELAXED);
    if (next == NULL) {
        next = (opener *)dlsym(RTLD_NEXT, "dlopen");
        __atomic_store_n(&kd_dlopen, next, __ATOMIC_RELAXED);
    }
    return next;
}

static const char *base_of(const char *name) {
    const char *slash = strrchr(name, '/');
    return slash == NULL ? name : slash + 1;
}

/* -- the interface library --------------------------------------------------------------------- */

/* Opens the interface library, which is in the parent of this library's folder. */
static void *open_interface(int flags) {
    Dl_info info;
    char path[PATH_MAX];
    if (dladdr((void *)open_interface, &info) == 0)
        return NULL;
    int folder = (int)(base_of(info.dli_fname) - info.dli_fname);
    int size = snprintf(path, sizeof path, "%.*s../libkcache_nvrtc" KD_MAJOR_TEXT ".so", folder,
                        info.dli_fname);
    return size > 0 && size < PATH_MAX ? next_dlopen()(path, flags & ~RTLD_DEEPBIND) : NULL;
}

static bool call(void *handle, const char *name, const char *path) {
    bool (*function)(const char *) = (bool (*)(const char *))dlsym(handle, name);
    return function != NULL && function(path);
}

/* Calls a function of the interface library if the library is loaded. Returns what the function
 * returns, or else false. */
static bool call_loaded(const char *name) {
    void *handle = open_interface(RTLD_LAZY | RTLD_NOLOAD);
    bool is_true = handle != NULL && call(handle, name, NULL);
    if (handle != NULL)
        dlclose(handle);
    return is_true;
}

/* Returns whether the interface library is loaded in place of a real one. */
static bool stands(void) { return call_loaded("kcache_dropin_stands"); }

void *kd_of_interface(const char *name) {
    static void *kept;
    void *handle = __atomic_load_n(&kept, __ATOMIC_ACQUIRE);
    char path[PATH_MAX];
    if (handle == NULL) {
        handle = open_interface(RTLD_NOW | RTLD_LOCAL);
        if (handle != NULL && !stands() && kd_search_linked(path))
            call(handle, "kcache_dropin_begin", path);
        __atomic_store_n(&kept, handle, __ATOMIC_RELEASE);
    }
    return handle == NULL ? NULL : dlsym(handle, name);
}

/* A program that is linked with NVRTC gets the interface library at its start, because the library
 * could not be found after a later change of the root directory. */
__attribute__((constructor)) static void begin(void) {
    next_dlopen();
    if (kd_is_linked())
        kd_of_interface("nvrtcVersion");
}

/* Loads the real library before the root directory changes, because the library may not be found
 * afterwards. Without kcache, the program would have loaded it before the change, too. */
EXPORT int chroot(const char *path) {
    int (*next)(const char *) = (int (*)(const char *))dlsym(RTLD_NEXT, "chroot");
    int saved = errno;
    call_loaded("kcache_dropin_load");
    errno = saved;
    return next(path);
}

/* -- opening by name --------------------------------------------------------------------------- */

static struct link_map *map_of(const void *caller) {
    Dl_info info;
    struct link_map *map = NULL;
    return dladdr1(caller, &info, (void **)&map, RTLD_DL_LINKMAP) == 0 ? NULL : map;
}

/* Opens the interface library in place of the real one at `path`; returns NULL if that is
 * impossible. */
static void *replace(const char *path, int flags) {
    void *handle = open_interface(flags & ~RTLD_NOLOAD);
    if (handle == NULL || (call(handle, "kcache_dropin_covers", path) &&
                           call(handle, "kcache_dropin_begin", path)))
        return handle;
    dlclose(handle);
    return NULL;
}

static int look_at(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    const char *name = info->dlpi_name;
    if (name == NULL || strcmp(base_of(name), KD_SONAME) != 0 || strlen(name) >= PATH_MAX)
        return 0;
    strcpy(data, name);
    return 1;
}

static bool is_loaded(const char *path) {
    void *handle = next_dlopen()(path, RTLD_LAZY | RTLD_NOLOAD);
    if (handle != NULL)
        dlclose(handle);
    return handle != NULL;
}

static void *or_refuse(void *handle) { return handle == NULL ? REFUSE : handle; }

/* Opens NVRTC by its SONAME: the library that is loaded under that name, or else the library that
 * the loader would find. If there is no such library, the loader has to set the error. It would
 * find this preloaded library, so it is called in a new namespace, which does not have it. */
static void *redirect_bare(const char *name, int flags, const void *caller) {
    char found[PATH_MAX];
    if (stands())
        return or_refuse(open_interface(flags));
    if (dl_iterate_phdr(look_at, found) != 0)
        return or_refuse(next_dlopen()(found, flags));
    if (!kd_search(map_of(caller), found))
        return or_refuse(dlmopen(LM_ID_NEWLM, name, flags & ~RTLD_GLOBAL));
    if (flags & RTLD_NOLOAD)
        return REFUSE;
    void *handle = replace(found, flags);
    return handle == NULL ? or_refuse(next_dlopen()(found, flags)) : handle;
}

static void *redirect_path(const char *name, int flags) {
    char real[PATH_MAX];
    size_t length = sizeof KD_SONAME - 1;
    if (realpath(name, real) == NULL || strncmp(base_of(real), KD_SONAME, length) != 0 ||
        strchr(".", base_of(real)[length]) == NULL) /* `strchr` also finds the NUL at the end */
        return PASS;
    bool standing = stands();
    if (!standing && is_loaded(real)) /* the program already uses the real library */
        return PASS;
    if (!standing && flags & RTLD_NOLOAD)
        return REFUSE;
    void *handle = replace(real, flags);
    return handle == NULL ? PASS : handle;
}

/* The interface library opens the real one by a path that begins with two slashes. */
__attribute__((visibility("hidden"), used)) void *kd_hook(
    const char *name, int flags, const void *caller) {
    next_dlopen();
    if (name == NULL || strncmp(name, "//", 2) == 0 ||
        strncmp(base_of(name), "libnvrtc.so", sizeof "libnvrtc.so" - 1) != 0)
        return PASS;
    int saved = errno;
    void *result = PASS;
    if (strcmp(name, KD_SONAME) == 0)
        result = redirect_bare(name, flags, caller);
    else if (strchr(name, '/') != NULL)
        result = redirect_path(name, flags);
    errno = saved;
    return result;
}

#if defined(__x86_64__)
__asm__(".text\n.p2align 4\n.globl dlopen\n.type dlopen, @function\ndlopen:\n"
        "endbr64\npush %rdi\npush %rsi\nmovq 16(%rsp), %rdx\nsub $8, %rsp\n"
        "call kd_hook\nadd $8, %rsp\npop %rsi\npop %rdi\n"
        "cmpq $1, %rax\njb 1f\nje 2f\nret\n"
        "1: movq kd_dlopen(%rip), %r11\njmp *%r11\n"
        "2: xorl %eax, %eax\nret\n.size dlopen, .-dlopen");
#elif defined(__aarch64__)
__asm__(".text\n.p2align 4\n.globl dlopen\n.type dlopen, %function\ndlopen:\n"
        "hint #34\nstp x29, x30, [sp, #-32]!\nstp x0, x1, [sp, #16]\nmov x2, x30\n"
        "bl kd_hook\nmov x9, x0\nldp x0, x1, [sp, #16]\nldp x29, x30, [sp], #32\n"
        "cmp x9, #1\nb.lo 1f\nb.eq 2f\nmov x0, x9\nret\n"
        "1: adrp x16, kd_dlopen\nldr x16, [x16, :lo12:kd_dlopen]\nbr x16\n"
        "2: mov x0, #0\nret\n.size dlopen, .-dlopen");
#else
#error "the hook is written for x86-64 and aarch64, the machines that NVRTC exists for"
#endif
