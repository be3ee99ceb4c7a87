/*
 * forrest: a key-value store in memory, private to a process or shared by several.
 *
 * Link with -lforrest (pkg-config forrest). All functions may be called by many
 * threads concurrently, but not by signal handlers, and no thread may be cancelled in
 * one. A handle is never followed as a pointer: a NULL, closed or invented one
 * gives an error code. After fork the child must open anew. What a function
 * writes to must not overlap the key.
 *
 * Keys have at most FORREST_KEY_BYTES_MAX bytes, values FORREST_VALUE_BYTES_MAX.
 */
#ifndef FORREST_H
#define FORREST_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A handle. */
typedef struct FORREST FORREST;

#define FORREST_KEY_BYTES_MAX 65536
#define FORREST_VALUE_BYTES_MAX 1073741824

/* Error codes; forrest_error_text() has their texts. */
enum {
    FORREST_OK = 0, /* Done. */
    FORREST_NOT_FOUND = 1, /* There is no entry of this key, or no store of this name. */
    FORREST_EXISTS = 2, /* There is an entry, or a store, already. */
    FORREST_MISMATCH = 3, /* The value is not the expected one. */
    FORREST_TOO_SMALL = 4, /* The value does not fit the buffer; its length was stored. */
    FORREST_INVALID = 5, /* An argument is NULL or out of range. */
    FORREST_BAD_HANDLE = 6, /* The handle is not open. */
    FORREST_FORKED = 7, /* The handle was opened before fork; open it again in the child. */
    FORREST_FULL = 8, /* The memory limit is reached, or that of the part of the table to which the key's hash leads. */
    FORREST_NO_MEMORY = 9, /* The system has no memory left. */
    FORREST_KEY_TOO_LONG = 10, /* The key is too long. */
    FORREST_VALUE_TOO_LONG = 11, /* The value is too long. */
    FORREST_NOT_A_NUMBER = 12, /* The value is not a number of 8 bytes. */
    FORREST_BAD_NAME = 13, /* The name cannot name a store. */
    FORREST_FOREIGN = 14, /* The file is not a store, or was made with other settings. */
    FORREST_VERSION = 15, /* The store was written by another version. */
    FORREST_ARCHITECTURE = 16, /* The store was written on another kind of machine. */
    FORREST_DAMAGED = 17, /* The store is truncated or damaged. */
    FORREST_BUSY = 18, /* Too many threads or handles use stores, or a callback wants to close a handle that is in use. */
    FORREST_SYSTEM = 19, /* The system refused something; errno says what, or is 0. */
    FORREST_INTERNAL = 20, /* An error inside the library. */
    FORREST_NOT_ORDERED = 21, /* The store does not keep its keys in order; a shared one cannot. */
    FORREST_UNTRUSTED = 22, /* The file of this name belongs to another user, or other users may write it. */
    FORREST_NAMESPACE = 23, /* Processes of another pid or time namespace use the store. */
};

/* Flags of forrest_options. */
enum {
    FORREST_CREATE = 1, /* the store must not be there yet. */
    FORREST_EXISTING = 2, /* the store must be there. */
    FORREST_KEYED = 4, /* hash with a secret key. */
    FORREST_SMALL_PAGES = 8, /* 4 KiB pages only. */
    FORREST_PAGES_1G = 16, /* explicit 1 GiB pages where there are some. */
    FORREST_ORDERED = 32, /* keys in order too, for forrest_scan; a private store only. */
};

/* Settings of a store; zero is the default of each. */
typedef struct forrest_options {
    uint64_t limit_bytes; /* Memory limit in bytes. */
    uint64_t seed; /* Seed of MurmurHash64A; 0 stands for 9. */
    unsigned int flags; /* FORREST_CREATE and its like. */
    unsigned int reserved; /* Zero. */
} forrest_options;

/* Bytes somewhere. */
typedef struct forrest_bytes {
    const void *data; /* The first byte. */
    size_t length; /* How many. */
} forrest_bytes;

/* What a store holds and takes. */
typedef struct forrest_stats {
    uint64_t entry_count; /* Entries. */
    uint64_t allocated_bytes; /* Bytes in table and records. */
    uint64_t held_bytes; /* Bytes of memory they lie in. */
    uint64_t kept_bytes; /* Bytes of free memory kept for reuse. */
    uint64_t fixed_bytes; /* Bytes of directory and locks. */
    uint64_t limit_bytes; /* The memory limit. */
    uint64_t thread_count; /* Threads that have written and live. */
    uint64_t recovery_count; /* Deaths of other processes' threads that were cleaned up. */
} forrest_stats;

/* What libforrest returns. */
typedef struct llds_result_ent {
    uint64_t key; /* The key. */
    void *val; /* The value, to be freed by the caller; NULL if there is none. */
    int vlen; /* Bytes of the value. */
    int result; /* An error code, 0 for success. */
} llds_result_ent;

/* Callbacks may call any function on any handle, but close none on which a call is under way. What they are given a pointer
 * to is theirs to read until they return, and may lie at any address. They must return: an exception, longjmp or
 * pthread_exit out of one is undefined, and leaves the handle in use for ever at best. */

/* Gets an entry; returns non-zero to stop. Must return. */
typedef int (*forrest_visit)(void *argument, const void *key, size_t key_length, const void *value, size_t value_length);

