// Red-black trees under one lock, as peers of `pagefold bench`.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <pthread.h>
#include <shared_mutex>

namespace {

// As std::shared_mutex, on pthread_rwlock as the source has it.
struct RwLock {
  pthread_rwlock_t of = PTHREAD_RWLOCK_INITIALIZER;
  void lock_shared() { pthread_rwlock_rdlock(&of); }
  void unlock_shared() { pthread_rwlock_unlock(&of); }
  void lock() { pthread_rwlock_wrlock(&of); }
  void unlock() { pthread_rwlock_unlock(&of); }
};
using Reading = std::shared_lock<RwLock>;
using Writing = std::unique_lock<RwLock>;

// A tree of numbers, as an index of pages.
struct NumberTree {
  RwLock lock;
  std::map<uint64_t, uint64_t> tree;
};

// The user-space side of the source's test, as it is there: a red-black tree of key, pointer and length, the value in an
// allocation of its own, one pthread_rwlock; an insert searches first and then takes the lock for writing.
struct SourceTree {
  struct Value {
    char *text;
    uint32_t length;
  };
  RwLock lock;
  std::map<uint64_t, Value> tree;
};

}  // namespace

extern "C" {

void *number_tree_create() { return new NumberTree; }

void number_tree_destroy(void *at) { delete (NumberTree *)at; }

bool number_tree_get(void *at, uint64_t key, uint64_t *value) {
  auto *self = (NumberTree *)at;
  Reading guard(self->lock);
  auto it = self->tree.find(key);
  if (it == self->tree.end()) return false;
  *value = it->second;
  return true;
}

bool number_tree_insert(void *at, uint64_t key, uint64_t value) {
  auto *self = (NumberTree *)at;
  Writing guard(self->lock);
  return self->tree.emplace(key, value).second;
}

bool number_tree_replace(void *at, uint64_t key, uint64_t value) {
  auto *self = (NumberTree *)at;
  Writing guard(self->lock);
  return !self->tree.insert_or_assign(key, value).second;
}

bool number_tree_remove(void *at, uint64_t key) {
  auto *self = (NumberTree *)at;
  Writing guard(self->lock);
  return self->tree.erase(key) != 0;
}

void *source_tree_create() { return new SourceTree; }

void source_tree_destroy(void *at) {
  auto *self = (SourceTree *)at;
  for (auto &entry : self->tree) free(entry.second.text);
  delete self;
}

void source_tree_insert(void *at, uint64_t key, const char *text, uint32_t length) {
  auto *self = (SourceTree *)at;
  {
    Reading guard(self->lock);
    if (self->tree.find(key) != self->tree.end()) return;
  }
  char *copy = (char *)malloc(length);
  memcpy(copy, text, length);
  Writing guard(self->lock);
  if (!self->tree.emplace(key, SourceTree::Value{copy, length}).second) free(copy);
}

bool source_tree_holds(void *at, uint64_t key, const char *text, uint32_t length) {
  auto *self = (SourceTree *)at;
  Reading guard(self->lock);
  auto it = self->tree.find(key);
  return it != self->tree.end() && it->second.length == length && memcmp(it->second.text, text, length) == 0;
}

}  // extern "C"
