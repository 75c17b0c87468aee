# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The loops of a request over its pages, compiled: plain numbers in, plain numbers out. `loops` says what each must do, and
`tests/unit/model/test_loops.py` holds each to the NumPy that does the same where nothing was compiled.
"""

from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.list cimport PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLong, PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.tuple cimport PyTuple_CheckExact, PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.string cimport memcpy

cimport cython
import numpy as np

from kvreshard.model import plain_loops

ctypedef long long int64
ctypedef unsigned long long uint64

cdef object _INT32 = np.dtype(np.int32), _INT64 = np.dtype(np.int64), _UINT64 = np.dtype(np.uint64)
cdef object _empty = np.empty
# Above it a key of two numbers would not fit.
cdef int64 MAX_PAGE = 1 << 40
# Of rows: more are told apart by hashing them.
cdef enum:
    MOST_COLUMNS = 4
    MOST_KINDS = 32
# Far from where sums of them would wrap.
cdef int64 MAX_TOKENS = 1 << 48
# Places of all regions together, far from where they would wrap.
cdef int64 MAX_PLACE = 1 << 62


@cython.final
@cython.freelist(16)
cdef class _Numbers:
    """Where whole numbers of 64 bits lie, as long as this lives: found in a third of the time of a memoryview.

    Raises AttributeError or TypeError for anything but an array of them of one dimension.
    """

    cdef Py_buffer view
    cdef int64* at
    cdef Py_ssize_t size, step

    def __cinit__(self, object array):
        cdef object dtype = array.dtype
        if dtype is not _INT64 and dtype is not _UINT64 and dtype != _INT64 and dtype != _UINT64:
            raise TypeError(f"numbers of {dtype}")
        PyObject_GetBuffer(array, &self.view, PyBUF_STRIDES)
        if self.view.ndim != 1:
            raise TypeError(f"numbers of {self.view.ndim} dimensions")
        self.at, self.size, self.step = <int64*>self.view.buf, self.view.shape[0], self.view.strides[0] // 8

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    cdef inline int64 get(self, Py_ssize_t index) noexcept:
        return self.at[index * self.step]


@cython.final
@cython.freelist(8)
cdef class _Fresh:
    """An array that was just made, without gaps, to be written."""

    cdef Py_buffer view
    cdef int64* at
    cdef readonly object array

    def __cinit__(self, object shape, object dtype):
        self.array = _empty(shape, dtype)
        PyObject_GetBuffer(self.array, &self.view, PyBUF_WRITABLE)
        self.at = <int64*>self.view.buf

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


cdef object _of_ints(object values):
    """A list or tuple of ints as an array; None for anything else, for none of them, and for ints of more than 64 bits."""
    cdef Py_ssize_t i, n
    cdef bint is_list = PyList_CheckExact(values)
    cdef _Fresh out
    if not is_list and not PyTuple_CheckExact(values):
        return None
    n = PyList_GET_SIZE(values) if is_list else PyTuple_GET_SIZE(values)
    if not n:
        return None
    out = _Fresh(n, _INT64)
    for i in range(n):
        item = <object>(PyList_GET_ITEM(values, i) if is_list else PyTuple_GET_ITEM(values, i))
        if not PyLong_CheckExact(item):
            return None
        try:
            out.at[i] = PyLong_AsLongLong(item)
        except OverflowError:
            return None
    return out.array


def page_ids(object pages):
    """A copy of the page ids, as an array of whatever they are; a list of ints is the usual case."""
    found = _of_ints(pages)
    return np.array(pages) if found is None else found


def int64s(object values):
    """Whole numbers as an array."""
    found = _of_ints(values)
    return np.array(values, _INT64) if found is None else found


def extent_of(addresses, sizes):
    """The least address and size, where the last of some regions ends, and whether each begins where the one before ends, or after."""
    cdef _Numbers at = _Numbers(addresses), length = _Numbers(sizes)
    cdef Py_ssize_t i
    cdef int64 low = at.get(0), least = length.get(0)
    cdef uint64 end = 0, last = 0
    cdef bint in_order = True
    if at.size != length.size:
        raise ValueError(f"{at.size} addresses, {length.size} sizes")
    for i in range(at.size):
        if at.get(i) < low:
            low = at.get(i)
        if length.get(i) < least:
            least = length.get(i)
        if <uint64>at.get(i) < end:
            in_order = False
        end = <uint64>at.get(i) + <uint64>length.get(i)
        if end > last:
            last = end
    if low < 0 or least < 0:
        return low, least, 0, False
    return low, least, last, in_order


def row_kinds(tuple columns):
    """Which rows of some columns are equal: the kind of each row, numbered in the order of their first rows, and those."""
    cdef int64* at[MOST_COLUMNS]
    cdef Py_ssize_t step[MOST_COLUMNS]
    cdef Py_ssize_t first[MOST_KINDS]
    cdef Py_ssize_t row, column, kind, count = 0, num_columns = len(columns), num_rows = 0
    cdef _Numbers numbers
    cdef _Fresh out
    if not 1 <= num_columns <= MOST_COLUMNS:
        return plain_loops.row_kinds(columns)
    held = []
    for column in range(num_columns):
        numbers = _Numbers(columns[column])
        held.append(numbers)
        at[column], step[column] = numbers.at, numbers.step
        if column and numbers.size != num_rows:
            raise ValueError(f"columns of {num_rows} and {numbers.size} rows")
        num_rows = numbers.size
    out = _Fresh(num_rows, _INT64)
    kind = 0
    for row in range(num_rows):
        # Mostly a row is like the one before.
        if row == 0 or not _are_equal(at, step, num_columns, row, first[kind]):
            for kind in range(count):
                if _are_equal(at, step, num_columns, row, first[kind]):
                    break
            else:
                if count == MOST_KINDS:
                    return plain_loops.row_kinds(columns)
                first[count] = row
                kind = count
                count += 1
        out.at[row] = kind
    return out.array, [first[kind] for kind in range(count)]


cdef inline bint _are_equal(
    int64** at, Py_ssize_t* step, Py_ssize_t num_columns, Py_ssize_t row, Py_ssize_t other
) noexcept:
    cdef Py_ssize_t column
    for column in range(num_columns):
        if at[column][row * step[column]] != at[column][other * step[column]]:
            return False
    return True


def bounds(array):
    """The least and the greatest of some numbers, at least one."""
    cdef _Numbers values = _Numbers(array)
    cdef int64 low = values.get(0), high = low, value
    cdef Py_ssize_t i
    for i in range(1, values.size):
        value = values.get(i)
        if value < low:
            low = value
        elif value > high:
            high = value
    return low, high


def are_within(places, which, sizes):
    """Whether every place lies in the thing it is of: `0 <= places[i] < sizes[which[i]]`. The numbers in `which` are right."""
    cdef _Numbers place = _Numbers(places), number = _Numbers(which), size = _Numbers(sizes)
    cdef Py_ssize_t i
    for i in range(place.size):
        if not 0 <= place.get(i) < size.get(number.get(i)):
            return False
    return True


def slab_places(sizes, tuple slabs, num_pages):
    """Where slabs begin and end, and their first pages end, counted over all regions; None where one is not plain."""
    cdef _Numbers size = _Numbers(sizes), region = _Numbers(slabs[0]), offset = _Numbers(slabs[1])
    cdef _Numbers stride = _Numbers(slabs[2]), page = _Numbers(slabs[3]), pool = _Numbers(slabs[4])
    cdef _Numbers count = _Numbers(num_pages)
    cdef _Fresh before = _Fresh(size.size, _INT64), out = _Fresh((3, region.size), _INT64)
    cdef Py_ssize_t i, n = region.size
    cdef int64 total = 0, at, begin, end
    for i in range(size.size):
        before.at[i] = total
        if not 0 < size.get(i) < MAX_PLACE - total:
            return None
        total += size.get(i)
    for i in range(n):
        begin, at = offset.get(i), stride.get(i)
        if not 0 <= begin < MAX_PLACE or not 0 < page.get(i) <= at or count.get(pool.get(i)) > MAX_PLACE // at:
            return None
        end = begin + (count.get(pool.get(i)) - 1) * at + page.get(i)
        if end > size.get(region.get(i)):
            return None
        out.at[i] = before.at[region.get(i)] + begin
        out.at[n + i] = before.at[region.get(i)] + end
        out.at[2 * n + i] = out.at[i] + page.get(i)
    return before.array, *out.array


def shard_places(places, tuple slabs, tuple kinds):
    """Where the shards end; None where one does not lie in a slab of its kind's stride and pool."""
    cdef _Numbers begin = _Numbers(places), which = _Numbers(kinds[0]), reach = _Numbers(kinds[1])
    cdef _Numbers stride = _Numbers(kinds[2]), pool = _Numbers(kinds[3])
    cdef _Numbers slab_begin = _Numbers(slabs[0]), slab_end = _Numbers(slabs[1])
    cdef _Numbers slab_stride = _Numbers(slabs[2]), slab_pool = _Numbers(slabs[3])
    cdef _Fresh out = _Fresh(begin.size, _INT64)
    cdef Py_ssize_t i, low, high, middle
    cdef int64 at
    for i in range(begin.size):
        at, low, high = begin.get(i), 0, slab_begin.size
        while low < high:  # the first slab that begins behind it
            middle = (low + high) // 2
            if slab_begin.get(middle) <= at:
                low = middle + 1
            else:
                high = middle
        low -= 1
        out.at[i] = at + reach.get(which.get(i))
        if low < 0 or out.at[i] > slab_end.get(low):
            return None
        if slab_stride.get(low) != stride.get(which.get(i)) or slab_pool.get(low) != pool.get(which.get(i)):
            return None
    return out.array


