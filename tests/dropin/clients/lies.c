/* Parses malicious answers: truncated, too long, or with wrong sizes. Is built with sanitizers. */
#include "dropin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 50000 };

pthread_mutex_t kd_lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned state = 1;

static unsigned draw(unsigned below) {
    state = state * 1103515245u + 12345u;
    return (state >> 8) % below;
}

static void put_answer(struct kd_message *answer) {
    unsigned count = draw(4);
    kd_begin(answer, 6 + 2 * count, 64);
    kd_put_text(answer, "done");
    kd_put_number(answer, draw(8));
    for (int i = 0; i < 4; i++)
        kd_put(answer, "some output \0 with\n\0", draw(20) + 1);
    for (unsigned i = 0; i < 2 * count; i++)
        kd_put(answer, "name", 5);
}

/* Returns the fields that the library reads from a message, or none if it is not an answer. The
   fields are copied into memory of their exact size, so that the sanitizer detects reads beyond. */
static struct kd_reply parsed_from(const char *message, size_t size) {
    struct kd_reply reply = {0};
    uint32_t count = (unsigned char)message[4];
    if (size < 8 + 8 * (size_t)count || count == 0 || !kd_reply_begin(&reply, count, message + 8) ||
        reply.size > size - 8 - 8 * (size_t)count) {
        free(reply.fields);
        return (struct kd_reply){0};
    }
    size_t views = count * sizeof *reply.fields, held = views + reply.size;
    struct kd_reply exact = {malloc(held), count, reply.size};
    memcpy((char *)exact.fields + views, message + 8 + 8 * count, reply.size);
    for (uint32_t i = 0; i < count; i++)
        exact.fields[i] = (struct kd_bytes){
            (char *)exact.fields + (reply.fields[i].data - (const char *)reply.fields),
            reply.fields[i].size};
    free(reply.fields);
    uint32_t result;
    if (kd_is_answer(&exact, &result))
        return exact;
    free(exact.fields);
    return (struct kd_reply){0};
}

int main(void) {
    unsigned parsed = 0;
    for (int round = 0; round < ROUNDS; round++) {
        struct kd_message answer;
        put_answer(&answer);
        for (unsigned lies = draw(4); lies > 0; lies--) {
            unsigned at = draw((unsigned)answer.size);
            if (draw(2) == 0)
                answer.data[at] = (char)draw(256);
            else
                memset(answer.data + at, draw(2) ? 0xff : 0, answer.size - at < 4 ? answer.size - at : 4);
        }
        size_t size = draw(3) == 0 ? draw((unsigned)answer.size + 1) : answer.size;
        struct kd_reply made = {0};
        if (size >= 8)
            made = parsed_from(answer.data, size);
        free(answer.data);
        size_t sum = 0;
        for (uint32_t i = KD_NAMES; i < made.count; i++)
            sum += strlen(made.fields[i].data);
        for (size_t i = 0; made.fields != NULL && i < made.fields[KD_LOG].size; i++)
            sum += (unsigned char)made.fields[KD_LOG].data[i];
        parsed += made.fields != NULL && sum > 0;
        free(made.fields);
    }
    puts(parsed > ROUNDS / 500 ? "done" : "all were refused");
    return 0;
}
