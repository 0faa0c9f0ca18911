/* Answers: the results of compiles, and a bounded memory of those that may be needed again. */
#include "dropin.h"

#include <stdlib.h>
#include <string.h>

/* A program's working set is some dozen kernels of 100 KiB. Larger answers are asked for again. */
#define MAX_KEPT 512
#define MAX_BYTES ((size_t)32 << 20)
#define MAX_ONE ((size_t)8 << 20)

struct kept {
    uint64_t hash, used;
    char *request;
    size_t size;
    struct kd_answer *answer;
};

static struct kept kept[MAX_KEPT];
static size_t count, held;
static uint64_t clock_;

static bool ends_in_nul(struct kd_bytes bytes) {
    return bytes.size > 0 && bytes.data[bytes.size - 1] == '\0';
}

static bool parse(struct kd_answer *answer) {
    const struct kd_reply *reply = &answer->reply;
    if (reply->count < KD_NAMES || (reply->count - KD_NAMES) % 2 != 0 ||
        !kd_number(reply, KD_RESULT, &answer->result) ||
        !kd_number(reply, KD_FLAGS, &answer->flags))
        return false;
    for (uint32_t i = KD_NAMES; i < reply->count; i++)
        if (!ends_in_nul(reply->fields[i]))
            return false;
    return ends_in_nul(reply->fields[KD_PTX]) && ends_in_nul(reply->fields[KD_LOG]);
}

struct kd_answer *kd_answer_parse(struct kd_reply reply) {
    struct kd_answer *answer = calloc(1, sizeof *answer);
    if (answer == NULL) {
        free(reply.fields);
        return NULL;
    }
    answer->references = 1;
    answer->reply = reply;
    if (parse(answer))
        return answer;
    kd_answer_drop(answer);
    return NULL;
}

void kd_answer_drop(struct kd_answer *answer) {
    if (answer == NULL || __atomic_sub_fetch(&answer->references, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    free(answer->reply.fields);
    free(answer);
}

const char *kd_lowered(const struct kd_answer *answer, const char *name) {
    const struct kd_bytes *fields = answer->reply.fields;
    for (uint32_t i = KD_NAMES; i < answer->reply.count; i += 2)
        if (strcmp(fields[i].data, name) == 0)
            return fields[i + 1].data;
    return NULL;
}

/* A hash that only spreads requests. Their bytes decide whether two are equal. */
static uint64_t spread(const struct kd_message *request) {
    uint64_t hash = request->size, word;
    size_t at = 0;
    for (; at + 8 <= request->size; at += 8) {
        memcpy(&word, request->data + at, 8);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    word = 0;
    memcpy(&word, request->data + at, request->size - at);
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 32;
}

static struct kept *find(const struct kd_message *request, uint64_t hash) {
    for (size_t i = 0; i < count; i++)
        if (kept[i].hash == hash && kept[i].size == request->size &&
            memcmp(kept[i].request, request->data, request->size) == 0)
            return &kept[i];
    return NULL;
}

struct kd_answer *kd_recall(const struct kd_message *request) {
    struct kd_answer *answer = NULL;
    uint64_t hash = spread(request);
    pthread_mutex_lock(&kd_lock);
    struct kept *found = find(request, hash);
    if (found != NULL) {
        found->used = ++clock_;
        answer = found->answer;
        __atomic_add_fetch(&answer->references, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&kd_lock);
    return answer;
}

static size_t cost(const struct kept *each) {
    return each->size + each->answer->reply.size + sizeof *each->answer;
}

static void forget_oldest(void) {
    size_t oldest = 0;
    for (size_t i = 1; i < count; i++)
        if (kept[i].used < kept[oldest].used)
            oldest = i;
    held -= cost(&kept[oldest]);
    free(kept[oldest].request);
    kd_answer_drop(kept[oldest].answer);
    kept[oldest] = kept[--count];
}

void kd_remember(const struct kd_message *request, struct kd_answer *answer) {
    if (request->size + answer->reply.size > MAX_ONE)
        return;
    struct kept new = {spread(request), 0, malloc(request->size), request->size, answer};
    if (new.request == NULL)
        return;
    memcpy(new.request, request->data, request->size);
    pthread_mutex_lock(&kd_lock);
    if (find(request, new.hash) == NULL) {
        while (count > 0 && (count == MAX_KEPT || held + cost(&new) > MAX_BYTES))
            forget_oldest();
        new.used = ++clock_;
        __atomic_add_fetch(&answer->references, 1, __ATOMIC_RELAXED);
        held += cost(&new);
        kept[count++] = new;
        new.request = NULL;
    }
    pthread_mutex_unlock(&kd_lock);
    free(new.request);
}