def are_apart(starts, stops):
    """Whether each begins where the one before ends, or after."""
    cdef _Numbers start = _Numbers(starts), stop = _Numbers(stops)
    cdef Py_ssize_t i
    for i in range(1, start.size):
        if start.get(i) < stop.get(i - 1):
            return False
    return True


def run_bounds(first, counts):
    """The least and the greatest of some runs of numbers, none of them empty, at least one."""
    cdef _Numbers begins = _Numbers(first), lengths = _Numbers(counts)
    cdef int64 low = begins.get(0), high = low, last
    cdef Py_ssize_t i
    for i in range(begins.size):
        last = begins.get(i) + (lengths.get(i) - 1)
        if begins.get(i) < low:
            low = begins.get(i)
        if last > high:
            high = last
    return low, high


cdef struct Pair:
    int64 src
    int64 dst


cdef void _sort(Pair* pairs, Pair* spare, Py_ssize_t n, int64 most) noexcept:
    """By the source, stable, eight bits at a time. What is sorted ends in `pairs`."""
    cdef Py_ssize_t count[256]
    cdef Py_ssize_t i, total, here
    cdef int shift = 0, digit
    cdef Pair* given = pairs
    cdef Pair* other = spare
    while shift < 64 and most >> shift:
        for digit in range(256):
            count[digit] = 0
        for i in range(n):
            count[(given[i].src >> shift) & 255] += 1
        total = 0
        for digit in range(256):
            here = count[digit]
            count[digit] = total
            total += here
        for i in range(n):
            digit = (given[i].src >> shift) & 255
            other[count[digit]] = given[i]
            count[digit] += 1
        given, other = other, given
        shift += 8
    if given != pairs:
        for i in range(n):
            pairs[i] = given[i]


