/* The recorder is preloaded into nvcc and the tools that it starts, and records their questions to
   the operating system.

   It changes no answer, except that of `isatty`, because the tools write into pipes of the client,
   but must write as they would to the caller's terminal. A call whose effects can't be followed is
   recorded as a problem ('!'), and the result of the compile is not stored.

   Kinds: O open for reading, W open for writing, S stat, L lstat, A access, R readlink, P realpath,
   E variable, X start of a program, x failed start, Q search in PATH, B begin of a program, M
   mapped library, D directory of libraries, T clock, U removed, N renamed, V the roots that a
   preprocessed file names, ! problem. An answer that begins with '-' is an errno.

   Threads and vfork: no locks, no memory from the heap. */
#define _GNU_SOURCE
#include "records.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define STAMP 160

typedef char *const texts[];

/* The function of the C library that this library replaces. */
#define NEXT(name)                                                                                 \
    ({                                                                                             \
        static __typeof__(&name) next;                                                             \
        if (next == NULL)                                                                          \
            next = (__typeof__(&name))dlsym(RTLD_NEXT, #name);                                     \
        next;                                                                                      \
    })

/* -- records ----------------------------------------------------------------------------------- */

static void note_error(char kind, const char *path, int error) {
    char text[16];
    sprintf(text, "-%d", error);
    note(kind, path, text);
}

#define KIND(mode) (S_ISREG(mode) ? 'f' : S_ISDIR(mode) ? 'd' : S_ISLNK(mode) ? 'l' : 'o')

static intmax_t ns(struct timespec time) {
    return (intmax_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static const char *stamp(char *to, const struct stat *status) {
    sprintf(to, "%c %ju %ju %jd %jd %jd", KIND(status->st_mode), (uintmax_t)status->st_ino,
            (uintmax_t)status->st_dev, (intmax_t)status->st_size, ns(status->st_mtim),
            ns(status->st_ctim));
    return to;
}

static void opened(const char *path, int fd, bool writes, const char *how) {
    struct stat status;
    struct timespec now;
    char text[STAMP];
    int saved = errno;
    if (fd < 0)
        note_error(writes ? 'W' : 'O', path, saved);
    else if (writes)
        note('W', path, how);
    else if (fstat(fd, &status) == 0) {
        note('O', path, stamp(text, &status));
        /* If the file was changed in this tick of the files' clock, another change in the same tick
           would not change its times. */
        NEXT(clock_gettime)(CLOCK_REALTIME_COARSE, &now);
        if (S_ISREG(status.st_mode) &&
            (ns(status.st_mtim) >= ns(now) || ns(status.st_ctim) >= ns(now)))
            note('O', path, "!");
    }
    errno = saved;
}

/* Records a file's kind, inode and device, the parts of its status that the tools use. */
static void looked(char kind, const char *path, int failed, const struct stat *status) {
    char text[STAMP];
    int saved = errno;
    if (failed != 0)
        note_error(kind, path, saved);
    else {
        sprintf(text, "%c %ju %ju", KIND(status->st_mode), (uintmax_t)status->st_ino,
                (uintmax_t)status->st_dev);
        note(kind, path, text);
    }
    errno = saved;
}

/* Returns a path that is relative to the descriptor of a directory as an absolute path. */
static const char *below(int directory, const char *path, char to[2 * PATH_MAX]) {
    char link[48];
    if (path == NULL || path[0] == '/' || directory == AT_FDCWD || recording == NULL)
        return path;
    sprintf(link, "/proc/self/fd/%d", directory);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, to, PATH_MAX);
    snprintf(to + (size < 0 ? 0 : size), PATH_MAX, "/%s", path);
    return to;
}

/* -- files ------------------------------------------------------------------------------------- */

/* A function of the C library, and what is recorded after it has returned `r`. */
#define AFTER(type, name, parameters, arguments, note_it)                                          \
    type name parameters;                                                                          \
    EXPORT type name parameters {                                                                  \
        type r = NEXT(name) arguments;                                                             \
        note_it;                                                                                   \
        return r;                                                                                  \
    }
#define BEFORE(type, name, parameters, arguments, note_it)                                         \
    type name parameters;                                                                          \
    EXPORT type name parameters {                                                                  \
        note_it;                                                                                   \
        return NEXT(name) arguments;                                                               \
    }
#define BELOW(directory, path) below(directory, path, (char[2 * PATH_MAX]){0})

/* '+': the old content of the file does not matter; '=': it may matter. */
static void opened_with(const char *path, int fd, int flags) {
    bool writes = (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) != 0;
    opened(path, fd, writes, flags & (O_TRUNC | O_EXCL) ? "+" : "=");
}

static void opened_stream(const char *path, FILE *stream, const char *mode) {
    bool writes = mode[0] != 'r' || strchr(mode, '+') != NULL;
    opened(path, stream == NULL ? -1 : fileno(stream), writes, mode[0] == 'w' ? "+" : "=");
}

static mode_t mode_in(int flags, va_list rest) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

#define OPEN(name, parameters, arguments, path)                                                    \
    EXPORT int name parameters {                                                                   \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        mode_t mode = mode_in(flags, rest);                                                        \
        va_end(rest);                                                                              \
        int fd = NEXT(name) arguments;                                                             \
        opened_with(path, fd, flags);                                                              \
        return fd;                                                                                 \
    }
OPEN(open, (const char *p, int flags, ...), (p, flags, mode), p)
OPEN(openat, (int d, const char *p, int flags, ...), (d, p, flags, mode), BELOW(d, p))
AFTER(int, __open_2, (const char *p, int flags), (p, flags), opened_with(p, r, flags))
AFTER(int, creat, (const char *p, mode_t m), (p, m), opened(p, r, true, "+"))
AFTER(int, mkstemp, (char *p), (p), opened(p, r, true, "+"))
AFTER(int, mkstemps, (char *p, int n), (p, n), opened(p, r, true, "+"))
AFTER(FILE *, fopen, (const char *p, const char *m), (p, m), opened_stream(p, r, m))
AFTER(FILE *, freopen, (const char *p, const char *m, FILE *f), (p, m, f), opened_stream(p, r, m))

/* -- questions --------------------------------------------------------------------------------- */

static void looked_at(int directory, const char *path, int failed, const void *status, int flags) {
    if (path != NULL && path[0] != '\0')
        looked(flags & AT_SYMLINK_NOFOLLOW ? 'L' : 'S', BELOW(directory, path), failed, status);
}

static void looked_again(int directory, const char *path, int flags) {
    struct stat status;
    int saved = errno;
    long failed = syscall(SYS_newfstatat, directory, path, &status, flags & AT_SYMLINK_NOFOLLOW);
    looked_at(directory, path, (int)failed, &status, flags);
    errno = saved;
}

static void accessed(const char *path, int mode, int failed) {
    char text[32];
    sprintf(text, "%d %d", mode, failed == 0 ? 0 : errno);
    note('A', path, text);
}

static void linked(const char *path, const char *target, ssize_t size) {
    char text[PATH_MAX + 1] = "";
    if (size < 0)
        note_error('R', path, errno);
    else
        note('R', path, memcpy(text, target, size < PATH_MAX ? (size_t)size : PATH_MAX));
}

static void resolved(const char *path, const char *result) {
    if (result == NULL)
        note_error('P', path, errno);
    else
        note('P', path, result);
}

struct statx;
AFTER(int, stat, (const char *p, struct stat *s), (p, s), looked('S', p, r, s))
AFTER(int, lstat, (const char *p, struct stat *s), (p, s), looked('L', p, r, s))
AFTER(int, fstatat, (int d, const char *p, struct stat *s, int f), (d, p, s, f),
      looked_at(d, p, r, s, f))
AFTER(int, statx, (int d, const char *p, int f, unsigned m, struct statx *s), (d, p, f, m, s),
      looked_again(d, p, f))
/* Programs that were linked with a glibc before 2.33 call these. */
AFTER(int, __xstat, (int v, const char *p, struct stat *s), (v, p, s), looked('S', p, r, s))
AFTER(int, __lxstat, (int v, const char *p, struct stat *s), (v, p, s), looked('L', p, r, s))
AFTER(int, __fxstatat, (int v, int d, const char *p, struct stat *s, int f), (v, d, p, s, f),
      looked_at(d, p, r, s, f))
/* On machines with 64 bits, these names mean the same. */
#define ALIAS(name, other)                                                                         \
    __asm__(".globl " #other "\n.type " #other ", %function\n.set " #other ", " #name);
ALIAS(open, open64) ALIAS(openat, openat64) ALIAS(__open_2, __open64_2) ALIAS(creat, creat64)
ALIAS(mkstemp, mkstemp64) ALIAS(mkstemps, mkstemps64) ALIAS(fopen, fopen64)
ALIAS(freopen, freopen64) ALIAS(stat, stat64) ALIAS(lstat, lstat64) ALIAS(fstatat, fstatat64)
ALIAS(__xstat, __xstat64) ALIAS(__lxstat, __lxstat64) ALIAS(__fxstatat, __fxstatat64)
AFTER(int, access, (const char *p, int m), (p, m), accessed(p, m, r))
AFTER(int, eaccess, (const char *p, int m), (p, m), accessed(p, m, r))
AFTER(int, euidaccess, (const char *p, int m), (p, m), accessed(p, m, r))
AFTER(int, faccessat, (int d, const char *p, int m, int f), (d, p, m, f),
      accessed(BELOW(d, p), m, r))
AFTER(ssize_t, readlink, (const char *p, char *to, size_t n), (p, to, n), linked(p, to, r))
AFTER(ssize_t, readlinkat, (int d, const char *p, char *to, size_t n), (d, p, to, n),
      linked(BELOW(d, p), to, r))
AFTER(char *, realpath, (const char *p, char *to), (p, to), resolved(p, r))
AFTER(char *, __realpath_chk, (const char *p, char *to, size_t n), (p, to, n), resolved(p, r))
AFTER(char *, canonicalize_file_name, (const char *p), (p), resolved(p, r))
BEFORE(char *, getenv, (const char *name), (name), note('E', name, ""))
BEFORE(char *, secure_getenv, (const char *name), (name), note('E', name, ""))

EXPORT int isatty(int fd) {
    if (recording == NULL || fd < 0 || fd > 2)
        return NEXT(isatty)(fd);
    errno = ENOTTY;
    return recording->terminals >> fd & 1;
}

/* -- programs ---------------------------------------------------------------------------------- */

/* Records the start of a program with its arguments; each ends in 0x1f. */
static void starts(const char *path, texts arguments) {
    size_t size = 1;
    if (recording == NULL || path == NULL)
        return;
    for (char *const *each = arguments; each != NULL && *each != NULL; each++)
        size += strlen(*each) + 1;
    char *to = record('X', path, size);
    for (char *const *each = arguments; to != NULL && each != NULL && *each != NULL; each++) {
        to = stpcpy(to, *each);
        *to++ = '\x1f';
    }
    if (to != NULL)
        *to = '\0';
}

/* Records PATH, in which the C library searches for a program that is named without a directory. */
static void note_search(const char *name) {
    const char *path = recording == NULL ? NULL : NEXT(getenv)("PATH");
    if (path != NULL && name != NULL && strchr(name, '/') == NULL)
        note('Q', name, path);
}

/* Records a failed start. A number makes each record different, because `note` writes equal records
   only once, but the reader counts the failures. */
static void failed_to_start(const char *path, int error) {
    char text[24];
    static unsigned number;
    sprintf(text, "%d %u", error, __atomic_add_fetch(&number, 1, __ATOMIC_RELAXED));
    note('x', path, text);
}

static void started(const char *path, texts argv, bool in_path) {
    if (in_path)
        note_search(path);
    starts(path, argv);
}

#define EXEC(name, parameters, arguments, in_path)                                                 \
    EXPORT int name parameters {                                                                   \
        started(path, argv, in_path);                                                              \
        int result = NEXT(name) arguments;                                                         \
        if (result != 0)                                                                           \
            failed_to_start(path, result < 0 ? errno : result);                                    \
        return result;                                                                             \
    }
EXEC(execve, (const char *path, texts argv, texts envp), (path, argv, envp), false)
EXEC(execv, (const char *path, texts argv), (path, argv), false)
EXEC(execvp, (const char *path, texts argv), (path, argv), true)
EXEC(execvpe, (const char *path, texts argv, texts envp), (path, argv, envp), true)
#define SPAWN                                                                                      \
    pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,                       \
        const posix_spawnattr_t *attributes, texts argv, texts envp
EXEC(posix_spawn, (SPAWN), (pid, path, actions, attributes, argv, envp), false)
EXEC(posix_spawnp, (SPAWN), (pid, path, actions, attributes, argv, envp), true)

#define SHELL(command) started("/bin/sh", (char *const[]){(char *)(command), NULL}, false)
BEFORE(int, system, (const char *command), (command), SHELL(command))
BEFORE(FILE *, popen, (const char *command, const char *mode), (command, mode), SHELL(command))

/* -- clocks, changes, and what is not followed ------------------------------------------------- */

#define CLOCK(type, name, parameters, arguments)                                                   \
    BEFORE(type, name, parameters, arguments, note('T', #name, ""))
CLOCK(time_t, time, (time_t *to), (to))
CLOCK(struct tm *, localtime, (const time_t *when), (when))
CLOCK(struct tm *, localtime_r, (const time_t *restrict when, struct tm *restrict to), (when, to))
CLOCK(struct tm *, gmtime, (const time_t *when), (when))
CLOCK(struct tm *, gmtime_r, (const time_t *restrict when, struct tm *restrict to), (when, to))
CLOCK(char *, ctime, (const time_t *when), (when))
CLOCK(int, clock_gettime, (clockid_t clock, struct timespec *to), (clock, to))
CLOCK(int, gettimeofday, (struct timeval *restrict to, void *restrict zone), (to, zone))

static bool ends_with(const char *text, const char *end) {
    size_t size = strlen(text), least = strlen(end);
    return size >= least && strcmp(text + size - least, end) == 0;
}

/* Returns whether preprocessed text contains a word outside line markers (`# 1 "name"`). */
static bool has(const char *text, const char *end, const char *word) {
    const char *at = text;
    while ((at = memmem(at, (size_t)(end - at), word, strlen(word))) != NULL) {
        const char *line = memrchr(text, '\n', (size_t)(at - text));
        line = line == NULL ? text : line + 1;
        if (line[0] != '#' || (line[1] != ' ' && line[1] != 'l'))
            return true;
        at += strlen(word);
    }
    return false;
}

/* nvcc writes preprocessed source text into files. Before such a file is removed, it is searched
   for the roots, to know which of them the outputs may contain. */
static void search(const char *path) {
    char found[256] = "";
    int fd = NEXT(open)(path, O_RDONLY | O_CLOEXEC);
    off_t size = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
    char *text = size <= 0 ? MAP_FAILED : mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (fd >= 0)
        close(fd);
    if (text == MAP_FAILED)
        return;
    const char *root = recording->roots, *end = root + recording->roots_size;
    bool asks = has(text, text + size, "__builtin_FILE") ||
                has(text, text + size, "__builtin_source_location");
    for (int number = 0; root < end && number < 64; root += strlen(root) + 1, number++) {
        /* Code that asks for its file's name gets the name that is in a line marker. */
        bool named = asks ? memmem(text, (size_t)size, root, strlen(root)) != NULL
                          : has(text, text + size, root);
        if (named || strpbrk(root, "\"\\\n") != NULL) /* gcc escapes these, so they aren't found */
            sprintf(found + strlen(found), "%d ", number);
    }
    munmap(text, (size_t)size);
    note('V', path, found);
}

static void removed(const char *path) {
    int saved = errno;
    if (recording != NULL && path != NULL && ends_with(path, ".ii"))
        search(path);
    note('U', path, "");
    errno = saved;
}

BEFORE(int, unlink, (const char *p), (p), removed(p))
BEFORE(int, remove, (const char *p), (p), removed(p))
BEFORE(int, unlinkat, (int d, const char *p, int f), (d, p, f), removed(BELOW(d, p)))
BEFORE(int, rename, (const char *p, const char *to), (p, to), note('N', p, to))

#define PROBLEM(type, name, parameters, arguments, what)                                           \
    BEFORE(type, name, parameters, arguments, note('!', what, #name))
PROBLEM(DIR *, opendir, (const char *path), (path), path)
PROBLEM(DIR *, fdopendir, (int fd), (fd), "")
PROBLEM(int, mkdir, (const char *path, mode_t mode), (path, mode), path)
PROBLEM(char *, mkdtemp, (char *path), (path), path)
PROBLEM(int, rmdir, (const char *path), (path), path)
PROBLEM(int, link, (const char *path, const char *to), (path, to), to)
PROBLEM(int, symlink, (const char *path, const char *to), (path, to), to)
PROBLEM(int, mkfifo, (const char *path, mode_t mode), (path, mode), path)
PROBLEM(int, chdir, (const char *path), (path), path)
PROBLEM(int, fchdir, (int fd), (fd), "")
PROBLEM(int, chroot, (const char *path), (path), path)
PROBLEM(int, renameat, (int a, const char *b, int c, const char *d), (a, b, c, d), d)
PROBLEM(int, truncate, (const char *path, off_t size), (path, size), path)
PROBLEM(int, connect, (int fd, const struct sockaddr *to, socklen_t size), (fd, to, size), "")
PROBLEM(FILE *, tmpfile, (void), (), "")

/* -- libraries --------------------------------------------------------------------------------- */

static void note_stamp(char kind, const char *path) {
    struct stat status;
    char text[STAMP];
    if (syscall(SYS_newfstatat, AT_FDCWD, path, &status, 0) == 0)
        note(kind, path, stamp(text, &status));
}

static int mapped(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size, (void)data;
    if (info->dlpi_name != NULL && info->dlpi_name[0] != '\0')
        note_stamp('M', info->dlpi_name);
    return 0;
}

/* Records the directories that the loader searches for an object's libraries before it uses its
   cache. */
static void note_directories(void *object) {
    Dl_serinfo size, *found;
    if (dlinfo(object, RTLD_DI_SERINFOSIZE, &size) != 0 || size.dls_size > 1 << 20)
        return;
    found = alloca(size.dls_size);
    *found = size;
    if (dlinfo(object, RTLD_DI_SERINFOSIZE, found) == 0 &&
        dlinfo(object, RTLD_DI_SERINFO, found) == 0)
        for (unsigned i = 0; i < found->dls_cnt; i++)
            note('D', found->dls_serpath[i].dls_name, "");
}

EXPORT void *dlopen(const char *path, int flags) {
    void *handle = NEXT(dlopen)(path, flags);
    if (path != NULL && recording != NULL) {
        if (path[0] != '/')
            note('!', path, "dlopen");
        else if (handle == NULL)
            note_error('O', path, access(path, F_OK) == 0 ? EINVAL : ENOENT);
        dl_iterate_phdr(mapped, NULL);
    }
    return handle;
}

__attribute__((constructor)) static void begin(void) {
    char program[PATH_MAX + 1];
    const char *path = NEXT(getenv)(KR_VARIABLE);
    int fd = path == NULL ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *memory = mmap(NULL, KR_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    syscall(SYS_close, fd);
    long size = syscall(SYS_readlinkat, AT_FDCWD, "/proc/self/exe", program, sizeof program - 1);
    if (memory == MAP_FAILED || size < 0)
        return;
    program[size] = '\0';
    recording = memory;
    note_stamp('B', program);
    dl_iterate_phdr(mapped, NULL);
    struct link_map *object = dlopen(NULL, RTLD_LAZY);
    for (; object != NULL; object = object->l_next)
        note_directories(object);
}
