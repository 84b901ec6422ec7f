/* The inner loop of mofa's caching allocator, for native segments: best fit, splitting and joining of blocks.

   It answers as mofa/replay/allocator/caching.py and mofa/replay/memory/repeated.py do, which are its reference and
   stand in where it is not compiled; mofa/replay/allocator/compiled.py calls it. What is rare stays there: asking the
   device for a segment, and what to do when it is full. Sizes and addresses are in bytes. Blocks have numbers. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef SOURCE
#define SOURCE ""
#endif

enum { NONE = -1, SMALL = 1, MOST_KEPT = 1 << 20, MANY_EMPTY = 32 };

typedef struct {
    int64_t address, size;
    int32_t previous, following; /* neighbours in the segment, or NONE */
    int32_t bin, is_free;        /* the bin of its pool for its size */
} Block;

typedef struct {
    int64_t address;
    int32_t block;
} Free;

typedef struct { /* the free blocks of one size in a pool, sorted by address: free[begin] to free[begin + count - 1] */
    int64_t size;
    Free *free;
    int32_t begin, count, capacity, pool, is_listed;
} Bin;

typedef struct { /* bins sorted by size: all that hold blocks, and some empty ones */
    int64_t *sizes;
    int32_t *bins;
    int32_t count, capacity, bins_capacity, num_empty, num_free;
} Pool;

typedef struct { /* what the caller writes and reads: the size of a block that is asked for; of one that is given size
                    and address; the numbers of blocks that were let go meanwhile */
    int64_t size, address, num_freed, freed[];
} Shared;

typedef struct { /* pools by index: twice the stream, and one more where small */
    Block *blocks;
    int32_t *spare; /* numbers of blocks that neighbours took in */
    Pool *pools;
    Bin *bins;
    Shared *shared;
    int32_t *table; /* where a bin is, by a hash of its size and pool */
    int32_t num_blocks, capacity, num_spare, spare_capacity, num_pools, num_bins, bins_capacity, table_size;
} Segments;

typedef struct { /* size > 0: take so much into a slot; 0: free a slot; < 0: have room for as much, but take nothing */
    int64_t size;
    int32_t slot, bin; /* the bin for that size; first the pool, until `prepare` has been here */
} Request;

typedef struct { /* a slot's block is larger than what was asked for */
    int64_t slot, rest;
} Rest;

/* The hash of the text that this was compiled from. */
const char *source(void) { return SOURCE; }

static void *grown(void *items, int32_t *capacity, size_t size) {
    *capacity = *capacity ? 2 * *capacity : 16;
    items = realloc(items, (size_t)*capacity * size);
    if (!items) abort();
    return items;
}

Segments *segments_new(Shared *shared) {
    Segments *s = calloc(1, sizeof(Segments));
    if (!s) abort();
    s->shared = shared;
    return s;
}

void segments_delete(Segments *s) {
    for (int32_t i = 0; i < s->num_pools; i++) {
        free(s->pools[i].sizes);
        free(s->pools[i].bins);
    }
    for (int32_t i = 0; i < s->num_bins; i++) free(s->bins[i].free);
    free(s->bins);
    free(s->table);
    free(s->pools);
    free(s->spare);
    free(s->blocks);
    free(s);
}

/* Have a pool of this index and all below. */
void open_pool(Segments *s, int32_t index) {
    if (index < s->num_pools) return;
    s->pools = realloc(s->pools, (size_t)(index + 1) * sizeof(Pool));
    if (!s->pools) abort();
    memset(s->pools + s->num_pools, 0, (size_t)(index + 1 - s->num_pools) * sizeof(Pool));
    s->num_pools = index + 1;
}

/* The first of sorted sizes that is not below one. Without branches, which no processor foresees. */
static int32_t first(const int64_t *sizes, int32_t num, int64_t size) {
    const int64_t *low = sizes;
    while (num > 0) {
        int32_t half = (num + 1) / 2;
        low += low[half - 1] < size ? half : 0;
        num -= half;
    }
    return (int32_t)(low - sizes);
}

