"""Run a function on several gloo ranks, on worker processes that tests share.

Starting a rank costs seconds (it imports torch and Lightning), so the workers of one world size
live as long as the test session. Each is told its rank through torchelastic's variables, exactly
as under torchrun, and Lightning joins the process group it finds.
"""

import importlib
import os
import pickle
import traceback
import warnings
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from typing import Any

from zero_strategy.experiments.benchmarks.launch import free_port, rank_variables


class RankError(AssertionError):
    """A function failed on some rank; holds the traceback that says most."""


class Ranks:
    """Worker processes that form one process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        port = free_port()
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, port, theirs), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        return all(p.is_alive() for p in self._processes)

    def run(self, function: Any, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call a module-level function on every rank; results in rank order."""
        call = pickle.dumps((function.__module__, function.__qualname__, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        results, failure = [], None
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(5.0 if failure else timeout_s):
                failure = failure or f"rank {rank} did not answer within {timeout_s} s"
                continue
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ok, value = False, f"rank {rank} died"
            if not ok and (failure is None or _follows_another(failure)):
                failure = value
            results.append(value)
        if failure:
            self.close()
            raise RankError(failure)
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _follows_another(failure: str) -> bool:
    """Whether a rank failed because another one did, whose words say more."""
    return any(words in failure for words in ("Connection closed", "did not answer", " died"))


_pools: dict[int, Ranks] = {}


def ranks(world_size: int) -> Ranks:
    """The shared workers of a world size, started or replaced if need be."""
    pool = _pools.get(world_size)
    if pool is None or not pool.alive:
        pool = _pools[world_size] = Ranks(world_size)
    return pool


def close_all() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    os.environ.update(rank_variables(rank, world_size, port), OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    # A daemon may not start the workers of a DataLoader, and these end with it anyway.
    vars(current_process())["_config"]["daemon"] = False
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    while True:
        try:
            module, name, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            function = getattr(importlib.import_module(module), name)
            answer = (True, function(*args, **kwargs))
        except BaseException:  # noqa: BLE001 - the caller raises it
            answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
        pipe.send_bytes(pickle.dumps(answer))
