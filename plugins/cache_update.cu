// Writes updates into a KV cache [B, N, S_max, H]: in place if `present` is `cache`; otherwise the other rows are
// copied.
//
// A plane is one head of one sequence: S_max consecutive rows of `row_bytes` bytes. A padded update is a plane, too, so
// a plane's update is one run of bytes (two if it wraps). A packed update [T, N, H] is written token by token. The
// result does not depend on the number of blocks or their order; the launch only decides how fast the kernel is.

template <bool PACKED_UPDATE, bool CIRCULAR_MODE, Type UPDATE, Type CACHE>
struct Config {
    static constexpr bool PACKED = PACKED_UPDATE, CIRCULAR = CIRCULAR_MODE;
    static constexpr Type SOURCE = UPDATE, TARGET = CACHE;
};

struct Sizes {
    int batch, heads, capacity, length;
    Int64 row_bytes;  // of the cache
};

// One cache and its update.
struct Tensors {
    const char* cache;
    const char* update;
    char* present;
    const float* scales;
    int scale_step;  // 1: one scale for each head
};

// Divides blocks among `parts` pieces of work: several blocks for each part, or several parts for each block.
struct Share {
    int part, part_step, chunk, chunk_step;
};

__device__ inline Share share(int block, int blocks, int parts) {
    const int each = parts > 0 && blocks > parts ? blocks / parts : 1;
    return {block / each, blocks / each, block % each, each};
}

// Calls work(Width<w>) with the widest access that divides `bits`: the bitwise "or" of addresses and sizes in bytes.
template <int BYTES> struct Width { static constexpr int VALUE = BYTES; };

template <class Work>
__device__ inline void with_width(unsigned long long bits, const Work& work) {
    if (bits % 16 == 0) work(Width<16>());
    else if (bits % 4 == 0) work(Width<4>());
    else work(Width<1>());
}

__device__ inline unsigned long long address(const void* pointer) {
    return reinterpret_cast<unsigned long long>(pointer);
}

// Moves the bytes [0, size) of a run, chunk by chunk, with several accesses of each thread in flight. source(o) and
// target(o) are the addresses for offset o in the cache's bytes; if source(o) is null, nothing is written there.
template <class Piece, int WIDTH, int FLIGHT, class Source, class Target>
__device__ inline void move_run(Int64 size, const Share& chunks, const Scale& scale, const Source& source,
                                const Target& target) {
    constexpr int STEP = THREADS * WIDTH;
    const Int64 first = static_cast<Int64>(chunks.chunk) * (STEP * FLIGHT) + static_cast<Int64>(threadIdx.x) * WIDTH;
    for (Int64 start = first; start < size; start += static_cast<Int64>(chunks.chunk_step) * (STEP * FLIGHT)) {
        Piece piece[FLIGHT];
        bool present[FLIGHT];
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
            const Int64 offset = start + i * STEP;
            const char* from = offset < size ? source(offset) : nullptr;
            present[i] = from != nullptr;
            if (present[i]) piece[i].load(from);
        }
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
            if (present[i]) piece[i].store(target(start + i * STEP), scale);
        }
    }
}

template <class Chosen>
class Update {
public:
    __device__ Update(const Sizes& sizes, const Tensors& tensors, Integers write_indices, Integers lengths, int block,
                      int blocks)
        : sizes_(sizes), tensors_(tensors), write_indices_(write_indices), lengths_(lengths), block_(block),
          blocks_(blocks), plane_bytes_(sizes.row_bytes * sizes.capacity) {}

    __device__ void run() const {
        if (tensors_.present != tensors_.cache) {
            with_width(sizes_.row_bytes | address(tensors_.cache) | address(tensors_.present),
                       [&](auto width) { copy_rest<decltype(width)::VALUE>(); });
        }
        // RATIO bytes of the update for each byte of the cache.
        with_width(sizes_.row_bytes | address(tensors_.present) | address(tensors_.update) / RATIO, [&](auto width) {
            if constexpr (Chosen::PACKED) write_packed<decltype(width)::VALUE>();
            else write_padded<decltype(width)::VALUE>();
        });
    }

private:
    static constexpr int RATIO = static_cast<int>(sizeof(typename Storage<Chosen::SOURCE>::type));
    static constexpr int FLIGHT = IN_FLIGHT / RATIO;  // the same number of update bytes in flight for any ratio

    __device__ Rows rows(int b) const {
        return rows_of<Chosen>(b, write_indices_, lengths_, sizes_.length, sizes_.capacity);
    }

    __device__ char* plane(char* tensor, Int64 b, int head) const {
        return tensor + (b * sizes_.heads + head) * plane_bytes_;
    }

    __device__ Scale scale(int head) const {
        return Chosen::SOURCE == Type::BYTES ? Scale() : Scale(tensors_.scales[head * tensors_.scale_step]);
    }

