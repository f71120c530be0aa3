// The best token of each row of scores: the highest score, and the first token that has it. As NumPy's argmax has it, NaN
// of either sign is higher than everything, and -0 equals 0.
//
// Scores are compared as integers, so that nothing rounds, and subnormal numbers are what they are. A key holds a score
// and, below it, the complement of its token: the highest key is the answer, in whatever order keys come. No block waits
// for another: rows are shared out over blocks, and each warp puts the highest of its keys into `best` (zeros before).

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

// Larger for higher scores, never 0: SIGN is 0, and the distance from it the number's own bits without the sign.
template <class Number>
__device__ inline unsigned ordered(unsigned bits) {
    const unsigned size = bits & (Number::SIGN - 1);
    if (size > Number::INFINITE) return Number::SIGN + (Number::SIGN - 1);
    return (bits & Number::SIGN) != 0 ? Number::SIGN - size : Number::SIGN + size;
}

// The highest key among the pieces first, first + step, ... of a row. Pieces are the aligned 16 bytes that memory has:
// of the first and the last one, the row may hold a part only.
template <class Number>
__device__ inline Key highest_key(const typename Number::Bits* row, int vocab, int first, int step) {
    using Bits = typename Number::Bits;
    constexpr int EACH = 16 / static_cast<int>(sizeof(Bits));
    const int before = static_cast<int>(reinterpret_cast<unsigned long long>(row) % 16 / sizeof(Bits));
    unsigned score = 0, token = 0;
    const auto take = [&](Bits bits, int at) {
        const unsigned found = ordered<Number>(bits);
        if (found > score) {  // tokens ascend: of equal scores the first one stays
            score = found;
            token = static_cast<unsigned>(at);
        }
    };
    const int pieces = (before + vocab + EACH - 1) / EACH;
#pragma unroll 4
    for (int piece = first; piece < pieces; piece += step) {
        const int start = piece * EACH - before;
        if (start >= 0 && start + EACH <= vocab) {
            const uint4 loaded = *reinterpret_cast<const uint4*>(row + start);
            Bits bits[EACH];
            memcpy(bits, &loaded, sizeof(bits));
#pragma unroll
            for (int i = 0; i < EACH; ++i) take(bits[i], start + i);
        } else {
            for (int i = start < 0 ? 0 : start; i < start + EACH && i < vocab; ++i) take(row[i], i);
        }
    }
    return static_cast<Key>(score) << 32 | ~token;
}

// Row i of `best` has position i % keep of the sequence i / keep. Sequences begin `pitch` bytes apart; positions of one
// follow each other. Every row has `blocks` blocks, one after the other.
template <class Number>
__device__ inline void best_token(const char* logits, Key* best, int keep, int vocab, int blocks, Int64 pitch) {
    const int row = static_cast<int>(blockIdx.x) / blocks, block = static_cast<int>(blockIdx.x) % blocks;
    const auto* sequence = reinterpret_cast<const typename Number::Bits*>(logits + row / keep * pitch);
    const Key mine = highest_key<Number>(sequence + static_cast<Int64>(row % keep) * vocab, vocab,
                                         block * THREADS + static_cast<int>(threadIdx.x), blocks * THREADS);
    Key top = mine;
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const Key other = __shfl_xor_sync(0xffffffffu, top, lanes);
        if (other > top) top = other;
    }
    if (mine == top) atomicMax(best + row, mine);
}
