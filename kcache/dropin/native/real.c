/* The real library: the file that the program would have found, loaded when it is needed. */
#define _GNU_SOURCE
#include "dropin.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_NEEDING 16

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char found[PATH_MAX];
static bool searched;
static void *handle;
static bool tried;

static bool readable(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISREG(status.st_mode) && access(path, R_OK) == 0;
}

/* -- as the dynamic loader searches ------------------------------------------------------------ */

/* Searches the directories that the loader would search for `object`: its RPATH or RUNPATH,
   LD_LIBRARY_PATH, and the default ones. */
static bool search_for(void *object, char *path, size_t room) {
    Dl_serinfo size;
    if (dlinfo(object, RTLD_DI_SERINFOSIZE, &size) != 0)
        return false;
    Dl_serinfo *info = malloc(size.dls_size);
    if (info == NULL)
        return false;
    bool there = false;
    if (dlinfo(object, RTLD_DI_SERINFOSIZE, info) == 0 &&
        dlinfo(object, RTLD_DI_SERINFO, info) == 0)
        for (unsigned i = 0; i < info->dls_cnt && !there; i++) {
            int length = snprintf(path, room, "%s/" KD_SONAME, info->dls_serpath[i].dls_name);
            there = length > 0 && (size_t)length < room && readable(path);
        }
    free(info);
    return there;
}

/* Searches the loader's cache for /etc/ld.so.conf. It holds, among other things, paths that end in
   a NUL. */
static bool search_cache(char *path, size_t room) {
    int fd = open("/etc/ld.so.cache", O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd < 0)
        return false;
    bool there = false;
    if (fstat(fd, &status) == 0 && status.st_size > 0) {
        size_t size = (size_t)status.st_size;
        char *cache = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
        static const char end[] = "/" KD_SONAME; /* its NUL counts */
        char *at = cache == MAP_FAILED ? NULL : memmem(cache, size, end, sizeof end);
        while (at != NULL && !there) {
            char *start = at, *next = at + sizeof end;
            while (start > cache && start[-1] != '\0')
                start--;
            there = strlen(start) < room && readable(strcpy(path, start));
            at = memmem(next, size - (size_t)(next - cache), end, sizeof end);
        }
        if (cache != MAP_FAILED)
            munmap(cache, size);
    }
    close(fd);
    return there;
}

struct needing {
    const void *dynamic[MOST_NEEDING];
    int count;
};

static bool names_us(const ElfW(Dyn) * dynamic) {
    const char *strings = NULL;
    for (const ElfW(Dyn) *each = dynamic; each->d_tag != DT_NULL; each++)
        if (each->d_tag == DT_STRTAB)
            strings = (const char *)each->d_un.d_ptr;
    for (const ElfW(Dyn) *each = dynamic; strings != NULL && each->d_tag != DT_NULL; each++)
        if (each->d_tag == DT_NEEDED && strcmp(strings + each->d_un.d_val, KD_SONAME) == 0)
            return true;
    return false;
}

static int collect(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct needing *needing = data;
    if (info->dlpi_name != NULL && strstr(info->dlpi_name, "linux-vdso") != NULL)
        return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        const void *dynamic = (const void *)(info->dlpi_addr + segment->p_vaddr);
        if (segment->p_type == PT_DYNAMIC && needing->count < MOST_NEEDING && names_us(dynamic))
            needing->dynamic[needing->count++] = dynamic;
    }
    return 0;
}

/* Searches on behalf of the objects that are linked with NVRTC, as the loader would have done. */
static bool search_needing(char *path, size_t room) {
    struct needing needing = {.count = 0};
    dl_iterate_phdr(collect, &needing);
    for (int i = 0; i < needing.count; i++) {
        Dl_info info;
        struct link_map *map = NULL;
        if (dladdr1(needing.dynamic[i], &info, (void **)&map, RTLD_DL_LINKMAP) != 0 &&
            map != NULL && search_for(map, path, room))
            return true;
    }
    return false;
}

KD_EXPORT bool kcache_dropin_search(void *object, char *path, size_t room) {
    return (object != NULL && search_for(object, path, room)) || search_cache(path, room);
}

static bool search(char *path, size_t room) {
    void *program = dlopen(NULL, RTLD_LAZY);
    bool there = search_needing(path, room) || kcache_dropin_search(program, path, room);
    if (program != NULL)
        dlclose(program);
    return there;
}

/* -- the exports of a file --------------------------------------------------------------------- */

static bool within(uint64_t offset, uint64_t size, uint64_t total) {
    return offset <= total && size <= total - offset;
}

