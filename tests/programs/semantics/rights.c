// Access rights of merged memory: mprotect(2) and protection keys.
#include "common.h"

#include <linux/filter.h>
#include <linux/seccomp.h>

static void protect(void) {
    struct region r = merged(1024);
    size_t len = r.pages * PAGE;
    // Sharing of these pages breaks before the protection: the agent tries to unshare them.
    for (size_t i = 0; i < 64; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    CHECK(mprotect(r.at, len, PROT_READ) == 0, "mprotect to read only");
    check(&r, "read only");
    CHECK(faults(r.at + 5 * PAGE, 1) == SIGSEGV, "a read-only page can be written");
    nap(700);
    check(&r, "read only, later");
    CHECK(faults(r.at + 5 * PAGE, 1) == SIGSEGV, "a read-only page can be written later");
    CHECK(mprotect(r.at, len, PROT_READ | PROT_WRITE) == 0, "mprotect back");
    for (size_t i = 0; i < 64; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    CHECK(mprotect(r.at, len, PROT_NONE) == 0, "mprotect to nothing");
    nap(1000);
    CHECK(faults(r.at, 0) == SIGSEGV && faults(r.at + 700 * PAGE, 0) == SIGSEGV, "a page without rights can be read");
    // Moving and unmerging memory without rights keeps both rights and bytes.
    char *target = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mremap(r.at, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, target) == target, "mremap without rights");
    r.at = target;
    CHECK(faults(r.at, 0) == SIGSEGV, "a moved page without rights can be read");
    CHECK(mprotect(r.at, len, PROT_READ | PROT_WRITE) == 0, "mprotect back");
    check(&r, "after all rights came back");
    wait_merged(&r, 700);
    CHECK(mprotect(r.at, len, PROT_READ) == 0, "mprotect to read only");
    CHECK(madvise(r.at, len, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE read only");
    check(&r, "unmerged read only");
    CHECK(faults(r.at + 5 * PAGE, 1) == SIGSEGV, "an unmerged read-only page can be written");
    CHECK(mprotect(r.at, len, PROT_READ | PROT_WRITE) == 0, "mprotect back");
    madvise(r.at, len, MADV_MERGEABLE);
    wait_merged(&r, 700);
    CHECK(mprotect(r.at, len, PROT_READ) == 0, "mprotect to read only");
    CHECK(madvise(r.at, 100 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED read only");
    CHECK(page_is_zero(r.at), "a discarded read-only page shows old bytes");
    CHECK(faults(r.at + 5 * PAGE, 1) == SIGSEGV, "a discarded read-only page can be written");
    CHECK(mprotect(r.at, len, PROT_READ | PROT_WRITE) == 0, "mprotect back");
    write_all(&r, 42000, "after mprotect");
}

// Memory with a protection key is not merged: mappings of the pool have no key. A key that the kernel refuses changes nothing.
// Not every processor has keys.
static void keys(void) {
    struct region r = merged(1024);
    size_t len = r.pages * PAGE;
    for (size_t i = 0; i < 64; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    CHECK(pkey_mprotect(r.at, len, PROT_READ, -1) == 0, "pkey_mprotect without a key");
    CHECK(faults(r.at + 5 * PAGE, 1) == SIGSEGV, "a read-only page can be written");
    CHECK(pkey_mprotect(r.at, len, PROT_READ | PROT_WRITE, -1) == 0, "pkey_mprotect back");
    wait_merged(&r, 700);
    CHECK(pkey_mprotect(r.at, len, PROT_READ | PROT_WRITE, 15) == -1 && errno == EINVAL, "a key that was not allocated");
    check(&r, "refused");
    CHECK(syscall(SYS_pkey_mprotect, r.at + 1, len, PROT_READ | PROT_WRITE, 15) == -1 && errno == EINVAL, "within a page");
    wait_merged(&r, 700);
    int key = pkey_alloc(0, 0);
    if (key < 0) {
        printf("no protection keys here: refusals alone were tried\n");
        return;
    }
    CHECK(pkey_mprotect(r.at, len / 2, PROT_READ | PROT_WRITE, key) == 0, "pkey_mprotect");
    CHECK(pool_pages(r.at, len / 2) == 0, "memory with a key is shown from the pool");
    for (int round = 0; round < 3; round++) {
        nap(700);
        check(&r, "keyed");
        CHECK(pool_pages(r.at, len / 2) == 0, "memory with a key was merged");
        pkey_set(key, PKEY_DISABLE_ACCESS);
        CHECK(faults(r.at, 0) == SIGSEGV && faults(r.at + len / 2 - PAGE, 0) == SIGSEGV, "the key is lost");
        pkey_set(key, 0);
        for (size_t i = round; i < r.pages; i += 7) fill_page(r.at + i * PAGE, number_of(&r, i));
    }
}

// Imitates a kernel with keys on a processor without: key 14 fails after some pages, all others succeed.
static void pretend_keys(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pkey_mprotect, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[3])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 14, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOMEM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 0),
    };
    install(0, code, sizeof code / sizeof *code);
}

// A key takes precedence over MADV_MERGEABLE. After a failed call the first pages may have the key.
static void keys_and_advice(void) {
    struct region r = merged(1024);
    size_t part = r.pages / 4;
    pretend_keys();
    wait_merged(&r, 3 * part);
    CHECK(pkey_mprotect(r.at, part * PAGE, PROT_READ | PROT_WRITE, 15) == 0, "a key");
    CHECK(pkey_mprotect(r.at + part * PAGE, part * PAGE, PROT_READ | PROT_WRITE, 14) == -1 && errno == ENOMEM, "a lack");
    CHECK(madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    for (size_t i = 0; i < r.pages; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    for (int round = 0; round < 5; round++) {
        nap(700);
        CHECK(pool_pages(r.at, 2 * part * PAGE) == 0, "memory with a key was merged");
    }
    check(&r, "keyed");
    CHECK(pkey_mprotect(r.at, 2 * part * PAGE, PROT_READ | PROT_WRITE, 0) == 0, "key 0");
    wait_merged(&r, 3 * part);
    check(&r, "merged again");
}

// Rights change by bare calls, which the agent does not see, while pages are frozen: pages are moved back into other
// mappings than those they came from.
static struct region between;
static _Atomic int changing;

static void *change_rights(void *seed_of) {
    uint64_t seed = (uintptr_t)seed_of;
    while (atomic_load(&changing)) {
        size_t page = draw(&seed) % between.pages | 1;
        char *at = between.at + page * PAGE;
        CHECK(raw(SYS_mprotect, (long)at, PAGE, PROT_READ, 0, 0, 0) == 0, "mprotect");
        CHECK(page_is(at, number_of(&between, page)), "page %zu is wrong while it may only be read", page);
        CHECK(raw(SYS_mprotect, (long)at, PAGE, PROT_READ | PROT_WRITE, 0, 0, 0) == 0, "mprotect");
    }
    return NULL;
}

static void rights_raw(void) {
    const size_t pages = 2048;
    struct region twin = fill(pages, pages, 1000);
    between = fill(pages, pages, 1000);
    // Every second page has no twin: it is frozen only because both neighbours have one.
    for (size_t i = 1; i < pages; i += 2) fill_page(twin.at + i * PAGE, 900000 + i);
    struct region *both[] = {&twin, &between};
    for (int i = 0; i < 2; i++) {
        madvise(both[i]->at, pages * PAGE, MADV_NOHUGEPAGE);
        CHECK(madvise(both[i]->at, pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    }
    atomic_store(&changing, 1);
    pthread_t threads[2];
    for (uintptr_t i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, change_rights, (void *)(i + 1)) == 0, "pthread_create");
    wait_merged(&between, pages / 8);
    for (int round = 0; round < 20; round++) {
        for (size_t i = 0; i < pages; i += 2) fill_page(between.at + i * PAGE, number_of(&between, i));
        nap(300);
        check(&between, "while its rights change");
    }
    atomic_store(&changing, 0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    check(&between, "after its rights changed");
}

const struct scenario rights_scenarios[] = {
    {"protect", protect},
    {"keys", keys},
    {"keys-and-advice", keys_and_advice},
    {"rights-raw", rights_raw},
    {0},
};