static int32_t *slot_of(const Segments *s, int32_t pool, int64_t size) {
    uint64_t hash = ((uint64_t)size * 2 + (uint64_t)pool) * 0x9E3779B97F4A7C15u >> 32;
    int32_t *slot = s->table + (hash & (uint64_t)(s->table_size - 1));
    while (*slot != NONE && (s->bins[*slot].size != size || s->bins[*slot].pool != pool))
        slot = slot + 1 == s->table + s->table_size ? s->table : slot + 1;
    return slot;
}

static int32_t new_bin(Segments *s, int32_t pool, int64_t size) {
    if (s->num_bins == s->bins_capacity) s->bins = grown(s->bins, &s->bins_capacity, sizeof(Bin));
    s->bins[s->num_bins++] = (Bin){.size = size, .pool = pool};
    if (2 * s->num_bins > s->table_size) {
        s->table = grown(s->table, &s->table_size, sizeof(int32_t));
        for (int32_t i = 0; i < s->table_size; i++) s->table[i] = NONE;
        for (int32_t i = 0; i < s->num_bins; i++) *slot_of(s, s->bins[i].pool, s->bins[i].size) = i;
    } else *slot_of(s, pool, size) = s->num_bins - 1;
    return s->num_bins - 1;
}

/* The bin of a pool for a size; made where there is none. */
static int32_t bin_of(Segments *s, int32_t pool, int64_t size) {
    int32_t bin = s->table_size ? *slot_of(s, pool, size) : NONE;
    return bin == NONE ? new_bin(s, pool, size) : bin;
}

/* Leave the bins out of a pool's list that hold nothing. */
static void leave_out_empty(Segments *s, Pool *pool) {
    int32_t kept = 0;
    for (int32_t i = 0; i < pool->count; i++) {
        Bin *bin = s->bins + pool->bins[i];
        if (!bin->count) {
            bin->is_listed = 0;
            continue;
        }
        pool->sizes[kept] = pool->sizes[i];
        pool->bins[kept++] = pool->bins[i];
    }
    pool->count = kept;
    pool->num_empty = 0;
}

static void list(Segments *s, int32_t number) {
    Bin *bin = s->bins + number;
    Pool *pool = s->pools + bin->pool;
    if (pool->num_empty > MANY_EMPTY && 2 * pool->num_empty > pool->count) leave_out_empty(s, pool);
    if (pool->count == pool->capacity) {
        pool->sizes = grown(pool->sizes, &pool->capacity, sizeof(int64_t));
        pool->bins = grown(pool->bins, &pool->bins_capacity, sizeof(int32_t));
    }
    int32_t at = first(pool->sizes, pool->count, bin->size);
    memmove(pool->sizes + at + 1, pool->sizes + at, (size_t)(pool->count - at) * sizeof(int64_t));
    memmove(pool->bins + at + 1, pool->bins + at, (size_t)(pool->count - at) * sizeof(int32_t));
    pool->sizes[at] = bin->size;
    pool->bins[at] = number;
    pool->count++;
    pool->num_empty++;
    bin->is_listed = 1;
}

/* The place in a bin of the first block that is not below an address. */
static int32_t place(const Bin *bin, int64_t address) {
    const Free *low = bin->free + bin->begin;
    for (int32_t num = bin->count; num > 0;) {
        int32_t half = (num + 1) / 2;
        low += low[half - 1].address < address ? half : 0;
        num -= half;
    }
    return (int32_t)(low - bin->free);
}

/* A block that is free now goes into its bin. */
static void put(Segments *s, int32_t number) {
    const Block *b = s->blocks + number;
    Bin *bin = s->bins + b->bin;
    Pool *pool = s->pools + bin->pool;
    if (!bin->is_listed) list(s, b->bin);
    if (!bin->count) {
        bin->begin = 0;
        pool->num_empty--;
    }
    int32_t end = bin->begin + bin->count, at;
    if (bin->begin && b->address < bin->free[bin->begin].address) at = --bin->begin;
    else {
        if (end == bin->capacity && bin->begin > bin->count) { /* of which most is what was in front */
            memmove(bin->free, bin->free + bin->begin, (size_t)bin->count * sizeof(Free));
            bin->begin = 0;
            end = bin->count;
        } else if (end == bin->capacity) bin->free = grown(bin->free, &bin->capacity, sizeof(Free));
        at = !bin->count || bin->free[end - 1].address < b->address ? end : place(bin, b->address);
        memmove(bin->free + at + 1, bin->free + at, (size_t)(end - at) * sizeof(Free));
    }
    bin->free[at] = (Free){b->address, number};
    bin->count++;
    pool->num_free++;
}

