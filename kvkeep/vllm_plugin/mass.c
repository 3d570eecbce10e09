// Products of a few queries with keys that lie turned in their page, channel by channel: the twin of mass.py.
//
// A cell of a page holds blocks of keys [D, together]; queries are [rows, heads, queries, D], logits
// [rows, heads, queries, slots].

#include <stdint.h>
#include <string.h>

// sizes that are known where a function is called are then known inside it
#define INLINE static inline __attribute__((always_inline))
// numbers of a vector, and vectors of slots at a time; blocks are multiples of their product
#define WIDTH 16
#define VECTORS 2
#define SLOTS (WIDTH * VECTORS)
// queries at a time
#define MOST 4

typedef struct {
    int64_t rows, heads, queries, size, slots, together, type, page_bytes, cell_bytes, block_bytes;
} Sizes;

typedef struct {
    const uint8_t *keys;
    const int64_t *pages;
    const float *queries;
    float *logits;
} Arrays;

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef _Float16 Narrow __attribute__((vector_size(2 * WIDTH)));

enum { FP32, BF16, FP16 };

INLINE Floats load(const uint8_t *keys, int64_t at, const int type) {
    Floats wide;
    if (type == FP32) {
        memcpy(&wide, keys + 4 * at, sizeof wide);
    } else if (type == BF16) {
        Halves half;
        memcpy(&half, keys + 2 * at, sizeof half);
        const Words bits = __builtin_convertvector(half, Words) << 16;
        memcpy(&wide, &bits, sizeof wide);
    } else {
        Narrow half;
        memcpy(&half, keys + 2 * at, sizeof half);
        wide = __builtin_convertvector(half, Floats);
    }
    return wide;
}

// `count` queries with SLOTS slots from `first` on; no slot beyond its block is read, none beyond `slots` written
INLINE void block(Sizes s, const uint8_t *keys, const float *queries, float *logits, int64_t first, const int count,
                  const int type) {
    Floats sums[MOST][VECTORS] = {0};
    keys += first / s.together * s.block_bytes;
    for (int64_t d = 0; d < s.size; d++)
        for (int v = 0; v < VECTORS; v++) {
            const Floats key = load(keys, d * s.together + first % s.together + v * WIDTH, type);
            for (int q = 0; q < count; q++) sums[q][v] += queries[q * s.size + d] * key;
        }
    const int64_t left = s.slots - first, whole = left < SLOTS ? left : SLOTS;
    for (int q = 0; q < count; q++) memcpy(logits + q * s.slots + first, sums[q], whole * sizeof(float));
}

INLINE void head(Sizes s, const uint8_t *keys, const float *queries, float *logits, const int type) {
    for (int64_t q = 0; q < s.queries; q += MOST) {
        const float *asked = queries + q * s.size;
        float *found = logits + q * s.slots;
        const int64_t left = s.queries - q;
        for (int64_t first = 0; first < s.slots; first += SLOTS) {
            if (left == 1) block(s, keys, asked, found, first, 1, type);
            else if (left == 2) block(s, keys, asked, found, first, 2, type);
            else if (left == 3) block(s, keys, asked, found, first, 3, type);
            else block(s, keys, asked, found, first, 4, type);
        }
    }
}

void products(Sizes s, Arrays a) {
    for (int64_t r = 0; r < s.rows; r++)
        for (int64_t h = 0; h < s.heads; h++) {
            const uint8_t *keys = a.keys + a.pages[r] * s.page_bytes + h * s.cell_bytes;
            const int64_t at = (r * s.heads + h) * s.queries;
            const float *queries = a.queries + at * s.size;
            float *logits = a.logits + at * s.slots;
            if (s.type == FP32) head(s, keys, queries, logits, FP32);
            else if (s.type == BF16) head(s, keys, queries, logits, BF16);
            else head(s, keys, queries, logits, FP16);
        }
}
