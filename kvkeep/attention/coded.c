// Attention of few queries over windows of codes, which are read where they lie: the twin of coded.py.
//
// R sequences times KV heads, W windows of w tokens, X queries of a KV head, D and E channels of keys and values,
// N = W * w. A byte holds codes j, j + P, j + 2 P and so on of a token, from its lowest bits up (see quant.py).
// One window at a time is decoded, into memory that stays in the nearest cache.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// as in parts.py: finite, and less than any logit
#define HIDDEN -1.7e38f
// sizes that are known where a function is called are then known inside it
#define INLINE static inline __attribute__((always_inline))
// numbers of a vector
#define WIDTH 16

typedef struct {
    int64_t rows, windows, window, queries;
    int64_t key_size, key_bits, value_size, value_bits, rotated;
} Shape;

typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
typedef float Floats __attribute__((vector_size(4 * WIDTH)));

INLINE void unpack_planes(const uint8_t *restrict packed, int64_t bytes, const int bits, float *restrict codes) {
    const int mask = (1 << bits) - 1;
    int64_t j = 0;
    // a vector at a time: left to itself, a compiler wants more bytes than a head has
    for (; j + WIDTH <= bytes; j += WIDTH) {
        Bytes narrow;
        memcpy(&narrow, packed + j, sizeof narrow);
        const Integers wide = __builtin_convertvector(narrow, Integers);
        for (int plane = 0; plane < 8 / bits; plane++) {
            const Floats plain = __builtin_convertvector((wide >> (plane * bits)) & mask, Floats);
            memcpy(codes + plane * bytes + j, &plain, sizeof plain);
        }
    }
    for (; j < bytes; j++)
        for (int plane = 0; plane < 8 / bits; plane++)
            codes[plane * bytes + j] = (float)((packed[j] >> (plane * bits)) & mask);
}

// with the bits known to the compiler
INLINE void unpack(const uint8_t *packed, int64_t bytes, int64_t bits, float *codes) {
    if (bits == 2) unpack_planes(packed, bytes, 2, codes);
    else if (bits == 4) unpack_planes(packed, bytes, 4, codes);
    else unpack_planes(packed, bytes, 8, codes);
}

INLINE void widen(const _Float16 *restrict half, int64_t size, float *restrict single) {
    for (int64_t d = 0; d < size; d++) single[d] = (float)half[d];
}

INLINE float dot(const float *restrict a, const float *restrict b, int64_t size) {
    float sum = 0;
    for (int64_t d = 0; d < size; d++) sum += a[d] * b[d];
    return sum;
}

// dequantize in place, then turn the first `rotated` channels, halves paired
INLINE void restore(float *restrict key, const float *restrict scale, const float *restrict zero, int64_t size,
                    const float *restrict cosine, const float *restrict sine, int64_t rotated) {
    for (int64_t d = 0; d < size; d++) key[d] = key[d] * scale[d] + zero[d];
    const int64_t half = rotated / 2;
    float *restrict low = key, *restrict high = key + half;
    for (int64_t d = 0; d < half; d++) {
        const float first = low[d], second = high[d];
        low[d] = first * cosine[d] - second * sine[d];
        high[d] = second * cosine[d] + first * sine[d];
    }
}

INLINE void add(float *restrict sum, const float *restrict value, float weight, int64_t size) {
    for (int64_t d = 0; d < size; d++) sum[d] += weight * value[d];
}

INLINE void score(Shape s, const float *queries, const uint8_t *codes, const _Float16 *scales, const _Float16 *zeros,
                  const int32_t *positions, const uint8_t *dormant, const float *cosines, const float *sines,
                  float *logits, float *scratch) {
    const int64_t bytes = (s.key_size * s.key_bits + 7) / 8, tokens = s.windows * s.window;
    float *scale = scratch, *zero = scale + s.key_size, *keys = zero + s.key_size;
    for (int64_t at = 0; at < s.windows; at++) {
        const int64_t first = at * s.window;
        const int hidden = positions[first] < 0 || dormant[at];
        if (!hidden) {
            widen(scales + at * s.key_size, s.key_size, scale);
            widen(zeros + at * s.key_size, s.key_size, zero);
        }
        for (int64_t i = 0; i < s.window && !hidden; i++) {
            const int64_t angle = positions[first + i] * s.rotated;
            unpack(codes + (first + i) * bytes, bytes, s.key_bits, keys + i * s.key_size);
            restore(keys + i * s.key_size, scale, zero, s.key_size, cosines + angle, sines + angle, s.rotated);
        }
        for (int64_t x = 0; x < s.queries; x++)
            for (int64_t i = 0; i < s.window; i++)
                logits[x * tokens + first + i] =
                    hidden ? HIDDEN : dot(queries + x * s.key_size, keys + i * s.key_size, s.key_size);
    }
}

