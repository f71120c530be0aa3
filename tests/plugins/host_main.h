// Runs launches that it reads from one file, and writes their outputs to another. Every tensor has its own allocation,
// which ends where the tensor ends; the very large ones are pages that exist once they are touched.

using Entry = void (*)(const std::vector<char*>& inputs, const std::vector<int>& scalars,
                       const std::vector<char*>& outputs);
extern const std::vector<Entry> ENTRIES;

constexpr int64_t HUGE_BYTES = 1ll << 31;

struct Reader {
    FILE* file;

    bool read(void* target, size_t size) { return size == 0 || fread(target, size, 1, file) == 1; }
    int64_t number() {
        int64_t value;
        if (!read(&value, sizeof value)) exit(3);
        return value;
    }
};

int main(int, char** names) {
    Reader reader = {fopen(names[1], "rb")};
    FILE* results = fopen(names[2], "wb");
    for (int64_t cases = reader.number(); cases > 0; --cases) {
        const Entry entry = ENTRIES[reader.number()];
        const unsigned blocks = reader.number(), threads = reader.number();
        const bool backwards = reader.number();
        std::vector<void*> allocations;
        std::vector<std::pair<void*, size_t>> mappings;
        std::vector<char*> inputs, outputs;
        std::vector<std::pair<int64_t, int64_t>> seen;  // of each output: offset and bytes
        const auto allocate = [&](size_t size, size_t shift) {
            void* memory = nullptr;
            if (size >= HUGE_BYTES) {
                memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
                if (memory == MAP_FAILED) exit(4);
                mappings.push_back({memory, size});
                return static_cast<char*>(memory);
            }
            if (posix_memalign(&memory, 64, size + shift) != 0) exit(4);
            allocations.push_back(memory);
            return static_cast<char*>(memory) + shift;
        };
        for (int64_t count = reader.number(); count > 0; --count) {
            const int64_t size = reader.number(), shift = reader.number(), offset = reader.number();
            inputs.push_back(allocate(size, shift));
            if (!reader.read(inputs.back() + offset, reader.number())) exit(3);
        }
        std::vector<int> scalars(reader.number());
        for (int& scalar : scalars) scalar = reader.number();
        for (int64_t count = reader.number(); count > 0; --count) {
            const int64_t size = reader.number(), shift = reader.number(), alias = reader.number();
            outputs.push_back(alias < 0 ? allocate(size, shift) : inputs[alias]);
            if (alias < 0 && size < HUGE_BYTES) memset(outputs.back(), 0xcd, size);
            seen.push_back({reader.number(), reader.number()});
        }
        std::vector<unsigned> run(reader.number());
        for (unsigned& block : run) block = reader.number();
        gridDim.x = blocks;
        for (unsigned i = 0; i < run.size() * threads; ++i) {
            const unsigned thread = backwards ? run.size() * threads - 1 - i : i;
            blockIdx.x = run[thread / threads];
            threadIdx.x = thread % threads;
            entry(inputs, scalars, outputs);
        }
        for (size_t i = 0; i < outputs.size(); ++i) fwrite(outputs[i] + seen[i].first, 1, seen[i].second, results);
        for (void* memory : allocations) free(memory);
        for (const auto& [memory, size] : mappings) munmap(memory, size);
    }
    return fclose(results);
}
