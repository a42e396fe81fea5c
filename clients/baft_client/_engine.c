/* Python's view of the copy engine (limited API 3.10: one abi3 wheel). engine.py wraps it and documents it.
 *
 * Addresses come as integers: the buffer protocol is not in the limited API before 3.11, and most sources are
 * foreign memory anyway. Short calls keep the GIL: giving it up may cost 5 ms where another thread computes.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "_engine.h"

#define SHORT_CANARY 4096     /* tensors; below, the canary keeps the GIL */
#define SHORT_BYTES (1 << 20) /* the same for copies and digests in the calling thread */

static PyTypeObject *table_type;

/* ------------------------------------------------------------------ Table */

typedef struct {
    PyObject_HEAD
    baft_table table;
} TableObject;

static void Table_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    TableObject *t = (TableObject *)self;
    free(t->table.segments);
    free(t->table.chunks);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *Table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    const char *data;
    Py_ssize_t length;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "y#:Table", &data, &length)) return NULL;
    if ((size_t)length % sizeof(baft_segment)) {
        PyErr_SetString(PyExc_ValueError, "segments are 32 bytes each: source, offset, nbytes, itemsize");
        return NULL;
    }
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return NULL;
    baft_table *t = &((TableObject *)self)->table;
    t->count = (size_t)length / sizeof(baft_segment);
    t->segments = malloc((size_t)length + 1);
    if (t->segments) memcpy(t->segments, data, (size_t)length);
    if (!t->segments || !baft_table_chunks(t)) {
        PyErr_SetString(t->segments ? PyExc_ValueError : PyExc_MemoryError, "sizes of the segments overflow, or no memory");
        Py_DECREF(self);
        return NULL;
    }
    return self;
}

static PyObject *Table_update(PyObject *self, PyObject *args) {
    unsigned long long address;
    Py_ssize_t count;
    baft_table *t = &((TableObject *)self)->table;
    if (!PyArg_ParseTuple(args, "Kn:update", &address, &count)) return NULL;
    if ((size_t)count != t->count) return PyErr_Format(PyExc_ValueError, "%zd addresses for %zu segments", count, t->count);
    if (atomic_load(&t->users)) {
        PyErr_SetString(PyExc_RuntimeError, "a copy of this table runs");
        return NULL;
    }
    const uint64_t *sources = (const uint64_t *)(uintptr_t)address;
    for (size_t i = 0; i < t->count; i++) t->segments[i].source = sources[i];
    Py_RETURN_NONE;
}

static PyObject *Table_count(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(((TableObject *)self)->table.count);
}

static PyObject *Table_chunks(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(((TableObject *)self)->table.nchunks);
}

static PyObject *Table_total(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(((TableObject *)self)->table.total);
}

static PyObject *Table_extent(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(((TableObject *)self)->table.extent);
}

static PyMethodDef table_methods[] = {
    {"update", Table_update, METH_VARARGS, "update(address of uint64[count], count): new source addresses"},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef table_values[] = {
    {"count", Table_count, NULL, "number of segments", NULL},
    {"chunks", Table_chunks, NULL, "number of digests", NULL},
    {"total", Table_total, NULL, "bytes of all segments", NULL},
    {"extent", Table_extent, NULL, "highest offset + nbytes", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot table_slots[] = {
    {Py_tp_new, (void *)Table_new},
    {Py_tp_dealloc, (void *)Table_dealloc},
    {Py_tp_methods, table_methods},
    {Py_tp_getset, table_values},
    {Py_tp_doc, (void *)"Table(bytes): segments of 4 uint64 each: source, offset, nbytes, itemsize"},
    {0, NULL},
};
static PyType_Spec table_spec = {"baft_client._engine.Table", sizeof(TableObject), 0, Py_TPFLAGS_DEFAULT, table_slots};

static baft_table *as_table(PyObject *object) { return &((TableObject *)object)->table; }

/* ------------------------------------------------------------------ Engine */

typedef struct {
    PyObject_HEAD
    baft_engine *engine;
    PyObject *table; /* of the newest start: its memory outlives the copy */
} EngineObject;

#define ENGINE(self) (((EngineObject *)(self))->engine)

static void Engine_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (ENGINE(self)) baft_engine_free(ENGINE(self));
    Py_XDECREF(((EngineObject *)self)->table);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *Engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int fd, nice, hold;
    unsigned long long throttle;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "iiKp:Engine", &fd, &nice, &throttle, &hold)) return NULL;
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return NULL;
    ENGINE(self) = baft_engine_new(fd, nice, throttle, hold);
    if (!ENGINE(self)) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return self;
}

