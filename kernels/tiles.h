// What a tile of a few query rows does with a block of keys and values, in registers: scores, weights, weighted sums.
// amx.h has an arithmetic with scores and sums of its own.
//
// Matrices on the right, keys and values, are packed in panels: WIDTH columns, row after row. A unit is what one
// multiplication takes of a row. Where the processor multiplies pairs of bfloat16, these are its units: keys in pairs
// of dims, weights and values in pairs of entries. Elsewhere numbers are converted to fp32. All sums are fp32.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#if defined __AVX512BF16__ && LANES == 16
#define HAS_PAIRS
#include <immintrin.h>
#endif

#include "vectors.h"

namespace {

constexpr int COLS = LANES == 16 ? 4 : 2;  // vectors in a row of a tile: as many as the registers hold
constexpr int WIDTH = COLS * LANES;        // columns of a panel
constexpr int KEYS = 512;                  // of a block
// Numbers from a row of scores to the next: at a power of two, many rows would share few places in the cache.
constexpr int STRIDE = KEYS + 2 * LANES;
constexpr float LOG2_E = 1.44269504f;

// A number that was in 8 bits.
struct Scaled {
  float value;
};

// Arithmetic on fp32 numbers that are made of elements of T.
template <class T>
struct Singles {
  typedef T Elements;
  typedef typename T::type Element;
  typedef float Unit;
  static constexpr int DEPTH = 1;  // elements of a unit
  static constexpr int STEP = 1;   // entries whose values are added at once
  static constexpr int ROWS = 6;   // of a tile
  struct Session {};               // of a thread that multiplies
  static Unit unit(Element first, Element) { return T::value(first); }
  static Unit unit(Scaled first, Scaled) { return first.value; }
  static Floats spread(Unit unit) { return unit - Floats{}; }  // adding 0 instead is computed, since it changes -0
  static Floats read(const Unit* from) { return load<Floats>(from); }
  static Floats add(Floats sum, Floats left, Floats right) { return sum + left * right; }
  static void write(Unit* to, Floats first, Floats second) {
    std::memcpy(to, &first, sizeof first);
    std::memcpy(to + LANES, &second, sizeof second);
  }
  // 2^x for -1/2 <= x <= 1/2, to about a unit in the last place.
  static Floats power(Floats x) {
    Floats p = Floats{} + 1.32764718e-3f;
    p = p * x + 9.67554133e-3f;
    p = p * x + 5.55071327e-2f;
    p = p * x + 2.40221197e-1f;
    p = p * x + 6.93146967e-1f;
    return p * x + 1.00000007f;
  }
};

#ifdef HAS_PAIRS
// Arithmetic on pairs of bfloat16.
struct Pairs {
  typedef BFloat16 Elements;
  typedef uint16_t Element;
  typedef uint32_t Unit;
  static constexpr int DEPTH = 2, STEP = 2, ROWS = 6;
  struct Session {};
  static Unit unit(Element first, Element second) { return first | (uint32_t)second << 16; }
  static Unit unit(Scaled first, Scaled second) {
    return unit(BFloat16::element(first.value), BFloat16::element(second.value));
  }
  static __m512bh spread(Unit unit) { return (__m512bh)_mm512_set1_epi32(unit); }
  static __m512bh read(const Unit* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static Floats add(Floats sum, __m512bh left, __m512bh right) { return _mm512_dpbf16_ps(sum, left, right); }
  static void write(Unit* to, Floats first, Floats second) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
  }
  // To 3e-6, well below the rounding to bfloat16.
  static Floats power(Floats x) {
    Floats p = Floats{} + 9.5701017e-3f;
    p = p * x + 5.59178603e-2f;
    p = p * x + 2.40247448e-1f;
    p = p * x + 6.93121815e-1f;
    return p * x + 9.99999261e-1f;
  }
};
typedef Pairs BFloat16Arithmetic;
#else
typedef Singles<BFloat16> BFloat16Arithmetic;
#endif

// 2^x for x <= 0, of which the fraction is computed by A; 0 below -126.5.
template <class A>
Floats exponential(Floats x) {
  const float rounding = 12582912.0f + 127.0f;  // adding 1.5 * 2^23 rounds to an integer; 127 is the exponents' bias
  const Floats bounded = higher(Floats{} - 127.0f, x);
  const Floats shifted = bounded + rounding;
  const Words power = (Words)shifted << 23;
  return A::power(bounded - (shifted - rounding)) * (Floats)power;
}

// sums[r][n] += left[r] . column vector n of `right`, over some units.
template <class A, int N>
inline __attribute__((always_inline)) void multiply(const typename A::Unit* left, int stride,
                                                    const typename A::Unit* right, int units,
                                                    Floats (&sums)[A::ROWS][N]) {
  for (int u = 0; u < units; ++u, ++left, right += WIDTH) {
    decltype(A::read(right)) vectors[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) vectors[n] = A::read(right + n * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < A::ROWS; ++r) {
      const auto number = A::spread(left[r * stride]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = A::add(sums[r][n], number, vectors[n]);
    }
  }
}

// Write a tile; a memcpy of all its vectors would take the way over the stack.
template <int ROWS, int N>
void store(const Floats (&sums)[ROWS][N], float* to, int stride) {
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) std::memcpy(to + r * stride + n * LANES, &sums[r][n], sizeof sums[r][n]);
}

// Scores of the keys of N vectors, which begin a panel.
template <class A, int N>
void score_panel(const typename A::Unit* query, const typename A::Unit* keys, int units, float* scores) {
  Floats sums[A::ROWS][N] = {};
  multiply<A, N>(query, units, keys, units, sums);
  store(sums, scores, STRIDE);
}

// Weighted sums of N vectors of dims, which begin a panel. `shrink`: of each row, how much less earlier ones weigh.
template <class A, int N>
void add_panel(const typename A::Unit* weights, const typename A::Unit* values, int units, const float* shrink,
               float* out, int head_dim) {
  Floats sums[A::ROWS][N];
#pragma GCC unroll 6
  for (int r = 0; r < A::ROWS; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = load<Floats>(out + r * head_dim + n * LANES) * shrink[r];
  multiply<A, N>(weights, STRIDE / A::DEPTH, values, units, sums);
  store(sums, out, head_dim);
}

// Do something for N vectors, of which there are at most COLS.
template <class Work>
void with_vectors(int count, const Work& work) {
  switch (count) {
    case 1: work(std::integral_constant<int, 1>()); break;
    case 2: work(std::integral_constant<int, 2>()); break;
    case 3: work(std::integral_constant<int, std::min(3, COLS)>()); break;
    default: work(std::integral_constant<int, COLS>());
  }
}

// Scores of the first `count` keys of a block, or a few more.
template <class A>
void score(A, const typename A::Unit* query, const typename A::Unit* keys, int count, int units, float* scores) {
  for (int t = 0; t < count; t += WIDTH, keys += units * WIDTH)
    with_vectors(std::min(count - t + LANES - 1, WIDTH) / LANES,
                 [&](auto n) { score_panel<A, n.value>(query, keys, units, scores + t); });
}

// out[r] = shrink[r] * out[r] + weights[r] . values, over the first units of a block, of `height` in each panel.
template <class A>
void add(A, const typename A::Unit* weights, const typename A::Unit* values, int height, int units, const float* shrink,
         float* out, int head_dim) {
  for (int d = 0; d < head_dim; d += WIDTH, values += height * WIDTH)
    with_vectors(std::min(head_dim - d, WIDTH) / LANES,
                 [&](auto n) { add_panel<A, n.value>(weights, values, units, shrink, out + d, head_dim); });
}

// Scores become capped logits to the base 2: cap * tanh(scale * score / cap).
inline void cap_scores(float* scores, int count, float scale, float cap) {
  for (int t = 0; t < count; t += LANES) {
    // tanh(x) is (1 - e^-2x) / (1 + e^-2x) for x >= 0.
    const Floats x = load<Floats>(scores + t) * (scale / cap);
    const Floats small = exponential<Singles<Float32>>((x > 0 ? -x : x) * (2 * LOG2_E));
    const Floats tangent = (1.0f - small) / (1.0f + small) * (cap * LOG2_E);
    const Floats capped = x > 0 ? tangent : -tangent;
    std::memcpy(scores + t, &capped, sizeof capped);
  }
}

// Of a row: the highest score, and the sum of weights, in lanes.
struct Softmax {
  Floats sum;
  float highest;
};

// The highest of a row's first `seen` scores; those that fill its last vector become the lowest number there is.
inline float highest_score(float* scores, int seen) {
  const int whole = seen / LANES * LANES, end = (seen + LANES - 1) / LANES * LANES;
  if (whole < end) {
    const Floats last = lanes() < (uint32_t)(seen - whole) ? load<Floats>(scores + whole) : Floats{} + LOWEST;
    std::memcpy(scores + whole, &last, sizeof last);
  }
  // Several at a time, since each comparison waits for the one before.
  Floats most[4];
  for (Floats& some : most) some = Floats{} + LOWEST;
  int t = 0;
  for (; t + 4 * LANES <= end; t += 4 * LANES)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) most[i] = higher(load<Floats>(scores + t + i * LANES), most[i]);
  for (; t < end; t += LANES) most[0] = higher(load<Floats>(scores + t), most[0]);
  return highest(higher(higher(most[0], most[1]), higher(most[2], most[3])));
}

// Turn a row's scores, of which the first `seen` count, into weights; 0 follow up to `padded`, pairs of vectors. Scores
// times `scale` are logits to the base 2. Returns how much less earlier weights weigh now.
template <class A>
float weigh(float* scores, int seen, int padded, float scale, Softmax& row, typename A::Unit* weights) {
  const float now = std::max(row.highest, highest_score(scores, seen)), top = now * scale;
  const Floats less = exponential<Singles<Float32>>(Floats{} + (row.highest * scale - top));
  const float shrink = now == row.highest ? 1 : less[0];
  Floats sums[2] = {row.sum * shrink};
  const int end = (seen + LANES - 1) / LANES * LANES;
  int t = 0;
  for (; t + 2 * LANES <= end; t += 2 * LANES) {
    Floats both[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      both[i] = exponential<A>(load<Floats>(scores + t + i * LANES) * scale - top);
      sums[i] += both[i];
    }
    A::write(weights + t / A::DEPTH, both[0], both[1]);
  }
  if (t < end) {
    const Floats last = exponential<A>(load<Floats>(scores + t) * scale - top);
    sums[0] += last;
    A::write(weights + t / A::DEPTH, last, Floats{});
    t += 2 * LANES;
  }
  for (; t < padded; t += 2 * LANES) A::write(weights + t / A::DEPTH, Floats{}, Floats{});
  row = {sums[0] + sums[1], now};
  return shrink;
}

}  // namespace
