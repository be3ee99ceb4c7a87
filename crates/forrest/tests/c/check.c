/* Calls every function of forrest.h, rightly and wrongly. Prints "ok" and exits 0 if all is as the header says. */
#include <forrest.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                        \
    do {                                                                   \
        if (!(what)) {                                                     \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);     \
            exit(1);                                                       \
        }                                                                  \
    } while (0)

static int visits;

static int visit(void *argument, const void *key, size_t key_length, const void *value, size_t value_length) {
    CHECK(argument == &visits);
    CHECK(key != NULL && key_length > 0 && value_length < 100 && (value != NULL || value_length == 0));
    return ++visits == 3;
}

static int closing(void *argument, const void *key, size_t key_length, const void *value, size_t value_length) {
    (void)key, (void)key_length, (void)value, (void)value_length;
    FORREST *other = forrest_alloc();
    CHECK(forrest_close((FORREST *)argument) == FORREST_BUSY);
    CHECK(other != NULL && forrest_close(other) == FORREST_OK && forrest_close(other) == FORREST_BAD_HANDLE);
    return 1;
}

static void each(void *argument, size_t index, const void *value, size_t length) {
    int *seen = (int *)argument;
    CHECK(*seen == (int)index);
    if (index == 1)
        CHECK(value == NULL && length == 0);
    else
        CHECK(length == 1 && *(const char *)value == (char)('a' + index));
    ++*seen;
}

static void *hammer(void *argument) {
    FORREST *store = (FORREST *)argument;
    for (int i = 0; i < 2000; i++) {
        int code = forrest_increment(store, "sum", 3, NULL);
        if (code == FORREST_BAD_HANDLE)
            return NULL; /* closed under us: allowed, and nothing else may happen */
        CHECK(code == FORREST_OK);
        char value[300];
        size_t length = 0;
        memset(value, i, sizeof value);
        code = forrest_set(store, "long", 4, value, 1 + (size_t)i % 300);
        CHECK(code == FORREST_OK || code == FORREST_BAD_HANDLE);
        code = forrest_get(store, "long", 4, value, sizeof value, &length);
        CHECK(code == FORREST_OK || code == FORREST_BAD_HANDLE || code == FORREST_NOT_FOUND);
        for (size_t at = 1; code == FORREST_OK && at < length; at++)
            CHECK(value[at] == value[0]);
    }
    return NULL;
}

static void basics(FORREST *store) {
    char buffer[16];
    size_t length = 77;
    int64_t sum = 0;
    uint64_t count = 0;
    void *copy = NULL;
    CHECK(forrest_get(store, "a", 1, buffer, sizeof buffer, &length) == FORREST_NOT_FOUND && length == 77);
    CHECK(forrest_set(store, "a", 1, "value", 5) == FORREST_OK);
    CHECK(forrest_get(store, "a", 1, buffer, sizeof buffer, &length) == FORREST_OK && length == 5);
    CHECK(memcmp(buffer, "value", 5) == 0);
    CHECK(forrest_get(store, "a", 1, buffer, 4, &length) == FORREST_TOO_SMALL && length == 5);
    CHECK(forrest_get(store, "a", 1, NULL, 0, &length) == FORREST_TOO_SMALL && length == 5);
    CHECK(forrest_get(store, "a", 1, NULL, 99, NULL) == FORREST_INVALID);
    CHECK(forrest_get_copy(store, "a", 1, &copy, &length) == FORREST_OK && length == 5);
    CHECK(memcmp(copy, "value", 5) == 0);
    free(copy);
    CHECK(forrest_insert(store, "a", 1, "other", 5) == FORREST_EXISTS);
    CHECK(forrest_insert(store, "b", 1, NULL, 0) == FORREST_OK);
    CHECK(forrest_get(store, "b", 1, NULL, 0, &length) == FORREST_OK && length == 0);
    CHECK(forrest_delete(store, "b", 1) == FORREST_OK && forrest_delete(store, "b", 1) == FORREST_NOT_FOUND);
    CHECK(forrest_set(store, "", 0, "empty key", 9) == FORREST_OK);
    CHECK(forrest_increment(store, "n", 1, &sum) == FORREST_OK && sum == 1);
    CHECK(forrest_add(store, "n", 1, 41, &sum) == FORREST_OK && sum == 42);
    CHECK(forrest_decrement(store, "n", 1, NULL) == FORREST_OK);
    CHECK(forrest_add(store, "a", 1, 1, &sum) == FORREST_NOT_A_NUMBER);
    forrest_bytes value = {"value", 5}, next = {"next", 4};
    CHECK(forrest_compare_swap(store, "a", 1, &next, &value) == FORREST_MISMATCH);
    CHECK(forrest_compare_swap(store, "a", 1, &value, &next) == FORREST_OK);
    CHECK(forrest_compare_swap(store, "c", 1, NULL, &value) == FORREST_OK);
    CHECK(forrest_compare_swap(store, "c", 1, &value, NULL) == FORREST_OK);
    CHECK(forrest_get(store, "c", 1, buffer, sizeof buffer, NULL) == FORREST_NOT_FOUND);
    CHECK(forrest_count(store, &count) == FORREST_OK && count == 3);
    CHECK(forrest_reserve(store, 1000) == FORREST_OK);
    CHECK(forrest_clear(store, &count) == FORREST_OK && count == 3);

    forrest_bytes keys[3] = {{"k0", 2}, {"none", 4}, {"k2", 2}}, some[2] = {{"k0", 2}, {"k2", 2}};
    forrest_bytes values[2] = {{"a", 1}, {"c", 1}};
    CHECK(forrest_set_many(store, some, values, 2) == FORREST_OK);
    int seen = 0;
    CHECK(forrest_get_many(store, keys, 3, each, &seen) == FORREST_OK && seen == 3);
    CHECK(forrest_get_many(store, keys, 0, each, NULL) == FORREST_OK);
    for (int i = 0; i < 20; i++)
        CHECK(forrest_set(store, &i, sizeof i, "x", 1) == FORREST_OK);
    CHECK(forrest_for_each(store, visit, &visits) == FORREST_OK && visits == 3);
    CHECK(forrest_for_each(store, closing, store) == FORREST_OK);
    forrest_stats stats;
    CHECK(forrest_get_stats(store, &stats) == FORREST_OK && stats.entry_count == 22 && stats.held_bytes > 0);
    CHECK(forrest_trim(store) == FORREST_OK && forrest_recover(store) == FORREST_OK);
}