static bool exports_only_known(const char *image, size_t size) {
    const Elf64_Ehdr *head = (const Elf64_Ehdr *)image;
    if (size < sizeof *head || memcmp(head->e_ident, ELFMAG "\2\1", 6) != 0 ||
        head->e_shentsize != sizeof(Elf64_Shdr) || head->e_shoff % 8 != 0 ||
        !within(head->e_shoff, (uint64_t)head->e_shnum * sizeof(Elf64_Shdr), size))
        return false;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + head->e_shoff);
    for (unsigned i = 0; i < head->e_shnum; i++) {
        const Elf64_Shdr *table = &sections[i];
        if (table->sh_type != SHT_DYNSYM || table->sh_link >= head->e_shnum)
            continue;
        const Elf64_Shdr *strings = &sections[table->sh_link];
        if (!within(table->sh_offset, table->sh_size, size) || table->sh_offset % 8 != 0 ||
            !within(strings->sh_offset, strings->sh_size, size) || strings->sh_size == 0 ||
            image[strings->sh_offset + strings->sh_size - 1] != '\0')
            return false;
        const Elf64_Sym *symbols = (const Elf64_Sym *)(image + table->sh_offset);
        for (uint64_t n = 0; n < table->sh_size / sizeof *symbols; n++) {
            const Elf64_Sym *symbol = &symbols[n];
            if (symbol->st_shndx == SHN_UNDEF || symbol->st_name >= strings->sh_size ||
                ELF64_ST_TYPE(symbol->st_info) != STT_FUNC)
                continue;
            const char *name = image + strings->sh_offset + symbol->st_name;
            if (strncmp(name, "nvrtc", 5) != 0 && strncmp(name, "__nvrtc", 7) != 0)
                continue;
            if (!kd_exported(name))
                return false;
        }
        return true;
    }
    return false;
}

/* Whether this library has all functions of the library at `path`. If it does not, the program gets
   the real library, because it must find every function there. */
KD_EXPORT bool kcache_dropin_covers(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd < 0)
        return false;
    bool covers = false;
    if (fstat(fd, &status) == 0 && status.st_size > 0) {
        size_t size = (size_t)status.st_size;
        char *image = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (image != MAP_FAILED) {
            covers = exports_only_known(image, size);
            munmap(image, size);
        }
    }
    close(fd);
    return covers;
}

/* -- loading ----------------------------------------------------------------------------------- */

/* Sets the real library of this process; false if another one was set before. */
KD_EXPORT bool kcache_dropin_set_real(const char *path) {
    pthread_mutex_lock(&lock);
    bool fits = searched ? strcmp(found, path) == 0 : strlen(path) < sizeof found;
    if (fits && !searched) {
        strcpy(found, path);
        searched = true;
    }
    pthread_mutex_unlock(&lock);
    if (fits) /* a program that opens NVRTC soon asks something */
        kd_server_greet();
    return fits;
}

/* Searches without the lock. The search takes locks of the loader, and another thread may hold
   these and wait for ours, in the constructor of a library. The first thread to finish decides. */
static void find_once(void) {
    pthread_mutex_lock(&lock);
    bool done = searched;
    pthread_mutex_unlock(&lock);
    if (done)
        return;
    char path[PATH_MAX], real[PATH_MAX];
    bool there = search(path, sizeof path) && realpath(path, real) != NULL;
    pthread_mutex_lock(&lock);
    if (!searched)
        strcpy(found, there ? real : "");
    searched = true;
    pthread_mutex_unlock(&lock);
}

/* Whether a real library is known. If not, this library may have been loaded only for a search. */
KD_EXPORT bool kcache_dropin_stands(void) {
    pthread_mutex_lock(&lock);
    bool stands = found[0] != '\0';
    pthread_mutex_unlock(&lock);
    return stands;
}

bool kd_real_path(char *path, size_t room) {
    find_once();
    pthread_mutex_lock(&lock);
    bool there = found[0] != '\0' && strlen(found) < room;
    if (there)
        strcpy(path, found);
    pthread_mutex_unlock(&lock);
    return there;
}

/* Loads without our own hook, if there is one, because the hook would lead back here. */
static void *load(const char *path) {
    void *(*past_hook)(const char *, int) =
        (void *(*)(const char *, int))dlsym(RTLD_DEFAULT, "kcache_dropin_real_dlopen");
    return past_hook != NULL ? past_hook(path, RTLD_NOW | RTLD_LOCAL)
                             : dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

void *kd_real(const char *name) {
    char path[PATH_MAX];
    pthread_mutex_lock(&lock);
    bool done = tried;
    void *library = handle;
    pthread_mutex_unlock(&lock);
    if (!done) {
        bool there = kd_real_path(path, sizeof path);
        library = there ? load(path) : NULL;
        if (there && library == NULL) { /* no descriptors left? Close ours, and try again. */
            kd_server_leave();
            library = load(path);
        }
        pthread_mutex_lock(&lock);
        handle = library; /* every thread gets the same */
        tried = library != NULL;
        pthread_mutex_unlock(&lock);
    }
    return library == NULL ? NULL : dlsym(library, name);
}

void kd_real_lock(void) { pthread_mutex_lock(&lock); }
void kd_real_unlock(void) { pthread_mutex_unlock(&lock); }
void kd_real_after_fork(void) { pthread_mutex_init(&lock, NULL); }
