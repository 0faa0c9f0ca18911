/* Programs: copies of the caller's texts, and the hand-over to the real library. */
#define _GNU_SOURCE
#include "dropin.h"

#include <stdlib.h>
#include <string.h>

/* -- texts ------------------------------------------------------------------------------------- */

bool kd_texts_add(struct texts *texts, const char *text) {
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

bool kd_texts_add_all(struct texts *texts, int count, const char *const *items) {
    for (int i = 0; i < count; i++)
        if (items == NULL || items[i] == NULL || !kd_texts_add(texts, items[i]))
            return false;
    return true;
}

static int by_text(const void *one, const void *other) {
    return strcmp(*(char *const *)one, *(char *const *)other);
}

bool kd_texts_differ(const struct texts *texts) {
    if (texts->count < 2)
        return true;
    size_t size = (size_t)texts->count * sizeof *texts->items;
    char **sorted = malloc(size);
    if (sorted == NULL)
        return false;
    memcpy(sorted, texts->items, size);
    qsort(sorted, (size_t)texts->count, sizeof *sorted, by_text);
    bool differ = true;
    for (int i = 1; i < texts->count && differ; i++)
        differ = strcmp(sorted[i - 1], sorted[i]) != 0;
    free(sorted);
    return differ;
}

void kd_texts_empty(struct texts *texts) {
    for (int i = 0; i < texts->count; i++)
        free(texts->items[i]);
    free(texts->items);
    *texts = (struct texts){0};
}

static const char *const *items(const struct texts *texts) {
    return (const char *const *)texts->items;
}

/* -- programs ---------------------------------------------------------------------------------- */

/* Returns NULL for a program of the real library, such as one that `__nvrtcCPEx` has created. */
struct program *kd_ours(kd_program program) {
    struct program *mine = program;
    return mine->mark == KD_MARK && mine->self == mine ? mine : NULL;
}

struct program *kd_here(kd_program *program) {
    struct program *mine = kd_ours(*program);
    if (mine == NULL || mine->real == NULL)
        return mine;
    *program = mine->real;
    return NULL;
}

void kd_release(struct program *mine) {
    free(mine->source);
    free(mine->name);
    kd_texts_empty(&mine->header_texts);
    kd_texts_empty(&mine->header_names);
    kd_texts_empty(&mine->names);
    kd_texts_empty(&mine->options);
    free(mine->answer.fields);
    mine->mark = 0;
    mine->self = NULL;
    free(mine);
}

int kd_real_create(
    kd_program *program, const char *source, const char *name, int count,
    const char *const *texts, const char *const *names) {
    return REAL("nvrtcCreateProgram", kd_program *, const char *, const char *, int,
                const char *const *, const char *const *)(
        program, source, name, count, texts, names);
}

int kd_real_compile(kd_program program, int count, const char *const *options) {
    return REAL("nvrtcCompileProgram", kd_program, int, const char *const *)(
        program, count, options);
}

int kd_real_destroy(kd_program *program) {
    return REAL("nvrtcDestroyProgram", kd_program *)(program);
}

int kd_hand_over(struct program *mine, const char *reason) {
    if (reason != NULL)
        kd_server_note(reason);
    kd_program real = NULL;
    int result = kd_real_create(&real, mine->source, mine->name, mine->header_texts.count,
                                items(&mine->header_texts), items(&mine->header_names));
    for (int i = 0; result == KD_SUCCESS && i < mine->names.count; i++)
        result = REAL("nvrtcAddNameExpression", kd_program, const char *)(
            real, mine->names.items[i]);
    if (result != KD_SUCCESS) {
        if (real != NULL)
            kd_real_destroy(&real);
        return result;
    }
    if (mine->compiled)
        kd_real_compile(real, mine->options.count, items(&mine->options));
    mine->real = real;
    return KD_SUCCESS;
}
