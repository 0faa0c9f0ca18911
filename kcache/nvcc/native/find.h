/* What the client and the library of `kcache run` share. */
#ifndef KCACHE_FIND_H
#define KCACHE_FIND_H

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define KN_SOCKET "KCACHE_DROPIN_SOCKET"
/* The variable with the id of the process in which nvcc itself has to run, not the client. */
#define KN_PROCESS "KCACHE_NVCC_PROCESS"

static inline const char *kn_base_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

static inline bool kn_is_program(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISREG(status.st_mode) && access(path, X_OK) == 0;
}

/* Finds the first file with this name in PATH for which `fits` returns true. */
static inline bool kn_find_in_path(const char *name, bool fits(const char *), char to[PATH_MAX]) {
    const char *at = getenv("PATH");
    while (at != NULL) {
        const char *end = strchrnul(at, ':');
        const char *between = end == at ? "" : "/";
        int size = snprintf(to, PATH_MAX, "%.*s%s%s", (int)(end - at), at, between, name);
        if (size < PATH_MAX && fits(to))
            return true;
        at = *end == '\0' ? NULL : end + 1;
    }
    return false;
}

#endif
