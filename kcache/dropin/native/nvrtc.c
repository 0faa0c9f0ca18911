/* NVRTC's interface, answered by a kcache server, and by the real NVRTC where that can't be.

   A program lives here until something is asked of it that only the real library can tell: an
   output that no server keeps, a callback, a second compile, an option with effects beyond the
   outputs. Then it is made again in the real library, with everything that was done to it, and
   whatever follows is forwarded. So what is answered here is only what is known to be NVRTC's own
   answer; tests compare thousands of random calls on both.

   Threads: as NVRTC: any number, each program used by one at a time. Fork: the child goes on with
   the parent's programs and makes connections of its own. Never prints, never waits without an end,
   never needs Python. */
#define _GNU_SOURCE
#include "dropin.h"
#include "stubs.h"
#include "table.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int kd_callback(void *, void *);

#define MARK 0x6b64726f70696e31u /* "kdropin1" */

/* Texts that the caller handed over, copied. */
struct texts {
    char **items;
    int count, room;
};

/* What the caller knows as an nvrtcProgram. */
struct program {
    uint64_t mark;
    struct program *self;
    char *source, *name; /* `name` may be NULL */
    struct texts header_texts, header_names, names, options;
    bool compiled; /* `result` and `answer` are those of the last compile */
    int result;
    struct kd_answer *answer;
    kd_callback *callback;
    void *payload;
    kd_program real; /* not NULL: everything is forwarded */
};

/* Variables that NVRTC reads (found by recording its questions to libc); the server decides which
   of them matter. */
static const char *const variables[] = {
    "NVRTC_APPEND_FLAGS", "NVRTC_PREPEND_FLAGS", "NVRTCWIZ", "EDG_BASE", "EDG_MODULES_PATH", "PWD",
    "MAKEFLAGS", "FINALIZER_USE_LEGACY_ELF_BUILDER", "FINALIZER_CUBIE", "CAN_FINALIZE_DEBUG",
    "NVVM_IR_VER_CHK", "CUDA_CACHE_DISABLE", "DUMP_KNOBS_TO_FILE",
    "NVRTC_DISABLE_CONCURRENT_NVVM", NULL};

/* -- texts ------------------------------------------------------------------------------------- */

static bool add(struct texts *texts, const char *text) {
    if (texts->count == texts->room) {
        int room = texts->room * 2 + 8;
        char **grown = realloc(texts->items, (size_t)room * sizeof *grown);
        if (grown == NULL)
            return false;
        texts->items = grown;
        texts->room = room;
    }
    char *copy = strdup(text);
    if (copy == NULL)
        return false;
    texts->items[texts->count++] = copy;
    return true;
}

static bool add_all(struct texts *texts, int count, const char *const *items) {
    for (int i = 0; i < count; i++)
        if (items[i] == NULL || !add(texts, items[i]))
            return false;
    return true;
}

static void empty(struct texts *texts) {
    for (int i = 0; i < texts->count; i++)
        free(texts->items[i]);
    free(texts->items);
    *texts = (struct texts){0};
}

static const char *const *items(const struct texts *texts) {
    return (const char *const *)texts->items;
}

/* -- programs ---------------------------------------------------------------------------------- */

/* Ours, or NULL: the real library makes programs, too, by `__nvrtcCPEx`. */
static struct program *ours(kd_program program) {
    struct program *mine = program;
    return mine->mark == MARK && mine->self == mine ? mine : NULL;
}

static void release(struct program *mine) {
    free(mine->source);
    free(mine->name);
    empty(&mine->header_texts);
    empty(&mine->header_names);
    empty(&mine->names);
    empty(&mine->options);
    kd_answer_drop(mine->answer);
    mine->mark = 0;
    mine->self = NULL;
    free(mine);
}

#define REAL(name, ...) ((int (*)(__VA_ARGS__))kd_real(name))

