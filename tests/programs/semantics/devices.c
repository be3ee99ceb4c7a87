// Memory that the kernel writes: reads past the page cache, registered buffers, plain system calls.
#include "common.h"

#include <linux/io_uring.h>
#include <sys/uio.h>

enum { FILE_PAGES = 256 };

static int pattern_file(int flags) {
    char name[] = "direct-XXXXXX";
    int file = mkstemp(name);
    CHECK(file >= 0, "mkstemp");
    static char page[PAGE];
    for (size_t i = 0; i < FILE_PAGES; i++) {
        fill_page(page, 600 + i % 8);
        CHECK(write(file, page, PAGE) == (ssize_t)PAGE, "write");
    }
    fsync(file);
    close(file);
    file = open(name, O_RDONLY | flags);
    int error = errno;
    unlink(name);
    if (file < 0 && error == EINVAL) SKIP("no O_DIRECT on this file system");
    CHECK(file >= 0, "open");
    return file;
}

static int direct_file;
static struct region direct_region;

static void *direct_reader(void *argument) {
    size_t mine = (size_t)argument;
    uint64_t seed = 900 + mine;
    size_t own = direct_region.pages / 4;
    size_t *shown = malloc(own * sizeof *shown);
    for (size_t i = 0; i < own; i++) shown[i] = number_of(&direct_region, mine * own + i);
    for (int round = 0; round < 250; round++) {
        size_t pages = 1 + draw(&seed) % 16, to = draw(&seed) % (own - 16), from = draw(&seed) % (FILE_PAGES - 16);
        char *at = direct_region.at + (mine * own + to) * PAGE;
        ssize_t got = pread(direct_file, at, pages * PAGE, from * PAGE);
        CHECK(got == (ssize_t)(pages * PAGE), "pread gave %zd", got);
        for (size_t i = 0; i < pages; i++) {
            shown[to + i] = 600 + (from + i) % 8;
            CHECK(page_is(at + i * PAGE, shown[to + i]), "bytes that a device wrote are lost at page %zu", to + i);
        }
        if (round % 16 == 0)
            for (size_t i = 0; i < own; i++)
                CHECK(page_is(direct_region.at + (mine * own + i) * PAGE, shown[i]), "page %zu is wrong", i);
        nap(draw(&seed) % 30);
    }
    return NULL;
}

static void direct(void) {
    direct_file = pattern_file(O_DIRECT);
    direct_region = fill(2048, 8, 600);
    mark_mergeable(&direct_region);
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) pthread_create(&threads[i], NULL, direct_reader, (void *)i);
    wait_merged(&direct_region, 400);
    for (size_t i = 0; i < 4; i++) pthread_join(threads[i], NULL);
}

struct ring {
    int fd;
    char *submit, *complete;
    struct io_uring_sqe *entries;
    struct io_uring_params params;
};

static void ring_submit(struct ring *ring, int file, char *to, size_t len, size_t from, int buffer) {
    unsigned *tail = (unsigned *)(ring->submit + ring->params.sq_off.tail);
    unsigned mask = *(unsigned *)(ring->submit + ring->params.sq_off.ring_mask);
    unsigned *array = (unsigned *)(ring->submit + ring->params.sq_off.array);
    unsigned at = *tail & mask;
    struct io_uring_sqe *entry = &ring->entries[at];
    memset(entry, 0, sizeof *entry);
    entry->opcode = IORING_OP_READ_FIXED;
    entry->fd = file;
    entry->addr = (unsigned long)to;
    entry->len = len;
    entry->off = from;
    entry->buf_index = buffer;
    array[at] = at;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    CHECK(syscall(SYS_io_uring_enter, ring->fd, 1, 0, 0, NULL, 0) == 1, "io_uring_enter");
}

