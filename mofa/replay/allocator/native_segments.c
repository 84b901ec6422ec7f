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

enum { NONE = -1, SMALL = 1, MOST_KEPT = 1 << 20 };

typedef struct {
    int64_t address, size;
    int32_t previous, following; /* neighbours in the segment, or NONE */
    int32_t pool, is_free;
} Block;

typedef struct { /* a free block in its pool, sorted by size, then by address */
    int64_t size, address;
    int32_t block;
} Free;

typedef struct {
    Free *free;
    int32_t count, capacity;
} Pool;

typedef struct { /* pools by index: twice the stream, and one more where small */
    Block *blocks;
    int32_t *spare; /* numbers of blocks that neighbours took in */
    Pool *pools;
    int32_t num_blocks, capacity, num_spare, spare_capacity, num_pools;
} Segments;

typedef struct { /* size > 0: take so much into a slot; 0: free a slot; < 0: have room for as much, but take nothing */
    int64_t size;
    int32_t slot, pool;
} Request;

typedef struct { /* a slot's block is larger than what was asked for */
    int64_t slot, rest;
} Rest;

/* The hash of the text that this was compiled from. */
const char *source(void) { return SOURCE; }

static void *grown(void *items, int32_t *capacity, size_t size) {
    *capacity = *capacity ? 2 * *capacity : 256;
    items = realloc(items, (size_t)*capacity * size);
    if (!items) abort();
    return items;
}

Segments *segments_new(void) {
    Segments *s = calloc(1, sizeof(Segments));
    if (!s) abort();
    return s;
}