static void misuse(void) {
    FORREST *store = NULL;
    char *huge = (char *)malloc(FORREST_KEY_BYTES_MAX + 1);
    size_t length;
    void *copy;
    CHECK(huge != NULL);
    memset(huge, 1, FORREST_KEY_BYTES_MAX + 1);
    CHECK(forrest_open(NULL, NULL, NULL) == FORREST_INVALID);
    forrest_options options = {0, 0, FORREST_CREATE | FORREST_EXISTING, 0};
    CHECK(forrest_open("x", &options, &store) == FORREST_INVALID && store == NULL);
    options.flags = 1u << 20;
    CHECK(forrest_open(NULL, &options, &store) == FORREST_INVALID);
    CHECK(forrest_open("a/b", NULL, &store) == FORREST_BAD_NAME && forrest_open("", NULL, &store) == FORREST_BAD_NAME);
    CHECK(forrest_remove(NULL) == FORREST_INVALID && forrest_remove("no such store") == FORREST_NOT_FOUND);
    options.flags = FORREST_EXISTING;
    CHECK(forrest_open("no such store", &options, &store) == FORREST_NOT_FOUND);
    FORREST *bad[4] = {NULL, (FORREST *)1, (FORREST *)~(uintptr_t)0, (FORREST *)(((uintptr_t)3 << 32) | 1)};
    for (int i = 0; i < 4; i++) {
        int expected = i == 0 ? FORREST_INVALID : FORREST_BAD_HANDLE;
        CHECK(forrest_set(bad[i], "a", 1, "a", 1) == expected);
        CHECK(forrest_get(bad[i], "a", 1, NULL, 0, &length) == expected);
        CHECK(forrest_close(bad[i]) == expected && forrest_cleanup(bad[i]) == expected);
        llds_result_ent *got = forrest_get_key(bad[i], 1);
        CHECK(got != NULL && got->result == expected && got->val == NULL);
        free(got);
    }
    CHECK(forrest_open(NULL, NULL, &store) == FORREST_OK && store != NULL);
    CHECK(forrest_set(store, NULL, 3, "a", 1) == FORREST_INVALID);
    CHECK(forrest_set(store, "a", (size_t)-1, "a", 1) == FORREST_INVALID);
    CHECK(forrest_set(store, "a", 1, NULL, 1) == FORREST_INVALID);
    CHECK(forrest_set(store, huge, FORREST_KEY_BYTES_MAX + 1, "a", 1) == FORREST_KEY_TOO_LONG);
    CHECK(forrest_set(store, huge, FORREST_KEY_BYTES_MAX, "a", 1) == FORREST_OK);
    CHECK(forrest_set(store, "a", 1, huge, (size_t)FORREST_VALUE_BYTES_MAX + 1) == FORREST_VALUE_TOO_LONG);
    CHECK(forrest_get_copy(store, "a", 1, NULL, NULL) == FORREST_INVALID);
    CHECK(forrest_get_copy(store, "none", 4, &copy, NULL) == FORREST_NOT_FOUND && copy == NULL);
    CHECK(forrest_for_each(store, NULL, NULL) == FORREST_INVALID);
    CHECK(forrest_get_many(store, NULL, 2, each, NULL) == FORREST_INVALID);
    CHECK(forrest_get_many(store, NULL, (size_t)-1, each, NULL) == FORREST_INVALID);
    CHECK(ft_MurmurHash64A(NULL, 5, 9) == 0 && ft_MurmurHash64A("a", -1, 9) == 0);
    CHECK(forrest_close(store) == FORREST_OK);
    CHECK(forrest_close(store) == FORREST_BAD_HANDLE);
    CHECK(forrest_set(store, "a", 1, "a", 1) == FORREST_BAD_HANDLE);
    FORREST *again = forrest_alloc();
    CHECK(again != NULL && again != store);
    CHECK(forrest_set(store, "a", 1, "a", 1) == FORREST_BAD_HANDLE);
    CHECK(forrest_cleanup(again) == FORREST_OK);
    free(huge);
    for (int code = -1; code < 30; code++)
        CHECK(forrest_error_text(code) != NULL && forrest_error_text(code)[0] != 0);
    CHECK(forrest_version()[0] >= '0');
}

