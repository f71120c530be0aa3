// Converts an update to cache bytes: unchanged, or by ONNX QuantizeLinear with a float32 scale and zero point 0.

enum class Type { BYTES, FLOAT16, BFLOAT16, FLOAT32, INT8, FLOAT8E4M3FN };

template <int WIDTH> struct VectorOf;  // the bytes that one access moves
template <> struct VectorOf<1> { using type = unsigned char; };
template <> struct VectorOf<2> { using type = unsigned short; };  // a half-precision number on its own
template <> struct VectorOf<4> { using type = unsigned int; };
template <> struct VectorOf<8> { using type = uint2; };
template <> struct VectorOf<16> { using type = uint4; };
template <int WIDTH> using Vector = typename VectorOf<WIDTH>::type;

template <Type> struct Storage { using type = unsigned short; };
template <> struct Storage<Type::FLOAT32> { using type = unsigned int; };
template <> struct Storage<Type::BYTES> { using type = unsigned char; };

template <Type TYPE>
__device__ inline float to_float(typename Storage<TYPE>::type bits) {
    if (TYPE == Type::FLOAT32) return __uint_as_float(bits);
    if (TYPE == Type::BFLOAT16) return __uint_as_float(static_cast<unsigned>(bits) << 16);
    // Shifts the sign and the other bits into a float32. An exponent with bias 15, read with bias 127, is 2^112 too
    // small, also for subnormal numbers.
    const unsigned extended = static_cast<unsigned>(static_cast<short>(bits) * (1 << 13)) & 0x8fffe000u;
    const float value = __uint_as_float(extended) * 0x1p112f;
    const bool finite = fabsf(value) < 65536.0f;  // larger values stand for infinities and NaN
    return finite ? value : __uint_as_float(__float_as_uint(value) | 0x7f800000u);
}

// Divides many numbers by one scale, rounded as IEEE division if the quotient is in [2^-12, 512): smaller ones become
// zero, larger ones saturate. It takes an approximate reciprocal, improves it in two steps, and improves the quotient
// in two steps, each from an exact remainder (Markstein). A plain division would call a subroutine, for which registers
// are saved in memory.
class Scale {
public:
    __device__ Scale() : factor_(1.0f), divisor_(1.0f), reciprocal_(1.0f) {}

    __device__ explicit Scale(float scale) {
        // Keeps reciprocal and remainders away from the ends of the exponent range. Powers of two are exact.
        factor_ = fabsf(scale) < 0x1p-60f ? 0x1p80f : fabsf(scale) > 0x1p60f ? 0x1p-80f : 1.0f;
        divisor_ = scale * factor_;
        reciprocal_ = __fdividef(1.0f, divisor_);
        // false for 0, infinity and NaN
        const bool ordinary = fabsf(reciprocal_) > 0.0f && fabsf(reciprocal_) < 0x1p127f;
        if (ordinary) {
            // To the nearest float, as Markstein's theorem requires ...
            for (int i = 0; i < 2; ++i) reciprocal_ = fmaf(fmaf(-reciprocal_, divisor_, 1.0f), reciprocal_, reciprocal_);
            // ... also if the mantissa is all ones, and the reciprocal slightly above the middle between two floats.
            const bool ones = (~__float_as_uint(divisor_) & 0x7fffffu) == 0;
            if (ones) reciprocal_ = __uint_as_float(__float_as_uint(reciprocal_) | 1u);
        }
    }

    __device__ float divide(float value) const {
        const float dividend = value * factor_;
        const float first = dividend * reciprocal_;
        const float second = fmaf(fmaf(-first, divisor_, dividend), reciprocal_, first);
        const float third = fmaf(fmaf(-second, divisor_, dividend), reciprocal_, second);
        return fabsf(first) >= 0x1p-12f && fabsf(first) < 512.0f ? third : first;  // zeros keep their sign, NaN stays
    }

private:
    float factor_, divisor_, reciprocal_;
};

// Rounds half to even, saturates; NaN becomes -128, as in ONNX's reference.
__device__ inline unsigned char to_int8(float value) {
    return static_cast<unsigned char>(static_cast<int>(rintf(fminf(fmaxf(value, -128.0f), 127.0f))));
}

// Rounds half to even, saturates to +-448 (infinities too); NaN stays NaN. Has no branches, because neighbours differ.
__device__ inline unsigned char to_float8e4m3fn(float value) {
    const unsigned sign = __float_as_uint(value) >> 24 & 0x80u;
    const float size = fminf(fabsf(value), 448.0f);
    const unsigned bits = __float_as_uint(size);
    // Rounds to 3 bits of mantissa; a carry moves the exponent. Below 2^-6, rounds to steps of 2^-9, the last place of
    // 2^14.
    const unsigned normal = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
    const unsigned small = __float_as_uint(size + 0x1p14f) - 0x46800000u;
    const unsigned magnitude = size < 0x1p-6f ? small : normal;
    return static_cast<unsigned char>(sign | (value == value ? magnitude : 0x7fu));
}

// The part of the update that a thread holds between loading it and writing WIDTH bytes of the cache.
template <Type SOURCE, Type TARGET, int WIDTH>
struct Fragment {
    static constexpr int BYTES = WIDTH * static_cast<int>(sizeof(typename Storage<SOURCE>::type));
    static constexpr int PIECE = BYTES < 16 ? BYTES : 16;
    Vector<PIECE> piece[BYTES / PIECE];

    __device__ void load(const char* source) {
#pragma unroll
        for (int i = 0; i < BYTES / PIECE; ++i) piece[i] = reinterpret_cast<const Vector<PIECE>*>(source)[i];
    }

    __device__ void store(char* target, const Scale& scale) const {
        typename Storage<SOURCE>::type element[WIDTH];
        unsigned char quantized[WIDTH];
        memcpy(element, piece, BYTES);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float quotient = scale.divide(to_float<SOURCE>(element[i]));
            quantized[i] = TARGET == Type::INT8 ? to_int8(quotient) : to_float8e4m3fn(quotient);
        }
        Vector<WIDTH> vector;
        memcpy(&vector, quantized, WIDTH);
        *reinterpret_cast<Vector<WIDTH>*>(target) = vector;
    }
};

template <Type TARGET, int WIDTH>
struct Fragment<Type::BYTES, TARGET, WIDTH> {
    Vector<WIDTH> piece;

    __device__ void load(const char* source) { piece = *reinterpret_cast<const Vector<WIDTH>*>(source); }
    __device__ void store(char* target, const Scale&) const { *reinterpret_cast<Vector<WIDTH>*>(target) = piece; }
};