cdef object _joined(list arrays):
    """One array after another; the only one as it is."""
    cdef _Numbers part
    cdef _Fresh out
    cdef Py_ssize_t n = 0, i
    if len(arrays) == 1:
        return arrays[0]
    for array in arrays:
        n += len(array)
    out = _Fresh(n, _INT64)
    n = 0
    for array in arrays:
        part = _Numbers(array)
        if part.step == 1:
            memcpy(out.at + n, part.at, part.size * sizeof(int64))
        else:
            for i in range(part.size):
                out.at[n + i] = part.get(i)
        n += part.size
    return out.array


def ordered(list src_parts, list dst_parts):
    """Pairs of pages in the order of the source; how many continue the pair before on both sides, and how many do at the source."""
    src, dst = _joined(src_parts), _joined(dst_parts)
    cdef _Numbers src_page = _Numbers(src), dst_page = _Numbers(dst)
    cdef Py_ssize_t i, n = src_page.size, joined = 0, src_joined = 0
    cdef int64 most = 0
    cdef Pair* pairs
    cdef _Fresh found
    cdef bint ascends = True
    cdef int64* here = src_page.at
    cdef Py_ssize_t step = src_page.step
    for i in range(1, n):
        if here[i * step] < here[(i - 1) * step]:
            ascends = False
            break
    if not ascends:
        found = _Fresh((2, n), _INT64)
        pairs = <Pair*>PyMem_Malloc(2 * n * sizeof(Pair))
        if pairs == NULL:
            raise MemoryError
        try:
            for i in range(n):
                pairs[i].src, pairs[i].dst = src_page.get(i), dst_page.get(i)
                if pairs[i].src < 0:
                    raise ValueError(f"page {pairs[i].src}")
                if pairs[i].src > most:
                    most = pairs[i].src
            _sort(pairs, pairs + n, n, most)
            for i in range(n):
                found.at[i], found.at[n + i] = pairs[i].src, pairs[i].dst
        finally:
            PyMem_Free(pairs)
        src, dst = found.array
        src_page, dst_page = _Numbers(src), _Numbers(dst)
        here, step = src_page.at, src_page.step
    cdef int64* there = dst_page.at
    cdef Py_ssize_t other_step = dst_page.step
    cdef bint continues
    for i in range(1, n):
        continues = here[i * step] == here[(i - 1) * step] + 1
        src_joined += continues
        joined += continues and there[i * other_step] == there[(i - 1) * other_step] + 1
    return src, dst, joined, src_joined


