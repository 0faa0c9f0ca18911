/* Search: finds NVRTC's file in the order of the dynamic loader (ld.so(8)), without loading it. */
#define _GNU_SOURCE
#include "dropin.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* How many objects that are linked with NVRTC are considered. */
#define MOST_NEEDING 16

static bool readable(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISREG(status.st_mode) && access(path, R_OK) == 0;
}

/* Searches the directories that the loader would search for `object`: its RPATH or RUNPATH,
 * LD_LIBRARY_PATH, and the default directories. */
static bool search_for(void *object, char path[PATH_MAX]) {
    Dl_serinfo size;
    if (object == NULL || dlinfo(object, RTLD_DI_SERINFOSIZE, &size) != 0)
        return false;
    Dl_serinfo *info = malloc(size.dls_size);
    if (info == NULL)
        return false;
    bool there = false;
    if (dlinfo(object, RTLD_DI_SERINFOSIZE, info) == 0 &&
        dlinfo(object, RTLD_DI_SERINFO, info) == 0)
        for (unsigned i = 0; i < info->dls_cnt && !there; i++) {
            const char *folder = info->dls_serpath[i].dls_name;
            int length = snprintf(path, PATH_MAX, "%s/" KD_SONAME, folder);
            there = length > 0 && length < PATH_MAX && readable(path);
        }
    free(info);
    return there;
}

/* Searches /etc/ld.so.cache, which lists the libraries in the directories of /etc/ld.so.conf. The
 * file contains, among other data, paths that end in a NUL. */
static bool search_cache(char path[PATH_MAX]) {
    static const char end[] = "/" KD_SONAME; /* its NUL is compared, too */
    FILE *cache = fopen("/etc/ld.so.cache", "re");
    char *text = NULL;
    size_t room = 0, size;
    bool there = false;
    while (cache != NULL && !there && (size = (size_t)getdelim(&text, &room, 0, cache)) != (size_t)-1)
        there = size >= sizeof end && size <= PATH_MAX &&
                memcmp(text + size - sizeof end, end, sizeof end) == 0 &&
                readable(memcpy(path, text, size));
    free(text);
    if (cache != NULL)
        fclose(cache);
    return there;
}

bool kd_search(struct link_map *object, char path[PATH_MAX]) {
    if (search_for(object, path) || search_cache(path))
        return true;
    void *program = dlopen(NULL, RTLD_LAZY);
    bool there = search_for(program, path);
    if (program != NULL)
        dlclose(program);
    return there;
}

/* -- objects that are linked with NVRTC -------------------------------------------------------- */

static bool needs_nvrtc(const ElfW(Dyn) * dynamic) {
    const char *strings = NULL;
    for (const ElfW(Dyn) *each = dynamic; each->d_tag != DT_NULL; each++)
        if (each->d_tag == DT_STRTAB)
            strings = (const char *)each->d_un.d_ptr;
    for (const ElfW(Dyn) *each = dynamic; strings != NULL && each->d_tag != DT_NULL; each++)
        if (each->d_tag == DT_NEEDED && strcmp(strings + each->d_un.d_val, KD_SONAME) == 0)
            return true;
    return false;
}

struct needing {
    const void *dynamic[MOST_NEEDING];
    int count;
};

static int collect(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct needing *needing = data;
    if (info->dlpi_name != NULL && strstr(info->dlpi_name, "linux-vdso") != NULL)
        return 0;
    for (int i = 0; i < info->dlpi_phnum && needing->count < MOST_NEEDING; i++) {
        const void *dynamic = (const void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC && needs_nvrtc(dynamic))
            needing->dynamic[needing->count++] = dynamic;
    }
    return 0;
}

bool kd_is_linked(void) {
    struct needing needing = {.count = 0};
    dl_iterate_phdr(collect, &needing);
    return needing.count > 0;
}

bool kd_search_linked(char path[PATH_MAX]) {
    struct needing needing = {.count = 0};
    dl_iterate_phdr(collect, &needing);
    for (int i = 0; i < needing.count; i++) {
        Dl_info info;
        struct link_map *map = NULL;
        if (dladdr1(needing.dynamic[i], &info, (void **)&map, RTLD_DL_LINKMAP) != 0 &&
            search_for(map, path))
            return true;
    }
    return kd_search(NULL, path);
}
