/* The client, `kcache-nvcc`: answers a start of nvcc from the cache, or starts nvcc itself.

   It is started as `kcache-nvcc NVCC ARGUMENTS` by a build tool that has a setting for a launcher;
   as `kcache-nvcc ARGUMENTS`, or under the name `nvcc`, in place of the compiler; and as
   `kcache-nvcc --program PATH NVCC ARGUMENTS` by the library that `kcache run` preloads, where PATH
   is the file and NVCC is argv[0].

   The client asks the server of `kcache run`. On a hit, it writes the files as nvcc would. On a
   miss, it runs nvcc with the recorder, forwards signals to nvcc, and forwards nvcc's output and
   status to the caller. In every other case, the client executes nvcc in its own process, so that
   the caller notices no difference. */
#define _GNU_SOURCE
#include "../../dropin/native/dropin.h"
#include "find.h"
#include "recording.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define STARTED "KCACHE_NVCC_STARTED"
/* A longer output is forwarded, but not stored. */
#define MAX_TEXT ((size_t)16 << 20)

extern char **environ;
pthread_mutex_t kd_lock = PTHREAD_MUTEX_INITIALIZER;

struct call {
    const char *program;
    char **argv;
};

/* Executes nvcc in this process. The variable has the process's id, because the library in exec.c,
   which nvcc loads, would otherwise start the client again. */
static void become(const struct call *call) {
    char number[16];
    sprintf(number, "%d", getpid());
    setenv(KN_PROCESS, number, 1);
    syscall(SYS_execve, call->program, call->argv, environ); /* not intercepted by a hook */
    int error = errno;
    fprintf(stderr, "%s: %s\n", call->program, strerror(error));
    _exit(error == ENOENT ? 127 : 126);
}

/* -- which nvcc -------------------------------------------------------------------------------- */

static bool is_other(const char *path) {
    struct stat status, own;
    return kn_is_program(path) && stat(path, &status) == 0 && stat("/proc/self/exe", &own) == 0 &&
           (status.st_dev != own.st_dev || status.st_ino != own.st_ino);
}

static bool find_at(const char *home, char to[PATH_MAX]) {
    return home != NULL && snprintf(to, PATH_MAX, "%s/bin/nvcc", home) < PATH_MAX && is_other(to);
}

/* Finds an nvcc that is not this program. If the caller named it `nvcc`, PATH is searched first.
   Otherwise, the order is that in which other programs search for the compiler. */
static bool find(bool is_named, char to[PATH_MAX]) {
    return (is_named && kn_find_in_path("nvcc", is_other, to)) || find_at(getenv("CUDA_HOME"), to) ||
           find_at(getenv("CUDA_PATH"), to) || kn_find_in_path("nvcc", is_other, to) ||
           find_at("/usr/local/cuda", to);
}

static bool read_call(int argc, char **argv, struct call *call) {
    static char found[PATH_MAX];
    if (argc > 3 && strcmp(argv[1], "--program") == 0) {
        *call = (struct call){argv[2], argv + 3};
        return true;
    }
    bool launched = argc > 1 && strcmp(kn_base_of(argv[1]), "nvcc") == 0;
    if (launched && strchr(argv[1], '/') != NULL) {
        *call = (struct call){argv[1], argv + 1};
        return true;
    }
    if (!find(launched || strcmp(kn_base_of(argv[0]), "nvcc") == 0, found))
        return false;
    *call = (struct call){found, launched ? argv + 1 : argv};
    call->argv[0] = found;
    return true;
}

/* Returns whether the options request something other than a compile, or whether their effect
   depends on this machine. */
static bool is_declined(char **argv) {
    static const char *const options[] = {
        "-",      "-V",     "--version", "-h",   "--help",   "-dryrun", "--dryrun",
        "-run",   "--run",  "-v",        "-lib", "--lib",    "-clean",  "--clean-targets",
        "-code-ls", "-arch-ls",
    };
    for (char **each = argv + 1; *each != NULL; each++) {
        for (size_t i = 0; i < sizeof options / sizeof *options; i++)
            if (strcmp(*each, options[i]) == 0)
                return true;
        if (strstr(*each, "native") != NULL || strncmp(*each, "--list-", 7) == 0 ||
            strncmp(*each, "-time", 5) == 0 || strncmp(*each, "--time", 6) == 0)
            return true;
    }
    return argv[1] == NULL;
}

