/* The hooks: a program that opens NVRTC by `dlopen` gets the drop-in, which is told what the
   program would have opened. All other calls go to the C library unchanged: with the same
   arguments, stack and caller. The caller's RPATH decides where the C library searches. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <link.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define NAME "libnvrtc.so"
#define LEAST_MAJOR 12
#define MOST_MAJOR 13
/* What `kd_hook` may return instead of a handle. */
#define PASS ((void *)0)
#define REFUSE ((void *)1)

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

__attribute__((constructor)) static void begin(void) { next_dlopen(); }

EXPORT void *kcache_dropin_real_dlopen(const char *path, int flags) {
    return next_dlopen()(path, flags);
}

/* The path of our library for a major version, in this library's folder; empty if there is none. */
static void own_path(char path[PATH_MAX], long major) {
    Dl_info info;
    path[0] = '\0';
    if (dladdr((void *)begin, &info) == 0)
        return;
    const char *slash = strrchr(info.dli_fname, '/');
    int folder = slash == NULL ? 0 : (int)(slash - info.dli_fname) + 1;
    int size = snprintf(path, PATH_MAX, "%.*slibkcache_nvrtc%ld.so", folder, info.dli_fname, major);
    if (size <= 0 || size >= PATH_MAX || access(path, R_OK) != 0)
        path[0] = '\0';
}

static long major_of(const char *base) {
    return strncmp(base, NAME ".", sizeof NAME) == 0 ? strtol(base + sizeof NAME, NULL, 10) : 0;
}

static const char *base_of(const char *name) {
    const char *slash = strrchr(name, '/');
    return slash == NULL ? name : slash + 1;
}

static bool is_nvrtc(const char *name) {
    const char *base = base_of(name);
    size_t length = sizeof NAME - 1;
    return strncmp(base, NAME, length) == 0 && (base[length] == '\0' || base[length] == '.');
}

static struct link_map *map_of(const void *caller) {
    Dl_info info;
    struct link_map *map = NULL;
    return dladdr1(caller, &info, (void **)&map, RTLD_DL_LINKMAP) == 0 ? NULL : map;
}

/* Opens our library in place of the real one at `path`; NULL if it can't replace that one. */
static void *open_own(const char *own, const char *path, int flags) {
    void *handle = next_dlopen()(own, flags & ~(RTLD_DEEPBIND | RTLD_NOLOAD));
    if (handle == NULL)
        return NULL;
    bool (*covers)(const char *) = (bool (*)(const char *))dlsym(handle, "kcache_dropin_covers");
    bool (*set)(const char *) = (bool (*)(const char *))dlsym(handle, "kcache_dropin_set_real");
    if (covers != NULL && set != NULL && covers(path) && set(path))
        return handle;
    dlclose(handle);
    return NULL;
}

/* Finds the file of a bare name; our library searches as the loader does. */
static bool find(const char *own, const void *caller, char path[PATH_MAX]) {
    void *handle = next_dlopen()(own, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL)
        return false;
    bool (*search)(void *, char *, size_t) =
        (bool (*)(void *, char *, size_t))dlsym(handle, "kcache_dropin_search");
    void *program = next_dlopen()(NULL, RTLD_LAZY);
    bool there = search != NULL && (search(map_of(caller), path, PATH_MAX) ||
                                    search(program, path, PATH_MAX));
    if (program != NULL)
        dlclose(program);
    dlclose(handle);
    return there;
}

struct loaded {
    long major;
    char *path;
};

static int look_at(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct loaded *loaded = data;
    const char *name = info->dlpi_name;
    if (name == NULL || !is_nvrtc(name) || major_of(base_of(name)) != loaded->major ||
        strlen(name) >= PATH_MAX)
        return 0;
    strcpy(loaded->path, name);
    return 1;
}

static bool is_loaded(const char *path) {
    void *handle = next_dlopen()(path, RTLD_LAZY | RTLD_NOLOAD);
    if (handle != NULL)
        dlclose(handle);
    return handle != NULL;
}

/* Whether our library was opened for a real one. It also stays loaded after a failed search. */
static bool is_opened(const char *own) {
    void *handle = next_dlopen()(own, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == NULL)
        return false;
    bool (*stands)(void) = (bool (*)(void))dlsym(handle, "kcache_dropin_stands");
    bool opened = stands != NULL && stands();
    dlclose(handle);
    return opened;
}

static void *or_refuse(void *handle) { return handle == NULL ? REFUSE : handle; }

/* For a bare name: opens the library that is loaded under that name, or else the one that the
   loader would find. It never opens what the C library alone would: the library of linked.c. */
static void *redirect_bare(const char *name, int flags, const void *caller) {
    char own[PATH_MAX], found[PATH_MAX], real[PATH_MAX];
    struct loaded loaded = {major_of(name), found};
    own_path(own, loaded.major);
    if (own[0] == '\0')
        return PASS;
    if (is_opened(own))
        return or_refuse(next_dlopen()(own, flags));
    if (dl_iterate_phdr(look_at, &loaded) != 0)
        return or_refuse(next_dlopen()(found, flags));
    if (!find(own, caller, found) || realpath(found, real) == NULL) {
        int size = snprintf(found, sizeof found, "/%s", name);
        if (size > 0 && (size_t)size < sizeof found) /* so that dlerror has an error */
            next_dlopen()(found, RTLD_LAZY);
        return REFUSE;
    }
    if (flags & RTLD_NOLOAD)
        return REFUSE;
    void *handle = open_own(own, real, flags);
    return handle == NULL ? or_refuse(next_dlopen()(real, flags)) : handle;
}

static void *redirect_path(const char *name, int flags) {
    char own[PATH_MAX], real[PATH_MAX];
    if (realpath(name, real) == NULL)
        return PASS;
    own_path(own, major_of(base_of(real)));
    if (own[0] == '\0')
        return PASS;
    bool opened = is_opened(own);
    if (!opened && is_loaded(real)) /* the program uses the real one already */
        return PASS;
    if (!opened && flags & RTLD_NOLOAD)
        return REFUSE;
    void *handle = open_own(own, real, flags);
    return handle == NULL ? PASS : handle;
}

__attribute__((visibility("hidden"), used)) void *kd_hook(
    const char *name, int flags, const void *caller) {
    next_dlopen();
    if (name == NULL || !is_nvrtc(name))
        return PASS;
    int saved = errno;
    void *result = strchr(name, '/') == NULL ? redirect_bare(name, flags, caller)
                                              : redirect_path(name, flags);
    errno = saved;
    return result;
}

/* In another root directory, the real library can't be found any more. A program that has opened
   the real NVRTC has loaded it by then. So our library must load it before, too. */
EXPORT int chroot(const char *path) {
    int (*next)(const char *) = (int (*)(const char *))dlsym(RTLD_NEXT, "chroot");
    int saved = errno;
    for (long major = LEAST_MAJOR; major <= MOST_MAJOR; major++) {
        char own[PATH_MAX];
        own_path(own, major);
        void *handle = own[0] == '\0' ? NULL : next_dlopen()(own, RTLD_LAZY | RTLD_NOLOAD);
        void (*load)(void) = handle == NULL ? NULL : (void (*)(void))dlsym(handle, "kcache_dropin_load");
        if (load != NULL)
            load();
        if (handle != NULL)
            dlclose(handle);
    }
    errno = saved;
    return next(path);
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
