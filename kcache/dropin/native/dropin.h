/* Declarations that the parts of the drop-in share. nvrtc.c says what the library guarantees. */
#ifndef KCACHE_DROPIN_H
#define KCACHE_DROPIN_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef KCACHE_MAJOR
#error "compile with -DKCACHE_MAJOR=12 or 13"
#endif

#define KD_STRING_(x) #x
#define KD_STRING(x) KD_STRING_(x)
#define KD_MAJOR_TEXT KD_STRING(KCACHE_MAJOR)
#define KD_SONAME "libnvrtc.so." KD_MAJOR_TEXT

#define KD_EXPORT __attribute__((visibility("default")))

/* NVRTC's result codes (nvrtc.h), but only those that this library itself returns. */
enum {
    KD_SUCCESS = 0,
    KD_OUT_OF_MEMORY = 1,
    KD_INVALID_INPUT = 3,
    KD_INVALID_PROGRAM = 4,
    KD_INVALID_OPTION = 5,
    KD_NO_NAMES_AFTER_COMPILATION = 8,
    KD_NO_LOWERED_BEFORE_COMPILATION = 9,
    KD_NAME_NOT_VALID = 10,
    KD_INTERNAL_ERROR = 11,
    KD_NO_PCH_ATTEMPTED = 13,
};

/* -- bytes ------------------------------------------------------------------------------------- */

/* A view of bytes that another object owns. */
struct kd_bytes {
    const char *data;
    size_t size;
};

/* A buffer that grows. Once memory runs out, `failed` is set and stays set. */
struct kd_buffer {
    char *data;
    size_t size, room;
    bool failed;
};

void kd_put(struct kd_buffer *buffer, const void *data, size_t size);
void kd_put_number(struct kd_buffer *buffer, uint32_t number);
void kd_put_text(struct kd_buffer *buffer, const char *text); /* its size, then its bytes */

/* Reads what the functions above wrote. The first impossible size sets `bad`, which stays set. */
struct kd_reader {
    const char *at, *end;
    bool bad;
};

uint32_t kd_number(struct kd_reader *reader);
struct kd_bytes kd_bytes(struct kd_reader *reader);

/* -- answers (answers.c) ----------------------------------------------------------------------- */

enum { KD_HIT = 1, KD_KEEP = 2 }; /* flags of an answer */

struct kd_lowered {
    struct kd_bytes name, lowered; /* both end in a NUL, which `size` counts */
};

/* The result of a compile. Programs and the memory of answers share it by counted references. */
struct kd_answer {
    int references;
    int result;
    uint32_t flags;
    struct kd_bytes ptx, cubin, ltoir, log;
    uint32_t lowered_count;
    struct kd_lowered *lowered;
    char *frame; /* the bytes that the views above point into */
    size_t size;
};

/* Becomes the owner of `frame`, a whole ANSWER payload. Returns NULL, and frees `frame`, if it is
   damaged. */
struct kd_answer *kd_answer_parse(char *frame, size_t size);
void kd_answer_drop(struct kd_answer *answer);

/* Answers that depend on the request alone, kept for the next equal request of this process.
   Threads: safe. Bytes and number are bounded; the least recently used answer is dropped first. */
struct kd_answer *kd_recall(const struct kd_buffer *request);
void kd_remember(const struct kd_buffer *request, struct kd_answer *answer);
void kd_answers_lock(void);
void kd_answers_unlock(void);
void kd_answers_after_fork(void);

/* -- the server (server.c) --------------------------------------------------------------------- */

enum kd_kind {
    KD_COMPILE = 1, /* a request; ANSWER or DECLINED follows, after any number of WAIT */
    KD_QUERY = 2,   /* path of a library; INFO or DECLINED follows */
    KD_NOTE = 3,    /* why the real library got a call; nothing follows */
    KD_ANSWER = 16,
    KD_DECLINED = 17,
    KD_INFO = 18,
    KD_WAIT = 19, /* the server is alive and works on the answer */
};

struct kd_reply {
    enum kd_kind kind;
    char *data; /* the caller frees it; NULL if there is none */
    size_t size;
};

void kd_server_set(const char *path); /* sets another socket than the environment names */
bool kd_server_wanted(void);          /* whether there may be a server */
bool kd_server_greet(void);           /* connects, so that the server is ready for a question */
bool kd_server_ask(enum kd_kind kind, const struct kd_buffer *payload, struct kd_reply *reply);
/* The user and the file tree of this thread. The server must have the same. */
void kd_put_standing(struct kd_buffer *payload);
void kd_server_note(const char *reason);
void kd_server_leave(void); /* closes the idle connections */
void kd_server_lock(void);
void kd_server_unlock(void);
void kd_server_after_fork(void);

/* -- the real library (real.c) ----------------------------------------------------------------- */

typedef void *kd_program; /* nvrtcProgram */

bool kd_exported(const char *name); /* whether this library has a function of that name */
const char *kd_real_path(void);     /* NULL if none is known */
void *kd_real(const char *name); /* the function of that name, or NULL; loads the library */

#endif