static int real_create(
    kd_program *program, const char *source, const char *name, int count,
    const char *const *texts, const char *const *names) {
    int (*create)(kd_program *, const char *, const char *, int, const char *const *,
                  const char *const *) =
        REAL("nvrtcCreateProgram", kd_program *, const char *, const char *, int,
             const char *const *, const char *const *);
    return create == NULL ? KD_INTERNAL_ERROR
                          : create(program, source, name, count, texts, names);
}

static int real_compile(kd_program program, int count, const char *const *options) {
    int (*compile)(kd_program, int, const char *const *) =
        REAL("nvrtcCompileProgram", kd_program, int, const char *const *);
    return compile == NULL ? KD_INTERNAL_ERROR : compile(program, count, options);
}

static int real_add(kd_program program, const char *name) {
    int (*add_name)(kd_program, const char *) =
        REAL("nvrtcAddNameExpression", kd_program, const char *);
    return add_name == NULL ? KD_INTERNAL_ERROR : add_name(program, name);
}

static int real_callback(kd_program program, kd_callback *callback, void *payload) {
    int (*set)(kd_program, kd_callback *, void *) =
        REAL("nvrtcSetFlowCallback", kd_program, kd_callback *, void *);
    return set == NULL ? KD_INTERNAL_ERROR : set(program, callback, payload);
}

static void real_destroy(kd_program *program) {
    int (*destroy)(kd_program *) = REAL("nvrtcDestroyProgram", kd_program *);
    if (destroy != NULL)
        destroy(program);
}

/* Does in the real library what was done to the program here; NVRTC's result code. The server
   counts the reason, unless it is the server's own. */
static int hand_over(struct program *mine, const char *reason) {
    if (reason != NULL)
        kd_server_note(reason);
    kd_program real = NULL;
    int result = real_create(&real, mine->source, mine->name, mine->header_texts.count,
                             items(&mine->header_texts), items(&mine->header_names));
    for (int i = 0; result == KD_SUCCESS && i < mine->names.count; i++)
        result = real_add(real, mine->names.items[i]);
    if (result == KD_SUCCESS && mine->callback != NULL)
        result = real_callback(real, mine->callback, mine->payload);
    if (result != KD_SUCCESS) {
        if (real != NULL)
            real_destroy(&real);
        return result;
    }
    if (mine->compiled)
        real_compile(real, mine->options.count, items(&mine->options));
    mine->real = real;
    return KD_SUCCESS;
}

/* -- compiling --------------------------------------------------------------------------------- */

/* Options whose effects go beyond outputs that a cache keeps; by how they begin, dashes left out.
   Precompiled headers have a status, traces and timings have files, OptiX and tile IR have
   getters; bundled headers are installed. */
static const char *const handed_over[] = {
    "pch", "create-pch", "use-pch", "instantiate-templates-in-pch", "fdevice-time-trace", "time",
    "optix-ir", "tile", "use-bundled", "bundled", NULL};

static const char *own_business(int count, const char *const *options) {
    for (int i = 0; i < count; i++) {
        const char *option = options[i];
        while (*option == ' ' || *option == '-')
            option++;
        for (int n = 0; handed_over[n] != NULL; n++)
            if (strncmp(option, handed_over[n], strlen(handed_over[n])) == 0)
                return handed_over[n];
    }
    return NULL;
}

static void put_texts(struct kd_buffer *request, const struct texts *texts) {
    kd_put_number(request, (uint32_t)texts->count);
    for (int i = 0; i < texts->count; i++)
        kd_put_text(request, texts->items[i]);
}

static void put_environment(struct kd_buffer *request) {
    uint32_t count = 0;
    for (int i = 0; variables[i] != NULL; i++)
        count += getenv(variables[i]) != NULL;
    kd_put_number(request, count);
    for (int i = 0; variables[i] != NULL && count > 0; i++) {
        const char *value = getenv(variables[i]);
        if (value == NULL)
            continue;
        kd_put_text(request, variables[i]);
        kd_put_text(request, value);
        count--;
    }
}

