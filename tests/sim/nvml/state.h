/*
 * What the folder that SIM_NVML names says of the simulated machine (README.md describes the files). Everything is
 * static: nothing but NVML's own names may be visible outside the library.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 32
#define MAX_PROCESSES 128
#define MAX_PATH 512
#define ABSENT (-1)
#define DEFAULT_RELEASE_MS 100

typedef unsigned long long u64;

/* ---- files ---- */

/* A path below the folder; it lives as long as the block that asks for it. */
#define PATH(...) path_to((char[MAX_PATH]){""}, __VA_ARGS__)

__attribute__((format(printf, 2, 3))) static const char *path_to(char path[MAX_PATH], const char *format, ...)
{
    const char *root = getenv("SIM_NVML");
    int length = snprintf(path, MAX_PATH, "%s/", root ? root : "/nonexistent");
    va_list rest;
    va_start(rest, format);
    if (length < MAX_PATH)
        vsnprintf(path + length, (size_t)(MAX_PATH - length), format, rest);
    va_end(rest);
    return path;
}

static bool exists(const char *path)
{
    return access(path, F_OK) == 0;
}

/* The first line of a file, without its end; false if there is no such file. */
static bool read_text(const char *path, char *text, size_t size)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    ssize_t got = read(file, text, size - 1);
    close(file);
    text[got > 0 ? got : 0] = '\0';
    text[strcspn(text, "\n")] = '\0';
    return true;
}

/* A value of one GPU, decimal or 0x...; false if it has none. */
static bool read_number(int gpu, const char *file, u64 *value)
{
    char text[64];
    if (!read_text(PATH("gpu%d/%s", gpu, file), text, sizeof text))
        return false;
    *value = strtoull(text, NULL, 0);
    return true;
}

/* ---- time ---- */

static void sleep_ms(double milliseconds)
{
    struct timespec left = {(time_t)(milliseconds / 1e3), (long)(milliseconds * 1e6) % 1000000000L};
    while (nanosleep(&left, &left) == -1 && errno == EINTR)
        continue; /* signals do not end it: a call that hangs in the driver does not return for them either */
}

static double milliseconds(struct timespec time)
{
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

static double now_ms(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return milliseconds(now);
}

/* ---- which GPUs ---- */

/* Folders are in the order of PCI ids; one that is gone is not counted. Returns how many `found` holds. */
static int present_gpus(int found[MAX_GPUS])
{
    int count = 0;
    for (int gpu = 0; gpu < MAX_GPUS && exists(PATH("gpu%d/uuid", gpu)); gpu++)
        if (!exists(PATH("gpu%d/gone", gpu)))
            found[count++] = gpu;
    return count;
}

/* 0, or what the file `lost` says: a code, 15 when it is empty. */
static int lost(int gpu)
{
    char text[64];
    if (!read_text(PATH("gpu%d/lost", gpu), text, sizeof text))
        return 0;
    return *text ? atoi(text) : 15;
}

/* ---- processes and memory ---- */

/* Whether a process has memory of its own: it is neither gone nor a zombie, for which the kernel writes zeros. */
static bool has_memory(int pid)
{
    char path[64], text[8] = "";
    snprintf(path, sizeof path, "/proc/%d/statm", pid);
    return read_text(path, text, sizeof text) && strncmp(text, "0 ", 2) != 0;
}

/* The pids in a list, dead ones too, each once. Without `procs` NVML has no list; without `graphics` it is empty. */
static int pids_of(int gpu, const char *list, int pids[MAX_PROCESSES])
{
    DIR *folder = opendir(PATH("gpu%d/%s", gpu, list));
    int count = 0;
    if (!folder)
        return strcmp(list, "procs") == 0 ? ABSENT : 0;
    for (struct dirent *entry; (entry = readdir(folder)) && count < MAX_PROCESSES;) {
        char *rest;
        int pid = (int)strtol(entry->d_name, &rest, 10), place = 0;
        if (pid <= 0 || (*rest && strcmp(rest, ".dead") != 0))
            continue; /* a file that is being written */
        while (place < count && pids[place] != pid)
            place++;
        pids[place] = pid;
        count += place == count;
    }
    closedir(folder);
    return count;
}

/*
 * A dead process keeps its memory for release_ms: its file <pid> becomes <pid>.dead when the first call notices, and
 * goes when that is old enough. `hold` keeps it for ever, as a broken driver does. False: it holds nothing (more).
 */
static bool process_holds(int gpu, const char *list, int pid, bool *dead, char *text, size_t size)
{
    const char *path = PATH("gpu%d/%s/%d", gpu, list, pid), *grave = PATH("gpu%d/%s/%d.dead", gpu, list, pid);
    char said[64];
    struct stat found;
    if (read_text(path, text, size)) {
        *dead = !has_memory(pid);
        if (*dead)
            rename(path, grave);
        return true;
    }
    *dead = true;
    if (!read_text(grave, text, size) || stat(grave, &found) != 0)
        return false;
    double release_ms = read_text(PATH("release_ms"), said, sizeof said) ? atof(said) : DEFAULT_RELEASE_MS;
    if (exists(PATH("gpu%d/hold", gpu)) || now_ms(CLOCK_REALTIME) - milliseconds(found.st_ctim) < release_ms)
        return true;
    return unlink(grave) != 0;
}

/*
 * The processes of one list (procs, graphics) and the sum of their memory; ABSENT when the GPU has no such list.
 * Memory that outlives its process counts; under `hold` nobody is named for it.
 */
static int list_processes(int gpu, const char *list, nvmlProcessInfo_t *infos, u64 *sum)
{
    int pids[MAX_PROCESSES], number = pids_of(gpu, list, pids), count = 0;
    for (int place = 0; place < number; place++) {
        char text[64];
        bool dead;
        if (!process_holds(gpu, list, pids[place], &dead, text, sizeof text))
            continue;
        bool unknown = strcmp(text, "na") == 0;
        u64 bytes = unknown ? 0 : strtoull(text, NULL, 10);
        *sum += bytes;
        if (!dead || !exists(PATH("gpu%d/hold", gpu)))
            infos[count++] = (nvmlProcessInfo_t){
                .pid = (unsigned int)pids[place],
                .usedGpuMemory = unknown ? (u64)NVML_VALUE_NOT_AVAILABLE : bytes,
                .gpuInstanceId = 0xFFFFFFFF,
                .computeInstanceId = 0xFFFFFFFF,
            };
    }
    return number == ABSENT ? ABSENT : count;
}

/* What is used on a GPU, including memory_other: what processes hold that no list shows. */
static u64 memory_in_use(int gpu)
{
    nvmlProcessInfo_t found[MAX_PROCESSES];
    u64 sum = 0, other = 0;
    list_processes(gpu, "procs", found, &sum);
    list_processes(gpu, "graphics", found, &sum);
    read_number(gpu, "memory_other", &other);
    return sum + other;
}

static bool memory_of(int gpu, nvmlMemory_v2_t *memory)
{
    memory->reserved = 0;
    if (!read_number(gpu, "memory_total", &memory->total))
        return false;
    read_number(gpu, "memory_reserved", &memory->reserved);
    memory->used = memory_in_use(gpu);
    u64 room = memory->total - memory->reserved;
    memory->free = memory->used < room ? room - memory->used : 0;
    return true;
}
