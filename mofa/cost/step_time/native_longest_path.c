/* The longest path through a pipeline's computations and hand-overs, of many plans at once.

   It gives what `_walk` of mofa/cost/step_time/critical_path.py gives, to the last bit, which is its reference and
   stands in where this is not compiled; mofa/cost/step_time/compiled_path.py calls it. Times are in seconds. */

#include <stddef.h>
#include <stdint.h>

#ifndef SOURCE
#define SOURCE ""
#endif

enum { BLOCK = 64 }; /* plans that are walked together: their ends stay in the processor's cache */

typedef struct { /* nodes in an order in which none waits for a later one; node 0 is the start */
    int64_t size;
    const int64_t *first_wait, *waits; /* of node i waits[first_wait[i]] up to waits[first_wait[i + 1]] */
    const int64_t *first_sent, *sent;  /* the same of what its hand-over follows */
    const int64_t *before;             /* the computation before it on its rank */
    int64_t num_ends, num_steady;
    const int64_t *ends, *last_steady, *round_before;
    int64_t num_ranks;
    const int64_t *rank, *in_last_round; /* whose computation a node is, below 0 of others; 1 in its last round, else 0 */
} Walk;

/* The hash of the text that this was compiled from. */
const char *source(void) { return SOURCE; }

/* out = what is later, of it and the ends of some nodes */
static void latest_of(double *restrict out, const double *restrict done, const int64_t *nodes, int64_t num, size_t n,
                      size_t width) {
    const double *one = done + (size_t)nodes[0] * width;
    for (size_t i = 0; i < n; i++) out[i] = one[i];
    for (int64_t k = 1; k < num; k++) {
        one = done + (size_t)nodes[k] * width;
        for (size_t i = 0; i < n; i++) out[i] = out[i] > one[i] ? out[i] : one[i];
    }
}

/* Of each plan when the last computation ends, and the longest of all last rounds.

   durations and, where there are any, held, woken and host have a row for each kind of node, `row` of node i, of
   num_plans columns. done and issued have room for `size` numbers of each of
   the plans that are walked together. waited gets what the device of each rank waits for its own host, in all that is
   walked and in the last round: 2 x num_ranks x num_plans, zeros before. A rank's host begins ahead of its device by
   `lead`, num_ranks x num_plans. */
void longest_path(const Walk *w, const int64_t *row, const double *durations, const double *held, const double *woken,
                  const double *host, const double *lead, int64_t num_plans, double *done, double *issued,
                  double *latest_end, double *round_s, double *waited) {
    double latest[BLOCK], handed[BLOCK], begun[BLOCK];
    size_t width = (size_t)(num_plans < BLOCK ? num_plans : BLOCK);
    for (int64_t begin = 0; begin < num_plans; begin += BLOCK) {
        size_t n = (size_t)(num_plans - begin < BLOCK ? num_plans - begin : BLOCK);
        const double *hop = durations + begin;
        for (size_t i = 0; i < n; i++) done[i] = 0.0;
        if (held) for (size_t i = 0; i < n; i++) issued[i] = 0.0;
        for (int64_t node = 1; node < w->size; node++) {
            const int64_t *wait = w->first_wait + node, *sent = w->first_sent + node;
            latest_of(latest, done, w->waits + wait[0], wait[1] - wait[0], n, width);
            if (sent[1] > sent[0]) {
                latest_of(handed, done, w->sent + sent[0], sent[1] - sent[0], n, width);
                for (size_t i = 0; i < n; i++) {
                    double there = handed[i] + hop[i];
                    latest[i] = latest[i] > there ? latest[i] : there;
                }
            }
            size_t place = (size_t)row[node] * (size_t)num_plans + (size_t)begin;
            const double *took = durations + place;
            double *end = done + (size_t)node * width;
            for (size_t i = 0; i < n; i++) end[i] = latest[i] + took[i];
            if (!held) continue;
            const double *before = issued + (size_t)w->before[node] * width;
            if (!w->before[node] && w->rank[node] >= 0) {
                const double *ahead = lead + (size_t)w->rank[node] * (size_t)num_plans + (size_t)begin;
                for (size_t i = 0; i < n; i++) begun[i] = -ahead[i];
                before = begun;
            }
            double *now = issued + (size_t)node * width;
            for (size_t i = 0; i < n; i++) {
                double until = before[i] + held[place + i], awake = latest[i] + woken[place + i];
                double free = before[i] + host[place + i];
                handed[i] = until > end[i] ? until - end[i] : 0.0; /* by now what the host makes it later */
                end[i] = end[i] > until ? end[i] : until;
                now[i] = awake > free ? awake : free;
            }
            if (w->rank[node] < 0) continue;
            double *of_rank = waited + (size_t)w->rank[node] * (size_t)num_plans + (size_t)begin;
            for (size_t i = 0; i < n; i++) of_rank[i] += handed[i];
            if (!w->in_last_round[node]) continue;
            of_rank += (size_t)w->num_ranks * (size_t)num_plans;
            for (size_t i = 0; i < n; i++) of_rank[i] += handed[i];
        }
        latest_of(latest_end + begin, done, w->ends, w->num_ends, n, width);
        double *longest = round_s + begin;
        for (int64_t k = 0; k < w->num_steady; k++) {
            const double *last = done + (size_t)w->last_steady[k] * width;
            const double *first = done + (size_t)w->round_before[k] * width;
            for (size_t i = 0; i < n; i++) {
                double took = last[i] - first[i];
                longest[i] = k && longest[i] > took ? longest[i] : took;
            }
        }
    }
}
