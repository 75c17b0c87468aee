# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The loops of a request over its pages, compiled: plain numbers in, plain numbers out. `loops` says what each must do, and
`tests/unit/model/test_loops.py` holds each to the NumPy that does the same where nothing was compiled.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.list cimport PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLong, PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc

import numpy as np

ctypedef long long int64
ctypedef unsigned long long uint64

cdef object _INT32 = np.dtype(np.int32), _INT64 = np.dtype(np.int64), _UINT64 = np.dtype(np.uint64)
cdef object _empty = np.empty, _ndarray = np.ndarray
# Above it a key of two numbers would not fit.
cdef int64 MAX_PAGE = 1 << 40
# Far from where sums of them would wrap.
cdef int64 MAX_TOKENS = 1 << 48


cdef class _Numbers:
    """Where the numbers of an array lie, as long as this lives: found in a third of the time of a memoryview.

    Raises TypeError for anything but an array of int64, BufferError or ValueError where they do not lie one after another.
    """

    cdef Py_buffer view
    cdef int64* at
    cdef Py_ssize_t size

    def __cinit__(self, object array, int flags=PyBUF_SIMPLE):
        if type(array) is not _ndarray or array.dtype is not _INT64 or array.ndim != 1:
            raise TypeError(array)
        PyObject_GetBuffer(array, &self.view, flags)
        self.at, self.size = <int64*>self.view.buf, self.view.len // 8

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


def page_ids(object pages):
    """A copy of the page ids, as an array of whatever they are; a list of ints is the usual case."""
    cdef Py_ssize_t i, n
    cdef _Numbers out
    if not PyList_CheckExact(pages) or not PyList_GET_SIZE(pages):
        return np.array(pages)
    n = PyList_GET_SIZE(pages)
    found = _empty(n, _INT64)
    out = _Numbers(found, PyBUF_WRITABLE)
    for i in range(n):
        item = <object>PyList_GET_ITEM(pages, i)
        if not PyLong_CheckExact(item):
            return np.array(pages)
        try:
            out.at[i] = PyLong_AsLongLong(item)
        except OverflowError:
            return np.array(pages)
    return found


def bounds(const int64[:] values):
    """The least and the greatest of some numbers, at least one."""
    cdef int64 low = values[0], high = values[0], value
    cdef Py_ssize_t i
    for i in range(1, values.shape[0]):
        value = values[i]
        if value < low:
            low = value
        elif value > high:
            high = value
    return low, high


def run_bounds(const int64[:] first, const int64[:] counts):
    """The least and the greatest of some runs of numbers, none of them empty, at least one."""
    cdef int64 low = first[0], high = first[0], last
    cdef Py_ssize_t i
    for i in range(first.shape[0]):
        last = first[i] + (counts[i] - 1)
        if first[i] < low:
            low = first[i]
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


def ordered(src, dst):
    """Pairs of pages in the order of the source; how many continue the pair before on both sides, and how many do at the source."""
    cdef const int64[:] src_page = src, dst_page = dst
    cdef Py_ssize_t i, n = src_page.shape[0], joined = 0, src_joined = 0
    cdef int64 most = 0
    cdef Pair* pairs
    cdef int64[::1] new_src, new_dst
    cdef bint ascends = True
    for i in range(1, n):
        if src_page[i] < src_page[i - 1]:
            ascends = False
            break
    if not ascends:
        found = _empty((2, n), _INT64)
        new_src, new_dst = found[0], found[1]
        pairs = <Pair*>PyMem_Malloc(2 * n * sizeof(Pair))
        if pairs == NULL:
            raise MemoryError
        try:
            for i in range(n):
                pairs[i].src, pairs[i].dst = src_page[i], dst_page[i]
                if src_page[i] < 0:
                    raise ValueError(f"page {src_page[i]}")
                if src_page[i] > most:
                    most = src_page[i]
            _sort(pairs, pairs + n, n, most)
            for i in range(n):
                new_src[i], new_dst[i] = pairs[i].src, pairs[i].dst
        finally:
            PyMem_Free(pairs)
        src, dst = found[0], found[1]
        src_page, dst_page = new_src, new_dst
    for i in range(1, n):
        if src_page[i] == src_page[i - 1] + 1:
            src_joined += 1
            joined += dst_page[i] == dst_page[i - 1] + 1
    return src, dst, joined, src_joined