def runs(src, dst, int64 most_pages):
    """Source page, destination page and length of every run that continues on both sides; each `most_pages`th pair begins one."""
    cdef _Numbers src_page = _Numbers(src), dst_page = _Numbers(dst)
    cdef Py_ssize_t i, n = src_page.size, count = -1, step = src_page.step, other_step = dst_page.step
    cdef int64* here = src_page.at
    cdef int64* there = dst_page.at
    cdef int64 left = 0
    cdef _Fresh out
    cdef Py_ssize_t* begins = <Py_ssize_t*>PyMem_Malloc((n + 1) * sizeof(Py_ssize_t))
    if begins == NULL:
        raise MemoryError
    try:
        for i in range(n):
            if left == 0:
                left = most_pages
            elif here[i * step] == here[(i - 1) * step] + 1 and there[i * other_step] == there[(i - 1) * other_step] + 1:
                left -= 1
                continue
            count += 1
            begins[count] = i
            left -= 1
        count += 1
        begins[count] = n
        out = _Fresh((3, count), _INT64)
        for i in range(count):
            out.at[i], out.at[count + i] = here[begins[i] * step], there[begins[i] * other_step]
            out.at[2 * count + i] = begins[i + 1] - begins[i]
    finally:
        PyMem_Free(begins)
    return tuple(out.array)


cdef inline object _stretch(object pages, Py_ssize_t num_pages, Py_ssize_t start, Py_ssize_t stop):
    """Entries of a table; all of them are the table."""
    return pages if start == 0 and stop == num_pages else pages[start:stop]


cdef int64 _whole(object number) except? -1:
    """A number that is whole: others would be cut off without a word."""
    if not PyLong_CheckExact(number):
        raise TypeError(number)
    return PyLong_AsLongLong(number)


cdef struct Held:
    int64 key
    int group
    int64 place


cdef class _Seen:
    """Which places of which groups have a page. Pages of several pools are told apart by their key."""

    cdef Held* slots
    cdef size_t mask

    def __cinit__(self, Py_ssize_t most):
        cdef size_t size = 16, i
        while size < <size_t>(2 * most):
            size *= 2
        self.slots = <Held*>PyMem_Malloc(size * sizeof(Held))
        if self.slots == NULL:
            raise MemoryError
        self.mask = size - 1
        for i in range(size):
            self.slots[i].key = -1

    def __dealloc__(self):
        PyMem_Free(self.slots)

    cdef inline Held* find(self, int64 key) noexcept:
        """Where a key is, or would be."""
        cdef size_t at = (<size_t>key * <size_t>0x9E3779B97F4A7C15u) >> 20
        at &= self.mask
        while self.slots[at].key != -1 and self.slots[at].key != key:
            at = (at + 1) & self.mask
        return &self.slots[at]


cdef class Pages:
    """Pages of one side of a stream: of how many, which is none, and by which number their pool and group are known."""

    cdef readonly str name
    cdef readonly int64 num_pages, null_page
    cdef readonly int pool, group

    def __init__(self, str name, int64 num_pages, null_page, int pool, int group):
        if num_pages > MAX_PAGE:
            raise OverflowError(f"{num_pages} pages")
        self.name, self.num_pages = name, num_pages
        self.null_page = -1 if null_page is None else null_page
        self.pool, self.group = pool, group

    cdef inline bint has(self, int64 page) noexcept:
        return 0 <= page < self.num_pages and page != self.null_page


cdef class Stream:
    """What is known of a stream of equal pages: its two sides, indices of a page (0 for a state) and tokens of an index."""

    cdef readonly Pages src, dst
    cdef readonly int64 size, tokens_per_index, partial

    def __init__(self, Pages src, Pages dst, int64 size, int64 tokens_per_index, int64 partial):
        self.src, self.dst, self.size = src, dst, size
        self.tokens_per_index, self.partial = tokens_per_index, partial


