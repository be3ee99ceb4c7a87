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

// Code that is executed while it is merged, and changed while it is shared. Each page is a function that returns its number,
// followed by bytes of a page with that number.
#if defined(__x86_64__)
enum { VALUE_AT = 4, CODE_LEN = 9 };

static void fill_code(char *page, uint32_t number) {
    fill_page(page, number);
    // nop; nop; nop; mov eax, NUMBER; ret. The number is aligned: a store changes it as a whole.
    memcpy(page, "\x90\x90\x90\xb8", VALUE_AT);
    memcpy(page + VALUE_AT, &number, sizeof number);
    page[CODE_LEN - 1] = '\xc3';
}

static uint32_t call(const struct region *r, size_t page) {
    uint32_t (*function)(void);
    char *at = r->at + page * PAGE;
    memcpy(&function, &at, sizeof at);
    return function();
}

static struct region code;
static atomic_int calling;

// Every fourth page is changed meanwhile: its function returns the old or the new number.
static void *call_all(void *seed_of) {
    uint64_t seed = (uintptr_t)seed_of;
    while (atomic_load(&calling)) {
        size_t page = draw(&seed) % code.pages;
        uint32_t wanted = number_of(&code, page), got = call(&code, page);
        CHECK(got == wanted || (page % 4 == 0 && got == wanted + 1000000), "page %zu returns %u", page, got);
    }
    return NULL;
}

static void check_code(uint32_t changed, const char *when) {
    static char expected[PAGE];
    for (size_t i = 0; i < code.pages; i++) {
        uint32_t number = number_of(&code, i), shown = number + (i % 4 ? 0 : changed);
        fill_code(expected, number);
        memcpy(expected + VALUE_AT, &shown, sizeof shown);
        CHECK(memcmp(code.at + i * PAGE, expected, PAGE) == 0, "page %zu is wrong %s", i, when);
        CHECK(call(&code, i) == shown, "page %zu returns %u %s", i, call(&code, i), when);
    }
}

// Every mapping of the code has all rights, and none of its neighbours can be executed.
static void check_rights(const struct region *sides, const char *when) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], mode[8];
    char *end = code.at + code.pages * PAGE;
    while (maps && fgets(line, sizeof line, maps)) {
        char *from, *to;
        if (sscanf(line, "%p-%p %7s", (void **)&from, (void **)&to, mode) != 3) continue;
        if (from < end && to > code.at) CHECK(strcmp(mode, "rwxp") == 0, "code is %s %s", mode, when);
        for (int i = 0; i < 2; i++)
            if (from < sides[i].at + sides[i].pages * PAGE && to > sides[i].at) CHECK(strcmp(mode, "rw-p") == 0, "data is %s %s", mode, when);
    }
    CHECK(maps && fclose(maps) == 0, "the list of mappings");
}

static void execute(void) {
    const int rights = PROT_READ | PROT_WRITE | PROT_EXEC;
    code = (struct region){NULL, 4096, 1024, 1000};
    size_t len = code.pages * PAGE;
    // Usual memory on both sides: what is merged must not take over rights of its neighbours.
    char *room = mmap(NULL, len + 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(room != MAP_FAILED, "mmap");
    code.at = room + MIB;
    CHECK(mmap(code.at, len, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == code.at, "mmap of code");
    struct region sides[] = {{room, MIB / PAGE, 16, 7000}, {code.at + len, MIB / PAGE, 16, 7000}};
    for (int i = 0; i < 2; i++)
        for (size_t page = 0; page < sides[i].pages; page++) fill_page(sides[i].at + page * PAGE, number_of(&sides[i], page));
    for (size_t i = 0; i < code.pages; i++) fill_code(code.at + i * PAGE, number_of(&code, i));
    struct region all = {room, (len + 2 * MIB) / PAGE, 1, 0};
    mark_mergeable(&all);
    pthread_t threads[3];
    atomic_store(&calling, 1);
    for (uintptr_t i = 0; i < 3; i++) CHECK(pthread_create(&threads[i], NULL, call_all, (void *)(i + 1)) == 0, "pthread_create");
    wait_merged(&code, code.pages / 4 * 3);
    for (int i = 0; i < 2; i++) wait_merged(&sides[i], sides[i].pages / 2);
    for (int i = 0; i < 2; i++) check(&sides[i], "beside code");
    check_code(0, "after merging");
    check_rights(sides, "when it is merged");
    for (size_t i = 0; i < code.pages; i += 4) *(volatile uint32_t *)(code.at + i * PAGE + VALUE_AT) += 1000000;
    check_code(1000000, "after a change");
    // The agent makes such pages plain memory again, which can be executed as well.
    nap(3000);
    check_code(1000000, "later");
    check_rights(sides, "later");
    pid_t child = fork();
    if (child == 0) {
        atomic_store(&calling, 0);
        check_code(1000000, "in a child");
        _exit(0);
    }
    CHECK(ended_well(child), "a child");
    atomic_store(&calling, 0);
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    CHECK(madvise(code.at, 256 * PAGE, MADV_DONTNEED) == 0 && page_is_zero(code.at + 3 * PAGE), "a discard");
    for (size_t i = 0; i < 256; i++) {
        uint32_t number = number_of(&code, i) + (i % 4 ? 0 : 1000000);
        fill_code(code.at + i * PAGE, number_of(&code, i));
        memcpy(code.at + i * PAGE + VALUE_AT, &number, sizeof number);
    }
    check_code(1000000, "in the end");
    CHECK(madvise(code.at, len, MADV_UNMERGEABLE) == 0 && shown_pages(code.at, len) == 0, "MADV_UNMERGEABLE");
    check_code(1000000, "when it is private again");
}
#else
static void execute(void) { SKIP("its code is of x86-64"); }
#endif

const struct scenario rights_scenarios[] = {
    {"protect", protect},
    {"keys", keys},
    {"keys-and-advice", keys_and_advice},
    {"rights-raw", rights_raw},
    {"execute", execute},
    {0},
};
