// The epilogue language's functions in CUDA C++, without a header: NVRTC declares the mathematical functions itself.
// Each is overloaded for float and double; `ops.py` names them. NaN goes through; gelu, silu, mish and hardswish are 0 at -inf.
#pragma once

#define EPI_FN static __device__ __forceinline__

// ---------------------------------------------------------------- complex arithmetic

EPI_FN float2 operator+(float2 x, float2 y) { return {x.x + y.x, x.y + y.y}; }
EPI_FN float2 operator-(float2 x, float2 y) { return {x.x - y.x, x.y - y.y}; }
EPI_FN float2 operator-(float2 x) { return {-x.x, -x.y}; }
EPI_FN float2 operator*(float2 x, float2 y) { return {x.x * y.x - x.y * y.y, x.x * y.y + x.y * y.x}; }
EPI_FN double2 operator+(double2 x, double2 y) { return {x.x + y.x, x.y + y.y}; }
EPI_FN double2 operator-(double2 x, double2 y) { return {x.x - y.x, x.y - y.y}; }
EPI_FN double2 operator-(double2 x) { return {-x.x, -x.y}; }
EPI_FN double2 operator*(double2 x, double2 y) { return {x.x * y.x - x.y * y.y, x.x * y.y + x.y * y.x}; }

// Smith's division: the larger part of y is divided out first, so that |y|^2 neither overflows nor underflows.
// Source: R. L. Smith, "Algorithm 116: Complex division", CACM 5 (1962).
template <class C, class R>
EPI_FN C epi_smith(C x, C y, bool real_is_larger) {
    if (real_is_larger) {
        R ratio = y.y / y.x, scale = R(1) / (y.x + y.y * ratio);
        return {(x.x + x.y * ratio) * scale, (x.y - x.x * ratio) * scale};
    }
    R ratio = y.x / y.y, scale = R(1) / (y.y + y.x * ratio);
    return {(x.x * ratio + x.y) * scale, (x.y * ratio - x.x) * scale};
}
EPI_FN float2 operator/(float2 x, float2 y) { return epi_smith<float2, float>(x, y, fabsf(y.x) >= fabsf(y.y)); }
EPI_FN double2 operator/(double2 x, double2 y) { return epi_smith<double2, double>(x, y, fabs(y.x) >= fabs(y.y)); }

// ---------------------------------------------------------------- elementary functions

EPI_FN float epi_square(float x) { return x * x; }
EPI_FN double epi_square(double x) { return x * x; }
EPI_FN float epi_power(float x, float exponent) { return powf(x, exponent); }
EPI_FN double epi_power(double x, double exponent) { return pow(x, exponent); }
EPI_FN float epi_abs(float x) { return fabsf(x); }
EPI_FN double epi_abs(double x) { return fabs(x); }
EPI_FN float epi_exp(float x) { return expf(x); }
EPI_FN double epi_exp(double x) { return exp(x); }
EPI_FN float epi_log(float x) { return logf(x); }
EPI_FN double epi_log(double x) { return log(x); }
EPI_FN float epi_sqrt(float x) { return sqrtf(x); }
EPI_FN double epi_sqrt(double x) { return sqrt(x); }
EPI_FN float epi_rsqrt(float x) { return rsqrtf(x); }
EPI_FN double epi_rsqrt(double x) { return rsqrt(x); }
EPI_FN float epi_erf(float x) { return erff(x); }
EPI_FN double epi_erf(double x) { return erf(x); }

// 2^x by the unit that has it, within 2 units in the last place; no exponent of a finite result is lost below 2^-126 that matters here.
EPI_FN float epi_exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// x / y within 2 units in the last place; 0 where |y| >= 2^126, and where y is inf.
EPI_FN float epi_divide_fast(float x, float y) { return __fdividef(x, y); }

// The library's tanhf: a polynomial near 0, an exponential beyond.
EPI_FN float epi_tanh(float x) { return tanhf(x); }
EPI_FN double epi_tanh(double x) { return tanh(x); }

EPI_FN float epi_sigmoid(float x) { return epi_divide_fast(1.0f, 1.0f + expf(-x)); }
EPI_FN double epi_sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

// ---------------------------------------------------------------- selection: fmaxf and fminf would drop a NaN

