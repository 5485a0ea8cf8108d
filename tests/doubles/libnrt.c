/* The stand-in of libnrt for processes without a framework: nrt_init takes the cores that the environment names, as
   neuron_double.runtime does, and prints the same errors. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

enum { NRT_SUCCESS = 0, NRT_INVALID = 2, NRT_RESOURCE = 4 };

int nrt_init(int framework, const char *version, const char *library) {
    const char *state = getenv("NEURON_DOUBLE_STATE"), *visible = getenv("NEURON_RT_VISIBLE_CORES");
    int first, last, available = 0;
    char path[4096];
    if (!state || !visible || sscanf(visible, "%d-%d", &first, &last) < 1) return NRT_INVALID;
    if (sscanf(visible, "%d-%d", &first, &last) == 1) last = first;
    for (int core = first; core <= last; core++) {
        snprintf(path, sizeof path, "%s/nc%d.lock", state, core);
        int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (file < 0 || flock(file, LOCK_EX | LOCK_NB)) continue;
        if (ftruncate(file, 0) || dprintf(file, "%d", (int)getpid()) < 0) return NRT_INVALID;
        available++;
    }
    if (available == last - first + 1) return NRT_SUCCESS;
    fprintf(stderr, "ERROR   NRT:nrt_allocate_neuron_cores               NeuronCore(s) not available - "
                    "Requested:nc%d-nc%d Available:%d\n", first, last, available);
    return NRT_RESOURCE;
}
