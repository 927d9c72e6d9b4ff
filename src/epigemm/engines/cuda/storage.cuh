// How values are stored: each element type of the dtype table, read from and written to 32-bit words. Header-free; also host C++,
// which takes the portable branches, so that they are tested without a GPU.
//
// A narrow type is rounded to nearest even, once: a double goes through a float rounded to odd, which keeps what decides a tie.

#ifndef EPI_DEVICE
#define EPI_DEVICE __device__ __forceinline__
#endif

using epi_u8 = unsigned char;
using epi_u16 = unsigned short;
using epi_u32 = unsigned int;
using epi_u64 = unsigned long long;
using epi_i64 = long long;

/// The rows of dtypes.py by their short names.
enum class EpiType : int { f16, bf16, f32, f64, c64, c128, e4m3, e5m2, u8, i32, i64 };

EPI_DEVICE constexpr int epi_bytes(EpiType type) {
    return type == EpiType::e4m3 || type == EpiType::e5m2 || type == EpiType::u8 ? 1
           : type == EpiType::f16 || type == EpiType::bf16                       ? 2
           : type == EpiType::f32 || type == EpiType::i32                        ? 4
           : type == EpiType::c128                                               ? 16
                                                                                 : 8;
}

// ---- bits of float and double ----

#ifdef __CUDA_ARCH__
EPI_DEVICE epi_u32 epi_float_bits(float x) { return __float_as_uint(x); }
EPI_DEVICE float epi_bits_float(epi_u32 bits) { return __uint_as_float(bits); }
EPI_DEVICE epi_u64 epi_double_bits(double x) { return static_cast<epi_u64>(__double_as_longlong(x)); }
EPI_DEVICE double epi_bits_double(epi_u64 bits) { return __longlong_as_double(static_cast<epi_i64>(bits)); }
#else
EPI_DEVICE epi_u32 epi_float_bits(float x) { epi_u32 bits; __builtin_memcpy(&bits, &x, 4); return bits; }
EPI_DEVICE float epi_bits_float(epi_u32 bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
EPI_DEVICE epi_u64 epi_double_bits(double x) { epi_u64 bits; __builtin_memcpy(&bits, &x, 8); return bits; }
EPI_DEVICE double epi_bits_double(epi_u64 bits) { double x; __builtin_memcpy(&x, &bits, 8); return x; }
#endif

/// A double as a float that is inexact only in having its last bit set ("round to odd"), so that rounding it again to at most
/// 22 bits gives what rounding the double gives. Source: Boldo and Melquiond, IEEE Transactions on Computers 57(4), 2008.
EPI_DEVICE float epi_to_odd(double x) {
    const float nearest = static_cast<float>(x);
    epi_u32 bits = epi_float_bits(nearest);
    if (!(nearest == nearest) || static_cast<double>(nearest) == x || (bits & 1)) return nearest;
    const double size = x < 0 ? -x : x;
    const bool above = static_cast<double>(epi_bits_float(bits & 0x7fffffffu)) > size;
    return epi_bits_float(above ? bits - 1 : bits + 1);
}

EPI_DEVICE float epi_to_odd(float x) { return x; }

// ---- narrow types ----

/// The code, without sign, of |x| in a format with `mantissa` explicit bits and this exponent bias; codes above `largest` become it.
EPI_DEVICE epi_u32 epi_round_magnitude(float x, int mantissa, int bias, epi_u32 largest) {
    const epi_u32 bits = epi_float_bits(x) & 0x7fffffffu;
    if (bits < static_cast<epi_u32>(128 - bias) << 23) {
        // Below the smallest normal number: adding 2**23 of the format's smallest steps leaves their count in the last bits.
        const epi_u32 steps = static_cast<epi_u32>(127 + 23 + 1 - bias - mantissa) << 23;
        return epi_float_bits(epi_bits_float(bits) + epi_bits_float(steps)) - steps;
    }
    const int drop = 23 - mantissa;
    const epi_u32 rounded = (bits + ((1u << (drop - 1)) - 1) + (bits >> drop & 1)) >> drop;
    const epi_u32 code = rounded - (static_cast<epi_u32>(127 - bias) << mantissa);
    return code < largest ? code : largest;
}

EPI_DEVICE epi_u32 epi_sign(float x, int shift) { return (epi_float_bits(x) >> 31) << shift; }

/// float16: beyond the largest it is infinite, 0x7c00.
EPI_DEVICE epi_u32 epi_f16_bits(float x) {
#ifdef __CUDA_ARCH__
    epi_u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    return epi_sign(x, 15) | (x == x ? epi_round_magnitude(x, 10, 15, 0x7c00) : 0x7fffu);
#endif
}

EPI_DEVICE float epi_f16_value(epi_u32 bits) {
#ifdef __CUDA_ARCH__
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<epi_u16>(bits)));
    return x;
