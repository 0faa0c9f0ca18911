/* The real library: the file that the program would have found, loaded at its first use. */
#define _GNU_SOURCE
#include "dropin.h"
#include "table.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* The real library's path with an additional slash at the beginning. By the slash, the preloaded
 * library recognises that this library opens the real one. */
static char *found;
static void *handle;

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
            if ((strncmp(name, "nvrtc", 5) == 0 || strncmp(name, "__nvrtc", 7) == 0) &&
                !kd_exported(name))
                return false;
        }
        return true;
    }
    return false;
}

/* Returns whether this library has all functions of the library at `path`. If not, the program gets
 * the real library, because the program may need any of these functions. */
KD_EXPORT bool kcache_dropin_covers(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status = {0};
    if (fd < 0)
        return false;
    fstat(fd, &status);
    size_t size = (size_t)status.st_size;
    char *image = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0); /* fails for an empty file */
    close(fd);
    if (image == MAP_FAILED)
        return false;
    bool covers = exports_only_known(image, size);
    munmap(image, size);
    return covers;
}

/* -- loading ----------------------------------------------------------------------------------- */

/* Sets the path of this process's real library. Returns false if there is no such file, or if
 * another path was set before. */
KD_EXPORT bool kcache_dropin_set_real(const char *path) {
    char real[PATH_MAX + 1] = "/", *before = NULL;
    char *mine = realpath(path, real + 1) == NULL ? NULL : strdup(real);
    if (mine == NULL)
        return false;
    if (__atomic_compare_exchange_n(
            &found, &before, mine, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return true;
    bool same = strcmp(before, mine) == 0;
    free(mine);
    return same;
}

/* Lets this library replace the real library at `path`; returns false if that is impossible. It
 * connects to the server at once, because a program that opens NVRTC will soon call it. If there is
 * no server, it loads the real library at once, as the program would have done. */
KD_EXPORT bool kcache_dropin_begin(const char *path) {
    if (!kcache_dropin_set_real(path))
        return false;
    if (!kd_server_greet())
        kd_real("nvrtcVersion");
    return true;
}

/* Returns whether this library replaces a real library. If not, it is loaded but unused. */
KD_EXPORT bool kcache_dropin_stands(void) { return kd_real_path() != NULL; }

const char *kd_real_path(void) {
    const char *path = __atomic_load_n(&found, __ATOMIC_ACQUIRE);
    return path == NULL ? NULL : path + 1;
}

/* No lock may be held here: another thread, in the constructor of a library, may hold the loader's
 * locks and wait for this library's lock. */
static void *load(void) {
    if (kd_real_path() == NULL)
        return NULL;
    void *library = dlopen(found, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) { /* perhaps no descriptor is left: close this library's, and try again */
        kd_server_leave();
        library = dlopen(found, RTLD_NOW | RTLD_LOCAL);
    }
    return library;
}

void *kd_real(const char *name) {
    void *library = __atomic_load_n(&handle, __ATOMIC_ACQUIRE);
    if (library == NULL) {
        library = load(); /* returns the same handle in every thread */
        __atomic_store_n(&handle, library, __ATOMIC_RELEASE);
    }
    void *function = library == NULL ? NULL : dlsym(library, name);
    return function == NULL ? kd_missing(name) : function;
}