/* The layout is described once, in kcache/dropin/protocol.py. */
static bool put_request(struct kd_buffer *request, const struct program *mine) {
    char path[PATH_MAX], directory[PATH_MAX];
    if (!kd_real_path(path, sizeof path) || getcwd(directory, sizeof directory) == NULL)
        return false;
    size_t most = strlen(mine->source) + 4096;
    request->data = malloc(most);
    request->room = request->data == NULL ? 0 : most;
    kd_put_number(request, KCACHE_MAJOR);
    kd_put_text(request, path);
    kd_put_text(request, directory);
    put_environment(request);
    kd_put_text(request, mine->source);
    kd_put_text(request, mine->name == NULL ? "" : mine->name); /* the same to NVRTC */
    put_texts(request, &mine->header_names);
    put_texts(request, &mine->header_texts);
    put_texts(request, &mine->options);
    put_texts(request, &mine->names);
    return !request->failed;
}

static struct kd_answer *answer_from_server(const struct kd_buffer *request) {
    struct kd_reply reply;
    if (!kd_server_ask(KD_COMPILE, request, &reply))
        return NULL;
    if (reply.kind != KD_ANSWER) {
        free(reply.data);
        return NULL;
    }
    struct kd_answer *answer = kd_answer_parse(reply.data, reply.size);
    if (answer != NULL && answer->flags & KD_KEEP)
        kd_remember(request, answer);
    return answer;
}

static bool has_all_names(const struct program *mine, const struct kd_answer *answer) {
    if (answer->result != KD_SUCCESS)
        return true;
    for (int i = 0; i < mine->names.count; i++) {
        bool there = false;
        for (uint32_t n = 0; n < answer->lowered_count && !there; n++)
            there = strcmp(answer->lowered[n].name.data, mine->names.items[i]) == 0;
        if (!there)
            return false;
    }
    return true;
}

static struct kd_answer *find_answer(const struct program *mine) {
    struct kd_buffer request = {0};
    struct kd_answer *answer = NULL;
    if (kd_server_wanted() && put_request(&request, mine)) {
        answer = kd_recall(&request);
        if (answer == NULL)
            answer = answer_from_server(&request);
    }
    free(request.data);
    if (answer != NULL && !has_all_names(mine, answer)) {
        kd_answer_drop(answer);
        answer = NULL;
    }
    return answer;
}

static int compile_by_real(
    struct program *mine, const char *reason, int count, const char *const *options) {
    int result = hand_over(mine, reason);
    return result == KD_SUCCESS ? real_compile(mine->real, count, options) : result;
}

static int compile(struct program *mine, int count, const char *const *options) {
    if (mine->compiled && mine->result != KD_INVALID_OPTION)
        return compile_by_real(mine, "compiled twice", count, options);
    for (int i = 0; i < count; i++)
        if (options[i] == NULL)
            return compile_by_real(mine, "an option is NULL", count, options);
    const char *reason = own_business(count, options);
    if (mine->callback != NULL)
        reason = "flow callback";
    if (reason != NULL) /* an earlier compile was refused for its options; its replay is harmless */
        return compile_by_real(mine, reason, count, options);
    struct texts before = mine->options;
    mine->options = (struct texts){0};
    struct kd_answer *answer = NULL;
    if (add_all(&mine->options, count, options))
        answer = find_answer(mine);
    if (answer == NULL) {
        empty(&mine->options);
        mine->options = before;
        return compile_by_real(mine, NULL, count, options);
    }
    empty(&before);
    kd_answer_drop(mine->answer);
    mine->answer = answer;
    mine->compiled = true;
    return mine->result = answer->result;
}

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
    mine->mark = MARK;
    mine->self = mine;
    mine->source = strdup(source);
    mine->name = name == NULL ? NULL : strdup(name);
    if (mine->source == NULL || (name != NULL && mine->name == NULL) ||
        !add_all(&mine->header_texts, count, texts) ||
        !add_all(&mine->header_names, count, names)) {
        release(mine); /* a header that is NULL, most likely: the real library knows what to say */
        return real_create(program, source, name, count, texts, names);
    }
    *program = mine;
    return KD_SUCCESS;
}

