"""Which SGLang is installed, and how it spells what changes from version to version."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from importlib.util import find_spec

from sgl_blend.errors import UnsupportedError

TESTED_VERSIONS = ("0.5.17", "0.5.21", "0.5.23")


@dataclass(frozen=True, slots=True)
class Features:
    """Which of its spellings an SGLang uses; code paths follow these, never the version.

    Attributes:
        version: For messages only.
        match_has_slots: A tree match names its slots, and a request its prefix slots; otherwise both
            give a length, and slots are read off the path to a node.
        keys_have_salt: A tree key has a cache salt beside the extra key; otherwise the extra key is
            the whole namespace.
        extend_is_range: A request names its prefill step as a range; otherwise by its end.
        kv_has_owner: A request's KV record tells whether it holds slots, and how many of them are
            the tree's; otherwise the request does.
        context_takes_batch: A forward context wants the batch too.
    """

    version: str
    match_has_slots: bool
    keys_have_salt: bool
    extend_is_range: bool
    kv_has_owner: bool
    context_takes_batch: bool


@functools.cache
def features() -> Features:
    """Probe the installed SGLang.

    Raises:
        UnsupportedError: It has none of the spellings that this module knows; the message names
            what is missing.
    """
    import sglang
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.mem_cache.base_prefix_cache import (
        BasePrefixCache,
        IncLockRefResult,
        MatchResult,
    )
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.model_executor import forward_context
    from sglang.srt.model_executor.model_runner import ModelRunner

    has_slots = "device_indices" in MatchResult._fields
    has_lengths = "device_prefix_len" in MatchResult._fields
    key_slots = RadixKey.__slots__
    wanted = {
        "MatchResult.device_indices or .device_prefix_len": has_slots or has_lengths,
        "BasePrefixCache.path_device_indices": has_slots
        or hasattr(BasePrefixCache, "path_device_indices"),
        "IncLockRefResult.to_dec_params": hasattr(IncLockRefResult, "to_dec_params"),
        "RadixKey.extra_key": "extra_key" in key_slots,
        "PrefillAdder.add_chunked_req": hasattr(PrefillAdder, "add_chunked_req"),
        "ModelRunner.forward_split_prefill": hasattr(ModelRunner, "forward_split_prefill"),
        "memory_pool.KVWriteLoc": hasattr(memory_pool, "KVWriteLoc"),
    }
    missing = [name for name, there in wanted.items() if not there]
    if missing:
        raise UnsupportedError(
            f"enable_blend: SGLang {sglang.__version__} has no {', '.join(missing)}; "
            f"supported are {', '.join(TESTED_VERSIONS)}"
        )
    return Features(
        version=sglang.__version__,
        match_has_slots=has_slots,
        keys_have_salt="cache_salt" in key_slots,
        extend_is_range=hasattr(Req, "set_extend_range"),
        kv_has_owner=hasattr(ReqKvInfo, "holds_kv"),
        context_takes_batch="forward_batch"
        in inspect.signature(forward_context.forward_context).parameters,
    )


def check_version(*, allow_untested: bool) -> Features:
    """Probe the installed SGLang and refuse a version that was never tested, unless that is wanted.

    Raises:
        UnsupportedError: The version is not known, or lacks what blending needs.
    """
    found = features()
    if found.version not in TESTED_VERSIONS and not allow_untested:
        raise UnsupportedError(
            f"enable_blend: SGLang {found.version} was not tested; use one of "
            f"{', '.join(TESTED_VERSIONS)}, or add --blend-allow-untested"
        )
    return found


def targets_since_0_5_21(target: str) -> list[str]:
    """Return what is to be hooked, or nothing on 0.5.17, which has a tree of its own for HiCache."""
    return [] if find_spec("sglang.srt.mem_cache.hiradix_cache") is not None else [target]
