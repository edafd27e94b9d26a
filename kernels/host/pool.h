// Threads that share a piece of work and sleep in between. Whoever has work never
// waits for one that has not begun: what nobody has taken it does itself, so that
// a thread which another program keeps from running costs its share and no more.
// A thread that has nothing to do looks for more during IDLE before it sleeps,
// for products follow each other faster than a sleeper wakes; while it looks it
// lets everybody else run first. Who waits for the last piece sleeps after LAST:
// if the one that has it cannot run, it can on the processor that this leaves
// idle.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

class Pool {
    static constexpr std::chrono::microseconds IDLE{200}, LAST{50};
    std::mutex lock, owner;
    std::condition_variable wake, left;
    std::vector<std::thread> helpers;
    void (*work)(void*, long) = nullptr;
    void* with = nullptr;
    long count = 0, wanted = 0, asleep = 0;
    std::atomic<long> next{0};
    std::atomic<long> inside{0};
    std::atomic<long> turn{0};

    static void pause() {
#if defined(__x86_64__)
        for (int i = 0; i < 16; i++)
            __builtin_ia32_pause();
#endif
        std::this_thread::yield();
    }
    // Until it is done, but not for longer than that; is it?
    template <class F> static bool look(std::chrono::microseconds most, F done) {
        auto end = std::chrono::steady_clock::now() + most;
        do {
            for (int i = 0; i < 8; i++) {
                if (done())
                    return true;
                pause();
            }
        } while (std::chrono::steady_clock::now() < end);
        return false;
    }
    void take() {
        for (long i; (i = next.fetch_add(1)) < count;)
            work(with, i);
    }
    void help() {
        for (long seen = 0;;) {
            look(IDLE, [&] { return turn != seen; });
            std::unique_lock<std::mutex> held(lock);
            asleep++;
            wake.wait(held, [&] { return turn != seen; });
            asleep--;
            seen = turn;
            if (wanted < 1)
                continue;
            wanted--;
            inside++;
            held.unlock();
            take();
            held.lock();
            if (!--inside)
                left.notify_one();
        }
    }
    void begin(long n, long threads, void (*f)(void*, long), void* arg) {
        std::lock_guard<std::mutex> held(lock);
        while ((long)helpers.size() < threads - 1) {
            helpers.emplace_back([this] { help(); });
            helpers.back().detach();
        }
        work = f, with = arg, count = n, wanted = threads - 1;
        next = 0;
        turn++;
        for (long i = 1; i < threads && i <= asleep; i++)
            wake.notify_one();
    }
    void end() {
        {
            std::lock_guard<std::mutex> held(lock);
            wanted = 0;
        }
        if (look(LAST, [&] { return !inside; }))
            return;
        std::unique_lock<std::mutex> held(lock);
        left.wait(held, [&] { return !inside; });
    }

public:
    // work(with, i) for all i below n, on at most so many threads, this one
    // included
    void run(long n, long threads, void (*f)(void*, long), void* arg) {
        std::unique_lock<std::mutex> mine(owner, std::try_to_lock);
        if (n < 2 || threads < 2 || !mine) {
            for (long i = 0; i < n; i++)
                f(arg, i);
            return;
        }
        begin(n, threads, f, arg);
        take();
        end();
    }
};

// Never destroyed: when a process ends, threads still sleep in it.
static Pool& pool = *new Pool;
