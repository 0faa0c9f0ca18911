/* The interface: NVRTC's version, and the architectures that it supports. */
#define _GNU_SOURCE
#include "dropin.h"

#include <stdlib.h>
#include <string.h>

#define MOST_ARCHS 64

/* Version and architectures of the real library. The server returns them, so that this process does
 * not have to load the library. */
struct about {
    bool known;
    uint32_t major, minor, count, archs[MOST_ARCHS];
};

static struct about kept_about;

/* The fields of the reply are `done`, the version's two numbers, and the architectures. */
static bool parse_about(struct about *about, const struct kd_reply *reply) {
    if (!kd_number(reply, 1, &about->major) || !kd_number(reply, 2, &about->minor) ||
        about->major != KCACHE_MAJOR || reply->count < 4 || reply->count - 3 > MOST_ARCHS)
        return false;
    about->count = reply->count - 3;
    for (uint32_t i = 0; i < about->count; i++)
        if (!kd_number(reply, i + 3, &about->archs[i]))
            return false;
    return about->known = true;
}

static bool ask_about(struct about *answer) {
    struct kd_message request;
    struct kd_reply reply;
    if (!kd_server_wanted() || kd_real_path() == NULL)
        return false;
    kd_begin(&request, 3, 512);
    kd_put_text(&request, "query");
    kd_put_text(&request, kd_real_path());
    kd_put_standing(&request);
    bool known = kd_server_ask(&request, &reply) && parse_about(answer, &reply);
    free(reply.fields);
    free(request.data);
    return known;
}

/* The lock is not held while the server is asked, because a fork would have to wait for it, too. */
static bool know(struct about *answer) {
    pthread_mutex_lock(&kd_lock);
    *answer = kept_about;
    pthread_mutex_unlock(&kd_lock);
    if (answer->known || !ask_about(answer))
        return answer->known;
    pthread_mutex_lock(&kd_lock);
    kept_about = *answer;
    pthread_mutex_unlock(&kd_lock);
    return true;
}

KD_EXPORT int nvrtcVersion(int *major, int *minor) {
    if (major == NULL || minor == NULL)
        return KD_INVALID_INPUT;
    struct about about;
    if (!know(&about))
        return REAL("nvrtcVersion", int *, int *)(major, minor);
    *major = (int)about.major;
    *minor = (int)about.minor;
    return KD_SUCCESS;
}

KD_EXPORT int nvrtcGetNumSupportedArchs(int *count) {
    if (count == NULL)
        return KD_INVALID_INPUT;
    struct about about;
    if (!know(&about))
        return REAL("nvrtcGetNumSupportedArchs", int *)(count);
    *count = (int)about.count;
    return KD_SUCCESS;
}

KD_EXPORT int nvrtcGetSupportedArchs(int *archs) {
    if (archs == NULL)
        return KD_INVALID_INPUT;
    struct about about;
    if (!know(&about))
        return REAL("nvrtcGetSupportedArchs", int *)(archs);
    memcpy(archs, about.archs, about.count * sizeof *archs);
    return KD_SUCCESS;
}

/* The codes that every version has. For other codes, the real library is called. */
static const char *const error_strings[] = {
    "NVRTC_SUCCESS",
    "NVRTC_ERROR_OUT_OF_MEMORY",
    "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
    "NVRTC_ERROR_INVALID_INPUT",
    "NVRTC_ERROR_INVALID_PROGRAM",
    "NVRTC_ERROR_INVALID_OPTION",
    "NVRTC_ERROR_COMPILATION",
    "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
    "NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
    "NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
    "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
    "NVRTC_ERROR_INTERNAL_ERROR",
    "NVRTC_ERROR_TIME_FILE_WRITE_FAILED",
};

KD_EXPORT const char *nvrtcGetErrorString(int result) {
    if (result >= 0 && (size_t)result < sizeof error_strings / sizeof *error_strings)
        return error_strings[result];
    return ((const char *(*)(int))kd_real("nvrtcGetErrorString"))(result);
}