INLINE void sum_values(Shape s, const float *logits, const uint8_t *codes, const _Float16 *scales,
                       const _Float16 *zeros, float *output, float *logsums, float *scratch) {
    const int64_t bytes = (s.value_size * s.value_bits + 7) / 8, tokens = s.windows * s.window;
    float *total = scratch, *shift = total + s.queries, *largest = shift + s.queries;
    float *scale = largest + s.queries, *zero = scale + s.window;
    float *values = zero + s.window, *weights = values + s.window * s.value_size;
    for (int64_t x = 0; x < s.queries; x++) {
        float *restrict weight = weights + x * tokens;
        const float *restrict logit = logits + x * tokens;
        float most = HIDDEN, sum = 0;
        for (int64_t n = 0; n < tokens; n++) most = logit[n] > most ? logit[n] : most;
        // a loop of its own, which compilers turn into a vector of exponentials
        for (int64_t n = 0; n < tokens; n++) weight[n] = expf(logit[n] - most);
        for (int64_t n = 0; n < tokens; n++) sum += weight[n];
        largest[x] = most;
        total[x] = most > HIDDEN ? sum : 0;
        shift[x] = 0;
        for (int64_t d = 0; d < s.value_size; d++) output[x * s.value_size + d] = 0;
    }
    for (int64_t first = 0; first < tokens; first += s.window) {
        if (logits[first] <= HIDDEN) continue;
        widen(scales + first, s.window, scale);
        widen(zeros + first, s.window, zero);
        for (int64_t i = 0; i < s.window; i++)
            unpack(codes + (first + i) * bytes, bytes, s.value_bits, values + i * s.value_size);
        for (int64_t x = 0; x < s.queries; x++) {
            const float *weight = weights + x * tokens + first;
            shift[x] += dot(weight, zero, s.window);
            for (int64_t i = 0; i < s.window; i++)
                add(output + x * s.value_size, values + i * s.value_size, weight[i] * scale[i], s.value_size);
        }
    }
    for (int64_t x = 0; x < s.queries; x++) {
        // where everything is hidden, a part that counts for nothing
        logsums[x] = total[x] > 0 ? largest[x] + logf(total[x]) : HIDDEN;
        const float inverse = total[x] > 0 ? 1 / total[x] : 0;
        for (int64_t d = 0; d < s.value_size; d++)
            output[x * s.value_size + d] = (output[x * s.value_size + d] + shift[x]) * inverse;
    }
}

typedef struct {
    const float *queries;
    const uint8_t *key_codes;
    const _Float16 *key_scales, *key_zeros;
    const uint8_t *value_codes;
    const _Float16 *value_scales, *value_zeros;
    const int32_t *positions;
    const uint8_t *dormant;
    const float *cosines, *sines;
    float *output, *logsums, *logits;
} Arrays;

INLINE int read_rows(Shape s, Arrays a) {
    const int64_t tokens = s.windows * s.window;
    const int64_t key_bytes = (s.key_size * s.key_bits + 7) / 8, value_bytes = (s.value_size * s.value_bits + 7) / 8;
    // codes are unpacked in whole bytes, up to three numbers further
    const int64_t scoring = (2 + s.window) * s.key_size + 4;
    const int64_t summing = 3 * s.queries + (2 + s.value_size) * s.window + 4 + s.queries * tokens;
    float *scratch = malloc(sizeof(float) * (scoring > summing ? scoring : summing));
    if (!scratch) return 1;
    for (int64_t r = 0; r < s.rows; r++) {
        float *scores = a.logits + r * s.queries * tokens;
        score(s, a.queries + r * s.queries * s.key_size, a.key_codes + r * tokens * key_bytes,
              a.key_scales + r * s.windows * s.key_size, a.key_zeros + r * s.windows * s.key_size,
              a.positions + r * tokens, a.dormant + r * s.windows, a.cosines, a.sines, scores, scratch);
        sum_values(s, scores, a.value_codes + r * tokens * value_bytes, a.value_scales + r * tokens,
                   a.value_zeros + r * tokens, a.output + r * s.queries * s.value_size, a.logsums + r * s.queries,
                   scratch);
    }
    free(scratch);
    return 0;
}

INLINE int read_sized(Shape s, Arrays a, const int64_t size) {
    s.key_size = s.value_size = s.rotated = size;
    s.window = 8;
    return read_rows(s, a);
}

// 0, or 1 without memory
int read_coded(Shape s, Arrays a) {
    const int even = s.key_size == s.value_size && s.key_size == s.rotated && s.window == 8;
    // the sizes that most models have, with code of their own
    if (even && s.key_size == 64) return read_sized(s, a, 64);
    if (even && s.key_size == 128) return read_sized(s, a, 128);
    return read_rows(s, a);
}