cdef class Streams:
    """All streams of a route, in order, and the groups of its destination by name."""

    cdef list streams
    cdef dict groups
    cdef int num_pools

    def __init__(self, list streams, dict groups, int num_pools):
        self.streams, self.groups, self.num_pools = streams, groups, num_pools

    def cut(self, object request):
        """Per stream None where nothing is to be moved, else source pages, destination pages and parts as `whole.PagePairs`.

        None for a request that is not plainly right: whoever checks it in full then says what is wrong, or that nothing is.
        """
        try:
            return self._cut(request)
        except (AttributeError, BufferError, OverflowError, TypeError, ValueError):  # mappings, numbers or arrays of other kinds
            return None

    cdef object _cut(self, object request):
        cdef dict intervals = request.intervals, new = request.dst_new_pages
        cdef dict src_tables = request.src_tables, dst_tables = request.dst_tables
        cdef Stream stream
        cdef _Seen seen
        cdef Py_ssize_t most = 0
        for name in intervals:
            if name not in self.groups:
                return None
        for table in dst_tables.values():
            most += len(table.pages)
        for pages in new.values():
            most += len(pages)
        seen = _Seen(most)
        cuts = []
        for stream in self.streams:
            wanted = intervals.get(stream.dst.name)
            if wanted is None:
                return None
            if not wanted:
                cuts.append(None)
                continue
            src, dst = src_tables.get(stream.src.name), dst_tables.get(stream.dst.name)
            if src is None or dst is None:
                return None
            cut = self._paged(stream, src, dst, wanted, seen) if stream.size else self._state(stream, src, dst, seen)
            if cut is None:
                return None
            cuts.append(cut)
        if new and not self._are_new(new, dst_tables, seen):
            return None
        return cuts

    cdef object _state(self, Stream stream, object src, object dst, _Seen seen):
        cdef _Numbers src_page = _Numbers(src.pages), dst_page = _Numbers(dst.pages)
        if src_page.size != 1 or dst_page.size != 1 or src.num_tokens != dst.num_tokens:
            return None
        if not stream.src.has(src_page.get(0)) or not self._take(seen, stream.dst, dst_page.get(0), 0):
            return None
        return [src.pages], [dst.pages], []

    cdef object _paged(self, Stream stream, object src, object dst, object wanted, _Seen seen):
        cdef _Numbers src_page = _Numbers(src.pages), dst_page = _Numbers(dst.pages)
        cdef int64 src_first = _whole(src.first_page), dst_first = _whole(dst.first_page)
        cdef int64 num_tokens = min(_whole(src.num_tokens), _whole(dst.num_tokens))
        cdef int64 size = stream.size, start, stop, low, high, end = 0, page, first, last, edge, start_token, stop_token
        cdef list src_found = [], dst_found = [], parts = []
        for interval in wanted:
            first_token, end_token = interval
            start_token, stop_token = _whole(first_token), _whole(end_token)
            if stop_token > num_tokens or num_tokens > MAX_TOKENS:
                return None
            start, stop = start_token // stream.tokens_per_index, (stop_token + stream.partial) // stream.tokens_per_index
            if stop <= start:
                continue
            low, high = start // size, (stop - 1) // size + 1
            if low < src_first or high > src_first + src_page.size or low < dst_first or high > dst_first + dst_page.size:
                return None
            for page in range(low, high):
                if not stream.src.has(src_page.get(page - src_first)):
                    return None
                if not self._take(seen, stream.dst, dst_page.get(page - dst_first), page - dst_first):
                    return None
            start = max(end, start)
            if stop <= start:
                continue
            end = stop
            low, high = (start + size - 1) // size, stop // size
            if high > low:
                src_found.append(_stretch(src.pages, src_page.size, low - src_first, high - src_first))
                dst_found.append(_stretch(dst.pages, dst_page.size, low - dst_first, high - dst_first))
            for edge in range(2):
                first, last = (high * size, stop) if edge else (start, low * size)
                if low > high:  # inside one page
                    first, last = start, (start if edge else stop)
                if last > first:
                    page = first // size
                    parts.append(
                        (
                            (first - page * size, first - page * size, last - first),
                            src_page.get(page - src_first),
                            dst_page.get(page - dst_first),
                        )
                    )
        return src_found, dst_found, parts

    cdef bint _take(self, _Seen seen, Pages side, int64 page, int64 place) noexcept:
        """Whether a page is one of the pool and at no other place; it is at this one now."""
        cdef Held* held
        if not side.has(page):
            return False
        held = seen.find(page * self.num_pools + side.pool)
        if held.key == -1:
            held.key, held.group, held.place = page * self.num_pools + side.pool, side.group, place
            return True
        return held.group == side.group and held.place == place

    cdef bint _are_new(self, dict new, dict dst_tables, _Seen seen) except -1:
        """Whether the pages called new are their groups', and no other group's."""
        cdef Pages side
        cdef const int64[:] pages, listed
        cdef _Seen known
        cdef Held* held
        cdef Py_ssize_t i
        for name, given in new.items():
            found = self.groups.get(name)
            if found is None:
                return False
            side = found
            if type(given) is not np.ndarray or given.dtype is not _INT64:
                return False
            pages = given
            if not pages.shape[0]:
                continue
            table = dst_tables.get(name)
            if table is None:
                return False
            listed = table.pages
            known = _Seen(listed.shape[0])
            for i in range(listed.shape[0]):
                if listed[i] >= 0:  # a place that is no page is not looked at, unless it is to be moved
                    known.find(listed[i]).key = listed[i]
            for i in range(pages.shape[0]):
                if not side.has(pages[i]) or known.find(pages[i]).key == -1:
                    return False
                held = seen.find(pages[i] * self.num_pools + side.pool)
                if held.key == -1:
                    held.key, held.group, held.place = pages[i] * self.num_pools + side.pool, side.group, -1
                elif held.group != side.group:
                    return False
        return True


