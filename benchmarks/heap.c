/* Counts the heap of the process exactly: bytes in use now, and the most there were. Preloaded by train.py for runs that
 * measure memory. torch's profiler misses what other threads free, so that it counts too much for peers that use gloo's. */
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long in_use, most;

static void *count(void *block) {
    long now = atomic_fetch_add(&in_use, malloc_usable_size(block)) + malloc_usable_size(block);
    long before = atomic_load(&most);
    while (now > before && !atomic_compare_exchange_weak(&most, &before, now)) {
    }
    return block;
}

static void uncount(void *block) { atomic_fetch_sub(&in_use, malloc_usable_size(block)); }

long heap_in_use(void) { return atomic_load(&in_use); }

/* The most since the last call. */
long heap_peak(void) { return atomic_exchange(&most, atomic_load(&in_use)); }

void *malloc(size_t size) { return count(__libc_malloc(size)); }
void *calloc(size_t n, size_t size) { return count(__libc_calloc(n, size)); }
void *memalign(size_t alignment, size_t size) { return count(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return count(__libc_memalign(alignment, size)); }
int posix_memalign(void **block, size_t alignment, size_t size) {
    *block = count(__libc_memalign(alignment, size));
    return *block ? 0 : 12;
}
void free(void *block) {
    uncount(block);
    __libc_free(block);
}
void *realloc(void *block, size_t size) {
    uncount(block);
    return count(__libc_realloc(block, size));
}
