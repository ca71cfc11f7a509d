"""Hands out cache blocks to requests, shares prefixes by reference count, and refuses every misuse by name.

Block ids are plain Python integers; nothing here touches a tensor. Every operation either happens whole or leaves the
pool as it was. With ``block_size = 1`` a block is a token slot, and a row of a ``BlockTable`` is what SGLang calls
``req_to_token``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from attn_select.errors import AttnSelectError, ConfigError, show
from attn_select.runtime.integers import integer, size

RequestId = Hashable


class PoolError(AttnSelectError, RuntimeError):
    """A misuse of a pool: names the request and what the pool holds. The pool is unchanged.

    Attributes:
        request: the request that the call was about.
    """

    code = "pool-misuse"

    def __init__(self, message: str, request: RequestId, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.request = request


class OutOfBlocksError(PoolError):
    """The pool has fewer free blocks than a request needs. Free or preempt another request, then ask again."""

    code = "out-of-blocks"


class CountedPool:
    """A fixed number of ids ``0 .. count - 1`` with reference counts; the first ``kept`` of them nobody's."""

    def __init__(self, count: int, kept: int = 0) -> None:
        # A stack: what is freed last is handed out first, while its lines may still be in cache.
        self._free = list(range(count - 1, kept - 1, -1))
        self._references = [0] * count

    def _take(self, count: int) -> list[int]:
        taken = [self._free.pop() for _ in range(count)]
        for each in taken:
            self._references[each] = 1
        return taken

    def _release(self, ids: Iterable[int]) -> list[int]:
        """Let go of ids in this order; return those that are free now."""
        released = []
        for each in ids:
            self._references[each] -= 1
            if self._references[each] == 0:
                released.append(each)
        self._free += released
        return released


class BlockPool(CountedPool):
    """A fixed number of cache blocks with reference counts.

    Args:
        num_blocks: blocks in the pool, ids ``0 .. num_blocks - 1``.
        block_size: tokens per block.
        null_block: whether block 0 is no request's, as in vLLM. Some kernels read slot 0 where a sparse layer's indices
            name none (-1) and weigh it with 0, which does not hide a NaN: the plan's notes say which.

    Raises:
        ConfigError: one of the first two is no integer from 1, or there is no block beside the null block.
    """

    def __init__(self, num_blocks: int, block_size: int, *, null_block: bool = False) -> None:
        self.num_blocks, self.block_size = size("num_blocks", num_blocks), size("block_size", block_size)
        if null_block and self.num_blocks < 2:
            text = f"num_blocks = {num_blocks} with null_block = True: accepted are integers from 2"
            raise ConfigError(text, fields=["num_blocks"])
        super().__init__(self.num_blocks, int(null_block))
        self._blocks: dict[RequestId, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` tokens take.

        Raises:
            ConfigError: ``num_tokens`` is no integer from 0.
        """
        return -(-_tokens(num_tokens) // self.block_size)

    def blocks(self, request: RequestId) -> tuple[int, ...]:
        """Return the block ids of a request, in the order of its tokens.

        Raises:
            PoolError: the request holds nothing: it was never allocated, or already freed.
        """
        return tuple(self._blocks_of(request, "blocks"))

    def allocate(self, request: RequestId, num_tokens: int) -> tuple[int, ...]:
        """Give a request, new or known, room for ``num_tokens`` tokens in all. Returns the block ids added.

        Raises:
            ConfigError: ``num_tokens`` is no integer from 0.
            OutOfBlocksError: too few blocks are free; the request keeps what it had.
        """
        owned = self._blocks.get(request, [])
        missing = -(-_tokens(num_tokens, request) // self.block_size) - len(owned)
        if missing > len(self._free):
            raise OutOfBlocksError(
                f"request {request!r} needs {missing} more blocks for {num_tokens} tokens; "
                f"{len(self._free)} of {self.num_blocks} are free",
                request,
                hint="free or preempt another request, or allocate a larger pool",
            )
        added = self._take(missing)
        self._blocks[request] = owned + added
        return tuple(added)

    def share_prefix(self, source: RequestId, request: RequestId, num_tokens: int) -> tuple[int, ...]:
        """Start a request on another one's first ``num_tokens`` tokens in the cache. Returns the shared block ids.

        Only whole blocks can be shared, since the requests write different tokens behind the prefix.

        Raises:
            ConfigError: ``num_tokens`` is not a positive multiple of the block size.
            PoolError: ``source`` holds fewer tokens, or ``request`` already holds blocks.
        """
        count = self.blocks_for(num_tokens)
        if not count or count * self.block_size != num_tokens:
            raise ConfigError(
                f"num_tokens = {num_tokens} to share must be a positive multiple of the block size {self.block_size}",
                fields=["num_tokens"],
            )
        shared = self._blocks_of(source, "share_prefix")[:count]
        if len(shared) * self.block_size < num_tokens:
            capacity = len(shared) * self.block_size
            raise PoolError(
                f"request {source!r} holds {capacity} tokens, fewer than the {num_tokens} to share with {request!r}",
                source,
            )
        if request in self._blocks:
            raise PoolError(
                f"request {request!r} already holds {len(self._blocks[request])} blocks: "
                "share a prefix before it allocates",
                request,
            )
        # Nothing below here may fail: the pool changes whole or not at all.
        for block in shared:
            self._references[block] += 1
        self._blocks[request] = list(shared)
        return tuple(shared)

    def free(self, request: RequestId) -> tuple[int, ...]:
        """Let go of all blocks of a request. Returns the block ids that are free now.

        Raises:
            PoolError: the request holds nothing (a double free).
        """
        # Reversed, so that the request's first block is handed out first again.
        released = self._release(reversed(self._blocks_of(request, "free")))
        del self._blocks[request]
        return tuple(reversed(released))

    def requests(self) -> Sequence[RequestId]:
        """Return the requests that hold blocks, in the order in which they came."""
        return tuple(self._blocks)

    def _blocks_of(self, request: RequestId, call: str) -> list[int]:
        try:
            return self._blocks[request]
        except KeyError:
            raise PoolError(
                f"{call}: request {request!r} holds no blocks: it was never allocated or is already freed",
                request,
                hint=f"requests that hold blocks: {', '.join(map(repr, list(self._blocks)[:8])) or 'none'}",
            ) from None


def _tokens(num_tokens: object, *request: RequestId) -> int:
    """Return a number of tokens as an int; raise ConfigError, which names the request, where it is none."""
    found = integer(num_tokens)
    if found is None or found < 0:
        whose = f" for request {request[0]!r}" if request else ""
        text = f"num_tokens = {show(num_tokens)}{whose}: accepted are integers from 0"
        raise ConfigError(text, fields=["num_tokens"])
    return found
