/* A tape passed once on the clocks of the host, of the compute stream and of all beside it, for K candidates at once.

   It does what `_pass` of mofa/cost/block/tape_clock.py and mofa/cost/block/streams.py do, to the last bit, which are
   its reference and say what it all means; mofa/cost/block/compiled_clock.py calls it. Times are in seconds. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef SOURCE
#define SOURCE ""
#endif

enum { COMPUTE, SEND, SYNC }; /* kinds of step */
enum { MAY_PASS = 1, WATCHED = 2, OWN_ORDER = 4, VIEW = 8 };
enum { ABSENT = -1, EVERYWHERE = -1, OF_ITSELF = 0, MOST = 16 };

typedef struct {
    int32_t kind, flags, family, stream, group; /* a group or ABSENT */
    int32_t present, on_world;                  /* rows of masks; present may be EVERYWHERE */
    int32_t reads, num_reads, writes, num_writes;
} Step;

typedef struct {
    const Step *steps;
    const int32_t *names;   /* tensors that steps read and write */
    const uint8_t *watched; /* whether other streams ask when a tensor is there */
    const double *took, *issue; /* of each step, (steps, K); of a synchronisation what it takes the host */
    const uint8_t *masks;       /* (masks, K) */
    int64_t num_steps, num_k, num_families, num_streams, num_groups, num_names, most;
    const double *slowdown; /* what computing loses by what other streams do beside it, (K,) */
    int64_t communicates, host_idle, world;
} Tape;

typedef struct { /* numbers are (rows, K); of each tensor how many families make it, ABSENT where it is not there
                    yet, and which */
    double *host, *compute, *loss, *late, *exposed, *regained, *streams, *communicators, *ready;
    double *since;
    double *work; /* (5 + most, K) */
    int32_t *num, *families; /* (names,), (names, most) */
} State;

typedef struct { /* when something is there, by family */
    int32_t num, families[MOST];
    double *at[MOST];
} Made;

/* The hash of the text that this was compiled from. */
const char *source(void) { return SOURCE; }

static double later(double x, double y) { return x > y ? x : y; }

static double sooner(double x, double y) { return x < y ? x : y; }

/* Where a step is more than a name for its input: a mask, NULL for everywhere; of a view nowhere. */
static const uint8_t *mask(const Tape *t, int32_t row) { return row == EVERYWHERE ? 0 : t->masks + row * t->num_k; }

static double *ready_at(const Tape *t, const State *s, int32_t name, int32_t n) {
    return s->ready + (name * t->most + n) * t->num_k;
}

/* What a step makes where it runs, and where it does not what it hands on of a tensor; `made` has room for both. */
static void hand_on(const Tape *t, const State *s, Made *made, const uint8_t *runs, int is_view, int32_t name) {
    int64_t num_k = t->num_k;
    for (int32_t n = 0; n < made->num; n++)
        for (int64_t k = 0; k < num_k; k++)
            if (is_view || (runs && !runs[k])) made->at[n][k] = -INFINITY;
    for (int32_t n = 0; n < s->num[name]; n++) {
        const double *from = ready_at(t, s, name, n);
        int32_t family = s->families[name * t->most + n], place = 0;
        while (place < made->num && made->families[place] != family) place++;
        if (place == made->num) {
            made->families[made->num++] = family;
            for (int64_t k = 0; k < num_k; k++) made->at[place][k] = -INFINITY;
        }
        double *to = made->at[place];
        for (int64_t k = 0; k < num_k; k++)
            if (is_view || (runs && !runs[k])) to[k] = later(from[k], to[k]);
    }
}

static void write_down(const Tape *t, const State *s, const Made *made, int32_t name) {
    s->num[name] = made->num;
    for (int32_t n = 0; n < made->num; n++) {
        s->families[name * t->most + n] = made->families[n];
        memcpy(ready_at(t, s, name, n), made->at[n], (size_t)t->num_k * sizeof(double));
    }
}

/* Where a step is present, and where `on` says `yes`, it takes something until its end. */
static void take(const Tape *t, double *queue, const uint8_t *here, const uint8_t *on, int yes, const double *end,
                 const double *since) {
    int64_t num_k = t->num_k;
    for (int64_t k = 0; k < num_k; k++)
        if ((!here || here[k]) && (!on || on[k] == yes)) {
            queue[k] = later(end[k], queue[k]);
            queue[num_k + k] = since[k];
        }
}

