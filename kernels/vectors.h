// Vectors of fp32 numbers as wide as the processor's registers, and the elements that are read into them.
#pragma once

#include <cstdint>
#include <cstring>

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
// each went.
struct Float32 {
  typedef float type;
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

}  // namespace
