// Arithmetic on pairs of bfloat16 by AMX, with scores and weighted sums of its own beside those in tiles.h: a
// multiplication takes 16 rows and 16 columns at a time, out of eight registers that hold such squares (Intel's tiles;
// a tile here is what tiles.h means). Packed keys and values, queries and weights have the order that these are loaded
// from.
#pragma once

#include "tiles.h"

#if defined HAS_PAIRS && defined __AMX_BF16__ && defined __linux__ && !defined NO_AMX
#define HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Linux gives a process these registers when it asks for them.
inline bool may_use_amx() {
  constexpr int ASK = 0x1023, REGISTERS = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool may = !syscall(SYS_arch_prctl, ASK, REGISTERS);
  return may;
}

struct Amx : Pairs {
  static constexpr int SIDE = 16;                  // rows and columns of a square, and units of a row that is multiplied
  static constexpr int STEP = 32, ROWS = 2 * SIDE;

  // The registers have a shape while a thread uses them, and are empty afterwards, which makes it cheap to leave it.
  struct Session {
    Session() {
      constexpr uint16_t BYTES = SIDE * sizeof(Unit);
      struct Shape {
        uint8_t palette, start, reserved[14];
        uint16_t bytes_of_row[16];
        uint8_t rows[16];
      };
      static_assert(sizeof(Shape) == 64, "the processor reads so many bytes");
      static const Shape shape = {1, 0, {}, {BYTES, BYTES, BYTES, BYTES, BYTES, BYTES, BYTES, BYTES},
                                  {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};
      _tile_loadconfig(&shape);
    }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
  };
};

// The compiler does not know what the instructions below read and write.
inline void finish_memory() { asm volatile("" ::: "memory"); }

// Registers 0 to 3 are sums: two squares of rows by two of columns, or, if `half`, by one. They gain left . right over
// some units.
inline void multiply_squares(const uint32_t* left, int left_stride, const uint32_t* right, int units, bool half) {
  const int left_bytes = left_stride * sizeof *left, right_bytes = WIDTH * sizeof *right;
  const uint32_t* below = left + Amx::SIDE * left_stride;
  for (int u = 0; u < units; u += Amx::SIDE, right += Amx::SIDE * WIDTH) {
    _tile_loadd(4, left + u, left_bytes);
    _tile_loadd(6, right, right_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, below + u, left_bytes);
    _tile_dpbf16ps(2, 5, 6);
    if (!half) {
      _tile_loadd(7, right + Amx::SIDE, right_bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

inline void store_squares(float* to, int stride, bool half) {
  const int bytes = stride * sizeof *to;
  float* below = to + Amx::SIDE * stride;
  _tile_stored(0, to, bytes);
  _tile_stored(2, below, bytes);
  if (half) return;
  _tile_stored(1, to + Amx::SIDE, bytes);
  _tile_stored(3, below + Amx::SIDE, bytes);
}

inline void score(Amx, const uint32_t* query, const uint32_t* keys, int count, int units, float* scores) {
  finish_memory();
  for (int t = 0; t < count; t += 2 * Amx::SIDE) {
    const bool half = count - t <= Amx::SIDE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    multiply_squares(query, units, keys + t / WIDTH * WIDTH * units + t % WIDTH, units, half);
    store_squares(scores + t, STRIDE, half);
  }
  finish_memory();
}

inline void add(Amx, const uint32_t* weights, const uint32_t* values, int height, int units, const float* shrink,
                float* out, int head_dim) {
  for (int r = 0; r < Amx::ROWS; ++r) {
    if (shrink[r] == 1) continue;
    for (int d = 0; d < head_dim; ++d) out[r * head_dim + d] *= shrink[r];
  }
  finish_memory();
  for (int d = 0; d < head_dim; d += 2 * Amx::SIDE) {
    float *to = out + d, *below = to + Amx::SIDE * head_dim;
    const int bytes = head_dim * sizeof *out;
    _tile_loadd(0, to, bytes);
    _tile_loadd(1, to + Amx::SIDE, bytes);
    _tile_loadd(2, below, bytes);
    _tile_loadd(3, below + Amx::SIDE, bytes);
    const uint32_t* columns = values + d / WIDTH * WIDTH * height + d % WIDTH;
    multiply_squares(weights, STRIDE / Amx::DEPTH, columns, units, false);
    store_squares(to, head_dim, false);
  }
  finish_memory();
}

}  // namespace
#endif