static void await(double *start, double *since, const double *until, const double *fixed, const uint8_t *on, int yes,
                  int64_t num_k) {
    for (int64_t k = 0; k < num_k; k++)
        if ((!on || on[k] == yes) && until[k] > start[k]) {
            start[k] = until[k];
            since[k] = fixed[k];
        }
}

static void send(const Tape *t, const State *s, const Step *step, const double *took, Made *made) {
    int64_t num_k = t->num_k;
    double *launch = s->work, *start = launch + num_k, *since = start + num_k, *end = made->at[0];
    const int32_t *reads = t->names + step->reads;
    const uint8_t *here = mask(t, step->present), *on = t->masks + step->on_world * num_k;
    for (int64_t k = 0; k < num_k; k++) {
        launch[k] = start[k] = later(s->host[k], step->flags & OWN_ORDER ? 0.0 : s->compute[k]);
        since[k] = s->loss[k];
    }
    for (int32_t i = 0; i < step->num_reads; i++)
        for (int32_t n = 0; n < s->num[reads[i]]; n++)
            await(start, since, ready_at(t, s, reads[i], n), s->since + reads[i] * num_k, 0, 0, num_k);
    double *stream = s->streams + 2 * step->stream * num_k;
    await(start, since, stream, stream + num_k, 0, 0, num_k);
    double *own = s->communicators + 2 * step->group * num_k, *world = s->communicators + 2 * t->world * num_k;
    if (step->group != ABSENT) {
        await(start, since, own, own + num_k, on, 0, num_k);
        await(start, since, world, world + num_k, on, 1, num_k);
    }
    for (int64_t k = 0; k < num_k; k++) {
        since[k] = later(sooner(since[k], s->loss[k]), s->loss[k] - (start[k] - launch[k]));
        end[k] = start[k] + took[k];
    }
    take(t, stream, here, 0, 0, end, since);
    if (step->group != ABSENT) {
        take(t, own, here, on, 0, end, since);
        take(t, world, here, on, 1, end, since);
    }
    made->num = 1;
    made->families[0] = step->family;
    if (step->num_reads) {
        if (here) hand_on(t, s, made, here, 0, reads[0]);
        const double *before = s->since + reads[0] * num_k;
        for (int64_t k = 0; k < num_k; k++)
            if (step->flags & VIEW || (here && !here[k])) since[k] = before[k];
    }
    for (int32_t i = 0; i < step->num_writes; i++) {
        int32_t name = t->names[step->writes + i];
        write_down(t, s, made, name);
        memcpy(s->since + name * num_k, since, (size_t)num_k * sizeof(double));
    }
}

/* The compute stream waits for what other streams make of a step's inputs. */
static void wait_for_inputs(const Tape *t, const State *s, const Step *step, const uint8_t *here) {
    int64_t num_k = t->num_k;
    for (int32_t i = 0; i < step->num_reads; i++) {
        int32_t name = t->names[step->reads + i];
        const double *since = s->since + name * num_k;
        for (int32_t n = 0; n < s->num[name]; n++) {
            int32_t family = s->families[name * t->most + n];
            if (family == OF_ITSELF) continue;
            const double *ready = ready_at(t, s, name, n);
            double *exposed = s->exposed + family * num_k, *regained = s->regained + family * num_k;
            for (int64_t k = 0; k < num_k; k++) {
                double wait = here && !here[k] ? 0.0 : later(ready[k] - s->compute[k], 0.0);
                double back = later(sooner(wait, s->loss[k] - since[k]), 0.0);
                exposed[k] += wait;
                regained[k] += back;
                s->loss[k] -= back;
                s->compute[k] += wait;
            }
        }
    }
}

