/* Bytes: messages to and from the server. All numbers are little-endian or decimal text. */
#include "dropin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEAD 8 /* the magic, and the number of fields */
/* Far more than any answer has. A CUBIN with debug information may have hundreds of megabytes. */
#define MAX_BYTES ((size_t)256 << 20)

static void put_size(struct kd_message *message, uint32_t field, uint64_t size) {
    memcpy(message->data + HEAD + 8 * (size_t)field, &size, 8);
}

static uint64_t size_of(const char *sizes, uint32_t field) {
    uint64_t size;
    memcpy(&size, sizes + 8 * (size_t)field, 8);
    return size;
}

void kd_begin(struct kd_message *message, uint32_t count, size_t room) {
    size_t head = HEAD + 8 * (size_t)count;
    char *data = malloc(head + room);
    *message = (struct kd_message){data, head, head + room, count, 0, data == NULL};
    if (data == NULL)
        return;
    memcpy(data, "KCW1", 4);
    memcpy(data + 4, &count, 4);
    memset(data + HEAD, 0, head - HEAD);
}

void kd_put(struct kd_message *message, const void *data, size_t size) {
    if (message->failed || message->put == message->count) {
        message->failed = true;
        return;
    }
    if (size > message->room - message->size) {
        size_t needed = message->size + size;
        size_t room = message->room * 2 > needed ? message->room * 2 : needed;
        char *grown = realloc(message->data, room);
        if (grown == NULL) {
            message->failed = true;
            return;
        }
        message->data = grown;
        message->room = room;
    }
    if (size > 0)
        memcpy(message->data + message->size, data, size);
    message->size += size;
    put_size(message, message->put++, size);
}

void kd_put_text(struct kd_message *message, const char *text) {
    kd_put(message, text, strlen(text));
}

void kd_put_number(struct kd_message *message, uint32_t number) {
    char text[16];
    kd_put(message, text, (size_t)snprintf(text, sizeof text, "%u", number));
}

bool kd_reply_begin(struct kd_reply *reply, uint32_t count, const char *sizes) {
    size_t sum = 0, views = count * sizeof *reply->fields;
    for (uint32_t field = 0; field < count; field++) {
        if (size_of(sizes, field) > MAX_BYTES - sum)
            return false;
        sum += size_of(sizes, field);
    }
    *reply = (struct kd_reply){malloc(views + sum + 1), count, sum};
    if (reply->fields == NULL)
        return false;
    const char *at = (const char *)reply->fields + views;
    for (uint32_t field = 0; field < count; field++) {
        reply->fields[field] = (struct kd_bytes){at, size_of(sizes, field)};
        at += reply->fields[field].size;
    }
    return true;
}

bool kd_is(const struct kd_reply *reply, uint32_t field, const char *text) {
    size_t size = strlen(text);
    return field < reply->count && reply->fields[field].size == size &&
           memcmp(reply->fields[field].data, text, size) == 0;
}

bool kd_number(const struct kd_reply *reply, uint32_t field, uint32_t *number) {
    *number = 0;
    if (field >= reply->count || reply->fields[field].size == 0 || reply->fields[field].size > 9)
        return false;
    for (size_t i = 0; i < reply->fields[field].size; i++) {
        char digit = reply->fields[field].data[i];
        if (digit < '0' || digit > '9')
            return false;
        *number = *number * 10 + (uint32_t)(digit - '0');
    }
    return true;
}

static bool ends_in_nul(struct kd_bytes bytes) {
    return bytes.size > 0 && bytes.data[bytes.size - 1] == '\0';
}

bool kd_is_answer(const struct kd_reply *reply, uint32_t *result) {
    if (reply->count < KD_NAMES || (reply->count - KD_NAMES) % 2 != 0 ||
        !kd_number(reply, KD_RESULT, result))
        return false;
    for (uint32_t i = KD_NAMES; i < reply->count; i++)
        if (!ends_in_nul(reply->fields[i]))
            return false;
    return ends_in_nul(reply->fields[KD_PTX]) && ends_in_nul(reply->fields[KD_LOG]);
}

const char *kd_lowered(const struct kd_reply *answer, const char *name) {
    for (uint32_t i = KD_NAMES; i < answer->count; i += 2)
        if (strcmp(answer->fields[i].data, name) == 0)
            return answer->fields[i + 1].data;
    return NULL;
}