#else
    const bool finite = (bits & 0x7c00) != 0x7c00;
    const float size = epi_bits_float((bits & 0x7fff) << 13) * epi_bits_float(0x77800000);  // 2**112
    const epi_u32 sign = (bits & 0x8000) << 16;
    return epi_bits_float(sign | (finite ? epi_float_bits(size) : 0x7f800000u | (bits & 0x3ff) << 13));
#endif
}

EPI_DEVICE epi_u32 epi_bf16_bits(float x) {
#ifdef __CUDA_ARCH__
    epi_u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    const epi_u32 bits = epi_float_bits(x);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fffu;
#endif
}

EPI_DEVICE float epi_bf16_value(epi_u32 bits) { return epi_bits_float(bits << 16); }

/// fp8 e4m3fn: finite beyond its largest, 448 (0x7e); 0x7f is NaN. SM89 has an instruction, SM80 has not.
EPI_DEVICE epi_u32 epi_e4m3_bits(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    epi_u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return pair & 0xff;
#else
    return epi_sign(x, 7) | (x == x ? epi_round_magnitude(x, 3, 7, 0x7e) : 0x7fu);
#endif
}

EPI_DEVICE float epi_e4m3_value(epi_u32 bits) {
    const float size = epi_bits_float((bits & 0x7f) << 20) * epi_bits_float(0x7b800000);  // 2**120
    return epi_bits_float((bits & 0x80) << 24 | ((bits & 0x7f) == 0x7f ? 0x7fffffffu : epi_float_bits(size)));
}

/// fp8 e5m2: the upper half of a float16; finite beyond its largest, 57344 (0x7b), by the contract of casts.
EPI_DEVICE epi_u32 epi_e5m2_bits(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    epi_u16 pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return pair & 0xff;
#else
    return epi_sign(x, 7) | (x == x ? epi_round_magnitude(x, 2, 15, 0x7b) : 0x7fu);
#endif
}

EPI_DEVICE float epi_e5m2_value(epi_u32 bits) { return epi_f16_value(bits << 8); }

// ---- casts: round to a type, go on in the accumulator's ----

#define EPI_ROUND(name, expression)                                                       \
    EPI_DEVICE float epi_round_##name(float x) { return expression; }                     \
    EPI_DEVICE double epi_round_##name(double wide) { const float x = epi_to_odd(wide); return expression; }

EPI_ROUND(f16, epi_f16_value(epi_f16_bits(x)))
EPI_ROUND(bf16, epi_bf16_value(epi_bf16_bits(x)))
EPI_ROUND(e4m3, epi_e4m3_value(epi_e4m3_bits(x)))
EPI_ROUND(e5m2, epi_e5m2_value(epi_e5m2_bits(x)))
#undef EPI_ROUND

EPI_DEVICE float epi_round_f32(float x) { return x; }
EPI_DEVICE double epi_round_f32(double x) { return static_cast<double>(static_cast<float>(x)); }
EPI_DEVICE float epi_round_f64(float x) { return x; }
EPI_DEVICE double epi_round_f64(double x) { return x; }
EPI_DEVICE float2 epi_round_c64(float2 x) { return x; }
EPI_DEVICE double2 epi_round_c64(double2 x) { return double2{epi_round_f32(x.x), epi_round_f32(x.y)}; }
EPI_DEVICE float2 epi_round_c128(float2 x) { return x; }
EPI_DEVICE double2 epi_round_c128(double2 x) { return x; }

