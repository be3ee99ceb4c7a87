// A userfaultfd of the program takes precedence over ours.
#include "common.h"

#include <linux/userfaultfd.h>
#include <sys/ioctl.h>

// A userfaultfd that reports writes and missing pages.
static int userfaultfd(void) {
    int fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) SKIP("userfaultfd(2) is not for this user");
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_PAGEFAULT_FLAG_WP};
    CHECK(ioctl(fd, UFFDIO_API, &api) == 0, "UFFDIO_API");
    return fd;
}

// The program's own userfaultfd: VM monitors use one for snapshots (writes) and postcopy migration (missing pages).
static struct tracker {
    int fd;
    struct region region;
    atomic_int writes, missing, end;
} tracker;

static void *track(void *unused) {
    (void)unused;
    uint64_t bytes[512];
    while (!tracker.end) {
        struct uffd_msg event;
        if (read(tracker.fd, &event, sizeof event) != sizeof event) {
            nap(1);
            continue;
        }
        char *page = (char *)(event.arg.pagefault.address & ~(PAGE - 1));
        if (event.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP) {
            tracker.writes++;
            struct uffdio_writeprotect wp = {.range = {(unsigned long)page, PAGE}, .mode = 0};
            CHECK(ioctl(tracker.fd, UFFDIO_WRITEPROTECT, &wp) == 0, "UFFDIO_WRITEPROTECT");
        } else {
            tracker.missing++;
            fill_page(bytes, number_of(&tracker.region, (page - tracker.region.at) / PAGE));
            struct uffdio_copy copy = {.dst = (unsigned long)page, .src = (unsigned long)bytes, .len = PAGE};
            CHECK(ioctl(tracker.fd, UFFDIO_COPY, &copy) == 0, "UFFDIO_COPY");
        }
    }
    return NULL;
}

static void own_userfaultfd(void) {
    struct region r = tracker.region = merged(1024);
    const size_t half = 512;
    struct uffdio_range range = {(unsigned long)r.at, half * PAGE};
    for (int missing = 0; missing < 2; missing++) {
        tracker.fd = userfaultfd();
        struct uffdio_register reg = {range, missing ? UFFDIO_REGISTER_MODE_MISSING : UFFDIO_REGISTER_MODE_WP, 0};
        CHECK(ioctl(tracker.fd, UFFDIO_REGISTER, &reg) == 0, "UFFDIO_REGISTER");
        CHECK(pool_pages(r.at, half * PAGE) == 0, "tracked pages are shown from the pool");
        check(&r, "tracked");
        tracker.writes = tracker.missing = tracker.end = 0;
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, track, NULL) == 0, "pthread_create");
        for (int round = 1; round <= 3; round++) {
            // Every page is reported exactly once.
            if (missing) {
                CHECK(madvise(r.at, half * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
                nap(700);
                check(&r, "after it came back");
                CHECK(tracker.missing == round * (int)half, "%d pages were missing", tracker.missing);
            } else {
                struct uffdio_writeprotect wp = {range, UFFDIO_WRITEPROTECT_MODE_WP};
                CHECK(ioctl(tracker.fd, UFFDIO_WRITEPROTECT, &wp) == 0, "UFFDIO_WRITEPROTECT");
                nap(700);
                for (size_t i = 0; i < half; i++) *(volatile char *)(r.at + i * PAGE) = *(volatile char *)(r.at + i * PAGE);
                CHECK(tracker.writes == round * (int)half, "%d writes were reported", tracker.writes);
            }
        }
        // Closing the descriptor unregisters too.
        if (!missing) CHECK(ioctl(tracker.fd, UFFDIO_UNREGISTER, &range) == 0, "UFFDIO_UNREGISTER");
        tracker.end = 1;
        pthread_join(thread, NULL);
        close(tracker.fd);
        check(&r, "no longer tracked");
        wait_merged(&r, half + half / 2 + 1);
        CHECK(pool_pages(r.at, half * PAGE) > half / 2, "formerly tracked pages are not merged again");
    }
}

// Several blocks are registered one after another, and unregistered by closing the descriptor.
static void tracked_blocks(void) {
    struct region blocks[] = {merged(12288), merged(64), merged(512)};
    for (int round = 0; round < 6; round++) {
        for (int i = 0; i < 3; i++) wait_merged(&blocks[i], blocks[i].pages / 4 * 3);
        int fd = userfaultfd();
        for (int i = 0; i < 3; i++) {
            struct uffdio_range range = {(unsigned long)blocks[i].at, blocks[i].pages * PAGE};
            struct uffdio_register reg = {range, UFFDIO_REGISTER_MODE_WP, 0};
            CHECK(ioctl(fd, UFFDIO_REGISTER, &reg) == 0, "UFFDIO_REGISTER of block %d in round %d", i, round);
            CHECK(pool_pages(blocks[i].at, blocks[i].pages * PAGE) == 0, "tracked pages are shown from the pool");
            check(&blocks[i], "tracked");
        }
        close(fd);
    }
}

// A VM monitor probes whether it can register memory while its guest runs: no write is lost meanwhile.
static void probes(void) {
    pthread_t threads[HAMMERS];
    start_hammers(threads);
    struct uffdio_range range = {(unsigned long)hammered.at, HAMMER_PAGES * PAGE};
    uint64_t seed = 5;
    for (int round = 0; round < 6; round++) {
        atomic_store(&resting, 1);
        wait_merged(&hammered, HAMMER_PAGES / 4 * 3);
        atomic_store(&resting, 0);
        nap(draw(&seed) % 20);
        int fd = userfaultfd();
        struct uffdio_register reg = {range, UFFDIO_REGISTER_MODE_WP, 0};
        CHECK(ioctl(fd, UFFDIO_REGISTER, &reg) == 0, "UFFDIO_REGISTER");
        CHECK(ioctl(fd, UFFDIO_UNREGISTER, &range) == 0, "UFFDIO_UNREGISTER");
        close(fd);
    }
    stop_hammers(threads);
}

const struct scenario userfaultfd_scenarios[] = {
    {"own-userfaultfd", own_userfaultfd},
    {"tracked-blocks", tracked_blocks},
    {"probes", probes},
    {0},
};