static void compute(const Tape *t, const State *s, const Step *step, const double *took, int is_ahead,
                    const double *begun, const double *issued, Made *made) {
    int64_t num_k = t->num_k;
    const int32_t *reads = t->names + step->reads, *writes = t->names + step->writes;
    const uint8_t *here = mask(t, step->present);
    int may_pass = step->flags & MAY_PASS, is_view = step->flags & VIEW, waits = 0;
    for (int32_t i = 0; i < step->num_reads; i++) waits |= s->num[reads[i]] != ABSENT;
    if (waits && !(may_pass && is_view)) wait_for_inputs(t, s, step, may_pass ? here : 0);
    double *exposed = s->exposed + step->family * num_k, *host_idle = s->exposed + t->host_idle * num_k;
    for (int64_t k = 0; k < num_k; k++)
        if (took[k] > 0.0) {
            double start = s->compute[k];
            if (!is_ahead) {
                double idle = later(s->host[k] - start, 0.0);
                host_idle[k] += idle;
                start += idle;
            }
            s->late[k] = later(s->late[k], issued[k] - (start - begun[k]));
            s->compute[k] = start + took[k];
            if (t->communicates) s->loss[k] += t->slowdown[k] * took[k];
            exposed[k] += took[k];
        }
    if (waits && may_pass) {
        made->num = 0;
        hand_on(t, s, made, here, is_view, reads[0]);
        double *since = s->work;
        for (int64_t k = 0; k < num_k; k++) {
            int passes = is_view || (here && !here[k]);
            since[k] = passes ? s->since[reads[0] * num_k + k] : INFINITY;
        }
        for (int32_t i = 0; i < step->num_writes; i++) {
            write_down(t, s, made, writes[i]);
            memcpy(s->since + writes[i] * num_k, since, (size_t)num_k * sizeof(double));
        }
    }
    if (!(step->flags & WATCHED)) return;
    made->num = 1;
    made->families[0] = OF_ITSELF;
    memcpy(made->at[0], s->compute, (size_t)num_k * sizeof(double));
    if (may_pass && s->num[reads[0]] != ABSENT) hand_on(t, s, made, here, is_view, reads[0]);
    for (int32_t i = 0; i < step->num_writes; i++)
        if (t->watched[writes[i]]) write_down(t, s, made, writes[i]);
}

static void synchronise(const Tape *t, const State *s, const Step *step, const double *took) {
    int64_t num_k = t->num_k;
    const uint8_t *here = mask(t, step->present);
    double *until = s->work;
    for (int64_t k = 0; k < num_k; k++) until[k] = step->num_reads ? -INFINITY : s->compute[k];
    for (int32_t i = 0; i < step->num_reads; i++) {
        int32_t name = t->names[step->reads + i];
        for (int32_t n = 0; n < s->num[name]; n++) {
            const double *ready = ready_at(t, s, name, n);
            for (int64_t k = 0; k < num_k; k++) until[k] = later(until[k], ready[k]);
        }
    }
    for (int64_t k = 0; k < num_k; k++)
        if (!here || here[k]) s->host[k] = later(s->host[k], until[k]) + took[k];
}

/* Play a tape once; a host that is ahead of all stays there, and waits for nothing. */
void pass_once(const Tape *t, const State *s, int32_t is_ahead) {
    int64_t num_k = t->num_k;
    double *begun = s->work + 3 * num_k, *issued = begun + num_k;
    Made made;
    for (int32_t n = 0; n < t->most && n < MOST; n++) made.at[n] = issued + (1 + n) * num_k; /* behind what `send` works with */
    memset(s->exposed, 0, (size_t)(t->num_families * num_k) * sizeof(double));
    memset(s->regained, 0, (size_t)(t->num_families * num_k) * sizeof(double));
    for (int64_t k = 0; k < num_k; k++) {
        s->late[k] = issued[k] = 0.0;
        begun[k] = s->compute[k];
    }
    for (int64_t i = 0; i < t->num_steps; i++) {
        const Step *step = t->steps + i;
        const double *took = t->took + i * num_k, *issue = t->issue + i * num_k;
        if (step->kind == SYNC) {
            if (!is_ahead) synchronise(t, s, step, took);
            continue;
        }
        for (int64_t k = 0; k < num_k; k++) {
            issued[k] += issue[k];
            if (!is_ahead) s->host[k] += issue[k];
        }
        if (step->kind == SEND) send(t, s, step, took, &made);
        else compute(t, s, step, took, is_ahead, begun, issued, &made);
    }
}