/* Returns whether a standard stream is closed. If so, the next file that is opened would get the
   stream's number, and nvcc's text would be written into that file. */
static bool is_stream_closed(void) {
    return fcntl(0, F_GETFD) < 0 || fcntl(1, F_GETFD) < 0 || fcntl(2, F_GETFD) < 0;
}

/* -- questions --------------------------------------------------------------------------------- */

/* Puts several texts into a message as one field, in which each ends in a NUL. */
static void put_texts(struct kd_message *message, char **texts) {
    size_t size = 0;
    for (char **each = texts; *each != NULL; each++)
        size += strlen(*each) + 1;
    char *joined = malloc(size + 1), *at = joined;
    if (joined == NULL)
        message->failed = true;
    for (char **each = texts; joined != NULL && *each != NULL; each++)
        at = stpcpy(at, *each) + 1;
    kd_put(message, joined, joined == NULL ? 0 : size);
    free(joined);
}

/* Returns whether standard output and standard error are one file. Then the order of their texts
   matters. */
static bool is_one_stream(void) {
    struct stat out, error;
    return fstat(1, &out) == 0 && fstat(2, &error) == 0 && out.st_dev == error.st_dev &&
           out.st_ino == error.st_ino;
}

static bool ask_for(const struct call *call, struct kd_reply *reply) {
    struct kd_message message;
    char directory[PATH_MAX];
    mode_t mask = umask(0);
    umask(mask);
    if (getcwd(directory, sizeof directory) == NULL)
        return false;
    kd_begin(&message, 9, 1 << 14);
    kd_put_text(&message, "nvcc");
    kd_put_standing(&message);
    kd_put_text(&message, call->program);
    kd_put_text(&message, directory);
    kd_put_number(&message, mask);
    kd_put_number(&message, is_one_stream());
    kd_put_number(&message, isatty(1) || isatty(2));
    put_texts(&message, call->argv);
    put_texts(&message, environ);
    bool answered = kd_server_ask(&message, reply);
    free(message.data);
    return answered;
}

/* -- a hit ------------------------------------------------------------------------------------- */

static bool write_all(int fd, const char *data, size_t size) {
    while (size > 0) {
        ssize_t done = write(fd, data, size);
        if (done < 0 && errno == EAGAIN && poll(&(struct pollfd){fd, POLLOUT, 0}, 1, -1) >= 0)
            continue;
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return false;
        data += done;
        size -= (size_t)done;
    }
    return true;
}

/* Returns whether nvcc would only create or replace a regular file at this path. Links, pipes,
   devices and files of other users are left to nvcc. */
static bool is_plain(const char *path) {
    struct stat status;
    if (lstat(path, &status) != 0)
        return errno == ENOENT;
    return S_ISREG(status.st_mode) && status.st_nlink == 1 && status.st_uid == geteuid();
}

static bool write_file(const char *path, mode_t mode, bool is_new, struct kd_bytes content) {
    if (is_new)
        unlink(path);
    int flags = O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | (is_new ? O_EXCL : O_TRUNC);
    int fd = open(path, flags, mode);
    if (fd < 0)
        return false;
    bool written = write_all(fd, content.data, content.size);
    return close(fd) == 0 && written;
}

/* Writes the files of a hit; returns false if nvcc has to run instead. The fields after `done` and
   `hit` are, for each file, its mode, whether it is new, its path and its content. Content without
   a path is printed to the standard stream whose number is the mode. */
static bool write_hit(const struct kd_reply *reply) {
    uint32_t mode, is_new;
    if (reply->count % 4 != 2)
        return false;
    signal(SIGXFSZ, SIG_IGN); /* a file that is too large for the caller's limit is left to nvcc */
    for (int writing = 0; writing < 2; writing++)
        for (uint32_t at = 2; at < reply->count; at += 4) {
            char path[PATH_MAX];
            size_t size = reply->fields[at + 2].size;
            struct kd_bytes content = reply->fields[at + 3];
            if (!kd_number(reply, at, &mode) || !kd_number(reply, at + 1, &is_new) ||
                size >= sizeof path)
                return false;
            memcpy(path, reply->fields[at + 2].data, size);
            path[size] = '\0';
            if (size == 0 && writing)
                write_all((int)mode, content.data, content.size);
            else if (size > 0 && !(writing ? write_file(path, mode, is_new, content) : is_plain(path)))
                return false;
        }
    return true;
}

/* -- a miss ------------------------------------------------------------------------------------ */

