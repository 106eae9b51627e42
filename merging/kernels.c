/* Fused loops for the merges that most people make: linear, task arithmetic and TIES.

   The methods are defined in merging/methods, on tensors; here are the same operations in the same
   order and precision (float32, one fused multiply-add where torch has one), done for some
   hundred entries at a time while they are in the nearest cache. The tests compare the two bit for
   bit.

   Every function takes the inputs as a tuple of buffers, the base first, and their types as bytes
   (0 bfloat16, 1 float16, 2 float32). The interpreter's lock is not held while it computes. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 512   /* entries in work at a time */
#define LANES 16    /* partial sums, so that a compiler may add several at once */
#define MOST 32     /* experts */
#define WORD 8      /* flags that are looked at together */

/* One function for old processors, one with vectors of eight and fused multiply-adds; the right
   one is chosen when the module is loaded. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("default", "arch=x86-64-v3")))
#else
#define FOR_EACH_PROCESSOR
#endif
#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

enum { BFLOAT16, FLOAT16, FLOAT32 };
static const int SIZES[] = {2, 2, 4};

INLINE float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

INLINE float from_half(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t finite = as_bits(as_float(magnitude) * 0x1p112f); /* subnormals too */
    uint32_t bits = (half & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000u : finite;
    return as_float(bits | sign);
}

INLINE uint16_t to_half(float x) {
    uint32_t bits = as_bits(x), sign = bits & 0x80000000u, magnitude = bits ^ sign;
    uint32_t odd = (magnitude >> 13) & 1;
    uint32_t normal = (magnitude - 0x38000000u + 0xfff + odd) >> 13; /* to nearest, ties to even */
    uint32_t tiny = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t large = magnitude > 0x7f800000u ? 0x7e00 : 0x7c00;
    uint32_t half = magnitude < 0x38800000u ? tiny : magnitude < 0x47800000u ? normal : large;
    return (uint16_t)(half | sign >> 16);
}

INLINE uint16_t to_bfloat(float x) {
    uint32_t bits = as_bits(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : rounded);
}

INLINE void load(float *to, const char *from, int type, Py_ssize_t place, int count) {
    if (type == BFLOAT16) {
        const uint16_t *entries = (const uint16_t *)from + place;
        for (int j = 0; j < count; j++) to[j] = as_float((uint32_t)entries[j] << 16);
    } else if (type == FLOAT16) {
        const uint16_t *entries = (const uint16_t *)from + place;
        for (int j = 0; j < count; j++) to[j] = from_half(entries[j]);
    } else {
        memcpy(to, (const float *)from + place, (size_t)count * 4);
    }
}

/* One rounding. A merge that adds nothing to -0.0 keeps its sign. */
INLINE void store(
    char *to, int type, Py_ssize_t place, float *merged, const float *base, int count
) {
    for (int j = 0; j < count; j++)
        merged[j] = merged[j] == 0.0f && as_bits(base[j]) == 0x80000000u ? base[j] : merged[j];
    if (type == BFLOAT16) {
        uint16_t *entries = (uint16_t *)to + place;
        for (int j = 0; j < count; j++) entries[j] = to_bfloat(merged[j]);
    } else if (type == FLOAT16) {
        uint16_t *entries = (uint16_t *)to + place;
        for (int j = 0; j < count; j++) entries[j] = to_half(merged[j]);
    } else {
        memcpy((float *)to + place, merged, (size_t)count * 4);
    }
}

/* What the report tells of task vectors: their products with each other, entries that two experts
   move in opposite directions, entries that are NaN or infinite. */
typedef struct {
    double products[MOST][MOST];
    int64_t conflicts, non_finite;
} Moments;