def runs(const int64[:] src, const int64[:] dst, int64 most_pages):
    """Source page, destination page and length of every run that continues on both sides; each `most_pages`th pair begins one."""
    cdef Py_ssize_t i, n = src.shape[0], count = 0
    cdef int64[:, ::1] out
    for i in range(n):
        if i == 0 or i % most_pages == 0 or src[i] != src[i - 1] + 1 or dst[i] != dst[i - 1] + 1:
            count += 1
    found = _empty((3, count), _INT64)
    out = found
    count = -1
    for i in range(n):
        if i == 0 or i % most_pages == 0 or src[i] != src[i - 1] + 1 or dst[i] != dst[i - 1] + 1:
            count += 1
            out[0, count], out[1, count], out[2, count] = src[i], dst[i], 1
        else:
            out[2, count] += 1
    return found[0], found[1], found[2]


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
        if not stream.src.has(src_page.at[0]) or not self._take(seen, stream.dst, dst_page.at[0], 0):
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
                if not stream.src.has(src_page.at[page - src_first]):
                    return None
                if not self._take(seen, stream.dst, dst_page.at[page - dst_first], page - dst_first):
                    return None
            start = max(end, start)
            if stop <= start:
                continue
            end = stop
            low, high = (start + size - 1) // size, stop // size
            if high > low:
                src_found.append(src.pages[low - src_first : high - src_first])
                dst_found.append(dst.pages[low - dst_first : high - dst_first])
            for edge in range(2):
                first, last = (high * size, stop) if edge else (start, low * size)
                if low > high:  # inside one page
                    first, last = start, (start if edge else stop)
                if last > first:
                    page = first // size
                    parts.append(
                        (
                            (first - page * size, first - page * size, last - first),
                            src_page.at[page - src_first],
                            dst_page.at[page - dst_first],
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


def frame_rows(tuple entries, tuple stride_bytes, tuple devices, tuple pages, uint64 cost_bytes):
    """The entries of a frame, one by one for some runs of pages, with what all before each cost beside its bytes."""
    cdef const uint64[:] local_address = entries[0], remote_address = entries[1], length_bytes = entries[2]
    cdef const int64[:] local_page = pages[0], remote_page = pages[1], run_pages = pages[2]
    cdef uint64 local_stride_bytes = stride_bytes[0], remote_stride_bytes = stride_bytes[1]
    cdef uint64 local_device = devices[0], remote_device = devices[1], length, total = 0
    cdef Py_ssize_t entry, run, num_entries = length_bytes.shape[0], num_runs = local_page.shape[0], row = 0
    cdef uint64[:, ::1] local, remote
    cdef uint64[::1] cost
    local_rows, remote_rows = _empty((num_entries * num_runs, 3), _UINT64), _empty((num_entries * num_runs, 3), _UINT64)
    before = _empty(num_entries * num_runs + 1, _UINT64)
    local, remote, cost = local_rows, remote_rows, before
    for entry in range(num_entries):
        for run in range(num_runs):
            length = length_bytes[entry] * <uint64>run_pages[run]
            local[row, 0] = local_address[entry] + <uint64>local_page[run] * local_stride_bytes
            remote[row, 0] = remote_address[entry] + <uint64>remote_page[run] * remote_stride_bytes
            local[row, 1] = remote[row, 1] = length
            local[row, 2], remote[row, 2] = local_device, remote_device
            cost[row] = total
            total += length + cost_bytes
            row += 1
    cost[row] = total
    return local_rows, remote_rows, before


def frame_copies(tuple entries, tuple stride_bytes, tuple pages):
    """The entries of a frame, one by one for some runs of pages: addresses of both sides and lengths."""
    cdef const int64[:] src_start = entries[0], dst_start = entries[1], length = entries[2]
    cdef const int64[:] src_page = pages[0], dst_page = pages[1], run_pages = pages[2]
    cdef int64 src_stride_bytes = stride_bytes[0], dst_stride_bytes = stride_bytes[1]
    cdef Py_ssize_t entry, run, num_entries = length.shape[0], num_runs = src_page.shape[0], row = 0
    cdef int64[:, ::1] out
    found = _empty((3, num_entries * num_runs), _INT64)
    out = found
    for entry in range(num_entries):
        for run in range(num_runs):
            out[0, row] = src_start[entry] + src_page[run] * src_stride_bytes
            out[1, row] = dst_start[entry] + dst_page[run] * dst_stride_bytes
            out[2, row] = length[entry] * run_pages[run]
            row += 1
    return found[0], found[1], found[2]


def frame_indices(const int64[:] local_page, const int64[:] remote_page, tuple counts, Py_ssize_t first, Py_ssize_t stop):
    """Pieces `[first, stop)` of a frame as indices of both sides, entry after entry."""
    cdef Py_ssize_t piece, num_pages = local_page.shape[0], page = first % num_pages
    cdef int64 local_count = counts[0], remote_count = counts[1]
    cdef int64 local_base = first // num_pages * local_count, remote_base = first // num_pages * remote_count
    cdef int[::1] local, remote
    local_index, remote_index = _empty(stop - first, _INT32), _empty(stop - first, _INT32)
    local, remote = local_index, remote_index
    for piece in range(stop - first):
        local[piece] = <int>(local_base + local_page[page])
        remote[piece] = <int>(remote_base + remote_page[page])
        page += 1
        if page == num_pages:
            page = 0
            local_base += local_count
            remote_base += remote_count
    return local_index, remote_index


def piece_rows(tuple pieces, tuple devices, uint64 cost_bytes):
    """Pieces as rows of both sides, with what all before each cost beside their bytes, and the longest."""
    cdef const uint64[:] local_address = pieces[0], remote_address = pieces[1], length_bytes = pieces[2]
    cdef uint64 local_device = devices[0], remote_device = devices[1], total = 0, longest = 0
    cdef Py_ssize_t row, n = length_bytes.shape[0]
    cdef uint64[:, ::1] local, remote
    cdef uint64[::1] cost
    local_rows, remote_rows, before = _empty((n, 3), _UINT64), _empty((n, 3), _UINT64), _empty(n + 1, _UINT64)
    local, remote, cost = local_rows, remote_rows, before
    for row in range(n):
        local[row, 0], remote[row, 0] = local_address[row], remote_address[row]
        local[row, 1] = remote[row, 1] = length_bytes[row]
        local[row, 2], remote[row, 2] = local_device, remote_device
        cost[row] = total
        total += length_bytes[row] + cost_bytes
        if length_bytes[row] > longest:
            longest = length_bytes[row]
    cost[n] = total
    return local_rows, remote_rows, before, longest


def reach(const uint64[:] address, const uint64[:] length_bytes):
    """The first byte of any piece and the last of any, at least one piece."""
    cdef uint64 low = address[0], high = 0, last
    cdef Py_ssize_t i
    for i in range(address.shape[0]):
        last = address[i] + (length_bytes[i] - 1)
        if address[i] < low:
            low = address[i]
        if last > high:
            high = last
    return low, high


def slot_reads(const int64[:, :] src_page, tuple boxes, tuple sizes_bytes, const int64[:] bases, Py_ssize_t fields_each):
    """The boxes of every slot, those that continue on both sides joined, for every field."""
    cdef const int64[:] src_offset = boxes[0], slot_offset = boxes[1], length = boxes[2]
    cdef int64 stride_bytes = sizes_bytes[0], slot_bytes = sizes_bytes[1], source, place, batch_bytes
    cdef Py_ssize_t slot, box, field, row, num_slots = src_page.shape[0], num_boxes = src_offset.shape[0]
    cdef Py_ssize_t num_fields = bases.shape[0], count = -1, at
    cdef int64[:, ::1] one, out
    found = _empty((3, num_slots * num_boxes), _INT64)
    one = found
    for slot in range(num_slots):
        for box in range(num_boxes):
            # All boxes of a slot lie in one page, or each in its own.
            source = src_page[slot, box if src_page.shape[1] > 1 else 0] * stride_bytes + src_offset[box]
            place = slot * slot_bytes + slot_offset[box]
            if count >= 0 and source == one[0, count] + one[2, count] and place == one[1, count] + one[2, count]:
                one[2, count] += length[box]
            else:
                count += 1
                one[0, count], one[1, count], one[2, count] = source, place, length[box]
    count += 1
    written = _empty((3, num_fields * count), _INT64)
    out = written
    batch_bytes = num_slots * slot_bytes
    at = 0
    for field in range(num_fields):
        for row in range(count):
            out[0, at] = bases[field] + one[0, row]
            out[1, at] = field % fields_each * batch_bytes + one[1, row]
            out[2, at] = one[2, row]
            at += 1
    return written[0], written[1], written[2], count


def shifted(const int64[:] values, list counts, list by):
    """So many of the values, one group after another, each greater by its group's number."""
    cdef Py_ssize_t group, at = 0, i, n = values.shape[0], count
    cdef int64 more
    cdef int64[::1] out
    found = _empty(n, _INT64)
    out = found
    for group in range(len(counts)):
        count, more = counts[group], by[group]
        if count < 0 or at + count > n:
            raise ValueError(f"{counts} of {n}")
        for i in range(at, at + count):
            out[i] = values[i] + more
        at += count
    if at != n:
        raise ValueError(f"{counts} of {n}")
    return found


def are_pieces(const int64[:] local, const int64[:] remote, const int64[:] length_bytes):
    """Whether there is a length for every address of both sides, no address is negative, and none is empty."""
    cdef Py_ssize_t i, n = length_bytes.shape[0]
    if local.shape[0] != n or remote.shape[0] != n:
        return False
    for i in range(n):
        if local[i] < 0 or remote[i] < 0 or length_bytes[i] < 1:
            return False
    return True
