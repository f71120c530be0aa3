// Runs launches of the kernels that choose tokens: cases from one file, what they write to another. Logits end where their
// allocation ends, and begin `shift` bytes past an aligned address.

using Entry = void (*)(
    const void* logits, const void* masks, const void* least, void* out, int keep, int vocab, int blocks, long long pitch);
extern const std::vector<Entry> ENTRIES;

int main(int, char** names) {
    FILE* cases = fopen(names[1], "rb");
    FILE* results = fopen(names[2], "wb");
    Warp warp;
    int64_t x[12];
    while (fread(x, sizeof x, 1, cases) == 1) {
        const int64_t entry = x[0], rows = x[1], keep = x[2], vocab = x[3], blocks = x[4], pitch = x[5];
        const int64_t threads = x[6], backwards = x[7], shift = x[8], size = x[9], written = x[10];
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, size + shift) != 0) exit(4);
        char* logits = static_cast<char*>(memory) + shift;
        if (size != 0 && fread(logits, size, 1, cases) != 1) exit(3);
        std::vector<unsigned> least(rows * keep);
        if (fread(least.data(), sizeof(unsigned), least.size(), cases) != least.size()) exit(3);
        std::vector<unsigned> masks(x[11] / sizeof(unsigned));
        if (fread(masks.data(), sizeof(unsigned), masks.size(), cases) != masks.size()) exit(3);
        std::vector<char> out(rows * keep * written, 0);
        const int64_t warps = rows * keep * blocks * threads / 32;
        gridDim.x = rows * keep * blocks;
        for (int64_t i = 0; i < warps; ++i) {
            const int64_t at = backwards ? warps - 1 - i : i;
            blockIdx.x = at * 32 / threads;
            warp.run(at * 32 % threads, backwards, [&] {
                ENTRIES[entry](logits, x[11] != 0 ? masks.data() : nullptr, least.data(), out.data(), keep, vocab, blocks, pitch);
            });
        }
        fwrite(out.data(), 1, out.size(), results);
        free(memory);
    }
    return fclose(results);
}
