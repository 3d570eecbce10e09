// Attention of few queries over windows of codes, which are read where they lie: the twin of coded.py.
//
// Rows are KV heads of sequences; each has windows of w tokens and X queries. A byte holds codes j, j + P, j + 2 P and so
// on of a token, from its lowest bits up (see quant.py). One window at a time is decoded, into memory that stays in the
// nearest cache.

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
    // logits there are room for, of each query
    int64_t tokens;
} Shape;

// what there is of each window; of TOKENS there is nothing where they follow the start one by one
enum { STARTS, TOKENS, DORMANT, KEY_CODES, KEY_SCALES, KEY_ZEROS, VALUE_CODES, VALUE_SCALES, VALUE_ZEROS, FIELDS };

// where the first row's first window has each field, and how far it is to the next row and the next window, in bytes
typedef struct {
    const uint8_t *first[FIELDS];
    int64_t row[FIELDS], window[FIELDS];
} Codes;

typedef struct {
    const float *queries, *cosines, *sines;
    float *output, *logsums, *logits;
} Arrays;

// the windows of many requests in their pages: the last ones of each cell, and where in a window a field lies
typedef struct {
    int64_t requests, page_bytes, cell_bytes;
    const uint8_t *cells;
    const int64_t *pages, *windows, *bits, *bytes;
    int64_t field[FIELDS];
} Cells;

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

INLINE const void *field(const Codes *c, int which, int64_t row, int64_t window) {
    return c->first[which] + row * c->row[which] + window * c->window[which];
}

INLINE void score(Shape s, const Codes *c, int64_t row, const float *queries, Arrays a, float *logits, float *scratch) {
    const int64_t bytes = (s.key_size * s.key_bits + 7) / 8;
    float *scale = scratch, *zero = scale + s.key_size, *keys = zero + s.key_size;
    for (int64_t at = 0; at < s.windows; at++) {
        const int32_t start = *(const int32_t *)field(c, STARTS, row, at);
        const int hidden = start < 0 || *(const uint8_t *)field(c, DORMANT, row, at);
        if (!hidden) {
            const int32_t *tokens = c->first[TOKENS] ? field(c, TOKENS, row, at) : 0;
            const uint8_t *codes = field(c, KEY_CODES, row, at);
            widen(field(c, KEY_SCALES, row, at), s.key_size, scale);
            widen(field(c, KEY_ZEROS, row, at), s.key_size, zero);
            for (int64_t i = 0; i < s.window; i++) {
                const int64_t angle = (tokens ? tokens[i] : start + i) * s.rotated;
                unpack(codes + i * bytes, bytes, s.key_bits, keys + i * s.key_size);
                restore(keys + i * s.key_size, scale, zero, s.key_size, a.cosines + angle, a.sines + angle, s.rotated);
            }
        }
        for (int64_t x = 0; x < s.queries; x++)
            for (int64_t i = 0; i < s.window; i++)
                logits[x * s.tokens + at * s.window + i] =
                    hidden ? HIDDEN : dot(queries + x * s.key_size, keys + i * s.key_size, s.key_size);
    }
}

INLINE void sum_values(Shape s, const Codes *c, int64_t row, const float *logits, float *output, float *logsums,
                       float *scratch) {
    const int64_t bytes = (s.value_size * s.value_bits + 7) / 8, tokens = s.windows * s.window;
    float *total = scratch, *shift = total + s.queries, *largest = shift + s.queries;
    float *scale = largest + s.queries, *zero = scale + s.window;
    float *values = zero + s.window, *weights = values + s.window * s.value_size;
    for (int64_t x = 0; x < s.queries; x++) {
        float *restrict weight = weights + x * tokens;
        const float *restrict logit = logits + x * s.tokens;
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
    for (int64_t at = 0; at < s.windows; at++) {
        const int64_t first = at * s.window;
        if (logits[first] <= HIDDEN) continue;
        const uint8_t *codes = field(c, VALUE_CODES, row, at);
        widen(field(c, VALUE_SCALES, row, at), s.window, scale);
        widen(field(c, VALUE_ZEROS, row, at), s.window, zero);
        for (int64_t i = 0; i < s.window; i++)
            unpack(codes + i * bytes, bytes, s.value_bits, values + i * s.value_size);
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

INLINE int read_rows(Shape s, const Codes *c, Arrays a) {
    // codes are unpacked in whole bytes, up to three numbers further
    const int64_t scoring = (2 + s.window) * s.key_size + 4;
    const int64_t summing = 3 * s.queries + (2 + s.value_size) * s.window + 4 + s.queries * s.windows * s.window;
    float *scratch = malloc(sizeof(float) * (scoring > summing ? scoring : summing));
    if (!scratch) return 1;
    for (int64_t r = 0; r < s.rows; r++) {
        float *logits = a.logits + r * s.queries * s.tokens;
        score(s, c, r, a.queries + r * s.queries * s.key_size, a, logits, scratch);
        sum_values(s, c, r, logits, a.output + r * s.queries * s.value_size, a.logsums + r * s.queries, scratch);
    }
    free(scratch);
    return 0;
}

INLINE int read_sized(Shape s, const Codes *c, Arrays a, const int64_t size) {
    s.key_size = s.value_size = s.rotated = size;
    s.window = 8;
    return read_rows(s, c, a);
}

// 0, or 1 without memory
int read_coded(Shape s, Codes c, Arrays a) {
    const int even = s.key_size == s.value_size && s.key_size == s.rotated && s.window == 8;
    // the sizes that most models have, with code of their own
    if (even && s.key_size == 64) return read_sized(s, &c, a, 64);
    if (even && s.key_size == 128) return read_sized(s, &c, a, 128);
    return read_rows(s, &c, a);
}

// `rows` are the KV heads of one request; logits behind a request's last window stay as they are
int read_cells(Shape s, Cells p, Arrays a) {
    const int64_t asked = s.rows * s.queries;
    for (int64_t r = 0; r < p.requests; r++) {
        Codes c;
        for (int f = 0; f < FIELDS; f++) {
            const int64_t first = p.cell_bytes - p.windows[r] * p.bytes[r] + p.field[f];
            c.first[f] = p.field[f] < 0 ? 0 : p.cells + p.pages[r] * p.page_bytes + first;
            c.row[f] = p.cell_bytes;
            c.window[f] = p.bytes[r];
        }
        s.windows = p.windows[r];
        s.key_bits = p.bits[r];
        if (read_coded(s, c, a)) return 1;
        a.queries += asked * s.key_size;
        a.output += asked * s.value_size;
        a.logsums += asked;
        a.logits += asked * s.tokens;
    }
    return 0;
}