static PyObject *Engine_start(PyObject *self, PyObject *args) {
    unsigned long long destination, capacity;
    PyObject *table;
    if (!PyArg_ParseTuple(args, "KKO!:start", &destination, &capacity, table_type, &table)) return NULL;
    if (as_table(table)->extent > capacity) {
        return PyErr_Format(PyExc_ValueError, "the segments end at byte %llu, the destination at %llu",
                            (unsigned long long)as_table(table)->extent, capacity);
    }
    if (!baft_engine_start(ENGINE(self), as_table(table), (uint8_t *)(uintptr_t)destination)) {
        PyErr_SetString(PyExc_RuntimeError, "a copy is unfinished, the engine is stopped, or there is no memory");
        return NULL;
    }
    PyObject *before = ((EngineObject *)self)->table;
    Py_INCREF(table);
    ((EngineObject *)self)->table = table;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *Engine_open(PyObject *self, PyObject *args) {
    (void)args;
    baft_engine_open(ENGINE(self));
    Py_RETURN_NONE;
}

/* Windows are opened and closed beside every wait of a step: no tuple of arguments is built for them. */
static bool one_number(PyObject *const *args, Py_ssize_t count, unsigned long long *value) {
    if (count != 1) {
        PyErr_SetString(PyExc_TypeError, "one number is needed");
        return false;
    }
    *value = PyLong_AsUnsignedLongLong(args[0]);
    return *value != (unsigned long long)-1 || !PyErr_Occurred();
}

static PyObject *Engine_window(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    unsigned long long budget;
    if (!one_number(args, count, &budget)) return NULL;
    baft_engine_window(ENGINE(self), budget);
    Py_RETURN_NONE;
}

static PyObject *Engine_close(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    unsigned long long outside;
    if (!one_number(args, count, &outside)) return NULL;
    baft_engine_close(ENGINE(self), outside);
    Py_RETURN_NONE;
}

/* timed(address of uint64[3 * count], count) */
static PyObject *Engine_timed(PyObject *self, PyObject *args) {
    unsigned long long address;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "Kn:timed", &address, &count)) return NULL;
    if (!baft_engine_timed(ENGINE(self), (const uint64_t *)(uintptr_t)address, (size_t)count)) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *Engine_spans(PyObject *self, PyObject *args) {
    (void)args;
    baft_span *spans = malloc(BAFT_SPANS_ROOM * sizeof *spans);
    if (!spans) return PyErr_NoMemory();
    size_t n = baft_engine_spans(ENGINE(self), spans);
    PyObject *result = PyBytes_FromStringAndSize((const char *)spans, (Py_ssize_t)(n * sizeof *spans));
    free(spans);
    return result;
}

static PyObject *Engine_copied(PyObject *self, PyObject *args) {
    uint64_t bytes[BAFT_KINDS];
    (void)args;
    baft_engine_copied(ENGINE(self), bytes);
    return Py_BuildValue("KKK", (unsigned long long)bytes[BAFT_INSIDE], (unsigned long long)bytes[BAFT_OUTSIDE],
                         (unsigned long long)bytes[BAFT_FENCE]);
}

static PyObject *Engine_lost(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(baft_engine_spans_lost(ENGINE(self)));
}

static PyObject *Engine_pace(PyObject *self, PyObject *args) {
    unsigned long long rate;
    if (!PyArg_ParseTuple(args, "K:pace", &rate)) return NULL;
    baft_engine_pace(ENGINE(self), rate);
    Py_RETURN_NONE;
}