cdef class _Rows:
    """Rows of (address, bytes, device) of both sides, and what all rows before each cost, with what all of them do."""

    cdef _Fresh local, remote, cost
    cdef uint64 local_device, remote_device, cost_bytes, total
    cdef Py_ssize_t row

    def __cinit__(self, Py_ssize_t count, tuple devices, uint64 cost_bytes):
        self.local, self.remote = _Fresh((count, 3), _UINT64), _Fresh((count, 3), _UINT64)
        self.cost = _Fresh(count + 1, _UINT64)
        self.local_device, self.remote_device = devices
        self.cost_bytes, self.total, self.row = cost_bytes, 0, 0
        self.cost.at[0] = 0

    cdef inline void add(self, uint64 local, uint64 remote, uint64 length) noexcept:
        cdef int64* here = self.local.at + 3 * self.row
        cdef int64* there = self.remote.at + 3 * self.row
        here[0], here[1], here[2] = local, length, self.local_device
        there[0], there[1], there[2] = remote, length, self.remote_device
        self.total += length + self.cost_bytes
        self.row += 1
        self.cost.at[self.row] = self.total


def frame_rows(tuple entries, tuple stride_bytes, tuple devices, tuple pages, uint64 cost_bytes):
    """The entries of a frame, one by one for some runs of pages, with what all before each cost beside its bytes."""
    cdef _Numbers local_address = _Numbers(entries[0]), remote_address = _Numbers(entries[1]), length = _Numbers(entries[2])
    cdef _Numbers local_page = _Numbers(pages[0]), remote_page = _Numbers(pages[1]), run_pages = _Numbers(pages[2])
    cdef uint64 local_stride_bytes = stride_bytes[0], remote_stride_bytes = stride_bytes[1]
    cdef Py_ssize_t entry, run
    cdef _Rows rows = _Rows(length.size * local_page.size, devices, cost_bytes)
    for entry in range(length.size):
        for run in range(local_page.size):
            rows.add(
                <uint64>local_address.get(entry) + <uint64>local_page.get(run) * local_stride_bytes,
                <uint64>remote_address.get(entry) + <uint64>remote_page.get(run) * remote_stride_bytes,
                <uint64>length.get(entry) * <uint64>run_pages.get(run),
            )
    return rows.local.array, rows.remote.array, rows.cost.array


def piece_rows(tuple pieces, tuple devices, uint64 cost_bytes):
    """Pieces as rows of both sides, with what all before each cost beside their bytes, and the longest."""
    cdef _Numbers local_address = _Numbers(pieces[0]), remote_address = _Numbers(pieces[1]), length = _Numbers(pieces[2])
    cdef uint64 longest = 0
    cdef Py_ssize_t row
    cdef _Rows rows = _Rows(length.size, devices, cost_bytes)
    for row in range(length.size):
        rows.add(local_address.get(row), remote_address.get(row), length.get(row))
        if <uint64>length.get(row) > longest:
            longest = length.get(row)
    return rows.local.array, rows.remote.array, rows.cost.array, longest


