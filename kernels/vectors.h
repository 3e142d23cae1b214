// Vectors of fp32 numbers as wide as the processor's registers, and the elements that are read into them.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __SSE4_1__
#include <immintrin.h>
#endif

namespace {

#ifndef LANES
#error "LANES is the number of fp32 numbers in a vector register; kernels/processor.py says how many there are"
#endif
constexpr float LOWEST = -1e30f;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

template <class V>
V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline Floats higher(Floats a, Floats b) { return a > b ? a : b; }

// The numbers of the lanes.
inline Words lanes() {
  Words numbers;
  for (int i = 0; i < LANES; ++i) numbers[i] = i;
  return numbers;
}

inline float highest(Floats values) {
  for (int half = LANES / 2; half; half /= 2) values = higher(values, __builtin_shuffle(values, lanes() ^ half));
  return values[0];
}

inline float total(Floats values) {
  for (int half = LANES / 2; half; half /= 2) values += __builtin_shuffle(values, lanes() ^ half);
  return values[0];
}

// Elements of a page or a matrix. block() reads two vectors of them as fp32, and place() tells where in (low, high)
// each went. SCALE is how many elements a scale takes, which each key and each value of a page has; 0: none.
struct Float32 {
  typedef float type;
  static constexpr int SCALE = 0;
  static void block(const float* from, Floats& low, Floats& high) {
    low = load<Floats>(from);
    high = load<Floats>(from + LANES);
  }
  static int place(int i) { return i; }
  static float value(float element) { return element; }
  static float element(float value) { return value; }
};

struct BFloat16 {
  typedef uint16_t type;
  static constexpr int SCALE = 0;
  // A bfloat16 is the upper half of a float, so even and odd elements apart take one operation each.
  static void block(const uint16_t* from, Floats& low, Floats& high) {
    const Words pairs = load<Words>(from);
    low = (Floats)(pairs << 16);
    high = (Floats)(pairs & 0xffff0000u);
  }
  static int place(int i) { return i % 2 * LANES + i / 2; }
  static float value(uint16_t element) {
    const uint32_t bits = (uint32_t)element << 16;
    return load<float>(&bits);
  }
  static uint16_t element(float value) {  // the nearest, of two the even one
    const uint32_t bits = load<uint32_t>(&value);
    return value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
  }
};

struct Int8 {
  typedef int8_t type;
  static constexpr int SCALE = sizeof(float);
  static void block(const int8_t* from, Floats& low, Floats& high) {
    low = read(from);
    high = read(from + LANES);
  }
  static int place(int i) { return i; }
  // Compilers take conversions of vectors of bytes apart.
  static Floats read(const int8_t* from) {
#if defined __AVX512F__ && LANES == 16
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif defined __AVX2__ && LANES == 8
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#elif defined __AVX__ && LANES == 8
    const __m128i low = _mm_cvtepi8_epi32(_mm_cvtsi32_si128(load<int>(from)));
    const __m128i high = _mm_cvtepi8_epi32(_mm_cvtsi32_si128(load<int>(from + 4)));
    return (Floats)_mm256_cvtepi32_ps(_mm256_set_m128i(high, low));
#else
    float values[LANES];
#ifdef __SSE4_1__
    for (int i = 0; i < LANES; i += 4)
      _mm_storeu_ps(values + i, _mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(load<int>(from + i)))));
#else
    for (int i = 0; i < LANES; ++i) values[i] = from[i];
#endif
    return load<Floats>(values);
#endif
  }
};

}  // namespace
