// Keys and values in 8 bits: their numbers and scales, and the way into pages. quantise.py says what is computed.

// Each operation rounds, as in the reference: the bytes of an entry must not depend on the processor.
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include <algorithm>
#include <vector>

#include "pages.h"
#include "rotation.h"

namespace {

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

constexpr int FEWEST = 1 << 16;  // numbers for which threads are worth while

// The largest magnitude: of numbers without their signs, the order is that of their bits, and NaN is above all others.
float magnitude(const float* x, int count) {
  Ints most = {};
  for (int d = 0; d < count; d += LANES) {
    const Ints bits = load<Ints>(x + d) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t highest = most[0];
  for (int lane = 1; lane < LANES; ++lane) highest = std::max(highest, most[lane]);
  return load<float>(&highest);
}

// One key or value, of which x is overwritten. Returns its scale.
float quantise(float* x, int count, int8_t* numbers) {
  const float scale = std::max(magnitude(x, count) / 127.0f, 1e-6f);
  if (!(scale < __builtin_inff())) {
    std::fill_n(numbers, count, 0);
    return scale;
  }
  const float inverse = 1.0f / scale;
  for (int d = 0; d < count; d += LANES) {
    const Floats steps = load<Floats>(x + d) * inverse;  // below 127.5
    const Ints rounded = __builtin_convertvector(steps + (steps >= 0.0f ? Floats{} + 0.5f : Floats{} - 0.5f), Ints);
    std::memcpy(x + d, &rounded, sizeof rounded);
  }
  for (int d = 0; d < count; ++d) numbers[d] = load<int32_t>(x + d);
  return scale;
}

template <class T>
void quantise(const typename T::type* x, int64_t stride, int64_t tokens, int heads, int head_dim, const float* signs,
              int8_t* numbers, float* scales) {
#pragma omp parallel if (tokens * heads * head_dim >= FEWEST)
  {
    std::vector<float> row(head_dim);
#pragma omp for
    for (int64_t i = 0; i < tokens * heads; ++i) {
      const auto* from = x + i / heads * stride + i % heads * head_dim;
      for (int d = 0; d < head_dim; ++d) row[d] = T::value(from[d]);
      if (signs) rotate(row.data(), head_dim, signs);
      scales[i] = quantise(row.data(), head_dim, numbers + i * head_dim);
    }
  }
}

}  // namespace

// x: [tokens, heads, head_dim], a multiple of LANES; stride: its elements from token to token. signs: null: no rotation
extern "C" void quantise_float32(const float* x, int64_t stride, int64_t tokens, int heads, int head_dim,
                                 const float* signs, int8_t* numbers, float* scales) {
  quantise<Float32>(x, stride, tokens, heads, head_dim, signs, numbers, scales);
}

extern "C" void quantise_bfloat16(const uint16_t* x, int64_t stride, int64_t tokens, int heads, int head_dim,
                                  const float* signs, int8_t* numbers, float* scales) {
  quantise<BFloat16>(x, stride, tokens, heads, head_dim, signs, numbers, scales);
}

// keys, values: [count, head_dim]; their scales and slots: [count].
extern "C" void write_entries(const int8_t* keys, const float* key_scales, const int8_t* values,
                              const float* value_scales, const int64_t* slots, int64_t count, int head_dim,
                              int page_size, int8_t* pages) {
  const PageLayout<Int8> layout = {page_size, head_dim};
#pragma omp parallel for if (count * head_dim >= FEWEST)
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] < 0) continue;
    int8_t* page = pages + slots[i] / page_size * layout.elements();
    const int place = slots[i] % page_size;
    store(keys + i * head_dim, values + i * head_dim, page, place, layout);
    store_scales(key_scales[i], value_scales[i], page, place, layout);
  }
}
