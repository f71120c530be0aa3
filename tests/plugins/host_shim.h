// What the kernel uses of CUDA, for the host: blocks and threads are loops, so that a compiler's sanitizers see them.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)

struct uint2 {
    alignas(8) unsigned int x;
    unsigned int y;
};
struct uint4 {
    alignas(16) unsigned int x;
    unsigned int y, z, w;
};
struct Position {
    unsigned int x;
};
static Position blockIdx, threadIdx, gridDim;

inline float __uint_as_float(unsigned int bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    memcpy(&bits, &value, 4);
    return bits;
}
// Approximate on a GPU, within two units in the last place; here wrong by two, upwards or downwards. Zero for the largest
// divisors (CUDA Programming Guide, intrinsic functions).
inline float __fdividef(float dividend, float divisor) {
    if (fabsf(divisor) > 0x1p126f && std::isfinite(divisor)) return 0.0f;
    const float quotient = dividend / divisor;
    const float way = __float_as_uint(divisor) & 1 ? INFINITY : -INFINITY;
    return quotient == 0.0f || !std::isfinite(quotient) ? quotient : nextafterf(nextafterf(quotient, way), way);
}
