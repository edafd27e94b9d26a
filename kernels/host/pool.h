// Threads that share a piece of work and sleep in between. Whoever has work never waits for one
// that has not begun: what nobody has taken it does itself, so that a thread which another program
// keeps from running costs its share and no more.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

class Pool {
    std::mutex lock, owner;
    std::condition_variable wake, left;
    std::vector<std::thread> helpers;
    void (*work)(void*, long) = nullptr;
    void* with = nullptr;
    long count = 0, wanted = 0, inside = 0, turn = 0;
    std::atomic<long> next{0};

    void take() {
        for (long i; (i = next.fetch_add(1)) < count;) work(with, i);
    }
    void help() {
        std::unique_lock<std::mutex> held(lock);
        for (long seen = 0;;) {
            wake.wait(held, [&] { return turn != seen && wanted > 0; });
            seen = turn;
            wanted--;
            inside++;
            held.unlock();
            take();
            held.lock();
            if (!--inside) left.notify_one();
        }
    }

public:
    // work(with, i) for all i below n, on at most so many threads, this one included
    void run(long n, long threads, void (*f)(void*, long), void* arg) {
        std::unique_lock<std::mutex> mine(owner, std::try_to_lock);
        if (n < 2 || threads < 2 || !mine) {
            for (long i = 0; i < n; i++) f(arg, i);
            return;
        }
        {
            std::lock_guard<std::mutex> held(lock);
            while ((long)helpers.size() < threads - 1) {
                helpers.emplace_back([this] { help(); });
                helpers.back().detach();
            }
            work = f, with = arg, count = n, wanted = threads - 1, turn++;
            next = 0;
        }
        for (long i = 1; i < threads && i < n; i++) wake.notify_one();
        take();
        std::unique_lock<std::mutex> held(lock);
        wanted = 0;
        left.wait(held, [&] { return !inside; });
    }
};