static void limit(void) {
    forrest_options options = {4 << 20, 0, FORREST_KEYED, 0};
    FORREST *store;
    static char value[100000];
    int code = FORREST_OK;
    CHECK(forrest_open(NULL, &options, &store) == FORREST_OK);
    for (int i = 0; i < 1000 && code == FORREST_OK; i++)
        code = forrest_set(store, &i, sizeof i, value, sizeof value);
    CHECK(code == FORREST_FULL);
    int zero = 0;
    CHECK(forrest_delete(store, &zero, sizeof zero) == FORREST_OK && forrest_trim(store) == FORREST_OK);
    CHECK(forrest_set(store, &zero, sizeof zero, value, sizeof value) == FORREST_OK);
    CHECK(forrest_close(store) == FORREST_OK);
}

/* Mappings of shared stores in this process. */
static int shared_mappings(void) {
    char line[4096];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps) != NULL)
        count += strstr(line, "/dev/shm/") != NULL;
    fclose(maps);
    return count;
}

static void shared_and_fork(void) {
    char name[64], buffer[8];
    FORREST *store, *other;
    size_t length;
    int status = 0;
    snprintf(name, sizeof name, "check-%ld", (long)getpid());
    forrest_options options = {64 << 20, 9, FORREST_CREATE, 0};
    CHECK(forrest_open(name, &options, &store) == FORREST_OK);
    CHECK(forrest_open(name, &options, &other) == FORREST_EXISTS);
    CHECK(forrest_set(store, "parent", 6, "here", 4) == FORREST_OK);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        /* The inherited handle is refused; a new one works, also next to the old one's end. */
        CHECK(forrest_set(store, "a", 1, "a", 1) == FORREST_FORKED);
        CHECK(forrest_get(store, "parent", 6, buffer, sizeof buffer, &length) == FORREST_FORKED);
        CHECK(forrest_open(name, NULL, &other) == FORREST_OK && other != store);
        CHECK(forrest_get(other, "parent", 6, buffer, sizeof buffer, &length) == FORREST_OK && length == 4);
        CHECK(forrest_set(other, "child", 5, "too", 3) == FORREST_OK);
        CHECK(shared_mappings() == 2);
        CHECK(forrest_close(store) == FORREST_OK && shared_mappings() == 1);
        CHECK(forrest_close(store) == FORREST_BAD_HANDLE);
        CHECK(forrest_close(other) == FORREST_OK && shared_mappings() == 0);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(forrest_get(store, "child", 5, buffer, sizeof buffer, &length) == FORREST_OK && length == 3);
    CHECK(forrest_remove(name) == FORREST_OK);
    CHECK(forrest_set(store, "still", 5, "works", 5) == FORREST_OK);
    CHECK(forrest_close(store) == FORREST_OK);
}

