/* One compile, by the server or, if the server can't answer, by the real library. */
#define _GNU_SOURCE
#include "dropin.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Variables that NVRTC reads (found by recording its calls of libc). The server decides how each is
 * used. */
static const char *const variables[] = {
    "NVRTC_APPEND_FLAGS", "NVRTC_PREPEND_FLAGS", "NVRTCWIZ", "EDG_BASE", "EDG_MODULES_PATH", "PWD",
    "MAKEFLAGS", "FINALIZER_USE_LEGACY_ELF_BUILDER", "FINALIZER_CUBIE", "CAN_FINALIZE_DEBUG",
    "NVVM_IR_VER_CHK", "CUDA_CACHE_DISABLE", "DUMP_KNOBS_TO_FILE",
    "NVRTC_DISABLE_CONCURRENT_NVVM"};
#define VARIABLES (sizeof variables / sizeof *variables)

static void put_texts(struct kd_message *request, const struct texts *texts) {
    for (int i = 0; i < texts->count; i++)
        kd_put_text(request, texts->items[i]);
}

/* Puts `NAME=value` for each variable, or `NAME` if the variable is not set. */
static void put_variables(struct kd_message *request) {
    for (size_t i = 0; i < VARIABLES; i++) {
        const char *value = getenv(variables[i]);
        kd_put_text(request, value == NULL ? variables[i] : value - strlen(variables[i]) - 1);
    }
}

/* kcache/dropin/protocol.py describes the layout. */
static bool put_request(struct kd_message *request, const struct program *mine) {
    char directory[PATH_MAX];
    if (kd_real_path() == NULL || getcwd(directory, sizeof directory) == NULL)
        return false;
    uint32_t numbers[] = {KCACHE_MAJOR, VARIABLES, (uint32_t)mine->header_names.count,
                          (uint32_t)mine->options.count, (uint32_t)mine->names.count};
    uint32_t count = 11 + numbers[1] + 2 * numbers[2] + numbers[3] + numbers[4];
    kd_begin(request, count, strlen(mine->source) + 4096);
    kd_put_text(request, "compile");
    for (int i = 0; i < 5; i++)
        kd_put_number(request, numbers[i]);
    kd_put_text(request, kd_real_path());
    kd_put_text(request, directory);
    put_variables(request);
    kd_put_text(request, mine->source);
    kd_put_text(request, mine->name == NULL ? "" : mine->name); /* the same to NVRTC */
    put_texts(request, &mine->header_names);
    put_texts(request, &mine->header_texts);
    put_texts(request, &mine->options);
    put_texts(request, &mine->names);
    kd_put_standing(request);
    return !request->failed && request->put == count;
}

static bool has_all_names(const struct program *mine, const struct kd_reply *answer) {
    for (int i = 0; i < mine->names.count; i++)
        if (kd_lowered(answer, mine->names.items[i]) == NULL)
            return false;
    return true;
}

/* Returns whether the server has answered. The caller frees `answer` in either case. */
static bool find_answer(const struct program *mine, struct kd_reply *answer, uint32_t *result) {
    struct kd_message request = {0};
    bool found = false;
    if (kd_server_wanted()) {
        if (put_request(&request, mine))
            found = kd_server_ask(&request, answer) && kd_is_answer(answer, result) &&
                    (*result != KD_SUCCESS || has_all_names(mine, answer));
        else
            kd_server_note("no working directory, or no NVRTC");
    }
    free(request.data);
    return found;
}

static int compile_by_real(
    struct program *mine, const char *reason, int count, const char *const *options) {
    int result = kd_hand_over(mine, reason);
    return result == KD_SUCCESS ? kd_real_compile(mine->real, count, options) : result;
}

static bool has_compiled;

bool kd_has_compiled(void) { return __atomic_load_n(&has_compiled, __ATOMIC_RELAXED); }

int kd_compile_here(struct program *mine, int count, const char *const *options) {
    if (mine->compiled && mine->result != KD_INVALID_OPTION)
        return compile_by_real(mine, "compiled twice", count, options);
    struct texts before = mine->options;
    mine->options = (struct texts){0};
    bool usable = kd_texts_add_all(&mine->options, count, options);
    struct kd_reply answer = {0};
    uint32_t result;
    if (!usable || !find_answer(mine, &answer, &result)) {
        free(answer.fields);
        kd_texts_empty(&mine->options);
        mine->options = before;
        return compile_by_real(mine, usable ? NULL : "an option is NULL", count, options);
    }
    __atomic_store_n(&has_compiled, true, __ATOMIC_RELAXED);
    kd_texts_empty(&before);
    free(mine->answer.fields);
    mine->answer = answer;
    mine->compiled = true;
    return mine->result = (int)result;
}
