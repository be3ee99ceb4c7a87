/*
 * A program written for llds and libforrest, ported: it stores the decimal text of N numbers under the
 * MurmurHash of "key%lu" (seed 9), reads them back, and deletes all.
 *
 * What had to change, marked "was" below:
 *   - the header's name;
 *   - success is in `result`, which the kernel never filled in; a missing key has no value instead of an
 *     uninitialised one; `vlen` is the value's length.
 * Setting a key again replaces its value (llds kept the old one), and one key can be deleted.
 *
 *   cc libforrest_port.c $(pkg-config --cflags --libs forrest) -o port && ./port 100000
 */
#include <forrest.h> /* was: #include <libforrest/forrest.h> */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t hash_of(unsigned long number) {
    char text[32];
    int length = snprintf(text, sizeof text, "key%lu", number);
    return ft_MurmurHash64A(text, length, 9);
}

int main(int argc, char **argv) {
    unsigned long count = argc > 1 ? strtoul(argv[1], NULL, 10) : 1000;
    FORREST *forrest = forrest_alloc();
    if (forrest == NULL) { /* was: not reported */
        fprintf(stderr, "no store\n");
        return 1;
    }
    for (unsigned long i = 0; i < count; i++) {
        char value[32];
        int length = snprintf(value, sizeof value, "%lu", i) + 1;
        llds_result_ent *set = forrest_insert_key(forrest, hash_of(i), value, length);
        if (set == NULL || set->result != FORREST_OK) { /* was: result always -1 */
            fprintf(stderr, "set %lu: %s\n", i, forrest_error_text(set ? set->result : FORREST_NO_MEMORY));
            return 1;
        }
        free(set);
    }
    for (unsigned long i = 0; i < count; i++) {
        llds_result_ent *got = forrest_get_key(forrest, hash_of(i));
        if (got == NULL || got->result != FORREST_OK || strtoul(got->val, NULL, 10) != i) {
            fprintf(stderr, "get %lu failed\n", i);
            return 1;
        }
        free(got->val);
        free(got);
    }
    llds_result_ent *missing = forrest_get_key(forrest, hash_of(count));
    if (missing == NULL || missing->result != FORREST_NOT_FOUND || missing->val != NULL)
        return 1;
    free(missing);
    if (count > 0 && forrest_delete_key(forrest, hash_of(0)) != FORREST_OK)
        return 1;
    forrest_rm_tree(forrest);
    forrest_cleanup(forrest);
    printf("%lu keys set, read and deleted; hash of key0 is %016" PRIx64 "\n", count, hash_of(0));
    return 0;
}
