/* The program's side of a conversation with the server: a few connections, and no wait without a
 * limit.
 *
 * If anything is unexpected (no server, no heartbeat, another protocol, a damaged message), the
 * question fails, and the caller uses the real library. After a missing heartbeat or a damaged
 * message, this process does not ask again. If the server has exited, a question costs one refused
 * connection.
 *
 * This library connects when NVRTC is opened, so that the server has a thread ready for the first
 * question.
 *
 * Descriptors are closed on exec and have high numbers. Before each use, their identity is checked,
 * because some programs close descriptors that they did not open. Fork: the child makes its own
 * connections. */
#define _GNU_SOURCE
#include "dropin.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* More fields than any answer has. A name expression takes two. */
#define MAX_FIELDS (1u << 16)
/* Without a heartbeat for this long, the server is considered stopped. It sends one every half
 * second, but its interpreter may still have to start. */
#ifndef SILENCE_MS
#define SILENCE_MS 5000
#endif
/* The longest wait for one answer. No compile takes longer. */
#define MOST_MS (60 * 60 * 1000)
#define MAX_IDLE 4
/* Attempts to connect, 10 ms apart, while the backlog of the server's socket is full. */
#define ATTEMPTS 20
#define LEAST_DESCRIPTOR 64
/* The kernel's default for /proc/sys/kernel/overflowuid. */
#define OVERFLOW_ID 65534

struct connection {
    int fd;
    dev_t device;
    ino_t inode;
    pid_t process; /* the only user: a child must not use it, and not every fork runs handlers */
};

enum result { DONE, GONE, SILENT, DAMAGED };

static struct connection idle[MAX_IDLE];
static int idle_count;
/* Empty if there is no server to ask. */
static char socket_path[sizeof((struct sockaddr_un *)0)->sun_path];

KD_EXPORT void kcache_dropin_set_server(const char *path) {
    bool usable = path != NULL && strlen(path) < sizeof socket_path;
    pthread_mutex_lock(&kd_lock);
    strcpy(socket_path, usable ? path : "");
    pthread_mutex_unlock(&kd_lock);
}

bool kd_server_wanted(void) {
    pthread_mutex_lock(&kd_lock);
    bool wanted = *socket_path != '\0';
    pthread_mutex_unlock(&kd_lock);
    return wanted;
}

/* Lets this process ask no more. If the server sent no heartbeat, its socket is removed, so that
 * programs that start later do not wait, too: a make with a thousand compilers would wait a
 * thousand times. If the server continues, it makes a new socket. */
static void give_up(enum result reason) {
    struct stat status;
    pthread_mutex_lock(&kd_lock);
    if (reason == SILENT && lstat(socket_path, &status) == 0 && S_ISSOCK(status.st_mode) &&
        status.st_uid == geteuid())
        unlink(socket_path);
    *socket_path = '\0';
    pthread_mutex_unlock(&kd_lock);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* -- connections ------------------------------------------------------------------------------- */

static bool ours(const struct connection *connection) {
    struct stat status;
    return fstat(connection->fd, &status) == 0 && S_ISSOCK(status.st_mode) &&
           status.st_dev == connection->device && status.st_ino == connection->inode;
}

static void leave(const struct connection *connection) {
    if (ours(connection))
        close(connection->fd);
}

/* Returns whether several users may have this id: in a user namespace that does not map all users,
 * all others have the id OVERFLOW_ID. See `is_ambiguous` in kcache/util/path_safety.py. */
static bool is_ambiguous(uid_t user) {
    uint64_t users = 0, count;
    FILE *map = user == OVERFLOW_ID ? fopen("/proc/self/uid_map", "re") : NULL;
    if (map != NULL) {
        while (fscanf(map, "%*u %*u %" SCNu64, &count) == 1)
            users += count;
        fclose(map);
    }
    return user == OVERFLOW_ID && users < UINT32_MAX;
}

static bool same_user(int fd) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid() &&
           !is_ambiguous(peer.uid);
}

static int new_socket(void) {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || fd >= LEAST_DESCRIPTOR)
        return fd;
    int higher = fcntl(fd, F_DUPFD_CLOEXEC, LEAST_DESCRIPTOR);
    if (higher < 0)
        return fd;
    close(fd);
    return higher;
}

static bool connect_to(struct connection *connection) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    pthread_mutex_lock(&kd_lock);
    strcpy(address.sun_path, socket_path);
    pthread_mutex_unlock(&kd_lock);
    struct stat status;
    int fd = new_socket();
    if (fd < 0)
        return false;
    /* The socket does not block. EAGAIN means that the backlog is full at the moment. */
    int failed = -1;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        failed = connect(fd, (struct sockaddr *)&address, sizeof address);
        if (failed == 0 || (errno != EAGAIN && errno != EINTR))
            break;
        nanosleep(&(struct timespec){.tv_nsec = 10 * 1000 * 1000}, NULL);
    }
    if (failed != 0 || !same_user(fd) || fstat(fd, &status) != 0) {
        close(fd);
        return false;
    }
    *connection = (struct connection){fd, status.st_dev, status.st_ino, getpid()};
    return true;
}

static bool take_idle(struct connection *connection) {
    bool found = false;
    pthread_mutex_lock(&kd_lock);
    while (!found && idle_count > 0) {
        *connection = idle[--idle_count];
        found = connection->process == getpid() && ours(connection);
        if (!found)
            leave(connection);
    }
    pthread_mutex_unlock(&kd_lock);
    return found;
}

static void keep_idle(const struct connection *connection) {
    pthread_mutex_lock(&kd_lock);
    bool kept = idle_count < MAX_IDLE;
    if (kept)
        idle[idle_count++] = *connection;
    pthread_mutex_unlock(&kd_lock);
    if (!kept)
        leave(connection);
}

