// Maps in C++ and C as peers of `pagefold bench index`: one table of functions each.

#include <absl/container/btree_map.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <libcuckoo/cuckoohash_map.hh>
#include <map>
#include <pthread.h>
#include <tbb/concurrent_hash_map.h>
#define URCU_INLINE_SMALL_FUNCTIONS
#include <urcu/urcu-memb.h>
#include <urcu/rculfhash.h>

namespace {

// One multiplication, as for the hashed peers in Rust.
struct FastHash {
  size_t operator()(uint64_t key) const {
    unsigned __int128 wide =
        (unsigned __int128)key * (((unsigned __int128)0x9e3779b97f4a7c15ull << 64) | 0xf39cc0605cedc835ull);
    return (uint64_t)(wide >> 64) ^ (uint64_t)wide;
  }
};

struct TbbCompare {
  static size_t hash(uint64_t key) { return FastHash()(key); }
  static bool equal(uint64_t a, uint64_t b) { return a == b; }
};

struct RwLock {
  pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
  void read() { pthread_rwlock_rdlock(&lock); }
  void write() { pthread_rwlock_wrlock(&lock); }
  void unlock() { pthread_rwlock_unlock(&lock); }
};

// For one thread: the cost of the structure without locking.
struct NoLock {
  void read() {}
  void write() {}
  void unlock() {}
};

template <class Tree, class Lock> struct Locked {
  Lock lock;
  Tree tree;

  static void *create() { return new Locked; }
  static void destroy(void *map) { delete (Locked *)map; }
  static bool get(void *map, uint64_t key, uint64_t *value) {
    auto *self = (Locked *)map;
    self->lock.read();
    auto it = self->tree.find(key);
    bool found = it != self->tree.end();
    if (found) *value = it->second;
    self->lock.unlock();
    return found;
  }
  static bool insert(void *map, uint64_t key, uint64_t value) {
    auto *self = (Locked *)map;
    self->lock.write();
    bool fresh = self->tree.emplace(key, value).second;
    self->lock.unlock();
    return fresh;
  }
  static bool remove(void *map, uint64_t key) {
    auto *self = (Locked *)map;
    self->lock.write();
    bool removed = self->tree.erase(key) != 0;
    self->lock.unlock();
    return removed;
  }
  static bool replace(void *map, uint64_t key, uint64_t value) {
    auto *self = (Locked *)map;
    self->lock.write();
    bool fresh = self->tree.insert_or_assign(key, value).second;
    self->lock.unlock();
    return !fresh;
  }
  static uint64_t scan(void *map, uint64_t from, uint64_t count) {
    auto *self = (Locked *)map;
    self->lock.read();
    uint64_t sum = 0;
    for (auto it = self->tree.lower_bound(from); it != self->tree.end() && count > 0; ++it, --count) sum += it->second;
    self->lock.unlock();
    return sum;
  }
};

struct Cuckoo {
  using Table = libcuckoo::cuckoohash_map<uint64_t, uint64_t, FastHash>;
  static void *create() { return new Table; }
  static void destroy(void *map) { delete (Table *)map; }
  static bool get(void *map, uint64_t key, uint64_t *value) { return ((Table *)map)->find(key, *value); }
  static bool insert(void *map, uint64_t key, uint64_t value) { return ((Table *)map)->insert(key, value); }
  static bool remove(void *map, uint64_t key) { return ((Table *)map)->erase(key); }
};

struct Tbb {
  using Table = tbb::concurrent_hash_map<uint64_t, uint64_t, TbbCompare>;
  static void *create() { return new Table; }
  static void destroy(void *map) { delete (Table *)map; }
  static bool get(void *map, uint64_t key, uint64_t *value) {
    Table::const_accessor found;
    if (!((Table *)map)->find(found, key)) return false;
    *value = found->second;
    return true;
  }
  static bool insert(void *map, uint64_t key, uint64_t value) {
    return ((Table *)map)->insert(std::make_pair(key, value));
  }
  static bool remove(void *map, uint64_t key) { return ((Table *)map)->erase(key); }
};

struct Urcu {
  struct Node {
    struct cds_lfht_node link;
    struct rcu_head head;
    uint64_t key, value;
  };
  // Every thread that reads must be registered as long as it lives.
  struct Registration {
    Registration() { urcu_memb_register_thread(); }
    ~Registration() { urcu_memb_unregister_thread(); }
  };
  static void enter() {
    static thread_local Registration registration;
    (void)registration;
  }
  static int match(struct cds_lfht_node *node, const void *key) {
    return caa_container_of(node, Node, link)->key == *(const uint64_t *)key;
  }
  static void release(struct rcu_head *head) { delete caa_container_of(head, Node, head); }

