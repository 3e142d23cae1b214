// The rotation of keys that are quantised, and of queries that meet them.
#pragma once

#include "vectors.h"

namespace {

// Multiply by signs, which are scaled, then by the Hadamard matrix of each block of as many dims as the largest power
// of two that divides head_dim, which is a multiple of LANES.
inline void rotate(float* x, int head_dim, const float* signs) {
  for (int d = 0; d < head_dim; d += LANES) {
    Floats values = load<Floats>(x + d) * load<Floats>(signs + d);
    for (uint32_t half = 1; half < LANES; half *= 2) {
      const Floats others = __builtin_shuffle(values, lanes() ^ half);
      values = others + ((lanes() & half) != 0 ? -values : values);
    }
    std::memcpy(x + d, &values, sizeof values);
  }
  for (int half = LANES; half < (head_dim & -head_dim); half *= 2)
    for (int d = 0; d < head_dim; d += d % (2 * half) == half - LANES ? half + LANES : LANES) {
      const Floats first = load<Floats>(x + d), second = load<Floats>(x + d + half);
      const Floats sum = first + second, difference = first - second;
      std::memcpy(x + d, &sum, sizeof sum);
      std::memcpy(x + d + half, &difference, sizeof difference);
    }
}

}  // namespace