/* A pipe whose text is forwarded to a stream of the caller, and a copy of the text. */
struct stream {
    int from, to;
    char *text;
    size_t size;
    bool whole;
};

static volatile sig_atomic_t child;

/* Forwards a signal that was sent to this process. Signals of the terminal are not forwarded,
   because nvcc gets these directly. */
static void pass_on(int number, siginfo_t *info, void *context) {
    (void)context;
    int saved = errno;
    if (info->si_code <= 0 && child > 0)
        kill(child, number);
    errno = saved;
}

static const int PASSED_ON[] = {SIGINT, SIGQUIT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGALRM};
#define PASSED_ON_COUNT (sizeof PASSED_ON / sizeof *PASSED_ON)

static void catch_signals(void) {
    struct sigaction action = {.sa_sigaction = pass_on, .sa_flags = SA_SIGINFO | SA_RESTART};
    struct sigaction before;
    for (size_t i = 0; i < PASSED_ON_COUNT; i++)
        if (sigaction(PASSED_ON[i], NULL, &before) == 0 && before.sa_handler == SIG_DFL)
            sigaction(PASSED_ON[i], &action, NULL);
}

/* Allocates the memory of the recording, and puts its path into `name`; returns NULL on failure. */
static struct kr_recording *make_recording(struct kd_bytes roots, char name[64]) {
    int fd = (int)syscall(SYS_memfd_create, "kcache-nvcc", 1 /* MFD_CLOEXEC */);
    void (*before)(int) = signal(SIGXFSZ, SIG_IGN); /* `ulimit -f` counts this file, too */
    bool sized = fd >= 0 && ftruncate(fd, KR_SIZE) == 0;
    signal(SIGXFSZ, before);
    if (!sized || roots.size > KR_MAX_ROOTS)
        return NULL;
    void *memory = mmap(NULL, KR_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED)
        return NULL;
    struct kr_recording *recording = memory;
    memcpy(recording->roots, roots.data, roots.size);
    recording->roots_size = (uint32_t)roots.size;
    for (int stream = 0; stream < 3; stream++)
        recording->terminals |= (uint32_t)isatty(stream) << stream;
    sprintf(name, "/proc/%d/fd/%d", getpid(), fd);
    return recording;
}

/* Forwards the text that has arrived; returns whether there may be more. */
static bool pump(struct stream *stream) {
    char text[1 << 16];
    ssize_t size = read(stream->from, text, sizeof text);
    if (size < 0)
        return errno == EINTR;
    if (size == 0)
        return false;
    char *grown = realloc(stream->text, stream->size + (size_t)size);
    stream->whole = stream->whole && grown != NULL && stream->size + (size_t)size <= MAX_TEXT;
    if (grown != NULL) {
        stream->text = grown;
        if (stream->whole) {
            memcpy(grown + stream->size, text, (size_t)size);
            stream->size += (size_t)size;
        }
    }
    write_all(stream->to, text, (size_t)size);
    return true;
}

/* Forwards text until nvcc has exited, and returns its status. The end of the streams is not
   awaited, because processes that have inherited them may run longer. */
