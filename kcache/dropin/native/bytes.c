/* Bytes: buffers that grow, and readers of numbers and byte strings. All are little-endian. */
#include "dropin.h"

#include <stdlib.h>
#include <string.h>

void kd_put(struct kd_buffer *buffer, const void *data, size_t size) {
    if (buffer->failed || size == 0)
        return;
    if (size > buffer->room - buffer->size) {
        size_t room = buffer->room * 2 > buffer->size + size ? buffer->room * 2 : buffer->size + size;
        char *grown = realloc(buffer->data, room);
        if (grown == NULL) {
            buffer->failed = true;
            return;
        }
        buffer->data = grown;
        buffer->room = room;
    }
    memcpy(buffer->data + buffer->size, data, size);
    buffer->size += size;
}

void kd_put_number(struct kd_buffer *buffer, uint32_t number) {
    unsigned char raw[4] = {number & 255, number >> 8 & 255, number >> 16 & 255, number >> 24};
    kd_put(buffer, raw, 4);
}

void kd_put_text(struct kd_buffer *buffer, const char *text) {
    size_t size = strlen(text);
    if (size > UINT32_MAX) {
        buffer->failed = true;
        return;
    }
    kd_put_number(buffer, (uint32_t)size);
    kd_put(buffer, text, size);
}

uint32_t kd_number(struct kd_reader *reader) {
    if (reader->bad || reader->end - reader->at < 4) {
        reader->bad = true;
        return 0;
    }
    const unsigned char *raw = (const unsigned char *)reader->at;
    reader->at += 4;
    return (uint32_t)raw[0] | (uint32_t)raw[1] << 8 | (uint32_t)raw[2] << 16 |
           (uint32_t)raw[3] << 24;
}

struct kd_bytes kd_bytes(struct kd_reader *reader) {
    struct kd_bytes bytes = {NULL, kd_number(reader)};
    if (reader->bad || (size_t)(reader->end - reader->at) < bytes.size) {
        reader->bad = true;
        bytes.size = 0;
        return bytes;
    }
    bytes.data = reader->at;
    reader->at += bytes.size;
    return bytes;
}