EPI_FN float epi_maximum(float x, float y) {
#if __CUDA_ARCH__ >= 800
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
#else
    return x > y || x != x ? x : y;
#endif
}
EPI_FN float epi_minimum(float x, float y) {
#if __CUDA_ARCH__ >= 800
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
#else
    return x < y || x != x ? x : y;
#endif
}
EPI_FN double epi_maximum(double x, double y) { return x > y || x != x ? x : y; }
EPI_FN double epi_minimum(double x, double y) { return x < y || x != x ? x : y; }

// ---------------------------------------------------------------- activations

EPI_FN float epi_relu(float x) { return epi_maximum(x, 0.0f); }
EPI_FN double epi_relu(double x) { return epi_maximum(x, 0.0); }
EPI_FN float epi_leaky_relu(float x, float slope) { return x > 0.0f ? x : x * slope; }
EPI_FN double epi_leaky_relu(double x, double slope) { return x > 0.0 ? x : x * slope; }

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3): one exponential, no cancellation.
// Constants are -2 sqrt(2 / pi) log2(e) and 0.044715 times it. Below -20 the quotient is 0 for every x; -inf would give NaN.
EPI_FN float epi_gelu_tanh(float x) {
    x = x < -20.0f ? -20.0f : x;
    float t = x * fmaf(x * x, -0.10294324f, -2.3022082f);
    return epi_divide_fast(x, 1.0f + epi_exp2_fast(t));
}
EPI_FN double epi_gelu_tanh(double x) {
    x = x < -40.0 ? -40.0 : x;
    return x / (1.0 + exp(x * fma(x * x, -0.07135481627260025, -1.5957691216057308)));
}
EPI_FN float epi_gelu_none(float x) {
    x = x < -20.0f ? -20.0f : x;
    return 0.5f * x * (1.0f + erff(x * 0.70710678f));
}
EPI_FN double epi_gelu_none(double x) {
    x = x < -40.0 ? -40.0 : x;
    return 0.5 * x * (1.0 + erf(x * 0.70710678118654752));
}

EPI_FN float epi_silu(float x) {
    x = x < -200.0f ? -200.0f : x;
    return epi_divide_fast(x, 1.0f + expf(-x));
}
EPI_FN double epi_silu(double x) {
    x = x < -1000.0 ? -1000.0 : x;
    return x / (1.0 + exp(-x));
}

// max(x, 0) + log1p(exp(-|x|)): neither overflows nor loses the tail.
EPI_FN float epi_softplus(float x) { return epi_relu(x) + log1pf(expf(-fabsf(x))); }
EPI_FN double epi_softplus(double x) { return epi_relu(x) + log1p(exp(-fabs(x))); }

// x * tanh(log1p(e)) with e = exp(x) is x * n / (n + 2) with n = e (e + 2); beyond 20 (40) the factor is 1.
EPI_FN float epi_mish(float x) {
    x = x < -200.0f ? -200.0f : x;
    float e = expf(x > 20.0f ? 20.0f : x), n = e * (e + 2.0f);
    return x * epi_divide_fast(n, n + 2.0f);
}
EPI_FN double epi_mish(double x) {
    x = x < -1000.0 ? -1000.0 : x;
    double e = exp(x > 40.0 ? 40.0 : x), n = e * (e + 2.0);
    return x * (n / (n + 2.0));
}

EPI_FN float epi_hardswish(float x) {
    x = x < -3.0f ? -3.0f : x;
    return x * (epi_minimum(x + 3.0f, 6.0f) * 0.16666667f);
}
EPI_FN double epi_hardswish(double x) {
    x = x < -3.0 ? -3.0 : x;
    return x * (epi_minimum(x + 3.0, 6.0) * (1.0 / 6.0));
}

// ---------------------------------------------------------------- random numbers

// float32 in [0, 1) of an element: Philox4x32-10, counter (column / 4, row, batch, 0), word column % 4.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
EPI_FN float epi_uniform(unsigned long long seed, unsigned row, unsigned column, unsigned batch) {
    unsigned c0 = column >> 2, c1 = row, c2 = batch, c3 = 0;
    unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
#pragma unroll
    for (int i = 0; i < 10; ++i) {
        unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    unsigned word = column & 2 ? (column & 1 ? c3 : c2) : (column & 1 ? c1 : c0);
    return (word >> 8) * 5.9604644775390625e-8f;
}
