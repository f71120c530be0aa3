// Which rows of the cache one sequence's update covers. Everything that may be wrong in the input is refused here, so
// that what follows needs no checks.

using Int64 = long long;

// The rows [first, first + count) of the cache, modulo its capacity, take the tokens [token, token + count).
struct Rows {
    Int64 first;
    Int64 token;
    Int64 count;
    bool refused;
};

__device__ inline Rows refused_rows() { return {0, 0, 0, true}; }

// `count` tokens from `token` on, of which the update holds `count` at least, go to the rows from `first` on.
template <bool CIRCULAR>
__device__ inline Rows covered_rows(Int64 first, Int64 token, Int64 count, Int64 capacity) {
    if (count == 0) return {0, token, 0, false};  // a sequence that writes nothing may carry any index
    if (!CIRCULAR) {
        if (first < 0 || count > capacity || first > capacity - count) return refused_rows();
        return {first, token, count, false};
    }
    if (capacity == 0) return refused_rows();
    if (first < 0 || first >= capacity) {  // 64-bit division is slow, and seldom needed
        first %= capacity;
        if (first < 0) first += capacity;
    }
    if (count > capacity) {  // the last tokens win, as if written one after the other
        const Int64 lost = count - capacity;
        return {(first + lost) % capacity, token + lost, capacity, false};
    }
    return {first, token, count, false};
}

// A tensor of int32 or int64. Which one is known at run time only: its few reads are no reason for another kernel.
struct Integers {
    const void* data;
    int bytes;

    __device__ Int64 operator[](int i) const {
        return bytes == 8 ? static_cast<const Int64*>(data)[i] : static_cast<const int*>(data)[i];
    }
};

// The rows of sequence `b`. Padded: `lengths` [B] or null, `length` is S_new. Packed: `lengths` [B + 1], `length` is T.
template <class Config>
__device__ inline Rows rows_of(int b, Integers write_indices, Integers lengths, int length, int capacity) {
    Int64 token = 0, end = length;
    if (Config::PACKED) {
        token = lengths[b];
        end = lengths[b + 1];
    } else if (lengths.data != nullptr) {
        end = lengths[b];
    }
    if (token < 0 || end < token || end > length) return refused_rows();
    return covered_rows<Config::CIRCULAR>(write_indices[b], token, end - token, capacity);
}

// The sequence that a packed token belongs to: the last one that starts at it or before it; -1 if none does. The caller
// checks that it does not end before the token.
__device__ inline int sequence_of(int token, Integers lengths, int batch) {
    int low = 0, high = batch;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (lengths[middle] <= token) low = middle + 1; else high = middle;
    }
    return low - 1;
}

// Cumulative lengths that do not ascend give no sequence to search for.
__device__ inline bool ascending(Integers lengths, int batch) {
    bool ascends = true;
    for (int b = 0; b < batch; ++b) ascends &= lengths[b] <= lengths[b + 1];
    return ascends;
}