static PyObject *Engine_flush(PyObject *self, PyObject *args) {
    double seconds;
    int help;
    if (!PyArg_ParseTuple(args, "dp:flush", &seconds, &help)) return NULL;
    baft_engine *engine = ENGINE(self);
    if (baft_engine_state(engine) == BAFT_ABSENT) Py_RETURN_FALSE;
    if (!baft_engine_left(engine)) { /* the usual case, and it costs no hand-over of the GIL */
        baft_engine_rest(engine);
        Py_RETURN_TRUE;
    }
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = baft_engine_flush(engine, seconds, help);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(done);
}

static PyObject *Engine_cancel(PyObject *self, PyObject *args) {
    (void)args;
    Py_BEGIN_ALLOW_THREADS
    baft_engine_cancel(ENGINE(self));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *Engine_stop(PyObject *self, PyObject *args) {
    (void)args;
    Py_BEGIN_ALLOW_THREADS
    baft_engine_stop(ENGINE(self));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *Engine_digests(PyObject *self, PyObject *args) {
    const uint8_t *digests;
    size_t nchunks;
    (void)args;
    if (!baft_engine_digests(ENGINE(self), &digests, &nchunks)) {
        PyErr_SetString(PyExc_RuntimeError, "the copy is not done");
        return NULL;
    }
    if (!baft_cpu->digests) nchunks = 0;
    return PyBytes_FromStringAndSize((const char *)digests, (Py_ssize_t)(nchunks * BAFT_DIGEST));
}

static PyObject *Engine_state(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLong(baft_engine_state(ENGINE(self)));
}

static PyObject *Engine_progress(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(baft_engine_progress(ENGINE(self)));
}

static PyObject *Engine_busy(PyObject *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(baft_engine_busy(ENGINE(self)));
}

static PyMethodDef engine_methods[] = {
    {"start", Engine_start, METH_VARARGS, "start(destination, capacity, table)"},
    {"open", Engine_open, METH_NOARGS, "open the gate for all the time"},
    {"window", (PyCFunction)(void (*)(void))Engine_window, METH_FASTCALL, "window(most bytes): begin one"},
    {"close", (PyCFunction)(void (*)(void))Engine_close, METH_FASTCALL, "close(bytes a second until the next, or 0)"},
    {"timed", Engine_timed, METH_VARARGS, "timed(address of (begin, end, bytes) as uint64, count)"},
    {"spans", Engine_spans, METH_NOARGS, "records of copying since the last call"},
    {"copied", Engine_copied, METH_NOARGS, "bytes (inside, outside, at the fence) of the newest copy"},
    {"pace", Engine_pace, METH_VARARGS, "pace(bytes a second, 0: full speed)"},
    {"flush", Engine_flush, METH_VARARGS, "flush(seconds, help) -> everything is copied"},
    {"cancel", Engine_cancel, METH_NOARGS, "give the copy up"},
    {"stop", Engine_stop, METH_NOARGS, "cancel, end the thread, join it"},
    {"digests", Engine_digests, METH_NOARGS, "16 bytes for each chunk"},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef engine_values[] = {
    {"state", Engine_state, NULL, "number of EngineState", NULL},
    {"progress", Engine_progress, NULL, "bytes in the slot", NULL},
    {"busy", Engine_busy, NULL, "a thread is inside a block", NULL},
    {"spans_lost", Engine_lost, NULL, "spans without room", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot engine_slots[] = {
    {Py_tp_new, (void *)Engine_new},
    {Py_tp_dealloc, (void *)Engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_getset, engine_values},
    {Py_tp_doc, (void *)"Engine(fd of the control page or -1, nice, throttle, hold)"},
    {0, NULL},
};
static PyType_Spec engine_spec = {"baft_client._engine.Engine", sizeof(EngineObject), 0, Py_TPFLAGS_DEFAULT, engine_slots};

/* ------------------------------------------------------------------ functions */

static PyObject *canary(PyObject *module, PyObject *args) {
    PyObject *object;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!:canary", table_type, &object)) return NULL;
    baft_table *t = as_table(object);
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(t->count * sizeof(uint64_t)));
    if (!result) return NULL;
    uint64_t *records = (uint64_t *)(void *)PyBytes_AsString(result);
    if (t->count < SHORT_CANARY) {
        baft_table_canary(t, records);
    } else {
        Py_BEGIN_ALLOW_THREADS
        baft_table_canary(t, records);
        Py_END_ALLOW_THREADS
    }
    return result;
}

static PyObject *compare(PyObject *module, PyObject *args) {
    PyObject *object;
    unsigned long long destination;
    uint64_t at = 0;
    size_t index;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!K:compare", table_type, &object, &destination)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    index = baft_table_compare(as_table(object), (const uint8_t *)(uintptr_t)destination, &at);
    Py_END_ALLOW_THREADS
    if (index == as_table(object)->count) Py_RETURN_NONE;
    return Py_BuildValue("nK", (Py_ssize_t)index, (unsigned long long)at);
}

/* bulk(source, destination | 0, nbytes, threads) -> digests; empty where this build has none */
static PyObject *bulk(PyObject *module, PyObject *args) {
    unsigned long long source, destination, nbytes;
    int threads;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKi:bulk", &source, &destination, &nbytes, &threads)) return NULL;
    size_t n = (size_t)nbytes, chunks = baft_cpu->digests ? n / BAFT_CHUNK + (n % BAFT_CHUNK != 0) : 0;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(chunks * BAFT_DIGEST));
    if (!result) return NULL;
    uint8_t *digests = baft_cpu->digests ? (uint8_t *)PyBytes_AsString(result) : NULL;
    const uint8_t *from = (const uint8_t *)(uintptr_t)source;
    uint8_t *to = (uint8_t *)(uintptr_t)destination;
    if (!n || (!to && !digests)) return result;
    if (n <= SHORT_BYTES) {
        baft_bulk(from, to, n, digests, 1);
    } else {
        Py_BEGIN_ALLOW_THREADS
        baft_bulk(from, to, n, digests, threads);
        Py_END_ALLOW_THREADS
    }
    return result;
}

static PyObject *isas(PyObject *module, PyObject *args) {
    const baft_isa *list[8];
    size_t n = baft_isa_list(list, 8);
    (void)module, (void)args;
    PyObject *names = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; names && i < n; i++) {
        PyObject *name = PyUnicode_FromString(list[i]->name);
        if (!name || PyTuple_SetItem(names, (Py_ssize_t)i, name) < 0) Py_CLEAR(names);
    }
    return names;
}

static PyObject *use_isa(PyObject *module, PyObject *args) {
    const char *name;
    const baft_isa *list[8];
    size_t n = baft_isa_list(list, 8);
    (void)module;
    if (!PyArg_ParseTuple(args, "s:use_isa", &name)) return NULL;
    for (size_t i = 0; i < n; i++) {
        if (strcmp(list[i]->name, name) != 0) continue;
        baft_cpu = list[i];
        Py_RETURN_NONE;
    }
    return PyErr_Format(PyExc_ValueError, "this CPU or build has no %s", name);
}

static PyMethodDef functions[] = {
    {"canary", canary, METH_VARARGS, "canary(table) -> 8 bytes for each segment"},
    {"compare", compare, METH_VARARGS, "compare(table, destination) -> (segment, byte) | None"},
    {"bulk", bulk, METH_VARARGS, "bulk(source, destination | 0, nbytes, threads) -> digests"},
    {"isas", isas, METH_NOARGS, "instruction sets this CPU can run, best first"},
    {"use_isa", use_isa, METH_VARARGS, "use_isa(name): for tests and benchmarks, while no copy runs"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "baft_client._engine", "Native copy engine; see engine.py.", -1,
                                        functions, NULL, NULL, NULL, NULL};

static bool put(PyObject *module, const char *name, PyObject *value) {
    int result = value ? PyModule_AddObjectRef(module, name, value) : -1;
    Py_XDECREF(value);
    return result == 0;
}

/* Takes the best instruction set that agrees with the plain one on a copy and its digest: one that a CPU, a virtual
 * machine or a compiler gets wrong must cost speed, not checkpoints. Microseconds. */
static void choose_isa(void) {
    static uint8_t from[6000], to[6000];
    const baft_isa *list[8];
    size_t n = baft_isa_list(list, 8);
    uint8_t expected[BAFT_DIGEST], found[BAFT_DIGEST];
    baft_hash state;
    for (size_t i = 0; i < sizeof from; i++) from[i] = (uint8_t)(i * 131 + (i >> 8));
    baft_isa_base.hash_reset(&state);
    baft_isa_base.hash_update(&state, from + 3, sizeof from - 3);
    baft_isa_base.hash_finish(&state, expected);
    for (size_t i = 0; i < n; i++) {
        memset(to, 0, sizeof to);
        list[i]->hash_reset(&state);
        list[i]->hash_copy(&state, to + 7, from + 3, 3001);
        list[i]->hash_copy(&state, to + 3008, from + 3004, sizeof from - 3004 - 8);
        list[i]->hash_update(&state, from + sizeof from - 8, 8);
        list[i]->fence();
        list[i]->hash_finish(&state, found);
        if (memcmp(found, expected, BAFT_DIGEST) == 0 && memcmp(to + 7, from + 3, 3001) == 0) {
            baft_cpu = list[i];
            return;
        }
    }
}

PyMODINIT_FUNC PyInit__engine(void) {
    choose_isa();
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    PyObject *table = PyType_FromSpec(&table_spec);
    if (table) {
        Py_INCREF(table);
        table_type = (PyTypeObject *)table;
    }
#define BAFT_ENTRY(name, offset, size) ",s:(ii)"
#define BAFT_VALUE(name, offset, size) , #name, offset, size
    PyObject *fields = Py_BuildValue("{" BAFT_FIELDS(BAFT_ENTRY) "}" BAFT_FIELDS(BAFT_VALUE));
    PyObject *states = Py_BuildValue("{s:i,s:i,s:i,s:i,s:i,s:i,s:i}", "IDLE", BAFT_IDLE, "WAITING", BAFT_WAITING, "COPYING",
                                     BAFT_COPYING, "DONE", BAFT_DONE, "PAUSED", BAFT_PAUSED, "HELD", BAFT_HELD, "ABSENT",
                                     BAFT_ABSENT);
    PyObject *gates = Py_BuildValue("{s:i,s:i,s:i,s:i,s:i}", "CLOSED", BAFT_CLOSED, "OPEN", BAFT_OPEN, "FLUSH", BAFT_FLUSH,
                                    "WINDOW", BAFT_WINDOW, "OUTSIDE", BAFT_BESIDE);
    bool ok = put(module, "Table", table) && put(module, "Engine", PyType_FromSpec(&engine_spec)) &&
              put(module, "FIELDS", fields) && put(module, "STATES", states) && put(module, "GATES", gates) &&
              put(module, "MAGIC", PyLong_FromUnsignedLongLong(BAFT_PAGE_MAGIC)) &&
              put(module, "VERSION", PyLong_FromLong(BAFT_PAGE_VERSION)) &&
              put(module, "PAGE_BYTES", PyLong_FromLong(BAFT_PAGE_BYTES)) &&
              put(module, "SPANS", PyLong_FromLong(BAFT_SPANS)) && put(module, "SPAN_KIND", PyLong_FromLong(BAFT_SPAN_KIND)) &&
              put(module, "CHUNK", PyLong_FromSize_t(BAFT_CHUNK)) && put(module, "BLOCK", PyLong_FromSize_t(BAFT_BLOCK)) &&
              put(module, "digests", PyBool_FromLong(baft_cpu->digests)) &&
              put(module, "isa", PyUnicode_FromString(baft_cpu->name));
    if (!ok) Py_CLEAR(module);
    return module;
}