// ---- elements in words: `type` and `index` are constants wherever these are called, so each switch folds ----

EPI_DEVICE epi_u64 epi_take(const epi_u32* words, int bytes, int index) {
    if (bytes == 1) return words[index / 4] >> 8 * (index % 4) & 0xff;
    if (bytes == 2) return words[index / 2] >> 16 * (index % 2) & 0xffff;
    if (bytes == 4) return words[index];
    return words[2 * index] | static_cast<epi_u64>(words[2 * index + 1]) << 32;
}

/// Sets element `index`; elements are set in rising order, so that the first in a word clears it.
EPI_DEVICE void epi_put(epi_u32* words, int bytes, int index, epi_u64 bits) {
    const epi_u32 low = static_cast<epi_u32>(bits);
    if (bytes == 1) words[index / 4] = (index % 4 ? words[index / 4] : 0) | low << 8 * (index % 4);
    else if (bytes == 2) words[index / 2] = (index % 2 ? words[index / 2] : 0) | low << 16 * (index % 2);
    else if (bytes == 4) words[index] = low;
    else {
        words[2 * index] = low;
        words[2 * index + 1] = static_cast<epi_u32>(bits >> 32);
    }
}

EPI_DEVICE void epi_set(float& to, double x) { to = static_cast<float>(x); }
EPI_DEVICE void epi_set(double& to, double x) { to = x; }
EPI_DEVICE void epi_set(float2& to, double x) { to = float2{static_cast<float>(x), 0.0f}; }
EPI_DEVICE void epi_set(double2& to, double x) { to = double2{x, 0.0}; }
EPI_DEVICE void epi_set(float& to, float x) { to = x; }
EPI_DEVICE void epi_set(double& to, float x) { to = x; }
EPI_DEVICE void epi_set(float2& to, float x) { to = float2{x, 0.0f}; }
EPI_DEVICE void epi_set(double2& to, float x) { to = double2{x, 0.0}; }
EPI_DEVICE void epi_set(float& to, double x, double) { to = static_cast<float>(x); }
EPI_DEVICE void epi_set(double& to, double x, double) { to = x; }
EPI_DEVICE void epi_set(float2& to, double x, double y) { to = float2{static_cast<float>(x), static_cast<float>(y)}; }
EPI_DEVICE void epi_set(double2& to, double x, double y) { to = double2{x, y}; }

/// An element widened to the accumulator's type.
template <typename Value>
EPI_DEVICE Value epi_decode(EpiType type, const epi_u32* words, int index) {
    Value value;
    const int bytes = epi_bytes(type) == 16 ? 8 : epi_bytes(type);
    const epi_u64 bits = epi_take(words, bytes, type == EpiType::c128 ? 2 * index : index);
    const epi_u32 low = static_cast<epi_u32>(bits);
    switch (type) {
        case EpiType::f16: epi_set(value, epi_f16_value(low)); break;
        case EpiType::bf16: epi_set(value, epi_bf16_value(low)); break;
        case EpiType::e4m3: epi_set(value, epi_e4m3_value(low)); break;
        case EpiType::e5m2: epi_set(value, epi_e5m2_value(low)); break;
        case EpiType::f32: epi_set(value, epi_bits_float(low)); break;
        case EpiType::f64: epi_set(value, epi_bits_double(bits)); break;
        case EpiType::c64: epi_set(value, epi_bits_float(low), epi_bits_float(static_cast<epi_u32>(bits >> 32))); break;
        case EpiType::c128: epi_set(value, epi_bits_double(bits), epi_bits_double(epi_take(words, 8, 2 * index + 1))); break;
        case EpiType::u8: epi_set(value, static_cast<float>(low)); break;
        case EpiType::i32: epi_set(value, static_cast<double>(static_cast<int>(low))); break;
        case EpiType::i64: epi_set(value, static_cast<double>(static_cast<epi_i64>(bits))); break;
    }
    return value;
}

