/* Declarations that the parts of the preloaded library share. preload.c says what it is. */
#ifndef KCACHE_PRELOAD_H
#define KCACHE_PRELOAD_H

#include "dropin.h"

#include <link.h>

/* Finds NVRTC as the dynamic loader does: for an object that opens it by its bare name, or for the
   objects that are linked with it. `path` has room for PATH_MAX bytes. */
bool kd_search(struct link_map *object, char path[]);
bool kd_is_linked(void); /* whether any object is linked with NVRTC */
bool kd_search_linked(char path[]);

/* Returns a function of the interface library, opened for the objects that are linked with NVRTC;
   NULL if that is impossible. */
void *kd_of_interface(const char *name);

#endif