KD_EXPORT int nvrtcDestroyProgram(kd_program *program) {
    if (program == NULL || *program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = ours(*program);
    if (mine == NULL) {
        int (*destroy)(kd_program *) = REAL("nvrtcDestroyProgram", kd_program *);
        return destroy == NULL ? KD_INTERNAL_ERROR : destroy(program);
    }
    if (mine->real != NULL)
        real_destroy(&mine->real);
    release(mine);
    *program = NULL;
    return KD_SUCCESS;
}

KD_EXPORT int nvrtcCompileProgram(kd_program program, int count, const char *const *options) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = ours(program);
    if (mine == NULL || mine->real != NULL)
        return real_compile(mine == NULL ? program : mine->real, count, options);
    if (count < 0)
        return KD_INVALID_INPUT;
    if (count > 0 && options == NULL) {
        /* Refused for its options, which counts as a compile; the real library keeps the books. */
        return compile_by_real(mine, "options are NULL", count, options);
    }
    return compile(mine, count, options);
}

KD_EXPORT int nvrtcAddNameExpression(kd_program program, const char *name) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = ours(program);
    if (mine == NULL || mine->real != NULL)
        return real_add(mine == NULL ? program : mine->real, name);
    if (name == NULL)
        return KD_INVALID_INPUT;
    if (mine->compiled && mine->result != KD_INVALID_OPTION)
        return KD_NO_NAMES_AFTER_COMPILATION;
    return add(&mine->names, name) ? KD_SUCCESS : KD_OUT_OF_MEMORY;
}

KD_EXPORT int nvrtcGetLoweredName(kd_program program, const char *name, const char **lowered) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = ours(program);
    if (mine == NULL || mine->real != NULL) {
        int (*get)(kd_program, const char *, const char **) =
            REAL("nvrtcGetLoweredName", kd_program, const char *, const char **);
        return get == NULL ? KD_INTERNAL_ERROR
                           : get(mine == NULL ? program : mine->real, name, lowered);
    }
    if (name == NULL || lowered == NULL)
        return KD_INVALID_INPUT;
    *lowered = NULL;
    if (!mine->compiled || mine->result != KD_SUCCESS)
        return KD_NO_LOWERED_BEFORE_COMPILATION;
    for (uint32_t i = 0; i < mine->answer->lowered_count; i++) {
        const struct kd_lowered *each = &mine->answer->lowered[i];
        if (strcmp(each->name.data, name) == 0) {
            *lowered = each->lowered.data;
            return KD_SUCCESS;
        }
    }
    return KD_NAME_NOT_VALID;
}

KD_EXPORT int nvrtcSetFlowCallback(kd_program program, kd_callback *callback, void *payload) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = ours(program);
    if (mine == NULL || mine->real != NULL)
        return real_callback(mine == NULL ? program : mine->real, callback, payload);
    int result = hand_over(mine, "flow callback");
    return result == KD_SUCCESS ? real_callback(mine->real, callback, payload) : result;
}

/* -- the interface: outputs -------------------------------------------------------------------- */

static int real_size(const char *getter, kd_program program, size_t *size) {
    int (*get)(kd_program, size_t *) = REAL(getter, kd_program, size_t *);
    return get == NULL ? KD_INTERNAL_ERROR : get(program, size);
}

static int real_bytes(const char *getter, kd_program program, char *buffer) {
    int (*get)(kd_program, char *) = REAL(getter, kd_program, char *);
    return get == NULL ? KD_INTERNAL_ERROR : get(program, buffer);
}

/* Before a compile, NVRTC has empty texts, which end in a NUL, and empty binaries. */
static const struct kd_bytes empty_text = {"", 1}, nothing = {NULL, 0};

static struct kd_bytes ptx(const struct program *mine) {
    return mine->compiled ? mine->answer->ptx : empty_text;
}
static struct kd_bytes program_log(const struct program *mine) {
    return mine->compiled ? mine->answer->log : empty_text;
}
static struct kd_bytes cubin(const struct program *mine) {
    return mine->compiled ? mine->answer->cubin : nothing;
}
static struct kd_bytes ltoir(const struct program *mine) {
    return mine->compiled ? mine->answer->ltoir : nothing;
}
/* Programs whose options ask for it are compiled by the real library. */
static struct kd_bytes absent(const struct program *mine) {
    (void)mine;
    return nothing;
}