static long ring_result(struct ring *ring) {
    CHECK(syscall(SYS_io_uring_enter, ring->fd, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 0, "io_uring_enter");
    unsigned *head = (unsigned *)(ring->complete + ring->params.cq_off.head);
    unsigned cq_mask = *(unsigned *)(ring->complete + ring->params.cq_off.ring_mask);
    struct io_uring_cqe *results = (struct io_uring_cqe *)(ring->complete + ring->params.cq_off.cqes);
    long result = results[*head & cq_mask].res;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return result;
}

static long ring_read(struct ring *ring, int file, char *to, size_t len, size_t from, int buffer) {
    ring_submit(ring, file, to, len, from, buffer);
    return ring_result(ring);
}

static struct ring open_ring(void) {
    struct ring ring = {0};
    ring.fd = syscall(SYS_io_uring_setup, 8, &ring.params);
    if (ring.fd < 0) SKIP("no io_uring here");
    size_t sq = ring.params.sq_off.array + ring.params.sq_entries * 4;
    size_t cq = ring.params.cq_off.cqes + ring.params.cq_entries * sizeof(struct io_uring_cqe);
    ring.submit = mmap(NULL, sq, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQ_RING);
    ring.complete = mmap(NULL, cq, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_CQ_RING);
    ring.entries = mmap(NULL, ring.params.sq_entries * sizeof *ring.entries, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQES);
    CHECK(ring.submit != MAP_FAILED && ring.complete != MAP_FAILED && (void *)ring.entries != MAP_FAILED, "ring");
    return ring;
}

static void register_buffer(const struct ring *ring, struct iovec *buffer) {
    long done = syscall(SYS_io_uring_register, ring->fd, IORING_REGISTER_BUFFERS, buffer, 1);
    if (done != 0 && errno == ENOMEM) SKIP("io_uring buffers are limited here");
    CHECK(done == 0, "register buffers");
}

// A read into a registered buffer is pending while the agent ends: the program sees its bytes.
static void uring_leaving(void) {
    int pipe_ends[2];
    CHECK(pipe(pipe_ends) == 0, "pipe");
    for (int locks = 1; locks >= 0; locks--) {
        struct region r = merged(1024);
        struct ring ring = open_ring();
        struct iovec buffer = {r.at, 256 * PAGE};
        register_buffer(&ring, &buffer);
        ring_submit(&ring, pipe_ends[0], r.at + 100 * PAGE, PAGE, 0, 0);
        if (locks) CHECK(mlock(r.at, r.pages * PAGE) == 0, "mlock");
        else CHECK(geteuid() != 0 || one_of_many_calls(1) == 0, "capset");
        char page[PAGE];
        fill_page(page, 4711);
        CHECK(write(pipe_ends[1], page, PAGE) == (long)PAGE, "write");
        CHECK(ring_result(&ring) == (long)PAGE, "read fixed");
        CHECK(page_is(r.at + 100 * PAGE, 4711), "what was read does not show, locks: %d", locks);
        fill_page(r.at + 100 * PAGE, number_of(&r, 100));
        check(&r, "after reading");
        close(ring.fd);
    }
}

// If merged memory with a registered buffer moves or grows, the program sees the bytes of later reads.
static void uring_remap(void) {
    struct region r = merged(1024);
    struct ring ring = open_ring();
    struct iovec buffer = {r.at, 16 * PAGE};
    int pipe_ends[2];
    CHECK(pipe(pipe_ends) == 0, "pipe");
    register_buffer(&ring, &buffer);
    for (int round = 0; round < 2; round++) {
        // The ring knows the buffer by its first address.
        ring_submit(&ring, pipe_ends[0], (char *)buffer.iov_base + 10 * PAGE, PAGE, 0, 0);
        char *grown = mremap(r.at, r.pages * PAGE, (r.pages + 64) * PAGE, round ? MREMAP_MAYMOVE : 0);
        CHECK(grown != MAP_FAILED || errno == ENOMEM, "mremap");
        if (grown != MAP_FAILED) r.at = grown;
        char page[PAGE];
        fill_page(page, 4711 + round);
        CHECK(write(pipe_ends[1], page, PAGE) == (long)PAGE, "write");
        CHECK(ring_result(&ring) == (long)PAGE, "read fixed");
        CHECK(page_is(r.at + 10 * PAGE, 4711 + round), "what was read does not show after mremap, round %d", round);
        fill_page(r.at + 10 * PAGE, number_of(&r, 10));
        check(&r, "after reading");
        if (grown != MAP_FAILED) break;
    }
    close(ring.fd);
}

// realloc(3) of a block with a registered buffer returns another block, or one that shows the bytes of later reads.
static void uring_realloc(void) {
    struct region r = {malloc(1024 * PAGE), 1024, 256, 1000};
    CHECK(r.at, "malloc");
    r.at += PAGE - (size_t)r.at % PAGE;
    r.pages--;
    for (size_t i = 0; i < r.pages; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    wait_merged(&r, r.pages / 2);
    struct ring ring = open_ring();
    struct iovec buffer = {r.at, 16 * PAGE};
    register_buffer(&ring, &buffer);
    char *block = realloc(r.at - (PAGE - 16), 4096 * PAGE), *at = block + PAGE - 16;
    CHECK(block, "realloc");
    int moved = at != r.at, file = pattern_file(0);
    r.at = at;
    check(&r, "after realloc");
    CHECK(moved || (ring_read(&ring, file, r.at, PAGE, 0, 0) == (long)PAGE && page_is(r.at, 600)), "what was read does not show");
    close(ring.fd);
}

// Buffers are registered before their memory is merged, and after: the program sees the bytes of all reads.
static void uring(void) {
    struct ring ring = open_ring();
    int file = pattern_file(0);
    for (int before = 0; before < 2; before++) {
        struct region r = before ? fill(1024, 16, 2000) : merged(1024);
        struct iovec buffer = {r.at, 256 * PAGE};
        if (before) {
            madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
            // The pages are pinned before any is merged.
        }
        register_buffer(&ring, &buffer);
        if (before) {
            CHECK(madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
            wait_merged(&r, 500);
        }
        check(&r, "with registered buffers");
        uint64_t seed = 8;
        for (int round = 0; round < 60; round++) {
            size_t page = draw(&seed) % 256, from = draw(&seed) % FILE_PAGES;
            CHECK(ring_read(&ring, file, r.at + page * PAGE, PAGE, from * PAGE, 0) == (long)PAGE, "read fixed");
            CHECK(page_is(r.at + page * PAGE, 600 + from % 8), "what the device read does not show at page %zu", page);
            fill_page(r.at + page * PAGE, number_of(&r, page));
            nap(30);
        }
        nap(500);
        for (size_t page = 0; page < 256; page++) {
            CHECK(ring_read(&ring, file, r.at + page * PAGE, PAGE, page * PAGE, 0) == (long)PAGE, "read fixed");
            CHECK(page_is(r.at + page * PAGE, 600 + page % 8), "later: what the device read does not show at page %zu", page);
        }
        CHECK(syscall(SYS_io_uring_register, ring.fd, IORING_UNREGISTER_BUFFERS, NULL, 0) == 0, "unregister");
    }
}

// System calls that read and write managed memory while it is frozen and merged.
static void system_calls(void) {
    struct region r = fill(1024, 16, 1000);
    int ends[2], file = pattern_file(0);
    CHECK(pipe(ends) == 0, "pipe");
    mark_mergeable(&r);
    uint64_t seed = 44;
    double began = now();
    while (now() - began < 4) {
        size_t page = draw(&seed) % (r.pages - 16);
        CHECK(write(ends[1], r.at + page * PAGE, PAGE) == (ssize_t)PAGE, "write from merged memory");
        size_t other = page + r.base % 16;
        other = page + 16 < r.pages ? page + 16 : page;  // the twin
        CHECK(read(ends[0], r.at + other * PAGE, PAGE) == (ssize_t)PAGE, "read into merged memory");
        size_t from = draw(&seed) % FILE_PAGES;
        CHECK(pread(file, r.at + page * PAGE, PAGE, from * PAGE) == (ssize_t)PAGE, "pread into merged memory");
        CHECK(page_is(r.at + page * PAGE, 600 + from % 8), "a read is lost");
        fill_page(r.at + page * PAGE, number_of(&r, page));
        if (draw(&seed) % 128 == 0) nap(300);
    }
    check(&r, "after system calls");
}

const struct scenario devices_scenarios[] = {
    {"direct", direct},
    {"uring", uring},
    {"uring-leaving", uring_leaving},
    {"uring-remap", uring_remap},
    {"uring-realloc", uring_realloc},
    {"system-calls", system_calls},
    {0},
};