/// An element as an integer: a seed.
EPI_DEVICE epi_i64 epi_decode_integer(EpiType type, const epi_u32* words, int index) {
    const epi_u64 bits = epi_bytes(type) > 8 ? 0 : epi_take(words, epi_bytes(type), index);
    if (type == EpiType::i64) return static_cast<epi_i64>(bits);
    if (type == EpiType::i32) return static_cast<int>(static_cast<epi_u32>(bits));
    if (type == EpiType::u8) return static_cast<epi_i64>(bits);
    return static_cast<epi_i64>(epi_decode<double>(type, words, index));
}

template <typename Real>
EPI_DEVICE void epi_encode_real(EpiType type, epi_u32* words, int index, Real x) {
    switch (type) {
        case EpiType::f16: epi_put(words, 2, index, epi_f16_bits(epi_to_odd(x))); break;
        case EpiType::bf16: epi_put(words, 2, index, epi_bf16_bits(epi_to_odd(x))); break;
        case EpiType::e4m3: epi_put(words, 1, index, epi_e4m3_bits(epi_to_odd(x))); break;
        case EpiType::e5m2: epi_put(words, 1, index, epi_e5m2_bits(epi_to_odd(x))); break;
        case EpiType::f32: epi_put(words, 4, index, epi_float_bits(static_cast<float>(x))); break;
        case EpiType::f64: epi_put(words, 8, index, epi_double_bits(static_cast<double>(x))); break;
        case EpiType::c64: epi_put(words, 8, index, epi_float_bits(static_cast<float>(x))); break;
        default: break;
    }
}

/// Rounds to the stored type, once.
EPI_DEVICE void epi_encode(EpiType type, epi_u32* words, int index, float x) { epi_encode_real(type, words, index, x); }
EPI_DEVICE void epi_encode(EpiType type, epi_u32* words, int index, double x) { epi_encode_real(type, words, index, x); }

EPI_DEVICE void epi_encode(EpiType type, epi_u32* words, int index, double2 x) {
    if (type == EpiType::c128) {
        epi_put(words, 8, 2 * index, epi_double_bits(x.x));
        epi_put(words, 8, 2 * index + 1, epi_double_bits(x.y));
    } else {
        epi_put(words, 8, index,
                epi_float_bits(static_cast<float>(x.x)) | static_cast<epi_u64>(epi_float_bits(static_cast<float>(x.y))) << 32);
    }
}

EPI_DEVICE void epi_encode(EpiType type, epi_u32* words, int index, float2 x) {
    epi_encode(type, words, index, double2{x.x, x.y});
}

/// Elements `index` (even) and the next. Two floats are rounded and packed by one instruction where there is one for the type.
template <typename Value>
EPI_DEVICE void epi_encode_pair(EpiType type, epi_u32* words, int index, Value first, Value second) {
    epi_encode(type, words, index, first);
    epi_encode(type, words, index + 1, second);
}

#ifdef __CUDA_ARCH__
template <>
EPI_DEVICE void epi_encode_pair<float>(EpiType type, epi_u32* words, int index, float first, float second) {
    epi_u32 pair;
    if (type == EpiType::bf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
        words[index / 2] = pair;
    } else if (type == EpiType::f16) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
        words[index / 2] = pair;
#if __CUDA_ARCH__ >= 890
    } else if (type == EpiType::e4m3 || type == EpiType::e5m2) {
        epi_u16 half;
        if (type == EpiType::e4m3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(half) : "f"(second), "f"(first));
        else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(half) : "f"(second), "f"(first));
        epi_put(words, 2, index / 2, half);
#endif
    } else {
        epi_encode(type, words, index, first);
        epi_encode(type, words, index + 1, second);
    }
}
#endif