#define GETTERS(name, output)                                                                      \
    KD_EXPORT int name##Size(kd_program program, size_t *size) {                                   \
        if (program == NULL)                                                                       \
            return KD_INVALID_PROGRAM;                                                             \
        struct program *mine = ours(program);                                                      \
        if (mine == NULL || mine->real != NULL)                                                    \
            return real_size(#name "Size", mine == NULL ? program : mine->real, size);             \
        if (size == NULL)                                                                          \
            return KD_INVALID_INPUT;                                                               \
        *size = output(mine).size;                                                                 \
        return KD_SUCCESS;                                                                         \
    }                                                                                              \
    KD_EXPORT int name(kd_program program, char *buffer) {                                         \
        if (program == NULL)                                                                       \
            return KD_INVALID_PROGRAM;                                                             \
        struct program *mine = ours(program);                                                      \
        if (mine == NULL || mine->real != NULL)                                                    \
            return real_bytes(#name, mine == NULL ? program : mine->real, buffer);                 \
        if (buffer == NULL)                                                                        \
            return KD_INVALID_INPUT;                                                               \
        struct kd_bytes bytes = output(mine);                                                      \
        if (bytes.size > 0)                                                                        \
            memcpy(buffer, bytes.data, bytes.size);                                                \
        return KD_SUCCESS;                                                                         \
    }

GETTERS(nvrtcGetPTX, ptx)
GETTERS(nvrtcGetCUBIN, cubin)
GETTERS(nvrtcGetLTOIR, ltoir)
GETTERS(nvrtcGetOptiXIR, absent)
GETTERS(nvrtcGetProgramLog, program_log)
#if KCACHE_MAJOR >= 13
GETTERS(nvrtcGetTileIR, absent)
#else
GETTERS(nvrtcGetNVVM, ltoir) /* the older name of LTOIR */
#endif

KD_EXPORT int nvrtcGetPCHCreateStatus(kd_program program) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = ours(program);
    if (mine != NULL && mine->real == NULL)
        return KD_NO_PCH_ATTEMPTED;
    int (*get)(kd_program) = REAL("nvrtcGetPCHCreateStatus", kd_program);
    return get == NULL ? KD_INTERNAL_ERROR : get(mine == NULL ? program : mine->real);
}

KD_EXPORT int nvrtcGetPCHHeapSizeRequired(kd_program program, size_t *size) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = ours(program);
    if (mine == NULL || mine->real != NULL)
        return real_size("nvrtcGetPCHHeapSizeRequired", mine == NULL ? program : mine->real, size);
    if (size == NULL)
        return KD_INVALID_INPUT;
    *size = 0;
    return KD_SUCCESS;
}

/* -- the interface: what the library is -------------------------------------------------------- */

#define MOST_ARCHS 64

/* Version and architectures of the real library, which the server knows without our loading it. */
struct about {
    bool known;
    int major, minor, count, archs[MOST_ARCHS];
};

static struct about kept_about;
static pthread_mutex_t about_lock = PTHREAD_MUTEX_INITIALIZER;

static bool parse_about(struct about *about, const struct kd_reply *reply) {
    struct kd_reader reader = {reply->data, reply->data + reply->size, false};
    about->major = (int)kd_number(&reader);
    about->minor = (int)kd_number(&reader);
    uint32_t count = kd_number(&reader);
    for (uint32_t i = 0; i < count && i < MOST_ARCHS; i++)
        about->archs[i] = (int)kd_number(&reader);
    about->count = (int)count;
    about->known = !reader.bad && reader.at == reader.end && about->major == KCACHE_MAJOR &&
                   count > 0 && count <= MOST_ARCHS;
    return about->known;
}

static bool ask_about(struct about *answer) {
    struct kd_buffer request = {0};
    struct kd_reply reply;
    char path[PATH_MAX];
    bool known = false;
    if (!kd_server_wanted() || !kd_real_path(path, sizeof path))
        return false;
    kd_put_text(&request, path);
    if (kd_server_ask(KD_QUERY, &request, &reply)) {
        known = reply.kind == KD_INFO && parse_about(answer, &reply);
        free(reply.data);
    }
    free(request.data);
    return known;
}