/* What the library refuses, of which no call of the system says why. */
static void too_large(void) {
    int status = 0;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct rlimit limit = {1 << 20, 1 << 20};
        FORREST *store;
        errno = EDOM;
        _exit(setrlimit(RLIMIT_FSIZE, &limit) != 0 || forrest_open("check-large", NULL, &store) != FORREST_SYSTEM ||
              errno != 0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void threads(void) {
    pthread_t thread[4];
    for (int round = 0; round < 2; round++) {
        FORREST *store = forrest_alloc();
        int64_t sum;
        CHECK(store != NULL);
        for (int i = 0; i < 4; i++)
            CHECK(pthread_create(&thread[i], NULL, hammer, store) == 0);
        if (round == 1)
            CHECK(forrest_close(store) == FORREST_OK); /* in the middle of their calls */
        for (int i = 0; i < 4; i++)
            pthread_join(thread[i], NULL);
        if (round == 0) {
            CHECK(forrest_add(store, "sum", 3, 0, &sum) == FORREST_OK && sum == 8000);
            CHECK(forrest_close(store) == FORREST_OK);
        }
    }
}

static int append(void *argument, const void *key, size_t key_length, const void *value, size_t value_length) {
    (void)value;
    CHECK(value_length == 1);
    strncat((char *)argument, (const char *)key, key_length);
    return strlen((char *)argument) >= 5; /* stops the scan */
}

static void ordered(void) {
    forrest_options options = {0, 0, FORREST_ORDERED, 0};
    forrest_bytes from = {"b", 1}, to = {"d", 1};
    FORREST *store, *plain;
    char seen[64] = "";
    CHECK(forrest_open(NULL, &options, &store) == FORREST_OK);
    for (const char *key = "gecabdfh"; *key; key++)
        CHECK(forrest_set(store, key, 1, "1", 1) == FORREST_OK);
    CHECK(forrest_scan(store, &from, &to, 0, append, seen) == FORREST_OK && strcmp(seen, "bc") == 0);
    seen[0] = 0;
    CHECK(forrest_scan(store, &from, NULL, 1, append, seen) == FORREST_OK && strcmp(seen, "hgfed") == 0);
    CHECK(forrest_scan(store, &from, NULL, 1, NULL, seen) == FORREST_INVALID);
    CHECK(forrest_close(store) == FORREST_OK);
    CHECK(forrest_open(NULL, NULL, &plain) == FORREST_OK);
    CHECK(forrest_scan(plain, NULL, NULL, 0, append, seen) == FORREST_NOT_ORDERED);
    CHECK(forrest_close(plain) == FORREST_OK);
    CHECK(forrest_open("check-ordered", &options, &store) == FORREST_NOT_ORDERED);
}

static pthread_key_t ending;

static void late(void *store) {
    CHECK(forrest_set((FORREST *)store, "late", 4, "value", 5) == FORREST_OK);
}

static void *writes_as_it_ends(void *store) {
    CHECK(pthread_setspecific(ending, store) == 0);
    return NULL;
}

static void *writes_before_too(void *store) {
    CHECK(forrest_set((FORREST *)store, "early", 5, "value", 5) == FORREST_OK);
    return writes_as_it_ends(store);
}

static FORREST *at_exit_store;

/* As the destructor of a static object in C++. */
static void at_exit(void) {
    if (forrest_set(at_exit_store, "last", 4, "value", 5) != FORREST_OK || forrest_close(at_exit_store) != FORREST_OK) {
        fputs("no writing at exit\n", stderr);
        _exit(1);
    }
}

static void endings(void) {
    pthread_t thread;
    forrest_stats stats;
    FORREST *store = forrest_alloc();
    CHECK(pthread_key_create(&ending, late) == 0);
    for (int round = 0; round < 4; round++) {
        CHECK(pthread_create(&thread, NULL, round % 2 == 0 ? writes_before_too : writes_as_it_ends, store) == 0);
        CHECK(pthread_join(thread, NULL) == 0 && forrest_delete(store, "late", 4) == FORREST_OK);
    }
    CHECK(forrest_get_stats(store, &stats) == FORREST_OK && stats.thread_count == 1);
    CHECK(pthread_key_delete(ending) == 0);
    at_exit_store = store;
    CHECK(atexit(at_exit) == 0);
}

static void libforrest(void) {
    FORREST *store = forrest_alloc();
    char text[] = "zero";
    llds_result_ent *set = forrest_insert_key(store, 5, text, 5);
    CHECK(set != NULL && set->result == FORREST_OK && set->key == 5);
    free(set);
    llds_result_ent *got = forrest_get_key(store, 5);
    CHECK(got != NULL && got->result == FORREST_OK && got->vlen == 5 && strcmp((char *)got->val, "zero") == 0);
    free(got->val);
    free(got);
    CHECK(forrest_delete_key(store, 5) == FORREST_OK && forrest_delete_key(store, 5) == FORREST_NOT_FOUND);
    CHECK(ft_MurmurHash64A("key42", 5, 9) == UINT64_C(0xed2d2b16a198f5a6));
    CHECK(forrest_rm_tree(store) == FORREST_OK && forrest_cleanup(store) == FORREST_OK);
}

int main(void) {
    FORREST *store = NULL;
    CHECK(forrest_open(NULL, NULL, &store) == FORREST_OK);
    basics(store);
    CHECK(forrest_close(store) == FORREST_OK);
    misuse();
    limit();
    shared_and_fork();
    too_large();
    threads();
    ordered();
    libforrest();
    endings();
    puts("ok");
    return 0;
}