/* Take a block out of its bin, from a place in it. */
static void remove_at(Segments *s, Bin *bin, int32_t at) {
    Pool *pool = s->pools + bin->pool;
    bin->count--;
    if (at == bin->begin) bin->begin++;
    else memmove(bin->free + at, bin->free + at + 1, (size_t)(bin->begin + bin->count - at) * sizeof(Free));
    pool->num_empty += !bin->count;
    pool->num_free--;
}

static void remove_free(Segments *s, const Block *b) {
    Bin *bin = s->bins + b->bin;
    remove_at(s, bin, place(bin, b->address));
}

static void drop(Segments *s, int32_t number) {
    if (s->num_spare == s->spare_capacity) s->spare = grown(s->spare, &s->spare_capacity, sizeof(int32_t));
    s->spare[s->num_spare++] = number;
}

/* A block that is neither free nor anyone's neighbour, of a bin's size. */
static int32_t new_in_bin(Segments *s, int32_t bin, int64_t address) {
    int32_t number;
    if (s->num_spare) number = s->spare[--s->num_spare];
    else {
        if (s->num_blocks == s->capacity) s->blocks = grown(s->blocks, &s->capacity, sizeof(Block));
        number = s->num_blocks++;
    }
    s->blocks[number] = (Block){address, s->bins[bin].size, NONE, NONE, bin, 0};
    return number;
}

/* A new segment: a block by itself. */
int32_t new_block(Segments *s, int32_t pool, int64_t address, int64_t size) {
    return new_in_bin(s, bin_of(s, pool, size), address);
}

/* The bin of the smallest free blocks that are at least as large as those of an exact one; NONE where none are. */
static int32_t best_bin(const Segments *s, int32_t exact) {
    const Bin *bin = s->bins + exact;
    if (bin->count) return exact;
    const Pool *pool = s->pools + bin->pool;
    for (int32_t at = first(pool->sizes, pool->count, bin->size); at < pool->count; at++)
        if (s->bins[pool->bins[at]].count) return pool->bins[at];
    return NONE;
}

/* Take the smallest free block that fits, the lowest of these, out of its bin; NONE where there is none. */
static int32_t best_fit(Segments *s, int32_t exact) {
    int32_t number = best_bin(s, exact);
    if (number == NONE) return NONE;
    Bin *bin = s->bins + number;
    int32_t block = bin->free[bin->begin].block;
    remove_at(s, bin, bin->begin);
    return block;
}

/* Allocate from the low end of a block that is in no bin; what is left is free where it is large enough. */
static int32_t cut(Segments *s, int32_t number, int32_t exact) {
    int32_t index = s->bins[exact].pool;
    int64_t size = s->bins[exact].size, rest = s->blocks[number].size - size;
    s->blocks[number].is_free = 0;
    if (rest <= (index & SMALL ? 0 : MOST_KEPT)) return number;
    int32_t taken = new_in_bin(s, exact, s->blocks[number].address);
    Block *left = s->blocks + number, *b = s->blocks + taken;
    b->previous = left->previous;
    b->following = number;
    if (b->previous != NONE) s->blocks[b->previous].following = taken;
    left->previous = taken;
    left->address += size;
    left->size = rest;
    left->bin = bin_of(s, index, rest);
    left->is_free = 1;
    put(s, number);
    return taken;
}

/* Make a block free; its free neighbours and it become one. */
static void join(Segments *s, int32_t number) {
    Block *all = s->blocks, *b = all + number;
    int32_t after = b->following, before = b->previous, index = s->bins[b->bin].pool;
    int64_t size = b->size;
    if (after != NONE && all[after].is_free) {
        remove_free(s, all + after);
        b->size += all[after].size;
        b->following = all[after].following;
        if (b->following != NONE) all[b->following].previous = number;
        drop(s, after);
    }
    if (before != NONE && all[before].is_free) {
        remove_free(s, all + before);
        size = all[before].size;
        all[before].size += b->size;
        all[before].following = b->following;
        if (b->following != NONE) all[b->following].previous = before;
        drop(s, number);
        number = before;
    }
    if (all[number].size != size) all[number].bin = bin_of(s, index, all[number].size);
    all[number].is_free = 1;
    put(s, number);
}

