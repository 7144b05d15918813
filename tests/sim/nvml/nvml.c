/*
 * A simulated libnvidia-ml.so.1: NVML over a directory of small files (README.md says which).
 *
 * Between two calls nothing is remembered but whether NVML is initialised and what event sets are registered for:
 * every call reads the files again, so a test changes the GPUs by writing files. A missing file is a value that this
 * GPU or driver does not have. All types are those of NVIDIA's own header, so sizes and offsets are right.
 */
#define _GNU_SOURCE
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#include <stdatomic.h>
#include <strings.h>

#include "state.h"

#define GO_ON (-1)
#define EVENT_POLL_MS 10

/* A handle stands for a GPU and not for an index: handle n is the folder gpu<n>. */
struct nvmlDevice_st {
    char unused;
};
struct nvmlEventSet_st {
    long offset;
    u64 types[MAX_GPUS];
};

static struct nvmlDevice_st gpus[MAX_GPUS];
static atomic_int initialised;
static pid_t initialised_by;

/* ---- what every call begins with ---- */

/* Obey `15` (return this; 0 claims success and does nothing) or `hang 30` (seconds, then go on) in a fault file. */
static int fault(const char *text)
{
    double seconds;
    if (sscanf(text, "hang %lf", &seconds) == 1) {
        sleep_ms(seconds * 1e3);
        return GO_ON;
    }
    return atoi(text);
}

static int enter(const char *function)
{
    char text[64];
    if (!initialised || initialised_by != getpid())
        return NVML_ERROR_UNINITIALIZED;
    return read_text(PATH("fault/%s", function), text, sizeof text) ? fault(text) : GO_ON;
}

static int enter_gpu(const char *function, nvmlDevice_t device, int *gpu)
{
    char text[64];
    int said = enter(function);
    if (said != GO_ON)
        return said;
    if (device < gpus || device >= gpus + MAX_GPUS)
        return NVML_ERROR_INVALID_ARGUMENT;
    *gpu = (int)(device - gpus);
    if (exists(PATH("gpu%d/lost", *gpu)) || exists(PATH("gpu%d/gone", *gpu)))
        return NVML_ERROR_GPU_IS_LOST;
    if (exists(PATH("gpu%d/fault", *gpu)) &&
        (read_text(PATH("gpu%d/fault/%s", *gpu, function), text, sizeof text) ||
         read_text(PATH("gpu%d/fault/every", *gpu), text, sizeof text)))
        return fault(text);
    return GO_ON;
}

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int said_ = enter(__func__);                                                                                   \
        if (said_ != GO_ON)                                                                                            \
            return (nvmlReturn_t)said_;                                                                                \
    } while (0)

#define ENTER_GPU(device)                                                                                              \
    int gpu;                                                                                                           \
    do {                                                                                                               \
        int said_ = enter_gpu(__func__, device, &gpu);                                                                 \
        if (said_ != GO_ON)                                                                                            \
            return (nvmlReturn_t)said_;                                                                                \
    } while (0)

/* ---- the library ---- */

static nvmlReturn_t initialise(const char *function)
{
    char text[64];
    if (initialised_by != getpid())
        initialised = 0; /* what the parent did does not count in a forked child */
    int said = read_text(PATH("fault/%s", function), text, sizeof text) ? fault(text) : GO_ON;
    if (said != GO_ON)
        return (nvmlReturn_t)said;
    if (!exists(PATH("driver_version")))
        return NVML_ERROR_DRIVER_NOT_LOADED;
    initialised_by = getpid();
    initialised++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void)
{
    return initialise(__func__);
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return initialise(__func__);
}

nvmlReturn_t nvmlShutdown(void)
{
    ENTER();
    initialised--;
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const known[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset", "The operating system has blocked the request.",
        "RM has detected an NVML/RM version mismatch.", "In use by another client", "Insufficient Memory", "No data",
        "vGPU ECC not supported", "Insufficient Resources", "Frequency not supported", "Argument version mismatch",
        "Deprecated", "Not ready", "No GPUs found", "Invalid state",
    };
    return result < sizeof known / sizeof *known ? known[result] : "Unknown Error";
}