INLINE double product(const float *a, const float *b, int count) {
    float lanes[LANES] = {0};
    int j = 0;
    for (; j + LANES <= count; j += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += a[j + lane] * b[j + lane];
    double sum = 0;
    for (; j < count; j++) sum += (double)a[j] * b[j];
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

static void products_of_the_finite(
    Moments *moments, float (*deltas)[BLOCK], int experts, int count
) {
    for (int j = 0; j < count; j++) {
        int finite = 1;
        for (int i = 0; i < experts; i++) finite &= isfinite(deltas[i][j]) != 0;
        moments->non_finite += !finite;
        for (int i = 0; finite && i < experts; i++)
            for (int l = 0; l <= i; l++)
                moments->products[i][l] += (double)deltas[i][j] * deltas[l][j];
    }
}

INLINE void gather(Moments *moments, float (*deltas)[BLOCK], int experts, int count) {
    double found[MOST][MOST];
    int finite = 1;
    for (int i = 0; i < experts; i++) {
        for (int l = 0; l <= i; l++) found[i][l] = product(deltas[i], deltas[l], count);
        finite &= isfinite(found[i][i]) != 0;
    }
    if (!finite) {
        products_of_the_finite(moments, deltas, experts, count);
    } else {
        for (int i = 0; i < experts; i++)
            for (int l = 0; l <= i; l++) moments->products[i][l] += found[i][l];
    }
    int conflicts = 0;
    if (experts == 2) {
        const float *a = deltas[0], *b = deltas[1];
        for (int j = 0; j < count; j++)
            conflicts += ((a[j] > 0) & (b[j] < 0)) | ((a[j] < 0) & (b[j] > 0));
    } else if (experts > 2) {
        for (int j = 0; j < count; j++) {
            int up = 0, down = 0;
            for (int i = 0; i < experts; i++) up |= deltas[i][j] > 0, down |= deltas[i][j] < 0;
            conflicts += up & down;
        }
    }
    moments->conflicts += conflicts;
}

typedef struct {
    int experts;
    Py_ssize_t entries;
    const char *inputs[MOST + 1];
    int types[MOST + 1];
    char *out;
    int out_type;
} Stretch;

/* Loads a block of all inputs and their task vectors. */
INLINE void load_block(
    const Stretch *s, Py_ssize_t place, int count, float (*inputs)[BLOCK], float (*deltas)[BLOCK]
) {
    for (int i = 0; i <= s->experts; i++) load(inputs[i], s->inputs[i], s->types[i], place, count);
    for (int i = 0; i < s->experts; i++)
        for (int j = 0; j < count; j++) deltas[i][j] = inputs[i + 1][j] - inputs[0][j];
}

/* scale * x + sum of c_i (x_i - x), around the input x; the base is among the x_i only where it
   is x itself. Task arithmetic is around the base, a mean around its first expert. */
FOR_EACH_PROCESSOR
static void combine_stretch(
    const Stretch *s, int around, float scale, const float *coefficients, Moments *moments
) {
    float inputs[MOST + 1][BLOCK], deltas[MOST][BLOCK], merged[BLOCK];
    for (Py_ssize_t place = 0; place < s->entries; place += BLOCK) {
        int count = s->entries - place < BLOCK ? (int)(s->entries - place) : BLOCK;
        load_block(s, place, count, inputs, deltas);
        gather(moments, deltas, s->experts, count);
        const float *centre = inputs[around];
        for (int j = 0; j < count; j++) merged[j] = centre[j] * scale;
        for (int i = 1; i <= s->experts; i++) {
            float c = coefficients[i - 1];
            const float *other = inputs[i];
            if (i == around || c == 0) continue;
            for (int j = 0; j < count; j++) merged[j] = fmaf(other[j] - centre[j], c, merged[j]);
        }
        store(s->out, s->out_type, place, merged, inputs[0], count);
    }
}

typedef struct {
    float weight, vote, share; /* of one expert */
    float threshold;           /* larger magnitudes are kept; below 0: all are */
    int64_t equals;            /* and so many equal to it, the first; below 0: all */
} Part;

INLINE void trim(float *kept, const float *delta, Part *part, int count) {
    float limit = part->threshold;
    int equal = 0; /* magnitudes in this block that equal the limit */
    if (part->equals > 0)
        for (int j = 0; j < count; j++) equal += fabsf(delta[j]) == limit;
    if (part->equals < 0 || (equal && equal <= part->equals)) {
        for (int j = 0; j < count; j++) kept[j] = fabsf(delta[j]) >= limit ? delta[j] : 0.0f;
        if (equal) part->equals -= equal;
    } else if (part->equals == 0 || !equal) {
        for (int j = 0; j < count; j++) kept[j] = fabsf(delta[j]) > limit ? delta[j] : 0.0f;
    } else { /* only some of them, the first */
        for (int j = 0; j < count; j++) {
            int last = fabsf(delta[j]) == limit && part->equals > 0;
            part->equals -= last;
            kept[j] = fabsf(delta[j]) > limit || last ? delta[j] : 0.0f;
        }
    }
}

FOR_EACH_PROCESSOR
static void ties_stretch(const Stretch *s, Part *parts, float lambda, int divide, Moments *moments) {
    float inputs[MOST + 1][BLOCK], deltas[MOST][BLOCK], kept[MOST][BLOCK];
    float elected[BLOCK], total[BLOCK], divisor[BLOCK];
    float least = INFINITY; /* share: where it is positive, the divisor is 0 only with the total */
    for (int i = 0; i < s->experts; i++) least = fminf(least, parts[i].share);
    for (Py_ssize_t place = 0; place < s->entries; place += BLOCK) {
        int count = s->entries - place < BLOCK ? (int)(s->entries - place) : BLOCK;
        load_block(s, place, count, inputs, deltas);
        gather(moments, deltas, s->experts, count);
        for (int i = 0; i < s->experts; i++) {
            float vote = parts[i].vote;
            const float *tau = kept[i];
            trim(kept[i], deltas[i], &parts[i], count);
            if (i == 0) {
                for (int j = 0; j < count; j++) elected[j] = tau[j] * vote;
            } else {
                for (int j = 0; j < count; j++) elected[j] = fmaf(tau[j], vote, elected[j]);
            }
        }
        for (int j = 0; j < count; j++) {
            elected[j] = copysignf(1.0f, elected[j]);
            total[j] = divisor[j] = 0.0f;
        }
        for (int i = 0; i < s->experts; i++) {
            float side = copysignf(1.0f, parts[i].vote), weight = parts[i].weight * side;
            float share = parts[i].share;
            const float *tau = kept[i];
            for (int j = 0; j < count; j++) {
                float agreeing = tau[j] * elected[j] * side;
                agreeing = agreeing > 0.0f ? agreeing : 0.0f;
                total[j] = fmaf(agreeing, weight, total[j]);
                divisor[j] = fmaf(agreeing > 0.0f ? 1.0f : 0.0f, share, divisor[j]);
            }
        }
        for (int j = 0; j < count; j++) {
            float sum = total[j] * elected[j], by = divisor[j];
            by = least > 0 ? (by > least ? by : least) : (by == 0.0f ? 1.0f : by);
            total[j] = divide ? inputs[0][j] + lambda * sum / by : fmaf(sum, lambda, inputs[0][j]);
        }
        store(s->out, s->out_type, place, total, inputs[0], count);
    }
}

typedef struct {
    float low, high; /* the bracket */
    int64_t above, at_high, at_low;
    float *inside; /* the magnitudes strictly between low and high */
    Py_ssize_t found;
} Bracket;

FOR_EACH_PROCESSOR
static void look_stretch(const Stretch *s, Bracket *brackets) {
    float inputs[MOST + 1][BLOCK], deltas[MOST][BLOCK];
    for (Py_ssize_t place = 0; place < s->entries; place += BLOCK) {
        int count = s->entries - place < BLOCK ? (int)(s->entries - place) : BLOCK;
        load_block(s, place, count, inputs, deltas);
        for (int i = 0; i < s->experts; i++) {
            Bracket *b = &brackets[i];
            float low = b->low, high = b->high, *inside = b->inside, *m = deltas[i];
            int above = 0, at_high = 0, at_low = 0;
            for (int j = 0; j < count; j++) {
                m[j] = fabsf(m[j]);
                above += m[j] > high;
                at_high += m[j] == high;
                at_low += m[j] == low;
            }
            b->above += above;
            b->at_high += at_high;
            b->at_low += at_low;
            unsigned char within[BLOCK + WORD] = {0};
            for (int j = 0; j < count; j++) within[j] = (m[j] > low) & (m[j] < high);
            Py_ssize_t found = b->found;
            for (int j = 0; j < count; j += WORD) {
                uint64_t any;
                memcpy(&any, within + j, WORD);
                if (any == 0) continue; /* most often */
                for (int l = j; l < j + WORD && l < count; l++) {
                    inside[found] = m[l];
                    found += within[l];
                }
            }
            b->found = found;
        }
    }
}

/* --- from and to Python ----------------------------------------------------------------------- */

typedef struct {
    Py_buffer held[2 * MOST + 2];
    int count;
} Buffers;

static void release(Buffers *buffers) {
    for (int i = 0; i < buffers->count; i++) PyBuffer_Release(&buffers->held[i]);
    buffers->count = 0;
}

static void *hold(Buffers *buffers, PyObject *object, Py_ssize_t bytes, int writable) {
    Py_buffer *buffer = &buffers->held[buffers->count];
    if (PyObject_GetBuffer(object, buffer, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE)) return NULL;
    buffers->count++;
    if (buffer->len < bytes) {
        PyErr_Format(PyExc_ValueError, "a buffer of %zd bytes where %zd are needed", buffer->len,
                     bytes);
        return NULL;
    }
    return buffer->buf;
}

/* inputs: a tuple of k + 1 buffers; types: as many bytes. */
static int parse_inputs(
    Stretch *s, Buffers *buffers, PyObject *inputs, const char *types, Py_ssize_t count
) {
    if (!PyTuple_Check(inputs) || PyTuple_GET_SIZE(inputs) != count || count < 2 ||
        count > MOST + 1 || s->entries < 0) {
        PyErr_Format(PyExc_ValueError, "expected a base and 1 to %d experts, a type each", MOST);
        return 0;
    }
    s->experts = (int)count - 1;
    for (Py_ssize_t i = 0; i < count; i++) {
        s->types[i] = types[i];
        if (types[i] < BFLOAT16 || types[i] > FLOAT32) {
            PyErr_SetString(PyExc_ValueError, "unknown type of an input");
            return 0;
        }
        PyObject *input = PyTuple_GET_ITEM(inputs, i);
        s->inputs[i] = hold(buffers, input, s->entries * SIZES[s->types[i]], 0);
        if (s->inputs[i] == NULL) return 0;
    }
    return 1;
}

static int parse_out(Stretch *s, Buffers *buffers, PyObject *out) {
    if (s->out_type < BFLOAT16 || s->out_type > FLOAT32) {
        PyErr_SetString(PyExc_ValueError, "unknown type of the output");
        return 0;
    }
    s->out = hold(buffers, out, s->entries * SIZES[s->out_type], 1);
    return s->out != NULL;
}

static int parse_floats(float *to, PyObject *sequence, int count) {
    PyObject *fast = PySequence_Fast(sequence, "expected a sequence of numbers");
    if (fast == NULL) return 0;
    if (PySequence_Fast_GET_SIZE(fast) != count) {
        PyErr_Format(PyExc_ValueError, "expected %d numbers, one an expert", count);
        Py_DECREF(fast);
        return 0;
    }
    for (int i = 0; i < count; i++)
        to[i] = (float)PyFloat_AsDouble(PySequence_Fast_GET_ITEM(fast, i));
    Py_DECREF(fast);
    return !PyErr_Occurred();
}

/* ([[product, ...], ...], conflicts, entries, non-finite entries) */
static PyObject *told(const Moments *moments, const Stretch *s) {
    PyObject *rows = PyList_New(s->experts);
    if (rows == NULL) return NULL;
    for (int i = 0; i < s->experts; i++) {
        PyObject *row = PyList_New(i + 1);
        if (row == NULL) {
            Py_DECREF(rows);
            return NULL;
        }
        PyList_SET_ITEM(rows, i, row);
        for (int l = 0; l <= i; l++) {
            PyObject *number = PyFloat_FromDouble(moments->products[i][l]);
            if (number == NULL) {
                Py_DECREF(rows);
                return NULL;
            }
            PyList_SET_ITEM(row, l, number);
        }
    }
    return Py_BuildValue("NLnL", rows, (long long)moments->conflicts, s->entries,
                         (long long)moments->non_finite);
}

static PyObject *combine(PyObject *module, PyObject *args) {
    Stretch s;
    Buffers buffers = {.count = 0};
    PyObject *inputs, *out, *given, *result = NULL;
    const char *types;
    Py_ssize_t count;
    int around;
    float scale, coefficients[MOST];
    (void)module;
    if (!PyArg_ParseTuple(args, "Oy#nOiifO:combine", &inputs, &types, &count, &s.entries, &out,
                          &s.out_type, &around, &scale, &given))
        return NULL;
    Moments *moments = PyMem_RawCalloc(1, sizeof(Moments));
    if (moments == NULL) return PyErr_NoMemory();
    if (parse_inputs(&s, &buffers, inputs, types, count) && parse_out(&s, &buffers, out) &&
        parse_floats(coefficients, given, s.experts)) {
        if (around < 0 || around > s.experts) {
            PyErr_SetString(PyExc_ValueError, "around: no such input");
        } else {
            Py_BEGIN_ALLOW_THREADS
            combine_stretch(&s, around, scale, coefficients, moments);
            Py_END_ALLOW_THREADS
            result = told(moments, &s);
        }
    }
    release(&buffers);
    PyMem_RawFree(moments);
    return result;
}

static PyObject *ties(PyObject *module, PyObject *args) {
    Stretch s;
    Buffers buffers = {.count = 0};
    PyObject *inputs, *out, *columns[5], *result = NULL;
    const char *types;
    Py_ssize_t count;
    float lambda, numbers[4][MOST];
    int divide;
    Part parts[MOST];
    (void)module;
    if (!PyArg_ParseTuple(args, "Oy#nOifiOOOOO:ties", &inputs, &types, &count, &s.entries, &out,
                          &s.out_type, &lambda, &divide, &columns[0], &columns[1], &columns[2],
                          &columns[3], &columns[4]))
        return NULL;
    Moments *moments = PyMem_RawCalloc(1, sizeof(Moments));
    if (moments == NULL) return PyErr_NoMemory();
    int sound = parse_inputs(&s, &buffers, inputs, types, count) && parse_out(&s, &buffers, out);
    for (int column = 0; sound && column < 4; column++)
        sound = parse_floats(numbers[column], columns[column], s.experts);
    PyObject *equals = sound ? PySequence_Fast(columns[4], "expected a sequence") : NULL;
    sound = equals != NULL && PySequence_Fast_GET_SIZE(equals) == s.experts;
    for (int i = 0; sound && i < s.experts; i++) {
        int64_t left = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(equals, i));
        parts[i] = (Part){numbers[0][i], numbers[1][i], numbers[2][i], numbers[3][i], left};
    }
    Py_XDECREF(equals);
    if (!sound && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "expected five sequences of one entry an expert");
    if (sound && !PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        ties_stretch(&s, parts, lambda, divide, moments);
        Py_END_ALLOW_THREADS
        result = told(moments, &s);
    }
    release(&buffers);
    PyMem_RawFree(moments);
    return result;
}

static PyObject *look(PyObject *module, PyObject *args) {
    Stretch s;
    Buffers buffers = {.count = 0};
    PyObject *inputs, *low, *high, *insides, *result = NULL;
    const char *types;
    Py_ssize_t count;
    float lows[MOST], highs[MOST];
    Bracket brackets[MOST];
    (void)module;
    if (!PyArg_ParseTuple(args, "Oy#nOOO!:look", &inputs, &types, &count, &s.entries, &low, &high,
                          &PyTuple_Type, &insides))
        return NULL;
    int sound = parse_inputs(&s, &buffers, inputs, types, count) &&
                parse_floats(lows, low, s.experts) && parse_floats(highs, high, s.experts);
    if (sound && PyTuple_GET_SIZE(insides) != s.experts) {
        PyErr_SetString(PyExc_ValueError, "expected one buffer an expert");
        sound = 0;
    }
    for (int i = 0; sound && i < s.experts; i++) {
        /* One entry more than there are: the last candidate is written before it is judged. */
        float *inside = hold(&buffers, PyTuple_GET_ITEM(insides, i), (s.entries + 1) * 4, 1);
        brackets[i] = (Bracket){lows[i], highs[i], 0, 0, 0, inside, 0};
        sound = inside != NULL;
    }
    if (sound) {
        Py_BEGIN_ALLOW_THREADS
        look_stretch(&s, brackets);
        Py_END_ALLOW_THREADS
        result = PyList_New(0);
    }
    for (int i = 0; result != NULL && i < s.experts; i++) {
        Bracket *b = &brackets[i];
        PyObject *counts = Py_BuildValue("LLLn", (long long)b->above, (long long)b->at_high,
                                         (long long)b->at_low, b->found);
        if (counts == NULL || PyList_Append(result, counts)) Py_CLEAR(result);
        Py_XDECREF(counts);
    }
    release(&buffers);
    return result;
}

static PyMethodDef FUNCTIONS[] = {
    {"combine", combine, METH_VARARGS,
     "combine(inputs, types, entries, out, out_type, around, scale, coefficients) -> moments"},
    {"ties", ties, METH_VARARGS,
     "ties(inputs, types, entries, out, out_type, lambda, divide, weights, votes, shares, "
     "thresholds, equals) -> moments"},
    {"look", look, METH_VARARGS,
     "look(inputs, types, entries, lows, highs, insides) -> [(above, at_high, at_low, inside), ...]"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "kernels", "Fused loops; see merging/kernels.c.", -1, FUNCTIONS,
    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_kernels(void) { return PyModule_Create(&MODULE); }