  static void *create() {
    enter();
    return cds_lfht_new_flavor(1 << 16, 1 << 16, 0, CDS_LFHT_AUTO_RESIZE | CDS_LFHT_ACCOUNTING, &urcu_memb_flavor, nullptr);
  }
  static void destroy(void *) {
    // The process ends with the measurement: freeing node by node would only take time.
  }
  static struct cds_lfht_node *find(void *map, uint64_t key, struct cds_lfht_iter *iter) {
    cds_lfht_lookup((struct cds_lfht *)map, FastHash()(key), match, &key, iter);
    return cds_lfht_iter_get_node(iter);
  }
  static bool get(void *map, uint64_t key, uint64_t *value) {
    enter();
    struct cds_lfht_iter iter;
    urcu_memb_read_lock();
    auto *node = find(map, key, &iter);
    if (node) *value = caa_container_of(node, Node, link)->value;
    urcu_memb_read_unlock();
    return node != nullptr;
  }
  static bool insert(void *map, uint64_t key, uint64_t value) {
    enter();
    auto *fresh = new Node;
    fresh->key = key;
    fresh->value = value;
    cds_lfht_node_init(&fresh->link);
    urcu_memb_read_lock();
    auto *there = cds_lfht_add_unique((struct cds_lfht *)map, FastHash()(key), match, &key, &fresh->link);
    urcu_memb_read_unlock();
    if (there != &fresh->link) delete fresh;
    return there == &fresh->link;
  }
  static bool remove(void *map, uint64_t key) {
    enter();
    struct cds_lfht_iter iter;
    urcu_memb_read_lock();
    auto *node = find(map, key, &iter);
    bool removed = node && cds_lfht_del((struct cds_lfht *)map, node) == 0;
    if (removed) urcu_memb_call_rcu(&caa_container_of(node, Node, link)->head, release);
    urcu_memb_read_unlock();
    return removed;
  }
};

}  // namespace

// The user-space side of the source's test, as it is there: a red-black tree of key, pointer and length, the value in an
// allocation of its own, one pthread_rwlock; an insert searches first and then takes the lock for writing.
struct SourceTree {
  struct Value {
    char *text;
    uint32_t length;
  };
  pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
  std::map<uint64_t, Value> tree;
};

extern "C" void *source_tree_create() { return new SourceTree; }

extern "C" void source_tree_destroy(void *at) {
  auto *self = (SourceTree *)at;
  for (auto &entry : self->tree) free(entry.second.text);
  delete self;
}

extern "C" void source_tree_insert(void *at, uint64_t key, const char *text, uint32_t length) {
  auto *self = (SourceTree *)at;
  pthread_rwlock_rdlock(&self->lock);
  bool there = self->tree.find(key) != self->tree.end();
  pthread_rwlock_unlock(&self->lock);
  if (there) return;
  char *copy = (char *)malloc(length);
  memcpy(copy, text, length);
  pthread_rwlock_wrlock(&self->lock);
  if (!self->tree.emplace(key, SourceTree::Value{copy, length}).second) free(copy);
  pthread_rwlock_unlock(&self->lock);
}

extern "C" bool source_tree_holds(void *at, uint64_t key, const char *text, uint32_t length) {
  auto *self = (SourceTree *)at;
  pthread_rwlock_rdlock(&self->lock);
  auto it = self->tree.find(key);
  bool same = it != self->tree.end() && it->second.length == length && memcmp(it->second.text, text, length) == 0;
  pthread_rwlock_unlock(&self->lock);
  return same;
}

struct Functions {
  void *(*create)();
  bool (*get)(void *, uint64_t, uint64_t *);
  bool (*insert)(void *, uint64_t, uint64_t);
  bool (*remove)(void *, uint64_t);
  bool (*replace)(void *, uint64_t, uint64_t);
  uint64_t (*scan)(void *, uint64_t, uint64_t);
  void (*destroy)(void *);
};

template <class Peer> static constexpr Functions ordered() {
  return {Peer::create, Peer::get, Peer::insert, Peer::remove, Peer::replace, Peer::scan, Peer::destroy};
}
template <class Peer> static constexpr Functions hashed() {
  return {Peer::create, Peer::get, Peer::insert, Peer::remove, nullptr, nullptr, Peer::destroy};
}

extern "C" {
extern const Functions peer_std_map, peer_std_map_bare, peer_absl_btree, peer_cuckoo, peer_tbb, peer_urcu;
const Functions peer_std_map = ordered<Locked<std::map<uint64_t, uint64_t>, RwLock>>();
const Functions peer_std_map_bare = ordered<Locked<std::map<uint64_t, uint64_t>, NoLock>>();
const Functions peer_absl_btree = ordered<Locked<absl::btree_map<uint64_t, uint64_t>, RwLock>>();
const Functions peer_cuckoo = hashed<Cuckoo>();
const Functions peer_tbb = hashed<Tbb>();
const Functions peer_urcu = hashed<Urcu>();
}