/* Gets the value at a position, NULL if there is none. Must return. */
typedef void (*forrest_each)(void *argument, size_t index, const void *value, size_t length);

/* Opens a store: the shared one called name, or a private one if name is NULL. */
int forrest_open(const char *name, const forrest_options *options, FORREST **out);

/* Closes a handle. Waits for calls of other threads that are under way; later ones get
 * FORREST_BAD_HANDLE. In a callback it does not wait: FORREST_BUSY if there are any. */
int forrest_close(FORREST *handle);

/* Removes the shared store called name; processes that have it open keep it. */
int forrest_remove(const char *name);

/* Copies the value of a key into a buffer; stores its length if there is one, also if the buffer is too small. */
int forrest_get(FORREST *handle, const void *key, size_t key_length, void *buffer, size_t capacity,
    size_t *length);

/* Returns the value of a key in memory of its own, to be freed by the caller. */
int forrest_get_copy(FORREST *handle, const void *key, size_t key_length, void **value, size_t
    *length);

/* Sets a key to a value. */
int forrest_set(FORREST *handle, const void *key, size_t key_length, const void *value, size_t
    value_length);

/* Sets a key that is not there yet; FORREST_EXISTS otherwise. */
int forrest_insert(FORREST *handle, const void *key, size_t key_length, const void *value, size_t
    value_length);

/* Deletes a key; FORREST_NOT_FOUND if there is none. */
int forrest_delete(FORREST *handle, const void *key, size_t key_length);

/* Adds to the number under a key (8 bytes, little-endian; none counts as 0) and stores the sum. */
int forrest_add(FORREST *handle, const void *key, size_t key_length, int64_t delta, int64_t *sum);

/* Adds 1; see forrest_add. */
int forrest_increment(FORREST *handle, const void *key, size_t key_length, int64_t *sum);

/* Subtracts 1; see forrest_add. */
int forrest_decrement(FORREST *handle, const void *key, size_t key_length, int64_t *sum);

/* Sets a key to desired if its value is expected; NULL stands for no entry on both sides. */
int forrest_compare_swap(FORREST *handle, const void *key, size_t key_length, const forrest_bytes
    *expected, const forrest_bytes *desired);

/* Looks up many keys, with many cache misses in flight; calls each for every one in order. */
int forrest_get_many(FORREST *handle, const forrest_bytes *keys, size_t count, forrest_each each,
    void *argument);

/* Sets many keys. Stops at the first error; those before it are set, at FORREST_INVALID none. */
int forrest_set_many(FORREST *handle, const forrest_bytes *keys, const forrest_bytes *values, size_t
    count);

/* Calls visit with every entry, in no order, until it returns non-zero. One that is there all the time is visited once, one
 * that is set or deleted meanwhile perhaps. */
int forrest_for_each(FORREST *handle, forrest_visit visit, void *argument);

/* Calls visit with the entries of keys from from on and below to (NULL: no bound), by key order, or backwards if
 * backwards is not 0, until it returns non-zero, as forrest_for_each otherwise. The store must be FORREST_ORDERED. */
int forrest_scan(FORREST *handle, const forrest_bytes *from, const forrest_bytes *to, int backwards,
    forrest_visit visit, void *argument);

/* Makes room for so many entries in all, so that sets up to there copy nothing to grow: about 20 bytes each, taken now.
   FORREST_FULL at the memory limit. */
int forrest_reserve(FORREST *handle, uint64_t entries);

/* Deletes all entries and stores how many they were. */
int forrest_clear(FORREST *handle, uint64_t *count);

/* Stores the number of entries. */
int forrest_count(FORREST *handle, uint64_t *count);

/* Stores what the store holds and takes. */
int forrest_get_stats(FORREST *handle, forrest_stats *out);

/* Gives free memory back to the system. */
int forrest_trim(FORREST *handle);

/* Cleans up after processes that were killed while they used the store. */
int forrest_recover(FORREST *handle);

/* Returns the text of an error code; never NULL. */
const char *forrest_error_text(int code);

/* Returns the library's version, e.g. "0.1.0". */
const char *forrest_version(void);

/* ---- libforrest: the same names and meanings, for programs written for llds ---- */

/* Opens a private store, as libforrest opens its device. NULL on failure. */
FORREST *forrest_alloc(void);

/* MurmurHash64A. 0 for a NULL key or a negative length. */
uint64_t ft_MurmurHash64A(const void *key, int length, unsigned int seed);

/* Sets an entry by its 64-bit key; the result is to be freed by the caller. Unlike libforrest it
 * replaces. */
llds_result_ent *forrest_insert_key(FORREST *handle, uint64_t key, void *value, int length);

/* Gets an entry by its 64-bit key; the result and its value are to be freed by the caller. */
llds_result_ent *forrest_get_key(FORREST *handle, uint64_t key);

/* Deletes an entry by its 64-bit key, which libforrest promised and did not have. */
int forrest_delete_key(FORREST *handle, uint64_t key);

/* Deletes all entries. */
int forrest_rm_tree(FORREST *handle);

/* Closes the handle. */
int forrest_cleanup(FORREST *handle);

#ifdef __cplusplus
}
#endif

#endif
