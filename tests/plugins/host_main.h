// Runs launches that it reads from one file, and writes their outputs to another. Every tensor has its own allocation,
// which ends where the tensor ends.

using Entry = void (*)(const std::vector<char*>& inputs, const std::vector<int>& scalars,
                       const std::vector<char*>& outputs);
extern const std::vector<Entry> ENTRIES;

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
        std::vector<char*> allocations, inputs, outputs;
        std::vector<size_t> sizes;
        const auto allocate = [&](size_t size, size_t shift) {
            char* memory = nullptr;
            if (posix_memalign(reinterpret_cast<void**>(&memory), 64, size + shift) != 0) exit(4);
            allocations.push_back(memory);
            return memory + shift;
        };
        for (int64_t count = reader.number(); count > 0; --count) {
            const int64_t size = reader.number(), shift = reader.number();
            inputs.push_back(allocate(size, shift));
            if (!reader.read(inputs.back(), size)) exit(3);
        }
        std::vector<int> scalars(reader.number());
        for (int& scalar : scalars) scalar = reader.number();
        for (int64_t count = reader.number(); count > 0; --count) {
            const int64_t size = reader.number(), shift = reader.number(), alias = reader.number();
            outputs.push_back(alias < 0 ? allocate(size, shift) : inputs[alias]);
            if (alias < 0) memset(outputs.back(), 0xcd, size);
            sizes.push_back(size);
        }
        gridDim.x = blocks;
        for (unsigned i = 0; i < blocks * threads; ++i) {
            const unsigned thread = backwards ? blocks * threads - 1 - i : i;
            blockIdx.x = thread / threads;
            threadIdx.x = thread % threads;
            entry(inputs, scalars, outputs);
        }
        for (size_t i = 0; i < outputs.size(); ++i) fwrite(outputs[i], 1, sizes[i], results);
        for (char* memory : allocations) free(memory);
    }
    return fclose(results);
}