static int wait_for(pid_t pid, struct stream streams[2]) {
    int status, handle = (int)syscall(SYS_pidfd_open, pid, 0);
    struct pollfd polled[3] = {
        {streams[0].from, POLLIN, 0}, {streams[1].from, POLLIN, 0}, {handle, POLLIN, 0}};
    bool ended = false;
    while (polled[0].fd >= 0 || polled[1].fd >= 0) {
        int found = poll(polled, 3, ended ? 0 : -1);
        if (found == 0)
            break;
        if (found < 0)
            continue;
        for (int i = 0; i < 2; i++)
            if (polled[i].revents != 0 && !pump(&streams[i]))
                polled[i].fd = -1;
        if (polled[2].revents != 0) {
            ended = true;
            polled[2].fd = -1;
        }
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        continue;
    child = 0;
    close(handle);
    return status;
}

static void die_like(int status) {
    if (!WIFSIGNALED(status))
        _exit(WEXITSTATUS(status));
    int number = WTERMSIG(status);
    sigset_t set;
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    signal(number, SIG_DFL);
    sigemptyset(&set);
    sigaddset(&set, number);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    kill(getpid(), number);
    _exit(128 + number);
}

/* Sends the recording, and waits until the server has read the files that nvcc wrote, because they
   may be changed once this process has exited. */
static void store(const struct kr_recording *recording, const struct stream streams[2]) {
    struct kd_message message;
    struct kd_reply reply;
    uint64_t room = KR_SIZE - sizeof *recording;
    bool whole = recording->used <= room && streams[0].whole && streams[1].whole;
    kd_begin(&message, 5, recording->used + (1 << 12));
    kd_put_text(&message, "nvcc-made");
    kd_put_text(&message, whole ? "" : "the recording or the text that nvcc printed is too long");
    kd_put(&message, streams[0].text, streams[0].size);
    kd_put(&message, streams[1].text, streams[1].size);
    kd_put(&message, recording->records, whole ? recording->used : 0);
    kd_server_ask(&message, &reply);
}

/* Runs nvcc with the recorder; returns only if nvcc was not started. The fields after `done` and
   `compile` are the libraries that nvcc's tools preload, and the roots. */
static void compile(const struct call *call, const struct kd_reply *reply) {
    int out[2], error[2];
    char name[64], *preloaded;
    sigset_t all, before;
    if (reply->count != 4)
        return;
    preloaded = strndup(reply->fields[2].data, reply->fields[2].size);
    struct kr_recording *recording = make_recording(reply->fields[3], name);
    if (preloaded == NULL || recording == NULL || pipe2(out, O_CLOEXEC) != 0 ||
        pipe2(error, O_CLOEXEC) != 0)
        return;
    bool one = is_one_stream();
    pid_t parent = getpid();
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    void (*of_children)(int) = signal(SIGCHLD, SIG_DFL); /* if ignored, nvcc's status is lost */
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGCHLD, of_children);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        dup2(out[1], 1);
        dup2(one ? out[1] : error[1], 2);
        sigprocmask(SIG_SETMASK, &before, NULL);
        if (setenv("LD_PRELOAD", preloaded, 1) == 0 && setenv(KR_VARIABLE, name, 1) == 0)
            become(call);
        _exit(127);
    }
    if (pid > 0) {
        child = pid;
        catch_signals();
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (pid < 0)
        return;
    close(out[1]);
    close(error[1]);
    struct stream streams[2] = {{out[0], 1, NULL, 0, true}, {error[0], 2, NULL, 0, true}};
    int status = wait_for(pid, streams);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        store(recording, streams);
    die_like(status);
}

/* Called outside `kcache run`. Executes `kcache run` with this program as its command. This starts
   a server, which other programs use, too. Returns only on failure. */
static void become_run(const struct call *call) {
    char self[PATH_MAX + 8], kcache[PATH_MAX + 8];
    ssize_t size = readlink("/proc/self/exe", self, PATH_MAX);
    size_t count = 0;
    if (size <= 0 || getenv(STARTED) != NULL)
        return;
    self[size] = '\0';
    snprintf(kcache, sizeof kcache, "%.*skcache", (int)(kn_base_of(self) - self), self);
    while (call->argv[count] != NULL)
        count++;
    char **command = calloc(count + 7, sizeof *command);
    if (command == NULL || access(kcache, X_OK) != 0 || setenv(STARTED, "1", 1) != 0)
        return;
    char *const first[] = {kcache, "run", "--", self, "--program", (char *)call->program};
    memcpy(command, first, sizeof first);
    memcpy(command + sizeof first / sizeof *first, call->argv, count * sizeof *command);
    execv(kcache, command);
    unsetenv(STARTED);
}

int main(int argc, char **argv) {
    struct call call;
    struct kd_reply reply;
    if (!read_call(argc, argv, &call)) {
        fputs("kcache-nvcc: nvcc was not found; set CUDA_HOME or PATH (CUDA_PATH and "
              "/usr/local/cuda were searched, too)\n",
              stderr);
        return 127;
    }
    if (is_declined(call.argv) || is_stream_closed())
        become(&call);
    if (getenv(KN_SOCKET) == NULL)
        become_run(&call);
    kcache_dropin_set_server(getenv(KN_SOCKET));
    if (!ask_for(&call, &reply))
        become(&call);
    void (*before)(int) = signal(SIGXFSZ, SIG_DFL);
    if (kd_is(&reply, 1, "hit") && write_hit(&reply))
        return 0;
    signal(SIGXFSZ, before);
    if (kd_is(&reply, 1, "compile"))
        compile(&call, &reply);
    if (kd_is(&reply, 1, "refused") && reply.count == 3) {
        write_all(2, reply.fields[2].data, reply.fields[2].size);
        return 1;
    }
    become(&call);
}