static nvmlReturn_t give_file(char *out, unsigned int size, const char *path)
{
    char text[256];
    if (!read_text(path, text, sizeof text))
        return NVML_ERROR_NOT_SUPPORTED;
    if (strlen(text) >= size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    ENTER();
    return give_file(version, length, PATH("driver_version"));
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    ENTER();
    return give_file(version, length, PATH("nvml_version"));
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    char text[64];
    ENTER();
    if (!read_text(PATH("cuda_version"), text, sizeof text))
        return NVML_ERROR_NOT_SUPPORTED;
    *version = atoi(text);
    return NVML_SUCCESS;
}

/* ---- which GPUs ---- */

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    int found[MAX_GPUS];
    ENTER();
    *count = (unsigned int)present_gpus(found);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    int found[MAX_GPUS];
    ENTER();
    if (index >= (unsigned int)present_gpus(found))
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &gpus[found[index]];
    return (nvmlReturn_t)lost(found[index]);
}

static nvmlReturn_t handle_by(const char *file, bool (*same)(const char *, const char *), const char *wanted,
                              nvmlDevice_t *device)
{
    char text[128];
    int found[MAX_GPUS];
    int count = present_gpus(found);
    for (int place = 0; place < count; place++) {
        if (read_text(PATH("gpu%d/%s", found[place], file), text, sizeof text) && same(text, wanted)) {
            *device = &gpus[found[place]];
            return lost(found[place]) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

static bool same_text(const char *one, const char *other)
{
    return strcasecmp(one, other) == 0;
}

static bool same_pci_id(const char *one, const char *other)
{
    unsigned int a[4], b[4];
    return sscanf(one, "%x:%x:%x.%x", a, a + 1, a + 2, a + 3) == 4 &&
           sscanf(other, "%x:%x:%x.%x", b, b + 1, b + 2, b + 3) == 4 && memcmp(a, b, sizeof a) == 0;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    int found[MAX_GPUS];
    ENTER();
    for (int place = present_gpus(found) - 1; place >= 0; place--)
        if (lost(found[place]))
            return NVML_ERROR_GPU_IS_LOST; /* the header: "if any GPU has fallen off the bus" */
    return handle_by("uuid", same_text, uuid, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *pci_id, nvmlDevice_t *device)
{
    ENTER();
    return handle_by("pci_id", same_pci_id, pci_id, device);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    int found[MAX_GPUS];
    ENTER_GPU(device);
    for (int place = present_gpus(found) - 1; place >= 0; place--)
        if (found[place] == gpu)
            *index = (unsigned int)place;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    char text[64];
    unsigned int function;
    ENTER_GPU(device);
    memset(pci, 0, sizeof *pci);
    if (!read_text(PATH("gpu%d/pci_id", gpu), text, sizeof text) ||
        sscanf(text, "%x:%x:%x.%x", &pci->domain, &pci->bus, &pci->device, &function) != 4)
        return NVML_ERROR_NOT_SUPPORTED;
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", pci->domain, pci->bus & 0xFF, pci->device & 0xFF);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xFFFF, pci->bus & 0xFF,
             pci->device & 0xFF);
    return NVML_SUCCESS;
}

/* ---- texts and numbers ---- */

#define TEXT_OF_GPU(function, file)                                                                                    \
    nvmlReturn_t function(nvmlDevice_t device, char *out, unsigned int size)                                           \
    {                                                                                                                  \
        ENTER_GPU(device);                                                                                             \
        return give_file(out, size, PATH("gpu%d/" file, gpu));                                                         \
    }

TEXT_OF_GPU(nvmlDeviceGetUUID, "uuid")
TEXT_OF_GPU(nvmlDeviceGetName, "name")

/* A function that reads one file as `value` and then does `give`. */
#define VALUE_OF_GPU(function, parameters, file, give)                                                                 \
    nvmlReturn_t function parameters                                                                                   \
    {                                                                                                                  \
        u64 value;                                                                                                     \
        ENTER_GPU(device);                                                                                             \
        if (!read_number(gpu, file, &value))                                                                           \
            return NVML_ERROR_NOT_SUPPORTED;                                                                           \
        give;                                                                                                          \
        return NVML_SUCCESS;                                                                                           \
    }

#define NUMBER_OF_GPU(function, type, file)                                                                            \
    VALUE_OF_GPU(function, (nvmlDevice_t device, type * out), file, *out = (type)value)

NUMBER_OF_GPU(nvmlDeviceGetMinorNumber, unsigned int, "minor_number")
NUMBER_OF_GPU(nvmlDeviceGetArchitecture, nvmlDeviceArchitecture_t, "architecture")
NUMBER_OF_GPU(nvmlDeviceGetBrand, nvmlBrandType_t, "brand")
NUMBER_OF_GPU(nvmlDeviceGetNumaNodeId, unsigned int, "numa_node")
NUMBER_OF_GPU(nvmlDeviceGetPowerUsage, unsigned int, "power_mw")
NUMBER_OF_GPU(nvmlDeviceGetTotalEnergyConsumption, u64, "energy_mj")
NUMBER_OF_GPU(nvmlDeviceGetCurrentClocksEventReasons, u64, "clock_reasons")
NUMBER_OF_GPU(nvmlDeviceGetCurrentClocksThrottleReasons, u64, "clock_reasons")
NUMBER_OF_GPU(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, "persistence")
NUMBER_OF_GPU(nvmlDeviceGetSupportedEventTypes, u64, "event_types")

VALUE_OF_GPU(nvmlDeviceGetMigMode, (nvmlDevice_t device, unsigned int *current, unsigned int *pending), "mig_mode",
             *current = *pending = (unsigned int)value)
VALUE_OF_GPU(nvmlDeviceGetEccMode, (nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending),
             "ecc_mode", *current = *pending = (nvmlEnableState_t)value)
VALUE_OF_GPU(nvmlDeviceGetTemperature,
             (nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius), "temperature",
             if (sensor != NVML_TEMPERATURE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
             *celsius = (unsigned int)value)
VALUE_OF_GPU(nvmlDeviceGetTemperatureV, (nvmlDevice_t device, nvmlTemperature_t *temperature), "temperature",
             if (temperature->version != nvmlTemperature_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
             temperature->temperature = (int)value)
VALUE_OF_GPU(nvmlDeviceGetAddressingMode, (nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode), "addressing_mode",
             if (mode->version != nvmlDeviceAddressingMode_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
             mode->value = (unsigned int)value)

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    char text[64];
    ENTER_GPU(device);
    if (!read_text(PATH("gpu%d/compute", gpu), text, sizeof text) || sscanf(text, "%d.%d", major, minor) != 2)
        return NVML_ERROR_NOT_SUPPORTED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    u64 busy, memory;
    ENTER_GPU(device);
    if (!read_number(gpu, "utilization_gpu", &busy) || !read_number(gpu, "utilization_memory", &memory))
        return NVML_ERROR_NOT_SUPPORTED;
    *utilization = (nvmlUtilization_t){(unsigned int)busy, (unsigned int)memory};
    return NVML_SUCCESS;
}

static nvmlReturn_t ecc_errors(int gpu, nvmlMemoryErrorType_t error, nvmlEccCounterType_t counter, u64 *count)
{
    char file[64];
    snprintf(file, sizeof file, "ecc_%s_%s", error == NVML_MEMORY_ERROR_TYPE_CORRECTED ? "corrected" : "uncorrected",
             counter == NVML_VOLATILE_ECC ? "volatile" : "aggregate");
    return read_number(gpu, file, count) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t error,
                                         nvmlEccCounterType_t counter, u64 *count)
{
    ENTER_GPU(device);
    return ecc_errors(gpu, error, counter, count);
}

/* All errors are those of the device's memory. */
nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t error,
                                             nvmlEccCounterType_t counter, nvmlMemoryLocation_t location, u64 *count)
{
    ENTER_GPU(device);
    if (location != NVML_MEMORY_LOCATION_DEVICE_MEMORY)
        return NVML_ERROR_NOT_SUPPORTED;
    return ecc_errors(gpu, error, counter, count);
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                       unsigned int *pending, unsigned int *failed)
{
    static const char *const files[] = {"remap_corrected", "remap_uncorrected", "remap_pending", "remap_failed"};
    u64 value[4];
    ENTER_GPU(device);
    for (int place = 0; place < 4; place++)
        if (!read_number(gpu, files[place], &value[place]))
            return NVML_ERROR_NOT_SUPPORTED;
    *corrected = (unsigned int)value[0];
    *uncorrected = (unsigned int)value[1];
    *pending = (unsigned int)value[2];
    *failed = (unsigned int)value[3];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending)
{
    u64 value;
    ENTER_GPU(device);
    if (!read_number(gpu, "retired_pending", &value))
        return NVML_ERROR_NOT_SUPPORTED;
    *pending = (nvmlEnableState_t)value;
    return NVML_SUCCESS;
}

/* The first nvlinks_up of the links that a GPU has are up. */
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active)
{
    u64 links, up = 0;
    ENTER_GPU(device);
    if (!read_number(gpu, "nvlinks", &links))
        return NVML_ERROR_NOT_SUPPORTED;
    if (link >= links)
        return NVML_ERROR_INVALID_ARGUMENT;
    read_number(gpu, "nvlinks_up", &up);
    *active = link < up ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info)
{
    u64 state, status = NVML_SUCCESS;
    ENTER_GPU(device);
    if (!read_number(gpu, "fabric_state", &state))
        return NVML_ERROR_NOT_SUPPORTED;
    read_number(gpu, "fabric_status", &status);
    memset(info, 0, sizeof *info);
    info->state = (nvmlGpuFabricState_t)state;
    info->status = (nvmlReturn_t)status;
    return NVML_SUCCESS;
}

/* Field n is the file field/<n>: 230 is the recovery action. */
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    ENTER_GPU(device);
    for (nvmlFieldValue_t *field = values; field < values + count; field++) {
        char file[64];
        u64 value = 0;
        snprintf(file, sizeof file, "field/%u", field->fieldId);
        field->nvmlReturn = read_number(gpu, file, &value) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        field->timestamp = (long long)(now_ms(CLOCK_REALTIME) * 1e3);
        field->latencyUsec = 0;
        field->valueType = value <= 0xFFFFFFFF ? NVML_VALUE_TYPE_UNSIGNED_INT : NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        field->value.ullVal = value;
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
    ENTER_GPU(device);
    const char *path = PATH("gpu%d/persistence", gpu), *fresh = PATH("gpu%d/persistence.new", gpu);
    if (!exists(path))
        return NVML_ERROR_NOT_SUPPORTED;
    if (geteuid() != 0)
        return NVML_ERROR_NO_PERMISSION;
    int file = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool written = file >= 0 && dprintf(file, "%d\n", mode) > 0;
    if (file >= 0)
        close(file);
    return written && rename(fresh, path) == 0 ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

/* ---- memory and processes ---- */

static nvmlReturn_t give_processes(int gpu, const char *list, unsigned int *count, nvmlProcessInfo_t *infos)
{
    nvmlProcessInfo_t found[MAX_PROCESSES];
    u64 sum = 0;
    int number = list_processes(gpu, list, found, &sum);
    if (number == ABSENT)
        return NVML_ERROR_NOT_SUPPORTED;
    bool fits = (unsigned int)number <= *count;
    *count = (unsigned int)number;
    if (!fits)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (number)
        memcpy(infos, found, (size_t)number * sizeof *found);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)
{
    ENTER_GPU(device);
    return give_processes(gpu, "procs", count, infos);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                      nvmlProcessInfo_t *infos)
{
    ENTER_GPU(device);
    return give_processes(gpu, "graphics", count, infos);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    nvmlMemory_v2_t known;
    ENTER_GPU(device);
    if (!memory_of(gpu, &known))
        return NVML_ERROR_NOT_SUPPORTED;
    *memory = (nvmlMemory_t){.total = known.total, .free = known.free, .used = known.reserved + known.used};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    ENTER_GPU(device);
    if (memory->version != nvmlMemory_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return memory_of(gpu, memory) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* ---- events ---- */

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    struct stat events;
    ENTER();
    *set = calloc(1, sizeof **set);
    (*set)->offset = stat(PATH("events"), &events) == 0 ? events.st_size : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, u64 types, nvmlEventSet_t set)
{
    u64 supported;
    ENTER_GPU(device);
    if (!read_number(gpu, "event_types", &supported) || types & ~supported)
        return NVML_ERROR_NOT_SUPPORTED;
    set->types[gpu] |= types;
    return NVML_SUCCESS;
}

/* The next line "UUID XID ..." of the file `events` that this set is registered for; others are skipped. */
static bool next_event(nvmlEventSet_t set, nvmlEventData_t *data)
{
    char line[256], uuid[96];
    u64 xid;
    bool found = false;
    FILE *events = fopen(PATH("events"), "re");
    if (!events)
        return false;
    fseek(events, set->offset, SEEK_SET);
    while (!found && fgets(line, sizeof line, events) && strchr(line, '\n')) {
        nvmlDevice_t device;
        set->offset = ftell(events);
        if (sscanf(line, "%95s %llu", uuid, &xid) != 2 ||
            handle_by("uuid", same_text, uuid, &device) == NVML_ERROR_NOT_FOUND)
            continue;
        found = set->types[device - gpus] & nvmlEventTypeXidCriticalError;
        *data = (nvmlEventData_t){device, nvmlEventTypeXidCriticalError, xid, 0xFFFFFFFF, 0xFFFFFFFF};
    }
    fclose(events);
    return found;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    ENTER();
    double deadline = now_ms(CLOCK_MONOTONIC) + timeout_ms;
    while (!next_event(set, data)) {
        if (!initialised)
            return NVML_ERROR_UNINITIALIZED; /* another thread has shut NVML down */
        for (int gpu = 0; gpu < MAX_GPUS; gpu++)
            if (set->types[gpu] && lost(gpu))
                return NVML_ERROR_GPU_IS_LOST;
        if (now_ms(CLOCK_MONOTONIC) >= deadline)
            return NVML_ERROR_TIMEOUT;
        sleep_ms(EVENT_POLL_MS);
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    ENTER();
    free(set);
    return NVML_SUCCESS;
}

/* ---- for tests and the simulated engine ---- */

/* Back to before the first initialisation. */
void sim_reset(void)
{
    initialised = 0;
}

/* The size of a type in this library, so that it can be compared with that of pynvml; 0 if the name is unknown. */
unsigned long sim_sizeof(const char *name)
{
#define SIZE(type) {#type, sizeof(type)}
    static const struct {
        const char *name;
        unsigned long size;
    } sizes[] = {
        SIZE(nvmlMemory_t), SIZE(nvmlMemory_v2_t), SIZE(nvmlProcessInfo_t), SIZE(nvmlEventData_t),
        SIZE(nvmlPciInfo_t), SIZE(nvmlFieldValue_t), SIZE(nvmlUtilization_t), SIZE(nvmlTemperature_t),
        SIZE(nvmlDeviceAddressingMode_t),
    };
    for (size_t place = 0; place < sizeof sizes / sizeof *sizes; place++)
        if (strcmp(sizes[place].name, name) == 0)
            return sizes[place].size;
    return 0;
}

/*
 * What CUDA says of the GPU with this index: its folder, and its memory without what the driver keeps for itself.
 * Where memory is shared with the host, NVML knows none and CUDA has memory_unified. Needs no initialisation.
 */
nvmlReturn_t sim_cuda_memory(unsigned int index, int *folder, u64 *total, u64 *available)
{
    int found[MAX_GPUS];
    nvmlMemory_v2_t memory;
    if (index >= (unsigned int)present_gpus(found))
        return NVML_ERROR_NOT_FOUND;
    *folder = found[index];
    if (lost(*folder))
        return NVML_ERROR_GPU_IS_LOST;
    if (memory_of(*folder, &memory)) {
        *total = memory.total - memory.reserved;
        *available = memory.free;
        return NVML_SUCCESS;
    }
    if (!read_number(*folder, "memory_unified", total))
        return NVML_ERROR_NOT_SUPPORTED;
    u64 used = memory_in_use(*folder);
    *available = used < *total ? *total - used : 0;
    return NVML_SUCCESS;
}