void segments_delete(Segments *s) {
    for (int32_t i = 0; i < s->num_pools; i++) free(s->pools[i].free);
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

/* The first free block of a pool that is not below (size, address). Without branches, which no processor foresees. */
static int32_t first(const Pool *pool, int64_t size, int64_t address) {
    const Free *low = pool->free;
    for (int32_t num = pool->count; num > 0;) {
        int32_t half = (num + 1) / 2;
        const Free *f = low + half - 1;
        int32_t below = (f->size < size) | ((f->size == size) & (f->address < address));
        low += below ? half : 0;
        num -= half;
    }
    return (int32_t)(low - pool->free);
}

static void put(Segments *s, int32_t number) {
    Block *b = s->blocks + number;
    Pool *pool = s->pools + b->pool;
    int32_t at = first(pool, b->size, b->address);
    if (pool->count == pool->capacity) pool->free = grown(pool->free, &pool->capacity, sizeof(Free));
    memmove(pool->free + at + 1, pool->free + at, (size_t)(pool->count - at) * sizeof(Free));
    pool->free[at] = (Free){b->size, b->address, number};
    pool->count++;
}

static void remove_at(Pool *pool, int32_t at) {
    pool->count--;
    memmove(pool->free + at, pool->free + at + 1, (size_t)(pool->count - at) * sizeof(Free));
}

static void drop(Segments *s, int32_t number) {
    if (s->num_spare == s->spare_capacity) s->spare = grown(s->spare, &s->spare_capacity, sizeof(int32_t));
    s->spare[s->num_spare++] = number;
}

/* A block that is neither free nor anyone's neighbour: a new segment. */
int32_t new_block(Segments *s, int32_t pool, int64_t address, int64_t size) {
    int32_t number;
    if (s->num_spare) number = s->spare[--s->num_spare];
    else {
        if (s->num_blocks == s->capacity) s->blocks = grown(s->blocks, &s->capacity, sizeof(Block));
        number = s->num_blocks++;
    }
    s->blocks[number] = (Block){address, size, NONE, NONE, pool, 0};
    return number;
}

/* Take the smallest free block that fits, the lowest of these, out of its pool; NONE where there is none. */
static int32_t best_fit(Segments *s, int32_t index, int64_t size) {
    Pool *pool = s->pools + index;
    int32_t at = first(pool, size, INT64_MIN);
    if (at == pool->count) return NONE;
    int32_t number = pool->free[at].block;
    remove_at(pool, at);
    return number;
}

/* Allocate from the low end of a block that is in no pool; what is left is free where it is large enough. */
static int32_t cut(Segments *s, int32_t number, int64_t size) {
    int64_t rest = s->blocks[number].size - size;
    int32_t index = s->blocks[number].pool;
    s->blocks[number].is_free = 0;
    if (rest <= (index & SMALL ? 0 : MOST_KEPT)) return number;
    int32_t taken = new_block(s, index, s->blocks[number].address, size);
    Block *left = s->blocks + number, *b = s->blocks + taken;
    b->previous = left->previous;
    b->following = number;
    if (b->previous != NONE) s->blocks[b->previous].following = taken;
    left->previous = taken;
    left->address += size;
    left->size = rest;
    left->is_free = 1;
    put(s, number);
    return taken;
}

/* Make a block free; its free neighbours and it become one. */
void join(Segments *s, int32_t number) {
    Block *all = s->blocks, *b = all + number;
    Pool *pool = s->pools + b->pool;
    int32_t after = b->following, before = b->previous;
    if (after != NONE && all[after].is_free) {
        remove_at(pool, first(pool, all[after].size, all[after].address));
        b->size += all[after].size;
        b->following = all[after].following;
        if (b->following != NONE) all[b->following].previous = number;
        drop(s, after);
    }
    if (before != NONE && all[before].is_free) {
        remove_at(pool, first(pool, all[before].size, all[before].address));
        all[before].size += b->size;
        all[before].following = b->following;
        if (b->following != NONE) all[b->following].previous = before;
        drop(s, number);
        number = before;
    }
    all[number].is_free = 1;
    put(s, number);
}

/* A block's address and size, and its pool. */
int32_t look(const Segments *s, int32_t number, int64_t address_and_size[2]) {
    address_and_size[0] = s->blocks[number].address;
    address_and_size[1] = s->blocks[number].size;
    return s->blocks[number].pool;
}

/* Allocate, from a new segment where one is given: the block's number, its address and size; NONE where nothing fits. */
int32_t take(Segments *s, int32_t pool, int64_t size, int32_t given, int64_t address_and_size[2]) {
    int32_t number = given == NONE ? best_fit(s, pool, size) : given;
    if (number == NONE) return NONE;
    number = cut(s, number, size);
    look(s, number, address_and_size);
    return number;
}

/* Answer requests from the one at `next` on, the first from a block in no pool where one is given; slots are numbers of
   blocks. Returns the request for which memory must be asked of the device, or `num` at the end. Adds rests. */
int32_t answer(Segments *s, const Request *requests, int32_t num, int32_t next, int32_t given, int32_t *slots,
               Rest *rests, int32_t *num_rests) {
    for (; next < num; next++) {
        Request r = requests[next];
        if (r.size == 0) join(s, slots[r.slot]);
        else if (r.size < 0) {
            if (given != NONE) join(s, given);
            else if (first(s->pools + r.pool, -r.size, INT64_MIN) == s->pools[r.pool].count) return next;
            given = NONE;
        } else {
            int32_t number = given == NONE ? best_fit(s, r.pool, r.size) : given;
            if (number == NONE) return next;
            given = NONE;
            number = slots[r.slot] = cut(s, number, r.size);
            int64_t rest = s->blocks[number].size - r.size;
            if (rest) rests[(*num_rests)++] = (Rest){r.slot, rest};
        }
    }
    return num;
}

/* Give a pool's segments that are one free block back to the device; their number, and their bytes. */
int32_t give_back(Segments *s, int32_t index, int64_t *bytes) {
    Pool *pool = s->pools + index;
    int32_t kept = 0, gone = 0;
    *bytes = 0;
    for (int32_t i = 0; i < pool->count; i++) {
        const Block *b = s->blocks + pool->free[i].block;
        if (b->previous != NONE || b->following != NONE) {
            pool->free[kept++] = pool->free[i];
            continue;
        }
        gone++;
        *bytes += b->size;
        drop(s, pool->free[i].block);
    }
    pool->count = kept;
    return gone;
}

int32_t num_free(const Segments *s, int32_t pool) { return s->pools[pool].count; }

/* The sizes and addresses of a pool's free blocks, in their order. */
void free_blocks(const Segments *s, int32_t pool, int64_t *sizes_and_addresses) {
    for (int32_t i = 0; i < s->pools[pool].count; i++) {
        sizes_and_addresses[2 * i] = s->pools[pool].free[i].size;
        sizes_and_addresses[2 * i + 1] = s->pools[pool].free[i].address;
    }
}

/* The addresses of the blocks in some slots. */
void places(const Segments *s, const int32_t *slots, const int32_t *some, int32_t num, int64_t *addresses) {
    for (int32_t i = 0; i < num; i++) {
        int32_t number = slots[some[i]];
        addresses[i] = number == NONE ? 0 : s->blocks[number].address;
    }
}
