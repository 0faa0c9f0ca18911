/* Parses answers that a lying server may send: cut off, longer, with other sizes. For sanitizers. */
#include "dropin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned state = 1;

static unsigned draw(unsigned below) {
    state = state * 1103515245u + 12345u;
    return (state >> 8) % below;
}

static void put_answer(struct kd_buffer *answer) {
    kd_put_number(answer, draw(8));
    kd_put_number(answer, draw(4));
    for (int i = 0; i < 4; i++) {
        unsigned size = draw(20) + 1;
        kd_put_number(answer, size);
        kd_put(answer, "some output \0 with\n\0", size);
    }
    unsigned count = draw(4);
    kd_put_number(answer, count);
    for (unsigned i = 0; i < 2 * count; i++) {
        kd_put_number(answer, 5);
        kd_put(answer, "name", 5);
    }
}

int main(void) {
    unsigned parsed = 0;
    for (int round = 0; round < 300000; round++) {
        struct kd_buffer answer = {0};
        put_answer(&answer);
        for (unsigned lies = draw(4); lies > 0; lies--) {
            unsigned at = draw((unsigned)answer.size);
            if (draw(2) == 0)
                answer.data[at] = (char)draw(256);
            else
                memset(answer.data + at, draw(2) ? 0xff : 0, answer.size - at < 4 ? answer.size - at : 4);
        }
        size_t size = draw(3) == 0 ? draw((unsigned)answer.size + 1) : answer.size;
        char *frame = malloc(size); /* its end is where the sanitizer looks */
        memcpy(frame, answer.data, size);
        free(answer.data);
        struct kd_answer *made = kd_answer_parse(frame, size);
        size_t sum = 0;
        for (uint32_t i = 0; made != NULL && i < made->lowered_count; i++)
            sum += strlen(made->lowered[i].name.data) + strlen(made->lowered[i].lowered.data);
        for (size_t i = 0; made != NULL && i < made->log.size; i++)
            sum += (unsigned char)made->log.data[i];
        parsed += made != NULL && sum > 0;
        kd_answer_drop(made);
    }
    puts(parsed > 1000 ? "done" : "all were refused");
    return 0;
}
