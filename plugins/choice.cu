// Finds the best token of each row of scores, or its highest scores; the host chooses tokens from them.
//
// Scores are compared as integers, so that nothing is rounded, and subnormal numbers keep their values. As in NumPy,
// NaN of either sign is the highest, and -0 equals 0. A key holds a score and, below it, the complement of its token:
// among equal scores, the first token has the highest key. No block waits for another: blocks share rows, and the
// results do not depend on their order.

using Int64 = long long;
using Key = unsigned long long;

struct Float16 {
    using Bits = unsigned short;
    static constexpr unsigned SIGN = 0x8000u, INFINITE = 0x7c00u;
};
struct Bfloat16 {
    using Bits = unsigned short;
    static constexpr unsigned SIGN = 0x8000u, INFINITE = 0x7f80u;
};
struct Float32 {
    using Bits = unsigned int;
    static constexpr unsigned SIGN = 0x80000000u, INFINITE = 0x7f800000u;
};

// Larger for higher scores, never 0: SIGN stands for the number 0, and the distance from SIGN is the number's bits
// without the sign.
template <class Number>
__device__ inline unsigned ordered(unsigned bits) {
    const unsigned size = bits & (Number::SIGN - 1);
    if (size > Number::INFINITE) return Number::SIGN + (Number::SIGN - 1);
    return (bits & Number::SIGN) != 0 ? Number::SIGN - size : Number::SIGN + size;
}

__device__ inline Key key_of(unsigned score, int token) {
    return static_cast<Key>(score) << 32 | ~static_cast<unsigned>(token);
}

// Rows of scores, and this thread's part of a row. Row i is position i % keep of sequence i / keep; sequences begin
// `pitch` bytes apart, positions of a sequence are consecutive. Each row has `blocks` consecutive blocks. A mask has
// one bit for each token of a row; scores of tokens with a 0 bit are skipped, unless they are NaN or infinite, which
// shows that the model is broken.
template <class Number>
class Scores {
public:
    using Bits = typename Number::Bits;

    __device__ Scores(const void* logits, const void* masks, int keep, int vocab, int blocks, Int64 pitch) : vocab_(vocab) {
        const int at = static_cast<int>(blockIdx.x);
        row = at / blocks;
        thread = at % blocks * THREADS + static_cast<int>(threadIdx.x);
        threads_ = blocks * THREADS;
        const char* sequence = static_cast<const char*>(logits) + row / keep * pitch;
        scores_ = reinterpret_cast<const Bits*>(sequence) + static_cast<Int64>(row % keep) * vocab;
        mask_ = masks == nullptr ? nullptr : static_cast<const unsigned*>(masks) + static_cast<Int64>(row) * ((vocab + 31) / 32);
    }

    int row, thread;  // the thread's number among those of the row

    // Calls take(score, token) for this thread's part, tokens ascending. The row is read in aligned pieces of 16 bytes,
    // which the threads take in turn; the first and the last piece may belong to the row only in part.
    template <class Take>
    __device__ void each(const Take& take) const {
        constexpr int EACH = 16 / static_cast<int>(sizeof(Bits));
        const int before = static_cast<int>(reinterpret_cast<unsigned long long>(scores_) % 16 / sizeof(Bits));
        const int pieces = (before + vocab_ + EACH - 1) / EACH;
#pragma unroll 2
        for (int piece = thread; piece < pieces; piece += threads_) {
            const int start = piece * EACH - before;
            if (start >= 0 && start + EACH <= vocab_) {
                const uint4 loaded = *reinterpret_cast<const uint4*>(scores_ + start);
                const unsigned mask = allowed(start, start + EACH - 1);
                Bits bits[EACH];
                memcpy(bits, &loaded, sizeof(bits));
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const unsigned score = ordered<Number>(bits[i]);
                    if ((mask >> i & 1) != 0 || score >= INFINITE) take(score, start + i);
                }
            } else {
                for (int i = start < 0 ? 0 : start; i < start + EACH && i < vocab_; ++i) {
                    const unsigned score = ordered<Number>(scores_[i]);
                    if ((allowed(i, i) & 1) != 0 || score >= INFINITE) take(score, i);
                }
            }
        }
    }

    __device__ Key highest() const {
        unsigned score = 0;
        int token = 0;
        each([&](unsigned found, int at) {
            if (found > score) {
                score = found;
                token = at;
            }
        });
        return key_of(score, token);
    }

private:
    static constexpr unsigned INFINITE = Number::SIGN + Number::INFINITE;

    // Returns the mask bits of up to 32 tokens, from `first` on.
    __device__ unsigned allowed(int first, int last) const {
        if (mask_ == nullptr) return 0xffffffffu;
        return static_cast<unsigned>((static_cast<Key>(mask_[last >> 5]) << 32 | mask_[first >> 5]) >> (first & 31));
    }

    const Bits* scores_;
    const unsigned* mask_;
    int vocab_, threads_;
};

// Returns the highest key of the lanes whose numbers differ from this lane's only in the bits from `last` to 16.
__device__ inline Key highest_of_lanes(Key top, int last) {
    for (int lanes = 16; lanes >= last; lanes /= 2) {
        const Key other = __shfl_xor_sync(0xffffffffu, top, lanes);
        if (other > top) top = other;
    }
    return top;
}

// Writes the highest key of each row to best[row], which must be 0 before. A row without an allowed token gets score 0.
template <class Number>
__device__ inline void best_token(const Scores<Number>& scores, Key* best) {
    const Key mine = scores.highest(), top = highest_of_lanes(mine, 1);
    if (mine == top) atomicMax(best + scores.row, mine);
}

// Writes the highest score of each of the sets into which the threads divide a row, SETS per warp; 0 for an empty set.
// At least n scores of the row reach the n-th highest of these maxima.
template <class Number>
__device__ inline void set_maxima(const Scores<Number>& scores, unsigned* maxima, int blocks) {
    const Key top = highest_of_lanes(scores.highest(), SETS);
    const int warp = scores.thread / 32, lane = scores.thread % 32, warps = blocks * (THREADS / 32);
    unsigned* row = maxima + static_cast<Int64>(scores.row) * warps * SETS;
    if (lane < SETS) row[warp * SETS + lane] = static_cast<unsigned>(top >> 32);
}

// Writes all keys of a row whose score is at least least[row], in any order, after their count, which must be 0 before.
// If there are more than CANDIDATES, only the count is right.
template <class Number>
__device__ inline void candidates(const Scores<Number>& scores, const unsigned* least, Key* lists) {
    const unsigned threshold = least[scores.row];
    Key* list = lists + static_cast<Int64>(scores.row) * (1 + CANDIDATES);
    scores.each([&](unsigned score, int token) {
        if (score < threshold) return;
        const Key place = atomicAdd(list, 1);
        if (place < CANDIDATES) list[1 + place] = key_of(score, token);
    });
}