    // Copies the rows that no update covers, and no others: those are written at the same time.
    template <int WIDTH>
    __device__ void copy_rest() const {
        using Piece = Fragment<Type::BYTES, Type::BYTES, WIDTH>;
        const int planes = sizes_.batch * sizes_.heads;
        const Share mine = share(block_, blocks_, planes);
        for (int p = mine.part; p < planes; p += mine.part_step) {
            const Rows covered = rows(p / sizes_.heads);
            const Int64 first = covered.first * sizes_.row_bytes, size = covered.count * sizes_.row_bytes;
            const char* cache = tensors_.cache + p * plane_bytes_;
            char* present = tensors_.present + p * plane_bytes_;
            move_run<Piece, WIDTH, IN_FLIGHT>(
                plane_bytes_, mine, Scale(),
                [&](Int64 offset) -> const char* {
                    const Int64 ahead = offset >= first ? offset - first : offset - first + plane_bytes_;
                    return ahead < size ? nullptr : cache + offset;
                },
                [&](Int64 offset) { return present + offset; });
        }
    }

    template <int WIDTH>
    __device__ void write_padded() const {
        using Piece = Fragment<Chosen::SOURCE, Chosen::TARGET, WIDTH>;
        const int planes = sizes_.batch * sizes_.heads;
        const Share mine = share(block_, blocks_, planes);
        for (int p = mine.part; p < planes; p += mine.part_step) {
            const Rows covered = rows(p / sizes_.heads);
            const Int64 first = covered.first * sizes_.row_bytes;
            const Int64 token = static_cast<Int64>(p) * sizes_.length + covered.token;
            const char* update = tensors_.update + token * sizes_.row_bytes * RATIO;
            char* present = tensors_.present + p * plane_bytes_;
            move_run<Piece, WIDTH, FLIGHT>(
                covered.count * sizes_.row_bytes, mine, scale(p % sizes_.heads),
                [&](Int64 offset) { return update + offset * RATIO; },
                [&](Int64 offset) {
                    const Int64 to = first + offset;
                    return present + (Chosen::CIRCULAR && to >= plane_bytes_ ? to - plane_bytes_ : to);
                });
        }
    }

    // A thread finds the row of its token once, and writes the token for several heads.
    template <int WIDTH>
    __device__ void write_packed() const {
        const Int64 pieces = sizes_.row_bytes / WIDTH;  // pieces of one row
        const int lanes = pieces < THREADS ? static_cast<int>(pieces) : THREADS;
        const int tokens = lanes == 0 ? 0 : THREADS / lanes;  // tokens that a block writes at once; 0 if rows are empty
        const int group = static_cast<int>(threadIdx.x) / (lanes == 0 ? 1 : lanes);
        if (group >= tokens) return;
        const Share mine = share(block_, blocks_, (sizes_.heads + IN_FLIGHT - 1) / IN_FLIGHT);
        const Int64 step = static_cast<Int64>(mine.chunk_step) * tokens;
        for (Int64 token = static_cast<Int64>(mine.chunk) * tokens + group; token < sizes_.length; token += step) {
            const int b = sequence_of(static_cast<int>(token), lengths_, sizes_.batch);
            if (b < 0) continue;
            const Rows covered = rows(b);
            const Int64 ahead = token - covered.token;
            if (ahead < 0 || ahead >= covered.count) continue;
            Int64 row = covered.first + ahead;
            if (Chosen::CIRCULAR && row >= sizes_.capacity) row -= sizes_.capacity;
            for (int head = mine.part * IN_FLIGHT; head < sizes_.heads; head += mine.part_step * IN_FLIGHT) {
                for (Int64 lane = static_cast<int>(threadIdx.x) % lanes; lane < pieces; lane += lanes) {
                    for (int i = 0; i < IN_FLIGHT; i += FLIGHT) {
                        write_heads<WIDTH>(b, head + i, token, row, lane * WIDTH);
                    }
                }
            }
        }
    }

    template <int WIDTH>
    __device__ void write_heads(int b, int head, Int64 token, Int64 row, Int64 offset) const {
        Fragment<Chosen::SOURCE, Chosen::TARGET, WIDTH> piece[FLIGHT];
        const char* update = tensors_.update + ((token * sizes_.heads + head) * sizes_.row_bytes + offset) * RATIO;
        char* present = plane(tensors_.present, b, head) + row * sizes_.row_bytes + offset;
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
            if (head + i < sizes_.heads) piece[i].load(update + i * sizes_.row_bytes * RATIO);
        }
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
            if (head + i < sizes_.heads) piece[i].store(present + i * plane_bytes_, scale(head + i));
        }
    }

    Sizes sizes_;
    Tensors tensors_;
    Integers write_indices_, lengths_;
    int block_, blocks_;
    Int64 plane_bytes_;
};