/* A block's pool, and into what is shared its size and address. */
int32_t look(Segments *s, int32_t number) {
    s->shared->size = s->blocks[number].size;
    s->shared->address = s->blocks[number].address;
    return s->bins[s->blocks[number].bin].pool;
}

/* Make the blocks free that were let go, in their order. */
void settle(Segments *s) {
    for (int64_t i = 0; i < s->shared->num_freed; i++) join(s, (int32_t)s->shared->freed[i]);
    s->shared->num_freed = 0;
}

/* Allocate what is asked for, from a new segment where one is given: the block's number; NONE where nothing fits. */
int32_t take(Segments *s, int32_t pool, int32_t given) {
    Shared *shared = s->shared;
    settle(s);
    int32_t exact = bin_of(s, pool, shared->size);
    int32_t number = given == NONE ? best_fit(s, exact) : given;
    if (number == NONE) return NONE;
    number = cut(s, number, exact);
    look(s, number);
    return number;
}

/* Put the bins into requests that will be made again and again, in place of their pools. */
void prepare(Segments *s, Request *requests, int32_t num) {
    for (int32_t i = 0; i < num; i++)
        if (requests[i].size) requests[i].bin = bin_of(s, requests[i].bin, llabs(requests[i].size));
}

/* Answer requests from the one at `next` on, the first from a block in no bin where one is given; slots are numbers of
   blocks. Returns the request for which memory must be asked of the device, or `num` at the end. Adds rests. */
int32_t answer(Segments *s, const Request *requests, int32_t num, int32_t next, int32_t given, int32_t *slots,
               Rest *rests, int32_t *num_rests) {
    settle(s);
    for (; next < num; next++) {
        Request r = requests[next];
        if (r.size == 0) join(s, slots[r.slot]);
        else if (r.size < 0) {
            if (given != NONE) join(s, given);
            else if (best_bin(s, r.bin) == NONE) return next;
            given = NONE;
        } else {
            int32_t number = given == NONE ? best_fit(s, r.bin) : given;
            if (number == NONE) return next;
            given = NONE;
            number = slots[r.slot] = cut(s, number, r.bin);
            int64_t rest = s->blocks[number].size - r.size;
            if (rest) rests[(*num_rests)++] = (Rest){r.slot, rest};
        }
    }
    return num;
}

/* Give a pool's segments that are one free block back to the device; their number, and their bytes. */
int32_t give_back(Segments *s, int32_t index, int64_t *bytes) {
    settle(s);
    Pool *pool = s->pools + index;
    int32_t gone = 0;
    *bytes = 0;
    for (int32_t i = 0; i < pool->count; i++) {
        Bin *bin = s->bins + pool->bins[i];
        for (int32_t at = bin->begin + bin->count - 1; at >= bin->begin; at--) {
            int32_t number = bin->free[at].block;
            const Block *b = s->blocks + number;
            if (b->previous != NONE || b->following != NONE) continue;
            gone++;
            *bytes += b->size;
            remove_at(s, bin, at);
            drop(s, number);
        }
    }
    return gone;
}

int32_t num_free(Segments *s, int32_t pool) {
    settle(s);
    return s->pools[pool].num_free;
}

/* The sizes and addresses of a pool's free blocks, in their order; nothing has been let go since they were counted. */
void free_blocks(const Segments *s, int32_t pool, int64_t *sizes_and_addresses) {
    for (int32_t i = 0; i < s->pools[pool].count; i++) {
        const Bin *bin = s->bins + s->pools[pool].bins[i];
        for (int32_t at = bin->begin; at < bin->begin + bin->count; at++) {
            *sizes_and_addresses++ = bin->size;
            *sizes_and_addresses++ = bin->free[at].address;
        }
    }
}

/* The addresses of the blocks in some slots. */
void places(const Segments *s, const int32_t *slots, const int32_t *some, int32_t num, int64_t *addresses) {
    for (int32_t i = 0; i < num; i++) {
        int32_t number = slots[some[i]];
        addresses[i] = number == NONE ? 0 : s->blocks[number].address;
    }
}
