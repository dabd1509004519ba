"""Texts between the ranks of a `torch.distributed` group. torch is imported when it is needed."""

from __future__ import annotations

from typing import Any

from kvframe.errors import MissingDependencyError, UsageError


def rank_in(group: Any) -> int:
    """This process's rank in a process group, None for all ranks.

    Raises:
        MissingDependencyError: torch is not installed.
        UsageError: there is no process group, or this process is not in it.
    """
    try:
        from torch import distributed
    except ModuleNotFoundError as error:
        raise MissingDependencyError(module="kvframe.planning.agree", needs="torch", extra="torch") from error
    if not distributed.is_available() or not distributed.is_initialized():
        rule = "there is no process group: start with torchrun and call torch.distributed.init_process_group"
        raise UsageError(option="agree", value=None, rule=rule)
    rank = int(distributed.get_rank(group))
    if rank < 0:
        raise UsageError(option="agree", value=None, rule="this process is not in the process group")
    return rank


def gather(text: str, group: Any) -> list[str]:
    """Every rank's text, in the order of ranks; every rank must call it, and waits for the others.

    Texts travel as bytes: nothing that another rank sends is ever unpickled.
    """
    import torch
    from torch import distributed

    cuda = distributed.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([own.numel()], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(sizes, size, group=group)
    longest = max(int(found) for found in sizes)
    padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
    texts = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(texts, padded, group=group)
    return [
        found[: int(length)].cpu().numpy().tobytes().decode()
        for found, length in zip(texts, sizes, strict=True)
    ]
