// A warp for the host: 32 contexts that take turns, each until it shuffles. What lanes hand over is kept for two turns, so
// that nobody's next shuffle overwrites what others have still to read.
#include <functional>
#include <ucontext.h>

using Key64 = unsigned long long;

class Warp {
public:
    Warp() {
        for (auto& stack : stacks_) stack.resize(1 << 15);
    }

    // Runs `work` in the threads first .. first + 31 of a block.
    void run(unsigned first, bool backwards, const std::function<void()>& work) {
        work_ = &work;
        current_ = this;
        for (int i = 0; i < 32; ++i) prepare(i);
        for (int left = 32; left > 0;) {
            for (int i = 0; i < 32; ++i) {
                lane_ = backwards ? 31 - i : i;
                if (done_[lane_]) exit(5);  // others shuffle more often than it did
                threadIdx.x = first + lane_;
                swapcontext(&scheduler_, &lanes_[lane_]);
                left -= done_[lane_];
            }
            if (left != 0 && left != 32) exit(5);
        }
    }

    static Key64 shuffle(Key64 value, int lanes) {
        Warp& warp = *current_;
        const int me = warp.lane_, turn = warp.turns_[me]++ % 2;
        warp.given_[turn][me] = value;
        swapcontext(&warp.lanes_[me], &warp.scheduler_);
        return warp.given_[turn][me ^ lanes];
    }

private:
    void prepare(int i) {
        turns_[i] = 0;
        done_[i] = false;
        getcontext(&lanes_[i]);
        lanes_[i].uc_stack.ss_sp = stacks_[i].data();
        lanes_[i].uc_stack.ss_size = stacks_[i].size();
        lanes_[i].uc_link = &scheduler_;
        makecontext(&lanes_[i], begin, 0);
    }

    static void begin() {
        Warp& warp = *current_;
        (*warp.work_)();
        warp.done_[warp.lane_] = true;
    }

    static Warp* current_;
    const std::function<void()>* work_ = nullptr;
    std::vector<char> stacks_[32];
    ucontext_t scheduler_, lanes_[32];
    Key64 given_[2][32];
    int turns_[32], lane_ = 0;
    bool done_[32];
};
Warp* Warp::current_ = nullptr;

inline Key64 __shfl_xor_sync(unsigned mask, Key64 value, int lanes) {
    if (mask != 0xffffffffu) exit(5);
    return Warp::shuffle(value, lanes);
}

inline Key64 atomicAdd(Key64* place, Key64 value) {
    const Key64 old = *place;
    *place += value;
    return old;
}

inline Key64 atomicMax(Key64* place, Key64 value) {
    const Key64 old = *place;
    if (value > old) *place = value;
    return old;
}
