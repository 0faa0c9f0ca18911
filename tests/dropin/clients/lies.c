/* Parses answers that a lying server may send: cut off, longer, with other sizes. For sanitizers. */
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
    kd_begin(answer, 7 + 2 * count, 64);
    kd_put_text(answer, "done");
    kd_put_number(answer, draw(8));
    kd_put_number(answer, draw(4));
    for (int i = 0; i < 4; i++)
        kd_put(answer, "some output \0 with\n\0", draw(20) + 1);
    for (unsigned i = 0; i < 2 * count; i++)
        kd_put(answer, "name", 5);
}

/* What the library makes of a message, whose fields end where the sanitizer looks. */
static struct kd_answer *parsed_from(const char *message, size_t size) {
    struct kd_reply reply = {0};
    uint32_t count = (unsigned char)message[4];
    if (size < 8 + 8 * (size_t)count || count == 0 || !kd_reply_begin(&reply, count, message + 8) ||
        reply.size > size - 8 - 8 * (size_t)count) {
        free(reply.fields);
        return NULL;
    }
    size_t views = count * sizeof *reply.fields, held = views + reply.size;
    struct kd_reply exact = {malloc(held), count, reply.size};
    memcpy((char *)exact.fields + views, message + 8 + 8 * count, reply.size);
    for (uint32_t i = 0; i < count; i++)
        exact.fields[i] = (struct kd_bytes){
            (char *)exact.fields + (reply.fields[i].data - (const char *)reply.fields),
            reply.fields[i].size};
    free(reply.fields);
    return kd_answer_parse(exact);
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
        struct kd_answer *made = size < 8 ? NULL : parsed_from(answer.data, size);
        free(answer.data);
        size_t sum = 0;
        for (uint32_t i = KD_NAMES; made != NULL && i < made->reply.count; i++)
            sum += strlen(made->reply.fields[i].data);
        for (size_t i = 0; made != NULL && i < made->reply.fields[KD_LOG].size; i++)
            sum += (unsigned char)made->reply.fields[KD_LOG].data[i];
        parsed += made != NULL && sum > 0;
        kd_answer_drop(made);
    }
    puts(parsed > ROUNDS / 500 ? "done" : "all were refused");
    return 0;
}