/* -- messages ---------------------------------------------------------------------------------- */

static enum result ready(int fd, short events) {
    int64_t end = now() + SILENCE_MS;
    for (;;) {
        int64_t left = end - now();
        struct pollfd each = {fd, events, 0};
        /* Poll at least once: if this process was stopped since `end` was set, the answer may have
         * arrived. */
        int found = poll(&each, 1, left > 0 ? (int)left : 0);
        if (found > 0)
            return each.revents & POLLNVAL ? GONE : DONE;
        if (found == 0)
            return SILENT;
        if (errno != EINTR)
            return GONE;
    }
}

/* Sends (POLLOUT) or receives (POLLIN) all bytes. */
static enum result move(int fd, short direction, void *data, size_t size) {
    for (char *at = data, *end = at + size; at < end;) {
        ssize_t moved = direction == POLLOUT
                            ? send(fd, at, (size_t)(end - at), MSG_NOSIGNAL | MSG_DONTWAIT)
                            : recv(fd, at, (size_t)(end - at), MSG_DONTWAIT);
        enum result result = DONE;
        if (moved > 0)
            at += moved;
        else if (moved == 0 || (errno != EAGAIN && errno != EINTR))
            result = GONE;
        else if (errno == EAGAIN)
            result = ready(fd, direction);
        if (result != DONE)
            return result;
    }
    return DONE;
}

static enum result receive(int fd, struct kd_reply *reply) {
    struct {
        char magic[4];
        uint32_t count;
    } head;
    enum result result = move(fd, POLLIN, &head, sizeof head);
    if (result != DONE)
        return result;
    if (memcmp(head.magic, "KCW1", 4) != 0 || head.count == 0 || head.count > MAX_FIELDS)
        return DAMAGED;
    char *sizes = malloc(8 * (size_t)head.count);
    result = sizes == NULL ? GONE : move(fd, POLLIN, sizes, 8 * (size_t)head.count);
    if (result == DONE && !kd_reply_begin(reply, head.count, sizes))
        result = DAMAGED;
    free(sizes);
    return result == DONE ? move(fd, POLLIN, (void *)(uintptr_t)reply->fields[0].data, reply->size)
                           : result;
}

static enum result converse(
    int fd, const struct kd_message *message, struct kd_reply *reply, bool *heard) {
    int64_t end = now() + MOST_MS;
    enum result result = move(fd, POLLOUT, message->data, message->size);
    while (result == DONE) {
        free(reply->fields);
        *reply = (struct kd_reply){0};
        result = receive(fd, reply);
        if (result != DONE || !kd_is(reply, 0, KD_WAIT))
            break;
        *heard = true;
        if (now() > end)
            result = SILENT;
    }
    return result;
}

static bool ask(const struct kd_message *message, struct kd_reply *reply) {
    for (int attempt = 0; attempt < 2 + MAX_IDLE; attempt++) {
        struct connection connection;
        bool used = take_idle(&connection);
        if (!used && !connect_to(&connection))
            return false;
        bool heard = false;
        enum result result = converse(connection.fd, message, reply, &heard);
        if (result == DONE) {
            keep_idle(&connection);
            return kd_is(reply, 0, KD_DONE);
        }
        leave(&connection);
        if (result == SILENT || result == DAMAGED)
            give_up(result);
        /* Only an idle connection is worth another attempt: the server may have closed it, or
         * another server may have replaced that server. */
        if (result != GONE || !used || heard)
            return false;
    }
    return false;
}

bool kd_server_ask(const struct kd_message *message, struct kd_reply *reply) {
    *reply = (struct kd_reply){0};
    if (message->failed || message->put != message->count || !kd_server_wanted())
        return false;
    int before, saved = errno;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    bool answered = ask(message, reply);
    pthread_setcancelstate(before, NULL);
    errno = saved;
    return answered;
}

bool kd_server_greet(void) {
    struct connection connection;
    int saved = errno;
    bool there = kd_server_wanted() && (take_idle(&connection) || connect_to(&connection));
    if (there)
        keep_idle(&connection);
    errno = saved;
    return there;
}

/* The same text as from `standing` in kcache/dropin/protocol.py. */
void kd_put_standing(struct kd_message *message) {
    struct stat root = {0}, space = {0};
    char text[160];
    int saved = errno;
    if (stat("/", &root) != 0 || stat("/proc/thread-self/ns/mnt", &space) != 0)
        space = (struct stat){0};
    errno = saved;
    int size = snprintf(text, sizeof text, "%u %u %ju %ju %ju %ju", geteuid(), getegid(),
                        (uintmax_t)root.st_dev, (uintmax_t)root.st_ino, (uintmax_t)space.st_dev,
                        (uintmax_t)space.st_ino);
    kd_put(message, text, (size_t)size);
}

void kd_server_note(const char *reason) {
    struct kd_message note;
    struct kd_reply reply;
    kd_begin(&note, 2, 128);
    kd_put_text(&note, "note");
    kd_put_text(&note, reason);
    kd_server_ask(&note, &reply);
    free(reply.fields);
    free(note.data);
}

/* A connection stays open if its descriptor is not below the process's limit of descriptors,
 * because its number could not be used for another file. */
void kd_server_leave(void) {
    struct connection connection;
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
        while (take_idle(&connection)) {
            if ((rlim_t)connection.fd >= limit.rlim_cur) {
                keep_idle(&connection);
                break;
            }
            leave(&connection);
        }
}

void kd_server_after_fork(void) {
    while (idle_count > 0)
        leave(&idle[--idle_count]);
}
