/* NVRTC's interface, answered by a kcache server, or by the real NVRTC if the server can't answer.
 *
 * A program is kept here until the caller needs something that only the real library has: an output
 * that no server keeps, a callback, a second compile, or an option with effects beyond the outputs.
 * Then the program is created again in the real library, everything that was done to it is
 * repeated, and all later calls are forwarded. So this library never gives another answer than
 * NVRTC. Tests compare thousands of random calls of both libraries.
 *
 * Threads: any number of threads may call it, but only one at a time for each program, as in NVRTC.
 * Fork: the child continues with the parent's programs and makes its own connections. The library
 * never prints, never waits without a limit, and does not need Python. */
#define _GNU_SOURCE
#include "dropin.h"
#include "stubs.h"
#include "table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* -- the interface: programs ------------------------------------------------------------------- */

KD_EXPORT int nvrtcCreateProgram(
    kd_program *program, const char *source, const char *name, int count,
    const char *const *texts, const char *const *names) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    if (source == NULL || count < 0 || (count > 0 && (texts == NULL || names == NULL)))
        return KD_INVALID_INPUT;
    struct program *mine = calloc(1, sizeof *mine);
    if (mine == NULL)
        return KD_OUT_OF_MEMORY;
    mine->mark = KD_MARK;
    mine->self = mine;
    mine->source = strdup(source);
    mine->name = name == NULL ? NULL : strdup(name);
    if (mine->source == NULL || (name != NULL && mine->name == NULL) ||
        !kd_texts_add_all(&mine->header_texts, count, texts) ||
        !kd_texts_add_all(&mine->header_names, count, names) ||
        !kd_texts_differ(&mine->header_names)) {
        /* A header is NULL, two have the same name, or memory ran out. The real library answers. */
        kd_release(mine);
        return kd_real_create(program, source, name, count, texts, names);
    }
    *program = mine;
    return KD_SUCCESS;
}

KD_EXPORT int nvrtcDestroyProgram(kd_program *program) {
    if (program == NULL || *program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = kd_ours(*program);
    if (mine == NULL)
        return kd_real_destroy(program);
    if (mine->real != NULL)
        kd_real_destroy(&mine->real);
    kd_release(mine);
    *program = NULL;
    return KD_SUCCESS;
}

KD_EXPORT int nvrtcCompileProgram(kd_program program, int count, const char *const *options) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = kd_here(&program);
    if (mine == NULL)
        return kd_real_compile(program, count, options);
    if (count < 0)
        return KD_INVALID_INPUT;
    return kd_compile_here(mine, count, options);
}

KD_EXPORT int nvrtcAddNameExpression(kd_program program, const char *name) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = kd_here(&program);
    if (mine == NULL)
        return REAL("nvrtcAddNameExpression", kd_program, const char *)(program, name);
    if (name == NULL)
        return KD_INVALID_INPUT;
    if (mine->compiled && mine->result != KD_INVALID_OPTION)
        return KD_NO_NAMES_AFTER_COMPILATION;
    return kd_texts_add(&mine->names, name) ? KD_SUCCESS : KD_OUT_OF_MEMORY;
}

KD_EXPORT int nvrtcGetLoweredName(kd_program program, const char *name, const char **lowered) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = kd_here(&program);
    if (mine == NULL)
        return REAL("nvrtcGetLoweredName", kd_program, const char *, const char **)(
            program, name, lowered);
    if (name == NULL || lowered == NULL)
        return KD_INVALID_INPUT;
    *lowered = NULL;
    if (!mine->compiled || mine->result != KD_SUCCESS)
        return KD_NO_LOWERED_BEFORE_COMPILATION;
    *lowered = kd_lowered(&mine->answer, name);
    return *lowered == NULL ? KD_NAME_NOT_VALID : KD_SUCCESS;
}

KD_EXPORT int nvrtcSetFlowCallback(
    kd_program program, int (*callback)(void *, void *), void *payload) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = kd_here(&program);
    int result = mine == NULL ? KD_SUCCESS : kd_hand_over(mine, "flow callback");
    if (result != KD_SUCCESS)
        return result;
    return REAL("nvrtcSetFlowCallback", kd_program, int (*)(void *, void *), void *)(
        mine == NULL ? program : mine->real, callback, payload);
}

/* -- what is only forwarded -------------------------------------------------------------------- */

#define STUB(name) KD_STUB(#name)
__asm__(KD_STUBS_BEGIN KD_FORWARDED(STUB));

#define NAME(name) #name,
static const char *const forwarded[] = {KD_FORWARDED(NAME)};

void *kd_resolve(unsigned index) { return kd_real(forwarded[index]); }

bool kd_exported(const char *name) {
    static const char *const all[] = {KD_ANSWERED(NAME) KD_FORWARDED(NAME)};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(name, all[i]) == 0)
            return true;
    return false;
}

/* -- what kcache.install() and the preloaded library call ---------------------------------- */

/* Loads the real library. If this process has compiled, an empty program is compiled, too, because
 * NVRTC loads further libraries for its first compile. */
KD_EXPORT void kcache_dropin_load(void) {
    kd_program program = NULL;
    int saved = errno;
    if (kd_real_create(&program, "", NULL, 0, NULL, NULL) == KD_SUCCESS) {
        if (kd_has_compiled())
            kd_real_compile(program, 0, NULL);
        kd_real_destroy(&program);
    }
    errno = saved;
}

/* -- fork -------------------------------------------------------------------------------------- */

pthread_mutex_t kd_lock = PTHREAD_MUTEX_INITIALIZER;

static void before_fork(void) { pthread_mutex_lock(&kd_lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&kd_lock); }
static void after_fork_in_child(void) {
    pthread_mutex_init(&kd_lock, NULL);
    kd_server_after_fork();
}

__attribute__((constructor)) static void begin(void) {
    kcache_dropin_set_server(secure_getenv("KCACHE_DROPIN_SOCKET"));
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}
