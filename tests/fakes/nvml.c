/* A stand-in for libnvidia-ml.so.1. FAKE_NVML names how it behaves; see tests/unit/test_nvml.py.
 * Return codes: 0 success, 3 not supported, 4 no permission, 6 not found, 7 insufficient size,
 * 9 driver not loaded, 15 GPU is lost, 18 library and kernel module differ.
 * Built with -DOLDSYM it lacks the newer symbols, as an old driver does. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GIB (1ULL << 30)

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process;

static int is(const char *name) {
    const char *mode = getenv("FAKE_NVML");
    return mode && strcmp(mode, name) == 0;
}

static void slow(void) {
    if (is("slow")) usleep(300000);
}

/* devices in PCI order; with "order" the visible one is the second */
static const char *UUIDS[] = {"GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"};
static int handles[2] = {0, 1};

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (is("nodriver")) return 9;
    if (is("mismatch")) return 18;
    if (is("noperm")) return 4;
    return 0;
}
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) {
    switch (code) {
        case 3: return "Not Supported";
        case 4: return "Insufficient Permissions";
        case 6: return "Not Found";
        case 9: return "Driver Not Loaded";
        case 15: return "GPU is lost";
        case 18: return "Driver/library version mismatch";
        default: return "Unknown Error";
    }
}
int nvmlSystemGetDriverVersion(char *out, unsigned length) {
    strncpy(out, "550.00", length);
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = is("zero") ? 0 : is("order") ? 2 : 1;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = &handles[index];
    return 0;
}
static const char *uuid_of(int index) {
    return is("mig") ? "MIG-cccccccc-0000-0000-0000-000000000000" : UUIDS[index];
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    for (int i = 0; i < 2; i++)
        if (strcmp(uuid, uuid_of(i)) == 0) {
            *handle = &handles[i];
            return 0;
        }
    return 6;
}
int nvmlDeviceGetUUID(void *handle, char *out, unsigned length) {
    strncpy(out, uuid_of(*(int *)handle), length);
    return 0;
}
int nvmlDeviceGetName(void *handle, char *out, unsigned length) {
    strncpy(out, *(int *)handle ? "Fake B" : "Fake A", length);
    return 0;
}

static int memory_code(void) {
    slow();
    if (is("jetson") || is("gb10")) return 3;
    if (is("lost")) return 15;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_v1 *out) {
    unsigned long long extra = is("reserved") ? GIB / 2 : 0;
    out->total = 80 * GIB;
    out->used = (*(int *)handle ? 20 : 10) * GIB + extra;
    out->free = out->total - out->used;
    return memory_code();
}
int nvmlDeviceGetUtilizationRates(void *handle, utilization *out) {
    (void)handle;
    if (is("mig")) return 3;
    out->gpu = 37;
    out->memory = 21;
    return is("lost") ? 15 : 0;
}
int nvmlDeviceGetClockInfo(void *handle, unsigned type, unsigned *clock) {
    (void)handle, (void)type;
    *clock = 1410;
    return is("lost") ? 15 : 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *out) {
    (void)handle;
    *out = 123456;
    return is("lost") ? 15 : is("jetson") ? 3 : is("noenergy") ? 999 : 0;
}

#ifndef OLDSYM
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2 *out) {
    out->total = 80 * GIB;
    out->used = (*(int *)handle ? 20 : 10) * GIB;
    out->reserved = is("reserved") ? GIB / 2 : 0;
    out->free = out->total - out->used - out->reserved;
    return memory_code();
}
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *out) {
    (void)handle;
    *out = 0x4; /* software power cap */
    return is("lost") ? 15 : 0;
}

static int list(unsigned *count, process *out, unsigned n, const process *found) {
    if (is("jetson")) return 3;
    if (is("lost")) return 15;
    if (!n) {
        *count = 0;
        return 0;
    }
    if (!out || *count < n) {
        *count = n;
        return 7;
    }
    memcpy(out, found, n * sizeof(process));
    *count = n;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process *out) {
    process ours = {(unsigned)getpid(), GIB, 0, 0};
    (void)handle;
    if (is("wsl")) ours.used = ~0ULL;
    if (is("container")) ours.pid = 1; /* host pids only, ours is not among them */
    if (is("idle")) return list(count, out, 0, 0);
    return list(count, out, 1, &ours);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, process *out) {
    process ours = {(unsigned)getpid(), GIB / 2, 0, 0};
    (void)handle;
    return list(count, out, is("twice") ? 1 : 0, &ours);
}
#endif