/* Not under the lock while the server is asked: a fork would have to wait for it. */
static bool know(struct about *answer) {
    pthread_mutex_lock(&about_lock);
    *answer = kept_about;
    pthread_mutex_unlock(&about_lock);
    if (answer->known || !ask_about(answer))
        return answer->known;
    pthread_mutex_lock(&about_lock);
    kept_about = *answer;
    pthread_mutex_unlock(&about_lock);
    return true;
}

KD_EXPORT int nvrtcVersion(int *major, int *minor) {
    if (major == NULL || minor == NULL)
        return KD_INVALID_INPUT;
    struct about about;
    if (know(&about)) {
        *major = about.major;
        *minor = about.minor;
        return KD_SUCCESS;
    }
    int (*get)(int *, int *) = REAL("nvrtcVersion", int *, int *);
    return get == NULL ? KD_INTERNAL_ERROR : get(major, minor);
}

KD_EXPORT int nvrtcGetNumSupportedArchs(int *count) {
    if (count == NULL)
        return KD_INVALID_INPUT;
    struct about about;
    if (know(&about)) {
        *count = about.count;
        return KD_SUCCESS;
    }
    int (*get)(int *) = REAL("nvrtcGetNumSupportedArchs", int *);
    return get == NULL ? KD_INTERNAL_ERROR : get(count);
}

KD_EXPORT int nvrtcGetSupportedArchs(int *archs) {
    if (archs == NULL)
        return KD_INVALID_INPUT;
    struct about about;
    if (know(&about)) {
        memcpy(archs, about.archs, (size_t)about.count * sizeof *archs);
        return KD_SUCCESS;
    }
    int (*get)(int *) = REAL("nvrtcGetSupportedArchs", int *);
    return get == NULL ? KD_INTERNAL_ERROR : get(archs);
}

KD_EXPORT const char *nvrtcGetErrorString(int result) {
    const char *(*get)(int) = (const char *(*)(int))kd_real("nvrtcGetErrorString");
    return get == NULL ? "NVRTC_ERROR unknown" : get(result);
}

/* -- what is only forwarded -------------------------------------------------------------------- */

#define STUB(name) KD_STUB(#name)
__asm__(KD_STUBS_BEGIN KD_FORWARDED(STUB));

#define NAME(name) #name,
static const char *const forwarded[] = {KD_FORWARDED(NAME)};
static const char *const answered[] = {KD_ANSWERED(NAME)};

static int missing(void) { return KD_INTERNAL_ERROR; }

void *kd_resolve(unsigned index) {
    void *function = kd_real(forwarded[index]);
    return function == NULL ? (void *)missing : function;
}

bool kd_exported(const char *name) {
    for (size_t i = 0; i < sizeof answered / sizeof *answered; i++)
        if (strcmp(name, answered[i]) == 0)
            return true;
    for (size_t i = 0; i < sizeof forwarded / sizeof *forwarded; i++)
        if (strcmp(name, forwarded[i]) == 0)
            return true;
    return false;
}

/* -- what kcache.install() and the hook call --------------------------------------------------- */

KD_EXPORT void kcache_dropin_set_server(const char *path) { kd_server_set(path); }

/* -- fork -------------------------------------------------------------------------------------- */

static void before_fork(void) {
    pthread_mutex_lock(&about_lock);
    kd_real_lock();
    kd_server_lock();
    kd_answers_lock();
}

static void after_fork_in_parent(void) {
    kd_answers_unlock();
    kd_server_unlock();
    kd_real_unlock();
    pthread_mutex_unlock(&about_lock);
}

static void after_fork_in_child(void) {
    kd_answers_after_fork();
    kd_server_after_fork();
    kd_real_after_fork();
    pthread_mutex_init(&about_lock, NULL);
}

__attribute__((constructor)) static void begin(void) {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}
