/* A small stand-in for libnvidia-ml.so.1. Every call reads the file named by FAKE_NVML_STATE:
 *   init CODE            result of nvmlInitWithFlags
 *   every CODE           result of every other call (0 = answer)
 *   gpu TOTAL USED MEMCODE PROCS MIG   one line per GPU; MIG = number of instances, -1 = no MIG
 *   pid PID USED         processes of every device, USED -1 = not available
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7 };
enum { MAX_GPUS = 8, MAX_PIDS = 8, MIG_PLACES = 7 };

typedef struct { unsigned long long total, used; int memory_code, process_code, mig; } Gpu;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } Process;
typedef struct { unsigned long long total, free, used; } Memory;

static struct {
    int init, every, gpus, pids;
    Gpu gpu[MAX_GPUS];
    Process process[MAX_PIDS];
} state;
static int open_count;
/* Handles point into this table: GPU g is handles[g][0], its instance n is handles[g][n + 1]. */
static char handles[MAX_GPUS][MIG_PLACES + 1];

static void load(void) {
    memset(&state, 0, sizeof state);
    FILE *file = fopen(getenv("FAKE_NVML_STATE"), "r");
    char word[16];
    while (file && fscanf(file, "%15s", word) == 1) {
        if (!strcmp(word, "init")) fscanf(file, "%d", &state.init);
        else if (!strcmp(word, "every")) fscanf(file, "%d", &state.every);
        else if (!strcmp(word, "gpu")) {
            Gpu *g = &state.gpu[state.gpus++];
            fscanf(file, "%llu %llu %d %d %d", &g->total, &g->used, &g->memory_code,
                   &g->process_code, &g->mig);
        } else if (!strcmp(word, "pid")) {
            Process *p = &state.process[state.pids++];
            long long used;
            fscanf(file, "%u %lld", &p->pid, &used);
            p->used = (unsigned long long)used;
        }
    }
    if (file) fclose(file);
}

static int enter(void) {
    load();
    if (!open_count) return UNINITIALIZED;
    return state.every;
}

static int gpu_of(void *handle) { return (int)(((char *)handle - handles[0]) / (MIG_PLACES + 1)); }
static int place_of(void *handle) { return (int)(((char *)handle - handles[0]) % (MIG_PLACES + 1)); }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    load();
    if (state.init == OK) open_count++;
    return state.init;
}

int nvmlShutdown(void) {
    if (!open_count) return UNINITIALIZED;
    open_count--;
    return OK;
}

int fake_open_count(void) { return open_count; }

const char *nvmlErrorString(int code) { return code == 999 ? "Unknown Error" : "an error"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    int code = enter();
    *count = (unsigned)state.gpus;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    int code = enter();
    *device = &handles[index][0];
    return code;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
    int place = place_of(device);
    snprintf(text, length, place ? "MIG-%d-%d" : "GPU-%d", gpu_of(device), place - 1);
    return enter();
}

int nvmlDeviceGetName(void *device, char *text, unsigned length) {
    (void)device;
    snprintf(text, length, "Fake H1");
    return enter();
}

int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    int code = enter();
    if (code) return code;
    Gpu *gpu = &state.gpu[gpu_of(device)];
    unsigned long long share = place_of(device) ? (unsigned long long)gpu->mig : 1;
    memory->total = gpu->total / share;
    memory->used = gpu->used / share;
    memory->free = memory->total - memory->used;
    return gpu->memory_code;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *processes) {
    int code = enter();
    if (code) return code;
    Gpu *gpu = &state.gpu[gpu_of(device)];
    if (gpu->process_code) return gpu->process_code;
    unsigned room = *count;
    *count = (unsigned)state.pids;
    if (!state.pids) return OK;
    if (!processes || room < *count) return SMALL;
    memcpy(processes, state.process, *count * sizeof *processes);
    return OK;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    int code = enter();
    if (code) return code;
    if (state.gpu[gpu_of(device)].mig < 0) return NOT_SUPPORTED;
    *current = *pending = state.gpu[gpu_of(device)].mig > 0;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    (void)device;
    *count = MIG_PLACES;
    return enter();
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **child) {
    int code = enter();
    if (code) return code;
    /* Instances lie at every second place, as after some were destroyed. */
    if (index % 2 || (int)index / 2 >= state.gpu[gpu_of(device)].mig) return NOT_FOUND;
    *child = (char *)device + index + 1;
    return OK;
}
