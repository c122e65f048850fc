/* System calls that fail as on other file systems, and a clock that jumps. Loaded with LD_PRELOAD.

   FAULTS="rename:/out/:18:0:2 fsync::22"   CALL:PART OF THE PATH:ERRNO[:SKIP[:TIMES]], separated by blanks. The first SKIP
   matching calls of a process work, the next TIMES (default: all) fail. Errno 0: a write takes half of its bytes.
   CLOCK="5:-7200"   after 5 seconds of the process, the wall clock goes 7,200 seconds back. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <dirent.h>

#define MOST 16
static struct { char call[16], part[128]; int code, skip, times; } faults[MOST];
static int count = -1;

static void read_faults(void) {
    if (count >= 0) return;
    count = 0;
    char *text = getenv("FAULTS");
    if (!text) return;
    char copy[2048], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *word = strtok_r(copy, " ", &rest); word && count < MOST; word = strtok_r(NULL, " ", &rest)) {
        char *fields[5] = {"", "", "0", "0", "1000000000"};
        for (int i = 0; i < 5 && word; i++) fields[i] = strsep(&word, ":");
        snprintf(faults[count].call, 16, "%s", fields[0]);
        snprintf(faults[count].part, 128, "%s", fields[1]);
        faults[count].code = atoi(fields[2]);
        faults[count].skip = atoi(fields[3]);
        faults[count].times = atoi(fields[4]);
        count++;
    }
}

/* The errno of a fault that strikes this call, 0 for half a write, -1 for none. */
static int struck(const char *call, const char *path) {
    read_faults();
    for (int i = 0; i < count; i++) {
        if (strcmp(faults[i].call, call) || !path || !strstr(path, faults[i].part)) continue;
        if (__atomic_fetch_sub(&faults[i].skip, 1, __ATOMIC_SEQ_CST) > 0) continue;
        if (__atomic_fetch_sub(&faults[i].times, 1, __ATOMIC_SEQ_CST) <= 0) continue;
        return faults[i].code;
    }
    return -1;
}

static const char *path_of(int handle) {
    static __thread char path[4096];
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return NULL;
    path[length] = 0;
    return path;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(call, path, result) do { int code = struck(call, path); if (code > 0) { errno = code; return result; } } while (0)

int flock(int handle, int how) { FAIL("flock", path_of(handle), -1); return NEXT(flock)(handle, how); }
int fsync(int handle) { FAIL("fsync", path_of(handle), -1); return NEXT(fsync)(handle); }
int rename(const char *from, const char *to) { FAIL("rename", to, -1); return NEXT(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) { FAIL("rename", to, -1); return NEXT(renameat)(a, from, b, to); }
int link(const char *from, const char *to) { FAIL("link", to, -1); return NEXT(link)(from, to); }
int unlink(const char *path) { FAIL("unlink", path, -1); return NEXT(unlink)(path); }
int mkdir(const char *path, mode_t mode) { FAIL("mkdir", path, -1); return NEXT(mkdir)(path, mode); }
int ftruncate(int handle, off_t size) { FAIL("truncate", path_of(handle), -1); return NEXT(ftruncate)(handle, size); }
int ftruncate64(int handle, off64_t size) { FAIL("truncate", path_of(handle), -1); return NEXT(ftruncate64)(handle, size); }
off_t lseek(int handle, off_t to, int how) { FAIL("seek", path_of(handle), -1); return NEXT(lseek)(handle, to, how); }
off64_t lseek64(int handle, off64_t to, int how) { FAIL("seek", path_of(handle), -1); return NEXT(lseek64)(handle, to, how); }
DIR *opendir(const char *path) { FAIL("opendir", path, NULL); return NEXT(opendir)(path); }

int fcntl(int handle, int command, ...) {
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    if (command == F_SETLK || command == F_SETLKW) FAIL("fcntl", path_of(handle), -1);
    return NEXT(fcntl)(handle, command, argument);
}
int fcntl64(int handle, int command, ...) {
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    if (command == F_SETLK || command == F_SETLKW) FAIL("fcntl", path_of(handle), -1);
    return NEXT(fcntl64)(handle, command, argument);
}
int open(const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    mode_t mode = va_arg(list, int);
    va_end(list);
    FAIL("open", path, -1);
    if (flags & O_CREAT) FAIL("create", path, -1);
    return NEXT(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    mode_t mode = va_arg(list, int);
    va_end(list);
    FAIL("open", path, -1);
    if (flags & O_CREAT) FAIL("create", path, -1);
    return NEXT(open64)(path, flags, mode);
}
ssize_t read(int handle, void *to, size_t size) { FAIL("read", path_of(handle), -1); return NEXT(read)(handle, to, size); }
ssize_t write(int handle, const void *from, size_t size) {
    int code = struck("write", path_of(handle));
    if (code > 0) { errno = code; return -1; }
    return NEXT(write)(handle, from, code == 0 && size > 1 ? size / 2 : size);
}
void *mmap(void *at, size_t size, int protection, int flags, int handle, off_t offset) {
    if (handle >= 0) FAIL("mmap", path_of(handle), MAP_FAILED);
    return NEXT(mmap)(at, size, protection, flags, handle, offset);
}
void *mmap64(void *at, size_t size, int protection, int flags, int handle, off64_t offset) {
    if (handle >= 0) FAIL("mmap", path_of(handle), MAP_FAILED);
    return NEXT(mmap64)(at, size, protection, flags, handle, offset);
}

static long shift(void) {
    static long after = -1, by;
    static time_t began;
    struct timespec now;
    int (*get)(clockid_t, struct timespec *) = NEXT(clock_gettime);
    get(CLOCK_MONOTONIC, &now);
    if (after == -1) {
        char *text = getenv("CLOCK");
        began = now.tv_sec;
        after = 0;
        if (text) sscanf(text, "%ld:%ld", &after, &by);
    }
    return now.tv_sec - began >= after ? by : 0;
}
int clock_gettime(clockid_t which, struct timespec *now) {
    int done = NEXT(clock_gettime)(which, now);
    if (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE) now->tv_sec += shift();
    return done;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *to, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}
