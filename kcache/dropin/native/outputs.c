/* The interface: the outputs of a program, before and after its compile. */
#define _GNU_SOURCE
#include "program.h"

#include <string.h>

static int real_size(const char *getter, kd_program program, size_t *size) {
    int (*get)(kd_program, size_t *) = REAL(getter, kd_program, size_t *);
    return get == NULL ? KD_INTERNAL_ERROR : get(program, size);
}

static int real_bytes(const char *getter, kd_program program, char *buffer) {
    int (*get)(kd_program, char *) = REAL(getter, kd_program, char *);
    return get == NULL ? KD_INTERNAL_ERROR : get(program, buffer);
}

/* Before a compile, NVRTC returns empty texts, which end in a NUL, and empty binaries. */
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
/* The real library compiles the programs whose options ask for this output. */
static struct kd_bytes absent(const struct program *mine) {
    (void)mine;
    return nothing;
}

#define GETTERS(name, output)                                                                      \
    KD_EXPORT int name##Size(kd_program program, size_t *size) {                                   \
        if (program == NULL)                                                                       \
            return KD_INVALID_PROGRAM;                                                             \
        struct program *mine = kd_ours(program);                                                   \
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
        struct program *mine = kd_ours(program);                                                   \
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
    struct program *mine = kd_ours(program);
    if (mine != NULL && mine->real == NULL)
        return KD_NO_PCH_ATTEMPTED;
    int (*get)(kd_program) = REAL("nvrtcGetPCHCreateStatus", kd_program);
    return get == NULL ? KD_INTERNAL_ERROR : get(mine == NULL ? program : mine->real);
}

KD_EXPORT int nvrtcGetPCHHeapSizeRequired(kd_program program, size_t *size) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = kd_ours(program);
    if (mine == NULL || mine->real != NULL)
        return real_size("nvrtcGetPCHHeapSizeRequired", mine == NULL ? program : mine->real, size);
    if (size == NULL)
        return KD_INVALID_INPUT;
    *size = 0;
    return KD_SUCCESS;
}
