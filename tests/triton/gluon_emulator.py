"""Runs warp-specialised Gluon kernels in Python, where there is no GPU: :func:`launch`.

Triton's interpreter does not take Gluon. Here a kernel's functions run as the Python that they are, with PyTorch's
tensors for blocks. Each partition of ``gl.warp_specialize`` is a thread, and only one of them runs at a time. Barriers
count arrivals and bytes by phases, as the hardware does: what waits for a phase that nobody completes is an error.

What it shows: indices, masks, formulas, whether partitions meet in the same order, results of products that are read
before they are waited for (NaN), and shared memory that is written while a product reads it. What it does not show:
layouts, which Triton's compiler checks, and fences between the proxies of memory.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction


class DeadlockError(RuntimeError):
    """Every partition waits."""


# ---- blocks --------------------------------------------------------------------------------------------------------


class Block(torch.Tensor):
    """A block of values, whose layout is nobody's business here."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(layout=None)

    # Blocks are values: a name that is assigned to means another block.
    __iadd__, __isub__ = torch.Tensor.__add__, torch.Tensor.__sub__
    __imul__, __iand__ = torch.Tensor.__mul__, torch.Tensor.__and__


def block(x: torch.Tensor) -> Block:
    return x.as_subclass(Block)


class Pointer:
    """An address in a tensor's storage: elements from its first."""

    def __init__(self, x: torch.Tensor, offset: Any = 0) -> None:
        self.x, self.offset = x, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.x, self.offset + more)

    @property
    def memory(self) -> torch.Tensor:
        return torch.as_strided(self.x, (self.x.untyped_storage().nbytes() // self.x.element_size(),), (1,), 0)


def _places(pointer: Pointer, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Which elements a load or store means, and which of them its mask lets through, all inside of the tensor."""
    at = torch.as_tensor(pointer.offset).long()
    inside = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.broadcast_to(at.shape)
    meant = at[inside]
    assert not bool(((meant < 0) | (meant >= pointer.memory.numel())).any()), "an address outside of the tensor"
    return at, inside


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Block:
    at, inside = _places(pointer, mask)
    found = torch.full(at.shape, other, dtype=pointer.x.dtype)
    found[inside] = pointer.memory[at[inside]]
    return block(found)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, inside = _places(pointer, mask)
    pointer.memory[at[inside]] = torch.as_tensor(value).broadcast_to(at.shape)[inside].to(pointer.x.dtype)


# ---- partitions and barriers ---------------------------------------------------------------------------------------


class Turns:
    """Lets one of several threads run at a time; another takes over when it waits or ends."""

    def __init__(self) -> None:
        self._one = threading.Condition()
        self._running = 0
        self._awaited: list[Callable[[], bool]] = []
        self._failed: BaseException | None = None

    def wait_until(self, true: Callable[[], bool]) -> None:
        self._awaited.append(true)
        while not true():
            if (
                self._failed is None
                and len(self._awaited) == self._running
                and not any(each() for each in self._awaited)
            ):
                self._failed = DeadlockError("every partition waits for a phase that none completes")
                self._one.notify_all()
            if self._failed is not None:
                raise DeadlockError("another partition failed")
            self._one.wait()
        self._awaited.remove(true)

    def changed(self) -> None:
        """To be called after what makes a thread's condition true."""
        self._one.notify_all()

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        def begin(part: Callable[[], None]) -> None:
            with self._one:
                try:
                    part()
                except BaseException as error:
                    self._failed = self._failed or error
                self._running -= 1
                self._one.notify_all()

        self._running = len(parts)
        threads = [threading.Thread(target=begin, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise self._failed


class Barrier:
    """Phases that end when all have arrived and all bytes are there. ``wait(p)`` passes once one of parity p ended."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.count, self.phase, self.pending, self.bytes = turns, 0, 0, 0, 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def wait(self, parity: Any) -> None:
        self.turns.wait_until(lambda: self.phase & 1 != int(parity))

    def arrive(self, count: int = 1) -> None:
        assert self.count > 0, "a barrier that was not initialised"
        assert self.pending >= count, "more arrivals in a phase than the barrier was initialised with"
        self.pending -= count
        self._end()

    def expect(self, bytes_: Any) -> None:
        self.bytes += int(bytes_)
        self.arrive()

    def arrived(self, bytes_: int) -> None:
        self.bytes -= bytes_
        self._end()

    def _end(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            self.turns.changed()


# ---- shared memory -------------------------------------------------------------------------------------------------


class Shared:
    """Shared memory. A view of it is what kernels index, reshape and permute."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    shape = property(lambda self: list(self.x.shape))
    dtype = property(lambda self: self.x.dtype)

    def index(self, i: Any) -> Shared:
        return Shared(self.x[int(i)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.x.view(*shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.x.permute(*order))

    def store(self, value: torch.Tensor) -> None:
        self.x.copy_(value)


class Barriers:
    def __init__(self, count: int, turns: Turns) -> None:
        self.all = [Barrier(turns) for _ in range(count)]
        self.shape = [count, 1]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


class Descriptor:
    """A tensor (B, H, S, D) that is fetched by tiles of one head: what lies outside is zero."""

    def __init__(self, x: torch.Tensor, rows: int, columns: int) -> None:
        self.x, self.tile, self.dtype, self.layout = x, (rows, columns), x.dtype, None

    def fetch(self, at: Sequence[Any], barrier: Barrier, into: Shared) -> None:
        b, h, row, column = (int(i) for i in at)
        rows, columns = self.tile
        assert tuple(into.shape[-2:]) == self.tile, "the tile of the descriptor and that in shared memory differ"
        found = torch.zeros(rows, columns, dtype=self.dtype)
        part = self.x[b, h, max(row, 0) : row + rows, column : column + columns]
        found[max(-row, 0) : max(-row, 0) + part.shape[0], : part.shape[1]] = part
        into.x.copy_(found.view(into.x.shape))
        barrier.arrived(rows * columns * found.element_size())


# ---- the language --------------------------------------------------------------------------------------------------


class Products(threading.local):
    """The asynchronous products of a partition that are in flight, oldest first."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []

    def issue(
        self, a: Any, b: Any, acc: torch.Tensor, *, use_acc: bool = True, is_async: bool = False, **_: Any
    ) -> Block:
        """``acc + a · b``, NaN until it has been waited for."""
        read = [x for x in (a, b) if isinstance(x, Shared)]
        before = [x.x.clone() for x in read]
        result = block(torch.full(acc.shape, torch.nan))

        def end() -> None:
            for x, old in zip(read, before, strict=True):
                assert torch.equal(x.x.nan_to_num(), old.nan_to_num()), "a product reads what is written meanwhile"
            left, right = ((x.x if isinstance(x, Shared) else x).float().as_subclass(torch.Tensor) for x in (a, b))
            result.copy_(acc + left @ right if use_acc else left @ right)

        self.pending.append(end)
        if not is_async:
            self.wait()
        return result

    def wait(self, pending: int = 0, deps: Sequence[Any] = ()) -> Any:
        """End all products but the `pending` newest."""
        while len(self.pending) > int(pending):
            self.pending.pop(0)()
        return deps[0] if len(deps) == 1 else tuple(deps)


def _ex2(asm: str, constraints: str, args: Sequence[torch.Tensor], **_: Any) -> torch.Tensor:
    assert asm.startswith("ex2.approx"), f"no emulation of {asm!r}"
    return torch.exp2(args[0])


def _plain(x: Any) -> Any:
    return tuple(map(_plain, x)) if isinstance(x, tuple) else x


def _language(program: int, programs: int, turns: Turns) -> Any:
    """What a kernel calls ``gl``."""
    layout = lambda *_, **__: None  # noqa: E731

    def allocate(dtype: Any, shape: Sequence[int], kind: Any = None) -> Any:
        return Barriers(shape[0], turns) if dtype is torch.int64 else Shared(torch.full(shape, torch.nan, dtype=dtype))

    def specialize(parts: Sequence[tuple[Callable[..., Any], tuple]], *_: Any) -> None:
        turns.run([lambda function=f, given=a: function(*_plain(given)) for f, a in parts])

    gl = types.SimpleNamespace(
        program_id=lambda axis: block(torch.tensor(program)), num_programs=lambda axis=0: programs,
        arange=lambda start, end, layout=None: block(torch.arange(start, end)),
        full=lambda shape, value, dtype, layout=None: block(torch.full(shape, value, dtype=dtype)),
        where=lambda c, x, y: torch.where(torch.as_tensor(c), x, y),
        maximum=lambda x, y: torch.maximum(torch.as_tensor(x), torch.as_tensor(y)),
        minimum=lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)),
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), log2=torch.log2,
        load=load, store=store, convert_layout=lambda x, layout: x, static_range=range,
        inline_asm_elementwise=_ex2, allocate_shared_memory=allocate, warp_specialize=specialize,
        SliceLayout=layout, DotOperandLayout=layout, NVMMADistributedLayout=layout,
        constexpr=lambda x: x, int64=torch.int64, float32=torch.float32,
    )  # fmt: skip
    return gl


def _barrier_module() -> Any:
    return types.SimpleNamespace(
        MBarrierLayout=lambda: None, init=lambda b, count: b.init(count), wait=lambda b, parity: b.wait(parity),
        arrive=lambda b, count=1: b.arrive(count), expect=lambda b, bytes_: b.expect(bytes_),
    )  # fmt: skip


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run every program of a kernel, one after another. Tensors become pointers.

    Args:
        kernel: the Gluon function, as its module has it.
        programs: how many.
        args: its arguments, with a :class:`Descriptor` for a tensor descriptor.
        constants: its constants.

    Raises:
        DeadlockError: every partition of a program waits.
    """
    given = [Pointer(x) if isinstance(x, torch.Tensor) else x for x in args]
    for program in range(programs):
        _functions(kernel, program, programs)(*given, **constants)


def _functions(kernel: JITFunction, program: int, programs: int) -> Callable[..., Any]:
    """The kernel as a Python function, in whose globals the language is the emulated one."""
    turns, products = Turns(), Products()
    fetch = lambda descriptor, at, barrier, into: descriptor.fetch(at, barrier, into)  # noqa: E731
    own: dict[str, Any] = {
        "gl": _language(program, programs, turns), "mbarrier": _barrier_module(), "_fetch_tile": fetch,
        "warpgroup_mma": products.issue, "warpgroup_mma_wait": products.wait, "fence_async_shared": lambda: None,
    }  # fmt: skip
    scopes: dict[int, dict[str, Any]] = {}

    def emulated(jitted: JITFunction) -> Callable[..., Any]:
        source = jitted.fn
        if id(source.__globals__) not in scopes:
            scope = scopes[id(source.__globals__)] = dict(source.__globals__)
            for name, value in source.__globals__.items():
                if isinstance(value, JITFunction):
                    scope[name] = emulated(value)
                elif type(value).__name__ == "constexpr":
                    scope[name] = value.value
            scope |= own
        return types.FunctionType(
            source.__code__, scopes[id(source.__globals__)], source.__name__, source.__defaults__, source.__closure__
        )

    return emulated(kernel)


# ---- host code -----------------------------------------------------------------------------------------------------


class EmulatedLaunch:
    """Stands for a :class:`triton_impl.runtime.descriptor_launch.DescriptorLaunch`."""

    def __init__(self, kernel: Any, programs: int, describe: Sequence[Any], arguments: tuple, options: dict) -> None:
        self.kernel, self.programs, self.describe, self.arguments = kernel, programs, describe, arguments

    def __call__(self, *tensors: torch.Tensor) -> None:
        given = [
            x if d is None else Descriptor(x, *d.block_shape[-2:]) for d, x in zip(self.describe, tensors, strict=True)
        ]
        launch(self.kernel, self.programs, *given, *self.arguments)


class EveryConfiguration:
    """Stands for an :class:`triton_impl.runtime.autotuner.Autotuner`: all are run, and must give about the same."""

    def __init__(self, results: int) -> None:
        self.results = results  # how many tensors a launch writes, the first ones
        self.ran: list[triton.Config] = []

    def launch(self, key: tuple, configs: Sequence[triton.Config], make: Any, *tensors: torch.Tensor) -> Any:
        found = None
        for config in configs:
            run = make(config)
            run(*tensors)
            self.ran.append(config)
            results = [x.clone() for x in tensors[: self.results]]
            for x, y in zip(results, found or results, strict=True):
                torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2, equal_nan=True)
            found = results
        return run
