/* The hook in programs under `kcache run`: a start of a file named `nvcc` becomes a start of the
   client, which is beside this library. All other calls go to the C library unchanged.

   The caller may be a child after vfork(2), so nothing here takes memory or locks: arguments are on
   the stack, and functions are looked up when the library is loaded. If the client can't be
   started, nvcc is. */
#define _GNU_SOURCE
#include "find.h"

#include <dlfcn.h>
#include <errno.h>
#include <spawn.h>

#define EXPORT __attribute__((visibility("default")))
#define SOCKET "KCACHE_DROPIN_SOCKET="
#define ADDED 3 /* arguments before those of nvcc */

typedef char *const texts[];
typedef int spawner(pid_t *, const char *, const posix_spawn_file_actions_t *,
                    const posix_spawnattr_t *, texts, texts);

extern char **environ;

static int (*next_execve)(const char *, texts, texts), (*next_execvpe)(const char *, texts, texts);
static int (*next_execv)(const char *, texts), (*next_execvp)(const char *, texts);
static spawner *next_spawn, *next_spawnp;
static char client[PATH_MAX];

__attribute__((constructor)) static void prepare(void) {
    Dl_info info;
    if (next_spawnp != NULL) /* a constructor of another library has started a program */
        return;
    next_execve = (int (*)(const char *, texts, texts))dlsym(RTLD_NEXT, "execve");
    next_execvpe = (int (*)(const char *, texts, texts))dlsym(RTLD_NEXT, "execvpe");
    next_execv = (int (*)(const char *, texts))dlsym(RTLD_NEXT, "execv");
    next_execvp = (int (*)(const char *, texts))dlsym(RTLD_NEXT, "execvp");
    next_spawn = (spawner *)dlsym(RTLD_NEXT, "posix_spawn");
    next_spawnp = (spawner *)dlsym(RTLD_NEXT, "posix_spawnp");
    if (dladdr((void *)prepare, &info) == 0)
        return;
    int folder = (int)(kn_base_of(info.dli_fname) - info.dli_fname);
    if (snprintf(client, sizeof client, "%.*skcache-nvcc", folder, info.dli_fname) >= PATH_MAX)
        client[0] = '\0';
}

/* Returns the file that is started; NULL unless it is nvcc and the client shall stand before it. */
static const char *find(const char *name, bool in_path, texts argv, texts envp, char to[PATH_MAX]) {
    if (name == NULL || strcmp(kn_base_of(name), "nvcc") != 0 || argv == NULL || argv[0] == NULL ||
        envp == NULL)
        return NULL;
    while (*envp != NULL && strncmp(*envp, SOCKET, sizeof SOCKET - 1) != 0)
        envp++;
    if (*envp == NULL || client[0] == '\0' || access(client, X_OK) != 0)
        return NULL;
    if (strchr(name, '/') != NULL || !in_path)
        return kn_is_program(name) ? name : NULL;
    return kn_find_in_path(name, kn_is_program, to) ? to : NULL;
}

static size_t count(texts argv) {
    size_t size = 0;
    while (argv != NULL && argv[size] != NULL)
        size++;
    return size;
}

static char **added(const char *path, texts argv, char **to) {
    to[0] = client;
    to[1] = (char *)"--program";
    to[2] = (char *)path;
    memcpy(to + ADDED, argv, (count(argv) + 1) * sizeof *argv);
    return to;
}

/* `start` is the call of the C library; `instead` the call for the client. */
#define HOOK(parameters, in_path, envp, start, instead, failed)                                    \
    EXPORT int parameters {                                                                        \
        char found[PATH_MAX];                                                                      \
        int saved = errno;                                                                         \
        if (next_spawnp == NULL)                                                                   \
            prepare();                                                                             \
        const char *nvcc = find(path, in_path, argv, envp, found);                                 \
        if (nvcc != NULL) {                                                                        \
            char *with[count(argv) + ADDED + 1];                                                   \
            added(nvcc, argv, with);                                                               \
            int result = instead;                                                                  \
            if (!(failed))                                                                         \
                return result;                                                                     \
        }                                                                                          \
        errno = saved;                                                                             \
        return start;                                                                              \
    }

HOOK(execve(const char *path, texts argv, texts envp), false, envp, next_execve(path, argv, envp),
     next_execve(client, with, envp), true)
HOOK(execvpe(const char *path, texts argv, texts envp), true, envp, next_execvpe(path, argv, envp),
     next_execve(client, with, envp), true)
HOOK(execv(const char *path, texts argv), false, environ, next_execv(path, argv),
     next_execv(client, with), true)
HOOK(execvp(const char *path, texts argv), true, environ, next_execvp(path, argv),
     next_execv(client, with), true)
HOOK(posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                 const posix_spawnattr_t *attributes, texts argv, texts envp),
     false, envp, next_spawn(pid, path, actions, attributes, argv, envp),
     next_spawn(pid, client, actions, attributes, with, envp), result != 0)
HOOK(posix_spawnp(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                  const posix_spawnattr_t *attributes, texts argv, texts envp),
     true, envp, next_spawnp(pid, path, actions, attributes, argv, envp),
     next_spawn(pid, client, actions, attributes, with, envp), result != 0)
