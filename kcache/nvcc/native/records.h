/* Declarations that the parts of the recorder share. */
#ifndef KCACHE_RECORDS_H
#define KCACHE_RECORDS_H

#include "recording.h"

#include <stddef.h>

extern struct kr_recording *recording; /* NULL if the process is not recorded */

/* Begins a record; returns where to write its answer of that size, or NULL if there is no space. */
char *record(char kind, const char *path, size_t answer_size);
/* Writes a record, unless this process has already written the same record. */
void note(char kind, const char *path, const char *answer);

#endif
