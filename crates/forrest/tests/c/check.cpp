// The same header from C++: a small owner class, as a C++ program would write it.
#include <forrest.h>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>

class Store {
    FORREST *handle_ = nullptr;

    static void check(int code) {
        if (code != FORREST_OK) throw std::runtime_error(forrest_error_text(code));
    }

public:
    Store() { check(forrest_open(nullptr, nullptr, &handle_)); }
    ~Store() { forrest_close(handle_); }
    Store(const Store &) = delete;
    void set(const std::string &key, const std::string &value) {
        check(forrest_set(handle_, key.data(), key.size(), value.data(), value.size()));
    }
    std::string get(const std::string &key) {
        std::string value(4096, '\0');
        size_t length = 0;
        check(forrest_get(handle_, key.data(), key.size(), &value[0], value.size(), &length));
        value.resize(length);
        return value;
    }
};

int main() {
    Store store;
    store.set("language", "C++");
    if (store.get("language") != "C++") return 1;
    try {
        store.get("missing");
        return 1;
    } catch (const std::runtime_error &error) {
        if (std::string(error.what()) != "not found") return 1;
    }
    std::puts("ok");
}