def strided_rows(address, length_bytes, uint64 device, uint64 stride_bytes, uint64 count):
    """Rows of (address, bytes, device, stride, count), the last three alike."""
    cdef _Numbers at = _Numbers(address), length = _Numbers(length_bytes)
    cdef _Fresh out
    cdef Py_ssize_t row
    if at.size != length.size:
        raise ValueError(f"{at.size} addresses, {length.size} lengths")
    out = _Fresh((at.size, 5), _UINT64)
    for row in range(at.size):
        out.at[5 * row], out.at[5 * row + 1] = at.get(row), length.get(row)
        out.at[5 * row + 2], out.at[5 * row + 3], out.at[5 * row + 4] = device, stride_bytes, count
    return out.array


def lane_entries(list lanes):
    """What every field has of every run, lane after lane: where it starts on both sides, and its length."""
    cdef _Numbers src, dst, src_offset, dst_offset, length
    cdef _Fresh out
    cdef Py_ssize_t field, run, row = 0, total = 0
    cdef list held = []
    for lane in lanes:
        src, dst, src_offset, dst_offset, length = map(_Numbers, lane)
        if src.size != dst.size or not (src_offset.size == dst_offset.size == length.size):
            raise ValueError(f"{src.size} and {dst.size} fields, {src_offset.size}, {dst_offset.size} and {length.size} runs")
        total += src.size * length.size
        held.append((src, dst, src_offset, dst_offset, length))
    out = _Fresh((3, total), _INT64)
    for lane in held:
        src, dst, src_offset, dst_offset, length = lane
        for field in range(src.size):
            for run in range(length.size):
                out.at[row] = src.get(field) + src_offset.get(run)
                out.at[total + row] = dst.get(field) + dst_offset.get(run)
                out.at[2 * total + row] = length.get(run)
                row += 1
    return tuple(out.array)


def pieces_extent(local_address, remote_address, length_bytes):
    """The greatest address of both sides, the greatest length, the sum of all, and whether all lengths are equal; at least one piece."""
    cdef _Numbers local = _Numbers(local_address), remote = _Numbers(remote_address), length = _Numbers(length_bytes)
    cdef uint64 most_local = 0, most_remote = 0, longest = 0, total = 0, shortest = <uint64>length.get(0)
    cdef Py_ssize_t i
    if not (local.size == remote.size == length.size):
        raise ValueError(f"{local.size} and {remote.size} addresses, {length.size} lengths")
    for i in range(length.size):
        if <uint64>local.get(i) > most_local:
            most_local = local.get(i)
        if <uint64>remote.get(i) > most_remote:
            most_remote = remote.get(i)
        if <uint64>length.get(i) > longest:
            longest = length.get(i)
        if <uint64>length.get(i) < shortest:
            shortest = length.get(i)
        total += <uint64>length.get(i)
    return most_local, most_remote, longest, total, longest == shortest


def frame_copies(tuple entries, tuple stride_bytes, tuple pages):
    """The entries of a frame, one by one for some runs of pages: addresses of both sides and lengths."""
    cdef _Numbers src_start = _Numbers(entries[0]), dst_start = _Numbers(entries[1]), length = _Numbers(entries[2])
    cdef _Numbers src_page = _Numbers(pages[0]), dst_page = _Numbers(pages[1]), run_pages = _Numbers(pages[2])
    cdef int64 src_stride_bytes = stride_bytes[0], dst_stride_bytes = stride_bytes[1]
    cdef Py_ssize_t entry, run, row = 0, count = length.size * src_page.size
    cdef _Fresh out = _Fresh((3, count), _INT64)
    for entry in range(length.size):
        for run in range(src_page.size):
            out.at[row] = src_start.get(entry) + src_page.get(run) * src_stride_bytes
            out.at[count + row] = dst_start.get(entry) + dst_page.get(run) * dst_stride_bytes
            out.at[2 * count + row] = length.get(entry) * run_pages.get(run)
            row += 1
    return tuple(out.array)


def frame_indices(local, remote, tuple counts, Py_ssize_t first, Py_ssize_t stop):
    """Pieces `[first, stop)` of a frame as indices of both sides, entry after entry."""
    cdef _Numbers local_page = _Numbers(local), remote_page = _Numbers(remote)
    cdef Py_ssize_t piece, num_pages = local_page.size, page = first % num_pages
    cdef int64 local_count = counts[0], remote_count = counts[1]
    cdef int64 local_base = first // num_pages * local_count, remote_base = first // num_pages * remote_count
    cdef _Fresh local_index = _Fresh(stop - first, _INT32), remote_index = _Fresh(stop - first, _INT32)
    cdef int* here = <int*>local_index.at
    cdef int* there = <int*>remote_index.at
    for piece in range(stop - first):
        here[piece] = <int>(local_base + local_page.get(page))
        there[piece] = <int>(remote_base + remote_page.get(page))
        page += 1
        if page == num_pages:
            page = 0
            local_base += local_count
            remote_base += remote_count
    return local_index.array, remote_index.array


