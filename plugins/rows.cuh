// The rows of the cache that one sequence's update covers. Invalid input is refused here, so that later code needs no
// checks.

using Int64 = long long;

// The rows [first, first + count) of the cache, modulo its capacity, take the tokens [token, token + count).
struct Rows {
    Int64 first;
    Int64 token;
    Int64 count;
};

__device__ inline Rows no_rows() { return {0, 0, 0}; }

// Returns the rows from `first` on for `count` tokens from `token` on; the update must hold all of them.
template <bool CIRCULAR>
__device__ inline Rows covered_rows(Int64 first, Int64 token, Int64 count, Int64 capacity) {
    if (count == 0) return no_rows();  // a sequence that writes nothing may have any index
    if (!CIRCULAR) {
        if (first < 0 || count > capacity || first > capacity - count) return no_rows();
        return {first, token, count};
    }
    if (capacity == 0) return no_rows();
    if (first < 0 || first >= capacity) {  // 64-bit division is slow, and seldom needed
        first %= capacity;
        if (first < 0) first += capacity;
    }
    if (count > capacity) {  // the last tokens win, as if written one after the other
        const Int64 lost = count - capacity;
        return {(first + lost) % capacity, token + lost, capacity};
    }
    return {first, token, count};
}

// A tensor of int32 or int64. The type is an argument: the few reads do not justify another kernel.
struct Integers {
    const void* data;
    int bytes;

    __device__ Int64 operator[](int i) const {
        return bytes == 8 ? static_cast<const Int64*>(data)[i] : static_cast<const int*>(data)[i];
    }
};

// The rows of sequence `b`. Padded: no `lengths`, `length` is S_new. Packed: `lengths` [B + 1], `length` is T.
template <class Config>
__device__ inline Rows rows_of(int b, Integers write_indices, Integers lengths, int length, int capacity) {
    Int64 token = 0, end = length;
    if (Config::PACKED) {
        token = lengths[b];
        end = lengths[b + 1];
    }
    if (token < 0 || end < token || end > length) return no_rows();
    return covered_rows<Config::CIRCULAR>(write_indices[b], token, end - token, capacity);
}

// Returns the sequence of a packed token: the last one that starts at or before the token; -1 if there is none. The
// caller checks that the sequence does not end before the token.
__device__ inline int sequence_of(int token, Integers lengths, int batch) {
    int low = 0, high = batch;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (lengths[middle] <= token) low = middle + 1; else high = middle;
    }
    return low - 1;
}
