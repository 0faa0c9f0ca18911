/* The library of `kcache run`: starts the client, which is in the same folder, in place of nvcc.

   If a shell or Python starts nvcc, the hooks of execve and posix_spawn start the client, which
   saves the time of loading nvcc. All other starts, such as those by static programs, which preload
   nothing, are caught by a constructor in nvcc itself, before its `main`. If the client can't be
   started, nvcc runs.

   The caller of a hook may be a child after vfork(2), so a hook allocates no memory and takes no
   lock. */
#define _GNU_SOURCE
#include "find.h"

#include <dlfcn.h>
#include <errno.h>
#include <spawn.h>
#include <sys/auxv.h>

#define EXPORT __attribute__((visibility("default")))
#define SOCKET KN_SOCKET "="
#define ADDED 3 /* arguments before those of nvcc */

typedef char *const texts[];
typedef int spawner(pid_t *, const char *, const posix_spawn_file_actions_t *,
                    const posix_spawnattr_t *, texts, texts);

static int (*next_execve)(const char *, texts, texts);
static spawner *next_spawn;
static char client[PATH_MAX];

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

/* Returns whether the client has to be started in place of the file at `path`. */
static bool is_nvcc(const char *path, texts argv, texts envp) {
    if (path == NULL || strcmp(kn_base_of(path), "nvcc") != 0 || count(argv) == 0 || envp == NULL)
        return false;
    while (*envp != NULL && strncmp(*envp, SOCKET, sizeof SOCKET - 1) != 0)
        envp++;
    return *envp != NULL && client[0] != '\0' && access(client, X_OK) == 0 && kn_is_program(path);
}

/* -- in nvcc ----------------------------------------------------------------------------------- */

/* Returns nvcc's arguments, including argv[0]. If nvcc is a script, those of its interpreter are
   left out. Returns NULL if this is another program. */
static char **arguments_of(const char *program, char **argv) {
    char executable[PATH_MAX];
    ssize_t size = readlink("/proc/self/exe", executable, sizeof executable - 1);
    executable[size < 0 ? 0 : size] = '\0';
    if (strcmp(kn_base_of(executable), "nvcc") == 0)
        return argv;
    while (*argv != NULL && strcmp(*argv, program) != 0)
        argv++;
    return *argv == NULL ? NULL : argv;
}

__attribute__((constructor)) static void prepare(int argc, char **argv, char **envp) {
    Dl_info info;
    if (next_spawn != NULL) /* done: a constructor of another library has started a program */
        return;
    next_execve = (int (*)(const char *, texts, texts))dlsym(RTLD_NEXT, "execve");
    next_spawn = (spawner *)dlsym(RTLD_NEXT, "posix_spawn");
    if (dladdr((void *)prepare, &info) == 0)
        return;
    int folder = (int)(kn_base_of(info.dli_fname) - info.dli_fname);
    if (snprintf(client, sizeof client, "%.*skcache-nvcc", folder, info.dli_fname) >= PATH_MAX)
        client[0] = '\0';
    const char *program = (const char *)getauxval(AT_EXECFN), *own = getenv(KN_PROCESS);
    if (argc < 1 || !is_nvcc(program, argv, envp) || (own != NULL && atoi(own) == getpid()))
        return;
    char *with[argc + ADDED + 1];
    argv = arguments_of(program, argv);
    if (argv != NULL)
        next_execve(client, added(program, argv, with), envp);
}

/* -- where it is started ----------------------------------------------------------------------- */

/* `start` is the call of the C library, and `instead` the call that starts the client. */
#define HOOK(parameters, start, instead, failed)                                                   \
    EXPORT int parameters {                                                                        \
        int saved = errno;                                                                         \
        if (next_spawn == NULL)                                                                    \
            prepare(0, NULL, NULL);                                                                \
        if (is_nvcc(path, argv, envp)) {                                                           \
            char *with[count(argv) + ADDED + 1];                                                   \
            added(path, argv, with);                                                               \
            int result = instead;                                                                  \
            if (!(failed))                                                                         \
                return result;                                                                     \
        }                                                                                          \
        errno = saved;                                                                             \
        return start;                                                                              \
    }

HOOK(execve(const char *path, texts argv, texts envp), next_execve(path, argv, envp),
     next_execve(client, with, envp), true)
HOOK(posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                 const posix_spawnattr_t *attributes, texts argv, texts envp),
     next_spawn(pid, path, actions, attributes, argv, envp),
     next_spawn(pid, client, actions, attributes, with, envp), result != 0)