def reach(address, length_bytes):
    """The first byte of any piece and the last of any, at least one piece."""
    cdef _Numbers at = _Numbers(address), length = _Numbers(length_bytes)
    cdef uint64 low = at.get(0), high = 0, first, last
    cdef Py_ssize_t i
    for i in range(at.size):
        first = at.get(i)
        last = first + (<uint64>length.get(i) - 1)
        if first < low:
            low = first
        if last > high:
            high = last
    return low, high


def slot_reads(const int64[:, :] src_page, tuple boxes, tuple sizes_bytes, field_bases, Py_ssize_t fields_each):
    """The boxes of every slot, those that continue on both sides joined, for every field."""
    cdef _Numbers src_offset = _Numbers(boxes[0]), slot_offset = _Numbers(boxes[1]), length = _Numbers(boxes[2])
    cdef _Numbers bases = _Numbers(field_bases)
    cdef int64 stride_bytes = sizes_bytes[0], slot_bytes = sizes_bytes[1], source, place, batch_bytes
    cdef Py_ssize_t slot, box, field, row, num_slots = src_page.shape[0], num_boxes = length.size
    cdef Py_ssize_t num_fields = bases.size, most = num_slots * num_boxes, count = -1, at = 0, total
    cdef int64* sources = <int64*>PyMem_Malloc(3 * most * sizeof(int64))
    if sources == NULL:
        raise MemoryError
    cdef int64* places = sources + most
    cdef int64* lengths = sources + 2 * most
    try:
        for slot in range(num_slots):
            for box in range(num_boxes):
                # All boxes of a slot lie in one page, or each in its own.
                source = src_page[slot, box if src_page.shape[1] > 1 else 0] * stride_bytes + src_offset.get(box)
                place = slot * slot_bytes + slot_offset.get(box)
                if count >= 0 and source == sources[count] + lengths[count] and place == places[count] + lengths[count]:
                    lengths[count] += length.get(box)
                else:
                    count += 1
                    sources[count], places[count], lengths[count] = source, place, length.get(box)
        count += 1
        total = num_fields * count
        out = _Fresh((3, total), _INT64)
        batch_bytes = num_slots * slot_bytes
        for field in range(num_fields):
            for row in range(count):
                out.at[at] = bases.get(field) + sources[row]
                out.at[total + at] = field % fields_each * batch_bytes + places[row]
                out.at[2 * total + at] = lengths[row]
                at += 1
    finally:
        PyMem_Free(sources)
    return *out.array, count


def shifted(array, list counts, list by):
    """So many of the values, one group after another, each greater by its group's number."""
    cdef _Numbers values = _Numbers(array)
    cdef Py_ssize_t group, at = 0, i, n = values.size, count
    cdef int64 more
    cdef _Fresh out = _Fresh(n, _INT64)
    for group in range(len(counts)):
        count, more = counts[group], by[group]
        if count < 0 or at + count > n:
            raise ValueError(f"{counts} of {n}")
        for i in range(at, at + count):
            out.at[i] = values.get(i) + more
        at += count
    if at != n:
        raise ValueError(f"{counts} of {n}")
    return out.array


def are_pieces(local_address, remote_address, length_bytes):
    """Whether there is a length for every address of both sides, no address is negative, and none is empty."""
    cdef _Numbers local = _Numbers(local_address), remote = _Numbers(remote_address), length = _Numbers(length_bytes)
    cdef Py_ssize_t i
    if local.size != length.size or remote.size != length.size:
        return False
    for i in range(length.size):
        if local.get(i) < 0 or remote.get(i) < 0 or length.get(i) < 1:
            return False
    return True


def affordable(cost_before, Py_ssize_t first, Py_ssize_t stop, uint64 budget):
    """Up to which of the pieces `[first, stop)` a budget reaches, at least past one."""
    cdef _Numbers cost = _Numbers(cost_before)
    cdef uint64 before = cost.get(first)
    cdef Py_ssize_t low = first + 1, high = stop, middle
    if <uint64>cost.get(stop) - before > budget:
        while low < high:  # the last that the budget reaches
            middle = (low + high + 1) // 2
            if <uint64>cost.get(middle) - before <= budget:
                low = middle
            else:
                high = middle - 1
        stop = low
    return stop
