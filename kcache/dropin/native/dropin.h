/* Declarations that the parts of the drop-in share. nvrtc.c has the guarantees of the library. */
#ifndef KCACHE_DROPIN_H
#define KCACHE_DROPIN_H

#include <link.h>
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

/* Those of NVRTC's result codes (nvrtc.h) that this library itself returns. */
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

/* Guards the state that the threads of this process share. No thread waits for the server while it
 * holds the lock, so a fork does not wait long. */
extern pthread_mutex_t kd_lock;

/* -- bytes ------------------------------------------------------------------------------------- */

/* A view of bytes that another object owns. */
struct kd_bytes {
    const char *data;
    size_t size;
};

/* A message to the server: a count, the size of each field, and the fields, as in
 * kcache/util/wire.py. Its memory grows with the fields. If memory runs out, `failed` is set and
 * stays set. */
struct kd_message {
    char *data;
    size_t size, room;
    uint32_t count, put; /* how many fields it has, and how many of them were put */
    bool failed;
};

/* Begins a message of `count` fields; `room` bytes are reserved for the fields. */
void kd_begin(struct kd_message *message, uint32_t count, size_t room);
void kd_put(struct kd_message *message, const void *data, size_t size); /* puts the next field */
void kd_put_text(struct kd_message *message, const char *text);
void kd_put_number(struct kd_message *message, uint32_t number);

/* A message from the server, in one block of memory that the caller frees. */
struct kd_reply {
    struct kd_bytes *fields;
    uint32_t count;
    size_t size;
};

/* Allocates `count` fields of these sizes, which follow each other in memory from `fields[0].data`
 * on. Returns false if the fields are too long or memory runs out. */
bool kd_reply_begin(struct kd_reply *reply, uint32_t count, const char *sizes);
bool kd_is(const struct kd_reply *reply, uint32_t field, const char *text);
/* Returns whether a field exists and is a number; if so, sets `number` to its value. */
bool kd_number(const struct kd_reply *reply, uint32_t field, uint32_t *number);

/* The fields of an answer after `done`. From KD_NAMES on, the fields are pairs of a name expression
 * and its lowered name. PTX, log and names end in a NUL, which their sizes include. */
enum { KD_RESULT = 1, KD_PTX, KD_CUBIN, KD_LTOIR, KD_LOG, KD_NAMES };

/* Returns whether a reply is an answer to `compile`; if so, sets `result` to its result code. */
bool kd_is_answer(const struct kd_reply *reply, uint32_t *result);
/* Returns the lowered name for a name expression, or NULL if the answer has none. */
const char *kd_lowered(const struct kd_reply *answer, const char *name);

/* -- the server (server.c) --------------------------------------------------------------------- */

/* The first field of a message is its kind. A program sends `compile`, `query` (with the path of a
 * library) or `note` (why the real library was called). The server sends any number of `wait` (a
 * heartbeat while it works on the answer), and then `done` with the answer, or `no`. */
#define KD_DONE "done"
#define KD_WAIT "wait"

bool kd_server_wanted(void); /* whether a server may be running */
bool kd_server_greet(void);  /* connects, so that the server is ready for a question */
/* Sets the path of the server's socket. NULL means that there is no server. */
KD_EXPORT void kcache_dropin_set_server(const char *path);
/* Sends a question; returns whether the server has answered `done`. The caller frees the fields of
 * `reply` in either case. */
bool kd_server_ask(const struct kd_message *message, struct kd_reply *reply);
/* Puts user, root directory and mount namespace of this thread. The server gives no answer if its
 * own are different. */
void kd_put_standing(struct kd_message *message);
void kd_server_note(const char *reason); /* lets the server count a call of the real library */
void kd_server_leave(void); /* closes the idle connections */
void kd_server_after_fork(void);

/* -- the real library (real.c) ----------------------------------------------------------------- */

typedef void *kd_program; /* nvrtcProgram */

bool kd_exported(const char *name); /* whether this library has a function of that name */
const char *kd_real_path(void);     /* NULL if none is known */
/* Returns the function of that name, or else the result of `kd_missing`. The first call loads the
 * real library. */
void *kd_real(const char *name);

/* -- programs: the objects behind the caller's nvrtcProgram ----------------------------------- */

#define KD_MARK 0x6b64726f70696e31u /* "kdropin1" */

/* The function `name` of the real library, which has these parameters and returns a result code. */
#define REAL(name, ...) ((int (*)(__VA_ARGS__))kd_real(name))

/* Copies of texts that the caller has passed. */
struct texts {
    char **items;
    int count, room;
};

/* The object behind the caller's nvrtcProgram. */
struct program {
    uint64_t mark;
    struct program *self;
    char *source, *name; /* `name` may be NULL */
    struct texts header_texts, header_names, names, options;
    bool compiled; /* `result` and `answer` are those of the last compile */
    int result;
    struct kd_reply answer;
    kd_program real; /* the real library's program; unless NULL, all calls are forwarded to it */
};

/* -- programs (program.c) ---------------------------------------------------------------------- */

bool kd_texts_add(struct texts *texts, const char *text);
bool kd_texts_add_all(struct texts *texts, int count, const char *const *items);
/* Returns whether no two texts are equal; false if memory runs out. */
bool kd_texts_differ(const struct texts *texts);
void kd_texts_empty(struct texts *texts);

struct program *kd_ours(kd_program program); /* NULL if the real library made it */
/* Returns the program if this library answers for it; else sets `program` to the real library's
 * program and returns NULL. */
struct program *kd_here(kd_program *program);
void kd_release(struct program *mine);

int kd_real_create(
    kd_program *program, const char *source, const char *name, int count,
    const char *const *texts, const char *const *names);
int kd_real_compile(kd_program program, int count, const char *const *options);
int kd_real_destroy(kd_program *program);
/* Repeats in the real library everything that was done to the program here, and returns NVRTC's
 * result code. The server counts `reason`. It is NULL if the server itself has declined, because
 * then the server has already counted its own reason. */
int kd_hand_over(struct program *mine, const char *reason);

/* -- compiling (compile.c) --------------------------------------------------------------------- */

int kd_compile_here(struct program *mine, int count, const char *const *options);
bool kd_has_compiled(void); /* whether any compile was answered without the real library */

/* -- the preloaded library (preload.c, search.c, linked.c) ------------------------------------- */

/* Finds NVRTC as the dynamic loader would, for an object that opens NVRTC by its bare name. Returns
 * whether it was found, and writes its path to `path`, which has room for PATH_MAX bytes. */
bool kd_search(struct link_map *object, char path[]);
bool kd_is_linked(void); /* whether any object is linked with NVRTC */
/* Like `kd_search`, but for the objects that are linked with NVRTC. */
bool kd_search_linked(char path[]);

/* Returns a function of the interface library for an object that is linked with NVRTC, or NULL if
 * the library can't be opened or has no such function. The first call opens the library. */
void *kd_of_interface(const char *name);

#endif
