/* Programs: the objects that the caller knows as nvrtcProgram, and the functions on them. */
#ifndef KCACHE_PROGRAM_H
#define KCACHE_PROGRAM_H

#include "dropin.h"

#define KD_MARK 0x6b64726f70696e31u /* "kdropin1" */

/* A function of the real library that returns a result code, by its name and parameters. */
#define REAL(name, ...) ((int (*)(__VA_ARGS__))kd_real(name))

/* Copies of texts that the caller has given. */
struct texts {
    char **items;
    int count, room;
};

/* The object that the caller knows as an nvrtcProgram. */
struct program {
    uint64_t mark;
    struct program *self;
    char *source, *name; /* `name` may be NULL */
    struct texts header_texts, header_names, names, options;
    bool compiled; /* `result` and `answer` are those of the last compile */
    int result;
    struct kd_reply answer;
    kd_program real; /* if it is not NULL, everything is forwarded */
};

/* -- programs (program.c) ---------------------------------------------------------------------- */

bool kd_texts_add(struct texts *texts, const char *text);
bool kd_texts_add_all(struct texts *texts, int count, const char *const *items);
bool kd_texts_differ(const struct texts *texts); /* no two are equal; false if memory runs out */
void kd_texts_empty(struct texts *texts);

struct program *kd_ours(kd_program program); /* NULL: the real library made it */
/* Returns the program if this library answers for it; else NULL, and sets the real library's one. */
struct program *kd_here(kd_program *program);
void kd_release(struct program *mine);

int kd_real_create(
    kd_program *program, const char *source, const char *name, int count,
    const char *const *texts, const char *const *names);
int kd_real_compile(kd_program program, int count, const char *const *options);
int kd_real_destroy(kd_program *program);
/* Repeats in the real library everything that was done to the program here. Returns NVRTC's result
   code. The server counts the reason, unless it is NULL: the server knows its own reasons. */
int kd_hand_over(struct program *mine, const char *reason);

/* -- compiling (compile.c) --------------------------------------------------------------------- */

int kd_compile_here(struct program *mine, int count, const char *const *options);
bool kd_has_compiled(void); /* whether any compile was answered without the real library */

#endif
