/* The interface: the outputs of a program, before and after its compile. */
#define _GNU_SOURCE
#include "dropin.h"

#include <string.h>

/* Stands for an output that no server keeps. If an option of a program requests such an output, the
 * real library compiles the program. */
#define ABSENT 0

/* Before a compile, NVRTC returns empty texts, which end in a NUL, and empty binaries. */
static struct kd_bytes output(const struct program *mine, int field) {
    if (mine->compiled && field != ABSENT)
        return mine->answer.fields[field];
    return (struct kd_bytes){"", field == KD_PTX || field == KD_LOG};
}

static int get_size(kd_program program, size_t *size, const char *getter, int field) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = kd_here(&program);
    if (mine == NULL)
        return REAL(getter, kd_program, size_t *)(program, size);
    if (size == NULL)
        return KD_INVALID_INPUT;
    *size = output(mine, field).size;
    return KD_SUCCESS;
}

static int get_bytes(kd_program program, char *buffer, const char *getter, int field) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    struct program *mine = kd_here(&program);
    if (mine == NULL)
        return REAL(getter, kd_program, char *)(program, buffer);
    if (buffer == NULL)
        return KD_INVALID_INPUT;
    struct kd_bytes bytes = output(mine, field);
    memcpy(buffer, bytes.data, bytes.size);
    return KD_SUCCESS;
}

#define GETTERS(name, field)                                                                       \
    KD_EXPORT int name##Size(kd_program program, size_t *size) {                                   \
        return get_size(program, size, #name "Size", field);                                       \
    }                                                                                              \
    KD_EXPORT int name(kd_program program, char *buffer) {                                         \
        return get_bytes(program, buffer, #name, field);                                           \
    }

GETTERS(nvrtcGetPTX, KD_PTX)
GETTERS(nvrtcGetCUBIN, KD_CUBIN)
GETTERS(nvrtcGetLTOIR, KD_LTOIR)
GETTERS(nvrtcGetOptiXIR, ABSENT)
GETTERS(nvrtcGetProgramLog, KD_LOG)
#if KCACHE_MAJOR >= 13
GETTERS(nvrtcGetTileIR, ABSENT)
#else
GETTERS(nvrtcGetNVVM, KD_LTOIR) /* the older name of LTOIR */
#endif

KD_EXPORT int nvrtcGetPCHHeapSizeRequired(kd_program program, size_t *size) {
    return get_size(program, size, "nvrtcGetPCHHeapSizeRequired", ABSENT);
}

KD_EXPORT int nvrtcGetPCHCreateStatus(kd_program program) {
    if (program == NULL)
        return KD_INVALID_PROGRAM;
    if (kd_here(&program) != NULL)
        return KD_NO_PCH_ATTEMPTED;
    return REAL("nvrtcGetPCHCreateStatus", kd_program)(program);
}
