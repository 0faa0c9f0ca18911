/* Many threads that use one NVRTC, and forks meanwhile. It is built with sanitizers. Arguments: the
   path of NVRTC, and how often each thread compiles. With a third one, `apart`, the program forks
   before it starts threads, because NVRTC itself does not survive forks beside threads. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef void *program;
static int (*create)(program *, const char *, const char *, int, const char *const *,
                     const char *const *);
static int (*compile)(program, int, const char *const *);
static int (*add)(program, const char *);
static int (*lowered)(program, const char *, const char **);
static int (*size_of)(program, size_t *), (*get)(program, char *), (*log_size)(program, size_t *);
static int (*destroy)(program *), (*version)(int *, int *);

#define NEED(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static void one(int number) {
    char source[256];
    /* A third of the kernels is requested from the server each time, because it contains "include";
       a third is kept in this process; a third does not compile. */
    const char *end = number % 3 == 0 ? "// include" : number % 3 == 1 ? "" : "nonsense";
    snprintf(source, sizeof source,
             "template <int N> __global__ void k(float *a) { a[N] = %d; } %s\n", number % 9, end);
    const char *options[] = {"-arch=compute_90", "-DX=1"};
    program made = NULL;
    const char *name = NULL;
    size_t size = 0;
    int major = 0, minor = 0;
    NEED(version(&major, &minor) == 0 && major >= 12);
    NEED(create(&made, source, "k.cu", 0, NULL, NULL) == 0);
    NEED(add(made, "k<3>") == 0);
    int result = compile(made, 2, options);
    NEED(result == (number % 3 == 2 ? 6 : 0));
    NEED(lowered(made, "k<3>", &name) == (result == 0 ? 0 : 9));
    NEED(result != 0 || strcmp(name, "_Z1kILi3EEvPf") == 0);
    NEED(size_of(made, &size) == 0);
    char *ptx = malloc(size);
    NEED(get(made, ptx) == 0 && ptx[size - 1] == '\0');
    free(ptx);
    NEED(log_size(made, &size) == 0 && (result == 0) == (size == 1));
    NEED(destroy(&made) == 0 && made == NULL);
}

static int rounds = 1;

static void *many(void *first) {
    for (int i = 0; i < rounds; i++)
        one((int)(size_t)first + i);
    return NULL;
}

static void fork_one(void) {
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) {
        one(1);
        one(3);
        _exit(0);
    }
    int status = 0;
    NEED(waitpid(child, &status, 0) == child && status == 0);
}

int main(int argc, char **argv) {
    void *library = dlopen(argc > 1 ? argv[1] : "libnvrtc.so.13", RTLD_NOW);
    NEED(library != NULL && dlsym(library, "kcache_dropin_load") != NULL);
    *(void **)&create = dlsym(library, "nvrtcCreateProgram");
    *(void **)&compile = dlsym(library, "nvrtcCompileProgram");
    *(void **)&add = dlsym(library, "nvrtcAddNameExpression");
    *(void **)&lowered = dlsym(library, "nvrtcGetLoweredName");
    *(void **)&size_of = dlsym(library, "nvrtcGetPTXSize");
    *(void **)&get = dlsym(library, "nvrtcGetPTX");
    *(void **)&log_size = dlsym(library, "nvrtcGetProgramLogSize");
    *(void **)&destroy = dlsym(library, "nvrtcDestroyProgram");
    *(void **)&version = dlsym(library, "nvrtcVersion");
    pthread_t threads[8];
    rounds = argc > 2 ? atoi(argv[2]) : rounds;
    one(0);
    for (int i = 0; i < 5 && argc == 4; i++)
        fork_one();
    for (size_t i = 0; i < 8; i++)
        NEED(pthread_create(&threads[i], NULL, many, (void *)i) == 0);
    for (int i = 0; i < 5 && argc < 4; i++)
        fork_one();
    for (size_t i = 0; i < 8; i++)
        NEED(pthread_join(threads[i], NULL) == 0);
    puts("done");
    return 0;
}
